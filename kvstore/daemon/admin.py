"""HTTP for operators: health, metrics, stats. Serves administration only, never blocks.

    GET /healthz    {"status": "ok"} or 503 while draining; open to all, tells nothing else
    GET /metrics    Prometheus text       (Authorization: Bearer TOKEN of an operator, where the daemon has tokens)
    GET /v1/stats   the store's numbers   (the same)
    GET /v1/events  what becomes of blocks, one JSON document a line, from now on or after ?epoch=E&after=N; it goes on
                    until the reader leaves, or with ?follow=false ends with the latest   (TOKEN of a reader)

Owns the endpoint's lifetime. Does not know the data plane, nor tokens: whether one may see is asked of a callable.
Invariant: a reader of events that does not keep up finds a gap, and costs what one connection costs.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import uvicorn
from fastapi import Depends, FastAPI, Header, HTTPException, Query
from fastapi.responses import JSONResponse, Response, StreamingResponse
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from kvstore.daemon.events import EventLog, event_json, gap_json
from kvstore.errors import StoreError, Unavailable
from kvstore.keys import Space, SpaceId
from kvstore.limits import EVENTS_ALIVE_S, EVENTS_POLL_S
from kvstore.traffic import ClassRules

START_S_MAX = 10.0
STOP_S_MAX = 2.0
_BEHIND = "the reader did not keep up, or the change could not be told"

log = logging.getLogger("kvstore.daemon")


@dataclass(frozen=True, slots=True)
class EventFeed:
    """Where events come from, the names that they are told with, and who may hear of them: the keys of all tenants."""

    log: EventLog
    rules: Callable[[], ClassRules]
    spaces: Callable[[], Mapping[SpaceId, Space]]
    may_follow: Callable[[bytes], bool] = lambda token: True


def create_app(
    stats: Callable[[], Mapping[str, Any]],
    registry: CollectorRegistry,
    healthy: Callable[[], bool],
    feed: EventFeed,
    may_see: Callable[[bytes], bool] = lambda token: True,
) -> FastAPI:
    """The application; everything that it shows comes from the callables."""
    app = FastAPI(title="Reprise store", docs_url=None, redoc_url=None, openapi_url=None)

    def require(may: Callable[[bytes], bool], whose: str, authorization: str) -> None:
        scheme, _, token = authorization.partition(" ")
        if not may(token.encode() if scheme == "Bearer" else b""):
            raise HTTPException(401, f"send {whose} token: Authorization: Bearer ...", {"WWW-Authenticate": "Bearer"})

    def authorised(authorization: Annotated[str, Header()] = "") -> None:
        require(may_see, "an operator's", authorization)

    def may_follow(authorization: Annotated[str, Header()] = "") -> None:
        require(feed.may_follow, "a reader's", authorization)

    @app.get("/healthz")
    def healthz() -> JSONResponse:
        ok = healthy()
        return JSONResponse({"status": "ok" if ok else "draining"}, 200 if ok else 503)

    @app.get("/metrics", dependencies=[Depends(authorised)])
    def metrics() -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    @app.get("/v1/stats", dependencies=[Depends(authorised)])
    def show_stats() -> JSONResponse:
        try:
            return JSONResponse(dict(stats()))
        except StoreError as error:
            raise HTTPException(503, str(error)) from error

    @app.get("/v1/events", dependencies=[Depends(may_follow)])
    def events(
        epoch: Annotated[str, Query(max_length=64)] = "",
        after: Annotated[int, Query(ge=0, le=2**63 - 1)] = 0,
        follow: bool = True,
    ) -> StreamingResponse:
        if not feed.log.has_room:
            raise HTTPException(503, "as many as may listen to the events of this node do already")
        lines = _event_lines(feed, epoch, after, lambda: follow and healthy())
        return StreamingResponse(lines, media_type="application/x-ndjson")

    return app


async def _event_lines(feed: EventFeed, epoch: str, after: int, goes_on: Callable[[], bool]) -> AsyncIterator[bytes]:
    """What one reader is sent. It waits for the reader only here, and holds one page of events meanwhile."""
    with feed.log.listening():
        here = feed.log.position()
        told = here.newest if goes_on() else here.oldest - 1
        if epoch == here.epoch and after <= here.newest:
            told = after
        elif epoch:
            yield _line(gap_json(here.epoch, told, None, "another epoch: the node began anew, or nobody listened long"))
        yield _line({"event": "begin", "epoch": here.epoch, "sequence": told})
        spoke_s = time.monotonic()
        while True:
            page = feed.log.after(told)
            for event in page.events:
                if event.sequence > told + 1:
                    yield _line(gap_json(here.epoch, event.sequence - 1, event.sequence - 1 - told, _BEHIND))
                yield _line(event_json(event, here.epoch, feed.rules(), feed.spaces()))
                told, spoke_s = event.sequence, time.monotonic()
            if page.events:
                continue
            if page.newest > told:
                yield _line(gap_json(here.epoch, page.newest, page.newest - told, _BEHIND))
                told = page.newest
            if not goes_on():
                return
            if time.monotonic() - spoke_s > EVENTS_ALIVE_S:
                yield _line({"event": "alive", "epoch": here.epoch, "sequence": told})
                spoke_s = time.monotonic()
            await asyncio.sleep(EVENTS_POLL_S)


def _line(document: Mapping[str, Any]) -> bytes:
    return json.dumps(document, separators=(",", ":")).encode() + b"\n"


class AdminServer:
    """uvicorn on a thread. ``start`` makes one; ``stop`` ends it."""

    def __init__(self, server: uvicorn.Server, listener: socket.socket, thread: threading.Thread) -> None:
        self._server = server
        self._listener = listener
        self._thread = thread

    @classmethod
    def start(cls, app: FastAPI, host: str, port: int) -> AdminServer:
        """Bind and serve. Raises OSError for a taken address, Unavailable if it does not come up."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((host, port))
        except OSError as error:
            listener.close()
            raise OSError(f"the admin endpoint cannot listen on {host}:{port}: {error.strerror}") from error
        config = uvicorn.Config(
            app,
            log_level="warning",
            access_log=False,
            lifespan="off",
            timeout_keep_alive=30,
            limit_concurrency=256,
            timeout_graceful_shutdown=int(STOP_S_MAX),
        )
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, name="store-admin", daemon=True)
        thread.start()
        ends_s = time.monotonic() + START_S_MAX
        while not server.started:
            if not thread.is_alive() or time.monotonic() > ends_s:
                raise Unavailable("the admin endpoint did not start; see the log")
            time.sleep(0.01)
        return cls(server, listener, thread)

    @property
    def address(self) -> str:
        host, port = self._listener.getsockname()[:2]
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join(timeout=STOP_S_MAX + 1.0)
        self._listener.close()
