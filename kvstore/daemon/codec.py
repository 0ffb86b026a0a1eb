"""How a payload is stored: as it is, or compressed with zstandard where the class asks for it and it helps.

Owns the codec bytes of the record header. Does not know classes or records. Invariant: decompressing is bounded by the
payload length that the header promises, whatever the stored bytes say.
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


class Codec(IntEnum):
    """One stable byte each."""

    NONE = 0
    ZSTD = 1


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


def _unpack(stored: Buffer, payload_bytes: int) -> bytes:
    try:
        if zstandard.get_frame_parameters(stored).content_size != payload_bytes:
            raise RecordDamaged("the compressed payload promises another length than the header")
        return _contexts.decompressor.decompress(stored, max_output_size=payload_bytes)
    except zstandard.ZstdError as error:
        raise RecordDamaged(f"the payload cannot be decompressed: {error}") from error
