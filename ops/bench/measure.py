"""Contenders measured in turns: what is compared runs in the same minute, under the same neighbours.

Owns samples, rounds, medians and ratios. Does not know what a contender does. Invariants: every round runs every
contender once, beginning with another one each time; a ratio is the median of the ratios within rounds, so that a
machine that slows down for both changes it little; what a contender prepares is not counted.

    round 1   [store] [limit] [peer]
    round 2           [limit] [peer] [store]
    round 3                   [peer] [store] [limit]
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any, Literal

Kind = Literal["store", "limit", "baseline", "peer"]
"""``store``: what is measured. ``limit``: what the machine could do. ``baseline``: something else to compare with."""

ROUNDS_MIN = 5
CALLS_PER_SAMPLE_MAX = 2000
SAMPLE_S = 0.2
"""A contender's share of one round; short calls are repeated to fill it."""
GIGA = 1e9
PEERS_BARRED = ("mooncake", "valkey")
"""Bars may name them though they are not here: then nothing is compared."""


def nothing() -> None:
    """Nothing to prepare."""


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """One call that other processes made and timed: how long it took, and each of its reads and writes."""

    seconds: float
    reads_s: Sequence[float] = ()
    writes_s: Sequence[float] = ()


@dataclass(frozen=True, slots=True)
class Contender:
    """``once`` does ``amount`` (bytes, keys or starts) of work; it returns the time if that was taken elsewhere.

    ``prepare`` runs before each call and ``around`` is held during each sample; neither is counted. ``pids``: the
    processes, besides this one, that do its work. ``may_fail``: what it may raise without ending its case.
    """

    name: str
    kind: Kind
    amount: float
    once: Callable[[], Elsewhere | None]
    prepare: Callable[[], None] = nothing
    around: Callable[[], AbstractContextManager[object]] = nullcontext
    pids: Callable[[], Sequence[int]] = tuple
    may_fail: tuple[type[Exception], ...] = ()


@dataclass(frozen=True, slots=True)
class Result:
    """One contender over all rounds. ``rates``: amount a second in each round, in order.

    Percentiles are of calls, or of the reads within them; ``writes_s``: p50, p99 and p99.9 of the writes, if there are
    both. ``cpu_s_per_gb``: of this process and of those that serve it; None where the amount is not bytes.
    """

    name: str
    kind: Kind
    rates: tuple[float, ...]
    calls: int
    p50_s: float
    p99_s: float
    p999_s: float
    cpu_s_per_gb: float | None = None
    writes_s: tuple[float, float, float] | None = None

    @property
    def rate(self) -> float:
        return median(self.rates)

    @property
    def spread(self) -> float:
        """How far the rounds lie apart: the greatest rate less the smallest, over the median."""
        return (max(self.rates) - min(self.rates)) / self.rate

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "rate": self.rate, "spread": self.spread}


@dataclass(frozen=True, slots=True)
class Bar:
    """A figure to reach. ``of``: a contender's name, ``peer`` for the best peer, a peer's, or empty for itself.

    ``figure``: ``rate`` (of the other), or ``p50_s``, ``p99_s``, ``cpu_s_per_gb``. Rates are to be at least ``bound``,
    all else at most. ``enough``: a rate of its own that will do whatever the other's is.
    """

    figure: Literal["rate", "p50_s", "p99_s", "cpu_s_per_gb"]
    bound: float
    of: str = ""
    enough: float = math.inf

    @property
    def text(self) -> str:
        sign = ">=" if self.figure == "rate" else "<="
        unit = f" x {self.of}" if self.of else {"rate": "/s", "cpu_s_per_gb": " CPU s/GB"}.get(self.figure, " s")
        name = {"p50_s": "p50 ", "p99_s": "p99 "}.get(self.figure, "")
        alone = "" if math.isinf(self.enough) else f" or {self.enough:g}/s"
        return f"{name}{sign} {self.bound:g}{unit}{alone}"


