"""Puts under way beside each other in one segment: each counts, or is put again, whatever becomes of the other."""

from __future__ import annotations

import errno
import shutil
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvstore.daemon.columns import incoming
from kvstore.daemon.node import Node
from kvstore.daemon.writer import PutUnderWay, Writer
from kvstore.keys import BlockName, SpaceId
from kvstore.limits import MIB
from kvstore.store import BlockPut, GetStatus, PutOutcome
from kvstore.testing import ManualClock
from kvstore.traffic import AGENT
from tests.support.faults import FaultyFiles
from tests.support.nodes import open_node, puts_of, read
from tests.support.spaces import a_chain, a_space
from tests.support.waiting import WAIT_S

SIZE = 5000
STORED = PutOutcome.STORED


class Pair:
    """A node with a block in it, and two puts of others that can be under way at once."""

    def __init__(self, path: Path, files: FaultyFiles | None = None, **config: int) -> None:
        self.path, self.clock = path, ManualClock()
        self.node = open_node(path, self.clock, files=files, **config)
        self.space = self.node.register_space(a_space())
        puts = puts_of(list(a_chain(self.space, 9).names), SIZE)
        self.before, self.first, self.second = puts[:1], puts[1:5], puts[5:]
        assert self.node.put(self.space, self.before, traffic_class=AGENT) == [STORED]

    @property
    def writer(self) -> Writer:
        return self.node._shards[0].puts._writer._writer

    def begin(self, puts: Sequence[BlockPut], checksums: Sequence[int] | None = None) -> PutUnderWay | None:
        batch = incoming(puts, "none", checksums)
        return self.writer.begin(self.space, batch, AGENT, int(self.clock.now_s()), for_disk=False, alone=False)

    def under_way(self, puts: Sequence[BlockPut], checksums: Sequence[int] | None = None) -> PutUnderWay:
        begun = self.begin(puts, checksums)
        assert begun is not None
        return begun

    def statuses(self, puts: Sequence[BlockPut]) -> set[GetStatus]:
        found = [(read(self.node, self.space, put.name, SIZE), put.payload) for put in puts]
        assert all(status is not GetStatus.OK or data == payload for (status, data), payload in found)
        return {status for (status, _), _ in found}

    def reopen(self) -> None:
        self.node.close()
        self.node = open_node(self.path, self.clock)


def written(*puts: PutUnderWay) -> None:
    for put in puts:
        put.write()


def test_both_count_one_after_the_other(tmp_path: Path) -> None:
    """Neither is found before it ended; then its bytes are, also after a restart, and the records lie together."""
    pair = Pair(tmp_path)
    first, second = pair.under_way(pair.first), pair.under_way(pair.second)
    written(first, second)
    assert pair.statuses(pair.first + pair.second) == {GetStatus.MISS}
    assert pair.writer.end(first) == [STORED] * 4
    assert pair.statuses(pair.first) == {GetStatus.OK}
    assert pair.statuses(pair.second) == {GetStatus.MISS}
    assert pair.writer.end(second) == [STORED] * 4
    assert first.begin + first.batch.total_bytes == second.begin == first.segment.end - second.batch.total_bytes
    assert first.segment.promised_bytes == 0
    assert first.segment.tail == first.segment.end
    everything = pair.before + pair.first + pair.second
    assert pair.statuses(everything) == {GetStatus.OK}
    pair.reopen()
    assert pair.statuses(everything) == {GetStatus.OK}
    pair.node.close()


