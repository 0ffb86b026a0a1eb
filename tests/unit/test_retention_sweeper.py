"""The sweep's loop: when it sweeps, what a failure does, how it ends."""

from __future__ import annotations

import pytest

from kvstore.errors import StoreError, Unauthorized, Unavailable
from kvstore.store import Effect
from kvstore.testing import DAY_S, T0_S, ManualClock, MemoryStore
from kvstore.traffic import AGENT
from retention.sweeper import SweepReport, sweep_loop, sweep_once
from tests.support.spaces import a_chain, a_space, put_chain


class Waits:
    """Stands for time between sweeps: records each wait, lets it pass, and asks to stop after so many."""

    def __init__(self, clock: ManualClock, rounds: int) -> None:
        self.clock = clock
        self.rounds = rounds
        self.seconds: list[float] = []

    def __call__(self, seconds: float) -> bool:
        self.seconds.append(seconds)
        self.clock.advance(seconds)
        return len(self.seconds) >= self.rounds


class Sweepable(MemoryStore):
    """A store whose sweeps take time and fail as told."""

    def __init__(self, clock: ManualClock, takes_s: float = 0.0, failures: dict[int, StoreError] | None = None) -> None:
        super().__init__(clock)
        self.clock = clock
        self.takes_s = takes_s
        self.failures = failures or {}
        self.sweeps = 0
        self.deadlines_s: list[float] = []

    def sweep(self, *, apply: bool, deadline_s: float = 5.0) -> Effect:
        self.sweeps += 1
        self.deadlines_s.append(deadline_s)
        self.clock.advance(self.takes_s)
        if error := self.failures.get(self.sweeps):
            raise error
        return super().sweep(apply=apply, deadline_s=deadline_s)


def run(store: Sweepable, rounds: int, *, every_s: float = 60, apply: bool = True) -> tuple[list[SweepReport], Waits]:
    reports: list[SweepReport] = []
    waits = Waits(store.clock, rounds)
    last = sweep_loop(
        store, apply=apply, every_s=every_s, clock=store.clock, wait=waits, report=reports.append, deadline_s=7
    )
    assert last is reports[-1]
    return reports, waits


def test_one_sweep_is_dry_unless_told() -> None:
    """Dry, it says what it would remove and removes nothing; applied, it removes that and no more."""
    clock = ManualClock()
    store = MemoryStore(clock)
    chain = a_chain(store.register_space(a_space()), 4)
    put_chain(store, chain, AGENT)
    clock.advance(3 * DAY_S)
    dry = sweep_once(store, apply=False)
    assert (dry.applied, dry.blocks, len(store.scan()[0])) == (False, 4, 4)
    done = sweep_once(store, apply=True)
    assert (done.applied, done.blocks, len(store.scan()[0])) == (True, 4, 0)
    assert sweep_once(store, apply=True).blocks == 0


def test_sweeps_begin_at_the_asked_distance() -> None:
    """The time that a sweep takes is part of the distance; each has the same deadline."""
    store = Sweepable(ManualClock(), takes_s=10)
    reports, waits = run(store, 3)
    assert waits.seconds == [50, 50, 50]
    assert [report.at_s for report in reports] == [T0_S, T0_S + 60, T0_S + 120]
    assert store.deadlines_s == [7, 7, 7]


def test_a_slow_sweep_is_followed_at_once() -> None:
    """A sweep longer than the distance does not pile up waits."""
    _, waits = run(Sweepable(ManualClock(), takes_s=100), 2)
    assert waits.seconds == [0, 0]


def test_a_node_that_is_down_does_not_end_the_loop() -> None:
    """A retryable failure is reported by name and tried again in the next round."""
    store = Sweepable(ManualClock(), failures={2: Unavailable("node down")})
    reports, _ = run(store, 3)
    assert [report.complete for report in reports] == [True, False, True]
    assert (reports[1].effect, reports[1].error) == (None, "Unavailable: node down")


def test_an_error_that_time_does_not_cure_ends_the_loop() -> None:
    """A wrong token will not become right by waiting."""
    store = Sweepable(ManualClock(), failures={2: Unauthorized("wrong token")})
    with pytest.raises(Unauthorized):
        run(store, 5)
    assert store.sweeps == 2


def test_a_sweep_that_missed_a_node_is_not_complete() -> None:
    """An effect that names failed nodes is no full sweep."""
    assert SweepReport(0.0, Effect(True, ())).complete
    assert not SweepReport(0.0, Effect(True, (), nodes_failed={"b": "down"})).complete


def test_the_loop_removes_what_expires_between_sweeps() -> None:
    """Hourly sweeps over four days: the blocks go with the first sweep at or after their deadline."""
    store = Sweepable(ManualClock())
    put_chain(store, a_chain(store.register_space(a_space()), 3), AGENT)
    reports, _ = run(store, 4 * 24, every_s=3600)
    removed = {report.at_s: report.effect.blocks for report in reports if report.effect and report.effect.blocks}
    assert removed == {T0_S + 3 * DAY_S: 3}


@pytest.mark.parametrize("every_s", [0, -1, 0.5])
def test_a_loop_without_a_pause_is_refused(every_s: float) -> None:
    """Sweeping without end would keep a node busy for nothing."""
    with pytest.raises(ValueError, match="apart"):
        run(Sweepable(ManualClock()), 1, every_s=every_s)
