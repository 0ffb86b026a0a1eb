"""The listening process: socket, uvicorn, the healthy line, endpoints.json, the drain.

Owns what happens between a finished configuration and the end of the process. Does not know requests. Invariants: the
address is written only once the socket listens; SIGTERM, SIGINT and SIGHUP (not under nohup) refuse new requests,
let those in work finish within ``drain_s``, and exit with 0.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import FrameType

import uvicorn

from gateway.access_log import AccessLog
from gateway.app import create_app
from gateway.classes import PolicySource
from gateway.config import GatewayConfig
from gateway.edge import LogLine
from gateway.errors import CannotListen, ConfigError
from gateway.fleet import Fleet
from gateway.routes import Services
from gateway.tenants import KeyRing
from kvstore.access import is_loopback
from kvstore.signals import stop_signals

BACKLOG = 1024
CONNECTIONS_MAX = 4096
"""Connections at once; the next is answered with 503 by the HTTP server itself."""
KEEP_ALIVE_S = 30
ENDPOINTS_FILE = "endpoints.json"
WAITING_S = 10.0
"""After this long without usable workers the log says which are missing."""


class DrainingServer(uvicorn.Server):
    """uvicorn that tells the gate when it begins to stop, and the log when the gateway can serve."""

    def __init__(self, config: uvicorn.Config, *, services: Services, url: str, note: str) -> None:
        super().__init__(config)
        self._services = services
        self._url = url
        self._note = note
        self._announcer: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._announcer = asyncio.create_task(self._announce())

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._announcer is not None:
            self._announcer.cancel()
        await super().shutdown(sockets)
        self._services.log({"event": "gateway_stopped"})

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._services.gate.draining = True
        super().handle_exit(sig, frame)

    async def _announce(self) -> None:
        """One line when a model can be served; before that, one line if it takes long."""
        loop = asyncio.get_running_loop()
        began_s, told = loop.time(), False
        while not (models := self._services.ready_models()):
            if not told and loop.time() - began_s > WAITING_S:
                missing = [worker.url for worker in self._services.fleet.workers if not worker.usable]
                self._services.log({"event": "gateway_waiting", "url": self._url, "missing": missing})
                told = True
            await asyncio.sleep(0.1)
        self._services.log({"event": "gateway_ready", "url": self._url, "models": models, "access": self._note})


def serve(
    config: GatewayConfig,
    *,
    keys: KeyRing | None,
    policy: PolicySource | None,
    worker_token: str | None,
    now_s: Callable[[], float],
    log: LogLine,
) -> None:
    """Run until a signal. Raises ConfigError, or CannotListen when the address cannot be had."""
    fleet = Fleet.open(
        config.prefill,
        config.decode,
        token=worker_token,
        event_s=max(config.prefill_s_max, config.event_s_max),
        now_s=now_s,
        poll_s=config.poll_s,
        stalled_s=config.stalled_s_max,
    )
    app = create_app(config, fleet, keys=keys, policy=policy, access_log=_access_log(config), log=log, now_s=now_s)
    listener = _listen(*config.address)
    url = _url(listener)
    note = f"{len(keys)} API keys" if keys is not None else "no API keys: loopback only"
    settings = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        lifespan="on",
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=max(1, round(config.drain_s)),
        limit_concurrency=CONNECTIONS_MAX,
        ws="none",
    )
    server = DrainingServer(settings, services=app.state.services, url=url, note=note)
    with listener, _endpoints(config.data, url), _stopped_by_signals(server):
        server.run(sockets=[listener])


def _access_log(config: GatewayConfig) -> AccessLog | None:
    """Raises ConfigError."""
    if config.access_log is None:
        return None
    try:
        return AccessLog.open(Path(config.access_log))
    except OSError as error:
        raise ConfigError(f"--access-log: cannot write {config.access_log}: {error.strerror}") from error


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        if host == "localhost" and not is_loopback(str(address[0])):
            raise ConfigError(f"localhost means {address[0]} here, which is not loopback")
        with ExitStack() as unless_listening:
            listener = unless_listening.enter_context(socket.socket(family, kind, protocol))
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(BACKLOG)
            unless_listening.pop_all()
    except OSError as error:
        raise CannotListen(f"cannot listen on {host}:{port}: {error.strerror or error}") from error
    return listener


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


@contextmanager
def _endpoints(data: str | None, url: str) -> Iterator[None]:
    """Write the chosen address into the data directory; take it away at the end."""
    if data is None:
        yield
        return
    path = Path(data) / ENDPOINTS_FILE
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_suffix(f".{os.getpid()}.tmp")
        draft.write_text(json.dumps({"listen": url.removeprefix("http://"), "url": url, "pid": os.getpid()}) + "\n")
        draft.replace(path)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error
    try:
        yield
    finally:
        with suppress(OSError):
            path.unlink()


@contextmanager
def _stopped_by_signals(server: DrainingServer) -> Iterator[None]:
    """uvicorn knows nothing of SIGHUP, and raises what stopped it once more at its end: that then asks for nothing new,
    and the exit is 0.
    """
    before = {number: signal.signal(number, server.handle_exit) for number in stop_signals()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
