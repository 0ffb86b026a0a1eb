"""The backend as SGLang's factory makes it, on its own host pools: pages, spaces, failures; interfaces v1 and v2."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from kvstore.client import StoreClient
from kvstore.purges import PurgeOrder
from kvstore.traffic import CHAT
from retention.purge import Purge, purge_part, purge_spaces
from tests.engines.sglang.rig import PAGE, backend, config, fill, host, keys, mha, mla, page, slots, wait, wipe
from tests.support.store_process import StoreProcess

from sglang.srt.mem_cache.hicache_storage import (  # isort: skip
    HiCacheStorageFailureInjector,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
)
from sglang.srt.mem_cache.memory_pool_host import LogicalHostPool
from sglang.srt.mem_cache.storage import StorageBackendFactory
from sglang.srt.observability.metrics_collector import StorageMetricsCollector

from workers.adapters.attachment import OptionError

MHA_LAYOUTS = ("page_first", "page_first_direct", "page_head", "layer_first")
MLA_LAYOUTS = ("page_first", "page_first_direct", "layer_first")


@pytest.fixture
def made(store: StoreProcess, pool: Any) -> Iterator[Any]:
    made = backend(store.address, pool)
    yield made
    made.close()


@pytest.mark.parametrize(
    ("device", "layout"), [*((mha, layout) for layout in MHA_LAYOUTS), *((mla, layout) for layout in MLA_LAYOUTS)]
)
def test_pages_come_back_whole_in_every_layout(store: StoreProcess, device: Any, layout: str) -> None:
    """Zero-copy out of the pool and into it, at other slots, byte for byte; a page beside them is not touched."""
    pool = host(device(), layout)
    fill(pool, 1)
    first = backend(store.address, pool, is_mla_model=device is mla)
    assert first.batch_set_v1(keys(3), slots(2, 5, 3)) == [True] * 3
    before = [page(pool, number) for number in (2, 5, 3)]
    first.close()
    wipe(pool)
    second = backend(store.address, pool, is_mla_model=device is mla)
    assert second.batch_exists(keys(5)) == 3
    assert second.batch_get_v1(keys(4), slots(7, 8, 9, 10)) == [True, True, True, False]
    assert all(torch.equal(page(pool, number), old) for number, old in zip((7, 8, 9), before, strict=True))
    assert not page(pool, 10).any()
    assert not page(pool, 6).any()
    second.close()


def test_what_is_there_already_counts_as_stored(made: Any) -> None:
    """True, since one False would keep SGLang from offering the pages that follow; and its bytes stay as they were."""
    assert made.batch_set_v1(keys(2), slots(0, 1)) == [True, True]
    assert made.batch_set_v1(keys(3), slots(4, 5, 6)) == [True, True, True]
    assert made.stats()["stored"] == 2 * 3
    old = page(made.mem_pool_host, 0)
    assert made.batch_get_v1(keys(1), slots(9)) == [True]
    assert torch.equal(page(made.mem_pool_host, 9), old)


@pytest.mark.parametrize(
    ("changes", "ours"),
    [
        ({"tp_rank": 1, "tp_size": 2}, {}),
        ({"tp_size": 2}, {}),
        ({"pp_rank": 1, "pp_size": 2}, {}),
        ({"attn_cp_rank": 1, "attn_cp_size": 2}, {}),
        ({"is_mla_model": True, "tp_rank": 1, "tp_size": 2, "dcp_rank": 1, "dcp_size": 2, "logical_page_size": 32}, {}),
        ({"model_name": "other"}, {}),
        ({}, {"weights_digest": "cd" * 32}),
        ({}, {"tenant": "alice"}),
        ({}, {"epoch": 1}),
    ],
)
def test_what_makes_bytes_differ_keeps_pages_apart(
    store: StoreProcess, made: Any, pool: Any, changes: dict[str, Any], ours: dict[str, Any]
) -> None:
    """Rank, stage, slice, model, weights, tenant: SGLang's key names none of them."""
    assert made.batch_set_v1(keys(1), slots(0)) == [True]
    other = backend(store.address, pool, ours, **changes)
    assert other.batch_exists(keys(1)) == 0
    assert other.batch_get_v1(keys(1), slots(1)) == [False]
    other.close()


