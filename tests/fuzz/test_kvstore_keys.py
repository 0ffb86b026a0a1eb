"""An encoded space comes from outside: whatever it holds, it is a space or a ValueError."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.keys import decode_space, encode_space
from kvstore.limits import SPACE_BYTES_MAX
from tests.support.spaces import BASE, a_space

ENCODED = encode_space(a_space(revision="main", tenant_salt=b"s" * 32))


def decodes_or_refuses(data: bytes) -> bool:
    """True if the bytes are a space (then exactly its canonical ones), False if they were refused."""
    try:
        space = decode_space(data)
    except ValueError:
        return False
    assert encode_space(space) == data
    return True


@given(st.binary(max_size=400))
@settings(max_examples=300, deadline=None)
def test_random_bytes_are_refused(data: bytes) -> None:
    """Noise, with or without the right version byte, is refused and nothing else is raised."""
    assert not decodes_or_refuses(data)
    assert not decodes_or_refuses(ENCODED[:1] + data)


def test_every_truncation_is_refused() -> None:
    """No proper prefix of an encoding decodes, nor does one with bytes left over."""
    assert decodes_or_refuses(ENCODED)
    for length in range(len(ENCODED)):
        assert not decodes_or_refuses(ENCODED[:length])
    assert not decodes_or_refuses(ENCODED + b"\0")


def test_every_bit_flip_is_refused_or_another_space() -> None:
    """A flipped bit never decodes to the same space."""
    for bit in range(8 * len(ENCODED)):
        spoiled = bytearray(ENCODED)
        spoiled[bit // 8] ^= 1 << (bit % 8)
        if decodes_or_refuses(bytes(spoiled)):
            assert decode_space(bytes(spoiled)) != decode_space(ENCODED)


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_spliced_encodings_are_refused_or_canonical(data: st.DataObject) -> None:
    """Bytes cut out, repeated or replaced in an encoding raise nothing but ValueError."""
    begin = data.draw(st.integers(0, len(ENCODED)))
    end = data.draw(st.integers(begin, len(ENCODED)))
    middle = data.draw(st.binary(max_size=12) | st.just(ENCODED[begin:end] * 2))
    decodes_or_refuses(ENCODED[:begin] + middle + ENCODED[end:])


def field_with(name: bytes, value: bytes) -> bytes:
    """The base encoding with another encoded value for one of its fields that are absent there."""
    marker = struct.pack("<I", len(name)) + name + b"N"
    encoded = encode_space(BASE)
    assert encoded.count(marker) == 1
    return encoded.replace(marker, marker[:-1] + value)


@pytest.mark.parametrize(
    "value",
    [
        b"I" + bytes(8),
        b"T" + struct.pack("<I", 0),
        b"B" + struct.pack("<I", 1) + b"x",
        b"S" + struct.pack("<I", 1) + b"\xff",
        b"S" + struct.pack("<I", 2**32 - 1) + b"x",
        b"X",
        b"C" + b"N" * 4,
        b"C" + b"S" + struct.pack("<I", 1) + b"x",
        b"G",
        b"T" + struct.pack("<I", 2**31),
    ],
)
def test_a_value_of_the_wrong_kind_is_refused(value: bytes) -> None:
    """Each field takes its own kind only; lengths beyond the data and bad UTF-8 are refused."""
    assert not decodes_or_refuses(field_with(b"revision", value))


def test_deep_nesting_is_refused_without_recursion() -> None:
    """Lists within lists, as deep as the bound on bytes allows, are refused."""
    nested = (b"T" + struct.pack("<I", 1)) * 3000
    assert not decodes_or_refuses(field_with(b"revision", nested))
    assert not decodes_or_refuses(encode_space(BASE).replace(b"T" + struct.pack("<I", 1), nested, 1))


def test_oversized_encodings_are_refused_first() -> None:
    """Beyond the bound nothing is read."""
    with pytest.raises(ValueError, match=str(SPACE_BYTES_MAX)):
        decode_space(ENCODED + bytes(SPACE_BYTES_MAX))
