"""What arrives over a socket, as targets of a fuzzer: messages, control verbs, and whole conversations.

A target takes any bytes and returns, or raises what a test should show. The properties: a decoder gives a message or a
``ProtocolError`` and nothing else; what it gives is written back as the same message, of the same length, so nothing
larger than the input was made; a daemon's session answers every frame without a fault of its own.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import xxhash

from kvstore import control, extents, limits, sharing, wire
from kvstore.daemon.admission import Admission
from kvstore.daemon.metrics import ServerMetrics
from kvstore.daemon.request import Connection
from kvstore.daemon.session import Session
from kvstore.daemon.tokens import Tokens
from kvstore.errors import ProtocolError, StoreError
from kvstore.framing import Channel
from kvstore.keys import KEY_ALGORITHM, space_id
from kvstore.purges import PurgeOrder, order_to_json
from kvstore.store import PutOutcome
from kvstore.testing import ManualClock, MemoryStore
from tests.fuzz.program import Program
from tests.support.spaces import a_chain, a_space

SPACE = space_id(a_space())
CHAIN = a_chain(SPACE, 3)
ROW = wire.PutRow(CHAIN.names[0], 4, 8, 0, 77)
EXTENTS = np.array([(9, 4096, 1, 0, 0, 0, b""), (0, 0, 0, 0, 1, 0, b"")], extents.ROW)

Decode = Callable[[bytes], Any]
Encode = Callable[[Any], bytes]


def _a_store() -> MemoryStore:
    store = MemoryStore(ManualClock(), capacity_bytes=limits.MIB, state_pool_bytes=64 * limits.KIB)
    store.register_space(a_space())
    store.put_state(SPACE, CHAIN.state_name(5), b"state")
    return store


def _put_body(request: wire.PutRequest) -> bytes:
    return wire.encode_put(request.space_id, request.traffic_class, request.ack, request.rows)


MESSAGES: dict[str, tuple[Decode, Encode, bytes]] = {
    "hello": (wire.decode_hello, wire.encode_hello, wire.encode_hello(wire.Hello(2, "blake3", b"token", "tenant"))),
    "welcome": (wire.decode_welcome, wire.encode_welcome, wire.encode_welcome(wire.Welcome(2, "blake3", "node"))),
    "lookup": (
        wire.decode_lookup,
        lambda found: wire.encode_lookup(found.space_id, found.names, states=found.states),
        wire.encode_lookup(SPACE, CHAIN.names, states=True),
    ),
    "lookup reply": (
        wire.decode_lookup_reply,
        wire.encode_lookup_reply,
        wire.encode_lookup_reply(_a_store().lookup(SPACE, CHAIN.names, states=True)),
    ),
    "get": (
        wire.decode_get,
        lambda found: wire.encode_get(found.space_id, found.names, found.wanted_bytes),
        wire.encode_get(SPACE, CHAIN.names, [1, 2, 3]),
    ),
    "put": (wire.decode_put, _put_body, wire.encode_put(SPACE, 1, "begun", [ROW, ROW])),
    "put reply": (wire.decode_put_reply, wire.encode_put_reply, wire.encode_put_reply(list(PutOutcome))),
    "confirm": (
        wire.decode_confirm,
        lambda found: wire.encode_confirm(*found),
        wire.encode_confirm(SPACE, [name.key for name in CHAIN.names]),
    ),
    "confirm reply": (
        wire.decode_confirm_reply,
        wire.encode_confirm_reply,
        wire.encode_confirm_reply([True, False]),
    ),
    "touch": (
        wire.decode_touch,
        lambda found: wire.encode_touch(found.space_id, found.traffic_class, found.names),
        wire.encode_touch(SPACE, 2, CHAIN.names),
    ),
    "count": (wire.decode_count, wire.encode_count, wire.encode_count(7)),
    "state": (
        wire.decode_state,
        lambda found: wire.encode_state(found.space_id, found.name, flags=found.flags, checksum=found.checksum),
        wire.encode_state(SPACE, CHAIN.state_name(5), flags=1, checksum=9),
    ),
    "state reply": (
        wire.decode_state_reply,
        lambda found: wire.encode_state_reply(found=found[0], flags=found[1], checksum=found[2]),
        wire.encode_state_reply(found=True, flags=1, checksum=9),
    ),
    "share": (sharing.decode_share, sharing.encode_share, sharing.encode_share(4096)),
    "share reply": (sharing.decode_shared, sharing.encode_shared, sharing.encode_shared(sharing.Shared(True, 5.0))),
    "rows": (
        lambda body: extents.decode_rows(body, "GET reply"),
        lambda found: extents.encode_rows(found[0], option=found[1]),
        extents.encode_rows(EXTENTS, option=True),
    ),
    "put local": (
        sharing.decode_put_local,
        lambda found: sharing.encode_put_local(found[0], _put_body(found[1])),
        sharing.encode_put_local([4096], wire.encode_put(SPACE, 1, "os", [ROW])),
    ),
}
"""Decoder, encoder and an example of every message with a binary body."""
_NAMES = list(MESSAGES)


def message(data: bytes) -> None:
    """The first byte chooses a decoder; the rest is the body."""
    if not data:
        return
    decode, encode, _ = MESSAGES[_NAMES[data[0] % len(_NAMES)]]
    body = data[1:]
    try:
        found = decode(body)
    except ProtocolError:
        return
    again = encode(found)
    assert len(again) == len(body), "the message is written with another length"
    assert encode(decode(again)) == again, "the message changes when it is written and read"


def message_seeds() -> list[bytes]:
    return [bytes([at]) + example for at, (_, _, example) in enumerate(MESSAGES.values())]


def header(data: bytes) -> None:
    """A frame's header, as it is and with its check made right; and the text of an error."""
    program = Program(data)
    raw = program.take(wire.HEADER_BYTES)
    heads = [raw]
    if len(raw) == wire.HEADER_BYTES:
        heads.append(raw[:-4] + struct.pack("<I", wire._low32(raw[:-4])))
    for head in heads:
        try:
            found = wire.decode_header(head)
        except ProtocolError:
            continue
        assert found.body_bytes <= limits.BODY_BYTES_MAX
        assert found.payload_bytes <= limits.BATCH_BYTES_MAX
        assert head.startswith(wire.MAGIC + bytes([wire.VERSION, found.opcode]))
    try:
        told = wire.decode_error(program.rest())
    except ProtocolError:
        return
    assert isinstance(told, StoreError | ValueError)
    assert type(wire.decode_error(wire.encode_error(told))) is type(told)


