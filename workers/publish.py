"""Slots -> store, off the critical path: a bounded queue of copied payloads and one thread that puts them.

Owns the queue and the outcome of every put. Does not read slots: whoever offers a payload has copied it out, so slots
may be freed at once. Invariants: an offer never waits; queued bytes never exceed ``queue_bytes_max`` (what does not fit
is shed and counted; a later request of the same prefix offers it again); a request's items are put in the order
offered, so a state follows its blocks; a request is settled once each of its items was acknowledged, refused or shed.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvstore.errors import SpaceUnknown, StoreError, Unauthorized
from kvstore.keys import BlockName, StateName
from kvstore.limits import BATCH_BLOCKS_MAX
from kvstore.store import BlockPut, Buffer, PutOutcome, Store
from kvstore.traffic import TrafficClass
from workers.spaces import Spaces, TenantSpace

QUEUE_BYTES_DEFAULT = 256 << 20
QUEUE_ITEMS_MAX = 16_384
"""Items queued, whatever their size; the next is shed."""
BATCH_BYTES_MAX = 32 << 20
PUT_DEADLINE_S_DEFAULT = 5.0
TELL_EVERY_S = 60.0
"""How often at most it is logged that the store refuses this worker's token."""
PAUSE_S = 1.0
"""After a put failed as a whole, what is queued meanwhile fails at once: one dead store must not hold up hand-offs."""

log = logging.getLogger(__name__)

ACKNOWLEDGED = (PutOutcome.STORED, PutOutcome.TOUCHED, PutOutcome.REPLACED)


@dataclass(slots=True)
class PublishCounts:
    """Counters; written by the publisher only, read by metrics."""

    blocks_acknowledged: int = 0
    blocks_failed: int = 0
    blocks_declined: int = 0
    """Not stored by the policy of their class: neither acknowledged nor a failure."""
    states_acknowledged: int = 0
    states_failed: int = 0
    shed: int = 0
    errors: int = 0


@dataclass(slots=True, eq=False)
class Ticket:
    """What one request has offered. Changed under the publisher's lock."""

    space: TenantSpace
    traffic_class: TrafficClass
    pending: int = 0
    failed: int = 0
    blocks_acknowledged: int = 0
    on_settled: Callable[[], None] | None = None

    @property
    def settled(self) -> bool:
        return self.pending == 0

    @property
    def published(self) -> bool:
        """All that was offered is acknowledged."""
        return self.pending == 0 and self.failed == 0


@dataclass(frozen=True, slots=True)
class _Block:
    ticket: Ticket
    put: BlockPut

    @property
    def size(self) -> int:
        return memoryview(self.put.payload).nbytes


@dataclass(frozen=True, slots=True)
class _State:
    ticket: Ticket
    name: StateName
    payload: Buffer
    flags: int

    @property
    def size(self) -> int:
        return len(self.payload)


@dataclass(frozen=True, slots=True)
class _Touch:
    ticket: Ticket
    names: tuple[BlockName, ...]
    size: int = field(default=0, init=False)


_Item = _Block | _State | _Touch


