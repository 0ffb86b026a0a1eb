"""The node: every shard of a host, the state pool and the catalog, as one ``Store``.

Owns the choice of shard, the checks of arguments, and the background sweep. Does not know sockets. Invariants: a
block lies in one shard (where it is, or by rendezvous of its route); reads ask every shard, and the catalog may lie in
any directory, so that adding a directory or naming them in another order loses nothing; policy, spaces and pins are in
the catalog before they are in force.
"""

from __future__ import annotations

import heapq
import logging
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any, TypeVar

import numpy as np
import xxhash

from kvstore.daemon.catalog import Catalog
from kvstore.daemon.checks import check_class, check_count, check_flags, check_pins, check_put, check_rules
from kvstore.daemon.cipher import Ciphers, Encryption, Keyring
from kvstore.daemon.clock import BoundedClock, ClockWatch, is_likely
from kvstore.daemon.columns import Incoming, incoming
from kvstore.daemon.events import EventLog
from kvstore.daemon.files import Files
from kvstore.daemon.lanes import Lanes
from kvstore.daemon.leases import PayloadLease
from kvstore.daemon.lending import Lender, Loan, LoanOfOne, lend
from kvstore.daemon.load import LoadRate
from kvstore.daemon.opening import NodeConfig as NodeConfig
from kvstore.daemon.opening import open_directories
from kvstore.daemon.pinboard import PinBoard
from kvstore.daemon.presence import digest_words, key_words
from kvstore.daemon.purger import Purger, resume_left
from kvstore.daemon.scrubber import Scrubber, merge_progress
from kvstore.daemon.shard import Shard
from kvstore.daemon.states import StatePool
from kvstore.daemon.sweeper import Sweeper
from kvstore.daemon.tallies import by_class, by_space, merge_effects
from kvstore.errors import Overloaded, PolicyConflict, SpaceUnknown, StoreError, Unavailable
from kvstore.keys import BlockKey, BlockName, Space, SpaceId, StateName, TokenDigest, space_id
from kvstore.limits import (
    BATCH_BLOCKS_MAX,
    DEADLINE_S_DEFAULT,
    KEY_BYTES,
    LOOKUP_KEYS_MAX,
    SCAN_PAGE_MAX,
    STATE_BYTES_MAX,
)
from kvstore.promises import promise_stats
from kvstore.purges import ByNode, Leftovers, PurgeOrder, PurgeReport
from kvstore.sightings import best_sighting
from kvstore.store import (
    BlockInfo,
    BlockPut,
    Buffer,
    Clock,
    Effect,
    GetStatus,
    Lookup,
    Pin,
    Policy,
    Presence,
    PutOutcome,
    Sighting,
)
from kvstore.traffic import ClassRules, TrafficClass
from kvstore.wire import PackedNames, PutAck

T = TypeVar("T")

SWEEP_REST_S = 900.0
"""What a sweep in the background may take longer for the sake of gets: what is too old is erased within the hour."""

log = logging.getLogger(__name__)


