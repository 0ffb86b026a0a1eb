"""Sealing full segments beside the writer, so that no put waits for the disk because a segment happened to be full.

Owns the queue of segments that wait for it, and the thread. Does not know what a seal is: that is a function.
Invariants: at most WAITING_MAX segments wait, the next is sealed by whoever filled it; a segment that is recycled
meanwhile is left alone; one that was not sealed at the end is scanned by the next start like any open one.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections.abc import Callable

from kvstore.daemon.segment import Segment

WAITING_MAX = 4
"""Segments that the disk may be behind by; then writers wait for it again."""
STOP_S_MAX = 30.0
"""A disk that takes longer is left to the next start."""

log = logging.getLogger(__name__)


class Sealer:
    """``seal`` gets a segment and the generation that it had when it was offered."""

    def __init__(self, seal: Callable[[Segment, int], None]) -> None:
        self._seal = seal
        self._waiting: queue.Queue[tuple[Segment, int] | None] = queue.Queue(WAITING_MAX)
        self._thread = threading.Thread(target=self._run, name="seal", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def offer(self, segment: Segment) -> bool:
        """Seal it soon; False if too many wait already."""
        try:
            self._waiting.put_nowait((segment, segment.header.generation))
        except queue.Full:
            return False
        return True

    def stop(self, *, drain: bool) -> None:
        """End (bounded), with ``drain`` after what waits was sealed."""
        with contextlib.suppress(queue.Empty):
            while not drain:
                self._waiting.get_nowait()
        if self._thread.is_alive():
            with contextlib.suppress(queue.Full):
                self._waiting.put(None, timeout=STOP_S_MAX)
            self._thread.join(STOP_S_MAX)

    def _run(self) -> None:
        while (item := self._waiting.get()) is not None:
            try:
                self._seal(*item)
            except Exception:  # the thread's seam: a segment without a seal is as good as an open one
                log.exception("seal_failed segment=%d", item[0].number)
