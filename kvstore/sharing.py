"""The messages of the same-host path: pure encoding and decoding, as ``wire`` does for the others.

Owns the bytes by which a client and a daemon on one host share memory (``kvstore/FORMAT.md`` shows the tables). Does
not know memory itself: descriptors travel beside the payload bytes of a frame. Invariants: those of ``wire``; a get
asks for extents with the body of GET and is answered by the rows of ``extents``; a put through an arena carries the
body of PUT.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from kvstore import limits, wire
from kvstore.errors import ProtocolError

_SHARE = struct.Struct("<Q")
_SHARED = struct.Struct("<BxxxI")
_COUNT = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class Shared:
    """The daemon's answer to SHARE: whether it lends extents and takes puts from the arena, and how long a lease is."""

    granted: bool
    lease_s: float


def encode_share(arena_bytes: int) -> bytes:
    return _SHARE.pack(arena_bytes)


def decode_share(body: bytes) -> int:
    """Bytes of the arena whose descriptor is attached to the payload. Raises ProtocolError beyond the bound."""
    reader = wire.Reader(body, "SHARE")
    (arena_bytes,) = reader.unpack(_SHARE)
    reader.end()
    if not 1 <= arena_bytes <= limits.ARENA_BYTES_MAX:
        raise ProtocolError(f"SHARE offers an arena of {arena_bytes} bytes; at most {limits.ARENA_BYTES_MAX} are taken")
    return int(arena_bytes)


def encode_shared(shared: Shared) -> bytes:
    return _SHARED.pack(shared.granted, round(1000 * shared.lease_s))


def decode_shared(body: bytes) -> Shared:
    reader = wire.Reader(body, "SHARE reply")
    granted, lease_ms = reader.unpack(_SHARED)
    reader.end()
    if granted > 1:
        raise ProtocolError("SHARE reply carries an unknown answer")
    return Shared(bool(granted), lease_ms / 1000)


def encode_put_local(offsets: Sequence[int], put_body: bytes) -> bytes:
    """A put whose payloads lie in the arena, each from its offset on."""
    return struct.pack(f"<I{len(offsets)}Q", len(offsets), *offsets) + put_body


def decode_put_local(body: bytes) -> tuple[tuple[int, ...], wire.PutRequest]:
    """Where each payload begins, and the put. Raises ProtocolError unless there is an offset for every block."""
    reader = wire.Reader(body, "PUT_LOCAL")
    (count,) = reader.unpack(_COUNT)
    if count > limits.BATCH_BLOCKS_MAX:
        raise ProtocolError("PUT_LOCAL carries a count beyond its bound")
    offsets = struct.unpack(f"<{count}Q", reader.take(8 * count))
    asked = wire.decode_put(reader.rest())
    if len(asked.rows) != count:
        raise ProtocolError("PUT_LOCAL has another number of offsets than blocks")
    return offsets, asked
