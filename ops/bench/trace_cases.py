"""Replaying an access pattern: every request looks its prompt up, reads what is stored, and stores the rest.

Owns what one request does and what is counted. Invariants: keys are chained from the trace's block numbers as a worker
chains them from tokens; a payload is made from its key, and every byte read is compared, outside the time that counts;
reading is timed in turns with ``preadv`` of a warm file into the same buffers.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np

from kvstore.keys import BlockName, SpaceId, TokenChain
from kvstore.limits import MIB
from kvstore.store import GetStatus, PutOutcome
from kvstore.traffic import AGENT
from ops.bench.baselines import Buffers
from ops.bench.blocks import SPACE, base_payload, differing, stamp
from ops.bench.ground import CALL_S_MAX, BenchFailed, Filled, Ground
from ops.bench.traces import Access, multi_turn, read

BUFFER_BYTES = 64 * MIB
"""One call reads or stores at most this; a longer prompt takes several."""
SEED = 11
MULTI_TURN = (8, 12, 32, 8)
"""Of the made-up pattern: conversations, turns, blocks of a system prompt, blocks a turn."""


@dataclass(slots=True)
class Totals:
    """What a replay has done so far."""

    requests: int = 0
    blocks: int = 0
    hits: int = 0
    puts: int = 0
    refused: int = 0
    read_s: float = 0.0
    write_s: float = 0.0
    raw_s: float = 0.0
    lookup_s: float = 0.0

    def figures(self, size: int) -> dict[str, float]:
        read_bytes, written_bytes = self.hits * size, self.puts * size
        return {
            "requests": self.requests,
            "blocks_asked": self.blocks,
            "hit_rate": self.hits / max(self.blocks, 1),
            "read_bytes": read_bytes,
            "written_bytes": written_bytes,
            "refused_blocks": self.refused,
            "read_gb_per_s": read_bytes / 1e9 / max(self.read_s, 1e-9),
            "preadv_gb_per_s": read_bytes / 1e9 / max(self.raw_s, 1e-9),
            "read_of_preadv": self.raw_s / max(self.read_s, 1e-9),
            "write_gb_per_s": written_bytes / 1e9 / max(self.write_s, 1e-9),
            "lookup_mean_ms": 1000 * self.lookup_s / max(self.requests, 1),
        }


def replay(ground: Ground) -> dict[str, dict[str, float]]:
    """Replay the pattern of the settings; figures by its name. Raises BenchFailed, TraceInvalid, OSError."""
    settings = ground.settings
    if settings.trace is None:
        accesses, name = multi_turn(*MULTI_TURN, SEED), "multi-turn (made up)"
    else:
        accesses = read(settings.trace, requests=settings.trace_requests, seed=SEED)
        name = settings.trace.name
    with ExitStack() as stack:
        store = stack.enter_context(ground.store("trace", settings.trace_capacity_bytes))
        runner = Runner(store, settings.trace_block_bytes)
        stack.callback(runner.close)
        for at, access in enumerate(accesses, 1):
            runner.request(access)
            if at % max(len(accesses) // 10, 1) == 0:
                ground.progress(f"{name}: {at} of {len(accesses)} requests, hit rate {runner.hit_rate:.1%}")
        figures = runner.totals.figures(settings.trace_block_bytes) | extents_of(store)
    return {f"{name}, {settings.trace_block_bytes // 1024} KiB blocks": figures}


def extents_of(store: Filled) -> dict[str, float]:
    """Mean blocks of one read: blocks that were stored together and asked together are read together."""
    stats = store.client.stats()
    reads = float(stats.get("extents_read", 0))
    return {"blocks_per_extent": float(stats["hits"]) / reads} if reads else {}


class Runner:
    """One client that works through accesses."""

    def __init__(self, store: Filled, size: int) -> None:
        self._store = store
        self._size = size
        self._base = base_payload(size)
        self._per_call = max(BUFFER_BYTES // size, 1)
        self._views = Buffers(size, self._per_call, self._base).views
        self._sources = Buffers(size, self._per_call, self._base).views
        self._raw = os.memfd_create("raw", os.MFD_CLOEXEC)
        for view in self._sources:
            os.write(self._raw, view)
        self.totals = Totals()

    @property
    def hit_rate(self) -> float:
        return self.totals.hits / max(self.totals.blocks, 1)

    def close(self) -> None:
        os.close(self._raw)

    def request(self, access: Access) -> None:
        """Look up, read the prefix that is there, store what is not."""
        names = names_of(self._store.space, access)
        began_s = time.perf_counter()
        prefix = self._store.client.lookup(self._store.space, names, deadline_s=CALL_S_MAX).prefix_blocks()
        self.totals.lookup_s += time.perf_counter() - began_s
        for part in self._parts(names[:prefix]):
            self._read(part)
        for part in self._parts(names[prefix:]):
            self._write(part)
        self.totals.requests += 1
        self.totals.blocks += len(names)

    def _parts(self, names: Sequence[BlockName]) -> Iterator[Sequence[BlockName]]:
        for begin in range(0, len(names), self._per_call):
            yield names[begin : begin + self._per_call]

    def _read(self, names: Sequence[BlockName]) -> None:
        views = self._views[: len(names)]
        self._read_raw(views)
        began_s = time.perf_counter()
        statuses = self._store.client.get_into(self._store.space, names, views, deadline_s=CALL_S_MAX)
        self.totals.read_s += time.perf_counter() - began_s
        came = [at for at, status in enumerate(statuses) if status == GetStatus.OK]
        self.totals.hits += len(came)
        if wrong := differing([names[at] for at in came], [views[at] for at in came], self._base):
            raise BenchFailed(f"{wrong} of {len(came)} blocks came back with other bytes")

    def _read_raw(self, views: Sequence[memoryview]) -> None:
        began_s = time.perf_counter()
        os.preadv(self._raw, views, 0)
        self.totals.raw_s += time.perf_counter() - began_s

    def _write(self, names: Sequence[BlockName]) -> None:
        blocks = stamp(names, self._sources[: len(names)])
        began_s = time.perf_counter()
        outcomes = self._store.client.put(self._store.space, blocks, traffic_class=AGENT, deadline_s=CALL_S_MAX)
        self.totals.write_s += time.perf_counter() - began_s
        stored = outcomes.count(PutOutcome.STORED)
        self.totals.puts += stored
        self.totals.refused += len(outcomes) - stored - outcomes.count(PutOutcome.TOUCHED)  # known behind a gap


def names_of(space: SpaceId, access: Access) -> list[BlockName]:
    """The chain of a prompt: two tokens a block, its scope and its number."""
    tokens = np.empty((len(access.blocks), SPACE.block_tokens), dtype=np.uint32)
    tokens[:, 0] = access.scope
    tokens[:, 1] = access.blocks
    return list(TokenChain(space, SPACE.block_tokens, tokens.ravel().tolist()).names)
