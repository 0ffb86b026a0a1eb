"""The restore plan: what may be reused, never more, never with a gap, and always with something left to compute."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.keys import SpaceId, TokenChain
from kvstore.store import FLAG_APPROXIMATE, Lookup, Presence, StateEntry
from workers.plan import Plan, Reach, StoredState, decline_slow, make_plan, states_on_chain

BLOCK = 16
SPACE = SpaceId(bytes(range(32)))


def chain_of(tokens: int, block_tokens: int = BLOCK) -> TokenChain:
    return TokenChain(SPACE, block_tokens, range(tokens))


def lookup_of(presence: list[int], flags: list[int] | None = None, **options: object) -> Lookup:
    count = len(presence)
    return Lookup(
        np.array(presence, np.uint8),
        np.array(flags or [0] * count, np.uint8),
        np.full(count, 100, np.uint32),
        **options,  # type: ignore[arg-type]
    )


def state_at(position: int, flags: int = 0, tokens: int = 4096) -> StoredState:
    return StoredState(chain_of(tokens).state_name(position), flags, 10)


def plan_of(
    tokens: int,
    blocks: int,
    states: tuple[StoredState, ...] = (),
    reach: Reach | None = None,
    fidelity: str = "bounded",
    flags: list[int] | None = None,
) -> Plan:
    complete = tokens // BLOCK
    presence = [Presence.PRESENT] * blocks + [Presence.NEVER] * (complete - blocks)
    found = lookup_of(presence, flags)
    return make_plan(tokens, found, states, reach or Reach(BLOCK, 8, 3), fidelity)  # type: ignore[arg-type]


@st.composite
def situations(draw: st.DrawFn) -> tuple[int, Lookup, tuple[StoredState, ...], Reach, str]:
    """A prompt, what is stored of it, and a model."""
    block_tokens = draw(st.sampled_from([1, 3, 16]))
    tokens = draw(st.integers(1, 200))
    complete = tokens // block_tokens
    presence = draw(st.lists(st.sampled_from([0, 1, 1, 1, 1, 2, 3]), min_size=complete, max_size=complete))
    flags = draw(st.lists(st.sampled_from([0, 0, 0, 1]), min_size=complete, max_size=complete))
    chain = chain_of(tokens, block_tokens)
    positions = draw(st.lists(st.integers(1, tokens), max_size=5))
    states = tuple(
        StoredState(chain.state_name(position), draw(st.sampled_from([0, 1])), 10)
        for position in sorted(positions, reverse=True)
    )
    window, sliding = draw(st.sampled_from([(0, 0), (1, 2), (4, 1), (8, 3), (16, 5)]))
    reach = Reach(block_tokens, window, sliding, draw(st.sampled_from([None, 1, 2, 9])))
    return tokens, lookup_of(presence, flags), states, reach, draw(st.sampled_from(["bounded", "exact"]))


@given(situations())
def test_plan_accounts_for_every_token_and_has_no_gap(
    situation: tuple[int, Lookup, tuple[StoredState, ...], Reach, str],
) -> None:
    """hit + miss == prompt, replayed <= hit, one token left; all KV below the floor is stored, and windows reach far
    enough back wherever the plan claims exactness."""
    tokens, found, states, reach, fidelity = situation
    plan = make_plan(tokens, found, states, reach, fidelity)  # type: ignore[arg-type]
    assert plan.hit_tokens + plan.miss_tokens == tokens
    assert 0 <= plan.replayed_tokens <= plan.hit_tokens <= tokens - 1
    assert plan.reuse().prompt_tokens == tokens
    # Everything below the write floor is loaded, and what is loaded is stored.
    tail = plan.state.position if plan.state else 0
    assert plan.load_blocks <= found.prefix_blocks(exact_only=fidelity == "exact")
    assert plan.write_floor <= max(plan.load_blocks * reach.block_tokens, tail)
    assert tail // reach.block_tokens <= plan.load_blocks or not plan.state
    # No gap: what is computed begins where stored KV is still there, and ends with the prompt.
    start = plan.boundary if plan.triangular else plan.compute_start
    assert start <= plan.write_floor or plan.way == "cold"
    assert start < tokens
    assert plan.window_floor <= start
    assert plan.publish_from * reach.block_tokens <= plan.write_floor
    assert (plan.publish_from + 1) * reach.block_tokens > plan.write_floor
    if reach.sliding_layers and plan.exact and plan.way != "cold":
        assert plan.state is not None or plan.triangular or reach.exact_replay_tokens == 0
        assert plan.window_floor <= max(0, start - reach.window + 1)
    if fidelity == "exact":
        assert plan.exact
        assert plan.way != "replay"
        assert not np.any(found.flags[: plan.load_blocks] & FLAG_APPROXIMATE)
    if np.any(found.flags[: plan.load_blocks] & FLAG_APPROXIMATE) or (plan.state and not plan.state.exact):
        assert not plan.exact
        assert plan.publish_flags == FLAG_APPROXIMATE
    if plan.way == "replay":
        assert plan.replayed_tokens == (reach.replay_windows or 0) * reach.window < plan.hit_tokens
        assert not plan.exact


@pytest.mark.parametrize("tokens", [64, 65, 70, 79])
@pytest.mark.parametrize("reach", [Reach(BLOCK, 8, 3), Reach(BLOCK)])
def test_identical_resend_hits_all_but_one_token(tokens: int, reach: Reach) -> None:
    """With the end-of-prompt state, aligned or not, with sliding layers or without."""
    plan = plan_of(tokens, tokens // BLOCK, (state_at(tokens),), reach)
    assert plan.hit_tokens == tokens - 1
    assert plan.compute_start == tokens - 1
    assert plan.write_floor == tokens
    assert plan.exact


def test_aligned_resend_without_state_hits_all_but_one_token() -> None:
    """All blocks are loaded, the last token is computed again, and its stored KV is kept."""
    plan = plan_of(64, 4, reach=Reach(BLOCK))
    assert (plan.way, plan.hit_tokens, plan.load_blocks, plan.write_floor) == ("blocks", 63, 4, 64)
    replayed = plan_of(64, 4)
    assert (replayed.way, replayed.hit_tokens, replayed.compute_start) == ("replay", 63, 63 - 8)
    assert replayed.write_floor == 64


def test_hits_not_longer_than_the_replay_are_not_adopted() -> None:
    """A replay of the whole hit is the whole computation."""
    reach = Reach(BLOCK, 16, 5)
    assert plan_of(100, 1, reach=reach).way == "cold"
    assert plan_of(100, 1, reach=reach).reason == "declined"
    assert plan_of(100, 2, reach=reach).way == "replay"
    exact = plan_of(100, 4, reach=reach, fidelity="exact")  # 5 * 15 = 75 tokens to replay, 64 stored
    assert exact.way == "cold"
    assert plan_of(100, 5, reach=reach, fidelity="exact").way == "exact_replay"


def test_replay_of_so_many_windows_that_it_is_exact_is_called_exact() -> None:
    """r x W >= S x (W-1) runs the exact replay, which is shorter."""
    plan = plan_of(200, 12, reach=Reach(BLOCK, 8, 3, 3))
    assert (plan.way, plan.replayed_tokens, plan.exact) == ("exact_replay", 21, True)


def test_state_before_the_boundary_is_resumed_across_a_short_gap() -> None:
    """The blocks behind it are served while the gap is recomputed with exact windows."""
    plan = plan_of(200, 12, (state_at(186),))
    assert (plan.way, plan.boundary, plan.compute_start, plan.replayed_tokens) == ("state", 192, 186, 6)
    assert plan.exact


def test_the_shorter_of_replay_and_gap_is_chosen() -> None:
    """A state far back loses to a short replay, and wins over a long one."""
    assert plan_of(200, 12, (state_at(100),)).way == "replay"
    reach = Reach(BLOCK, 16, 40, None)  # an exact replay of 600 tokens
    plan = plan_of(200, 12, (state_at(100),), reach)
    assert (plan.way, plan.boundary, plan.replayed_tokens, plan.exact) == ("state", 192, 92, True)


def test_state_without_its_blocks_is_useless() -> None:
    """Its global KV cannot be loaded."""
    assert plan_of(200, 3, (state_at(100),)).state is None


def test_exact_fidelity_takes_no_approximate_state_or_block() -> None:
    """The flag decides, wherever it stands."""
    flagged = [0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0]
    exact = plan_of(200, 12, (state_at(190, FLAG_APPROXIMATE),), fidelity="exact", flags=flagged)
    assert (exact.way, exact.load_blocks, exact.reason) == ("exact_replay", 5, "declined")
    bounded = plan_of(200, 12, (state_at(190, FLAG_APPROXIMATE),), flags=flagged)
    assert (bounded.way, bounded.load_blocks, bounded.exact) == ("state", 12, False)


def test_states_of_another_chain_are_not_taken() -> None:
    """A state under the same parent but with another tail has another key."""
    chain, other = chain_of(40), TokenChain(SPACE, BLOCK, [*range(32), *range(900, 908)])
    entries = tuple(
        StateEntry(source.state_name(position).key, position // BLOCK - 1, position % BLOCK, 10, 0)
        for source, position in ((chain, 36), (other, 38), (chain, 32))
    )
    found = lookup_of([1, 1], states=entries)
    assert [state.position for state in states_on_chain(chain, found)] == [36, 32]


def test_slow_load_is_declined() -> None:
    """A hit that loses to computing is no hit; without an estimate of either, loading is tried."""
    plan = plan_of(200, 12)
    assert decline_slow(plan, load_s=2.0, saved_s=1.0).reason == "declined"
    assert decline_slow(plan, load_s=2.0, saved_s=1.0).hit_tokens == 0
    assert decline_slow(plan, load_s=1.0, saved_s=2.0) is plan
    assert decline_slow(plan, load_s=1.0, saved_s=0.0) is plan


@pytest.mark.parametrize(
    ("presence", "complete", "reason"),
    [
        (Presence.NEVER, True, "never"),
        (Presence.EXPIRED, True, "expired"),
        (Presence.EVICTED, True, "evicted"),
        (Presence.QUARANTINED, True, "quarantined"),
        (Presence.PURGED, True, "purged"),
        (Presence.UNREACHABLE, True, "unreachable"),
        (Presence.UNREACHABLE, False, "deadline"),
    ],
)
def test_reason_names_the_first_miss(presence: Presence, complete: bool, reason: str) -> None:
    """What the store said of the first missing block is what the client is told."""
    found = lookup_of([1, 1, 1, presence, 1], complete=complete)
    assert make_plan(90, found, (), Reach(BLOCK), "bounded").reason == reason


def test_model_facts_that_contradict_each_other_are_refused() -> None:
    """A window without sliding layers, or no windows to replay, is a fault of set-up."""
    with pytest.raises(ValueError, match="both"):
        Reach(BLOCK, 8, 0)
    with pytest.raises(ValueError, match="replay_windows"):
        Reach(BLOCK, 8, 1, 0)
