"""What is encoded is decoded again, for every message and any values within bounds."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore import control, limits, wire
from kvstore.errors import BY_CODE, Overloaded, ProtocolError, VersionMismatch
from kvstore.keys import BlockKey, BlockName, SpaceId, StateKey, StateName, TokenChain, TokenDigest
from kvstore.store import (
    BlockInfo,
    ClassEffect,
    Effect,
    Lookup,
    Pin,
    Policy,
    Presence,
    PutOutcome,
    Sighting,
    StateEntry,
)
from kvstore.testing import TEST_RULES

KEYS = st.binary(min_size=32, max_size=32)
DIGESTS = st.binary(min_size=16, max_size=16)
U8, U32, U64 = (st.integers(0, 2**bits - 1) for bits in (8, 32, 64))
NAMES = st.lists(
    st.builds(
        lambda key, digest: BlockName(BlockKey(key), BlockKey(bytes(32)), TokenDigest(digest), BlockKey(key), 0),
        KEYS,
        DIGESTS,
    ),
    max_size=20,
)


@given(
    opcode=st.sampled_from(wire.Opcode),
    request_id=U32,
    deadline_ms=U32,
    body=st.binary(max_size=100),
    payload_bytes=st.integers(0, limits.BATCH_BYTES_MAX),
    reply=st.booleans(),
)
def test_frames(
    opcode: wire.Opcode, request_id: int, deadline_ms: int, body: bytes, payload_bytes: int, reply: bool
) -> None:
    frame = wire.encode_frame(
        opcode, request_id, body, payload_bytes=payload_bytes, deadline_ms=deadline_ms, reply=reply
    )
    header = wire.decode_header(frame[: wire.HEADER_BYTES])
    assert (header.opcode, header.reply, header.request_id, header.deadline_ms) == (
        opcode,
        reply,
        request_id,
        deadline_ms,
    )
    assert (header.body_bytes, header.payload_bytes) == (len(body), payload_bytes)
    wire.check_body(header, frame[wire.HEADER_BYTES :])


def test_a_damaged_body_is_refused() -> None:
    frame = wire.encode_frame(wire.Opcode.GET, 1, b"body")
    header = wire.decode_header(frame[: wire.HEADER_BYTES])
    for damaged in (b"bodz", b"bod", b"bodyy", b""):
        with pytest.raises(ProtocolError, match="damaged"):
            wire.check_body(header, damaged)


def test_frames_beyond_bounds_are_not_made() -> None:
    with pytest.raises(ValueError, match="body"):
        wire.encode_frame(wire.Opcode.LOOKUP, 1, bytes(limits.BODY_BYTES_MAX + 1))
    with pytest.raises(ValueError, match="payload"):
        wire.encode_frame(wire.Opcode.PUT, 1, b"", payload_bytes=limits.BATCH_BYTES_MAX + 1)


def test_the_largest_messages_fit_a_frame() -> None:
    """A lookup of the most keys, and its answer, are within the bound of a body."""
    names = wire.PackedNames(bytes(32 * limits.LOOKUP_KEYS_MAX), bytes(16 * limits.LOOKUP_KEYS_MAX))
    assert len(wire.encode_lookup(SpaceId(bytes(32)), names, states=True)) < limits.BODY_BYTES_MAX
    count = limits.LOOKUP_KEYS_MAX
    answer = Lookup(np.zeros(count, np.uint8), np.zeros(count, np.uint8), np.zeros(count, np.uint32))
    assert len(wire.encode_lookup_reply(answer)) < limits.BODY_BYTES_MAX


@given(
    protocol=st.integers(0, 65_535),
    algorithm=st.text(max_size=40),
    token=st.binary(max_size=99),
    tenant=st.text(max_size=40),
)
def test_hello(protocol: int, algorithm: str, token: bytes, tenant: str) -> None:
    hello = wire.Hello(protocol, algorithm, token, tenant)
    assert wire.decode_hello(wire.encode_hello(hello)) == hello
    welcome = wire.Welcome(protocol, algorithm, tenant)
    assert wire.decode_welcome(wire.encode_welcome(welcome)) == welcome


@given(space=KEYS, names=NAMES, states=st.booleans(), class_byte=st.integers(1, 255))
def test_lookup_and_touch(space: bytes, names: list[BlockName], states: bool, class_byte: int) -> None:
    asked = wire.decode_lookup(wire.encode_lookup(SpaceId(space), names, states=states))
    assert (asked.space_id, list(asked.names), asked.states) == (space, names, states)
    touch = wire.decode_touch(wire.encode_touch(SpaceId(space), class_byte, names))
    assert (touch.space_id, touch.traffic_class, list(touch.names)) == (space, class_byte, names)


@given(names=NAMES)
def test_packed_names_are_a_sequence_of_the_names(names: list[BlockName]) -> None:
    packed = wire.PackedNames.pack(names)
    assert len(packed) == len(names)
    assert list(packed) == names
    assert packed[1:3] == names[1:3]
    assert packed.keys == b"".join(name.key for name in names)
    assert [name.token_digest for name in packed] == [name.token_digest for name in names]
    assert wire.PackedNames.pack(packed) is packed
    if names:
        assert packed[-1] == names[-1]
    with pytest.raises(IndexError):
        packed[len(names)]


@given(names=NAMES, data=st.data())
def test_packed_names_are_taken_in_any_order(names: list[BlockName], data: st.DataObject) -> None:
    """As picking from a list does: a permutation, a part, one more than once, or all as they are."""
    places = data.draw(st.lists(st.integers(0, len(names) - 1), max_size=20)) if names else []
    packed = wire.PackedNames.pack(names)
    assert list(packed.take(places)) == [names[at] for at in places]
    assert list(packed.take(range(len(names))[::-1])) == names[::-1]
    assert packed.take(range(len(names))) is packed


@given(st.integers(0, 40), st.integers(0, 40), st.integers(0, 40))
def test_names_of_a_chain_are_packed_as_those_of_a_list(blocks: int, first: int, stop: int) -> None:
    names = TokenChain(SpaceId(bytes(32)), 1, range(blocks)).names[first:stop]
    packed, listed = wire.PackedNames.pack(names), wire.PackedNames.pack(list(names))
    assert (packed.keys, packed.token_digests) == (listed.keys, listed.token_digests)


@given(
    rows=st.lists(st.tuples(st.sampled_from(Presence), U8, U32), max_size=20),
    complete=st.booleans(),
    load_s=st.floats(0, 1e6),
    states=st.lists(st.tuples(KEYS, U32, U32, U8), max_size=5),
)
def test_lookup_answers(
    rows: list[tuple[Presence, int, int]], complete: bool, load_s: float, states: list[tuple[bytes, int, int, int]]
) -> None:
    entries = tuple(StateEntry(StateKey(key), len(rows) - 1, tail, size, flags) for key, tail, size, flags in states)
    answer = Lookup(
        np.array([row[0] for row in rows], np.uint8),
        np.array([row[1] for row in rows], np.uint8),
        np.array([row[2] for row in rows], np.uint32),
        entries,
        complete,
        load_s,
    )
    decoded = wire.decode_lookup_reply(wire.encode_lookup_reply(answer))
    assert decoded.presence.tolist() == answer.presence.tolist()
    assert decoded.flags.tolist() == answer.flags.tolist()
    assert decoded.payload_bytes.tolist() == answer.payload_bytes.tolist()
    assert (decoded.states, decoded.complete, decoded.load_s_estimate) == (entries, complete, load_s)


@given(space=KEYS, names=NAMES, size=st.integers(0, 2**20))
def test_get(space: bytes, names: list[BlockName], size: int) -> None:
    sizes = [size + at for at in range(len(names))]
    asked = wire.decode_get(wire.encode_get(SpaceId(space), names, sizes))
    assert (asked.space_id, list(asked.names), list(asked.wanted_bytes)) == (space, names, sizes)


@given(
    space=KEYS,
    class_byte=st.integers(1, 255),
    ack=st.sampled_from(["os", "disk"]),
    rows=st.lists(
        st.tuples(KEYS, KEYS, DIGESTS, U32, st.integers(1, limits.BLOCK_TOKENS_MAX), st.integers(1, 2**26), U8, U64),
        max_size=10,
    ),
    outcomes=st.lists(st.sampled_from(PutOutcome), max_size=10),
)
def test_put(
    space: bytes, class_byte: int, ack: str, rows: list[tuple[object, ...]], outcomes: list[PutOutcome]
) -> None:
    blocks = tuple(
        wire.PutRow(BlockName(key, parent, digest, key, index), tokens, size, flags, checksum)  # type: ignore[arg-type]
        for key, parent, digest, index, tokens, size, flags, checksum in rows
    )
    asked = wire.decode_put(wire.encode_put(SpaceId(space), class_byte, ack, blocks))  # type: ignore[arg-type]
    assert (asked.space_id, asked.traffic_class, asked.ack, tuple(asked.rows)) == (space, class_byte, ack, blocks)
    assert wire.decode_put_reply(wire.encode_put_reply(outcomes)) == outcomes


@given(
    space=KEYS, key=KEYS, parent=KEYS, blocks=st.integers(0, 1000), tail=st.integers(0, 4095), flags=U8, checksum=U64
)
def test_states(space: bytes, key: bytes, parent: bytes, blocks: int, tail: int, flags: int, checksum: int) -> None:
    name = StateName(StateKey(key), BlockKey(parent), BlockKey(parent), blocks * 4096 + tail, tail)
    asked = wire.decode_state(wire.encode_state(SpaceId(space), name, flags=flags, checksum=checksum))
    assert (asked.space_id, asked.name, asked.flags, asked.checksum) == (space, name, flags, checksum)
    assert wire.decode_state_reply(wire.encode_state_reply(found=True, flags=flags, checksum=checksum)) == (
        True,
        flags,
        checksum,
    )


@pytest.mark.parametrize("kind", list(BY_CODE.values()))
def test_errors_arrive_as_what_they_were(kind: type) -> None:
    error = wire.decode_error(wire.encode_error(kind("what happened")))
    assert type(error) is kind
    assert str(error) == "what happened"


def test_errors_with_more_to_say() -> None:
    """When to retry survives, a caller's mistake becomes ValueError, and a long message is cut."""
    overloaded = wire.decode_error(wire.encode_error(Overloaded("full", 1.5)))
    assert isinstance(overloaded, Overloaded)
    assert overloaded.retry_after_s == 1.5
    assert type(wire.decode_error(wire.encode_error(ValueError("bad limit")))) is ValueError
    assert len(str(wire.decode_error(wire.encode_error(ProtocolError("x" * 9999))))) == wire.ERROR_MESSAGE_BYTES_MAX


