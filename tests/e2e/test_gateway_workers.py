"""The gateway when workers fail: another goes on, or the client is told; when the client leaves, the workers stop."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.byte_tokenizer import EOS, byte_ids, write_tokenizer
from tests.support.fake_worker import DEFAULT_ANSWER, Behaviour, FakeWorker
from tests.support.gateway_stack import Stack, chat, running_stack, wait_for
from tests.support.waiting import WAIT_S

LONG = "abcdefghij" * 40


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def pair_stack(directory: Path) -> Iterator[Stack]:
    with running_stack(
        directory, prefill_workers=2, decode_workers=2, continue_s_max=WAIT_S, event_s_max=WAIT_S
    ) as stack:
        yield stack


@pytest.fixture
def pairs(pair_stack: Stack) -> Stack:
    """Two workers of each role, healthy again."""
    workers = (*pair_stack.prefill, *pair_stack.decode)
    for worker in workers:
        worker.behaviour = Behaviour()
        worker.prefills.clear()
        worker.decodes.clear()
        worker.cancelled.clear()
    with pair_stack.client() as client:
        wait_for(lambda: gauge(client, "prefill") == 2 and gauge(client, "decode") == 2)
    return pair_stack


def gauge(client: httpx.Client, role: str) -> float:
    """How many workers of a role the gateway finds usable."""
    name = f'reprise_gateway_workers_usable{{role="{role}"}}'
    lines = client.get("/metrics").text.splitlines()
    return next(float(line.split()[-1]) for line in lines if line.startswith(name))


def long_answers(workers: list[FakeWorker], delay_s: float = 0.0) -> None:
    ids = [*byte_ids(LONG), EOS]
    for worker in workers:
        worker.behaviour.answer = lambda prompt: ids
        worker.behaviour.delay_s = delay_s


def text_of(lines: list[str]) -> str:
    """The text of a stream's events, up to its end or its error."""
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    return "".join(event["choices"][0]["delta"].get("content", "") for event in events if event.get("choices"))


@pytest.mark.parametrize("stream", [True, False])
def test_answer_goes_on_at_another_decode_worker(pairs: Stack, stream: bool) -> None:
    """A decode worker whose connection breaks in mid-answer costs nothing: no token is lost, doubled, or changed."""
    long_answers([*pairs.prefill, *pairs.decode])
    for worker in pairs.decode:
        worker.behaviour.die_after = 150
    with pairs.client() as client:
        answer = client.post("/v1/chat/completions", json=chat(stream=stream))
        if stream:
            lines = answer.text.split("\n\n")
            text, usage = text_of(lines), json.loads(lines[-3][6:])["usage"]
            assert lines[-2] == "data: [DONE]"
        else:
            text, usage = answer.json()["choices"][0]["message"]["content"], answer.json()["usage"]
    first, second = sorted(
        (worker.decodes[0] for worker in pairs.decode if worker.decodes), key=lambda r: len(r.tokens)
    )
    assert second.tokens[: len(first.tokens)] == first.tokens
    assert len(second.tokens) == len(first.tokens) + 150
    assert second.prompt_tokens == first.prompt_tokens
    assert second.max_tokens == first.max_tokens - 150
    assert text == LONG
    assert usage["completion_tokens"] == len(LONG) + 1
    assert usage["reprise"]["continuations"] == 2


@pytest.mark.parametrize("stream", [True, False])
def test_an_answer_is_exact_only_if_every_worker_of_it_was(pairs: Stack, stream: bool) -> None:
    """An exact prefill, and two decode workers, one after a bounded replay: not exact as a whole, in any order."""
    long_answers([*pairs.prefill, *pairs.decode])
    pairs.decode[0].behaviour.exact = False
    for worker in pairs.decode:
        worker.behaviour.die_after = 150
    with pairs.client() as client:
        answer = client.post("/v1/chat/completions", json=chat(stream=stream))
    assert all(worker.decodes for worker in pairs.decode)
    usage = json.loads(answer.text.split("\n\n")[-3][6:])["usage"] if stream else answer.json()["usage"]
    assert not usage["reprise"]["exact"]