@pytest.mark.parametrize(
    ("device", "layout"),
    [
        (mha(dtype=torch.int32), "page_first"),
        (mha(), "page_head"),
        (mha(heads=4, dim=4), "page_first"),
        (mha(heads=4), "page_first"),
        (mla(), "page_first"),
    ],
    ids=["element type of the same width", "layout of the same size", "heads of the same size", "size", "attention"],
)
def test_another_geometry_finds_nothing(store: StoreProcess, made: Any, device: Any, layout: str) -> None:
    """Pages of equal length are not taken for each other's, and pages of another length are a miss."""
    assert made.batch_set_v1(keys(1), slots(0)) == [True]
    other = backend(store.address, host(device, layout))
    assert other.batch_exists(keys(1)) == 0
    assert other.batch_get_v1(keys(1), slots(1)) == [False]
    other.close()


def test_ranks_that_hold_the_same_bytes_share_one_block_and_one_of_them_writes(store: StoreProcess) -> None:
    """MLA: rank 0 stores, rank 1 is told that all is well and stores nothing, and both load, whatever the TP size."""
    pools = [host(mla()) for _ in range(3)]
    for pool in pools:
        fill(pool, 7)
    ranks = [
        backend(store.address, pool, is_mla_model=True, tp_rank=rank, tp_size=size)
        for pool, rank, size in zip(pools, (0, 1, 3), (2, 2, 4), strict=True)
    ]
    assert ranks[1].batch_set_v1(keys(2), slots(0, 1)) == [True, True]
    assert ranks[0].batch_exists(keys(2)) == 0
    assert ranks[0].batch_set_v1(keys(2), slots(0, 1)) == [True, True]
    for made, pool in zip(ranks, pools, strict=True):
        old = page(pool, 0)
        assert made.batch_exists(keys(2)) == 2
        assert made.batch_get_v1(keys(1), slots(5)) == [True]
        assert torch.equal(page(pool, 5), old)
        made.close()


@pytest.mark.parametrize(
    "indices", [None, slots(0), torch.arange(PAGE * 2 - 1), slots(0, 10_000), torch.arange(-1, PAGE * 2 - 1)]
)
def test_slots_that_are_not_those_of_the_pages_are_refused(made: Any, indices: Any) -> None:
    """Too few, too many, or outside of the pool: nothing is read or written, and nothing is raised."""
    assert made.batch_set_v1(keys(2), indices) == [False, False]
    assert made.batch_get_v1(keys(2), indices) == [False, False]
    assert made.batch_exists(keys(2)) == 0


def test_without_a_store_everything_is_a_miss(store: StoreProcess, made: Any, pool: Any) -> None:
    """No exception, which would end a thread of SGLang; and the store's return is enough."""
    made.batch_set_v1(keys(2), slots(0, 1))
    old = page(pool, 0)
    store.kill()
    assert made.batch_exists(keys(2)) == 0
    assert made.batch_get_v1(keys(2), slots(5, 6)) == [False, False]
    assert made.batch_set_v1(keys(1, first=9), slots(3)) == [False]
    assert made.batch_exists_v2(keys(2), []).kv_hit_pages == 0
    assert made.clear() is False
    store.begin()
    assert wait(lambda: made.batch_exists(keys(2)) == 2)
    assert made.batch_get_v1(keys(1), slots(5)) == [True]
    assert torch.equal(page(pool, 5), old)


