"""The command simulate, its figures, its curves: from trace files to tables, JSON, CSV and picture."""

from __future__ import annotations

import csv
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvstore.limits import GIB, MIB
from kvstore.traffic import ClassRules
from retention.cli import build_app
from retention.curve import Axis, Curve, Point, check_axes, lines_of, parse_axis, settings_of
from retention.figures import class_rows, node_rows, total_row
from retention.policy import load_class_rules, policy_text
from retention.replay import Setting, replay
from retention.trace import read_trace
from retention.workload import make_workload
from tests.support.traffic import made_up_prompts, made_up_workload

DAY_S, HOUR_S = 86_400, 3600
RULES = load_class_rules(None)[0]


def run(*words: str) -> Any:
    return CliRunner().invoke(build_app(), ["simulate", *words])


@pytest.fixture
def traffic(tmp_path: Path) -> Path:
    """A small trace with global numbers and times, of one class."""
    path = tmp_path / "traffic.jsonl"
    rows = [
        {"timestamp": prompt.at_s * 1000, "hash_ids": [n for f, c in prompt.runs for n in range(f, f + c)]}
        for prompt, _ in made_up_prompts(5, requests=120, gap_s=3000.0)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def conversations(tmp_path: Path) -> Path:
    path = tmp_path / "coding.jsonl"
    turns = [{"k": "n", "t": 60.0 * at, "in": 64 * 9 * at, "runs": [[1, 9 * at]]} for at in range(1, 6)]
    path.write_text(json.dumps({"block_size": 64, "requests": turns}) + "\n")
    return path


# --- figures --------------------------------------------------------------------------------------------------


def test_rows_add_up() -> None:
    """Classes to all, nodes to all, hits and what was computed to what was asked, kept and gone to what was stored."""
    workload = made_up_workload(3, requests=200, gap_s=2000.0)
    outcome = replay(workload, Setting(RULES, 60_000, 10 * MIB, nodes=3))
    *classes, everything = class_rows(outcome)
    assert {row["class"] for row in classes} == {"agent", "chat"}
    for name in ("requests", "prompt_tokens", "hit_tokens", "stored_blocks", "evicted_blocks", "kept_bytes_end"):
        assert sum(row[name] for row in classes) == everything[name], name
    for row in (*classes, everything):
        assert row["hit_tokens"] + row["recomputed_tokens"] == row["prompt_tokens"]
    for name in ("stored_blocks", "rewritten_blocks", "kept_bytes_end", "written_bytes"):
        assert sum(row[name] for row in node_rows(outcome)) == everything[name], name
    gone = everything["evicted_blocks"] + everything["expired_blocks"]
    assert everything["stored_blocks"] * outcome.setting.record_bytes == everything["kept_bytes_end"] + (
        gone * outcome.setting.record_bytes
    )
    assert everything["requests"] == 200


def test_what_is_said_of_a_day_is_what_happened_over_the_days() -> None:
    """Two days' traffic: half of what was written is written a day; wear is device writes over the capacity."""
    workload = made_up_workload(3, requests=200, gap_s=2000.0)
    outcome = replay(workload, Setting(RULES, 60_000, 10 * MIB))
    (node,) = node_rows(outcome)
    days = workload.span_s / DAY_S
    assert node["written_bytes_per_day"] == pytest.approx(node["written_bytes"] / days, rel=1e-6)
    moved = node["rewritten_blocks"] * outcome.setting.record_bytes
    assert node["device_bytes_per_day"] == pytest.approx((node["written_bytes"] + moved) / days, rel=1e-6)
    assert node["drive_writes_per_day"] == pytest.approx(node["device_bytes_per_day"] / (10 * MIB))


def test_more_room_and_longer_promises_never_hit_less() -> None:
    """On one trace: from a small store to one without bound, and from minutes to days."""
    workload = made_up_workload(11, requests=300, gap_s=2000.0)
    small, large, unbounded = (
        total_row(replay(workload, Setting(RULES, 60_000, capacity)))["token_hit_rate"]
        for capacity in (10 * MIB, 40 * MIB, None)
    )
    assert small < large <= unbounded
    axes = (Axis("keep", (60, HOUR_S, 30 * DAY_S)),)
    rates = [
        total_row(replay(workload, setting))["token_hit_rate"]
        for _, setting in settings_of(axes, Setting(RULES, 60_000))
    ]
    assert rates == sorted(set(rates))
    assert rates[-1] == unbounded


# --- curves ---------------------------------------------------------------------------------------------------


def test_axes_are_read_as_written() -> None:
    assert parse_axis("capacity=1GiB, 1.5TiB,unlimited") == Axis("capacity", (GIB, 1536 * GIB, None))
    assert parse_axis("keep=5m,3d12h") == Axis("keep", (300, 84 * HOUR_S))
    assert [parse_axis("capacity=1GiB,unlimited").label(value) for value in (GIB, None)] == ["1GiB", "unlimited"]


@pytest.mark.parametrize(
    "text", ["keep", "keep=", "keep=5", "keep=-5m", "keep=0s", "capacity=7", "nodes=1,2", "keep=1h,60m", "keep=1h,,2h"]
)
def test_axes_that_make_no_curve(text: str) -> None:
    with pytest.raises(ValueError, match=r"sweep|unit|outside|duration|size"):
        parse_axis(text)


def test_axes_are_one_or_two_and_their_points_bounded() -> None:
    keep, capacity = Axis("keep", tuple(range(1, 18))), Axis("capacity", tuple(range(1, 18)))
    for axes in ((), (keep, keep), (keep, capacity)):
        with pytest.raises(ValueError, match=r"--sweep|points"):
            check_axes(axes)


def test_a_second_axis_makes_lines() -> None:
    """Each of its values is a line with all points of the first."""
    axes = (Axis("keep", (60, 3600)), Axis("capacity", (8 * MIB, None)))
    workload = made_up_workload(3, requests=40)
    made = settings_of(axes, Setting(RULES, 60_000))
    assert [values for values, _ in made] == [(60, 8 * MIB), (60, None), (3600, 8 * MIB), (3600, None)]
    points = tuple(Point(values, replay(workload, setting)) for values, setting in made)

    lines = lines_of(Curve(axes, points))
    assert [(name, [o.setting.rules.rules[0].keep_for_s for o in outcomes]) for name, outcomes in lines] == [
        ("capacity 8MiB", [60, 3600]),
        ("capacity unlimited", [60, 3600]),
    ]


# --- the command ----------------------------------------------------------------------------------------------


def test_it_shows_classes_and_nodes(traffic: Path) -> None:
    """Tables for people name the trace, the store, each node; JSON says the same in numbers."""
    words = [str(traffic), "--bytes-per-token", "100", "--capacity", "20MiB", "--nodes", "2", "--keep", "chat=1h"]
    shown = run(*words)
    assert shown.exit_code == 0, shown.output
    for part in (
        "traffic.jsonl: 120 requests, blocks of 512 tokens",
        "2 nodes; capacity 20MiB each",
        "chat 1h",
        "chat",
    ):
        assert part in shown.stdout
    document = json.loads(run(*words, "--json").stdout)
    assert [row["class"] for row in document["classes"]] == ["chat"]
    assert [row["node"] for row in document["nodes"]] == [0, 1]
    assert document["setting"]["payload_bytes"] == 51_200
    assert document["setting"]["keep_for_s"] == {"agent": 3 * DAY_S, "chat": HOUR_S}
    assert document["source"]["seed"] is None
    assert document["classes"][0]["requests"] == 120


def test_conversations_are_agents_unless_told_and_their_seed_is_shown(conversations: Path, traffic: Path) -> None:
    """Several traces share one store; CLASS=TRACE names whose requests they are."""
    shown = run(str(conversations), "--bytes-per-token", "9", "--seed", "77").stdout
    assert "seed 77" in shown
    assert "agent" in shown
    document = json.loads(run(f"chat={conversations}", "--bytes-per-token", "9", "--json").stdout)
    (row,) = document["classes"]
    assert (row["class"], row["requests"], row["prompt_tokens"]) == ("chat", 5, 64 * 9 * 15)
    assert row["hit_tokens"] == 64 * 9 * 10
    mixed = run(str(conversations), str(traffic), "--bytes-per-token", "9")
    assert mixed.exit_code == 2
    assert "blocks of 64 and 512 tokens" in mixed.output
    twice = json.loads(run(str(conversations), f"chat={conversations}", "--bytes-per-token", "9", "--json").stdout)
    assert [item["hit_tokens"] for item in twice["classes"]] == [5760, 5760, 11_520]


def test_a_curve_as_table_csv_and_picture(tmp_path: Path, traffic: Path) -> None:
    """A row a point and class, in the order given; the picture is a PNG."""
    table, picture = tmp_path / "curve.csv", tmp_path / "curve.png"
    words = ["--bytes-per-token", "100", "--sweep", "keep=5m,1h,7d", "--sweep", "capacity=20MiB,unlimited"]
    done = run(str(traffic), *words, "--csv", str(table), "--png", str(picture))
    assert done.exit_code == 0, done.output
    rows = list(csv.DictReader(table.read_text().splitlines()))
    assert [(row["keep"], row["capacity"]) for row in rows] == [
        (keep, capacity) for keep in ("5m", "1h", "7d") for capacity in ("20MiB", "unlimited")
    ]
    assert float(rows[1]["token_hit_rate"]) <= float(rows[5]["token_hit_rate"])
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert [row["keep_s"] for row in json.loads(run(str(traffic), *words, "--json").stdout)["points"]][:2] == [300, 300]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--capacity", "7"], "has no unit"),
        (["--capacity", "-5GiB"], "is not a size"),
        (["--capacity", "1MiB"], "it needs at least 8MiB"),
        (["--nodes", "0"], "--nodes 0 is outside"),
        (["--keep", "agent"], "write CLASS=DURATION"),
        (["--keep", "agents=2d"], "there is no class 'agents'"),
        (["--keep", "agent=7"], "has no unit"),
        (["--every", "0s"], "sweeps a second apart"),
        (["--arrivals", "0"], "arrivals a second"),
        (["--png", "x.png"], "give --sweep too"),
        (["--csv", "no-such-folder/x.csv"], "there is no folder no-such-folder"),
        (["--sweep", "nodes=3"], "write capacity="),
        (["--segment", "3KiB"], "segments of"),
        (["--policy", "absent.toml"], "absent.toml"),
        (["--bytes-per-token", "nan"], "--bytes-per-token nan"),
        (["--bytes-per-token", "1e7", "--capacity", "64MiB"], "does not fit a segment"),
    ],
)
def test_what_cannot_be_simulated_is_said_at_once(traffic: Path, words: list[str], said: str) -> None:
    """One line, exit code 2 (or 1 where a size makes no store), before anything is replayed."""
    done = run(str(traffic), "--bytes-per-token", "9", *words)
    assert done.exit_code in (1, 2), done.output
    assert said in done.output
    assert "Traceback" not in done.output


