"""What a moment or a policy expires, computed a second time: from touches alone, for policies without a maximum age."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from kvstore.keys import SpaceId
from kvstore.store import BlockInfo, ClassEffect
from kvstore.traffic import ClassRules
from retention.planner import holding_class, is_expired


def keep_until_s(touches: Mapping[int, int], rules: ClassRules) -> int:
    """The latest promise over all classes that touched a block; 0 where none did."""
    return max((touch_s + rules.keep_for_s(byte) for byte, touch_s in touches.items()), default=0)


def plan_expiry(blocks: Iterable[BlockInfo], rules: ClassRules, now_s: float) -> tuple[ClassEffect, ...]:
    """What is past its promise at ``now_s`` under ``rules``: per class and space, pinned blocks excluded.

    With the rules in force it is what a sweep may remove; with other rules, what they would expire at once.
    """
    totals: dict[tuple[int, SpaceId], tuple[int, int]] = {}
    for block in blocks:
        if not is_expired(block, keep_until_s(block.touches, rules), now_s):
            continue
        pair = (holding_class(block.touches, rules), block.space_id)
        count, size_bytes = totals.get(pair, (0, 0))
        totals[pair] = (count + 1, size_bytes + block.payload_bytes)
    return tuple(ClassEffect(byte, space, *total) for (byte, space), total in sorted(totals.items()))
