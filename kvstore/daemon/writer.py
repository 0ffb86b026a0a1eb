"""Putting blocks: which of a batch are new, where they go, and what counts as done.

Owns the order record, index, presence. Does not make room (the reclaimer does) nor wait for the disk (the shard does).
Runs under the shard's outer lock, but for what a ``PutUnderWay`` does. Invariants: consecutive blocks are gather
writes, and one index batch; bytes are verified after they were written, while they are in the processor's cache, so
that a payload that changed on its way or meanwhile is dead before anybody can be told that it is stored; a block that
is not stored leaves no trace that a restart would find.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from kvstore.daemon.columns import Incoming
from kvstore.daemon.headers import Headers, headers_for, rows_of, seal_headers
from kvstore.daemon.index import NO_ROWS, IndexRefused
from kvstore.daemon.inflow import CHUNK_BYTES
from kvstore.daemon.ledger import Ledger, Place
from kvstore.daemon.presence import digest_words, fingerprint_of, key_words
from kvstore.daemon.proofs import Proofs
from kvstore.daemon.reclaimer import Reclaimer
from kvstore.daemon.record import (
    HEADER_BYTES,
    RECORD_ALIGN,
    Mark,
    MarkReason,
    RecordHeader,
    checksum_of,
    encode_header,
    record_bytes,
)
from kvstore.daemon.segment import Segment
from kvstore.errors import StoreError
from kvstore.keys import BlockKey, SpaceId
from kvstore.reclaim import expiry_day
from kvstore.store import FLAG_APPROXIMATE, Buffer, Presence, PutOutcome
from kvstore.traffic import ClassRules

RUN_BLOCKS_MAX = 256
"""Blocks of one gather write: three buffers each stay below IOV_MAX."""
WRITE_BYTES_MAX = CHUNK_BYTES
"""Bytes of one gather write, unless a block has more. A kernel that caches files in large pieces makes them as large as
a write, and large ones are read a tenth faster; beyond, the bytes leave the processor's cache before they are verified.
"""
ATTEMPTS = 2
"""Segments that a put tries: one bad file does not refuse it, a bad disk does at once."""
_PADDING = memoryview(bytes(RECORD_ALIGN))

log = logging.getLogger(__name__)

Touches = tuple[tuple[int, int], ...]
Pins = Mapping[tuple[SpaceId, BlockKey], int]


class _Batch:
    """One put under way. ``replaces``: by position, the touches to carry over from an approximate record, or
    from one whose cipher key is gone.

    Not where that record is: making room for this very put may move or recycle it.
    """

    __slots__ = (
        "blocks",
        "class_byte",
        "expired",
        "for_disk",
        "now_s",
        "outcomes",
        "pending",
        "record_bytes",
        "replaces",
        "space_id",
    )

    def __init__(self, space_id: SpaceId, blocks: Incoming, class_byte: int, now_s: int, for_disk: bool) -> None:
        self.space_id = space_id
        self.blocks = blocks
        self.class_byte = class_byte
        self.now_s = now_s
        self.for_disk = for_disk
        self.outcomes = [PutOutcome.REFUSED] * len(blocks)
        self.pending: npt.NDArray[np.int64] = np.arange(0)
        self.replaces: dict[int, Touches] = {}
        self.expired: dict[int, tuple[int, Place | None]] = {}
        """By position: slot and record of blocks that expired, to be buried before they are written anew."""
        self.record_bytes = blocks.record_bytes()

    @property
    def total_bytes(self) -> int:
        return int(self.record_bytes.sum())


class PutUnderWay:
    """New blocks for which there is room in a segment. First ``write``, then ``Writer.end``, which says whether they
    count, both in turn.
    """

    def __init__(self, batch: _Batch, segment: Segment, parts: set[bytes]) -> None:
        self.batch = batch
        self.segment = segment
        self.parts = parts
        self.begin = 0
        self.headers: Headers
        self.intact: npt.NDArray[np.bool_] | None = None
        """By block, whether what was written is what was submitted; of the first only, where the others did not come in
        time. None: a write failed.
        """

    @property
    def written_bytes(self) -> int:
        return int(self.batch.record_bytes[: len(self.intact)].sum()) if self.intact is not None else 0

    def write(self) -> None:
        """Gather writes of all that is to be stored, each verified at once, while it is in the processor's cache (all
        at last takes three times as long); where one fails, no other follows. Raises what the connection raises from
        which the bytes come; what was written before counts.
        """
        batch, segment = self.batch, self.segment
        everything = np.arange(len(batch.blocks))
        self.begin = segment.tail
        self.headers = _headers(batch, everything, segment)
        intact: list[bool] = []
        try:
            if not segment.takes_more:
                raise OSError(errno.EIO, "what goes before was not written")
            for begin, end in _writes(batch.record_bytes):
                payloads = batch.blocks.take(begin, end)
                if not payloads:
                    break
                parts, total_bytes = _parts(self.headers[begin:end], payloads)
                segment.append_ahead(parts, total_bytes)
                if batch.for_disk:
                    segment.hasten(segment.tail - total_bytes)
                intact += _are_intact(batch.blocks, range(begin, end), payloads)
        except OSError as error:
            log.error("records_not_written segment=%d problem=%r", segment.number, error)
        except StoreError:
            self.intact = np.array(intact, dtype=np.bool_)
            raise
        else:
            self.intact = np.array(intact, dtype=np.bool_)


class Writer:
    """``pins``: ends of pins by space and key."""

    def __init__(
        self,
        ledger: Ledger,
        reclaimer: Reclaimer,
        rules: Callable[[], ClassRules],
        pins: Callable[[], Pins],
        proofs: Proofs,
    ) -> None:
        self._proofs = proofs
        self._ledger = ledger
        self._reclaimer = reclaimer
        self._rules = rules
        self._pins = pins
        self._busy: set[bytes] = set()
        """Of what is under way, the part of each key that a fingerprint is made of."""

    def put(
        self, space_id: SpaceId, blocks: Incoming, class_byte: int, now_s: int, *, for_disk: bool = False
    ) -> list[PutOutcome]:
        """Store or touch each block. A key twice in one batch is put twice, in order.

        ``for_disk``: the device begins with what is written while more is.
        """
        if len(blocks) == 1:
            outcome = self._put_one(space_id, blocks, class_byte, now_s, for_disk)
            if outcome is not None:
                self._count([outcome])
                return [outcome]
        runs = _distinct_runs(blocks.keys)
        if len(runs) == 1:
            return self._put_distinct(_Batch(space_id, blocks, class_byte, now_s, for_disk))
        outcomes: list[PutOutcome] = []
        for begin, end in runs:
            outcomes += self._put_distinct(
                _Batch(space_id, blocks.pick(range(begin, end)), class_byte, now_s, for_disk)
            )
        return outcomes

    def _put_distinct(self, batch: _Batch) -> list[PutOutcome]:
        self._proofs.prove(batch.blocks.keys, batch.now_s)
        with self._ledger.journal:
            with self._ledger.lock:
                self._plan(batch)
            if batch.expired:
                self._bury_expired(batch)
        self._write(batch)
        self._count(batch.outcomes)
        return batch.outcomes

    # --- one new block, without the steps that pay for many -----------------------------------------------------------

    def _put_one(
        self, space_id: SpaceId, blocks: Incoming, class_byte: int, now_s: int, for_disk: bool
    ) -> PutOutcome | None:
        """Store a block whose key has no row; None if it has, or if the block is known to be altered."""
        with self._ledger.lock:
            if blocks.altered or self._ledger.presence.slot(blocks.keys[0]) >= 0:
                return None
        if not self._ledger.mend_index() or not self._reclaimer.make_room_in_index(1, now_s):
            return PutOutcome.REFUSED
        needed = record_bytes(len(blocks.stored[0]))
        day = expiry_day(now_s + self._rules().keep_for_s(class_byte))
        for _ in range(ATTEMPTS):
            segment = self._reclaimer.segment_for(class_byte, day, needed, now_s)
            if segment is None:
                self._ledger.counters.shed_low_space += self._ledger.segments.held_back
                break
            header = blocks.header(0, space_id, class_byte, now_s, segment)
            parts = [encode_header(header), blocks.stored[0], _PADDING[: needed - HEADER_BYTES - header.stored_bytes]]
            if not self._append(segment, parts, needed, for_disk):
                self._ledger.segments.retire(segment)
                continue
            outcome = self._commit_one(header, all(_are_intact(blocks, [0], blocks.stored)), segment)
            if outcome is not None:
                return outcome
        return PutOutcome.REFUSED

    def _commit_one(self, header: RecordHeader, intact: bool, segment: Segment) -> PutOutcome | None:
        """As ``_commit``, of one new record; None if the index or the disk refused it."""
        try:
            if intact:
                self._ledger.store_one(header, segment, self._pins().get((header.space_id, header.key), 0))
            else:
                segment.mark(header.offset, Mark(MarkReason.QUARANTINED, header.written_s))
                self._ledger.store(NO_ROWS, [segment], {})
        except (IndexRefused, OSError) as error:
            self._not_indexed([header.offset], segment, header.written_s, error)
            return None
        return PutOutcome.STORED if intact else PutOutcome.ALTERED

    # --- new blocks, beside others ------------------------------------------------------------------------------------

    def begin(
        self, space_id: SpaceId, blocks: Incoming, class_byte: int, now_s: int, *, for_disk: bool, alone: bool
    ) -> PutUnderWay | None:
        """Set room aside for the first of some blocks, of which nothing is known; None: ``put`` has to see to them.

        The put then goes on without the shard's lock, except for its ``end``. ``alone``: nothing is under way, so that
        blocks may be written again to make room.
        """
        parts = {_distinct_part(key) for key in blocks.keys}
        if not 1 < len(blocks) == len(parts) <= RUN_BLOCKS_MAX or blocks.altered or not self._busy.isdisjoint(parts):
            return None
        ledger = self._ledger
        with ledger.lock:
            if (ledger.presence.slots(key_words(b"".join(blocks.keys))) >= 0).any():
                return None
            count = len(ledger.presence) + len(self._busy) + len(blocks)
        if ledger.index.closed or ledger.index.refusing or count > self._reclaimer.blocks_max:
            return None
        day = expiry_day(now_s + self._rules().keep_for_s(class_byte))
        batch = _Batch(space_id, blocks, class_byte, now_s, for_disk)
        first_bytes = int(batch.record_bytes[0])
        segment = self._reclaimer.segment_at_hand(class_byte, day, first_bytes, now_s)
        if segment is None:
            segment = self._reclaimer.segment_for(class_byte, day, first_bytes, now_s, beside=not alone)
        if segment is None:
            return None
        fitting = len(_fitting(np.arange(len(blocks)), batch.record_bytes, segment.room_bytes))
        if not fitting:
            return None
        if fitting < len(blocks):
            blocks = blocks.pick(range(fitting))
            batch = _Batch(space_id, blocks, class_byte, now_s, for_disk)
            parts = {_distinct_part(key) for key in blocks.keys}
        segment.promised_bytes += batch.total_bytes
        self._busy |= parts
        return PutUnderWay(batch, segment, parts)

    def end(self, put: PutUnderWay) -> list[PutOutcome] | None:
        """Make what was written count, of which the outcomes are; None if it does not, so that it has to be put again:
        nothing is left of it.
        """
        batch, segment, written_bytes = put.batch, put.segment, put.written_bytes
        segment.promised_bytes -= batch.total_bytes
        self._busy -= put.parts
        if put.intact is not None and not len(put.intact):
            return []
        if put.intact is None or not segment.count(put.begin, written_bytes):
            if not segment.sealed:  # else one that went before has taken all back
                self._ledger.counters.write_errors += 1
                segment.take_back(segment.end)
                self._ledger.segments.retire(segment)
            return None
        self._ledger.counters.bytes_written += written_bytes
        done = len(put.intact)
        if not self._commit(batch, np.arange(done), put.headers[:done], put.intact, segment):
            return None
        self._count(batch.outcomes[:done])
        return batch.outcomes[:done]

    # --- what to do with each block ---------------------------------------------------------------------------------

    def _plan(self, batch: _Batch) -> None:
        """Sort out what is new or replaces, under the ledger's locks; touch the rest."""
        slots = self._ledger.presence.slots(key_words(b"".join(batch.blocks.keys)))
        pending = slots < 0
        touched: list[int] = []
        for at in np.flatnonzero(~pending).tolist():
            outcome = self._plan_known(batch, at, int(slots[at]))
            pending[at] = outcome is None
            if outcome is not None:
                batch.outcomes[at] = outcome
            if outcome is PutOutcome.TOUCHED:
                touched.append(int(slots[at]))
        for at in batch.blocks.altered:
            batch.outcomes[at] = PutOutcome.ALTERED
            pending[at] = False
        batch.pending = np.flatnonzero(pending)
        if touched:
            self._ledger.touch(np.array(touched, dtype=np.int64), batch.class_byte, batch.now_s)

    def _plan_known(self, batch: _Batch, at: int, slot: int) -> PutOutcome | None:
        """The outcome for a block whose key has a row; None if it is to be written."""
        presence, row = self._ledger.presence, batch.blocks.rows[at]
        words, digest = key_words(batch.blocks.keys[at]), digest_words(row["digest"].tobytes())
        if not presence.matches(np.array([slot]), words, batch.space_id, digest)[0]:
            return PutOutcome.REFUSED  # another prefix has this key: neither may be served for the other
        place = self._ledger.place(slot)
        if place is None or not presence.is_alive(slot, batch.now_s):
            batch.expired[at] = slot, place
            return None
        exact_at_last = place.flags & FLAG_APPROXIMATE and not row["flags"] & FLAG_APPROXIMATE
        if exact_at_last or presence.is_locked(slot):
            presence.touch(slot, batch.class_byte, batch.now_s)
            batch.replaces[at] = presence.touches(slot)
            return None
        return PutOutcome.TOUCHED

    def _bury_expired(self, batch: _Batch) -> None:
        """Forget rows whose keys are to be written anew; a block whose old record cannot be marked dead is refused."""
        places = [place for _, place in batch.expired.values() if place is not None]
        left = {place.slot for place in self._ledger.bury(places, Mark(MarkReason.EXPIRED, batch.now_s))}
        lost = np.array([slot for slot, place in batch.expired.values() if place is None], dtype=np.int64)
        self._ledger.forget(lost, np.full(len(lost), Presence.EXPIRED, dtype=np.uint8), batch.now_s)
        self._ledger.counters.expired += len(batch.expired) - len(left)
        if left:
            stuck = [at for at, (slot, _) in batch.expired.items() if slot in left]
            batch.pending = np.setdiff1d(batch.pending, stuck)

    # --- writing ----------------------------------------------------------------------------------------------------

    def _write(self, batch: _Batch) -> None:
        """Write what is pending in runs; whatever finds no room stays REFUSED.

        While the index takes no entries nothing is written: dead records would drive living ones out.
        """
        pending = batch.pending
        if not len(pending) or not self._ledger.mend_index():
            return
        day = expiry_day(batch.now_s + self._rules().keep_for_s(batch.class_byte))
        if not self._reclaimer.make_room_in_index(len(pending), batch.now_s):
            return
        at = failures = 0
        while at < len(pending):
            needed = int(batch.record_bytes[pending[at]])
            segment = self._reclaimer.segment_for(batch.class_byte, day, needed, batch.now_s)
            if segment is None:
                self._ledger.counters.shed_low_space += (len(pending) - at) * self._ledger.segments.held_back
                return
            run = _fitting(pending[at:], batch.record_bytes, segment.room_bytes)
            done = self._write_run(batch, run, segment) if len(run) else 0
            at += done
            if done and done == len(run):
                continue
            failures += 1
            if failures == ATTEMPTS:
                return

    def _write_run(self, batch: _Batch, run: npt.NDArray[np.int64], segment: Segment) -> int:
        """Gather writes and one index batch. How many of the run are done with; the others stay REFUSED."""
        headers = _headers(batch, run, segment)
        intact: list[bool] = []
        for begin, end in _writes(batch.record_bytes[run]):
            positions = run[begin:end].tolist()
            payloads = [batch.blocks.stored[at] for at in positions]
            parts, total_bytes = _parts(headers[begin:end], payloads)
            if not self._append(segment, parts, total_bytes, batch.for_disk):
                break
            intact += _are_intact(batch.blocks, positions, payloads)
        done = len(intact)
        if done and not self._commit(batch, run[:done], headers[:done], np.array(intact), segment):
            done = 0
        if len(intact) < len(run):
            self._ledger.segments.retire(segment)
        return done

    def _append(self, segment: Segment, parts: Sequence[Buffer], total_bytes: int, for_disk: bool) -> bool:
        """One gather write. A segment that refuses it is to be retired, once what it took before has been committed."""
        try:
            segment.append(parts, total_bytes)
        except OSError as error:
            self._ledger.counters.write_errors += 1
            log.error("records_not_written segment=%d problem=%r", segment.number, error)
            return False
        if for_disk:
            segment.hasten(segment.tail - total_bytes)
        self._ledger.counters.bytes_written += total_bytes
        return True

    def _not_indexed(self, offsets: Sequence[int], segment: Segment, now_s: int, error: Exception) -> None:
        """Records that were written, but that the index or the disk refused, are dead."""
        self._ledger.counters.write_errors += 1
        log.error("records_not_indexed segment=%d problem=%r", segment.number, error)
        try:
            for offset in offsets:
                segment.mark(offset, Mark(MarkReason.QUARANTINED, now_s))
        except OSError:
            segment.take_back(min(offsets))
            self._ledger.segments.retire(segment)

    def _commit(
        self,
        batch: _Batch,
        run: npt.NDArray[np.int64],
        headers: Headers,
        intact: npt.NDArray[np.bool_],
        segment: Segment,
    ) -> bool:
        """Make the written records count. False if the index or the disk refused: none of them does."""
        good = run[intact].tolist()
        replaced = [batch.blocks.keys[at] for at in good if at in batch.replaces] if batch.replaces else []
        try:
            for offset in headers["offset"][~intact].tolist():
                segment.mark(offset, Mark(MarkReason.QUARANTINED, batch.now_s))
            if replaced:
                segment.sync()
            self._store(batch, rows_of(headers[intact]), good, replaced, segment)
        except (IndexRefused, OSError) as error:
            self._not_indexed(headers["offset"].tolist(), segment, batch.now_s, error)
            return False
        for at in run[~intact].tolist():
            batch.outcomes[at] = PutOutcome.ALTERED
        for at in good:
            batch.outcomes[at] = PutOutcome.REPLACED if at in batch.replaces else PutOutcome.STORED
        return True

    def _store(
        self, batch: _Batch, rows: Headers, good: Sequence[int], replaced: Sequence[BlockKey], segment: Segment
    ) -> None:
        pins, pins_s = self._pins(), {}
        if pins:
            keys = [batch.blocks.keys[at] for at in good]
            pins_s = {key: pins[batch.space_id, key] for key in keys if (batch.space_id, key) in pins}
        if not replaced:
            self._ledger.store(rows, [segment], pins_s, new=True)
            return
        with self._ledger.journal:
            self._ledger.mark_replaced(replaced, Mark(MarkReason.REPLACED, batch.now_s))
            self._ledger.store(rows, [segment], pins_s, in_any_case=True)

    def _count(self, outcomes: Sequence[PutOutcome]) -> None:
        counters = self._ledger.counters
        counters.puts += outcomes.count(PutOutcome.STORED)
        counters.touches += outcomes.count(PutOutcome.TOUCHED)
        counters.replaced += outcomes.count(PutOutcome.REPLACED)
        counters.refused += outcomes.count(PutOutcome.REFUSED)
        counters.altered += outcomes.count(PutOutcome.ALTERED)


