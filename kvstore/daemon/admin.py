"""HTTP for operators: health, metrics, stats. Serves administration only, never blocks.

    GET /healthz    {"status": "ok"} or 503 while draining; open to all, tells nothing else
    GET /metrics    Prometheus text       (Authorization: Bearer TOKEN of an operator, where the daemon has tokens)
    GET /v1/stats   the store's numbers   (the same)

Owns the endpoint's lifetime. Does not know the data plane, nor tokens: whether one may see is asked of a callable.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import uvicorn
from fastapi import Depends, FastAPI, Header, HTTPException
from fastapi.responses import JSONResponse, Response
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from kvstore.errors import StoreError, Unavailable

START_S_MAX = 10.0

log = logging.getLogger("kvstore.daemon")


def create_app(
    stats: Callable[[], Mapping[str, Any]],
    registry: CollectorRegistry,
    healthy: Callable[[], bool],
    may_see: Callable[[bytes], bool] = lambda token: True,
) -> FastAPI:
    """The application; everything that it shows comes from the callables."""
    app = FastAPI(title="Reprise store", docs_url=None, redoc_url=None, openapi_url=None)

    def authorised(authorization: Annotated[str, Header()] = "") -> None:
        scheme, _, token = authorization.partition(" ")
        if not may_see(token.encode() if scheme == "Bearer" else b""):
            raise HTTPException(
                401, "send an operator's token: Authorization: Bearer ...", {"WWW-Authenticate": "Bearer"}
            )

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

    return app


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
            app, log_level="warning", access_log=False, lifespan="off", timeout_keep_alive=30, limit_concurrency=256
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
        self._thread.join(timeout=3.0)
        self._listener.close()
