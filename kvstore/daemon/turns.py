"""Whose turn it is in a shard: one that changes anything alone, or puts under way, each a step behind the one before.

Owns the shard's outer lock and the order of what is under way. Does not know blocks or segments. Invariants: nobody is
alone while anything is under way; what is under way writes one after another and ends one after another, in the order
in which it began, so that a kill leaves whole writes and one torn at most, as if each had been alone; whoever waits to
be alone lets nothing new begin before.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol, TypeVar

from kvstore.errors import DeadlineExceeded

UNDER_WAY_MAX = 4
"""More wait until nothing is."""

T = TypeVar("T")


class Underway(Protocol):
    """Something that was begun."""

    def write(self) -> None: ...


Step = TypeVar("Step", bound=Underway)


class _Baton:
    """Who writes: one after another, in the order of ``enter``. Whoever hands it on waits for nobody, and the next has
    it at once, whoever has the shard's lock.
    """

    __slots__ = ("_line", "_lock")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._line: deque[threading.Event] = deque()
        """Of each that has not written: whether all before it have. The first is set."""

    def enter(self) -> threading.Event:
        """A place at the end of the line: to be waited for, then handed on."""
        turn = threading.Event()
        with self._lock:
            self._line.append(turn)
            self._line[0].set()
        return turn

    def hand_on(self) -> None:
        """The first has written."""
        with self._lock:
            self._line.popleft()
            if self._line:
                self._line[0].set()


class Turns:
    """Of one shard. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition(threading.Lock())
        self._line: deque[threading.Event] = deque()
        """What is under way, each by its turn to write."""
        self._baton = _Baton()
        self._waiting_alone = 0

    @contextmanager
    def alone(self, timeout_s: float = threading.TIMEOUT_MAX) -> Iterator[None]:
        """Nothing else changes the shard. Raises DeadlineExceeded."""
        end_s = time.monotonic() + timeout_s
        self._enter(timeout_s)
        try:
            self._empty(end_s)
            yield
        finally:
            self._changed.release()

    def beside(
        self, begin: Callable[[bool], Step | None], end: Callable[[Step], T | None], timeout_s: float
    ) -> T | None:
        """Do something while others do: ``begin`` and ``end`` have the lock, ``write`` is in turn. What ``end``
        returns; None also if ``begin`` does.

        ``begin`` is told whether nothing is under way; where something is and it returns None, it is asked again once
        nothing is. ``end`` is called whatever becomes of the step. Raises DeadlineExceeded, if nothing was begun.
        """
        end_s = time.monotonic() + timeout_s
        self._enter(timeout_s)
        try:
            crowded = self._waiting_alone or len(self._line) >= UNDER_WAY_MAX
            step = None if crowded else begin(not self._line)
            if step is None and (crowded or self._line):
                self._empty(end_s)
                step = begin(True)
            if step is None:
                return None
            turn = self._baton.enter()
            self._line.append(turn)
        finally:
            self._changed.release()
        try:
            with self._writing(turn):
                step.write()
        finally:
            with self._ending(turn):
                result = end(step)
        return result

    @contextmanager
    def _writing(self, turn: threading.Event) -> Iterator[None]:
        """All that began before has written. (A wait for as long as their writes take.)"""
        turn.wait()
        try:
            yield
        finally:
            self._baton.hand_on()

    @contextmanager
    def _ending(self, turn: threading.Event) -> Iterator[None]:
        """All that began before has ended, and nobody else changes the shard now; afterwards this has ended too."""
        with self._changed:
            try:
                self._changed.wait_for(lambda: self._line[0] is turn)
                yield
            finally:
                self._line.remove(turn)
                if self._line or self._waiting_alone:
                    self._changed.notify_all()

    def _empty(self, end_s: float) -> None:
        """Wait until nothing is under way. Raises DeadlineExceeded."""
        if not self._line:
            return
        self._waiting_alone += 1
        try:
            self._changed.wait_for(lambda: not self._line, min(end_s - time.monotonic(), threading.TIMEOUT_MAX))
        finally:
            self._waiting_alone -= 1
        if self._line:
            raise DeadlineExceeded("the shard's writer was busy until the deadline")

    def _enter(self, timeout_s: float) -> None:
        if not self._changed.acquire(timeout=min(max(0.0, timeout_s), threading.TIMEOUT_MAX)):
            raise DeadlineExceeded("the shard's writer was busy until the deadline")
