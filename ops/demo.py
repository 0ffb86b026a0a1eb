"""The demo behind ``make run``: start the service, hold a conversation, kill the store, hold it again, show a table.

Owns the script. Does not know the service's inside: it speaks the public HTTP API, and reads ``up.json`` only to find
the store's process. Invariants: the first request of a run is cold (a fresh user each time); every wait has a deadline.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console

from ops.answer import REQUEST_S_MAX, Answer, RequestFailed, ask
from ops.conversation import QUESTIONS, Conversation, kind_of_model, shipped_document
from ops.supervisor import die_with_parent
from ops.up import UpConfig
from ops.verdict import Row, faults, table

START_S_MAX = 1800.0
"""From a bare machine: the first start converts the model."""
RESTART_S_MAX = 120.0
STOP_S_MAX = 90.0
TABLE_COLUMNS = 130
"""A narrower terminal wraps lines rather than losing figures."""

console = Console(highlight=False, soft_wrap=True)


class DemoFailed(Exception):
    """The demo cannot go on; the message says why."""


class Script:
    """Holds the conversation twice. Keeps the uncached answers: the same request without a cache costs the same."""

    def __init__(self, client: httpx.Client, conversation: Conversation) -> None:
        self._client = client
        self._conversation = conversation
        self._uncached: dict[str, Answer] = {}
        self._answers: list[str] = []

    def hold(self, round_name: str, *, must_hit_first: bool) -> list[Row]:
        """All turns once; the history is that of the first round, so that both rounds ask the same."""
        rows: list[Row] = []
        for turn in range(1, len(QUESTIONS) + 1):
            history = self._answers[: turn - 1]
            cached = self._ask(f"{round_name}, turn {turn}, cache on", history, cache=True)
            key = json.dumps(self._conversation.body(history))
            if key not in self._uncached:
                self._uncached[key] = self._ask(f"{round_name}, turn {turn}, cache off", history, cache=False)
            rows.append(Row(round_name, turn, must_hit_first or turn > 1, cached, self._uncached[key]))
            if len(self._answers) < turn:
                self._answers.append(cached.text)
        return rows

    def _ask(self, label: str, history: Sequence[str], *, cache: bool) -> Answer:
        with working(label):
            answer = ask(self._client, self._conversation, history, cache=cache)
        usage = answer.usage
        console.print(
            f"  {label}: prompt {usage['prompt_tokens']}, hit {usage['prompt_cache_hit_tokens']}, first token after "
            f"{answer.ttft_s:.2f} s, {answer.text.strip()!r:.70}",
            markup=False,
        )
        return answer


@contextmanager
def working(label: str) -> Iterator[None]:
    """Show that something is under way: a moving line on a terminal, one plain line elsewhere."""
    if console.is_terminal:
        with console.status(f"{label} ..."):
            yield
    else:
        console.print(f"  {label} ...", markup=False)
        yield


class Service:
    """``reprise up`` as a child process, seen through its state file."""

    def __init__(self, process: subprocess.Popen[bytes], data: Path) -> None:
        self.process = process
        self._state_path = data / "up.json"

    @classmethod
    def start(cls, data: Path, arguments: Sequence[str]) -> Service:
        parent = os.getpid()
        process = subprocess.Popen(
            [sys.executable, "-m", "ops.cli", "up", "--data", str(data), *arguments],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=lambda: die_with_parent(parent),
        )
        return cls(process, data)

    def state(self) -> dict[str, Any] | None:
        """The state file of this very process, or None before it is written."""
        try:
            found = json.loads(self._state_path.read_bytes())
        except (OSError, ValueError):
            return None
        return found if isinstance(found, dict) and found.get("pid") == self.process.pid else None

    def wait_healthy(self, deadline_s: float, *, other_store_than: int | None = None) -> dict[str, Any]:
        """Until all children are healthy (and the store is another process). DemoFailed when it takes too long."""
        limit_s = time.monotonic() + deadline_s
        while time.monotonic() < limit_s:
            if self.process.poll() is not None:
                raise DemoFailed(f"'reprise up' exited with {self.process.returncode}; its last lines are above")
            state = self.state()
            children = state["children"] if state else {}
            if children and all(child["state"] == "healthy" for child in children.values()):
                assert state is not None
                if children["store"]["pid"] != other_store_than:
                    return state
            time.sleep(0.1)
        logs = self._state_path.parent / "logs"
        raise DemoFailed(f"the service was not healthy within {deadline_s:.0f} s; its logs lie in {logs}")

    def stop(self) -> None:
        """SIGTERM, then wait; what does not stop in time is killed."""
        if self.process.poll() is None:
            self.process.terminate()
        try:
            self.process.wait(STOP_S_MAX)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the script found, and where it is to be found again."""

    rows: list[Row]
    url: str
    conversation: Conversation
    store: str
    access_log: str


