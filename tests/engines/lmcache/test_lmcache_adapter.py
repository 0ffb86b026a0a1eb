"""The adapter as LMCache's controllers see it: tasks, descriptors, answers; and that no two spaces mix."""

from __future__ import annotations

import dataclasses
import os
import select
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch
from lmcache.cli.commands.bench.l2_adapter_bench.data import make_memory_objects, make_object_keys, verify_round_trip
from lmcache.cli.commands.bench.l2_adapter_bench.runner import bench_load, bench_lookup, bench_store
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.platform import consume_fd

from kvstore.client import StoreClient
from kvstore.purges import PurgeOrder
from kvstore.traffic import CHAT
from retention.purge import Purge, purge_part, purge_spaces, spaces_of_tenant
from tests.engines.lmcache.rig import (
    CHUNK_BYTES,
    LAYOUT,
    adapter,
    chunk,
    content,
    empty,
    found,
    key,
    loaded,
    stored,
    wait,
)
from tests.support.store_process import StoreProcess
from workers.adapters import lmcache_l2
from workers.adapters.attachment import OptionError
from workers.adapters.lmcache_l2 import RepriseL2


@pytest.fixture
def l2(store: StoreProcess) -> Iterator[RepriseL2]:
    made = adapter(store.address)
    yield made
    made.close()


def test_descriptors_are_distinct_and_tell_of_each_answer(store: StoreProcess, l2: RepriseL2) -> None:
    """Three of their own for each adapter; only that of the task's kind wakes, and the answer is given out once."""
    other = adapter(store.address)
    mine = [l2.get_store_event_fd(), l2.get_lookup_and_lock_event_fd(), l2.get_load_event_fd()]
    theirs = [other.get_store_event_fd(), other.get_lookup_and_lock_event_fd(), other.get_load_event_fd()]
    assert len({*mine, *theirs}) == 6
    poller = select.poll()
    for descriptor in mine:
        poller.register(descriptor, select.POLLIN)
    task = l2.submit_store_task([key(1)], [chunk(content(key(1)))])
    assert [descriptor for descriptor, _ in poller.poll(10_000)] == mine[:1]
    consume_fd(mine[0])
    assert l2.pop_completed_store_tasks()[task].is_successful()
    assert l2.pop_completed_store_tasks() == {}
    task = l2.submit_lookup_and_lock_task([key(1)], {0: LAYOUT})
    assert [descriptor for descriptor, _ in poller.poll(10_000)] == mine[1:2]
    consume_fd(mine[1])
    assert l2.query_lookup_and_lock_result(task) is not None
    assert l2.query_lookup_and_lock_result(task) is None
    task = l2.submit_load_task([key(1)], [empty()])
    assert [descriptor for descriptor, _ in poller.poll(10_000)] == mine[2:]
    consume_fd(mine[2])
    assert l2.query_load_result(task) is not None
    assert l2.query_load_result(task) is None
    other.close()


def test_what_was_stored_is_loaded_into_the_objects_own_memory(store: StoreProcess, l2: RepriseL2) -> None:
    """Byte for byte, without a tensor of its own; a key that is not there leaves its object alone."""
    keys = [key(number) for number in range(5)]
    result = stored(l2, keys[:4])
    assert result.is_successful()
    assert result.bytes_transferred() == 4 * CHUNK_BYTES
    other = adapter(store.address)
    assert found(other, keys) == [0, 1, 2, 3]
    objects = [empty() for _ in keys]
    memory = [held.raw_data.data_ptr() for held in objects]
    assert loaded(other, keys, objects) == [0, 1, 2, 3]
    assert [held.raw_data.data_ptr() for held in objects] == memory
    for item, held in zip(keys[:4], objects, strict=False):
        assert torch.equal(held.tensor, content(item))
    assert bool(torch.isnan(objects[4].tensor).all())
    other.submit_unlock(keys)
    other.close()


