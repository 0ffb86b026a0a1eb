"""The get of one block, from a segment file on the same host or off the socket: what ``transfer`` and ``receive`` do
for many, without their tables, in a fifth of the time.

Owns nothing. Does not know sockets or pools. Invariant: a block is accepted on exactly the grounds on which one of many
is; whatever else its row says, it is left to the path for many or its status says why it did not come.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import closing

import xxhash

from kvstore import extents, record, wire
from kvstore.direct import is_direct, pieces_of
from kvstore.errors import DeadlineExceeded, ProtocolError
from kvstore.extents import ASK, LENT, Row
from kvstore.framing import Channel
from kvstore.keys import SpaceId
from kvstore.link import Call, Hold
from kvstore.local import Peer, pour
from kvstore.receive import Scatter
from kvstore.record import HEADER_BYTES
from kvstore.store import GetStatus


def get(
    hold: Hold, peer: Peer, space_id: SpaceId, body: bytes, scatter: Scatter, monotonic: Callable[[], float]
) -> int:
    """Ask for the one block that the scatter asks for, and read it; returns 1 if it came, verified.

    It stays asked for if it is to be had through the socket. Raises as ``Hold.ask``, and DeadlineExceeded after a read
    that took too long.
    """

    def take_row(channel: Channel, header: wire.Header, body: bytes) -> Row:
        row, anew = extents.decode_row(body, "EXTENTS reply")
        peer.add(channel.receive_descriptors(header.payload_bytes), anew=anew)
        return row

    until_s = monotonic() + peer.lease_s  # the lease begins later than this clock is read, so it ends later
    row = hold.ask_sized(Call(wire.Opcode.EXTENTS, body, bulk=True), extents.rows_bytes(1), take_row)
    at = scatter.asked[0]
    if row.status == ASK:
        return 0
    if row.status != LENT:
        scatter.statuses[at] = GetStatus(row.status)
        scatter.ask(())
        return 0
    try:
        if row.file >= len(peer.fds):
            raise ProtocolError("a node lent a block of a file whose descriptor did not come")
        fd, view, header = peer.fds[row.file], scatter.begin(at), bytearray(HEADER_BYTES)
        came = fd is not None and _has_read(fd, row.offset, header, view, peer)
        now_s = monotonic()
        if now_s >= hold.deadline_s:
            raise DeadlineExceeded("the deadline passed while a block was read")
    finally:
        hold.tell(wire.Opcode.RELEASE)  # first: while the daemon takes that, what was read is verified
    if not came or now_s >= until_s or not _is_it(header, view, row, space_id, scatter, at):
        return 0
    scatter.accept(at)
    scatter.ask(())
    return 1


def take(channel: Channel, header: wire.Header, body: bytes, space_id: SpaceId, scatter: Scatter) -> None:
    """Receive the answer to a GET of one block. Raises as ``Scatter.take``."""
    row, _ = extents.decode_row(body, "GET reply")
    at = scatter.asked[0]
    if row.status == ASK:
        raise ProtocolError("a node answered GET with a block to be asked for")
    payload_bytes = HEADER_BYTES + scatter.sizes[at] if row.status == LENT else 0
    if header.payload_bytes != payload_bytes:
        raise ProtocolError("a node's answer does not account for its payload")
    if row.status != LENT:
        scatter.statuses[at] = GetStatus(row.status)
        return
    head = bytearray(HEADER_BYTES)
    view = scatter.begin(at)
    channel.receive_parts([memoryview(head), view])
    if _is_it(head, view, row, space_id, scatter, at):
        scatter.accept(at)
    else:
        scatter.statuses[at] = GetStatus.CORRUPT


def _has_read(fd: int, offset: int, header: bytearray, view: memoryview, peer: Peer) -> bool:
    """Whether the file gave header and payload of a record, whole."""
    wanted_bytes = HEADER_BYTES + len(view)
    try:
        if not is_direct(fd):
            return os.preadv(fd, (header, view), offset) == wanted_bytes
        with closing(peer.pages.read(pieces_of(fd, offset, wanted_bytes))) as pieces:
            return pour(pieces, (memoryview(header), view))
    except OSError:
        return False


def _is_it(header: bytearray, view: memoryview, row: Row, space_id: SpaceId, scatter: Scatter, at: int) -> bool:
    """Whether header and payload are those of the block asked for, at the place that the row tells."""
    checksum = xxhash.xxh3_64_intdigest(view)
    name = scatter.names[at]
    place = (row.segment, row.generation, row.offset)
    return record.is_whole(header, space_id, name.key, name.token_digest, len(view), place, checksum)
