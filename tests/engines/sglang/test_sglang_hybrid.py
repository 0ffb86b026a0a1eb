"""SGLang's controller of hybrid models with the backend behind it: KV and sliding-window pages, interface v2."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.engines.sglang.hybrid import WINDOW_PAGES, hybrid, same
from tests.engines.sglang.rig import PAGE, mha, page, slots, wipe
from tests.support.store_process import StoreProcess

from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer  # isort: skip


def test_a_prefix_and_its_window_come_back_after_everything_was_killed(store: StoreProcess) -> None:
    """Both pools' pages, byte for byte, in a process that never had them, from a node that was killed in between."""
    tokens = list(range(5 * PAGE))
    with hybrid(store.address, 10) as first:
        assert first.prefetch(tokens)[:2] == (0, 0)
        assert first.backup(tokens, [4, 0, 6, 2, 8], [7, 3]) == 5 * PAGE
        store.kill()
        store.begin()
        with hybrid(store.address, 20) as second:
            done, windows, pages, window = second.prefetch([*tokens, *range(700, 700 + 2 * PAGE)])
            assert (done, windows) == (5 * PAGE, WINDOW_PAGES)
            assert same(first, [4, 0, 6, 2, 8], second, pages, PoolName.KV)
            assert same(first, [7, 3], second, window, PoolName.SWA)


def test_a_prefix_is_cut_where_a_window_ends(store: StoreProcess) -> None:
    """Two nodes of one prefix, each with its window: what lies between and beyond them is not used."""
    tokens = list(range(8 * PAGE))
    with hybrid(store.address, 10) as first, hybrid(store.address, 20) as second:
        first.backup(tokens[: 3 * PAGE], [0, 1, 2], [1, 2])
        first.backup(tokens[: 6 * PAGE], [0, 1, 2, 3, 4, 5], [4, 5])
        first.backup(tokens, range(8), [])
        done, windows, pages, window = second.prefetch(tokens)
        assert (done, windows) == (6 * PAGE, WINDOW_PAGES)
        assert same(first, [4, 5], second, window, PoolName.SWA)
        backend = first.controller.storage_backend
        swa = backend._pools["swa"]
        hashes = first.controller.get_hash_str(tokens, None, page_size=PAGE)
        backend._attachment.store.delete(swa.space.id, [name.key for name in swa.names(hashes[5:6])])
        done, windows, pages, window = second.prefetch(tokens)
        assert (done, windows) == (3 * PAGE, WINDOW_PAGES)
        assert same(first, [0, 1, 2], second, pages, PoolName.KV)
        assert same(first, [1, 2], second, window, PoolName.SWA)


def test_a_window_that_breaks_off_is_not_used(store: StoreProcess) -> None:
    """Found, but gone before it was read: SGLang is told of no page of it, and computes."""
    tokens = list(range(4 * PAGE))
    with hybrid(store.address, 10) as first, hybrid(store.address, 20) as second:
        first.backup(tokens, [0, 1, 2, 3], [2, 3])
        backend = second.controller.storage_backend
        get = backend.batch_get_v2

        def lose_then_get(transfers: Any, extra_info: Any = None) -> Any:
            swa = backend._pools["swa"]
            backend._attachment.store.delete(swa.space.id, [name.key for name in swa.names(transfers[0].keys[:1])])
            return get(transfers, extra_info)

        backend.batch_get_v2 = lose_then_get
        assert second.prefetch(tokens)[:2] == (4 * PAGE, 0)
        backend.batch_get_v2 = get
        assert second.prefetch(tokens)[:2] == (0, 0)


