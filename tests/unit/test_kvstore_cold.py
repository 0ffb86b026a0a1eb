"""Cold blocks are compressed where their class wants it: the same blocks, on less disk, a bounded part at a time."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstore.daemon.fsck import check
from kvstore.daemon.node import Node
from kvstore.keys import BlockName
from kvstore.store import BlockPut, GetStatus, Pin
from kvstore.testing import ManualClock
from kvstore.traffic import AGENT, CHAT, ClassRule, ClassRules
from tests.support.nodes import open_node, payload_of, read
from tests.support.spaces import BLOCK_TOKENS, a_chain, a_space

HOUR_S, DAY_S = 3600, 86_400
SIZE = 60_000
RULES = ClassRules(
    (
        ClassRule(AGENT, "agent", 3 * DAY_S, 100, compress_after_s=12 * HOUR_S),
        ClassRule(CHAT, "chat", 7 * DAY_S, 200),
    )
)


def soft(name: BlockName) -> bytes:
    """A payload of this block alone that shrinks to a third or so."""
    return (payload_of(name, SIZE // 4) + bytes(SIZE))[:SIZE]


def hard(name: BlockName) -> bytes:
    """A payload that does not shrink."""
    return payload_of(name, SIZE)


def put(node: Node, names: list[BlockName], soft_ones: bool = True) -> None:
    space = node.register_space(a_space())
    puts = [BlockPut(name, BLOCK_TOKENS, soft(name) if soft_ones else hard(name)) for name in names]
    node.put(space, puts, traffic_class=AGENT)


def sweeps(node: Node, count: int = 10) -> int:
    """Sweep so often; how many blocks were compressed by then."""
    for _ in range(count):
        node.sweep(apply=True)
    return int(node.stats()["blocks_compressed"])


def test_what_nobody_used_for_long_takes_less_disk_and_reads_the_same(tmp_path: Path) -> None:
    """Not before its time, and not what was used since; pins and touches move along, also through a restart."""
    clock = ManualClock()
    node = open_node(tmp_path, clock, rules=RULES)
    space = node.register_space(a_space())
    cold, warm = list(a_chain(space, 100, seed=1).names), list(a_chain(space, 16, seed=2).names)
    put(node, cold)
    node.pin([Pin(space, cold[3].key, "somebody", "")])
    clock.advance(HOUR_S)
    put(node, warm)
    clock.advance(10 * HOUR_S)
    assert sweeps(node) == 0
    node.touch(space, warm, traffic_class=CHAT)
    free_before = node.stats()["segments_free"]
    clock.advance(2 * HOUR_S)
    compressed = sweeps(node)
    assert 80 <= compressed <= 100
    assert node.stats()["segments_free"] > free_before
    assert sweeps(node) == compressed
    for _ in range(2):
        for name in [*cold, *warm]:
            assert read(node, space, name, SIZE) == (GetStatus.OK, soft(name))
        assert [pin.key for pin in node.pins()] == [cold[3].key]
        node.close()
        assert check(tmp_path / "volume-0").clean
        node = open_node(tmp_path, clock, rules=RULES)
    assert sweeps(node) == 0
    node.close()


def test_one_sweep_rewrites_one_segment(tmp_path: Path) -> None:
    clock = ManualClock()
    node = open_node(tmp_path, clock, rules=RULES)
    put(node, list(a_chain(node.register_space(a_space()), 40).names))
    clock.advance(13 * HOUR_S)
    first, second = sweeps(node, 1), sweeps(node, 1)
    assert 0 < first < second <= 2 * first
    node.close()


@pytest.mark.parametrize("wait_h", [13, 60])
def test_what_would_not_shrink_or_is_free_soon_is_not_written_again(tmp_path: Path, wait_h: int) -> None:
    """After 13 hours because it gains nothing; after 60 because its promise ends within a day."""
    clock = ManualClock()
    node = open_node(tmp_path, clock, rules=RULES)
    put(node, list(a_chain(node.register_space(a_space()), 40).names), soft_ones=wait_h == 60)
    clock.advance(wait_h * HOUR_S)
    assert sweeps(node, 3) == 0
    assert node.stats()["blocks_rewritten"] == 0
    node.close()
