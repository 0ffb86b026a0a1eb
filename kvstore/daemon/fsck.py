"""Offline check of one data directory, and its repair.

Owns the comparison of segments with the index and the catalog's check. Does not serve. Invariants: without ``repair``
nothing is written; a repair only ever makes bad records dead, sets a bad catalog aside, removes an unreadable
segment, or removes the index so that the next start rebuilds it; what a killed daemon leaves behind (a torn tail,
records that the index does not know yet, entries of removals that were under way) is counted, and is not a finding:
the next start settles it. Bytes are overdue that lie here longer after their class's maximum age than a sweep may take.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping, Set
from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from kvstore.daemon.catalog import CatalogContent, decode_catalog
from kvstore.daemon.files import Files, FilesToRead
from kvstore.daemon.index import Index, IndexContent, IndexDamaged, entry_of, keys_in
from kvstore.daemon.record import Mark, MarkReason, RecordHeader
from kvstore.daemon.scour import is_erased, stale_headers
from kvstore.daemon.scrub import Verdict, scrub_segment
from kvstore.daemon.segment import FIRST_RECORD, FREE, Segment, SegmentDamaged
from kvstore.daemon.volume import Volume
from kvstore.errors import VolumeFormat
from kvstore.keys import BlockKey

ERASED_WITHIN_S = 3600
"""What has reached its maximum age is erased within this time, while a node runs."""
FINDINGS_MAX = 1000
"""Findings listed one by one; all are counted."""
Progress = Callable[[int, int], None]
"""Called with segments done and segments in all."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One fault. ``kind`` is a constant word; ``where`` names file and offset, or a key."""

    kind: str
    where: str
    detail: str
    repaired: bool


@dataclass(slots=True)
class FsckReport:
    """What was found. Bytes are of all segment files: live + dead + free + pages == total, or it is a finding."""

    data_dir: str
    findings: list[Finding] = field(default_factory=list)
    findings_by_kind: Counter[str] = field(default_factory=Counter)
    segments: int = 0
    segments_free: int = 0
    live_records: int = 0
    dead_records: int = 0
    adoptable_records: int = 0
    index_entries: int = 0
    index_stale: int = 0
    overdue_records: int = 0
    live_bytes: int = 0
    dead_bytes: int = 0
    free_bytes: int = 0
    page_bytes: int = 0
    total_bytes: int = 0

    @property
    def clean(self) -> bool:
        return not self.findings_by_kind

    @property
    def repaired(self) -> bool:
        """Whether every listed finding was repaired."""
        return all(finding.repaired for finding in self.findings)

    def to_text(self) -> str:
        """For people: sums, then every finding."""
        lines = [
            f"{self.data_dir}: {'clean' if self.clean else f'{sum(self.findings_by_kind.values())} findings'}",
            f"  segments {self.segments} ({self.segments_free} free), records {self.live_records} live, "
            f"{self.dead_records} dead, {self.adoptable_records} that the next start will adopt",
            f"  index entries {self.index_entries}, of which {self.index_stale} the next start will drop",
            f"  bytes {self.live_bytes} live + {self.dead_bytes} dead + {self.free_bytes} free + {self.page_bytes} "
            f"segment headers = {self.total_bytes}",
        ]
        for finding in self.findings:
            state = " (repaired)" if finding.repaired else ""
            lines.append(f"  {finding.kind} {finding.where}: {finding.detail}{state}")
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "findings_by_kind": dict(self.findings_by_kind), "clean": self.clean}

    def add(self, kind: str, where: str, detail: str, *, repaired: bool = False) -> None:
        self.findings_by_kind[kind] += 1
        if len(self.findings) < FINDINGS_MAX:
            self.findings.append(Finding(kind, where, detail, repaired))


@dataclass(frozen=True, slots=True)
class _AgeLimits:
    """How old what a class wrote may become, by class byte; and what is held by law."""

    max_age_s: Mapping[int, int]
    held: Set[BlockKey]

    @classmethod
    def of(cls, content: CatalogContent, now_s: int) -> _AgeLimits:
        held = {pin.key for pin in content.pins.values() if pin.hold and (pin.until_s == 0 or pin.until_s > now_s)}
        rules = content.policy.rules.rules
        return cls({rule.class_byte: rule.max_age_s for rule in rules if rule.max_age_s}, held)

    def is_overdue(self, class_byte: int, key: BlockKey, written_s: int, now_s: int) -> bool:
        max_age_s = self.max_age_s.get(class_byte)
        if max_age_s is None or key in self.held or is_erased(key):
            return False
        return written_s + max_age_s + ERASED_WITHIN_S < now_s


