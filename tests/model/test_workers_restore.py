"""Restoring on real architectures: tiny Llama-, Gemma-3- and gpt-oss-shaped checkpoints in fp32, through a store."""

from __future__ import annotations

import functools
import random
from typing import Any

import pytest

from kvstore.testing import MemoryStore
from tests.support.checkpoints import checkpoint, make_checkpoint
from tests.support.faulty_store import FaultyStore, forget_states
from tests.support.worker_bench import Bench
from workers.batch import Slice
from workers.layout import KvMemory
from workers.model import Model
from workers.protocol import Sampling
from workers.sampling import choose
from workers.slots import Slots

KINDS = ["llama", "gemma3", "gptoss"]
TOKENS = random.Random(7).choices(range(4, 260), k=1200)
LENGTHS = 1025


@functools.cache
def model_of(kind: str) -> Model:
    return Model.load(checkpoint(kind), threads=1)


def bench(store: Any, model: Model, **options: Any) -> Bench:
    return Bench(store, model, lambda geometry, slots: KvMemory(geometry, slots, geometry.dtype), choose, **options)


@functools.cache
def first_tokens(kind: str) -> list[int]:
    """The greedy token after every prefix of TOKENS, by one cold forward."""
    model = model_of(kind)
    slots = Slots(-(-LENGTHS // 16), 16)
    memory, table = KvMemory(model.geometry, slots, "float32"), slots.allocate(LENGTHS)
    rows = model.forward(memory, [Slice(TOKENS[:LENGTHS], 0, table, logits="all")])
    return [choose(row, Sampling(), 0) for row in rows]


@pytest.mark.parametrize("kind", KINDS)
def test_every_prompt_length_hits_and_gives_the_cold_token(kind: str) -> None:
    """Lengths 1..1025 on one growing prefix: hit + miss == prompt, the hit is all but one token once a length was seen,
    the token is the one of a cold forward; every 9th time states are lost and blocks with an exact replay must do."""
    store, expected = MemoryStore(state_ttl_s=1e9), first_tokens(kind)
    model = model_of(kind)
    ways = set()
    with bench(store, model, fidelity="exact", chunk_tokens=256) as worker:
        for length in range(1, LENGTHS + 1):
            lost = length % 9 == 0
            if lost:
                forget_states(store)
            answer = worker.prefill(TOKENS[:length])
            reuse = answer.reuse
            ways.add(reuse.way)
            assert reuse.hit_tokens + reuse.miss_tokens == reuse.prompt_tokens == length
            assert answer.first.token == expected[length - 1], (length, reuse)
            assert reuse.exact
            if not lost and length > 1:
                assert reuse.hit_tokens == length - 1
            elif length - 16 > model.geometry.exact_replay_tokens:
                assert reuse.hit_tokens >= (length - 1) // 16 * 16
    assert ways >= {"cold", "state", "exact_replay" if model.geometry.window else "blocks"}


@pytest.mark.parametrize("kind", KINDS)
def test_cached_answers_equal_answers_without_a_cache(kind: str) -> None:
    """Prefill and decode, cold, resent aligned and unaligned, on another worker, after states are lost."""
    store = MemoryStore(state_ttl_s=1e9)
    with bench(store, model_of(kind), fidelity="exact") as one, bench(store, model_of(kind), fidelity="exact") as other:
        for length in (160, 171):
            prompt = TOKENS[200 : 200 + length]
            expected = one.answer(prompt, 24, cache=False)
            assert one.answer(prompt, 24) == expected
            resent = one.prefill(prompt)
            assert (resent.reuse.hit_tokens, resent.first.token) == (length - 1, expected[0])
            assert other.answer(prompt, 24) == expected
            forget_states(store)
            replayed = other.prefill(prompt)
            assert replayed.first.token == expected[0]
            # The answer's own tokens were persisted too: a second turn begins where the first one ended.
            turn = [*prompt, *expected, *TOKENS[900:907]]
            assert one.answer(turn, 8) == one.answer(turn, 8, cache=False)


@pytest.mark.parametrize("kind", ["gemma3", "gptoss"])
def test_bounded_replay_is_reported_as_approximate(kind: str) -> None:
    """One window instead of the exact length: served, flagged, and never mixed into exact answers."""
    store = MemoryStore(state_ttl_s=1e9)
    model = model_of(kind)
    prompt = TOKENS[:300]
    with bench(store, model) as worker:
        expected = worker.answer(prompt, 6, cache=False)
        worker.prefill(TOKENS[:250])
        forget_states(store)
        bounded = worker.prefill(prompt)
        assert (bounded.reuse.way, bounded.reuse.exact) == ("replay", False)
        assert bounded.reuse.replayed_tokens == model.geometry.window
        exact = worker.prefill(prompt, fidelity="exact")
        assert exact.reuse.exact
        assert exact.tokens == expected[:1]
        assert worker.answer(prompt, 6, fidelity="exact") == expected


@pytest.mark.parametrize("kind", KINDS)
def test_every_third_get_fails_and_the_answers_are_the_same(kind: str) -> None:
    """What could not be loaded is computed; the account says what was loaded."""
    faulty, expected = FaultyStore(MemoryStore(state_ttl_s=1e9)), first_tokens(kind)
    faulty.fail_get = lambda number: number % 3 == 0
    with bench(faulty, model_of(kind), fidelity="exact") as worker:
        for length in range(33, 400, 41):
            answer = worker.prefill(TOKENS[:length])
            assert answer.first.token == expected[length - 1]
            assert answer.reuse.hit_tokens < 3 * 16 + 16


@pytest.mark.parametrize("kind", KINDS)
def test_batched_sequences_do_not_see_each_other(kind: str) -> None:
    """Several conversations decoded together give the tokens that each gives alone."""
    prompts = [TOKENS[begin : begin + 30 + begin // 10] for begin in range(0, 500, 100)]
    with bench(MemoryStore(), model_of(kind)) as worker:
        alone = [worker.answer(prompt, 10, cache=False) for prompt in prompts]
        started = [
            worker.start_decode([*prompt, first], len(prompt), 9, cache=False)[1]
            for prompt, (first, *_) in zip(prompts, alone, strict=True)
        ]
        worker.settle()
        assert [answer.tokens for answer in started] == [tokens[1:] for tokens in alone]


@pytest.mark.parametrize("kind", KINDS)
def test_seeded_sampling_continues_on_another_worker(kind: str) -> None:
    """Token i depends on the seed and i only: cut anywhere, another worker draws the same rest."""
    store, prompt = MemoryStore(state_ttl_s=1e9), TOKENS[300:390]
    sampling = Sampling(temperature=0.9, top_p=0.9, seed=1234)
    with bench(store, model_of(kind), fidelity="exact") as one, bench(store, model_of(kind), fidelity="exact") as other:
        whole = one.answer(prompt, 30, sampling=sampling)
        rest = other.decode([*prompt, *whole[:13]], len(prompt), 17, sampling=sampling)
        assert rest.tokens == whole[13:]


def test_other_weights_and_another_dtype_read_nothing(tmp_path: Any) -> None:
    """The same config with other weights, or the same weights in bf16: no block of the first is ever a hit."""
    store = MemoryStore(state_ttl_s=1e9)
    with bench(store, model_of("gemma3")) as worker:
        worker.prefill(TOKENS[:200])
    others = (
        Model.load(make_checkpoint("gemma3", tmp_path / "other", seed=1), threads=1),
        Model.load(checkpoint("gemma3"), dtype="bfloat16", threads=1),
    )
    for model in others:
        with bench(store, model) as worker:
            answer = worker.prefill(TOKENS[:200])
            assert (answer.reuse.hit_tokens, answer.reuse.reason) == (0, "never")
