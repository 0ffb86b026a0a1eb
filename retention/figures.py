"""What a replay says, in figures: a row a class, a row a node, as tables and as JSON.

Owns the figures' names and how they follow from counts. Does not replay. Units are last in names; bytes are those of
records on disk; what is said of a day is what happened, over the days between the first and the last request.
Invariants: ``hit_tokens`` and ``recomputed_tokens`` of a row add up to its ``prompt_tokens``; a table shows nothing
that the JSON lacks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rich.table import Table

from kvstore.traffic import ClassRules
from kvstore.units import format_bytes, format_bytes_short, format_duration
from retention.replay import Keeping, Outcome, Setting
from retention.volume import Counts

DAY_S = 86_400.0
SPAN_S_MIN = 1.0

Row = dict[str, Any]
ALL = "all"


def class_rows(outcome: Outcome) -> list[Row]:
    """A row a class that traffic or blocks were of, and where there are several, one for all."""
    rules = outcome.setting.rules
    rows = [_class_row(outcome, class_byte, rules.name_of(class_byte)) for class_byte in outcome.classes]
    return [*rows, _class_row(outcome, None, ALL)] if len(rows) != 1 else rows


def total_row(outcome: Outcome) -> Row:
    """All classes as one."""
    return _class_row(outcome, None, ALL)


def node_rows(outcome: Outcome) -> list[Row]:
    """A row a node. ``drive_writes_per_day``: device writes over the capacity; null without a bound."""
    capacity_bytes = outcome.setting.capacity_bytes
    rows: list[Row] = []
    for node, keeping in enumerate(outcome.node_keeping):
        row: Row = {"node": node, **_kept(outcome, keeping), **_written(outcome, outcome.counts_of(node=node))}
        per_day = row["device_bytes_per_day"]
        row["drive_writes_per_day"] = per_day / capacity_bytes if capacity_bytes else None
        rows.append(row)
    return rows


def outcome_json(outcome: Outcome) -> Row:
    return {
        "setting": setting_json(outcome.setting),
        "span_s": outcome.span_s,
        "block_accesses": outcome.accesses,
        "segments_recycled": outcome.segments_recycled,
        "classes": class_rows(outcome),
        "nodes": node_rows(outcome),
    }


def setting_json(setting: Setting) -> Row:
    return {
        "capacity_bytes": setting.capacity_bytes,
        "nodes": setting.nodes,
        "volumes": setting.volumes,
        "payload_bytes": setting.payload_bytes,
        "record_bytes": setting.record_bytes,
        "segment_bytes": setting.layout.segment_bytes,
        "sweep_every_s": setting.sweep_every_s,
        "keep_for_s": {rule.name: rule.keep_for_s for rule in setting.rules.rules},
    }


def class_table(outcome: Outcome) -> Table:
    table = _table("what each class found, and what it cost", "class")
    headings = ("requests", "prompt tokens", "hit tokens", "hit rate", "loaded", "recomputed tokens", "kept (mean)")
    for heading in (*headings, "written/day", "device/day", "promises kept", "refused", "declined"):
        table.add_column(heading, justify="right")
    for row in class_rows(outcome):
        table.add_row(
            row["class"],
            f"{row['requests']:,}",
            f"{row['prompt_tokens']:,}",
            f"{row['hit_tokens']:,}",
            f"{row['token_hit_rate']:.1%}",
            format_bytes_short(row["loaded_bytes"]),
            f"{row['recomputed_tokens']:,}",
            format_bytes_short(row["kept_bytes_mean"]),
            format_bytes_short(row["written_bytes_per_day"]),
            format_bytes_short(row["device_bytes_per_day"]),
            f"{row['promises_kept']:.1%}",
            f"{row['refused_blocks']:,}",
            f"{row['declined_blocks']:,}",
        )
    return table


def node_table(outcome: Outcome) -> Table:
    table = _table("what each node holds and writes", "node")
    for heading in ("kept (mean)", "kept (most)", "segments (most)", "written/day", "device/day", "drive writes/day"):
        table.add_column(heading, justify="right")
    for row in node_rows(outcome):
        wear = row["drive_writes_per_day"]
        table.add_row(
            str(row["node"]),
            format_bytes_short(row["kept_bytes_mean"]),
            format_bytes_short(row["kept_bytes_max"]),
            f"{row['segments_max']:,}",
            format_bytes_short(row["written_bytes_per_day"]),
            format_bytes_short(row["device_bytes_per_day"]),
            "-" if wear is None else f"{wear:.3f}",
        )
    return table


def curve_table(rows: Iterable[Row], axes: Sequence[str]) -> Table:
    """Rows of a curve; ``axes`` name their first columns."""
    table = _table("the curve", axes[0])
    for heading in (*axes[1:], "class"):
        table.add_column(heading)
    for heading in ("hit rate", "recomputed tokens", "kept (mean)", "kept (most)", "written/day", "device/day"):
        table.add_column(heading, justify="right")
    table.add_column("promises kept", justify="right")
    for row in rows:
        table.add_row(
            *(row[name] for name in (*axes, "class")),
            f"{row['token_hit_rate']:.2%}",
            f"{row['recomputed_tokens']:,}",
            format_bytes_short(row["kept_bytes_mean"]),
            format_bytes_short(row["kept_bytes_max"]),
            format_bytes_short(row["written_bytes_per_day"]),
            format_bytes_short(row["device_bytes_per_day"]),
            f"{row['promises_kept']:.1%}",
        )
    return table


def setting_line(setting: Setting, varied: Sequence[str] = ()) -> str:
    """The store that was simulated, in one line, without what is ``varied`` along a curve."""
    parts = ["1 node" if setting.nodes == 1 else f"{setting.nodes} nodes"]
    if "capacity" not in varied:
        capacity = "unlimited" if setting.capacity_bytes is None else format_bytes(setting.capacity_bytes)
        parts.append(f"capacity {capacity}" + (" each" if setting.nodes > 1 else ""))
    if setting.volumes > 1:
        parts.append(f"{setting.volumes} volumes a node")
    parts.append(f"records of {format_bytes(setting.record_bytes)}")
    if "keep" not in varied:
        parts.append(f"keeps {keeps_of(setting.rules)}")
    return "; ".join(parts)


def keeps_of(rules: ClassRules) -> str:
    return ", ".join(f"{rule.name} {format_duration(rule.keep_for_s)}" for rule in rules.rules)


def _class_row(outcome: Outcome, class_byte: int | None, name: str) -> Row:
    traffic, counts = outcome.traffic_of(class_byte), outcome.counts_of(class_byte=class_byte)
    loaded_bytes = traffic.hit_blocks * outcome.setting.record_bytes
    keeping = outcome.all_keeping if class_byte is None else outcome.keeping.get(class_byte, Keeping())
    return {
        "class": name,
        "requests": traffic.requests,
        "prompt_tokens": traffic.prompt_tokens,
        "hit_tokens": traffic.hit_tokens,
        "recomputed_tokens": traffic.prompt_tokens - traffic.hit_tokens,
        "token_hit_rate": traffic.hit_tokens / max(traffic.prompt_tokens, 1),
        "loaded_bytes": loaded_bytes,
        "loaded_bytes_per_day": round(loaded_bytes / _days(outcome)),
        **_kept(outcome, keeping),
        **_written(outcome, counts),
    }


def _kept(outcome: Outcome, keeping: Keeping) -> Row:
    """Living blocks by samples: mean, most and at the end."""
    size = outcome.setting.record_bytes
    return {
        "kept_bytes_mean": keeping.blocks_sum * size // max(outcome.samples, 1),
        "kept_bytes_max": keeping.blocks_max * size,
        "kept_bytes_end": keeping.blocks_end * size,
        "segments_max": keeping.segments_max,
    }


def _written(outcome: Outcome, counts: Counts) -> Row:
    """``promises_kept``: of the blocks stored, those that were not dropped before their time."""
    size, days = outcome.setting.record_bytes, _days(outcome)
    return {
        "stored_blocks": counts.stored,
        "refused_blocks": counts.refused,
        "declined_blocks": counts.declined,
        "rewritten_blocks": counts.rewritten,
        "evicted_blocks": counts.evicted,
        "expired_blocks": counts.expired,
        "promises_kept": 1 - counts.evicted / counts.stored if counts.stored else 1.0,
        "written_bytes": counts.stored * size,
        "written_bytes_per_day": round(counts.stored * size / days),
        "device_bytes_per_day": round((counts.stored + counts.rewritten) * size / days),
    }


def _days(outcome: Outcome) -> float:
    return max(outcome.span_s, SPAN_S_MIN) / DAY_S


def _table(title: str, first: str) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column(first)
    return table
