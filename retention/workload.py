"""A trace made ready for replay: every distinct prefix has one number, every prompt is a few runs of numbers.

Owns the numbering (a radix tree over runs) and which node holds which block. Does not know time, policy or what is
stored. Invariants: two blocks have one number exactly if they end equal prefixes of one scope, as two blocks have one
key; a stripe's blocks have one owner.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from kvstore.limits import STRIPE_BLOCKS
from kvstore.placement import Placement
from retention.trace import Prompt, Run

Blocks = npt.NDArray[np.int64]


class _Edge:
    """A stretch of the tree: ``count`` blocks whose content has consecutive numbers, and so have their prefixes."""

    __slots__ = ("base", "children", "count", "first")

    def __init__(self, first: int, count: int, base: int, children: dict[int, _Edge]) -> None:
        self.first = first
        self.count = count
        self.base = base
        self.children = children

    def split(self, at: int) -> None:
        """Keep ``at`` blocks; the others become the only child."""
        rest = _Edge(self.first + at, self.count - at, self.base + at, self.children)
        self.count, self.children = at, {rest.first: rest}


@dataclass(frozen=True, slots=True)
class Grown:
    """New blocks: ``count`` from number ``base`` on, at ``depth`` of their chain, after block ``before`` (-1: none)."""

    base: int
    count: int
    depth: int
    before: int


class Prefixes:
    """The numbers given so far. ``grown`` tells, in order, where each came from."""

    def __init__(self) -> None:
        self._roots: dict[int, _Edge] = {}
        self.count = 0
        self.grown: list[Grown] = []

    def number(self, scope: int, runs: Iterable[Run]) -> list[Run]:
        """Runs of prefix numbers for a prompt's runs of content numbers."""
        edge = self._roots.setdefault(scope, _Edge(-1, 0, -1, {}))
        depth = within = 0
        numbered: list[Run] = []
        for first, count in runs:
            while count:
                edge, within = self._step(edge, within, first, count, depth, numbered[-1] if numbered else None)
                taken = min(count, edge.count - within)
                _join(numbered, edge.base + within, taken)
                within += taken
                depth += taken
                first += taken
                count -= taken
        return numbered

    def _step(
        self, edge: _Edge, within: int, first: int, count: int, depth: int, last: Run | None
    ) -> tuple[_Edge, int]:
        """The edge and the place in it where block ``first`` lies, which comes after ``within`` blocks of ``edge``."""
        if within < edge.count:
            if edge.first + within == first:
                return edge, within
            edge.split(within)
        child = edge.children.get(first)
        if child is not None:
            return child, 0
        self.grown.append(Grown(self.count, count, depth, last[0] + last[1] - 1 if last else -1))
        if not edge.children and (edge.first + within, edge.base + within) == (first, self.count):
            edge.count += count  # the conversation goes on where it ended
        else:
            child = edge.children[first] = _Edge(first, count, self.count, {})
            edge, within = child, 0
        self.count += count
        return edge, within


def _join(runs: list[Run], first: int, count: int) -> None:
    if runs and sum(runs[-1]) == first:
        runs[-1] = (runs[-1][0], runs[-1][1] + count)
    else:
        runs.append((first, count))


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt. ``runs``: of block numbers. ``tokens``: all of the prompt's, ``class_byte``: whose promise holds."""

    at_s: float
    class_byte: int
    tokens: int
    runs: tuple[Run, ...]

    def blocks(self) -> Blocks:
        """Its blocks, in order."""
        if len(self.runs) == 1:
            first, count = self.runs[0]
            return np.arange(first, first + count)
        return np.concatenate([np.arange(first, first + count) for first, count in self.runs] or [np.arange(0)])


@dataclass(frozen=True)
class Workload:
    """Requests in order of time, all of blocks with ``block_tokens`` tokens; ``blocks``: distinct ones."""

    requests: tuple[Request, ...]
    block_tokens: int
    blocks: int
    grown: tuple[Grown, ...]

    @cached_property
    def accesses(self) -> int:
        """Blocks asked for, all requests together."""
        return sum(count for request in self.requests for _, count in request.runs)

    @cached_property
    def before(self) -> Blocks:
        """The block that each one continues, -1 for the first of a prompt."""
        before = np.arange(-1, self.blocks - 1)
        before[[grown.base for grown in self.grown]] = [grown.before for grown in self.grown]
        return before

    @property
    def span_s(self) -> float:
        return self.requests[-1].at_s - self.requests[0].at_s

    def owners(self, placement: Placement) -> npt.NDArray[np.uint16]:
        """The node that holds each block: that of the first block of its stripe, by a key made from its number."""
        if len(placement.names) == 1:
            return np.zeros(self.blocks, dtype=np.uint16)
        owners = np.empty(self.blocks, dtype=np.uint16)
        for grown in self.grown:
            ahead = min(-grown.depth % STRIPE_BLOCKS, grown.count)
            if ahead:
                owners[grown.base : grown.base + ahead] = owners[grown.before]
            for head in range(grown.base + ahead, grown.base + grown.count, STRIPE_BLOCKS):
                end = min(head + STRIPE_BLOCKS, grown.base + grown.count)
                owners[head:end] = placement.owner(_route(head))
        return owners


def make_workload(prompts: Iterable[tuple[Prompt, int]], block_tokens: int, *, whole_blocks: bool = False) -> Workload:
    """Number the blocks of prompts, each given with its class byte; scope by scope, so that prompts are of few runs.

    ``whole_blocks``: leave out a last block that its prompt does not fill.
    """
    prefixes = Prefixes()
    requests: list[Request] = []
    for prompt, class_byte in sorted(prompts, key=lambda item: item[0].scope):
        runs: Sequence[Run] = prompt.runs
        if whole_blocks:
            runs = list(_first(runs, prompt.tokens // block_tokens))
        requests.append(Request(prompt.at_s, class_byte, prompt.tokens, tuple(prefixes.number(prompt.scope, runs))))
    return Workload(
        tuple(sorted(requests, key=lambda request: request.at_s)),
        block_tokens,
        prefixes.count,
        tuple(prefixes.grown),
    )


def _first(runs: Iterable[Run], blocks: int) -> Iterator[Run]:
    for first, count in runs:
        if blocks:
            yield first, min(count, blocks)
            blocks -= min(count, blocks)


def _route(head: int) -> bytes:
    return blake3(head.to_bytes(8, "little")).digest()
