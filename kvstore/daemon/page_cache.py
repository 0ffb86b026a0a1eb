"""What a volume does with the page cache: keep what was read and written there, or go around it.

Owns the choice, and finding out whether a file system lets a volume go around. Does not read or write blocks.
Invariant: a volume goes around the page cache only where that was tried: pages come back by O_DIRECT as written, and
what was written leaves memory once it is on disk.
"""

from __future__ import annotations

import logging
import mmap
import os
import tempfile
from enum import StrEnum
from pathlib import Path

from kvstore.daemon.files import Files, open_for_reading
from kvstore.direct import PAGE_BYTES

PROBE_BYTES = 2 * PAGE_BYTES

log = logging.getLogger(__name__)


class PageCache(StrEnum):
    """How a volume uses it, in the words of ``store stat``."""

    KEEP = "keep"
    BYPASS = "bypass"
    KEPT = "keep: its file system cannot be read around it"


def page_cache_of(directory: Path, files: Files, *, bypass: bool) -> PageCache:
    """What becomes of a volume that shall go around the page cache, or not; warns where it cannot. Raises OSError."""
    if not bypass:
        return PageCache.KEEP
    obstacle = _obstacle(directory, files)
    if not obstacle:
        return PageCache.BYPASS
    log.warning("page_cache_kept path=%s problem=%r: blocks are read and written through it", directory, obstacle)
    return PageCache.KEPT


def _obstacle(directory: Path, files: Files) -> str:
    """Why files here cannot be read and written around the page cache; empty if they can."""
    written = os.urandom(PROBE_BYTES)
    with tempfile.TemporaryFile(dir=directory, buffering=0) as file:
        fd = file.fileno()
        files.write(fd, [written], 0)
        files.fdatasync(fd)
        files.drop(fd, 0, 0)
        if files.resident_pages(fd, 0, PROBE_BYTES):
            return "what was written stays in memory"
        with mmap.mmap(-1, PROBE_BYTES) as memory:
            try:
                direct = open_for_reading(fd, direct=True)
            except OSError as error:
                return f"no O_DIRECT: {error.strerror}"
            try:
                files.read_into(direct, [memoryview(memory)], 0)
            except OSError as error:
                return f"no O_DIRECT of pages: {error.strerror}"
            finally:
                os.close(direct)
            return "" if memory[:] == written else "O_DIRECT reads other bytes than were written"
