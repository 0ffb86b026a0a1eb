"""Putting blocks: which of a batch are new, where they go, and what counts as done.

Owns the order record, index, presence. Does not make room (the reclaimer does) nor wait for the disk (the shard
does). Runs under the shard's writer lock. Invariants: a run of consecutive blocks is one gather write; a payload that
changed while it was written is dead before anybody can be told that it is stored; a block that is not stored leaves
no trace that a restart would find.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from kvstore.daemon.index import IndexRefused, entries_of
from kvstore.daemon.ledger import Ledger, Place
from kvstore.daemon.reclaimer import DAY_S, Reclaimer
from kvstore.daemon.record import (
    HEADER_BYTES,
    Mark,
    MarkReason,
    RecordHeader,
    checksum_of,
    encode_header,
    record_bytes,
)
from kvstore.daemon.segment import Segment
from kvstore.keys import BlockKey, BlockName, SpaceId
from kvstore.store import FLAG_APPROXIMATE, Buffer, Presence, PutOutcome
from kvstore.traffic import ClassRules

RUN_BLOCKS_MAX = 256
"""Blocks of one gather write: three buffers each stay below IOV_MAX."""
ATTEMPTS = 2
"""Segments that a put tries: one bad file does not refuse it, a bad disk does at once."""
_PAGE = bytes(4096)

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Incoming:
    """One block as it shall be stored. ``stored`` is written as it is; ``checksum`` is of it, taken when it was
    submitted.
    """

    name: BlockName
    tokens: int
    flags: int
    codec: int
    payload_bytes: int
    stored: Buffer
    checksum: int

    @property
    def record_bytes(self) -> int:
        return record_bytes(len(self.stored))


@dataclass(frozen=True, slots=True)
class _Planned:
    """A block to write, the touches to carry over, and whether an approximate record is there to be replaced.

    Not where that record is: making room for this very put may move or recycle it.
    """

    position: int
    block: Incoming
    touches: tuple[tuple[int, int], ...]
    replaces: bool


class Writer:
    """``pins_s``: end of the pin of a key, for keys that are pinned."""

    def __init__(
        self,
        ledger: Ledger,
        reclaimer: Reclaimer,
        rules: Callable[[], ClassRules],
        pins_s: Callable[[SpaceId, BlockKey], int],
    ) -> None:
        self._ledger = ledger
        self._reclaimer = reclaimer
        self._rules = rules
        self._pins_s = pins_s

    def put(self, space_id: SpaceId, blocks: Sequence[Incoming], class_byte: int, now_s: int) -> list[PutOutcome]:
        """Store or touch each block. A key twice in one batch is put twice, in order."""
        outcomes: list[PutOutcome] = []
        for begin, end in _distinct_runs(blocks):
            outcomes += self._put_distinct(space_id, blocks[begin:end], class_byte, now_s)
        return outcomes

    def _put_distinct(
        self, space_id: SpaceId, blocks: Sequence[Incoming], class_byte: int, now_s: int
    ) -> list[PutOutcome]:
        outcomes = [PutOutcome.REFUSED] * len(blocks)
        pending: list[_Planned] = []
        touched: list[int] = []
        with self._ledger.changing():
            for position, block in enumerate(blocks):
                planned = self._plan(space_id, position, block, class_byte, now_s)
                if isinstance(planned, _Planned):
                    pending.append(planned)
                else:
                    outcomes[position] = planned
                    if planned is PutOutcome.TOUCHED:
                        touched.append(self._ledger.presence.slot(block.name.key))
            self._ledger.touch(np.array(touched, dtype=np.int64), class_byte, now_s)
        self._write(space_id, pending, class_byte, now_s, outcomes)
        self._count(outcomes)
        return outcomes

    def _plan(
        self, space_id: SpaceId, position: int, block: Incoming, class_byte: int, now_s: int
    ) -> _Planned | PutOutcome:
        """What to do with one block, under the ledger's lock."""
        presence = self._ledger.presence
        slot = presence.slot(block.name.key)
        fresh = ((class_byte, now_s),)
        if slot < 0:
            return _Planned(position, block, fresh, replaces=False)
        if presence.find(space_id, block.name.key, block.name.token_digest) < 0:
            return PutOutcome.REFUSED  # another prefix has this key: neither may be served for the other
        place = self._ledger.place(slot)
        if place is None or not presence.is_alive(slot, now_s):
            self._bury_expired(slot, place, now_s)
            return _Planned(position, block, fresh, replaces=False)
        if place.flags & FLAG_APPROXIMATE and not block.flags & FLAG_APPROXIMATE:
            presence.touch(slot, class_byte, now_s)
            return _Planned(position, block, presence.touches(slot), replaces=True)
        return PutOutcome.TOUCHED

    def _bury_expired(self, slot: int, place: Place | None, now_s: int) -> None:
        if place is not None:
            with contextlib.suppress(OSError):
                self._ledger.mark(place, Mark(MarkReason.EXPIRED, now_s))
        self._ledger.counters.expired += 1
        self._ledger.forget_one(slot, Presence.EXPIRED, now_s)

    def _write(
        self,
        space_id: SpaceId,
        pending: Sequence[_Planned],
        class_byte: int,
        now_s: int,
        outcomes: list[PutOutcome],
    ) -> None:
        """Write what is pending in runs; whatever finds no room stays REFUSED.

        While the index takes no entries nothing is written: dead records would drive living ones out.
        """
        if not pending or not self._ledger.mend_index():
            return
        day = (now_s + self._rules().keep_for_s(class_byte)) // DAY_S
        if not self._reclaimer.make_room_in_index(len(pending), now_s):
            return
        at = failures = 0
        while at < len(pending):
            segment = self._reclaimer.segment_for(class_byte, day, pending[at].block.record_bytes, now_s)
            if segment is None:
                return
            run = _fitting(pending[at:], segment.room_bytes)
            if self._write_run(space_id, run, segment, class_byte, now_s, outcomes):
                at += len(run)
                continue
            failures += 1
            if failures == ATTEMPTS:
                return

    def _write_run(
        self,
        space_id: SpaceId,
        run: Sequence[_Planned],
        segment: Segment,
        class_byte: int,
        now_s: int,
        outcomes: list[PutOutcome],
    ) -> bool:
        """One gather write and one index batch. False if the segment or the index refused: the run stays REFUSED."""
        headers: list[RecordHeader] = []
        parts: list[Buffer] = []
        offset = segment.end
        for planned in run:
            header = _header(space_id, planned, segment, offset, class_byte, now_s)
            headers.append(header)
            padding = header.record_bytes - HEADER_BYTES - header.stored_bytes
            parts += [encode_header(header), planned.block.stored, memoryview(_PAGE)[:padding]]
            offset += header.record_bytes
        begin = segment.end
        try:
            segment.append(parts, offset - begin)
        except OSError as error:
            self._ledger.counters.write_errors += 1
            log.error("records_not_written segment=%d problem=%r", segment.number, error)
            self._ledger.segments.retire(segment)
            return False
        self._ledger.counters.bytes_written += offset - begin
        intact = [_is_intact(planned.block) for planned in run]
        return self._commit(space_id, run, headers, intact, segment, now_s, outcomes)

    def _commit(
        self,
        space_id: SpaceId,
        run: Sequence[_Planned],
        headers: Sequence[RecordHeader],
        intact: Sequence[bool],
        segment: Segment,
        now_s: int,
        outcomes: list[PutOutcome],
    ) -> bool:
        """Make the written records count."""
        good = [(planned, header) for planned, header, ok in zip(run, headers, intact, strict=True) if ok]
        pins_s = {header.key: end_s for _, header in good if (end_s := self._pins_s(space_id, header.key))}
        try:
            for header, ok in zip(headers, intact, strict=True):
                if not ok:
                    segment.mark(header.offset, Mark(MarkReason.QUARANTINED, now_s))
            replaced = [header.key for planned, header in good if planned.replaces]
            rows = entries_of(header for _, header in good)
            if not replaced:
                self._ledger.store(rows, [segment], pins_s)
            else:
                segment.sync()
                with self._ledger.changing():
                    for key in replaced:
                        self._ledger.mark_where_it_is(key, Mark(MarkReason.REPLACED, now_s))
                    self._ledger.store(rows, [segment], pins_s)
        except (IndexRefused, OSError) as error:
            self._ledger.counters.write_errors += 1
            log.error("records_not_indexed segment=%d problem=%r", segment.number, error)
            for header in headers:
                with contextlib.suppress(OSError):
                    segment.mark(header.offset, Mark(MarkReason.QUARANTINED, now_s))
            return False
        for planned, ok in zip(run, intact, strict=True):
            if not ok:
                outcomes[planned.position] = PutOutcome.ALTERED
                continue
            outcomes[planned.position] = PutOutcome.REPLACED if planned.replaces else PutOutcome.STORED
        return True

    def _count(self, outcomes: Sequence[PutOutcome]) -> None:
        counters = self._ledger.counters
        counters.puts += outcomes.count(PutOutcome.STORED)
        counters.touches += outcomes.count(PutOutcome.TOUCHED)
        counters.replaced += outcomes.count(PutOutcome.REPLACED)
        counters.refused += outcomes.count(PutOutcome.REFUSED)
        counters.altered += outcomes.count(PutOutcome.ALTERED)


