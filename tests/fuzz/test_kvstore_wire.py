"""Decoders of the wire against arbitrary, truncated and damaged bytes: an answer or a ProtocolError, nothing else."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore import control, extents, sharing, wire
from kvstore.errors import ProtocolError, StoreError
from kvstore.framing import parse_address
from kvstore.keys import space_id
from kvstore.store import PutOutcome
from kvstore.testing import ManualClock, MemoryStore
from kvstore.units import parse_bytes, parse_duration_s, parse_seconds
from tests.support.spaces import a_chain, a_space

SPACE = space_id(a_space())
CHAIN = a_chain(SPACE, 3)
STORE = MemoryStore(ManualClock())
STORE.register_space(a_space())
STORE.put_state(SPACE, CHAIN.state_name(5), b"state")
ROW = wire.PutRow(CHAIN.names[0], 4, 100, 0, 77)
ROWS = np.array([(9, 4096, 1, 0, 0, 0, b""), (0, 0, 0, 0, 1, 0, b"")], extents.ROW)

DECODERS: dict[str, tuple[Callable[[bytes], object], bytes]] = {
    "header": (wire.decode_header, wire.encode_frame(wire.Opcode.GET, 1, b"body")[: wire.HEADER_BYTES]),
    "hello": (wire.decode_hello, wire.encode_hello(wire.Hello(1, "blake3-chain-1", b"token", "tenant"))),
    "welcome": (wire.decode_welcome, wire.encode_welcome(wire.Welcome(1, "blake3-chain-1", "node"))),
    "lookup": (wire.decode_lookup, wire.encode_lookup(SPACE, CHAIN.names, states=True)),
    "lookup reply": (
        wire.decode_lookup_reply,
        wire.encode_lookup_reply(STORE.lookup(SPACE, CHAIN.names, states=True)),
    ),
    "get": (wire.decode_get, wire.encode_get(SPACE, CHAIN.names, [1, 2, 3])),
    "put": (wire.decode_put, wire.encode_put(SPACE, 1, "disk", [ROW, ROW])),
    "put reply": (wire.decode_put_reply, wire.encode_put_reply(list(PutOutcome))),
    "confirm": (wire.decode_confirm, wire.encode_confirm(SPACE, [name.key for name in CHAIN.names])),
    "confirm reply": (wire.decode_confirm_reply, wire.encode_confirm_reply([True, False])),
    "touch": (wire.decode_touch, wire.encode_touch(SPACE, 2, CHAIN.names)),
    "count": (wire.decode_count, wire.encode_count(7)),
    "state": (wire.decode_state, wire.encode_state(SPACE, CHAIN.state_name(5), flags=1, checksum=9)),
    "state reply": (wire.decode_state_reply, wire.encode_state_reply(found=True, flags=1, checksum=9)),
    "share": (sharing.decode_share, sharing.encode_share(4096)),
    "share reply": (sharing.decode_shared, sharing.encode_shared(sharing.Shared(True, 5.0))),
    "rows": (lambda body: extents.decode_rows(body, "GET reply"), extents.encode_rows(ROWS, option=True)),
    "put local": (sharing.decode_put_local, sharing.encode_put_local([4096], wire.encode_put(SPACE, 1, "os", [ROW]))),
    "error": (wire.decode_error, wire.encode_error(ProtocolError("what"))),
    "control request": (control.decode_request, control.encode_request("scan", {"cursor": ""})),
    "control result": (control.decode_result, control.encode_result([1, 2])),
}


def decode(name: str, data: bytes) -> object:
    """Run a decoder; anything but a ProtocolError escapes and fails the test."""
    try:
        return DECODERS[name][0](data)
    except ProtocolError:
        return None


@pytest.mark.parametrize("name", list(DECODERS))
@given(data=st.binary(max_size=400))
def test_arbitrary_bytes_never_break_a_decoder(name: str, data: bytes) -> None:
    decode(name, data)


@pytest.mark.parametrize("name", list(DECODERS))
def test_truncations_and_additions_are_refused(name: str) -> None:
    """Every proper prefix of a message, and the message with a byte more, is a ProtocolError."""
    whole = DECODERS[name][1]
    assert decode(name, whole) is not None
    for cut in range(len(whole)):
        assert decode(name, whole[:cut]) is None, cut
    assert decode(name, whole + b"\0") is None


@pytest.mark.parametrize("name", list(DECODERS))
def test_flipped_bits_never_break_a_decoder(name: str) -> None:
    """Every single-bit damage and many double ones; a damaged header is always refused."""
    whole = DECODERS[name][1]
    rng = random.Random(name)
    for bit in range(8 * len(whole)):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << (bit % 8)
        assert name != "header" or decode(name, bytes(damaged)) is None
        damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
        decode(name, bytes(damaged))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=70),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=10), inner, max_size=3),
    max_leaves=8,
)
ARGS = st.dictionaries(
    st.sampled_from(
        ["space", "space_id", "cursor", "limit", "keys", "pins", "rules", "text", "expected_version", "apply", "names"]
    ),
    JSON | st.just(SPACE.hex()) | st.just([CHAIN.names[0].key.hex()]),
    max_size=6,
)


@pytest.mark.parametrize("verb", list(control._HANDLERS))
@given(args=ARGS)
def test_any_arguments_of_a_control_verb_are_an_answer_or_a_named_error(verb: str, args: dict[str, object]) -> None:
    store = MemoryStore(ManualClock())
    try:
        control.encode_result(control.call(store, verb, args, 1.0))
    except (StoreError, ValueError):
        return


@given(text=st.text(max_size=80))
def test_texts_of_people_are_values_or_value_errors(text: str) -> None:
    """Addresses, sizes and durations: no text raises anything but ValueError."""
    for read in (parse_address, parse_bytes, parse_duration_s, parse_seconds):
        try:
            read(text)  # type: ignore[operator]
        except ValueError:
            continue
