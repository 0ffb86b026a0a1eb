"""A maximum age: nothing that a class wrote is served longer, whatever was done with it, and no byte of it stays."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.daemon.fsck import check
from kvstore.daemon.node import Node
from kvstore.keys import BlockName
from kvstore.store import GetStatus, Pin, Presence, PutOutcome
from kvstore.testing import TEST_RULES, ManualClock
from kvstore.traffic import AGENT, CHAT, ClassRule, ClassRules, TrafficClass
from tests.support.nodes import open_node, payload_of, puts_of, read
from tests.support.spaces import a_chain, a_space

HOUR_S, DAY_S = 3600, 86_400
SIZE = 20_000
AGED = ClassRules(
    (
        ClassRule(AGENT, "agent", 20 * HOUR_S, 100, max_age_s=DAY_S),
        ClassRule(CHAT, "chat", 7 * DAY_S, 200),
    )
)


class Bench:
    """A node in a directory, which can be restarted, and what may be found of its blocks there."""

    def __init__(self, path: Path, rules: ClassRules = AGED, *, overwrite: bool = False) -> None:
        self.path = path
        self.clock = ManualClock()
        self.rules = rules
        self.overwrite = overwrite
        self.node = self._open()
        self.space = self.node.register_space(a_space())

    def _open(self) -> Node:
        return open_node(self.path, self.clock, rules=self.rules, overwrite_aged=self.overwrite)

    def restart(self) -> None:
        self.node.close()
        self.node = self._open()

    def set_back(self, seconds: int) -> None:
        """The node starts again on a clock that was set back."""
        self.node.close()
        self.clock = ManualClock(self.clock.now_s() - seconds)
        self.node = self._open()

    def put(self, seed: int, traffic_class: TrafficClass = AGENT, blocks: int = 4) -> list[BlockName]:
        names = list(a_chain(self.space, blocks, seed=seed).names)
        outcomes = self.node.put(self.space, puts_of(names, SIZE), traffic_class=traffic_class)
        assert set(outcomes) == {PutOutcome.STORED}
        return names

    def touch(self, names: list[BlockName], traffic_class: TrafficClass = CHAT) -> int:
        return self.node.touch(self.space, names, traffic_class=traffic_class)

    def states(self, names: list[BlockName]) -> set[Presence]:
        return {Presence(value) for value in self.node.lookup(self.space, names).presence.tolist()}

    def reads(self, names: list[BlockName]) -> set[GetStatus]:
        found = [(name, *read(self.node, self.space, name, SIZE)) for name in names]
        assert all(data == payload_of(name, SIZE) for name, status, data in found if status is GetStatus.OK)
        return {status for _, status, _ in found}

    def pin(self, names: list[BlockName], *, hold: bool = False) -> None:
        pins = [Pin(self.space, name.key, "somebody", "a reason", hold=hold) for name in names]
        assert self.node.pin(pins) == len(names)

    def on_disk(self, names: list[BlockName]) -> int:
        """Of how many blocks some bytes lie in the files."""
        data = [item.read_bytes() for item in self.path.rglob("*") if item.is_file()]
        payloads = [payload_of(name, SIZE) for name in names]
        traces = [(one[:48], one[9000:9048], one[-48:]) for one in payloads]
        return sum(any(part in file for part in parts for file in data) for parts in traces)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    yield made
    made.node.close()


@pytest.mark.parametrize("overwrite", [False, True])
def test_however_it_was_used_it_is_gone_and_leaves_no_byte(tmp_path: Path, overwrite: bool) -> None:
    """Touched by two classes, put again and pinned, across restarts: served to the end, then erased by the next sweep.
    What another class wrote is not, though this one used it.
    """
    bench = Bench(tmp_path, overwrite=overwrite)
    names, others = bench.put(1), bench.put(2, CHAT)
    bench.pin(names)
    for _ in range(4):
        bench.clock.advance(5 * HOUR_S)
        bench.restart()
        assert bench.touch(names) == bench.touch(names, AGENT) == bench.touch(others, AGENT) == 4
        again = bench.node.put(bench.space, puts_of(names, SIZE), traffic_class=CHAT)
        assert set(again) == {PutOutcome.TOUCHED}
        bench.node.sweep(apply=True)
    bench.clock.advance(4 * HOUR_S - 1)
    assert bench.reads(names) == {GetStatus.OK}
    bench.clock.advance(1)
    assert bench.states(names) == {Presence.EXPIRED}
    bench.restart()
    assert bench.states(names) == {Presence.EXPIRED}
    assert bench.reads(names) == {GetStatus.MISS}
    assert bench.touch(names) == 0
    assert bench.on_disk(names) == 4
    assert bench.node.sweep(apply=True).blocks == 4
    assert bench.on_disk(names) == 0
    assert bench.reads(others) == {GetStatus.OK}
    bench.put(1)
    bench.node.close()
    assert check(bench.path / "volume-0", now_s=int(bench.clock.now_s())).clean


def test_each_hour_ages_by_itself(bench: Bench) -> None:
    """Blocks of three days of traffic: none is served or lies on the disk beyond a day, none goes an hour early."""
    written: list[tuple[float, list[BlockName]]] = []
    for step in range(3 * 24):
        bench.clock.advance(HOUR_S - 100)
        now_s = bench.clock.now_s()
        if step % 3 == 0:
            written.append((now_s, bench.put(step, blocks=2)))
        if step == 40:
            bench.restart()
        bench.node.sweep(apply=True)
        for then_s, names in written:
            bench.touch(names)
            if now_s < then_s + DAY_S - HOUR_S:
                assert bench.states(names) == {Presence.PRESENT}
            elif now_s >= then_s + DAY_S:
                assert bench.states(names) == {Presence.EXPIRED}
        due = [name for then_s, names in written if now_s >= then_s + DAY_S for name in names]
        assert step % 8 or bench.on_disk(due) == 0
    assert len(due) > 20


def test_what_is_evicted_is_erased_at_once(bench: Bench) -> None:
    names: list[BlockName] = []
    for seed in range(24):
        names += bench.put(seed, blocks=32)
    gone = [name for name in names if bench.states([name]) == {Presence.EVICTED}]
    assert len(gone) > 32
    assert bench.on_disk(gone) == 0


def test_a_hold_keeps_what_it_holds_and_nothing_beside_it(bench: Bench) -> None:
    """Of one segment: a held block is served and stays, a pinned one and the others are erased around it; the held
    one too once the hold ends.
    """
    names = bench.put(1, blocks=6)
    bench.touch(names)
    held, others = names[2:3], [*names[:2], *names[3:]]
    bench.pin(held, hold=True)
    bench.pin(others[:1])
    bench.clock.advance(DAY_S)
    for _ in range(2):
        assert bench.states(held) == {Presence.PRESENT}
        assert bench.states(others) == {Presence.EXPIRED}
        bench.node.sweep(apply=True)
        assert (bench.on_disk(held), bench.on_disk(others)) == (1, 0)
        assert bench.reads(held) == {GetStatus.OK}
        bench.restart()
    bench.node.close()
    assert check(bench.path / "volume-0", now_s=int(bench.clock.now_s() + DAY_S)).clean
    bench.restart()
    bench.node.unpin(bench.space, [held[0].key], holds=True)
    assert bench.states(held) == {Presence.EXPIRED}
    bench.node.sweep(apply=True)
    assert bench.on_disk(names) == 0


def test_a_first_maximum_age_reaches_what_is_there_already(tmp_path: Path) -> None:
    """What earlier lives of the segments left is erased before the policy is in force; what is too old goes, as it was
    said to; what was moved meanwhile is as old as it was.
    """
    bench = Bench(tmp_path, TEST_RULES)
    before = bench.put(1, blocks=12)
    bench.clock.advance(3 * DAY_S)
    bench.node.sweep(apply=True)
    assert bench.on_disk(before) == 12
    sparse = bench.put(2, blocks=8)
    bench.clock.advance(2.9 * DAY_S)
    bench.touch(sparse[:3])
    bench.clock.advance(0.2 * DAY_S)
    bench.node.sweep(apply=True)
    assert bench.node.stats()["blocks_rewritten"] == 3
    young = bench.put(3)
    aged = ClassRules((ClassRule(AGENT, "agent", DAY_S, 100, max_age_s=5 * DAY_S), TEST_RULES.rules[1]))
    for apply in (False, True):
        assert bench.node.set_policy(aged, "", expected_version=1, apply=apply).blocks == 0
        assert (bench.on_disk(before) == 0) is apply
    bench.restart()
    bench.clock.advance(1.9 * DAY_S - 1)
    assert bench.states(sparse[:3]) == {Presence.PRESENT}
    bench.clock.advance(1)
    assert bench.states(sparse[:3]) == {Presence.EXPIRED}
    bench.node.sweep(apply=True)
    assert bench.on_disk([*sparse, *young]) == 0
    bench.node.close()


def test_a_shorter_maximum_age_says_what_it_drops(bench: Bench) -> None:
    names, others = bench.put(1), bench.put(2, CHAT)
    bench.clock.advance(7 * HOUR_S)
    shorter = ClassRules((ClassRule(AGENT, "agent", 5 * HOUR_S, 100, max_age_s=6 * HOUR_S), AGED.rules[1]))
    bench.touch(names, AGENT)
    assert bench.node.set_policy(shorter, "", expected_version=1, apply=False).blocks == 4
    assert bench.states(names) == {Presence.PRESENT}
    assert bench.node.set_policy(shorter, "", expected_version=1, apply=True).blocks == 4
    assert bench.states(names) == {Presence.EXPIRED}
    assert bench.states(others) == {Presence.PRESENT}


def test_a_clock_that_went_back_makes_no_block_younger(bench: Bench) -> None:
    """What is written then is as old as its own time says, also after a restart."""
    bench.put(1)
    bench.set_back(2 * DAY_S)
    names = bench.put(2)
    bench.touch(names)
    bench.clock.advance(DAY_S - 1)
    assert bench.states(names) == {Presence.PRESENT}
    bench.restart()
    bench.clock.advance(1)
    assert bench.states(names) == {Presence.EXPIRED}


def test_fsck_reports_what_outlived_its_age(bench: Bench) -> None:
    """On a node that was down: within an hour it may still be there, later it is overdue, until the next sweep."""
    names = bench.put(1)
    volume = bench.path / "volume-0"
    bench.node.close()
    end_s = int(bench.clock.now_s()) + DAY_S + HOUR_S
    assert check(volume, now_s=end_s).clean
    report = check(volume, now_s=end_s + 1)
    assert (report.overdue_records, dict(report.findings_by_kind)) == (4, {"overdue": 1})
    assert check(volume, now_s=end_s + 1, catalog=volume / "catalog.json").overdue_records == 4
    bench.clock.advance(DAY_S + HOUR_S + 1)
    bench.restart()
    bench.node.sweep(apply=True)
    bench.node.close()
    assert check(volume, now_s=end_s + 1).clean
    assert bench.on_disk(names) == 0
