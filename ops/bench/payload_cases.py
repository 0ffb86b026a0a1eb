"""Cases that move payload: get, put at both levels, and get from a cold cache.

Owns what runs against what, and the bars. Invariants: within a case all contenders fill or send the same buffers; gets
ask for scattered keys; every byte of a batch is compared with what was stored before and after a case of gets.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Protocol, TypeVar

from kvstore.client import StoreClient
from kvstore.direct import PIECE_BYTES, READS_AT_ONCE
from kvstore.keys import BlockName
from kvstore.limits import KIB, MIB
from kvstore.store import AckLevel
from ops.bench import fio
from ops.bench.baselines import DIRECT_THREADS, Buffers, DirectReader, RawFile, copy, device_read_bytes, drop_cache
from ops.bench.blocks import base_payload, names_of, stamp
from ops.bench.echo import Echo, FilePair
from ops.bench.ground import CAPACITY_BLOCKS_MIN, READ_CAPACITY_FACTOR, BenchFailed, Filled, Ground, check, get, put
from ops.bench.measure import Bar, Case, Contender, Kind
from ops.bench.peers import NO_SERVER, PEER_FAILURES, Peer

LOOPBACK = "loopback send/recv"
SENDFILE = "sendfile x2"
PREADV = "preadv"
PWRITE = "pwrite recycled"
FSYNC = "write + fdatasync"
DIRECT = "O_DIRECT read"
BARRED_BYTES_MIN = 256 * KIB
DISK_BATCH_BYTES = 64 * MIB
DEVICE_SHARE_MIN = 0.9


class Client:
    """One client over one transport, with the batch that it moves next."""

    def __init__(self, store: Filled, client: StoreClient, views: Sequence[memoryview], ground: Ground) -> None:
        self.store = store
        self._client = client
        self._views = views
        self._ground = ground
        self._random = random.Random(3)
        self._names: Sequence[BlockName] = ()

    def choose(self, chain: Sequence[BlockName]) -> None:
        self._names = self._random.sample(chain, len(self._views))

    def get(self) -> None:
        get(self._client, self.store.space, self._names, self._views)

    def renew(self) -> None:
        """New names, so that a put is one: the buffers hold their payloads."""
        self._names = names_of(self.store.space, next(self._ground.seeds), len(self._views))
        stamp(self._names, self._views)

    def put(self, ack: AckLevel) -> None:
        put(self._client, self.store.space, stamp(self._names, self._views), ack)


def get_cases(ground: Ground) -> Generator[Case]:
    """Warm gets over both transports, of one block and of a batch, at every size."""
    settings = ground.settings
    population_bytes = sum(settings.population(size) * size for size in settings.sizes)
    least_bytes = max(64 * MIB, CAPACITY_BLOCKS_MIN * max(settings.sizes))
    with ground.store("reads", max(READ_CAPACITY_FACTOR * population_bytes, least_bytes)) as store:
        for size in settings.sizes:
            ground.progress(f"storing {settings.population(size)} blocks of {size // KIB} KiB")
            chain = ground.fill(store, size, settings.population(size))
            for batch in (settings.batch, 1):
                for network in (False, True):
                    with _get_case(ground, store, chain, size, batch, network) as case:
                        yield case


@contextmanager
def _get_case(
    ground: Ground, store: Filled, chain: Sequence[BlockName], size: int, batch: int, network: bool
) -> Iterator[Case]:
    with ExitStack() as stack:
        views = Buffers(size, batch).views
        source = Buffers(size, batch, base_payload(size)).views
        echo = _closing(stack, Echo.start(size * batch))
        raw = _closing(stack, RawFile.create(ground.folder / "raw", ground.settings.population(size) * size))
        connection = _closing(stack, StoreClient.connect([store.process.tcp if network else store.process.unix]))
        client = Client(store, connection, views, ground)
        check(connection, store.space, chain, views)
        chosen = random.Random(4)
        amount = size * batch
        contenders = [
            Contender("reprise", "store", amount, client.get, lambda: client.choose(chain), pids=store.process.pids),
            Contender(PREADV, _limit_if(not network), amount, lambda: raw.read_scattered(views, chosen)),
            Contender(LOOPBACK, _limit_if(network), amount, lambda: echo.get(views), pids=lambda: echo.pids),
            Contender("memcpy", "baseline", amount, lambda: copy(source, views)),
            *(_reading(peer, size, views) for peer in ground.peers),
        ]
        if network:
            pair = _closing(stack, FilePair.start(size * batch))
            contenders.insert(
                3, Contender(SENDFILE, "baseline", amount, lambda: pair.get(views), pids=lambda: pair.pids)
            )
        yield Case(
            f"get {'network' if network else 'same host'}",
            "B",
            tuple(contenders),
            _get_bars(size, batch, network),
            size,
            batch,
            (f"{LOOPBACK}: one connection, {echo.congestion}",),
        )
        check(connection, store.space, chain, views)


def _get_bars(size: int, batch: int, network: bool) -> tuple[Bar, ...]:
    if batch == 1:
        if size != MIB:
            return ()
        return (Bar("p50_s", 0.6, "valkey"),) if network else (Bar("p50_s", 2.0, PREADV),)
    if size < BARRED_BYTES_MIN:
        return ()
    bars = (
        (Bar("rate", 1.3, LOOPBACK), Bar("rate", 2.0, "peer"))
        if network
        else (
            Bar("rate", 0.8, PREADV),
            Bar("rate", 2.2, "peer"),
        )
    )
    return (*bars, Bar("cpu_s_per_gb", 0.25 if network else 0.2)) if size == MIB else bars


def put_cases(ground: Ground) -> Generator[Case]:
    """Puts acknowledged at ``os``: over both transports, of one block and of a batch, into recycled segments; and from
    memory that the client shares.
    """
    settings = ground.settings
    with _recycled(ground) as store:
        for size in settings.sizes:
            for batch in (settings.batch, 1):
                for way in ("same host", "same host, in place", "network"):
                    with _put_case(ground, store, size, batch, way) as case:
                        yield case


def disk_cases(ground: Ground) -> Generator[Case]:
    """Puts acknowledged at ``disk``, 64 MiB in each batch."""
    with _recycled(ground) as store:
        for size in ground.settings.sizes:
            batch = min(DISK_BATCH_BYTES // size, ground.settings.batch * MIB // size) or 1
            with _put_case(ground, store, size, min(batch, 1024), "same host", ack="disk") as case:
                yield case


@contextmanager
def _recycled(ground: Ground) -> Iterator[Filled]:
    """A store that has been written full once and again a quarter: from now on it recycles."""
    size = max(ground.settings.sizes)
    count = ground.settings.put_capacity_bytes * 5 // 4 // size
    with ground.store("writes", ground.settings.put_capacity_bytes) as store:
        ground.progress(f"writing {count * size // MIB} MiB, so that segments are recycled from then on")
        ground.fill(store, size, count)
        yield store


@contextmanager
def _put_case(ground: Ground, store: Filled, size: int, batch: int, way: str, ack: AckLevel = "os") -> Iterator[Case]:
    with ExitStack() as stack:
        network, in_place = way == "network", way == "same host, in place"
        connection = _closing(stack, StoreClient.connect([store.process.tcp if network else store.process.unix]))
        views: Sequence[memoryview] = Buffers(size, batch, base_payload(size)).views
        if in_place:
            views = _made_in_place(stack, connection, views)
        targets = Buffers(size, batch).views
        echo = _closing(stack, Echo.start(size * batch))
        raw = _closing(
            stack, RawFile.create(ground.folder / "raw", max(2 * size * batch, ground.settings.population_bytes))
        )
        client = Client(store, connection, views, ground)
        amount = size * batch
        disk = ack == "disk"
        contenders = [
            Contender("reprise", "store", amount, lambda: client.put(ack), client.renew, pids=store.process.pids),
            Contender(PWRITE, _limit_if(not network and not disk), amount, lambda: raw.write_on(views)),
            Contender(LOOPBACK, _limit_if(network), amount, lambda: echo.put(views), pids=lambda: echo.pids),
            Contender("memcpy", "baseline", amount, lambda: copy(views, targets)),
        ]
        if disk:
            contenders.insert(1, Contender(FSYNC, "limit", amount, lambda: raw.write_on(views, sync=True)))
        else:
            contenders += [_writing(peer, size, views) for peer in ground.peers]
        name = "put disk" if disk else f"put os {way}"
        notes = () if disk else ("peers overwrite the same keys and keep nothing after kill -9",)
        yield Case(name, "B", tuple(contenders), _put_bars(size, batch, network, disk), size, batch, notes)


def _made_in_place(stack: ExitStack, client: StoreClient, views: Sequence[memoryview]) -> Sequence[memoryview]:
    """The same payloads in memory that the client shares with the store."""
    room = client.reserve([len(view) for view in views])
    stack.callback(room.release)
    if not room.shared:
        raise BenchFailed("the client has no memory to share for a batch of this size")
    copy(views, room.views)
    return room.views


def _put_bars(size: int, batch: int, network: bool, disk: bool) -> tuple[Bar, ...]:
    if disk:
        return (Bar("rate", 0.8, FSYNC),)
    if batch == 1 or size < BARRED_BYTES_MIN:
        return ()
    if not network:
        return Bar("rate", 0.7, PWRITE), Bar("rate", 2.5, "peer")
    bars = Bar("rate", 0.8, LOOPBACK), Bar("rate", 1.3, "peer")
    return (*bars, Bar("cpu_s_per_gb", 0.45)) if size == MIB else bars


def cold_cases(ground: Ground) -> Generator[Case]:
    """Gets of what no page cache holds: from a daemon that reads through it, and from one that goes around it."""
    for name, page_cache in (("get cold", "keep"), ("get cold, bypass", "bypass")):
        with _cold_case(ground, name, page_cache) as case:
            yield case


@contextmanager
def _cold_case(ground: Ground, name: str, page_cache: str) -> Iterator[Case]:
    """A batch of 1 MiB blocks whose pages were dropped from the cache, beside O_DIRECT reads, ours and fio's."""
    size, batch = MIB, ground.settings.batch
    with ExitStack() as stack:
        capacity_bytes = max(READ_CAPACITY_FACTOR * size * batch, 64 * MIB)
        store = stack.enter_context(ground.store("cold", capacity_bytes, page_cache))
        chain = ground.fill(store, size, batch)
        views = Buffers(size, batch).views
        client = Client(store, store.client, views, ground)
        raw = _closing(stack, RawFile.create(ground.folder / "raw", size * batch))
        os.fdatasync(raw.fd)
        try:
            direct = _closing(stack, DirectReader(raw.path))
        except OSError as error:
            raise BenchFailed(f"the file system of {ground.folder.parent} has no O_DIRECT: {error.strerror}") from error

        def chill() -> None:
            drop_cache(store.process.folder / "data")
            client.choose(chain)

        contenders = [
            Contender("reprise", "store", size * batch, client.get, chill, pids=store.process.pids),
            Contender(DIRECT, "limit", size * batch, lambda: direct.read(views)),
        ]
        if fio.is_here():
            once = fio.reading(raw.path, size * batch, DIRECT_THREADS)
            contenders.append(Contender(fio.FIO, "baseline", size * batch, once, may_fail=PEER_FAILURES))
        bar = Bar("rate", 0.9, contenders[-1].name)
        share = _device_share(store, client.get, chill, size * batch)
        note = f"{share:.0%} of the bytes came from the device (page cache dropped before each get)"
        if share < DEVICE_SHARE_MIN:
            note += ": NOT COLD, the cache could not be dropped here"
        depth = f"{DIRECT_THREADS} reads of 1 MiB at a time by {' and '.join(one.name for one in contenders[1:])}"
        if page_cache == "bypass":
            depth += f", {READS_AT_ONCE} of up to {PIECE_BYTES // MIB} MiB on each connection by reprise"
        yield Case(name, "B", tuple(contenders), (bar,), size, batch, (note, depth))


