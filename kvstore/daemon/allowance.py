"""How often something may be asked: so many at once, and so many a second from then on.

Owns the arithmetic of one allowance. Does not know what is asked, or clocks. Invariant: over any time, no more is taken
than the burst and what that time added. Not thread-safe: who shares one locks it.
"""

from __future__ import annotations


class Allowance:
    """Full at first. Points of time are those of a monotonic clock."""

    __slots__ = ("_burst", "_left", "_per_s", "_since_s")

    def __init__(self, burst: int, per_s: float) -> None:
        self._burst = self._left = float(burst)
        self._per_s = per_s
        self._since_s = float("-inf")

    def take(self, now_s: float) -> float:
        """Take one: 0.0; or none: the seconds after which there will be one."""
        self._left = min(self._left + max(now_s - self._since_s, 0.0) * self._per_s, self._burst)
        self._since_s = now_s
        if self._left < 1.0:
            return (1.0 - self._left) / self._per_s
        self._left -= 1.0
        return 0.0
