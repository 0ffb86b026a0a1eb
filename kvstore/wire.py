"""The messages of the store's binary protocol: pure encoding and decoding of frames.

Owns every byte between a client and a daemon (``kvstore/FORMAT.md`` shows the tables). Does not know sockets, and never
looks into a payload: a frame's header says how many payload bytes follow its body. Invariants: little-endian; every
length is checked against ``limits`` before anything is allocated; a decoder given arbitrary bytes returns a message or
raises ``ProtocolError``; names travel as packed arrays, not as objects.

    frame  = header (40 bytes) | body | payload
    header = magic "RPKV" | version u8 | opcode u8 | flags u16 | request id u32 | deadline u32 ms | body bytes u32
             | payload bytes u64 | xxh3_64 of the body u64 | low 32 bits of xxh3_64 of the 36 bytes before u32
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Literal, NamedTuple, overload

import numpy as np
import xxhash

from kvstore import limits
from kvstore.access import TOKEN_BYTES_MAX
from kvstore.errors import InternalError, Overloaded, ProtocolError, StoreError, VersionMismatch, from_code
from kvstore.keys import BlockKey, BlockName, ChainNames, SpaceId, StateKey, StateName, TokenDigest
from kvstore.store import AckLevel, Lookup, Presence, PutOutcome, StateEntry

MAGIC = b"RPKV"
VERSION = 4
FLAG_REPLY = 0x0001
HEADER_BYTES = 40
HELLO_BODY_BYTES_MAX = 8 * limits.KIB
ERROR_MESSAGE_BYTES_MAX = 2 * limits.KIB
CONTROL_REPLY_BYTES_MAX = 64 * limits.MIB
"""JSON of one control answer; a daemon refuses to send more."""

CODE_INVALID = 0
"""Error code of a caller's mistake: the client raises it as ValueError."""

_HEADER = struct.Struct("<4sBBHIIIQQ")
_CHECK = struct.Struct("<I")
_HELLO = struct.Struct("<HHHH")
_WELCOME = struct.Struct("<HHH")
_LOOKUP = struct.Struct("<32sBxxxI")
_LOOKUP_REPLY = struct.Struct("<IHBxd")
_STATE_ENTRY = struct.Struct("<32siIIBxxx")
_GET = struct.Struct("<32sI")
_GET_ONE = struct.Struct("<32sI32s16sI")
_PUT = struct.Struct("<32sBBxxI")
_PUT_ROW = struct.Struct("<32s32s16sQIIIBxxx")
_TOUCH = struct.Struct("<32sBxxxI")
_COUNT = struct.Struct("<I")
_STATE = struct.Struct("<32s32s32sQIBxxxQ")
_STATE_REPLY = struct.Struct("<BBxxxxxxQ")
_ERROR = struct.Struct("<HHd")

_PRESENCE_MAX = max(Presence)
_ZERO_KEY = BlockKey(bytes(limits.KEY_BYTES))


class Opcode(IntEnum):
    """What a frame asks; the answer carries the same opcode, or ERROR."""

    HELLO = 1
    LOOKUP = 2
    GET = 3
    PUT = 4
    TOUCH = 5
    PUT_STATE = 6
    GET_STATE = 7
    CONTROL = 8
    SHARE = 9
    EXTENTS = 10
    RELEASE = 11
    PUT_LOCAL = 12
    CONFIRM = 13
    ERROR = 255


_OPCODES = {int(opcode): opcode for opcode in Opcode}
"""By number: a third of what it takes to call the enumeration."""


# --- frames ---------------------------------------------------------------------------------------------------------


class Header(NamedTuple):
    """The checked header of one frame. (A frozen dataclass takes four times as long to make.)"""

    opcode: Opcode
    reply: bool
    request_id: int
    deadline_ms: int
    body_bytes: int
    payload_bytes: int
    body_check: int


