"""A real daemon under measurement: ``reprise store serve`` as a child process, and how much memory it took.

Owns the process and its folder. Invariants: it listens on loopback ports chosen by the kernel and on a Unix socket; it
is ended whatever happens, and its folder is removed by whoever made it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from ops.bench.child import STOP_S, ChildFailed, read_line, stop

START_S = 120.0


class StoreProcess:
    """One daemon. ``start`` makes it; it may be killed and started again on the same folder."""

    def __init__(self, folder: Path, capacity_bytes: int, page_cache: str = "keep") -> None:
        self.folder = folder
        self._page_cache = page_cache
        self.capacity_bytes = capacity_bytes
        self._process: subprocess.Popen[bytes] | None = None
        self.unix = ""
        self.tcp = ""

    @classmethod
    def start(cls, folder: Path, capacity_bytes: int, page_cache: str = "keep") -> StoreProcess:
        store = cls(folder, capacity_bytes, page_cache)
        store.begin()
        return store

    def begin(self) -> float:
        """Start the daemon; returns the seconds until it serves. Raises ChildFailed with the end of its log."""
        self.folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "ops.cli", "store", "serve", "--data", str(self.folder / "data")]
        command += ["--capacity", f"{self.capacity_bytes}B", "--listen", "127.0.0.1:0", "--admin", "off"]
        command += ["--unix", str(self.folder / "s"), "--page-cache", self._page_cache]
        log = self.folder / "log"
        began_s = time.perf_counter()
        with log.open("ab") as errors:
            self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors)
        try:
            ready = json.loads(read_line(self._process, START_S))
        except ChildFailed as error:
            self.end()
            raise ChildFailed(f"{error}: {log.read_text(errors='replace')[-500:]}") from error
        self.unix, self.tcp = f"unix:{ready['unix']}", ready["listen"]
        return time.perf_counter() - began_s

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def pids(self) -> tuple[int, ...]:
        return (self.pid,)

    def kill(self) -> None:
        """As a crash does."""
        if self._process is not None and self._process.poll() is None:
            os.kill(self._process.pid, signal.SIGKILL)
            self._process.wait(STOP_S)
        self.end()

    def end(self) -> None:
        if self._process is not None:
            stop(self._process)
            self._process = None

    def memory_bytes(self) -> dict[str, int]:
        return memory_bytes(self.pid)


def memory_bytes(pid: int) -> dict[str, int]:
    """Resident now, its part that is no file's, and the peak of the former."""
    rows = {
        line.split(":")[0]: int(line.split()[1]) * 1024
        for line in Path(f"/proc/{pid}/status").read_text().splitlines()
        if line.startswith(("VmHWM", "VmRSS", "RssAnon"))
    }
    return {"resident": rows["VmRSS"], "anonymous": rows["RssAnon"], "peak": rows["VmHWM"]}
