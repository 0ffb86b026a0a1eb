"""What a shard holds, found out at start: the index, checked against the segments, plus what it does not know yet.

Owns the merge of index content and scanned records. Does not know policy or presence. Invariants: an index entry
counts only if its segment is still in that generation and the record lies below the extent that the index knew;
records beyond it are adopted if their header and payload verify (so kill -9 loses nothing acknowledged), also behind
a gap, which only a power loss makes, so that whoever deletes them finds them; of two records of one key a damaged one
loses, then the exact one wins, then the later found, and the loser is marked dead on disk; a record marked dead is
never adopted.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from kvstore.daemon.index import ENTRY_DTYPE, Extent, IndexContent, Rows, Tombstone, entry_of
from kvstore.daemon.record import RECORD_ALIGN, Mark, MarkReason, RecordHeader
from kvstore.daemon.segment import FIRST_RECORD, FREE, Segment
from kvstore.keys import BlockKey
from kvstore.store import FLAG_APPROXIMATE, Presence

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Recovered:
    """The content to serve, and how it came about. ``changed``: the index on disk differs and must be written."""

    keys: list[BlockKey]
    rows: Rows
    tombstones: dict[BlockKey, Tombstone]
    adopted: int = 0
    dropped: int = 0
    damaged: int = 0
    changed: bool = False
    entries: dict[BlockKey, bytes] = field(default_factory=dict)
    """Added or replaced against the index."""
    removed: list[BlockKey] = field(default_factory=list)


def recover(segments: Mapping[int, Segment], content: IndexContent | None, now_s: int) -> Recovered:
    """Reconcile; sets ``end`` of every unsealed segment. ``content`` None: there is no index, segments
    tell everything.
    """
    known = content if content is not None else IndexContent([], np.zeros(0, dtype=ENTRY_DTYPE), {}, {})
    found = _trusted(segments, known, now_s)
    found.changed = content is None
    index_of = {key: place for place, key in enumerate(found.keys)}
    for segment in segments.values():
        if segment.header.class_byte != FREE:
            _adopt(segment, segments, known.extents.get(segment.number), found, index_of, now_s)
    _apply(found, index_of)
    if found.adopted or found.dropped or found.damaged:
        found.changed = True
        log.info("recovered adopted=%d dropped=%d damaged=%d", found.adopted, found.dropped, found.damaged)
    return found


def _trusted(segments: Mapping[int, Segment], content: IndexContent, now_s: int) -> Recovered:
    """Index entries whose segment still is what the index thinks."""
    rows = content.rows
    keep = np.zeros(len(rows), dtype=bool)
    for number, segment in segments.items():
        extent = content.extents.get(number)
        if segment.header.class_byte != FREE and extent and extent.generation == segment.header.generation:
            here = (rows["segment"] == number) & (rows["generation"] == extent.generation)
            keep |= here & (rows["offset"] < extent.end)
    tombstones = dict(content.tombstones)
    gone = [content.keys[place] for place in np.flatnonzero(~keep)]
    for place in np.flatnonzero(~keep):
        recycled = int(rows["segment"][place]) in segments
        reason = Presence.EVICTED if recycled else Presence.QUARANTINED
        tombstones[content.keys[place]] = Tombstone(reason, now_s)
    kept = [content.keys[place] for place in np.flatnonzero(keep)]
    return Recovered(kept, rows[keep], tombstones, dropped=len(gone), removed=gone)


def _adopt(
    segment: Segment,
    segments: Mapping[int, Segment],
    extent: Extent | None,
    found: Recovered,
    index_of: dict[BlockKey, int],
    now_s: int,
) -> None:
    """Scan what the index does not know of one segment."""
    if extent is not None and extent.generation == segment.header.generation and _fits(extent, segment):
        begin = extent.end
        steps = segment.scan(begin, segment.end if segment.sealed else begin, payloads=not segment.sealed)
    else:
        begin = FIRST_RECORD
        steps = segment.scan_all(segment.end, payloads=not segment.sealed)
    end = begin
    for step in steps:
        if step.header is None:
            found.damaged += 1
            continue
        end = step.offset + step.header.record_bytes
        if step.mark is not None:
            continue
        if step.payload_ok is False:
            found.damaged += 1
            _mark_dead(segment, step.offset, Mark(MarkReason.QUARANTINED, now_s))
            found.tombstones[step.header.key] = Tombstone(Presence.QUARANTINED, now_s)
            continue
        _take(step.header, segments, found, index_of, now_s)
    if not segment.sealed:
        segment.end = end


def _fits(extent: Extent, segment: Segment) -> bool:
    """Whether the index names an end that a segment's records can have."""
    return not extent.end % RECORD_ALIGN and FIRST_RECORD <= extent.end <= segment.header.segment_bytes


def _take(
    header: RecordHeader, segments: Mapping[int, Segment], found: Recovered, index_of: dict[BlockKey, int], now_s: int
) -> None:
    """Adopt one record, or lose it to a better one of the same key."""
    rival = _rival(header.key, found, index_of)
    if rival is not None:
        if not segments[header.segment].is_whole(header):
            found.damaged += 1
            return
        rival_flags, rival_segment, rival_offset = rival
        worse = header.flags & FLAG_APPROXIMATE > rival_flags & FLAG_APPROXIMATE
        loser = (header.segment, header.offset) if worse else (rival_segment, rival_offset)
        _mark_dead(segments[loser[0]], loser[1], Mark(MarkReason.MOVED, now_s))
        if worse:
            return
    found.entries[header.key] = entry_of(header)
    found.tombstones.pop(header.key, None)
    found.adopted += 1


def _mark_dead(segment: Segment, offset: int, mark: Mark) -> None:
    """Best effort: the record is not served anyway, and a start must not fail on one bad sector."""
    try:
        segment.mark(offset, mark)
    except OSError as error:
        log.error("record_not_marked segment=%d offset=%d problem=%r", segment.number, offset, error)


def _rival(key: BlockKey, found: Recovered, index_of: dict[BlockKey, int]) -> tuple[int, int, int] | None:
    """Flags, segment and offset of the record of this key that counts so far."""
    entry = found.entries.get(key)
    if entry is not None:
        row = np.frombuffer(entry, dtype=ENTRY_DTYPE)[0]
    elif key in index_of:
        row = found.rows[index_of[key]]
    else:
        return None
    return int(row["flags"]), int(row["segment"]), int(row["offset"])


def _apply(found: Recovered, index_of: dict[BlockKey, int]) -> None:
    """Put the adopted entries into keys and rows."""
    fresh = [key for key in found.entries if key not in index_of]
    rows = found.rows.copy()
    for key, entry in found.entries.items():
        if key in index_of:
            rows[index_of[key]] = np.frombuffer(entry, dtype=ENTRY_DTYPE)[0]
    added = np.frombuffer(b"".join(found.entries[key] for key in fresh), dtype=ENTRY_DTYPE)
    found.rows = np.concatenate([rows, added])
    found.keys = [*found.keys, *fresh]
    gone = set(found.removed) - set(found.entries)
    found.removed = list(gone)
