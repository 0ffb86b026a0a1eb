"""Sealing beside the writer: puts do not wait for it, it happens, and nothing depends on its having happened."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

from kvstore.daemon.files import Files
from kvstore.daemon.node import Node, NodeConfig
from kvstore.daemon.sealing import WAITING_MAX
from kvstore.keys import BlockName, SpaceId
from kvstore.limits import MIB
from kvstore.store import GetStatus, PutOutcome
from kvstore.testing import TEST_RULES, ManualClock
from kvstore.traffic import AGENT
from tests.support.nodes import puts_of, read
from tests.support.spaces import a_chain, a_space

SIZE = 100_000
PER_SEGMENT = 9


class SlowDisk(Files):
    """Flushes wait until the disk is let go."""

    def __init__(self) -> None:
        self.free = threading.Event()
        self.free.set()

    def fdatasync(self, fd: int) -> None:
        assert self.free.wait(20)
        super().fdatasync(fd)


def open_node(path: Path, files: Files) -> Node:
    config = NodeConfig(directories=(path,), capacity_bytes=32 * MIB, segment_bytes=MIB, background=True)
    return Node.open(config, ManualClock(), TEST_RULES, files=files)


def fill(node: Node, space: SpaceId, segments: int, seed: int) -> list[BlockName]:
    names = list(a_chain(space, PER_SEGMENT * segments, seed=seed).names)
    assert set(node.put(space, puts_of(names, SIZE), traffic_class=AGENT)) == {PutOutcome.STORED}
    return names


def wait_for(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def test_puts_go_on_while_the_disk_is_behind(tmp_path: Path) -> None:
    """As many segments as may wait are filled without a flush; once the disk is let go, each gets its seal."""
    disk = SlowDisk()
    node = open_node(tmp_path / "data", disk)
    space = node.register_space(a_space())
    disk.free.clear()
    names = fill(node, space, WAITING_MAX, seed=1)
    assert node.stats()["segments_sealed"] == 0
    assert all(read(node, space, name, SIZE)[0] == GetStatus.OK for name in names)
    disk.free.set()
    wait_for(lambda: node.stats()["segments_sealed"] == WAITING_MAX - 1)
    node.close()


def test_a_writer_waits_when_too_many_segments_do(tmp_path: Path) -> None:
    disk = SlowDisk()
    node = open_node(tmp_path / "data", disk)
    space = node.register_space(a_space())
    disk.free.clear()
    writer = threading.Thread(target=fill, args=(node, space, WAITING_MAX + 4, 1))
    writer.start()
    writer.join(0.5)
    assert writer.is_alive()
    disk.free.set()
    writer.join(10)
    assert not writer.is_alive()
    node.close()


def test_a_kill_before_the_seals_loses_nothing(tmp_path: Path) -> None:
    """Full segments without a seal are read by the next start like open ones, with and without the index."""
    disk = SlowDisk()
    node = open_node(tmp_path / "data", disk)
    space = node.register_space(a_space())
    disk.free.clear()
    names = fill(node, space, WAITING_MAX, seed=1)
    threading.Timer(0.2, disk.free.set).start()
    node.abandon()
    node = open_node(tmp_path / "data", Files())
    assert node.stats()["segments_sealed"] < WAITING_MAX
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
