"""Prometheus metrics of a daemon: what the data plane counts itself, and the store's own numbers at scrape time.

Owns the names of every metric. Does not know where the numbers come from: the store gives them by ``stats``.
Invariants: one registry a daemon (nothing global), and the hot path only adds to counters.
"""

from __future__ import annotations

import re
import threading
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from itertools import accumulate
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

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


class AnswerTimes:
    """How long requests of one kind took. Thread-safe. (A counter and a histogram of the library take ten times as
    long.)
    """

    __slots__ = ("_counts", "_lock", "_total_s")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = [0] * (len(SECONDS) + 1)
        self._total_s = 0.0

    def add(self, seconds: float) -> None:
        at = bisect_left(SECONDS, seconds)
        with self._lock:
            self._counts[at] += 1
            self._total_s += seconds

    def read(self) -> tuple[list[int], float]:
        """Requests by the bound of ``SECONDS`` that they kept, the last by none; and their time together."""
        with self._lock:
            return list(self._counts), self._total_s


class ServerMetrics:
    """What one data plane counts."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.registry = registry if registry is not None else CollectorRegistry()
        self._answered: dict[wire.Opcode, AnswerTimes] = {
            opcode: AnswerTimes() for opcode in wire.Opcode if opcode not in (wire.Opcode.HELLO, wire.Opcode.ERROR)
        }
        self.registry.register(AnswersCollector(self._answered))
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

    def answered(self, header: wire.Header, seconds: float) -> None:
        self._answered[header.opcode].add(seconds)

    def error(self, error: StoreError | ValueError) -> None:
        self._errors.labels(type(error).__name__).inc()


class AnswersCollector(Collector):
    """What ``AnswerTimes`` counted, by opcode, when somebody scrapes."""

    def __init__(self, answered: Mapping[wire.Opcode, AnswerTimes]) -> None:
        self._answered = answered

    def collect(self) -> Iterable[Metric]:
        requests = CounterMetricFamily("reprise_store_requests", "Requests answered", labels=["opcode"])
        seconds = HistogramMetricFamily(
            "reprise_store_request_seconds", "Time from a whole request to the end of its answer", labels=["opcode"]
        )
        for opcode, times in self._answered.items():
            counts, total_s = times.read()
            buckets = zip((*map(floatToGoString, SECONDS), "+Inf"), accumulate(counts), strict=True)
            requests.add_metric([opcode.name.lower()], sum(counts))
            seconds.add_metric([opcode.name.lower()], list(buckets), total_s)
        yield from (requests, seconds)


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
