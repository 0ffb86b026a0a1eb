"""The clock as a node may rely on it: within what a record can hold, and watched for jumps.

Owns the bounds of a time, and the judgement that a clock jumped. Does not know deadlines or sweeps. Invariant: a clock
that was set wrongly for a while costs misses meanwhile, but no stored block: nothing is swept on its word alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from kvstore.store import Clock

TIME_S_MAX = 2**32 - 1.0
"""Seconds since the epoch in a touch: until 2106."""
JUMP_S = 3600.0
"""Difference between the clock's way and the elapsed time beyond which it jumped."""
SETTLE_S = 3600.0
"""For so long after a jump the clock is not believed to be right."""


class BoundedClock:
    """A clock that never says a time before the epoch or after what a record can hold."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def now_s(self) -> float:
        return min(max(self._clock.now_s(), 0.0), TIME_S_MAX)


def elapsed_s() -> float:
    """Seconds since the machine was booted, sleep included: nobody sets this one."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class ClockWatch:
    """Compares a clock with elapsed time, as often as it is asked. Used by one thread."""

    def __init__(self, clock: Clock, elapsed: Callable[[], float] = elapsed_s) -> None:
        self._clock = clock
        self._elapsed = elapsed
        self._seen = (clock.now_s(), elapsed())
        self._doubted_until_s = 0.0
        self.jumps = 0

    def is_believed(self) -> bool:
        """False for a while after a jump; back where it was, it is believed again only after that while too."""
        now_s, at_s = self._clock.now_s(), self._elapsed()
        went_s, passed_s = now_s - self._seen[0], at_s - self._seen[1]
        self._seen = (now_s, at_s)
        if abs(went_s - passed_s) > JUMP_S:
            self.jumps += 1
            self._doubted_until_s = at_s + SETTLE_S
        return at_s >= self._doubted_until_s
