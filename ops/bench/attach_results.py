"""What a run of the attach bench leaves behind: tables for people, a page with line of JSON and picture.

Owns rows, words and the page; the drawing is ``attach_picture``'s. Does not measure. Invariant: page, JSON and picture
are of the same run and have the same stem.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ops.bench.attach import Report
from ops.bench.attach_figures import Differing, Replayed, Row, differing_of, replayed_of, rows_of
from ops.bench.attach_picture import draw
from ops.bench.attach_ways import BARE
from ops.bench.tables import BARS, bar_row_of

MB = 1e6
TABLE_COLUMNS = 152
LENGTHS = (
    "prompt",
    "way",
    "cold s",
    "tax",
    "least..most",
    "prompts",
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
    parts = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in report.parts_s.items())
    lines.append(f"time by part: {parts}; load average {before:.1f} before, {after:.1f} after; {report.seconds:.0f} s")
    return lines


def _replay_title(report: Report) -> str:
    if report.replayed is None:
        return ""
    tokens = sum(len(turn.tokens) for turn in report.replayed.turns)
    return (
        f"replay of {report.replayed.name}: {report.replayed.how}; engines killed after {report.before_restart} "
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
        "-" if row.tax is None else f"{row.tax_least:.2f}..{row.tax_most:.2f}",
        str(row.prompts),
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