def header_seeds() -> list[bytes]:
    frame = wire.encode_frame(wire.Opcode.GET, 1, b"", payload_bytes=9, deadline_ms=5, reply=True)
    return [frame + wire.encode_error(error) for error in (ProtocolError("what"), ValueError("which"))]


_control_store = [_a_store(), 0]
"""The store that control verbs run on, and how many it has run: a new one now and then, so that a finding repeats."""
_CONTROL_RUNS = 64


def control_message(data: bytes) -> None:
    """A control request, decoded and run; an answer, decoded by every reader of answers."""
    try:
        result = control.decode_result(data)
    except ProtocolError:
        result = None
    for read in (
        control.info_from_json,
        control.pin_from_json,
        control.policy_from_json,
        control.effect_from_json,
        control.sighting_from_json,
        control.space_from_json,
    ):
        try:
            control.reading("an answer", lambda read=read: read(result))  # type: ignore[misc]
        except ProtocolError:
            continue
    try:
        verb, args = control.decode_request(data)
    except ProtocolError:
        return
    if _control_store[1] >= _CONTROL_RUNS:  # type: ignore[operator]
        _control_store[:] = [_a_store(), 0]
    _control_store[1] += 1  # type: ignore[operator]
    try:
        control.encode_result(control.call(_control_store[0], verb, args, 1.0))  # type: ignore[arg-type]
    except (StoreError, ValueError):
        return


ORDER = PurgeOrder("0" * 32, (SPACE,), None, 0)


def control_seeds() -> list[bytes]:
    name = control.name_to_json(CHAIN.names[0])
    key, space = name[0], SPACE.hex()
    store = _a_store()
    policy = control.policy_to_json(store.policy())
    pin = {"space_id": space, "key": key, "owner": "o", "reason": "r", "until_s": 0}
    requests: dict[str, dict[str, Any]] = {
        "register_space": {"space": control.encode_space(a_space()).hex()},
        "scan": {"space_id": space, "cursor": "", "limit": 10},
        "delete": {"space_id": space, "keys": [key]},
        "pin": {"pins": [pin]},
        "set_policy": {"rules": policy["rules"], "text": "t", "expected_version": 1, "apply": True},
        "sweep": {"apply": False},
        "purge": {"order": order_to_json(ORDER)},
        "leftovers": {"order": order_to_json(ORDER), "until_s": 0},
        "sight": {"space_id": space, "names": [name], "blocks": True},
        "report_corrupt": {"space_id": space, "name": name},
        "stats": {},
    }
    answers = [policy, pin, control.effect_to_json(store.sweep(apply=False)), [1, 2, 3, [space]]]
    return [
        *(control.encode_request(verb, args) for verb, args in requests.items()),
        *(control.encode_result(answer) for answer in answers),
    ]


