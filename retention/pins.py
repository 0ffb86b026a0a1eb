"""Pins: blocks that an operator holds against expiry and eviction, with an owner and a reason.

Owns the checks of a pin and its end in time. Does not know how a store honours it. Invariant: a pin names who asked for
it and why, so that somebody can be asked before it is taken away.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvstore.keys import BlockKey, SpaceId
from kvstore.limits import LOOKUP_KEYS_MAX, NAME_BYTES_MAX
from kvstore.store import Pin, Store
from retention.errors import NothingMatched, SelectionInvalid


@dataclass(frozen=True, slots=True)
class PinCount:
    """How many keys were asked for, and how many of them were there."""

    asked: int
    found: int


def make_pins(
    space_id: SpaceId,
    keys: Sequence[BlockKey],
    *,
    owner: str,
    reason: str,
    until_s: int,
    now_s: float,
    hold: bool = False,
) -> tuple[Pin, ...]:
    """Checked pins, one a key. ``until_s`` 0 is no end. Raises SelectionInvalid."""
    _check_count(keys)
    for what, text in (("owner", owner), ("reason", reason)):
        if not text.strip():
            raise SelectionInvalid(f"a pin needs --{what}: say who holds it and why")
        if len(text.encode()) > NAME_BYTES_MAX:
            raise SelectionInvalid(f"the {what} of a pin has at most {NAME_BYTES_MAX} bytes")
    if until_s and until_s <= now_s:
        raise SelectionInvalid("the pin would end in the past")
    return tuple(Pin(space_id, key, owner, reason, until_s, hold) for key in dict.fromkeys(keys))


def pin_blocks(store: Store, pins: Sequence[Pin], *, deadline_s: float) -> PinCount:
    """Pin blocks; those that are not stored are left out of ``found``."""
    return PinCount(len(pins), store.pin(pins, deadline_s=deadline_s))


def unpin_blocks(
    store: Store,
    space_id: SpaceId,
    keys: Sequence[BlockKey],
    *,
    owner: str | None = None,
    holds: bool = False,
    deadline_s: float,
) -> PinCount:
    """Take pins away, one owner's or everybody's; keys without one are left out of ``found``."""
    _check_count(keys)
    unique = tuple(dict.fromkeys(keys))
    return PinCount(len(unique), store.unpin(space_id, unique, owner=owner, holds=holds, deadline_s=deadline_s))


def home_of_pins(pins: Iterable[Pin], keys: Sequence[BlockKey]) -> SpaceId:
    """The one space in which some of the keys are pinned. Raises NothingMatched, or SelectionInvalid for several."""
    wanted = set(keys)
    homes = {pin.space_id for pin in pins if pin.key in wanted}
    if not homes:
        raise NothingMatched("nobody has pinned these blocks; `retention pins` lists what is pinned")
    if len(homes) > 1:
        raise SelectionInvalid(f"the keys are pinned in {len(homes)} spaces: name one with --space")
    return homes.pop()


def _check_count(keys: Sequence[BlockKey]) -> None:
    if not 1 <= len(keys) <= LOOKUP_KEYS_MAX:
        raise SelectionInvalid(f"name 1..{LOOKUP_KEYS_MAX} keys, not {len(keys)}")
