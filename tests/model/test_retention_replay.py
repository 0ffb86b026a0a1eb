"""The simulation beside two others: one of plain dictionaries, and a real node on the same clock."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.capacity import blocks_max
from kvstore.chains import in_chain_order
from kvstore.daemon.node import Node
from kvstore.errors import CapacityProtected
from kvstore.keys import BlockName, SpaceId, TokenChain, space_id
from kvstore.limits import BATCH_BLOCKS_MAX, MIB
from kvstore.placement import Placement
from kvstore.reclaim import Action, SegmentUsage, choose_victim, sweep_action
from kvstore.store import BlockPut
from kvstore.testing import T0_S, ManualClock
from kvstore.traffic import (
    AGENT,
    ALWAYS,
    CHAT,
    FIXED,
    KEEPS,
    SECOND_TOUCH,
    SLIDING,
    ClassRule,
    ClassRules,
    TrafficClass,
)
from retention.replay import Outcome, Replay, Setting, owners_of, replay
from retention.workload import Request, Workload
from tests.support.nodes import open_node
from tests.support.spaces import BLOCK_TOKENS, a_space
from tests.support.traffic import made_up_workload

HOUR_S, DAY_S = 3600, 86_400


def rules(
    agent_s: int,
    chat_s: int,
    floor_bytes: int = 0,
    *,
    budget_bytes: int = 0,
    second: bool = False,
    keep: str = SLIDING,
    aged: bool = False,
    ceiling_share: int = 0,
) -> ClassRules:
    """``budget_bytes``: what agents may write a day. ``second``: chats are stored from the second touch. ``keep``: of
    agents, and with ``aged`` for twice their promise at most.
    """
    admission, max_age_s = SECOND_TOUCH if second else ALWAYS, 2 * agent_s if aged else 0
    return ClassRules(
        (
            ClassRule(AGENT, "agent", agent_s, 100, write_budget_bytes=budget_bytes, keep=keep, max_age_s=max_age_s),
            ClassRule(
                CHAT,
                "chat",
                chat_s,
                priority=200,
                floor_bytes=floor_bytes,
                admission=admission,
                ceiling_share=ceiling_share,
            ),
        )
    )


# --- a simulation that anybody can check: dictionaries and loops ----------------------------------------------


@dataclass
class Cell:
    """A segment: what was written to it, in order; a record is dead once its block lies elsewhere."""

    number: int
    class_byte: int
    day: int
    begun: int
    created_s: int
    records: list[int] = field(default_factory=list)


HAPPENINGS = ("stored", "refused", "declined", "rewritten", "evicted", "expired")


@dataclass
class PlainNode:
    setting: Setting
    before: list[int]
    cells: dict[int, Cell | None] = field(default_factory=dict)
    free: list[int] = field(default_factory=list)
    opened: dict[tuple[int, int], Cell] = field(default_factory=dict)
    where: dict[int, tuple[Cell, int]] = field(default_factory=dict)
    until_s: dict[int, int] = field(default_factory=dict)
    begun: int = 0
    offered: set[int] = field(default_factory=set)
    spent: dict[tuple[int, int], int] = field(default_factory=dict)
    touched: set[tuple[int, int]] = field(default_factory=set)
    happened: dict[str, int] = field(default_factory=lambda: dict.fromkeys(HAPPENINGS, 0))

    def alive(self, block: int, now_s: float) -> bool:
        return block in self.where and self.until_s[block] > now_s

    def touch(self, block: int, class_byte: int, now_s: int) -> None:
        keep_s = self.setting.rules.keep_for_s(class_byte)
        rule = self.setting.rules.by_byte(class_byte)
        assert rule is not None
        if rule.keep == FIXED and (block, class_byte) in self.touched:
            return
        self.touched.add((block, class_byte))
        until_s = min(now_s + keep_s, self.end_s(self.where[block][0]))
        gain_s = until_s - self.until_s[block]
        if gain_s > 0 and gain_s * 1024 >= keep_s:
            self.until_s[block] = until_s

    def max_age_s(self, class_byte: int) -> int:
        rule = self.setting.rules.by_byte(class_byte)
        assert rule is not None
        return rule.max_age_s

    def end_s(self, cell: Cell) -> int:
        max_age_s = self.max_age_s(cell.class_byte)
        return cell.created_s + max_age_s if max_age_s else 2**62

    def put(self, blocks: list[int], class_byte: int, now_s: int) -> None:
        rule = self.setting.rules.by_byte(class_byte)
        assert rule is not None
        spent = self.spent.get((class_byte, now_s // DAY_S), 0)
        kept = []
        for block in blocks:
            declined = False
            if block not in self.where:
                if rule.admission == SECOND_TOUCH and block not in self.offered:
                    self.offered.add(block)
                    declined = True
                elif rule.write_budget_bytes:
                    spent += self.setting.record_bytes
                    declined = spent > rule.write_budget_bytes
            self.happened["declined"] += declined
            kept += [] if declined else [block]
        fresh = {block for block in kept if block not in self.where}
        self.store(kept, class_byte, now_s)
        stored_bytes = self.setting.record_bytes * len(fresh & set(self.where))
        day = (class_byte, now_s // DAY_S)
        self.spent[day] = self.spent.get(day, 0) + stored_bytes

    def store(self, blocks: list[int], class_byte: int, now_s: int) -> None:
        pending = [block for block in blocks if not self.alive(block, now_s)]
        missing = set(pending)
        for block in blocks:
            if block not in missing:
                self.touch(block, class_byte, now_s)
            elif block in self.where:
                self.drop(block, "expired")
        limit = blocks_max(self.setting.layout.index_budget_bytes)
        if pending and not self.make_room(lambda: len(self.where) + len(pending) <= limit, now_s):
            self.happened["refused"] += len(pending)
            return
        until_s = now_s + self.setting.rules.keep_for_s(class_byte)
        while pending:
            cell = self.open_for(class_byte, until_s // DAY_S, now_s)
            while cell is None:
                if not self.make_room(lambda: self.room() > 1, now_s):
                    self.happened["refused"] += len(pending)
                    return
                day = until_s // DAY_S
                cell = self.open_for(class_byte, day, now_s) or self.begin(class_byte, day, now_s)
            self.write(cell, pending[0])
            self.touched.add((pending[0], class_byte))
            self.until_s[pending.pop(0)] = until_s
            self.happened["stored"] += 1

    def write(self, cell: Cell, block: int) -> None:
        self.where[block] = (cell, len(cell.records))
        cell.records.append(block)

    def drop(self, block: int, why: str) -> None:
        del self.where[block], self.until_s[block]
        self.touched = {pair for pair in self.touched if pair[0] != block}
        self.happened[why] += 1

    def room(self) -> int:
        return len(self.free) + self.setting.layout.segments_max - len(self.cells)

    def open_for(self, class_byte: int, day: int, now_s: int) -> Cell | None:
        cell = self.opened.get((class_byte, day))
        if cell is None:
            return None
        max_age_s = self.max_age_s(class_byte)
        too_old = max_age_s and now_s - cell.created_s >= min(HOUR_S, max_age_s // 16)
        if too_old or len(cell.records) == self.setting.slots:
            del self.opened[class_byte, day]
            return None
        return cell

    def begin(self, class_byte: int, day: int, now_s: int) -> Cell:
        number = self.free.pop() if self.free else len(self.cells) + 1
        self.begun += 1
        cell = self.cells[number] = Cell(number, class_byte, day, self.begun, now_s)
        open_max = max(2, self.setting.layout.segments_max // 8)
        longest = list(self.opened)[: max(0, len(self.opened) + 1 - open_max)]
        for key in list(self.opened):
            if key in longest or (key[0] == class_byte and key[1] < day):
                del self.opened[key]
        self.opened[class_byte, day] = cell
        return cell

    def held(self, cell: Cell) -> list[int]:
        return [block for at, block in enumerate(cell.records) if self.where.get(block) == (cell, at)]

    def usage(self, cell: Cell, now_s: int) -> SegmentUsage:
        held = self.held(cell)
        size = self.setting.record_bytes
        alive = sum(self.until_s[block] > now_s for block in held)
        promise_s = max((self.until_s[block] for block in held), default=0)
        used_bytes, alive_bytes = len(cell.records) * size, alive * size
        return SegmentUsage(
            cell.number,
            cell.class_byte,
            self.setting.layout.segment_bytes,
            used_bytes,
            alive_bytes,
            0,
            promise_s,
            cell.begun,
            busy=False,
            ages=self.max_age_s(cell.class_byte) > 0,
        )

    def make_room(self, enough: object, now_s: int) -> bool:
        assert callable(enough)
        stuck: set[int] = set()
        for _ in range(2 * len(self.cells) + 2):
            if enough():
                return True
            cells = [cell for cell in self.cells.values() if cell is not None and cell.number not in stuck]
            idle = [self.usage(cell, now_s) for cell in cells]
            step = choose_victim(idle, self.setting.rules.for_volume(self.setting.layout.capacity_bytes))
            if step is None:
                return False
            if not self.empty(step.segment, step.action, now_s):
                stuck.add(step.segment)
        return bool(enough())

    def empty(self, number: int, action: Action, now_s: int) -> bool:
        cell = self.cells[number]
        assert cell is not None
        if action is Action.MOVE_ALIVE and not self.move(cell, now_s):
            return False
        for block in self.held(cell):
            self.drop(block, "evicted" if self.until_s[block] > now_s else "expired")
        self.close(cell)
        self.cells[number] = None
        self.free.append(number)
        return True

    def close(self, cell: Cell) -> None:
        self.opened = {key: other for key, other in self.opened.items() if other is not cell}

    def move(self, cell: Cell, now_s: int) -> bool:
        self.close(cell)
        moving = [block for block in self.held(cell) if self.until_s[block] > now_s]
        day = max((self.until_s[block] for block in moving), default=0) // DAY_S
        for at in in_chain_order([(block, self.before[block]) for block in moving]):
            target = self.open_for(cell.class_byte, day, now_s)
            if target is None and self.room() > 0:
                target = self.begin(cell.class_byte, day, now_s)
            if target is None:
                return False
            self.write(target, moving[at])
            self.happened["rewritten"] += 1
        return True

    def sweep(self, now_s: int) -> None:
        cells = [cell for cell in self.cells.values() if cell is not None]
        due = [cell.number for cell in cells if not all(self.alive(block, now_s) for block in self.held(cell) or [-1])]
        for number in due:
            cell = self.cells[number]
            if cell is None:
                continue
            action = sweep_action(self.usage(cell, now_s), now_s)
            if action is None or not self.empty(cell.number, action, now_s):
                for block in self.held(cell):
                    if self.until_s[block] <= now_s:
                        self.drop(block, "expired")


class PlainStore:
    """Several plain nodes, and what a client does with them."""

    def __init__(self, workload: Workload, setting: Setting) -> None:
        assert setting.volumes == 1
        placement = Placement([f"node-{number}" for number in range(setting.nodes)])
        self.setting = setting
        self.owners = workload.owners(placement).tolist()
        self.nodes = [PlainNode(setting, workload.before.tolist()) for _ in range(setting.nodes)]
        self.next_sweep_s = int(workload.requests[0].at_s) + setting.sweep_every_s

    def advance(self, now_s: float) -> None:
        while self.next_sweep_s <= now_s:
            for node in self.nodes:
                node.sweep(self.next_sweep_s)
            self.next_sweep_s += self.setting.sweep_every_s

    def request(self, request: Request) -> int:
        blocks, now_s = request.blocks().tolist(), int(request.at_s)
        hits = 0
        while hits < len(blocks) and self.nodes[self.owners[blocks[hits]]].alive(blocks[hits], request.at_s):
            hits += 1
        for block in blocks[:hits]:
            self.nodes[self.owners[block]].touch(block, request.class_byte, now_s)
        for number, node in enumerate(self.nodes):
            owned = [block for block in blocks[hits:] if self.owners[block] == number]
            for begin in range(0, len(owned), BATCH_BLOCKS_MAX):
                node.put(owned[begin : begin + BATCH_BLOCKS_MAX], request.class_byte, now_s)
        return hits


def totals(outcome: Outcome) -> dict[str, int]:
    counts = outcome.counts_of()
    return {name: getattr(counts, name) for name in HAPPENINGS}


@settings(deadline=None, max_examples=25)
@given(
    seed=st.integers(0, 2**32),
    nodes=st.sampled_from([1, 1, 3]),
    payload_bytes=st.sampled_from([3000, 60_000, 200_000]),
    capacity_mib=st.sampled_from([8, 10, 24]),
    keeps=st.sampled_from([(5 * 60, HOUR_S), (3 * HOUR_S, HOUR_S), (DAY_S, 7 * DAY_S)]),
    floor_mib=st.sampled_from([0, 2, 20]),
    gap_s=st.sampled_from([10.0, 600.0, 20_000.0]),
    budget_bytes=st.sampled_from([0, 0, MIB]),
    second=st.booleans(),
    keep=st.sampled_from(KEEPS),
    aged=st.booleans(),
    ceiling_share=st.sampled_from([0, 0, 2500]),
)
def test_it_does_what_plain_dictionaries_do(
    seed: int,
    nodes: int,
    payload_bytes: int,
    capacity_mib: int,
    keeps: tuple[int, int],
    floor_mib: int,
    gap_s: float,
    budget_bytes: int,
    second: bool,
    keep: str,
    aged: bool,
    ceiling_share: int,
) -> None:
    """Hits of every request, and what was stored, refused, moved, evicted and expired, are the same block by block."""
    workload = made_up_workload(seed, requests=50, gap_s=gap_s)
    in_force = rules(
        *keeps,
        floor_mib * MIB,
        budget_bytes=budget_bytes,
        second=second,
        keep=keep,
        aged=aged,
        ceiling_share=ceiling_share,
    )
    setting = Setting(in_force, payload_bytes, capacity_mib * MIB, nodes, sweep_every_s=300)
    fast, plain = Replay(workload, setting), PlainStore(workload, setting)
    for request in workload.requests:
        fast.advance(request.at_s)
        plain.advance(request.at_s)
        assert fast.request(request) == plain.request(request)
    happened = totals(fast.finish())
    for name, count in happened.items():
        assert count == sum(node.happened[name] for node in plain.nodes), name
    for node in plain.nodes:
        held = np.array(list(node.where), dtype=np.int64)
        assert fast.shelf.until_s[held].tolist() == [node.until_s[block] for block in held.tolist()]


# --- a real node ----------------------------------------------------------------------------------------------


def names_of(space: SpaceId, workload: Workload, request: Request) -> list[BlockName]:
    """A chain whose tokens are the numbers of the prompt's prefixes: equal numbers, equal keys."""
    return list(TokenChain(space, BLOCK_TOKENS, np.repeat(request.blocks(), BLOCK_TOKENS).tolist()).names)


