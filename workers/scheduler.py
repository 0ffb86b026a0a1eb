"""What runs in the next step: decode first, then prefill chunks in arrival order, short ones beside a long one. Pure.

Owns the cost of attention, the cost model's fit, and the division of one step. Does not know sequences, slots or time:
it gets numbers and gives token counts. Replayed tokens are tokens like all others here, so a replay is charged to the
chunk budget; the budget is at least one window plus one block, so that no replay can starve its own suffix.

Invariant: nobody starves. The oldest prefill gets on in every step, with half of what prefills get or more; and
whoever waits behind it is the oldest one day.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

SAMPLES_MAX = 256
"""Measured steps that the fit looks at; the oldest is forgotten."""
SAMPLES_MIN = 8
"""Below this many the fit is not trusted and the token budget alone rules."""


@dataclass(frozen=True, slots=True)
class Attention:
    """How a model attends: counts of layers, and the window of the sliding ones in tokens."""

    global_layers: int
    sliding_layers: int = 0
    window: int = 0

    def pairs(self, past: int, count: int) -> float:
        """Mean query-key pairs a layer of ``count`` tokens after ``past``: n*p + n(n+1)/2 for a global layer, min(W, .)
        a query for a sliding one."""
        layers = self.global_layers + self.sliding_layers
        everything = count * past + count * (count + 1) / 2
        if not self.sliding_layers:
            return everything
        growing = min(count, max(0, self.window - past))
        windowed = growing * past + growing * (growing + 1) / 2 + (count - growing) * self.window
        return (self.global_layers * everything + self.sliding_layers * windowed) / layers


@dataclass(frozen=True, slots=True)
class CostModel:
    """Seconds of a step = ``base_s`` + ``token_s`` * tokens + ``pair_s`` * pairs. All zero: unknown."""

    base_s: float = 0.0
    token_s: float = 0.0
    pair_s: float = 0.0

    @property
    def known(self) -> bool:
        return self.token_s > 0 or self.pair_s > 0

    def seconds(self, tokens: float, pairs: float) -> float:
        return self.base_s + self.token_s * tokens + self.pair_s * pairs


@dataclass(frozen=True, slots=True)
class Sample:
    """One measured step."""

    tokens: int
    pairs: float
    seconds: float


def fit_cost(samples: Sequence[Sample]) -> CostModel:
    """Least squares over the latest samples, coefficients never negative; unknown while there are too few."""
    latest = samples[-SAMPLES_MAX:]
    if len(latest) < SAMPLES_MIN:
        return CostModel()
    rows = np.array([[1.0, sample.tokens, sample.pairs] for sample in latest])
    seconds = np.array([sample.seconds for sample in latest])
    scale = np.maximum(np.abs(rows).max(axis=0), 1.0)
    columns = [0, 1, 2]
    solution = np.zeros(3)
    while columns:
        part, *_ = np.linalg.lstsq(rows[:, columns] / scale[columns], seconds, rcond=None)
        if (part >= 0).all():
            solution[columns] = part / scale[columns]
            break
        columns = [column for column, value in zip(columns, part, strict=True) if value > 0]
    return CostModel(*(float(value) for value in solution))


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one step. Tokens a step in all; seconds that a step should not exceed while somebody decodes.

    ``chunk_tokens_min`` is granted to the first prefill even if it breaks ``step_s_target``, so that it gets on.
    """

    chunk_tokens: int
    block_tokens: int
    window: int = 0
    sequences_max: int = 64
    step_s_target: float = 0.25

    def __post_init__(self) -> None:
        if self.chunk_tokens < self.window + self.block_tokens:
            raise ValueError(
                f"chunk_tokens {self.chunk_tokens} is less than one window plus one block "
                f"({self.window} + {self.block_tokens}): a replay could never finish; raise chunk_tokens"
            )
        if self.sequences_max < 1 or self.step_s_target <= 0:
            raise ValueError("sequences_max and step_s_target must be positive")


@dataclass(frozen=True, slots=True)
class Wanting:
    """A sequence that could run: ``past`` tokens computed, ``remaining`` to compute; one remaining token of a sequence
    that has its first token is a decode."""

    past: int
    remaining: int
    decoding: bool


@dataclass(frozen=True, slots=True)
class _Left:
    """What is left of a step."""

    sequences: int
    tokens: int
    seconds: float


def schedule(wanting: Sequence[Wanting], limits: Limits, attention: Attention, cost: CostModel) -> list[int]:
    """Tokens for each sequence in this step (0: it waits). ``wanting`` is in arrival order.

    Every decode gets its token (up to ``sequences_max``); prefills share what is left of the chunk budget, in order.
    Behind an oldest one that wants more than a chunk, those that want a chunk at most go first with half of the step,
    the shortest before the others: a short prompt waits for steps, not for a long prompt, which takes twice as long at
    most.
    """
    grants = [0] * len(wanting)
    decodes = [index for index, item in enumerate(wanting) if item.decoding][: limits.sequences_max]
    for index in decodes:
        grants[index] = 1
    timed = cost if decodes else CostModel()  # no cost, no limit: nobody waits for the step's end
    spent_s = timed.seconds(len(decodes), sum(attention.pairs(wanting[index].past, 1) for index in decodes))
    left = _Left(
        limits.sequences_max - len(decodes),
        max(limits.chunk_tokens - len(decodes), limits.block_tokens),
        limits.step_s_target - (spent_s if timed.known else 0.0),
    )

    def fill(queue: Sequence[int], left: _Left, floor: int) -> _Left:
        """Grant in order until nothing fits; the first gets ``floor`` tokens even if the time is short."""
        for index in queue:
            item = wanting[index]
            count = min(item.remaining, left.tokens) if left.sequences > 0 else 0
            count = max(chunk_within(left.seconds, item.past, count, attention, timed), min(count, floor))
            if count <= 0:
                break  # in order: nobody overtakes
            grants[index], floor = count, 0
            took_s = timed.token_s * count + timed.pair_s * attention.pairs(item.past, count)
            left = _Left(left.sequences - 1, left.tokens - count, left.seconds - took_s)
        return left

    prefills = [index for index, item in enumerate(wanting) if not item.decoding]
    if prefills and wanting[prefills[0]].remaining > limits.chunk_tokens:
        short = [index for index in prefills if wanting[index].remaining <= limits.chunk_tokens]
        half = _Left(left.sequences - 1, left.tokens // 2, left.seconds / 2)
        rest = fill(sorted(short, key=lambda index: wanting[index].remaining), half, limits.block_tokens // 2)
        left = _Left(
            left.sequences - half.sequences + rest.sequences,
            left.tokens - half.tokens + rest.tokens,
            left.seconds - half.seconds + rest.seconds,
        )
    fill([index for index in prefills if not grants[index]], left, limits.block_tokens)
    return grants


def chunk_within(seconds: float, past: int, count_max: int, attention: Attention, cost: CostModel) -> int:
    """The largest chunk after ``past`` tokens, up to ``count_max``, whose own cost stays within ``seconds``."""
    low, high = 0, count_max
    while low < high:
        middle = (low + high + 1) // 2
        if cost.token_s * middle + cost.pair_s * attention.pairs(past, middle) <= seconds:
            low = middle
        else:
            high = middle - 1
    return low
