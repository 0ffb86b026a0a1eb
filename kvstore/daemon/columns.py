"""Blocks to be stored, as columns: what each shall be stored as, and where its bytes are.

Owns the way from a put's blocks to that, compression included. Does not know segments or what is stored already.
Invariant: ``checksum`` is that of the bytes that were submitted; nobody but the writer says whether those are the bytes
that lie in memory, and it says so of what it has written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvstore.daemon.codec import Codec, compress
from kvstore.daemon.record import checksum_of, record_bytes
from kvstore.keys import BlockKey
from kvstore.limits import PAYLOAD_BYTES_MAX
from kvstore.store import BlockPut, Buffer

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
        return len(self.stored)

    def pick(self, positions: Sequence[int]) -> Incoming:
        """Some of the blocks, in the order of the positions."""
        return Incoming(
            self.rows[np.asarray(positions, dtype=np.int64)],
            [self.keys[at] for at in positions],
            [self.stored[at] for at in positions],
            frozenset(new for new, at in enumerate(positions) if at in self.altered),
            frozenset(new for new, at in enumerate(positions) if at in self.sure),
        )

    def record_bytes(self) -> npt.NDArray[np.int64]:
        """Disk bytes of each block's record."""
        sizes = [record_bytes(size) for size in self.rows["stored_bytes"].tolist()]
        return np.array(sizes, dtype=np.int64)


def incoming(blocks: Sequence[BlockPut], codec_name: str, checksums: Sequence[int] | None) -> Incoming:
    """Blocks to be stored under a codec. ``checksums``: those of the payloads at submission; None: taken now.

    Raises ValueError for a payload of an impossible length.
    """
    stored = [_flat(block.payload) for block in blocks]
    codecs: list[int] = [Codec.NONE] * len(stored)
    sure: set[int] = set()
    altered: set[int] = set()
    taken = list(checksums) if checksums is not None else [checksum_of(payload) for payload in stored]
    sizes = [len(payload) for payload in stored]
    if checksums is None:
        sure.update(at for at, payload in enumerate(stored) if isinstance(payload, bytes))
    for at, payload in enumerate(stored if codec_name != "none" else ()):
        codecs[at], packed = compress(codec_name, payload)
        if packed is not payload:
            if checksum_of(payload) != taken[at]:
                altered.add(at)
            stored[at], taken[at] = packed, checksum_of(packed)
            sure.add(at)
    rows = np.zeros(len(blocks), dtype=INCOMING_DTYPE)
    names = [block.name for block in blocks]
    rows["key"] = _words([name.key for name in names], 4)
    rows["parent"] = _words([name.parent for name in names], 4)
    rows["digest"] = _words([name.token_digest for name in names], 2)
    rows["index"] = [name.index for name in names]
    rows["tokens"] = [block.tokens for block in blocks]
    rows["flags"] = [block.flags for block in blocks]
    rows["checksum"] = taken
    rows["codec"] = codecs
    rows["payload_bytes"] = sizes
    rows["stored_bytes"] = [len(payload) for payload in stored]
    return Incoming(rows, [name.key for name in names], stored, frozenset(altered), frozenset(sure))


def _flat(payload: Buffer) -> Buffer:
    flat = payload if isinstance(payload, bytes) else memoryview(payload).cast("B")
    if not 1 <= len(flat) <= PAYLOAD_BYTES_MAX:
        raise ValueError(f"a payload has 1..{PAYLOAD_BYTES_MAX} bytes, not {len(flat)}")
    return flat


def _words(parts: Sequence[bytes], words: int) -> npt.NDArray[np.uint64]:
    return np.frombuffer(b"".join(parts), dtype="<u8").reshape(-1, words)
