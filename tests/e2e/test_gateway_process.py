"""The gateway as a process: it says when it is healthy, where it listens, and drains when it is to stop."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.byte_tokenizer import EOS, byte_ids, write_tokenizer
from tests.support.fake_worker import FakeWorker, Memory
from tests.support.gateway_stack import chat, wait_for
from tests.support.waiting import WAIT_S

TEXT = "0123456789" * 12


class Process:
    """``python -m gateway`` with its log lines."""

    def __init__(self, arguments: list[str]) -> None:
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        self.child = subprocess.Popen(
            [sys.executable, "-m", "gateway", *arguments],
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
            preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # the tests may run under nohup
        )
        self.lines: list[dict[str, Any]] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.child.stderr is not None
        for line in self.child.stderr:
            self.lines.append(json.loads(line) if line.startswith("{") else {"event": "not JSON", "text": line})

    def line(self, event: str) -> dict[str, Any]:
        return wait_for(lambda: next((line for line in self.lines if line["event"] == event), None))

    def stop(self) -> None:
        self.child.kill()
        self.child.wait(WAIT_S)
        self._reader.join(WAIT_S)
        assert self.child.stderr is not None
        self.child.stderr.close()


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[list[FakeWorker]]:
    directory = write_tokenizer(tmp_path / "model")
    memory = Memory()
    running = [FakeWorker(role, directory, memory).start() for role in ("prefill", "decode")]
    ids = [*byte_ids(TEXT), EOS]
    for worker in running:
        worker.behaviour.answer = lambda prompt: ids
        worker.behaviour.delay_s = 0.01
    yield running
    for worker in running:
        worker.stop()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_healthy_line_endpoints_and_drain(workers: list[FakeWorker], tmp_path: Path, number: signal.Signals) -> None:
    """Port 0 is told in endpoints.json; after the signal the answer in progress is completed and the exit is 0."""
    data = tmp_path / "data"
    process = Process(
        ["--prefill", workers[0].url, "--decode", workers[1].url, "--listen", "127.0.0.1:0", "--data", str(data)]
    )
    try:
        healthy = process.line("gateway_ready")
        endpoints = json.loads((data / "endpoints.json").read_text())
        assert healthy["url"] == endpoints["url"] == f"http://{endpoints['listen']}"
        assert healthy["models"] == ["tiny"]
        assert "loopback only" in healthy["access"]
        told = [line["event"] for line in process.lines]
        assert [event for event in told if event != "gateway_waiting"] == ["gateway_ready"], "a slow start is told of"
        with httpx.Client(base_url=healthy["url"], timeout=WAIT_S, trust_env=False, verify=False) as client:
            assert client.get("/healthz").status_code == 200
            with client.stream("POST", "/v1/chat/completions", json=chat(stream=True)) as answer:
                lines = answer.iter_lines()
                next(lines)
                process.child.send_signal(number)
                rest = "".join(lines)
            assert rest.endswith("data: [DONE]")
        assert process.child.wait(WAIT_S) == 0
        process.line("gateway_stopped")
        assert not (data / "endpoints.json").exists()
        assert not [line for line in process.lines if line["event"] == "not JSON"]
    finally:
        process.stop()
