"""Blocks as columns: those that came over a connection are what the same blocks are when a caller puts them."""

from __future__ import annotations

import random

import pytest
import xxhash

from kvstore import wire
from kvstore.daemon import columns
from kvstore.daemon.checks import check_put
from kvstore.daemon.codec import Codec, compress, decompress
from kvstore.daemon.columns import Arrived, incoming
from kvstore.keys import SpaceId
from kvstore.store import FLAG_APPROXIMATE, BlockPut, Buffer
from kvstore.traffic import AGENT
from tests.support.spaces import a_chain

SPACE = SpaceId(bytes(range(32)))


def some_puts(count: int, seed: int = 1, flags: int = FLAG_APPROXIMATE) -> tuple[list[BlockPut], list[int]]:
    drawn = random.Random(seed)
    puts = [
        BlockPut(name, drawn.randint(1, 4096), drawn.randbytes(drawn.randint(1, 300)), drawn.choice((0, flags)))
        for name in a_chain(SPACE, count).names
    ]
    return puts, [xxhash.xxh3_64_intdigest(put.payload) for put in puts]


def arrived(puts: list[BlockPut], checksums: list[int]) -> Arrived:
    """The same blocks after a way over the wire."""
    rows = [
        wire.PutRow(put.name, put.tokens, len(put.payload), put.flags, checksum)
        for put, checksum in zip(puts, checksums, strict=True)
    ]
    asked = wire.decode_put(wire.encode_put(SPACE, AGENT, "os", rows))
    return Arrived(asked.rows, [memoryview(put.payload) for put in puts])


@pytest.mark.parametrize("count", [1, 2, 17])
@pytest.mark.parametrize("codec", ["none", "zstd"])
def test_columns_that_came_are_those_of_the_blocks(count: int, codec: str) -> None:
    """Every field, every key, every payload; also where the class compresses, which takes the blocks one by one."""
    puts, checksums = some_puts(count)
    blocks = arrived(puts, checksums)
    came, made = incoming(blocks, codec, blocks.rows.checksums()), incoming(puts, codec, checksums)
    assert came.rows.tobytes() == made.rows.tobytes()
    assert list(came.keys) == list(made.keys)
    assert [bytes(each) for each in came.stored] == [bytes(each) for each in made.stored]
    assert (came.altered, came.record_bytes().tolist()) == (made.altered, made.record_bytes().tolist())


def test_what_came_is_also_a_sequence_of_blocks() -> None:
    """Whoever wants one gets one, from either end, or some in a row; beyond the end there is none."""
    puts, checksums = some_puts(5)
    blocks = arrived(puts, checksums)
    for at in (0, 4, -1, -5):
        assert blocks[at].name.key == puts[at].name.key
        assert (blocks[at].tokens, blocks[at].flags) == (puts[at].tokens, puts[at].flags)
        assert bytes(blocks[at].payload) == puts[at].payload
    assert [block.name.key for block in blocks[1:3]] == [put.name.key for put in puts[1:3]]
    assert [row.checksum for row in blocks.rows] == checksums
    with pytest.raises(IndexError):
        blocks[5]


def test_unknown_flags_of_any_block_that_came_are_refused() -> None:
    puts, checksums = some_puts(9, flags=0x40)
    assert any(put.flags for put in puts)
    with pytest.raises(ValueError, match="0x40"):
        check_put(arrived(puts, checksums), AGENT, "os", checksums)
    check_put(arrived([], []), AGENT, "os", [])


@pytest.mark.parametrize("checksums_given", [True, False])
def test_bytes_that_change_while_they_are_compressed_are_not_compressed(
    monkeypatch: pytest.MonkeyPatch, checksums_given: bool
) -> None:
    """A payload in shared memory is another for the moment of compressing, and what it was before and afterwards: what
    is stored is what was verified.
    """
    submitted, other = bytes(range(100)) * 50, bytes(5000)
    memory = bytearray(submitted)

    def compress_amid_changes(codec_name: str, payload: Buffer) -> tuple[Codec, Buffer]:
        memory[:] = other
        packed = compress(codec_name, payload)
        memory[:] = submitted
        return packed

    monkeypatch.setattr(columns, "compress", compress_amid_changes)
    put = BlockPut(a_chain(SPACE, 1).names[0], 1, memoryview(memory))
    came = incoming([put], "zstd", [xxhash.xxh3_64_intdigest(submitted)] if checksums_given else None)
    assert came.rows["codec"].tolist() == [Codec.ZSTD]
    assert not came.altered
    assert decompress(Codec.ZSTD, came.stored[0], len(submitted)) == submitted
    assert came.rows["checksum"].tolist() == [xxhash.xxh3_64_intdigest(came.stored[0])]
