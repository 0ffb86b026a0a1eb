"""One segment file: torn tails, seals, recycling, holes."""

from __future__ import annotations

import errno
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvstore.daemon.files import Files
from kvstore.daemon.record import (
    HEADER_BYTES,
    RECORD_ALIGN,
    Mark,
    MarkReason,
    RecordHeader,
    checksum_of,
    encode_header,
    record_bytes,
)
from kvstore.daemon.segment import (
    FIRST_RECORD,
    FREE,
    Segment,
    SegmentDamaged,
    SegmentHeader,
    decode_segment_header,
    encode_segment_header,
)
from kvstore.keys import BlockKey, SpaceId, TokenDigest
from kvstore.limits import MIB
from tests.support.faults import FaultyFiles

HEADER = SegmentHeader(segment=1, generation=77, class_byte=1, day=20_000, created_s=1_800_000_000, segment_bytes=MIB)


def a_segment(path: Path, files: Files | None = None) -> Segment:
    segment, _ = Segment.create(files or Files(), path, HEADER)
    return segment


def append(segment: Segment, number: int, size: int = 5000) -> RecordHeader:
    payload = bytes([number]) * size
    header = RecordHeader(
        segment=segment.number,
        generation=segment.header.generation,
        offset=segment.end,
        key=BlockKey(bytes([number]) * 32),
        parent=BlockKey(bytes(32)),
        space_id=SpaceId(bytes(32)),
        token_digest=TokenDigest(bytes(16)),
        index=number,
        tokens=64,
        class_byte=1,
        flags=0,
        codec=0,
        stored_bytes=size,
        payload_bytes=size,
        written_s=1,
        checksum=checksum_of(payload),
        touches=((1, 1),),
    )
    total = record_bytes(size)
    segment.append([encode_header(header), payload, bytes(total - HEADER_BYTES - size)], total)
    return header


def scanned(segment: Segment, known_end: int = FIRST_RECORD) -> list[int]:
    return [step.header.index for step in segment.scan(FIRST_RECORD, known_end, payloads=True) if step.header]


def test_a_segment_is_as_old_as_its_oldest_record(tmp_path: Path) -> None:
    """Also after it was opened again; a note of an earlier life, or a damaged one, says nothing."""
    segment = a_segment(tmp_path)
    assert segment.oldest_s == HEADER.created_s
    segment.reach_back(HEADER.created_s - 500)
    segment.reach_back(HEADER.created_s - 100)
    append(segment, 1)
    segment.seal()
    assert Segment.open(Files(), segment.path).oldest_s == segment.oldest_s == HEADER.created_s - 500
    segment.files.write(segment.fd, [b"\xff"], 1040)
    damaged = Segment.open(Files(), segment.path)
    assert (damaged.oldest_s, damaged.sealed) == (HEADER.created_s, True)
    segment.reformat(replace(HEADER, generation=78, created_s=HEADER.created_s + 9))
    assert Segment.open(Files(), segment.path).oldest_s == segment.oldest_s == HEADER.created_s + 9


def test_records_are_read_back_and_scanned(tmp_path: Path) -> None:
    segment = a_segment(tmp_path)
    headers = [append(segment, number) for number in range(1, 6)]
    buffer = bytearray(5000)
    for header in headers:
        assert segment.read_record(header.offset, buffer) == (header, None)
        assert buffer == bytes([header.index]) * 5000
    assert scanned(segment) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("transfer_max", [1, 100, 4096])
def test_short_transfers_are_continued(tmp_path: Path, transfer_max: int) -> None:
    """A kernel that moves a few bytes a call loses nothing."""
    files = FaultyFiles()
    segment = a_segment(tmp_path, files)
    files.transfer_max = transfer_max
    header = append(segment, 7, 3000)
    buffer = bytearray(3000)
    assert segment.read_record(header.offset, buffer) == (header, None)
    assert buffer == b"\x07" * 3000


