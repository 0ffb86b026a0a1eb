"""A class's claim on blocks that other classes use too: what a purge of the class takes away from those.

Owns which blocks that are, and what becomes of each: a record that does not name the class only loses its touch; one
that does is written again as its heir's, the class that keeps it longest. Does not know why. Invariants: no record that
is served names the class afterwards, whatever a rebuild of the index finds; what is interrupted is found again, since a
block keeps its touch until its record is another; a block that the class may keep for a maximum age only, or for which
there is no room, goes with the class, but not one under a legal hold.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from contextlib import AbstractContextManager

from kvstore.daemon.ledger import Ledger, Place
from kvstore.daemon.reclaimer import Apart, Reclaimer
from kvstore.daemon.record import Mark, MarkReason, RecordDamaged
from kvstore.daemon.segment import Segment
from kvstore.errors import VolumeError
from kvstore.keys import SpaceId

Writing = Callable[[], AbstractContextManager[None]]


def take_away(
    ledger: Ledger, reclaimer: Reclaimer, writing: Writing, class_byte: int, spaces: Set[SpaceId] | None, now_s: int
) -> int:
    """Let a class have no claim on what others use in some spaces, or all (None); how many blocks that were.

    ``writing``: holds the writer's lock, for one segment at a time. Raises VolumeError; the rest is found again.
    """
    with ledger.lock:
        heirs = {slot: ledger.presence.heir(slot, class_byte) for slot in ledger.presence.shared(class_byte, spaces)}
        places = [place for slot in heirs if (place := ledger.place(slot)) is not None]
    unnamed: list[Place] = []
    named: dict[tuple[Segment, int], list[Place]] = {}
    for place in places:
        if _names(place, class_byte):
            named.setdefault((place.segment, heirs[place.slot]), []).append(place)
        else:
            unnamed.append(place)
    for (_, heir), some in named.items():
        with writing():
            _part(ledger, reclaimer, some, Apart(class_byte, heir), now_s)
    ledger.disown(unnamed, class_byte)
    return len(places)


def _part(ledger: Ledger, reclaimer: Reclaimer, places: list[Place], apart: Apart, now_s: int) -> None:
    """Write blocks of one segment again for their heir; what cannot be, goes. The writer's lock is held."""
    left = reclaimer.move_apart(places, apart, now_s)
    with ledger.lock:
        if any(ledger.presence.is_held(place.fingerprint) for place in left):
            raise VolumeError("there is no room to keep blocks under a legal hold apart from the class; try again")
    stuck = ledger.bury(left, Mark(MarkReason.PURGED, now_s))
    ledger.counters.purged += len(left) - len(stuck)
    if stuck:
        raise VolumeError(f"the disk did not take {len(stuck)} marks")


def _names(place: Place, class_byte: int) -> bool:
    """Whether a record says that the class wrote or used it; of one that cannot be read it is taken for granted."""
    try:
        header, _ = place.segment.read_header(place.offset)
    except (RecordDamaged, OSError):
        return True
    return class_byte in (header.class_byte, *(by_class for by_class, _ in header.touches))
