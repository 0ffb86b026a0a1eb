"""What the vLLM connector counts, as vLLM's own log and metrics show it.

Owns the names of the counters. Does not know how they come about. Invariant: what one interval tells is what was
counted since the one before, so that sums over intervals, ranks and both halves are right.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from prometheus_client import Counter
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.v1.metrics.utils import create_metric_per_engine

EVERY_S = 1.0
"""How often at most a half tells what it counted: asking it costs more than a step should."""

COUNTERS: Mapping[str, str] = {
    "lookups": "Look-ups that the store answered.",
    "lookups_failed": "Look-ups that failed, so that their requests were computed.",
    "lookups_shed": "Look-ups that were not made, since too many waited.",
    "found": "Blocks that look-ups found.",
    "windows_missed": "Requests that were computed further than blocks are stored, since a window was not.",
    "parameters_unclear": "Requests whose parameters were not understood: neither looked up nor stored.",
    "declined": "Blocks that were found and not loaded, since computing them was estimated to be faster.",
    "loaded": "Blocks that were loaded.",
    "loads_failed": "Blocks whose load failed, so that they were computed.",
    "loaded_bytes": "Bytes that were loaded.",
    "blocks_acknowledged": "Blocks that the store took.",
    "blocks_failed": "Blocks that the store did not take.",
    "blocks_declined": "Blocks that the policy of their class does not store.",
    "shed": "Blocks, windows and touches that found the queue of puts full.",
    "copies_shed": "Copies out of pages that were not made, since too much waited to be put.",
}
"""By name, as the halves count: what it means. A metric's name has ``vllm:reprise_`` before it."""


class RepriseStats(KVConnectorStats):
    """Counts of one interval, by name."""

    def reset(self) -> None:
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        for name, count in other.data.items():
            self.data[name] = self.data.get(name, 0) + count
        return self

    def reduce(self) -> dict[str, int | float]:
        return dict(self.data)

    def is_empty(self) -> bool:
        return not self.data


class Interval:
    """What was counted since it was last asked."""

    def __init__(self) -> None:
        self._told: dict[str, int] = {}
        self._next_s = 0.0

    @property
    def due(self) -> bool:
        return time.monotonic() >= self._next_s

    def take(self, counts: Mapping[str, int]) -> RepriseStats | None:
        """The growth of the counters; None where nothing grew."""
        self._next_s = time.monotonic() + EVERY_S
        now = {name: counts[name] for name in COUNTERS if name in counts}
        grown = {name: count - self._told.get(name, 0) for name, count in now.items()}
        self._told = now
        data = {name: count for name, count in grown.items() if count}
        return RepriseStats(data=data) if data else None


class RepriseMetrics(KVConnectorPromMetrics):
    """A Prometheus counter for each name."""

    def __init__(self, config: VllmConfig, types: Any, labels: list[str], values: dict[int, list[object]]) -> None:
        super().__init__(config, types, labels, values)
        self._counters = {
            name: create_metric_per_engine(
                types[Counter](name=f"vllm:reprise_{name}", documentation=meaning, labelnames=labels), values
            )
            for name, meaning in COUNTERS.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, count in transfer_stats_data.items():
            if name in self._counters:
                self._counters[name][engine_idx].inc(count)
