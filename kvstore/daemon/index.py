"""The index: metadata of every stored block in RocksDB, a mirror on disk of the presence map.

Owns the entry's bytes, the database and its disk budget. Does not know payloads, policy or deadlines: an entry keeps
touches, and a deadline follows from touches and the rules in force. Entries are found by place (segment and offset), so
that memory needs no full key to change or drop one. Invariants: the index is derived (segments rebuild it); each batch
is atomic and carries the count of entries, so that a silent loss is found at the next load; its directory stays within
the budget, because it is copied into a fresh database when it is half full, beside the writers, and its log is cut;
after one failed write nothing is written until the whole index was rewritten, because RocksDB stays read-only after an
error of the disk, and a batch after a lost one would hide the loss.

rocksdb-py holds the GIL during calls and has no synced write: batches are small, and durability comes from segments.
Its iterators abort the process if they outlive their database: they never leave this module. The WAL survives kill
-9.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import struct
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import rocksdbpy

from kvstore.capacity import INDEX_AMPLIFICATION, INDEX_ENTRY_BYTES
from kvstore.daemon.files import disk_bytes, sync_directory
from kvstore.daemon.record import HEADER_BYTES, RECORD_ALIGN, TOUCHES_MAX, RecordHeader
from kvstore.daemon.tombstones import Tombstone
from kvstore.keys import BlockKey
from kvstore.limits import GIB, KEY_BYTES, KIB, MIB

INDEX_VERSION = 3

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
"""One index value."""

_ENTRY = struct.Struct(f"<32sIIQQQqIIIBBBB16s32s32s{TOUCHES_MAX}I{TOUCHES_MAX}B")
_ENTRY_PLACE = struct.Struct("<32xI12xQ")
"""Segment and offset in an entry."""
_PLACE = struct.Struct(">II")
"""Segment and page, in the order of keys."""
ENTRY_BYTES = _ENTRY.size
assert ENTRY_DTYPE.itemsize == ENTRY_BYTES == INDEX_ENTRY_BYTES - 16

_BLOCK, _TOMBSTONE, _EXTENT, _META = b"b", b"t", b"s", b"m"
_COUNT_KEY = _META + b"count"
_COUNT = struct.Struct("<QI")
_EXTENT_VALUE = struct.Struct("<QQ")
_FINGERPRINT = struct.Struct(">Q")
_TOMBSTONE_VALUE = struct.Struct("<BQ")
_JOIN_S_MAX = 30.0
PAGE_AT_START = 65_536
"""Entries read at once while nobody else waits."""
log = logging.getLogger(__name__)

_PAGE = 256
"""Pairs that are copied, or entries that are read, under one hold of the lock: about a millisecond."""
_PAUSE_S = 0.001
"""Between two pages that are copied: as long as one takes."""

_REWRITE_BYTES_MIN = MIB
"""Free bytes without which a rewrite is not begun, beside those of the entries."""

Rows = npt.NDArray[np.void]
Places = npt.NDArray[np.uint64]
"""Segment in the upper half, page of 4 KiB in the lower."""
NO_ROWS: Rows = np.zeros(0, dtype=ENTRY_DTYPE)
NO_PLACES: Places = np.zeros(0, dtype=np.uint64)
_PLACE_BITS = np.uint64(32)
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
class IndexBatch:
    """One atomic change of the index. ``removed``: places whose entries go. ``tombstones`` by fingerprint."""

    rows: Rows = field(default_factory=lambda: NO_ROWS)
    removed: Places = field(default_factory=lambda: NO_PLACES)
    extents: Mapping[int, Extent] = field(default_factory=dict)
    tombstones: Mapping[int, Tombstone | None] = field(default_factory=dict)
    """None forgets one."""
    blocks: int = 0
    """Entries that the index holds after this batch."""


@dataclass(frozen=True, slots=True)
class IndexSummary:
    """What an index holds beside its entries, and how many of these there should be."""

    blocks: int
    extents: dict[int, Extent]
    tombstones: dict[int, Tombstone]


@dataclass(frozen=True, slots=True)
class IndexContent:
    """Everything that an index holds."""

    rows: Rows
    extents: dict[int, Extent]
    tombstones: dict[int, Tombstone]


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
    return np.frombuffer(bytearray(b"".join([entry_of(header) for header in headers])), dtype=ENTRY_DTYPE)


def keys_in(rows: Rows) -> list[BlockKey]:
    """The keys of many index values."""
    data = np.ascontiguousarray(rows["key"]).tobytes()
    return [BlockKey(data[at : at + KEY_BYTES]) for at in range(0, len(data), KEY_BYTES)]


def record_bytes_in(rows: Rows) -> npt.NDArray[np.int64]:
    """Disk bytes of the records of index values."""
    pages = (rows["stored_bytes"].astype(np.int64) + (HEADER_BYTES + RECORD_ALIGN - 1)) // RECORD_ALIGN
    return np.asarray(pages * RECORD_ALIGN, dtype=np.int64)


def place_words(rows: Rows) -> Places:
    """Where the records of index values lie."""
    pages: Places = rows["offset"] // np.uint64(RECORD_ALIGN)
    return (rows["segment"].astype(np.uint64) << _PLACE_BITS) | pages


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
        self._building = threading.RLock()  # held by whoever makes the next database: there is one place for it
        self._unmeasured_bytes = 0
        self._copying: threading.Thread | None = None
        self._copy: Index | None = None
        """A fresh database that is being filled from this one; what is written meanwhile goes into both."""
        self.closed = False
        self.refusing = False
        self.compactions = 0

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
        summary = self.summary()
        if summary is None:
            return None
        rows = np.concatenate([NO_ROWS, *self.pages(PAGE_AT_START)])
        if len(rows) != summary.blocks:
            raise IndexDamaged(f"the index should hold {summary.blocks} entries and holds {len(rows)}")
        return IndexContent(rows, summary.extents, summary.tombstones)

    def summary(self) -> IndexSummary | None:
        """All but the entries; None for a new, empty index. Raises IndexDamaged."""
        with self._lock:
            try:
                return self._summary()
            except (_RocksError, struct.error) as error:
                raise IndexDamaged(f"the index cannot be read: {error}") from error

    def pages(self, page: int = _PAGE) -> Iterator[Rows]:
        """All entries by place, in pages, so that nothing is held between two of them. Raises IndexDamaged."""
        begin = _BLOCK
        while True:
            pairs = self._pairs_from(begin, page)
            mine = [pair for pair in pairs if pair[0].startswith(_BLOCK)]
            if mine:
                yield _rows_of(mine)
            if len(mine) < page:
                return
            begin = mine[-1][0] + b"\0"

    def values(self, places: Places) -> tuple[Rows, npt.NDArray[np.int64]]:
        """The entries at some places, and which of the places have one. Raises IndexDamaged."""
        keys = place_keys(places)
        found: list[tuple[bytes, bytes]] = []
        at: list[int] = []
        for begin in range(0, len(keys), _PAGE):
            with self._lock:
                if self._database is None:
                    raise IndexDamaged("the index cannot be read now")
                try:
                    for place, key in enumerate(keys[begin : begin + _PAGE], begin):
                        value = self._database.get(key)
                        if value is not None:
                            found.append((key, value))
                            at.append(place)
                except _RocksError as error:
                    raise IndexDamaged(f"the index cannot be read: {error}") from error
        return _rows_of(found), np.array(at, dtype=np.int64)

    def write(self, batch: IndexBatch) -> None:
        """Apply a batch. Raises IndexRefused; nothing of it is then applied, nor of any other before a rewrite."""
        rocks, size = _encoded(batch)
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
            if self._copy is not None:
                try:
                    self._copy.write(batch)
                except IndexRefused:
                    self._copy = None  # whoever fills it sees that, and gives up

    def compact_if_due(self) -> bool:
        """Once a share of the budget has been written, measure; if over half of it is used, begin to ``compact``.

        RocksDB's Python binding has no compaction call, and deleted entries and logs stay until levels merge.
        """
        with self._lock:
            if self._unmeasured_bytes < self._budget_bytes // 16 and self._unmeasured_bytes < 16 * MIB:
                return False
            self._unmeasured_bytes = 0
            self._cut_logs()
            if self._copying is not None and self._copying.is_alive():
                return False
            if self.closed or self.refusing or disk_bytes(self._path) <= self._budget_bytes // 2:
                return False
            self._copying = threading.Thread(target=self.compact, name="index", daemon=True)
            self._copying.start()
        return True

    def compact(self) -> bool:
        """Copy everything into a fresh database, a page at a time beside readers and writers, and go on with that.

        False where that did not come about, also because another one is being made.
        """
        if not self._building.acquire(blocking=False):
            return False
        try:
            return self._compact(_fresh(self._path))
        finally:
            self._building.release()

    def _compact(self, fresh: Path) -> bool:
        shutil.rmtree(fresh, ignore_errors=True)
        copy: Index | None = None
        try:
            copy = Index(fresh, self._budget_bytes, _open_database(fresh, self._budget_bytes))
            with self._lock:
                self._copy = copy
            begin = b""
            while True:
                with self._lock:
                    if self.closed or self.refusing or self._copy is not copy:
                        return False
                    pairs = self._pairs_locked(begin, _PAGE)
                    if not pairs:
                        self._copy = None
                        copy.close()
                        self._swap(fresh)
                        self.compactions += 1
                        return True
                    copy._put_pairs(pairs)
                    begin = pairs[-1][0] + b"\0"
                time.sleep(_PAUSE_S)  # whoever waits for the lock or the interpreter goes first
        except (IndexDamaged, IndexRefused, OSError, _RocksError) as error:
            log.error("index_not_compacted problem=%r", error)
            return False
        finally:
            with self._lock:
                self._copy = None
            if copy is not None:
                copy.close()
            shutil.rmtree(fresh, ignore_errors=True)

    def rewrite(self, content: Iterable[IndexBatch]) -> None:
        """Replace the database by a fresh one with this content; a crash leaves the old or the new one.

        Raises IndexRefused or OSError; the old one is then still in use, if it could be opened again.
        """
        with self._building:
            self._rewrite(_fresh(self._path), content)

    def mend(self, content: Iterable[IndexBatch]) -> bool:
        """``rewrite``, and True, unless the index takes writes again: a compaction refuses them while it swaps."""
        with self._building:
            if not self.refusing:
                return False
            self.rewrite(content)
            return True

    def _rewrite(self, fresh: Path, content: Iterable[IndexBatch]) -> None:
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
        needed = INDEX_AMPLIFICATION * blocks * INDEX_ENTRY_BYTES // 2 + _REWRITE_BYTES_MIN
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
            self.closed = True
            copying = self._copying
        if copying is not None and copying is not threading.current_thread():
            copying.join(timeout=_JOIN_S_MAX)
        with self._lock:
            self._close_database()

    def _close_database(self) -> None:
        database, self._database = self._database, None
        if database is not None:
            database.close()

    def _summary(self) -> IndexSummary | None:
        if self._database is None:
            raise IndexDamaged("the index is closed")
        count = self._database.get(_COUNT_KEY)
        if count is None:
            if next(_iterate(self._database, b""), None) is not None:
                raise IndexDamaged("the index has lost its count of entries")
            return None
        blocks, version = _COUNT.unpack(count)
        if version != INDEX_VERSION:
            raise IndexDamaged(f"the index has version {version}, not {INDEX_VERSION}")
        extents: dict[int, Extent] = {}
        tombstones: dict[int, Tombstone] = {}
        for key, value in _iterate(self._database, _META):
            if key.startswith(_EXTENT):
                extents[int.from_bytes(key[1:], "big")] = Extent(*_EXTENT_VALUE.unpack(value))
            elif key.startswith(_TOMBSTONE) and len(key) == 9:
                tombstones[int.from_bytes(key[1:], "big")] = Tombstone(*_TOMBSTONE_VALUE.unpack(value))
            elif not key.startswith(_META):
                raise IndexDamaged("the index holds an entry of unknown form")
        return IndexSummary(blocks, extents, tombstones)

    def _pairs_from(self, begin: bytes, count: int) -> list[tuple[bytes, bytes]]:
        with self._lock:
            return self._pairs_locked(begin, count)

    def _pairs_locked(self, begin: bytes, count: int) -> list[tuple[bytes, bytes]]:
        if self._database is None:
            raise IndexDamaged("the index cannot be read now")
        iterator: Any = self._database.iterator(mode="from", key=begin, direction=1)
        try:
            return list(islice(iterator, count))
        except _RocksError as error:
            raise IndexDamaged(f"the index cannot be read: {error}") from error
        finally:
            iterator.close()

    def _put_pairs(self, pairs: list[tuple[bytes, bytes]]) -> None:
        rocks = rocksdbpy.WriteBatch()
        for key, value in pairs:
            rocks.add(key, value)
        if self._database is not None:
            self._database.write(rocks)

    def _cut_logs(self) -> None:
        """RocksDB never rotates its human-readable log here (the binding has no option): keep it from growing."""
        for entry in self._path.glob("LOG*"):
            with contextlib.suppress(OSError):
                if entry.name != "LOG":
                    entry.unlink()
                elif entry.stat().st_blocks * 512 > 128 * KIB:
                    os.truncate(entry, 0)


def place_keys(places: Places) -> list[bytes]:
    """Database keys of entries."""
    data = places.astype(">u8").tobytes()
    return [_BLOCK + data[at : at + 8] for at in range(0, len(data), 8)]


def _rows_of(pairs: list[tuple[bytes, bytes]]) -> Rows:
    """Entries from their pairs. Raises IndexDamaged."""
    data = b"".join([value for _, value in pairs])
    if len(data) != ENTRY_BYTES * len(pairs):
        raise IndexDamaged("the index holds an entry of unknown form")
    rows: Rows = np.frombuffer(data, dtype=ENTRY_DTYPE)
    keys = b"".join([key[1:] for key, _ in pairs])
    if keys != place_words(rows).astype(">u8").tobytes():
        raise IndexDamaged("an entry of the index lies at another place than it says")
    return rows


def _encoded(batch: IndexBatch) -> tuple[Any, int]:
    """A batch for RocksDB, and about how many bytes it writes."""
    rocks = rocksdbpy.WriteBatch()
    for key in place_keys(batch.removed):
        rocks.delete(key)
    data = batch.rows.tobytes()
    for at in range(0, len(data), ENTRY_BYTES):
        segment, offset = _ENTRY_PLACE.unpack_from(data, at)
        rocks.add(_BLOCK + _PLACE.pack(segment, offset // RECORD_ALIGN), data[at : at + ENTRY_BYTES])
    for segment, extent in batch.extents.items():
        rocks.add(_EXTENT + struct.pack(">I", segment), _EXTENT_VALUE.pack(extent.generation, extent.end))
    for fingerprint, tombstone in batch.tombstones.items():
        key = _TOMBSTONE + _FINGERPRINT.pack(fingerprint)
        if tombstone is None:
            rocks.delete(key)
        else:
            rocks.add(key, _TOMBSTONE_VALUE.pack(tombstone.reason, tombstone.when_s))
    rocks.add(_COUNT_KEY, _COUNT.pack(batch.blocks, INDEX_VERSION))
    others = len(batch.removed) + len(batch.extents) + len(batch.tombstones) + 1
    return rocks, len(data) + 64 * others


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
