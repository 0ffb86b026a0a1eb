"""What a run of the store bench leaves behind: a table for people, one line of JSON, and a picture, named by date.

Owns the files' names and the page. Does not measure. Invariant: all three are of the same run and have the same stem.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path

from ops.bench import plot, tables
from ops.bench.command import without_folders
from ops.bench.store import Report


def write(report: Report, folder: Path) -> Path:
    """Write PAGE.md, PAGE.json and PAGE.png into a folder; the page's path. Raises OSError, PlotUnavailable."""
    folder.mkdir(parents=True, exist_ok=True)
    page = folder / f"store-{datetime.now(UTC):%Y-%m-%d-%H%M%S}.md"
    plot.draw(report, page.with_suffix(".png"))
    page.with_suffix(".json").write_text(json.dumps(report.to_json()) + "\n", encoding="utf-8")
    page.write_text(page_of(report, page.stem), encoding="utf-8")
    return page


def page_of(report: Report, stem: str) -> str:
    """The run as Markdown: where and how it was made, its bars, ratios and latencies, and what was left out."""
    machine = report.machine
    facts = [f"Command: `{report.command or 'reprise bench store'}`, {report.seconds:.0f} s."]
    facts += [f"{name}: {value}" for name, value in machine.items()]
    facts.append("versions: " + ", ".join(f"{name} {number}" for name, number in report.versions.items()))
    return "\n".join(
        [
            f"# {stem}",
            "",
            *(f"- {fact}" for fact in facts),
            "",
            f"![ratios to the limits]({stem}.png)",
            "",
            *_table(("what", *tables.BARS[1:3], "standing"), map(tables.bar_row_of, report.standings())),
            *_table(tables.RATIOS, map(tables.row_of, report.measured)),
            *_table(tables.LATENCIES, map(tables.latency_row_of, tables.timed(report))),
            *(f"- {without_folders(line)}" for line in tables.lines_of(report)),
            "",
        ]
    )


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [headings, ["---"] * len(headings), *rows]
    return [*(f"| {' | '.join(line)} |" for line in lines), ""]
