"""Small nodes in a temporary directory, on a clock that tests move."""

from __future__ import annotations

import random
from pathlib import Path

from kvstore.daemon.cipher import Keyring
from kvstore.daemon.files import Files
from kvstore.daemon.node import Node, NodeConfig
from kvstore.keys import BlockName, SpaceId
from kvstore.limits import MIB
from kvstore.store import BlockPut, Clock, GetStatus
from kvstore.testing import TEST_RULES
from kvstore.traffic import ClassRules
from tests.support.spaces import BLOCK_TOKENS

CAPACITY_BYTES = 16 * MIB


def open_node(
    path: Path,
    clock: Clock,
    *,
    capacity_bytes: int = CAPACITY_BYTES,
    rules: ClassRules | None = TEST_RULES,
    files: Files | None = None,
    directories: int = 1,
    keyring: Keyring | None = None,
    overwrite_aged: bool = False,
) -> Node:
    """A node over ``directories`` data directories under ``path``."""
    config = NodeConfig(
        directories=tuple(path / f"volume-{number}" for number in range(directories)),
        capacity_bytes=capacity_bytes,
        state_pool_bytes=MIB,
        state_ttl_s=600.0,
        keyring=keyring or Keyring(),
        overwrite_aged=overwrite_aged,
    )
    return Node.open(config, clock, rules, "test policy", files=files)


def payload_of(name: BlockName, size: int) -> bytes:
    """Bytes that only this block has, the same in every run."""
    return random.Random(name.key).randbytes(size)


def puts_of(names: list[BlockName], size: int, flags: int = 0) -> list[BlockPut]:
    return [BlockPut(name, BLOCK_TOKENS, payload_of(name, size), flags) for name in names]


def read(node: Node, space: SpaceId, name: BlockName, size: int) -> tuple[GetStatus, bytes]:
    """One block's status and buffer; the buffer begins full of a pattern."""
    buffer = bytearray(b"\xa5" * size)
    return node.get_into(space, [name], [buffer])[0], bytes(buffer)
