"""Faults under load: clients of every kind work on while the disk, the clock, the descriptors or a client fails.

Whatever the fault: no client sees other bytes than were put, serving goes on or is refused by name, counters tell, and
once it is over puts are taken again, no lease is left, and the books equal the files.
"""

from __future__ import annotations

import errno
import gc
import os
import random
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvstore import wire
from kvstore.arena import Arena
from kvstore.client import StoreClient
from kvstore.daemon.admission import Admission
from kvstore.daemon.fsck import check
from kvstore.daemon.metrics import ServerMetrics, StatsCollector
from kvstore.daemon.node import Node, NodeConfig
from kvstore.daemon.server import Server
from kvstore.errors import StoreError
from kvstore.framing import parse_address
from kvstore.keys import BlockName, SpaceId
from kvstore.limits import MIB
from kvstore.link import Call, NodeLink, new_hello
from kvstore.store import AckLevel, GetStatus, PutOutcome
from kvstore.testing import TEST_RULES, ManualClock
from kvstore.traffic import AGENT, CHAT, ClassRule, ClassRules
from ops.supervisor import die_with_parent
from tests.support.faults import FaultyFiles
from tests.support.nodes import payload_of, puts_of, read
from tests.support.spaces import a_chain, a_space
from tests.support.stores import client_of, served, short_dir
from tests.support.waiting import WAIT_S, wait

SIZE = 60_000
BATCH = 8
TURNS = 24
"""Of each client: a put, a lookup, a get, sometimes a deletion."""
YEAR_S = 365 * 86_400


@dataclass
class Load:
    """Three clients (TCP, Unix socket, same host), each at work on chains of its own and its neighbour's."""

    addresses: Sequence[tuple[str, bool]]
    space: SpaceId
    ack: AckLevel = "os"
    wrong: list[BlockName] = field(default_factory=list)
    faults: list[BaseException] = field(default_factory=list)
    outcomes: list[PutOutcome] = field(default_factory=list)
    statuses: list[GetStatus] = field(default_factory=list)
    errors: list[StoreError] = field(default_factory=list)
    turns: int = 0
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _threads: list[threading.Thread] = field(default_factory=list)

    def start(self) -> None:
        for at, (address, same_host) in enumerate(self.addresses):
            self._threads.append(threading.Thread(target=self._work, args=(at, address, same_host)))
        for thread in self._threads:
            thread.start()

    def wait_turns(self, count: int) -> None:
        """Until so many more turns were taken, or all are."""
        with self._changed:
            until = self.turns + count
            assert self._changed.wait_for(lambda: self.turns >= min(until, TURNS * len(self._threads)), WAIT_S)

    def finish(self) -> None:
        for thread in self._threads:
            thread.join(WAIT_S)
            assert not thread.is_alive()
        assert self.wrong == []
        assert self.faults == []

    def _work(self, at: int, address: str, same_host: bool) -> None:
        drawn = random.Random(at)
        with client_of(address, same_host=same_host) as client:
            for turn in range(TURNS):
                try:
                    self._turn(client, drawn, at, turn)
                except StoreError as error:
                    self.errors.append(error)
                except BaseException as error:
                    self.faults.append(error)
                finally:
                    with self._changed:
                        self.turns += 1
                        self._changed.notify_all()

    def _turn(self, client: StoreClient, drawn: random.Random, at: int, turn: int) -> None:
        names = list(a_chain(self.space, BATCH, seed=100 * at + turn).names)
        self.outcomes += client.put(self.space, puts_of(names, SIZE), traffic_class=AGENT, ack=self.ack)
        other = drawn.randrange(len(self.addresses))
        wanted = [*names, *a_chain(self.space, BATCH, seed=100 * other + drawn.randrange(turn + 1)).names]
        client.lookup(self.space, wanted)
        buffers = [bytearray(SIZE) for _ in wanted]
        statuses = client.get_into(self.space, wanted, buffers)
        self.statuses += statuses
        for name, status, buffer in zip(wanted, statuses, buffers, strict=True):
            if status is GetStatus.OK and buffer != payload_of(name, SIZE):
                self.wrong.append(name)
        if drawn.random() < 0.2:
            client.delete(self.space, [name.key for name in names[:2]])


