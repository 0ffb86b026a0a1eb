"""A volume in numbers: which segment each block lies in, without a byte of it.

Owns what happens to segments and blocks when blocks are put, touched, swept and make room, on a clock that the caller
moves. The choices are the store's own (``kvstore.reclaim``, ``kvstore.capacity``, ``kvstore.chains``); this module
carries them out on arrays where the daemon does on files. Does not know prompts, hits or nodes. Invariants: a block
lies in at most one place; a place names one record of one life of a segment, so that an earlier life's is never taken
for it; segments in use, and free ones, are never more than the capacity holds.

Blocks are numbered, and all as long as each other. Several volumes share one ``Shelf``: no block lies in two.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvstore.capacity import SPARE_SEGMENTS, open_segments_max
from kvstore.chains import in_chain_order
from kvstore.reclaim import Action, SegmentUsage, Step, choose_victim, expiry_day, sweep_action
from kvstore.traffic import FIXED, TOUCH_PARTS, ClassRules
from retention.intake import Intake

Blocks = npt.NDArray[np.int64]
NEVER_S = 2**62
_LIVES_FIRST = 1024


class Shelf:
    """Deadline and place of every block. ``before``: the block that each one continues, -1 for first ones.

    ``until_s``: 0 of a block that is nowhere. ``places``: life of a segment times ``slots`` plus the slot in it; -1 of
    a block that is nowhere.
    """

    def __init__(self, before: Blocks, slots: int, rules: ClassRules) -> None:
        self.before = before
        self._rules = rules
        self._touched: dict[int, npt.NDArray[np.bool_]] = {
            rule.class_byte: np.zeros(len(before), dtype=np.bool_) for rule in rules.rules if rule.keep == FIXED
        }
        """By class whose promises are fixed: whether it has touched each block that is there."""
        self.max_ages_s: dict[int, int] = {rule.class_byte: rule.max_age_s for rule in rules.rules if rule.max_age_s}
        self.slots = slots
        self.until_s = np.zeros(len(before), dtype=np.int64)
        self.places = np.full(len(before), -1, dtype=np.int64)
        self.changed = np.zeros(_LIVES_FIRST, dtype=np.bool_)
        """By life: whether the segment's sums are to be taken anew."""
        self.classes = np.zeros(_LIVES_FIRST, dtype=np.uint8)
        """By life: the class that the segment was begun for."""
        self.ends_s = np.full(_LIVES_FIRST, NEVER_S, dtype=np.int64)
        """By life: when what it holds is as old as it may become."""
        self.lives = 0

    def new_life(self, class_byte: int, now_s: int) -> int:
        life = self.lives
        self.lives += 1
        if life == len(self.changed):
            self.changed = np.append(self.changed, np.zeros_like(self.changed))
            self.classes = np.append(self.classes, np.zeros_like(self.classes))
            self.ends_s = np.append(self.ends_s, np.full_like(self.ends_s, NEVER_S))
        self.classes[life] = class_byte
        if class_byte in self.max_ages_s:
            self.ends_s[life] = now_s + self.max_ages_s[class_byte]
        return life

    def store(self, blocks: Blocks, class_byte: int, until_s: int) -> None:
        """Blocks were written for a class, to the places that they have now."""
        self.until_s[blocks] = self._capped(until_s, blocks)
        if class_byte in self._touched:
            self._touched[class_byte][blocks] = True

    def touch(self, blocks: Blocks, class_byte: int, now_s: int) -> None:
        """Count a use of blocks that are alive; one that gains too little is dropped, as the store drops it."""
        keep_for_s, touched = self._rules.keep_for_s(class_byte), self._touched.get(class_byte)
        if touched is not None:
            blocks = blocks[~touched[blocks]]
            touched[blocks] = True
        until_s = self._capped(now_s + keep_for_s, blocks)
        gained_s = until_s - self.until_s[blocks]
        gains = (gained_s > 0) & (gained_s * TOUCH_PARTS >= keep_for_s)
        gaining = blocks[gains]
        if len(gaining):
            self.until_s[gaining] = until_s[gains]
            self.changed[self.places[gaining] // self.slots] = True

    def _capped(self, until_s: int, blocks: Blocks) -> Blocks:
        """A deadline, or when each block is as old as it may become."""
        if not self.max_ages_s:
            return np.full(len(blocks), until_s, dtype=np.int64)
        return np.minimum(until_s, self.ends_s[self.places[blocks] // self.slots])

    def forget(self, blocks: Blocks) -> None:
        self.changed[self.places[blocks] // self.slots] = True
        self.until_s[blocks] = 0
        self.places[blocks] = -1
        for touched in self._touched.values():
            touched[blocks] = False


@dataclass(slots=True)
class Counts:
    """What happened to blocks of one class. ``evicted``: dropped before their promise was over. ``declined``:
    not stored by the class's rule.
    """

    stored: int = 0
    refused: int = 0
    declined: int = 0
    rewritten: int = 0
    evicted: int = 0
    expired: int = 0


@dataclass(slots=True, eq=False)
class _Segment:
    """One life of a segment. ``rows``: the blocks written to it, the first ``used`` of them. ``alive``, ``expired``: of
    those that still lie here. ``next_s``: when the first of the living ones expires, if none is touched meanwhile.
    """

    number: int
    life: int
    class_byte: int
    day: int
    begun: int
    created_s: int
    rows: Blocks
    used: int = 0
    alive: int = 0
    expired: int = 0
    promise_until_s: int = 0
    next_s: int = NEVER_S


@dataclass(frozen=True, slots=True)
class Kept:
    """What a volume holds of one class: living blocks, and segments in use."""

    blocks: int
    segments: int


@dataclass(slots=True)
class Volume:
    """One node's. ``blocks_max``: rows that its index holds."""

    shelf: Shelf
    rules: ClassRules
    """Those of the volume (``ClassRules.for_volume``)."""
    record_bytes: int
    segment_bytes: int
    segments_max: int
    blocks_max: int
    intake: Intake
    counts: dict[int, Counts] = field(default_factory=dict)
    recycled: int = 0
    soonest_s: int = NEVER_S
    """No block expires before."""
    _blocks: int = 0
    """Blocks that have a row, expired ones included."""
    _segments: dict[int, _Segment | None] = field(default_factory=dict)
    """By number; None is free."""
    _free: list[int] = field(default_factory=list)
    _opened: dict[tuple[int, int], _Segment] = field(default_factory=dict)
    _begun: int = 0

    # --- what clients do ----------------------------------------------------------------------------------------------

    def put(self, blocks: Blocks, class_byte: int, now_s: int) -> None:
        """Store or touch each block, in order, as one put does; new ones that a rule does not want are declined."""
        rule = self.rules.by_byte(class_byte)
        if rule is None or not self.intake.chooses(rule):
            self._put(blocks, class_byte, now_s)
            return
        fresh = self.shelf.places[blocks] < 0
        wanted = np.ones(len(blocks), dtype=np.bool_)
        wanted[fresh] = self.intake.admit(rule, blocks[fresh], now_s)
        self.counts_of(class_byte).declined += len(blocks) - int(wanted.sum())
        self._put(blocks[wanted], class_byte, now_s)
        chosen = blocks[fresh & wanted]
        self.intake.spend(rule, int((self.shelf.places[chosen] >= 0).sum()))

    def _put(self, blocks: Blocks, class_byte: int, now_s: int) -> None:
        shelf = self.shelf
        alive = shelf.until_s[blocks] > now_s
        pending = blocks[~alive]
        self._expire(pending[shelf.places[pending] >= 0])
        shelf.touch(blocks[alive], class_byte, now_s)
        if len(pending):
            stored = self._write(pending, class_byte, now_s)
            self.counts_of(class_byte).stored += stored
            self.counts_of(class_byte).refused += len(pending) - stored

    def _write(self, pending: Blocks, class_byte: int, now_s: int) -> int:
        """Write new blocks; how many found room."""
        shelf, until_s = self.shelf, now_s + self.rules.keep_for_s(class_byte)
        if not self._make_room(lambda: self._blocks + len(pending) <= self.blocks_max, now_s):
            return 0
        at = 0
        while at < len(pending):
            segment = self._segment_for(class_byte, expiry_day(until_s), now_s)
            if segment is None:
                break
            run = pending[at : at + shelf.slots - segment.used]
            self._append(segment, run)
            shelf.store(run, class_byte, until_s)
            self._blocks += len(run)
            at += len(run)
        self.soonest_s = min(self.soonest_s, until_s)
        return at

    def sweep(self, now_s: int) -> None:
        """Drop what expired, segment by segment."""
        due = [segment.number for segment in self._in_use(now_s) if segment.expired or not segment.alive]
        for number in due:
            segment = self._segments[number]
            if segment is None:
                continue
            action = sweep_action(self._usage(segment, now_s), now_s)
            if action is Action.MOVE_ALIVE:
                action = Action.FREE if self._move(segment, self._alive_in(segment, now_s), now_s) else None
            if action is Action.FREE:
                self._recycle(segment, now_s)
            else:
                rows = self._rows_in(segment)
                self._expire(rows[self.shelf.until_s[rows] <= now_s])
        self.soonest_s = min((usage.next_s for usage in self._in_use(now_s)), default=NEVER_S)

    # --- what is asked ------------------------------------------------------------------------------------------------

    def counts_of(self, class_byte: int) -> Counts:
        return self.counts.setdefault(class_byte, Counts())

    def kept(self, now_s: int) -> dict[int, Kept]:
        """By the class that a segment was begun for."""
        found: dict[int, Kept] = {}
        for segment in self._in_use(now_s):
            before = found.get(segment.class_byte, Kept(0, 0))
            found[segment.class_byte] = Kept(before.blocks + segment.alive, before.segments + 1)
        return found

    def usages(self, now_s: int) -> list[SegmentUsage]:
        """What every segment holds that is not free."""
        return [self._usage(segment, now_s) for segment in self._segments.values() if segment is not None]

    def _usage(self, segment: _Segment, now_s: int) -> SegmentUsage:
        self._sum_up(segment, now_s)
        return SegmentUsage(
            segment=segment.number,
            class_byte=segment.class_byte,
            segment_bytes=self.segment_bytes,
            used_bytes=segment.used * self.record_bytes,
            alive_bytes=segment.alive * self.record_bytes,
            pinned_bytes=0,
            promise_until_s=segment.promise_until_s,
            begun=segment.begun,
            busy=False,
            ages=segment.class_byte in self.shelf.max_ages_s,
        )

    def _in_use(self, now_s: int) -> list[_Segment]:
        found = [segment for segment in self._segments.values() if segment is not None]
        for segment in found:
            self._sum_up(segment, now_s)
        return found

    def _sum_up(self, segment: _Segment, now_s: int) -> None:
        """Take the sums anew if a block came, went, was touched or expired: nothing else changes them."""
        if not self.shelf.changed[segment.life] and now_s < segment.next_s:
            return
        until_s = self.shelf.until_s[self._rows_in(segment)]
        alive_s = until_s[until_s > now_s]
        segment.alive, segment.expired = len(alive_s), len(until_s) - len(alive_s)
        segment.next_s = int(alive_s.min()) if len(alive_s) else NEVER_S
        segment.promise_until_s = int(until_s.max()) if len(until_s) else 0
        self.shelf.changed[segment.life] = False

    def _rows_in(self, segment: _Segment) -> Blocks:
        """The blocks that lie in a segment, expired ones included, in the order in which they lie."""
        rows = segment.rows[: segment.used]
        first = segment.life * self.shelf.slots
        here: Blocks = rows[self.shelf.places[rows] == np.arange(first, first + segment.used)]
        return here

    def _alive_in(self, segment: _Segment, now_s: int) -> Blocks:
        rows = self._rows_in(segment)
        alive: Blocks = rows[self.shelf.until_s[rows] > now_s]
        return alive

    # --- segments -----------------------------------------------------------------------------------------------------

    @property
    def _free_count(self) -> int:
        return len(self._free) + max(0, self.segments_max - len(self._segments))

    def _segment_for(self, class_byte: int, day: int, now_s: int) -> _Segment | None:
        """A segment with room for a new record, others recycled if need be; None: refused."""
        segment = self._open_for(class_byte, day, now_s)
        while segment is None:
            if not self._make_room(lambda: self._free_count > SPARE_SEGMENTS, now_s):
                return None
            segment = self._open_for(class_byte, day, now_s) or self._begin(class_byte, day, now_s, SPARE_SEGMENTS)
        return segment

    def _open_for(self, class_byte: int, day: int, now_s: int) -> _Segment | None:
        segment = self._opened.get((class_byte, day))
        if segment is None:
            return None
        rule = self.rules.by_byte(class_byte)
        aged = rule is not None and rule.max_age_s > 0 and now_s >= segment.created_s + rule.age_span_s
        if aged or segment.used == self.shelf.slots:
            del self._opened[(class_byte, day)]
            return None
        return segment

    def _begin(self, class_byte: int, day: int, now_s: int, spare: int) -> _Segment | None:
        if self._free_count <= spare:
            return None
        number = self._free.pop() if self._free else len(self._segments) + 1
        self._begun += 1
        rows = np.empty(self.shelf.slots, dtype=np.int64)
        segment = _Segment(number, self.shelf.new_life(class_byte, now_s), class_byte, day, self._begun, now_s, rows)
        self._segments[number] = segment
        self._limit_opened(class_byte, day)
        self._opened[(class_byte, day)] = segment
        return segment

    def _limit_opened(self, class_byte: int, day: int) -> None:
        """As many as the store keeps open: none of the class for an earlier day, the longest open first to go."""
        stale = [key for key in self._opened if key[0] == class_byte and key[1] < day]
        beyond = max(0, len(self._opened) + 1 - open_segments_max(self.segments_max))
        for key in dict.fromkeys([*stale, *list(self._opened)[:beyond]]):
            del self._opened[key]

    def _append(self, segment: _Segment, blocks: Blocks) -> None:
        end = segment.used + len(blocks)
        segment.rows[segment.used : end] = blocks
        first = segment.life * self.shelf.slots
        self.shelf.places[blocks] = np.arange(first + segment.used, first + end)
        segment.used = end
        self.shelf.changed[segment.life] = True

    def _close(self, segment: _Segment) -> None:
        if self._opened.get((segment.class_byte, segment.day)) is segment:
            del self._opened[(segment.class_byte, segment.day)]

    # --- room ---------------------------------------------------------------------------------------------------------

    def _make_room(self, enough: Callable[[], bool], now_s: int) -> bool:
        """Recycle victims until there is enough; False if everything that is left is protected."""
        passed_over: set[int] = set()
        for _ in range(2 * len(self._segments) + 2):
            if enough():
                return True
            usages = self.usages(now_s)
            marked = [usage._replace(busy=True) if usage.segment in passed_over else usage for usage in usages]
            step = choose_victim(marked, self.rules)
            if step is None:
                return False
            if not self._carry_out(step, now_s):
                passed_over.add(step.segment)
        return enough()

    def _carry_out(self, step: Step, now_s: int) -> bool:
        segment = self._segments[step.segment]
        assert segment is not None and step.action is not Action.MOVE_PINNED
        if step.action is Action.MOVE_ALIVE and not self._move(segment, self._alive_in(segment, now_s), now_s):
            return False
        self._recycle(segment, now_s)
        return True

    def _move(self, segment: _Segment, blocks: Blocks, now_s: int) -> bool:
        """Write living blocks again elsewhere; False if there was no room for all, so that the segment stays."""
        self._close(segment)
        if not len(blocks):
            return True
        shelf = self.shelf
        day = expiry_day(int(shelf.until_s[blocks].max()))
        links = list(zip(blocks.tolist(), shelf.before[blocks].tolist(), strict=True))
        blocks = blocks[in_chain_order(links)]
        shelf.changed[segment.life] = True
        while len(blocks):
            target = self._open_for(segment.class_byte, day, now_s) or self._begin(segment.class_byte, day, now_s, 0)
            if target is None:
                return False
            run, blocks = np.split(blocks, [shelf.slots - target.used])
            self._append(target, run)
            self.counts_of(segment.class_byte).rewritten += len(run)
        return True

    def _recycle(self, segment: _Segment, now_s: int) -> None:
        """Back to the free list, with whatever it holds."""
        rows = self._rows_in(segment)
        alive = self.shelf.until_s[rows] > now_s
        counts = self.counts_of(segment.class_byte)
        counts.evicted += int(alive.sum())
        counts.expired += len(rows) - int(alive.sum())
        self._drop(rows)
        self._close(segment)
        self._segments[segment.number] = None
        self._free.append(segment.number)
        self.recycled += 1

    def _expire(self, blocks: Blocks) -> None:
        """Forget blocks that are past their promise, of whichever classes."""
        if not len(blocks):
            return
        numbers = np.bincount(self.shelf.classes[self.shelf.places[blocks] // self.shelf.slots])
        for class_byte in np.flatnonzero(numbers).tolist():
            self.counts_of(class_byte).expired += int(numbers[class_byte])
        self._drop(blocks)

    def _drop(self, blocks: Blocks) -> None:
        self._blocks -= len(blocks)
        self.shelf.forget(blocks)
