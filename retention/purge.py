"""Removing blocks by what they belong to: a space, a tenant, a prefix, a class, or an age.

Owns the choice of what a purge covers and the order in which it removes. Does not know how a store deletes. Invariants:
without ``apply`` nothing is removed; a prefix is removed from its deepest block up, so that an interrupted purge leaves
a shorter prefix that the next one still finds whole; what is counted was there.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace

from kvstore.errors import Held, Unavailable
from kvstore.keys import BlockKey, Space, SpaceId, tenant_salt
from kvstore.limits import BATCH_BLOCKS_MAX, KEY_BYTES
from kvstore.purges import PurgeOrder
from kvstore.store import BlockInfo, Pin, Store
from kvstore.wording import printable
from retention.errors import NothingMatched, SelectionInvalid
from retention.scan import SCAN_S_DEFAULT, scan_blocks

SPACE_DIGITS_MIN = 8
"""Hex digits that name a space at least; fewer are refused, lest a typing error match."""
PREFIX_BLOCKS_MAX = 4_000_000
"""Blocks of a space that a purge by prefix looks through in memory (under 1 GiB); beyond, purge the space."""
PASSES_MAX = 3
"""Passes over a prefix, since workers may go on writing under it; what comes later is for the next purge."""


Place = tuple[SpaceId, BlockKey]
_Link = tuple[int, BlockKey, BlockKey, int]
"""Index, key, parent and payload bytes of a block."""


@dataclass(frozen=True, slots=True)
class Purge:
    """What a purge would remove (``applied`` False) or removed: blocks per space.

    ``loose_blocks``: blocks of the space, deeper than the prefix, whose own ancestors are not stored, so that nothing
    tells whether they descend from it. They cannot hit before that gap is filled again.
    ``whole_spaces``: all states of the spaces go too; else those under the blocks. A store does not count them.
    ``shared_blocks``: of a purge by class, blocks that stay for the other classes that use them.
    ``opaque_spaces``: of a purge by tokens, spaces that were not looked through, since engines name their blocks.
    ``pinned``: which of the blocks are or were pinned; their pins go with them. ``holds``: of a purge that was only
    looked at, the legal holds that forbid it.
    """

    applied: bool
    blocks: Mapping[SpaceId, int]
    payload_bytes: int
    loose_blocks: int = 0
    whole_spaces: bool = False
    shared_blocks: int = 0
    opaque_spaces: int = 0
    pinned: frozenset[Place] = frozenset()
    holds: tuple[Pin, ...] = ()

    @property
    def blocks_total(self) -> int:
        return sum(self.blocks.values())


@dataclass(frozen=True, slots=True)
class PrefixPlan:
    """The stored blocks of one prefix and all that extend it, deepest first."""

    space_id: SpaceId
    keys: tuple[BlockKey, ...]
    payload_bytes: int
    loose_blocks: int
    pinned: frozenset[Place] = frozenset()


# --- choosing -------------------------------------------------------------------------------------------------------


def match_space(text: str, spaces: Iterable[SpaceId]) -> SpaceId:
    """The one space that a hex prefix names. Raises SelectionInvalid, or NothingMatched."""
    digits = _hex_digits(text, "space id")
    if not SPACE_DIGITS_MIN <= len(digits) <= 2 * KEY_BYTES:
        raise SelectionInvalid(f"a space id is {SPACE_DIGITS_MIN}..{2 * KEY_BYTES} hex digits, not {len(digits)}")
    found = sorted(space for space in spaces if space.hex().startswith(digits))
    if not found:
        raise NothingMatched(f"no space has an id that starts with {digits}; `retention show` lists them")
    if len(found) > 1:
        raise SelectionInvalid(f"{len(found)} spaces have ids that start with {digits}; give more digits")
    return found[0]


def spaces_of_tenant(tenant: str, spaces: Mapping[SpaceId, Space]) -> tuple[SpaceId, ...]:
    """The spaces that carry a tenant's salt. Raises NothingMatched when there is none."""
    salt = tenant_salt(tenant)
    found = tuple(sorted(space_id for space_id, space in spaces.items() if space.tenant_salt == salt))
    if not found:
        user = f"{len(tenant.encode())}:{tenant}"
        hint = f"; a request's user is named -/{user}, or BYTES:TENANT/{user} with API keys"
        raise NothingMatched(f"no space belongs to tenant {tenant!r}{'' if '/' in tenant else hint}")
    return found


