"""What operators ask of a shard: pages of blocks, and what is remembered of one.

Owns how the index, which has the whole of each entry, and the presence map, which has the latest of it, are asked
together. Changes nothing. Invariants: the index is read in bounded pages and never under the ledger's lock; an entry
counts only while the map names the same place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from kvstore.daemon.index import IndexDamaged, place_words
from kvstore.daemon.ledger import Ledger
from kvstore.daemon.presence import fingerprint_of, fingerprints_in
from kvstore.errors import VolumeError
from kvstore.keys import BlockKey, BlockName, SpaceId
from kvstore.store import BlockInfo, Presence, Sighting


def scan(ledger: Ledger, space_id: SpaceId | None, cursor: bytes, limit: int, now_s: float) -> list[BlockInfo]:
    """Stored blocks beyond ``cursor`` in key order, at most ``limit``. Raises VolumeError."""
    with ledger.lock:
        presence = ledger.presence
        slots = presence.from_fingerprint(int.from_bytes(cursor[:8].ljust(8, b"\0"), "big"), limit + 1, space_id)
        places = presence.places[slots]
    try:
        rows, at = ledger.index.values(places)
    except IndexDamaged as error:
        raise VolumeError(str(error)) from error
    with ledger.lock:
        same = presence.places[slots[at]] == places[at]
        infos = [_info(ledger, row, int(slot), now_s) for row, slot in zip(rows[same], slots[at[same]], strict=True)]
    return [info for info in infos if info.key > cursor][:limit]


def sight(ledger: Ledger, name: BlockName, space_id: SpaceId, now_s: float) -> Sighting:
    """What is remembered of one block; ``other_spaces`` by a search of the whole index (explain is rare)."""
    others = tuple(sorted(_spaces_with(ledger, name.token_digest, now_s) - {space_id}))
    with ledger.lock:
        presence = ledger.presence
        slot = presence.find(space_id, name.key, name.token_digest)
        at = np.array([slot])
        if slot >= 0:
            alive = presence.is_alive(slot, now_s)
            until_s = int(presence.until_s(at)[0])
            place = presence.places[at]
        elif (tombstone := presence.tombstones.get(fingerprint_of(name.key))) and presence.slot(name.key) < 0:
            return Sighting(Presence(tombstone.reason), tombstone.when_s, 0, others)
        else:
            return Sighting(Presence.NEVER, 0, 0, others)
    if not alive:
        return Sighting(Presence.EXPIRED, until_s, until_s, others)
    try:
        rows, _ = ledger.index.values(place)
    except IndexDamaged as error:
        raise VolumeError(str(error)) from error
    return Sighting(Presence.PRESENT, int(rows["written_s"][0]) if len(rows) else 0, until_s, others)


def best_of(sightings: Sequence[Sighting]) -> Sighting:
    """What several shards remember of one block, as one."""
    order = (
        Presence.NEVER,
        Presence.EVICTED,
        Presence.EXPIRED,
        Presence.QUARANTINED,
        Presence.PURGED,
        Presence.PRESENT,
    )
    best = max(sightings, key=lambda sighting: (order.index(sighting.presence), sighting.since_s))
    others = sorted({space for sighting in sightings for space in sighting.other_spaces})
    return replace(best, other_spaces=tuple(others))


def _spaces_with(ledger: Ledger, token_digest: bytes, now_s: float) -> set[SpaceId]:
    """Spaces in which a block of this token digest is served. Raises VolumeError."""
    wanted = np.frombuffer(token_digest, dtype="<u8")
    found: set[SpaceId] = set()
    try:
        for rows in ledger.index.pages():
            twins = rows[(rows["digest"] == wanted).all(axis=1)]
            if not len(twins):
                continue
            with ledger.lock:
                presence = ledger.presence
                slots = presence.find_all(fingerprints_in(twins))
                here = (slots >= 0) & (presence.places[slots] == place_words(twins)) & presence.alive(slots, now_s)
            found |= {SpaceId(row["space"].tobytes()) for row in twins[here]}
    except IndexDamaged as error:
        raise VolumeError(str(error)) from error
    return found


def _info(ledger: Ledger, row: np.void, slot: int, now_s: float) -> BlockInfo:
    """Of an index row and the row in memory, whose touches are the later."""
    presence, at = ledger.presence, np.array([slot])
    return BlockInfo(
        key=BlockKey(row["key"].tobytes()),
        space_id=SpaceId(row["space"].tobytes()),
        parent=BlockKey(row["parent"].tobytes()),
        index=int(row["index"]),
        tokens=int(row["tokens"]),
        flags=int(row["flags"]),
        stored_bytes=int(row["stored_bytes"]),
        payload_bytes=int(row["payload_bytes"]),
        written_s=int(row["written_s"]),
        keep_until_s=int(presence.keep_until_s(at)[0]),
        touches=dict(presence.touches(slot)),
        pinned=bool(presence.pin_until_s(at)[0] > now_s),
        segment=int(row["segment"]),
    )
