"""The node as a state machine beside a dict: data and accounting, with crashes, torn tails and index loss as steps."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvstore.daemon.fsck import check
from kvstore.daemon.node import Node
from kvstore.keys import BlockName, SpaceId
from kvstore.limits import MIB
from kvstore.store import FLAG_APPROXIMATE, BlockPut, GetStatus, Pin, Presence, PutOutcome
from kvstore.testing import DAY_S, ManualClock
from kvstore.traffic import AGENT, CHAT, ClassRule, ClassRules, TrafficClass
from tests.support.nodes import disk_bytes, open_node
from tests.support.spaces import BLOCK_TOKENS, a_chain, a_space

CAPACITY = 9 * MIB
NAMES = 40
SIZES = (100, 60_000, 400_000)
OTHER = TrafficClass(40)
KEEP_DAYS = ((3, 7), (1, 7), (3, 2), (5, 30))

places = st.lists(st.integers(0, NAMES - 1), min_size=1, max_size=12, unique=True)
classes = st.sampled_from([AGENT, CHAT, OTHER])


def rules_of(days: tuple[int, int]) -> ClassRules:
    agent, chat = days
    return ClassRules((ClassRule(AGENT, "agent", agent * DAY_S, 100), ClassRule(CHAT, "chat", chat * DAY_S, 200)))


def bytes_of(name: BlockName, exact: bool) -> bytes:
    """Payload of a block: its length and content follow from its key."""
    size = SIZES[name.index % len(SIZES)]
    return ((name.key if exact else name.key[::-1]) * (size // 32 + 1))[:size]


@dataclass
class Kept:
    """What the model knows of an acknowledged block."""

    exact: bool
    touches: dict[int, int] = field(default_factory=dict)
    pinned: bool = False
    lapsed: bool = False
    """Its deadline was past once: it may be removed from then on, also if longer rules would revive it."""
    loose: bool = False
    """The index was lost, and touches with it: the deadline lies between that of the write and the model's."""


class NodeModel(RuleBasedStateMachine):
    """Invariant: an acknowledged block is byte-identical or a miss; a miss needs a reason that the model accepts."""

    def __init__(self) -> None:
        super().__init__()
        self.path = Path(tempfile.mkdtemp(prefix="node-model-"))
        self.clock = ManualClock()
        self.kept: dict[int, Kept] = {}
        self.gone: set[int] = set()
        self.rules = rules_of(KEEP_DAYS[0])
        self.node: Node = open_node(self.path, self.clock, capacity_bytes=CAPACITY, rules=self.rules)
        self.space: SpaceId = self.node.register_space(a_space())
        self.names = list(a_chain(self.space, NAMES).names)

    # --- steps --------------------------------------------------------------------------------------------------------

    @initialize()
    def begin(self) -> None:
        assert self.node.stats()["blocks"] == 0

    @rule(where=places, traffic_class=classes, exact=st.booleans(), disk=st.booleans())
    def put(self, where: list[int], traffic_class: TrafficClass, exact: bool, disk: bool) -> None:
        flags = 0 if exact else FLAG_APPROXIMATE
        blocks = [BlockPut(self.names[n], BLOCK_TOKENS, bytes_of(self.names[n], exact), flags) for n in where]
        outcomes = self.node.put(self.space, blocks, traffic_class=traffic_class, ack="disk" if disk else "os")
        for place, outcome in zip(where, outcomes, strict=True):
            self._settle(place, outcome, traffic_class, exact)

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
            self.gone.add(place)

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

    @rule(days=st.sampled_from([0.01, 0.5, 1.0, 2.5, 8.0]))
    def advance(self, days: float) -> None:
        self.clock.advance(days * DAY_S)

    @rule(days=st.sampled_from(KEEP_DAYS))
    def change_policy(self, days: tuple[int, int]) -> None:
        version = self.node.policy().version
        before = set(self._present(range(NAMES)))
        plan = self.node.set_policy(rules_of(days), "model", expected_version=version, apply=False)
        assert set(self._present(range(NAMES))) == before
        effect = self.node.set_policy(rules_of(days), "model", expected_version=version, apply=True)
        lost = before - set(self._present(range(NAMES)))
        assert plan.removed == effect.removed
        assert effect.blocks == len(lost)
        self.rules = rules_of(days)

    @rule()
    def sweep(self) -> None:
        now_s = self.clock.now_s()
        infos = self.node.scan()[0]
        expired = [info for info in infos if not info.pinned and info.keep_until_s <= now_s]
        before = self._present(range(NAMES))
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
        report = check(self.path / "volume-0")
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
            elif kept is not None:
                kept.lapsed |= now_s >= self._earliest_s(kept)
                accepted = presence == Presence.EVICTED or kept.loose or kept.lapsed
                assert accepted, f"block {place} is gone without a reason: {presence}"
                assert not kept.pinned, f"block {place} is pinned and gone"

    @invariant()
    def accounts_agree(self) -> None:
        infos = self.node.scan()[0]
        books = self.node.accounting()[0]
        live = sum(-(-(info.stored_bytes + 256) // 4096) * 4096 for info in infos)
        assert books["live_bytes"] == live
        assert books["dead_bytes"] >= 0
        parts = books["live_bytes"] + books["dead_bytes"] + books["free_bytes"] + books["page_bytes"]
        assert parts == books["total_bytes"]
        assert disk_bytes(self.path) <= CAPACITY
        assert self.node.stats()["leases"] == 0

    def teardown(self) -> None:
        self.node.close()
        shutil.rmtree(self.path)

    # --- the model ----------------------------------------------------------------------------------------------------

    def _settle(self, place: int, outcome: PutOutcome, traffic_class: int, exact: bool) -> None:
        now_s = int(self.clock.now_s())
        if outcome is PutOutcome.STORED:
            pinned = any(pin.key == self.names[place].key for pin in self.node.pins())
            self.kept[place] = Kept(exact, {traffic_class: now_s}, pinned)
        elif outcome is PutOutcome.TOUCHED:
            assert place in self.kept
            assert self.kept[place].exact or not exact
            self._touch(place, traffic_class)
        elif outcome is PutOutcome.REPLACED:
            assert exact
            assert not self.kept[place].exact
            self.kept[place].exact = True
            self._touch(place, traffic_class)
        else:
            assert outcome is PutOutcome.REFUSED

    def _touch(self, place: int, traffic_class: int) -> None:
        touches = self.kept[place].touches
        touches[traffic_class] = max(touches.get(traffic_class, 0), int(self.clock.now_s()))

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
        return list(self.node._shards[0]._ledger.segments.segments.values())

    def _reopen(self, *, lose_index: bool) -> None:
        before = {info.key: info.keep_until_s for info in self.node.scan()[0]}
        present = self._present(range(NAMES))
        self.node.abandon()
        if lose_index:
            shutil.rmtree(self.path / "volume-0" / "index")
        self._open()
        after = {info.key: info.keep_until_s for info in self.node.scan()[0]}
        assert after.keys() == before.keys()
        assert all(after[key] <= before[key] for key in before)
        if not lose_index:
            assert after == before
            assert self._present(range(NAMES)) == present

    def _open(self) -> None:
        self.node = open_node(self.path, self.clock, capacity_bytes=CAPACITY, rules=None)


TestNodeModel = NodeModel.TestCase
TestNodeModel.settings = settings(max_examples=20, stateful_step_count=25, deadline=None)
