"""What a purge covers, as its options name it: spaces, a tenant, a prefix, a class, or an age.

Owns which options go together, and what they come to on given nodes: blocks to count or remove, or an order to erase.
Does not remove anything itself. Invariant: a selection that is wrong, or that nothing answers to, is refused before
anything is removed.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from kvstore.errors import StoreError
from kvstore.keys import BlockKey, Space, SpaceId
from kvstore.purges import PURGE_KEYS_MAX, PurgeOrder
from kvstore.store import Store
from kvstore.traffic import CLASS_MAX
from retention.errors import NothingMatched, SelectionInvalid
from retention.prefixes import opaque_note, roots_of, spaces_of_model
from retention.purge import (
    Purge,
    home_of,
    match_space,
    parse_key,
    plan_prefix,
    purge_part,
    purge_prefix,
    purge_spaces,
    spaces_of_tenant,
)
from retention.scan import scan_blocks
from retention.session import Session

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Selection:
    """The options. ``tokens``: the ids of a prefix; ``model``: whose spaces they are looked for in, where neither space
    nor tenant says it. ``from_start``: the blocks before the prefix's last go, too. ``traffic_class``: by name or byte.
    """

    space: str | None = None
    tenant: str | None = None
    prefix: str | None = None
    tokens: tuple[int, ...] | None = None
    model: str | None = None
    from_start: bool = False
    traffic_class: str | None = None
    older_than_s: int | None = None

    def __post_init__(self) -> None:
        places = sum(choice is not None for choice in (self.space, self.tenant))
        parts = sum(choice is not None for choice in (self.prefix, self.tokens, self.traffic_class, self.older_than_s))
        if parts > 1 or places > 1 or (parts == 0 and places == 0) or (self.prefix is not None and places):
            raise SelectionInvalid(
                "give exactly one of --space, --tenant, --prefix, --tokens, --text, --class and --older-than; with the "
                "last four, --space or --tenant says where"
            )
        if self.tokens is None and (self.model is not None or self.from_start):
            raise SelectionInvalid("--model and --from-start go with --tokens or --text")

    @property
    def by_part(self) -> bool:
        """Whether it is by class or age."""
        return self.traffic_class is not None or self.older_than_s is not None

    @property
    def whole_spaces(self) -> bool:
        return self.prefix is None and self.tokens is None and not self.by_part


@dataclass(frozen=True, slots=True)
class _Prefix:
    """A prefix in one space. ``also``: keys of its earlier blocks that go with it."""

    space_id: SpaceId
    root: BlockKey
    also: frozenset[BlockKey] = frozenset()


@dataclass(frozen=True, slots=True)
class Why:
    """Who orders a purge and why, as receipts say it; ``overwrite``: with zeros."""

    author: str
    reason: str
    overwrite: bool = False


def purge_of(session: Session, selection: Selection, why: Why) -> Callable[[bool], Purge]:
    """The chosen purge as a function of ``apply``. Raises before anything is removed when the choice is wrong."""
    store, deadline_s = session.store, session.deadline_s
    if selection.prefix is not None:
        root = parse_key(selection.prefix)
        return lambda apply: purge_prefix(store, root, apply=apply, deadline_s=deadline_s)
    spaces = _spaces_of(selection, store.spaces(deadline_s=deadline_s))
    if selection.by_part:
        order = _part_of(session, selection, spaces, why, erase=False)
        return lambda apply: purge_part(store, order, apply=apply, deadline_s=deadline_s)
    if selection.tokens is None:
        return lambda apply: purge_spaces(store, tuple(spaces), apply=apply, deadline_s=deadline_s)
    prefixes, opaque_spaces = _prefixes_of(selection, spaces)
    return lambda apply: _purge_prefixes(session, prefixes, opaque_spaces, apply=apply)


def order_of(session: Session, selection: Selection, why: Why) -> tuple[PurgeOrder, int]:
    """What the chosen purge orders of the nodes that answer; and how many spaces its tokens do not lead into.

    Raises SelectionInvalid or NothingMatched.
    """
    store, deadline_s = session.store, session.deadline_s
    spaces: tuple[SpaceId, ...]
    keys: tuple[BlockKey, ...] | None = None
    opaque_spaces = 0
    if selection.prefix is not None:
        root = parse_key(selection.prefix)
        home = home_of(store, root, deadline_s)
        spaces, keys = (home,), _keys_of(session, (_Prefix(home, root),))
    else:
        known = _spaces_of(selection, _known_spaces(session))
        if selection.by_part:
            return _part_of(session, selection, known, why, erase=True), 0
        spaces = tuple(known)
        if selection.tokens is not None:
            prefixes, opaque_spaces = _prefixes_of(selection, known)
            spaces, keys = tuple(prefix.space_id for prefix in prefixes), _keys_of(session, prefixes, opaque_spaces)
    return _order(session, selection, spaces, why, keys=keys, overwrite=why.overwrite), opaque_spaces


def _part_of(
    session: Session, selection: Selection, spaces: Mapping[SpaceId, Space], why: Why, *, erase: bool
) -> PurgeOrder:
    """An order by class or age: of some spaces, or of all, also of those that no node knows."""
    some = selection.space is not None or selection.tenant is not None
    chosen = tuple(spaces) if some else ()
    overwrite = why.overwrite and erase
    if selection.older_than_s is not None:
        until_s = int(session.clock.now_s()) - selection.older_than_s
        if until_s < 0:
            raise SelectionInvalid("nothing is as old as --older-than says")
        return _order(session, selection, chosen, why, written_until_s=until_s, erase=erase, overwrite=overwrite)
    class_byte = _class_byte(session, selection.traffic_class or "")
    return _order(session, selection, chosen, why, class_byte=class_byte, erase=erase, overwrite=overwrite)


def _class_byte(session: Session, name: str) -> int:
    """The byte of a class, which a rule names, or which is given as a number. Raises SelectionInvalid."""
    policies = _asked(session, lambda node, deadline_s: node.policy(deadline_s=deadline_s))
    bytes_of = {rule.name: int(rule.class_byte) for policy in policies for rule in policy.rules.rules}
    if name in bytes_of:
        return bytes_of[name]
    digits = name.removeprefix("class-")  # as `retention show` calls one without a rule
    if digits.isascii() and digits.isdecimal() and 1 <= int(digits[:4]) <= CLASS_MAX:
        return int(digits)
    known = ", ".join(sorted(bytes_of))
    raise SelectionInvalid(f"no class {name[:80]!r}: the policy has {known}; one that it lacks is named by its byte")


def _order(session: Session, selection: Selection, spaces: tuple[SpaceId, ...], why: Why, **more: Any) -> PurgeOrder:
    return PurgeOrder(
        secrets.token_hex(16),
        spaces,
        until_s=int(session.clock.now_s()),
        author=why.author,
        reason=why.reason,
        tenant=selection.tenant or "",
        **{"keys": None, **more},
    )


def _spaces_of(selection: Selection, known: Mapping[SpaceId, Space]) -> dict[SpaceId, Space]:
    """The spaces that a selection names, of those that are known."""
    chosen: Iterable[SpaceId] = known
    if selection.tenant is not None:
        chosen = spaces_of_tenant(selection.tenant, known)
    elif selection.space is not None:
        chosen = (match_space(selection.space, known),)
    return {space_id: known[space_id] for space_id in chosen}


def _prefixes_of(selection: Selection, spaces: Mapping[SpaceId, Space]) -> tuple[tuple[_Prefix, ...], int]:
    """What the token ids of a selection name in each space that they lead into; and in how many they name nothing."""
    if not spaces:
        raise NothingMatched("no space is registered")
    named = {space_id: space for space_id, space in spaces.items() if not space.is_opaque}
    opaque_spaces = len(spaces) - len(named)
    if not named:
        raise SelectionInvalid(opaque_note(opaque_spaces))
    roots = roots_of(selection.tokens or (), spaces_of_model(selection.model, named))
    prefixes = tuple(
        _Prefix(space_id, root.key, frozenset(root.before) if selection.from_start else frozenset())
        for space_id, root in roots.items()
    )
    return prefixes, opaque_spaces


def _none_of_prefix(opaque_spaces: int) -> NothingMatched:
    note = f"; {opaque_note(opaque_spaces)}" if opaque_spaces else ""
    return NothingMatched(f"no stored block is of this prefix, or extends it{note}", opaque_spaces)


def _purge_prefixes(session: Session, prefixes: tuple[_Prefix, ...], opaque_spaces: int, *, apply: bool) -> Purge:
    """Remove a prefix from every space that has it, or count. Raises NothingMatched if none has."""
    parts: list[Purge] = []
    for prefix in prefixes:
        try:
            part = purge_prefix(
                session.store,
                prefix.root,
                space_id=prefix.space_id,
                also=prefix.also,
                apply=apply,
                deadline_s=session.deadline_s,
            )
        except NothingMatched:
            continue
        parts.append(part)
    if not parts:
        raise _none_of_prefix(opaque_spaces)
    return Purge(
        apply,
        {space_id: count for part in parts for space_id, count in part.blocks.items()},
        sum(part.payload_bytes for part in parts),
        sum(part.loose_blocks for part in parts),
        opaque_spaces=opaque_spaces,
        pinned=frozenset(place for part in parts for place in part.pinned),
    )


def _keys_of(session: Session, prefixes: tuple[_Prefix, ...], opaque_spaces: int = 0) -> tuple[BlockKey, ...]:
    """The keys of all that prefixes cover. Raises NothingMatched, or SelectionInvalid if there are too many."""
    keys: list[BlockKey] = []
    for prefix in prefixes:
        blocks = scan_blocks(session.store, prefix.space_id, deadline_s=session.deadline_s)
        try:
            keys += plan_prefix(prefix.root, blocks, prefix.also).keys
        except NothingMatched:
            continue
    if not keys:
        raise _none_of_prefix(opaque_spaces)
    if len(keys) > PURGE_KEYS_MAX:
        raise SelectionInvalid(
            f"{len(keys)} blocks extend this prefix; a purge with proof names {PURGE_KEYS_MAX} at most: choose a "
            "longer prefix, or purge the space"
        )
    return tuple(keys)


def _known_spaces(session: Session) -> dict[SpaceId, Space]:
    """The spaces of every node that answers. Raises the error of one if none does."""
    found: dict[SpaceId, Space] = {}
    for spaces in _asked(session, lambda node, deadline_s: node.spaces(deadline_s=deadline_s)):
        found |= spaces
    return found


def _asked(session: Session, ask: Callable[[Store, float], T]) -> list[T]:
    """What the nodes say that answer. Raises the error of one if none does."""
    answers: list[T] = []
    failures: list[StoreError] = []
    with session.each_node() as nodes:
        for node in nodes.values():
            try:
                answers.append(ask(node, session.deadline_s / (2 * len(nodes))))
            except StoreError as error:
                failures.append(error)
    if not answers:
        raise failures[0]
    return answers