def encode_frame(
    opcode: Opcode, request_id: int, body: bytes, *, payload_bytes: int = 0, deadline_ms: int = 0, reply: bool = False
) -> bytes:
    """Header and body of a frame; the payload is sent behind it by the caller."""
    if len(body) > limits.BODY_BYTES_MAX:
        raise ValueError(f"a frame's body has at most {limits.BODY_BYTES_MAX} bytes, not {len(body)}: split the batch")
    if payload_bytes > limits.BATCH_BYTES_MAX:
        raise ValueError(f"a frame's payload has at most {limits.BATCH_BYTES_MAX} bytes, not {payload_bytes}")
    head = _HEADER.pack(
        MAGIC,
        VERSION,
        opcode,
        FLAG_REPLY if reply else 0,
        request_id,
        min(deadline_ms, 2**32 - 1),
        len(body),
        payload_bytes,
        xxhash.xxh3_64_intdigest(body),
    )
    return head + _CHECK.pack(_low32(head)) + body


def decode_header(data: bytes | bytearray | memoryview) -> Header:
    """Check and take apart 40 bytes. Raises ProtocolError, or VersionMismatch for another protocol version."""
    if len(data) != HEADER_BYTES:
        raise ProtocolError(f"a frame header has {HEADER_BYTES} bytes, not {len(data)}")
    head = bytes(data)
    magic, version, opcode, flags, request_id, deadline_ms, body_bytes, payload_bytes, body_check = _HEADER.unpack_from(
        head
    )
    if magic != MAGIC:
        raise ProtocolError("the peer does not speak the store's protocol (wrong magic): is the address right?")
    if version != VERSION:
        raise VersionMismatch(f"the peer speaks protocol version {version}, this side {VERSION}: upgrade the older one")
    if _CHECK.unpack_from(head, _HEADER.size)[0] != _low32(head[: _HEADER.size]):
        raise ProtocolError("a frame header is damaged (check failed)")
    known = _OPCODES.get(opcode)
    if known is None:
        raise ProtocolError(f"unknown opcode {opcode}")
    if flags & ~FLAG_REPLY:
        raise ProtocolError(f"unknown frame flags {flags:#x}")
    if body_bytes > limits.BODY_BYTES_MAX:
        raise ProtocolError(
            f"a frame announces a body of {body_bytes} bytes; at most {limits.BODY_BYTES_MAX} are taken"
        )
    if payload_bytes > limits.BATCH_BYTES_MAX:
        raise ProtocolError(
            f"a frame announces {payload_bytes} payload bytes; at most {limits.BATCH_BYTES_MAX} are taken"
        )
    return Header(known, bool(flags & FLAG_REPLY), request_id, deadline_ms, body_bytes, payload_bytes, body_check)


def check_body(header: Header, body: bytes) -> None:
    """Raises ProtocolError if the body is not the one that the header announced."""
    if len(body) != header.body_bytes or xxhash.xxh3_64_intdigest(body) != header.body_check:
        raise ProtocolError("a frame body is damaged (check failed)")


def _low32(head: bytes) -> int:
    return xxhash.xxh3_64_intdigest(head) & 0xFFFFFFFF


# --- packed names ---------------------------------------------------------------------------------------------------


class PackedNames(Sequence[BlockName]):
    """Names as two byte strings; a ``BlockName`` is made only when one is asked for.

    Carries what a store needs to answer (key and token digest); parent, route and index are not those of the asker.
    """

    __slots__ = ("keys", "token_digests")

    def __init__(self, keys: bytes, token_digests: bytes) -> None:
        self.keys = keys
        self.token_digests = token_digests

    @classmethod
    def pack(cls, names: Sequence[BlockName]) -> PackedNames:
        if isinstance(names, PackedNames):
            return names
        if isinstance(names, ChainNames):
            return cls(names.keys, names.token_digests)
        return cls(b"".join([name.key for name in names]), b"".join([name.token_digest for name in names]))

    def take(self, positions: Sequence[int]) -> PackedNames:
        """Those at some positions, in that order."""
        if positions == range(len(self)):
            return self
        at = np.asarray(positions, np.intp)
        keys = np.frombuffer(self.keys, f"V{limits.KEY_BYTES}")[at]
        digests = np.frombuffer(self.token_digests, f"V{limits.TOKEN_DIGEST_BYTES}")[at]
        return PackedNames(keys.tobytes(), digests.tobytes())

    def __len__(self) -> int:
        return len(self.keys) // limits.KEY_BYTES

    @overload
    def __getitem__(self, at: int) -> BlockName: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[BlockName]: ...
    def __getitem__(self, at: int | slice) -> BlockName | Sequence[BlockName]:
        if isinstance(at, slice):
            return [self[index] for index in range(*at.indices(len(self)))]
        index = at + len(self) if at < 0 else at
        if not 0 <= index < len(self):
            raise IndexError(f"name {at} of {len(self)}")
        key = BlockKey(self.keys[index * limits.KEY_BYTES : (index + 1) * limits.KEY_BYTES])
        begin = index * limits.TOKEN_DIGEST_BYTES
        return BlockName(
            key, _ZERO_KEY, TokenDigest(self.token_digests[begin : begin + limits.TOKEN_DIGEST_BYTES]), key, 0
        )

    def __iter__(self) -> Iterator[BlockName]:
        return (self[index] for index in range(len(self)))


