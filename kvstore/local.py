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
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import xxhash

from kvstore import limits
from kvstore.errors import ProtocolError
from kvstore.extents import Plan
from kvstore.framing import close_all
from kvstore.receive import Scatter
from kvstore.record import HEADER_BYTES

PART_BYTES = 4 * limits.MIB
PARTS = 2
"""While the daemon writes what is in one part of the arena, the client fills the next. To copy and to write takes both
sides together 0.17 CPU seconds a GB with parts of 4 MiB, and half as much again with 8, which no cache holds.
"""
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
"""An arena keeps its size: a daemon that maps it cannot be made to read beyond its end."""


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

    def fill(self, part: int, payloads: Sequence[memoryview]) -> tuple[list[int], list[int]]:
        """Copy payloads one after another into a part; their checksums, and where they lie in the arena.

        Each is copied right after its checksum was taken: it is in cache then, and what changes in between is found.
        """
        assert self._bytes is not None
        begin = at = part * PART_BYTES
        checksums: list[int] = []
        offsets: list[int] = []
        for payload in payloads:
            end = at + len(payload)
            assert end <= begin + PART_BYTES
            checksums.append(xxhash.xxh3_64_intdigest(payload))
            offsets.append(at)
            np.copyto(self._bytes[at:end], np.frombuffer(payload, np.uint8))  # without the interpreter's lock
            at = end
        return checksums, offsets

    def close(self) -> None:
        self._bytes = None
        with contextlib.suppress(BufferError):
            self._memory.close()


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
