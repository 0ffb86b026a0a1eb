"""The worker's HTTP endpoint: ``workers/protocol.py`` over FastAPI and uvicorn.

Owns routes, bounds of a body, authentication, streaming and the reaction to a client that goes away. Does not know the
engine's inside. Invariants: a request that is refused gets a JSON error and touches nothing; a stream always ends with
a last event, or with the connection; a client that leaves cancels its request within ``DISCONNECT_POLL_S``; a stream
that would outlast the drain ends with a retryable failure before it; a worker that is broken ends its server.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from types import FrameType

import uvicorn
from fastapi import Depends, FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import ValidationError
from starlette.types import ASGIApp, Receive, Scope, Send

from kvstore.signals import stop_signals
from workers.errors import Rejected
from workers.protocol import (
    DECODE_PATH,
    LOAD_PATH,
    MODEL_PATH,
    PREFILL_PATH,
    REQUEST_PATH,
    DecodeRequest,
    Finished,
    HandedOff,
    PrefillRequest,
    WorkerFailure,
)
from workers.runtime import Worker
from workers.sequence import Event

log = logging.getLogger(__name__)

BODY_BYTES_MAX = 16 << 20
"""Bytes of a request's body, over a million tokens; more is refused with 413."""
BODY_S_MAX = 30.0
"""A body must have arrived within this."""
DISCONNECT_POLL_S = 0.1
LAST_EVENT_S = 0.5
"""So long before the drain is over the streams that still run are ended."""
KEEP_ALIVE_S = 75
CONNECTIONS_MAX = 1024
LAST_EVENTS = (HandedOff, Finished, WorkerFailure)
OUTLASTED = WorkerFailure(
    code="draining", message="the worker is shutting down: another one may continue", retryable=True
)
OPEN_PATHS = ("/healthz",)
"""Paths that need no token."""


def create_app(worker: Worker, token: str | None = None) -> FastAPI:
    """The endpoint of one worker; with a token every path but ``/healthz`` asks for it."""

    async def authenticate(request: Request) -> None:
        if token is not None and request.url.path not in OPEN_PATHS:
            given = request.headers.get("authorization", "").removeprefix("Bearer ")
            if not hmac.compare_digest(given.encode(), token.encode()):
                raise Rejected(401, "send the worker's token: Authorization: Bearer TOKEN", code="unauthorized")

    app = FastAPI(
        title="reprise worker",
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        dependencies=[Depends(authenticate)],
    )

    @app.exception_handler(Rejected)
    async def rejected(_request: Request, error: Rejected) -> Response:
        return _error(error)

    @app.get("/healthz")
    async def healthz() -> Response:
        status = "ok" if worker.healthy else "draining" if worker.draining else "broken"
        return JSONResponse({"status": status}, status_code=200 if worker.healthy else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(worker.metrics.text(), media_type="text/plain; version=0.0.4")

    @app.get(MODEL_PATH)
    async def model() -> Response:
        return JSONResponse(worker.info.model_dump())

    @app.get(LOAD_PATH)
    async def load() -> Response:
        return JSONResponse(worker.load().model_dump())

    @app.get(REQUEST_PATH)
    async def access_record(request_id: str) -> Response:
        record = worker.access_log.find(request_id)
        if record is None:
            raise Rejected(404, f"request {request_id[:64]!r} is not (or no longer) in the log", code="not_found")
        return JSONResponse(record)

    @app.post(PREFILL_PATH)
    async def prefill(request: Request) -> Response:
        return await _serve(worker, request, PrefillRequest)

    @app.post(DECODE_PATH)
    async def decode(request: Request) -> Response:
        return await _serve(worker, request, DecodeRequest)

    return app


async def _serve(worker: Worker, request: Request, kind: type[PrefillRequest] | type[DecodeRequest]) -> Response:
    """Read, check, submit, and stream what comes back."""
    body = await _read_body(request)
    try:
        message = kind.model_validate_json(body)
    except ValidationError as error:
        raise Rejected(400, _first_fault(error), code="bad_request") from error
    events: asyncio.Queue[Event] = (
        asyncio.Queue()
    )  # bounded by the request: one event a token, and max_tokens is bounded
    loop = asyncio.get_running_loop()

    def emit(event: Event) -> None:
        try:
            loop.call_soon_threadsafe(events.put_nowait, event)
        except RuntimeError:  # the loop is closed: the server is gone, and with it the client
            log.debug("event_after_close")

    sequence = worker.begin(message, emit)
    return EventLines(_lines(worker, request, events), lambda: worker.cancel(sequence))


class EventLines(StreamingResponse):
    """Lines of events. However the answer ends, and even if it never began, the request is cancelled then."""

    media_type = "application/x-ndjson"

    def __init__(self, lines: AsyncIterator[bytes], cancel: Callable[[], None]) -> None:
        super().__init__(lines)
        self._cancel = cancel

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._cancel()  # harmless once it has ended


async def _lines(worker: Worker, request: Request, events: asyncio.Queue[Event]) -> AsyncIterator[bytes]:
    """Events as lines until the last one, or until nobody listens or works any more."""
    ended = False
    while not ended:
        event: Event | None = None
        with suppress(TimeoutError):
            event = await asyncio.wait_for(events.get(), DISCONNECT_POLL_S)
        if event is None and (worker.broken or await request.is_disconnected()):
            return
        ended = isinstance(event, LAST_EVENTS)
        if not ended and time.monotonic() >= worker.streams_until_s:
            event, ended = OUTLASTED, True
        if event is not None:
            yield event.model_dump_json().encode() + b"\n"


async def _read_body(request: Request) -> bytes:
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_S_MAX):
            async for part in request.stream():
                body += part
                if len(body) > BODY_BYTES_MAX:
                    raise Rejected(413, f"a request has at most {BODY_BYTES_MAX} bytes", code="too_large")
    except TimeoutError as error:
        raise Rejected(408, f"the request's body did not arrive within {BODY_S_MAX:.0f} s", code="timeout") from error
    return bytes(body)


