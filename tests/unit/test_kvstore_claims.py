"""Purges by class and by age: what goes, what other classes keep, and what is left of either after a kill."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvstore.daemon.files import Files
from kvstore.daemon.fsck import check
from kvstore.daemon.index import Index
from kvstore.errors import Held, StoreError
from kvstore.keys import BlockName, SpaceId, tenant_salt
from kvstore.limits import MIB
from kvstore.purges import PurgeOrder, order_from_json, order_to_json
from kvstore.store import GetStatus, Pin, Presence
from kvstore.testing import TEST_RULES, ManualClock
from kvstore.traffic import AGENT, CHAT, ClassRules
from tests.support.nodes import open_node, payload_of, puts_of, read
from tests.support.spaces import a_chain, a_space

SIZE = 20_000
DAY_S = 86_400
ACME = a_space(tenant_salt=tenant_salt("acme"))
OTHER = a_space(tenant_salt=tenant_salt("other"))


def by_class(class_byte: int, *spaces: SpaceId, erase: bool = True) -> PurgeOrder:
    return PurgeOrder("ab" * 16, spaces, None, 0, class_byte=class_byte, erase=erase)


def by_age(written_until_s: float, *spaces: SpaceId, erase: bool = True) -> PurgeOrder:
    return PurgeOrder("cd" * 16, spaces, None, 0, written_until_s=int(written_until_s), erase=erase)


class Mixed:
    """Blocks of one class, of another, written by one and used by the other, and the other way round."""

    def __init__(self, path: Path, files: Files | None = None, rules: ClassRules = TEST_RULES) -> None:
        self.path, self.clock, self.rules = path, ManualClock(), rules
        self.node = open_node(path, self.clock, files=files, rules=rules)
        self.space = self.node.register_space(ACME)
        self.agents = self.put(1, AGENT)
        self.chats = self.put(2, CHAT)
        self.begun_by_agents = self.put(3, AGENT)
        self.begun_by_chats = self.put(4, CHAT)
        self.clock.advance(60)
        for names, user in ((self.begun_by_agents, CHAT), (self.begun_by_chats, AGENT)):
            assert self.node.touch(self.space, names, traffic_class=user) == len(names)
        self.clock.advance(60)

    def put(self, seed: int, traffic_class: Any, blocks: int = 6) -> list[BlockName]:
        names = list(a_chain(self.space, blocks, seed=seed).names)
        self.node.put(self.space, puts_of(names, SIZE), traffic_class=traffic_class)
        return names

    def whole(self, names: list[BlockName]) -> bool:
        """Whether every block is read as it was written."""
        return all(read(self.node, self.space, name, SIZE) == (GetStatus.OK, payload_of(name, SIZE)) for name in names)

    def gone(self, names: list[BlockName]) -> bool:
        return Presence.PRESENT not in self.node.lookup(self.space, names).presence.tolist()

    def reopen(self, *, kill: bool = False, without_index: bool = False) -> None:
        self.node.abandon() if kill else self.node.close()
        if without_index:
            Index.destroy(self.path / "volume-0" / "index")
        self.node = open_node(self.path, self.clock, rules=self.rules)

    def left(self, order: PurgeOrder) -> int:
        return self.node.leftovers(order, {"": int(self.clock.now_s())}).answers[""].records

    def is_as_ordered(self) -> bool:
        """After a purge of the agents: theirs are gone, what they shared is chat's."""
        shared = [*self.begun_by_agents, *self.begun_by_chats]
        touched = {block.key: set(block.touches) for block in self.node.scan(self.space)[0]}
        return (
            self.gone(self.agents)
            and self.whole([*self.chats, *shared])
            and all(touched[name.key] == {CHAT} for name in [*self.chats, *shared])
        )


@pytest.fixture
def mixed(tmp_path: Path) -> Iterator[Mixed]:
    mixed = Mixed(tmp_path)
    yield mixed
    mixed.node.close()


@pytest.mark.parametrize("erase", [False, True])
@pytest.mark.parametrize("somewhere", [False, True])
def test_a_class_goes_with_what_it_alone_uses(mixed: Mixed, erase: bool, somewhere: bool) -> None:
    """What others use stays for them, byte for byte, without the class's promise; also after a rebuild of the index."""
    order = by_class(AGENT, *([mixed.space] if somewhere else []), erase=erase)
    report = mixed.node.purge(order).answers[""]
    assert (report.done, report.blocks, report.shared) == (True, 6, 12)
    assert mixed.is_as_ordered()
    assert (mixed.left(order) == 0) is erase
    mixed.reopen(without_index=True)
    assert mixed.is_as_ordered()
    mixed.clock.advance(6 * DAY_S)
    mixed.node.sweep(apply=True)
    assert mixed.whole([*mixed.chats, *mixed.begun_by_agents, *mixed.begun_by_chats])
    mixed.clock.advance(DAY_S)
    assert not mixed.node.scan(mixed.space)[0] or mixed.node.sweep(apply=True).segments_freed
    assert mixed.node.lookup(mixed.space, mixed.chats).prefix_blocks() == 0


