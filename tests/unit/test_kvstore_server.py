"""The data plane against peers that misbehave, restart, stall or come in numbers."""

from __future__ import annotations

import os
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from kvstore import limits, wire
from kvstore.client import StoreClient
from kvstore.daemon.admission import Admission
from kvstore.daemon.metrics import ServerMetrics
from kvstore.daemon.server import Server
from kvstore.errors import Overloaded, StoreError, Unauthorized, Unavailable, VersionMismatch
from kvstore.keys import KEY_ALGORITHM
from kvstore.store import BlockPut, GetStatus, Presence, PutOutcome
from kvstore.testing import DAY_S, ManualClock, MemoryStore
from kvstore.traffic import AGENT, CHAT, ClassRule, ClassRules
from tests.support.spaces import BLOCK_TOKENS, a_chain, a_space, put_chain
from tests.support.stores import client_of, open_memory, open_node, served
from tests.support.waiting import WAIT_S, wait

SIZE = 1000


@pytest.fixture
def server(backend: MemoryStore, folder: Path) -> Iterator[Server]:
    with served(backend, folder) as running:
        yield running


@contextmanager
def raw(server: Server) -> Iterator[socket.socket]:
    host, port = server.addresses[0].rsplit(":", 1)
    with socket.create_connection((host, int(port)), timeout=WAIT_S) as sock:
        yield sock


def hello_frame(token: bytes = b"", algorithm: str = KEY_ALGORITHM, protocol: int = wire.VERSION) -> bytes:
    body = wire.encode_hello(wire.Hello(protocol, algorithm, token, ""))
    return wire.encode_frame(wire.Opcode.HELLO, 7, body)


def read_all(sock: socket.socket) -> bytes:
    data = b""
    try:
        while part := sock.recv(65_536):
            data += part
    except ConnectionResetError:
        pass
    return data


def error_in(data: bytes) -> Exception:
    """The error of the last frame in what a server sent."""
    while True:
        header = wire.decode_header(data[: wire.HEADER_BYTES])
        end = wire.HEADER_BYTES + header.body_bytes
        if len(data) == end:
            assert header.opcode == wire.Opcode.ERROR
            return wire.decode_error(data[wire.HEADER_BYTES : end])
        data = data[end:]


def assert_serves(server: Server) -> None:
    """A well-behaved client still puts and gets."""
    with client_of(server.addresses[1]) as client:
        space = client.register_space(a_space(epoch=77))
        put_chain(client, a_chain(space, 2, seed=random.randrange(1000)), AGENT)


# --- malformed peers ------------------------------------------------------------------------------------------------


def test_garbage_is_answered_with_an_error_and_closed(server: Server) -> None:
    """Random bytes instead of HELLO, or after it: a typed error where possible, then the end; the daemon goes on."""
    rng = random.Random(1)
    for after_hello in (False, True):
        for _ in range(5):
            with raw(server) as sock:
                sock.sendall((hello_frame() if after_hello else b"") + rng.randbytes(200))
                data = read_all(sock)
            assert "magic" in str(error_in(data))
            assert b"Traceback" not in data
    with raw(server) as sock:
        sock.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" + bytes(40))
        assert "is the address right" in str(error_in(read_all(sock)))
    assert_serves(server)


def test_truncated_frames_leave_nothing_behind(server: Server, backend: MemoryStore) -> None:
    """A peer that goes away in the middle of any part of a put stores nothing, and the key is puttable at once."""
    space = backend.register_space(a_space())
    name = a_chain(space, 1).names[0]
    row = wire.PutRow(name, BLOCK_TOKENS, SIZE, 0, 0)
    frame = wire.encode_frame(wire.Opcode.PUT, 1, wire.encode_put(space, AGENT, "os", [row]), payload_bytes=SIZE)
    whole = hello_frame() + frame + bytes(SIZE)
    for cut in (1, 39, 45, len(whole) - SIZE - 10, len(whole) - SIZE, len(whole) - 1):
        with raw(server) as sock:
            sock.sendall(whole[:cut])
    wait(lambda: server.connections == 0, "end of the connections")
    assert backend.scan()[0] == []
    block = BlockPut(name, BLOCK_TOKENS, b"x")
    assert backend.put(space, [block], traffic_class=AGENT) == [PutOutcome.STORED]


