"""A purge with proof leaves no byte of what it names in the data directory, and touches nothing else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from kvstore.daemon.files import Files
from kvstore.daemon.fsck import check
from kvstore.daemon.node import Node
from kvstore.errors import StoreError
from kvstore.keys import BlockName, SpaceId, tenant_salt
from kvstore.limits import MIB
from kvstore.purges import Leftovers, PurgeOrder, digest_of_keys
from kvstore.store import FLAG_APPROXIMATE, GetStatus, Pin, Presence
from kvstore.testing import ManualClock
from kvstore.traffic import AGENT, CHAT
from tests.support.nodes import open_node, payload_of, puts_of, read
from tests.support.spaces import a_chain, a_space

SIZE = 20_000
ACME = a_space(tenant_salt=tenant_salt("acme"))
OTHER = a_space(tenant_salt=tenant_salt("other"))
DAY_S = 86_400


def order_of(*spaces: SpaceId, keys: tuple[BlockName, ...] | None = None, overwrite: bool = False) -> PurgeOrder:
    named = None if keys is None else tuple(name.key for name in keys)
    return PurgeOrder("ab" * 16, spaces, named, 0, "operator", "asked to", "acme", overwrite)


def chain_of(node: Node, space: SpaceId, blocks: int, seed: int) -> list[BlockName]:
    names = list(a_chain(space, blocks, seed=seed).names)
    node.put(space, puts_of(names, SIZE), traffic_class=AGENT)
    return names


def traces_of(space: SpaceId, names: list[BlockName], salt: bytes) -> list[bytes]:
    """What may be found of blocks: their names, and three places of their bytes."""
    traces = [bytes(space), salt]
    for name in names:
        payload = payload_of(name, SIZE)
        traces += [bytes(name.key), bytes(name.token_digest), payload[:48], payload[9000:9048], payload[-48:]]
    return traces


def found_on_disk(path: Path, traces: list[bytes]) -> int:
    """How many of the traces lie somewhere in the files under a directory."""
    data = [item.read_bytes() for item in path.rglob("*") if item.is_file()]
    return sum(any(trace in one for one in data) for trace in traces)


def restless(node: Node, clock: ManualClock, space: SpaceId) -> list[BlockName]:
    """A tenant's blocks in every condition: living, replaced, expired and recycled, evicted; all of their names."""
    early = chain_of(node, space, 30, seed=1)
    clock.advance(4 * DAY_S)
    node.sweep(apply=True)
    rough = list(a_chain(space, 5, seed=2).names)
    node.put(space, puts_of(rough, SIZE, FLAG_APPROXIMATE), traffic_class=CHAT)
    node.put(space, puts_of(rough, SIZE), traffic_class=CHAT)
    living = chain_of(node, space, 20, seed=3)
    gone = chain_of(node, space, 5, seed=4)
    node.delete(space, [name.key for name in gone])
    return [*early, *rough, *living, *gone]


@pytest.mark.parametrize("overwrite", [False, True])
def test_no_byte_of_a_tenant_is_left_in_the_directory(tmp_path: Path, overwrite: bool) -> None:
    """Payloads, keys, token digests, the space and the salt; also of blocks that were gone before. Others stay."""
    clock = ManualClock()
    node = open_node(tmp_path, clock)
    space, other = node.register_space(ACME), node.register_space(OTHER)
    names = restless(node, clock, space)
    theirs = chain_of(node, other, 20, seed=5)
    traces = traces_of(space, names, ACME.tenant_salt or b"")
    assert found_on_disk(tmp_path, traces) > len(names)
    report = node.purge(order_of(space, overwrite=overwrite)).answers[""]
    assert report.done
    assert report.blocks == 25
    assert report.records >= 25
    assert report.overwritten is overwrite
    assert found_on_disk(tmp_path, traces) == 0
    node.close()
    assert found_on_disk(tmp_path, traces) == 0
    assert check(tmp_path / "volume-0").clean
    node = open_node(tmp_path, clock)
    assert all(read(node, other, name, SIZE) == (GetStatus.OK, payload_of(name, SIZE)) for name in theirs)
    assert set(node.lookup(space, names).presence.tolist()) <= {Presence.PURGED, Presence.EXPIRED, Presence.NEVER}
    node.close()


