"""A worker without a model: a real HTTP server that speaks ``workers/protocol.py`` and answers what it is told to.

Faults are switched on by setting fields of ``Behaviour`` while it runs.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path

import uvicorn
from fastapi import FastAPI, HTTPException
from fastapi.responses import JSONResponse, Response, StreamingResponse

from tests.support.byte_tokenizer import EOS, VOCABULARY, byte_ids
from tests.support.waiting import WAIT_S, wait
from workers.protocol import (
    DECODE_PATH,
    LOAD_PATH,
    MODEL_PATH,
    PREFILL_PATH,
    DecodeRequest,
    Finished,
    FirstToken,
    HandedOff,
    Load,
    Message,
    ModelInfo,
    PrefillRequest,
    Reuse,
    Role,
    Tokens,
    WorkerFailure,
    WorkRequest,
)

DEFAULT_ANSWER = "Hello from the worker."
DEFAULT_IDS = byte_ids(DEFAULT_ANSWER)


class Memory:
    """What all fake workers of one test have stored: prompts by tenant."""

    def __init__(self) -> None:
        self._prompts: list[tuple[str | None, list[int]]] = []

    def reuse(self, request: WorkRequest) -> Reuse:
        prompt = request.tokens
        hit = max((_common(prompt, known) for who, known in self._prompts if who == request.tenant), default=0)
        hit = min(hit, len(prompt) - 1) if request.cache else 0
        if request.cache:
            self._prompts.append((request.tenant, list(prompt)))
        return Reuse(
            prompt_tokens=len(prompt),
            hit_tokens=hit,
            miss_tokens=len(prompt) - hit,
            replayed_tokens=min(hit, 3),
            way="blocks" if hit else "cold",
            reason="off" if not request.cache else "end" if hit else "never",
        )


@dataclass(slots=True)
class Behaviour:
    """Faults. ``die_after``: decode tokens before the connection breaks; ``fail_after``: before it says so."""

    answer: Callable[[list[int]], list[int]] = lambda prompt: [*DEFAULT_IDS, EOS]
    die_after: int | None = None
    fail_after: int | None = None
    fail_retryable: bool = True
    die_in_prefill: bool = False
    reject: tuple[int, str] | None = None
    silent: bool = False
    deaf: bool = False
    hand_off: bool = True
    delay_s: float = 0.0
    tokens_an_event: int = 1
    exact: bool = True
    draining: bool = False
    wrong_reuse: bool = False
    wrong_token: bool = False


@dataclass(slots=True)
class FakeWorker:
    """One worker on a loopback port chosen by the kernel."""

    role: Role
    directory: Path
    memory: Memory
    name: str = "tiny"
    context_tokens: int = 2048
    space_id: str = "aa" * 32
    port: int = 0
    behaviour: Behaviour = field(default_factory=Behaviour)
    prefills: list[PrefillRequest] = field(default_factory=list)
    decodes: list[DecodeRequest] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    running: int = 0
    _server: uvicorn.Server | None = None
    _thread: threading.Thread | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> FakeWorker:
        config = uvicorn.Config(
            self._app(), host="127.0.0.1", port=self.port, log_level="critical", timeout_graceful_shutdown=1
        )
        self._server = server = uvicorn.Server(config)
        self._thread = threading.Thread(target=server.run, daemon=True)
        self._thread.start()
        wait(lambda: server.started, "start of the fake worker")
        self.port = server.servers[0].sockets[0].getsockname()[1]
        return self

    def stop(self) -> None:
        if self._server is not None and self._thread is not None:
            self._server.should_exit = self._server.force_exit = True
            self._thread.join(WAIT_S)
            assert not self._thread.is_alive(), "the fake worker did not stop"

    def _app(self) -> FastAPI:
        app = FastAPI()

        @app.get(MODEL_PATH)
        async def model() -> ModelInfo:
            return ModelInfo(
                name=self.name,
                role=self.role,
                directory=str(self.directory),
                context_tokens=self.context_tokens,
                vocabulary=VOCABULARY,
                stop_token_ids=[EOS],
                block_tokens=4,
                space_id=self.space_id,
                fidelity="bounded",
            )

        @app.get(LOAD_PATH)
        async def load() -> Load:
            if self.behaviour.deaf:
                raise HTTPException(503)
            return Load(
                running=self.running,
                waiting=0,
                queued_pairs=0.0,
                kv_tokens=0,
                kv_tokens_max=1 << 20,
                draining=self.behaviour.draining,
            )

        @app.post(PREFILL_PATH)
        async def prefill(request: PrefillRequest) -> Response:
            self.prefills.append(request)
            return self._answer(request, self._prefill(request))

        @app.post(DECODE_PATH)
        async def decode(request: DecodeRequest) -> Response:
            self.decodes.append(request)
            return self._answer(request, self._decode(request))

        return app

    def _answer(self, request: WorkRequest, events: AsyncIterator[Message]) -> Response:
        if self.behaviour.reject is not None:
            status, message = self.behaviour.reject
            return JSONResponse({"error": {"code": "refused", "message": message}}, status, {"retry-after": "3"})
        return StreamingResponse(self._lines(request, events), media_type="application/x-ndjson")

    async def _lines(self, request: WorkRequest, events: AsyncIterator[Message]) -> AsyncIterator[bytes]:
        complete = False
        self.running += 1
        try:
            async for event in events:
                yield event.model_dump_json().encode() + b"\n"
            complete = True
        finally:
            self.running -= 1
            if not complete:
                self.cancelled.append(request.request_id)

    async def _prefill(self, request: PrefillRequest) -> AsyncIterator[Message]:
        behaviour = self.behaviour
        if behaviour.silent:
            await asyncio.sleep(10 * WAIT_S)
        if behaviour.die_in_prefill:
            raise ConnectionError("broken on purpose")
        reuse = self.memory.reuse(request)
        if behaviour.wrong_reuse:
            reuse = reuse.model_copy(update={"hit_tokens": reuse.hit_tokens + 1})
        first = VOCABULARY + 5 if behaviour.wrong_token else _token(behaviour, request.tokens, 0)
        yield FirstToken(token=first, reuse=reuse, queued_s=0.0, load_s=0.001, compute_s=0.002)
        if not behaviour.hand_off:
            raise ConnectionError("broken on purpose")
        yield HandedOff(published=request.cache)

    async def _decode(self, request: DecodeRequest) -> AsyncIterator[Message]:
        behaviour, prompt = self.behaviour, request.tokens[: request.prompt_tokens]
        resumed = Reuse(
            prompt_tokens=len(request.tokens),
            hit_tokens=len(request.tokens),
            miss_tokens=0,
            way="state" if behaviour.exact else "replay",
            exact=behaviour.exact,
            reason="end",
        )
        done = len(request.tokens) - request.prompt_tokens
        batch: list[int] = []
        for count in range(request.max_tokens):
            if behaviour.die_after is not None and count >= behaviour.die_after:
                raise ConnectionError("broken on purpose")
            if behaviour.fail_after is not None and count >= behaviour.fail_after:
                yield WorkerFailure(code="fault", message="failed on purpose", retryable=behaviour.fail_retryable)
                return
            await asyncio.sleep(behaviour.delay_s)
            batch.append(_token(behaviour, prompt, done + count))
            stopped = batch[-1] in request.stop_token_ids
            if stopped or len(batch) >= behaviour.tokens_an_event or count + 1 == request.max_tokens:
                yield Tokens(tokens=batch, exact=behaviour.exact)
                batch = []
            if stopped:
                yield Finished(reason="stop", resumed=resumed)
                return
        yield Finished(reason="length", resumed=resumed)


def _token(behaviour: Behaviour, prompt: list[int], index: int) -> int:
    answer = behaviour.answer(prompt)
    return answer[index] if index < len(answer) else EOS


def _common(one: list[int], other: list[int]) -> int:
    count = 0
    for left, right in zip(one, other, strict=False):
        if left != right:
            break
        count += 1
    return count
