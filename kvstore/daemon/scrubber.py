"""The background scrub of one shard: every living record is read from its device and verified, a little at a time.

Owns the pace, the position, and what was found. Does not judge what becomes of a damaged block: that is the shard's, as
after a failed read. Invariants: on average no more than the rate, and less while clients move much; the segment under
the scrub is leased for one turn only; nothing that clients read is pushed out of the page cache; a restart goes on
about where the scrub was.
"""

from __future__ import annotations

import contextlib
import json
import logging
import mmap
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from kvstore.daemon.files import write_atomically
from kvstore.daemon.ledger import Ledger, Place
from kvstore.daemon.record import RecordDamaged, RecordDead
from kvstore.daemon.scrub import verify_record
from kvstore.daemon.segment import FREE
from kvstore.daemon.uncached import UncachedFile
from kvstore.limits import MIB
from kvstore.store import Clock

TURN_BYTES = 4 * MIB
"""Read in one turn, or one record if that is longer."""
PASS_EVERY_S = 86_400.0
"""A pass begins no earlier than this after the one before began."""
BUSY_BYTES_PER_S = 64 * MIB
"""Payload that clients move while the scrub stands back ..."""
GIVE_WAY_TURNS_MAX = 60
"""... for so many seconds at most: then it takes one turn, so that a node that is always busy is scrubbed too."""
SAVE_EVERY_S = 60.0
_IDLE_S = 1.0
_STOP_S_MAX = 10.0

log = logging.getLogger(__name__)

Failed = Callable[[Place, Exception, float], object]
"""What the shard does about a record that could not be read: a miss from now on, and a quarantine if it is damage."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far the scrub is, kept across restarts. Times are seconds since the epoch, 0 for never.

    ``segment``: the last one that was verified wholly in this pass.
    """

    segment: int = 0
    passes: int = 0
    pass_began_s: float = 0.0
    last_pass_s: float = 0.0


