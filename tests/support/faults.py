"""A file system that fails on demand, behind the daemon's own seam."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from pathlib import Path

from kvstore.daemon.files import Files
from tests.support.waiting import WAIT_S

_FLUSH = b"flush"
_HEADER_BYTES = 256


class FaultyFiles(Files):
    """Real files, with faults. ``errors`` maps an operation to the errno that it raises while it is there.

    ``only``: faults hit this file name only. ``transfer_max``: bytes that one read or write call moves at most.
    ``write_budget``: bytes that may still be written before ``errors["pwritev"]`` strikes; None: at once.
    """

    def __init__(self) -> None:
        self.errors: dict[str, int] = {}
        self.only: str | None = None
        self.transfer_max: int | None = None
        self.write_budget: int | None = None
        self.calls: dict[str, int] = {}
        self._names: dict[int, str] = {}

    def open(self, path: Path, *, create: bool = False) -> int:
        self._strike("create" if create else "open", path.name)
        fd = super().open(path, create=create)
        self._names[fd] = path.name
        return fd

    def preadv(self, fd: int, views: Sequence[memoryview], offset: int) -> int:
        self._strike("preadv", self._names.get(fd))
        return super().preadv(fd, self._short(views), offset)

    def pwritev(self, fd: int, views: Sequence[memoryview], offset: int) -> int:
        if self.write_budget is None or self.write_budget <= 0:
            self._strike("pwritev", self._names.get(fd))
        short = self._short(views, self.write_budget if "pwritev" in self.errors else None)
        done = super().pwritev(fd, short, offset)
        if self.write_budget is not None:
            self.write_budget -= done
        return done

    def fdatasync(self, fd: int) -> None:
        self._strike("fdatasync", self._names.get(fd))
        super().fdatasync(fd)

    def allocate(self, fd: int, count: int) -> bool:
        self._strike("allocate", self._names.get(fd))
        return super().allocate(fd, count)

    def rename(self, source: Path, target: Path) -> None:
        self._strike("rename", target.name)
        super().rename(source, target)
        self._names = {fd: target.name if name == source.name else name for fd, name in self._names.items()}

    def unlink(self, path: Path) -> None:
        self._strike("unlink", path.name)
        super().unlink(path)

    def _strike(self, operation: str, name: str | None) -> None:
        self.calls[operation] = self.calls.get(operation, 0) + 1
        number = self.errors.get(operation)
        if number is not None and self.only in (None, name):
            raise OSError(number, os.strerror(number))

    def _short(self, views: Sequence[memoryview], budget: int | None = None) -> Sequence[memoryview]:
        limits = [limit for limit in (self.transfer_max, budget) if limit is not None]
        if not limits:
            return views
        return [views[0][: max(1, min(limits))]]


class GatedFiles(FaultyFiles):
    """A file system that stops in the middle of a write or before a flush, until it is told to go on.

    A write is known by the key of its first record; half of that record's header is written by then.
    """

    def __init__(self) -> None:
        super().__init__()
        self._gates: dict[bytes, Gate] = {}

    def hold(self, key: bytes, error: int = 0) -> Gate:
        """Stop the next write that begins with this key's record; ``error``: it then fails with that."""
        return self._gates.setdefault(key, Gate(error))

    def hold_flush(self, error: int = 0) -> Gate:
        """Stop before the next flush, as ``hold``."""
        return self.hold(_FLUSH, error)

    def pwritev(self, fd: int, views: Sequence[memoryview], offset: int) -> int:
        head = bytes(views[0][:_HEADER_BYTES])
        key = next((key for key in self._gates if key in head), None)
        if key is None:
            return super().pwritev(fd, views, offset)
        done = super().pwritev(fd, [views[0][: _HEADER_BYTES // 2]], offset)
        self._gates.pop(key).stop()
        return done

    def fdatasync(self, fd: int) -> None:
        gate = self._gates.pop(_FLUSH, None)
        if gate is not None:
            gate.stop()
        super().fdatasync(fd)


class Gate:
    """One stop."""

    def __init__(self, error: int = 0) -> None:
        self._error = error
        self._reached = threading.Event()
        self._open = threading.Event()

    def stop(self) -> None:
        self._reached.set()
        if not self._open.wait(WAIT_S):
            raise AssertionError("nobody opened the gate")
        if self._error:
            raise OSError(self._error, os.strerror(self._error))

    def wait(self) -> None:
        """Until somebody stands before it."""
        assert self._reached.wait(WAIT_S), "nobody came to the gate"

    def open(self) -> None:
        self._open.set()
