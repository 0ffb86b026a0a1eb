"""What retention shows: the same facts as tables for people and as JSON for programs.

Owns wording, columns and JSON names (units last: ``payload_bytes``, ``next_expiry_s``; ids and keys in hex; times in
seconds since the epoch). Does not fetch or decide. Invariant: a table shows nothing that the JSON lacks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from kvstore.keys import Space, SpaceId
from kvstore.purges import ByNode, Leftovers, leftovers_to_json, order_to_json, report_to_json
from kvstore.store import Effect, Pin, Policy
from kvstore.traffic import ClassRule, ClassRules
from kvstore.units import format_bytes, format_bytes_short, format_duration
from kvstore.wording import printable, span, utc
from retention.planner import UNTOUCHED, Usage
from retention.policy import ClassChange, diff_policies, size_text
from retention.prefixes import opaque_note
from retention.purge import Purge
from retention.receipt import Receipt
from retention.sweeper import SweepReport

Json = dict[str, Any]
SPACE_DIGITS_SHOWN = 12


@dataclass(frozen=True, slots=True)
class Facts:
    """Names that rows are shown with: classes by the policy in force, spaces as registered."""

    rules: ClassRules
    spaces: Mapping[SpaceId, Space]

    def class_name(self, class_byte: int) -> str:
        return "untouched" if class_byte == UNTOUCHED else self.rules.name_of(class_byte)

    def is_ruled(self, class_byte: int) -> bool:
        """Whether a rule names the class; else its blocks are kept at the longest promise of all."""
        return self.rules.by_byte(class_byte) is not None

    def space_name(self, space_id: SpaceId) -> str:
        """Short id, model, and a mark for a tenant's own space."""
        space = self.spaces.get(space_id)
        short = space_id.hex()[:SPACE_DIGITS_SHOWN]
        if space is None:
            return short
        return f"{short} {printable(space.model)}" + (" (tenant)" if space.tenant_salt is not None else "")


# --- JSON -----------------------------------------------------------------------------------------------------------


def show_json(
    rows: Iterable[tuple[int | None, SpaceId | None, Usage]], facts: Facts, failed: Mapping[str, str], without_key: int
) -> Json:
    """What ``show`` says: its rows, by name the nodes whose blocks are not in them, and how many blocks in all no
    cipher key reads.
    """
    return {
        "rows": [usage_json(*row, facts) for row in rows],
        "nodes_failed": dict(failed),
        "blocks_without_key": without_key,
    }


def usage_json(class_byte: int | None, space_id: SpaceId | None, usage: Usage, facts: Facts) -> Json:
    """One row of ``show``; ``class`` or ``space`` is null where the row is about all of them."""
    space = facts.spaces.get(space_id) if space_id else None
    return {
        "class": None if class_byte is None else facts.class_name(class_byte),
        "ruled": facts.is_ruled(class_byte) if class_byte else None,
        "space": space_id.hex() if space_id else None,
        "model": space.model if space else None,
        "blocks": usage.blocks,
        "payload_bytes": usage.payload_bytes,
        "stored_bytes": usage.stored_bytes,
        "oldest_written_s": usage.oldest_written_s or None,
        "next_expiry_s": usage.next_expiry_s or None,
        "expired_blocks": usage.expired_blocks,
        "expired_bytes": usage.expired_bytes,
        "pinned_blocks": usage.pinned_blocks,
    }


def policy_json(policy: Policy) -> Json:
    return {
        "version": policy.version,
        "changed_s": policy.changed_s or None,
        "author": policy.author or None,
        "classes": policy.rules.to_json(),
        "text": policy.text,
    }


def history_json(policies: Sequence[Policy]) -> list[Json]:
    """Each policy, with what it changed of the one before; null for the first that is remembered."""
    rows = []
    for before, policy in zip((None, *policies), policies, strict=False):
        changes = None if before is None else changes_json(diff_policies(before.rules, policy.rules))
        rows.append({**policy_json(policy), "changes": changes})
    return rows


