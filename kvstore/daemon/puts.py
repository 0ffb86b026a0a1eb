"""Puts of one shard: each goes to the writer in as many turns as its bytes and its room need, until all is answered.

Owns what is done between turns: bytes that are late are waited for there, and the disk is, for ack ``disk``. Does not
write, make room or take turns itself. Invariant: what a turn writes is dated by that turn, so that it is younger than
whatever was purged before, however long its peer or the others took.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager

from kvstore.daemon.columns import Incoming
from kvstore.daemon.confirmations import Confirmations
from kvstore.daemon.intake import SelectiveWriter
from kvstore.daemon.ledger import Ledger
from kvstore.daemon.turns import Turns
from kvstore.daemon.writer import PutUnderWay
from kvstore.keys import SpaceId
from kvstore.store import Clock, PutOutcome
from kvstore.wire import PutAck


class Puts:
    """Thread-safe. ``alone``: the shard's turn alone, within so many seconds, unless it is closing."""

    def __init__(
        self,
        ledger: Ledger,
        turns: Turns,
        alone: Callable[[float], AbstractContextManager[None]],
        writer: SelectiveWriter,
        confirmations: Confirmations,
    ) -> None:
        self._ledger = ledger
        self._turns = turns
        self._alone = alone
        self._writer = writer
        self._confirmations = confirmations

    def put(
        self,
        space_id: SpaceId,
        blocks: Incoming,
        class_byte: int,
        clock: Clock,
        ack: PutAck,
        deadline_s: float,
    ) -> list[PutOutcome]:
        """Store or touch; returns when acknowledged at ``ack``. Raises DeadlineExceeded."""
        end_s = time.monotonic() + deadline_s
        outcomes: list[PutOutcome] = []
        while len(outcomes) < len(blocks):
            rest = blocks.pick(range(len(outcomes), len(blocks))) if outcomes else blocks
            outcomes += self._put_some(space_id, rest, class_byte, clock, ack != "os", end_s - time.monotonic())
        stored = [at for at, outcome in enumerate(outcomes) if outcome <= PutOutcome.REPLACED]
        if ack == "disk" and stored:
            keys = [blocks.keys[at] for at in stored]
            for at in self._confirmations.lost(space_id, keys, int(clock.now_s()), max(0.0, end_s - time.monotonic())):
                outcomes[stored[at]] = PutOutcome.REFUSED
        return outcomes

    def _put_some(
        self, space_id: SpaceId, blocks: Incoming, class_byte: int, clock: Clock, for_disk: bool, deadline_s: float
    ) -> list[PutOutcome]:
        """How the first of the blocks ended, or all; none if their bytes did not come in time. Raises DeadlineExceeded,
        or what their connection raises.
        """

        def begin(alone: bool) -> PutUnderWay | None:
            now_s = int(clock.now_s())
            return self._writer.begin(space_id, blocks, class_byte, now_s, for_disk=for_disk, alone=alone)

        if blocks.lags:
            blocks.gather()
        done = self._turns.beside(begin, self._writer.end, deadline_s)
        if done is None and (gone := blocks.gone):  # they cannot be written elsewhere
            self._ledger.counters.refused += gone
            return [PutOutcome.REFUSED] * gone
        if done is None:
            blocks.gather()
            with self._alone(deadline_s):
                done = self._writer.put(space_id, blocks, class_byte, int(clock.now_s()), for_disk=for_disk)
                self._ledger.compact_if_due()
        return done
