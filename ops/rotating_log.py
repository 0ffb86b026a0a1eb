"""A log file that cannot grow without bound: PATH, and PATH.1 with what came before.

Owns the two files. Does not know what is written. Invariant: together they hold at most twice ``bytes_max`` and one
write more. A disk that refuses costs lines, which are counted; writing never raises.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO

LOG_BYTES_MAX = 8 * 1024 * 1024


class RotatingLog:
    """Appends bytes; when the file is full it becomes PATH.1 and a new one begins. Not thread-safe."""

    def __init__(self, path: Path, file: BinaryIO, bytes_max: int = LOG_BYTES_MAX) -> None:
        self.path = path
        self._file = file
        self._bytes_max = bytes_max
        self._size = file.tell()
        self._marked = self._size
        self.dropped_bytes = 0

    @classmethod
    def open(cls, path: Path, bytes_max: int = LOG_BYTES_MAX) -> RotatingLog:
        """Open for appending; the directory is made."""
        path.parent.mkdir(parents=True, exist_ok=True)
        return cls(path, path.open("ab", buffering=0), bytes_max)

    def write(self, data: bytes) -> None:
        if self._size and self._size + len(data) > self._bytes_max:
            self._rotate()
        try:
            written = self._file.write(data)
        except OSError:
            written = 0
        self._size += written
        self.dropped_bytes += len(data) - written

    def mark(self) -> None:
        """What comes from here on is what ``tail`` shows."""
        self._marked = self._size

    def tail(self, lines: int, bytes_max: int = 16_384) -> list[str]:
        """The last lines since the mark, from at most ``bytes_max`` bytes; none where the file cannot be read."""
        try:
            with self.path.open("rb") as file:
                file.seek(max(self._marked, os.fstat(file.fileno()).st_size - bytes_max))
                return file.read(bytes_max).decode(errors="replace").splitlines()[-lines:]
        except OSError:
            return []

    def close(self) -> None:
        self._file.close()

    def _rotate(self) -> None:
        """Begin a new file; where that fails the old one goes on, until its size asks again."""
        try:
            self.path.replace(self.path.with_name(self.path.name + ".1"))
            file = self.path.open("ab", buffering=0)
        except OSError:
            self._size = self._marked = 0
            return
        self._file.close()
        self._file, self._size, self._marked = file, 0, 0
