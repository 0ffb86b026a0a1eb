"""What the cases of the store bench stand on: the folder, the sizes of things, running stores, peers and buffers.

Owns the settings and the life of everything that is started. Does not know the cases. Invariants: all lies under one
folder, which is removed at the end; all that was started is ended whatever happens.
"""

from __future__ import annotations

import itertools
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from kvstore.client import StoreClient
from kvstore.keys import BlockName, SpaceId
from kvstore.limits import BATCH_BLOCKS_MAX, GIB, KIB, MIB
from kvstore.store import AckLevel, BlockPut, GetStatus, PutOutcome
from kvstore.traffic import AGENT, TrafficClass
from ops.bench.baselines import Buffers
from ops.bench.blocks import SPACE, base_payload, differing, names_of, stamp
from ops.bench.peers import Peer, Skipped, start
from ops.bench.served import StoreProcess

Progress = Callable[[str], None]

CALL_S_MAX = 60.0
FILL_BATCH_BYTES = 64 * MIB
READ_CAPACITY_FACTOR = 2
SMALL_RECORD_BYTES = 5 * KIB
"""Room on disk for a block of a few bytes: a page, and some for what is not full."""
CAPACITY_BLOCKS_MIN = 64
"""A small volume has about 32 segments; with fewer, the largest blocks would not fit into one."""
SPACE_NEEDED_FACTOR = 2
"""Free bytes that the folder's file system must have, over what the bench will write."""


