"""The node under faults that come in twos: what failed once must neither spread nor come back."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.daemon.fsck import check
from kvstore.daemon.node import Node
from kvstore.keys import SpaceId, TokenChain
from kvstore.store import GetStatus, Presence, PutOutcome
from kvstore.testing import ManualClock
from kvstore.traffic import AGENT, CHAT
from tests.support.faults import FaultyFiles
from tests.support.nodes import open_node, payload_of, puts_of, read
from tests.support.spaces import a_chain, a_space

SIZE = 60_000


class Bench:
    """One directory, one clock, one file system; the node is reopened at will."""

    def __init__(self, path: Path, files: FaultyFiles) -> None:
        self.path = path
        self.volume = path / "volume-0"
        self.clock = ManualClock()
        self.files = files
        self.node = open_node(path, self.clock, files=files)
        self.space: SpaceId = self.node.register_space(a_space())

    def reopen(self, *, lose_index: bool = False) -> Node:
        """As after kill -9, optionally without the index."""
        self.node.abandon()
        if lose_index:
            shutil.rmtree(self.volume / "index")
        self.node = open_node(self.path, self.clock, files=self.files)
        return self.node

    def put(self, blocks: int, seed: int, ack: str = "os") -> tuple[TokenChain, list[PutOutcome]]:
        chain = a_chain(self.space, blocks, seed=seed)
        outcomes = self.node.put(self.space, puts_of(chain.names, SIZE), traffic_class=AGENT, ack=ack)  # type: ignore[arg-type]
        return chain, outcomes

    def presence(self, chain: TokenChain) -> list[int]:
        return self.node.lookup(self.space, chain.names).presence.tolist()


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path, FaultyFiles())
    yield made
    made.files.errors.clear()
    made.node.close()


def test_an_index_that_takes_no_writes_costs_no_block_and_is_mended(bench: Bench) -> None:
    """RocksDB stays read-only after an error: puts are refused and evict nothing, deletions hold, and writing goes on
    by itself once the index can be written anew; nothing is rebuilt at the next start.
    """
    chain, _ = bench.put(64, seed=1)
    bench.node.touch(bench.space, chain.names[:4], traffic_class=CHAT)
    bench.node._shards[0]._ledger.index._close_database()
    obstacle = bench.volume / "index.new"
    obstacle.write_bytes(b"in the way of a rewrite")
    for seed in range(2, 30):
        assert set(bench.put(16, seed=seed)[1]) == {PutOutcome.REFUSED}
    assert bench.presence(chain) == [Presence.PRESENT] * 64
    assert read(bench.node, bench.space, chain.names[0], SIZE) == (GetStatus.OK, payload_of(chain.names[0], SIZE))
    assert bench.node.delete(bench.space, [chain.names[63].key]) == 1
    obstacle.unlink()
    assert set(bench.put(16, seed=30)[1]) == {PutOutcome.STORED}
    before = {info.key: info for info in bench.node.scan()[0]}
    assert len(before) == 63 + 16
    node = bench.reopen()
    assert {info.key: info for info in node.scan()[0]} == before
    assert bench.presence(chain) == [Presence.PRESENT] * 63 + [Presence.PURGED]
    node.close()
    assert check(bench.volume).clean
