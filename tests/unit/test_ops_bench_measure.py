"""Contenders take turns, ratios are taken within rounds, and a bar says what was reached."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

import pytest

from ops.bench.measure import Bar, Case, Contender, Elsewhere, Kind, Measured, Result, cpu_s_of, percentile, ratio, run


def result(name: str, kind: Kind, rates: Sequence[float], p99_s: float = 0.001) -> Result:
    return Result(name, kind, tuple(rates), len(rates), 0.0005, p99_s, p99_s, 0.1)


def measured(*results: Result, bars: tuple[Bar, ...] = ()) -> Measured:
    return Measured("case", "B", 4096, 1, results, bars)


def test_a_ratio_is_the_median_within_rounds() -> None:
    """A machine that slows down by half for both contenders in some rounds does not move the ratio."""
    mine, theirs = [8.0, 4.0, 2.0, 8.0, 1.0], [10.0, 5.0, 2.5, 10.0, 1.25]
    assert ratio(result("a", "store", mine), result("b", "limit", theirs)) == pytest.approx(0.8)


@pytest.mark.parametrize(("share", "expected"), [(0.5, 50), (0.99, 99), (0.999, 100), (1.0, 100), (0.001, 1)])
def test_percentiles_are_values_that_occurred(share: float, expected: int) -> None:
    """The smallest value that the share does not exceed; order does not matter."""
    assert percentile(list(range(100, 0, -1)), share) == expected


def test_no_values_have_no_percentile() -> None:
    """An empty case is an error, not a zero."""
    with pytest.raises(ValueError, match="0 values"):
        percentile([], 0.5)


def test_every_round_runs_all_and_begins_with_another() -> None:
    """Within a round each contender runs once; the first one rotates; preparing comes before each call."""
    said: list[str] = []

    def contender(name: str, kind: Kind) -> Contender:
        def once() -> Elsewhere:
            said.append(name)
            return Elsewhere(1.0)

        return Contender(name, kind, 1.0, once, lambda: said.append(f"prepare {name}"))

    case = Case("case", "B", (contender("limit", "limit"), contender("reprise", "store")))
    # A call that takes a second fills more than a sample, so that each sample is one call.
    done = run(case, rounds=3, ends_s=time.monotonic() + 60, sample_s=1e-9)
    calls = [name for name in said if not name.startswith("prepare")]
    assert calls[-6:] == ["reprise", "limit", "limit", "reprise", "reprise", "limit"]
    assert said[-2:] == ["prepare limit", "limit"]
    assert done.store.name == "reprise"
    assert done.store.rates == (1.0, 1.0, 1.0)
    assert done.notes == ("only 3 rounds: time was short",)


def test_a_round_begins_only_before_the_end() -> None:
    """One round is measured even when time is up, and no second one."""
    calls: list[int] = []
    contenders = tuple(
        Contender(name, kind, 1.0, lambda: calls.append(1)) for name, kind in (("a", "store"), ("b", "limit"))
    )
    done = run(Case("case", "keys", contenders), rounds=5, ends_s=time.monotonic() - 1, sample_s=1e-9)
    assert len(done.store.rates) == 1
    assert done.store.cpu_s_per_gb is None


def test_reads_and_writes_of_other_processes_have_percentiles_of_their_own() -> None:
    """The seconds that a child took count, not those of waiting for it; reads and writes are kept apart."""
    contenders = (
        Contender("reprise", "store", 100.0, lambda: Elsewhere(2.0, (0.1, 0.2), (0.7,))),
        Contender("limit", "limit", 100.0, lambda: Elsewhere(1.0)),
    )
    done = run(Case("case", "B", contenders), rounds=5, ends_s=time.monotonic() + 60, sample_s=1e-9)
    assert done.store.rate == 50.0
    assert (done.store.p50_s, done.store.p99_s) == (0.1, 0.2)
    assert done.store.writes_s == (0.7, 0.7, 0.7)
    assert done.limit.writes_s is None
    assert done.notes == ()


@pytest.mark.parametrize(
    ("bar", "reached", "met"),
    [
        (Bar("rate", 0.8, "limit"), 0.5, False),
        (Bar("rate", 0.5, "limit"), 0.5, True),
        (Bar("rate", 4.0), 5.0, True),
        (Bar("rate", 2.0, "peer"), 2.5, True),
        (Bar("p99_s", 2.0, "limit"), 4.0, False),
        (Bar("p99_s", 0.01), 0.004, True),
        (Bar("cpu_s_per_gb", 0.05), 0.1, False),
    ],
)
def test_bars_say_what_was_reached(bar: Bar, reached: float, met: bool) -> None:
    """Rates are to reach a bound, times to stay under it; against another they are ratios; peers: the best one."""
    case = measured(
        result("reprise", "store", [5.0], 0.004),
        result("limit", "limit", [10.0], 0.001),
        result("slow", "peer", [1.0]),
        result("fast", "peer", [2.0]),
        bars=(bar,),
    )
    assert case.verdicts[0].reached == pytest.approx(reached)
    assert case.verdicts[0].met is met


def test_a_bar_without_its_peer_is_neither_met_nor_missed() -> None:
    """With no peer installed nothing is claimed."""
    case = measured(result("a", "store", [5.0]), result("b", "limit", [9.0]), bars=(Bar("rate", 2.0, "peer"),))
    assert case.verdicts[0].met is None
    assert case.to_json()["bars"] == [{"bar": ">= 2 x peer", "reached": None, "met": None}]


@pytest.mark.parametrize(
    ("kinds", "bars", "message"),
    [
        (("store", "store", "limit"), (), "needs one store and a limit"),
        (("store", "peer"), (), "needs one store and a limit"),
        (("store", "limit"), (Bar("rate", 1.0, "nobody"),), "does not run"),
    ],
)
def test_a_case_without_its_baseline_is_refused(kinds: Sequence[Kind], bars: tuple[Bar, ...], message: str) -> None:
    """There is no case that compares with nothing, and no bar against what is not measured."""
    contenders = tuple(Contender(str(at), kind, 1.0, lambda: None) for at, kind in enumerate(kinds))
    with pytest.raises(ValueError, match=message):
        Case("case", "B", contenders, bars)


def test_the_cpu_of_a_process_is_counted_for_all_its_threads() -> None:
    """It grows with work, agrees with the process's own clock, and is 0 for a process that is gone."""
    before_s = cpu_s_of(os.getpid())
    ends_s = time.process_time() + 0.02
    while time.process_time() < ends_s:
        pass
    assert cpu_s_of(os.getpid()) - before_s + 1e-3 >= 0.02
    assert abs(cpu_s_of(os.getpid()) - time.process_time()) < 0.5
    assert cpu_s_of(2**22 + 1) == 0.0