def drive(node: Node, clock: ManualClock, workload: Workload, setting: Setting) -> list[int]:
    """What a worker does with each prompt, on the store's clock, with sweeps at their times; hits by request."""
    space = node.register_space(a_space())
    payload = bytes(setting.payload_bytes)
    next_sweep_s = int(workload.requests[0].at_s) + setting.sweep_every_s
    hits: list[int] = []
    for request in workload.requests:
        while next_sweep_s <= request.at_s:
            clock.advance(next_sweep_s - clock.now_s())
            node.sweep(apply=True)
            next_sweep_s += setting.sweep_every_s
        clock.advance(request.at_s - clock.now_s())
        names = names_of(space, workload, request)
        found = node.lookup(space, names).prefix_blocks() if names else 0
        traffic_class = TrafficClass(request.class_byte)
        node.touch(space, names[:found], traffic_class=traffic_class)
        rest = [BlockPut(name, BLOCK_TOKENS, payload) for name in names[found:]]
        for begin in range(0, len(rest), BATCH_BLOCKS_MAX):
            with contextlib.suppress(CapacityProtected):
                node.put(space, rest[begin : begin + BATCH_BLOCKS_MAX], traffic_class=traffic_class)
        hits.append(found)
    return hits


def place_alike(node: Node, workload: Workload, setting: Setting) -> None:
    """Let a node put each stripe where the simulation does; by itself it goes by the random names of its volumes."""
    owners = owners_of(workload, setting)
    space = space_id(a_space())
    homes: dict[bytes, int] = {}
    for request in workload.requests:
        for name, block in zip(names_of(space, workload, request), request.blocks().tolist(), strict=True):
            assert homes.setdefault(name.route, int(owners[block])) == owners[block]
    node._by_route = lambda route: homes[bytes(route)]  # type: ignore[method-assign]