class BenchFailed(Exception):
    """A case could not be measured: something did not do what it should."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What is measured and how large. ``blocks``: small blocks that look-ups and restarts have before them."""

    sizes: tuple[int, ...] = (64 * 1024, 256 * 1024, MIB, 4 * MIB)
    groups: tuple[str, ...] = ()
    peers: tuple[str, ...] = ()
    peers_python: str = ""
    rounds: int = 5
    sample_s: float = 0.2
    seconds_max: float = 1200.0
    batch: int = 64
    population_bytes: int = 256 * MIB
    put_capacity_bytes: int = 2 * GIB
    blocks: int = 1_000_000
    mix_calls: int = 50
    soak_s: float = 0.0
    """How long memory is watched while blocks are stored and read; 0 for not at all."""
    trace: Path | None = None
    """An access pattern to replay; a made-up one if there is none."""
    trace_requests: int = 1000
    trace_block_bytes: int = 256 * KIB
    trace_capacity_bytes: int = 8 * GIB

    def population(self, size: int) -> int:
        """Blocks of a size that gets choose from."""
        return max(self.population_bytes // size, self.batch)

    @property
    def disk_bytes(self) -> int:
        """About what the bench will write."""
        payload_bytes = sum(3 * self.population(size) * size for size in self.sizes)
        traced_bytes = self.trace_capacity_bytes if not self.groups or "trace" in self.groups else 0
        return self.put_capacity_bytes + payload_bytes + self.blocks * SMALL_RECORD_BYTES + traced_bytes


def quick(settings: Settings) -> Settings:
    """A run that only shows that everything works."""
    return replace(
        settings,
        sample_s=0.002,
        batch=8,
        population_bytes=MIB,
        put_capacity_bytes=max(64 * MIB, CAPACITY_BLOCKS_MIN * max(settings.sizes)),
        blocks=2048,
        mix_calls=4,
        trace_requests=20,
        trace_block_bytes=16 * KIB,
        trace_capacity_bytes=256 * MIB,
    )


@dataclass(slots=True)
class Filled:
    """A running store with a client of it. ``chains``: the names that were stored, by payload size."""

    process: StoreProcess
    client: StoreClient
    space: SpaceId
    chains: dict[int, list[BlockName]] = field(default_factory=dict)


@dataclass(slots=True)
class Ground:
    """The folder and everything that runs in it, for the time of one bench. ``memory``: what processes took."""

    settings: Settings
    folder: Path
    progress: Progress
    stack: ExitStack
    peers: list[Peer] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)
    memory: dict[str, dict[str, float]] = field(default_factory=dict)
    sweeps: dict[str, float] = field(default_factory=dict)
    """What sweeps under measurement did."""
    seeds: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    @contextmanager
    def store(self, name: str, capacity_bytes: int, page_cache: str = "keep") -> Iterator[Filled]:
        """A fresh daemon, ended and its folder removed when the cases that need it are over."""
        folder = self.folder / name
        with ExitStack() as stack:
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
            process = StoreProcess.start(folder, capacity_bytes, page_cache)
            stack.callback(process.end)
            filled = self.attach(stack, process)
            yield filled
            taken = process.memory_bytes()
            before = self.memory.get("daemon", {})
            self.memory["daemon"] = {kind: max(count, before.get(kind, 0)) for kind, count in taken.items()}

    def attach(self, stack: ExitStack, process: StoreProcess) -> Filled:
        """A client of a running daemon over its Unix socket, which knows the bench's space."""
        client = StoreClient.connect([process.unix])
        stack.callback(client.close)
        return Filled(process, client, client.register_space(SPACE))

    def forget(self, peer: str) -> None:
        """Leave a peer out from now on; it is ended with the others."""
        self.peers = [one for one in self.peers if one.name != peer]

    def fill(
        self, store: Filled, size: int, count: int, seed: int = 0, *, traffic_class: TrafficClass = AGENT
    ) -> list[BlockName]:
        """Store one chain of ``count`` blocks; its names."""
        names = names_of(store.space, seed or next(self.seeds), count)
        per_batch = min(max(FILL_BATCH_BYTES // size, 1), BATCH_BLOCKS_MAX, count)
        views = Buffers(size, per_batch, base_payload(size)).views
        for begin in range(0, count, per_batch):
            part = names[begin : begin + per_batch]
            put(store.client, store.space, stamp(part, views[: len(part)]), traffic_class=traffic_class)
        return names


@contextmanager
def ground(settings: Settings, parent: Path | None, progress: Progress) -> Iterator[Ground]:
    """A folder under ``parent`` with the peers started. Raises ValueError if the disk is too small for the bench."""
    with ExitStack() as stack:
        folder = Path(tempfile.mkdtemp(prefix="reprise-bench-", dir=parent)).absolute()
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        free = shutil.disk_usage(folder).free
        if free < SPACE_NEEDED_FACTOR * settings.disk_bytes:
            raise ValueError(
                f"{folder.parent} has {free // MIB} MiB free, and the bench wants {SPACE_NEEDED_FACTOR} times the "
                f"{settings.disk_bytes // MIB} MiB that it writes: give another folder with --data, or fewer --sizes"
            )
        here = Ground(settings, folder, progress, stack)
        here.peers, here.skipped, here.versions = start(settings.peers, folder, settings.peers_python)
        for peer in here.peers:
            stack.callback(peer.close)
        for skipped in here.skipped:
            progress(f"peer {skipped.name} is skipped: {skipped.reason}")
        yield here


# --- checked calls --------------------------------------------------------------------------------------------------


def put(
    client: StoreClient,
    space: SpaceId,
    blocks: Sequence[BlockPut],
    ack: AckLevel = "os",
    *,
    traffic_class: TrafficClass = AGENT,
) -> None:
    """Store new blocks. Raises BenchFailed unless each was stored."""
    outcomes = client.put(space, blocks, traffic_class=traffic_class, ack=ack, deadline_s=CALL_S_MAX)
    if set(outcomes) != {PutOutcome.STORED}:
        raise BenchFailed(f"puts ended {sorted({outcome.name for outcome in outcomes})}")


def get(client: StoreClient, space: SpaceId, names: Sequence[BlockName], views: Sequence[memoryview]) -> None:
    """Read blocks. Raises BenchFailed unless each came, verified."""
    statuses = client.get_into(space, names, views, deadline_s=CALL_S_MAX)
    if set(statuses) != {GetStatus.OK}:
        raise BenchFailed(f"gets ended {sorted({status.name for status in statuses})}")


def check(client: StoreClient, space: SpaceId, names: Sequence[BlockName], views: Sequence[memoryview]) -> None:
    """Read blocks and compare every byte with what was stored. Raises BenchFailed."""
    chosen = random.Random(2).sample(list(names), len(views))
    get(client, space, chosen, views)
    if wrong := differing(chosen, views, base_payload(len(views[0]))):
        raise BenchFailed(f"{wrong} of {len(views)} blocks came back with other bytes")
