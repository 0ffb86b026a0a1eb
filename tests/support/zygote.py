"""Daemons by fork: a child process that has everything imported and starts a real daemon in milliseconds.

``python -m tests.support.zygote`` reads lines on stdin: ``start FOLDER`` forks a daemon on that folder and answers
its process id; ``reap PID`` waits for its end and answers the signal that ended it. Forking needs a process without
threads, which a test process is not.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from kvstore.config import StoreConfig
from kvstore.limits import MIB
from kvstore.testing import TEST_RULES

START_S_MAX = 30.0


def serve(folder: Path) -> None:
    """The daemon's own main; its output goes to a file."""
    from kvstore.daemon.process import run

    out = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(out, 1)
    os.dup2(out, 2)
    config = StoreConfig(
        data=(folder / "data",),
        capacity_bytes=48 * MIB,
        segment_bytes=2 * MIB,
        unix=folder / "s",
        listen="off",
        admin="off",
        sweep_every_s=0.02,
    )
    run(config, TEST_RULES, "", None)


def main() -> None:
    import kvstore.daemon.process  # noqa: F401 (imported before the first fork)

    for line in sys.stdin:
        verb, argument = line.split()
        if verb == "start":
            pid = os.fork()
            if pid == 0:
                try:
                    serve(Path(argument))
                finally:
                    os._exit(1)
            print(pid, flush=True)
        else:
            print(os.WTERMSIG(os.waitpid(int(argument), 0)[1]), flush=True)


class Zygote:
    """The child process, seen from the test."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    @classmethod
    @contextlib.contextmanager
    def running(cls) -> Iterator[Zygote]:
        command = [sys.executable, "-m", "tests.support.zygote"]
        root = Path(__file__).parents[2]
        with subprocess.Popen(command, cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            try:
                yield cls(process)
            finally:
                process.kill()

    def start(self, folder: Path) -> int:
        """Process id of a daemon that serves at ``FOLDER/s``."""
        pid = self._ask(f"start {folder}")
        end_s = time.monotonic() + START_S_MAX
        while time.monotonic() < end_s:
            with contextlib.suppress(OSError, ValueError):
                if json.loads((folder / "data" / "endpoints.json").read_text())["pid"] == pid:
                    return pid
            time.sleep(0.002)
        self.kill(pid)
        raise AssertionError("the daemon did not start: " + (folder / "log").read_text()[-3000:])

    def kill(self, pid: int) -> None:
        """kill -9, which must be what ended it."""
        os.kill(pid, signal.SIGKILL)
        ended_by = self._ask(f"reap {pid}")
        assert ended_by == signal.SIGKILL, f"the daemon had ended by itself (signal {ended_by})"

    def _ask(self, line: str) -> int:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())


if __name__ == "__main__":
    main()
