"""Traces of real traffic: who asked for which prefix, when.

Owns the formats that are read: two public ones, and the gateway's own access log. Does not know what happens to the
requests. Invariants: a trace is read line by line, every field is checked, and the first one that cannot be used is
named with its line; equal block numbers of one scope mean equal content; prompts come in order of time.

    {"timestamp": ms, "input_length": tokens, "hash_ids": [number, ...]}      a request (Mooncake): global numbers
    {"block_size": tokens, "requests": [{"k": "n", "t": s, "in": tokens, "runs": [[first, count], ...]}, ...]}
                                  a conversation (agentic): numbers of its own; ``t`` counts from its begin, and where
                                  ``k`` is "sub" from the last ``{"k": "sub_begin", "t": s}``
    {"v": 1, "time_s": s, ...}    a request (the gateway's access log), see ``retention/access_log.py``
"""

from __future__ import annotations

import gzip
import random
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from json import loads
from pathlib import Path
from typing import Any, BinaryIO

from kvstore.limits import BLOCK_TOKENS_DEFAULT, BLOCK_TOKENS_MAX
from retention.access_log import LogReader
from retention.errors import TraceInvalid

LINE_BYTES_MAX = 64 << 20
"""A longer line is cut, and then refused, since what is left is no JSON."""
PROMPT_BLOCKS_MAX = 1 << 20
NUMBER_MAX = 2**32 - 1
TIME_S_MAX = 2**33
MOONCAKE_BLOCK_TOKENS = 512
ARRIVALS_PER_S = 0.05
"""Conversations begin at this rate (Poisson) where a trace gives no absolute times."""

Run = tuple[int, int]
"""First number, count."""


@dataclass(frozen=True, slots=True, order=True)
class Prompt:
    """One request. ``runs`` number its blocks in order: each is (first number, count of consecutive numbers).

    ``scope``: within it equal numbers mean equal content. ``tokens``: the prompt's, of which the last block may hold
    fewer than a whole block. ``class_name`` is empty where the trace does not say.
    """

    at_s: float
    scope: int
    tokens: int
    runs: tuple[Run, ...]
    class_name: str = ""


@dataclass(frozen=True, slots=True)
class Trace:
    """Prompts in order of time. ``conversations``: how many got their begin from the seed, 0 where times are given."""

    name: str
    block_tokens: int
    prompts: tuple[Prompt, ...]
    conversations: int = 0


def read_trace(
    path: Path,
    *,
    seed: int,
    arrivals_per_s: float = ARRIVALS_PER_S,
    progress: Callable[[int], None] = lambda read_bytes: None,
) -> Trace:
    """A trace file, gzipped or not. ``progress`` is told how many bytes of the file have been read.

    Raises TraceInvalid, OSError.
    """
    if not arrivals_per_s > 0:
        raise ValueError(f"{arrivals_per_s} arrivals a second: they must be more than 0")
    reader = _Reader(random.Random(seed), arrivals_per_s)
    prompts: list[Prompt] = []
    number = 0
    with path.open("rb") as file:
        try:
            for number, line in enumerate(_lines(file), 1):
                if line.strip():
                    prompts += reader.prompts(number, line)
                progress(file.tell())
        except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
            raise TraceInvalid(f"{path.name}, line {number}: {_said(error)}") from error
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise TraceInvalid(f"{path.name}, after line {number}: not a whole gzip file: {error}") from error
    if not prompts:
        raise TraceInvalid(f"{path.name} has no requests")
    return Trace(path.name, reader.block_tokens, tuple(sorted(prompts)), reader.conversations)


def runs_of(numbers: Iterable[int]) -> tuple[Run, ...]:
    """Numbers, joined where they are consecutive."""
    runs: list[Run] = []
    first = count = 0
    for number in numbers:
        if count and number == first + count:
            count += 1
            continue
        if count:
            runs.append((first, count))
        first, count = number, 1
    return (*runs, (first, count)) if count else ()


def _lines(file: BinaryIO) -> Iterator[bytes]:
    zipped = file.read(2) == b"\x1f\x8b"
    file.seek(0)
    with gzip.open(file) if zipped else nullcontext(file) as opened:
        yield from iter(lambda: opened.readline(LINE_BYTES_MAX), b"")


