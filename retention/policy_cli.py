"""The commands `retention policy`: get, set, diff, history and rollback.

Owns their options and what they show. Decides nothing itself: ``policy`` says what differs and what may be, the store
what a change would drop. Does not know how a store is reached. Invariant: a change says first what it would drop, holds
to the version that it was made for, and needs ``--apply``.
"""

from __future__ import annotations

import getpass
import os
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from kvstore.errors import PolicyConflict
from kvstore.store import Effect, Policy
from kvstore.traffic import ClassRules
from retention import report
from retention.errors import NothingMatched
from retention.options import ApplyOption, DeadlineOption, JsonOption, StoreOption, TokenOption
from retention.policy import (
    ClassChange,
    check_change,
    check_policy,
    diff_policies,
    load_class_rules,
    parse_keep_for,
    policy_text,
    replace_keep_for,
)
from retention.session import Session, Sessions, dry_hint
from retention.survey import PolicySurvey, survey_policies

VERSION_DIGITS_MAX = 9

ExpectOption = Annotated[
    int | None, typer.Option("--expect", help="Version that the change was made for; another is a conflict.")
]
AuthorOption = Annotated[
    str | None, typer.Option("--author", help="Who changes it, for the history; without, USER@HOST.")
]


def add_policy(app: typer.Typer, sessions: Sessions) -> None:
    @app.command("get")
    def get(
        store: StoreOption = None,
        token_file: TokenOption = None,
        deadline: DeadlineOption = "10s",
        as_json: JsonOption = False,
        toml: Annotated[bool, typer.Option("--toml", help="Print the policy as a document for `policy set`.")] = False,
    ) -> None:
        """The policy in force.

        Nodes that have an older one are named: they catch up with the next change.
        """
        with sessions.open(store, token_file, deadline, as_json) as session:
            known = _known(session)
            policy = known.in_force
            if toml:
                typer.echo(policy_text(policy.rules), nl=False)
            else:
                document = {**report.policy_json(policy), "nodes_behind": dict(known.behind)}
                session.show(document, report.policy_table(policy), *report.behind_lines(known.behind))
            session.fail_for(known.nodes_failed)

    @app.command("set")
    def set_(
        file: Annotated[Path | None, typer.Argument(help="Policy document (TOML).")] = None,
        keep: Annotated[
            list[str] | None, typer.Option("--keep", help="CLASS=DURATION, like agent=2d (repeatable).")
        ] = None,
        apply: ApplyOption = False,
        expect: ExpectOption = None,
        author: AuthorOption = None,
        store: StoreOption = None,
        token_file: TokenOption = None,
        deadline: DeadlineOption = "120s",
        as_json: JsonOption = False,
    ) -> None:
        """Change the policy. Shows first what the change would drop at once; changes nothing without --apply."""
        if (file is None) == (not keep):
            raise typer.BadParameter("give either a policy FILE or one or more --keep CLASS=DURATION")
        with sessions.open(store, token_file, deadline, as_json) as session:
            before = session.store.policy(deadline_s=session.deadline_s)
            _expect_version(before, expect)
            rules, text = _wanted_policy(before.rules, file, keep or [], _capacity_bytes(session))
            _change_policy(session, before, rules, text, author, apply=apply)

    @app.command()
    def rollback(
        version: Annotated[int, typer.Argument(help="Version whose rules shall be in force again.", min=1)],
        apply: ApplyOption = False,
        expect: ExpectOption = None,
        author: AuthorOption = None,
        store: StoreOption = None,
        token_file: TokenOption = None,
        deadline: DeadlineOption = "120s",
        as_json: JsonOption = False,
    ) -> None:
        """Put an earlier policy in force again.

        It becomes a new version. Shows first what that would drop at once; changes nothing without --apply.
        """
        with sessions.open(store, token_file, deadline, as_json) as session:
            history = session.store.policy_history(deadline_s=session.deadline_s)
            before, wanted = history[-1], _version_in(history, version)
            _expect_version(before, expect)
            check_policy(list(wanted.rules.rules), capacity_bytes=_capacity_bytes(session))
            check_change(before.rules, wanted.rules)
            _change_policy(session, before, wanted.rules, wanted.text, author, apply=apply)

    _add_reading(app, sessions)


def _add_reading(app: typer.Typer, sessions: Sessions) -> None:
    @app.command()
    def history(
        store: StoreOption = None,
        token_file: TokenOption = None,
        deadline: DeadlineOption = "10s",
        as_json: JsonOption = False,
    ) -> None:
        """The policies so far.

        When each came into force, who changed it, and what.
        """
        with sessions.open(store, token_file, deadline, as_json) as session:
            known = _known(session)
            session.show(report.history_json(known.history), report.history_table(known.history))
            session.fail_for(known.nodes_failed)

    @app.command()
    def diff(
        before: Annotated[str, typer.Argument(metavar="BEFORE", help="Version, or policy document (TOML).")],
        after: Annotated[
            str | None,
            typer.Argument(metavar="[AFTER]", help="The same; without, BEFORE is compared with the present."),
        ] = None,
        store: StoreOption = None,
        token_file: TokenOption = None,
        deadline: DeadlineOption = "10s",
        as_json: JsonOption = False,
    ) -> None:
        """What differs between two policies.

        With one argument: what has changed since.
        """
        with sessions.open(store, token_file, deadline, as_json) as session:
            known = _known(session)
            old = _rules_named(before, known.history)
            new = _rules_named(after, known.history) if after is not None else known.in_force.rules
            changes = diff_policies(old, new)
            session.show(
                {"changes": report.changes_json(changes)},
                report.changes_table(changes) if changes else "no class differs",
            )
            session.fail_for(known.nodes_failed)


