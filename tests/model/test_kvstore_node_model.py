"""The node as a state machine beside a dict: data and accounting, over one volume and over two; crashes, torn tails,
lost indexes, a clock that jumps and orders to leave no byte are steps.

``REPRISE_MODEL_EXAMPLES`` says how many lives are tried instead of the few of every day.
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections import defaultdict, deque
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvstore.daemon.columns import incoming
from kvstore.daemon.fsck import check
from kvstore.daemon.node import Node
from kvstore.daemon.shard import Shard
from kvstore.daemon.turns import UNDER_WAY_MAX
from kvstore.daemon.writer import PutUnderWay
from kvstore.keys import BlockName, SpaceId
from kvstore.limits import MIB
from kvstore.purges import PurgeOrder
from kvstore.store import FLAG_APPROXIMATE, AckLevel, BlockPut, GetStatus, Pin, Presence, PutOutcome
from kvstore.testing import DAY_S, T0_S
from kvstore.traffic import AGENT, ALWAYS, CHAT, SECOND_TOUCH, ClassRule, ClassRules, TrafficClass
from tests.support.disk import disk_bytes
from tests.support.faults import FaultyFiles
from tests.support.nodes import open_node
from tests.support.spaces import BLOCK_TOKENS, a_chain, a_space

CAPACITY = 9 * MIB
"""Of each volume."""
NAMES = 40
SIZES = (100, 60_000, 400_000)
BUDGETS = (0, 3_000, 70_000, 500_000)
OTHER = TrafficClass(40)
KEEP_DAYS = ((3, 7, 0), (1, 7, 0), (3, 2, 0), (5, 30, 0), (1, 7, 4))
"""Of agents, of chats, and how old an agent's block may become (0: no bound)."""
EXAMPLES = int(os.environ.get("REPRISE_MODEL_EXAMPLES", "0"))

places = st.lists(st.integers(0, NAMES - 1), min_size=1, max_size=12, unique=True)
classes = st.sampled_from([AGENT, CHAT, OTHER])
faults = st.none() | st.integers(0, 2)


def rules_of(days: tuple[int, int, int], admission: str = ALWAYS) -> ClassRules:
    """``admission``: of class chat."""
    agent, chat, age = days
    return ClassRules(
        (
            ClassRule(AGENT, "agent", agent * DAY_S, 100, max_age_s=age * DAY_S),
            ClassRule(CHAT, "chat", chat * DAY_S, 200, admission=admission),
        )
    )


