"""When to ask a node again that says it is overloaded: not before it says, a few times, within the deadline.

Owns the decision and the wait of one call. Does not know what is asked. Invariants: nobody waits beyond the call's
deadline, nor once the client is closing; who was refused together does not come again together.
"""

from __future__ import annotations

import random
from collections.abc import Callable

TRIES_MAX = 4
"""How often a call is made in all."""
SPREAD = 0.5
"""Up to this share of the wait is added, by chance."""


class Patience:
    """Of one call. ``ends_s``: its deadline, on the clock ``monotonic``. ``pause``: waits so many seconds; True if it
    was cut short because nothing more should be tried.
    """

    __slots__ = ("_ends_s", "_left", "_monotonic", "_pause")

    def __init__(self, ends_s: float, monotonic: Callable[[], float], pause: Callable[[float], bool]) -> None:
        self._ends_s = ends_s
        self._monotonic = monotonic
        self._pause = pause
        self._left = TRIES_MAX - 1

    def wait(self, retry_after_s: float) -> bool:
        """Wait as long as a node asked for; False, without waiting, if it is not worth it."""
        wait_s = retry_after_s * (1.0 + SPREAD * random.random())
        if not self._left or self._monotonic() + wait_s >= self._ends_s:
            return False
        self._left -= 1
        return not self._pause(wait_s)
