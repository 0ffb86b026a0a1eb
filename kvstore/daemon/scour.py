"""Erasing: what was purged leaves no byte behind, and a raw scan that proves it.

Owns the search through segment files for records of given spaces, keys or classes, living or dead, of this life of the
file or an earlier one, and their erasure. Does not believe the index, and does not know who asks. Invariants: nothing
is appended, moved or recycled in a segment while it is erased; an erased record keeps its length and its mark, so that
scans pass over it; bytes behind a segment's end belong to nobody and are erased whole, because a record of an earlier
life may have lost its header there.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Iterable, Iterator, Set
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np

from kvstore.daemon.headers import headers_in, were_records
from kvstore.daemon.ledger import Ledger
from kvstore.daemon.presence import fingerprint_of
from kvstore.daemon.record import HEADER_BYTES, RECORD_ALIGN, RECORD_MAGIC, Mark, MarkReason, RecordHeader
from kvstore.daemon.segment import FIRST_RECORD, FREE, Scanned, Segment
from kvstore.keys import BlockKey, SpaceId
from kvstore.limits import MIB
from kvstore.store import Presence

RENEW_ATTEMPTS = 100
RENEW_PAUSE_S = 0.1
_READ_BYTES = MIB


@dataclass(frozen=True, slots=True)
class Condemned:
    """What is to leave no byte: everything of some spaces (None: of all), or only these keys of theirs (``keys`` not
    None), or only what names a class (``class_byte`` not None), as that which wrote it or used it.

    ``until_s``: written (or used by the class) then or earlier; later ones that are served are somebody's new blocks.
    ``by_age``: the time is what condemns.
    """

    spaces: frozenset[SpaceId] | None
    keys: frozenset[BlockKey] | None
    until_s: int
    class_byte: int | None = None
    by_age: bool = False

    def covers(self, space_id: SpaceId, key: BlockKey) -> bool:
        """Whether it names a block, whenever that was written and by whomever; an erased record is none."""
        if self.spaces is None and is_erased(key):
            return False
        return (self.spaces is None or space_id in self.spaces) and (self.keys is None or key in self.keys)

    def names(self, header: RecordHeader, *, ever: bool = False) -> bool:
        """Whether it names a record; ``ever``: whatever its time."""
        if not self.covers(header.space_id, header.key):
            return False
        return self.dooms(header.class_byte, header.written_s, header.touches, ever=ever)

    def dooms(self, class_byte: int, written_s: int, touches: Iterable[tuple[int, int]], *, ever: bool = False) -> bool:
        """As ``names``, of a record that it covers."""
        uses = [(class_byte, written_s), *(touches if self.class_byte is not None else ())]
        return any(
            (ever or when_s <= self.until_s) and self.class_byte in (None, by_class) for by_class, when_s in uses
        )


@dataclass(slots=True)
class Scoured:
    """What a scan found. ``living``: records that could be served; ``dead``: marked ones, not yet erased; ``stale``:
    headers that an earlier life of the file left behind its end. ``unreadable``: places where no record could be
    read, so that nobody can say what lies there.
    """

    segments: int = 0
    living: int = 0
    dead: int = 0
    stale: int = 0
    unreadable: int = 0

    def add(self, other: Scoured) -> None:
        self.segments += other.segments
        self.living += other.living
        self.dead += other.dead
        self.stale += other.stale
        self.unreadable += other.unreadable


def search(ledger: Ledger, condemned: Condemned) -> Scoured:
    """Count what is condemned in all segment files, beside readers and writers. Raises OSError."""
    total = Scoured()
    for segment in list(ledger.segments.segments.values()):
        with ledger.lock:
            segment.leases += 1  # it is not recycled meanwhile
        try:
            total.add(_search_one(segment, condemned))
        finally:
            with ledger.lock:
                segment.leases -= 1
    return total


def erase(
    ledger: Ledger,
    writing: Callable[[], AbstractContextManager[None]],
    condemned: Condemned,
    when_s: int,
    *,
    overwrite: bool,
) -> tuple[Scoured, set[BlockKey]]:
    """Erase what is condemned, and all that lies behind the ends of segments; what that was, and its keys.

    ``writing``: holds the writer's lock, for one segment at a time. On return everything is durable, and the index has
    been written anew without the names. Raises OSError; what is left then is found again the next time.
    """
    total, keys = Scoured(), set[BlockKey]()
    for segment in list(ledger.segments.segments.values()):
        with writing():
            total.add(_erase_one(ledger, segment, condemned, when_s, keys, overwrite=overwrite))
    with writing():
        ledger.segments.flush()
    _renew_index(ledger)
    return total, keys


def erase_all_but(segment: Segment, kept: Set[int], mark: Mark, *, overwrite: bool) -> None:
    """Leave no byte of a segment but the records at some offsets; what lived is marked. Raises OSError."""
    dead: list[tuple[RecordHeader, Mark]] = []
    if segment.torn:
        segment.seal()
    for step in _records(segment):
        if step.header is None or step.offset in kept or is_erased(step.header.key):
            continue
        if step.mark is None:
            segment.mark(step.offset, mark)
        segment.erase_payload(step.header, overwrite=overwrite)
        dead.append((step.header, step.mark or mark))
    segment.erase_unused(overwrite=overwrite)
    segment.sync()
    for header, why in dead:
        segment.erase_header(header, why)


def is_erased(key: BlockKey) -> bool:
    """Whether a dead record's name was erased."""
    return not any(key)


