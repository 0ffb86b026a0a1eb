"""Reads that verify themselves: whatever is wrong with a record or said by a daemon, no other byte is accepted."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

from kvstore import record
from kvstore.client import StoreClient
from kvstore.daemon.lending import Loan, LoanOfOne
from kvstore.daemon.node import Node
from kvstore.extents import ROW, ExtentStatus
from kvstore.keys import BlockName, SpaceId
from kvstore.record import CRC_OFFSET, HEADER_BYTES, MARK_BYTES, MARK_OFFSET
from kvstore.store import BlockPut, GetStatus, Presence, PutOutcome
from kvstore.testing import ManualClock
from kvstore.traffic import AGENT
from kvstore.wire import PackedNames
from tests.support.nodes import open_node, payload_of, puts_of
from tests.support.spaces import BLOCK_TOKENS, a_chain, a_space
from tests.support.stores import client_of, served, short_dir

SIZE = 20_000
RECORD_BYTES = 20_480
OK, MISS, CORRUPT = GetStatus.OK, GetStatus.MISS, GetStatus.CORRUPT
PATHS = ["tcp", "unix", "same host"]


@contextmanager
def reader_of(backend: Any, path: str) -> Iterator[StoreClient]:
    with (
        short_dir() as folder,
        served(backend, folder) as server,
        client_of(server.addresses[0 if path == "tcp" else 1], same_host=path == "same host") as client,
    ):
        yield client


def flip(folder: Path, at: int, bit: int) -> None:
    """Flip a bit of the first record of a node's only used segment."""
    for segment in folder.rglob("*.seg"):
        with segment.open("r+b") as file:
            file.seek(4096)
            if file.read(4) != record.RECORD_MAGIC:
                continue
            file.seek(4096 + at)
            byte = file.read(1)[0]
            file.seek(4096 + at)
            file.write(bytes([byte ^ 1 << bit]))
            return
    raise AssertionError("there is no record")


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "at", [0, 5, 8, 12, 20, 28, 91, 92, 139, 144, 150, 152, 159, 160, 168, 196, 224, 243, 256, 12_345, 20_255]
)
def test_a_flipped_bit_is_a_miss_and_a_quarantine(tmp_path: Path, path: str, at: int) -> None:
    """Anywhere in header, mark or payload: the buffer has nothing of it, the counters move, the neighbour is whole."""
    node = open_node(tmp_path, ManualClock())
    with reader_of(node, path) as client:
        space = client.register_space(a_space())
        names = list(a_chain(space, 2).names)
        node.put(space, puts_of(names, SIZE), traffic_class=AGENT)
        flip(tmp_path, at, at % 8)
        buffers = [bytearray(b"x" * SIZE) for _ in names]
        assert client.get_into(space, names, buffers) == [CORRUPT, OK]
        assert buffers[0] in (bytes(SIZE), b"x" * SIZE)
        assert buffers[1] == payload_of(names[1], SIZE)
        assert client.lookup(space, names).presence.tolist() == [Presence.QUARANTINED, Presence.PRESENT]
        assert client.get_into(space, names[:1], buffers[:1]) == [MISS]
        stats = client.stats()
        assert (stats["quarantined"], stats["corrupt"], stats["client"]["corrupt"]) == (1, 1, 1)
    node.close()


class Liar:
    """A node whose daemon tells of other records than those asked for: ``lie`` changes each loan."""

    def __init__(self, node: Node, lie: Any) -> None:
        self._node = node
        self._lie = lie

    def __getattr__(self, name: str) -> Any:
        return getattr(self._node, name)

    def lend(self, space_id: SpaceId, names: PackedNames) -> Loan:
        loan: Loan = self._lie(self._node, space_id, names)
        return loan


def another_key(node: Node, space: SpaceId, names: PackedNames) -> Loan:
    return node.lend(space, PackedNames.pack(list(names)[::-1]))


def another_generation(node: Node, space: SpaceId, names: PackedNames) -> Loan:
    loan = node.lend(space, names)
    loan.rows["generation"] ^= np.uint64(1)
    return loan


