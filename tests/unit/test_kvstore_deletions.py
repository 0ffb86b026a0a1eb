"""Deletions on a sick disk: what was acknowledged holds, also when the index is lost and segments tell everything."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.daemon.fsck import check
from kvstore.daemon.node import Node
from kvstore.errors import VolumeError
from kvstore.keys import BlockName, SpaceId
from kvstore.store import GetStatus, Pin, Presence, PutOutcome
from kvstore.testing import DAY_S, ManualClock
from kvstore.traffic import AGENT
from tests.support.faults import FaultyFiles
from tests.support.nodes import open_node, puts_of, read
from tests.support.spaces import a_chain, a_space

SIZE = 60_000


class Bench:
    """A node on files that fail on demand, and four blocks in its first segment."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.volume = path / "volume-0"
        self.clock = ManualClock()
        self.files = FaultyFiles()
        self.node = open_node(path, self.clock, files=self.files)
        self.space: SpaceId = self.node.register_space(a_space())
        self.names: list[BlockName] = list(a_chain(self.space, 4, seed=1).names)
        self.put(self.names)

    @property
    def first_segment(self) -> Path:
        return self.volume / "segments" / "00000001.seg"

    def put(self, names: list[BlockName]) -> list[PutOutcome]:
        return self.node.put(self.space, puts_of(names, SIZE), traffic_class=AGENT, ack="disk")

    def delete(self) -> int:
        return self.node.delete(self.space, [name.key for name in self.names])

    def quarantine_with_a_sick_disk(self) -> None:
        """Nothing can be read, so every block is suspected; nothing can be written, so no suspicion either."""
        self.files.errors = {"preadv": errno.EIO, "pwritev": errno.EIO}
        assert {self.read(name) for name in self.names} == {GetStatus.MISS}
        self.files.errors.clear()

    def read(self, name: BlockName) -> GetStatus:
        return read(self.node, self.space, name, SIZE)[0]

    def reopen(self, *, lose_index: bool = False) -> Node:
        self.node.abandon()
        if lose_index:
            shutil.rmtree(self.volume / "index")
        self.node = open_node(self.path, self.clock, files=self.files)
        return self.node

    def assert_gone_for_good(self) -> None:
        """Not even a start without the index finds the blocks, and the files are in order."""
        self.reopen(lose_index=True)
        assert Presence.PRESENT not in self.node.lookup(self.space, self.names).presence.tolist()
        assert {self.read(name) for name in self.names} == {GetStatus.MISS}
        self.node.close()
        assert check(self.volume).clean


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    yield made
    made.files.errors.clear()
    made.node.close()


def test_a_deletion_whose_marks_were_not_written_is_done_by_the_next(bench: Bench) -> None:
    """It is not acknowledged, nobody is served the blocks, and the one that is acknowledged finds them all."""
    bench.files.errors["pwritev"] = errno.EIO
    with pytest.raises(VolumeError):
        bench.delete()
    assert {bench.read(name) for name in bench.names} == {GetStatus.MISS}
    with pytest.raises(VolumeError):
        bench.delete()
    bench.files.errors.clear()
    assert bench.delete() == 4
    bench.assert_gone_for_good()


def test_a_deletion_whose_marks_were_lost_with_the_power_is_done_by_the_next(bench: Bench) -> None:
    """The flush fails, the power goes, and takes the marks back: the index must not have forgotten the blocks."""
    before = bench.first_segment.read_bytes()
    bench.files.errors["fdatasync"] = errno.EIO
    with pytest.raises(VolumeError):
        bench.delete()
    bench.node.abandon()
    bench.first_segment.write_bytes(before)
    bench.files.errors.clear()
    bench.reopen()
    assert bench.delete() == 4
    bench.assert_gone_for_good()


def test_a_failed_flush_is_not_taken_for_done_by_the_next_deletion(bench: Bench) -> None:
    """A disk that takes no flush takes no deletion, however often it is asked."""
    bench.files.errors["fdatasync"] = errno.EIO
    for _ in range(3):
        with pytest.raises(VolumeError):
            bench.delete()
    bench.files.errors.clear()
    assert bench.delete() == 4
    bench.assert_gone_for_good()


def test_a_quarantine_that_the_disk_did_not_take_is_found_by_a_deletion(bench: Bench) -> None:
    """A read error was a passing one: the record is whole, unmarked, and must not come back once it was deleted."""
    bench.quarantine_with_a_sick_disk()
    assert {bench.read(name) for name in bench.names} == {GetStatus.MISS}
    bench.files.errors["pwritev"] = errno.EIO
    with pytest.raises(VolumeError):
        bench.delete()
    bench.files.errors.clear()
    assert bench.delete() == 4
    bench.assert_gone_for_good()


