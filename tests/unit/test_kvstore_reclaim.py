"""The order in which segments go."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvstore.limits import MIB
from kvstore.reclaim import REWRITE_AHEAD_S, Action, SegmentUsage, Step, choose_victim, sweep_action
from kvstore.traffic import AGENT, CHAT, ClassRule, ClassRules

RULES = ClassRules(
    (
        ClassRule(AGENT, "agent", 3 * 86_400, priority=100),
        ClassRule(CHAT, "chat", 7 * 86_400, priority=200, floor_bytes=2 * MIB),
    )
)
FULL = SegmentUsage(1, AGENT, MIB, 1000, 1000, 0, 50, begun=1, busy=False)


def test_dead_segments_go_first() -> None:
    dead = FULL._replace(segment=2, class_byte=CHAT, alive_bytes=0, promise_until_s=99)
    assert choose_victim([FULL, dead], RULES) == Step(2, Action.FREE)


def test_sparse_segments_are_emptied_before_living_blocks_are_dropped() -> None:
    sparse = FULL._replace(segment=2, alive_bytes=499)
    half = FULL._replace(segment=3, alive_bytes=500)
    assert choose_victim([FULL, half, sparse], RULES) == Step(2, Action.MOVE_ALIVE)


def test_lower_priority_then_earlier_promise() -> None:
    chat = FULL._replace(segment=2, class_byte=CHAT, promise_until_s=1)
    later = FULL._replace(segment=3, promise_until_s=60)
    usages = [later, chat, FULL]
    assert choose_victim(usages, RULES) == Step(1, Action.FREE)
    assert choose_victim([chat, later], RULES) == Step(3, Action.FREE)
    assert choose_victim([FULL._replace(begun=2), FULL._replace(segment=3)], RULES) == Step(3, Action.FREE)


def test_a_class_is_evicted_down_to_its_floor_and_no_further() -> None:
    chats = [FULL._replace(segment=number, class_byte=CHAT) for number in (1, 2, 3)]
    assert choose_victim(chats, RULES) == Step(1, Action.FREE)
    assert choose_victim(chats[:2], RULES) is None


def test_a_class_beyond_its_ceiling_gives_way_first_however_dear() -> None:
    """Its own earliest promise, down to the ceiling and never below its floor; then the usual order. Lossless steps
    come before.
    """
    capped = ClassRules((RULES.rules[0], ClassRule(CHAT, "chat", 86_400, 200, 2 * MIB, ceiling_bytes=2 * MIB)))
    chats = [FULL._replace(segment=n, class_byte=CHAT, promise_until_s=90 - n) for n in (2, 3, 4)]
    assert choose_victim([FULL, *chats], RULES) == Step(1, Action.FREE)
    assert choose_victim([FULL, *chats], capped) == Step(4, Action.FREE)
    assert choose_victim([FULL, *chats[:2]], capped) == Step(1, Action.FREE)
    assert choose_victim(chats[:2], capped) is None
    sparse = FULL._replace(segment=5, alive_bytes=100)
    assert choose_victim([sparse, *chats], capped) == Step(5, Action.MOVE_ALIVE)
    pinned = [usage._replace(pinned_bytes=900) for usage in chats]
    assert choose_victim([FULL, *pinned], capped) == Step(1, Action.FREE)


def test_pinned_blocks_are_carried_out_of_mostly_unpinned_segments_only() -> None:
    mostly = FULL._replace(pinned_bytes=400)
    wholly = FULL._replace(segment=2, pinned_bytes=900)
    assert choose_victim([mostly, wholly], RULES) == Step(1, Action.MOVE_PINNED)
    assert choose_victim([wholly], RULES) is None


def test_what_ages_together_is_not_rewritten() -> None:
    """A segment whose class has a maximum age is dropped as a whole or stays: neither survivors nor pins move out."""
    aged = FULL._replace(ages=True)
    sparse, pinned = aged._replace(segment=2, alive_bytes=400), aged._replace(segment=3, pinned_bytes=400)
    assert choose_victim([aged, sparse], RULES, lossless=True) is None
    assert choose_victim([aged._replace(promise_until_s=60), sparse], RULES) == Step(2, Action.FREE)
    assert choose_victim([pinned], RULES) is None
    assert sweep_action(sparse, 0) is None
    assert sweep_action(sparse._replace(alive_bytes=0), 0) is Action.FREE


def test_busy_segments_are_passed_over() -> None:
    assert choose_victim([FULL._replace(busy=True, alive_bytes=0), FULL._replace(segment=2)], RULES) == Step(
        2, Action.FREE
    )
    assert sweep_action(FULL._replace(busy=True, alive_bytes=0), 0) is None


def test_a_sweep_rewrites_only_for_room_that_does_not_come_by_itself() -> None:
    """Of a sparse segment, survivors move if their promises last beyond a day; pinned ones also after."""
    sparse = FULL._replace(alive_bytes=499, promise_until_s=200_000)
    assert sweep_action(sparse, 200_000 - REWRITE_AHEAD_S - 1) is Action.MOVE_ALIVE
    assert sweep_action(sparse, 200_000 - REWRITE_AHEAD_S) is None
    assert sweep_action(sparse, 199_999) is None
    assert sweep_action(sparse, 200_000) is Action.MOVE_ALIVE
    assert sweep_action(sparse._replace(alive_bytes=500), 0) is None
    assert sweep_action(sparse._replace(alive_bytes=0), 199_999) is Action.FREE


def test_an_unknown_class_goes_last() -> None:
    unknown = FULL._replace(segment=2, class_byte=99, promise_until_s=1)
    chats = [FULL._replace(segment=number, class_byte=CHAT, promise_until_s=9) for number in (3, 4, 5)]
    assert choose_victim([unknown, FULL], RULES) == Step(1, Action.FREE)
    assert choose_victim([*chats, unknown], RULES) == Step(2, Action.FREE)  # as dear as chat, and earlier


usages = st.lists(
    st.builds(
        SegmentUsage,
        segment=st.integers(1, 99),
        class_byte=st.sampled_from([AGENT, CHAT, 99]),
        segment_bytes=st.just(MIB),
        used_bytes=st.just(1000),
        alive_bytes=st.integers(0, 1000),
        pinned_bytes=st.integers(0, 1000),
        promise_until_s=st.integers(0, 100),
        begun=st.integers(1, 99),
        busy=st.booleans(),
    ).map(lambda usage: usage._replace(pinned_bytes=min(usage.pinned_bytes, usage.alive_bytes))),
    max_size=12,
    unique_by=lambda usage: usage.segment,
)


@given(usages)
def test_no_choice_breaks_a_protection(found: list[SegmentUsage]) -> None:
    """Never a busy one, never living blocks below a floor, never a drop of a pin, never a move of the most."""
    step = choose_victim(found, RULES)
    if step is None:
        return
    chosen = next(usage for usage in found if usage.segment == step.segment)
    assert not chosen.busy
    left = MIB * (sum(usage.class_byte == chosen.class_byte for usage in found) - 1)
    if step.action is Action.FREE:
        assert chosen.pinned_bytes == 0
        assert chosen.alive_bytes == 0 or chosen.class_byte != CHAT or left >= 2 * MIB
    if step.action is Action.MOVE_ALIVE:
        assert 2 * chosen.alive_bytes < chosen.used_bytes
    if step.action is Action.MOVE_PINNED:
        assert 2 * chosen.pinned_bytes < chosen.used_bytes
