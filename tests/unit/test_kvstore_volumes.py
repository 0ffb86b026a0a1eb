"""Several volumes of one node: side by side, each keeping its blocks, none stopped by another that fails."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvstore.cli import _print_stats
from kvstore.daemon.files import Files
from kvstore.daemon.lanes import Lanes
from kvstore.daemon.node import Node, NodeConfig
from kvstore.errors import DeadlineExceeded, Overloaded, StoreError, Unavailable, VolumeError
from kvstore.keys import BlockName
from kvstore.limits import MIB
from kvstore.store import GetStatus, Presence, PutOutcome
from kvstore.testing import TEST_RULES, ManualClock
from kvstore.traffic import AGENT
from kvstore.wire import PackedNames
from tests.support.nodes import payload_of, puts_of
from tests.support.spaces import a_chain, a_space
from tests.support.waiting import WAIT_S

SIZE = 60_000
VOLUMES = 3


class Volumes(Files):
    """Knows on which volume a file lies. ``bad``: the volume that gives EIO on everything; ``meet``: where one reader
    or writer of every volume must be at the same moment.
    """

    def __init__(self) -> None:
        self.bad: str | None = None
        self.meet: threading.Barrier | None = None
        self.met: set[str] = set()
        self.ahead: set[str] = set()
        self._volumes: dict[int, str] = {}

    def open(self, path: Path, *, create: bool = False) -> int:
        self._strike(volume := path.parent.parent.name)
        fd = super().open(path, create=create)
        self._volumes[fd] = volume
        return fd

    def preadv(self, fd: int, views: Sequence[memoryview], offset: int) -> int:
        self._pass(self._volumes[fd])
        return super().preadv(fd, views, offset)

    def pwritev(self, fd: int, views: Sequence[memoryview], offset: int) -> int:
        self._pass(self._volumes[fd])
        return super().pwritev(fd, views, offset)

    def fdatasync(self, fd: int) -> None:
        self._strike(self._volumes[fd])
        super().fdatasync(fd)

    def read_ahead(self, fd: int, offset: int, count: int) -> None:
        self.ahead.add(self._volumes[fd])

    def _pass(self, volume: str) -> None:
        self._strike(volume)
        if self.meet is not None and volume not in self.met:
            self.met.add(volume)
            self.meet.wait()

    def _strike(self, volume: str) -> None:
        if volume == self.bad:
            raise OSError(errno.EIO, os.strerror(errno.EIO))


def _open(path: Path, files: Files, order: Sequence[int] = range(VOLUMES)) -> Node:
    directories = tuple(path / f"volume-{number}" for number in order)
    config = NodeConfig(directories, VOLUMES * 16 * MIB, segment_bytes=MIB)
    return Node.open(config, ManualClock(), TEST_RULES, files=files)


def _home(node: Node, name: BlockName) -> str:
    return node._home(name).volume.path.name


def _names(node: Node) -> list[BlockName]:
    """Blocks of so many stripes that some lie on every volume: they would miss one once in 90 million times."""
    space = node.register_space(a_space())
    names = [a_chain(space, 1, seed=seed).names[0] for seed in range(48)]
    assert {_home(node, name) for name in names} == {f"volume-{number}" for number in range(VOLUMES)}
    return names


def test_one_batch_is_written_and_read_on_all_volumes_at_once(tmp_path: Path) -> None:
    """A writer of each volume, then a reader of each, waits until all are there: one after another they never would."""
    files = Volumes()
    node = _open(tmp_path, files)
    space, names = node.register_space(a_space()), _names(node)
    files.meet = threading.Barrier(VOLUMES, timeout=WAIT_S)
    assert node.put(space, puts_of(names, SIZE), traffic_class=AGENT) == [PutOutcome.STORED] * len(names)
    assert len(files.met) == VOLUMES
    files.met.clear()
    buffers = [bytearray(SIZE) for _ in names]
    assert node.get_into(space, names, buffers) == [GetStatus.OK] * len(names)
    assert len(files.met) == VOLUMES
    assert all(buffer == payload_of(name, SIZE) for name, buffer in zip(names, buffers, strict=True))
    node.close()


def test_what_is_lent_of_other_volumes_is_read_ahead(tmp_path: Path) -> None:
    """A reader of lent blocks takes one file after another; meanwhile the other devices read already."""
    files = Volumes()
    node = _open(tmp_path, files)
    space, names = node.register_space(a_space()), _names(node)
    node.put(space, puts_of(names, SIZE), traffic_class=AGENT)
    with node.lend(space, PackedNames.pack(names)) as loan:
        assert len({segment.path.parent for segment, _ in loan.files}) == VOLUMES
        assert len(files.ahead) == VOLUMES - 1
    node.close()


def test_a_volume_that_fails_stops_no_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """EIO on everything of one volume: its blocks are misses, its puts are refused; those of the others go on."""
    files = Volumes()
    node = _open(tmp_path, files)
    space, names = node.register_space(a_space()), _names(node)
    node.put(space, puts_of(names, SIZE), traffic_class=AGENT)
    homes = [_home(node, name) for name in names]
    files.bad = "volume-1"
    buffers = [bytearray(SIZE) for _ in names]
    statuses = node.get_into(space, names, buffers)
    assert [status is GetStatus.OK for status in statuses] == [home != "volume-1" for home in homes]
    fresh = [a_chain(space, 1, seed=seed).names[0] for seed in range(50, 98)]
    outcomes = node.put(space, puts_of(fresh, SIZE), traffic_class=AGENT, ack="disk")
    assert [outcome is PutOutcome.STORED for outcome in outcomes] == [_home(node, name) != "volume-1" for name in fresh]
    volumes = node.stats()["volumes"]
    states = {Path(path).name: row["state"] for path, row in volumes.items()}
    assert states == {"volume-0": "ok", "volume-1": "failing", "volume-2": "ok"}
    _print_stats("node", {"volumes": volumes})
    assert "failing" in capsys.readouterr().out
    files.bad = None
    node.close()


def test_a_deletion_is_tried_on_every_volume_before_one_that_fails_is_told_of(tmp_path: Path) -> None:
    """Wherever it stands among the volumes: nothing that was to be deleted is served by any of them."""
    for bad in range(VOLUMES):
        files = Volumes()
        node = _open(tmp_path / str(bad), files)
        space, names = node.register_space(a_space()), _names(node)
        node.put(space, puts_of(names, SIZE), traffic_class=AGENT)
        files.bad = f"volume-{bad}"
        with pytest.raises(VolumeError):
            node.delete(space, [name.key for name in names])
        assert Presence.PRESENT not in node.lookup(space, names).presence
        files.bad = None
        node.close()


def test_a_volume_that_stands_still_makes_only_its_own_puts_late(tmp_path: Path) -> None:
    """Its blocks are UNREACHABLE when the deadline has passed; where all stand still, the whole put is late."""
    node = _open(tmp_path, Volumes())
    space, names = node.register_space(a_space()), _names(node)
    stuck = next(shard for shard in node._shards if shard.volume.path.name == "volume-1")
    with stuck._turns.alone():
        outcomes = node.put(space, puts_of(names, SIZE), traffic_class=AGENT, deadline_s=2.0)
        assert outcomes == [
            PutOutcome.UNREACHABLE if _home(node, name) == "volume-1" else PutOutcome.STORED for name in names
        ]
        mine = [name for name in names if _home(node, name) == "volume-1"]
        with pytest.raises(DeadlineExceeded):
            node.put(space, puts_of(mine, SIZE), traffic_class=AGENT, deadline_s=0.05)
    node.close()


def test_blocks_keep_their_volume_over_restarts(tmp_path: Path) -> None:
    """In whatever order the directories are named: by the volume's own id, stored or not."""
    node = _open(tmp_path, Volumes())
    names = _names(node)
    homes = [_home(node, name) for name in names]
    node.put(node.register_space(a_space()), puts_of(names[::2], SIZE), traffic_class=AGENT)
    node.close()
    node = _open(tmp_path, Volumes(), order=(2, 0, 1))
    assert [_home(node, name) for name in names] == homes
    buffers = [bytearray(SIZE) for _ in names[::2]]
    assert set(node.get_into(node.register_space(a_space()), names[::2], buffers)) == {GetStatus.OK}
    node.close()


def test_a_lane_that_fails_is_told_beside_what_the_others_gave() -> None:
    lanes = Lanes(["a", "b"])

    def fail() -> str:
        raise Overloaded("busy")

    done = lanes.run({"a": lambda: "done", "b": fail})
    assert done["a"] == "done"
    assert isinstance(done["b"], Overloaded)

    def break_down() -> str:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        lanes.run({"a": lambda: "done", "b": break_down})
    lanes.close()
    with pytest.raises(Unavailable):
        lanes.run({"a": lambda: "done", "b": lambda: "never"})
    assert issubclass(Unavailable, StoreError)
