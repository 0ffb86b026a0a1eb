"""The application: services, endpoints and error shapes put together. No globals: each call builds its own.

Owns the lifespan (polling begins with it and ends with it). Does not know sockets, flags or files.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from gateway.access_log import AccessLog
from gateway.classes import ClassNames, PolicySource
from gateway.config import GatewayConfig
from gateway.edge import Edge, Gate, LogLine, print_line
from gateway.errors import GatewayError, error_body
from gateway.fleet import Fleet
from gateway.metrics import Metrics
from gateway.routes import Services, build_router
from gateway.tenants import KeyRing
from gateway.tokens import Tokenizers


def create_app(
    config: GatewayConfig,
    fleet: Fleet,
    *,
    keys: KeyRing | None = None,
    tokenizers: Tokenizers | None = None,
    policy: PolicySource | None = None,
    access_log: AccessLog | None = None,
    log: LogLine = print_line,
    now_s: Callable[[], float] = time.monotonic,
    wall_s: Callable[[], float] = time.time,
) -> FastAPI:
    """The gateway as an ASGI application. Owns all that it is given to use: it is closed with it."""
    services = Services(
        config=config,
        fleet=fleet,
        tokenizers=tokenizers or Tokenizers(),
        keys=keys,
        classes=ClassNames(config.class_names),
        metrics=Metrics(),
        access_log=access_log,
        gate=Gate(config.requests_max, config.tenant_requests_max),
        log=log,
        now_s=now_s,
        wall_s=wall_s,
    )

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(fleet.run()), asyncio.create_task(services.load_tokenizers())]
        if policy is not None:
            tasks.append(asyncio.create_task(services.classes.follow(policy)))
        for task in tasks:
            task.add_done_callback(lambda done: _report(done, log))
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await fleet.aclose()
            services.tokenizers.close()
            if policy is not None:
                policy.close()
            if access_log is not None:
                await asyncio.to_thread(access_log.close)

    app = FastAPI(title="Reprise gateway", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    app.state.services = services
    app.include_router(build_router(services))
    app.add_exception_handler(GatewayError, _gateway_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_middleware(Edge, gate=services.gate, metrics=services.metrics, log=log, now_s=now_s)
    return app


def _report(task: asyncio.Task[None], log: LogLine) -> None:
    """A task of the lifespan ends only by being cancelled; anything else is a fault of ours that must be seen."""
    if not task.cancelled() and (error := task.exception()) is not None:
        log({"event": "fault", "error": repr(error)[:500]})


async def _gateway_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, GatewayError)
    request.state.record.error = error.message
    return JSONResponse(error.body(), error.status, error.headers())


async def _http_error(request: Request, error: Exception) -> JSONResponse:
    """Starlette's own refusals: no such path, another method."""
    assert isinstance(error, HTTPException)
    code = "not_found" if error.status_code == 404 else "method_not_allowed" if error.status_code == 405 else None
    message = f"{request.method} {request.url.path[:128]}: {error.detail}"
    return JSONResponse(error_body(message, "invalid_request_error", code=code), error.status_code, error.headers)
