"""A client of another store, in the environment of the peers: a script of its own that knows nothing of us.

Owns one connection and the buffers of what it puts. Needs what its store needs: redis (with hiredis) for Redis and
Valkey, mooncake-transfer-engine, lmcache, or rocksdb-py. Invariants: what is got is
compared with what was put; the time is that of the client's calls alone.

    stdin   {"op": "put" | "get" | "exists", "size": BYTES, "batch": N}
    stdout  {"seconds": ...}
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import mmap
import os
import random
import sys
import time
from collections.abc import Callable
from typing import Any

KEY_BYTES = 32
Way = Callable[[Any, str, Any], Any]


def connection(where: str) -> Any:
    """A client of ``unix:/path`` or ``host:port``."""
    import redis

    if where.startswith("unix:"):
        return redis.Redis(unix_socket_path=where.removeprefix("unix:"))
    host, _, port = where.rpartition(":")
    return redis.Redis(host=host, port=int(port))


class Blocks:
    """The keys and payloads of one size and batch."""

    def __init__(self, size: int, batch: int) -> None:
        self.shape = (size, batch)
        base = random.Random(size).randbytes(size)
        self.keys = [random.Random(f"{size} {at}").randbytes(KEY_BYTES) for at in range(batch)]
        self.payloads = [(key + base[KEY_BYTES:])[:size] for key in self.keys]


def together(client: Any, op: str, blocks: Blocks) -> Any:
    """One command for the batch."""
    if op == "put":
        return client.mset(dict(zip(blocks.keys, blocks.payloads, strict=True)))
    return client.mget(blocks.keys)


def pipelined(client: Any, op: str, blocks: Blocks) -> Any:
    """A command a block, all sent at once."""
    pipeline = client.pipeline(transaction=False)
    _each(pipeline, op, blocks)
    return pipeline.execute()


def one_by_one(client: Any, op: str, blocks: Blocks) -> Any:
    """A command and an answer a block."""
    return _each(client, op, blocks)


def _each(target: Any, op: str, blocks: Blocks) -> list[Any]:
    if op == "put":
        return [target.set(key, payload) for key, payload in zip(blocks.keys, blocks.payloads, strict=True)]
    return [target.get(key) for key in blocks.keys]


WAYS = (together, pipelined, one_by_one)
TRIALS = 3


def timed(client: Any, op: str, blocks: Blocks, way: Way) -> tuple[bool, float]:
    """One batch: whether it did what it should, and its seconds. Comparing is not counted."""
    began_s = time.perf_counter()
    got = client.exists(*blocks.keys) if op == "exists" else way(client, op, blocks)
    took_s = time.perf_counter() - began_s
    if op == "exists":
        return got == len(blocks.keys), took_s
    return (got is True or all(got)) if op == "put" else got == blocks.payloads, took_s


def fastest(client: Any, op: str, blocks: Blocks) -> Way:
    """Which way is the fastest for this batch on this machine: the peer is to show its best."""
    took_s = {way: min(timed(client, op, blocks, way)[1] for _ in range(TRIALS)) for way in WAYS}
    return min(WAYS, key=lambda way: took_s[way])


class RespSide:
    """A server that speaks Redis's protocol; each operation goes the way that is the fastest for this batch."""

    def __init__(self, where: str) -> None:
        self._client = connection(where)
        self.version = self._client.info("server").get("redis_version", "")
        self._ways: dict[str, Way] = {}

    def fill(self, blocks: Blocks) -> None:
        self._ways.clear()
        self._client.flushall()  # one shape at a time: memory is shared with what is measured
        one_by_one(self._client, "put", blocks)

    def timed(self, op: str, blocks: Blocks) -> tuple[bool, float]:
        if op not in self._ways:
            self._ways[op] = together if op == "exists" else fastest(self._client, op, blocks)
        return timed(self._client, op, blocks, self._ways[op])


