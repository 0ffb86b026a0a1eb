"""One segment: a preallocated, append-only, recycled file of records.

Owns the file's first page (header and seal), appending, reading one record and scanning. Does not know the index,
classes' meaning or eviction. Invariants: records of one segment carry its number, its present generation and their
own offset, so a record of an earlier life is never taken for a new one; recycling writes a new random generation
before any record; a scan skips damage that a record follows, and stops where none does beyond what is known to have
been written (the torn-tail rule).
"""

from __future__ import annotations

import contextlib
import os
import struct
import threading
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvstore.capacity import FIRST_RECORD as FIRST_RECORD
from kvstore.daemon.files import Files
from kvstore.daemon.record import (
    HEADER_BYTES,
    MARK_OFFSET,
    RECORD_ALIGN,
    RECORD_MAGIC,
    Mark,
    MarkReason,
    RecordDamaged,
    RecordHeader,
    decode_header,
    decode_mark,
    encode_header,
    encode_mark,
    verify_payload,
)
from kvstore.direct import PAGE_BYTES
from kvstore.keys import BlockKey, SpaceId, TokenDigest
from kvstore.limits import PAYLOAD_BYTES_MAX, SEGMENT_BYTES_MAX
from kvstore.store import Buffer

SEGMENT_VERSION = 1
DRAFT_SUFFIX = ".new"
"""Of a file that is being made; a start removes what a killed process left."""
FREE = 0
"""Class byte of a segment that holds nothing."""
UNCLEAN = 1
"""Day of a free segment whose bytes are to be erased before it is begun again."""

WRITE_BACK_BYTES = 8 * 1024 * 1024
"""Around the page cache, the device is told to begin after so many bytes."""
_SEARCH_READ_BYTES = 1024 * 1024
_MAGIC = b"RKVS"
_HEADER = struct.Struct("<4sHHIQBxxxIQQ")
_NOTE = struct.Struct("<4sIQQ")
"""A note in the first page, in a sector of its own: what it is, the generation that it is of, and a number."""
_SEAL_MAGIC, _SEAL_OFFSET = b"SEAL", 512
_AGE_MAGIC, _AGE_OFFSET = b"AGED", 1024
_CRC = struct.Struct("<I")


class SegmentDamaged(Exception):
    """A segment's first page fails its checks. Never leaves the daemon."""


@dataclass(frozen=True, slots=True)
class SegmentHeader:
    """What a segment says of itself. ``day``: expiry day of its blocks, days since the epoch; class 0
    is a free segment, and its day is ``UNCLEAN`` while what it held is yet to be erased.
    """

    segment: int
    generation: int
    class_byte: int
    day: int
    created_s: int
    segment_bytes: int


@dataclass(frozen=True, slots=True)
class Scanned:
    """One step of a scan: a record (``header``), or damage of ``hole_bytes`` between records.
    ``payload_ok`` is None where not asked.
    """

    offset: int
    header: RecordHeader | None
    mark: Mark | None
    payload_ok: bool | None
    problem: str = ""
    hole_bytes: int = 0


def segment_path(directory: Path, segment: int) -> Path:
    return directory / f"{segment:08d}.seg"


def encode_segment_header(header: SegmentHeader) -> bytes:
    """The whole first page of an unsealed segment."""
    body = _HEADER.pack(
        _MAGIC,
        SEGMENT_VERSION,
        0,
        header.segment,
        header.generation,
        header.class_byte,
        header.day,
        header.created_s,
        header.segment_bytes,
    )
    return (body + _CRC.pack(zlib.crc32(body))).ljust(FIRST_RECORD, b"\0")


