"""One sweep of a shard: segment by segment, and a recycled segment's rows part by part.

Owns when the writer's lock is let go, and for how long a sweep rests. Does not know what is dropped or moved: that is
the reclaimer's. Invariants: no writer waits for more than one segment's records or one part of its rows; no look-up for
more than one part; beside gets it rests so long that hardly one in a hundred meets a part, but no longer in all than it
was told; what a round began and could not end, the next one ends.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager

from kvstore.daemon.ledger import Ledger
from kvstore.daemon.reclaimer import Reclaimer, Swept

REST_S, REST_S_MAX = 0.003, 0.02
"""After each part: a part takes a tenth of that, and few requests come just then.
A million blocks take three minutes.
"""
REST_PARTS = 5
"""Where a part takes long, because others want the processors, the rest is so many times as long."""
REST_BESIDE_GETS_S = 0.2
"""While blocks are got, as long as there is rest left: a part delays those that come within a millisecond."""
Writing = Callable[[float], AbstractContextManager[None]]


class _Pace:
    """How long to rest after each part. ``left_s``: of long rests beside gets."""

    def __init__(self, ledger: Ledger, left_s: float) -> None:
        self._counters = ledger.counters
        self._left_s = left_s
        self._asked = self._asked_for()

    def rest(self, took_s: float) -> None:
        rest_s = min(max(REST_S, REST_PARTS * took_s), REST_S_MAX)
        asked = self._asked_for()
        if asked != self._asked and self._left_s > 0:
            rest_s = REST_BESIDE_GETS_S
            self._left_s -= rest_s
        self._asked = asked
        time.sleep(rest_s)

    def _asked_for(self) -> int:
        """Blocks that gets asked for so far."""
        return self._counters.hits + self._counters.misses


def sweep_round(ledger: Ledger, reclaimer: Reclaimer, writing: Writing, now_s: int, rest_s: float) -> Swept:
    """Drop what expired, and compress the coldest segment. ``writing``: holds the writer's lock. ``rest_s``: what the
    round may take longer for the sake of gets.
    """
    swept, pace = Swept(), _Pace(ledger, rest_s)
    with writing(threading.TIMEOUT_MAX):
        ledger.segments.retry_failed()
        reclaimer.clean()
        reclaimer.drop_vanished(now_s)
        numbers = [usage.segment for usage in reclaimer.due(now_s)]
    _release(reclaimer, writing, pace)
    for number in numbers:
        with writing(threading.TIMEOUT_MAX):
            reclaimer.sweep_segment(number, now_s, swept)
        _release(reclaimer, writing, pace)
    _pack(reclaimer, writing, now_s, swept)
    _release(reclaimer, writing, pace)
    return swept


def _release(reclaimer: Reclaimer, writing: Writing, pace: _Pace) -> None:
    """Let the rows of recycled segments go."""
    while True:
        with writing(threading.TIMEOUT_MAX):
            began_s = time.monotonic()
            more = reclaimer.release_part()
            took_s = time.monotonic() - began_s
        if not more:
            return
        pace.rest(took_s)


def _pack(reclaimer: Reclaimer, writing: Writing, now_s: int, swept: Swept) -> None:
    """Compress the coldest segment, if there is one: a sweep's work is bounded, and writers come in between."""
    with writing(threading.TIMEOUT_MAX):
        segment = reclaimer.coldest(now_s)
        generation = segment.header.generation if segment is not None else 0
    more = segment is not None
    while more and segment is not None:
        with writing(threading.TIMEOUT_MAX):
            more = reclaimer.pack_part(segment, generation, now_s, swept)