NO_LIMITS = _AgeLimits({}, frozenset())


@dataclass(slots=True)
class _Check:
    """One run over one directory."""

    volume: Volume
    report: FsckReport
    repair: bool
    now_s: int
    limits: _AgeLimits = NO_LIMITS
    live: dict[BlockKey, list[RecordHeader]] = field(default_factory=dict)
    dead: set[tuple[int, int]] = field(default_factory=set)
    generations: dict[int, int] = field(default_factory=dict)


def check(
    data_dir: Path,
    repair: bool = False,
    progress: Progress | None = None,
    *,
    now_s: int = 0,
    catalog: Path | None = None,
) -> FsckReport:
    """Check one directory that no daemon uses. ``catalog``: the node's, where it lies in another directory.

    Raises VolumeInUse, VolumeFormat, VolumeError; of a given catalog also OSError, ValueError.
    """
    volume = Volume.open(data_dir, create=False, read_only=not repair)
    try:
        run = _Check(volume, FsckReport(str(data_dir)), repair, now_s)
        _check_catalog(run)
        if catalog is not None:
            run.limits = _AgeLimits.of(decode_catalog(catalog.read_bytes()), now_s)
        content = _check_index(run)
        _check_segments(run, content, progress or (lambda done, total: None))
        if content is not None:
            _compare(run, content)
        return run.report
    finally:
        volume.close()


def _check_catalog(run: _Check) -> None:
    path = run.volume.catalog_path
    try:
        run.limits = _AgeLimits.of(decode_catalog(path.read_bytes()), run.now_s)
    except FileNotFoundError:
        return  # only the first directory of a node has one
    except (ValueError, KeyError, TypeError, VolumeFormat, OSError) as error:
        if run.repair:
            os.replace(path, path.with_name(path.name + ".damaged"))
        run.report.add("catalog-damaged", str(path), str(error), repaired=run.repair)


def _check_index(run: _Check) -> IndexContent | None:
    """The index's content, or None if there is none to compare with."""
    path = run.volume.index_path
    if not path.exists():
        return None
    index: Index | None = None
    try:
        index = Index.open_read_only(path)
        return index.load()
    except IndexDamaged as error:
        run.report.add("index-damaged", str(path), str(error), repaired=run.repair)
    finally:
        if index is not None:
            index.close()
    if run.repair:
        Index.destroy(path)
    return None


def _check_segments(run: _Check, content: IndexContent | None, progress: Progress) -> None:
    files = Files() if run.repair else FilesToRead()
    paths = sorted(run.volume.segments_path.glob("*.seg"))
    for done, path in enumerate(paths):
        progress(done, len(paths))
        run.report.segments += 1
        try:
            segment = Segment.open(files, path)
        except OSError as error:
            run.report.add("segment-unreadable", path.name, str(error))
            continue
        except SegmentDamaged as error:
            if run.repair:
                path.unlink(missing_ok=True)
            run.report.add("segment-damaged", path.name, str(error), repaired=run.repair)
            continue
        try:
            _check_segment(run, segment, content)
        finally:
            segment.close()
    progress(len(paths), len(paths))


def _check_segment(run: _Check, segment: Segment, content: IndexContent | None) -> None:
    report = run.report
    size = segment.header.segment_bytes
    run.generations[segment.number] = segment.header.generation
    length = segment.files_bytes()
    if length != size:
        if run.repair:
            os.ftruncate(segment.fd, min(length, size))
            segment.files.allocate(segment.fd, size)
        report.add("segment-cut", segment.path.name, f"the file has {length} bytes, not {size}", repaired=run.repair)
    extent = content.extents.get(segment.number) if content is not None else None
    known_end = FIRST_RECORD
    if extent is not None and extent.generation == segment.header.generation:
        known_end = extent.end
    scan_end = max(known_end, segment.end)
    end = FIRST_RECORD
    for verdict in scrub_segment(segment, scan_end):
        end = _count(run, segment, verdict, known_end, indexed=content is not None)
    segment.end = max(end, scan_end)
    _check_age(run, segment)
    used = max(end, scan_end) - FIRST_RECORD
    report.segments_free += segment.header.class_byte == FREE
    report.free_bytes += size - FIRST_RECORD - used
    report.page_bytes += FIRST_RECORD
    report.total_bytes += size
    if size != run.volume.segment_bytes:
        report.add("segment-size", segment.path.name, f"{size} bytes in a volume of {run.volume.segment_bytes}")
    if end < scan_end:
        report.dead_bytes += scan_end - end
        report.add("records-missing", segment.path.name, f"records reach {end}, but were written up to {scan_end}")


