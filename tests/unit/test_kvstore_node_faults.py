"""The node under faults that come in twos: what failed once must neither spread nor come back."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from kvstore.daemon.fsck import check
from kvstore.daemon.node import Node, NodeConfig
from kvstore.errors import Overloaded, Unavailable, VolumeError
from kvstore.keys import BlockName, SpaceId, TokenChain
from kvstore.limits import MIB
from kvstore.store import FLAG_APPROXIMATE, GetStatus, Pin, Presence, PutOutcome
from kvstore.testing import TEST_RULES, ManualClock
from kvstore.traffic import AGENT, CHAT, ClassRules
from tests.support.disk import disk_bytes
from tests.support.faults import FaultyFiles
from tests.support.nodes import open_node, payload_of, puts_of, read
from tests.support.spaces import a_chain, a_space

SIZE = 60_000


class Bench:
    """One directory, one clock, one file system; the node is reopened at will."""

    def __init__(self, path: Path, files: FaultyFiles) -> None:
        self.path = path
        self.volume = path / "volume-0"
        self.clock = ManualClock()
        self.files = files
        self.node = open_node(path, self.clock, files=files)
        self.space: SpaceId = self.node.register_space(a_space())

    def reopen(self, *, lose_index: bool = False) -> Node:
        """As after kill -9, optionally without the index."""
        self.node.abandon()
        if lose_index:
            shutil.rmtree(self.volume / "index")
        self.node = open_node(self.path, self.clock, files=self.files)
        return self.node

    def put(self, blocks: int, seed: int, ack: str = "os") -> tuple[TokenChain, list[PutOutcome]]:
        chain = a_chain(self.space, blocks, seed=seed)
        outcomes = self.node.put(self.space, puts_of(chain.names, SIZE), traffic_class=AGENT, ack=ack)  # type: ignore[arg-type]
        return chain, outcomes

    def presence(self, chain: TokenChain) -> list[int]:
        return self.node.lookup(self.space, chain.names).presence.tolist()


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path, FaultyFiles())
    yield made
    made.files.errors.clear()
    made.node.close()


@pytest.mark.parametrize(
    ("changes", "floor_bytes", "says"),
    [
        ({"capacity_bytes": 2**60}, 0, "capacity of 1EiB is more than the whole file system"),
        ({"segment_bytes": 60 * MIB}, 0, "holds 1 segments of 60MiB; it needs 3"),
        ({}, 65 * MIB, "more than the capacity of 64MiB"),
    ],
)
def test_a_start_with_a_capacity_that_cannot_be_had_leaves_no_trace(
    tmp_path: Path, changes: dict[str, int], floor_bytes: int, says: str
) -> None:
    """A refused first start makes nothing on disk, so the corrected command is a first start again."""
    config = replace(NodeConfig(directories=(tmp_path / "data",), capacity_bytes=64 * MIB), **changes)
    rules = ClassRules((replace(TEST_RULES.rules[0], floor_bytes=floor_bytes), *TEST_RULES.rules[1:]))
    with pytest.raises((VolumeError, ValueError), match=says):
        Node.open(config, ManualClock(), rules)
    assert not list(tmp_path.iterdir())


def test_an_index_that_takes_no_writes_costs_no_block_and_is_mended(bench: Bench) -> None:
    """RocksDB stays read-only after an error: puts are refused and evict nothing, deletions hold, and writing goes on
    by itself once the index can be written anew; nothing is rebuilt at the next start.
    """
    chain, _ = bench.put(64, seed=1)
    bench.node.touch(bench.space, chain.names[:4], traffic_class=CHAT)
    bench.node._shards[0]._ledger.index._close_database()
    obstacle = bench.volume / "index.new"
    obstacle.write_bytes(b"in the way of a rewrite")
    for seed in range(2, 30):
        assert set(bench.put(16, seed=seed)[1]) == {PutOutcome.REFUSED}
    assert bench.presence(chain) == [Presence.PRESENT] * 64
    assert read(bench.node, bench.space, chain.names[0], SIZE) == (GetStatus.OK, payload_of(chain.names[0], SIZE))
    assert bench.node.delete(bench.space, [chain.names[63].key]) == 1
    obstacle.unlink()
    assert set(bench.put(16, seed=30)[1]) == {PutOutcome.STORED}
    before = {info.key: info for info in bench.node.scan()[0]}
    assert len(before) == 63 + 16
    node = bench.reopen()
    assert {info.key: info for info in node.scan()[0]} == before
    assert bench.presence(chain) == [Presence.PRESENT] * 63 + [Presence.PURGED]
    node.close()
    assert check(bench.volume).clean


def test_a_disk_put_is_not_acknowledged_if_its_segment_was_sealed_without_the_disk(bench: Bench) -> None:
    """A batch fills one segment and the next; the flush that seals the first fails, the last one does not."""
    bench.put(4, seed=1)
    bench.files.errors["fdatasync"] = errno.EIO
    bench.files.only = "00000001.seg"
    chain, outcomes = bench.put(16, seed=2, ack="disk")
    assert PutOutcome.REFUSED in outcomes
    assert PutOutcome.STORED in outcomes
    for outcome, presence in zip(outcomes, bench.presence(chain), strict=True):
        assert (outcome is PutOutcome.STORED) == (presence == Presence.PRESENT)
    bench.files.errors.clear()
    assert PutOutcome.REFUSED not in bench.put(16, seed=2, ack="disk")[1]


def test_what_a_killed_process_left_is_flushed_before_a_disk_put_is_acknowledged(bench: Bench) -> None:
    """A block that was stored with ``os`` before a kill, and is put again with ``disk``: a touch that is a promise."""
    bench.put(2, seed=1)
    bench.reopen()
    bench.files.calls.clear()
    assert bench.put(2, seed=1, ack="disk")[1] == [PutOutcome.TOUCHED] * 2
    assert bench.files.calls["fdatasync"] > 0


def test_records_of_a_refused_put_never_outlive_a_deletion(bench: Bench) -> None:
    """A write stops half-way and the segment cannot even be sealed: whole records of the refused put are on disk.
    Deleting these blocks later keeps a restart from adopting them.
    """
    bench.files.errors["pwritev"] = errno.EIO
    bench.files.write_budget = 2 * 61_440 + 100
    chain, outcomes = bench.put(4, seed=1)
    assert set(outcomes) == {PutOutcome.REFUSED}
    with pytest.raises(VolumeError):
        bench.node.delete(bench.space, [name.key for name in chain.names])
    bench.files.errors.clear()
    assert bench.node.delete(bench.space, [name.key for name in chain.names]) == 0
    for lose_index in (False, True):
        bench.reopen(lose_index=lose_index)
        assert Presence.PRESENT not in bench.presence(chain)


def test_a_disk_that_was_full_for_a_while_is_written_to_again_after_a_sweep(bench: Bench) -> None:
    """Every segment refused a write meanwhile; none stays set aside for ever."""
    for seed in range(20):
        bench.put(16, seed=seed)
    bench.files.errors["pwritev"] = errno.ENOSPC
    for seed in range(20, 60):
        assert PutOutcome.STORED not in bench.put(16, seed=seed)[1]
    bench.files.errors.clear()
    bench.node.sweep(apply=True)
    for seed in range(60, 80):
        assert set(bench.put(16, seed=seed)[1]) == {PutOutcome.STORED}
    assert bench.node.stats()["segments_failed"] == 0


class Stubborn(FaultyFiles):
    """The first files that shall go, so many of them, stay."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.stay: set[str] = set()
        self._count = count

    def unlink(self, path: Path) -> None:
        if len(self.stay) < self._count:
            self.stay.add(path.name)
        if path.name in self.stay:
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), str(path))
        super().unlink(path)


