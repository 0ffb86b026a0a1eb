"""SGLang's third level of KV in the store: each page of host memory is one block a buffer, under SGLang's own hash.

    --enable-hierarchical-cache --hicache-mem-layout page_first --hicache-storage-backend dynamic
    --hicache-storage-backend-extra-config '{"backend_name": "reprise", "interface_v1": 1,
        "module_path": "workers.adapters.sglang_hicache", "class_name": "RepriseHiCache",
        "reprise": {"store": "unix:/run/reprise/store.sock"}}'

Owns which space each host pool's pages belong to, and SGLang's answers made of the store's. Does not know tensors: a
page is bytes at addresses that its pool names. Invariants: nothing here raises once it is open, since that would end a
thread of SGLang's controller; every call ends by its deadline; memory is touched within a call only; failure is a miss.
SGLang's hash of a page covers its prefix, cache salt and extra key; all else that makes bytes interchangeable is in the
space. Ranks that hold the same bytes (of MLA) share blocks, and one of them writes; others have spaces of their own.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
)
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.observability.metrics_collector import StorageMetrics

from kvstore.errors import SpaceUnknown, StoreError
from kvstore.keys import OPAQUE_ALGORITHM, AttentionGroup, BlockName, ShardCoordinate, Space, opaque_name
from kvstore.limits import LOOKUP_KEYS_MAX
from kvstore.store import BlockPut, GetStatus, Presence, PutOutcome
from workers.adapters.attachment import Attachment, OptionError, Settings
from workers.publish import ACKNOWLEDGED
from workers.spaces import TenantSpace

log = logging.getLogger(__name__)

T = TypeVar("T")

OPTIONS = "reprise"
"""Where in SGLang's extra config our options are."""

_FACTS = (
    "layout",
    "storage_format_tag",
    "page_size",
    "layer_num",
    "start_layer",
    "end_layer",
    "head_num",
    "head_dim",
    "v_head_dim",
    "kv_lora_rank",
    "qk_rope_head_dim",
    "index_head_dim",
)
"""What pools say of how a page is laid out, where they have it; sizes of a page's buffers say the rest."""
_DONE = (*ACKNOWLEDGED, PutOutcome.DECLINED)
"""Puts of which SGLang need not hear: after one that failed it offers none of the pages that follow."""
_SENT = (PutOutcome.STORED, PutOutcome.REPLACED)
BATCHES_MAX = 4096
"""Batches that SGLang's metrics have not asked for yet; those that come then are not told of."""


