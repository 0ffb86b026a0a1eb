"""The data plane over a node on disk: peers that go away in the middle, many at once, and new ones after a restart."""

from __future__ import annotations

import os
import random
import socket
import threading
import time
from pathlib import Path

import xxhash

from kvstore import limits, receive, wire
from kvstore.daemon.admission import Admission
from kvstore.daemon.node import Node, NodeConfig
from kvstore.daemon.server import Server
from kvstore.framing import Channel
from kvstore.keys import KEY_ALGORITHM
from kvstore.store import BlockPut, GetStatus, Presence, PutOutcome
from kvstore.testing import TEST_RULES, ManualClock
from kvstore.traffic import AGENT
from ops.bench.echo import receive_into
from tests.support.spaces import BLOCK_TOKENS, a_chain, a_space
from tests.support.stores import client_of, served, short_dir
from tests.support.waiting import WAIT_S, wait

HELLO = wire.encode_frame(wire.Opcode.HELLO, 1, wire.encode_hello(wire.Hello(wire.VERSION, KEY_ALGORITHM, b"", "")))


def open_large(folder: Path, clock: ManualClock, capacity_bytes: int) -> Node:
    """A node whose segments hold several blocks of a MiB."""
    config = NodeConfig(directories=(folder / "data",), capacity_bytes=capacity_bytes, segment_bytes=8 * limits.MIB)
    return Node.open(config, clock, TEST_RULES)


def connect(server: Server) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(WAIT_S)
    sock.connect(server.addresses[1].removeprefix("unix:"))
    return sock


def test_gets_that_are_cut_off_hold_nothing(folder: Path) -> None:
    """Peers that ask for 32 MiB and go away before, during and after the answer, or never read it: no lease is left,
    and every block can be evicted."""
    clock = ManualClock()
    node = open_large(folder, clock, 64 * limits.MIB)
    with served(node, folder, frame_s=0.5) as server:
        space = node.register_space(a_space())
        names = a_chain(space, 32).names
        node.put(space, [BlockPut(name, BLOCK_TOKENS, bytes(limits.MIB)) for name in names], traffic_class=AGENT)
        body = wire.encode_get(space, names, [limits.MIB] * 32)
        frame = HELLO + wire.encode_frame(wire.Opcode.GET, 2, body, deadline_ms=200)
        for wanted in (0, 100, 5000, 3 * limits.MIB):
            with connect(server) as sock:
                sock.sendall(frame)
                while wanted > 0 and (part := sock.recv(min(wanted, 65_536))):
                    wanted -= len(part)
        with connect(server) as deaf:
            deaf.sendall(frame)
            wait(lambda: server.connections == 0)
        assert node.stats()["leases"] == 0
        for seed in range(1, 10):
            puts = [BlockPut(name, BLOCK_TOKENS, bytes(limits.MIB)) for name in a_chain(space, 16, seed=seed).names]
            assert set(node.put(space, puts, traffic_class=AGENT)) == {PutOutcome.STORED}
        assert set(node.lookup(space, names).presence.tolist()) == {Presence.EVICTED}
    node.close()


def ask_for_32_mib(node: Node, deadline_ms: int) -> bytes:
    """Store 32 blocks of a MiB; the frames that ask for them, HELLO included."""
    space = node.register_space(a_space())
    names = a_chain(space, 32).names
    node.put(space, [BlockPut(name, BLOCK_TOKENS, bytes(limits.MIB)) for name in names], traffic_class=AGENT)
    body = wire.encode_get(space, names, [limits.MIB] * 32)
    return HELLO + wire.encode_frame(wire.Opcode.GET, 2, body, deadline_ms=deadline_ms)


def read_to_end(sock: socket.socket) -> int:
    """How many bytes came until the peer closed."""
    total = 0
    while part := sock.recv(limits.MIB):
        total += len(part)
    return total


