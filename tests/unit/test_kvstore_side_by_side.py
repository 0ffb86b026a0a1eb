"""A put that stands in the middle of its write, and everything that others may ask of its shard meanwhile."""

from __future__ import annotations

import errno
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest

from kvstore.daemon.fsck import check
from kvstore.daemon.segment import Segment
from kvstore.errors import DeadlineExceeded, Unavailable
from kvstore.limits import MIB
from kvstore.purges import PurgeOrder
from kvstore.store import FLAG_APPROXIMATE, AckLevel, BlockPut, GetStatus, Pin, Presence, PutOutcome
from kvstore.testing import DAY_S, TEST_RULES, ManualClock
from kvstore.traffic import AGENT, CHAT, ClassRules
from tests.support.faults import Gate, GatedFiles
from tests.support.nodes import open_node, puts_of, read
from tests.support.spaces import a_chain, a_space
from tests.support.waiting import WAIT_S, wait

SIZE = 5000
STORED = PutOutcome.STORED
T = TypeVar("T")


class Rig:
    """A node whose writes can be held, with a block in it, and puts of four new blocks each."""

    def __init__(self, path: Path) -> None:
        self.path, self.clock, self.files = path, ManualClock(), GatedFiles()
        self.node = open_node(path, self.clock, files=self.files)
        self.space = self.node.register_space(a_space())
        puts = puts_of(list(a_chain(self.space, 17).names), SIZE)
        self.before, self.first, self.second, self.third = puts[:1], puts[1:5], puts[5:9], puts[9:13]
        self._threads = ThreadPoolExecutor(8)
        assert self.node.put(self.space, self.before, traffic_class=AGENT) == [STORED]

    def begin(self, call: Callable[[], T]) -> Future[T]:
        """In another thread."""
        return self._threads.submit(call)

    def put(self, puts: Sequence[BlockPut], ack: AckLevel = "os", deadline_s: float = WAIT_S) -> list[PutOutcome]:
        return self.node.put(self.space, puts, traffic_class=AGENT, ack=ack, deadline_s=deadline_s)

    def begin_put(self, puts: Sequence[BlockPut], ack: AckLevel = "os") -> Future[list[PutOutcome]]:
        return self.begin(lambda: self.put(puts, ack))

    def held(
        self, puts: Sequence[BlockPut], error: int = 0, ack: AckLevel = "os"
    ) -> tuple[Gate, Future[list[PutOutcome]]]:
        """A put that stands in the middle of its write."""
        gate = self.files.hold(puts[0].name.key, error)
        doing = self.begin_put(puts, ack)
        gate.wait()
        return gate, doing

    def in_line(self, count: int) -> None:
        """Wait until so many puts are under way."""
        wait(lambda: len(self.node._shards[0]._turns._line) == count, "put under way")

    def waiting_alone(self, count: int = 1) -> None:
        """Wait until so many wait for what is under way."""
        wait(lambda: self.node._shards[0]._turns._waiting_alone == count, "waiter")

    def statuses(self, puts: Sequence[BlockPut]) -> set[GetStatus]:
        """Of blocks whose bytes are right wherever they are there."""
        found = [(read(self.node, self.space, put.name, SIZE), put.payload) for put in puts]
        assert all(status is not GetStatus.OK or data == payload for (status, data), payload in found)
        return {status for (status, _), _ in found}

    def reopen(self, *, lose_index: bool = True) -> None:
        """As after a kill, with nothing but the segments unless the index is kept."""
        self.node.abandon()
        if lose_index:
            shutil.rmtree(self.path / "volume-0" / "index")
        self.node = open_node(self.path, self.clock)

    def has_all(self, *batches: Sequence[BlockPut]) -> None:
        """Now, and after each kind of restart."""
        everything = [*self.before, *(put for puts in batches for put in puts)]
        assert self.statuses(everything) == {GetStatus.OK}
        for lose_index in (False, True):
            self.reopen(lose_index=lose_index)
            assert self.statuses(everything) == {GetStatus.OK}

    def close(self) -> None:
        self._threads.shutdown()
        self.node.close()
        report = check(self.path / "volume-0")
        assert report.clean, report.to_text()


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path)
    yield rig
    rig.close()


