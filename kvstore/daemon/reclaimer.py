"""Making room: carries out what ``reclaim`` chooses, and the sweep of expired blocks.

Owns recycling and moving of records. Does not decide the order. Invariants: runs only under the shard's writer lock;
a victim is recycled only after its survivors' copies are durable and known; one segment that cannot be recycled is
passed over.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from kvstore.daemon.index import IndexRefused, blocks_max, entries_of
from kvstore.daemon.ledger import Ledger, Place
from kvstore.daemon.presence import FOREVER_S, Slots
from kvstore.daemon.reclaim import Action, SegmentUsage, Step, choose_victim, sweep_action
from kvstore.daemon.record import (
    HEADER_BYTES,
    RECORD_ALIGN,
    Mark,
    MarkReason,
    RecordDamaged,
    RecordHeader,
    encode_header,
)
from kvstore.daemon.segment import FIRST_RECORD, FREE, Segment
from kvstore.daemon.segments import SPARE_SEGMENTS
from kvstore.daemon.tallies import effects_of, merge_effects
from kvstore.keys import BlockKey
from kvstore.store import ClassEffect, Presence
from kvstore.traffic import ClassRules

DAY_S = 86_400

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Swept:
    """What a sweep of one shard removed, or would."""

    removed: tuple[ClassEffect, ...] = ()
    segments_freed: int = 0
    blocks_rewritten: int = 0
    effects: list[ClassEffect] = field(default_factory=list)


class Reclaimer:
    """``rules`` gives the class rules in force."""

    def __init__(self, ledger: Ledger, rules: Callable[[], ClassRules], index_budget_bytes: int) -> None:
        self._ledger = ledger
        self._rules = rules
        self.blocks_max = blocks_max(index_budget_bytes)

    def segment_for(self, class_byte: int, day: int, record_bytes: int, now_s: int) -> Segment | None:
        """A segment with room for a new record of a class and expiry day, recycling others if need be;
        None: refused.
        """
        segments = self._ledger.segments
        segment = segments.open_for(class_byte, day, record_bytes)
        while segment is None:
            if not self._make_room(lambda: segments.free_count > SPARE_SEGMENTS, now_s):
                return None
            segment = segments.open_for(class_byte, day, record_bytes) or segments.begin(
                class_byte, day, now_s, spare=SPARE_SEGMENTS
            )
        return segment

    def make_room_in_index(self, blocks: int, now_s: int) -> bool:
        """Keep the number of blocks within what the index may hold."""
        return self._make_room(lambda: len(self._ledger.presence) + blocks <= self.blocks_max, now_s)

    def reduce_to_capacity(self, now_s: int) -> bool:
        """After the capacity was lowered: recycle and remove files until the rest fits. False if all is protected."""
        segments = self._ledger.segments
        while len(segments.segments) > segments.segments_max:
            try:
                if segments.shrink():
                    continue
            except OSError as error:
                log.error("segment_not_removed problem=%r", error)
                return False
            if not self._make_room(lambda: bool(segments.free), now_s):
                return False
        return True

    def usages(self, now_s: int) -> list[SegmentUsage]:
        """What every segment holds that is not free."""
        with self._ledger.lock:
            presence = self._ledger.presence
            slots = np.flatnonzero(presence.used)
            rows = presence.rows[slots]
            numbers = rows["segment"].astype(np.int64)
            sizes = -(-(rows["stored_bytes"].astype(np.int64) + HEADER_BYTES) // RECORD_ALIGN) * RECORD_ALIGN
            until_s = presence.until_s(slots)
            pinned = presence.pin_until_s[slots] > now_s
            segments = self._ledger.segments.segments
            length = max([*segments, 0]) + 1
            alive_bytes = np.zeros(length, dtype=np.int64)
            pinned_bytes = np.zeros(length, dtype=np.int64)
            promise_s = np.zeros(length, dtype=np.int64)
            np.add.at(alive_bytes, numbers, np.where(until_s > now_s, sizes, 0))
            np.add.at(pinned_bytes, numbers, np.where(pinned, sizes, 0))
            np.maximum.at(promise_s, numbers, presence.keep_until_s[slots])
            return [
                SegmentUsage(
                    segment=number,
                    class_byte=segment.header.class_byte,
                    segment_bytes=segment.header.segment_bytes,
                    used_bytes=segment.end - FIRST_RECORD,
                    alive_bytes=int(alive_bytes[number]),
                    pinned_bytes=int(pinned_bytes[number]),
                    promise_until_s=int(promise_s[number]),
                    begun=segment.begun,
                    busy=segment.failed or segment.leases > 0,
                )
                for number, segment in segments.items()
                if segment.header.class_byte != FREE
            ]

    def due(self, now_s: int) -> list[SegmentUsage]:
        """Segments that a sweep looks at: those with expired blocks, and those that are wholly dead.

        Dead bytes alone (of deleted blocks) are left to eviction, which needs them only when the volume is full.
        """
        with self._ledger.lock:
            presence = self._ledger.presence
            expired = presence.rows["segment"][presence.used & ~presence.alive(now_s)]
            numbers = set(np.unique(expired).tolist())
            return [usage for usage in self.usages(now_s) if usage.segment in numbers or usage.alive_bytes == 0]

    def plan_sweep(self, now_s: int) -> Swept:
        """What ``sweep_segment`` over all segments would do."""
        with self._ledger.lock:
            presence = self._ledger.presence
            expired = presence.used & ~presence.alive(now_s)
            plan = Swept(removed=effects_of(presence.rows[expired]))
            for usage in self.due(now_s):
                action = sweep_action(usage)
                plan.segments_freed += action is not None
                if action is Action.MOVE_ALIVE:
                    slots = presence.in_segment(usage.segment)
                    plan.blocks_rewritten += int((presence.until_s(slots) > now_s).sum())
            return plan

    def sweep_segment(self, number: int, now_s: int, swept: Swept) -> None:
        """Drop a segment's expired blocks; recycle it if that leaves it empty or sparse."""
        segment = self._ledger.segments.segments.get(number)
        usage = next((usage for usage in self.usages(now_s) if usage.segment == number), None)
        if segment is None or usage is None:
            return
        expired = self._expired_in(segment, now_s)
        with self._ledger.lock:
            effects = effects_of(self._ledger.presence.rows[expired])
        action = sweep_action(usage)
        if action is Action.MOVE_ALIVE:
            moved = self._move(segment, self._alive_in(segment, now_s), now_s)
            swept.blocks_rewritten += moved or 0
            action = Action.FREE if moved is not None else None
        if action is Action.FREE and self._recycle(segment, now_s):
            swept.segments_freed += 1
            swept.effects.extend(effects)
        elif len(expired):
            self._drop_expired(segment, now_s)
            swept.effects.extend(effects)
        swept.removed = merge_effects(swept.effects)

    def drop_vanished(self, now_s: int) -> None:
        """Let go of segments whose files were removed behind our back: their blocks would not survive a restart."""
        for segment in list(self._ledger.segments.segments.values()):
            with self._ledger.lock:
                if segment.leases or not segment.vanished():
                    continue
                slots = self._ledger.presence.in_segment(segment.number)
                keys = [self._ledger.presence.key(int(slot)) for slot in slots]
                self._ledger.forget(dict.fromkeys(keys, Presence.QUARANTINED), now_s)
                self._ledger.segments.forget(segment)
            log.error("segment_vanished path=%s blocks=%d", segment.path, len(keys))

    def _make_room(self, enough: Callable[[], bool], now_s: int) -> bool:
        """Recycle victims until there is enough; False if everything that is left is protected or stuck."""
        passed_over: set[int] = set()
        for _ in range(2 * len(self._ledger.segments.segments) + 2):
            if enough():
                return True
            usages = self.usages(now_s)
            marked = [replace(usage, busy=True) if usage.segment in passed_over else usage for usage in usages]
            step = choose_victim(marked, self._rules())
            if step is None:
                return False
            if not self._carry_out(step, now_s):
                passed_over.add(step.segment)
        return enough()

    def _carry_out(self, step: Step, now_s: int) -> bool:
        segment = self._ledger.segments.segments[step.segment]
        if step.action is not Action.FREE:
            slots = self._alive_in(segment, now_s, pinned_only=step.action is Action.MOVE_PINNED)
            if self._move(segment, slots, now_s) is None:
                return False
        return self._recycle(segment, now_s)

    def _alive_in(self, segment: Segment, now_s: int, *, pinned_only: bool = False) -> Slots:
        with self._ledger.lock:
            presence = self._ledger.presence
            slots = presence.in_segment(segment.number)
            until_s = presence.pin_until_s[slots] if pinned_only else presence.until_s(slots)
            return slots[until_s > now_s]

    def _expired_in(self, segment: Segment, now_s: int) -> Slots:
        with self._ledger.lock:
            slots = self._ledger.presence.in_segment(segment.number)
            return slots[self._ledger.presence.until_s(slots) <= now_s]

    def _drop_expired(self, segment: Segment, now_s: int) -> None:
        """Forget expired blocks of a segment that stays, and mark them, so that no rebuild brings them back."""
        with self._ledger.lock:
            slots = self._expired_in(segment, now_s)
            keys = [self._ledger.presence.key(int(slot)) for slot in slots]
            for slot in slots:
                with contextlib.suppress(OSError):
                    segment.mark(int(self._ledger.presence.rows[slot]["offset"]), Mark(MarkReason.EXPIRED, now_s))
            self._ledger.counters.expired += len(keys)
            self._ledger.forget(dict.fromkeys(keys, Presence.EXPIRED), now_s)

    def _recycle(self, segment: Segment, now_s: int) -> bool:
        """Back to the free list with whatever it holds. False if a reader came in between or the file refused."""
        with self._ledger.lock:
            if segment.leases:
                return False
            presence = self._ledger.presence
            slots = presence.in_segment(segment.number)
            until_s = presence.until_s(slots)
            try:
                self._ledger.segments.release(segment, now_s)
            except OSError as error:
                self._ledger.counters.write_errors += 1
                log.error("segment_not_recycled segment=%d problem=%r", segment.number, error)
                return False
            reasons = {
                presence.key(int(slot)): Presence.EVICTED if until > now_s else Presence.EXPIRED
                for slot, until in zip(slots, until_s, strict=True)
            }
            evicted = sum(reason is Presence.EVICTED for reason in reasons.values())
            self._ledger.counters.evicted += evicted
            self._ledger.counters.expired += len(reasons) - evicted
            self._ledger.counters.segments_recycled += 1
            self._ledger.forget(reasons, now_s)
            return True

    def _move(self, segment: Segment, slots: Slots, now_s: int) -> int | None:
        """Copy blocks out of a victim; how many, or None if not all could be, so that it must stay."""
        self._ledger.segments.retire(segment)
        if not len(slots):
            return 0
        with self._ledger.lock:
            until_s = np.minimum(self._ledger.presence.until_s(slots), FOREVER_S)
            day = min(int(until_s.max()) // DAY_S, 2**32 - 1)
            keys = [self._ledger.presence.key(int(slot)) for slot in slots]
        copies: list[tuple[BlockKey, Place, RecordHeader, Segment]] = []
        for key in keys:
            try:
                copy = self._copy(key, segment, day, now_s)
            except OSError as error:
                self._ledger.counters.write_errors += 1
                log.error("block_not_moved segment=%d problem=%r", segment.number, error)
                copy = None
            if copy is None:
                self._switch(copies, now_s)
                return None
            copies.extend(copy)
        return self._switch(copies, now_s)

    def _copy(
        self, key: BlockKey, segment: Segment, day: int, now_s: int
    ) -> list[tuple[BlockKey, Place, RecordHeader, Segment]] | None:
        """Append one record's copy elsewhere; empty if it was gone or damaged, None if there is no room."""
        with self._ledger.lock:
            slot = self._ledger.presence.slot(key)
            place = self._ledger.place(slot) if slot >= 0 else None
            if place is None or place.segment is not segment:
                return []
            row = self._ledger.presence.rows[slot].copy()
        payload = bytearray(place.stored_bytes)
        try:
            header, mark = segment.read_record(place.offset, payload)
            if mark is not None or header.key != key:
                raise RecordDamaged("the record is dead or another")
        except RecordDamaged:
            self._ledger.quarantine(key, place, now_s)
            return []
        target = self._target(segment.header.class_byte, day, header.record_bytes, now_s)
        if target is None:
            return None
        touches = tuple(
            (int(class_byte), int(touch_s))
            for class_byte, touch_s in zip(row["touch_class"], row["touch_s"], strict=True)
            if class_byte
        )
        fresh = replace(
            header,
            segment=target.number,
            generation=target.header.generation,
            offset=target.end,
            touches=touches,
        )
        padding = bytes(fresh.record_bytes - HEADER_BYTES - fresh.stored_bytes)
        target.append([encode_header(fresh), payload, padding], fresh.record_bytes)
        self._ledger.counters.bytes_written += fresh.record_bytes
        return [(key, place, fresh, target)]

    def _target(self, class_byte: int, day: int, record_bytes: int, now_s: int) -> Segment | None:
        segments = self._ledger.segments
        return segments.open_for(class_byte, day, record_bytes) or segments.begin(class_byte, day, now_s, spare=0)

    def _switch(self, copies: list[tuple[BlockKey, Place, RecordHeader, Segment]], now_s: int) -> int | None:
        """Make the copies durable, then the originals dead, then the copies count: all in one index batch.

        A crash before that batch leaves copies beyond what the index knows of their segment: recovery adopts them.
        """
        presence = self._ledger.presence
        targets = {copy[3].number: copy[3] for copy in copies}.values()
        dead = Mark(MarkReason.MOVED, now_s)
        try:
            for target in targets:
                target.sync()
            with self._ledger.lock:
                fresh_headers: list[RecordHeader] = []
                pins_s: dict[BlockKey, int] = {}
                for key, place, fresh, target in copies:
                    if not self._ledger.is_at(key, place):
                        target.mark(fresh.offset, dead)
                        continue
                    self._ledger.mark(place, dead)
                    fresh_headers.append(fresh)
                    pins_s[key] = int(presence.pin_until_s[presence.slot(key)])
                self._ledger.store(entries_of(fresh_headers), targets, pins_s)
                self._ledger.counters.blocks_rewritten += len(fresh_headers)
        except (OSError, IndexRefused) as error:
            self._ledger.counters.write_errors += 1
            log.error("blocks_not_moved problem=%r", error)
            return None
        return len(copies)