def _distinct_runs(blocks: Sequence[Incoming]) -> list[tuple[int, int]]:
    """Cut a batch so that no run names a key twice."""
    runs: list[tuple[int, int]] = []
    begin = 0
    seen: set[BlockKey] = set()
    for position, block in enumerate(blocks):
        if block.name.key in seen:
            runs.append((begin, position))
            begin = position
            seen.clear()
        seen.add(block.name.key)
    return [*runs, (begin, len(blocks))]


def _fitting(pending: Sequence[_Planned], room_bytes: int) -> Sequence[_Planned]:
    """As many blocks as fit one after another, at least one."""
    count = 0
    for planned in pending[:RUN_BLOCKS_MAX]:
        room_bytes -= planned.block.record_bytes
        if room_bytes < 0:
            break
        count += 1
    assert count > 0
    return pending[:count]


def _header(
    space_id: SpaceId, planned: _Planned, segment: Segment, offset: int, class_byte: int, now_s: int
) -> RecordHeader:
    block = planned.block
    return RecordHeader(
        segment=segment.number,
        generation=segment.header.generation,
        offset=offset,
        key=block.name.key,
        parent=block.name.parent,
        space_id=space_id,
        token_digest=block.name.token_digest,
        index=block.name.index,
        tokens=block.tokens,
        class_byte=class_byte,
        flags=block.flags,
        codec=block.codec,
        stored_bytes=len(block.stored),
        payload_bytes=block.payload_bytes,
        written_s=now_s,
        checksum=block.checksum,
        touches=planned.touches,
    )


def _is_intact(block: Incoming) -> bool:
    """Whether the bytes that were just written are those that were submitted (25 GB/s; an immutable buffer needs no
    check).
    """
    return isinstance(block.stored, bytes) or checksum_of(block.stored) == block.checksum
