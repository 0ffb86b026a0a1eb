"""Spaces, chains and filled stores that tests of identity and retention share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from kvstore.keys import AttentionGroup, ShardCoordinate, Space, SpaceId, TokenChain
from kvstore.store import BlockPut, Lookup, PutOutcome, Store
from kvstore.traffic import TrafficClass

BLOCK_TOKENS = 4
PAYLOAD_BYTES = 1000

BASE = Space(
    model="tiny-llama",
    weights_digest=bytes(range(32)),
    kv_dtype="bfloat16",
    layout="KV2LTD",
    block_tokens=BLOCK_TOKENS,
    groups=(AttentionGroup(window=0, layers=(0, 1, 2), kv_heads=2, head_dim=16),),
    tenant_salt=None,
)


def a_space(**changes: Any) -> Space:
    """The base space with some fields changed."""
    return replace(BASE, **changes)


def space_from(description: Mapping[str, Any]) -> Space:
    """A space from JSON values: bytes as hex, groups as lists, the shard as four numbers."""
    values = dict(description)
    for name in ("weights_digest", "adapter_digest", "tenant_salt"):
        if values.get(name) is not None:
            values[name] = bytes.fromhex(values[name])
    values["groups"] = tuple(
        AttentionGroup(group["window"], tuple(group["layers"]), group["kv_heads"], group["head_dim"])
        for group in values["groups"]
    )
    if "shard" in values:
        values["shard"] = ShardCoordinate(*values["shard"])
    return Space(**values)


def a_chain(space_id: SpaceId, blocks: int, *, seed: int = 0, block_tokens: int = BLOCK_TOKENS) -> TokenChain:
    """A chain of so many complete blocks; another seed is another conversation from the first token on."""
    return TokenChain(space_id, block_tokens, range(1000 * seed, 1000 * seed + blocks * block_tokens))


def put_chain(
    store: Store, chain: TokenChain, traffic_class: TrafficClass, *, payload_bytes: int = PAYLOAD_BYTES
) -> None:
    """Store every block of a chain; each must be acknowledged."""
    puts = [BlockPut(name, chain.block_tokens, name.key[:1] * payload_bytes) for name in chain.names]
    outcomes = store.put(chain.space_id, puts, traffic_class=traffic_class)
    assert set(outcomes) <= {PutOutcome.STORED, PutOutcome.TOUCHED}, outcomes


def hit_blocks(store: Store, chain: TokenChain) -> int:
    """Blocks of the chain that a lookup finds from the first on."""
    answer: Lookup = store.lookup(chain.space_id, chain.names)
    return answer.prefix_blocks()


def present_blocks(store: Store, chains: Iterable[TokenChain]) -> int:
    """Blocks that a lookup finds, gaps or not."""
    return sum(int((store.lookup(chain.space_id, chain.names).presence == 1).sum()) for chain in chains)
