"""The plan: what a traffic and its promises need, by formulas that each figure carries."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from retention.cli import build_app
from retention.plan_cli import parse_promises
from retention.session import EXIT_OK, EXIT_USAGE
from retention.sizing import DAY_S, Demand, Hardware, Prices, equal_shares, size_store

PIB = 2**50
GLOBAL_BYTES = 890.0
"""A token's global KV: DeepSeek-V4.1-Flash technical report, abstract (2026)."""
PERSISTENT_BYTES_BEFORE = 8 * GLOBAL_BYTES
"""The same report: what is kept on SSD is roughly 1/8 of that of DeepSeek-V4-Flash, whose windows lie there too."""
TOKENS_PER_DAY, HIT_SHARE, FLEET_BYTES = 155e12, 0.96, 100 * PIB
"""The production case: figures that a public service gives of itself."""

THREE_DAYS = equal_shares([("all", 3 * DAY_S)])


def production(**changes: Any) -> Demand:
    return replace(Demand(TOKENS_PER_DAY, HIT_SHARE, PERSISTENT_BYTES_BEFORE, THREE_DAYS), **changes)


def planned(demand: Demand, capacity_bytes: float | None = None, **hardware: Any) -> dict[str, float]:
    sizing = size_store(demand, replace(Hardware(), **hardware), Prices(), capacity_bytes)
    return {figure.name: figure.value for figure in sizing.figures}


def test_the_public_production_case_comes_out_at_its_size() -> None:
    """155 T tokens a day, 96 % hits, at least 72 hours: the plan says what the fleet is, within a fifth of 100 PiB."""
    figures = planned(production(), FLEET_BYTES)
    assert figures["new_tokens_per_day"] == pytest.approx(6.2e12)
    assert figures["kept_bytes"] / FLEET_BYTES == pytest.approx(1.176, abs=0.001)
    assert figures["capacity_lasts_s"] / 3600 == pytest.approx(61.2, abs=0.1)


def test_a_smaller_token_makes_the_same_fleet_last_longer() -> None:
    """At 890 bytes a token the fleet of the production case holds 20 days, or 10 with two replicas."""
    one = planned(production(bytes_per_token=GLOBAL_BYTES), FLEET_BYTES)
    two = planned(production(bytes_per_token=GLOBAL_BYTES, replicas=2), FLEET_BYTES)
    assert one["capacity_lasts_s"] / DAY_S == pytest.approx(20.4, abs=0.05)
    assert two["capacity_lasts_s"] / DAY_S == pytest.approx(10.2, abs=0.05)
    assert one["read_bytes_per_s"] == pytest.approx(155e12 * 0.96 * 890 / 86_400)
    assert one["read_bytes_per_s"] == two["read_bytes_per_s"]
    assert two["write_bytes_per_s"] == pytest.approx(2 * 155e12 * 0.04 * 890 / 86_400)


def test_classes_are_kept_by_their_shares() -> None:
    """Each class holds its share of the ingest for its own time; the whole is their sum."""
    promises = equal_shares([("agent", 3 * DAY_S), ("chat", 7 * DAY_S)], [0.75, 0.25])
    figures = planned(Demand(1e12, 0.5, 1000, promises, in_use_s=DAY_S / 2))
    assert figures["kept_bytes[agent]"] == pytest.approx(5e14 * 0.75 * 3.5)
    assert figures["kept_bytes[chat]"] == pytest.approx(5e14 * 0.25 * 7.5)
    assert figures["kept_bytes"] == pytest.approx(figures["kept_bytes[agent]"] + figures["kept_bytes[chat]"])


@pytest.mark.parametrize(
    ("change", "bound_by"),
    [
        ({}, "capacity"),
        ({"drive_writes_per_day": 0.01}, "wear"),
        ({"drive_read_bytes_per_s": 1e6}, "drive reads"),
        ({"drive_write_bytes_per_s": 1e5}, "drive writes"),
        ({"network_bytes_per_s": 1e7}, "network"),
    ],
)
def test_what_runs_out_first_decides_how_many_nodes(change: dict[str, Any], bound_by: str) -> None:
    """Nodes are as many as the scarcest thing needs, and never fewer than replicas."""
    demand = Demand(1e12, 0.5, 890, THREE_DAYS, replicas=3)
    sizing = size_store(demand, replace(Hardware(), **change), Prices())
    assert sizing.bound_by == bound_by
    drives = [figure.value for figure in sizing.figures if figure.name.startswith("drives_for")]
    assert sizing.value_of("drives") >= max(drives)
    assert size_store(Demand(1, 0.5, 1, THREE_DAYS, 3), Hardware(), Prices()).value_of("nodes") == 3


def test_wear_is_the_rating_used_up() -> None:
    """At the rated writes a day the drives last the rated years; at half of it, twice as long."""
    hardware = Hardware(drive_bytes=1e12, drives_per_node=1, write_amplification=1.0, fill_share=1.0)
    full = size_store(Demand(1e9, 0.0, 1000, equal_shares([("all", DAY_S)])), hardware, Prices())
    assert full.value_of("drive_writes_per_day") == pytest.approx(1.0)
    assert full.value_of("worn_out_years") == pytest.approx(5.0)
    half = size_store(Demand(1e9, 0.5, 1000, equal_shares([("all", 2 * DAY_S)])), hardware, Prices())
    assert half.value_of("worn_out_years") == pytest.approx(10.0)


def test_cost_is_what_was_bought_over_its_years_and_power() -> None:
    """1825 USD over a year, and 1 kW at 0.5 USD: 17 USD a day, for a million cached tokens."""
    prices = Prices(drive_usd=825, node_usd=1000, years=1, node_watts=1000, kwh_usd=0.5)
    sizing = size_store(Demand(2e6, 0.5, 1, THREE_DAYS), Hardware(drives_per_node=1), prices)
    assert sizing.value_of("usd_per_day") == pytest.approx(17.0)
    assert sizing.value_of("usd_per_million_cached_tokens") == pytest.approx(17.0)


