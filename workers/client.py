"""WorkerClient: how a gateway talks to one worker over HTTP/1.1. Torch-free.

Owns the translation of HTTP and of foreign errors into ``workers.errors``. Does not retry, choose a worker or know a
model. Leaving a stream early (``aclose`` of the iterator, or cancelling its task) closes the connection, and that
cancels the request at the worker.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from types import TracebackType
from typing import Any, TypeVar

import httpx
from pydantic import ValidationError

from workers.errors import Failed, ProtocolError, Rejected, Unavailable
from workers.protocol import (
    DECODE_PATH,
    LOAD_PATH,
    MODEL_PATH,
    PREFILL_PATH,
    REQUEST_PATH,
    WORKER_EVENT,
    DecodeRequest,
    Finished,
    FirstToken,
    HandedOff,
    Load,
    ModelInfo,
    PrefillRequest,
    Tokens,
    WorkerFailure,
    WorkRequest,
)

LINE_BYTES_MAX = 1 << 20
"""Bytes of one event; a longer line is a ProtocolError."""
ANSWER_BYTES_MAX = 4 << 20
CONNECT_S_DEFAULT = 2.0
EVENT_S_DEFAULT = 300.0
"""Longest silence within a stream; then the worker counts as gone. A cold prefill of a long prompt is silent."""
CALL_S_DEFAULT = 5.0
CONNECTIONS_MAX = 256

Event = FirstToken | HandedOff | Tokens | Finished
_M = TypeVar("_M", ModelInfo, Load)


class WorkerClient:
    """One worker's endpoint. Use as an async context manager, or call ``aclose``."""

    def __init__(
        self, http: httpx.AsyncClient, *, event_s: float = EVENT_S_DEFAULT, call_s: float = CALL_S_DEFAULT
    ) -> None:
        self._http = http
        self._event_s = event_s
        self._call_s = call_s

    @classmethod
    def open(
        cls,
        address: str,
        *,
        token: str | None = None,
        connect_s: float = CONNECT_S_DEFAULT,
        event_s: float = EVENT_S_DEFAULT,
        call_s: float = CALL_S_DEFAULT,
    ) -> WorkerClient:
        """A client for ``HOST:PORT`` or ``http://HOST:PORT``; connects at the first call."""
        base = address if "://" in address else f"http://{address}"
        http = httpx.AsyncClient(
            base_url=base,
            headers={"authorization": f"Bearer {token}"} if token else {},
            timeout=httpx.Timeout(call_s, connect=connect_s),
            limits=httpx.Limits(max_connections=CONNECTIONS_MAX, max_keepalive_connections=32, keepalive_expiry=30.0),
            trust_env=False,
        )
        return cls(http, event_s=event_s, call_s=call_s)

    async def __aenter__(self) -> WorkerClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close every connection; streams that are open end with Unavailable."""
        await self._http.aclose()

    async def prefill(self, request: PrefillRequest) -> AsyncIterator[FirstToken | HandedOff]:
        """FirstToken, then HandedOff. Raises Unavailable, Rejected, Failed, ProtocolError."""
        async with aclosing(self._stream(PREFILL_PATH, request)) as events:
            async for event in events:
                if not isinstance(event, FirstToken | HandedOff):
                    raise ProtocolError(f"a prefill answered with {event.event!r}")
                yield event
                if isinstance(event, HandedOff):
                    return
        raise Failed("the worker's stream ended before the hand-off", code="cut")

    async def decode(self, request: DecodeRequest) -> AsyncIterator[Tokens | Finished]:
        """Tokens ..., then Finished. Raises Unavailable, Rejected, Failed, ProtocolError."""
        async with aclosing(self._stream(DECODE_PATH, request)) as events:
            async for event in events:
                if not isinstance(event, Tokens | Finished):
                    raise ProtocolError(f"a decode answered with {event.event!r}")
                yield event
                if isinstance(event, Finished):
                    return
        raise Failed("the worker's stream ended before it was finished", code="cut")

    async def model(self) -> ModelInfo:
        """What the worker serves."""
        return _message(ModelInfo, await self._get(MODEL_PATH))

    async def load(self) -> Load:
        """The worker's load now."""
        return _message(Load, await self._get(LOAD_PATH))

    async def access_record(self, request_id: str) -> dict[str, Any] | None:
        """The access log's record of a request, or None when it is forgotten."""
        try:
            record = await self._get(REQUEST_PATH.format(request_id=request_id))
        except Rejected as error:
            if error.status == 404:
                return None
            raise
        if not isinstance(record, dict):
            raise ProtocolError("an access record is a JSON object")
        return record

    async def healthy(self) -> bool:
        """Whether the worker answers and takes requests; never raises."""
        try:
            answer = await self._http.get("/healthz", timeout=self._call_s)
        except (httpx.HTTPError, OSError):
            return False
        return answer.status_code == 200

    async def _stream(self, path: str, request: WorkRequest) -> AsyncGenerator[Event, None]:
        timeout = httpx.Timeout(self._event_s, connect=self._http.timeout.connect)
        try:
            async with self._http.stream(
                "POST",
                path,
                content=request.model_dump_json(),
                headers={"content-type": "application/json"},
                timeout=timeout,
            ) as answer:
                if answer.status_code != 200:
                    await answer.aread()
                    raise _rejected(answer)
                async for line in _lines(answer):
                    yield _event(line)
        except httpx.HTTPError as error:
            raise Unavailable(f"the worker at {self._http.base_url} is gone: {type(error).__name__} {error}") from error

    async def _get(self, path: str) -> Any:
        try:
            answer = await self._http.get(path, timeout=self._call_s)
        except httpx.HTTPError as error:
            raise Unavailable(f"the worker at {self._http.base_url} does not answer: {error!r}") from error
        if answer.status_code != 200:
            raise _rejected(answer)
        if len(answer.content) > ANSWER_BYTES_MAX:
            raise ProtocolError(f"an answer has more than {ANSWER_BYTES_MAX} bytes")
        try:
            return answer.json()
        except ValueError as error:
            raise ProtocolError("the worker's answer is not JSON") from error


