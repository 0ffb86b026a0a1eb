"""The connector in a real vLLM on a CPU, float32: what is stored comes back, and nothing changes an answer."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from transformers import AutoConfig
from vllm import SamplingParams
from vllm.distributed.kv_transfer import get_kv_transfer_group

from kvstore.client import StoreClient
from kvstore.keys import TokenChain, tenant_salt
from kvstore.store import BlockPut, GetStatus
from kvstore.traffic import AGENT
from tests.support.attached_engine import (
    ANSWER_TOKENS,
    BLOCK_TOKENS,
    SHAPES,
    Engine,
    answers,
    asks,
    checkpoint,
    connector,
    engine,
    options_of,
    prompt,
)
from tests.support.store_process import ROOT, StoreProcess
from tests.support.waiting import WAIT_S
from workers.adapters.vllm_moving import Moving
from workers.adapters.vllm_scheduling import Scheduling
from workers.geometry import Geometry, make_space
from workers.publish import Publisher
from workers.weights import weights_digest

LENGTHS = (1, 31, 32, 33, 63, 64, 65, 97, 200, 320)
PROMPTS = [prompt(length, seed) for seed, length in enumerate(LENGTHS)]
SETTLE_S = WAIT_S


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("models")
    return {kind: checkpoint(kind, folder) for kind in SHAPES}


@pytest.fixture(scope="module")
def store() -> Iterator[StoreProcess]:
    with tempfile.TemporaryDirectory(prefix="kv") as folder:
        node = StoreProcess(Path(folder))
        node.begin()
        yield node
        node.end()


@dataclass(frozen=True)
class Pair:
    """What an engine without a connector answers, and an attached one whose own prefix cache is off, so that whatever
    it does not compute comes from the store.
    """

    kind: str
    expected: list[list[int]]
    attached: Engine
    log: Path

    def ask(self, **params: str) -> list[dict[str, Any]]:
        """All prompts; the answers are the expected ones, whatever else happens."""
        results = asks(self.attached, PROMPTS, params)
        assert answers(results) == self.expected
        wait_for_puts()
        return results


@pytest.fixture(
    scope="module",
    params=[("llama", True), ("gemma3", True), ("gptoss", False)],
    ids=["full attention", "windows are kept", "windows in memory"],
)
def pair(
    request: pytest.FixtureRequest,
    models: dict[str, str],
    store: StoreProcess,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Pair]:
    kind, keep = request.param
    log = tmp_path_factory.mktemp("log") / "access.jsonl"
    options = {"keep_windows": keep, "access_log": str(log)}
    with engine(models[kind], None) as plain:
        expected = answers(asks(plain, PROMPTS))
    with engine(models[kind], connector(store.address, **options), enable_prefix_caching=False) as attached:
        yield Pair(kind, expected, attached, log)


def wait_for_puts() -> None:
    """Until everything that the engine in this process copied out is put."""
    moving, until_s = get_kv_transfer_group().moving, time.monotonic() + SETTLE_S
    while moving._copied_bytes or moving._attached.publisher.queue_bytes:
        assert time.monotonic() < until_s
        time.sleep(0.01)


def external(results: Sequence[dict[str, Any]]) -> list[int]:
    return [result["external"] for result in results]


def hits_of(kind: str) -> list[int]:
    """What vLLM can take from a store: whole blocks, and where windows slide, the last token has to be computed."""
    return [(length - (kind != "llama")) // BLOCK_TOKENS * BLOCK_TOKENS for length in LENGTHS]


@pytest.mark.parametrize("kind", SHAPES)
def test_a_fresh_engine_goes_on_where_another_stopped(kind: str, models: dict[str, str], store: StoreProcess) -> None:
    """After an engine is gone, prompts of every length and the next turn of a conversation hit what can be hit, as
    vLLM counts it, and the answers are those of an engine without a connector, token for token.
    """
    attached = connector(store.address, tenant="restarts")
    with engine(models[kind], None) as plain:
        expected = asks(plain, PROMPTS)
        talk = PROMPTS[-1] + expected[-1]["tokens"] + prompt(50, 99)
        expected_talk = asks(plain, [talk])
    with engine(models[kind], attached) as first:
        cold = asks(first, PROMPTS)
    with engine(models[kind], attached) as second:
        warm, warm_talk = asks(second, PROMPTS), asks(second, [talk])
    assert answers(cold) == answers(warm) == answers(expected)
    assert external(cold) == [0] * len(PROMPTS)
    assert external(warm) == hits_of(kind)
    assert answers(warm_talk) == answers(expected_talk)
    assert warm_talk[0]["hit"] == (LENGTHS[-1] + ANSWER_TOKENS - 1) // BLOCK_TOKENS * BLOCK_TOKENS


def test_two_processes_share_a_store(models: dict[str, str], store: StoreProcess) -> None:
    """What one engine computed, another that runs beside it does not compute again."""
    attached = connector(store.address, tenant="henry")
    with child(options_of(models["llama"]), attached) as other:
        told = line_of(other, {"op": "ask", "tokens": PROMPTS[-1], "answer": ANSWER_TOKENS})
        with engine(models["llama"], attached) as mine:
            found = mine.ask(PROMPTS[-1], ANSWER_TOKENS)
    assert (told["external"], found["external"]) == (0, hits_of("llama")[-1])
    assert found["tokens"] == told["tokens"]


def test_ranks_in_processes_of_their_own_load_what_they_saved(models: dict[str, str], store: StoreProcess) -> None:
    """A model that is split over two processes, with a third for the scheduler: each rank has its own part back."""
    options = options_of(models["gemma3"], tensor_parallel_size=2, enable_prefix_caching=False)
    environment = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_CPU_OMP_THREADS_BIND": "0|1"}
    asked = {"op": "ask", "tokens": PROMPTS[-1], "answer": ANSWER_TOKENS}
    with child(options, connector(store.address, tenant="ranks"), environment) as split:
        told = line_of(split, asked)
        until_s = time.monotonic() + SETTLE_S
        while (found := line_of(split, asked))["external"] < hits_of("gemma3")[-1]:  # until both ranks have put all
            assert time.monotonic() < until_s
    assert (told["external"], found["external"]) == (0, hits_of("gemma3")[-1])
    assert found["tokens"] == told["tokens"]
    client = StoreClient.connect([store.address])
    spaces = [space for space in client.spaces().values() if space.tenant_salt == tenant_salt("ranks")]
    client.close()
    assert sorted((space.shard.tensor_rank, space.shard.tensor_size) for space in spaces) == [(0, 2), (1, 2)]


@contextlib.contextmanager
def child(
    options: dict[str, Any], attached: dict[str, Any], environment: Mapping[str, str] = MappingProxyType({})
) -> Iterator[subprocess.Popen[bytes]]:
    """An engine in another process, which takes lines; ended with all the processes that it started."""
    process = subprocess.Popen(
        [sys.executable, "-m", "ops.bench.attach_engine"],
        cwd=ROOT,
        env={**os.environ, **environment},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        assert "ready_s" in line_of(process, {"options": options, "connector": attached})
        yield process
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate(timeout=SETTLE_S)


def line_of(process: subprocess.Popen[bytes], command: dict[str, Any]) -> dict[str, Any]:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(json.dumps(command).encode() + b"\n")
    process.stdin.flush()
    answer: dict[str, Any] = json.loads(process.stdout.readline())
    return answer


def test_a_store_that_hangs_holds_up_nobody(models: dict[str, str]) -> None:
    """While a look-up waits for a node that is silent, other requests run; at its deadline it is a miss."""
    with tempfile.TemporaryDirectory(prefix="kv") as folder, socket.socket(socket.AF_UNIX) as silent:
        silent.bind(f"{folder}/s")
        silent.listen(64)
        with engine(models["llama"], connector(f"unix:{folder}/s", lookup_deadline_s=3.0)) as attached:
            alone = answers(asks(attached, [PROMPTS[-1]], {"reprise_cache": "off"}))
            first_seen = run_together(attached, {"waits": {}, "runs": {"reprise_cache": "off"}}, PROMPTS[-1])
            assert list(first_seen) == ["runs", "waits"]
            assert list(first_seen.values()) == alone * 2


def run_together(one: Engine, requests: dict[str, dict[str, str]], tokens: list[int]) -> dict[str, list[int]]:
    """Answers of requests for one prompt, in the order in which they ended."""
    for name, params in requests.items():
        sampling = SamplingParams(
            temperature=0.0, max_tokens=ANSWER_TOKENS, ignore_eos=True, extra_args={"kv_transfer_params": params}
        )
        one._engine.add_request(name, {"prompt_token_ids": tokens}, sampling)
    ended: dict[str, list[int]] = {}
    while one._engine.has_unfinished_requests():
        for output in one._engine.step():
            if output.finished:
                ended[output.request_id] = list(output.outputs[0].token_ids)
    return ended


def test_pressure_sheds_puts_and_not_reads(
    models: dict[str, str], store: StoreProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While puts are stuck, copies beyond the bound are not made, what is stored is loaded, and answers stay."""
    gate, put = threading.Event(), Publisher._put

    def put_behind_gate(publisher: Publisher, batch: Any) -> Any:
        gate.wait(SETTLE_S)
        return put(publisher, batch)

    monkeypatch.setattr(Publisher, "_put", put_behind_gate)
    attached = connector(store.address, tenant="kate", queue_bytes="1MiB")
    with engine(models["llama"], attached, enable_prefix_caching=False) as one:
        cold = asks(one, PROMPTS)
        assert get_kv_transfer_group().moving._copies_shed > 0
        gate.set()
        wait_for_puts()
        asks(one, PROMPTS)  # offers again what was shed
        wait_for_puts()
        gate.clear()
        asks(one, [prompt(640, seed) for seed in (61, 62)])  # fills the queue
        warm = asks(one, PROMPTS)
        gate.set()
    assert external(warm) == hits_of("llama")
    assert answers(warm) == answers(cold)


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_small_steps_and_little_memory_change_no_answer(kind: str, models: dict[str, str], store: StoreProcess) -> None:
    """Prompts that are computed in steps which end within blocks, and requests that lose their pages to others and
    begin anew: all are answered as by an engine with room, and hit the store afterwards, with what was answered.
    """
    long = [prompt(300 + 7 * seed, 80 + seed) for seed in range(5)]
    with engine(models[kind], None) as plain:
        expected = generated(plain, long, {})
    pages = 40 if kind == "llama" else 72
    tight = {"max_num_batched_tokens": 100, "max_num_seqs": 8, "max_model_len": 1024, "num_gpu_blocks_override": pages}
    with engine(models[kind], connector(store.address), enable_prefix_caching=False, **tight) as attached:
        found = [generated(attached, long, {"reprise_tenant": f"liam-{kind}"}) for _ in range(2)]
        counted = {metric.name: metric.value for metric in attached._llm.get_metrics() if hasattr(metric, "value")}
        again = asks(attached, long, {"reprise_tenant": f"liam-{kind}"})
        talk = asks(attached, [long[0] + expected[0]], {"reprise_tenant": f"liam-{kind}"})
    assert counted["vllm:num_preemptions"] > 0
    assert found[0] == found[1] == expected
    assert external(again) == [(len(tokens) - (kind != "llama")) // BLOCK_TOKENS * BLOCK_TOKENS for tokens in long]
    assert external(talk)[0] > len(long[0])  # answers are stored too


def generated(one: Engine, prompts: Sequence[list[int]], params: dict[str, str]) -> list[list[int]]:
    """Long answers of requests that run together."""
    sampling = SamplingParams(
        temperature=0.0, max_tokens=120, ignore_eos=True, extra_args={"kv_transfer_params": params}
    )
    outputs = one._llm.generate([{"prompt_token_ids": tokens} for tokens in prompts], sampling, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda given: given.pop("kv_load_failure_policy"), "kv_load_failure_policy: write"),
        (lambda given: given["kv_connector_extra_config"].pop("store"), "store: name at least one node"),
    ],
    ids=["policy", "store"],
)
def test_a_configuration_that_cannot_work_is_refused(
    change: Callable[[dict[str, Any]], Any], told: str, models: dict[str, str]
) -> None:
    """vLLM does not start, and the message says what to write."""
    given = connector("unix:/nowhere")
    change(given)
    with pytest.raises(Exception, match=told), engine(models["llama"], given):
        pass


