"""What a run of the attach bench leaves behind: tables for people, a page with line of JSON, and a picture.

Owns rows, words, the page and the drawing. Does not measure. Invariant: page, JSON and picture are of the same run and
have the same stem.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ops.bench import plot
from ops.bench.attach import Report
from ops.bench.attach_figures import Differing, Replayed, Row, differing_of, replayed_of, rows_of
from ops.bench.attach_ways import BARE, EXAMPLE, REPRISE
from ops.bench.tables import BARS, bar_row_of

MB = 1e6
TABLE_COLUMNS = 132
LENGTHS = (
    "prompt",
    "way",
    "cold s",
    "tax",
    "CPU",
    "restart s",
    "of cold",
    "cache dropped s",
    "of cold",
    "hit",
    "read MB",
)
REPLAY = ("way", "requests", "tokens", "hit rate", "of it external", "TTFT sum s", "p50 s")
DIFFERING = ("way", "differing tokens", "of")
COLOURS = {BARE: "#444444", EXAMPLE: "#c1666b", REPRISE: "#0b6e4f"}
LEFT = ("way", "figure", *BARS)


def print_report(report: Report, console: Console) -> None:
    """The tables, then the bars and what was left out."""
    console.width = max(console.width, TABLE_COLUMNS)
    for title, headings, rows in tables_of(report):
        table = Table(title=title, title_justify="left")
        for heading in headings:
            table.add_column(heading, justify="left" if heading in LEFT else "right", no_wrap=True)
        for row in rows:
            table.add_row(*row)
        console.print(table)
    for line in lines_of(report):
        console.print(line, highlight=False, markup=False)


def tables_of(report: Report) -> list[tuple[str, Sequence[str], list[Sequence[str]]]]:
    """Title, headings and rows of every table that has rows."""
    tables: list[tuple[str, Sequence[str], Iterable[Sequence[str]]]] = [
        ("time to the first token, medians; ratios are to vLLM without a connector", LENGTHS, _lengths(report)),
        (_replay_title(report), REPLAY, map(_replay_row, replayed_of(report.samples))),
        ("answers beside those without a connector", DIFFERING, map(_differing_row, differing_of(report.samples))),
        ("tiers of vLLM's offloading, through its manager", ("figure", *report.tier), _tier_rows(report)),
        ("bars", BARS, map(bar_row_of, report.standings())),
    ]
    made = [(title, headings, list(rows)) for title, headings, rows in tables]
    return [table for table in made if table[2]]


def lines_of(report: Report) -> list[str]:
    """How the replay was made, what was left out, how busy the machine was."""
    lines = [f"warning: {warning}" for warning in report.warnings]
    lines += [f"left out: {name}: {' '.join(reason.split())}" for name, reason in report.skipped.items()]
    before, after = report.machine["load_average_before"][0], report.machine["load_average_after"][0]
    lines.append(f"{report.rounds} rounds; load average {before:.1f} before, {after:.1f} after; {report.seconds:.0f} s")
    return lines


def _replay_title(report: Report) -> str:
    if report.replayed is None:
        return ""
    tokens = sum(len(turn.tokens) for turn in report.replayed.turns)
    return (
        f"replay of {report.replayed.name}: {report.replayed.how}; engines killed every {report.settings.per_start} "
        f"requests; {report.reusable_tokens / max(tokens, 1):.1%} could be hit"
    )


def _lengths(report: Report) -> list[Sequence[str]]:
    return [_length_row(row) for row in rows_of(report.samples)]


def _length_row(row: Row) -> Sequence[str]:
    return (
        str(row.tokens or row.nominal),
        row.way,
        _number(row.cold_s, ".2f"),
        _number(row.tax, ".3f"),
        _number(row.tax_cpu, ".3f"),
        _number(row.restart_s, ".3f"),
        _number(row.restarted, ".3f"),
        _number(row.chilled_s, ".3f"),
        _number(row.chilled, ".3f"),
        "-" if row.way == BARE else str(row.hit),
        "-" if row.chilled is None else f"{row.device_bytes / MB:.0f}",
    )


def _replay_row(row: Replayed) -> Sequence[str]:
    return (
        row.way,
        str(row.requests),
        str(row.tokens),
        f"{row.hit_rate:.1%}",
        f"{row.external_rate:.1%}",
        f"{row.ttft_s:.1f}",
        f"{row.ttft_p50_s:.2f}",
    )


def _differing_row(row: Differing) -> Sequence[str]:
    return row.way, str(row.tokens), str(row.compared)


def _tier_rows(report: Report) -> Iterable[Sequence[str]]:
    tiers = list(report.tier.values())
    for figure in dict.fromkeys(name for tier in tiers for name in tier):
        yield figure.replace("_per_s", "/s").replace("_", " "), *(_tier_text(tier, figure) for tier in tiers)


def _tier_text(tier: Any, figure: str) -> str:
    return f"{tier[figure]:.4g}" if figure in tier else "-"


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


# --- files ------------------------------------------------------------------------------------------------------------


def write(report: Report, folder: Path) -> Path:
    """Write PAGE.md, PAGE.json and PAGE.png into a folder; the page's path. Raises OSError, PlotUnavailable."""
    folder.mkdir(parents=True, exist_ok=True)
    page = folder / f"attach-{datetime.now(UTC):%Y-%m-%d-%H%M%S}.md"
    draw(report, page.with_suffix(".png"))
    page.with_suffix(".json").write_text(json.dumps(report.to_json()) + "\n", encoding="utf-8")
    page.write_text(page_of(report, page.stem), encoding="utf-8")
    return page


