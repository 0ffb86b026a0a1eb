"""Pins and legal holds: who holds which blocks against expiry and eviction, why and until when.

Owns the pins of the catalog, their quota and what a hold forbids. Does not know what eviction is: shards are told the
ends. Invariants: several may hold one block, each with a pin of its own, and the block stays until the last lets go;
nothing removes a block under a legal hold, nor the hold, unless it is asked to in so many words; a hold is not
acknowledged on a block that is being removed.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from kvstore.daemon.catalog import Catalog, PinPlace
from kvstore.daemon.presence import FOREVER_S
from kvstore.daemon.shard import Pins, Shard
from kvstore.errors import Held, QuotaExceeded
from kvstore.keys import BlockKey, SpaceId
from kvstore.store import Clock, Pin
from kvstore.units import format_bytes

SHOWN_MAX = 3

Removal = tuple[SpaceId, frozenset[BlockKey] | None]
"""A space, and the keys of it that are being removed; None: all of it."""


class PinBoard:
    """Thread-safe. ``quota_bytes``: payload bytes that one owner may pin; 0: as many as there are."""

    def __init__(
        self, shards: Sequence[Shard], catalog: Catalog, lock: threading.Lock, clock: Clock, quota_bytes: int
    ) -> None:
        self._shards = tuple(shards)
        self._catalog = catalog
        self._lock = lock
        self._clock = clock
        self._quota_bytes = quota_bytes
        self._removals: list[Removal] = []

    def pin(self, pins: Sequence[Pin]) -> int:
        """Pin what is served now; how many blocks that is. Raises QuotaExceeded, Held; nothing has changed then."""
        now_s = self._clock.now_s()
        with self._lock:
            current = self._catalog.content.pins
            found = [pin for pin in pins if self._is_alive(pin, now_s) and not self._is_going(pin)]
            for pin in found:
                before = current.get(place_of(pin))
                if before is not None and before.hold and not pin.hold:
                    raise Held(f"{pin.owner} holds {pin.key.hex()} by law: release the hold before pinning otherwise")
            if found:
                pinned = {**current, **{place_of(pin): pin for pin in found}}
                self._check_quota(pinned, {pin.owner for pin in found})
                self._save(pinned)
            return sum(self._is_alive(pin, now_s) for pin in found)  # one may have been evicted just before

    def unpin(self, space_id: SpaceId, keys: Collection[BlockKey], owner: str | None, *, holds: bool) -> int:
        """Take the pins of one owner away, or everybody's (None); how many blocks had one. Raises Held."""
        wanted = set(keys)
        with self._lock:
            going = {
                place: pin
                for place, pin in self._catalog.content.pins.items()
                if place[0] == space_id and place[1] in wanted and owner in (None, pin.owner)
            }
            if not holds:
                _refuse(pin for pin in going.values() if pin.hold)
            self._drop(going)
        return len({place[:2] for place in going})

    def pins(self) -> list[Pin]:
        """Those that hold a block now."""
        now_s = self._clock.now_s()
        return [
            pin
            for pin in self._catalog.content.pins.values()
            if (pin.until_s == 0 or pin.until_s > now_s) and self._is_alive(pin, now_s)
        ]

    def check_free(self, space_id: SpaceId, keys: Collection[BlockKey] | None) -> None:
        """Raise Held if a block of a space, or of some of its keys, is under a legal hold."""
        now_s = self._clock.now_s()
        wanted = None if keys is None else set(keys)
        _refuse(
            pin
            for (space, key, _), pin in self._catalog.content.pins.items()
            if pin.hold
            and space == space_id
            and (wanted is None or key in wanted)
            and (pin.until_s == 0 or pin.until_s > now_s)
        )

    @contextlib.contextmanager
    def removing(self, space_id: SpaceId, keys: Collection[BlockKey] | None) -> Iterator[None]:
        """While blocks are removed: nobody pins them any more, and their pins go when it was done. Raises Held."""
        removal = (space_id, None if keys is None else frozenset(keys))
        with self._lock:
            self.check_free(space_id, keys)
            self._removals.append(removal)
        try:
            yield
            with self._lock:
                self._drop(place for place in self._catalog.content.pins if _is_in(removal, place[0], place[1]))
        finally:
            with self._lock:
                self._removals.remove(removal)

    def _is_going(self, pin: Pin) -> bool:
        return any(_is_in(removal, pin.space_id, pin.key) for removal in self._removals)

    def _is_alive(self, pin: Pin, now_s: float) -> bool:
        return any(shard.alive_keys(pin.space_id, [pin.key], now_s) for shard in self._shards)

    def _check_quota(self, pinned: Mapping[PinPlace, Pin], owners: Collection[str]) -> None:
        if not self._quota_bytes:
            return
        for owner in owners:
            by_space: dict[SpaceId, list[BlockKey]] = {}
            for pin in pinned.values():
                if pin.owner == owner and not pin.hold:
                    by_space.setdefault(pin.space_id, []).append(pin.key)
            held_bytes = sum(
                shard.payload_bytes_of(space, keys) for space, keys in by_space.items() for shard in self._shards
            )
            if held_bytes > self._quota_bytes:
                raise QuotaExceeded(
                    f"{owner} would pin {format_bytes(held_bytes)}, more than the quota of "
                    f"{format_bytes(self._quota_bytes)} an owner: unpin something, or raise --pin-quota"
                )

    def _drop(self, places: Iterable[PinPlace]) -> None:
        going = set(places)
        pins = self._catalog.content.pins
        if going & pins.keys():
            self._save({place: pin for place, pin in pins.items() if place not in going})

    def _save(self, pins: Mapping[PinPlace, Pin]) -> None:
        now_s = self._clock.now_s()
        current = {place: pin for place, pin in pins.items() if pin.until_s == 0 or pin.until_s > now_s}
        self._catalog.update(pins=current)
        for shard in self._shards:
            shard.set_pins(pin_ends(current), hold_ends(current))


def place_of(pin: Pin) -> PinPlace:
    return pin.space_id, pin.key, pin.owner


def _is_in(removal: Removal, space_id: SpaceId, key: BlockKey) -> bool:
    return removal[0] == space_id and (removal[1] is None or key in removal[1])


def pin_ends(pins: Mapping[PinPlace, Pin]) -> Pins:
    """For the shards: when the last pin of each block ends, in seconds since the epoch."""
    ends: dict[tuple[SpaceId, BlockKey], int] = {}
    for (space_id, key, _), pin in pins.items():
        until_s = min(pin.until_s or FOREVER_S, FOREVER_S)
        ends[space_id, key] = max(until_s, ends.get((space_id, key), 0))
    return ends


def hold_ends(pins: Mapping[PinPlace, Pin]) -> Pins:
    """As ``pin_ends``, of legal holds."""
    return pin_ends({place: pin for place, pin in pins.items() if pin.hold})


def _refuse(held: Iterable[Pin]) -> None:
    pins = list(held)
    if pins:
        shown = ", ".join(sorted({f"{pin.owner} ({pin.reason})" for pin in pins})[:SHOWN_MAX])
        count = len({place_of(pin)[:2] for pin in pins})
        blocks = "1 block is" if count == 1 else f"{count} blocks are"
        raise Held(
            f"{blocks} under a legal hold by {shown}; nothing was removed: `retention unpin KEY --release-holds` "
            "releases it, `retention pins` names the keys"
        )