# The fixture holds an engine while these run, and vLLM has one connector a process: others come before.


def test_tenants_share_nothing_and_a_request_can_stay_out(pair: Pair) -> None:
    """The tenant that a request names has its own blocks; one that is not to be cached, or whose wishes cannot be read,
    neither finds nor leaves any.
    """
    assert external(pair.ask(reprise_tenant="alice")) == [0] * len(PROMPTS)
    assert external(pair.ask(reprise_tenant="alice")) == hits_of(pair.kind)
    assert external(pair.ask(reprise_tenant="bob", reprise_cache="off")) == [0] * len(PROMPTS)
    assert external(pair.ask(reprise_tenant="bob", reprise_class="unheard")) == [0] * len(PROMPTS)
    assert external(pair.ask(reprise_tenant="bob")) == [0] * len(PROMPTS)


def test_blocks_are_kept_under_the_class_and_tenant_of_the_request(pair: Pair, store: StoreProcess) -> None:
    """The store's own scan shows the class that the request named, in a space that carries its tenant's salt."""
    pair.ask(reprise_tenant="carol", reprise_class="agent")
    client = StoreClient.connect([store.address])
    try:
        spaces = client.spaces()
        mine = [name for name, space in spaces.items() if space.tenant_salt == tenant_salt("carol")]
        blocks = list(itertools.chain.from_iterable(client.scan(name)[0] for name in mine))
        assert blocks
        assert all(set(block.touches) == {AGENT} for block in blocks)
        assert all(spaces[name].block_tokens == BLOCK_TOKENS and "float32" in spaces[name].kv_dtype for name in mine)
    finally:
        client.close()