class MooncakeSide:
    """A Mooncake store whose memory this process lends, over TCP, from and into registered buffers."""

    SEGMENT_BYTES = 1 << 30
    PUTS_MAX = 512
    """At once: its TCP transport refuses transfers beyond a queue's length."""
    version = "installed"

    def __init__(self, where: str) -> None:
        from mooncake.store import MooncakeDistributedStore  # type: ignore[import-not-found]

        master, metadata = where.split(",")
        self._store: Any = MooncakeDistributedStore()
        self._base = 0
        metadata = f"http://{metadata}/metadata"
        if self._store.setup("127.0.0.1", metadata, self.SEGMENT_BYTES, 64 << 20, "tcp", "", master):
            raise OSError("Mooncake's client could not be set up")

    def fill(self, blocks: Blocks) -> None:
        size, count = blocks.shape
        if self._base:
            self._store.unregister_buffer(self._base)
        self._keys = [key.hex() for key in blocks.keys]
        self._sizes = [size] * count
        self._bytes = size * count
        self._memory = mmap.mmap(-1, 2 * self._bytes)
        self._memory[:] = b"".join(blocks.payloads) + bytes(self._bytes)
        self._base = base = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        if self._store.register_buffer(base, 2 * self._bytes):
            raise OSError("Mooncake's client could not register its buffers")
        self._sources = [base + at * size for at in range(count)]
        self._targets = [base + self._bytes + at * size for at in range(count)]
        self.timed("put", blocks)

    def timed(self, op: str, blocks: Blocks) -> tuple[bool, float]:
        if op == "put":
            self._store.remove_all(True)  # not counted: a put of a key that is there does nothing
        began_s = time.perf_counter()
        if op == "put":
            done = []
            for at in range(0, len(self._keys), self.PUTS_MAX):
                part = slice(at, at + self.PUTS_MAX)
                done += self._store.batch_put_from(self._keys[part], self._sources[part], self._sizes[part])
        elif op == "get":
            done = self._store.batch_get_into(self._keys, self._targets, self._sizes)
        else:
            done = self._store.batch_is_exist(self._keys)
        took_s = time.perf_counter() - began_s
        expected = {"put": 0, "get": blocks.shape[0], "exists": 1}[op]
        same = op != "get" or self._memory[: self._bytes] == self._memory[self._bytes :]
        return set(done) == {expected} and same, took_s


class RocksSide:
    """RocksDB in this process, blocks as plain values: a store of its own without a server."""

    version = "installed"

    def __init__(self, folder: str) -> None:
        import rocksdbpy

        options = rocksdbpy.Option()
        options.create_if_missing(True)
        self._rocks = rocksdbpy
        self._database = rocksdbpy.open(folder, options)
        self._keys: list[bytes] = []

    def fill(self, blocks: Blocks) -> None:
        for key in self._keys:
            self._database.delete(key)
        self._keys = blocks.keys
        self.timed("put", blocks)

    def timed(self, op: str, blocks: Blocks) -> tuple[bool, float]:
        began_s = time.perf_counter()
        if op == "put":
            batch = self._rocks.WriteBatch()
            for key, payload in zip(blocks.keys, blocks.payloads, strict=True):
                batch.add(key, payload)
            self._database.write(batch)
            return True, time.perf_counter() - began_s
        got = self._database.multi_get(blocks.keys, False)
        took_s = time.perf_counter() - began_s
        return [bytes(one) if one is not None else None for one in got] == blocks.payloads, took_s


class LmcacheServerSide:
    """LMCache's own remote backend (``lm://``): its connector, its server, and objects of its local memory.

    The server answers no put: one ends when the last key of its batch is found, on the same connection.
    """

    MEMORY_GIB = 2.0
    """Of the connector's process: what is put, and what one batch of gets gives."""
    SHAPE = (1, 2, 16, 1, 64)
    """Of a chunk of some model: it must have one, but does not bound what is moved."""

    def __init__(self, where: str) -> None:
        import torch
        from lmcache.v1 import memory_management
        from lmcache.v1.config import LMCacheEngineConfig
        from lmcache.v1.metadata import LMCacheMetadata
        from lmcache.v1.protocol import init_remote_metadata_info
        from lmcache.v1.storage_backend.connector.lm_connector import LMCServerConnector
        from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend

        self.version = _version_of("lmcache")
        self._torch: Any = torch
        self._format = memory_management.MemoryFormat.KV_2LTD
        metadata = LMCacheMetadata("bench", 1, 1, 0, 0, torch.uint8, self.SHAPE, chunk_size=self.SHAPE[2])
        config = LMCacheEngineConfig.from_defaults(local_cpu=True, max_local_cpu_size=self.MEMORY_GIB)
        init_remote_metadata_info(1)
        self._memory = LocalCPUBackend(config, metadata, "cpu")
        self._loop = asyncio.new_event_loop()
        host, _, port = where.rpartition(":")
        self._connector = LMCServerConnector(host, int(port), self._loop, self._memory)
        self._objects: list[Any] = []

    def fill(self, blocks: Blocks) -> None:
        from lmcache.utils import CacheEngineKey

        _give_back(self._objects)
        size, count = blocks.shape
        uint8 = self._torch.uint8
        # The server forgets nothing: the same keys again, so that it holds the blocks of one case.
        self._keys = [CacheEngineKey("bench", 1, 0, at, uint8) for at in range(count)]
        self._objects = [self._memory.allocate(self._torch.Size([size]), uint8, self._format) for _ in range(count)]
        for item, payload in zip(self._objects, blocks.payloads, strict=True):
            memoryview(item.byte_array).cast("B")[:] = payload
        self.timed("put", blocks)

    def timed(self, op: str, blocks: Blocks) -> tuple[bool, float]:
        run: Any = {"put": self._put, "get": self._get, "exists": self._exists}[op]
        began_s = time.perf_counter()
        got = self._loop.run_until_complete(run())
        took_s = time.perf_counter() - began_s
        if op != "get":
            return all(got), took_s
        same = None not in got and [bytes(item.byte_array) for item in got] == blocks.payloads
        _give_back([item for item in got if item is not None])
        return same, took_s

    async def _put(self) -> list[bool]:
        for key, item in zip(self._keys, self._objects, strict=True):
            await self._connector.put(key, item)
        return [await self._connector.exists(self._keys[-1])]

    async def _get(self) -> list[Any]:
        return [await self._connector.get(key) for key in self._keys]

    async def _exists(self) -> list[bool]:
        return [await self._connector.exists(key) for key in self._keys]


