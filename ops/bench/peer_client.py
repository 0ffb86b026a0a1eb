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
from typing import Any

KEY_BYTES = 32


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
        base = random.Random(size).randbytes(size)
        self.keys = [random.Random(f"{size} {at}").randbytes(KEY_BYTES) for at in range(batch)]
        self.payloads = [(key + base[KEY_BYTES:])[:size] for key in self.keys]


def timed(client: Any, op: str, blocks: Blocks) -> tuple[bool, float]:
    """One batch in one round trip: whether it did what it should, and its seconds. Comparing is not counted."""
    got: Any
    wanted: Any
    began_s = time.perf_counter()
    if op == "put":
        got, wanted = client.mset(dict(zip(blocks.keys, blocks.payloads, strict=True))), True
    elif op == "get":
        got, wanted = client.mget(blocks.keys), blocks.payloads
    else:
        got, wanted = client.exists(*blocks.keys), len(blocks.keys)
    took_s = time.perf_counter() - began_s
    return got == wanted, took_s


def main() -> None:
    client = connection(sys.argv[1])
    print(json.dumps({"server": client.info("server").get("redis_version", "")}), flush=True)
    known: dict[tuple[int, int], Blocks] = {}
    for line in sys.stdin:
        command = json.loads(line)
        shape = command["size"], command["batch"]
        if shape not in known:
            known.clear()  # one shape at a time: memory is shared with what is measured
            client.flushall()
            known[shape] = Blocks(*shape)
            client.mset(dict(zip(known[shape].keys, known[shape].payloads, strict=True)))
        done, took_s = timed(client, command["op"], known[shape])
        print(json.dumps({"seconds": took_s} if done else {"error": f"{command['op']} went wrong"}), flush=True)


if __name__ == "__main__":
    main()
