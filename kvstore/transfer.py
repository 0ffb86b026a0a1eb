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

from kvstore import extents, local, receive, sharing, single, wire
from kvstore.errors import DeadlineExceeded, ProtocolError
from kvstore.extents import ASK, LENT, Rows
from kvstore.framing import Channel
from kvstore.keys import SpaceId
from kvstore.link import Call, Hold
from kvstore.receive import Scatter
from kvstore.store import AckLevel, BlockPut, PutOutcome


def get(hold: Hold, space_id: SpaceId, scatter: Scatter, monotonic: Callable[[], float] = time.monotonic) -> int:
    """Fill the buffers of what the scatter asks for; returns how many blocks came through shared memory."""
    asked = scatter.asked
    count = 0
    try:
        body = scatter.request(space_id)
        if hold.peer is not None:
            count = (single.get if len(asked) == 1 else _get_local)(hold, hold.peer, space_id, body, scatter, monotonic)
            if not scatter.asked:
                return count
            body = scatter.request(space_id)
        hold.ask_sized(
            Call(wire.Opcode.GET, body, bulk=True),
            extents.rows_bytes(len(scatter.asked)),
            lambda channel, header, body: scatter.take(channel, header, body, space_id),
        )
    finally:
        scatter.ask(asked)  # another attempt starts over
    return count


def _get_local(
    hold: Hold, peer: local.Peer, space_id: SpaceId, body: bytes, scatter: Scatter, monotonic: Callable[[], float]
) -> int:
    """Read what the daemon lends; what it does not, or not for long enough, stays asked for."""

    def take(channel: Channel, header: wire.Header, body: bytes) -> Rows:
        rows, anew = extents.decode_rows(body, "EXTENTS reply")
        peer.add(channel.receive_descriptors(header.payload_bytes), anew=anew)
        return rows

    def usable() -> bool:
        now_s = monotonic()
        if now_s >= hold.deadline_s:
            raise DeadlineExceeded("the deadline passed while blocks were read")
        return now_s < until_s

    until_s = monotonic() + peer.lease_s  # the lease begins later than this clock is read, so it ends later
    rows = hold.ask_sized(Call(wire.Opcode.EXTENTS, body, bulk=True), extents.rows_bytes(len(scatter.asked)), take)
    lent = scatter.settle_rows(rows)
    plan = extents.plan(rows, lent, [scatter.sizes[at] for at in scatter.asked])
    count = 0
    try:
        if plan.order:
            if max(plan.files) >= len(peer.fds):
                raise ProtocolError("a node lent a block of a file whose descriptor did not come")
            local.read_extents(plan, peer.fds, scatter, usable)
    finally:
        count = scatter.believe(space_id, plan, rows)
        if plan.order:
            hold.tell(wire.Opcode.RELEASE)
    if count == len(rows):
        scatter.ask(())
    else:
        statuses = rows["status"].tolist()
        scatter.ask([at for at, status in zip(scatter.asked, statuses, strict=True) if _is_open(scatter, at, status)])
    return count


def _is_open(scatter: Scatter, at: int, status: int) -> bool:
    """Whether a block was not settled by its row, nor read and verified."""
    return status == ASK or (status == LENT and not scatter.is_accepted(at))


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
