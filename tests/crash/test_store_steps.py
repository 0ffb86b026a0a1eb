"""The node dies at every single file operation of a busy life: half-way through a write, else before it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

from kvstore.daemon.files import Files
from kvstore.daemon.fsck import check
from kvstore.daemon.node import Node
from kvstore.keys import BlockName, SpaceId
from kvstore.limits import MIB
from kvstore.store import AckLevel, GetStatus, PutOutcome
from kvstore.testing import ManualClock
from kvstore.traffic import AGENT, CHAT, ClassRule, ClassRules, TrafficClass
from tests.support.mortal import Killed, MortalFiles
from tests.support.nodes import open_node, payload_of, puts_of, read
from tests.support.spaces import a_chain, a_space

SIZE = 60_000
CAPACITY_BYTES = 12 * MIB


class Life:
    """What a node was asked and what it answered. ``unsure``: asked for when it died, so both answers are right."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.clock = ManualClock()
        self.present: set[BlockName] = set()
        self.unsure: set[BlockName] = set()
        self.asked: set[BlockName] = set()

    def live(self, files: Files) -> None:
        """Puts at both levels, touches, deletions, and putting again what was deleted."""
        node = open_node(self.path, self.clock, capacity_bytes=CAPACITY_BYTES, files=files)
        try:
            space = node.register_space(a_space())
            names = list(a_chain(space, 60).names)
            self._put(node, space, names[:8], AGENT, "os")
            self._put(node, space, names[4:12], CHAT, "disk")
            self._delete(node, space, names[2:6])
            self._put(node, space, names[3:5], AGENT, "os")
            self._put(node, space, names[12:44], AGENT, "os")
            self._delete(node, space, names[20:24])
            self._put(node, space, names[44:], CHAT, "disk")
            self._delete(node, space, names[3:5])
        finally:
            node.abandon()

    def _put(
        self, node: Node, space: SpaceId, names: Sequence[BlockName], traffic_class: TrafficClass, ack: AckLevel
    ) -> None:
        self.asked |= set(names)
        self.unsure |= set(names) - self.present
        outcomes = node.put(space, puts_of(list(names), SIZE), traffic_class=traffic_class, ack=ack)
        assert set(outcomes) <= {PutOutcome.STORED, PutOutcome.TOUCHED}
        self.unsure -= set(names)
        self.present |= set(names)

    def _delete(self, node: Node, space: SpaceId, names: Sequence[BlockName]) -> None:
        self.unsure |= set(names) & self.present
        self.present -= set(names)
        node.delete(space, [name.key for name in names])
        self.unsure -= set(names)

    def verify(self) -> None:
        """A clean check; acknowledged blocks identical, deleted ones gone, nothing invented; and it goes on."""
        volume = self.path / "volume-0"
        report = check(volume)
        assert report.clean, report.to_text()
        node = open_node(self.path, self.clock, capacity_bytes=CAPACITY_BYTES)
        space = node.register_space(a_space())
        for name in a_chain(space, 60).names:
            status, data = read(node, space, name, SIZE)
            assert status in (GetStatus.OK, GetStatus.MISS)
            if status is GetStatus.OK:
                assert name in self.present | self.unsure, f"block {name.index} came back"
                assert data == payload_of(name, SIZE), f"block {name.index} is altered"
            assert status is GetStatus.OK or name not in self.present, f"block {name.index} is lost"
        fresh = a_chain(space, 2, seed=9).names
        assert node.put(space, puts_of(list(fresh), SIZE), traffic_class=AGENT) == [PutOutcome.STORED] * 2
        assert not list((volume / "segments").glob("*.new"))
        node.close()


AGED = ClassRules(
    (ClassRule(AGENT, "agent", 20 * 3600, 100, max_age_s=86_400), ClassRule(CHAT, "chat", 7 * 86_400, 200))
)


def test_a_node_may_die_at_every_step_of_erasing(tmp_path: Path) -> None:
    """What has reached its maximum age is not served after any death, and the next start and sweep leave no byte of it;
    a living block beside it stays.
    """
    for last in itertools.count(1):
        path, clock = tmp_path / str(last), ManualClock()
        node = open_node(path, clock, capacity_bytes=CAPACITY_BYTES, rules=AGED)
        space = node.register_space(a_space())
        names, others = list(a_chain(space, 6).names), list(a_chain(space, 2, seed=9).names)
        node.put(space, puts_of(names, SIZE), traffic_class=AGENT)
        node.put(space, puts_of(others, SIZE), traffic_class=CHAT)
        node.close()
        clock.advance(86_400)
        ended = True
        node = open_node(
            path,
            clock,
            capacity_bytes=CAPACITY_BYTES,
            rules=None,
            files=(files := MortalFiles(2**30)),
            overwrite_aged=True,
        )
        files.steps, files.last = 0, last
        try:
            node.sweep(apply=True)
        except Killed:
            ended = False
        finally:
            node.abandon()
        node = open_node(path, clock, capacity_bytes=CAPACITY_BYTES, rules=None)
        assert {read(node, space, name, SIZE)[0] for name in names} == {GetStatus.MISS}
        node.sweep(apply=True)
        data = b"".join(item.read_bytes() for item in path.rglob("*") if item.is_file())
        assert not any(payload_of(name, SIZE)[at : at + 48] in data for name in names for at in (0, 9000, SIZE - 48))
        assert all(read(node, space, name, SIZE) == (GetStatus.OK, payload_of(name, SIZE)) for name in others)
        node.close()
        assert check(path / "volume-0", now_s=int(clock.now_s()) + 2 * 3600).clean
        if ended:
            break
    assert last > 4


def test_a_node_may_die_at_every_step(tmp_path: Path) -> None:
    """From the first start of an empty directory on: what was acknowledged is there, what was deleted is not."""
    for last in itertools.count(1):
        life = Life(tmp_path / str(last))
        try:
            life.live(MortalFiles(last))
        except Killed:
            life.verify()
            continue
        assert last > 40
        return
