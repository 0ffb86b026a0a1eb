"""The presence map: every stored block in memory, so that a lookup of a whole prompt costs one call and no disk.

Owns a compact row for each block: fingerprint (the first 8 bytes of the key), a check of the rest of the key and of
the token digest, place, length, shape, and touches; deadlines are computed for the rows asked. Full keys, checksums and
parents are in the index and in the records. Does not know files or locks: its shard guards it. Invariants: a deadline
is the maximum over touches of touch + keep_for of the class, or the pin's end where that is later, but no later than
the maximum age of the segment, which only a legal hold extends; nothing past its deadline is PRESENT, nor what no
cipher key reads; two keys with one fingerprint are never both here, and neither is taken for the other but by a chance
of 2^-32, in which case what the reader verifies makes it a miss. Memory: 39 bytes a block, more only for blocks that
several classes touched and for pins.
"""

from __future__ import annotations

import secrets
import struct
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvstore.daemon.ages import Ages, Ends
from kvstore.daemon.fingerprints import WORD_MAX, FingerprintTable, Slots, Words, grown
from kvstore.daemon.holdings import NEVER_S, Holdings
from kvstore.daemon.index import Rows, place_words
from kvstore.daemon.record import HEADER_BYTES, RECORD_ALIGN, TOUCHES_MAX, RecordHeader
from kvstore.daemon.shapes import Shape, Shapes
from kvstore.daemon.terms import Terms
from kvstore.daemon.tombstones import Tombstones
from kvstore.keys import BlockKey, SpaceId, TokenDigest
from kvstore.store import Presence

Touches = tuple[tuple[int, int], ...]
"""Pairs of class byte and last touch in seconds, the latest first."""
FOREVER_S = 2**62
"""End of a pin without an end."""
_ROWS_FIRST = 1024
_PRESENT, _EXPIRED, _PURGED = (np.uint8(each) for each in (Presence.PRESENT, Presence.EXPIRED, Presence.PURGED))
_MORE = np.uint16(0x8000)
"""In ``_units``: this row has further touches or a pin, in dictionaries."""
_PLACE_BITS = np.uint64(32)
_OFFSET_MASK, _ALIGN = np.uint64(0xFFFFFFFF), np.uint64(RECORD_ALIGN)
_WORD = np.uint64(29)
_KEY_WORDS = struct.Struct(">4Q")
_DIGEST_WORDS = struct.Struct("<2Q")
assert (64 * 1024 * 1024 + HEADER_BYTES) // RECORD_ALIGN + 1 < _MORE


def merge_touch(touches: Touches, class_byte: int, now_s: int, terms: Terms) -> Touches | None:
    """Count a use; None if nothing worth an index write changed.

    A touch that advances its class's deadline by less than 1/TOUCH_PARTS of keep_for is dropped from memory and disk
    alike, so that a hot block costs no write a use, and a restart changes no deadline. Of a class whose promises are
    fixed only the first counts.
    """
    keep_for_s, keep_for = terms.keep_for_s, int(terms.keep_for_s[class_byte])
    others = [pair for pair in touches if pair[0] != class_byte]
    for _, touch_s in (pair for pair in touches if pair[0] == class_byte):
        if now_s - touch_s < terms.renew_s[class_byte] or now_s <= touch_s:
            return None
    if len(others) == TOUCHES_MAX:
        earliest = min(others, key=lambda pair: pair[1] + int(keep_for_s[pair[0]]))
        if earliest[1] + int(keep_for_s[earliest[0]]) >= now_s + keep_for:
            return None
        others.remove(earliest)
    return latest_first([(class_byte, now_s), *others])


def latest_first(touches: Iterable[tuple[int, int]]) -> Touches:
    return tuple(sorted(touches, key=lambda pair: -pair[1]))


def key_words(keys: bytes) -> Words:
    """Shape [n, 4]; the first word in the order of the keys' bytes."""
    words = np.frombuffer(keys, dtype=">u8").reshape(-1, 4)
    return words.astype(np.uint64)


def digest_words(digests: bytes) -> Words:
    """Shape [n, 2]."""
    return np.frombuffer(digests, dtype="<u8").reshape(-1, 2)


def fingerprint_of(key: BlockKey) -> int:
    return int.from_bytes(key[:8], "big")


