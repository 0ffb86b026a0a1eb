"""Where an engine leaves tasks and comes back for their answers, told by a descriptor that it polls.

Owns the threads, the bound of what waits, and the answers. Does not know what a task is. Invariants: leaving a task
never waits; every task gets exactly one answer, which is given out once; a task that fails is answered as its engine
said that failure looks.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, Protocol, TypeVar

log = logging.getLogger(__name__)

T = TypeVar("T")


class Event(Protocol):
    """What wakes a thread that polls a descriptor."""

    def fileno(self) -> int: ...
    def notify(self) -> None: ...
    def close(self) -> None: ...


class Desk(Generic[T]):
    """Tasks of one sort on ``threads`` threads of their own, at most ``tasks_max`` that wait or run. Thread-safe."""

    def __init__(self, event: Event, threads: int, tasks_max: int) -> None:
        self._pool = ThreadPoolExecutor(threads, "reprise-desk")
        self._room = threading.BoundedSemaphore(tasks_max)
        self._event = event
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._answers: dict[int, T] = {}
        self._closed = False

    @property
    def descriptor(self) -> int:
        """What to poll; it becomes readable with every answer."""
        return int(self._event.fileno())

    def submit(self, call: Callable[[], T], failed: T) -> int:
        """Have ``call`` answer, or ``failed`` if it cannot: at once if there is no room. Returns the task's number."""
        with self._lock:
            task = next(self._numbers)
        if not self._room.acquire(blocking=False):
            self._answer(task, failed)
            return task
        try:
            self._pool.submit(self._run, task, call, failed)
        except RuntimeError:  # closed meanwhile
            self._room.release()
            self._answer(task, failed)
        return task

    def take(self, task: int) -> T | None:
        """The answer of a task, once; None: not yet, or taken already."""
        with self._lock:
            return self._answers.pop(task, None)

    def take_all(self) -> dict[int, T]:
        """All answers that there are, by task."""
        with self._lock:
            answers, self._answers = self._answers, {}
        return answers

    def close(self) -> None:
        """Wait for what runs, which is until its deadline at most; drop the rest."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        with self._lock:
            self._closed = True
            self._event.close()

    def _run(self, task: int, call: Callable[[], T], failed: T) -> None:
        answer = failed
        try:
            answer = call()
        except Exception:  # the seam to the engine: a task without an answer would hold its memory for ever
            log.exception("task_fails")
        finally:
            self._room.release()
            self._answer(task, answer)

    def _answer(self, task: int, answer: T) -> None:
        with self._lock:
            self._answers[task] = answer
            if not self._closed:
                self._event.notify()
