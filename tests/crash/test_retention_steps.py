"""The node dies at every single step of what retention does: a change of policy, a sweep, moving blocks, a purge."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvstore.daemon import catalog
from kvstore.daemon.fsck import check
from kvstore.daemon.index import Index
from kvstore.daemon.node import Node
from kvstore.errors import PolicyConflict
from kvstore.keys import BlockName, SpaceId, tenant_salt
from kvstore.limits import MIB
from kvstore.purges import PurgeOrder
from kvstore.store import GetStatus, Pin
from kvstore.testing import TEST_RULES, ManualClock
from kvstore.traffic import AGENT, CHAT, ClassRules
from tests.support.mortal import Killed, MortalFiles
from tests.support.nodes import open_node, payload_of, puts_of, read
from tests.support.spaces import a_chain, a_space

SIZE = 60_000
CAPACITY_BYTES = 12 * MIB
DAY_S = 86_400
ACME = a_space(tenant_salt=tenant_salt("acme"))


class World:
    """A node that lives again and again on one directory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.clock = ManualClock()
        self.files = MortalFiles(2**30)
        self.open()
        self.space = self.node.register_space(ACME)
        self.other = self.node.register_space(a_space())

    def open(self) -> None:
        self.node: Node = open_node(self.path, self.clock, capacity_bytes=CAPACITY_BYTES, files=self.files)

    def put(self, seed: int, blocks: int, traffic_class: Any, space: SpaceId | None = None) -> list[BlockName]:
        names = list(a_chain(space or self.space, blocks, seed=seed).names)
        self.node.put(space or self.space, puts_of(names, SIZE), traffic_class=traffic_class)
        return names

    def whole(self, names: Sequence[BlockName], space: SpaceId | None = None) -> bool:
        found = [read(self.node, space or self.space, name, SIZE) for name in names]
        assert all(
            data == payload_of(name, SIZE)
            for name, (status, data) in zip(names, found, strict=True)
            if status is GetStatus.OK
        )
        return all(status is GetStatus.OK for status, _ in found)

    def gone(self, names: Sequence[BlockName]) -> bool:
        return {read(self.node, self.space, name, SIZE)[0] for name in names} == {GetStatus.MISS}

    def bytes_of(self, names: Sequence[BlockName]) -> bool:
        """Whether a raw scan of the directory finds something of the blocks."""
        data = b"".join(item.read_bytes() for item in self.path.rglob("*") if item.is_file())
        return any(payload_of(name, SIZE)[at : at + 48] in data for name in names for at in (0, 9000, SIZE - 48))


def die_at_every_step(
    tmp_path: Path,
    prepare: Callable[[World], None],
    act: Callable[[World], None],
    judge: Callable[[World, bool], None],
    *,
    stride: int = 1,
) -> int:
    """How many steps there were. ``judge`` is told whether the action was acknowledged. ``stride`` 2: every second."""
    for last in itertools.count(1, stride):
        world = World(tmp_path / str(last))
        prepare(world)
        done = True
        with pytest.MonkeyPatch.context() as patch:
            world.files.around(patch, catalog, "write_atomically")
            world.files.around(patch, Index, "write")
            world.files.steps, world.files.last = 0, last
            try:
                act(world)
            except Killed:
                done = False
            finally:
                world.node.abandon()
        world.files = MortalFiles(2**30)
        world.open()
        judge(world, done)
        world.node.close()
        report = check(tmp_path / str(last) / "volume-0")
        assert report.clean, report.to_text()
        if done:
            return last
    raise AssertionError


