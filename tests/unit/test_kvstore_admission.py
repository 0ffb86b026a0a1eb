"""The budget of payload bytes in memory."""

from __future__ import annotations

import ctypes
import mmap
import threading
from contextlib import ExitStack

import pytest

from kvstore.daemon.admission import RETRY_AFTER_S, Admission, Party
from kvstore.errors import Overloaded
from tests.support.waiting import WAIT_S, wait


def test_the_budget_is_never_exceeded_and_all_of_it_comes_back() -> None:
    """Many threads borrow at random sizes: never more than the budget is lent, and in the end nothing is."""
    admission = Admission(budget_bytes=1000, buffer_bytes=100)
    worst: list[int] = []

    def work(size: int) -> None:
        for _ in range(50):
            try:
                with admission.buffer(size, 1.0) as view:
                    assert len(view) == size
                    view[:] = bytes([size % 256]) * size
                    worst.append(admission.lent_bytes)
                    assert set(view) == {size % 256}
            except Overloaded:
                continue

    threads = [threading.Thread(target=work, args=(size,)) for size in (10, 100, 101, 300, 700, 950)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert max(worst) <= 1000
    assert admission.lent_bytes == 0


@pytest.mark.parametrize("size", [1, 5_000, 200_000, 300_000])
def test_buffers_begin_with_a_page(size: int) -> None:
    """Small, large and larger than any that is kept: where the kernel copies fastest."""
    admission = Admission(budget_bytes=1_000_000, buffer_bytes=250_000)
    with admission.buffer(size, 0.0) as view:
        begin = ctypes.c_char.from_buffer(view)
        assert ctypes.addressof(begin) % mmap.PAGESIZE == 0
        del begin


def test_what_does_not_fit_is_refused_with_a_time_to_retry() -> None:
    admission = Admission(budget_bytes=1000, buffer_bytes=100)
    with admission.hold(995, 0.0):
        with pytest.raises(Overloaded) as refused, admission.buffer(10, 0.0):
            pass
        assert refused.value.retry_after_s > 0
        assert admission.refused == 1
    with admission.buffer(10, 0.0):
        pass


def test_small_puts_hold_little_of_the_budget() -> None:
    """As many are admitted at once as the budget has small buffers; buffers of either size are used again."""
    admission = Admission(budget_bytes=800, buffer_bytes=80)
    with ExitStack() as stack:
        for _ in range(80):
            stack.enter_context(admission.buffer(3, 0.0))
        assert admission.lent_bytes == 800
        with pytest.raises(Overloaded), admission.buffer(3, 0.0):
            pass
    for small, large in ((1, 11), (10, 80)):
        with admission.buffer(small, 0.0) as first, admission.buffer(large, 0.0) as second:
            memory = first.obj, second.obj
        with admission.buffer(small, 0.0) as first, admission.buffer(large, 0.0) as second:
            assert first.obj is memory[0]
            assert second.obj is memory[1]


def test_a_waiting_borrower_gets_what_comes_back() -> None:
    admission = Admission(budget_bytes=100, buffer_bytes=100)
    got = threading.Event()

    def wait() -> None:
        with admission.buffer(100, WAIT_S):
            got.set()

    with admission.hold(100, 0.0):
        thread = threading.Thread(target=wait)
        thread.start()
        assert not got.wait(0.1)
    assert got.wait(WAIT_S)
    thread.join(WAIT_S)


class Queue:
    """Borrowers on threads, entered one after another; ``order`` tells who was served when."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self.order: list[str] = []
        self._release = threading.Event()
        self._threads: list[threading.Thread] = []

    def join(self, name: str, count: int, party: Party, *, read: bool = False) -> None:
        def borrow() -> None:
            with self._admission.hold(count, WAIT_S, party, read=read):
                self.order.append(name)
                assert self._release.wait(WAIT_S)

        before = self._admission.waiting
        self._threads.append(threading.Thread(target=borrow))
        self._threads[-1].start()
        wait(lambda: self._admission.waiting == before + 1)

    def served(self, count: int) -> list[str]:
        wait(lambda: len(self.order) >= count)
        return sorted(self.order)

    def end(self) -> None:
        self._release.set()
        for thread in self._threads:
            thread.join(WAIT_S)


def test_a_tenant_does_not_take_more_than_its_share_while_another_waits() -> None:
    """Tenant a holds all and asks for more first; what it gives back goes to b until both hold the same."""
    admission = Admission(budget_bytes=400, buffer_bytes=100)
    a, b = Party("a", 1), Party("b", 2)
    queue = Queue(admission)
    with ExitStack() as kept:
        loans = [ExitStack() for _ in range(4)]
        for loan in loans:
            loan.enter_context(admission.hold(100, 0.0, a))  # an unused share is usable
            kept.push(loan)
        for name, party in (("a1", a), ("a2", a), ("b1", b), ("b2", b)):
            queue.join(name, 100, party)
        loans[0].close()
        assert queue.served(1) == ["b1"]
        loans[1].close()
        assert queue.served(2) == ["b1", "b2"]
        assert admission.waiting == 2
    queue.end()
    assert sorted(queue.order) == ["a1", "a2", "b1", "b2"]
    assert admission.lent_bytes == 0


def test_connections_of_one_tenant_share_alike() -> None:
    admission = Admission(budget_bytes=200, buffer_bytes=100)
    queue = Queue(admission)
    with admission.hold(100, 0.0, Party("a", 1)), ExitStack() as other:
        other.enter_context(admission.hold(100, 0.0, Party("b", 3)))
        queue.join("same connection", 100, Party("a", 1))
        queue.join("another", 100, Party("a", 2))
        other.close()
        assert queue.served(1) == ["another"]
    queue.end()


def test_reads_go_before_waiting_puts_up_to_their_share() -> None:
    """A read that fits passes a put that waits; once reads hold half of the budget they stand in line."""
    admission = Admission(budget_bytes=400, buffer_bytes=100)
    queue = Queue(admission)
    with ExitStack() as puts:
        puts.enter_context(admission.hold(250, 0.0, Party("a", 1)))
        queue.join("put", 300, Party("b", 2))
        with admission.hold(100, 0.0, Party("c", 3), read=True):
            with pytest.raises(Overloaded), admission.hold(120, 0.0, Party("c", 3), read=True):
                pass
            puts.close()
            assert queue.served(1) == ["put"]
    queue.end()


def test_a_large_request_is_not_overtaken_by_small_ones_behind_it() -> None:
    admission = Admission(budget_bytes=400, buffer_bytes=100)
    queue = Queue(admission)
    with ExitStack() as first:
        first.enter_context(admission.hold(200, 0.0, Party("a", 1)))
        queue.join("large", 400, Party("b", 2))
        with pytest.raises(Overloaded), admission.hold(50, 0.0, Party("c", 3)):
            pass
        first.close()
        assert queue.served(1) == ["large"]
    queue.end()


def test_the_time_to_retry_is_what_the_bytes_in_the_way_take() -> None:
    """Loans last 2 s and 1000 bytes are out, so 500 in the way take 1 s; nothing known is a fixed guess."""
    now_s = [0.0]
    admission = Admission(budget_bytes=1000, buffer_bytes=100, monotonic=lambda: now_s[0])
    with admission.hold(1000, 0.0):
        with pytest.raises(Overloaded) as refused, admission.hold(500, 0.0):
            pass
        assert refused.value.retry_after_s == RETRY_AFTER_S
        now_s[0] += 2.0
    with admission.hold(1000, 0.0):
        with pytest.raises(Overloaded) as refused, admission.hold(500, 0.0):
            pass
        assert refused.value.retry_after_s == pytest.approx(1.0)
