"""Intake: which new blocks are worth a write, by the rule of their class.

Owns the memory of keys offered once, and what each class may still write today. Does not know what is stored already:
it is asked only about keys that are not. Invariants: a class admits everything unless its rule says otherwise; within a
budget the first blocks of a prefix are taken first; a budget is spent by what was stored, never by what was refused.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from kvstore.daemon.columns import Incoming
from kvstore.daemon.ledger import Ledger
from kvstore.daemon.offers import Offers
from kvstore.daemon.presence import key_words
from kvstore.daemon.wear import DAY_S, Wear
from kvstore.daemon.writer import PutUnderWay, Writer
from kvstore.keys import BlockKey, SpaceId
from kvstore.store import PutOutcome
from kvstore.traffic import SECOND_TOUCH, ClassRule, ClassRules


class Intake:
    """Of a node. Thread-safe. ``spent``: bytes by class that the volumes have written today already."""

    def __init__(self, spent: Mapping[int, int], now_s: float, offers: Offers | None = None) -> None:
        self._offers = offers or Offers()
        self._day = int(now_s) // DAY_S
        self._spent = dict(spent)
        self._lock = threading.Lock()

    @staticmethod
    def chooses(rule: ClassRule) -> bool:
        """Whether there is anything to ask about a class."""
        return rule.admission == SECOND_TOUCH or rule.write_budget_bytes > 0

    def admit(
        self, rule: ClassRule, keys: Sequence[BlockKey], sizes: npt.NDArray[np.int64], now_s: float
    ) -> npt.NDArray[np.bool_]:
        """Which of some new blocks to store. ``sizes``: bytes that each takes on disk, set aside until ``settle``."""
        with self._lock:
            wanted = np.ones(len(keys), dtype=np.bool_)
            if rule.admission == SECOND_TOUCH:
                wanted &= self._offers.remember(keys)
            if rule.write_budget_bytes:
                left_bytes = rule.write_budget_bytes - self._spent_today(rule.class_byte, now_s)
                wanted &= np.cumsum(np.where(wanted, sizes, 0)) <= left_bytes
                self._spent[rule.class_byte] = self._spent.get(rule.class_byte, 0) + int(sizes[wanted].sum())
            return wanted

    def settle(self, rule: ClassRule, unspent_bytes: int) -> None:
        """What was set aside but not stored may be spent again."""
        if rule.write_budget_bytes and unspent_bytes:
            with self._lock:
                self._spent[rule.class_byte] = max(0, self._spent.get(rule.class_byte, 0) - unspent_bytes)

    def _spent_today(self, class_byte: int, now_s: float) -> int:
        today = int(now_s) // DAY_S
        if today != self._day:
            self._day, self._spent = today, {}
        return self._spent.get(class_byte, 0)


class SelectiveWriter:
    """The writer of one shard behind the intake. Runs under the shard's outer lock, as the writer does."""

    def __init__(
        self, writer: Writer, ledger: Ledger, rules: Callable[[], ClassRules], intake: Intake, wear: Wear
    ) -> None:
        self._writer = writer
        self._ledger = ledger
        self._rules = rules
        self._intake = intake
        self._wear = wear

    def put(
        self, space_id: SpaceId, blocks: Incoming, class_byte: int, now_s: int, *, for_disk: bool = False
    ) -> list[PutOutcome]:
        """As ``Writer.put``; new blocks that the rule of their class does not want are DECLINED."""
        rule = self._rules().by_byte(class_byte)
        if rule is None or not self._intake.chooses(rule):
            return self._writer.put(space_id, blocks, class_byte, now_s, for_disk=for_disk)
        fresh, sizes = self._fresh(blocks), blocks.record_bytes()
        wanted = self._intake.admit(rule, [blocks.keys[at] for at in fresh.tolist()], sizes[fresh], now_s)
        declined = frozenset(fresh[~wanted].tolist())
        kept = [at for at in range(len(blocks)) if at not in declined]
        done = self._writer.put(space_id, blocks.pick(kept), class_byte, now_s, for_disk=for_disk) if kept else []
        outcomes = [PutOutcome.DECLINED] * len(blocks)
        for at, outcome in zip(kept, done, strict=True):
            outcomes[at] = outcome
        self._ledger.counters.declined += len(declined)
        chosen = fresh[wanted].tolist()
        stored_bytes = sum(int(sizes[at]) for at in chosen if outcomes[at] is PutOutcome.STORED)
        self._intake.settle(rule, int(sizes[chosen].sum()) - stored_bytes)
        self._wear.count_class(class_byte, stored_bytes, now_s)
        return outcomes

    def begin(
        self, space_id: SpaceId, blocks: Incoming, class_byte: int, now_s: int, *, for_disk: bool, alone: bool
    ) -> PutUnderWay | None:
        """As ``Writer.begin``; None where there is something to choose."""
        rule = self._rules().by_byte(class_byte)
        if rule is not None and self._intake.chooses(rule):
            return None
        return self._writer.begin(space_id, blocks, class_byte, now_s, for_disk=for_disk, alone=alone)

    def end(self, put: PutUnderWay) -> list[PutOutcome] | None:
        """As ``Writer.end``."""
        outcomes = self._writer.end(put)
        self._ledger.compact_if_due()
        return outcomes

    def _fresh(self, blocks: Incoming) -> npt.NDArray[np.intp]:
        """Positions of the blocks whose keys have no row: others are a touch, or were stored before."""
        with self._ledger.lock:
            return np.flatnonzero(self._ledger.presence.slots(key_words(b"".join(blocks.keys))) < 0)
