"""One connection and the frame in hand: what is still unread of it, and how long its peer may take.

Owns the accounting of the peer's time. Does not know what a frame asks. Invariants: what the daemon itself takes does
not count against the peer, so that a peer cannot buy time by a long deadline; a payload is read whole or the connection
ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from kvstore import limits, wire
from kvstore.daemon.admission import Party
from kvstore.daemon.allowance import Allowance
from kvstore.daemon.lending import Neighbour
from kvstore.daemon.tokens import Token
from kvstore.errors import DeadlineExceeded, ProtocolError, StoreError
from kvstore.framing import Channel
from kvstore.store import Buffer
from kvstore.urgency import run_as_usual, run_soon

SCRATCH_BYTES = 64 * limits.KIB
PIECE_BYTES = 8 * limits.MIB
"""Of a file, sent at once: a peer is given its time anew for each."""
SMALL_BYTES = 1 * limits.MIB
"""Smaller pieces are taken together so far: asking the clock for each costs as much as a tenth of sending it."""
LATE_S = 0.25
"""How long past its deadline an answer is still being sent, so that it is the client who finds it late."""


class Connection:
    """A channel and until when its present wait may last (the reaper looks at it).

    ``token``: what its peer may do, as of a ``version`` of the tokens; None before HELLO. ``trusted``: the peer is on
    this host and may see every block. ``neighbour``: what it shares, once it asked to. ``party``: on whose account it
    borrows memory. ``reports``: how many more corrupt blocks it may report. ``hurries``: its thread is run soon after
    it was woken, before those that move much at once.
    """

    __slots__ = (
        "channel",
        "hurries",
        "idle",
        "neighbour",
        "party",
        "reports",
        "token",
        "trusted",
        "until_s",
        "version",
    )

    def __init__(self, channel: Channel, until_s: float) -> None:
        self.channel = channel
        self.until_s = until_s
        self.idle = True
        self.hurries = False
        self.trusted = False
        self.token: Token | None = None
        self.version = 0
        self.reports = Allowance(limits.REPORTS_BURST_CONNECTION, limits.REPORTS_PER_S_CONNECTION)
        self.party = Party(connection=id(self))
        self.neighbour: Neighbour | None = None

    def hurry(self) -> None:
        """Called by the connection's own thread, as ``give_way``."""
        self.hurries = run_soon()

    def give_way(self) -> None:
        """It moves much at once: from now on the small requests of other connections come first."""
        if self.hurries:
            run_as_usual()
            self.hurries = False

    def close(self) -> None:
        self.channel.close()
        if self.neighbour is not None:
            self.neighbour.close()


