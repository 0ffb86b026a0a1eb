"""The attach bench in figures: medians and ratios of samples, and the bars that they are to reach.

Owns arithmetic and bars. Pure. Invariants: a ratio compares answers to the same prompt, and is the median over prompts;
a bar that could not be compared is listed as such.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from ops.bench.attach_runs import PAIRS_MIN, Phase, Sample
from ops.bench.attach_ways import BARE, REPRISE, WAYS
from ops.bench.bars import Standing, standing

RESTART_TOKENS, RESTART_SHARE_MAX = 4096, 0.25
RESTART_BAR = f"TTFT after a restart over cold, {RESTART_TOKENS} tokens"
TAX_BAR, TAX_MAX = "store tax: cold TTFT over no connector's", 1.05
TIER_LOAD_MIN, TIER_STORE_MIN, TIER_STEP_MAX = 1.3, 1.0, 1.0
REPRISE_TIER, FS_TIER = "reprise", "fs"


@dataclass(frozen=True, slots=True)
class Row:
    """One way at one length of prompt. Seconds are medians to the first token; None where nothing was measured.

    ``tax``: cold, over no connector, with its least and its most; ``tax_cpu``: the same of the process's CPU seconds,
    which neighbours disturb less.
    ``restarted``, ``chilled``: after a restart, over cold with no connector.
    ``hit``: tokens, after a restart, the least. ``device_bytes``: read from a device for a chilled one.
    """

    way: str
    nominal: int
    tokens: int
    prompts: int
    cold_s: float | None = None
    tax: float | None = None
    tax_least: float | None = None
    tax_most: float | None = None
    tax_cpu: float | None = None
    restart_s: float | None = None
    restarted: float | None = None
    chilled_s: float | None = None
    chilled: float | None = None
    hit: int = 0
    device_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Replayed:
    """One way over the replay. ``hit_rate``: tokens not computed, of all; ``external``: those that a connector gave."""

    way: str
    requests: int
    tokens: int
    hit_rate: float
    external_rate: float
    ttft_s: float
    ttft_p50_s: float


@dataclass(frozen=True, slots=True)
class Differing:
    """Greedy tokens of one way that differ from those of no connector, of so many compared."""

    way: str
    tokens: int
    compared: int


def rows_of(samples: Sequence[Sample]) -> list[Row]:
    """Every way at every length, in order of lengths, then of ways."""
    keys = {(one.nominal, one.way) for one in samples if one.phase != "replay"}
    bare = {one.prompt: one for one in samples if one.way == BARE and one.phase == "cold"}
    return [
        _row(way, nominal, samples, bare) for nominal, way in sorted(keys, key=lambda key: (key[0], WAYS.index(key[1])))
    ]


def _row(way: str, nominal: int, samples: Sequence[Sample], bare: Mapping[int, Sample]) -> Row:
    mine: dict[Phase, list[Sample]] = {
        phase: [one for one in samples if (one.way, one.nominal, one.phase) == (way, nominal, phase)]
        for phase in ("cold", "restart", "chilled")
    }
    again = mine["restart"] + mine["chilled"]
    taxes = [] if way == BARE else _over(mine["cold"], bare)
    return Row(
        way=way,
        nominal=nominal,
        tokens=max((one.tokens for one in mine["cold"]), default=0),
        prompts=len(mine["cold"]),
        cold_s=_median(one.ttft_s for one in mine["cold"]),
        tax=_median(taxes),
        tax_least=min(taxes, default=None),
        tax_most=max(taxes, default=None),
        tax_cpu=None if way == BARE else _median(_over(mine["cold"], bare, "ttft_cpu_s")),
        restart_s=_median(one.ttft_s for one in mine["restart"]),
        restarted=_median(_over(mine["restart"], bare)),
        chilled_s=_median(one.ttft_s for one in mine["chilled"]),
        chilled=_median(_over(mine["chilled"], bare)),
        hit=min((one.hit for one in again), default=0),
        device_bytes=round(_median(one.device_bytes for one in mine["chilled"]) or 0),
    )


def _over(samples: Iterable[Sample], others: Mapping[int, Sample], figure: str = "ttft_s") -> list[float]:
    """A figure of each answer over that of the other's to the same prompt."""
    pairs = [(getattr(one, figure), getattr(others[one.prompt], figure)) for one in samples if one.prompt in others]
    return [mine / theirs for mine, theirs in pairs if theirs]