class Wire:
    """A peer that has sent everything already and reads everything at once, in the shape of a socket."""

    family = socket.AF_INET

    def __init__(self, data: bytes) -> None:
        self._data = memoryview(data)
        self.allocated_max = 0
        self.read: list[bytes] | None = None
        """What it read, where somebody wants to know."""

    def recv_into(self, view: memoryview, count: int = 0, flags: int = 0) -> int:
        self.allocated_max = max(self.allocated_max, len(view))
        part = self._data[: len(view)]
        view[: len(part)] = part
        self._data = self._data[len(part) :]
        return len(part)

    def recv(self, count: int, flags: int = 0) -> bytes:
        self.allocated_max = max(self.allocated_max, count)
        part, self._data = bytes(self._data[:count]), self._data[count:]
        return part

    def recvmsg(self, count: int, space: int = 0, flags: int = 0) -> tuple[bytes, list[Any], int, None]:
        part, self._data = bytes(self._data[:count]), self._data[count:]
        return part, [], 0, None

    def sendmsg(self, buffers: list[memoryview], ancillary: object = (), flags: int = 0) -> int:
        if self.read is not None:
            self.read += map(bytes, buffers)
        return sum(len(buffer) for buffer in buffers)

    def send(self, data: bytes, flags: int = 0) -> int:
        return self.sendmsg([memoryview(data)])

    def setsockopt(self, *_: object) -> None:
        return

    def shutdown(self, how: int) -> None:
        return

    def close(self) -> None:
        return


METRICS = ServerMetrics()
"""Of all conversations (making one takes longer than a conversation)."""
OPCODES = [opcode for opcode in wire.Opcode if opcode is not wire.Opcode.HELLO]
_HELLO = wire.encode_frame(wire.Opcode.HELLO, 1, wire.encode_hello(wire.Hello(wire.VERSION, KEY_ALGORITHM, b"", "")))


def frames_of(data: bytes) -> bytes:
    """What a client sends after HELLO: frames that are whole (header and checks are made right), or raw bytes."""
    program = Program(data)
    sent = []
    for _ in range(8):
        if program.ended:
            break
        kind = program.below(16)
        if kind == 15:
            sent.append(program.take(program.below(256)))
            continue
        opcode = OPCODES[kind % len(OPCODES)]
        payload = program.take(program.below(64))
        body = program.take(program.below(2048))
        sent.append(wire.encode_frame(opcode, 7, body, payload_bytes=len(payload), deadline_ms=1000) + payload)
    return b"".join(sent)


def conversation(data: bytes) -> None:
    """Frames of a client to a daemon's session: it answers or parts, without a fault of its own, and never makes room
    for more than a bound.
    """
    peer = Wire(_HELLO + frames_of(data))
    now_s = [0.0]
    session = Session(_a_store(), Admission(), METRICS, "node", Tokens(), lambda: now_s[0])
    connection = Connection(Channel(peer, lambda: now_s[0]), 30.0)  # type: ignore[arg-type]
    assert session.greet(connection)
    try:
        while session.step(connection, 10.0, 10.0):
            now_s[0] += 0.001
    except StoreError:
        pass
    connection.close()
    faults = METRICS.registry.get_sample_value("reprise_store_errors_total", {"error": "InternalError"})
    assert not faults, "the daemon met a fault of its own"
    assert peer.allocated_max <= limits.BODY_BYTES_MAX


def conversation_seeds() -> list[bytes]:
    key = wire.encode_get(SPACE, CHAIN.names[:1], [8])
    put = wire.encode_put(SPACE, 1, "os", [wire.PutRow(CHAIN.names[0], 4, 8, 0, xxhash.xxh3_64_intdigest(b"8 bytes!"))])
    state = wire.encode_state(SPACE, CHAIN.state_name(6), flags=0, checksum=xxhash.xxh3_64_intdigest(b"8 bytes!"))
    frames = {
        wire.Opcode.LOOKUP: (b"", wire.encode_lookup(SPACE, CHAIN.names, states=True)),
        wire.Opcode.GET: (b"", key),
        wire.Opcode.PUT: (b"8 bytes!", put),
        wire.Opcode.TOUCH: (b"", wire.encode_touch(SPACE, 1, CHAIN.names)),
        wire.Opcode.PUT_STATE: (b"8 bytes!", state),
        wire.Opcode.GET_STATE: (b"", wire.encode_state(SPACE, CHAIN.state_name(5))),
        wire.Opcode.CONTROL: (b"", control.encode_request("stats", {})),
        wire.Opcode.SHARE: (b"\0", sharing.encode_share(4096)),
        wire.Opcode.EXTENTS: (b"", key),
        wire.Opcode.RELEASE: (b"", b""),
        wire.Opcode.CONFIRM: (b"", wire.encode_confirm(SPACE, [CHAIN.names[0].key])),
        wire.Opcode.PUT_LOCAL: (b"", sharing.encode_put_local([0], put)),
    }

    def one(opcode: wire.Opcode) -> bytes:
        payload, body = frames[opcode]
        kind = OPCODES.index(opcode)
        return bytes([kind, len(payload)]) + payload + struct.pack("<H", len(body)) + body

    singles = [one(opcode) for opcode in frames]
    return [*singles, one(wire.Opcode.PUT) + one(wire.Opcode.GET) + one(wire.Opcode.CONTROL), bytes([15, 40]) + _HELLO]
