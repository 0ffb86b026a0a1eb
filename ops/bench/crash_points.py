"""Where a daemon can be killed: named points of its file operations and of its index.

Owns the points and how each is reached: the methods of ``Files`` and ``Index`` are wrapped in this process, so that the
daemon itself has no hook. Invariants: only a process that was made to be killed is ever armed; the point is told to the
outside before the process ends; nothing of the process runs after it.
"""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kvstore.daemon.files import Files
from kvstore.daemon.index import Index
from kvstore.daemon.ledger import Ledger
from kvstore.daemon.purger import Purger
from kvstore.daemon.record import HEADER_BYTES, MARK_OFFSET, RECORD_ALIGN, RECORD_MAGIC
from kvstore.daemon.shard import Shard

POINTS: dict[str, int] = {
    "record.before": 40,
    "record.header": 40,
    "record.half": 40,
    "record.after": 40,
    "index.before": 60,
    "index.after": 60,
    "mark.before": 40,
    "mark.after": 40,
    "removal.marked": 12,
    "sync.before": 20,
    "sync.after": 20,
    "seal.before": 6,
    "seal.after": 6,
    "recycle.before": 12,
    "recycle.half": 12,
    "recycle.after": 12,
    "create.before": 12,
    "create.header": 12,
    "create.rename": 12,
    "create.after": 12,
    "catalog.before": 1,
    "catalog.after": 1,
    "order.before": 2,
    "order.deleted": 2,
    "order.erased": 2,
    "order.after": 2,
    "erase.before": 60,
    "erase.after": 60,
    "compaction.before": 3,
    "compaction.swap": 3,
    "compaction.swapped": 3,
    "compaction.after": 3,
}
"""Each with the latest hit at which it may strike. ``recycle`` is the write of a segment's next generation; ``order`` a
purge order: written down, then its blocks deleted, then their bytes erased, then done. ``removal.marked``: records are
dead on disk, and the index does not know it yet.
"""
GROWING = tuple(point for point in POINTS if point.startswith("create"))
"""Reached only while a store still makes files."""


def kind_of(data: memoryview, offset: int) -> str:
    """What a write is, by where it goes and how it begins."""
    if offset == 0:
        return "recycle"
    if offset % RECORD_ALIGN == 0:
        return "record" if data[: len(RECORD_MAGIC)] == RECORD_MAGIC else "payload"
    if offset % RECORD_ALIGN == MARK_OFFSET:
        return "mark"
    return "seal" if offset < RECORD_ALIGN else "payload"


class Executioner:
    """Ends this process at the ``hits``-th time that ``point`` is reached, after writing its name to ``tell``.

    It counts from ``wake`` on, or at once.
    """

    def __init__(self, point: str, hits: int, tell: Path, *, is_awake: bool) -> None:
        self._awake = is_awake
        self._point = point
        self._left = hits
        self._tell = tell
        self._drafts: set[int] = set()
        """Descriptors of segments that are being made."""

    def arm(self) -> None:
        """Wrap what leads to the points."""
        self._arm_writes()
        self._around(Files, "fdatasync", "sync.before", "sync.after")
        self._around(Files, "allocate", "create.before", "")
        self._around(Files, "rename", "create.rename", "create.after")
        self._around(Index, "write", "index.before", "index.after")
        self._around(Ledger, "flush_marks", "", "removal.marked")
        for method in ("rewrite", "compact"):
            self._around(Index, method, "compaction.before", "compaction.after")
        self._around(Purger, "_carry_out", "order.before", "order.after")
        self._around(Shard, "erase", "order.deleted", "order.erased")
        self._around(Files, "erase", "erase.before", "erase.after")
        self._arm_names()
        if self._point.startswith("compaction"):
            _compact_often()

    def wake(self, *_: object) -> None:
        """A signal handler: count from now on."""
        self._awake = True

    def reach(self, point: str) -> bool:
        """Count a point; whether it is time."""
        if point != self._point or not self._awake:
            return False
        self._left -= 1
        return self._left == 0

    def end(self) -> None:
        """Kill this process."""
        self._tell.write_text(self._point)
        os.kill(os.getpid(), signal.SIGKILL)

    def strike(self, point: str) -> None:
        if self.reach(point):
            self.end()

    def _arm_writes(self) -> None:
        write, open_file = Files.pwritev, Files.open

        def opened(files: Files, path: Path, *, create: bool = False) -> int:
            fd = open_file(files, path, create=create)
            (self._drafts.add if create else self._drafts.discard)(fd)
            return fd

        def pwritev(files: Files, fd: int, views: Sequence[memoryview], offset: int) -> int:
            data = memoryview(views[0])
            kind = kind_of(data, offset)
            if kind == "recycle" and fd in self._drafts:
                self._drafts.discard(fd)
                kind = "create"
            self.strike(f"{kind}.before")
            if self.reach(f"{kind}.header"):
                write(files, fd, [data[:HEADER_BYTES]], offset)
                self.end()
            if self.reach(f"{kind}.half"):
                whole = b"".join(views)
                write(files, fd, [memoryview(whole)[: len(whole) // 2 // 512 * 512]], offset)
                self.end()
            done = write(files, fd, views, offset)
            self.strike(f"{kind}.after")
            return done

        setattr(Files, "open", opened)  # noqa: B010 (mypy forbids to assign to a method)
        setattr(Files, "pwritev", pwritev)  # noqa: B010

    def _around(self, owner: type, method: str, before: str, after: str) -> None:
        inner: Callable[..., Any] = getattr(owner, method)

        def outer(*args: Any, **named: Any) -> Any:
            self.strike(before)
            answer = inner(*args, **named)
            self.strike(after)
            return answer

        setattr(owner, method, outer)

    def _arm_names(self) -> None:
        """Renames that do not go through ``Files``: those of the index's folder and of the catalog."""
        rename, replace = os.rename, os.replace

        def renamed(source: Any, target: Any, **named: Any) -> None:
            ours = os.path.basename(source).startswith("index")
            rename(source, target, **named)
            if ours:
                self.strike("compaction.swap" if str(target).endswith(".old") else "compaction.swapped")

        def replaced(source: Any, target: Any, **named: Any) -> None:
            ours = str(target).endswith("catalog.json")
            if ours:
                self.strike("catalog.before")
            replace(source, target, **named)
            if ours:
                self.strike("catalog.after")

        os.rename = renamed  # type: ignore[assignment]
        os.replace = replaced  # type: ignore[assignment]


def choose_point(chance: random.Random, *, growing: bool) -> tuple[str, int]:
    """A point and the hit at which it strikes; ``growing``: the store still makes files."""
    point = chance.choice(GROWING if growing else [point for point in POINTS if point not in GROWING])
    return point, chance.randint(1, POINTS[point])


def _compact_often() -> None:
    """Let the index be rewritten at every twentieth chance instead of when it has grown."""
    calls = 0

    def compact_if_due(index: Index) -> bool:
        nonlocal calls
        calls += 1
        if calls % 20:
            return False
        return index.compact()

    setattr(Index, "compact_if_due", compact_if_due)  # noqa: B010
