"""Group commit: many writers that wait for the disk share one flush.

Owns the queue of waiters. Does not know files: the flush is a function. Invariant: a waiter returns only after a flush
that *began* after its own write; a failed flush fails exactly the waiters it was for.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from kvstore.errors import DeadlineExceeded


class GroupCommit:
    """``window_s``: how long the leader waits for company; 0 relies on those who queue during the flush before."""

    def __init__(self, flush: Callable[[], None], window_s: float) -> None:
        self._flush = flush
        self._window_s = window_s
        self._changed = threading.Condition()
        self._asked = 0
        self._done = 0
        self._leading = False
        self._failed: dict[int, OSError] = {}

    def wait(self, deadline_s: float) -> None:
        """Return when all written before this call is durable. Raises OSError of the flush, or DeadlineExceeded."""
        end_s = time.monotonic() + deadline_s
        with self._changed:
            self._asked += 1
            ticket = self._asked
            while self._done < ticket and self._leading:
                if not self._changed.wait(max(0.0, end_s - time.monotonic())) and time.monotonic() >= end_s:
                    raise DeadlineExceeded("the disk did not confirm the write before the deadline")
            if self._done >= ticket:
                error = self._failed.pop(ticket, None)
                if error is not None:
                    raise error
                return
            self._leading = True
        self._lead(ticket)

    def _lead(self, ticket: int) -> None:
        if self._window_s:
            time.sleep(self._window_s)
        with self._changed:
            begin, end = self._done, self._asked
        error: OSError | None = None
        try:
            self._flush()
        except OSError as caught:
            error = caught
        with self._changed:
            self._done = end
            self._leading = False
            if error is not None:
                self._failed.update({other: error for other in range(begin + 1, end + 1) if other != ticket})
            self._changed.notify_all()
        if error is not None:
            raise error
