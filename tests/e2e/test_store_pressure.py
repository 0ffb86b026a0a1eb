"""The store under pressure that no part of it sees alone: an index made anew beside traffic, batches of tiny blocks."""

from __future__ import annotations

import random
import shutil
import threading
from pathlib import Path

import pytest

from kvstore.daemon.fsck import check
from kvstore.daemon.node import Node, NodeConfig
from kvstore.keys import BlockName, SpaceId
from kvstore.limits import BATCH_BLOCKS_MAX, MIB
from kvstore.store import BlockPut, GetStatus, PutOutcome
from kvstore.testing import TEST_RULES, ManualClock
from kvstore.traffic import AGENT
from tests.support.spaces import BLOCK_TOKENS, a_chain, a_space
from tests.support.stores import subject

STEPS = 40
BLOCKS = 40


def open_node(path: Path) -> Node:
    config = NodeConfig(
        directories=(path / "data",), capacity_bytes=32 * MIB, segment_bytes=MIB, state_pool_bytes=MIB, background=True
    )
    return Node.open(config, ManualClock(), TEST_RULES)


def payload_of(name: BlockName, life: int) -> bytes:
    return random.Random(name.key + bytes([life % 256])).randbytes(1000 + 997 * (name.index % 7))


class Owner(threading.Thread):
    """Puts, reads and deletes blocks that nobody else writes; ``lives``: by block, how often it was deleted; odd: it is
    stored now. ``problem``: what went wrong.
    """

    def __init__(self, node: Node, space: SpaceId, seed: int) -> None:
        super().__init__(name=f"owner-{seed}")
        self._node = node
        self._space = space
        self._chance = random.Random(seed)
        self.names = list(a_chain(space, BLOCKS, seed=seed).names)
        self.lives = [0] * BLOCKS
        self.problem = ""

    def run(self) -> None:
        try:
            for _ in range(STEPS):
                self._step(self._chance.sample(range(BLOCKS), 5))
        except Exception as error:  # told by the test, in its own thread
            self.problem = repr(error)

    def _step(self, some: list[int]) -> None:
        stored = [at for at in some if self.lives[at] % 2]
        fresh = [at for at in some if not self.lives[at] % 2]
        puts = [BlockPut(self.names[at], BLOCK_TOKENS, payload_of(self.names[at], self.lives[at] + 1)) for at in fresh]
        outcomes = self._node.put(self._space, puts, traffic_class=AGENT, ack=self._chance.choice(("os", "disk")))
        assert set(outcomes) <= {PutOutcome.STORED, PutOutcome.REFUSED}, outcomes
        for at, outcome in zip(fresh, outcomes, strict=True):
            self.lives[at] += outcome is PutOutcome.STORED
        self.verify(self._node)
        if self._chance.random() < 0.5:
            assert self._node.delete(self._space, [self.names[at].key for at in stored]) == len(stored)
            for at in stored:
                self.lives[at] += 1

    def verify(self, node: Node) -> None:
        for name, life in zip(self.names, self.lives, strict=True):
            buffer = bytearray(len(payload_of(name, 0)))
            status = node.get_into(self._space, [name], [buffer])[0]
            assert status is (GetStatus.OK if life % 2 else GetStatus.MISS)
            assert not life % 2 or buffer == payload_of(name, life)


def test_an_index_made_anew_beside_traffic_loses_and_revives_nothing(tmp_path: Path) -> None:
    """Copied, and rebuilt from memory and records, again and again while blocks come and go; so is it afterwards from
    itself, and from the segments alone.
    """
    node = open_node(tmp_path)
    space = node.register_space(a_space())
    index = node._shards[0]._ledger.index
    owners = [Owner(node, space, seed) for seed in range(3)]
    for owner in owners:
        owner.start()
    made = 0
    while any(owner.is_alive() for owner in owners):
        made += index.compact()
        index.refusing = True  # a put that meets it is refused, the next one mends it
        node.sweep(apply=True)
    for owner in owners:
        owner.join()
        assert not owner.problem
    assert made
    for lose_index in (False, True):
        node.close()
        report = check(tmp_path / "data")
        assert report.clean, report.to_text()
        if lose_index:
            shutil.rmtree(tmp_path / "data" / "index")
        node = open_node(tmp_path)
        for owner in owners:
            owner.verify(node)
        assert len(node.scan()[0]) == sum(life % 2 for owner in owners for life in owner.lives)
        (books,) = node.accounting()
        assert books["live_bytes"] + books["dead_bytes"] + books["free_bytes"] + books["page_bytes"] == sum(
            path.stat().st_size for path in (tmp_path / "data" / "segments").glob("*.seg")
        )
    node.close()


@pytest.mark.parametrize("way", ["node", "local", "unix", "tcp"])
def test_a_whole_batch_of_tiny_blocks(way: str) -> None:
    """Of one byte to three: each comes back as it was put, in another order, and is gone when it was deleted."""
    with subject(way) as found:
        space = found.store.register_space(a_space())
        names = list(a_chain(space, BATCH_BLOCKS_MAX).names)
        payloads = [name.key[: 1 + name.index % 3] for name in names]
        puts = [BlockPut(name, BLOCK_TOKENS, payload) for name, payload in zip(names, payloads, strict=True)]
        assert set(found.store.put(space, puts, traffic_class=AGENT)) == {PutOutcome.STORED}
        order = random.Random(1).sample(range(BATCH_BLOCKS_MAX), BATCH_BLOCKS_MAX)
        buffers = [bytearray(len(payloads[at])) for at in order]
        statuses = found.store.get_into(space, [names[at] for at in order], buffers)
        assert set(statuses) == {GetStatus.OK}
        assert [bytes(buffer) for buffer in buffers] == [payloads[at] for at in order]
        assert found.store.delete(space, [name.key for name in names[::2]]) == BATCH_BLOCKS_MAX // 2
        statuses = found.store.get_into(space, names, [bytearray(len(payload)) for payload in payloads])
        assert statuses == [GetStatus.MISS, GetStatus.OK] * (BATCH_BLOCKS_MAX // 2)
