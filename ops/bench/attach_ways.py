"""The ways in which vLLM is attached to a store or not, and engines that run so, each in a process of its own.

Owns what vLLM is told (options, ``kv-transfer-config``, environment) and the life of the processes. Does not know
prompts. Invariants: all ways get the same options; an engine's death is by ``kill``, so that nothing that it holds
outlives it; every wait is bounded.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvstore.client import StoreClient
from kvstore.limits import GIB
from ops.bench.baselines import drop_cache
from ops.bench.child import STOP_S, ChildFailed, heard, stop, tell
from ops.bench.served import StoreProcess

ROOT = Path(__file__).parents[2]
READY_S = 240.0
ASK_S = 330.0
QUIET_S = 0.3
"""Saves are over when the store has taken nothing for so long."""
SETTLE_S = 20.0
LOG_SHOWN = 700
BARE, EXAMPLE, REPRISE = "no connector", "ExampleConnector", "reprise"
WAYS = (BARE, EXAMPLE, REPRISE)
"""Nothing; the connector to local disk that vLLM ships; ours."""

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TORCHDYNAMO_DISABLE": "1",  # a compiler run of half a minute in the first request says nothing of a store
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine in the process that is timed
    "VLLM_NO_USAGE_STATS": "1",
}
"""What vLLM is told by its environment; the first number is GiB of KV memory."""


class EngineMissing(Exception):
    """There is no vLLM where it was looked for; the message says how to get it."""


def check(python: Path) -> dict[str, str]:
    """Versions of vLLM and of what it stands on. Raises EngineMissing."""
    names = ("vllm-cpu", "vllm", "torch", "transformers")
    program = (
        "import importlib.metadata as m, json\n"
        "def of(name):\n"
        "    try: return m.version(name)\n"
        "    except m.PackageNotFoundError: return ''\n"
        f"print(json.dumps({{name: of(name) for name in {names!r}}}))"
    )
    try:
        done = subprocess.run([python, "-c", program], capture_output=True, text=True, timeout=60)
        found = {name: number for name, number in json.loads(done.stdout).items() if number}
    except (OSError, ValueError, subprocess.TimeoutExpired):
        found = {}
    if not {"vllm", "vllm-cpu"} & set(found):
        raise EngineMissing(
            f"{python} has no vLLM: `make test-engines` makes .venv-vllm in Reprise's folder, or name another Python "
            "that has it and ops/engines/requirements-vllm.txt with --vllm-python"
        )
    return found


@dataclass(frozen=True, slots=True)
class Way:
    """``connector``: the ``kv-transfer-config``, None without one. ``folder``: where what it saves lies on disk.

    ``settle`` waits until what an engine saved has arrived. ``pids``: processes that serve the engines.
    """

    name: str
    connector: Mapping[str, Any] | None
    folder: Path | None
    settle: Callable[[], None]
    pids: Callable[[], Sequence[int]] = tuple

    def chill(self) -> None:
        """Drop what it saved from the page cache."""
        if self.folder is not None:
            drop_cache(self.folder)


def options_of(directory: Path, context_tokens: int) -> dict[str, Any]:
    """What every engine is told, as keyword arguments of ``vllm.LLM``.

    A whole prompt is one step: the example connector saves only the part of a prompt that its first step computes.
    """
    return {
        "model": str(directory),
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": context_tokens,
        "max_num_batched_tokens": context_tokens,
        "max_num_seqs": 4,
        "seed": 0,
    }


@contextmanager
def ways(folder: Path, capacity_bytes: int = 8 * GIB) -> Iterator[dict[str, Way]]:
    """All ways by name, with a store daemon of its own for ours; its folder is removed at the end."""
    example = folder / "example"
    example.mkdir(parents=True)
    store = StoreProcess.start(folder / "store", capacity_bytes)
    client = StoreClient.connect([store.unix])
    try:
        yield {
            BARE: Way(BARE, None, None, lambda: None),
            EXAMPLE: Way(
                EXAMPLE,
                {
                    "kv_connector": "ExampleConnector",
                    "kv_role": "kv_both",
                    "kv_connector_extra_config": {"shared_storage_path": str(example)},
                },
                example,
                lambda: None,
            ),
            REPRISE: Way(
                REPRISE, reprise_config(store.unix), store.folder / "data", lambda: _quiet(client), store.pids
            ),
        }
    finally:
        client.close()
        store.end()
        shutil.rmtree(folder, ignore_errors=True)


def reprise_config(address: str) -> dict[str, Any]:
    """The ``kv-transfer-config`` by which vLLM loads our connector; a load that fails is computed."""
    return {
        "kv_connector": "RepriseConnector",
        "kv_connector_module_path": "workers.adapters.vllm_connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"store": address},
    }


def _quiet(client: StoreClient) -> None:
    ends_s = time.monotonic() + SETTLE_S
    since_s, before = time.monotonic(), -1
    while time.monotonic() < ends_s and time.monotonic() - since_s < QUIET_S:
        if (now := int(client.stats()["puts"])) != before:
            since_s, before = time.monotonic(), now
        time.sleep(0.02)


class EngineProcess:
    """One engine. ``begin`` starts it, ``wait_ready`` must follow; ``kill`` ends it as a crash does."""

    def __init__(self, way: Way, python: Path, options: Mapping[str, Any], log: Path) -> None:
        self.way = way
        self._command = [str(python), "-m", "ops.bench.attach_engine"]
        self._told = {"options": dict(options), "connector": way.connector}
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None

    def begin(self) -> None:
        """Start the process; it loads the model meanwhile."""
        environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": str(ROOT)}
        with self._log.open("ab") as errors:
            self._process = subprocess.Popen(
                self._command,
                cwd=ROOT,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
            )
        tell(self._process, self._told)

    @property
    def pid(self) -> int:
        return self._running().pid

    def wait_ready(self) -> float:
        """Seconds that the engine took to load. Raises ChildFailed with the end of its log."""
        return float(self._heard(READY_S)["ready_s"])

    def ask(self, tokens: Sequence[int], answer: int) -> dict[str, Any]:
        """One request, greedy. Raises ChildFailed."""
        tell(self._running(), {"op": "ask", "tokens": list(tokens), "answer": answer})
        return self._heard(ASK_S)

    def tokens(self, text: str) -> list[int]:
        """A text's tokens. Raises ChildFailed."""
        tell(self._running(), {"op": "tokens", "text": text})
        return [int(token) for token in self._heard(ASK_S)["tokens"]]

    def forget(self) -> None:
        """Empty its own prefix cache. Raises ChildFailed."""
        tell(self._running(), {"op": "forget"})
        if not self._heard(ASK_S)["forgotten"]:
            raise ChildFailed(f"the engine of {self.way.name} does not let go of its prefix cache")

    def kill(self) -> None:
        """End it, with all that it holds in memory."""
        if self._process is not None:
            self._process.kill()
            stop(self._process, STOP_S)
            self._process = None

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise ChildFailed(f"the engine of {self.way.name} is not running")
        return self._process

    def _heard(self, wait_s: float) -> dict[str, Any]:
        try:
            return heard(self._running(), wait_s)
        except ChildFailed as error:
            tail = self._log.read_text(errors="replace")[-LOG_SHOWN:]
            raise ChildFailed(f"vLLM with {self.way.name}: {error}: {tail}") from error
