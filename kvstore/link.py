"""One node as a client sees it: pooled connections, HELLO, and a circuit that skips a node which does not answer.

Owns connections and the node's health. Does not know verbs. Invariants: every exchange ends by its deadline; a
connection whose state is in doubt (late, broken, or refused) is closed and never reused; bulk exchanges cannot take the
connections of small ones, so a look-up does not queue behind a large put.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from kvstore import limits, wire
from kvstore.errors import DeadlineExceeded, ProtocolError, StoreError, Unavailable, VersionMismatch
from kvstore.framing import Address, Channel, connect, expect_reply
from kvstore.keys import KEY_ALGORITHM

T = TypeVar("T")
Receive = Callable[[Channel, wire.Header, bytes], T]

BACKOFF_S_MIN = 1.0
BACKOFF_S_MAX = 30.0
"""A node that failed is skipped for 1 s, doubling to 30 s; then one exchange tries it again."""
LATE_S_MIN = 0.05
"""A deadline shorter than this says nothing about the node's health; nor does one of a call that moves payload."""
LAST_WORDS_S = 0.2
"""How long to wait for the error of a peer that stopped reading."""


@dataclass(frozen=True, slots=True)
class Call:
    """One request: what is sent, and how it may be treated."""

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


class NodeLink:
    """The connections to one node. Thread-safe; connects when first used."""

    def __init__(
        self,
        address: Address,
        hello: wire.Hello,
        connections: int,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.address = address
        self.circuit = Circuit(monotonic)
        self._hello = hello
        self._monotonic = monotonic
        self._idle: list[Channel] = []
        self._idle_max = 2 * connections
        self._lock = threading.Lock()
        self._lanes = {bulk: threading.BoundedSemaphore(connections) for bulk in (False, True)}
        self._request_ids = itertools.count(1)
        self._closed = False

    @property
    def name(self) -> str:
        return self.address.name

    def exchange(self, call: Call, deadline_s: float, receive: Receive[T]) -> T:
        """Send one request and let ``receive`` take its answer. ``deadline_s`` is a point of the monotonic clock.

        Raises what the peer answered, Unavailable, DeadlineExceeded or ProtocolError; ValueError for a request that the
        peer found invalid.
        """
        if not call.insist and not self.circuit.admit():
            raise Unavailable(f"node {self.name} is skipped for a while: {self.circuit.reason}")
        lane = self._lanes[call.bulk]
        if not lane.acquire(timeout=max(deadline_s - self._monotonic(), 0.0)):
            raise DeadlineExceeded(f"no free connection to node {self.name} before the deadline")
        try:
            return self._exchange(call, deadline_s, receive)
        finally:
            lane.release()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for channel in idle:
            channel.close()

    # --- inside -----------------------------------------------------------------------------------------------------

    def _exchange(self, call: Call, deadline_s: float, receive: Receive[T]) -> T:
        began_s = self._monotonic()
        try:
            pooled = self._take_idle() if call.repeatable else None
            if pooled is not None:
                try:
                    answer = self._attempt(pooled, call, deadline_s, receive)
                except Unavailable:
                    self._drop_idle()  # the daemon restarted: the other pooled connections are as stale as this one
                else:
                    self.circuit.succeeded()
                    return answer
            answer = self._attempt(self._connect(deadline_s), call, deadline_s, receive)
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

    def _attempt(self, channel: Channel, call: Call, deadline_s: float, receive: Receive[T]) -> T:
        """One request on one channel, which goes back to the pool only if its state is beyond doubt."""
        keep = False
        try:
            channel.set_deadline(deadline_s)
            request_id = next(self._request_ids) & 0xFFFFFFFF
            left_ms = max(int(1000 * (deadline_s - self._monotonic())), 1)
            head = wire.encode_frame(
                call.opcode, request_id, call.body, payload_bytes=call.payload_bytes, deadline_ms=left_ms
            )
            try:
                channel.send(head, call.payloads)
            except Unavailable as broken:
                raise self._last_words(channel) or broken from broken
            header = expect_reply(channel.receive_header(), call.opcode, request_id)
            body = channel.receive_body(header)
            if header.opcode == wire.Opcode.ERROR:
                error = wire.decode_error(body)
                keep = not isinstance(error, (ProtocolError, Unavailable)) and header.payload_bytes == 0
                raise error
            answer = receive(channel, header, body)
            keep = True
            return answer
        finally:
            if keep:
                self._give_back(channel)
            else:
                channel.close()

    def _last_words(self, channel: Channel) -> Exception | None:
        """The error frame of a peer that hung up while we were still sending, if it left one."""
        channel.set_deadline(self._monotonic() + LAST_WORDS_S)
        try:
            header = channel.receive_header()
            if header is not None and header.opcode == wire.Opcode.ERROR:
                return wire.decode_error(channel.receive_body(header))
        except StoreError:
            pass
        return None

    def _connect(self, deadline_s: float) -> Channel:
        channel = connect(self.address, deadline_s, self._monotonic)
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
        except BaseException:
            channel.close()
            raise
        return channel

    def _take_idle(self) -> Channel | None:
        with self._lock:
            return self._idle.pop() if self._idle else None

    def _give_back(self, channel: Channel) -> None:
        with self._lock:
            if not self._closed and len(self._idle) < self._idle_max:
                self._idle.append(channel)
                return
        channel.close()

    def _drop_idle(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for channel in idle:
            channel.close()


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