@dataclass(frozen=True, slots=True)
class Case:
    """What is measured: ``contenders`` hold exactly one of kind ``store`` and at least one ``limit``.

    ``unit``: what the amounts count, ``B`` or ``keys`` or ``gets`` or ``starts``.
    """

    name: str
    unit: str
    contenders: tuple[Contender, ...]
    bars: tuple[Bar, ...] = ()
    size_bytes: int = 0
    batch: int = 1
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        kinds = [contender.kind for contender in self.contenders]
        if kinds.count("store") != 1 or "limit" not in kinds:
            raise ValueError(f"case {self.name} needs one store and a limit, not {kinds}")
        names = [contender.name for contender in self.contenders]
        if len(set(names)) != len(names):
            raise ValueError(f"case {self.name} names a contender twice")
        unknown = [bar.of for bar in self.bars if bar.of not in ("", "peer", *PEERS_BARRED, *names)]
        if unknown:
            raise ValueError(f"case {self.name} has bars against {unknown}, which it does not run")


@dataclass(frozen=True, slots=True)
class Verdict:
    """A bar and what was reached; ``met`` is None where there was nothing to compare with."""

    bar: Bar
    reached: float | None
    is_enough: bool = False

    @property
    def met(self) -> bool | None:
        if self.reached is None:
            return None
        if self.is_enough:
            return True
        return self.reached >= self.bar.bound if self.bar.figure == "rate" else self.reached <= self.bar.bound


@dataclass(frozen=True, slots=True)
class Measured:
    """A case's results; the store's stands first."""

    name: str
    unit: str
    size_bytes: int
    batch: int
    results: tuple[Result, ...]
    bars: tuple[Bar, ...] = ()
    notes: tuple[str, ...] = ()
    load_average: float = 0.0
    dropped: Mapping[str, str] = field(default_factory=dict)
    """Contenders that failed meanwhile, and how."""

    @property
    def label(self) -> str:
        """The case in a few words."""
        return f"{self.name} {self.shape}"

    @property
    def shape(self) -> str:
        """Size and batch."""
        return f"{self.size_bytes // 1024} KiB x {self.batch}" if self.size_bytes else f"{self.batch}"

    @property
    def store(self) -> Result:
        return self.results[0]

    @property
    def limit(self) -> Result:
        return next(result for result in self.results if result.kind == "limit")

    @property
    def best_peer(self) -> Result | None:
        return max((result for result in self.results if result.kind == "peer"), key=lambda it: it.rate, default=None)

    def named(self, name: str) -> Result | None:
        if name == "peer":
            return self.best_peer
        named = (result for result in self.results if name in (result.name, result.name.split()[0]))
        return max(named, key=lambda result: result.rate, default=None)

    @property
    def verdicts(self) -> tuple[Verdict, ...]:
        return tuple(Verdict(bar, _reached(self, bar), self.store.rate >= bar.enough) for bar in self.bars)

    def to_json(self) -> dict[str, Any]:
        return {
            "case": self.name,
            "unit": self.unit,
            "size_bytes": self.size_bytes,
            "batch": self.batch,
            "limit": self.limit.name,
            "ratios": {other.name: ratio(self.store, other) for other in self.results[1:]},
            "results": [result.to_json() for result in self.results],
            "bars": [
                {"bar": verdict.bar.text, "reached": verdict.reached, "met": verdict.met} for verdict in self.verdicts
            ],
            "notes": list(self.notes),
            "load_average": self.load_average,
            "dropped": dict(self.dropped),
        }


def _reached(measured: Measured, bar: Bar) -> float | None:
    mine: float | None = getattr(measured.store, bar.figure)
    if not bar.of or mine is None:
        return mine
    other = measured.named(bar.of)
    if other is None:
        return None
    if bar.figure == "rate":
        return ratio(measured.store, other)
    theirs: float | None = getattr(other, bar.figure)
    return mine / theirs if theirs else None


