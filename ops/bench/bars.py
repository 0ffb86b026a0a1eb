"""The bars of the store bench: what was asked, what was reached, and by how much it falls short.

Owns the bars that concern a whole run; those of one case stand with the case. Pure. Invariant: a bar that could not be
compared is listed as such, never left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ops.bench.measure import Measured, Verdict

SMALL_SHARE_MIN = 0.6
PRESENCE_BYTES_MAX = 40.0
SOAK_GROWTH_MAX = 1.05
"""Of resident memory over a soak, the second half beside the first: what an allocator moves by itself."""
MANY_BLOCKS_MIN = 100_000
"""With fewer, what a daemon takes anyhow would count as theirs."""
MANY = "many small blocks"
SOAK = "soak"
SMALL, WHOLE = 1 << 16, 1 << 20


@dataclass(frozen=True, slots=True)
class Standing:
    """One bar. ``met`` is None where there was nothing to compare with; ``short`` is the part that lacks, 0 if met."""

    what: str
    bar: str
    reached: float | None
    met: bool | None
    short: float = 0.0

    @property
    def word(self) -> str:
        if self.met is None:
            return "not compared"
        return "met" if self.met else f"short by {self.short:.0%}"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def standings(
    measured: Sequence[Measured], memory: Mapping[str, Mapping[str, float]], label: Mapping[int, str]
) -> list[Standing]:
    """Every bar of a run. ``label``: what each case is called, by its position."""
    rows = [_of_verdict(label[at], verdict) for at, case in enumerate(measured) for verdict in case.verdicts]
    for name, share in small_blocks(measured).items():
        rows.append(standing(f"{name}: 64 KiB beside 1 MiB", SMALL_SHARE_MIN, share, at_least=True))
    return [*rows, *_of_memory(memory)]


def _of_memory(memory: Mapping[str, Mapping[str, float]]) -> Iterator[Standing]:
    if MANY in memory and memory[MANY]["blocks"] >= MANY_BLOCKS_MIN:
        reached = memory[MANY]["presence_bytes_per_block"]
        yield standing("memory: presence, bytes a block", PRESENCE_BYTES_MAX, reached, at_least=False)
    if SOAK in memory:
        yield standing("memory: resident over a soak", SOAK_GROWTH_MAX, memory[SOAK]["growth"], at_least=False)


def small_blocks(measured: Sequence[Measured]) -> dict[str, float]:
    """Rate of 64 KiB blocks over that of 1 MiB blocks, by case."""
    rates = {(case.name, case.size_bytes): case.store.rate for case in measured if case.batch > 1}
    return {
        name: rate / rates[name, WHOLE]
        for (name, size), rate in rates.items()
        if size == SMALL and (name, WHOLE) in rates
    }


def _of_verdict(what: str, verdict: Verdict) -> Standing:
    if verdict.reached is None:
        return Standing(what, verdict.bar.text, None, None)
    at_least = verdict.bar.figure == "rate"
    return Standing(
        what, verdict.bar.text, verdict.reached, verdict.met, _short(verdict.bar.bound, verdict.reached, at_least)
    )


def standing(what: str, bound: float, reached: float | None, *, at_least: bool) -> Standing:
    """One bar and what was reached, None if nothing was."""
    text = f"{'>=' if at_least else '<='} {bound:g}"
    if reached is None:
        return Standing(what, text, None, None)
    met = reached >= bound if at_least else reached <= bound
    return Standing(what, text, reached, met, _short(bound, reached, at_least))


def _short(bound: float, reached: float, at_least: bool) -> float:
    if not bound:
        return float(reached > 0 and not at_least)
    return max(1 - reached / bound if at_least else reached / bound - 1, 0.0)
