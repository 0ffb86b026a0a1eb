"""How large a store must be for a traffic and its promises: bytes a second, bytes kept, drives, nodes, wear, cost.

Owns the formulas, each beside the source that it rests on, and the defaults of what an operator did not say. Pure:
numbers in, figures out. Does not know how options are written or results shown. Invariants: every figure carries the
formula that made it; inputs are finite and within bounds that no product of them can overflow.

The average spreads traffic evenly over the day; ``peak_factor`` says how far the busiest hour is above it. What is read
is read from one replica, what is written is written to each.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

DAY_S = 86_400
YEAR_DAYS = 365
NUMBER_MIN, NUMBER_MAX = 1e-12, 1e24
REPLICAS_MAX = 16
DRIVES_PER_NODE_MAX = 1024

LITTLE = "Little's law (Little 1961): what is there is what arrives a second times how long it stays"
ARITHMETIC = "arithmetic"
THREE_FS = "3FS, README, peak throughput: 180 nodes, each with 16 drives of 14 TiB and 2 links of 200 Gbit/s"
JEDEC = (
    "JEDEC JESD218: rated endurance is in bytes written; drive writes a day = those a day, over the drive's capacity"
)
ASSUMED = "assumed; give your own"


@dataclass(frozen=True, slots=True)
class Promise:
    """A class: how long it is kept from the last use, and which share of what is stored is of it."""

    name: str
    keep_for_s: int
    share: float


@dataclass(frozen=True, slots=True)
class Demand:
    """What is asked of the store. ``hit_share``: of the input tokens, those that come from the store.

    ``in_use_s``: from a block's writing to its last use; the promise begins there. Raises ValueError, naming the field.
    """

    tokens_per_day: float
    hit_share: float
    bytes_per_token: float
    promises: tuple[Promise, ...]
    replicas: int = 1
    output_tokens_per_day: float = 0.0
    in_use_s: float = 0.0
    peak_factor: float = 2.0

    def __post_init__(self) -> None:
        _check_number("tokens_per_day", self.tokens_per_day)
        _check_number("bytes_per_token", self.bytes_per_token)
        _check_number("output_tokens_per_day", self.output_tokens_per_day, least=0.0)
        _check_number("in_use_s", self.in_use_s, least=0.0)
        _check_number("hit_share", self.hit_share, least=0.0, most=1.0)
        _check_number("peak_factor", self.peak_factor, least=1.0, most=1000.0)
        _check_count("replicas", self.replicas, REPLICAS_MAX)
        if not self.promises or len({promise.name for promise in self.promises}) != len(self.promises):
            raise ValueError("name one promise or more, each class once")
        for promise in self.promises:
            _check_number(f"keep of {promise.name}", promise.keep_for_s)
            _check_number(f"share of {promise.name}", promise.share, least=0.0, most=1.0)
        if not math.isclose(sum(promise.share for promise in self.promises), 1.0, abs_tol=1e-6):
            raise ValueError(f"the shares add up to {sum(promise.share for promise in self.promises):g}, not to 1")


@dataclass(frozen=True, slots=True)
class Hardware:
    """What a node is. ``drive_writes_per_day``: the drive's rating over ``rated_years``.

    ``fill_share``: of a drive's bytes, those that hold blocks. ``network_share``: of a node's link, what is used.
    """

    drive_bytes: float = 14 * 2**40
    drives_per_node: int = 16
    drive_read_bytes_per_s: float = 6.0e9
    drive_write_bytes_per_s: float = 3.0e9
    drive_writes_per_day: float = 1.0
    rated_years: float = 5.0
    write_amplification: float = 1.1
    fill_share: float = 0.9
    network_bytes_per_s: float = 50.0e9
    network_share: float = 0.7

    def __post_init__(self) -> None:
        for name in ("drive_bytes", "drive_read_bytes_per_s", "drive_write_bytes_per_s", "network_bytes_per_s"):
            _check_number(name, getattr(self, name))
        _check_number("drive_writes_per_day", self.drive_writes_per_day, most=1000.0)
        _check_number("rated_years", self.rated_years, most=100.0)
        _check_number("write_amplification", self.write_amplification, least=1.0, most=1000.0)
        _check_number("fill_share", self.fill_share, most=1.0)
        _check_number("network_share", self.network_share, most=1.0)
        _check_count("drives_per_node", self.drives_per_node, DRIVES_PER_NODE_MAX)


@dataclass(frozen=True, slots=True)
class Prices:
    """What it costs, in US dollars; ``node_usd`` without drives, written off with them over ``years``."""

    drive_usd: float = 1800.0
    node_usd: float = 12_000.0
    years: float = 5.0
    node_watts: float = 800.0
    kwh_usd: float = 0.10

    def __post_init__(self) -> None:
        for name in ("drive_usd", "node_usd", "node_watts", "kwh_usd"):
            _check_number(name, getattr(self, name), least=0.0)
        _check_number("years", self.years, most=100.0)


SOURCES: dict[str, str] = {
    "drive_bytes": THREE_FS,
    "drives_per_node": THREE_FS,
    "network_bytes_per_s": THREE_FS,
    "drive_read_bytes_per_s": "PCIe 4.0 x4 drives for reading mostly: 6 to 7 GB/s in their data sheets",
    "drive_write_bytes_per_s": "PCIe 4.0 x4 drives for reading mostly: 3 to 4 GB/s in their data sheets, sustained",
    "drive_writes_per_day": "drives for reading mostly are rated for 1 over 5 years in their data sheets",
    "rated_years": "drives for reading mostly are rated for 1 over 5 years in their data sheets",
}
"""Where a default comes from; what is not here is assumed."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One result: its value and unit, the formula by which it came to be, and what that rests on."""

    name: str
    value: float
    unit: str
    formula: str
    source: str


