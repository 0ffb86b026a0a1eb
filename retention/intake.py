"""The intake of a simulated volume: which new blocks are worth a write, by the rule of their class.

Owns which blocks were offered once, and what each class may still write today; it is the daemon's intake
(``kvstore/daemon/intake.py``) over numbers, without the few keys that a Bloom filter takes for others. Does not know
what is stored: it is asked only about blocks that are not. Invariants: within a budget the first blocks of a prefix are
taken first; a budget is spent by what was stored.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvstore.limits import OFFERS_MAX
from kvstore.reclaim import DAY_S
from kvstore.traffic import SECOND_TOUCH, ClassRule

_NEVER = -2


class Intake:
    """Of one volume. ``blocks``: how many numbers there are."""

    def __init__(self, blocks: int, record_bytes: int) -> None:
        self._record_bytes = record_bytes
        self._offered = np.full(blocks, _NEVER, dtype=np.int32)
        """By block: the era in which it was offered last; an era is OFFERS_MAX offers long, and two are remembered."""
        self._era = self._offers = 0
        self._day = 0
        self._spent: dict[int, int] = {}
        """By class byte: bytes stored today."""

    @staticmethod
    def chooses(rule: ClassRule) -> bool:
        """Whether there is anything to ask about a class."""
        return rule.admission == SECOND_TOUCH or rule.write_budget_bytes > 0

    def admit(self, rule: ClassRule, blocks: npt.NDArray[np.int64], now_s: int) -> npt.NDArray[np.bool_]:
        """Which of some new blocks to store."""
        wanted = np.ones(len(blocks), dtype=np.bool_)
        if rule.admission == SECOND_TOUCH:
            wanted &= self._remember(blocks)
        if rule.write_budget_bytes:
            if now_s // DAY_S != self._day:
                self._day, self._spent = now_s // DAY_S, {}
            left_bytes = rule.write_budget_bytes - self._spent.get(rule.class_byte, 0)
            wanted &= np.cumsum(wanted) * self._record_bytes <= left_bytes
        return wanted

    def spend(self, rule: ClassRule, stored: int) -> None:
        """Blocks that were stored of those admitted."""
        self._spent[rule.class_byte] = self._spent.get(rule.class_byte, 0) + stored * self._record_bytes

    def _remember(self, blocks: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        known: npt.NDArray[np.bool_] = self._offered[blocks] >= self._era - 1
        self._offered[blocks[~known]] = self._era
        self._offers += int(np.count_nonzero(~known))
        if self._offers >= OFFERS_MAX:
            self._era, self._offers = self._era + 1, 0
        return known