def test_failure_that_the_worker_reports_is_cured_elsewhere(pairs: Stack) -> None:
    """A retryable failure event is as good as a broken connection."""
    long_answers([*pairs.prefill, *pairs.decode])
    pairs.decode[0].behaviour.fail_after = pairs.decode[1].behaviour.fail_after = 300
    with pairs.client() as client:
        answer = client.post("/v1/chat/completions", json=chat()).json()
    assert answer["choices"][0]["message"]["content"] == LONG
    assert answer["usage"]["reprise"]["continuations"] == 1


@pytest.mark.parametrize("stream", [True, False])
def test_no_decode_worker_left_is_told(pairs: Stack, stream: bool) -> None:
    """With nobody to go on, a stream ends with an error event and no [DONE]; a whole answer is a 502."""
    long_answers([*pairs.prefill, *pairs.decode])
    for worker in pairs.decode:
        worker.behaviour.fail_after = 3
        worker.behaviour.fail_retryable = False
    with pairs.client() as client:
        answer = client.post("/v1/chat/completions", json=chat(stream=stream))
        if stream:
            assert answer.status_code == 200
            lines = [line for line in answer.text.split("\n\n") if line]
            error = json.loads(lines[-1][6:])["error"]
            assert text_of(lines) == LONG[:4]
            assert "[DONE]" not in answer.text
        else:
            assert answer.status_code == 502
            assert answer.headers["retry-after"]
            error = answer.json()["error"]
        assert error["code"] == "worker_lost"
        assert "failed on purpose" in error["message"]
        assert pairs.line(answer.headers["x-request-id"])["error"]


def test_answer_fails_after_bounded_tries_and_a_resend_hits(directory: Path) -> None:
    """Workers that die at once every time: an error within the deadline; when they are well again the resend hits."""
    body = chat("resent prompt")
    with running_stack(directory, decode_workers=2, continue_s_max=0.5) as stack, stack.client() as client:
        long_answers([*stack.prefill, *stack.decode])
        for worker in stack.decode:
            worker.behaviour.die_after = 0
        answer = client.post("/v1/chat/completions", json=body)
        assert answer.status_code == 502
        assert sum(len(worker.decodes) for worker in stack.decode) <= 8
        for worker in stack.decode:
            worker.behaviour.die_after = None
        wait_for(lambda: gauge(client, "decode") == 2)
        usage = client.post("/v1/chat/completions", json=body).json()["usage"]
        assert usage["prompt_cache_hit_tokens"] == usage["prompt_tokens"] - 1


def test_silent_decode_worker_is_given_up(directory: Path) -> None:
    """A worker that accepts and then says nothing counts as lost after the event deadline; the answer goes on."""
    with running_stack(directory, decode_workers=2, event_s_max=2.0) as stack, stack.client() as client:
        long_answers([*stack.prefill, *stack.decode])
        stack.decode[0].behaviour.delay_s = 10 * WAIT_S
        for _ in range(2):
            answer = client.post("/v1/chat/completions", json=chat()).json()
            assert answer["choices"][0]["message"]["content"] == LONG
        assert stack.decode[1].decodes


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_requests_leave_a_worker_that_stands_still(directory: Path, role: str) -> None:
    """Neither its stream nor its polls answer any more: long before the longest silence another one goes on."""
    silence_s = 10 * WAIT_S
    with running_stack(
        directory, prefill_workers=2, decode_workers=2, stalled_s_max=2.0, event_s_max=silence_s
    ) as stack:
        stalled = (stack.prefill if role == "prefill" else stack.decode)[0]
        stalled.behaviour.silent, stalled.behaviour.delay_s = role == "prefill", silence_s
        with stack.client() as client, ThreadPoolExecutor(1) as pool:
            pending = pool.submit(client.post, "/v1/chat/completions", json=chat())
            wait_for(lambda: stalled.prefills or stalled.decodes)
            stalled.behaviour.deaf = True
            assert pending.result(WAIT_S).json()["choices"][0]["message"]["content"] == DEFAULT_ANSWER


