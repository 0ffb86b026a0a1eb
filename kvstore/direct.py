"""Reading files around the page cache: whole pages into aligned memory that is reused, several reads at once.

Owns that memory and the reads under way. Does not know what the bytes mean, nor who opened the files. Invariants: what
is read goes to the caller in the order in which it was asked for, whatever the order in which it comes; a caller has at
most READS_AT_ONCE reads under way, and all callers of one reader share a bounded number of buffers.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import threading
from collections import deque
from collections.abc import Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import NamedTuple

from kvstore import limits

PAGE_BYTES = 4096
"""What O_DIRECT wants of memory, offsets and lengths, on every disk that a volume is allowed on."""
PIECE_BYTES = 2 * limits.MIB
"""Read at once at most: a block of a MiB with its header is not cut in two."""
READS_AT_ONCE = 4
"""A disk needs company: one read at a time leaves it idle while its bytes are copied. More gained nothing."""
BUFFERS_MAX = 4 * (READS_AT_ONCE + 1)
"""Of one reader: 40 MiB once they are all in use. A caller that finds none left is told so."""

assert PIECE_BYTES % PAGE_BYTES == 0


class Piece(NamedTuple):
    """One read: ``offset`` and ``length`` are whole pages."""

    fd: int
    offset: int
    length: int


def is_direct(fd: int) -> bool:
    """Whether a descriptor reads around the page cache, and hence only whole pages into aligned memory."""
    return bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)


def pieces_of(fd: int, offset: int, count: int) -> list[Piece]:
    """The reads, about equally long, that cover a range which begins with a page."""
    assert offset % PAGE_BYTES == 0 < count
    pages = -(-count // PAGE_BYTES)
    each = -(-pages // -(-pages * PAGE_BYTES // PIECE_BYTES))
    return [Piece(fd, offset + at * PAGE_BYTES, min(each, pages - at) * PAGE_BYTES) for at in range(0, pages, each)]


class PageReader:
    """Thread-safe. ``buffers_max``: of PIECE_BYTES each, made when they are first needed."""

    def __init__(self, buffers_max: int = BUFFERS_MAX) -> None:
        self._idle: list[memoryview] = []
        self._unmade = buffers_max
        self._lock = threading.Lock()

    def read(self, pieces: Sequence[Piece]) -> Generator[memoryview | None]:
        """The bytes of each piece, in order; to be closed. A view is the caller's until the next is asked for.

        It is shorter than asked where the file ends or cannot be read. None, and nothing more: no buffer is left.
        """
        buffers = self._take(min(len(pieces), READS_AT_ONCE + 1))
        try:
            if not buffers:
                yield None
            elif len(buffers) == 1:
                for piece in pieces:
                    yield _read(buffers[0], piece)
            else:
                yield from _read_ahead(buffers, pieces)
        finally:
            with self._lock:
                self._idle += buffers

    def _take(self, count: int) -> list[memoryview]:
        with self._lock:
            taken = [self._idle.pop() for _ in range(min(count, len(self._idle)))]
            missing = min(count - len(taken), self._unmade)
            self._unmade -= missing
        return taken + [_new_buffer() for _ in range(missing)]


def _new_buffer() -> memoryview:
    return memoryview(mmap.mmap(-1, PIECE_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


def _read_ahead(buffers: Sequence[memoryview], pieces: Sequence[Piece]) -> Generator[memoryview]:
    """While the caller has one buffer, the others are read into."""
    under_way: deque[tuple[memoryview, Future[memoryview]]] = deque()
    spare = buffers[0]
    waiting = iter(pieces)
    with ThreadPoolExecutor(len(buffers) - 1, "read") as threads:
        for buffer, piece in zip(buffers[1:], waiting, strict=False):
            under_way.append((buffer, threads.submit(_read, buffer, piece)))
        while under_way:
            buffer, reading = under_way.popleft()
            view = reading.result()
            for piece in islice(waiting, 1):
                under_way.append((spare, threads.submit(_read, spare, piece)))
            spare = buffer
            yield view


def _read(buffer: memoryview, piece: Piece) -> memoryview:
    """What the file gave of a piece: all, or less where it ends or fails."""
    done = 0
    while done < piece.length and done % PAGE_BYTES == 0:
        try:
            count = os.preadv(piece.fd, [buffer[done : piece.length]], piece.offset + done)
        except OSError:
            break
        if not count:
            break
        done += count
    return buffer[:done]
