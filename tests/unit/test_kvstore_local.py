"""The same-host path: what is lent, for how long, to whom; and that nothing wrong ever comes through it."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest

from kvstore import arena, extents, limits, local, receive, sharing, submission, transfer, wire
from kvstore.client import StoreClient
from kvstore.daemon.files import Files
from kvstore.daemon.lending import Neighbour
from kvstore.daemon.node import Node, NodeConfig
from kvstore.daemon.record import Mark, MarkReason, encode_mark
from kvstore.daemon.server import Server
from kvstore.direct import PageReader
from kvstore.errors import DeadlineExceeded, ProtocolError, Unauthorized
from kvstore.extents import Rows
from kvstore.framing import parse_address
from kvstore.keys import BlockName, SpaceId
from kvstore.link import Call, Hold, NodeLink, new_hello
from kvstore.receive import Scatter
from kvstore.record import MARK_OFFSET
from kvstore.store import BlockPut, GetStatus, Presence, PutOutcome
from kvstore.submission import Submission
from kvstore.testing import TEST_RULES, ManualClock
from kvstore.traffic import AGENT, ClassRule, ClassRules
from tests.support.nodes import payload_of, puts_of
from tests.support.spaces import BLOCK_TOKENS, a_chain, a_space
from tests.support.stores import client_of, served, short_dir
from tests.support.waiting import WAIT_S, wait

T = TypeVar("T")
SIZE = 100_000
BULK = Call(wire.Opcode.GET, b"", bulk=True)
OK, MISS = GetStatus.OK, GetStatus.MISS


@dataclass
class Bench:
    """A node of 16 segments of a MiB, served; a client and a bare link that share memory with it."""

    folder: Path
    node: Node
    server: Server
    client: StoreClient
    link: NodeLink
    space: SpaceId

    def talk(self, talk: Callable[[Hold], T], link: NodeLink | None = None) -> T:
        return (link or self.link).converse(BULK, time.monotonic() + 20, talk)

    def put(self, count: int, seed: int, size: int = SIZE) -> list[BlockName]:
        """Store blocks of their own bytes through the node itself."""
        names = list(a_chain(self.space, count, seed=seed).names)
        assert set(self.node.put(self.space, puts_of(names, size), traffic_class=AGENT)) == {PutOutcome.STORED}
        return names

    def turn_over(self) -> None:
        """Write more than the capacity, so that every segment that may be recycled has been."""
        for seed in range(100, 130):
            puts = puts_of(list(a_chain(self.space, 9, seed=seed).names), SIZE)
            self.node.put(self.space, puts, traffic_class=AGENT)

    @property
    def leases(self) -> int:
        return int(self.node.stats()["leases"])


def a_bench_of(files: Files | None = None, token: str = "", **settings: Any) -> Iterator[Bench]:
    with short_dir() as folder:
        config = NodeConfig(directories=(folder / "data",), capacity_bytes=16 * limits.MIB, segment_bytes=limits.MIB)
        node = Node.open(config, ManualClock(), TEST_RULES, files=files)
        with (
            served(node, folder, token=token, **settings) as server,
            client_of(server.addresses[1], token=token) as client,
        ):
            link = a_link(server, token)
            yield Bench(folder, node, server, client, link, client.register_space(a_space()))
            link.close()
        node.close()


@pytest.fixture
def bench() -> Iterator[Bench]:
    yield from a_bench_of()


def a_link(server: Server, token: str | None = None, tenant: str | None = None, *, tcp: bool = False) -> NodeLink:
    return NodeLink(parse_address(server.addresses[0 if tcp else 1]), new_hello(token, tenant), 1)


def a_submission(space: SpaceId, puts: Sequence[BlockPut]) -> Submission:
    return Submission(space, AGENT, "os", puts, [memoryview(put.payload) for put in puts])


def a_scatter(names: Sequence[BlockName], size: int = SIZE) -> Scatter:
    return Scatter(names, [memoryview(bytearray(size)) for _ in names])


def lend(hold: Hold, space: SpaceId, names: Sequence[BlockName]) -> tuple[Rows, list[int]]:
    """Ask for extents and do nothing with them yet."""
    assert hold.peer is not None
    peer = hold.peer

    def take(channel: Any, header: wire.Header, body: bytes) -> Rows:
        rows, anew = extents.decode_rows(body, "EXTENTS reply")
        peer.add(channel.receive_descriptors(header.payload_bytes), anew=anew)
        return rows

    rows = hold.ask(Call(wire.Opcode.EXTENTS, wire.encode_get(space, names, [SIZE] * len(names)), bulk=True), take)
    return rows, [fd for fd in peer.fds if fd is not None]


def shared_fds() -> int:
    """Descriptors that this process, both client and daemon, holds only because memory is shared."""
    count = 0
    for fd in map(int, os.listdir("/proc/self/fd")):
        try:
            target, flags = os.readlink(f"/proc/self/fd/{fd}"), fcntl.fcntl(fd, fcntl.F_GETFL)
        except OSError:  # the one that listed them
            continue
        lent = target.endswith(".seg") and flags & os.O_ACCMODE == os.O_RDONLY
        count += lent or target.startswith("/memfd:reprise-arena")
    return count


def read_all(space: SpaceId, rows: Rows, fds: Sequence[int | None], scatter: Scatter) -> None:
    """As a client that takes no notice of the time."""
    plan = extents.plan(rows, scatter.settle_rows(rows), scatter.sizes)
    scatter.prepare(space)
    local.read_extents(plan, fds, scatter, lambda: True, PageReader())
    scatter.believe(rows)


# --- bytes and leases -----------------------------------------------------------------------------------------------


def test_a_get_comes_from_the_files_and_holds_nothing_afterwards(bench: Bench) -> None:
    """Scattered over segments, in any order, twice the same block: the right bytes, and no lease is left."""
    names = bench.put(30, seed=1)
    asked = [*names[::-1], names[3], names[3]]
    buffers = [bytearray(SIZE) for _ in asked]
    assert bench.client.get_into(bench.space, asked, buffers) == [OK] * 32
    assert buffers == [payload_of(name, SIZE) for name in asked]
    assert bench.client.stats()["client"]["blocks_got_local"] == 32
    wait(lambda: bench.leases == 0)


def test_blocks_of_several_lengths_come_byte_for_byte(bench: Bench) -> None:
    """Many reads of the kernel, of one record or of neighbours, whose checksums are taken together."""
    names = list(a_chain(bench.space, 200, seed=7).names)
    sizes = [1 + (at * 7919) % 90_000 for at in range(200)]
    puts = [puts_of([name], size)[0] for name, size in zip(names, sizes, strict=True)]
    assert set(bench.node.put(bench.space, puts, traffic_class=AGENT)) == {PutOutcome.STORED}
    for order in (range(200), range(199, -1, -3), range(0, 200, 2)):
        buffers = [bytearray(sizes[at]) for at in order]
        assert bench.client.get_into(bench.space, [names[at] for at in order], buffers) == [OK] * len(order)
        assert buffers == [payload_of(names[at], sizes[at]) for at in order]
    assert bench.client.stats()["client"]["blocks_got_local"] == 200 + 67 + 100


def test_ten_thousand_gets_leave_no_lease_and_no_descriptor(bench: Bench) -> None:
    """While segments turn over, so that descriptors are replaced again and again."""
    buffers = [bytearray(SIZE) for _ in range(9)]
    before = shared_fds()
    for round_ in range(102):
        names = bench.put(9, seed=200 + round_)
        for _ in range(10):
            for name in names:
                assert bench.client.get_into(bench.space, [name], buffers[:1]) == [OK]
        assert bench.client.get_into(bench.space, names, buffers) == [OK] * 9
    assert bench.client.stats()["client"]["blocks_got_local"] == 102 * 99
    wait(lambda: bench.leases == 0)
    assert before < shared_fds() <= before + 2 + limits.DESCRIPTORS_MAX
    bench.client.close()
    bench.link.close()
    wait(lambda: bench.server.connections == 0)
    wait(lambda: shared_fds() == before)


def test_a_thousand_gets_given_up_leave_no_lease_and_no_descriptor(bench: Bench) -> None:
    """Each is given up with descriptors in hand and an answer on its way: its connection goes, and all that it held at
    either end."""
    names = bench.put(30, seed=1)
    bodies = wire.encode_get(bench.space, names, [SIZE] * 30)

    def give_up(hold: Hold) -> None:
        assert lend(hold, bench.space, names)[1]
        hold.send(Call(wire.Opcode.EXTENTS, bodies, bulk=True))
        raise DeadlineExceeded("given up")

    held: list[tuple[int, int, int]] = []
    for rounds in (1, 1000):  # the first makes the client's arena, which stays
        for _ in range(rounds):
            with pytest.raises(DeadlineExceeded):
                bench.talk(give_up)
        wait(lambda: bench.server.connections <= 1)
        held.append((bench.leases, shared_fds(), len(os.listdir("/proc/self/fd"))))
    assert held[0] == held[1]
    assert held[0][0] == 0


def test_a_lent_segment_is_not_recycled(bench: Bench) -> None:
    """However much is put meanwhile; once it is released, it is."""
    names = bench.put(9, seed=1)

    def talk(hold: Hold) -> None:
        rows, fds = lend(hold, bench.space, names)
        bench.turn_over()
        scatter = a_scatter(names)
        read_all(bench.space, rows, fds, scatter)
        assert scatter.statuses == [OK] * 9
        assert scatter.views[4] == payload_of(names[4], SIZE)
        hold.tell(wire.Opcode.RELEASE)

    bench.talk(talk)
    wait(lambda: bench.leases == 0)
    bench.turn_over()
    assert bench.client.get_into(bench.space, names, [bytearray(SIZE) for _ in names]) == [MISS] * 9


def test_the_next_loan_ends_the_one_before(bench: Bench) -> None:
    names = bench.put(9, seed=1)

    def talk(hold: Hold) -> None:
        for name in names:
            lend(hold, bench.space, [name])
            assert bench.leases == 1
        lend(hold, bench.space, a_chain(bench.space, 2, seed=50).names)
        assert bench.leases == 0

    bench.talk(talk)


def test_bytes_read_without_a_lease_are_never_believed() -> None:
    """A client outlasts its lease, and another life of the segment lies where it reads: no block is accepted, and no
    byte of the other blocks is left in a buffer."""
    for bench in a_bench_of(lease_s=0.01):
        names = bench.put(9, seed=1)

        def talk(hold: Hold, bench: Bench = bench, names: list[BlockName] = names) -> None:
            rows, fds = lend(hold, bench.space, names)
            wait(lambda: bench.leases == 0)
            bench.turn_over()
            scatter = a_scatter(names)
            read_all(bench.space, rows, fds, scatter)
            assert OK not in scatter.statuses
            scatter.settle(MISS)
            assert all(view == bytes(SIZE) for view in scatter.views)

        bench.talk(talk)


def test_a_lease_that_ran_out_while_reading_costs_another_question(bench: Bench) -> None:
    """Good bytes, but too late: nothing of them counts, and the socket brings them."""
    names = bench.put(9, seed=1)
    scatter = a_scatter(names)
    now_s = iter([0.0, *[limits.LEASE_S] * 20])
    assert bench.talk(lambda hold: transfer.get(hold, bench.space, scatter, lambda: next(now_s))) == 0
    assert scatter.statuses == [OK] * 9
    assert scatter.views[8] == payload_of(names[8], SIZE)
    wait(lambda: bench.leases == 0)


def test_the_deadline_ends_a_slow_read(bench: Bench) -> None:
    """A disk that takes for ever: what was verified stays, the rest is late, and the lease is given back."""
    names = bench.put(30, seed=1)  # several reads
    scatter = a_scatter(names)
    began_s = time.monotonic()
    now_s = iter([began_s, began_s, began_s + 600, began_s + 600])
    with pytest.raises(DeadlineExceeded):
        bench.talk(lambda hold: transfer.get(hold, bench.space, scatter, lambda: next(now_s)))
    scatter.settle(GetStatus.DEADLINE)
    assert set(scatter.statuses) == {OK, GetStatus.DEADLINE}
    assert all(
        view == bytes(SIZE) for view, status in zip(scatter.views, scatter.statuses, strict=True) if status != OK
    )
    wait(lambda: bench.leases == 0)


def test_leases_of_a_dead_client_end_with_its_connection(bench: Bench) -> None:
    """The kernel closes what a killed process had open, and that is all that the daemon hears of it."""
    names = bench.put(9, seed=1)
    with pytest.raises(KeyboardInterrupt):
        bench.talk(lambda hold: _die(hold, bench, names))
    wait(lambda: bench.leases == 0)


def _die(hold: Hold, bench: Bench, names: Sequence[BlockName]) -> None:
    lend(hold, bench.space, names)
    assert bench.leases == 9
    hold.channel.shutdown()
    raise KeyboardInterrupt


# --- descriptors ----------------------------------------------------------------------------------------------------


def test_a_descriptor_cannot_write(bench: Bench) -> None:
    names = bench.put(1, seed=1)

    def talk(hold: Hold) -> None:
        _, fds = lend(hold, bench.space, names)
        assert fcntl.fcntl(fds[0], fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
        for attempt in (
            lambda: os.pwrite(fds[0], b"x", 4096),
            lambda: os.ftruncate(fds[0], 0),
            lambda: mmap.mmap(fds[0], 4096, prot=mmap.PROT_WRITE),
        ):
            with pytest.raises(OSError) as refused:  # noqa: PT011 (which one is checked below)
                attempt()
            assert refused.value.errno in (errno.EBADF, errno.EINVAL, errno.EACCES)

    bench.talk(talk)


def test_descriptors_are_sent_once_and_anew_when_there_are_too_many(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With room for two files: repeats cost none, a get over more falls back for the rest; all bytes are right."""
    monkeypatch.setattr(limits, "DESCRIPTORS_MAX", 2)
    names = bench.put(40, seed=1)  # five segments
    for asked in (names[:9], names[:9], names[20:38], names, names[::-1]):
        buffers = [bytearray(SIZE) for _ in asked]
        assert bench.client.get_into(bench.space, asked, buffers) == [OK] * len(asked)
        assert buffers == [payload_of(name, SIZE) for name in asked]
    local_blocks = bench.client.stats()["client"]["blocks_got_local"]
    assert 18 < local_blocks < 116


