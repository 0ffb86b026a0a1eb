"""The command retention forecast: how long each class really lasts, when the first promise breaks, what would mend it.

Owns its options, tables and JSON. Does not know the model, nor how nodes are reached.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from enum import StrEnum
from typing import Annotated, Any

import typer
from rich.table import Table

from kvstore.promises import DAY_S, HOUR_S, RATIO_MAX, Outlook
from kvstore.units import format_bytes_short, format_duration
from kvstore.wording import span
from retention.forecast import Mend, NodeForecast, Prospect, forecast_nodes
from retention.options import DeadlineOption, JsonOption, StoreOption, TokenOption, WatchOption
from retention.session import Sessions
from retention.watch import View, present

FORECAST_EPILOG = "Example: reprise retention forecast --window hour --store 127.0.0.1:7071 --store 127.0.0.1:7171"


class Window(StrEnum):
    """Whose ingest is taken to go on."""

    HOUR = "hour"
    DAY = "day"

    @property
    def seconds(self) -> int:
        return HOUR_S if self is Window.HOUR else DAY_S


def add_forecast(app: typer.Typer, sessions: Sessions) -> None:
    @app.command(epilog=FORECAST_EPILOG)
    def forecast(
        window: Annotated[Window, typer.Option(help="Go on as in the last hour, or day.")] = Window.DAY,
        watch: WatchOption = None,
        store: StoreOption = None,
        token_file: TokenOption = None,
        deadline: DeadlineOption = "10s",
        as_json: JsonOption = False,
    ) -> None:
        """How long classes really last, and what mends a promise.

        At the ingest of the last hour or day: when the first promise breaks, and what would mend it: bytes to add, or
        other promises. Each mend alone is enough.
        """
        with sessions.open(store, token_file, deadline, as_json) as session, session.each_node() as nodes:

            def look() -> View:
                prospect = forecast_nodes(nodes, window_s=window.seconds, deadline_s=session.deadline_s)
                shown = (prospect_table(prospect, window), *prospect_lines(prospect, window))
                return View(prospect_json(prospect, window), shown, prospect.nodes_failed)

            present(session, look, watch)


def prospect_json(prospect: Prospect, window: Window) -> dict[str, Any]:
    """What ``forecast`` says."""
    return {
        "window": window.value,
        "breaks_in_s": prospect.breaks_in_s,
        "nodes": {name: _node_json(node) for name, node in prospect.nodes.items()},
        "nodes_failed": dict(prospect.nodes_failed),
    }


def prospect_table(prospect: Prospect, window: Window) -> Table:
    """A row a node and class."""
    table = Table(title=f"if it goes on as in the last {window.value}", title_justify="left")
    for heading in ("node", "class"):
        table.add_column(heading)
    for heading in ("comes a day", "promised", "lasts", "needs", "ratio"):
        table.add_column(heading, justify="right")
    for name, node in prospect.nodes.items():
        for item in node.forecast.classes:
            table.add_row(name, item.name, *_cells(item))
    return table


def prospect_lines(prospect: Prospect, window: Window) -> Iterator[str]:
    """When the first promise breaks on each node, and the ways out."""
    for name, node in prospect.nodes.items():
        if node.withheld_bytes:
            yield f"{name}: others have filled the file system: {format_bytes_short(node.withheld_bytes)} cannot be had"
        if node.pinned_bytes:
            yield f"{name}: pins hold {format_bytes_short(node.pinned_bytes)} beyond their promises"
        if node.forecast.counted_s < window.seconds:
            yield f"{name}: counting began {span(node.forecast.counted_s)} ago; this will change"
        breaks_in_s = node.forecast.breaks_in_s
        if breaks_in_s is None:
            yield f"{name}: every promise holds"
            continue
        when = "now" if breaks_in_s < 1 else f"in {span(breaks_in_s)}"
        yield f"{name}: the first promise breaks {when}; any one of these mends it:"
        for mend in node.mends:
            yield f"  {mend_text(mend)}"


def mend_text(mend: Mend) -> str:
    """A mend as something to do."""
    if mend.keep_for_s is None:
        return f"add {format_bytes_short(mend.add_bytes)} of capacity to this node"
    keeps = " ".join(f"--keep {name}={format_duration(seconds)}" for name, seconds in mend.keep_for_s.items())
    return f"reprise retention policy set {keeps}"


def _node_json(node: NodeForecast) -> dict[str, Any]:
    return asdict(node.forecast) | {
        "withheld_bytes": node.withheld_bytes,
        "pinned_bytes": node.pinned_bytes,
        "mends": [{"add_bytes": item.add_bytes, "keep_for_s": item.keep_for_s} for item in node.mends],
    }


def _cells(item: Outlook) -> tuple[str, ...]:
    ratio = f"{item.ratio:.2f}" if item.ratio < RATIO_MAX else "-"
    return (
        format_bytes_short(int(item.ingest_bytes_per_s * DAY_S)),
        format_duration(item.keep_for_s),
        span(item.lasts_s),
        format_bytes_short(int(item.demand_bytes)),
        ratio,
    )