# --- hello ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Hello:
    """The first frame of a connection. ``token`` is a secret: never printed."""

    protocol: int
    key_algorithm: str
    token: bytes
    tenant: str

    def __repr__(self) -> str:
        return f"Hello(protocol={self.protocol}, key_algorithm={self.key_algorithm!r})"


@dataclass(frozen=True, slots=True)
class Welcome:
    """The daemon's answer to HELLO."""

    protocol: int
    key_algorithm: str
    server: str


def encode_hello(hello: Hello) -> bytes:
    algorithm, tenant = hello.key_algorithm.encode(), hello.tenant.encode()
    if len(hello.token) > TOKEN_BYTES_MAX or len(tenant) > limits.NAME_BYTES_MAX:
        raise ValueError(f"a token has at most {TOKEN_BYTES_MAX} bytes and a tenant {limits.NAME_BYTES_MAX}")
    return b"".join(
        (_HELLO.pack(hello.protocol, len(algorithm), len(hello.token), len(tenant)), algorithm, hello.token, tenant)
    )


def decode_hello(body: bytes) -> Hello:
    reader = Reader(body, "HELLO")
    protocol, algorithm_bytes, token_bytes, tenant_bytes = reader.unpack(_HELLO)
    if token_bytes > TOKEN_BYTES_MAX or max(algorithm_bytes, tenant_bytes) > limits.NAME_BYTES_MAX:
        raise ProtocolError("HELLO carries a name or token beyond its bound")
    hello = Hello(protocol, reader.text(algorithm_bytes), reader.take(token_bytes), reader.text(tenant_bytes))
    reader.end()
    return hello


def encode_welcome(welcome: Welcome) -> bytes:
    algorithm, server = welcome.key_algorithm.encode(), welcome.server.encode()
    return _WELCOME.pack(welcome.protocol, len(algorithm), len(server)) + algorithm + server


def decode_welcome(body: bytes) -> Welcome:
    reader = Reader(body, "HELLO reply")
    protocol, algorithm_bytes, server_bytes = reader.unpack(_WELCOME)
    welcome = Welcome(protocol, reader.text(algorithm_bytes), reader.text(server_bytes))
    reader.end()
    return welcome


# --- lookup ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LookupRequest:
    space_id: SpaceId
    names: PackedNames
    states: bool


def encode_lookup(space_id: SpaceId, names: Sequence[BlockName], *, states: bool) -> bytes:
    packed = PackedNames.pack(names)
    return _LOOKUP.pack(space_id, states, len(packed)) + packed.keys + packed.token_digests


def decode_lookup(body: bytes) -> LookupRequest:
    reader = Reader(body, "LOOKUP")
    space_id, states, count = reader.unpack(_LOOKUP)
    if states > 1:
        raise ProtocolError("LOOKUP carries an unknown option")
    names = reader.names(count, limits.LOOKUP_KEYS_MAX)
    reader.end()
    return LookupRequest(SpaceId(space_id), names, bool(states))