def test_a_raw_scan_finds_what_a_deletion_leaves(tmp_path: Path) -> None:
    """Marked blocks are dead, and their bytes are there until they are erased."""
    clock = ManualClock()
    node = open_node(tmp_path, clock)
    space = node.register_space(ACME)
    names = chain_of(node, space, 8, seed=1)
    order = order_of(space)
    until_s = {"": int(clock.now_s())}
    assert node.leftovers(order, until_s).answers[""].living == 8
    assert node.leftovers(order, {"": until_s[""] - 1}).answers[""].records == 0
    node.delete(space, [name.key for name in names[:3]])
    left = node.leftovers(order, until_s).answers[""]
    assert (left.living, left.dead) == (5, 3)
    report = node.purge(order).answers[""]
    assert report.keys_digest == digest_of_keys(name.key for name in names)
    assert node.leftovers(order, until_s).answers[""] == Leftovers(segments=report.segments)
    node.close()


def test_headers_of_an_earlier_life_of_a_segment_are_found(tmp_path: Path) -> None:
    """A segment that was given back keeps its bytes until it is written again: a raw scan sees them."""
    clock = ManualClock()
    node = open_node(tmp_path, clock)
    space = node.register_space(ACME)
    chain_of(node, space, 10, seed=1)
    clock.advance(4 * DAY_S)
    assert node.sweep(apply=True).segments_freed
    until_s = {"": int(clock.now_s())}
    assert node.leftovers(order_of(space), until_s).answers[""].stale == 10
    node.purge(order_of(space))
    assert node.leftovers(order_of(space), until_s).answers[""].records == 0
    node.close()


def test_an_order_is_carried_out_once(tmp_path: Path) -> None:
    """Given again, it is answered from memory: what the tenant stored since is not its business."""
    clock = ManualClock()
    node = open_node(tmp_path, clock)
    space = node.register_space(ACME)
    chain_of(node, space, 3, seed=1)
    report = node.purge(order_of(space)).answers[""]
    clock.advance(5)
    node.register_space(ACME)
    later = chain_of(node, space, 3, seed=1)
    assert node.purge(order_of(space)).answers[""] == report
    assert read(node, space, later[0], SIZE)[0] is GetStatus.OK
    node.close()
    node = open_node(tmp_path, clock)
    assert node.purges() == [(order_of(space), report)]
    assert read(node, space, later[0], SIZE)[0] is GetStatus.OK
    node.close()


def test_some_keys_leave_no_byte_and_the_others_stay(tmp_path: Path) -> None:
    clock = ManualClock()
    node = open_node(tmp_path, clock)
    space = node.register_space(ACME)
    names = chain_of(node, space, 12, seed=1)
    node.pin([Pin(space, names[7].key, "owner", "reason")])
    report = node.purge(order_of(space, keys=tuple(names[6:]))).answers[""]
    assert report.blocks == 6
    assert found_on_disk(tmp_path / "volume-0" / "segments", traces_of(space, names[6:], b"")[2:]) == 0
    assert [read(node, space, name, SIZE)[0] for name in names[:6]] == [GetStatus.OK] * 6
    assert not node.pins()
    node.close()


class Stubborn(Files):
    """Refuses to erase after so many calls."""

    def __init__(self, allowed: int) -> None:
        self.allowed = allowed

    def erase(self, fd: int, offset: int, count: int, *, overwrite: bool) -> None:
        if not self.allowed:
            raise OSError(5, "input/output error")
        self.allowed -= 1
        super().erase(fd, offset, count, overwrite=overwrite)


