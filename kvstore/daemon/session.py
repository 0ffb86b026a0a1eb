"""One connection's conversation: HELLO, then requests answered one after another.

Owns what each frame does to the store behind it. Does not know listeners or threads. Invariants: nothing but HELLO is
read before the token was checked, and no request is run that the gate does not let pass; a request is answered, or the
connection is closed, but a peer never sees a fault's details. What gets are answered by is ``outgoing``'s, what becomes
of puts is ``incoming``'s.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Protocol

import xxhash

from kvstore import control, limits, sharing, wire
from kvstore.daemon.admission import Admission
from kvstore.daemon.gate import Gate
from kvstore.daemon.incoming import ADMISSION_WAIT_S_MAX, CheckedPuts, IncomingPuts
from kvstore.daemon.lending import Neighbour
from kvstore.daemon.load import LoadRate
from kvstore.daemon.metrics import ServerMetrics
from kvstore.daemon.outgoing import Outgoing, PayloadBackend
from kvstore.daemon.request import SCRATCH_BYTES, Connection, Request
from kvstore.daemon.tokens import Tokens
from kvstore.errors import (
    ProtocolError,
    StoreError,
    Unauthorized,
    VersionMismatch,
)
from kvstore.framing import AHEAD_BYTES_SMALL, close_all
from kvstore.keys import KEY_ALGORITHM, BlockName, Space, SpaceId
from kvstore.store import Store
from kvstore.traffic import TrafficClass

LAST_WORDS_S = 0.5
"""After a malformed frame the error is sent and the rest of what the peer sends is dropped for this long."""

log = logging.getLogger("kvstore.daemon")


class Backend(CheckedPuts, Store, PayloadBackend, Protocol):
    """What is served: a store that lends payloads, checks submitted checksums, verifies on request and knows spaces."""

    def report_corrupt(self, space_id: SpaceId, name: BlockName) -> bool: ...

    def space_of(self, space_id: SpaceId) -> Space | None: ...


class Session:
    """Answers frames for one store. Stateless between frames, so one serves all connections.

    ``lease_s``: how long extents are lent to clients on the same host; 0: not at all. ``stall_s``: how long a
    peer may take nothing of an answer's payload.
    """

    def __init__(
        self,
        backend: Backend,
        admission: Admission,
        metrics: ServerMetrics,
        name: str,
        tokens: Tokens,
        monotonic: Callable[[], float] = time.monotonic,
        *,
        lease_s: float = 0.0,
        stall_s: float = limits.STALL_S_MAX,
    ) -> None:
        self._lease_s = lease_s
        self._backend = backend
        self._admission = admission
        self._load_rate = LoadRate(monotonic)
        self._metrics = metrics
        self._name = name
        self._gate = Gate(tokens, backend, monotonic)
        self._monotonic = monotonic
        self._outgoing = Outgoing(backend, admission, self._load_rate, metrics, monotonic, lease_s, stall_s)
        self._incoming = IncomingPuts(backend, admission, metrics)
        self._handlers: dict[wire.Opcode, Callable[[Request], None]] = {
            wire.Opcode.LOOKUP: self._lookup,
            wire.Opcode.GET: self._outgoing.get,
            wire.Opcode.PUT: self._incoming.put,
            wire.Opcode.TOUCH: self._touch,
            wire.Opcode.PUT_STATE: self._put_state,
            wire.Opcode.GET_STATE: self._get_state,
            wire.Opcode.CONTROL: self._control,
            wire.Opcode.SHARE: self._share,
            wire.Opcode.EXTENTS: self._outgoing.lend,
            wire.Opcode.RELEASE: self._outgoing.release,
            wire.Opcode.PUT_LOCAL: self._incoming.put_local,
            wire.Opcode.CONFIRM: self._incoming.confirm,
        }

    # --- frames -----------------------------------------------------------------------------------------------------

    def greet(self, connection: Connection) -> bool:
        """Take HELLO and answer it; False if the peer may not go on (it was told why)."""
        channel = connection.channel
        try:
            header = channel.receive_header()
            if header is None:
                return False
            if header.opcode != wire.Opcode.HELLO or header.reply or header.payload_bytes:
                raise ProtocolError("a connection begins with HELLO")
            if header.body_bytes > wire.HELLO_BODY_BYTES_MAX:
                raise ProtocolError(f"HELLO has at most {wire.HELLO_BODY_BYTES_MAX} bytes")
            hello = wire.decode_hello(channel.receive_body(header))
            _check_hello(hello)
            self._gate.admit(connection, hello)
        except (ProtocolError, Unauthorized) as error:
            self._part(connection, 0, error)
            return False
        body = wire.encode_welcome(wire.Welcome(wire.VERSION, KEY_ALGORITHM, self._name))
        channel.send(wire.encode_frame(wire.Opcode.HELLO, header.request_id, body, reply=True))
        if channel.peer_uid() is None:
            channel.read_ahead(AHEAD_BYTES_SMALL)  # no descriptor comes over a network
        return True

    def step(self, connection: Connection, idle_s: float, frame_s: float) -> bool:
        """Answer one request; False when the connection is to be closed."""
        channel = connection.channel

        def began() -> None:
            connection.idle = False
            connection.until_s = self._monotonic() + frame_s

        connection.until_s = self._monotonic() + idle_s
        connection.idle = True
        header = None
        try:
            header = channel.receive_header(began)
            if header is None:
                return False
            if header.reply or header.opcode not in self._handlers:
                raise ProtocolError(f"a client does not send {header.opcode.name} here")
            body = channel.receive_body(header)
        except ProtocolError as error:
            self._part(connection, header.request_id if header else 0, error)
            return False
        deadline_s = min(header.deadline_ms / 1000, limits.DEADLINE_S_MAX) or limits.DEADLINE_S_DEFAULT
        now_s = self._monotonic()
        connection.until_s = now_s + frame_s + deadline_s
        return self._answer(connection, Request(connection, header, body, now_s + deadline_s, frame_s, self._monotonic))

    def _answer(self, connection: Connection, request: Request) -> bool:
        """Run the handler. The one place where a fault of the daemon becomes an answer."""
        began_s = self._monotonic()
        try:
            self._gate.check(request)
            self._handlers[request.header.opcode](request)
            if request.unread:
                raise ProtocolError(f"{request.header.opcode.name} came with payload that it does not take")
        except ProtocolError as error:
            self._part(connection, request.header.request_id, error)
            return False
        except (StoreError, ValueError) as error:
            self._metrics.error(error)
            if request.answered:
                return False
            request.refuse(error)
        except Exception:
            log.exception("request %s failed", request.header.opcode.name)
            self._metrics.error(wire.internal_error())
            if request.answered:
                return False
            request.refuse(wire.internal_error())
        self._metrics.answered(request.header, self._monotonic() - began_s)
        return True

    def _part(self, connection: Connection, request_id: int, error: StoreError) -> None:
        """Tell a peer why it is being disconnected, and give it the time to read that."""
        self._metrics.error(error)
        log.info("peer disconnected: %s", error)
        channel = connection.channel
        connection.until_s = min(connection.until_s, self._monotonic() + 2 * LAST_WORDS_S)
        channel.set_deadline(self._monotonic() + LAST_WORDS_S)
        try:
            channel.send(wire.encode_frame(wire.Opcode.ERROR, request_id, wire.encode_error(error), reply=True))
            channel.finish_sending()
            channel.discard(limits.BATCH_BYTES_MAX, memoryview(bytearray(SCRATCH_BYTES)))
        except StoreError:
            return

    # --- requests ---------------------------------------------------------------------------------------------------

    def _lookup(self, request: Request) -> None:
        asked = wire.decode_lookup(request.body)
        answer = self._backend.lookup(asked.space_id, asked.names, states=asked.states, deadline_s=request.left_s())
        load_s = self._load_rate.estimate_s(answer.prefix_bytes()) if self._load_rate.is_known else 0.0
        request.answer(wire.encode_lookup_reply(answer, max(load_s, answer.load_s_estimate)))

    def _touch(self, request: Request) -> None:
        asked = wire.decode_touch(request.body)
        count = self._backend.touch(
            asked.space_id,
            asked.names,
            traffic_class=TrafficClass(asked.traffic_class),
            deadline_s=request.left_s(),
        )
        request.answer(wire.encode_count(count))

    def _put_state(self, request: Request) -> None:
        asked = wire.decode_state(request.body)
        size = request.header.payload_bytes
        if not 1 <= size <= limits.STATE_BYTES_MAX:
            raise ProtocolError(f"a state has 1..{limits.STATE_BYTES_MAX} bytes, not {size}")
        wait_s = min(request.left_s(), ADMISSION_WAIT_S_MAX)
        with self._admission.buffer(size, wait_s, request.connection.party) as buffer:
            request.receive_into(buffer)
            intact = xxhash.xxh3_64_intdigest(buffer) == asked.checksum
            kept = intact and self._backend.put_state(
                asked.space_id, asked.name, buffer, flags=asked.flags, deadline_s=request.left_s()
            )
        self._metrics.payload_in.inc(size)
        request.answer(wire.encode_state_reply(found=kept))

    def _get_state(self, request: Request) -> None:
        asked = wire.decode_state(request.body)
        found = self._backend.get_state(asked.space_id, asked.name, deadline_s=request.left_s())
        if found is None:
            request.answer(wire.encode_state_reply(found=False))
            return
        data, flags = found
        body = wire.encode_state_reply(found=True, flags=flags, checksum=xxhash.xxh3_64_intdigest(data))
        request.answer(body, len(data), (data,))
        self._metrics.payload_out.inc(len(data))

    def _control(self, request: Request) -> None:
        verb, args = control.decode_request(request.body)
        self._gate.check_verb(request.connection, verb, args)
        result = control.encode_result(control.call(self._backend, verb, args, request.left_s()))
        if len(result) > wire.CONTROL_REPLY_BYTES_MAX:
            raise ValueError(f"the answer to {verb} is larger than a frame may be: ask for less at once")
        request.answer(b"", len(result), (result,))

    # --- same host --------------------------------------------------------------------------------------------------

    def _share(self, request: Request) -> None:
        arena_bytes = sharing.decode_share(request.body)
        fd = request.receive_descriptor()
        try:
            granted = fd is not None and self._outgoing.shares and request.connection.trusted
            if granted and fd is not None:
                self._adopt(request.connection, Neighbour.open(fd, arena_bytes))
        finally:
            close_all([fd])
        request.answer(sharing.encode_shared(sharing.Shared(granted, self._lease_s)))

    def _adopt(self, connection: Connection, neighbour: Neighbour) -> None:
        if connection.neighbour is not None:
            neighbour.close()
            raise ProtocolError("a connection shares memory once")
        connection.neighbour = neighbour
        connection.channel.read_ahead()


def _check_hello(hello: wire.Hello) -> None:
    """Raises VersionMismatch for a peer that could not be understood, or would never find a block."""
    if hello.protocol != wire.VERSION:
        raise VersionMismatch(f"the client speaks protocol {hello.protocol}, this node {wire.VERSION}")
    if hello.key_algorithm != KEY_ALGORITHM:
        raise VersionMismatch(
            f"the client makes keys by {hello.key_algorithm!r}, this node by {KEY_ALGORITHM!r}: "
            "they would never find each other's blocks; upgrade the older one"
        )
