"""Addresses, and channels that keep their deadline however the peer behaves."""

from __future__ import annotations

import os
import random
import socket
import tempfile
import threading
import time
from collections.abc import Iterator

import pytest

from kvstore import wire
from kvstore.errors import DeadlineExceeded, ProtocolError, Unavailable
from kvstore.framing import RECEIVE_BUFFER_BYTES, Address, Channel, connect, expect_reply, parse_address, tune
from tests.support.waiting import WAIT_S


@pytest.fixture(params=["unix", "tcp"])
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[Channel, socket.socket]]:
    if request.param == "unix":
        ours, theirs = socket.socketpair()
    else:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            ours = socket.create_connection(listener.getsockname())
            theirs, _ = listener.accept()
    ours.setblocking(True)
    theirs.settimeout(WAIT_S)
    with ours, theirs:
        yield Channel(ours), theirs


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("unix:/run/store.sock", Address("unix:/run/store.sock", path="/run/store.sock")),
        ("10.0.0.1:7071", Address("10.0.0.1:7071", host="10.0.0.1", port=7071)),
        ("[::1]:7071", Address("[::1]:7071", host="::1", port=7071)),
        ("n1=host.example:1", Address("n1", host="host.example", port=1)),
        ("n1=unix:/a=b", Address("n1", path="/a=b")),
    ],
)
def test_addresses(text: str, address: Address) -> None:
    assert parse_address(text) == address
    assert str(address) == text.removeprefix("n1=")


def test_gathered_buffers_arrive_in_order(pair: tuple[Channel, socket.socket]) -> None:
    """Thousands of buffers, empty ones among them, in one frame: more than one system call takes."""
    channel, peer = pair
    parts = [os.urandom(size % 301) for size in range(2000)]
    received = bytearray()

    def read() -> None:
        while len(received) < 4 + sum(map(len, parts)):
            received.extend(peer.recv(100_000))

    thread = threading.Thread(target=read)
    thread.start()
    channel.set_deadline(time.monotonic() + WAIT_S)
    channel.send(b"head", parts)
    thread.join(WAIT_S)
    assert received == b"head" + b"".join(parts)


def test_a_file_is_sent_and_what_it_lacks_is_zeros(pair: tuple[Channel, socket.socket]) -> None:
    """A file that is shorter than promised keeps the frame whole: zeros stand for the missing bytes."""
    channel, peer = pair
    with tempfile.TemporaryFile() as file:
        content = os.urandom(5000)
        file.write(content)
        file.flush()
        assert channel.send_file(file.fileno(), 1000, 100_000) == 4000
    received = bytearray()
    while len(received) < 100_000:
        received += peer.recv(100_000)
    assert received == content[1000:] + bytes(96_000)


def test_no_wait_outlasts_the_deadline(pair: tuple[Channel, socket.socket]) -> None:
    """A peer that is silent, that trickles, or that does not read: the deadline ends the call."""
    channel, peer = pair
    channel.set_deadline(time.monotonic() + 0.2)
    with pytest.raises(DeadlineExceeded):
        channel.receive_into(memoryview(bytearray(10)))
    stop = threading.Event()

    def trickle() -> None:
        while not stop.wait(0.05):
            peer.send(b"x")

    thread = threading.Thread(target=trickle)
    thread.start()
    began_s = time.monotonic()
    channel.set_deadline(began_s + 0.3)
    with pytest.raises(DeadlineExceeded):
        channel.receive_into(memoryview(bytearray(1000)))
    stop.set()
    thread.join()
    channel.set_deadline(time.monotonic() + 0.2)
    with pytest.raises(DeadlineExceeded):
        channel.send(b"", [bytes(64 * 1024 * 1024)])
    assert time.monotonic() - began_s < 40, "1000 bytes take 50 s"


