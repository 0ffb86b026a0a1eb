"""What lies on disk, as targets of a fuzzer: records, marks, whole segments, the index's pairs, the catalog.

A target takes any bytes and returns, or raises what a test should show. The properties: a decoder gives a value or its
declared error; a scan ends, goes forward, and gives no record whose header, place or checksum is not right; of records
that nobody damaged it gives every one.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kvstore.daemon import index as index_module
from kvstore.daemon import record as record_module
from kvstore.daemon.catalog import CatalogContent, decode_catalog, encode_catalog
from kvstore.daemon.files import Files
from kvstore.daemon.index import Index, IndexDamaged
from kvstore.daemon.record import (
    HEADER_BYTES,
    MARK_OFFSET,
    RECORD_ALIGN,
    Mark,
    MarkReason,
    RecordDamaged,
    RecordHeader,
    checksum_of,
    decode_header,
    decode_mark,
    encode_header,
    encode_mark,
)
from kvstore.daemon.scrub import scrub_segment
from kvstore.daemon.segment import (
    FIRST_RECORD,
    Scanned,
    Segment,
    SegmentDamaged,
    SegmentHeader,
    decode_segment_header,
    encode_segment_header,
    segment_path,
)
from kvstore.errors import VolumeFormat
from kvstore.keys import BlockKey, SpaceId, TokenDigest, space_id
from kvstore.limits import PAYLOAD_BYTES_MAX, STORED_BYTES_MAX
from kvstore.store import Pin, Policy
from kvstore.testing import TEST_RULES
from tests.fuzz.program import Program
from tests.support.spaces import a_space

NUMBER, GENERATION = 3, 0x1122334455667788
SEGMENT_BYTES = 24 * RECORD_ALIGN


def a_header(program: Program, offset: int, stored: bytes, **changes: Any) -> RecordHeader:
    """A header that fits its place and its payload, its other fields from the program."""
    seed = program.number(1)
    touches = tuple((1 + program.number(1) % 255, program.number(4)) for _ in range(program.below(5)))
    made = RecordHeader(
        segment=NUMBER,
        generation=GENERATION,
        offset=offset,
        key=BlockKey(bytes([seed]) * 32),
        parent=BlockKey(bytes([program.number(1)]) * 32),
        space_id=SpaceId(bytes(32)),
        token_digest=TokenDigest(bytes([seed]) * 16),
        index=program.number(2),
        tokens=4,
        class_byte=1,
        flags=program.number(1),
        codec=program.below(3) if program.flag() else 0,
        stored_bytes=len(stored),
        payload_bytes=len(stored),
        written_s=program.number(4),
        checksum=checksum_of(stored),
        touches=touches,
    )
    return replace(made, **changes)


# --- records --------------------------------------------------------------------------------------------------------


def record(data: bytes) -> None:
    """A header as it is; and one that was made, changed, and given a right check, so that its fields are read."""
    program = Program(data)
    raw = program.take(HEADER_BYTES)
    heads = [raw, _changed(program)]
    for head in heads:
        _judge(head)


def _changed(program: Program) -> bytes:
    head = bytearray(encode_header(a_header(program, RECORD_ALIGN, b"payload")))
    for _ in range(program.below(4)):
        head[program.below(HEADER_BYTES)] ^= program.number(1)
    end = record_module.CRC_OFFSET
    head[end : end + 4] = struct.pack("<I", zlib.crc32(head[:end]))
    return bytes(head)


def _judge(head: bytes) -> None:
    mark = decode_mark(head.ljust(HEADER_BYTES, b"\0"))
    if mark is not None and mark.reason is not MarkReason.DAMAGED:
        assert encode_mark(mark) == head[MARK_OFFSET : MARK_OFFSET + len(encode_mark(mark))]
    try:
        found = decode_header(head, segment=NUMBER, generation=GENERATION, offset=RECORD_ALIGN)
    except RecordDamaged:
        return
    assert (found.segment, found.generation, found.offset) == (NUMBER, GENERATION, RECORD_ALIGN)
    assert found.stored_bytes <= STORED_BYTES_MAX
    assert found.payload_bytes <= PAYLOAD_BYTES_MAX
    again = encode_header(found)
    assert decode_header(again, segment=NUMBER, generation=GENERATION, offset=RECORD_ALIGN) == found


def record_seeds() -> list[bytes]:
    whole = encode_header(a_header(Program(b"\1\2\3\4\5"), RECORD_ALIGN, b"payload"))
    mark = encode_mark(Mark(MarkReason.PURGED, 5))
    dead = whole[:MARK_OFFSET] + mark + whole[MARK_OFFSET + len(mark) :]
    return [whole + bytes(range(40)), dead + bytes(reversed(range(40)))]


# --- segments -------------------------------------------------------------------------------------------------------


class _InMemory(Files):
    """A file that has no name: whatever is opened is this one."""

    def __init__(self, content: bytes) -> None:
        self._content = content

    def open(self, path: Path, *, create: bool = False) -> int:
        fd = os.memfd_create("segment")
        os.write(fd, self._content)
        return fd


@dataclass(slots=True)
class _Image:
    """A segment's bytes as a program makes them. ``intact``: offset and end of records that nobody changed since;
    ``told``: whether every header says the truth, so that a scan cannot be led past an intact record.
    """

    content: bytearray = field(default_factory=lambda: bytearray(SEGMENT_BYTES))
    end: int = FIRST_RECORD
    records: list[int] = field(default_factory=list)
    intact: dict[int, tuple[int, bool]] = field(default_factory=dict)
    truthful: bool = True

    def write(self, offset: int, data: bytes) -> None:
        data = data[: max(0, len(self.content) - offset)]
        if self.content[offset : offset + len(data)] != data:
            self.intact = {
                at: (end, dead) for at, (end, dead) in self.intact.items() if offset + len(data) <= at or end <= offset
            }
        self.content[offset : offset + len(data)] = data

    def append(self, program: Program, *, lie: bool) -> None:
        stored = bytes([program.number(1)]) * program.below(2 * RECORD_ALIGN)
        header = a_header(program, self.end, stored)
        if lie:
            self.truthful = False
            name = ("segment", "generation", "offset", "stored_bytes", "payload_bytes", "checksum")[program.below(6)]
            width_bytes = 8 if name in ("generation", "offset", "checksum") else 4
            header = replace(header, **{name: program.number(width_bytes)})
        size = -(-(HEADER_BYTES + len(stored)) // RECORD_ALIGN) * RECORD_ALIGN
        if self.end + size > len(self.content):
            return
        self.write(self.end, encode_header(header) + stored)
        self.records.append(self.end)
        if not lie:
            self.intact[self.end] = (self.end + size, False)
        self.end += size

    def mark(self, program: Program) -> None:
        if not self.records:
            return
        at = self.records[program.below(len(self.records))]
        end = self.intact.get(at)
        reasons = list(MarkReason)[1:]
        self.write(at + MARK_OFFSET, encode_mark(Mark(reasons[program.below(len(reasons))], program.number(4))))
        if end is not None:
            self.intact[at] = (end[0], True)

    def cut(self, length: int) -> None:
        if length < len(self.content):
            self.write(length, b"\xff" * (len(self.content) - length))
            self.content = self.content[:length]


def _image_of(program: Program) -> _Image:
    image = _Image()
    for _ in range(24):
        if program.ended:
            break
        match program.below(8):
            case 0 | 1:
                image.append(program, lie=False)
            case 2:
                image.append(program, lie=True)
            case 3:
                image.mark(program)
            case 4:
                image.write(
                    FIRST_RECORD + program.below(SEGMENT_BYTES - FIRST_RECORD), program.take(1 + program.below(32))
                )
            case 5:
                page = image.content[RECORD_ALIGN * program.below(24) :][:RECORD_ALIGN]
                image.write(RECORD_ALIGN * (1 + program.below(23)), bytes(page))
            case 6:
                image.end = min(SEGMENT_BYTES, image.end + RECORD_ALIGN)  # a hole
            case 7:
                image.cut(FIRST_RECORD + program.below(SEGMENT_BYTES - FIRST_RECORD))
    return image


def segment(data: bytes) -> None:
    """A file made by a program: records, lies with a right check, marks, damage, copied pages, holes, cuts.

    Every way of scanning it ends and gives only what is true.
    """
    program = Program(data)
    seal = program.below(4)
    seal_end = program.number(8)
    image = _image_of(program)
    head = SegmentHeader(NUMBER, GENERATION, 1, 20_000, 0, SEGMENT_BYTES)
    first = bytearray(encode_segment_header(head))
    files = _InMemory(b"")
    if seal:
        _seal(first, image.end if seal < 3 else seal_end, GENERATION if seal != 2 else GENERATION - 1)
    files._content = bytes(first) + bytes(image.content[FIRST_RECORD:])
    try:
        opened = Segment.open(files, segment_path(Path("segments"), NUMBER))
    except SegmentDamaged:
        return
    try:
        assert decode_segment_header(bytes(first)) == head
        known = opened.end if opened.sealed else FIRST_RECORD + RECORD_ALIGN * program.below(24)
        for known_end in (known, image.end, FIRST_RECORD):
            for payloads in (False, True):
                _check_scan(opened, image, known_end, list(opened.scan(FIRST_RECORD, known_end, payloads=payloads)))
                _check_scan(opened, image, known_end, list(opened.scan_all(known_end, payloads=payloads)))
        for verdict in scrub_segment(opened, image.end):
            assert verdict.header is not None or verdict.hole_bytes > 0
    finally:
        opened.close()


def _seal(page: bytearray, end: int, generation: int) -> None:
    """As ``Segment.seal`` writes it."""
    body = struct.pack("<4sIQQ", b"SEAL", 0, generation, end)
    page[512 : 512 + len(body) + 4] = body + struct.pack("<I", zlib.crc32(body))


def _check_scan(opened: Segment, image: _Image, known_end: int, steps: list[Scanned]) -> None:
    at = FIRST_RECORD
    for step in steps:
        assert step.offset >= at, "a scan goes forward"
        assert step.offset % RECORD_ALIGN == 0
        at = step.offset + (step.header.record_bytes if step.header is not None else step.hole_bytes)
        assert at > step.offset
        if step.header is None:
            assert step.problem
            continue
        _check_record(opened, image, step.header, step)
    if image.truthful and not opened.sealed:
        met = {step.offset: step for step in steps if step.header is not None}
        for offset, (end, dead) in image.intact.items():
            if end <= known_end:
                assert offset in met, "an intact record is passed over"
                assert (met[offset].mark is not None) == dead
                assert met[offset].payload_ok is not False


def _check_record(opened: Segment, image: _Image, header: RecordHeader, step: Scanned) -> None:
    limit = opened.end if opened.sealed else SEGMENT_BYTES
    assert (header.segment, header.generation, header.offset) == (NUMBER, GENERATION, step.offset)
    assert header.offset + header.record_bytes <= limit
    found = bytes(image.content[header.offset : header.offset + HEADER_BYTES + header.stored_bytes])
    checked = record_module.CRC_OFFSET + 4
    assert encode_header(header)[:checked] == found[:checked]
    assert decode_mark(found[:HEADER_BYTES]) == step.mark
    whole = len(found) == HEADER_BYTES + header.stored_bytes and checksum_of(found[HEADER_BYTES:]) == header.checksum
    if step.payload_ok is not None:
        assert step.payload_ok == whole, "the payload's checksum was judged wrongly"
        assert step.payload_ok != bool(step.problem)


def segment_seeds() -> list[bytes]:
    def append(size: int, seed: int) -> bytes:
        return bytes([0, seed]) + struct.pack("<H", size) + bytes([seed, 1, 7, 9, 0, 0, 3, 1, 0, 1, 2, 3, 4])

    def lie(what: int, value: int) -> bytes:
        return (
            bytes([2, 1])
            + struct.pack("<H", 50)
            + bytes([5, 0, 7, 9, 0, 0, 0, 1, 2, 3, 4, what])
            + struct.pack("<Q", value)
        )

    def start(seal: int = 0, end: int = 0) -> bytes:
        return bytes([seal]) + struct.pack("<Q", end)

    mark = bytes([3, 0, 2, 1, 2, 3, 4])
    damage = bytes([4]) + struct.pack("<H", 300) + bytes([3]) + b"abcd"
    three = append(100, 1) + append(5000, 2) + append(0, 3)
    return [
        start() + three,
        start(1) + three + mark,
        start(3, 2**60) + three,
        start(2) + three + damage,
        start() + append(100, 1) + bytes([6]) + append(100, 2),
        start() + three + bytes([5, 1, 5]),
        start() + three + bytes([7]) + struct.pack("<H", 9000),
        *(start() + append(10, 1) + lie(what, 2**63 + 4096) + append(10, 2) for what in range(6)),
    ]


# --- index and catalog ----------------------------------------------------------------------------------------------


class _Pairs:
    """A database that holds these pairs, in the shape of RocksDB's binding."""

    def __init__(self, pairs: list[tuple[bytes, bytes]]) -> None:
        self._pairs = sorted(dict(pairs).items())

    def get(self, key: bytes) -> bytes | None:
        return dict(self._pairs).get(key)

    def iterator(self, *, mode: str, key: bytes, direction: int) -> _Cursor:
        return _Cursor([pair for pair in self._pairs if pair[0] >= key])


