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

import numpy as np
import numpy.typing as npt

from kvstore import limits
from kvstore.daemon.files import open_for_reading
from kvstore.daemon.ledger import Place, Taken
from kvstore.daemon.load import Answering
from kvstore.daemon.record import HEADER_BYTES
from kvstore.daemon.segment import Segment
from kvstore.errors import ProtocolError, Unauthorized
from kvstore.extents import ASK, LENT, MADE, MISS, ROW, ExtentStatus, Row, Rows
from kvstore.keys import SpaceId
from kvstore.record import CODEC_NONE
from kvstore.wire import PackedNames

SEALS_NEEDED = fcntl.F_SEAL_SHRINK
HUGE_PAGE_BYTES_MIN = 64 * limits.KIB
"""Memory in huge pages is not taken: reading a page that could not be had would end the process."""

Life = tuple[Segment, int]
"""A segment and its generation."""
Opened = tuple[Segment, int, bool]
"""What a descriptor is of: a life, around the page cache or not."""


class Lender(Protocol):
    """Who has blocks in files: a shard. What it lends must be given back."""

    def lend(self, space_id: SpaceId, keys: bytes, token_digests: bytes, now_s: float) -> Taken: ...

    def give_back(self, taken: Taken) -> None: ...


class Loan:
    """Places of many blocks that may be read until it is closed. Thread-safe; closed once, however often it is told.

    ``rows``: one a block; ``file`` counts the loan's own ``files``. ``payload_bytes`` and ``codecs``: one a block.
    """

    def __init__(self, taken: Taken) -> None:
        """``taken``: where the blocks lie, all of them, or nothing yet (see ``add``)."""
        self.rows: Rows = taken.rows
        self.payload_bytes = taken.payload_bytes
        self.codecs = taken.codec
        self.files: list[Life] = []
        self.answering: Answering | None = None
        """Of a loan that its reader ends as soon as it has read."""
        self._owed: list[tuple[Lender, Taken]] = []
        self._lock = threading.Lock()

    def add(self, lender: Lender, positions: npt.NDArray[np.intp] | None, taken: Taken) -> None:
        """Take over what a lender lent, for the blocks at these positions (None: it is what the loan was made of)."""
        self._owed.append((lender, taken))
        if self.files:
            taken.rows["file"][taken.found] += len(self.files)
        self.files += [(segment, segment.header.generation) for segment in taken.leases]
        if positions is None:
            return
        self.rows[positions], self.payload_bytes[positions] = taken.rows, taken.payload_bytes
        self.codecs[positions] = taken.codec

    def read_ahead(self) -> None:
        """Let every volume but the first begin to read, since a reader takes one file after another."""
        first = self.files[0][0].path.parent if self.files else None
        for at in np.flatnonzero(self.rows["status"] == LENT).tolist():
            segment = self.files[int(self.rows["file"][at])][0]
            if segment.path.parent != first:
                segment.read_ahead(int(self.rows["offset"][at]), HEADER_BYTES + int(self.payload_bytes[at]))

    def cold_among(self, lent: npt.NDArray[np.intp]) -> list[int]:
        """Which of some rows that are lent are to be read around the page cache: positions in ``lent``."""
        if not any(segment.bypass for segment, _ in self.files):
            return []
        files, offsets = self.rows["file"][lent].tolist(), self.rows["offset"][lent].tolist()
        lengths = (self.payload_bytes[lent].astype(np.int64) + HEADER_BYTES).tolist()
        places = zip(files, offsets, lengths, strict=True)
        return [at for at, (file, *place) in enumerate(places) if self.files[file][0].is_cold(*place)]

    def refuse_other_sizes(self, wanted_bytes: npt.NDArray[np.uint32]) -> None:
        """Lend only blocks of the lengths that are asked for."""
        if not (self.payload_bytes == wanted_bytes).all():
            self.end((self.rows["status"] == LENT) & (self.payload_bytes != wanted_bytes), WRONG_SIZE)

    def end(self, where: npt.NDArray[np.bool_] | int, status: int) -> None:
        """Lend these blocks no longer; the leases on their segments stay until the loan is closed."""
        if isinstance(where, int) or where.any():
            self.rows[where] = _NONE[status]

    def close(self) -> bool:
        """Give everything back; False if that was done before."""
        with self._lock:
            owed, self._owed = self._owed, []
        for lender, taken in owed:
            lender.give_back(taken)
        if self.answering is not None:
            self.answering.drop()
        return bool(owed)

    def __enter__(self) -> Loan:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class LenderOfOne(Protocol):
    """Who has blocks in files, asked for one."""

    def give_back_one(self, place: Place) -> None: ...


class LoanOfOne:
    """As ``Loan``, for one block. ``place``: None if there is no such block."""

    __slots__ = ("_owed", "answering", "place")

    def __init__(self, lender: LenderOfOne, place: Place | None) -> None:
        self.place = place
        self.answering: Answering | None = None
        self._owed = [lender] if place is not None else []

    def close(self) -> bool:
        """Give it back; False if that was done before."""
        if self.answering is not None:
            self.answering.drop()
        try:
            lender = self._owed.pop()  # one step of the interpreter: only one thread gets it
        except IndexError:
            return False
        assert self.place is not None
        lender.give_back_one(self.place)
        return True

    def row(self, wanted_bytes: int) -> Row:
        """What an answer says of it, with ``file`` 0; it lends a block stored as it is, of the length asked for."""
        place = self.place
        if place is None:
            return _ROWS[MISS]
        if place.payload_bytes != wanted_bytes:
            return _ROWS[WRONG_SIZE]
        if place.codec != CODEC_NONE:
            return _ROWS[ASK]
        return Row(place.generation, place.offset, place.segment.number, 0, LENT, place.flags)


