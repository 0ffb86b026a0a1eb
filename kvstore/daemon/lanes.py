"""Lanes: the parts of one batch that lie on several volumes, worked on side by side.

Owns a few threads for each volume. Does not know what a job does. Invariants: a volume that is slow or stuck keeps only
its own lane busy; ``run`` returns when every job has ended, since jobs use the caller's buffers, and every job ends by
a deadline of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Generic, TypeVar

from kvstore.errors import StoreError, Unavailable

LANE_THREADS = 8
"""Jobs that one volume works on at once, beside those in their callers' threads; more wait in line."""

Lane = TypeVar("Lane")
Result = TypeVar("Result")


class Lanes(Generic[Lane]):
    """Thread-safe. Threads are started when they are first needed: never where there is one volume."""

    def __init__(self, lanes: Sequence[Lane]) -> None:
        self._pools = {lane: ThreadPoolExecutor(LANE_THREADS, f"volume-{number}") for number, lane in enumerate(lanes)}

    def run(self, jobs: Mapping[Lane, Callable[[], Result]]) -> dict[Lane, Result | StoreError]:
        """What each job returned, or the ``StoreError`` that it raised; the first runs in the caller's thread.

        Raises Unavailable once closed, and any other exception of a job after all have ended.
        """
        lanes = list(jobs)
        futures: dict[Lane, Future[Result | StoreError]] = {}
        try:
            for lane in lanes[1:]:
                futures[lane] = self._submit(lane, jobs[lane])
            results: dict[Lane, Result | StoreError] = {lane: _caught(jobs[lane]) for lane in lanes[:1]}
        finally:
            if futures:
                wait(futures.values())
        return results | {lane: _result(future) for lane, future in futures.items()}

    def _submit(self, lane: Lane, job: Callable[[], Result]) -> Future[Result | StoreError]:
        try:
            return self._pools[lane].submit(_caught, job)
        except RuntimeError as error:
            raise Unavailable("the store is closing") from error

    def close(self) -> None:
        """Let what is running end; what waits in line is given up."""
        for pool in self._pools.values():
            pool.shutdown(wait=False, cancel_futures=True)


def _caught(job: Callable[[], Result]) -> Result | StoreError:
    try:
        return job()
    except StoreError as error:
        return error


def _result(future: Future[Result | StoreError]) -> Result | StoreError:
    return Unavailable("the store is closing") if future.cancelled() else future.result()
