"""What clients of a store that will be killed do, and how they check it after its restart.

Owns the random verbs of one client and the quiet verification. Does not know processes. Invariants: each block has one
writer, everybody reads all; an answer is settled in the book before the next call for that block; a call that fails
because the store died leaves its blocks in doubt, never in a promise.
"""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable, Sequence
from functools import partial

from kvstore.client import StoreClient
from kvstore.daemon.fsck import FsckReport
from kvstore.daemon.node import Node
from kvstore.errors import CapacityProtected, DeadlineExceeded, Overloaded, StoreError, Unavailable
from kvstore.keys import SpaceId, space_id
from kvstore.purges import PurgeOrder
from kvstore.store import AckLevel, BlockInfo, BlockPut, GetStatus, Pin, PutOutcome
from kvstore.traffic import AGENT, CHAT, TrafficClass
from ops.bench.crash_book import ACKNOWLEDGED, RULES, SECOND_SPACE_BLOCKS, Book, Expected, spaces
from ops.bench.crash_policy import BRIEF, LASTING, SHORT, changed

BATCH_MAX = 16
VERIFY_S = 60.0
CALL_S = 20.0
UNREAD_PUTS_MAX = 12
"""Puts of a client before a start is verified."""
VERBS = {
    "put": 54,
    "get": 18,
    "lookup": 4,
    "touch": 6,
    "delete": 8,
    "sweep": 3,
    "pin": 3,
    "unpin": 2,
    "purge": 1,
    "order": 1,
    "policy": 2,
}