@dataclass(frozen=True, slots=True)
class Sizing:
    """All figures, in the order of their making. ``bound_by``: what asks for the most nodes."""

    figures: tuple[Figure, ...]
    bound_by: str

    def value_of(self, name: str) -> float:
        return next(figure.value for figure in self.figures if figure.name == name)


class _Sheet:
    """Figures as they are made."""

    def __init__(self) -> None:
        self.figures: list[Figure] = []

    def value_of(self, name: str) -> float:
        return next(figure.value for figure in self.figures if figure.name == name)

    def add(self, name: str, value: float, unit: str, formula: str, source: str = ARITHMETIC) -> float:
        self.figures.append(Figure(name, value, unit, formula, source))
        return value


def size_store(demand: Demand, hardware: Hardware, prices: Prices, capacity_bytes: float | None = None) -> Sizing:
    """Every figure. ``capacity_bytes``: of a store that is there already; then also how long it holds what comes."""
    if capacity_bytes is not None:
        _check_number("capacity_bytes", capacity_bytes)
    sheet = _Sheet()
    ingest_bytes_per_day = _add_traffic(sheet, demand)
    kept_bytes = _add_kept(sheet, demand, ingest_bytes_per_day)
    if capacity_bytes is not None:
        sheet.add(
            "capacity_lasts_s",
            capacity_bytes / (ingest_bytes_per_day * demand.replicas) * DAY_S if ingest_bytes_per_day else math.inf,
            "s",
            "capacity_bytes / (ingest_bytes_per_day x replicas) x 86400",
            LITTLE,
        )
    nodes, bound_by = _add_nodes(sheet, demand, hardware, kept_bytes)
    _add_wear(sheet, hardware, nodes)
    _add_cost(sheet, demand, hardware, prices, nodes)
    return Sizing(tuple(sheet.figures), bound_by)