def _give_back(objects: list[Any]) -> None:
    """To LMCache's memory."""
    for item in objects:
        item.ref_count_down()


def _version_of(package: str) -> str:
    from importlib.metadata import version

    return version(package)


class LmcacheRedisSide:
    """LMCache's client of Redis in C++, the one of its engines, with the buffers that it reads into and writes from."""

    CONNECTIONS = 4
    """Its threads, each with a connection: 1, 2 and 8 were slower on two cores."""

    def __init__(self, where: str) -> None:
        from lmcache.v1.storage_backend.native_clients.resp_client import RESPClient

        self.version = _version_of("lmcache")
        self._where = where
        self._loop = asyncio.new_event_loop()
        host, _, port = where.rpartition(":")
        self._client: Any = RESPClient(host, int(port), self.CONNECTIONS, loop=self._loop)

    def fill(self, blocks: Blocks) -> None:
        connection(self._where).flushall()  # one shape at a time: memory is shared with what is measured
        size, count = blocks.shape
        self._keys = [key.hex() for key in blocks.keys]
        self._sources = [memoryview(bytearray(payload)) for payload in blocks.payloads]
        self._targets = [memoryview(bytearray(size)) for _ in range(count)]
        for target in self._targets:
            target[:] = bytes(size)  # touched
        self.timed("put", blocks)

    def timed(self, op: str, blocks: Blocks) -> tuple[bool, float]:
        for target in self._targets:
            target[:KEY_BYTES] = bytes(KEY_BYTES)  # what came before is not taken for an answer
        began_s = time.perf_counter()
        got = self._loop.run_until_complete(self._run(op))
        took_s = time.perf_counter() - began_s
        if op == "exists":
            return all(got), took_s
        return op == "put" or self._targets == self._sources, took_s

    async def _run(self, op: str) -> Any:
        if op == "put":
            return await self._client.batch_set(self._keys, self._sources)
        if op == "get":
            return await self._client.batch_get(self._keys, self._targets)
        return await self._client.batch_exists(self._keys)


SIDES: dict[str, Callable[[str], Any]] = {
    "resp": RespSide,
    "mooncake": MooncakeSide,
    "lmcache-server": LmcacheServerSide,
    "lmcache-redis": LmcacheRedisSide,
    "rocksdb": RocksSide,
}


def main() -> None:
    # What a library prints must not be taken for an answer.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    side = SIDES[sys.argv[1]](sys.argv[2])
    print(json.dumps({"server": side.version}), file=answers)
    blocks = Blocks(1, 0)
    for line in sys.stdin:
        command = json.loads(line)
        op = command["op"]
        if blocks.shape != (command["size"], command["batch"]):
            blocks = Blocks(command["size"], command["batch"])
            side.fill(blocks)
        done, took_s = side.timed(op, blocks)
        print(json.dumps({"seconds": took_s} if done else {"error": f"{op} went wrong"}), file=answers)


if __name__ == "__main__":
    main()