@dataclass
class Bench:
    """A small node on a file system that fails on demand, served."""

    folder: Path
    files: FaultyFiles
    clock: ManualClock
    node: Node
    server: Server
    space: SpaceId

    def load(self, ack: AckLevel = "os") -> Load:
        tcp, unix = self.server.addresses
        return Load([(tcp, False), (unix, False), (unix, True)], self.space, ack)

    def settle(self) -> dict[str, Any]:
        """After a fault: swept, writable, nothing held, books that equal the files. Gives the stats."""
        self.files.errors.clear()
        self.files.write_budget = self.files.transfer_max = self.files.only = None
        self.node.sweep(apply=True)
        with client_of(self.server.addresses[1]) as client:
            names = a_chain(self.space, BATCH, seed=9000).names
            assert set(client.put(self.space, puts_of(names, SIZE), traffic_class=AGENT)) <= {
                PutOutcome.STORED,
                PutOutcome.TOUCHED,
            }
            buffers = [bytearray(SIZE) for _ in names]
            assert client.get_into(self.space, names, buffers) == [GetStatus.OK] * BATCH
            assert buffers == [payload_of(name, SIZE) for name in names]
        wait(lambda: self.node.stats()["leases"] == 0)
        stats = self.node.stats()
        assert stats["segments_failed"] == 0
        assert_balanced(self.node, self.folder / "data")
        return stats


def assert_balanced(node: Node, data: Path) -> None:
    """What the node says of its bytes is what its files are."""
    books = node.accounting()[0]
    assert sum(books[name] for name in ("live_bytes", "dead_bytes", "free_bytes", "page_bytes")) == books["total_bytes"]
    assert min(books.values()) >= 0
    assert books["total_bytes"] == sum(path.stat().st_size for path in (data / "segments").glob("*.seg"))


def rules_of(codec: str) -> ClassRules:
    return ClassRules(
        (ClassRule(AGENT, "agent", keep_for_s=3 * 86_400, priority=100, codec=codec), TEST_RULES.rules[1])
    )


@contextmanager
def a_bench(files: FaultyFiles | None = None, codec: str = "none", **settings: Any) -> Iterator[Bench]:
    """16 segments of a MiB; whatever happened, the directory is clean for fsck in the end."""
    files, clock = files or FaultyFiles(), ManualClock()
    with short_dir() as folder:
        config = NodeConfig(directories=(folder / "data",), capacity_bytes=16 * MIB, segment_bytes=MIB, background=True)
        node = Node.open(config, clock, rules_of(codec), files=files)
        with served(node, folder, **settings) as server:
            yield Bench(folder, files, clock, node, server, node.register_space(a_space()))
        node.close()
        assert check(folder / "data").clean


# --- the disk -------------------------------------------------------------------------------------------------------

FAULTS: dict[str, tuple[dict[str, int], AckLevel, str]] = {
    "writes fail": ({"pwritev": errno.EIO}, "os", "write_errors"),
    "the disk is full": ({"pwritev": errno.ENOSPC, "allocate": errno.ENOSPC}, "os", "write_errors"),
    "flushes fail": ({"fdatasync": errno.EIO}, "disk", "refused"),
    "no file can be made": ({"create": errno.EMFILE}, "os", "segments_recycled"),
}
"""What fails, under which acknowledgement, and the number that tells."""


@pytest.mark.parametrize("fault", FAULTS)
def test_a_failing_disk_harms_no_byte_and_is_left_behind(fault: str) -> None:
    """It fails for a while in the middle of the load, then works again."""
    errors, ack, counter = FAULTS[fault]
    with a_bench() as bench:
        load = bench.load(ack)
        load.start()
        load.wait_turns(12)
        bench.files.errors.update(errors)
        load.wait_turns(24)
        bench.files.errors.clear()
        bench.node.sweep(apply=True)
        load.wait_turns(20)
        load.finish()
        assert load.statuses.count(GetStatus.OK) > 0
        stats = bench.settle()
        assert stats[counter] > 0
        assert stats["puts"] > 0
        metrics = ServerMetrics()
        metrics.registry.register(StatsCollector(bench.node.stats))
        names = {sample.name for family in metrics.registry.collect() for sample in family.samples}
        assert {f"reprise_store_{counter}_total", "reprise_store_leases"} <= names


