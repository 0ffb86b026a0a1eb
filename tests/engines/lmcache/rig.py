"""LMCache's own parts, put together as its command line does, and chunks with known bytes."""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Sequence
from typing import Any

import torch
from lmcache.v1.distributed.api import GroupedObjectKeys, MemoryLayoutDesc, ObjectKey, PrefetchTaskSpec
from lmcache.v1.distributed.config import StorageManagerConfig, add_storage_manager_args, parse_args_to_config
from lmcache.v1.distributed.storage_manager import StorageManager
from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj

from tests.support.waiting import wait
from workers.adapters.lmcache_l2 import RepriseL2

DIGEST = "ab" * 32
LAYOUT = MemoryLayoutDesc([torch.Size([2, 3, 16, 16])], [torch.float32])
CHUNK_BYTES = 2 * 3 * 16 * 16 * 4


def plugin(address: str, **more: Any) -> dict[str, Any]:
    """The value of ``--l2-adapter``. Options of the plugin itself, such as ``eviction``, go around ``params``."""
    params = {"store": address, "weights_digest": DIGEST, "chunk_tokens": 16, "lookup_deadline_s": 5.0}
    params |= more.pop("params", {})
    return {
        "type": "plugin",
        "module_path": "workers.adapters.lmcache_l2",
        "class_name": "RepriseL2",
        "adapter_params": params,
        **more,
    }


def adapter(address: str, **params: Any) -> RepriseL2:
    return RepriseL2(plugin(address, params=params)["adapter_params"])


def config_of(specification: dict[str, Any], l1_mib: int = 16) -> StorageManagerConfig:
    """What LMCache makes of its command line with this adapter."""
    parser = add_storage_manager_args(argparse.ArgumentParser())
    arguments = ["--l1-size-gb", str(l1_mib / 1024), "--eviction-policy", "LRU", "--no-l1-use-lazy"]
    config = parse_args_to_config(parser.parse_args([*arguments, "--l2-adapter", json.dumps(specification)]))
    config.l1_manager_config.memory_config.shm_name = ""
    return config


def storage_manager(
    address: str, l1_mib: int = 16, faults: dict[str, Any] | None = None, **more: Any
) -> StorageManager:
    """``faults``: options of LMCache's own adapter that injects them, around ours."""
    ours = plugin(address, **more)
    wrapped = ours if faults is None else {"type": "fault_inject", "inner": ours, **faults}
    return StorageManager(config_of(wrapped, l1_mib))


def key(number: int, *, salt: str = "", rank: int = 0, world: int = 1, group: int = 0, model: str = "m") -> ObjectKey:
    chunk_hash = hashlib.sha256(number.to_bytes(4, "big")).digest()
    return ObjectKey(chunk_hash, model, ObjectKey.ComputeKVRank(world, rank, world, rank), group, salt)


def content(of: ObjectKey, shape: torch.Size = LAYOUT.shapes[0]) -> torch.Tensor:
    """Bytes that only this key has, the same in every run."""
    seed = hashlib.sha256(repr(of).encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(seed[:7], "big"))
    return torch.randn(shape, generator=generator)


def chunk(filled: torch.Tensor) -> TensorMemoryObj:
    """An object of LMCache in memory of its own, filled with this tensor."""
    raw = filled.clone().contiguous().view(torch.uint8).flatten()
    shape, dtype = filled.shape, filled.dtype
    meta = MemoryObjMetadata(shape, dtype, 0, raw.numel(), 1, 0, MemoryFormat.KV_2LTD, shapes=[shape], dtypes=[dtype])
    return TensorMemoryObj(raw, meta, None)


def empty() -> TensorMemoryObj:
    return chunk(torch.full(LAYOUT.shapes[0], torch.nan))


def bits(bitmap: Any, count: int) -> list[int]:
    """Which of ``count`` are set."""
    assert len(bitmap) == count
    return list(bitmap.get_indices_list())


def stored(l2: RepriseL2, keys: Sequence[ObjectKey], objects: Sequence[Any] | None = None) -> Any:
    """Store through the adapter, each key with its own content unless told; the result of the task."""
    task = l2.submit_store_task(list(keys), list(objects or [chunk(content(item)) for item in keys]))
    return wait(lambda: l2.pop_completed_store_tasks().get(task), "result of a store")


def found(l2: RepriseL2, keys: Sequence[ObjectKey], layout: MemoryLayoutDesc = LAYOUT) -> list[int]:
    layouts = {item.object_group_id: layout for item in keys}
    task = l2.submit_lookup_and_lock_task(list(keys), layouts)
    return bits(wait(lambda: l2.query_lookup_and_lock_result(task), "look-up"), len(keys))


def loaded(l2: RepriseL2, keys: Sequence[ObjectKey], objects: Sequence[Any]) -> list[int]:
    task = l2.submit_load_task(list(keys), list(objects))
    return bits(wait(lambda: l2.query_load_result(task), "load"), len(keys))


def write(manager: StorageManager, keys: Sequence[ObjectKey]) -> None:
    """What an engine does with chunks that it computed."""
    reserved = manager.reserve_write(list(keys), LAYOUT)
    for item, memory in reserved.items():
        memory.tensor.copy_(content(item))
    manager.finish_write(list(reserved))
    assert len(reserved) == len(keys)


def in_l2(manager: StorageManager) -> int:
    """Bytes that LMCache counts as held by its second level."""
    return int(manager.l2_adapters()[0][1].get_usage().total_bytes_used)


def prefetch(manager: StorageManager, keys: Sequence[ObjectKey]) -> tuple[int, int]:
    """How many chunks of the prefix LMCache found, and how many of them came from its second level."""
    handle = manager.submit_prefetch_task(PrefetchTaskSpec([GroupedObjectKeys(list(keys), 0, LAYOUT)]))
    result = wait(lambda: manager.query_prefetch_status(handle), "prefetch")
    return int(result.l1_hit_count + result.l2_hit_count), int(result.l2_hit_count)


def differing(manager: StorageManager, keys: Sequence[ObjectKey]) -> int:
    """How many prefetched chunks are not what was written under their keys; gives them back."""
    with manager.read_prefetched_results(list(keys)) as objects:
        assert objects is not None
        wrong = sum(not torch.equal(held.tensor, content(item)) for item, held in zip(keys, objects, strict=True))
    manager.finish_read_prefetched(list(keys))
    return wrong
