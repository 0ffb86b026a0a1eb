"""Purges with proof: an order is written down, carried out to the last byte, and remembered.

Owns the order of steps: written down, blocks deleted, states dropped, bytes erased, done. Does not know how blocks are
deleted or bytes erased (the node and its shards do), nor who signs. Invariants: an order that was written down is
carried out, also by the process that comes after a kill, before that one serves anybody; one that was carried out is
not carried out again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from kvstore.daemon.catalog import Catalog
from kvstore.daemon.scour import Condemned, Scoured
from kvstore.daemon.shard import Shard
from kvstore.errors import DeadlineExceeded, StoreError
from kvstore.keys import BlockKey, SpaceId
from kvstore.purges import Leftovers, PurgeOrder, PurgeReport, digest_of_keys
from kvstore.store import Clock

log = logging.getLogger(__name__)

CheckFree = Callable[[SpaceId, Sequence[BlockKey] | None], None]
Delete = Callable[[SpaceId, Sequence[BlockKey] | None, float], int]
Choose = Callable[[PurgeOrder], Iterable[tuple[SpaceId, Sequence[BlockKey]]]]
Disown = Callable[[PurgeOrder], int]
RESUME_S_MAX = 3600.0
"""How long a start, or a sweep, works on orders that were left."""


class Purger:
    """One purge at a time. ``check_free``: raises Held for blocks under a legal hold. ``delete``: blocks, states and
    pins of a space, or of some of its keys, within seconds. ``choose``: the blocks that a part comes to now.
    ``disown``: takes the claim of the order's class from blocks that others use too; how many those are.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        catalog: Catalog,
        catalog_lock: threading.Lock,
        check_free: CheckFree,
        delete: Delete,
        choose: Choose,
        disown: Disown,
        clock: Clock,
    ) -> None:
        self._shards = tuple(shards)
        self._catalog = catalog
        self._catalog_lock = catalog_lock
        self._check_free = check_free
        self._delete = delete
        self._choose = choose
        self._disown = disown
        self._clock = clock
        self._busy = threading.Lock()

    def purge(self, order: PurgeOrder, deadline_s: float) -> PurgeReport:
        """Carry out an order, or tell what was done about it.

        Raises Held, before anything is written down; DeadlineExceeded: it goes on in the background.
        """
        end_s = time.monotonic() + deadline_s
        for space, keys in self._removals(order):
            self._check_free(space, keys)
        with self._catalog_lock:
            report = self._reports().get(order.purge_id)
            if report is None:
                report = self._begun(order)
                self._catalog.note_purge(order, report)
        if report.done:
            return report
        if not self._busy.acquire(timeout=max(0.0, deadline_s)):
            raise DeadlineExceeded("another purge is under way; this one is written down and will be carried out")
        try:
            return self._carry_out(order, end_s)
        finally:
            self._busy.release()

    def resume(self) -> int:
        """Carry out what was left; how many orders that was. Raises a StoreError once each was tried: one that cannot
        be carried out now keeps no other waiting.
        """
        count = 0
        failure: StoreError | None = None
        end_s = time.monotonic() + RESUME_S_MAX
        with self._busy:
            for order, report in self._orders():
                if report.done:
                    continue
                log.info("purge_resumed id=%s", order.purge_id)
                try:
                    self._carry_out(order, end_s)
                    count += 1
                except StoreError as error:
                    failure = error
        if failure is not None:
            raise failure
        return count

    def leftovers(self, order: PurgeOrder, until_s: int) -> Leftovers:
        """What a raw scan of every segment finds of an order, written at ``until_s`` or before."""
        total = Scoured()
        for shard in self._shards:
            total.add(shard.leftovers(_condemned(order, until_s)))
        return Leftovers(total.segments, total.living, total.dead, total.stale, total.unreadable)

    def orders(self) -> list[tuple[PurgeOrder, PurgeReport]]:
        """Every order that is remembered, the latest last."""
        return list(self._orders())

    def _carry_out(self, order: PurgeOrder, end_s: float) -> PurgeReport:
        report = self._reports()[order.purge_id]
        if report.done:
            return report
        now_s = int(self._clock.now_s())
        blocks = sum(
            self._delete(space, keys, max(0.0, end_s - time.monotonic())) for space, keys in self._removals(order)
        )
        shared = self._disown(order) if order.class_byte is not None else 0
        total, keys = Scoured(), set[BlockKey]()
        for shard in self._shards if order.erase else ():
            erased, erased_keys = shard.erase(_condemned(order, now_s), now_s, overwrite=order.overwrite)
            total.add(erased)
            keys |= erased_keys
        done = replace(
            report,
            blocks=report.blocks + blocks,
            records=total.living + total.dead,
            segments=total.segments,
            unreadable=total.unreadable,
            keys_digest=digest_of_keys(keys),
            began_s=now_s,
            ended_s=max(1, int(self._clock.now_s())),
            shared=report.shared + shared,
        )
        with self._catalog_lock:
            self._catalog.note_purge(order, done)
        log.info("purged id=%s blocks=%d records=%d", order.purge_id, done.blocks, done.records)
        return done

    def _removals(self, order: PurgeOrder) -> Iterable[tuple[SpaceId, Sequence[BlockKey] | None]]:
        """Spaces, and the keys in them (None: all), that an order comes to."""
        return self._choose(order) if order.is_part else [(space, order.keys) for space in order.spaces]

    def _begun(self, order: PurgeOrder) -> PurgeReport:
        return PurgeReport(
            purge_id=order.purge_id,
            blocks=0,
            records=0,
            segments=0,
            unreadable=0,
            keys_digest=digest_of_keys(()),
            policy_version=self._catalog.content.policy.version,
            overwritten=order.overwrite and order.erase,
            began_s=int(self._clock.now_s()),
            ended_s=0,
        )

    def _orders(self) -> Sequence[tuple[PurgeOrder, PurgeReport]]:
        return self._catalog.content.purges

    def _reports(self) -> Mapping[str, PurgeReport]:
        return {order.purge_id: report for order, report in self._orders()}


def resume_left(purger: Purger) -> None:
    """Carry out what was left; what fails is tried again by the next one who calls."""
    try:
        purger.resume()
    except StoreError as error:
        log.error("purge_left problem=%s: it is tried again", error)


def _condemned(order: PurgeOrder, until_s: int) -> Condemned:
    spaces = frozenset(order.spaces) if order.spaces else None
    keys = None if order.keys is None else frozenset(order.keys)
    if order.written_until_s is not None:
        return Condemned(spaces, keys, min(until_s, order.written_until_s), by_age=True)
    return Condemned(spaces, keys, until_s, order.class_byte)
