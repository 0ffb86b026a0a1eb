"""Group commit: no waiter returns before a flush that began after it asked."""

from __future__ import annotations

import threading

import pytest

from kvstore.daemon.durability import GroupCommit
from kvstore.errors import DeadlineExceeded
from tests.support.waiting import WAIT_S, wait

WRITERS = 20
TURNS = 5


def test_many_writers_share_few_flushes_and_none_is_early() -> None:
    """Each writer's own write is in some flush that began after it; with every flush as slow as the slowest writer,
    all of them have gone on after two."""
    written: set[int] = set()
    durable: set[int] = set()
    ended: list[int] = []
    flushes = 0
    early: list[int] = []

    def flush() -> None:
        nonlocal flushes
        flushes += 1
        begun_with = set(written)
        wait(lambda: len(written) - len(durable) == WRITERS - len(ended), "writer")
        durable.update(begun_with)

    commit = GroupCommit(flush, 0.0)

    def write(number: int) -> None:
        for turn in range(TURNS):
            item = number * 100 + turn
            written.add(item)
            commit.wait(WAIT_S)
            if item not in durable:
                early.append(item)
        ended.append(number)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(WRITERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert early == []
    assert len(durable) == WRITERS * TURNS
    assert flushes <= 2 * TURNS + 1


def test_a_failed_flush_fails_its_waiters_and_not_the_next() -> None:
    failing = threading.Event()
    failing.set()
    begun = threading.Event()
    go_on = threading.Event()

    def flush() -> None:
        begun.set()
        go_on.wait(WAIT_S)
        if failing.is_set():
            raise OSError(5, "Input/output error")

    commit = GroupCommit(flush, 0.0)
    outcomes: list[str] = []

    def write() -> None:
        try:
            commit.wait(WAIT_S)
            outcomes.append("durable")
        except OSError:
            outcomes.append("failed")

    leader = threading.Thread(target=write)
    leader.start()
    assert begun.wait(WAIT_S)
    go_on.set()
    leader.join(WAIT_S)
    failing.clear()
    write()
    assert outcomes == ["failed", "durable"]


def test_a_waiter_behind_a_stuck_disk_has_a_deadline() -> None:
    begun, release = threading.Event(), threading.Event()

    def flush() -> None:
        begun.set()
        release.wait(WAIT_S)

    commit = GroupCommit(flush, 0.0)
    leader = threading.Thread(target=commit.wait, args=(WAIT_S,))
    leader.start()
    assert begun.wait(WAIT_S)
    with pytest.raises(DeadlineExceeded):
        commit.wait(0.05)
    release.set()
    leader.join(WAIT_S)
    commit.wait(WAIT_S)
