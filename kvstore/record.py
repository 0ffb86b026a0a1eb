"""What a reader checks of one record: the layout of its 256-byte header, and whether records are the blocks asked for.

Owns the header's layout, for whoever writes, scans or reads records. Does not know segments, sockets or where bytes
come from. Invariant: a payload counts only if the header read beside it is whole, unmarked, and names the key, space,
token digest, lengths, place and generation expected, and if its XXH3-64 is the one that the header has.

Vectorised: a header is compared with the one expected under a mask of the bytes that are known beforehand; the others
(parent, class, times, checksum) are covered by the header's CRC.
"""

from __future__ import annotations

import struct
import zlib

import numpy as np
import numpy.typing as npt

from kvstore import limits
from kvstore.keys import SpaceId

RECORD_VERSION = 1
RECORD_MAGIC = b"RKVB"
HEADER_BYTES = 256
HEADER = struct.Struct("<4sHHIQQ32s32s32s16sIIBBBBIIQQ4B4I")
CRC_OFFSET = HEADER.size
MARK_OFFSET = 224
MARK_BYTES = 20

LAYOUT = np.dtype(
    {
        "names": [
            "magic", "version", "header_bytes", "segment", "generation", "offset", "key", "space_id", "token_digest",
            "codec", "stored_bytes", "payload_bytes", "checksum", "crc",
        ],
        "formats": [
            "S4", "<u2", "<u2", "<u4", "<u8", "<u8", "V32", "V32", "V16", "u1", "<u4", "<u4", "<u8", "<u4",
        ],
        "offsets": [0, 4, 6, 8, 12, 20, 28, 92, 124, 150, 152, 156, 168, CRC_OFFSET],
        "itemsize": HEADER_BYTES,
    }
)  # fmt: skip
"""The fields that a reader looks at, at their places."""

CODEC_NONE = 0
"""The stored payload is the payload: such a record may be read by anybody."""


def _compared() -> npt.NDArray[np.uint64]:
    """Ones over the bytes of a header that a reader knows beforehand: all but parent, index, tokens, class, flags,
    times, checksum and CRC; the mark must be zero.
    """
    mask = np.zeros(HEADER_BYTES, np.uint8)
    for begin, end in ((0, 60), (92, 140), (150, 151), (152, 160), (MARK_OFFSET, MARK_OFFSET + MARK_BYTES)):
        mask[begin:end] = 0xFF
    return mask.view(np.uint64)


_COMPARED = _compared()
_BEGIN = struct.Struct("<4sHHIQQ32s")
_STORED = struct.Struct("<BxII8xQ")
_CRC = struct.Struct("<I")
_STORED_OFFSET = 150
_NAME_OFFSET = 92
_UNMARKED = bytes(MARK_BYTES)

assert _BEGIN.size == 60 and _STORED_OFFSET + _STORED.size == 176
assert CRC_OFFSET + 4 <= MARK_OFFSET < HEADER_BYTES == LAYOUT.itemsize
assert LAYOUT["key"].itemsize == limits.KEY_BYTES and LAYOUT["token_digest"].itemsize == limits.TOKEN_DIGEST_BYTES


def expected_headers(
    space_id: SpaceId,
    keys: npt.NDArray[np.void],
    token_digests: npt.NDArray[np.void],
    payload_bytes: npt.NDArray[np.int64],
) -> npt.NDArray[np.void]:
    """What the headers of uncompressed records of these blocks must be, one a block, but for their places.

    ``keys`` and ``token_digests``: as ``LAYOUT`` has them, in order.
    """
    wanted = np.zeros(len(keys), LAYOUT)
    wanted["magic"], wanted["version"], wanted["header_bytes"] = RECORD_MAGIC, RECORD_VERSION, HEADER_BYTES
    wanted["key"], wanted["token_digest"] = keys, token_digests
    wanted["space_id"] = np.frombuffer(space_id, LAYOUT["space_id"])
    wanted["stored_bytes"] = wanted["payload_bytes"] = payload_bytes
    return wanted


def expect_at(wanted: npt.NDArray[np.void], places: npt.NDArray[np.void]) -> npt.NDArray[np.void]:
    """Expect the records at these places: a structured array with ``segment``, ``generation`` and ``offset``."""
    for name in ("segment", "generation", "offset"):
        wanted[name] = places[name]
    return wanted


def whole_headers(
    data: bytes, wanted: npt.NDArray[np.void], checksums: npt.NDArray[np.uint64]
) -> npt.NDArray[np.bool_]:
    """Which of the headers read (``data``: one after another) are the ones expected, undamaged, unmarked, and of
    payloads with these XXH3-64.
    """
    headers = np.frombuffer(data, LAYOUT)
    words = np.frombuffer(data, np.uint64) ^ wanted.view(np.uint64)
    good = ~(words.reshape(len(wanted), -1) & _COMPARED).any(axis=1)
    good &= headers["checksum"] == checksums
    crc32 = zlib.crc32
    crcs = [crc32(data[at : at + CRC_OFFSET]) for at in range(0, len(data), HEADER_BYTES)]
    return np.asarray(good & (headers["crc"] == np.array(crcs, np.uint32)))


def is_whole(
    header: bytearray,
    space_id: SpaceId,
    key: bytes,
    token_digest: bytes,
    payload_bytes: int,
    place: tuple[int, int, int],
    checksum: int,
) -> bool:
    """``whole_headers`` of one header, in a tenth of the time. ``place``: segment, generation and offset."""
    return (
        header.startswith(_BEGIN.pack(RECORD_MAGIC, RECORD_VERSION, HEADER_BYTES, *place, key))
        and header.startswith(space_id + token_digest, _NAME_OFFSET)
        and _STORED.unpack_from(header, _STORED_OFFSET) == (CODEC_NONE, payload_bytes, payload_bytes, checksum)
        and header.startswith(_UNMARKED, MARK_OFFSET)
        and _CRC.unpack_from(header, CRC_OFFSET)[0] == zlib.crc32(memoryview(header)[:CRC_OFFSET])
    )
