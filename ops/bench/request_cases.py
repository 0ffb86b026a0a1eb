"""Cases of small requests and of mixtures: look-ups, look-ups beside bulk readers, reads beside writes, restarts.

Owns what runs against what, and the bars. Invariants: every answer of a look-up is compared with what is stored; bulk
readers and mixed loads are processes of their own; a restart is counted from starting the program to the first answer.
"""

from __future__ import annotations

import itertools
import random
import shutil
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager

from kvstore.client import StoreClient
from kvstore.keys import BlockName
from kvstore.limits import KEY_BYTES, KIB, MIB, TOKEN_DIGEST_BYTES
from kvstore.store import Pin, Presence
from ops.bench.baselines import Buffers
from ops.bench.blocks import SPACE, chain_of
from ops.bench.echo import Echo
from ops.bench.ground import BenchFailed, Filled, Ground
from ops.bench.loads import Loads
from ops.bench.measure import Bar, Case, Contender, Elsewhere
from ops.bench.peers import NO_SERVER, PEER_FAILURES, Peer
from ops.bench.served import StoreProcess

SET = "set in this process"
ROUND_TRIP = "loopback, same bytes"
ALONE = "alone"
READS_ALONE = "reads alone"
RAW_MIX = "preadv and pwrite"
EMPTY = "empty store"

CHAIN_BLOCKS_MAX = 16_384
CHAINS_ASKED_MAX = 8
"""Names of so many chains are kept in memory to ask for; what is stored may be much more."""
SMALL_PAYLOAD_BYTES = 64
SMALL_LOOKUP_KEYS = 16
LOOKUP_KEYS = (1024, 16_384)
LOADS = 2
"""Client processes that read in bulk, or mix."""
SMALL_CAPACITY_BYTES = 68 * KIB
"""Capacity for each small block, though it takes a page: the index, a 64th of the capacity, has to hold its entry."""
FILL_SHARE = 0.5
"""Of the time left, what storing many small blocks may take; then fewer have to do."""
ABSENT_SEED = 1 << 40
ABSENT_PARTS = 4


@contextmanager
def many_blocks(ground: Ground, ends_s: float) -> Iterator[tuple[Filled, list[Sequence[BlockName]], int]]:
    """A store of many small blocks, the names of a few of its chains, and how many blocks it has."""
    wanted = ground.settings.blocks
    capacity_bytes = max(SMALL_CAPACITY_BYTES * wanted, 64 * MIB)
    stop_s = time.monotonic() + FILL_SHARE * (ends_s - time.monotonic())
    with ground.store("many", capacity_bytes) as store:
        empty_bytes = store.process.memory_bytes()["anonymous"]
        chains: list[Sequence[BlockName]] = []
        stored = 0
        while stored < wanted and (not stored or time.monotonic() < stop_s):
            count = min(CHAIN_BLOCKS_MAX, wanted - stored)
            seed = next(ground.seeds)
            ground.fill(store, SMALL_PAYLOAD_BYTES, count, seed)
            if len(chains) < CHAINS_ASKED_MAX:
                chains.append(chain_of(store.space, seed, count))
            stored += count
            if stored % (16 * CHAIN_BLOCKS_MAX) == 0:
                ground.progress(f"stored {stored} of {wanted} small blocks")
        grown_bytes = store.process.memory_bytes()["anonymous"] - empty_bytes
        ground.memory["many small blocks"] = {
            "blocks": stored,
            "anonymous_bytes_per_block": grown_bytes / stored,
            "presence_bytes_per_block": store.client.stats()["presence_bytes"] / stored,
        }
        yield store, chains, stored


