"""How a payload is stored: as it is, or compressed with zstandard where the class asks for it and it helps; and then
encrypted or not.

Owns the codec bytes of the record header: how a payload was packed, and the slot of its cipher key. Does not know
classes, records or cipher keys. Invariant: decompressing is bounded by the payload length that the header promises,
whatever the stored bytes say.
"""

from __future__ import annotations

import threading
from enum import IntEnum

import zstandard

from kvstore.daemon.record import RecordDamaged
from kvstore.store import Buffer

ZSTD_LEVEL = 1
"""Gaussian bf16 shrinks by 1.29 at 0.4-0.7 GB/s; higher levels gain nothing on KV bytes."""
GAIN_MIN = 16
"""A payload is stored as it is unless compressing saves at least 1/16 of it."""


ENCRYPTION_BYTES = 44
"""What encryption adds to a packed payload."""


class Codec(IntEnum):
    """How a payload is packed: one stable byte each, if it is not encrypted."""

    NONE = 0
    ZSTD = 1


_ENCRYPTED = 2
_PACKING = 1
_SLOT_BITS = 2


def is_encrypted(codec: int) -> bool:
    return bool(codec & _ENCRYPTED)


def slot_of(codec: int) -> int:
    """The slot (0..63) of the cipher key of an encrypted payload."""
    return codec >> _SLOT_BITS


def packing_of(codec: int) -> int:
    """How a payload is packed before it is encrypted, if it is."""
    return codec & _PACKING if is_encrypted(codec) else codec


def with_slot(codec: int, slot: int) -> int:
    """The codec byte of a payload that is packed like this one and encrypted under a slot's cipher key."""
    return packing_of(codec) | _ENCRYPTED | slot << _SLOT_BITS


class _Contexts(threading.local):
    """zstandard contexts are not thread-safe: one pair a thread."""

    def __init__(self) -> None:
        self.compressor = zstandard.ZstdCompressor(level=ZSTD_LEVEL)
        self.decompressor = zstandard.ZstdDecompressor()


_contexts = _Contexts()


def compress(codec_name: str, payload: Buffer) -> tuple[Codec, Buffer]:
    """Stored form of a payload under a class's codec; the payload itself, uncopied, where compressing does not pay."""
    if codec_name != "zstd" or not len(payload):
        return Codec.NONE, payload
    packed = _contexts.compressor.compress(payload)
    if len(packed) > len(payload) - len(payload) // GAIN_MIN:
        return Codec.NONE, payload
    return Codec.ZSTD, packed


def decompress(codec: int, stored: Buffer, payload_bytes: int) -> bytes:
    """The payload of verified stored bytes. Raises RecordDamaged if they do not give exactly ``payload_bytes``."""
    if codec == Codec.NONE:
        payload = bytes(stored)
    elif codec == Codec.ZSTD:
        payload = _unpack(stored, payload_bytes)
    else:
        raise RecordDamaged(f"the record uses codec {codec}, which this version does not know")
    if len(payload) != payload_bytes:
        raise RecordDamaged("the decompressed payload has another length than promised")
    return payload


def verify(codec: int, stored: Buffer, payload_bytes: int) -> None:
    """Raise RecordDamaged if stored bytes whose checksum is right cannot be such a payload.

    Of an encrypted one that shows by its length only: whoever decrypts it finds out more.
    """
    if not is_encrypted(codec):
        if codec != Codec.NONE:
            decompress(codec, stored, payload_bytes)
        elif len(stored) != payload_bytes:
            raise RecordDamaged("the lengths of an uncompressed payload differ")
        return
    packed_bytes = len(stored) - ENCRYPTION_BYTES
    if not 0 <= packed_bytes <= payload_bytes or (packing_of(codec) == Codec.NONE and packed_bytes != payload_bytes):
        raise RecordDamaged("the length of an encrypted payload is not that of its stored bytes")


def _unpack(stored: Buffer, payload_bytes: int) -> bytes:
    try:
        if zstandard.get_frame_parameters(stored).content_size != payload_bytes:
            raise RecordDamaged("the compressed payload promises another length than the header")
        return _contexts.decompressor.decompress(stored, max_output_size=payload_bytes)
    except zstandard.ZstdError as error:
        raise RecordDamaged(f"the payload cannot be decompressed: {error}") from error