def _device_share(store: Filled, once: Callable[[], None], chill: Callable[[], None], amount: int) -> float:
    """Which part of one cold get's bytes was read from a device, by the daemon or by this process."""
    pids = (os.getpid(), *store.process.pids())
    chill()
    before = device_read_bytes(pids)
    once()
    return (device_read_bytes(pids) - before) / amount


def _reading(peer: Peer, size: int, views: Sequence[memoryview]) -> Contender:
    amount = size * len(views)
    return Contender(
        peer.name, _kind(peer), amount, lambda: peer.read(size, views), pids=peer.pids, may_fail=PEER_FAILURES
    )


def _writing(peer: Peer, size: int, views: Sequence[memoryview]) -> Contender:
    amount = size * len(views)
    return Contender(
        peer.name, _kind(peer), amount, lambda: peer.write(size, views), pids=peer.pids, may_fail=PEER_FAILURES
    )


def _kind(peer: Peer) -> Kind:
    """What has no server no bar counts as a peer."""
    return "baseline" if peer.name in NO_SERVER else "peer"


def _limit_if(is_limit: bool) -> Kind:
    return "limit" if is_limit else "baseline"


class _Closable(Protocol):
    def close(self) -> None: ...


T = TypeVar("T", bound=_Closable)


def _closing(stack: ExitStack, thing: T) -> T:
    stack.callback(thing.close)
    return thing
