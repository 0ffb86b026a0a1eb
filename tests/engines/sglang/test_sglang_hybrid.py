"""SGLang's controller of hybrid models with the backend behind it: KV and sliding-window pages, interface v2."""

from __future__ import annotations

from typing import Any

from tests.engines.sglang.hybrid import WINDOW_PAGES, hybrid, same
from tests.engines.sglang.rig import PAGE
from tests.support.store_process import StoreProcess

from sglang.srt.mem_cache.hicache_storage import PoolName  # isort: skip


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
