"""A block is acknowledged as one that is there already only if its record lives: whatever the index thinks."""

from __future__ import annotations

import errno
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

from kvstore.daemon.index import Index, IndexBatch, IndexRefused
from kvstore.daemon.ledger import Ledger
from kvstore.daemon.node import Node
from kvstore.daemon.segment import FIRST_RECORD, Segment
from kvstore.keys import BlockName, SpaceId
from kvstore.store import FLAG_APPROXIMATE, AckLevel, GetStatus, Pin, PutOutcome
from kvstore.testing import ManualClock
from kvstore.traffic import AGENT, CHAT
from tests.support.faults import FaultyFiles
from tests.support.mortal import Killed
from tests.support.nodes import open_node, payload_of, puts_of, read
from tests.support.spaces import a_chain, a_space

SIZE = 20_000
RECORD = -(-(256 + SIZE) // 4096) * 4096
COUNT = 6


class Bench:
    """A node whose blocks all lie in its first segment."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.clock = ManualClock()
        self.files = FaultyFiles()
        self.node = open_node(path, self.clock, files=self.files)
        self.space: SpaceId = self.node.register_space(a_space())
        self.names: list[BlockName] = list(a_chain(self.space, COUNT).names)
        assert self.put(self.names) == [PutOutcome.STORED] * COUNT

    @property
    def index(self) -> Path:
        return self.path / "volume-0" / "index"

    @property
    def first_segment(self) -> Path:
        return self.path / "volume-0" / "segments" / "00000001.seg"

    def put(self, names: list[BlockName], flags: int = 0, ack: AckLevel = "disk") -> list[PutOutcome]:
        return self.node.put(self.space, puts_of(names, SIZE, flags), traffic_class=AGENT, ack=ack)

    def reopen(self) -> Node:
        """As after kill -9."""
        self.node.abandon()
        self.node = open_node(self.path, self.clock, files=self.files)
        return self.node

    def assert_kept(self) -> None:
        """Now and after another kill."""
        for _ in range(2):
            for name in self.names:
                assert read(self.node, self.space, name, SIZE) == (GetStatus.OK, payload_of(name, SIZE))
            self.reopen()


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    yield made
    made.files.errors.clear()
    made.node.close()


def die(*_: object, **__: object) -> None:
    """In the place of what is not reached."""
    raise Killed


def delete_and_die(bench: Bench, patch: pytest.MonkeyPatch) -> None:
    """The marks are on disk, the index knows nothing."""
    with patch.context() as dying:
        dying.setattr(Ledger, "forget", die)
        with pytest.raises(Killed):
            bench.node.delete(bench.space, [name.key for name in bench.names[:4]])


def test_a_put_after_a_kill_between_mark_and_index_is_kept(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks that were let go of are stored anew, the others touched; all of them are there."""
    delete_and_die(bench, monkeypatch)
    bench.reopen()
    assert bench.put(bench.names) == [PutOutcome.STORED] * 4 + [PutOutcome.TOUCHED] * 2
    bench.assert_kept()


def test_a_put_of_one_block_after_such_a_kill_is_kept(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also on the way of single blocks."""
    delete_and_die(bench, monkeypatch)
    bench.reopen()
    assert [bench.put([name])[0] for name in bench.names] == [PutOutcome.STORED] * 4 + [PutOutcome.TOUCHED] * 2
    bench.assert_kept()


def test_no_pin_is_granted_on_a_record_that_died(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pin promises that the block stays: one that is marked is not there."""
    delete_and_die(bench, monkeypatch)
    bench.reopen()
    assert bench.node.pin([Pin(bench.space, name.key, "somebody", "") for name in bench.names]) == 2


def test_a_put_under_an_index_that_lost_a_removal_is_kept(bench: Bench) -> None:
    """The power took what the index was told of an acknowledged deletion."""
    shutil.copytree(bench.index, bench.path / "earlier")
    bench.node.delete(bench.space, [name.key for name in bench.names[:4]])
    bench.node.abandon()
    shutil.rmtree(bench.index)
    shutil.copytree(bench.path / "earlier", bench.index)
    bench.reopen()
    assert bench.put(bench.names) == [PutOutcome.STORED] * 4 + [PutOutcome.TOUCHED] * 2
    bench.assert_kept()


def test_a_put_after_a_removal_that_the_index_refused_is_kept(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The index took nothing any more, and the process died before it was mended."""

    def refuse(index: Index, batch: IndexBatch) -> None:
        index.refusing = True
        raise IndexRefused("no space left")

    with monkeypatch.context() as refusing:
        refusing.setattr(Index, "write", refuse)
        refusing.setattr(Ledger, "mend_index", lambda ledger: False)
        bench.node.delete(bench.space, [name.key for name in bench.names[:4]])
    bench.reopen()
    assert bench.put(bench.names) == [PutOutcome.STORED] * 4 + [PutOutcome.TOUCHED] * 2
    bench.assert_kept()


def test_a_put_of_a_block_whose_payload_the_power_took_is_kept(bench: Bench) -> None:
    """The segment had no seal, so that nobody can say what of it was flushed: its records are read whole."""
    bench.node.abandon()
    with bench.first_segment.open("r+b") as stream:
        stream.seek(FIRST_RECORD + RECORD + 8192)
        stream.write(bytes(4096))
    bench.reopen()
    assert bench.put(bench.names) == [PutOutcome.TOUCHED, PutOutcome.STORED] + [PutOutcome.TOUCHED] * 4
    bench.assert_kept()


def test_a_put_of_a_dead_record_whose_mark_the_disk_does_not_take_is_refused(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It can be neither touched nor written beside the other; once the disk is well again it is stored."""
    delete_and_die(bench, monkeypatch)
    bench.reopen()
    bench.files.errors = {"fdatasync": errno.EIO}
    assert PutOutcome.TOUCHED not in bench.put(bench.names[:4], ack="os")
    bench.files.errors.clear()
    assert set(bench.put(bench.names[:4])) == {PutOutcome.STORED}


def test_each_record_is_looked_at_once_and_none_that_this_process_wrote(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hot blocks cost no read a put."""
    looked: list[int] = []
    read_header = Segment.read_header

    def counted(segment: Segment, offset: int) -> object:
        looked.append(offset)
        return read_header(segment, offset)

    monkeypatch.setattr(Segment, "read_header", counted)
    bench.put(bench.names)
    assert not looked
    bench.reopen()
    looked.clear()
    for _ in range(3):
        assert bench.put(bench.names) == [PutOutcome.TOUCHED] * COUNT
    assert sorted(looked) == [FIRST_RECORD + RECORD * at for at in range(COUNT)]


def test_a_record_of_the_next_life_of_a_segment_is_not_looked_at(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was written by this process, where an earlier one had written another."""
    bench.reopen()
    bench.clock.advance(400 * 86_400)
    bench.node.sweep(apply=True)
    for number in range(1, 40):
        bench.put(list(a_chain(bench.space, COUNT, seed=number).names))
    looked: list[int] = []
    monkeypatch.setattr(Segment, "read_header", lambda segment, offset: looked.append(offset))
    for number in range(1, 40):
        assert set(bench.put(list(a_chain(bench.space, COUNT, seed=number).names))) == {PutOutcome.TOUCHED}
    assert not looked


@pytest.mark.parametrize("fault", ["pwritev", "index"])
def test_a_replacement_that_fails_leaves_nothing_to_touch(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """The old record is dead, and the new one is not taken by disk or index: who puts it again is not told that it is
    there, unless it is.
    """
    names = list(a_chain(bench.space, 3, seed=7).names)
    assert bench.put(names, FLAG_APPROXIMATE) == [PutOutcome.STORED] * 3
    with monkeypatch.context() as failing:
        if fault == "index":
            failing.setattr(Index, "write", _refuse_rows(Index.write))
        else:
            failing.setattr(Ledger, "flush_marks", lambda ledger, segments: set(segments))
        first = bench.put(names)
    bench.names = names
    if set(first) != {PutOutcome.REPLACED}:
        assert set(first) == {PutOutcome.REFUSED}
        again = bench.put(names, FLAG_APPROXIMATE)
        assert PutOutcome.TOUCHED not in again
        assert set(bench.put(names)) <= {PutOutcome.STORED, PutOutcome.REPLACED, PutOutcome.TOUCHED}
    bench.assert_kept()


def _refuse_rows(write: Callable[[Index, IndexBatch], None]) -> Callable[[Index, IndexBatch], None]:
    def refuse(index: Index, batch: IndexBatch) -> None:
        if len(batch.removed):
            index.refusing = True
            raise IndexRefused("no space left")
        write(index, batch)

    return refuse


def test_a_put_beside_a_quarantine_is_not_answered_with_a_touch(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader found the block bad and is about to mark it, when somebody puts it again."""
    with bench.first_segment.open("r+b") as stream:
        stream.seek(FIRST_RECORD + 8192)
        stream.write(bytes(4096))
    flush_marks, flushing, done = Ledger.flush_marks, threading.Event(), threading.Event()

    def slow(ledger: Ledger, segments: Iterable[Segment]) -> set[Segment]:
        if threading.current_thread() is reader:
            flushing.set()
            assert done.wait(10)
        return flush_marks(ledger, segments)

    monkeypatch.setattr(Ledger, "flush_marks", slow)
    reader = threading.Thread(target=lambda: read(bench.node, bench.space, bench.names[0], SIZE))
    reader.start()
    assert flushing.wait(10)
    outcomes = bench.put(bench.names[:1])
    done.set()
    reader.join(10)
    assert outcomes == [PutOutcome.STORED]
    bench.assert_kept()


def test_a_block_that_a_start_adopted_can_be_confirmed(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The start flushes the mark of what was replaced before it knows where the segment ends: that is no flush of what
    it then finds, and whoever waits for the disk is not told that the disk does not take it.
    """
    names = list(a_chain(bench.space, 3, seed=7).names)
    assert bench.put(names, FLAG_APPROXIMATE) == [PutOutcome.STORED] * 3
    with monkeypatch.context() as dying:
        dying.setattr(Ledger, "store", die)
        with pytest.raises(Killed):
            bench.put(names)
    bench.reopen()
    assert bench.put(names) == [PutOutcome.TOUCHED] * 3
    bench.names += names
    bench.assert_kept()


def test_a_record_that_died_is_not_moved_and_no_damage(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its segment is given back before anybody asked for it: it was removed, and nothing is wrong with it."""
    delete_and_die(bench, monkeypatch)
    bench.reopen()
    bench.node.touch(bench.space, bench.names[3:5], traffic_class=CHAT)
    bench.clock.advance(4 * 86_400)
    assert bench.node.sweep(apply=True).blocks_rewritten == 1
    assert bench.node.stats()["quarantined"] == 0
    bench.names = bench.names[4:5]
    bench.assert_kept()
