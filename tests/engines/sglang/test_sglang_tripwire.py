"""The interface of SGLang's storage that the backend is written for; a failure means that upstream has moved."""

from __future__ import annotations

import inspect
from importlib.metadata import version

import pytest

from tests.engines.sglang.rig import host, mha

from sglang.srt.managers import cache_controller  # isort: skip
from sglang.srt.mem_cache import hicache_storage
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    PoolHitPolicy,
    PoolTransfer,
    PoolTransferResult,
)
from sglang.srt.mem_cache.storage import StorageBackendFactory

from workers.adapters.sglang_hicache import RepriseHiCache

MOVED = "SGLang's interface has moved: compare {} with workers/adapters/sglang_hicache.py, then widen the tested range"

METHODS = {
    "register_mem_pool_host": "self, mem_pool_host",
    "register_mem_host_pool_v2": "self, host_pool, host_pool_name",
    "on_host_pools_registered": "self",
    "batch_exists": "self, keys, extra_info",
    "batch_get_v1": "self, keys, host_indices, extra_info",
    "batch_set_v1": "self, keys, host_indices, extra_info",
    "batch_exists_v2": "self, keys, pool_transfers, extra_info",
    "batch_get_v2": "self, transfers, extra_info",
    "batch_set_v2": "self, transfers, extra_info",
    "get": "self, key, target_location, target_sizes",
    "batch_get": "self, keys, target_locations, target_sizes",
    "set": "self, key, value, target_location, target_sizes",
    "batch_set": "self, keys, values, target_locations, target_sizes",
    "exists": "self, key",
    "clear": "self",
    "get_stats": "self",
}


def parameters(of: object) -> str:
    return ", ".join(inspect.signature(of).parameters)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", METHODS)
def test_each_method_has_the_arguments_that_are_passed(name: str) -> None:
    """By name and order; and where we override one, ours are the same."""
    assert parameters(getattr(HiCacheStorage, name)) == METHODS[name], MOVED.format(f"HiCacheStorage.{name}")
    assert parameters(getattr(RepriseHiCache, name)) == METHODS[name]


def test_nothing_new_is_asked_of_a_backend() -> None:
    """What upstream leaves abstract is all implemented, and no public method is unknown here."""
    public = {name for name in vars(HiCacheStorage) if not name.startswith("_")}
    assert public == set(METHODS), MOVED.format("HiCacheStorage")
    assert not RepriseHiCache.__abstractmethods__


def test_the_values_that_are_exchanged_are_as_they_were() -> None:
    """The fields that are read or made here, and the geometry that a pool tells."""
    told = MOVED.format("HiCacheStorageConfig, PoolTransfer, PoolTransferResult, PoolHitPolicy")
    config = {"tp_rank", "tp_size", "pp_rank", "pp_size", "attn_cp_rank", "attn_cp_size", "is_mla_model", "model_name"}
    assert config | {"extra_config"} <= set(HiCacheStorageConfig.__dataclass_fields__), told
    assert isinstance(HiCacheStorageConfig.is_storage_writer, property), told
    assert {"name", "host_indices", "keys", "hit_policy"} <= set(PoolTransfer.__dataclass_fields__), told
    result = ["kv_hit_pages", "extra_pool_hit_pages", "restorable_prefix_pages"]
    assert [*PoolTransferResult.__dataclass_fields__] == result, told
    assert {"all_pages", "trailing_pages"} <= {policy.value for policy in PoolHitPolicy}, told
    pool = host(mha())
    assert {"get_page_buffer_meta", "get_data_page", "set_from_flat_data_page", "size"} <= set(dir(pool)), told
    facts = {"layout", "page_size", "layer_num", "start_layer", "end_layer", "head_num", "head_dim", "v_head_dim"}
    assert facts <= set(dir(pool)), told


def test_the_controller_still_drives_a_dynamic_backend_as_tested() -> None:
    """How it is made, how many pages it moves at once, and that the first interface needs to be asked for."""
    assert hicache_storage.STORAGE_BATCH_SIZE == 128, MOVED.format("STORAGE_BATCH_SIZE")
    made = inspect.getsource(StorageBackendFactory._create_dynamic_backend)
    assert "backend_class(storage_config, kwargs)" in made, MOVED.format("StorageBackendFactory")
    attach = inspect.getsource(cache_controller.HiCacheController.attach_storage_backend)
    assert 'extra_config.get("interface_v1", 0)' in attach, MOVED.format("HiCacheController")


def test_the_version_is_one_that_was_tested() -> None:
    """The interface moves with every release: another version passes the tests of this folder first."""
    assert version("sglang") == "0.5.23", MOVED.format("the release notes")
