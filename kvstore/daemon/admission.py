"""How much payload a node holds in memory at once, who is next, and the reused buffers of puts.

Owns the budget of bytes in flight. Does not know frames or blocks. Invariants: the bytes lent never exceed the budget;
while several wait, what comes back goes to the tenant that holds least, then to its connection that holds least, so
that nobody's share is taken and an unused share is usable; whoever finds none left within its wait is refused with
``Overloaded``; a buffer is touched once and reused, since first touch of fresh memory runs at a quarter of the speed of
a copy.
"""

from __future__ import annotations

import mmap
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from kvstore import limits
from kvstore.errors import Overloaded

RETRY_AFTER_S = 0.2
"""What a refused sender is told while no loan has ended yet."""
RETRY_AFTER_S_MIN = 0.01
RETRY_AFTER_S_MAX = 5.0
READ_SHARE = 0.5
"""Of the budget, what reads may hold and still go before waiting puts; beyond it they queue like everybody."""
HOLD_DECAY = 0.9
"""Weight of what was known before, at each loan that ends: about the last ten count."""
IDLE_BUFFERS_MAX = 4
"""Buffers of each size kept for reuse; beyond them memory goes back to the system."""
PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
"""Memory that begins with a page: the kernel copies into and out of it up to a third faster than where a bytearray has
its bytes, at an odd multiple of 16.
"""
SMALL_SHARE = 8
"""A small buffer is this part of a large one: of one size only, 16 of them would hold a whole budget, of puts of a few
bytes.
"""


_Name = TypeVar("_Name")


@dataclass(frozen=True, slots=True)
class Party:
    """On whose account bytes are lent. ``tenant`` is what the client said of itself, so shares are not a safeguard
    against one that lies; ``connection`` is any number of its own.
    """

    tenant: str = ""
    connection: int = 0


NOBODY = Party()


class _Ticket:
    """One request for bytes: waiting until ``granted``."""

    __slots__ = ("arrival", "count", "granted", "party", "read", "since_s")

    def __init__(self, party: Party, count: int, arrival: int, *, read: bool) -> None:
        self.party = party
        self.count = count
        self.arrival = arrival
        self.read = read
        self.granted = False
        self.since_s = 0.0


class Admission:
    """A byte budget with a small pool of buffers. Thread-safe."""

    def __init__(
        self,
        budget_bytes: int = limits.IN_FLIGHT_BYTES_MAX,
        buffer_bytes: int = limits.PUT_BUFFER_BYTES,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        if not 1 <= buffer_bytes <= budget_bytes:
            raise ValueError(f"a budget of {budget_bytes} bytes cannot lend buffers of {buffer_bytes}")
        self.budget_bytes = budget_bytes
        self.buffer_bytes = buffer_bytes
        self._sizes = (-(-buffer_bytes // SMALL_SHARE), buffer_bytes)
        self._monotonic = monotonic
        self._lent_bytes = 0
        self._read_bytes = 0
        self._by_tenant: Counter[str] = Counter()
        self._by_party: Counter[Party] = Counter()
        self._waiting: list[_Ticket] = []
        self._arrivals = 0
        self._refused = 0
        self._hold_s: float | None = None
        self._idle: dict[int, list[mmap.mmap]] = {size: [] for size in self._sizes}
        self._freed = threading.Condition()

    @property
    def lent_bytes(self) -> int:
        return self._lent_bytes

    @property
    def refused(self) -> int:
        return self._refused

    @property
    def waiting(self) -> int:
        """Requests that wait for bytes now."""
        return len(self._waiting)

    @contextmanager
    def hold(self, count: int, wait_s: float, party: Party = NOBODY, *, read: bool = False) -> Iterator[None]:
        """Count bytes that somebody else allocated. Raises Overloaded if they do not fit within ``wait_s``."""
        ticket = self._take(count, wait_s, party, read=read)
        try:
            yield
        finally:
            self._give(ticket)

    @contextmanager
    def buffer(self, count: int, wait_s: float, party: Party = NOBODY) -> Iterator[memoryview]:
        """A view of exactly ``count`` bytes with arbitrary content; it must not be kept.

        Raises Overloaded if it does not fit within ``wait_s``.
        """
        size = next((size for size in self._sizes if count <= size), count)
        ticket = self._take(size, wait_s, party, read=False)
        memory = None
        try:
            if idle := self._idle.get(size):
                with self._freed:
                    memory = idle.pop() if idle else None
            if memory is None:
                memory = mmap.mmap(-1, size, PRIVATE)
            yield memoryview(memory)[:count]
        finally:
            with self._freed:
                idle = self._idle.get(size)
                if memory is not None and idle is not None and len(idle) < IDLE_BUFFERS_MAX:
                    idle.append(memory)
            self._give(ticket)

    def _take(self, count: int, wait_s: float, party: Party, *, read: bool) -> _Ticket:
        with self._freed:
            ticket = _Ticket(party, count, self._arrivals, read=read)
            self._arrivals += 1
            self._waiting.append(ticket)
            self._grant()
            try:
                self._freed.wait_for(lambda: ticket.granted, max(wait_s, 0.0))
            finally:
                if not ticket.granted:
                    self._waiting.remove(ticket)
                    self._grant()  # it may have stood before others that fit
            if not ticket.granted:
                self._refused += 1
                raise Overloaded(
                    f"the node holds {self._lent_bytes} of {self.budget_bytes} payload bytes in flight",
                    self._retry_after_s(count),
                )
            return ticket

    def _grant(self) -> None:
        """Serve those who wait, the next first, until the next does not fit: nobody small overtakes it for ever."""
        granted = False
        while self._waiting:
            ticket = min(self._waiting, key=self._rank)
            if self._lent_bytes + ticket.count > self.budget_bytes:
                break
            self._waiting.remove(ticket)
            self._account(ticket, ticket.count)
            ticket.since_s = self._monotonic()
            ticket.granted = granted = True
        if granted:
            self._freed.notify_all()

    def _rank(self, ticket: _Ticket) -> tuple[bool, int, int, int]:
        first = ticket.read and self._read_bytes + ticket.count <= READ_SHARE * self.budget_bytes
        return not first, self._by_tenant[ticket.party.tenant], self._by_party[ticket.party], ticket.arrival

    def _account(self, ticket: _Ticket, count: int) -> None:
        self._lent_bytes += count
        if ticket.read:
            self._read_bytes += count
        _add(self._by_tenant, ticket.party.tenant, count)
        _add(self._by_party, ticket.party, count)

    def _retry_after_s(self, count: int) -> float:
        """When so many bytes should fit: those in the way, at the speed at which loans have been coming back."""
        if self._hold_s is None or not self._lent_bytes:
            return RETRY_AFTER_S
        queued = sum(ticket.count for ticket in self._waiting)
        in_the_way = max(self._lent_bytes + queued + count - self.budget_bytes, 0)
        return min(max(in_the_way * self._hold_s / self._lent_bytes, RETRY_AFTER_S_MIN), RETRY_AFTER_S_MAX)

    def _give(self, ticket: _Ticket) -> None:
        with self._freed:
            took_s = self._monotonic() - ticket.since_s
            known_s = took_s if self._hold_s is None else self._hold_s
            self._hold_s = HOLD_DECAY * known_s + (1 - HOLD_DECAY) * took_s
            self._account(ticket, -ticket.count)
            self._grant()


def _add(held: Counter[_Name], name: _Name, count: int) -> None:
    """Whoever holds nothing is forgotten, so that names do not pile up."""
    held[name] += count
    if not held[name]:
        del held[name]