def another_place(node: Node, space: SpaceId, names: PackedNames) -> Loan:
    loan = node.lend(space, names)
    loan.rows["offset"] += np.uint64(RECORD_BYTES)
    return loan


def another_segment(node: Node, space: SpaceId, names: PackedNames) -> Loan:
    loan = node.lend(space, names)
    loan.rows["segment"] ^= np.uint32(1)
    return loan


def a_compressed_one(node: Node, space: SpaceId, names: PackedNames) -> Loan:
    """What lies in the file is not what was asked for, and its codec is kept secret."""
    loan = another_key(node, space, names)
    loan.codecs[:] = 0
    return loan


LIES = [another_key, another_generation, another_place, another_segment, a_compressed_one]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("lie", LIES)
def test_a_daemon_that_lies_is_never_believed(tmp_path: Path, path: str, lie: Any) -> None:
    """About key, generation, place or segment: no block is accepted, no buffer has other bytes, and nothing that is
    good is quarantined."""
    node = open_node(tmp_path, ManualClock())
    with reader_of(Liar(node, lie), path) as client:
        space = client.register_space(a_space())
        names = list(a_chain(space, 4).names)
        node.put(space, puts_of(names, SIZE), traffic_class=AGENT)
        buffers = [bytearray(b"x" * SIZE) for _ in names]
        assert client.get_into(space, names, buffers) == [MISS] * 4
        assert all(buffer in (bytes(SIZE), b"x" * SIZE) for buffer in buffers)
        assert client.stats()["quarantined"] == 0
        assert node.get_into(space, names, [bytearray(SIZE) for _ in names]) == [OK] * 4
    node.close()


class LiarAboutOne(Liar):
    """As ``Liar``, of a block asked for by itself."""

    def lend_one(self, space_id: SpaceId, names: PackedNames) -> LoanOfOne:
        loan: LoanOfOne = self._lie(self._node, space_id, names)
        return loan


def _with_place(**fields: Any) -> Any:
    """A lie about the place: ``fields`` are added to its own."""

    def lie(node: Node, space: SpaceId, names: PackedNames) -> LoanOfOne:
        loan = node.lend_one(space, names)
        assert loan.place is not None
        loan.place = loan.place._replace(**{name: getattr(loan.place, name) + more for name, more in fields.items()})
        return loan

    return lie


def _another_one(node: Node, space: SpaceId, _: PackedNames) -> LoanOfOne:
    return node.lend_one(space, PackedNames.pack(a_chain(space, 4).names[3:]))


ONE_LIES = [_another_one, _with_place(generation=1), _with_place(offset=RECORD_BYTES)]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("lie", ONE_LIES)
def test_a_daemon_that_lies_of_one_block_is_never_believed(tmp_path: Path, path: str, lie: Any) -> None:
    node = open_node(tmp_path, ManualClock())
    with reader_of(LiarAboutOne(node, lie), path) as client:
        space = client.register_space(a_space())
        names = list(a_chain(space, 4).names)
        node.put(space, puts_of(names, SIZE), traffic_class=AGENT)
        buffer = bytearray(b"x" * SIZE)
        assert client.get_into(space, names[:1], [buffer]) == [MISS]
        assert buffer == bytes(SIZE)
        assert client.stats()["quarantined"] == 0
    assert node.stats()["leases"] == 0
    node.close()


