"""Reading a file from its device, leaving the page cache as it was.

Owns the choice of how: O_DIRECT where the file system has it; else a read whose pages are dropped again if they were
not there before. Does not know what the bytes mean. Invariants: offsets and lengths are whole pages; what somebody else
has in the page cache stays there.
"""

from __future__ import annotations

import contextlib
import os

from kvstore.daemon.files import Files, open_for_reading
from kvstore.direct import PAGE_BYTES


class UncachedFile:
    """One open file, read on the side. The caller's descriptor stays the caller's; ``close`` ends this one."""

    def __init__(self, files: Files, fd: int) -> None:
        self._files = files
        self._fd = fd
        self._direct = _open_direct(fd)

    @property
    def direct(self) -> bool:
        """Whether reads come from the device itself, whatever the page cache holds."""
        return self._direct is not None

    def read_into(self, view: memoryview, offset: int) -> int:
        """Fill a view of page-aligned memory; returns the bytes, fewer only at the end of the file. Raises OSError."""
        if self._direct is not None:
            return self._files.read_into(self._direct, [view], offset)
        there = _resident_bytes(self._fd, view, offset)
        done = self._files.read_into(self._fd, [view], offset)
        if there is not None and there < done:
            with contextlib.suppress(OSError):
                os.posix_fadvise(self._fd, offset + there, done - there, os.POSIX_FADV_DONTNEED)
        return done

    def close(self) -> None:
        if self._direct is not None:
            os.close(self._direct)
            self._direct = None


def _open_direct(fd: int) -> int | None:
    """Another descriptor of an open file, around the page cache; None where the file system has no such thing."""
    try:
        return open_for_reading(fd, direct=True)
    except OSError:
        return None


def _resident_bytes(fd: int, view: memoryview, offset: int) -> int | None:
    """Bytes from ``offset`` on that the page cache holds, in whole pages; None where the kernel cannot say."""
    try:
        return os.preadv(fd, [view], offset, os.RWF_NOWAIT) // PAGE_BYTES * PAGE_BYTES
    except BlockingIOError:
        return 0
    except OSError:
        return None
