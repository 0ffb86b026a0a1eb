"""How the demo starts the service."""

from __future__ import annotations

import socket

import pytest

from ops.demo import is_free, parse_arguments, up_arguments, usual_addresses


def test_a_busy_port_behind_the_gateway_is_replaced_by_a_free_one(capsys: pytest.CaptureFixture[str]) -> None:
    """Another service on the usual ports does not keep the demo from running, and the demo says so; the gateway's
    address is the one asked for."""
    with socket.create_server(("127.0.0.1", 0)) as taken, socket.create_server(("127.0.0.1", 0)) as other:
        busy, free = (f"127.0.0.1:{item.getsockname()[1]}" for item in (taken, other))
        other.close()
        arguments = up_arguments(parse_arguments(["--listen", "127.0.0.1:9"]), {"store": busy, "decode": free})
    assert arguments[-4:] == ["--listen", "127.0.0.1:9", "--store-listen", "127.0.0.1:0"]
    assert f"store: {busy} is busy, so it takes a free port" in capsys.readouterr().out


def test_a_run_that_measures_takes_free_ports() -> None:
    """It never meets another run."""
    usual = usual_addresses()
    assert sorted(usual) == ["admin", "decode", "prefill", "store"]
    arguments = up_arguments(parse_arguments(["--once"]), usual)
    assert [word for word in arguments if word.endswith(":0")] == ["127.0.0.1:0"] * 4


def test_a_port_in_use_is_not_free() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        assert not is_free(address)
    assert is_free(address)
