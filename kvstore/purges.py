"""Purges that leave no byte behind: what was ordered, and what a node says that it did.

Owns the shapes and their JSON. Does not erase, scan or sign. Invariant: an order is carried out once, however often it
is given: nodes know it by ``purge_id``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import blake3

from kvstore.keys import BlockKey, SpaceId
from kvstore.limits import KEY_BYTES, NAME_BYTES_MAX, SPACES_MAX
from kvstore.traffic import CLASS_MAX
from kvstore.values import string, truth, whole

PURGE_KEYS_MAX = 16_384
"""Keys in one order; beyond, purge the space."""
_ID = re.compile(r"[0-9a-f]{32}\Z")
_KEYS_CONTEXT = "reprise purge key set v1"

Json = Mapping[str, Any]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class PurgeOrder:
    """Everything of some spaces, or only ``keys`` (not None) in them, that was written at ``until_s`` or before.

    Or a part of it: ``class_byte``: what this class alone has used; what others use too is kept for them, and it loses
    its claim on it. ``written_until_s``: what is as old as that. Of a part, no ``spaces`` are all spaces.
    ``purge_id``: 32 hex digits, chosen by whoever orders. ``tenant``: for whom it was, where that was asked; else "".
    ``overwrite``: write over the bytes, instead of having the file system take them for zeros. ``erase``: leave no
    byte; else blocks are gone for good, and their bytes go when their place is used again.
    """

    purge_id: str
    spaces: tuple[SpaceId, ...]
    keys: tuple[BlockKey, ...] | None
    until_s: int
    author: str = ""
    reason: str = ""
    tenant: str = ""
    overwrite: bool = False
    class_byte: int | None = None
    written_until_s: int | None = None
    erase: bool = True

    @property
    def is_part(self) -> bool:
        """Whether it is neither whole spaces nor keys that somebody chose."""
        return self.class_byte is not None or self.written_until_s is not None

    def __post_init__(self) -> None:
        if not _ID.match(self.purge_id):
            raise ValueError("a purge's id is 32 hex digits")
        least = 0 if self.is_part else 1
        if not least <= len(self.spaces) <= SPACES_MAX or any(len(space) != KEY_BYTES for space in self.spaces):
            raise ValueError(f"a purge names 1..{SPACES_MAX} spaces")
        if self.keys is not None and not 1 <= len(self.keys) <= PURGE_KEYS_MAX:
            raise ValueError(f"a purge names 1..{PURGE_KEYS_MAX} keys; purge the whole space instead")
        if any(len(key) != KEY_BYTES for key in self.keys or ()):
            raise ValueError("a key has 32 bytes")
        if self.is_part and (self.keys is not None or None not in (self.class_byte, self.written_until_s)):
            raise ValueError("a purge is by keys, by class or by age: one of them")
        if self.class_byte is not None and not 1 <= self.class_byte <= CLASS_MAX:
            raise ValueError(f"the class of a purge is a byte of 1..{CLASS_MAX}")
        if self.until_s < 0 or (self.written_until_s or 0) < 0:
            raise ValueError("a purge's time is not before 1970")
        for what, text in (("author", self.author), ("reason", self.reason), ("tenant", self.tenant)):
            if len(text.encode()) > NAME_BYTES_MAX:
                raise ValueError(f"the {what} of a purge has at most {NAME_BYTES_MAX} bytes")


@dataclass(frozen=True, slots=True)
class PurgeReport:
    """What one node did about an order.

    ``blocks``: blocks that were stored, and are purged. ``records``: records erased on disk, also those that were dead
    before. ``keys_digest``: of the set of their keys. Of a purge that was interrupted, ``records`` and ``keys_digest``
    are those of its last part. ``ended_s`` 0: not done yet. ``unreadable``: places on disk of
    which nobody can say what they held. Times are seconds since the epoch.
    """

    purge_id: str
    blocks: int
    records: int
    segments: int
    unreadable: int
    keys_digest: str
    policy_version: int
    overwritten: bool
    began_s: int
    ended_s: int
    shared: int = 0

    @property
    def done(self) -> bool:
        return self.ended_s > 0


@dataclass(frozen=True, slots=True)
class Leftovers:
    """What a raw scan of one node's segments found of an order: living records, dead ones whose bytes are there, and
    headers that an earlier life of a segment left behind.
    """

    segments: int = 0
    living: int = 0
    dead: int = 0
    stale: int = 0
    unreadable: int = 0

    @property
    def records(self) -> int:
        return self.living + self.dead + self.stale


@dataclass(frozen=True, slots=True)
class ByNode(Generic[T]):
    """What each node answered, by its name ("" for a store without nodes), and why others did not."""

    answers: Mapping[str, T]
    failed: Mapping[str, str] = field(default_factory=dict)


def digest_of_keys(keys: Iterable[BlockKey]) -> str:
    """64 hex digits for a set of keys, in whatever order they come."""
    hasher = blake3.blake3(derive_key_context=_KEYS_CONTEXT)
    for key in sorted(set(keys)):
        hasher.update(key)
    return hasher.hexdigest()


def order_to_json(order: PurgeOrder) -> dict[str, Any]:
    return {
        "purge_id": order.purge_id,
        "spaces": [space.hex() for space in order.spaces],
        "keys": _which_to_json(order),
        "until_s": order.until_s,
        "author": order.author,
        "reason": order.reason,
        "tenant": order.tenant,
        "overwrite": order.overwrite,
        "erase": order.erase,
    }


def _which_to_json(order: PurgeOrder) -> list[str] | dict[str, int] | None:
    """A part in place of keys: a program that does not know parts refuses it, and does not take it for the whole."""
    if order.class_byte is not None:
        return {"class_byte": order.class_byte}
    if order.written_until_s is not None:
        return {"written_until_s": order.written_until_s}
    return None if order.keys is None else [key.hex() for key in order.keys]


def order_from_json(row: Json) -> PurgeOrder:
    """Raises ValueError, KeyError or TypeError."""
    keys = row["keys"]
    part: Json = keys if isinstance(keys, Mapping) else {}
    if isinstance(keys, Mapping):
        keys = None
        if not part or part.keys() - {"class_byte", "written_until_s"}:
            raise ValueError(f"a purge of what is unknown here: {', '.join(map(str, part))[:100]}")
    return PurgeOrder(
        string(row["purge_id"]),
        tuple(SpaceId(bytes.fromhex(string(space))) for space in row["spaces"]),
        None if keys is None else tuple(BlockKey(bytes.fromhex(string(key))) for key in keys),
        whole(row["until_s"]),
        string(row["author"]),
        string(row["reason"]),
        string(row["tenant"]),
        truth(row["overwrite"]),
        class_byte=whole(part["class_byte"]) if "class_byte" in part else None,
        written_until_s=whole(part["written_until_s"]) if "written_until_s" in part else None,
        erase=truth(row.get("erase", True)),
    )


def report_to_json(report: PurgeReport) -> dict[str, Any]:
    return {name: getattr(report, name) for name in PurgeReport.__dataclass_fields__}


def report_from_json(row: Json) -> PurgeReport:
    """Raises ValueError, KeyError or TypeError."""
    numbers = ("blocks", "records", "segments", "unreadable", "policy_version", "began_s", "ended_s")
    return PurgeReport(
        purge_id=string(row["purge_id"]),
        keys_digest=string(row["keys_digest"]),
        overwritten=truth(row["overwritten"]),
        **{name: whole(row[name]) for name in numbers},
        shared=whole(row.get("shared", 0)),
    )


def leftovers_to_json(found: Leftovers) -> dict[str, int]:
    return {name: getattr(found, name) for name in Leftovers.__dataclass_fields__}


def leftovers_from_json(row: Json) -> Leftovers:
    """Raises KeyError or TypeError."""
    return Leftovers(**{name: whole(row[name]) for name in Leftovers.__dataclass_fields__})
