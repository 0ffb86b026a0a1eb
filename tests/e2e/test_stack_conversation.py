"""The whole service, full attention: a conversation, kills of every process, tenants, explain, and a clean stop."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.support.checkpoints import checkpoint
from tests.support.stack import Stack, running_stack

OFF = {"x-reprise-cache": "off"}
DOCUMENT = " ".join(f"Article {number}: shard {number * 7 % 31} keeps block {number * 13}." for number in range(26))
KEYS = """
[[keys]]
key = "key-of-alice-0001"
tenant = "alice"
class = "chat"

[[keys]]
key = "key-of-bob-000002"
tenant = "bob"
class = "agent"
"""
ALICE, BOB = "key-of-alice-0001", "key-of-bob-000002"


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("stack")
    keys = folder / "keys.toml"
    keys.write_text(KEYS)
    with running_stack(checkpoint("llama"), folder / "data", key=ALICE, arguments=["--keys", str(keys)]) as running:
        yield running


def unlike(name: str) -> str:
    """A long prompt that no other test shares a block with."""
    return f"{name}: {DOCUMENT}"


def test_the_second_turn_costs_only_what_is_new(stack: Stack) -> None:
    """Turn 2 hits at least nine tenths of its prompt; every answer equals the one computed without a cache."""
    prompt = unlike("conversation")
    cold = stack.stream(prompt, max_tokens=12)
    assert (cold.hit, cold.miss) == (0, cold.prompt)
    longer = f"{prompt}{cold.text} And then?"
    warm = stack.stream(longer, max_tokens=12)
    assert warm.hit >= 0.9 * warm.prompt
    assert warm.hit + warm.miss == warm.prompt
    for asked, reply in ((prompt, cold), (longer, warm)):
        uncached = stack.stream(asked, max_tokens=12, headers=OFF)
        assert uncached.hit == 0
        assert uncached.text == reply.text


def test_usage_is_the_same_streamed_and_not(stack: Stack) -> None:
    """Counts of the last frame equal those of the body, and cached_tokens repeats the hit."""
    prompt = unlike("usage")
    stack.complete(prompt)
    body, frame = stack.complete(prompt), stack.stream(prompt)
    for name in ("prompt_tokens", "completion_tokens", "prompt_cache_hit_tokens", "prompt_cache_miss_tokens"):
        assert body.usage[name] == frame.usage[name]
    assert body.usage["prompt_tokens_details"]["cached_tokens"] == body.hit > 0
    assert body.text == frame.text


@pytest.mark.parametrize("tokens", [256, 257, 300])
def test_an_identical_resend_hits_all_but_the_last_token(stack: Stack, tokens: int) -> None:
    """Block-aligned or not, the same prompt again leaves one token to compute, and gives the same answer."""
    prompt = [4 + (index * 31 + tokens) % 250 for index in range(tokens)]
    first = stack.complete(prompt)
    again = stack.complete(prompt)
    assert first.prompt == tokens
    assert again.hit == tokens - 1
    assert again.text == first.text == stack.complete(prompt, headers=OFF).text


def test_what_was_stored_is_found_after_kill_9_of_the_store(stack: Stack) -> None:
    """The store comes back on its address with its blocks; answers stay the same."""
    prompt = unlike("kill the store")
    cold = stack.complete(prompt)
    before = stack.child("store")["endpoints"]
    stack.kill("store")
    after = stack.child("store")["endpoints"]
    assert {name: after[name] for name in ("listen", "unix")} == {name: before[name] for name in ("listen", "unix")}
    warm = stack.complete(prompt)
    assert warm.hit >= 0.9 * warm.prompt
    assert warm.text == cold.text


def test_what_was_stored_is_found_after_kill_9_of_everything_else(stack: Stack) -> None:
    """Gateway and workers hold nothing that matters: new ones find it all in the store."""
    prompt = unlike("kill the rest")
    cold = stack.complete(prompt)
    before = {name: stack.pid(name) for name in ("prefill", "decode", "gateway")}
    for pid in before.values():
        os.kill(pid, signal.SIGKILL)
    stack.wait(
        lambda: stack.is_healthy() and all(stack.pid(name) != pid for name, pid in before.items()), "all back", 90
    )
    stack.wait(lambda: stack.complete("Hello").status == 200, "served again", 30)
    warm = stack.complete(prompt)
    assert warm.hit >= 0.9 * warm.prompt
    assert warm.text == cold.text


def test_a_store_that_is_down_costs_hits_not_answers(stack: Stack) -> None:
    """With the store dead every request is served, all miss; when it is back, what was stored before hits again."""
    prompt = unlike("store down")
    cold = stack.complete(prompt)
    with stack.nothing_restarts():
        stack.kill("store", wait=False)
        down = stack.complete(prompt)
        assert down.status == 200
        assert (down.hit, down.miss) == (0, down.prompt)
        assert down.text == cold.text
    stack.wait(stack.is_healthy, "the store back")
    stack.wait(lambda: stack.complete(prompt).hit > 0, "hits again (the workers' back-off passes)")


def test_a_store_that_hangs_costs_hits_not_answers(stack: Stack) -> None:
    """A store that accepts and never answers is waited for until the look-up's deadline only."""
    prompt = unlike("store hangs")
    cold = stack.complete(prompt)
    pid = stack.pid("store")
    os.kill(pid, signal.SIGSTOP)
    try:
        begun_s = time.monotonic()
        hung = stack.complete(prompt)
        waited_s = time.monotonic() - begun_s
    finally:
        os.kill(pid, signal.SIGCONT)
    assert (hung.status, hung.hit, hung.text) == (200, 0, cold.text)
    assert waited_s < 60
    stack.wait(lambda: stack.complete(prompt).hit > 0, "hits again (the workers' back-off passes)")


