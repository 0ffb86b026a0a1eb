"""A gateway on a real loopback port in front of fake workers, for tests."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import uvicorn

from gateway.access_log import AccessLog
from gateway.app import create_app
from gateway.config import GatewayConfig
from gateway.fleet import Fleet
from gateway.tenants import load_keys
from tests.support.fake_worker import FakeWorker, Memory
from tests.support.waiting import WAIT_S


@dataclass(slots=True)
class Stack:
    """A running gateway with its workers and the lines that it logged."""

    url: str
    prefill: list[FakeWorker]
    decode: list[FakeWorker]
    lines: list[dict[str, Any]] = field(default_factory=list)

    def client(self, **headers: str) -> httpx.Client:
        # Plain HTTP: without ``verify=False`` every client would read the machine's certificates first.
        return httpx.Client(base_url=self.url, timeout=WAIT_S, headers=headers, trust_env=False, verify=False)

    def line(self, request_id: str) -> dict[str, Any]:
        """The log line of a request; it is written just after the last byte."""
        return wait_for(lambda: next((line for line in self.lines if line.get("request_id") == request_id), None))


def wait_for(probe: Any, wait_s_max: float = WAIT_S) -> Any:
    """The first true value of a probe."""
    until_s = time.monotonic() + wait_s_max
    while time.monotonic() < until_s:
        found = probe()
        if found:
            return found
        time.sleep(0.01)
    raise AssertionError("it did not come true in time")


@contextlib.contextmanager
def running_stack(
    directory: Path,
    *,
    prefill_workers: int = 1,
    decode_workers: int = 1,
    keys: Path | None = None,
    wait: bool = True,
    access_log: AccessLog | None = None,
    **settings: Any,
) -> Iterator[Stack]:
    """Start workers and a gateway over a tokenizer directory; stop them all at the end."""
    memory = Memory()
    workers = [FakeWorker("prefill", directory, memory).start() for _ in range(prefill_workers)]
    decoders = [FakeWorker("decode", directory, memory).start() for _ in range(decode_workers)]
    config = GatewayConfig(
        prefill=tuple(worker.url for worker in workers),
        decode=tuple(worker.url for worker in decoders),
        keys=None if keys is None else str(keys),
        poll_s=0.05,
        **settings,
    )
    fleet = Fleet.open(
        config.prefill,
        config.decode,
        token=None,
        event_s=WAIT_S,
        now_s=time.monotonic,
        poll_s=config.poll_s,
        stalled_s=config.stalled_s_max,
    )
    stack = Stack("", workers, decoders)
    app = create_app(
        config,
        fleet,
        keys=None if keys is None else load_keys(keys, config.class_names),
        access_log=access_log,
        log=stack.lines.append,
    )
    server = uvicorn.Server(
        uvicorn.Config(app, host="127.0.0.1", port=0, log_level="critical", timeout_graceful_shutdown=1)
    )
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        wait_for(lambda: server.started)
        stack.url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
        if wait:
            with stack.client() as client:
                wait_for(lambda: client.get("/healthz").status_code == 200)
        yield stack
    finally:
        server.should_exit = server.force_exit = True
        thread.join(WAIT_S)
        for worker in (*workers, *decoders):
            worker.stop()
        assert not thread.is_alive(), "the gateway did not stop"


def chat(text: str = "Hi", **fields: Any) -> dict[str, Any]:
    """A chat body."""
    return {"model": "tiny", "messages": [{"role": "user", "content": text}], "temperature": 0} | fields