def _check_age(run: _Check, segment: Segment) -> None:
    """Find what should have been erased by now: records, living or dead, and what earlier lives of the file left."""
    if not run.limits.max_age_s:
        return
    here = (
        (step.header.class_byte, step.header.key, step.header.written_s)
        for step in (
            segment.scan(FIRST_RECORD, segment.end, payloads=False) if segment.header.class_byte != FREE else ()
        )
        if step.header is not None
    )
    stale = (
        (int(header["class_byte"]), BlockKey(header["key"].tobytes()), int(header["written_s"]))
        for header in stale_headers(segment)
    )
    count = sum(run.limits.is_overdue(*found, run.now_s) for found in chain(here, stale))
    if count:
        run.report.overdue_records += count
        run.report.add("overdue", segment.path.name, f"{count} blocks outlived their maximum age by more than an hour")


def _count(run: _Check, segment: Segment, verdict: Verdict, known_end: int, *, indexed: bool) -> int:
    """Add one verdict to the sums; returns where it ends."""
    report = run.report
    where = f"{segment.path.name}+{verdict.offset}"
    if verdict.header is None:
        report.dead_bytes += verdict.hole_bytes
        if run.repair:
            segment.fill_hole(verdict.offset, verdict.hole_bytes, run.now_s)
        report.add("records-damaged", where, f"{verdict.hole_bytes} bytes: {verdict.problem}", repaired=run.repair)
        return verdict.offset + verdict.hole_bytes
    size = verdict.header.record_bytes
    if verdict.is_live:
        report.live_records += 1
        report.live_bytes += size
        report.adoptable_records += indexed and verdict.offset >= known_end
        run.live.setdefault(verdict.header.key, []).append(verdict.header)
    else:
        report.dead_records += 1
        report.dead_bytes += size
        run.dead.add((segment.number, verdict.offset))
    if verdict.problem:
        if run.repair:
            segment.mark(verdict.offset, Mark(MarkReason.QUARANTINED, run.now_s))
        report.add("record-damaged", where, verdict.problem, repaired=run.repair)
    return verdict.offset + size


def _compare(run: _Check, content: IndexContent) -> None:
    """Index against segments, both ways."""
    report = run.report
    report.index_entries = len(content.rows)
    faults_before = sum(report.findings_by_kind.values())
    indexed: set[tuple[int, int]] = set()
    for key, row in zip(keys_in(content.rows), content.rows, strict=True):
        place = (int(row["segment"]), int(row["offset"]))
        indexed.add(place)
        if run.generations.get(place[0]) != int(row["generation"]) or place in run.dead:
            report.index_stale += 1
            continue
        header = next((item for item in run.live.get(key, ()) if (item.segment, item.offset) == place), None)
        if header is None:
            report.add("entry-without-record", key.hex(), f"segment {place[0]} offset {place[1]}", repaired=run.repair)
        elif not _agrees(row, header):
            report.add("entry-differs", key.hex(), f"segment {place[0]} offset {place[1]}", repaired=run.repair)
    for key, headers in run.live.items():
        for header in headers:
            extent = content.extents.get(header.segment)
            known = extent is not None and extent.generation == header.generation and header.offset < extent.end
            if known and (header.segment, header.offset) not in indexed:
                where = f"segment {header.segment} offset {header.offset}"
                report.add("record-without-entry", key.hex(), where, repaired=run.repair)
    if run.repair and sum(report.findings_by_kind.values()) > faults_before:
        Index.destroy(run.volume.index_path)


def _agrees(row: np.void, header: RecordHeader) -> bool:
    """Whether an entry says what the record says; touches may have moved on since."""
    own = np.frombuffer(entry_of(header), dtype=row.dtype)[0]
    names = [name for name in row.dtype.names or () if not name.startswith("touch")]
    return all(np.array_equal(row[name], own[name]) for name in names)
