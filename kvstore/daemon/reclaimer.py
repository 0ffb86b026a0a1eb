"""Making room: carries out what ``reclaim`` chooses, and the sweep of expired blocks.

Owns recycling and moving of records. Does not decide the order. Invariants: runs only under the shard's writer lock;
what only reads the map holds the ledger's journal, under which nothing changes, and no look-up waits for it;
a victim is recycled only after its survivors' copies are durable and known; one segment that cannot be recycled is
passed over; one whose class has a maximum age is free again only after its bytes were erased.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from kvstore.capacity import SPARE_SEGMENTS, blocks_max
from kvstore.chains import in_chain_order
from kvstore.daemon.codec import Codec, compress
from kvstore.daemon.cold import as_written_again, compress_after_s
from kvstore.daemon.fingerprints import ROWS_MAX, Slots
from kvstore.daemon.index import entries_of
from kvstore.daemon.ledger import Ledger, Place
from kvstore.daemon.presence import FOREVER_S, fingerprint_of
from kvstore.daemon.record import (
    HEADER_BYTES,
    Mark,
    MarkReason,
    RecordDamaged,
    RecordHeader,
    encode_header,
)
from kvstore.daemon.releases import PART_ROWS, PART_ROWS_WAITED, Releases
from kvstore.daemon.scour import erase_all_but
from kvstore.daemon.segment import FIRST_RECORD, FREE, Segment
from kvstore.daemon.tallies import effects_of, merge_effects
from kvstore.errors import VolumeError
from kvstore.keys import BlockKey
from kvstore.limits import MIB
from kvstore.reclaim import REWRITE_AHEAD_S, Action, SegmentUsage, Step, choose_victim, expiry_day, sweep_action
from kvstore.store import ClassEffect, Presence
from kvstore.traffic import ClassRules

PACK_BYTES = 32 * MIB
"""Of cold blocks, written again under one hold of the writer's lock: a twentieth of a second."""

BREATH_S = 0.0003
"""Between two parts of a segment that a put waits for: whoever looks something up goes first."""

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Swept:
    """What a sweep of one shard removed, or would."""

    removed: tuple[ClassEffect, ...] = ()
    segments_freed: int = 0
    blocks_rewritten: int = 0
    effects: list[ClassEffect] = field(default_factory=list)


class Apart(NamedTuple):
    """Blocks are written again without a class's claim, as ``heir``'s."""

    class_byte: int
    heir: int


class _Copy(NamedTuple):
    """A record that was written again."""

    place: Place
    header: RecordHeader
    target: Segment


