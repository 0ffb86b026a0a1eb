"""The command `retention`: show, sweep and pins, and the commands of other files, against one or more nodes.

Owns options and confirmation. Decides nothing itself: it reads, asks the pure modules, shows, and (only with
``--apply``) acts. Does not know how a store is reached, nor how errors become exit codes.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from types import FrameType
from typing import Annotated, Any

import typer

from kvstore.keys import BlockKey
from kvstore.store import Clock, Effect, SystemClock
from kvstore.units import parse_duration_s
from retention import report
from retention.forecast_cli import add_forecast
from retention.options import ApplyOption, DeadlineOption, JsonOption, StoreOption, TokenOption, WatchOption, YesOption
from retention.pins import PinCount, home_of_pins, make_pins, pin_blocks, unpin_blocks
from retention.plan_cli import add_plan
from retention.planner import Totals, by_class, by_space
from retention.policy import parse_keep_for
from retention.policy_cli import add_policy
from retention.purge import match_space, parse_key
from retention.purge_cli import add_purge
from retention.session import (
    EXIT_FAILED,
    EXIT_NOTHING,
    OpenStore,
    Session,
    Sessions,
    confirm,
    dry_hint,
    open_store,
)
from retention.simulate import add_simulate
from retention.survey import Survey, ask_nodes, survey_nodes
from retention.sweeper import SweepReport, sweep_loop, sweep_once
from retention.watch import View, present

HELP = "What is kept and for how long: see it, change it, and take things away."
EXIT_CODES = (
    "Exit codes: 0 done; 1 the operation failed or a node did not answer; 2 wrong usage or input; "
    "3 the policy changed meanwhile; 4 nothing matched; 5 something purged is still on disk."
)


class Grouping(StrEnum):
    """What a row of ``show`` is about."""

    CLASS = "class"
    SPACE = "space"


SpaceOption = Annotated[str, typer.Option("--space", help="Space id in hex, or the first digits of it (8 at least).")]
KeysArgument = Annotated[list[str], typer.Argument(metavar="KEY", help="Keys of blocks, 64 hex digits each.")]


def build_app(
    open_store: OpenStore = open_store, clock: Clock | None = None, pause: Callable[[float], None] = time.sleep
) -> typer.Typer:
    """The typer application; tests give it their own store, clock, and pause between views."""
    sessions = Sessions(open_store, clock or SystemClock(), pause)
    app = typer.Typer(no_args_is_help=True, help=HELP, epilog=EXIT_CODES, rich_markup_mode=None, add_completion=False)
    policy = typer.Typer(no_args_is_help=True, help="Read or change how long each traffic class keeps its blocks.")
    _add_show(app, sessions)
    add_policy(policy, sessions)
    app.add_typer(policy, name="policy")
    _add_sweep(app, sessions)
    _add_pins(app, sessions)
    add_purge(app, sessions)
    add_plan(app)
    add_simulate(app)
    add_forecast(app, sessions)
    return app


# --- commands -------------------------------------------------------------------------------------------------------


def _add_show(app: typer.Typer, sessions: Sessions) -> None:
    @app.command()
    def show(
        by: Annotated[Grouping | None, typer.Option("--by", help="One row a class or space, not one a pair.")] = None,
        space: Annotated[str | None, typer.Option("--space", help="Only this space (id or first digits).")] = None,
        watch: WatchOption = None,
        store: StoreOption = None,
        token_file: TokenOption = None,
        deadline: DeadlineOption = "120s",
        as_json: JsonOption = False,
    ) -> None:
        """What is stored, per class and space.

        Blocks, bytes, the oldest and the next to expire; the nodes that did not answer are named.
        """
        with sessions.open(store, token_file, deadline, as_json) as session, session.each_node() as nodes:

            def look() -> View:
                survey = survey_nodes(nodes, space=space, clock=session.clock, deadline_s=session.deadline_s)
                return _usage_view(survey, _rows(by, survey.totals), session.clock.now_s())

            present(session, look, watch)


def _add_sweep(app: typer.Typer, sessions: Sessions) -> None:
    @app.command()
    def sweep(
        apply: ApplyOption = False,
        loop: Annotated[bool, typer.Option("--loop", help="Sweep again and again until SIGTERM or Ctrl-C.")] = False,
        every: Annotated[str, typer.Option("--every", help="Time between sweeps of --loop, like 5m.")] = "5m",
        store: StoreOption = None,
        token_file: TokenOption = None,
        deadline: DeadlineOption = "120s",
        as_json: JsonOption = False,
    ) -> None:
        """Give what is past its promise back to the free list."""
        with sessions.open(store, token_file, deadline, as_json) as session:
            if loop:
                _sweep_again_and_again(session, parse_duration_s(every), apply=apply)
            else:
                effect = sweep_once(session.store, apply=apply, deadline_s=session.deadline_s)
                _show_effect(session, effect, "swept" if apply else "a sweep would remove")


def _add_pins(app: typer.Typer, sessions: Sessions) -> None:
    @app.command()
    def pin(
        keys: KeysArgument,
        space: SpaceOption,
        owner: Annotated[str, typer.Option("--owner", help="Who holds the pin.")],
        reason: Annotated[str, typer.Option("--reason", help="Why.")],
        for_: Annotated[str | None, typer.Option("--for", help="How long, like 7d; without, until unpinned.")] = None,
        hold: Annotated[bool, typer.Option("--hold", help="A legal hold: against purges too, until released.")] = False,
        store: StoreOption = None,
        token_file: TokenOption = None,
        deadline: DeadlineOption = "10s",
        as_json: JsonOption = False,
    ) -> None:
        """Hold blocks against expiry and eviction."""
        with sessions.open(store, token_file, deadline, as_json) as session:
            now_s = session.clock.now_s()
            until_s = int(now_s) + parse_keep_for(for_) if for_ else 0
            home = match_space(space, session.store.spaces(deadline_s=session.deadline_s))
            pins = make_pins(home, _keys(keys), owner=owner, reason=reason, until_s=until_s, now_s=now_s, hold=hold)
            _show_pin_count(session, "pinned", "stored", pin_blocks(session.store, pins, deadline_s=session.deadline_s))

    @app.command()
    def unpin(
        keys: KeysArgument,
        space: Annotated[
            str | None, typer.Option("--space", help="Its id, or first digits; without, where the keys are pinned.")
        ] = None,
        owner: Annotated[str | None, typer.Option("--owner", help="Only this owner's; without, everybody's.")] = None,
        release_holds: Annotated[
            bool, typer.Option("--release-holds", help="Legal holds too; without, a hold refuses the command.")
        ] = False,
        yes: YesOption = False,
        store: StoreOption = None,
        token_file: TokenOption = None,
        deadline: DeadlineOption = "10s",
        as_json: JsonOption = False,
    ) -> None:
        """Take pins away; the blocks keep their promises."""
        with sessions.open(store, token_file, deadline, as_json) as session:
            if release_holds:
                confirm(f"release every hold on {len(set(keys))} blocks?", yes=yes)
            wanted = _keys(keys)
            if space is not None:
                home = match_space(space, session.store.spaces(deadline_s=session.deadline_s))
            else:
                home = home_of_pins(session.store.pins(deadline_s=session.deadline_s), wanted)
            count = unpin_blocks(
                session.store, home, wanted, owner=owner, holds=release_holds, deadline_s=session.deadline_s
            )
            _show_pin_count(session, "unpinned", "pinned", count)

    @app.command()
    def pins(
        watch: WatchOption = None,
        store: StoreOption = None,
        token_file: TokenOption = None,
        deadline: DeadlineOption = "10s",
        as_json: JsonOption = False,
    ) -> None:
        """Every pin, with its owner, reason and end."""
        with sessions.open(store, token_file, deadline, as_json) as session, session.each_node() as nodes:

            def look() -> View:
                asked = ask_nodes(nodes, lambda node: node.pins(deadline_s=session.deadline_s))
                found = list(dict.fromkeys(pin for answer in asked.answers.values() for pin in answer))
                rows = [report.pin_json(item) for item in found]
                if not found:
                    return View(rows, ("no block is pinned",), asked.failed)
                table = report.pins_table(found, session.facts(), session.clock.now_s())
                return View(rows, (table,), asked.failed)

            present(session, look, watch)


# --- steps of commands ----------------------------------------------------------------------------------------------


def _usage_view(survey: Survey, rows: list[tuple[Any, Any, Any]], now_s: float) -> View:
    facts = report.Facts(survey.policy.rules, survey.spaces)
    empty = "no blocks are stored" + (" on the nodes that answered" if survey.nodes_failed else "")
    return View(
        report.show_json(rows, facts, survey.nodes_failed, survey.without_key),
        (
            report.usage_table(rows, facts, now_s, survey.without_key) if rows else empty,
            *report.unruled_lines(rows, facts),
        ),
        survey.nodes_failed,
    )


def _rows(by: Grouping | None, totals: Totals) -> list[tuple[Any, Any, Any]]:
    if by is Grouping.CLASS:
        return [(class_byte, None, usage) for class_byte, usage in by_class(totals).items()]
    if by is Grouping.SPACE:
        return [(None, space_id, usage) for space_id, usage in by_space(totals).items()]
    return [(class_byte, space_id, usage) for (class_byte, space_id), usage in totals.items()]


def _sweep_again_and_again(session: Session, every_s: int, *, apply: bool) -> None:
    def tell(latest: SweepReport) -> None:
        facts = session.facts()
        line = f"sweep: {report.effect_line(latest.effect)}" if latest.effect else f"sweep failed: {latest.error}"
        session.show(report.sweep_json(latest, facts), line)
        for failed in report.failed_lines(latest.effect.nodes_failed if latest.effect else None):
            typer.echo(failed, err=True)

    with stop_signals() as stop:
        last = sweep_loop(
            session.store,
            apply=apply,
            every_s=every_s,
            clock=session.clock,
            wait=stop.wait,
            report=tell,
            deadline_s=session.deadline_s,
        )
    if not last.complete:
        raise typer.Exit(EXIT_FAILED)


def _show_effect(session: Session, effect: Effect, title: str) -> None:
    facts = session.facts()
    table = [report.effect_table(effect, facts, title)] if effect.removed else []
    session.show(report.effect_json(effect, facts), *table, report.effect_line(effect), *dry_hint(effect.applied))
    session.fail_for(effect.nodes_failed)


def _show_pin_count(session: Session, verb: str, condition: str, count: PinCount) -> None:
    missing = count.asked - count.found
    line = f"{verb} {count.found} of {count.asked} blocks" + (f"; {missing} not {condition}" if missing else "")
    session.show({"asked": count.asked, verb: count.found}, line)
    if missing:
        raise typer.Exit(EXIT_FAILED if count.found else EXIT_NOTHING)


def _keys(texts: Sequence[str]) -> tuple[BlockKey, ...]:
    return tuple(parse_key(text) for text in texts)


@contextmanager
def stop_signals() -> Iterator[threading.Event]:
    """An event that SIGTERM and SIGINT set, while inside."""
    stop = threading.Event()

    def ask_to_stop(_number: int, _frame: FrameType | None) -> None:
        stop.set()

    before = {number: signal.signal(number, ask_to_stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


app = build_app()
