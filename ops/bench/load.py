"""A client process that reads and writes single blocks in a fixed mix, or reads batches until it is told to stop.

Owns one client and its random choices. A process of its own, since the clients of a store are, and one interpreter
would count its own lock as the store's latency. Invariant: what is read back is checked by the client's checksums; a
read that is not OK ends the process.

    stdin   {"do": "mix", "calls": N, "read_share": 0.9}      N single reads and writes
            {"do": "read", "calls": N}                        N batches
            {"do": "begin"} ... {"do": "end"}                 batches until told to end
    stdout  {"seconds": ..., "bytes": ..., "reads_s": [...], "writes_s": [...]}
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import threading
import time
from pathlib import Path
from typing import Any, Protocol

from kvstore.client import StoreClient
from kvstore.store import GetStatus, PutOutcome
from kvstore.traffic import AGENT
from ops.bench.baselines import Buffers, RawFile
from ops.bench.blocks import SPACE, base_payload, names_of, stamp

CALL_S_MAX = 60.0
END_S = 30.0


class LoadFailed(Exception):
    """A read or a write of the load did not do what it should."""


class Side(Protocol):
    """What the load is put on."""

    def read(self, count: int) -> None: ...

    def write(self) -> None: ...


class StoreSide:
    """A store: random blocks of a filled chain are read, new ones written."""

    def __init__(self, address: str, size: int, batch: int, chain: tuple[int, int], seed: int) -> None:
        self._client = StoreClient.connect([address])
        self._space = self._client.register_space(SPACE)
        self._names = names_of(self._space, *chain)
        self._random = random.Random(seed)
        self._seed = seed << 32
        self._targets = Buffers(size, batch).views
        self._source = Buffers(size, 1, base_payload(size)).views

    def read(self, count: int) -> None:
        names = self._random.sample(self._names, count)
        statuses = self._client.get_into(self._space, names, self._targets[:count], deadline_s=CALL_S_MAX)
        if set(statuses) != {GetStatus.OK}:
            raise LoadFailed(f"reads ended {sorted({status.name for status in statuses})}")

    def write(self) -> None:
        self._seed += 1
        blocks = stamp(names_of(self._space, self._seed, 1), self._source)
        outcomes = self._client.put(self._space, blocks, traffic_class=AGENT, deadline_s=CALL_S_MAX)
        if outcomes != [PutOutcome.STORED]:
            raise LoadFailed(f"a write ended {outcomes[0].name}")


class FileSide:
    """One raw file: random blocks read by preadv, blocks written one behind the other."""

    def __init__(self, path: Path, size: int, batch: int, seed: int) -> None:
        self._file = RawFile.create(path, 64 * size)
        self._random = random.Random(seed)
        self._targets = Buffers(size, batch).views
        self._source = Buffers(size, 1, base_payload(size)).views

    def read(self, count: int) -> None:
        self._file.read_scattered(self._targets[:count], self._random)

    def write(self) -> None:
        self._file.write_on(self._source)


class Load:
    """Runs commands on a side."""

    def __init__(self, side: Side, size: int, batch: int, seed: int) -> None:
        self._side = side
        self._size = size
        self._batch = batch
        self._random = random.Random(seed)

    def mix(self, calls: int, read_share: float) -> dict[str, Any]:
        reads_s: list[float] = []
        writes_s: list[float] = []
        began_s = time.perf_counter()
        for _ in range(calls):
            reads = self._random.random() < read_share
            at_s = time.perf_counter()
            if reads:
                self._side.read(1)
            else:
                self._side.write()
            (reads_s if reads else writes_s).append(time.perf_counter() - at_s)
        return _answer(began_s, calls * self._size, reads_s, writes_s)

    def read(self, calls: int) -> dict[str, Any]:
        began_s = time.perf_counter()
        for _ in range(calls):
            self._side.read(self._batch)
        return _answer(began_s, calls * self._batch * self._size)

    def read_until(self, told: threading.Event) -> dict[str, Any]:
        began_s, calls = time.perf_counter(), 0
        while not told.is_set():
            self._side.read(self._batch)
            calls += 1
        return _answer(began_s, calls * self._batch * self._size)


def _answer(
    began_s: float, count: int, reads_s: list[float] | None = None, writes_s: list[float] | None = None
) -> dict[str, Any]:
    seconds = time.perf_counter() - began_s
    return {"seconds": seconds, "bytes": count, "reads_s": reads_s or [], "writes_s": writes_s or []}


def serve(load: Load) -> None:
    """Answer commands until stdin closes."""
    for line in sys.stdin:
        command = json.loads(line)
        match command["do"]:
            case "mix":
                answer = load.mix(command["calls"], command["read_share"])
            case "read":
                answer = load.read(command["calls"])
            case _:
                answer = _until_told(load)
        print(json.dumps(answer), flush=True)


def _until_told(load: Load) -> dict[str, Any]:
    """Read batches in a thread until the next line comes."""
    told = threading.Event()
    answers: list[dict[str, Any]] = []
    thread = threading.Thread(target=lambda: answers.append(load.read_until(told)), daemon=True)
    thread.start()
    sys.stdin.readline()
    told.set()
    thread.join(END_S)
    if not answers:
        raise LoadFailed("the reading thread did not end well")
    return answers[0]


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("target", help="address of a store, or file:PATH")
    for name in ("size", "batch", "chain_seed", "chain_blocks", "seed"):
        parser.add_argument(name, type=int)
    given = parser.parse_args()
    try:
        if given.target.startswith("file:"):
            side: Side = FileSide(Path(given.target.removeprefix("file:")), given.size, given.batch, given.seed)
        else:
            chain = (given.chain_seed, given.chain_blocks)
            side = StoreSide(given.target, given.size, given.batch, chain, given.seed)
        print(json.dumps({"ready": True}), flush=True)
        serve(Load(side, given.size, given.batch, given.seed))
    except Exception as error:  # the seam to the parent, which tells it to whoever asked for the measurement
        print(json.dumps({"error": f"{type(error).__name__}: {error}"}), flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
