"""What goes wrong between LMCache and the store: refused puts, chunks that are gone or damaged, a silent node."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from kvstore.store import PutOutcome
from tests.engines.lmcache.rig import adapter, chunk, content, empty, found, key, loaded, stored, wait
from tests.support.store_process import StoreProcess
from workers.adapters.lmcache_l2 import RepriseL2


@pytest.fixture
def l2(store: StoreProcess) -> Iterator[RepriseL2]:
    made = adapter(store.address, lookup_deadline_s=2.5, load_deadline_s=2.5)
    yield made
    made.close()


def untouched(objects: list[Any]) -> bool:
    return all(bool(torch.isnan(held.tensor).all()) for held in objects)


def test_a_chunk_that_was_refused_is_taken_when_it_is_offered_again(
    l2: RepriseL2, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fifth of ten does not fit: the task fails and only that chunk is missed, until the task comes again."""
    keys, store = [key(number) for number in range(10)], l2._attachment.store
    put = store.put

    def put_most(space: Any, blocks: Any, **more: Any) -> list[PutOutcome]:
        outcomes = list(put(space, [*blocks[:4], *blocks[5:]], **more))
        return [*outcomes[:4], PutOutcome.REFUSED, *outcomes[4:]]

    monkeypatch.setattr(store, "put", put_most)
    assert not stored(l2, keys).is_successful()
    assert found(l2, keys) == [0, 1, 2, 3, 5, 6, 7, 8, 9]
    monkeypatch.undo()
    assert stored(l2, keys).is_successful()
    assert found(l2, keys) == [*range(10)]


def test_memory_that_is_used_again_right_after_a_store_changes_nothing_stored(l2: RepriseL2) -> None:
    """LMCache frees the object once the task has its answer: what is loaded is what lay there before."""
    held = chunk(content(key(1)))
    assert stored(l2, [key(1)], [held]).is_successful()
    held.tensor.fill_(7.0)
    back = empty()
    assert loaded(l2, [key(1)], [back]) == [0]
    assert torch.equal(back.tensor, content(key(1)))


def test_what_is_gone_when_it_is_loaded_is_not_found_again(store: StoreProcess, l2: RepriseL2) -> None:
    """The look-up said five; one was deleted by another process; its object is left alone, and the next one says so."""
    keys, other = [key(number) for number in range(5)], adapter(store.address)
    stored(l2, keys)
    assert found(l2, keys) == [0, 1, 2, 3, 4]
    other.delete([keys[3]])
    other.close()
    objects = [empty() for _ in keys]
    assert loaded(l2, keys, objects) == [0, 1, 2, 4]
    assert untouched(objects[3:4])
    assert found(l2, keys) == [0, 1, 2, 4]


def test_a_damaged_chunk_is_not_loaded(store: StoreProcess, l2: RepriseL2) -> None:
    """One bit on disk is another: the load of that chunk fails, and it is not found from then on."""
    keys = [key(number, model="damaged") for number in range(5)]
    stored(l2, keys)
    payload = bytes(content(keys[2]).view(torch.uint8).flatten()[:256].tolist())
    store.kill()
    assert store.damage(payload) == 1
    store.begin()
    wait(lambda: len(found(l2, keys)) == 5)
    objects = [empty() for _ in keys]
    assert loaded(l2, keys, objects) == [0, 1, 3, 4]
    assert all(torch.equal(objects[at].tensor, content(keys[at])) for at in (0, 1, 3, 4))
    assert wait(lambda: found(l2, keys) == [0, 1, 3, 4])


def test_a_silent_node_is_a_miss_at_the_deadline(store: StoreProcess, l2: RepriseL2) -> None:
    """It takes no call and closes nothing: each task has its answer all the same; once it goes on, chunks are hits."""
    keys = [key(number) for number in range(3)]
    stored(l2, keys)
    objects = [empty() for _ in keys]
    store.hang()
    try:
        assert found(l2, keys) == []
        assert loaded(l2, keys, objects) == []
        assert untouched(objects)
    finally:
        store.go_on()
    assert wait(lambda: found(l2, keys) == [0, 1, 2])


def test_look_ups_that_nobody_follows_hold_nothing(store: StoreProcess, l2: RepriseL2) -> None:
    """Hundreds of them, half unlocked and none loaded: what they found can be taken away at once, also for others."""
    keys, other = [key(number) for number in range(20)], adapter(store.address)
    stored(l2, keys)
    for number in range(300):
        assert found(l2, keys) == [*range(20)]
        if number % 2:
            l2.submit_unlock(keys)
    other.delete(keys)
    assert found(l2, keys) == found(other, keys) == []
    assert other.get_usage().total_bytes_used == l2.get_usage().total_bytes_used == 0
    other.close()


def test_prefixes_of_every_length_are_hits_for_the_next_process(store: StoreProcess, l2: RepriseL2) -> None:
    """One more chunk a task, up to a thousand tokens: nothing is written that a look-up does not find."""
    keys = [key(number) for number in range(64)]
    other = adapter(store.address)
    for end in range(1, 65):
        assert stored(l2, keys[end - 1 : end]).is_successful()
        assert found(other, keys[:end]) == [*range(end)]
    other.close()
