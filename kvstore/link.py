"""One node as a client sees it: pooled connections, HELLO, and a circuit that skips a node which does not answer.

Owns connections and the node's health. Does not know verbs. Invariants: every exchange ends by its deadline; a
connection whose state is in doubt (late, broken, or refused) is closed and never reused; bulk exchanges cannot take the
connections of small ones, so a look-up does not queue behind a large put; what a connection shares with a daemon on the
same host is let go with it.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from kvstore import limits, sharing, wire
from kvstore.arena import ArenaOfClient
from kvstore.errors import DeadlineExceeded, ProtocolError, StoreError, Unavailable, VersionMismatch
from kvstore.framing import Address, Channel, close_all, connect, expect_reply
from kvstore.keys import KEY_ALGORITHM
from kvstore.local import PART_BYTES, PARTS, Peer

T = TypeVar("T")
Receive = Callable[[Channel, wire.Header, bytes], T]
Talk = Callable[["Hold"], T]
"""What happens on one connection; it may be called again, on another connection, from the start."""

BACKOFF_S_MIN = 1.0
BACKOFF_S_MAX = 30.0
"""A node that failed is skipped for 1 s, doubling to 30 s; then one exchange tries it again."""
LATE_S_MIN = 0.05
"""A deadline shorter than this says nothing about the node's health; nor does one of a call that moves payload."""
LAST_WORDS_S = 0.2
"""How long to wait for the error of a peer that stopped reading."""


class Call(NamedTuple):
    """One request: what is sent, and how it may be treated. (A frozen dataclass takes four times as long to make.)"""

    opcode: wire.Opcode
    body: bytes
    payloads: Sequence[bytes | bytearray | memoryview] = ()
    payload_bytes: int = 0
    bulk: bool = False
    """Moves payload: shares the connections of other bulk calls."""
    repeatable: bool = True
    """May be sent again when a pooled connection turns out to be stale."""
    insist: bool = False
    """Try even while the circuit is open (an operator wants the real answer)."""


@dataclass(slots=True)
class Connection:
    """A channel after HELLO. ``bulk``: for payload. ``peer``: what it shares with a daemon on this host."""

    channel: Channel
    bulk: bool
    peer: Peer | None = None

    def close(self) -> None:
        self.channel.close()
        if self.peer is not None:
            self.peer.close()


class Circuit:
    """Whether a node is worth asking: open after a failure, for a time that doubles while it keeps failing."""

    __slots__ = ("_backoff_s", "_lock", "_monotonic", "_retry_at_s", "_trying", "reason")

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._backoff_s = 0.0
        self._retry_at_s = 0.0
        self._trying = False
        self.reason = ""

    def admit(self) -> bool:
        """True if an exchange may try the node; while it is failing, one at a time may."""
        with self._lock:
            if self._backoff_s == 0.0:
                return True
            now_s = self._monotonic()
            if now_s < self._retry_at_s:
                return False
            self._retry_at_s = now_s + self._backoff_s
            self._trying = True
            return True

    def failed(self, reason: str) -> None:
        """An exchange failed. Of many that were under way when the node went down, only the first counts."""
        with self._lock:
            if self._backoff_s and not self._trying:
                return
            self._backoff_s = min(max(2 * self._backoff_s, BACKOFF_S_MIN), BACKOFF_S_MAX)
            self._retry_at_s = self._monotonic() + self._backoff_s
            self._trying = False
            self.reason = reason

    def succeeded(self) -> None:
        if self._backoff_s:
            with self._lock:
                self._backoff_s = 0.0
                self._trying = False
                self.reason = ""

    @property
    def is_open(self) -> bool:
        return self._backoff_s > 0.0


