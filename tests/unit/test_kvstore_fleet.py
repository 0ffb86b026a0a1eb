"""The nodes as one: what is asked of which."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.fleet import CALL_BYTES, Fleet
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


def test_a_batch_for_a_node_on_this_host_is_cut_only_for_those_who_want_it() -> None:
    """One that is elsewhere is sent over all connections in any case."""
    placement = Placement(["here", "there"])
    addresses = (Address("here", path="/nowhere"), Address("there", host="nowhere", port=1))
    links = [NodeLink(address, new_hello(None, None), 2) for address in addresses]
    names = TokenChain(SpaceId(bytes(32)), 1, range(320)).names
    jobs: list[tuple[int, int]] = []

    def work(node: int, positions: Sequence[int]) -> None:
        jobs.append((node, len(positions)))

    with ThreadPoolExecutor(1) as executor:
        fleet = Fleet(links, placement, executor)
        owned = {node: len(positions) for node, positions in fleet.group(names).items()}
        sizes = [2 * CALL_BYTES // min(owned.values())] * len(names)
        counts = {}
        for cut in (True, False):
            jobs.clear()
            for job in fleet.spread(work, names, sizes, cut_where_shared=cut):
                job()
            counts[cut] = [sum(node == each for node, _ in jobs) for each in (0, 1)]
            assert {each: sum(count for node, count in jobs if node == each) for each in (0, 1)} == owned
    assert counts[True][0] > counts[False][0] == 1
    assert counts[True][1] == counts[False][1] > 1
