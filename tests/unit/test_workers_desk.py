"""A desk answers every task once, whatever becomes of it, and makes nobody wait."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest

from tests.support.waiting import WAIT_S, wait
from workers.adapters.desk import Desk


class Bell:
    """A descriptor that tells how often it was rung."""

    def __init__(self) -> None:
        self._event = os.eventfd(0, os.EFD_NONBLOCK)
        self.closed = False

    def fileno(self) -> int:
        return self._event

    def notify(self) -> None:
        assert not self.closed
        os.eventfd_write(self._event, 1)

    def close(self) -> None:
        self.closed = True
        os.close(self._event)


@pytest.fixture
def bell() -> Bell:
    return Bell()


@pytest.fixture
def desk(bell: Bell) -> Iterator[Desk[str]]:
    desk: Desk[str] = Desk(bell, 1, 2)
    yield desk
    if not bell.closed:
        desk.close()


def take(desk: Desk[str], task: int) -> str:
    while (answer := desk.take(task)) is None:
        pass
    return answer


def test_an_answer_is_given_out_once_and_rung_for(desk: Desk[str], bell: Bell) -> None:
    """By whoever asks first, under the task's own number; the other kind of asking takes all."""
    first, second = (desk.submit(lambda word=word: word, "failed") for word in ("one", "two"))
    assert take(desk, first) == "one"
    assert desk.take(first) is None
    while not (rest := desk.take_all()):
        pass
    assert rest == {second: "two"}
    assert desk.descriptor == bell.fileno()
    assert os.eventfd_read(bell.fileno()) == 2


def test_a_task_that_breaks_is_answered_as_failed(desk: Desk[str]) -> None:
    """Without an answer the engine would hold its memory for ever; the next task runs as if nothing had been."""
    broken = desk.submit(lambda: str(1 // 0), "failed")
    assert take(desk, broken) == "failed"
    assert take(desk, desk.submit(lambda: "fine", "failed")) == "fine"


def test_more_tasks_than_there_is_room_for_fail_at_once(desk: Desk[str]) -> None:
    """What waits is bounded, and room comes back with each answer."""
    gate = threading.Event()
    held = [desk.submit(lambda: str(gate.wait(WAIT_S)), "failed") for _ in range(2)]
    shed = desk.submit(lambda: "fine", "failed")
    assert desk.take_all() == {shed: "failed"}
    gate.set()
    assert [take(desk, task) for task in held] == ["True", "True"]
    assert take(desk, desk.submit(lambda: "fine", "failed")) == "fine"


def test_a_closed_desk_has_ended_its_work_and_rings_no_more(desk: Desk[str], bell: Bell) -> None:
    """What ran is answered, what waited is not begun, and whoever comes later fails at once without a bell."""
    began, gate, late = threading.Event(), threading.Event(), []
    running = desk.submit(lambda: str(began.set() or gate.wait(WAIT_S)), "failed")
    desk.submit(lambda: str(late.append(1)), "failed")
    assert began.wait(WAIT_S)
    closing = threading.Thread(target=desk.close)
    closing.start()
    wait(lambda: desk._pool._shutdown, "end of the desk")
    with desk._pool._shutdown_lock:  # whoever takes it before has dropped what waited
        gate.set()
    closing.join(WAIT_S)
    assert bell.closed
    assert not late
    after = desk.submit(lambda: "fine", "failed")
    assert desk.take_all() == {running: "True", after: "failed"}
