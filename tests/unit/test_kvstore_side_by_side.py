"""A put that stands in the middle of its write, and everything that others may ask of its shard meanwhile."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import pytest

from kvstore.daemon.fsck import check
from kvstore.store import AckLevel, BlockPut, GetStatus, PutOutcome
from kvstore.testing import ManualClock
from kvstore.traffic import AGENT
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
