"""The watermark: free space that a volume leaves to whatever else lies on its file system.

Owns the question whether another segment file may be made. Does not know blocks, classes or what is evicted.
Invariants: no file is made that would leave less than ``free_min_bytes``; what the volume's own capacity takes never
brings it there (the mark yields to the capacity), so that below it others filled the disk; what was asked once is asked
anew the next time: nothing has to be told that space is back.
"""

from __future__ import annotations

import logging
from pathlib import Path

from kvstore.daemon.files import Files
from kvstore.errors import VolumeError
from kvstore.limits import FREE_MIN_BYTES_MAX, FREE_MIN_SHARE
from kvstore.units import format_bytes_short

UNKNOWN = 2**62
"""Free bytes where the file system does not tell: growing is tried, and fails by itself."""

log = logging.getLogger(__name__)


def free_min_of(path: Path, space: tuple[int, int], capacity_bytes: int, asked_bytes: int | None) -> int:
    """Bytes to leave free on a file system. ``space``: its free bytes, and all that could be used of it.

    None asked: a hundredth of it, at most 10 GiB, and not what the capacity needs. Raises VolumeError if what was asked
    and the capacity together can never be had.
    """
    _, usable_bytes = space
    if asked_bytes is None:
        share_bytes = min(int(usable_bytes * FREE_MIN_SHARE), FREE_MIN_BYTES_MAX)
        return max(0, min(share_bytes, usable_bytes - capacity_bytes))
    if asked_bytes and asked_bytes + capacity_bytes > usable_bytes:
        raise VolumeError(
            f"a capacity of {format_bytes_short(capacity_bytes)} and {format_bytes_short(asked_bytes)} left free are "
            f"more than the file system of {path} ({format_bytes_short(usable_bytes)}): lower one of them"
        )
    return asked_bytes


class Watermark:
    """Of one volume. ``free_min_bytes`` 0: its files may fill the file system."""

    def __init__(self, files: Files, path: Path, free_min_bytes: int = 0) -> None:
        self._files = files
        self._path = path
        self.free_min_bytes = free_min_bytes
        self._low = False

    def free_bytes(self) -> int:
        """Free for this process on the file system now."""
        try:
            return self._files.space(self._path)[0]
        except OSError as error:
            log.warning("free_space_unknown path=%s problem=%r", self._path, error)
            return UNKNOWN

    def room_bytes(self) -> int:
        """What may be taken now without going below the mark."""
        return max(0, self.free_bytes() - self.free_min_bytes)

    def is_low(self) -> bool:
        """Whether less than the minimum is free: others have filled the file system."""
        return bool(self.free_min_bytes) and self.free_bytes() < self.free_min_bytes

    def allows(self, file_bytes: int) -> bool:
        """Whether a file of a size may be made now without going below the mark."""
        if not self.free_min_bytes:
            return True
        free_bytes = self.free_bytes()
        low = free_bytes - file_bytes < self.free_min_bytes
        if low != self._low:
            self._low = low
            event = "no_new_segments" if low else "new_segments_again"
            log.warning("%s path=%s free=%d free_min=%d", event, self._path, free_bytes, self.free_min_bytes)
        return not low
