"""A small file of secrets: read whole, with who else may read it, and noticed when it changes.

Owns how such a file is opened. Does not know what stands in it, nor which permissions its reader asks for. Invariant:
reading never waits, and never takes more than it is told.
"""

from __future__ import annotations

import os
from pathlib import Path


def read_secret_file(path: Path, bytes_max: int) -> tuple[bytes, int]:
    """The first ``bytes_max + 1`` bytes (so that a file that is too long shows), and the file's mode bits.

    Raises OSError, and ValueError for what is no regular file.
    """
    if not path.is_file():
        raise ValueError("it is no file")  # opening a pipe would wait
    with path.open("rb") as file:
        return file.read(bytes_max + 1), os.fstat(file.fileno()).st_mode


def stamp_of(path: Path) -> tuple[int, ...]:
    """What changes when a file is replaced or edited; empty if there is none."""
    try:
        status = path.stat()
    except OSError:
        return ()
    return status.st_ino, status.st_size, status.st_mtime_ns, status.st_mode