class Publisher:
    """Make with finished values, then ``start``; ``close`` waits for the queue with a deadline."""

    def __init__(
        self,
        store: Store,
        spaces: Spaces,
        *,
        queue_bytes_max: int = QUEUE_BYTES_DEFAULT,
        put_deadline_s: float = PUT_DEADLINE_S_DEFAULT,
        monotonic_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._spaces = spaces
        self._queue_bytes_max = queue_bytes_max
        self._put_deadline_s = put_deadline_s
        self._monotonic_s = monotonic_s
        self._queue: deque[_Item] = deque()
        self._queue_bytes = 0
        self._changed = threading.Condition()
        self._closing = False
        self._paused_until_s = 0.0
        self._quiet_until_s = 0.0
        self._thread: threading.Thread | None = None
        self.counts = PublishCounts()

    def start(self) -> None:
        """Begin to put what is offered."""
        self._thread = threading.Thread(target=self._run, name="publish", daemon=True)
        self._thread.start()

    def close(self, deadline_s: float) -> bool:
        """Take no more, put what is queued; False if that took too long (the rest is offered again some day)."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread is None:
            return True
        self._thread.join(deadline_s)
        return not self._thread.is_alive()

    @property
    def queue_bytes(self) -> int:
        return self._queue_bytes

    def ticket(self, space: TenantSpace, traffic_class: TrafficClass) -> Ticket:
        """The account of one request's offers."""
        return Ticket(space, traffic_class)

    def offer_block(self, ticket: Ticket, name: BlockName, tokens: int, payload: Buffer, flags: int) -> bool:
        """Queue one block. Owns ``payload`` from now on. False: shed."""
        return self._offer(_Block(ticket, BlockPut(name, tokens, payload, flags)))

    def offer_state(self, ticket: Ticket, name: StateName, payload: Buffer, flags: int) -> bool:
        """Queue a state. False: shed."""
        return self._offer(_State(ticket, name, payload, flags))

    def offer_touch(self, ticket: Ticket, names: Sequence[BlockName]) -> bool:
        """Queue a use of blocks that were hit, by the ticket's class. False: shed."""
        return self._offer(_Touch(ticket, tuple(names)))

    def when_settled(self, ticket: Ticket, call: Callable[[], None]) -> None:
        """Call once when nothing of the ticket is pending (at once if so already); on the publisher's thread else."""
        with self._changed:
            if not ticket.settled:
                ticket.on_settled = call
                return
        call()

    def flush(self, ticket: Ticket, deadline_s: float) -> bool:
        """Wait until the ticket is settled; True if all of it is acknowledged. False also when the deadline passed."""
        with self._changed:
            self._changed.wait_for(lambda: ticket.settled, timeout=deadline_s)
            return ticket.published

    def abandon(self, ticket: Ticket) -> None:
        """Nobody waits for the ticket any more; what is queued is still put, since it is computed."""
        with self._changed:
            ticket.on_settled = None

    # --- inside -------------------------------------------------------------------------------------------------------

    def _offer(self, item: _Item) -> bool:
        with self._changed:
            full = self._queue_bytes + item.size > self._queue_bytes_max or len(self._queue) >= QUEUE_ITEMS_MAX
            if full or self._closing:
                self.counts.shed += 1
                item.ticket.failed += 1
                return False
            item.ticket.pending += 1
            self._queue.append(item)
            self._queue_bytes += item.size
            self._changed.notify_all()
            return True

    def _run(self) -> None:
        while batch := self._take():
            results = self._put(batch)
            settled = self._account(batch, results)
            for call in settled:
                call()

    def _take(self) -> list[_Item]:
        """The next items that can go in one call: blocks of one space and class, or one item of another kind."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._closing)
            batch: list[_Item] = []
            size = 0
            while self._queue and len(batch) < BATCH_BLOCKS_MAX:
                item = self._queue[0]
                if batch and not (_joins(batch[0], item) and size + item.size <= BATCH_BYTES_MAX):
                    break
                batch.append(self._queue.popleft())
                size += item.size
            return batch

    def _put(self, batch: list[_Item]) -> list[bool | None]:
        """What became of each item. A store's error fails the whole batch, and is counted."""
        if self._monotonic_s() < self._paused_until_s:
            return [False] * len(batch)
        space = batch[0].ticket.space
        try:
            self._spaces.ensure_registered(space, deadline_s=self._put_deadline_s)
            return self._put_registered(space, batch)
        except SpaceUnknown:
            self._spaces.forget_registration(space)
            self.counts.errors += 1
        except Unauthorized as error:
            self.counts.errors += 1
            self._tell_refusal(error)
        except StoreError:
            self.counts.errors += 1
            self._paused_until_s = self._monotonic_s() + PAUSE_S
        return [False] * len(batch)

    def _tell_refusal(self, error: Unauthorized) -> None:
        """A token that does not fit is for an operator to mend: said now and then. Another tenant's puts go on."""
        if self._monotonic_s() >= self._quiet_until_s:
            self._quiet_until_s = self._monotonic_s() + TELL_EVERY_S
            log.error("store_refuses_puts: %s", error)

    def _put_registered(self, space: TenantSpace, batch: list[_Item]) -> list[bool | None]:
        """Whether each was acknowledged; None: declined."""
        first, deadline_s = batch[0], self._put_deadline_s
        if isinstance(first, _State):
            kept = self._store.put_state(space.id, first.name, first.payload, flags=first.flags, deadline_s=deadline_s)
            return [kept]
        traffic_class = first.ticket.traffic_class
        if isinstance(first, _Touch):
            self._store.touch(space.id, first.names, traffic_class=traffic_class, deadline_s=deadline_s)
            return [True]
        puts = [item.put for item in batch if isinstance(item, _Block)]
        outcomes = self._store.put(space.id, puts, traffic_class=traffic_class, deadline_s=deadline_s)
        return [None if outcome is PutOutcome.DECLINED else outcome in ACKNOWLEDGED for outcome in outcomes]

    def _account(self, batch: list[_Item], results: list[bool | None]) -> list[Callable[[], None]]:
        """Settle tickets; returns what is to be called outside the lock."""
        calls = []
        with self._changed:
            for item, acknowledged in zip(batch, results, strict=True):
                self._queue_bytes -= item.size
                ticket = item.ticket
                ticket.pending -= 1
                ticket.failed += not acknowledged
                self._count(item, acknowledged)
                if ticket.settled and ticket.on_settled is not None:
                    calls.append(ticket.on_settled)
                    ticket.on_settled = None
            self._changed.notify_all()
        return calls

    def _count(self, item: _Item, acknowledged: bool | None) -> None:
        if acknowledged is None:
            self.counts.blocks_declined += 1
        elif isinstance(item, _Block):
            self.counts.blocks_acknowledged += acknowledged
            self.counts.blocks_failed += not acknowledged
            item.ticket.blocks_acknowledged += acknowledged
        elif isinstance(item, _State):
            self.counts.states_acknowledged += acknowledged
            self.counts.states_failed += not acknowledged


def _joins(first: _Item, item: _Item) -> bool:
    return (
        isinstance(first, _Block)
        and isinstance(item, _Block)
        and first.ticket.space.id == item.ticket.space.id
        and first.ticket.traffic_class == item.ticket.traffic_class
    )