def test_reads_that_fail_are_misses_and_no_more() -> None:
    """Blocks that are compressed are read by the daemon: those asked for while the device fails are lost, no others."""
    with a_bench(codec="zstd") as bench:
        names = list(a_chain(bench.space, 6, seed=1).names)
        puts = [replace_payload(put, b"a text that shrinks " * 3000) for put in puts_of(names, SIZE)]
        assert set(bench.node.put(bench.space, puts, traffic_class=AGENT)) == {PutOutcome.STORED}
        with client_of(bench.server.addresses[0]) as client:
            bench.files.errors["preadv"] = errno.EIO
            buffers = [bytearray(SIZE) for _ in names]
            assert GetStatus.OK not in client.get_into(bench.space, names[:3], buffers[:3])
            bench.files.errors.clear()
            assert client.get_into(bench.space, names[3:], buffers[3:]) == [GetStatus.OK] * 3
            assert buffers[3] == puts[3].payload
        stats = bench.settle()
        assert (stats["read_errors"], stats["quarantined"]) == (3, 3)


def replace_payload(put: Any, payload: bytes) -> Any:
    return replace(put, payload=payload)


@pytest.mark.parametrize("transfer_max", [4096, 9999])
def test_short_transfers_change_nothing(transfer_max: int) -> None:
    """Reads and writes that move a little at a time: everything is stored, and comes back."""
    with a_bench() as bench:
        bench.files.transfer_max = transfer_max
        load = bench.load()
        load.start()
        load.finish()
        assert load.errors == []
        assert set(load.outcomes) <= {PutOutcome.STORED, PutOutcome.TOUCHED}
        stats = bench.settle()
        assert (stats["corrupt"], stats["quarantined"], stats["write_errors"]) == (0, 0, 0)


@pytest.mark.parametrize("number", [errno.EPERM, errno.EIO])
def test_one_segment_that_takes_no_write_leaves_the_others_to_be_reclaimed(number: int) -> None:
    """Puts of four times the capacity are all taken, and counted as one failed segment."""
    with a_bench() as bench:
        names = a_chain(bench.space, BATCH, seed=1).names
        bench.node.put(bench.space, puts_of(names, SIZE), traffic_class=AGENT)
        bench.files.only = f"{bench.node.scan()[0][0].segment:08d}.seg"
        bench.files.errors["pwritev"] = bench.files.errors["unlink"] = number
        load = bench.load()
        for _ in range(3):
            load.start()
            load.finish()
            load._threads.clear()
            load.turns = 0
            load.addresses = load.addresses[::-1]  # other seeds for each client
        assert PutOutcome.STORED in load.outcomes
        assert PutOutcome.REFUSED not in load.outcomes[-BATCH:]
        assert bench.node.stats()["segments_recycled"] > 0
        assert bench.node.stats()["segments_failed"] <= 1
        bench.settle()


def test_a_segment_that_lost_its_name_costs_its_blocks_only() -> None:
    with a_bench() as bench:
        load = bench.load()
        load.start()
        load.wait_turns(20)
        victim = sorted((bench.folder / "data" / "segments").glob("*.seg"))[0]
        victim.unlink()
        load.wait_turns(20)
        bench.node.sweep(apply=True)
        load.finish()
        assert PutOutcome.REFUSED not in load.outcomes
        bench.settle()


# --- a slow device --------------------------------------------------------------------------------------------------


class Slow(FaultyFiles):
    """Every read takes ``read_s``, and waits for as long as ``gate`` is closed; ``begun`` once one does."""

    read_s = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.begun = threading.Event(), threading.Event()
        self.gate.set()

    def preadv(self, fd: int, views: Sequence[memoryview], offset: int) -> int:
        if not self.gate.is_set():
            self.begun.set()
            assert self.gate.wait(WAIT_S)
        time.sleep(self.read_s)
        return super().preadv(fd, views, offset)