def test_the_longer_promise_of_a_class_goes_with_it(mixed: Mixed) -> None:
    """Chat keeps a week; without its claim what agents began is theirs for three days."""
    mixed.node.purge(by_class(CHAT))
    assert mixed.gone(mixed.chats)
    mixed.clock.advance(3 * DAY_S - 120)
    assert mixed.whole(mixed.begun_by_chats)
    mixed.clock.advance(120)
    for names in (mixed.begun_by_agents, mixed.begun_by_chats):
        assert set(mixed.node.lookup(mixed.space, names).presence.tolist()) <= {Presence.EXPIRED, Presence.NEVER}


def test_no_record_of_a_class_is_left_to_a_raw_scan(mixed: Mixed) -> None:
    """Neither of what it wrote nor of what it used, living or dead; the bytes of its own blocks are gone."""
    order = by_class(AGENT)
    assert mixed.left(order) == 12, "the agents' own, and what they began"
    mixed.node.purge(order)
    assert mixed.left(order) == 0
    data = [path.read_bytes() for path in (mixed.path / "volume-0" / "segments").iterdir()]
    for name in mixed.agents:
        assert not any(payload_of(name, SIZE)[8000:8100] in one or name.key in one for one in data)
    mixed.node.close()
    assert check(mixed.path / "volume-0").clean
    mixed.node = open_node(mixed.path, mixed.clock)


def test_what_the_class_stores_later_is_kept(mixed: Mixed) -> None:
    """An order is carried out once."""
    order = by_class(AGENT)
    report = mixed.node.purge(order).answers[""]
    mixed.clock.advance(10)
    later = mixed.put(1, AGENT)
    assert mixed.node.purge(order).answers[""] == report
    mixed.reopen()
    assert mixed.whole(later)
    assert mixed.node.leftovers(order, {"": report.began_s}).answers[""].records == 0


def test_a_class_is_purged_in_the_spaces_that_are_named(mixed: Mixed) -> None:
    other = mixed.node.register_space(OTHER)
    theirs = list(a_chain(other, 4, seed=8).names)
    mixed.node.put(other, puts_of(theirs, SIZE), traffic_class=AGENT)
    order = by_class(AGENT, other)
    assert mixed.node.purge(order).answers[""].blocks == 4
    assert mixed.whole(mixed.agents)
    assert mixed.left(order) == 0
    assert mixed.left(by_class(AGENT)) > 0


def test_a_class_that_no_rule_names_can_be_purged(mixed: Mixed) -> None:
    """Its blocks are kept for the longest promise until somebody says so."""
    strange = mixed.put(5, 77)
    assert mixed.node.purge(by_class(77)).answers[""].blocks == 6
    assert mixed.gone(strange)
    assert mixed.whole(mixed.agents)


def test_a_legal_hold_refuses_the_purge_of_its_class_and_follows_a_shared_block(mixed: Mixed) -> None:
    """Nothing is removed where the class alone used a held block; a shared one moves with its hold and its pin."""
    hold = Pin(mixed.space, mixed.agents[0].key, "court", "case 7", hold=True)
    mixed.node.pin([hold, Pin(mixed.space, mixed.begun_by_agents[0].key, "court", "case 8", hold=True)])
    with pytest.raises(Held, match="court"):
        mixed.node.purge(by_class(AGENT))
    assert mixed.node.purges() == []
    assert mixed.whole(mixed.agents)
    mixed.node.unpin(mixed.space, [hold.key], holds=True)
    assert mixed.node.purge(by_class(AGENT)).answers[""].done
    assert mixed.is_as_ordered()
    mixed.clock.advance(30 * DAY_S)
    mixed.node.sweep(apply=True)
    assert mixed.whole(mixed.begun_by_agents[:1])


def test_a_class_with_a_maximum_age_takes_what_it_wrote_along(tmp_path: Path) -> None:
    """Others may not keep longer what the class had to give up; what they wrote themselves they keep."""
    rules = ClassRules(
        tuple(replace(rule, max_age_s=20 * DAY_S) if rule.class_byte == AGENT else rule for rule in TEST_RULES.rules)
    )
    mixed = Mixed(tmp_path, rules=rules)
    mixed.node.purge(by_class(AGENT))
    assert mixed.gone([*mixed.agents, *mixed.begun_by_agents])
    assert mixed.whole([*mixed.chats, *mixed.begun_by_chats])
    mixed.node.close()


