"""The worker's endpoint over a real socket: a tiny checkpoint, an in-memory store, the shipped client."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvstore.keys import SpaceId, TokenChain
from kvstore.testing import MemoryStore
from tests.support.checkpoints import checkpoint
from tests.support.waiting import WAIT_S, wait
from workers import runtime
from workers import server as module
from workers.client import WorkerClient
from workers.config import ConfigError, WorkerConfig
from workers.errors import Failed, Rejected, Unavailable
from workers.model import Model
from workers.protocol import DecodeRequest, Finished, FirstToken, HandedOff, PrefillRequest, Tokens
from workers.runtime import Worker, compose
from workers.server import WorkerServer, listen
from workers.weights import ResolvedModel

PROMPT = [4 + (7 * index + index // 5) % 250 for index in range(150)]
TOKEN = "a-long-secret-token"


class Running:
    """A worker behind its server, on a thread."""

    def __init__(self, worker: Worker, token: str | None = None, drain_s: float = 5.0) -> None:
        self.worker = worker
        listener = listen("127.0.0.1", 0)
        self.address = f"127.0.0.1:{listener.getsockname()[1]}"
        self.server = WorkerServer(worker, token, drain_s)
        self._thread = threading.Thread(target=self.server.run, kwargs={"sockets": [listener]}, daemon=True)
        worker.start()
        self._thread.start()

    def close(self) -> None:
        self.server.should_exit = True
        self._thread.join(WAIT_S)
        self.worker.close()
        assert not self._thread.is_alive()


def a_worker(tmp_path: Path, store: Any = None, **options: Any) -> Worker:
    config = WorkerConfig(
        **({"role": "both", "model": "tiny", "stores": ("-",), "data": tmp_path, "block_tokens": 16} | options)
    )
    resolved = ResolvedModel("tiny", checkpoint("gemma3"), 1, None)
    model = Model.load(resolved.directory, config.dtype, threads=1)
    return compose(config, resolved, model, store or MemoryStore(state_ttl_s=1e9))


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Running]]:
    with contextlib.ExitStack() as stack:

        def begin(token: str | None = None, drain_s: float = 5.0, **options: Any) -> Running:
            running = Running(a_worker(tmp_path, **({"kv_memory_bytes": 8 << 20} | options)), token, drain_s)
            stack.callback(running.close)
            return running

        yield begin


def prefill_of(tokens: list[int], request_id: str = "r1", **options: Any) -> PrefillRequest:
    return PrefillRequest(request_id=request_id, tokens=tokens, traffic_class=2, **options)


def decode_of(tokens: list[int], prompt_tokens: int, max_tokens: int, request_id: str = "r1") -> DecodeRequest:
    return DecodeRequest(
        request_id=request_id, tokens=tokens, traffic_class=2, prompt_tokens=prompt_tokens, max_tokens=max_tokens
    )


async def answer(client: WorkerClient, count: int, request_id: str = "r1") -> tuple[FirstToken, list[int], Finished]:
    """Prefill and decode through the client."""
    events = [event async for event in client.prefill(prefill_of(PROMPT, request_id))]
    assert [type(event) for event in events] == [FirstToken, HandedOff]
    first = events[0]
    assert isinstance(first, FirstToken)
    rest = [
        event async for event in client.decode(decode_of([*PROMPT, first.token], len(PROMPT), count - 1, request_id))
    ]
    finished = rest.pop()
    assert isinstance(finished, Finished)
    return first, [token for event in rest if isinstance(event, Tokens) for token in event.tokens], finished


async def until_idle(worker: Worker, timeout_s: float = WAIT_S) -> None:
    ends_s = time.monotonic() + timeout_s
    while worker.in_flight or worker.load().kv_tokens:
        assert time.monotonic() < ends_s, worker.load()
        await asyncio.sleep(0.02)


def test_request_goes_through_prefill_decode_and_log(start: Callable[..., Running]) -> None:
    """Two requests over the wire: the second hits all but one token, with the same answer; the log explains both."""
    running = start()

    async def scenario() -> None:
        async with WorkerClient.open(running.address) as client:
            assert await client.healthy()
            info = await client.model()
            assert (info.name, info.role, info.block_tokens) == ("tiny", "both", 16)
            first, tokens, _ = await answer(client, 12, "cold")
            again, same, finished = await answer(client, 12, "warm")
            assert (first.reuse.hit_tokens, again.reuse.hit_tokens) == (0, len(PROMPT) - 1)
            assert (again.token, same) == (first.token, tokens)
            assert finished.reason == "length"
            cold, warm = await client.access_record("cold"), await client.access_record("warm")
            assert cold is not None
            assert warm is not None
            assert cold["first_miss"]["index"] == 0
            assert (cold["reason"], cold["role"]) == ("never", "prefill")
            assert warm["first_miss"] is None
            chain = TokenChain(SpaceId(bytes.fromhex(info.space_id)), info.block_tokens, PROMPT)
            whole = (len(PROMPT) - 1) // info.block_tokens
            assert (cold["last_hit"], warm["last_hit"]) == (None, chain.names[whole - 1].key.hex())
            assert cold["space_id"] == info.space_id
            assert await client.access_record("other") is None
            text = (await client._http.get("/metrics")).text
            assert 'reprise_worker_prompt_tokens_total{kind="hit"} 149.0' in text
            await until_idle(running.worker)
            assert (await client.load()).kv_tokens == 0

    asyncio.run(scenario())


def test_client_that_leaves_cancels_its_request_and_frees_its_memory(start: Callable[..., Running]) -> None:
    """In mid-stream, and while nothing is sent: no slots, no queue entry, and the next request is served."""
    running = start(requests_max=2)

    async def scenario() -> None:
        async with WorkerClient.open(running.address) as client:
            for leave_after in (1, 5):
                seen = 0
                stream = client.decode(decode_of([*PROMPT, 9], len(PROMPT), 3000))
                async with contextlib.aclosing(stream) as events:  # type: ignore[type-var]
                    async for _ in events:
                        seen += 1
                        if seen == leave_after:
                            break
                await until_idle(running.worker)
            task = asyncio.create_task(answer(client, 3000))
            await asyncio.sleep(0.05)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            await until_idle(running.worker)
            tokens = (await answer(client, 5))[1]
            assert len(tokens) == 4
        assert running.worker.metrics.registry.get_sample_value(
            "reprise_worker_requests_total", {"role": "decode", "outcome": "cancelled"}
        )

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        (b"{", 400, "JSON"),
        (b"[]", 400, "object"),
        (b'{"request_id": "r", "tokens": [1], "traffic_class": 2, "colour": 1}', 400, "colour"),
        (b'{"request_id": "r", "tokens": ["secret"], "traffic_class": 2}', 400, "tokens.0"),
        (b'{"request_id": "r", "tokens": [], "traffic_class": 2}', 400, "tokens"),
        (b'{"request_id": "r", "tokens": [-1], "traffic_class": 2}', 400, "tokens.0"),
        (b'{"request_id": "r", "tokens": [1], "traffic_class": 0}', 400, "traffic_class"),
        (b'{"request_id": "r r", "tokens": [1], "traffic_class": 2}', 400, "request_id"),
        (b'{"request_id": "r", "tokens": [9999], "traffic_class": 2}', 400, "vocabulary of 320"),
        (b'{"request_id": "r", "tokens": [' + b"5," * 5000 + b'5], "traffic_class": 2}', 400, "context of 4096 tokens"),
    ],
)
def test_bad_requests_are_refused_by_name(start: Callable[..., Running], body: bytes, status: int, words: str) -> None:
    """A 4xx with a JSON error that says what is wrong and never repeats a value; nothing is left behind."""
    running = start()
    reply = httpx.post(f"http://{running.address}/v1/prefill", content=body, trust_env=False)
    assert reply.status_code == status
    assert words in reply.json()["error"]["message"]
    assert "secret" not in reply.text
    assert running.worker.in_flight == 0


def test_oversized_body_and_unknown_path(start: Callable[..., Running], monkeypatch: pytest.MonkeyPatch) -> None:
    """The body is cut off at its bound, not read to its end."""
    monkeypatch.setattr(module, "BODY_BYTES_MAX", 1000)
    running = start()
    url = f"http://{running.address}"
    assert httpx.post(f"{url}/v1/prefill", content=b"x" * 2000, trust_env=False).status_code == 413
    assert httpx.get(f"{url}/v1/none", trust_env=False).status_code == 404


def test_token_is_asked_for_everywhere_but_health(start: Callable[..., Running]) -> None:
    """No token, a wrong one, a right one."""
    running = start(token=TOKEN)

    async def scenario() -> None:
        for token in (None, "wrong", TOKEN[:-1]):
            async with WorkerClient.open(running.address, token=token) as client:
                assert await client.healthy()
                with pytest.raises(Rejected) as caught:
                    await client.model()
                assert caught.value.status == 401
                with pytest.raises(Rejected):
                    [event async for event in client.prefill(prefill_of(PROMPT))]
        async with WorkerClient.open(running.address, token=TOKEN) as client:
            assert (await client.model()).name == "tiny"

    asyncio.run(scenario())


def test_role_and_load_decide_what_is_taken(start: Callable[..., Running]) -> None:
    """A prefill worker refuses decodes; beyond requests_max the answer is 503 with Retry-After."""
    running = start(role="prefill", requests_max=1)

    async def scenario() -> None:
        async with WorkerClient.open(running.address) as client:
            with pytest.raises(Rejected, match="role is prefill"):
                [event async for event in client.decode(decode_of([*PROMPT, 9], len(PROMPT), 5))]
            running.worker._engine._in_flight += 1  # a request that holds the only place
            with pytest.raises(Rejected) as caught:
                [event async for event in client.prefill(prefill_of(PROMPT))]
            assert (caught.value.status, caught.value.retry_after_s, caught.value.retryable) == (503, 1.0, True)
            running.worker._engine._in_flight -= 1
            assert len([event async for event in client.prefill(prefill_of(PROMPT))]) == 2

    asyncio.run(scenario())


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_stream_that_outlasts_the_drain_ends_with_a_retryable_failure(
    start: Callable[..., Running], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, role: str
) -> None:
    """Whether events come or not: another worker may go on, and the log has no traceback."""
    running = start(drain_s=1.0)
    forward = running.worker._engine._parts.model.forward
    begun, ended = asyncio.Event(), threading.Event()

    def slow(*arguments: Any) -> Any:
        if not begun.is_set():
            loop.call_soon_threadsafe(begun.set)
        ended.wait(0.05 if role == "decode" else WAIT_S)
        return forward(*arguments)

    monkeypatch.setattr(running.worker._engine._parts.model, "forward", slow)

    async def stop_when_it_runs() -> None:
        await begun.wait()
        running.server.handle_exit(signal.SIGTERM, None)

    async def scenario() -> None:
        async with WorkerClient.open(running.address) as client, asyncio.TaskGroup() as group:
            decode = client.decode(decode_of(PROMPT, len(PROMPT) - 1, 3000))
            stream = decode if role == "decode" else client.prefill(prefill_of(PROMPT))
            group.create_task(stop_when_it_runs())
            with pytest.raises(Failed, match="another one may continue") as failed:
                async for _ in stream:
                    pass
            assert (failed.value.code, failed.value.retryable) == ("draining", True)

    with asyncio.Runner() as runner:
        loop = runner.get_loop()
        try:
            runner.run(scenario())
        finally:
            ended.set()
    running._thread.join(WAIT_S)
    assert not running._thread.is_alive()
    assert not [record for record in caplog.records if record.exc_info or record.levelname == "ERROR"]


def test_a_client_that_cannot_be_told_costs_one_line_at_the_end_of_the_drain(
    start: Callable[..., Running], caplog: pytest.LogCaptureFixture
) -> None:
    """The end of the drain cuts off what cannot even be told: a body that does not come; no traceback either."""
    running = start(drain_s=1.0)
    host, _, port = running.address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=WAIT_S) as idle:
        idle.sendall(b"POST /v1/prefill HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n")
        wait(lambda: running.server.server_state.tasks, "request")
        # It was begun, and waits for its body: the loop has come round to somebody who came later.
        assert httpx.get(f"http://{running.address}/healthz", trust_env=False, timeout=WAIT_S).status_code == 200
        running.server.handle_exit(signal.SIGTERM, None)
        running._thread.join(WAIT_S)
    assert not running._thread.is_alive()
    assert "request_cut_off" in caplog.messages
    assert not [record for record in caplog.records if record.exc_info]


def test_draining_finishes_streams_and_refuses_new_requests(start: Callable[..., Running]) -> None:
    """After the signal: health says no, what runs goes on to its end, nothing new begins."""
    running = start()

    async def scenario() -> None:
        async with WorkerClient.open(running.address) as client, WorkerClient.open(running.address) as other:
            assert await other.healthy()
            events = client.decode(decode_of([*PROMPT, 9], len(PROMPT), 200))
            await anext(events)
            running.worker.draining = True
            assert not await other.healthy()
            with pytest.raises(Rejected, match="shutting down") as caught:
                [event async for event in other.prefill(prefill_of(PROMPT))]
            assert caught.value.retryable
            rest = [event async for event in events]
            assert isinstance(rest[-1], Finished)

    asyncio.run(scenario())


def test_worker_that_breaks_says_so(start: Callable[..., Running], monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests in flight end with a retryable failure; when it repeats, the worker is unhealthy and takes nothing."""
    running = start()

    def broken(*_: Any) -> None:
        raise RuntimeError("device lost")

    monkeypatch.setattr(running.worker._engine._parts.model, "forward", broken)

    async def scenario() -> None:
        async with WorkerClient.open(running.address) as client:
            for _ in range(3):
                with pytest.raises(Failed) as caught:
                    [event async for event in client.prefill(prefill_of(PROMPT))]
                assert caught.value.retryable
            await asyncio.to_thread(wait, lambda: running.worker.broken)  # a moment after its last request was told
            assert not await client.healthy()
        with pytest.raises(Rejected, match="broken"):
            running.worker.begin(prefill_of(PROMPT), lambda event: None)
        assert running.worker.load().kv_tokens == 0

    asyncio.run(scenario())


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("fault", ["model", "thread"])
def test_worker_that_breaks_ends_so_that_another_process_can_take_its_place(
    start: Callable[..., Running], monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """Steps that break one after another, or an engine whose thread died: the server stops, and says it was broken."""
    running = start()

    def broken(*_: Any) -> None:
        raise RuntimeError("device lost")

    monkeypatch.setattr(running.worker._engine._parts.model, "forward", broken)
    if fault == "thread":
        monkeypatch.setattr(running.worker._engine, "fail_all", broken)

    async def scenario() -> None:
        async with WorkerClient.open(running.address) as client:
            for _ in range(3):
                with contextlib.suppress(Failed, Unavailable, Rejected):
                    [event async for event in client.prefill(prefill_of(PROMPT))]

    asyncio.run(asyncio.wait_for(scenario(), WAIT_S))
    running._thread.join(WAIT_S)
    assert not running._thread.is_alive()
    assert running.worker.broken


def test_client_that_left_before_its_answer_began_is_cancelled_too(tmp_path: Path) -> None:
    """The connection is gone when the first byte would be sent: the request does not go on for nobody."""
    worker = a_worker(tmp_path, kv_memory_bytes=8 << 20)
    body = prefill_of(PROMPT).model_dump_json().encode()
    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "method": "POST",
        "path": "/v1/prefill",
        "raw_path": b"/v1/prefill",
        "query_string": b"",
        "headers": [],
    }

    async def scenario() -> None:
        messages = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> dict[str, Any]:
            return messages.pop() if messages else {"type": "http.disconnect"}

        async def send(_message: Any) -> None:
            await asyncio.sleep(0)

        await module.create_app(worker)(scope, receive, send)

    try:
        asyncio.run(asyncio.wait_for(scenario(), WAIT_S))
        assert worker.in_flight == 1  # nothing runs yet: the engine's thread was not started
        worker.start()
        wait(lambda: not worker.in_flight, "end of the request")
        assert (worker._engine.counts.cancelled, worker.in_flight) == (1, 0)
    finally:
        worker.close()


