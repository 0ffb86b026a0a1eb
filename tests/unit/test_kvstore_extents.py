"""The plan of reading many records: complete, in order of place, and bounded."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvstore import extents, limits
from kvstore.extents import ExtentStatus, Plan, Rows
from kvstore.record import HEADER_BYTES


def rows_at(places: Sequence[tuple[int, int]]) -> Rows:
    """Lent rows at (file, offset)."""
    return np.array([(7, offset, 3, file, ExtentStatus.LENT, 0, b"") for file, offset in places], extents.ROW)


def plan_of(places: Sequence[tuple[int, int]], sizes: Sequence[int]) -> Plan:
    return extents.plan(rows_at(places), np.arange(len(places)), sizes)


def test_neighbours_are_read_together() -> None:
    """In order of place, over padding only, within one file."""
    plan = plan_of([(0, 16_384), (0, 4096), (1, 4096), (0, 61_440), (0, 4096)], [10_000] * 5)
    assert plan.order == [1, 4, 0, 3, 2]
    assert plan.runs == [0, 1, 3, 4, 5]
    assert plan.gaps == [0, 0, 16_384 - 4096 - 256 - 10_000, 0, 0]
    assert plan.run_bytes(1) == 16_384 - 4096 + 256 + 10_000


def test_no_more_is_read_at_once_than_stays_in_cache() -> None:
    plan = plan_of([(0, 4096 + at * 16_384) for at in range(100)], [16_000] * 100)
    assert plan.runs == [0, 100]
    assert plan.steps(across_runs=False) == [(0, 65), (65, 100)]
    tiny = plan_of([(0, 4096 * at) for at in range(1024)], [1] * 1024)
    assert max(end - begin for begin, end in tiny.steps(across_runs=True)) <= extents.STEP_BLOCKS


BLOCKS = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 40), st.integers(1, 40_000)), max_size=40)


@given(BLOCKS)
def test_every_block_is_read_once_whatever_the_places(blocks: list[tuple[int, int, int]]) -> None:
    """Overlaps and repeats included: steps cover the order, and what the runs send is what the steps receive."""
    sizes = [size for _, _, size in blocks]
    plan = plan_of([(file, 4096 * page) for file, page, _ in blocks], sizes)
    assert sorted(plan.order) == list(range(len(blocks)))
    if not blocks:
        assert plan.total_bytes == 0
        return
    sent = [plan.run_bytes(run) for run in range(len(plan.runs) - 1)]
    assert sum(sent) == plan.total_bytes
    for across_runs in (True, False):
        steps = plan.steps(across_runs=across_runs)
        assert [at for begin, end in steps for at in range(begin, end)] == list(range(len(blocks)))
    for begin, end in plan.steps(across_runs=False):
        span = plan.offsets[end - 1] + HEADER_BYTES + plan.sizes[end - 1] - plan.offsets[begin]
        parts = sum(plan.sizes[begin:end]) + sum(plan.gaps[begin + 1 : end]) + HEADER_BYTES * (end - begin)
        assert span == parts <= extents.STEP_BYTES + limits.PAYLOAD_BYTES_MAX