def _first_fault(error: ValidationError) -> str:
    """The first fault by place and kind; never the value, which may be the prompt."""
    fault = error.errors(include_url=False, include_context=False, include_input=False)[0]
    place = ".".join(str(part) for part in fault["loc"][:3]) or "body"
    return f"{place}: {fault['msg']}"


def _error(error: Rejected) -> JSONResponse:
    headers = {} if error.retry_after_s is None else {"retry-after": str(max(1, round(error.retry_after_s)))}
    body = {"error": {"code": error.code, "message": error.message}}
    return JSONResponse(body, status_code=error.status, headers=headers)


class Cuttable:
    """The outermost layer: a request that the end of the drain cuts off is one line in the log, not a traceback."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._app(scope, receive, send)
        except asyncio.CancelledError:
            log.warning("request_cut_off")


class WorkerServer(uvicorn.Server):
    """uvicorn that tells the worker to drain as soon as a signal asks for the end, and that ends when it is broken."""

    def __init__(self, worker: Worker, token: str | None, drain_s: float) -> None:
        self._drain_s = max(1, round(drain_s))
        config = uvicorn.Config(
            Cuttable(create_app(worker, token)),
            log_config=None,
            access_log=False,
            lifespan="off",
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=self._drain_s,
            limit_concurrency=CONNECTIONS_MAX,
            server_header=False,
        )
        super().__init__(config)
        self._worker = worker

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._worker.draining = True
        super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._worker.streams_until_s = time.monotonic() + self._drain_s - LAST_EVENT_S
        await super().shutdown(sockets)

    async def on_tick(self, counter: int) -> bool:
        if self._worker.broken:
            log.error("worker_broken")
            return True
        return await super().on_tick(counter)


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 lets the kernel choose."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=CONNECTIONS_MAX)


def serve(worker: Worker, listener: socket.socket, *, token: str | None, drain_s: float) -> None:
    """Serve until a signal asks for the end, then let requests in flight end within ``drain_s``."""
    server = WorkerServer(worker, token, drain_s)
    for number in stop_signals():  # uvicorn knows nothing of SIGHUP, and raises what stopped it again when it is done
        signal.signal(number, server.handle_exit)
    server.run(sockets=[listener])
