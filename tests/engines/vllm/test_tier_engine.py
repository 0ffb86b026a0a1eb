"""Whole requests through vLLM's scheduler, connector, manager and our tier; only the copy worker is not vLLM's.

The same engine without a connector says what the answers are: float32 and greedy, so they must be equal to the token.
"""

from __future__ import annotations

import functools
import random
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.config import KVTransferConfig

from kvstore.client import StoreClient
from kvstore.errors import Unavailable
from kvstore.store import GetStatus
from ops.bench.tier_drive import TIER_MODULE
from tests.support.attached_engine import checkpoint
from tests.support.cpu_offloading import CpuTieringSpec
from tests.support.store_process import StoreProcess
from tests.support.vllm_engine import BLOCK_TOKENS, NEW_TOKENS, Answer, Engine, engine
from tests.support.waiting import WAIT_S

HITS = "vllm:external_prefix_cache_hits"

Prompt = list[int]
Models = Callable[[str], str]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """A folder with a tiny checkpoint, by its kind."""
    folder = tmp_path_factory.mktemp("models")
    return functools.cache(lambda kind: checkpoint(kind, folder))


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreProcess]:
    store = StoreProcess(tmp_path_factory.mktemp("node"))
    store.begin()
    yield store
    store.end()


def connector(store: str, *, chunk_tokens: int = BLOCK_TOKENS, **options: Any) -> KVTransferConfig:
    """As an operator would write it, but for the spec that copies without a GPU."""
    tier = {"type": "RepriseTier", "module_path": TIER_MODULE, "store": store, "lookup_deadline_s": 5.0, **options}
    return KVTransferConfig(
        kv_connector="OffloadingConnector",
        kv_role="kv_both",
        kv_connector_extra_config={
            "spec_name": CpuTieringSpec.__name__,
            "spec_module_path": CpuTieringSpec.__module__,
            "cpu_bytes_to_use": 64 << 20,
            "block_size": chunk_tokens,
            "offload_prompt_only": False,
            "secondary_tiers": [tier],
        },
    )


def prompts_of(seed: int, *lengths: int) -> list[Prompt]:
    chosen = random.Random(seed)
    return [[chosen.randrange(4, 260) for _ in range(length)] for length in lengths]


def second_turns(prompts: Sequence[Prompt], answers: Sequence[Answer]) -> list[Prompt]:
    """Each conversation goes on after its answer."""
    return [[*p, *a.tokens, *q] for p, a, q in zip(prompts, answers, prompts_of(9, *[40] * len(prompts)), strict=True)]


def tokens_of(answers: Sequence[Answer]) -> list[tuple[int, ...]]:
    return [answer.tokens for answer in answers]


def whole(tokens: int, chunk: int) -> int:
    return tokens // chunk * chunk


@pytest.mark.parametrize(("kind", "chunk_tokens"), [("llama", 32), ("llama", 64), ("gemma3", 32), ("gptoss", 32)])
def test_a_fresh_engine_goes_on_where_another_was(
    node: StoreProcess, models: Models, kind: str, chunk_tokens: int
) -> None:
    """Run, throw the engine away, start again with empty memory: hits as vLLM counts them, answers equal to the token.

    Full attention and sliding windows; chunks of one block and of two. Answers were stored too; but where windows
    slide, vLLM keeps chunks of them at few places only, so the next turn hits the prompt at least.
    """
    model = models(kind)
    prompts = prompts_of(chunk_tokens, 300, 177, 600)
    with engine(model) as plain:
        cold = plain.answer(prompts)
        later = second_turns(prompts, cold)
        cold_later = plain.answer(later)
    config = connector(node.address, chunk_tokens=chunk_tokens)
    with engine(model, config) as first:
        assert first.answer(prompts) == cold
        assert first.counted(HITS) == 0
    with engine(model, config) as second:
        warm = second.answer(prompts)
        hits = [answer.cached for answer in warm]
        assert hits == [whole(len(prompt) - 1, chunk_tokens) for prompt in prompts]
        assert second.counted(HITS) == sum(hits)
        second.forget()
        warm_later = second.answer(later)
        for answer, prompt in zip(warm_later, prompts, strict=True):
            told = len(prompt) + (NEW_TOKENS if kind == "llama" else 0)
            assert answer.cached >= whole(told - 1, chunk_tokens)
    assert tokens_of(warm) == tokens_of(cold)
    assert tokens_of(warm_later) == tokens_of(cold_later)


@pytest.fixture(scope="module")
def plain_answers(models: Models) -> tuple[list[Prompt], list[tuple[int, ...]]]:
    """Prompts, and what the model says to them."""
    prompts = prompts_of(77, *(100 + 37 * number for number in range(8)))
    with engine(models("llama")) as plain:
        return prompts, tokens_of(plain.answer(prompts))


@pytest.fixture(scope="module")
def attached(
    tmp_path_factory: pytest.TempPathFactory, models: Models, plain_answers: object
) -> Iterator[tuple[Engine, StoreProcess]]:
    """An engine with a node of its own, which tests may kill. A process has one at a time, so the plain one is gone."""
    store = StoreProcess(tmp_path_factory.mktemp("own"))
    store.begin()
    with engine(models("llama"), connector(store.address)) as running:
        yield running, store
    store.end()


