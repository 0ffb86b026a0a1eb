"""Memory that a client shares for puts: who has which part, what is copied, and what a caller makes in place."""

from __future__ import annotations

import gc
import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore import limits, submission
from kvstore.arena import ALIGN_BYTES, Arena, ArenaOfClient, address_of
from kvstore.client import StoreClient
from kvstore.daemon.files import Files
from kvstore.daemon.node import Node, NodeConfig
from kvstore.keys import BlockName, SpaceId
from kvstore.local import PART_BYTES, PARTS
from kvstore.store import BlockPut, GetStatus, PutOutcome
from kvstore.testing import TEST_RULES, ManualClock
from kvstore.traffic import AGENT
from tests.support.nodes import payload_of
from tests.support.spaces import BLOCK_TOKENS, a_chain, a_space
from tests.support.stores import client_of, served, short_dir

SIZE = 64 * limits.KIB


@pytest.fixture
def arena() -> Iterator[Arena]:
    made, fd = Arena.create(SIZE)
    os.close(fd)
    yield made
    made.close()


def test_parts_never_overlap_and_come_back_whole(arena: Arena) -> None:
    """Given back in any order, what was cut is one part again."""
    parts = [arena.take(count) for count in (1, 100, ALIGN_BYTES, SIZE // 2)]
    held = [part for part in parts if part is not None]
    assert len(held) == 4
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(held))
    assert all(begin % ALIGN_BYTES == 0 for begin, _ in held)
    assert arena.take(SIZE // 2) is None
    for part in (held[2], held[0], held[3], held[1]):
        arena.give(part)
    assert arena.take(SIZE) == (0, SIZE)


def test_only_what_lies_elsewhere_is_copied(arena: Arena) -> None:
    """A payload that was made in the arena keeps its place, whatever stands beside it in the put."""
    with arena.reserve([100, 7]) as room:  # type: ignore[union-attr]
        room.views[0][:], room.views[1][:] = b"a" * 100, b"b" * 7
        part = arena.take(1000)
        assert part is not None
        assert arena.find(room.views[1]) == ALIGN_BYTES * 2
        assert arena.find(memoryview(b"elsewhere")) is None
        _, offsets = arena.place(part[0], [memoryview(b"x" * 50), room.views[0][10:], memoryview(b"y" * 50)])
        assert offsets == [part[0], 10, part[0] + 50]


def test_released_memory_is_not_reserved_again_while_somebody_has_an_array_over_it(arena: Arena) -> None:
    """A late write through the array must not reach another's payload."""
    room = arena.reserve([SIZE])
    assert room is not None
    array = np.frombuffer(room.views[0], np.uint8)
    room.release()
    room.release()
    assert arena.free_bytes == 0
    assert arena.reserve([1]) is None
    array[:] = 1
    del array
    gc.collect()
    assert arena.free_bytes == SIZE
    again = arena.reserve([SIZE])
    assert again is not None
    again.release()


def test_a_daemon_gets_a_descriptor_that_cannot_write() -> None:
    """Closed, a client makes no other arena."""
    owner = ArenaOfClient()
    assert owner.open() is None
    assert owner.get() is owner.get() is not None
    fd = owner.open()
    assert fd is not None
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.write(fd, b"x")
    os.close(fd)
    owner.close()
    assert (owner.get(), owner.open()) == (None, None)


# --- with a daemon --------------------------------------------------------------------------------------------------


@pytest.fixture
def folder() -> Iterator[Path]:
    with short_dir() as path:
        yield path


def open_node(folder: Path, files: Files | None = None) -> Node:
    config = NodeConfig(directories=(folder / "data",), capacity_bytes=256 * limits.MIB, segment_bytes=32 * limits.MIB)
    return Node.open(config, ManualClock(), TEST_RULES, files=files)


def named(space: SpaceId, count: int, seed: int = 0) -> list[BlockName]:
    return list(a_chain(space, count, seed=seed).names)


def put_in_place(client: StoreClient, space: SpaceId, sizes: list[int], seed: int, *, shared: bool) -> list[BlockName]:
    """Make payloads in reserved memory, put them in another order, and read them back."""
    names = named(space, len(sizes), seed)
    with client.reserve(sizes) as room:
        assert room.shared is shared
        for name, view in zip(names, room.views, strict=True):
            np.frombuffer(view, np.uint8)[:] = np.frombuffer(payload_of(name, len(view)), np.uint8)
        puts = [BlockPut(name, BLOCK_TOKENS, view) for name, view in zip(names, room.views, strict=True)]
        assert client.put(space, puts[::-1], traffic_class=AGENT) == [PutOutcome.STORED] * len(sizes)
        assert [bytes(view) for view in room.views] == [payload_of(n, s) for n, s in zip(names, sizes, strict=True)]
    buffers = [bytearray(size) for size in sizes]
    assert client.get_into(space, names, buffers) == [GetStatus.OK] * len(sizes)
    assert buffers == [payload_of(name, size) for name, size in zip(names, sizes, strict=True)]
    return names


LARGER_BYTES = 16 * limits.MIB
SIZES = [1, 100_003, LARGER_BYTES + 1, 64 * limits.KIB, 2 * limits.MIB, 3 * limits.MIB]


def test_payloads_made_in_place_are_stored_without_a_copy(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Odd sizes, one larger than a part, put backwards; nothing goes through the socket; all the memory comes back."""
    monkeypatch.setattr(submission, "PART_BYTES", LARGER_BYTES)
    copied: list[int] = []
    copyto = np.copyto
    node = open_node(folder)
    with served(node, folder) as server, client_of(server.addresses[1]) as client:
        space = client.register_space(a_space())
        client.put(space, [BlockPut(named(space, 1, 9)[0], BLOCK_TOKENS, b"x")], traffic_class=AGENT)
        arena = client._arena.get()
        assert arena is not None
        free_bytes = arena.free_bytes

        def watched(to: Any, what: Any) -> None:
            copied.append(len(what))
            copyto(to, what)

        monkeypatch.setattr(np, "copyto", watched)
        for seed in range(3):
            put_in_place(client, space, SIZES, seed, shared=True)
        assert copied == []
        assert server._metrics.registry.get_sample_value("reprise_store_requests_total", {"opcode": "put"}) == 0
        assert free_bytes - arena.free_bytes in (0, PARTS * PART_BYTES)  # of another connection, if there is one
    node.close()


@pytest.mark.parametrize("way", ["tcp", "not shared", "no room"])
def test_without_shared_memory_the_same_code_works(folder: Path, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if way == "no room":
        monkeypatch.setattr(limits, "ARENA_BYTES_MAX", PARTS * PART_BYTES)
        monkeypatch.setattr(Arena.create.__func__, "__defaults__", (PARTS * PART_BYTES,))  # type: ignore[attr-defined]
    node = open_node(folder)
    with served(node, folder) as server:
        address = server.addresses[0 if way == "tcp" else 1]
        with client_of(address, same_host=way != "not shared", connections_per_node=1) as client:
            space = client.register_space(a_space())
            client.put(space, [BlockPut(named(space, 1, 9)[0], BLOCK_TOKENS, b"x")], traffic_class=AGENT)
            put_in_place(client, space, SIZES, 1, shared=False)
    node.close()


def test_a_payload_that_changes_while_it_is_written_is_altered(folder: Path) -> None:
    """The caller goes on writing into what it has put: that block is not stored, its neighbours are."""

    class Scribbling(Files):
        victim: memoryview | None = None

        def pwritev(self, fd: int, views: list[memoryview], offset: int) -> int:  # type: ignore[override]
            done = super().pwritev(fd, views, offset)
            if self.victim is not None and len(views) > 1:
                self.victim[5:6] = b"?"
            return done

    files = Scribbling()
    node = open_node(folder, files)
    with served(node, folder) as server, client_of(server.addresses[1]) as client:
        space = client.register_space(a_space())
        names = named(space, 3)
        with client.reserve([1000] * 3) as room:
            puts = [BlockPut(name, BLOCK_TOKENS, view) for name, view in zip(names, room.views, strict=True)]
            files.victim = room.views[1]
            outcomes = client.put(space, puts, traffic_class=AGENT)
            files.victim = None
            assert outcomes == [PutOutcome.STORED, PutOutcome.ALTERED, PutOutcome.STORED]
            assert client.put(space, puts[1:2], traffic_class=AGENT) == [PutOutcome.STORED]
    node.close()


def test_a_reservation_outlives_its_client_harmlessly(folder: Path) -> None:
    """Its memory stays readable and writable until it is let go; lengths that no block has are refused."""
    node = open_node(folder)
    with served(node, folder) as server, client_of(server.addresses[1]) as client:
        for sizes in ([0], [limits.PAYLOAD_BYTES_MAX + 1], [limits.PAYLOAD_BYTES_MAX] * 9):
            with pytest.raises(ValueError, match="payloads have"):
                client.reserve(sizes)
        room = client.reserve([100])
        assert address_of(room.views[0]) % ALIGN_BYTES == 0
    room.views[0][:] = b"z" * 100
    assert bytes(room.views[0]) == b"z" * 100
    room.release()
    assert room.views == ()
    node.close()