async def _lines(answer: httpx.Response) -> AsyncIterator[bytes]:
    """Bounded lines of a streamed body; what follows the last newline was cut and is dropped."""
    rest = b""
    async for part in answer.aiter_bytes():
        *lines, rest = (rest + part).split(b"\n")
        if len(rest) > LINE_BYTES_MAX or any(len(line) > LINE_BYTES_MAX for line in lines):
            raise ProtocolError(f"an event has more than {LINE_BYTES_MAX} bytes")
        for line in lines:
            if line:
                yield line


def _message(kind: type[_M], answer: Any) -> _M:
    try:
        return kind.model_validate(answer)
    except ValidationError as error:
        raise ProtocolError(f"the worker's {kind.__name__} has {error.error_count()} faults") from error


def _event(line: bytes) -> Event:
    try:
        event = WORKER_EVENT.validate_json(line)
    except ValidationError as error:
        raise ProtocolError(f"the worker sent an unknown event ({error.error_count()} faults)") from error
    if isinstance(event, WorkerFailure):
        raise Failed(event.message, code=event.code, retryable=event.retryable)
    return event


def _rejected(answer: httpx.Response) -> Rejected:
    """The worker's error body ``{"error": {"code", "message"}}`` as an error; anything else by its status."""
    message, code = f"the worker answered with status {answer.status_code}", "rejected"
    try:
        body = json.loads(answer.content[:65_536])
        message, code = str(body["error"]["message"]), str(body["error"]["code"])
    except (ValueError, KeyError, TypeError):
        pass
    try:
        retry_after_s = float(answer.headers["retry-after"])
    except (KeyError, ValueError):
        retry_after_s = None
    return Rejected(answer.status_code, message, code=code, retry_after_s=retry_after_s)
