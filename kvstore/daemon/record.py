"""One block on disk: a 256-byte header, then the stored payload.

Owns writing and parsing headers, and the mark that deletes a record in place. Does not know segments or the index; the
layout, and what a reader checks, is ``kvstore.record``'s. Invariants: a header is written once and checked on every
read against its CRC, its own location (segment, generation, offset) and the key asked for; the payload is checked
against its XXH3-64; a mark that is neither empty nor whole counts as dead, so that damage can lose a block but never
bring a deleted one back.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from enum import IntEnum

import xxhash

from kvstore.capacity import RECORD_ALIGN as RECORD_ALIGN
from kvstore.capacity import record_bytes as record_bytes
from kvstore.keys import BlockKey, SpaceId, TokenDigest
from kvstore.limits import KEY_BYTES, PAYLOAD_BYTES_MAX, STORED_BYTES_MAX
from kvstore.record import CRC_OFFSET as CRC_OFFSET
from kvstore.record import HEADER, RECORD_VERSION
from kvstore.record import HEADER_BYTES as HEADER_BYTES
from kvstore.record import MARK_OFFSET as MARK_OFFSET
from kvstore.record import RECORD_MAGIC as RECORD_MAGIC
from kvstore.store import Buffer

TOUCHES_MAX = 4
"""(class, last touch) pairs kept for one block; beyond, the pair with the earliest deadline makes room."""
TIME_S_MAX = 2**62

_CRC = struct.Struct("<I")
_MARK = struct.Struct("<4sB3xQ")
_MARK_MAGIC = b"DEAD"
_MARK_BYTES = _MARK.size + _CRC.size
_LIVE_MARK = bytes(_MARK_BYTES)

assert MARK_OFFSET + _MARK_BYTES <= HEADER_BYTES
assert RECORD_ALIGN % HEADER_BYTES == 0 and KEY_BYTES == 32


class RecordDamaged(Exception):
    """A record fails its checks; the message says which. Never leaves the daemon: it becomes a miss
    and a quarantine.
    """


class RecordDead(RecordDamaged):
    """A whole record that is marked dead: removed, but whoever asked did not know yet."""

    def __init__(self, mark: Mark) -> None:
        super().__init__(f"the record is marked dead ({mark.reason.name.lower()})")
        self.mark = mark


class MarkReason(IntEnum):
    """Why a record is dead. Values 2..5 are those of ``kvstore.store.Presence``."""

    DAMAGED = 0
    EXPIRED = 2
    EVICTED = 3
    QUARANTINED = 4
    PURGED = 5
    REPLACED = 16
    MOVED = 17


@dataclass(frozen=True, slots=True)
class Mark:
    """Says that a record is dead, why and since when."""

    reason: MarkReason
    when_s: int


@dataclass(frozen=True, slots=True)
class RecordHeader:
    """What a record says of itself. ``touches``: (class byte, last touch in seconds) as known when it was written."""

    segment: int
    generation: int
    offset: int
    key: BlockKey
    parent: BlockKey
    space_id: SpaceId
    token_digest: TokenDigest
    index: int
    tokens: int
    class_byte: int
    flags: int
    codec: int
    stored_bytes: int
    payload_bytes: int
    written_s: int
    checksum: int
    touches: tuple[tuple[int, int], ...]

    @property
    def record_bytes(self) -> int:
        return record_bytes(self.stored_bytes)


def checksum_of(payload: Buffer) -> int:
    """XXH3-64 of a payload: 25 GB/s, against 4.6 of BLAKE3; it finds damage, the key gives identity."""
    return xxhash.xxh3_64_intdigest(payload)


def encode_header(header: RecordHeader) -> bytes:
    """The 256 bytes of a live record's header."""
    pairs = [*header.touches[:TOUCHES_MAX], *[(0, 0)] * (TOUCHES_MAX - len(header.touches))]
    body = HEADER.pack(
        RECORD_MAGIC,
        RECORD_VERSION,
        HEADER_BYTES,
        header.segment,
        header.generation,
        header.offset,
        header.key,
        header.parent,
        header.space_id,
        header.token_digest,
        header.index,
        header.tokens,
        header.class_byte,
        header.flags,
        header.codec,
        0,
        header.stored_bytes,
        header.payload_bytes,
        header.written_s,
        header.checksum,
        *(pair[0] for pair in pairs),
        *(pair[1] for pair in pairs),
    )
    return (body + _CRC.pack(zlib.crc32(body))).ljust(HEADER_BYTES, b"\0")


