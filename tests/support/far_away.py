"""A store that is far away: a proxy that holds every byte back, and counts how often a client had to wait for it.

Owns its threads and sockets. Does not know the protocol. What a client sends after something reached it from the store
may depend on that, so it is of a later round trip; what it sends before, on whatever connection, is of the same.
"""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import NamedTuple

PIECE_BYTES = 256 * 1024
PATIENCE_S = 10.0


class Piece(NamedTuple):
    """Bytes on their way, when they arrive, and of which round trip they are. No bytes: the end."""

    data: bytes
    due_s: float
    round_trip: int


class FarAway:
    """``address``: where a client reaches the store; ``round_trips``: since ``begin``."""

    def __init__(self, host: str, port: int, delay_s: float) -> None:
        self._target = (host, port)
        self._delay_s = delay_s
        self._lock = threading.Lock()
        self._at_client = 0
        self._at_store: dict[socket.socket, int] = {}
        """The latest round trip of which something has arrived: at the client, and at the store by connection."""
        self._sent: dict[int, set[socket.socket]] = {}
        """Connections on which the client has sent something, by round trip."""
        self._together: dict[int, int] = {}
        self.round_trips = 0
        self._sockets: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._start(self._accept)

    def begin(self, together: dict[int, int] | None = None) -> None:
        """Count anew; nothing may be under way. ``together``: on how many connections a client that does not wait for
        one before the other sends in a round trip. However late its threads are, the store answers all of them at once;
        where some never come, it answers after ``PATIENCE_S``.
        """
        with self._lock:
            self._at_client = self.round_trips = 0
            self._at_store.clear()
            self._sent.clear()
            self._together = together or {}

    def close(self) -> None:
        for sock in (self._listener, *self._sockets):
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                store = socket.create_connection(self._target)
                self._sockets += [client, store]
                self._carry(client, store, partial(self._of_client, client), partial(self._reached_store, store))
                self._carry(store, client, partial(self._of_store, store), self._reached_client)

    def _of_client(self, connection: socket.socket) -> int:
        with self._lock:
            number = self._at_client + 1
            self.round_trips = max(self.round_trips, number)
            self._sent.setdefault(number, set()).add(connection)
            return number

    def _reached_store(self, connection: socket.socket, number: int) -> None:
        with self._lock:
            self._at_store[connection] = max(self._at_store.get(connection, 0), number)

    def _of_store(self, connection: socket.socket) -> int:
        with self._lock:
            return self._at_store.get(connection, 0)

    def _reached_client(self, number: int) -> None:
        ends_s = time.monotonic() + PATIENCE_S
        while len(self._sent.get(number, ())) < self._together.get(number, 0) and time.monotonic() < ends_s:
            time.sleep(0.001)
        with self._lock:
            self._at_client = max(self._at_client, number)

    def _carry(
        self, source: socket.socket, sink: socket.socket, number: Callable[[], int], told: Callable[[int], None]
    ) -> None:
        under_way: queue.Queue[Piece] = queue.Queue(1024)

        def take() -> None:
            with suppress(OSError):
                while data := source.recv(PIECE_BYTES):
                    under_way.put(Piece(data, time.monotonic() + self._delay_s, number()))
            under_way.put(Piece(b"", 0.0, 0))

        def give() -> None:
            with suppress(OSError):
                while (piece := under_way.get()).data:
                    time.sleep(max(piece.due_s - time.monotonic(), 0.0))
                    told(piece.round_trip)
                    sink.sendall(piece.data)
                sink.shutdown(socket.SHUT_WR)

        self._start(take)
        self._start(give)

    def _start(self, work: Callable[[], None]) -> None:
        threading.Thread(target=work, daemon=True).start()


@contextmanager
def far_away(address: str, delay_s: float) -> Iterator[FarAway]:
    """The store at ``address`` (host:port), so many seconds away in each direction."""
    host, _, port = address.rpartition(":")
    with ExitStack() as stack:
        proxy = FarAway(host, int(port), delay_s)
        stack.callback(proxy.close)
        yield proxy