@pytest.mark.parametrize("count", [1, 4])
def test_who_waits_for_its_turn_is_younger_than_what_went_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """A purge, say: what is written after it must not look as if the purge should have taken it."""
    pair = Pair(tmp_path)
    turns, puts, at_the_door = pair.node._shards[0]._turns, pair.first[:count], threading.Event()
    enter = turns._enter

    def told(timeout_s: float) -> None:
        at_the_door.set()
        enter(timeout_s)

    with ThreadPoolExecutor(1) as pool:
        with turns.alone():
            monkeypatch.setattr(turns, "_enter", told)
            putting = pool.submit(pair.node.put, pair.space, puts, traffic_class=AGENT)
            assert at_the_door.wait(WAIT_S)
            pair.clock.advance(10)
        assert putting.result(WAIT_S) == [STORED] * count
    keys = {put.name.key for put in puts}
    assert {info.written_s for info in pair.node.scan()[0] if info.key in keys} == {int(pair.clock.now_s())}
    pair.node.close()


def test_a_key_is_under_way_once(tmp_path: Path) -> None:
    """A put that shares a key with one under way, or with what is stored, or names one twice, is left to ``put``."""
    pair = Pair(tmp_path)
    first = pair.under_way(pair.first)
    assert pair.begin(pair.first[3:] + pair.second) is None
    assert pair.begin(pair.before + pair.second) is None
    assert pair.begin(pair.second + pair.second[:1]) is None
    written(first)
    assert pair.writer.end(first) == [STORED] * 4
    assert pair.begin(pair.second) is not None
    pair.node.close()


def test_room_is_promised_once(tmp_path: Path) -> None:
    """What is under way leaves the next one only what it does not need."""
    pair = Pair(tmp_path)
    first = pair.under_way(pair.first)
    segment = first.segment
    room_bytes = segment.room_bytes
    one_bytes = int(first.batch.record_bytes[0])
    segment.promised_bytes += room_bytes - 2 * one_bytes
    second = pair.under_way(pair.second)
    assert len(second.batch.blocks) == 2
    assert segment.room_bytes == 0
    assert pair.begin(pair.second[2:]) is None
    pair.node.close()


def test_a_full_segment_keeps_nobody_waiting(tmp_path: Path) -> None:
    """What finds no room beside a put goes into another segment, and the full one is not sealed before that put ended;
    a kill in between leaves whole blocks.
    """
    pair = Pair(tmp_path / "volume")
    first = pair.under_way(pair.first)
    assert first.segment.room_bytes > 0
    first.segment.promised_bytes += first.segment.room_bytes
    assert pair.begin(pair.second) is None  # its seal would not wait
    pair.node._shards[0].seal_in_background()
    second = pair.under_way(pair.second)
    assert second.segment is not first.segment
    written(first, second)
    assert not first.segment.sealed
    found = open_node(copy_of(pair, tmp_path / "killed"), pair.clock)
    for put in pair.first + pair.second:
        status, data = read(found, pair.space, put.name, SIZE)
        assert status is GetStatus.MISS or data == put.payload
    found.close()
    assert pair.writer.end(first) == [STORED] * 4
    assert pair.writer.end(second) == [STORED] * 4
    for _ in range(2):
        assert pair.statuses(pair.before + pair.first + pair.second) == {GetStatus.OK}
        pair.reopen()
    pair.node.close()


def test_a_failed_write_in_a_full_segment_takes_back_what_is_behind_it_there(tmp_path: Path) -> None:
    """It is sealed in front of them, whoever makes room meanwhile; what went into another segment counts."""
    files = FaultyFiles()
    pair = Pair(tmp_path, files)
    pair.node._shards[0].seal_in_background()
    first, second = pair.under_way(pair.first[:2]), pair.under_way(pair.first[2:])
    first.segment.promised_bytes += first.segment.room_bytes
    first.write()
    files.errors["pwritev"] = errno.EIO
    second.write()
    files.errors.clear()
    third = pair.under_way(pair.second)
    third.write()
    assert third.segment is not first.segment
    assert not first.segment.sealed
    assert pair.writer.end(first) is None
    assert pair.writer.end(second) is None
    assert pair.writer.end(third) == [STORED] * 4
    for _ in range(2):
        assert pair.statuses(pair.first) == {GetStatus.MISS}
        assert pair.statuses(pair.before + pair.second) == {GetStatus.OK}
        pair.reopen()
    pair.node.close()