def lookup_cases(ground: Ground, store: Filled, chains: Sequence[Sequence[BlockName]], stored: int) -> Generator[Case]:
    """Look-ups of many keys at once: all present, all absent; of one chain each, and one part after another of many
    chains, so that what was asked for before is not what is in the processor's cache.
    """
    everything = [name for chain in chains for name in chain]
    kept: set[bytes] = {name.key for name in everything}
    drawn = random.Random(5)
    for count in LOOKUP_KEYS:
        present = [part for chain in chains for part in _parts(chain, count)] or [drawn.choices(everything, k=count)]
        drawn.shuffle(present)
        absent = _parts(chain_of(store.space, ABSENT_SEED, ABSENT_PARTS * count), count)
        hits = _lookup(store, present, Presence.PRESENT)
        misses = _lookup(store, absent, Presence.NEVER)
        bar = Bar("rate", 2.5e6) if count == LOOKUP_KEYS[0] else Bar("p99_s", 0.010)
        request_bytes = count * (KEY_BYTES + TOKEN_DIGEST_BYTES)
        with closing(Echo.start(request_bytes)) as echo:
            limits = (
                Contender(SET, "limit", count, _member(kept, present[0])),
                _round_trip(echo, Buffers(request_bytes, 1).views, count),
            )
            peers = (_existing(peer, count) for peer in ground.peers if peer.name not in NO_SERVER)
            mine = Contender("reprise", "store", count, hits, pids=store.process.pids)
            notes = (f"{stored} blocks stored",)
            against = (bar, Bar("rate", 1.7, "mooncake")) if count == LOOKUP_KEYS[0] else (bar,)
            yield Case("look-up present", "keys", (mine, *limits, *peers), against, batch=count, notes=notes)
            mine = Contender("reprise", "store", count, misses, pids=store.process.pids)
            among = (mine, *limits, Contender("hits", "baseline", count, hits))
            bars = (bar, Bar("rate", 0.9, "hits"))
            yield Case("look-up absent", "keys", among, bars, batch=count, notes=notes)


def _round_trip(echo: Echo, views: Sequence[memoryview], count: int) -> Contender:
    return Contender(ROUND_TRIP, "baseline", count, lambda: echo.put(views), pids=lambda: echo.pids)


def _existing(peer: Peer, count: int) -> Contender:
    return Contender(peer.name, "peer", count, lambda: peer.exists(count), pids=peer.pids, may_fail=PEER_FAILURES)


def _parts(chain: Sequence[BlockName], count: int) -> list[Sequence[BlockName]]:
    """Runs of ``count`` names of a chain; what is left over is left out."""
    return [chain[begin : begin + count] for begin in range(0, len(chain) - count + 1, count)]


def _lookup(store: Filled, asks: Sequence[Sequence[BlockName]], expected: Presence) -> Callable[[], None]:
    """One look-up at a time, of the next part."""
    turns = itertools.cycle(asks)

    def once() -> None:
        answer = store.client.lookup(store.space, next(turns))
        if not bool((answer.presence == expected).all()):
            raise BenchFailed(f"a look-up did not find every key {expected.name}")

    return once


def _member(kept: set[bytes], names: Sequence[BlockName]) -> Callable[[], None]:
    def once() -> None:
        for name in names:
            _ = name.key in kept

    return once


def beside_cases(ground: Ground) -> Generator[Case]:
    """Small look-ups beside two bulk readers over the network, and these readers beside such look-ups."""
    size, batch = MIB, ground.settings.batch
    with ExitStack() as stack:
        store = stack.enter_context(ground.store("beside", max(3 * ground.settings.population(size) * size, 64 * MIB)))
        seed = next(ground.seeds)
        chain = ground.fill(store, size, ground.settings.population(size), seed)
        readers = Loads.start([store.process.tcp] * LOADS, size, batch, (seed, len(chain)), next(ground.seeds))
        stack.callback(readers.close)
        asks = _lookup(store, [chain[:SMALL_LOOKUP_KEYS]], Presence.PRESENT)
        amount = min(SMALL_LOOKUP_KEYS, len(chain))
        yield Case(
            "look-up beside 2 readers",
            "keys",
            (
                Contender("reprise", "store", amount, asks, around=readers.reading),
                Contender(ALONE, "limit", amount, asks),
            ),
            (Bar("p50_s", 0.0003), Bar("p99_s", 0.0025)),
            batch=amount,
            notes=("readers over TCP, batches of 1 MiB blocks",),
        )

        def read() -> Elsewhere:
            return readers.read(1)

        def served() -> tuple[int, ...]:
            return (*store.process.pids(), *readers.pids())

        moved = LOADS * size * batch
        yield Case(
            "2 readers beside look-ups",
            "B",
            (
                Contender("reprise", "store", moved, read, around=lambda: _repeating(asks), pids=served),
                Contender(ALONE, "limit", moved, read, pids=served),
            ),
            (Bar("rate", 0.8, ALONE, enough=5e9),),
            size,
            batch,
            ("one client process looks up meanwhile, one request after another",),
        )


