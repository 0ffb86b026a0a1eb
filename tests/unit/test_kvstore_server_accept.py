"""Connections that the daemon cannot accept, and sockets that it cannot listen on."""

from __future__ import annotations

import errno
import socket
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

from kvstore.daemon.metrics import ServerMetrics
from kvstore.daemon.server import Server, ServerConfig
from kvstore.errors import VolumeInUse
from kvstore.testing import MemoryStore
from tests.support.stores import client_of


class Exhausted(socket.socket):
    """A listener that finds no descriptor the first time."""

    failures = 1

    def accept(self) -> tuple[socket.socket, Any]:
        if Exhausted.failures:
            Exhausted.failures -= 1
            raise OSError(errno.EMFILE, "Too many open files")
        return super().accept()


def test_a_daemon_out_of_descriptors_counts_it_and_accepts_later(
    monkeypatch: pytest.MonkeyPatch, backend: MemoryStore, folder: Path
) -> None:
    monkeypatch.setattr(Exhausted, "failures", 1)
    with monkeypatch.context() as listening:
        listening.setattr(socket, "socket", Exhausted)
        server = Server.start(ServerConfig("n", unix_path=folder / "full"), backend, ServerMetrics())
    try:
        with client_of(server.addresses[0]) as client:
            assert client.spaces() == {}
        assert server._metrics.registry.get_sample_value("reprise_store_accept_failures_total") == 1
    finally:
        server.stop()


def test_the_socket_of_somebody_busy_is_not_taken_from_him(folder: Path, backend: MemoryStore) -> None:
    """Who cannot take a connection now listens all the same: only a file that nobody listens on is replaced."""
    path = folder / "s"
    with socket.socket(socket.AF_UNIX) as busy, ExitStack() as waiting:
        busy.bind(str(path))
        busy.listen(0)
        for _ in range(2):
            peer = waiting.enter_context(socket.socket(socket.AF_UNIX))
            peer.setblocking(False)
            with suppress(BlockingIOError):
                peer.connect(str(path))
        with pytest.raises(VolumeInUse, match=str(path)):
            Server.start(ServerConfig("n", unix_path=path), backend, ServerMetrics())
        assert path.exists()
    Server.start(ServerConfig("n", unix_path=path), backend, ServerMetrics()).stop(1.0)


def test_a_socket_that_cannot_be_made_is_named(folder: Path, backend: MemoryStore) -> None:
    path = folder / "nowhere" / "s"
    with pytest.raises(OSError, match=f"cannot listen on {path}: No such file"):
        Server.start(ServerConfig("n", unix_path=path), backend, ServerMetrics())
