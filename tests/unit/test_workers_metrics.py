"""Metrics count a request once, and what opted out of the cache not at all."""

from __future__ import annotations

from kvstore.testing import MemoryStore
from tests.support.fake_model import FakeModel, fake_choose, fake_memory
from tests.support.faulty_store import FaultyStore
from tests.support.worker_bench import Bench
from workers.metrics import WorkerMetrics

TOKENS = list(range(100))


def test_hits_and_misses_are_counted_once_and_opt_outs_never() -> None:
    """A miss, a hit, a cancelled request, a decode and an opt-out: only the two prefills enter the token counts."""
    store = FaultyStore(MemoryStore())
    with Bench(store, FakeModel(), fake_memory, fake_choose) as worker:
        metrics = WorkerMetrics(worker.engine, worker.publisher)
        worker.prefill(TOKENS)
        worker.prefill(TOKENS)
        worker.prefill(TOKENS, cache=False)
        worker.decode([*TOKENS, 5], 100, 3)
        sequence, _ = worker.start_prefill(TOKENS)
        worker.engine.cancel(sequence)
        worker.settle()
        store.fail_get = lambda number: True
        store.fail_state = lambda number: True
        worker.prefill(TOKENS)
        for ended, outcome in worker.outcomes:
            metrics.observe(ended, outcome)

        def value(name: str, **labels: str) -> float | None:
            return metrics.registry.get_sample_value(f"reprise_worker_{name}", labels)

        assert value("prompt_tokens_total", kind="hit") == 99
        assert value("prompt_tokens_total", kind="miss") == 100 + 1 + 100
        assert value("requests_total", role="prefill", outcome="finished") == 4
        assert value("requests_total", role="prefill", outcome="cancelled") == 1
        assert value("requests_total", role="decode", outcome="finished") == 1
        assert value("failed_loads_total") == 2
        assert value("kv_tokens") == 0
        assert b"reprise_worker_blocks_published_total" in metrics.text()
