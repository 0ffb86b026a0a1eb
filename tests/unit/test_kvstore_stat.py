"""What `store stat` shows to people, and what it says of a port that is not the store's."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvstore.cli import ADMIN_HINT, _print_stats, build_app
from kvstore.testing import TEST_RULES, ManualClock
from kvstore.wording import utc
from tests.support.stores import open_memory, served, short_dir


class Health(BaseHTTPRequestHandler):
    """What an admin endpoint answers; a bad request is answered, too."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def an_admin_endpoint() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Health)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def stat(address: str) -> tuple[int, dict[str, object]]:
    """Exit code, and what is told of the node."""
    app = build_app(lambda _path: (TEST_RULES, ""))
    done = CliRunner().invoke(app, ["stat", address, "--deadline", "500ms", "--json"])
    return done.exit_code, json.loads(done.stdout)[address]


def test_the_admin_port_is_told_from_the_stores() -> None:
    """Whoever gives it reads which one to give; where nobody listens, nothing is guessed."""
    with an_admin_endpoint() as address:
        code, told = stat(address)
    assert code == 1
    assert str(told["error"]).endswith(ADMIN_HINT)
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        address = f"127.0.0.1:{nobody.getsockname()[1]}"
    code, told = stat(address)
    assert code == 1
    assert "HTTP" not in str(told["error"])


def test_a_store_that_answers_gets_no_hint() -> None:
    """Over TCP and over a Unix socket, which is never taken for HTTP."""
    with short_dir() as folder, served(open_memory(ManualClock()), folder) as server:
        for address in server.addresses:
            code, told = stat(address)
            assert (code, "error" in told) == (0, False), told


def test_a_socket_that_is_not_there_is_told_as_before(tmp_path: Path) -> None:
    """An address that has no port is no reason to fail otherwise."""
    code, told = stat(f"unix:{tmp_path}/none.sock")
    assert code == 1
    assert "HTTP" not in str(told["error"])


def test_times_are_dates_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    """Of the node and of its volumes; what never was says so, and durations stay numbers."""
    at_s = 1_796_055_908
    _print_stats("node", {"scrub_last_pass_s": at_s + 0.5, "uptime_s": 3.25, "volumes": {"v": {"written_since_s": 5}}})
    shown = capsys.readouterr().out
    assert (utc(at_s) in shown, utc(5) in shown, "3.250" in shown) == (True, True, True)
    _print_stats("node", {"scrub_last_pass_s": 0.0})
    assert "never" in capsys.readouterr().out