def test_a_lost_descriptor_falls_back(bench: Bench) -> None:
    """A client with too many open files gets the byte without the descriptor, and asks for the blocks."""
    names = bench.put(3, seed=1)

    def talk(hold: Hold) -> int:
        assert hold.peer is not None
        lend(hold, bench.space, names)
        for fd in hold.peer.fds:
            assert fd is not None
            os.close(fd)
        hold.peer.fds[:] = [None] * len(hold.peer.fds)
        return transfer.get(hold, bench.space, scatter)

    scatter = a_scatter(names)
    assert bench.talk(talk) == 0
    assert scatter.statuses == [OK] * 3


def test_a_removal_that_the_index_lost_is_a_miss(tmp_path: Path) -> None:
    """The mark in the header decides, whoever reads it: nothing is quarantined, and the next look-up knows."""
    for same_host in (True, False):
        for bench in a_bench_of():
            names = bench.put(2, seed=1)
            segment = next((bench.folder / "data" / "segments").glob("*.seg"))
            with segment.open("r+b") as file:
                file.seek(4096 + MARK_OFFSET)
                file.write(encode_mark(Mark(MarkReason.PURGED, 7)))
            with client_of(bench.server.addresses[1], same_host=same_host) as client:
                buffers = [bytearray(b"x" * SIZE) for _ in names]
                assert client.get_into(bench.space, names, buffers) == [MISS, OK]
                assert buffers[0] in (bytes(SIZE), b"x" * SIZE)
                assert client.lookup(bench.space, names).presence.tolist() == [Presence.PURGED, Presence.PRESENT]
            assert bench.node.stats()["quarantined"] == 0
            wait(lambda bench=bench: bench.leases == 0)  # type: ignore[misc]