def effect_json(effect: Effect, facts: Facts) -> Json:
    return {
        "applied": effect.applied,
        "blocks": effect.blocks,
        "payload_bytes": effect.payload_bytes,
        "segments_freed": effect.segments_freed,
        "blocks_rewritten": effect.blocks_rewritten,
        "nodes_failed": dict(effect.nodes_failed or {}),
        "removed": [
            {
                "class": facts.class_name(item.class_byte),
                "space": item.space_id.hex(),
                "blocks": item.blocks,
                "payload_bytes": item.payload_bytes,
            }
            for item in effect.removed
        ],
    }


def changes_json(changes: Iterable[ClassChange]) -> list[Json]:
    def rule_json(rule: ClassRule | None) -> Json | None:
        return ClassRules((rule,)).to_json()[0] if rule else None

    return [{"class": item.name, "before": rule_json(item.before), "after": rule_json(item.after)} for item in changes]


def sweep_json(report: SweepReport, facts: Facts) -> Json:
    effect = effect_json(report.effect, facts) if report.effect else None
    return {"event": "sweep", "at_s": round(report.at_s, 3), "error": report.error, "effect": effect}


def purge_json(purge: Purge) -> Json:
    return {
        "applied": purge.applied,
        "blocks": purge.blocks_total,
        "payload_bytes": purge.payload_bytes,
        "loose_blocks": purge.loose_blocks,
        "shared_blocks": purge.shared_blocks,
        "opaque_spaces": purge.opaque_spaces,
        "whole_spaces": purge.whole_spaces,
        "pinned_blocks": len(purge.pinned),
        "holds": [pin_json(pin) for pin in purge.holds],
        "spaces": {space_id.hex(): count for space_id, count in purge.blocks.items()},
    }


def receipt_json(receipt: Receipt) -> Json:
    return {
        "order": order_to_json(receipt.order),
        "complete": receipt.complete,
        "nodes": {name: report_to_json(done) for name, done in receipt.reports.items()},
        "nodes_failed": dict(receipt.failed),
        "signed_s": receipt.signed_s,
        "public_key": receipt.public_key.hex(),
    }


def leftovers_json(receipt: Receipt, left: ByNode[Leftovers], trusted: bool) -> Json:
    return {
        "purge_id": receipt.order.purge_id,
        "complete": receipt.complete,
        "trusted_key": trusted,
        "public_key": receipt.public_key.hex(),
        "records_left": sum(found.records for found in left.answers.values()),
        "nodes": {name: leftovers_to_json(found) for name, found in left.answers.items()},
        "nodes_failed": dict(left.failed),
    }


def pin_json(pin: Pin) -> Json:
    return {
        "space": pin.space_id.hex(),
        "key": pin.key.hex(),
        "owner": pin.owner,
        "reason": pin.reason,
        "until_s": pin.until_s or None,
        "hold": pin.hold,
    }


# --- tables ---------------------------------------------------------------------------------------------------------


def usage_table(
    rows: Iterable[tuple[int | None, SpaceId | None, Usage]], facts: Facts, now_s: float, without_key: int
) -> Table:
    locked = f"{without_key:,} blocks of all cannot be read: their cipher key is not there" if without_key else None
    table = Table(title="stored blocks", caption=locked)
    for heading in ("class", "keep for", "space"):
        table.add_column(heading)
    for heading in ("blocks", "payload", "on disk", "oldest", "next to expire", "expired", "pinned"):
        table.add_column(heading, justify="right")
    for class_byte, space_id, usage in rows:
        table.add_row(
            "all" if class_byte is None else facts.class_name(class_byte),
            "" if not class_byte else format_duration(facts.rules.keep_for_s(class_byte)),
            "all" if space_id is None else facts.space_name(space_id),
            f"{usage.blocks:,}",
            format_bytes_short(usage.payload_bytes),
            format_bytes_short(usage.stored_bytes),
            f"{span(now_s - usage.oldest_written_s)} ago" if usage.oldest_written_s else "-",
            f"in {span(usage.next_expiry_s - now_s)}" if usage.next_expiry_s else "-",
            f"{usage.expired_blocks:,}",
            f"{usage.pinned_blocks:,}",
        )
    return table