def test_pages_of_an_index_go_with_the_pages_that_it_is_of(store: StoreProcess) -> None:
    """Stored and loaded slot by slot with the full pages; a prefix is as long as both of them have it."""
    tokens = list(range(5 * PAGE))
    with hybrid(store.address, 10, indexed=True) as first, hybrid(store.address, 20, indexed=True) as second:
        assert first.backup(tokens, [4, 0, 6, 2, 8], [7, 3]) == 5 * PAGE
        done, windows, pages, window = second.prefetch(tokens)
        assert (done, windows) == (5 * PAGE, WINDOW_PAGES)
        assert same(first, [4, 0, 6, 2, 8], second, pages, PoolName.KV)
        assert same(first, [4, 0, 6, 2, 8], second, pages, PoolName.INDEXER)
        assert same(first, [7, 3], second, window, PoolName.SWA)
        first.backup(tokens[: 3 * PAGE], [4, 0, 6], [0, 6])
        backend = first.controller.storage_backend
        index, hashes = backend._pools["indexer"], first.controller.get_hash_str(tokens, None, page_size=PAGE)
        backend._attachment.store.delete(index.space.id, [name.key for name in index.names(hashes[3:4])])
        assert second.prefetch(tokens)[:2] == (3 * PAGE, WINDOW_PAGES)


def test_upstreams_faults_change_no_byte_of_any_pool(store: StoreProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's own injector fails a tenth of all calls, some pools of a request and not others: what loads is right."""
    monkeypatch.setenv("SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE", "0.1")
    monkeypatch.setenv("SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY", "0.003")
    tokens, whole = list(range(4 * PAGE)), (4 * PAGE, WINDOW_PAGES)
    with hybrid(store.address, 10, indexed=True) as first, hybrid(store.address, 20, indexed=True) as second:
        for _ in range(30):  # a fault of one call leaves a page or a window out
            first.backup(tokens, [0, 1, 2, 3], [2, 3])
        seen = []
        for _ in range(30):
            done, windows, pages, window = second.prefetch(tokens)
            seen.append((done, windows))
            assert same(first, [0, 1, 2, 3][: done // PAGE], second, pages[: done // PAGE], PoolName.KV)
            assert same(first, [0, 1, 2, 3][: done // PAGE], second, pages[: done // PAGE], PoolName.INDEXER)
            assert not windows or same(first, [2, 3], second, window, PoolName.SWA)
            second.release(pages, window)
        assert first.alive()
        assert second.alive()
        assert whole in seen
        assert {*seen} != {whole}


def test_a_pool_that_comes_later_is_served_too(store: StoreProcess) -> None:
    """Such as a draft model's: registered while the backend runs, and with nothing to do but that."""
    with hybrid(store.address, 10) as first:
        first.add(PoolName.DRAFT, mha(heads=1))
        pool, names = first.pools[PoolName.DRAFT], first.controller.get_hash_str([*range(PAGE)], None, page_size=PAGE)
        move = PoolTransfer(PoolName.DRAFT, slots(2), keys=names)
        backend, old = first.controller.storage_backend, page(pool, 2)
        assert backend.batch_set_v2([move]) == {PoolName.DRAFT: [True]}
        wipe(pool)
        assert backend.batch_get_v2([move]) == {PoolName.DRAFT: [True]}
        assert torch.equal(page(pool, 2), old)


def test_what_sglang_clears_is_gone_and_a_backend_can_go_and_come_back(store: StoreProcess) -> None:
    """Its command to clear the storage; then its commands to detach and attach, without the process ending."""
    tokens, whole = list(range(4 * PAGE)), (4 * PAGE, WINDOW_PAGES)
    with hybrid(store.address, 10) as first:
        first.backup(tokens, [0, 1, 2, 3], [2, 3])
        assert first.prefetch(tokens)[:2] == whole
        first.controller.detach_storage_backend()
        first.attach(store.address)
        assert first.prefetch(tokens)[:2] == whole
        assert first.controller.clear_storage_backend() is True
        assert first.prefetch(tokens)[:2] == (0, 0)
        assert first.backup(tokens, [0, 1, 2, 3], [2, 3]) == 4 * PAGE
        assert first.prefetch(tokens)[:2] == whole
