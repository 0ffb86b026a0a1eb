"""The clock as a node may rely on it: within what a record can hold, and watched for jumps.

Owns the bounds of a time, and the judgement that a clock jumped. Does not know deadlines or sweeps. Invariants: a clock
that was set wrongly for less than an hour changes nothing; one that is wrong for longer, or at a start, costs misses
meanwhile, but no stored block: nothing is swept on its word alone.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from kvstore.store import Clock

TIME_S_MAX = 2**32 - 1.0
"""Seconds since the epoch in a touch: until 2106."""
JUMP_S = 3600.0
"""Difference between the clock's way and the elapsed time beyond which it jumped."""
SETTLE_S = 3600.0
"""For so long after a jump the clock is not believed to be right."""
FAR_S = 30 * 86_400.0
"""A clock that is further than this ahead of the last use of any block is doubtful at a start."""

log = logging.getLogger(__name__)


class BoundedClock:
    """A clock that never says a time before the epoch or after what a record can hold."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def now_s(self) -> float:
        return min(max(self._clock.now_s(), 0.0), TIME_S_MAX)


def elapsed_s() -> float:
    """Seconds since the machine was booted, sleep included: nobody sets this one."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def is_likely(now_s: float, used_s: float) -> bool:
    """Whether a clock may be right at a start, by the last use of any block (0: there was none)."""
    return not used_s or used_s - JUMP_S <= now_s <= used_s + FAR_S


class SteadyClock:
    """A clock that goes on as it went when it is set by more than ``JUMP_S``, and follows once it has stood there for
    ``SETTLE_S``: so what is stored, used or expires while a clock is wrong for less has the right time. Thread-safe.
    """

    def __init__(self, clock: Clock, elapsed: Callable[[], float] = elapsed_s) -> None:
        self._clock = clock
        self._elapsed = elapsed
        self._lock = threading.Lock()
        self._begins_s = clock.now_s() - elapsed()
        """What the believed clock said when the elapsed time was 0."""
        self._other_s, self._other_since_s = self._begins_s, 0.0
        self._used_s = 0.0
        self._is_firm = True

    def judge(self, used_s: float) -> None:
        """Tell when any block was used last: a clock that cannot have been right at the start is followed at once."""
        self._used_s = used_s
        self._is_firm = is_likely(self.now_s(), used_s)

    def now_s(self) -> float:
        told_s, at_s = self._clock.now_s(), self._elapsed()
        begins_s = told_s - at_s
        if abs(begins_s - self._begins_s) <= JUMP_S:
            self._begins_s = self._other_s = begins_s
            return told_s
        with self._lock:
            return self._set(begins_s, at_s)

    def _set(self, begins_s: float, at_s: float) -> float:
        """The clock is another than the one believed in."""
        if abs(begins_s - self._other_s) > JUMP_S:
            self._other_s, self._other_since_s = begins_s, at_s
            log.warning("clock_set by_s=%.0f", begins_s - self._begins_s)
        if not self._is_firm or at_s >= self._other_since_s + SETTLE_S:
            log.warning("clock_followed by_s=%.0f", begins_s - self._begins_s)
            self._begins_s = begins_s
            self._is_firm = self._is_firm or is_likely(begins_s + at_s, self._used_s)
        return self._begins_s + at_s


class ClockWatch:
    """Compares a clock with elapsed time, as often as it is asked. Used by one thread."""

    def __init__(self, clock: Clock, elapsed: Callable[[], float] = elapsed_s) -> None:
        self._clock = clock
        self._elapsed = elapsed
        self._seen = (clock.now_s(), elapsed())
        self._doubted_until_s = 0.0
        self.jumps = 0

    def doubt(self) -> None:
        """Do not believe it for a while: it cannot be right."""
        self.jumps += 1
        self._doubted_until_s = self._elapsed() + SETTLE_S

    def is_believed(self) -> bool:
        """False for a while after a jump; back where it was, it is believed again only after that while too."""
        now_s, at_s = self._clock.now_s(), self._elapsed()
        went_s, passed_s = now_s - self._seen[0], at_s - self._seen[1]
        self._seen = (now_s, at_s)
        if abs(went_s - passed_s) > JUMP_S:
            self.jumps += 1
            self._doubted_until_s = at_s + SETTLE_S
        return at_s >= self._doubted_until_s
