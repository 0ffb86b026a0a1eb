"""The pace of a sweep: long rests beside gets, as long as there is rest left; short ones where nobody reads."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kvstore.daemon import sweeping


@pytest.fixture
def rests(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    taken: list[float] = []
    monkeypatch.setattr(sweeping.time, "sleep", taken.append)
    return taken


def pace(left_s: float) -> tuple[sweeping._Pace, SimpleNamespace]:
    counters = SimpleNamespace(hits=5, misses=0)
    return sweeping._Pace(SimpleNamespace(counters=counters), left_s), counters  # type: ignore[arg-type]


def test_nobody_who_reads_makes_a_sweep_rest_for_long(rests: list[float]) -> None:
    """Gets of before the sweep do not count."""
    idle, _ = pace(10.0)
    for _ in range(3):
        idle.rest(0.0005)
    assert rests == [sweeping.REST_S] * 3


def test_a_sweep_rests_beside_gets_until_its_rest_is_used_up(rests: list[float]) -> None:
    """Hits and misses alike; once nobody asks it goes on at once; the rest is bounded."""
    beside, counters = pace(2 * sweeping.REST_BESIDE_GETS_S)
    counters.hits += 1
    beside.rest(0.0005)
    beside.rest(0.0005)
    counters.misses += 1
    beside.rest(0.0005)
    counters.hits += 1
    beside.rest(1.0)
    assert rests == [sweeping.REST_BESIDE_GETS_S, sweeping.REST_S, sweeping.REST_BESIDE_GETS_S, sweeping.REST_S_MAX]


def test_the_hour_of_a_maximum_age_holds_whatever_is_read() -> None:
    """An interval, a round and its rests together stay within an hour."""
    from kvstore.daemon.node import SWEEP_REST_S
    from kvstore.daemon.sweeper import INTERVAL_S_MAX

    assert INTERVAL_S_MAX + SWEEP_REST_S <= 3600 - 600
