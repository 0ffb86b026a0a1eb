"""Bounded frames over blocking sockets: deadlines, scatter and gather.

Owns addresses, socket options and the moving of bytes. Does not know what a message means (``wire`` does). Invariants:
with a deadline set, no call outlasts it by more than milliseconds, however slowly the peer trickles; nothing is
allocated before its length was checked; payload bytes go straight into and out of the caller's buffers.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvstore import wire
from kvstore.access import is_loopback, split_host_port
from kvstore.errors import DeadlineExceeded, ProtocolError, Unavailable

SEND_BUFFER_BYTES = 1024 * 1024
"""Of Unix sockets: the default of 208 KiB halves their speed."""
RECEIVE_BUFFER_BYTES = 1024 * 1024
"""Of TCP on loopback, where the kernel would let one grow to 32 MiB: what waits in this one is still in the processor's
cache when it is received. Puts of 64 x 1 MiB take 0.51 instead of 0.58 CPU seconds a GB.
"""
FILE_CHUNK_BYTES = 8 * 1024 * 1024
AHEAD_BYTES = 16 * 1024
"""Room for the question after many blocks."""
AHEAD_BYTES_SMALL = 4 * 1024
"""Room for the question after a few; of a payload that follows, no more is copied once more than this."""
BUFFERS_PER_SEND = 512
"""Half of what the kernel takes in one sendmsg."""
UNIX_PATH_BYTES_MAX = 107
_WAIT_S_MIN = 0.001
ARM_SLACK_S = 0.005
"""How much longer than its deadline a call may last."""
_TIMEVAL = struct.Struct("@ll")
_PEER = struct.Struct("@iII")
_ZEROS = bytes(64 * 1024)


# --- addresses ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Address:
    """Where a node listens: a Unix socket (``path``) or ``host`` and ``port``. ``name`` is what placement hashes."""

    name: str
    path: str = ""
    host: str = ""
    port: int = 0

    def __str__(self) -> str:
        if self.path:
            return f"unix:{self.path}"
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_address(text: str) -> Address:
    """An address from ``unix:/path``, ``host:port`` or ``[::1]:7071``, each possibly behind ``name=``.

    A name keeps a node's share of the blocks when its address changes, or when hosts reach it by different addresses.
    """
    name, equals, rest = text.partition("=")
    if not equals or "/" in name or ":" in name:
        name, rest = text, text
    if not name:
        raise ValueError(f"address {text!r} has an empty name before '='")
    if rest.startswith("unix:"):
        path = rest.removeprefix("unix:")
        if not path.startswith("/") or len(os.fsencode(path)) > UNIX_PATH_BYTES_MAX:
            raise ValueError(f"address {text!r}: a Unix socket needs an absolute path of at most 107 bytes")
        return Address(name, path=path)
    bare = rest.rpartition(":")[0]
    if ":" in bare and not (bare.startswith("[") and bare.endswith("]")):
        if "," in text:
            raise ValueError(f"address {text!r}: name one node at a time")
        raise ValueError(f"address {text!r}: write an IPv6 address in brackets, such as [::1]:7071")
    try:
        host, port = split_host_port(rest)
    except ValueError as error:
        raise ValueError(f"{error}; a node's address is host:port, [::1]:port or unix:/path") from error
    return Address(name, host=host, port=port)


# --- sockets --------------------------------------------------------------------------------------------------------


def tune(sock: socket.socket, *, loopback: bool) -> None:
    """Options of a connected or listening socket; those that a kernel lacks are left out.

    TCP: no delay; on loopback a receive buffer of 1 MiB, and reno (a default of bbr paces it: 1.5-5 times slower).
    Unix: a send buffer of 1 MiB.
    """
    if sock.family == socket.AF_UNIX:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if loopback:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER_BYTES)
        with contextlib.suppress(OSError, AttributeError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")


def connect(address: Address, deadline_s: float, monotonic: Callable[[], float] = time.monotonic) -> Channel:
    """A connected channel. ``deadline_s`` is a point of ``monotonic``. Raises Unavailable or DeadlineExceeded."""
    sock: socket.socket | None = None
    try:
        if address.path:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            target: object = address.path
        else:
            family, kind, protocol, _, target = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)[
                0
            ]
            sock = socket.socket(family, kind, protocol)
        tune(sock, loopback=is_loopback(address.host))
        channel = Channel(sock, monotonic)
        channel.set_deadline(deadline_s)
        channel.connect(target)
    except OSError as error:
        if sock is not None:
            sock.close()
        raise Unavailable(f"cannot connect to {address}: {error.strerror or error}") from error
    except DeadlineExceeded:
        if sock is not None:
            sock.close()
        raise
    return channel


class Channel:
    """One connected socket that sends and receives frames. Owned by one thread at a time.

    Without a deadline every call blocks until the peer acts or somebody shuts the socket down.
    """

    __slots__ = ("_ahead", "_armed_s", "_buffer", "_deadline_s", "_monotonic", "_sock")

    def __init__(self, sock: socket.socket, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._sock = sock
        self._monotonic = monotonic
        self._deadline_s: float | None = None
        self._armed_s: dict[int, float] = {}
        """What the kernel was told, by option."""
        self._buffer: memoryview | None = None
        self._ahead = memoryview(b"")
        """What was received beyond what was asked for: it comes first."""

    def read_ahead(self, count: int = AHEAD_BYTES) -> None:
        """From now on a frame's header is received with up to ``count`` bytes of what follows it. Descriptors that come
        are lost from now on: for a peer that has sent them, or cannot.
        """
        self._buffer = memoryview(bytearray(count))

    def set_deadline(self, deadline_s: float | None) -> None:
        """A point of the monotonic clock that no later call outlasts; None for no bound."""
        self._deadline_s = deadline_s

    def connect(self, target: object) -> None:
        self._arm(socket.SO_SNDTIMEO)
        try:
            self._sock.connect(target)  # type: ignore[arg-type]
        except BlockingIOError as error:
            raise DeadlineExceeded("the connection was not accepted before the deadline") from error

    def send(self, head: bytes, payloads: Sequence[bytes | bytearray | memoryview] = (), *, more: bool = False) -> None:
        """A frame's header and body, and its payload gathered from the buffers, in order.

        ``more``: what follows at once may travel with it, so that the peer is not woken for the header alone.
        """
        flags = socket.MSG_MORE if more else 0
        if not payloads:
            sent = self._send_whole(head, flags)
            if sent == len(head):
                return
            head = head[sent:]
        waiting = [memoryview(head), *(memoryview(payload).cast("B") for payload in payloads)]
        first = 0
        while first < len(waiting):
            sent = self._send_some(waiting[first : first + BUFFERS_PER_SEND], flags)
            while first < len(waiting) and sent >= len(waiting[first]):
                sent -= len(waiting[first])
                first += 1
            if sent:
                waiting[first] = waiting[first][sent:]

    def _send_whole(self, head: bytes, flags: int) -> int:
        """``_send_some`` of one, in less time."""
        self._arm(socket.SO_SNDTIMEO)
        try:
            return self._sock.send(head, flags)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise Unavailable(f"the connection broke while sending: {error.strerror or error}") from error

    def _send_some(self, buffers: Sequence[bytes | memoryview], flags: int = 0) -> int:
        self._arm(socket.SO_SNDTIMEO)
        try:
            return self._sock.sendmsg(buffers, (), flags)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise Unavailable(f"the connection broke while sending: {error.strerror or error}") from error

    def send_file(self, fd: int, offset: int, count: int) -> int:
        """Bytes of an open file, without a copy through this process. Returns how many the file really gave.

        What a truncated or unreadable file lacks is sent as zeros, so that the frame stays whole: the reader's
        checksum finds it.
        """
        end = offset + count
        at = offset
        while at < end:
            self._arm(socket.SO_SNDTIMEO)
            try:
                sent = os.sendfile(self._sock.fileno(), fd, at, min(end - at, FILE_CHUNK_BYTES))
            except BlockingIOError:
                continue
            except (BrokenPipeError, ConnectionError) as error:
                raise Unavailable(f"the connection broke while sending: {error.strerror or error}") from error
            except OSError:
                sent = 0
            if sent == 0:
                break
            at += sent
        lacking = end - at
        while lacking:
            part = min(lacking, len(_ZEROS))
            self.send(_ZEROS[:part])
            lacking -= part
        return at - offset

    def send_descriptors(self, fds: Sequence[int]) -> None:
        """One payload byte for each open file, with its descriptor attached: the peer gets a descriptor of its own."""
        for fd in fds:
            while True:
                self._arm(socket.SO_SNDTIMEO)
                try:
                    socket.send_fds(self._sock, [b"\0"], [fd])
                except BlockingIOError:
                    continue
                except OSError as error:
                    raise Unavailable(f"a descriptor could not be sent: {error.strerror or error}") from error
                break

    def receive_descriptors(self, count: int) -> list[int | None]:
        """What ``send_descriptors`` sent, owned by the caller; None where a byte came without (too many open files)."""
        fds: list[int | None] = []
        while self._ahead and len(fds) < count:
            self._ahead = self._ahead[1:]
            fds.append(None)
        try:
            for _ in range(count - len(fds)):
                fds.append(self._receive_descriptor())
        except BaseException:
            close_all(fds)
            raise
        return fds

    def _receive_descriptor(self) -> int | None:
        while True:
            self._arm(socket.SO_RCVTIMEO)
            try:
                data, fds, _, _ = socket.recv_fds(self._sock, 1, 1, socket.MSG_CMSG_CLOEXEC)
            except BlockingIOError:
                continue
            except OSError as error:
                raise Unavailable(f"the connection broke while receiving: {error.strerror or error}") from error
            close_all(fds[1:])
            if not data:
                close_all(fds[:1])
                raise Unavailable("the peer closed the connection in the middle of a frame")
            return fds[0] if fds else None

    def peer_uid(self) -> int | None:
        """The user at the other end of a Unix socket; None over TCP, where nobody knows."""
        if self._sock.family != socket.AF_UNIX:
            return None
        try:
            found = self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
        except (OSError, AttributeError):
            return None
        return int(_PEER.unpack(found)[1])

    def receive_header(self, began: Callable[[], None] | None = None) -> wire.Header | None:
        """The next frame's header, or None if the peer closed between frames. ``began`` is called at its first byte."""
        if self._buffer is not None and not self._ahead:
            self._ahead = self._buffer[: self._receive_some(self._buffer, 0)]
            if not self._ahead:
                return None
        if len(self._ahead) >= wire.HEADER_BYTES:
            if began is not None:
                began()
            return wire.decode_header(self._cut_ahead(wire.HEADER_BYTES))
        view = memoryview(bytearray(wire.HEADER_BYTES))
        got = self._take_ahead(view) or self._receive_some(view, 0)
        if got == 0:
            return None
        if began is not None:
            began()
        if got < len(view):
            self.receive_into(view[got:])
        return wire.decode_header(view)

    def receive_answer(self, body_bytes: int) -> tuple[wire.Header | None, bytes]:
        """Header and body of a frame whose body has this length, unless it tells of an error; no header if the peer
        closed.

        Nothing beyond such a frame is received, and both come at once where they were sent at once.
        """
        view = memoryview(bytearray(wire.HEADER_BYTES + body_bytes))
        got = self._receive_some(view, 0)
        if got == 0:
            return None, b""
        if got == len(view):
            header, whole = wire.decode_header(view[: wire.HEADER_BYTES]), bytes(view[wire.HEADER_BYTES :])
            if header.body_bytes == body_bytes:
                wire.check_body(header, whole)
                return header, whole
        if got < wire.HEADER_BYTES:
            self.receive_into(view[got : wire.HEADER_BYTES])
            got = wire.HEADER_BYTES
        header = wire.decode_header(view[: wire.HEADER_BYTES])
        body = bytearray(header.body_bytes)
        came = view[wire.HEADER_BYTES : got]
        if len(came) > len(body):
            raise ProtocolError("the peer sent bytes that belong to no frame")
        body[: len(came)] = came
        self.receive_into(memoryview(body)[len(came) :])
        wire.check_body(header, bytes(body))
        return header, bytes(body)

    def receive_body(self, header: wire.Header) -> bytes:
        """The body that follows a header, checked against it."""
        body = self._receive_bytes(header.body_bytes)
        wire.check_body(header, body)
        return body

    def _receive_bytes(self, count: int) -> bytes:
        """As ``receive_into``, into bytes of their own: where all come at once, nothing is cleared or copied."""
        if count <= len(self._ahead):
            return self._cut_ahead(count)
        came = b""
        if not self._ahead:
            self._arm(socket.SO_RCVTIMEO)
            try:
                came = self._sock.recv(count, socket.MSG_WAITALL)
            except BlockingIOError:
                pass
            except OSError as error:
                raise Unavailable(f"the connection broke while receiving: {error.strerror or error}") from error
            else:
                if not came:
                    raise Unavailable("the peer closed the connection in the middle of a frame")
            if len(came) == count:
                return came
        data = bytearray(count)
        data[: len(came)] = came
        self.receive_into(memoryview(data)[len(came) :])
        return bytes(data)

    def receive_into(self, view: memoryview) -> None:
        """Fill the whole view from the peer."""
        at = self._take_ahead(view)
        while at < len(view):
            got = self._receive_some(view[at:], socket.MSG_WAITALL)
            if got == 0:
                raise Unavailable("the peer closed the connection in the middle of a frame")
            at += got

    def receive_within(self, view: memoryview, wait_s: float) -> int:
        """As much of the view as comes in time, whatever the deadline; returns how much."""
        deadline_s, self._deadline_s = self._deadline_s, self._monotonic() + wait_s
        at = self._take_ahead(view)
        try:
            while at < len(view):
                got = self._receive_some(view[at:], socket.MSG_WAITALL)
                if got == 0:
                    raise Unavailable("the peer closed the connection in the middle of a frame")
                at += got
        except DeadlineExceeded:
            pass
        finally:
            self._deadline_s = deadline_s
        return at

    def receive_parts(self, parts: list[memoryview]) -> None:
        """Fill all of the views from the peer, one after another; there are at most 1024."""
        while parts and self._ahead:
            parts = _advance(parts, self._take_ahead(parts[0]))
        while parts:
            self._arm(socket.SO_RCVTIMEO)
            try:
                got = self._sock.recvmsg_into(parts, 0, socket.MSG_WAITALL)[0]
            except BlockingIOError:
                continue
            except OSError as error:
                raise Unavailable(f"the connection broke while receiving: {error.strerror or error}") from error
            if got == 0:
                raise Unavailable("the peer closed the connection in the middle of a frame")
            parts = _advance(parts, got)

    def discard(self, count: int, scratch: memoryview) -> None:
        """Read and forget payload bytes, so that the connection stays usable."""
        while count:
            part = scratch[: min(count, len(scratch))]
            self.receive_into(part)
            count -= len(part)

    def _cut_ahead(self, count: int) -> bytes:
        """As many bytes of what came before it was asked for; there are."""
        came, self._ahead = bytes(self._ahead[:count]), self._ahead[count:]
        return came

    def _take_ahead(self, view: memoryview) -> int:
        """How much of a view was filled by what came before it was asked for."""
        if not self._ahead:
            return 0
        count = min(len(view), len(self._ahead))
        view[:count], self._ahead = self._ahead[:count], self._ahead[count:]
        return count

    def _receive_some(self, view: memoryview, flags: int) -> int:
        while True:
            self._arm(socket.SO_RCVTIMEO)
            try:
                return self._sock.recv_into(view, 0, flags)
            except BlockingIOError:
                continue
            except OSError as error:
                raise Unavailable(f"the connection broke while receiving: {error.strerror or error}") from error

    def _arm(self, option: int) -> None:
        """Let the kernel end the next call at the deadline, or up to ARM_SLACK_S later: what it was told before serves
        as long as it is that near, since telling it costs as much as a small call. Where it ends a call early, the
        caller arms again.
        """
        armed_s = self._armed_s.get(option, 0.0)
        if self._deadline_s is None:
            if armed_s:
                self._set_timeout(option, 0.0)
            return
        left_s = self._deadline_s - self._monotonic()
        if left_s <= 0:
            raise DeadlineExceeded("the deadline passed")
        if not left_s / 2 <= armed_s <= left_s + ARM_SLACK_S:
            self._set_timeout(option, max(left_s, _WAIT_S_MIN))

    def _set_timeout(self, option: int, seconds: float) -> None:
        whole = int(seconds)
        try:
            self._sock.setsockopt(socket.SOL_SOCKET, option, _TIMEVAL.pack(whole, int((seconds - whole) * 1_000_000)))
        except OSError as error:
            raise Unavailable(f"the connection is closed: {error.strerror or error}") from error
        self._armed_s[option] = seconds

    def shutdown(self, how: int = socket.SHUT_RDWR) -> None:
        """Wake whoever is blocked on this channel; safe from another thread, and when it is closed already."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(how)

    def finish_sending(self) -> None:
        """Tell the peer that nothing more will come; it may still be heard."""
        self.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._sock.close()


def _advance(parts: list[memoryview], count: int) -> list[memoryview]:
    """What is left of the buffers after ``count`` bytes of them."""
    first = 0
    while first < len(parts) and count >= len(parts[first]):
        count -= len(parts[first])
        first += 1
    return [parts[first][count:], *parts[first + 1 :]] if count else parts[first:]


def close_all(fds: Sequence[int | None]) -> None:
    """Close the descriptors among these."""
    for fd in fds:
        if fd is not None:
            os.close(fd)


def expect_reply(header: wire.Header | None, opcode: wire.Opcode, request_id: int) -> wire.Header:
    """The header of the awaited answer. Raises Unavailable if there is none, ProtocolError for anything unexpected."""
    if header is None:
        raise Unavailable("the peer closed the connection instead of answering")
    if not header.reply or header.opcode not in (opcode, wire.Opcode.ERROR):
        raise ProtocolError(f"the peer answered {opcode.name} with {header.opcode.name}")
    if header.request_id != request_id and header.opcode != wire.Opcode.ERROR:
        raise ProtocolError("the peer answered another request")
    return header