# --- who may --------------------------------------------------------------------------------------------------------


def shares(link: NodeLink) -> bool:
    try:
        return bool(link.converse(BULK, time.monotonic() + WAIT_S, lambda hold: hold.peer is not None))
    finally:
        link.close()


def test_only_trusted_peers_on_this_host_share() -> None:
    """With the token or as the same user over the Unix socket; not over TCP, nor on behalf of one tenant."""
    for bench in a_bench_of():
        assert shares(a_link(bench.server))
        assert not shares(a_link(bench.server, tcp=True))
        assert not shares(a_link(bench.server, tenant="acme"))
    for bench in a_bench_of(token="sixteen letters!"):
        assert shares(a_link(bench.server, "sixteen letters!"))
        with pytest.raises(Unauthorized):
            shares(a_link(bench.server, "sixteen letter!!"))


@pytest.mark.parametrize("settings", [{"same_host": False}, {"lease_s": 0.0}])
def test_a_daemon_that_does_not_share_serves_by_socket(settings: dict[str, Any]) -> None:
    for bench in a_bench_of(**settings):
        assert not shares(a_link(bench.server))
        names = list(a_chain(bench.space, 5, seed=1).names)
        assert bench.client.put(bench.space, puts_of(names, SIZE), traffic_class=AGENT) == [PutOutcome.STORED] * 5
        assert bench.client.get_into(bench.space, names, [bytearray(SIZE) for _ in names]) == [OK] * 5
        assert bench.client.stats()["client"]["blocks_got_local"] == 0


