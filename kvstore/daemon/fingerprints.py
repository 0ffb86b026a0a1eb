"""A table from 8-byte fingerprints to row numbers, asked and changed for many at once.

Owns the numbering of rows and the chains that find them. Does not know what a row means, files or locks. Invariants: a
fingerprint has one row at most; rows are reused; about one bucket a row at every size, because buckets are split a few
at a time as rows come (linear hashing), so that no insert waits for a whole table to be made anew; the head of a bucket
has the mark of each row in it, so that most searches for what is not there end at the head; the mix of a
fingerprint's bits is secret to the process, so that nobody can choose keys that share a bucket. Memory: 16 bytes a row
(fingerprint, chain, bucket); arrays are reserved ahead and become real memory only where they were written.
"""

from __future__ import annotations

import secrets
from typing import TypeVar

import numpy as np
import numpy.typing as npt

Slots = npt.NDArray[np.int64]
"""Numbers of rows; -1 where there is none."""
Scalar = TypeVar("Scalar", bound=np.generic)
Words = npt.NDArray[np.uint64]

WORD_MAX = 2**64 - 1
_FEW = 8
"""Chains that are walked one by one: a step for many costs as much as some tens of steps for one."""
_RUN_MIN = 32
"""Rows: after a shorter run the rest is found without looking for more, since a run costs as much as the chains of so
many.
"""
_BUCKETS_FIRST = 1024
_ROWS_FIRST = 1024
_WORD_BITS = np.uint64(29)
_HALF_BITS = np.uint64(32)
_LINK_BITS = 28
ROWS_MAX = 2**_LINK_BITS - 1
"""A link has so many bits, and a head four marks above them. (Of a quarter of a milliard rows the memory is 10 GiB.)"""
_LINK = np.uint32(ROWS_MAX)
_MARK_BITS = np.uint64(30)
"""Of the 32 bits of a mix the lowest say the bucket, and the two from here on which of the four marks."""
_MARKS = np.uint32(1) << np.arange(_LINK_BITS, _LINK_BITS + 4, dtype=np.uint32)