def test_truncation_at_every_byte_of_the_last_record_ends_the_scan_before_it(tmp_path: Path) -> None:
    """Whatever part of the last record is missing, the records before it are found and it is not."""
    segment = a_segment(tmp_path)
    append(segment, 1)
    last = append(segment, 2, 300)
    path = segment.path
    whole = path.read_bytes()
    for kept in range(HEADER_BYTES + 300):
        path.write_bytes(whole[: last.offset + kept])
        again = Segment.open(Files(), path)
        assert scanned(again) == [1], kept
        again.close()


def test_a_flipped_bit_in_every_byte_of_the_last_record_ends_the_scan_or_kills_it(tmp_path: Path) -> None:
    """Damage in the header or payload is a torn tail; damage in the mark makes the record dead, never altered."""
    segment = a_segment(tmp_path)
    append(segment, 1)
    last = append(segment, 2, 300)
    whole = segment.path.read_bytes()
    for place in range(HEADER_BYTES + 300):
        spoiled = bytearray(whole)
        spoiled[last.offset + place] ^= 0x10
        segment.path.write_bytes(spoiled)
        again = Segment.open(Files(), segment.path)
        found = list(again.scan(FIRST_RECORD, FIRST_RECORD, payloads=True))
        again.close()
        live = [step.header.index for step in found if step.header and step.mark is None]
        padding = 200 <= place < HEADER_BYTES and live == [1, 2]  # bytes of the header that nothing uses
        assert live == [1] or padding, place


def test_a_recycled_segment_shows_nothing_of_its_earlier_life(tmp_path: Path) -> None:
    """Old records keep their bytes on disk; the new generation makes them invisible, also behind fewer new ones."""
    segment = a_segment(tmp_path)
    for number in range(1, 6):
        append(segment, number)
    segment.reformat(replace(HEADER, generation=78))
    assert scanned(segment) == []
    append(segment, 9)
    assert scanned(segment) == [9]
    assert scanned(Segment.open(Files(), segment.path)) == [9]


def test_a_seal_is_believed_only_in_its_generation(tmp_path: Path) -> None:
    segment = a_segment(tmp_path)
    append(segment, 1)
    segment.seal()
    sealed = Segment.open(Files(), segment.path)
    assert (sealed.sealed, sealed.end, sealed.room_bytes) == (True, segment.end, 0)
    segment.reformat(replace(HEADER, generation=78, class_byte=FREE))
    assert not Segment.open(Files(), segment.path).sealed


@pytest.mark.parametrize("end", [0, FIRST_RECORD + 1, MIB + 4096, 2**60])
def test_a_seal_that_no_file_can_have_is_not_believed(tmp_path: Path, end: int) -> None:
    """Its check is right and its end is not: the scan finds the records, and ends."""
    segment = a_segment(tmp_path)
    append(segment, 1)
    segment.end = end
    segment.seal()
    found = Segment.open(Files(), segment.path)
    assert not found.sealed
    assert scanned(found, known_end=2**60) == [1]


def test_a_hole_before_a_record_is_skipped_and_can_be_filled(tmp_path: Path) -> None:
    """Damage in the middle costs the damaged record only; a repair covers it, so that later scans need not search."""
    segment = a_segment(tmp_path)
    headers = [append(segment, number) for number in (1, 2, 3)]
    segment.files.write(segment.fd, [b"\xff" * 64], headers[1].offset)
    assert scanned(segment) == [1, 3]
    for known_end in (FIRST_RECORD, segment.end):
        steps = list(segment.scan(FIRST_RECORD, known_end, payloads=True))
        holes = [(step.offset, step.hole_bytes) for step in steps if step.header is None]
        assert holes == [(headers[1].offset, headers[1].record_bytes)]
    segment.fill_hole(*holes[0], 5)
    assert [step.mark is None for step in segment.scan(FIRST_RECORD, FIRST_RECORD, payloads=True)] == [
        True,
        False,
        True,
    ]


def test_marks_survive_and_are_not_adopted(tmp_path: Path) -> None:
    segment = a_segment(tmp_path)
    first = append(segment, 1)
    append(segment, 2)
    segment.mark(first.offset, Mark(MarkReason.PURGED, 9))
    steps = list(Segment.open(Files(), segment.path).scan(FIRST_RECORD, FIRST_RECORD, payloads=True))
    assert [step.mark for step in steps] == [Mark(MarkReason.PURGED, 9), None]


