"""Access patterns of real traffic: who asks for which prefix, in which order.

Owns two public trace formats and a made-up pattern. Does not know the store. Invariants: a trace is read line by line
and every field is checked; equal block numbers of one scope mean equal tokens; requests come in order of time.
"""

from __future__ import annotations

import gzip
import heapq
import json
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

LINE_BYTES_MAX = 64 << 20
BLOCKS_MAX = 32_768
"""Blocks of one prompt, as many as one look-up takes; what follows is cut."""
ARRIVALS_PER_S = 0.05
"""Conversations begin at this rate (Poisson) where a trace gives no absolute times."""


class TraceError(ValueError):
    """A trace cannot be used; the message says which line and why."""


@dataclass(frozen=True, slots=True, order=True)
class Access:
    """One request: ``blocks`` number its prompt's whole blocks, in order; numbers mean the same within ``scope``."""

    at_s: float
    scope: int
    blocks: tuple[int, ...]


def read(path: Path, *, requests: int, seed: int) -> list[Access]:
    """The first requests of a trace, in order of time. Raises TraceError, OSError.

    Knows one JSON object a line, gzipped or not: ``{"timestamp": ms, "hash_ids": [...]}`` (global block numbers, as in
    the Mooncake traces), or a conversation ``{"requests": [{"t": s, "runs": [[first, count], ...]}, ...]}``.
    """
    opener = gzip.open if path.suffix == ".gz" else open
    conversations: list[list[Access]] = []
    begins_s = 0.0
    arrivals = random.Random(seed)
    with opener(path, "rb") as file:
        for number, line in enumerate(iter(lambda: file.readline(LINE_BYTES_MAX), b""), 1):
            try:
                row = json.loads(line)
                if "requests" in row:
                    begins_s += arrivals.expovariate(ARRIVALS_PER_S)
                    conversations.append(list(_conversation(row["requests"], number, begins_s)))
                else:
                    blocks = _blocks(row["hash_ids"])
                    conversations.append([Access(float(row["timestamp"]) / 1000, 0, blocks)])
            except (KeyError, TypeError, ValueError, OverflowError) as error:
                raise TraceError(f"{path.name}, line {number}: {type(error).__name__}: {error}") from error
    accesses = list(islice(heapq.merge(*map(sorted, conversations)), requests))
    if not accesses:
        raise TraceError(f"{path.name} has no requests")
    return accesses


def _conversation(requests: Any, scope: int, begins_s: float) -> Iterator[Access]:
    """Requests of one conversation; those of a sub-agent count their time from its last ``sub_begin``."""
    sub_begins_s = 0.0
    for request in requests:
        kind = request.get("k", "n")
        if kind == "sub_begin":
            sub_begins_s = float(request["t"])
        elif "runs" in request:
            at_s = begins_s + float(request["t"]) + (sub_begins_s if kind == "sub" else 0.0)
            runs = [range(int(first), int(first) + int(count)) for first, count in request["runs"]]
            yield Access(at_s, scope, _blocks(number for run in runs for number in run))


def _blocks(numbers: Iterable[Any]) -> tuple[int, ...]:
    blocks = tuple(int(number) for number in islice(numbers, BLOCKS_MAX))
    if any(not 0 <= number < 2**32 for number in blocks):
        raise ValueError("a block's number is not in 0..2^32")
    return blocks


def multi_turn(conversations: int, turns: int, system_blocks: int, turn_blocks: int, seed: int) -> list[Access]:
    """Conversations that take turns at random: each sends all that was said before, and something new."""
    order = [scope for scope in range(1, conversations + 1) for _ in range(turns)]
    random.Random(seed).shuffle(order)
    said = dict.fromkeys(order, system_blocks)
    accesses = []
    for at, scope in enumerate(order):
        said[scope] += turn_blocks
        accesses.append(Access(float(at), scope, tuple(range(said[scope]))))
    return accesses