def test_one_file_that_cannot_be_removed_keeps_no_lower_capacity_from_being_reached(bench: Bench) -> None:
    """Another goes for it; it stays and counts, and puts go on."""
    for seed in range(1, 14):
        bench.put(16, seed)
    bench.node.close()
    files = Stubborn(1)
    bench.node = open_node(bench.path, bench.clock, files=files, capacity_bytes=8 * MIB)
    assert disk_bytes(bench.path) <= 8 * MIB
    assert len(files.stay) == 1
    stays = bench.volume / "segments" / files.stay.pop()
    assert stays.exists()
    assert bench.node.stats()["segments"] == bench.node.stats()["segments_max"]
    for seed in range(20, 34):
        assert bench.put(16, seed)[1] == [PutOutcome.STORED] * 16
    assert disk_bytes(bench.path) <= 8 * MIB


def test_a_directory_that_lets_no_file_go_costs_no_more_than_two(bench: Bench) -> None:
    """The start is refused, by the file's name, before everything was given up in vain."""
    chains = [bench.put(16, seed)[0] for seed in range(1, 14)]
    bench.node.close()
    segments = len(list((bench.volume / "segments").iterdir()))
    with pytest.raises(VolumeError, match=r"cannot be removed for a lower capacity.*\.seg"):
        open_node(bench.path, bench.clock, files=Stubborn(100), capacity_bytes=8 * MIB)
    bench.node = open_node(bench.path, bench.clock, files=bench.files)
    lost = sum(bench.presence(chain).count(Presence.EVICTED) for chain in chains)
    assert lost <= 16 * 13 * 3 / segments


