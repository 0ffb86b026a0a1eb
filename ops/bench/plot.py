"""A picture of the store bench: how near each case comes to its limit, and how fast it is beside the others.

Owns the drawing. Needs matplotlib (extra ``bench``); drawing on no screen.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from ops.bench.measure import Measured, ratio
from ops.bench.tables import label

GIGA = 1e9
COLOURS = {"store": "#0b6e4f", "limit": "#888888", "baseline": "#c9c9c9", "peer": "#c1666b"}
ROW_INCHES = 0.32


class PlotUnavailable(Exception):
    """matplotlib is not installed."""


def check() -> None:
    """Raises PlotUnavailable, before anything was measured in vain."""
    if find_spec("matplotlib") is None:
        raise PlotUnavailable("a picture needs matplotlib: pip install 'reprise-kv[bench]'")


def draw(measured: Sequence[Measured], path: Path, title: str) -> None:
    """Write a PNG. Raises PlotUnavailable without matplotlib, OSError if the file cannot be written."""
    check()
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = list(reversed(measured))
    moving = [case for case in rows if case.unit == "B"]
    height = ROW_INCHES * max(len(rows), 4) + 1.5
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(16, height), layout="constrained")
    left.barh([label(case) for case in rows], [ratio(case.store, case.limit) for case in rows], color=COLOURS["store"])
    left.axvline(1.0, color=COLOURS["limit"])
    left.set_xlabel("of the limit (1 = what the machine can do)")
    for at, case in enumerate(moving):
        for result in reversed(case.results):
            right.plot(result.rate / GIGA, at, "o", color=COLOURS[result.kind])
    right.set_yticks(range(len(moving)), [label(case) for case in moving])
    right.set_xscale("log")
    right.set_xlabel("GB/s: green store, dark grey limit, light grey other baselines, red peers")
    figure.suptitle(title)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
