"""Tensor-parallel ranks whose pages differ in the store agree on what they load, by SGLang's own collectives."""

from __future__ import annotations

from pathlib import Path

from tests.engines.sglang import ranks
from tests.engines.sglang.rig import PAGE
from tests.support.store_process import StoreProcess


def test_ranks_agree_on_a_length_that_each_of_them_has(store: StoreProcess, tmp_path: Path) -> None:
    """One lost a page in between: both load the pages in front of it, each its own, and neither waits for more.

    Windows end at 2 and 5 pages on one, at 2 and 4 on the other: the lesser of both longest is legal on one rank only,
    so both load 2. Where both hold the same bytes, the first one stores them, once, for both.
    """
    told = ranks.run(store.address, str(tmp_path / "meeting"))
    assert [said["pages_that_all_ranks_hold"] for said in told] == [(4, 4 * PAGE, True), (0, 4 * PAGE, True)]
    for said in told:
        assert said["a_page_that_one_rank_lost"] == (3 * PAGE, True)
        assert said["windows_that_end_at_different_places"] == (2 * PAGE, 2)