def test_a_peer_that_never_reads_holds_its_blocks_no_longer_than_a_stall(folder: Path) -> None:
    """Whatever deadline it names, and however long a frame may take."""
    node = open_large(folder, ManualClock(), 64 * limits.MIB)
    with served(node, folder, frame_s=600, stall_s=0.1) as server, connect(server) as deaf:
        deaf.sendall(ask_for_32_mib(node, deadline_ms=600_000))
        wait(lambda: server.connections == 0)
        assert node.stats()["leases"] == 0
    node.close()


def test_a_peer_that_reads_slowly_but_steadily_is_served(folder: Path) -> None:
    """All of it takes longer than a stall, no part of it does."""
    node = open_large(folder, ManualClock(), 64 * limits.MIB)
    with served(node, folder, stall_s=4.0) as server, connect(server) as slow:
        slow.sendall(ask_for_32_mib(node, deadline_ms=600_000))
        part = memoryview(bytearray(2 * limits.MIB))
        for _ in range(16):
            time.sleep(0.3)
            receive_into(slow, part)
    node.close()


def test_an_answer_ends_between_blocks_once_its_deadline_is_long_past(folder: Path) -> None:
    """A peer that comes back to read it finds the connection closed, and the daemon was not kept by it."""
    node = open_large(folder, ManualClock(), 64 * limits.MIB)
    with served(node, folder) as server, connect(server) as late:
        late.sendall(ask_for_32_mib(node, deadline_ms=50))
        wait(lambda: node.stats()["leases"] > 0, "beginning of the answer")
        time.sleep(0.6)
        assert read_to_end(late) < 32 * limits.MIB
        wait(lambda: node.stats()["leases"] == 0)
    node.close()


def test_a_put_that_is_cut_off_takes_no_room_and_blocks_no_key(folder: Path) -> None:
    """A peer dies in every part of a put: nothing is stored, no memory is lent, and the same keys are puttable."""
    node = open_large(folder, ManualClock(), 64 * limits.MIB)
    admission = Admission(budget_bytes=8 * limits.MIB, buffer_bytes=limits.MIB)
    with served(node, folder, admission=admission) as server:
        space = node.register_space(a_space())
        names = a_chain(space, 4).names
        before = node.accounting()
        rows = [wire.PutRow(name, BLOCK_TOKENS, 100_000, 0, 0) for name in names]
        body = wire.encode_put(space, AGENT, "os", rows)
        whole = HELLO + wire.encode_frame(wire.Opcode.PUT, 2, body, payload_bytes=400_000) + bytes(400_000)
        for cut in (len(HELLO) + 10, len(whole) - 400_001, len(whole) - 399_000, len(whole) - 250_000, len(whole) - 1):
            with connect(server) as sock:
                sock.sendall(whole[:cut])
        wait(lambda: server.connections == 0)
        assert node.accounting() == before
        assert admission.lent_bytes == 0
        with client_of(server.addresses[1]) as client:
            puts = [BlockPut(name, BLOCK_TOKENS, os.urandom(100_000)) for name in names]
            assert client.put(space, puts, traffic_class=AGENT) == [PutOutcome.STORED] * 4
    node.close()


def test_a_put_that_stands_still_blocks_no_key(folder: Path) -> None:
    """Its peer neither goes on nor goes away: others put and get the same blocks meanwhile; in the end nothing of it is
    held."""
    node = open_large(folder, ManualClock(), 64 * limits.MIB)
    admission = Admission(budget_bytes=8 * limits.MIB, buffer_bytes=limits.MIB)
    with served(node, folder, admission=admission) as server:
        space = node.register_space(a_space())
        names = a_chain(space, 4).names
        rows = [wire.PutRow(name, BLOCK_TOKENS, 100_000, 0, 0) for name in names]
        body = wire.encode_put(space, AGENT, "os", rows)
        whole = HELLO + wire.encode_frame(wire.Opcode.PUT, 2, body, payload_bytes=400_000) + bytes(400_000)
        with connect(server) as sock, client_of(server.addresses[1]) as client:
            sock.sendall(whole[:-250_000])
            wait(lambda: admission.lent_bytes > 0)
            payloads = [os.urandom(100_000) for _ in names]
            puts = [BlockPut(name, BLOCK_TOKENS, each) for name, each in zip(names, payloads, strict=True)]
            assert client.put(space, puts, traffic_class=AGENT) == [PutOutcome.STORED] * 4
            buffers = [bytearray(100_000) for _ in names]
            assert client.get_into(space, names, buffers) == [GetStatus.OK] * 4
            assert buffers == payloads
            assert admission.lent_bytes > 0
            assert server.connections > 1
        wait(lambda: admission.lent_bytes == 0)
        assert node.stats()["blocks"] == 4
    node.close()


