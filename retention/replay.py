"""Replaying a workload through simulated nodes: what hits, what is written, what is kept.

Owns what one request does (look up, touch what hits, store the rest), the clock, and the sums. Does not know formats of
traces or how results are shown. Invariants: hit and missed tokens of a class add up to its prompts'; what nodes stored
is what was refused nowhere; the same workload and setting give the same result.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvstore.capacity import FIRST_RECORD, VolumeLayout, blocks_max, divide, record_bytes
from kvstore.limits import BATCH_BLOCKS_MAX
from kvstore.placement import Placement
from kvstore.traffic import ClassRules
from retention.intake import Intake
from retention.volume import Blocks, Counts, Shelf, Volume
from retention.workload import Request, Workload

SWEEP_EVERY_S = 300
SAMPLES = 200
"""How often, evenly over the time of the trace, it is looked what is kept."""
UNBOUNDED_BYTES = 2**62


@dataclass(frozen=True, slots=True)
class Setting:
    """The store to simulate. ``capacity_bytes`` of each node, which its ``volumes`` (data directories) share; None has
    no bound. ``payload_bytes`` of one block.
    """

    rules: ClassRules
    payload_bytes: int
    capacity_bytes: int | None = None
    nodes: int = 1
    segment_bytes: int | None = None
    sweep_every_s: int = SWEEP_EVERY_S
    volumes: int = 1

    def __post_init__(self) -> None:
        if self.nodes < 1 or self.volumes < 1 or self.sweep_every_s < 1 or self.payload_bytes < 1:
            raise ValueError("a simulation has nodes, volumes, blocks of a byte or more, and sweeps a second apart")
        if self.slots < 1:
            raise ValueError(
                f"a block of {self.payload_bytes} bytes does not fit a segment of {self.layout.segment_bytes}: "
                "choose a larger segment size or capacity"
            )

    @property
    def layout(self) -> VolumeLayout:
        """Of one volume. Raises VolumeError where the capacity is too small for a store."""
        capacity_bytes = UNBOUNDED_BYTES if self.capacity_bytes is None else self.capacity_bytes // self.volumes
        return divide(capacity_bytes, self.segment_bytes)

    @property
    def record_bytes(self) -> int:
        return record_bytes(self.payload_bytes)

    @property
    def slots(self) -> int:
        """Records of one segment."""
        return (self.layout.segment_bytes - FIRST_RECORD) // self.record_bytes


@dataclass(slots=True)
class ClassTraffic:
    """What the requests of one class asked and found."""

    requests: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0
    prompt_blocks: int = 0
    hit_blocks: int = 0


@dataclass(slots=True)
class Keeping:
    """What was kept of one class, by samples: living blocks and segments in use, on all nodes or one."""

    blocks_sum: int = 0
    blocks_max: int = 0
    segments_max: int = 0
    blocks_end: int = 0

    def add(self, blocks: int, segments: int) -> None:
        self.blocks_sum += blocks
        self.blocks_max = max(self.blocks_max, blocks)
        self.segments_max = max(self.segments_max, segments)
        self.blocks_end = blocks


@dataclass(slots=True)
class Outcome:
    """One replay. ``counts`` of volumes (node by node) and ``keeping`` of nodes are by class byte."""

    setting: Setting
    span_s: float
    accesses: int
    traffic: dict[int, ClassTraffic] = field(default_factory=dict)
    counts: list[dict[int, Counts]] = field(default_factory=list)
    keeping: dict[int, Keeping] = field(default_factory=dict)
    node_keeping: list[Keeping] = field(default_factory=list)
    all_keeping: Keeping = field(default_factory=Keeping)
    samples: int = 0
    segments_recycled: int = 0

    @property
    def classes(self) -> list[int]:
        return sorted({*self.traffic, *self.keeping, *(number for volume in self.counts for number in volume)})

    def traffic_of(self, class_byte: int | None) -> ClassTraffic:
        """Of one class, or of all (None)."""
        total = ClassTraffic()
        for number, part in self.traffic.items():
            if class_byte in (None, number):
                total.requests += part.requests
                total.prompt_tokens += part.prompt_tokens
                total.hit_tokens += part.hit_tokens
                total.prompt_blocks += part.prompt_blocks
                total.hit_blocks += part.hit_blocks
        return total

    def counts_of(self, *, class_byte: int | None = None, node: int | None = None) -> Counts:
        """Of one class or all, on one node or all."""
        total = Counts()
        for at, by_class in enumerate(self.counts):
            for number, part in by_class.items():
                if node in (None, at // self.setting.volumes) and class_byte in (None, number):
                    total.stored += part.stored
                    total.refused += part.refused
                    total.declined += part.declined
                    total.rewritten += part.rewritten
                    total.evicted += part.evicted
                    total.expired += part.expired
        return total


def replay(
    workload: Workload, setting: Setting, progress: Callable[[int], None] = lambda requests_done: None
) -> Outcome:
    """``progress`` is told how many requests were replayed since it was told last."""
    run = Replay(workload, setting)
    done = 0
    for at, request in enumerate(workload.requests, 1):
        run.advance(request.at_s)
        run.request(request)
        if at - done >= 256:
            progress(at - done)
            done = at
    progress(len(workload.requests) - done)
    return run.finish()


class Replay:
    """One replay under way: ``advance`` and ``request`` in turns, then ``finish``."""

    def __init__(self, workload: Workload, setting: Setting) -> None:
        layout = setting.layout
        shelf = Shelf(workload.before, setting.slots, setting.rules)
        self.shelf = shelf
        self._setting = setting
        rules = setting.rules.for_volume(layout.capacity_bytes * setting.volumes, setting.volumes)
        intakes = [Intake(workload.blocks, setting.record_bytes) for _ in range(setting.nodes)]
        self._volumes = [
            Volume(
                shelf,
                rules,
                setting.record_bytes,
                layout.segment_bytes,
                layout.segments_max,
                blocks_max(layout.index_budget_bytes),
                intake,
            )
            for intake in intakes
            for _ in range(setting.volumes)
        ]
        self._owners = owners_of(workload, setting)
        self._block_tokens = workload.block_tokens
        begin_s = workload.requests[0].at_s
        self._sweep_s = int(begin_s) + setting.sweep_every_s
        self._sample_every_s = max(workload.span_s / SAMPLES, 1.0)
        self._sample_s = begin_s + self._sample_every_s
        self._end_s = workload.requests[-1].at_s
        self._outcome = Outcome(setting, workload.span_s, workload.accesses)
        self._outcome.node_keeping = [Keeping() for _ in range(setting.nodes)]

    def advance(self, now_s: float) -> None:
        """Let time pass: sweeps and samples that are due before ``now_s``, in their order."""
        while min(self._sweep_s, self._sample_s) <= now_s:
            if self._sweep_s <= self._sample_s:
                self._sweep(now_s)
            else:
                self._sample(self._sample_s)
                self._sample_s += self._sample_every_s

    def request(self, request: Request) -> int:
        """Look up the longest stored prefix, touch it, and put what is not there; how many blocks the prefix has."""
        blocks, now_s = request.blocks(), int(request.at_s)
        alive = self.shelf.until_s[blocks] > request.at_s
        hits = int(alive.argmin()) if len(alive) and not alive.all() else len(blocks)
        self.shelf.touch(blocks[:hits], request.class_byte, now_s)
        self._put(blocks[hits:], request.class_byte, now_s)
        traffic = self._outcome.traffic.setdefault(request.class_byte, ClassTraffic())
        traffic.requests += 1
        traffic.prompt_tokens += request.tokens
        traffic.hit_tokens += min(hits * self._block_tokens, request.tokens)
        traffic.prompt_blocks += len(blocks)
        traffic.hit_blocks += hits
        return hits

    def finish(self) -> Outcome:
        self._sample(self._end_s)
        self._outcome.counts = [volume.counts for volume in self._volumes]
        self._outcome.segments_recycled = sum(volume.recycled for volume in self._volumes)
        return self._outcome

    def _put(self, blocks: Blocks, class_byte: int, now_s: int) -> None:
        """To each block's node, in batches as a client makes them."""
        if not len(blocks):
            return
        owners = self._owners[blocks]
        for volume in np.unique(owners).tolist():
            owned: Blocks = blocks[owners == volume]
            for begin in range(0, len(owned), BATCH_BLOCKS_MAX):
                self._volumes[volume].put(owned[begin : begin + BATCH_BLOCKS_MAX], class_byte, now_s)

    def _sweep(self, now_s: float) -> None:
        """The sweep that is due, or, as long as nothing expires, the first one at which something may have."""
        at_s, every_s = self._sweep_s, self._setting.sweep_every_s
        soonest_s = min(volume.soonest_s for volume in self._volumes)
        if soonest_s > at_s:
            idle_until_s = min(soonest_s, int(now_s) + 1)
            self._sweep_s += max(1, -(-(idle_until_s - at_s) // every_s)) * every_s
            return
        for volume in self._volumes:
            volume.sweep(at_s)
        self._sweep_s += every_s

    def _sample(self, at_s: float) -> None:
        outcome = self._outcome
        outcome.samples += 1
        totals: dict[int, tuple[int, int]] = {}
        for node, keeping in enumerate(outcome.node_keeping):
            volumes = self._volumes[node * self._setting.volumes :][: self._setting.volumes]
            kept = [pair for volume in volumes for pair in volume.kept(int(at_s)).items()]
            keeping.add(sum(item.blocks for _, item in kept), sum(item.segments for _, item in kept))
            for class_byte, item in kept:
                blocks, segments = totals.get(class_byte, (0, 0))
                totals[class_byte] = blocks + item.blocks, segments + item.segments
        for class_byte in {*totals, *outcome.keeping}:
            outcome.keeping.setdefault(class_byte, Keeping()).add(*totals.get(class_byte, (0, 0)))
        outcome.all_keeping.add(sum(item[0] for item in totals.values()), sum(item[1] for item in totals.values()))


def owners_of(workload: Workload, setting: Setting) -> npt.NDArray[np.uint16]:
    """The volume of each block, counted through all nodes."""
    nodes = workload.owners(Placement([f"node-{number}" for number in range(setting.nodes)]))
    volumes = workload.owners(Placement([f"volume-{number}" for number in range(setting.volumes)]))
    return nodes * np.uint16(setting.volumes) + volumes


def hit_rate(traffic: ClassTraffic) -> float:
    return traffic.hit_tokens / max(traffic.prompt_tokens, 1)
