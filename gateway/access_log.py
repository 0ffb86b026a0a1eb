"""The access log: which prefixes were asked for, without a token of them, for replaying the traffic later.

Owns the file, its bound and the digests. Does not know HTTP or workers. Invariants: a line holds no text, no token id
and nothing that either could be guessed from: digests are made with a key that only this process has and that dies
with it; the file and its predecessor (PATH.1) hold at most ``FILE_BYTES_MAX`` each and one line more, and each can be
read by itself; a request never waits for the disk, nor for the hashing: a full queue drops its line, and counts it.

What a line holds is told by whoever reads it, ``retention/access_log.py``.
"""

from __future__ import annotations

import json
import os
import queue
import secrets
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
from blake3 import blake3

VERSION = 1
FILE_BYTES_MAX = 64 << 20
QUEUE_MAX = 256
"""Requests waiting to be written; each holds its prompt's tokens meanwhile. The next one is dropped."""
KNOWN_MAX = 1 << 20
"""Prefixes that later lines can continue (about 120 bytes each); beyond, all are forgotten and told again."""
DIGEST_BYTES = 8
CLOSE_S_MAX = 5.0
_PAGE = 1 << 16


@dataclass(frozen=True, slots=True)
class Asked:
    """One request. ``space_id`` and ``tenant`` say whose blocks it can share; the tokens are not kept."""

    time_s: float
    class_name: str
    tenant: str | None
    space_id: str
    block_tokens: int
    tokens: Sequence[int]
    hit_tokens: int


class AccessLog:
    """Make with ``open``. ``append`` from any thread; ``close`` writes what is queued."""

    def __init__(self, path: Path, file: BinaryIO, file_bytes_max: int = FILE_BYTES_MAX) -> None:
        self._path = path
        self._file = file
        self._size = file.tell()
        self._file_bytes_max = file_bytes_max
        self._secret = secrets.token_bytes(32)
        self._known: set[bytes] = set()
        """Prefixes that this file has told of, in this life; whenever one is here, so are all that it continues."""
        self._queue: queue.Queue[Asked | None] = queue.Queue(QUEUE_MAX)
        self._thread = threading.Thread(target=self._run, name="access-log", daemon=True)
        self.dropped = 0

    @classmethod
    def open(cls, path: Path, file_bytes_max: int = FILE_BYTES_MAX) -> AccessLog:
        """Append to a file; the directory is made. Raises OSError."""
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("ab", buffering=0)
        file.truncate(_whole_lines_bytes(path))
        log = cls(path, file, file_bytes_max)
        log._thread.start()
        return log

    def append(self, asked: Asked) -> None:
        """Its line is written soon after; the tokens must not change until then."""
        try:
            self._queue.put_nowait(asked)
        except queue.Full:
            self.dropped += 1

    def close(self) -> None:
        """Write what is queued, within a bound."""
        try:
            self._queue.put(None, timeout=CLOSE_S_MAX)
        except queue.Full:
            return
        self._thread.join(CLOSE_S_MAX)

    # --- the writing thread -------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while (asked := self._queue.get()) is not None:
            try:
                self._write(asked)
            except OSError:
                self.dropped += 1
        self._file.close()

    def _write(self, asked: Asked) -> None:
        digests = prefix_digests(asked, self._secret)
        line = self._line(asked, digests)
        if self._size and self._size + len(line) > self._file_bytes_max:
            self._rotate()
            line = self._line(asked, digests)
        written = self._file.write(line)
        if written < len(line):
            self._file.truncate(self._size)
            raise OSError("the line was cut")
        self._size += written
        if len(self._known) + len(digests) > KNOWN_MAX:
            self._known.clear()
            return
        self._known.update(digests)

    def _line(self, asked: Asked, digests: Sequence[bytes]) -> bytes:
        told = next((at for at, digest in enumerate(digests) if digest not in self._known), len(digests))
        row = {
            "v": VERSION,
            "time_s": round(asked.time_s, 3),
            "class": asked.class_name,
            "tenant": digest_of(asked.tenant or "", self._secret),
            "space": digest_of(asked.space_id, self._secret),
            "block_tokens": asked.block_tokens,
            "prompt_tokens": len(asked.tokens),
            "hit_tokens": asked.hit_tokens,
            "after": digests[told - 1].hex() if told else "",
            "blocks": b"".join(digests[told:]).hex(),
        }
        return json.dumps(row, separators=(",", ":")).encode() + b"\n"

    def _rotate(self) -> None:
        """Begin a new file, which knows of nothing. Raises OSError."""
        self._path.replace(self._path.with_name(self._path.name + ".1"))
        file = self._path.open("ab", buffering=0)
        self._file.close()
        self._file, self._size = file, 0
        self._known.clear()


def _whole_lines_bytes(path: Path) -> int:
    """Bytes of a file up to its last whole line: a kill can leave half of one behind it."""
    with path.open("rb") as file:
        end = file.seek(0, os.SEEK_END)
        while end:
            begin = max(0, end - _PAGE)
            file.seek(begin)
            newline = file.read(end - begin).rfind(b"\n")
            if newline >= 0:
                return begin + newline + 1
            end = begin
    return 0


def prefix_digests(asked: Asked, secret: bytes) -> list[bytes]:
    """One digest a whole block, of everything up to its end, in the space and for the tenant that asked."""
    data = np.asarray(asked.tokens, dtype="<u4").tobytes()
    step = 4 * asked.block_tokens
    chain = blake3(f"{asked.space_id}/{asked.tenant or ''}".encode(), key=secret).digest()
    digests: list[bytes] = []
    for begin in range(0, len(data) - step + 1, step):
        chain = blake3(chain + data[begin : begin + step], key=secret).digest()
        digests.append(chain[:DIGEST_BYTES])
    return digests


def digest_of(text: str, secret: bytes) -> str:
    """A name for a name."""
    return blake3(text.encode(), key=secret).hexdigest(DIGEST_BYTES)