def test_a_miss_is_explained_and_our_own_workers_blocks_are_not_taken(
    pair: Pair, models: dict[str, str], store: StoreProcess
) -> None:
    """Blocks of the same tokens and model from our own worker lie in another space: vLLM does not load them, and
    ``explain`` names the fields that differ. A prompt that was reused as far as can be has nothing to explain.
    """
    model, tokens = Path(models[pair.kind]), prompt(4 * BLOCK_TOKENS + 1, 70 + list(SHAPES).index(pair.kind))
    geometry = Geometry.from_config(AutoConfig.from_pretrained(model), "float32")
    digest = weights_digest(model)
    mine = make_space(geometry, model=model.name, weights_digest=digest, block_tokens=BLOCK_TOKENS, tenant="jack")
    client = StoreClient.connect([store.address])
    space = client.register_space(mine)
    names = TokenChain(space, BLOCK_TOKENS, tokens).names
    client.put(space, [BlockPut(name, BLOCK_TOKENS, b"ours") for name in names], traffic_class=AGENT)
    client.close()
    results, told = [], []
    for _ in range(2):
        results += asks(pair.attached, [tokens], {"reprise_tenant": "jack"})
        wait_for_puts()
        told.append(explained(str(pair.attached._asked), pair.log, store))
    assert external(results) == [0, 4 * BLOCK_TOKENS]
    assert [row["cause"] for row in told] == ["another_space", "none"]
    differing = {field for other in told[0]["other_spaces"] for field in other["fields"]}
    assert {"layout", "kv_dtype"} <= differing
    assert not differing & {"model", "weights_digest", "tenant_salt", "block_tokens", "groups"}


