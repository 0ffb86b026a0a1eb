"""What the machine can do without a store: memory copies, and files read and written as plainly as possible.

Owns the raw files and the buffers that all contenders of a case share. Does not know the store. Invariants: buffers are
touched before anything is measured; a file is written once before it is read or written for a measurement, so that its
extents exist; files lie in the folder that is measured.
"""

from __future__ import annotations

import mmap
import os
import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

FILL_BYTES = 8 * 1024 * 1024
DIRECT_READ_BYTES = 1024 * 1024
DIRECT_THREADS = 4
"""More give no more on the devices seen so far."""


class Buffers:
    """Page-aligned memory of ``count`` buffers of ``size`` bytes, touched."""

    def __init__(self, size: int, count: int, content: bytes = b"") -> None:
        self._memory = mmap.mmap(-1, size * count)
        whole = memoryview(self._memory)
        self.views = [whole[at * size : (at + 1) * size] for at in range(count)]
        self.size = size
        for view in self.views:
            view[:] = content or bytes(size)


class RawFile:
    """A file of ``size`` bytes in blocks of ``block_bytes``, all written, open for reading and writing."""

    def __init__(self, path: Path, fd: int, size: int) -> None:
        self.path = path
        self.fd = fd
        self.size = size
        self._at = 0

    @classmethod
    def create(cls, path: Path, size: int) -> RawFile:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        os.posix_fallocate(fd, 0, size)
        content = random.Random(1).randbytes(min(FILL_BYTES, size))
        for at in range(0, size, len(content)):
            os.pwrite(fd, content[: size - at], at)
        return cls(path, fd, size)

    def read_scattered(self, views: Sequence[memoryview], chosen: random.Random) -> None:
        """One ``preadv`` a view, each from a random block."""
        for view in views:
            at = chosen.randrange(self.size // len(view)) * len(view)
            if os.preadv(self.fd, [view], at) != len(view):
                raise OSError(f"{self.path} gave fewer bytes than asked")

    def write_on(self, views: Sequence[memoryview], *, sync: bool = False) -> None:
        """One ``pwrite`` a view, one behind the other and round again; ``sync`` ends with fdatasync."""
        for view in views:
            if self._at + len(view) > self.size:
                self._at = 0
            if os.pwrite(self.fd, view, self._at) != len(view):
                raise OSError(f"{self.path} took fewer bytes than given")
            self._at += len(view)
        if sync:
            os.fdatasync(self.fd)

    def close(self) -> None:
        os.close(self.fd)
        self.path.unlink(missing_ok=True)


class DirectReader:
    """Sequential O_DIRECT reads of a file in pieces of 1 MiB, by four threads. Raises OSError where there is none."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
        self._threads = ThreadPoolExecutor(DIRECT_THREADS, "direct")
        self._size = os.fstat(self._fd).st_size
        self._at = 0

    def read(self, views: Sequence[memoryview]) -> None:
        """Fill page-aligned views with what comes next in the file."""
        jobs = []
        for view in views:
            if self._at + len(view) > self._size:
                self._at = 0
            for begin in range(0, len(view), DIRECT_READ_BYTES):
                jobs.append((view[begin : begin + DIRECT_READ_BYTES], self._at + begin))
            self._at += len(view)
        for got, (view, _) in zip(self._threads.map(self._read_one, jobs), jobs, strict=True):
            if got != len(view):
                raise OSError("an O_DIRECT read came back short")

    def _read_one(self, job: tuple[memoryview, int]) -> int:
        view, at = job
        return os.preadv(self._fd, [view], at)

    def close(self) -> None:
        self._threads.shutdown()
        os.close(self._fd)


def copy(sources: Sequence[memoryview], targets: Sequence[memoryview]) -> None:
    """memcpy, buffer by buffer."""
    for source, target in zip(sources, targets, strict=True):
        target[:] = source


def drop_cache(folder: Path) -> None:
    """Write back and drop from the page cache every file under a folder."""
    for path in folder.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fdatasync(fd)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)


def device_read_bytes(pids: Sequence[int]) -> int:
    """Bytes that processes have caused to be read from a device."""
    total = 0
    for pid in pids:
        lines = Path(f"/proc/{pid}/io").read_text().splitlines()
        total += next(int(line.split()[1]) for line in lines if line.startswith("read_bytes:"))
    return total
