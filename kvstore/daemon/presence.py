"""The presence map: every stored block in memory, so that a lookup of a whole prompt costs one call and no disk.

Owns the map from key to row, the deadlines derived from touches, and the tombstones that say why a block is gone.
Does not know files or locks: its shard guards it. Invariants: a row is the index entry byte for byte; a deadline is
the maximum over touches of touch + keep_for of the class, or the pin's end where that is later; nothing past its
deadline is PRESENT. Memory: about 350 bytes a block.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from kvstore.daemon.index import ENTRY_DTYPE, Rows, Tombstone
from kvstore.daemon.record import TOUCHES_MAX
from kvstore.keys import BlockKey, SpaceId, TokenDigest
from kvstore.store import Presence
from kvstore.traffic import ClassRules

Slots = npt.NDArray[np.int64]
FOREVER_S = 2**62
"""End of a pin without an end."""
_ROWS_FIRST = 1024


def keep_for_table(rules: ClassRules) -> npt.NDArray[np.int64]:
    """Seconds from a touch, by class byte."""
    return np.array([rules.keep_for_s(class_byte) for class_byte in range(256)], dtype=np.int64)


def keep_until(rows: Rows, keep_for_s: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Deadline of each row: the maximum over its touches."""
    classes = rows["touch_class"]
    ends = rows["touch_s"].astype(np.int64) + keep_for_s[classes]
    deadlines: npt.NDArray[np.int64] = np.where(classes != 0, ends, 0).max(axis=-1)
    return deadlines


def merge_touch(row: np.void, class_byte: int, now_s: int, keep_for_s: npt.NDArray[np.int64]) -> bool:
    """Count a use in a row; False if nothing worth an index write changed.

    A touch that advances its class's deadline by less than 1/1024 of keep_for is dropped from memory and disk alike,
    so that a
    hot block costs no write a use, and a restart changes no deadline.
    """
    classes, times = row["touch_class"], row["touch_s"]
    keep_for = int(keep_for_s[class_byte])
    known = np.flatnonzero(classes == class_byte)
    if known.size:
        place = int(known[0])
        if (now_s - int(times[place])) * 1024 < keep_for or now_s <= int(times[place]):
            return False
    else:
        empty = np.flatnonzero(classes == 0)
        place = int(empty[0]) if empty.size else _earliest(classes, times, keep_for_s)
        if not empty.size and int(times[place]) + int(keep_for_s[classes[place]]) >= now_s + keep_for:
            return False
    classes[place], times[place] = class_byte, now_s
    return True


def _earliest(classes: npt.NDArray[np.uint8], times: npt.NDArray[np.uint32], keep_for_s: npt.NDArray[np.int64]) -> int:
    assert len(classes) == TOUCHES_MAX
    return int(np.argmin(times.astype(np.int64) + keep_for_s[classes]))


def space_words(space_id: SpaceId) -> npt.NDArray[np.uint64]:
    return np.frombuffer(space_id, dtype="<u8")


def digest_words(digests: Sequence[TokenDigest]) -> npt.NDArray[np.uint64]:
    """Shape [n, 2]."""
    return np.frombuffer(b"".join(digests), dtype="<u8").reshape(-1, 2)


