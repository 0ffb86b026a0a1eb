"""One data directory: its lock and its format file.

Owns the directory's layout (names, format version, volume id); how its capacity is divided is ``kvstore.capacity``'s.
Does not know records, classes or eviction. Invariants: one process at a time; a directory of another format, or with
foreign files, is never written to.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import uuid
from pathlib import Path
from typing import Any

from kvstore.capacity import SEGMENTS_MIN as SEGMENTS_MIN
from kvstore.capacity import VolumeLayout as VolumeLayout
from kvstore.capacity import divide as divide
from kvstore.daemon.files import Files, sync_directory, write_atomically
from kvstore.daemon.segment import FIRST_RECORD
from kvstore.daemon.watermark import free_min_of
from kvstore.errors import VolumeError, VolumeFormat, VolumeInUse
from kvstore.limits import (
    SEGMENT_BYTES_MAX,
    SEGMENT_BYTES_MIN,
)
from kvstore.units import format_bytes, format_bytes_short

VOLUME_VERSION = 1
LOCK_NAME, FORMAT_NAME, CATALOG_NAME = "LOCK", "FORMAT", "catalog.json"
SEGMENTS_NAME, INDEX_NAME, SCRUB_NAME, WEAR_NAME = "segments", "index", "scrub.json", "wear.json"
INGEST_NAME = "ingest.json"
_KIND = "reprise-kv volume"
_BYSTANDERS = ("lost+found", LOCK_NAME, "endpoints.json")
_BYSTANDER_SUFFIXES = (".sock", ".log", ".pid", ".toml", ".tmp")

log = logging.getLogger(__name__)


class Volume:
    """A locked data directory. ``close`` releases the lock."""

    def __init__(self, path: Path, volume_id: bytes, segment_bytes: int | None, lock_fd: int) -> None:
        self.path = path
        self.volume_id = volume_id
        self.segment_bytes = segment_bytes
        """As fixed when the directory was made; None if it has no format file yet."""
        self._lock_fd = lock_fd

    @classmethod
    def open(cls, path: Path, *, create: bool, read_only: bool = False) -> Volume:
        """Lock the directory and check its format. Raises VolumeInUse, VolumeFormat, VolumeError.

        With ``create`` an empty directory is made into a volume by the first ``fix_segment_bytes``. ``read_only``:
        it is only looked at, also where its file system takes no byte.
        """
        try:
            if create:
                path.mkdir(parents=True, exist_ok=True)
            elif not (path / FORMAT_NAME).exists():
                raise VolumeFormat(f"{path} is not a store directory: it has no {FORMAT_NAME} file")
            _identify(path)  # before the lock makes its file there, and again under it
            lock_fd = _lock(path, read_only=read_only)
        except FileExistsError as error:
            raise VolumeError(f"data directory {path} cannot be used: it is no directory") from error
        except OSError as error:
            raise VolumeError(f"data directory {path} cannot be used: {error.strerror}") from error
        try:
            volume_id, segment_bytes = _identify(path)
            return cls(path, volume_id, segment_bytes, lock_fd)
        except BaseException:
            os.close(lock_fd)
            raise

    def fix_segment_bytes(self, segment_bytes: int) -> None:
        """Record the segment size of a new volume; another size than the recorded one is refused."""
        if self.segment_bytes == segment_bytes:
            return
        if self.segment_bytes is not None:
            raise VolumeError(
                f"{self.path} was made with segments of {format_bytes(self.segment_bytes)}, not "
                f"{format_bytes(segment_bytes)}: "
                "leave the segment size out, or use another directory"
            )
        content = {
            "kind": _KIND,
            "version": VOLUME_VERSION,
            "volume": self.volume_id.hex(),
            "segment_bytes": segment_bytes,
        }
        try:
            # First the format file: a directory with anything else and without it would be taken for a foreign one.
            write_atomically(self.path / FORMAT_NAME, json.dumps(content, indent=1).encode() + b"\n")
            self.segments_path.mkdir(exist_ok=True)
            sync_directory(self.path)
        except OSError as error:
            raise VolumeError(f"data directory {self.path} cannot be used: {error.strerror}") from error
        self.segment_bytes = segment_bytes

    @property
    def segments_path(self) -> Path:
        return self.path / SEGMENTS_NAME

    @property
    def index_path(self) -> Path:
        return self.path / INDEX_NAME

    @property
    def catalog_path(self) -> Path:
        return self.path / CATALOG_NAME

    def close(self) -> None:
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1


def check_file_system(
    path: Path, capacity_bytes: int, free_min_bytes: int | None = 0, files: Files | None = None
) -> int:
    """Raise VolumeError if the file system could never hold the capacity; warn if it cannot now.

    The directory need not exist yet, and is not made. Returns the bytes to leave free, see ``watermark.free_min_of``.
    """
    try:
        place = next(place for place in (path, *path.absolute().parents) if place.exists())
        facts = os.statvfs(place)
        space = (files or Files()).space(place)
    except OSError as error:
        raise VolumeError(f"data directory {path} cannot be used: {error.strerror}") from error
    if capacity_bytes > facts.f_blocks * facts.f_frsize:
        raise VolumeError(
            f"capacity of {format_bytes(capacity_bytes)} is more than the whole file system of {path} "
            f"({format_bytes_short(facts.f_blocks * facts.f_frsize)}): lower the capacity"
        )
    if capacity_bytes > facts.f_bavail * facts.f_frsize:
        log.warning("capacity_beyond_free_space path=%s free_bytes=%d", path, facts.f_bavail * facts.f_frsize)
    return free_min_of(path, space, capacity_bytes, free_min_bytes)


def _lock(path: Path, *, read_only: bool) -> int:
    says_whose = True
    try:
        fd = os.open(path / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if not read_only or error.errno not in (errno.EROFS, errno.EACCES):
            raise
        known = path / (LOCK_NAME if (path / LOCK_NAME).exists() else FORMAT_NAME)
        fd, says_whose = os.open(known, os.O_RDONLY | os.O_CLOEXEC), False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        holder = os.pread(fd, 32, 0).decode(errors="replace").strip() or "unknown"
        os.close(fd)
        raise VolumeInUse(f"data directory {path} is in use by process {holder}") from error
    except OSError:
        os.close(fd)
        raise
    if says_whose:
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    return fd


def _identify(path: Path) -> tuple[bytes, int | None]:
    """Volume id and segment size from the format file; a new id for a directory without foreign files."""
    try:
        text = (path / FORMAT_NAME).read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        foreign = [
            name
            for name in sorted(os.listdir(path))
            if name not in _BYSTANDERS and not name.startswith(".") and not name.endswith(_BYSTANDER_SUFFIXES)
        ]
        if foreign:
            raise VolumeFormat(
                f"{path} is not a store directory and not empty (it has {foreign[0]!r}): choose an empty one"
            ) from None
        return uuid.uuid4().bytes, None
    try:
        content: dict[str, Any] = json.loads(text)
        kind, version = content["kind"], content["version"]
        volume_id, segment_bytes = bytes.fromhex(content["volume"]), int(content["segment_bytes"])
    except (ValueError, KeyError, TypeError) as error:
        raise VolumeFormat(f"{path / FORMAT_NAME} is not a store's format file") from error
    if kind != _KIND or version != VOLUME_VERSION:
        raise VolumeFormat(
            f"{path} has format {kind!r} version {version}, this program reads version {VOLUME_VERSION}: "
            "use the program that wrote it, or an empty directory"
        )
    if not SEGMENT_BYTES_MIN <= segment_bytes <= SEGMENT_BYTES_MAX or segment_bytes % FIRST_RECORD:
        raise VolumeFormat(f"{path / FORMAT_NAME} names segments of {segment_bytes} bytes")
    return volume_id, segment_bytes
