"""One sweep of a shard: segment by segment, and a recycled segment's rows part by part.

Owns when the writer's lock is let go, and for how long a sweep rests. Does not know what is dropped or moved: that is
the reclaimer's. Invariants: no writer waits for more than one segment's records or one part of its rows; no look-up for
more than one part; what a round began and could not end, the next one ends.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager

from kvstore.daemon.ledger import Ledger
from kvstore.daemon.reclaimer import Reclaimer, Swept

REST_S, REST_S_MAX = 0.003, 0.02
"""After each part: a part takes a tenth of that, and few requests come just then. (A million blocks take a minute.)"""
REST_PARTS = 5
"""Where a part takes long, because others want the processors, the rest is so many times as long."""
Writing = Callable[[float], AbstractContextManager[None]]


def sweep_round(ledger: Ledger, reclaimer: Reclaimer, writing: Writing, now_s: int) -> Swept:
    """Drop what expired, and compress the coldest segment. ``writing``: holds the writer's lock."""
    swept = Swept()
    with writing(threading.TIMEOUT_MAX):
        ledger.segments.retry_failed()
        reclaimer.clean()
        reclaimer.drop_vanished(now_s)
        numbers = [usage.segment for usage in reclaimer.due(now_s)]
    _release(reclaimer, writing)
    for number in numbers:
        with writing(threading.TIMEOUT_MAX):
            reclaimer.sweep_segment(number, now_s, swept)
        _release(reclaimer, writing)
    _pack(reclaimer, writing, now_s, swept)
    _release(reclaimer, writing)
    return swept


def _release(reclaimer: Reclaimer, writing: Writing) -> None:
    """Let the rows of recycled segments go."""
    while True:
        with writing(threading.TIMEOUT_MAX):
            began_s = time.monotonic()
            more = reclaimer.release_part()
            took_s = time.monotonic() - began_s
        if not more:
            return
        time.sleep(min(max(REST_S, REST_PARTS * took_s), REST_S_MAX))


def _pack(reclaimer: Reclaimer, writing: Writing, now_s: int, swept: Swept) -> None:
    """Compress the coldest segment, if there is one: a sweep's work is bounded, and writers come in between."""
    with writing(threading.TIMEOUT_MAX):
        segment = reclaimer.coldest(now_s)
        generation = segment.header.generation if segment is not None else 0
    more = segment is not None
    while more and segment is not None:
        with writing(threading.TIMEOUT_MAX):
            more = reclaimer.pack_part(segment, generation, now_s, swept)
