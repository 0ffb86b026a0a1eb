"""The index: atomic batches, its own check, its budget, its damage."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from kvstore.daemon.index import (
    ENTRY_BYTES,
    ENTRY_DTYPE,
    Extent,
    Index,
    IndexBatch,
    IndexDamaged,
    Tombstone,
    blocks_max,
)
from kvstore.keys import BlockKey
from kvstore.limits import MIB
from tests.support.nodes import disk_bytes

BUDGET = 2 * MIB


def a_key(number: int) -> BlockKey:
    return BlockKey(random.Random(number).randbytes(32))


def an_entry(number: int) -> bytes:
    return random.Random(number).randbytes(ENTRY_BYTES)


def filled(path: Path, count: int) -> Index:
    index = Index.open(path, BUDGET)
    entries = [(a_key(number), an_entry(number)) for number in range(count)]
    index.write(
        IndexBatch(
            entries=entries,
            extents={3: Extent(9, 4096)},
            tombstones={a_key(-1): Tombstone(3, 55)},
            blocks=count,
        )
    )
    return index


def test_everything_survives_a_reopen(tmp_path: Path) -> None:
    filled(tmp_path / "index", 100).close()
    index = Index.open(tmp_path / "index", BUDGET)
    content = index.load()
    index.close()
    assert content is not None
    assert sorted(content.keys) == sorted(a_key(number) for number in range(100))
    by_key = dict(zip(content.keys, content.rows, strict=True))
    assert by_key[a_key(5)].tobytes() == an_entry(5)
    assert content.extents == {3: Extent(9, 4096)}
    assert content.tombstones == {a_key(-1): Tombstone(3, 55)}


def test_a_new_index_is_empty_not_damaged(tmp_path: Path) -> None:
    index = Index.open(tmp_path / "index", BUDGET)
    assert index.load() is None
    index.close()


def test_a_lost_entry_is_found_by_the_count(tmp_path: Path) -> None:
    """A batch that says another number of entries than there are makes the next load refuse the index."""
    index = filled(tmp_path / "index", 10)
    index.write(IndexBatch(removed=[a_key(1)], blocks=10))
    with pytest.raises(IndexDamaged, match="should hold 10"):
        index.load()
    index.close()


@pytest.mark.parametrize("pattern", ["*.sst", "MANIFEST*", "CURRENT"])
def test_damaged_files_are_damage_not_a_crash(tmp_path: Path, pattern: str) -> None:
    """Bytes overwritten in RocksDB's files end in IndexDamaged at open or load."""
    index = filled(tmp_path / "index", 2000)
    index.rewrite([IndexBatch(entries=[(a_key(n), an_entry(n))], blocks=n + 1) for n in range(3000)])
    index.close()
    spoiled = sorted((tmp_path / "index").glob(pattern))
    assert spoiled
    for path in spoiled:
        data = bytearray(path.read_bytes())
        middle = len(data) // 2
        data[middle : middle + 64] = b"\xff" * len(data[middle : middle + 64])
        path.write_bytes(data)
    with pytest.raises(IndexDamaged):  # noqa: PT012 (either call may find it)
        again = Index.open(tmp_path / "index", BUDGET)
        try:
            again.load()
        finally:
            again.close()


def test_keys_come_in_order_and_pages_go_on_after_the_cursor(tmp_path: Path) -> None:
    index = filled(tmp_path / "index", 1500)
    keys = list(index.keys_after(b""))
    assert keys == sorted(keys)
    assert len(keys) == 1500
    assert list(index.keys_after(keys[700])) == keys[701:]
    index.close()


def test_the_directory_stays_within_its_budget(tmp_path: Path) -> None:
    """Rewriting the same entries for ever, as touches do, never grows the directory beyond the budget."""
    path = tmp_path / "index"
    count = blocks_max(BUDGET)
    index = filled(path, count)
    keys = [a_key(number) for number in range(count)]
    state = {key: an_entry(number) for number, key in enumerate(keys)}
    highest = 0
    for turn in range(60):
        changed = random.Random(turn).sample(keys, 500)
        for key in changed:
            state[key] = random.Random(turn).randbytes(ENTRY_BYTES)
        index.write(IndexBatch(entries=[(key, state[key]) for key in changed], blocks=count))
        index.compact_if_due([IndexBatch(entries=list(state.items()), blocks=count)])
        highest = max(highest, disk_bytes(path))
    assert highest <= BUDGET
    content = index.load()
    index.close()
    assert content is not None
    assert {key: row.tobytes() for key, row in zip(content.keys, content.rows, strict=True)} == state


def test_a_crash_in_the_middle_of_a_compaction_keeps_the_index(tmp_path: Path) -> None:
    """Between the two renames only the old copy is there: it is taken."""
    path = tmp_path / "index"
    filled(path, 10).close()
    path.rename(path.with_name("index.old"))
    path.with_name("index.new").mkdir()
    index = Index.open(path, BUDGET)
    content = index.load()
    index.close()
    assert content is not None
    assert len(content.keys) == 10
    assert not path.with_name("index.new").exists()


def test_reading_only_changes_no_byte(tmp_path: Path) -> None:
    path = tmp_path / "index"
    filled(path, 50).close()
    before = {item.name: item.read_bytes() for item in path.iterdir()}
    index = Index.open_read_only(path)
    content = index.load()
    index.close()
    assert content is not None
    assert len(content.keys) == 50
    assert {item.name: item.read_bytes() for item in path.iterdir()} == before
    assert ENTRY_DTYPE.itemsize == ENTRY_BYTES