def test_a_put_that_is_cut_off_in_its_second_part_keeps_the_first(folder: Path) -> None:
    """Two parts were under way: one came whole and is stored, of the other nothing is, and no memory stays lent."""
    node = open_large(folder, ManualClock(), 64 * limits.MIB)
    admission = Admission(budget_bytes=8 * limits.MIB, buffer_bytes=limits.MIB)
    with served(node, folder, admission=admission) as server:
        space = node.register_space(a_space())
        names = a_chain(space, 4).names
        payloads = [os.urandom(100_000) for _ in names]
        frames = []
        for number, begin in enumerate((0, 2), 2):
            rows = [
                wire.PutRow(names[at], BLOCK_TOKENS, 100_000, 0, xxhash.xxh3_64_intdigest(payloads[at]))
                for at in (begin, begin + 1)
            ]
            body = wire.encode_put(space, AGENT, "os", rows)
            frames.append(wire.encode_frame(wire.Opcode.PUT, number, body, payload_bytes=200_000))
        with connect(server) as sock:
            sock.sendall(HELLO + frames[0] + payloads[0] + payloads[1] + frames[1] + payloads[2] + payloads[3][:-1])
            wait(lambda: node.stats()["puts"] == 2)
        wait(lambda: server.connections == 0)
        assert admission.lent_bytes == 0
        assert node.lookup(space, names).prefix_blocks() == 2
        with client_of(server.addresses[1]) as client:
            puts = [BlockPut(name, BLOCK_TOKENS, each) for name, each in zip(names, payloads, strict=True)]
            outcomes = client.put(space, puts, traffic_class=AGENT)
            assert outcomes == [PutOutcome.TOUCHED] * 2 + [PutOutcome.STORED] * 2
    node.close()


def test_blocks_come_back_to_a_new_client_in_any_order(folder: Path) -> None:
    """Put in one order by one client, asked for in others by another after a restart: each buffer has its own block."""
    clock, drawn = ManualClock(), random.Random(3)
    with short_dir() as first:
        node = open_large(folder, clock, 64 * limits.MIB)
        space = node.register_space(a_space())
        chain = a_chain(space, 40)
        payloads = {name.key: os.urandom(30_000) for name in chain.names}
        with served(node, first) as server, client_of(server.addresses[0]) as client:
            for name in drawn.sample(chain.names, 40):
                client.put(space, [BlockPut(name, BLOCK_TOKENS, payloads[name.key])], traffic_class=AGENT)
        node.close()
    node = open_large(folder, clock, 64 * limits.MIB)
    with served(node, folder) as server, client_of(server.addresses[1]) as client:
        for _ in range(10):
            asked = drawn.sample(chain.names, drawn.randint(1, 40))
            asked.append(asked[0])
            buffers = [bytearray(30_000) for _ in asked]
            assert client.get_into(space, asked, buffers) == [GetStatus.OK] * len(asked)
            assert [bytes(buffer) for buffer in buffers] == [payloads[name.key] for name in asked]
    node.close()


