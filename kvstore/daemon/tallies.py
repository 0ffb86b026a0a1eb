"""Counters of a shard, and sums over rows by class and space.

Owns no lock: counters are changed under the shard's, or are plain increments whose loss would not matter.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, fields

import numpy as np

from kvstore.daemon.fingerprints import Slots
from kvstore.daemon.presence import PresenceMap
from kvstore.daemon.segment import FREE, Segment
from kvstore.keys import SpaceId
from kvstore.store import ClassEffect
from kvstore.traffic import ClassRules

SPACES_IN_STATS = 256
"""Spaces that stats list by themselves; the smaller ones are summed up as ``other``."""


@dataclass(slots=True)
class Counters:
    """Since the daemon started. ``corrupt``: reads that failed verification; ``hits``/``misses``: blocks of gets."""

    hits: int = 0
    misses: int = 0
    corrupt: int = 0
    key_missing: int = 0
    """Those of the misses whose block is here, encrypted under a cipher key that is not."""
    read_errors: int = 0
    bytes_read: int = 0
    extents_read: int = 0
    """Runs of records that lie together, of the blocks of each get: ``hits`` over this is the mean length."""
    puts: int = 0
    touches: int = 0
    replaced: int = 0
    refused: int = 0
    shed_low_space: int = 0
    """Those of the refused that needed a new file below the watermark."""
    declined: int = 0
    altered: int = 0
    purged: int = 0
    expired: int = 0
    evicted: int = 0
    quarantined: int = 0
    blocks_rewritten: int = 0
    blocks_compressed: int = 0
    """Those of the rewritten that had been stored as they are."""
    segments_recycled: int = 0
    bytes_written: int = 0
    write_errors: int = 0
    index_errors: int = 0
    evicted_of: Counter[int] = field(default_factory=Counter)
    """The evicted by the class that touched them last."""

    def as_dict(self) -> dict[str, int]:
        """All but those by class."""
        return {item.name: getattr(self, item.name) for item in fields(self) if item.name != "evicted_of"}


def effects_of(presence: PresenceMap, slots: Slots) -> tuple[ClassEffect, ...]:
    """Blocks and payload bytes of some rows by class and space, ordered by both; a block counts for the class that
    touched it last.
    """
    if not len(slots):
        return ()
    shapes = presence.shapes
    shape = presence.shape_of(slots)
    pairs = shapes.space[shape].astype(np.int64) * 256 + presence.class_of(slots)
    values, inverse = np.unique(pairs, return_inverse=True)
    blocks = np.bincount(inverse.ravel())
    totals = np.zeros(len(values), dtype=np.int64)
    np.add.at(totals, inverse.ravel(), shapes.payload_bytes[shape].astype(np.int64))
    effects = [
        ClassEffect(pair % 256, shapes.space_id(pair // 256), count, total)
        for pair, count, total in zip(values.tolist(), blocks.tolist(), totals.tolist(), strict=True)
    ]
    return tuple(sorted(effects, key=lambda effect: (effect.class_byte, effect.space_id)))


def merge_effects(effects: Iterable[ClassEffect]) -> tuple[ClassEffect, ...]:
    """Add up effects of one class and space."""
    totals: dict[tuple[int, SpaceId], tuple[int, int]] = {}
    for effect in effects:
        blocks, size = totals.get((effect.class_byte, effect.space_id), (0, 0))
        totals[(effect.class_byte, effect.space_id)] = (blocks + effect.blocks, size + effect.payload_bytes)
    return tuple(ClassEffect(key[0], key[1], *totals[key]) for key in sorted(totals))


def by_class(effects: Sequence[ClassEffect], rules: ClassRules, value: Callable[[ClassEffect], int]) -> dict[str, int]:
    """Sums of a value by class name."""
    totals: dict[str, int] = {}
    for effect in effects:
        name = rules.name_of(effect.class_byte)
        totals[name] = totals.get(name, 0) + value(effect)
    return totals


def by_space(effects: Sequence[ClassEffect]) -> dict[str, int]:
    """Payload bytes of the largest spaces by id (hex), and of the others together."""
    totals: dict[str, int] = {}
    for effect in effects:
        totals[effect.space_id.hex()] = totals.get(effect.space_id.hex(), 0) + effect.payload_bytes
    ordered = sorted(totals.items(), key=lambda item: -item[1])
    listed = dict(ordered[:SPACES_IN_STATS])
    if len(ordered) > SPACES_IN_STATS:
        listed["other"] = sum(size for _, size in ordered[SPACES_IN_STATS:])
    return listed


def account_of(presence: PresenceMap, segments: Collection[Segment]) -> dict[str, int]:
    """Bytes of all segments: live records, dead bytes, free bytes, first pages; they add up to the files' sizes.

    Rows of a segment whose life has ended are on their way out, and have no bytes.
    """
    over = [segment.number for segment in segments if segment.header.class_byte == FREE]
    slots = presence.used()
    sizes = presence.record_bytes_of(slots[~np.isin(presence.segments_of(slots), over)])
    used = sum(segment.end - 4096 for segment in segments)
    total = sum(segment.header.segment_bytes for segment in segments)
    live = int(sizes.sum())
    return {
        "live_bytes": live,
        "dead_bytes": used - live,
        "free_bytes": total - used - 4096 * len(segments),
        "page_bytes": 4096 * len(segments),
        "total_bytes": total,
    }
