"""Rendezvous placement: stable, balanced, and moving as little as possible."""

from __future__ import annotations

from collections import Counter

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from kvstore.placement import Placement

ROUTES = [blake3(number.to_bytes(4, "little")).digest() for number in range(4000)]
NODES = st.lists(st.text(min_size=1, max_size=8), min_size=1, max_size=6, unique=True)
ROUTE = st.binary(min_size=32, max_size=32)


@given(nodes=NODES, route=ROUTE, data=st.data())
def test_the_order_of_the_list_does_not_matter(nodes: list[str], route: bytes, data: st.DataObject) -> None:
    shuffled = data.draw(st.permutations(nodes))
    one, other = Placement(nodes), Placement(shuffled)
    assert [nodes[at] for at in one.order(route)] == [shuffled[at] for at in other.order(route)]
    assert one.owner(route) == one.order(route)[0]


@given(nodes=NODES, route=ROUTE, added=st.text(min_size=9, max_size=9))
def test_adding_a_node_moves_only_what_it_now_owns(nodes: list[str], route: bytes, added: str) -> None:
    before = nodes[Placement(nodes).owner(route)]
    after = [*nodes, added][Placement([*nodes, added]).owner(route)]
    assert after in (before, added)


@given(nodes=NODES, route=ROUTE)
def test_removing_a_node_leaves_the_order_of_the_others(nodes: list[str], route: bytes) -> None:
    order = [nodes[at] for at in Placement(nodes).order(route)]
    if len(nodes) > 1:
        rest = [name for name in nodes if name != order[0]]
        assert [rest[at] for at in Placement(rest).order(route)] == order[1:]


def test_stripes_spread_evenly() -> None:
    """Of 4,000 stripes on four nodes each holds a quarter, give or take 4 standard deviations."""
    placement = Placement(["a", "b", "c", "d"])
    shares = Counter(placement.owner(route) for route in ROUTES)
    assert all(abs(share - 1000) < 4 * 27.4 for share in shares.values())
    assert len(shares) == 4


def test_placement_is_pinned() -> None:
    """The owner of a route may never change under the same names: blocks would be lost from sight."""
    placement = Placement(["n0", "n1", "n2"])
    assert [placement.owner(route) for route in ROUTES[:16]] == PINNED


PINNED = [2, 1, 1, 2, 0, 1, 0, 1, 0, 0, 1, 1, 1, 0, 1, 1]


def test_nodes_need_names_of_their_own() -> None:
    with pytest.raises(ValueError, match="at least one"):
        Placement([])
    with pytest.raises(ValueError, match="one name"):
        Placement(["a", "a"])
