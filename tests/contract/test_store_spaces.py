"""The store's contract about spaces, on backends of each kind: what makes bytes another's keeps them apart."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from kvstore.keys import ShardCoordinate, Space, TokenChain, tenant_salt
from kvstore.store import BlockPut, GetStatus, Presence, PutOutcome
from kvstore.traffic import AGENT
from tests.support import spaces as shared_spaces
from tests.support.spaces import BLOCK_TOKENS, a_chain, put_chain
from tests.support.stores import TENANT, subject

SIZE = 5000


def a_space(**changes: Any) -> Space:
    """A space of the tenant whose token reaches no other."""
    return shared_spaces.a_space(**{"tenant_salt": tenant_salt(TENANT), **changes})


@pytest.fixture(params=["memory", "node", "tcp", "local", "two-nodes", "tenant-token"])
def store(request: pytest.FixtureRequest) -> Iterator[Any]:
    with subject(request.param) as made:
        yield made.store


def test_an_engine_of_another_layout_finds_nothing_of_before(store: Any) -> None:
    """Neither under its own names for the same tokens nor under the old ones; its blocks lie beside the old ones."""
    before, after = store.register_space(a_space()), store.register_space(a_space(layout="fused"))
    assert before != after
    old, new = a_chain(before, 8), a_chain(after, 8)
    put_chain(store, old, AGENT)
    for names in (old.names, new.names):
        assert set(store.lookup(after, names).presence.tolist()) == {Presence.NEVER}
        assert set(store.get_into(after, names, [bytearray(1000) for _ in names])) == {GetStatus.MISS}
    blocks = [BlockPut(name, BLOCK_TOKENS, b"n" * SIZE) for name in new.names]
    assert store.put(after, blocks, traffic_class=AGENT) == [PutOutcome.STORED] * 8
    assert store.lookup(before, old.names).prefix_blocks() == store.lookup(after, new.names).prefix_blocks() == 8
    buffers = [bytearray(1000) for _ in old.names]
    assert store.get_into(before, old.names, buffers) == [GetStatus.OK] * 8
    assert buffers == [name.key[:1] * 1000 for name in old.names]


def test_every_rank_gets_the_bytes_that_it_put(store: Any) -> None:
    """Ranks of one model put their parts of the same tokens side by side: neither displaces the other's."""
    chains: list[TokenChain] = []
    for rank in range(2):
        space = store.register_space(a_space(shard=ShardCoordinate(rank, 2, 0, 1)))
        chains.append(a_chain(space, 4))
        blocks = [BlockPut(name, BLOCK_TOKENS, bytes([rank + 1]) * SIZE) for name in chains[-1].names]
        assert store.put(space, blocks, traffic_class=AGENT) == [PutOutcome.STORED] * 4
    for rank, chain in enumerate(chains):
        buffers = [bytearray(SIZE) for _ in chain.names]
        assert store.get_into(chain.space_id, chain.names, buffers) == [GetStatus.OK] * 4
        assert buffers == [bytes([rank + 1]) * SIZE] * 4
