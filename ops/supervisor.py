"""Keeps a set of child processes running: in order of dependency, each once what it needs is healthy.

Owns the children, their logs and the state file. Does not know what the children do, only how to start one, where it
says that it listens (``endpoints.json`` in its data directory) and which URL tells its health.

Invariants: one thread, no wait without a bound; a child that dies is started again after a back-off that doubles up to
a minute; a child that was never healthy is given up after a few tries, and at once when it says that its settings are
wrong; no child outlives the supervisor, even one killed with SIGKILL; a full disk costs log lines, never a child.
"""

from __future__ import annotations

import contextlib
import ctypes
import http.client
import json
import math
import os
import re
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from kvstore.signals import stop_signals
from ops.rotating_log import RotatingLog

TICK_S = 0.1
HEALTH_S_MAX = 2.0
BACKOFF_S_FIRST = 0.5
BACKOFF_S_MAX = 60.0
SETTLED_S = 60.0
"""A child that stayed healthy this long starts again with the first back-off."""
FAILED_STARTS_MAX = 3
"""Tries of a child that was never healthy; then the supervisor gives up."""
FINAL_STATUSES = frozenset({2, 3})
"""Exit statuses of wrong settings and of a model that cannot be loaded: another try would end the same way."""
STOP_S_MAX = 20.0
"""A child gets this long after SIGTERM (more than the drain time of a node), then SIGKILL."""
LINE_BYTES_MAX = 4096
PROGRESS_S = 5.0
"""Between two states of a progress bar that are shown."""
STATE_VERSION = 1
PR_SET_PDEATHSIG = 1

Endpoints = Mapping[str, Any]
"""What a child wrote to its endpoints.json."""
Command = Callable[[Mapping[str, Endpoints], "Endpoints | None"], list[str]]
"""(endpoints of its dependencies, its own endpoints of an earlier start) -> argument vector. The latter lets a child
that once chose a free port take the same port again, so that its users find it."""


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """How one child is started and recognised as healthy."""

    name: str
    data: Path
    command: Command
    health_url: Callable[[Endpoints], str]
    describe: Callable[[Endpoints], str]
    depends_on: tuple[str, ...] = ()
    start_s_max: float = 60.0


class ChildState(StrEnum):
    WAITING = "waiting"
    """For its dependencies, or for its back-off to pass."""
    STARTING = "starting"
    HEALTHY = "healthy"
    STOPPED = "stopped"


@dataclass(slots=True)
class Child:
    """One child's process and history. ``exits`` counts deaths since it was last settled."""

    spec: ChildSpec
    log: RotatingLog
    state: ChildState = ChildState.WAITING
    process: subprocess.Popen[bytes] | None = None
    endpoints: Endpoints | None = None
    not_before_s: float = 0.0
    since_s: float = 0.0
    exits: int = 0
    starts: int = 0
    was_healthy: bool = False
    partial: bytes = b""
    """Output after the last line end."""
    shown_s: float = -math.inf
    """When a line of it was last shown to the operator."""


def backoff_s(exits: int) -> float:
    """Seconds before the next start after so many deaths in a row."""
    return float(min(BACKOFF_S_MAX, BACKOFF_S_FIRST * 2 ** min(16, max(0, exits - 1))))


def read_endpoints(directory: Path) -> Endpoints | None:
    """A child's endpoints.json, or None while it is absent or half written."""
    try:
        found = json.loads((directory / "endpoints.json").read_bytes())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def is_healthy(url: str, timeout_s: float = HEALTH_S_MAX) -> bool:
    """Whether GET of a health URL answers 200 in time."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "127.0.0.1", parts.port, timeout=timeout_s)
    try:
        connection.request("GET", parts.path)
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def write_json(path: Path, value: object) -> None:
    """Replace a small JSON file atomically."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(value, indent=2) + "\n")
    temporary.replace(path)


