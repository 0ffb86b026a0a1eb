"""Payloads of a put that are still on their way: taken a chunk at a time while the peer keeps pace, or received whole.

Owns the small buffer that they pass through, so that a chunk is received, written and verified while it is in the
processor's cache (puts over loopback take 0.45 instead of 0.51 CPU seconds a GB), and how long whoever has the turn to
write waits for a peer. Does not know sockets, blocks or segments. Invariants: a wait within a turn is bounded,
CHUNK_WAIT_S_MAX for a chunk and TURN_WAIT_S_MAX for all of a put; a peer whose first chunk takes longer than
BEGIN_S_MAX, or that falls behind later, has the rest received into memory before it gets another turn; what was taken
is gone with the next take.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Protocol, overload

from kvstore.limits import MIB

CHUNK_BYTES = 4 * MIB
"""Of the small buffer; larger blocks do not pass through one."""
BEGIN_S_MAX = 0.003
"""Of 4 MiB, that is 1.4 GB a second. Peers with slower lines, of which there may be many, are received side by side
into memory: one after another, a volume would take no more than one of them brings.
"""
CHUNK_WAIT_S_MAX = 0.02
TURN_WAIT_S_MAX = 0.05
"""For one who had begun fast enough: who has no processor for a moment is not given up at once."""


class Source(Protocol):
    """Where the bytes come from."""

    def receive_into(self, view: memoryview) -> None: ...

    def receive_within(self, view: memoryview, wait_s: float) -> int: ...


class _Stream:
    """How far a put has come. ``borrow`` lends memory for what shall not be taken within a turn."""

    __slots__ = (
        "_at",
        "_borrow",
        "_chunk",
        "_held_bytes",
        "_monotonic",
        "_source",
        "_waited_s",
        "_whole",
        "first",
        "lags",
        "offsets",
    )

    def __init__(
        self,
        source: Source,
        sizes: Sequence[int],
        chunk: memoryview,
        borrow: Callable[[int], memoryview],
        monotonic: Callable[[], float],
    ) -> None:
        self._source = source
        self._chunk = chunk
        self._borrow = borrow
        self._monotonic = monotonic
        self.offsets = [0, *accumulate(sizes)]
        self.first = 0
        """The first payload that can still be had."""
        self.lags = False
        self._at = self._held_bytes = 0
        """Where the chunk has bytes that were not taken: the first's, and what follows."""
        self._waited_s = 0.0
        self._whole: memoryview | None = None
        """The first payload and all that follow."""

    def start(self) -> None:
        """Receive what the chunk holds, outside any turn."""
        end_bytes = max(offset for offset in self.offsets if offset <= len(self._chunk))
        began_s = self._monotonic()
        self._source.receive_into(self._chunk[:end_bytes])
        self._held_bytes = end_bytes
        self.lags = self._monotonic() - began_s > BEGIN_S_MAX

    def gather(self) -> None:
        """Receive all that was not taken."""
        if self._whole is not None:
            return
        held_bytes = self._held_bytes
        whole = self._borrow(self.offsets[-1] - self.offsets[self.first])
        whole[:held_bytes] = self._chunk[self._at : self._at + held_bytes]
        self._source.receive_into(whole[held_bytes:])
        self._whole, self.lags = whole, False

    def take(self, begin: int, end: int) -> list[memoryview]:
        if self._whole is not None:
            return self._cut(self._whole, self.first, begin, end)
        assert begin == self.first, "payloads are taken in order"
        wanted_bytes = self.offsets[end] - self.offsets[begin]
        assert wanted_bytes <= len(self._chunk), "what is taken at once fits a chunk"
        if self._at:
            self._chunk[: self._held_bytes] = self._chunk[self._at : self._at + self._held_bytes]
            self._at = 0
        if not self._have(wanted_bytes):
            return []
        self.first = end
        self._at, self._held_bytes = wanted_bytes, self._held_bytes - wanted_bytes
        return self._cut(self._chunk, begin, begin, end)

    def _have(self, wanted_bytes: int) -> bool:
        """Whether so many bytes are in the chunk, or come in time."""
        missing_bytes = wanted_bytes - self._held_bytes
        wait_s = min(CHUNK_WAIT_S_MAX, TURN_WAIT_S_MAX - self._waited_s)
        if missing_bytes > 0 and wait_s > 0:
            began_s = self._monotonic()
            self._held_bytes += self._source.receive_within(self._chunk[self._held_bytes : wanted_bytes], wait_s)
            self._waited_s += self._monotonic() - began_s
        self.lags = self._held_bytes < wanted_bytes
        return not self.lags

    def _cut(self, memory: memoryview, first: int, begin: int, end: int) -> list[memoryview]:
        base, offsets = self.offsets[first], self.offsets
        return [memory[offsets[at] - base : offsets[at + 1] - base] for at in range(begin, end)]


class Inflow(Sequence[memoryview]):
    """Payloads of a put, or a run of them, which is a part of the same stream. Used by one thread at a time.

    Whoever asks for one by its position makes all be received: not to be done within a turn.
    """

    __slots__ = ("_begin", "_end", "_stream")

    def __init__(self, stream: _Stream, begin: int, end: int) -> None:
        self._stream = stream
        self._begin = begin
        self._end = end

    @classmethod
    def start(
        cls,
        source: Source,
        sizes: Sequence[int],
        chunk: memoryview,
        borrow: Callable[[int], memoryview],
        monotonic: Callable[[], float] = time.monotonic,
    ) -> Inflow:
        """Receive the first chunk. Raises what the source raises, as everything here that receives.

        ``chunk``, of CHUNK_BYTES, and what ``borrow`` lends are this put's until it was answered.
        """
        stream = _Stream(source, sizes, chunk, borrow, monotonic)
        stream.start()
        return cls(stream, 0, len(sizes))

    def __len__(self) -> int:
        return self._end - self._begin

    @overload
    def __getitem__(self, at: int) -> memoryview: ...
    @overload
    def __getitem__(self, at: slice) -> Inflow: ...
    def __getitem__(self, at: int | slice) -> memoryview | Inflow:
        positions = range(self._begin, self._end)[at]
        if isinstance(positions, range):
            assert positions.step == 1
            return Inflow(self._stream, positions.start, positions.stop)
        self._stream.gather()
        assert positions >= self._stream.first, "a payload that was taken is gone"
        return self._stream.take(positions, positions + 1)[0]

    @property
    def lags(self) -> bool:
        """Whether the peer did not keep pace: what is left is to be gathered before the next turn."""
        return self._stream.lags

    @property
    def gone(self) -> int:
        """How many of the first were taken, and cannot be had again."""
        return min(max(self._stream.first - self._begin, 0), len(self))

    def take(self, begin: int, end: int) -> list[memoryview]:
        """The next payloads, usable until the next are taken; none of them if they did not come in time."""
        return self._stream.take(self._begin + begin, self._begin + end)

    def gather(self) -> None:
        """Receive all that were not taken into memory. Not within a turn."""
        self._stream.gather()