# --- puts beside puts -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ack", ["os", "disk"])
@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO])
def test_a_write_that_fails_half_way_costs_those_behind_it_nothing(rig: Rig, error: int, ack: AckLevel) -> None:
    """All of the line finds another segment: what is acknowledged is found by a start that has only the segments."""
    gate, first = rig.held(rig.first, error, ack)
    others = [rig.begin_put(rig.second, ack)]
    rig.in_line(2)
    others.append(rig.begin_put(rig.third, ack))
    rig.in_line(3)
    gate.open()
    assert [each.result(WAIT_S) for each in (first, *others)] == [[STORED] * 4] * 3
    rig.has_all(rig.first, rig.second, rig.third)


def test_a_disk_that_stays_full_refuses_the_whole_line_and_keeps_what_was_there(rig: Rig) -> None:
    """Nothing of it is found later either, and everything of it finds room once there is some."""
    gate, first = rig.held(rig.first, errno.ENOSPC)
    second = rig.begin_put(rig.second)
    rig.in_line(2)
    rig.files.errors["pwritev"] = errno.ENOSPC
    gate.open()
    assert first.result(WAIT_S) == second.result(WAIT_S) == [PutOutcome.REFUSED] * 4
    rig.files.errors.clear()
    assert rig.statuses(rig.first + rig.second) == {GetStatus.MISS}
    rig.node.sweep(apply=True)
    assert rig.put(rig.first) == rig.put(rig.second) == [STORED] * 4
    rig.has_all(rig.first, rig.second)


@pytest.mark.parametrize("error", [0, errno.EIO])
def test_one_key_from_two_clients_is_stored_once(rig: Rig, error: int) -> None:
    """The second is answered no earlier than the bytes are there, whatever becomes of the first's first attempt."""
    gate, first = rig.held(rig.first, error)
    second = rig.begin_put(rig.first[2:] + rig.second)
    rig.waiting_alone()
    assert not second.done()
    gate.open()
    outcomes = first.result(WAIT_S) + second.result(WAIT_S)
    assert sorted(outcomes) == [STORED] * 8 + [PutOutcome.TOUCHED] * 2
    rig.has_all(rig.first, rig.second)


def test_a_touch_of_what_is_not_on_disk_yet_waits_for_the_disk(rig: Rig) -> None:
    """A key that another client put is acknowledged at level ``disk`` only once its bytes are there: a flush that began
    before them is none of theirs.
    """
    gate = rig.files.hold_flush()
    before = rig.begin_put(rig.second, "disk")
    gate.wait()
    assert rig.put(rig.first) == [STORED] * 4
    touch = rig.begin_put(rig.first, "disk")
    flushes = rig.files.calls.get("fdatasync", 0)
    gate.open()
    assert touch.result(WAIT_S) == [PutOutcome.TOUCHED] * 4
    assert before.result(WAIT_S) == [STORED] * 4
    assert rig.files.calls["fdatasync"] == flushes + 2


def test_a_disk_that_refuses_to_flush_acknowledges_neither(rig: Rig) -> None:
    """Neither who stored a block nor who touched it meanwhile: both are told, and nobody is served it."""
    gate, first = rig.held(rig.first, ack="disk")
    second = rig.begin_put(rig.first, "disk")
    rig.waiting_alone()
    rig.files.errors["fdatasync"] = errno.EIO
    gate.open()
    assert first.result(WAIT_S) == [PutOutcome.REFUSED] * 4
    assert second.result(WAIT_S) == [PutOutcome.REFUSED] * 4
    rig.files.errors.clear()
    assert rig.statuses(rig.first) == {GetStatus.MISS}
    rig.node.sweep(apply=True)
    assert rig.put(rig.first, "disk") == [STORED] * 4
    assert rig.statuses(rig.first) == {GetStatus.OK}


def test_levels_do_not_wait_for_each_other(rig: Rig) -> None:
    """What is to be on disk is acknowledged while the put behind it still writes."""
    gate, first = rig.held(rig.first, ack="disk")
    behind = rig.files.hold(rig.second[0].name.key)
    second = rig.begin_put(rig.second)
    rig.in_line(2)
    gate.open()
    assert first.result(WAIT_S) == [STORED] * 4
    behind.wait()
    assert not second.done()
    behind.open()
    assert second.result(WAIT_S) == [STORED] * 4
    rig.has_all(rig.first, rig.second)


