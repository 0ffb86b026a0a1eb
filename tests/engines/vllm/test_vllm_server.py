"""vLLM's API server over a store: what README tells a newcomer to do with it, and our own worker beside it."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore.client import StoreClient
from tests.support.checkpoints import make_checkpoint
from tests.support.stack import environment, reprise_command, running_stack
from tests.support.store_process import StoreProcess
from tests.support.vllm_server import ROOT, VllmServer, readme_config

PROMPT = "A store that lies behind an engine gives back what was computed before it died. " * 9
BLOCK_TOKENS = 128
"""Of vLLM on a CPU."""
STORED_S_MAX = 20.0
EXTERNAL_HITS = "vllm:external_prefix_cache_hits_total"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[StoreProcess]:
    node = StoreProcess(tmp_path, capacity="256MiB")
    node.begin()
    yield node
    node.end()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama", tmp_path_factory.mktemp("checkpoint") / "model", head_dim=32)


def reprise(*arguments: str) -> Any:
    """What a `reprise` command prints as JSON."""
    done = subprocess.run(
        [*reprise_command(), *arguments, "--json"],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


def test_a_server_that_was_killed_hits_what_it_computed_before(
    tmp_path: Path, store: StoreProcess, model: Path
) -> None:
    """kill -9 of vLLM loses nothing: usage and metrics of the next one count the hit, and its answer is the same.
    ``explain`` finds the request by the id that its client has, with the number of its prompt and without.
    """
    config, log = readme_config(store.address), tmp_path / "access.jsonl"
    config["kv_connector_extra_config"]["access_log"] = str(log)
    server = VllmServer(tmp_path, model, config)
    try:
        server.begin()
        cold = server.complete(PROMPT)
        assert cold.cached_tokens == 0
        whole = (cold.prompt_tokens - 1) // BLOCK_TOKENS
        assert whole >= 5
        _wait_until_stored(store.address, whole)
        server.kill()
        server.begin()
        again = server.complete(PROMPT)
        external = server.metric(EXTERNAL_HITS)
        _wait_until_logged(log, again.id)
        _check_that_a_misspelt_tenant_is_told(server, store)
    finally:
        server.kill()
    assert again.text == cold.text
    assert again.cached_tokens == external == whole * BLOCK_TOKENS
    assert reprise("store", "stat", store.address)[store.address]["hits"] >= whole
    told = [reprise("store", "explain", name, "--log", str(log)) for name in (again.id, f"{again.id}-0", cold.id)]
    assert [[row["hit_tokens"] for row in rows] for rows in told] == [[external], [external], [0]]


def _check_that_a_misspelt_tenant_is_told(server: VllmServer, store: StoreProcess) -> None:
    """Its request is answered, in nobody's space: the log and a counter tell of it."""
    client = StoreClient.connect([store.address])
    try:
        before, ends_s = client.stats()["puts"], time.monotonic() + STORED_S_MAX
        assert server.complete(f"Secret: {PROMPT}", params={"reprise_tennant": "alice"}).cached_tokens == 0
        while server.metric("vllm:reprise_parameters_unclear_total") != 1:
            assert time.monotonic() < ends_s
            server.complete("On.")
        assert client.stats()["puts"] == before
    finally:
        client.close()
    assert server.log.count("parameter_not_understood name='reprise_tennant'") == 1


def test_our_worker_and_vllm_share_a_store_but_no_block(tmp_path: Path, model: Path) -> None:
    """The same prompt hits what its own engine stored, never what the other did; explain names how they differ."""
    with running_stack(model, tmp_path / "data") as stack:
        server = VllmServer(tmp_path, model, readme_config(stack.store), ("--block-size", "64"))
        try:
            server.begin()
            theirs = server.complete(PROMPT)
            _wait_until_stored(stack.store, (theirs.prompt_tokens - 1) // 64)
            ours = stack.complete(PROMPT)
            server.forget()
            theirs_again, ours_again = server.complete(PROMPT), stack.complete(PROMPT)
            external = server.metric(EXTERNAL_HITS)
        finally:
            server.kill()
        log = stack.data / "prefill" / "access.jsonl"
        (why,) = reprise("store", "explain", ours.request_id, "--log", str(log), "--store", stack.store)
    assert (theirs.cached_tokens, ours.hit) == (0, 0)
    assert theirs_again.cached_tokens == external > 0.8 * theirs.prompt_tokens
    assert ours_again.hit > 0.8 * ours.prompt
    assert (theirs_again.text, ours_again.text) == (theirs.text, ours.text)
    assert (why["cause"], why["block"]) == ("another_space", 0)
    assert {"layout", "kv_dtype"} <= set(why["other_spaces"][0]["fields"])


def _wait_until_stored(address: str, blocks: int) -> None:
    client = StoreClient.connect([address])
    try:
        ends_s = time.monotonic() + STORED_S_MAX
        while client.stats()["puts"] < blocks:
            assert time.monotonic() < ends_s, f"{client.stats()['puts']} of {blocks} blocks were stored"
            time.sleep(0.05)
    finally:
        client.close()


def _wait_until_logged(log: Path, request_id: str) -> None:
    ends_s = time.monotonic() + STORED_S_MAX
    while not log.exists() or request_id not in log.read_text():
        assert time.monotonic() < ends_s
        time.sleep(0.05)