def parse_key(text: str) -> BlockKey:
    """A block's key from its 64 hex digits. Raises SelectionInvalid."""
    digits = _hex_digits(text, "key")
    if len(digits) != 2 * KEY_BYTES:
        raise SelectionInvalid(f"a key is {2 * KEY_BYTES} hex digits, not {len(digits)}")
    return BlockKey(bytes.fromhex(digits))


def plan_prefix(root: BlockKey, blocks: Iterable[BlockInfo], also: Set[BlockKey] = frozenset()) -> PrefixPlan:
    """Which blocks are the prefix ``root`` or extend it, by their parent links. ``root`` itself need not be stored.

    ``also``: earlier blocks of the prefix that shall go with it, whoever else begins with them. Raises NothingMatched
    when no block is or extends it, SelectionInvalid beyond PREFIX_BLOCKS_MAX.
    """
    links: list[_Link] = []
    home: tuple[SpaceId, int] | None = None
    pinned: set[BlockKey] = set()
    for block in blocks:
        links.append((block.index, block.key, block.parent, block.payload_bytes))
        if block.pinned:
            pinned.add(block.key)
        if block.key == root:
            home = block.space_id, block.index
        elif block.parent == root:
            home = block.space_id, block.index - 1
        elif block.key in also and home is None:
            home = block.space_id, block.index
        if len(links) > PREFIX_BLOCKS_MAX:
            raise SelectionInvalid(f"the space has more than {PREFIX_BLOCKS_MAX} blocks: purge it with --space instead")
    if home is None:
        raise NothingMatched(f"no stored block is or extends {root.hex()}")
    plan = _descend(home[0], root, home[1], sorted(links), also)
    return replace(plan, pinned=frozenset((home[0], key) for key in plan.keys if key in pinned))


def _descend(
    space_id: SpaceId, root: BlockKey, root_index: int, links: Sequence[_Link], also: Set[BlockKey]
) -> PrefixPlan:
    """Follow parent links down from ``root``. ``links`` are in order of index: a parent comes before its children."""
    below = {root}
    rooted = {BlockKey(bytes(space_id))}
    keys: list[BlockKey] = []
    payload_bytes = 0
    loose_blocks = 0
    for index, key, parent, size_bytes in links:
        if key == root or parent in below:
            below.add(key)
            keys.append(key)
            payload_bytes += size_bytes
        elif key in also:
            rooted.add(key)
            keys.append(key)
            payload_bytes += size_bytes
        elif parent in rooted:
            rooted.add(key)
        elif index > root_index:
            loose_blocks += 1
    return PrefixPlan(space_id, tuple(reversed(keys)), payload_bytes, loose_blocks)


def _hex_digits(text: str, what: str) -> str:
    digits = text.strip().lower()
    if not digits or any(digit not in "0123456789abcdef" for digit in digits):
        raise SelectionInvalid(f"{text[:80]!r} is not a {what}: write hex digits")
    return digits


def count_part(store: Store, order: PurgeOrder, *, deadline_s: float = SCAN_S_DEFAULT) -> Purge:
    """What an order by class or age comes to now."""
    counts: Counter[SpaceId] = Counter()
    pinned: set[Place] = set()
    payload_bytes = shared_blocks = 0
    for space_id in order.spaces or (None,):
        for block in scan_blocks(store, space_id, deadline_s=deadline_s):
            if order.written_until_s is not None:
                goes = block.written_s <= order.written_until_s
            else:
                goes = {*block.touches} == {order.class_byte}
                shared_blocks += order.class_byte in block.touches and not goes
            if goes:
                counts[block.space_id] += 1
                payload_bytes += block.payload_bytes
                if block.pinned:
                    pinned.add((block.space_id, block.key))
    return Purge(False, counts, payload_bytes, shared_blocks=shared_blocks, pinned=frozenset(pinned))


# --- legal holds -----------------------------------------------------------------------------------------------------


def with_holds(store: Store, found: Purge, *, deadline_s: float) -> Purge:
    """What was looked at, with the legal holds on it: nodes refuse to remove anything under one."""
    pins = store.pins(deadline_s=deadline_s) if found.pinned else []
    holds = dict.fromkeys(pin for pin in pins if pin.hold and (pin.space_id, pin.key) in found.pinned)
    return replace(found, holds=tuple(holds))


