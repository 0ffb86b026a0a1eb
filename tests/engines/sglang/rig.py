"""SGLang's own pools, backend factory and controller on a CPU, and pages with known bytes.

Its modules import torchvision, whose operators load only beside a GPU: they are declared here, and never called.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch

_OPERATORS = torch.library.Library("torchvision", "FRAGMENT")
_NAMES = ("nms", "qnms", "roi_align", "qroi_align", "ps_roi_align", "roi_pool", "ps_roi_pool", "deform_conv2d")
for _name in (*_NAMES, *(f"_{_name}_backward" for _name in _NAMES)):
    with contextlib.suppress(RuntimeError):  # there already
        _OPERATORS.define(f"{_name}() -> ()")

from sglang.srt.managers.cache_controller import HiCacheController  # noqa: E402
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig  # noqa: E402
from sglang.srt.mem_cache.hybrid_cache.hybrid_pool_assembler import _mha_host_inputs  # noqa: E402
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool  # noqa: E402
from sglang.srt.mem_cache.pool_host import base  # noqa: E402
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost  # noqa: E402
from sglang.srt.mem_cache.storage import StorageBackendFactory  # noqa: E402
from sglang.srt.runtime_context import get_parallel  # noqa: E402

from tests.support.waiting import wait  # noqa: E402

base.HICACHE_HOST_MEMORY_RESERVE_BYTES = 0  # machines that test have less than it would leave free

PAGE = 16
PAGES = 24
LAYERS = 3


def mha(heads: int = 2, dim: int = 8, dtype: torch.dtype = torch.float32, layers: int = LAYERS) -> MHATokenToKVPool:
    """A device pool, of which a host pool takes its geometry."""
    size = PAGE * PAGES // 2
    return MHATokenToKVPool(size, PAGE, dtype, heads, dim, layers, device="cpu", enable_memory_saver=False)


def mla(rank: int = 8, rope: int = 4) -> MLATokenToKVPool:
    size = PAGE * PAGES // 2
    return MLATokenToKVPool(size, PAGE, torch.float32, rank, rope, LAYERS, device="cpu", enable_memory_saver=False)


def host(device_pool: Any, layout: str = "page_first") -> Any:
    """SGLang's host pool over it, of twice the size, in memory that is not pinned."""
    shape = {"host_to_device_ratio": 2.0, "host_size": 0, "page_size": PAGE, "layout": layout, "pin_memory": False}
    if isinstance(device_pool, MHATokenToKVPool):
        make, info, more = _mha_host_inputs(device_pool)
        return make(info, **more, **shape)
    return MLATokenToKVPoolHost(
        device_pool.get_device_pool_infos()[0].buffer_info,
        device_capacity_tokens=device_pool.size,
        start_layer=device_pool.start_layer,
        end_layer=device_pool.end_layer,
        target_layer_num=device_pool.layer_num,
        override_kv_cache_dim=device_pool.kv_cache_dim,
        **shape,
    )


def extra(address: str, **ours: Any) -> dict[str, Any]:
    """The value of ``--hicache-storage-backend-extra-config``."""
    return {
        "backend_name": "reprise",
        "module_path": "workers.adapters.sglang_hicache",
        "class_name": "RepriseHiCache",
        "interface_v1": 1,
        "reprise": {"store": address, "weights_digest": "ab" * 32, "lookup_deadline_s": 5.0, **ours},
    }


def config(address: str, ours: dict[str, Any] | None = None, **changes: Any) -> HiCacheStorageConfig:
    values = {
        "tp_rank": 0,
        "tp_size": 1,
        "pp_rank": 0,
        "pp_size": 1,
        "attn_cp_rank": 0,
        "attn_cp_size": 1,
        "is_mla_model": False,
        "enable_storage_metrics": False,
        "is_page_first_layout": True,
        "model_name": "tiny",
    }
    return HiCacheStorageConfig(**(values | changes), extra_config=extra(address, **(ours or {})))


