"""Which stored blocks are on disk, and waiting until they are.

Owns what the next flush owes, and what becomes of blocks that the disk did not take. Does not write records.
Invariants: a block is confirmed only by a flush that began after it was written, or by its segment's earlier one; what
the disk did not confirm, now or when its segment was sealed, is neither acknowledged nor served; a flush covers nothing
that nobody waits for.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np

from kvstore.daemon.durability import GroupCommit
from kvstore.daemon.ledger import Ledger, Place
from kvstore.daemon.presence import key_words
from kvstore.daemon.segment import Segment
from kvstore.errors import Unavailable
from kvstore.keys import BlockKey, SpaceId

log = logging.getLogger(__name__)


class Confirmations:
    """Thread-safe. ``commit_window_s``: see ``GroupCommit``."""

    def __init__(self, ledger: Ledger, commit_window_s: float) -> None:
        self._ledger = ledger
        self._commit = GroupCommit(self._flush, commit_window_s)
        self._owed: set[Segment] = set()
        """Segments that somebody waits to see on disk."""

    def lost(self, space_id: SpaceId, keys: Sequence[BlockKey], now_s: int, deadline_s: float) -> set[int]:
        """Positions of stored blocks that the disk did not take: they are let go of. A block that was removed since it
        was stored is not among them. Raises DeadlineExceeded, or Unavailable where the store has ended.
        """
        with self._ledger.lock:
            if self._has_ended():
                raise Unavailable("the store is closing")
            volatile = self._volatile(space_id, keys)
            self._owed.update(place.segment for _, place in volatile)
        if not volatile:
            return set()
        try:
            self._commit.wait(deadline_s)
        except OSError as error:
            self._ledger.counters.write_errors += 1
            log.error("flush_failed problem=%r", error)
        with self._ledger.lock:
            if self._has_ended():  # no row and no segment is left to ask
                return {at for at, place in volatile if not place.segment.is_durable(place.offset)}
            volatile = self._volatile(space_id, keys)
            for _, place in volatile:
                place.segment.leases += 1  # not recycled before it is marked, beside lookups
        try:
            self._ledger.quarantine([place for _, place in volatile], now_s)
        finally:
            for _, place in volatile:
                self._ledger.give_back(place)
        return {at for at, _ in volatile}

    def _has_ended(self) -> bool:
        return self._ledger.index.closed

    def _volatile(self, space_id: SpaceId, keys: Sequence[BlockKey]) -> list[tuple[int, Place]]:
        """Positions and places of blocks that are here but not on disk, as far as the disk can be believed."""
        presence, segments = self._ledger.presence, self._ledger.segments.segments
        words = key_words(b"".join(keys))
        slots = presence.slots(words)
        here = np.flatnonzero(presence.matches(slots, words, space_id, None))
        numbers, offsets = presence.segments_of(slots[here]), presence.offsets_of(slots[here])
        found: list[tuple[int, Place]] = []
        for number in np.unique(numbers).tolist():
            segment = segments.get(number)
            mine = np.flatnonzero(numbers == number)
            if segment is None or segment.is_durable(int(offsets[mine].max())):
                continue
            for at in mine[offsets[mine] >= segment.durable_end].tolist():
                place = self._ledger.place(int(slots[here[at]]))
                if place is not None:
                    found.append((int(here[at]), place))
        return found

    def _flush(self) -> None:
        with self._ledger.lock:
            owed, self._owed = self._owed, set()
        self._ledger.segments.flush(owed)