def test_a_deadline_can_be_lifted(pair: tuple[Channel, socket.socket]) -> None:
    channel, peer = pair
    channel.set_deadline(time.monotonic() + 0.05)
    with pytest.raises(DeadlineExceeded):
        channel.receive_into(memoryview(bytearray(1)))
    channel.set_deadline(None)
    threading.Timer(0.2, peer.send, [b"x"]).start()
    channel.receive_into(memoryview(bytearray(1)))


def test_the_end_between_frames_differs_from_the_end_within_one(pair: tuple[Channel, socket.socket]) -> None:
    channel, peer = pair
    peer.sendall(wire.encode_frame(wire.Opcode.GET, 5, b"body"))
    header = channel.receive_header()
    assert header is not None
    assert channel.receive_body(header) == b"body"
    peer.sendall(b"RPKV")
    peer.shutdown(socket.SHUT_WR)
    with pytest.raises(Unavailable, match="middle"):
        channel.receive_header()
    assert channel.receive_header() is None


def _send(peer: socket.socket, data: bytes, piece: int) -> None:
    for at in range(0, len(data), piece):
        peer.sendall(data[at : at + piece])


@pytest.mark.parametrize("piece", [1, 7, 41, 4096, 1_000_000])
@pytest.mark.parametrize("ahead", [False, True])
def test_reading_ahead_changes_nothing_but_the_steps(
    pair: tuple[Channel, socket.socket], piece: int, ahead: bool
) -> None:
    """However bytes come, frames with and without body and payload are received as they were sent, then the end."""
    channel, peer = pair
    draw = random.Random(piece)
    sizes = [draw.choice((0, 1, 300, 5000)) for _ in range(9)] + [20_000] * (piece > 40)
    frames = [(draw.randbytes(size), draw.randbytes(17 * (at % 3 == 0))) for at, size in enumerate(sizes)]
    heads = [
        wire.encode_frame(wire.Opcode.CONTROL, at, body, payload_bytes=len(payload))
        for at, (body, payload) in enumerate(frames)
    ]
    stream = b"".join(head + payload for head, (_, payload) in zip(heads, frames, strict=True))

    thread = threading.Thread(target=_send, args=(peer, stream, piece))
    thread.start()
    channel.set_deadline(time.monotonic() + WAIT_S)
    if ahead:
        channel.read_ahead()
    for at, (body, payload) in enumerate(frames):
        header = channel.receive_header()
        assert header is not None
        assert (header.request_id, channel.receive_body(header)) == (at, body)
        taken = [bytearray(8), bytearray(9)]
        if at % 2 and payload:
            channel.discard(17, memoryview(taken[0]))
        elif payload:
            channel.receive_parts([memoryview(part) for part in taken])
            assert b"".join(taken) == payload
    thread.join(WAIT_S)
    peer.shutdown(socket.SHUT_WR)
    assert channel.receive_header() is None


