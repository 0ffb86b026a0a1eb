"""Turns: one alone, or several under way in order."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from kvstore.daemon.turns import UNDER_WAY_MAX, Turns
from kvstore.errors import DeadlineExceeded
from tests.support.waiting import WAIT_S, wait


class Noted:
    """A step that notes what it does, and waits where it is told to."""

    def __init__(self, name: str, notes: list[str]) -> None:
        self.name = name
        self.notes = notes
        self.begun = threading.Event()
        self.may_write = threading.Event()
        self.may_write.set()
        self.failure: Exception | None = None

    def write(self) -> None:
        self.begun.set()
        assert self.may_write.wait(WAIT_S)
        self.notes.append(f"{self.name} writes")
        if self.failure is not None:
            raise self.failure


def run(turns: Turns, step: Noted, told: list[bool] | None = None) -> str | None:
    """``told``: for what ``begin`` is told; a step that has it begins only where nothing else is under way."""

    def begin(alone: bool) -> Noted | None:
        if told is None:
            return step
        told.append(alone)
        return step if alone else None

    def end(ended: Noted) -> str:
        ended.notes.append(f"{ended.name} ends")
        return ended.name

    return turns.beside(begin, end, WAIT_S)


def started(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def joined(*threads: threading.Thread) -> None:
    for thread in threads:
        thread.join(WAIT_S)
        assert not thread.is_alive()


def waiting_alone(turns: Turns, count: int) -> None:
    """Wait until so many wait to be alone."""
    wait(lambda: turns._waiting_alone == count, "waiter")


def line_of(turns: Turns, count: int) -> None:
    """Wait until so many are under way."""

    def came() -> bool:
        with turns._changed:
            return len(turns._line) == count

    wait(came, "line of that length")


def test_writes_and_ends_keep_the_order_of_begins() -> None:
    """However long the first takes to write, the second writes after it, and ends after it."""
    turns, notes = Turns(), list[str]()
    first, second = Noted("first", notes), Noted("second", notes)
    first.may_write.clear()
    one = started(lambda: run(turns, first))
    assert first.begun.wait(WAIT_S)
    other = started(lambda: run(turns, second))
    line_of(turns, 2)
    assert notes == []
    assert not second.begun.is_set()
    first.may_write.set()
    joined(one, other)
    for what in ("writes", "ends"):
        assert [note for note in notes if note.endswith(what)] == [f"first {what}", f"second {what}"]


def test_the_next_writes_while_the_one_before_ends() -> None:
    """An end takes as long as the index does, and has the shard's lock: the disk is not idle meanwhile."""
    turns, notes = Turns(), list[str]()
    first, second = Noted("first", notes), Noted("second", notes)
    first.may_write.clear()

    def end(ended: Noted) -> str:
        assert second.begun.wait(WAIT_S)
        return ended.name

    one = started(lambda: turns.beside(lambda _: first, end, WAIT_S))
    assert first.begun.wait(WAIT_S)
    other = started(lambda: run(turns, second))
    line_of(turns, 2)
    first.may_write.set()
    joined(one, other)
    assert notes == ["first writes", "second writes", "second ends"]


def test_nobody_is_alone_while_something_is_under_way() -> None:
    """Who wants to be alone waits for what is under way, up to a deadline, and lets nothing begin before."""
    turns, notes = Turns(), list[str]()
    first = Noted("first", notes)
    first.may_write.clear()
    one = started(lambda: run(turns, first))
    assert first.begun.wait(WAIT_S)
    with pytest.raises(DeadlineExceeded), turns.alone(0.01):
        pass

    def alone() -> None:
        with turns.alone():
            notes.append("alone")

    other = started(alone)
    waiting_alone(turns, 1)
    later = started(lambda: run(turns, Noted("second", notes)))
    waiting_alone(turns, 2)
    first.may_write.set()
    joined(one, other, later)
    assert notes[:2] == ["first writes", "first ends"]
    assert sorted(notes[2:]) == ["alone", "second ends", "second writes"]


def test_nothing_begins_while_somebody_is_alone() -> None:
    turns, notes = Turns(), list[str]()
    with turns.alone(), pytest.raises(DeadlineExceeded):
        turns.beside(lambda _: Noted("late", notes), lambda _: "late", 0.01)
    assert notes == []


def test_a_step_that_fails_ends_all_the_same() -> None:
    """Its error is raised once it has ended, and the next one goes on."""
    turns, notes = Turns(), list[str]()
    bad = Noted("bad", notes)
    bad.failure = OSError("no")
    with pytest.raises(OSError, match="no"):
        run(turns, bad)
    assert notes == ["bad writes", "bad ends"]
    assert run(turns, Noted("good", notes)) == "good"
    with turns.alone(0.0):
        pass


def test_a_line_has_an_end() -> None:
    """What would be more than UNDER_WAY_MAX begins once nothing is under way."""
    turns, notes = Turns(), list[str]()
    first = Noted("first", notes)
    first.may_write.clear()
    threads = [started(lambda: run(turns, first))]
    assert first.begun.wait(WAIT_S)
    for at in range(1, UNDER_WAY_MAX):
        threads.append(started(lambda at=at: run(turns, Noted(str(at), notes))))
        line_of(turns, at + 1)
    threads.append(started(lambda: run(turns, Noted("beyond", notes))))
    waiting_alone(turns, 1)
    first.may_write.set()
    joined(*threads)
    assert notes[-2:] == ["beyond writes", "beyond ends"]
    assert len(notes) == 2 * (UNDER_WAY_MAX + 1)


def test_what_needs_to_be_alone_is_asked_again() -> None:
    """A step that cannot begin beside another begins after it."""
    turns, notes, told = Turns(), list[str](), list[bool]()
    first = Noted("first", notes)
    first.may_write.clear()
    one = started(lambda: run(turns, first))
    assert first.begun.wait(WAIT_S)
    other = started(lambda: run(turns, Noted("second", notes), told))
    waiting_alone(turns, 1)
    first.may_write.set()
    joined(one, other)
    assert told == [False, True]
    assert notes.index("first ends") < notes.index("second writes")
