"""An allowance: the burst at once, then its rate, whatever the clock does."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvstore.daemon.allowance import Allowance


@given(st.lists(st.floats(0.0, 5.0), max_size=200))
def test_no_more_is_taken_than_the_burst_and_what_time_added(pauses: list[float]) -> None:
    allowance, now_s, taken = Allowance(10, 4.0), 1000.0, 0
    for pause_s in pauses:
        now_s += pause_s
        taken += not allowance.take(now_s)
    assert taken <= 10 + 4.0 * sum(pauses) + 1e-6
    assert taken >= min(len(pauses), 10)


def test_who_waits_as_long_as_is_said_is_served() -> None:
    """Also after a clock that went backwards, which adds nothing."""
    allowance, now_s = Allowance(2, 4.0), 7.0
    assert [allowance.take(now_s) for _ in range(3)] == [0.0, 0.0, 0.25]
    assert allowance.take(now_s - 5.0) == 0.25
    assert allowance.take(now_s - 5.0 + 0.25) == 0.0
