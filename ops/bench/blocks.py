"""The blocks that the bench stores: names from token chains, payloads that only their key makes.

Owns the space of the bench. Invariants: a payload can be checked without having been kept; equal seeds, equal names.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from kvstore.keys import AttentionGroup, BlockName, Space, SpaceId, TokenChain
from kvstore.limits import KEY_BYTES, TOKEN_ID_MAX
from kvstore.store import BlockPut

SPACE = Space(
    model="bench",
    weights_digest=bytes(KEY_BYTES),
    kv_dtype="bfloat16",
    layout="KV2LTD",
    block_tokens=2,
    groups=(AttentionGroup(window=0, layers=(0,), kv_heads=1, head_dim=1),),
)
"""Blocks of two tokens, enough for a seed of 64 bits: the store does not look inside."""


def chain_of(space_id: SpaceId, seed: int, count: int) -> Sequence[BlockName]:
    """Names of the blocks of one chain, as a worker holds them; another seed gives other names from the first on."""
    tokens = [seed >> 32, seed & TOKEN_ID_MAX, *range(2 * (count - 1))]
    return TokenChain(space_id, SPACE.block_tokens, tokens).names


def names_of(space_id: SpaceId, seed: int, count: int) -> list[BlockName]:
    """As ``chain_of``, each name made ahead."""
    return list(chain_of(space_id, seed, count))


def base_payload(size: int) -> bytes:
    """What all payloads of a size have in common: everything behind the key."""
    return random.Random(size).randbytes(size)


def stamp(names: Sequence[BlockName], views: Sequence[memoryview]) -> list[BlockPut]:
    """Turn buffers that hold the base payload into the payloads of these names, and say how to put them."""
    for name, view in zip(names, views, strict=True):
        view[:KEY_BYTES] = name.key
    return [BlockPut(name, SPACE.block_tokens, view) for name, view in zip(names, views, strict=True)]


def differing(names: Sequence[BlockName], views: Sequence[memoryview], base: bytes) -> int:
    """How many buffers do not hold the payload of their name."""
    return sum(
        bytes(view[:KEY_BYTES]) != name.key or view[KEY_BYTES:] != base[KEY_BYTES:]
        for name, view in zip(names, views, strict=True)
    )