def test_a_decode_worker_killed_in_mid_answer(stack: Stack) -> None:
    """The stream goes on or ends with an error event; the store stays clean, and a resend hits and is right."""
    prompt = unlike("kill decode")

    def kill_once(pieces: int) -> None:
        if pieces == 20:
            stack.kill("decode", wait=False)

    broken = stack.stream(prompt, max_tokens=300, on_piece=kill_once)
    assert broken.error is not None or broken.usage["completion_tokens"] > 20
    stack.wait(stack.is_healthy, "the decode worker back")
    whole = stack.stream(prompt, max_tokens=60)
    assert whole.error is None
    assert whole.hit >= 0.9 * whole.prompt
    assert whole.text == stack.stream(prompt, max_tokens=60, headers=OFF).text
    assert whole.text.startswith(broken.text[: len(whole.text)]) or broken.text.startswith(whole.text)


def test_without_a_prefill_worker_clients_are_told_to_come_back(stack: Stack) -> None:
    """503 with Retry-After while it is gone; served again after its restart."""
    with stack.nothing_restarts():
        stack.kill("prefill", wait=False)
        time.sleep(1.0)
        refused = stack.complete("Hello")
        assert refused.status == 503
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.error is not None
        assert refused.error["message"]
    stack.wait(stack.is_healthy, "the prefill worker back")
    stack.wait(lambda: stack.complete("Hello").status == 200, "served again", 30)


def test_tenants_share_nothing(stack: Stack) -> None:
    """Another API key, and another `user` of the same key, find nothing of a prompt that was just stored."""
    prompt = unlike("tenants")
    stack.complete(prompt)
    assert stack.complete(prompt).hit > 0
    other_key = stack.complete(prompt, headers={"authorization": f"Bearer {BOB}"})
    other_user = stack.complete(prompt, user="carol")
    assert (other_key.hit, other_user.hit) == (0, 0)
    assert stack.complete(prompt, user="carol").hit > 0
    wrong = httpx.post(f"{stack.url}/v1/completions", json={}, headers={"authorization": "Bearer nobody"}, timeout=10)
    assert wrong.status_code == 401


