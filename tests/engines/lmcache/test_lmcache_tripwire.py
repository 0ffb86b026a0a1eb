"""The interface of LMCache that the adapter is written for; a failure means that upstream has moved."""

from __future__ import annotations

import inspect
from importlib.metadata import version

import pytest
from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.api import KeyEntry, KeyListPage, MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import AdapterUsage, L2AdapterInterface
from lmcache.v1.distributed.l2_adapters.plugin_l2_adapter import PluginL2AdapterConfig
from lmcache.v1.memory_management import TensorMemoryObj

from workers.adapters.lmcache_l2 import RepriseL2

MOVED = "LMCache's interface has moved: compare {} with workers/adapters/lmcache_l2.py, then widen the tested range"

METHODS = {
    "get_store_event_fd": "self",
    "get_lookup_and_lock_event_fd": "self",
    "get_load_event_fd": "self",
    "submit_store_task": "self, keys, objects",
    "pop_completed_store_tasks": "self",
    "submit_lookup_and_lock_task": "self, keys, group_layout_descs",
    "query_lookup_and_lock_result": "self, task_id",
    "submit_unlock": "self, keys",
    "submit_load_task": "self, keys, objects",
    "query_load_result": "self, task_id",
    "close": "self",
    "delete": "self, keys",
    "list_l2_keys": "self, model_name, page_size, cursor",
    "get_usage": "self",
    "report_status": "self",
    "_notify_keys_stored": "self, keys, sizes",
    "_notify_keys_accessed": "self, keys",
    "_notify_keys_deleted": "self, keys, sizes",
    "__init__": "self, max_capacity_bytes",
}


def parameters(of: object) -> str:
    return ", ".join(inspect.signature(of).parameters)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", METHODS)
def test_each_method_has_the_arguments_that_are_passed(name: str) -> None:
    """By name and order; and where we override one, ours are the same."""
    told = MOVED.format(f"L2AdapterInterface.{name}")
    assert parameters(getattr(L2AdapterInterface, name)) == METHODS[name], told
    if name in vars(RepriseL2) and name != "__init__":
        assert parameters(getattr(RepriseL2, name)) == METHODS[name]


def test_nothing_new_is_asked_of_an_adapter() -> None:
    """What upstream leaves abstract is all implemented."""
    assert L2AdapterInterface.__abstractmethods__ <= set(METHODS), MOVED.format("L2AdapterInterface")
    assert not RepriseL2.__abstractmethods__


def test_the_values_that_are_exchanged_are_as_they_were() -> None:
    """Keys, layouts, results, bitmaps, objects: the fields and methods that the adapter reads."""
    told = MOVED.format("ObjectKey, MemoryLayoutDesc, L2StoreResult, KeyListPage, Bitmap, TensorMemoryObj")
    fields = [*ObjectKey.__dataclass_fields__]
    assert fields == ["chunk_hash", "model_name", "kv_rank", "object_group_id", "cache_salt"], told
    assert [*MemoryLayoutDesc.__dataclass_fields__] == ["shapes", "dtypes"], told
    assert ObjectKey.ComputeKVRank(8, 5, 4, 1) == 8 << 24 | 5 << 16 | 4 << 8 | 1, told
    assert parameters(L2StoreResult.__new__) == "cls, success, bytes_transferred", told
    assert [*KeyListPage.__dataclass_fields__] == ["entries", "next_page_token"], told
    assert [*KeyEntry.__dataclass_fields__] == ["key", "size_bytes"], told
    assert "bytes_by_cache_salt" in AdapterUsage.__dataclass_fields__, told
    bitmap = Bitmap(3)
    bitmap.set(1)
    assert (len(bitmap), bitmap.get_indices_list()) == (3, [1]), told
    assert {"byte_array", "get_shapes", "get_dtypes"} <= set(dir(TensorMemoryObj)), told
    plugin = ["self", "module_path", "class_name", "adapter_params", "config_class_name"]
    assert [*inspect.signature(PluginL2AdapterConfig.__init__).parameters] == plugin, told


def test_the_version_is_one_that_was_tested() -> None:
    """The interface is young: another version passes the tests of this folder first."""
    assert version("lmcache").split(".")[:2] == ["0", "5"], MOVED.format("the release notes")
