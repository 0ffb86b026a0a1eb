"""Both demo models in a real vLLM on a CPU, float32: killed, and begun again with empty memory, by Python or server."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvstore.client import StoreClient
from ops.bench.attach_engine import Engine
from ops.bench.attach_prompts import stretch
from ops.bench.attach_ways import EngineProcess, Way, options_of
from tests.support.attached_engine import answers
from tests.support.store_process import StoreProcess
from tests.support.vllm_server import ROOT, VllmServer, readme_config
from workers.weights import PACKAGED, default_cache_dir

BLOCK_TOKENS = 128
"""Of vLLM on a CPU."""
LENGTHS = (1400, 897, 300)
ANSWER_TOKENS = 16
FOLLOW_UP_TOKENS = 70
CONTEXT_TOKENS = 2048
CONVERT_S_MAX = 600.0
STORED_S_MAX = 20.0
EXTERNAL_HITS = "vllm:external_prefix_cache_hits_total"
RESOLVE = (
    "import sys; from workers.weights import default_cache_dir, resolve_model;"
    "print(resolve_model(sys.argv[1], default_cache_dir()).directory)"
)


def directory_of(name: str) -> Path:
    """The converted checkpoint of a demo model: the one that is there, else made by our own environment."""
    kept = sorted(default_cache_dir().glob(f"{PACKAGED[name].folder}-*/config.json"))
    if kept:
        return kept[-1].parent
    python = Path(os.environ["REPRISE"]).with_name("python")
    done = subprocess.run(
        [python, "-c", RESOLVE, name], cwd=ROOT, capture_output=True, text=True, timeout=CONVERT_S_MAX, check=False
    )
    if done.returncode:
        pytest.skip(f"no demo model here: {done.stderr.strip().splitlines()[-1]}")
    return Path(done.stdout.splitlines()[-1])


DOCUMENT = ROOT / "ops/data/document.txt"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[StoreProcess]:
    node = StoreProcess(tmp_path, capacity="1GiB")
    node.begin()
    yield node
    node.end()


def settled(address: str) -> None:
    """Until nothing more was put for a while: what vLLM saved before it is killed is stored."""
    client = StoreClient.connect([address])
    try:
        ends_s, before = time.monotonic() + STORED_S_MAX, -1
        while (now := int(client.stats()["puts"])) != before or now == 0:
            assert time.monotonic() < ends_s
            before = now
            time.sleep(0.5)
    finally:
        client.close()


@pytest.mark.parametrize("name", ["demo", "demo-swa"])
def test_a_demo_model_goes_on_after_its_vllm_was_killed(name: str, tmp_path: Path, store: StoreProcess) -> None:
    """Prompts, and the next turn of a conversation, hit what another process computed and stored before it was killed,
    by vLLM's own count and by its API's usage; every token is that of vLLM without a connector.
    """
    directory, attached = directory_of(name), readme_config(store.address)
    options = options_of(directory, CONTEXT_TOKENS)
    killed = EngineProcess(
        Way("reprise", attached, None, lambda: None), Path(sys.executable), options, tmp_path / "engine.log"
    )
    killed.begin()
    with closing_engine(Engine(options, None)) as plain:
        text = plain.tokens(DOCUMENT.read_text())
        prompts = [list(stretch(text, length, number)) for number, length in enumerate(LENGTHS)]
        expected = [plain.ask(tokens, ANSWER_TOKENS) for tokens in prompts]
        talk = [*prompts[0], *expected[0]["tokens"], *stretch(text, FOLLOW_UP_TOKENS, 99)]
        expected_talk = plain.ask(talk, ANSWER_TOKENS)
    try:
        killed.wait_ready()
        cold = [killed.ask(tokens, ANSWER_TOKENS) for tokens in prompts]
        settled(store.address)
    finally:
        killed.kill()
    server = VllmServer(tmp_path, directory, attached, ("--max-model-len", str(CONTEXT_TOKENS)))
    try:
        with ThreadPoolExecutor(1) as thread:
            served = thread.submit(server.begin)
            with closing_engine(Engine(options, attached)) as again:
                warm = [again.ask(tokens, ANSWER_TOKENS) for tokens in prompts]
                warm_talk = again.ask(talk, ANSWER_TOKENS)
            served.result()
        settled(store.address)
        by_api = server.complete(talk, answer=ANSWER_TOKENS)
        external = server.metric(EXTERNAL_HITS)
    finally:
        server.kill()
    for tokens, before, after in zip(prompts, cold, warm, strict=True):
        seconds = f"{before['ttft_s']:.2f} s -> {after['ttft_s']:.2f} s"
        print(f"{name}: {len(tokens)} tokens, {after['external']} external hits, first token {seconds}")
    print(f"{name}: {len(talk)} tokens by the API, {by_api.cached_tokens} cached, {external:.0f} external hits")
    assert answers(cold) == answers(warm) == answers(expected)
    assert [row["external"] for row in cold] == [0] * len(LENGTHS)
    assert [row["external"] for row in warm] == [whole(length - (name == "demo-swa")) for length in LENGTHS]
    assert warm_talk["tokens"] == by_api.tokens == expected_talk["tokens"]
    assert by_api.cached_tokens == external == whole(len(talk))


def whole(tokens: int) -> int:
    return tokens // BLOCK_TOKENS * BLOCK_TOKENS


@contextmanager
def closing_engine(one: Engine) -> Iterator[Engine]:
    try:
        yield one
    finally:
        one._engine.engine_core.shutdown()