@dataclass(frozen=True)
class Case:
    """One traffic and store. ``happens``: what must happen in it, so that it is compared."""

    seed: int
    happens: tuple[str, ...]
    requests: int = 120
    payload_bytes: int = 60_000
    keeps: tuple[int, int] = (DAY_S, 7 * DAY_S)
    gap_s: float = 2000.0
    capacity_bytes: int = 10 * MIB
    floor_bytes: int = 2 * MIB
    budget_bytes: int = 0
    second: bool = False
    keep: str = SLIDING
    aged: bool = False
    ceiling_share: int = 0
    sweep_every_s: int = 1800
    volumes: int = 1


CASES = {
    "segments run out": Case(1, ("evicted",), requests=50),
    "two volumes": Case(1, ("evicted",), 100, keeps=(HOUR_S, 7 * DAY_S), capacity_bytes=20 * MIB, volumes=2),
    "promises end": Case(2, ("evicted", "expired", "rewritten"), 70, keeps=(HOUR_S, 3 * HOUR_S), gap_s=1500.0),
    "some promises are longer": Case(
        6,
        ("expired", "rewritten"),
        requests=60,
        payload_bytes=20_000,
        keeps=(HOUR_S, 7 * DAY_S),
        gap_s=3000.0,
        capacity_bytes=32 * MIB,
        sweep_every_s=3 * HOUR_S,
    ),
    "the index runs out": Case(3, ("evicted",), requests=260, payload_bytes=3000, gap_s=600.0, sweep_every_s=DAY_S),
    "all is protected": Case(1, ("refused",), requests=50, payload_bytes=200_000, floor_bytes=10 * MIB),
    "blocks age": Case(2, ("evicted", "expired"), 100, keeps=(HOUR_S, 7 * DAY_S), gap_s=500.0, aged=True),
    "the dearer class has a ceiling": Case(1, ("evicted",), requests=50, floor_bytes=0, ceiling_share=2500),
    "promises are fixed": Case(2, ("evicted", "expired"), 70, keeps=(HOUR_S, 3 * HOUR_S), gap_s=1500.0, keep=FIXED),
    "writes are rationed": Case(
        5,
        ("declined", "expired"),
        requests=80,
        payload_bytes=3000,
        gap_s=20_000.0,
        budget_bytes=200_000,
        second=True,
        sweep_every_s=DAY_S,
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_it_does_what_a_real_node_does(tmp_path: Path, case: Case) -> None:
    """On one clock, with real files: hits of every request, and every counter of room, are the node's."""
    workload = made_up_workload(case.seed, requests=case.requests, gap_s=case.gap_s, begin_s=T0_S)
    rules_in_force = rules(
        *case.keeps,
        case.floor_bytes,
        budget_bytes=case.budget_bytes,
        second=case.second,
        keep=case.keep,
        aged=case.aged,
        ceiling_share=case.ceiling_share,
    )
    setting = Setting(
        rules_in_force,
        case.payload_bytes,
        case.capacity_bytes,
        sweep_every_s=case.sweep_every_s,
        volumes=case.volumes,
    )
    clock = ManualClock()
    node = open_node(
        tmp_path, clock, capacity_bytes=case.capacity_bytes, rules=rules_in_force, directories=case.volumes
    )
    place_alike(node, workload, setting)
    try:
        real_hits = drive(node, clock, workload, setting)
        stats = node.stats()
    finally:
        node.close()
    fast = Replay(workload, setting)
    hits: list[int] = []
    for request in workload.requests:
        fast.advance(request.at_s)
        hits.append(fast.request(request))
    assert hits == real_hits
    outcome = fast.finish()
    happened = totals(outcome)
    assert happened == {
        "stored": stats["puts"],
        "refused": stats["refused"],
        "declined": stats["declined"],
        "rewritten": stats["blocks_rewritten"],
        "evicted": stats["evicted"],
        "expired": stats["expired"],
    }
    assert outcome.segments_recycled == stats["segments_recycled"]
    assert sum(keeping.blocks_end for keeping in outcome.keeping.values()) == stats["blocks"]
    assert all(happened[name] for name in case.happens), happened


# --- figures that are known ------------------------------------------------------------------------------------


def test_unbounded_it_hits_whatever_was_asked_before() -> None:
    """With room for all and promises longer than the trace, each block is stored once and never goes."""
    workload = made_up_workload(7, requests=400, gap_s=1.0)
    outcome = replay(workload, Setting(rules(30 * DAY_S, 30 * DAY_S), 5000))
    seen: set[int] = set()
    hits = 0
    for request in workload.requests:
        hits += sum(block in seen for block in request.blocks().tolist())
        seen.update(request.blocks().tolist())
    assert outcome.traffic_of(None).hit_blocks == hits
    assert totals(outcome) == dict.fromkeys(HAPPENINGS, 0) | {"stored": workload.blocks}