def test_the_other_requests_need_a_grant(bench: Bench) -> None:
    link = a_link(bench.server, tcp=True)
    for opcode in (wire.Opcode.EXTENTS, wire.Opcode.PUT_LOCAL):
        with pytest.raises(ProtocolError, match="SHARE"):
            bench.talk(_asking(opcode), link)
    with pytest.raises(ProtocolError, match="descriptor"):
        bench.talk(lambda hold: hold.ask(Call(wire.Opcode.SHARE, sharing.encode_share(4096)), receive.take_count), link)
    link.close()


def _asking(opcode: wire.Opcode) -> Callable[[Hold], int]:
    return lambda hold: hold.ask(Call(opcode, b""), receive.take_count)


def test_an_arena_that_could_be_cut_short_is_not_mapped(tmp_path: Path) -> None:
    """A file, memory without a seal, another size: refused, since reading beyond the end would end the daemon."""
    with (tmp_path / "file").open("w+b") as file:
        file.truncate(8192)
        with pytest.raises(Unauthorized, match="sealed"):
            Neighbour.open(file.fileno(), 8192)
    fd = os.memfd_create("arena", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 8192)
    with pytest.raises(Unauthorized, match="sealed"):
        Neighbour.open(fd, 8192)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, arena.SEALS)
    with pytest.raises(Unauthorized, match="size"):
        Neighbour.open(fd, 4096)
    neighbour = Neighbour.open(fd, 8192)
    with pytest.raises(ProtocolError, match="does not hold"):
        neighbour.arena(8000, 193)
    neighbour.close()
    os.close(fd)