WRONG_SIZE = int(ExtentStatus.WRONG_SIZE)
_ROWS = {int(status): Row(0, 0, 0, 0, int(status), 0) for status in ExtentStatus}
_NONE = np.zeros(max(ExtentStatus) + 1, ROW)
_NONE["status"] = np.arange(len(_NONE))


def lend(homes: Mapping[Lender, Sequence[int]], space_id: SpaceId, names: PackedNames, now_s: float) -> Loan:
    """A loan of blocks that lie with one lender or several: ``homes`` has the positions of each one's."""
    if len(homes) == 1:
        (lender,) = homes
        taken = lender.lend(space_id, names.keys, names.token_digests, now_s)
        loan = Loan(taken)
        loan.add(lender, None, taken)
        return loan
    loan = Loan(Taken.nothing(len(names)))
    try:
        for lender, positions in homes.items():
            at = np.array(positions, np.intp)
            keys = np.frombuffer(names.keys, "V32")[at].tobytes()
            digests = np.frombuffer(names.token_digests, "V16")[at].tobytes()
            loan.add(lender, at, lender.lend(space_id, keys, digests, now_s))
    except BaseException:
        loan.close()
        raise
    return loan


class Neighbour:
    """One connection's share. Used by the connection's thread; ``expire`` and ``close`` by any."""

    def __init__(self, arena: mmap.mmap) -> None:
        self._arena = arena
        self._numbers: dict[Opened, int] = {}
        self._loan: Loan | LoanOfOne | None = None
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

    def lend(self, loan: Loan, until_s: float) -> tuple[Rows, bool, list[int]]:
        """Take over a loan until ``until_s``; returns its rows, whether files are numbered anew, and descriptors for
        the caller to send and close.

        The loan before it ends here; so does this one if there is nothing to read.
        """
        self._replace(loan, until_s)
        if loan.codecs.any():
            loan.end((loan.rows["status"] == LENT) & (loan.codecs != CODEC_NONE), ASK)
        lent = (loan.rows["status"] == LENT).nonzero()[0]
        if not len(lent):
            self.release()
            return loan.rows, False, []
        files = loan.rows["file"][lent]
        opened: list[Opened] = [(*life, False) for life in loan.files]
        if cold := loan.cold_among(lent):
            files[cold] += len(opened)
            opened += [(*life, True) for life in loan.files]
        wanted = set(files.tolist())
        unknown = sum(opened[at] not in self._numbers for at in wanted)
        anew = len(self._numbers) + unknown > limits.DESCRIPTORS_MAX
        if anew:
            self._numbers.clear()
        fds: list[int] = []
        numbers = np.full(len(opened), MADE, np.uint32)
        for at in wanted:
            numbers[at] = self._number(opened[at], fds)
        loan.rows["file"][lent] = numbers[files]
        if MADE in numbers.tolist():
            loan.end(loan.rows["file"] == MADE, ASK)
        return loan.rows, anew, fds

    def lend_one(self, loan: LoanOfOne, wanted_bytes: int, until_s: float) -> tuple[Row, bool, list[int]]:
        """``lend`` of one block."""
        self._replace(loan, until_s)
        row = loan.row(wanted_bytes)
        place = loan.place
        if row.status != LENT or place is None:
            self._replace(None, 0.0)
            return row, False, []
        cold = place.segment.is_cold(place.offset, HEADER_BYTES + place.payload_bytes)
        opened = (place.segment, place.generation, cold)
        number = self._numbers.get(opened)
        if number is not None:
            return row._replace(file=number), False, []
        anew = len(self._numbers) == limits.DESCRIPTORS_MAX
        if anew:
            self._numbers.clear()
        fds: list[int] = []
        number = self._number(opened, fds)
        if number == MADE:
            self._replace(None, 0.0)
            return _ROWS[ASK], anew, []
        return row._replace(file=number), anew, fds

    def _number(self, opened: Opened, fds: list[int]) -> int:
        """By which number the connection knows a file, adding a descriptor for a new one; MADE if there is none."""
        number = self._numbers.get(opened)
        if number is not None:
            return number
        if len(self._numbers) == limits.DESCRIPTORS_MAX:
            return MADE
        try:
            fds.append(open_for_reading(opened[0].fd, direct=opened[2]))
        except OSError:  # too many open files, or no /proc
            return MADE
        self._numbers[opened] = len(self._numbers)
        return self._numbers[opened]

    def release(self) -> None:
        """The peer has read what was lent."""
        with self._lock:
            read = self._loan
        if read is not None and read.answering is not None:
            read.answering.done()
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

    def _replace(self, loan: Loan | LoanOfOne | None, until_s: float) -> None:
        with self._lock:
            before, self._loan, self._until_s = self._loan, loan, until_s
        if before is not None:
            before.close()
