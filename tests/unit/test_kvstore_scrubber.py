"""The background scrub: it finds what nobody has read, disturbs nobody, and goes on after a restart."""

from __future__ import annotations

import errno
import mmap
import os
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kvstore.config import load_config
from kvstore.daemon import scrubber as module
from kvstore.daemon.files import Files
from kvstore.daemon.metrics import ServerMetrics, StatsCollector
from kvstore.daemon.node import Node, NodeConfig
from kvstore.daemon.scrubber import PASS_EVERY_S, Scrubber, merge_progress
from kvstore.daemon.uncached import UncachedFile
from kvstore.keys import SpaceId
from kvstore.limits import MIB
from kvstore.store import GetStatus, Presence
from kvstore.testing import TEST_RULES, ManualClock
from kvstore.traffic import AGENT
from tests.support.faults import FaultyFiles
from tests.support.nodes import open_node, payload_of, puts_of, read
from tests.support.spaces import a_chain, a_space
from tests.support.waiting import WAIT_S, wait

SIZE = 60_000
RECORD = -(-(256 + SIZE) // 4096) * 4096


class Bench:
    """A node with a scrub that takes a turn when told to."""

    def __init__(self, path: Path, files: Files | None = None) -> None:
        self.path, self.files = path, files
        self.clock = ManualClock()
        self.open()
        self.space: SpaceId = self.node.register_space(a_space())

    def open(self) -> None:
        self.node: Node = open_node(self.path, self.clock, files=self.files)
        self.scrubber: Scrubber = self.node._shards[0].scrubber(MIB, self.clock)
        self.node._scrubbers = [self.scrubber]

    def reopen(self) -> None:
        self.node.close()
        self.open()

    def put(self, blocks: int, seed: int = 0) -> list:  # type: ignore[type-arg]
        names = a_chain(self.space, blocks, seed=seed).names
        self.node.put(self.space, puts_of(names, SIZE), traffic_class=AGENT)
        return names

    def whole_pass(self) -> int:
        """Turns until nothing is due; returns the bytes read."""
        done = 0
        while part := self.scrubber.turn():
            done += part
        return done

    def damage(self, name: object, at: int) -> None:
        """Flip one bit of a record, behind the node's back and on the device."""
        shard = self.node._shards[0]
        with shard._ledger.lock:
            place = shard._ledger.place(shard._ledger.presence.slot(name.key))  # type: ignore[attr-defined]
        assert place is not None
        fd = os.open(place.segment.path, os.O_RDWR)
        old = os.pread(fd, 1, place.offset + at)
        os.pwrite(fd, bytes([old[0] ^ 1]), place.offset + at)
        os.fsync(fd)
        os.close(fd)

    def presence(self, names: list) -> list[int]:  # type: ignore[type-arg]
        return self.node.lookup(self.space, names).presence.tolist()


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    yield made
    made.node.close()


def test_a_pass_reads_every_block_once_and_the_next_begins_a_day_later(bench: Bench) -> None:
    bench.put(64)
    assert bench.whole_pass() == 64 * RECORD
    stats = bench.node.stats()
    assert (stats["scrub_bytes"], stats["scrub_passes"], stats["scrub_progress"]) == (64 * RECORD, 1, 1.0)
    assert stats["scrub_last_pass_s"] == bench.clock.now_s()
    assert (stats["scrub_damaged"], stats["quarantined"], stats["leases"]) == (0, 0, 0)
    assert bench.whole_pass() == 0
    bench.clock.advance(PASS_EVERY_S)
    assert bench.whole_pass() == 0, "the turn that notices begins the pass"
    assert bench.whole_pass() == 64 * RECORD
    assert bench.node.stats()["scrub_passes"] == 2


@pytest.mark.parametrize("at", [5, 40, 100, 256, 256 + SIZE // 2, 255 + SIZE])
def test_a_flipped_bit_that_nobody_read_is_found(bench: Bench, at: int) -> None:
    """In every part of header and payload: the block is a miss and counted before anybody asks; the others stay."""
    names = bench.put(40)
    bench.damage(names[7], at)
    bench.whole_pass()
    stats = bench.node.stats()
    assert (stats["scrub_damaged"], stats["scrub_quarantined"], stats["quarantined"], stats["corrupt"]) == (1, 1, 1, 1)
    expected = [Presence.QUARANTINED if place == 7 else Presence.PRESENT for place in range(len(names))]
    assert bench.presence(names) == expected
    bench.put(8)
    assert bench.presence([names[7]]) == [Presence.PRESENT], "the block can be stored again"


def test_a_device_that_cannot_read_is_found(tmp_path: Path) -> None:
    files = FaultyFiles()
    bench = Bench(tmp_path, files)
    names = bench.put(4)
    files.errors["preadv"] = errno.EIO
    bench.whole_pass()
    files.errors.clear()
    assert bench.presence(names) == [Presence.QUARANTINED] * 4
    assert bench.node.stats()["scrub_quarantined"] == 4
    bench.node.close()


def test_blocks_that_leave_while_they_wait_for_their_turn_are_nobodys_damage(bench: Bench) -> None:
    """Deleted, and whole segments recycled under other blocks, between the listing of a segment and its turn."""
    names = bench.put(64)
    assert bench.scrubber._find_due()
    bench.node.delete(bench.space, [name.key for name in names[:8]])
    for seed in range(1, 24):
        bench.put(16, seed=seed)
    bench.whole_pass()
    stats = bench.node.stats()
    assert (stats["scrub_damaged"], stats["quarantined"], stats["leases"]) == (0, 0, 0)
    assert stats["segments_recycled"] > 0


def test_a_restart_goes_on_about_where_it_was(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a pass, a restart, the rest: no block is left out, and at most one segment is read twice."""
    monkeypatch.setattr(module, "TURN_BYTES", MIB // 2)
    bench.put(100)
    before = sum(bench.scrubber.turn() for _ in range(6))
    bench.reopen()
    after = bench.whole_pass()
    assert 0 < before < 100 * RECORD
    assert 100 * RECORD <= before + after <= 100 * RECORD + MIB
    assert bench.node.stats()["scrub_passes"] == 1
    bench.reopen()
    assert bench.node.stats()["scrub_passes"] == 1
    assert bench.whole_pass() == 0


@pytest.mark.parametrize("text", ["", "[]", '{"segment": -1}', '{"segment": "x"}', '{"passes": NaN}', '{"more": 1}'])
def test_a_spoiled_position_begins_anew(bench: Bench, text: str) -> None:
    bench.put(3)
    bench.whole_pass()
    bench.node.close()
    (bench.path / "volume-0" / "scrub.json").write_text(text)
    bench.open()
    assert bench.whole_pass() == 3 * RECORD


def test_a_clock_that_goes_back_does_not_stop_it(bench: Bench) -> None:
    bench.put(3)
    bench.whole_pass()
    bench.clock._now_s -= 5 * 365 * 86_400
    bench.scrubber.turn()
    assert bench.whole_pass() == 3 * RECORD


def test_what_was_not_in_the_page_cache_is_not_there_afterwards(tmp_path: Path) -> None:
    """A page that somebody else has read stays; one that only the scrub has read does not."""
    path = tmp_path / "file"
    content = os.urandom(64 * 4096)
    path.write_bytes(content)
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    probe = mmap.mmap(-1, 4096)

    def is_there(page: int) -> bool:
        try:
            return os.preadv(fd, [probe], page * 4096, os.RWF_NOWAIT) > 0
        except BlockingIOError:
            return False

    try:
        gone = not is_there(50)
    except OSError:
        gone = False
    if not gone:
        pytest.skip("this file system keeps its pages, or cannot tell which it has")
    view = memoryview(mmap.mmap(-1, 8 * 4096))
    for direct in (True, False):
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
        os.pread(fd, 4096, 8 * 4096)
        file = UncachedFile(Files(), fd)
        if not direct:
            file.close()
        for begin in (8, 40):
            assert file.read_into(view, begin * 4096) == 8 * 4096
            assert view == content[begin * 4096 : (begin + 8) * 4096]
        assert is_there(8), "what others read stays"
        assert not is_there(44), "what only the scrub read is gone"
        file.close()
    os.close(fd)


def test_it_gives_way_to_clients_but_not_for_ever(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """While much is moved it stands back, counted; after so many turns it takes one all the same."""
    monkeypatch.setattr(module, "_IDLE_S", 0.001)
    monkeypatch.setattr(module, "GIVE_WAY_TURNS_MAX", 5)
    moved = iter(range(0, 10**15, 10**9))
    monkeypatch.setattr(Scrubber, "_moved", lambda self: next(moved))
    bench.put(4)
    turned = threading.Event()
    turn = bench.scrubber.turn

    def once() -> int:
        done = turn()
        turned.set()
        return done

    monkeypatch.setattr(bench.scrubber, "turn", once)
    bench.scrubber.start()
    assert turned.wait(WAIT_S)
    bench.scrubber.stop()
    assert bench.scrubber.stats()["scrub_gave_way"] >= 5


def test_a_node_scrubs_every_directory_and_tells_prometheus(tmp_path: Path) -> None:
    clock = ManualClock()
    config = NodeConfig(directories=(tmp_path / "a", tmp_path / "b"), capacity_bytes=32 * MIB, scrub_bytes_per_s=0)
    node = Node.open(config, clock, TEST_RULES)
    space = node.register_space(a_space())
    names = [name for seed in range(8) for name in a_chain(space, 16, seed=seed).names]
    for at in range(0, len(names), 16):
        node.put(space, puts_of(names[at : at + 16], SIZE), traffic_class=AGENT)
    node.close()
    node = Node.open(replace(config, scrub_bytes_per_s=1000 * MIB), clock, TEST_RULES)
    wait(lambda: node.stats()["scrub_passes"] == 1, "end of a pass")
    metrics = ServerMetrics()
    metrics.registry.register(StatsCollector(node.stats))
    assert metrics.registry.get_sample_value("reprise_store_scrub_bytes_total") == 128 * RECORD
    assert metrics.registry.get_sample_value("reprise_store_scrub_progress") == 1.0
    assert read(node, space, names[0], SIZE) == (GetStatus.OK, payload_of(names[0], SIZE))
    node.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "scrub"]


def test_of_several_scrubs_the_last_one_counts() -> None:
    one = {"scrub_bytes": 1.0, "scrub_passes": 2.0, "scrub_progress": 0.5, "scrub_last_pass_s": 9.0}
    two = {"scrub_bytes": 2.0, "scrub_passes": 3.0, "scrub_progress": 0.1, "scrub_last_pass_s": 0.0}
    merged = {"scrub_bytes": 3.0, "scrub_passes": 2.0, "scrub_progress": 0.1, "scrub_last_pass_s": 0.0}
    assert merge_progress([one, two]) == merged
    assert merge_progress([]) == {}


@pytest.mark.parametrize(
    ("text", "rate"), [("20MiB/s", 20 * MIB), ("1GiB", 1024 * MIB), ("0", 0), ("off", 0), (None, 20 * MIB)]
)
def test_the_rate_is_read_as_people_write_it(text: str | None, rate: int) -> None:
    config = load_config(None, {"data": "d", "capacity": "1GiB", "scrub_rate": text})
    assert config.scrub_bytes_per_s == rate
