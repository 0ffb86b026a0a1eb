"""The values that a store returns."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.keys import SpaceId
from kvstore.store import FLAG_APPROXIMATE, ClassEffect, Effect, GetStatus, Lookup, Presence, PutOutcome, SystemClock

blocks = st.lists(st.tuples(st.sampled_from(list(Presence)), st.sampled_from([0, FLAG_APPROXIMATE])), max_size=30)


def lookup_of(answers: list[tuple[Presence, int]]) -> Lookup:
    presence = np.asarray([presence for presence, _ in answers], np.uint8)
    flags = np.asarray([flag for _, flag in answers], np.uint8)
    return Lookup(presence, flags, np.full(len(answers), 10, np.uint32))


@given(blocks)
def test_the_prefix_ends_at_the_first_gap(answers: list[tuple[Presence, int]]) -> None:
    """All blocks before the end are present, and the next one, where there is one, is not."""
    length = lookup_of(answers).prefix_blocks()
    assert all(presence == Presence.PRESENT for presence, _ in answers[:length])
    assert length == len(answers) or answers[length][0] != Presence.PRESENT


@given(blocks)
def test_an_exact_prefix_ends_at_an_approximate_block_too(answers: list[tuple[Presence, int]]) -> None:
    """With exact_only the prefix is the same, cut before its first approximate block."""
    whole = lookup_of(answers).prefix_blocks()
    exact = lookup_of(answers).prefix_blocks(exact_only=True)
    flags = [flag for _, flag in answers[:whole]]
    assert exact == (flags.index(FLAG_APPROXIMATE) if FLAG_APPROXIMATE in flags else whole)


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        (
            Presence,
            {"NEVER": 0, "PRESENT": 1, "EXPIRED": 2, "EVICTED": 3, "QUARANTINED": 4, "PURGED": 5, "UNREACHABLE": 6},
        ),
        (GetStatus, {"OK": 0, "MISS": 1, "CORRUPT": 2, "DEADLINE": 3, "WRONG_SIZE": 4, "UNREACHABLE": 5}),
        (
            PutOutcome,
            {
                "STORED": 0,
                "TOUCHED": 1,
                "REPLACED": 2,
                "REFUSED": 3,
                "ALTERED": 4,
                "UNREACHABLE": 5,
                "DECLINED": 6,
                "TOO_LARGE": 7,
            },
        ),
    ],
)
def test_numbers_on_the_wire_are_pinned(kind: type[Presence], values: dict[str, int]) -> None:
    """Answers are numbers in frames: a change is a new protocol version."""
    assert {item.name: item.value for item in kind} == values


def test_an_effect_adds_up() -> None:
    """Blocks and bytes of an effect are the sums over classes and spaces."""
    space = SpaceId(bytes(32))
    effect = Effect(False, (ClassEffect(1, space, 2, 20), ClassEffect(2, space, 3, 30)))
    assert (effect.blocks, effect.payload_bytes) == (5, 50)
    assert (Effect(True, ()).blocks, Effect(True, ()).payload_bytes) == (0, 0)


def test_the_system_clock_counts_from_the_epoch() -> None:
    """It is later than this was written, and does not run backwards within a call."""
    clock = SystemClock()
    first_s = clock.now_s()
    assert first_s > 1_790_000_000
    assert clock.now_s() >= first_s