class Client:
    """One client in one thread. ``mine``: the blocks that it alone writes. ``after_kill``: the process dies, not the
    machine, so that level ``os`` is a promise as well.
    """

    def __init__(
        self,
        book: Book,
        store: StoreClient | Node,
        mine: Sequence[Expected],
        chance: random.Random,
        *,
        after_kill: bool = True,
    ) -> None:
        self._book = book
        self._store = store
        self._mine = mine
        self._others = [block for block in mine if block.space == spaces()[0]]
        self._purged = [block for block in mine if block.space == spaces()[1]]
        self._chance = chance
        self._after_kill = after_kill
        self._verbs: dict[str, Callable[[], None]] = {
            "put": self._put,
            "get": self._get,
            "lookup": self._lookup,
            "touch": self._touch,
            "delete": self._delete,
            "sweep": lambda: void(self._store.sweep(apply=True, deadline_s=CALL_S)),
            "pin": self._pin,
            "unpin": self._unpin,
            "purge": self._purge,
            "order": self._order,
            "policy": self._policy,
        }

    def work(self, stop: threading.Event) -> None:
        """Do this and that until told to stop, or until the store is gone."""
        with contextlib.suppress(StoreError):
            while not stop.is_set():
                self.step()

    def put_unread(self) -> None:
        """After a start, before anything was read: what is acknowledged now is promised as well. Raises StoreError if
        the store is gone.
        """
        self._book.policy.learn(self._store.policy(deadline_s=VERIFY_S).rules)
        for block in [block for block in self._mine if block.is_going]:
            self._call(partial(self._put, [block]))
            block.is_going = False
        for _ in range(self._chance.randint(0, UNREAD_PUTS_MAX)):
            self._call(self._put)

    def step(self) -> None:
        """One random call. Raises StoreError if the store is gone."""
        self._call(self._verbs[self._chance.choices(list(VERBS), list(VERBS.values()))[0]])

    def _call(self, verb: Callable[[], None]) -> None:
        try:
            verb()
        except (Overloaded, CapacityProtected, DeadlineExceeded):
            self._book.counts["declined"] += 1

    def _some(self) -> list[Expected]:
        """A few blocks of one space, mostly neighbours."""
        pool = self._purged if self._purged and self._chance.random() < 0.1 else self._others
        count = self._chance.randint(1, BATCH_MAX)
        if self._chance.random() < 0.5:
            return self._chance.sample(pool, min(count, len(pool)))
        at = self._chance.randrange(len(pool))
        return list(pool[at : at + count])

    def _put(self, some: Sequence[Expected] = ()) -> None:
        exact = self._chance.random() < 0.8
        durable = self._chance.random() < 0.25
        some = some or self._some()
        traffic_class = some[0].traffic_class
        some = [block for block in some if block.traffic_class == traffic_class]
        puts = [block.put(exact=exact) for block in some]
        space = space_id(some[0].space)
        changes = self._book.policy.changes
        if durable and isinstance(self._store, Node) and self._chance.random() < 0.5:
            outcomes = _put_in_parts(self._store, space, puts, traffic_class)
        else:
            ack: AckLevel = "disk" if durable else "os"
            outcomes = self._store.put(space, puts, traffic_class=traffic_class, ack=ack, deadline_s=CALL_S)
        with self._book.policy.steady(changes) as is_steady:
            for block, outcome in zip(some, outcomes, strict=True):
                if outcome is PutOutcome.STORED and block.promised:
                    self._book.accuse("lost", f"block {block.name.index} of {block.space.model}: it was stored anew")
                lasting = is_steady and self._book.lasts(block)
                block.settle(outcome, exact=exact, durable=durable or self._after_kill, lasting=lasting)
        for outcome in outcomes:
            self._book.counts[f"put {outcome.name.lower()}"] += 1
        done = sum(outcome in ACKNOWLEDGED for outcome in outcomes)
        self._book.counts["acknowledged"] += done
        self._book.counts["acknowledged disk"] += done * durable

    def _get(self) -> None:
        blocks = self._book.of_space(0)
        at = self._chance.randrange(len(blocks))
        self._read(blocks[at : at + 2 * BATCH_MAX])

    def _read(self, blocks: Sequence[Expected]) -> None:
        """Read blocks of one space while others write them."""
        lives = [block.life for block in blocks]
        buffers = [bytearray(block.size) for block in blocks]
        names = [block.name for block in blocks]
        statuses = self._store.get_into(space_id(blocks[0].space), names, buffers, deadline_s=CALL_S)
        for block, life, status, buffer in zip(blocks, lives, statuses, buffers, strict=True):
            if status is GetStatus.OK:
                self._book.judge_read(block, buffer, life)
                self._book.counts["read"] += 1
            elif status is GetStatus.CORRUPT and self._after_kill:
                self._store.stats(deadline_s=CALL_S)  # else the store died before it could be asked again
                self._book.accuse("corrupt", f"block {block.name.index}: the store itself found it bad")

    def _lookup(self) -> None:
        blocks = self._book.of_space(0)
        names = [block.name for block in blocks]
        self._store.lookup(space_id(blocks[0].space), names, deadline_s=CALL_S)

    def _touch(self) -> None:
        some = self._some()
        names = [block.name for block in some]
        traffic_class = self._chance.choice((AGENT, CHAT))
        self._store.touch(space_id(some[0].space), names, traffic_class=traffic_class, deadline_s=CALL_S)

    def _delete(self) -> None:
        some = self._some()[:4]
        for block in some:
            block.begin_delete()
        self._store.delete(space_id(some[0].space), [block.name.key for block in some], deadline_s=CALL_S)
        for block in some:
            block.end_delete()
        self._book.counts["deleted"] += len(some)

    def _purge(self) -> None:
        if not self._purged:
            return
        for block in self._purged:
            block.begin_delete()
        self._store.delete_space(space_id(self._purged[0].space), deadline_s=CALL_S)
        for block in self._purged:
            block.end_delete()
        self._book.counts["deleted"] += len(self._purged)

    def _order(self) -> None:
        """A purge that leaves no byte: of the second space by its owner, else of a few blocks."""
        whole = bool(self._purged) and self._chance.random() < 0.5
        blocks = self._purged if whole else self._some()[:4]
        space = blocks[0].space
        keys = None if whole else tuple(block.name.key for block in blocks)
        order = PurgeOrder(self._chance.randbytes(16).hex(), (space_id(space),), keys, 0)
        for block in blocks:
            block.begin_delete()
        found = self._store.purge(order, deadline_s=CALL_S)
        if found.failed:
            raise Unavailable("the store died of a purge order")
        assert all(report.done for report in found.answers.values())
        self._book.end_erasure(blocks)
        self._book.counts["erased"] += len(blocks)
        self._store.register_space(space)  # an order forgets it

    def _pin(self) -> None:
        for block in self._some()[:2]:
            pin = Pin(space_id(block.space), block.name.key, "crash", "")
            if self._store.pin([pin], deadline_s=CALL_S):
                with self._book.policy.lock:
                    block.pinned = True
                    block.promised |= self._after_kill
                self._book.counts["pinned"] += 1

    def _unpin(self) -> None:
        some = self._some()
        with self._book.policy.lock:
            for block in some:
                block.pinned = False
                block.promised &= self._book.lasts(block)
        self._store.unpin(space_id(some[0].space), [block.name.key for block in some], deadline_s=CALL_S)

    def _policy(self) -> None:
        """Blocks of a class are kept shorter, or longer again; what was let go of meanwhile is not promised."""
        book = self._book.policy
        with book.changing:
            kept_s = self._chance.choice(LASTING if book.brief - {BRIEF} or self._chance.random() < 0.5 else SHORT)
            rules = changed(RULES, *kept_s)
            version = self._store.policy(deadline_s=CALL_S).version
            self._book.expect_policy(rules)
            self._store.set_policy(rules, "crash", expected_version=version, apply=True, deadline_s=CALL_S)
            book.learn(rules)
        self._book.counts["policy shortened" if kept_s in SHORT else "policy lengthened"] += 1


