"""Identity: a space, its id, and the chained keys of a token prefix.

Owns the canonical encoding of ``Space`` and the hashing of token blocks. Does not know about stores, tensors or
policies. Invariants: equal keys mean equal token prefixes in equal spaces; absent and empty fields encode differently;
nothing here depends on the process, its hash seed, or a dict's order. Golden vectors in ``tests/golden`` pin the bytes.

    space id  = BLAKE3-derive-key("reprise-kv 2026 space id", canonical encoding)
    key[0]    = BLAKE3-keyed(BLOCK, space id | block 0)      block i = counts, token ids as u32 LE, attachments
    key[i]    = BLAKE3-keyed(BLOCK, key[i-1] | block i)
    digest[i] = BLAKE3-keyed(TOKENS, digest[i-1] | block i)[:16], rooted in zeros: the same prefix in any space
    state key = BLAKE3-keyed(STATE, parent key | tail token ids)
    opaque    = BLAKE3-keyed(OPAQUE, space id | length u32 LE | an engine's own key); its digest: of that key alone
"""

from __future__ import annotations

import struct
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from operator import index as as_integer
from types import UnionType
from typing import NewType, overload

import numpy as np
from blake3 import blake3

from kvstore.limits import (
    BLOCK_TOKENS_MAX,
    BLOCK_TOKENS_MIN,
    KEY_BYTES,
    NAME_BYTES_MAX,
    SPACE_BYTES_MAX,
    SPACE_DIGEST_BYTES_MAX,
    SPACE_LAYERS_MAX,
    STRIPE_BLOCKS,
    TOKEN_DIGEST_BYTES,
    TOKEN_ID_MAX,
)

SpaceId = NewType("SpaceId", bytes)
BlockKey = NewType("BlockKey", bytes)
StateKey = NewType("StateKey", bytes)
TokenDigest = NewType("TokenDigest", bytes)

KEY_ALGORITHM = "blake3-chain-1"
"""Named in HELLO and in the space: a peer with another algorithm is refused, never silently missed."""
OPAQUE_ALGORITHM = "blake3-opaque-1"
"""Of a space whose blocks have an engine's own hashes for names (``opaque_name``): no token ids lead to them."""

SPACE_CONTEXT = "reprise-kv 2026 space id"
_BLOCK = blake3(b"", derive_key_context="reprise-kv 2026 block key").digest()
_TOKENS = blake3(b"", derive_key_context="reprise-kv 2026 token digest").digest()
_STATE = blake3(b"", derive_key_context="reprise-kv 2026 state key").digest()
_OPAQUE = blake3(b"", derive_key_context="reprise-kv 2026 opaque block key").digest()
_OPAQUE_DIGEST = blake3(b"", derive_key_context="reprise-kv 2026 opaque block digest").digest()
_SALT_CONTEXT = "reprise-kv 2026 tenant salt"
_ROOT_DIGEST = bytes(TOKEN_DIGEST_BYTES)

SPACE_VERSION = 1


@dataclass(frozen=True, slots=True)
class AttentionGroup:
    """Layers whose KV has one shape and one reach. ``window`` is 0 for global attention, else tokens."""

    window: int
    layers: tuple[int, ...]
    kv_heads: int
    head_dim: int

    def __post_init__(self) -> None:
        _check_integers(self, "window", "kv_heads", "head_dim")
        if self.kv_heads < 1 or self.head_dim < 1:
            raise ValueError(f"attention group has window {self.window}, heads {self.kv_heads}, dim {self.head_dim}")
        if not isinstance(self.layers, tuple) or not all(_is_u32(layer) for layer in self.layers):
            raise ValueError("the layers of an attention group are a tuple of numbers 0..2^32-1")
        if not 1 <= len(self.layers) <= SPACE_LAYERS_MAX or list(self.layers) != sorted(set(self.layers)):
            raise ValueError(f"an attention group lists 1..{SPACE_LAYERS_MAX} layers, ascending and once each")


@dataclass(frozen=True, slots=True)
class ShardCoordinate:
    """Which part of the model's KV one worker holds: rank and size, tensor- and pipeline-parallel."""

    tensor_rank: int = 0
    tensor_size: int = 1
    pipeline_rank: int = 0
    pipeline_size: int = 1

    def __post_init__(self) -> None:
        _check_integers(self, "tensor_rank", "tensor_size", "pipeline_rank", "pipeline_size")
        if not (0 <= self.tensor_rank < self.tensor_size and 0 <= self.pipeline_rank < self.pipeline_size):
            raise ValueError(f"shard coordinate {self} has a rank outside its size")