def test_another_version_is_told_apart_from_garbage() -> None:
    """Version comes before every other check, so that a newer peer is named and not called damaged."""
    frame = bytearray(wire.encode_frame(wire.Opcode.GET, 1, b""))
    frame[4] = wire.VERSION + 1
    with pytest.raises(VersionMismatch, match=f"version {wire.VERSION + 1}"):
        wire.decode_header(frame)


def test_values_of_control_round_trip() -> None:
    """Every value that crosses as JSON comes back equal."""
    key, space = BlockKey(b"k" * 32), SpaceId(b"s" * 32)
    info = BlockInfo(key, space, key, 3, 64, 1, 10, 12, 100, 200, {1: 100, 2: 90}, True, 7)
    pin = Pin(space, key, "owner", "ü", 5)
    policy = Policy(3, TEST_RULES, "text")
    effect = Effect(True, (ClassEffect(1, space, 2, 3),), 4, 5)
    sighting = Sighting(Presence.EVICTED, 1, 2, (space,))
    assert control.info_from_json(control.info_to_json(info)) == info
    assert control.pin_from_json(control.pin_to_json(pin)) == pin
    assert control.policy_from_json(control.policy_to_json(policy)) == policy
    assert control.effect_from_json(control.effect_to_json(effect)) == effect
    known = Sighting(Presence.PRESENT, 1, 2, (space,), info, TokenDigest(b"d" * 16))
    for item in (sighting, known):
        assert control.sighting_from_json(control.sighting_to_json(item)) == item
    assert control.sighting_from_json(control.sighting_to_json(sighting)[:4]) == sighting
    assert control.decode_request(control.encode_request("verb", {"a": 1})) == ("verb", {"a": 1})


def test_effects_of_several_nodes_add_up() -> None:
    space, other = SpaceId(b"a" * 32), SpaceId(b"b" * 32)
    one = Effect(True, (ClassEffect(1, space, 2, 20), ClassEffect(2, space, 1, 5)), 1, 0)
    two = Effect(True, (ClassEffect(1, space, 3, 30), ClassEffect(1, other, 1, 1)), 2, 4)
    merged = control.merge_effects([one, two], {"n3": "down"})
    assert merged.removed == (ClassEffect(1, space, 5, 50), ClassEffect(1, other, 1, 1), ClassEffect(2, space, 1, 5))
    assert (merged.segments_freed, merged.blocks_rewritten, merged.nodes_failed) == (3, 4, {"n3": "down"})