# --- steps of commands ----------------------------------------------------------------------------------------------


def _known(session: Session) -> PolicySurvey:
    """What the nodes that answer know of policies."""
    with session.each_node() as nodes:
        return survey_policies(nodes, deadline_s=session.deadline_s)


def _version_in(policies: Sequence[Policy], version: int) -> Policy:
    for policy in policies:
        if policy.version == version:
            return policy
    raise NothingMatched(
        f"version {version} is not remembered; known are {policies[0].version}..{policies[-1].version}"
    )


def _rules_named(text: str, policies: Sequence[Policy]) -> ClassRules:
    """The rules of a version, or of a document. Raises NothingMatched or PolicyInvalid."""
    if text.isascii() and text.isdigit() and len(text) <= VERSION_DIGITS_MAX:
        return _version_in(policies, int(text)).rules
    return load_class_rules(Path(text))[0]


def me() -> str:
    """Who runs this command, as far as the machine knows."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a process whose user has no name
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"


def _expect_version(policy: Policy, expected: int | None) -> None:
    if expected is not None and expected != policy.version:
        raise PolicyConflict(f"the policy is at version {policy.version}, not {expected}: look at it again")


def _wanted_policy(
    before: ClassRules, file: Path | None, keep: Sequence[str], capacity_bytes: int | None
) -> tuple[ClassRules, str]:
    """Rules and text that the user asks for. Raises PolicyInvalid or ValueError."""
    if file is not None:
        rules, text = load_class_rules(file, capacity_bytes=capacity_bytes)
    else:
        rules = replace_keep_for(before, _parse_keeps(keep))
        check_policy(list(rules.rules), capacity_bytes=capacity_bytes)
        text = policy_text(rules)
    check_change(before, rules)
    return rules, text


def _parse_keeps(keep: Sequence[str]) -> dict[str, int]:
    keeps: dict[str, int] = {}
    for item in keep:
        name, equals, duration = item.partition("=")
        if not equals or not name:
            raise ValueError(f"--keep {item!r}: write CLASS=DURATION, like agent=2d")
        if name in keeps:
            raise ValueError(f"--keep names class {name!r} twice")
        keeps[name] = parse_keep_for(duration)
    return keeps


def _capacity_bytes(session: Session) -> int | None:
    """The capacity of the smallest node: every node keeps the same floors."""
    stats = session.store.stats(deadline_s=session.deadline_s)
    nodes = [node for node in stats.get("nodes", {}).values() if isinstance(node, dict)] or [stats]
    found = [node["capacity_bytes"] for node in nodes if isinstance(node.get("capacity_bytes"), int)]
    return min((capacity_bytes for capacity_bytes in found if capacity_bytes > 0), default=None)


def _change_policy(
    session: Session, before: Policy, rules: ClassRules, text: str, author: str | None, *, apply: bool
) -> None:
    """Show the change and what it would drop, then make it where asked; both hold to the version that was read."""
    changes = diff_policies(before.rules, rules)
    facts = session.facts(before.rules)
    effect = session.store.set_policy(
        rules, text, expected_version=before.version, apply=False, deadline_s=session.deadline_s
    )
    if apply:
        if not session.as_json and effect.blocks:
            session.show(None, report.effect_table(effect, facts, "the change drops"))
        effect = session.store.set_policy(
            rules,
            text,
            expected_version=before.version,
            apply=True,
            author=me() if author is None else author,
            deadline_s=session.deadline_s,
        )
    version = before.version + (1 if apply else 0)
    document = {
        "version": version,
        "changes": report.changes_json(changes),
        "effect": report.effect_json(effect, facts),
    }
    session.show(document, *_change_lines(changes, effect, facts, version, apply=apply))
    session.fail_for(effect.nodes_failed)


def _change_lines(
    changes: tuple[ClassChange, ...], effect: Effect, facts: report.Facts, version: int, *, apply: bool
) -> Iterator[Any]:
    yield report.changes_table(changes) if changes else "no class changes"
    if effect.blocks and not apply:
        yield report.effect_table(effect, facts, "the change would drop")
    expired = "expired" if apply else "would expire"
    yield f"{effect.blocks:,} blocks {expired} at once" if effect.blocks else "no stored block loses its promise now"
    if apply:
        yield f"the policy is at version {version} now"
    yield from dry_hint(apply)