class PresenceMap:
    """Keys to rows. ``rows``, ``keep_until_s``, ``pin_until_s``, ``used``, ``checked`` are columns by slot, and reused.

    ``checked``: the record's header was written or read by this process; what a start loads is not.
    """

    def __init__(self, keep_for_s: npt.NDArray[np.int64], tombstones_max: int) -> None:
        self.keep_for_s = keep_for_s
        self._tombstones_max = tombstones_max
        self._slots: dict[BlockKey, int] = {}
        self._keys: list[BlockKey | None] = []
        self._free: list[int] = []
        self.rows: Rows = np.zeros(_ROWS_FIRST, dtype=ENTRY_DTYPE)
        self.keep_until_s = np.zeros(_ROWS_FIRST, dtype=np.int64)
        self.pin_until_s = np.zeros(_ROWS_FIRST, dtype=np.int64)
        self.used = np.zeros(_ROWS_FIRST, dtype=bool)
        self.checked = np.zeros(_ROWS_FIRST, dtype=bool)
        self._tombstones: OrderedDict[BlockKey, Tombstone] = OrderedDict()

    def __len__(self) -> int:
        return len(self._slots)

    def load(self, keys: Sequence[BlockKey], rows: Rows, tombstones: dict[BlockKey, Tombstone]) -> None:
        """Fill an empty map."""
        assert not self._slots
        count = len(keys)
        size = max(_ROWS_FIRST, count + count // 4)
        self.rows = np.zeros(size, dtype=ENTRY_DTYPE)
        self.rows[:count] = rows
        self.keep_until_s = np.zeros(size, dtype=np.int64)
        self.pin_until_s = np.zeros(size, dtype=np.int64)
        self.used = np.zeros(size, dtype=bool)
        self.used[:count] = True
        self.checked = np.zeros(size, dtype=bool)
        self._keys = list(keys)
        self._slots = {key: slot for slot, key in enumerate(keys)}
        self.keep_until_s[:count] = keep_until(self.rows[:count], self.keep_for_s)
        ordered = sorted(tombstones.items(), key=lambda item: item[1].when_s)
        self._tombstones = OrderedDict(ordered[-self._tombstones_max :])

    def slot(self, key: BlockKey) -> int:
        """Where a key's row is; -1 if it is not here."""
        return self._slots.get(key, -1)

    def slots(self, keys: Iterable[BlockKey], count: int) -> Slots:
        get = self._slots.get
        return np.fromiter((get(key, -1) for key in keys), dtype=np.int64, count=count)

    def key(self, slot: int) -> BlockKey:
        key = self._keys[slot]
        assert key is not None
        return key

    def add(self, key: BlockKey, entry: bytes, pin_until_s: int = 0) -> int:
        """Insert or overwrite a row; forgets the key's tombstone."""
        slot = self._slots.get(key, -1)
        if slot < 0:
            slot = self._free.pop() if self._free else self._next_slot()
            self._slots[key] = slot
            self._keys[slot] = key
            self.used[slot] = True
        self.rows[slot] = np.frombuffer(entry, dtype=ENTRY_DTYPE)[0]
        self.keep_until_s[slot] = keep_until(self.rows[slot], self.keep_for_s)
        self.pin_until_s[slot] = pin_until_s
        self.checked[slot] = True
        self._tombstones.pop(key, None)
        return slot

    def remove(self, key: BlockKey, tombstone: Tombstone | None) -> dict[BlockKey, Tombstone | None]:
        """Drop a row; returns the tombstones that changed, for the index (None: forgotten)."""
        slot = self._slots.pop(key)
        self._keys[slot] = None
        self._free.append(slot)
        self.used[slot] = False
        self.rows[slot] = np.zeros((), dtype=ENTRY_DTYPE)
        self.keep_until_s[slot] = self.pin_until_s[slot] = 0
        return {} if tombstone is None else self.bury(key, tombstone)

    def bury(self, key: BlockKey, tombstone: Tombstone) -> dict[BlockKey, Tombstone | None]:
        """Remember why a key is gone; the oldest tombstones beyond the bound are forgotten."""
        changed: dict[BlockKey, Tombstone | None] = {key: tombstone}
        self._tombstones.pop(key, None)
        self._tombstones[key] = tombstone
        while len(self._tombstones) > self._tombstones_max:
            oldest, _ = self._tombstones.popitem(last=False)
            changed[oldest] = None
        return changed

    def tombstone(self, key: BlockKey) -> Tombstone | None:
        return self._tombstones.get(key)

    @property
    def tombstones(self) -> OrderedDict[BlockKey, Tombstone]:
        return self._tombstones

    def touch(self, slot: int, class_byte: int, now_s: int) -> bool:
        """Count a use; True if the row changed and must be written."""
        if not merge_touch(self.rows[slot], class_byte, now_s, self.keep_for_s):
            return False
        self.keep_until_s[slot] = keep_until(self.rows[slot], self.keep_for_s)
        return True

    def entry(self, slot: int) -> bytes:
        """The row as an index value."""
        return bytes(self.rows[slot].tobytes())

    def set_rules(self, keep_for_s: npt.NDArray[np.int64]) -> None:
        self.keep_for_s = keep_for_s
        self.keep_until_s[:] = np.where(self.used, keep_until(self.rows, keep_for_s), 0)

    def until_s(self, slots: Slots | slice = slice(None)) -> npt.NDArray[np.int64]:
        """Deadlines, pins included."""
        return np.maximum(self.keep_until_s[slots], self.pin_until_s[slots])

    def alive(self, now_s: float) -> npt.NDArray[np.bool_]:
        """By slot: used and not past its deadline."""
        return self.used & (self.until_s() > now_s)

    def alive_under(self, keep_for_s: npt.NDArray[np.int64], now_s: float) -> npt.NDArray[np.bool_]:
        """As ``alive``, if other rules were in force."""
        return self.used & (np.maximum(keep_until(self.rows, keep_for_s), self.pin_until_s) > now_s)

    def is_alive(self, slot: int, now_s: float) -> bool:
        return bool(self.used[slot]) and max(int(self.keep_until_s[slot]), int(self.pin_until_s[slot])) > now_s

    def matches(self, slot: int, space_id: SpaceId, token_digest: TokenDigest | None) -> bool:
        """Whether the row is of this space and (where given) this token prefix: a key alone is not believed."""
        row = self.rows[slot]
        return row["space"].tobytes() == space_id and (token_digest is None or row["digest"].tobytes() == token_digest)

    def presence(
        self, slots: Slots, keys: Sequence[BlockKey], space_id: SpaceId, digests: npt.NDArray[np.uint64], now_s: float
    ) -> npt.NDArray[np.uint8]:
        """``Presence`` of each key asked, as one vector."""
        answer = np.zeros(len(keys), dtype=np.uint8)
        found = np.flatnonzero(slots >= 0)
        if found.size:
            rows = self.rows[slots[found]]
            same = (rows["space"] == space_words(space_id)).all(axis=1) & (rows["digest"] == digests[found]).all(axis=1)
            alive = self.until_s(slots[found]) > now_s
            answer[found] = np.where(same, np.where(alive, Presence.PRESENT, Presence.EXPIRED), Presence.NEVER)
        if self._tombstones:
            for place in np.flatnonzero(slots < 0).tolist():
                tombstone = self._tombstones.get(keys[place])
                answer[place] = tombstone.reason if tombstone else Presence.NEVER
        return answer

    def served(self, slots: Slots, space_id: SpaceId, digests: npt.NDArray[np.uint64], now_s: float) -> Slots:
        """Positions of the slots (-1: none) that hold a living row of this space and the token digest asked for."""
        found = np.flatnonzero(slots >= 0)
        rows = self.rows[slots[found]]
        same = (rows["space"] == space_words(space_id)).all(axis=1) & (rows["digest"] == digests[found]).all(axis=1)
        places: Slots = found[same & (self.until_s(slots[found]) > now_s)]
        return places

    def in_segment(self, segment: int) -> Slots:
        return np.flatnonzero(self.used & (self.rows["segment"] == segment))

    def in_space(self, space_id: SpaceId) -> Slots:
        return np.flatnonzero(self.used & (self.rows["space"] == space_words(space_id)).all(axis=1))

    def _next_slot(self) -> int:
        slot = len(self._keys)
        self._keys.append(None)
        if slot == len(self.rows):
            self.rows = np.concatenate([self.rows, np.zeros_like(self.rows)])
            self.keep_until_s = np.concatenate([self.keep_until_s, np.zeros_like(self.keep_until_s)])
            self.pin_until_s = np.concatenate([self.pin_until_s, np.zeros_like(self.pin_until_s)])
            self.used = np.concatenate([self.used, np.zeros_like(self.used)])
            self.checked = np.concatenate([self.checked, np.zeros_like(self.checked)])
        return slot
