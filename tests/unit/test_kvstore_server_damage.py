"""The data plane over blocks whose bytes were damaged on disk."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path

from kvstore.store import BlockPut, GetStatus, Presence, PutOutcome
from kvstore.testing import ManualClock, MemoryStore
from kvstore.traffic import AGENT
from tests.support.spaces import BLOCK_TOKENS, a_chain, a_space, put_chain
from tests.support.stores import client_of, open_node, served


def test_flipped_bits_are_found_reported_and_quarantined(folder: Path, backend: MemoryStore) -> None:
    """Spoiled bytes are CORRUPT and zeroed, the block is gone at the next lookup, and both sides count it."""
    with served(backend, folder) as server, client_of(server.addresses[1]) as client:
        space = client.register_space(a_space())
        chain = a_chain(space, 3)
        put_chain(client, chain, AGENT)
        backend.flip_bit(chain.names[1].key, 4321)
        buffers = [bytearray(b"\xa5" * 1000) for _ in chain.names]
        statuses = client.get_into(space, chain.names, buffers)
        assert statuses == [GetStatus.OK, GetStatus.CORRUPT, GetStatus.OK]
        assert buffers[1] == bytes(1000)
        assert client.lookup(space, chain.names).presence.tolist() == [1, Presence.QUARANTINED, 1]
        stats = client.stats()
        assert stats["quarantined"] == 1
        assert stats["client"]["corrupt"] == 1


def test_a_flipped_bit_on_disk_never_reaches_a_client_as_ok(folder: Path) -> None:
    """Sent from the file without being read by the daemon: the client finds it, the node looks, and quarantines."""
    with ExitStack() as stack:
        node = open_node(folder / "data", ManualClock())
        stack.callback(node.close)
        server = stack.enter_context(served(node, folder))
        client = stack.enter_context(client_of(server.addresses[0]))
        space = client.register_space(a_space())
        chain = a_chain(space, 8)
        payloads = [os.urandom(3000) for _ in chain.names]
        blocks = [BlockPut(name, BLOCK_TOKENS, data) for name, data in zip(chain.names, payloads, strict=True)]
        client.put(space, blocks, traffic_class=AGENT)
        spoil(folder / "data" / "segments", payloads[4])
        buffers = [bytearray(b"\xa5" * 3000) for _ in chain.names]
        statuses = client.get_into(space, chain.names, buffers)
        assert statuses == [GetStatus.OK] * 4 + [GetStatus.CORRUPT] + [GetStatus.OK] * 3
        assert [bytes(buffer) for buffer in buffers[:4]] == payloads[:4]
        assert buffers[4] == bytes(3000)
        assert client.lookup(space, chain.names).presence[4] == Presence.QUARANTINED
        assert client.get_into(space, chain.names, buffers)[4] == GetStatus.MISS
        assert client.stats()["quarantined"] == 1
        assert client.put(space, blocks, traffic_class=AGENT)[4] == PutOutcome.STORED
        assert client.get_into(space, chain.names, buffers) == [GetStatus.OK] * 8


def spoil(segments: Path, payload: bytes) -> None:
    """Flip one bit in the middle of a payload, wherever it lies on disk."""
    for path in segments.iterdir():
        at = path.read_bytes().find(payload)
        if at >= 0:
            with path.open("r+b") as file:
                file.seek(at + len(payload) // 2)
                file.write(bytes([payload[len(payload) // 2] ^ 1]))
            return
    raise AssertionError("the payload lies in no segment")