class _Reader:
    """What is remembered from line to line: the length of a block, when the next conversation begins."""

    def __init__(self, arrivals: random.Random, arrivals_per_s: float) -> None:
        self._arrivals = arrivals
        self._arrivals_per_s = arrivals_per_s
        self._begins_s = 0.0
        self._log = LogReader()
        self.block_tokens = 0
        self.conversations = 0

    def prompts(self, number: int, line: bytes) -> Iterable[Prompt]:
        """The requests of one line. Raises ValueError, TypeError, KeyError."""
        row = loads(line)
        if not isinstance(row, dict):
            raise ValueError(f"expected a JSON object, not {type(row).__name__}")
        if "requests" in row:
            self._block_length(row.get("block_size", BLOCK_TOKENS_DEFAULT))
            self._begins_s += self._arrivals.expovariate(self._arrivals_per_s)
            self.conversations += 1
            return self._conversation(row["requests"], number)
        if "hash_ids" in row:
            self._block_length(MOONCAKE_BLOCK_TOKENS)
            runs = _checked(runs_of(_whole(item, "a block's number", NUMBER_MAX) for item in row["hash_ids"]))
            return [Prompt(_time_s(row["timestamp"]) / 1000, 0, self._tokens(row.get("input_length"), runs), runs)]
        if "v" in row:
            request = self._log.request(row)
            self._block_length(request.block_tokens)
            runs = _checked(runs_of(request.numbers))
            return [Prompt(_time_s(request.time_s), 0, self._tokens(request.tokens, runs), runs, request.class_name)]
        raise ValueError("none of the known formats: it has neither requests, hash_ids nor v")

    def _conversation(self, requests: Any, scope: int) -> Iterable[Prompt]:
        if not isinstance(requests, list) or not all(isinstance(request, dict) for request in requests):
            raise ValueError("requests is not a list of objects")
        found: list[Prompt] = []
        sub_begins_s = 0.0
        for request in requests:
            kind = request.get("k", "n")
            if kind == "sub_begin":
                sub_begins_s = _time_s(request["t"])
            elif "runs" in request:
                at_s = self._begins_s + _time_s(request["t"]) + (sub_begins_s if kind == "sub" else 0.0)
                runs = _checked(_run(*run) for run in request["runs"])
                found.append(Prompt(at_s, scope, self._tokens(request.get("in"), runs), runs))
        return found

    def _block_length(self, tokens: Any) -> None:
        tokens = _whole(tokens, "the length of a block", BLOCK_TOKENS_MAX, least=1)
        if self.block_tokens not in (0, tokens):
            raise ValueError(f"blocks of {tokens} tokens here, of {self.block_tokens} before")
        self.block_tokens = tokens

    def _tokens(self, tokens: Any, runs: tuple[Run, ...]) -> int:
        """Tokens of a prompt, of as many as its blocks hold where it does not say."""
        blocks = sum(count for _, count in runs)
        if tokens is None:
            return blocks * self.block_tokens
        given = _whole(tokens, "the prompt's length", PROMPT_BLOCKS_MAX * BLOCK_TOKENS_MAX)
        if blocks and given <= (blocks - 1) * self.block_tokens:
            raise ValueError(f"{given} tokens do not fill {blocks} blocks of {self.block_tokens}")
        return given


def _run(first: Any, count: Any) -> Run:
    count = _whole(count, "the count of a run", PROMPT_BLOCKS_MAX)
    return _whole(first, "a block's number", NUMBER_MAX - count), count


def _checked(runs: Iterable[Run]) -> tuple[Run, ...]:
    kept = tuple(run for run in runs if run[1])
    if sum(count for _, count in kept) > PROMPT_BLOCKS_MAX:
        raise ValueError(f"a prompt of more than {PROMPT_BLOCKS_MAX:,} blocks")
    return kept


def _whole(value: object, what: str, most: int, least: int = 0) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and least <= value <= most:
        return value
    raise ValueError(f"{what} is {str(value)[:40]!r}, not a whole number in {least}..{most}")


def _time_s(value: object) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= TIME_S_MAX * 1000:
        raise ValueError(f"time {str(value)[:40]!r} is not a number from 0 on")
    return float(value)


def _said(error: Exception) -> str:
    if isinstance(error, KeyError):
        return f"it has no field {error}"
    return str(error) if isinstance(error, ValueError) else f"a field has another form than expected ({error})"
