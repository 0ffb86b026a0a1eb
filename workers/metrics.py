"""The worker's metrics, in Prometheus' format.

Owns names and labels. Does not know requests: it is told of every sequence that ended, and reads the gauges when asked.
Hit and miss are counted once a request, prefills only, and not for requests that opted out of the cache.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from workers.engine import Engine
from workers.publish import Publisher
from workers.sequence import LiveSequence

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


class WorkerMetrics:
    """One worker's registry."""

    def __init__(self, engine: Engine, publisher: Publisher) -> None:
        self.registry = CollectorRegistry(auto_describe=True)
        self.registry.register(_Gauges(engine, publisher))
        registry = self.registry
        self._requests = Counter(
            "reprise_worker_requests", "Requests that ended.", ["role", "outcome"], registry=registry
        )
        self._prompt = Counter(
            "reprise_worker_prompt_tokens",
            "Prompt tokens of prefills by what became of them (replayed ones are hits too).",
            ["kind"],
            registry=registry,
        )
        self._plans = Counter(
            "reprise_worker_plans", "How prefixes came to be.", ["role", "way", "exact", "reason"], registry=registry
        )
        self._failed_loads = Counter("reprise_worker_failed_loads", "Loads that became misses.", registry=registry)
        self._declined_slow = Counter(
            "reprise_worker_declined_slow",
            "Hits that were computed, since loading them was estimated to be slower.",
            registry=registry,
        )
        self._seconds = {
            name: Histogram(f"reprise_worker_{name}_seconds", help_text, ["role"], buckets=_SECONDS, registry=registry)
            for name, help_text in (
                ("queued", "Waiting for slots and for the steps of others, until the first token."),
                ("load", "Looking up and loading."),
                ("compute", "Share of the model's steps."),
            )
        }

    def observe(self, sequence: LiveSequence, outcome: str) -> None:
        """Count a sequence that ended."""
        role = sequence.role.name
        self._requests.labels(role, outcome).inc()
        if sequence.fetched is not None and sequence.fetched.failed_loads:
            self._failed_loads.inc(sequence.fetched.failed_loads)
        if sequence.fetched is not None and sequence.fetched.declined_slow:
            self._declined_slow.inc()
        reuse = sequence.reuse
        if reuse is None or outcome != "finished":
            return
        took = sequence.durations
        for name, seconds in (("queued", took.queued_s), ("load", took.load_s), ("compute", took.compute_s)):
            self._seconds[name].labels(role).observe(seconds)
        if not sequence.request.cache:
            return
        self._plans.labels(role, reuse.way, str(reuse.exact).lower(), reuse.reason).inc()
        if role == "prefill":
            self._prompt.labels("hit").inc(reuse.hit_tokens)
            self._prompt.labels("miss").inc(reuse.miss_tokens)
            self._prompt.labels("replayed").inc(reuse.replayed_tokens)

    def text(self) -> bytes:
        """The exposition."""
        return generate_latest(self.registry)


class _Gauges(Collector):
    """What is read at the moment of asking."""

    def __init__(self, engine: Engine, publisher: Publisher) -> None:
        self._engine = engine
        self._publisher = publisher

    def collect(self) -> Iterator[Metric]:
        load, engine, published = self._engine.load(), self._engine.counts, self._publisher.counts
        for name, text, gauge in (
            ("running", "Sequences that compute or finish.", load.running),
            ("waiting", "Sequences that wait or load.", load.waiting),
            ("queued_pairs", "Attention pairs waiting.", load.queued_pairs),
            ("kv_tokens", "Slots in use.", load.kv_tokens),
            ("kv_tokens_max", "Slots in all.", load.kv_tokens_max),
            ("publish_queue_bytes", "Payload bytes waiting for the store.", self._publisher.queue_bytes),
        ):
            yield GaugeMetricFamily(f"reprise_worker_{name}", text, value=gauge)
        for name, text, count in (
            ("steps", "Forwards.", engine.steps),
            ("tokens_computed", "Tokens that went through the model.", engine.tokens_computed),
            ("tokens_generated", "Tokens chosen.", engine.tokens_generated),
            ("preemptions", "Sequences that gave way to an older one.", engine.preemptions),
            ("imports_failed", "Verified payloads of another layout.", engine.imports_failed),
            ("puts_shed", "Offers that the full queue refused.", published.shed),
            ("put_errors", "Calls to the store that failed.", published.errors),
            ("blocks_published", "Blocks acknowledged.", published.blocks_acknowledged),
            ("blocks_unpublished", "Blocks refused or failed.", published.blocks_failed),
            ("blocks_declined", "Blocks that the policy of their class did not want.", published.blocks_declined),
            ("states_published", "States acknowledged.", published.states_acknowledged),
            ("states_unpublished", "States refused or failed.", published.states_failed),
        ):
            yield CounterMetricFamily(f"reprise_worker_{name}", text, value=count)
