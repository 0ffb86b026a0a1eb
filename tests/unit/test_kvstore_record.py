"""Records on disk: every bit of a header, mark and payload counts."""

from __future__ import annotations

import random
import struct
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore import record
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
    record_bytes,
    verify_payload,
)
from kvstore.keys import BlockKey, SpaceId, TokenDigest
from kvstore.limits import PAYLOAD_BYTES_MAX
from kvstore.record import CRC_OFFSET

FIELDS = ("key", "token_digest")
PLACE = np.dtype([("segment", "<u4"), ("generation", "<u8"), ("offset", "<u8")])

keys = st.binary(min_size=32, max_size=32)
u32 = st.integers(0, 2**32 - 1)
u64 = st.integers(0, 2**64 - 1)
headers = st.builds(
    RecordHeader,
    segment=u32,
    generation=u64,
    offset=u64,
    key=keys.map(BlockKey),
    parent=keys.map(BlockKey),
    space_id=keys.map(SpaceId),
    token_digest=st.binary(min_size=16, max_size=16).map(TokenDigest),
    index=u32,
    tokens=u32,
    class_byte=st.integers(1, 255),
    flags=st.integers(0, 255),
    codec=st.integers(0, 255),
    stored_bytes=st.integers(0, PAYLOAD_BYTES_MAX),
    payload_bytes=st.integers(0, PAYLOAD_BYTES_MAX),
    written_s=u64,
    checksum=u64,
    touches=st.lists(st.tuples(st.integers(1, 255), u32), max_size=4).map(tuple),
)


def decoded(header: RecordHeader, data: bytes) -> RecordHeader:
    return decode_header(data, segment=header.segment, generation=header.generation, offset=header.offset)


def a_header(payload: bytes = b"payload") -> RecordHeader:
    return RecordHeader(
        segment=3,
        generation=2**63 + 5,
        offset=8192,
        key=BlockKey(bytes(range(32))),
        parent=BlockKey(bytes(32)),
        space_id=SpaceId(b"\x07" * 32),
        token_digest=TokenDigest(b"\x09" * 16),
        index=2,
        tokens=64,
        class_byte=2,
        flags=1,
        codec=0,
        stored_bytes=len(payload),
        payload_bytes=len(payload),
        written_s=1_800_000_000,
        checksum=checksum_of(payload),
        touches=((2, 1_800_000_000), (1, 1_800_000_100)),
    )


@given(headers)
def test_header_round_trip(header: RecordHeader) -> None:
    """What is encoded is decoded, in exactly 256 bytes, and the record is live."""
    data = encode_header(header)
    assert len(data) == HEADER_BYTES
    assert decoded(header, data) == header
    assert decode_mark(data) is None


