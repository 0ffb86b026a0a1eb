"""SGLang's cache controller with the backend behind it: its threads back up and prefetch, on a CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.engines.sglang.rig import PAGE, PAGES, driven, fill, host, mha, mla, page, wipe
from tests.support.store_process import StoreProcess


@pytest.mark.parametrize("device", [mha, mla])
def test_a_prefix_comes_back_after_everything_was_killed(store: StoreProcess, device: Any) -> None:
    """Backed up by one controller, prefetched by the next one after the node was killed, byte for byte."""
    first_pool, tokens = host(device()), list(range(6 * PAGE))
    fill(first_pool, 1)
    with driven(store.address, device(), first_pool) as first:
        assert first.prefetch(tokens) == (0, None)
        assert first.backup(tokens, [3, 1, 4, 2, 8, 5]) == 6 * PAGE
    store.kill()
    store.begin()
    second_pool = host(device())
    with driven(store.address, device(), second_pool) as second:
        done, indices = second.prefetch([*tokens, *range(900, 900 + PAGE)])
        assert done == 6 * PAGE
        assert indices is not None
        loaded = [int(indices[at]) // PAGE for at in range(0, len(indices), PAGE)]
        assert all(
            torch.equal(page(second_pool, new), page(first_pool, old))
            for new, old in zip(loaded, [3, 1, 4, 2, 8, 5], strict=True)
        )
        assert second.prefetch([1, *tokens[1:]]) == (0, None)


def test_a_node_that_dies_costs_hits_and_no_thread(store: StoreProcess) -> None:
    """Look-ups, loads and backups fail in time while it is gone; then the same threads find its pages again."""
    device, pool, tokens = mha(), host(mha()), list(range(4 * PAGE))
    fill(pool, 1)
    with driven(store.address, device, pool) as engine:
        assert engine.backup(tokens, [0, 1, 2, 3]) == 4 * PAGE
        store.kill()
        assert engine.prefetch(tokens) == (0, None)
        assert engine.backup(list(range(500, 500 + PAGE)), [6]) == 0
        assert engine.alive()
        store.begin()
        for _ in range(200):
            done, _ = engine.prefetch(tokens)
            if done:
                break
        assert done == 4 * PAGE
        assert engine.alive()


def test_a_load_that_breaks_off_ends_the_prefix_there(store: StoreProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found, but gone before it was read: the pages in front of it are used, and what follows is computed."""
    pool, tokens = host(mha()), list(range(5 * PAGE))
    fill(pool, 1)
    with driven(store.address, mha(), pool) as engine:
        engine.backup(tokens, [0, 1, 2, 3, 4])
        backend = engine.controller.storage_backend
        kv = backend._pools["kv"]
        exists = backend.batch_exists

        def found_then_lost(keys: list[str], extra_info: Any = None) -> int:
            count = exists(keys, extra_info)
            backend._attachment.store.delete(kv.space.id, [kv.names([keys[3]])[0].key])
            return int(count)

        monkeypatch.setattr(backend, "batch_exists", found_then_lost)
        assert engine.prefetch(tokens)[0] == 3 * PAGE


def test_upstreams_faults_change_no_byte(store: StoreProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's own injector fails a fifth of all calls and delays the rest: whatever is loaded is right."""
    monkeypatch.setenv("SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE", "0.2")
    monkeypatch.setenv("SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY", "0.003")
    first_pool, pool = host(mha()), host(mha())
    fill(first_pool, 5)
    prefixes = [list(range(1000 * at, 1000 * at + 4 * PAGE)) for at in range(5)]
    with driven(store.address, mha(), first_pool) as first, driven(store.address, mha(), pool) as second:
        for at, tokens in enumerate(prefixes):
            while first.backup(tokens, range(4 * at, 4 * at + 4)) < 4 * PAGE:
                pass
        hits = []
        for _ in range(4):
            for at, tokens in enumerate(prefixes):
                wipe(pool)
                done, indices = second.prefetch(tokens)
                for number in range(done // PAGE):
                    assert indices is not None
                    mine = int(indices[number * PAGE]) // PAGE
                    assert torch.equal(page(pool, mine), page(first_pool, 4 * at + number))
                if indices is not None:
                    pool.free(indices)
                hits.append(done)
        assert first.alive()
        assert second.alive()
        assert 4 * PAGE in hits
        assert 0 in hits
        assert pool.available_size() == PAGES * PAGE + PAGE
