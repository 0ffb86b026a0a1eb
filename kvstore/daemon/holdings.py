"""What each segment holds, as running totals, so that choosing a victim costs no pass over all rows.

Owns bytes, living bytes and the promise of each segment. Does not know rows: the presence map says what came, went and
was touched, and counts anew what is in doubt. Invariant: totals that are not in doubt are what a count would give. They
are in doubt from the first deadline on, when the clock goes back, and where a row went whose part in them is unknown.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

NEVER_S = 2**63 - 1
"""No row will expire."""


@dataclass(slots=True)
class Holding:
    """Bytes are whole records on disk. ``promise_until_s``: the last deadline by touches alone, 0 without rows.

    As counted at ``counted_s``; the first row expires no earlier than at ``next_s``.
    """

    record_bytes: int = 0
    alive_bytes: int = 0
    promise_until_s: int = 0
    counted_s: int = 0
    next_s: int = NEVER_S
    doubted: bool = False

    def is_true_at(self, now_s: int) -> bool:
        return not self.doubted and self.counted_s <= now_s < self.next_s


class Holdings:
    """By segment number; a segment without rows has no entry. Guarded by whoever guards the map."""

    def __init__(self) -> None:
        self._by_segment: dict[int, Holding] = {}

    def __getitem__(self, segment: int) -> Holding:
        return self._by_segment.get(segment) or Holding()

    def add(self, segment: int, record_bytes: int, first_s: int, last_s: int) -> None:
        """Rows came whose deadlines lie from ``first_s`` to ``last_s``."""
        held = self._by_segment.setdefault(segment, Holding())
        held.record_bytes += record_bytes
        held.alive_bytes += record_bytes
        held.next_s = min(held.next_s, first_s)
        held.promise_until_s = max(held.promise_until_s, last_s)

    def remove(self, segment: int, record_bytes: int) -> None:
        """Rows went: of these nobody knows whether they were alive, and whose the promise was."""
        held = self._by_segment[segment]
        held.record_bytes -= record_bytes
        held.doubted = True
        if not held.record_bytes:
            del self._by_segment[segment]

    def extend(self, segment: int, until_s: int) -> None:
        """A living row was touched: it will expire later."""
        held = self._by_segment[segment]
        held.promise_until_s = max(held.promise_until_s, until_s)

    def doubt(self, segment: int) -> None:
        self._by_segment[segment].doubted = True

    def doubt_all(self) -> None:
        for held in self._by_segment.values():
            held.doubted = True

    def in_doubt(self, now_s: int) -> set[int]:
        """Segments to count before their totals are used."""
        return {number for number, held in self._by_segment.items() if not held.is_true_at(now_s)}

    def count(self, segment: int, alive_bytes: int, promise_until_s: int, now_s: int, next_s: int) -> None:
        """What a pass over a segment's rows found."""
        held = self._by_segment[segment]
        held.alive_bytes, held.promise_until_s = alive_bytes, promise_until_s
        held.counted_s, held.next_s, held.doubted = now_s, next_s, False

    def items(self) -> Iterator[tuple[int, Holding]]:
        yield from self._by_segment.items()
