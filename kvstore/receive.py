"""Taking the answers off a channel: each function reads one kind of answer whole and checks it.

Owns the client's distrust of a node. Does not know which node it is, nor deadlines. Invariants: nothing is allocated
before its length was checked; a buffer of the caller is either filled with verified bytes, or left alone, or zeroed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import xxhash

from kvstore import limits, wire
from kvstore.errors import ProtocolError
from kvstore.framing import Channel
from kvstore.keys import BlockName
from kvstore.store import GetStatus, Lookup, PutOutcome


class Scatter:
    """The blocks of one get: where their bytes go and how each ended. A new attempt may start over at any time.

    ``asked``: positions that the next request asks for. ``statuses`` begins with DEADLINE: what no answer has covered.
    """

    def __init__(self, names: Sequence[BlockName], views: Sequence[memoryview]) -> None:
        self.names = names
        self.views = views
        self.statuses = [GetStatus.DEADLINE] * len(names)
        self.asked = list(range(len(names)))
        self._begun: set[int] = set()

    def restart(self) -> None:
        """Ask for every block (again)."""
        self.asked = list(range(len(self.names)))

    def wanted(self) -> tuple[list[BlockName], list[int]]:
        """Names and lengths of the blocks asked for."""
        return [self.names[at] for at in self.asked], [len(self.views[at]) for at in self.asked]

    def take(self, channel: Channel, header: wire.Header, body: bytes) -> None:
        """Receive the answer to what is asked into the views, verifying each block while it is hot."""
        rows = wire.decode_get_reply(body)
        _check_rows(rows, *self.wanted(), header)
        for at, row in zip(self.asked, rows, strict=True):
            if row.status != GetStatus.OK:
                self.statuses[at] = row.status
                continue
            channel.receive_into(self.begin(at))
            if self.is_whole(at, row.checksum):
                self.accept([at])
            else:
                self.statuses[at] = GetStatus.CORRUPT

    def begin(self, at: int) -> memoryview:
        """A view that is about to be written to; until it is accepted its content counts for nothing."""
        self._begun.add(at)
        return self.views[at]

    def is_whole(self, at: int, checksum: int) -> bool:
        return xxhash.xxh3_64_intdigest(self.views[at]) == checksum

    def accept(self, positions: Sequence[int]) -> None:
        """What is in these views was verified."""
        for at in positions:
            self.statuses[at] = GetStatus.OK
        self._begun.difference_update(positions)

    def settle_asked(self, statuses: Mapping[int, GetStatus]) -> None:
        """Some blocks ended otherwise: what is neither among them nor accepted stays asked for."""
        for at, status in statuses.items():
            self.statuses[at] = status
        self.asked = [at for at in self.asked if at not in statuses and not self._is_accepted(at)]

    def _is_accepted(self, at: int) -> bool:
        return self.statuses[at] == GetStatus.OK and at not in self._begun

    def settle(self, failed: GetStatus | None = None) -> None:
        """Zero what was begun and not verified; with ``failed``, that is the outcome of all that is open."""
        for at in self._begun:
            self.views[at][:] = bytes(len(self.views[at]))
        if failed is None:
            return
        for at, status in enumerate(self.statuses):
            if status == GetStatus.DEADLINE or (status == GetStatus.OK and at in self._begun):
                self.statuses[at] = failed


def take_lookup(channel: Channel, header: wire.Header, body: bytes) -> Lookup:
    _no_payload(header)
    return wire.decode_lookup_reply(body)


def take_put(channel: Channel, header: wire.Header, body: bytes) -> list[PutOutcome]:
    _no_payload(header)
    return wire.decode_put_reply(body)


def take_count(channel: Channel, header: wire.Header, body: bytes) -> int:
    _no_payload(header)
    return wire.decode_count(body)


def take_kept(channel: Channel, header: wire.Header, body: bytes) -> bool:
    _no_payload(header)
    return wire.decode_state_reply(body)[0]


def take_state(channel: Channel, header: wire.Header, body: bytes) -> tuple[bytes, int, int] | None:
    found, flags, checksum = wire.decode_state_reply(body)
    if not found:
        _no_payload(header)
        return None
    if header.payload_bytes > limits.STATE_BYTES_MAX:
        raise ProtocolError("a node sent a state beyond its bound")
    data = bytearray(header.payload_bytes)
    channel.receive_into(memoryview(data))
    return bytes(data), flags, checksum


def take_json(channel: Channel, header: wire.Header, body: bytes) -> bytes:
    if body or header.payload_bytes > wire.CONTROL_REPLY_BYTES_MAX:
        raise ProtocolError("a node sent a control answer beyond its bound")
    data = bytearray(header.payload_bytes)
    channel.receive_into(memoryview(data))
    return bytes(data)


def _no_payload(header: wire.Header) -> None:
    if header.payload_bytes:
        raise ProtocolError("a node sent payload that was not asked for")


def _check_rows(
    rows: Sequence[wire.GetRow], names: Sequence[BlockName], sizes: Sequence[int], header: wire.Header
) -> None:
    """Raises ProtocolError unless the rows are about the asked blocks, in order, and account for the whole payload."""
    if len(rows) != len(names):
        raise ProtocolError("a node answered another number of blocks than asked")
    payload_bytes = 0
    for row, name, size in zip(rows, names, sizes, strict=True):
        if row.key != name.key:
            raise ProtocolError("a node answered with a block of another key")
        if row.status == GetStatus.OK:
            if row.token_digest != name.token_digest or row.payload_bytes != size:
                raise ProtocolError("a node answered with a block of another token digest or length")
            payload_bytes += row.payload_bytes
    if payload_bytes != header.payload_bytes:
        raise ProtocolError("a node's answer does not account for its payload")