def backend(address: str, pool: Any, ours: dict[str, Any] | None = None, **changes: Any) -> Any:
    """What SGLang's factory makes of the configuration, with its anchor pool registered."""
    made = StorageBackendFactory.create_backend("dynamic", config(address, ours, **changes), pool)
    made.register_mem_pool_host(pool)
    made.on_host_pools_registered()
    return made


def keys(count: int, first: int = 0) -> list[str]:
    return [hashlib.sha256(number.to_bytes(4, "big")).hexdigest() for number in range(first, first + count)]


def slots(*pages: int, size: int = PAGE) -> torch.Tensor:
    """The slots of these pages of a pool, in this order."""
    return torch.cat([torch.arange(page * size, (page + 1) * size) for page in pages])


def page(pool: Any, number: int) -> torch.Tensor:
    """A page's bytes, all buffers one behind another, as SGLang itself would copy it out."""
    return pool.get_data_page(number * pool.page_size, flat=True).view(torch.uint8).flatten().clone()


def fill(pool: Any, seed: int) -> None:
    """Every slot of a pool with bytes of its own."""
    generator = torch.Generator().manual_seed(seed)
    for buffer in pool.kv_buffer if isinstance(pool.kv_buffer, list) else [pool.kv_buffer]:
        buffer.copy_(torch.randn(buffer.shape, generator=generator).to(buffer.dtype))


def wipe(pool: Any) -> None:
    for buffer in pool.kv_buffer if isinstance(pool.kv_buffer, list) else [pool.kv_buffer]:
        buffer.fill_(0)


class Allocator:
    """All that the controller asks of the device's side."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool

    def get_kvcache(self) -> Any:
        return self._pool


ALONE = {"tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_dcp_size": 1, "attn_dcp_rank": 0}
"""One process without peers, as SGLang's runtime would say it."""


class Driven:
    """SGLang's controller with its storage threads, driven as its scheduler drives it."""

    def __init__(self, address: str, device_pool: Any, pool: Any, tp_group: Any = None, **ours: Any) -> None:
        self.controller = HiCacheController(
            Allocator(device_pool),
            pool,
            PAGE,
            tp_group,
            threading.Event(),
            io_backend="direct",
            storage_backend="dynamic",
            prefetch_threshold=PAGE,
            model_name="tiny",
            storage_backend_extra_config=extra(address, **ours),
        )

    def backup(self, tokens: Sequence[int], pages: Sequence[int]) -> int:
        """Store the pages that hold these tokens; how many tokens were."""
        hashes = self.controller.get_hash_str(list(tokens), None, page_size=PAGE)
        self.controller.write_storage(slots(*pages), list(tokens), hashes)
        return int(wait(lambda: next_of(self.controller.ack_backup_queue), "backup").completed_tokens)

    def prefetch(self, tokens: Sequence[int]) -> tuple[int, torch.Tensor | None]:
        """Load what is stored of these tokens' prefix into pages of the pool; how many tokens, and where they are."""
        self.controller.prefetch("request", list(tokens))
        operation = wait(lambda: next_of(self.controller.prefetch_hit_queue), "look-up")
        if operation.storage_hit_count == 0:
            return 0, None
        operation.host_indices = self.controller.alloc_prefetch_host_buffers(operation, operation.storage_hit_count)
        self.controller.prefetch_buffer.put(operation)
        done = 0
        while True:
            ack = wait(lambda: next_of(self.controller.ack_prefetch_queue), "prefetch")
            if ack.completed_req:
                return done, operation.host_indices
            done = max(done, ack.completed_tokens or 0)

    def alive(self) -> bool:
        threads = ("prefetch_thread", "backup_thread", "prefetch_io_aux_thread", "prefetch_sync_thread")
        return all(getattr(self.controller, name).is_alive() for name in threads)

    def close(self) -> None:
        self.controller.detach_storage_backend()


def next_of(queue: Any) -> Any:
    """What a queue holds, without waiting; None: nothing."""
    return None if queue.empty() else queue.get_nowait()


@contextlib.contextmanager
def driven(address: str, device_pool: Any, pool: Any, **ours: Any) -> Iterator[Driven]:
    with get_parallel().override(**ALONE):
        made = Driven(address, device_pool, pool, **ours)
        try:
            yield made
        finally:
            made.close()