class Request:
    """One frame in hand: how much of its payload is still on the wire, and whether an answer was begun.

    ``wire_s``: how long the peer may keep the daemon waiting for this frame, and as long again for the answer. What the
    daemon itself takes does not count, so that a peer cannot buy time by a long deadline.
    """

    __slots__ = (
        "_answer_until_s",
        "_expected_bytes",
        "_left_s",
        "_monotonic",
        "_wire_s",
        "answered",
        "body",
        "channel",
        "connection",
        "deadline_s",
        "header",
        "unread",
    )

    def __init__(
        self,
        connection: Connection,
        header: wire.Header,
        body: bytes,
        deadline_s: float,
        wire_s: float,
        monotonic: Callable[[], float],
    ) -> None:
        self._wire_s = self._left_s = wire_s
        self._answer_until_s = 0.0
        self._expected_bytes = 0
        """What the peer is still to take in the time that it was last given."""
        self._monotonic = monotonic
        self.channel = connection.channel
        self.connection = connection
        self.header = header
        self.body = body
        self.deadline_s = deadline_s
        self.unread = header.payload_bytes
        self.answered = False

    def left_s(self) -> float:
        """Until the deadline. Raises DeadlineExceeded once it passed."""
        left_s = self.deadline_s - self._monotonic()
        if left_s <= 0:
            raise DeadlineExceeded("the request's deadline passed before it could be run")
        return left_s

    @contextmanager
    def _waiting_for_peer(self) -> Iterator[None]:
        """Bytes are on their way: the reaper counts the peer's time, and afterwards the daemon's again."""
        began_s = self._monotonic()
        works_until_s, self.connection.until_s = self.connection.until_s, began_s + self._left_s
        yield
        waited_s = self._monotonic() - began_s
        self._left_s = max(self._left_s - waited_s, 0.0)
        self.connection.until_s = works_until_s + waited_s

    def receive_into(self, view: memoryview) -> None:
        self.unread -= len(view)
        with self._waiting_for_peer():
            self.channel.receive_into(view)

    def receive_within(self, view: memoryview, wait_s: float) -> int:
        """As much of a view as comes in time; returns how much."""
        with self._waiting_for_peer():
            got = self.channel.receive_within(view, wait_s)
        self.unread -= got
        return got

    def receive_descriptor(self) -> int | None:
        """The descriptor attached to a payload of one byte, owned by the caller; None if there is none."""
        if self.unread != 1:
            raise ProtocolError(f"{self.header.opcode.name} comes with one byte of payload, a descriptor attached")
        self.unread = 0
        with self._waiting_for_peer():
            return self.channel.receive_descriptors(1)[0]

    def drop_payload(self, count: int | None = None) -> None:
        """Read what is left of the payload, or ``count`` bytes of it, so that what follows begins where it should."""
        count = self.unread if count is None else count
        if count:
            self.unread -= count
            with self._waiting_for_peer():
                self.channel.discard(count, memoryview(bytearray(SCRATCH_BYTES)))

    def _begin_answer(self) -> None:
        """From now on it is the peer who is waited for, until all of the answer is taken."""
        self.answered = True
        self.connection.until_s = self._answer_until_s = self._monotonic() + self._wire_s

    def answer(
        self, body: bytes, payload_bytes: int = 0, payloads: Sequence[Buffer] = (), *, more: bool = False
    ) -> None:
        """The frame, with the payload as far as it is at hand; ``more``: the rest of it follows at once."""
        self._begin_answer()
        frame = wire.encode_frame(
            self.header.opcode, self.header.request_id, body, payload_bytes=payload_bytes, reply=True
        )
        self.channel.send(frame, payloads, more=more)

    def send_file(self, fd: int, offset: int, count: int, stall_s: float) -> None:
        """A part of the payload, piece by piece; a peer that does not take the next within ``stall_s`` is disconnected.

        Raises DeadlineExceeded between pieces, long after the deadline; the connection is not usable then.
        """
        end = offset + count
        while offset < end:
            piece_bytes = min(end - offset, PIECE_BYTES)
            if piece_bytes > self._expected_bytes:
                self._expect_progress(stall_s)
                self._expected_bytes = max(piece_bytes, SMALL_BYTES)
            self.channel.send_file(fd, offset, piece_bytes)
            self._expected_bytes -= piece_bytes
            offset += piece_bytes

    def send_made(self, header: bytes, data: Buffer, stall_s: float) -> None:
        """As ``send_file``, of a record in memory, in one piece."""
        self._expect_progress(stall_s)
        self.channel.send(header, (data,))

    def _expect_progress(self, stall_s: float) -> None:
        now_s = self._monotonic()
        if now_s > self.deadline_s + LATE_S:
            raise DeadlineExceeded("the request's deadline passed while its answer was sent")
        self.connection.until_s = min(now_s + stall_s, self._answer_until_s)

    def refuse(self, error: StoreError | ValueError) -> None:
        self.drop_payload()
        self._begin_answer()
        body = wire.encode_error(error)
        self.channel.send(wire.encode_frame(wire.Opcode.ERROR, self.header.request_id, body, reply=True))


def neighbour_of(request: Request) -> Neighbour:
    """What the peer shares. Raises ProtocolError if it does not."""
    if request.connection.neighbour is None:
        raise ProtocolError(f"{request.header.opcode.name} comes after SHARE was granted")
    return request.connection.neighbour
