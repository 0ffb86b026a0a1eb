"""How old the blocks of each segment may become: the maximum age of its class, from its oldest record on.

Owns, by segment number, the class and when the oldest record was written. Does not know rows or files. Invariant: a
segment's end is never later than that of one of its records: they share it, which costs no memory a row.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvstore.daemon.terms import Terms

Ends = npt.NDArray[np.int64]
_FIRST = 64


class Ages:
    """Guarded by whoever guards the map. ``ends_s``: by segment number, None while no class has a maximum age."""

    def __init__(self, terms: Terms) -> None:
        self._classes = np.zeros(_FIRST, dtype=np.uint8)
        self._oldest_s = np.zeros(_FIRST, dtype=np.int64)
        self._terms = terms
        self.ends_s: Ends | None = self.ends_under(terms)

    def note(self, segment: int, class_byte: int, oldest_s: int) -> None:
        """A segment was begun for a class, or takes a record that was written as early as this."""
        missing = segment + 1 - len(self._classes)
        if missing > 0:
            more = max(missing, len(self._classes))
            self._classes = np.append(self._classes, np.zeros(more, dtype=np.uint8))
            self._oldest_s = np.append(self._oldest_s, np.zeros(more, dtype=np.int64))
        self._classes[segment], self._oldest_s[segment] = class_byte, oldest_s
        if missing > 0:
            self.ends_s = self.ends_under(self._terms)
        elif self.ends_s is not None:
            self.ends_s[segment] = oldest_s + self._terms.max_age_s.item(class_byte)

    def set_terms(self, terms: Terms) -> None:
        self._terms = terms
        self.ends_s = self.ends_under(terms)

    def ends_under(self, terms: Terms) -> Ends | None:
        """As ``ends_s``, if other rules were in force."""
        if not terms.bounds_age:
            return None
        ends: Ends = self._oldest_s + terms.max_age_s[self._classes]
        return ends

    def is_over(self, segment: int, now_s: int) -> bool:
        """Whether the blocks of a segment are as old as they may become."""
        return self.ends_s is not None and self.ends_s.item(segment) <= now_s
