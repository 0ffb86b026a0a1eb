"""The store bench's results for people: ratios first, rates second, then what they cost.

Owns rows and words. Does not measure. Pure but for printing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table

from ops.bench.bars import Standing
from ops.bench.measure import Measured, Result, ratio
from ops.bench.store import Report

GIGA = 1e9
MIB = 1 << 20
TABLE_COLUMNS = 156
"""Columns of the widest table; a narrower terminal wraps it, which is better than cut figures."""
RATIOS = ("case", "size x batch", "of limit", "of peer", "reprise", "limit", "best peer", "CPU s/GB", "spread", "bars")
BARS = ("what", "bar", "reached", "")
LATENCIES = ("case", "size x batch", "p50", "p99", "p99.9", "limit p50", "limit p99")


def print_report(report: Report, console: Console) -> None:
    """The tables, then the bars, what was skipped and how much memory was taken."""
    console.width = max(console.width, TABLE_COLUMNS)
    console.print(
        _table("medians of rounds in which all took turns; ratios first", RATIOS, map(row_of, report.measured))
    )
    console.print(_table("milliseconds a request (reads / writes)", LATENCIES, map(latency_row_of, timed(report))))
    console.print(_table("bars", BARS, map(bar_row_of, report.standings())))
    for line in lines_of(report):
        console.print(line, highlight=False, markup=False)


def timed(report: Report) -> list[Measured]:
    """Cases whose latency counts: of single blocks and of look-ups."""
    return [case for case in report.measured if case.batch == 1 or case.unit == "keys"]


def lines_of(report: Report) -> list[str]:
    """Warnings, notes, memory, and what was not measured."""
    lines = [f"warning: {warning}" for warning in report.warnings]
    lines += [f"{case.label}: {note}" for case in report.measured for note in case.notes]
    lines += [f"memory, {name}: {memory_line(taken)}" for name, taken in report.memory.items()]
    lines += [sweep_line(report.sweeps)] if report.sweeps else []
    lines += [f"trace {name}: {trace_line(figures)}" for name, figures in report.traces.items()]
    lines += [f"not measured: {name}: {reason}" for name, reason in report.skipped.items()]
    before, after = report.machine["load_average_before"][0], report.machine.get("load_average_after", (0.0,))[0]
    lines.append(f"load average {before:.1f} before, {after:.1f} after; {report.seconds:.0f} s")
    return lines


def _table(title: str, headings: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    table = Table(title=title, title_justify="left")
    for heading in headings:
        table.add_column(
            heading, justify="left" if heading in ("case", "limit", "best peer", *BARS) else "right", no_wrap=True
        )
    for row in rows:
        table.add_row(*row)
    return table


def row_of(case: Measured) -> tuple[str, ...]:
    """One case's ratios and rates, in the order of RATIOS."""
    store, limit, peer = case.store, case.limit, case.best_peer
    met = [verdict.met for verdict in case.verdicts if verdict.met is not None]
    return (
        case.name,
        case.shape,
        f"{ratio(store, limit):.2f}",
        f"{ratio(store, peer):.2f}" if peer else "-",
        rate_text(store, case.unit),
        f"{limit.name} {rate_text(limit, case.unit)}",
        f"{peer.name} {rate_text(peer, case.unit)}" if peer else "-",
        f"{store.cpu_s_per_gb:.2f}" if store.cpu_s_per_gb is not None else "-",
        f"{store.spread:.0%}",
        f"{sum(met)} of {len(met)}" if met else "-",
    )


def latency_row_of(case: Measured) -> tuple[str, ...]:
    """One case's percentiles, in the order of LATENCIES."""
    return (
        case.name,
        case.shape,
        *(latency_text(case.store, at) for at in range(3)),
        *(latency_text(case.limit, at) for at in range(2)),
    )


def rate_text(result: Result, unit: str) -> str:
    if unit == "B":
        return f"{result.rate / GIGA:.2f} GB/s"
    if unit == "keys":
        return f"{result.rate / 1e6:.2f} M/s"
    if unit == "gets":
        return f"{result.rate:.0f}/s"
    return f"{1 / result.rate:.2f} s"


def latency_text(result: Result, at: int) -> str:
    """Milliseconds of a percentile; the writes' behind a slash where there are both."""
    reads_ms = 1000 * (result.p50_s, result.p99_s, result.p999_s)[at]
    if result.writes_s is None:
        return f"{reads_ms:.2f}"
    return f"{reads_ms:.2f} / {1000 * result.writes_s[at]:.2f}"


def bar_row_of(standing: Standing) -> tuple[str, ...]:
    """One bar, in the order of BARS."""
    reached = "-" if standing.reached is None else f"{standing.reached:.3g}"
    return standing.what, standing.bar, reached, standing.word


def memory_line(taken: dict[str, float]) -> str:
    """Bytes in MiB, all else as it is."""
    parts = []
    for name, value in taken.items():
        if name in ("resident", "anonymous", "peak"):
            parts.append(f"{name} {value / MIB:.0f} MiB")
        else:
            parts.append(
                f"{name.replace('_', ' ')} {value:.0f}" if value >= 100 else f"{name.replace('_', ' ')} {value:.4g}"
            )
    return ", ".join(parts)


def sweep_line(figures: dict[str, float]) -> str:
    """What the sweeps did, and how fast."""
    return (
        f"{figures['sweeps']:.0f} sweeps beside gets freed {figures['segments_freed']:.0f} segments of "
        f"{figures['blocks']:.0f} blocks in {figures['seconds']:.1f} s"
    )


def trace_line(figures: dict[str, float]) -> str:
    """One replayed pattern: what was found, how fast, and how long extents were."""
    parts = [
        f"{figures['requests']:.0f} requests, {figures['blocks_asked']:.0f} blocks, hit rate {figures['hit_rate']:.1%}",
        f"read {figures['read_gb_per_s']:.2f} GB/s ({figures['read_of_preadv']:.2f} of preadv)",
        f"write {figures['write_gb_per_s']:.2f} GB/s",
        f"{figures['written_bytes'] / MIB:.0f} MiB written, {figures['refused_blocks']:.0f} blocks refused",
        f"look-up {figures['lookup_mean_ms']:.2f} ms",
    ]
    if "blocks_per_extent" in figures:
        parts.append(f"{figures['blocks_per_extent']:.1f} blocks an extent")
    return ", ".join(parts)
