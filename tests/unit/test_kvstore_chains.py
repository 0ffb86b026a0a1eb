"""The order of rewriting: a permutation in which prefixes are whole."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvstore.chains import in_chain_order

LINK = st.tuples(st.binary(min_size=1, max_size=1), st.binary(min_size=1, max_size=1))


def test_interleaved_chains_are_told_apart() -> None:
    links = [(b"a", b""), (b"x", b""), (b"b", b"a"), (b"y", b"x"), (b"c", b"b")]
    assert in_chain_order(links) == [0, 2, 4, 1, 3]


def test_a_child_that_lies_before_its_parent_comes_after_it() -> None:
    assert in_chain_order([(b"b", b"a"), (b"z", b""), (b"a", b"")]) == [1, 2, 0]


def test_a_fork_is_followed_to_its_end_before_the_next() -> None:
    links = [(b"a", b""), (b"b", b"a"), (b"c", b"a"), (b"d", b"b"), (b"e", b"c")]
    assert in_chain_order(links) == [0, 1, 3, 2, 4]


@given(st.lists(LINK, max_size=40))
def test_nothing_is_lost_or_told_twice(links: list[tuple[bytes, bytes]]) -> None:
    """Whatever the links say: circles, keys that come twice, blocks that are their own parents."""
    assert sorted(in_chain_order(links)) == list(range(len(links)))
