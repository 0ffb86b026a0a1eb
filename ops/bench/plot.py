"""A picture of the store bench: how near each case comes to its limit and how it stands beside the peers.

Owns the drawing: one panel a group of cases, ratios on one scale. Needs matplotlib (extra ``bench``); draws on no
screen.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ops.bench.measure import Measured, ratio
from ops.bench.store import Report

GIGA = 1e9
STORE, PEER, LINE = "#0b6e4f", "#c1666b", "#444444"
PANELS_A_ROW = 2
CASE_INCHES, PANEL_INCHES = 0.5, 1.5
RATIO_MAX = 6.0
"""Longer bars are cut here; their figure stands beside them."""


class PlotUnavailable(Exception):
    """matplotlib is not installed."""


def check() -> None:
    """Raises PlotUnavailable, before anything was measured in vain."""
    if find_spec("matplotlib") is None:
        raise PlotUnavailable("a picture needs matplotlib: pip install 'reprise-kv[bench]'")


def draw(report: Report, path: Path) -> None:
    """Write a PNG. Raises PlotUnavailable without matplotlib, OSError if the file cannot be written."""
    check()
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = panels_of(report.measured)
    names = list(panels) or ["nothing was measured"]
    rows = -(-len(names) // PANELS_A_ROW)
    heights = [
        PANEL_INCHES + CASE_INCHES * max(len(panels.get(name, ())) for name in names[at : at + PANELS_A_ROW])
        for at in range(0, len(names), PANELS_A_ROW)
    ]
    figure, axes = pyplot.subplots(
        rows,
        PANELS_A_ROW,
        figsize=(17, sum(heights) + 1.2),
        layout="constrained",
        squeeze=False,
        height_ratios=heights,
    )
    for at, axis in enumerate(axes.flat):
        if at < len(names):
            _panel(axis, names[at], panels.get(names[at], ()))
        else:
            axis.axis("off")
    machine = report.machine
    figure.suptitle(
        "Reprise: its rate as a multiple of the limit of the machine (green) and of the best peer (red); 1 = equal\n"
        f"{machine.get('cpu', '')}, {machine.get('cpus', '')} CPUs; medians of {report.settings.rounds} rounds",
        fontsize=13,
    )
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


def panels_of(measured: Sequence[Measured]) -> Mapping[str, Sequence[Measured]]:
    """Cases by what they are called, in order."""
    panels: dict[str, list[Measured]] = defaultdict(list)
    for case in measured:
        panels[case.name.removesuffix(" present").removesuffix(" absent")].append(case)
    return panels


def _panel(axis: Any, name: str, cases: Sequence[Measured]) -> None:
    limits = ", ".join(dict.fromkeys(case.limit.name for case in cases))
    axis.set_title(f"{name}  (limit: {limits})" if limits else name, loc="left", fontsize=11)
    for at, case in enumerate(cases):
        _bar(axis, at - 0.19, ratio(case.store, case.limit), STORE, speed_of(case))
        if (peer := case.best_peer) is not None:
            _bar(axis, at + 0.19, ratio(case.store, peer), PEER, f"of {peer.name}")
    axis.set_yticks(range(len(cases)), [case.label.removeprefix(name).strip() for case in cases])
    axis.set_ylim(len(cases) - 0.5, -0.5)
    axis.set_xlim(0, RATIO_MAX * 1.35)
    axis.axvline(1.0, color=LINE, linewidth=0.8, zorder=0)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)


def _bar(axis: Any, at: float, value: float, colour: str, said: str) -> None:
    length = min(value, RATIO_MAX)
    axis.barh(at, length, height=0.36, color=colour)
    axis.text(length + 0.08, at, f"{value:.2f}  {said}", va="center", fontsize=9, bbox={"color": "white", "pad": 0.5})


def speed_of(case: Measured) -> str:
    """The store's own rate in words."""
    if case.unit == "B":
        return f"{case.store.rate / GIGA:.2f} GB/s"
    if case.unit == "gets":
        return f"{case.store.rate:.0f} gets/s"
    return f"{case.store.rate / 1e6:.2f} M keys/s" if case.unit == "keys" else f"{1 / case.store.rate:.2f} s"
