"""The engine where memory runs short, keys collide or blocks are stored late: what is stored and counted stays true."""

from __future__ import annotations

import random
from typing import Any

import pytest
from blake3 import blake3

from kvstore import keys
from kvstore.testing import MemoryStore
from tests.support.fake_model import FakeModel, fake_choose, fake_memory
from tests.support.faulty_store import FaultyStore, forget_states
from tests.support.waiting import WAIT_S
from tests.support.worker_bench import Bench

HYBRID = FakeModel("ssgsg", window=8)
TOKENS = random.Random(7).choices(range(1000), k=1200)


def bench(store: Any, model: FakeModel = HYBRID, **options: Any) -> Bench:
    return Bench(store, model, fake_memory, fake_choose, **options)


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore(state_ttl_s=1e9)


def test_slots_used_again_while_their_blocks_wait_for_the_store(store: MemoryStore) -> None:
    """A prompt ends while none of its blocks is stored yet, and others overwrite its slots: what is stored in the end
    is what was computed for it, block for block."""
    faulty = FaultyStore(store)
    with bench(faulty, pages=10, settle_deadline_s=0.05, fidelity="exact") as worker:
        faulty.gate.clear()
        for begin in range(0, 750, 150):
            worker.prefill(TOKENS[begin : begin + 144])
        faulty.gate.set()
        assert worker.publisher.close(WAIT_S)
    with bench(store, pages=10, fidelity="exact") as reader:
        for begin in range(0, 750, 150):
            again = reader.prefill(TOKENS[begin : begin + 145])
            assert again.reuse.hit_tokens == 144
            assert again.tokens == HYBRID.expected(TOKENS[begin : begin + 145], 1)


def test_a_prompt_that_gave_way_does_not_hit_what_it_computed_itself(store: MemoryStore) -> None:
    """Preempted in the middle of its prefill, it finds its own blocks when it comes back: they are no reuse."""
    prompt, other = TOKENS[:400], TOKENS[600:646]
    with bench(store, pages=29, chunk_tokens=24, fidelity="exact", fetch_inline=True) as worker:
        first = HYBRID.expected(other, 1)[0]
        decode = worker.start_decode([*other, first], 46, 60)[1]
        while not decode.tokens:
            worker.engine.step()
            worker.engine.wait(0.01)
        prefill = worker.start_prefill(prompt)[1]
        worker.settle()
        assert worker.engine.counts.preemptions > 0
        assert [first, *decode.tokens] == HYBRID.expected(other, 61)
        assert prefill.tokens == HYBRID.expected(prompt, 1)
        assert (prefill.reuse.hit_tokens, prefill.reuse.miss_tokens) == (0, 400)


@pytest.mark.parametrize("kinds", ["ssgsg", "ggg"])
def test_keys_that_collide_never_change_an_answer(monkeypatch: pytest.MonkeyPatch, kinds: str) -> None:
    """With block keys of 8 bits nearly every prompt meets another's blocks: token digests make each of them a miss."""

    def short(data: bytes, **options: Any) -> Any:
        whole = blake3(data, **options)
        return blake3(whole.digest()[:1]) if options.get("key") == keys._BLOCK else whole

    monkeypatch.setattr(keys, "blake3", short)
    store, model, drawn = MemoryStore(state_ttl_s=1e9), FakeModel(kinds, window=8), random.Random(5)
    with bench(store, model, fidelity="exact") as worker:
        for turn in range(60):
            prompt = [turn, *drawn.choices(range(1000), k=drawn.randrange(160, 260))]
            for length in (len(prompt) - 20, len(prompt)):
                answer = worker.prefill(prompt[:length])
                assert answer.tokens == model.expected(prompt[:length], 1)
    assert len(store._blocks) <= 256
    assert worker.publisher.counts.blocks_failed > 100


@pytest.mark.parametrize("window", [15, 16, 17, 32])
@pytest.mark.parametrize("lost", ["nothing", "states", "middle", "last"])
def test_windows_of_any_width_beside_blocks_survive_every_loss(store: MemoryStore, window: int, lost: str) -> None:
    """A hit of 64 tokens of whose window a part was never stored, or is gone, is a shorter hit and no fault."""
    model = FakeModel("sgsg", window)
    with bench(store, model, fidelity="exact") as worker:
        worker.prefill(TOKENS[:64])
        if lost != "nothing":
            forget_states(store)
        chain = sorted(store._blocks.values(), key=lambda block: block.name.index)
        gone = {"middle": chain[1:2], "last": chain[3:]}.get(lost, [])
        for block in gone:
            store.delete(block.space_id, [block.name.key])
        for length in (64, 65, 80, 97):
            answer = worker.prefill(TOKENS[:length])
            assert answer.tokens == model.expected(TOKENS[:length], 1)
            assert answer.reuse.hit_tokens + answer.reuse.miss_tokens == length
            assert answer.reuse.exact
