"""Asking nodes about one block: what they remember of it, of pins, of policies and of purges.

Owns which questions are asked, and of whom. Does not know what is made of the answers. Invariants: a node that does not
answer hides no other, and is named; all questions together end by the deadline.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from kvstore.account import Memories
from kvstore.errors import StoreError
from kvstore.keys import BlockName, Space, SpaceId
from kvstore.store import Pin, Presence, Store

_SIGHT_SHARE = 0.25
"""Of the deadline: to find the same tokens in other spaces, each node looks through its whole index."""
_OTHER_SHARE = 0.1
_NODES_SHARE = 0.3


def inquire(
    store: Store, nodes: Mapping[str, Store], space_id: SpaceId | None, name: BlockName, *, deadline_s: float
) -> Memories:
    """What is remembered of one block, wherever it lies. ``space_id``: of which space it is, where that is known.

    ``store``: all nodes as one; ``nodes``: each by itself, by name. Raises the error of a node if none answers.
    """
    rest_s = _OTHER_SHARE * deadline_s
    policies = store.policy_history(deadline_s=rest_s)
    sighting = store.sight(None, [name], deadline_s=_SIGHT_SHARE * deadline_s)[0]
    if sighting.block is None and space_id is not None:
        others = store.sight(space_id, [name], deadline_s=_SIGHT_SHARE * deadline_s)[0].other_spaces
        sighting = replace(sighting, other_spaces=others)
    purges = store.purges(deadline_s=rest_s) if sighting.presence == Presence.PURGED else []
    each_s = _NODES_SHARE * deadline_s / (2 * len(nodes))
    pinned = sighting.block is not None and sighting.block.pinned
    spaces: dict[SpaceId, Space] = {}
    pins: dict[Pin, None] = {}
    failed: dict[str, str] = {}
    for node_name, node in nodes.items():
        try:
            spaces |= node.spaces(deadline_s=each_s)
            if pinned:
                found = node.pins(deadline_s=each_s)
                pins |= dict.fromkeys(pin for pin in found if pin.key == name.key)
        except StoreError as error:
            failed[node_name] = f"{type(error).__name__}: {error}"
    return Memories(sighting, tuple(pins), tuple(policies), tuple(purges), spaces, failed)