class _Cursor:
    def __init__(self, pairs: list[tuple[bytes, bytes]]) -> None:
        self._left: Iterator[tuple[bytes, bytes]] = iter(pairs)

    def __iter__(self) -> _Cursor:
        return self

    def __next__(self) -> tuple[bytes, bytes]:
        return next(self._left)

    def close(self) -> None:
        self._left = iter(())


def index(data: bytes) -> None:
    """Pairs of any form in the place of an index: its content, or damage, which is rebuilt from the segments."""
    program = Program(data)
    pairs: list[tuple[bytes, bytes]] = []
    count_key = index_module._COUNT_KEY
    while not program.ended and len(pairs) < 64:
        kind = program.below(6)
        key = b"btsm"[kind % 4 : kind % 4 + 1] + program.take((8, 8, 4, 4, 40, 2)[kind])
        size = (index_module.ENTRY_BYTES, 9, 16, 12, program.below(300), program.below(30))[kind]
        value = program.take(size).ljust(size, b"\x01")
        if kind == 0 and len(key) == 9:  # an entry that says where it lies: others are damage at once
            offset = int.from_bytes(key[5:], "big") * 4096
            value = value[:32] + key[4:0:-1] + value[36:48] + offset.to_bytes(8, "little") + value[56:]
        pairs.append((key, value))
    if program.flag() or not pairs or data[0] & 1:
        entries = sum(key[:1] == b"b" for key, _ in dict(pairs).items())
        pairs.append((count_key, struct.pack("<QI", entries, index_module.INDEX_VERSION)))
    opened = Index(Path("index"), 2**20, _Pairs(pairs))
    try:
        content = opened.load()
    except IndexDamaged:
        return
    if content is not None:
        keys = [pair[0][1:] for pair in sorted(dict(pairs).items()) if pair[0][:1] == b"b"]
        assert index_module.place_words(content.rows).astype(">u8").tobytes() == b"".join(keys)


