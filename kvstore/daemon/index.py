"""The index: metadata of every stored block in RocksDB, a mirror on disk of the presence map.

Owns the entry's bytes, the database and its disk budget. Does not know payloads, policy or deadlines: an entry keeps
touches, and a deadline follows from touches and the rules in force. Invariants: the index is derived (segments
rebuild it); each batch is atomic and carries the count of entries, so that a silent loss is found at the next load;
its directory stays within the budget, because RocksDB's own files are compacted by rewriting and its log is cut;
after one failed write nothing is written until the whole index was rewritten, because RocksDB stays read-only after an
error of the disk, and a batch after a lost one would hide the loss.

rocksdb-py holds the GIL during calls and has no synced write: batches are small, and durability comes from segments.
Its iterators abort the process if they outlive their database: they never leave this module. The WAL survives kill
-9.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import struct
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import rocksdbpy

from kvstore.daemon.files import disk_bytes, sync_directory
from kvstore.daemon.record import TOUCHES_MAX, RecordHeader
from kvstore.errors import VolumeError
from kvstore.keys import BlockKey
from kvstore.limits import GIB, KEY_BYTES, KIB, MIB

INDEX_VERSION = 2

ENTRY_DTYPE = np.dtype(
    [
        ("key", "<u8", (4,)),
        ("segment", "<u4"),
        ("tokens", "<u4"),
        ("generation", "<u8"),
        ("offset", "<u8"),
        ("checksum", "<u8"),
        ("written_s", "<i8"),
        ("stored_bytes", "<u4"),
        ("payload_bytes", "<u4"),
        ("index", "<u4"),
        ("flags", "u1"),
        ("codec", "u1"),
        ("class_byte", "u1"),
        ("reserved", "u1"),
        ("digest", "<u8", (2,)),
        ("parent", "<u8", (4,)),
        ("space", "<u8", (4,)),
        ("touch_s", "<u4", (TOUCHES_MAX,)),
        ("touch_class", "u1", (TOUCHES_MAX,)),
    ]
)
"""One index value, and one row of the presence map: the same bytes."""

_ENTRY = struct.Struct(f"<32sIIQQQqIIIBBBB16s32s32s{TOUCHES_MAX}I{TOUCHES_MAX}B")
_PLACE = struct.Struct("<32xI4xQQQ8xII4xBB2x16s32x32s20x")
ENTRY_BYTES = _ENTRY.size
assert ENTRY_DTYPE.itemsize == ENTRY_BYTES == _PLACE.size

_BLOCK, _TOMBSTONE, _EXTENT, _META = b"b", b"t", b"s", b"m"
_COUNT_KEY = _META + b"count"
_COUNT = struct.Struct("<QI")
_EXTENT_VALUE = struct.Struct("<QQ")
_TOMBSTONE_VALUE = struct.Struct("<BQ")
_SPACE_AMPLIFICATION = 5
"""Bytes on disk per byte of entry that the budget allows for: levels, WAL, and both copies during a compaction."""

_REWRITE_BYTES_MIN = MIB
"""Free bytes without which a rewrite is not begun, beside those of the entries."""

Rows = npt.NDArray[np.void]
_RocksError = rocksdbpy.RocksDBException


class IndexDamaged(Exception):
    """The database cannot be opened or contradicts itself. Never leaves the daemon: the index is rebuilt."""


class IndexRefused(Exception):
    """The database took no write, and takes none until it is rewritten. Never leaves the daemon."""


@dataclass(frozen=True, slots=True)
class Extent:
    """How far the index knows a segment: records below ``end`` of this generation are in it."""

    generation: int
    end: int


@dataclass(frozen=True, slots=True)
class Tombstone:
    """Why (a ``Presence`` value) and when a block was removed."""

    reason: int
    when_s: int


@dataclass(frozen=True, slots=True)
class IndexBatch:
    """One atomic change of the index."""

    entries: Sequence[tuple[BlockKey, bytes]] = ()
    removed: Sequence[BlockKey] = ()
    extents: Mapping[int, Extent] = field(default_factory=dict)
    tombstones: Mapping[BlockKey, Tombstone | None] = field(default_factory=dict)
    """None forgets one."""
    blocks: int = 0
    """Entries that the index holds after this batch."""


@dataclass(frozen=True, slots=True)
class IndexContent:
    """Everything that an index holds. ``rows[i]`` belongs to ``keys[i]``."""

    keys: list[BlockKey]
    rows: Rows
    extents: dict[int, Extent]
    tombstones: dict[BlockKey, Tombstone]


def entry_of(header: RecordHeader) -> bytes:
    """The index value that a record gives by itself."""
    touches = header.touches[:TOUCHES_MAX]
    blank = [0] * (TOUCHES_MAX - len(touches))
    return _ENTRY.pack(
        header.key,
        header.segment,
        header.tokens,
        header.generation,
        header.offset,
        header.checksum,
        header.written_s,
        header.stored_bytes,
        header.payload_bytes,
        header.index,
        header.flags,
        header.codec,
        header.class_byte,
        0,
        header.token_digest,
        header.parent,
        header.space_id,
        *(touch[1] for touch in touches),
        *blank,
        *(touch[0] for touch in touches),
        *blank,
    )


def entries_of(headers: Iterable[RecordHeader]) -> Rows:
    """The index values of many records, as one array."""
    return np.frombuffer(b"".join([entry_of(header) for header in headers]), dtype=ENTRY_DTYPE)


def keys_in(rows: Rows) -> list[BlockKey]:
    """The keys of many index values."""
    data = np.ascontiguousarray(rows["key"]).tobytes()
    return [BlockKey(data[at : at + KEY_BYTES]) for at in range(0, len(data), KEY_BYTES)]


def place_in(entry: bytes) -> tuple[int, int, int, int, int, int, int, int, bytes, bytes]:
    """Of an index value: segment, generation, offset, checksum, stored and payload bytes, flags, codec, token digest,
    space id. (Ten times faster than through numpy.)
    """
    return _PLACE.unpack(entry)


def blocks_max(budget_bytes: int) -> int:
    """Entries that fit an index of this budget."""
    return budget_bytes // (_SPACE_AMPLIFICATION * (ENTRY_BYTES + 16))


class Index:
    """The open database. Thread-safe. Raises IndexDamaged from ``open`` and ``load``, IndexRefused from writing.

    ``refusing``: a write failed; ``rewrite`` mends it.
    """

    def __init__(self, path: Path, budget_bytes: int, database: rocksdbpy.RocksDB) -> None:
        self._path = path
        self._budget_bytes = budget_bytes
        self._database: rocksdbpy.RocksDB | None = database
        """None where a rewrite closed the old one and could not open the new one."""
        self._lock = threading.Lock()
        self._unmeasured_bytes = 0
        self.closed = False
        self.refusing = False

    @classmethod
    def open(cls, path: Path, budget_bytes: int) -> Index:
        """Open or create. An index that was being compacted when the process died is as it was before or after."""
        spare = _spare(path)
        if spare.exists() and not path.exists():
            with contextlib.suppress(FileNotFoundError):
                os.rename(spare, path)
        shutil.rmtree(spare, ignore_errors=True)
        shutil.rmtree(_fresh(path), ignore_errors=True)
        index = cls(path, budget_bytes, _open_database(path, budget_bytes))
        index._cut_logs()
        return index

    @classmethod
    def open_read_only(cls, path: Path) -> Index:
        """For checking: nothing is written, not even RocksDB's own recovery."""
        try:
            return cls(path, GIB, rocksdbpy.open_for_readonly(str(path), _options(GIB), False))
        except _RocksError as error:
            raise IndexDamaged(f"the index cannot be opened: {error}") from error

    @staticmethod
    def destroy(path: Path) -> None:
        """Remove an index, to be rebuilt."""
        for directory in (path, _spare(path), _fresh(path)):
            shutil.rmtree(directory, ignore_errors=True)

    def load(self) -> IndexContent | None:
        """The whole content; None for a new, empty index. Raises IndexDamaged if it is not what was last written."""
        with self._lock:
            try:
                return self._load()
            except _RocksError as error:
                raise IndexDamaged(f"the index cannot be read: {error}") from error
            except struct.error as error:
                raise IndexDamaged(f"the index holds a value of another length: {error}") from error

    def write(self, batch: IndexBatch) -> None:
        """Apply a batch. Raises IndexRefused; nothing of it is then applied, nor of any other before a rewrite."""
        rocks = rocksdbpy.WriteBatch()
        size = 0
        for key, value in batch.entries:
            rocks.add(_BLOCK + key, value)
            size += ENTRY_BYTES
        for key in batch.removed:
            rocks.delete(_BLOCK + key)
        for segment, extent in batch.extents.items():
            rocks.add(_EXTENT + struct.pack(">I", segment), _EXTENT_VALUE.pack(extent.generation, extent.end))
        for key, tombstone in batch.tombstones.items():
            if tombstone is None:
                rocks.delete(_TOMBSTONE + key)
            else:
                rocks.add(_TOMBSTONE + key, _TOMBSTONE_VALUE.pack(tombstone.reason, tombstone.when_s))
        rocks.add(_COUNT_KEY, _COUNT.pack(batch.blocks, INDEX_VERSION))
        size += 64 * (len(batch.removed) + len(batch.extents) + len(batch.tombstones) + 1)
        with self._lock:
            if self.refusing or self._database is None:
                self.refusing = True
                raise IndexRefused("an earlier write of the index failed")
            try:
                self._database.write(rocks)
            except _RocksError as error:
                self.refusing = True
                raise IndexRefused(str(error)) from error
            self._unmeasured_bytes += size

    def keys_after(self, cursor: bytes) -> Iterator[BlockKey]:
        """Keys of entries beyond ``cursor``, ascending, read in pages, so that nothing is held between two of them.

        Raises VolumeError.
        """
        page = 512
        while True:
            keys = self._page_after(cursor, page)
            yield from keys
            if len(keys) < page:
                return
            cursor = keys[-1]

    def compact_if_due(self, content: Iterable[IndexBatch]) -> bool:
        """Once a share of the budget has been written, measure; if over half of it is used, rewrite from ``content``.

        RocksDB's Python binding has no compaction call, and deleted entries and logs stay until levels merge.
        """
        with self._lock:
            if self._unmeasured_bytes < self._budget_bytes // 16 and self._unmeasured_bytes < 16 * MIB:
                return False
            self._unmeasured_bytes = 0
            self._cut_logs()
            if disk_bytes(self._path) <= self._budget_bytes // 2:
                return False
        self.rewrite(content)
        return True

    def rewrite(self, content: Iterable[IndexBatch]) -> None:
        """Replace the database by a fresh one with this content; a crash leaves the old or the new one.

        Raises IndexRefused or OSError; the old one is then still in use, if it could be opened again.
        """
        fresh = _fresh(self._path)
        shutil.rmtree(fresh, ignore_errors=True)
        try:
            rewritten = Index(fresh, self._budget_bytes, _open_database(fresh, self._budget_bytes))
            try:
                for batch in content:
                    rewritten.write(batch)
            finally:
                rewritten.close()
            with self._lock:
                self._swap(fresh)
        except IndexDamaged as error:
            raise IndexRefused(str(error)) from error
        finally:
            shutil.rmtree(fresh, ignore_errors=True)

    def has_room_to_rewrite(self, blocks: int) -> bool:
        """Whether the file system has room for a second index of so many entries."""
        try:
            facts = os.statvfs(self._path.parent)
        except OSError:
            return False
        needed = _SPACE_AMPLIFICATION * blocks * (ENTRY_BYTES + KEY_BYTES) // 2 + _REWRITE_BYTES_MIN
        return facts.f_bavail * facts.f_frsize >= needed

    def _swap(self, fresh: Path) -> None:
        """Put the fresh database in the place of the one in use, which refuses writes until that is done."""
        spare = _spare(self._path)
        self.refusing = True
        self._close_database()
        if self._path.exists():
            shutil.rmtree(spare, ignore_errors=True)
            os.rename(self._path, spare)
        os.rename(fresh, self._path)
        sync_directory(self._path.parent)
        shutil.rmtree(spare, ignore_errors=True)
        self._database = _open_database(self._path, self._budget_bytes)
        self.refusing = False

    def disk_bytes(self) -> int:
        return disk_bytes(self._path)

    def close(self) -> None:
        with self._lock:
            if not self.closed:
                self.closed = True
                self._close_database()

    def _close_database(self) -> None:
        database, self._database = self._database, None
        if database is not None:
            database.close()

    def _load(self) -> IndexContent | None:
        if self._database is None:
            raise IndexDamaged("the index is closed")
        count = self._database.get(_COUNT_KEY)
        keys: list[BlockKey] = []
        values: list[bytes] = []
        extents: dict[int, Extent] = {}
        tombstones: dict[BlockKey, Tombstone] = {}
        for key, value in _iterate(self._database, b""):
            kind = key[:1]
            if kind == _BLOCK and len(key) == 1 + KEY_BYTES and len(value) == ENTRY_BYTES:
                keys.append(BlockKey(key[1:]))
                values.append(value)
            elif kind == _EXTENT and len(key) == 5:
                extents[int.from_bytes(key[1:], "big")] = Extent(*_EXTENT_VALUE.unpack(value))
            elif kind == _TOMBSTONE and len(key) == 1 + KEY_BYTES:
                tombstones[BlockKey(key[1:])] = Tombstone(*_TOMBSTONE_VALUE.unpack(value))
            elif kind != _META:
                raise IndexDamaged("the index holds an entry of unknown form")
        if count is None:
            if keys or extents:
                raise IndexDamaged("the index has lost its count of entries")
            return None
        blocks, version = _COUNT.unpack(count)
        if version != INDEX_VERSION or blocks != len(keys):
            raise IndexDamaged(f"the index should hold {blocks} entries of version {version} and holds {len(keys)}")
        return IndexContent(keys, np.frombuffer(b"".join(values), dtype=ENTRY_DTYPE), extents, tombstones)

    def _page_after(self, cursor: bytes, count: int) -> list[BlockKey]:
        keys: list[BlockKey] = []
        with self._lock:
            if self._database is None:
                raise VolumeError("the index cannot be read now")
            try:
                for key, _ in _iterate(self._database, _BLOCK + cursor):
                    if key[:1] != _BLOCK or len(keys) == count:
                        break
                    if key[1:] != cursor:
                        keys.append(BlockKey(key[1:]))
            except _RocksError as error:
                raise VolumeError(f"the index cannot be read: {error}") from error
        return keys

    def _cut_logs(self) -> None:
        """RocksDB never rotates its human-readable log here (the binding has no option): keep it from growing."""
        for entry in self._path.glob("LOG*"):
            with contextlib.suppress(OSError):
                if entry.name != "LOG":
                    entry.unlink()
                elif entry.stat().st_blocks * 512 > 128 * KIB:
                    os.truncate(entry, 0)


def _iterate(database: Any, begin: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Pairs from ``begin`` on. Only ``next`` is used: the binding's ``len`` consumes the iterator."""
    iterator = database.iterator(mode="from", key=begin, direction=1)
    try:
        while True:
            try:
                key, value = next(iterator)
            except StopIteration:
                return
            yield key, value
    finally:
        iterator.close()


def _open_database(path: Path, budget_bytes: int) -> rocksdbpy.RocksDB:
    try:
        path.mkdir(parents=True, exist_ok=True)
        return rocksdbpy.open(str(path), _options(budget_bytes))
    except (_RocksError, OSError) as error:
        raise IndexDamaged(f"the index cannot be opened: {error}") from error


def _options(budget_bytes: int) -> Any:
    options: Any = rocksdbpy.Option()
    options.create_if_missing(True)
    options.set_write_buffer_size(min(max(budget_bytes // 32, 64 * KIB), 16 * MIB))
    options.set_max_background_jobs(2)
    options.set_max_open_files(64)
    return options


def _spare(path: Path) -> Path:
    return path.with_name(path.name + ".old")


def _fresh(path: Path) -> Path:
    return path.with_name(path.name + ".new")
