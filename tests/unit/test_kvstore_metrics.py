"""What a daemon counts of its requests, as Prometheus reads it."""

from __future__ import annotations

import threading

from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from kvstore import wire
from kvstore.daemon.metrics import SECONDS, ServerMetrics

PREFIX = "reprise_store_request"


def a_header(opcode: wire.Opcode) -> wire.Header:
    return wire.decode_header(wire.encode_frame(opcode, 1, b""))


def samples(metrics: ServerMetrics, opcode: str) -> dict[str, float]:
    """Samples of requests of one kind, buckets by their bound."""
    families = text_string_to_metric_families(generate_latest(metrics.registry).decode())
    return {
        sample.name.removeprefix(PREFIX) + sample.labels.get("le", ""): sample.value
        for family in families
        for sample in family.samples
        if sample.name.startswith(PREFIX) and sample.labels.get("opcode") == opcode
    }


def test_each_request_is_in_every_bucket_whose_bound_it_kept() -> None:
    """A time that is a bound counts as kept; kinds of requests do not mix."""
    metrics = ServerMetrics()
    for seconds in (0.00005, SECONDS[2], 0.5, 60.0):
        metrics.answered(a_header(wire.Opcode.LOOKUP), seconds)
    metrics.answered(a_header(wire.Opcode.GET), 0.5)
    found = samples(metrics, "lookup")
    kept = [found[f"_seconds_bucket{bound}"] for bound in SECONDS]
    assert kept == [1, 1, 2, 2, 2, 2, 2, 2, 3, 3, 3]
    assert found["_seconds_bucket+Inf"] == found["_seconds_count"] == found["s_total"] == 4
    assert found["_seconds_sum"] == sum((0.00005, SECONDS[2], 0.5, 60.0))
    assert samples(metrics, "get")["s_total"] == 1
    assert samples(metrics, "touch")["s_total"] == 0


def test_no_request_is_lost_where_many_threads_count() -> None:
    metrics = ServerMetrics()
    header = a_header(wire.Opcode.LOOKUP)

    def count() -> None:
        for _ in range(2000):
            metrics.answered(header, 0.002)

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10.0)
    assert samples(metrics, "lookup")["_seconds_count"] == 8000