@pytest.mark.parametrize("path", PATHS)
def test_one_block_is_served_as_one_of_many(tmp_path: Path, path: str) -> None:
    """A hit, a miss, another length, another space and a damaged payload end alike, and count alike."""
    node = open_node(tmp_path, ManualClock())
    with reader_of(node, path) as client:
        space = client.register_space(a_space())
        other = client.register_space(a_space(model="another"))
        names = list(a_chain(space, 4).names)
        node.put(space, puts_of(names[:3], SIZE), traffic_class=AGENT)
        (segment,) = [path for path in tmp_path.rglob("*.seg") if payload_of(names[2], SIZE) in path.read_bytes()]
        at = segment.read_bytes().index(payload_of(names[2], SIZE))
        for asked, wanted_bytes, expected in (
            (names[0], SIZE, OK),
            (names[3], SIZE, MISS),
            (names[1], SIZE - 1, GetStatus.WRONG_SIZE),
        ):
            for together in (1, 2):
                buffers = [bytearray(wanted_bytes) for _ in range(together)]
                assert client.get_into(space, [asked] * together, buffers) == [expected] * together
                content = payload_of(asked, SIZE) if expected == OK else bytes(wanted_bytes)
                assert buffers == [content] * together
        assert client.get_into(other, names[:1], [bytearray(SIZE)]) == [MISS]
        stats = node.stats()
        assert (stats["hits"], stats["misses"]) == (3 + 3, 3 + 1)
        with segment.open("r+b") as file:
            file.seek(at + 99)
            file.write(bytes([payload_of(names[2], SIZE)[99] ^ 1]))
        buffer = bytearray(b"x" * SIZE)
        assert client.get_into(space, names[2:3], [buffer]) == [CORRUPT]
        assert buffer == bytes(SIZE)
        assert node.stats()["quarantined"] == 1
    node.close()


@pytest.mark.parametrize("path", PATHS)
def test_a_block_of_another_length_is_no_hit(tmp_path: Path, path: str) -> None:
    node = open_node(tmp_path, ManualClock())
    with reader_of(node, path) as client:
        space = client.register_space(a_space())
        names = list(a_chain(space, 2).names)
        node.put(space, puts_of(names, SIZE), traffic_class=AGENT)
        buffers = [bytearray(b"x" * (SIZE + 1)), bytearray(SIZE)]
        assert client.get_into(space, names, buffers) == [GetStatus.WRONG_SIZE, OK]
        assert buffers[0] == b"x" * (SIZE + 1)
    node.close()


