"""Stores of every kind for the tests that run on all of them: in memory, on disk, and served over sockets."""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvstore import limits
from kvstore.client import StoreClient
from kvstore.daemon.admission import Admission
from kvstore.daemon.cipher import CipherKey, Keyring
from kvstore.daemon.files import Files
from kvstore.daemon.metrics import ServerMetrics
from kvstore.daemon.node import Node, NodeConfig
from kvstore.daemon.rights import grant_of
from kvstore.daemon.server import Server, ServerConfig
from kvstore.daemon.tokens import Token, Tokens
from kvstore.keys import Space, SpaceId, tenant_salt
from kvstore.testing import TEST_RULES, ManualClock, MemoryStore
from kvstore.traffic import ClassRules

TENANT = "acme"
"""Whose token one of the stores is asked under; it reaches only spaces that carry its salt."""
CAPACITY_BYTES = 32 * limits.MIB
STATE_POOL_BYTES = 4 * limits.MIB


@contextmanager
def short_dir() -> Iterator[Path]:
    """A directory whose path leaves room for a Unix socket (107 bytes)."""
    path = Path(tempfile.mkdtemp(prefix="kv"))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


class ColdFiles(Files):
    """Of which nobody knows what is in the page cache, so that every block is read around it."""

    def resident_pages(self, fd: int, offset: int, count: int) -> int | None:
        return None


def open_memory(clock: ManualClock) -> MemoryStore:
    return MemoryStore(clock, TEST_RULES, capacity_bytes=CAPACITY_BYTES, state_pool_bytes=STATE_POOL_BYTES)


def open_node(
    data: Path,
    clock: ManualClock,
    capacity_bytes: int = CAPACITY_BYTES,
    rules: ClassRules = TEST_RULES,
    keyring: Keyring | None = None,
    around_cache: bool = False,
) -> Node:
    config = NodeConfig(
        directories=(data,),
        capacity_bytes=capacity_bytes,
        segment_bytes=limits.MIB,
        state_pool_bytes=STATE_POOL_BYTES,
        keyring=keyring or Keyring(),
        bypass_page_cache=around_cache,
    )
    return Node.open(config, clock, rules, files=ColdFiles() if around_cache else None)


@contextmanager
def served(
    backend: Any,
    folder: Path,
    *,
    token: str = "",
    tokens: Tokens | None = None,
    admission: Admission | None = None,
    metrics: ServerMetrics | None = None,
    **settings: Any,
) -> Iterator[Server]:
    """A data plane over a backend, on a Unix socket and a free TCP port of loopback."""
    config = ServerConfig(
        name="test",
        tcp=("127.0.0.1", 0),
        unix_path=folder / "store.sock",
        tokens=tokens or Tokens.open(token, None),
        **settings,
    )
    server = Server.start(config, backend, metrics or ServerMetrics(), admission)
    try:
        yield server
    finally:
        server.stop(drain_s=2.0)


@contextmanager
def client_of(*addresses: str, **options: Any) -> Iterator[StoreClient]:
    client = StoreClient.connect(addresses, **options)
    try:
        yield client
    finally:
        client.close()


@dataclass(frozen=True, slots=True)
class Subject:
    """A store under test and the clock that it goes by. ``backends``: what lies behind it."""

    store: Any
    clock: ManualClock
    backends: tuple[Any, ...]


def _memory(stack: ExitStack) -> Subject:
    clock = ManualClock()
    store = open_memory(clock)
    return Subject(store, clock, (store,))


def _node(stack: ExitStack) -> Subject:
    clock = ManualClock()
    node = open_node(stack.enter_context(short_dir()) / "data", clock)
    stack.callback(node.close)
    return Subject(node, clock, (node,))


def _client(
    stack: ExitStack,
    nodes: int,
    pick: Callable[[Server], str],
    on_disk: bool,
    *,
    same_host: bool = False,
    keyring: Keyring | None = None,
    around_cache: bool = False,
) -> Subject:
    clock = ManualClock()
    backends, addresses = [], []
    for at in range(nodes):
        folder = stack.enter_context(short_dir())
        if on_disk:
            backend: Any = open_node(folder / "data", clock, keyring=keyring, around_cache=around_cache)
            stack.callback(backend.close)
        else:
            backend = open_memory(clock)
        server = stack.enter_context(served(backend, folder))
        backends.append(backend)
        addresses.append(f"n{at}={pick(server)}")
    client = stack.enter_context(client_of(*addresses, same_host=same_host))
    return Subject(client, clock, tuple(backends))


def _tcp(server: Server) -> str:
    return server.addresses[0]


def _unix(server: Server) -> str:
    return server.addresses[1]


class ByRole:
    """A store asked under two tokens: the data plane under one's role, everything else as an operator.

    Spaces that do not carry the salt of TENANT are registered with the operator's token too, which is a worker's.
    """

    DATA = frozenset({"lookup", "get_into", "put", "touch", "put_state", "get_state"})

    def __init__(self, data: StoreClient, control: StoreClient) -> None:
        self._data = data
        self._control = control

    def __getattr__(self, name: str) -> Any:
        return getattr(self._data if name in self.DATA else self._control, name)

    def register_space(self, space: Space, **options: Any) -> SpaceId:
        mine = space.tenant_salt == tenant_salt(TENANT)
        return (self._data if mine else self._control).register_space(space, **options)


def _by_role(stack: ExitStack, role: str) -> Subject:
    """A node on this host that asks for a token, and shares memory where the role may."""
    clock = ManualClock()
    folder = stack.enter_context(short_dir())
    backend = open_node(folder / "data", clock)
    stack.callback(backend.close)
    names = {"data of the role": [role], "operator of the node": ["worker", "operator"]}
    tokens = Tokens([Token(hashlib.sha256(name.encode()).digest(), grant_of(roles)) for name, roles in names.items()])
    server = stack.enter_context(served(backend, folder, tokens=tokens))
    data, control = (stack.enter_context(client_of(_unix(server), token=name)) for name in names)
    return Subject(ByRole(data, control), clock, (backend,))


EVERYBODY = Keyring(default=(CipherKey.make(1, bytes(range(32)), default=True),))
"""One cipher key for the blocks of all spaces."""

SUBJECTS: dict[str, Callable[[ExitStack], Subject]] = {
    "memory": _memory,
    "node": _node,
    "unix": lambda stack: _client(stack, 1, _unix, on_disk=True),
    "tcp": lambda stack: _client(stack, 1, _tcp, on_disk=True),
    "local": lambda stack: _client(stack, 1, _unix, on_disk=True, same_host=True),
    "two-nodes": lambda stack: _client(stack, 2, _unix, on_disk=True, same_host=True),
    "memory-served": lambda stack: _client(stack, 1, _unix, on_disk=False, same_host=True),
    "encrypted": lambda stack: _client(stack, 1, _unix, on_disk=True, same_host=True, keyring=EVERYBODY),
    "around-cache": lambda stack: _client(stack, 1, _unix, on_disk=True, same_host=True, around_cache=True),
    "worker-token": lambda stack: _by_role(stack, "worker"),
    "tenant-token": lambda stack: _by_role(stack, f"tenant:{TENANT}"),
}


@contextmanager
def subject(kind: str) -> Iterator[Subject]:
    with ExitStack() as stack:
        yield SUBJECTS[kind](stack)
