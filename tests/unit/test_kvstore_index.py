"""The index: atomic batches, its own check, its budget, its damage."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest

from kvstore.capacity import blocks_max
from kvstore.daemon.index import (
    ENTRY_BYTES,
    ENTRY_DTYPE,
    NO_ROWS,
    Extent,
    Index,
    IndexBatch,
    IndexDamaged,
    Rows,
    place_words,
)
from kvstore.daemon.tombstones import Tombstone
from kvstore.limits import MIB
from tests.support.disk import disk_bytes

BUDGET = 2 * MIB


def a_row(number: int, tokens: int = 1) -> Rows:
    rows = np.frombuffer(random.Random(number).randbytes(ENTRY_BYTES), dtype=ENTRY_DTYPE).copy()
    rows["segment"], rows["offset"], rows["tokens"] = 1 + number // 1000, 4096 * (1 + number % 1000), tokens
    return rows


def some_rows(numbers: Iterable[int], tokens: int = 1) -> Rows:
    return np.concatenate([NO_ROWS, *(a_row(number, tokens) for number in numbers)])


def filled(path: Path, count: int) -> Index:
    index = Index.open(path, BUDGET)
    index.write(
        IndexBatch(
            rows=some_rows(range(count)),
            extents={3: Extent(9, 4096)},
            tombstones={77: Tombstone(3, 55)},
            blocks=count,
        )
    )
    return index


def test_everything_survives_a_reopen(tmp_path: Path) -> None:
    filled(tmp_path / "index", 1100).close()
    index = Index.open(tmp_path / "index", BUDGET)
    content = index.load()
    assert content is not None
    assert content.rows.tobytes() == some_rows(range(1100)).tobytes()
    assert content.extents == {3: Extent(9, 4096)}
    assert content.tombstones == {77: Tombstone(3, 55)}
    rows, at = index.values(place_words(some_rows([5, 2000, 7])))
    assert rows.tobytes() == some_rows([5, 7]).tobytes()
    assert at.tolist() == [0, 2]
    index.close()


def test_a_new_index_is_empty_not_damaged(tmp_path: Path) -> None:
    index = Index.open(tmp_path / "index", BUDGET)
    assert index.load() is None
    index.close()


def test_a_lost_entry_is_found_by_the_count(tmp_path: Path) -> None:
    """A batch that says another number of entries than there are makes the next load refuse the index."""
    index = filled(tmp_path / "index", 10)
    index.write(IndexBatch(removed=place_words(a_row(1)), blocks=10))
    with pytest.raises(IndexDamaged, match="should hold 10"):
        index.load()
    index.close()


@pytest.mark.parametrize("pattern", ["*.sst", "MANIFEST*", "CURRENT"])
def test_damaged_files_are_damage_not_a_crash(tmp_path: Path, pattern: str) -> None:
    """Bytes overwritten in RocksDB's files end in IndexDamaged at open or load. RocksDB may take those of its MANIFEST
    for the end that a power loss tore off: then it opens as it was before, and what it holds is whole.
    """
    index = filled(tmp_path / "index", 2000)
    index.rewrite([IndexBatch(rows=a_row(n), blocks=n + 1) for n in range(3000)])
    index.close()
    spoiled = sorted((tmp_path / "index").glob(pattern))
    assert spoiled
    for path in spoiled:
        data = bytearray(path.read_bytes())
        middle = len(data) // 2
        data[middle : middle + 64] = b"\xff" * len(data[middle : middle + 64])
        path.write_bytes(data)
    try:
        again = Index.open(tmp_path / "index", BUDGET)
        try:
            content = again.load()
        finally:
            again.close()
    except IndexDamaged:
        return
    assert pattern == "MANIFEST*"
    assert content is not None
    assert content.rows.tobytes() == some_rows(range(len(content.rows))).tobytes()


def test_pages_come_by_place_whatever_is_written_between_them(tmp_path: Path) -> None:
    """A page of entries that went meanwhile is passed over; what lies behind comes."""
    index = filled(tmp_path / "index", 1500)
    places: list[int] = []
    for rows in index.pages(100):
        places += place_words(rows).tolist()
        if len(places) == 100:
            index.write(IndexBatch(removed=place_words(some_rows(range(50, 250))), blocks=1300))
    wanted = place_words(some_rows([*range(100), *range(250, 1500)]))
    assert places == wanted.tolist()
    index.close()


def test_the_directory_stays_within_its_budget(tmp_path: Path) -> None:
    """Rewriting the same entries for ever, as touches do, never grows the directory beyond the budget."""
    path = tmp_path / "index"
    count = blocks_max(BUDGET)
    index = filled(path, count)
    state = some_rows(range(count))
    highest = 0
    for turn in range(60):
        changed = random.Random(turn).sample(range(count), 500)
        state["tokens"][changed] = turn
        index.write(IndexBatch(rows=state[changed], blocks=count))
        if index.compact_if_due() and index._copying is not None:
            index._copying.join()
        highest = max(highest, disk_bytes(path))
    index.close()
    assert highest <= BUDGET
    index = Index.open(path, BUDGET)
    content = index.load()
    index.close()
    assert content is not None
    assert content.rows.tobytes() == state.tobytes()


def test_what_is_written_during_a_compaction_is_in_the_new_database(tmp_path: Path) -> None:
    """Entries before and behind the place of the copy are added, changed and removed while it goes on."""
    index = filled(tmp_path / "index", 3000)
    state = dict.fromkeys(range(3000), 1)
    drawn = random.Random(3)
    compacting = threading.Thread(target=index.compact)
    compacting.start()
    turn = 1
    while compacting.is_alive() or turn < 20:
        turn += 1
        changed = drawn.sample(range(3300), 40)
        gone = [number for number in drawn.sample(sorted(state), 20) if number not in changed]
        state |= dict.fromkeys(changed, turn)
        for number in gone:
            del state[number]
        removed = place_words(some_rows(gone))
        index.write(IndexBatch(rows=some_rows(changed, turn), removed=removed, blocks=len(state)))
    compacting.join()
    assert index.compactions == 1
    content = index.load()
    index.close()
    assert content is not None
    wanted = np.concatenate([a_row(number, tokens) for number, tokens in sorted(state.items())])
    assert content.rows.tobytes() == wanted.tobytes()
    assert not (tmp_path / "index.new").exists()


def test_mending_waits_for_a_swap_and_finds_nothing_to_mend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A compaction refuses writes while it swaps; who takes that for a fault must not touch what it puts in place."""
    index = filled(tmp_path / "index", 3000)
    mending = threading.Thread(target=index.mend, args=([IndexBatch(blocks=0)],))
    swap = Index._swap

    def swap_while_another_mends(this: Index, fresh: Path) -> None:
        this.refusing = True
        mending.start()
        mending.join(timeout=0.3)
        swap(this, fresh)

    monkeypatch.setattr(Index, "_swap", swap_while_another_mends)
    assert index.compact()
    mending.join(timeout=10)
    assert not mending.is_alive()
    content = index.load()
    index.close()
    assert content is not None
    assert len(content.rows) == 3000


def test_only_one_next_database_is_made_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second compaction does nothing while one is under way."""
    index = filled(tmp_path / "index", 3000)
    swap, second = Index._swap, []

    def swap_beside_another(this: Index, fresh: Path) -> None:
        other = threading.Thread(target=lambda: second.append(this.compact()))
        other.start()
        other.join(timeout=10)
        swap(this, fresh)

    monkeypatch.setattr(Index, "_swap", swap_beside_another)
    assert index.compact()
    assert second == [False]
    assert index.compactions == 1
    index.close()


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
    assert len(content.rows) == 10
    assert not path.with_name("index.new").exists()


def test_reading_only_changes_no_byte(tmp_path: Path) -> None:
    path = tmp_path / "index"
    filled(path, 50).close()
    before = {item.name: item.read_bytes() for item in path.iterdir()}
    index = Index.open_read_only(path)
    content = index.load()
    index.close()
    assert content is not None
    assert len(content.rows) == 50
    assert {item.name: item.read_bytes() for item in path.iterdir()} == before
    assert ENTRY_DTYPE.itemsize == ENTRY_BYTES