def test_a_segment_recycled_before_its_bytes_are_read_is_a_miss(folder: Path) -> None:
    """A peer takes its time over an answer whose blocks are evicted and overwritten meanwhile: what arrives is right or
    a miss, and nobody is told of corruption, for there is none."""
    node = open_large(folder, ManualClock(), 64 * limits.MIB)
    with served(node, folder) as server, client_of(server.addresses[1], same_host=False) as client:
        space = client.register_space(a_space())
        names = a_chain(space, 6).names
        payloads = [os.urandom(200_000) for _ in names]
        puts = [BlockPut(name, BLOCK_TOKENS, data) for name, data in zip(names, payloads, strict=True)]
        client.put(space, puts, traffic_class=AGENT)

        class Late(receive.Scatter):
            def take(self, channel: Channel, header: wire.Header, body: bytes) -> None:
                wait(lambda: node.stats()["leases"] == 0)
                for seed in range(1, 12):
                    blocks = a_chain(space, 16, seed=seed).names
                    later = [BlockPut(name, BLOCK_TOKENS, bytes(limits.MIB)) for name in blocks]
                    node.put(space, later, traffic_class=AGENT)
                super().take(channel, header, body)

        scatter = Late(names[:3], [memoryview(bytearray(200_000)) for _ in range(3)])
        client._get_from(0, space, scatter, time.monotonic() + WAIT_S)
        assert set(node.lookup(space, names).presence.tolist()) == {Presence.EVICTED}
        for status, view, payload in zip(scatter.statuses, scatter.views, payloads, strict=False):
            assert status in (GetStatus.OK, GetStatus.MISS)
            assert view == (payload if status == GetStatus.OK else bytes(200_000))
        assert GetStatus.MISS in scatter.statuses
        counts = client.stats()["client"]
        assert (counts["corrupt"], counts["overtaken"]) == (0, scatter.statuses.count(GetStatus.MISS))
        assert node.stats()["quarantined"] == 0
    node.close()


def test_sixty_four_clients_of_large_blocks_get_no_other_bytes(folder: Path) -> None:
    """Blocks of a MiB, put and read by 64 threads in a store that holds half of them, so that segments are recycled
    under their readers: every digest of what is returned is right."""
    node = open_large(folder, ManualClock(), 64 * limits.MIB)
    with served(node, folder) as server, client_of(server.addresses[1], connections_per_node=8) as client:
        space = client.register_space(a_space())
        names = a_chain(space, 96).names
        payloads = [os.urandom(limits.MIB) for _ in names]
        digests = [xxhash.xxh3_64_intdigest(payload) for payload in payloads]
        wrong: list[str] = []
        read: list[int] = []

        def work(seed: int) -> None:
            drawn = random.Random(seed)
            for _ in range(8):
                places = drawn.sample(range(96), 2)
                puts = [BlockPut(names[place], BLOCK_TOKENS, payloads[place]) for place in places]
                outcomes = client.put(space, puts, traffic_class=AGENT, deadline_s=WAIT_S)
                if set(outcomes) - {PutOutcome.STORED, PutOutcome.TOUCHED, PutOutcome.REFUSED}:
                    wrong.append(f"{seed}: {outcomes}")
                asked = [*places, *drawn.sample(range(96), 2)]
                buffers = [bytearray(limits.MIB) for _ in asked]
                statuses = client.get_into(space, [names[place] for place in asked], buffers, deadline_s=WAIT_S)
                for place, status, buffer in zip(asked, statuses, buffers, strict=True):
                    if status not in (GetStatus.OK, GetStatus.MISS):
                        wrong.append(f"{seed}: {status}")
                    if status == GetStatus.OK:
                        read.append(place)
                        if xxhash.xxh3_64_intdigest(buffer) != digests[place]:
                            wrong.append(f"{seed}: other bytes for block {place}")

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(64)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(2 * WAIT_S)
        assert wrong == []
        assert len(read) > 200
        wait(lambda: node.stats()["leases"] == 0)
        assert node.stats()["segments_recycled"] > 10
        assert (node.stats()["quarantined"], client.stats()["client"]["corrupt"]) == (0, 0)
    node.close()