@pytest.mark.parametrize("fault", ["die_in_prefill", "wrong_reuse", "wrong_token"])
def test_prefill_fault_is_cured_elsewhere(pairs: Stack, fault: str) -> None:
    """A prefill worker that breaks, or whose counts or tokens cannot be, is not believed: another one is asked."""
    for worker in pairs.prefill:
        setattr(worker.behaviour, fault, True)
    with pairs.client() as client:
        answer = client.post("/v1/chat/completions", json=chat())
        assert answer.status_code == 503
        assert answer.headers["retry-after"]
        assert answer.json()["error"]["code"] == "no_capacity"
        assert all(len(worker.prefills) == 1 for worker in pairs.prefill)
        setattr(pairs.prefill[0].behaviour, fault, False)
        wait_for(lambda: gauge(client, "prefill") == 2)
        answer = client.post("/v1/chat/completions", json=chat())
        assert answer.status_code == 200
        assert answer.json()["choices"][0]["message"]["content"] == DEFAULT_ANSWER


def test_lost_hand_off_is_no_failure(pairs: Stack) -> None:
    """A prefill worker that dies after the first token: decode goes on, and usage says that nothing was published."""
    for worker in pairs.prefill:
        worker.behaviour.hand_off = False
    with pairs.client() as client:
        answer = client.post("/v1/chat/completions", json=chat()).json()
    assert answer["choices"][0]["message"]["content"] == DEFAULT_ANSWER
    assert answer["usage"]["reprise"]["published"] is False


def test_busy_workers_are_503_with_their_retry_after(pairs: Stack) -> None:
    """All workers refusing for load: 503, and when to come again."""
    for worker in pairs.prefill:
        worker.behaviour.reject = (503, "queue full")
    with pairs.client() as client:
        answer = client.post("/v1/chat/completions", json=chat())
    assert answer.status_code == 503
    assert answer.headers["retry-after"] == "3"


def test_busy_decode_workers_are_waited_for(pairs: Stack) -> None:
    """The prompt is computed already: decode workers that are busy for a moment are asked again."""
    for worker in pairs.decode:
        worker.behaviour.reject = (503, "queue full")

    def relax() -> None:
        wait_for(lambda: any(worker.decodes for worker in pairs.decode))
        for worker in pairs.decode:
            worker.behaviour.reject = None

    helper = threading.Thread(target=relax)
    helper.start()
    with pairs.client() as client:
        answer = client.post("/v1/chat/completions", json=chat())
    helper.join(WAIT_S)
    assert answer.json()["choices"][0]["message"]["content"] == DEFAULT_ANSWER


def test_refusal_of_the_request_is_the_clients(pairs: Stack) -> None:
    """A worker's 400 is passed on in its words, and no other worker is bothered."""
    for worker in pairs.prefill:
        worker.behaviour.reject = (400, "the prompt has too many tokens")
    with pairs.client() as client:
        answer = client.post("/v1/chat/completions", json=chat())
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == "the prompt has too many tokens"
    assert sum(len(worker.prefills) for worker in pairs.prefill) == 1


def test_draining_workers_get_nothing(pairs: Stack) -> None:
    """A worker that says it drains is not chosen any more."""
    pairs.prefill[0].behaviour.draining = pairs.decode[1].behaviour.draining = True
    with pairs.client() as client:
        wait_for(lambda: gauge(client, "prefill") == 1 and gauge(client, "decode") == 1)
        for _ in range(4):
            assert client.post("/v1/chat/completions", json=chat()).status_code == 200
    assert pairs.prefill[0].prefills == []
    assert pairs.decode[1].decodes == []


