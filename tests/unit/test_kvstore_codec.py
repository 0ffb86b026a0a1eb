"""Compression: exact, optional, bounded."""

from __future__ import annotations

import random

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from kvstore.daemon.codec import Codec, compress, decompress
from kvstore.daemon.record import RecordDamaged


@given(st.binary(max_size=2000), st.sampled_from(["none", "zstd"]))
def test_what_is_compressed_comes_back(payload: bytes, codec_name: str) -> None:
    codec, stored = compress(codec_name, payload)
    assert decompress(codec, stored, len(payload)) == payload
    assert len(stored) <= len(payload)


def test_payloads_that_do_not_shrink_are_stored_as_they_are() -> None:
    """No copy is made of what does not gain 1/16."""
    payload = random.Random(3).randbytes(10_000)
    codec, stored = compress("zstd", payload)
    assert codec is Codec.NONE
    assert stored is payload
    assert compress("zstd", bytes(10_000))[0] is Codec.ZSTD


def test_a_compressed_payload_cannot_grow_beyond_its_promise() -> None:
    """A bomb is refused before it is unpacked, also when the frame hides its size."""
    bomb = zstandard.ZstdCompressor().compress(bytes(50_000_000))
    hidden = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(50_000_000))
    for stored in (bomb, hidden):
        with pytest.raises(RecordDamaged):
            decompress(Codec.ZSTD, stored, 1000)


@given(st.binary(max_size=200))
def test_garbage_is_damage(stored: bytes) -> None:
    with pytest.raises(RecordDamaged):
        decompress(Codec.ZSTD, stored, 1000)


def test_an_unknown_codec_is_damage() -> None:
    with pytest.raises(RecordDamaged, match="codec 9"):
        decompress(9, b"x", 1)
