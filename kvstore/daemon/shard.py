"""One shard: segments, index and presence of one data directory, with one writer and many readers.

Owns opening, closing, reading and deleting; puts are ``puts``' and ``writer``'s, room is ``reclaimer``'s. Does not know
spaces' meaning, placement or the network. Invariants:

- Two locks. That of ``_turns`` (outer) serialises everything that appends, moves or recycles, but lets puts of new
  blocks work side by side; the ledger's (inner, short) guards presence and index.
- A put goes record, index, presence; a removal goes mark on disk, presence, index. A crash in between leaves a record
  that recovery adopts, or a dead one that nobody serves, nor takes for there when its block is put again (``proofs``).
- A reader holds a lease on the segment outside the locks. Every read verifies header, location, key, mark and
  payload; a failure is a miss and a quarantine. A block whose cipher key is not there is a miss, and nothing else.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.capacity import SPARE_SEGMENTS, blocks_max
from kvstore.daemon.bounds import Bounds
from kvstore.daemon.cipher import UNKNOWN_SLOT, Ciphers, KeyMissing
from kvstore.daemon.claims import take_away
from kvstore.daemon.codec import Codec, decompress, is_encrypted, packing_of, with_slot
from kvstore.daemon.condition import Condition
from kvstore.daemon.confirmations import Confirmations
from kvstore.daemon.events import EventLog
from kvstore.daemon.files import Files
from kvstore.daemon.fingerprints import Words
from kvstore.daemon.index import Index
from kvstore.daemon.ingest import Ingest
from kvstore.daemon.intake import SelectiveWriter
from kvstore.daemon.leases import PayloadLease
from kvstore.daemon.ledger import Ledger, Place, Taken
from kvstore.daemon.presence import (
    PresenceMap,
    digest_words,
    fingerprint_of,
    key_words,
)
from kvstore.daemon.proofs import Proofs
from kvstore.daemon.puts import Puts
from kvstore.daemon.questions import alive_keys, payload_bytes_of, scan, sight, slots_in
from kvstore.daemon.reclaimer import Reclaimer, Swept
from kvstore.daemon.record import HEADER_BYTES, Mark, MarkReason, RecordDamaged, RecordDead, RecordHeader
from kvstore.daemon.recovery import Recovered, recover_volume
from kvstore.daemon.scour import Condemned, Scoured, erase, search
from kvstore.daemon.scrubber import Scrubber
from kvstore.daemon.sealing import Sealer
from kvstore.daemon.segment import Segment
from kvstore.daemon.segments import SegmentSet
from kvstore.daemon.sweeping import sweep_round
from kvstore.daemon.tallies import Counters, account_of, effects_of
from kvstore.daemon.terms import Terms
from kvstore.daemon.turns import Turns
from kvstore.daemon.volume import INGEST_NAME, SCRUB_NAME, Volume, VolumeLayout
from kvstore.daemon.writer import Writer
from kvstore.errors import Unavailable, VolumeError
from kvstore.keys import BlockKey, BlockName, SpaceId, TokenDigest
from kvstore.promises import ClassIngest, Room
from kvstore.store import BlockInfo, ClassEffect, Clock, GetStatus, Sighting
from kvstore.traffic import ClassRules
from kvstore.units import format_bytes
from kvstore.wire import PackedNames

CLOSE_S_MAX = 5.0
"""Closing waits this long for readers' leases."""
READ_ATTEMPTS = 3
"""A block that moves under a reader is looked for again: by chance twice, hardly thrice."""

log = logging.getLogger(__name__)
Pins = Mapping[tuple[SpaceId, BlockKey], int]


@dataclass(frozen=True, slots=True)
class ShardParts:
    """What a shard is made of, opened and recovered."""

    volume: Volume
    layout: VolumeLayout
    ledger: Ledger
    recovery_s: float
    recovered: Recovered


