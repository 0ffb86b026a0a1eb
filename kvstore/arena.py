"""The memory of a client from which a daemon on the same host takes puts, and reservations in it.

Owns the arena, who has which part of it, and copying into it. Does not know connections or messages. Invariants: parts
that are held never overlap; a reserved part goes back only when no view of it and no array over one is left; the arena
keeps its size, so that a daemon that maps it cannot be made to read beyond its end.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import threading
import weakref
from collections import deque
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import xxhash

from kvstore import limits
from kvstore.errors import Unavailable

ALIGN_BYTES = 64
"""Where a reserved payload may begin: enough for any element type, and for copies by the processor's widest loads."""
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL

Range = tuple[int, int]
"""Begin and end in the arena, bytes."""


class Arena:
    """Shared memory of a client's own, of which parts are taken and given back. Thread-safe but for ``place``.

    Memory that was never written to takes no room on the host.
    """

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory
        self._bytes: npt.NDArray[np.uint8] | None = np.frombuffer(memory, np.uint8)
        self._size = len(memory)
        self._base = address_of(memoryview(memory))
        self._lock = threading.Lock()
        self._free: list[Range] = [(0, len(memory))]
        self._returned: deque[Range] = deque()
        """Reserved parts that nobody can reach any more; what collects garbage adds to it, in whatever thread."""
        self._reserved = 0

    @classmethod
    def create(cls, size: int = limits.ARENA_BYTES_MAX) -> tuple[Arena, int]:
        """A new arena, and its descriptor for daemons, which the caller closes. Raises OSError."""
        fd = os.memfd_create("reprise-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, size)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
            return cls(mmap.mmap(fd, size)), fd
        except BaseException:
            os.close(fd)
            raise

    def __len__(self) -> int:
        return self._size

    @property
    def free_bytes(self) -> int:
        with self._lock:
            self._take_back()
            return sum(end - begin for begin, end in self._free)

    def take(self, count: int) -> Range | None:
        """A part of at least ``count`` bytes; None if there is none, or the arena is closed."""
        count = -(-count // ALIGN_BYTES) * ALIGN_BYTES
        with self._lock:
            self._take_back()
            for at, (begin, end) in enumerate(self._free):
                if self._bytes is not None and end - begin >= count:
                    self._free[at : at + 1] = [(begin + count, end)] if end - begin > count else []
                    return begin, begin + count
        return None

    def give(self, part: Range) -> None:
        with self._lock:
            self._give(part)

    def reserve(self, sizes: Sequence[int]) -> Reservation | None:
        """Writable views of these lengths, aligned; None if the arena has no room for them."""
        offsets = np.concatenate([[0], np.cumsum([-(-size // ALIGN_BYTES) * ALIGN_BYTES for size in sizes])]).tolist()
        part = self.take(max(offsets[-1], 1))
        if part is None:
            return None
        with self._lock:
            if self._bytes is None:
                return None
            whole = self._bytes[slice(*part)]
            self._reserved += 1
        weakref.finalize(whole, self._returned.append, part).atexit = False
        memory = whole.data
        views = [memory[at : at + size] for at, size in zip(offsets[:-1], sizes, strict=True)]
        return Reservation(views, shared=True)

    def place(self, begin: int, payloads: Sequence[memoryview]) -> tuple[list[int], list[int]]:
        """Have payloads in the arena: their checksums, and where they lie.

        What does not lie in it already is copied, one after another from ``begin`` on, right after its checksum was
        taken: it is in cache then, and what changes in between is found.
        """
        memory = self._bytes
        if memory is None:
            raise Unavailable("the client is closed")
        at = begin
        checksums: list[int] = []
        offsets: list[int] = []
        for payload in payloads:
            checksums.append(xxhash.xxh3_64_intdigest(payload))
            inside = self.find(payload)
            if inside is None:
                end = at + len(payload)
                np.copyto(memory[at:end], np.frombuffer(payload, np.uint8))  # without the interpreter's lock
                inside, at = at, end
            offsets.append(inside)
        return checksums, offsets

    def find(self, payload: memoryview) -> int | None:
        """Where a payload lies in the arena; None if it lies elsewhere."""
        if not self._reserved:
            return None
        offset = address_of(payload) - self._base
        return offset if 0 <= offset <= len(self) - len(payload) else None

    def close(self) -> None:
        """No part is handed out any more; the memory goes with the last view of it."""
        with self._lock:
            self._bytes = None
        with contextlib.suppress(BufferError):
            self._memory.close()

    def _take_back(self) -> None:
        while self._returned:
            self._reserved -= 1
            self._give(self._returned.popleft())

    def _give(self, part: Range) -> None:
        """Join a part to what is free beside it."""
        joined: list[Range] = []
        for begin, end in sorted([*self._free, part]):
            if joined and joined[-1][1] == begin:
                joined[-1] = (joined[-1][0], end)
            else:
                joined.append((begin, end))
        self._free = joined


class Reservation:
    """Memory for the payloads of a put, to be filled by the caller: a view for each length that was asked for.

    ``views`` are writable and may be wrapped (``numpy.frombuffer``, ``torch.frombuffer``); their content is arbitrary
    at first. Put as payloads, they are not copied where the store is on this host. Until ``release`` they stay the
    caller's and may be filled and put again, for one thing after a refusal. A context manager.
    """

    def __init__(self, views: Sequence[memoryview], *, shared: bool = False) -> None:
        self.views = views
        self.shared = shared
        """Whether a daemon on this host can take the payloads from where they lie."""

    def release(self) -> None:
        """Let go of the memory; an array over a view keeps all of it from being reserved again. Again is no harm."""
        views, self.views = self.views, ()
        for view in views:
            with contextlib.suppress(BufferError):
                view.release()

    def __enter__(self) -> Reservation:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class ArenaOfClient:
    """The one arena of a client, made when it is first needed. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._made: Arena | None = None
        self._ended = False
        self._fd = -1

    def get(self) -> Arena | None:
        """The arena; None where there can be none, or it was closed."""
        with self._lock:
            if self._made is None and not self._ended:
                try:
                    self._made, self._fd = Arena.create()
                except OSError:
                    self._ended = True
            return self._made

    def open(self) -> int | None:
        """A descriptor of the arena for a daemon, which cannot write through it; the caller closes it."""
        with self._lock:
            if self._made is None:
                return None
            try:
                return os.open(f"/proc/self/fd/{self._fd}", os.O_RDONLY | os.O_CLOEXEC)
            except OSError:
                return None

    def close(self) -> None:
        with self._lock:
            arena, self._made, self._ended = self._made, None, True
        if arena is not None:
            os.close(self._fd)
            arena.close()


def ordinary(sizes: Sequence[int]) -> Reservation:
    """The same in memory that nobody shares."""
    return Reservation([memoryview(bytearray(size)) for size in sizes])


def address_of(view: memoryview) -> int:
    return int(np.frombuffer(view, np.uint8).__array_interface__["data"][0])
