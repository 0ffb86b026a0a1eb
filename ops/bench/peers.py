"""Other stores on this machine: Redis, Valkey, LMCache, Mooncake, RocksDB in its client's process, and plain files.

Owns their processes and folders. Does not install anything: a peer that is not there is named, with what to install.
Invariants: a peer holds no more than the blocks of one case; a server listens on loopback only, keeps nothing on disk,
and is ended whatever happens.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ops.bench.child import ChildFailed, heard, stop, tell
from ops.bench.measure import Elsewhere

START_S = 20.0
LMCACHE_START_S = 90.0
"""It imports torch, in its client and in its server."""
PEERS = ("redis", "valkey", "lmcache", "mooncake", "files", "rocksdb")
PEER_FAILURES = (ChildFailed, OSError)
"""What a peer may end with in mid-run: the case goes on without it."""
NO_SERVER = ("files", "rocksdb")
"""In their client's own process: no bar counts them as a peer."""
SERVERS = {"redis": "redis-server", "valkey": "valkey-server"}
PACKAGES = {"redis": "redis-server", "valkey": "valkey-server (Debian 13 and later)"}
REUSE_MEMORY = {
    "MC_STORE_MEMCPY": "0",  # Mooncake's client copies within its own process otherwise, where a server would send
    "MALLOC_MMAP_THRESHOLD_": str(1 << 32),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 33),
    "MALLOC_TOP_PAD_": str(1 << 28),
}
"""Set for the clients, which allocate what they receive: without it fresh memory costs them half of their speed."""
QUIET = {"LMCACHE_LOG_LEVEL": "ERROR", "LMCACHE_TRACK_USAGE": "false"}
"""Else LMCache writes lines among those of the bench, and tells its makers of itself."""
CLIENT = Path(__file__).with_name("peer_client.py")


class Peer(Protocol):
    """What is compared with. ``read`` and ``write`` move one batch, which stays the same within a case."""

    name: str

    def pids(self) -> Sequence[int]: ...

    def read(self, size: int, views: Sequence[memoryview]) -> Elsewhere | None: ...

    def write(self, size: int, views: Sequence[memoryview]) -> Elsewhere | None: ...

    def exists(self, count: int) -> Elsewhere | None: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Skipped:
    """A peer that is not measured, and why."""

    name: str
    reason: str


class Files:
    """One file a block, written without fsync, under the temporary name first, and read into the same buffers."""

    name = "files"

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._written: tuple[int, int] = (0, 0)
        folder.mkdir(parents=True)

    def pids(self) -> Sequence[int]:
        return ()

    def read(self, size: int, views: Sequence[memoryview]) -> Elsewhere | None:
        if self._written != (size, len(views)):
            self.write(size, views)
        for at, view in enumerate(views):
            with open(self._path(size, at), "rb", buffering=0) as file:
                if file.readinto(view) != size:
                    raise ChildFailed("a file of the peer `files` is short")
        return None

    def write(self, size: int, views: Sequence[memoryview]) -> Elsewhere | None:
        for at, view in enumerate(views):
            path = self._path(size, at)
            draft = path + ".tmp"
            with open(draft, "wb", buffering=0) as file:
                file.write(view)
            os.replace(draft, path)
        self._written = (size, len(views))
        return None

    def exists(self, count: int) -> Elsewhere | None:
        for at in range(count):
            os.path.exists(self._path(0, at))
        return None

    def _path(self, size: int, at: int) -> str:
        return f"{self._folder}/{size}-{at}"

    def close(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)


class ClientPeer:
    """A client process of another store over one transport; ``server`` is None where the store is in the client."""

    def __init__(
        self, name: str, server: subprocess.Popen[bytes] | None, client: subprocess.Popen[bytes], owns: bool
    ) -> None:
        self.name = name
        self._server = server
        self._client = client
        self._owns = owns

    def pids(self) -> Sequence[int]:
        return (self._client.pid,) if self._server is None else (self._server.pid, self._client.pid)

    def read(self, size: int, views: Sequence[memoryview]) -> Elsewhere | None:
        return self._ask("get", size, len(views))

    def write(self, size: int, views: Sequence[memoryview]) -> Elsewhere | None:
        return self._ask("put", size, len(views))

    def exists(self, count: int) -> Elsewhere | None:
        return self._ask("exists", 32, count)

    def _ask(self, op: str, size: int, batch: int) -> Elsewhere:
        tell(self._client, {"op": op, "size": size, "batch": batch})
        return Elsewhere(heard(self._client)["seconds"])

    def close(self) -> None:
        stop(self._client)
        if self._owns and self._server is not None:
            stop(self._server)


def start(names: Sequence[str], folder: Path, python: str) -> tuple[list[Peer], list[Skipped], dict[str, str]]:
    """The peers that are here, those that are not, and the versions of the servers."""
    peers: list[Peer] = []
    skipped: list[Skipped] = []
    versions: dict[str, str] = {}
    for name in names:
        if name == "files":
            peers.append(Files(folder / "peer-files"))
            continue
        try:
            found, version = _start_one(name, folder, python)
        except (ChildFailed, OSError) as error:
            skipped.append(Skipped(name, str(error)))
        else:
            peers += found
            versions[name] = version
    return peers, skipped, versions


def _start_one(name: str, folder: Path, python: str) -> tuple[list[Peer], str]:
    """One peer's clients and version. Raises ChildFailed that says what to install."""
    if name == "lmcache":
        return _start_lmcache(folder, python)
    if name == "mooncake":
        return _start_mooncake(folder, python)
    if name == "rocksdb":
        client = _client(python, name, str(folder / "peer-rocksdb"))
        return [ClientPeer(name, None, client, owns=False)], _greeted(client, python)
    return _start_resp(name, folder, python)