def test_a_start_without_enough_file_descriptors_removes_nothing(bench: Bench) -> None:
    """A segment that cannot be opened is no damaged segment: the start fails, and a better one finds every block."""
    chain, _ = bench.put(64, seed=1)
    bench.files.errors["open"] = errno.EMFILE
    bench.files.only = "00000002.seg"
    with pytest.raises(VolumeError, match="cannot be opened"):
        bench.reopen()
    bench.files.errors.clear()
    bench.node = open_node(bench.path, bench.clock, files=bench.files)
    assert bench.presence(chain) == [Presence.PRESENT] * 64


class Interrupted(FaultyFiles):
    """Calls ``meanwhile`` once, before the next read."""

    def __init__(self) -> None:
        super().__init__()
        self.meanwhile: Callable[[], object] | None = None

    def preadv(self, fd: int, views: Sequence[memoryview], offset: int) -> int:
        meanwhile, self.meanwhile = self.meanwhile, None
        if meanwhile is not None:
            meanwhile()
        return super().preadv(fd, views, offset)


def test_a_block_replaced_under_its_reader_is_no_miss(tmp_path: Path) -> None:
    """Between looking up the place and reading it an exact block takes the approximate one's place: both ways of
    reading find the new bytes.
    """
    files = Interrupted()
    bench = Bench(tmp_path, files)
    names = a_chain(bench.space, 2).names
    exact = puts_of(names, SIZE)
    approximate = [replace(put, flags=FLAG_APPROXIMATE, payload=b"\x01" * SIZE) for put in exact]
    bench.node.put(bench.space, approximate, traffic_class=AGENT)
    files.meanwhile = lambda: bench.node.put(bench.space, exact[:1], traffic_class=AGENT)
    assert read(bench.node, bench.space, names[0], SIZE) == (GetStatus.OK, exact[0].payload)
    files.meanwhile = lambda: bench.node.put(bench.space, exact[1:], traffic_class=AGENT)
    with bench.node.open_payload(bench.space, names[1]) as lease:  # type: ignore[union-attr]
        assert lease.flags == 0
        assert os.pread(lease.fd, SIZE, lease.offset) == exact[1].payload
    assert bench.node.stats()["misses"] == 0
    bench.node.close()


def test_a_flush_under_way_is_waited_for(bench: Bench) -> None:
    """Two flushes of one segment: the second finds nothing dirty, yet must wait for the first."""
    began, go_on, ended = threading.Event(), threading.Event(), threading.Event()

    class Slow(FaultyFiles):
        def fdatasync(self, fd: int) -> None:
            began.set()
            go_on.wait(10)
            super().fdatasync(fd)

    bench.put(1, seed=1)
    segment = bench.node._shards[0]._ledger.segments.segments[1]
    segment.files = Slow()
    first = threading.Thread(target=segment.sync)
    second = threading.Thread(target=lambda: (segment.sync(if_dirty=True), ended.set()))
    first.start()
    assert began.wait(10)
    second.start()
    assert not ended.wait(0.1)
    go_on.set()
    first.join(10)
    second.join(10)
    assert ended.is_set()


def test_readers_of_the_segments_are_not_disturbed_by_a_new_one(bench: Bench) -> None:
    """Statistics and flushes go over the segments while the writer begins another."""
    bench.put(1, seed=1)
    segments = bench.node._shards[0]._ledger.segments
    seen = iter(segments.segments.items())
    next(seen)
    assert segments.begin(CHAT, 1, 0, spare=0) is not None
    assert list(seen) == []


def test_spaces_without_blocks_make_room_for_new_ones(tmp_path: Path) -> None:
    """A full catalog forgets the spaces that hold nothing, and refuses only when all of them do."""
    node = open_node(tmp_path, ManualClock(), capacity_bytes=8 * MIB)
    kept = node.register_space(a_space())
    node.put(kept, puts_of(a_chain(kept, 1).names, 100), traffic_class=AGENT)
    padding = "m" * 500
    for number in range(150):
        last = node.register_space(a_space(model=f"{padding}{number}", revision=padding))
    assert len(node.spaces()) < 150
    assert {kept, last} <= node.spaces().keys()

    def fill_a_space(number: int) -> None:
        space = node.register_space(a_space(model=f"{padding}{number}", revision=padding))
        node.put(space, puts_of(a_chain(space, 1).names, 100), traffic_class=AGENT)

    with pytest.raises(Overloaded):
        list(map(fill_a_space, range(150)))
    node.close()