def test_an_exact_block_replaces_the_approximate_one_that_is_under_way(rig: Rig) -> None:
    """And an approximate one behind an exact one is a touch."""
    rough = [replace(put, payload=put.payload[::-1], flags=FLAG_APPROXIMATE) for put in rig.first]
    gate, first = rig.held(rough)
    second = rig.begin_put(rig.first)
    rig.waiting_alone()
    third = rig.begin_put(rough)
    rig.waiting_alone(2)
    gate.open()
    assert first.result(WAIT_S) == [STORED] * 4
    found = {tuple(each.result(WAIT_S)) for each in (second, third)}
    assert found == {(PutOutcome.REPLACED,) * 4, (PutOutcome.TOUCHED,) * 4}
    rig.has_all(rig.first)


def test_bytes_that_change_while_a_put_waits_are_found(rig: Rig) -> None:
    """The memory is a client's, and that dies or goes on in the middle of its put: its block is refused, those behind
    it are not.
    """
    buffers = [bytearray(put.payload) for put in rig.second]
    shared = [replace(put, payload=memoryview(data)) for put, data in zip(rig.second, buffers, strict=True)]
    gate, first = rig.held(rig.first)
    second = rig.begin_put(shared)
    rig.in_line(2)
    third = rig.begin_put(rig.third)
    rig.in_line(3)
    buffers[1][17] ^= 1
    gate.open()
    assert first.result(WAIT_S) == third.result(WAIT_S) == [STORED] * 4
    assert second.result(WAIT_S) == [STORED, PutOutcome.ALTERED, STORED, STORED]
    assert rig.statuses(rig.second[1:2]) == {GetStatus.MISS}
    assert rig.put(rig.second[1:2]) == [STORED]
    rig.has_all(rig.first, rig.second, rig.third)


def test_a_deadline_that_passes_in_the_queue_leaves_nothing(rig: Rig) -> None:
    """One that has to wait until nothing is under way gives up, and nothing of it is ever found; one that is in line
    already is answered when its turn has come.
    """
    gate, first = rig.held(rig.first)
    for puts in (rig.first[:2] + rig.third[:2], rig.third[:1]):
        with pytest.raises(DeadlineExceeded):
            rig.put(puts, deadline_s=0.02)
    second = rig.begin(lambda: rig.put(rig.second, deadline_s=2.0))
    rig.in_line(2)
    time.sleep(2.0)
    gate.open()
    assert first.result(WAIT_S) == second.result(WAIT_S) == [STORED] * 4
    assert rig.statuses(rig.third) == {GetStatus.MISS}
    rig.has_all(rig.first, rig.second)
    assert rig.statuses(rig.third) == {GetStatus.MISS}


