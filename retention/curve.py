"""A curve: one workload replayed through store after store that differ in capacity or in how long they keep.

Owns the points, their CSV and their picture. Does not know how one replay works. Needs matplotlib only to draw (extra
``bench``), on no screen. Invariants: points come in the order in which their values were given; every point replays
the same requests.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

from kvstore.traffic import ClassRules
from kvstore.units import format_bytes, format_duration, parse_bytes
from retention.figures import Row, class_rows, total_row
from retention.policy import check_policy, parse_keep_for
from retention.replay import Outcome, Setting, replay
from retention.workload import Workload

POINTS_MAX = 256
UNLIMITED = "unlimited"
GIB = 2**30
_COLOURS = ("#0b6e4f", "#c1666b", "#2e4057", "#d4a24c", "#6d597a", "#444444")


@dataclass(frozen=True, slots=True)
class Axis:
    """What is varied, and its values: bytes or None (no bound) of ``capacity``, seconds of ``keep``."""

    name: str
    values: tuple[int | None, ...]

    def label(self, value: int | None) -> str:
        if value is None:
            return UNLIMITED
        return format_bytes(value) if self.name == "capacity" else format_duration(value)


@dataclass(frozen=True, slots=True)
class Point:
    """The values, one an axis, and what came of them."""

    values: tuple[int | None, ...]
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class Curve:
    """``axes``: one or two; the first one's values run along the picture."""

    axes: tuple[Axis, ...]
    points: tuple[Point, ...]


class PlotUnavailable(ValueError):
    """matplotlib is not installed."""


def parse_axis(text: str) -> Axis:
    """From ``capacity=100GiB,1TiB,unlimited`` or ``keep=5m,1h,3d``. Raises ValueError."""
    name, equals, listed = text.partition("=")
    parts = [part.strip() for part in listed.split(",")]
    if not equals or name not in ("capacity", "keep") or not all(parts):
        raise ValueError(f"--sweep {text!r}: write capacity=SIZE,SIZE,... or keep=DURATION,DURATION,...")
    values = tuple(parse_capacity(part) if name == "capacity" else parse_keep_for(part) for part in parts)
    if len(set(values)) != len(values):
        raise ValueError(f"--sweep {text!r} names a value twice")
    return Axis(name, values)


def parse_capacity(text: str) -> int | None:
    """Bytes, or None for ``unlimited``. Raises ValueError."""
    return None if text.strip() == UNLIMITED else parse_bytes(text)


def check_axes(axes: Sequence[Axis]) -> None:
    """Raises ValueError for axes that make no curve."""
    if not 1 <= len(axes) <= 2 or len({axis.name for axis in axes}) != len(axes):
        raise ValueError("give --sweep once, or twice with two different names")
    points = len(list(product(*(axis.values for axis in axes))))
    if points > POINTS_MAX:
        raise ValueError(f"{points} points are more than {POINTS_MAX}: name fewer values")


def settings_of(axes: Sequence[Axis], base: Setting) -> list[tuple[tuple[int | None, ...], Setting]]:
    """The store of each point. Raises ValueError or VolumeError for one that cannot be."""
    made = [(values, _varied(base, axes, values)) for values in product(*(axis.values for axis in axes))]
    for _, setting in made:
        check_policy(list(setting.rules.rules), capacity_bytes=setting.capacity_bytes)
    return made


def draw_points(
    axes: Sequence[Axis],
    base: Setting,
    workload: Workload,
    progress: Callable[[int], None] = lambda requests_done: None,
) -> Curve:
    """Replay the workload at each point; ``progress`` as for ``replay``, all points together."""
    check_axes(axes)
    points = [Point(values, replay(workload, setting, progress)) for values, setting in settings_of(axes, base)]
    return Curve(tuple(axes), tuple(points))