def run_script(service: Service, model: str) -> Outcome:
    """Both rounds, with the kill between them."""
    state = service.wait_healthy(START_S_MAX)
    children = state["children"]
    url = str(children["gateway"]["endpoints"]["url"])
    with httpx.Client(base_url=url, timeout=REQUEST_S_MAX) as client:
        name = client.get("/v1/models").raise_for_status().json()["data"][0]["id"]
        conversation = Conversation(kind_of_model(model), name, f"demo-{secrets.token_hex(6)}", shipped_document())
        script = Script(client, conversation)
        console.print("\nA long document and three questions:")
        rows = script.hold("first", must_hit_first=False)
        pid = children["store"]["pid"]
        console.print(f"\nkill -9 {pid} (the store node), and the same conversation again:")
        os.kill(pid, signal.SIGKILL)
        service.wait_healthy(RESTART_S_MAX, other_store_than=pid)
        rows += script.hold("after kill -9", must_hit_first=True)
    store = f"unix:{children['store']['endpoints']['unix']}"
    return Outcome(rows, url, conversation, store, str(Path(children["prefill"]["data"]) / "access.jsonl"))


def examples(outcome: Outcome) -> str:
    """What to type next."""
    model, url = outcome.conversation.model, outcome.url
    body: dict[str, Any] = {"model": model, "max_tokens": 24}
    if outcome.conversation.kind == "chat":
        body["messages"] = [{"role": "user", "content": "Hello!"}]
        call = "chat.completions.create"
    else:
        body["prompt"] = "Once upon a time"
        call = "completions.create"
    options = ", ".join(f"{name}={value!r}" for name, value in body.items())
    reprise = os.path.relpath(Path(sys.executable).with_name("reprise"))
    return f"""
Serving at {url} (Ctrl-C stops it). Try:

  curl {url}{outcome.conversation.path()} -H 'content-type: application/json' \\
    -d '{json.dumps(body)}'

  from openai import OpenAI  # pip install openai
  client = OpenAI(base_url="{url}/v1", api_key="none")
  print(client.{call}({options}).usage)

  {reprise} store explain {outcome.rows[0].cached.request_id} --log {outcome.access_log} --store {outcome.store}
  {reprise} retention show --store {outcome.store}
"""


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m ops.demo", description="The service and a conversation with it.")
    parser.add_argument("--model", default="demo", help="demo, demo-swa, or a checkpoint's directory")
    parser.add_argument("--data", default=Path("data"), type=Path, help="data directory")
    parser.add_argument("--capacity", default="4GiB", help="bytes on disk that the store may use")
    parser.add_argument("--listen", default="127.0.0.1:8000", help="gateway address")
    parser.add_argument("--once", action="store_true", help="exit after the table: 0 if all is well, else 1")
    return parser.parse_args(arguments)


def up_arguments(options: argparse.Namespace, usual: Mapping[str, str]) -> list[str]:
    """Options of ``reprise up``. ``usual``: the address of each part behind the gateway.

    A part whose port is busy takes a free one; so does every part of a run that only measures, so that it never meets
    another run.
    """
    arguments = ["--model", options.model, "--capacity", options.capacity, "--listen", options.listen]
    for name, address in usual.items():
        if not options.once and is_free(address):
            continue
        if not options.once:
            console.print(f"{name}: {address} is busy, so it takes a free port", markup=False)
        arguments += [f"--{name}-listen", f"{address.rpartition(':')[0]}:0"]
    return arguments


def usual_addresses() -> dict[str, str]:
    """Where ``reprise up`` puts the parts behind the gateway."""
    usual = UpConfig()
    return {
        "store": usual.store_listen,
        "admin": usual.admin_listen,
        "prefill": usual.prefill_listen,
        "decode": usual.decode_listen,
    }


def is_free(address: str) -> bool:
    """Whether a server could listen there now."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_server((host, int(port))).close()
    except OSError:
        return False
    return True


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo; returns the exit status."""
    options = parse_arguments(sys.argv[1:] if arguments is None else arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    service = Service.start(options.data, up_arguments(options, usual_addresses()))
    try:
        outcome = run_script(service, options.model)
        console.print()
        Console(width=max(console.width, TABLE_COLUMNS)).print(table(outcome.rows))
        found = faults(outcome.rows)
        for fault in found:
            console.print(f"NOT AS IT SHOULD BE: {fault}", markup=False)
        if not found:
            console.print("All turns that should hit did, and every exact answer equals the one without a cache.")
        if options.once:
            return 1 if found else 0
        console.print(examples(outcome), markup=False)
        return service.process.wait()
    except (DemoFailed, RequestFailed, httpx.HTTPError) as error:
        console.print(f"The demo failed: {error}", markup=False)
        return 1
    except KeyboardInterrupt:
        return 0
    finally:
        service.stop()


if __name__ == "__main__":
    sys.exit(main())
