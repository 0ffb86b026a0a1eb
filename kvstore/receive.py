"""Taking the answers off a channel: each function reads one kind of answer whole and checks it.

Owns the client's distrust of a node. Does not know which node it is, nor deadlines. Invariants: nothing is allocated
before its length was checked; a buffer of the caller is either filled with verified bytes, or left alone, or zeroed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import xxhash

from kvstore import extents, limits, record, wire
from kvstore.errors import ProtocolError
from kvstore.extents import ASK, LENT, Plan, Rows
from kvstore.framing import Channel
from kvstore.keys import BlockName, SpaceId
from kvstore.record import HEADER_BYTES
from kvstore.store import GetStatus, Lookup, PutOutcome

_KEY, _TOKEN_DIGEST = record.LAYOUT["key"], record.LAYOUT["token_digest"]
_HEADER = np.dtype((np.void, HEADER_BYTES))
"""Every byte of one: a copy by ``LAYOUT`` leaves out what lies between its fields."""
_GAP = memoryview(bytearray(extents.GAP_BYTES_MAX))
"""Where the bytes between two records go; nobody reads it."""


class Scatter:
    """The blocks of one get: where their bytes go and how each ended. A new attempt may start over at any time.

    ``asked``: positions that the next request asks for. ``statuses`` begins with DEADLINE: what no answer has covered.
    Blocks are read step by step (``parts``, ``finished``) and believed all at once (``believe``).
    """

    def __init__(self, names: Sequence[BlockName], views: Sequence[memoryview]) -> None:
        self.names = names
        self.packed = wire.PackedNames.pack(names)
        self.views = views
        self.sizes = list(map(len, views))
        self.statuses = [GetStatus.DEADLINE] * len(names)
        self.asked: Sequence[int] = range(len(names))
        self._begun: set[int] = set()
        self._headers = bytearray(HEADER_BYTES * len(names))
        self._pairs: list[tuple[memoryview, memoryview]] = []
        """Where header and payload of each block go."""
        self._wanted: npt.NDArray[np.void] | None = None
        """The headers expected, wherever the records lie."""
        self._finished: list[int] = []
        """Rows that were read."""
        self._checksums: list[int] = []
        """Of their payloads."""

    def ask(self, positions: Sequence[int] | None = None) -> None:
        """The next request asks for these blocks, by default all, whatever has become of them."""
        self.asked = range(len(self.names)) if positions is None else positions

    def asked_sizes(self) -> Sequence[int]:
        """Payload bytes of what is asked."""
        return self.sizes if len(self.asked) == len(self.names) else [self.sizes[at] for at in self.asked]

    def request(self, space_id: SpaceId) -> bytes:
        """The body that asks for what is asked."""
        if len(self.asked) == len(self.names):
            return wire.encode_get(space_id, self.packed, self.sizes)
        return wire.encode_get(space_id, [self.names[at] for at in self.asked], self.asked_sizes())

    def prepare(self, space_id: SpaceId) -> None:
        """Do what no answer is needed for: while the node is at work that takes no time. To be done before reading."""
        if self._wanted is not None:
            return
        view = memoryview(self._headers)
        begins = range(0, len(view), HEADER_BYTES)
        self._pairs = [(view[at : at + HEADER_BYTES], mine) for at, mine in zip(begins, self.views, strict=True)]
        self._wanted = record.expected_headers(
            space_id,
            np.frombuffer(self.packed.keys, _KEY),
            np.frombuffer(self.packed.token_digests, _TOKEN_DIGEST),
            np.array(self.sizes, np.int64),
        ).view(_HEADER)

    def take(self, channel: Channel, header: wire.Header, body: bytes) -> None:
        """Receive the answer to what is asked into the views, verifying each payload while it is hot."""
        rows, _ = extents.decode_rows(body, "GET reply")
        lent = self.settle_rows(rows)
        if ASK in rows["status"]:
            raise ProtocolError("a node answered GET with a block to be asked for")
        plan = extents.plan(rows, lent, self.asked_sizes())
        if plan.total_bytes != header.payload_bytes:
            raise ProtocolError("a node's answer does not account for its payload")
        try:
            for step in plan.steps(across_runs=True) if plan.order else ():
                channel.receive_parts(list(self.parts(plan, *step, gap_first=True)))
                self.finish(plan, range(*step))
        finally:
            accepted = self.believe(rows)
        if accepted < len(lent):
            for at in lent.tolist():
                if not self.is_accepted(self.asked[at]):
                    self.statuses[self.asked[at]] = GetStatus.CORRUPT

    def settle_rows(self, rows: Rows) -> npt.NDArray[np.intp]:
        """Take over how blocks ended that an answer does not bring; returns the rows that it lends.

        Raises ProtocolError for another number of rows than blocks asked.
        """
        if len(rows) != len(self.asked):
            raise ProtocolError("a node answered another number of blocks than asked")
        statuses = rows["status"]
        lent = np.flatnonzero(statuses == LENT)
        if len(lent) < len(rows):
            for row in np.flatnonzero((statuses != LENT) & (statuses != ASK)).tolist():
                self.statuses[self.asked[row]] = GetStatus(int(statuses[row]))
        return lent

    def begin(self, at: int) -> memoryview:
        """The view of one block, about to be written; until it is accepted its content counts for nothing."""
        self._begun.add(at)
        return self.views[at]

    def accept(self, at: int) -> None:
        """The block's view has its bytes, verified."""
        self.statuses[at] = GetStatus.OK
        self._begun.discard(at)

    def parts(self, plan: Plan, begin: int, end: int, *, gap_first: bool) -> Sequence[memoryview]:
        """Where the bytes of a step go, in order; until they are believed their content counts for nothing."""
        asked, pairs = self.asked, self._pairs
        if end - begin == 1 and not (gap_first and plan.gaps[begin]):  # the usual case of scattered blocks
            at = asked[plan.order[begin]]
            self._begun.add(at)
            return pairs[at]
        parts: list[memoryview] = []
        rows = plan.order[begin:end]
        self._begun.update([asked[row] for row in rows])
        for row, gap in zip(rows, plan.gaps[begin:end], strict=True):
            if gap and (gap_first or parts):
                parts.append(_GAP[:gap])
            parts += pairs[asked[row]]
        return parts

    def finish(self, plan: Plan, came: Sequence[int]) -> None:
        """All bytes of these blocks (places in the plan's order) have come: take the checksums while the payloads are
        in the processor's cache.
        """
        asked, views = self.asked, self.views
        rows = [plan.order[each] for each in came]
        self._finished += rows
        self._checksums += map(xxhash.xxh3_64_intdigest, [views[asked[row]] for row in rows])

    def believe(self, rows: Rows) -> int:
        """Verify what was finished: header and payload of each record; returns how many are accepted."""
        if not self._finished:
            return 0
        checksums = np.zeros(len(rows), np.uint64)
        checksums[self._finished] = self._checksums
        is_finished = np.zeros(len(rows), bool)
        is_finished[self._finished] = True
        self._finished, self._checksums = [], []
        at = slice(None) if len(self.asked) == len(self.names) else np.asarray(self.asked)
        assert self._wanted is not None  # who reads has prepared
        wanted = record.expect_at(self._wanted[at].view(record.LAYOUT), rows)
        headers = np.frombuffer(self._headers, _HEADER)[at].tobytes()
        good = record.whole_headers(headers, wanted, checksums) & is_finished
        if len(good) == len(self.names) and good.all():
            self.statuses = [GetStatus.OK] * len(good)
            self._begun.clear()
            return len(good)
        accepted = [self.asked[row] for row in good.nonzero()[0].tolist()]
        for each in accepted:
            self.statuses[each] = GetStatus.OK
        self._begun.difference_update(accepted)
        return len(accepted)

    def is_accepted(self, at: int) -> bool:
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


def take_confirmed(channel: Channel, header: wire.Header, body: bytes) -> list[bool]:
    _no_payload(header)
    return wire.decode_confirm_reply(body)


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