def rows_of(curve: Curve) -> list[Row]:
    """A row a point and class: the axes' values, as written and as numbers, then the figures."""
    rows: list[Row] = []
    for point in curve.points:
        named: Row = {}
        for axis, value in zip(curve.axes, point.values, strict=True):
            named[axis.name] = axis.label(value)
            named["capacity_bytes" if axis.name == "capacity" else "keep_s"] = value
        rows += [named | row for row in class_rows(point.outcome)]
    return rows


def write_csv(rows: Iterable[Row], path: Path) -> None:
    """One line a row, the names first; what is null is empty. Raises OSError."""
    listed = list(rows)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(listed[0]))
        writer.writeheader()
        writer.writerows(listed)


def check_plot() -> None:
    """Raises PlotUnavailable, before anything was replayed in vain."""
    if find_spec("matplotlib") is None:
        raise PlotUnavailable("a picture needs matplotlib: pip install 'reprise-kv[bench]'")


def draw(curve: Curve, title: str, path: Path) -> None:
    """Write a PNG: hit rate above, bytes kept and written below. Raises PlotUnavailable, OSError."""
    check_plot()
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (above, below) = pyplot.subplots(2, 1, figsize=(10, 9), sharex=True, layout="constrained")
    along = curve.axes[0]
    lines = lines_of(curve)
    for at, (name, outcomes) in enumerate(lines):
        colour = _COLOURS[at % len(_COLOURS)]
        rows = [total_row(outcome) for outcome in outcomes]
        _line(above, [100 * row["token_hit_rate"] for row in rows], colour, name, "{:.1f}" if len(lines) == 1 else "")
        if len(curve.axes) == 1 and len(class_rows(outcomes[0])) > 1:
            _class_lines(above, outcomes)
        prefix = f"{name}: " if name else ""
        _line(below, [row["kept_bytes_mean"] / GIB for row in rows], colour, f"{prefix}kept, mean (GiB)")
        device = [row["device_bytes_per_day"] / GIB for row in rows]
        _line(below, device, colour, f"{prefix}device writes (GiB a day)", style="--")
    above.margins(y=0.12)
    above.set_ylabel("token hit rate (%)")
    below.set_ylabel("GiB; GiB a day")
    below.set_ylim(bottom=0)
    below.set_xlabel("capacity of a node" if along.name == "capacity" else "kept from the last use")
    below.set_xticks(range(len(along.values)), [along.label(value) for value in along.values])
    for axis in (above, below):
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
        if axis.get_legend_handles_labels()[1]:
            axis.legend(frameon=False)
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def lines_of(curve: Curve) -> list[tuple[str, list[Outcome]]]:
    """The curve's lines: one a value of the second axis, each with its points along the first."""
    if len(curve.axes) == 1:
        return [("", [point.outcome for point in curve.points])]
    second = curve.axes[1]
    return [
        (f"{second.name} {second.label(value)}", [point.outcome for point in curve.points if point.values[1] == value])
        for value in second.values
    ]


def _class_lines(axis: Any, outcomes: Sequence[Outcome]) -> None:
    """A dotted line a class."""
    for at, row in enumerate(class_rows(outcomes[0])[:-1], 1):
        rates = [100 * class_rows(outcome)[at - 1]["token_hit_rate"] for outcome in outcomes]
        _line(axis, rates, _COLOURS[at % len(_COLOURS)], row["class"], style=":")


def _line(axis: Any, values: Sequence[float], colour: str, label: str, shown: str = "", style: str = "-") -> None:
    axis.plot(range(len(values)), values, style, marker="o", color=colour, label=label or None)
    for at, value in enumerate(values if shown else ()):
        axis.annotate(
            shown.format(value), (at, value), xytext=(0, 7), textcoords="offset points", ha="center", fontsize=9
        )


def _varied(base: Setting, axes: Sequence[Axis], values: Sequence[int | None]) -> Setting:
    setting = base
    for axis, value in zip(axes, values, strict=True):
        if axis.name == "capacity":
            setting = replace(setting, capacity_bytes=value)
        else:
            assert value is not None
            rules = tuple(replace(rule, keep_for_s=value) for rule in setting.rules.rules)
            setting = replace(setting, rules=ClassRules(rules))
    return setting
