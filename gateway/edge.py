"""The outermost layer of every request: its id, its canonical log line, the bound on requests at once, the last catch.

Owns what happens before routing and after the last byte. Does not know completions. Invariants: every answer carries an
``x-request-id`` of ours; one line a request, without token text or ids; a fault of ours is a 500 in OpenAI's shape.
"""

from __future__ import annotations

import json
import re
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.errors import ClientGone, GatewayError, NoCapacity, TenantBusy, error_body
from gateway.metrics import Metrics

LogLine = Callable[[dict[str, Any]], None]
CLIENT_GONE_STATUS = 499
_CLIENT_ID = re.compile(r"[A-Za-z0-9_.:-]{1,128}\Z")
_ROUTES = re.compile(r"/(v1/(chat/completions|completions|models)|healthz|metrics)\Z")


@dataclass(slots=True)
class Record:
    """One request, as its log line will tell it. ``fields`` are added on the way."""

    request_id: str
    began_s: float
    status: int = 0
    traffic_class: str = ""
    error: str | None = None
    tenant: str | None = None
    fields: dict[str, Any] = field(default_factory=dict)


class Gate:
    """How many requests may be in work at once. Full: refused with Retry-After. Draining: refused."""

    def __init__(self, requests_max: int, tenant_requests_max: int) -> None:
        self.requests_max = requests_max
        self.tenant_requests_max = tenant_requests_max
        self.draining = False
        self.in_flight = 0
        self.by_tenant: dict[str, int] = {}

    def enter(self) -> None:
        """Count one more request. Raises NoCapacity."""
        if self.draining:
            raise NoCapacity("this gateway is shutting down", code="draining", retry_after_s=5.0)
        if self.in_flight >= self.requests_max:
            raise NoCapacity(
                f"{self.in_flight} requests are in work, the most allowed", code="overloaded", retry_after_s=1.0
            )
        self.in_flight += 1

    def leave(self) -> None:
        self.in_flight -= 1

    def enter_tenant(self, tenant: str) -> None:
        """Count one more request of a key's tenant. Raises TenantBusy."""
        count = self.by_tenant.get(tenant, 0)
        if count >= self.tenant_requests_max:
            raise TenantBusy(f"{count} requests of this key's tenant are in work, the most allowed", retry_after_s=1.0)
        self.by_tenant[tenant] = count + 1

    def leave_tenant(self, tenant: str) -> None:
        count = self.by_tenant.pop(tenant) - 1
        if count:
            self.by_tenant[tenant] = count


class Edge:
    """ASGI middleware around the whole application."""

    def __init__(self, app: ASGIApp, *, gate: Gate, metrics: Metrics, log: LogLine, now_s: Callable[[], float]) -> None:
        self._app = app
        self._gate = gate
        self._metrics = metrics
        self._log = log
        self._now_s = now_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record = Record(request_id=f"req-{uuid4().hex}", began_s=self._now_s())
        client_id = Headers(scope=scope).get("x-request-id", "")
        if _CLIENT_ID.match(client_id):
            record.fields["client_request_id"] = client_id
        scope.setdefault("state", {})["record"] = record
        started = False

        async def stamped(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                record.status = message["status"]
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = record.request_id
                if "client_request_id" in record.fields:
                    headers["x-client-request-id"] = record.fields["client_request_id"]
            await send(message)

        try:
            await self._bounded(scope, receive, stamped)
        except (ClientGone, ClientDisconnect) as error:
            self._metrics.client_gone()
            record.status, record.error = CLIENT_GONE_STATUS, str(error) or "the client closed the connection"
        except Exception as error:  # seam: a fault of ours must not reach the client as a traceback
            record.status, record.error = 500, f"fault: {type(error).__name__}"
            traceback.print_exc(file=sys.stderr)
            if not started:
                body = error_body("the gateway failed; its log has the details", "server_error", code="internal_error")
                await JSONResponse(body, status_code=500)(scope, receive, stamped)
        finally:
            self._close(scope, record)

    async def _bounded(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        try:
            self._gate.enter()
        except GatewayError as error:
            await JSONResponse(error.body(), error.status, error.headers() | {"connection": "close"})(
                scope, receive, send
            )
            return
        self._metrics.in_flight(self._gate.in_flight)
        try:
            await self._app(scope, receive, send)
        finally:
            self._gate.leave()
            tenant = scope["state"]["record"].tenant
            if tenant is not None:
                self._gate.leave_tenant(tenant)
            self._metrics.in_flight(self._gate.in_flight)

    def _close(self, scope: Scope, record: Record) -> None:
        route = scope["path"] if _ROUTES.match(scope["path"]) else "other"
        duration_s = self._now_s() - record.began_s
        self._metrics.answered(route, record.status, record.traffic_class, duration_s)
        if route in ("/healthz", "/metrics"):
            return  # probes would drown the log
        line = {"event": "request", "request_id": record.request_id, "method": scope["method"], "route": route}
        line |= {"status": record.status, "duration_s": round(duration_s, 6)} | record.fields
        if record.traffic_class:
            line["traffic_class"] = record.traffic_class
        if record.error is not None:
            line["error"] = record.error[:300]
        self._log(line)


def print_line(line: dict[str, Any]) -> None:
    """The log of a process: one JSON object a line on standard error."""
    with suppress(OSError):  # the terminal may be gone; answers in work are finished all the same
        print(json.dumps({"time_s": round(time.time(), 3)} | line, ensure_ascii=False), file=sys.stderr, flush=True)
