"""A client of a Redis-like server, in the environment of the peers: a script of its own that knows nothing of us.

Owns one connection and the buffers of what it puts. Needs redis (with hiredis) only. Invariants: what is got is
compared with what was put; the time is that of the client's calls alone.

    stdin   {"op": "put" | "get" | "exists", "size": BYTES, "batch": N}
    stdout  {"seconds": ...}
"""

from __future__ import annotations

import json
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


def main() -> None:
    client = connection(sys.argv[1])
    print(json.dumps({"server": client.info("server").get("redis_version", "")}), flush=True)
    blocks = Blocks(1, 0)
    ways: dict[str, Way] = {}
    for line in sys.stdin:
        command = json.loads(line)
        op = command["op"]
        if blocks.shape != (command["size"], command["batch"]):
            ways.clear()
            client.flushall()  # one shape at a time: memory is shared with what is measured
            blocks = Blocks(command["size"], command["batch"])
            one_by_one(client, "put", blocks)
        if op not in ways:
            ways[op] = together if op == "exists" else fastest(client, op, blocks)
        done, took_s = timed(client, op, blocks, ways[op])
        print(json.dumps({"seconds": took_s} if done else {"error": f"{op} went wrong"}), flush=True)


if __name__ == "__main__":
    main()
