"""What a node makes of a clock that was set."""

from __future__ import annotations

import pytest

from kvstore.daemon.clock import JUMP_S, SETTLE_S, TIME_S_MAX, BoundedClock, ClockWatch
from kvstore.testing import ManualClock


@pytest.mark.parametrize(("told_s", "said_s"), [(-5.0, 0.0), (1.8e9, 1.8e9), (1e12, TIME_S_MAX)])
def test_a_time_fits_a_record(told_s: float, said_s: float) -> None:
    assert BoundedClock(ManualClock(told_s)).now_s() == said_s


@pytest.mark.parametrize("jump_s", [-5e8, -JUMP_S - 1, JUMP_S + 1, 5e8])
def test_a_jump_is_not_believed_until_the_clock_has_settled(jump_s: float) -> None:
    """Small corrections are; a jump is counted once, and the jump back is one too."""
    clock, elapsed_s = ManualClock(), [100.0]
    watch = ClockWatch(clock, lambda: elapsed_s[0])

    def pass_by(seconds: float, correction_s: float = 0.0) -> bool:
        elapsed_s[0] += seconds
        clock._now_s += seconds + correction_s
        return watch.is_believed()

    assert pass_by(300)
    assert pass_by(300, 50.0)
    assert pass_by(50_000), "a long pause is no jump"
    assert not pass_by(300, jump_s)
    assert not pass_by(300)
    assert not pass_by(300, -jump_s)
    assert not pass_by(SETTLE_S - 1)
    assert pass_by(1)
    assert watch.jumps == 2