class Lane:
    """The connections of one kind to one node: at most ``size`` are held at once, the one used last is taken first.

    Thread-safe. (A semaphore beside a list would take ten times as long.)
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._free = size
        self._idle: list[Connection] = []
        self._lock = threading.Lock()
        self._returned = threading.Condition(self._lock)
        self._closed = False

    def enter(self, timeout_s: float) -> bool:
        """Wait for the right to hold a connection; False if none came free in time."""
        with self._lock:
            if not self._free and not self._returned.wait_for(lambda: self._free > 0, max(timeout_s, 0.0)):
                return False
            self._free -= 1
            return True

    def leave(self) -> None:
        with self._lock:
            self._free += 1
            self._returned.notify()

    def take(self) -> Connection | None:
        """A pooled connection, if there is one."""
        with self._lock:
            return self._idle.pop() if self._idle else None

    def give(self, connection: Connection) -> None:
        """Pool a connection whose state is beyond doubt."""
        with self._lock:
            if not self._closed and len(self._idle) < self.size:
                self._idle.append(connection)
                return
        connection.close()

    def drop(self, *, close: bool = False) -> None:
        """Close what is pooled; with ``close`` nothing is pooled again."""
        with self._lock:
            self._closed = self._closed or close
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()


class Hold:
    """One caller's hold of one connection: requests out, answers in, in the same order.

    ``settled`` is False while an answer is outstanding or was not taken whole: the connection is then not used again.
    """

    __slots__ = ("_monotonic", "_request_ids", "_unanswered", "channel", "deadline_s", "peer")

    def __init__(
        self,
        connection: Connection,
        deadline_s: float,
        request_ids: Iterator[int],
        monotonic: Callable[[], float],
    ) -> None:
        self.channel = connection.channel
        self.peer = connection.peer
        self.deadline_s = deadline_s
        self._request_ids = request_ids
        self._monotonic = monotonic
        self._unanswered = 0

    @property
    def settled(self) -> bool:
        return self._unanswered == 0

    def ask(self, call: Call, receive: Receive[T]) -> T:
        """One request and its answer."""
        return self.take(call.opcode, self.send(call), receive)

    def send(self, call: Call, descriptors: Sequence[int] = ()) -> int:
        """A request (with ``descriptors``, its payload is a byte for each); returns the id that its answer repeats."""
        self._unanswered += 1
        request_id = next(self._request_ids) & 0xFFFFFFFF
        head = wire.encode_frame(
            call.opcode,
            request_id,
            call.body,
            payload_bytes=call.payload_bytes + len(descriptors),
            deadline_ms=max(int(1000 * (self.deadline_s - self._monotonic())), 1),
        )
        try:
            self.channel.send(head, call.payloads)
            self.channel.send_descriptors(descriptors)
        except Unavailable as broken:
            raise self._last_words() or broken from broken
        return request_id

    def tell(self, opcode: wire.Opcode) -> None:
        """A message without an answer. If it cannot be sent, the connection is not used again."""
        try:
            self.channel.send(wire.encode_frame(opcode, next(self._request_ids) & 0xFFFFFFFF, b""))
        except StoreError:
            self._unanswered += 1

    def take(self, opcode: wire.Opcode, request_id: int, receive: Receive[T]) -> T:
        """The next answer. Raises what the peer answered."""
        header = expect_reply(self.channel.receive_header(), opcode, request_id)
        return self._taken(header, self.channel.receive_body(header), receive)

    def ask_sized(
        self, call: Call, body_bytes: int, receive: Receive[T], meanwhile: Callable[[], None] | None = None
    ) -> T:
        """As ``ask``, where the length of the answer's body is known: it takes one step less. Nothing else may be
        outstanding. ``meanwhile`` is done before the answer is looked for.
        """
        request_id = self.send(call)
        if meanwhile is not None:
            meanwhile()
        header, body = self.channel.receive_answer(body_bytes)
        return self._taken(expect_reply(header, call.opcode, request_id), body, receive)

    def _taken(self, header: wire.Header, body: bytes, receive: Receive[T]) -> T:
        if header.opcode == wire.Opcode.ERROR:
            error = wire.decode_error(body)
            if not isinstance(error, (ProtocolError, Unavailable)) and header.payload_bytes == 0:
                self._unanswered -= 1
            raise error
        answer = receive(self.channel, header, body)
        self._unanswered -= 1
        return answer

    def _last_words(self) -> Exception | None:
        """The error frame of a peer that hung up while we were still sending, if it left one."""
        self.channel.set_deadline(self._monotonic() + LAST_WORDS_S)
        try:
            header = self.channel.receive_header()
            if header is not None and header.opcode == wire.Opcode.ERROR:
                return wire.decode_error(self.channel.receive_body(header))
        except StoreError:
            pass
        return None


class NodeLink:
    """The connections to one node. Thread-safe; connects when first used."""

    def __init__(
        self,
        address: Address,
        hello: wire.Hello,
        connections: int,
        monotonic: Callable[[], float] = time.monotonic,
        *,
        same_host: bool = True,
        arena: ArenaOfClient | None = None,
    ) -> None:
        """``arena``: one that several links share and that its owner closes; None: one of its own."""
        self.address = address
        self.circuit = Circuit(monotonic)
        self._hello = hello
        self._monotonic = monotonic
        self.shares = same_host and bool(address.path)
        self._arena = arena or ArenaOfClient()
        self._owns_arena = arena is None
        self.connections = connections
        self._lanes = {bulk: Lane(connections) for bulk in (False, True)}
        self._request_ids = itertools.count(1)

    @property
    def name(self) -> str:
        return self.address.name

    def exchange(self, call: Call, deadline_s: float, receive: Receive[T]) -> T:
        """Send one request and let ``receive`` take its answer: the simplest ``converse``."""
        return self.converse(call, deadline_s, lambda hold: hold.ask(call, receive))

    def converse(self, call: Call, deadline_s: float, talk: Talk[T]) -> T:
        """Let ``talk`` do what ``call`` describes. ``deadline_s`` is a point of the monotonic clock.

        Raises what the peer answered, Unavailable, DeadlineExceeded or ProtocolError; ValueError for a request that the
        peer found invalid.
        """
        if not call.insist and not self.circuit.admit():
            raise Unavailable(f"node {self.name} is skipped for a while: {self.circuit.reason}")
        lane = self._lanes[call.bulk]
        if not lane.enter(deadline_s - self._monotonic()):
            raise DeadlineExceeded(f"no free connection to node {self.name} before the deadline")
        try:
            return self._converse(call, deadline_s, talk, lane)
        finally:
            lane.leave()

    def close(self) -> None:
        for lane in self._lanes.values():
            lane.drop(close=True)
        if self._owns_arena:
            self._arena.close()

    # --- inside -----------------------------------------------------------------------------------------------------

    def _converse(self, call: Call, deadline_s: float, talk: Talk[T], lane: Lane) -> T:
        began_s = self._monotonic()
        try:
            pooled = lane.take() if call.repeatable else None
            if pooled is not None:
                try:
                    answer = self._attempt(pooled, deadline_s, talk)
                except Unavailable:
                    self._drop_idle()  # the daemon restarted: the other pooled connections are as stale as this one
                else:
                    self.circuit.succeeded()
                    return answer
            answer = self._attempt(self._connect(call.bulk, deadline_s), deadline_s, talk)
        except Unavailable as error:
            self.circuit.failed(str(error))
            raise
        except DeadlineExceeded as error:
            if not call.bulk and self._monotonic() - began_s >= LATE_S_MIN:
                self.circuit.failed(f"no answer in {self._monotonic() - began_s:.2f} s")
            raise DeadlineExceeded(f"node {self.name} did not answer {call.opcode.name} in time") from error
        except (StoreError, ValueError):
            self.circuit.succeeded()  # the node lives: it answered, if only with an error
            raise
        self.circuit.succeeded()
        return answer

    def _attempt(self, connection: Connection, deadline_s: float, talk: Talk[T]) -> T:
        """One talk on one connection, which goes back to the pool only if its state is beyond doubt."""
        connection.channel.set_deadline(deadline_s)
        hold = Hold(connection, deadline_s, self._request_ids, self._monotonic)
        try:
            return talk(hold)
        finally:
            if hold.settled:
                self._lanes[connection.bulk].give(connection)
            else:
                connection.close()

    def _connect(self, bulk: bool, deadline_s: float) -> Connection:
        """A new connection; one for payload shares memory with the daemon where both can."""
        channel = connect(self.address, deadline_s, self._monotonic)
        connection = Connection(channel, bulk)
        try:
            channel.send(wire.encode_frame(wire.Opcode.HELLO, 0, wire.encode_hello(self._hello)))
            header = expect_reply(channel.receive_header(), wire.Opcode.HELLO, 0)
            body = channel.receive_body(header)
            if header.opcode == wire.Opcode.ERROR:
                raise wire.decode_error(body)
            welcome = wire.decode_welcome(body)
            if welcome.key_algorithm != KEY_ALGORITHM:
                raise VersionMismatch(
                    f"node {self.name} makes keys by {welcome.key_algorithm!r}, this client by {KEY_ALGORITHM!r}"
                )
            if bulk and self.shares:
                hold = Hold(connection, deadline_s, self._request_ids, self._monotonic)
                connection.peer = _share(hold, self._arena)
        except BaseException:
            connection.close()
            raise
        return connection

    def _drop_idle(self) -> None:
        for lane in self._lanes.values():
            lane.drop()


def _share(hold: Hold, owner: ArenaOfClient) -> Peer | None:
    """Offer the daemon the arena, and learn whether it lends segments; None where either side cannot or will not."""
    arena = owner.get()
    part = arena.take(PARTS * PART_BYTES) if arena is not None else None
    if arena is None or part is None:
        return None
    granted = False
    fd = None
    try:
        fd = owner.open()
        if fd is None:
            return None
        call = Call(wire.Opcode.SHARE, sharing.encode_share(len(arena)))
        request_id = hold.send(call, [fd])
        shared = hold.take(call.opcode, request_id, lambda _, header, body: sharing.decode_shared(body))
        granted = shared.granted
    finally:
        close_all([fd])
        if not granted:
            arena.give(part)
    return Peer(arena, part, shared.lease_s) if granted else None


def new_hello(token: str | None, tenant: str | None) -> wire.Hello:
    """What a client says first. Raises ValueError for a token or tenant beyond its bound."""
    hello = wire.Hello(wire.VERSION, KEY_ALGORITHM, (token or "").encode(), tenant or "")
    wire.encode_hello(hello)
    return hello


def deadline_after(deadline_s: float, monotonic: Callable[[], float]) -> float:
    """The point of the monotonic clock at which a call's deadline passes. Raises ValueError outside (0, 600 s]."""
    if not 0.0 < deadline_s <= limits.DEADLINE_S_MAX:
        raise ValueError(f"a deadline is more than 0 and at most {limits.DEADLINE_S_MAX:.0f} s, not {deadline_s}")
    return monotonic() + deadline_s