def equal_shares(keeps: Sequence[tuple[str, int]], shares: Sequence[float] | None = None) -> tuple[Promise, ...]:
    """Promises of some classes; without shares, each has the same. Raises ValueError if their counts differ."""
    if shares is not None and len(shares) != len(keeps):
        raise ValueError(f"{len(keeps)} promises but {len(shares)} shares: give one each")
    return tuple(
        Promise(name, keep_for_s, shares[at] if shares is not None else 1 / len(keeps))
        for at, (name, keep_for_s) in enumerate(keeps)
    )


# --- steps ----------------------------------------------------------------------------------------------------------


def _add_traffic(sheet: _Sheet, demand: Demand) -> float:
    """Bytes read and written; returns the bytes that are new each day, one replica."""
    hit_tokens = sheet.add(
        "hit_tokens_per_day", demand.tokens_per_day * demand.hit_share, "tokens/day", "tokens_per_day x hit_share"
    )
    new_tokens = sheet.add(
        "new_tokens_per_day",
        demand.tokens_per_day - hit_tokens + demand.output_tokens_per_day,
        "tokens/day",
        "tokens_per_day x (1 - hit_share) + output_tokens_per_day",
        "what was computed once is stored: missed input, and output",
    )
    read = sheet.add(
        "read_bytes_per_s", hit_tokens * demand.bytes_per_token / DAY_S, "bytes/s",
        "hit_tokens_per_day x bytes_per_token / 86400",
    )  # fmt: skip
    sheet.add("read_peak_bytes_per_s", read * demand.peak_factor, "bytes/s", "read_bytes_per_s x peak_factor")
    ingest = sheet.add(
        "ingest_bytes_per_day", new_tokens * demand.bytes_per_token, "bytes/day", "new_tokens_per_day x bytes_per_token"
    )
    written = sheet.add(
        "write_bytes_per_s", ingest * demand.replicas / DAY_S, "bytes/s", "ingest_bytes_per_day x replicas / 86400"
    )
    sheet.add("write_peak_bytes_per_s", written * demand.peak_factor, "bytes/s", "write_bytes_per_s x peak_factor")
    return ingest


def _add_kept(sheet: _Sheet, demand: Demand, ingest_bytes_per_day: float) -> float:
    """Bytes kept of each class; returns their sum, all replicas."""
    kept = [
        sheet.add(
            f"kept_bytes[{promise.name}]",
            ingest_bytes_per_day * promise.share * (promise.keep_for_s + demand.in_use_s) / DAY_S * demand.replicas,
            "bytes",
            f"ingest_bytes_per_day x share {promise.share:.3g} x (keep {promise.keep_for_s} s + in_use_s) / 86400 "
            "x replicas",
            LITTLE,
        )
        for promise in demand.promises
    ]
    return sheet.add("kept_bytes", sum(kept), "bytes", "sum over the classes")


def _add_nodes(sheet: _Sheet, demand: Demand, hardware: Hardware, kept_bytes: float) -> tuple[int, str]:
    """Drives and nodes by each thing that may run out; returns the nodes needed, and which thing asks for them."""
    written_per_day = sheet.value_of("write_bytes_per_s") * DAY_S * hardware.write_amplification
    drives = {
        "capacity": (
            kept_bytes / hardware.fill_share / hardware.drive_bytes, "kept_bytes / fill_share / drive_bytes", ARITHMETIC
        ),
        "wear": (
            written_per_day / (hardware.drive_writes_per_day * hardware.drive_bytes),
            "write_bytes_per_s x 86400 x write_amplification / (drive_writes_per_day x drive_bytes)",
            JEDEC,
        ),
        "drive reads": (
            sheet.value_of("read_peak_bytes_per_s") / hardware.drive_read_bytes_per_s,
            "read_peak_bytes_per_s / drive_read_bytes_per_s",
            ARITHMETIC,
        ),
        "drive writes": (
            sheet.value_of("write_peak_bytes_per_s") * hardware.write_amplification / hardware.drive_write_bytes_per_s,
            "write_peak_bytes_per_s x write_amplification / drive_write_bytes_per_s",
            ARITHMETIC,
        ),
    }  # fmt: skip
    nodes: dict[str, int] = {}
    for reason, (count, formula, source) in drives.items():
        whole = sheet.add(f"drives_for[{reason}]", math.ceil(count), "drives", f"ceil({formula})", source)
        nodes[reason] = math.ceil(whole / hardware.drives_per_node)
    busiest = max(sheet.value_of("read_peak_bytes_per_s"), sheet.value_of("write_peak_bytes_per_s"))
    nodes["network"] = int(
        sheet.add(
            "nodes_for[network]",
            math.ceil(busiest / (hardware.network_bytes_per_s * hardware.network_share)),
            "nodes",
            "ceil(max(read_peak_bytes_per_s, write_peak_bytes_per_s) / (network_bytes_per_s x network_share))",
            "links carry both directions at once: reads leave, writes arrive",
        )
    )
    nodes["replicas"] = demand.replicas
    bound_by = max(nodes, key=lambda reason: nodes[reason])
    total = sheet.add(
        "nodes", nodes[bound_by], "nodes", "max(ceil(drives_for[each] / drives_per_node), nodes_for[network], replicas)"
    )
    sheet.add("drives", total * hardware.drives_per_node, "drives", "nodes x drives_per_node")
    return nodes[bound_by], bound_by


