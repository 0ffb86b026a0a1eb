"""A put on its way to one node: in parts of some MiB, of which several are under way at once.

Owns how a batch is cut, what goes through shared memory and what through the socket, and how each block ended. Does not
know nodes or retries. Invariants: while the daemon writes one part the client takes the checksums of the next and
copies or sends it; a block's checksum is taken of all of it before its bytes are copied, so that the daemon finds bytes
that changed; a part that is refused refuses only its blocks; what was answered is not sent again on another connection;
of several parts that the disk shall have none ends before the disk has all: one flush is waited for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

import xxhash

from kvstore import limits, receive, sharing, wire
from kvstore.errors import CapacityProtected, DeadlineExceeded, Overloaded, ProtocolError, StoreError, Unavailable
from kvstore.keys import SpaceId
from kvstore.link import Call, Hold
from kvstore.local import PART_BYTES, PARTS, Peer
from kvstore.store import AckLevel, BlockPut, PutOutcome

Part = Sequence[int]
"""Positions of the blocks that one frame carries."""
FIRST_BYTES = 8 * limits.MIB
"""Through the arena the first part is this small, since the daemon waits for it: its checksums take half a millisecond.
A batch of 32 or 64 MiB is stored a sixth faster for it, and costs no more."""
EARLY_BYTES = 24 * limits.MIB
"""Of a smaller batch: another part would cost more than that gains."""
PLACED_BYTES = 64 * limits.MIB
"""A part of blocks that lie in the arena needs no room to be copied to: the larger, the fewer."""
BROKEN = (Unavailable, DeadlineExceeded, ProtocolError)
"""After these nothing more can be said on a connection."""


class Submission:
    """Blocks that one node shall store. ``views``: their payloads as flat bytes.

    ``outcomes`` begins with UNREACHABLE: what no answer has covered. A new attempt sends only that.
    """

    def __init__(
        self,
        space_id: SpaceId,
        traffic_class: int,
        ack: AckLevel,
        blocks: Sequence[BlockPut],
        views: Sequence[memoryview],
    ) -> None:
        self.space_id = space_id
        self.traffic_class = traffic_class
        self.ack = ack
        self.blocks = blocks
        self.views = views
        self.outcomes = [PutOutcome.UNREACHABLE] * len(blocks)
        self._open = [True] * len(blocks)
        self._sent_ack: wire.PutAck = ack
        self.begun: dict[int, PutOutcome] = {}
        """By position: how blocks ended that are stored, but of which the disk has not said that it has them."""

    def attempt(self, peer: Peer | None) -> Sequence[Part]:
        """The parts to be sent from here on, and anew what an earlier attempt only began."""
        self.begun.clear()
        left = [view for view, is_open in zip(self.views, self._open, strict=True) if is_open]
        is_early = peer is not None and sum(map(len, left)) >= EARLY_BYTES
        part_bytes = PLACED_BYTES if is_early and _are_placed(peer, left) else PART_BYTES
        parts = list(self.parts(FIRST_BYTES if is_early else part_bytes, part_bytes))
        self._sent_ack = "begun" if self.ack == "disk" and len(parts) > 1 else self.ack
        return parts

    def parts(self, first_bytes: int, part_bytes: int) -> Iterator[Part]:
        """What is to be sent, cut so that the first part has at most ``first_bytes`` and another ``part_bytes``, or one
        block.
        """
        part: list[int] = []
        held_bytes, room_bytes = 0, first_bytes
        for at, view in enumerate(self.views):
            if not self._open[at]:
                continue
            if part and (held_bytes + len(view) > room_bytes or len(part) == limits.BATCH_BLOCKS_MAX):
                yield part
                part, held_bytes, room_bytes = [], 0, part_bytes
            part.append(at)
            held_bytes += len(view)
        if part:
            yield part

    def settle(self, part: Part, outcomes: Sequence[PutOutcome]) -> None:
        """Take over how the blocks of a part ended. Raises ProtocolError for another number of outcomes."""
        if len(outcomes) != len(part):
            raise ProtocolError("a node answered another number of blocks than sent")
        for at, outcome in zip(part, outcomes, strict=True):
            if self._sent_ack == "begun" and outcome <= PutOutcome.REPLACED:
                self.begun[at] = outcome
            else:
                self._end(at, outcome)

    def confirm(self, positions: Sequence[int], kept: Sequence[bool]) -> None:
        """Take over which of the blocks that were begun are on disk. Raises ProtocolError for another number."""
        if len(kept) != len(positions):
            raise ProtocolError("a node confirmed another number of blocks than asked")
        for at, is_kept in zip(positions, kept, strict=True):
            outcome = self.begun.pop(at)
            self._end(at, outcome if is_kept else PutOutcome.REFUSED)

    def _end(self, at: int, outcome: PutOutcome) -> None:
        self.outcomes[at] = outcome
        self._open[at] = False

    def refuse_the_rest(self) -> None:
        """Nothing more is tried."""
        for at, is_open in enumerate(self._open):
            if is_open:
                self.outcomes[at] = PutOutcome.REFUSED

    def body(self, part: Part, checksums: Sequence[int]) -> bytes:
        """PUT's body for a part."""
        rows = [
            wire.PutRow(block.name, block.tokens, len(self.views[at]), block.flags, checksum)
            for at, checksum in zip(part, checksums, strict=True)
            for block in (self.blocks[at],)
        ]
        return wire.encode_put(self.space_id, self.traffic_class, self._sent_ack, rows)


