"""The sweep in the background: a node drops what expired at every interval.

Owns the thread and the judgement whether the clock can be believed. Does not know what a sweep is: that is a function.
Invariants: nothing is swept on the word of a clock that was set; a sweep that failed is tried again at the next
interval.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from kvstore.daemon.clock import ClockWatch
from kvstore.errors import Unavailable

STOP_S_MAX = 10.0
"""A sweep under way when the node closes has this long to end."""

INTERVAL_S_MAX = 1800.0
"""What has reached its maximum age leaves the disk within an hour, whatever interval was asked for."""

log = logging.getLogger(__name__)


class Sweeper:
    """``interval_s``: INTERVAL_S_MAX at most; 0: never."""

    def __init__(self, sweep: Callable[[], object], watch: ClockWatch, interval_s: float) -> None:
        self._sweep = sweep
        self._watch = watch
        self._interval_s = min(interval_s, INTERVAL_S_MAX)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sweep", daemon=True)

    def start(self) -> None:
        if self._interval_s > 0:
            self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(STOP_S_MAX)

    def _run(self) -> None:
        while not self._stopping.wait(self._interval_s):
            if not self._watch.is_believed():
                log.warning("sweep_left_out jumps=%d: the clock was set", self._watch.jumps)
                continue
            try:
                self._sweep()
            except Unavailable:
                return
            except Exception:  # the thread's seam: a sweep that failed is tried again at the next interval
                log.exception("sweep_failed")