def test_a_block_under_a_quarantine_that_the_disk_did_not_take_is_not_written_beside_it(bench: Bench) -> None:
    """Else there are two living records of it, and a deletion finds one. Once the disk takes marks, it is stored."""
    bench.quarantine_with_a_sick_disk()
    bench.files.errors["pwritev"] = errno.EIO
    bench.files.only = bench.first_segment.name
    assert set(bench.put(bench.names)) == {PutOutcome.REFUSED}
    bench.files.errors.clear()
    assert set(bench.put(bench.names)) == {PutOutcome.STORED}
    assert {bench.read(name) for name in bench.names} == {GetStatus.OK}
    assert bench.delete() == 4
    bench.assert_gone_for_good()


def test_a_quarantine_is_on_disk_before_the_index_forgets(bench: Bench) -> None:
    """The power goes right after it, and takes back what was not flushed."""
    flushed = bench.files.calls.get("fdatasync", 0)
    bench.files.errors = {"preadv": errno.EIO}
    bench.read(bench.names[0])
    bench.files.errors.clear()
    assert bench.files.calls["fdatasync"] > flushed
    assert bench.node.lookup(bench.space, bench.names).presence.tolist() == [
        Presence.QUARANTINED,
        *[Presence.PRESENT] * 3,
    ]


def test_a_sweep_whose_marks_were_not_written_is_made_up_for_by_the_next(bench: Bench) -> None:
    """The expired blocks stay in the books until their marks are on disk; so a deletion in between finds them."""
    bench.node.touch(bench.space, bench.names[3:], traffic_class=AGENT)
    bench.node.pin([Pin(bench.space, bench.names[3].key, "test", "")])
    bench.clock.advance(400 * DAY_S)
    bench.files.errors = {"pwritev": errno.EIO}
    bench.node.sweep(apply=True)
    assert bench.node.stats()["blocks_expired_unswept"] == 3
    bench.files.errors.clear()
    assert bench.node.sweep(apply=True).blocks == 3
    bench.node.unpin(bench.space, [bench.names[3].key])
    assert bench.delete() == 1
    bench.assert_gone_for_good()


@pytest.mark.parametrize("fault", ["pwritev", "fdatasync"])
def test_a_move_that_failed_leaves_no_copy_that_a_deletion_does_not_find(bench: Bench, fault: str) -> None:
    """Pinned blocks are to be carried out of a victim: first its marks fail, or the flush of the copies."""
    bench.node.pin([Pin(bench.space, name.key, "test", "") for name in bench.names])
    shard = bench.node._shards[0]
    segment = shard._ledger.segments.segments[1]
    shard._ledger.segments.retire(segment)
    bench.files.errors[fault] = errno.EIO
    bench.files.only = bench.first_segment.name if fault == "pwritev" else None
    with shard._turns.alone():
        slots = shard._reclaimer._alive_in(segment, int(bench.clock.now_s()))
        assert shard._reclaimer._move(segment, slots, int(bench.clock.now_s())) is None
    bench.files.errors.clear()
    assert {bench.read(name) for name in bench.names} == {GetStatus.OK}
    bench.node.unpin(bench.space, [name.key for name in bench.names])
    assert bench.delete() == 4
    bench.assert_gone_for_good()


def test_a_damaged_record_that_a_start_cannot_mark_is_found_by_a_deletion(bench: Bench) -> None:
    """The damage was one of reading, and passes; the disk took no mark meanwhile."""
    whole = bench.first_segment.read_bytes()
    bench.node.abandon()
    shutil.rmtree(bench.volume / "index")
    damaged = bytearray(whole)
    damaged[4096 + 256 + SIZE // 2] ^= 1
    bench.first_segment.write_bytes(damaged)
    bench.files.errors = {"pwritev": errno.EIO}
    bench.files.only = bench.first_segment.name
    bench.node = open_node(bench.path, bench.clock, files=bench.files)
    assert [bench.read(name) for name in bench.names] == [GetStatus.CORRUPT, *[GetStatus.OK] * 3]
    bench.first_segment.write_bytes(whole)
    bench.files.errors.clear()
    assert bench.delete() == 4
    bench.assert_gone_for_good()


def test_records_that_could_not_be_read_when_the_index_was_made_anew_are_found_by_a_deletion(bench: Bench) -> None:
    """Their rows cannot be written, nor their marks; the disk is well again afterwards."""
    shard = bench.node._shards[0]
    shard._ledger.index.refusing = True
    bench.files.errors = {"preadv": errno.EIO, "pwritev": errno.EIO}
    bench.node.touch(bench.space, bench.names, traffic_class=AGENT)
    assert not shard._ledger.index.refusing
    bench.files.errors.clear()
    assert {bench.read(name) for name in bench.names} == {GetStatus.MISS}
    bench.reopen()
    assert {bench.read(name) for name in bench.names} == {GetStatus.OK}
    assert bench.delete() == 4
    bench.assert_gone_for_good()