def _start_mooncake(folder: Path, python: str) -> tuple[list[Peer], str]:
    """A master with its metadata server, and a client that lends it memory."""
    program = _program("mooncake_master", python)
    if program is None:
        raise ChildFailed(
            f"mooncake_master is not installed: {python} -m pip install mooncake-transfer-engine-non-cuda"
        )
    master, metadata, metrics = (_free_port() for _ in range(3))
    command = [program, f"--rpc_port={master}", f"--metrics_port={metrics}", "--enable_http_metadata_server=true"]
    command += ["--http_metadata_server_host=127.0.0.1", f"--http_metadata_server_port={metadata}"]
    with (folder / "mooncake.log").open("wb") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        _await(lambda: _listens(master) and _listens(metadata), server)
        client = _client(python, "mooncake", f"127.0.0.1:{master},127.0.0.1:{metadata}")
        version = _greeted(client, python)
    except BaseException:
        stop(server)
        raise
    return [ClientPeer("mooncake tcp", server, client, owns=True)], version


def _start_lmcache(folder: Path, python: str) -> tuple[list[Peer], str]:
    """What of LMCache has a server: its own (lm://), and its client in C++ of a Redis, if that is installed."""
    ways: list[tuple[str, list[str], int]] = []
    port = _free_port()
    ways.append(("server", [python, "-m", "lmcache.v1.server", "127.0.0.1", str(port)], port))
    if (program := _program(SERVERS["redis"], python)) is not None:
        port = _free_port()
        ways.append(("redis", _resp_command(program, port, folder), port))
    peers: list[Peer] = []
    version = ""
    try:
        for way, command, port in ways:
            with (folder / f"lmcache-{way}.log").open("wb") as log:
                server = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, **QUIET})
            try:
                _await_lmcache(port, server, python)
                client = _client(python, f"lmcache-{way}", f"127.0.0.1:{port}")
                version = _greeted(client, python, LMCACHE_START_S)
            except BaseException:
                stop(server)
                raise
            peers.append(ClientPeer(f"lmcache {way}", server, client, owns=True))
    except BaseException:
        for peer in peers:
            peer.close()
        raise
    return peers, f"{version} (server: its lm:// server and connector; redis: its C++ client of a Redis)"


def _await_lmcache(port: int, server: subprocess.Popen[bytes], python: str) -> None:
    try:
        _await(lambda: _listens(port), server, LMCACHE_START_S)
    except ChildFailed as error:
        raise ChildFailed(
            f"{error}: is lmcache of ops/bench/requirements-peers.txt installed in {python}? Give another Python with "
            "--peers-python"
        ) from error


def _program(name: str, python: str) -> str | None:
    """A program on the path, or beside the peers' Python: packages bring some servers."""
    return shutil.which(name) or shutil.which(name, path=str(Path(python).parent))


def _client(python: str, kind: str, where: str) -> subprocess.Popen[bytes]:
    command = [python, str(CLIENT), kind, where]
    environment = {**os.environ, **REUSE_MEMORY, **QUIET}
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)


def _greeted(client: subprocess.Popen[bytes], python: str, wait_s: float = START_S) -> str:
    """The version that a client tells. Raises ChildFailed, the client ended."""
    try:
        return _greeting(client, python, wait_s)
    except BaseException:
        stop(client)
        raise


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _start_resp(name: str, folder: Path, python: str) -> tuple[list[Peer], str]:
    """A server and two clients, one a transport. Raises ChildFailed that says what to install."""
    program = _program(SERVERS[name], python)
    if program is None:
        raise ChildFailed(f"{SERVERS[name]} is not installed: apt-get install {PACKAGES[name]}")
    unix = folder / f"{name}.sock"
    port = _free_port()
    command = [*_resp_command(program, port, folder), "--unixsocket", str(unix)]
    clients: list[subprocess.Popen[bytes]] = []
    with (folder / f"{name}.log").open("wb") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        _await(unix.exists, server)
        peers: list[Peer] = []
        for transport, where in (("tcp", f"127.0.0.1:{port}"), ("unix", f"unix:{unix}")):
            client = _client(python, "resp", where)
            clients.append(client)
            version = _greeting(client, python)
            peers.append(ClientPeer(f"{name} {transport}", server, client, owns=transport == "unix"))
    except BaseException:
        for process in (*clients, server):
            stop(process)
        raise
    return peers, version


def _resp_command(program: str, port: int, folder: Path) -> list[str]:
    """A server of Redis's kind that keeps nothing on disk."""
    command = [program, "--port", str(port), "--bind", "127.0.0.1"]
    return [*command, "--save", "", "--appendonly", "no", "--daemonize", "no", "--dir", str(folder)]


def _greeting(client: subprocess.Popen[bytes], python: str, wait_s: float = START_S) -> str:
    try:
        return str(heard(client, wait_s)["server"])
    except ChildFailed as error:
        raise ChildFailed(
            f"no client in {python}: install ops/bench/requirements-peers.txt in an environment of its own and give it "
            f"with --peers-python ({error})"
        ) from error


def _await(ready: Callable[[], bool], process: subprocess.Popen[bytes], wait_s: float = START_S) -> None:
    ends_s = time.monotonic() + wait_s
    while not ready():
        if process.poll() is not None or time.monotonic() > ends_s:
            raise ChildFailed("the server did not start")
        time.sleep(0.05)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
