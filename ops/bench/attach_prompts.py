"""Prompts of the attach bench: stretches of a text, and the requests of a trace, scaled down to a small model.

Owns how they are cut and made. Does not know engines. Pure but for reading files. Invariants: prompts of one run share
their first block only where the trace's share it; the same seed makes the same prompts.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from ops.bench.traces import Access, multi_turn, read

TAIL_TOKENS = 16
"""What a prompt has beyond its whole blocks, as a question at its end: it is computed by whoever hits."""
MULTI_TURN = (4, 6, 30, 10)
"""Conversations, turns each, blocks that they begin with, blocks a turn."""
TRACE_REQUESTS_MAX = 400
SEED = 20261130


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of the replay. ``scope``: its conversation."""

    scope: int
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Conversations:
    """The replay: its requests, in order, and how they were made of what."""

    name: str
    how: str
    turns: tuple[Turn, ...]


def context_of(directory: Path, wanted: int) -> int:
    """Positions that a checkpoint allows, at most ``wanted``. Raises OSError, ValueError."""
    config = json.loads((directory / "config.json").read_text())
    allowed = int((config.get("text_config") or config).get("max_position_embeddings", wanted))
    return min(allowed, wanted)


def length_of(nominal: int, block_tokens: int, room: int) -> int:
    """Tokens of a prompt of ``nominal`` ones: its whole blocks and a tail, a block fewer where that is too long."""
    whole = nominal // block_tokens * block_tokens
    return min(whole, (room - TAIL_TOKENS) // block_tokens * block_tokens) + TAIL_TOKENS


def stretch(text: Sequence[int], length: int, number: int) -> tuple[int, ...]:
    """The prompt ``number``: a stretch of a text that is read in a circle, begun elsewhere for each number."""
    begin = (number * 97 + 13) % len(text)  # 97 shares no factor with a text's length but by ill luck
    return tuple(text[(begin + at) % len(text)] for at in range(length))


def conversations(trace: Path | None, text: Sequence[int], tokens_max: int) -> Conversations:
    """A trace's first requests with ``tokens_max`` tokens at most. Raises TraceInvalid, OSError."""
    if trace is None:
        accesses, name = multi_turn(*MULTI_TURN, SEED), "multi-turn (made up)"
    else:
        accesses, name = read(trace, requests=TRACE_REQUESTS_MAX, seed=SEED), trace.name
    longest = max((len(access.blocks) for access in accesses), default=1)
    each = max((tokens_max - TAIL_TOKENS) // longest, 1)
    turns = tuple(Turn(access.scope, _tokens(access, each, text, tokens_max)) for access in accesses if access.blocks)
    stands = f"{each} tokens" if each > 1 else "one token"
    how = f"a block of the trace stands for {stands} (at most {longest} blocks a prompt), cut at {tokens_max} tokens"
    return Conversations(name, how, turns)


def _tokens(access: Access, each: int, text: Sequence[int], tokens_max: int) -> tuple[int, ...]:
    """The blocks' tokens, which their numbers and their conversation choose, and a tail that ends this request."""
    tokens = [token for block in access.blocks for token in _of_block(access.scope, block, each, text)]
    tail = _of_block(access.scope, -len(access.blocks), TAIL_TOKENS, text)
    return (*tokens[: tokens_max - TAIL_TOKENS], *tail)


def _of_block(scope: int, block: int, count: int, text: Sequence[int]) -> list[int]:
    digest = blake2b(f"{scope}/{block}".encode(), digest_size=8).digest()
    begin = int.from_bytes(digest, "little") % len(text)
    return [text[(begin + at) % len(text)] for at in range(count)]


def reusable(turns: Sequence[Turn], block_tokens: int) -> int:
    """Tokens that a store without limits could have served: whole blocks of prefixes seen before."""
    seen: set[bytes] = set()
    total = 0
    for turn in turns:
        chain = blake2b(digest_size=16)
        is_prefix = True
        for end in range(block_tokens, len(turn.tokens) + 1, block_tokens):
            chain.update(json.dumps(turn.tokens[end - block_tokens : end]).encode())
            key = chain.digest()
            is_prefix = is_prefix and key in seen
            total += block_tokens if is_prefix else 0
            seen.add(key)
    return total
