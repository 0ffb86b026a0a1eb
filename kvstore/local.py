"""The memory that a client shares with a daemon on the same host: segments that it may read, its part of an arena.

Owns descriptors, a connection's part of the arena, and reading payloads from segment files into the caller's buffers.
Does not know sockets or messages. Invariants: bytes count only after their checksum was verified, and only if the lease
on their segment was still running when they had been read; descriptors are closed when they are replaced and with their
connection; nobody but the holder of the connection touches any of it.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from itertools import islice

from kvstore import limits
from kvstore.arena import Arena, Range
from kvstore.direct import PageReader, Piece, is_direct, pieces_of
from kvstore.errors import ProtocolError
from kvstore.extents import STEP_BYTES, Plan
from kvstore.framing import close_all
from kvstore.receive import Scatter
from kvstore.record import HEADER_BYTES

PART_BYTES = 32 * limits.MIB
PARTS = 2
"""While the daemon writes what is in one part of the arena, the client fills the next. A part costs the daemon some two
milliseconds beside its bytes, most of it waits for memory: a part drives all else out of the processor's cache. With
parts of 16 and 32 MiB both sides together take 0.33 and 0.28 CPU seconds a GB in place, of blocks of 1 MiB. For the
same reason a put has one connection to a daemon on this host, rather than two whose parts take turns to be written.
"""


# --- segments -------------------------------------------------------------------------------------------------------


def read_extents(
    plan: Plan,
    fds: Sequence[int | None],
    scatter: Scatter,
    usable: Callable[[], bool],
    pages: PageReader,
) -> None:
    """Read the records of a plan into the scatter's buffers; what could not be read stays begun.

    ``usable`` is asked after each MiB, about, and at the end: once it says no, the lease has ended and nothing more is
    believed. ``pages`` reads what lies in files that were lent around the page cache.
    """
    around = {at for at in set(plan.files) if (fd := fds[at]) is not None and is_direct(fd)}
    steps = plan.steps(across_runs=False)
    cold = [step for step in steps if plan.files[step[0]] in around] if around else []
    warm = [step for step in steps if plan.files[step[0]] not in around] if around else steps
    if _read_cached(plan, warm, fds, scatter, usable) and cold:
        _read_around(plan, cold, fds, scatter, usable, pages)


def _read_cached(
    plan: Plan,
    steps: Sequence[tuple[int, int]],
    fds: Sequence[int | None],
    scatter: Scatter,
    usable: Callable[[], bool],
) -> bool:
    """Read steps through the page cache, one call of the kernel each; False once the lease has ended."""
    files, offsets, sizes = plan.files, plan.offsets, plan.sizes
    came: list[int] = []
    held_bytes = 0
    for begin, end in steps:
        fd, offset = fds[files[begin]], offsets[begin]
        wanted_bytes = offsets[end - 1] + sizes[end - 1] + HEADER_BYTES - offset
        if fd is None or not _has_read(fd, scatter.parts(plan, begin, end, gap_first=False), offset, wanted_bytes):
            continue
        came += range(begin, end)
        held_bytes += wanted_bytes
        if held_bytes >= STEP_BYTES:
            if not usable():
                return False
            scatter.finish(plan, came)
            came, held_bytes = [], 0
    if came and not usable():
        return False
    scatter.finish(plan, came)
    return True


def _has_read(fd: int, parts: Sequence[memoryview], offset: int, wanted_bytes: int) -> bool:
    """Whether the file gave all of a step."""
    try:
        return os.preadv(fd, parts, offset) == wanted_bytes
    except OSError:
        return False


def _step_bytes(plan: Plan, begin: int, end: int) -> int:
    return plan.offsets[end - 1] + HEADER_BYTES + plan.sizes[end - 1] - plan.offsets[begin]


def _read_around(
    plan: Plan,
    steps: Sequence[tuple[int, int]],
    fds: Sequence[int | None],
    scatter: Scatter,
    usable: Callable[[], bool],
    pages: PageReader,
) -> None:
    """As ``read_extents``, of steps around the page cache: the next are read while one is copied and verified."""
    reads: list[list[Piece]] = []
    for begin, end in steps:
        fd = fds[plan.files[begin]]
        assert fd is not None
        reads.append(pieces_of(fd, plan.offsets[begin], _step_bytes(plan, begin, end)))
    with closing(pages.read([piece for pieces in reads for piece in pieces])) as reading:
        for (begin, end), pieces in zip(steps, reads, strict=True):
            whole = pour(islice(reading, len(pieces)), scatter.parts(plan, begin, end, gap_first=False))
            if not usable():
                return
            if whole:
                scatter.finish(plan, range(begin, end))


def pour(pieces: Iterable[memoryview | None], parts: Sequence[memoryview]) -> bool:
    """Fill the parts, one after another, with what the pieces have; False if that is not enough."""
    empty = deque(parts)
    for piece in pieces:
        at = 0
        while piece is not None and empty and at < len(piece):
            part = empty.popleft()
            count = min(len(part), len(piece) - at)
            part[:count] = piece[at : at + count]
            at += count
            if count < len(part):
                empty.appendleft(part[count:])
    return not empty


# --- one connection -------------------------------------------------------------------------------------------------


class Peer:
    """What one connection shares with its daemon. ``lease_s``: how long lent extents may be read."""

    def __init__(self, arena: Arena, part: Range, lease_s: float) -> None:
        self.arena = arena
        self._part = part
        self.lease_s = lease_s
        self.pages = PageReader()
        self.fds: list[int | None] = []
        """Descriptors of segments, by the numbers that the daemon's answers use."""

    def begin_of(self, number: int) -> int:
        """Where one of the PARTS begins in the arena, each of PART_BYTES."""
        return self._part[0] + number * PART_BYTES

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
        self.arena.give(self._part)
