"""The memory that a client shares with a daemon on the same host: segments that it may read, its part of an arena.

Owns descriptors, a connection's part of the arena, and reading payloads from segment files into the caller's buffers.
Does not know sockets or messages. Invariants: bytes count only after their checksum was verified, and only if the lease
on their segment was still running when they had been read; descriptors are closed when they are replaced and with their
connection; nobody but the holder of the connection touches any of it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from kvstore import limits
from kvstore.arena import Arena, Range
from kvstore.errors import ProtocolError
from kvstore.extents import Plan
from kvstore.framing import close_all
from kvstore.receive import Scatter
from kvstore.record import HEADER_BYTES

PART_BYTES = 8 * limits.MIB
PARTS = 2
"""While the daemon writes what is in one part of the arena, the client fills the next. With parts of 4, 8 and 16 MiB
both sides together take 0.7, 0.55 and 0.5 CPU seconds a GB: what a part costs beside its bytes counts for more than the
cache that a small one stays in. A batch should have several parts, else nothing overlaps.
"""


# --- segments -------------------------------------------------------------------------------------------------------


def read_extents(
    plan: Plan,
    fds: Sequence[int | None],
    scatter: Scatter,
    usable: Callable[[], bool],
) -> None:
    """Read the records of a plan into the scatter's buffers; what could not be read stays begun.

    ``usable`` is asked after every read: once it says no, the lease has ended and nothing more is believed.
    """
    for begin, end in plan.steps(across_runs=False):
        fd = fds[plan.files[begin]]
        if fd is not None and _read(fd, scatter.parts(plan, begin, end, gap_first=False), plan, begin, end):
            if not usable():
                return
            scatter.finish(plan, begin, end)


def _read(fd: int, parts: Sequence[memoryview], plan: Plan, begin: int, end: int) -> bool:
    """Whether the file gave all of a step."""
    wanted = plan.offsets[end - 1] + HEADER_BYTES + plan.sizes[end - 1] - plan.offsets[begin]
    try:
        return os.preadv(fd, parts, plan.offsets[begin]) == wanted
    except OSError:
        return False


# --- one connection -------------------------------------------------------------------------------------------------


class Peer:
    """What one connection shares with its daemon. ``lease_s``: how long lent extents may be read."""

    def __init__(self, arena: Arena, part: Range, lease_s: float) -> None:
        self.arena = arena
        self._part = part
        self.lease_s = lease_s
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
