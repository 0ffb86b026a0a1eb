"""Many record headers at once, as columns.

Owns the header's layout as a numpy type (``record`` owns its bytes) and the way from headers to index values. Does not
read files. Invariant: what counts as whole here is what ``record.decode_header`` accepts.
"""

from __future__ import annotations

import zlib

import numpy as np
import numpy.typing as npt

from kvstore.daemon.index import ENTRY_DTYPE, Rows
from kvstore.daemon.record import HEADER_BYTES, MARK_OFFSET, RECORD_MAGIC, TOUCHES_MAX
from kvstore.limits import PAYLOAD_BYTES_MAX, STORED_BYTES_MAX
from kvstore.record import RECORD_VERSION

_CRC_OFFSET = 196
HEADERS_DTYPE = np.dtype(
    [
        ("magic", "S4"),
        ("version", "<u2"),
        ("header_bytes", "<u2"),
        ("segment", "<u4"),
        ("generation", "<u8"),
        ("offset", "<u8"),
        ("key", "<u8", (4,)),
        ("parent", "<u8", (4,)),
        ("space", "<u8", (4,)),
        ("digest", "<u8", (2,)),
        ("index", "<u4"),
        ("tokens", "<u4"),
        ("class_byte", "u1"),
        ("flags", "u1"),
        ("codec", "u1"),
        ("reserved", "u1"),
        ("stored_bytes", "<u4"),
        ("payload_bytes", "<u4"),
        ("written_s", "<i8"),
        ("checksum", "<u8"),
        ("touch_class", "u1", (TOUCHES_MAX,)),
        ("touch_s", "<u4", (TOUCHES_MAX,)),
        ("crc", "<u4"),
        ("blank", "V24"),
        ("mark", "V20"),
        ("rest", "V12"),
    ]
)
assert HEADERS_DTYPE.itemsize == HEADER_BYTES
assert HEADERS_DTYPE.fields is not None and HEADERS_DTYPE.fields["mark"][1] == MARK_OFFSET
assert HEADERS_DTYPE.fields["crc"][1] == _CRC_OFFSET

Headers = npt.NDArray[np.void]


def headers_in(data: bytes) -> Headers:
    """Headers that lie one after another."""
    return np.frombuffer(data, dtype=HEADERS_DTYPE)


def are_whole(
    headers: Headers, segment: int, generation: int, offsets: npt.NDArray[np.uint64]
) -> npt.NDArray[np.bool_]:
    """Which are headers of records at these offsets of a segment's present life."""
    whole = (headers["magic"] == RECORD_MAGIC) & (headers["crc"] == _crcs(headers))
    whole &= (headers["version"] == RECORD_VERSION) & (headers["header_bytes"] == HEADER_BYTES)
    whole &= (headers["segment"] == segment) & (headers["generation"] == np.uint64(generation))
    whole &= headers["offset"] == offsets
    within = (headers["stored_bytes"] <= STORED_BYTES_MAX) & (headers["payload_bytes"] <= PAYLOAD_BYTES_MAX)
    result: npt.NDArray[np.bool_] = whole & within
    return result


def were_records(headers: Headers) -> npt.NDArray[np.bool_]:
    """Which are headers of records, of whatever place and life."""
    result: npt.NDArray[np.bool_] = (headers["magic"] == RECORD_MAGIC) & (headers["crc"] == _crcs(headers))
    return result


def have_marks(headers: Headers) -> npt.NDArray[np.bool_]:
    """Which carry a mark, whole or damaged."""
    marks = np.ascontiguousarray(headers["mark"]).view(np.uint8).reshape(len(headers), HEADERS_DTYPE["mark"].itemsize)
    return np.asarray(marks.any(axis=1), dtype=np.bool_)


def rows_of(headers: Headers) -> Rows:
    """The index values that records give by themselves."""
    rows = np.zeros(len(headers), dtype=ENTRY_DTYPE)
    for name in ENTRY_DTYPE.names or ():
        if name != "reserved":
            rows[name] = headers[name]
    return rows


def headers_for(blocks: npt.NDArray[np.void]) -> Headers:
    """Headers with the columns of ``blocks`` taken over; the others are 0. ``seal_headers`` completes them."""
    headers = np.zeros(len(blocks), dtype=HEADERS_DTYPE)
    headers["magic"], headers["version"], headers["header_bytes"] = RECORD_MAGIC, RECORD_VERSION, HEADER_BYTES
    for name in blocks.dtype.names or ():
        headers[name] = blocks[name]
    return headers


def seal_headers(headers: Headers) -> None:
    """Give headers that are otherwise complete their CRC."""
    headers["crc"] = _crcs(headers)


def _crcs(headers: Headers) -> npt.NDArray[np.uint32]:
    data = headers.tobytes()
    crcs = [zlib.crc32(data[at : at + _CRC_OFFSET]) for at in range(0, len(data), HEADER_BYTES)]
    return np.array(crcs, dtype=np.uint32)
