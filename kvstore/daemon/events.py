"""What became of blocks, for whoever routes requests: stored, expired, evicted, purged, quarantined.

Owns a bounded memory of the latest events, and how one is told as JSON. Does not know connections. Invariants: while
nobody listens nothing is kept, and a change of the ledger costs one comparison; whoever is slow finds a gap in the
sequence and nobody waits for it; a sequence is of one epoch, and a new one begins with the process, and with the first
listener after none; an event has whole blocks only, so that what a run spans is its blocks times their tokens.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.daemon.index import Rows
from kvstore.errors import Overloaded
from kvstore.keys import Space, SpaceId
from kvstore.limits import (
    EVENT_BLOCKS_MAX,
    EVENT_LISTENERS_MAX,
    EVENTS_BYTES_MAX,
    EVENTS_LINGER_S,
    KEY_BYTES,
)
from kvstore.store import Presence
from kvstore.traffic import ClassRules

_COLUMNS = ("key", "parent", "space", "index", "tokens", "payload_bytes", "class_byte")
BLOCK_DTYPE = np.dtype(
    [
        ("key", "<u8", (4,)),
        ("parent", "<u8", (4,)),
        ("space", "<u8", (4,)),
        ("index", "<u4"),
        ("tokens", "<u4"),
        ("payload_bytes", "<u4"),
        ("class_byte", "u1"),
    ]
)
"""What an event keeps of a block."""
_EVENT_BYTES = 512
"""What an event takes beside its blocks, roughly."""
REASONS: Mapping[str, str] = {
    "stored": "put",
    "expired": "its promise was over",
    "evicted": "its room was needed",
    "purged": "somebody removed it",
    "quarantined": "it could not be read as it was written",
}
"""Kinds of events, and why they come about. A block that is moved or made exact stays stored: no event."""


@dataclass(frozen=True, slots=True)
class Event:
    """One change of many blocks. ``blocks``: of BLOCK_DTYPE, in the order of the change."""

    sequence: int
    kind: str
    at_s: int
    blocks: npt.NDArray[np.void]

    @property
    def memory_bytes(self) -> int:
        return self.blocks.nbytes + _EVENT_BYTES


@dataclass(frozen=True, slots=True)
class Page:
    """Events after a position, the oldest first. ``oldest`` to ``newest``: the sequence numbers that are remembered."""

    epoch: str
    oldest: int
    newest: int
    events: Sequence[Event]


class EventLog:
    """Thread-safe. ``recording``: somebody listens, or did lately; read without the lock by whoever changes blocks."""

    def __init__(
        self,
        bytes_max: int = EVENTS_BYTES_MAX,
        linger_s: float = EVENTS_LINGER_S,
        monotonic_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self.recording = False
        self._bytes_max = bytes_max
        self._linger_s = linger_s
        self._monotonic_s = monotonic_s
        self._lock = threading.Lock()
        self._events: dict[int, Event] = {}
        """By sequence number, from ``_oldest`` on; a number that is missing is of a change that could not be told."""
        self._oldest = 1
        self._bytes = 0
        self._epoch = secrets.token_hex(8)
        self._sequence = 0
        self._listeners = 0
        self._left_s = 0.0

    @property
    def memory_bytes(self) -> int:
        return self._bytes

    @property
    def has_room(self) -> bool:
        """Whether another reader may listen."""
        return self._listeners < EVENT_LISTENERS_MAX

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Events are kept while inside, and a while after, for whoever comes back. Raises Overloaded."""
        with self._lock:
            if not self.has_room:
                raise Overloaded(f"{EVENT_LISTENERS_MAX} listen to the events of this node already")
            self._listeners += 1
            if not self.recording:
                self._epoch, self._sequence, self._oldest = secrets.token_hex(8), 0, 1
                self.recording = True
        try:
            yield
        finally:
            with self._lock:
                self._listeners -= 1
                self._left_s = self._monotonic_s()

    def stored(self, rows: Rows) -> None:
        """Blocks that were not here before, as they were written."""
        if len(rows):
            self._add("stored", rows, int(rows["written_s"][0]))

    def removed(self, rows: Rows, reasons: npt.NDArray[np.uint8], at_s: int) -> None:
        """Blocks that are here no more, and the ``Presence`` that each has now."""
        for reason in np.unique(reasons).tolist():
            self._add(Presence(reason).name.lower(), rows[reasons == reason], at_s)

    def lost(self) -> None:
        """A change that cannot be told: listeners find a gap."""
        with self._lock:
            self._sequence += 1

    def position(self) -> Page:
        """The last sequence number that was given, with no events."""
        return self.after(2**63)

    def after(self, sequence: int, events_max: int = 16) -> Page:
        """The oldest events that are remembered beyond a sequence number."""
        with self._lock:
            numbers = range(max(sequence + 1, self._oldest), self._sequence + 1)
            events = list(islice((self._events[at] for at in numbers if at in self._events), events_max))
            return Page(self._epoch, self._oldest, self._sequence, events)

    def _add(self, kind: str, rows: Rows, at_s: int) -> None:
        if not len(rows):
            return
        blocks = np.empty(len(rows), dtype=BLOCK_DTYPE)
        for name in _COLUMNS:
            blocks[name] = rows[name]
        with self._lock:
            if not self._listeners and self._monotonic_s() - self._left_s > self._linger_s:
                self.recording = False
                self._events.clear()
                self._bytes = 0
                return
            for begin in range(0, len(blocks), EVENT_BLOCKS_MAX):
                self._sequence += 1
                part = blocks[begin : begin + EVENT_BLOCKS_MAX].copy()  # a view would hold the whole change in memory
                event = Event(self._sequence, kind, at_s, part)
                self._events[self._sequence] = event
                self._bytes += event.memory_bytes
            while self._bytes > self._bytes_max:
                gone = self._events.pop(self._oldest, None)
                self._oldest += 1
                self._bytes -= gone.memory_bytes if gone is not None else 0


