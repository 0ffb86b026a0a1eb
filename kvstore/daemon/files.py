"""File operations of the daemon: the one seam between the store and the operating system.

Owns the retry of short reads and writes, and nothing else. Does not know what the bytes mean. Tests pass a subclass
that injects ENOSPC, EIO and short transfers. Invariant: a write that returns has handed every byte to the kernel.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
from collections.abc import Sequence
from pathlib import Path

from kvstore.store import Buffer

IOV_MAX = 1000
"""Buffers in one gather write; Linux allows 1024."""

_SYNC_FILE_RANGE_WRITE = 2
_sync_file_range = getattr(ctypes.CDLL(None), "sync_file_range", None)
if _sync_file_range is not None:
    _sync_file_range.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
_FALLOC_ZERO_RANGE = 0x10
_fallocate = getattr(ctypes.CDLL(None), "fallocate", None)
if _fallocate is not None:
    _fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
_SYS_CACHESTAT = 451
_syscall = getattr(ctypes.CDLL(None), "syscall", None)
_ZEROS = memoryview(bytes(1024 * 1024))
_UNSUPPORTED = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)


class _Range(ctypes.Structure):
    _fields_ = (("offset", ctypes.c_uint64), ("count", ctypes.c_uint64))


class _CacheStat(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_uint64) for name in ("cached", "dirty", "writeback", "evicted", "recently"))


class Files:
    """Positional file I/O. Every method raises OSError as the kernel says it."""

    def open(self, path: Path, *, create: bool = False) -> int:
        flags = os.O_RDWR | os.O_CLOEXEC
        return os.open(path, flags | os.O_CREAT | os.O_EXCL if create else flags, 0o600)

    def close(self, fd: int) -> None:
        os.close(fd)

    def read_into(self, fd: int, buffers: Sequence[bytearray | memoryview], offset: int) -> int:
        """Fill the buffers in order from ``offset``; returns the bytes read, fewer only at the end of the file."""
        views = [memoryview(buffer).cast("B") for buffer in buffers if len(buffer)]
        done = 0
        while views:
            count = self.preadv(fd, views[:IOV_MAX], offset + done)
            if count == 0:
                break
            done += count
            views = _advance(views, count)
        return done

    def read(self, fd: int, count: int, offset: int) -> bytes:
        """Up to ``count`` bytes; fewer only at the end of the file."""
        buffer = bytearray(count)
        return bytes(buffer[: self.read_into(fd, [buffer], offset)])

    def write(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        """Write the buffers (of bytes) one after another at ``offset``; returns the bytes written: all of them."""
        views = [buffer if isinstance(buffer, memoryview) else memoryview(buffer) for buffer in buffers if len(buffer)]
        left_bytes = sum(map(len, views))
        done = 0
        while left_bytes:
            count = self.pwritev(fd, views[:IOV_MAX], offset + done)
            if count == 0:
                raise OSError(errno.EIO, "the device accepted no bytes")
            done += count
            left_bytes -= count
            if left_bytes:
                views = _advance(views, count)
        return done

    def preadv(self, fd: int, views: Sequence[memoryview], offset: int) -> int:
        return os.preadv(fd, views, offset)

    def pwritev(self, fd: int, views: Sequence[memoryview], offset: int) -> int:
        return os.pwritev(fd, views, offset)

    def hasten(self, fd: int, offset: int, count: int) -> None:
        """Let the device begin with dirty bytes, so that a later ``fdatasync`` finds less to do. Promises nothing."""
        if _sync_file_range is not None:
            _sync_file_range(fd, offset, count, _SYNC_FILE_RANGE_WRITE)

    def read_ahead(self, fd: int, offset: int, count: int) -> None:
        """Let the device begin to read into the page cache. Promises nothing."""
        with contextlib.suppress(OSError):
            os.posix_fadvise(fd, offset, count, os.POSIX_FADV_WILLNEED)

    def resident_pages(self, fd: int, offset: int, count: int) -> int | None:
        """How many pages of a range the page cache holds; None where the kernel does not say (before Linux 6.5)."""
        found = _CacheStat()
        wanted = _Range(offset, count)
        if _syscall is None or _syscall(_SYS_CACHESTAT, fd, ctypes.byref(wanted), ctypes.byref(found), 0):
            return None
        return int(found.cached)

    def expect_no_order(self, fd: int) -> None:
        """Nothing is to be read beyond what is asked for. Promises nothing."""
        with contextlib.suppress(OSError):
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)

    def drop(self, fd: int, offset: int, count: int) -> None:
        """Take clean pages out of the page cache; ``count`` 0: to the end of the file. Promises nothing."""
        with contextlib.suppress(OSError):
            os.posix_fadvise(fd, offset, count, os.POSIX_FADV_DONTNEED)

    def fdatasync(self, fd: int) -> None:
        os.fdatasync(fd)

    def allocate(self, fd: int, count: int) -> bool:
        """Reserve ``count`` bytes of disk for the file; False where the file system cannot (the file
        is extended only).
        """
        try:
            os.posix_fallocate(fd, 0, count)
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise
            os.ftruncate(fd, count)
            return False
        return True

    def erase(self, fd: int, offset: int, count: int, *, overwrite: bool) -> None:
        """Make bytes within a file zeros; its disk stays reserved.

        ``overwrite``: by writing them, wherever the device puts that; else the file system only takes them for zeros
        from now on (at once, whatever the count), where it can.
        """
        if overwrite or _fallocate is None or _fallocate(fd, _FALLOC_ZERO_RANGE, offset, count):
            for begin in range(offset, offset + count, len(_ZEROS)):
                self.write(fd, [_ZEROS[: offset + count - begin]], begin)

    def space(self, path: Path) -> tuple[int, int]:
        """Bytes of the file system of a path: free for this process, and all that it could ever use of it."""
        facts = os.statvfs(path)
        usable = facts.f_blocks - facts.f_bfree + facts.f_bavail
        return facts.f_bavail * facts.f_frsize, usable * facts.f_frsize

    def rename(self, source: Path, target: Path) -> None:
        os.rename(source, target)

    def unlink(self, path: Path) -> None:
        os.unlink(path)

    def sync_directory(self, path: Path) -> None:
        """Make the names in a directory durable."""
        sync_directory(path)


class FilesToRead(Files):
    """Files that are only looked at."""

    def open(self, path: Path, *, create: bool = False) -> int:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)


def open_for_reading(fd: int, *, direct: bool = False) -> int:
    """Another descriptor of an open file, that cannot write; ``direct``: around the page cache. Raises OSError."""
    return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC | (os.O_DIRECT if direct else 0))


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_atomically(path: Path, data: bytes) -> None:
    """Replace a small file as a whole: a reader, also after power loss, sees the old bytes or the new ones."""
    temporary = path.with_name(path.name + ".tmp")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]
        os.fsync(fd)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    finally:
        os.close(fd)
    os.replace(temporary, path)
    sync_directory(path.parent)


def disk_bytes(path: Path) -> int:
    """Physical bytes of a file or a whole directory, as ``du`` counts them; names that vanish
    meanwhile count nothing.
    """
    total = 0
    try:
        total += path.stat().st_blocks * 512
        if path.is_dir():
            with os.scandir(path) as entries:
                total += sum(disk_bytes(Path(entry.path)) for entry in entries)
    except FileNotFoundError:
        return total
    return total


def _advance(views: Sequence[memoryview], count: int) -> list[memoryview]:
    """What is left of the buffers after ``count`` bytes of them."""
    at = 0
    while at < len(views) and count >= len(views[at]):
        count -= len(views[at])
        at += 1
    left = list(views[at:])
    if count:
        left[0] = left[0][count:]
    return left
