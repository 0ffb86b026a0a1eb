"""The bounded log of what each request reused, and why it was not more: what ``explain`` reads.

Owns the records and the file. Does not know the engine or HTTP. A record holds keys and digests, never token ids or
text. Invariants: the file and its predecessor hold at most ``file_bytes_max`` each; memory holds the latest
``RECORDS_MAX``; an append never waits for the disk (a full queue drops the line, and counts it), and a failing disk
costs lines, not requests.

    PATH      one JSON object a line, newest last
    PATH.1    what PATH held before it was full
"""

from __future__ import annotations

import json
import os
import queue
import threading
from collections import OrderedDict
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

RECORDS_MAX = 4096
QUEUE_MAX = 1024
FILE_BYTES_DEFAULT = 32 << 20


@dataclass(frozen=True, slots=True)
class MissRecord:
    """The first block that was not reused. Keys and digest in hex; ``presence`` is what the store said of it."""

    index: int
    key: str
    parent: str
    route: str
    token_digest: str
    presence: str


@dataclass(frozen=True, slots=True)
class AccessRecord:
    """One request at one worker. Times in seconds; ``space`` is the canonical encoding in hex, ``space_id`` its id.

    ``outcome``: finished, cancelled or failed. What is not measured is None. ``hit_tokens``: of the prompt, what the
    store gave; ``engine_tokens``: what an engine of others had in a cache of its own, before that; ``miss_tokens``: the
    rest. ``published_blocks``: acknowledged by the store when the request ended. ``last_hit``: the key, in hex, of the
    last whole block that the store gave. ``parameters``: what of the request was not understood, so it was not cached.
    """

    request_id: str
    time_s: float
    role: str
    outcome: str
    space: str
    space_id: str
    cache: bool
    prompt_tokens: int
    generated_tokens: int
    block_tokens: int
    hit_tokens: int
    miss_tokens: int
    replayed_tokens: int
    way: str
    exact: bool
    reason: str
    first_miss: MissRecord | None
    queued_s: float | None
    load_s: float | None
    compute_s: float | None
    published_blocks: int | None
    last_hit: str | None = None
    engine_tokens: int = 0
    parameters: str = ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class AccessLog:
    """Make with ``open``. ``append`` from any thread; ``close`` writes what is queued."""

    def __init__(self, path: Path | None, file_bytes_max: int = FILE_BYTES_DEFAULT) -> None:
        self._path = path
        self._file_bytes_max = file_bytes_max
        self._records: OrderedDict[tuple[str, str], dict[str, Any]] = OrderedDict()
        self._lock = threading.Lock()
        self._queue: queue.Queue[bytes | None] = queue.Queue(QUEUE_MAX)
        self._thread: threading.Thread | None = None
        self.dropped = 0

    @classmethod
    def open(cls, path: Path, file_bytes_max: int = FILE_BYTES_DEFAULT) -> AccessLog:
        """Remember what earlier runs wrote (damaged lines are skipped), and start the writer."""
        log = cls(path, file_bytes_max)
        path.parent.mkdir(parents=True, exist_ok=True)
        for old in (_older(path), path):
            if old.exists():
                log._remember_file(old)
        log._thread = threading.Thread(target=log._write, name="access-log", daemon=True)
        log._thread.start()
        return log

    def append(self, record: AccessRecord) -> None:
        """Remember a record at once; its line is written soon after."""
        row = record.to_json()
        self._remember(row)
        if self._thread is not None:
            try:
                self._queue.put_nowait(json.dumps(row, separators=(",", ":")).encode() + b"\n")
            except queue.Full:
                self.dropped += 1

    def find(self, request_id: str) -> dict[str, Any] | None:
        """A request's record: its prefill's where this worker did it, else its decode's; None when forgotten."""
        with self._lock:
            return self._records.get((request_id, "prefill")) or self._records.get((request_id, "decode"))

    def close(self, deadline_s: float = 5.0) -> None:
        if self._thread is not None:
            try:
                self._queue.put(None, timeout=deadline_s)
            except queue.Full:
                return
            self._thread.join(deadline_s)

    # --- inside -------------------------------------------------------------------------------------------------------

    def _remember(self, row: dict[str, Any]) -> None:
        name = (str(row["request_id"]), str(row["role"]))
        with self._lock:
            self._records[name] = row
            self._records.move_to_end(name)
            while len(self._records) > RECORDS_MAX:
                self._records.popitem(last=False)

    def _remember_file(self, path: Path) -> None:
        with path.open("rb") as file:
            for line in file:
                try:
                    row = json.loads(line)
                    self._remember(row)
                except (ValueError, KeyError, TypeError):
                    continue  # torn by a crash

    def _write(self) -> None:
        while (line := self._queue.get()) is not None:
            try:
                self._write_line(line)
            except OSError:
                self.dropped += 1

    def _write_line(self, line: bytes) -> None:
        assert self._path is not None
        held = self._path.stat().st_size if self._path.exists() else 0
        if held and held + len(line) > self._file_bytes_max:
            os.replace(self._path, _older(self._path))
        with self._path.open("ab") as file:
            file.write(line)


def _older(path: Path) -> Path:
    return path.with_name(path.name + ".1")