@contextmanager
def _repeating(once: Callable[[], None]) -> Iterator[None]:
    """Do something again and again in another thread meanwhile. Raises BenchFailed if it failed."""
    over = threading.Event()
    failures: list[str] = []

    def repeat() -> None:
        while not over.is_set():
            try:
                once()
            except BenchFailed as error:
                failures.append(str(error))
                return

    thread = threading.Thread(target=repeat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(30.0)
    if failures:
        raise BenchFailed(failures[0])


def mixed_cases(ground: Ground) -> Generator[Case]:
    """Two client processes that read and write single blocks of 1 MiB, 90/10 and 50/50, over the Unix socket.

    What is read is pinned: the faster the store, the sooner what is written would drive it out.
    """
    size, calls = MIB, ground.settings.mix_calls
    population = ground.settings.population(size)
    capacity_bytes = max(2 * population * size + ground.settings.put_capacity_bytes, 400 * MIB)
    with ExitStack() as stack:
        store = stack.enter_context(ground.store("mixed", capacity_bytes))
        seed = next(ground.seeds)
        names = ground.fill(store, size, population, seed)
        store.client.pin([Pin(store.space, name.key, "bench", "read all along") for name in names])
        chain = (seed, population)
        loads = Loads.start([store.process.unix] * LOADS, size, 1, chain, next(ground.seeds))
        stack.callback(loads.close)
        raws = Loads.start(
            [f"file:{ground.folder / f'raw-{at}'}" for at in range(LOADS)], size, 1, chain, next(ground.seeds)
        )
        stack.callback(raws.close)
        for share in (0.9, 0.5):
            yield _mixed_case(store, loads, raws, size, calls, share)


def _mixed_case(store: Filled, loads: Loads, raws: Loads, size: int, calls: int, share: float) -> Case:
    def mixing(side: Loads, reads: float) -> Callable[[], Elsewhere]:
        return lambda: side.mix(calls, reads)

    def working() -> tuple[int, ...]:
        return (*store.process.pids(), *loads.pids())

    moved = LOADS * calls * size
    return Case(
        f"mixed {share:.0%} reads",
        "B",
        (
            Contender("reprise", "store", moved, mixing(loads, share), pids=working),
            Contender(RAW_MIX, "limit", moved, mixing(raws, share), pids=raws.pids),
            Contender(READS_ALONE, "baseline", moved, mixing(loads, 1.0), pids=working),
        ),
        (Bar("p99_s", 2.0, READS_ALONE),),
        size,
        1,
        ("p50, p99 and p99.9 are of the reads; those of the writes stand beside them",),
    )


def restart_cases(ground: Ground, store: Filled, name: BlockName, stored: int) -> Generator[Case]:
    """Starting again after kill -9, with the index and without it."""
    with ExitStack() as stack:
        empty = StoreProcess.start(ground.folder / "empty", 64 * MIB)
        stack.callback(shutil.rmtree, ground.folder / "empty", ignore_errors=True)
        stack.callback(empty.end)
        for indexed in (True, False):
            yield Case(
                "restart after kill -9" if indexed else "restart without the index",
                "starts",
                (
                    Contender(
                        "reprise", "store", 1, lambda: _start(store.process, name), _killing(store.process, indexed)
                    ),
                    Contender(EMPTY, "limit", 1, lambda: _start(empty, None), empty.kill),
                ),
                (Bar("p50_s", 3.0 if indexed else 20.0),),
                batch=stored,
                notes=(f"{stored} blocks stored",),
            )


def _killing(process: StoreProcess, indexed: bool) -> Callable[[], None]:
    def kill() -> None:
        process.kill()
        if not indexed:
            shutil.rmtree(process.folder / "data" / "index")

    return kill


def _start(process: StoreProcess, name: BlockName | None) -> Elsewhere:
    """Seconds from starting the program to the first answer, which must be right."""
    began_s = time.perf_counter()
    process.begin()
    client = StoreClient.connect([process.unix])
    try:
        if name is None:
            client.register_space(SPACE)
        else:
            answer = client.lookup(client.register_space(SPACE), [name])
            if answer.prefix_blocks() != 1:
                raise BenchFailed("a stored block is gone after a restart")
    finally:
        client.close()
    return Elsewhere(time.perf_counter() - began_s)
