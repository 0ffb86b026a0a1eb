"""What the demo's rows show, and whether it is as it should be.

Owns the table and the verdict. Pure: rows in, words out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.box import SIMPLE
from rich.table import Table

from ops.answer import Answer

HIT_SHARE_MIN = 0.9
"""Of the prompt, on a turn whose prefix was computed before."""
TTFT_SHARE_MAX = 1 / 3
"""Of the cold time to first token, on turn 2."""


@dataclass(frozen=True, slots=True)
class Row:
    """One turn: with the cache, and the same request without."""

    round_name: str
    turn: int
    must_hit: bool
    cached: Answer
    uncached: Answer

    @property
    def hit_share(self) -> float:
        usage = self.cached.usage
        return float(usage["prompt_cache_hit_tokens"]) / float(usage["prompt_tokens"])

    @property
    def exact(self) -> bool:
        return bool(self.cached.reuse.get("exact", True))

    @property
    def equal(self) -> bool:
        return self.cached.text == self.uncached.text


def faults(rows: Sequence[Row]) -> list[str]:
    """What the rows show that must not be, in words; empty when all is well."""
    cold_s = rows[0].cached.ttft_s if rows else 0.0
    found: list[str] = []
    for row in rows:
        name, usage = f"{row.round_name}, turn {row.turn}", row.cached.usage
        total = usage["prompt_cache_hit_tokens"] + usage["prompt_cache_miss_tokens"]
        if total != usage["prompt_tokens"]:
            found.append(f"{name}: hit and miss add up to {total}, the prompt has {usage['prompt_tokens']} tokens")
        if row.must_hit and row.hit_share < HIT_SHARE_MIN:
            found.append(f"{name}: only {row.hit_share:.0%} of the prompt hit, expected {HIT_SHARE_MIN:.0%}")
        if not row.must_hit and row is rows[0] and usage["prompt_cache_hit_tokens"]:
            found.append(f"{name}: the first request of a run must be cold, but {usage['prompt_cache_hit_tokens']} hit")
        if row.turn == 2 and row.must_hit and row.cached.ttft_s > cold_s * TTFT_SHARE_MAX:
            found.append(f"{name}: first token after {row.cached.ttft_s:.2f} s, cold it took {cold_s:.2f} s")
        if row.exact and not row.equal:
            found.append(f"{name}: the answer should equal the one with the cache off, but differs")
        if row.uncached.usage["prompt_cache_hit_tokens"]:
            found.append(f"{name}: a request with the cache off hit")
    return found


def table(rows: Sequence[Row]) -> Table:
    """The rows for people."""
    result = Table(
        title="The same conversation with the cache and without; times as the client sees them",
        caption="With the cache off the decode worker computes the prompt again too: only the store hands state over.",
        box=SIMPLE,
        padding=0,
    )
    counts = ("turn", "prompt", "hit", "miss", "replayed")
    times = ("TTFT s", "tok/s", "off: TTFT", "off: tok/s")
    for head in ("round", *counts, "way", "", *times, "answers"):
        result.add_column(head, justify="left" if head in ("round", "way", "", "answers") else "right", no_wrap=True)
    before = ""
    for row in rows:
        usage, reuse = row.cached.usage, row.cached.reuse
        result.add_row(
            row.round_name if row.round_name != before else "",
            str(row.turn),
            *(str(usage[key]) for key in ("prompt_tokens", "prompt_cache_hit_tokens", "prompt_cache_miss_tokens")),
            str(reuse.get("replayed_tokens", 0)),
            str(reuse.get("way", "?")),
            "exact" if row.exact else "bounded",
            f"{row.cached.ttft_s:.2f}",
            f"{row.cached.tokens_per_s:.1f}",
            f"{row.uncached.ttft_s:.2f}",
            f"{row.uncached.tokens_per_s:.1f}",
            "equal" if row.equal else ("DIFFER" if row.exact else "differ, as bounded may"),
        )
        before = row.round_name
    return result
