"""One command's hold on the store: opening it, showing results, and ending with the right exit code.

Owns exit codes and where output goes. Does not know what the commands do. Invariant: whatever was opened is closed, and
every expected error becomes one line and one code, never a traceback.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from kvstore.access import read_token
from kvstore.errors import PolicyConflict, StoreError
from kvstore.store import Clock, Store
from kvstore.traffic import ClassRules
from kvstore.units import parse_seconds
from retention import report
from retention.errors import NothingMatched, PackageMissing, RetentionError
from retention.policy import load_class_rules

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_CONFLICT = 3
EXIT_MISSING = 3
EXIT_NOTHING = 4
EXIT_LEFT = 5

PLAIN_WIDTH = 200
"""Columns of a table that does not go to a terminal, so that a pipe sees every value whole."""

OpenStore = Callable[[Sequence[str], str | None], Store]


def open_store(addresses: Sequence[str], token: str | None) -> Store:
    """A client of running nodes. The one place that opens connections."""
    from kvstore.client import StoreClient

    return StoreClient.connect(addresses, token=token)


@dataclass(frozen=True, slots=True)
class Session:
    """What a command works with while it runs."""

    store: Store
    open_store: Callable[[Sequence[str]], Store]
    addresses: tuple[str, ...]
    clock: Clock
    pause: Callable[[float], None]
    deadline_s: float
    as_json: bool

    def facts(self, rules: ClassRules | None = None) -> report.Facts:
        """Names to show things with. While a node is down, spaces go by their ids, classes by the default names."""
        try:
            known = rules or self.store.policy(deadline_s=self.deadline_s).rules
            return report.Facts(known, self.store.spaces(deadline_s=self.deadline_s))
        except StoreError as error:
            if not error.retryable:
                raise
        return report.Facts(rules or load_class_rules(None)[0], {})

    def show(self, document: Any, *renderables: Any) -> None:
        """The document as JSON, or the renderables for people."""
        show(document, *renderables, as_json=self.as_json)

    @contextmanager
    def each_node(self) -> Iterator[dict[str, Store]]:
        """A store of its own for each node, by address, closed at the end."""
        with ExitStack() as opened:
            nodes: dict[str, Store] = {}
            for address in dict.fromkeys(self.addresses):
                nodes[address] = self.open_store([address])
                opened.callback(nodes[address].close)
            yield nodes

    def fail_for(self, nodes_failed: Mapping[str, str] | None) -> None:
        """Exit with 1, naming the nodes, when some did not answer."""
        for line in report.failed_lines(nodes_failed):
            typer.echo(line, err=True)
        if nodes_failed:
            raise typer.Exit(EXIT_FAILED)


@dataclass(frozen=True, slots=True)
class Sessions:
    """Opens the store for one command and turns every error into its exit code."""

    open_store: OpenStore
    clock: Clock
    pause: Callable[[float], None] = time.sleep

    @contextmanager
    def open(
        self, addresses: Sequence[str] | None, token_file: Path | None, deadline: str, as_json: bool
    ) -> Iterator[Session]:
        with exit_codes():
            if not addresses:
                raise ValueError("name a node: --store ADDRESS, or REPRISE_STORE in the environment")
            deadline_s = parse_seconds(deadline)
            if deadline_s <= 0:
                raise ValueError("--deadline must be longer than 0 s")
            token = read_token(token_file)

            def connect(some: Sequence[str]) -> Store:
                return self.open_store(some, token)

            store = connect(addresses)
            try:
                yield Session(store, connect, tuple(addresses), self.clock, self.pause, deadline_s, as_json)
            finally:
                store.close()


def confirm(question: str, *, yes: bool) -> None:
    """Ask on a terminal, and end with 1 unless the answer is yes; nobody is there to answer elsewhere."""
    if not yes and sys.stdin.isatty():
        typer.confirm(question, abort=True, err=True)


def dry_hint(applied: bool) -> tuple[str, ...]:
    """The line under what was only looked at."""
    return () if applied else ("nothing was changed; add --apply to do it",)


def show(document: Any, *renderables: Any, as_json: bool) -> None:
    """The document as JSON, or the renderables for people."""
    if as_json:
        typer.echo(json.dumps(document, sort_keys=True))
        return
    console = console_for_people()
    for renderable in renderables:
        console.print(renderable)


def console_for_people() -> Console:
    """Where tables go: a terminal as wide as it is, or something else."""
    return Console(width=None if sys.stdout.isatty() else PLAIN_WIDTH, markup=False, highlight=False, emoji=False)


@contextmanager
def exit_codes() -> Iterator[None]:
    """Turns the errors that an operator can meet into a line on stderr and an exit code."""
    try:
        yield
    except PolicyConflict as error:
        _end(EXIT_CONFLICT, f"conflict: {error}")
    except NothingMatched as error:
        _end(EXIT_NOTHING, f"nothing matched: {error}")
    except PackageMissing as error:
        _end(EXIT_MISSING, str(error))
    except (RetentionError, ValueError) as error:
        _end(EXIT_USAGE, f"error: {error}")
    except (StoreError, OSError) as error:
        _end(EXIT_FAILED, f"failed: {type(error).__name__}: {error}")


def _end(code: int, message: str) -> None:
    typer.echo(message, err=True)
    raise typer.Exit(code)
