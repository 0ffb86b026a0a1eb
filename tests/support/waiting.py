"""Waiting for what other threads and processes do."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

WAIT_S = 120.0
"""What comes to pass at all has come by then, however busy the machine; nobody sleeps that long."""


def wait(call: Callable[[], Any], what: str = "an answer") -> Any:
    """The first answer that is one."""
    until_s = time.monotonic() + WAIT_S
    while time.monotonic() < until_s:
        answer = call()
        if answer is not None and answer is not False:
            return answer
        time.sleep(0.002)
    raise AssertionError(f"no {what} within {WAIT_S} s")