def _distinct_runs(keys: Sequence[BlockKey]) -> list[tuple[int, int]]:
    """Cut a batch so that no run names a key twice, nor two keys of one fingerprint: the second finds the first."""
    if len({_distinct_part(key) for key in keys}) == len(keys):
        return [(0, len(keys))]
    runs: list[tuple[int, int]] = []
    begin = 0
    seen: set[int] = set()
    for position, key in enumerate(keys):
        fingerprint = fingerprint_of(key)
        if fingerprint in seen:
            runs.append((begin, position))
            begin = position
            seen.clear()
        seen.add(fingerprint)
    return [*runs, (begin, len(keys))]


def _distinct_part(key: BlockKey) -> bytes:
    """What a fingerprint is made of."""
    return key[:8]


def _fitting(
    pending: npt.NDArray[np.int64], record_bytes: npt.NDArray[np.int64], room_bytes: int
) -> npt.NDArray[np.int64]:
    """As many blocks as fit one after another: at least one, unless a flush of the segment has just failed."""
    pending = pending[:RUN_BLOCKS_MAX]
    return pending[: int(np.searchsorted(np.cumsum(record_bytes[pending]), room_bytes, side="right"))]


def _writes(record_bytes: npt.NDArray[np.int64]) -> list[tuple[int, int]]:
    """Cut a run into gather writes of at most WRITE_BYTES_MAX, or of one block."""
    writes: list[tuple[int, int]] = []
    begin = held_bytes = 0
    for at, size in enumerate(record_bytes.tolist()):
        if at > begin and held_bytes + size > WRITE_BYTES_MAX:
            writes.append((begin, at))
            begin, held_bytes = at, 0
        held_bytes += size
    return [*writes, (begin, len(record_bytes))]