def test_directories_in_another_order_keep_policy_and_pins(tmp_path: Path) -> None:
    clock = ManualClock()
    paths = (tmp_path / "a", tmp_path / "b")
    node = Node.open(NodeConfig(paths, 32 * MIB), clock, TEST_RULES, "first text")
    space = node.register_space(a_space())
    name = a_chain(space, 1).names[0]
    node.put(space, puts_of([name], SIZE), traffic_class=AGENT)
    assert node.pin([Pin(space, name.key, "owner", "reason")]) == 1
    node.close()
    node = Node.open(NodeConfig(paths[::-1], 32 * MIB), clock, TEST_RULES, "second text")
    assert [pin.key for pin in node.pins()] == [name.key]
    assert node.policy().text == "first text"
    node.close()


def test_an_ended_pin_is_not_told_as_one(bench: Bench) -> None:
    chain, _ = bench.put(1, seed=1)
    until_s = int(bench.clock.now_s()) + 10
    bench.node.pin([Pin(bench.space, chain.names[0].key, "owner", "reason", until_s)])
    assert bench.node.scan()[0][0].pinned
    bench.clock.advance(10)
    assert not bench.node.scan()[0][0].pinned


@pytest.mark.parametrize("turn", range(3))
def test_puts_that_meet_a_closing_node_are_refused_or_kept(tmp_path: Path, turn: int) -> None:
    """Writers queue for the lock while the node closes: each put is stored for good, or ends with Unavailable; no write
    reaches a file that was let go.
    """
    clock = ManualClock()
    node = open_node(tmp_path, clock)
    space = node.register_space(a_space())
    stored: list[BlockName] = []
    problems: list[Exception] = []

    def work(number: int) -> None:
        with contextlib.suppress(Unavailable):
            for name in a_chain(space, 1000, seed=number).names:
                if node.put(space, puts_of([name], SIZE), traffic_class=AGENT) == [PutOutcome.STORED]:
                    stored.append(name)
                read(node, space, name, SIZE)

    def watched(number: int) -> None:
        try:
            work(number)
        except Exception as error:
            problems.append(error)

    threads = [threading.Thread(target=watched, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    while len(stored) < 20 + turn:
        time.sleep(0.001)
    node.close()
    for thread in threads:
        thread.join(30)
    assert problems == []
    assert check(tmp_path / "volume-0").clean
    node = open_node(tmp_path, clock)
    assert {int(item) for item in node.lookup(space, stored).presence} <= {Presence.PRESENT, Presence.EVICTED}
    assert node.stats()["quarantined"] == 0
    node.close()


@pytest.mark.parametrize("change_bytes", [-5000, 5000])
def test_a_segment_of_another_length_is_repaired(bench: Bench, change_bytes: int) -> None:
    """A file that was cut, or that somebody appended to, has its length again after a repair."""
    bench.put(4, seed=1)
    bench.node.close()
    path = bench.volume / "segments" / "00000001.seg"
    length = path.stat().st_size
    os.truncate(path, length + change_bytes)
    assert check(bench.volume).findings_by_kind["segment-cut"] == 1
    check(bench.volume, repair=True)
    assert check(bench.volume).clean
    assert path.stat().st_size == length


def test_a_directory_removed_under_a_running_node_is_no_fault_of_its_callers(bench: Bench) -> None:
    """Reads give right bytes or a miss, puts are refused once the loss was noticed, and only what must be durable is
    an error, with its reason.
    """
    chain, _ = bench.put(16, seed=1)
    shutil.rmtree(bench.volume)
    bench.node._shards[0]._ledger.index.refusing = True  # as after the write that must open another file
    for name in chain.names:
        status, data = read(bench.node, bench.space, name, SIZE)
        assert status is GetStatus.MISS or data == payload_of(name, SIZE)
    bench.node.sweep(apply=True)
    for seed in range(2, 6):
        assert set(bench.put(16, seed=seed)[1]) == {PutOutcome.REFUSED}
        bench.node.sweep(apply=True)
    assert Presence.PRESENT not in bench.presence(chain)
    assert bench.node.delete(bench.space, [chain.names[0].key]) == 0
    with pytest.raises(VolumeError, match="catalog"):
        bench.node.register_space(a_space(model="another"))
    assert bench.node.stats()["blocks"] == 0
