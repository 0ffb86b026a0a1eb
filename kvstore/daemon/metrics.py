"""Prometheus metrics of a daemon: what the data plane counts itself, and the store's own numbers at scrape time.

Owns the names of every metric. Does not know where the numbers come from: the store gives them by ``stats``.
Invariants: one registry a daemon (nothing global), and the hot path only adds to counters.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvstore import wire
from kvstore.errors import StoreError

SECONDS = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)

COUNTERS = frozenset(
    (
        *("hits", "misses", "puts", "touches", "replaced", "refused", "altered", "evicted", "expired", "purged"),
        *("shed_low_space", "declined", "written_total_bytes"),
        *("corrupt", "quarantined", "bytes_written", "bytes_read", "extents_read", "write_errors", "read_errors"),
        *("blocks_rewritten", "segments_recycled", "index_errors", "index_compactions"),
        *("scrub_bytes", "scrub_damaged", "scrub_quarantined", "scrub_gave_way", "clock_jumps"),
        *("state_hits", "state_misses", "states_evicted", "states_refused", "states_corrupt"),
    )
)
"""Stats that only grow; every other number of ``stats`` is a gauge."""


PROMISES = {
    "promise_ratio": "How long a class lasts at the last day's ingest, over what is promised; above 1: room to grow",
    "promise_lasts_s": "How long blocks of a class last at the last day's ingest",
}
"""Stats about promises, by class."""


class ServerMetrics:
    """What one data plane counts."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.registry = registry if registry is not None else CollectorRegistry()
        self._requests = Counter("reprise_store_requests", "Requests answered", ["opcode"], registry=self.registry)
        self._seconds = Histogram(
            "reprise_store_request_seconds",
            "Time from a whole request to the end of its answer",
            ["opcode"],
            buckets=SECONDS,
            registry=self.registry,
        )
        self._errors = Counter("reprise_store_errors", "Errors answered", ["error"], registry=self.registry)
        self.payload_in = Counter("reprise_store_payload_in_bytes", "Payload bytes received", registry=self.registry)
        self.payload_out = Counter("reprise_store_payload_out_bytes", "Payload bytes sent", registry=self.registry)
        self.connections = Gauge("reprise_store_connections", "Open connections", registry=self.registry)
        self.reaped = Counter(
            "reprise_store_connections_reaped", "Connections closed for being too slow or idle", registry=self.registry
        )
        self.accept_failures = Counter(
            "reprise_store_accept_failures",
            "Connections that could not be accepted, mostly for want of file descriptors or threads",
            registry=self.registry,
        )
        self.leases_expired = Counter(
            "reprise_store_leases_expired", "Loans to clients on the same host that ran out", registry=self.registry
        )
        self._by_opcode: dict[wire.Opcode, tuple[Counter, Histogram]] = {
            opcode: (self._requests.labels(opcode.name.lower()), self._seconds.labels(opcode.name.lower()))
            for opcode in wire.Opcode
            if opcode not in (wire.Opcode.HELLO, wire.Opcode.ERROR)
        }

    def answered(self, header: wire.Header, seconds: float) -> None:
        requests, histogram = self._by_opcode[header.opcode]
        requests.inc()
        histogram.observe(seconds)

    def error(self, error: StoreError | ValueError) -> None:
        self._errors.labels(type(error).__name__).inc()


class StatsCollector(Collector):
    """The numbers of a store's ``stats``, read when somebody scrapes: nested ones become a label."""

    def __init__(self, stats: Callable[[], Mapping[str, Any]]) -> None:
        self._stats = stats

    def collect(self) -> Iterable[Metric]:
        for name, value in self._stats().items():
            if name == "volumes":
                yield from _by_volume(value)
            elif isinstance(value, Mapping):
                yield from _labelled(name, value)
            elif isinstance(value, (int, float)):
                yield _family(name, "", [])([], float(value))


def _labelled(name: str, values: Mapping[str, Any]) -> Iterable[Metric]:
    plain = {key: value for key, value in values.items() if isinstance(value, (int, float))}
    if name in PROMISES:
        add = _family(name, PROMISES[name], ["class"], prefix="reprise_retention_")
    else:
        add = _family(name, "", ["of"])
    metrics = [add([key], float(value)) for key, value in plain.items()]
    yield from metrics[-1:]


def _by_volume(volumes: Mapping[str, Mapping[str, Any]]) -> Iterable[Metric]:
    """Each number of the volumes, by volume."""
    for name in next(iter(volumes.values()), {}):
        values = {path: row[name] for path, row in volumes.items() if isinstance(row.get(name), (int, float))}
        add = _family(name, f"{name} of a volume", ["volume"], prefix="reprise_store_volume_")
        metrics = [add([path], float(value)) for path, value in values.items()]
        yield from metrics[-1:]


def _family(
    name: str, text: str, labels: list[str], prefix: str = "reprise_store_"
) -> Callable[[list[str], float], Metric]:
    """A way to add samples to one new metric family."""
    metric_name = prefix + re.sub(r"[^a-z0-9_]", "_", name.lower())
    documentation = text or f"{name} of the store's stats"
    family: CounterMetricFamily | GaugeMetricFamily
    if name in COUNTERS:
        family = CounterMetricFamily(metric_name, documentation, labels=labels)
    else:
        family = GaugeMetricFamily(metric_name, documentation, labels=labels)

    def add(values: list[str], number: float) -> Metric:
        family.add_metric(values, number)
        return family

    return add