def test_nothing_new_and_nothing_reused_have_answers() -> None:
    """All hits wear nothing and no hits cost without end: stated, not divided by zero."""
    assert planned(production(hit_share=1.0), FLEET_BYTES)["capacity_lasts_s"] == math.inf
    assert planned(production(hit_share=1.0))["worn_out_years"] == math.inf
    assert planned(production(hit_share=0.0))["usd_per_million_cached_tokens"] == math.inf


@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf, -math.inf, 1e25, True])
@pytest.mark.parametrize(
    "field", ["tokens_per_day", "hit_share", "bytes_per_token", "output_tokens_per_day", "in_use_s", "peak_factor"]
)
def test_impossible_demands_are_refused_by_name(field: str, value: float) -> None:
    """Negative, endless, NaN and absurd numbers name the field that is wrong."""
    with pytest.raises(ValueError, match=field):
        production(**{field: value})


@pytest.mark.parametrize("value", [0, -1.0, math.nan, math.inf])
@pytest.mark.parametrize("field", sorted(set(Hardware.__slots__)))
def test_impossible_hardware_is_refused_by_name(field: str, value: float) -> None:
    """No drive of no bytes, no link of no width."""
    changes: dict[str, Any] = {field: value}
    with pytest.raises(ValueError, match=field):
        replace(Hardware(), **changes)


def test_the_largest_and_smallest_numbers_do_not_overflow() -> None:
    """Whatever is accepted has a plan of finite figures."""
    huge = Demand(1e24, 0.5, 1e24, equal_shares([("all", 10**9)]), 16, 1e24, 1e24, 1000.0)
    tiny = Hardware(1e-12, 1, 1e-12, 1e-12, 1e-12, 1e-12, 1000.0, 1e-12, 1e-12, 1e-12)
    assert all(math.isfinite(figure.value) for figure in size_store(huge, tiny, Prices(years=1e-12)).figures)


@pytest.mark.parametrize(
    ("keep", "share"),
    [("", None), ("3", None), ("-3d", None), ("0s", None), ("3d,3d", None), ("=3d", None), ("3d,7d", "1"),
     ("3d,7d", "0.5,0.6"), ("3d,7d", "nan,0.5"), ("3d,7d", "half,half"), ("3d,7d", "-1,2")],
)  # fmt: skip
def test_promises_are_checked(keep: str, share: str | None) -> None:
    """Durations have units, classes are named once, and shares add up to one."""
    with pytest.raises(ValueError, match=r"duration|unit|outside|once|share|DURATION|number"):
        Demand(1e12, 0.5, 890, parse_promises(keep, share))


# --- the command ----------------------------------------------------------------------------------------------------

GIVEN = ("--tokens-per-day", "155e12", "--hit", "0.96", "--bytes-per-token", "890", "--keep", "agent=3d,chat=7d")


def run(*arguments: str) -> Result:
    result = CliRunner().invoke(build_app(), ["plan", *GIVEN, *arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def test_plan_prints_every_formula_with_its_source() -> None:
    """Table and JSON carry the same figures, each with formula and source, and say which inputs were assumed."""
    document = json.loads(run("--replicas", "2", "--capacity", "100PiB", "--json").stdout)
    table = run("--replicas", "2", "--capacity", "100PiB").stdout
    for figure in document["figures"]:
        assert figure["name"] in table
        assert figure["formula"]
        assert figure["source"]
    assert "10d4h" in table
    sources = {row["name"]: row["source"] for row in document["inputs"]}
    assert sources["tokens_per_day"] == sources["replicas"] == "given"
    assert sources["drive_usd"].startswith("assumed")
    assert sources["drive_bytes"].startswith("3FS")


@pytest.mark.parametrize(
    "arguments",
    [("--hit", "nan"), ("--hit", "96"), ("--tokens-per-day", "-1"), ("--bytes-per-token", "0"), ("--replicas", "0"),
     ("--keep", "3"), ("--drive-size", "0B"), ("--drive-size", "14"), ("--drive-read", "6GB"), ("--network", "9e99B/s"),
     ("--years", "0"), ("--drive-price", "-1"), ("--capacity", "0B"), ("--in-use", "-1h"), ("--peak", "0.5")],
    ids=" ".join,
)  # fmt: skip
def test_wrong_options_are_wrong_usage(arguments: tuple[str, ...]) -> None:
    """One line that says what is wrong, and exit code 2."""
    result = run(*arguments)
    assert result.exit_code == EXIT_USAGE
    assert result.stderr.startswith("error: ")


def test_a_plan_without_end_is_printed_and_is_json() -> None:
    """No new tokens: the capacity lasts without end, which JSON says as null."""
    result = run("--hit", "1", "--capacity", "1PiB")
    assert result.exit_code == EXIT_OK
    assert "without end" in result.stdout
    assert "more than 100 years" in run("--hit", "0.999999999999", "--capacity", "100PiB").stdout
    assert "Infinity" not in run("--hit", "1", "--capacity", "1PiB", "--json").stdout


def test_bytes_a_token_are_a_number_or_a_size() -> None:
    """The option's name has the unit of a bare number; with another unit it is a size as everywhere."""
    documents = [run("--bytes-per-token", text, "--json").stdout for text in ("23040", "2.304e4", "22.5KiB")]
    assert len(set(documents)) == 1
    wrong = run("--bytes-per-token", "22.5 kibi")
    assert wrong.exit_code == EXIT_USAGE
    assert "unknown unit" in wrong.stderr or "not a size" in wrong.stderr
