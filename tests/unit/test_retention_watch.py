"""Views that are shown again and again: their pace, how they are redrawn, and how they end."""

from __future__ import annotations

import io
import json
import os
import signal
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from click.testing import Result
from rich.console import Console
from typer.testing import CliRunner

from kvstore.errors import Unauthorized, Unavailable
from kvstore.store import Policy, Store
from kvstore.testing import ManualClock, MemoryStore
from kvstore.traffic import AGENT
from retention import watch
from retention.cli import build_app
from retention.session import EXIT_FAILED, EXIT_OK, EXIT_USAGE
from tests.support.spaces import a_chain, a_space, put_chain


class Failing(MemoryStore):
    """A store that fails the questions of a policy as often as told."""

    def __init__(self, clock: ManualClock, *failures: Exception | None) -> None:
        super().__init__(clock)
        self.failures = list(failures)

    def policy(self, **options: Any) -> Policy:
        failure = self.failures.pop(0) if self.failures else None
        if failure is not None:
            raise failure
        return super().policy(**options)


def watched(stores: Mapping[str, Store], *arguments: str, views: int, end: Callable[[], None] | None = None) -> Result:
    """The command over some nodes, stopped in the pause after so many views."""
    pauses: list[float] = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == views:
            (end or (lambda: os.kill(os.getpid(), signal.SIGINT)))()

    app = build_app(lambda addresses, _token: stores[addresses[0]], ManualClock(), pause)
    given = [*arguments, *(part for name in stores for part in ("--store", name))]
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    result = CliRunner().invoke(app, given, env={"REPRISE_STORE": None})
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before
    assert set(pauses) <= {5.0}
    return result


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("command", ["show", "pins"])
def test_a_watched_view_ends_cleanly_on_a_signal(command: str, number: signal.Signals) -> None:
    """One document a line; then the command ends with 0, and the handlers from before are back."""
    store = MemoryStore(ManualClock())
    end = lambda: os.kill(os.getpid(), number)  # noqa: E731
    result = watched({"a": store}, command, "--watch", "5s", "--json", views=3, end=end)
    assert result.exit_code == EXIT_OK, result.output
    assert len([json.loads(line) for line in result.stdout.splitlines()]) == 3


def test_each_view_is_a_new_look() -> None:
    """What was stored between two views is in the second."""
    store = MemoryStore(ManualClock())
    space = store.register_space(a_space())
    chains = [a_chain(space, 2, seed=seed) for seed in (1, 2)]

    def look_and_store(_seconds: float) -> None:
        if not chains:
            raise KeyboardInterrupt
        put_chain(store, chains.pop(), AGENT)

    app = build_app(lambda *_: store, ManualClock(), look_and_store)
    result = CliRunner().invoke(app, ["show", "--watch", "1m30s", "--json", "--store", "a"])
    blocks = [sum(row["blocks"] for row in json.loads(line)["rows"]) for line in result.stdout.splitlines()]
    assert (result.exit_code, blocks) == (EXIT_OK, [0, 2, 4])


def test_a_node_that_is_down_ends_nothing_while_it_is_watched() -> None:
    """It is named each time; the exit code is that of the last view."""
    clock = ManualClock()
    down = Unavailable("connection refused")
    for failures, code in (([None, down, None], EXIT_OK), ([None, None, down], EXIT_FAILED)):
        stores = {"a": MemoryStore(clock), "b": Failing(clock, *failures)}
        result = watched(stores, "show", "--watch", "5s", views=3)
        assert result.exit_code == code, result.output
        assert result.stderr.count("node b did not answer: Unavailable: connection refused") == 1
    alone = watched({"a": Failing(clock, down)}, "show", "--watch", "5s", views=2)
    assert (alone.exit_code, alone.stdout.strip()) == (EXIT_OK, "no blocks are stored")


def test_an_error_that_time_does_not_cure_ends_it() -> None:
    """A token that is refused will be refused again."""
    result = watched({"a": Failing(ManualClock(), None, Unauthorized("no"))}, "show", "--watch", "5s", views=9)
    assert result.exit_code == EXIT_FAILED
    assert "Unauthorized" in result.stderr


@pytest.mark.parametrize("every", ["5", "0s", "500ms", "2d", "often", "-1s"])
def test_a_pace_that_makes_no_sense_is_refused(every: str) -> None:
    """Without a unit, faster than a second, or slower than a day."""
    result = watched({"a": MemoryStore(ManualClock())}, "show", f"--watch={every}", views=1)
    assert result.exit_code == EXIT_USAGE, result.output


def test_a_terminal_is_redrawn_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without clearing the screen, which would flicker; each view goes out in one write, and the cursor comes back."""

    class Terminal(io.StringIO):
        writes: list[str] = []  # noqa: RUF012

        def write(self, text: str) -> int:
            self.writes.append(text)
            return super().write(text)

    terminal = Terminal()
    console = Console(file=terminal, force_terminal=True, width=100, markup=False, highlight=False)
    monkeypatch.setattr(watch, "console_for_people", lambda: console)
    store = MemoryStore(ManualClock())
    put_chain(store, a_chain(store.register_space(a_space()), 2), AGENT)
    result = watched({"a": store}, "show", "--watch", "5s", views=3)
    assert result.exit_code == EXIT_OK, result.output
    assert terminal.getvalue().count("Ctrl-C ends it") == 3 or terminal.getvalue().count("Ctrl-C ends it") == 4
    assert sum("stored blocks" in text for text in terminal.writes) == terminal.getvalue().count("stored blocks")
    assert "\x1b[2J" not in terminal.getvalue()
    assert terminal.getvalue().rstrip("\n").endswith("\x1b[?25h")