def put(hold: Hold, submission: Submission) -> None:
    """Send what no answer has covered yet and take the answers. Raises what was answered to a part, after the answers
    to the others: Overloaded once all were sent, what is said against the whole request without sending more.
    """
    under_way: deque[tuple[Part, wire.Opcode, int]] = deque()
    failure: StoreError | ValueError | None = None
    for number, part in enumerate(submission.attempt(hold.peer)):
        if len(under_way) == PARTS:
            failure = _settle(hold, submission, *under_way.popleft()) or failure
            if failure is not None and not isinstance(failure, Overloaded):
                break
        call = _call(hold.peer, submission, part, number % PARTS)
        under_way.append((part, call.opcode, hold.send(call)))
    while under_way:
        failure = _settle(hold, submission, *under_way.popleft()) or failure
    _confirm(hold, submission)
    if failure is not None:
        raise failure


def _confirm(hold: Hold, submission: Submission) -> None:
    """Wait until the disk has what was begun; what it does not have is refused."""
    begun = list(submission.begun)
    for begin in range(0, len(begun), limits.LOOKUP_KEYS_MAX):
        page = begun[begin : begin + limits.LOOKUP_KEYS_MAX]
        body = wire.encode_confirm(submission.space_id, [submission.blocks[at].name.key for at in page])
        submission.confirm(page, hold.ask(Call(wire.Opcode.CONFIRM, body), receive.take_confirmed))


def _settle(
    hold: Hold, submission: Submission, part: Part, opcode: wire.Opcode, request_id: int
) -> StoreError | ValueError | None:
    """Take one answer. An error that leaves the blocks open is returned; more can be said on the connection."""
    try:
        submission.settle(part, hold.take(opcode, request_id, receive.take_put))
    except BROKEN:
        raise
    except CapacityProtected:
        submission.settle(part, [PutOutcome.REFUSED] * len(part))
    except (StoreError, ValueError) as error:
        return error
    return None


def _call(peer: Peer | None, submission: Submission, part: Part, number: int) -> Call:
    """The request that carries a part: through the arena if it lies there or fits in, else through the socket."""
    views = [submission.views[at] for at in part]
    total_bytes = sum(map(len, views))
    if peer is None or (total_bytes > PART_BYTES and not _are_placed(peer, views)):
        checksums = [xxhash.xxh3_64_intdigest(view) for view in views]
        return Call(wire.Opcode.PUT, submission.body(part, checksums), views, total_bytes, bulk=True)
    checksums, offsets = peer.arena.place(peer.begin_of(number), views)
    return Call(wire.Opcode.PUT_LOCAL, sharing.encode_put_local(offsets, submission.body(part, checksums)), bulk=True)


def _are_placed(peer: Peer | None, views: Sequence[memoryview]) -> bool:
    """Whether all payloads lie in the arena, so that none is copied."""
    return peer is not None and all(peer.arena.find(view) is not None for view in views)
