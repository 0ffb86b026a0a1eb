"""How long blocks of each class really last on a capacity, at the rate at which they come.

Owns the model: what a promise demands, who gives way, when room runs out. Pure. Does not know how anything is counted
or shown. Invariants: the order of giving way is that of ``reclaim`` (priority, floors, the earliest promise
first), in whole segments; a class lasts no longer than it is promised.

Source: Little's law (Little 1961): what is there is what comes a second times how long it stays. A touch counts as its
bytes times the seconds by which it lengthens their promise.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import zip_longest
from typing import Any

from kvstore.traffic import ClassRules

PAGE_BYTES = 4096
HOUR_S = 3600
DAY_S = 86_400
RATIO_MAX = 100.0
"""A class of which nothing comes could grow without end; said as this."""
NUMBERS_MAX = 50_000
"""Numbers in what a node tells of its ingest."""
_STEPS = 60


@dataclass(frozen=True, slots=True)
class ClassIngest:
    """What came of one class by hour, the present hour first. ``since_s``: when counting began.

    ``lengthened_byte_s``: touches, as bytes times the seconds by which their blocks are kept longer;
    ``segments_byte_s``: the same of the segments that hold them, whole.
    """

    stored_bytes: tuple[int, ...]
    lengthened_byte_s: tuple[int, ...]
    segments_byte_s: tuple[int, ...]
    blocks: tuple[int, ...]
    now_s: int
    since_s: int

    def rate_bytes_per_s(self, window_s: int) -> float:
        """Mean over the last ``window_s``, or over what was counted if that is less, but over an hour at least: the
        first minutes of a node are no trend.
        """
        return self._rate(self.stored_bytes, window_s)

    def lengthened_bytes(self, window_s: int) -> float:
        """Byte-seconds a second by which touches lengthen promises: bytes that they hold."""
        return self._rate(self.lengthened_byte_s, window_s)

    def segments_bytes(self, window_s: int) -> float:
        """The same, where a segment stays as a whole for the last of its blocks."""
        return self._rate(self.segments_byte_s, window_s)

    @property
    def record_bytes(self) -> float:
        """Mean length of a record; 0 of none."""
        blocks = sum(self.blocks)
        return sum(self.stored_bytes) / blocks if blocks else 0.0

    def _rate(self, hours: Sequence[int], window_s: int) -> float:
        span_s = min(window_s, max(self.now_s - self.since_s, HOUR_S))
        total, left_s, hour_s = 0.0, float(span_s), self.now_s % HOUR_S or HOUR_S
        for count in hours if self.now_s % HOUR_S else hours[1:]:
            share = min(1.0, left_s / hour_s)
            total, left_s, hour_s = total + count * share, left_s - hour_s, HOUR_S
            if left_s <= 0:
                break
        return total / span_s


@dataclass(frozen=True, slots=True)
class Room:
    """A node's segments: their size, how many it may have, how many hold something; and the same of its index's blocks.

    ``blocks_max`` 0: the index sets no bound. ``segments_withheld``: those that it cannot make, since others have
    filled the file system. ``pinned_bytes``: of blocks that a pin holds beyond their promise.
    """

    segment_bytes: int
    segments_max: int
    segments_used: int
    segments_spare: int = 1
    blocks_max: int = 0
    blocks_used: int = 0
    segments_withheld: int = 0
    pinned_bytes: int = 0

    def held_bytes(self, record_bytes: float) -> float:
        """Bytes of whole records of this length that fit one segment, after its first page."""
        room_bytes = self.segment_bytes - PAGE_BYTES
        return max(1, room_bytes // record_bytes) * record_bytes if record_bytes else room_bytes

    def weight(self, record_bytes: float) -> float:
        """How much more of the index than of the segments such records take; 1 where it is less."""
        if not self.blocks_max or not record_bytes:
            return 1.0
        return max(1.0, self.usable_bytes / self.blocks_max / record_bytes)

    @property
    def usable_bytes(self) -> int:
        """What classes can share."""
        return max(0, self._room_bytes - self.pinned_bytes)

    @property
    def _room_bytes(self) -> int:
        return max(0, self.segments_max - self.segments_spare - self.segments_withheld) * self.segment_bytes

    @property
    def free_bytes(self) -> float:
        """What is left of the segments, or of the index if that is less."""
        free_bytes = float(self._room_bytes - self.segments_used * self.segment_bytes)
        if self.blocks_max:
            free_bytes = min(free_bytes, (1 - self.blocks_used / self.blocks_max) * self._room_bytes)
        return max(0.0, free_bytes)


_ROOM_FIELDS = frozenset(item.name for item in fields(Room))


def merge_ingest(parts: Iterable[Mapping[int, ClassIngest]]) -> dict[int, ClassIngest]:
    """What came to several places together; counting began when it did at the first of them."""
    merged: dict[int, ClassIngest] = {}
    for class_byte, item in (pair for part in parts for pair in part.items()):
        known = merged.get(class_byte)
        merged[class_byte] = item if known is None else _both(known, item)
    return merged


def _both(one: ClassIngest, other: ClassIngest) -> ClassIngest:
    def added(some: Sequence[int], more: Sequence[int]) -> tuple[int, ...]:
        return tuple(a + b for a, b in zip_longest(some, more, fillvalue=0))

    return ClassIngest(
        added(one.stored_bytes, other.stored_bytes),
        added(one.lengthened_byte_s, other.lengthened_byte_s),
        added(one.segments_byte_s, other.segments_byte_s),
        added(one.blocks, other.blocks),
        max(one.now_s, other.now_s),
        min(one.since_s, other.since_s),
    )


def merge_rooms(rooms: Sequence[Room]) -> Room:
    """Several volumes of one node; their segments may differ in size, so bytes are counted in the smallest."""
    size = min(room.segment_bytes for room in rooms)
    return Room(
        size,
        sum(room.segments_max * room.segment_bytes for room in rooms) // size,
        sum(room.segments_used * room.segment_bytes for room in rooms) // size,
        sum(room.segments_spare * room.segment_bytes for room in rooms) // size,
        sum(room.blocks_max for room in rooms),
        sum(room.blocks_used for room in rooms),
        sum(room.segments_withheld * room.segment_bytes for room in rooms) // size,
        sum(room.pinned_bytes for room in rooms),
    )


def ingest_json(ingest: Mapping[int, ClassIngest], room: Room) -> dict[str, Any]:
    """What a forecast rests on, in the numbers of a node's stats; of very many classes, the latest hours only."""
    hours_max = max(25, NUMBERS_MAX // max(1, 4 * len(ingest)))
    return {
        "room": asdict(room),
        "classes": [
            {
                "class_byte": class_byte,
                "now_s": item.now_s,
                "since_s": item.since_s,
                "stored_bytes": item.stored_bytes[:hours_max],
                "lengthened_byte_s": item.lengthened_byte_s[:hours_max],
                "segments_byte_s": item.segments_byte_s[:hours_max],
                "blocks": item.blocks[:hours_max],
            }
            for class_byte, item in ingest.items()
        ],
    }


def ingest_from_json(document: Mapping[str, Any]) -> tuple[dict[int, ClassIngest], Room]:
    """Inverse of ``ingest_json``. Raises ValueError for anything else."""
    try:
        ingest = {int(item["class_byte"]): _ingest_from_json(item) for item in document["classes"]}
        return ingest, Room(**{name: number for name, number in document["room"].items() if name in _ROOM_FIELDS})
    except (KeyError, TypeError, AttributeError, OverflowError) as error:
        raise ValueError(f"this is not what a node tells of its ingest: {error!r}") from error


def _ingest_from_json(item: Mapping[str, Any]) -> ClassIngest:
    return ClassIngest(
        tuple(map(int, item["stored_bytes"])),
        tuple(map(int, item["lengthened_byte_s"])),
        tuple(map(int, item["segments_byte_s"])),
        tuple(map(int, item["blocks"])),
        int(item["now_s"]),
        int(item["since_s"]),
    )


@dataclass(frozen=True, slots=True)
class Outlook:
    """What becomes of one class. ``demand_bytes``: disk that its promise takes at this ingest.

    ``lasts_s``: how long its blocks stay. ``ratio``: that over the promise where it breaks; else how many times the
    demand there is room for.
    """

    class_byte: int
    name: str
    keep_for_s: int
    ingest_bytes_per_s: float
    demand_bytes: float
    lasts_s: float
    ratio: float

    @property
    def holds(self) -> bool:
        return self.ratio >= 1.0


@dataclass(frozen=True, slots=True)
class Forecast:
    """``breaks_in_s``: until the first promise breaks; None: none does. ``missing_bytes``: disk that would mend it.

    ``counted_s``: how long the counts go back that it rests on.
    """

    classes: tuple[Outlook, ...]
    demand_bytes: float
    usable_bytes: int
    missing_bytes: float
    breaks_in_s: float | None
    counted_s: int


@dataclass(frozen=True, slots=True)
class _Flow:
    """One class as the model sees it: bytes of disk = ``slope`` a second kept, and ``fixed``.

    Where room is short, segments go as a whole, by the last promise in them (``whole_slope``). While it is not, one
    goes when half of it is dead, about midway between the mean of its promises and the last. ``stays_s``: how long a
    segment stays that goes as a whole.
    """

    class_byte: int
    name: str
    keep_for_s: int
    priority: int
    floor_bytes: int
    ceiling_bytes: int
    ingest_bytes_per_s: float
    slope: float
    whole_slope: float
    fixed: float
    stays_s: float

    def bytes_at(self, kept_s: float) -> float:
        """Where room is short."""
        return self.fixed + self.whole_slope * kept_s if kept_s > 0 and self.slope > 0 else 0.0

    @property
    def demand_bytes(self) -> float:
        """Where it is not."""
        return self.fixed + self.slope * self.keep_for_s if self.slope > 0 else 0.0


def forecast(ingest: Mapping[int, ClassIngest], rules: ClassRules, room: Room, window_s: int) -> Forecast:
    """What becomes of every class, if it goes on as in the last ``window_s``.

    A class that no rule names counts as it is treated: kept for the longest promise, and as dear as the dearest.
    """
    rules = rules.for_volume(room.segments_max * room.segment_bytes)
    unknown = [byte for byte in ingest if rules.by_byte(byte) is None]
    class_bytes = [*(int(rule.class_byte) for rule in rules.rules), *unknown]
    flows = [_flow_of(byte, rules, ingest.get(byte), room, window_s) for byte in class_bytes]
    kept_s = _share_out(flows, float(room.usable_bytes))
    demand_bytes = sum(flow.demand_bytes for flow in flows)
    missing_bytes = max(0.0, demand_bytes - room.usable_bytes)
    spare_bytes = max(0.0, room.usable_bytes - demand_bytes)
    classes = tuple(_outlook(flow, kept_s[flow.class_byte], spare_bytes) for flow in flows)
    breaks_in_s = _breaks_in_s(flows, ingest, room) if missing_bytes else None
    counted_s = max((item.now_s - item.since_s for item in ingest.values()), default=0)
    return Forecast(classes, demand_bytes, room.usable_bytes, missing_bytes, breaks_in_s, counted_s)


def promise_stats(parts: Sequence[tuple[Mapping[int, ClassIngest], Room]], rules: ClassRules) -> dict[str, Any]:
    """A node's stats about its promises, from what came to each volume and how large it is."""
    ingest, room = merge_ingest(ingest for ingest, _ in parts), merge_rooms([room for _, room in parts])
    classes = forecast(ingest, rules, room, DAY_S).classes
    return {
        "promise_ratio": {item.name: item.ratio for item in classes},
        "promise_lasts_s": {item.name: item.lasts_s for item in classes},
        "ingest": ingest_json(ingest, room),
    }


def _flow_of(class_byte: int, rules: ClassRules, ingest: ClassIngest | None, room: Room, window_s: int) -> _Flow:
    """Segments hold one class and one day of expiry: each day leaves one half full, and the oldest is half dead."""
    rule, keep_for_s = rules.by_byte(class_byte), rules.keep_for_s(class_byte)
    priority = rule.priority if rule else max(item.priority for item in rules.rules)
    floor_bytes, ceiling_bytes = (rule.floor_bytes, rule.ceiling_bytes) if rule else (0, 0)
    who = (class_byte, rules.name_of(class_byte), keep_for_s, priority, floor_bytes, ceiling_bytes)
    rate = ingest.rate_bytes_per_s(window_s) if ingest is not None else 0.0
    if ingest is None or rate <= 0:
        return _Flow(*who, 0.0, 0.0, 0.0, 0.0, 0.0)
    stretch = 1 + ingest.lengthened_bytes(window_s) / (rate * keep_for_s)
    whole = max(stretch, 1 + ingest.segments_bytes(window_s) / (rate * keep_for_s))
    begun_per_day = DAY_S / rule.age_span_s if rule and rule.max_age_s else 1.0
    segments_per_day = max(rate * DAY_S / room.held_bytes(ingest.record_bytes) + begun_per_day / 2, begun_per_day)
    by_segments = segments_per_day * room.segment_bytes / DAY_S
    slope = max(by_segments, rate * room.weight(ingest.record_bytes))
    return _Flow(*who, rate, slope * (stretch + whole) / 2, slope * whole, room.segment_bytes / 2, keep_for_s * whole)


def _share_out(flows: Sequence[_Flow], usable_bytes: float) -> dict[int, float]:
    """Seconds that each class is kept, by class byte: the dearest first, each priority after what floors hold, and
    before that all go down to their ceilings.
    """
    flows = _cut_to_ceilings(flows, usable_bytes)
    kept_s: dict[int, float] = {}
    left_bytes = usable_bytes
    for priority in sorted({flow.priority for flow in flows}, reverse=True):
        group = [flow for flow in flows if flow.priority == priority]
        cheaper = [flow for flow in flows if flow.priority < priority]
        floors = sum(min(flow.demand_bytes, flow.floor_bytes) for flow in cheaper)
        early_s = _given_up_s(group, left_bytes - floors)
        for flow in group:
            kept_s[flow.class_byte] = _kept_s(flow, early_s)
            left_bytes -= flow.bytes_at(kept_s[flow.class_byte]) if early_s else flow.demand_bytes
    return kept_s


def _cut_to_ceilings(flows: Sequence[_Flow], usable_bytes: float) -> Sequence[_Flow]:
    """As far as room is short, classes beyond their ceilings keep less, down to those; the earliest promises go."""
    over = {
        flow.class_byte: replace(flow, floor_bytes=flow.ceiling_bytes)
        for flow in flows
        if 0 < flow.ceiling_bytes < flow.demand_bytes
    }
    if not over:
        return flows
    others_bytes = sum(flow.demand_bytes for flow in flows if flow.class_byte not in over)
    early_s = _given_up_s(list(over.values()), usable_bytes - others_bytes)
    return [
        replace(flow, keep_for_s=max(1, int(_kept_s(over[flow.class_byte], early_s))))
        if flow.class_byte in over
        else flow
        for flow in flows
    ]


def _given_up_s(group: Sequence[_Flow], room_bytes: float) -> float:
    """How long before their end blocks of one priority must go, so that the rest fits: the earliest promises go."""
    low, high = 0.0, float(max(flow.keep_for_s for flow in group))
    if sum(flow.demand_bytes for flow in group) <= room_bytes:
        return 0.0
    for _ in range(_STEPS):
        middle = (low + high) / 2
        fits = sum(flow.bytes_at(_kept_s(flow, middle)) for flow in group) <= room_bytes
        low, high = (low, middle) if fits else (middle, high)
    return high


def _kept_s(flow: _Flow, early_s: float) -> float:
    """What is left of a promise that ends so much early, but no less than the floor holds."""
    kept_s = max(0.0, flow.keep_for_s - early_s)
    if flow.slope > 0 and flow.floor_bytes > flow.bytes_at(kept_s):
        kept_s = max(kept_s, min(float(flow.keep_for_s), (flow.floor_bytes - flow.fixed) / flow.whole_slope))
    return kept_s


def _outlook(flow: _Flow, kept_s: float, spare_bytes: float) -> Outlook:
    broken = kept_s < flow.keep_for_s and flow.slope > 0
    if broken:
        ratio = kept_s / flow.keep_for_s
    else:
        ratio = min(RATIO_MAX, 1 + spare_bytes / flow.demand_bytes) if flow.demand_bytes else RATIO_MAX
    lasts_s = kept_s if broken else float(flow.keep_for_s)
    who = (flow.class_byte, flow.name, flow.keep_for_s)
    return Outlook(*who, flow.ingest_bytes_per_s, flow.demand_bytes, lasts_s, ratio)


def _breaks_in_s(flows: Sequence[_Flow], ingest: Mapping[int, ClassIngest], room: Room) -> float:
    """Until there is no room, hour by hour: what comes, less what came a promise ago and goes now."""
    left_bytes = room.free_bytes
    if left_bytes <= 0:
        return 0.0
    longest_s = max(flow.stays_s for flow in flows)
    for hour in range(math.ceil(longest_s / HOUR_S) + 1):
        growth = sum(_growth_bytes_per_hour(flow, ingest.get(flow.class_byte), hour) for flow in flows)
        if growth >= left_bytes:
            return (hour + left_bytes / growth) * HOUR_S
        left_bytes -= growth
    return longest_s


def _growth_bytes_per_hour(flow: _Flow, ingest: ClassIngest | None, hour: int) -> float:
    """Of one class, so many hours ahead: what comes, less what goes."""
    ago = int(flow.stays_s // HOUR_S) - hour
    if ingest is None or flow.slope <= 0 or ago < 0:
        return 0.0
    overhead = flow.whole_slope * flow.keep_for_s / (flow.ingest_bytes_per_s * flow.stays_s)
    goes = ingest.stored_bytes[ago] if ago < len(ingest.stored_bytes) else 0
    return (flow.ingest_bytes_per_s * HOUR_S - goes) * overhead
