"""Traffic classes: one stable byte each, and the numbers the daemon applies to them.

Owns the byte of every built-in class and the shape of a class rule. Does not know what a class *means*: durations,
floors and priorities come from ``retention/policy.py`` as finished numbers. Invariant: a byte, once given to a class,
never names another one, since it is written into every record header.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, NewType

TrafficClass = NewType("TrafficClass", int)
"""One byte, 1..255. 0 is never a class, so that a zeroed header cannot carry one."""

AGENT = TrafficClass(1)
CHAT = TrafficClass(2)
OPERATOR_CLASS_MIN = TrafficClass(16)
"""Bytes 16..255 are for classes that an operator adds; 3..15 are kept for built-in ones."""
CLASS_MAX = TrafficClass(255)

BUILT_IN_NAMES: Mapping[str, TrafficClass] = {"agent": AGENT, "chat": CHAT}

_NAME = re.compile(r"[a-z][a-z0-9_-]{0,30}\Z")
CODECS = ("none", "zstd")
ALWAYS, SECOND_TOUCH = "always", "second_touch"
ADMISSIONS = (ALWAYS, SECOND_TOUCH)
SLIDING, FIXED = "sliding", "fixed"
KEEPS = (SLIDING, FIXED)
KEEP_FOR_S_MAX = 50 * 365 * 86_400
"""Fifty years; a longer promise is a slip of the pen. Only touches are stored, as u32 seconds (good until 2106): a
deadline is computed from them and the rules in force, as an i64, so no promise can overflow it."""
TOUCH_PARTS = 1024
"""A touch that lengthens a promise by less than this part of its class's keep-for is not counted."""
MAX_AGE_S_MIN = 60
AGE_PARTS = 16
AGE_SPAN_S_MAX = 3600
FLOOR_BYTES_MAX = 2**60
SHARE_MAX = 10_000
"""Shares of the capacity are whole ten-thousandths of it."""
PRIORITY_MAX = 1_000_000