class Reclaimer:
    """``rules`` gives the class rules in force. ``overwrite``: erasing writes zeros, and does not leave that to the
    file system.
    """

    def __init__(
        self, ledger: Ledger, rules: Callable[[], ClassRules], index_budget_bytes: int, *, overwrite: bool = False
    ) -> None:
        self._ledger = ledger
        self._rules = rules
        self._overwrite = overwrite
        self._releases = Releases(ledger)
        self._stiff: set[int] = set()
        """Generations of segments whose blocks do not shrink."""
        self.blocks_max = min(blocks_max(index_budget_bytes), ROWS_MAX)

    def segment_for(
        self, class_byte: int, day: int, record_bytes: int, now_s: int, *, beside: bool = False
    ) -> Segment | None:
        """A segment with room for a new record of a class and expiry day, recycling others if need be;
        None: refused. No living block goes because others have filled the file system.

        ``beside``: puts are under way, whose segments are left alone, and no block is written again for it; None then
        says only that it is to be asked for once nothing is.
        """
        segments = self._ledger.segments
        since = self._since(class_byte, now_s)
        if beside and (segments.seal_later is None or segments.open_for(class_byte, day, record_bytes, since)):
            return None  # it would be sealed at once, or a note be written to it
        segment = self._reaching(segments.open_for(class_byte, day, record_bytes, since), now_s)
        while segment is None:
            held_back = segments.held_back
            if not self._make_room(
                lambda: segments.free_count > SPARE_SEGMENTS and not segments.held_back,
                now_s,
                lossless=held_back,
                as_they_are=beside,
            ):
                return None
            segment = self._reaching(segments.open_for(class_byte, day, record_bytes, since), now_s) or self._begin(
                class_byte, day, now_s, spare=SPARE_SEGMENTS
            )
        return segment

    def segment_at_hand(self, class_byte: int, day: int, record_bytes: int, now_s: int) -> Segment | None:
        """The open segment of a class and expiry day if a record goes into it as it is; nothing is done for it."""
        segments, since = self._ledger.segments, self._since(class_byte, now_s)
        segment = segments.segments.get(segments.opened.get((class_byte, day), -1))
        if segment is None or segment.room_bytes < record_bytes or now_s < segment.oldest_s:
            return None
        return segment if since is None or segment.oldest_s in since else None

    def clean(self) -> None:
        """Erase what an earlier sweep, or process, could not."""
        self._ledger.segments.clean(overwrite=self._overwrite)

    def erase_unused(self) -> None:
        """Leave no byte of earlier lives of the segments. Raises OSError."""
        self._ledger.segments.erase_unused(overwrite=self._overwrite)

    def _begin(self, class_byte: int, day: int, now_s: int, *, spare: int) -> Segment | None:
        segment = self._ledger.segments.begin(class_byte, day, now_s, spare=spare)
        if segment is not None:
            self._note_age(segment)
        return segment

    def _since(self, class_byte: int, written_s: int) -> range | None:
        """When the oldest record of a segment may have been written that takes a record written then; None: ever."""
        rule = self._rules().by_byte(class_byte)
        if rule is None or not rule.max_age_s:
            return None
        return range(written_s - rule.age_span_s + 1, written_s + 1)

    def _reaching(self, segment: Segment | None, written_s: int) -> Segment | None:
        """The segment, which knows now that a record written then is going to be in it; None if its disk refused."""
        if segment is None or written_s >= segment.oldest_s:
            return segment
        try:
            segment.reach_back(written_s)
        except OSError as error:
            self._ledger.counters.write_errors += 1
            log.error("age_not_noted segment=%d problem=%r", segment.number, error)
            self._ledger.segments.retire(segment)
            return None
        self._note_age(segment)
        return segment

    def _note_age(self, segment: Segment) -> None:
        with self._ledger.lock:
            self._ledger.presence.note_age(segment.number, segment.header.class_byte, segment.oldest_s)

    def make_room_in_index(self, blocks: int, now_s: int) -> bool:
        """Keep the number of blocks within what the index may hold."""
        return self._make_room(lambda: len(self._ledger.presence) + blocks <= self.blocks_max, now_s)

    def reduce_to_capacity(self, now_s: int) -> bool:
        """After the capacity was lowered: recycle and remove files until the rest fits. False if all is protected.

        A file that cannot be removed stays, and another goes. Raises VolumeError if more stay than go: no block shall
        be given up for a directory that lets no file go.
        """
        segments = self._ledger.segments
        balance = 0
        while len(segments.segments) > segments.segments_max:
            try:
                if segments.shrink():
                    balance += 1
                    continue
            except OSError as error:
                log.error("segment_not_removed problem=%r", error)
                balance -= 1
                if balance < -1:
                    raise VolumeError(f"segments cannot be removed for a lower capacity: {error}") from error
                continue
            if not self._make_room(lambda: bool(segments.free), now_s):
                return False
        return True

    def usages(self, now_s: int) -> list[SegmentUsage]:
        """What every segment holds that is not free."""
        aged = {rule.class_byte for rule in self._rules().rules if rule.max_age_s}
        with self._ledger.journal:
            presence = self._ledger.presence
            holdings = presence.holdings(now_s)
            pinned = presence.pinned_slots(now_s)
            pinned_bytes: Counter[int] = Counter()
            for number, size in zip(
                presence.segments_of(pinned).tolist(), presence.record_bytes_of(pinned).tolist(), strict=True
            ):
                pinned_bytes[number] += size
            return [
                SegmentUsage(
                    segment=number,
                    class_byte=segment.header.class_byte,
                    segment_bytes=segment.header.segment_bytes,
                    used_bytes=segment.end - FIRST_RECORD,
                    alive_bytes=(held := holdings[number]).alive_bytes,
                    pinned_bytes=pinned_bytes[number],
                    promise_until_s=held.promise_until_s,
                    begun=segment.begun,
                    busy=segment.failed or segment.leases > 0 or segment.promised_bytes > 0,
                    ages=segment.header.class_byte in aged,
                )
                for number, segment in self._ledger.segments.segments.items()
                if segment.header.class_byte != FREE
            ]

    def due(self, now_s: int) -> list[SegmentUsage]:
        """Segments that a sweep looks at: those with expired blocks, and those that are wholly dead.

        Dead bytes alone (of deleted blocks) are left to eviction, which needs them only when the volume is full.
        """
        with self._ledger.journal:
            numbers = set(np.unique(self._ledger.presence.segments_of(self._expired(now_s))).tolist())
            ages = self._ledger.presence.ages
            return [
                usage
                for usage in self.usages(now_s)
                if usage.segment in numbers or usage.alive_bytes == 0 or ages.is_over(usage.segment, now_s)
            ]

    def plan_sweep(self, now_s: int) -> Swept:
        """What ``sweep_segment`` over all segments would do."""
        with self._ledger.journal:
            presence = self._ledger.presence
            plan = Swept(removed=effects_of(presence, self._expired(now_s)))
            for usage in self.due(now_s):
                action = sweep_action(usage, now_s)
                plan.segments_freed += action is not None
                if action is Action.MOVE_ALIVE:
                    slots = presence.in_segment(usage.segment)
                    plan.blocks_rewritten += int(presence.alive(slots, now_s).sum())
            return plan

    def _expired(self, now_s: int) -> Slots:
        slots = self._ledger.presence.used()
        return slots[~self._ledger.presence.alive(slots, now_s)]

    def sweep_segment(self, number: int, now_s: int, swept: Swept) -> None:
        """Drop a segment's expired blocks; recycle it if that leaves it empty or sparse."""
        segment = self._ledger.segments.segments.get(number)
        usage = next((usage for usage in self.usages(now_s) if usage.segment == number), None)
        if segment is None or usage is None:
            return
        expired = self._expired_in(segment, now_s)
        with self._ledger.journal:
            effects = effects_of(self._ledger.presence, expired)
        action = sweep_action(usage, now_s)
        if action is Action.MOVE_ALIVE:
            moved = self._move(segment, self._alive_in(segment, now_s), now_s)
            swept.blocks_rewritten += moved or 0
            action = Action.FREE if moved is not None else None
        if action is Action.FREE and self._recycle(segment, now_s):
            swept.segments_freed += 1
            swept.effects.extend(effects)
        elif len(expired) and self._drop_expired(segment, now_s):
            swept.effects.extend(effects)
        self._erase_overdue(segment, now_s)
        swept.removed = merge_effects(swept.effects)

    def coldest(self, now_s: int) -> Segment | None:
        """Of the sealed segments whose blocks nobody has used for as long as their class says, and which compressing
        shrinks, the one unused for longest. Those that are free within a day anyway stay as they are.
        """
        rules, segments = self._rules(), self._ledger.segments.segments
        if not any(rule.compress_after_s for rule in rules.rules):
            return None
        with self._ledger.journal:
            used_s = self._ledger.presence.last_uses()
            usages = [usage for usage in self.usages(now_s) if usage.segment in used_s and not usage.busy]
        self._stiff &= {segment.header.generation for segment in segments.values()}
        for usage in sorted(usages, key=lambda usage: used_s[usage.segment]):
            segment, after_s = segments[usage.segment], compress_after_s(rules, usage.class_byte)
            is_cold = after_s > 0 and used_s[usage.segment] + after_s <= now_s
            if not is_cold or not segment.sealed or usage.promise_until_s <= now_s + REWRITE_AHEAD_S:
                continue
            if segment.header.generation in self._stiff:
                continue
            if self._shrinks(segment, now_s):
                return segment
            self._stiff.add(segment.header.generation)
        return None

    def pack_part(self, segment: Segment, generation: int, now_s: int, swept: Swept) -> bool:
        """Write some of a cold segment's blocks again, compressed; whether there are more."""
        if segment.header.generation != generation:
            return False
        slots = self._alive_in(segment, now_s)
        with self._ledger.journal:
            presence = self._ledger.presence
            slots = slots[np.argsort(presence.places[slots])]
            count = int(np.searchsorted(np.cumsum(presence.record_bytes_of(slots)), PACK_BYTES)) + 1
        moved = self._move(segment, slots[:count], now_s)
        if moved is None:
            return False
        swept.blocks_rewritten += moved
        if count < len(slots):
            return True
        swept.segments_freed += self._recycle(segment, now_s)
        return False

    def move_apart(self, places: list[Place], apart: Apart, now_s: int) -> list[Place]:
        """Write blocks of one segment again for their heir, making room for them; those that stay where they are are
        returned: the segment's maximum age is theirs, or there is no room.
        """
        while places:
            segment, count = places[0].segment, len(places)
            if segment.header.class_byte == apart.class_byte and self._has_max_age(segment):
                break
            part = np.array([place.slot for place in places], dtype=np.int64)
            with self._ledger.journal:
                sizes = self._ledger.presence.record_bytes_of(part)
            part = part[: int(np.searchsorted(np.cumsum(sizes), PACK_BYTES)) + 1]
            self.segment_for(apart.heir, self._day_of(part, apart), places[0].record_bytes, now_s)
            places = [place for place in places if self._ledger.is_at(place)]  # room may have been made of some
            here = {place.slot for place in places}
            self._move(segment, part[[int(slot) in here for slot in part]], now_s, apart)
            places = [place for place in places if self._ledger.is_at(place)]
            if len(places) == count:
                break
        return places

    def _shrinks(self, segment: Segment, now_s: int) -> bool:
        """Whether compressing its first uncompressed block pays: others of the class are much like it."""
        with self._ledger.journal:
            presence = self._ledger.presence
            slots = self._alive_in(segment, now_s)
            slots = slots[presence.shapes.codec[presence.shape_of(slots)] == Codec.NONE]
            place = self._ledger.place(int(slots[0])) if len(slots) else None
        if place is None:
            return False
        try:
            payload = bytearray(segment.read_header(place.offset)[0].stored_bytes)
            segment.read_record(place.offset, payload)
        except (RecordDamaged, OSError):
            return False
        return compress("zstd", payload)[0] != Codec.NONE

    def drop_vanished(self, now_s: int) -> None:
        """Let go of segments whose files were removed behind our back: their blocks would not survive a restart."""
        for segment in list(self._ledger.segments.segments.values()):
            with self._ledger.changing():
                if segment.leases or not segment.vanished():
                    continue
                slots = self._ledger.presence.in_segment(segment.number)
                self._ledger.forget(slots, np.full(len(slots), Presence.QUARANTINED, dtype=np.uint8), now_s)
                self._ledger.segments.forget(segment)
            log.error("segment_vanished path=%s blocks=%d", segment.path, len(slots))

    def _make_room(
        self, enough: Callable[[], bool], now_s: int, *, lossless: bool = False, as_they_are: bool = False
    ) -> bool:
        """Recycle victims until there is enough; False if everything that is left is protected or stuck, or, with
        ``as_they_are``, once blocks would have to be written again.
        """
        passed_over: set[int] = set()
        for _ in range(2 * len(self._ledger.segments.segments) + 3):
            if enough():
                return True
            if self._releases:
                self._release_all()
                continue
            usages = self.usages(now_s)
            marked = [usage._replace(busy=True) if usage.segment in passed_over else usage for usage in usages]
            step = choose_victim(marked, self._rules(), lossless=lossless)
            if step is None or (as_they_are and step.action is not Action.FREE):
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
        if not self._recycle(segment, now_s):
            return False
        self._release_all()
        return True

    def _alive_in(self, segment: Segment, now_s: int, *, pinned_only: bool = False) -> Slots:
        with self._ledger.journal:
            presence = self._ledger.presence
            slots = presence.in_segment(segment.number)
            return slots[presence.pin_until_s(slots) > now_s if pinned_only else presence.alive(slots, now_s)]

    def _expired_in(self, segment: Segment, now_s: int) -> Slots:
        with self._ledger.journal:
            slots = self._ledger.presence.in_segment(segment.number)
            return slots[~self._ledger.presence.alive(slots, now_s)]

    def _drop_expired(self, segment: Segment, now_s: int) -> bool:
        """Forget expired blocks of a segment that stays, and mark them, so that no rebuild brings them back. False if
        the disk did not take all marks.
        """
        with self._ledger.journal:
            slots = self._expired_in(segment, now_s).tolist()
            places = [place for slot in slots if (place := self._ledger.place(slot)) is not None]
        left = self._ledger.bury(places, Mark(MarkReason.EXPIRED, now_s))
        self._ledger.counters.expired += len(places) - len(left)
        return not left

    def _erase_overdue(self, segment: Segment, now_s: int) -> None:
        """Of a segment past its maximum age that legal holds keep, leave what they hold and no other byte."""
        if segment.header.class_byte == FREE or segment.leases:
            return
        with self._ledger.journal:
            presence = self._ledger.presence
            if not presence.ages.is_over(segment.number, now_s):
                return
            slots = presence.in_segment(segment.number)
            kept = set(presence.offsets_of(slots[presence.alive(slots, now_s)]).tolist())
        if not segment.sealed:
            self._ledger.segments.retire(segment)
        try:
            erase_all_but(segment, kept, Mark(MarkReason.EXPIRED, now_s), overwrite=self._overwrite)
        except OSError as error:
            self._ledger.counters.write_errors += 1
            log.error("segment_not_erased segment=%d problem=%r", segment.number, error)

    def _has_max_age(self, segment: Segment) -> bool:
        rule = self._rules().by_byte(segment.header.class_byte)
        return rule is not None and rule.max_age_s > 0

    def _recycle(self, segment: Segment, now_s: int) -> bool:
        """Back to the free list with whatever it holds, part by part (``release_part``). False if a reader came in
        between or the file refused.
        """
        return self._releases.begin(segment, now_s, erase=self._has_max_age(segment))

    def release_part(self, rows: int = PART_ROWS) -> bool:
        """Let some rows of recycled segments go; whether there are more. The writer's lock may be let go in between."""
        if self._releases.step(rows):
            return True
        self.clean()
        return False

    def _release_all(self) -> None:
        """For who needs the room now: look-ups come in between, writers do not."""
        while self.release_part(PART_ROWS_WAITED):
            time.sleep(BREATH_S)

    def _day_of(self, slots: Slots, apart: Apart | None) -> int:
        """The expiry day of a segment for some blocks."""
        with self._ledger.journal:
            presence = self._ledger.presence
            until_s = int(np.minimum(presence.until_s(slots), FOREVER_S).max())
            if apart is not None:
                keep_for_s = presence.keep_for_s.item(apart.heir)
                touches = (pair for slot in slots.tolist() for pair in presence.touches(slot))
                until_s = max(touch_s + keep_for_s for by_class, touch_s in touches if by_class == apart.heir)
        return min(expiry_day(until_s), 2**32 - 1)

    def _move(self, segment: Segment, slots: Slots, now_s: int, apart: Apart | None = None) -> int | None:
        """Copy blocks out of a victim; how many, or None if not all could be, so that it must stay."""
        self._ledger.segments.retire(segment)
        if not len(slots):
            return 0
        day = self._day_of(slots, apart)
        with self._ledger.journal:
            slots = slots[np.argsort(self._ledger.presence.places[slots])]
            places = [place for slot in slots.tolist() if (place := self._ledger.place(slot)) is not None]
        copies: list[_Copy] = []
        for at in in_chain_order([_links(place) for place in places]):
            place = places[at]
            try:
                copied = self._copy(place, day, now_s, apart)
            except OSError as error:
                self._ledger.counters.write_errors += 1
                log.error("block_not_moved segment=%d problem=%r", segment.number, error)
                copied = None
            if copied is None:
                self._switch(copies, now_s)
                return None
            copies.extend(copied)
        return self._switch(copies, now_s)

    def _copy(self, place: Place, day: int, now_s: int, apart: Apart | None) -> list[_Copy] | None:
        """Append one record's copy elsewhere; empty if it was gone or damaged, None if there is no room."""
        segment = place.segment
        with self._ledger.lock:
            if not self._ledger.is_at(place):
                return []
            touches = self._ledger.presence.touches(place.slot)
        try:
            header, mark = segment.read_header(place.offset)
            if mark is not None and mark.reason is not MarkReason.DAMAGED:  # the index had lost its removal
                self._ledger.forget_dead(place, mark)
                return []
            payload = bytearray(header.stored_bytes)
            header, mark = segment.read_record(place.offset, payload)
            if mark is not None or fingerprint_of(header.key) != place.fingerprint:
                raise RecordDamaged("the record's mark is damaged, or it is another")
        except RecordDamaged:
            self._ledger.quarantine([place], now_s)
            return []
        header, stored = as_written_again(header, payload, touches, now_s, self._rules())
        class_byte = segment.header.class_byte
        if apart is not None:
            class_byte = apart.heir
            touches = tuple(pair for pair in touches if pair[0] != apart.class_byte)
            header = replace(header, class_byte=class_byte)
        target = self._target(class_byte, day, header, now_s)
        if target is None:
            return None
        fresh = replace(
            header,
            segment=target.number,
            generation=target.header.generation,
            offset=target.end,
            touches=touches,
        )
        padding = bytes(fresh.record_bytes - HEADER_BYTES - fresh.stored_bytes)
        target.append([encode_header(fresh), stored, padding], fresh.record_bytes)
        self._ledger.counters.bytes_written += fresh.record_bytes
        return [_Copy(place, fresh, target)]

    def _target(self, class_byte: int, day: int, header: RecordHeader, now_s: int) -> Segment | None:
        since = self._since(class_byte, header.written_s)
        target = self._ledger.segments.open_for(class_byte, day, header.record_bytes, since)
        return self._reaching(target or self._begin(class_byte, day, now_s, spare=0), header.written_s)

    def _switch(self, copies: list[_Copy], now_s: int) -> int | None:
        """Make the copies durable, then the originals dead, then the copies count: all in one index batch.

        A crash before that batch leaves copies beyond what the index knows of their segment: recovery adopts them.
        """
        targets = {copy.target.number: copy.target for copy in copies}.values()
        dead = Mark(MarkReason.MOVED, now_s)
        stuck = packed = 0
        try:
            for target in targets:
                target.sync()
            with self._ledger.journal:
                moved: list[RecordHeader] = []
                pins_s: dict[BlockKey, int] = {}
                for place, fresh, target in copies:
                    if not self._ledger.is_at(place):
                        target.mark(fresh.offset, dead)
                        continue
                    if not self._ledger.mark_at(place, dead):
                        target.mark(fresh.offset, dead)
                        stuck += 1
                        continue
                    moved.append(fresh)
                    packed += fresh.codec != place.codec
                    pin_s = int(self._ledger.presence.pin_until_s(np.array([place.slot]))[0])
                    if pin_s:
                        pins_s[fresh.key] = pin_s
                self._ledger.flush_marks({copy.place.segment for copy in copies})
                self._ledger.store(entries_of(moved), targets, pins_s, in_any_case=True)
                self._ledger.counters.blocks_rewritten += len(moved)
                self._ledger.counters.blocks_compressed += packed
        except OSError as error:
            self._ledger.counters.write_errors += 1
            log.error("blocks_not_moved problem=%r", error)
            self._take_back(copies)
            return None
        return None if stuck else len(copies)

    def _take_back(self, copies: list[_Copy]) -> None:
        """No row names these copies: no rebuild of the index may find them."""
        for target in {copy.target.number: copy.target for copy in copies}.values():
            target.take_back(min(copy.header.offset for copy in copies if copy.target is target))
            self._ledger.segments.retire(target)


def _links(place: Place) -> tuple[bytes, bytes]:
    """Key and parent of a record; of one that cannot be read, nothing."""
    try:
        header, _ = place.segment.read_header(place.offset)
    except (RecordDamaged, OSError):
        return b"", b""
    return header.key, header.parent
