"""How payload travels over one connection: through shared memory where the peer shares it, else through the socket.

Owns the choice between the two, and the conversation of each. Does not know nodes. Invariants: a get is one round trip,
and whatever shared memory could not give is asked for once more through the socket; a put's checksums are taken before
its bytes are copied, so that the daemon finds bytes that changed; each function may be called again from the start, on
another connection.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import xxhash

from kvstore import local, receive, sharing, wire
from kvstore.errors import DeadlineExceeded, ProtocolError
from kvstore.framing import Channel
from kvstore.keys import SpaceId
from kvstore.link import Call, Hold
from kvstore.receive import Scatter
from kvstore.sharing import ExtentStatus
from kvstore.store import AckLevel, BlockPut, GetStatus, PutOutcome


def get(hold: Hold, space_id: SpaceId, scatter: Scatter, monotonic: Callable[[], float] = time.monotonic) -> int:
    """Fill the scatter's buffers; returns how many blocks came through shared memory."""
    scatter.restart()
    body = wire.encode_get(space_id, *scatter.wanted())
    count = 0
    if hold.peer is not None:
        count = _get_local(hold, hold.peer, body, scatter, monotonic)
        if not scatter.asked:
            return count
        body = wire.encode_get(space_id, *scatter.wanted())
    hold.ask(Call(wire.Opcode.GET, body, bulk=True), scatter.take)
    return count


def _get_local(hold: Hold, peer: local.Peer, body: bytes, scatter: Scatter, monotonic: Callable[[], float]) -> int:
    """Read what the daemon lends; what it does not, or not for long enough, stays asked for."""

    def take(channel: Channel, header: wire.Header, body: bytes) -> Sequence[sharing.Extent]:
        extents = sharing.decode_extents(body)
        peer.add(channel.receive_descriptors(header.payload_bytes), anew=extents.anew)
        return extents.rows

    def usable() -> bool:
        now_s = monotonic()
        if now_s >= hold.deadline_s:
            raise DeadlineExceeded("the deadline passed while blocks were read")
        return now_s < until_s

    until_s = monotonic() + peer.lease_s  # the lease begins later than this clock is read, so it ends later
    rows = hold.ask(Call(wire.Opcode.EXTENTS, body, bulk=True), take)
    lent = [at for at, row in enumerate(rows) if row.status == ExtentStatus.LENT]
    try:
        _check_extents(rows, lent, scatter, len(peer.fds))
        local.read_extents(rows, lent, peer.fds, scatter, usable)
    finally:
        if lent:
            hold.tell(wire.Opcode.RELEASE)
    unsettled = (ExtentStatus.LENT, ExtentStatus.ASK)
    scatter.settle_asked({at: GetStatus(row.status) for at, row in enumerate(rows) if row.status not in unsettled})
    return len(set(lent).difference(scatter.asked))


def _check_extents(rows: Sequence[sharing.Extent], lent: Sequence[int], scatter: Scatter, descriptors: int) -> None:
    """Raises ProtocolError unless the rows are about the asked blocks and name descriptors that came."""
    if len(rows) != len(scatter.names):
        raise ProtocolError("a node answered another number of blocks than asked")
    for at in lent:
        row = rows[at]
        if row.token_digest != scatter.names[at].token_digest or row.payload_bytes != len(scatter.views[at]):
            raise ProtocolError("a node lent a block of another token digest or length")
        if row.descriptor >= descriptors:
            raise ProtocolError("a node lent a block of a file whose descriptor did not come")


@dataclass(frozen=True, slots=True)
class Batch:
    """Blocks that one node shall store. ``views``: their payloads as flat bytes."""

    space_id: SpaceId
    traffic_class: int
    ack: AckLevel
    blocks: Sequence[BlockPut]
    views: Sequence[memoryview]

    def body(self, begin: int, end: int) -> bytes:
        """PUT's body for a part of the blocks; their checksums are taken here."""
        rows = [
            wire.PutRow(block.name, block.tokens, len(view), block.flags, xxhash.xxh3_64_intdigest(view))
            for block, view in zip(self.blocks[begin:end], self.views[begin:end], strict=True)
        ]
        return wire.encode_put(self.space_id, self.traffic_class, self.ack, rows)


def put(hold: Hold, batch: Batch) -> list[PutOutcome]:
    """Store blocks; one that does not fit a part of the arena sends all of the batch through the socket."""
    sizes = [len(view) for view in batch.views]
    if hold.peer is not None and max(sizes, default=0) <= local.PART_BYTES:
        outcomes = _put_local(hold, hold.peer.arena, batch, sizes)
    else:
        call = Call(wire.Opcode.PUT, batch.body(0, len(sizes)), batch.views, sum(sizes), bulk=True)
        outcomes = hold.ask(call, receive.take_put)
    if len(outcomes) != len(sizes):
        raise ProtocolError("a node answered another number of blocks than sent")
    return outcomes


def _put_local(hold: Hold, arena: local.Arena, batch: Batch, sizes: Sequence[int]) -> list[PutOutcome]:
    """The client fills a part of the arena while the daemon writes another."""
    outcomes: list[PutOutcome] = []
    sent: deque[int] = deque()
    for at, (begin, end) in enumerate(local.cut(sizes)):
        if len(sent) == local.PARTS:
            outcomes += hold.take(wire.Opcode.PUT_LOCAL, sent.popleft(), receive.take_put)
        body = batch.body(begin, end)
        offset = arena.fill(at % local.PARTS, batch.views[begin:end])
        sent.append(hold.send(Call(wire.Opcode.PUT_LOCAL, sharing.encode_put_local(offset, body), bulk=True)))
    while sent:
        outcomes += hold.take(wire.Opcode.PUT_LOCAL, sent.popleft(), receive.take_put)
    return outcomes