@pytest.mark.parametrize("count", [1, 4])
def test_a_segment_whose_flush_fails_when_it_is_chosen_costs_another_look(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """A flush needs no lock: a segment that had room a moment ago has none, and the put finds another."""
    reclaimer = rig.node._shards[0]._reclaimer
    failing = ["segment_at_hand", "segment_for"]

    def failing_once(name: str, choose: Callable[..., Segment | None]) -> Callable[..., Segment | None]:
        def chosen(*given: Any, **named: Any) -> Segment | None:
            segment = choose(*given, **named)
            if segment is not None and name in failing:
                failing.remove(name)
                rig.files.errors["fdatasync"] = errno.EIO
                with pytest.raises(OSError, match="Input/output"):
                    segment.sync()
                rig.files.errors.clear()
            return segment

        return chosen

    for name in tuple(failing):
        monkeypatch.setattr(reclaimer, name, failing_once(name, getattr(reclaimer, name)))
    assert rig.put(rig.first[:count]) == [STORED] * count
    assert len(failing) < 2
    assert rig.statuses(rig.before + rig.first[:count]) == {GetStatus.OK}


# --- other verbs beside a put -----------------------------------------------------------------------------------------


def test_what_is_under_way_is_a_miss_and_delays_no_question(rig: Rig) -> None:
    """Gets, look-ups, scans and figures are answered meanwhile, and know of whole blocks only."""
    gate, first = rig.held(rig.first)
    names = [put.name for put in rig.before + rig.first]
    assert list(rig.node.lookup(rig.space, names).presence) == [Presence.PRESENT, *[Presence.NEVER] * 4]
    assert rig.statuses(rig.first) == {GetStatus.MISS}
    assert rig.statuses(rig.before) == {GetStatus.OK}
    assert [info.key for info in rig.node.scan()[0]] == [put.name.key for put in rig.before]
    assert rig.node.touch(rig.space, names, traffic_class=AGENT) == 1
    assert rig.node.stats()["blocks"] == 1
    assert not first.done()
    gate.open()
    assert first.result(WAIT_S) == [STORED] * 4
    rig.has_all(rig.first)


@pytest.mark.parametrize("whole", [False, True])
def test_a_deletion_takes_what_is_under_way_before_it(rig: Rig, whole: bool) -> None:
    """It is acknowledged when that has gone too, for good; what is put after it stays."""
    gate, first = rig.held(rig.first)
    keys = [put.name.key for put in rig.first]
    deletion = rig.begin(lambda: rig.node.delete_space(rig.space) if whole else rig.node.delete(rig.space, keys))
    rig.waiting_alone()
    later = rig.begin_put(rig.second)
    rig.waiting_alone(2)
    assert not deletion.done()
    gate.open()
    assert first.result(WAIT_S) == [STORED] * 4
    deleted, after = deletion.result(WAIT_S), later.result(WAIT_S)
    assert after == [STORED] * 4
    assert 4 <= deleted <= 4 + whole * 5
    gone = rig.first if deleted < 9 else rig.first + rig.second
    for lose_index in (False, True):
        assert rig.statuses(gone) == {GetStatus.MISS}
        rig.reopen(lose_index=lose_index)
    assert rig.statuses(gone) == {GetStatus.MISS}


def test_an_order_leaves_no_byte_of_what_was_under_way(rig: Rig) -> None:
    """Neither of a put that ended before it, nor of one behind whose write failed half way."""
    gate, first = rig.held(rig.first)
    broken = rig.files.hold(rig.second[0].name.key, errno.EIO)
    second = rig.begin_put(rig.second)
    rig.in_line(2)
    order = PurgeOrder("0" * 31 + "1", (rig.space,), None, int(rig.clock.now_s()))
    purge = rig.begin(lambda: rig.node.purge(order))
    rig.waiting_alone()
    gate.open()
    broken.open()
    assert first.result(WAIT_S) == [STORED] * 4
    assert purge.result(WAIT_S).answers[""].done
    second.result(WAIT_S)
    if rig.statuses(rig.second) == {GetStatus.OK}:  # it was put again after the order
        assert rig.node.delete_space(rig.space) == 4
        rig.node.register_space(a_space())
        assert rig.node.purge(replace(order, purge_id="0" * 31 + "2")).answers[""].done
    data = b"".join(path.read_bytes() for path in rig.path.glob("volume-0/segments/*.seg"))
    assert not any(put.payload[:64] in data for put in rig.before + rig.first + rig.second)


@pytest.mark.parametrize("days", [1, 9])
def test_a_change_of_policy_reaches_what_is_under_way(rig: Rig, days: int) -> None:
    """Its blocks are kept as the new rules say, also where they lie in a segment of the old rules' day."""
    gate, first = rig.held(rig.first)
    rules = ClassRules(tuple(replace(rule, keep_for_s=days * DAY_S) for rule in TEST_RULES.rules))
    version = rig.node.policy().version
    change = rig.begin(lambda: rig.node.set_policy(rules, "other", expected_version=version, apply=True))
    rig.waiting_alone()
    gate.open()
    assert first.result(WAIT_S) == [STORED] * 4
    assert change.result(WAIT_S).blocks == 0
    for lose_index in (False, True):
        until_s = {int(info.keep_until_s) for info in rig.node.scan()[0]}
        assert until_s == {int(rig.clock.now_s()) + days * DAY_S}
        rig.reopen(lose_index=lose_index)
    rig.clock.advance(days * DAY_S - 1)
    assert rig.statuses(rig.first) == {GetStatus.OK}
    rig.clock.advance(1)
    assert rig.statuses(rig.first) == {GetStatus.MISS}


def test_a_pin_tells_the_truth_of_what_is_under_way(rig: Rig) -> None:
    """A block is pinned if the answer says so, and only then; the put goes on either way."""
    gate, first = rig.held(rig.first)
    pins = [Pin(rig.space, put.name.key, "test", "") for put in rig.before + rig.first]
    pinning = rig.begin(lambda: rig.node.pin(pins))
    rig.waiting_alone()
    gate.open()
    assert first.result(WAIT_S) == [STORED] * 4
    pinned = pinning.result(WAIT_S)
    rig.clock.advance(30 * DAY_S)
    rig.node.sweep(apply=True)
    assert len(rig.node.scan()[0]) == pinned == len(rig.node.pins())


def test_a_sweep_takes_what_expired_and_nothing_that_is_under_way(rig: Rig) -> None:
    """It waits for the put, in whose segment the expired block lies, and frees the segment only of what is dead."""
    rig.clock.advance(3 * DAY_S - 2)
    gate, first = rig.held(rig.first)
    rig.clock.advance(3)
    sweep = rig.begin(lambda: rig.node.sweep(apply=True))
    rig.waiting_alone()
    second = rig.begin_put(rig.second)
    rig.waiting_alone(2)
    gate.open()
    assert first.result(WAIT_S) == second.result(WAIT_S) == [STORED] * 4
    assert sweep.result(WAIT_S).blocks == 1
    assert rig.statuses(rig.before) == {GetStatus.MISS}
    for lose_index in (False, True):
        assert rig.statuses(rig.first + rig.second) == {GetStatus.OK}
        rig.reopen(lose_index=lose_index)
    assert rig.statuses(rig.first + rig.second) == {GetStatus.OK}


def test_a_flush_that_fails_after_its_segment_was_freed_frees_it_no_second_time(rig: Rig) -> None:
    """Flushes need no lock: what one finds out late is of the life before, and two classes never share a segment."""
    segments = rig.node._shards[0]._ledger.segments
    (segment,) = segments.segments.values()
    assert rig.node.delete_space(rig.space) == 1
    gate = rig.files.hold_flush(errno.EIO)
    flush = rig.begin(segment.sync)
    gate.wait()
    rig.node.sweep(apply=True)
    assert segments.free == [segment.number]
    gate.open()
    with pytest.raises(OSError, match="Input/output"):
        flush.result(WAIT_S)
    rig.node.sweep(apply=True)
    assert segments.free == [segment.number]
    assert rig.put(rig.first) == rig.node.put(rig.space, rig.second, traffic_class=CHAT) == [STORED] * 4
    assert rig.statuses(rig.first + rig.second) == {GetStatus.OK}


def test_a_scrub_sees_whole_records_only(rig: Rig) -> None:
    """It goes through the segment of a put that stands in the middle of a record, and finds no damage."""
    scrubber = rig.node._shards[0].scrubber(MIB, rig.clock)
    gate, first = rig.held(rig.first)
    while scrubber.turn():
        pass
    assert scrubber.stats()["scrub_bytes"] > 0
    assert not first.done()
    gate.open()
    assert first.result(WAIT_S) == [STORED] * 4
    assert scrubber.stats()["scrub_damaged"] == rig.node.stats()["quarantined"] == 0
    scrubber.stop(save=False)
    rig.has_all(rig.first)


def test_a_close_ends_what_is_under_way_and_begins_nothing(rig: Rig) -> None:
    """What is acknowledged meanwhile is there after the next start; what comes later is told that the store closes."""
    gate, first = rig.held(rig.first)
    second = rig.begin_put(rig.second)
    rig.in_line(2)
    closing = rig.begin(rig.node.close)
    rig.waiting_alone()
    with pytest.raises(Unavailable):
        rig.put(rig.third)
    assert not closing.done()
    gate.open()
    closing.result(WAIT_S)
    assert first.result(WAIT_S) == second.result(WAIT_S) == [STORED] * 4
    rig.reopen()
    assert rig.statuses(rig.before + rig.first + rig.second) == {GetStatus.OK}
    assert rig.statuses(rig.third) == {GetStatus.MISS}


def test_a_close_whose_flush_fails_acknowledges_nothing_on_disk(rig: Rig) -> None:
    """A put that waits for the disk when the store ends is told that the disk refused, not that all is well."""
    gate = rig.files.hold_flush()
    put = rig.begin_put(rig.first, "disk")
    gate.wait()
    rig.files.errors["fdatasync"] = errno.EIO
    closing = rig.begin(rig.node.close)
    lock = rig.node._shards[0]._ledger.lock
    wait(lambda: not lock.acquire(blocking=False) or lock.release(), "close that flushes")
    gate.open()
    closing.result(WAIT_S)
    assert put.result(WAIT_S) == [PutOutcome.REFUSED] * 4
    rig.reopen()
