"""Answers to gets: records sent as they lie in their files, or lent to a client on the same host.

Owns GET, EXTENTS and RELEASE. Does not read, parse or verify a record that goes out as it lies: its reader does.
Invariants: a segment stays leased until its bytes have been handed to the socket, or the loan ended; what does not lie
in a file as it is (compressed, encrypted, or in memory) goes out under a header made for the payload, and counts
against the budget of bytes in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from typing import Protocol, runtime_checkable

import numpy as np

from kvstore import extents, wire
from kvstore.daemon.admission import Admission, Party
from kvstore.daemon.ledger import Taken
from kvstore.daemon.lending import Loan, LoanOfOne
from kvstore.daemon.load import LoadRate
from kvstore.daemon.metrics import ServerMetrics
from kvstore.daemon.record import RecordHeader, encode_header
from kvstore.daemon.request import Request, neighbour_of
from kvstore.daemon.sending import Made, Stretch, send, send_around
from kvstore.direct import PageReader
from kvstore.errors import Overloaded, ProtocolError
from kvstore.extents import ASK, LENT, MISS, ExtentStatus, Plan
from kvstore.framing import close_all
from kvstore.keys import BlockKey, BlockName, SpaceId, TokenDigest
from kvstore.record import CODEC_NONE, HEADER_BYTES
from kvstore.store import Buffer
from kvstore.wire import PackedNames

MADE_SPACING = 2**32
"""Offsets of made records: so far apart that no plan joins them."""


class Lease(Protocol):
    """A payload held for reading: ``data``, or bytes of an open file."""

    @property
    def data(self) -> Buffer | None: ...

    @property
    def payload_bytes(self) -> int: ...

    @property
    def checksum(self) -> int: ...

    @property
    def flags(self) -> int: ...

    def __enter__(self) -> Lease: ...

    def __exit__(self, *_: object) -> None: ...


class PayloadBackend(Protocol):
    """Gives one payload in memory; of a block that lies in a file as it is it need not be asked."""

    def open_payload(self, space_id: SpaceId, name: BlockName) -> Lease | None: ...


@runtime_checkable
class FileBackend(Protocol):
    """A backend whose blocks lie in files: they are sent from there, and may be lent to a client on the same host."""

    def lend(self, space_id: SpaceId, names: PackedNames) -> Loan: ...

    def lend_one(self, space_id: SpaceId, names: PackedNames) -> LoanOfOne: ...


class Outgoing:
    """Answers gets of one store. Stateless between requests."""

    def __init__(
        self,
        backend: PayloadBackend,
        admission: Admission,
        load_rate: LoadRate,
        metrics: ServerMetrics,
        monotonic: Callable[[], float],
        lease_s: float,
        stall_s: float,
    ) -> None:
        self._backend = backend
        self._files = backend if isinstance(backend, FileBackend) else None
        self._admission = admission
        self._load_rate = load_rate
        self._metrics = metrics
        self._monotonic = monotonic
        self._pages = PageReader()
        self._lease_s = lease_s
        self._stall_s = stall_s

    @property
    def shares(self) -> bool:
        """Whether a client on the same host may be lent extents."""
        return self._files is not None and self._lease_s > 0

    def get(self, request: Request) -> None:
        asked = wire.decode_get(request.body)
        if len(asked.wanted_bytes) == 1 and self._files is not None and self._get_one(request, asked, self._files):
            return
        request.connection.give_way()
        with ExitStack() as held:
            answering = held.enter_context(self._load_rate.begin(sum(asked.wanted_bytes)))
            loan = held.enter_context(self._loan(asked))
            made = self._make(held, asked, loan, request.connection.party)
            lent = np.flatnonzero(loan.rows["status"] == LENT)
            plan = extents.plan(loan.rows, lent, asked.wanted_bytes)
            request.answer(extents.encode_rows(loan.rows), plan.total_bytes, more=bool(plan.order))
            parts = _parts(plan, loan, made)
            if any(segment.bypass for segment, _ in loan.files):
                send_around(request, list(parts), self._pages, self._stall_s)
            else:
                send(request, parts, self._stall_s)
            payload_bytes = sum(plan.sizes)
            answering.done(payload_bytes)
        self._metrics.payload_out.inc(payload_bytes)

    def _get_one(self, request: Request, asked: wire.GetRequest, files: FileBackend) -> bool:
        """``get`` of one block, in half of the time; False, and nothing was sent, if it does not lie in a file as it
        is.
        """
        loan = files.lend_one(asked.space_id, asked.names)
        try:
            row, place = loan.row(asked.wanted_bytes[0]), loan.place
            if row.status == ASK:
                return False
            if row.status != LENT or place is None:
                request.answer(extents.encode_row(row))
                return True
            loan.answering = self._load_rate.begin(place.payload_bytes)
            record_bytes = HEADER_BYTES + place.payload_bytes
            request.answer(extents.encode_row(row), record_bytes, more=True)
            parts = [Stretch(place.segment, row.offset, record_bytes)]
            if place.segment.bypass:
                send_around(request, parts, self._pages, self._stall_s)
            else:
                send(request, parts, self._stall_s)
            loan.answering.done()
        finally:
            loan.close()
        self._metrics.payload_out.inc(place.payload_bytes)
        return True

    def _loan(self, asked: wire.GetRequest) -> Loan:
        """What lies in files; of another kind of store, nothing does and everything is to be made."""
        if self._files is None:
            loan = Loan(Taken.nothing(len(asked.names)))
            loan.rows["status"] = ASK
            return loan
        loan = self._files.lend(asked.space_id, asked.names)
        loan.refuse_other_sizes(np.array(asked.wanted_bytes, np.uint32))
        if loan.codecs.any():
            loan.end((loan.rows["status"] == LENT) & (loan.codecs != CODEC_NONE), ASK)
        return loan

    def _make(self, held: ExitStack, asked: wire.GetRequest, loan: Loan, party: Party) -> dict[int, Made]:
        """Header and payload of each block that does not lie in a file as it is; its row says how that went."""
        made: dict[int, Made] = {}
        for at in np.flatnonzero(loan.rows["status"] == ASK).tolist():
            name = asked.names[at]
            opened = self._backend.open_payload(asked.space_id, name)
            if opened is None:
                loan.end(at, MISS)
                continue
            with ExitStack() as mine:
                lease = mine.enter_context(opened)
                status = self._admit(mine, lease, asked.wanted_bytes[at], party)
                loan.end(at, status)
                if status != LENT:
                    continue
                held.push(mine.pop_all())
                loan.rows[at] = (0, at * MADE_SPACING, extents.MADE, extents.MADE, status, lease.flags, b"")
                made[at] = Made(_header(asked.space_id, name, lease, at * MADE_SPACING), lease.data or b"")
        return made

    def _admit(self, mine: ExitStack, lease: Lease, wanted_bytes: int, party: Party) -> int:
        if lease.payload_bytes != wanted_bytes:
            return ExtentStatus.WRONG_SIZE
        if lease.data is None:
            return MISS  # it was written anew since, as it is: who asks again is lent it
        try:
            mine.enter_context(self._admission.hold(lease.payload_bytes, 0.0, party, read=True))
        except Overloaded:
            return ExtentStatus.UNREACHABLE
        return LENT

    def lend(self, request: Request) -> None:
        neighbour = neighbour_of(request)
        assert self._files is not None  # else nobody is a neighbour
        asked = wire.decode_get(request.body)
        until_s = self._monotonic() + self._lease_s
        if len(asked.wanted_bytes) == 1:
            one = self._files.lend_one(asked.space_id, asked.names)
            one.answering = self._load_rate.begin(one.place.payload_bytes if one.place is not None else 0)
            row, anew, fds = neighbour.lend_one(one, asked.wanted_bytes[0], until_s)
            body = extents.encode_row(row, option=anew)
        else:
            loan = self._files.lend(asked.space_id, asked.names)
            loan.refuse_other_sizes(np.array(asked.wanted_bytes, np.uint32))
            lent_bytes = int(loan.payload_bytes[loan.rows["status"] == LENT].sum(dtype=np.int64))
            loan.answering = self._load_rate.begin(lent_bytes)
            rows, anew, fds = neighbour.lend(loan, until_s)
            body = extents.encode_rows(rows, option=anew)
        try:
            request.answer(body, len(fds))
            request.channel.send_descriptors(fds)
        finally:
            close_all(fds)

    def release(self, request: Request) -> None:
        """The one message without an answer."""
        if request.body:
            raise ProtocolError("RELEASE has no body")
        neighbour_of(request).release()


def _parts(plan: Plan, loan: Loan, made: Mapping[int, Made]) -> Iterator[Stretch | Made]:
    """The payload of a GET answer: run after run, made out as it is sent, since the peer waits for the first."""
    files, offsets, order = plan.files, plan.offsets, plan.order
    for run, begin in enumerate(plan.runs[:-1]):
        if made and order[begin] in made:
            yield made[order[begin]]
        else:
            yield Stretch(loan.files[files[begin]][0], offsets[begin], plan.run_bytes(run))


def _header(space_id: SpaceId, name: BlockName, lease: Lease, offset: int) -> bytes:
    """The header of a record that lies nowhere."""
    return encode_header(
        RecordHeader(
            segment=extents.MADE,
            generation=0,
            offset=offset,
            key=name.key,
            parent=BlockKey(bytes(32)),
            space_id=space_id,
            token_digest=TokenDigest(name.token_digest),
            index=0,
            tokens=0,
            class_byte=0,
            flags=lease.flags,
            codec=CODEC_NONE,
            stored_bytes=lease.payload_bytes,
            payload_bytes=lease.payload_bytes,
            written_s=0,
            checksum=lease.checksum,
            touches=(),
        )
    )
