"""Files that lose what was not synced: a layer that remembers every write since the last flush, and cuts the power.

Owns what a disk may hold after a power cut. Does not know segments. Invariants: real files are written all the time,
so a node reads its own writes; at the cut each file keeps what was flushed, and of each later write any subset of its
sectors, every sector whole and as it was at some moment; files made or removed whose directory was not flushed may be
there or not.

    flushed image --write 1--write 2--write 3--> what the node saw
    after the cut, sector by sector: flushed, or as after write 1, 2 or 3
"""

from __future__ import annotations

import contextlib
import os
import random
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvstore.daemon.files import Files

SECTOR_BYTES = 512
PAGE_BYTES = 4096


class PowerCut(BaseException):
    """The moment has come: what no handler of the daemon catches."""


@dataclass(slots=True)
class _Write:
    """One write since the last flush: where, what was there, what is there now."""

    offset: int
    before: bytes
    after: bytes


@dataclass(slots=True)
class _Remembered:
    """One file. ``flushed_once``: its length is on disk."""

    path: Path
    writes: list[_Write] = field(default_factory=list)
    flushed_once: bool = True


class PowerFiles(Files):
    """Real files until ``cut_after`` operations that change something have been done; then PowerCut, for ever.

    Thread-safe. ``cut`` is called once nobody writes any more.
    """

    def __init__(self, chance: random.Random, cut_after: int) -> None:
        self._chance = chance
        self._left = cut_after
        self._lock = threading.Lock()
        self._files: dict[int, _Remembered] = {}
        """By inode: a file keeps its writes when it is renamed, closed or opened again."""
        self._made: dict[Path, list[Path]] = {}
        """Names by directory that are not on disk yet, each with the name it had before."""
        self._removed: dict[Path, Path] = {}
        """Hiding places of files whose removal is not on disk yet, by name."""

    def open(self, path: Path, *, create: bool = False) -> int:
        if create:
            self._step()
        fd = super().open(path, create=create)
        with self._lock:
            remembered = self._files.setdefault(os.fstat(fd).st_ino, _Remembered(path, flushed_once=not create))
            remembered.path = path
            if create:
                self._made.setdefault(path.parent, []).append(path)
        return fd

    def pwritev(self, fd: int, views: Sequence[memoryview], offset: int) -> int:
        self._step()
        data = b"".join(views)
        with self._lock:
            before = os.pread(fd, len(data), offset)
            done = super().pwritev(fd, views, offset)
            write = _Write(offset, before.ljust(done, b"\0")[:done], data[:done])
            self._files[os.fstat(fd).st_ino].writes.append(write)
        return done

    def fdatasync(self, fd: int) -> None:
        self._step()
        with self._lock:
            remembered = self._files[os.fstat(fd).st_ino]
            remembered.writes.clear()
            remembered.flushed_once = True

    def allocate(self, fd: int, count: int) -> bool:
        self._step()
        return super().allocate(fd, count)

    def erase(self, fd: int, offset: int, count: int, *, overwrite: bool) -> None:
        """As writes of zeros: what a file system takes for zeros is lost with the power like any other change."""
        super().erase(fd, offset, count, overwrite=True)

    def rename(self, source: Path, target: Path) -> None:
        self._step()
        super().rename(source, target)
        with self._lock:
            self._files[target.stat().st_ino].path = target
            self._made.setdefault(target.parent, []).append(target)

    def unlink(self, path: Path) -> None:
        """Hidden instead of removed: until its directory is flushed it may come back."""
        self._step()
        with self._lock:
            hidden = path.with_name(f"{path.name}.removed-{len(self._removed)}")
            os.rename(path, hidden)
            self._removed[path] = hidden
            with contextlib.suppress(KeyError):
                self._files[hidden.stat().st_ino].path = hidden

    def sync_directory(self, path: Path) -> None:
        self._step()
        with self._lock:
            self._made.pop(path, None)
            for name, hidden in list(self._removed.items()):
                if name.parent == path:
                    hidden.unlink()
                    del self._removed[name]

    def cut(self) -> None:
        """Turn the files into what a disk may hold now."""
        for remembered in self._files.values():
            if remembered.path.exists():
                self._lose_writes(remembered)
        for name, hidden in self._removed.items():
            if self._chance.random() < 0.5 and not name.exists():
                os.rename(hidden, name)
            else:
                hidden.unlink()
        for names in self._made.values():
            if self._chance.random() < 0.5:
                for name in names:
                    name.unlink(missing_ok=True)

    def _step(self) -> None:
        with self._lock:
            self._left -= 1
            if self._left < 0:
                raise PowerCut

    def _lose_writes(self, remembered: _Remembered) -> None:
        """Sector by sector; pages stay whole in half of the cuts. How much is kept differs from file to file."""
        path, chance = remembered.path, self._chance
        if not remembered.flushed_once and chance.random() < 0.25:
            os.truncate(path, 0)
            return
        unit = chance.choice((SECTOR_BYTES, PAGE_BYTES))
        share = chance.choice((0.0, 0.1, 0.5, 0.9, 1.0))
        cache = bytearray(path.read_bytes())
        for write in reversed(remembered.writes):
            cache[write.offset : write.offset + len(write.before)] = write.before
        disk = bytearray(cache)
        for write in remembered.writes:
            end = write.offset + len(write.after)
            cache[write.offset : end] = write.after
            for at in range(write.offset // unit * unit, end, unit):
                if chance.random() < share:
                    disk[at : at + unit] = cache[at : at + unit]
        with path.open("r+b") as stream:
            stream.write(disk)
