"""What is known of one block: from what nodes remember to facts, in the order in which they came about.

Pure. Owns which policy was in force when, which purge took a block, and in which fields other spaces differ. Does not
ask nodes, nor put anything into words. Invariant: what nobody remembers is absent, never guessed. A node keeps of a
block that is gone only the reason and the time: the policy follows from the time, and a purge is certain only where its
order names the block's key or space, or is of all spaces, by class or age, and the only one of that time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvstore.keys import BlockKey, Space, SpaceId, differing_fields
from kvstore.purges import PurgeOrder, PurgeReport
from kvstore.store import BlockInfo, Pin, Policy, Presence, Sighting
from kvstore.traffic import ClassRules

REMOVALS = frozenset({Presence.EXPIRED, Presence.EVICTED, Presence.QUARANTINED, Presence.PURGED})


@dataclass(frozen=True, slots=True)
class Memories:
    """What the nodes that answered remember of a block, and of what was decided about blocks.

    ``policies``: as far as they are remembered, the one in force last. ``nodes_failed``: why others did not answer.
    """

    sighting: Sighting
    pins: tuple[Pin, ...] = ()
    policies: tuple[Policy, ...] = ()
    purges: tuple[tuple[PurgeOrder, PurgeReport], ...] = ()
    spaces: Mapping[SpaceId, Space] = field(default_factory=dict)
    nodes_failed: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class OtherSpace:
    """A space in which the same tokens are stored, and the fields in which it differs."""

    space_id: SpaceId
    fields: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Use:
    """The last touch by a class that counted, and until when the class's rule keeps a block so touched.

    ``ruled``: whether a rule names the class; where none does, the longest promise of all is kept.
    """

    name: str
    touched_s: int
    until_s: int
    ruled: bool


@dataclass(frozen=True, slots=True)
class Removal:
    """Why and when a block went (0: unknown), under which policy, and by which purge; None where nobody remembers.

    ``order_certain``: whether it was this order; else it was carried out then, and may have been.
    """

    reason: Presence
    at_s: int
    policy: Policy | None
    order: PurgeOrder | None = None
    order_certain: bool = False


@dataclass(frozen=True, slots=True)
class Account:
    """All that is known of one block. ``uses``: the longest promise first. ``policy``: the one in force now."""

    key: BlockKey
    space_id: SpaceId | None
    space: Space | None
    presence: Presence
    block: BlockInfo | None
    until_s: int
    uses: tuple[Use, ...]
    pins: tuple[Pin, ...]
    policy: Policy | None
    removal: Removal | None
    other_spaces: tuple[OtherSpace, ...]
    nodes_failed: Mapping[str, str]

    def to_json(self) -> dict[str, Any]:
        block = self.block
        return {
            "key": self.key.hex(),
            "space": self.space_id.hex() if self.space_id is not None else None,
            "model": self.space.model if self.space is not None else None,
            "presence": self.presence.name.lower(),
            "index": block.index if block else None,
            "tokens": block.tokens if block else None,
            "payload_bytes": block.payload_bytes if block else None,
            "stored_bytes": block.stored_bytes if block else None,
            "written_s": block.written_s if block else None,
            "touches": [
                {"class": use.name, "touched_s": use.touched_s, "until_s": use.until_s, "ruled": use.ruled}
                for use in self.uses
            ],
            "promised_until_s": self.until_s or None,
            "policy_version": self.policy.version if self.policy else None,
            "pins": [
                {"owner": pin.owner, "reason": pin.reason, "until_s": pin.until_s or None, "hold": pin.hold}
                for pin in self.pins
            ],
            "removed": None if self.removal is None else _removal_json(self.removal),
            "other_spaces": others_json(self.other_spaces),
            "nodes_failed": dict(self.nodes_failed),
        }


def others_json(others: Iterable[OtherSpace]) -> list[dict[str, Any]]:
    """The other spaces of an account or an explanation, for programs."""
    return [{"space_id": other.space_id.hex(), "fields": list(other.fields)} for other in others]


def _removal_json(removal: Removal) -> dict[str, Any]:
    policy, order = removal.policy, removal.order
    purge = order and {
        "purge_id": order.purge_id,
        "ordered_s": order.until_s,
        "author": order.author,
        "reason": order.reason,
        "tenant": order.tenant,
        "certain": removal.order_certain,
    }
    return {
        "reason": removal.reason.name.lower(),
        "at_s": removal.at_s or None,
        "policy_version": policy.version if policy else None,
        "policy_since_s": policy.changed_s if policy and policy.changed_s else None,
        "policy_author": policy.author if policy and policy.author else None,
        "purge": purge,
    }


def account_of(key: BlockKey, space_id: SpaceId | None, memories: Memories) -> Account:
    """Put together what is remembered of one block. ``space_id``: its space, where the asker knows it."""
    sighting, block = memories.sighting, memories.sighting.block
    home = block.space_id if block is not None else space_id
    policy = memories.policies[-1] if memories.policies else None
    space = memories.spaces.get(home) if home is not None else None
    return Account(
        key=key,
        space_id=home,
        space=space,
        presence=sighting.presence,
        block=block,
        until_s=sighting.keep_until_s,
        uses=_uses(block, policy.rules) if block is not None and policy is not None else (),
        pins=memories.pins,
        policy=policy,
        removal=_removal(key, home, memories) if sighting.presence in REMOVALS else None,
        other_spaces=spaces_compared(home, space, sighting.other_spaces, memories.spaces),
        nodes_failed=memories.nodes_failed,
    )


def spaces_compared(
    home: SpaceId | None, space: Space | None, others: Iterable[SpaceId], spaces: Mapping[SpaceId, Space]
) -> tuple[OtherSpace, ...]:
    """In which fields others differ from one space, the nearest first: the one that differs in the fewest."""
    found = [
        OtherSpace(other, differing_fields(space, spaces[other]) if space is not None and other in spaces else ())
        for other in others
        if other != home
    ]
    return tuple(sorted(found, key=lambda other: (not other.fields, len(other.fields), other.space_id)))


def policy_at(policies: Sequence[Policy], time_s: int) -> Policy | None:
    """The policy that was in force then; None if that is not remembered. ``policies``: the oldest first."""
    return next((policy for policy in reversed(policies) if policy.changed_s <= time_s), None)


def _uses(block: BlockInfo, rules: ClassRules) -> tuple[Use, ...]:
    uses = [
        Use(
            rules.name_of(class_byte),
            touched_s,
            touched_s + rules.keep_for_s(class_byte),
            rules.by_byte(class_byte) is not None,
        )
        for class_byte, touched_s in block.touches.items()
    ]
    return tuple(sorted(uses, key=lambda use: (-use.until_s, use.name)))


def _removal(key: BlockKey, home: SpaceId | None, memories: Memories) -> Removal:
    sighting = memories.sighting
    if sighting.block is not None:
        return _expiry(sighting.block, sighting.since_s, memories.policies)
    at_s = sighting.since_s
    policy = policy_at(memories.policies, at_s) if at_s else None
    if sighting.presence != Presence.PURGED:
        return Removal(sighting.presence, at_s, policy)
    return Removal(sighting.presence, at_s, policy, *_order(key, home, at_s, memories.purges))


def _expiry(block: BlockInfo, since_s: int, policies: Sequence[Policy]) -> Removal:
    """When a block that is not swept yet lost its promise, and by which policy.

    That in which its time ran out, or else that which came into force when by its rules the time had run out already.
    """
    ends_s = [policy.changed_s for policy in policies[1:]]
    for policy, end_s in zip(policies, ends_s, strict=False):
        until_s = max((use.until_s for use in _uses(block, policy.rules)), default=since_s)
        if max(until_s, policy.changed_s) < end_s:
            return Removal(Presence.EXPIRED, max(until_s, policy.changed_s), policy)
    last = policies[-1] if policies else None
    return Removal(Presence.EXPIRED, max(since_s, last.changed_s if last else 0), last)


def _order(
    key: BlockKey, home: SpaceId | None, at_s: int, purges: Sequence[tuple[PurgeOrder, PurgeReport]]
) -> tuple[PurgeOrder | None, bool]:
    """The latest order that was being carried out when the block went, and whether it is certain.

    It is where the order names the key or the whole space. By class or age it says what goes, but not of which block:
    it is certain where it reaches the block's space, and no other order that may do so was carried out then.
    """
    under_way = [
        order
        for order, report in reversed(purges)
        if report.began_s <= at_s and (not report.done or at_s <= report.ended_s)
    ]
    for order in under_way:
        if key in order.keys if order.keys is not None else home in order.spaces and not order.is_part:
            return order, True
    may_be = [
        order
        for order in under_way
        if order.keys is None and (not order.spaces or home is None or home in order.spaces)
    ]
    if not may_be:
        return None, False
    alone = len({order.purge_id for order in may_be}) == 1
    return may_be[0], alone and (not may_be[0].spaces or home is not None)