def _search_one(segment: Segment, condemned: Condemned) -> Scoured:
    found = Scoured(segments=1)
    for step in _records(segment):
        if step.header is None:
            found.unreadable += 1
        elif condemned.names(step.header):
            found.living += step.mark is None
            found.dead += step.mark is not None
    found.stale = _stale(segment, condemned)
    return found


def _erase_one(
    ledger: Ledger, segment: Segment, condemned: Condemned, when_s: int, keys: set[BlockKey], *, overwrite: bool
) -> Scoured:
    """Payloads first and durably, then the headers that say where they lie: what a kill leaves is found again."""
    found = Scoured(segments=1)
    mark = Mark(MarkReason.PURGED, when_s)
    headers: list[RecordHeader] = []
    if segment.torn:
        segment.seal()
    for step in _records(segment):
        if step.header is None:
            found.unreadable += 1
        elif condemned.names(step.header) or _is_refuse(ledger, segment, step, condemned):
            if step.mark is None and ledger.presence.is_held(fingerprint_of(step.header.key)):
                continue  # came under a legal hold meanwhile: the raw scan tells
            found.living += step.mark is None
            found.dead += step.mark is not None
            if step.mark is None:
                _forget(ledger, segment, step.header, when_s)
                segment.mark(step.offset, mark)
            segment.erase_payload(step.header, overwrite=overwrite)
            headers.append(step.header)
    segment.erase_unused(overwrite=overwrite)
    segment.sync()
    for header in headers:
        segment.erase_header(header, mark)
    keys.update(header.key for header in headers)
    return found


def _is_refuse(ledger: Ledger, segment: Segment, step: Scanned, condemned: Condemned) -> bool:
    """Whether a record is of what is condemned, though its time says that it is newer, and nobody is served it: it was
    deleted, or no row names it. It was written when the clock was ahead.
    """
    header = step.header
    if header is None or condemned.by_age or not condemned.names(header, ever=True):
        return False
    return step.mark is not None or not _is_named(ledger, segment, header)


def _is_named(ledger: Ledger, segment: Segment, header: RecordHeader) -> bool:
    with ledger.lock:
        slot = ledger.presence.slot(header.key)
        place = ledger.place(slot) if slot >= 0 else None
        return place is not None and place.segment is segment and place.offset == header.offset


def _forget(ledger: Ledger, segment: Segment, header: RecordHeader, when_s: int) -> None:
    """Forget a living record before it is erased: one that was put since the deletion, or that no row named."""
    with ledger.changing():
        if _is_named(ledger, segment, header):
            ledger.forget_one(ledger.presence.slot(header.key), Presence.PURGED, when_s)


def _renew_index(ledger: Ledger) -> None:
    """Write the index anew: a database keeps what was deleted from it until its files are merged."""
    for _ in range(RENEW_ATTEMPTS):
        if ledger.mend_index() and ledger.index.compact():
            return
        time.sleep(RENEW_PAUSE_S)  # another renewal is under way, which may have begun too early
    raise OSError(errno.EBUSY, "the index could not be written anew")


def _records(segment: Segment) -> Iterator[Scanned]:
    """Every record of the segment's present life."""
    end = segment.end
    if segment.header.class_byte == FREE or end == FIRST_RECORD:
        return
    for step in segment.scan(FIRST_RECORD, end, payloads=False):
        yield step
        size = step.hole_bytes if step.header is None else step.header.record_bytes
        if step.offset + size >= end:
            return


def _stale(segment: Segment, condemned: Condemned) -> int:
    """Condemned headers behind the segment's end."""
    return sum(
        condemned.covers(SpaceId(header["space"].tobytes()), BlockKey(header["key"].tobytes()))
        and condemned.dooms(
            int(header["class_byte"]),
            int(header["written_s"]),
            zip(header["touch_class"].tolist(), header["touch_s"].tolist(), strict=True),
        )
        for header in stale_headers(segment)
    )


def stale_headers(segment: Segment) -> Iterator[np.void]:
    """What earlier lives of the file left behind the segment's end that was a record's header. Raises OSError."""
    end = FIRST_RECORD if segment.header.class_byte == FREE else segment.end
    size = segment.header.segment_bytes
    for begin in range(end, size, _READ_BYTES):
        data = segment.files.read(segment.fd, min(_READ_BYTES, size - begin), begin)
        if RECORD_MAGIC not in data:
            continue
        starts = [at for at in range(0, len(data), RECORD_ALIGN) if data.startswith(RECORD_MAGIC, at)]
        headers = headers_in(b"".join(data[at : at + HEADER_BYTES] for at in starts))
        yield from headers[were_records(headers)] if starts else ()
