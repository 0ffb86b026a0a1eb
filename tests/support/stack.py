"""The whole service on free ports, for end-to-end tests: `reprise up` as a child, requests over public HTTP.

Owns the process and the reading of its state file. Nothing is shared between two stacks.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from tests.support.waiting import WAIT_S

ROOT = Path(__file__).parents[2]
START_S_MAX = 300.0
REQUEST_S_MAX = WAIT_S


@dataclass(slots=True)
class Reply:
    """One answer: text and usage, or the error that ended it."""

    status: int
    text: str = ""
    usage: dict[str, Any] = field(default_factory=dict)
    error: dict[str, Any] | None = None
    request_id: str = ""
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def hit(self) -> int:
        return int(self.usage["prompt_cache_hit_tokens"])

    @property
    def miss(self) -> int:
        return int(self.usage["prompt_cache_miss_tokens"])

    @property
    def prompt(self) -> int:
        return int(self.usage["prompt_tokens"])

    @property
    def reuse(self) -> dict[str, Any]:
        found = self.usage["reprise"]
        assert isinstance(found, dict)
        return found


class Stack:
    """A running `reprise up`."""

    def __init__(self, process: subprocess.Popen[bytes], data: Path, log: Path, key: str | None) -> None:
        self.process = process
        self.data = data
        self.log = log
        self.key = key

    def state(self) -> dict[str, Any]:
        found = json.loads((self.data / "up.json").read_text())
        assert isinstance(found, dict)
        return found

    def child(self, name: str) -> dict[str, Any]:
        found = self.state()["children"][name]
        assert isinstance(found, dict)
        return found

    def pid(self, name: str) -> int:
        pid = self.child(name)["pid"]
        assert isinstance(pid, int), f"{name} is not running"
        return pid

    @property
    def url(self) -> str:
        return str(self.child("gateway")["endpoints"]["url"])

    @property
    def store(self) -> str:
        return f"unix:{self.child('store')['endpoints']['unix']}"

    def wait(self, condition: Callable[[], bool], what: str, wait_s: float = WAIT_S) -> None:
        deadline_s = time.monotonic() + wait_s
        while not condition():
            if self.process.poll() is not None or time.monotonic() > deadline_s:
                raise AssertionError(f"{what}: not within {wait_s} s\n{self.log.read_text()[-4000:]}")
            time.sleep(0.05)

    def is_healthy(self) -> bool:
        try:
            state = self.state()
        except (OSError, ValueError):
            return False
        return state["pid"] == self.process.pid and all(
            child["state"] == "healthy" for child in state["children"].values()
        )

    def kill(self, name: str, *, wait: bool = True) -> None:
        """kill -9 of a child; with ``wait`` until another one is healthy in its place."""
        pid = self.pid(name)
        os.kill(pid, signal.SIGKILL)
        if wait:
            self.wait(lambda: self.is_healthy() and self.pid(name) != pid, f"{name} healthy again")

    @contextmanager
    def nothing_restarts(self) -> Iterator[None]:
        """Inside, the supervisor stands still: what is killed stays dead."""
        os.kill(self.process.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(self.process.pid, signal.SIGCONT)

    # --- requests ---------------------------------------------------------------------------------------------------

    def headers(self, extra: dict[str, str] | None = None) -> dict[str, str]:
        return ({"authorization": f"Bearer {self.key}"} if self.key else {}) | (extra or {})

    def complete(
        self, prompt: str | list[int], *, max_tokens: int = 8, headers: dict[str, str] | None = None, **more: Any
    ) -> Reply:
        """One completion without streaming, greedy."""
        body = {"model": self.model(), "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, **more}
        response = httpx.post(
            f"{self.url}/v1/completions", json=body, headers=self.headers(headers), timeout=REQUEST_S_MAX
        )
        found = response.json()
        reply = Reply(
            response.status_code, request_id=response.headers.get("x-request-id", ""), headers=dict(response.headers)
        )
        if response.status_code == 200:
            reply.text, reply.usage = found["choices"][0]["text"], found["usage"]
        else:
            reply.error = found["error"]
        return reply

    def stream(
        self,
        prompt: str,
        *,
        max_tokens: int = 8,
        headers: dict[str, str] | None = None,
        on_piece: Callable[[int], None] = lambda count: None,
        **more: Any,
    ) -> Reply:
        """One streamed completion; ``on_piece`` is called with the number of pieces so far."""
        body = {
            "model": self.model(),
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **more,
        }
        pieces = 0
        with httpx.stream(
            "POST", f"{self.url}/v1/completions", json=body, headers=self.headers(headers), timeout=REQUEST_S_MAX
        ) as response:
            reply = Reply(response.status_code, request_id=response.headers.get("x-request-id", ""))
            for line in response.iter_lines():
                data = line.removeprefix("data:").strip() if line.startswith("data:") else ""
                if not data or data == "[DONE]":
                    continue
                event = json.loads(data)
                if "error" in event:
                    reply.error = event["error"]
                    break
                reply.usage = event.get("usage") or reply.usage
                text = (event.get("choices") or [{}])[0].get("text") or ""
                if text:
                    reply.text += text
                    pieces += 1
                    on_piece(pieces)
        return reply

    def model(self) -> str:
        response = httpx.get(f"{self.url}/v1/models", headers=self.headers(), timeout=REQUEST_S_MAX)
        return str(response.raise_for_status().json()["data"][0]["id"])

    def reprise(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """A `reprise` command against this stack."""
        return subprocess.run(
            [*reprise_command(), *arguments],
            cwd=ROOT,
            env=environment(),
            capture_output=True,
            text=True,
            timeout=WAIT_S,
        )

    # --- the end ----------------------------------------------------------------------------------------------------

    def processes(self) -> list[psutil.Process]:
        """The supervisor and everything under it."""
        me = psutil.Process(self.process.pid)
        return [me, *me.children(recursive=True)]

    def stop(self, wait_s: float = WAIT_S) -> int:
        """SIGTERM; returns the exit status."""
        self.process.terminate()
        return self.process.wait(wait_s)


def reprise_command() -> list[str]:
    """The ``reprise`` command: that of ``REPRISE`` in an engine's environment, which has neither daemon nor workers."""
    return [os.environ["REPRISE"]] if "REPRISE" in os.environ else [sys.executable, "-m", "ops.cli"]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "NO_COLOR": "1"}


