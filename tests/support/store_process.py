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
START_S = 60.0
STOP_S = 15.0


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

    def end(self) -> None:
        if self._process is not None:
            stop(self._process, STOP_S)
            self._process = None
