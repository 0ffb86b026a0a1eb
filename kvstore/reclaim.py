"""Which segment goes next when room is needed, and what a sweep does with each: pure choices over numbers.

Owns the order of reclaiming. Does not know files, locks or blocks' contents; the shard carries the choice out. Order:
segments whose every promise is past; segments mostly dead, whose few living blocks move on (nothing is lost); then
living blocks, by class priority down to each class's floor, earliest promise first, whole segments, and before any
others those of classes that hold more than their ceiling. Pinned blocks are
never dropped, and no living block at all where only lossless steps are asked for. Nothing is rewritten out of a segment
whose class has a maximum age: its blocks age, and are erased, together.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from kvstore.traffic import ClassRules

DAY_S = 86_400
LIVE_SHARE_MAX = 0.5
"""Living blocks are rewritten only from a segment whose used bytes are less than half alive."""
REWRITE_AHEAD_S = DAY_S
"""A sweep rewrites for room that would not come by itself within this time."""
NO_CEILING = 2**62


class Action(Enum):
    """FREE: drop what is left and recycle. MOVE_ALIVE: rewrite every living block first. MOVE_PINNED:
    only the pinned.
    """

    FREE = "free"
    MOVE_ALIVE = "move alive"
    MOVE_PINNED = "move pinned"


class SegmentUsage(NamedTuple):
    """What one segment holds. Bytes are whole records on disk. (Every choice makes one for each segment, of which there
    may be thousands: a frozen dataclass takes four times as long.)

    ``begun`` counts up with every segment begun, so that of equal promises the older goes.
    ``busy``: leased by a reader, or it failed a write. ``ages``: its class has a maximum age.
    """

    segment: int
    class_byte: int
    segment_bytes: int
    used_bytes: int
    alive_bytes: int
    pinned_bytes: int
    promise_until_s: int
    begun: int
    busy: bool
    ages: bool = False


@dataclass(frozen=True, slots=True)
class Step:
    """One segment to recycle and how."""

    segment: int
    action: Action


def expiry_day(until_s: int) -> int:
    """The day, since the epoch, whose segments hold blocks that are kept until then."""
    return until_s // DAY_S


def choose_victim(usages: Sequence[SegmentUsage], rules: ClassRules, *, lossless: bool = False) -> Step | None:
    """The next segment to recycle, or None if everything is protected. ``lossless``: no living block may go.

    ``rules``: those of the volume (``ClassRules.for_volume``).
    """
    idle = [usage for usage in usages if not usage.busy]
    empty = [usage for usage in idle if usage.alive_bytes == 0]
    if empty:
        return Step(min(empty, key=lambda usage: (usage.promise_until_s, usage.segment)).segment, Action.FREE)
    sparse = [usage for usage in idle if not usage.ages and _is_sparse(usage.alive_bytes, usage)]
    if sparse:
        return Step(min(sparse, key=lambda usage: (usage.alive_bytes, usage.segment)).segment, Action.MOVE_ALIVE)
    if lossless:
        return None
    held_bytes = _bytes_by_class(usages)
    spare_bytes = {byte: held - _floor_bytes(rules, byte) for byte, held in held_bytes.items()}
    over = {byte for byte, held in held_bytes.items() if held > _ceiling_bytes(rules, byte)}
    priorities = {byte: _priority(rules, byte) for byte in spare_bytes}
    possible = [
        usage
        for usage in idle
        if usage.segment_bytes <= spare_bytes[usage.class_byte]
        and (usage.pinned_bytes == 0 or (not usage.ages and _is_sparse(usage.pinned_bytes, usage)))
    ]
    if not possible:
        return None
    if over:
        possible = [usage for usage in possible if usage.class_byte in over] or possible
    first = min(possible, key=lambda usage: (priorities[usage.class_byte], usage.promise_until_s, usage.begun))
    return Step(first.segment, Action.MOVE_PINNED if first.pinned_bytes else Action.FREE)


def sweep_action(usage: SegmentUsage, now_s: int) -> Action | None:
    """What a sweep does with a segment that holds expired or dead bytes: None keeps it (its expired
    blocks are dropped).

    A sparse segment whose last promise ends within a day is not rewritten: it is free soon without that, and eviction
    takes it first should room be needed before. (Replaying a public agentic trace, rewriting at once made 1.5 times the
    device writes, for not one hit more.)
    """
    if usage.busy:
        return None
    if usage.alive_bytes == 0:
        return Action.FREE
    if usage.ages:
        return None
    ends_soon = now_s < usage.promise_until_s <= now_s + REWRITE_AHEAD_S
    return Action.MOVE_ALIVE if _is_sparse(usage.alive_bytes, usage) and not ends_soon else None


def _is_sparse(kept_bytes: int, usage: SegmentUsage) -> bool:
    return kept_bytes < LIVE_SHARE_MAX * usage.used_bytes


def _bytes_by_class(usages: Iterable[SegmentUsage]) -> dict[int, int]:
    totals: dict[int, int] = {}
    for usage in usages:
        totals[usage.class_byte] = totals.get(usage.class_byte, 0) + usage.segment_bytes
    return totals


def _priority(rules: ClassRules, class_byte: int) -> int:
    """A class that no rule names is as dear as the dearest: an unknown promise is not broken first."""
    rule = rules.by_byte(class_byte)
    return rule.priority if rule else max(rule.priority for rule in rules.rules)


def _floor_bytes(rules: ClassRules, class_byte: int) -> int:
    rule = rules.by_byte(class_byte)
    return rule.floor_bytes if rule else 0


def _ceiling_bytes(rules: ClassRules, class_byte: int) -> int:
    rule = rules.by_byte(class_byte)
    return rule.ceiling_bytes if rule and rule.ceiling_bytes else NO_CEILING
