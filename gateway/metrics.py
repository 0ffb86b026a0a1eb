"""What operators count, for Prometheus.

Owns the names. Does not know requests beyond the numbers handed in. Invariants: no label carries a tenant, a user or
a model's text; requests that opted out of the cache are in no hit-rate counter.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


class Metrics:
    """One registry a process; created finished, nothing global."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self._requests = Counter(
            "reprise_gateway_requests",
            "HTTP requests answered",
            ["route", "status", "traffic_class"],
            registry=registry,
        )
        self._prompt = Counter(
            "reprise_gateway_prompt_tokens",
            "Prompt tokens by what became of them (hit, miss); requests with the cache off are not counted here",
            ["traffic_class", "outcome"],
            registry=registry,
        )
        self._replayed = Counter(
            "reprise_gateway_replayed_tokens",
            "Hit tokens whose windows were recomputed",
            ["traffic_class"],
            registry=registry,
        )
        self._uncached = Counter(
            "reprise_gateway_cache_off_tokens",
            "Prompt tokens of requests that opted out",
            ["traffic_class"],
            registry=registry,
        )
        self._generated = Counter(
            "reprise_gateway_completion_tokens", "Tokens generated", ["traffic_class"], registry=registry
        )
        self._ways = Counter("reprise_gateway_ways", "How prefixes came to be", ["way", "reason"], registry=registry)
        self._failures = Counter(
            "reprise_gateway_worker_failures", "Worker calls that failed", ["phase", "kind"], registry=registry
        )
        self._continued = Counter(
            "reprise_gateway_continued", "Answers that went on at another decode worker", registry=registry
        )
        self._gone = Counter("reprise_gateway_clients_gone", "Clients that left before the end", registry=registry)
        self._ttft = Histogram(
            "reprise_gateway_ttft_seconds",
            "From the request to its first token",
            ["traffic_class"],
            buckets=_SECONDS,
            registry=registry,
        )
        self._duration = Histogram(
            "reprise_gateway_request_seconds", "Whole requests", ["route"], buckets=_SECONDS, registry=registry
        )
        self._in_flight = Gauge("reprise_gateway_requests_in_flight", "Requests now", registry=registry)
        self._workers = Gauge("reprise_gateway_workers_usable", "Workers that can be used", ["role"], registry=registry)

        self._unlogged = Gauge(
            "reprise_gateway_access_log_dropped", "Requests that the access log could not tell of", registry=registry
        )

    def answered(self, route: str, status: int, traffic_class: str, duration_s: float) -> None:
        self._requests.labels(route, str(status), traffic_class).inc()
        self._duration.labels(route).observe(duration_s)

    def prompt(
        self,
        traffic_class: str,
        *,
        hit: int,
        miss: int,
        replayed: int,
        way: str,
        reason: str,
        cache: bool,
        ttft_s: float,
    ) -> None:
        """Count one prompt, once, when its first token is there."""
        self._ttft.labels(traffic_class).observe(ttft_s)
        if not cache:
            self._uncached.labels(traffic_class).inc(hit + miss)
            return
        self._prompt.labels(traffic_class, "hit").inc(hit)
        self._prompt.labels(traffic_class, "miss").inc(miss)
        self._replayed.labels(traffic_class).inc(replayed)
        self._ways.labels(way, reason[:32]).inc()

    def generated(self, traffic_class: str, tokens: int, continuations: int) -> None:
        self._generated.labels(traffic_class).inc(tokens)
        self._continued.inc(continuations)

    def worker_failed(self, phase: str, kind: str) -> None:
        self._failures.labels(phase, kind).inc()

    def client_gone(self) -> None:
        self._gone.inc()

    def in_flight(self, count: int) -> None:
        self._in_flight.set(count)

    def access_log_dropped(self, count: int) -> None:
        self._unlogged.set(count)

    def workers(self, prefill: int, decode: int) -> None:
        self._workers.labels("prefill").set(prefill)
        self._workers.labels("decode").set(decode)

    def render(self) -> bytes:
        return generate_latest(self.registry)