def ratio(one: Result, other: Result) -> float:
    """Median over rounds of one's rate over the other's in the same round."""
    return median(mine / theirs for mine, theirs in zip(one.rates, other.rates, strict=True))


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least ``share`` of all values do not exceed. Raises ValueError for no values."""
    if not values or not 0.0 < share <= 1.0:
        raise ValueError(f"no {share} percentile of {len(values)} values")
    return sorted(values)[math.ceil(share * len(values)) - 1]


# --- running --------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Tally:
    """What one contender has done so far."""

    calls_per_sample: int
    calls: int = 0
    rates: list[float] = field(default_factory=list)
    reads_s: list[float] = field(default_factory=list)
    writes_s: list[float] = field(default_factory=list)
    cpu_s: float = 0.0


def run(case: Case, *, rounds: int, ends_s: float, sample_s: float = SAMPLE_S) -> Measured:
    """Measure a case in at least one and at most ``rounds`` rounds; none begins after ``ends_s`` (monotonic)."""
    order = sorted(case.contenders, key=lambda contender: contender.kind != "store")
    tallies: dict[str, _Tally] = {}
    dropped: dict[str, str] = {}
    for contender in order:
        with _dropping(contender, dropped):
            tallies[contender.name] = _Tally(_calls_for(contender, sample_s))
    done = 0
    while done < rounds and (done == 0 or time.monotonic() < ends_s):
        for at in range(len(order)):
            contender = order[(at + done) % len(order)]
            if contender.name not in dropped:
                with _dropping(contender, dropped), contender.around():
                    _sample(contender, tallies[contender.name])
        done += 1
    order = [contender for contender in order if contender.name not in dropped]
    notes = case.notes if done >= ROUNDS_MIN else (*case.notes, f"only {done} rounds: time was short")
    results = tuple(_result(contender, tallies[contender.name], case.unit) for contender in order)
    load = os.getloadavg()[0]
    return Measured(case.name, case.unit, case.size_bytes, case.batch, results, case.bars, notes, load, dropped)


@contextmanager
def _dropping(contender: Contender, dropped: dict[str, str]) -> Iterator[None]:
    """Note a contender that failed in a way that it may, so that the case goes on without it."""
    try:
        yield
    except contender.may_fail as error:
        dropped[contender.name] = f"failed: {error}"


def _calls_for(contender: Contender, sample_s: float) -> int:
    """One call to warm up, one to see how many fill a sample; only the warm one where a call is long."""
    took_s = 0.0
    with contender.around():
        for _ in range(2):
            contender.prepare()
            began_s = time.perf_counter()
            contender.once()
            took_s = time.perf_counter() - began_s
            if took_s > 5 * sample_s:
                break
    return min(max(round(sample_s / max(took_s, 1e-9)), 1), CALLS_PER_SAMPLE_MAX)


def _sample(contender: Contender, tally: _Tally) -> None:
    took_s = 0.0
    served_from_s = _served_s(contender)
    for _ in range(tally.calls_per_sample):
        contender.prepare()
        cpu_s, began_s = time.process_time(), time.perf_counter()
        elsewhere = contender.once()
        ended_s = time.perf_counter()
        tally.cpu_s += time.process_time() - cpu_s
        call = elsewhere or Elsewhere(ended_s - began_s)
        tally.reads_s += call.reads_s or (call.seconds,)
        tally.writes_s += call.writes_s
        took_s += call.seconds
    tally.cpu_s += _served_s(contender) - served_from_s
    tally.calls += tally.calls_per_sample
    tally.rates.append(tally.calls_per_sample * contender.amount / took_s)


def _result(contender: Contender, tally: _Tally, unit: str) -> Result:
    p50_s, p99_s, p999_s = _percentiles(tally.reads_s)
    return Result(
        name=contender.name,
        kind=contender.kind,
        rates=tuple(tally.rates),
        calls=tally.calls,
        p50_s=p50_s,
        p99_s=p99_s,
        p999_s=p999_s,
        cpu_s_per_gb=tally.cpu_s / (tally.calls * contender.amount / GIGA) if unit == "B" else None,
        writes_s=_percentiles(tally.writes_s) if tally.writes_s else None,
    )


def _percentiles(durations_s: Sequence[float]) -> tuple[float, float, float]:
    ordered = sorted(durations_s)
    return percentile(ordered, 0.5), percentile(ordered, 0.99), percentile(ordered, 0.999)


def _served_s(contender: Contender) -> float:
    return sum(cpu_s_of(pid) for pid in contender.pids())


def cpu_s_of(pid: int) -> float:
    """CPU seconds that a process has used, all its threads, also ended ones. 0 if it is gone.

    Source: clock_getcpuclockid(3) on Linux; the number of the clock is made from the process's.
    """
    try:
        return time.clock_gettime((~pid << 3) | 2)
    except OSError:
        return 0.0