def test_a_slow_device_gives_what_it_can_by_the_deadline() -> None:
    """Ten reads of half a second in 2.5 s: the first blocks are there, the others late, and no buffer is half full."""
    files = Slow()
    with a_bench(files) as bench:
        names = list(a_chain(bench.space, 10).names)
        bench.node.put(bench.space, puts_of(names, SIZE), traffic_class=AGENT)
        files.read_s = 0.5
        buffers = [bytearray(SIZE) for _ in names]
        statuses = bench.node.get_into(bench.space, names, buffers, deadline_s=2.5)
        files.read_s = 0.0
        assert statuses[0] is GetStatus.OK
        assert statuses[-1] is GetStatus.DEADLINE
        for name, status, buffer in zip(names, statuses, buffers, strict=True):
            assert buffer == (payload_of(name, SIZE) if status is GetStatus.OK else bytes(SIZE))
        bench.settle()


def test_who_waits_for_a_slow_device_holds_up_nobody_else() -> None:
    """One client's blocks must be read by the daemon, which takes for ever; the others look up and store meanwhile."""
    files = Slow()
    with a_bench(files, codec="zstd") as bench, ExitStack() as stack:
        slow, quick = (stack.enter_context(client_of(bench.server.addresses[at])) for at in (0, 1))
        names = list(a_chain(bench.space, 6, seed=1).names)
        puts = [replace_payload(put, b"a text that shrinks " * 3000) for put in puts_of(names, SIZE)]
        bench.node.put(bench.space, puts, traffic_class=AGENT)
        files.gate.clear()
        done = threading.Event()

        def get() -> None:
            slow.get_into(bench.space, names, [bytearray(SIZE) for _ in names], deadline_s=WAIT_S)
            done.set()

        waiting = threading.Thread(target=get)
        waiting.start()
        assert files.begun.wait(WAIT_S)
        assert quick.lookup(bench.space, names).prefix_blocks() == 6
        other = list(a_chain(bench.space, 4, seed=2).names)
        assert set(quick.put(bench.space, puts_of(other, SIZE), traffic_class=CHAT)) == {PutOutcome.STORED}
        assert quick.lookup(bench.space, other).prefix_blocks() == 4
        assert not done.is_set()
        files.gate.set()
        waiting.join(WAIT_S)
        assert done.is_set()
        bench.settle()


# --- the clock ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("jump_s", [-80 * YEAR_S, -5 * YEAR_S, 30 * YEAR_S, 200 * YEAR_S])
def test_a_clock_that_jumps_loses_nothing_once_it_is_right_again(jump_s: float) -> None:
    """By years, backwards before the epoch and forwards beyond 32 bits: serving goes on meanwhile, and what was stored
    before is there afterwards.
    """
    with a_bench() as bench:
        names = list(a_chain(bench.space, BATCH, seed=500).names)
        bench.node.put(bench.space, puts_of(names, SIZE), traffic_class=AGENT)
        right_s = bench.clock.now_s()
        load = bench.load()
        load.start()
        load.wait_turns(6)
        bench.clock._now_s = right_s + jump_s
        load.wait_turns(6)
        bench.clock._now_s = right_s + 60
        load.wait_turns(6)
        load.finish()
        assert load.errors == []
        assert PutOutcome.STORED in load.outcomes
        assert bench.node.lookup(bench.space, names).presence.max() >= 1
        status, data = read(bench.node, bench.space, names[0], SIZE)
        assert status is GetStatus.MISS or data == payload_of(names[0], SIZE)
        bench.settle()


# --- descriptors ----------------------------------------------------------------------------------------------------


