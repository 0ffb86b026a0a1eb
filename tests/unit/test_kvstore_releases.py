"""Segments on their way back to the free list, with others coming in between."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

import pytest

from kvstore.daemon.node import Node
from kvstore.daemon.reclaimer import Swept
from kvstore.daemon.releases import PART_ROWS
from kvstore.daemon.segment import FREE
from kvstore.daemon.shard import Shard
from kvstore.keys import BlockName, SpaceId
from kvstore.store import GetStatus, Presence, PutOutcome
from kvstore.testing import ManualClock
from kvstore.traffic import AGENT, CHAT
from tests.support.nodes import open_node, payload_of, puts_of, read
from tests.support.spaces import a_chain, a_space

COUNT = 2 * PART_ROWS + 2
SIZE = 1000


def filled(path: Path, clock: ManualClock) -> tuple[Node, Shard, SpaceId, list[BlockName], int]:
    """A node with one segment of agent blocks, which are about to be given back in three parts."""
    node = open_node(path, clock, capacity_bytes=128 * 2**20)
    space = node.register_space(a_space())
    names = list(a_chain(space, COUNT).names)
    node.put(space, puts_of(names, SIZE), traffic_class=AGENT)
    shard = node._shards[0]
    (number,) = {int(each) for each in shard._ledger.presence.segments_of(shard._ledger.presence.used())}
    return node, shard, space, names, number


def begin(shard: Shard, number: int, clock: ManualClock) -> Swept:
    swept = Swept()
    shard._reclaimer.sweep_segment(number, int(clock.now_s()), swept)
    return swept


def balanced(shard: Shard) -> bool:
    account = shard.accounting()
    parts = [account[name] for name in ("live_bytes", "dead_bytes", "free_bytes", "page_bytes")]
    return min(parts) >= 0 and sum(parts) == account["total_bytes"]


def test_no_row_of_a_segment_is_served_once_its_release_began(tmp_path: Path) -> None:
    """Not even one that was alive, nor one that is pinned between two parts; all say in the end why they went, the
    accounts balance at every step, and the file is free only behind the last.
    """
    clock = ManualClock()
    node, shard, space, names, number = filled(tmp_path, clock)
    segment = shard._ledger.segments.segments[number]
    assert shard._reclaimer._recycle(segment, int(clock.now_s()))
    parts = 0
    while True:
        answer = node.lookup(space, names)
        assert not (answer.presence == Presence.PRESENT).any()
        assert node.get_into(space, names[-1:], [bytearray(SIZE)]) == [GetStatus.MISS]
        assert segment.header.class_byte == FREE
        assert number not in shard._ledger.segments.free
        assert balanced(shard)
        shard.set_pins({(space, names[-1].key): 2**40}, {})
        parts += 1
        if not shard._reclaimer.release_part():
            break
    assert parts == 3
    assert number in shard._ledger.segments.free
    assert (node.lookup(space, names).presence == Presence.EVICTED).all()
    stats = node.stats()
    assert (stats["evicted"], stats["expired"], stats["corrupt"], stats["blocks"]) == (COUNT, 0, 0, 0)
    assert balanced(shard)
    node.close()


def test_a_key_that_is_put_again_between_two_parts_stays(tmp_path: Path) -> None:
    clock = ManualClock()
    node, shard, space, names, number = filled(tmp_path, clock)
    clock.advance(4 * 86_400)
    swept = begin(shard, number, clock)
    assert (swept.segments_freed, sum(effect.blocks for effect in swept.removed)) == (1, COUNT)
    assert (node.lookup(space, names).presence == Presence.EXPIRED).all()
    assert shard._reclaimer.release_part()
    again = [names[0], names[PART_ROWS], names[-1]]  # gone, next and last
    assert node.put(space, puts_of(again, SIZE), traffic_class=CHAT) == [PutOutcome.STORED] * 3
    while shard._reclaimer.release_part():
        pass
    presence = node.lookup(space, names).presence
    assert [at for at in range(COUNT) if presence[at] == Presence.PRESENT] == [0, PART_ROWS, COUNT - 1]
    for name in again:
        assert read(node, space, name, SIZE) == (GetStatus.OK, payload_of(name, SIZE))
    stats = node.stats()
    assert (stats["expired"], stats["evicted"], stats["corrupt"], stats["blocks"]) == (COUNT, 0, 0, 3)
    assert balanced(shard)
    assert number in shard._ledger.segments.free
    node.close()


def test_a_sweep_beside_readers_takes_what_expired_and_nothing_else(tmp_path: Path) -> None:
    """Whatever moment a reader sees: what is kept is there with its bytes, what expired is not, and says so."""
    clock = ManualClock()
    node, shard, space, names, _ = filled(tmp_path, clock)
    kept = list(a_chain(space, 2 * PART_ROWS, seed=9).names)
    node.put(space, puts_of(kept, SIZE), traffic_class=CHAT)
    clock.advance(4 * 86_400)
    sweep = threading.Thread(target=lambda: node.sweep(apply=True))
    sweep.start()
    rounds = 0
    while sweep.is_alive() or not rounds:
        assert (node.lookup(space, names).presence == Presence.EXPIRED).all()
        assert (node.lookup(space, kept).presence == Presence.PRESENT).all()
        name = kept[rounds % len(kept)]
        assert read(node, space, name, SIZE) == (GetStatus.OK, payload_of(name, SIZE))
        rounds += 1
    sweep.join()
    stats = node.stats()
    assert (stats["expired"], stats["evicted"], stats["corrupt"], stats["blocks"]) == (COUNT, 0, 0, len(kept))
    assert balanced(shard)
    node.close()


@pytest.mark.parametrize("parts", [0, 1, 2, 3])
def test_a_crash_between_two_parts_brings_nothing_back(tmp_path: Path, parts: int) -> None:
    clock = ManualClock()
    node, shard, space, names, number = filled(tmp_path / "node", clock)
    kept = list(a_chain(space, 5, seed=9).names)
    node.put(space, puts_of(kept, SIZE), traffic_class=CHAT)
    assert shard._reclaimer._recycle(shard._ledger.segments.segments[number], int(clock.now_s()))
    for _ in range(parts):
        shard._reclaimer.release_part()
    shutil.copytree(tmp_path / "node", tmp_path / "crashed")
    node.close()
    again = open_node(tmp_path / "crashed", clock, capacity_bytes=128 * 2**20)
    assert not (again.lookup(space, names).presence == Presence.PRESENT).any()
    assert again.get_into(space, names[:1], [bytearray(SIZE)]) == [GetStatus.MISS]
    for name in kept:
        assert read(again, space, name, SIZE) == (GetStatus.OK, payload_of(name, SIZE))
    assert balanced(again._shards[0])
    assert again.stats()["blocks"] == len(kept)
    assert again.put(space, puts_of(names, SIZE), traffic_class=AGENT) == [PutOutcome.STORED] * COUNT
    again.close()


def test_a_file_that_vanishes_between_two_parts_takes_its_rows_along(tmp_path: Path) -> None:
    """Another may have its number, and other blocks its rows, before the next part: these stay."""
    clock = ManualClock()
    node, shard, space, names, number = filled(tmp_path, clock)
    segment = shard._ledger.segments.segments[number]
    assert shard._reclaimer._recycle(segment, int(clock.now_s()))
    assert shard._reclaimer.release_part()
    segment.path.unlink()
    shard._reclaimer.drop_vanished(int(clock.now_s()))
    again = list(a_chain(space, COUNT, seed=9).names)
    assert node.put(space, puts_of(again, SIZE), traffic_class=CHAT) == [PutOutcome.STORED] * COUNT
    assert shard._ledger.segments.segments[number] is not segment
    while shard._reclaimer.release_part():
        pass
    assert (node.lookup(space, again).presence == Presence.PRESENT).all()
    assert not (node.lookup(space, names).presence == Presence.PRESENT).any()
    assert balanced(shard)
    node.close()


def test_an_index_that_is_mended_between_two_parts_names_no_row_that_goes(tmp_path: Path) -> None:
    clock = ManualClock()
    node, shard, space, _, number = filled(tmp_path, clock)
    kept = list(a_chain(space, 5, seed=9).names)
    node.put(space, puts_of(kept, SIZE), traffic_class=CHAT)
    assert shard._reclaimer._recycle(shard._ledger.segments.segments[number], int(clock.now_s()))
    shard._reclaimer.release_part()
    shard._ledger.index.refusing = True
    assert shard._ledger.mend_index()
    assert node.stats()["corrupt"] == 0
    assert sum(map(len, shard._ledger.index.pages())) == len(kept)
    while shard._reclaimer.release_part():
        pass
    summary = shard._ledger.index.summary()
    assert summary is not None
    assert summary.blocks == len(kept)
    node.close()
