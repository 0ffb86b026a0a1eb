"""How blocks are got over one connection: through shared memory where the peer shares it, else through the socket.

Owns the choice between the two, and the conversation of each. Does not know nodes; puts are ``submission``'s.
Invariants: a get is one round trip, and whatever shared memory could not give is asked for once more through the
socket; a get may be called again from the start, on another connection.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from kvstore import extents, local, single, wire
from kvstore.errors import DeadlineExceeded, ProtocolError
from kvstore.extents import ASK, LENT, Rows
from kvstore.framing import Channel
from kvstore.keys import SpaceId
from kvstore.link import Call, Hold
from kvstore.receive import Scatter


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
        call, body_bytes = Call(wire.Opcode.GET, body, bulk=True), extents.rows_bytes(len(scatter.asked))
        if len(scatter.asked) == 1:
            hold.ask_sized(call, body_bytes, partial(single.take, space_id=space_id, scatter=scatter))
        else:
            hold.ask_sized(call, body_bytes, scatter.take, partial(scatter.prepare, space_id))
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
    rows = hold.ask_sized(
        Call(wire.Opcode.EXTENTS, body, bulk=True),
        extents.rows_bytes(len(scatter.asked)),
        take,
        partial(scatter.prepare, space_id),
    )
    lent = scatter.settle_rows(rows)
    plan = extents.plan(rows, lent, scatter.asked_sizes())
    count = 0
    try:
        if plan.order:
            if max(plan.files) >= len(peer.fds):
                raise ProtocolError("a node lent a block of a file whose descriptor did not come")
            local.read_extents(plan, peer.fds, scatter, usable, peer.pages)
    finally:
        if plan.order:
            hold.tell(wire.Opcode.RELEASE)  # first: while the daemon takes that, what was read is verified
        count = scatter.believe(rows)
    if count == len(rows):
        scatter.ask(())
    else:
        statuses = rows["status"].tolist()
        scatter.ask([at for at, status in zip(scatter.asked, statuses, strict=True) if _is_open(scatter, at, status)])
    return count


def _is_open(scatter: Scatter, at: int, status: int) -> bool:
    """Whether a block was not settled by its row, nor read and verified."""
    return status == ASK or (status == LENT and not scatter.is_accepted(at))
