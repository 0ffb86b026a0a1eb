"""vLLM's API server as a child process, on a socket in a folder: started as README says, asked over HTTP, killed.

Owns the process. Runs with the Python of vLLM's environment. Invariant: every wait has a bound.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).parents[2]
START_S_MAX = 180.0
REQUEST_S_MAX = 120.0
STOP_S = 15.0
MODEL = "demo"
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_SERVER_DEV_MODE": "1",  # lets ``forget`` be asked
}


def readme_config(store: str) -> dict[str, Any]:
    """The ``kv-transfer-config`` that README tells newcomers to write, for another store's address, without a log."""
    found = re.search(r"--kv-transfer-config '(\{[^']*RepriseConnector[^']*\})'", (ROOT / "README.md").read_text())
    assert found is not None, "README shows no --kv-transfer-config"
    config: dict[str, Any] = json.loads(found.group(1))
    config["kv_connector_extra_config"]["store"] = store
    del config["kv_connector_extra_config"]["access_log"]
    return config


@dataclass(frozen=True, slots=True)
class Completion:
    """An answer, and how many tokens of its prompt vLLM says it did not compute."""

    id: str
    text: str
    tokens: list[int]
    prompt_tokens: int
    cached_tokens: int


class VllmServer:
    """One API server. ``begin`` starts it, ``kill`` is a crash; it may be begun again."""

    def __init__(self, folder: Path, model: Path, config: dict[str, Any], options: tuple[str, ...] = ()) -> None:
        self._socket = folder / "api"
        self._log = folder / "api.log"
        self._command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
        self._command += ["--served-model-name", MODEL, "--dtype", "float32", "--enforce-eager"]
        self._command += ["--enable-prompt-tokens-details", "--uds", str(self._socket)]
        self._command += ["--kv-transfer-config", json.dumps(config), *options]
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def log(self) -> str:
        """What it printed."""
        return self._log.read_text(errors="replace")

    def begin(self) -> None:
        """Start it, and wait until it is healthy."""
        self._socket.unlink(missing_ok=True)
        environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": str(ROOT)}
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command, cwd=ROOT, env=environment, stdout=log, stderr=log, start_new_session=True
            )
        ends_s = time.monotonic() + START_S_MAX
        while not self._is_healthy():
            if self._process.poll() is not None or time.monotonic() > ends_s:
                raise AssertionError(f"vLLM did not start\n{self.log[-3000:]}")
            time.sleep(0.1)

    def complete(
        self, prompt: str | Sequence[int], *, answer: int = 8, params: Mapping[str, Any] | None = None
    ) -> Completion:
        """One greedy completion of a text, or of token ids. ``params``: its ``kv_transfer_params``."""
        body = {"model": MODEL, "prompt": prompt, "max_tokens": answer, "temperature": 0, "ignore_eos": True}
        body["return_token_ids"] = True
        if params is not None:
            body["kv_transfer_params"] = dict(params)
        with self._client() as client:
            found = client.post("/v1/completions", json=body).raise_for_status().json()
        usage = found["usage"]
        cached = (usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0
        (choice,) = found["choices"]
        return Completion(found["id"], choice["text"], choice["token_ids"], usage["prompt_tokens"], cached)

    def forget(self) -> None:
        """Empty vLLM's own prefix cache; what is stored stays."""
        with self._client() as client:
            client.post("/reset_prefix_cache").raise_for_status()

    def metric(self, name: str) -> float:
        """The sum of a counter over its labels."""
        with self._client() as client:
            lines = client.get("/metrics").raise_for_status().text.splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith((f"{name}{{", f"{name} ")))

    def kill(self) -> None:
        """As a crash of the host does: the API server and its engine, which is a process that outlives it."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(STOP_S)
        self._process = None

    def _client(self) -> httpx.Client:
        transport = httpx.HTTPTransport(uds=str(self._socket))
        return httpx.Client(transport=transport, base_url="http://vllm", timeout=REQUEST_S_MAX)

    def _is_healthy(self) -> bool:
        if not self._socket.exists():
            return False
        try:
            with self._client() as client:
                return client.get("/health").status_code == 200
        except httpx.TransportError:
            return False