def explained(request_id: str, log: Path, store: StoreProcess) -> dict[str, Any]:
    """What ``reprise store explain`` says, once the log has the request."""
    command = [os.environ["REPRISE"], "store", "explain", request_id, "--log", str(log), "--store", store.address]
    until_s = time.monotonic() + SETTLE_S
    while not log.exists() or json.dumps(request_id) not in log.read_text():
        assert time.monotonic() < until_s
        time.sleep(0.01)
    done = subprocess.run([*command, "--json"], capture_output=True, text=True, timeout=WAIT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(done.stdout)
    return dict(rows[-1] if isinstance(rows, list) else rows)


def test_loads_that_fail_change_no_answer(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one block in twenty failing, every request is answered, and as if nothing were stored."""
    pair.ask(reprise_tenant="dave")
    draw, failed, get_into = random.Random(5), [], StoreClient.get_into

    def fail_some(client: StoreClient, space: Any, names: Any, buffers: Any, **options: Any) -> list[GetStatus]:
        statuses = get_into(client, space, names, buffers, **options)
        for at, buffer in enumerate(buffers):
            if draw.random() < 0.05:
                buffer[:] = b"\xff" * len(buffer)  # what failed must not be read
                statuses[at] = GetStatus.MISS
                failed.append(at)
        return statuses

    monkeypatch.setattr(StoreClient, "get_into", fail_some)
    hits = [sum(external(pair.ask(reprise_tenant="dave"))) for _ in range(6)]
    assert failed
    assert 0 < sum(hits) <= 6 * sum(hits_of(pair.kind))


def test_vllms_metrics_tell_what_the_connector_did(pair: Pair) -> None:
    """Beside vLLM's own counters of external hits: look-ups, loads and puts, and what of them failed."""
    pair.ask(reprise_tenant="irene")
    until_s = time.monotonic() + SETTLE_S
    wanted = {f"vllm:reprise_{name}" for name in ("lookups", "found", "loaded", "loaded_bytes", "blocks_acknowledged")}
    while True:
        pair.ask(reprise_tenant="irene")
        counted = {metric.name: metric.value for metric in pair.attached._llm.get_metrics() if metric.name in wanted}
        if counted.keys() == wanted and all(counted.values()):
            break
        assert time.monotonic() < until_s


def test_windows_that_are_gone_are_no_hit(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model with sliding windows computes the whole prompt where the window is not there, though the blocks are."""
    pair.ask(reprise_tenant="erin")
    monkeypatch.setattr(Moving, "_load_state", lambda *args: False)
    pair.ask(reprise_tenant="erin")  # found by the look-up, and gone when they are loaded
    find_rank = Scheduling._find_rank
    monkeypatch.setattr(
        Scheduling,
        "_find_rank",
        lambda half, *args: (
            replace(found, states=frozenset(), kept=frozenset()) if (found := find_rank(half, *args)) else None
        ),
    )
    expected = hits_of(pair.kind) if pair.kind == "llama" else [0] * len(PROMPTS)
    assert external(pair.ask(reprise_tenant="erin")) == expected


def test_a_store_that_is_killed_and_comes_back_changes_no_answer(pair: Pair, store: StoreProcess) -> None:
    """While it is down everything is computed; when it is back, what it kept are hits again. Windows that were only in
    its memory are not, and are saved again.
    """
    pair.ask(reprise_tenant="frank")
    store.kill()
    assert external(pair.ask(reprise_tenant="frank")) == [0] * len(PROMPTS)
    store.begin()
    until_s = time.monotonic() + SETTLE_S
    while external(pair.ask(reprise_tenant="pilot")) != hits_of(pair.kind):  # until the engine sees that it is back
        assert time.monotonic() < until_s
    lost = pair.kind == "gptoss"
    assert external(pair.ask(reprise_tenant="frank")) == ([0] * len(PROMPTS) if lost else hits_of(pair.kind))
    assert external(pair.ask(reprise_tenant="frank")) == hits_of(pair.kind)


def test_requests_together_get_the_answers_that_they_get_alone(pair: Pair) -> None:
    """Loads of some overlap with the computing of others: hits and misses mixed in one batch."""
    pair.ask(reprise_tenant="grace")
    fresh = [prompt(length, 50 + length) for length in (40, 150, 260)]
    alone = answers(asks(pair.attached, fresh, {"reprise_cache": "off"}))
    sampling = SamplingParams(
        temperature=0.0,
        max_tokens=ANSWER_TOKENS,
        ignore_eos=True,
        extra_args={"kv_transfer_params": {"reprise_tenant": "grace"}},
    )
    mixed = [{"prompt_token_ids": tokens} for tokens in PROMPTS + fresh]
    together = pair.attached._llm.generate(mixed, sampling, use_tqdm=False)
    assert [list(output.outputs[0].token_ids) for output in together] == pair.expected + alone
    assert [output.num_cached_tokens for output in together] == [*hits_of(pair.kind), 0, 0, 0]
