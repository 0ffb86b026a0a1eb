"""Where blocks lie, as a daemon tells it, and the order in which they are read: pure tables, one row a block.

Owns the row of an EXTENTS or GET answer and the plan of reading many. Does not know sockets, files or payloads.
Invariants: the plan is a function of the rows and lengths alone, so that a daemon which sends records as they lie and a
client which takes them apart agree on every byte; a plan covers each block once, and never reads backwards in a file.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvstore import limits
from kvstore.errors import ProtocolError
from kvstore.record import HEADER_BYTES

STEP_BYTES = 1 * limits.MIB
"""Bytes read at once, about: their checksums are then taken while they are in the processor's cache."""
STEP_BLOCKS = 256
"""Blocks read at once: each needs up to three buffers, and the kernel takes 1024 in one call."""
GAP_BYTES_MAX = 4 * limits.KIB
"""Padding between two records that is read (and sent) rather than skipped."""
OFFSET_END = limits.SEGMENT_BYTES_MAX * limits.BATCH_BLOCKS_MAX
"""No record lies at or beyond it: made ones lie 4 GiB apart."""
MADE = 2**32 - 1
"""File number of a record that lies in no file: the daemon made it of a compressed block, or of one in memory."""

ROW = np.dtype(
    [
        ("generation", "<u8"),
        ("offset", "<u8"),
        ("segment", "<u4"),
        ("file", "<u4"),
        ("status", "u1"),
        ("flags", "u1"),
        ("zero", "V6"),
    ]
)
"""One block: its record's place, and the number of the file that it is read from (of this connection, or this answer).
``offset``: of the record, in the segment. All but the status is zero unless that is LENT."""

Rows = npt.NDArray[np.void]


class Row(NamedTuple):
    """One row by itself."""

    generation: int
    offset: int
    segment: int
    file: int
    status: int
    flags: int


_ROW = struct.Struct("<QQIIBB6x")
assert _ROW.size == ROW.itemsize
_COUNT = struct.Struct("<IBxxx")


class ExtentStatus(IntEnum):
    """What an answer says of one block. All but LENT and ASK are those of ``GetStatus``."""

    LENT = 0
    """To EXTENTS: the record may be read from its file. To GET: it follows in the payload."""
    MISS = 1
    WRONG_SIZE = 4
    UNREACHABLE = 5
    """The daemon has no memory for it now."""
    ASK = 6
    """It cannot be read from the file as it is: ask for it by GET."""


LENT, ASK, MISS = int(ExtentStatus.LENT), int(ExtentStatus.ASK), int(ExtentStatus.MISS)
"""As plain numbers: comparing a column with a member takes four times as long."""
_STATUSES = frozenset(map(int, ExtentStatus))
_KNOWN = np.zeros(256, bool)
_KNOWN[list(ExtentStatus)] = True


def rows_bytes(count: int) -> int:
    """Length of an answer of so many rows."""
    return _COUNT.size + count * ROW.itemsize


def encode_rows(rows: Rows, *, option: bool = False) -> bytes:
    return _COUNT.pack(len(rows), option) + rows.tobytes()


def encode_row(row: Row, *, option: bool = False) -> bytes:
    """``encode_rows`` of one."""
    return _COUNT.pack(1, option) + _ROW.pack(*row)


def decode_row(body: bytes, what: str) -> tuple[Row, bool]:
    """``decode_rows`` of an answer that must have one row, in a tenth of the time. Raises ProtocolError."""
    if len(body) != _COUNT.size + _ROW.size:
        raise ProtocolError(f"{what} has another length than one block's")
    count, option = _COUNT.unpack_from(body)
    row = Row(*_ROW.unpack_from(body, _COUNT.size))
    if count != 1 or option > 1 or row.status not in _STATUSES or row.offset >= OFFSET_END:
        raise ProtocolError(f"{what} carries a count, option, status or extent beyond its bound")
    return row, bool(option)


def decode_rows(body: bytes, what: str) -> tuple[Rows, bool]:
    """The rows of an answer, and its option. Raises ProtocolError."""
    if len(body) < _COUNT.size:
        raise ProtocolError(f"{what} ends early")
    count, option = _COUNT.unpack_from(body)
    if count > limits.BATCH_BLOCKS_MAX or option > 1:
        raise ProtocolError(f"{what} carries a count or option beyond its bound")
    if len(body) != rows_bytes(count):
        raise ProtocolError(f"{what} has another length than its count says")
    rows = np.frombuffer(body, ROW, count, _COUNT.size)
    if not _KNOWN[rows["status"]].all():
        raise ProtocolError(f"{what} carries an unknown status")
    if count and int(rows["offset"].max()) >= OFFSET_END:
        raise ProtocolError(f"{what} carries an extent beyond its bound")
    return rows, bool(option)


@dataclass(frozen=True, slots=True)
class Plan:
    """In which order blocks are read. All lists have one element a block, in that order, unless said otherwise.

    ``order``: positions in the rows. ``offsets``: of the records. ``gaps``: bytes before each record that are nobody's,
    when it is read together with the one before. ``runs`` (one element a run): where each begins in ``order``, and at
    last the number of blocks; what lies within a run lies together in one file.
    """

    order: list[int]
    files: list[int]
    offsets: list[int]
    sizes: list[int]
    gaps: list[int]
    runs: list[int]

    @property
    def total_bytes(self) -> int:
        """Bytes of all records and gaps: the payload of a GET answer."""
        return sum(self.sizes) + sum(self.gaps) + HEADER_BYTES * len(self.sizes)

    def run_bytes(self, run: int) -> int:
        begin, last = self.runs[run], self.runs[run + 1] - 1
        return self.offsets[last] + HEADER_BYTES + self.sizes[last] - self.offsets[begin]

    def steps(self, *, across_runs: bool) -> list[tuple[int, int]]:
        """Parts [begin, end) of ``order`` to be read at once: of one run, or of the stream that all runs make."""
        steps: list[tuple[int, int]] = []
        for begin, end in pairwise((0, len(self.order)) if across_runs else self.runs):
            held_bytes = 0
            for at in range(begin, end) if end - begin > 1 else ():
                if held_bytes >= STEP_BYTES or at - begin == STEP_BLOCKS:
                    steps.append((begin, at))
                    begin, held_bytes = at, 0
                held_bytes += self.sizes[at] + self.gaps[at] + HEADER_BYTES
            steps.append((begin, end))
        return steps


def plan(rows: Rows, lent: npt.NDArray[np.intp], payload_bytes: Sequence[int]) -> Plan:
    """How to read the rows at ``lent``. ``payload_bytes``: lengths of all blocks, by row."""
    if len(lent) == 1:
        at = int(lent[0])
        row = rows[at]
        return Plan([at], [int(row["file"])], [int(row["offset"])], [payload_bytes[at]], [0], [0, 1])
    files, offsets = rows["file"].take(lent), rows["offset"].take(lent).astype(np.int64)
    sizes = np.array(payload_bytes, np.int64).take(lent)
    order = np.lexsort((offsets, files))
    files, offsets, sizes = files.take(order), offsets.take(order), sizes.take(order)
    between = offsets[1:] - offsets[:-1] - sizes[:-1] - HEADER_BYTES
    joined = (files[1:] == files[:-1]) & (between >= 0) & (between <= GAP_BYTES_MAX)
    gaps = [0, *(between * joined).tolist()] if len(lent) else []
    runs = [0, *((~joined).nonzero()[0] + 1).tolist(), len(lent)] if len(lent) else [0]
    return Plan(lent.take(order).tolist(), files.tolist(), offsets.tolist(), sizes.tolist(), gaps, runs)
