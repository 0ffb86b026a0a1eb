"""The order in which the survivors of a segment are written anew: prefixes together.

Owns that order, as a pure function. Does not know records or segments. Invariant: every position comes exactly once,
whatever the links say.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TypeVar

Name = TypeVar("Name", bound=Hashable)


def in_chain_order(links: Sequence[tuple[Name, Name]]) -> list[int]:
    """Positions of blocks, given as (key, parent): each one's children follow it, the first of them at once.

    Chains come in the order in which their first blocks were given; what is linked in a circle, which only damage
    does, comes last as it was given.
    """
    keys = {key for key, _ in links}
    children: dict[Name, list[int]] = {}
    for at, (_, parent) in enumerate(links):
        children.setdefault(parent, []).append(at)
    waiting = [at for at, (_, parent) in enumerate(links) if parent not in keys]
    waiting.reverse()
    order: list[int] = []
    while waiting:
        at = waiting.pop()
        order.append(at)
        waiting.extend(reversed(children.pop(links[at][0], [])))
    return [*order, *sorted(set(range(len(links))) - set(order))]