def index_seeds() -> list[bytes]:
    block = bytes([0]) + bytes(8) + bytes(index_module.ENTRY_BYTES)
    tombstone, extent = bytes([1]) + bytes(8) + bytes([4] * 9), bytes([2]) + bytes(4) + bytes(16)
    return [block + tombstone + extent, tombstone, extent, bytes([4]) + bytes(40) + bytes([20]) + bytes(20)]


def catalog(data: bytes) -> None:
    """A catalog as it is, and with its checksum made right: a content or a declared error."""
    body = data.partition(b"\n")[2]
    head = json.dumps({"catalog": 1, "xxh3_64": f"{checksum_of(body):016x}"}).encode()
    for whole in (data, head + b"\n" + body):
        try:
            content = decode_catalog(whole)
        except (ValueError, KeyError, TypeError, VolumeFormat):
            continue
        assert decode_catalog(encode_catalog(content)) == content


def catalog_seeds() -> list[bytes]:
    space = a_space()
    name = space_id(space)
    pin = Pin(name, BlockKey(bytes(32)), "owner", "reason", 5)
    content = CatalogContent(Policy(1, TEST_RULES, "text"), {name: space}, {(name, pin.key): pin})
    return [encode_catalog(content), encode_catalog(replace(content, spaces={}, pins={}))]
