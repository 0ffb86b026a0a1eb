"""Who holds a block, how much one may hold, and what the law forbids."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvstore.daemon.node import Node, NodeConfig
from kvstore.errors import Held, QuotaExceeded
from kvstore.keys import BlockName, SpaceId
from kvstore.limits import MIB
from kvstore.purges import PurgeOrder
from kvstore.store import Pin, Presence
from kvstore.testing import TEST_RULES, ManualClock
from kvstore.traffic import AGENT
from tests.support.nodes import puts_of
from tests.support.spaces import a_chain, a_space

SIZE = 10_000
DAY_S = 86_400


class Bench:
    """A node with a quota of five blocks an owner, and ten blocks in it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.clock = ManualClock()
        self.node = self.open()
        self.space: SpaceId = self.node.register_space(a_space())
        self.names: list[BlockName] = list(a_chain(self.space, 10).names)
        self.node.put(self.space, puts_of(self.names, SIZE), traffic_class=AGENT)

    def open(self) -> Node:
        config = NodeConfig((self.path / "data",), 16 * MIB, pin_quota_bytes=5 * SIZE)
        return Node.open(config, self.clock, TEST_RULES)

    def pin(self, at: range, owner: str, *, until_s: int = 0, hold: bool = False) -> int:
        pins = [Pin(self.space, name.key, owner, "why", until_s, hold) for name in self.names[at.start : at.stop]]
        return self.node.pin(pins)

    def present(self) -> list[int]:
        presence = self.node.lookup(self.space, self.names).presence
        return [at for at, one in enumerate(presence.tolist()) if one == Presence.PRESENT]


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path)
    yield bench
    bench.node.close()


def test_a_block_stays_until_the_last_owner_lets_go(bench: Bench) -> None:
    """One who lets go, or whose time comes, takes nothing from the other; also over a restart."""
    bench.pin(range(3), "one")
    bench.pin(range(3), "two", until_s=int(bench.clock.now_s()) + 20 * DAY_S)
    assert len(bench.node.pins()) == 6
    assert bench.node.unpin(bench.space, [name.key for name in bench.names], owner="one") == 3
    bench.clock.advance(10 * DAY_S)
    bench.node.sweep(apply=True)
    bench.node.close()
    bench.node = bench.open()
    assert bench.present() == [0, 1, 2]
    bench.clock.advance(11 * DAY_S)
    assert bench.present() == []


def test_an_owner_pins_no_more_than_the_quota(bench: Bench) -> None:
    """What is over is refused whole and says what to do; others have their own; the same block counts once."""
    assert bench.pin(range(5), "one") == 5
    with pytest.raises(QuotaExceeded, match="--pin-quota"):
        bench.pin(range(4, 7), "one")
    assert bench.pin(range(5), "one") == 5
    assert bench.pin(range(5, 10), "two") == 5
    assert bench.node.unpin(bench.space, [bench.names[0].key], owner="one") == 1
    assert bench.pin(range(9, 10), "one") == 1


def test_a_legal_hold_outlives_policy_quota_and_purges(bench: Bench) -> None:
    """Nothing removes the block, nor the hold, by the way; what is not held is not removed either then."""
    assert bench.pin(range(7), "court", hold=True) == 7
    keys = [name.key for name in bench.names]
    order = PurgeOrder("cd" * 16, (bench.space,), None, 0)
    for attempt in (
        lambda: bench.node.delete(bench.space, keys),
        lambda: bench.node.delete_space(bench.space),
        lambda: bench.node.purge(order),
        lambda: bench.node.unpin(bench.space, keys),
        lambda: bench.pin(range(1), "court"),
    ):
        with pytest.raises(Held, match="hold"):
            attempt()
    assert bench.present() == list(range(10))
    assert bench.node.purges() == []
    bench.node.delete(bench.space, keys[7:])
    bench.clock.advance(400 * DAY_S)
    bench.node.sweep(apply=True)
    assert bench.present() == list(range(7))


def test_a_hold_is_released_in_so_many_words(bench: Bench) -> None:
    """Then the block is like any other; of another owner's hold nobody is told that it is gone."""
    bench.pin(range(2), "court", hold=True)
    bench.pin(range(2), "auditor", hold=True)
    keys = [name.key for name in bench.names]
    assert bench.node.unpin(bench.space, keys, owner="court", holds=True) == 2
    with pytest.raises(Held, match="auditor"):
        bench.node.delete_space(bench.space)
    assert bench.node.unpin(bench.space, keys, holds=True) == 2
    assert bench.node.delete_space(bench.space) == 10


def test_a_hold_survives_a_restart(bench: Bench) -> None:
    bench.pin(range(2), "court", hold=True)
    bench.node.abandon()
    bench.node = bench.open()
    assert [pin.hold for pin in bench.node.pins()] == [True, True]
    with pytest.raises(Held):
        bench.node.delete_space(bench.space)
    assert replace(bench.node.pins()[0], hold=False).owner == "court"


@pytest.mark.parametrize("whole_space", [True, False])
def test_a_hold_is_not_acknowledged_on_a_block_that_is_being_removed(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, whole_space: bool
) -> None:
    """It comes when the deletion has found no hold, and before the block is gone; afterwards nothing is left of it."""
    shard, counts = bench.node._shards[0], []
    delete = shard.delete

    def hold_first(*args: Any) -> int:
        counts.append(bench.pin(range(3), "court", hold=True))
        return delete(*args)

    monkeypatch.setattr(shard, "delete", hold_first)
    if whole_space:
        assert bench.node.delete_space(bench.space) == 10
    else:
        assert bench.node.delete(bench.space, [name.key for name in bench.names[:2]]) == 2
    assert counts == [0 if whole_space else 1]
    assert bench.present() == ([] if whole_space else list(range(2, 10)))
    assert len(bench.node.pins()) == counts[0]