@dataclass(frozen=True, slots=True)
class ClassRule:
    """What the daemon does with blocks of one class: numbers only.

    Units: ``keep_for_s`` seconds from the last touch by the class, or, where ``keep`` is fixed, from its first touch of
    a stored block, which later ones do not lengthen; ``floor_bytes`` physical bytes that eviction leaves to the class.
    ``priority``: classes with a lower number are evicted first. ``codec``: how payloads are stored. ``admission``:
    whether a new block is stored when it is offered, or when it is offered for the second time. ``write_budget_bytes``:
    physical bytes of new blocks that a node stores in a day (UTC); 0: no bound. ``max_age_s``: seconds from when the
    class wrote a block, after which it is not served, however often it is used, and is erased; 0: none.
    ``ceiling_bytes``: what the class holds beyond it gives way before anything else; 0: no such bound. Floor and
    ceiling may be shares of a node's capacity instead, in ten-thousandths. ``compress_after_s``: seconds without a
    use after which blocks that were stored as they are may be compressed; 0: never.
    """

    class_byte: TrafficClass
    name: str
    keep_for_s: int
    priority: int = 100
    floor_bytes: int = 0
    codec: str = "none"
    admission: str = ALWAYS
    write_budget_bytes: int = 0
    keep: str = SLIDING
    max_age_s: int = 0
    floor_share: int = 0
    ceiling_bytes: int = 0
    ceiling_share: int = 0
    compress_after_s: int = 0

    def __post_init__(self) -> None:
        for number in (getattr(self, item.name) for item in fields(self) if item.name not in _WORDS):
            if not isinstance(number, int) or isinstance(number, bool):
                raise ValueError(f"class {self.name!r}: {number!r} is not a whole number")
        if not 1 <= self.class_byte <= CLASS_MAX:
            raise ValueError(f"class byte {self.class_byte} of {self.name!r} is outside 1..255")
        if not isinstance(self.name, str) or not _NAME.match(self.name):
            raise ValueError(f"class name {self.name!r}: use 1-31 of a-z 0-9 _ -, starting with a letter")
        if not 1 <= self.keep_for_s <= KEEP_FOR_S_MAX:
            raise ValueError(f"class {self.name!r}: keep_for_s {self.keep_for_s} is outside 1 s..50 years")
        if not 0 <= self.priority <= PRIORITY_MAX:
            raise ValueError(f"class {self.name!r}: priority {self.priority} is outside 0..{PRIORITY_MAX}")
        if not 0 <= self.floor_bytes <= FLOOR_BYTES_MAX:
            raise ValueError(f"class {self.name!r}: floor_bytes {self.floor_bytes} is outside 0..1 EiB")
        if self.codec not in CODECS:
            raise ValueError(f"class {self.name!r}: codec {self.codec!r} is not one of {', '.join(CODECS)}")
        if self.admission not in ADMISSIONS:
            raise ValueError(f"class {self.name!r}: admission {self.admission!r} is not one of {', '.join(ADMISSIONS)}")
        if self.keep not in KEEPS:
            raise ValueError(f"class {self.name!r}: keep {self.keep!r} is not one of {', '.join(KEEPS)}")
        if not 0 <= self.write_budget_bytes <= FLOOR_BYTES_MAX:
            raise ValueError(f"class {self.name!r}: write_budget {self.write_budget_bytes} is outside 0..1 EiB")
        self._check_shares()
        if not 0 <= self.compress_after_s <= KEEP_FOR_S_MAX:
            raise ValueError(f"class {self.name!r}: compress_after_s {self.compress_after_s} is outside 0..50 years")
        if self.compress_after_s and (self.max_age_s or self.codec != "none"):
            why = "max_age: nothing of it is written again" if self.max_age_s else "a codec: it is compressed at once"
            raise ValueError(f"class {self.name!r}: compress_after does not go with {why}")
        if self.max_age_s and not MAX_AGE_S_MIN <= self.max_age_s <= KEEP_FOR_S_MAX:
            raise ValueError(f"class {self.name!r}: max_age_s {self.max_age_s} is outside 1 min..50 years")
        if self.max_age_s and self.keep_for_s > self.max_age_s - self.age_span_s:
            raise ValueError(
                f"class {self.name!r}: kept for {self.keep_for_s} s, no block would reach that: with a max_age of "
                f"{self.max_age_s} s it may be erased after {self.max_age_s - self.age_span_s} s"
            )
        built_in = BUILT_IN_NAMES.get(self.name)
        if built_in is not None and built_in != self.class_byte:
            raise ValueError(f"class {self.name!r} is built in and has byte {built_in}, not {self.class_byte}")
        if built_in is None and self.class_byte < OPERATOR_CLASS_MIN:
            raise ValueError(f"class {self.name!r}: operator classes use bytes {OPERATOR_CLASS_MIN}..255")

    @property
    def age_span_s(self) -> int:
        """Blocks that were written within this time of each other reach their maximum age together, with the first."""
        return min(AGE_SPAN_S_MAX, max(1, self.max_age_s // AGE_PARTS))

    def _check_shares(self) -> None:
        if not 0 <= self.ceiling_bytes <= FLOOR_BYTES_MAX:
            raise ValueError(f"class {self.name!r}: ceiling_bytes {self.ceiling_bytes} is outside 0..1 EiB")
        for what, size_bytes, share in (
            ("floor", self.floor_bytes, self.floor_share),
            ("ceiling", self.ceiling_bytes, self.ceiling_share),
        ):
            if not 0 <= share <= SHARE_MAX:
                raise ValueError(f"class {self.name!r}: {what}_share {share} is outside 0..{SHARE_MAX}")
            if size_bytes and share:
                raise ValueError(f"class {self.name!r}: its {what} is given in bytes and as a share")
        pairs = ((self.floor_bytes, self.ceiling_bytes), (self.floor_share, self.ceiling_share))
        if any(0 < ceiling < floor for floor, ceiling in pairs):
            raise ValueError(f"class {self.name!r}: its ceiling is below its floor")

    def floor_of(self, capacity_bytes: int) -> int:
        """Physical bytes on a node of this capacity."""
        return self.floor_bytes or capacity_bytes * self.floor_share // SHARE_MAX

    def ceiling_of(self, capacity_bytes: int) -> int | None:
        """Physical bytes on a node of this capacity; None: no bound."""
        if not self.ceiling_bytes and not self.ceiling_share:
            return None
        return self.ceiling_bytes or capacity_bytes * self.ceiling_share // SHARE_MAX


_WORDS = frozenset({"name", "codec", "admission", "keep"})
LATER: Mapping[str, object] = {
    "admission": ALWAYS,
    "write_budget_bytes": 0,
    "keep": SLIDING,
    "max_age_s": 0,
    "floor_share": 0,
    "ceiling_bytes": 0,
    "ceiling_share": 0,
    "compress_after_s": 0,
}
"""Fields that the first rules did not have, and what their absence means."""


@dataclass(frozen=True, slots=True)
class ClassRules:
    """Every class that a store knows, by byte; unique in bytes and names."""

    rules: tuple[ClassRule, ...]

    def __post_init__(self) -> None:
        if not self.rules:
            raise ValueError("a store needs at least one traffic class")
        if len({rule.class_byte for rule in self.rules}) != len(self.rules):
            raise ValueError("two traffic classes share one byte")
        if len({rule.name for rule in self.rules}) != len(self.rules):
            raise ValueError("two traffic classes share one name")

    def by_byte(self, class_byte: int) -> ClassRule | None:
        """The rule of a class, or None for a byte that no rule names (kept at the longest promise, and reported)."""
        return next((rule for rule in self.rules if rule.class_byte == class_byte), None)

    def by_name(self, name: str) -> ClassRule | None:
        return next((rule for rule in self.rules if rule.name == name), None)

    def keep_for_s(self, class_byte: int) -> int:
        """Seconds from a touch by this class; an unknown class is kept at the longest promise of all."""
        rule = self.by_byte(class_byte)
        return rule.keep_for_s if rule else max(rule.keep_for_s for rule in self.rules)

    def for_volume(self, capacity_bytes: int, volumes: int = 1) -> ClassRules:
        """As they apply to one of so many equal volumes of a node of this capacity: its part of each floor and ceiling,
        all in bytes.
        """
        return ClassRules(tuple(_for_volume(rule, capacity_bytes, volumes) for rule in self.rules))

    def name_of(self, class_byte: int) -> str:
        rule = self.by_byte(class_byte)
        return rule.name if rule else f"class-{class_byte}"

    def to_json(self) -> list[dict[str, Any]]:
        """Fields that came later only where they say something, so that an older program reads the others."""
        return [
            {name: value for name, value in asdict(rule).items() if name not in LATER or value != LATER[name]}
            for rule in self.rules
        ]

    @classmethod
    def from_json(cls, rows: Iterable[Mapping[str, Any]]) -> ClassRules:
        """Inverse of ``to_json``. Raises ValueError for unknown or missing fields."""
        try:
            return cls(tuple(ClassRule(**row) for row in rows))
        except TypeError as error:
            raise ValueError(f"a class rule has wrong fields: {error}") from error


def _for_volume(rule: ClassRule, capacity_bytes: int, volumes: int) -> ClassRule:
    floor_bytes = min(FLOOR_BYTES_MAX, rule.floor_of(capacity_bytes) // volumes)
    ceiling_bytes = rule.ceiling_of(capacity_bytes)
    if ceiling_bytes is not None:
        ceiling_bytes = min(FLOOR_BYTES_MAX, max(1, floor_bytes, ceiling_bytes // volumes))
    return replace(rule, floor_bytes=floor_bytes, floor_share=0, ceiling_bytes=ceiling_bytes or 0, ceiling_share=0)
