"""The supervisor on small fake children: a Python script that serves /healthz and does what a test asks of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from ops.rotating_log import RotatingLog
from ops.supervisor import (
    BACKOFF_S_MAX,
    Child,
    ChildSpec,
    ChildState,
    Endpoints,
    Supervisor,
    backoff_s,
    describe_exit,
)
from tests.support.waiting import WAIT_S

CHILD = """
import http.server, json, os, pathlib, sys, threading
data, port, mode = pathlib.Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
print("loading 50 %", flush=True)
print("".join("bar %d\\r" % number for number in range(1000)), flush=True)
print('{"event": "noise"}', flush=True)
print('{"event": "progress", "message": "half way"}', flush=True)
if mode == "broken":
    sys.exit("it broke")
if mode.isdigit():
    print("wrong option")
    sys.exit(int(mode))
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
    def log_message(self, *_): pass
server = http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler)
file = data / "endpoints.json.tmp"
file.write_text(json.dumps({"listen": "127.0.0.1:%d" % server.server_address[1]}))
file.replace(data / "endpoints.json")
if mode == "stubborn":
    import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)
server.serve_forever()
"""


def make_child(tmp_path: Path, name: str, *, mode: str = "good", needs: tuple[str, ...] = ()) -> Child:
    data = tmp_path / name

    def command(_needed: Mapping[str, Endpoints], own: Endpoints | None) -> list[str]:
        port = own["listen"].rpartition(":")[2] if own else "0"
        return [sys.executable, "-c", CHILD, str(data), port, mode]

    spec = ChildSpec(
        name=name,
        data=data,
        command=command,
        health_url=lambda endpoints: f"http://{endpoints['listen']}/healthz",
        describe=lambda endpoints: str(endpoints["listen"]),
        depends_on=needs,
    )
    return Child(spec, RotatingLog.open(tmp_path / "logs" / f"{name}.log"))


class Running:
    """A supervisor stepped by the test itself."""

    def __init__(self, tmp_path: Path, *children: Child) -> None:
        self.said: list[str] = []
        self.state_path = tmp_path / "up.json"
        self.supervisor = Supervisor(children, state_path=self.state_path, facts={"model": "x"}, say=self.said.append)

    def until(self, condition: Callable[[], bool], wait_s: float = WAIT_S) -> None:
        deadline_s = time.monotonic() + wait_s
        while not condition():
            assert time.monotonic() < deadline_s, f"not in time; said: {self.said}"
            self.supervisor.step()

    def all_healthy(self) -> bool:
        return all(child.state is ChildState.HEALTHY for child in self.supervisor.children.values())

    def state(self) -> dict[str, Any]:
        found = json.loads(self.state_path.read_text())
        assert isinstance(found, dict)
        return found


def test_children_start_in_order_and_stop_in_reverse(tmp_path: Path) -> None:
    """A child starts when what it needs is healthy; all are gone after the stop, the last one first."""
    running = Running(tmp_path, make_child(tmp_path, "one"), make_child(tmp_path, "two", needs=("one",)))
    running.supervisor.step()
    assert running.supervisor.children["two"].state is ChildState.WAITING
    running.until(running.all_healthy)
    pids = [child["pid"] for child in running.state()["children"].values()]
    running.supervisor._stop_all()
    assert not any(psutil.pid_exists(pid) for pid in pids)
    text = "\n".join(running.said)
    order = ["one healthy", "two healthy", "ready", "stopping two, one", "two was killed", "one was killed"]
    assert [text.index(line) for line in order] == sorted(text.index(line) for line in order)
    assert {child["state"] for child in running.state()["children"].values()} == {"stopped"}


def test_a_killed_child_comes_back_on_the_same_port(tmp_path: Path) -> None:
    """A dead child is started again after a back-off, said so, and takes the address that it had."""
    running = Running(tmp_path, make_child(tmp_path, "one"))
    running.until(running.all_healthy)
    before = running.state()["children"]["one"]
    os.kill(before["pid"], signal.SIGKILL)
    running.until(lambda: not running.all_healthy())
    running.until(running.all_healthy)
    after = running.state()["children"]["one"]
    running.supervisor._stop_all()
    assert after["pid"] != before["pid"]
    assert after["endpoints"] == before["endpoints"]
    assert any("one was killed by SIGKILL; starting it again in 0.5 s" in line for line in running.said)
    assert sum("ready" in line for line in running.said) == 1


def test_a_child_that_never_gets_healthy_is_given_up_with_its_log(tmp_path: Path) -> None:
    """What fails is not retried for ever: after three deaths the end of the log is shown and the status is 1."""
    running = Running(tmp_path, make_child(tmp_path, "one", mode="broken"))
    assert running.supervisor.run() == 1
    assert running.supervisor.children["one"].starts == 3
    assert running.said.count("  it broke") == 1, "of the last try only"


@pytest.mark.parametrize("status", ["2", "3"])
def test_wrong_settings_are_not_tried_again(tmp_path: Path, status: str) -> None:
    """A child that says that its settings or its model cannot be used is given up at once, with its log."""
    running = Running(tmp_path, make_child(tmp_path, "one", mode=status))
    assert running.supervisor.run() == 1
    assert running.supervisor.children["one"].starts == 1
    assert running.said.count("  wrong option") == 1


def test_progress_of_a_starting_child_is_shown_but_not_its_records(tmp_path: Path) -> None:
    """Lines and progress records reach the operator while a child starts, other records only the log."""
    running = Running(tmp_path, make_child(tmp_path, "one"))
    running.until(running.all_healthy)
    running.supervisor._stop_all()
    assert "one: loading 50 %" in running.said
    assert "one: half way" in running.said
    assert sum("bar" in line for line in running.said) <= 2
    assert not any("noise" in line for line in running.said)
    assert '{"event": "noise"}' in (tmp_path / "logs" / "one.log").read_text()


def test_a_child_that_ignores_sigterm_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopping has a deadline."""
    monkeypatch.setattr("ops.supervisor.STOP_S_MAX", 0.5)
    running = Running(tmp_path, make_child(tmp_path, "one", mode="stubborn"))
    running.until(running.all_healthy)
    pid = running.state()["children"]["one"]["pid"]
    running.supervisor._stop_all()
    assert not psutil.pid_exists(pid)
    assert "one did not stop in time; killing it" in running.said


