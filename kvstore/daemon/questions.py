"""What operators ask of a shard: pages of blocks, and what is remembered of one.

Owns how the index, which has the whole of each entry, and the presence map, which has the latest of it, are asked
together. Changes nothing. Invariants: the index is read in bounded pages and never under the ledger's lock; an entry
counts only while the map names the same place.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvstore.daemon.fingerprints import Slots
from kvstore.daemon.index import IndexDamaged, place_words
from kvstore.daemon.ledger import Ledger
from kvstore.daemon.presence import fingerprint_of, fingerprints_in, key_words
from kvstore.errors import VolumeError
from kvstore.keys import BlockKey, BlockName, SpaceId, TokenDigest
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


def slots_in(ledger: Ledger, space_id: SpaceId, keys: Sequence[BlockKey]) -> Slots:
    """Slots of keys in a space, -1 for others; the keys are believed by their fingerprints. The lock is held."""
    words = key_words(b"".join(keys))
    slots = ledger.presence.slots(words)
    return np.where(ledger.presence.matches(slots, words, space_id, None), slots, -1)


def alive_keys(ledger: Ledger, space_id: SpaceId, keys: Sequence[BlockKey], now_s: float) -> list[BlockKey]:
    """Those of the keys that are served now."""
    distinct = list(dict.fromkeys(keys))
    with ledger.lock:
        slots = slots_in(ledger, space_id, distinct)
        alive = (slots >= 0) & ledger.presence.alive(slots, now_s)
    return [key for key, ok in zip(distinct, alive.tolist(), strict=True) if ok]


def payload_bytes_of(ledger: Ledger, space_id: SpaceId, keys: Sequence[BlockKey]) -> int:
    """Payload bytes of those of the keys that are stored, each once."""
    distinct = list(dict.fromkeys(keys))
    with ledger.lock:
        presence = ledger.presence
        slots = slots_in(ledger, space_id, distinct)
        return int(presence.shapes.payload_bytes[presence.shape_of(slots[slots >= 0])].sum(dtype=np.int64))


def sight(ledger: Ledger, name: BlockName, space_id: SpaceId | None, now_s: float) -> Sighting:
    """What is remembered of one block, of whatever space where none is given.

    ``other_spaces`` by a search of the whole index (explain is rare). Raises VolumeError.
    """
    with ledger.lock:
        presence = ledger.presence
        anyone = presence.slot(name.key)
        slot = anyone if space_id is None else presence.find(space_id, name.key, name.token_digest)
        tombstone = presence.tombstones.get(fingerprint_of(name.key)) if anyone < 0 else None
        at = np.array([max(slot, 0)])
        places = presence.places[at]
        alive, until_s = (presence.is_alive(slot, now_s), int(presence.until_s(at)[0])) if slot >= 0 else (False, 0)
        locked = slot >= 0 and presence.is_locked(slot)
    row = _row_at(ledger, places) if slot >= 0 else None
    if slot < 0 or (row is not None and row["key"].tobytes() != name.key):
        others = () if space_id is None else _others(ledger, name.token_digest, space_id, now_s)
        gone = (Presence(tombstone.reason), tombstone.when_s) if tombstone is not None else (Presence.NEVER, 0)
        return Sighting(*gone, 0, others)
    if row is None:
        others = () if space_id is None else _others(ledger, name.token_digest, space_id, now_s)
        return Sighting(Presence.PRESENT if alive else Presence.EXPIRED, 0 if alive else until_s, until_s, others)
    others = _others(ledger, row["digest"].tobytes(), SpaceId(row["space"].tobytes()), now_s)
    with ledger.lock:
        same = presence.places[slot] == places[0]
        block = _info(ledger, row, slot, now_s) if same else None
    presence_now, since_s = (Presence.PRESENT, int(row["written_s"])) if alive else (Presence.EXPIRED, until_s)
    if alive and locked:
        presence_now, since_s = Presence.PURGED, 0
    return Sighting(presence_now, since_s, until_s, others, block, TokenDigest(row["digest"].tobytes()))


def _row_at(ledger: Ledger, places: npt.NDArray[np.uint64]) -> np.void | None:
    """The index's row of one place; None where it has none, since the block was moved just now. Raises VolumeError."""
    try:
        rows, _ = ledger.index.values(places)
    except IndexDamaged as error:
        raise VolumeError(str(error)) from error
    return rows[0] if len(rows) else None


def _others(ledger: Ledger, token_digest: bytes, space_id: SpaceId, now_s: float) -> tuple[SpaceId, ...]:
    return tuple(sorted(_spaces_with(ledger, token_digest, now_s) - {space_id}))


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