@pytest.mark.parametrize("allowed", [0, 1, 7, 20])
def test_a_purge_that_was_killed_is_completed_before_anybody_is_served(tmp_path: Path, allowed: int) -> None:
    """Whatever step it had come to; and it is not called done before."""
    clock = ManualClock()
    files = Stubborn(allowed)
    node = open_node(tmp_path, clock, files=files)
    space = node.register_space(ACME)
    names = chain_of(node, space, 30, seed=1)
    with pytest.raises(StoreError):
        node.purge(order_of(space))
    assert [report.done for _, report in node.purges()] == [False]
    node.abandon()
    node = open_node(tmp_path, clock)
    ((_, report),) = node.purges()
    assert report.done
    assert found_on_disk(tmp_path, traces_of(space, names, ACME.tenant_salt or b"")) == 0
    node.close()


def test_a_purge_that_failed_is_tried_again_by_the_sweep(tmp_path: Path) -> None:
    """A disk that takes writes again needs no restart."""
    clock = ManualClock()
    files = Stubborn(2)
    node = open_node(tmp_path, clock, files=files)
    space = node.register_space(ACME)
    chain_of(node, space, 30, seed=1)
    with pytest.raises(StoreError):
        node.purge(order_of(space))
    files.allowed = MIB
    node._keep_up()
    assert [report.done for _, report in node.purges()] == [True]
    assert node.leftovers(order_of(space), {"": int(clock.now_s())}).answers[""].records == 0
    node.close()


def test_wrong_orders_are_refused() -> None:
    space = SpaceId(bytes(32))
    good = order_of(space)
    for changes in (
        {"purge_id": "AB" * 16},
        {"purge_id": "1"},
        {"spaces": ()},
        {"spaces": (SpaceId(b"short"),)},
        {"keys": ()},
        {"until_s": -1},
        {"reason": "x" * 1000},
    ):
        with pytest.raises(ValueError, match=r"purge|key|reason"):
            replace(good, **changes)  # type: ignore[arg-type]


def test_blocks_written_while_the_clock_was_ahead_leave_no_byte_either(tmp_path: Path) -> None:
    """A clock that was set back: the records say that they are newer than the order, living and dead ones. What is put
    after the order was carried out stays.
    """
    clock = ManualClock()
    node = open_node(tmp_path, clock)
    space = node.register_space(ACME)
    clock.advance(2 * DAY_S)
    names = restless(node, clock, space)
    clock._now_s -= 20 * DAY_S
    assert node.purge(order_of(space)).answers[""].done
    assert found_on_disk(tmp_path, traces_of(space, names, ACME.tenant_salt or b"")) == 0
    node.register_space(ACME)
    clock._now_s += 20 * DAY_S
    later = chain_of(node, space, 3, seed=9)
    clock._now_s -= 20 * DAY_S
    other = replace(order_of(space, keys=tuple(names[:3])), purge_id="cd" * 16)
    assert node.purge(other).answers[""].done
    assert [read(node, space, name, SIZE)[0] for name in later] == [GetStatus.OK] * 3
    node.close()
    assert check(tmp_path / "volume-0").clean


def test_an_order_that_a_hold_stops_keeps_no_other_waiting(tmp_path: Path) -> None:
    """Two orders are left by a process that was killed; meanwhile the blocks of the first came under a hold."""
    node = open_node(tmp_path, ManualClock())
    space, other = node.register_space(ACME), node.register_space(OTHER)
    held, free = chain_of(node, space, 3, seed=1), chain_of(node, other, 3, seed=2)
    orders = [order_of(space), replace(order_of(other), purge_id="cd" * 16)]
    for order in orders:
        node._catalog.note_purge(order, node._purger._begun(order))
    node.pin([Pin(space, held[0].key, "court", "case 7", hold=True)])
    node.close()
    node = open_node(tmp_path, ManualClock())
    assert [report.done for _, report in node.purges()] == [False, True]
    assert [read(node, space, name, SIZE)[0] for name in held] == [GetStatus.OK] * 3
    assert node.lookup(other, free).presence.tolist() == [Presence.PURGED] * 3
    node.unpin(space, [held[0].key], holds=True)
    node._keep_up()
    assert [report.done for _, report in node.purges()] == [True, True]
    node.close()