def test_damaged_headers_and_bodies_are_refused(server: Server) -> None:
    """One flipped bit anywhere in header or body of a lookup ends the connection with an error, never an answer."""
    space, chain = bytes(32), a_chain(bytes(32), 2)  # type: ignore[arg-type]
    frame = wire.encode_frame(wire.Opcode.LOOKUP, 1, wire.encode_lookup(space, chain.names, states=False))  # type: ignore[arg-type]
    for bit in range(0, 8 * len(frame), 37):
        damaged = bytearray(frame)
        damaged[bit // 8] ^= 1 << (bit % 8)
        with raw(server) as sock:
            sock.sendall(hello_frame() + damaged)
            sock.shutdown(socket.SHUT_WR)
            assert isinstance(error_in(read_all(sock)), StoreError)


def test_oversized_announcements_are_refused_before_allocation(server: Server) -> None:
    for body_bytes, payload_bytes in ((limits.BODY_BYTES_MAX + 1, 0), (0, limits.BATCH_BYTES_MAX + 1)):
        head = wire._HEADER.pack(wire.MAGIC, wire.VERSION, wire.Opcode.PUT, 0, 1, 0, body_bytes, payload_bytes, 0)
        frame = head + wire._CHECK.pack(wire._low32(head))
        with raw(server) as sock:
            sock.sendall(hello_frame() + frame)
            assert "at most" in str(error_in(read_all(sock)))
    with raw(server) as sock:
        sock.sendall(wire.encode_frame(wire.Opcode.HELLO, 1, bytes(wire.HELLO_BODY_BYTES_MAX + 1)))
        assert "HELLO has at most" in str(error_in(read_all(sock)))
    assert_serves(server)


def test_a_wrong_version_is_told_both_versions(server: Server) -> None:
    frame = bytearray(hello_frame())
    frame[4] = 9
    with raw(server) as sock:
        sock.sendall(frame)
        error = error_in(read_all(sock))
    assert isinstance(error, VersionMismatch)
    assert "version 9" in str(error)
    with raw(server) as sock:
        sock.sendall(hello_frame(protocol=wire.VERSION - 1))
        assert isinstance(error_in(read_all(sock)), VersionMismatch)


def test_another_key_algorithm_is_refused_at_hello(server: Server) -> None:
    """A client whose keys would never match is told so, instead of missing for ever."""
    with raw(server) as sock:
        sock.sendall(hello_frame(algorithm="sha256-chain-1"))
        error = error_in(read_all(sock))
    assert isinstance(error, VersionMismatch)
    assert "sha256-chain-1" in str(error)
    assert KEY_ALGORITHM in str(error)


def test_requests_before_hello_and_second_hello_are_refused(server: Server) -> None:
    for frames in (wire.encode_frame(wire.Opcode.CONTROL, 1, b"{}"), hello_frame() + hello_frame()):
        with raw(server) as sock:
            sock.sendall(frames)
            assert "HELLO" in str(error_in(read_all(sock)))


def test_bad_control_messages_do_not_close_what_is_well_formed(server: Server) -> None:
    """Unknown verbs and wrong arguments are errors with a reason."""
    for body in (b"", b"[]", b"{}", b'{"verb":"scan","args":{}}', b'{"verb":"nope","args":{}}', b"\xff" * 10):
        with raw(server) as sock:
            sock.sendall(hello_frame() + wire.encode_frame(wire.Opcode.CONTROL, 1, body))
            sock.shutdown(socket.SHUT_WR)
            assert isinstance(error_in(read_all(sock)), StoreError)
    assert_serves(server)


class Broken(MemoryStore):
    """A store with a bug: every lookup raises something that nobody expects."""

    def lookup(self, *args: Any, **options: Any) -> Any:
        raise ZeroDivisionError("secret detail")


def test_a_fault_of_the_daemon_is_an_error_without_details(folder: Path) -> None:
    """The peer learns that there was a fault, not which; the connection and the daemon go on."""
    backend = Broken(ManualClock())
    with served(backend, folder) as server, client_of(server.addresses[1]) as client:
        space = client.register_space(a_space())
        chain = a_chain(space, 3)
        answer = client.lookup(space, chain.names)
        assert set(answer.presence.tolist()) == {Presence.UNREACHABLE}
        assert not answer.complete
        put_chain(client, chain, AGENT)
        with raw(server) as sock:
            sock.sendall(
                hello_frame() + wire.encode_frame(wire.Opcode.LOOKUP, 1, wire.encode_lookup(space, [], states=False))
            )
            sock.shutdown(socket.SHUT_WR)
            data = read_all(sock)
        assert b"secret" not in data
        assert b"ZeroDivision" not in data


# --- slow and many --------------------------------------------------------------------------------------------------


def trickle(sock: socket.socket, data: bytes) -> None:
    for at in range(len(data)):
        sock.sendall(data[at : at + 1])
        time.sleep(0.1)


def test_a_slow_loris_is_disconnected(backend: MemoryStore, folder: Path) -> None:
    """A peer that trickles bytes is cut off when its frame has had its time, long before all of it has come; others
    are served meanwhile."""
    hello = hello_frame(token=bytes(1000))
    whole = hello + wire.encode_frame(wire.Opcode.CONTROL, 1, b'{"verb":"stats","args":{}}'.ljust(1000))
    with served(backend, folder, hello_s=1.5, frame_s=1.5) as server:
        for sent_at_once in (3, len(hello) + 3):
            with raw(server) as sock:
                sock.sendall(whole[:sent_at_once])
                with pytest.raises((BrokenPipeError, ConnectionResetError)):
                    trickle(sock, whole[sent_at_once : sent_at_once + 900])
        assert_serves(server)


def test_a_long_deadline_buys_a_slow_peer_no_time(folder: Path) -> None:
    """The deadline is for the daemon's work. A payload that trickles in and an answer that is not read hold memory and
    leases for the frame's time only, whatever deadline the peer asked for.
    """
    backend = MemoryStore(ManualClock())
    space = backend.register_space(a_space())
    name = a_chain(space, 1).names[0]
    admission = Admission()
    body = wire.encode_put(space, AGENT, "os", [wire.PutRow(name, BLOCK_TOKENS, 1000, 0, 0)])
    head = wire.encode_frame(wire.Opcode.PUT, 1, body, payload_bytes=1000, deadline_ms=600_000)
    with served(backend, folder, admission=admission, frame_s=0.5) as server, raw(server) as sock:
        sock.sendall(hello_frame() + head)
        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            trickle(sock, bytes(900))
        wait(lambda: admission.lent_bytes == 0, "memory given back")
        put_chain(backend, a_chain(space, 32), AGENT, payload_bytes=2 * limits.MIB)
        ask = wire.encode_get(space, a_chain(space, 32).names, [2 * limits.MIB] * 32)
        with raw(server) as reader:
            reader.sendall(hello_frame() + wire.encode_frame(wire.Opcode.GET, 1, ask, deadline_ms=600_000))
            wait(lambda: server.connections == 0, "end of the connections")


def test_a_peer_that_does_not_read_its_answer_is_disconnected(folder: Path) -> None:
    """Asking for 64 MiB and never reading them costs the daemon one thread for the frame's time, no more."""
    backend = MemoryStore(ManualClock())
    with served(backend, folder, frame_s=0.5) as server:
        space = backend.register_space(a_space())
        chain = a_chain(space, 32)
        put_chain(backend, chain, AGENT, payload_bytes=2 * limits.MIB)
        body = wire.encode_get(space, chain.names, [2 * limits.MIB] * 32)
        with raw(server) as sock:
            sock.sendall(hello_frame() + wire.encode_frame(wire.Opcode.GET, 1, body, deadline_ms=100))
            wait(lambda: server.connections == 0, "end of the connection")


def test_a_thousand_idle_connections_are_fine(backend: MemoryStore, folder: Path) -> None:
    """They cost little memory, and a new client is served as if they were not there."""
    with served(backend, folder) as server, ExitStack() as stack:
        before = resident_bytes()
        path = server.addresses[1].removeprefix("unix:")
        for _ in range(1000):
            sock = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            sock.settimeout(WAIT_S)
            sock.connect(path)
            sock.sendall(hello_frame())
            assert sock.recv(wire.HEADER_BYTES, socket.MSG_WAITALL)[:4] == wire.MAGIC
        assert server.connections == 1000
        assert_serves(server)
        assert resident_bytes() - before < 200 * limits.MIB
    assert server.connections == 0


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_connections_beyond_the_bound_are_refused_with_a_reason(backend: MemoryStore, folder: Path) -> None:
    with served(backend, folder, connections_max=3) as server, ExitStack() as stack:
        for _ in range(3):
            sock = stack.enter_context(raw(server))
            sock.sendall(hello_frame())
            sock.recv(wire.HEADER_BYTES, socket.MSG_WAITALL)
        with raw(server) as fourth:
            error = error_in(read_all(fourth))
        assert isinstance(error, Overloaded)
        assert "3 connections" in str(error)
        stack.close()
        wait(lambda: server.connections == 0, "end of the connections")
        assert_serves(server)


def test_puts_beyond_the_memory_budget_are_refused_and_the_connection_lives(backend: MemoryStore, folder: Path) -> None:
    """With no room in memory a put is REFUSED, its payload is dropped, and the same connection goes on."""
    admission = Admission(budget_bytes=10_000, buffer_bytes=1000)
    with served(backend, folder, admission=admission) as server, client_of(server.addresses[1]) as client:
        space = client.register_space(a_space())
        chain = a_chain(space, 6)
        with admission.hold(9_500, 0.0):
            blocks = [BlockPut(name, BLOCK_TOKENS, b"x" * SIZE) for name in chain.names]
            outcomes = client.put(space, blocks, traffic_class=AGENT, deadline_s=0.5)
            assert set(outcomes) <= {PutOutcome.REFUSED, PutOutcome.UNREACHABLE}
        assert client.put(space, blocks, traffic_class=AGENT) == [PutOutcome.STORED] * 6
        assert admission.lent_bytes == 0
        assert admission.refused > 0


# --- tokens ---------------------------------------------------------------------------------------------------------


def test_the_token_is_required_where_there_is_one(backend: MemoryStore, folder: Path) -> None:
    """No token and a wrong one are refused with different words on every verb; the right one is served."""
    with served(backend, folder, token="a-long-secret-token") as server:
        for token, words in ((None, "needs a token"), ("a-long-secret-tokem", "token is wrong")):
            with client_of(server.addresses[1], token=token) as client:
                with pytest.raises(Unauthorized, match=words):
                    client.register_space(a_space())
                with pytest.raises(Unauthorized):
                    client.lookup(bytes(32), a_chain(bytes(32), 1).names)  # type: ignore[arg-type]
                with pytest.raises(Unauthorized):
                    client.put(bytes(32), [BlockPut(a_chain(bytes(32), 1).names[0], 4, b"x")], traffic_class=AGENT)  # type: ignore[arg-type]
        with client_of(server.addresses[0], token="a-long-secret-token") as client:
            put_chain(client, a_chain(client.register_space(a_space()), 1), AGENT)
    assert "secret" not in repr(wire.Hello(1, "a", b"secret", ""))


def test_the_unix_socket_is_its_users_own(server: Server) -> None:
    mode = os.stat(server.addresses[1].removeprefix("unix:")).st_mode
    assert mode & 0o077 == 0


# --- nodes that are down, stalled, restarted ------------------------------------------------------------------------


class Silent:
    """Something that lets others connect and never says a word; ``deaf``: nobody can even connect."""

    def __init__(self, *, deaf: bool = False) -> None:
        self._socket = socket.socket()
        self._socket.bind(("127.0.0.1", 0))
        self._socket.setblocking(False)
        self.address = f"127.0.0.1:{self._socket.getsockname()[1]}"
        if not deaf:
            self._socket.listen(16)

    def __enter__(self) -> Silent:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def callers(self) -> int:
        """How many have connected since the last time."""
        count = 0
        with suppress(BlockingIOError):
            while True:
                self._socket.accept()[0].close()
                count += 1
        return count


def test_a_node_that_is_down_is_misses_within_the_deadline() -> None:
    """Every data verb answers as a miss, none by waiting for its deadline; control verbs say which node it was."""
    with Silent(deaf=True) as nobody, client_of(nobody.address) as client:
        chain = a_chain(bytes(32), 20)  # type: ignore[arg-type]
        began_s = time.monotonic()
        answer = client.lookup(chain.space_id, chain.names, states=True, deadline_s=WAIT_S)
        assert set(answer.presence.tolist()) == {Presence.UNREACHABLE}
        assert not answer.complete
        buffers = [bytearray(b"\xa5" * 10) for _ in chain.names]
        assert set(client.get_into(chain.space_id, chain.names, buffers, deadline_s=WAIT_S)) == {GetStatus.UNREACHABLE}
        assert set(buffers[0]) == {0xA5}
        blocks = [BlockPut(name, 4, b"x") for name in chain.names]
        outcomes = client.put(chain.space_id, blocks, traffic_class=AGENT, deadline_s=WAIT_S)
        assert set(outcomes) == {PutOutcome.UNREACHABLE}
        assert client.touch(chain.space_id, chain.names, traffic_class=AGENT, deadline_s=WAIT_S) == 0
        assert client.put_state(chain.space_id, chain.state_name(3), b"s", deadline_s=WAIT_S) is False
        assert client.get_state(chain.space_id, chain.state_name(3), deadline_s=WAIT_S) is None
        assert time.monotonic() - began_s < WAIT_S
        with pytest.raises(Unavailable, match=nobody.address):
            client.scan()
        with pytest.raises(Unavailable):
            client.register_space(a_space())


def test_a_stalled_node_costs_one_deadline_and_is_then_skipped(folder: Path) -> None:
    """Of two nodes one never answers: the other's keys are found, the prefix is partial. It is asked once: later calls
    leave it out, as long as the clock does not go on."""
    backend = open_memory(ManualClock())
    stopped_s: list[float] = []

    def monotonic() -> float:
        return stopped_s[0] if stopped_s else time.monotonic()

    with ExitStack() as stack:
        server = stack.enter_context(served(backend, folder))
        stalled = stack.enter_context(Silent())
        addresses = f"a={server.addresses[1]}", f"b={stalled.address}"
        with client_of(*addresses, monotonic=monotonic) as client:
            space = backend.register_space(a_space())
            chain = a_chain(space, 320)
            put_chain(backend, chain, AGENT)
            answer = client.lookup(space, chain.names, deadline_s=2.0)
            stopped_s.append(time.monotonic())
            kinds = set(answer.presence.tolist())
            assert kinds == {Presence.PRESENT, Presence.UNREACHABLE}
            assert not answer.complete
            assert answer.prefix_blocks() % limits.STRIPE_BLOCKS == 0
            assert stalled.callers() == 1
            again = client.lookup(space, chain.names, deadline_s=WAIT_S)
            assert again.presence.tolist() == answer.presence.tolist()
            buffers = [bytearray(1000) for _ in chain.names]
            statuses = client.get_into(space, chain.names, buffers, deadline_s=WAIT_S)
            assert set(statuses) == {GetStatus.OK, GetStatus.UNREACHABLE}
            assert stalled.callers() == 0


class Slow(MemoryStore):
    """A store that takes its time over one block; ``begun`` once it does."""

    slow_key = b""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__(clock)
        self.begun = threading.Event()

    def open_payload(self, space_id: Any, name: Any) -> Any:
        if name.key == self.slow_key:
            self.begun.set()
            time.sleep(0.6)
        return super().open_payload(space_id, name)


def test_a_get_past_its_deadline_says_so_and_leaves_no_half_block(folder: Path) -> None:
    backend = Slow(ManualClock())
    with served(backend, folder) as server, client_of(server.addresses[1]) as client:
        space = client.register_space(a_space())
        chain = a_chain(space, 4)
        put_chain(client, chain, AGENT)
        backend.slow_key = chain.names[2].key
        buffers = [bytearray(1000) for _ in chain.names]
        assert client.get_into(space, chain.names, buffers, deadline_s=0.2) == [GetStatus.DEADLINE] * 4
        assert buffers == [bytearray(1000)] * 4
        assert client.get_into(space, chain.names, buffers, deadline_s=WAIT_S) == [GetStatus.OK] * 4


def test_a_restarted_daemon_is_adopted_without_another_put(folder: Path) -> None:
    """The client's pooled connections are stale after a restart; the next calls succeed, and every block is there.

    However long it was away, it is the same node with the same volume, and nothing is written again.
    """
    clock = ManualClock()
    node = open_node(folder / "data", clock)
    volume = (folder / "data" / "FORMAT").read_bytes()
    server = served(node, folder)
    address = server.__enter__().addresses[1]
    with client_of(address) as client:
        space = client.register_space(a_space())
        chain = a_chain(space, 20)
        put_chain(client, chain, AGENT)
        for _ in range(3):
            server.__exit__(None, None, None)
            node.close()
            clock.advance(30)
            node = open_node(folder / "data", clock)
            server = served(node, folder)
            server.__enter__()
            assert client.lookup(space, chain.names).prefix_blocks() == 20
            buffers = [bytearray(1000) for _ in chain.names]
            assert client.get_into(space, chain.names, buffers) == [GetStatus.OK] * 20
            blocks = [BlockPut(name, BLOCK_TOKENS, b"y" * 1000) for name in chain.names]
            assert client.put(space, blocks, traffic_class=AGENT) == [PutOutcome.TOUCHED] * 20
            assert node.stats()["bytes_written"] == 0
        assert (folder / "data" / "FORMAT").read_bytes() == volume
        server.__exit__(None, None, None)
        node.close()


def test_a_daemon_that_lost_its_spaces_is_told_again(folder: Path) -> None:
    """A put into a node that does not know the space registers it, and succeeds."""
    with ExitStack() as stack:
        client = stack.enter_context(client_of(f"unix:{folder / 'store.sock'}"))
        with served(open_memory(ManualClock()), folder):
            space = client.register_space(a_space())
        with served(open_memory(ManualClock()), folder):
            put_chain(client, a_chain(space, 3), AGENT)


def test_a_stopping_server_answers_what_is_in_flight(folder: Path) -> None:
    """A get that has begun ends well although the server is told to stop meanwhile; nothing new is accepted."""
    backend = Slow(ManualClock())
    with served(backend, folder) as server, client_of(server.addresses[1]) as client:
        space = client.register_space(a_space())
        chain = a_chain(space, 2)
        put_chain(client, chain, AGENT)
        backend.slow_key = chain.names[0].key
        buffers = [bytearray(1000) for _ in chain.names]
        statuses: list[GetStatus] = []
        thread = threading.Thread(target=lambda: statuses.extend(client.get_into(space, chain.names, buffers)))
        thread.start()
        assert backend.begun.wait(WAIT_S)
        assert server.stop(drain_s=WAIT_S) is True
        thread.join(WAIT_S)
        assert statuses == [GetStatus.OK] * 2
        assert client.lookup(space, chain.names).prefix_blocks() == 0


# --- integrity ------------------------------------------------------------------------------------------------------


def test_compressed_blocks_come_back_over_the_wire(folder: Path) -> None:
    """A class with a codec is stored smaller and served verified; without memory for it, a block is not served now."""
    packed = ClassRule(CHAT, "chat", 7 * DAY_S, codec="zstd")
    with ExitStack() as stack:
        node = open_node(folder / "data", ManualClock(), rules=ClassRules((packed,)))
        stack.callback(node.close)
        admission = Admission(budget_bytes=100_000, buffer_bytes=50_000)
        server = stack.enter_context(served(node, folder, admission=admission))
        client = stack.enter_context(client_of(server.addresses[1]))
        space = client.register_space(a_space())
        chain = a_chain(space, 10)
        put_chain(client, chain, CHAT, payload_bytes=20_000)
        assert all(info.stored_bytes < info.payload_bytes / 2 for info in client.scan()[0])
        for name in chain.names:
            buffer = bytearray(20_000)
            assert client.get_into(space, [name], [buffer]) == [GetStatus.OK]
            assert buffer == name.key[:1] * 20_000
        buffers = [bytearray(20_000) for _ in chain.names]
        statuses = client.get_into(space, chain.names, buffers)
        assert statuses == [GetStatus.OK] * 5 + [GetStatus.UNREACHABLE] * 5
        # The answer is here a moment before its sender gives back the memory.
        wait(lambda: admission.lent_bytes == 0, "memory given back")


def test_a_prefix_costs_two_round_trips(folder: Path, backend: MemoryStore) -> None:
    """However long the prompt: one lookup, one get."""
    metrics = ServerMetrics()
    with served(backend, folder, metrics=metrics) as server, client_of(server.addresses[1]) as client:
        space = client.register_space(a_space())
        chain = a_chain(space, 500)
        put_chain(client, chain, AGENT)
        assert client.lookup(space, chain.names, states=True).prefix_blocks() == 500
        buffers = [bytearray(1000) for _ in chain.names]
        assert client.get_into(space, chain.names, buffers) == [GetStatus.OK] * 500

        def counts() -> list[float | None]:
            return [
                metrics.registry.get_sample_value("reprise_store_requests_total", {"opcode": opcode})
                for opcode in ("lookup", "get", "put")
            ]

        wait(lambda: counts()[1] == 1)  # a request is counted after its answer was sent
        assert counts() == [1, 1, 1]


def test_a_client_cannot_make_the_daemon_drop_a_good_block(folder: Path) -> None:
    """A report of corruption makes the node look; a good block stays."""
    with ExitStack() as stack:
        node = open_node(folder / "data", ManualClock())
        stack.callback(node.close)
        server = stack.enter_context(served(node, folder))
        client = stack.enter_context(client_of(server.addresses[1]))
        space = client.register_space(a_space())
        chain = a_chain(space, 1)
        put_chain(client, chain, AGENT)
        client._report_corrupt(0, space, chain.names[0])
        assert client.lookup(space, chain.names).prefix_blocks() == 1


def test_a_block_altered_on_its_way_is_not_stored(folder: Path, backend: MemoryStore) -> None:
    """Bytes that differ from the checksum taken at submission are ALTERED; the key stays puttable."""
    with served(backend, folder) as server:
        space = backend.register_space(a_space())
        name = a_chain(space, 1).names[0]
        row = wire.PutRow(name, BLOCK_TOKENS, SIZE, 0, 12345)
        frame = wire.encode_frame(wire.Opcode.PUT, 1, wire.encode_put(space, AGENT, "os", [row]), payload_bytes=SIZE)
        with raw(server) as sock:
            sock.sendall(hello_frame() + frame + bytes(SIZE))
            sock.shutdown(socket.SHUT_WR)
            reply = read_all(sock)
        assert wire.decode_put_reply(reply[-5:]) == [PutOutcome.ALTERED]
        assert backend.scan()[0] == []


class Picky(MemoryStore):
    """A store that refuses one block until told otherwise."""

    refuse_index = 5

    def put(self, space_id: Any, blocks: Any, **options: Any) -> list[PutOutcome]:
        checksums = options.pop("checksums", None) or [None] * len(blocks)
        outcomes = []
        for block, checksum in zip(blocks, checksums, strict=True):
            if block.name.index == self.refuse_index:
                outcomes.append(PutOutcome.REFUSED)
            else:
                one = None if checksum is None else [checksum]
                outcomes += super().put(space_id, [block], checksums=one, **options)
        return outcomes


def test_a_refused_block_is_a_hole_until_it_is_offered_again(folder: Path) -> None:
    """Block 5 of 10 is refused: the prefix is 5; a later put of all closes the hole and the prefix is 10."""
    backend = Picky(ManualClock())
    with served(backend, folder) as server, client_of(server.addresses[1]) as client:
        space = client.register_space(a_space())
        chain = a_chain(space, 10)
        blocks = [BlockPut(name, BLOCK_TOKENS, b"x" * SIZE) for name in chain.names]
        outcomes = client.put(space, blocks, traffic_class=AGENT)
        assert outcomes[5] == PutOutcome.REFUSED
        assert set(outcomes) == {PutOutcome.STORED, PutOutcome.REFUSED}
        assert client.lookup(space, chain.names).prefix_blocks() == 5
        backend.refuse_index = -1
        assert client.put(space, blocks, traffic_class=AGENT)[5] == PutOutcome.STORED
        assert client.lookup(space, chain.names).prefix_blocks() == 10


def test_lookups_leave_nothing_held(folder: Path) -> None:
    """After 10,000 lookups, many cut off, everything is still evictable: a full store takes new blocks."""
    with ExitStack() as stack:
        clock = ManualClock()
        node = open_node(folder / "data", clock, capacity_bytes=12 * limits.MIB)
        stack.callback(node.close)
        server = stack.enter_context(served(node, folder))
        client = stack.enter_context(client_of(server.addresses[1]))
        space = client.register_space(a_space())
        chain = a_chain(space, 40)
        put_chain(client, chain, AGENT, payload_bytes=100_000)
        lookup = wire.encode_frame(wire.Opcode.LOOKUP, 1, wire.encode_lookup(space, chain.names, states=True))
        for _ in range(10):
            with raw(server) as sock:
                sock.sendall(hello_frame() + lookup * 500)  # and goes away without reading
        for _ in range(5000):
            client.lookup(space, chain.names[:2], states=True)
        buffers = [bytearray(100_000) for _ in chain.names]
        assert set(client.get_into(space, chain.names, buffers)) == {GetStatus.OK}
        wait(lambda: node.stats()["leases"] == 0)
        for seed in range(1, 9):
            put_chain(client, a_chain(space, 40, seed=seed), AGENT, payload_bytes=100_000)
            clock.advance(1)
        assert set(client.lookup(space, chain.names).presence.tolist()) == {Presence.EVICTED}
        assert client.stats()["refused"] == 0


def test_keys_found_by_processes_with_other_hash_seeds(folder: Path) -> None:
    """Workers whose PYTHONHASHSEED is unset, 0 or 7 find each other's blocks."""
    backend = open_memory(ManualClock())
    script = (
        "import sys; from kvstore.client import StoreClient; from tests.support.spaces import *\n"
        "client = StoreClient.connect([sys.argv[1]]); space = client.register_space(a_space(tenant_salt=b's' * 32))\n"
        "chain = a_chain(space, 20); print(hit_blocks(client, chain)); put_chain(client, chain, 1)"
    )
    with served(backend, folder) as server:
        hits = []
        for seed in (None, "0", "7"):
            environment = {key: value for key, value in os.environ.items() if key != "PYTHONHASHSEED"}
            environment |= {"PYTHONPATH": os.getcwd()} | ({"PYTHONHASHSEED": seed} if seed else {})
            done = subprocess.run(
                [sys.executable, "-c", script, server.addresses[1]],
                env=environment, capture_output=True, text=True, timeout=WAIT_S, check=True,
            )  # fmt: skip
            hits.append(int(done.stdout))
    assert hits == [0, 20, 20]


def test_a_client_needs_addresses_that_can_be_read() -> None:
    for bad in ("", "host", "host:port", "host:70000", "::1:80", "unix:relative", "=host:1", "unix:/" + "x" * 200):
        with pytest.raises(ValueError, match=r"address|name|node"):
            StoreClient.connect([bad])
    with pytest.raises(ValueError, match="at least one node"):
        StoreClient.connect([])
    with pytest.raises(ValueError, match="one name"):
        StoreClient.connect(["a:1", "a:1"])