def has_holds(store: Store, *, deadline_s: float) -> bool:
    """Whether anything at all is under a legal hold."""
    return any(pin.hold for pin in store.pins(deadline_s=deadline_s))


def refuse_held(found: Purge) -> None:
    """Raise Held where there are legal holds, with what releases one of them."""
    if not found.holds:
        return
    first, places = found.holds[0], {(pin.space_id, pin.key) for pin in found.holds}
    owner = printable(first.owner)
    release = f"retention unpin {first.key.hex()} --owner {shlex.quote(owner)} --release-holds"
    raise Held(
        f"nothing is removed, because of legal holds on {len(places)} of these blocks: `{release}` releases that "
        f"of {owner} ({printable(first.reason)}); `retention pins` names all"
    )


# --- removing -------------------------------------------------------------------------------------------------------


def purge_spaces(
    store: Store, space_ids: Sequence[SpaceId], *, apply: bool, deadline_s: float = SCAN_S_DEFAULT
) -> Purge:
    """Remove every block and state of some spaces, or count them."""
    counts: Counter[SpaceId] = Counter()
    pinned: set[Place] = set()
    payload_bytes = 0
    for space_id in space_ids:
        counts[space_id] = 0
        for block in scan_blocks(store, space_id, deadline_s=deadline_s):
            counts[space_id] += 1
            payload_bytes += block.payload_bytes
            if block.pinned:
                pinned.add((space_id, block.key))
        if apply:
            counts[space_id] = store.delete_space(space_id, deadline_s=deadline_s)
    return Purge(apply, counts, payload_bytes, whole_spaces=True, pinned=frozenset(pinned))


def purge_part(store: Store, order: PurgeOrder, *, apply: bool, deadline_s: float = SCAN_S_DEFAULT) -> Purge:
    """Carry out an order by class or age, or count. Raises NothingMatched; Unavailable, naming the nodes that have not
    carried it out.
    """
    found = count_part(store, order, deadline_s=deadline_s)
    if not found.blocks_total and not found.shared_blocks:
        raise NothingMatched("no stored block is of this class" if order.class_byte else "no stored block is that old")
    if not apply:
        return found
    done = store.purge(order, deadline_s=deadline_s)
    if done.failed:
        left = "; ".join(f"{name or 'the store'}: {why}" for name, why in done.failed.items())
        raise Unavailable(f"not every node has carried it out, purge again: {left}")
    return replace(found, applied=True)


def purge_prefix(
    store: Store,
    root: BlockKey,
    *,
    space_id: SpaceId | None = None,
    also: Set[BlockKey] = frozenset(),
    apply: bool,
    deadline_s: float = SCAN_S_DEFAULT,
) -> Purge:
    """Remove the block ``root`` and every block that extends it (and ``also``), or count them. ``space_id`` spares the
    search.
    """
    home = space_id or home_of(store, root, deadline_s)
    plan = plan_prefix(root, scan_blocks(store, home, deadline_s=deadline_s), also)
    if not apply:
        return Purge(False, {home: len(plan.keys)}, plan.payload_bytes, plan.loose_blocks, pinned=plan.pinned)
    removed, payload_bytes, loose_blocks, pinned = 0, 0, plan.loose_blocks, plan.pinned
    for _ in range(PASSES_MAX):
        removed += _delete(store, plan, deadline_s)
        payload_bytes += plan.payload_bytes
        try:
            plan = plan_prefix(root, scan_blocks(store, home, deadline_s=deadline_s), also)
        except NothingMatched:
            break
        loose_blocks, pinned = plan.loose_blocks, pinned | plan.pinned
    return Purge(True, {home: removed}, payload_bytes, loose_blocks, pinned=pinned)


def home_of(store: Store, root: BlockKey, deadline_s: float) -> SpaceId:
    """The space of a block, or of a child of it. Raises NothingMatched."""
    for block in scan_blocks(store, None, deadline_s=deadline_s):
        if root in (block.key, block.parent):
            return block.space_id
    raise NothingMatched(f"no stored block is or extends {root.hex()}")


def _delete(store: Store, plan: PrefixPlan, deadline_s: float) -> int:
    return sum(
        store.delete(plan.space_id, plan.keys[begin : begin + BATCH_BLOCKS_MAX], deadline_s=deadline_s)
        for begin in range(0, len(plan.keys), BATCH_BLOCKS_MAX)
    )
