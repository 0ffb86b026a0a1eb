"""What a reader makes of an answer and of the records that it reads, as targets of a fuzzer.

The properties: a plan of any rows that decode covers each lent block once, goes forward in each file, and its parts
together are the whole; the vectorised check of headers believes a header only if the plain decoder does, and it is the
one of the block asked for.
"""

from __future__ import annotations

import contextlib
import struct
import zlib
from dataclasses import replace

import numpy as np

from kvstore import extents, limits
from kvstore.daemon.record import RecordDamaged, decode_header, decode_mark, encode_header
from kvstore.errors import ProtocolError
from kvstore.extents import ExtentStatus
from kvstore.record import CRC_OFFSET, HEADER_BYTES, LAYOUT, expect_at, expected_headers, is_whole, whole_headers
from tests.fuzz.disk_targets import GENERATION, NUMBER, a_header
from tests.fuzz.program import Program

PLACE = np.dtype([("segment", "<u4"), ("generation", "<u8"), ("offset", "<u8")])


def plan(data: bytes) -> None:
    """Rows as they come from a daemon, with lengths as the reader's buffers have."""
    program = Program(data)
    rows_bytes = program.take(extents.ROW.itemsize * (1 + program.below(12)))
    count = len(rows_bytes) // extents.ROW.itemsize
    body = struct.pack("<IBxxx", count, program.flag()) + rows_bytes[: count * extents.ROW.itemsize]
    try:
        rows, option = extents.decode_rows(body, "an answer")
    except ProtocolError:
        if count == 1:
            with contextlib.suppress(ProtocolError):
                assert not extents.decode_row(body, "an answer"), "one row is believed where many are not"
        return
    if count == 1:
        assert extents.decode_row(body, "an answer") == (tuple(rows[0].item())[:6], option)
    sizes = [1 + program.number(3) % limits.PAYLOAD_BYTES_MAX for _ in range(count)]
    lent = np.flatnonzero(rows["status"] == ExtentStatus.LENT)
    made = extents.plan(rows, lent, sizes)
    assert sorted(made.order) == lent.tolist()
    assert made.sizes == [sizes[at] for at in made.order]
    assert all(0 <= gap <= extents.GAP_BYTES_MAX for gap in made.gaps)
    assert made.total_bytes <= sum(sizes) + count * (HEADER_BYTES + extents.GAP_BYTES_MAX)
    assert made.runs[-1] == len(lent)
    for run, (begin, end) in enumerate(zip(made.runs[:-1], made.runs[1:], strict=True)):
        assert begin < end
        assert len(set(made.files[begin:end])) == 1
        ends = [made.offsets[at] + HEADER_BYTES + made.sizes[at] for at in range(begin, end)]
        assert all(
            made.offsets[begin + 1 + at] == ends[at] + made.gaps[begin + 1 + at] for at in range(end - begin - 1)
        )
        assert made.run_bytes(run) == ends[-1] - made.offsets[begin]
    for across_runs in (True, False) if len(lent) else ():
        steps = made.steps(across_runs=across_runs)
        assert [at for begin, end in steps for at in range(begin, end)] == list(range(len(lent)))


def plan_seeds() -> list[bytes]:
    rows = np.zeros(4, extents.ROW)
    rows["offset"] = [4096, 8192, 8192 + 4096, 2**20]
    together = bytes([3]) + rows.tobytes() + b"\1" + b"\0\x0e\0" * 4
    rows["file"] = [0, 1, 0, 1]
    rows["status"] = [0, 0, 1, 0]
    return [together, bytes([3]) + rows.tobytes() + b"\0" + b"\5\0\0" * 4, bytes([0]) + rows[:1].tobytes()]


def reader(data: bytes) -> None:
    """Headers of two blocks, changed in some bytes, their check made right or not: believed as the decoder says."""
    program = Program(data)
    offset = limits.KIB * 4 * (1 + program.below(100))
    payloads = [bytes([7]) * (1 + program.below(50)) for _ in range(2)]
    headers = [replace(a_header(program, offset, payload), codec=0) for payload in payloads]
    read = []
    for header in headers:
        head = bytearray(encode_header(header))
        for _ in range(program.below(4)):
            head[program.below(HEADER_BYTES)] ^= program.number(1)
        if program.flag():
            head[CRC_OFFSET : CRC_OFFSET + 4] = struct.pack("<I", zlib.crc32(head[:CRC_OFFSET]))
        read.append(bytes(head))
    asked = headers if program.flag() else headers[::-1]
    wanted = expected_headers(
        asked[0].space_id,
        np.array([header.key for header in asked], LAYOUT["key"]),
        np.array([header.token_digest for header in asked], LAYOUT["token_digest"]),
        np.array([header.payload_bytes for header in asked]),
    )
    expect_at(wanted, np.array([(NUMBER, GENERATION, offset)] * 2, PLACE))
    checksums = np.array([header.checksum for header in asked], np.uint64)
    believed = whole_headers(b"".join(read), wanted, checksums).tolist()
    for head, header, is_believed in zip(read, asked, believed, strict=True):
        name = (header.space_id, header.key, header.token_digest)
        place = (NUMBER, GENERATION, offset)
        assert is_whole(bytearray(head), *name, header.payload_bytes, place, header.checksum) == is_believed
        try:
            found = decode_header(head, segment=NUMBER, generation=GENERATION, offset=offset)
        except RecordDamaged:
            assert not is_believed, "a damaged header is believed"
            continue
        names = ("key", "space_id", "token_digest", "stored_bytes", "payload_bytes", "codec", "checksum")
        same = all(getattr(found, name) == getattr(header, name) for name in names)
        assert is_believed == (same and decode_mark(head) is None)


def reader_seeds() -> list[bytes]:
    return [bytes([9, 20, 30]) + bytes(range(60)), bytes(80), bytes(reversed(range(90)))]