def _put_in_parts(
    node: Node, space: SpaceId, puts: Sequence[BlockPut], traffic_class: TrafficClass
) -> list[PutOutcome]:
    """As a client puts what the disk shall have: two parts begin, and one flush is waited for."""
    outcomes: list[PutOutcome] = []
    middle = len(puts) // 2
    for part in (puts[:middle], puts[middle:]):
        try:
            outcomes += node.put(space, part, traffic_class=traffic_class, ack="begun", deadline_s=CALL_S)
        except (Overloaded, CapacityProtected):
            outcomes += [PutOutcome.REFUSED] * len(part)
    kept = node.confirm(space, [put.name.key for put in puts], deadline_s=CALL_S)
    return [
        PutOutcome.REFUSED if outcome in ACKNOWLEDGED and not is_kept else outcome
        for outcome, is_kept in zip(outcomes, kept, strict=True)
    ]


def void(_: object) -> None:
    """Drop an answer."""


def shares(book: Book, count: int) -> list[list[Expected]]:
    """Blocks by writer: every ``count``-th; all of the second space to the first writer."""
    first, second = book.of_space(0), book.of_space(1)
    assert len(second) == SECOND_SPACE_BLOCKS
    return [[*first[at::count], *(second if at == 0 else [])] for at in range(count)]


def verify(store: StoreClient | Node, book: Book, *, after_kill: bool = True) -> None:
    """Read everything while nobody writes; every answer is judged. Raises Unavailable if the store dies meanwhile."""
    book.policy.learn(store.policy(deadline_s=VERIFY_S).rules)
    for number in range(2):
        blocks = book.of_space(number)
        names = [block.name for block in blocks]
        buffers = [bytearray(block.size) for block in blocks]
        statuses = store.get_into(space_id(blocks[0].space), names, buffers, deadline_s=VERIFY_S)
        if GetStatus.UNREACHABLE in statuses:
            raise Unavailable("the store died while it was verified")
        for block, status, buffer in zip(blocks, statuses, buffers, strict=True):
            book.judge_still(block, status, buffer)
            if after_kill and status is GetStatus.OK:
                block.promised = book.lasts(block)
    _verify_strangers(store, book)
    if not after_kill:  # an index of before may name records that have expired, and were deleted: nobody reads those
        store.sweep(apply=True, deadline_s=VERIFY_S)
    judge_scan(store.scan(deadline_s=VERIFY_S)[0], book)
    stats = store.stats(deadline_s=VERIFY_S)
    if after_kill and (stats["corrupt"] or stats["quarantined"] or stats["recovered_damaged"]):
        book.accuse("corrupt", f"the daemon counts {stats['corrupt']} corrupt, {stats['quarantined']} quarantined")
    book.counts["quarantined"] += stats["quarantined"]
    book.counts["verified"] += 1


def _verify_strangers(store: StoreClient | Node, book: Book) -> None:
    """Names that nobody put, and every block under the other space."""
    first, second = (space_id(space) for space in spaces())
    for foreign in (first, second):
        names = [*book.strangers, *(block.name for block in book.blocks if space_id(block.space) != foreign)]
        presence = store.lookup(foreign, names, deadline_s=VERIFY_S).presence
        statuses = store.get_into(foreign, names, [bytearray(512) for _ in names], deadline_s=VERIFY_S)
        book.judge_strangers([int(found) for found in presence], statuses)


def judge_scan(infos: Sequence[BlockInfo], book: Book) -> None:
    """What a scan lists is what may be stored, with its own length."""
    by_key = {block.name.key: block for block in book.blocks}
    for info in infos:
        block = by_key.get(info.key)
        if block is None or space_id(block.space) != info.space_id or info.payload_bytes != block.size:
            book.accuse("phantom", f"a scan lists {info.key.hex()[:16]}")
        elif not block.possible:
            book.accuse("returned", f"a scan lists block {block.name.index}, which was deleted")


def judge_fsck(report: FsckReport, book: Book) -> None:
    """A killed store's directory is clean, and every byte of its segments is accounted for."""
    for finding in report.findings:
        book.accuse("unclean", f"{finding.kind} {finding.where}: {finding.detail}")
    parts = report.live_bytes + report.dead_bytes + report.free_bytes + report.page_bytes
    if parts != report.total_bytes:
        book.accuse("unbalanced", f"segments of {report.total_bytes} bytes hold {parts}")