@dataclass(frozen=True, slots=True)
class Pool:
    """One of SGLang's host pools. ``sizes``: bytes of each buffer of a page, none where a pool only numbers pages whose
    bytes are in others. ``staged``: pages have no addresses, and go through a flat copy. ``writes``: whether this rank
    stores what it has.
    """

    host: Any
    space: TenantSpace
    sizes: tuple[int, ...]
    staged: bool
    writes: bool

    @property
    def page_tokens(self) -> int:
        return int(self.host.page_size)

    @property
    def pages_per_call(self) -> int:
        return max(LOOKUP_KEYS_MAX // len(self.sizes), 1)

    def names(self, keys: Iterable[str]) -> list[BlockName]:
        """Of every buffer of these pages, page by page."""
        parts = range(len(self.sizes))
        return [opaque_name(self.space.id, f"{key}/{part}".encode()) for key in keys for part in parts]

    def whole(self, good: Sequence[bool]) -> list[bool]:
        """Which pages have all of their buffers."""
        parts = len(self.sizes)
        return [all(good[at : at + parts]) for at in range(0, len(good), parts)]


class RepriseHiCache(HiCacheStorage):
    """What SGLang makes of its extra config. Called by its prefetch, load and backup threads at once."""

    def __init__(self, storage_config: HiCacheStorageConfig, _: Mapping[str, Any] | None = None) -> None:
        extra = dict(storage_config.extra_config or {})
        if not extra.get("interface_v1"):
            raise OptionError('interface_v1: write "interface_v1": 1, or SGLang copies every page twice')
        if not isinstance(extra.get(OPTIONS), Mapping):
            raise OptionError(f'{OPTIONS}: write our options under it, such as {{"{OPTIONS}": {{"store": "..."}}}}')
        self._config = storage_config
        self._settings = Settings.from_options(extra[OPTIONS])
        self._digest = self._settings.digest_of(storage_config.model_name or "")
        self._attachment = Attachment.open(self._settings, self._space_of("none", None, ()))
        self._pools: dict[str, Pool] = {}
        self._lock = threading.Lock()
        self._metrics = StorageMetrics()

    # --- pools --------------------------------------------------------------------------------------------------------

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        super().register_mem_pool_host(mem_pool_host)
        self._register(PoolName.KV, mem_pool_host)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        self._register(host_pool_name, host_pool)

    def _register(self, name: Any, host: Any) -> None:
        sizes, staged = _buffers_of_a_page(host)
        sharded = name == PoolName.MAMBA or not self._config.is_mla_model or _holds_a_share(host)
        space = self._attachment.spaces.of(
            self._settings.tenant, self._space_of(str(name), host, sizes, staged, sharded)
        )
        self._pools[str(name)] = Pool(host, space, sizes, staged, sharded or bool(self._config.is_storage_writer))

    def _space_of(
        self, name: str, host: Any, sizes: Sequence[int], staged: bool = False, sharded: bool = True
    ) -> Space:
        """Everything beside the hash of a page that makes its bytes what they are, as far as SGLang tells it."""
        config = self._config
        facts = [f"{fact}={getattr(host, fact)}" for fact in _FACTS if getattr(host, fact, None) is not None]
        facts += [f"cp={config.attn_cp_rank}/{config.attn_cp_size}", "flat" if staged else "buffers"]
        facts += [f"dcp={config.dcp_rank}/{config.dcp_size}"] if config.dcp_size > 1 else []
        first, layers = int(getattr(host, "start_layer", 0) or 0), int(getattr(host, "layer_num", 1) or 1)
        heads, dim = (int(getattr(host, fact, 1) or 1) for fact in ("head_num", "head_dim"))
        return Space(
            model=config.model_name or "",
            weights_digest=self._digest,
            kv_dtype=str(getattr(host, "dtype", "")).removeprefix("torch."),
            layout=f"sglang {name} {type(host).__name__} {' '.join(facts)} {_runs(sizes)}",
            block_tokens=int(getattr(host, "page_size", 1)),
            groups=(AttentionGroup(0, tuple(range(first, first + layers)), heads, dim),),
            shard=ShardCoordinate(
                config.tp_rank if sharded else 0, config.tp_size if sharded else 1, config.pp_rank, config.pp_size
            ),
            epoch=self._settings.epoch,
            key_algorithm=OPAQUE_ALGORITHM,
        )

    # --- interface v1: the anchor pool --------------------------------------------------------------------------------

    def batch_exists(self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None) -> int:
        return self._safely(lambda: self._prefix(keys), 0)

    def batch_get_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        return self._safely(lambda: self._get(PoolName.KV.value, keys, host_indices), [False] * len(keys))

    def batch_set_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        return self._safely(lambda: self._set(PoolName.KV.value, keys, host_indices), [False] * len(keys))

    # --- interface v2: pools beside it --------------------------------------------------------------------------------

    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        return self._safely(lambda: self._restorable(keys, pool_transfers or []), PoolTransferResult(0, {}, []))

    def batch_get_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        return self._each(transfers, self._get)

    def batch_set_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        return self._each(transfers, self._set)

    # --- the rest of the interface ------------------------------------------------------------------------------------

    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> None:
        """Nothing: the ways of copying that ``interface_v1`` replaces are not here."""

    def batch_get(self, keys: list[str], target_locations: Any = None, target_sizes: Any = None) -> list[None]:
        return [None] * len(keys)

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        return False

    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        return False

    def clear(self) -> bool:
        """Purge the pages of this rank's pools, of everybody who shares them. Needs a token that may purge."""
        try:
            for pool in self._pools.values():
                with contextlib.suppress(SpaceUnknown):
                    self._attachment.store.delete_space(pool.space.id)
        except StoreError as error:
            log.error("hicache_clear_fails", extra={"kind": type(error).__name__, "reason": str(error)})
            return False
        return True

    def get_stats(self) -> StorageMetrics:
        """Pages and GB/s of the batches since the last call, where SGLang was told to keep metrics."""
        with self._lock:
            metrics, self._metrics = self._metrics, StorageMetrics()
        return metrics

    def stats(self) -> dict[str, int]:
        """Counters of this process."""
        return self._attachment.stats()

    def close(self) -> None:
        self._attachment.close(deadline_s=2.0)

    # --- inside -------------------------------------------------------------------------------------------------------

    def _safely(self, call: Callable[[], T], failed: T) -> T:
        try:
            return call()
        except Exception:  # the seam to SGLang: an exception would end one of its threads
            log.exception("hicache_call_fails")
            return failed

    def _each(
        self, transfers: Sequence[PoolTransfer], call: Callable[[str, Sequence[str], Any], list[bool]]
    ) -> dict[str, list[bool]]:
        results = {}
        for transfer in transfers:
            keys = transfer.keys or []
            move = functools.partial(call, str(transfer.name), keys, transfer.host_indices)
            results[transfer.name] = self._safely(move, [False] * len(keys))
        return results

    def _prefix(self, keys: Sequence[str]) -> int:
        """Pages of the anchor pool that are there without a gap from the first on."""
        pool = self._pools[PoolName.KV.value]
        return _leading(self._present(pool, keys, until_gap=True)) if pool.sizes else len(keys)

    def _present(self, pool: Pool, keys: Sequence[str], *, until_gap: bool = False) -> Iterator[bool]:
        """Which pages are there; no call follows one that failed.

        ``until_gap``: only those before the first that is missing count, so they are weighed against computing them.
        """
        for at in range(0, len(keys), pool.pages_per_call):
            some = keys[at : at + pool.pages_per_call]
            found = self._attachment.look_up(pool.space, pool.names(some))
            if found is None:
                return
            pages = pool.whole((found.presence == Presence.PRESENT).tolist())
            if until_gap and self._attachment.declines(found, _leading(pages) * pool.page_tokens):
                return
            yield from pages
            if until_gap and not all(pages):
                return

    def _restorable(self, keys: Sequence[str], transfers: Sequence[PoolTransfer]) -> PoolTransferResult:
        """The prefixes that every pool can serve. Of a pool with trailing pages these are a set, not all below one."""
        pages = self._prefix(keys)
        hits: dict[Any, int] = {PoolName.KV: pages} if pages else {}
        legal = set(range(1, pages + 1))
        for transfer in transfers:
            if transfer.hit_policy not in (PoolHitPolicy.ALL_PAGES, PoolHitPolicy.TRAILING_PAGES):
                continue  # it never cuts a hit, and without a verdict nothing is learnt of it
            whole = transfer.hit_policy == PoolHitPolicy.ALL_PAGES
            there = list(self._present(self._pools[str(transfer.name)], keys[:pages], until_gap=whole))
            there += [False] * (pages - len(there))
            if whole:
                served = set(range(1, _leading(there) + 1))
            else:
                served = set(_ends_of_windows(there, max(len(transfer.keys or []), 1)))
            if served:
                hits[transfer.name] = max(served)
            legal &= served
        return PoolTransferResult(max(legal, default=0), hits, sorted(legal))

    def _get(self, name: str, keys: Sequence[str], host_indices: Any) -> list[bool]:
        pool = self._pools[name]
        if not pool.sizes:
            return [True] * len(keys)
        if not _fits(pool, keys, host_indices):
            return [False] * len(keys)
        flat = [pool.host.get_dummy_flat_data_page() for _ in keys] if pool.staged else []
        buffers = [_bytes_of(page) for page in flat] if pool.staged else _addressed(pool, host_indices)
        names, begun_s = pool.names(keys), time.perf_counter()
        statuses = self._attachment.load(pool.space, names, buffers)
        good = pool.whole([status == GetStatus.OK for status in statuses])
        self._tell("prefetch", sum(good), sum(good) * sum(pool.sizes), begun_s)
        for at, page in enumerate(flat):
            if good[at]:
                pool.host.set_from_flat_data_page(int(host_indices[at * pool.page_tokens]), page)
        self._touch(pool, [name for name, status in zip(names, statuses, strict=True) if status == GetStatus.OK])
        return good

    def _set(self, name: str, keys: Sequence[str], host_indices: Any) -> list[bool]:
        pool = self._pools[name]
        if not (pool.writes and pool.sizes):  # another rank does, or there is nothing
            return [True] * len(keys)
        if not _fits(pool, keys, host_indices):
            return [False] * len(keys)
        names = pool.names(keys)
        found = self._attachment.look_up(pool.space, names[:LOOKUP_KEYS_MAX])
        there = [] if found is None else (found.presence == Presence.PRESENT).tolist()
        done = there + [False] * (len(names) - len(there))
        self._touch(pool, [name for name, present in zip(names, done, strict=True) if present])
        new = [at for at, present in enumerate(done) if not present]
        if new:
            buffers = self._payloads(pool, host_indices, len(keys))
            puts = [BlockPut(names[at], pool.page_tokens, buffers[at]) for at in new]
            begun_s = time.perf_counter()
            outcomes = self._attachment.store_now(pool.space, puts, self._settings.traffic_class)
            for at, outcome in zip(new, outcomes, strict=True):
                done[at] = outcome in _DONE
            sent = [at for at, outcome in zip(new, outcomes, strict=True) if outcome in _SENT]
            pages = len({at // len(pool.sizes) for at in sent})
            self._tell("backup", pages, sum(buffers[at].nbytes for at in sent), begun_s)
        return pool.whole(done)

    def _payloads(self, pool: Pool, host_indices: Any, pages: int) -> list[memoryview]:
        if not pool.staged:
            return _addressed(pool, host_indices)
        firsts = (int(host_indices[at * pool.page_tokens]) for at in range(pages))
        return [_bytes_of(pool.host.get_data_page(first, flat=True).contiguous()) for first in firsts]

    def _tell(self, what: str, pages: int, size: int, begun_s: float) -> None:
        """Note a batch for SGLang's metrics."""
        seconds = max(time.perf_counter() - begun_s, 1e-9)
        if not pages or not self._config.enable_storage_metrics:
            return
        with self._lock:
            of_pages: list[int] = getattr(self._metrics, f"{what}_pgs")
            if len(of_pages) < BATCHES_MAX:
                of_pages.append(pages)
                getattr(self._metrics, f"{what}_bandwidth").append(size / seconds / 1e9)

    def _touch(self, pool: Pool, names: Sequence[BlockName]) -> None:
        """What is used again is kept longer."""
        for at in range(0, len(names), LOOKUP_KEYS_MAX):
            ticket = self._attachment.ticket(pool.space, self._settings.traffic_class)
            self._attachment.publisher.offer_touch(ticket, names[at : at + LOOKUP_KEYS_MAX])


# --- small pure helpers -----------------------------------------------------------------------------------------------


def _holds_a_share(host: Any) -> bool:
    """Whether ranks hold different bytes in this pool, though the model's main pool is the same on all of them."""
    return isinstance(host, MHATokenToKVPoolHost) or bool(getattr(host, "_layer_shard_enabled", False))


def _buffers_of_a_page(host: Any) -> tuple[tuple[int, ...], bool]:
    """Bytes of each buffer of a page, and whether it must be copied; no buffers where a pool has no bytes."""
    try:
        meta = host.get_page_buffer_meta(torch.arange(int(host.page_size)))
    except (NotImplementedError, ValueError):
        flat = host.get_dummy_flat_data_page()
        return (flat.numel() * flat.element_size(),), True
    return (tuple(int(size) for size in meta[1]) if meta else ()), False


def _fits(pool: Pool, keys: Sequence[str], host_indices: Any) -> bool:
    """Whether these are the slots of so many pages, all within the pool."""
    if host_indices is None or host_indices.numel() != len(keys) * pool.page_tokens:
        return False
    return not keys or bool(host_indices.min() >= 0 and host_indices.max() < pool.host.size)


def _addressed(pool: Pool, host_indices: Any) -> list[memoryview]:
    """The buffers of pages, where they lie. Raises ValueError if they are not of the sizes that were registered."""
    addresses, sizes = pool.host.get_page_buffer_meta(host_indices)
    if any(size != known for size, known in zip(sizes, itertools.cycle(pool.sizes))):
        raise ValueError("a pool has changed the sizes of its pages")
    return [
        memoryview(_array(size).from_address(address)).cast("B") for address, size in zip(addresses, sizes, strict=True)
    ]


@functools.lru_cache(maxsize=256)
def _array(size: int) -> Any:
    """The type of so many bytes: each that ctypes makes is kept for ever."""
    return ctypes.c_ubyte * size


def _bytes_of(page: torch.Tensor) -> memoryview:
    return page.view(torch.uint8).flatten().numpy().data


def _leading(good: Iterable[bool]) -> int:
    return sum(1 for _ in itertools.takewhile(bool, good))


def _ends_of_windows(there: Sequence[bool], length: int) -> Iterator[int]:
    """Prefix lengths whose last ``length`` pages, or all of them if there are fewer, are there."""
    run = 0
    for end, present in enumerate(there, 1):
        run = run + 1 if present else 0
        if run >= min(length, end):
            yield end


def _runs(sizes: Sequence[int]) -> str:
    """Sizes as text, the same ones in a row counted."""
    return "+".join(f"{len(list(same))}x{size}" for size, same in itertools.groupby(sizes))
