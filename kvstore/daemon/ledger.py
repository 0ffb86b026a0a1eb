"""What a shard holds: the presence map and the index, changed together, and the leases on segments.

Owns the locks. Does not write records or choose victims. Invariants: memory and index agree after every method, or
the index's count of entries betrays it at the next start and it is rebuilt; a place handed out keeps its segment from
being recycled until it is given back.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvstore import extents
from kvstore.capacity import FIRST_RECORD
from kvstore.daemon.events import EventLog
from kvstore.daemon.fingerprints import Slots
from kvstore.daemon.headers import are_whole, headers_in, rows_of
from kvstore.daemon.index import (
    NO_PLACES,
    NO_ROWS,
    Extent,
    Index,
    IndexBatch,
    IndexDamaged,
    IndexRefused,
    Rows,
    entries_of,
    keys_in,
    record_bytes_in,
)
from kvstore.daemon.ingest import Ingest
from kvstore.daemon.presence import PresenceMap, digest_words, fingerprint_of, fingerprints_in, key_words
from kvstore.daemon.record import HEADER_BYTES, RECORD_ALIGN, Mark, MarkReason, RecordHeader
from kvstore.daemon.segment import FREE, Segment
from kvstore.daemon.segments import SegmentSet
from kvstore.daemon.tallies import Counters
from kvstore.daemon.tombstones import Tombstone
from kvstore.extents import LENT, MISS
from kvstore.keys import BlockKey, BlockName, SpaceId, TokenDigest
from kvstore.limits import KEY_BYTES
from kvstore.store import Presence

log = logging.getLogger(__name__)
_PAGE = 1024
_PAGE_OF_LOCK = 256
"""Blocks that are forgotten under one hold of the lock: about a millisecond."""
_GONE = np.zeros((), extents.ROW)
_GONE["status"] = MISS


class Place(NamedTuple):
    """Where a block lies, as of the moment it was looked up. (A frozen dataclass takes four times as long to make.)

    ``fingerprint`` and ``slot`` say which row of the presence map that was.
    """

    segment: Segment
    generation: int
    offset: int
    record_bytes: int
    payload_bytes: int
    codec: int
    flags: int
    fingerprint: int
    slot: int


class Described(NamedTuple):
    """Index values of some slots, and the positions of those that have one."""

    rows: Rows
    at: npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Taken:
    """Where many blocks lie, as of the moment they were looked up: one element a key, in the order asked.

    ``rows``: of those that are found (LENT), where the record lies: its header, then its payload; ``file`` is the place
    of its segment among ``leases``. The other columns are 0 where nothing is found. A reader believes nothing but the
    header (key, space, token digest, generation, lengths, mark) and the checksum in it. ``leases``: how often each
    segment was leased for this.
    """

    rows: extents.Rows
    record_bytes: npt.NDArray[np.uint32]
    payload_bytes: npt.NDArray[np.uint32]
    codec: npt.NDArray[np.uint8]
    leases: dict[Segment, int]

    @classmethod
    def nothing(cls, count: int) -> Taken:
        """Nothing found of so many keys."""
        rows = np.zeros(count, extents.ROW)
        rows["status"] = MISS
        return cls(rows, np.zeros(count, np.uint32), np.zeros(count, np.uint32), np.zeros(count, np.uint8), {})

    @property
    def found(self) -> npt.NDArray[np.bool_]:
        return np.asarray(self.rows["status"] == LENT)

    def runs(self, where: npt.NDArray[np.bool_]) -> int:
        """How many runs of records, each right behind the one before, some of the blocks make in whatever order."""
        if len(where) == 1:
            return int(where[0])
        places = self.rows["segment"].astype(np.uint64)
        places <<= np.uint64(32)
        places |= self.rows["offset"]  # offsets are below 2^32
        begins, ends = places[where], (places + self.record_bytes)[where]
        return len(begins) - len(set(begins.tolist()).intersection(ends.tolist()))

    def forget_gone(self) -> None:
        """Of blocks whose file vanished, nothing is told but that."""
        gone = self.rows["status"] != LENT
        self.rows[gone] = _GONE
        for column in (self.record_bytes, self.payload_bytes, self.codec):
            column[gone] = 0

    def spread(self, at: Slots, count: int) -> Taken:
        """The same among so many keys, at these positions."""
        taken = Taken.nothing(count)
        taken.rows[at], taken.record_bytes[at] = self.rows, self.record_bytes
        taken.payload_bytes[at], taken.codec[at] = self.payload_bytes, self.codec
        taken.leases.update(self.leases)
        return taken


def _taken_one(place: Place | None) -> Taken:
    """What was taken of one key. (The steps for many would take ten times as long.)"""
    taken = Taken.nothing(1)
    if place is not None:
        segment = place.segment
        taken.rows[0] = (place.generation, place.offset, segment.number, 0, LENT, place.flags, b"")
        taken.record_bytes[0], taken.payload_bytes[0] = place.record_bytes, place.payload_bytes
        taken.codec[0] = place.codec
        taken.leases[segment] = 1
    return taken


class _Deadlines:
    """Deadlines of some rows and of their segments, as they are now. The lock is held."""

    def __init__(self, presence: PresenceMap, slots: Slots) -> None:
        self._presence = presence
        self._slots = slots
        self._segments = np.unique(presence.segments_of(slots)).tolist()
        self._until_s = presence.keep_until_s(slots)
        self._promises = presence.promises_of(self._segments)

    def lengthened(self) -> tuple[int, int]:
        """Bytes times the seconds by which they are kept longer by now: of the rows, and of their whole segments."""
        longer_s = (self._presence.keep_until_s(self._slots) - self._until_s).astype(np.float64)
        rows_byte_s = int(longer_s @ self._presence.record_bytes_of(self._slots))
        after = self._presence.promises_of(self._segments)
        pairs = zip(self._promises, after, strict=True)
        return rows_byte_s, sum((now_s - then_s) * size for (then_s, size), (now_s, _) in pairs)


class Ledger:
    """Thread-safe. ``lock`` (inner) guards the map and leases and is held for microseconds by whoever asks or reads;
    ``journal`` (outer) orders all changes, and is held while the index takes them. Both are reentrant.
    """

    def __init__(
        self,
        segments: SegmentSet,
        presence: PresenceMap,
        index: Index,
        counters: Counters,
        events: EventLog,
        ingest: Ingest,
    ) -> None:
        self.journal = threading.RLock()
        self.lock = threading.RLock()
        self.segments = segments
        self.presence = presence
        self.index = index
        self.counters = counters
        self.events = events
        self.ingest = ingest

    @contextlib.contextmanager
    def changing(self) -> Iterator[None]:
        """Hold both locks, in their order: for changes that depend on what is there."""
        with self.journal, self.lock:
            yield

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
        return self.take_one(space_id, name.key, name.token_digest, now_s)

    def take_one(self, space_id: SpaceId, key: BlockKey, token_digest: TokenDigest, now_s: float) -> Place | None:
        """As ``take``, without a name made for it."""
        with self.lock:
            slot = self.presence.find(space_id, key, token_digest)
            if slot < 0 or not self.presence.is_alive(slot, now_s):
                return None
            if self.presence.shapes.any_locked and self.presence.is_locked(slot):
                self.counters.key_missing += 1
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
        if len(keys) == KEY_BYTES:
            return _taken_one(self.take_one(space_id, BlockKey(keys), TokenDigest(token_digests), now_s))
        words, digests = key_words(keys), digest_words(token_digests)
        leases: dict[Segment, int] = {}
        with self.lock:
            presence, shapes = self.presence, self.presence.shapes
            slots = presence.slots(words)
            served = presence.served(slots, words, space_id, digests, now_s)
            if shapes.any_locked:
                self.counters.key_missing += int(np.count_nonzero(presence.locked(slots[slots >= 0])))
            if len(served) < len(words):
                slots = slots.take(served)
            shape = presence.shape_of(slots)
            rows = self._lease(presence.segments_of(slots), leases)
            rows["offset"], rows["flags"] = presence.offsets_of(slots), shapes.flags.take(shape)
            record_bytes = presence.record_bytes_of(slots).astype(np.uint32)
            taken = Taken(rows, record_bytes, shapes.payload_bytes.take(shape), shapes.codec.take(shape), leases)
        if not taken.found.all():
            taken.forget_gone()
        return taken if len(served) == len(words) else taken.spread(served, len(words))

    def _lease(self, segments: npt.NDArray[np.uint32], leases: dict[Segment, int]) -> extents.Rows:
        """Lease each segment as often as it is named, and say so in ``leases``; returns what its rows have in common,
        in that order.

        The lock is held.
        """
        numbers = segments.tolist()
        counts = Counter(numbers)
        lives = np.zeros(len(counts), extents.ROW)
        lives["status"] = MISS
        for at, (number, count) in enumerate(counts.items()):
            segment = self.segments.segments.get(number)
            if segment is not None:  # a file that vanished is let go before its rows
                lives[at] = (segment.header.generation, 0, number, len(leases), LENT, 0, b"")
                segment.leases += count
                leases[segment] = count
        which = dict(zip(counts, range(len(counts)), strict=True))
        return lives.take([which[number] for number in numbers])

    def give_back_many(self, taken: Taken) -> None:
        """End the leases of ``take_many``, once."""
        with self.lock:
            for segment, count in taken.leases.items():
                segment.leases -= count
            taken.leases.clear()

    def place(self, slot: int) -> Place | None:
        """Place of a row, unleased; None if its segment is gone, or its life has ended."""
        presence = self.presence
        row = presence.row(slot)
        segment = self.segments.segments.get(row.segment)
        if segment is None or segment.header.class_byte == FREE:
            return None
        return Place(
            segment,
            segment.header.generation,
            row.offset,
            row.record_bytes,
            row.shape.payload_bytes,
            row.shape.codec,
            row.shape.flags,
            row.fingerprint,
            slot,
        )

    def is_at(self, place: Place) -> bool:
        """Whether the row still names this very record."""
        with self.lock:
            word = (place.segment.number << 32) | (place.offset // RECORD_ALIGN)
            here = int(self.presence.places[place.slot]) == word and place.segment.header.generation == place.generation
            return here and int(self.presence.fingerprints_of(np.array([place.slot]))[0]) == place.fingerprint

    def lock_out(self, place: Place, codec: int) -> None:
        """The cipher key of a block is not the one that its codec byte names: look-ups shall know."""
        with self.lock:
            if self.is_at(place):
                self.presence.lock(place.slot, codec)

    def store(
        self,
        rows: Rows,
        segments: Iterable[Segment],
        pins_s: Mapping[BlockKey, int],
        *,
        new: bool = False,
        in_any_case: bool = False,
    ) -> None:
        """Add or replace rows (of ``ENTRY_DTYPE``, no key twice) whose records are written: one index batch.

        ``new``: no row has one of their fingerprints. Raises IndexRefused; nothing has changed then. ``in_any_case``:
        an index that refuses is mended later, since what the rows replace is dead already.
        """
        fingerprints = fingerprints_in(rows)
        pins = {at: pins_s[key] for at, key in enumerate(keys_in(rows)) if key in pins_s} if pins_s else {}
        with self.journal:
            with self.lock:
                removed, added = NO_PLACES, rows
                if not new:
                    slots = self.presence.find_all(fingerprints)
                    removed, added = self.presence.places[slots[slots >= 0]], rows[slots < 0]
                buried = fingerprints[self.presence.tombstones.reasons(fingerprints) != 0]
            batch = IndexBatch(
                rows=rows,
                removed=removed,
                extents={segment.number: Extent(segment.header.generation, segment.end) for segment in segments},
                tombstones=dict.fromkeys(buried.tolist()),
                blocks=len(self.presence) + len(rows) - len(removed),
            )
            (self._write if in_any_case else self.index.write)(batch)
            with self.lock:
                self.presence.tombstones.forget(buried)
                self.presence.insert(rows, pins, new=new)
            if len(added):
                size_bytes = int(record_bytes_in(added).sum())
                self.ingest.stored(int(added["class_byte"][0]), len(added), size_bytes, int(added["written_s"][0]))
            if self.events.recording:
                self.events.stored(added)

    def store_one(self, header: RecordHeader, segment: Segment, pin_s: int) -> None:
        """As ``store`` with ``new``, of one record."""
        fingerprint = fingerprint_of(header.key)
        with self.journal:
            with self.lock:
                buried = self.presence.tombstones.get(fingerprint) is not None
            rows = entries_of([header])
            batch = IndexBatch(
                rows=rows,
                extents={segment.number: Extent(segment.header.generation, segment.end)},
                tombstones={fingerprint: None} if buried else {},
                blocks=len(self.presence) + 1,
            )
            self.index.write(batch)
            with self.lock:
                if buried:
                    self.presence.tombstones.forget(np.array([fingerprint], dtype=np.uint64))
                self.presence.insert_one(header, pin_s)
            self.ingest.stored(header.class_byte, 1, header.record_bytes, header.written_s)
            if self.events.recording:
                self.events.stored(rows)

    def touch(self, slots: Slots, class_byte: int, now_s: int) -> None:
        """Count a use of present blocks by a class."""
        with self.journal:
            with self.lock:
                worth = self.presence.worth_touching(slots, class_byte, now_s)
                if not len(worth):
                    return
                before = _Deadlines(self.presence, worth)
                touched = [self.presence.touch(slot, class_byte, now_s) for slot in worth.tolist()]
                changed = worth[np.array(touched, dtype=np.bool_)]
                if not len(changed):
                    return
                self.ingest.lengthened(class_byte, *before.lengthened(), now_s)
            self._write_touches(changed)

    def disown(self, places: Sequence[Place], class_byte: int) -> None:
        """Let blocks that others touched be as if a class never had."""
        for begin in range(0, len(places), _PAGE):
            with self.journal:
                with self.lock:
                    slots = [place.slot for place in places[begin : begin + _PAGE] if self.is_at(place)]
                    for slot in slots:
                        self.presence.disown(slot, class_byte)
                self._write_touches(np.array(slots, dtype=np.int64))

    def _write_touches(self, slots: Slots) -> None:
        """Let the index know of touches. The journal is held."""
        try:
            found, at = self.index.values(self.presence.places[slots])
            rows = found.copy()
            self.presence.write_touches(rows, slots[at])
            self._write(IndexBatch(rows=rows, blocks=len(self.presence)))
        except IndexDamaged as error:
            self.index.refusing = True
            self._not_written(error)

    def forget(self, slots: Slots, reasons: npt.NDArray[np.uint8], when_s: int) -> None:
        """Drop rows, each once; lookups say why from now on."""
        if len(slots):
            with self.journal:
                described = self.describe(slots)
                self.record(self.drop(slots, reasons, when_s), described, reasons, when_s)

    def drop(
        self,
        slots: Slots,
        reasons: npt.NDArray[np.uint8],
        when_s: int,
        recycled: Segment | None = None,
        breathe: Callable[[], None] | None = None,
    ) -> IndexBatch:
        """The part of ``forget`` that lookups wait for; the caller holds the journal until it has recorded the rest.

        ``recycled``: the index learns of this segment's new life. Should a power loss take its header back to the old
        one, the next start then looks through it, rather than leave records in it that nobody knows of.
        ``breathe``: called in between, without the lock unless the caller holds it.
        """
        extents = {recycled.number: Extent(recycled.header.generation, recycled.end)} if recycled is not None else {}
        fingerprints, places = self.presence.fingerprints_of(slots), self.presence.places[slots]
        with self.lock:
            forgotten = self.presence.tombstones.bury(fingerprints, reasons, when_s)
        if breathe is not None:
            breathe()
        with self.lock:  # whoever waits for it need not wait for both
            self.presence.remove(slots)
        blocks = len(self.presence)
        made = [Tombstone(reason, when_s) for reason in range(int(reasons.max(initial=0)) + 1)]
        tombstones: dict[int, Tombstone | None] = {
            fingerprint: made[reason]
            for fingerprint, reason in zip(fingerprints.tolist(), reasons.tolist(), strict=True)
        }
        tombstones |= dict.fromkeys(forgotten.tolist())
        return IndexBatch(removed=places, tombstones=tombstones, extents=extents, blocks=blocks)

    def record(
        self, dropped: IndexBatch, described: Described | None, reasons: npt.NDArray[np.uint8], when_s: int
    ) -> None:
        """Let the index and the listeners know of rows that were dropped. ``described``: what ``describe`` said."""
        self._write(dropped)
        if described is not None:
            self.events.removed(described.rows, reasons[described.at], when_s)

    def describe(self, slots: Slots) -> Described | None:
        """What listeners are told of blocks that will go: None while nobody listens. The caller holds the journal.

        It reads the index, 6 us a block, for which no lookup should wait: ask before taking the lock.
        """
        if not self.events.recording:
            return None
        try:
            described = Described(*self.index.values(self.presence.places[slots]))
        except IndexDamaged:
            described = Described(NO_ROWS, np.zeros(0, dtype=np.int64))
        if len(described.at) < len(slots):
            self.events.lost()
        return described

    def forget_one(self, slot: int, reason: Presence, when_s: int) -> None:
        self.forget(np.array([slot]), np.array([reason], dtype=np.uint8), when_s)

    def quarantine(self, places: Sequence[Place], now_s: int) -> bool:
        """Stop serving records that failed verification; the caller holds leases. False if all had moved on already.

        Their rows lapse first: nobody who puts such a block again beside this is told that it is there.
        """
        with self.changing():
            here = [place for place in places if self.is_at(place)]
            self.presence.lapse(np.array([place.slot for place in here], dtype=np.int64))
        self.counters.quarantined += len(here)
        self.bury(here, Mark(MarkReason.QUARANTINED, now_s))
        for place in here:
            log.error("block_quarantined segment=%d offset=%d", place.segment.number, place.offset)
        return bool(here)

    def bury(self, places: Sequence[Place], mark: Mark) -> list[Place]:
        """Make records dead on disk, durably, and then forget their rows: else a power loss may take back a mark and
        not the removal, and leave a living record that no deletion finds, but a rebuild of the index does.

        Returns those whose mark the disk does not take. Their rows stay, and lapse: nobody is served them, a deletion
        finds them, the next sweep tries again. The caller holds the writer's lock, or leases. Nobody's lookup waits
        for the disk.
        """
        marked: list[Place] = []
        for begin in range(0, len(places), _PAGE_OF_LOCK):
            with self.journal:
                marked += [place for place in places[begin : begin + _PAGE_OF_LOCK] if self.mark_at(place, mark)]
        sick = self.flush_marks({place.segment for place in marked})
        done = [place for place in marked if place.segment not in sick]
        for begin in range(0, len(done), _PAGE_OF_LOCK):
            with self.journal:
                page = done[begin : begin + _PAGE_OF_LOCK]
                slots = np.array([place.slot for place in page if self.is_at(place)], dtype=np.int64)
                self.forget(slots, np.full(len(slots), mark.reason, dtype=np.uint8), mark.when_s)
        if len(done) == len(places):
            return []
        taken = {place.slot for place in done}
        left = [place for place in places if place.slot not in taken]
        with self.changing():
            self.presence.lapse(np.array([place.slot for place in left if self.is_at(place)], dtype=np.int64))
        return left

    def mark_at(self, place: Place, mark: Mark) -> bool:
        try:
            place.segment.mark(place.offset, mark)
        except OSError as error:
            self.counters.write_errors += 1
            log.error("record_not_marked segment=%d offset=%d problem=%r", place.segment.number, place.offset, error)
            return False
        return True

    def mark_replaced(self, keys: Iterable[BlockKey], mark: Mark) -> None:
        """Make the records that rows of these keys name dead on disk, durably; the caller holds the journal until other
        records are in their place. Raises OSError: rows whose record may be dead by then have lapsed.
        """
        slots: list[int] = []
        segments: set[Segment] = set()
        try:
            for key in keys:
                with self.lock:
                    slot = self.presence.slot(key)
                    place = self.place(slot) if slot >= 0 else None
                    if place is not None:
                        slots.append(slot)
                        segments.add(place.segment)
                        place.segment.mark(place.offset, mark)
            if self.flush_marks(segments):
                raise OSError(errno.EIO, "the marks of what is replaced were not flushed")
        except OSError:
            with self.lock:
                self.presence.lapse(np.array(slots, dtype=np.int64))
            raise

    def flush_marks(self, segments: Iterable[Segment]) -> set[Segment]:
        """Make marks durable, as ``bury`` says why; the segments whose disk did not take them."""
        sick: set[Segment] = set()
        for segment in segments:
            try:
                segment.sync(if_dirty=True)
            except OSError as error:
                sick.add(segment)
                self.counters.write_errors += 1
                log.error("marks_not_flushed segment=%d problem=%r", segment.number, error)
        return sick

    def forget_dead(self, place: Place, mark: Mark) -> None:
        """Drop the row of a record whose mark says that it was removed (the index had lost the removal), once that mark
        is on disk: whoever wrote it may not have come so far. Where the disk does not take it the row lapses.
        """
        with self.journal:  # whoever marks is done with it
            is_here = self.is_at(place)
        if not is_here:
            return
        is_sick = bool(self.flush_marks([place.segment]))
        removed = mark.reason.value in (Presence.EXPIRED, Presence.EVICTED, Presence.QUARANTINED, Presence.PURGED)
        with self.changing():
            if not self.is_at(place):
                return
            if is_sick:
                self.presence.lapse(np.array([place.slot]))
            else:
                self.forget_one(place.slot, Presence(mark.reason.value) if removed else Presence.EVICTED, mark.when_s)

    def compact_if_due(self) -> None:
        """Keep the index within its budget."""
        if not self.index.closed and self.mend_index():
            self.index.compact_if_due()

    def mend_index(self) -> bool:
        """Whether the index takes writes: one that refused is written anew, once there is room for that, from the map
        and the headers of the records that it names.
        """
        if not self.index.refusing:
            return True
        with self.journal:
            if self.index.closed or not self.index.has_room_to_rewrite(len(self.presence)):
                return False
            try:
                mended = self.index.mend(self.content())
            except (IndexRefused, OSError) as error:
                self.counters.index_errors += 1
                log.error("index_not_mended problem=%r", error)
                return False
            if mended:
                log.warning("index_mended blocks=%d", len(self.presence))
            return True

    def content(self) -> Iterator[IndexBatch]:
        """The whole ledger as index batches; the last one carries extents and the count.

        A row whose record cannot be read any more is dropped: its block would be a miss. If not even a mark can be
        written, the row stays in memory alone, and the count makes the next start look through the segments.
        """
        blocks = 0
        extents: dict[int, Extent] = {}
        for segment in list(self.segments.segments.values()):
            is_over = segment.header.class_byte == FREE  # then its rows are on their way out
            slots = self.presence.in_segment(segment.number)[: 0 if is_over else None]
            extents[segment.number] = Extent(segment.header.generation, self._end_of(slots))
            for begin in range(0, len(slots), _PAGE):
                page = slots[begin : begin + _PAGE]
                rows, bad = self._rows_at(segment, page)
                self._drop_unreadable(page[bad])
                blocks += len(rows)
                yield IndexBatch(rows=rows, blocks=blocks)
        buried = list(self.presence.tombstones.items())
        for begin in range(0, len(buried), _PAGE):
            yield IndexBatch(tombstones=dict(buried[begin : begin + _PAGE]), blocks=blocks)
        yield IndexBatch(extents=extents, blocks=len(self.presence))

    def _end_of(self, slots: Slots) -> int:
        """Where the records of some rows of a segment end. What lies beyond may be written and not counted yet: should
        the process die now, the next start finds it.
        """
        ends = self.presence.offsets_of(slots).astype(np.int64) + self.presence.record_bytes_of(slots)
        return int(ends.max(initial=FIRST_RECORD))

    def _rows_at(self, segment: Segment, slots: Slots) -> tuple[Rows, npt.NDArray[np.bool_]]:
        """Index rows of some slots of a segment, from their records; and which slots have none."""
        offsets = self.presence.offsets_of(slots)
        data = bytearray()
        for offset in offsets.tolist():
            try:
                data += segment.files.read(segment.fd, HEADER_BYTES, offset).ljust(HEADER_BYTES, b"\0")
            except OSError:
                data += bytes(HEADER_BYTES)
        headers = headers_in(bytes(data))
        good = are_whole(headers, segment.number, segment.header.generation, offsets)
        rows = rows_of(headers[good])
        good[good] = fingerprints_in(rows) == self.presence.fingerprints_of(slots[good])
        rows = rows_of(headers[good])
        self.presence.write_touches(rows, slots[good])
        return rows, ~good

    def _drop_unreadable(self, slots: Slots) -> None:
        """The journal is held, so that nothing is recycled meanwhile."""
        self.counters.corrupt += len(slots)
        if len(slots) and self.events.recording:
            self.events.lost()
        places = [place for slot in slots.tolist() if (place := self.place(slot)) is not None]
        self.bury(places, Mark(MarkReason.QUARANTINED, 0))

    def _write(self, batch: IndexBatch) -> None:
        """A removal or touch that the index refuses stays in memory, from which the index is mended; should the process
        die before, marks, generations or the count betray it at the next start.
        """
        try:
            self.index.write(batch)
        except IndexRefused as error:
            self._not_written(error)

    def _not_written(self, error: Exception) -> None:
        self.counters.index_errors += 1
        log.error("index_not_written problem=%r", error)
