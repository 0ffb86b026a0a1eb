"""The worker's KV memory as integers: which page of slots belongs to which sequence.

Owns the free list and the tables from token positions to slots. Does not know about tensors, models or the store.
A slot holds the KV of one token in every layer; a page is ``page_tokens`` consecutive slots and holds one block.

    position p of a sequence  ->  slot  pages[p // page_tokens] * page_tokens + p % page_tokens

Invariants: a page is free or in exactly one live table; free pages + pages of live tables == all pages; runs of free
pages are maximal (no two touch). Contiguous pages are preferred, since attention can then read a view, not a copy.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from itertools import pairwise


class OutOfSlots(Exception):
    """The KV memory has no room for this many tokens: let a sequence end first, or ask for less."""


class SlotTable:
    """The pages of one sequence, in order of positions. Made, grown and ended by ``Slots`` only."""

    __slots__ = ("_pages", "page_tokens")

    def __init__(self, page_tokens: int) -> None:
        self.page_tokens = page_tokens
        self._pages: list[int] = []

    @property
    def pages(self) -> Sequence[int]:
        return self._pages

    @property
    def tokens(self) -> int:
        """Positions that the table has slots for."""
        return len(self._pages) * self.page_tokens

    def first_slot(self, begin: int, end: int) -> int | None:
        """Slot of position ``begin`` if the slots of [begin, end) are consecutive, else None."""
        self._check(begin, end)
        first = begin // self.page_tokens
        last = (end - 1) // self.page_tokens
        run = self._pages[first : last + 1]
        if run[-1] - run[0] != last - first or any(page != run[0] + step for step, page in enumerate(run)):
            return None
        return run[0] * self.page_tokens + begin % self.page_tokens

    def slots(self, begin: int, end: int) -> list[int]:
        """Slots of positions [begin, end), in order."""
        if begin == end:
            return []
        self._check(begin, end)
        size, slots = self.page_tokens, list[int]()
        for index in range(begin // size, (end - 1) // size + 1):
            first, offset = self._pages[index] * size, index * size
            slots.extend(range(first + max(begin - offset, 0), first + min(end - offset, size)))
        return slots

    def _check(self, begin: int, end: int) -> None:
        if not 0 <= begin < end <= self.tokens:
            raise ValueError(f"positions [{begin}, {end}) are outside the table's {self.tokens} slots")


class Slots:
    """All pages of a worker's KV memory.

    ``allocate`` and ``extend`` raise OutOfSlots and then change nothing. Not safe for several threads.
    """

    __slots__ = ("_free_runs", "_live", "page_tokens", "pages")

    def __init__(self, pages: int, page_tokens: int) -> None:
        if pages < 1 or page_tokens < 1:
            raise ValueError(f"slots need at least one page of one token, not {pages} pages of {page_tokens}")
        self.pages = pages
        self.page_tokens = page_tokens
        self._free_runs: list[tuple[int, int]] = [(0, pages)]
        self._live: dict[int, SlotTable] = {}

    @property
    def total_tokens(self) -> int:
        return self.pages * self.page_tokens

    @property
    def free_tokens(self) -> int:
        return self._free_pages() * self.page_tokens

    def allocate(self, tokens: int) -> SlotTable:
        """A table with room for ``tokens`` tokens (0 is allowed). Raises OutOfSlots."""
        table = SlotTable(self.page_tokens)
        self._take(table, self._pages_for(tokens), tokens)
        self._live[id(table)] = table
        return table

    def extend(self, table: SlotTable, tokens: int) -> None:
        """Grow a live table until it has room for ``tokens`` tokens in all; never shrinks it. Raises OutOfSlots."""
        self._require_live(table)
        missing = self._pages_for(tokens) - len(table.pages)
        if missing > 0:
            self._take(table, missing, tokens)

    def free(self, table: SlotTable) -> None:
        """Take back all pages of a live table, which ends. Raises ValueError for one that has ended already."""
        self._require_live(table)
        del self._live[id(table)]
        for page in table.pages:
            self._give_back(page)
        table._pages.clear()

    def check_integrity(self) -> None:
        """Assert the module's invariants."""
        used = [page for table in self._live.values() for page in table.pages]
        free = [page for start, count in self._free_runs for page in range(start, start + count)]
        assert sorted(used + free) == list(range(self.pages)), "a page is lost, or is held twice"
        runs = self._free_runs
        assert all(a + n < b for (a, n), (b, _) in pairwise(runs)), "free runs touch"

    def _pages_for(self, tokens: int) -> int:
        if tokens < 0:
            raise ValueError(f"a table cannot hold {tokens} tokens")
        return -(-tokens // self.page_tokens)

    def _free_pages(self) -> int:
        return sum(count for _, count in self._free_runs)

    def _require_live(self, table: SlotTable) -> None:
        if self._live.get(id(table)) is not table:
            raise ValueError("the slot table is not live here (freed already, or another memory's)")

    def _take(self, table: SlotTable, count: int, tokens: int) -> None:
        """Move free pages to the table: those right behind it, else the smallest run that fits, else pieces."""
        if count > self._free_pages():
            raise OutOfSlots(
                f"{tokens} tokens need {count} more pages of {self.page_tokens} tokens; "
                f"{self._free_pages()} of {self.pages} are free"
            )
        while count:
            following = table.pages[-1] + 1 if table.pages else -1
            index = self._choose_run(count, following)
            start, length = self._free_runs[index]
            taken = min(count, length)
            table._pages.extend(range(start, start + taken))
            if taken == length:
                del self._free_runs[index]
            else:
                self._free_runs[index] = (start + taken, length - taken)
            count -= taken

    def _choose_run(self, count: int, following: int) -> int:
        """Index of the run to take from; one that starts at page ``following`` keeps the table contiguous."""
        runs = self._free_runs
        index = bisect_left(runs, (following, 0))
        if index < len(runs) and runs[index][0] == following:
            return index
        fitting = [position for position, (_, length) in enumerate(runs) if length >= count]
        if fitting:
            return min(fitting, key=lambda position: runs[position][1])
        return max(range(len(runs)), key=lambda position: runs[position][1])

    def _give_back(self, page: int) -> None:
        runs = self._free_runs
        index = bisect_left(runs, (page, 0))
        start, count = page, 1
        if index < len(runs) and runs[index][0] == page + 1:
            count += runs.pop(index)[1]
        if index and sum(runs[index - 1]) == page:
            before = runs.pop(index - 1)
            start, count = before[0], before[1] + count
        insort(runs, (start, count))