@dataclass(frozen=True, slots=True)
class Space:
    """Everything that makes KV bytes interchangeable. Two spaces that differ in any field never share a block.

    ``None`` and an empty value are different. ``epoch`` is the operator's lever: raising it leaves every stored block
    of a model behind at once (weights swapped under one name, say).
    """

    model: str
    weights_digest: bytes
    kv_dtype: str
    layout: str
    block_tokens: int
    groups: tuple[AttentionGroup, ...]
    revision: str | None = None
    kv_scale_format: str | None = None
    shard: ShardCoordinate = field(default_factory=ShardCoordinate)
    adapter_digest: bytes | None = None
    tenant_salt: bytes | None = None
    epoch: int = 0
    key_algorithm: str = KEY_ALGORITHM

    def __post_init__(self) -> None:
        _check_integers(self, "block_tokens", "epoch")
        if not BLOCK_TOKENS_MIN <= self.block_tokens <= BLOCK_TOKENS_MAX:
            raise ValueError(f"block_tokens {self.block_tokens} is outside {BLOCK_TOKENS_MIN}..{BLOCK_TOKENS_MAX}")
        _check_kinds(self, str, "model", "kv_dtype", "layout", "key_algorithm")
        _check_kinds(self, str | None, "revision", "kv_scale_format")
        _check_kinds(self, bytes, "weights_digest")
        _check_kinds(self, bytes | None, "adapter_digest", "tenant_salt")
        _check_kinds(self, ShardCoordinate, "shard")
        if not self.weights_digest:
            raise ValueError("weights_digest is empty: new weights under an old name would be served old KV")
        for name in ("weights_digest", "adapter_digest", "tenant_salt"):
            if len(getattr(self, name) or b"") > SPACE_DIGEST_BYTES_MAX:
                raise ValueError(f"{name} of a space has at most {SPACE_DIGEST_BYTES_MAX} bytes")
        if not isinstance(self.groups, tuple) or not all(isinstance(group, AttentionGroup) for group in self.groups):
            raise ValueError("the groups of a space are a tuple of AttentionGroup")
        if not self.groups:
            raise ValueError("a space has at least one attention group")
        if len(encode_space(self)) > SPACE_BYTES_MAX:
            raise ValueError(f"the space encodes to more than {SPACE_BYTES_MAX} bytes")

    @property
    def is_opaque(self) -> bool:
        """Whether an engine names the blocks here, so that token ids do not."""
        return self.key_algorithm == OPAQUE_ALGORITHM


def encode_space(space: Space) -> bytes:
    """Canonical bytes of a space: a version byte, then every field by name, length-prefixed, in declaration order."""
    parts = [bytes([SPACE_VERSION])]
    for item in fields(space):
        parts.append(_chunk(item.name.encode()))
        parts.append(_encode_value(getattr(space, item.name)))
    return b"".join(parts)


def decode_space(data: bytes) -> Space:
    """Inverse of ``encode_space``. Raises ValueError on anything that it would not have written."""
    if len(data) > SPACE_BYTES_MAX:
        raise ValueError(f"an encoded space has at most {SPACE_BYTES_MAX} bytes, not {len(data)}")
    reader = _Reader(data)
    if reader.take(1) != bytes([SPACE_VERSION]):
        raise ValueError("the space is encoded in another version")
    values: dict[str, object] = {}
    for item in fields(Space):
        if reader.chunk() != item.name.encode():
            raise ValueError(f"the encoded space lacks the field {item.name!r} at its place")
        values[item.name] = _decode_value(reader)
    if reader.rest():
        raise ValueError("the encoded space has bytes left over")
    space = Space(**values)  # type: ignore[arg-type]  # its constructor checks every field's type
    if encode_space(space) != data:
        raise ValueError("the encoded space is not canonical")
    return space


def space_id(space: Space) -> SpaceId:
    """32 bytes that name the space."""
    return SpaceId(blake3(encode_space(space), derive_key_context=SPACE_CONTEXT).digest())


def differing_fields(one: Space, other: Space) -> tuple[str, ...]:
    """Names of the fields in which two spaces differ, in declaration order."""
    return tuple(item.name for item in fields(Space) if getattr(one, item.name) != getattr(other, item.name))


