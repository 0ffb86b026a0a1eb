"""What a shard holds: the presence map and the index, changed together under one lock, and the leases on segments.

Owns that lock. Does not write records or choose victims. Invariants: memory and index agree after every method, or
the index's count of entries betrays it at the next start and it is rebuilt; a place handed out keeps its segment from
being recycled until it is given back.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvstore.daemon.index import Extent, Index, IndexBatch, IndexRefused, Rows, Tombstone, keys_in, place_in
from kvstore.daemon.presence import PresenceMap
from kvstore.daemon.record import HEADER_BYTES, RECORD_ALIGN, Mark, MarkReason
from kvstore.daemon.segment import Segment
from kvstore.daemon.segments import SegmentSet
from kvstore.daemon.tallies import Counters
from kvstore.keys import BlockKey, BlockName, SpaceId
from kvstore.limits import KEY_BYTES
from kvstore.store import Presence

log = logging.getLogger(__name__)
_PAGE = 1024
_TAKEN_DTYPE = np.dtype(
    [
        ("found", "?"),
        ("segment", "<u4"),
        ("generation", "<u8"),
        ("offset", "<u8"),
        ("record_bytes", "<u4"),
        ("payload_bytes", "<u4"),
        ("codec", "u1"),
        ("flags", "u1"),
    ]
)


class Place(NamedTuple):
    """Where a block lies, as of the moment it was looked up. (A frozen dataclass takes four times as long to make.)"""

    segment: Segment
    generation: int
    offset: int
    stored_bytes: int
    payload_bytes: int
    codec: int
    flags: int
    checksum: int


@dataclass(frozen=True, slots=True)
class Taken:
    """Where many blocks lie, as of the moment they were looked up: one element a key, in the order asked.

    Columns are 0 where ``found`` is False. ``offset`` is that of the record: its header, then its payload. A reader
    believes nothing but that header (key, space, token digest, generation, lengths, mark) and the checksum in it.
    ``leases``: how often each segment was leased for this.
    """

    found: npt.NDArray[np.bool_]
    segment: npt.NDArray[np.uint32]
    generation: npt.NDArray[np.uint64]
    offset: npt.NDArray[np.uint64]
    record_bytes: npt.NDArray[np.uint32]
    payload_bytes: npt.NDArray[np.uint32]
    codec: npt.NDArray[np.uint8]
    flags: npt.NDArray[np.uint8]
    leases: dict[Segment, int]


class Ledger:
    """Thread-safe; ``lock`` is reentrant and held for microseconds (the index is written under it)."""

    def __init__(self, segments: SegmentSet, presence: PresenceMap, index: Index, counters: Counters) -> None:
        self.lock = threading.RLock()
        self.segments = segments
        self.presence = presence
        self.index = index
        self.counters = counters

    @contextlib.contextmanager
    def leased(self, space_id: SpaceId, name: BlockName, now_s: float) -> Iterator[Place | None]:
        """The place of a block that may be served, leased meanwhile; None is a miss."""
        place = self.take(space_id, name, now_s)
        try:
            yield place
        finally:
            if place is not None:
                self.give_back(place)

    def take(self, space_id: SpaceId, name: BlockName, now_s: float) -> Place | None:
        """As ``leased``; the caller gives the place back."""
        with self.lock:
            slot = self.presence.slot(name.key)
            if slot < 0 or not self.presence.is_alive(slot, now_s):
                return None
            if not self.presence.matches(slot, space_id, name.token_digest):
                return None
            place = self.place(slot)
            if place is not None:
                place.segment.leases += 1
            return place

    def give_back(self, place: Place) -> None:
        with self.lock:
            place.segment.leases -= 1

    def take_many(self, space_id: SpaceId, keys: bytes, token_digests: bytes, now_s: float) -> Taken:
        """As ``take``, for many keys at once: ``keys`` are 32 bytes each, ``token_digests`` 16. Give it back whole."""
        count = len(keys) // KEY_BYTES
        columns = np.zeros(count, dtype=_TAKEN_DTYPE)
        with self.lock:
            presence = self.presence
            slots = presence.slots(
                [BlockKey(keys[at : at + KEY_BYTES]) for at in range(0, len(keys), KEY_BYTES)], count
            )
            served = presence.served(slots, space_id, np.frombuffer(token_digests, dtype="<u8").reshape(-1, 2), now_s)
            rows = presence.rows[slots[served]]
            leases: dict[Segment, int] = {}
            known = np.ones(len(rows), dtype=bool)
            for number in np.unique(rows["segment"]).tolist():
                segment = self.segments.segments.get(number)
                here = rows["segment"] == number
                if segment is None:
                    known &= ~here
                    continue
                here &= rows["generation"] == segment.header.generation
                known &= here | (rows["segment"] != number)
                leases[segment] = int(here.sum())
                segment.leases += leases[segment]
        rows, places = rows[known], served[known]
        for name in ("segment", "generation", "offset", "payload_bytes", "codec", "flags"):
            columns[name][places] = rows[name]
        columns["record_bytes"][places] = (
            (rows["stored_bytes"] + HEADER_BYTES + RECORD_ALIGN - 1) // RECORD_ALIGN * RECORD_ALIGN
        )
        columns["found"][places] = True
        return Taken(**{name: columns[name] for name in _TAKEN_DTYPE.names or ()}, leases=leases)

    def give_back_many(self, taken: Taken) -> None:
        """End the leases of ``take_many``, once."""
        with self.lock:
            for segment, count in taken.leases.items():
                segment.leases -= count
            taken.leases.clear()

    def place(self, slot: int) -> Place | None:
        """Place of a row, unleased; None if its segment is gone."""
        found = self._place(slot)
        return found[0] if found is not None else None

    def _place(self, slot: int) -> tuple[Place, bytes, bytes] | None:
        """Place, token digest and space id of a row."""
        number, generation, offset, checksum, stored_bytes, payload_bytes, flags, codec, token_digest, space_id = (
            place_in(self.presence.entry(slot))
        )
        segment = self.segments.segments.get(number)
        if segment is None or segment.header.generation != generation:
            return None
        place = Place(segment, generation, offset, stored_bytes, payload_bytes, codec, flags, checksum)
        return place, token_digest, space_id

    def is_at(self, key: BlockKey, place: Place) -> bool:
        """Whether the key's row still names this very record."""
        slot = self.presence.slot(key)
        if slot < 0:
            return False
        row = self.presence.rows[slot]
        here = (int(row["segment"]), int(row["generation"]), int(row["offset"]))
        return here == (place.segment.number, place.generation, place.offset)

    def store(self, rows: Rows, segments: Iterable[Segment], pins_s: Mapping[BlockKey, int]) -> None:
        """Add or replace rows (of ``ENTRY_DTYPE``, no key twice) whose records are written: one index batch.

        Raises IndexRefused; nothing has changed then.
        """
        keys = keys_in(rows)
        with self.lock:
            added = sum(self.presence.slot(key) < 0 for key in keys)
            forgotten = {key: None for key in keys if self.presence.tombstone(key)}
            entries = [(key, row.tobytes()) for key, row in zip(keys, rows, strict=True)]
            batch = IndexBatch(
                entries=entries,
                extents={segment.number: Extent(segment.header.generation, segment.end) for segment in segments},
                tombstones=forgotten,
                blocks=len(self.presence) + added,
            )
            self.index.write(batch)
            for key, entry in entries:
                self.presence.add(key, entry, pins_s.get(key, 0))

    def touch(self, keys: Iterable[BlockKey], class_byte: int, now_s: int) -> None:
        """Count a use of present blocks by a class."""
        with self.lock:
            changed: list[tuple[BlockKey, bytes]] = []
            for key in keys:
                slot = self.presence.slot(key)
                if slot >= 0 and self.presence.touch(slot, class_byte, now_s):
                    changed.append((key, self.presence.entry(slot)))
            if changed:
                self._write(IndexBatch(entries=changed, blocks=len(self.presence)))

    def forget(self, reasons: Mapping[BlockKey, Presence], when_s: int) -> None:
        """Drop rows; lookups say why from now on."""
        with self.lock:
            tombstones: dict[BlockKey, Tombstone | None] = {}
            removed = [key for key in reasons if self.presence.slot(key) >= 0]
            for key in removed:
                tombstones |= self.presence.remove(key, Tombstone(reasons[key], when_s))
            if removed:
                self._write(IndexBatch(removed=removed, tombstones=tombstones, blocks=len(self.presence)))

    def quarantine(self, key: BlockKey, place: Place, now_s: int) -> bool:
        """Stop serving a record that failed verification; the caller holds a lease. False if it had
        moved on already.
        """
        with self.lock:
            if not self.is_at(key, place):
                return False
            self.counters.quarantined += 1
            with contextlib.suppress(OSError):
                self.mark(place, Mark(MarkReason.QUARANTINED, now_s))
            self.forget({key: Presence.QUARANTINED}, now_s)
        log.error("block_quarantined segment=%d offset=%d", place.segment.number, place.offset)
        return True

    def mark(self, place: Place, mark: Mark) -> None:
        """Make the record at a place dead on disk, unless the segment has begun another life since. Raises OSError."""
        with self.lock:
            if place.segment.header.generation == place.generation:
                place.segment.mark(place.offset, mark)

    def mark_where_it_is(self, key: BlockKey, mark: Mark) -> None:
        """Make the record that a key's row names now dead on disk. Raises OSError."""
        with self.lock:
            slot = self.presence.slot(key)
            place = self.place(slot) if slot >= 0 else None
            if place is not None:
                place.segment.mark(place.offset, mark)

    def forget_dead(self, key: BlockKey, place: Place, mark: Mark) -> None:
        """Drop the row of a record whose mark says that it was removed (the index had lost the removal)."""
        removed = mark.reason.value in (Presence.EXPIRED, Presence.EVICTED, Presence.QUARANTINED, Presence.PURGED)
        with self.lock:
            if self.is_at(key, place):
                self.forget({key: Presence(mark.reason.value) if removed else Presence.EVICTED}, mark.when_s)

    def compact_if_due(self) -> None:
        """Keep the index within its budget."""
        with self.lock:
            if self.index.closed or not self.mend_index():
                return
            try:
                self.counters.index_compactions += self.index.compact_if_due(self.content())
            except (IndexRefused, OSError) as error:
                self.counters.index_errors += 1
                log.error("index_not_compacted problem=%r", error)

    def mend_index(self) -> bool:
        """Whether the index takes writes: one that refused is written anew from memory, once there is room for that."""
        with self.lock:
            if not self.index.refusing:
                return True
            if self.index.closed or not self.index.has_room_to_rewrite(len(self.presence)):
                return False
            try:
                self.index.rewrite(self.content())
            except (IndexRefused, OSError) as error:
                self.counters.index_errors += 1
                log.error("index_not_mended problem=%r", error)
                return False
            if len(self.presence):  # a new shard's index is written for the first time
                log.warning("index_mended blocks=%d", len(self.presence))
            return True

    def content(self) -> Iterator[IndexBatch]:
        """The whole ledger as index batches; the last one carries extents and the count."""
        keys = [self.presence.key(int(slot)) for slot in self.presence.used.nonzero()[0]]
        for begin in range(0, len(keys), _PAGE):
            page = [(key, self.presence.entry(self.presence.slot(key))) for key in keys[begin : begin + _PAGE]]
            yield IndexBatch(entries=page, blocks=begin + len(page))
        buried = list(self.presence.tombstones.items())
        for begin in range(0, len(buried), _PAGE):
            yield IndexBatch(tombstones=dict(buried[begin : begin + _PAGE]), blocks=len(keys))
        yield IndexBatch(extents=self.extents(), blocks=len(keys))

    def extents(self) -> dict[int, Extent]:
        return {
            number: Extent(segment.header.generation, segment.end) for number, segment in self.segments.segments.items()
        }

    def _write(self, batch: IndexBatch) -> None:
        """A removal or touch that the index refuses stays in memory, from which the index is mended; should the process
        die before, marks, generations or the count betray it at the next start.
        """
        try:
            self.index.write(batch)
        except IndexRefused as error:
            self.counters.index_errors += 1
            log.error("index_not_written problem=%r", error)