def _median(values: Iterable[float]) -> float | None:
    found = list(values)
    return median(found) if found else None


def tax_of(samples: Sequence[Sample], way: str) -> float | None:
    """Seconds to the first token of prompts that are new, and saved meanwhile, over those with no connector.

    None of fewer than PAIRS_MIN prompts: a neighbour moves one by more than the bar is wide.
    """
    bare = {one.prompt: one for one in samples if one.way == BARE and one.phase == "cold"}
    taxes = _over((one for one in samples if one.way == way and one.phase == "cold"), bare)
    return median(taxes) if len(taxes) >= PAIRS_MIN else None


def replayed_of(samples: Sequence[Sample]) -> list[Replayed]:
    """Every way over the requests of the replay that all ways answered."""
    turns = [one for one in samples if one.phase == "replay"]
    names = sorted({one.way for one in turns}, key=WAYS.index)
    answered = (
        set.intersection(*({one.prompt for one in turns if one.way == name} for name in names)) if names else set()
    )
    return [_replayed(name, [one for one in turns if one.way == name and one.prompt in answered]) for name in names]


def _replayed(way: str, turns: Sequence[Sample]) -> Replayed:
    tokens = sum(one.tokens for one in turns)
    return Replayed(
        way=way,
        requests=len(turns),
        tokens=tokens,
        hit_rate=sum(one.hit for one in turns) / max(tokens, 1),
        external_rate=sum(one.external for one in turns) / max(tokens, 1),
        ttft_s=sum(one.ttft_s for one in turns),
        ttft_p50_s=_median(one.ttft_s for one in turns) or 0.0,
    )


def differing_of(samples: Sequence[Sample]) -> list[Differing]:
    """Answers beside those of vLLM with no connector to the same prompt, cold; of the replay, to the same request."""
    wanted = {(one.phase == "replay", one.prompt): one.answer for one in samples if one.way == BARE}
    found = []
    for name in sorted({one.way for one in samples if one.way != BARE}, key=WAYS.index):
        pairs = [
            (one.answer, wanted[one.phase == "replay", one.prompt])
            for one in samples
            if one.way == name and (one.phase == "replay", one.prompt) in wanted
        ]
        differ = sum(mine != theirs for answer, other in pairs for mine, theirs in zip(answer, other, strict=True))
        found.append(Differing(name, differ, sum(len(answer) for answer, _ in pairs)))
    return found


def standings(
    samples: Sequence[Sample], tier: Mapping[str, Mapping[str, float]], *, is_quick: bool = False
) -> list[Standing]:
    """Every bar of a run. ``tier``: figures of tiers by name, empty if not measured; of a quick run no time counts."""
    again = [row.restarted for row in rows_of(samples) if (row.way, row.nominal) == (REPRISE, RESTART_TOKENS)]
    mine = tier.get(REPRISE_TIER, {})
    differ = [float(one.tokens) for one in differing_of(samples) if one.way == REPRISE and one.compared]
    return [
        standing(RESTART_BAR, RESTART_SHARE_MAX, again[0] if again else None, at_least=False),
        standing(TAX_BAR, TAX_MAX, None if is_quick else tax_of(samples, REPRISE), at_least=False),
        standing("differing greedy tokens", 0.0, differ[0] if differ else None, at_least=False),
        standing("tier: loads over fs", TIER_LOAD_MIN, mine.get("load_over_fs"), at_least=True),
        standing("tier: stores over fs", TIER_STORE_MIN, mine.get("store_over_fs"), at_least=True),
        standing("tier: scheduler time per step over fs", TIER_STEP_MAX, _tier_ratio(tier, "step_us"), at_least=False),
    ]


def _tier_ratio(tier: Mapping[str, Mapping[str, float]], figure: str) -> float | None:
    mine, theirs = (tier.get(name, {}).get(figure) for name in (REPRISE_TIER, FS_TIER))
    return mine / theirs if mine is not None and theirs else None


def to_json(samples: Sequence[Sample]) -> dict[str, Any]:
    """All figures of the samples."""
    return {
        "lengths": [asdict(row) for row in rows_of(samples)],
        "replay": [asdict(row) for row in replayed_of(samples)],
        "differing": [asdict(row) for row in differing_of(samples)],
    }
