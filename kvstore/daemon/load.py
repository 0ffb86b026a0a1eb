"""How long a load would take: by how fast gets were answered lately, behind those that are being answered now.

Owns the estimate in look-up answers. Does not know blocks, disks or sockets. Invariants: only what was really answered
counts, over the time in which at least one get was under way, so that gets side by side are not taken for slow ones;
what is old weighs less and less, and a speed that nobody has measured for a while is unknown again: a worker that
declines for it would else never find out that the disk has recovered.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType

from kvstore import limits

LOAD_SAMPLE_BYTES_MIN = 256 * limits.KIB
"""Smaller gets tell of latency rather than speed, and are left out."""
LOAD_DECAY = 0.9
"""Weight of what was known before, at each new sample: about the last ten gets count."""
LOAD_KNOWN_S = 60.0
"""A speed is believed for so long after its last sample; then the next load is an experiment."""


class LoadRate:
    """Thread-safe."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._bytes = 0.0
        self._seconds = 0.0
        self._under_way_bytes = 0
        self._under_way = 0
        self._since_s = 0.0
        """When the first of those under way began, or the last sample was taken since."""
        self._sampled_s = 0.0

    def begin(self, count: int) -> Answering:
        """A get of so many bytes is begun. It must be ended, one way or the other."""
        with self._lock:
            if not self._under_way:
                self._since_s = self._monotonic()
            self._under_way += 1
            self._under_way_bytes += count
        return Answering(self, count)

    def end(self, begun_bytes: int, done_bytes: int) -> None:
        """A get has ended. ``done_bytes`` is what came of it; 0 tells nothing of the speed."""
        with self._lock:
            self._under_way -= 1
            self._under_way_bytes -= begun_bytes
            if done_bytes < LOAD_SAMPLE_BYTES_MIN:
                return
            now_s = self._monotonic()
            self._bytes = LOAD_DECAY * self._bytes + done_bytes
            self._seconds = LOAD_DECAY * self._seconds + max(now_s - self._since_s, 1e-6)
            self._since_s = self._sampled_s = now_s

    @property
    def is_known(self) -> bool:
        """Whether there is an estimate."""
        known = self._under_way or self._monotonic() - self._sampled_s < LOAD_KNOWN_S
        return bool(self._bytes and known)

    def estimate_s(self, count: int) -> float:
        """Time until so many bytes would have come, if they were asked for now; 0 while nothing is known."""
        with self._lock:
            if not self.is_known:
                return 0.0
            return (self._under_way_bytes + count) * self._seconds / self._bytes


class Answering:
    """One get under way. Ended once, however often it is told; as a context it ends without telling of the speed,
    unless it was ``done`` before.
    """

    __slots__ = ("_count", "_ended", "_rate")

    def __init__(self, rate: LoadRate, count: int) -> None:
        self._rate = rate
        self._count = count
        self._ended = threading.Lock()

    def done(self, count: int | None = None) -> None:
        """All of it came, or ``count`` bytes."""
        if self._ended.acquire(blocking=False):
            self._rate.end(self._count, self._count if count is None else count)

    def drop(self) -> None:
        """Nothing is known of how long it took."""
        self.done(0)

    def __enter__(self) -> Answering:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.drop()
