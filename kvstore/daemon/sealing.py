"""Sealing full segments beside the writer: no put waits for the disk because a segment happened to be full.

Owns the segments that wait for their seal, and the thread. Does not know what a seal is: that is a function.
Invariants: a segment waits at most once, so no more wait than there are; one that began another life meanwhile is left
alone, and its flush is saved; flushes take at most half of the time, the rest belongs to puts and reads; a segment that
was not sealed at the end is scanned by the next start like any open one.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from kvstore.daemon.segment import Segment

REST_S = 5.0
"""A full segment waits this long: one that is recycled at once is never flushed, and the kernel has begun by itself."""
STOP_S_MAX = 30.0
"""A disk that takes longer is left to the next start."""

log = logging.getLogger(__name__)


class Sealer:
    """``seal`` gets a segment and the generation that it had when it was offered. ``rest_s``: see ``REST_S``."""

    def __init__(self, seal: Callable[[Segment, int], None], rest_s: float = REST_S) -> None:
        self._seal = seal
        self._rest_s = rest_s
        self._waiting: dict[int, tuple[Segment, int, float]] = {}
        """By number, in order of offer: the segment, its generation, and when it is due."""
        self._changed = threading.Condition()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="seal", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def offer(self, segment: Segment) -> None:
        """Seal it soon, once it has rested."""
        with self._changed:
            self._waiting.pop(segment.number, None)
            self._waiting[segment.number] = segment, segment.header.generation, time.monotonic() + self._rest_s
            self._changed.notify()

    def stop(self, *, drain: bool) -> None:
        """End (bounded), with ``drain`` after what waits was sealed."""
        with self._changed:
            self._stopping = True
            if not drain:
                self._waiting.clear()
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join(STOP_S_MAX)

    def _run(self) -> None:
        while (item := self._next()) is not None:
            segment, generation = item
            if segment.header.generation != generation:
                continue
            began_s = time.monotonic()
            try:
                self._seal(segment, generation)
            except Exception:  # the thread's seam: a segment without a seal is as good as an open one
                log.exception("seal_failed segment=%d", segment.number)
            self._leave_the_disk_alone(time.monotonic() - began_s)

    def _next(self) -> tuple[Segment, int] | None:
        """The segment that waits longest, once it is due; at the end at once, and None after the last."""
        with self._changed:
            while True:
                number = next(iter(self._waiting), None)
                left_s = self._waiting[number][2] - time.monotonic() if number is not None else None
                if number is not None and left_s is not None and (self._stopping or left_s <= 0.0):
                    segment, generation, _ = self._waiting.pop(number)
                    return segment, generation
                if self._stopping:
                    return None
                self._changed.wait(left_s)

    def _leave_the_disk_alone(self, for_s: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._stopping, for_s)
