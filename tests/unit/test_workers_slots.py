"""Slots: integers only, so every property can be searched."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from workers.slots import OutOfSlots, Slots, SlotTable


class SlotsMachine(RuleBasedStateMachine):
    """Tables are made, grown and ended at random; no slot is ever held twice, and the count is conserved."""

    @initialize(pages=st.integers(1, 24), page_tokens=st.integers(1, 9))
    def begin(self, pages: int, page_tokens: int) -> None:
        self.slots = Slots(pages, page_tokens)
        self.live: list[SlotTable] = []

    @rule(tokens=st.integers(0, 120))
    def allocate(self, tokens: int) -> None:
        free = self.slots.free_tokens
        try:
            table = self.slots.allocate(tokens)
        except OutOfSlots:
            assert tokens > free
            assert self.slots.free_tokens == free
            return
        assert table.tokens >= tokens > table.tokens - self.slots.page_tokens or tokens == table.tokens == 0
        self.live.append(table)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), tokens=st.integers(0, 160))
    def extend(self, data: st.DataObject, tokens: int) -> None:
        table = data.draw(st.sampled_from(self.live))
        before, free = list(table.pages), self.slots.free_tokens
        try:
            self.slots.extend(table, tokens)
        except OutOfSlots:
            assert tokens > table.tokens + free
            assert list(table.pages) == before
            return
        assert list(table.pages[: len(before)]) == before
        assert table.tokens >= tokens

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        table = data.draw(st.sampled_from(self.live))
        self.live.remove(table)
        self.slots.free(table)
        with pytest.raises(ValueError, match="not live"):
            self.slots.free(table)

    @invariant()
    def conserved(self) -> None:
        if not hasattr(self, "slots"):
            return
        self.slots.check_integrity()
        held = [slot for table in self.live for slot in table.slots(0, table.tokens)]
        assert len(held) == len(set(held))
        assert len(held) + self.slots.free_tokens == self.slots.total_tokens


TestSlotsMachine = SlotsMachine.TestCase


@given(begin=st.integers(0, 39), length=st.integers(1, 40), fragmented=st.booleans())
def test_first_slot_says_exactly_whether_slots_are_consecutive(begin: int, length: int, fragmented: bool) -> None:
    """``first_slot`` is the first of ``slots`` where these are consecutive, and None where they are not."""
    slots = Slots(20, 4)
    if fragmented:
        odd = [slots.allocate(4) for _ in range(20)]
        for table in odd[::2]:
            slots.free(table)
    table = slots.allocate(40)
    end = min(begin + length, 40)
    wanted = table.slots(begin, end)
    assert wanted == [table.pages[position // 4] * 4 + position % 4 for position in range(begin, end)]
    consecutive = wanted == list(range(wanted[0], wanted[0] + len(wanted)))
    assert table.first_slot(begin, end) == (wanted[0] if consecutive else None)


def test_a_sequence_that_grows_into_free_room_stays_contiguous() -> None:
    """Growing takes the page right behind the last one when it is free."""
    slots = Slots(8, 4)
    table = slots.allocate(5)
    slots.extend(table, 30)
    assert list(table.pages) == list(range(8))


def test_a_freed_hole_that_fits_is_taken_before_the_large_rest() -> None:
    """The smallest run that fits is taken, so that long runs stay long."""
    slots = Slots(16, 1)
    first, _keep = slots.allocate(4), slots.allocate(1)
    slots.free(first)
    assert list(slots.allocate(3).pages) == [0, 1, 2]


def test_another_memorys_table_is_refused() -> None:
    """A table belongs to the slots that made it."""
    table = Slots(4, 4).allocate(4)
    with pytest.raises(ValueError, match="not live"):
        Slots(4, 4).extend(table, 8)


@pytest.mark.parametrize(("begin", "end"), [(-1, 3), (3, 3), (0, 9)])
def test_positions_outside_the_table_are_refused(begin: int, end: int) -> None:
    """Positions are checked before they become slots."""
    with pytest.raises(ValueError, match="outside"):
        Slots(2, 4).allocate(8).first_slot(begin, end)
