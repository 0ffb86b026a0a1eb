"""Group commit: no waiter returns before a flush that began after it asked."""

from __future__ import annotations

import threading
import time

import pytest

from kvstore.daemon.durability import GroupCommit
from kvstore.errors import DeadlineExceeded


def test_many_writers_share_few_flushes_and_none_is_early() -> None:
    """Each writer's own write is in some flush that began after it; there are far fewer flushes than writers."""
    written: set[int] = set()
    durable: set[int] = set()
    flushes = 0
    early: list[int] = []

    def flush() -> None:
        nonlocal flushes
        flushes += 1
        begun_with = set(written)
        time.sleep(0.01)
        durable.update(begun_with)

    commit = GroupCommit(flush, 0.0)

    def write(number: int) -> None:
        for turn in range(5):
            item = number * 100 + turn
            written.add(item)
            commit.wait(30.0)
            if item not in durable:
                early.append(item)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert early == []
    assert len(durable) == 100
    assert flushes < 50


def test_a_failed_flush_fails_its_waiters_and_not_the_next() -> None:
    failing = threading.Event()
    failing.set()
    begun = threading.Event()
    go_on = threading.Event()

    def flush() -> None:
        begun.set()
        go_on.wait(10)
        if failing.is_set():
            raise OSError(5, "Input/output error")

    commit = GroupCommit(flush, 0.0)
    outcomes: list[str] = []

    def write() -> None:
        try:
            commit.wait(30.0)
            outcomes.append("durable")
        except OSError:
            outcomes.append("failed")

    leader = threading.Thread(target=write)
    leader.start()
    assert begun.wait(10)
    go_on.set()
    leader.join(10)
    failing.clear()
    write()
    assert outcomes == ["failed", "durable"]


def test_a_waiter_behind_a_stuck_disk_has_a_deadline() -> None:
    release = threading.Event()
    commit = GroupCommit(lambda: bool(release.wait(30)) and None, 0.0)
    leader = threading.Thread(target=commit.wait, args=(30.0,))
    leader.start()
    time.sleep(0.05)
    with pytest.raises(DeadlineExceeded):
        commit.wait(0.05)
    release.set()
    leader.join(30)
    commit.wait(5.0)