def die_with_parent(parent: int) -> None:
    """In the child before exec: be told to stop when the supervisor dies, however it dies."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        os._exit(1)


def launch(data: Path, command: Sequence[str]) -> subprocess.Popen[bytes]:
    """Start a child whose output comes through a pipe; its old endpoints are gone before. Raises OSError."""
    (data / "endpoints.json").unlink(missing_ok=True)
    data.mkdir(parents=True, exist_ok=True)
    parent = os.getpid()
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,  # Ctrl-C reaches the supervisor only, which stops the children in order
        preexec_fn=lambda: die_with_parent(parent),
    )


class Supervisor:
    """Runs the children until it is told to stop. ``say`` prints one line for the operator."""

    def __init__(
        self,
        children: Sequence[Child],
        *,
        state_path: Path,
        facts: Mapping[str, Any],
        say: Callable[[str], None],
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self.children = {child.spec.name: child for child in children}
        self._state_path = state_path
        self._facts = facts
        self._say = say
        self._now_s = now_s
        self._selector = selectors.DefaultSelector()
        self._signals = 0
        self._failed = False
        self._announced = False
        self._state_stale = False

    def run(self) -> int:
        """Start all, keep them running, stop all on SIGTERM, SIGINT or SIGHUP (not under nohup); returns the status."""
        with self._handled_signals():
            try:
                while not self._signals and not self._failed:
                    self.step()
            finally:
                self._stop_all()
        return 1 if self._failed else 0

    def step(self) -> None:
        """One round: move output, see who died, who became healthy and who may start."""
        self._move_output(TICK_S)
        before = self._snapshot()
        for child in self.children.values():
            self._reap(child)
            self._check_start(child)
            self._start_if_due(child)
        if self._snapshot() != before:
            self._write_state()
        if not self._announced and all(child.state is ChildState.HEALTHY for child in self.children.values()):
            self._announced = True
            self._say(f"ready: {self._facts.get('ready', '')}".rstrip(": "))
            self._write_state()

    # --- life of one child ------------------------------------------------------------------------------------------

    def _start_if_due(self, child: Child) -> None:
        needed = [self.children[name] for name in child.spec.depends_on]
        # A dependency that is down later is its users' ordinary weather; only the first start waits for it.
        ready = all(other.endpoints is not None and other.was_healthy for other in needed)
        if child.state is not ChildState.WAITING or not ready or self._now_s() < child.not_before_s:
            return
        command = child.spec.command({other.spec.name: other.endpoints or {} for other in needed}, child.endpoints)
        child.log.mark()
        try:
            child.process = launch(child.spec.data, command)
        except OSError as error:  # no memory, no processes, no disk: that may pass
            self._wait_before_next_start(child, f"could not be started ({error})")
            return
        assert child.process.stdout is not None
        os.set_blocking(child.process.stdout.fileno(), False)
        self._selector.register(child.process.stdout, selectors.EVENT_READ, child)
        child.state, child.since_s, child.starts = ChildState.STARTING, self._now_s(), child.starts + 1

    def _check_start(self, child: Child) -> None:
        if child.state is not ChildState.STARTING or child.process is None:
            return
        waited_s = self._now_s() - child.since_s
        endpoints = read_endpoints(child.spec.data)
        if endpoints is not None and is_healthy(child.spec.health_url(endpoints)):
            child.state, child.endpoints, child.since_s, child.was_healthy = (
                ChildState.HEALTHY,
                endpoints,
                self._now_s(),
                True,
            )
            again = f", start {child.starts}" if child.starts > 1 else ""
            where = child.spec.describe(endpoints)
            self._say(f"{child.spec.name} healthy after {waited_s:.1f} s at {where} (pid {child.process.pid}{again})")
        elif waited_s > child.spec.start_s_max:
            self._say(f"{child.spec.name} was not healthy after {waited_s:.0f} s; killing it")
            child.process.kill()

    def _reap(self, child: Child) -> None:
        process = child.process
        if process is None or process.poll() is None:
            return
        self._close_output(child)
        if child.state is ChildState.HEALTHY and self._now_s() - child.since_s > SETTLED_S:
            child.exits = 0
        child.process = None
        final = process.returncode in FINAL_STATUSES
        self._wait_before_next_start(child, describe_exit(process.returncode), final=final)

    def _wait_before_next_start(self, child: Child, how: str, *, final: bool = False) -> None:
        child.exits += 1
        child.state = ChildState.WAITING
        delay_s = backoff_s(child.exits)
        child.not_before_s = self._now_s() + delay_s
        if not child.was_healthy and (final or child.exits >= FAILED_STARTS_MAX):
            self._failed = True
            self._say(f"{child.spec.name} {how}, start {child.exits}, and was never healthy; giving up. Its log ends:")
            for line in child.log.tail(20):
                self._say(f"  {line}")
            return
        self._say(f"{child.spec.name} {how}; starting it again in {delay_s:.1f} s (log: {child.log.path})")

    # --- output -----------------------------------------------------------------------------------------------------

    def _move_output(self, timeout_s: float) -> None:
        if not self._selector.get_map():
            time.sleep(timeout_s)
            return
        for key, _ in self._selector.select(timeout_s):
            self._read_output(key.data)

    def _read_output(self, child: Child) -> bool:
        """Move what is there from the pipe to the log; False at the end of the pipe or when nothing is there."""
        assert child.process is not None and child.process.stdout is not None
        try:
            data = os.read(child.process.stdout.fileno(), 65_536)
        except BlockingIOError:
            return False
        if not data:
            with contextlib.suppress(KeyError):
                self._selector.unregister(child.process.stdout)
            return False
        child.log.write(data)
        if child.state is ChildState.STARTING:
            self._show_progress(child, data)
        return True

    def _show_progress(self, child: Child, data: bytes) -> None:
        """While a child starts, the operator sees what it prints for people: a model takes a while."""
        pieces = re.split(rb"(?<=[\r\n])", child.partial + data)
        child.partial = pieces.pop()[-LINE_BYTES_MAX:]
        for piece in pieces:
            overwritten = piece.endswith(b"\r")  # a progress bar; now and then is enough
            text = text_for_people(piece.decode(errors="replace").strip())
            if text and not (overwritten and self._now_s() < child.shown_s + PROGRESS_S):
                child.shown_s = self._now_s()
                self._say(f"{child.spec.name}: {text[:200]}")

    def _close_output(self, child: Child) -> None:
        assert child.process is not None and child.process.stdout is not None
        while self._read_output(child):
            pass
        with contextlib.suppress(KeyError):
            self._selector.unregister(child.process.stdout)
        child.process.stdout.close()
        child.partial = b""

    # --- stop -------------------------------------------------------------------------------------------------------

    def _stop_all(self) -> None:
        """SIGTERM to each child in reverse order of start, and SIGKILL to what is still there at the deadline."""
        running = [child for child in reversed(self.children.values()) if child.process is not None]
        if running:
            self._say(f"stopping {', '.join(child.spec.name for child in running)}")
        hurried = self._signals
        for child in running:
            self._stop(child, kill_at_once=lambda: self._signals > max(1, hurried))
        self._write_state()
        for child in self.children.values():
            child.log.close()
        self._selector.close()

    def _stop(self, child: Child, kill_at_once: Callable[[], bool]) -> None:
        process = child.process
        assert process is not None
        deadline_s = self._now_s() + STOP_S_MAX
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        while process.poll() is None:
            if kill_at_once() or self._now_s() > deadline_s:
                self._say(f"{child.spec.name} did not stop in time; killing it")
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                break
            self._move_output(TICK_S / 2)
        self._close_output(child)
        child.process, child.state = None, ChildState.STOPPED
        self._say(f"{child.spec.name} {describe_exit(process.returncode)}")

    # --- state file and signals -------------------------------------------------------------------------------------

    def _snapshot(self) -> tuple[object, ...]:
        return tuple((child.state, child.process and child.process.pid) for child in self.children.values())

    def _write_state(self) -> None:
        """Best effort: on a full disk the children matter more than the file that describes them."""
        children = {
            name: {
                "state": child.state.value,
                "pid": child.process.pid if child.process else None,
                "starts": child.starts,
                "endpoints": child.endpoints,
                "data": str(child.spec.data),
                "log": str(child.log.path),
            }
            for name, child in self.children.items()
        }
        state = {"version": STATE_VERSION, "pid": os.getpid(), **self._facts, "children": children}
        try:
            write_json(self._state_path, state)
        except OSError as error:
            if not self._state_stale:
                self._say(f"cannot write {self._state_path}, which is out of date from now on: {error}")
            self._state_stale = True
        else:
            self._state_stale = False

    @contextlib.contextmanager
    def _handled_signals(self) -> Iterator[None]:
        def count(_signal: int, _frame: object) -> None:
            self._signals += 1

        before = {number: signal.signal(number, count) for number in stop_signals()}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def text_for_people(line: str) -> str:
    """A plain line as it is, the message of a progress record, nothing of any other record (those are for the log)."""
    if not line.startswith("{"):
        return line
    try:
        record = json.loads(line)
    except ValueError:
        return line
    return str(record.get("message", "")) if record.get("event") == "progress" else ""


def describe_exit(returncode: int) -> str:
    """'exited with 1', 'was killed by SIGKILL'."""
    if returncode >= 0:
        return f"exited with {returncode}"
    try:
        return f"was killed by {signal.Signals(-returncode).name}"
    except ValueError:
        return f"was killed by signal {-returncode}"
