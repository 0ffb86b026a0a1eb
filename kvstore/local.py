"""The memory that a client shares with a daemon on the same host: segments that it may read, an arena that it fills.

Owns descriptors, the arena, and reading payloads from segment files into the caller's buffers. Does not know sockets or
messages. Invariants: bytes count only after their checksum was verified, and only if the lease on their segment was
still running when they had been read; descriptors are closed when they are replaced and with their connection; nobody
but the holder of the connection touches any of it.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvstore import limits
from kvstore.errors import ProtocolError
from kvstore.framing import close_all
from kvstore.receive import Scatter
from kvstore.sharing import Extent

RUN_BYTES_MAX = 1 * limits.MIB
"""Bytes of one read: its checksums are then taken while it is in the processor's cache."""
GAP_BYTES_MAX = 8 * limits.KIB
"""Padding and header between two records; what lies further apart is read by itself."""
PART_BYTES = 4 * limits.MIB
PARTS = 2
"""While the daemon writes what is in one part of the arena, the client fills the next; together they stay in cache."""
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
"""An arena keeps its size: a daemon that maps it cannot be made to read beyond its end."""

_GAP = bytearray(GAP_BYTES_MAX)
"""Where the bytes between two records go; nobody reads it."""


# --- segments -------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Run:
    """Payloads that lie one after another in one file. ``gaps``: bytes to skip before each payload but the first."""

    descriptor: int
    offset: int
    end: int
    positions: list[int] = field(default_factory=list)
    gaps: list[int] = field(default_factory=list)

    def takes(self, descriptor: int, offset: int, end: int) -> bool:
        near = descriptor == self.descriptor and 0 <= offset - self.end <= GAP_BYTES_MAX
        return near and end - self.offset <= RUN_BYTES_MAX


def plan_runs(rows: Sequence[Extent], lent: Sequence[int]) -> list[Run]:
    """The rows at ``lent`` in order of place, in as few reads as may be."""
    runs: list[Run] = []
    for at in sorted(lent, key=lambda at: (rows[at].descriptor, rows[at].offset)):
        row = rows[at]
        end = row.offset + row.payload_bytes
        if runs and runs[-1].takes(row.descriptor, row.offset, end):
            run = runs[-1]
            run.gaps.append(row.offset - run.end)
            run.positions.append(at)
            run.end = end
        else:
            runs.append(Run(row.descriptor, row.offset, end, [at]))
    return runs


def read_extents(
    rows: Sequence[Extent],
    lent: Sequence[int],
    fds: Sequence[int | None],
    scatter: Scatter,
    usable: Callable[[], bool],
) -> None:
    """Read the payloads at ``lent`` into their buffers and verify them; what fails stays asked for.

    ``usable`` is asked after every read: once it says no, the lease has ended and nothing more is believed.
    """
    for run in plan_runs(rows, lent):
        if not _read_run(run, fds[run.descriptor], scatter):
            continue
        good = [at for at in run.positions if scatter.is_whole(at, rows[at].checksum)]
        if not usable():
            return
        scatter.accept(good)


def _read_run(run: Run, fd: int | None, scatter: Scatter) -> bool:
    """Whether the file gave all of a run."""
    if fd is None:
        return False
    parts = [scatter.begin(run.positions[0])]
    for at, gap in zip(run.positions[1:], run.gaps, strict=True):
        if gap:
            parts.append(memoryview(_GAP)[:gap])
        parts.append(scatter.begin(at))
    try:
        return os.preadv(fd, parts, run.offset) == run.end - run.offset
    except OSError:
        return False


# --- the arena ------------------------------------------------------------------------------------------------------


class Arena:
    """Shared memory of a client's own, filled part by part."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory
        self._bytes: npt.NDArray[np.uint8] | None = np.frombuffer(memory, np.uint8)

    @classmethod
    def create(cls, size: int = PARTS * PART_BYTES) -> tuple[Arena, int]:
        """A new arena, and its descriptor for the daemon, which the caller closes. Raises OSError."""
        fd = os.memfd_create("reprise-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, size)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
            return cls(mmap.mmap(fd, size)), fd
        except BaseException:
            os.close(fd)
            raise

    def __len__(self) -> int:
        return len(self._memory)

    def fill(self, part: int, payloads: Sequence[memoryview]) -> int:
        """Copy payloads one after another into a part; returns the offset of the first in the arena."""
        assert self._bytes is not None
        begin = at = part * PART_BYTES
        for payload in payloads:
            end = at + len(payload)
            assert end <= begin + PART_BYTES
            np.copyto(self._bytes[at:end], np.frombuffer(payload, np.uint8))  # without the interpreter's lock
            at = end
        return begin

    def close(self) -> None:
        self._bytes = None
        with contextlib.suppress(BufferError):
            self._memory.close()


def cut(sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Runs (begin, end) of payloads that fit a part of the arena. Each payload must fit by itself."""
    begin = held_bytes = 0
    for at, size in enumerate(sizes):
        assert size <= PART_BYTES
        if held_bytes + size > PART_BYTES:
            yield begin, at
            begin, held_bytes = at, 0
        held_bytes += size
    if begin < len(sizes):
        yield begin, len(sizes)


# --- one connection -------------------------------------------------------------------------------------------------


class Peer:
    """What one connection shares with its daemon. ``lease_s``: how long lent extents may be read."""

    def __init__(self, arena: Arena, lease_s: float) -> None:
        self.arena = arena
        self.lease_s = lease_s
        self.fds: list[int | None] = []
        """Descriptors of segments, by the numbers that the daemon's answers use."""

    def add(self, fds: Sequence[int | None], *, anew: bool) -> None:
        """Take over descriptors that came; with ``anew`` the ones before are not used again."""
        if anew:
            close_all(self.fds)
            self.fds.clear()
        self.fds.extend(fds)
        if len(self.fds) > limits.DESCRIPTORS_MAX:
            raise ProtocolError("a node sent more descriptors than a connection may hold")

    def close(self) -> None:
        close_all(self.fds)
        self.fds.clear()
        self.arena.close()
