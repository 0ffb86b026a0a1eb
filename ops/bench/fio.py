"""fio beside our own reader: the sequential read of a file that others know and trust.

Owns the command and what is read from its answer. Does not install fio: without it the case stands as it is. Invariant:
the time is what fio counted, not that of starting it.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

from ops.bench.child import ChildFailed
from ops.bench.measure import Elsewhere

FIO = "fio"
LOOPS = 4
"""fio counts in milliseconds: one pass over a small file would be few of them."""
RUN_S_MAX = 120.0


def is_here() -> bool:
    return shutil.which(FIO) is not None


def reading(path: Path, size: int, depth: int) -> Callable[[], Elsewhere]:
    """Reads of a whole file in MiB, past the page cache, ``depth`` at a time; a call takes as long as one pass."""
    command = [FIO, "--name=read", f"--filename={path}", "--readonly", "--rw=read", "--bs=1M", "--direct=1"]
    command += ["--ioengine=libaio", f"--iodepth={depth}", f"--size={size}", f"--loops={LOOPS}"]
    command += ["--output-format=json"]

    def once() -> Elsewhere:
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=RUN_S_MAX)
        except subprocess.TimeoutExpired as error:
            raise ChildFailed(f"fio took more than {RUN_S_MAX:.0f} s") from error
        if done.returncode:
            raise ChildFailed(f"fio ended with status {done.returncode}: {done.stderr[-200:]}")
        return Elsewhere(seconds_of(done.stdout, size))

    return once


def seconds_of(answer: str, size: int) -> float:
    """How long fio took for ``size`` bytes. Raises ChildFailed if it did not read or its answer is not one."""
    try:
        read = json.loads(answer[answer.index("{") :])["jobs"][0]["read"]
        return size * max(float(read["runtime"]), 1.0) / 1000 / float(read["io_bytes"])
    except (ValueError, LookupError, ZeroDivisionError) as error:
        raise ChildFailed(f"fio's answer tells no time: {error!r}") from error
