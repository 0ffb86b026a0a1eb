"""What a store holds, seen through a policy: usage per class and space.

Pure: blocks in, numbers out. Does not know how blocks are fetched, shown or removed. Invariants: every block is counted
once, under the class whose promise holds it longest; when a block ends is what its node says, maximum age included;
pinned blocks are never counted as expiring.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from kvstore.keys import SpaceId
from kvstore.store import BlockInfo
from kvstore.traffic import ClassRules

UNTOUCHED = 0
"""Class byte under which a block is counted that no class has touched (never a real class)."""


@dataclass(frozen=True, slots=True)
class Usage:
    """What some blocks take. Sizes in bytes, times in seconds since the epoch, 0 where there is none.

    ``stored_bytes``: after compression. ``expired_blocks``: past their promise, not served, not yet swept.
    ``next_expiry_s``: when the first block that is neither expired nor pinned loses its promise.
    """

    blocks: int = 0
    payload_bytes: int = 0
    stored_bytes: int = 0
    oldest_written_s: int = 0
    next_expiry_s: int = 0
    expired_blocks: int = 0
    expired_bytes: int = 0
    pinned_blocks: int = 0

    def __add__(self, other: Usage) -> Usage:
        return Usage(
            blocks=self.blocks + other.blocks,
            payload_bytes=self.payload_bytes + other.payload_bytes,
            stored_bytes=self.stored_bytes + other.stored_bytes,
            oldest_written_s=_earliest(self.oldest_written_s, other.oldest_written_s),
            next_expiry_s=_earliest(self.next_expiry_s, other.next_expiry_s),
            expired_blocks=self.expired_blocks + other.expired_blocks,
            expired_bytes=self.expired_bytes + other.expired_bytes,
            pinned_blocks=self.pinned_blocks + other.pinned_blocks,
        )


Totals = dict[tuple[int, SpaceId], Usage]
"""Usage per (class byte, space)."""


def holding_class(touches: Mapping[int, int], rules: ClassRules) -> int:
    """The class whose promise holds a block longest (the lowest byte of equals)."""
    return min(touches, key=lambda byte: (-(touches[byte] + rules.keep_for_s(byte)), byte), default=UNTOUCHED)


def usage_of(block: BlockInfo, now_s: float) -> Usage:
    """The usage of a single block."""
    expired = is_expired(block, block.keep_until_s, now_s)
    return Usage(
        blocks=1,
        payload_bytes=block.payload_bytes,
        stored_bytes=block.stored_bytes,
        oldest_written_s=block.written_s,
        next_expiry_s=0 if expired or block.pinned else block.keep_until_s,
        expired_blocks=int(expired),
        expired_bytes=block.payload_bytes if expired else 0,
        pinned_blocks=int(block.pinned),
    )


def is_expired(block: BlockInfo, until_s: int, now_s: float) -> bool:
    """Whether a promise until ``until_s`` is past. A pin holds a block beyond it."""
    return not block.pinned and until_s <= now_s


def summarise(blocks: Iterable[BlockInfo], rules: ClassRules, now_s: float) -> Totals:
    """Usage per (class byte, space), in that order."""
    totals: Totals = {}
    for block in blocks:
        pair = (holding_class(block.touches, rules), block.space_id)
        totals[pair] = totals.get(pair, Usage()) + usage_of(block, now_s)
    return dict(sorted(totals.items()))


def add_totals(one: Totals, other: Totals) -> Totals:
    """Usage of two nodes together."""
    pairs = sorted({*one, *other})
    return {pair: one.get(pair, Usage()) + other.get(pair, Usage()) for pair in pairs}


def by_class(totals: Totals) -> dict[int, Usage]:
    """The same numbers, all spaces together."""
    merged: dict[int, Usage] = {}
    for (class_byte, _), usage in totals.items():
        merged[class_byte] = merged.get(class_byte, Usage()) + usage
    return merged


def by_space(totals: Totals) -> dict[SpaceId, Usage]:
    """The same numbers, all classes together."""
    merged: dict[SpaceId, Usage] = {}
    for (_, space_id), usage in totals.items():
        merged[space_id] = merged.get(space_id, Usage()) + usage
    return merged


def _earliest(one_s: int, other_s: int) -> int:
    """The earlier of two times, where 0 is none."""
    return min(one_s, other_s) if one_s and other_s else one_s or other_s