def test_decode_only_in_the_space_of_prefill(pairs: Stack) -> None:
    """A decode worker of another space (other weights, say) never continues an answer."""
    with pairs.client() as client:
        pairs.decode[0].space_id = "bb" * 32
        try:
            # The gateway reads a worker's model again after an outage.
            pairs.decode[0].behaviour.draining = True
            wait_for(lambda: gauge(client, "decode") == 1)
            pairs.decode[0].behaviour.draining = False
            wait_for(lambda: gauge(client, "decode") == 2)
            for _ in range(6):
                assert client.post("/v1/chat/completions", json=chat()).status_code == 200
            assert pairs.decode[0].decodes == []
        finally:
            pairs.decode[0].space_id = pairs.decode[1].space_id
            pairs.decode[0].behaviour.draining = True
            wait_for(lambda: gauge(client, "decode") == 1)
            pairs.decode[0].behaviour.draining = False
            wait_for(lambda: gauge(client, "decode") == 2)


def test_concurrent_requests_spread(pairs: Stack) -> None:
    """Requests at the same time go to different workers of a role."""
    long_answers([*pairs.prefill, *pairs.decode], delay_s=1.0)

    def ask() -> None:
        with pairs.client() as client:
            assert client.post("/v1/chat/completions", json=chat(max_tokens=60)).status_code == 200

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    wait_for(lambda: sum(len(worker.decodes) for worker in pairs.decode) == 8)
    long_answers([*pairs.prefill, *pairs.decode])
    for thread in threads:
        thread.join(WAIT_S)
    assert all(worker.decodes for worker in pairs.decode)


# --- clients that leave ---------------------------------------------------------------------------------------------


def raw_request(stack: Stack, body: dict[str, Any]) -> socket.socket:
    """A bare connection with a request on it, to be cut at will."""
    host, port = stack.url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), timeout=WAIT_S)
    data = json.dumps(body).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\n\r\n"
    connection.sendall(head.encode() + data)
    return connection


@pytest.mark.parametrize("stream", [True, False])
def test_client_that_leaves_cancels_decode(pairs: Stack, stream: bool) -> None:
    """Closing the connection in mid-answer closes the worker's stream, and the log says so."""
    long_answers([*pairs.prefill, *pairs.decode], delay_s=0.05)
    connection = raw_request(pairs, chat(stream=stream))
    if stream:
        connection.recv(100)
    wait_for(lambda: any(worker.decodes for worker in pairs.decode))
    connection.close()
    wait_for(lambda: any(worker.cancelled for worker in pairs.decode))
    request_id = next(worker.cancelled[0] for worker in pairs.decode if worker.cancelled)
    line = pairs.line(request_id)
    assert line["status"] == 499
    assert line["completion_tokens"] < len(LONG)
    wait_for(lambda: all(worker.running == 0 for worker in pairs.decode))


def test_client_that_leaves_before_the_first_token_cancels_prefill(pairs: Stack) -> None:
    """Nobody computes a prompt for a client that is gone."""
    for worker in pairs.prefill:
        worker.behaviour.silent = True
    connection = raw_request(pairs, chat(stream=True))
    wait_for(lambda: any(worker.prefills for worker in pairs.prefill))
    connection.close()
    wait_for(lambda: any(worker.cancelled for worker in pairs.prefill))
    request_id = next(worker.cancelled[0] for worker in pairs.prefill if worker.cancelled)
    assert pairs.line(request_id)["status"] == 499


def test_stop_string_cancels_the_rest(pairs: Stack) -> None:
    """After a stop string the worker is not left generating."""
    long_answers([*pairs.prefill, *pairs.decode], delay_s=0.02)
    with pairs.client() as client:
        answer = client.post("/v1/chat/completions", json=chat(stop="fg")).json()
    assert answer["choices"][0]["message"]["content"] == "abcde"
    wait_for(lambda: all(worker.running == 0 for worker in pairs.decode))
    assert any(worker.cancelled for worker in pairs.decode)


# --- limits and absence ---------------------------------------------------------------------------------------------