def test_a_daemon_without_descriptors_serves_whom_it_has() -> None:
    """No descriptor is left, for the index neither: connections that there are read on, puts are stored or refused, and
    once some are free everything is as before.
    """
    with a_bench() as bench, ExitStack() as stack:
        client = stack.enter_context(client_of(bench.server.addresses[1], same_host=False))
        for seed in range(40, 60):
            puts = puts_of(list(a_chain(bench.space, BATCH, seed=seed).names), SIZE)
            assert set(client.put(bench.space, puts, traffic_class=AGENT)) == {PutOutcome.STORED}
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        taken: list[int] = []
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 1, hard))
            with suppress(OSError):
                while True:
                    taken.append(os.dup(0))
            for seed in range(2, 40):
                names = list(a_chain(bench.space, BATCH, seed=seed).names)
                outcomes = client.put(bench.space, puts_of(names, SIZE), traffic_class=AGENT)
                assert set(outcomes) <= {PutOutcome.STORED, PutOutcome.REFUSED}
                buffers = [bytearray(SIZE) for _ in names]
                statuses = client.get_into(bench.space, names, buffers)
                stored = [outcome is PutOutcome.STORED for outcome in outcomes]
                assert [status is GetStatus.OK for status in statuses] == stored
                got = [buffer for buffer, is_there in zip(buffers, stored, strict=True) if is_there]
                assert got == [payload_of(name, SIZE) for name, is_there in zip(names, stored, strict=True) if is_there]
            present = [info.key for info in bench.node.scan()[0]]
            assert present
        finally:
            for fd in taken:
                os.close(fd)
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        bench.settle()


# --- clients --------------------------------------------------------------------------------------------------------

DOOMED = """
import itertools
import sys
from kvstore import submission
from kvstore.client import StoreClient
from kvstore.traffic import AGENT
from tests.support.nodes import puts_of
from tests.support.spaces import a_chain, a_space
submission.PART_BYTES = 200_000  # several parts of a batch are under way at once
client = StoreClient.connect([sys.argv[1]], same_host=sys.argv[2] == "arena")
space = client.register_space(a_space())
print("at work", flush=True)
for seed in itertools.count():
    client.put(space, puts_of(a_chain(space, 16, seed=seed % 40).names, 60_000), traffic_class=AGENT)
"""


def done(bench: Bench) -> int:
    """Blocks that were put, known ones included."""
    stats = bench.node.stats()
    return int(stats["puts"] + stats["touches"])


def arenas_mapped() -> int:
    """Mappings of clients' arenas in this process, which is the daemon's too."""
    return Path("/proc/self/maps").read_text().count("reprise-arena")


@pytest.mark.parametrize("way", ["socket", "arena"])
def test_a_client_that_is_killed_in_mid_put_leaves_nothing_behind(way: str) -> None:
    """Three clients die one after another, each while it does nothing but put, several parts at a time: neither memory
    of the daemon nor a mapping of theirs stays held.
    """
    root = Path(__file__).parents[2]
    admission = Admission()
    gc.collect()
    mapped = arenas_mapped()  # of clients in this very process, whose views somebody may still hold
    with a_bench(admission=admission) as bench:
        for turn in range(3):
            command = [sys.executable, "-c", DOOMED, bench.server.addresses[1], way]
            environment = {**os.environ, "PYTHONPATH": str(root)}
            with subprocess.Popen(
                command,
                cwd=root,
                env=environment,
                stdout=subprocess.PIPE,
                preexec_fn=partial(die_with_parent, os.getpid()),
            ) as doomed:
                assert doomed.stdout is not None
                assert doomed.stdout.readline() == b"at work\n"
                before = done(bench)
                enough = before + 20 + 7 * turn
                try:
                    wait(lambda enough=enough: done(bench) > enough)
                finally:
                    doomed.send_signal(signal.SIGKILL)
        wait(lambda: bench.server.connections == 0)
        wait(lambda: arenas_mapped() <= mapped)
        assert admission.lent_bytes == 0
        for info in bench.node.scan()[0]:
            assert info.payload_bytes == SIZE
        for seed in range(40):
            for name in a_chain(bench.space, 16, seed=seed).names:
                status, data = read(bench.node, bench.space, name, SIZE)
                assert status is GetStatus.MISS or (status is GetStatus.OK and data == payload_of(name, SIZE))
        stats = bench.settle()
        assert stats["corrupt"] == 0


