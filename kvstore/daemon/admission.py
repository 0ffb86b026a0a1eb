"""How much payload a node holds in memory at once, the reused buffers of puts, and the recent speed of gets.

Owns the budget of bytes in flight and the estimate of load times. Does not know frames or blocks. Invariants: the
bytes lent never exceed the budget; whoever finds none left within its wait is refused with ``Overloaded``; a buffer is
touched once and reused, since first touch of fresh memory runs at a quarter of the speed of a copy.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from kvstore import limits
from kvstore.errors import Overloaded

RETRY_AFTER_S = 0.2
LOAD_SAMPLE_BYTES_MIN = 256 * limits.KIB
LOAD_DECAY = 0.9
"""Weight of what was known before, at each new sample: about the last ten gets count."""
IDLE_BUFFERS_MAX = 8
"""Buffers kept for reuse; beyond them memory goes back to the system."""


class LoadRate:
    """Recent speed of answering gets: bytes over seconds, in which what is old weighs less and less. Thread-safe."""

    def __init__(self) -> None:
        self._bytes = 0.0
        self._seconds = 0.0
        self._lock = threading.Lock()

    def add(self, count: int, seconds: float) -> None:
        """One answered get. Small ones tell of latency rather than speed, and are left out."""
        if count < LOAD_SAMPLE_BYTES_MIN:
            return
        with self._lock:
            self._bytes = LOAD_DECAY * self._bytes + count
            self._seconds = LOAD_DECAY * self._seconds + max(seconds, 1e-6)

    def estimate_s(self, count: int) -> float:
        """Time that so many bytes would take; 0 while nothing is known."""
        with self._lock:
            return count * self._seconds / self._bytes if self._bytes else 0.0


class Admission:
    """A byte budget with a small pool of buffers. Thread-safe."""

    def __init__(
        self, budget_bytes: int = limits.IN_FLIGHT_BYTES_MAX, buffer_bytes: int = limits.PUT_BUFFER_BYTES
    ) -> None:
        if not 1 <= buffer_bytes <= budget_bytes:
            raise ValueError(f"a budget of {budget_bytes} bytes cannot lend buffers of {buffer_bytes}")
        self.budget_bytes = budget_bytes
        self.buffer_bytes = buffer_bytes
        self._lent_bytes = 0
        self._refused = 0
        self._idle: list[bytearray] = []
        self._freed = threading.Condition()

    @property
    def lent_bytes(self) -> int:
        return self._lent_bytes

    @property
    def refused(self) -> int:
        return self._refused

    @contextmanager
    def hold(self, count: int, wait_s: float) -> Iterator[None]:
        """Count bytes that somebody else allocated. Raises Overloaded if they do not fit within ``wait_s``."""
        self._take(count, wait_s)
        try:
            yield
        finally:
            self._give(count)

    @contextmanager
    def buffer(self, count: int, wait_s: float) -> Iterator[memoryview]:
        """A view of exactly ``count`` bytes with arbitrary content; it must not be kept.

        Raises Overloaded if it does not fit within ``wait_s``.
        """
        size = max(count, self.buffer_bytes)
        self._take(size, wait_s)
        memory = None
        try:
            if size == self.buffer_bytes:
                with self._freed:
                    memory = self._idle.pop() if self._idle else None
            if memory is None:
                memory = bytearray(size)
            yield memoryview(memory)[:count]
        finally:
            with self._freed:
                if memory is not None and size == self.buffer_bytes and len(self._idle) < IDLE_BUFFERS_MAX:
                    self._idle.append(memory)
            self._give(size)

    def _take(self, count: int, wait_s: float) -> None:
        with self._freed:
            fits = self._freed.wait_for(lambda: self._lent_bytes + count <= self.budget_bytes, max(wait_s, 0.0))
            if not fits:
                self._refused += 1
                raise Overloaded(
                    f"the node holds {self._lent_bytes} of {self.budget_bytes} payload bytes in flight", RETRY_AFTER_S
                )
            self._lent_bytes += count

    def _give(self, count: int) -> None:
        with self._freed:
            self._lent_bytes -= count
            self._freed.notify_all()
