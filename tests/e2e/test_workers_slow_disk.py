"""A disk so slow that computing is faster: the worker declines the hit, and loads again once that pays."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from pathlib import Path

from kvstore.daemon.files import Files
from kvstore.keys import TokenChain
from kvstore.testing import ManualClock
from tests.support.fake_model import FakeModel, fake_choose, fake_memory
from tests.support.nodes import open_node
from tests.support.worker_bench import Bench
from workers.metrics import WorkerMetrics

DISK_BYTES_PER_S = 50e6
TOKENS = random.Random(3).choices(range(1000), k=1201)
MODEL = FakeModel("g" * 32)


class SlowDisk(Files):
    """Reads 50 MB a second, whatever the page cache holds."""

    bytes_read = 0

    def preadv(self, fd: int, views: Sequence[memoryview], offset: int) -> int:
        count = super().preadv(fd, views, offset)
        self.bytes_read += count
        time.sleep(count / DISK_BYTES_PER_S)
        return count


def test_a_hit_that_loses_to_computing_is_declined(tmp_path: Path) -> None:
    """The first load finds out how slow the disk is. From then on the prompt is computed, not a byte is read for it,
    and it is counted; where computing takes longer still, it is loaded. The answer is the same each time.
    """
    disk = SlowDisk()
    node = open_node(tmp_path, ManualClock(), files=disk)
    with Bench(node, MODEL, fake_memory, fake_choose) as worker:
        metrics = WorkerMetrics(worker.engine, worker.publisher)
        token_s = 1e-6
        worker.fetcher._compute_s = lambda tokens: token_s * tokens
        cold = worker.prefill(TOKENS)
        learning = worker.prefill(TOKENS)
        assert learning.reuse.hit_tokens == 1200
        chain = TokenChain(worker.spaces.of(None).id, worker.block_tokens, TOKENS)
        estimate_s = node.lookup(chain.space_id, chain.names).load_s_estimate
        loaded_bytes = 1200 * MODEL.geometry.block_payload_bytes(worker.block_tokens) // worker.block_tokens
        assert estimate_s >= loaded_bytes / DISK_BYTES_PER_S > token_s * 1200
        read_before, hits_before = disk.bytes_read, node.stats()["hits"]
        for _ in range(3):
            declined = worker.prefill(TOKENS)
            assert (declined.reuse.hit_tokens, declined.reuse.reason) == (0, "declined")
            assert declined.tokens == cold.tokens
        assert (disk.bytes_read, node.stats()["hits"]) == (read_before, hits_before)
        token_s = 1e-2
        loaded = worker.prefill(TOKENS)
        assert loaded.reuse.hit_tokens == 1200
        assert loaded.tokens == cold.tokens
        assert node.stats()["hits"] == hits_before + 1200 // worker.block_tokens
        for sequence, outcome in worker.outcomes:
            metrics.observe(sequence, outcome)
        assert b"reprise_worker_declined_slow_total 3.0" in metrics.text()
    node.close()