def test_requests_at_once_are_bounded(directory: Path) -> None:
    """Beyond the bound: 503 with Retry-After at once; the others finish; afterwards there is room again."""
    with running_stack(directory, requests_max=2) as stack, stack.client() as client:
        long_answers([*stack.prefill, *stack.decode], delay_s=0.05)
        held = [raw_request(stack, chat(stream=True)) for _ in range(2)]
        wait_for(lambda: len(stack.decode[0].decodes) == 2)
        answer = client.post("/v1/chat/completions", json=chat())
        assert answer.status_code == 503
        assert answer.headers["retry-after"] == "1"
        assert answer.json()["error"]["code"] == "overloaded"
        assert client.get("/healthz").status_code == 200
        for connection in held:
            connection.close()
        long_answers([*stack.prefill, *stack.decode])
        wait_for(lambda: client.post("/v1/chat/completions", json=chat()).status_code == 200)


def test_one_tenant_cannot_take_every_place(directory: Path, tmp_path: Path) -> None:
    """A key's tenant has its own bound (429); another tenant is served meanwhile."""
    (tmp_path / "keys.toml").write_text(
        '[[keys]]\nkey = "key-of-one"\ntenant = "one"\n[[keys]]\nkey = "key-of-two"\ntenant = "two"\n'
    )
    with (
        running_stack(directory, keys=tmp_path / "keys.toml", tenant_requests_max=1) as stack,
        stack.client() as client,
    ):
        long_answers([*stack.prefill, *stack.decode], delay_s=0.05)
        one, two = ({"authorization": f"Bearer key-of-{name}"} for name in ("one", "two"))
        with client.stream("POST", "/v1/chat/completions", json=chat(stream=True), headers=one) as held:
            assert held.status_code == 200
            refused = client.post("/v1/chat/completions", json=chat(), headers=one)
            assert refused.status_code == 429
            assert refused.headers["retry-after"]
            assert client.post("/v1/chat/completions", json=chat(max_tokens=2), headers=two).status_code == 200
        wait_for(lambda: client.post("/v1/chat/completions", json=chat(max_tokens=1), headers=one).status_code == 200)


def test_slow_body_times_out(directory: Path) -> None:
    """A client that sends its body a byte now and then is cut off at the deadline, with a 408."""
    with running_stack(directory, body_s_max=0.3) as stack:
        host, port = stack.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=WAIT_S) as connection:
            connection.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 500\r\n\r\n{")
            assert connection.recv(100).startswith(b"HTTP/1.1 408")


def test_no_worker_is_503_until_one_comes(directory: Path) -> None:
    """Without workers: 503 with Retry-After and an unhealthy /healthz; both end when the workers come up."""
    with running_stack(directory, wait=False) as stack, stack.client() as client:
        wait_for(lambda: client.get("/healthz").status_code == 200)
        for worker in (*stack.prefill, *stack.decode):
            worker.stop()
        wait_for(lambda: client.get("/healthz").status_code == 503)
        answer = client.post("/v1/chat/completions", json=chat())
        assert answer.status_code == 503
        assert answer.headers["retry-after"]
        assert client.post("/v1/chat/completions", json=chat() | {"model": "other"}).status_code == 404
        for worker in (*stack.prefill, *stack.decode):
            worker.start()
        wait_for(lambda: client.get("/healthz").status_code == 200)
        assert client.post("/v1/chat/completions", json=chat()).status_code == 200


def test_killed_decode_worker_that_comes_back_continues(directory: Path) -> None:
    """The only decode worker is stopped in mid-answer and started again: the answer is complete and unchanged."""
    with running_stack(directory, continue_s_max=WAIT_S) as stack, stack.client() as client:
        long_answers([*stack.prefill, *stack.decode], delay_s=0.05)
        decode = stack.decode[0]

        def restart() -> None:
            wait_for(lambda: decode.decodes)
            time.sleep(0.2)  # of the 20 s that it would take
            decode.stop()
            decode.behaviour.delay_s = 0.0
            decode.start()

        helper = threading.Thread(target=restart)
        helper.start()
        answer = client.post("/v1/chat/completions", json=chat(stream=True))
        helper.join(WAIT_S)
        assert text_of(answer.text.split("\n\n")) == LONG
        assert len(decode.decodes) == 2
