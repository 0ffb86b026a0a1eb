"""The worker as a process: how it starts, what it prints, and how it ends."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.checkpoints import checkpoint
from workers.client import WorkerClient
from workers.protocol import DecodeRequest, Finished, FirstToken, PrefillRequest

START_S_MAX = 300.0
PROMPT = [4 + (7 * index + index // 5) % 250 for index in range(150)]
NOBODY = "127.0.0.1:9"


def command(data: Path, *options: str) -> list[str]:
    return [
        sys.executable, "-m", "workers", "--role", "both", "--model", str(checkpoint("llama")), "--store", NOBODY,
        "--data", str(data), "--kv-memory", "16MiB", "--threads", "1", *options,
    ]  # fmt: skip


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    """A worker whose store is not there, and its endpoints.json."""
    process = subprocess.Popen(
        command(tmp_path),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # the tests may run under nohup
    )
    try:
        ends_s = time.monotonic() + START_S_MAX
        while not (tmp_path / "endpoints.json").exists():
            assert process.poll() is None, process.stdout.read() if process.stdout else ""
            assert time.monotonic() < ends_s
            time.sleep(0.05)
        yield process, json.loads((tmp_path / "endpoints.json").read_text())
    finally:
        process.kill()
        process.communicate(timeout=START_S_MAX)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_worker_without_a_store_serves_and_drains_on_a_signal(
    worker: tuple[subprocess.Popen[str], dict[str, Any]], number: signal.Signals
) -> None:
    """The store is down from the start: requests are served, all miss. The signal in mid-answer: the answer is
    finished, then the process ends with 0, having said one JSON line when it was healthy."""
    process, endpoints = worker
    assert endpoints["pid"] == process.pid
    asyncio.run(_use_and_stop(process, endpoints["listen"], number))
    assert process.wait(30) == 0
    assert process.stdout is not None
    lines = [json.loads(line) for line in process.stdout.read().splitlines()]
    ready = [line for line in lines if line["event"] == "worker_ready"]
    assert len(ready) == 1
    assert ready[0]["address"] == endpoints["listen"]
    assert ready[0]["load_s"] > 0
    assert lines[-1]["event"] == "worker_stopped"


async def _use_and_stop(process: subprocess.Popen[str], address: str, number: signal.Signals) -> None:
    async with WorkerClient.open(address) as client:
        assert await client.healthy()
        events = [
            event async for event in client.prefill(PrefillRequest(request_id="r", tokens=PROMPT, traffic_class=2))
        ]
        first = events[0]
        assert isinstance(first, FirstToken)
        assert (first.reuse.hit_tokens, first.reuse.reason) == (0, "unreachable")
        stream = client.decode(
            DecodeRequest(
                request_id="r", tokens=[*PROMPT, first.token], traffic_class=2, prompt_tokens=150, max_tokens=300
            )
        )
        await anext(stream)
        process.send_signal(number)
        rest = [event async for event in stream]
        assert isinstance(rest[-1], Finished)
        assert len(rest) == 300


def test_an_address_that_is_taken_is_no_wrong_option(tmp_path: Path) -> None:
    """It may be free later: status 1, so that a supervisor tries again."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        ended = subprocess.run(
            command(tmp_path, "--listen", address), capture_output=True, text=True, timeout=START_S_MAX, check=False
        )
    assert ended.returncode == 1, ended.stderr
    assert f"cannot listen on {address}" in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize(
    ("options", "status", "words"),
    [
        (["--kv-memory", "lots"], 2, "kv_memory"),
        (["--listen", "0.0.0.0:0"], 2, "--token-file"),
        (["--token-file", "/nonexistent/token"], 2, "token"),
        (["--model", "/nonexistent"], 3, "neither a demo model"),
    ],
)
def test_wrong_options_end_at_once_and_say_why(tmp_path: Path, options: list[str], status: int, words: str) -> None:
    """One line on stderr that names the option, and an exit status that tells configuration from model."""
    ended = subprocess.run(
        command(tmp_path, *options),
        capture_output=True,
        text=True,
        timeout=START_S_MAX,
        env=dict(os.environ),
        check=False,
    )
    assert ended.returncode == status, ended.stderr
    assert words in ended.stderr
    assert "Traceback" not in ended.stderr
