"""Access patterns that a store is measured with: the first requests of a trace, or a made-up pattern.

Owns the cut: how many requests, how many blocks of each. Does not know trace formats (``retention/trace.py`` does) nor
the store. Invariant: requests come in order of time.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path

from retention.trace import Run, read_trace

BLOCKS_MAX = 32_768
"""Blocks of one prompt, as many as one look-up takes; what follows is cut."""


@dataclass(frozen=True, slots=True, order=True)
class Access:
    """One request: ``blocks`` number its prompt's whole blocks, in order; numbers mean the same within ``scope``."""

    at_s: float
    scope: int
    blocks: tuple[int, ...]


def read(path: Path, *, requests: int, seed: int) -> list[Access]:
    """The first requests of a trace, in order of time. Raises TraceInvalid, OSError."""
    prompts = read_trace(path, seed=seed).prompts[:requests]
    return [Access(prompt.at_s, prompt.scope, _blocks(prompt.runs)) for prompt in prompts]


def _blocks(runs: Iterable[Run]) -> tuple[int, ...]:
    return tuple(islice(chain.from_iterable(range(first, first + count) for first, count in runs), BLOCKS_MAX))


def multi_turn(conversations: int, turns: int, system_blocks: int, turn_blocks: int, seed: int) -> list[Access]:
    """Conversations that take turns at random: each sends all that was said before, and something new."""
    order = [scope for scope in range(1, conversations + 1) for _ in range(turns)]
    random.Random(seed).shuffle(order)
    said = dict.fromkeys(order, system_blocks)
    accesses = []
    for at, scope in enumerate(order):
        said[scope] += turn_blocks
        accesses.append(Access(float(at), scope, tuple(range(said[scope]))))
    return accesses