class Shard:
    """Thread-safe. ``puts`` stores. ``pins`` is replaced as a whole by ``set_pins``; ``rules`` by ``set_rules``."""

    def __init__(
        self,
        parts: ShardParts,
        rules: ClassRules,
        pins: Pins,
        commit_window_s: float,
        bounds: Bounds,
        ciphers: Ciphers,
    ) -> None:
        self._parts = parts
        self._ledger = parts.ledger
        self._volumes = bounds.volumes
        self._rules = rules
        self._rules_here = self._here(rules)
        self._pins = pins
        self._ciphers = ciphers
        self._turns = Turns()
        self._reclaimer = Reclaimer(
            parts.ledger, lambda: self._rules_here, parts.layout.index_budget_bytes, overwrite=bounds.overwrite_aged
        )
        self._proofs = Proofs(parts.ledger, self._failed_read)
        writer = Writer(parts.ledger, self._reclaimer, lambda: self._rules, lambda: self._pins, self._proofs)
        selective = SelectiveWriter(writer, parts.ledger, lambda: self._rules, bounds.intake, bounds.wear)
        self._confirmations = Confirmations(parts.ledger, commit_window_s)
        self.puts = Puts(parts.ledger, self._turns, self._writing, selective, self._confirmations)
        self._sealer = Sealer(self._seal)
        self.condition = Condition(parts.ledger, parts.layout, bounds.wear)
        self.relock()

    @classmethod
    def open(
        cls,
        volume: Volume,
        layout: VolumeLayout,
        files: Files,
        rules: ClassRules,
        pins: Pins,
        holds: Pins,
        *,
        new_generation: Callable[[], int],
        now_s: int,
        commit_window_s: float,
        events: EventLog,
        bounds: Bounds,
        ciphers: Ciphers,
    ) -> Shard:
        """Open a locked volume: its segments, its index (rebuilt if need be), and everything acknowledged.

        Raises VolumeError if what is protected does not fit a lowered capacity.
        """
        begin_s = time.monotonic()
        segments = SegmentSet.open(
            files,
            volume.segments_path,
            layout.segment_bytes,
            layout.segments_max,
            new_generation,
            now_s,
            bounds.watermark,
            bounds.page_cache,
        )
        index: Index | None = None
        try:
            expected = blocks_max(layout.index_budget_bytes)

            def new_map() -> PresenceMap:
                return PresenceMap(Terms.of(rules), layout.tombstones_max, expected)

            index, presence, recovered = recover_volume(volume, layout, segments.segments, new_map, now_s)
            ledger = Ledger(segments, presence, index, Counters(), events, Ingest.load(volume.path / INGEST_NAME))
            ledger.mend_index()
            segments.adopt_opened()
            parts = ShardParts(volume, layout, ledger, time.monotonic() - begin_s, recovered)
            shard = cls(parts, rules, pins, commit_window_s, bounds, ciphers)
            shard.set_pins(pins, holds)
            shard._reclaimer.clean()
            if not shard._reclaimer.reduce_to_capacity(now_s):
                raise VolumeError(
                    f"{volume.path} holds more pinned or guaranteed blocks than {format_bytes(layout.capacity_bytes)}: "
                    "raise the capacity, unpin, or lower the floors"
                )
            return shard
        except BaseException:
            segments.close()
            if index is not None:
                index.close()
            raise

    def seal_in_background(self) -> None:
        """From now on a put does not wait until a full segment is on disk."""
        self._sealer.start()
        self._ledger.segments.seal_beside(self._sealer.offer)

    def relock(self) -> None:
        """Cipher keys or spaces changed: which blocks can be read now?"""
        with self._ledger.lock:
            self._ledger.presence.shapes.lock(self._ciphers.is_locked)

    def scrubber(self, bytes_per_s: int, clock: Clock) -> Scrubber:
        """A background scrub of this shard, yet to be started."""
        path = self._parts.volume.path / SCRUB_NAME
        return Scrubber(self._ledger, self._failed_read, path, bytes_per_s, clock)

    @property
    def volume(self) -> Volume:
        return self._parts.volume

    @property
    def payload_bytes_max(self) -> int:
        """Longest stored payload that fits a segment."""
        return self._parts.layout.segment_bytes - 4096 - HEADER_BYTES

    # data plane

    def presence_of(
        self, space_id: SpaceId, words: Words, digests: Words, now_s: float
    ) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8], npt.NDArray[np.uint32]]:
        """``Presence``, flags and payload bytes of each key; flags and bytes are 0 where it is not PRESENT."""
        with self._ledger.lock:
            return self._ledger.presence.answer(words, space_id, digests, now_s)

    def has(self, words: Words) -> npt.NDArray[np.bool_]:
        """Of which keys (``key_words``) a record is here, served or not."""
        with self._ledger.lock:
            return self._ledger.presence.slots(words) >= 0

    def read_into(self, space_id: SpaceId, name: BlockName, buffer: bytearray | memoryview, now_s: float) -> GetStatus:
        """Fill the buffer with a verified payload; it is zeroed if that failed after bytes had gone into it.

        A block that was moved or replaced while it was read is read again from where it is now.
        """
        for _ in range(READ_ATTEMPTS):
            status = self._read_once(space_id, name, buffer, now_s)
            if status is not None:
                return status
        self._ledger.counters.misses += 1
        return GetStatus.MISS

    def _read_once(
        self, space_id: SpaceId, name: BlockName, buffer: bytearray | memoryview, now_s: float
    ) -> GetStatus | None:
        """None: the record died under the reader."""
        counters = self._ledger.counters
        with self._ledger.leased(space_id, name, now_s) as place:
            if place is None:
                counters.misses += 1
                return GetStatus.MISS
            if place.payload_bytes != len(buffer):
                counters.misses += 1
                return GetStatus.WRONG_SIZE
            try:
                self._read(space_id, name, place, buffer)
            except KeyMissing as error:
                counters.misses += 1
                return self._without_key(place, error)
            except (RecordDamaged, OSError) as error:
                memoryview(buffer).cast("B")[:] = bytes(len(buffer))
                if _is_elsewhere(error):
                    self._failed_read(place, error, now_s)
                    return None
                counters.misses += 1
                return self._failed_read(place, error, now_s)
            counters.hits += 1
            counters.bytes_read += place.payload_bytes
            return GetStatus.OK

    def open_payload(self, space_id: SpaceId, name: BlockName, now_s: float) -> PayloadLease | None:
        """A payload for sending, its header verified; None is a miss. A block may move, as for ``read_into``."""
        counters = self._ledger.counters
        for _ in range(READ_ATTEMPTS):
            place = self._ledger.take(space_id, name, now_s)
            if place is None:
                break
            try:
                lease = self._lease(space_id, name, place)
            except KeyMissing as error:
                self._without_key(place, error)
                self._ledger.give_back(place)
                break
            except (RecordDamaged, OSError) as error:
                self._failed_read(place, error, now_s)
                self._ledger.give_back(place)
                if _is_elsewhere(error):
                    continue
                break
            counters.hits += 1
            counters.bytes_read += place.payload_bytes
            return lease
        counters.misses += 1
        return None

    def lend(self, space_id: SpaceId, keys: bytes, token_digests: bytes, now_s: float) -> Taken:
        """Places of blocks for reading, as ``Ledger.take_many``; the caller gives them back.

        Nothing is read here: the reader verifies header and payload, and tells of what it finds bad.
        """
        taken = self._ledger.take_many(space_id, keys, token_digests, now_s)
        found = taken.found
        plain = found & (taken.codec == Codec.NONE) if taken.codec.any() else found  # others count when they are opened
        sizes = taken.payload_bytes if plain is found else taken.payload_bytes[plain]
        counters = self._ledger.counters
        counters.hits += int(np.count_nonzero(plain))
        counters.misses += len(found) - int(np.count_nonzero(found))
        counters.extents_read += taken.runs(plain)
        counters.bytes_read += int(sizes.sum(dtype=np.int64))
        return taken

    def give_back(self, taken: Taken) -> None:
        self._ledger.give_back_many(taken)

    def lend_one(self, space_id: SpaceId, key: BlockKey, token_digest: TokenDigest, now_s: float) -> Place | None:
        """``lend`` of one block, in a fifth of the time; the caller gives the place back."""
        place = self._ledger.take_one(space_id, key, token_digest, now_s)
        counters = self._ledger.counters
        if place is None:
            counters.misses += 1
        elif place.codec == Codec.NONE:
            counters.hits += 1
            counters.extents_read += 1
            counters.bytes_read += place.payload_bytes
        return place

    def give_back_one(self, place: Place) -> None:
        self._ledger.give_back(place)

    def _lease(self, space_id: SpaceId, name: BlockName, place: Place) -> PayloadLease:
        """The lease of a place that was taken. Raises as ``_unpack``."""
        data: bytes | None = None
        if place.codec == Codec.NONE:
            header = self._check(space_id, name, *place.segment.read_header(place.offset))
        else:
            header, data = self._unpack(space_id, name, place)
        return PayloadLease(place, header, data, lambda: self._ledger.give_back(place))

    def report_corrupt(self, space_id: SpaceId, name: BlockName, now_s: float) -> bool:
        """Somebody saw bad bytes: read and verify again; True if the record was really bad and is now quarantined."""
        with self._ledger.leased(space_id, name, now_s) as place:
            if place is None:
                return False
            try:
                self._read(space_id, name, place, bytearray(place.payload_bytes))
            except KeyMissing as error:
                self._without_key(place, error)
            except (RecordDamaged, OSError) as error:
                status = self._failed_read(place, error, now_s)
                return status is GetStatus.CORRUPT or isinstance(error, OSError)
            return False

    def lost(self, space_id: SpaceId, keys: Sequence[BlockKey], now_s: int, deadline_s: float) -> set[int]:
        """Positions of stored blocks that the disk does not take, once it had the time (``Confirmations``)."""
        return self._confirmations.lost(space_id, keys, now_s, deadline_s)

    def touch(self, space_id: SpaceId, names: Sequence[BlockName], class_byte: int, now_s: int) -> int:
        """Count a use; returns how many were present."""
        packed = PackedNames.pack(names)
        words, digests = key_words(packed.keys), digest_words(packed.token_digests)
        with self._ledger.journal:
            with self._ledger.lock:
                slots = self._ledger.presence.slots(words)
                present = self._ledger.presence.served(slots, words, space_id, digests, now_s)
            self._ledger.touch(np.unique(slots[present]), class_byte, now_s)
        self._ledger.compact_if_due()
        return len(present)

    # control plane

    def delete(self, space_id: SpaceId, keys: Sequence[BlockKey] | None, now_s: int, deadline_s: float) -> int:
        """Purge blocks by key, or all of the space (None), durably; returns how many there were, expired ones included.

        Raises VolumeError if the disk did not take a mark: nobody is served the block, but it is not yet gone for good.
        """
        with self._writing(deadline_s):
            doomed = self._stored(space_id, keys)
            left = self._ledger.bury(doomed, Mark(MarkReason.PURGED, now_s))
            self._ledger.counters.purged += len(doomed) - len(left)
            problem = f"the disk did not take {len(left)} marks" if left else ""
            try:
                self._ledger.segments.settle()
                self._ledger.segments.flush()
            except OSError as error:
                problem = str(error)
            self._ledger.compact_if_due()
        if problem:
            raise VolumeError(f"the deletion could not be made durable: {problem}")
        return len(doomed)

    def disown(self, class_byte: int, spaces: Set[SpaceId] | None, now_s: int) -> int:
        """Let a class have no claim on blocks that others use too; how many. Raises VolumeError."""
        writing = partial(self._writing, threading.TIMEOUT_MAX)
        return take_away(self._ledger, self._reclaimer, writing, class_byte, spaces, now_s)

    def erase(self, condemned: Condemned, now_s: int, *, overwrite: bool) -> tuple[Scoured, set[BlockKey]]:
        """Leave no byte of what is condemned: what was erased, and its keys. Raises VolumeError."""
        try:
            writing = partial(self._writing, threading.TIMEOUT_MAX)
            return erase(self._ledger, writing, condemned, now_s, overwrite=overwrite)
        except OSError as error:
            raise VolumeError(f"{self.volume.path} could not be erased: {error}") from error

    def leftovers(self, condemned: Condemned) -> Scoured:
        """What a raw scan of the segments finds of what was condemned. Raises VolumeError."""
        try:
            return search(self._ledger, condemned)
        except OSError as error:
            raise VolumeError(f"{self.volume.path} could not be read through: {error}") from error

    def spaces(self) -> set[SpaceId]:
        """Spaces that have blocks here."""
        with self._ledger.lock:
            return self._ledger.presence.shapes.spaces()

    def latest_use_s(self) -> int:
        """When any block was touched last; 0 without blocks."""
        with self._ledger.lock:
            return self._ledger.presence.latest_use_s()

    def scan(self, space_id: SpaceId | None, cursor: bytes, limit: int, now_s: float) -> list[BlockInfo]:
        """Stored blocks beyond ``cursor`` in key order, at most ``limit``. Raises VolumeError."""
        return scan(self._ledger, space_id, cursor, limit, now_s)

    def sight(self, name: BlockName, space_id: SpaceId | None, now_s: float) -> Sighting:
        """What is remembered of one block; ``other_spaces`` by a search of the whole index (explain is rare)."""
        return sight(self._ledger, name, space_id, now_s)

    def alive_keys(self, space_id: SpaceId, keys: Sequence[BlockKey], now_s: float) -> list[BlockKey]:
        """Those of the keys that are served now, and whose records are known to live."""
        self._proofs.prove(keys, now_s)
        return alive_keys(self._ledger, space_id, keys, now_s)

    def payload_bytes_of(self, space_id: SpaceId, keys: Sequence[BlockKey]) -> int:
        """Payload bytes of those of the keys that are stored, each once."""
        return payload_bytes_of(self._ledger, space_id, keys)

    def set_pins(self, pins: Pins, holds: Pins) -> None:
        """Replace all pins: ends by (space id, key). ``holds``: those that are legal holds, a maximum age or not."""
        with self._turns.alone(), self._ledger.changing():
            self._pins = pins
            self._ledger.presence.unpin_all()
            self._ledger.presence.set_holds({fingerprint_of(key): until_s for (_, key), until_s in holds.items()})
            for (space_id, key), until_s in pins.items():
                slot = int(slots_in(self._ledger, space_id, [key])[0])
                if slot >= 0 and self._ledger.place(slot) is not None:
                    self._ledger.presence.pin(slot, until_s)

    def plan_rules(self, rules: ClassRules, now_s: float) -> tuple[ClassEffect, ...]:
        """What other rules would expire at once."""
        with self._ledger.lock:
            presence = self._ledger.presence
            used = presence.used()
            slots = used[presence.alive(used, now_s)]
            return effects_of(presence, slots[presence.until_s_under(slots, Terms.of(rules)) <= now_s])

    def prepare_rules(self, rules: ClassRules) -> None:
        """Before a class gets a maximum age: leave no byte of what it wrote in earlier lives of the segments.

        Raises VolumeError.
        """
        known = {rule.class_byte for rule in self._rules.rules if rule.max_age_s}
        if not any(rule.max_age_s and rule.class_byte not in known for rule in rules.rules):
            return
        try:
            with self._writing(threading.TIMEOUT_MAX):
                self._reclaimer.erase_unused()
        except OSError as error:
            raise VolumeError(f"{self.volume.path} could not be erased: {error}") from error

    def set_rules(self, rules: ClassRules) -> None:
        with self._turns.alone(), self._ledger.changing():
            self._rules, self._rules_here = rules, self._here(rules)
            self._ledger.presence.set_rules(Terms.of(rules))

    def sweep(self, now_s: int, *, apply: bool, rest_s: float = 0.0) -> Swept:
        """Drop what expired, letting others in between (``sweep_round``); or say what would be dropped."""
        if not apply:
            return self._reclaimer.plan_sweep(now_s)
        swept = sweep_round(self._ledger, self._reclaimer, self._writing, now_s, rest_s)
        self.condition.keep_books(now_s)
        self._ledger.compact_if_due()
        self._ledger.ingest.save(self._parts.volume.path / INGEST_NAME)
        return swept

    def stats(self, now_s: float) -> dict[str, Any]:
        """Gauges and counters as numbers; ``by_class`` and ``by_space`` count served blocks and payload bytes."""
        with self._ledger.lock:
            presence = self._ledger.presence
            used = presence.used()
            alive = used[presence.alive(used, now_s)]
            effects = effects_of(presence, alive)
            segments = self._ledger.segments
            sealed = sum(item.sealed for item in segments.segments.values())
            return {
                "blocks": len(alive),
                "blocks_expired_unswept": len(used) - len(alive),
                "blocks_encrypted": presence.shapes.rows_encrypted(),
                "blocks_without_key": presence.shapes.rows_locked(),
                "blocks_max": self._reclaimer.blocks_max,
                "payload_bytes": sum(effect.payload_bytes for effect in effects),
                "pinned_blocks": len(presence.pinned_slots(now_s)),
                "tombstones": len(presence.tombstones),
                "presence_bytes": presence.memory_bytes,
                "tombstone_bytes": presence.tombstones.memory_bytes,
                "capacity_bytes": self._parts.layout.capacity_bytes,
                "segment_bytes": self._parts.layout.segment_bytes,
                "segments_max": segments.segments_max,
                "segments": len(segments.segments),
                "segments_free": segments.free_count,
                "segments_open": len(segments.opened),
                "segments_sealed": sealed,
                "segments_failed": sum(item.failed for item in segments.segments.values()),
                "leases": sum(item.leases for item in segments.segments.values()),
                "index_bytes": self._ledger.index.disk_bytes(),
                "index_compactions": self._ledger.index.compactions,
                "index_budget_bytes": self._parts.layout.index_budget_bytes,
                "recovery_s": self._parts.recovery_s,
                "recovered_adopted": self._parts.recovered.adopted,
                "recovered_dropped": self._parts.recovered.dropped,
                "recovered_damaged": self._parts.recovered.damaged + segments.damaged,
                "effects": effects,
                "evicted_of": self._ledger.counters.evicted_of.copy(),
                **self._ledger.counters.as_dict(),
            }

    def ingest(self, now_s: int) -> dict[int, ClassIngest]:
        """What came of each class, by hour."""
        return self._ledger.ingest.of_classes(now_s)

    def room(self) -> Room:
        """How much of the segments is in use."""
        with self._ledger.lock:
            segments = self._ledger.segments
            used = segments.segments_max - segments.free_count
            blocks, pinned_bytes = len(self._ledger.presence), self._ledger.presence.pinned_bytes()
            sizes = (self._parts.layout.segment_bytes, segments.segments_max, used, SPARE_SEGMENTS)
            return Room(*sizes, self._reclaimer.blocks_max, blocks, segments.withheld, pinned_bytes)

    def accounting(self) -> dict[str, int]:
        """As ``account_of``."""
        with self._turns.alone(), self._ledger.lock:
            return account_of(self._ledger.presence, self._ledger.segments.segments.values())

    def close(self, *, sync: bool = True) -> None:
        """Wait for readers (bounded), make appended bytes durable, let go of everything. Idempotent."""
        self._sealer.stop(drain=sync)
        end_s = time.monotonic() + CLOSE_S_MAX
        while sync and time.monotonic() < end_s and self._leases():
            time.sleep(0.005)
        with self._turns.alone(), self._ledger.lock:
            if self._ledger.index.closed:
                return
            if sync:
                with contextlib.suppress(OSError):
                    self._ledger.segments.flush()
                self._ledger.ingest.save(self._parts.volume.path / INGEST_NAME)
            self._ledger.index.close()
            self._ledger.segments.close()
            self._parts.volume.close()

    # interior

    def _here(self, rules: ClassRules) -> ClassRules:
        """This volume's part of the rules."""
        return rules.for_volume(self._parts.layout.capacity_bytes * self._volumes, self._volumes)

    def _leases(self) -> int:
        with self._ledger.lock:
            return sum(item.leases for item in self._ledger.segments.segments.values())

    @contextlib.contextmanager
    def _writing(self, deadline_s: float) -> Iterator[None]:
        with self._turns.alone(deadline_s):
            if self._ledger.index.closed:
                raise Unavailable("the store is closing")
            yield

    def _seal(self, segment: Segment, generation: int) -> None:
        """Flush a full segment without any lock, then mark it in the writer's name."""
        with contextlib.suppress(OSError):  # the segment remembers, and the seal tries again
            segment.sync(if_dirty=True)
        with self._turns.alone():
            if not self._ledger.index.closed:
                self._ledger.segments.seal_if_still(segment, generation)

    def _read(self, space_id: SpaceId, name: BlockName, place: Place, buffer: bytearray | memoryview) -> RecordHeader:
        """Read and verify a whole block into a buffer of its payload's length. Raises as ``_unpack``."""
        if place.codec == Codec.NONE:
            return self._check(space_id, name, *place.segment.read_record(place.offset, buffer))
        header, payload = self._unpack(space_id, name, place)
        memoryview(buffer).cast("B")[:] = payload
        return header

    def _unpack(self, space_id: SpaceId, name: BlockName, place: Place) -> tuple[RecordHeader, bytes]:
        """The payload of a block that is not stored as it is. Raises KeyMissing, RecordDamaged or OSError."""
        stored = bytearray(place.segment.read_header(place.offset)[0].stored_bytes)
        header = self._check(space_id, name, *place.segment.read_record(place.offset, stored))
        packed = self._ciphers.decrypt(header, stored) if is_encrypted(header.codec) else stored
        return header, decompress(packing_of(header.codec), packed, header.payload_bytes)

    def _without_key(self, place: Place, error: KeyMissing) -> GetStatus:
        """A block whose cipher key turned out to be missing when it was read."""
        self._ledger.counters.key_missing += 1
        if error.renumbered:
            self._ledger.lock_out(place, with_slot(place.codec, UNKNOWN_SLOT))
        return GetStatus.MISS

    def _check(self, space_id: SpaceId, name: BlockName, header: RecordHeader, mark: Mark | None) -> RecordHeader:
        """The record must be the block asked for, and living."""
        if (header.key, header.space_id, header.token_digest) != (name.key, space_id, name.token_digest):
            raise RecordDamaged("the record holds another block than the index says")
        if mark is not None:
            raise RecordDead(mark)
        return header

    def _failed_read(self, place: Place, error: Exception, now_s: float) -> GetStatus:
        """Quarantine what failed. A record that was removed meanwhile, or whose removal the index had
        lost, is a miss.
        """
        counters = self._ledger.counters
        if isinstance(error, RecordDead) and error.mark.reason is not MarkReason.DAMAGED:
            self._ledger.forget_dead(place, error.mark)
            return GetStatus.MISS
        if not self._ledger.quarantine([place], int(now_s)):
            return GetStatus.MISS
        log.error("read_failed segment=%d offset=%d problem=%s", place.segment.number, place.offset, error)
        if isinstance(error, OSError):
            counters.read_errors += 1
            return GetStatus.MISS
        counters.corrupt += 1
        return GetStatus.CORRUPT

    def _stored(self, space_id: SpaceId, keys: Sequence[BlockKey] | None) -> list[Place]:
        """Places of those of the keys, or of all (None), that are stored in the space, each once; a key is compared
        with the record's own.
        """
        wanted: defaultdict[int, set[BlockKey]] = defaultdict(set)
        """By slot: the keys with its fingerprint; none where any will do."""
        with self._ledger.lock:
            if keys is None:
                for slot in self._ledger.presence.in_space(space_id).tolist():
                    wanted[slot] = set()
            else:
                for slot, key in zip(slots_in(self._ledger, space_id, keys).tolist(), keys, strict=True):
                    wanted[slot].add(key)
            places = [
                (place, any_of) for slot, any_of in wanted.items() if slot >= 0 and (place := self._ledger.place(slot))
            ]
        return [place for place, any_of in places if not any_of or _holds(place, any_of)]


def _holds(place: Place, any_of: Set[BlockKey]) -> bool:
    """Whether a record is that of one of the keys; one that cannot be read is taken for it: it shall go in any case."""
    try:
        return place.segment.read_header(place.offset)[0].key in any_of
    except (RecordDamaged, OSError):
        return True


def _is_elsewhere(error: Exception) -> bool:
    """Whether a read failed because the block moved or was replaced since its place was looked up."""
    return isinstance(error, RecordDead) and error.mark.reason in (MarkReason.MOVED, MarkReason.REPLACED)