def test_every_bit_of_a_header_is_checked() -> None:
    """One flipped bit anywhere in the header's fields is damage; in the mark it makes the record dead."""
    header = a_header()
    data = encode_header(header)
    checked = struct.calcsize("<4sHHIQQ32s32s32s16sIIBBBBIIQQ4B4I") + 4
    for bit in range(8 * checked):
        spoiled = bytearray(data)
        spoiled[bit // 8] ^= 1 << bit % 8
        with pytest.raises(RecordDamaged):
            decoded(header, bytes(spoiled))
    for bit in range(8 * MARK_OFFSET, 8 * (MARK_OFFSET + len(encode_mark(Mark(MarkReason.PURGED, 1))))):
        spoiled = bytearray(data)
        spoiled[bit // 8] ^= 1 << bit % 8
        assert decode_mark(spoiled) == Mark(MarkReason.DAMAGED, 0)


def test_every_bit_of_a_header_counts_for_a_reader() -> None:
    """Of one record or of many: one flipped bit, or any other name, length, place or checksum, and nothing is
    believed."""
    header = a_header()
    data = encode_header(header)
    place = np.array([(header.segment, header.generation, header.offset)], PLACE)

    def is_believed(data: bytes, header: RecordHeader = header, at: np.void = place[0]) -> bool:
        names = header.space_id, header.key, header.token_digest
        lengths = np.array([header.payload_bytes], np.int64)
        key, token_digest = (np.array([each], record.LAYOUT[of]) for each, of in zip(names[1:], FIELDS, strict=True))
        wanted = record.expect_at(record.expected_headers(names[0], key, token_digest, lengths), np.array([at], PLACE))
        many = record.whole_headers(data, wanted, np.array([header.checksum], np.uint64)).tolist()
        where = (int(at["segment"]), int(at["generation"]), int(at["offset"]))
        one = record.is_whole(bytearray(data), *names, header.payload_bytes, where, header.checksum)
        assert [one] == many
        return one

    assert is_believed(data)
    for bit in range(8 * HEADER_BYTES):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        covered = bit // 8 < CRC_OFFSET + 4 or MARK_OFFSET <= bit // 8 < MARK_OFFSET + record.MARK_BYTES
        assert is_believed(bytes(changed)) is not covered
    for other in (
        {"key": BlockKey(bytes(32))},
        {"space_id": SpaceId(bytes(32))},
        {"token_digest": TokenDigest(bytes(16))},
        {"payload_bytes": 6},
        {"checksum": header.checksum ^ 1},
    ):
        assert not is_believed(data, replace(header, **other))
    for field in PLACE.names or ():
        elsewhere = place.copy()
        elsewhere[field] += np.uint8(1)
        assert not is_believed(data, at=elsewhere[0])


def test_a_dead_record_never_comes_back_by_one_bit() -> None:
    """A flipped bit in a mark leaves the record dead, whatever the reason then reads."""
    data = bytearray(encode_header(a_header()))
    mark = encode_mark(Mark(MarkReason.PURGED, 1_800_000_000))
    data[MARK_OFFSET : MARK_OFFSET + len(mark)] = mark
    assert decode_mark(data) == Mark(MarkReason.PURGED, 1_800_000_000)
    for bit in range(8 * MARK_OFFSET, 8 * (MARK_OFFSET + len(mark))):
        spoiled = bytearray(data)
        spoiled[bit // 8] ^= 1 << bit % 8
        assert decode_mark(spoiled) is not None


@pytest.mark.parametrize("place", [(4, 2**63 + 5, 8192), (3, 2**63 + 6, 8192), (3, 2**63 + 5, 4096)])
def test_a_record_at_another_place_or_generation_is_damage(place: tuple[int, int, int]) -> None:
    """A misdirected write and a record of the segment's earlier life are found by the header alone."""
    with pytest.raises(RecordDamaged, match="another place or generation"):
        decode_header(encode_header(a_header()), segment=place[0], generation=place[1], offset=place[2])


@given(st.binary(max_size=300))
def test_random_bytes_are_no_header(data: bytes) -> None:
    with pytest.raises(RecordDamaged):
        decode_header(data, segment=1, generation=1, offset=4096)


def test_every_truncation_of_a_payload_is_damage() -> None:
    payload = random.Random(1).randbytes(400)
    header = a_header(payload)
    verify_payload(header, payload)
    for count in range(len(payload)):
        with pytest.raises(RecordDamaged):
            verify_payload(header, payload[:count])


def test_every_flipped_bit_of_a_payload_is_damage() -> None:
    payload = random.Random(2).randbytes(100)
    header = a_header(payload)
    for bit in range(8 * len(payload)):
        spoiled = bytearray(payload)
        spoiled[bit // 8] ^= 1 << bit % 8
        with pytest.raises(RecordDamaged):
            verify_payload(header, spoiled)


@given(st.integers(0, PAYLOAD_BYTES_MAX))
def test_records_are_aligned_and_hold_their_payload(stored_bytes: int) -> None:
    size = record_bytes(stored_bytes)
    assert size % RECORD_ALIGN == 0
    assert HEADER_BYTES + stored_bytes <= size < HEADER_BYTES + stored_bytes + RECORD_ALIGN