def encode_lookup_reply(answer: Lookup, load_s_estimate: float | None = None) -> bytes:
    """``load_s_estimate``: instead of the answer's own."""
    load_s = answer.load_s_estimate if load_s_estimate is None else load_s_estimate
    states = answer.states[: limits.STATES_PER_LOOKUP_MAX]
    return b"".join(
        (
            _LOOKUP_REPLY.pack(len(answer.presence), len(states), answer.complete, load_s),
            answer.presence.astype(np.uint8, copy=False).tobytes(),
            answer.flags.astype(np.uint8, copy=False).tobytes(),
            answer.payload_bytes.astype("<u4", copy=False).tobytes(),
            *(
                _STATE_ENTRY.pack(item.key, item.block_index, item.tail_tokens, item.payload_bytes, item.flags)
                for item in states
            ),
        )
    )


def lookup_reply_bytes(count: int) -> int:
    """Length of an answer about so many keys, if no state comes with it."""
    return _LOOKUP_REPLY.size + 6 * count


def decode_lookup_reply(body: bytes) -> Lookup:
    reader = Reader(body, "LOOKUP reply")
    count, state_count, complete, load_s_estimate = reader.unpack(_LOOKUP_REPLY)
    if count > limits.LOOKUP_KEYS_MAX or state_count > limits.STATES_PER_LOOKUP_MAX or complete > 1:
        raise ProtocolError("LOOKUP reply carries a count beyond its bound")
    presence = np.frombuffer(reader.take(count), np.uint8)
    flags = np.frombuffer(reader.take(count), np.uint8)
    payload_bytes = np.frombuffer(reader.take(4 * count), "<u4")
    if count and int(presence.max()) > _PRESENCE_MAX:
        raise ProtocolError(f"LOOKUP reply carries an unknown presence {int(presence.max())}")
    states = []
    for _ in range(state_count):
        key, block_index, tail_tokens, size, state_flags = reader.unpack(_STATE_ENTRY)
        if not -1 <= block_index < count:
            raise ProtocolError("LOOKUP reply carries a state under a block that was not asked")
        states.append(StateEntry(StateKey(key), block_index, tail_tokens, size, state_flags))
    reader.end()
    if not 0.0 <= load_s_estimate < float("inf"):
        raise ProtocolError("LOOKUP reply carries an impossible load time")
    return Lookup(presence, flags, payload_bytes, tuple(states), bool(complete), load_s_estimate)


# --- get ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class GetRequest:
    """``wanted_bytes``: the length of the asker's buffer, block by block."""

    space_id: SpaceId
    names: PackedNames
    wanted_bytes: tuple[int, ...]


def encode_get(space_id: SpaceId, names: Sequence[BlockName], wanted_bytes: Sequence[int]) -> bytes:
    packed = PackedNames.pack(names)
    if not len(packed) == len(wanted_bytes) <= limits.BATCH_BLOCKS_MAX:
        raise ValueError(f"a get has at most {limits.BATCH_BLOCKS_MAX} blocks, each with a length")
    sizes = struct.pack(f"<{len(packed)}I", *wanted_bytes)
    return _GET.pack(space_id, len(packed)) + packed.keys + packed.token_digests + sizes


def decode_get(body: bytes) -> GetRequest:
    if len(body) == _GET_ONE.size:
        space_id, count, key, token_digest, payload_bytes = _GET_ONE.unpack(body)
        if count == 1 and payload_bytes <= limits.BATCH_BYTES_MAX:
            return GetRequest(SpaceId(space_id), PackedNames(key, token_digest), (payload_bytes,))
    reader = Reader(body, "GET")
    space_id, count = reader.unpack(_GET)
    names = reader.names(count, limits.BATCH_BLOCKS_MAX)
    wanted = struct.unpack(f"<{count}I", reader.take(4 * count))
    reader.end()
    if sum(wanted) > limits.BATCH_BYTES_MAX:
        raise ProtocolError(f"GET asks for more than {limits.BATCH_BYTES_MAX} bytes in one frame")
    return GetRequest(SpaceId(space_id), names, wanted)


# --- put and touch --------------------------------------------------------------------------------------------------


