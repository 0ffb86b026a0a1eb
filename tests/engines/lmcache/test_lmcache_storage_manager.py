"""LMCache's storage manager with the adapter behind it: its controllers, its memory, its eviction."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from lmcache.v1.distributed.storage_manager import StorageManager

from tests.engines.lmcache.rig import (
    CHUNK_BYTES,
    config_of,
    differing,
    in_l2,
    key,
    plugin,
    prefetch,
    storage_manager,
    wait,
    write,
)
from tests.support.store_process import StoreProcess

Make = Callable[..., StorageManager]


@pytest.fixture
def make(store: StoreProcess) -> Iterator[Make]:
    """Storage managers over the node, each closed in the end."""
    with ExitStack() as made:

        def one(**more: Any) -> StorageManager:
            manager = storage_manager(store.address, **more)
            made.callback(manager.close)
            return manager

        yield one


def test_chunks_outlive_every_process(store: StoreProcess, make: Make) -> None:
    """Written through LMCache's first level, both killed or closed, found and loaded by the next one, byte for byte."""
    keys = [key(number, salt="alice") for number in range(12)]
    first = storage_manager(store.address)
    write(first, keys)
    wait(lambda: in_l2(first) == 12 * CHUNK_BYTES, "store")
    first.close()
    store.kill()
    store.begin()
    second = make()
    assert prefetch(second, [*keys, key(99, salt="alice")]) == (12, 12)
    assert differing(second, keys) == 0
    assert prefetch(second, [key(number) for number in range(12)]) == (0, 0)


def test_a_node_that_dies_costs_misses_and_nothing_else(store: StoreProcess, make: Make) -> None:
    """While it is gone LMCache finds nothing and stores nothing, in time; what it kept is found once it is back."""
    keys = [key(number) for number in range(8)]
    first, second = make(), make()
    write(first, keys[:4])
    wait(lambda: in_l2(first) == 4 * CHUNK_BYTES, "store")
    store.kill()
    assert prefetch(second, keys) == (0, 0)
    write(first, keys[4:])
    wait(lambda: first.report_status()["l2_adapters"][0]["stores_failed"] == 4, "failed store")
    assert first.report_status()["is_healthy"]
    store.begin()
    assert wait(lambda: prefetch(second, keys) if prefetch(second, keys)[0] else None)[0] == 4
    assert differing(second, keys[:4]) == 0
    write(first, [key(number) for number in range(20, 24)])
    wait(lambda: in_l2(first) == 8 * CHUNK_BYTES, "store")