def test_a_client_that_never_gives_back_blocks_nobody_for_long() -> None:
    """It asks for extents over many segments and does nothing with them: puts go on in other segments, then its lease
    ends and what it was lent is recycled. (What it reads late, it does not believe: see the same-host tests.)
    """
    with a_bench(lease_s=2.0) as bench:
        names = [name for seed in range(12) for name in a_chain(bench.space, BATCH, seed=seed).names]
        for at in range(0, len(names), BATCH):
            bench.node.put(bench.space, puts_of(names[at : at + BATCH], SIZE), traffic_class=AGENT)
        link = NodeLink(parse_address(bench.server.addresses[1]), new_hello(None, None), 1)
        lent: list[int] = []

        def hold_on(hold: Any) -> None:
            body = wire.encode_get(bench.space, names, [SIZE] * len(names))
            hold.ask(Call(wire.Opcode.EXTENTS, body, bulk=True), take)
            assert bench.node.stats()["leases"] > 0
            fill(range(100, 110))
            wait(lambda: bench.node.stats()["leases"] == 0)
            fill(range(110, 140))
            assert bench.node.lookup(bench.space, names).prefix_blocks() == 0

        def fill(seeds: range) -> None:
            for seed in seeds:
                puts = puts_of(list(a_chain(bench.space, BATCH, seed=seed).names), SIZE)
                outcomes = bench.node.put(bench.space, puts, traffic_class=AGENT)
                assert set(outcomes) == {PutOutcome.STORED}

        def take(channel: Any, header: Any, body: bytes) -> None:
            lent.extend(fd for fd in channel.receive_descriptors(header.payload_bytes) if fd is not None)

        try:
            link.converse(Call(wire.Opcode.GET, b"", bulk=True), time.monotonic() + WAIT_S, hold_on)
        finally:
            link.close()
            for fd in lent:
                os.close(fd)
        assert lent
        bench.settle()
        assert bench.server._metrics.registry.get_sample_value("reprise_store_leases_expired_total") == 1


class Scribbling(FaultyFiles):
    """Calls ``scribble`` between the bytes of what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.scribble: Callable[[], object] = lambda: None

    def pwritev(self, fd: int, views: Sequence[memoryview], offset: int) -> int:
        self.scribble()
        done = super().pwritev(fd, views, offset)
        self.scribble()
        return done


def test_a_client_that_writes_garbage_into_its_arena_harms_itself_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every part of its arena changes while the daemon writes from it: what is acknowledged is what was put, everything
    else is refused as altered; a neighbour's puts are whole.
    """
    files, arenas = Scribbling(), []
    drawn = random.Random(5)
    create = Arena.create.__func__  # type: ignore[attr-defined]

    def watched(cls: type[Arena], *args: Any) -> tuple[Arena, int]:
        made: tuple[Arena, int] = create(cls, *args)
        arenas.append(made[0])
        return made

    monkeypatch.setattr(Arena, "create", classmethod(watched))

    def scribble() -> None:
        if arenas and drawn.random() < 0.5:
            memory = arenas[0]._memory
            at = drawn.randrange(BATCH * SIZE)
            memory[at : at + 8] = drawn.randbytes(8)

    with a_bench(files) as bench, ExitStack() as stack:
        unruly = stack.enter_context(client_of(bench.server.addresses[1]))
        neighbour = stack.enter_context(client_of(bench.server.addresses[0]))
        assert unruly.lookup(bench.space, a_chain(bench.space, 1).names).prefix_blocks() == 0
        files.scribble = scribble
        outcomes: dict[BlockName, PutOutcome] = {}
        for seed in range(12):
            names = list(a_chain(bench.space, BATCH, seed=seed).names)
            outcomes |= zip(names, unruly.put(bench.space, puts_of(names, SIZE), traffic_class=AGENT), strict=True)
            others = list(a_chain(bench.space, BATCH, seed=100 + seed).names)
            assert set(neighbour.put(bench.space, puts_of(others, SIZE), traffic_class=AGENT)) == {PutOutcome.STORED}
        files.scribble = lambda: None
        assert PutOutcome.ALTERED in outcomes.values()
        for name, outcome in outcomes.items():
            status, data = read(bench.node, bench.space, name, SIZE)
            assert (status is GetStatus.OK) <= (outcome is PutOutcome.STORED)
            assert status is not GetStatus.OK or data == payload_of(name, SIZE)
            assert status is not GetStatus.CORRUPT
        assert bench.settle()["altered"] > 0
