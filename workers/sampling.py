"""The next token from a row of logits.

Owns the draw. Does not know about models, requests or text. Invariant: with a seed the draw depends on (seed, position,
logits) only, so another worker, or the same one after a restart, continues the same stream; greedy takes the lowest
token id among equal logits.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from workers.protocol import Sampling


def choose(
    logits_row: torch.Tensor, sampling: Sampling, position: int, generator: np.random.Generator | None = None
) -> int:
    """Token id for absolute ``position``, from logits [vocabulary].

    ``generator`` draws where there is no seed; without it and without a seed, a fresh one seeded by the system does.
    Raises ValueError when the logits are not numbers (a broken checkpoint or broken KV: never sampled from).
    """
    peak = logits_row.max()
    if not bool(torch.isfinite(peak).item()):
        raise ValueError("the model's logits are not numbers: broken weights or broken KV")
    if sampling.temperature == 0.0:
        return int(torch.nonzero(logits_row == peak)[0].item())
    logits = logits_row.detach().to(dtype=torch.float64, device="cpu").numpy()
    tokens, weights = _nucleus(logits, sampling.temperature, sampling.top_p)
    drawn = _uniform(sampling.seed, position, generator) * weights[-1]
    return int(tokens[min(int(np.searchsorted(weights, drawn, side="right")), tokens.size - 1)])


def _nucleus(
    logits: npt.NDArray[np.float64], temperature: float, top_p: float
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """Candidates by falling probability (equal ones by rising id) until ``top_p``, and their cumulative weights."""
    order = np.argsort(-logits, kind="stable")
    weights = np.cumsum(np.exp((logits[order] - logits[order[0]]) / temperature))
    kept = int(np.searchsorted(weights, top_p * weights[-1], side="left")) + 1
    return order[:kept], weights[:kept]


def _uniform(seed: int | None, position: int, generator: np.random.Generator | None) -> float:
    """A number in [0, 1): by (seed, position) through Philox, a counter-based generator with a stable stream."""
    if seed is not None:
        return float(np.random.Generator(np.random.Philox(key=np.array([seed, position], dtype=np.uint64))).random())
    return float((generator or np.random.default_rng()).random())
