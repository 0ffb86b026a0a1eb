"""Usage seen through a policy, and what a moment would expire."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvstore.keys import BlockKey, SpaceId
from kvstore.store import BlockInfo
from kvstore.testing import DAY_S, T0_S, TEST_RULES
from kvstore.traffic import AGENT, CHAT
from retention.planner import (
    UNTOUCHED,
    Usage,
    by_class,
    by_space,
    holding_class,
    summarise,
)
from retention.policy import replace_keep_for
from tests.support.expiry import keep_until_s, plan_expiry

NOW_S = int(T0_S)
SPACES = (SpaceId(b"\1" * 32), SpaceId(b"\2" * 32))


def a_block(
    number: int = 0,
    *,
    touches: dict[int, int],
    space_id: SpaceId = SPACES[0],
    pinned: bool = False,
    payload_bytes: int = 100,
    written_s: int = NOW_S,
) -> BlockInfo:
    return BlockInfo(
        key=BlockKey(number.to_bytes(32, "big")),
        space_id=space_id,
        parent=BlockKey(bytes(space_id)),
        index=0,
        tokens=4,
        flags=0,
        stored_bytes=payload_bytes // 2,
        payload_bytes=payload_bytes,
        written_s=written_s,
        keep_until_s=keep_until_s(touches, TEST_RULES),
        touches=touches,
        pinned=pinned,
        segment=0,
    )


classes = st.sampled_from([1, 2, 99])
moments = st.integers(NOW_S - 10 * DAY_S, NOW_S)
block_lists = st.lists(
    st.builds(
        a_block,
        st.integers(0, 1000),
        touches=st.dictionaries(classes, moments, max_size=3),
        space_id=st.sampled_from(SPACES),
        pinned=st.booleans(),
        payload_bytes=st.integers(2, 1000),
        written_s=moments,
    ),
    max_size=12,
)


def test_a_block_is_held_by_its_longest_promise() -> None:
    """Not by its last touch, nor its first: by the touch whose promise reaches furthest."""
    assert keep_until_s({AGENT: NOW_S, CHAT: NOW_S}, TEST_RULES) == NOW_S + 7 * DAY_S
    assert holding_class({AGENT: NOW_S, CHAT: NOW_S}, TEST_RULES) == CHAT
    assert holding_class({AGENT: NOW_S, CHAT: NOW_S - 5 * DAY_S}, TEST_RULES) == AGENT
    assert holding_class({AGENT: NOW_S, CHAT: NOW_S - 4 * DAY_S}, TEST_RULES) == AGENT
    assert holding_class({}, TEST_RULES) == UNTOUCHED
    assert keep_until_s({}, TEST_RULES) == 0


def test_an_unknown_class_holds_like_the_longest() -> None:
    """A class that no rule names is kept as long as any."""
    assert keep_until_s({99: NOW_S}, TEST_RULES) == NOW_S + 7 * DAY_S


@given(block_lists)
def test_usage_adds_up_in_every_grouping(blocks: list[BlockInfo]) -> None:
    """Every block is counted exactly once, whether by pair, by class, by space or all together."""
    totals = summarise(blocks, TEST_RULES, NOW_S)
    for grouping in (totals, by_class(totals), by_space(totals)):
        whole = sum(grouping.values(), Usage())
        assert whole.blocks == len(blocks)
        assert whole.payload_bytes == sum(block.payload_bytes for block in blocks)
        assert whole.stored_bytes == sum(block.stored_bytes for block in blocks)
        assert whole.pinned_blocks == sum(block.pinned for block in blocks)
        assert whole.oldest_written_s == min((block.written_s for block in blocks), default=0)
        live = [block.keep_until_s for block in blocks if not block.pinned and block.keep_until_s > NOW_S]
        assert whole.next_expiry_s == min(live, default=0)
    assert list(totals) == sorted(totals)
    assert {space for _, space in totals} == {block.space_id for block in blocks} == set(by_space(totals))


@given(block_lists)
def test_expired_is_past_and_not_pinned(blocks: list[BlockInfo]) -> None:
    """What a sweep may remove is what show counts as expired, and never a pinned block."""
    effects = plan_expiry(blocks, TEST_RULES, NOW_S)
    expired = [block for block in blocks if not block.pinned and block.keep_until_s <= NOW_S]
    assert sum(effect.blocks for effect in effects) == len(expired)
    assert sum(effect.payload_bytes for effect in effects) == sum(block.payload_bytes for block in expired)
    usage = sum(summarise(blocks, TEST_RULES, NOW_S).values(), Usage())
    assert (usage.expired_blocks, usage.expired_bytes) == (
        len(expired),
        sum(block.payload_bytes for block in expired),
    )


def test_a_promise_ends_exactly_at_its_second() -> None:
    """One second before it the block is live; at it, expired."""
    block = a_block(touches={AGENT: NOW_S})
    assert plan_expiry([block], TEST_RULES, NOW_S + 3 * DAY_S - 1) == ()
    (effect,) = plan_expiry([block], TEST_RULES, NOW_S + 3 * DAY_S)
    assert (effect.class_byte, effect.blocks, effect.payload_bytes) == (AGENT, 1, 100)


@given(block_lists, st.integers(1, 10 * DAY_S), st.integers(1, 10 * DAY_S))
def test_a_longer_promise_never_expires_more(blocks: list[BlockInfo], one_s: int, other_s: int) -> None:
    """Other rules on the same blocks: what the shorter ones keep, the longer ones keep too."""
    shorter, longer = (
        replace_keep_for(TEST_RULES, {"agent": keep_s, "chat": keep_s}) for keep_s in sorted((one_s, other_s))
    )
    assert sum(effect.blocks for effect in plan_expiry(blocks, longer, NOW_S)) <= sum(
        effect.blocks for effect in plan_expiry(blocks, shorter, NOW_S)
    )
