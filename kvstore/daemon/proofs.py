"""Which records are known to live: an acknowledgement of a block that is there already rests on no less.

Owns what this process has looked at. Does not judge what becomes of a record that is not one: that is the shard's, as
after a failed read. Invariants: a row that a start took from the index is not acknowledged before its record was looked
at, because the index may not know that it died: the process before was killed while it let go of it, or the index lost
what it had been told, or refused it; what a start found without a seal is read whole, because the power may have taken
its payload; each record is looked at once, and what this process wrote never; no look-up waits for the disk.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from kvstore.daemon.fingerprints import Slots, grown
from kvstore.daemon.ledger import Ledger, Place
from kvstore.daemon.presence import fingerprint_of, key_words
from kvstore.daemon.record import RecordDamaged, RecordDead
from kvstore.keys import BlockKey

Failed = Callable[[Place, Exception, float], object]
"""What the shard does about a record that could not be read, or is dead."""
_SLOTS_A_BYTE = 8


class Proofs:
    """Thread-safe."""

    def __init__(self, ledger: Ledger, failed: Failed) -> None:
        self._ledger = ledger
        self._failed = failed
        self._settled: npt.NDArray[np.uint8] = np.zeros(0, dtype=np.uint8)
        """A bit for each slot whose row needs no look any more. It stays when another row takes the slot: that one is
        of a record that this process wrote. Guarded by the ledger's lock.
        """

    def prove(self, keys: Sequence[BlockKey], now_s: float) -> None:
        """Look at the records of those of the keys that have a living row, where nobody has; a row whose record does
        not live is gone then, or has lapsed.
        """
        doubted = self._take_doubted(keys, now_s)
        try:
            for place in doubted:
                self._look(place, now_s)
        finally:
            for place in doubted:
                self._ledger.give_back(place)

    def _take_doubted(self, keys: Sequence[BlockKey], now_s: float) -> list[Place]:
        """Leased places of the records that are to be looked at."""
        with self._ledger.lock:
            presence = self._ledger.presence
            slots = presence.slots(key_words(b"".join(keys)))
            slots = slots[slots >= 0]
            slots = slots[~self._are_settled(slots)]
            if not len(slots):
                return []
            slots = np.unique(slots[presence.alive(slots, now_s)])
            places = [place for slot in slots.tolist() if (place := self._ledger.place(slot)) is not None]
            doubted = [place for place in places if place.offset < place.segment.inherited_end]
            doubted_slots = {place.slot for place in doubted}
            self._settle([place.slot for place in places if place.slot not in doubted_slots])
            for place in doubted:
                place.segment.leases += 1
        return doubted

    def _look(self, place: Place, now_s: float) -> None:
        segment = place.segment
        try:
            header, mark = segment.read_header(place.offset)
            if mark is not None:
                raise RecordDead(mark)
            if fingerprint_of(header.key) != place.fingerprint:
                raise RecordDamaged("the record holds another block than the index says")
            if not segment.inherited_seal:
                segment.read_record(place.offset, bytearray(header.stored_bytes))
        except (RecordDamaged, OSError) as error:
            self._failed(place, error, now_s)
            return
        with self._ledger.lock:
            if self._ledger.is_at(place):
                self._settle([place.slot])

    def _are_settled(self, slots: Slots) -> npt.NDArray[np.bool_]:
        size = -(-self._ledger.presence.slots_max // _SLOTS_A_BYTE)
        if size > len(self._settled):
            self._settled = grown(self._settled, size)
        bits = self._settled[slots // _SLOTS_A_BYTE] >> (slots % _SLOTS_A_BYTE).astype(np.uint8)
        return np.asarray(bits & 1, dtype=np.bool_)

    def _settle(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self._settled[slot // _SLOTS_A_BYTE] |= 1 << slot % _SLOTS_A_BYTE