def tenant_salt(tenant: str) -> bytes:
    """The salt of a tenant's spaces: 32 bytes from its name. No tenant at all is ``None``, which no name maps to."""
    name = tenant.encode()
    if len(name) > NAME_BYTES_MAX:
        raise ValueError(f"a tenant's name has at most {NAME_BYTES_MAX} bytes, not {len(name)}")
    return blake3(name, derive_key_context=_SALT_CONTEXT).digest()


@dataclass(frozen=True, slots=True)
class Attachment:
    """A non-text input at a token position of the prefix, by the full digest of its content (32 bytes)."""

    position: int
    digest: bytes

    def __post_init__(self) -> None:
        if self.position < 0 or not isinstance(self.digest, bytes) or len(self.digest) != KEY_BYTES:
            raise ValueError("an attachment has a position >= 0 and a digest of 32 bytes")


@dataclass(frozen=True, slots=True)
class BlockName:
    """How the store is asked for one block.

    ``route`` is the first key of the block's stripe: placement hashes it, so that consecutive blocks lie together.
    ``token_digest`` is the same in every space; a store answers a key whose digest differs as a miss.
    """

    key: BlockKey
    parent: BlockKey
    token_digest: TokenDigest
    route: BlockKey
    index: int


@dataclass(frozen=True, slots=True)
class StateName:
    """How the store is asked for a state: ``position`` = tokens before it, ``tail_tokens`` beyond its parent block.

    ``parent`` is the key of the last complete block, or the space id where there is none.
    """

    key: StateKey
    parent: BlockKey
    route: BlockKey
    position: int
    tail_tokens: int


