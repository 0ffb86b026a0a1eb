"""Going around the page cache: every byte as ever, and none left in memory; and what happens where it cannot."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvstore.client import StoreClient
from kvstore.daemon.cipher import Keyring
from kvstore.daemon.files import Files
from kvstore.daemon.node import Node, NodeConfig
from kvstore.daemon.page_cache import PageCache, page_cache_of
from kvstore.daemon.segment import FIRST_RECORD
from kvstore.daemon.server import Server
from kvstore.direct import PAGE_BYTES, PIECE_BYTES, PageReader, Piece, is_direct, pieces_of
from kvstore.keys import BlockName, SpaceId
from kvstore.limits import MIB
from kvstore.local import pour
from kvstore.store import GetStatus, PutOutcome
from kvstore.testing import TEST_RULES, ManualClock
from kvstore.traffic import AGENT
from tests.support.nodes import payload_of, puts_of
from tests.support.spaces import a_chain, a_space
from tests.support.stores import EVERYBODY, client_of, served, short_dir

SIZES = (1, PAGE_BYTES - 256, PAGE_BYTES + 1, 100_000, MIB, PIECE_BYTES - 256, 2 * PIECE_BYTES + 5)
TMPFS = Path("/dev/shm")
WAYS = ("same host", "socket")


def _goes_around(folder: Path) -> bool:
    return page_cache_of(folder, Files(), bypass=True) is PageCache.BYPASS


needs_direct = pytest.mark.skipif(
    not _goes_around(Path(tempfile.gettempdir())), reason="temporary files cannot be read around the page cache here"
)


@dataclass(frozen=True, slots=True)
class Bench:
    """A node whose blocks of all SIZES are on disk, and out of the page cache if it bypasses that; a client of it."""

    folder: Path
    node: Node
    server: Server
    client: StoreClient
    space: SpaceId
    names: Sequence[BlockName]

    def chill(self) -> None:
        """Leave nothing of the segments in the page cache."""
        for path in self.folder.glob("data/segments/*.seg"):
            with open(path, "rb") as file:
                os.fdatasync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        assert self.resident_pages() == 0

    def resident_pages(self) -> int:
        """Of everything behind the first pages of segments."""
        total = 0
        for path in self.folder.glob("data/segments/*.seg"):
            with open(path, "rb") as file:
                pages = Files().resident_pages(file.fileno(), FIRST_RECORD, 2**40)
                assert pages is not None
                total += pages
        return total

    def check(self, names: Sequence[BlockName], sizes: Sequence[int]) -> None:
        """Get these and compare every byte."""
        views = [memoryview(bytearray(size)) for size in sizes]
        assert set(self.client.get_into(self.space, names, views)) == {GetStatus.OK}
        for name, view in zip(names, views, strict=True):
            assert view == payload_of(name, len(view))


@contextmanager
def a_bench(
    *, bypass: bool, way: str = "same host", keyring: Keyring | None = None, files: Files | None = None
) -> Iterator[Bench]:
    with ExitStack() as stack:
        folder = stack.enter_context(short_dir())
        config = NodeConfig(
            directories=(folder / "data",),
            capacity_bytes=128 * MIB,
            segment_bytes=16 * MIB,
            keyring=keyring or Keyring(),
            bypass_page_cache=bypass,
        )
        node = Node.open(config, ManualClock(), TEST_RULES, files=files)
        stack.callback(node.close)
        server = stack.enter_context(served(node, folder))
        client = stack.enter_context(client_of(server.addresses[1], same_host=way == "same host"))
        space = client.register_space(a_space())
        names = list(a_chain(space, len(SIZES)).names)
        puts = [puts_of([name], size)[0] for name, size in zip(names, SIZES, strict=True)]
        assert set(client.put(space, puts, traffic_class=AGENT, ack="disk")) == {PutOutcome.STORED}
        yield Bench(folder, node, server, client, space, names)


@needs_direct
@pytest.mark.parametrize("way", WAYS)
def test_a_cold_get_leaves_nothing_in_the_page_cache_if_it_is_bypassed(way: str) -> None:
    """Blocks of all lengths come byte for byte, by one and in a batch, and their pages are not there afterwards."""
    with a_bench(bypass=True, way=way) as bench:
        bench.chill()
        for name, size in zip(bench.names, SIZES, strict=True):
            bench.check([name], [size])
        bench.check(bench.names, SIZES)
        bench.check(bench.names[::-2], SIZES[::-2])
        assert bench.resident_pages() == 0


@needs_direct
@pytest.mark.parametrize("way", WAYS)
def test_a_cold_get_fills_the_page_cache_if_it_is_kept(way: str) -> None:
    with a_bench(bypass=False, way=way) as bench:
        bench.chill()
        bench.check(bench.names, SIZES)
        assert bench.resident_pages() >= sum(SIZES) // PAGE_BYTES


@needs_direct
def test_what_was_flushed_leaves_the_page_cache_only_if_it_is_bypassed() -> None:
    """A put that was acknowledged at ``disk`` was written back."""
    with a_bench(bypass=True) as bench:
        assert bench.resident_pages() == 0
    with a_bench(bypass=False) as bench:
        assert bench.resident_pages() >= sum(SIZES) // PAGE_BYTES


@needs_direct
def test_what_is_in_the_page_cache_anyway_is_read_from_there() -> None:
    """Whatever somebody else keeps there stays there, and costs the disk nothing."""
    with a_bench(bypass=True) as bench:
        for path in bench.folder.glob("data/segments/*.seg"):
            path.read_bytes()
        there = bench.resident_pages()
        bench.check(bench.names, SIZES)
        assert bench.resident_pages() == there > 0
        segment = next(iter(bench.node._shards[0]._ledger.segments.segments.values()))
        assert not segment.is_cold(FIRST_RECORD, MIB)


@needs_direct
def test_encrypted_blocks_leave_nothing_in_the_page_cache_either() -> None:
    with a_bench(bypass=True, keyring=EVERYBODY) as bench:
        bench.chill()
        bench.check(bench.names, SIZES)
        assert bench.resident_pages() == 0


@needs_direct
@pytest.mark.parametrize("way", WAYS)
def test_a_file_that_was_cut_gives_no_wrong_bytes_around_the_page_cache(way: str) -> None:
    with a_bench(bypass=True, way=way) as bench:
        bench.chill()
        for path in bench.folder.glob("data/segments/*.seg"):
            os.truncate(path, 3 * PAGE_BYTES + 100)
        views = [memoryview(bytearray(b"\xa5" * size)) for size in SIZES]
        statuses = bench.client.get_into(bench.space, bench.names, views)
        assert statuses[0] == GetStatus.OK
        assert GetStatus.OK not in statuses[2:]
        assert views[0] == payload_of(bench.names[0], SIZES[0])
        for status, view in zip(statuses, views, strict=True):
            assert status == GetStatus.OK or set(bytes(view)) <= {0} or set(bytes(view)) == {0xA5}


@needs_direct
def test_who_finds_no_buffer_is_served_through_the_page_cache() -> None:
    with a_bench(bypass=True, way="socket") as bench:
        bench.chill()
        bench.server._session._outgoing._pages = PageReader(buffers_max=0)
        bench.check(bench.names, SIZES)
        bench.check(bench.names[:1], SIZES[:1])
        assert bench.resident_pages() >= sum(SIZES) // PAGE_BYTES


@pytest.mark.skipif(not os.path.ismount(TMPFS), reason="no memory file system here")
def test_where_the_file_system_cannot_the_daemon_warns_once_and_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    with tempfile.TemporaryDirectory(dir=TMPFS) as folder, caplog.at_level(logging.WARNING):
        config = NodeConfig(directories=(Path(folder),), capacity_bytes=16 * MIB, bypass_page_cache=True)
        with closing(Node.open(config, ManualClock(), TEST_RULES)) as node:
            space = node.register_space(a_space())
            names = list(a_chain(space, 9).names)
            assert set(node.put(space, puts_of(names, 100_000), traffic_class=AGENT)) == {PutOutcome.STORED}
            views = [bytearray(100_000) for _ in names]
            assert set(node.get_into(space, names, views)) == {GetStatus.OK}
            assert views[4] == payload_of(names[4], 100_000)
            (volume,) = node.stats()["volumes"].values()
        assert [record.message.split()[0] for record in caplog.records] == ["page_cache_kept"]
        assert volume["page_cache"] == PageCache.KEPT != PageCache.KEEP
        assert "stays in memory" in caplog.text
        assert folder in caplog.text
        assert not list(Path(folder).glob("tmp*"))


@needs_direct
def test_the_statistics_say_what_a_volume_does() -> None:
    for bypass in (False, True):
        with a_bench(bypass=bypass) as bench:
            (volume,) = bench.node.stats()["volumes"].values()
            assert volume["page_cache"] == ("bypass" if bypass else "keep")


@pytest.fixture
def a_file(tmp_path: Path) -> Iterator[tuple[int, bytes]]:
    """A file of three pieces and a half and something, and what is in it."""
    content = os.urandom(3 * PIECE_BYTES + PIECE_BYTES // 2 + 100)
    (tmp_path / "file").write_bytes(content)
    fd = os.open(tmp_path / "file", os.O_RDONLY)
    yield fd, content
    os.close(fd)


def test_pieces_are_whole_pages_of_about_the_same_length() -> None:
    for length in (1, PAGE_BYTES, PAGE_BYTES + 1, PIECE_BYTES, PIECE_BYTES + 1, 9 * PIECE_BYTES - 1):
        pieces = pieces_of(7, 3 * PAGE_BYTES, length)
        assert [piece.offset for piece in pieces] == [
            3 * PAGE_BYTES + sum(before.length for before in pieces[:at]) for at in range(len(pieces))
        ]
        lengths = [piece.length for piece in pieces]
        assert 0 <= sum(lengths) - length < PAGE_BYTES
        assert max(lengths) <= PIECE_BYTES
        assert len(lengths) == -(-length // PIECE_BYTES)
        assert max(lengths) - min(lengths) <= len(lengths) * PAGE_BYTES
        assert all(part % PAGE_BYTES == 0 for part in lengths)


@pytest.mark.parametrize("buffers", [1, 2, 3, 20])
def test_pieces_come_in_order_whatever_buffers_there_are(a_file: tuple[int, bytes], buffers: int) -> None:
    fd, content = a_file
    reader = PageReader(buffers)
    pieces = [Piece(fd, at, PAGE_BYTES) for at in range(40 * PAGE_BYTES, 0, -PAGE_BYTES)]
    pieces += pieces_of(fd, 0, len(content))
    with closing(reader.read(pieces)) as reading:
        for piece, view in zip(pieces, reading, strict=True):
            assert view == content[piece.offset : piece.offset + piece.length]


def test_buffers_come_back_from_a_reader_that_stops_early_and_no_more_are_made(a_file: tuple[int, bytes]) -> None:
    fd, content = a_file
    reader = PageReader(2)
    pieces = pieces_of(fd, 0, len(content))
    for _ in range(3):
        with closing(reader.read(pieces)) as first, closing(reader.read(pieces)) as second:
            assert next(first) == content[: pieces[0].length]
            assert list(second) == [None]
    with closing(reader.read(pieces)) as reading:
        assert sum(len(view) for view in reading if view is not None) == len(content)


def test_a_file_that_cannot_be_read_gives_nothing(tmp_path: Path) -> None:
    fd = os.open(tmp_path, os.O_RDONLY)  # a directory
    try:
        with closing(PageReader().read(pieces_of(fd, 0, 3 * PIECE_BYTES))) as reading:
            assert [len(view) for view in reading if view is not None] == [0, 0, 0]
        assert not is_direct(fd)
    finally:
        os.close(fd)


def test_pouring_fills_parts_across_pieces_and_says_what_lacks() -> None:
    parts = [memoryview(bytearray(size)) for size in (3, 0, 5, 2)]
    assert pour([memoryview(b"abcd"), memoryview(b""), memoryview(b"efghijkl")], parts)
    assert b"".join(parts) == b"abcdefghij"
    assert not pour([memoryview(b"abcd"), None], parts)
