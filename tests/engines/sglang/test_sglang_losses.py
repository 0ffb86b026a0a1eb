"""What goes wrong between SGLang and the store: refused puts, blocks that are gone or damaged, a silent node."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from kvstore.store import PutOutcome
from tests.engines.sglang.rig import PAGE, backend, fill, host, keys, mha, page, slots, wait, wipe
from tests.support.store_process import StoreProcess

from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer  # isort: skip
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.utils import get_storage_hash_str

BUFFERS = 2
"""Of a page: keys and values."""


@pytest.fixture
def made(store: StoreProcess, pool: Any) -> Iterator[Any]:
    made = backend(store.address, pool, {"lookup_deadline_s": 2.5, "load_deadline_s": 2.5})
    yield made
    made.close()


def test_a_page_that_was_refused_is_taken_when_it_is_offered_again(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fifth of ten does not fit: the prefix ends there, SGLang hears it, and the next offer sends only that one."""
    store, sent = made._attachment.store, []
    put = store.put

    def put_most(space: Any, blocks: Any, **more: Any) -> list[PutOutcome]:
        sent.append(len(blocks))
        if len(sent) > 1:
            return list(put(space, blocks, **more))
        fifth = range(4 * BUFFERS, 5 * BUFFERS)
        rest = iter(put(space, [block for at, block in enumerate(blocks) if at not in fifth], **more))
        return [PutOutcome.REFUSED if at in fifth else next(rest) for at in range(len(blocks))]

    monkeypatch.setattr(store, "put", put_most)
    assert made.batch_set_v1(keys(10), slots(*range(10))) == [at != 4 for at in range(10)]
    assert made.batch_exists(keys(10)) == 4
    assert made.batch_set_v1(keys(10), slots(*range(10))) == [True] * 10
    assert made.batch_exists(keys(10)) == 10
    assert sent == [10 * BUFFERS, BUFFERS]


def test_memory_that_is_used_again_right_after_a_backup_changes_nothing_stored(made: Any, pool: Any) -> None:
    """SGLang reuses the slots once the call is back: what is loaded is what lay there before."""
    old = [page(pool, number) for number in range(4)]
    assert made.batch_set_v1(keys(4), slots(0, 1, 2, 3)) == [True] * 4
    fill(pool, 2)
    assert made.batch_get_v1(keys(4), slots(9, 8, 7, 6)) == [True] * 4
    assert all(torch.equal(page(pool, 9 - number), old[number]) for number in range(4))


def test_what_is_gone_when_it_is_loaded_is_not_found_again(made: Any, pool: Any) -> None:
    """The look-up said five; one was deleted; its slots are left alone, and the next look-up says three."""
    made.batch_set_v1(keys(5), slots(*range(5)))
    assert made.batch_exists(keys(5)) == 5
    kv = made._pools["kv"]
    made._attachment.store.delete(kv.space.id, [name.key for name in kv.names(keys(1, first=3))])
    before = page(pool, 13)
    assert made.batch_get_v1(keys(5), slots(10, 11, 12, 13, 14)) == [True, True, True, False, True]
    assert torch.equal(page(pool, 13), before)
    assert made.batch_exists(keys(5)) == 3


def test_a_damaged_page_is_not_loaded(store: StoreProcess, made: Any, pool: Any) -> None:
    """One bit on disk is another: SGLang hears of a page that is not there, and finds it gone from then on."""
    fill(pool, 4711)
    made.batch_set_v1(keys(5), slots(*range(5)))
    payload = bytes(page(pool, 2).numpy())[:256]
    store.kill()
    assert store.damage(payload) == 1
    store.begin()
    wait(lambda: made.batch_exists(keys(5)) == 5)
    wipe(pool)
    assert made.batch_get_v1(keys(5), slots(*range(10, 15))) == [True, True, False, True, True]
    assert wait(lambda: made.batch_exists(keys(5)) == 2)


def test_a_silent_node_is_a_miss_at_the_deadline(store: StoreProcess, made: Any) -> None:
    """It takes no call and closes nothing: look-ups and loads end all the same; and once it goes on, pages are hits."""
    made.batch_set_v1(keys(3), slots(0, 1, 2))
    store.hang()
    try:
        assert made.batch_exists(keys(3)) == 0
        assert made.batch_get_v1(keys(3), slots(5, 6, 7)) == [False] * 3
    finally:
        store.go_on()
    assert wait(lambda: made.batch_exists(keys(3)) == 3)


def test_prefixes_of_every_length_are_hits_for_the_next_process(store: StoreProcess, made: Any) -> None:
    """A page more each turn, to a thousand tokens, each with the window at its end: nothing is written for nothing."""
    names, side = keys(64), host(mha(heads=1))

    def window(end: int) -> PoolTransfer:
        numbers = range(max(end - 2, 0), end)
        policy = PoolHitPolicy.TRAILING_PAGES
        indices = slots(*(at % 20 for at in numbers))
        return PoolTransfer(PoolName.SWA, indices, keys=[names[at] for at in numbers], hit_policy=policy)

    made.register_mem_host_pool_v2(side, PoolName.SWA)
    for end in range(1, 65):
        assert all(made.batch_set_v1(names[:end], slots(*(at % 20 for at in range(end)))))
        assert all(made.batch_set_v2([window(end)])[PoolName.SWA])
    other = backend(store.address, host(mha()))
    other.register_mem_host_pool_v2(host(mha(heads=1)), PoolName.SWA)
    asked = PoolTransfer(PoolName.SWA, keys=names[:2], hit_policy=PoolHitPolicy.TRAILING_PAGES)
    assert [other.batch_exists_v2(names[:end], [asked]).kv_hit_pages for end in range(1, 65)] == [*range(1, 65)]
    other.close()


@pytest.mark.parametrize("field", ["extra_key", "cache_salt"])
def test_namespaces_of_requests_are_chains_of_their_own(made: Any, field: str) -> None:
    """By SGLang's own hashes of the same tokens: two names, none, and of an extra key the empty one share no page."""
    values = ("a", "b", None, "") if field == "extra_key" else ("a", "b", None)
    tokens = array("q", range(3 * PAGE))
    chains = [get_storage_hash_str(RadixKey(tokens, **{field: value}), page_size=PAGE) for value in values]
    for number, chain in enumerate(chains):
        assert [made.batch_exists(other) for other in chains] == [3] * number + [0] * (len(chains) - number)
        assert made.batch_set_v1(chain, slots(0, 1, 2)) == [True] * 3
