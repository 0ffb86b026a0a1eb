"""Verification of whole records: header, mark, payload and, if compressed, its decompressed length. Of an encrypted
payload the checksum says whether it is what was written; no cipher key is needed.

Owns the judgement of one record, and a pass over a segment. Does not know the index or repair: ``fsck`` compares and
repairs, ``scrubber`` does it in the background. Reading is sequential and bounded by the largest payload in memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kvstore.daemon.codec import Codec, verify
from kvstore.daemon.presence import fingerprint_of
from kvstore.daemon.record import (
    HEADER_BYTES,
    Mark,
    MarkReason,
    RecordDamaged,
    RecordDead,
    RecordHeader,
    decode_header,
    decode_mark,
    verify_payload,
)
from kvstore.daemon.segment import FREE, Segment, SegmentHeader


@dataclass(frozen=True, slots=True)
class Verdict:
    """One record, or (``header`` None) ``hole_bytes`` of damage. ``problem`` is empty where all is well."""

    offset: int
    header: RecordHeader | None
    mark: Mark | None
    problem: str
    hole_bytes: int = 0

    @property
    def is_live(self) -> bool:
        return self.header is not None and self.mark is None and not self.problem


def scrub_segment(segment: Segment, known_end: int) -> Iterator[Verdict]:
    """Judge everything up to ``known_end``, and beyond it whatever a start would adopt. Changes nothing."""
    if segment.header.class_byte == FREE:
        return
    for step in segment.scan_all(known_end, payloads=True):
        problem = step.problem
        if step.mark is not None and step.mark.reason is MarkReason.DAMAGED:
            problem = "the record's mark is damaged"
        elif step.header is not None and step.mark is None and not problem:
            problem = _codec_problem(segment, step.header)
        yield Verdict(step.offset, step.header, step.mark, problem, step.hole_bytes)


def _codec_problem(segment: Segment, header: RecordHeader) -> str:
    if header.codec == Codec.NONE:
        return "" if header.stored_bytes == header.payload_bytes else "the lengths of an uncompressed payload differ"
    try:
        stored = segment.files.read(segment.fd, header.stored_bytes, header.offset + HEADER_BYTES)
        verify(header.codec, stored, header.payload_bytes)
    except (RecordDamaged, OSError) as error:
        return str(error)
    return ""


def verify_record(data: memoryview, segment: SegmentHeader, offset: int, fingerprint: int) -> None:
    """Raise RecordDamaged unless this is the whole living record of a key at its place; RecordDead if marked."""
    header = decode_header(data[:HEADER_BYTES], segment=segment.segment, generation=segment.generation, offset=offset)
    if fingerprint_of(header.key) != fingerprint:
        raise RecordDamaged("the record holds another block than the index says")
    mark = decode_mark(data[:HEADER_BYTES])
    if mark is not None:
        raise RecordDead(mark)
    stored = data[HEADER_BYTES : HEADER_BYTES + header.stored_bytes]
    verify_payload(header, stored)
    verify(header.codec, stored, header.payload_bytes)