def decode_segment_header(page: Buffer) -> SegmentHeader:
    """Parse and check a first page. Raises SegmentDamaged."""
    if len(page) < FIRST_RECORD:
        raise SegmentDamaged("the file ends inside the segment's first page")
    magic, version, _, segment, generation, class_byte, day, created_s, segment_bytes = _HEADER.unpack_from(page)
    if magic != _MAGIC:
        raise SegmentDamaged("the file is not a segment")
    if _CRC.unpack_from(page, _HEADER.size)[0] != zlib.crc32(memoryview(page)[: _HEADER.size]):
        raise SegmentDamaged("the segment header's CRC differs")
    if version != SEGMENT_VERSION:
        raise SegmentDamaged(f"the segment has format version {version}, not {SEGMENT_VERSION}")
    if not FIRST_RECORD < segment_bytes <= SEGMENT_BYTES_MAX:
        raise SegmentDamaged(f"the segment says that it has {segment_bytes} bytes")
    return SegmentHeader(segment, generation, class_byte, day, created_s, segment_bytes)


def decode_seal(page: Buffer, generation: int) -> int | None:
    """Where the records of a sealed segment end; None if it was not sealed in this generation."""
    return _decode_note(page, _SEAL_OFFSET, _SEAL_MAGIC, generation)


def decode_age(page: Buffer, generation: int) -> int | None:
    """When the oldest record was written, if that was before this life of the segment began."""
    return _decode_note(page, _AGE_OFFSET, _AGE_MAGIC, generation)


def _encode_note(magic: bytes, generation: int, number: int) -> bytes:
    body = _NOTE.pack(magic, 0, generation, number)
    return body + _CRC.pack(zlib.crc32(body))


def _decode_note(page: Buffer, offset: int, magic: bytes, generation: int) -> int | None:
    found, _, of_generation, number = _NOTE.unpack_from(page, offset)
    whole = _CRC.unpack_from(page, offset + _NOTE.size)[0] == zlib.crc32(memoryview(page)[offset : offset + _NOTE.size])
    return int(number) if whole and found == magic and of_generation == generation else None