def page_of(report: Report, stem: str) -> str:
    """The run as Markdown."""
    facts = [f"Command: `{report.command or 'reprise bench attach'}`, {report.seconds:.0f} s."]
    facts += [f"{name}: {value}" for name, value in report.machine.items()]
    facts.append("versions: " + ", ".join(f"{name} {number}" for name, number in report.versions.items()))
    lines = [f"# {stem}", "", *(f"- {fact}" for fact in facts), "", f"![time to the first token]({stem}.png)", ""]
    for title, headings, rows in tables_of(report):
        lines += [f"{title[:1].upper()}{title[1:]}:", ""]
        lines += [f"| {' | '.join(cells)} |" for cells in (headings, ["---"] * len(headings), *rows)]
        lines.append("")
    return "\n".join([*lines, *(f"- {line}" for line in lines_of(report)), ""])


def draw(report: Report, path: Path) -> None:
    """Write a PNG: time to the first token by length, cold and after a restart. Raises PlotUnavailable, OSError."""
    plot.check()
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = rows_of(report.samples)
    figure, axes = pyplot.subplots(1, 2, figsize=(14, 5.5), layout="constrained")
    _seconds(axes[0], rows)
    _tax(axes[1], rows)
    figure.suptitle(
        f"vLLM {report.vllm_version}, {report.model}, fp32: {report.rounds} rounds, engines killed and started again\n"
        f"{report.machine.get('cpu', '')}, {report.machine.get('cpus', '')} CPUs",
        fontsize=12,
    )
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


def _seconds(axis: Any, rows: Sequence[Row]) -> None:
    axis.set_title("seconds to the first token", loc="left", fontsize=11)
    for way, colour in COLOURS.items():
        for field, style, said in (
            ("cold_s", "-", "cold"),
            ("restart_s", "--", "after a restart"),
            ("chilled_s", ":", "and the page cache dropped"),
        ):
            points = [(row.tokens, getattr(row, field)) for row in rows if row.way == way and getattr(row, field)]
            if points:
                axis.plot(*zip(*points, strict=True), style, color=colour, marker="o", label=f"{way}, {said}")
    axis.set(xlabel="tokens of the prompt", yscale="log")
    axis.grid(visible=True, which="both", linewidth=0.3)
    if axis.lines:
        axis.legend(fontsize=8)


def _tax(axis: Any, rows: Sequence[Row]) -> None:
    axis.set_title("a cold prompt, saved meanwhile: time over no connector", loc="left", fontsize=11)
    for way in (EXAMPLE, REPRISE):
        points = [(row.tokens, row.tax) for row in rows if row.way == way and row.tax is not None]
        if points:
            axis.plot(*zip(*points, strict=True), color=COLOURS[way], marker="o", label=way)
    axis.axhline(1.0, color=COLOURS[BARE], linewidth=0.8)
    axis.set(xlabel="tokens of the prompt")
    axis.set_ylim(bottom=0.0)
    axis.grid(visible=True, linewidth=0.3)
    if axis.lines:
        axis.legend(fontsize=8)
