"""Numbers name prefixes, as keys do; a stripe has one owner."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvstore.limits import STRIPE_BLOCKS
from kvstore.placement import Placement
from retention.trace import Prompt, runs_of
from retention.workload import Prefixes, make_workload

CONTENTS = st.lists(st.integers(0, 6) | st.integers(20, 24), max_size=12)


def expand(runs: list[tuple[int, int]]) -> list[int]:
    return [number for first, count in runs for number in range(first, first + count)]


@given(st.lists(st.tuples(st.integers(0, 1), CONTENTS | st.integers(0, 20).map(lambda n: list(range(n)))), max_size=20))
def test_equal_numbers_are_equal_prefixes(prompts: list[tuple[int, list[int]]]) -> None:
    """Numbering is a one-to-one map of (scope, content up to the block's end), without gaps."""
    prefixes = Prefixes()
    meant: dict[int, tuple[int, tuple[int, ...]]] = {}
    for scope, content in prompts:
        numbers = expand(prefixes.number(scope, runs_of(content)))
        assert len(numbers) == len(content)
        for at, number in enumerate(numbers, 1):
            assert meant.setdefault(number, (scope, tuple(content[:at]))) == (scope, tuple(content[:at]))
    assert len(set(meant.values())) == len(meant) == prefixes.count
    assert set(meant) == set(range(prefixes.count))


def test_a_conversation_is_one_run() -> None:
    """Turns of one conversation, read beside another's, stay one run each: replay is then a few vector operations."""
    turns = [(scope, at, [*range(4 * at)]) for at in range(1, 9) for scope in (1, 2)]
    prompts = [Prompt(float(at), scope, 64 * len(content), runs_of(content)) for scope, at, content in turns]
    workload = make_workload([(prompt, 1) for prompt in prompts], 64)
    assert all(len(request.runs) == 1 for request in workload.requests)
    assert (workload.blocks, workload.accesses, workload.span_s) == (64, 2 * 4 * 36, 7.0)


def test_a_stripe_has_one_owner_and_nodes_share_the_rest() -> None:
    """All blocks of a stripe lie with its first; a branch in mid-stripe stays there; every node gets its part."""
    trunk = list(range(200))
    branch = [*range(40), *range(1000, 1100)]
    prompts = [Prompt(0.0, 0, 64 * 200, runs_of(trunk)), Prompt(1.0, 0, 64 * 140, runs_of(branch))]
    prompts += [Prompt(2.0, scope, 64 * 160, ((0, 160),)) for scope in range(1, 40)]
    workload = make_workload([(prompt, 1) for prompt in prompts], 64)
    owners = workload.owners(Placement(["a", "b", "c"]))
    for request in workload.requests:
        held = owners[request.blocks()]
        assert all(len(set(held[at : at + STRIPE_BLOCKS])) == 1 for at in range(0, len(held), STRIPE_BLOCKS))
    shares = np.bincount(owners, minlength=3) / workload.blocks
    assert all(0.25 < share < 0.42 for share in shares)
    assert any(one != two for one, two in pairwise(owners[::STRIPE_BLOCKS].tolist()))


def test_an_incomplete_last_block_can_be_left_out() -> None:
    """A prompt of 100 tokens has one whole block of 64."""
    prompts = [
        (Prompt(0.0, 0, 100, ((5, 2),)), 1),
        (Prompt(1.0, 0, 128, ((5, 2),)), 1),
        (Prompt(2.0, 0, 9, ((5, 1),)), 1),
    ]
    kept = [len(request.blocks()) for request in make_workload(prompts, 64, whole_blocks=True).requests]
    assert kept == [1, 2, 0]
    assert [len(request.blocks()) for request in make_workload(prompts, 64).requests] == [2, 2, 1]