@pytest.mark.parametrize("erase", [False, True])
def test_what_is_old_goes_and_what_is_younger_stays(mixed: Mixed, erase: bool) -> None:
    """By when it was written, whoever used it since; also what is dead already, but no younger dead block."""
    mixed.clock.advance(2 * DAY_S)
    young = mixed.put(7, AGENT)
    order = by_age(mixed.clock.now_s() - DAY_S, erase=erase)
    report = mixed.node.purge(order).answers[""]
    assert (report.blocks, report.shared) == (24, 0)
    for names in (mixed.agents, mixed.chats, mixed.begun_by_agents, mixed.begun_by_chats):
        assert mixed.gone(names)
    assert mixed.whole(young)
    assert (mixed.left(order) == 0) is erase
    mixed.reopen(without_index=True)
    assert mixed.whole(young)
    assert mixed.node.lookup(mixed.space, mixed.agents).prefix_blocks() == 0


class Stubborn(Files):
    """Dies after so many writes and erasures."""

    def __init__(self, allowed: int) -> None:
        self.allowed = allowed

    def _count(self) -> None:
        self.allowed -= 1
        if self.allowed < 0:
            raise OSError(5, "input/output error")

    def erase(self, fd: int, offset: int, count: int, *, overwrite: bool) -> None:
        self._count()
        super().erase(fd, offset, count, overwrite=overwrite)

    def write(self, fd: int, parts: Any, offset: int) -> None:
        self._count()
        super().write(fd, parts, offset)


@pytest.mark.parametrize("allowed", [0, 1, 5, 8, 13, 20, 26])
def test_a_purge_by_class_that_was_killed_is_completed_before_anybody_is_served(tmp_path: Path, allowed: int) -> None:
    """Whatever step it had come to: no shared block is lost, none of the class's own is left."""
    files = Stubborn(MIB)
    mixed = Mixed(tmp_path, files)
    files.allowed = allowed
    with pytest.raises(StoreError):
        mixed.node.purge(by_class(AGENT))
    assert [report.done for _, report in mixed.node.purges()] == [False]
    mixed.reopen(kill=True)
    assert [report.done for _, report in mixed.node.purges()] == [True]
    assert mixed.is_as_ordered()
    assert mixed.left(by_class(AGENT)) == 0
    mixed.node.close()


@pytest.mark.parametrize("allowed", [0, 3, 11])
def test_a_purge_by_age_that_was_killed_is_completed_and_takes_nothing_younger(tmp_path: Path, allowed: int) -> None:
    """The order says until when, and so does the process that comes days later."""
    files = Stubborn(MIB)
    mixed = Mixed(tmp_path, files)
    mixed.clock.advance(DAY_S)
    young = mixed.put(7, CHAT)
    order = by_age(mixed.clock.now_s() - 1000)
    files.allowed = allowed
    with pytest.raises(StoreError):
        mixed.node.purge(order)
    mixed.clock.advance(2 * DAY_S)
    mixed.reopen(kill=True)
    assert [report.done for _, report in mixed.node.purges()] == [True]
    assert mixed.whole(young)
    assert mixed.node.lookup(mixed.space, mixed.chats).prefix_blocks() == 0
    assert mixed.left(order) == 0
    mixed.node.close()


def test_a_full_volume_keeps_what_others_use_as_far_as_there_is_room(tmp_path: Path) -> None:
    """Writing shared blocks again may cost others their place, as any put does; nothing is served wrongly."""
    clock = ManualClock()
    node = open_node(tmp_path, clock, capacity_bytes=16 * MIB)
    space = node.register_space(ACME)
    names = list(a_chain(space, 600, seed=1).names)
    for begin in range(0, 600, 50):
        node.put(space, puts_of(names[begin : begin + 50], SIZE), traffic_class=AGENT)
    node.touch(space, names, traffic_class=CHAT)
    before = node.lookup(space, names).presence.tolist().count(Presence.PRESENT)
    report = node.purge(by_class(AGENT)).answers[""]
    assert report.done
    assert report.blocks == 0
    found = [name for name in names if read(node, space, name, SIZE) == (GetStatus.OK, payload_of(name, SIZE))]
    assert before / 2 < len(found) <= before
    assert {class_byte for block in node.scan(space)[0] for class_byte in block.touches} == {CHAT}
    assert node.leftovers(by_class(AGENT), {"": int(clock.now_s())}).answers[""].records == 0
    node.close()
    assert check(tmp_path / "volume-0").clean


def test_orders_by_part_are_checked_and_refused_by_those_who_do_not_know_them() -> None:
    """One kind of part, no keys; what an earlier program would read of it is no purge of everything."""
    space = SpaceId(bytes(32))
    for order in (by_class(AGENT), by_age(5, space), by_class(16, space, erase=False)):
        assert order_from_json(order_to_json(order)) == order
        row = order_to_json(order)
        with pytest.raises(ValueError, match="fromhex"):
            [bytes.fromhex(key) for key in row["keys"]]
    for changes in ({"class_byte": 0}, {"class_byte": 256}, {"written_until_s": 1}, {"keys": (bytes(32),)}):
        with pytest.raises(ValueError, match="purge"):
            replace(by_class(AGENT), **changes)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="unknown here"):
        order_from_json(order_to_json(by_class(AGENT)) | {"keys": {"model": "x"}})
