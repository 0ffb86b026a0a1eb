"""What a start makes of segments and index that do not agree."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

import pytest

from kvstore.daemon.files import Files
from kvstore.daemon.fsck import check
from kvstore.daemon.node import Node
from kvstore.daemon.record import MARK_OFFSET, RECORD_ALIGN
from kvstore.daemon.segment import FIRST_RECORD
from kvstore.daemon.volume import Volume
from kvstore.errors import VolumeError, VolumeFormat, VolumeInUse
from kvstore.keys import BlockName, SpaceId
from kvstore.limits import MIB
from kvstore.store import FLAG_APPROXIMATE, GetStatus, Presence, PutOutcome
from kvstore.testing import ManualClock
from kvstore.traffic import AGENT, CHAT
from tests.support.nodes import open_node, payload_of, puts_of, read
from tests.support.spaces import a_chain, a_space

SIZE = 20_000
RECORD = -(-(256 + SIZE) // 4096) * 4096


def prepared(path: Path, blocks: int = 10) -> tuple[ManualClock, bytes, list]:  # type: ignore[type-arg]
    """A store with one chain, abandoned as by kill -9."""
    clock = ManualClock()
    node = open_node(path, clock)
    space = node.register_space(a_space())
    names = list(a_chain(space, blocks).names)
    node.put(space, puts_of(names, SIZE), traffic_class=AGENT)
    node.abandon()
    return clock, space, names


def presence(path: Path, clock: ManualClock, space: bytes, names: list) -> list[int]:  # type: ignore[type-arg]
    node = open_node(path, clock)
    found = node.lookup(space, names).presence.tolist()  # type: ignore[arg-type]
    for name, reason in zip(names, found, strict=True):
        if reason == Presence.PRESENT:
            assert read(node, space, name, SIZE) == (GetStatus.OK, payload_of(name, SIZE))  # type: ignore[arg-type]
    node.abandon()
    return found


def test_records_beyond_the_index_are_adopted(tmp_path: Path) -> None:
    """The index as it was before the last put: what was put since is found in the segments."""
    clock, space, names = prepared(tmp_path, 4)
    shutil.copytree(tmp_path / "volume-0" / "index", tmp_path / "old")
    node = open_node(tmp_path, clock)
    more = list(a_chain(space, 9).names)[4:]  # type: ignore[arg-type]
    node.put(space, puts_of(more, SIZE), traffic_class=AGENT)  # type: ignore[arg-type]
    node.abandon()
    shutil.rmtree(tmp_path / "volume-0" / "index")
    shutil.copytree(tmp_path / "old", tmp_path / "volume-0" / "index")
    assert check(tmp_path / "volume-0").adoptable_records == 5
    assert presence(tmp_path, clock, space, [*names, *more]) == [Presence.PRESENT] * 9


def test_a_truncated_last_record_is_the_only_loss(tmp_path: Path) -> None:
    """Without an index the file ends in the middle of the last record: the others are all there."""
    clock, space, names = prepared(tmp_path, 5)
    path = tmp_path / "volume-0" / "segments" / "00000001.seg"
    whole = path.read_bytes()
    for kept in (0, 1, 255, 256, 257, SIZE // 2, 255 + SIZE):
        shutil.rmtree(tmp_path / "volume-0" / "index", ignore_errors=True)
        path.write_bytes(whole[: FIRST_RECORD + 4 * RECORD + kept])
        found = presence(tmp_path, clock, space, names)
        assert found[:4] == [Presence.PRESENT] * 4, kept
        assert found[4] != Presence.PRESENT, kept


def test_index_entries_of_a_recycled_segment_are_dropped(tmp_path: Path) -> None:
    """A crash between recycling a segment and telling the index: its blocks are misses, and say evicted."""
    clock, space, names = prepared(tmp_path)
    shutil.copytree(tmp_path / "volume-0" / "index", tmp_path / "old")
    node = open_node(tmp_path, clock)
    node.delete(space, [name.key for name in names])  # type: ignore[arg-type]
    node.sweep(apply=True)
    node.abandon()
    shutil.rmtree(tmp_path / "volume-0" / "index")
    shutil.copytree(tmp_path / "old", tmp_path / "volume-0" / "index")
    assert check(tmp_path / "volume-0").clean
    assert presence(tmp_path, clock, space, names) == [Presence.EVICTED] * 10


def test_a_damaged_segment_header_costs_its_blocks_and_no_more(tmp_path: Path) -> None:
    """The records cannot be trusted without their generation: misses, quarantined, and the store goes on."""
    clock, space, names = prepared(tmp_path, 60)
    path = tmp_path / "volume-0" / "segments" / "00000001.seg"
    data = bytearray(path.read_bytes())
    data[20] ^= 1
    path.write_bytes(data)
    report = check(tmp_path / "volume-0")
    assert report.findings_by_kind["segment-damaged"] == 1
    found = presence(tmp_path, clock, space, names)
    lost = MIB // RECORD
    assert found == [Presence.QUARANTINED] * lost + [Presence.PRESENT] * (60 - lost)


def test_a_foreign_segment_file_is_not_believed(tmp_path: Path) -> None:
    """A segment copied under another number, or from another store, serves nothing."""
    clock, space, names = prepared(tmp_path)
    segments = tmp_path / "volume-0" / "segments"
    shutil.copy(segments / "00000001.seg", segments / "00000007.seg")
    (segments / "notes.txt").write_text("not ours")
    assert check(tmp_path / "volume-0").findings_by_kind == {"segment-damaged": 1}
    assert presence(tmp_path, clock, space, names) == [Presence.PRESENT] * 10
    assert (segments / "notes.txt").exists()


def test_fsck_finds_and_repairs(tmp_path: Path) -> None:
    """A flipped payload bit, a broken header and a lost index entry are each named; after the repair all is clean."""
    clock, space, names = prepared(tmp_path)
    path = tmp_path / "volume-0" / "segments" / "00000001.seg"
    data = bytearray(path.read_bytes())
    data[FIRST_RECORD + 300] ^= 1
    data[FIRST_RECORD + 3 * RECORD + 8] ^= 1
    path.write_bytes(data)
    before = {item: item.read_bytes() for item in tmp_path.rglob("*") if item.is_file() and item.name != "LOCK"}
    report = check(tmp_path / "volume-0")
    assert report.findings_by_kind == {"record-damaged": 1, "records-damaged": 1, "entry-without-record": 1}
    assert not report.clean
    assert {item: item.read_bytes() for item in before} == before, "a check writes nothing"
    assert "record-damaged" in report.to_text()
    repaired = check(tmp_path / "volume-0", repair=True)
    assert repaired.repaired
    assert check(tmp_path / "volume-0").clean
    found = presence(tmp_path, clock, space, names)
    assert [place for place, reason in enumerate(found) if reason != Presence.PRESENT] == [0, 3]


def test_fsck_names_a_spoiled_catalog_and_index(tmp_path: Path) -> None:
    clock, space, names = prepared(tmp_path)
    (tmp_path / "volume-0" / "catalog.json").write_text("{}")
    (tmp_path / "volume-0" / "index" / "CURRENT").write_text("nonsense")
    report = check(tmp_path / "volume-0", repair=True)
    assert report.findings_by_kind == {"catalog-damaged": 1, "index-damaged": 1}
    assert (tmp_path / "volume-0" / "catalog.json.damaged").exists()
    assert check(tmp_path / "volume-0").clean
    assert presence(tmp_path, clock, space, names) == [Presence.PRESENT] * 10


@pytest.mark.parametrize("locked", [True, False])
def test_fsck_reads_a_volume_that_takes_no_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, locked: bool) -> None:
    """As after the kernel made a failing disk read-only: damage is named; a repair and a second check are refused."""
    prepared(tmp_path)
    volume = tmp_path / "volume-0"
    path = volume / "segments" / "00000001.seg"
    data = bytearray(path.read_bytes())
    data[FIRST_RECORD + 300] ^= 1
    path.write_bytes(data)
    if not locked:
        (volume / "LOCK").unlink()
    really_open = os.open

    def only_to_read(path: str | Path, flags: int, mode: int = 0o777, **options: int) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT) and Path(path).is_relative_to(tmp_path):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        return really_open(path, flags, mode, **options)

    monkeypatch.setattr(os, "open", only_to_read)
    assert check(volume).findings_by_kind == {"record-damaged": 1}
    with pytest.raises(VolumeError, match="Read-only"):
        check(volume, repair=True)
    with closing(Volume.open(volume, create=False, read_only=True)), pytest.raises(VolumeInUse):
        check(volume)


def test_fsck_refuses_what_it_must_not_touch(tmp_path: Path) -> None:
    with pytest.raises(VolumeFormat):
        check(tmp_path)
    node = open_node(tmp_path, ManualClock())
    with pytest.raises(VolumeInUse):
        check(tmp_path / "volume-0")
    node.close()


def test_what_a_power_loss_left_behind_a_gap_is_found_and_stays_deleted(tmp_path: Path) -> None:
    """The disk kept the third record and lost the second, and the index knows neither. The third is found; once
    both are deleted, no later scan, also of all, brings them back.
    """
    clock, volume = ManualClock(), tmp_path / "volume-0"
    node = open_node(tmp_path, clock)
    space = node.register_space(a_space())
    names = list(a_chain(space, 4).names)
    node.put(space, puts_of(names[:1], 60_000), traffic_class=AGENT)
    node.abandon()
    shutil.copytree(volume / "index", tmp_path / "index-before")
    node = open_node(tmp_path, clock)
    node.put(space, puts_of(names[1:3], 60_000), traffic_class=AGENT)
    node.abandon()
    shutil.rmtree(volume / "index")
    shutil.copytree(tmp_path / "index-before", volume / "index")
    with open(volume / "segments" / "00000001.seg", "r+b") as stream:
        stream.seek(4096 + 61_440)
        stream.write(bytes(61_440))
    node = open_node(tmp_path, clock)
    found = node.lookup(space, names).presence.tolist()
    assert found == [Presence.PRESENT, Presence.NEVER, Presence.PRESENT, Presence.NEVER]
    assert node.delete(space, [name.key for name in names[1:3]]) == 1
    assert node.put(space, puts_of(names[3:], 60_000), traffic_class=AGENT) == [PutOutcome.STORED]
    node.abandon()
    shutil.rmtree(volume / "index")
    node = open_node(tmp_path, clock)
    present = [bool(item == Presence.PRESENT) for item in node.lookup(space, names).presence]
    assert present == [True, False, False, True]
    node.close()


def test_a_record_wins_over_a_dead_one_that_the_index_still_names(tmp_path: Path) -> None:
    """Deleted and put anew, approximate this time; the index has lost both. The dead exact record is no better."""
    clock, space, names = prepared(tmp_path, 1)
    index = tmp_path / "volume-0" / "index"
    shutil.copytree(index, tmp_path / "old")
    node = open_node(tmp_path, clock)
    node.delete(SpaceId(space), [names[0].key])
    node.put(SpaceId(space), puts_of(names, SIZE, FLAG_APPROXIMATE), traffic_class=AGENT, ack="disk")
    node.abandon()
    shutil.rmtree(index)
    shutil.copytree(tmp_path / "old", index)
    assert presence(tmp_path, clock, space, names) == [Presence.PRESENT]


class _ForgetfulFiles(Files):
    """Loses, when told to, every mark and segment header since the last flush of its file; nothing else."""

    def __init__(self) -> None:
        self._lost: dict[int, list[tuple[int, bytes]]] = {}

    def pwritev(self, fd: int, views: Sequence[memoryview], offset: int) -> int:
        if offset == 0 or offset % RECORD_ALIGN == MARK_OFFSET:
            self._lost.setdefault(os.fstat(fd).st_ino, []).append((offset, os.pread(fd, len(views[0]), offset)))
        return super().pwritev(fd, views, offset)

    def fdatasync(self, fd: int) -> None:
        super().fdatasync(fd)
        self._lost.pop(os.fstat(fd).st_ino, None)

    def lose(self, segments: Path) -> None:
        for path in segments.glob("*.seg"):
            with path.open("r+b") as stream:
                for offset, before in reversed(self._lost.get(path.stat().st_ino, [])):
                    stream.seek(offset)
                    stream.write(before)


def _replaced(node: Node, clock: ManualClock, space: SpaceId, names: list[BlockName]) -> None:
    node.put(space, puts_of(names, SIZE, FLAG_APPROXIMATE), traffic_class=AGENT, ack="disk")
    assert set(node.put(space, puts_of(names, SIZE), traffic_class=AGENT, ack="disk")) == {PutOutcome.REPLACED}


def _put_anew(node: Node, clock: ManualClock, space: SpaceId, names: list[BlockName]) -> None:
    node.put(space, puts_of(names, SIZE), traffic_class=AGENT, ack="disk")
    clock.advance(4 * 86_400)
    assert set(node.put(space, puts_of(names, SIZE), traffic_class=CHAT, ack="disk")) == {PutOutcome.STORED}


def _moved(node: Node, clock: ManualClock, space: SpaceId, names: list[BlockName]) -> None:
    node.put(space, puts_of(names, SIZE), traffic_class=AGENT, ack="disk")
    node.touch(space, names[:2], traffic_class=CHAT)
    clock.advance(4 * 86_400)
    assert node.sweep(apply=True).blocks_rewritten == 2


def _swept(node: Node, clock: ManualClock, space: SpaceId, names: list[BlockName]) -> None:
    node.put(space, puts_of(names, SIZE), traffic_class=AGENT, ack="disk")
    node.touch(space, names[2:], traffic_class=CHAT)
    clock.advance(4 * 86_400)
    assert sum(effect.blocks for effect in node.sweep(apply=True).removed) == 2


def _recycled(node: Node, clock: ManualClock, space: SpaceId, names: list[BlockName]) -> None:
    node.put(space, puts_of(names, SIZE), traffic_class=AGENT, ack="disk")
    clock.advance(4 * 86_400)
    assert node.sweep(apply=True).segments_freed == 1


@pytest.mark.parametrize("live", [_replaced, _put_anew, _moved, _swept, _recycled])
def test_what_is_deleted_stays_away_though_one_power_loss_took_marks_and_the_next_the_index(
    tmp_path: Path, live: Callable[[Node, ManualClock, SpaceId, list[BlockName]], None]
) -> None:
    """A record that died and whose death the disk lost, while the index kept it, is one that no deletion would find."""
    clock, files, volume = ManualClock(), _ForgetfulFiles(), tmp_path / "volume-0"
    node = open_node(tmp_path, clock, files=files)
    space = node.register_space(a_space())
    names = list(a_chain(space, 10).names)
    live(node, clock, space, names)
    node.abandon()
    files.lose(volume / "segments")
    node = open_node(tmp_path, clock)
    node.delete(space, [name.key for name in names])
    node.abandon()
    shutil.rmtree(volume / "index")
    node = open_node(tmp_path, ManualClock())
    assert Presence.PRESENT not in node.lookup(space, names).presence.tolist()
    assert not node.scan()[0]
    node.close()
