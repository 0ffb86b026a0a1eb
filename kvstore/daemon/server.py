"""The data plane: listeners, one blocking thread a connection, and a reaper that bounds every wait.

Owns sockets and their lifetimes. What a frame means is in ``session``. Invariants: whatever a peer sends, the daemon
goes on serving the others; no connection outlives its bound (hello, frame, idle), since the reaper shuts it down; after
``stop`` nothing is accepted and the requests in flight were given their time.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import stat
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from kvstore import limits, wire
from kvstore.access import is_loopback
from kvstore.daemon.admission import Admission
from kvstore.daemon.metrics import ServerMetrics
from kvstore.daemon.request import Connection
from kvstore.daemon.session import Backend, Session
from kvstore.daemon.tokens import Tokens
from kvstore.errors import Overloaded, StoreError, VolumeInUse
from kvstore.framing import UNIX_PATH_BYTES_MAX, Channel, tune

BACKLOG = 1024
REAP_EVERY_S = 0.25
THREAD_STACK_BYTES = 1024 * 1024
"""Enough for RocksDB; 4,096 connections then reserve 4 GiB of address space, and touch little of it."""
REFUSED_KEPT_MAX = 64
"""Refused connections whose error is still on its way; the oldest is closed for good."""

log = logging.getLogger("kvstore.daemon")


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """Where the data plane listens, and whom it serves. ``tcp`` is (host, port), port 0 for any free one."""

    name: str
    tcp: tuple[str, int] | None = None
    unix_path: Path | None = None
    tokens: Tokens = field(default_factory=Tokens)
    connections_max: int = limits.CONNECTIONS_MAX
    hello_s: float = limits.HELLO_S_MAX
    frame_s: float = limits.FRAME_S_MAX
    idle_s: float = limits.IDLE_S_MAX
    same_host: bool = True
    """Lend segments to trusted clients on the Unix socket, and take puts from their memory."""
    lease_s: float = limits.LEASE_S
    stall_s: float = limits.STALL_S_MAX


class Server:
    """A running data plane. ``start`` makes one; ``stop`` ends it."""

    def __init__(
        self,
        config: ServerConfig,
        backend: Backend,
        listeners: list[socket.socket],
        metrics: ServerMetrics,
        admission: Admission,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        lease_s = config.lease_s if config.same_host else 0.0
        self._session = Session(
            backend, admission, metrics, config.name, config.tokens, monotonic, lease_s=lease_s, stall_s=config.stall_s
        )
        self._listeners = listeners
        self._metrics = metrics
        self._monotonic = monotonic
        self._connections: set[Connection] = set()
        self._refused: deque[socket.socket] = deque()
        self._lock = threading.Lock()
        self._draining = threading.Event()
        self._ended = threading.Condition(self._lock)
        self._threads: list[threading.Thread] = []

    @classmethod
    def start(
        cls, config: ServerConfig, backend: Backend, metrics: ServerMetrics, admission: Admission | None = None
    ) -> Server:
        """Bind, listen and serve. Raises ValueError for an impossible address; OSError, VolumeInUse for a taken one."""
        listeners: list[socket.socket] = []
        try:
            if config.tcp is not None:
                listeners.append(_listen_tcp(*config.tcp))
            if config.unix_path is not None:
                listeners.append(_listen_unix(config.unix_path))
        except BaseException:
            for listener in listeners:
                listener.close()
            raise
        if not listeners:
            raise ValueError("a server needs a TCP address or a Unix socket to listen on")
        server = cls(config, backend, listeners, metrics, admission or Admission())
        for listener in listeners:
            server._spawn(server._accept, listener, name="accept")
        server._spawn(server._reap, name="reaper")
        return server

    @property
    def addresses(self) -> list[str]:
        """As a client takes them."""
        return [_address_of(listener) for listener in self._listeners]

    @property
    def connections(self) -> int:
        return len(self._connections)

    def stop(self, drain_s: float = limits.DRAIN_S) -> bool:
        """Stop accepting, let requests in flight finish for ``drain_s``, then close. True if all finished in time."""
        self._draining.set()
        for listener in self._listeners:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
        ends_s = self._monotonic() + drain_s
        with self._ended:
            while self._connections and self._monotonic() < ends_s:
                for connection in self._connections:
                    if connection.idle:
                        connection.channel.shutdown(socket.SHUT_RD)
                self._ended.wait(0.05)  # a connection may have gone idle meanwhile
            drained = not self._connections
            for connection in self._connections:
                connection.channel.shutdown()
            self._ended.wait_for(lambda: not self._connections, timeout=1.0)
        for thread in self._threads:
            thread.join(timeout=2.0)
        for listener in self._listeners:
            listener.close()
        if self._config.unix_path is not None:
            self._config.unix_path.unlink(missing_ok=True)
        return drained

    # --- accepting --------------------------------------------------------------------------------------------------

    def _spawn(self, target: Callable[..., None], *args: object, name: str) -> None:
        thread = threading.Thread(target=target, args=args, name=f"store-{name}", daemon=True)
        thread.start()
        self._threads.append(thread)

    def _accept(self, listener: socket.socket) -> None:
        loopback = listener.family == socket.AF_UNIX or is_loopback(listener.getsockname()[0])
        while not self._draining.is_set():
            try:
                sock, _ = listener.accept()
            except OSError as error:
                if self._draining.is_set():
                    return
                self._metrics.accept_failures.inc()
                log.warning("accept failed: %s", error)
                self._draining.wait(0.1)  # out of descriptors, most likely: let some close
                continue
            try:
                tune(sock, loopback=loopback)
                self._admit(sock)
            except (OSError, RuntimeError) as error:
                self._metrics.accept_failures.inc()
                log.warning("connection refused: %s", error)
                sock.close()

    def _admit(self, sock: socket.socket) -> None:
        connection = Connection(Channel(sock, self._monotonic), self._monotonic() + self._config.hello_s)
        with self._lock:
            full = len(self._connections) >= self._config.connections_max
            if not full:
                self._connections.add(connection)
        if full:
            self._refuse(sock)
            return
        self._metrics.connections.inc()
        before = threading.stack_size(THREAD_STACK_BYTES)
        try:
            threading.Thread(target=self._serve, args=(connection,), name="store-connection", daemon=True).start()
        except RuntimeError:
            self._metrics.connections.dec()
            self._forget(connection)
            raise
        finally:
            threading.stack_size(before)

    def _refuse(self, sock: socket.socket) -> None:
        """Say why at once; the socket is closed a little later, so that the peer can read it."""
        error = Overloaded(f"the node has {self._config.connections_max} connections already", 1.0)
        self._metrics.error(error)
        with contextlib.suppress(OSError):
            sock.setblocking(False)
            sock.send(wire.encode_frame(wire.Opcode.ERROR, 0, wire.encode_error(error), reply=True))
            sock.shutdown(socket.SHUT_WR)
        with self._lock:
            self._refused.append(sock)
            oldest = self._refused.popleft() if len(self._refused) > REFUSED_KEPT_MAX else None
        if oldest is not None:
            oldest.close()

    # --- one connection ---------------------------------------------------------------------------------------------

    def _serve(self, connection: Connection) -> None:
        connection.hurry()
        try:
            if self._session.greet(connection):
                while not self._draining.is_set() and self._session.step(
                    connection, self._config.idle_s, self._config.frame_s
                ):
                    pass
        except StoreError as error:
            log.debug("connection ended: %s", error)
        finally:
            connection.close()
            self._metrics.connections.dec()
            self._forget(connection)

    def _forget(self, connection: Connection) -> None:
        with self._ended:
            self._connections.discard(connection)
            self._ended.notify_all()

    def _reap(self) -> None:
        """Shut down every connection whose present wait has gone on for too long."""
        while not self._draining.wait(REAP_EVERY_S):
            self._reap_once()
        while True:  # while draining too: a peer that does not read must not hold the drain up for ever
            with self._lock:
                if not self._connections:
                    break
            self._reap_once()
            time.sleep(REAP_EVERY_S)
        self._reap_once()

    def _reap_once(self) -> None:
        self._config.tokens.refresh()
        now_s = self._monotonic()
        with self._lock:
            neighbours = [connection.neighbour for connection in self._connections if connection.neighbour is not None]
            overdue = [connection for connection in self._connections if now_s > connection.until_s]
            refused = list(self._refused)
            self._refused.clear()
        for neighbour in neighbours:
            if neighbour.expire(now_s):
                self._metrics.leases_expired.inc()
        for connection in overdue:
            self._metrics.reaped.inc()
            connection.channel.shutdown()
        for sock in refused:
            sock.close()


def _listen_tcp(host: str, port: int) -> socket.socket:
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        tune(listener, loopback=is_loopback(host))
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise OSError(f"cannot listen on {host}:{port}: {error.strerror}") from error
    return listener


def _listen_unix(path: Path) -> socket.socket:
    """A Unix socket that only its user may connect to. A socket file that nobody answers on is replaced."""
    if len(os.fsencode(path)) > UNIX_PATH_BYTES_MAX:
        raise ValueError(f"the Unix socket's path {path} is longer than 107 bytes: give a shorter one with --unix")
    if path.exists():
        if not stat.S_ISSOCK(path.stat().st_mode):
            raise ValueError(f"{path} exists and is not a socket: remove it or give another path with --unix")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.settimeout(1.0)
            try:
                probe.connect(str(path))
            except (ConnectionRefusedError, FileNotFoundError):
                path.unlink(missing_ok=True)
            except OSError as error:  # who is too busy to answer listens all the same
                raise VolumeInUse(f"another process may listen on {path}: {error}") from error
            else:
                raise VolumeInUse(f"another process listens on {path}")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        tune(listener, loopback=True)
        listener.bind(str(path))
        path.chmod(0o600)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise OSError(f"cannot listen on {path}: {error.strerror}") from error
    return listener


def _address_of(listener: socket.socket) -> str:
    name = listener.getsockname()
    if listener.family == socket.AF_UNIX:
        return f"unix:{name}"
    return f"[{name[0]}]:{name[1]}" if listener.family == socket.AF_INET6 else f"{name[0]}:{name[1]}"
