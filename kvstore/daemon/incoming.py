"""Puts on their way in: payloads received into reused buffers, or lying in memory that a neighbour shares.

Owns PUT, PUT_LOCAL and CONFIRM. Does not know where blocks are written, nor what else a connection may ask. Invariants:
the payload of a refused block is read all the same, so that the next frame begins where it should; what is held in
memory counts against the admission's budget; a put of which nothing found room there is answered by Overloaded, which
says when to come again, so that outcome REFUSED is mostly for what waiting a little does not change.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Protocol

from kvstore import sharing, wire
from kvstore.daemon.admission import Admission
from kvstore.daemon.columns import Arrived
from kvstore.daemon.inflow import CHUNK_BYTES, Inflow
from kvstore.daemon.metrics import ServerMetrics
from kvstore.daemon.request import Request, neighbour_of
from kvstore.errors import CapacityProtected, Overloaded, ProtocolError
from kvstore.keys import BlockKey, SpaceId
from kvstore.store import BlockPut, PutOutcome
from kvstore.traffic import TrafficClass

ADMISSION_WAIT_S_MAX = 1.0
"""How long a request waits for room in memory; meanwhile its sender is held back by the socket."""
STREAMS_MAX = 2
"""Puts that are written as they come, at a time: as many as a client has connections. They take turns at the speed of
their peers, so the others are received into memory beside them, as all were.
"""


class CheckedPuts(Protocol):
    """Stores blocks, each only if its payload has the checksum that it was submitted with."""

    def put(
        self,
        space_id: SpaceId,
        blocks: Sequence[BlockPut],
        *,
        traffic_class: TrafficClass,
        ack: wire.PutAck = ...,
        deadline_s: float = ...,
        checksums: Sequence[int] | None = ...,
    ) -> list[PutOutcome]: ...

    def confirm(self, space_id: SpaceId, keys: Sequence[BlockKey], *, deadline_s: float = ...) -> list[bool]: ...


class IncomingPuts:
    """Takes puts for one store. Of a request nothing is left once it is answered."""

    def __init__(self, backend: CheckedPuts, admission: Admission, metrics: ServerMetrics) -> None:
        self._backend = backend
        self._admission = admission
        self._metrics = metrics
        self._streams = threading.BoundedSemaphore(STREAMS_MAX)

    def put(self, request: Request) -> None:
        asked = wire.decode_put(request.body)
        if sum(asked.rows.sizes()) != request.header.payload_bytes:
            raise ProtocolError("PUT's rows do not account for its payload")
        request.connection.give_way()
        outcomes: list[PutOutcome] = []
        overloaded: Overloaded | None = None
        refused = 0
        for rows in _groups(asked.rows, self._admission.buffer_bytes):
            try:
                outcomes += self._put_group(request, asked, rows)
            except Overloaded as error:
                overloaded = error
                refused += len(rows)
                outcomes += [PutOutcome.REFUSED] * len(rows)
        if overloaded is not None:
            if refused == len(asked.rows):
                raise overloaded
            self._metrics.error(overloaded)
        self._metrics.payload_in.inc(request.header.payload_bytes)
        request.answer(wire.encode_put_reply(outcomes))

    def put_local(self, request: Request) -> None:
        neighbour = neighbour_of(request)
        offsets, asked = sharing.decode_put_local(request.body)
        sizes = asked.rows.sizes()
        payloads = [neighbour.arena(offset, size) for offset, size in zip(offsets, sizes, strict=True)]
        outcomes = self._store(request, asked, asked.rows, payloads)
        self._metrics.payload_in.inc(sum(sizes))
        request.answer(wire.encode_put_reply(outcomes))

    def confirm(self, request: Request) -> None:
        space_id, keys = wire.decode_confirm(request.body)
        request.answer(wire.encode_confirm_reply(self._backend.confirm(space_id, keys, deadline_s=request.left_s())))

    def _put_group(self, request: Request, asked: wire.PutRequest, rows: wire.PutRows) -> list[PutOutcome]:
        """Receive some blocks and store them. Raises Overloaded, with the payload read past."""
        sizes = rows.sizes()
        total_bytes = sum(sizes)
        after = request.unread - total_bytes
        try:
            with ExitStack() as held:
                if total_bytes > CHUNK_BYTES >= max(sizes) and self._streams.acquire(blocking=False):
                    held.callback(self._streams.release)
                    payloads: Sequence[memoryview] = self._inflow(request, sizes, held)
                else:
                    buffer = self._borrow(request, total_bytes, held)
                    request.receive_into(buffer)
                    payloads = _cut(rows, buffer)
                outcomes = self._store(request, asked, rows, payloads)
        except Overloaded:
            request.drop_payload(request.unread - after)
            raise
        request.drop_payload(request.unread - after)
        return outcomes

    def _inflow(self, request: Request, sizes: Sequence[int], held: ExitStack) -> Inflow:
        """Payloads of which the first few have come."""
        chunk = self._borrow(request, CHUNK_BYTES, held)
        return Inflow.start(request, sizes, chunk, lambda count: self._borrow(request, count, held))

    def _borrow(self, request: Request, count: int, held: ExitStack) -> memoryview:
        """Memory that is given back with all that is held. Raises Overloaded."""
        wait_s = min(request.left_s(), ADMISSION_WAIT_S_MAX)
        return held.enter_context(self._admission.buffer(count, wait_s, request.connection.party))

    def _store(
        self, request: Request, asked: wire.PutRequest, rows: wire.PutRows, payloads: Sequence[memoryview]
    ) -> list[PutOutcome]:
        """Store blocks whose payloads lie in memory; what finds no room is refused."""
        try:
            return self._backend.put(
                asked.space_id,
                Arrived(rows, payloads),
                traffic_class=TrafficClass(asked.traffic_class),
                ack=asked.ack,
                deadline_s=request.left_s(),
                checksums=rows.checksums(),
            )
        except CapacityProtected as error:
            self._metrics.error(error)
            return [PutOutcome.REFUSED] * len(rows)


def _groups(rows: wire.PutRows, bytes_max: int) -> list[wire.PutRows]:
    """Runs of rows whose payloads fit one buffer; a larger block stands alone."""
    sizes = rows.sizes()
    if sum(sizes) <= bytes_max:
        return [rows] if sizes else []
    groups: list[wire.PutRows] = []
    begin = held_bytes = 0
    for at, size in enumerate(sizes):
        if at > begin and held_bytes + size > bytes_max:
            groups.append(rows[begin:at])
            begin, held_bytes = at, 0
        held_bytes += size
    return [*groups, rows[begin:]]


def _cut(rows: wire.PutRows, buffer: memoryview) -> list[memoryview]:
    """The payloads that lie one after another in a buffer."""
    payloads, at = [], 0
    for size in rows.sizes():
        payloads.append(buffer[at : at + size])
        at += size
    return payloads
