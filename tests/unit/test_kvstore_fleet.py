"""The nodes as one: what is asked of which."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.fleet import Fleet
from kvstore.framing import Address
from kvstore.keys import SpaceId, TokenChain
from kvstore.link import NodeLink, new_hello
from kvstore.placement import Placement


@given(st.integers(1, 4), st.integers(0, 90), st.integers(0, 90))
@settings(max_examples=60, deadline=None)
def test_names_of_a_chain_are_grouped_as_those_of_a_list(nodes: int, first: int, stop: int) -> None:
    """Stripe by stripe or name by name: each node is asked the same, and every name is asked of its route's owner."""
    names = TokenChain(SpaceId(bytes(32)), 1, range(80)).names[first:stop]
    placement = Placement([f"node {at}" for at in range(nodes)])
    links = [NodeLink(Address(name, path="/nowhere"), new_hello(None, None), 1) for name in placement.names]
    with ThreadPoolExecutor(1) as executor:
        fleet = Fleet(links, placement, executor)
        groups = {node: list(positions) for node, positions in fleet.group(names).items()}
        assert groups == {node: list(positions) for node, positions in fleet.group(list(names)).items()}
    assert sorted(at for positions in groups.values() for at in positions) == list(range(len(names)))
    for node, positions in groups.items():
        assert {placement.owner(names[at].route) for at in positions} == {node}
