"""What a shard holds, found out at start: the index, checked against the segments, plus what it does not know yet.

Owns the merge of index content and scanned records into presence map and index. Does not know policy. Invariants: an
index entry counts only if its segment is still in that generation and the record lies below the extent that the index
knew; records beyond it are adopted if their header and payload verify (so kill -9 loses nothing acknowledged), also
behind a gap, which only a power loss makes, so that whoever deletes them finds them; of two records of one key a
damaged or dead one loses, then the exact one wins, then the later found, and the loser is marked dead on disk; a
record marked dead is never adopted; a start that is killed in the middle leaves an index that the next one takes up or
rebuilds.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from kvstore.daemon.fingerprints import Slots
from kvstore.daemon.headers import are_whole, have_marks, headers_in, rows_of
from kvstore.daemon.index import (
    PAGE_AT_START,
    Extent,
    Index,
    IndexBatch,
    IndexDamaged,
    IndexRefused,
    IndexSummary,
    Places,
    Rows,
    entries_of,
    place_words,
)
from kvstore.daemon.presence import PresenceMap, fingerprints_in
from kvstore.daemon.record import HEADER_BYTES, RECORD_ALIGN, Mark, MarkReason, RecordDamaged, record_bytes
from kvstore.daemon.segment import FIRST_RECORD, FREE, Segment
from kvstore.daemon.terms import NEVER_S
from kvstore.daemon.tombstones import Tombstone
from kvstore.daemon.volume import Volume, VolumeLayout
from kvstore.errors import VolumeError
from kvstore.store import FLAG_APPROXIMATE, Presence

log = logging.getLogger(__name__)
_PAGE = 1024


@dataclass(slots=True)
class Recovered:
    """How many records were taken beyond the index, entries dropped, and damages found."""

    adopted: int = 0
    dropped: int = 0
    damaged: int = 0


def recover_volume(
    volume: Volume,
    layout: VolumeLayout,
    segments: Mapping[int, Segment],
    new_map: Callable[[], PresenceMap],
    now_s: int,
) -> tuple[Index, PresenceMap, Recovered]:
    """The index and what is served; a damaged index is removed and begun anew, from the segments.

    Raises VolumeError if it cannot be.
    """
    index: Index | None = None
    try:
        index = Index.open(volume.index_path, layout.index_budget_bytes)
        presence = new_map()
        return index, presence, recover(segments, presence, index, index.summary(), now_s)
    except IndexDamaged as error:
        log.error("index_damaged path=%s problem=%s: rebuilding it from the segments", volume.index_path, error)
        if index is not None:
            index.close()
    Index.destroy(volume.index_path)
    try:
        index = Index.open(volume.index_path, layout.index_budget_bytes)
    except IndexDamaged as again:
        raise VolumeError(f"the index of {volume.path} cannot be created: {again}") from again
    presence = new_map()
    return index, presence, recover(segments, presence, index, None, now_s)


def recover(
    segments: Mapping[int, Segment], presence: PresenceMap, index: Index, summary: IndexSummary | None, now_s: int
) -> Recovered:
    """Fill an empty map and bring the index up to date; sets ``end`` of every unsealed segment.

    ``summary`` None: the index is empty, segments tell everything. Raises IndexDamaged if the index is not what it
    says; the map is then to be thrown away.
    """
    recovery = _Recovery(segments, presence, index, now_s)
    for segment in segments.values():
        presence.note_age(segment.number, segment.header.class_byte, segment.oldest_s)
    if summary is not None:
        presence.tombstones.load(summary.tombstones)
        recovery.load(summary)
    for segment in segments.values():
        if segment.header.class_byte != FREE:
            recovery.adopt(segment, summary.extents.get(segment.number) if summary is not None else None)
    recovery.write_extents()
    found = recovery.found
    if found.adopted or found.dropped or found.damaged:
        log.info("recovered adopted=%d dropped=%d damaged=%d", found.adopted, found.dropped, found.damaged)
    return found


class _Recovery:
    """One start."""

    def __init__(self, segments: Mapping[int, Segment], presence: PresenceMap, index: Index, now_s: int) -> None:
        self._segments = segments
        self._presence = presence
        self._index = index
        self._now_s = now_s
        self.found = Recovered()

    def load(self, summary: IndexSummary) -> None:
        """Take the entries whose segment still is what the index thinks."""
        numbers = max([*self._segments, *summary.extents, 0]) + 1
        generations = np.zeros(numbers, dtype=np.uint64)
        ends = np.zeros(numbers, dtype=np.uint64)
        for number, segment in self._segments.items():
            extent = summary.extents.get(number)
            if segment.header.class_byte != FREE and extent and extent.generation == segment.header.generation:
                generations[number], ends[number] = extent.generation, extent.end
        oldest_s = np.full(numbers, NEVER_S, dtype=np.int64)
        gone: list[Rows] = []
        count = 0
        for rows in self._index.pages(PAGE_AT_START):
            count += len(rows)
            at = np.minimum(rows["segment"], numbers - 1)
            keep = (rows["segment"] < numbers) & (rows["generation"] == generations[at]) & (rows["offset"] < ends[at])
            np.minimum.at(oldest_s, rows["segment"][keep], rows["written_s"][keep])
            self._insert_distinct(rows[keep])
            if not keep.all():
                gone.append(rows[~keep])
        if count != summary.blocks:
            raise IndexDamaged(f"the index should hold {summary.blocks} entries and holds {count}")
        for number in self._segments:
            self._note_age(number, int(oldest_s[number]))
        for rows in gone:
            self._drop(rows)

    def adopt(self, segment: Segment, extent: Extent | None) -> None:
        """Take what the index does not know of one segment."""
        if extent is not None and extent.generation == segment.header.generation and _fits(extent, segment):
            begin = extent.end
            steps = segment.scan(begin, segment.end if segment.sealed else begin, payloads=not segment.sealed)
        else:
            if segment.sealed and self._adopt_at_once(segment):
                return
            begin = FIRST_RECORD
            steps = segment.scan_all(segment.end, payloads=not segment.sealed)
        end = begin
        headers = []
        for step in steps:
            if step.header is None:
                self.found.damaged += 1
                continue
            end = step.offset + step.header.record_bytes
            if step.mark is not None:
                continue
            if step.payload_ok is False:
                self.found.damaged += 1
                if _mark_dead(segment, step.offset, Mark(MarkReason.QUARANTINED, self._now_s)):
                    self._bury(entries_of([step.header]), Presence.QUARANTINED)
                    continue
            headers.append(step.header)
        for at in range(0, len(headers), _PAGE):
            self._take(entries_of(headers[at : at + _PAGE]))
        if not segment.sealed:
            segment.end = end

    def write_extents(self) -> None:
        """The index now knows every segment up to its end."""
        extents = {number: Extent(segment.header.generation, segment.end) for number, segment in self._segments.items()}
        self._write(IndexBatch(extents=extents, blocks=len(self._presence)))

    def _adopt_at_once(self, segment: Segment) -> bool:
        """Take a sealed segment by its headers, decoded together; False if anything in it is not as it should be."""
        try:
            data, offsets = _read_headers(segment)
        except OSError:
            return False
        headers = headers_in(data)
        places = np.array(offsets, dtype=np.uint64)
        if not are_whole(headers, segment.number, segment.header.generation, places).all():
            return False
        rows = rows_of(headers[~have_marks(headers)])
        for at in range(0, len(rows), _PAGE):
            self._take(rows[at : at + _PAGE])
        return True

    def _insert_distinct(self, rows: Rows) -> None:
        fingerprints = fingerprints_in(rows)
        if len(np.unique(fingerprints)) < len(rows) or (self._presence.find_all(fingerprints) >= 0).any():
            raise IndexDamaged("the index holds two entries of one key")
        self._presence.insert(rows)

    def _drop(self, rows: Rows) -> None:
        """Entries of segments that have begun another life, or are gone."""
        self.found.dropped += len(rows)
        here = np.isin(rows["segment"], np.array(list(self._segments), dtype=np.uint32))
        self._bury(rows[here], Presence.EVICTED, removed=place_words(rows[here]))
        self._bury(rows[~here], Presence.QUARANTINED, removed=place_words(rows[~here]))

    def _bury(self, rows: Rows, reason: Presence, removed: Places | None = None) -> None:
        if not len(rows):
            return
        fingerprints = np.unique(fingerprints_in(rows))
        reasons = np.full(len(fingerprints), reason, dtype=np.uint8)
        forgotten = self._presence.tombstones.bury(fingerprints, reasons, self._now_s)
        tombstones: dict[int, Tombstone | None] = dict.fromkeys(
            fingerprints.tolist(), Tombstone(int(reason), self._now_s)
        )
        tombstones |= dict.fromkeys(forgotten.tolist())
        places = removed if removed is not None else place_words(rows[:0])
        self._write(IndexBatch(removed=places, tombstones=tombstones, blocks=len(self._presence)))

    def _note_age(self, number: int, written_s: int) -> None:
        """A record is as old as it says: earlier versions did not note that of records that were moved."""
        segment = self._segments[number]
        if written_s < segment.oldest_s:
            segment.oldest_s = written_s
            self._presence.note_age(number, segment.header.class_byte, written_s)

    def _take(self, rows: Rows) -> None:
        """Adopt records, all at once where each is the only one of its key."""
        fingerprints = fingerprints_in(rows)
        slots = self._presence.find_all(fingerprints)
        if (slots < 0).all() and len(np.unique(fingerprints)) == len(rows):
            self._add(rows, slots)
            return
        for at in range(len(rows)):
            self._take_one(rows[at : at + 1])

    def _take_one(self, row: Rows) -> None:
        """Adopt one record, or lose it to a better one of the same key."""
        slots = self._presence.find_all(fingerprints_in(row))
        if slots[0] >= 0:
            if not _is_whole(self._segments[int(row["segment"][0])], int(row["offset"][0])):
                self.found.damaged += 1
                return
            flags = int(self._presence.shapes.flags[self._presence.shape_of(slots)[0]])
            known = int(self._presence.places[slots[0]])
            worse = int(row["flags"][0]) & FLAG_APPROXIMATE > flags & FLAG_APPROXIMATE
            worse = worse and _lives(*self._at(known))
            _mark_dead(*self._at(int(place_words(row)[0]) if worse else known), Mark(MarkReason.MOVED, self._now_s))
            if worse:
                return
        self._add(row, slots)

    def _at(self, place: int) -> tuple[Segment, int]:
        """Segment and offset that a place word names."""
        return self._segments[place >> 32], (place & 0xFFFFFFFF) * RECORD_ALIGN

    def _add(self, rows: Rows, slots: Slots) -> None:
        removed = self._presence.places[slots[slots >= 0]]
        forgotten = self._presence.tombstones.forget(fingerprints_in(rows))
        for number in np.unique(rows["segment"]).tolist():
            self._note_age(number, int(rows["written_s"][rows["segment"] == number].min()))
        self._presence.insert(rows)
        self.found.adopted += len(rows)
        tombstones: dict[int, Tombstone | None] = dict.fromkeys(forgotten.tolist())
        self._write(IndexBatch(rows=rows, removed=removed, tombstones=tombstones, blocks=len(self._presence)))

    def _write(self, batch: IndexBatch) -> None:
        """An index that refuses is mended from memory later, as in operation."""
        with contextlib.suppress(IndexRefused):
            self._index.write(batch)


def _read_headers(segment: Segment) -> tuple[bytes, list[int]]:
    """The headers of a sealed segment, one after another, and where they lie; nothing is verified."""
    found: list[bytes] = []
    offsets: list[int] = []
    at = FIRST_RECORD
    while at < segment.end:
        data = segment.files.read(segment.fd, HEADER_BYTES, at)
        found.append(data.ljust(HEADER_BYTES, b"\0"))
        offsets.append(at)
        at += record_bytes(int.from_bytes(data[152:156], "little"))
    return b"".join(found), offsets


def _fits(extent: Extent, segment: Segment) -> bool:
    """Whether the index names an end that a segment's records can have."""
    return not extent.end % RECORD_ALIGN and FIRST_RECORD <= extent.end <= segment.header.segment_bytes


def _is_whole(segment: Segment, offset: int) -> bool:
    try:
        return segment.is_whole(segment.read_header(offset)[0])
    except (RecordDamaged, OSError):
        return False


def _lives(segment: Segment, offset: int) -> bool:
    """Whether the record that an index entry names is still one: the index may not know that it died."""
    try:
        header, mark = segment.read_header(offset)
    except (RecordDamaged, OSError):
        return False
    return mark is None and segment.is_whole(header)


def _mark_dead(segment: Segment, offset: int, mark: Mark) -> bool:
    """Best effort, on disk before the index forgets the record; a start must not fail on one bad sector. False if the
    disk did not take the mark: the record is to be found by a deletion, though whoever reads it finds that it is bad.

    A record that is dead keeps the mark that says why.
    """
    try:
        try:
            is_dead = segment.read_header(offset)[1] is not None
        except RecordDamaged:
            is_dead = False
        if not is_dead:
            segment.mark(offset, mark)
        segment.sync(if_dirty=True)
    except OSError as error:
        log.error("record_not_marked segment=%d offset=%d problem=%r", segment.number, offset, error)
        return False
    return True