class Node:
    """Thread-safe. Raises errors of ``kvstore.errors``, ValueError for misuse; Unavailable once closed."""

    def __init__(
        self,
        config: NodeConfig,
        clock: Clock,
        shards: Sequence[Shard],
        catalog: Catalog,
        states: StatePool,
        events: EventLog,
        ciphers: Ciphers,
    ) -> None:
        self.events = events
        self._config = config
        self._clock = BoundedClock(clock)
        self._clock_watch = ClockWatch(self._clock)
        self._shards = tuple(shards)
        self._catalog = catalog
        self._states = states
        self._ciphers = ciphers
        self._lanes = Lanes(self._shards)
        self._load_rate = LoadRate()
        self._catalog_lock = threading.Lock()
        self._pinboard = PinBoard(self._shards, catalog, self._catalog_lock, self._clock, config.pin_quota_bytes)
        self._purger = Purger(
            self._shards,
            catalog,
            self._catalog_lock,
            self._pinboard.check_free,
            self._purge_from,
            self._part_of,
            self._disown,
            self._clock,
        )
        self._closed = threading.Event()
        self._warned_of_large_blocks = False
        self._sweeper = Sweeper(self._keep_up, self._clock_watch, config.sweep_interval_s)
        self._scrubbers: list[Scrubber] = []
        self._started_s = time.monotonic()

    @classmethod
    def open(
        cls,
        config: NodeConfig,
        clock: Clock,
        rules: ClassRules | None,
        policy_text: str = "",
        *,
        files: Files | None = None,
        new_generation: Callable[[], int] = lambda: secrets.randbits(64),
    ) -> Node:
        """Lock, check and recover every directory.

        ``rules`` begin a new store; one that has a policy already keeps it (change it by ``set_policy``), so that a
        restart changes no deadline. Raises VolumeInUse, VolumeFormat, VolumeError; a capacity that cannot be had leaves
        no trace.
        """
        events = EventLog()
        opened = open_directories(config, clock, rules, policy_text, files or Files(), new_generation, events)
        shards, catalog = opened.shards, opened.catalog
        states = StatePool(config.state_pool_bytes, config.state_ttl_s, clock)
        node = cls(config, clock, shards, catalog, states, events, opened.ciphers)
        try:
            resume_left(node._purger)
        except BaseException:
            node.abandon()
            raise
        if config.background:
            for shard in shards:
                shard.seal_in_background()
        if not is_likely(node._clock.now_s(), node.latest_use_s()):
            node._clock_watch.doubt()
        node._sweeper.start()
        node._start_scrubbers()
        return node

    # --- data plane ---------------------------------------------------------------------------------------------------

    def register_space(self, space: Space, *, deadline_s: float = DEADLINE_S_DEFAULT) -> SpaceId:
        self._check_open()
        name = space_id(space)
        with self._catalog_lock:
            spaces = self._catalog.content.spaces
            if name not in spaces:
                try:
                    self._catalog.update(spaces={**spaces, name: space})
                except Overloaded:
                    used = self._spaces_in_use()
                    if len(used) == len(spaces):
                        raise
                    log.info("spaces_forgotten count=%d: they held no blocks", len(spaces) - len(used))
                    self._catalog.update(spaces={**used, name: space})
                self._relock()  # its blocks may be here already, from before the catalog was lost
        return name

    def lookup(
        self,
        space_id: SpaceId,
        names: Sequence[BlockName],
        *,
        states: bool = False,
        deadline_s: float = DEADLINE_S_DEFAULT,
    ) -> Lookup:
        self._check_open()
        check_count(names, LOOKUP_KEYS_MAX, "a lookup", "keys")
        now_s = self._clock.now_s()
        packed = PackedNames.pack(names)
        words, digests = key_words(packed.keys), digest_words(packed.token_digests)
        presence, flags, sizes = self._shards[0].presence_of(space_id, words, digests, now_s)
        for shard in self._shards[1:]:
            other, other_flags, other_sizes = shard.presence_of(space_id, words, digests, now_s)
            better = (other == Presence.PRESENT) | ((presence == Presence.NEVER) & (other != Presence.NEVER))
            better &= presence != Presence.PRESENT
            presence, flags, sizes = (
                np.where(better, other, presence),
                np.where(better, other_flags, flags),
                np.where(better, other_sizes, sizes),
            )
        found = self._states.under(space_id, packed.keys) if states else ()
        answer = Lookup(presence, flags, sizes, found)
        if not self._load_rate.is_known:
            return answer
        return replace(answer, load_s_estimate=self._load_rate.estimate_s(answer.prefix_bytes()))

    def get_into(
        self,
        space_id: SpaceId,
        names: Sequence[BlockName],
        buffers: Sequence[bytearray | memoryview],
        *,
        deadline_s: float = DEADLINE_S_DEFAULT,
    ) -> list[GetStatus]:
        self._check_open()
        check_count(names, BATCH_BLOCKS_MAX, "a get", "blocks")
        if len(names) != len(buffers):
            raise ValueError(f"{len(names)} names but {len(buffers)} buffers")
        end_s = time.monotonic() + deadline_s
        statuses = [GetStatus.DEADLINE] * len(names)

        def read(shard: Shard, positions: Sequence[int]) -> None:
            for at in positions:
                if time.monotonic() >= end_s:
                    return
                view = memoryview(buffers[at]).cast("B")
                statuses[at] = shard.read_into(space_id, names[at], view, self._clock.now_s())

        homes = self._homes(b"".join([name.key for name in names]))
        with self._load_rate.begin(sum(memoryview(buffer).nbytes for buffer in buffers)) as answering:
            done = self._lanes.run({shard: partial(read, shard, part) for shard, part in homes.items()})
            answering.done(
                sum(memoryview(buffers[at]).nbytes for at, status in enumerate(statuses) if status is GetStatus.OK)
            )
        for failure in done.values():
            if failure is not None:
                raise failure
        return statuses

    def open_payload(self, space_id: SpaceId, name: BlockName) -> PayloadLease | None:
        """One payload for sending (see ``PayloadLease``); None is a miss."""
        self._check_open()
        return self._home(name).open_payload(space_id, name, self._clock.now_s())

    def lend(self, space_id: SpaceId, names: PackedNames) -> Loan:
        """Where many blocks lie, for reading from their files until the loan is closed."""
        self._check_open()
        now_s = self._clock.now_s()
        if len(self._shards) == 1 or not names:
            return lend({self._shards[0]: range(len(names))}, space_id, names, now_s)
        homes: dict[Lender, Sequence[int]] = dict(self._homes(names.keys).items())
        loan = lend(homes, space_id, names, now_s)
        loan.read_ahead()
        return loan

    def lend_one(self, space_id: SpaceId, names: PackedNames) -> LoanOfOne:
        """``lend`` of the one block that is named."""
        self._check_open()
        shard = self._shards[0] if len(self._shards) == 1 else self._home(names[0])
        key, token_digest = BlockKey(names.keys), TokenDigest(names.token_digests)
        return LoanOfOne(shard, shard.lend_one(space_id, key, token_digest, self._clock.now_s()))

    def report_corrupt(self, space_id: SpaceId, name: BlockName) -> bool:
        """A reader saw bad bytes: verify here; True if the block was bad and is quarantined. Good blocks stay."""
        self._check_open()
        return self._home(name).report_corrupt(space_id, name, self._clock.now_s())

    def put(
        self,
        space_id: SpaceId,
        blocks: Sequence[BlockPut],
        *,
        traffic_class: TrafficClass,
        ack: PutAck = "os",
        deadline_s: float = DEADLINE_S_DEFAULT,
        checksums: Sequence[int] | None = None,
    ) -> list[PutOutcome]:
        """As the contract says. ``checksums``: XXH3-64 of each payload at submission; bytes that differ are ALTERED."""
        self._check_open()
        end_s = time.monotonic() + deadline_s
        check_put(blocks, traffic_class, ack, checksums)
        self._check_space(space_id)
        rule = self._catalog.content.policy.rules.by_byte(traffic_class)
        cipher_key = self._ciphers.writing(space_id)
        encryption = Encryption(cipher_key, space_id) if cipher_key is not None else None
        batch = incoming(blocks, rule.codec if rule else "none", checksums, encryption)
        outcomes = [PutOutcome.TOO_LARGE] * len(blocks)
        homes = self._by_home(batch, blocks)
        if sum(map(len, homes.values())) < len(blocks) and not self._warned_of_large_blocks:
            self._warned_of_large_blocks = True
            largest = batch.rows["stored_bytes"].max()
            log.warning("block_too_large stored_bytes=%d: make the store with larger segments", largest)

        def store(shard: Shard, positions: Sequence[int], part: Incoming) -> None:
            left_s = max(0.0, end_s - time.monotonic())
            results = shard.puts.put(space_id, part, traffic_class, self._clock, ack, left_s)
            for position, outcome in zip(positions, results, strict=True):
                outcomes[position] = outcome

        parts = {  # here, not in the lanes: bytes that are on their way are received by one thread
            shard: batch if len(positions) == len(blocks) else batch.pick(positions)
            for shard, positions in homes.items()
        }
        done = self._lanes.run({shard: partial(store, shard, homes[shard], part) for shard, part in parts.items()})
        failures = {shard: failure for shard, failure in done.items() if failure is not None}
        if failures and len(failures) == len(homes):
            raise next(iter(failures.values()))
        for shard in failures:  # the others have theirs
            for position in homes[shard]:
                outcomes[position] = PutOutcome.UNREACHABLE
        return outcomes

    def confirm(
        self, space_id: SpaceId, keys: Sequence[BlockKey], *, deadline_s: float = DEADLINE_S_DEFAULT
    ) -> list[bool]:
        """Wait until stored blocks are on disk; which of them are (or were, and have been removed since).

        The others are gone. Raises DeadlineExceeded.
        """
        self._check_open()
        check_count(keys, LOOKUP_KEYS_MAX, "a confirmation", "keys")
        end_s, now_s = time.monotonic() + deadline_s, int(self._clock.now_s())
        lost = self._on_each(lambda shard: shard.lost(space_id, keys, now_s, max(0.0, end_s - time.monotonic())))
        return [not any(at in each for each in lost) for at in range(len(keys))]

    def touch(
        self,
        space_id: SpaceId,
        names: Sequence[BlockName],
        *,
        traffic_class: TrafficClass,
        deadline_s: float = DEADLINE_S_DEFAULT,
    ) -> int:
        self._check_open()
        check_count(names, LOOKUP_KEYS_MAX, "a touch", "keys")
        check_class(traffic_class)
        now_s = int(self._clock.now_s())
        return sum(shard.touch(space_id, names, traffic_class, now_s) for shard in self._shards)

    def put_state(
        self,
        space_id: SpaceId,
        name: StateName,
        payload: Buffer,
        *,
        flags: int = 0,
        deadline_s: float = DEADLINE_S_DEFAULT,
    ) -> bool:
        self._check_open()
        self._check_space(space_id)
        check_flags(flags)
        data = memoryview(payload).cast("B")
        if not 1 <= len(data) <= STATE_BYTES_MAX:
            raise ValueError(f"a state has 1..{STATE_BYTES_MAX} bytes, not {len(data)}")
        return self._states.put(space_id, name, data, flags)

    def get_state(
        self, space_id: SpaceId, name: StateName, *, deadline_s: float = DEADLINE_S_DEFAULT
    ) -> tuple[bytes, int] | None:
        self._check_open()
        return self._states.get(space_id, name)

    # --- control plane ------------------------------------------------------------------------------------------------

    def scan(
        self,
        space_id: SpaceId | None = None,
        *,
        cursor: bytes = b"",
        limit: int = SCAN_PAGE_MAX,
        deadline_s: float = DEADLINE_S_DEFAULT,
    ) -> tuple[list[BlockInfo], bytes]:
        self._check_open()
        if not 1 <= limit <= SCAN_PAGE_MAX:
            raise ValueError(f"a page of a scan has 1..{SCAN_PAGE_MAX} blocks, not {limit}")
        now_s = self._clock.now_s()
        pages = [shard.scan(space_id, cursor, limit + 1, now_s) for shard in self._shards]
        merged = heapq.merge(*pages, key=lambda info: info.key)
        found = list(islice(merged, limit + 1))
        page = found[:limit]
        return page, bytes(page[-1].key) if len(found) > limit else b""

    def spaces(self, *, deadline_s: float = DEADLINE_S_DEFAULT) -> dict[SpaceId, Space]:
        self._check_open()
        return dict(self._catalog.content.spaces)

    def space_of(self, space_id: SpaceId) -> Space | None:
        """A registered space, or None."""
        return self._catalog.content.spaces.get(space_id)

    def delete(self, space_id: SpaceId, keys: Sequence[BlockKey], *, deadline_s: float = DEADLINE_S_DEFAULT) -> int:
        self._check_open()
        count = self._delete(space_id, list(keys), deadline_s)
        self._states.drop_children(space_id, frozenset(keys))
        return count

    def delete_space(self, space_id: SpaceId, *, deadline_s: float = DEADLINE_S_DEFAULT) -> int:
        self._check_open()
        count = self._delete(space_id, None, deadline_s)
        self._states.drop_space(space_id)
        return count

    def purge(self, order: PurgeOrder, *, deadline_s: float = DEADLINE_S_DEFAULT) -> ByNode[PurgeReport]:
        self._check_open()
        return ByNode({"": self._purger.purge(order, deadline_s)})

    def leftovers(
        self, order: PurgeOrder, until_s: Mapping[str, int], *, deadline_s: float = DEADLINE_S_DEFAULT
    ) -> ByNode[Leftovers]:
        self._check_open()
        return ByNode({"": self._purger.leftovers(order, until_s.get("", order.until_s))})

    def purges(self, *, deadline_s: float = DEADLINE_S_DEFAULT) -> list[tuple[PurgeOrder, PurgeReport]]:
        self._check_open()
        return self._purger.orders()

    def _keep_up(self) -> None:
        resume_left(self._purger)
        self.sweep(apply=True, deadline_s=2 * SWEEP_REST_S)

    def _purge_from(self, space_id: SpaceId, keys: Sequence[BlockKey] | None, deadline_s: float) -> int:
        if keys is not None:
            return self.delete(space_id, keys, deadline_s=deadline_s)
        count = self.delete_space(space_id, deadline_s=deadline_s)
        with self._catalog_lock:
            spaces = self._catalog.content.spaces
            self._catalog.update(spaces={name: space for name, space in spaces.items() if name != space_id})
        return count

    def _part_of(self, order: PurgeOrder) -> Iterator[tuple[SpaceId, list[BlockKey]]]:
        """The blocks that an order by class or age comes to now, as many at once as one deletion takes."""
        until_s = order.written_until_s
        for space in order.spaces or (None,):
            doomed: dict[SpaceId, list[BlockKey]] = {}
            cursor, more = b"", True
            while more:
                page, cursor = self.scan(space, cursor=cursor)
                more = bool(cursor)
                for block in page:
                    if block.written_s <= until_s if until_s is not None else {*block.touches} == {order.class_byte}:
                        doomed.setdefault(block.space_id, []).append(block.key)
            yield from doomed.items()

    def _disown(self, order: PurgeOrder) -> int:
        """Take the claim of an order's class from blocks that other classes use too; how many."""
        now_s = int(self._clock.now_s())
        spaces = frozenset(order.spaces) or None
        return sum(self._on_each(lambda shard: shard.disown(order.class_byte or 0, spaces, now_s)))

    def pin(self, pins: Sequence[Pin], *, deadline_s: float = DEADLINE_S_DEFAULT) -> int:
        self._check_open()
        check_pins(pins)
        return self._pinboard.pin(pins)

    def unpin(
        self,
        space_id: SpaceId,
        keys: Sequence[BlockKey],
        *,
        owner: str | None = None,
        holds: bool = False,
        deadline_s: float = DEADLINE_S_DEFAULT,
    ) -> int:
        self._check_open()
        return self._pinboard.unpin(space_id, keys, owner, holds=holds)

    def pins(self, *, deadline_s: float = DEADLINE_S_DEFAULT) -> list[Pin]:
        self._check_open()
        return self._pinboard.pins()

    def policy(self, *, deadline_s: float = DEADLINE_S_DEFAULT) -> Policy:
        self._check_open()
        return self._catalog.content.policy

    def policy_history(self, *, deadline_s: float = DEADLINE_S_DEFAULT) -> list[Policy]:
        self._check_open()
        content = self._catalog.content
        return [*content.earlier, content.policy]

    def set_policy(
        self,
        rules: ClassRules,
        text: str,
        *,
        expected_version: int,
        apply: bool,
        author: str = "",
        deadline_s: float = DEADLINE_S_DEFAULT,
    ) -> Effect:
        self._check_open()
        check_rules(rules, self._config.capacity_bytes)
        with self._catalog_lock:
            current = self._catalog.content.policy
            if expected_version != current.version:
                raise PolicyConflict(
                    f"the policy is at version {current.version}, not {expected_version}: read it again, then change it"
                )
            now_s = self._clock.now_s()
            lost = merge_effects(effect for shard in self._shards for effect in shard.plan_rules(rules, now_s))
            if apply:
                for shard in self._shards:
                    shard.prepare_rules(rules)
                self._catalog.change_policy(Policy(current.version + 1, rules, text, int(now_s), author))
                for shard in self._shards:
                    shard.set_rules(rules)
        return Effect(apply, lost)

    def sweep(self, *, apply: bool, deadline_s: float = DEADLINE_S_DEFAULT) -> Effect:
        self._check_open()
        now_s = int(self._clock.now_s())
        self._states.expire()
        results = self._on_each(lambda shard: shard.sweep(now_s, apply=apply, rest_s=deadline_s / 2))
        return Effect(
            apply,
            merge_effects(effect for swept in results for effect in swept.removed),
            segments_freed=sum(swept.segments_freed for swept in results),
            blocks_rewritten=sum(swept.blocks_rewritten for swept in results),
        )

    def sight(
        self, space_id: SpaceId | None, names: Sequence[BlockName], *, deadline_s: float = DEADLINE_S_DEFAULT
    ) -> list[Sighting]:
        self._check_open()
        check_count(names, BATCH_BLOCKS_MAX, "a sight", "blocks")
        return [self._sight(space_id, name) for name in names]

    def stats(self, *, deadline_s: float = DEADLINE_S_DEFAULT) -> dict[str, Any]:
        """Numbers by name; nested maps count by class name, space id (hex) and shard."""
        self._check_open()
        now_s = self._clock.now_s()
        parts = [shard.stats(now_s) for shard in self._shards]
        effects = merge_effects(effect for part in parts for effect in part.pop("effects"))
        evicted_of = sum((part.pop("evicted_of") for part in parts), Counter[int]())
        totals = {name: sum(part[name] for part in parts) for name in parts[0]}
        for name in ("segment_bytes", "recovery_s"):
            totals[name] = max(part[name] for part in parts)
        content = self._catalog.content
        rules = content.policy.rules
        unknown = {effect.class_byte for effect in effects if rules.by_byte(effect.class_byte) is None}
        return {
            **totals,
            **self._states.stats(),
            "spaces": len(content.spaces),
            "pins": len(content.pins),
            "policy_version": content.policy.version,
            **merge_progress([scrubber.stats() for scrubber in self._scrubbers]),
            "unknown_classes": len(unknown),
            "shards": len(self._shards),
            "volumes": {str(shard.volume.path): shard.condition.report(now_s) for shard in self._shards},
            "clock_jumps": self._clock_watch.jumps,
            **promise_stats([(shard.ingest(int(now_s)), shard.room()) for shard in self._shards], rules),
            "uptime_s": time.monotonic() - self._started_s,
            "class_blocks": by_class(effects, rules, lambda effect: effect.blocks),
            "class_evicted": {rules.name_of(class_byte): count for class_byte, count in sorted(evicted_of.items())},
            "class_bytes": by_class(effects, rules, lambda effect: effect.payload_bytes),
            "space_bytes": by_space(effects),
        }

    def latest_use_s(self) -> int:
        """When any block was touched last, in seconds since the epoch; 0 without blocks."""
        return max(shard.latest_use_s() for shard in self._shards)

    def set_keyring(self, keyring: Keyring) -> None:
        """Put other cipher keys in force: what only a key that is gone can read is a miss from now on, and states in
        its spaces are dropped.
        """
        before, self._ciphers.keyring = self._ciphers.keyring, keyring
        self._relock()
        for lost in self._ciphers.lost_spaces(before):
            self._states.drop_space(lost)

    def accounting(self) -> list[dict[str, int]]:
        """Physical bytes of each shard's segments by what they hold (see ``Shard.accounting``)."""
        return [shard.accounting() for shard in self._shards]

    def close(self) -> None:
        """Drain: wait for readers a little, make everything durable, release the directories. Idempotent."""
        self._shut(sync=True)

    def abandon(self) -> None:
        """Let go without writing anything more, as a killed process would: for tests of recovery."""
        self._shut(sync=False)

    # --- interior -----------------------------------------------------------------------------------------------------

    def _shut(self, *, sync: bool) -> None:
        self._closed.set()
        self._sweeper.stop()
        for scrubber in self._scrubbers:
            scrubber.stop(save=sync)
        self._lanes.close()
        for shard in self._shards:
            if sync:
                shard.condition.keep_books(self._clock.now_s())
            shard.close(sync=sync)

    def _relock(self) -> None:
        for shard in self._shards:
            shard.relock()

    def _check_open(self) -> None:
        if self._closed.is_set():
            raise Unavailable("the store is closing")

    def _check_space(self, space_id: SpaceId) -> None:
        if space_id not in self._catalog.content.spaces:
            raise SpaceUnknown(f"space {space_id.hex()} was never registered here: call register_space first")

    def _spaces_in_use(self) -> dict[SpaceId, Space]:
        """Registered spaces that hold blocks. A client registers another again with its next put."""
        used = set().union(*(shard.spaces() for shard in self._shards))
        return {name: space for name, space in self._catalog.content.spaces.items() if name in used}

    def _by_home(self, batch: Incoming, blocks: Sequence[BlockPut]) -> dict[Shard, list[int]]:
        """Positions of the blocks that go to each shard, but of those that do not fit one of its segments."""
        first = self._shards[0]
        if len(self._shards) == 1 and (batch.rows["stored_bytes"] <= first.payload_bytes_max).all():
            return {first: list(range(len(blocks)))} if blocks else {}
        sizes = batch.rows["stored_bytes"].tolist()
        homes = self._homes(b"".join(batch.keys), [block.name.route for block in blocks])
        fitting = {
            shard: [at for at in positions if sizes[at] <= shard.payload_bytes_max]
            for shard, positions in homes.items()
        }
        return {shard: positions for shard, positions in fitting.items() if positions}

    def _homes(self, keys: bytes, routes: Sequence[bytes] = ()) -> dict[Shard, Sequence[int]]:
        """Positions of some keys by the shard that has the block, else the one that its route chooses; without routes
        any will do, since what no shard has is a miss.
        """
        count = len(keys) // KEY_BYTES
        if len(self._shards) == 1:
            return {self._shards[0]: range(count)} if count else {}
        words = key_words(keys)
        home = np.full(count, -1)
        for number, shard in enumerate(self._shards):
            home[(home < 0) & shard.has(words)] = number
        strange = np.flatnonzero(home < 0)
        chosen = {route: self._by_route(route) for route in {routes[at] for at in strange.tolist()}} if routes else {}
        home[strange] = [chosen[routes[at]] for at in strange.tolist()] if routes else 0
        return {
            shard: positions.tolist()
            for number, shard in enumerate(self._shards)
            if len(positions := np.flatnonzero(home == number))
        }

    def _by_route(self, route: bytes) -> int:
        weights = [xxhash.xxh3_64_intdigest(shard.volume.volume_id + route) for shard in self._shards]
        return weights.index(max(weights))

    def _home(self, name: BlockName) -> Shard:
        return next(iter(self._homes(name.key, [name.route])))

    def _delete(self, space_id: SpaceId, keys: list[BlockKey] | None, deadline_s: float) -> int:
        end_s = time.monotonic() + deadline_s
        now_s = int(self._clock.now_s())
        with self._pinboard.removing(space_id, keys):
            return sum(
                self._on_each(lambda shard: shard.delete(space_id, keys, now_s, max(0.0, end_s - time.monotonic())))
            )

    def _on_each(self, work: Callable[[Shard], T]) -> list[T]:
        """What every shard gives. Raises the first ``StoreError``, after all were tried."""
        done = self._lanes.run({shard: partial(work, shard) for shard in self._shards})
        results: list[T] = []
        for result in done.values():
            if isinstance(result, StoreError):
                raise result
            results.append(result)
        return results

    def _sight(self, space_id: SpaceId | None, name: BlockName) -> Sighting:
        now_s = self._clock.now_s()
        sightings = [shard.sight(name, space_id, now_s) for shard in self._shards]
        return best_sighting(sightings)

    def _start_scrubbers(self) -> None:
        if self._config.scrub_bytes_per_s > 0:
            rate = self._config.scrub_bytes_per_s
            self._scrubbers = [shard.scrubber(rate, self._clock) for shard in self._shards]
            for scrubber in self._scrubbers:
                scrubber.start()
