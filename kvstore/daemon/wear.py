"""What a volume's disk was made to write: bytes by day, and how often its capacity that is in a day.

Owns the file that keeps the books over restarts. Does not know what was written. Invariants: a start without the file,
or with one that cannot be read, begins new books; a kill loses what was written since the last save, no more; a clock
that was set loses no bytes, only their day.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvstore.daemon.files import write_atomically

DAY_S = 86_400
DAYS_KEPT = 32
"""Days that are told apart; what is older counts in the total only."""


class Wear:
    """Thread-safe. ``path`` is read at once and written by ``save``."""

    def __init__(self, path: Path, capacity_bytes: int, now_s: float) -> None:
        self._path = path
        self._capacity_bytes = capacity_bytes
        self._lock = threading.Lock()
        self._counted_bytes = 0
        """Of the shard's counter, which begins at zero with the process."""
        kept = _read(path)
        self._total_bytes: int = kept.get("total_bytes", 0)
        self._since_s: int = kept.get("since_s", int(now_s))
        self._days: dict[int, int] = {int(day): size for day, size in kept.get("days", {}).items()}
        self._class_day: int = kept.get("class_day", 0)
        self._classes: dict[int, int] = {int(byte): size for byte, size in kept.get("classes", {}).items()}

    def observe(self, written_bytes: int, now_s: float) -> None:
        """``written_bytes``: since the process began. What is new of it was written today."""
        with self._lock:
            today = int(now_s) // DAY_S
            added, self._counted_bytes = written_bytes - self._counted_bytes, written_bytes
            ahead = [day for day in self._days if day > today]
            self._days[today] = self._days.get(today, 0) + added + sum(self._days.pop(day) for day in ahead)
            self._total_bytes += added
            self._days = {day: size for day, size in self._days.items() if day > today - DAYS_KEPT}

    def count_class(self, class_byte: int, stored_bytes: int, now_s: float) -> None:
        """Bytes of new blocks of a class."""
        with self._lock:
            today = int(now_s) // DAY_S
            if today != self._class_day:
                self._class_day, self._classes = today, {}
            self._classes[class_byte] = self._classes.get(class_byte, 0) + stored_bytes

    def classes_today(self, now_s: float) -> dict[int, int]:
        """Bytes of new blocks by class, today."""
        with self._lock:
            return dict(self._classes) if self._class_day == int(now_s) // DAY_S else {}

    def report(self, now_s: float) -> dict[str, Any]:
        """``written_day_bytes``: of the last 24 hours, taking yesterday's as spread evenly."""
        with self._lock:
            today, second = divmod(int(now_s), DAY_S)
            yesterday_bytes = self._days.get(today - 1, 0) * (DAY_S - second) // DAY_S
            day_bytes = self._days.get(today, 0) + yesterday_bytes
            return {
                "written_day_bytes": day_bytes,
                "drive_writes_per_day": day_bytes / self._capacity_bytes,
                "written_total_bytes": self._total_bytes,
                "written_since_s": self._since_s,
            }

    def save(self) -> None:
        with self._lock:
            books = {
                "total_bytes": self._total_bytes,
                "since_s": self._since_s,
                "days": self._days,
                "class_day": self._class_day,
                "classes": self._classes,
            }
        with contextlib.suppress(OSError):  # the books are told anew by the next save
            write_atomically(self._path, json.dumps(books).encode() + b"\n")


def _read(path: Path) -> Mapping[str, Any]:
    """The books; none where there are none, or none that can be read."""
    try:
        books = json.loads(path.read_bytes())
        maps = [books["days"], books["classes"]]
        numbers = [books["total_bytes"], books["since_s"], books["class_day"]]
        for each in maps:
            numbers += [*map(int, each), *each.values()]
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return {}
    sound = all(type(number) is int and 0 <= number < 2**63 for number in numbers)
    return books if sound else {}
