"""SGLang's controller of hybrid models, with full and sliding-window pages, driven as its scheduler drives it."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch

from tests.engines.sglang.rig import ALONE, PAGE, Allocator, extra, fill, host, mha, next_of, page, slots, wait

from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer  # isort: skip
from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController
from sglang.srt.mem_cache.pool_host.group import HostPoolGroup, PoolEntry
from sglang.srt.runtime_context import get_parallel

WINDOW_PAGES = 2


class Hybrid:
    """A model with full and sliding-window layers: host pools of both, and the controller that moves them.

    ``indexed``: it has an index, too, whose pages go with the full ones, slot by slot.
    """

    def __init__(self, address: str, seed: int, tp_group: Any = None, *, indexed: bool = False) -> None:
        devices = {PoolName.KV: mha(), PoolName.SWA: mha(heads=1)}
        self._indexes = [PoolTransfer(PoolName.INDEXER, indices_from_pool=PoolName.KV)] if indexed else []
        devices |= {PoolName.INDEXER: mha(heads=1, dim=4)} if indexed else {}
        self.pools = {name: host(device) for name, device in devices.items()}
        for number, pool in enumerate(self.pools.values()):
            fill(pool, seed + number)
        entries = [self._entry(name, device) for name, device in devices.items()]
        self.controller = HybridCacheController(
            Allocator(devices[PoolName.KV]),
            HostPoolGroup(entries),
            PAGE,
            tp_group,
            threading.Event(),
            io_backend="direct",
            storage_backend="dynamic",
            prefetch_threshold=PAGE,
            model_name="tiny",
            storage_backend_extra_config=extra(address),
        )

    def backup(self, tokens: Sequence[int], pages: Sequence[int], window: Sequence[int]) -> int:
        """Store a node that ends with a window, if it has one; how many tokens of KV were."""
        hashes = self.controller.get_hash_str(list(tokens), None, page_size=PAGE)
        names = hashes[len(hashes) - len(window) :]
        policy = PoolHitPolicy.TRAILING_PAGES
        side = [PoolTransfer(PoolName.SWA, slots(*window), keys=names, hit_policy=policy)] if window else []
        self.controller.write_storage(slots(*pages), list(tokens), hashes, extra_pools=side + self._along() or None)
        return int(wait(lambda: next_of(self.controller.ack_backup_queue), "backup").completed_tokens)

    def prefetch(self, tokens: Sequence[int]) -> tuple[int, int, list[int], list[int]]:
        """Tokens of KV that were loaded, pages of the window that were, and where both are."""
        window = self.pools[PoolName.SWA].alloc(WINDOW_PAGES * PAGE)
        side = PoolTransfer(PoolName.SWA, window, keys=[""] * WINDOW_PAGES, hit_policy=PoolHitPolicy.TRAILING_PAGES)
        self.controller.prefetch(SimpleNamespace(rid="r"), list(tokens), extra_pools=[side, *self._along()])
        operation = wait(lambda: next_of(self.controller.prefetch_hit_queue), "look-up")
        if operation.storage_hit_count == 0:
            self.pools[PoolName.SWA].free(window)
            return 0, 0, [], []
        operation.host_indices = self.controller.alloc_prefetch_host_buffers(operation, operation.storage_hit_count)
        self.controller.prefetch_buffer.put(operation)
        done = windows = 0
        while True:
            ack = wait(lambda: next_of(self.controller.ack_prefetch_queue), "prefetch")
            if ack.completed_req:
                return done, windows, _pages(operation.host_indices), _pages(side.host_indices)
            done = max(done, ack.completed_tokens or 0)
            windows = max(windows, (ack.pool_hits or {}).get("swa", 0))

    def attach(self, address: str) -> None:
        """What SGLang does when it is told so while it runs."""
        self.controller.attach_storage_backend(
            "dynamic", PAGE, "tiny", extra(address), host_pools=self.controller.mem_pool_host.entries
        )

    def add(self, name: Any, device: Any) -> None:
        """Another pool, while the backend runs."""
        self.pools[name] = host(device)
        fill(self.pools[name], 99)
        self.controller.register_host_pool_entry(self._entry(name, device))

    def release(self, pages: Sequence[int], window: Sequence[int]) -> None:
        """Give back what a prefetch took."""
        for name, numbers in ((PoolName.KV, pages), (PoolName.SWA, window)):
            if numbers:
                self.pools[name].free(slots(*numbers))

    def _entry(self, name: Any, device: Any) -> PoolEntry:
        return PoolEntry(name, self.pools[name], device, lambda layer: layer, name == PoolName.KV)

    def _along(self) -> list[PoolTransfer]:
        """Of each request its own, since the controller fills in keys and slots."""
        return [replace(transfer) for transfer in self._indexes]

    def alive(self) -> bool:
        threads = ("prefetch_thread", "backup_thread", "prefetch_io_aux_thread", "prefetch_sync_thread")
        return all(getattr(self.controller, name).is_alive() for name in threads)


def _pages(indices: torch.Tensor) -> list[int]:
    return [int(indices[at]) // PAGE for at in range(0, len(indices), PAGE)]


@contextmanager
def hybrid(address: str, seed: int, *, indexed: bool = False) -> Iterator[Hybrid]:
    with get_parallel().override(**ALONE):
        made = Hybrid(address, seed, indexed=indexed)
        try:
            yield made
        finally:
            made.controller.detach_storage_backend()


def same(one: Hybrid, there: Sequence[int], other: Hybrid, here: Sequence[int], name: Any) -> bool:
    pairs = zip(there, here, strict=True)
    return all(torch.equal(page(one.pools[name], a), page(other.pools[name], b)) for a, b in pairs)
