"""What a purge covers, as its options name it: spaces, a tenant, or a prefix.

Owns which options go together, and what they come to on given nodes: blocks to count or remove, or an order to erase.
Does not remove anything itself. Invariant: a selection that is wrong, or that nothing answers to, is refused before
anything is removed.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from kvstore.errors import StoreError
from kvstore.keys import BlockKey, Space, SpaceId
from kvstore.purges import PURGE_KEYS_MAX, PurgeOrder
from retention.errors import NothingMatched, SelectionInvalid
from retention.prefixes import roots_of, spaces_of_model
from retention.purge import (
    Purge,
    home_of,
    match_space,
    parse_key,
    plan_prefix,
    purge_prefix,
    purge_spaces,
    spaces_of_tenant,
)
from retention.scan import scan_blocks
from retention.session import Session


@dataclass(frozen=True, slots=True)
class Selection:
    """The options. ``tokens``: the ids of a prefix; ``model``: whose spaces they are looked for in, where neither space
    nor tenant says it. ``from_start``: the blocks before the prefix's last go, too.
    """

    space: str | None = None
    tenant: str | None = None
    prefix: str | None = None
    tokens: tuple[int, ...] | None = None
    model: str | None = None
    from_start: bool = False

    def __post_init__(self) -> None:
        named = sum(choice is not None for choice in (self.space, self.tenant, self.prefix))
        if self.tokens is None and named != 1:
            raise SelectionInvalid("give exactly one of --space, --tenant, --prefix, --tokens and --text")
        if self.tokens is not None and (named > 1 or self.prefix is not None):
            raise SelectionInvalid("with --tokens or --text go --space or --tenant, exactly one of them or none")
        if self.tokens is None and (self.model is not None or self.from_start):
            raise SelectionInvalid("--model and --from-start go with --tokens or --text")

    @property
    def by_prefix(self) -> bool:
        """Whether it is less than whole spaces."""
        return self.prefix is not None or self.tokens is not None


@dataclass(frozen=True, slots=True)
class _Prefix:
    """A prefix in one space. ``also``: keys of its earlier blocks that go with it."""

    space_id: SpaceId
    root: BlockKey
    also: frozenset[BlockKey] = frozenset()


def purge_of(session: Session, selection: Selection) -> Callable[[bool], Purge]:
    """The chosen purge as a function of ``apply``. Raises before anything is removed when the choice is wrong."""
    store, deadline_s = session.store, session.deadline_s
    if selection.prefix is not None:
        root = parse_key(selection.prefix)
        return lambda apply: purge_prefix(store, root, apply=apply, deadline_s=deadline_s)
    spaces = _spaces_of(selection, store.spaces(deadline_s=deadline_s))
    if selection.tokens is None:
        return lambda apply: purge_spaces(store, tuple(spaces), apply=apply, deadline_s=deadline_s)
    prefixes = _prefixes_of(selection, spaces)
    return lambda apply: _purge_prefixes(session, prefixes, apply=apply)


def order_of(session: Session, selection: Selection, author: str, reason: str, *, overwrite: bool) -> PurgeOrder:
    """What the chosen purge orders of the nodes that answer. Raises SelectionInvalid or NothingMatched."""
    store, deadline_s = session.store, session.deadline_s
    spaces: tuple[SpaceId, ...]
    keys: tuple[BlockKey, ...] | None = None
    if selection.prefix is not None:
        root = parse_key(selection.prefix)
        home = home_of(store, root, deadline_s)
        spaces, keys = (home,), _keys_of(session, (_Prefix(home, root),))
    else:
        known = _spaces_of(selection, _known_spaces(session))
        spaces = tuple(known)
        if selection.tokens is not None:
            keys = _keys_of(session, _prefixes_of(selection, known))
    now_s = int(session.clock.now_s())
    return PurgeOrder(secrets.token_hex(16), spaces, keys, now_s, author, reason, selection.tenant or "", overwrite)


def _spaces_of(selection: Selection, known: Mapping[SpaceId, Space]) -> dict[SpaceId, Space]:
    """The spaces that a selection names, of those that are known."""
    chosen: Iterable[SpaceId] = known
    if selection.tenant is not None:
        chosen = spaces_of_tenant(selection.tenant, known)
    elif selection.space is not None:
        chosen = (match_space(selection.space, known),)
    spaces = {space_id: known[space_id] for space_id in chosen}
    return spaces if selection.tokens is None else spaces_of_model(selection.model, spaces)


def _prefixes_of(selection: Selection, spaces: Mapping[SpaceId, Space]) -> tuple[_Prefix, ...]:
    """What the token ids of a selection name in each space."""
    if not spaces:
        raise NothingMatched("no space is registered")
    roots = roots_of(selection.tokens or (), spaces)
    return tuple(
        _Prefix(space_id, root.key, frozenset(root.before) if selection.from_start else frozenset())
        for space_id, root in roots.items()
    )


def _purge_prefixes(session: Session, prefixes: tuple[_Prefix, ...], *, apply: bool) -> Purge:
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
        raise NothingMatched("no stored block is of this prefix, or extends it")
    return Purge(
        apply,
        {space_id: count for part in parts for space_id, count in part.blocks.items()},
        sum(part.payload_bytes for part in parts),
        sum(part.loose_blocks for part in parts),
    )


def _keys_of(session: Session, prefixes: tuple[_Prefix, ...]) -> tuple[BlockKey, ...]:
    """The keys of all that prefixes cover. Raises NothingMatched, or SelectionInvalid if there are too many."""
    keys: list[BlockKey] = []
    for prefix in prefixes:
        blocks = scan_blocks(session.store, prefix.space_id, deadline_s=session.deadline_s)
        try:
            keys += plan_prefix(prefix.root, blocks, prefix.also).keys
        except NothingMatched:
            continue
    if not keys:
        raise NothingMatched("no stored block is of this prefix, or extends it")
    if len(keys) > PURGE_KEYS_MAX:
        raise SelectionInvalid(
            f"{len(keys)} blocks extend this prefix; a purge with proof names {PURGE_KEYS_MAX} at most: choose a "
            "longer prefix, or purge the space"
        )
    return tuple(keys)


def _known_spaces(session: Session) -> dict[SpaceId, Space]:
    """The spaces of every node that answers. Raises the error of one if none does."""
    found: dict[SpaceId, Space] = {}
    failures: list[StoreError] = []
    with session.each_node() as nodes:
        for node in nodes.values():
            try:
                found |= node.spaces(deadline_s=session.deadline_s / (2 * len(nodes)))
            except StoreError as error:
                failures.append(error)
        if len(failures) == len(nodes):
            raise failures[0]
    return found