def unruled_lines(rows: Iterable[tuple[int | None, SpaceId | None, Usage]], facts: Facts) -> list[str]:
    """One line for each class of ``show`` that the policy does not name."""
    return [
        f"no rule of the policy names {facts.class_name(class_byte)}: its blocks are kept at the longest promise of all"
        for class_byte in sorted({class_byte for class_byte, _, _ in rows if class_byte})
        if not facts.is_ruled(class_byte)
    ]


def policy_table(policy: Policy) -> Table:
    """A column for everything that some class says."""
    rows = [(rule, dict(_rule_values(rule))) for rule in policy.rules.rules]
    said = [what for what in rows[0][1] if any(values[what] != "-" for _, values in rows)]
    table = Table(
        "class", "byte", *(what.replace("_", " ") for what in said), title=f"policy, version {policy.version}"
    )
    for rule, values in rows:
        table.add_row(rule.name, str(rule.class_byte), *(values[what] for what in said))
    return table


def history_table(policies: Sequence[Policy]) -> Table:
    """One line for every value that a policy changed."""
    table = Table(title="policies, the last one in force")
    for heading in ("version", "since", "author", "class", "what", "before", "after"):
        table.add_column(heading, overflow="fold")
    for before, policy in zip((None, *policies), policies, strict=False):
        since = utc(policy.changed_s) if policy.changed_s else "-"
        head = [str(policy.version), since, printable(policy.author) or "-"]
        changes = diff_policies(before.rules, policy.rules) if before is not None else ()
        for change in changes:
            for what, old, new in _value_changes(change):
                table.add_row(*head, change.name, what, old, new)
                head = ["", "", ""]
        if not changes:
            table.add_row(*head, "-", "the first that is remembered" if before is None else "no class", "", "")
    return table


def changes_table(changes: Iterable[ClassChange]) -> Table:
    table = Table(title="changes of the policy")
    for heading in ("class", "what", "before", "after"):
        table.add_column(heading)
    for change in changes:
        for what, before, after in _value_changes(change):
            table.add_row(change.name, what, before, after)
    return table


def effect_table(effect: Effect, facts: Facts, title: str) -> Table:
    table = Table(title=title)
    table.add_column("class")
    table.add_column("space")
    table.add_column("blocks", justify="right")
    table.add_column("payload", justify="right")
    for item in effect.removed:
        table.add_row(
            facts.class_name(item.class_byte),
            facts.space_name(item.space_id),
            f"{item.blocks:,}",
            format_bytes_short(item.payload_bytes),
        )
    return table


def pins_table(pins: Sequence[Pin], facts: Facts, now_s: float) -> Table:
    table = Table(title="pins")
    for heading in ("space", "key", "owner", "reason", "until", "hold"):
        table.add_column(heading, overflow="fold")
    for pin in pins:
        until = f"in {span(pin.until_s - now_s)}" if pin.until_s else "no end"
        who, why = printable(pin.owner), printable(pin.reason)
        table.add_row(facts.space_name(pin.space_id), pin.key.hex(), who, why, until, "hold" if pin.hold else "")
    return table


def effect_line(effect: Effect) -> str:
    """One sentence on what was, or would be, removed."""
    verb = "removed" if effect.applied else "would remove"
    line = f"{verb} {_blocks(effect.blocks)} ({format_bytes_short(effect.payload_bytes)})"
    if effect.segments_freed or effect.blocks_rewritten:
        line += f"; {effect.segments_freed:,} segments freed, {effect.blocks_rewritten:,} blocks rewritten"
    return line


def purge_line(purge: Purge) -> str:
    verb = "purged" if purge.applied else "would purge"
    spaces = f"{len(purge.blocks)} space" + ("" if len(purge.blocks) == 1 else "s")
    states = "all states" if purge.whole_spaces else "the states under them"
    line = f"{verb} {_blocks(purge.blocks_total)} ({format_bytes_short(purge.payload_bytes)}) and {states} in {spaces}"
    if purge.pinned:
        line += f"; {len(purge.pinned):,} of them pinned: their pins {'went' if purge.applied else 'go'} too"
    if purge.shared_blocks:
        line += f"; {_blocks(purge.shared_blocks)} that other classes use too stay for them"
    if purge.loose_blocks:
        line += (
            f"; {_blocks(purge.loose_blocks)} of the space lie behind a gap and cannot be told to extend the prefix or "
            "not (purge the space to be sure)"
        )
    return f"{line}; {opaque_note(purge.opaque_spaces)}" if purge.opaque_spaces else line


