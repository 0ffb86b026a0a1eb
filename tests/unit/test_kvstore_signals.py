"""Which signals stop a process."""

from __future__ import annotations

import signal

import pytest

from kvstore.signals import stop_signals


@pytest.mark.parametrize(("disposition", "stops"), [(signal.SIG_DFL, True), (signal.SIG_IGN, False)])
def test_a_closed_terminal_stops_a_process_unless_nohup_said_otherwise(
    disposition: signal.Handlers, stops: bool
) -> None:
    before = signal.signal(signal.SIGHUP, disposition)
    try:
        assert (signal.SIGHUP in stop_signals()) is stops
        assert {signal.SIGTERM, signal.SIGINT} <= set(stop_signals())
    finally:
        signal.signal(signal.SIGHUP, before)