@pytest.mark.parametrize("path", PATHS)
def test_any_writable_memory_is_filled(tmp_path: Path, path: str) -> None:
    """Numpy arrays, parts of one large array, bytearrays, memoryviews, and a tensor's memory where torch is there."""
    node = open_node(tmp_path, ManualClock())
    with reader_of(node, path) as client:
        space = client.register_space(a_space())
        names = list(a_chain(space, 5).names)
        assert set(node.put(space, puts_of(names, SIZE), traffic_class=AGENT)) == {PutOutcome.STORED}
        pool = np.zeros((4, SIZE // 4), np.float32)
        array = np.zeros((100, SIZE // 200), np.uint16)
        buffers: list[Any] = [pool.view(np.uint8).reshape(4, SIZE)[2], array, bytearray(SIZE)]
        buffers.append(memoryview(bytearray(SIZE)).cast("I"))
        buffers.append(_tensor_memory(SIZE))
        assert client.get_into(space, names, buffers) == [OK] * 5
        for name, buffer in zip(names, buffers, strict=True):
            assert bytes(memoryview(buffer).cast("B")) == payload_of(name, SIZE)
        assert not pool[[0, 1, 3]].any()
    node.close()


def _tensor_memory(size: int) -> Any:
    try:
        import torch
    except ImportError:
        return bytearray(size)
    return torch.zeros(size, dtype=torch.uint8).numpy()


def test_extents_are_counted_in_whatever_order_blocks_are_asked(tmp_path: Path) -> None:
    """Blocks written together are one extent; a gap makes two; the same block twice is two reads."""
    node = open_node(tmp_path, ManualClock())
    space = node.register_space(a_space())
    names = list(a_chain(space, 8).names)
    node.put(space, puts_of(names, SIZE), traffic_class=AGENT)

    def extents_of(asked: Sequence[BlockName]) -> int:
        before = node.stats()["extents_read"]
        node.lend(space, PackedNames.pack(asked)).close()
        return int(node.stats()["extents_read"]) - int(before)

    assert extents_of(names) == extents_of(names[::-1]) == extents_of(names[:1]) == 1
    assert extents_of(names[:3] + names[5:]) == 2
    assert extents_of([names[0], names[0]]) == 2
    assert extents_of([*a_chain(space, 2, seed=9).names]) == 0
    assert node.stats()["hits"] == 8 + 8 + 1 + 6 + 2
    node.close()


# --- the check itself -----------------------------------------------------------------------------------------------

SPACE = SpaceId(bytes(range(32)))
NAMES: Sequence[BlockName] = a_chain(SPACE, 3).names


def headers_of(node_folder: Path) -> tuple[bytearray, np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Headers that a node wrote, what is expected of them, and the checksums of their payloads."""
    node = open_node(node_folder, ManualClock())
    space = node.register_space(a_space())
    names = list(a_chain(space, 3).names)
    puts = [BlockPut(name, BLOCK_TOKENS, name.key * 100) for name in names]
    node.put(space, puts, traffic_class=AGENT)
    loan = node.lend(space, PackedNames.pack(names))
    rows, (segment, _) = loan.rows.copy(), loan.files[0]
    data = bytearray(
        b"".join(segment.files.read(segment.fd, HEADER_BYTES, int(offset)) for offset in rows["offset"].tolist())
    )
    packed = PackedNames.pack(names)
    keys = np.frombuffer(packed.keys, record.LAYOUT["key"])
    token_digests = np.frombuffer(packed.token_digests, record.LAYOUT["token_digest"])
    wanted = record.expect_at(record.expected_headers(space, keys, token_digests, np.full(3, 3200)), rows)
    loan.close()
    node.close()
    return data, wanted, np.array([xxhash.xxh3_64_intdigest(put.payload) for put in puts], np.uint64)


def test_only_the_headers_expected_are_whole(tmp_path: Path) -> None:
    """Every bit of the middle header, with and without its CRC made right: only bytes that no reader knows beforehand
    may differ, and of those only with the right CRC."""
    data, wanted, checksums = headers_of(tmp_path)
    assert record.whole_headers(bytes(data), wanted, checksums).tolist() == [True] * 3
    assert record.whole_headers(bytes(data), wanted, checksums * [True, True, False]).tolist() == [True, True, False]
    unknown = {*range(60, 92), *range(140, 150), 151, *range(160, 168), *range(176, CRC_OFFSET)}
    unused = {*range(CRC_OFFSET + 4, MARK_OFFSET), *range(MARK_OFFSET + MARK_BYTES, HEADER_BYTES)}
    for at in range(HEADER_BYTES):
        for mend_crc in (False, True):
            spoiled = bytearray(data)
            spoiled[HEADER_BYTES + at] ^= 1 << at % 8
            if mend_crc:
                crc = zlib.crc32(spoiled[HEADER_BYTES : HEADER_BYTES + CRC_OFFSET])
                struct.pack_into("<I", spoiled, HEADER_BYTES + CRC_OFFSET, crc)
            crc_only = mend_crc and CRC_OFFSET <= at < CRC_OFFSET + 4
            expected = at in unused or (mend_crc and at in unknown) or crc_only
            assert record.whole_headers(bytes(spoiled), wanted, checksums).tolist() == [True, expected, True], at


def test_a_row_says_nothing_but_its_status_unless_it_is_lent(tmp_path: Path) -> None:
    node = open_node(tmp_path, ManualClock())
    space = node.register_space(a_space())
    names = list(a_chain(space, 3).names)
    node.put(space, puts_of(names[:2], SIZE), traffic_class=AGENT)
    with node.lend(space, PackedNames.pack(names)) as loan:
        loan.refuse_other_sizes(np.array([SIZE, 1, SIZE], np.uint32))
        assert loan.rows["status"].tolist() == [ExtentStatus.LENT, ExtentStatus.WRONG_SIZE, ExtentStatus.MISS]
        assert loan.rows[1].tobytes() == bytes(24) + bytes([ExtentStatus.WRONG_SIZE]) + bytes(ROW.itemsize - 25)
    assert node.stats()["leases"] == 0
    node.close()