@contextmanager
def running_stack(
    model: Path, data: Path, *, key: str | None = None, arguments: Sequence[str] = (), capacity: str = "256MiB"
) -> Iterator[Stack]:
    """`reprise up` on free ports until the block ends; whatever is then left of it is killed."""
    data.mkdir(parents=True, exist_ok=True)
    log = data / "up.log"
    ports = [word for name in ("store", "admin", "prefill", "decode") for word in (f"--{name}-listen", "127.0.0.1:0")]
    command = [
        *(*reprise_command(), "up", "--data", str(data), "--model", str(model)),
        *("--capacity", capacity, "--listen", "127.0.0.1:0", *ports, "--kv-memory", "64MiB", "--threads", "1"),
        *arguments,
    ]
    with log.open("wb") as output:
        process = subprocess.Popen(command, cwd=ROOT, env=environment(), stdout=output, stderr=subprocess.STDOUT)
    stack = Stack(process, data, log, key)
    tree: list[psutil.Process] = []
    try:
        stack.wait(stack.is_healthy, "the stack healthy", START_S_MAX)
        yield stack
    finally:
        if process.poll() is None:
            tree = stack.processes()
            process.send_signal(signal.SIGCONT)
            process.terminate()
            try:
                process.wait(45)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(10)
        for left in tree:
            if left.is_running() and left.pid != process.pid:
                left.kill()