def test_a_change_of_policy_is_in_force_as_a_whole_or_not_at_all(tmp_path: Path) -> None:
    """Whichever policy is found after a death says what is served; an acknowledged one is never forgotten, and only
    what it dropped is gone.
    """
    shorter = ClassRules(
        tuple(
            replace(rule, keep_for_s=DAY_S) if rule.class_byte == AGENT else replace(rule, max_age_s=30 * DAY_S)
            for rule in TEST_RULES.rules
        )
    )
    old: list[BlockName] = []
    young: list[BlockName] = []

    def prepare(world: World) -> None:
        old[:] = world.put(1, 4, AGENT)
        world.clock.advance(2 * DAY_S)
        young[:] = [*world.put(2, 4, AGENT), *world.put(3, 4, CHAT)]

    def act(world: World) -> None:
        world.node.set_policy(shorter, "shorter", expected_version=1, apply=True, author="operator")

    def judge(world: World, done: bool) -> None:
        policy = world.node.policy()
        assert policy.version in ((2,) if done else (1, 2))
        assert policy.rules == (shorter if policy.version == 2 else TEST_RULES)
        assert [item.version for item in world.node.policy_history()] == list(range(1, policy.version + 1))
        assert world.whole(young)
        assert world.gone(old) if policy.version == 2 else world.whole(old)
        if policy.version == 2:
            with pytest.raises(PolicyConflict):
                act(world)
        else:
            act(world)
        assert world.gone(old)
        assert world.whole(young)

    assert die_at_every_step(tmp_path, prepare, act, judge) > 3


def test_a_sweep_that_dies_loses_no_survivor_and_revives_nothing(tmp_path: Path) -> None:
    """Expired blocks stay gone; pinned ones, which it writes again elsewhere, are whole; the next sweep ends it."""
    expired: list[BlockName] = []
    pinned: list[BlockName] = []
    living: list[BlockName] = []

    def prepare(world: World) -> None:
        names = world.put(1, 14, AGENT)
        pinned[:], expired[:] = names[3:6], [*names[:3], *names[6:]]
        world.node.pin([Pin(world.space, name.key, "operator", "needed") for name in pinned])
        world.clock.advance(4 * DAY_S)
        living[:] = world.put(2, 4, CHAT)

    def act(world: World) -> None:
        swept = world.node.sweep(apply=True)
        assert (swept.segments_freed, swept.blocks_rewritten) == (1, len(pinned))

    def judge(world: World, done: bool) -> None:
        for _ in range(2):
            assert world.whole([*pinned, *living])
            assert world.gone(expired)
            world.node.sweep(apply=True)
        assert len(world.node.scan(world.space)[0]) == len(pinned) + len(living)

    assert die_at_every_step(tmp_path, prepare, act, judge) > 8


@pytest.mark.parametrize("what", ["space", "class"])
def test_a_purge_that_dies_is_completed_by_the_next_start(tmp_path: Path, what: str) -> None:
    """Unless it died before the order was written down: then nothing was removed. No byte is left, and what is another
    tenant's, or another class uses too, is whole.
    """
    own: list[BlockName] = []
    shared: list[BlockName] = []
    others: list[BlockName] = []

    def prepare(world: World) -> None:
        own[:] = world.put(1, 5, AGENT)
        others[:] = world.put(3, 4, CHAT, world.other)
        shared[:] = world.put(2, 3, AGENT)
        if what == "class":
            world.node.touch(world.space, shared, traffic_class=CHAT)

    def act(world: World) -> None:
        part = ((world.space,), None) if what == "space" else ((), int(AGENT))
        order = PurgeOrder("ab" * 16, part[0], None, 0, class_byte=part[1])
        assert world.node.purge(order).answers[""].done

    def judge(world: World, done: bool) -> None:
        orders = world.node.purges()
        assert orders or not done
        assert all(report.done for _, report in orders)
        assert world.whole(others, world.other)
        if not orders:
            assert world.whole([*own, *shared])
            return
        assert world.gone(own)
        assert not world.bytes_of(own)
        assert world.whole(shared) if what == "class" else not world.bytes_of(shared)

    assert die_at_every_step(tmp_path, prepare, act, judge, stride=2 if what == "space" else 1) > 15