class ChainNames(Sequence[BlockName]):
    """Names of consecutive blocks of one chain, as columns: a ``BlockName`` is made only when one is asked for.

    Sees the rows that its chain had when it was made; a slice without a step copies nothing.
    """

    __slots__ = ("_columns", "_first", "_stop")

    def __init__(self, columns: _Columns, first: int, stop: int) -> None:
        self._columns = columns
        self._first = first
        self._stop = stop

    @property
    def keys(self) -> bytes:
        """All keys, one behind another."""
        return bytes(self._columns.keys[KEY_BYTES * self._first : KEY_BYTES * self._stop])

    @property
    def token_digests(self) -> bytes:
        """All token digests, one behind another."""
        return bytes(self._columns.token_digests[TOKEN_DIGEST_BYTES * self._first : TOKEN_DIGEST_BYTES * self._stop])

    def stripes(self) -> Iterator[tuple[BlockKey, range]]:
        """The route of each stripe, and which of these names lie in it."""
        at = self._first
        while at < self._stop:
            stop = min(at - at % STRIPE_BLOCKS + STRIPE_BLOCKS, self._stop)
            yield self._columns.key(at - at % STRIPE_BLOCKS), range(at - self._first, stop - self._first)
            at = stop

    def __len__(self) -> int:
        return self._stop - self._first

    @overload
    def __getitem__(self, at: int) -> BlockName: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[BlockName]: ...
    def __getitem__(self, at: int | slice) -> BlockName | Sequence[BlockName]:
        if isinstance(at, slice):
            first, stop, step = at.indices(len(self))
            if step != 1:
                return [self[index] for index in range(first, stop, step)]
            return ChainNames(self._columns, self._first + first, self._first + max(first, stop))
        index = at + len(self) if at < 0 else at
        if not 0 <= index < len(self):
            raise IndexError(f"name {at} of {len(self)}")
        return self._columns.name(self._first + index)

    def __iter__(self) -> Iterator[BlockName]:
        return map(self._columns.name, range(self._first, self._stop))

    def __eq__(self, other: object) -> bool:
        """As a list's: the same names in the same order."""
        if not isinstance(other, Sequence):
            return NotImplemented
        return len(self) == len(other) and all(mine == name for mine, name in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"ChainNames({list(self)!r})"


@dataclass(frozen=True, slots=True)
class _Columns:
    """Keys and token digests of a chain's complete blocks. They grow; what is there does not change."""

    space_id: SpaceId
    keys: bytearray
    token_digests: bytearray

    def __len__(self) -> int:
        return len(self.token_digests) // TOKEN_DIGEST_BYTES

    def key(self, index: int) -> BlockKey:
        return BlockKey(bytes(self.keys[KEY_BYTES * index : KEY_BYTES * (index + 1)]))

    def parent(self, index: int) -> BlockKey:
        return self.key(index - 1) if index else BlockKey(bytes(self.space_id))

    def token_digest(self, index: int) -> TokenDigest:
        return TokenDigest(bytes(self.token_digests[TOKEN_DIGEST_BYTES * index : TOKEN_DIGEST_BYTES * (index + 1)]))

    def name(self, index: int) -> BlockName:
        key, route = self.key(index), self.key(index - index % STRIPE_BLOCKS)
        return BlockName(key, self.parent(index), self.token_digest(index), route, index)


class TokenChain:
    """The keys of one growing token sequence in one space.

    Appending is amortised: each complete block is hashed once. Holds the token ids (u32); never prints them.
    """

    __slots__ = ("_attachments", "_columns", "_positions", "_tokens", "block_tokens", "space_id")

    def __init__(
        self,
        space_id: SpaceId,
        block_tokens: int,
        tokens: Iterable[int] = (),
        attachments: Sequence[Attachment] = (),
    ) -> None:
        if len(space_id) != KEY_BYTES:
            raise ValueError("a space id has 32 bytes")
        if not BLOCK_TOKENS_MIN <= block_tokens <= BLOCK_TOKENS_MAX:
            raise ValueError(f"block_tokens {block_tokens} is outside {BLOCK_TOKENS_MIN}..{BLOCK_TOKENS_MAX}")
        self.space_id = space_id
        self.block_tokens = block_tokens
        self._tokens: list[int] = []
        self._columns = _Columns(space_id, bytearray(), bytearray())
        self._attachments = tuple(sorted(attachments, key=lambda item: (item.position, item.digest)))
        self._positions = [item.position for item in self._attachments]
        self.append(tokens)

    def __len__(self) -> int:
        return len(self._tokens)

    @property
    def names(self) -> ChainNames:
        """Names of the blocks that are complete now, in order."""
        return ChainNames(self._columns, 0, len(self._columns))

    @property
    def tokens(self) -> Sequence[int]:
        return self._tokens

    def append(self, tokens: Iterable[int]) -> Sequence[BlockName]:
        """Add token ids; returns the names of the blocks that they completed.

        Raises ValueError, and adds nothing, when one of them is not an integer in 0..2^32-1.
        """
        try:
            new = [as_integer(token) for token in tokens]
        except TypeError as error:
            raise ValueError(f"token ids are integers: {error}") from error
        if new and not (min(new) >= 0 and max(new) <= TOKEN_ID_MAX):
            raise ValueError("token ids are u32: 0..2^32-1")
        self._tokens.extend(new)
        columns, first = self._columns, len(self._columns)
        for index in range(first, len(self._tokens) // self.block_tokens):
            begin = index * self.block_tokens
            content = self._content(begin, begin + self.block_tokens)
            previous = columns.token_digest(index - 1) if index else _ROOT_DIGEST
            columns.keys.extend(blake3(columns.parent(index) + content, key=_BLOCK).digest())
            columns.token_digests.extend(blake3(previous + content, key=_TOKENS).digest(TOKEN_DIGEST_BYTES))
        return self.names[first:]

    def state_name(self, position: int) -> StateName:
        """Name of the state after ``position`` tokens. Raises ValueError beyond the chain's length."""
        if not 0 <= position <= len(self._tokens):
            raise ValueError(f"position {position} is outside the {len(self._tokens)} tokens of the chain")
        blocks, tail = divmod(position, self.block_tokens)
        parent = self._columns.parent(blocks)
        content = self._content(position - tail, position)
        return StateName(
            key=StateKey(blake3(parent + content, key=_STATE).digest()),
            parent=parent,
            route=self._columns.name(blocks - 1).route if blocks else parent,
            position=position,
            tail_tokens=tail,
        )

    def _content(self, begin: int, end: int) -> bytes:
        """What is hashed of tokens [begin, end): both counts, ids as u32 LE, (offset, digest) of each attachment."""
        inside = self._attachments[bisect_left(self._positions, begin) : bisect_left(self._positions, end)]
        ids = np.asarray(self._tokens[begin:end], dtype="<u4").tobytes()
        parts = [struct.pack("<II", end - begin, len(inside)), ids]
        parts += [struct.pack("<I", item.position - begin) + item.digest for item in inside]
        return b"".join(parts)


def opaque_name(space_id: SpaceId, engine_key: bytes) -> BlockName:
    """How the store is asked for a block that an engine names by a hash of its own, which covers the whole prefix.

    Such blocks have no order that we know: each is the first of a prefix of its own, and placement spreads them one by
    one. Raises ValueError for an empty key.
    """
    if len(space_id) != KEY_BYTES:
        raise ValueError("a space id has 32 bytes")
    if not engine_key:
        raise ValueError("an engine's key has at least one byte")
    content = struct.pack("<I", len(engine_key)) + engine_key
    key = BlockKey(blake3(space_id + content, key=_OPAQUE).digest())
    digest = TokenDigest(blake3(engine_key, key=_OPAQUE_DIGEST).digest(TOKEN_DIGEST_BYTES))
    return BlockName(key, BlockKey(bytes(space_id)), digest, key, 0)


# --- canonical encoding ---------------------------------------------------------------------------------------------


def _is_u32(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**32


def _check_integers(holder: object, *names: str) -> None:
    for name in names:
        if not _is_u32(value := getattr(holder, name)):
            raise ValueError(f"{name} {value!r} is not a number in 0..2^32-1")


def _check_kinds(holder: object, kind: type | UnionType, *names: str) -> None:
    for name in names:
        if not isinstance(value := getattr(holder, name), kind):
            raise ValueError(f"{name} of a space cannot be a {type(value).__name__}")


def _chunk(data: bytes) -> bytes:
    return struct.pack("<I", len(data)) + data


def _encode_value(value: object) -> bytes:
    match value:
        case None:
            return b"N"
        case bool():
            raise ValueError("a space has no boolean fields")
        case int():
            return b"I" + struct.pack("<Q", value)
        case str():
            text = value.encode()
            if len(text) > NAME_BYTES_MAX:
                raise ValueError(f"a name in a space has at most {NAME_BYTES_MAX} bytes, not {len(text)}")
            return b"S" + _chunk(text)
        case bytes():
            return b"B" + _chunk(value)
        case tuple():
            return b"T" + struct.pack("<I", len(value)) + b"".join(_encode_value(item) for item in value)
        case AttentionGroup():
            return b"G" + b"".join(
                _encode_value(item) for item in (value.window, value.layers, value.kv_heads, value.head_dim)
            )
        case ShardCoordinate():
            return b"C" + b"".join(_encode_value(getattr(value, item.name)) for item in fields(value))
        case _:
            raise ValueError(f"a space cannot hold a {type(value).__name__}")


def _decode_value(reader: _Reader) -> object:
    """One field's value. Lists hold groups, groups hold one list of numbers, and nothing nests deeper."""
    tag = reader.take(1)
    if tag == b"T":
        return tuple(_decode_group(reader) for _ in range(reader.count()))
    if tag == b"C":
        return ShardCoordinate(*(_decode_integer(reader) for _ in range(4)))
    return _decode_scalar(tag, reader)


def _decode_scalar(tag: bytes, reader: _Reader) -> object:
    if tag == b"N":
        return None
    if tag == b"I":
        return reader.u64()
    if tag == b"S":
        return reader.chunk().decode()
    if tag == b"B":
        return reader.chunk()
    raise ValueError(f"unknown tag {tag!r} in an encoded space")


def _decode_integer(reader: _Reader) -> int:
    if reader.take(1) != b"I":
        raise ValueError("the encoded space lacks a number at its place")
    return reader.u64()


def _decode_group(reader: _Reader) -> AttentionGroup:
    if reader.take(1) != b"G":
        raise ValueError("the encoded space lacks an attention group at its place")
    window = _decode_integer(reader)
    if reader.take(1) != b"T":
        raise ValueError("the encoded space lacks a group's layers at their place")
    layers = tuple(_decode_integer(reader) for _ in range(reader.count()))
    return AttentionGroup(window, layers, _decode_integer(reader), _decode_integer(reader))


class _Reader:
    """A cursor over bytes; reading past the end is a ValueError."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def take(self, count: int) -> bytes:
        part = self._data[self._at : self._at + count]
        if len(part) != count:
            raise ValueError("the encoded space ends early")
        self._at += count
        return part

    def u32(self) -> int:
        return int(struct.unpack("<I", self.take(4))[0])

    def u64(self) -> int:
        return int(struct.unpack("<Q", self.take(8))[0])

    def count(self) -> int:
        count = self.u32()
        if count > SPACE_LAYERS_MAX:
            raise ValueError(f"a list in a space has at most {SPACE_LAYERS_MAX} items")
        return count

    def chunk(self) -> bytes:
        return self.take(self.u32())

    def rest(self) -> bytes:
        return self._data[self._at :]
