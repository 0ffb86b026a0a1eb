"""How a volume's capacity is divided, and how much of it one block takes: arithmetic of physical bytes.

Pure. Owns these numbers for the daemon, which keeps to them, and for whoever asks what would fit. Does not know
directories, files or records' content. Invariant: segments, index and catalog together stay within the capacity.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.errors import VolumeError
from kvstore.limits import (
    CAPACITY_BYTES_MIN,
    KIB,
    MIB,
    SEGMENT_BYTES_DEFAULT,
    SEGMENT_BYTES_MAX,
    SEGMENT_BYTES_MIN,
    TOMBSTONES_MAX,
)
from kvstore.record import HEADER_BYTES
from kvstore.units import format_bytes

RECORD_ALIGN = 4096
"""Records begin at multiples of this: the index then stays below 1/16 of the data, and a mark lies in one sector."""
FIRST_RECORD = RECORD_ALIGN
"""A segment's first page holds its header and seal."""
SEGMENTS_MIN = 3
"""One to write, one to evict, one spare for moving blocks."""
SPARE_SEGMENTS = 1
"""Free segments that only moves may take."""
INDEX_AMPLIFICATION = 5
"""Bytes on disk per byte of entry that the budget allows for: levels, WAL, and both copies during a compaction."""
INDEX_ENTRY_BYTES = 204
"""An entry of the index, and what its database adds to each."""
_TOMBSTONE_DISK_BYTES = 512


@dataclass(frozen=True, slots=True)
class VolumeLayout:
    """How the capacity of one directory is divided; all in physical bytes."""

    capacity_bytes: int
    segment_bytes: int
    index_budget_bytes: int
    catalog_budget_bytes: int

    @property
    def segments_max(self) -> int:
        """Files that fit; each may cost a page of file-system metadata beside its bytes."""
        rest = self.capacity_bytes - self.index_budget_bytes - self.catalog_budget_bytes
        return rest // (self.segment_bytes + 4 * KIB)

    @property
    def tombstones_max(self) -> int:
        """Tombstones that a share of the index budget can hold."""
        return min(TOMBSTONES_MAX, self.index_budget_bytes // (4 * _TOMBSTONE_DISK_BYTES))


def divide(capacity_bytes: int, segment_bytes: int | None = None) -> VolumeLayout:
    """Reserve index and catalog, the rest is segments. Raises VolumeError where no useful store fits.

    Without ``segment_bytes``: the default, or less so that there are about 32 segments.
    """
    if capacity_bytes < CAPACITY_BYTES_MIN:
        raise VolumeError(
            f"capacity of {format_bytes(capacity_bytes)} a data directory: it needs at least "
            f"{format_bytes(CAPACITY_BYTES_MIN)}"
        )
    if segment_bytes is None:
        fitting = 1 << max(0, (capacity_bytes // 32).bit_length() - 1)
        segment_bytes = min(SEGMENT_BYTES_DEFAULT, max(SEGMENT_BYTES_MIN, fitting))
    if not SEGMENT_BYTES_MIN <= segment_bytes <= SEGMENT_BYTES_MAX or segment_bytes % FIRST_RECORD:
        raise VolumeError(
            f"segments of {format_bytes(segment_bytes)}: use {format_bytes(SEGMENT_BYTES_MIN)}.."
            f"{format_bytes(SEGMENT_BYTES_MAX)}, a multiple of {format_bytes(FIRST_RECORD)}"
        )
    layout = VolumeLayout(
        capacity_bytes=capacity_bytes,
        segment_bytes=segment_bytes,
        index_budget_bytes=max(capacity_bytes // 64, 2 * MIB),
        catalog_budget_bytes=min(max(capacity_bytes // 256, MIB // 2), 64 * MIB),
    )
    if layout.segments_max < SEGMENTS_MIN:
        raise VolumeError(
            f"capacity of {format_bytes(capacity_bytes)} holds {layout.segments_max} segments of "
            f"{format_bytes(segment_bytes)}; it needs {SEGMENTS_MIN}: raise the capacity or choose smaller segments"
        )
    return layout


def record_bytes(stored_bytes: int) -> int:
    """Disk bytes of a record whose stored payload has this length."""
    return -(-(HEADER_BYTES + stored_bytes) // RECORD_ALIGN) * RECORD_ALIGN


def blocks_max(index_budget_bytes: int) -> int:
    """Blocks that an index of this budget holds."""
    return index_budget_bytes // (INDEX_AMPLIFICATION * INDEX_ENTRY_BYTES)


def open_segments_max(segments_max: int) -> int:
    """Segments filled at once; beyond, the longest open is sealed."""
    return max(2, segments_max // 8)
