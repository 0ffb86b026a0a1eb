"""Our tier of vLLM against vLLM's own file tier, through vLLM's own manager; runs inside an environment with vLLM.

    python -m ops.bench.attach_tier --store unix:/run/reprise/store.sock --folder /srv/bench

Prints one line of JSON: figures by tier. Owns the rounds and the figures. Does not know the tiers, nor the node behind
ours. Invariants: every tier has a manager and memory of its own and does the same jobs in every round, beginning with
another one each time; keys are new in every round; what was loaded is compared with what was stored, byte by byte,
outside the time that counts.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt
from vllm.v1.kv_offload.base import OffloadKey, ReqContext, make_offload_key

from ops.bench.baselines import drop_cache
from ops.bench.tier_drive import ASK, POLL, PROMOTE, TIER_MODULE, WEIGHTS_DIGEST, Drive, DriveError, Steps, open_drive

REPRISE, FS, FS_BUFFERED = "reprise", "fs", "fs buffered"
"""The file tier goes around the page cache where it can; told not to, it is the harder one to beat."""
CHUNK_BYTES = 2 << 20
"""16 tokens of a model of 8 billion parameters."""
REQUESTS = 4
REQUEST_CHUNKS = 16
LOOK_UP_KEYS = 4096
ROUNDS, ROUNDS_MIN, SECONDS_MAX = 15, 5, 45.0
"""As many rounds as there is time for: a disk that neighbours use as well is twice as fast in one as in the next."""
COLD_ROUNDS = 3
FILL_ROUNDS = 9
"""Rounds of our stores alone, before all else: a node of 1 GiB is full then, as nodes are but for their first days."""
STEP_KINDS = (ASK, POLL, PROMOTE)
"""Every request's load has these. Each counts alike: a slower tier has more polls, which are the cheapest steps."""
GIGA = 1e9


@dataclass(slots=True)
class Contender:
    """A tier under measurement. ``files``: the folder of its files, to drop them from the page cache."""

    name: str
    drive: Drive
    files: Path | None
    fill_s: list[float] = field(default_factory=list)
    store_s: list[float] = field(default_factory=list)
    load_s: list[float] = field(default_factory=list)
    load_cold_s: list[float] = field(default_factory=list)
    look_up_s: list[float] = field(default_factory=list)

    def reset(self) -> None:
        """Forget what was measured so far."""
        for samples in (self.store_s, self.load_s, self.load_cold_s, self.look_up_s):
            samples.clear()
        self.drive.steps = Steps()

    def figures(self, job_bytes: int, kinds: Sequence[str], other: Contender) -> dict[str, float]:
        """Medians over the rounds; ``..._over_fs``: of the ratios to the ``other`` in the same round.

        ``kinds``: of steps that every tier had.
        """
        steps = self.drive.steps
        by_kind = {kind: 1e6 * median(steps.wall_s[kind]) for kind in kinds}
        figures = {
            "load_gb_per_s": job_bytes / GIGA / median(self.load_s),
            "store_gb_per_s": job_bytes / GIGA / median(self.store_s),
            "load_over_fs": median(_over(other.load_s, self.load_s)),
            "store_over_fs": median(_over(other.store_s, self.store_s)),
            "store_over_fs_q1": quartile(_over(other.store_s, self.store_s)),
            "lookups_per_s": LOOK_UP_KEYS / median(self.look_up_s),
            "step_us": sum(by_kind.values()) / len(by_kind),
            **{f"step_{kind}_us": seconds for kind, seconds in by_kind.items()},
            "step_cpu_us": 1e6 * sum(median(steps.cpu_s[kind]) for kind in kinds) / len(kinds),
            "begin_store_us": 1e6 * median(steps.storing_s),
        }
        if self.fill_s:
            figures["store_new_gb_per_s"] = job_bytes / GIGA / median(self.fill_s)
        if self.load_cold_s:
            figures["load_cold_gb_per_s"] = job_bytes / GIGA / median(self.load_cold_s)
        return figures