# --- puts -----------------------------------------------------------------------------------------------------------


def test_a_put_goes_through_the_arena_part_by_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """More than the parts that are under way hold, in sizes that do not divide them: every block comes back."""
    monkeypatch.setattr(submission, "PART_BYTES", 4 * limits.MIB)
    monkeypatch.setattr(submission, "FIRST_BYTES", limits.MIB)
    with short_dir() as folder:
        config = NodeConfig(directories=(folder / "data",), capacity_bytes=64 * limits.MIB, segment_bytes=limits.MIB)
        node = Node.open(config, ManualClock(), TEST_RULES)
        with served(node, folder) as server, client_of(server.addresses[1]) as client:
            space = client.register_space(a_space())
            names = list(a_chain(space, 90, seed=1).names)
            puts = puts_of(names, 400_003)
            assert sum(len(put.payload) for put in puts) > 2 * local.PARTS * submission.PART_BYTES
            assert client.put(space, puts, traffic_class=AGENT) == [PutOutcome.STORED] * 90
            buffers = [bytearray(400_003) for _ in names]
            assert client.get_into(space, names, buffers) == [OK] * 90
            assert buffers == [put.payload for put in puts]
        node.close()


def test_a_block_larger_than_a_part_goes_through_the_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submission, "PART_BYTES", 4 * limits.MIB)
    size = submission.PART_BYTES + 1
    with short_dir() as folder:
        config = NodeConfig(
            directories=(folder / "data",), capacity_bytes=64 * limits.MIB, segment_bytes=8 * limits.MIB
        )
        node = Node.open(config, ManualClock(), TEST_RULES)
        with served(node, folder) as server, client_of(server.addresses[1]) as client:
            space = client.register_space(a_space())
            names = list(a_chain(space, 2).names)
            puts = puts_of(names, size)
            assert client.put(space, puts, traffic_class=AGENT) == [PutOutcome.STORED] * 2
            buffers = [bytearray(size) for _ in names]
            assert client.get_into(space, names, buffers) == [OK] * 2
            assert buffers == [put.payload for put in puts]
            assert server._metrics.registry.get_sample_value("reprise_store_requests_total", {"opcode": "put"}) > 0
        node.close()


