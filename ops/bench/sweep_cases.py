"""A case of one request at a time while a sweep frees segments: what expired must not slow down what is read.

Owns what expires when, and what the sweep did. Invariants: every round has its own expired blocks, and its gets without
a sweep are of the same minute; beside a sweep gets go on until it has ended or there are enough of them; then it ends
by itself; every get is checked.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from statistics import fmean

from kvstore.client import StoreClient
from kvstore.keys import BlockName
from kvstore.limits import KIB, MIB
from kvstore.traffic import CHAT, OPERATOR_CLASS_MIN, ClassRule, ClassRules, TrafficClass
from ops.bench.baselines import Buffers
from ops.bench.ground import BenchFailed, Filled, Ground, get
from ops.bench.measure import Bar, Case, Contender, Elsewhere
from ops.bench.request_cases import CHAIN_BLOCKS_MAX, FILL_SHARE, SMALL_CAPACITY_BYTES, SMALL_PAYLOAD_BYTES

IDLE = "no sweep"
READ_BYTES = 3 * KIB
READ_BLOCKS = 4096
READS_PER_S = 5000
"""Of a sample's time, so that each round has enough of them for a percentile. (They take longer than that.)"""
READS_MIN = 100
"""Gets that a round has, also if its sweep has ended before."""
THINK_S = 0.0005
"""Between two gets of the one reader, who would otherwise keep a processor from everybody."""
DAY_S = 86_400
EXPIRES_S = 2.5
"""After they were stored: then a class that is kept for a second has expired, whole seconds and all."""
SWEEP_S_MAX = 600.0


@dataclass(slots=True)
class _Sweeps:
    """What expires in each turn, and what became of it. ``left``: class bytes that are yet to expire."""

    store: Filled
    control: StoreClient
    left: list[TrafficClass]
    stored_s: float
    running: threading.Thread | None = None
    blocks: int = 0
    segments_freed: int = 0
    took_s: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def expire(self) -> None:
        """Let one class's blocks grow too old. Raises BenchFailed if there is none left."""
        if not self.left:
            raise BenchFailed("there were more rounds than expired days")
        gone, policy = self.left.pop(), self.control.policy()
        rules = tuple(replace(rule, keep_for_s=1) if rule.class_byte == gone else rule for rule in policy.rules.rules)
        self.control.set_policy(ClassRules(rules), "", expected_version=policy.version, apply=True)
        time.sleep(max(0.0, self.stored_s + EXPIRES_S - time.monotonic()))

    def sweep(self) -> None:
        began_s = time.perf_counter()
        try:
            swept = self.control.sweep(apply=True, deadline_s=SWEEP_S_MAX)
        except Exception as error:  # the thread's seam: told to whoever waits for it
            self.failures.append(repr(error))
            return
        self.took_s.append(time.perf_counter() - began_s)
        self.blocks += swept.blocks
        self.segments_freed += swept.segments_freed

    @contextmanager
    def sweeping(self) -> Iterator[None]:
        """A sweep of an expired day goes on meanwhile. Raises BenchFailed if it failed."""
        self.expire()
        self.running = threading.Thread(target=self.sweep, daemon=True)
        self.running.start()
        try:
            yield
        finally:
            self.running.join(SWEEP_S_MAX)
            self.running = None
        if self.failures:
            raise BenchFailed(f"a sweep failed: {self.failures[0]}")

    @property
    def goes_on(self) -> bool:
        return self.running is not None and self.running.is_alive()


def sweep_cases(ground: Ground, ends_s: float) -> Generator[Case]:
    """Single small blocks got by one reader, with a sweep beside it and without."""
    turns = ground.settings.rounds + 1
    classes = [TrafficClass(OPERATOR_CLASS_MIN + turn) for turn in range(turns)]
    capacity_bytes = max(SMALL_CAPACITY_BYTES * (ground.settings.blocks + READ_BLOCKS), 64 * MIB)
    with ground.store("sweep", capacity_bytes) as store:
        policy = store.client.policy()
        rules = [ClassRule(byte, f"day-{at}", DAY_S, priority=1) for at, byte in enumerate(classes)]
        rules_then = ClassRules((*policy.rules.rules, *rules))
        store.client.set_policy(rules_then, "", expected_version=policy.version, apply=True)
        names = ground.fill(store, READ_BYTES, READ_BLOCKS, traffic_class=CHAT)
        stored = _fill(ground, store, classes, ends_s)
        control = StoreClient.connect([store.process.unix])
        try:
            sweeps = _Sweeps(store, control, classes, time.monotonic())
            yield _case(store, sweeps, names, stored, max(round(READS_PER_S * ground.settings.sample_s), 1))
        finally:
            control.close()
        if sweeps.took_s:
            ground.sweeps |= {
                "sweeps": len(sweeps.took_s),
                "blocks": sweeps.blocks,
                "segments_freed": sweeps.segments_freed,
                "seconds": sum(sweeps.took_s),
            }


def _fill(ground: Ground, store: Filled, classes: Sequence[TrafficClass], ends_s: float) -> int:
    """Store blocks of each class; how many in all."""
    wanted = max(ground.settings.blocks // len(classes), 1)
    stop_s = time.monotonic() + FILL_SHARE * (ends_s - time.monotonic())
    stored = [0] * len(classes)
    while min(stored) < wanted and (not min(stored) or time.monotonic() < stop_s):
        at = stored.index(min(stored))
        count = min(CHAIN_BLOCKS_MAX, wanted - stored[at])
        ground.fill(store, SMALL_PAYLOAD_BYTES, count, traffic_class=classes[at])
        stored[at] += count
    ground.progress(f"stored {sum(stored)} blocks that will expire")
    return sum(stored)


def _case(store: Filled, sweeps: _Sweeps, names: Sequence[BlockName], stored: int, reads: int) -> Case:
    views = Buffers(READ_BYTES, 1).views
    drawn = random.Random(6)

    def one() -> float:
        name = drawn.choice(names)
        began_s = time.perf_counter()
        get(store.client, store.space, [name], views)
        took_s = time.perf_counter() - began_s
        time.sleep(THINK_S)
        return took_s

    def beside() -> Elsewhere:
        reads_s = [one()]
        while len(reads_s) < READS_MIN or (sweeps.goes_on and len(reads_s) < reads):
            reads_s.append(one())
        return Elsewhere(fmean(reads_s), reads_s)

    def alone() -> Elsewhere:
        reads_s = [one() for _ in range(reads)]
        return Elsewhere(fmean(reads_s), reads_s)

    return Case(
        "get beside a sweep",
        "gets",
        (
            Contender("reprise", "store", 1, beside, around=sweeps.sweeping, pids=store.process.pids),
            Contender(IDLE, "limit", 1, alone, pids=store.process.pids),
        ),
        (Bar("p99_s", 1.5, IDLE),),
        READ_BYTES,
        1,
        (f"{stored} blocks of {SMALL_PAYLOAD_BYTES} bytes, of which a part expires and is swept in each round",),
    )