def fingerprints_in(rows: Rows) -> Words:
    """Fingerprints of index rows."""
    return np.ascontiguousarray(rows["key"])[:, 0].byteswap()


class Row(NamedTuple):
    """One row: its record's place and length on disk, its shape, its key's fingerprint."""

    segment: int
    offset: int
    record_bytes: int
    shape: Shape
    fingerprint: int


class PresenceMap:
    """Rows by slot. ``rows_expected``: for how many to reserve memory, which becomes real as they come."""

    def __init__(self, terms: Terms, tombstones_max: int, rows_expected: int = 0) -> None:
        self.terms = terms
        self.keep_for_s = terms.keep_for_s
        self.ages = Ages(terms)
        self.tombstones = Tombstones(tombstones_max)
        self.shapes = Shapes()
        self._table = FingerprintTable(max(rows_expected, _ROWS_FIRST))
        size = self._table.size
        self._checks = np.zeros(size, dtype=np.uint32)
        self.places = np.zeros(size, dtype=np.uint64)
        self._units = np.zeros(size, dtype=np.uint16)
        """Pages of the record, and ``_MORE``; 0: the slot is not in use."""
        self._shape = np.zeros(size, dtype=np.uint32)
        self._class = np.zeros(size, dtype=np.uint8)
        self._touch_s = np.zeros(size, dtype=np.uint32)
        self._touches: dict[int, Touches] = {}
        """By slot, of rows with more than one pair: all pairs."""
        self._pins_s: dict[int, int] = {}
        self._holds_s: dict[int, int] = {}
        """Ends of legal holds, by fingerprint."""
        self._holdings = Holdings()
        self._factors = [secrets.randbits(64) | 1 for _ in range(5)]
        self._secrets = np.array(self._factors, dtype=np.uint64)

    def __len__(self) -> int:
        return len(self._table)

    @property
    def slots_max(self) -> int:
        """All slots are below it."""
        return self._table.size

    @property
    def memory_bytes(self) -> int:
        """Without tombstones."""
        dictionaries = 300 * len(self._touches) + 120 * len(self._pins_s)
        return self._table.memory_bytes + 23 * self._table.fresh + self.shapes.memory_bytes + dictionaries

    # asking

    def slots(self, words: Words) -> Slots:
        """Where the rows of these keys may be (``key_words``); -1 for keys that are not here."""
        return self._table.find(np.ascontiguousarray(words[:, 0]))

    def find_all(self, fingerprints: Words) -> Slots:
        """As ``slots``, by fingerprints alone."""
        return self._table.find(fingerprints)

    def slot(self, key: BlockKey) -> int:
        return self._table.find_one(fingerprint_of(key))

    def matches(self, slots: Slots, words: Words, space_id: SpaceId, digests: Words | None) -> npt.NDArray[np.bool_]:
        """Whether rows are of this space and (where given) of these keys and token digests; a slot of -1 is not."""
        same: npt.NDArray[np.bool_] = slots >= 0
        same &= self.shapes.space.take(self._shape.take(slots)) == self.shapes.space_number(space_id)
        if digests is not None:
            same &= self._checks.take(slots) == self._check(words, digests)
        return same

    def find(self, space_id: SpaceId, key: BlockKey, token_digest: TokenDigest) -> int:
        """The slot of one block, or -1. (As ``matches`` of ``slots``, in a fifth of the time.)"""
        slot = self._table.find_one(fingerprint_of(key))
        if slot < 0 or self.shapes.space.item(self._shape.item(slot)) != self.shapes.space_number(space_id):
            return -1
        return slot if self._checks.item(slot) == self._check_one(key, token_digest) else -1

    def answer(
        self, words: Words, space_id: SpaceId, digests: Words, now_s: float
    ) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8], npt.NDArray[np.uint32]]:
        """``Presence``, flags and payload bytes of each key asked; flags and bytes are 0 where it is not PRESENT."""
        slots, count, shapes = self.slots(words), len(words), self.shapes
        here = slots >= 0
        if not here.any():
            presence, flags = np.zeros(count, np.uint8), np.zeros(count, np.uint8)
            payload_bytes = np.zeros(count, np.uint32)
        else:  # what a slot of -1 gives below counts for nothing
            shape = self._shape.take(slots)
            flags, payload_bytes = shapes.flags.take(shape), shapes.payload_bytes.take(shape)
            same = self._checks.take(slots) == self._check(words, digests)
            same &= shapes.space.take(shape) == shapes.space_number(space_id)
            same &= here
            alive = self.alive(slots, now_s)
            alive &= same
            presence = np.full(count, _PRESENT)
            if not alive.all():
                presence = np.where(alive, _PRESENT, _EXPIRED)
                presence *= same
                flags *= alive
                payload_bytes *= alive
            if shapes.any_locked:
                locked = alive & shapes.locked.take(shape)
                presence[locked], flags[locked], payload_bytes[locked] = _PURGED, 0, 0
        if len(self.tombstones) and not here.all():
            absent = (~here).nonzero()[0]
            presence[absent] = self.tombstones.reasons(words[absent, 0])
        return presence, flags, payload_bytes

    def served(self, slots: Slots, words: Words, space_id: SpaceId, digests: Words, now_s: float) -> Slots:
        """Positions of the keys asked that hold a living row of this space and token digest, and that can be read."""
        here = slots >= 0
        found = None if here.all() else here.nonzero()[0]
        if found is not None:
            slots, words, digests = slots.take(found), words[found], digests[found]
        good = self.matches(slots, words, space_id, digests)
        good &= self.alive(slots, now_s)
        if self.shapes.any_locked:
            good &= ~self.locked(slots)
        return good.nonzero()[0] if found is None else found[good]

    # columns of given slots

    def keep_until_s(self, slots: Slots) -> npt.NDArray[np.int64]:
        """Deadlines by touches and maximum age."""
        return self._capped(slots, self._keep_until_s(slots, self.keep_for_s), self.ages.ends_s)

    def until_s(self, slots: Slots) -> npt.NDArray[np.int64]:
        """Deadlines, pins included."""
        return self._until_s(slots, self.keep_for_s, self.ages.ends_s)

    def until_s_under(self, slots: Slots, terms: Terms) -> npt.NDArray[np.int64]:
        """As ``until_s``, if other rules were in force."""
        return self._until_s(slots, terms.keep_for_s, self.ages.ends_under(terms))

    def pin_until_s(self, slots: Slots) -> npt.NDArray[np.int64]:
        ends = np.zeros(len(slots), dtype=np.int64)
        if self._pins_s:
            for at in np.flatnonzero(self._units[slots] & _MORE).tolist():
                ends[at] = self._pins_s.get(int(slots[at]), 0)
        return ends

    def alive(self, slots: Slots, now_s: float) -> npt.NDArray[np.bool_]:
        """Whether each is not past its deadline."""
        alive: npt.NDArray[np.bool_] = self._touch_s.take(slots) + self.keep_for_s.take(self._class.take(slots)) > now_s
        if not alive.all():
            doubtful = np.flatnonzero(~alive & ((self._units.take(slots) & _MORE) != 0))
            alive[doubtful] = self.until_s(slots[doubtful]) > now_s
        if self.ages.ends_s is not None:
            alive &= self._ends_s(slots, self.ages.ends_s) > now_s
        return alive

    def is_alive(self, slot: int, now_s: float) -> bool:
        until_s = self._touch_s.item(slot) + self.keep_for_s.item(self._class.item(slot))
        if until_s > now_s:
            ends_s = self.ages.ends_s
            if ends_s is None or ends_s.item(self.places.item(slot) >> int(_PLACE_BITS)) > now_s:
                return True
        return self._units.item(slot) >= int(_MORE) and int(self.until_s(np.array([slot]))[0]) > now_s

    def locked(self, slots: Slots) -> npt.NDArray[np.bool_]:
        """Whether each is encrypted under a cipher key that is not there."""
        locked: npt.NDArray[np.bool_] = self.shapes.locked.take(self._shape.take(slots))
        return locked

    def is_locked(self, slot: int) -> bool:
        return self.shapes.any_locked and self.shapes.locked.item(self._shape.item(slot))

    def row(self, slot: int) -> Row:
        """What the columns below say of one slot."""
        place = self.places.item(slot)
        return Row(
            place >> int(_PLACE_BITS),
            (place & 0xFFFFFFFF) * RECORD_ALIGN,
            (self._units.item(slot) & ~int(_MORE)) * RECORD_ALIGN,
            self.shapes.shape(self._shape.item(slot)),
            self._table.fingerprints.item(slot),
        )

    def segments_of(self, slots: Slots) -> npt.NDArray[np.uint32]:
        return (self.places.take(slots) >> _PLACE_BITS).astype(np.uint32)

    def offsets_of(self, slots: Slots) -> npt.NDArray[np.uint64]:
        pages: npt.NDArray[np.uint64] = (self.places.take(slots) & _OFFSET_MASK) * _ALIGN
        return pages

    def record_bytes_of(self, slots: Slots) -> npt.NDArray[np.int64]:
        return (self._units.take(slots) & ~_MORE).astype(np.int64) * RECORD_ALIGN

    def shape_of(self, slots: Slots) -> npt.NDArray[np.uint32]:
        """Numbers into ``shapes``."""
        return self._shape.take(slots)

    def class_of(self, slots: Slots) -> npt.NDArray[np.uint8]:
        """The class that touched each last."""
        return self._class[slots]

    def fingerprints_of(self, slots: Slots) -> Words:
        return self._table.fingerprints[slots]

    def touches(self, slot: int) -> Touches:
        found = self._touches.get(slot)
        return found if found is not None else ((int(self._class[slot]), int(self._touch_s[slot])),)

    def heir(self, slot: int, class_byte: int) -> int:
        """Of the other classes that touched a row, the one that keeps it longest."""
        others = [pair for pair in self.touches(slot) if pair[0] != class_byte]
        return max(others, key=lambda pair: pair[1] + self.keep_for_s.item(pair[0]))[0]

    def is_held(self, fingerprint: int) -> bool:
        """Whether a block is under a legal hold, be it over or not."""
        return fingerprint in self._holds_s

    # sets of slots

    def shared(self, class_byte: int, spaces: Set[SpaceId] | None) -> list[int]:
        """Rows that this class and others have touched, of some spaces or of all (None)."""
        return [
            slot
            for slot, touches in self._touches.items()
            if any(pair[0] == class_byte for pair in touches)
            and (spaces is None or self.shapes.shape(self._shape.item(slot)).space_id in spaces)
        ]

    def used(self) -> Slots:
        return np.flatnonzero(self._units[: self._table.fresh])

    def in_segment(self, segment: int) -> Slots:
        places = self.places[: self._table.fresh]
        here = places - np.uint64(segment << 32) < np.uint64(1 << 32)
        return np.flatnonzero(here & (self._units[: self._table.fresh] != 0))

    def in_space(self, space_id: SpaceId) -> Slots:
        used = self.used()
        return used[self.shapes.in_space(space_id)[self._shape[used]]]

    def pinned_slots(self, now_s: float) -> Slots:
        """Rows that a pin holds."""
        return np.array([slot for slot, until_s in self._pins_s.items() if until_s > now_s], dtype=np.int64)

    def pinned_bytes(self) -> int:
        """Of records that a pin holds beyond their promise."""
        slots = np.array(list(self._pins_s), dtype=np.int64)
        beyond = self.pin_until_s(slots) > self.keep_until_s(slots)
        return int(self.record_bytes_of(slots[beyond]).sum())

    def promises_of(self, segments: Sequence[int]) -> list[tuple[int, int]]:
        """The last deadline of each segment as far as it is known, and the bytes of its rows."""
        held = [self._holdings[number] for number in segments]
        return [(item.promise_until_s, item.record_bytes) for item in held]

    def latest_use_s(self) -> int:
        """When any block was touched last; 0 without blocks."""
        return int(self._touch_s[self.used()].max(initial=0))

    def last_uses(self) -> dict[int, int]:
        """By segment that holds uncompressed blocks: when any of its blocks was touched last."""
        used = self.used()
        numbers = self.segments_of(used).astype(np.int64)
        latest = np.zeros(int(numbers.max(initial=0)) + 1, dtype=np.int64)
        np.maximum.at(latest, numbers, self._touch_s[used].astype(np.int64))
        plain = self.shapes.codec[self._shape[used]] == 0
        return {number: int(latest[number]) for number in np.unique(numbers[plain]).tolist()}

    def holdings(self, now_s: int) -> Holdings:
        """What each segment holds now."""
        doubted = self._holdings.in_doubt(now_s)
        if doubted:
            self._count(doubted, now_s)
        return self._holdings

    def _count(self, doubted: Set[int], now_s: int) -> None:
        """One pass over all rows for the totals of some segments."""
        wanted = np.array(sorted(doubted), dtype=np.uint64)
        used = self.used()
        numbers = self.places[used] >> _PLACE_BITS
        which = np.searchsorted(wanted, numbers)
        which[which == len(wanted)] = 0
        here = wanted[which] == numbers
        order = np.argsort(which[here], kind="stable")  # what sorts and sums by runs lets other threads go on
        slots = used[here][order]
        begins = np.searchsorted(which[here][order], np.arange(len(wanted)))  # a segment in doubt has a row at least
        alive = self.alive(slots, now_s)
        alive_bytes = np.add.reduceat(np.where(alive, self.record_bytes_of(slots), 0), begins)
        promise_s = np.maximum.reduceat(self.keep_until_s(slots), begins)
        next_s = np.minimum.reduceat(np.where(alive, self.until_s(slots), NEVER_S), begins)
        for at, number in enumerate(wanted.tolist()):
            self._holdings.count(number, int(alive_bytes[at]), int(promise_s[at]), now_s, int(next_s[at]))

    def from_fingerprint(self, fingerprint: int, count: int, space_id: SpaceId | None) -> Slots:
        """At least ``count`` slots (or all) whose fingerprint is this or greater, the least first."""
        fingerprints = self._table.fingerprints[: self._table.fresh]
        slots = np.flatnonzero((fingerprints >= np.uint64(fingerprint)) & (self._units[: self._table.fresh] != 0))
        if space_id is not None:
            slots = slots[self.shapes.in_space(space_id)[self._shape[slots]]]
        values = fingerprints[slots]
        if len(slots) > count:
            slots = slots[values <= np.partition(values, count - 1)[count - 1]]
        ordered: Slots = slots[np.argsort(fingerprints[slots], kind="stable")]
        return ordered

    # changing

    def insert(self, rows: Rows, pins_s: Mapping[int, int] | None = None, *, new: bool = False) -> None:
        """Add rows of the index, or put them in the place of those with the same fingerprints; no fingerprint twice.

        Their tombstones are the ledger's to forget. ``pins_s``: ends of pins by position. ``new``: none of the
        fingerprints is here.
        """
        if not len(rows):
            return
        words = _key_words_of(rows)
        slots = self._table.insert(np.ascontiguousarray(words[:, 0])) if new else self._slots_for(words)
        if self._table.size > len(self.places):
            self._grow(self._table.size)
        self._checks[slots] = self._check(words, rows["digest"])
        self.places[slots] = place_words(rows)
        self._units[slots] = (rows["stored_bytes"].astype(np.int64) + HEADER_BYTES + RECORD_ALIGN - 1) // RECORD_ALIGN
        self._shape[slots] = self.shapes.add(rows)
        self._class[slots], self._touch_s[slots] = rows["touch_class"][:, 0], rows["touch_s"][:, 0]
        for position in np.flatnonzero(rows["touch_class"][:, 1:].any(axis=1)).tolist():
            pairs = zip(rows["touch_class"][position].tolist(), rows["touch_s"][position].tolist(), strict=True)
            self._set_touches(int(slots[position]), latest_first(pair for pair in pairs if pair[0]))
        self._hold(slots)
        for position, until_s in (pins_s or {}).items():
            self.pin(int(slots[position]), until_s)

    def _slots_for(self, words: Words) -> Slots:
        """Slots to fill for keys: those that they have, freed of what only their old rows had, or new ones."""
        slots = self.slots(words)
        old = slots[slots >= 0]
        self._forget(old)
        slots[slots < 0] = self._table.insert(np.ascontiguousarray(words[slots < 0, 0]))
        return slots

    def insert_one(self, header: RecordHeader, pin_s: int) -> None:
        """As ``insert`` with ``new``, of one record that one class has touched. (In a tenth of the time.)"""
        slot = self._table.insert_one(fingerprint_of(header.key))
        if self._table.size > len(self.places):
            self._grow(self._table.size)
        self._checks[slot] = self._check_one(header.key, header.token_digest)
        self.places[slot] = header.segment << int(_PLACE_BITS) | header.offset // RECORD_ALIGN
        self._units[slot] = header.record_bytes // RECORD_ALIGN
        self._shape[slot] = self.shapes.add_one(
            Shape(header.space_id, header.payload_bytes, header.codec, header.flags)
        )
        ((class_byte, touch_s),) = header.touches
        self._class[slot], self._touch_s[slot] = class_byte, touch_s
        until_s = touch_s + self.keep_for_s.item(class_byte)
        if self.ages.ends_s is not None:
            until_s = min(until_s, self.ages.ends_s.item(header.segment))
        self._holdings.add(header.segment, header.record_bytes, until_s, until_s)
        self.pin(slot, pin_s)

    def lock(self, slot: int, codec: int) -> None:
        """A row's cipher key turned out to be another than its codec byte says: it has this one, until a restart."""
        shape = self._shape[slot : slot + 1].copy()
        self._shape[slot] = self.shapes.add_one(self.shapes.shape(int(shape[0]))._replace(codec=codec))
        self.shapes.remove(shape)

    def remove(self, slots: Slots) -> None:
        """Drop rows, each once."""
        if len(slots):
            self._forget(slots)
            self._units[slots] = 0
            self.places[slots] = 0
            self._table.remove(slots)

    def touch(self, slot: int, class_byte: int, now_s: int) -> bool:
        """Count a use; True if the row changed and must be written."""
        merged = merge_touch(self.touches(slot), class_byte, now_s, self.terms)
        if merged is not None:
            segment = self.places.item(slot) >> int(_PLACE_BITS)
            if not self.is_alive(slot, now_s):
                self._holdings.doubt(segment)
            self._set_touches(slot, merged)
            until_s = now_s + int(self.keep_for_s[class_byte])
            if self.ages.ends_s is not None:
                until_s = int(self.keep_until_s(np.array([slot]))[0])
            self._holdings.extend(segment, until_s)
        return merged is not None

    def disown(self, slot: int, class_byte: int) -> None:
        """Let a row that others touched be as if a class never had."""
        others = tuple(pair for pair in self.touches(slot) if pair[0] != class_byte)
        if others:
            self._set_touches(slot, others)
            self._holdings.doubt(self.places.item(slot) >> int(_PLACE_BITS))

    def lapse(self, slots: Slots) -> None:
        """Let rows be as if nobody had ever touched or pinned them."""
        self._touch_s[slots] = 0
        for slot in slots[(self._units[slots] & _MORE) != 0].tolist():
            self._touches.pop(slot, None)
            self._pins_s.pop(slot, None)
        for number in np.unique(self.segments_of(slots)).tolist():
            self._holdings.doubt(number)

    def worth_touching(self, slots: Slots, class_byte: int, now_s: int) -> Slots:
        """Those whose row ``touch`` may change: for hot blocks none, found without a step for each."""
        recent = (self._class[slots] == class_byte) & (
            now_s - self._touch_s[slots].astype(np.int64) < self.terms.renew_s[class_byte]
        )
        worth: Slots = slots[~recent]
        return worth

    def write_touches(self, rows: Rows, slots: Slots) -> None:
        """Put the touches in memory into index rows of these slots."""
        rows["touch_class"] = rows["touch_s"] = 0
        rows["touch_class"][:, 0] = self._class[slots]
        rows["touch_s"][:, 0] = self._touch_s[slots]
        if self._touches:
            for at in np.flatnonzero(self._units[slots] & _MORE).tolist():
                for place, (class_byte, touch_s) in enumerate(self.touches(int(slots[at]))):
                    rows["touch_class"][at, place], rows["touch_s"][at, place] = class_byte, touch_s

    def pin(self, slot: int, until_s: int) -> None:
        if until_s:
            self._pins_s[slot] = until_s
            self._units[slot] |= _MORE
            self._holdings.doubt(self.places.item(slot) >> int(_PLACE_BITS))

    def unpin_all(self) -> None:
        for slot in self._pins_s:
            self._holdings.doubt(self.places.item(slot) >> int(_PLACE_BITS))
        self._pins_s = {}

    def set_rules(self, terms: Terms) -> None:
        self.terms, self.keep_for_s = terms, terms.keep_for_s
        self.ages.set_terms(terms)
        self._holdings.doubt_all()

    def note_age(self, segment: int, class_byte: int, oldest_s: int) -> None:
        """A segment was begun for a class, or holds a record that was written as early as this."""
        self.ages.note(segment, class_byte, oldest_s)
        if self._holdings[segment].record_bytes:
            self._holdings.doubt(segment)

    def set_holds(self, holds_s: Mapping[int, int]) -> None:
        """Replace all legal holds: ends by fingerprint. They are pins besides."""
        self._holds_s = dict(holds_s)
        self._holdings.doubt_all()

    def _until_s(
        self, slots: Slots, keep_for_s: npt.NDArray[np.int64], ends_by_segment: Ends | None
    ) -> npt.NDArray[np.int64]:
        until_s = np.maximum(self._keep_until_s(slots, keep_for_s), self.pin_until_s(slots))
        return self._capped(slots, until_s, ends_by_segment)

    def _capped(
        self, slots: Slots, until_s: npt.NDArray[np.int64], ends_by_segment: Ends | None
    ) -> npt.NDArray[np.int64]:
        """Deadlines, but none beyond the maximum age."""
        return until_s if ends_by_segment is None else np.minimum(until_s, self._ends_s(slots, ends_by_segment))

    def _ends_s(self, slots: Slots, ends_by_segment: Ends) -> npt.NDArray[np.int64]:
        """When each is as old as it may become, legal holds included."""
        ends = ends_by_segment.take((self.places.take(slots) >> _PLACE_BITS).astype(np.int64))
        if self._holds_s:
            for at in np.flatnonzero(self._units.take(slots) & _MORE).tolist():
                hold_s = self._holds_s.get(self._table.fingerprints.item(int(slots[at])), 0)
                ends[at] = max(int(ends[at]), hold_s)
        return ends

    def _keep_until_s(self, slots: Slots, keep_for_s: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        ends: npt.NDArray[np.int64] = self._touch_s[slots] + keep_for_s[self._class[slots]]
        if self._touches:
            for at in np.flatnonzero(self._units[slots] & _MORE).tolist():
                for class_byte, touch_s in self._touches.get(int(slots[at]), ()):
                    ends[at] = max(int(ends[at]), touch_s + int(keep_for_s[class_byte]))
        return ends

    def _set_touches(self, slot: int, touches: Touches) -> None:
        self._class[slot], self._touch_s[slot] = touches[0]
        if len(touches) > 1:
            self._touches[slot] = touches
            self._units[slot] |= _MORE
        else:
            self._touches.pop(slot, None)

    def _hold(self, slots: Slots) -> None:
        """Rows were filled: count them to their segments."""
        segments, sizes, ends_s = self.segments_of(slots), self.record_bytes_of(slots), self.keep_until_s(slots)
        for number in np.unique(segments).tolist():
            mine = segments == number
            self._holdings.add(number, int(sizes[mine].sum()), int(ends_s[mine].min()), int(ends_s[mine].max()))

    def _forget(self, slots: Slots) -> None:
        """What other tables have of rows that go."""
        segments, sizes = self.segments_of(slots), self.record_bytes_of(slots)
        for number in np.unique(segments).tolist():
            self._holdings.remove(number, int(sizes[segments == number].sum()))
        self.shapes.remove(self._shape[slots])
        for slot in slots[(self._units[slots] & _MORE) != 0].tolist():
            self._touches.pop(slot, None)
            self._pins_s.pop(slot, None)

    def _check(self, words: Words, digests: Words) -> npt.NDArray[np.uint32]:
        """32 bits of what the fingerprint leaves out, mixed with a secret: nobody can choose two names with one."""
        mixed = words[:, 1] * self._secrets[0]
        for at, word in enumerate((words[:, 2], words[:, 3], digests[:, 0], digests[:, 1]), 1):
            mixed ^= mixed >> _WORD
            mixed ^= word
            mixed *= self._secrets[at]
        return np.asarray(mixed >> _PLACE_BITS, dtype=np.uint32)

    def _check_one(self, key: BlockKey, token_digest: TokenDigest) -> int:
        """``_check`` of one name."""
        _, first, *words = _KEY_WORDS.unpack(key)
        mixed: int = first * self._factors[0] & WORD_MAX
        for factor, word in zip(self._factors[1:], (*words, *_DIGEST_WORDS.unpack(token_digest)), strict=False):
            mixed = ((mixed ^ mixed >> int(_WORD)) ^ word) * factor & WORD_MAX
        return mixed >> int(_PLACE_BITS)

    def _grow(self, size: int) -> None:
        for name in ("_checks", "places", "_units", "_shape", "_class", "_touch_s"):
            setattr(self, name, grown(getattr(self, name), size))


def _key_words_of(rows: Rows) -> Words:
    return key_words(np.ascontiguousarray(rows["key"]).tobytes())
