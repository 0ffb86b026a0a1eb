"""The segment files of one shard: which are free, which are open for which class and day, and how a new one is got.

Owns file numbers, generations and the count of files against the capacity. Does not know blocks, the index or which
segment is worth recycling. Invariants: never more files than ``segments_max``; a file that refuses a write is set
aside until the next sweep, not retried at once; the last free segment is left to moves, so that living blocks can
always be carried out of a victim.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path

from kvstore.capacity import SPARE_SEGMENTS, open_segments_max
from kvstore.daemon.files import Files
from kvstore.daemon.page_cache import PageCache
from kvstore.daemon.segment import DRAFT_SUFFIX, FREE, UNCLEAN, Segment, SegmentDamaged, SegmentHeader, segment_path
from kvstore.daemon.watermark import Watermark
from kvstore.errors import VolumeError

log = logging.getLogger(__name__)


class SegmentSet:
    """Belongs to the shard's one writer. ``new_generation`` gives 64 random bits: a generation never comes twice."""

    def __init__(
        self,
        files: Files,
        directory: Path,
        segment_bytes: int,
        segments_max: int,
        new_generation: Callable[[], int],
        watermark: Watermark | None = None,
        page_cache: PageCache = PageCache.KEEP,
    ) -> None:
        self._files = files
        self._directory = directory
        self._segment_bytes = segment_bytes
        self._new_generation = new_generation
        self.watermark = watermark or Watermark(files, directory)
        self.page_cache = page_cache
        self.segments_max = segments_max
        self.segments: dict[int, Segment] = {}
        """By number. Replaced as a whole, never changed: readers outside the writer's lock iterate over it."""
        self.free: list[int] = []
        self.unclean: list[int] = []
        """Released, but not free before their bytes are erased."""
        self._aside: set[int] = set()
        """Taken to be begun, which their files refused."""
        self.opened: dict[tuple[int, int], int] = {}
        self.may_grow = True
        """False after a file could not be created (a full file system): recycle instead, until the next sweep."""
        self.damaged = 0
        self.seal_later: Callable[[Segment], None] | None = None
        """Takes a full segment to be sealed beside the writer; None: it is sealed at once."""
        self._begun = 0

    @classmethod
    def open(
        cls,
        files: Files,
        directory: Path,
        segment_bytes: int,
        segments_max: int,
        new_generation: Callable[[], int],
        now_s: int,
        watermark: Watermark | None = None,
        page_cache: PageCache = PageCache.KEEP,
    ) -> SegmentSet:
        """Open every segment file; one whose first page is damaged is removed, since its records cannot be trusted.

        Raises VolumeError for one that cannot be opened at all: its blocks may be good.
        """
        found = cls(files, directory, segment_bytes, segments_max, new_generation, watermark, page_cache)
        directory.mkdir(exist_ok=True)
        for draft in directory.glob(f"*{DRAFT_SUFFIX}"):
            files.unlink(draft)
        for path in sorted(directory.glob("*.seg")):
            if not path.stem.isdigit() or segment_path(directory, int(path.stem)) != path:
                continue
            segment = found._open_one(path)
            if segment is not None:
                found._add(segment)
                if segment.header.class_byte == FREE:
                    (found.unclean if segment.header.day == UNCLEAN else found.free).append(segment.number)
        for segment in sorted(found.segments.values(), key=lambda item: (item.header.created_s, item.number)):
            found._count_begun(segment)
        return found

    def adopt_opened(self) -> None:
        """After recovery: of the unsealed segments of a class and day, the one begun last goes on being filled."""
        for segment in self.segments.values():
            segment.inherit()
        for segment in sorted(self.unsealed(), key=lambda item: item.begun, reverse=True):
            self.opened.setdefault((segment.header.class_byte, segment.header.day), segment.number)

    def unsealed(self) -> list[Segment]:
        """Segments that hold records, or may, and have no seal."""
        return [
            segment
            for segment in self.segments.values()
            if segment.header.class_byte != FREE and not segment.sealed and not segment.failed
        ]

    def seal_beside(self, offer: Callable[[Segment], None]) -> None:
        """From now on full segments are offered, to be sealed soon; those that an earlier process left are so now."""
        self.seal_later = offer
        opened = set(self.opened.values())
        for segment in self.unsealed():
            if segment.number not in opened:
                offer(segment)

    @property
    def free_count(self) -> int:
        """Segments that could be begun now, files yet to be created included."""
        growth = max(0, self.segments_max - len(self.segments)) if self.may_grow else 0
        return len(self.free) + growth

    @property
    def withheld(self) -> int:
        """How many of the segments could not be made now, since others have filled the file system."""
        missing = max(0, self.segments_max - len(self.segments))
        return max(0, missing - self.watermark.room_bytes() // self._segment_bytes) if missing else 0

    @property
    def held_back(self) -> bool:
        """Whether only the watermark stands against another segment: the volume is not full, its file system is."""
        return self.free_count > SPARE_SEGMENTS and not self.free and not self._may_create()

    def _may_create(self) -> bool:
        return self.watermark.allows(self._segment_bytes)

    @property
    def open_max(self) -> int:
        """Segments filled at once; beyond, the longest open is sealed."""
        return open_segments_max(self.segments_max)

    def open_for(self, class_byte: int, day: int, record_bytes: int, since: range | None = None) -> Segment | None:
        """The open segment of a class and day if the record still fits; a full one is sealed.

        ``since``: when its oldest record must have been written; None: any time.
        """
        number = self.opened.get((class_byte, day))
        if number is None:
            return None
        segment = self.segments[number]
        if segment.room_bytes >= record_bytes and (since is None or segment.oldest_s in since):
            return segment
        self._fill(segment)
        return None

    def begin(self, class_byte: int, day: int, now_s: int, *, spare: int) -> Segment | None:
        """Take a free segment for a class and day, leaving ``spare`` untouched; None if there is none that can be
        written.
        """
        while self.free_count > spare and (self.free or self._may_create()):
            segment = self._begin_one(class_byte, day, now_s)
            if segment is not None:
                self._count_begun(segment)
                self._limit_opened(keep=(class_byte, day))
                self.opened[(class_byte, day)] = segment.number
                return segment
        return None

    def retire(self, segment: Segment) -> None:
        """No more appends: seal it. A segment that cannot even be sealed stays readable and is set aside."""
        self._take_out(segment)
        self._seal(segment)

    def seal_if_still(self, segment: Segment, generation: int) -> None:
        """Seal a segment that was filled in this life, unless that was done, or it has begun another since."""
        if (
            segment.header.generation == generation
            and not segment.sealed
            and segment.number not in self.opened.values()
        ):
            self._seal(segment)

    def _fill(self, segment: Segment) -> None:
        """No more appends but those of puts under way; the seal may come later, and does where there are some."""
        self._take_out(segment)
        if self.seal_later is not None and (segment.promised_bytes or not segment.torn):
            self.seal_later(segment)
        else:
            self._seal(segment)

    def _take_out(self, segment: Segment) -> None:
        key = (segment.header.class_byte, segment.header.day)
        if self.opened.get(key) == segment.number:
            del self.opened[key]

    def end(self, segment: Segment, now_s: int, *, erase: bool = False) -> None:
        """End a life by a new generation; ``put_back`` makes it free. Raises OSError; the old content then stays valid.

        ``erase``: not before ``clean`` has left no byte of what it held; the segment remembers that across a restart.
        """
        day = UNCLEAN if erase else 0
        header = SegmentHeader(segment.number, self._new_generation(), FREE, day, now_s, self._segment_bytes)
        key = (segment.header.class_byte, segment.header.day)
        segment.reformat(header)
        if self.opened.get(key) == segment.number:
            del self.opened[key]

    def put_back(self, segment: Segment) -> None:
        """Free, or to be cleaned, is a segment whose life has ended, unless its file was let go meanwhile."""
        if self.segments.get(segment.number) is segment:
            (self.unclean if segment.header.day == UNCLEAN else self.free).append(segment.number)

    def clean(self, *, overwrite: bool) -> None:
        """Erase what segments held that were released for it; one whose disk refuses stays for the next time."""
        for number in list(self.unclean):
            segment = self.segments[number]
            try:
                segment.sync()  # the new generation first: after a power loss no record may be half there
                segment.erase_unused(overwrite=overwrite)
                segment.sync()
                segment.reformat(replace(segment.header, day=0))
            except OSError as error:
                log.error("segment_not_erased segment=%d problem=%r", number, error)
                continue
            segment.failed = False
            self.unclean.remove(number)
            self.free.append(number)

    def erase_unused(self, *, overwrite: bool) -> None:
        """Leave no byte of earlier lives, in free segments and behind the ends of others. Raises OSError."""
        for segment in self.segments.values():
            if segment.torn:
                segment.seal()
            segment.erase_unused(overwrite=overwrite)
        self.flush()

    def forget(self, segment: Segment) -> None:
        """The file was removed behind our back: let go of it, so that another can take its place."""
        key = (segment.header.class_byte, segment.header.day)
        if self.opened.get(key) == segment.number:
            del self.opened[key]
        if segment.number in self.free:
            self.free.remove(segment.number)
        if segment.number in self.unclean:
            self.unclean.remove(segment.number)
        self._aside.discard(segment.number)
        self.segments = {number: other for number, other in self.segments.items() if other is not segment}
        segment.close()

    def shrink(self) -> bool:
        """Remove one free file; False if none is free. Raises OSError, and sets a file aside that cannot be removed."""
        if not self.free:
            return False
        segment = self.segments[self.free[-1]]
        try:
            segment.sync()  # a file that comes back after a power loss comes back empty
            self._files.unlink(segment.path)
        except OSError:
            self._aside.add(self.free.pop())
            raise
        self._files.sync_directory(self._directory)
        self.forget(segment)
        return True

    def flush(self, segments: Collection[Segment] | None = None) -> None:
        """Make all appended bytes durable, or those of some segments. Raises an OSError after trying each of them."""
        problem: OSError | None = None
        for segment in self.segments.values() if segments is None else segments:
            try:
                segment.sync(if_dirty=True)
            except OSError as error:
                problem = error
        if problem is not None:
            raise problem

    def settle(self) -> None:
        """Seal what a failed append left open, so that no restart finds more in it than is known. Raises OSError."""
        for segment in self.segments.values():
            if segment.torn:
                segment.seal()

    def retry_failed(self) -> None:
        """Give files that refused a write, and the file system, another chance."""
        self.may_grow = True
        for segment in self.segments.values():
            if segment.failed and (segment.header.class_byte == FREE or segment.sealed or self._seal(segment)):
                segment.failed = False
        self.free += sorted(self._aside)
        self._aside.clear()

    def close(self) -> None:
        """Let go of the files, but not of one that is being read: its descriptor could soon be another file's."""
        closing, self.segments = self.segments, {}
        for segment in closing.values():
            if not segment.leases:
                segment.close()

    def _add(self, segment: Segment) -> None:
        if self.page_cache is PageCache.BYPASS:
            segment.go_around_cache()
        self.segments = {**self.segments, segment.number: segment}

    def _open_one(self, path: Path) -> Segment | None:
        try:
            segment = Segment.open(self._files, path)
            if segment.header.segment_bytes == self._segment_bytes:
                return segment
            segment.close()
            problem = "it has another size than the volume's segments"
        except SegmentDamaged as error:
            problem = str(error)
        except OSError as error:
            if error.errno != errno.EIO:
                raise VolumeError(f"segment {path} cannot be opened: {error.strerror}") from error
            problem = str(error)
        self.damaged += 1
        log.error("segment_damaged path=%s problem=%r: its blocks are lost and become misses", path, problem)
        try:
            self._files.unlink(path)
        except OSError as error:
            log.error("segment_stuck path=%s problem=%r: its bytes count against the capacity", path, error)
            self.segments_max -= 1
        return None

    def _begin_one(self, class_byte: int, day: int, now_s: int) -> Segment | None:
        generation = self._new_generation()
        if self.free:
            segment = self.segments[self.free.pop()]
            header = SegmentHeader(segment.number, generation, class_byte, day, now_s, self._segment_bytes)
            try:
                segment.reformat(header)
            except OSError as error:
                self._aside.add(segment.number)
                log.error("segment_set_aside segment=%d problem=%r", segment.number, error)
                return None
            return segment
        number = self._unused_number()
        header = SegmentHeader(number, generation, class_byte, day, now_s, self._segment_bytes)
        try:
            segment, reserved = Segment.create(self._files, self._directory, header)
        except OSError as error:
            log.error("segment_not_created problem=%r: recycling instead", error)
            self.may_grow = False
            return None
        if not reserved:
            log.warning("segment_not_preallocated path=%s: the file system cannot reserve space", segment.path)
        self._add(segment)
        return segment

    def _count_begun(self, segment: Segment) -> None:
        self._begun += 1
        segment.begun = self._begun

    def _unused_number(self) -> int:
        """The least number without a file (a file that could not be opened or removed keeps its number)."""
        number = 1
        while number in self.segments or segment_path(self._directory, number).exists():
            number += 1
        return number

    def _limit_opened(self, keep: tuple[int, int]) -> None:
        stale = [key for key in self.opened if key[0] == keep[0] and key[1] < keep[1]]
        longest = list(self.opened)[: max(0, len(self.opened) + 1 - self.open_max)]
        for key in dict.fromkeys([*stale, *longest]):
            self._fill(self.segments[self.opened[key]])

    def _seal(self, segment: Segment) -> bool:
        try:
            segment.seal()
        except OSError as error:
            segment.failed = True
            log.error("segment_not_sealed segment=%d problem=%r", segment.number, error)
            return False
        return True
