"""What comes in, by hour and class: new bytes, and how far touches moved promises.

Owns the counts and the file that carries them over a restart. Does not know rules or capacity. Invariants: at most
HOURS_MAX hours are remembered, whatever the clock does; a crash loses what came since the last save, and nothing else
depends on it. The ledger's journal guards changes; who asks copies.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

from kvstore.daemon.files import write_atomically
from kvstore.promises import HOUR_S, ClassIngest

HOURS_MAX = 35 * 24
"""Hours that are remembered."""
_COUNTS = 4
_NOTHING = (0,) * _COUNTS


class Ingest:
    """``since_s``: when counting began; 0 where nothing was counted yet."""

    def __init__(self) -> None:
        self.since_s = 0
        self._hours: dict[int, dict[int, list[int]]] = {}
        """Hour since the epoch -> class byte -> bytes stored; byte-seconds by which touches lengthened the promises of
        blocks, and of whole segments; blocks stored.
        """
        self._hour = -1
        self._now: dict[int, list[int]] = {}

    def stored(self, class_byte: int, blocks: int, record_bytes: int, at_s: int) -> None:
        """New records of a class, bytes on disk."""
        counts = self._counts(class_byte, at_s)
        counts[0] += record_bytes
        counts[3] += blocks

    def lengthened(self, class_byte: int, byte_s: int, segment_byte_s: int, at_s: int) -> None:
        """Touches by a class: bytes times the seconds by which they are kept longer, of blocks and of segments."""
        counts = self._counts(class_byte, at_s)
        counts[1] += byte_s
        counts[2] += segment_byte_s

    def of_classes(self, now_s: int) -> dict[int, ClassIngest]:
        """What each class brought, by hour, the present one first; hours of a clock that went back count nothing."""
        now_hour = now_s // HOUR_S
        begun = min(self.since_s, now_s) if self.since_s else now_s
        hours = {
            hour: dict(counts) for hour, counts in list(self._hours.items()) if now_hour - HOURS_MAX < hour <= now_hour
        }
        first = min(hours, default=now_hour)
        found: dict[int, ClassIngest] = {}
        for class_byte in sorted({byte for counts in hours.values() for byte in counts}):
            rows = [hours.get(hour, {}).get(class_byte, _NOTHING) for hour in range(now_hour, first - 1, -1)]
            stored, lengthened, segments, blocks = (tuple(row[at] for row in rows) for at in range(_COUNTS))
            found[class_byte] = ClassIngest(stored, lengthened, segments, blocks, now_s, begun)
        return found

    def save(self, path: Path) -> None:
        """For the next start. A disk that does not take it costs only these counts."""
        hours = {
            str(hour): {str(byte): values for byte, values in dict(counts).items()}
            for hour, counts in list(self._hours.items())
        }
        with contextlib.suppress(OSError):
            write_atomically(path, json.dumps({"since_s": self.since_s, "hours": hours}).encode() + b"\n")

    @classmethod
    def load(cls, path: Path) -> Ingest:
        """What was saved; nothing where nothing was, or nothing that can be read."""
        found = cls()
        try:
            document: Any = json.loads(path.read_bytes())
            since_s = _whole(document["since_s"])
            hours = {
                _whole(int(hour)): {_whole(int(byte), 255): _counted(values) for byte, values in counts.items()}
                for hour, counts in document["hours"].items()
            }
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return found
        found.since_s = since_s
        found._hours = dict(sorted(hours.items())[-HOURS_MAX:])
        return found

    def _counts(self, class_byte: int, at_s: int) -> list[int]:
        hour = at_s // HOUR_S
        if hour != self._hour:
            self._turn(hour, at_s)
        counts = self._now.get(class_byte)
        if counts is None:
            counts = self._now[class_byte] = [0, 0, 0, 0]
        return counts

    def _turn(self, hour: int, at_s: int) -> None:
        """Another hour: what is too old, or of a clock that was wrong, goes."""
        self._hours = {known: counts for known, counts in self._hours.items() if hour - HOURS_MAX < known <= hour}
        self._hour, self._now = hour, self._hours.setdefault(hour, {})
        self.since_s = min(self.since_s or at_s, at_s)


def _counted(values: object) -> list[int]:
    if not isinstance(values, list) or len(values) != _COUNTS:
        raise ValueError(f"{values!r} are not {_COUNTS} counts")
    return [_whole(value) for value in values]


def _whole(value: object, most: int = 2**80) -> int:
    if type(value) is not int or not 0 <= value <= most:
        raise ValueError(f"{value!r} is not a count")
    return value