def _add_wear(sheet: _Sheet, hardware: Hardware, nodes: int) -> None:
    drives = nodes * hardware.drives_per_node
    writes = sheet.add(
        "drive_writes_per_day",
        sheet.value_of("write_bytes_per_s") * DAY_S * hardware.write_amplification / (drives * hardware.drive_bytes),
        "1/day",
        "write_bytes_per_s x 86400 x write_amplification / (drives x drive_bytes)",
        JEDEC,
    )
    sheet.add(
        "worn_out_years",
        hardware.rated_years * hardware.drive_writes_per_day / writes if writes else math.inf,
        "years",
        "rated_years x rated drive_writes_per_day / drive_writes_per_day",
        JEDEC,
    )
    for what in ("read", "write"):
        sheet.add(
            f"node_network_{what}_peak_bytes_per_s",
            sheet.value_of(f"{what}_peak_bytes_per_s") / nodes,
            "bytes/s",
            f"{what}_peak_bytes_per_s / nodes",
        )


def _add_cost(sheet: _Sheet, demand: Demand, hardware: Hardware, prices: Prices, nodes: int) -> None:
    bought = sheet.add(
        "bought_usd",
        nodes * (prices.node_usd + hardware.drives_per_node * prices.drive_usd),
        "USD",
        "nodes x (node_usd + drives_per_node x drive_usd)",
    )
    per_day = sheet.add(
        "usd_per_day",
        bought / (prices.years * YEAR_DAYS) + nodes * prices.node_watts / 1000 * 24 * prices.kwh_usd,
        "USD/day",
        "bought_usd / (years x 365) + nodes x node_watts / 1000 x 24 x kwh_usd",
        "written off evenly; without people, space and the price of money",
    )
    hit_tokens = demand.tokens_per_day * demand.hit_share
    sheet.add(
        "usd_per_million_cached_tokens",
        per_day / (hit_tokens / 1e6) if hit_tokens else math.inf,
        "USD",
        "usd_per_day / (hit_tokens_per_day / 1e6)",
    )


# --- checks ---------------------------------------------------------------------------------------------------------


def _check_number(name: str, value: float, *, least: float = NUMBER_MIN, most: float = NUMBER_MAX) -> None:
    """Within [least, most], and not NaN."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or math.isnan(value):
        raise ValueError(f"{name}: {value!r} is not a number")
    if not least <= value <= most:
        raise ValueError(f"{name}: {value:g} is outside {least:g}..{most:g}")


def _check_count(name: str, value: int, most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise ValueError(f"{name}: {value!r} is not a whole number of 1..{most}")


assert set(SOURCES) <= {item.name for item in fields(Hardware)}, "a source of something that is no default"
