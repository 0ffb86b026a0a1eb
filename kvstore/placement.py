"""Which node holds a stripe: rendezvous hashing of a route key over a static list of nodes.

Pure. Owns the score of (node, route) and nothing else. Does not know addresses, connections or health. Invariants: the
order depends on the nodes' names and the route alone, not on the order in which the nodes are listed; adding a node
moves only what the new node now owns, removing one moves only what it owned.
"""

from __future__ import annotations

from collections.abc import Sequence

from blake3 import blake3

_CONTEXT = "reprise-kv 2026 node placement"


class Placement:
    """A fixed list of node names, and the order in which they are asked for a route."""

    __slots__ = ("_seeds", "names")

    def __init__(self, names: Sequence[str]) -> None:
        if not names:
            raise ValueError("placement needs at least one node")
        if len(set(names)) != len(names):
            raise ValueError("two nodes have one name")
        self.names = tuple(names)
        self._seeds = tuple(blake3(name.encode(), derive_key_context=_CONTEXT).digest() for name in names)

    def owner(self, route: bytes) -> int:
        """Index of the node that holds the stripe whose first key is ``route``."""
        if len(self._seeds) == 1:
            return 0
        return max(range(len(self._seeds)), key=lambda at: self._score(at, route))

    def order(self, route: bytes) -> tuple[int, ...]:
        """Indices of all nodes, the owner first."""
        return tuple(sorted(range(len(self._seeds)), key=lambda at: self._score(at, route), reverse=True))

    def _score(self, at: int, route: bytes) -> bytes:
        return blake3(route, key=self._seeds[at]).digest(16)
