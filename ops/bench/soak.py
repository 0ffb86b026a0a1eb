"""A soak: blocks of mixed sizes are stored and read back for a long time, and the daemon's memory is watched.

Owns what is stored and when memory is looked at. Does not judge the growth: a bar does. Invariants: the store is full
before the first sample, so that segments are recycled all the time; a block may be gone again, but one that comes back
holds its own bytes.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean

from kvstore.keys import BlockName
from kvstore.limits import KIB, MIB
from kvstore.store import GetStatus
from ops.bench.baselines import Buffers
from ops.bench.blocks import base_payload, differing, names_of, stamp
from ops.bench.ground import CALL_S_MAX, CAPACITY_BLOCKS_MIN, BenchFailed, Filled, Ground, put

SIZES = (64 * KIB, 4 * MIB, 256 * KIB, MIB)
BATCH_BYTES = 8 * MIB
SAMPLES = 240
SAMPLE_S_MIN = 0.05


@dataclass(slots=True)
class Watched:
    """The daemon's memory over the time of a soak."""

    resident: list[int] = field(default_factory=list)
    anonymous: list[int] = field(default_factory=list)

    def look(self, store: Filled) -> None:
        taken = store.process.memory_bytes()
        self.resident.append(taken["resident"])
        self.anonymous.append(taken["anonymous"])

    def figures(self) -> dict[str, float]:
        return {
            "samples": len(self.resident),
            "resident": max(self.resident),
            "anonymous": max(self.anonymous),
            "growth": growth(self.resident),
            "anonymous_growth": growth(self.anonymous),
        }


def growth(samples: Sequence[float]) -> float:
    """The mean of the second half beside that of the first. Raises BenchFailed if there are not two halves."""
    half = len(samples) // 2
    if not half:
        raise BenchFailed("the soak was too short to look at memory twice")
    return fmean(samples[-half:]) / fmean(samples[:half])


class _Size:
    """The buffers of one size, and the batch that was stored last."""

    def __init__(self, size: int) -> None:
        self.count = max(BATCH_BYTES // size, 1)
        self.base = base_payload(size)
        self.sources = Buffers(size, self.count, self.base).views
        self.targets = Buffers(size, self.count).views
        self.names: list[BlockName] = []


def soak(ground: Ground) -> dict[str, float]:
    """Store and read for the time of the settings; figures of memory. Raises BenchFailed."""
    capacity_bytes = max(ground.settings.put_capacity_bytes, CAPACITY_BLOCKS_MIN * max(SIZES))
    with ground.store("soak", capacity_bytes) as store:
        sizes = [_Size(size) for size in SIZES]
        while not store.client.stats()["segments_recycled"]:
            _turn(ground, store, sizes)
        watched = Watched()
        return _watch(ground, store, sizes, watched)


def _watch(ground: Ground, store: Filled, sizes: Sequence[_Size], watched: Watched) -> dict[str, float]:
    duration_s = ground.settings.soak_s
    every_s = max(duration_s / SAMPLES, SAMPLE_S_MIN)
    began_s = time.monotonic()
    next_s, found, asked = began_s, 0, 0
    while time.monotonic() < began_s + duration_s or len(watched.resident) < 2:
        found += _turn(ground, store, sizes)
        asked += sum(size.count for size in sizes)
        if time.monotonic() >= next_s:
            watched.look(store)
            next_s += every_s
            if len(watched.resident) % (SAMPLES // 8) == 0:
                ground.progress(f"soak: {time.monotonic() - began_s:.0f} of {duration_s:.0f} s")
    recycled = float(store.client.stats()["segments_recycled"])
    return {"seconds": time.monotonic() - began_s, **watched.figures(), "recycled": recycled, "found": found / asked}


def _turn(ground: Ground, store: Filled, sizes: Sequence[_Size]) -> int:
    """One batch of each size is stored, then each is read back. How many blocks came."""
    for size in sizes:
        size.names = names_of(store.space, next(ground.seeds), size.count)
        put(store.client, store.space, stamp(size.names, size.sources))
    return sum(_read(store, size) for size in sizes)


def _read(store: Filled, size: _Size) -> int:
    statuses = store.client.get_into(store.space, size.names, size.targets, deadline_s=CALL_S_MAX)
    came = [at for at, status in enumerate(statuses) if status == GetStatus.OK]
    names, views = [size.names[at] for at in came], [size.targets[at] for at in came]
    if wrong := differing(names, views, size.base):
        raise BenchFailed(f"{wrong} of {len(came)} blocks came back with other bytes")
    return len(came)
