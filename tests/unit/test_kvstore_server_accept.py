"""Connections that the daemon cannot accept."""

from __future__ import annotations

import errno
import socket
from pathlib import Path
from typing import Any

import pytest

from kvstore.daemon.metrics import ServerMetrics
from kvstore.daemon.server import Server, ServerConfig
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
