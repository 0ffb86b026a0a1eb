"""What runs in a step: decodes first, prefills in order, within the budget; nobody starves."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.scheduler import Attention, CostModel, Limits, Sample, Wanting, chunk_within, fit_cost, schedule

ATTENTION = Attention(2, 4, 16)
LIMITS = Limits(chunk_tokens=64, block_tokens=16, window=16, sequences_max=4)
WANTING = st.builds(
    lambda past, remaining, decoding: Wanting(past, 1 if decoding else remaining, decoding),
    st.integers(0, 5000),
    st.integers(1, 3000),
    st.booleans(),
)


@given(
    st.lists(WANTING, max_size=12),
    st.sampled_from([CostModel(), CostModel(0.01, 1e-3, 1e-7), CostModel(0.2, 1e-2, 1e-5)]),
)
def test_grants_keep_every_bound_and_make_progress(wanting: list[Wanting], cost: CostModel) -> None:
    """Never more than wanted, or than a step has; if anybody wants, somebody runs, the first prefill too."""
    grants = schedule(wanting, LIMITS, ATTENTION, cost)
    assert all(0 <= count <= item.remaining for count, item in zip(grants, wanting, strict=True))
    assert sum(count > 0 for count in grants) <= LIMITS.sequences_max
    decodes = sum(count for count, item in zip(grants, wanting, strict=True) if item.decoding)
    assert decodes == min(sum(item.decoding for item in wanting), LIMITS.sequences_max)
    assert sum(grants) - decodes <= max(LIMITS.chunk_tokens - decodes, LIMITS.block_tokens)
    assert any(grants) == bool(wanting)
    if decodes < LIMITS.sequences_max:
        prefills = [count for count, item in zip(grants, wanting, strict=True) if not item.decoding]
        assert not prefills or prefills[0] > 0


def test_prefills_run_in_arrival_order() -> None:
    """The first takes what it needs; the next gets the rest of the budget."""
    grants = schedule(
        [Wanting(0, 50, False), Wanting(0, 50, False), Wanting(0, 50, False)], LIMITS, ATTENTION, CostModel()
    )
    assert grants == [50, 14, 0]


def test_a_short_prompt_does_not_wait_for_a_long_one() -> None:
    """Those that want a chunk at most share half of the step, the shortest first; the long one gets the rest."""
    wanting = [Wanting(0, 3000, False), Wanting(0, 2000, False), Wanting(0, 60, False), Wanting(3200, 20, False)]
    assert schedule(wanting, LIMITS, ATTENTION, CostModel()) == [32, 0, 12, 20]
    assert schedule(wanting[:2], LIMITS, ATTENTION, CostModel()) == [64, 0]
    slow = CostModel(1.0, 1e-2, 1e-5)  # a step is late already: a block for the long one, half a one for the short one
    assert schedule([Wanting(9, 1, True), *wanting], LIMITS, ATTENTION, slow) == [1, 16, 0, 0, 8]


@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(1, 400)), min_size=1, max_size=12),
    st.booleans(),
    st.sampled_from([CostModel(), CostModel(0.01, 1e-3, 1e-7), CostModel(0.5, 1e-2, 1e-5)]),
)
def test_nobody_starves_however_short_the_others_are(
    arrivals: list[tuple[int, int]], decoding: bool, cost: CostModel
) -> None:
    """In every step the oldest gets half of what prefills get or more (or all it wants), so that every prompt is done
    after as many steps as its own and the older ones' tokens take by halves."""
    limits = Limits(chunk_tokens=64, block_tokens=16, window=16, sequences_max=4)
    due = sorted(arrivals)
    live: list[list[int]] = []  # tokens computed, tokens left: in arrival order
    steps_max = sum(-(-tokens // 8) + 1 for _, tokens in arrivals) + 41
    for step in range(steps_max):
        while due and due[0][0] <= step:
            live.append([0, due.pop(0)[1]])
        wanting = [Wanting(past, left, False) for past, left in live]
        grants = schedule([*wanting, *[Wanting(50, 1, True)] * decoding], limits, ATTENTION, cost)[: len(live)]
        if live:
            assert 2 * grants[0] >= min(2 * live[0][1], sum(grants))
        live = [[past + count, left - count] for (past, left), count in zip(live, grants, strict=True) if left > count]
    assert not live
    assert not due


def test_chunk_shrinks_with_depth_while_somebody_decodes() -> None:
    """Attention deep in a prompt costs more, so that fewer tokens fit the step's time; alone, the budget rules."""
    cost = CostModel(0.0, 1e-4, 1e-6)
    limits = Limits(512, 16, 16, step_s_target=0.5)

    def grant(past: int, *others: Wanting) -> int:
        return schedule([*others, Wanting(past, 5000, False)], limits, ATTENTION, cost)[-1]

    decode = Wanting(100, 1, True)
    assert grant(0, decode) > grant(4000, decode) >= 16
    assert grant(4000) == 512


def test_budget_below_a_window_and_a_block_is_refused() -> None:
    """A replay could otherwise eat the whole budget, step after step."""
    with pytest.raises(ValueError, match="chunk_tokens"):
        Limits(chunk_tokens=31, block_tokens=16, window=16)


@given(st.integers(0, 200), st.integers(1, 200), st.integers(0, 300))
def test_pairs_are_counted_query_by_query(past: int, count: int, window: int) -> None:
    """The closed form equals the sum over queries."""
    attention = Attention(1, 1 if window else 0, window)
    whole = sum(past + i + 1 for i in range(count))
    sliding = sum(min(window, past + i + 1) for i in range(count))
    assert attention.pairs(past, count) == pytest.approx((whole + sliding) / 2 if window else whole)


def test_fit_recovers_a_cost_and_never_goes_negative() -> None:
    """Exact samples give their coefficients back; noise that would make one negative makes it zero."""
    true = CostModel(0.01, 1e-4, 1e-8)
    sizes = [(1, 500.0), (64, 1e4), (512, 2e5), (512, 2e6), (100, 3e3), (7, 1e5), (300, 1e6), (2, 2e3), (50, 5e6)]
    fitted = fit_cost([Sample(tokens, pairs, true.seconds(tokens, pairs)) for tokens, pairs in sizes])
    assert fitted.base_s == pytest.approx(true.base_s, rel=1e-3)
    assert fitted.token_s == pytest.approx(true.token_s, rel=1e-3)
    assert fitted.pair_s == pytest.approx(true.pair_s, rel=1e-3)
    odd = fit_cost([Sample(tokens, pairs, 1.0 - tokens / 1000) for tokens, pairs in sizes])
    assert min(odd.base_s, odd.token_s, odd.pair_s) >= 0
    assert not fit_cost([Sample(1, 1.0, 1.0)]).known


@given(st.integers(0, 3000), st.integers(0, 600), st.floats(0, 1))
def test_chunk_is_the_largest_that_fits(past: int, count_max: int, seconds: float) -> None:
    """One more token would exceed the time, or what is wanted."""
    cost = CostModel(0.0, 1e-3, 1e-6)

    def takes(count: int) -> float:
        return cost.token_s * count + cost.pair_s * ATTENTION.pairs(past, count)

    count = chunk_within(seconds, past, count_max, ATTENTION, cost)
    assert takes(count) <= seconds or count == 0
    assert count == count_max or takes(count + 1) > seconds