def test_what_is_under_way_is_never_made_room_of(tmp_path: Path) -> None:
    """A full volume is recycled beside a put, and more than once over, but for the segment into which that goes."""
    pair = Pair(tmp_path, capacity_bytes=8 * MIB)
    pair.node._shards[0].seal_in_background()
    first = pair.under_way(pair.first)
    generation = first.segment.header.generation
    first.segment.promised_bytes += first.segment.room_bytes
    room_bytes = first.segment.promised_bytes - first.batch.total_bytes
    names = a_chain(pair.space, 400, seed=1).names
    for at in range(0, 400, 4):
        puts = puts_of(list(names[at : at + 4]), 50_000)
        done = 0
        while done < 4:
            rest = puts[done:]
            outcomes = None
            if len(rest) > 1:
                other = pair.under_way(rest)
                other.write()
                outcomes = pair.writer.end(other)
            assert outcomes is None or set(outcomes) == {STORED}
            done += len(outcomes or rest)
    assert pair.node.stats()["segments_recycled"] > len(pair.node._shards[0]._ledger.segments.segments)
    assert first.segment.header.generation == generation
    first.write()
    first.segment.promised_bytes -= room_bytes
    assert pair.writer.end(first) == [STORED] * 4
    for _ in range(2):
        assert pair.statuses(pair.first) == {GetStatus.OK}
        pair.reopen()
    pair.node.close()


def test_room_is_the_same_however_far_a_put_has_written(tmp_path: Path) -> None:
    """Others may look at it at any moment of a write: what is taken is taken once, from the promise to the last."""
    pair = Pair(tmp_path)
    first = pair.under_way(pair.first)
    room_bytes = first.segment.room_bytes
    first.write()
    assert first.segment.room_bytes == room_bytes
    assert pair.writer.end(first) == [STORED] * 4
    assert first.segment.room_bytes == room_bytes
    pair.node.close()


def test_a_put_behind_one_that_was_not_written_is_put_again(tmp_path: Path) -> None:
    """A write that fails takes back what is behind it; the disk well again, both find their place."""
    files = FaultyFiles()
    pair = Pair(tmp_path, files)
    first, second = pair.under_way(pair.first), pair.under_way(pair.second)
    files.errors["pwritev"] = errno.EIO
    first.write()
    files.errors.clear()
    written(second)
    assert pair.writer.end(first) is None
    assert pair.writer.end(second) is None
    assert first.segment.sealed
    assert first.segment.promised_bytes == 0
    assert pair.statuses(pair.first + pair.second) == {GetStatus.MISS}
    for puts in (pair.first, pair.second):
        assert pair.node.put(pair.space, puts, traffic_class=AGENT) == [STORED] * 4
    everything = pair.before + pair.first + pair.second
    assert pair.statuses(everything) == {GetStatus.OK}
    pair.reopen()
    assert pair.statuses(everything) == {GetStatus.OK}
    pair.node.close()


def test_one_that_was_never_checked_takes_those_behind_it_along(tmp_path: Path) -> None:
    """Something else went wrong with the first: nothing of either is found, and nothing is in the way of either."""
    pair = Pair(tmp_path)
    first, second = pair.under_way(pair.first), pair.under_way(pair.second)
    written(first, second)
    first.intact = None
    assert pair.writer.end(first) is None
    assert pair.writer.end(second) is None
    pair.reopen()
    assert pair.statuses(pair.first + pair.second) == {GetStatus.MISS}
    for puts in (pair.first, pair.second):
        assert pair.node.put(pair.space, puts, traffic_class=AGENT) == [STORED] * 4
    assert pair.statuses(pair.before + pair.first + pair.second) == {GetStatus.OK}
    pair.node.close()