class Scrubber:
    """``start`` runs it on a thread until ``stop``; ``turn`` is one step of it. Numbers are read by any thread."""

    def __init__(self, ledger: Ledger, failed: Failed, path: Path, bytes_per_s: int, clock: Clock) -> None:
        self._ledger = ledger
        self._failed = failed
        self._path = path
        self._bytes_per_s = bytes_per_s
        self._clock = clock
        self._progress = _load(path)
        self._saved_s = time.monotonic()
        self._due: list[Place] = []
        """Records of segment ``_listed`` that are yet to be verified, the last one first."""
        self._listed = self._progress.segment
        self._buffer = mmap.mmap(-1, TURN_BYTES)
        self._bytes = self._damaged = self._quarantined = self._gave_way = 0
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="scrub", daemon=True)
        self._thread.start()

    def stop(self, *, save: bool = True) -> None:
        """End the thread after its turn. Idempotent."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join(timeout=_STOP_S_MAX)
        if save:
            self._save()

    def stats(self) -> dict[str, float]:
        """What was done since the start; passes, progress (0..1) and the end of the last whole pass are kept longer."""
        segments = max([*self._ledger.segments.segments, 1])
        return {
            "scrub_bytes": self._bytes,
            "scrub_damaged": self._damaged,
            "scrub_quarantined": self._quarantined,
            "scrub_gave_way": self._gave_way,
            "scrub_passes": self._progress.passes,
            "scrub_progress": min(1.0, self._progress.segment / segments),
            "scrub_last_pass_s": self._progress.last_pass_s,
        }

    def turn(self) -> int:
        """Verify about ``TURN_BYTES`` of one segment; returns the bytes read. 0: this pass is over."""
        if not self._due and not self._find_due():
            return 0
        place = self._due[0]
        with self._ledger.lock:
            segment = self._ledger.segments.segments.get(place.segment.number)
            if segment is not place.segment or segment.header.generation != place.generation:
                self._due.clear()
                return self.turn()
            segment.leases += 1
        try:
            return self._verify_some(place)
        finally:
            with self._ledger.lock:
                segment.leases -= 1

    def _verify_some(self, first: Place) -> int:
        file = UncachedFile(first.segment.files, first.segment.fd)
        done = 0
        try:
            while self._due and not self._stopped.is_set():
                size = self._due[-1].record_bytes
                if done and done + size > TURN_BYTES:
                    break
                self._verify(file, self._due.pop(), size)
                done += size
        finally:
            file.close()
        self._bytes += done
        return done

    def _verify(self, file: UncachedFile, due: Place, size: int) -> None:
        if len(self._buffer) < size:
            self._buffer = mmap.mmap(-1, size)
        view = memoryview(self._buffer)[:size]
        try:
            count = file.read_into(view, due.offset)
            verify_record(view[:count], due.segment.header, due.offset, due.fingerprint)
        except RecordDead as error:
            self._failed(due, error, self._clock.now_s())
        except (RecordDamaged, OSError) as error:
            self._found(due, error)

    def _found(self, due: Place, error: Exception) -> None:
        """A record that is still the block's is damaged; one that was moved or removed meanwhile is nobody's."""
        if not self._ledger.is_at(due):
            return
        self._damaged += 1
        self._failed(due, error, self._clock.now_s())
        self._quarantined += not self._ledger.is_at(due)

    def _find_due(self) -> bool:
        """List the records of the next segment that has any; False once the pass is over."""
        if not self._progress.pass_began_s:
            self._progress = replace(self._progress, pass_began_s=self._clock.now_s())
        while not self._due:
            self._progress = replace(self._progress, segment=self._listed)
            with self._ledger.lock:
                numbers = [
                    number
                    for number, segment in self._ledger.segments.segments.items()
                    if number > self._listed and segment.header.class_byte != FREE
                ]
                if not numbers:
                    break
                self._listed = min(numbers)
                self._due = self._records_of(self._listed)
        if not self._due:
            self._end_pass(self._clock.now_s())
        return bool(self._due)

    def _records_of(self, number: int) -> list[Place]:
        presence = self._ledger.presence
        slots = presence.in_segment(number)
        found = [place for slot in slots.tolist() if (place := self._ledger.place(slot))]
        return sorted(found, key=lambda place: -place.offset)

    def _end_pass(self, now_s: float) -> None:
        """Count a pass that came to its end, once; begin the next one when its time has come."""
        progress = self._progress
        if progress.last_pass_s < progress.pass_began_s:
            self._progress = progress = replace(progress, passes=progress.passes + 1, last_pass_s=now_s)
            self._save()
        if not 0 <= now_s - progress.pass_began_s < PASS_EVERY_S:  # also if the clock went back
            self._progress = replace(progress, segment=0, pass_began_s=now_s)
            self._listed = 0

    def _run(self) -> None:
        pause_s = _IDLE_S
        moved, gave_way = self._moved(), 0
        while not self._stopped.wait(pause_s):
            busy = self._moved() - moved > BUSY_BYTES_PER_S * pause_s
            moved = self._moved()
            if busy and gave_way < GIVE_WAY_TURNS_MAX:
                gave_way += 1
                self._gave_way += 1
                pause_s = _IDLE_S
                continue
            gave_way = 0
            try:
                done = self.turn()
            except Exception:  # the thread's seam: the scrub goes on with the next segment
                log.exception("scrub_failed segment=%d", self._progress.segment)
                self._due.clear()
                done = 0
            pause_s = max(done / self._bytes_per_s, 0.001) if done else _IDLE_S
            if time.monotonic() - self._saved_s > SAVE_EVERY_S:
                self._save()

    def _moved(self) -> int:
        """Payload bytes that clients read and wrote so far."""
        counters = self._ledger.counters
        return counters.bytes_read + counters.bytes_written

    def _save(self) -> None:
        self._saved_s = time.monotonic()
        with contextlib.suppress(OSError):  # the next pass begins earlier or later than it should, no more
            write_atomically(self._path, json.dumps(asdict(self._progress)).encode() + b"\n")


def _load(path: Path) -> Progress:
    """What was saved; a first pass where nothing was, or nothing that can be read."""
    try:
        found = Progress(**json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError):
        return Progress()
    numbers = asdict(found).values()
    sound = all(type(number) in (int, float) and np.isfinite(number) and number >= 0 for number in numbers)
    return found if sound else Progress()


def merge_progress(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Stats of several scrubs as one: what was done is added up; of passes and progress the least counts."""
    if not parts:
        return {}
    least = ("scrub_passes", "scrub_progress", "scrub_last_pass_s")
    return {name: (min if name in least else sum)(part[name] for part in parts) for name in parts[0]}
