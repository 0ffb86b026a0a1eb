"""The budget of payload bytes in memory."""

from __future__ import annotations

import threading

import pytest

from kvstore.daemon.admission import Admission, LoadRate
from kvstore.errors import Overloaded


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
        thread.join(30)
    assert max(worst) <= 1000
    assert admission.lent_bytes == 0


def test_what_does_not_fit_is_refused_with_a_time_to_retry() -> None:
    admission = Admission(budget_bytes=1000, buffer_bytes=100)
    with admission.hold(950, 0.0):
        with pytest.raises(Overloaded) as refused, admission.buffer(10, 0.0):
            pass
        assert refused.value.retry_after_s > 0
        assert admission.refused == 1
    with admission.buffer(10, 0.0):
        pass


def test_load_times_follow_recent_speed() -> None:
    """Nothing known is 0; then proportional to the bytes; a change of speed shows after a few gets."""
    rate = LoadRate()
    assert rate.estimate_s(2**30) == 0.0
    rate.add(1000, 5.0)
    assert rate.estimate_s(2**30) == 0.0
    rate.add(2**20, 0.001)
    assert rate.estimate_s(2**30) == pytest.approx(1.024)
    for _ in range(40):
        rate.add(2**20, 0.1)
    assert rate.estimate_s(2**20) == pytest.approx(0.1, rel=0.05)


def test_a_waiting_borrower_gets_what_comes_back() -> None:
    admission = Admission(budget_bytes=100, buffer_bytes=100)
    got = threading.Event()

    def wait() -> None:
        with admission.buffer(100, 20.0):
            got.set()

    with admission.hold(100, 0.0):
        thread = threading.Thread(target=wait)
        thread.start()
        assert not got.wait(0.1)
    assert got.wait(20)
    thread.join()