PutAck = AckLevel | Literal["begun"]
"""``begun``: as ``os``, but the device is at work already, because a CONFIRM follows, which makes it ``disk``."""
PUT_ACKS: tuple[PutAck, ...] = ("os", "disk", "begun")
"""By their number in PUT."""


@dataclass(frozen=True, slots=True)
class PutRow:
    """One block of a put; its payload follows in the frame, in order. ``checksum``: xxh3_64 when it was submitted."""

    name: BlockName
    tokens: int
    payload_bytes: int
    flags: int
    checksum: int


PUT_ROW = np.dtype(
    [
        ("key", "<u8", (4,)),
        ("parent", "<u8", (4,)),
        ("digest", "<u8", (2,)),
        ("checksum", "<u8"),
        ("index", "<u4"),
        ("tokens", "<u4"),
        ("payload_bytes", "<u4"),
        ("flags", "u1"),
        ("zero", "u1", (3,)),
    ]
)
assert PUT_ROW.itemsize == _PUT_ROW.size


class PutRows(Sequence[PutRow]):
    """The rows of a put as they came: columns for whoever stores them, objects only for whoever asks for one."""

    __slots__ = ("columns", "packed")

    def __init__(self, packed: bytes) -> None:
        self.packed = packed
        self.columns = np.frombuffer(packed, PUT_ROW)

    def __len__(self) -> int:
        return len(self.columns)

    @overload
    def __getitem__(self, at: int) -> PutRow: ...
    @overload
    def __getitem__(self, at: slice) -> PutRows: ...
    def __getitem__(self, at: int | slice) -> PutRow | PutRows:
        if isinstance(at, slice):
            begin, end, step = at.indices(len(self))
            assert step == 1
            return PutRows(self.packed[_PUT_ROW.size * begin : _PUT_ROW.size * end])
        begin = range(len(self))[at] * _PUT_ROW.size
        key, parent, token_digest, checksum, index, tokens, size, flags = _PUT_ROW.unpack_from(self.packed, begin)
        name = BlockName(BlockKey(key), BlockKey(parent), TokenDigest(token_digest), BlockKey(key), index)
        return PutRow(name, tokens, size, flags, checksum)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PutRows) and self.packed == other.packed

    def __hash__(self) -> int:
        return hash(self.packed)

    def keys(self) -> list[BlockKey]:
        begins = range(0, len(self.packed), _PUT_ROW.size)
        return [BlockKey(self.packed[begin : begin + limits.KEY_BYTES]) for begin in begins]

    def sizes(self) -> list[int]:
        """Payload bytes of each block."""
        sizes: list[int] = self.columns["payload_bytes"].tolist()
        return sizes

    def checksums(self) -> list[int]:
        checksums: list[int] = self.columns["checksum"].tolist()
        return checksums


@dataclass(frozen=True, slots=True)
class PutRequest:
    space_id: SpaceId
    traffic_class: int
    ack: PutAck
    rows: PutRows


def encode_put(space_id: SpaceId, traffic_class: int, ack: PutAck, rows: Sequence[PutRow]) -> bytes:
    if len(rows) > limits.BATCH_BLOCKS_MAX:
        raise ValueError(f"a put has at most {limits.BATCH_BLOCKS_MAX} blocks")
    packed = (
        _PUT_ROW.pack(
            row.name.key,
            row.name.parent,
            row.name.token_digest,
            row.checksum,
            row.name.index,
            row.tokens,
            row.payload_bytes,
            row.flags,
        )
        for row in rows
    )
    return _PUT.pack(space_id, traffic_class, PUT_ACKS.index(ack), len(rows)) + b"".join(packed)


def decode_put(body: bytes) -> PutRequest:
    reader = Reader(body, "PUT")
    space_id, traffic_class, ack, count = reader.unpack(_PUT)
    if count > limits.BATCH_BLOCKS_MAX or ack >= len(PUT_ACKS) or traffic_class == 0:
        raise ProtocolError("PUT carries a count, class or acknowledgement level out of bounds")
    rows = PutRows(reader.take(_PUT_ROW.size * count))
    reader.end()
    sizes, tokens = rows.sizes(), rows.columns["tokens"].tolist()
    if count and not (
        1 <= min(sizes) <= max(sizes) <= limits.PAYLOAD_BYTES_MAX
        and 1 <= min(tokens) <= max(tokens) <= limits.BLOCK_TOKENS_MAX
    ):
        raise ProtocolError("PUT carries a block whose length or token count is out of bounds")
    return PutRequest(SpaceId(space_id), traffic_class, PUT_ACKS[ack], rows)


