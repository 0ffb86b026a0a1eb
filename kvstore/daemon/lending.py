"""What a connection on the same host shares with the daemon: extents lent for reading, an arena to put from.

Owns the lease of a connection, the descriptors that it was sent, and the mapping of its arena. Does not know frames or
blocks. Invariants: a lent segment is not recycled until the loan is given back, whichever comes first of release, the
next loan, expiry and the end of the connection; a descriptor is opened anew for reading only, so that nothing can be
written through it; only memory whose size is sealed is mapped.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import threading
from collections.abc import Mapping, Sequence
from typing import Protocol

from kvstore import limits
from kvstore.daemon.ledger import Place
from kvstore.daemon.record import HEADER_BYTES
from kvstore.daemon.segment import Segment
from kvstore.errors import ProtocolError, Unauthorized
from kvstore.keys import BlockName, SpaceId, TokenDigest
from kvstore.sharing import Extent, Extents, ExtentStatus

SEALS_NEEDED = fcntl.F_SEAL_SHRINK
HUGE_PAGE_BYTES_MIN = 64 * limits.KIB
"""Memory in huge pages is not taken: reading a page that could not be had would end the process."""

Life = tuple[Segment, int]
"""A segment and its generation."""
Lent = Place | ExtentStatus
"""Where a block lies, or MISS, or ASK for one that must be asked for by GET."""


class Lender(Protocol):
    """Who has blocks in files: a shard. A place that it lends must be given back."""

    def lend(self, space_id: SpaceId, names: Sequence[BlockName], now_s: float) -> list[Lent]: ...

    def give_back(self, places: Sequence[Place]) -> None: ...


class Loan:
    """Places of many blocks that may be read until it is closed. Thread-safe; closed once, however often it is told."""

    def __init__(self, count: int) -> None:
        self.places: list[Lent] = [ExtentStatus.MISS] * count
        self._owed: list[tuple[Lender, list[Place]]] = []
        self._lock = threading.Lock()

    def add(self, lender: Lender, positions: Sequence[int], lent: Sequence[Lent]) -> None:
        """Take over what a lender lent, for the blocks at these positions."""
        for at, place in zip(positions, lent, strict=True):
            self.places[at] = place
        self._owed.append((lender, [place for place in lent if isinstance(place, Place)]))

    def close(self) -> bool:
        """Give everything back; False if that was done before."""
        with self._lock:
            owed, self._owed = self._owed, []
        for lender, places in owed:
            lender.give_back(places)
        return bool(owed)


def lend(homes: Mapping[Lender, Sequence[int]], space_id: SpaceId, names: Sequence[BlockName], now_s: float) -> Loan:
    """A loan of blocks that lie with one lender or several: ``homes`` has the positions of each one's."""
    loan = Loan(len(names))
    try:
        for lender, positions in homes.items():
            mine = names if len(positions) == len(names) else [names[at] for at in positions]
            loan.add(lender, positions, lender.lend(space_id, mine, now_s))
    except BaseException:
        loan.close()
        raise
    return loan


class Neighbour:
    """One connection's share. Used by the connection's thread; ``expire`` and ``close`` by any."""

    def __init__(self, arena: mmap.mmap) -> None:
        self._arena = arena
        self._numbers: dict[Life, int] = {}
        self._loan: Loan | None = None
        self._until_s = 0.0
        self._lock = threading.Lock()

    @classmethod
    def open(cls, fd: int, arena_bytes: int) -> Neighbour:
        """Map a client's arena; the descriptor stays the caller's. Raises Unauthorized for memory not to be trusted."""
        try:
            seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
            status = os.fstat(fd)
        except OSError as error:
            raise Unauthorized("an arena must be sealed memory (memfd)") from error
        if not seals & SEALS_NEEDED or status.st_size != arena_bytes or status.st_blksize >= HUGE_PAGE_BYTES_MIN:
            raise Unauthorized("an arena must have the size that was said, sealed, and in pages of the usual size")
        return cls(mmap.mmap(fd, arena_bytes, prot=mmap.PROT_READ))

    def arena(self, offset: int, count: int) -> memoryview:
        """A part of the arena; its owner may change it at any time. Raises ProtocolError beyond the end."""
        if offset + count > len(self._arena):
            raise ProtocolError(f"an arena of {len(self._arena)} bytes does not hold {count} at {offset}")
        return memoryview(self._arena)[offset : offset + count]

    def lend(
        self, loan: Loan, digests: Sequence[TokenDigest], wanted_bytes: Sequence[int], until_s: float
    ) -> tuple[Extents, list[int]]:
        """Take over a loan until ``until_s``; returns its extents, and descriptors for the caller to send and close.

        The loan before it ends here; so does this one if there is nothing to read.
        """
        self._replace(loan, until_s)
        anew = self._would_be_full(loan.places)
        if anew:
            self._numbers.clear()
        fds: list[int] = []
        rows = [
            self._extent(place, digest, wanted, fds)
            for place, digest, wanted in zip(loan.places, digests, wanted_bytes, strict=True)
        ]
        if not any(row.status == ExtentStatus.LENT for row in rows):
            self.release()
        return Extents(rows, anew), fds

    def _would_be_full(self, places: Sequence[Lent]) -> bool:
        """Whether the connection cannot hold these files beside those that it has."""
        if len(self._numbers) + len(places) <= limits.DESCRIPTORS_MAX:
            return False
        lives = {(place.segment, place.generation) for place in places if isinstance(place, Place)}
        return len(lives | self._numbers.keys()) > limits.DESCRIPTORS_MAX

    def _extent(self, place: Lent, digest: TokenDigest, wanted_bytes: int, fds: list[int]) -> Extent:
        """One block's row; a file that is new to the connection adds a descriptor."""
        if not isinstance(place, Place):
            return Extent.none(place)
        if place.payload_bytes != wanted_bytes:
            return Extent.none(ExtentStatus.WRONG_SIZE)
        number = None if place.codec else self._number(place, fds)
        if number is None:
            return Extent.none(ExtentStatus.ASK)
        offset = place.offset + HEADER_BYTES
        return Extent(offset, place.checksum, digest, wanted_bytes, number, ExtentStatus.LENT, place.flags)

    def _number(self, place: Place, fds: list[int]) -> int | None:
        """By which number the connection knows a place's file; None if there is no descriptor for it."""
        life = (place.segment, place.generation)
        number = self._numbers.get(life)
        if number is None and len(self._numbers) < limits.DESCRIPTORS_MAX:
            try:
                fds.append(open_for_reading(place.segment.fd))
            except OSError:  # too many open files, or no /proc
                return None
            number = self._numbers[life] = len(self._numbers)
        return number

    def release(self) -> None:
        """The peer has read what was lent."""
        self._replace(None, 0.0)

    def expire(self, now_s: float) -> bool:
        """End a loan whose time is up; True if there was one."""
        with self._lock:
            loan = self._loan if now_s >= self._until_s else None
        return loan is not None and loan.close()

    def close(self) -> None:
        self._replace(None, 0.0)
        try:
            self._arena.close()
        except BufferError:
            return  # a put that failed is still being told of: the mapping goes with its last view

    def _replace(self, loan: Loan | None, until_s: float) -> None:
        with self._lock:
            before, self._loan, self._until_s = self._loan, loan, until_s
        if before is not None:
            before.close()


def open_for_reading(fd: int) -> int:
    """Another descriptor of an open file, that cannot write. Raises OSError."""
    return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
