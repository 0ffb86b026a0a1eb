"""The state pool: bounded in bytes, in time and under each parent."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from kvstore.daemon.states import StatePool
from kvstore.keys import BlockKey, SpaceId, StateKey, StateName
from kvstore.limits import STATES_PER_LOOKUP_MAX, STATES_PER_PARENT_MAX
from kvstore.store import FLAG_APPROXIMATE
from kvstore.testing import ManualClock

SPACE = SpaceId(b"\x01" * 32)


def a_name(number: int, parent: bytes = b"\x02" * 32) -> StateName:
    key = StateKey(number.to_bytes(32, "big"))
    return StateName(key, BlockKey(parent), BlockKey(parent), 64 + number, number)


def a_pool(clock: ManualClock, pool_bytes: int = 100_000) -> StatePool:
    return StatePool(pool_bytes, 600.0, clock)


def test_a_state_lives_for_its_ttl() -> None:
    clock = ManualClock()
    pool = a_pool(clock)
    assert pool.put(SPACE, a_name(1), b"state", FLAG_APPROXIMATE)
    clock.advance(599.0)
    assert pool.get(SPACE, a_name(1)) == (b"state", FLAG_APPROXIMATE)
    clock.advance(1.0)
    assert pool.get(SPACE, a_name(1)) is None
    assert pool.under(SPACE, b"\x02" * 32) == ()
    assert pool.stats()["states"] == 0


def test_the_pool_is_bounded_and_the_least_recently_used_goes_first() -> None:
    pool = a_pool(ManualClock(), 10 * 1512)
    for number in range(10):
        pool.put(SPACE, a_name(number, bytes([number]) * 32), bytes(1000), 0)
    assert pool.get(SPACE, a_name(0, bytes([0]) * 32))
    pool.put(SPACE, a_name(10, bytes([10]) * 32), bytes(1000), 0)
    assert pool.get(SPACE, a_name(0, bytes([0]) * 32))
    assert pool.get(SPACE, a_name(1, bytes([1]) * 32)) is None
    assert pool.stats()["state_bytes"] <= 10 * 1512


def test_a_state_larger_than_the_pool_is_refused_and_displaces_nothing() -> None:
    pool = a_pool(ManualClock(), 10_000)
    pool.put(SPACE, a_name(1), bytes(1000), 0)
    assert not pool.put(SPACE, a_name(2), bytes(20_000), 0)
    assert pool.get(SPACE, a_name(1))


def test_states_under_one_parent_are_bounded() -> None:
    pool = a_pool(ManualClock(), 10_000_000)
    for number in range(STATES_PER_PARENT_MAX + 5):
        pool.put(SPACE, a_name(number), bytes(10), 0)
    assert pool.stats()["states"] == STATES_PER_PARENT_MAX
    assert pool.get(SPACE, a_name(0)) is None


def test_lookups_list_the_deepest_then_the_youngest() -> None:
    pool = a_pool(ManualClock(), 10_000_000)
    parents = b"".join(bytes([number]) * 32 for number in range(5))
    for number in range(1, 5):
        for tail in range(30):
            pool.put(SPACE, a_name(number * 1000 + tail, bytes([number]) * 32), bytes(10), 0)
    found = pool.under(SPACE, parents)
    assert len(found) == STATES_PER_LOOKUP_MAX
    places = [(entry.block_index, entry.tail_tokens) for entry in found]
    assert places == sorted(places, reverse=True)
    assert places[0] == (4, 4029)


def test_lookups_list_the_states_of_the_parents_asked_and_no_others() -> None:
    """Among many keys, of which some begin as a parent does, and after a parent's last state is gone."""
    pool = a_pool(ManualClock(), 10_000_000)
    rng = random.Random(3)
    near = [bytes([7, 7]) + rng.randbytes(30) for _ in range(40)]
    for number, parent in enumerate([*near[:20], SPACE]):
        pool.put(SPACE, a_name(2 * number, parent), b"a", 0)
        pool.put(SPACE, a_name(2 * number + 1, parent), b"b", 0)
    asked = [*(rng.randbytes(32) for _ in range(500)), *near[::-3]]
    rng.shuffle(asked)

    def listed() -> set[tuple[bytes, int]]:
        return {(entry.key, entry.block_index) for entry in pool.under(SPACE, b"".join(asked))}

    def expected(parents: Sequence[bytes]) -> set[tuple[bytes, int]]:
        places = {parent: asked.index(parent) for parent in parents if parent in asked} | {bytes(SPACE): -1}
        numbers = {parent: number for number, parent in enumerate([*near[:20], SPACE])}
        return {(a_name(2 * numbers[parent] + child).key, at) for parent, at in places.items() for child in (0, 1)}

    assert len(expected(near[:20])) > 10
    assert listed() == expected(near[:20])
    pool.drop_children(SPACE, frozenset(near[:10]))
    assert listed() == expected(near[10:20])
    pool.drop_space(SPACE)
    assert listed() == set()


