"""Blocks to be stored, as columns: what each shall be stored as, and where its bytes are.

Owns the way from a put's blocks to that, compression and encryption included. Does not know what is stored already.
Invariant: ``checksum`` is that of the bytes that were submitted; nobody but the writer says whether those are the bytes
that lie in memory, and it says so of what it has written.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np
import numpy.typing as npt

from kvstore.daemon.cipher import Encryption
from kvstore.daemon.codec import Codec, compress
from kvstore.daemon.inflow import Inflow
from kvstore.daemon.record import HEADER_BYTES, RECORD_ALIGN, RecordHeader, checksum_of
from kvstore.daemon.segment import Segment
from kvstore.keys import BlockKey, SpaceId
from kvstore.limits import PAYLOAD_BYTES_MAX
from kvstore.store import BlockPut, Buffer
from kvstore.wire import PUT_ROW, PutRows

INCOMING_DTYPE = np.dtype(
    [
        ("key", "<u8", (4,)),
        ("parent", "<u8", (4,)),
        ("digest", "<u8", (2,)),
        ("checksum", "<u8"),
        ("index", "<u4"),
        ("tokens", "<u4"),
        ("stored_bytes", "<u4"),
        ("payload_bytes", "<u4"),
        ("flags", "u1"),
        ("codec", "u1"),
    ]
)
_ROW = struct.Struct("<32s32s16sQIIIIBB")
"""One row. (Packing rows one by one is faster than filling columns, which costs a numpy call each.)"""
assert _ROW.size == INCOMING_DTYPE.itemsize


assert INCOMING_DTYPE.names[:6] == PUT_ROW.names[:6]  # type: ignore[index]
"""And as long: what lies before the sizes is copied as it came."""


@dataclass(frozen=True, slots=True)
class Incoming:
    """``stored[i]`` is written as it is for ``rows[i]``, whose key is ``keys[i]``.

    ``altered``: positions whose bytes are known not to be those submitted. ``sure``: positions whose checksum was taken
    here of bytes that nobody can change.
    """

    rows: npt.NDArray[np.void]
    keys: Sequence[BlockKey]
    stored: Sequence[Buffer]
    altered: frozenset[int] = frozenset()
    sure: frozenset[int] = frozenset()

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def lags(self) -> bool:
        """Whether the bytes come too slowly to be waited for in a turn."""
        return isinstance(self.stored, Inflow) and self.stored.lags

    @property
    def gone(self) -> int:
        """Of how many of the first the bytes were taken as they came, so that they cannot be written again."""
        return self.stored.gone if isinstance(self.stored, Inflow) else 0

    def take(self, begin: int, end: int) -> Sequence[Buffer]:
        """The bytes of some blocks, each taken once and in order; none if they are on their way and late."""
        return self.stored.take(begin, end) if isinstance(self.stored, Inflow) else self.stored[begin:end]

    def gather(self) -> None:
        """Have all bytes in memory that are still on their way. Not within a turn."""
        if isinstance(self.stored, Inflow):
            self.stored.gather()

    def pick(self, positions: Sequence[int]) -> Incoming:
        """Some of the blocks, in the order of the positions."""
        return Incoming(
            self.rows[np.asarray(positions, dtype=np.int64)],
            [self.keys[at] for at in positions],
            self.stored[positions.start : positions.stop]
            if isinstance(positions, range)
            else [self.stored[at] for at in positions],
            frozenset(new for new, at in enumerate(positions) if at in self.altered),
            frozenset(new for new, at in enumerate(positions) if at in self.sure),
        )

    def header(self, at: int, space_id: SpaceId, class_byte: int, now_s: int, segment: Segment) -> RecordHeader:
        """The header of one block that is appended to a segment and that one class has touched."""
        fields = _ROW.unpack(self.rows[at].tobytes())
        key, parent, digest, checksum, index, tokens, stored_bytes, payload_bytes, flags, codec = fields
        return RecordHeader(
            segment=segment.number,
            generation=segment.header.generation,
            offset=segment.end,
            key=key,
            parent=parent,
            space_id=space_id,
            token_digest=digest,
            index=index,
            tokens=tokens,
            class_byte=class_byte,
            flags=flags,
            codec=codec,
            stored_bytes=stored_bytes,
            payload_bytes=payload_bytes,
            written_s=now_s,
            checksum=checksum,
            touches=((class_byte, now_s),),
        )

    def record_bytes(self) -> npt.NDArray[np.int64]:
        """Disk bytes of each block's record."""
        pages = (self.rows["stored_bytes"].astype(np.int64) + (HEADER_BYTES + RECORD_ALIGN - 1)) // RECORD_ALIGN
        return np.asarray(pages * RECORD_ALIGN, dtype=np.int64)