def encode_put_reply(outcomes: Sequence[PutOutcome]) -> bytes:
    return _COUNT.pack(len(outcomes)) + bytes(outcomes)


def decode_put_reply(body: bytes) -> list[PutOutcome]:
    reader = Reader(body, "PUT reply")
    (count,) = reader.unpack(_COUNT)
    if count > limits.BATCH_BLOCKS_MAX:
        raise ProtocolError("PUT reply carries a count beyond its bound")
    codes = reader.take(count)
    reader.end()
    if count and max(codes) > max(PutOutcome):
        raise ProtocolError(f"PUT reply carries an unknown outcome {max(codes)}")
    return [PutOutcome(code) for code in codes]


def encode_confirm(space_id: SpaceId, keys: Sequence[BlockKey]) -> bytes:
    if len(keys) > limits.LOOKUP_KEYS_MAX:
        raise ValueError(f"a confirmation has at most {limits.LOOKUP_KEYS_MAX} keys, not {len(keys)}")
    return _GET.pack(space_id, len(keys)) + b"".join(keys)


def decode_confirm(body: bytes) -> tuple[SpaceId, list[BlockKey]]:
    reader = Reader(body, "CONFIRM")
    space_id, count = reader.unpack(_GET)
    if count > limits.LOOKUP_KEYS_MAX:
        raise ProtocolError("CONFIRM carries a count beyond its bound")
    data = reader.take(limits.KEY_BYTES * count)
    reader.end()
    begins = range(0, len(data), limits.KEY_BYTES)
    return SpaceId(space_id), [BlockKey(data[at : at + limits.KEY_BYTES]) for at in begins]


def encode_confirm_reply(kept: Sequence[bool]) -> bytes:
    return _COUNT.pack(len(kept)) + bytes(kept)


def decode_confirm_reply(body: bytes) -> list[bool]:
    reader = Reader(body, "CONFIRM reply")
    (count,) = reader.unpack(_COUNT)
    if count > limits.LOOKUP_KEYS_MAX:
        raise ProtocolError("CONFIRM reply carries a count beyond its bound")
    kept = reader.take(count)
    reader.end()
    if count and max(kept) > 1:
        raise ProtocolError("CONFIRM reply carries what is neither yes nor no")
    return [bool(each) for each in kept]


@dataclass(frozen=True, slots=True)
class TouchRequest:
    space_id: SpaceId
    traffic_class: int
    names: PackedNames


def encode_touch(space_id: SpaceId, traffic_class: int, names: Sequence[BlockName]) -> bytes:
    packed = PackedNames.pack(names)
    return _TOUCH.pack(space_id, traffic_class, len(packed)) + packed.keys + packed.token_digests


def decode_touch(body: bytes) -> TouchRequest:
    reader = Reader(body, "TOUCH")
    space_id, traffic_class, count = reader.unpack(_TOUCH)
    if traffic_class == 0:
        raise ProtocolError("TOUCH carries no traffic class")
    names = reader.names(count, limits.LOOKUP_KEYS_MAX)
    reader.end()
    return TouchRequest(SpaceId(space_id), traffic_class, names)


def encode_count(count: int) -> bytes:
    return _COUNT.pack(count)


def decode_count(body: bytes) -> int:
    reader = Reader(body, "count")
    (count,) = reader.unpack(_COUNT)
    reader.end()
    return int(count)


# --- states ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StateRequest:
    """PUT_STATE (with flags and checksum; the payload follows) or GET_STATE (both zero)."""

    space_id: SpaceId
    name: StateName
    flags: int
    checksum: int


def encode_state(space_id: SpaceId, name: StateName, *, flags: int = 0, checksum: int = 0) -> bytes:
    return _STATE.pack(space_id, name.key, name.parent, name.position, name.tail_tokens, flags, checksum)