def bytes_of(name: BlockName, exact: bool) -> bytes:
    """Payload of a block: its length and content follow from its key."""
    size = SIZES[name.index % len(SIZES)]
    return ((name.key if exact else name.key[::-1]) * (size // 32 + 1))[:size]


@dataclass
class JumpyClock:
    """A wall clock that somebody sets."""

    at_s: float = T0_S

    def now_s(self) -> float:
        return self.at_s


@dataclass
class Kept:
    """What the model knows of an acknowledged block."""

    exact: bool
    class_byte: int
    """Of the class that wrote it."""
    written_s: int
    touches: dict[int, int] = field(default_factory=dict)
    pinned: bool = False
    lapsed: bool = False
    """Its deadline was past once: it may be removed from then on, also if longer rules would revive it."""
    aged: bool = False
    """It may have reached its maximum age once: with the oldest record of its segment, whenever that was written."""
    loose: bool = False
    """The index was lost, and touches with it: the deadline lies between that of the write and the model's."""


@dataclass
class Step:
    """A put of some blocks that is under way in a shard."""

    where: list[int]
    traffic_class: TrafficClass
    exact: bool
    shard: Shard
    put: PutUnderWay
    is_written: bool = False


class NodeModel(RuleBasedStateMachine):
    """Invariant: an acknowledged block is byte-identical or a miss; a miss needs a reason that the model accepts."""

    volumes = 1

    def __init__(self) -> None:
        super().__init__()
        self.path = Path(tempfile.mkdtemp(prefix="node-model-"))
        self.clock = JumpyClock()
        self.files = FaultyFiles()
        self.kept: dict[int, Kept] = {}
        self.offered: set[int] = set()
        """To a class that stores what it is offered twice, since the node was opened."""
        self.orders = 0
        self.first_s = self.clock.now_s()
        """The earliest time so far."""
        self.rules = rules_of(KEEP_DAYS[0])
        self.node: Node = self._new_node(self.rules)
        self.space: SpaceId = self.node.register_space(a_space())
        self.names = list(a_chain(self.space, NAMES).names)

    # --- steps --------------------------------------------------------------------------------------------------------

    @initialize()
    def begin(self) -> None:
        assert self.node.stats()["blocks"] == 0

    @rule(where=places, traffic_class=classes, exact=st.booleans(), disk=st.booleans())
    def put(self, where: list[int], traffic_class: TrafficClass, exact: bool, disk: bool) -> None:
        ack: AckLevel = "disk" if disk else "os"
        outcomes = self.node.put(self.space, self._blocks(where, exact), traffic_class=traffic_class, ack=ack)
        for place, outcome in zip(where, outcomes, strict=True):
            self._settle(place, outcome, traffic_class, exact)

    @rule(traffic_class=classes, seed=st.integers(0, 255), fault=faults)
    def put_side_by_side(self, traffic_class: TrafficClass, seed: int, fault: int | None) -> None:
        """Puts under way, in whatever order their steps can come, beside questions. One write fails half way, or none;
        a kill ends all at some step, or at none: what ended before it is acknowledged, of the rest any block may be
        found.
        """
        chance = Random(seed)
        lines = self._begin(traffic_class, chance)
        failed: list[Step] = []
        writes = 0
        while any(lines.values()):
            if chance.random() < 0.03:
                self._kill(lines)
                return
            line = chance.choice([line for line in lines.values() if line])
            waiting = next((step for step in line if not step.is_written), None)
            if waiting is not None and (not line[0].is_written or chance.random() < 0.5):
                self._write(waiting, chance.choice(BUDGETS) if writes == fault else None)
                writes += 1
            else:
                step = line.popleft()
                failed += [] if self._end(step) else [step]
            chance.choice([self.data_agrees, self.figures_agree, self._confirm_all])()
        for step in failed:
            self.put(step.where, step.traffic_class, step.exact, False)
        if failed and self.kept and chance.random() < 0.3:
            self.crash_and_lose_the_index()

    @rule(where=places, traffic_class=classes)
    def touch(self, where: list[int], traffic_class: TrafficClass) -> None:
        present = self._present(where)
        names = [self.names[place] for place in where]
        assert self.node.touch(self.space, names, traffic_class=traffic_class) == len(present)
        for place in present:
            self._touch(place, traffic_class)

    @rule(where=places)
    def delete(self, where: list[int]) -> None:
        held = {info.key for info in self.node.scan()[0]}
        keys = [self.names[place].key for place in where]
        assert self.node.delete(self.space, keys) == len(held & set(keys))
        for place in where:
            self.kept.pop(place, None)

    @rule(where=st.none() | places, overwrite=st.booleans())
    def order_to_leave_no_byte(self, where: list[int] | None, overwrite: bool) -> None:
        """Of some blocks, or of all: nothing in the segments tells of them afterwards."""
        named = range(NAMES) if where is None else where
        keys = None if where is None else tuple(self.names[place].key for place in where)
        held = {info.key for info in self.node.scan()[0]} & {self.names[place].key for place in named}
        self.orders += 1
        order = PurgeOrder(f"{self.orders:032x}", (self.space,), keys, int(self.clock.now_s()), overwrite=overwrite)
        report = self.node.purge(order).answers[""]
        assert report.done
        assert report.blocks == len(held)
        assert self.node.purge(order).answers[""] == report
        assert self.node.leftovers(order, {}).answers[""].records == 0
        data = b"".join(path.read_bytes() for path in self.path.glob("volume-*/segments/*.seg"))
        for place in named:
            self.kept.pop(place, None)
            name = self.names[place]
            assert bytes_of(name, exact=True)[:64] not in data
            assert bytes_of(name, exact=False)[:64] not in data
        self.node.register_space(a_space())

    @rule(where=places)
    def pin(self, where: list[int]) -> None:
        present = self._present(where[:3])
        pins = [Pin(self.space, self.names[place].key, "model", "") for place in where[:3]]
        assert self.node.pin(pins) == len(present)
        for place in present:
            self.kept[place].pinned = True

    @rule()
    def unpin_all(self) -> None:
        self.node.unpin(self.space, [name.key for name in self.names])
        for kept in self.kept.values():
            kept.pinned = False

    @rule(days=st.sampled_from([0.01, 0.5, 1.0, 2.5, 8.0, -0.01, -1.0, -8.0]))
    def set_the_clock(self, days: float) -> None:
        self.clock.at_s += days * DAY_S
        self.first_s = min(self.first_s, self.clock.at_s)

    @rule(days=st.sampled_from(KEEP_DAYS), admission=st.sampled_from([ALWAYS, SECOND_TOUCH]))
    def change_policy(self, days: tuple[int, int, int], admission: str) -> None:
        version = self.node.policy().version
        before = set(self._present(range(NAMES)))
        rules = rules_of(days, admission)
        plan = self.node.set_policy(rules, "model", expected_version=version, apply=False)
        assert set(self._present(range(NAMES))) == before
        effect = self.node.set_policy(rules, "model", expected_version=version, apply=True)
        lost = before - set(self._present(range(NAMES)))
        assert plan.removed == effect.removed
        assert effect.blocks == len(lost)
        self.rules = rules

    @rule()
    def sweep(self) -> None:
        now_s = self.clock.now_s()
        infos = self.node.scan()[0]
        before = self._present(range(NAMES))
        served = {self.names[place].key for place in before}
        expired = [info for info in infos if info.key not in served]
        assert all((info.keep_until_s <= now_s) == (info.key not in served) for info in infos if not info.pinned)
        assert self.node.sweep(apply=False).blocks == len(expired)
        assert self.node.sweep(apply=True).blocks == len(expired)
        assert self._present(range(NAMES)) == before
        assert len(self.node.scan()[0]) == len(infos) - len(expired)
        for place in set(self.kept) - set(before):
            del self.kept[place]

    @rule()
    def crash(self) -> None:
        self._reopen(lose_index=False)

    @rule(tail=st.binary(min_size=1, max_size=600))
    def crash_with_a_torn_tail(self, tail: bytes) -> None:
        """Half a write of unacknowledged bytes lies behind the last record of every open segment."""
        ends = [(item.path, item.end) for item in self._segments() if item.room_bytes >= len(tail)]
        self.node.abandon()
        for path, end in ends:
            with open(path, "r+b") as stream:
                stream.seek(end)
                stream.write(tail)
        self._open()

    @precondition(lambda self: bool(self.kept))
    @rule()
    def crash_and_lose_the_index(self) -> None:
        self._reopen(lose_index=True)
        for kept in self.kept.values():
            kept.loose = True

    @rule()
    def fsck(self) -> None:
        self.node.close()
        for number in range(self.volumes):
            report = check(self.path / f"volume-{number}")
            assert report.clean, report.to_text()
            parts = report.live_bytes + report.dead_bytes + report.free_bytes + report.page_bytes
            assert parts == report.total_bytes
        self._open()

    # --- what always holds --------------------------------------------------------------------------------------------

    @invariant()
    def data_agrees(self) -> None:
        """Every block of the model is byte-identical or a miss with a reason; nothing else is present."""
        answer = self.node.lookup(self.space, self.names)
        now_s = self.clock.now_s()
        for place, name in enumerate(self.names):
            presence = answer.presence[place]
            kept = self.kept.get(place)
            buffer = bytearray(SIZES[name.index % len(SIZES)])
            status = self.node.get_into(self.space, [name], [buffer])[0]
            assert status is (GetStatus.OK if presence == Presence.PRESENT else GetStatus.MISS)
            if presence == Presence.PRESENT:
                assert kept is not None, f"block {place} came back from nowhere"
                assert buffer == bytes_of(name, kept.exact)
                assert bool(answer.flags[place] & FLAG_APPROXIMATE) == (not kept.exact)
                assert kept.pinned or now_s < self._latest_s(kept), f"block {place} is served beyond its deadline"
                assert not self._is_aged(kept, kept.written_s), f"block {place} is served beyond its maximum age"
            elif kept is not None:
                kept.lapsed |= now_s >= self._earliest_s(kept)
                kept.aged |= self._is_aged(kept, self.first_s)
                accepted = presence == Presence.EVICTED or kept.loose or kept.lapsed or kept.aged
                assert accepted, f"block {place} is gone without a reason: {presence}"
                assert kept.aged or not kept.pinned, f"block {place} is pinned and gone"

    @invariant()
    def accounts_agree(self) -> None:
        infos = self.node.scan()[0]
        books = self.node.accounting()
        live = sum(-(-(info.stored_bytes + 256) // 4096) * 4096 for info in infos)
        assert sum(book["live_bytes"] for book in books) == live
        for number, book in enumerate(books):
            assert book["dead_bytes"] >= 0
            parts = book["live_bytes"] + book["dead_bytes"] + book["free_bytes"] + book["page_bytes"]
            files = self.path.glob(f"volume-{number}/segments/*.seg")
            assert parts == book["total_bytes"] == sum(path.stat().st_size for path in files)
            assert disk_bytes(self.path / f"volume-{number}") <= CAPACITY
        assert self.node.stats()["leases"] == 0

    @invariant()
    def figures_agree(self) -> None:
        """Blocks and bytes of what is served, in all, by class and by space, are those of the model; of a block that
        several classes have touched any of them may have it.
        """
        stats = self.node.stats()
        served = self._present(range(NAMES))
        sizes = {place: SIZES[self.names[place].index % len(SIZES)] for place in served}
        assert stats["blocks"] == sum(stats["class_blocks"].values()) == len(served)
        assert stats["payload_bytes"] == sum(stats["class_bytes"].values()) == sum(sizes.values())
        assert stats["space_bytes"] == ({self.space.hex(): sum(sizes.values())} if served else {})
        for byte in (AGENT, CHAT, OTHER):
            perhaps = [place for place in served if byte in self.kept[place].touches]
            surely = [place for place in perhaps if len(self.kept[place].touches) == 1]
            name = self.rules.name_of(byte)
            assert len(surely) <= stats["class_blocks"].get(name, 0) <= len(perhaps)
            least, most = (sum(sizes[place] for place in some) for some in (surely, perhaps))
            assert least <= stats["class_bytes"].get(name, 0) <= most

    def teardown(self) -> None:
        self.node.close()
        shutil.rmtree(self.path)

    # --- the model ----------------------------------------------------------------------------------------------------

    def _settle(self, place: int, outcome: PutOutcome, traffic_class: int, exact: bool) -> None:
        now_s = int(self.clock.now_s())
        rule = self.rules.by_byte(traffic_class)
        is_choosy = rule is not None and rule.admission == SECOND_TOUCH
        if outcome is PutOutcome.DECLINED:
            assert is_choosy
            assert place not in self.offered
            self.offered.add(place)
        elif outcome is PutOutcome.STORED:
            assert not is_choosy or place in self.offered or place in self.kept
            pinned = any(pin.key == self.names[place].key for pin in self.node.pins())
            self.kept[place] = Kept(exact, traffic_class, now_s, {traffic_class: now_s}, pinned)
        elif outcome is PutOutcome.TOUCHED:
            assert place in self.kept
            assert self.kept[place].exact or not exact
            self._touch(place, traffic_class)
        elif outcome is PutOutcome.REPLACED:
            assert exact
            assert not self.kept[place].exact
            self.kept[place].exact = True
            self.kept[place].class_byte, self.kept[place].written_s = traffic_class, int(self.clock.now_s())
            self._touch(place, traffic_class)
        else:
            assert outcome is PutOutcome.REFUSED

    def _blocks(self, where: list[int], exact: bool) -> list[BlockPut]:
        flags = 0 if exact else FLAG_APPROXIMATE
        return [BlockPut(self.names[n], BLOCK_TOKENS, bytes_of(self.names[n], exact), flags) for n in where]

    def _begin(self, traffic_class: TrafficClass, chance: Random) -> dict[Shard, deque[Step]]:
        """Lines of puts, by shard, mostly of what is not stored; what cannot go beside those before is left out."""
        lines: defaultdict[Shard, deque[Step]] = defaultdict(deque)
        held = {info.key for info in self.node.scan()[0]}
        free = [place for place, name in enumerate(self.names) if name.key not in held]
        chance.shuffle(free)
        for number in range(UNDER_WAY_MAX):
            where = free[4 * number : 4 * number + 4] if chance.random() < 0.9 else chance.sample(range(NAMES), 3)
            exact = chance.random() < 0.5
            blocks = self._blocks(where, exact)
            batch = incoming(blocks, "none", None)
            for shard, positions in self.node._by_home(batch, blocks).items():
                part, alone = batch.pick(positions), not lines[shard]
                now_s = int(self.clock.now_s())
                put = shard.puts._writer.begin(self.space, part, traffic_class, now_s, for_disk=False, alone=alone)
                if put is not None:
                    mine = [where[at] for at in positions[: len(put.batch.blocks)]]
                    lines[shard].append(Step(mine, traffic_class, exact, shard, put))
        return lines

    def _write(self, step: Step, budget: int | None) -> None:
        """``budget``: bytes that the disk takes before it fails; None: it does not."""
        if budget is not None:
            self.files.errors["pwritev"], self.files.write_budget = errno.EIO, budget
        step.put.write()
        step.is_written = True
        self.files.errors.clear()
        self.files.write_budget = None

    def _end(self, step: Step) -> bool:
        """Whether it counts; else it is to be put again."""
        outcomes = step.shard.puts._writer.end(step.put)
        for place, outcome in zip(step.where, outcomes or [], strict=outcomes is not None):
            self._settle(place, outcome, step.traffic_class, step.exact)
        return outcomes is not None

    def _kill(self, lines: dict[Shard, deque[Step]]) -> None:
        """What was under way is adopted where it is found: nobody was told of it."""
        self.node.abandon()
        self._open()
        for step in (step for line in lines.values() for step in line):
            for place in self._present(step.where):
                self._settle(place, PutOutcome.STORED, step.traffic_class, step.exact)

    def _confirm_all(self) -> None:
        """Beside puts the disk takes what was acknowledged before."""
        assert all(self.node.confirm(self.space, [name.key for name in self.names]))

    def _touch(self, place: int, traffic_class: int) -> None:
        touches = self.kept[place].touches
        touches[traffic_class] = max(touches.get(traffic_class, 0), int(self.clock.now_s()))

    def _is_aged(self, kept: Kept, written_s: float) -> bool:
        """Whether a block of its class that was written then is as old as it may become."""
        rule = self.rules.by_byte(kept.class_byte)
        return rule is not None and rule.max_age_s > 0 and self.clock.now_s() >= written_s + rule.max_age_s

    def _latest_s(self, kept: Kept) -> int:
        return max(at_s + self.rules.keep_for_s(byte) for byte, at_s in kept.touches.items())

    def _earliest_s(self, kept: Kept) -> float:
        """A touch that gains less than 1/1024 of keep_for may be forgone."""
        return max(at_s + self.rules.keep_for_s(byte) * (1 - 1 / 1024) for byte, at_s in kept.touches.items())

    def _present(self, where: range | list[int]) -> list[int]:
        names = [self.names[place] for place in where]
        presence = self.node.lookup(self.space, names).presence
        return [place for place, found in zip(where, presence, strict=True) if found == Presence.PRESENT]

    def _segments(self) -> list:  # type: ignore[type-arg]
        return [item for shard in self.node._shards for item in shard._ledger.segments.segments.values()]

    def _reopen(self, *, lose_index: bool) -> None:
        before = {info.key: info.keep_until_s for info in self.node.scan()[0]}
        present = self._present(range(NAMES))
        self.node.abandon()
        if lose_index:
            shutil.rmtree(self.path / f"volume-{self.volumes - 1}" / "index")
        self._open()
        after = {info.key: info.keep_until_s for info in self.node.scan()[0]}
        assert after.keys() == before.keys()
        assert all(after[key] <= before[key] for key in before)
        if not lose_index:
            assert after == before
            assert self._present(range(NAMES)) == present

    def _open(self) -> None:
        self.offered.clear()
        self.node = self._new_node(None)

    def _new_node(self, rules: ClassRules | None) -> Node:
        capacity_bytes = CAPACITY * self.volumes
        return open_node(
            self.path,
            self.clock,
            capacity_bytes=capacity_bytes,
            rules=rules,
            directories=self.volumes,
            files=self.files,
        )


class TwoVolumes(NodeModel):
    """The same over two volumes, of which one may lose its index."""

    volumes = 2


TestNodeModel = NodeModel.TestCase
TestNodeModel.settings = settings(max_examples=EXAMPLES or 8, stateful_step_count=25, deadline=None)
TestTwoVolumes = TwoVolumes.TestCase
TestTwoVolumes.settings = settings(max_examples=EXAMPLES or 5, stateful_step_count=25, deadline=None)


@settings(max_examples=EXAMPLES or 6, deadline=None)
@given(st.lists(st.tuples(classes, st.integers(0, 255), faults), min_size=4, max_size=10))
def test_lines_of_puts_agree_with_the_model(rounds: list[tuple[TrafficClass, int, int | None]]) -> None:
    """Many lines of puts, with room for new blocks and a start from segments alone now and then."""
    model = NodeModel()
    try:
        for traffic_class, seed, fault in rounds:
            model.put_side_by_side(traffic_class, seed, fault)
            model.accounts_agree()
            if seed % 3 == 0 and model.kept:
                model.crash_and_lose_the_index()
            elif seed % 3 == 1:
                model.delete(list(range(seed % 2, NAMES, 2)))
            model.data_agrees()
        model.fsck()
        model.data_agrees()
    finally:
        model.teardown()