Plain = tuple[list[Prompt], list[tuple[int, ...]]]
Attached = tuple[Engine, StoreProcess]


def filled(attached: Attached, prompts: Sequence[Prompt], params: dict[str, str] | None = None) -> Engine:
    """The engine, with all prompts stored and its own memory empty. Waits for a node that was away or is slow."""
    running, _ = attached
    ends_s = time.monotonic() + WAIT_S
    while True:
        running.forget()
        if all(
            answer.cached >= whole(len(p) - 1, BLOCK_TOKENS)
            for answer, p in zip(running.answer(prompts, params=params), prompts, strict=True)
        ):
            running.forget()
            return running
        assert time.monotonic() < ends_s, "the prompts are never stored"
        time.sleep(0.1)


def test_loads_that_fail_change_no_answer(
    attached: Attached, plain_answers: Plain, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five in a hundred blocks do not come, and then a third: what is missing is computed, and nobody waits."""
    prompts, expected = plain_answers
    running = filled(attached, prompts)
    real, chance = StoreClient.get_into, random.Random(5)
    lost, failed = 0.0, 0

    def lossy(self: Any, space: Any, names: Any, buffers: Any, **kwargs: Any) -> Any:
        nonlocal failed
        statuses = real(self, space, names, buffers, **kwargs)
        for at, buffer in enumerate(buffers):
            if chance.random() < lost:
                failed += 1
                buffer[:] = b"\xff" * len(buffer)
                statuses[at] = GetStatus.CORRUPT
        return statuses

    monkeypatch.setattr(StoreClient, "get_into", lossy)
    for share in (0.05, 0.33):
        lost, failed = share, 0
        running.forget()
        answers = running.answer(prompts)
        assert tokens_of(answers) == expected
        assert failed
        assert sum(answer.cached for answer in answers) > 0


def test_a_store_that_hangs_costs_its_deadline_only(
    attached: Attached, plain_answers: Plain, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every look-up is a miss at its deadline; the requests are computed meanwhile, or right after."""
    prompts, expected = plain_answers
    running = filled(attached, prompts)
    real = StoreClient.lookup

    def slow(self: Any, *args: Any, **kwargs: Any) -> Any:
        time.sleep(6.0)
        return real(self, *args, **kwargs)

    monkeypatch.setattr(StoreClient, "lookup", slow)
    assert running.answer(prompts) == [Answer(tokens, 0) for tokens in expected]


def test_a_store_that_refuses_puts_is_read_all_the_same(
    attached: Attached, plain_answers: Plain, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Out of room: what is stored is hit, what is new is not stored, and every answer is right."""
    prompts, expected = plain_answers
    running = filled(attached, prompts)

    def full(*args: Any, **kwargs: Any) -> Any:
        raise Unavailable("no space left on the device")

    monkeypatch.setattr(StoreClient, "put", full)
    new = prompts_of(123, 200, 200)
    running.answer(new)
    running.forget()
    answers = running.answer([*prompts, *new])
    assert tokens_of(answers[:-2]) == expected
    assert all(answer.cached for answer in answers[:-2])
    assert [answer.cached for answer in answers[-2:]] == [0, 0]


def test_a_node_killed_in_mid_run_costs_hits_only(attached: Attached, plain_answers: Plain) -> None:
    """Killed while requests run, then away, then back on its data: right answers throughout, and hits at the end."""
    prompts, expected = plain_answers
    running, store = filled(attached, prompts), attached[1]
    engine_core = running.llm.llm_engine
    assert running.answer(prompts[:1])[0].cached
    running.forget()
    sampling = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
    for number, prompt in enumerate(prompts):
        engine_core.add_request(str(number), {"prompt_token_ids": prompt}, sampling)
    got: dict[str, tuple[int, ...]] = {}
    for step in range(100_000):
        if step == 2:
            store.kill()
        for output in engine_core.step():
            if output.finished:
                got[output.request_id] = tuple(output.outputs[0].token_ids)
        if not engine_core.has_unfinished_requests():
            break
    assert [got[str(number)] for number in range(len(prompts))] == expected
    running.forget()
    assert running.answer(prompts) == [Answer(tokens, 0) for tokens in expected]
    store.begin()
    assert tokens_of(filled(attached, prompts).answer(prompts)) == expected


def test_tenants_of_one_engine_are_apart(attached: Attached, plain_answers: Plain) -> None:
    """By what the request says of itself; vLLM's own caches know no tenants, so they are emptied in between."""
    prompts, expected = plain_answers[0][:2], plain_answers[1][:2]
    running = attached[0]
    for tenant in ("alice", "bob"):
        params = {"reprise_tenant": tenant}
        running.forget()
        assert running.answer(prompts, params=params) == [Answer(tokens, 0) for tokens in expected]
        assert tokens_of(filled(attached, prompts, params).answer(prompts, params=params)) == expected
    running.forget()
    assert tokens_of(running.answer(prompts)) == expected