def decode_state(body: bytes) -> StateRequest:
    reader = Reader(body, "STATE")
    space_id, key, parent, position, tail_tokens, flags, checksum = reader.unpack(_STATE)
    reader.end()
    if tail_tokens >= limits.BLOCK_TOKENS_MAX or tail_tokens > position:
        raise ProtocolError("a state's tail is longer than a block or than the state itself")
    name = StateName(StateKey(key), BlockKey(parent), BlockKey(parent), position, tail_tokens)
    return StateRequest(SpaceId(space_id), name, flags, checksum)


def encode_state_reply(*, found: bool, flags: int = 0, checksum: int = 0) -> bytes:
    """Answer to both: ``found`` says of a put that it was kept."""
    return _STATE_REPLY.pack(found, flags, checksum)


def decode_state_reply(body: bytes) -> tuple[bool, int, int]:
    reader = Reader(body, "STATE reply")
    found, flags, checksum = reader.unpack(_STATE_REPLY)
    reader.end()
    if found > 1:
        raise ProtocolError("STATE reply carries an unknown answer")
    return bool(found), flags, checksum


# --- errors ---------------------------------------------------------------------------------------------------------


def encode_error(error: StoreError | ValueError) -> bytes:
    """What a peer is told of an error: its code, when to retry, one line of text."""
    code = error.code if isinstance(error, StoreError) else CODE_INVALID
    retry_after_s = error.retry_after_s if isinstance(error, Overloaded) else 0.0
    message = str(error).encode(errors="replace")[:ERROR_MESSAGE_BYTES_MAX]
    return _ERROR.pack(code, len(message), retry_after_s) + message


def decode_error(body: bytes) -> StoreError | ValueError:
    """The error that the peer sent, to be raised. Raises ProtocolError if it cannot be read."""
    reader = Reader(body, "ERROR")
    code, message_bytes, retry_after_s = reader.unpack(_ERROR)
    if message_bytes > ERROR_MESSAGE_BYTES_MAX:
        raise ProtocolError("ERROR carries a message beyond its bound")
    message = reader.take(message_bytes).decode(errors="replace")
    reader.end()
    if not 0.0 <= retry_after_s <= limits.DEADLINE_S_MAX:
        raise ProtocolError("ERROR carries an impossible time to retry after")
    return ValueError(message) if code == CODE_INVALID else from_code(code, message, retry_after_s)


def internal_error() -> InternalError:
    """What a peer is told of a fault: never its details."""
    return InternalError("the daemon met an internal fault; its log has the details")


class Reader:
    """A cursor over one body; whatever does not fit is a ProtocolError that names the message."""

    __slots__ = ("_at", "_body", "_what")

    def __init__(self, body: bytes, what: str) -> None:
        self._body = body
        self._at = 0
        self._what = what

    def take(self, count: int) -> bytes:
        part = self._body[self._at : self._at + count]
        if len(part) != count:
            raise ProtocolError(f"{self._what} ends early")
        self._at += count
        return part

    def unpack(self, layout: struct.Struct) -> tuple[Any, ...]:
        return layout.unpack(self.take(layout.size))

    def rows(self, layout: struct.Struct, count: int) -> Iterator[tuple[Any, ...]]:
        return layout.iter_unpack(self.take(layout.size * count))

    def text(self, count: int) -> str:
        try:
            return self.take(count).decode()
        except UnicodeDecodeError as error:
            raise ProtocolError(f"{self._what} carries text that is not UTF-8") from error

    def names(self, count: int, count_max: int) -> PackedNames:
        if count > count_max:
            raise ProtocolError(f"{self._what} carries {count} keys; at most {count_max} are taken")
        return PackedNames(self.take(limits.KEY_BYTES * count), self.take(limits.TOKEN_DIGEST_BYTES * count))

    def rest(self) -> bytes:
        """All that is left."""
        return self.take(len(self._body) - self._at)

    def end(self) -> None:
        if self._at != len(self._body):
            raise ProtocolError(f"{self._what} has {len(self._body) - self._at} bytes left over")
