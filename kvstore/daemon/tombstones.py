"""Why blocks are gone: a bounded memory of removed keys, so that a miss can say its reason.

Owns the reasons and their bound. Does not know keys beyond their fingerprints (a reason given for another key with the
same 8 bytes would be wrong, and harmless). Invariant: never more than the bound; the longest buried are forgotten.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import numpy.typing as npt

from kvstore.daemon.fingerprints import FingerprintTable, Words, grown

_QUEUE_SHARE = 16
"""Of the bound, the longest buried are put in order at once, and forgotten as others come."""


@dataclass(frozen=True, slots=True)
class Tombstone:
    """Why (a ``Presence`` value) and when a block was removed."""

    reason: int
    when_s: int


class Tombstones:
    """Fingerprints to tombstones. Guarded by the shard's lock."""

    def __init__(self, count_max: int) -> None:
        self.count_max = count_max
        self._table = FingerprintTable(count_max + 1)
        self._reasons = np.zeros(self._table.size, dtype=np.uint8)
        self._when_s = np.zeros(self._table.size, dtype=np.int64)
        self._turns = np.zeros(self._table.size, dtype=np.uint64)
        """By slot: the order of burial; 0 for an unused slot."""
        self._turn = 0
        self._queue: npt.NDArray[np.int64] = np.zeros(0, dtype=np.int64)
        """Slots that are the longest buried, in order, if their turns are still those in ``_queued``."""
        self._queued: npt.NDArray[np.uint64] = np.zeros(0, dtype=np.uint64)

    def __len__(self) -> int:
        return len(self._table)

    @property
    def memory_bytes(self) -> int:
        return self._table.memory_bytes + 17 * self._table.fresh

    def reasons(self, fingerprints: Words) -> npt.NDArray[np.uint8]:
        """A reason for each fingerprint; 0 where none is remembered."""
        if not len(self._table):
            return np.zeros(len(fingerprints), dtype=np.uint8)
        slots = self._table.find(fingerprints)
        return np.where(slots >= 0, self._reasons[slots], 0).astype(np.uint8)

    def get(self, fingerprint: int) -> Tombstone | None:
        slot = self._table.find_one(fingerprint)
        return Tombstone(int(self._reasons[slot]), int(self._when_s[slot])) if slot >= 0 else None

    def bury(self, fingerprints: Words, reasons: npt.NDArray[np.uint8], when_s: int) -> Words:
        """Remember; returns the fingerprints that were forgotten for it. None is named twice."""
        self._turn += 1
        slots = self._table.find(fingerprints)
        slots[slots < 0] = self._table.insert(fingerprints[slots < 0])
        if self._table.size > len(self._turns):
            self._reasons = grown(self._reasons, self._table.size)
            self._when_s = grown(self._when_s, self._table.size)
            self._turns = grown(self._turns, self._table.size)
        self._reasons[slots], self._when_s[slots] = reasons, when_s
        self._turns[slots] = self._turn + np.arange(len(slots))
        self._turn += len(slots)
        forgotten = [np.zeros(0, dtype=np.uint64)]
        while (surplus := len(self) - self.count_max) > 0:
            if not len(self._queue):
                self._line_up()
            oldest = self._queue[:surplus]
            oldest = oldest[self._turns[oldest] == self._queued[:surplus]]
            self._queue, self._queued = self._queue[surplus:], self._queued[surplus:]
            forgotten.append(self._table.fingerprints[oldest])
            self._drop(oldest)
        return np.concatenate(forgotten)

    def _line_up(self) -> None:
        """Find the longest buried: a pass over all, for many that are forgotten one after another."""
        used = np.flatnonzero(self._turns)
        count = min(max(self.count_max // _QUEUE_SHARE, 1), len(used))
        oldest = used[np.argpartition(self._turns[used], count - 1)[:count]]
        self._queue = oldest[np.argsort(self._turns[oldest])]
        self._queued = self._turns[self._queue]

    def load(self, tombstones: Mapping[int, Tombstone]) -> None:
        """Those that an index kept, the longest buried first."""
        for _, group in groupby(
            sorted(tombstones.items(), key=lambda item: item[1].when_s), lambda item: item[1].when_s
        ):
            items = list(group)
            fingerprints = np.array([fingerprint for fingerprint, _ in items], dtype=np.uint64)
            self.bury(fingerprints, np.array([item.reason for _, item in items], dtype=np.uint8), items[0][1].when_s)

    def forget(self, fingerprints: Words) -> Words:
        """Their blocks are back; returns those that were remembered."""
        if not len(self._table) or not len(fingerprints):
            return np.zeros(0, dtype=np.uint64)
        slots = self._table.find(fingerprints)
        self._drop(slots[slots >= 0])
        return fingerprints[slots >= 0]

    def items(self) -> Iterator[tuple[int, Tombstone]]:
        """All, the longest buried first."""
        used = np.flatnonzero(self._turns)
        for slot in used[np.argsort(self._turns[used])].tolist():
            yield int(self._table.fingerprints[slot]), Tombstone(int(self._reasons[slot]), int(self._when_s[slot]))

    def _drop(self, slots: npt.NDArray[np.int64]) -> None:
        if len(slots):
            self._turns[slots] = 0
            self._table.remove(slots)