def receipt_lines(receipt: Receipt, path: Path) -> list[str]:
    """What each node did, and where the receipt is."""
    lines = [
        f"{name or 'the store'}: {_blocks(done.blocks)} purged, {done.records:,} records erased in {done.segments:,} "
        f"segments"
        + (f"; {_blocks(done.shared)} stay for other classes" if done.shared else "")
        + (f"; {done.unreadable:,} places could not be read" if done.unreadable else "")
        for name, done in receipt.reports.items()
    ]
    lines.append(f"receipt {path} for purge {receipt.order.purge_id}, policy {_policy_versions(receipt)}")
    if not receipt.complete:
        lines.append(f"not every node has carried it out: when they are back, `retention resume {path}`")
    return lines


def leftovers_lines(receipt: Receipt, left: ByNode[Leftovers], trusted: bool) -> list[str]:
    """What a scan found, node by node, and what the receipt is worth."""
    lines = [
        f"{name or 'the store'}: nothing left in {found.segments:,} segments"
        if not found.records
        else f"{name or 'the store'}: {found.records:,} records left in {found.segments:,} segments: {found.living:,} "
        f"living, {found.dead:,} dead, {found.stale:,} of earlier lives"
        for name, found in left.answers.items()
    ]
    lines += [
        f"{name or 'the store'}: {found.unreadable:,} places could not be read"
        for name, found in left.answers.items()
        if found.unreadable
    ]
    if not receipt.complete:
        lines.append("the receipt is not complete: some node had not carried the order out when it was signed")
    key = "the key given" if trusted else f"{receipt.public_key.hex()}; give --public-key to know whose that is"
    lines.append(f"signed {utc(receipt.signed_s)} by {key}")
    return lines


def _policy_versions(receipt: Receipt) -> str:
    versions = sorted({done.policy_version for done in receipt.reports.values()})
    return "version " + ", ".join(map(str, versions)) if versions else "unknown"


def behind_lines(nodes_behind: Mapping[str, int]) -> list[str]:
    """One line for each node that has an older policy."""
    return [
        f"node {name} is at version {version}: it catches up with the next change"
        for name, version in sorted(nodes_behind.items())
    ]


def failed_lines(nodes_failed: Mapping[str, str] | None) -> list[str]:
    """One line for each node that did not answer."""
    return [f"node {name} did not answer: {error}" for name, error in sorted((nodes_failed or {}).items())]


def _blocks(count: int) -> str:
    return f"{count:,} block" + ("" if count == 1 else "s")


def _rule_values(rule: ClassRule) -> tuple[tuple[str, str], ...]:
    return (
        ("keep_for", format_duration(rule.keep_for_s)),
        ("keep", rule.keep),
        ("max_age", format_duration(rule.max_age_s) if rule.max_age_s else "-"),
        ("priority", str(rule.priority)),
        ("floor", size_text(rule.floor_bytes, rule.floor_share)),
        (
            "ceiling",
            size_text(rule.ceiling_bytes, rule.ceiling_share) if rule.ceiling_bytes or rule.ceiling_share else "-",
        ),
        ("codec", rule.codec),
        ("compress_after", format_duration(rule.compress_after_s) if rule.compress_after_s else "-"),
        ("admission", rule.admission),
        ("write_budget", format_bytes(rule.write_budget_bytes) if rule.write_budget_bytes else "-"),
    )


def _value_changes(change: ClassChange) -> list[tuple[str, str, str]]:
    if change.before is None or change.after is None:
        rule = change.before or change.after
        assert rule is not None
        promise = f"byte {rule.class_byte}, kept {format_duration(rule.keep_for_s)}"
        return [("class", "-" if change.before is None else promise, "-" if change.after is None else promise)]
    pairs = zip(_rule_values(change.before), _rule_values(change.after), strict=True)
    return [(what, before, after) for (what, before), (_, after) in pairs if before != after]
