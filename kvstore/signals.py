"""Which signals ask a process to stop.

Owns the list, for every process of the service. Does not know what stopping means. Invariant: a process that is told to
ignore SIGHUP (``nohup``) outlives its terminal; any other drains when the terminal is closed.
"""

from __future__ import annotations

import signal


def stop_signals() -> tuple[signal.Signals, ...]:
    """SIGTERM, SIGINT, and SIGHUP unless it is ignored."""
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        return signal.SIGTERM, signal.SIGINT
    return signal.SIGTERM, signal.SIGINT, signal.SIGHUP
