"""Sealing beside the writer: puts do not wait for it, it happens, and nothing depends on its having happened."""

from __future__ import annotations

import threading
from pathlib import Path

from kvstore.daemon.files import Files
from kvstore.daemon.node import Node, NodeConfig
from kvstore.daemon.record import record_bytes
from kvstore.keys import BlockName, SpaceId
from kvstore.limits import MIB
from kvstore.store import GetStatus, PutOutcome
from kvstore.testing import TEST_RULES, ManualClock
from kvstore.traffic import AGENT
from tests.support.nodes import puts_of, read
from tests.support.spaces import a_chain, a_space
from tests.support.waiting import WAIT_S, wait

SIZE = 100_000
PER_SEGMENT = 10
BEHIND = 12
"""Segments that are filled while the disk takes nothing."""


class SlowDisk(Files):
    """Flushes wait until the disk is let go; it counts them. ``waiting``: threads that came for one; ``served``: those
    that need not wait.
    """

    def __init__(self) -> None:
        self.free = threading.Event()
        self.free.set()
        self.flushes = 0
        self.waiting: set[threading.Thread] = set()
        self.served: set[threading.Thread] = set()

    def fdatasync(self, fd: int) -> None:
        me = threading.current_thread()
        self.waiting.add(me)
        wait(lambda: self.free.is_set() or me in self.served, "disk")
        self.flushes += 1
        super().fdatasync(fd)


def open_node(path: Path, files: Files) -> Node:
    config = NodeConfig(directories=(path,), capacity_bytes=32 * MIB, segment_bytes=MIB, background=True)
    return Node.open(config, ManualClock(), TEST_RULES, files=files)


def fill(node: Node, space: SpaceId, segments: int, seed: int) -> list[BlockName]:
    names = list(a_chain(space, PER_SEGMENT * segments, seed=seed).names)
    assert set(node.put(space, puts_of(names, SIZE), traffic_class=AGENT)) == {PutOutcome.STORED}
    return names


def test_puts_go_on_while_the_disk_is_behind(tmp_path: Path) -> None:
    """Segments are filled without a flush; once the disk is let go, each full one gets its seal."""
    disk = SlowDisk()
    node = open_node(tmp_path / "data", disk)
    space = node.register_space(a_space())
    disk.free.clear()
    names = fill(node, space, BEHIND, seed=1)
    assert node.stats()["segments_sealed"] == 0
    assert all(read(node, space, name, SIZE)[0] == GetStatus.OK for name in names)
    disk.free.set()
    wait(lambda: node.stats()["segments_sealed"] == BEHIND - 1, "seal")
    node.close()


def test_only_a_put_that_wants_the_disk_waits_for_it(tmp_path: Path) -> None:
    """And it flushes the segment of its own block, not those of puts that did not ask, for which the disk is still
    behind when it is acknowledged."""
    disk = SlowDisk()
    node = open_node(tmp_path / "data", disk)
    space = node.register_space(a_space())
    disk.free.clear()
    fill(node, space, BEHIND, seed=1)
    puts = puts_of(list(a_chain(space, 1, seed=2).names), SIZE)
    outcomes: list[PutOutcome] = []
    putting = threading.Thread(
        target=lambda: outcomes.extend(node.put(space, puts, traffic_class=AGENT, ack="disk", deadline_s=WAIT_S))
    )
    putting.start()
    wait(lambda: putting in disk.waiting, "put that wants the disk")
    assert (outcomes, disk.flushes) == ([], 0)
    disk.served.add(putting)
    putting.join(WAIT_S)
    assert (outcomes, disk.flushes) == ([PutOutcome.STORED], 1)
    disk.free.set()
    node.close()


def test_a_touch_that_wants_the_disk_gets_it(tmp_path: Path) -> None:
    """A block that an earlier put left to the operating system is flushed before its put at ``disk`` is
    acknowledged as a touch."""
    disk = SlowDisk()
    node = open_node(tmp_path / "data", disk)
    space = node.register_space(a_space())
    name = a_chain(space, 1, seed=1).names[0]
    node.put(space, puts_of([name], SIZE), traffic_class=AGENT)
    before = disk.flushes
    for _ in range(2):
        assert node.put(space, puts_of([name], SIZE), traffic_class=AGENT, ack="disk") == [PutOutcome.TOUCHED]
    assert disk.flushes == before + 1
    node.close()


def test_a_kill_before_the_seals_loses_nothing(tmp_path: Path) -> None:
    """Full segments without a seal are read by the next start like open ones, with and without the index."""
    disk = SlowDisk()
    node = open_node(tmp_path / "data", disk)
    space = node.register_space(a_space())
    disk.free.clear()
    names = fill(node, space, BEHIND, seed=1)
    threading.Timer(0.2, disk.free.set).start()
    node.abandon()
    node = open_node(tmp_path / "data", Files())
    assert node.stats()["segments_sealed"] < BEHIND
    assert all(read(node, space, name, SIZE)[0] == GetStatus.OK for name in names)
    node.close()


def test_a_segment_that_was_recycled_meanwhile_is_left_alone(tmp_path: Path) -> None:
    """What waits for its seal is purged and overwritten before the disk is let go: the new blocks stay readable, and a
    restart finds them."""
    disk = SlowDisk()
    node = open_node(tmp_path / "data", disk)
    space = node.register_space(a_space())
    disk.free.clear()
    fill(node, space, 3, seed=1)
    threading.Timer(0.2, disk.free.set).start()
    node.delete_space(space)
    names = [name for seed in range(2, 12) for name in fill(node, space, 3, seed=seed)]
    kept = [name for name in names if read(node, space, name, SIZE)[0] == GetStatus.OK]
    assert len(kept) > 100
    node.close()
    node = open_node(tmp_path / "data", Files())
    assert all(read(node, space, name, SIZE)[0] == GetStatus.OK for name in kept)
    node.close()


def test_the_device_begins_with_a_put_that_wants_the_disk_while_it_is_written(tmp_path: Path) -> None:
    """Every byte that such a put appends is offered to the device before the flush; those of others are not."""

    class Watching(Files):
        def __init__(self) -> None:
            self.hastened = 0
            self.at_flush: list[int] = []

        def hasten(self, fd: int, offset: int, count: int) -> None:
            self.hastened += count
            super().hasten(fd, offset, count)

        def fdatasync(self, fd: int) -> None:
            self.at_flush.append(self.hastened)
            super().fdatasync(fd)

    disk = Watching()
    node = open_node(tmp_path / "data", disk)
    space = node.register_space(a_space())
    fill(node, space, 1, seed=1)
    assert disk.hastened == 0
    disk.at_flush.clear()
    name = a_chain(space, 1, seed=2).names[0]
    assert node.put(space, puts_of([name], SIZE), traffic_class=AGENT, ack="disk") == [PutOutcome.STORED]
    assert disk.at_flush[-1] == record_bytes(SIZE)
    node.close()
