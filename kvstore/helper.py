"""A second thread that takes its share of one piece of work.

Owns the thread. Does not know the work: a function that takes parts from an iterator which its runners share, and that
may have one runner or two. Invariant: nothing of the work is under way any more when it is said to be done, or to have
failed.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait

PROCESSORS = len(os.sched_getaffinity(0))


class Helper:
    """Used by one thread at a time. Its own is started when it is first needed."""

    def __init__(self) -> None:
        self._threads: ThreadPoolExecutor | None = None

    def share(self, work: Callable[[], None]) -> None:
        """Do it here and beside; who begins late finds nothing left. Raises what it raised, here first."""
        if self._threads is None:
            self._threads = ThreadPoolExecutor(1, "help")
        helping = self._threads.submit(work)
        try:
            work()
        finally:
            late = helping.cancel()
            if not late:
                wait([helping])
        if not late:
            helping.result()

    def close(self) -> None:
        if self._threads is not None:
            self._threads.shutdown(wait=False)
            self._threads = None