def test_a_key_stored_again_is_kept_and_not_sent_twice(l2: RepriseL2) -> None:
    """What is there already is a success of no bytes, and counts once."""
    assert stored(l2, [key(1)]).bytes_transferred() == CHUNK_BYTES
    again = stored(l2, [key(1)])
    assert again.is_successful()
    assert again.bytes_transferred() == 0
    assert l2.get_usage().total_bytes_used == CHUNK_BYTES


@pytest.mark.parametrize(
    "other",
    [
        key(1, salt="bob"),
        key(1, salt="alice "),
        key(1),
        key(1, salt="alice", rank=1, world=2),
        key(1, salt="alice", group=1),
        key(1, salt="alice", model="m2"),
        key(2, salt="alice"),
    ],
    ids=["another tenant", "nearly the same", "nobody's", "rank", "group", "model", "chunk"],
)
def test_keys_that_differ_in_anything_share_nothing(l2: RepriseL2, other: ObjectKey) -> None:
    """Tenant, rank, group, model, chunk: each alone makes it another block, with its own bytes."""
    mine = key(1, salt="alice")
    stored(l2, [mine])
    assert found(l2, [other, mine]) == [1]
    stored(l2, [other])
    objects = [empty(), empty()]
    assert loaded(l2, [mine, other], objects) == [0, 1]
    assert torch.equal(objects[0].tensor, content(mine))
    assert torch.equal(objects[1].tensor, content(other))


def test_the_chunks_of_all_ranks_are_one_call_and_each_rank_has_its_own(store: StoreProcess, l2: RepriseL2) -> None:
    """LMCache asks for every rank in one task, rank by rank; a part that one of them lacks is missed alone."""
    ranks = [[key(number, rank=rank, world=4) for number in range(5)] for rank in range(4)]
    lacking = ranks[2][3]
    for mine in ranks:
        assert stored(l2, [item for item in mine if item is not lacking]).is_successful()
    other = adapter(store.address)
    keys = [item for mine in ranks for item in mine]
    there = [at for at, item in enumerate(keys) if item is not lacking]
    assert found(other, keys) == there
    objects = [empty() for _ in keys]
    assert loaded(other, keys, objects) == there
    assert all(torch.equal(objects[at].tensor, content(keys[at])) for at in there)
    assert bool(torch.isnan(objects[keys.index(lacking)].tensor).all())
    status = other.report_status()
    assert (status["lookups"], status["found"]) == (1, 3 * 4 + 2), "as far as all ranks have it, and the next two"
    other.delete([keys[0]])
    assert found(other, keys) == there[1:]
    other.close()


