"""Segments that are being given back: the header first, then the rows, a few at a time, then the file is free.

Owns the order and the size of a part. Does not know which segment goes, or why. Invariants: from the first step on no
row of the segment is served, and no place is made of one; the file is free only once the last row has gone, so that no
row is taken for one of its next life; no look-up waits for more than one part, however many blocks a segment holds; a
crash in between leaves index entries of a generation that is over, which the next start drops. Runs only under the
shard's writer lock, which may be let go between two parts.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvstore.daemon.fingerprints import Slots
from kvstore.daemon.ledger import Ledger
from kvstore.daemon.segment import Segment
from kvstore.store import Presence

PART_ROWS = 64
"""Rows that go at once in a sweep: a third of a millisecond, in three steps, between which other threads go on."""
PART_ROWS_WAITED = 256
"""Rows that go at once where a put waits for the segment: twice as fast."""
BREATH_S = 0.00005
"""Between two steps of a part."""

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Release:
    """One segment. ``slots``: the rows that it held; ``reasons``: why each goes; those before ``at`` are gone."""

    segment: Segment
    slots: Slots
    reasons: npt.NDArray[np.uint8]
    now_s: int
    at: int = 0


class Releases:
    """Belongs to the shard's writer."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._waiting: list[_Release] = []

    def __bool__(self) -> bool:
        """Whether some rows are still to go."""
        return bool(self._waiting)

    def begin(self, segment: Segment, now_s: int, *, erase: bool) -> bool:
        """End a segment's life. False if a reader came in between or the file refused: nothing has changed then.

        ``erase``: it is free only after its bytes were erased besides.
        """
        ledger = self._ledger
        with ledger.journal:
            slots = ledger.presence.in_segment(segment.number)
            alive = ledger.presence.alive(slots, now_s)
            with ledger.lock:
                if segment.leases:
                    return False
                try:
                    ledger.segments.end(segment, now_s, erase=erase)
                except OSError as error:
                    ledger.counters.write_errors += 1
                    log.error("segment_not_recycled segment=%d problem=%r", segment.number, error)
                    return False
                ledger.presence.lapse(slots)
        reasons = np.where(alive, np.uint8(Presence.EVICTED), np.uint8(Presence.EXPIRED))
        self._waiting.append(_Release(segment, slots, reasons, now_s))
        ledger.counters.segments_recycled += 1
        return True

    def step(self, rows: int = PART_ROWS) -> bool:
        """Let so many of the rows go; whether there are more."""
        if self._waiting:
            release = self._waiting[0]
            vanished = self._ledger.segments.segments.get(release.segment.number) is not release.segment
            if not vanished:  # else its rows went with it, and another may have its number
                self._drop_part(release, rows)
            if vanished or release.at >= len(release.slots):
                self._ledger.segments.put_back(release.segment)
                self._waiting.remove(release)
        return bool(self._waiting)

    def _drop_part(self, release: _Release, rows: int) -> None:
        ledger, segment = self._ledger, release.segment
        part = slice(release.at, release.at + rows)
        release.at = part.stop
        slots, reasons = release.slots[part], release.reasons[part]
        with ledger.journal:
            here = ledger.presence.segments_of(slots) == segment.number
            if not here.all():  # a key that was put again since has left its row already
                slots, reasons = slots[here], reasons[here]
            described = ledger.describe(slots)
            classes = ledger.presence.class_of(slots[reasons == Presence.EVICTED])
            dropped = ledger.drop(slots, reasons, release.now_s, segment, lambda: time.sleep(BREATH_S))
            time.sleep(BREATH_S)
            ledger.record(dropped, described, reasons, release.now_s)
        ledger.counters.evicted += len(classes)
        ledger.counters.evicted_of.update(classes.tolist())
        ledger.counters.expired += len(reasons) - len(classes)