def test_another_space_parent_or_tail_is_a_miss() -> None:
    pool = a_pool(ManualClock())
    pool.put(SPACE, a_name(1), b"state", 0)
    assert pool.get(SpaceId(b"\x09" * 32), a_name(1)) is None
    assert pool.get(SPACE, a_name(1, b"\x03" * 32)) is None
    assert pool.under(SpaceId(b"\x09" * 32), b"\x02" * 32) == ()


def test_an_exact_state_is_not_replaced_by_an_approximate_one() -> None:
    pool = a_pool(ManualClock())
    pool.put(SPACE, a_name(1), b"exact", 0)
    pool.put(SPACE, a_name(1), b"roughly", FLAG_APPROXIMATE)
    assert pool.get(SPACE, a_name(1)) == (b"exact", 0)
    pool.put(SPACE, a_name(2), b"roughly", FLAG_APPROXIMATE)
    pool.put(SPACE, a_name(2), b"exact", 0)
    assert pool.get(SPACE, a_name(2)) == (b"exact", 0)


def test_the_buffer_belongs_to_the_caller_again() -> None:
    pool = a_pool(ManualClock())
    buffer = bytearray(b"before")
    pool.put(SPACE, a_name(1), buffer, 0)
    buffer[:] = b"after!"
    assert pool.get(SPACE, a_name(1)) == (b"before", 0)


@pytest.mark.parametrize("by", ["space", "parent"])
def test_purges_take_states_along_and_the_books_balance(by: str) -> None:
    pool = a_pool(ManualClock())
    for number in range(5):
        pool.put(SPACE, a_name(number), bytes(100), 0)
    removed = pool.drop_space(SPACE) if by == "space" else pool.drop_children(SPACE, frozenset([b"\x02" * 32]))
    assert removed == 5
    assert (pool.stats()["states"], pool.stats()["state_bytes"]) == (0, 0)


def test_a_state_from_another_place_is_never_kept_for_this_one() -> None:
    """An exact state outlives an approximate one of the same place only: a key alone is not believed."""
    pool = a_pool(ManualClock())
    pool.put(SPACE, a_name(1), b"exact", 0)
    other = SpaceId(b"\x09" * 32)
    pool.put(other, a_name(1), b"other", FLAG_APPROXIMATE)
    assert pool.get(other, a_name(1)) == (b"other", FLAG_APPROXIMATE)
    assert pool.get(SPACE, a_name(1)) is None


def test_a_clock_that_was_far_ahead_gives_no_state_a_long_life() -> None:
    """A state that was put while the clock ran ten years ahead is gone once the clock is right again."""
    clock = ManualClock()
    ahead = ManualClock(clock.now_s() + 10 * 365 * 86_400)
    pool = a_pool(ahead)
    pool.put(SPACE, a_name(1), b"state", 0)
    pool._clock = clock
    assert pool.get(SPACE, a_name(1)) is None
    pool.put(SPACE, a_name(2), b"state", 0)
    pool._clock = ManualClock(clock.now_s() - 2.0)
    assert pool.get(SPACE, a_name(2)) == (b"state", 0)