def explain(stack: Stack, request_id: str) -> dict[str, Any]:
    """What `reprise store explain` says of a request's prefill."""
    log = Path(stack.child("prefill")["data"]) / "access.jsonl"
    done = stack.reprise("store", "explain", request_id, "--log", str(log), "--store", stack.store, "--json")
    assert done.returncode == 0, done.stderr
    (found,) = json.loads(done.stdout)
    assert isinstance(found, dict)
    return found


def test_explain_says_why_the_first_block_missed(stack: Stack) -> None:
    """A cold request was never stored; the same prompt of another tenant lies in another space, by its salt."""
    prompt = unlike("explain")
    cold = explain(stack, stack.complete(prompt).request_id)
    assert (cold["cause"], cold["block"]) == ("never_stored", 0)
    other = explain(stack, stack.complete(prompt, headers={"authorization": f"Bearer {BOB}"}).request_id)
    assert other["cause"] == "another_space"
    assert [space["fields"] for space in other["other_spaces"]] == [["tenant_salt"]]
    off = explain(stack, stack.complete(prompt, headers=OFF).request_id)
    assert off["cause"] == "off"


def test_explain_of_an_unknown_request_says_so(stack: Stack) -> None:
    """An id that no log holds is an error with a clear word, not an empty answer."""
    log = Path(stack.child("prefill")["data"]) / "access.jsonl"
    done = stack.reprise("store", "explain", "no-such-request", "--log", str(log), "--store", stack.store)
    assert done.returncode != 0
    assert "no-such-request" in done.stderr + done.stdout


def test_purge_of_a_tenant_takes_its_blocks_away(stack: Stack) -> None:
    """After the purge nothing of the tenant hits, others keep theirs, and explain names the reason."""
    prompt = unlike("purge")
    headers = {"authorization": f"Bearer {BOB}"}
    stack.complete(prompt)
    stack.complete(prompt, headers=headers)
    assert stack.complete(prompt, headers=headers).hit > 0
    done = stack.reprise("retention", "purge", "--tenant", "bob", "--apply", "--yes", "--store", stack.store)
    assert done.returncode == 0, done.stderr + done.stdout
    gone = stack.complete(prompt, headers=headers)
    assert gone.hit == 0
    assert explain(stack, gone.request_id)["cause"] == "purged"
    assert stack.complete(prompt).hit > 0


def test_purge_of_one_user_leaves_the_tenant(stack: Stack) -> None:
    """A user of a tenant is purged by the name that the runbook tells; the tenant's own blocks stay."""
    prompt = unlike("purge a user")
    stack.complete(prompt)
    stack.complete(prompt, user="carol")
    assert stack.complete(prompt, user="carol").hit > 0
    name = "5:alice/5:carol"
    done = stack.reprise("retention", "purge", "--tenant", name, "--apply", "--yes", "--store", stack.store)
    assert done.returncode == 0, done.stderr + done.stdout
    assert stack.complete(prompt, user="carol").hit == 0
    assert stack.complete(prompt).hit > 0


def test_a_second_up_on_the_same_data_is_refused(stack: Stack) -> None:
    """The refusal names the directory and leaves the running one alone."""
    done = stack.reprise("up", "--data", str(stack.data), "--model", str(checkpoint("llama")))
    assert done.returncode == 1
    assert str(stack.data) in done.stderr
    assert stack.is_healthy()


def test_zz_sigterm_stops_everything(stack: Stack) -> None:
    """SIGTERM ends all children and exits 0; the volume is clean. (The last test of this stack.)"""
    tree = stack.processes()
    assert len(tree) >= 5
    assert stack.stop() == 0
    gone, alive = psutil.wait_procs(tree, timeout=60)
    assert not alive
    assert len(gone) == len(tree)
    fsck = stack.reprise("store", "fsck", str(stack.data / "store"), "--json")
    assert fsck.returncode == 0, fsck.stdout + fsck.stderr