def test_bytes_changed_in_the_arena_before_they_are_written_are_altered(bench: Bench) -> None:
    names = list(a_chain(bench.space, 3, seed=1).names)
    puts = puts_of(names, SIZE)
    batch = a_submission(bench.space, puts)
    other = memoryview(b"z" * SIZE)

    def talk(hold: Hold) -> list[PutOutcome]:
        assert hold.peer is not None
        checksums, offsets = hold.peer.arena.place(hold.peer.begin_of(0), batch.views)
        hold.peer.arena.place(hold.peer.begin_of(0), [batch.views[0], other])
        body = sharing.encode_put_local(offsets, batch.body(range(3), checksums))
        return hold.ask(Call(wire.Opcode.PUT_LOCAL, body), receive.take_put)

    assert bench.talk(talk) == [PutOutcome.STORED, PutOutcome.ALTERED, PutOutcome.STORED]
    assert bench.node.lookup(bench.space, names).presence.tolist() == [
        Presence.PRESENT,
        Presence.NEVER,
        Presence.PRESENT,
    ]
    buffers = [bytearray(SIZE) for _ in names]
    assert bench.client.get_into(bench.space, names, buffers) == [OK, MISS, OK]
    assert buffers[1] == bytes(SIZE)


class ScribblingFiles(Files):
    """Changes what is being written, as a client that goes on using its arena would."""

    def __init__(self) -> None:
        self.scribble: Callable[[], object] | None = None

    def pwritev(self, fd: int, views: Sequence[memoryview], offset: int) -> int:
        done = super().pwritev(fd, views, offset)
        if self.scribble is not None and len(views) > 1:
            self.scribble()
        return done


def test_bytes_changed_in_the_arena_while_they_are_written_are_altered() -> None:
    """Verified, then changed under the daemon's hands: never acknowledged, never served."""
    files = ScribblingFiles()
    for bench in a_bench_of(files):
        names = list(a_chain(bench.space, 3, seed=1).names)
        puts = puts_of(names, SIZE)
        batch = a_submission(bench.space, puts)

        def talk(hold: Hold, batch: Submission = batch) -> list[PutOutcome]:
            assert hold.peer is not None
            arena, begin = hold.peer.arena, hold.peer.begin_of(0)
            files.scribble = lambda: arena.place(begin, [memoryview(b"q")])
            submission.put(hold, batch)
            return batch.outcomes

        assert bench.talk(talk) == [PutOutcome.ALTERED, PutOutcome.STORED, PutOutcome.STORED]
        files.scribble = None
        assert bench.client.get_into(bench.space, names, [bytearray(SIZE) for _ in names]) == [MISS, OK, OK]


def test_a_put_that_names_more_than_the_arena_ends_the_connection(bench: Bench) -> None:
    names = list(a_chain(bench.space, 1).names)
    rows = [wire.PutRow(names[0], BLOCK_TOKENS, SIZE, 0, 0)]
    body = sharing.encode_put_local([2**63], wire.encode_put(bench.space, AGENT, "os", rows))
    with pytest.raises(ProtocolError, match="does not hold"):
        bench.talk(lambda hold: hold.ask(Call(wire.Opcode.PUT_LOCAL, body), receive.take_put))
    wait(lambda: bench.leases == 0)


def test_compressed_blocks_are_asked_for() -> None:
    """They do not lie in the file as they are."""
    rules = ClassRules((ClassRule(AGENT, "agent", 86_400, codec="zstd"),))
    with short_dir() as folder:
        config = NodeConfig(directories=(folder / "data",), capacity_bytes=16 * limits.MIB, segment_bytes=limits.MIB)
        node = Node.open(config, ManualClock(), rules)
        with served(node, folder) as server, client_of(server.addresses[1]) as client:
            space = client.register_space(a_space())
            names = list(a_chain(space, 3).names)
            puts = [BlockPut(name, BLOCK_TOKENS, name.key * 1000) for name in names]
            assert client.put(space, puts, traffic_class=AGENT) == [PutOutcome.STORED] * 3
            buffers = [bytearray(32_000) for _ in names]
            assert client.get_into(space, names, buffers) == [OK] * 3
            assert buffers == [put.payload for put in puts]
            assert client.stats()["client"]["blocks_got_local"] == 0
            wait(lambda: node.stats()["leases"] == 0)
        node.close()
