"""The attach bench on engines that are not there: what it asks in its time, and what it says of the rest."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ops.bench import attach_runs
from ops.bench.attach_parts import LONG, PARTS, PROMPTS, REPLAY, TIER, Timetable
from ops.bench.attach_runs import PAIRS_MIN, Runs, Settings
from ops.bench.attach_ways import BARE, EXAMPLE, REPRISE, WAYS, Way

LENGTHS = (1024, 2048, 4096, 8192)
START_S = 35.0
ANSWER = [7, 7]


class Clock:
    """Time that passes only where an engine works."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s


class Engine:
    """Computes a prompt that nobody saved in the time that its length takes, and has any other at once, be it from what
    was saved (``external``) or from its own memory."""

    pid = 0

    def __init__(self, way: Way, clock: Clock, slowness: float, saved: set[tuple[str, tuple[int, ...]]]) -> None:
        self.way, self._clock, self._slowness, self._saved = way, clock, slowness, saved
        self._own: set[tuple[int, ...]] = set()

    def ask(self, tokens: Sequence[int], answer: int) -> dict[str, Any]:
        known = (self.way.name, tuple(tokens)) in self._saved
        seconds = 0.5 if known else self._slowness * (len(tokens) / 4096) ** 1.6
        self._clock.now_s += seconds
        self._saved.add((self.way.name, tuple(tokens)))
        external = len(tokens) if known and tuple(tokens) not in self._own else 0
        self._own.add(tuple(tokens))
        return {"ttft_s": seconds, "ttft_cpu_s": seconds, "hit": 0, "external": external, "tokens": ANSWER}

    def forget(self) -> None:
        self._own.clear()


class FakeRuns(Runs):
    """Runs whose engines are those above."""

    clock: Clock
    slowness: float
    saved: set[tuple[str, tuple[int, ...]]]

    @contextmanager
    def _engines(self, leave_out: str = "") -> Iterator[dict[str, Any]]:
        self.clock.now_s += START_S
        self._start_s = START_S
        self._text = list(range(5000))
        yield {
            name: Engine(way, self.clock, self.slowness, self.saved)
            for name, way in self.ways.items()
            if name != leave_out
        }


def run(monkeypatch: pytest.MonkeyPatch, minutes: float, slowness: float, parts: Sequence[str] = PARTS) -> FakeRuns:
    clock = Clock()
    monkeypatch.setattr(attach_runs, "time", clock)
    monkeypatch.setattr(attach_runs, "device_read_bytes", lambda pids: 0)
    settings = Settings(Path("python"), Path("model"), LENGTHS, 8704, "", 60 * minutes, parts=tuple(parts))
    ways: Mapping[str, Way] = {name: Way(name, None, None, lambda: None) for name in WAYS}
    timetable = Timetable(60 * minutes, parts, clock.monotonic)
    runs = FakeRuns(settings, timetable, dict(ways), Path("logs"), lambda line: None)
    runs.clock, runs.slowness, runs.saved = clock, slowness, set()
    with timetable.part(TIER):
        clock.now_s += 70.0
    runs.run()
    return runs


def test_a_quarter_of_an_hour_is_enough_for_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every length in every way, cold and after a restart, enough pairs for the tax, a replay with a restart."""
    runs = run(monkeypatch, minutes=15.0, slowness=9.0)
    assert runs.skipped == {}
    for phase in ("cold", "restart", "chilled"):
        ways = WAYS if phase == "cold" else (EXAMPLE, REPRISE)
        found = {(one.way, one.nominal) for one in runs.samples if one.phase == phase}
        assert found == {(way, nominal) for way in ways for nominal in LENGTHS}
    assert all(one.external for one in runs.samples if one.phase in ("restart", "chilled"))
    for nominal in LENGTHS[:3]:
        pairs = [one for one in runs.samples if (one.way, one.phase, one.nominal) == (REPRISE, "cold", nominal)]
        assert len(pairs) >= PAIRS_MIN
    assert runs.replayed is not None
    assert 0 < runs.before_restart < len(runs.replayed.turns)
    assert list(runs.timetable.spent_s) == [TIER, PROMPTS, REPLAY, LONG]
    assert runs.clock.now_s <= 15 * 60


def test_on_a_slow_machine_the_bars_come_first_and_the_rest_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """4096 tokens are asked cold and after a restart; what found no time is named, and the run is not much longer."""
    runs = run(monkeypatch, minutes=8.0, slowness=30.0)
    asked = {(one.way, one.phase) for one in runs.samples if one.nominal == 4096}
    assert {(BARE, "cold"), (REPRISE, "cold"), (REPRISE, "restart")} <= asked
    assert {"8192 tokens", "store tax, 4096 tokens"} <= set(runs.skipped)
    assert runs.replayed is not None
    assert runs.before_restart
    assert runs.clock.now_s <= 11 * 60


def test_parts_that_are_not_wanted_leave_their_time_to_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay alone has all the time that is left, and asks nothing else."""
    runs = run(monkeypatch, minutes=6.0, slowness=9.0, parts=(TIER, REPLAY))
    assert {one.phase for one in runs.samples} == {"replay"}
    assert runs.clock.now_s > 5 * 60 or len({one.prompt for one in runs.samples}) > 20


def test_what_a_part_does_not_take_is_left_to_the_next() -> None:
    """The last part ends when the run does, however little those before it took."""
    clock = Clock()
    timetable = Timetable(1000.0, PARTS, clock.monotonic)
    for name in PARTS[:-1]:
        with timetable.part(name) as ends_s:
            assert clock.now_s < ends_s < 1000.0
            clock.now_s += 10.0
    with timetable.part(LONG) as ends_s:
        assert ends_s == pytest.approx(1000.0)
    assert timetable.spent_s == {TIER: 10.0, PROMPTS: 10.0, REPLAY: 10.0, LONG: 0.0}