class Arrived(Sequence[BlockPut]):
    """The blocks of a put that came over a connection: columns already. ``payloads``: flat, as long as the rows say;
    maybe still on their way.
    """

    __slots__ = ("payloads", "rows")

    def __init__(self, rows: PutRows, payloads: Sequence[memoryview]) -> None:
        self.rows = rows
        self.payloads = payloads

    def __len__(self) -> int:
        return len(self.payloads)

    @overload
    def __getitem__(self, at: int) -> BlockPut: ...
    @overload
    def __getitem__(self, at: slice) -> Arrived: ...
    def __getitem__(self, at: int | slice) -> BlockPut | Arrived:
        if isinstance(at, slice):
            return Arrived(self.rows[at], self.payloads[at])
        row = self.rows[at]
        return BlockPut(row.name, row.tokens, self.payloads[at], row.flags)

    def incoming(self) -> Incoming:
        """To be stored as they are."""
        bytes_in = np.frombuffer(self.rows.packed, np.uint8).reshape(len(self), PUT_ROW.itemsize)
        bytes_out = np.zeros((len(self), INCOMING_DTYPE.itemsize), np.uint8)
        sizes = PUT_ROW.fields["payload_bytes"][1]  # type: ignore[index]
        bytes_out[:, : sizes + 4] = bytes_in[:, : sizes + 4]
        bytes_out[:, sizes + 4 : sizes + 9] = bytes_in[:, sizes : sizes + 5]
        return Incoming(bytes_out.view(INCOMING_DTYPE)[:, 0], self.rows.keys(), self.payloads)


def incoming(
    blocks: Sequence[BlockPut], codec_name: str, checksums: Sequence[int] | None, encryption: Encryption | None = None
) -> Incoming:
    """Blocks to be stored under a codec, and encrypted or not. ``checksums``: those of the payloads at submission;
    None: taken now.

    Raises ValueError for a payload of an impossible length.
    """
    as_they_are = codec_name == "none" and encryption is None
    if isinstance(blocks, Arrived) and as_they_are and checksums is not None:
        return blocks.incoming()
    stored = [_flat(block.payload) for block in blocks]
    codecs: list[int] = [Codec.NONE] * len(stored)
    sure: set[int] = set()
    altered: set[int] = set()
    taken = list(checksums) if checksums is not None else [checksum_of(payload) for payload in stored]
    sizes = [len(payload) for payload in stored]
    if checksums is None:
        sure.update(at for at, payload in enumerate(stored) if isinstance(payload, bytes))
    for at, payload in enumerate(() if as_they_are else stored):
        private = bytes(payload)  # what is verified must be what is packed, and others may write to the payload
        codecs[at], packed = compress(codec_name, private)
        if encryption is not None:
            block = blocks[at]
            codecs[at], packed = encryption.encrypt(block.name, block.flags, sizes[at], codecs[at], packed)
        if packed is not private:
            if checksum_of(private) != taken[at]:
                altered.add(at)
            stored[at], taken[at] = packed, checksum_of(packed)
            sure.add(at)
    packed_rows = [
        _ROW.pack(
            block.name.key,
            block.name.parent,
            block.name.token_digest,
            checksum,
            block.name.index,
            block.tokens,
            len(payload),
            size,
            block.flags,
            codec,
        )
        for block, payload, size, checksum, codec in zip(blocks, stored, sizes, taken, codecs, strict=True)
    ]
    rows = np.frombuffer(b"".join(packed_rows), dtype=INCOMING_DTYPE)
    return Incoming(rows, [block.name.key for block in blocks], stored, frozenset(altered), frozenset(sure))


def _flat(payload: Buffer) -> Buffer:
    flat = payload if isinstance(payload, bytes) else memoryview(payload).cast("B")
    if not 1 <= len(flat) <= PAYLOAD_BYTES_MAX:
        raise ValueError(f"a payload has 1..{PAYLOAD_BYTES_MAX} bytes, not {len(flat)}")
    return flat
