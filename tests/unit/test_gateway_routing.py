"""Routing: least work for prefill, least requests and KV for decode, never a worker that must not be used."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from gateway.routing import RUNNING_TOKENS, WorkerView, choose_decode, choose_prefill, prefill_pairs

VIEWS = st.lists(
    st.builds(
        WorkerView,
        url=st.just(""),
        model=st.sampled_from(["m", "n"]),
        space_id=st.sampled_from(["s", "t"]),
        prefills=st.booleans(),
        decodes=st.booleans(),
        usable=st.booleans(),
        queued_pairs=st.floats(0, 1e9),
        running=st.integers(0, 5),
        kv_tokens=st.integers(0, 2000),
        kv_tokens_max=st.integers(1000, 4000),
    ),
    max_size=8,
).map(lambda views: [replace(view, url=f"u{number}") for number, view in enumerate(views)])
EXCLUDED = st.sets(st.sampled_from([f"u{number}" for number in range(8)]))


@given(VIEWS, EXCLUDED, st.booleans())
def test_prefill_has_the_least_work_waiting(views: list[WorkerView], excluded: set[str], decode_follows: bool) -> None:
    """The choice is allowed and no allowed worker has less waiting; none only if none is allowed."""
    spaces = {view.space_id for view in views if view.usable and view.decodes and view.model == "m"}
    allowed = [
        view
        for view in views
        if view.usable and view.prefills and view.model == "m" and view.url not in excluded
        if not decode_follows or view.space_id in spaces
    ]
    chosen = choose_prefill(views, "m", decode_follows=decode_follows, excluded=excluded)
    assert (chosen is None) == (not allowed)
    if chosen is not None:
        assert chosen in allowed
        assert chosen.queued_pairs == min(view.queued_pairs for view in allowed)


@given(VIEWS, EXCLUDED, st.integers(1, 3000))
def test_decode_has_room_and_the_least_burden(views: list[WorkerView], excluded: set[str], tokens: int) -> None:
    """The choice is of the same space; it has room if anyone has; among those it has the least requests and KV."""
    allowed = [
        view
        for view in views
        if view.usable and view.decodes and view.model == "m" and view.space_id == "s" and view.url not in excluded
    ]
    chosen = choose_decode(views, "m", "s", tokens, excluded=excluded)
    assert (chosen is None) == (not allowed)
    if chosen is not None:
        roomy = [view for view in allowed if view.kv_tokens + tokens <= view.kv_tokens_max] or allowed
        assert chosen in roomy
        assert chosen.running * RUNNING_TOKENS + chosen.kv_tokens == min(
            view.running * RUNNING_TOKENS + view.kv_tokens for view in roomy
        )


def test_pairs_grow_with_the_square() -> None:
    """Attention pairs of a cold prompt of n tokens: 1 + 2 + ... + n."""
    assert [prefill_pairs(count) for count in (0, 1, 2, 3, 1000)] == [0, 1, 3, 6, 500_500]