@pytest.mark.parametrize("piece", [1, 39, 40, 60, 1000])
def test_an_answer_of_known_length_is_taken_and_nothing_behind_it(
    pair: tuple[Channel, socket.socket], piece: int
) -> None:
    """Also where it comes in pieces, tells of an error in fewer or more bytes, or has another length than it should."""
    channel, peer = pair
    channel.set_deadline(time.monotonic() + WAIT_S)
    answers = [(wire.Opcode.GET, 100), (wire.Opcode.ERROR, 9), (wire.Opcode.GET, 100), (wire.Opcode.ERROR, 300)]
    for opcode, size in answers:
        body = bytes(range(size % 256)) * (size // (size % 256))
        payload = b"" if opcode == wire.Opcode.ERROR else b"payload"
        frame = wire.encode_frame(opcode, 1, body, payload_bytes=len(payload), reply=True) + payload
        thread = threading.Thread(target=_send, args=(peer, frame, piece))
        thread.start()
        header, came = channel.receive_answer(100)
        assert header is not None
        assert (header.opcode, came) == (opcode, body)
        rest = bytearray(len(payload))
        channel.receive_into(memoryview(rest))
        assert rest == payload
        thread.join(WAIT_S)
    peer.sendall(wire.encode_frame(wire.Opcode.GET, 1, b"short", reply=True) + b"of no frame")
    with pytest.raises(ProtocolError, match="belong to no frame"):
        channel.receive_answer(100)
    peer.close()
    assert channel.receive_answer(100) == (None, b"")


def test_only_the_awaited_answer_is_taken() -> None:
    def header(opcode: wire.Opcode, request_id: int, reply: bool) -> wire.Header:
        return wire.Header(opcode, reply, request_id, 0, 0, 0, 0)

    assert expect_reply(header(wire.Opcode.GET, 3, True), wire.Opcode.GET, 3).request_id == 3
    assert expect_reply(header(wire.Opcode.ERROR, 0, True), wire.Opcode.GET, 3).opcode == wire.Opcode.ERROR
    for wrong in (
        header(wire.Opcode.PUT, 3, True),
        header(wire.Opcode.GET, 4, True),
        header(wire.Opcode.GET, 3, False),
    ):
        with pytest.raises(ProtocolError):
            expect_reply(wrong, wire.Opcode.GET, 3)
    with pytest.raises(Unavailable):
        expect_reply(None, wire.Opcode.GET, 3)


def fill_backlog(address: Address, held: list[Channel]) -> None:
    for _ in range(10):
        held.append(connect(address, time.monotonic() + 0.2))


def test_connecting_fails_by_name_or_by_deadline() -> None:
    """Nobody listening is Unavailable at once; a full backlog is DeadlineExceeded in time."""
    with pytest.raises(Unavailable, match="unix:/nonexistent"):
        connect(parse_address("unix:/nonexistent/x.sock"), time.monotonic() + WAIT_S)
    with pytest.raises(Unavailable, match="cannot connect"):
        connect(parse_address("host.invalid:1"), time.monotonic() + WAIT_S)
    with tempfile.TemporaryDirectory(prefix="kv") as folder, socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{folder}/s")
        listener.listen(0)
        address = parse_address(f"unix:{folder}/s")
        held: list[Channel] = []
        with pytest.raises(DeadlineExceeded):
            fill_backlog(address, held)
        for channel in held:
            channel.close()


def test_what_comes_in_time_is_taken_and_the_rest_later() -> None:
    """Bytes read ahead count, a deadline that was set stays, and a peer that closes is told from one that is late."""
    ours, theirs = socket.socketpair()
    channel = Channel(ours)
    channel.read_ahead(wire.HEADER_BYTES + 3)
    channel.set_deadline(time.monotonic() + 60)
    data = random.Random(1).randbytes(20)
    theirs.sendall(wire.encode_frame(wire.Opcode.TOUCH, 1, b"", payload_bytes=20) + data[:10])
    assert channel.receive_header() is not None
    view = memoryview(bytearray(20))
    assert channel.receive_within(view, 0.02) == 10
    theirs.sendall(data[10:])
    channel.receive_into(view[10:])
    assert bytes(view) == data
    channel.set_deadline(time.monotonic() - 1)
    theirs.sendall(data)
    assert channel.receive_within(view, 10.0) == 20
    with pytest.raises(DeadlineExceeded):
        channel.receive_into(view)
    theirs.close()
    with pytest.raises(Unavailable):
        channel.receive_within(view, 10.0)
    channel.close()


@pytest.mark.parametrize("loopback", [True, False])
def test_what_waits_in_a_socket_is_bounded_on_loopback_only(loopback: bool) -> None:
    """Elsewhere the kernel fits the buffer to the path, which may be long."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
        before = sock.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)
        tune(sock, loopback=loopback)
        after = sock.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)
    if loopback:
        assert before < after <= 2 * RECEIVE_BUFFER_BYTES
    else:
        assert after == before
