"""Child processes of the bench: started, spoken to in lines, and ended whatever happens.

Owns waits and ends. Does not know what a child does. Invariants: every wait has a bound; a child that does not end when
asked is killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import time
from typing import Any

STOP_S = 15.0
ANSWER_S = 120.0


class ChildFailed(Exception):
    """A child process ended, or did not answer in time."""


def read_line(process: subprocess.Popen[bytes], wait_s: float) -> str:
    """The next line that a child writes. Raises ChildFailed."""
    assert process.stdout is not None
    fd = process.stdout.fileno()
    ends_s = time.monotonic() + wait_s
    line = bytearray()
    while not line.endswith(b"\n"):
        ready, _, _ = select.select([fd], [], [], max(ends_s - time.monotonic(), 0.0))
        if not ready:
            raise ChildFailed(f"{_name(process)} did not answer in {wait_s:.0f} s")
        # One answer at a time is on its way, so a read never takes part of the next line.
        part = os.read(fd, 1 << 16)
        if not part:
            raise ChildFailed(f"{_name(process)} ended with status {process.wait(STOP_S)}")
        line += part
    return line.decode()


def tell(process: subprocess.Popen[bytes], command: dict[str, Any]) -> None:
    """Write one line of JSON to a child. Raises ChildFailed if it is gone."""
    assert process.stdin is not None
    try:
        process.stdin.write(json.dumps(command).encode() + b"\n")
        process.stdin.flush()
    except OSError as error:
        raise ChildFailed(f"{_name(process)} is gone") from error


def heard(process: subprocess.Popen[bytes], wait_s: float = ANSWER_S) -> dict[str, Any]:
    """A child's answer, one line of JSON. Raises ChildFailed, also for an answer that tells of an error."""
    answer: dict[str, Any] = json.loads(read_line(process, wait_s))
    if "error" in answer:
        raise ChildFailed(f"{_name(process)}: {answer['error']}")
    return answer


def stop(process: subprocess.Popen[bytes], wait_s: float = STOP_S) -> None:
    """Close its input, ask it to end, and kill it if it does not."""
    if process.stdin is not None:
        with contextlib.suppress(OSError):
            process.stdin.close()
    if process.poll() is None:
        process.terminate()
    try:
        process.wait(wait_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(wait_s)
    if process.stdout is not None:
        process.stdout.close()


def _name(process: subprocess.Popen[bytes]) -> str:
    words = process.args if isinstance(process.args, list) else [process.args]
    return " ".join(str(word).rsplit("/", 1)[-1] for word in words[:4])
