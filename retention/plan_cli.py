"""The command retention plan: what a store must be, before anything is bought.

Owns its options, and how sizes, shares and figures are written. Does not know formulas (``sizing`` does). Invariant:
what an operator did not say is shown as assumed, with where the default comes from.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields
from typing import Annotated, Any

import typer
from rich.table import Table

from kvstore.units import DURATION_S_MAX, format_bytes_short, format_duration, parse_bytes
from retention.options import BytesPerToken
from retention.policy import parse_keep_for
from retention.session import exit_codes, show
from retention.sizing import (
    ASSUMED,
    SOURCES,
    Demand,
    Figure,
    Hardware,
    Prices,
    Promise,
    Sizing,
    equal_shares,
    size_store,
)

PLAN_EPILOG = (
    "Example: reprise retention plan --tokens-per-day 155e12 --hit 0.96 --bytes-per-token 890 --keep agent=3d,chat=7d "
    "--share 0.7,0.3 --replicas 2"
)
_HARDWARE, _PRICES, _DEMAND = Hardware(), Prices(), {item.name: item.default for item in fields(Demand)}


def add_plan(app: typer.Typer) -> None:
    @app.command(epilog=PLAN_EPILOG)
    def plan(
        tokens_per_day: Annotated[float, typer.Option(help="Input tokens a day, hits included, like 155e12.")],
        hit: Annotated[float, typer.Option(help="Share of them that comes from the store, 0 to 1.")],
        bytes_per_token: BytesPerToken,
        keep: Annotated[str, typer.Option(help="How long, one a class: 3d,7d or agent=3d,chat=7d.")],
        share: Annotated[
            str | None, typer.Option(help="Share of what is stored, one a class: 0.7,0.3. [default: equal]")
        ] = None,
        replicas: Annotated[int, typer.Option(help="Copies of each block.")] = 1,
        output_tokens_per_day: Annotated[float, typer.Option(help="Tokens answered a day: stored too.")] = 0.0,
        in_use: Annotated[
            str, typer.Option(help="From a block's writing to its last use, where keeping begins.")
        ] = "0s",
        peak: Annotated[float, typer.Option(help="The busiest hour over the average.")] = 2.0,
        capacity: Annotated[
            str | None, typer.Option(help="Of a store that is there: how long it holds what comes, like 100PiB.")
        ] = None,
        drive_size: Annotated[str, typer.Option(help="Bytes of a drive.")] = "14TiB",
        drives_per_node: Annotated[int, typer.Option(help="Drives of a node.")] = _HARDWARE.drives_per_node,
        drive_read: Annotated[str, typer.Option(help="What a drive reads.")] = "6GB/s",
        drive_write: Annotated[str, typer.Option(help="What a drive writes, sustained.")] = "3GB/s",
        dwpd: Annotated[float, typer.Option(help="Rated drive writes a day.")] = _HARDWARE.drive_writes_per_day,
        rated_years: Annotated[float, typer.Option(help="Years that the rating is for.")] = _HARDWARE.rated_years,
        write_amplification: Annotated[
            float, typer.Option(help="Bytes that a drive writes for one that is stored; rewriting included.")
        ] = _HARDWARE.write_amplification,
        fill: Annotated[float, typer.Option(help="Share of a drive that holds blocks.")] = _HARDWARE.fill_share,
        network: Annotated[str, typer.Option(help="Link of a node, each way: 50GB/s is 400 Gbit/s.")] = "50GB/s",
        network_share: Annotated[float, typer.Option(help="Of the link, what is used.")] = _HARDWARE.network_share,
        drive_price: Annotated[float, typer.Option(help="US dollars.")] = _PRICES.drive_usd,
        node_price: Annotated[float, typer.Option(help="US dollars, without drives.")] = _PRICES.node_usd,
        years: Annotated[float, typer.Option(help="Years that they are written off over.")] = _PRICES.years,
        node_watts: Annotated[float, typer.Option(help="Power of a node, drives included.")] = _PRICES.node_watts,
        kwh_price: Annotated[float, typer.Option(help="US dollars a kilowatt-hour.")] = _PRICES.kwh_usd,
        as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
    ) -> None:
        """What a traffic and its promises need: nodes, drives, wear, cost.

        Asks no store. Every figure is shown with its formula and what that rests on.
        """
        with exit_codes():
            demand = Demand(
                tokens_per_day, hit, bytes_per_token, parse_promises(keep, share), replicas,
                output_tokens_per_day, _seconds(in_use), peak,
            )  # fmt: skip
            hardware = Hardware(
                parse_bytes(drive_size), drives_per_node, _rate(drive_read), _rate(drive_write), dwpd, rated_years,
                write_amplification, fill, _rate(network), network_share,
            )  # fmt: skip
            prices = Prices(drive_price, node_price, years, node_watts, kwh_price)
            held_bytes = parse_bytes(capacity) if capacity is not None else None
            sizing = size_store(demand, hardware, prices, held_bytes)
            inputs = _inputs(demand, hardware, prices, held_bytes)
            show(plan_json(inputs, sizing), _inputs_table(inputs), _figures_table(sizing), as_json=as_json)


def parse_promises(keep: str, share: str | None) -> tuple[Promise, ...]:
    """From ``3d,7d`` or ``agent=3d,chat=7d``, and ``0.7,0.3`` or None. Raises ValueError."""
    keeps = []
    for item in keep.split(","):
        name, equals, duration = item.strip().rpartition("=")
        if equals and not name:
            raise ValueError(f"--keep {item!r}: write CLASS=DURATION, or only DURATION")
        keeps.append((name or duration, parse_keep_for(duration)))
    try:
        shares = [float(item) for item in share.split(",")] if share is not None else None
    except ValueError as error:
        raise ValueError(f"--share {share!r}: write numbers and commas, like 0.7,0.3") from error
    return equal_shares(keeps, shares)


def plan_json(inputs: Iterable[Mapping[str, Any]], sizing: Sizing) -> dict[str, Any]:
    """What ``plan`` says. A figure that has no end (nothing is written, so nothing wears) is null."""
    figures = [asdict(item) | {"value": item.value if math.isfinite(item.value) else None} for item in sizing.figures]
    return {"inputs": list(inputs), "figures": figures, "bound_by": sizing.bound_by}


def shown(value: float, unit: str) -> str:
    """A number with its unit, rounded for reading."""
    if not math.isfinite(value):
        return "without end"
    if unit.startswith("bytes"):
        return format_bytes_short(int(value)) if value < 2**60 else f"{value / 2**50:,.0f} PiB"
    if unit == "s":
        return format_duration(int(value)) if value <= DURATION_S_MAX else "more than 100 years"
    if unit == "USD" and value >= 1000:
        return f"{value:,.0f} USD"
    return f"{value:,.0f} {unit}" if value >= 1000 or value == int(value) else f"{value:.3g} {unit}"


def _inputs(demand: Demand, hardware: Hardware, prices: Prices, capacity_bytes: int | None) -> list[dict[str, Any]]:
    """Everything that went in, and for what equals a default, where that comes from."""
    rows: list[dict[str, Any]] = []
    for part, defaults in ((demand, _DEMAND), (hardware, asdict(_HARDWARE)), (prices, asdict(_PRICES))):
        for name, value in asdict(part).items():
            if name != "promises":
                source = SOURCES.get(name, ASSUMED) if value == defaults.get(name) else "given"
                rows.append({"name": name, "value": value, "source": source})
    for promise in demand.promises:
        rows.append({"name": f"keep[{promise.name}]", "value": promise.keep_for_s, "source": "given"})
        rows.append({"name": f"share[{promise.name}]", "value": promise.share, "source": "given, or equal"})
    if capacity_bytes is not None:
        rows.append({"name": "capacity_bytes", "value": capacity_bytes, "source": "given"})
    return rows


def _inputs_table(inputs: Iterable[Mapping[str, Any]]) -> Table:
    table = Table(title="inputs", title_justify="left")
    table.add_column("what")
    table.add_column("value", justify="right")
    table.add_column("source")
    for row in inputs:
        table.add_row(row["name"], f"{row['value']:,.12g}", row["source"])
    return table


def _figures_table(sizing: Sizing) -> Table:
    title = f"plan: {sizing.value_of('nodes'):,.0f} nodes, as {sizing.bound_by} needs"
    table = Table(title=title, title_justify="left")
    for heading in ("figure", "value", "formula", "source"):
        table.add_column(heading, justify="right" if heading == "value" else "left")
    for figure in sizing.figures:
        table.add_row(figure.name, _figure_value(figure), figure.formula, figure.source)
    return table


def _figure_value(figure: Figure) -> str:
    suffix = figure.unit.removeprefix("bytes") if figure.unit.startswith("bytes") else ""
    return shown(figure.value, figure.unit) + suffix


def _seconds(text: str) -> float:
    return 0.0 if text.strip() == "0s" else float(parse_keep_for(text))


def _rate(text: str) -> float:
    """Bytes a second from ``6GB/s``."""
    if not text.strip().endswith("/s"):
        raise ValueError(f"{text!r} is not a rate: write a size a second, such as 6GB/s")
    return float(parse_bytes(text.strip().removesuffix("/s")))