def test_a_failed_append_moves_nothing(tmp_path: Path) -> None:
    """After ENOSPC in the middle of a record the end stays, and the next record overwrites what was begun."""
    files = FaultyFiles()
    segment = a_segment(tmp_path, files)
    append(segment, 1)
    end = segment.end
    files.errors["pwritev"], files.write_budget = errno.ENOSPC, 2000
    with pytest.raises(OSError, match="No space"):
        append(segment, 2)
    assert segment.end == end
    files.errors.clear()
    files.write_budget = None
    append(segment, 3)
    assert scanned(segment) == [1, 3]


def test_creation_that_fails_leaves_no_file(tmp_path: Path) -> None:
    files = FaultyFiles()
    files.errors["allocate"] = errno.ENOSPC
    with pytest.raises(OSError, match="No space"):
        a_segment(tmp_path, files)
    assert list(tmp_path.iterdir()) == []


def test_every_flipped_bit_of_a_segment_header_is_damage() -> None:
    page = encode_segment_header(HEADER)
    assert decode_segment_header(page) == HEADER
    for bit in range(8 * 48):
        spoiled = bytearray(page)
        spoiled[bit // 8] ^= 1 << bit % 8
        with pytest.raises(SegmentDamaged):
            decode_segment_header(bytes(spoiled))
    with pytest.raises(SegmentDamaged):
        decode_segment_header(page[:-1])
    assert RECORD_ALIGN == FIRST_RECORD


def test_a_flush_in_the_middle_of_an_append_does_not_leave_it_unconfirmed(tmp_path: Path, monkeypatch: Any) -> None:
    """Somebody flushes when the bytes are written but do not count yet: the next flush confirms them, for it is one."""
    monkeypatch.setattr("kvstore.daemon.segment.WRITE_BACK_BYTES", 1)

    class FlushedMeanwhile(Files):
        def hasten(self, fd: int, offset: int, count: int) -> None:
            segment.sync(if_dirty=True)

    segment = a_segment(tmp_path, FlushedMeanwhile())
    segment.go_around_cache()
    header = append(segment, 1)
    assert not segment.is_durable(header.offset)
    segment.sync(if_dirty=True)
    assert segment.is_durable(header.offset)
    begin = segment.tail
    segment.append_ahead([bytes(RECORD_ALIGN)], RECORD_ALIGN)
    assert segment.count(begin, RECORD_ALIGN)
    segment.sync(if_dirty=True)
    assert segment.durable_end == segment.end


def test_a_flush_in_the_middle_of_a_new_life_confirms_nothing_of_it(tmp_path: Path) -> None:
    """What the life before had on disk says nothing of what is going to lie there."""

    class FlushedMeanwhile(Segment):
        @property
        def end(self) -> int:
            return self._end

        @end.setter
        def end(self, end: int) -> None:
            if hasattr(self, "_syncing"):
                self.sync()
            self._end = self.tail = end

    segment, _ = FlushedMeanwhile.create(Files(), tmp_path, HEADER)
    append(segment, 1)
    append(segment, 2)
    segment.reformat(replace(HEADER, generation=78))
    assert segment.durable_end <= FIRST_RECORD
    header = append(segment, 3)
    assert not segment.is_durable(header.offset)


def test_what_is_written_ahead_of_a_seal_never_counts(tmp_path: Path) -> None:
    """A segment that was sealed, or taken back, meanwhile: a restart would not find it."""
    segment = a_segment(tmp_path)
    first = append(segment, 1)
    begin = segment.tail
    segment.append_ahead([bytes(RECORD_ALIGN)], RECORD_ALIGN)
    segment.seal()
    assert not segment.count(begin, RECORD_ALIGN)
    other = replace(HEADER, segment=2)
    segment, _ = Segment.create(Files(), tmp_path, other)
    segment.take_back(first.offset)
    segment.append_ahead([bytes(RECORD_ALIGN)], RECORD_ALIGN)
    assert not segment.count(first.offset, RECORD_ALIGN)
