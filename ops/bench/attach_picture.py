"""A run of the attach bench as a picture: seconds to the first token, store tax, replay, tiers.

Owns the drawing. Does not measure, nor compute more than what it draws. Invariant: what was not measured has an empty
panel that says so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ops.bench import plot
from ops.bench.attach import Report
from ops.bench.attach_figures import FS_TIER, REPRISE_TIER, TAX_MAX, Replayed, Row, replayed_of, rows_of
from ops.bench.attach_ways import BARE, EXAMPLE, REPRISE

COLOURS = {BARE: "#444444", EXAMPLE: "#c1666b", REPRISE: "#0b6e4f"}
PHASES = (
    ("cold_s", "-", "cold"),
    ("restart_s", "--", "after a restart"),
    ("chilled_s", ":", "and the page cache dropped"),
)
TIER_FIGURES = {"store_gb_per_s": "store", "load_gb_per_s": "load", "load_cold_gb_per_s": "load, cold"}
TIER_COLOURS = {REPRISE_TIER: COLOURS[REPRISE], FS_TIER: COLOURS[EXAMPLE]}
OTHER_COLOUR = "#d9a5a7"


def draw(report: Report, path: Path) -> None:
    """Write a PNG. Raises PlotUnavailable, OSError."""
    plot.check()
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = rows_of(report.samples)
    figure, axes = pyplot.subplots(2, 2, figsize=(14, 10), layout="constrained")
    _seconds(axes[0][0], rows)
    _tax(axes[0][1], rows)
    _replay(axes[1][0], replayed_of(report.samples), report.before_restart)
    _tiers(axes[1][1], report.tier)
    figure.suptitle(
        f"vLLM {report.vllm_version}, {report.model}, fp32, engines killed and started again\n"
        f"{report.machine.get('cpu', '')}, {report.machine.get('cpus', '')} CPUs",
        fontsize=12,
    )
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


def _seconds(axis: Any, rows: Sequence[Row]) -> None:
    _title(axis, "seconds to the first token", bool(rows))
    for way, colour in COLOURS.items():
        for field, style, said in PHASES:
            points = [(row.tokens, getattr(row, field)) for row in rows if row.way == way and getattr(row, field)]
            if points:
                axis.plot(*zip(*points, strict=True), style, color=colour, marker="o", label=f"{way}, {said}")
    axis.set(xlabel="tokens of the prompt", yscale="log")
    axis.grid(visible=True, which="both", linewidth=0.3)
    if axis.lines:
        axis.legend(fontsize=8)


def _tax(axis: Any, rows: Sequence[Row]) -> None:
    taxed = [row for row in rows if row.tax is not None]
    _title(axis, "a cold prompt, saved meanwhile: time over no connector (median, least..most)", bool(taxed))
    for way in (EXAMPLE, REPRISE):
        points = [(row.tokens, row.tax, row.tax_least, row.tax_most) for row in taxed if row.way == way]
        if points:
            tokens, tax, least, most = zip(*points, strict=True)
            below = [middle - low for middle, low in zip(tax, least, strict=True)]
            above = [high - middle for middle, high in zip(tax, most, strict=True)]
            axis.errorbar(tokens, tax, yerr=[below, above], color=COLOURS[way], marker="o", capsize=4, label=way)
    axis.axhline(1.0, color=COLOURS[BARE], linewidth=0.8)
    axis.axhline(TAX_MAX, color=COLOURS[BARE], linewidth=0.8, linestyle=":", label=f"the bar, {TAX_MAX}")
    axis.set(xlabel="tokens of the prompt")
    axis.grid(visible=True, linewidth=0.3)
    axis.legend(fontsize=8)


def _replay(axis: Any, rows: Sequence[Replayed], before_restart: int) -> None:
    _title(axis, f"replay, restart after {before_restart} requests: tokens not computed, %", bool(rows))
    names = [row.way for row in rows]
    colours = [COLOURS[name] for name in names]
    total = axis.bar(names, [100 * row.hit_rate for row in rows], color=colours, alpha=0.4)
    axis.bar(names, [100 * row.external_rate for row in rows], color=colours, label="from a connector")
    axis.bar_label(total, [f"{row.hit_rate:.1%}\n{row.ttft_s:.0f} s in all" for row in rows], fontsize=9)
    axis.margins(y=0.2)
    axis.grid(visible=True, axis="y", linewidth=0.3)


def _tiers(axis: Any, tiers: Mapping[str, Mapping[str, float]]) -> None:
    _title(axis, "tiers of vLLM's offloading: GB/s", bool(tiers))
    width = 0.8 / max(len(tiers), 1)
    for number, (name, figures) in enumerate(tiers.items()):
        places = [at + width * number for at in range(len(TIER_FIGURES))]
        heights = [figures.get(figure, 0.0) for figure in TIER_FIGURES]
        bars = axis.bar(places, heights, width, color=TIER_COLOURS.get(name, OTHER_COLOUR), label=name)
        axis.bar_label(bars, fmt="%.1f", fontsize=8)
    axis.set_xticks([at + 0.4 - width / 2 for at in range(len(TIER_FIGURES))], list(TIER_FIGURES.values()))
    axis.grid(visible=True, axis="y", linewidth=0.3)
    if tiers:
        axis.legend(fontsize=8)


def _title(axis: Any, title: str, is_measured: bool) -> None:
    axis.set_title(title if is_measured else f"{title}: not measured", loc="left", fontsize=11)