class FingerprintTable:
    """Belongs to one lock. ``fingerprints`` is a column by slot; 0 for an unused slot (and for a row that has it).

    ``rows_expected``: for how many rows to reserve (virtual) memory; more are taken all the same, up to ROWS_MAX.
    """

    def __init__(self, rows_expected: int) -> None:
        size = min(max(rows_expected, _ROWS_FIRST), ROWS_MAX)
        self.fingerprints = np.zeros(size, dtype=np.uint64)
        self._next = np.zeros(size, dtype=np.uint32)
        """Chain: the slot behind this one, plus 1; 0 at its end."""
        self._heads = np.zeros(size + _BUCKETS_FIRST, dtype=np.uint32)
        """By bucket: the link to its first slot, and the marks of all its rows."""
        self._level, self._split = _BUCKETS_FIRST, 0
        self._free = np.zeros(0, dtype=np.int64)
        self._freed = 0
        self.fresh = 0
        """Slots from here on were never used."""
        self._words = tuple(secrets.randbits(64) | 1 for _ in range(4))
        self._seed, self._factor, self._second, self._third = map(np.uint64, self._words)

    def __len__(self) -> int:
        return self.fresh - self._freed

    @property
    def size(self) -> int:
        """Slots that are reserved."""
        return len(self.fingerprints)

    @property
    def memory_bytes(self) -> int:
        """Memory in use: of the reserved arrays, the part that was written."""
        return 12 * self.fresh + 4 * (self._level + self._split) + self._free.nbytes

    def find(self, fingerprints: Words) -> Slots:
        """The slot of each fingerprint, or -1. The first are found in runs, as far as they lie in such."""
        if len(fingerprints) <= _FEW:
            return np.array([self.find_one(each) for each in fingerprints.tolist()], np.int64)
        runs = self._runs(fingerprints)
        if not runs:
            return self._find_by_chains(fingerprints)
        rest = fingerprints[sum(map(len, runs)) :]
        if len(rest):
            runs.append(self._find_by_chains(rest))
        return np.concatenate(runs) if len(runs) > 1 else runs[0]

    def _runs(self, fingerprints: Words) -> list[Slots]:
        """Slots of the first of these, of as many as lie in runs of slots that follow each other, in this order: blocks
        of a prompt do that were stored together. They cost a twentieth of what following their chains does.
        """
        runs: list[Slots] = []
        begin, length = 0, _RUN_MIN
        while length >= _RUN_MIN and (count := len(fingerprints) - begin) > 1:
            first = self.find_one(fingerprints.item(begin))
            here = self.fingerprints[first : first + count] if first >= 0 else fingerprints[:0]
            if len(here) < 2 or here.item(1) != fingerprints.item(begin + 1):
                break
            wrong = here != fingerprints[begin : begin + len(here)]
            wrong |= here == 0
            length = int(wrong.argmax()) if wrong.any() else len(here)
            runs.append(np.arange(first, first + length))
            begin += length
        return runs

    def _find_by_chains(self, fingerprints: Words) -> Slots:
        """``find``, wherever they lie: all chains that the marks leave in doubt are followed at once, step by step."""
        buckets, marks = self._places(fingerprints)
        heads = self._heads.take(buckets)
        marks &= heads
        pending = marks.nonzero()[0]
        wanted = fingerprints.take(pending)
        at = (heads.take(pending) & _LINK).astype(np.int64)
        at -= 1
        slots: Slots = np.full(len(fingerprints), -1)
        slots[pending] = at
        while pending.size > _FEW:
            wrong = (self.fingerprints.take(at) != wanted).nonzero()[0]
            pending, wanted = pending.take(wrong), wanted.take(wrong)
            at = self._next.take(at.take(wrong)).astype(np.int64)
            at -= 1
            slots[pending] = at
            going = (at >= 0).nonzero()[0]
            pending, wanted, at = pending.take(going), wanted.take(going), at.take(going)
        for position in pending.tolist():
            slots[position] = self._along(slots.item(position) + 1, fingerprints.item(position))
        return slots

    def find_one(self, fingerprint: int) -> int:
        """As ``find``, of one."""
        bucket, mark = self._place(fingerprint)
        head = self._heads.item(bucket)
        return self._along(head & ROWS_MAX, fingerprint) if head & mark else -1

    def _along(self, at: int, fingerprint: int) -> int:
        """The slot of a fingerprint in the chain from a link (slot plus 1) on, or -1."""
        while at and self.fingerprints.item(at - 1) != fingerprint:
            at = self._next.item(at - 1)
        return at - 1

    def insert(self, fingerprints: Words) -> Slots:
        """New slots for fingerprints that have none, each once."""
        count = len(fingerprints)
        reused = min(count, self._freed)
        self._freed -= reused
        slots = np.concatenate(
            [self._free[self._freed : self._freed + reused], np.arange(self.fresh, self.fresh + count - reused)]
        )
        self.fresh += count - reused
        assert self.fresh <= ROWS_MAX  # whoever inserts keeps to it
        if self.fresh > self.size:
            self._grow(max(self.fresh, 2 * self.size))
        self.fingerprints[slots] = fingerprints
        self._link(slots)
        self._split_to(len(self))
        return slots

    def insert_one(self, fingerprint: int) -> int:
        """As ``insert``, of one."""
        if self._freed:
            self._freed -= 1
            slot = int(self._free[self._freed])
        else:
            slot = self.fresh
            self.fresh += 1
            if self.fresh > self.size:
                self._grow(2 * self.size)
        self.fingerprints[slot] = fingerprint
        bucket, mark = self._place(fingerprint)
        head = self._heads.item(bucket)
        self._next[slot] = head & ROWS_MAX
        self._heads[bucket] = head & ~ROWS_MAX | mark | slot + 1
        self._split_to(len(self))
        return slot

    def remove(self, slots: Slots) -> None:
        """Free slots that are in use, each once."""
        buckets = np.unique(self._places(self.fingerprints[slots])[0])
        chained = self._take_chains(buckets)
        self._link(chained[~np.isin(chained, slots)])
        self.fingerprints[slots] = 0
        needed = self._freed + len(slots)
        if needed > len(self._free):
            self._free = grown(self._free, max(needed, 2 * len(self._free)))
        self._free[self._freed : needed] = slots
        self._freed = needed

    def _places(self, fingerprints: Words) -> tuple[Slots, npt.NDArray[np.uint32]]:
        """Bucket and mark of each. Three rounds: after two, keys that count in their first half share buckets for some
        secrets (a search then looks at 13 rows, not 1.6).
        """
        mixed = fingerprints ^ self._seed
        mixed *= self._factor
        mixed ^= mixed >> _WORD_BITS
        mixed *= self._second
        mixed ^= mixed >> _HALF_BITS
        mixed *= self._third
        mixed >>= _HALF_BITS
        marks = _MARKS.take((mixed >> _MARK_BITS).view(np.int64))
        mixed &= np.uint64(2 * self._level - 1)
        buckets = mixed.view(np.int64)
        buckets -= self._level * (buckets >= self._level + self._split)
        return buckets, marks

    def _place(self, fingerprint: int) -> tuple[int, int]:
        """``_places`` of one."""
        seed, factor, second, third = self._words
        mixed = (fingerprint ^ seed) * factor & WORD_MAX
        mixed = (mixed ^ mixed >> int(_WORD_BITS)) * second & WORD_MAX
        mixed = ((mixed ^ mixed >> int(_HALF_BITS)) * third & WORD_MAX) >> int(_HALF_BITS)
        mark = 1 << _LINK_BITS + (mixed >> int(_MARK_BITS))
        mixed &= 2 * self._level - 1
        return mixed - self._level if mixed >= self._level + self._split else mixed, mark

    def _link(self, slots: Slots) -> None:
        """Put slots at the heads of their chains."""
        if not len(slots):
            return
        buckets, marks = self._places(self.fingerprints[slots])
        order = np.argsort(buckets, kind="stable")
        buckets, slots, marks = buckets[order], slots[order], marks[order]
        differs = buckets[1:] != buckets[:-1]
        first = np.concatenate([[True], differs])
        last = np.concatenate([differs, [True]])
        behind = np.empty(len(slots), dtype=np.uint32)
        behind[:-1] = slots[1:] + 1
        heads = self._heads[buckets[last]]
        behind[last] = heads & _LINK
        self._next[slots] = behind
        marks = np.bitwise_or.reduceat(marks, np.flatnonzero(first)) | (heads & ~_LINK)
        self._heads[buckets[first]] = marks | (slots[first] + 1).astype(np.uint32)

    def _take_chains(self, buckets: Slots) -> Slots:
        """Empty these buckets; what was in them."""
        at = self._heads[buckets] & _LINK
        self._heads[buckets] = 0
        taken: list[npt.NDArray[np.uint32]] = []
        while (at := at[at != 0]).size:
            taken.append(at - np.uint32(1))
            at = self._next[taken[-1]]
        return np.concatenate(taken).astype(np.int64) if taken else np.zeros(0, dtype=np.int64)

    def _split_to(self, buckets_wanted: int) -> None:
        while self._level + self._split < buckets_wanted:
            count = min(buckets_wanted - self._level - self._split, self._level - self._split)
            moved = self._take_chains(np.arange(self._split, self._split + count))
            self._split += count
            if self._split == self._level:
                self._level, self._split = 2 * self._level, 0
            self._link(moved)

    def _grow(self, size: int) -> None:
        self.fingerprints = grown(self.fingerprints, size)
        self._next = grown(self._next, size)
        self._heads = grown(self._heads, size + _BUCKETS_FIRST)


def grown(column: npt.NDArray[Scalar], size: int) -> npt.NDArray[Scalar]:
    """A longer column with the same beginning."""
    longer = np.zeros(size, dtype=column.dtype)
    longer[: len(column)] = column
    return longer
