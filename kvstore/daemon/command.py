"""What a command prints, within bounds of time and bytes.

Owns the child process and its session. Does not know what is printed. Invariants: no more is read than was asked for; a
command that is given up is killed together with what it started.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import IO

PIECE_BYTES = 64 * 1024
STOPPING_S = 0.1
"""How often a reader looks whether it shall stop."""


def output_of(command: Sequence[str], bytes_max: int, deadline_s: float, stopping: threading.Event) -> bytes:
    """All that it prints; its errors go where this process's go.

    Raises ValueError that says what it did wrong (or that ``stopping`` was set meanwhile), OSError if it cannot be run.
    """
    until_s = time.monotonic() + deadline_s
    late = ValueError(f"it did not end within {deadline_s:.0f} s")
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, start_new_session=True) as child:
        try:
            assert child.stdout is not None
            printed = _read(child.stdout, bytes_max, until_s, late, stopping)
            child.wait(max(until_s - time.monotonic(), 0.0))
        except subprocess.TimeoutExpired:
            _kill(child)
            raise late from None
        except BaseException:
            _kill(child)
            raise
    if child.returncode:
        raise ValueError(f"it exited with {child.returncode}")
    return printed


def _read(stream: IO[bytes], bytes_max: int, until_s: float, late: ValueError, stopping: threading.Event) -> bytes:
    poller = select.poll()
    poller.register(stream, select.POLLIN)
    printed = bytearray()
    while (left_s := until_s - time.monotonic()) > 0:
        if stopping.is_set():
            raise ValueError("it was given up")
        if poller.poll(1000 * min(left_s, STOPPING_S)):
            piece = os.read(stream.fileno(), PIECE_BYTES)
            if not piece:
                return bytes(printed)
            printed += piece
            if len(printed) > bytes_max:
                raise ValueError(f"it has more than {bytes_max} bytes")
    raise late


def _kill(child: subprocess.Popen[bytes]) -> None:
    """Its whole session; the child was not waited for, so the number is still its own."""
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
