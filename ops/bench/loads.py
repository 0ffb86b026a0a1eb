"""Several client processes together: started, set going at the same time, and their answers made one.

Owns the processes. Does not know what they do. Invariant: all are ended whatever happens.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ops.bench.child import heard, stop, tell
from ops.bench.measure import Elsewhere


class Loads:
    """A few processes of ``ops.bench.load``."""

    def __init__(self, processes: Sequence[subprocess.Popen[bytes]]) -> None:
        self._processes = processes

    @classmethod
    def start(cls, targets: Sequence[str], size: int, batch: int, chain: tuple[int, int], seed: int) -> Loads:
        processes: list[subprocess.Popen[bytes]] = []
        try:
            for at, target in enumerate(targets):
                numbers = [str(number) for number in (size, batch, *chain, seed + at)]
                command = [sys.executable, "-m", "ops.bench.load", target, *numbers]
                processes.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
            for process in processes:
                heard(process)
        except BaseException:
            for process in processes:
                stop(process)
            raise
        return cls(processes)

    def pids(self) -> tuple[int, ...]:
        return tuple(process.pid for process in self._processes)

    def mix(self, calls: int, read_share: float) -> Elsewhere:
        return self._all({"do": "mix", "calls": calls, "read_share": read_share})

    def read(self, calls: int) -> Elsewhere:
        return self._all({"do": "read", "calls": calls})

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Batches are read in the background meanwhile."""
        for process in self._processes:
            tell(process, {"do": "begin"})
        try:
            yield
        finally:
            for process in self._processes:
                tell(process, {"do": "end"})
            for process in self._processes:
                heard(process)

    def _all(self, command: dict[str, Any]) -> Elsewhere:
        for process in self._processes:
            tell(process, command)
        answers = [heard(process) for process in self._processes]
        return Elsewhere(
            max(answer["seconds"] for answer in answers),
            tuple(took_s for answer in answers for took_s in answer["reads_s"]),
            tuple(took_s for answer in answers for took_s in answer["writes_s"]),
        )

    def close(self) -> None:
        for process in self._processes:
            stop(process)