def test_a_fault_of_ours_is_a_miss_too(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever breaks inside, SGLang hears of pages that are not there."""
    monkeypatch.setattr(made, "_attachment", None)
    assert made.batch_exists(keys(1)) == 0
    assert made.batch_get_v1(keys(1), slots(0)) == [False]
    assert made.batch_set_v1(keys(1), slots(0)) == [False]
    assert made.batch_get_v2([PoolTransfer(PoolName.SWA, slots(0), keys=keys(1))]) == {PoolName.SWA: [False]}
    monkeypatch.undo()


def test_more_pages_than_a_look_up_takes_are_asked_in_turn(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prefix of any length is answered as one."""
    monkeypatch.setattr("workers.adapters.sglang_hicache.LOOKUP_KEYS_MAX", 6)
    made.batch_set_v1(keys(8), slots(*range(8)))
    assert made.batch_exists(keys(10)) == 8
    assert made.batch_exists(keys(6, first=3)) == 5
    assert made.batch_exists([*keys(3), "missing", *keys(3)]) == 3


def test_full_batches_from_three_threads_never_mix(store: StoreProcess, made: Any, pool: Any) -> None:
    """Prefetch, load and backup at once: a page that is loaded has the bytes of its own key."""
    everything = keys(8)
    old = [page(pool, number) for number in range(8)]
    wrong: list[int] = []

    def back_up() -> None:
        for _ in range(20):
            assert made.batch_set_v1(everything, slots(*range(8))) == [True] * 8

    def load(first: int) -> None:
        for _ in range(20):
            found = made.batch_exists(everything)
            good = made.batch_get_v1(everything[:found], slots(*range(first, first + found))) if found else []
            wrong.extend(at for at, ok in enumerate(good) if not (ok and torch.equal(page(pool, first + at), old[at])))

    threads = [threading.Thread(target=back_up), *(threading.Thread(target=load, args=(first,)) for first in (8, 16))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
        assert not thread.is_alive()
    assert not wrong


# --- interface v2 -----------------------------------------------------------------------------------------------------


@pytest.fixture
def swa(made: Any) -> Any:
    """A pool of sliding-window pages beside the anchor."""
    pool = host(mha(heads=1))
    fill(pool, 2)
    made.register_mem_host_pool_v2(made.mem_pool_host, PoolName.KV)
    made.register_mem_host_pool_v2(pool, PoolName.SWA)
    return pool


def trailing(names: list[str], pages: Any = None) -> PoolTransfer:
    return PoolTransfer(PoolName.SWA, pages, keys=names, hit_policy=PoolHitPolicy.TRAILING_PAGES)


def test_pools_side_by_side_keep_their_own_pages(made: Any, swa: Any) -> None:
    """One call moves pages of several pools, each under its own name, sizes and slots."""
    moved = [PoolTransfer(PoolName.KV, slots(0, 1), keys=keys(2)), PoolTransfer(PoolName.SWA, slots(4), keys=keys(1))]
    assert made.batch_set_v2(moved) == {PoolName.KV: [True, True], PoolName.SWA: [True]}
    anchor, side = made.mem_pool_host, swa
    old = page(anchor, 0), page(anchor, 1), page(side, 4)
    back = [PoolTransfer(PoolName.KV, slots(8, 9), keys=keys(2)), PoolTransfer(PoolName.SWA, slots(8, 9), keys=keys(2))]
    assert made.batch_get_v2(back) == {PoolName.KV: [True, True], PoolName.SWA: [True, False]}
    assert all(
        torch.equal(one, other)
        for one, other in zip(old, (page(anchor, 8), page(anchor, 9), page(side, 8)), strict=True)
    )


def test_lengths_that_trailing_pages_allow_are_a_set(made: Any, swa: Any) -> None:
    """Windows end where nodes ended: 2 and 5 can be restored, 3, 4 and 6 not, and each rank says which."""
    names = keys(6)
    made.batch_set_v1(names, slots(*range(6)))
    made.batch_set_v2([trailing(names[0:2], slots(0, 1)), trailing(names[3:5], slots(3, 4))])
    found = made.batch_exists_v2([*names, "missing"], [trailing(names[:2])])
    assert found.restorable_prefix_pages == [1, 2, 5]
    assert found.kv_hit_pages == 5
    assert found.extra_pool_hit_pages == {PoolName.KV: 6, PoolName.SWA: 5}
    every_page = PoolTransfer(PoolName.SWA, keys=names, hit_policy=PoolHitPolicy.ALL_PAGES)
    found = made.batch_exists_v2(names, [every_page])
    assert (found.kv_hit_pages, found.restorable_prefix_pages) == (2, [1, 2])
    assert made.batch_exists_v2(names, [trailing(names[:4])]).kv_hit_pages == 2
    assert made.batch_exists_v2(["missing"], [trailing(names[:1])]).restorable_prefix_pages == []


def test_a_window_is_not_weighed_against_computing_its_few_pages(
    store: StoreProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slow load is declined by the whole prefix that it saves: a window alone would save next to nothing."""
    made = backend(store.address, host(mha()), {"compute_tokens_per_s": 100.0})
    made.register_mem_host_pool_v2(host(mha(heads=1)), PoolName.SWA)
    names = keys(12)
    made.batch_set_v1(names, slots(*range(12)))
    made.batch_set_v2([trailing(names[:2], slots(0, 1)), trailing(names[10:], slots(2, 3))])
    slow = made._attachment.store.lookup
    monkeypatch.setattr(
        made._attachment.store,
        "lookup",
        lambda *asked, **more: dataclasses.replace(slow(*asked, **more), load_s_estimate=1.0),
    )
    assert made.batch_exists_v2(names, [trailing(names[:2])]).restorable_prefix_pages == [1, 2, 12]
    assert made.batch_exists_v2(names[:3], [trailing(names[:2])]).kv_hit_pages == 0
    assert made.stats()["declined"] > 0
    made.close()


def test_a_required_pool_that_holds_nothing_leaves_nothing(made: Any, swa: Any) -> None:
    """KV without its window is useless; and a pool that was never registered fails the call, not the thread."""
    names = keys(3)
    made.batch_set_v1(names, slots(0, 1, 2))
    assert made.batch_exists_v2(names, [trailing(names[:1])]).kv_hit_pages == 0
    unknown = PoolTransfer(PoolName.MAMBA, slots(0), keys=names[:1], hit_policy=PoolHitPolicy.TRAILING_PAGES)
    assert made.batch_exists_v2(names, [unknown]).kv_hit_pages == 0
    assert made.batch_get_v2([unknown]) == {PoolName.MAMBA: [False]}
    assert made.batch_set_v2([unknown, trailing(names[:1], slots(0))]) == {
        PoolName.MAMBA: [False],
        PoolName.SWA: [True],
    }


def test_an_anchor_without_bytes_leaves_it_to_the_others(store: StoreProcess) -> None:
    """Some models keep all of their KV in pools beside a numbering one: these alone say what can be restored."""
    made = backend(store.address, LogicalHostPool(PAGE * 8, PAGE), is_mla_model=True)
    side = host(mla(rank=16))
    fill(side, 3)
    made.register_mem_host_pool_v2(side, PoolName.DEEPSEEK_V4_C4)
    names = keys(4)
    pages = PoolTransfer(PoolName.DEEPSEEK_V4_C4, slots(0, 1, 2), keys=names[:3])
    assert made.batch_set_v1(names, slots(*range(4))) == [True] * 4
    assert made.batch_exists_v2(names, [pages]).kv_hit_pages == 0
    assert made.batch_set_v2([pages]) == {PoolName.DEEPSEEK_V4_C4: [True] * 3}
    assert made.batch_exists_v2(names, [pages]).kv_hit_pages == 3
    assert made.batch_get_v1(names, slots(*range(4))) == [True] * 4
    made.close()


def test_pools_whose_pages_have_no_addresses_go_through_a_copy(store: StoreProcess) -> None:
    """Where a pool refuses zero-copy, its flat pages are stored, apart from those of the other kind."""

    class Scattered:
        """A host pool with pages in many places."""

        page_size, size, dtype, layout = 1, 8, torch.float32, "scattered"

        def __init__(self) -> None:
            self.rows = torch.arange(80, dtype=torch.float32).reshape(8, 10)

        def get_page_buffer_meta(self, indices: torch.Tensor) -> Any:
            raise NotImplementedError

        def get_dummy_flat_data_page(self) -> torch.Tensor:
            return torch.zeros(10)

        def get_data_page(self, index: int, flat: bool = True) -> torch.Tensor:
            return self.rows[index]

        def set_from_flat_data_page(self, index: int, data_page: torch.Tensor) -> None:
            self.rows[index] = data_page

    made = backend(store.address, host(mha()))
    pool = Scattered()
    made.register_mem_host_pool_v2(pool, PoolName.MAMBA)
    old = pool.rows.clone()
    assert made.batch_set_v2([PoolTransfer(PoolName.MAMBA, torch.tensor([1, 3]), keys=keys(2))]) == {
        "mamba": [True, True]
    }
    taken = made.batch_get_v2([PoolTransfer(PoolName.MAMBA, torch.tensor([6, 7, 5]), keys=keys(3))])
    assert taken == {"mamba": [True, True, False]}
    assert torch.equal(pool.rows[[6, 7, 5]], old[[1, 3, 5]])
    made.close()


def test_an_operator_purges_pages_by_space_class_and_age(store: StoreProcess, made: Any, swa: Any) -> None:
    """No tokens lead to them, and their space says so; what reaches all other blocks reaches them, too."""
    client, now_s = StoreClient.connect([store.address]), int(time.time()) + 1
    by_class = PurgeOrder("ab" * 16, (), None, now_s, class_byte=int(CHAT), erase=False)
    by_age = PurgeOrder("cd" * 16, (), None, now_s, written_until_s=now_s, erase=False)
    ways: tuple[Callable[[], Purge], ...] = (
        lambda: purge_spaces(client, [*client.spaces()], apply=True),
        lambda: purge_part(client, by_class, apply=True),
        lambda: purge_part(client, by_age, apply=True),
    )
    for number, way in enumerate(ways):
        pages = keys(2, first=10 * number)
        assert made.batch_set_v1(pages, slots(0, 1)) == [True, True]
        assert made.batch_set_v2([trailing(pages[1:], slots(0))]) == {PoolName.SWA: [True]}
        assert all(space.is_opaque for space in client.spaces().values())
        assert made.batch_exists_v2(pages, [trailing(pages[1:])]).kv_hit_pages == 2
        assert way().blocks_total == 2 * 2 + 1 * 2
        assert made.batch_exists(pages) == 0
        assert made.batch_get_v2([trailing(pages[1:], slots(3))]) == {PoolName.SWA: [False]}
    client.close()


class Collector(StorageMetricsCollector):
    """SGLang's, without the package that it draws its histograms with."""

    histogram_prefetch_pgs, histogram_backup_pgs = "prefetch", "backup"
    histogram_prefetch_bandwidth = histogram_backup_bandwidth = None

    def __init__(self) -> None:
        self.seen: dict[str, list[int]] = {"prefetch": [], "backup": []}

    def _log_histogram(self, histogram: str | None, data: int) -> None:
        if histogram is not None:
            self.seen[histogram].append(data)


def test_sglangs_metrics_are_told_of_each_batch_once(store: StoreProcess, pool: Any) -> None:
    """Pages that were moved, and how fast, in the values that its collector takes; pages that were there are not."""
    made = backend(store.address, pool, enable_storage_metrics=True)
    made.batch_set_v1(keys(3), slots(0, 1, 2))
    made.batch_set_v1(keys(3), slots(0, 1, 2))
    made.batch_set_v1(keys(4), slots(0, 1, 2, 3))
    made.batch_get_v1([*keys(2), "missing"], slots(8, 9, 10))
    made.batch_get_v1(["missing"], slots(8))
    told = made.get_stats()
    assert (told.backup_pgs, told.prefetch_pgs) == ([3, 1], [2])
    assert [len(told.backup_bandwidth), len(told.prefetch_bandwidth)] == [2, 1]
    assert all(0 < speed < 1000 for speed in told.backup_bandwidth + told.prefetch_bandwidth)
    collector = Collector()
    collector.log_storage_metrics(told)
    collector.log_storage_metrics(made.get_stats())
    assert collector.seen == {"prefetch": [2], "backup": [3, 1]}
    made.close()
    quiet = backend(store.address, pool)
    quiet.batch_get_v1(keys(1), slots(8))
    assert quiet.get_stats().prefetch_pgs == []
    quiet.close()


def test_clearing_takes_away_what_the_pools_hold(store: StoreProcess, made: Any, swa: Any) -> None:
    """Of this model and rank; another model's pages stay."""
    other = backend(store.address, host(mha()), model_name="other")
    other.batch_set_v1(keys(1), slots(0))
    made.batch_set_v1(keys(1), slots(0))
    assert made.clear() is True
    assert made.batch_exists(keys(1)) == 0
    assert other.batch_exists(keys(1)) == 1
    other.close()


# --- configuration ----------------------------------------------------------------------------------------------------


def test_a_configuration_that_would_be_slow_or_unclear_does_not_start(store: StoreProcess) -> None:
    """By name, with what to write; SGLang says so at its start."""
    for broken, told in (
        ({"interface_v1": 0}, "interface_v1"),
        ({"reprise": None}, "reprise: write our options"),
        ({"reprise": {"store": store.address}}, "weights_digest"),
        ({"reprise": {"stroe": 1}}, "unknown option stroe"),
    ):
        wrong = config(store.address)
        assert wrong.extra_config is not None
        wrong.extra_config.update(broken)
        with pytest.raises(OptionError, match=told):
            StorageBackendFactory.create_backend("dynamic", wrong, None)


def test_upstreams_own_fault_injection_wraps_it(
    store: StoreProcess, pool: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of the calls fail and all are late: what is reported as loaded is right all the same."""
    monkeypatch.setenv("SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE", "0.5")
    monkeypatch.setenv("SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY", "0.002")
    made = backend(store.address, pool)
    assert isinstance(made, HiCacheStorageFailureInjector)
    old = [page(pool, number) for number in range(4)]
    wait(lambda: all(made.batch_set_v1(keys(4), slots(*range(4)))), "successful backup")
    loads = [made.batch_get_v1(keys(4), slots(8, 9, 10, 11)) for _ in range(30)]
    assert [True] * 4 in loads
    assert [False] * 4 in loads
    assert all(torch.equal(page(pool, 8 + at), old[at]) for at in range(4))
    made._backend.close()