def test_a_prompt_of_more_chunks_than_one_call_may_have_is_asked_in_parts(
    l2: RepriseL2, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bound of a call holds for all ranks together; LMCache does not know it."""
    monkeypatch.setattr(lmcache_l2, "LOOKUP_KEYS_MAX", 3)
    keys = [key(number, rank=rank, world=2) for rank in range(2) for number in range(4)]
    assert stored(l2, keys[:7]).is_successful()
    assert found(l2, keys) == loaded(l2, keys, [empty() for _ in keys]) == [0, 1, 2, 3, 4, 5, 6]
    assert l2.report_status()["lookups"] == 3


def test_lmcaches_own_benchmark_finds_and_loads_what_it_stored(store: StoreProcess) -> None:
    """Its objects have no shapes, and each key a rank of its own: the layout is named, as the README says."""
    l2 = adapter(store.address, layout="bench")
    keys = make_object_keys(8)
    memory = torch.empty(2 * 8 * CHUNK_BYTES, dtype=torch.uint8)
    filled = make_memory_objects(memory, 8, CHUNK_BYTES, 0, fill_offset=1)
    blank = make_memory_objects(memory, 8, CHUNK_BYTES, 8 * CHUNK_BYTES)
    told: list[str] = []
    results = [
        bench_store(l2, 1, 8, CHUNK_BYTES, 1, lambda _: [keys], lambda _: [filled], told.append),
        bench_lookup(l2, 1, 8, 1, lambda _: [keys], told.append),
        bench_load(l2, 1, 8, CHUNK_BYTES, 1, lambda _: [keys], lambda _: [blank], told.append),
    ]
    assert [result.success_counts for result in results] == [[8], [8], [8]], told
    assert verify_round_trip(keys, filled, blank, told.append), told
    l2.close()


@pytest.mark.parametrize(
    "layout",
    [
        MemoryLayoutDesc([torch.Size([2, 3, 16, 16])], [torch.int32]),
        MemoryLayoutDesc([torch.Size([2, 3, 16, 16])], [torch.bfloat16]),
        MemoryLayoutDesc([torch.Size([2, 16, 3, 16])], [torch.float32]),
        MemoryLayoutDesc([torch.Size([2, 4, 16, 16])], [torch.float32]),
    ],
    ids=["element type of the same width", "element type", "order", "size"],
)
def test_another_layout_under_the_same_keys_finds_nothing(l2: RepriseL2, layout: MemoryLayoutDesc) -> None:
    """An engine that changed how its chunks look never reads those of before, also where their lengths agree."""
    stored(l2, [key(1)])
    assert found(l2, [key(1)], layout) == []
    held = chunk(torch.zeros(layout.shapes[0], dtype=layout.dtypes[0]))
    assert loaded(l2, [key(1)], [held]) == []
    assert not held.tensor.any()


def test_other_weights_or_another_epoch_find_nothing(store: StoreProcess, l2: RepriseL2) -> None:
    """New weights under an old name do not get the old KV, and an operator can leave all of it behind."""
    stored(l2, [key(1)])
    for params in ({"weights_digest": "cd" * 32}, {"epoch": 1}):
        other = adapter(store.address, **params)
        assert found(other, [key(1)]) == []
        other.close()


def test_a_window_whose_first_chunks_are_gone_is_not_declined_for_them(
    store: StoreProcess, l2: RepriseL2, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a slow load is weighed against is all that is found, where a prefix of it would be a chunk; and it is."""
    keys = [key(number) for number in range(10)]
    stored(l2, [keys[0], *keys[4:]])
    rated = adapter(store.address, compute_tokens_per_s=100.0)
    look_up = rated._attachment.store.lookup
    monkeypatch.setattr(
        rated._attachment.store,
        "lookup",
        lambda *asked, **more: dataclasses.replace(look_up(*asked, **more), load_s_estimate=1.0),
    )
    assert found(rated, keys) == [0, 4, 5, 6, 7, 8, 9]
    assert found(rated, keys[:6]) == []
    assert rated.report_status()["declined"] == 1
    rated.close()


def test_a_hash_that_is_too_short_is_never_stored_or_found(l2: RepriseL2) -> None:
    """Eight bytes may be Python's own hash, another in each process, and two prefixes may share one."""
    short = ObjectKey(b"12345678", "m", key(1).kv_rank)
    assert not stored(l2, [short, key(1)], [chunk(content(key(9))), chunk(content(key(1)))]).is_successful()
    assert found(l2, [short, key(1)]) == [1]


def test_usage_is_counted_by_salt_and_follows_what_the_store_lost(store: StoreProcess, l2: RepriseL2) -> None:
    """Sizes reach LMCache's own accounting; what was purged behind its back is no longer counted once it is missed."""
    alice, bob = [key(number, salt="alice") for number in range(3)], [key(1, salt="bob")]
    stored(l2, alice + bob)
    assert dict(l2.get_usage().bytes_by_cache_salt) == {"alice": 3 * CHUNK_BYTES, "bob": CHUNK_BYTES}
    other = adapter(store.address)
    objects = [empty() for _ in alice]
    assert loaded(other, alice, objects) == [0, 1, 2]
    assert dict(other.get_usage().bytes_by_cache_salt) == {"alice": 3 * CHUNK_BYTES}
    other.delete(alice[:2])
    assert dict(other.get_usage().bytes_by_cache_salt) == {"alice": CHUNK_BYTES}
    assert found(l2, alice) == [2]
    assert dict(l2.get_usage().bytes_by_cache_salt) == {"alice": CHUNK_BYTES, "bob": CHUNK_BYTES}
    other.close()


def test_what_was_deleted_is_not_found_again(store: StoreProcess, l2: RepriseL2) -> None:
    """Also by an adapter that never saw the objects, as after a restart, and never under another tenant's key."""
    keys = [key(1, salt="alice"), key(1, salt="bob"), key(1)]
    stored(l2, keys)
    l2.close()
    after = adapter(store.address)
    after.delete([keys[0]])
    assert found(after, keys) == [1, 2]
    objects = [empty()]
    assert loaded(after, keys[:1], objects) == []
    store.kill()
    store.begin()
    assert wait(lambda: found(after, keys)) == [1, 2]
    after.close()


def test_an_operator_purges_chunks_by_tenant_class_and_age(store: StoreProcess, l2: RepriseL2) -> None:
    """No tokens lead to them, and their space says so; what reaches all other blocks reaches them, too."""
    client, now_s = StoreClient.connect([store.address]), int(time.time()) + 1
    by_class = PurgeOrder("ab" * 16, (), None, now_s, class_byte=int(CHAT), erase=False)
    by_age = PurgeOrder("cd" * 16, (), None, now_s, written_until_s=now_s, erase=False)
    keys = [key(1, salt="alice"), key(2, salt="alice"), key(1, salt="bob")]
    ways: tuple[tuple[Callable[[], Purge], list[int]], ...] = (
        (lambda: purge_spaces(client, spaces_of_tenant("alice", client.spaces()), apply=True), [2]),
        (lambda: purge_part(client, by_class, apply=True), []),
        (lambda: purge_part(client, by_age, apply=True), []),
    )
    for way, left in ways:
        assert stored(l2, keys).is_successful()
        assert all(space.is_opaque for space in client.spaces().values())
        assert way().blocks_total == len(keys) - len(left)
        assert found(l2, keys) == left
        assert l2.get_usage().total_bytes_used == len(left) * CHUNK_BYTES
    client.close()


def test_what_is_known_is_listed_page_by_page(l2: RepriseL2) -> None:
    """Every key once, of one model if asked, also while keys come and go between two pages."""
    keys = [key(number, salt="s") for number in range(7)] + [key(1, model="m2")]
    stored(l2, keys)
    page, listed = l2.list_l2_keys("m", 3), []
    while True:
        listed += [entry.key.to_object_key() for entry in page.entries]
        assert all(entry.size_bytes == CHUNK_BYTES for entry in page.entries)
        if page.next_page_token is None:
            break
        l2.delete([listed[0]])
        page = l2.list_l2_keys("m", 3, page.next_page_token)
    assert listed == keys[:7]
    assert len(l2.list_l2_keys().entries) == 7
    with pytest.raises(ValueError, match="page_size"):
        l2.list_l2_keys(page_size=0)
    with pytest.raises(ValueError, match="invalid literal"):
        l2.list_l2_keys(cursor="x")


def test_without_a_store_everything_is_a_miss_in_time(store: StoreProcess, l2: RepriseL2) -> None:
    """Tasks end with a failure, the objects untouched, LMCache stays healthy; and the store's return is enough."""
    stored(l2, [key(1)])
    store.kill()
    held = empty()
    assert found(l2, [key(1)]) == []
    assert loaded(l2, [key(1)], [held]) == []
    assert bool(torch.isnan(held.tensor).all())
    assert not stored(l2, [key(2)]).is_successful()
    assert l2.report_status()["is_healthy"]
    assert l2.get_usage().total_bytes_used == CHUNK_BYTES
    store.begin()
    assert wait(lambda: found(l2, [key(1)]) or None) == [0]
    assert loaded(l2, [key(1)], [held]) == [0]
    assert torch.equal(held.tensor, content(key(1)))


def test_tasks_beyond_the_bound_fail_at_once(store: StoreProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts are shed while the store does not answer; each task has its answer, and reads are none the worse."""
    monkeypatch.setattr(lmcache_l2, "TASKS_MAX", 2)
    l2 = adapter(store.address)
    gate = threading.Event()
    monkeypatch.setattr(l2, "_store", lambda *task: (gate.wait(10.0), lmcache_l2.L2StoreResult(True, 0))[1])
    tasks = [l2.submit_store_task([key(number)], [empty()]) for number in range(5)]
    shed = l2.pop_completed_store_tasks()
    assert sorted(shed) == tasks[2:]
    assert not any(result.is_successful() for result in shed.values())
    assert found(l2, [key(1)]) == []
    gate.set()
    results = wait(lambda: len(l2._stores._answers) == 2 and l2.pop_completed_store_tasks())
    assert all(result.is_successful() for result in results.values())
    l2.close()


def test_an_object_that_no_block_can_hold_fails_alone(l2: RepriseL2, monkeypatch: pytest.MonkeyPatch) -> None:
    """The task ends as failed, and what to change is said."""
    monkeypatch.setattr(lmcache_l2, "PAYLOAD_BYTES_MAX", CHUNK_BYTES - 1)
    assert not stored(l2, [key(1)]).is_successful()
    assert found(l2, [key(1)]) == []


def test_two_threads_at_once_get_each_others_bytes_never(l2: RepriseL2) -> None:
    """Stores and loads side by side, as LMCache's two controllers do: every load is whole and right, or a miss."""
    keys = [key(number) for number in range(48)]
    wrong: list[int] = []

    def store_all() -> None:
        for at in range(0, len(keys), 4):
            assert stored(l2, keys[at : at + 4]).is_successful()

    def load_all() -> None:
        for _ in range(12):
            there = [keys[at] for at in found(l2, keys)]
            objects = [empty() for _ in there]
            got = loaded(l2, there, objects) if there else []
            wrong.extend(at for at in got if not torch.equal(objects[at].tensor, content(there[at])))

    threads = [threading.Thread(target=call) for call in (store_all, load_all)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
        assert not thread.is_alive()
    assert not wrong
    assert found(l2, keys) == list(range(48))


def test_closing_waits_for_what_runs_and_leaves_no_descriptor(store: StoreProcess) -> None:
    """After it LMCache may free its memory: no thread writes there, and every descriptor is given back."""
    before = len(os.listdir("/proc/self/fd"))
    l2 = adapter(store.address)
    stored(l2, [key(number) for number in range(8)])
    objects = [empty() for _ in range(8)]
    l2.submit_load_task([key(number) for number in range(8)], objects)
    l2.close()
    copies = [held.raw_data.clone() for held in objects]
    time.sleep(0.05)
    assert all(torch.equal(held.raw_data, copy) for held, copy in zip(objects, copies, strict=True))
    l2.close()
    assert len(os.listdir("/proc/self/fd")) <= before
    assert not l2.report_status()["is_healthy"]


@pytest.mark.parametrize(
    ("params", "told"),
    [
        ({"weights_digest": "ab"}, "weights_digest: expected 64 hex digits"),
        ({"chunk_tokens": 0}, "chunk_tokens: expected 1..4096"),
        ({"layout": ""}, "layout: expected a short text"),
        ({"capacity": "much"}, "capacity: expected a size"),
        ({"capacity": []}, "capacity: expected a size"),
        ({"capacity": -1}, "capacity: expected a size"),
        ({"stroe": 1}, "unknown option stroe"),
    ],
)
def test_an_option_that_cannot_be_used_stops_the_start(params: dict[str, object], told: str) -> None:
    """By name, with what to write instead."""
    with pytest.raises(OptionError, match=told):
        adapter("127.0.0.1:1", **params)


def test_weights_must_be_named() -> None:
    """A name of a model says nothing of its weights, so without a digest nothing starts."""
    with pytest.raises(OptionError, match="weights_digest: give 64 hex digits"):
        RepriseL2({"store": "127.0.0.1:1"})