def test_memory_too_small_for_two_blocks_is_refused(tmp_path: Path) -> None:
    """The message says how much is needed."""
    with pytest.raises(ConfigError, match="kv_memory"):
        a_worker(tmp_path, kv_memory_bytes=1 << 20, block_tokens=4096)


def test_block_too_large_for_the_store_is_refused_at_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not found out by the first put, after which nothing would ever be stored again."""
    monkeypatch.setattr(runtime, "PAYLOAD_BYTES_MAX", 1 << 12)
    with pytest.raises(ConfigError, match="block_tokens"):
        a_worker(tmp_path, block_tokens=64)


def test_context_is_bounded_by_what_the_memory_holds(start: Callable[..., Running]) -> None:
    """A gateway that asks for all that fits must not ask for more than there is room for."""
    running = start(kv_memory_bytes=1 << 20)
    room = running.worker.load().kv_tokens_max
    assert room < 4096
    assert running.worker.info.context_tokens == room

    async def scenario() -> None:
        async with WorkerClient.open(running.address) as client:
            first, _ = [event async for event in client.prefill(prefill_of(PROMPT))]
            assert isinstance(first, FirstToken)
            tokens = [*PROMPT, first.token]
            events = [event async for event in client.decode(decode_of(tokens, len(PROMPT), room - len(tokens)))]
            assert isinstance(events[-1], Finished)

    asyncio.run(scenario())


def test_nobody_there() -> None:
    """A refused connection is Unavailable, and not healthy."""

    async def scenario() -> None:
        async with WorkerClient.open("127.0.0.1:9") as client:
            assert not await client.healthy()
            with pytest.raises(Unavailable):
                await client.load()
            with pytest.raises(Unavailable):
                [event async for event in client.prefill(prefill_of(PROMPT))]

    asyncio.run(scenario())
