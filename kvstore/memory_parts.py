"""What a store in memory holds: blocks, states, and the lease of a payload. Does not know promises."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvstore.keys import BlockKey, BlockName, SpaceId, StateName, TokenDigest
from kvstore.purges import PurgeOrder
from kvstore.store import Buffer, ClassEffect


@dataclass(slots=True)
class MemoryBlock:
    """One block: its name, its bytes, the class that wrote it, and the last touch of each class."""

    space_id: SpaceId
    name: BlockName
    tokens: int
    flags: int
    payload: bytes
    checksum: int
    written_s: int
    class_byte: int = 0
    touches: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class MemoryState:
    """One state, and when it ends."""

    space_id: SpaceId
    name: StateName
    payload: bytes
    checksum: int
    flags: int
    expires_s: float


class MemoryLease:
    """A payload held for reading, as a server asks for it. ``fd`` is None: the bytes are in ``data``."""

    __slots__ = (
        "checksum",
        "codec",
        "data",
        "fd",
        "flags",
        "key",
        "offset",
        "payload_bytes",
        "stored_bytes",
        "token_digest",
    )

    def __init__(self, block: MemoryBlock) -> None:
        self.fd: int | None = None
        self.offset = 0
        self.data: Buffer | None = block.payload
        self.stored_bytes = self.payload_bytes = len(block.payload)
        self.checksum = block.checksum
        self.codec = "none"
        self.flags = block.flags
        self.key: BlockKey = block.name.key
        self.token_digest: TokenDigest = block.name.token_digest

    def __enter__(self) -> MemoryLease:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.data = None


def class_effects(blocks: Sequence[MemoryBlock]) -> tuple[ClassEffect, ...]:
    """Blocks and bytes per class and space; a block counts for the class that touched it last."""
    sums: dict[tuple[int, SpaceId], tuple[int, int]] = {}
    for block in blocks:
        group = (max(block.touches, key=lambda class_byte: block.touches[class_byte]), block.space_id)
        count, size = sums.get(group, (0, 0))
        sums[group] = (count + 1, size + len(block.payload))
    return tuple(ClassEffect(byte, space, *sums[byte, space]) for byte, space in sorted(sums))


def is_ordered(order: PurgeOrder, block: MemoryBlock) -> bool:
    """Whether an order comes to a block."""
    if order.spaces and block.space_id not in order.spaces:
        return False
    if order.class_byte is not None:
        return {*block.touches} == {order.class_byte}
    if order.written_until_s is not None:
        return block.written_s <= order.written_until_s
    return order.keys is None or block.name.key in order.keys


def is_shared(order: PurgeOrder, block: MemoryBlock) -> bool:
    """Whether the class of an order only loses its claim on a block."""
    covered = not order.spaces or block.space_id in order.spaces
    return covered and order.class_byte in block.touches and len(block.touches) > 1