# --- as JSON --------------------------------------------------------------------------------------------------------


def event_json(event: Event, epoch: str, rules: ClassRules, spaces: Mapping[SpaceId, Space]) -> dict[str, Any]:
    """One event: its runs are of consecutive blocks of one space and class, each the next one's parent."""
    blocks = event.blocks
    breaks = [0, *(np.flatnonzero(~_continues(blocks)) + 1).tolist(), len(blocks)]
    return {
        "event": event.kind,
        "epoch": epoch,
        "sequence": event.sequence,
        "at_s": event.at_s,
        "reason": REASONS.get(event.kind, event.kind),
        "runs": [_run_json(blocks[begin:end], rules, spaces) for begin, end in pairwise(breaks)],
    }


def gap_json(epoch: str, sequence: int, missed_events: int | None, reason: str) -> dict[str, Any]:
    """What a reader missed up to a sequence number; None: nobody knows how much. It has to ask what is stored."""
    return {"event": "gap", "epoch": epoch, "sequence": sequence, "missed_events": missed_events, "reason": reason}


def _continues(blocks: npt.NDArray[np.void]) -> npt.NDArray[np.bool_]:
    """Of each block but the first: whether it goes on from the one before."""
    before, after = blocks[:-1], blocks[1:]
    same = (after["index"] == before["index"] + np.uint32(1)) & (after["tokens"] == before["tokens"])
    same &= after["class_byte"] == before["class_byte"]
    same &= (after["space"] == before["space"]).all(axis=1) & (after["parent"] == before["key"]).all(axis=1)
    return np.asarray(same, dtype=np.bool_)


def _run_json(run: npt.NDArray[np.void], rules: ClassRules, spaces: Mapping[SpaceId, Space]) -> dict[str, Any]:
    first, count = run[0], len(run)
    tokens, index = int(first["tokens"]), int(first["index"])
    space_id = SpaceId(first["space"].tobytes())
    keys = np.ascontiguousarray(run["key"]).tobytes()
    group, window_tokens = _group_of(spaces.get(space_id))
    return {
        "space": space_id.hex(),
        "class": rules.name_of(int(first["class_byte"])),
        "group": group,
        "window_tokens": window_tokens,
        "block_tokens": tokens,
        "first_block": index,
        "blocks": count,
        "first_token": index * tokens,
        "end_token": (index + count) * tokens,
        "payload_bytes": int(run["payload_bytes"].sum(dtype=np.int64)),
        "parent": first["parent"].tobytes().hex(),
        "keys": [keys[at : at + KEY_BYTES].hex() for at in range(0, len(keys), KEY_BYTES)],
    }


def _group_of(space: Space | None) -> tuple[str, int]:
    """Kind and window of the layers whose KV a block of the space holds: the global ones, where it has such."""
    windows = [group.window for group in space.groups] if space is not None else [0]
    return ("global", 0) if 0 in windows else ("sliding", min(windows))
