"""A real node for tests inside an engine's environment, which has no daemon: the ``reprise`` command of another one.

Owns the child process and its folder. ``REPRISE`` names the command; without it, this environment's own is run.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from ops.bench.child import read_line, stop

ROOT = Path(__file__).parents[2]
START_S = 300.0
STOP_S = 120.0


class StoreProcess:
    """``reprise store serve`` in ``folder``. May be killed or ended, and begun again on the same data."""

    def __init__(self, folder: Path, *, capacity: str = "1GiB", options: tuple[str, ...] = ()) -> None:
        self.folder = folder
        self._options = ("--capacity", capacity, *options)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        return f"unix:{self.folder / 's'}"

    def begin(self) -> None:
        """Start it, and wait until it serves."""
        command = [os.environ["REPRISE"]] if "REPRISE" in os.environ else [sys.executable, "-m", "ops.cli"]
        command += ["store", "serve", "--data", str(self.folder / "data"), "--unix", str(self.folder / "s")]
        command += ["--listen", "off", "--admin", "off", *self._options]
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=log)
        assert json.loads(read_line(self._process, START_S))["event"] == "store_ready"

    def kill(self) -> None:
        """As a crash does."""
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait(STOP_S)
        self.end()

    def hang(self) -> None:
        """It takes no call any more, and closes nothing, until ``go_on``."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED)  # some of its threads may still be at it before

    def go_on(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def damage(self, payload: bytes) -> int:
        """Turn one bit wherever these bytes lie on disk, which nobody serves meanwhile; at how many places."""
        places = 0
        for path in (self.folder / "data").rglob("*"):
            data = path.read_bytes() if path.is_file() else b""
            if payload in data:
                places += data.count(payload)
                path.write_bytes(data.replace(payload, bytes([payload[0] ^ 1]) + payload[1:]))
        return places

    def end(self) -> None:
        if self._process is not None:
            stop(self._process, STOP_S)
            self._process = None
