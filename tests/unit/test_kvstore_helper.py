"""One piece of work in two threads: each part once, nothing left under way, and no failure lost."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from kvstore import limits, local
from kvstore.daemon.node import Node, NodeConfig
from kvstore.helper import Helper
from kvstore.store import GetStatus, PutOutcome
from kvstore.testing import TEST_RULES, ManualClock
from kvstore.traffic import AGENT
from tests.support.nodes import payload_of, puts_of
from tests.support.spaces import a_chain, a_space
from tests.support.stores import client_of, served, short_dir

WAIT_S = 10.0


@pytest.fixture
def helper() -> Iterator[Helper]:
    helper = Helper()
    yield helper
    helper.close()


def test_two_threads_do_each_part_once(helper: Helper) -> None:
    """Both run: the first part of each waits for the other's."""
    both = threading.Barrier(2)
    parts: Iterator[int] = iter(())
    done: list[int] = []

    def work() -> None:
        both.wait(WAIT_S)
        for part in parts:
            done.append(part)

    for _ in range(2):
        parts = iter(range(1000))
        done.clear()
        helper.share(work)
        assert sorted(done) == list(range(1000))


def test_a_helper_that_comes_late_finds_nothing_to_do(helper: Helper) -> None:
    """Its thread is held up; the work is done all the same, and is not begun again later."""
    busy, free = threading.Event(), threading.Event()

    def hold_up() -> None:
        busy.set()
        free.wait(WAIT_S)

    helper.share(lambda: None)
    assert helper._threads is not None
    helper._threads.submit(hold_up)
    assert busy.wait(WAIT_S)
    runs: list[int] = []
    helper.share(lambda: runs.append(threading.get_ident()))
    free.set()
    helper._threads.submit(lambda: None).result(WAIT_S)
    assert runs == [threading.get_ident()]


@pytest.mark.parametrize("who", ["here", "beside"])
def test_a_failure_on_either_side_is_told_when_the_other_has_ended(helper: Helper, who: str) -> None:
    both, mine, ended = threading.Barrier(2), threading.get_ident(), threading.Event()

    def work() -> None:
        both.wait(WAIT_S)
        if (threading.get_ident() == mine) == (who == "here"):
            raise ValueError(who)
        ended.set()

    with pytest.raises(ValueError, match=who):
        helper.share(work)
    assert ended.is_set()


def test_blocks_of_a_large_batch_come_byte_for_byte_with_help(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several lengths, in scattered order, and every batch is shared, however small."""
    monkeypatch.setattr(local, "PROCESSORS", 2)
    monkeypatch.setattr(local, "HELPED_BYTES", range(1, limits.GIB))
    shared: list[int] = []
    real = Helper.share

    def share(self: Helper, work: Callable[[], None]) -> None:
        shared.append(1)
        real(self, work)

    monkeypatch.setattr(Helper, "share", share)
    with short_dir() as folder:
        config = NodeConfig(directories=(folder / "data",), capacity_bytes=64 * limits.MIB)
        node = Node.open(config, ManualClock(), TEST_RULES)
        with served(node, folder) as server, client_of(server.addresses[1]) as client:
            space = client.register_space(a_space())
            names = list(a_chain(space, 200).names)
            sizes = [1 + (at * 7919) % 90_000 for at in range(200)]
            puts = [puts_of([name], size)[0] for name, size in zip(names, sizes, strict=True)]
            assert set(client.put(space, puts, traffic_class=AGENT)) == {PutOutcome.STORED}
            for order in (range(200), range(199, -1, -3), range(0, 200, 2)):
                views = [memoryview(bytearray(sizes[at])) for at in order]
                statuses = client.get_into(space, [names[at] for at in order], views)
                assert set(statuses) == {GetStatus.OK}
                for at, view in zip(order, views, strict=True):
                    assert view == payload_of(names[at], sizes[at])
        node.close()
    assert len(shared) == 3
