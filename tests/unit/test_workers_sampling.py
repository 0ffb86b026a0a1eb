"""The next token: greedy ties, seeds that any worker continues, and bad logits."""

from __future__ import annotations

import collections

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from workers.protocol import Sampling
from workers.sampling import choose


def test_greedy_takes_the_lowest_id_among_equal_logits() -> None:
    """Ties are broken the same way everywhere."""
    row = torch.zeros(1000)
    row[[700, 41, 500]] = 3.0
    assert choose(row, Sampling(), position=5) == 41


@given(seed=st.integers(0, 2**63 - 1), position=st.integers(0, 2**20), order=st.permutations(range(4)))
def test_a_seeded_draw_depends_on_seed_and_position_only(seed: int, position: int, order: list[int]) -> None:
    """Whatever a worker drew before, token i of a seeded request comes out the same: another worker can go on."""
    row = torch.linspace(0, 2, 64)
    sampling = Sampling(temperature=1.3, top_p=0.9, seed=seed)
    alone = {step: choose(row, sampling, position + step) for step in range(4)}
    again = {step: choose(row, sampling, position + step, np.random.default_rng(step)) for step in order}
    assert again == alone


def test_seeds_and_positions_give_different_draws() -> None:
    """The draw really uses both the seed and the position."""
    row = torch.zeros(4096)
    draws = {(seed, at): choose(row, Sampling(temperature=1.0, seed=seed), at) for seed in range(8) for at in range(8)}
    assert len(set(draws.values())) > 50


def test_a_seeded_draw_is_pinned() -> None:
    """The stream is part of the contract between versions: a changed draw would tear a resumed answer."""
    row = torch.linspace(0, 3, 100)
    assert [choose(row, Sampling(temperature=0.8, top_p=0.95, seed=7), at) for at in range(6)] == PINNED


PINNED = [56, 54, 89, 84, 81, 98]


def test_draws_follow_the_distribution_and_the_nucleus() -> None:
    """Frequencies match softmax(logits / temperature) within the nucleus; nothing outside it is ever drawn."""
    probabilities = np.array([0.5, 0.3, 0.15, 0.05])
    row = torch.log(torch.tensor(probabilities))
    generator = np.random.default_rng(1)
    sampling = Sampling(temperature=1.0, top_p=0.79)
    counts = collections.Counter(choose(row, sampling, 0, generator) for _ in range(4000))
    assert set(counts) == {0, 1}
    assert counts[0] / 4000 == pytest.approx(0.5 / 0.8, abs=0.03)
    cold = collections.Counter(choose(row, Sampling(temperature=0.5), 0, generator) for _ in range(4000))
    assert cold[0] / 4000 == pytest.approx(0.25 / (probabilities**2).sum(), abs=0.03)


def test_a_tiny_temperature_is_greedy_and_finite() -> None:
    """No overflow where logits are divided by almost nothing."""
    assert choose(torch.tensor([1e4, -1e4, 1.0001e4]), Sampling(temperature=1e-6, seed=1), 0) == 2


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.0, seed=1)])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_not_numbers_are_never_sampled_from(sampling: Sampling, bad: float) -> None:
    """Broken weights or KV give an error, not a token."""
    row = torch.zeros(16)
    row[3] = bad
    with pytest.raises(ValueError, match="not numbers"):
        choose(row, sampling, 0)
