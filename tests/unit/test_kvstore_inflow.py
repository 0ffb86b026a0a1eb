"""Puts whose bytes are written as they come: nobody waits for a peer that stalls, and what is whole is kept."""

from __future__ import annotations

import errno
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import xxhash

from kvstore import wire
from kvstore.daemon import incoming, writer
from kvstore.daemon.admission import Admission
from kvstore.daemon.columns import Arrived
from kvstore.daemon.inflow import BEGIN_S_MAX, CHUNK_WAIT_S_MAX, TURN_WAIT_S_MAX, Inflow
from kvstore.daemon.segment import Segment
from kvstore.errors import Unavailable
from kvstore.keys import SpaceId
from kvstore.limits import MIB
from kvstore.purges import PurgeOrder
from kvstore.store import BlockPut, GetStatus, PutOutcome
from kvstore.testing import ManualClock
from kvstore.traffic import AGENT
from tests.support.faults import FaultyFiles
from tests.support.nodes import open_node, puts_of, read
from tests.support.spaces import BLOCK_TOKENS, a_chain, a_space
from tests.support.stores import client_of, served, short_dir

SIZE = 5000
CHUNK_BYTES = 20_000
"""Of two blocks and a half, as records; of four, as payloads."""
STORED = PutOutcome.STORED


class Peer:
    """Sends what it has, up to byte ``stalls_at`` while it is waited for in a turn, and all of it to whoever waits for
    ever: then ``meanwhile`` happens. ``rate``: bytes a second of a clock that goes by nothing else.
    """

    def __init__(self, data: bytes, stalls_at: int | None = None, rate: float = 1e12) -> None:
        self.data = data
        self.stalls_at = len(data) if stalls_at is None else stalls_at
        self.rate = rate
        self.now_s = 0.0
        self.at = 0
        self.meanwhile: Callable[[], None] = lambda: None
        self.dies = False
        self.waits_s: list[float] = []
        self.gathered = 0

    def receive_into(self, view: memoryview) -> None:
        if self.at:
            self.gathered += 1
            self.meanwhile()
        self._send(view, len(view))

    def receive_within(self, view: memoryview, wait_s: float) -> int:
        count = min(len(view), max(self.stalls_at - self.at, 0), int(self.rate * wait_s))
        self._send(view, count)
        if count < len(view):
            if self.dies:
                raise Unavailable("it died")
            self.now_s += wait_s - count / self.rate
        self.waits_s.append(wait_s)
        return count

    def _send(self, view: memoryview, count: int) -> None:
        view[:count] = self.data[self.at : self.at + count]
        self.at += count
        self.now_s += count / self.rate

    def inflow(self, sizes: list[int], chunk_bytes: int = CHUNK_BYTES) -> Inflow:
        def borrow(count: int) -> memoryview:
            return memoryview(bytearray(count))

        return Inflow.start(self, sizes, borrow(chunk_bytes), borrow, lambda: self.now_s)


@pytest.fixture(autouse=True)
def _small_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "WRITE_BYTES_MAX", CHUNK_BYTES)


@pytest.fixture
def folder() -> Iterator[Path]:
    with short_dir() as path:
        yield path


