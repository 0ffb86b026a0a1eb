"""The demo's verdict: a table that shows a fault must say so and fail."""

from __future__ import annotations

from dataclasses import replace
from io import StringIO

import pytest
from rich.console import Console

from ops.answer import Answer
from ops.verdict import Row, faults, table


def answer(hit: int, *, prompt: int = 1000, ttft_s: float = 1.0, text: str = "yes", exact: bool = True) -> Answer:
    usage = {
        "prompt_tokens": prompt,
        "completion_tokens": 3,
        "prompt_cache_hit_tokens": hit,
        "prompt_cache_miss_tokens": prompt - hit,
        "reprise": {"way": "blocks", "exact": exact, "replayed_tokens": 0},
    }
    return Answer(text, usage, "r1", ttft_s, 10.0)


COLD = Row("first", 1, False, answer(0, ttft_s=9.0), answer(0, ttft_s=9.0))
WARM = Row("first", 2, True, answer(960, ttft_s=1.0), answer(0, ttft_s=9.0))


def test_a_cold_turn_and_a_hit_are_well() -> None:
    """Nothing is found where all is as it should be."""
    assert faults([COLD, WARM]) == []


def test_an_approximate_answer_may_differ() -> None:
    """A bounded replay is approximate by design, and says so."""
    assert faults([COLD, replace(WARM, cached=answer(960, text="no", exact=False))]) == []


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        (replace(WARM, cached=answer(800)), "only 80% of the prompt hit"),
        (replace(WARM, cached=answer(960, text="no")), "differs"),
        (replace(WARM, cached=answer(960, ttft_s=3.1)), "first token after 3.10 s"),
        (replace(WARM, uncached=answer(64)), "cache off hit"),
        (replace(WARM, cached=replace(WARM.cached, usage={**WARM.cached.usage, "prompt_tokens": 999})), "add up"),
    ],
)
def test_each_fault_is_named(row: Row, complaint: str) -> None:
    """A turn that did not hit, was slow, wrong, or miscounted fails the run with its reason."""
    assert any(complaint in fault for fault in faults([COLD, row]))


def test_a_warm_first_request_is_a_fault() -> None:
    """The comparison needs a truly cold start."""
    assert any("must be cold" in fault for fault in faults([replace(COLD, cached=answer(64))]))


def test_the_table_shows_every_figure() -> None:
    """A reader sees counts, way, times of both sides, and whether the answers agree."""
    console = Console(width=200, record=True, file=StringIO())
    console.print(table([COLD, WARM]))
    text = console.export_text()
    assert all(word in text for word in ("960", "blocks", "exact", "9.00", "1.00", "10.0", "equal"))