def _over(theirs: Sequence[float], mine: Sequence[float]) -> list[float]:
    return [their_s / my_s for their_s, my_s in zip(theirs, mine, strict=True)]


def quartile(values: Sequence[float]) -> float:
    """A quarter of the values are not above it."""
    return sorted(values)[(len(values) - 1) // 4]


@dataclass(frozen=True, slots=True)
class Jobs:
    """What every tier does in one round: requests of some chunks each, under keys that nobody has."""

    keys: Sequence[Sequence[OffloadKey]]
    payloads: Sequence[Sequence[npt.NDArray[np.uint8]]]

    @classmethod
    def new(cls, payloads: Sequence[Sequence[npt.NDArray[np.uint8]]]) -> Jobs:
        return cls([new_keys(len(row)) for row in payloads], payloads)


def new_keys(count: int) -> list[OffloadKey]:
    return [make_offload_key(os.urandom(32), 0) for _ in range(count)]


def measure(
    store: str,
    folder: Path,
    *,
    data: Path | None = None,
    rounds: int = ROUNDS,
    seconds_max: float = SECONDS_MAX,
    chunk_bytes: int = CHUNK_BYTES,
) -> dict[str, dict[str, float]]:
    """Figures by tier. ``store``: a node's address; ``data``: its folder, if cold loads are wanted.

    ``folder`` is where the file tier writes, emptied afterwards. No round begins after ``seconds_max``, but for the
    first ROUNDS_MIN. Raises DriveError, also for bytes that differ.
    """
    source = np.frombuffer(os.urandom(chunk_bytes + REQUESTS * REQUEST_CHUNKS), np.uint8)
    payloads = [
        [source[(at := row * REQUEST_CHUNKS + column) : at + chunk_bytes] for column in range(REQUEST_CHUNKS)]
        for row in range(REQUESTS)
    ]
    with _contenders(store, folder, data, chunk_bytes) as contenders:
        for _ in range(FILL_ROUNDS):
            _fill(contenders[0], Jobs.new(payloads))
        began_s = time.monotonic()
        for number in range(rounds + 1):
            if number > ROUNDS_MIN and time.monotonic() - began_s > seconds_max:
                break
            jobs = Jobs.new(payloads)
            if number == 1:  # the round before was for warming up
                for contender in contenders:
                    contender.reset()
            for contender in _in_turns(contenders, number):
                _round(contender, jobs)
        for number in range(COLD_ROUNDS if data is not None else 0):
            for contender in _in_turns(contenders, number):
                _load_cold(contender, jobs)
        job_bytes = REQUESTS * REQUEST_CHUNKS * chunk_bytes
        had = [contender.drive.steps.wall_s for contender in contenders]
        kinds = [kind for kind in STEP_KINDS if all(kind in one for one in had)]
        (other,) = (contender for contender in contenders if contender.name == FS)
        return {contender.name: contender.figures(job_bytes, kinds, other) for contender in contenders}


def _in_turns(contenders: Sequence[Contender], number: int) -> list[Contender]:
    return [contenders[(number + at) % len(contenders)] for at in range(len(contenders))]


def _fill(contender: Contender, jobs: Jobs) -> None:
    """Store into a new node: into segments that it makes for that, where one that is full uses old ones again."""
    contender.fill_s.append(_store(contender.drive, jobs))
    contender.drive.forget()


def _round(contender: Contender, jobs: Jobs) -> None:
    """Store, load, look up what is not there: each timed by itself, on an empty primary tier."""
    drive = contender.drive
    os.sync()  # nobody pays for what another one wrote
    contender.store_s.append(_store(drive, jobs))
    drive.forget()
    contender.load_s.append(_load(drive, jobs))
    drive.forget()
    steps, drive.steps = drive.steps, Steps()  # of that many keys: not to be mixed with those of loads
    asked = [(drive.request(), new_keys(LOOK_UP_KEYS // REQUESTS)) for _ in range(REQUESTS)]
    began_s = time.perf_counter()
    hits = drive.look_up(asked)
    contender.look_up_s.append(time.perf_counter() - began_s)
    drive.steps = steps
    drive.finish(*(request for request, _ in asked))
    if any(hits):
        raise DriveError(f"{contender.name} has chunks that nobody stored")


def _load_cold(contender: Contender, jobs: Jobs) -> None:
    """Load once more what the last round stored, from the device."""
    if contender.files is not None:
        drop_cache(contender.files)
        contender.load_cold_s.append(_load(contender.drive, jobs))
        contender.drive.forget()


def _store(drive: Drive, jobs: Jobs) -> float:
    """Seconds until the secondary tier has what lies in the primary."""
    requests = [drive.request() for _ in jobs.keys]
    taken = [
        drive.fill(request, keys, payloads)
        for request, keys, payloads in zip(requests, jobs.keys, jobs.payloads, strict=True)
    ]
    if sum(map(len, taken)) != sum(map(len, jobs.keys)):
        raise DriveError("the primary tier is too small")
    began_s = time.perf_counter()
    for request, keys in zip(requests, taken, strict=True):
        drive.complete(request, keys)
    drive.settle()
    seconds = time.perf_counter() - began_s
    drive.finish(*requests)
    return seconds


def _load(drive: Drive, jobs: Jobs) -> float:
    """Seconds from the first look-up until all of it lies in the primary tier, where it is then compared."""
    asked: list[tuple[ReqContext, Sequence[OffloadKey]]] = [(drive.request(), keys) for keys in jobs.keys]
    began_s = time.perf_counter()
    hits = drive.look_up(asked)
    seconds = time.perf_counter() - began_s
    if hits != [len(keys) for keys in jobs.keys]:
        raise DriveError(f"stored {[len(keys) for keys in jobs.keys]} chunks, found {hits}")
    for (request, keys), payloads in zip(asked, jobs.payloads, strict=True):
        for row, payload in zip(drive.read(request, keys), payloads, strict=True):
            if not np.array_equal(row[: payload.size], payload):
                raise DriveError("a chunk came back with other bytes")
    drive.finish(*(request for request, _ in asked))
    return seconds


@contextmanager
def _contenders(store: str, folder: Path, data: Path | None, chunk_bytes: int) -> Iterator[list[Contender]]:
    """Every tier, opened; ended and its files removed when the block is."""
    files = {name: folder / name.replace(" ", "-") for name in (FS, FS_BUFFERED)}
    ours: dict[str, Any] = {"type": "RepriseTier", "module_path": TIER_MODULE, "store": store}
    ours |= {"weights_digest": WEIGHTS_DIGEST, "lookup_deadline_s": 5.0, "load_deadline_s": 30.0}
    made: list[Contender] = []
    chunks = 2 * REQUESTS * REQUEST_CHUNKS + 2  # what waits to be stored may be half of it, in ours
    try:
        made.append(Contender(REPRISE, open_drive(ours, chunks=chunks, chunk_bytes=chunk_bytes), data))
        for name, root in files.items():
            drive = open_drive({"type": "fs", "root_dir": str(root)}, chunks=chunks, chunk_bytes=chunk_bytes)
            made.append(Contender(name, drive, root if data is not None else None))
        made[-1].drive.tier._use_o_direct = False
        yield made
    finally:
        for contender in made:
            contender.drive.close()
        for root in files.values():
            shutil.rmtree(root, ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Our tier of vLLM against its file tier; prints JSON.")
    parser.add_argument("--store", required=True, help="a node's address, such as unix:/run/reprise/store.sock")
    parser.add_argument("--folder", required=True, type=Path, help="where the file tier writes; best beside the node's")
    parser.add_argument("--data", type=Path, help="the node's data directory: measure loads from the device too")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--seconds", type=float, default=SECONDS_MAX, help="begin no round after so long")
    parser.add_argument("--chunk-bytes", type=int, default=CHUNK_BYTES)
    given = parser.parse_args()
    figures = measure(
        given.store,
        given.folder,
        data=given.data,
        rounds=given.rounds,
        seconds_max=given.seconds,
        chunk_bytes=given.chunk_bytes,
    )
    print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    main()