class Segment:
    """An open segment file. Appending, sealing and recycling belong to one writer; reading to anybody who holds a
    lease.

    ``end``: where the next record goes. ``leases``: readers outside the shard's lock; while there are any, the
    segment is
    not recycled. ``begun``: the order in which segments were begun. ``oldest_s``: no record was written before.
    ``failed``: the file refused a
    write; it is read from, but not chosen again before it is retried. ``torn``: an append that failed may have left
    whole records beyond ``end``, which only a seal keeps a restart from adopting. ``unsafe``: a flush failed, so what
    was appended since the one before may be lost, whatever later flushes say.
    """

    __slots__ = (
        "_dropped",
        "_durable",
        "_end",
        "_hastened",
        "_syncing",
        "begun",
        "bypass",
        "dirty",
        "failed",
        "fd",
        "files",
        "header",
        "inherited_end",
        "inherited_seal",
        "leases",
        "oldest_s",
        "path",
        "promised_bytes",
        "sealed",
        "tail",
        "torn",
        "unsafe",
    )

    def __init__(self, files: Files, path: Path, fd: int, header: SegmentHeader, end: int, sealed: bool) -> None:
        self.files = files
        self.path = path
        self.fd = fd
        self.header = header
        self.end = end
        self.promised_bytes = 0
        """Room that puts under way are going to take, or have taken."""
        self.sealed = sealed
        self.failed = False
        self.torn = False
        self.unsafe = False
        self.dirty = True
        """Whether anything may be unflushed; so may what a killed process left: records, or marks."""
        self.leases = 0
        self.bypass = False
        """Whether blocks go around the page cache, here in both directions."""
        self._hastened = self._dropped = 0
        """Up to where the device was told to begin, and what was flushed left the page cache."""
        self._syncing = threading.Lock()
        self._durable = (header.generation, end if sealed else 0)
        """Generation, and the offset below which its records are on disk."""
        self.inherited_end = 0
        """Records that begin before it were written by an earlier process ..."""
        self.inherited_seal = False
        """... and all made durable."""
        self.begun = 0
        self.oldest_s = header.created_s

    @classmethod
    def create(cls, files: Files, directory: Path, header: SegmentHeader) -> tuple[Segment, bool]:
        """A new file, preallocated as a whole; also whether the file system could. Raises OSError and
        leaves no file.

        It gets its name when it is whole, so that a kill leaves no file that would be taken for a damaged segment.
        """
        path = segment_path(directory, header.segment)
        draft = path.with_name(path.name + DRAFT_SUFFIX)
        fd = files.open(draft, create=True)
        try:
            reserved = files.allocate(fd, header.segment_bytes)
            files.write(fd, [encode_segment_header(header)], 0)
            files.rename(draft, path)
            files.sync_directory(directory)
        except OSError:
            with contextlib.suppress(OSError):
                files.close(fd)
            for name in (draft, path):
                with contextlib.suppress(OSError):
                    files.unlink(name)
            raise
        return cls(files, path, fd, header, FIRST_RECORD, sealed=False), reserved

    @classmethod
    def open(cls, files: Files, path: Path) -> Segment:
        """An existing file. Raises SegmentDamaged or OSError. ``end`` is that of the seal, else to be
        found by a scan.
        """
        fd = files.open(path)
        try:
            page = files.read(fd, FIRST_RECORD, 0)
            header = decode_segment_header(page)
            if segment_path(path.parent, header.segment) != path:
                raise SegmentDamaged(f"the file says that it is segment {header.segment}")
        except (OSError, SegmentDamaged):
            files.close(fd)
            raise
        seal = decode_seal(page, header.generation)
        if seal is not None and (seal % RECORD_ALIGN or not FIRST_RECORD <= seal <= header.segment_bytes):
            seal = None  # a scan finds where the records end
        segment = cls(files, path, fd, header, seal or FIRST_RECORD, sealed=seal is not None)
        age = decode_age(page, header.generation)
        segment.oldest_s = header.created_s if age is None else min(age, header.created_s)
        return segment

    @property
    def number(self) -> int:
        return self.header.segment

    @property
    def room_bytes(self) -> int:
        """What is promised to puts under way is taken in whole until it counts as records, however far they wrote."""
        return 0 if self.sealed or self.failed else self.header.segment_bytes - self.end - self.promised_bytes

    @property
    def takes_more(self) -> bool:
        """Whether anything that is written now can count: else a restart would not find it, or find it by mistake."""
        return not (self.torn or self.sealed)  # in this order: a seal is known before a tear is forgotten

    @property
    def end(self) -> int:
        """Where the records end that count, and the next is appended to them unless puts are under way."""
        return self._end

    @end.setter
    def end(self, end: int) -> None:
        self._end = self.tail = end

    def reformat(self, header: SegmentHeader) -> None:
        """Begin another life under a new generation; what was stored is gone. Raises OSError (and marks it failed)."""
        try:
            if self.files_bytes() < header.segment_bytes:
                self.files.allocate(self.fd, header.segment_bytes)
            self.files.write(self.fd, [encode_segment_header(header)], 0)
        except OSError:
            self.failed = True
            raise
        self.end = FIRST_RECORD  # first: a flush beside this shall not take the old life's records for the new one's
        self.header = header
        self._hastened = self._dropped = self.inherited_end = 0
        self.oldest_s = header.created_s
        self.sealed = self.torn = self.unsafe = self.failed = False
        self.dirty = True

    def inherit(self) -> None:
        """A start has found what it holds. A flush that it made on the way was not yet one of that."""
        self.inherited_end, self.inherited_seal = self.end, self.sealed
        self.dirty = True

    def files_bytes(self) -> int:
        """Length of the file as it is now (less than the segment's if somebody cut it)."""
        return os.fstat(self.fd).st_size

    def vanished(self) -> bool:
        """Whether the file has lost its name: what it holds will not be there after a restart."""
        return os.fstat(self.fd).st_nlink == 0

    def append(self, parts: Sequence[Buffer], total_bytes: int) -> None:
        """Write whole records (headers, payloads, padding) at ``end``. Raises OSError; ``end`` then stays."""
        self.append_ahead(parts, total_bytes)
        self.end = self.tail
        self.dirty = True  # a flush may have taken it along, but nobody noted that

    def append_ahead(self, parts: Sequence[Buffer], total_bytes: int) -> None:
        """Write whole records at ``tail``, beyond what counts so far. Raises OSError; ``tail`` then stays."""
        try:
            self.files.write(self.fd, parts, self.tail)
        except OSError:
            self.torn = True
            raise
        self.tail += total_bytes
        self.dirty = True
        if self.bypass and self.tail - self._hastened >= WRITE_BACK_BYTES:
            self.hasten(self._hastened)
            self._hastened = self.tail

    def count(self, begin: int, total_bytes: int) -> bool:
        """Let what was written ahead at ``begin`` count; False if what goes before does not, or a seal ends there."""
        if begin != self.end or not self.takes_more:
            return False
        self._end = begin + total_bytes
        self.dirty = True  # a flush may have taken it along, but nobody noted that
        return True

    def reach_back(self, written_s: int) -> None:
        """A record that was written then is going to be in it, before this life began or not. Raises OSError."""
        if written_s < self.oldest_s:
            self.dirty = True
            self.files.write(self.fd, [_encode_note(_AGE_MAGIC, self.header.generation, written_s)], _AGE_OFFSET)
            self.oldest_s = written_s

    def hasten(self, begin: int) -> None:
        """Let the device begin with what was appended from ``begin`` on: somebody is going to wait for it."""
        self.files.hasten(self.fd, begin, self.tail - begin)

    def read_ahead(self, offset: int, count: int) -> None:
        """Let the device begin to read: somebody is going to ask for it."""
        if not self.bypass:
            self.files.read_ahead(self.fd, offset, count)

    def go_around_cache(self) -> None:
        """From now on blocks leave nothing in the page cache."""
        self.bypass = True
        self.files.expect_no_order(self.fd)

    def is_cold(self, offset: int, count: int) -> bool:
        """Whether bytes are to be read around the page cache: such is the volume, and it does not hold all of them."""
        if not self.bypass:
            return False
        there = self.files.resident_pages(self.fd, offset, count)
        return there is None or there < -(-(offset % PAGE_BYTES + count) // PAGE_BYTES)

    def sync(self, *, if_dirty: bool = False) -> None:
        """Make everything appended so far durable. Raises OSError (and marks the segment failed and unsafe).

        Also with ``if_dirty`` a flush that somebody else has under way is waited for: it may be that of the caller's
        bytes.
        """
        with self._syncing:
            if if_dirty and not self.dirty:
                return
            self.dirty = False
            generation, end = self.header.generation, self.end
            try:
                self.files.fdatasync(self.fd)
            except OSError:
                self.failed = self.unsafe = self.dirty = True
                raise
            if not self.unsafe:
                self._durable = (generation, end)
            if self.bypass:
                self.files.drop(self.fd, self._dropped, end - self._dropped)
                self._dropped = end

    @property
    def durable_end(self) -> int:
        """Where the records end that were flushed, as far as the disk can be believed."""
        generation, end = self._durable
        return end if generation == self.header.generation else 0

    def is_durable(self, offset: int) -> bool:
        """Whether a record of the present generation was flushed, as far as the disk can be believed."""
        return offset < self.durable_end

    def seal(self) -> None:
        """Close the segment to appends, durably, so that a scan may trust its end. Raises OSError."""
        self.sync(if_dirty=not self.unsafe)
        self.files.write(self.fd, [_encode_note(_SEAL_MAGIC, self.header.generation, self.end)], _SEAL_OFFSET)
        if self.torn:
            self.files.fdatasync(self.fd)
        self.sealed = True
        self.torn = False

    def mark(self, offset: int, mark: Mark) -> None:
        """Make one record dead, in place. Raises OSError."""
        self.files.write(self.fd, [encode_mark(mark)], offset + MARK_OFFSET)
        self.dirty = True

    def take_back(self, begin: int) -> None:
        """The records from ``begin`` on were refused, and are not marked: as if their append had failed."""
        self.torn = True  # first: whoever writes ahead just now and finds the new end shall not go on
        self.end = begin

    def read_header(self, offset: int) -> tuple[RecordHeader, Mark | None]:
        """A record's checked header and its mark. Raises RecordDamaged or OSError."""
        data = bytearray(HEADER_BYTES)
        count = self._read([data], offset)
        return self._decode(data[:count], offset), decode_mark(data)

    def read_record(self, offset: int, payload: bytearray | memoryview) -> tuple[RecordHeader, Mark | None]:
        """One gather read of header and stored payload into ``payload``, both verified. Raises
        RecordDamaged, OSError.
        """
        data = bytearray(HEADER_BYTES)
        count = self._read([data, payload], offset)
        header = self._decode(data[: min(count, HEADER_BYTES)], offset)
        verify_payload(header, memoryview(payload)[: max(0, count - HEADER_BYTES)])
        return header, decode_mark(data)

    def scan(self, begin: int, known_end: int, *, payloads: bool) -> Iterator[Scanned]:
        """Every record from ``begin`` on; damage is reported and skipped, but beyond ``known_end`` only if a record
        follows.

        With ``payloads`` each payload is verified too; beyond ``known_end`` it always is, and a bad one is damage.
        """
        offset = begin
        limit = self.end if self.sealed else self.header.segment_bytes
        while offset + HEADER_BYTES <= limit:
            found = self._record_at(offset, limit)
            if isinstance(found, str):
                hole = self._hole_bytes(offset, known_end, limit)
                if not hole:
                    return
                yield Scanned(offset, None, None, None, found, hole)
                offset += hole
                continue
            header, mark = found
            beyond = offset >= known_end
            problem = self._payload_problem(header) if (payloads or beyond) and mark is None else None
            if beyond and problem:
                hole = self._hole_bytes(offset, known_end, limit)
                if not hole:
                    return
                yield Scanned(offset, None, None, None, problem, hole)
                offset += hole
                continue
            checked = None if mark is not None or not (payloads or beyond) else not problem
            yield Scanned(offset, header, mark, checked, problem or "")
            offset += header.record_bytes

    def scan_all(self, known_end: int, *, payloads: bool) -> Iterator[Scanned]:
        """As ``scan`` from the first record, but where nothing is known of an unsealed segment, damage is skipped too.

        Only damage that a record follows is reported: what follows the last record is the tail that was never written.
        """
        blind = not self.sealed and known_end == FIRST_RECORD
        held: list[Scanned] = []
        limit = self.header.segment_bytes if blind else known_end
        for step in self.scan(FIRST_RECORD, limit, payloads=payloads or blind):
            if blind and (step.header is None or step.payload_ok is False):
                held.append(step)
                continue
            yield from held
            held.clear()
            yield step

    def is_whole(self, header: RecordHeader) -> bool:
        """Whether a record's payload verifies."""
        return self._payload_problem(header) is None

    def fill_hole(self, offset: int, hole_bytes: int, when_s: int) -> None:
        """Cover damage with dead records, so that scans pass over it. Raises OSError."""
        while hole_bytes > 0:
            part = min(hole_bytes, PAYLOAD_BYTES_MAX)
            blank = self._blank(offset, part - HEADER_BYTES, Mark(MarkReason.QUARANTINED, when_s))
            self.files.write(self.fd, [blank], offset)
            offset += part
            hole_bytes -= part

    def erase_payload(self, header: RecordHeader, *, overwrite: bool) -> None:
        """Leave nothing of a dead record's payload. Raises OSError."""
        self.dirty = True
        self.files.write(self.fd, [bytes(RECORD_ALIGN - HEADER_BYTES)], header.offset + HEADER_BYTES)
        rest = header.record_bytes - RECORD_ALIGN
        if rest:
            self.files.erase(self.fd, header.offset + RECORD_ALIGN, rest, overwrite=overwrite)

    def erase_header(self, header: RecordHeader, mark: Mark) -> None:
        """Leave nothing of a record's name: only its length, and that it is dead. One sector. Raises OSError."""
        self.dirty = True
        self.files.write(self.fd, [self._blank(header.offset, header.stored_bytes, mark)], header.offset)

    def erase_unused(self, *, overwrite: bool) -> None:
        """Leave nothing of earlier lives behind the last record. Raises OSError."""
        self.dirty = True
        if self.end < self.header.segment_bytes:
            self.files.erase(self.fd, self.end, self.header.segment_bytes - self.end, overwrite=overwrite)

    def _blank(self, offset: int, stored_bytes: int, mark: Mark) -> bytes:
        """The header of a dead record that says nothing but its length."""
        header = RecordHeader(
            segment=self.number,
            generation=self.header.generation,
            offset=offset,
            key=BlockKey(bytes(32)),
            parent=BlockKey(bytes(32)),
            space_id=SpaceId(bytes(32)),
            token_digest=TokenDigest(bytes(16)),
            index=0,
            tokens=0,
            class_byte=self.header.class_byte,
            flags=0,
            codec=0,
            stored_bytes=stored_bytes,
            payload_bytes=stored_bytes,
            written_s=mark.when_s,
            checksum=0,
            touches=(),
        )
        data, dead = encode_header(header), encode_mark(mark)
        return data[:MARK_OFFSET] + dead + data[MARK_OFFSET + len(dead) :]

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.files.close(self.fd)

    def _read(self, buffers: Sequence[bytearray | memoryview], offset: int) -> int:
        cold = self.is_cold(offset, sum(map(len, buffers)))
        count = self.files.read_into(self.fd, buffers, offset)
        if cold:
            self.files.drop(self.fd, offset, -(-count // PAGE_BYTES) * PAGE_BYTES)  # part of a page would stay
        return count

    def _decode(self, data: Buffer, offset: int) -> RecordHeader:
        return decode_header(data, segment=self.number, generation=self.header.generation, offset=offset)

    def _record_at(self, offset: int, limit: int) -> tuple[RecordHeader, Mark | None] | str:
        """The record that begins here, or why there is none."""
        try:
            header, mark = self.read_header(offset)
        except (RecordDamaged, OSError) as error:
            return str(error)
        if offset + header.record_bytes > limit:
            return "the record reaches beyond the segment"
        return header, mark

    def _hole_bytes(self, offset: int, known_end: int, limit: int) -> int:
        """How far damage reaches: up to the next record, or ``known_end``; 0 if it is the tail that was never written.

        Beyond ``known_end`` a record after damage is what a power loss leaves that kept what was written later.
        """
        is_known = offset < known_end
        end = min(known_end, limit) if is_known else limit
        for begin in range(offset + RECORD_ALIGN, end, _SEARCH_READ_BYTES):
            for at in self._likely_records(begin, min(begin + _SEARCH_READ_BYTES, end)):
                if not isinstance(self._record_at(at, limit), str):
                    return at - offset
        return end - offset if is_known else 0

    def _likely_records(self, begin: int, end: int) -> list[int]:
        """Where records may begin: found by one read, or anywhere if that fails."""
        places = range(begin, end, RECORD_ALIGN)
        try:
            data = self.files.read(self.fd, end - begin, begin)
        except OSError:
            return list(places)
        return [at for at in places if data.startswith(RECORD_MAGIC, at - begin)]

    def _payload_problem(self, header: RecordHeader) -> str | None:
        try:
            verify_payload(header, self.files.read(self.fd, header.stored_bytes, header.offset + HEADER_BYTES))
        except (RecordDamaged, OSError) as error:
            return str(error)
        return None