def test_a_full_disk_costs_log_lines_not_the_service(tmp_path: Path) -> None:
    """Neither a log nor the state file can be written: children run all the same, and it is said once."""
    child = make_child(tmp_path, "store")
    child.log.close()
    child.log = RotatingLog.open(Path("/dev/full"))
    running = Running(tmp_path / "not-there", child)
    try:
        running.until(running.all_healthy)
        child.process.kill()  # type: ignore[union-attr]
        running.until(lambda: running.all_healthy() and child.starts == 2)
    finally:
        running.supervisor._stop_all()
    assert child.log.dropped_bytes > 0
    assert len([line for line in running.said if "up.json" in line]) == 1
    assert child.state is ChildState.STOPPED


def test_a_child_that_cannot_even_be_started_is_given_up_with_the_reason(tmp_path: Path) -> None:
    """The machine refuses the process: the others are not torn down by a traceback, and the reason is told."""
    child = make_child(tmp_path, "store")
    broken = replace(child.spec, command=lambda _needed, _own: ["/no/such/interpreter"])
    running = Running(tmp_path, Child(broken, child.log))
    running.until(lambda: running.supervisor._failed)
    running.supervisor._stop_all()
    assert "/no/such/interpreter" in running.said[0]


@pytest.mark.parametrize(("before", "stops"), [(signal.SIG_DFL, True), (signal.SIG_IGN, False)])
def test_a_hangup_stops_the_service_unless_nohup_said_otherwise(
    tmp_path: Path, before: signal.Handlers, stops: bool
) -> None:
    running = Running(tmp_path)
    earlier = signal.signal(signal.SIGHUP, before)
    try:
        with running.supervisor._handled_signals():
            os.kill(os.getpid(), signal.SIGHUP)
            assert bool(running.supervisor._signals) is stops
    finally:
        signal.signal(signal.SIGHUP, earlier)


def test_children_die_with_a_killed_supervisor(tmp_path: Path) -> None:
    """SIGKILL of the supervisor leaves no child behind."""
    script = (
        "import sys; from pathlib import Path; sys.path.insert(0, sys.argv[2]); "
        "from test_ops_supervisor import Running, make_child; tmp = Path(sys.argv[1]); "
        "running = Running(tmp, make_child(tmp, 'one')); running.until(running.all_healthy); print('up', flush=True); "
        "running.until(lambda: False, 60)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path), str(Path(__file__).parent)], stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        assert process.stdout.readline().strip() == b"up"
        child = psutil.Process(json.loads((tmp_path / "up.json").read_text())["children"]["one"]["pid"])
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    gone, alive = psutil.wait_procs([child], timeout=WAIT_S)
    assert gone
    assert not alive


def test_backoff_doubles_up_to_its_bound() -> None:
    """Half a second first, then twice as long each time, never beyond the bound."""
    waits = [backoff_s(exits) for exits in range(1, 200)]
    assert waits[:4] == [0.5, 1.0, 2.0, 4.0]
    assert waits == sorted(waits)
    assert waits[-1] == BACKOFF_S_MAX


@pytest.mark.parametrize(
    ("code", "text"), [(0, "exited with 0"), (-9, "was killed by SIGKILL"), (-200, "was killed by signal 200")]
)
def test_exits_are_named(code: int, text: str) -> None:
    """An exit status is told in words."""
    assert describe_exit(code) == text


def test_a_log_outlives_a_rotation_that_fails(tmp_path: Path) -> None:
    """The folder is gone when the file is full: lines go on into the file that is open."""
    log = RotatingLog.open(tmp_path / "logs" / "a.log", bytes_max=100)
    log.write(b"x" * 90)
    (tmp_path / "logs").rename(tmp_path / "moved")
    log.write(b"y" * 90)
    log.write(b"z")
    log.close()
    assert (tmp_path / "moved" / "a.log").read_bytes().endswith(b"z")


def test_a_log_is_bounded_and_keeps_its_end(tmp_path: Path) -> None:
    """Whatever is written, the two files stay bounded and the last lines are there."""
    log = RotatingLog.open(tmp_path / "child.log", bytes_max=1000)
    for number in range(500):
        log.write(f"line {number}\n".encode())
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 2000
    assert log.tail(2) == ["line 498", "line 499"]
    log.close()
    again = RotatingLog.open(tmp_path / "child.log", bytes_max=1000)
    again.write(b"more\n")
    assert again.tail(2) == ["more"], "what an earlier process wrote is not its end"
    again.mark()
    assert again.tail(1) == []
    again.close()
