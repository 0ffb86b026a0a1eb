"""One line of the gateway's access log, as a request of a trace.

Owns reading the format; the gateway writes it. A line tells of tokens only by digests: each names the prefix up to the
end of one block, under a key that nobody keeps, so that no prompt can be guessed from it. Invariant: a line that
continues a prefix which the log has not told of is refused, not made up.

    v              1
    time_s         seconds since the epoch
    class          name of the traffic class
    tenant, space  digests in hex: who asked, and of which model
    block_tokens   tokens of one block
    prompt_tokens  of the whole prompt; hit_tokens: of them reused
    after          digest (16 hex digits) of the longest prefix that an earlier line told of, or ""
    blocks         digests of the blocks that follow it, in one string of 16 hex digits each
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

VERSION = 1
DIGEST_DIGITS = 16

_DIGESTS = re.compile(r"(?:[0-9a-f]{16})*\Z")


@dataclass(frozen=True, slots=True)
class LoggedRequest:
    """One line. ``numbers``: its blocks; equal numbers are equal prefixes."""

    time_s: float
    class_name: str
    block_tokens: int
    tokens: int
    numbers: list[int]


class LogReader:
    """Numbers the digests of one log as they come."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._parents: list[int] = []

    def request(self, row: Mapping[str, Any]) -> LoggedRequest:
        """Raises ValueError, KeyError."""
        if row["v"] != VERSION:
            raise ValueError(f"version {row['v']!r} of the access log, not {VERSION}")
        for name in ("class", "after", "blocks"):
            if not isinstance(row[name], str):
                raise ValueError(f"{name} is not a string")
        if not _DIGESTS.match(row["after"] + row["blocks"]) or len(row["after"]) not in (0, DIGEST_DIGITS):
            raise ValueError(f"after and blocks are digests of {DIGEST_DIGITS} hex digits")
        return LoggedRequest(
            row["time_s"],
            row["class"],
            row["block_tokens"],
            row["prompt_tokens"],
            self._chain(row["after"], row["blocks"]),
        )

    def _chain(self, after: str, blocks: str) -> list[int]:
        """Numbers of the whole prompt's blocks, the first one first."""
        last = -1
        if after and (last := self._numbers.get(after, -1)) < 0:
            raise ValueError(f"it continues a prefix {after} that no line before it has")
        for begin in range(0, len(blocks), DIGEST_DIGITS):
            last = self._number(blocks[begin : begin + DIGEST_DIGITS], last)
        numbers: list[int] = []
        while last >= 0:
            numbers.append(last)
            last = self._parents[last]
        numbers.reverse()
        return numbers

    def _number(self, digest: str, parent: int) -> int:
        number = self._numbers.setdefault(digest, len(self._parents))
        if number == len(self._parents):
            self._parents.append(parent)
        elif self._parents[number] != parent:
            raise ValueError(f"block {digest} follows two different prefixes")
        return number