def test_bytes_that_changed_are_found(tmp_path: Path) -> None:
    """A block that is not what was submitted is ALTERED and dead; those beside it count."""
    pair = Pair(tmp_path)
    good = incoming(pair.first, "none", None).rows["checksum"].tolist()
    first, second = pair.under_way(pair.first, [good[0], 1, *good[2:]]), pair.under_way(pair.second)
    written(first, second)
    assert pair.writer.end(first) == [STORED, PutOutcome.ALTERED, STORED, STORED]
    assert pair.writer.end(second) == [STORED] * 4
    for _ in range(2):
        assert pair.statuses(pair.first[1:2]) == {GetStatus.MISS}
        assert pair.statuses(pair.first[:1] + pair.first[2:] + pair.second) == {GetStatus.OK}
        pair.reopen()
    pair.node.close()


@pytest.mark.parametrize("mark_fails", [False, True])
def test_an_index_that_refuses_leaves_nothing_of_either(tmp_path: Path, mark_fails: bool) -> None:
    """What the index refused is put again; where even its marks fail, so is what was written behind it."""
    files = FaultyFiles()
    pair = Pair(tmp_path, files)
    first, second = pair.under_way(pair.first), pair.under_way(pair.second)
    written(first, second)
    pair.node._shards[0]._ledger.index.refusing = True
    if mark_fails:
        files.errors["pwritev"] = errno.EIO
    assert pair.writer.end(first) is None
    files.errors.clear()
    assert pair.writer.end(second) is None
    assert pair.statuses(pair.first + pair.second) == {GetStatus.MISS}
    for puts in (pair.first, pair.second):
        assert pair.node.put(pair.space, puts, traffic_class=AGENT) == [STORED] * 4
    pair.reopen()
    assert pair.statuses(pair.before + pair.first + pair.second) == {GetStatus.OK}
    pair.node.close()


@pytest.mark.parametrize("ended", [0, 1])
def test_a_kill_leaves_whole_blocks_or_none(tmp_path: Path, ended: int) -> None:
    """What was written but had not ended may be found by the next start, in order and byte for byte; what ended is."""
    pair = Pair(tmp_path)
    puts = [pair.under_way(pair.first), pair.under_way(pair.second)]
    written(*puts)
    for put in puts[:ended]:
        assert pair.writer.end(put) == [STORED] * 4
    image = copy_of(pair, tmp_path / "killed")
    pair.node.close()
    found = open_node(image, pair.clock)
    acknowledged = pair.before + (pair.first if ended else [])
    for put in acknowledged:
        assert read(found, pair.space, put.name, SIZE) == (GetStatus.OK, put.payload)
    for put in pair.first + pair.second:
        status, data = read(found, pair.space, put.name, SIZE)
        assert status is GetStatus.MISS or data == put.payload
    assert found.stats()["recovered_damaged"] == 0
    found.close()


def copy_of(pair: Pair, path: Path) -> Path:
    """The files as a kill leaves them."""
    shutil.copytree(pair.path, path)
    return path


def test_puts_side_by_side_all_count(tmp_path: Path) -> None:
    """Threads that put new blocks at once, through several segments, find all of them again that fit."""
    clock = ManualClock()
    node: Node = open_node(tmp_path, clock, capacity_bytes=64 * MIB)
    space: SpaceId = node.register_space(a_space())
    names: list[list[BlockName]] = [list(a_chain(space, 96, seed=seed).names) for seed in range(3)]
    outcomes: dict[int, list[PutOutcome]] = {}

    def put(number: int) -> None:
        done: list[PutOutcome] = []
        for at in range(0, 96, 8):
            batch = puts_of(names[number][at : at + 8], 100_000)
            done += node.put(space, batch, traffic_class=AGENT)
        outcomes[number] = done

    threads = [threading.Thread(target=put, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    assert [set(outcomes[number]) for number in range(3)] == [{STORED}] * 3
    for name in (name for chain in names for name in chain):
        (put_of_name,) = puts_of([name], 100_000)
        assert read(node, space, name, 100_000) == (GetStatus.OK, put_of_name.payload)
    node.close()