def decode_header(data: Buffer, *, segment: int, generation: int, offset: int) -> RecordHeader:
    """Parse and check a header that was read at (segment, generation, offset). Raises RecordDamaged."""
    if len(data) < HEADER_BYTES:
        raise RecordDamaged("the file ends inside a header")
    fields = HEADER.unpack_from(data)
    if fields[0] != RECORD_MAGIC:
        raise RecordDamaged("there is no record")
    if _CRC.unpack_from(data, CRC_OFFSET)[0] != zlib.crc32(memoryview(data)[:CRC_OFFSET]):
        raise RecordDamaged("the header's CRC differs")
    if fields[1] != RECORD_VERSION or fields[2] != HEADER_BYTES:
        raise RecordDamaged(f"the record has format version {fields[1]}, not {RECORD_VERSION}")
    if fields[3:6] != (segment, generation, offset):
        raise RecordDamaged("the record was written for another place or generation")
    pairs = zip(fields[20 : 20 + TOUCHES_MAX], fields[24 : 24 + TOUCHES_MAX], strict=True)
    header = RecordHeader(
        segment=segment,
        generation=generation,
        offset=offset,
        key=BlockKey(fields[6]),
        parent=BlockKey(fields[7]),
        space_id=SpaceId(fields[8]),
        token_digest=TokenDigest(fields[9]),
        index=fields[10],
        tokens=fields[11],
        class_byte=fields[12],
        flags=fields[13],
        codec=fields[14],
        stored_bytes=fields[16],
        payload_bytes=fields[17],
        written_s=fields[18],
        checksum=fields[19],
        touches=tuple((pair[0], pair[1]) for pair in pairs if pair[0]),
    )
    if header.stored_bytes > STORED_BYTES_MAX or header.payload_bytes > PAYLOAD_BYTES_MAX:
        raise RecordDamaged("the header promises more payload than a block may have")
    return header


def verify_payload(header: RecordHeader, stored: Buffer) -> None:
    """Raise RecordDamaged unless these are the stored bytes that the header was written for."""
    if len(stored) != header.stored_bytes:
        raise RecordDamaged("the file ends inside a payload")
    if checksum_of(stored) != header.checksum:
        raise RecordDamaged("the payload's checksum differs")


def encode_mark(mark: Mark) -> bytes:
    """Bytes that make the record dead when written at ``MARK_OFFSET`` of its header."""
    body = _MARK.pack(_MARK_MAGIC, mark.reason, mark.when_s)
    return body + _CRC.pack(zlib.crc32(body))


def decode_mark(data: Buffer) -> Mark | None:
    """The mark of a header's 256 bytes: None for a live record, reason DAMAGED for a mark that is not whole."""
    part = bytes(memoryview(data)[MARK_OFFSET : MARK_OFFSET + _MARK_BYTES])
    if part == _LIVE_MARK:
        return None
    magic, reason, when_s = _MARK.unpack_from(part)
    whole = magic == _MARK_MAGIC and _CRC.unpack_from(part, _MARK.size)[0] == zlib.crc32(part[: _MARK.size])
    if not whole or reason not in MarkReason.__members__.values():
        return Mark(MarkReason.DAMAGED, 0)
    return Mark(MarkReason(reason), when_s)