def _headers(batch: _Batch, run: npt.NDArray[np.int64], segment: Segment) -> Headers:
    """The headers of a run that is appended to a segment."""
    headers = headers_for(batch.blocks.rows[run])
    ends = segment.tail + np.cumsum(batch.record_bytes[run])
    headers["offset"] = ends - batch.record_bytes[run]
    headers["segment"], headers["generation"] = segment.number, segment.header.generation
    headers["space"] = np.frombuffer(batch.space_id, dtype="<u8")
    headers["class_byte"], headers["written_s"] = batch.class_byte, batch.now_s
    headers["touch_class"][:, 0], headers["touch_s"][:, 0] = batch.class_byte, batch.now_s
    for within, at in enumerate(run.tolist() if batch.replaces else ()):
        for number, (class_byte, touch_s) in enumerate(batch.replaces.get(at, ())):
            headers["touch_class"][within, number], headers["touch_s"][within, number] = class_byte, touch_s
    seal_headers(headers)
    return headers


def _parts(headers: Headers, stored: Sequence[Buffer]) -> tuple[list[Buffer], int]:
    """The buffers of one gather write (headers, payloads, padding), and their bytes."""
    data = memoryview(headers.tobytes())
    parts: list[Buffer] = []
    total_bytes = 0
    for at, payload in enumerate(stored):
        held_bytes = HEADER_BYTES + len(payload)
        padding = -held_bytes % RECORD_ALIGN
        parts += [data[at * HEADER_BYTES : (at + 1) * HEADER_BYTES], payload, _PADDING[:padding]]
        total_bytes += held_bytes + padding
    return parts, total_bytes


def _are_intact(blocks: Incoming, positions: Sequence[int], payloads: Sequence[Buffer]) -> list[bool]:
    """Whether the bytes that were just written are those that were submitted (25 GB/s, and more from the cache)."""
    submitted = blocks.rows["checksum"][positions].tolist()
    return [
        at in blocks.sure or checksum_of(payload) == checksum
        for at, payload, checksum in zip(positions, payloads, submitted, strict=True)
    ]