class Bench:
    """A node with a put of some blocks on its way."""

    def __init__(self, path: Path, count: int = 12, files: FaultyFiles | None = None) -> None:
        self.path, self.clock = path, ManualClock()
        self.node = open_node(path, self.clock, files=files)
        self.space: SpaceId = self.node.register_space(a_space())
        self.puts = puts_of(list(a_chain(self.space, count).names), SIZE)
        self.other = puts_of(list(a_chain(self.space, 3, seed=7).names), SIZE)

    def peer(self, stalls_at: int | None = None) -> Peer:
        return Peer(b"".join(bytes(put.payload) for put in self.puts), stalls_at)

    def put(self, peer: Peer, *, wrong: int = -1) -> list[PutOutcome]:
        checksums = [xxhash.xxh3_64_intdigest(put.payload) ^ (at == wrong) for at, put in enumerate(self.puts)]
        rows = [
            wire.PutRow(put.name, BLOCK_TOKENS, SIZE, 0, checksum)
            for put, checksum in zip(self.puts, checksums, strict=True)
        ]
        asked = wire.decode_put(wire.encode_put(self.space, AGENT, "os", rows))
        blocks = Arrived(asked.rows, peer.inflow(asked.rows.sizes()))
        return self.node.put(self.space, blocks, traffic_class=AGENT, checksums=asked.rows.checksums(), deadline_s=20)

    def statuses(self, puts: list[BlockPut]) -> list[GetStatus]:
        found = [(read(self.node, self.space, put.name, SIZE), put.payload) for put in puts]
        assert all(status is not GetStatus.OK or data == payload for (status, data), payload in found)
        return [status for (status, _), _ in found]

    def put_others(self) -> None:
        assert self.node.put(self.space, self.other, traffic_class=AGENT, deadline_s=20) == [STORED] * 3

    @property
    def open_segment(self) -> Segment:
        return self.node._shards[0]._ledger.segments.unsealed()[0]

    def check(self, found: list[bool], restarts: int = 1) -> None:
        """Which blocks are there, also after restarts; nothing is under way, and the books are right."""
        expected = [GetStatus.OK if is_there else GetStatus.MISS for is_there in found]
        assert self.statuses(self.puts) == expected
        for _ in range(1 + restarts):
            segments = self.node._shards[0]._ledger.segments.segments.values()
            assert all(segment.promised_bytes == 0 and segment.tail == segment.end for segment in segments)
            assert self.statuses(self.puts) == expected
            books = self.node.accounting()[0]
            scanned = sum(-(-(info.stored_bytes + 256) // 4096) * 4096 for info in self.node.scan()[0])
            assert books["live_bytes"] == scanned
            assert books["total_bytes"] == sum(
                books[each] for each in ("live_bytes", "dead_bytes", "free_bytes", "page_bytes")
            )
            self.node.close()
            self.node = open_node(self.path, self.clock)
        self.node.close()


# --- the stream -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(30))
def test_every_payload_comes_once_and_in_order(seed: int) -> None:
    """However they are cut and windowed, wherever the peer stalls, and whenever the rest is gathered."""
    chance = random.Random(seed)
    sizes = [chance.randrange(1, 4000) for _ in range(chance.randrange(1, 60))]
    peer = Peer(chance.randbytes(sum(sizes)), chance.randrange(sum(sizes) + 1))
    stream = peer.inflow(sizes, 5000)
    came: list[bytes] = []
    while len(came) < len(sizes):
        rest = stream[len(came) :]
        assert (len(rest), rest.gone) == (len(sizes) - len(came), 0)
        if rest.lags or chance.random() < 0.1:
            peer.stalls_at = len(peer.data)
            rest.gather()
        for _ in range(chance.randrange(3)):
            begin = end = rest.gone
            while end < len(rest) and (end == begin or sum(sizes[len(came) + begin :][: end + 1 - begin]) <= 5000):
                end += 1
            if begin == end or not (taken := rest.take(begin, end)):
                break
            came += [bytes(view) for view in taken]
            rest = stream[len(came) :]
    assert b"".join(came) == peer.data
    assert list(map(len, came)) == sizes


def test_a_turn_waits_for_no_peer_longer_than_its_bounds() -> None:
    """One that trickles: no single wait and no sum of them is longer, then nothing more is taken."""
    sizes = [1000] * 200
    peer = Peer(bytes(sum(sizes)), rate=1000 / (CHUNK_WAIT_S_MAX * 0.9))
    stream = peer.inflow(sizes, 1000)
    began_s, at = peer.now_s, 0
    while stream.take(at, at + 1):
        at += 1
    assert 0 < at < 10
    assert stream.lags
    assert max(peer.waits_s) <= CHUNK_WAIT_S_MAX
    assert peer.now_s - began_s <= TURN_WAIT_S_MAX * 1.01
    assert not stream.take(at, at + 1)


@pytest.mark.parametrize(("share", "lags"), [(0.9, False), (1.1, True)])
def test_a_peer_that_begins_slowly_is_not_waited_for_in_a_turn(share: float, lags: bool) -> None:
    peer = Peer(bytes(40_000), rate=20_000 / (BEGIN_S_MAX * share))
    assert peer.inflow([5000] * 8, 20_000).lags is lags


# --- written as it comes --------------------------------------------------------------------------------------------


def test_a_peer_that_keeps_pace_is_never_gathered(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    peer = bench.peer()
    assert bench.put(peer) == [STORED] * 12
    assert peer.gathered == 0
    bench.check([True] * 12)


@pytest.mark.parametrize("stalls_at", [0, 5 * SIZE, 9 * SIZE - 1, 12 * SIZE - 1])
def test_a_peer_that_stalls_holds_up_nobody(tmp_path: Path, stalls_at: int) -> None:
    """While it is waited for others put and purge, and what came whole before is found; then the rest is stored."""
    bench = Bench(tmp_path)
    peer = bench.peer(stalls_at)
    found: list[int] = []

    def meanwhile() -> None:
        bench.put_others()
        assert bench.node.delete(bench.space, [bench.other[0].name.key], deadline_s=20) == 1
        found.append(bench.statuses(bench.puts).count(GetStatus.OK))

    peer.meanwhile = meanwhile
    assert bench.put(peer) == [STORED] * 12
    first, whole = CHUNK_BYTES // SIZE, max(stalls_at // SIZE, CHUNK_BYTES // SIZE)
    assert len(found) == 1
    assert first - 2 <= found[0] <= whole
    assert bench.statuses(bench.other) == [GetStatus.MISS, GetStatus.OK, GetStatus.OK]
    bench.check([True] * 12)


def test_a_purge_while_the_rest_is_waited_for_is_not_undone(tmp_path: Path) -> None:
    """The blocks that came first count before the peer is waited for: what is purged then stays away."""
    bench = Bench(tmp_path)
    peer = bench.peer(9 * SIZE)
    keys = [put.name.key for put in bench.puts]
    gone: list[int] = []
    peer.meanwhile = lambda: gone.append(bench.node.delete(bench.space, keys, deadline_s=20))
    assert bench.put(peer) == [STORED] * 12
    assert gone[0] >= 4
    bench.check([at >= gone[0] for at in range(12)])


@pytest.mark.parametrize("known", [False, True])
def test_what_is_waited_for_is_younger_than_a_purge_meanwhile(tmp_path: Path, known: bool) -> None:
    """Else a search for what the purge should have taken would find it. Also where all is received beforehand."""
    bench = Bench(tmp_path)
    if known:
        assert bench.node.put(bench.space, bench.puts[5:6], traffic_class=AGENT) == [STORED]
    order = PurgeOrder("5" * 32, (bench.space,), None, int(bench.clock.now_s()) + 10)

    def meanwhile() -> None:
        bench.clock.advance(10)
        assert bench.node.purge(order).answers[""].done
        bench.clock.advance(10)

    peer = bench.peer(9 * SIZE)
    peer.meanwhile = meanwhile
    bench.put(peer)
    assert bench.statuses(bench.puts)[-1] is GetStatus.OK
    assert bench.node.leftovers(order, {"": int(bench.clock.now_s()) - 10}).answers[""].living == 0
    bench.node.close()


def test_of_a_peer_that_dies_the_whole_blocks_are_kept(tmp_path: Path) -> None:
    """The put fails; those written before count, nothing is in the way of the others."""
    bench = Bench(tmp_path)
    peer = bench.peer(9 * SIZE + 1)
    peer.dies = True
    with pytest.raises(Unavailable):
        bench.put(peer)
    found = bench.statuses(bench.puts)
    count = found.count(GetStatus.OK)
    assert found == [GetStatus.OK] * count + [GetStatus.MISS] * (12 - count)
    assert 4 <= count <= 9
    bench.put_others()
    again = bench.node.put(bench.space, bench.puts, traffic_class=AGENT)
    assert again == [PutOutcome.TOUCHED] * count + [STORED] * (12 - count)
    bench.check([True] * 12)


def test_bytes_that_are_not_those_submitted_are_found(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    outcomes = bench.put(bench.peer(), wrong=8)
    assert outcomes == [STORED] * 8 + [PutOutcome.ALTERED] + [STORED] * 3
    bench.check([at != 8 for at in range(12)])


def test_where_a_key_is_known_all_is_received_beforehand(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    assert bench.node.put(bench.space, bench.puts[5:6], traffic_class=AGENT) == [STORED]
    peer = bench.peer()
    peer.meanwhile = bench.put_others
    assert bench.put(peer) == [STORED] * 5 + [PutOutcome.TOUCHED] + [STORED] * 6
    assert peer.gathered == 1
    bench.check([True] * 12, restarts=0)


def test_what_goes_on_in_the_next_segment_is_taken_from_where_the_last_ended(tmp_path: Path) -> None:
    """A segment has room for a part of the chunk only."""
    bench = Bench(tmp_path, count=150)
    bench.put_others()
    segment = bench.open_segment
    segment.promised_bytes += segment.room_bytes - 3 * 8192 - 1
    peer = bench.peer()
    assert bench.put(peer) == [STORED] * 150
    segment.promised_bytes = 0
    bench.check([True] * 150)


@pytest.mark.parametrize("written", [0, 50_000])
def test_what_a_bad_disk_did_not_take_is_refused(tmp_path: Path, written: int) -> None:
    """What was taken from the stream cannot be written elsewhere; no byte of it is served, the others are stored."""
    files = FaultyFiles()
    bench = Bench(tmp_path, files=files)
    bench.put_others()
    files.only = bench.open_segment.path.name
    files.errors["pwritev"], files.write_budget = errno.EIO, written
    outcomes = bench.put(bench.peer())
    refused = outcomes.count(PutOutcome.REFUSED)
    assert outcomes == [PutOutcome.REFUSED] * refused + [STORED] * (12 - refused)
    assert 1 <= refused <= 8
    assert bench.node.stats()["refused"] == refused
    files.errors.clear()
    bench.check([at >= refused for at in range(12)], restarts=0)  # the segment's end was not taken either


# --- over a socket --------------------------------------------------------------------------------------------------


def test_puts_over_a_socket_pass_through_the_small_buffer(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole and in part, from several connections: all is stored and comes back, and no memory stays lent."""
    monkeypatch.setattr(incoming, "CHUNK_BYTES", CHUNK_BYTES)
    taken: list[int] = []

    class Counted(Inflow):
        __slots__ = ()

        def take(self, begin: int, end: int) -> list[memoryview]:
            found = super().take(begin, end)
            taken.append(len(found))
            return found

    monkeypatch.setattr(incoming, "Inflow", Counted)
    clock = ManualClock()
    node = open_node(folder / "data", clock)
    with served(node, folder) as server, client_of(server.addresses[0]) as client:
        space = client.register_space(a_space())
        for seed in range(1, 6):
            puts = puts_of(list(a_chain(space, 60, seed=seed).names), SIZE + seed)
            assert client.put(space, puts, traffic_class=AGENT) == [STORED] * 60
            for put in puts:
                assert read(node, space, put.name, SIZE + seed) == (GetStatus.OK, put.payload)
    assert node.stats()["puts"] == 300
    assert sum(taken) > 0
    node.close()


def test_blocks_of_several_volumes_are_received_by_one_thread(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their positions in the stream are not contiguous: each volume gets its own, whole, and the connection goes on."""
    monkeypatch.setattr(incoming, "CHUNK_BYTES", CHUNK_BYTES)
    node = open_node(folder / "data", ManualClock(), directories=3, capacity_bytes=96 * MIB)
    with served(node, folder) as server, client_of(server.addresses[0]) as client:
        space = client.register_space(a_space())
        for seed in range(0, 40, 4):
            chains = [a_chain(space, 10, seed=seed + each).names for each in range(4)]
            names = [name for together in zip(*chains, strict=True) for name in together]
            puts = puts_of(names, SIZE)
            assert client.put(space, puts, traffic_class=AGENT, deadline_s=10) == [STORED] * 40
            for put in puts:
                assert read(node, space, put.name, SIZE) == (GetStatus.OK, put.payload)
    assert all(shard.stats(0)["puts"] for shard in node._shards)
    node.close()


def test_without_memory_for_the_rest_a_put_is_to_come_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The payload is read past, nothing stays lent or taken, and the same put on the same connection then succeeds."""
    monkeypatch.setattr(incoming, "CHUNK_BYTES", CHUNK_BYTES)
    monkeypatch.setattr(incoming, "ADMISSION_WAIT_S_MAX", 0.0)
    admission = Admission(9 * CHUNK_BYTES, 8 * CHUNK_BYTES)
    node = open_node(folder / "data", ManualClock())
    with served(node, folder, admission=admission) as server, client_of(server.addresses[0]) as client:
        space = client.register_space(a_space())
        puts = puts_of(list(a_chain(space, 20).names), SIZE)
        assert node.put(space, puts[9:10], traffic_class=AGENT) == [STORED]  # a known key: all has to be received
        with admission.hold(2 * CHUNK_BYTES, 0.0):
            outcomes = client.put(space, puts, traffic_class=AGENT, deadline_s=0.5)
            assert outcomes == [PutOutcome.REFUSED] * 20
            assert admission.refused
            assert admission.lent_bytes == 2 * CHUNK_BYTES
        outcomes = client.put(space, puts, traffic_class=AGENT, deadline_s=10)
        assert outcomes == [STORED] * 9 + [PutOutcome.TOUCHED] + [STORED] * 10
        assert admission.lent_bytes == 0
        assert server._session._incoming._streams._value == incoming.STREAMS_MAX
    node.close()
