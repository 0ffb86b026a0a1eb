"""What becomes of the promises that nodes gave, and what would mend those that break.

Owns asking the nodes, and the search for mends. Does not know the model (``kvstore.promises`` does) nor how anything is
shown. Invariants: a node that did not answer is named; every mend that is proposed was tried in the model, alone, and
with it every promise holds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from kvstore.errors import StoreError
from kvstore.promises import HOUR_S, ClassIngest, Forecast, Room, forecast, ingest_from_json
from kvstore.store import Store
from kvstore.traffic import ClassRules
from retention.policy import replace_keep_for

_KEEP_S_MIN = HOUR_S
"""No mend proposes to keep a class for less."""
MARGIN = 0.05
"""Mends leave this share of the segments free: the model is right within a few percent."""
_ROOM_STEPS = 64


@dataclass(frozen=True, slots=True)
class Mend:
    """One way to make every promise hold: bytes to add to a node, or other promises for some classes (seconds)."""

    add_bytes: int = 0
    keep_for_s: Mapping[str, int] | None = None


@dataclass(frozen=True, slots=True)
class NodeForecast:
    """What a node is in for, and the ways out, none where nothing breaks.

    ``withheld_bytes``: of its capacity, what others have filled; ``pinned_bytes``: what pins hold beyond promises.
    """

    forecast: Forecast
    mends: tuple[Mend, ...]
    withheld_bytes: int = 0
    pinned_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Prospect:
    """All nodes that answered, by name, and the error of each that did not."""

    nodes: Mapping[str, NodeForecast]
    nodes_failed: Mapping[str, str]

    @property
    def breaks_in_s(self) -> float | None:
        """Until the first promise breaks anywhere."""
        found = [item.forecast.breaks_in_s for item in self.nodes.values() if item.forecast.breaks_in_s is not None]
        return min(found, default=None)


def forecast_nodes(nodes: Mapping[str, Store], *, window_s: int, deadline_s: float) -> Prospect:
    """Each node's forecast under its own policy, if it goes on as in the last ``window_s``.

    Raises the node's error when none answers.
    """
    found: dict[str, NodeForecast] = {}
    failed: dict[str, str] = {}
    errors: list[StoreError | ValueError] = []
    for name, node in nodes.items():
        try:
            rules = node.policy(deadline_s=deadline_s).rules
            ingest, room = ingest_from_json(_ingest_of(node.stats(deadline_s=deadline_s)))
            found[name] = replace(
                forecast_node(ingest, rules, room, window_s),
                withheld_bytes=room.segments_withheld * room.segment_bytes,
                pinned_bytes=room.pinned_bytes,
            )
        except (StoreError, ValueError) as error:
            errors.append(error)
            failed[name] = f"{type(error).__name__}: {error}"
    if not found:
        raise errors[0]
    return Prospect(found, failed)


def forecast_node(ingest: Mapping[int, ClassIngest], rules: ClassRules, room: Room, window_s: int) -> NodeForecast:
    """One node's forecast and its mends."""

    def holds(changed: ClassRules, larger: Room = room) -> bool:
        surely = _resized(larger, int(larger.segments_max * (1 - MARGIN)))
        return all(item.holds for item in forecast(ingest, changed, surely, window_s).classes)

    now = forecast(ingest, rules, room, window_s)
    if all(item.holds for item in now.classes):
        return NodeForecast(now, ())
    mends = [_more_room(room, now, lambda larger: holds(rules, larger))]
    surely = forecast(ingest, rules, _resized(room, int(room.segments_max * (1 - MARGIN))), window_s)
    honest = {item.name: int(item.lasts_s) // HOUR_S * HOUR_S for item in surely.classes if not item.holds}
    if all(rules.by_name(name) and keep_s >= _KEEP_S_MIN for name, keep_s in honest.items()):
        mends.append(_keep(honest) if holds(replace_keep_for(rules, honest)) else None)
    for item in now.classes:
        if item.holds and item.demand_bytes and rules.by_name(item.name):
            mends.append(_shorter(item.name, item.keep_for_s, lambda keep: holds(replace_keep_for(rules, keep))))
    return NodeForecast(now, tuple(mend for mend in mends if mend is not None))


# --- ways out -------------------------------------------------------------------------------------------------------


def _more_room(room: Room, now: Forecast, holds: Callable[[Room], bool]) -> Mend | None:
    """Segments to add: what is missing, and a few more where the model rounds."""
    missing_bytes = now.missing_bytes + MARGIN * now.demand_bytes
    missing = -(-int(missing_bytes) // room.segment_bytes)
    for more in range(_ROOM_STEPS):
        if holds(_resized(room, room.segments_max + missing + more)):
            return Mend(add_bytes=(missing + more) * room.segment_bytes)
    return None


def _resized(room: Room, segments_max: int) -> Room:
    """The room of another capacity: its index grows with it."""
    return replace(room, segments_max=segments_max, blocks_max=room.blocks_max * segments_max // room.segments_max)


def _shorter(name: str, keep_for_s: int, holds: Callable[[dict[str, int]], bool]) -> Mend | None:
    """The longest promise of one class, in whole hours, with which those of all others hold."""
    low, high = _KEEP_S_MIN // HOUR_S, keep_for_s // HOUR_S
    if high <= low or not holds({name: low * HOUR_S}):
        return None
    while low + 1 < high:
        middle = (low + high) // 2
        low, high = (middle, high) if holds({name: middle * HOUR_S}) else (low, middle)
    return _keep({name: low * HOUR_S})


def _keep(keep_for_s: dict[str, int]) -> Mend:
    return Mend(keep_for_s=keep_for_s)


def _ingest_of(stats: Mapping[str, Any]) -> Mapping[str, Any]:
    """What one node tells of its ingest, asked directly or through a client. Raises ValueError where it does not."""
    answers = stats.get("nodes")
    for answer in answers.values() if isinstance(answers, dict) else [stats]:
        found = answer.get("ingest") if isinstance(answer, dict) else None
        if isinstance(found, dict):
            return found
    raise ValueError("the node tells nothing of its ingest: it is of an older version")