def test_what_was_found_but_then_removed_is_a_failed_cell(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between look-up and load everything may go: LMCache ends the prefix there, and frees what it had reserved."""
    keys = [key(number) for number in range(6)]
    first, second = make(), make()
    write(first, keys)
    wait(lambda: in_l2(first) == 6 * CHUNK_BYTES, "store")
    adapter = second.l2_adapters()[0][1]
    look_up = adapter._look_up

    def look_up_then_lose(*task: Any) -> Any:
        answer = look_up(*task)
        first.l2_adapters()[0][1].delete(keys[3:4])
        return answer

    monkeypatch.setattr(adapter, "_look_up", look_up_then_lose)
    assert prefetch(second, keys) == (3, 3)
    assert differing(second, keys[:3]) == 0
    assert second.memcheck()


def test_upstreams_own_faults_change_no_byte(make: Make) -> None:
    """LMCache's injector fails loads of what was found, here and there: a prefix ends before it, and is right."""
    requests = [[key(100 * number + at) for at in range(6)] for number in range(12)]
    first, second = make(), make(faults={"rate": 0.15, "seed": 3})
    for keys in requests:
        write(first, keys)
    wait(lambda: in_l2(first) == 72 * CHUNK_BYTES, "store")
    hits = []
    for keys in requests:
        count, _ = prefetch(second, keys)
        hits.append(count)
        assert count == 0 or differing(second, keys[:count]) == 0
    assert 6 in hits
    assert min(hits) < 6
    assert second.memcheck()


def test_an_adapter_comes_and_goes_while_lmcache_runs(store: StoreProcess, make: Make) -> None:
    """Added at run time it serves what another process stored; taken away, it lets go of what it had open."""
    keys = [key(number) for number in range(4)]
    first, second = make(), make(params={"tenant": "alice"})
    write(first, keys)
    wait(lambda: in_l2(first) == 4 * CHUNK_BYTES, "store")
    assert prefetch(second, keys) == (0, 0)
    [added] = config_of(plugin(store.address)).l2_adapter_config.adapters
    number = second.add_l2_adapter(added)
    ours = second.l2_adapters()[-1][1]
    assert prefetch(second, keys) == (4, 4)
    assert differing(second, keys) == 0
    second.delete_l2_adapter(number)
    assert not ours.report_status()["is_healthy"]
    other = [key(number) for number in range(50, 54)]
    write(first, other)
    wait(lambda: in_l2(first) == 8 * CHUNK_BYTES, "store")
    assert prefetch(second, other) == (0, 0)


def test_prefetches_beside_stores_get_the_right_bytes(make: Make) -> None:
    """Several requests load while others store, in memory that is too small for all: no chunk is ever another's."""
    first, second = make(), make(l1_mib=1)
    requests = [[key(100 * number + at) for at in range(8)] for number in range(12)]
    hits: list[int] = []
    wrong: list[int] = []

    def store_all() -> None:
        for keys in requests:
            write(first, keys)

    def load_some(mine: int) -> None:
        for _ in range(4):
            for keys in requests[mine::2]:
                count, _ = prefetch(second, keys)
                if count:
                    wrong.append(differing(second, keys[:count]))
                hits.append(count)

    threads = [threading.Thread(target=store_all), *(threading.Thread(target=load_some, args=(at,)) for at in (0, 1))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120.0)
        assert not thread.is_alive()
    wait(lambda: in_l2(first) == 96 * CHUNK_BYTES, "store")
    assert sum(wrong) == 0
    assert sum(prefetch(second, keys)[0] for keys in requests) > 0
    assert sum(hits) > 0


def test_quotas_of_lmcache_take_effect_in_the_store(make: Make) -> None:
    """Its per-tenant eviction knows sizes from the adapter: who has no quota loses everything, the other nothing."""
    first = make(eviction={"eviction_policy": "IsolatedLRU", "trigger_watermark": 0.9, "eviction_ratio": 0.5})
    first.quota_manager.set_quota("alice", 100 * CHUNK_BYTES)
    alice, bob = ([key(number, salt=salt) for number in range(4)] for salt in ("alice", "bob"))
    adapter = first.l2_adapters()[0][1]
    write(first, alice)
    wait(lambda: in_l2(first) == 4 * CHUNK_BYTES, "store")
    write(first, bob)
    wait(lambda: adapter.report_status()["stored"] == 8, "store")
    wait(lambda: dict(adapter.get_usage().bytes_by_cache_salt) == {"alice": 4 * CHUNK_BYTES}, "eviction")
    second = make()
    assert prefetch(second, bob) == (0, 0)
    assert prefetch(second, alice) == (4, 4)


def test_lmcaches_own_eviction_works_by_the_capacity_that_it_is_told(make: Make) -> None:
    """Beyond the watermark it deletes what was used least lately, here and in the store."""
    eviction = {"eviction_policy": "LRU", "trigger_watermark": 0.6, "eviction_ratio": 0.5}
    first = make(eviction=eviction, params={"capacity": 10 * CHUNK_BYTES})
    keys = [key(number) for number in range(8)]
    write(first, keys)
    wait(lambda: in_l2(first) == 4 * CHUNK_BYTES, "eviction")
    second = make()
    assert sum(prefetch(second, [item])[0] for item in keys) == 4


def test_serialized_chunks_are_found_where_the_layout_is_named(make: Make) -> None:
    """LMCache's own fp8: what lies in the store is its bytes, under a space that says so; without that, nothing."""
    keys = [key(number) for number in range(4)]
    named = {"serde": {"type": "fp8"}, "params": {"layout": "fp8"}}
    first, second, unnamed = make(**named), make(**named), make(serde={"type": "fp8"})
    write(first, keys)
    wait(lambda: in_l2(first) > 0, "store")
    assert prefetch(second, keys) == (4, 4)
    assert in_l2(first) == in_l2(second) < 4 * CHUNK_BYTES
    assert prefetch(unnamed, keys) == (0, 0)
