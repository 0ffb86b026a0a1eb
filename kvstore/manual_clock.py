"""A clock for tests: time that moves only when told to. Does not know what goes by it."""

from __future__ import annotations

T0_S = 1_800_000_000.0
"""Where a ManualClock starts: a whole second, so that sums are exact."""


class ManualClock:
    """Time that moves only when told to."""

    def __init__(self, now_s: float = T0_S) -> None:
        self._now_s = now_s

    def now_s(self) -> float:
        return self._now_s

    def advance(self, seconds: float) -> None:
        if seconds < 0:
            raise ValueError("time does not run backwards")
        self._now_s += seconds