def test_floors_must_fit_every_capacity_of_a_curve(tmp_path: Path, traffic: Path) -> None:
    """A point whose floors are beyond its capacity is refused before the others are replayed."""
    policy = tmp_path / "policy.toml"
    agent, chat = RULES.rules
    policy.write_text(policy_text(ClassRules((agent, replace(chat, floor_bytes=30 * MIB)))))
    words = ["--bytes-per-token", "9", "--policy", str(policy), "--sweep"]
    assert run(str(traffic), *words, "capacity=40MiB,unlimited").exit_code == 0
    refused = run(str(traffic), *words, "capacity=40MiB,20MiB")
    assert refused.exit_code == 2
    assert "more than the capacity of 20MiB" in refused.output


def test_traces_that_cannot_be_used(tmp_path: Path, traffic: Path) -> None:
    """A missing file, a class that nobody knows, a damaged line with its number."""
    missing = run(str(tmp_path / "none"), "--bytes-per-token", "9")
    assert missing.exit_code == 1
    assert "No such file" in missing.output
    unknown = run(f"talk={traffic}", "--bytes-per-token", "9")
    assert unknown.exit_code == 2
    assert "no class 'talk'" in unknown.output
    with traffic.open("a") as file:
        file.write('{"timestamp": 5}\n')
    damaged = run(str(traffic), "--bytes-per-token", "9")
    assert damaged.exit_code == 2
    assert "line 121: " in damaged.output


# --- real traces, where they are at hand --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "rate"),
    [("weka_agentic_runs.jsonl.gz", 0.9632), ("synthetic_trace.jsonl", 0.6512)],
    ids=["agentic", "mooncake"],
)
def test_known_hit_rates_without_a_bound(name: str, rate: float) -> None:
    """What an unbounded cache hits of two public traces is known."""
    path = Path(os.environ.get("REPRISE_TRACES", "")) / name
    if not os.environ.get("REPRISE_TRACES") or not path.exists():
        pytest.skip(f"REPRISE_TRACES names no folder with {name}")
    trace = read_trace(path, seed=1)
    workload = make_workload([(prompt, 1) for prompt in trace.prompts], trace.block_tokens)
    found = total_row(replay(workload, Setting(RULES, 890 * trace.block_tokens)))
    assert found["token_hit_rate"] == pytest.approx(rate, abs=1e-4)
