"""Showing a view of the store once, or again and again until somebody has seen enough.

Owns the pace, the redrawing on a terminal, and the end. Does not know what is shown. Invariants: on a terminal a view
is redrawn in place, in one write (it neither flickers nor scrolls); elsewhere one follows another, as JSON one document
a line. A node that does not answer ends nothing; Ctrl-C and SIGTERM do, at once, and the exit code is that of the last
view.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from types import FrameType
from typing import Any

import typer
from rich.console import Group
from rich.live import Live

from kvstore.errors import StoreError
from kvstore.units import parse_seconds
from kvstore.wording import utc
from retention import report
from retention.session import EXIT_FAILED, Session, console_for_people

EVERY_S_MIN, EVERY_S_MAX = 1.0, 86_400.0
"""A view reads what every node holds: more often, and looking at them would be their work."""


@dataclass(frozen=True, slots=True)
class View:
    """What is shown: a document for programs, or renderables for people; and the nodes that nothing is known of."""

    document: Any
    renderables: tuple[Any, ...]
    nodes_failed: Mapping[str, str] = field(default_factory=dict)


def present(session: Session, look: Callable[[], View], every: str | None) -> None:
    """Show once, or ``every`` so often until stopped. Ends with exit code 1 where a node did not answer at last.

    Raises what ``look`` raises; while watching, only what time does not cure.
    """
    if every is None:
        view = look()
        session.show(view.document, *view.renderables)
        session.fail_for(view.nodes_failed)
        return
    every_s = parse_seconds(every)
    if not EVERY_S_MIN <= every_s <= EVERY_S_MAX:
        raise ValueError(f"--watch takes 1s to 1d, not {every}")
    failed: Mapping[str, str] = {}
    with _interrupted_by_signals(), _display(session, every) as display, suppress(KeyboardInterrupt):
        while True:
            view = _attempt(session, look)
            failed = view.nodes_failed
            display(view)
            session.pause(every_s)
    if failed:
        raise typer.Exit(EXIT_FAILED)


def _attempt(session: Session, look: Callable[[], View]) -> View:
    try:
        return look()
    except StoreError as error:
        if not error.retryable:
            raise
        said = f"{type(error).__name__}: {error}"
        return View({"error": said}, (), {", ".join(session.addresses): said})


@contextmanager
def _display(session: Session, every: str) -> Iterator[Callable[[View], None]]:
    """Where views go: to one place of a terminal, or one below the other."""
    console = console_for_people()
    if session.as_json or not console.is_terminal:
        yield partial(_print, session)
        return
    with Live(console=console, auto_refresh=False) as live:

        def redraw(view: View) -> None:
            head = f"every {every}; {utc(int(session.clock.now_s()))}; Ctrl-C ends it"
            live.update(Group(head, *view.renderables, *report.failed_lines(view.nodes_failed)), refresh=True)

        yield redraw


def _print(session: Session, view: View) -> None:
    session.show(view.document, *view.renderables)
    for line in report.failed_lines(view.nodes_failed):
        typer.echo(line, err=True)


@contextmanager
def _interrupted_by_signals() -> Iterator[None]:
    """SIGTERM does what Ctrl-C does: it raises KeyboardInterrupt, wherever the code inside is."""

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
