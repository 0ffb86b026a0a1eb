"""Daemons that are made to be killed: a child process forks real daemons, each armed at one point.

``python -m ops.bench.crash_daemon`` reads lines on stdin: ``start FOLDER POINT HITS EARLY`` forks a daemon there and
answers its process id; ``reap PID`` waits for its end and answers the signal that ended it. Forking needs a process
without threads, and everything is imported once, so a daemon starts in milliseconds. Invariant: no daemon outlives
whoever started it.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from kvstore.config import StoreConfig
from ops.bench.crash_book import CAPACITY_BYTES, RULES, SEGMENT_BYTES
from ops.bench.crash_points import Executioner

START_S_MAX = 60.0
WORK_S_MAX = 30.0
NOWHERE = "nowhere"
"""The point of a daemon that is killed from outside only."""
WAKE = signal.SIGUSR1
_PR_SET_PDEATHSIG = 1


def serve(folder: Path, point: str, hits: int, *, early: bool) -> None:
    """The daemon's own main; its output goes to a file."""
    from kvstore.daemon.process import run
    from kvstore.daemon.tokens import Tokens

    signal.signal(WAKE, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    out = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(out, 1)
    os.dup2(out, 2)
    if point != NOWHERE:
        executioner = Executioner(point, hits, folder / "point", is_awake=early)
        executioner.arm()
        signal.signal(WAKE, executioner.wake)
    config = StoreConfig(
        data=(folder / "data",),
        capacity_bytes=CAPACITY_BYTES,
        segment_bytes=SEGMENT_BYTES,
        unix=folder / "s",
        listen="127.0.0.1:0",
        admin="off",
        sweep_every_s=0.05,
    )
    run(config, RULES, "", Tokens())


def main() -> None:
    import kvstore.daemon.process  # noqa: F401 (imported before the first fork)

    for line in sys.stdin:
        verb, *arguments = line.split()
        if verb == "start":
            pid = os.fork()
            if pid == 0:
                try:
                    serve(Path(arguments[0]), arguments[1], int(arguments[2]), early=arguments[3] == "True")
                finally:
                    os._exit(1)
            print(pid, flush=True)
        else:
            print(os.WTERMSIG(os.waitpid(int(arguments[0]), 0)[1]), flush=True)


class DaemonFailed(Exception):
    """A daemon did not start, or ended by itself."""


class Daemons:
    """The child process, seen from the harness."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    @classmethod
    @contextlib.contextmanager
    def running(cls) -> Iterator[Daemons]:
        command = [sys.executable, "-m", "ops.bench.crash_daemon"]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            try:
                yield cls(process)
            finally:
                process.kill()

    def begin(self, folder: Path, point: str = NOWHERE, hits: int = 1, *, early: bool = False) -> int:
        """Start a daemon on a folder; its process id. An ``early`` point may strike before it serves, others must be
        armed.
        """
        (folder / "data" / "endpoints.json").unlink(missing_ok=True)
        (folder / "point").unlink(missing_ok=True)
        return self._ask(f"start {folder} {point} {hits} {early}")

    def addresses(self, folder: Path, pid: int) -> tuple[str, str] | None:
        """Unix and TCP address once it serves; None if it was killed before. Raises DaemonFailed."""
        end_s = time.monotonic() + START_S_MAX
        while time.monotonic() < end_s:
            with contextlib.suppress(OSError, ValueError):
                found = json.loads((folder / "data" / "endpoints.json").read_text())
                if found["pid"] == pid:
                    return f"unix:{found['unix']}", found["listen"]
            if _is_over(pid):
                return None
            time.sleep(0.002)
        raise DaemonFailed("the daemon did not start: " + (folder / "log").read_text()[-3000:])

    def arm(self, pid: int) -> None:
        """From now on its point may strike."""
        os.kill(pid, WAKE)

    def wait(self, pid: int, seconds: float, enough: Callable[[], bool]) -> None:
        """Until it is dead, or time is up and ``enough`` was done; that takes ``WORK_S_MAX`` at most."""
        begin_s = time.monotonic()
        while (passed_s := time.monotonic() - begin_s) < WORK_S_MAX and not _is_over(pid):
            if passed_s >= seconds and enough():
                return
            time.sleep(0.005)

    def kill(self, folder: Path, pid: int) -> str:
        """kill -9, unless its point was faster; the point that ended it. Raises DaemonFailed if something else did."""
        os.kill(pid, signal.SIGKILL)
        ended_by = self._ask(f"reap {pid}")
        if ended_by != signal.SIGKILL:
            raise DaemonFailed(
                f"the daemon ended by itself (signal {ended_by}): " + (folder / "log").read_text()[-3000:]
            )
        point = folder / "point"
        return point.read_text() if point.exists() else "random"

    def stop(self, pid: int) -> None:
        """Let it end in order. Raises DaemonFailed if it does not exit by itself."""
        os.kill(pid, signal.SIGTERM)
        ended_by = self._ask(f"reap {pid}")
        if ended_by:
            raise DaemonFailed(f"the daemon ended by signal {ended_by} when asked to stop")

    def _ask(self, line: str) -> int:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())


def _is_over(pid: int) -> bool:
    """Whether a process of the child is a zombie: it waits to be reaped."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    return True


if __name__ == "__main__":
    main()
