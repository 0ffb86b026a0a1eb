"""Puts from memory that an engine holds: every job is told once, pressure sheds, and nothing is read afterwards."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvstore.keys import opaque_name
from kvstore.store import GetStatus
from kvstore.testing import MemoryStore
from kvstore.traffic import AGENT, CHAT
from tests.support.faulty_store import FaultyStore
from tests.support.spaces import BLOCK_TOKENS, a_space
from tests.support.waiting import WAIT_S
from workers.adapters import pinned_puts as module
from workers.adapters.attachment import Attachment, Settings
from workers.adapters.pinned_puts import PinnedPuts, PutJob, PutResult
from workers.spaces import Spaces

BLOCK_BYTES = 500


class Lender:
    """An engine: holds payloads by key, and remembers which were read."""

    def __init__(self, spaces: Spaces) -> None:
        self.spaces = spaces
        self.read: list[bytes] = []

    def job(self, number: int, *keys: bytes, tenant: str | None = None, traffic_class: Any = CHAT) -> PutJob:
        def row(at: int) -> memoryview:
            self.read.append(keys[at])
            return memoryview(payload_of(keys[at]))

        return PutJob(number, self.spaces.of(tenant), traffic_class, keys, row, BLOCK_TOKENS, BLOCK_BYTES)


def payload_of(key: bytes) -> bytes:
    return (key * BLOCK_BYTES)[:BLOCK_BYTES]


class Bench:
    """Puts into a store in memory that can be told to fail, on a clock that the test moves."""

    def __init__(self, held_bytes_max: int, threads: int) -> None:
        self.store = FaultyStore(MemoryStore())
        self.attachment = Attachment(Settings(("127.0.0.1:1",)), self.store, a_space())
        self.spaces = self.attachment.spaces
        self.lender = Lender(self.spaces)
        self.now_s = 0.0
        self.puts = PinnedPuts(
            self.attachment, held_bytes_max=held_bytes_max, threads=threads, monotonic_s=lambda: self.now_s
        )
        self.puts.start()

    def wait_for(self, count: int) -> list[PutResult]:
        """So many results, which are all that there are."""
        results: list[PutResult] = []
        ends_s = time.monotonic() + WAIT_S
        while len(results) < count:
            results += self.puts.finished()
            assert time.monotonic() < ends_s, f"only {results}"
            time.sleep(0.001)
        assert len(results) == count
        return results

    def holds(self, *keys: bytes) -> list[bool]:
        """Whether the store gives back exactly what was lent."""
        space, answers = self.spaces.of(None), []
        for key in keys:
            buffer = bytearray(BLOCK_BYTES)
            status = self.store.inner.get_into(space.id, [opaque_name(space.id, key)], [buffer])[0]
            answers.append(status == GetStatus.OK and bytes(buffer) == payload_of(key))
        return answers


Make = Callable[..., Bench]


@pytest.fixture
def make() -> Iterator[Make]:
    opened: list[Bench] = []

    def made(held_bytes_max: int = 100 * BLOCK_BYTES, threads: int = 1) -> Bench:
        opened.append(Bench(held_bytes_max, threads))
        return opened[-1]

    yield made
    for bench in opened:
        bench.store.gate.set()
        assert bench.puts.close(WAIT_S)
        bench.attachment.close(0.0)


def test_what_was_lent_is_stored(make: Make) -> None:
    """Byte for byte, under the engine's keys, and the job is told with what it moved."""
    bench = make()
    bench.puts.offer(bench.lender.job(7, b"a", b"b"))
    [result] = bench.wait_for(1)
    assert (result.number, result.done, result.sent_bytes) == (7, True, 2 * BLOCK_BYTES)
    assert bench.holds(b"a", b"b", b"c") == [True, True, False]
    assert bench.puts.take_counts() == {"store_stored": 2}
    assert not bench.puts.take_counts()


def test_what_is_stored_already_is_touched_and_not_read(make: Make) -> None:
    """A second engine that computed the same prefix moves no bytes; its class's promise counts."""
    bench = make()
    bench.puts.offer(bench.lender.job(1, b"a"))
    bench.wait_for(1)
    bench.puts.offer(bench.lender.job(2, b"a", b"b", traffic_class=AGENT))
    [result] = bench.wait_for(1)
    assert (result.done, result.sent_bytes) == (True, BLOCK_BYTES)
    assert bench.lender.read == [b"a", b"b"]
    touches = {len(block.touches) for block in bench.store.inner.scan()[0] if CHAT in block.touches}
    assert touches == {2}


def test_small_jobs_go_together(make: Make) -> None:
    """Jobs of one space and class that wait are one call; another tenant's is not among them."""
    bench = make()
    bench.store.gate.clear()
    bench.puts.offer(bench.lender.job(1, b"a"))
    while "put" not in bench.store.calls:
        time.sleep(0.001)
    for number, key in ((2, b"b"), (3, b"c")):
        bench.puts.offer(bench.lender.job(number, key))
    bench.puts.offer(bench.lender.job(4, b"b", tenant="other"))
    bench.store.gate.set()
    assert [(result.number, result.done) for result in bench.wait_for(4)] == [(n, True) for n in (1, 2, 3, 4)]
    assert bench.store.calls.count("put") == 3
    assert bench.holds(b"a", b"b", b"c") == [True] * 3


def test_jobs_go_side_by_side(make: Make) -> None:
    """While the store writes one job, another is on its way; each is told when it ends, and draining waits for all."""
    bench = make(threads=2)
    bench.store.gate.clear()
    bench.puts.offer(bench.lender.job(1, b"a"))
    while bench.store.calls.count("put") < 1:
        time.sleep(0.001)
    bench.puts.offer(bench.lender.job(2, b"b"))
    while bench.store.calls.count("put") < 2:
        time.sleep(0.001)
    drained = threading.Thread(target=bench.puts.drain, args=(WAIT_S,))
    drained.start()
    bench.store.gate.set()
    drained.join(WAIT_S)
    assert not drained.is_alive()
    assert sorted((result.number, result.done) for result in bench.puts.finished()) == [(1, True), (2, True)]
    assert bench.holds(b"a", b"b") == [True, True]


def test_what_does_not_fit_is_shed_at_once(make: Make) -> None:
    """Memory that is held is bounded, since the engine cannot use it; what runs counts, until it is told."""
    bench = make(held_bytes_max=3 * BLOCK_BYTES)
    bench.store.gate.clear()
    bench.puts.offer(bench.lender.job(1, b"a", b"b"))
    while "put" not in bench.store.calls:
        time.sleep(0.001)
    bench.puts.offer(bench.lender.job(2, b"c", b"d"))
    bench.puts.offer(bench.lender.job(3, b"e"))
    bench.puts.offer(bench.lender.job(4, b"f"))
    assert bench.wait_for(2) == [PutResult(2, done=False), PutResult(4, done=False)]
    bench.store.gate.set()
    assert {(result.number, result.done) for result in bench.wait_for(2)} == {(1, True), (3, True)}
    assert bench.puts.take_counts()["store_shed"] == 3


def test_a_job_larger_than_the_bound_goes_alone(make: Make) -> None:
    """Else a long prompt would never be stored."""
    bench = make(held_bytes_max=3 * BLOCK_BYTES)
    for _ in range(2):
        bench.puts.offer(bench.lender.job(1, *(b"%d" % number for number in range(9))))
        assert bench.wait_for(1)[0].done


@pytest.mark.parametrize("fault", ["down", "full"])
def test_a_store_that_refuses_is_left_alone_for_a_while(make: Make, fault: str) -> None:
    """Full or gone: jobs are shed without a call until the pause is over, which doubles; then all is as before."""
    bench = make()
    bench.store.down = fault == "down"
    bench.store.fail_put = lambda number: fault == "full"
    bench.puts.offer(bench.lender.job(1, b"a"))
    assert [result.done for result in bench.wait_for(1)] == [False]
    calls = len(bench.store.calls)
    bench.puts.offer(bench.lender.job(2, b"a"))
    assert bench.puts.finished() == [PutResult(2, done=False)]
    assert len(bench.store.calls) == calls
    bench.now_s += module.PAUSE_S_MIN
    bench.puts.offer(bench.lender.job(3, b"a"))
    assert [result.done for result in bench.wait_for(1)] == [False]
    bench.now_s += 2 * module.PAUSE_S_MIN - 0.1
    bench.puts.offer(bench.lender.job(4, b"a"))
    assert bench.puts.finished() == [PutResult(4, done=False)]
    bench.store.down, bench.store.fail_put = False, lambda number: False
    bench.now_s += 0.2
    bench.puts.offer(bench.lender.job(5, b"a"))
    assert [result.done for result in bench.wait_for(1)] == [True]
    assert bench.holds(b"a") == [True]


def test_a_job_that_is_kept_in_part_says_so(make: Make) -> None:
    """Case: the store took some blocks and refused others. What it took counts as sent; the job is not done."""
    bench = make()
    bench.store.fail_put = lambda number: number == 2
    bench.puts.offer(bench.lender.job(1, b"a", b"b"))
    [result] = bench.wait_for(1)
    assert not result.done
    assert bench.holds(b"a", b"b").count(True) == result.sent_bytes // BLOCK_BYTES


def test_draining_waits_for_what_was_taken(make: Make) -> None:
    """Afterwards nothing reads the engine's memory, and every job has been told."""
    bench = make()
    for number in range(5):
        bench.puts.offer(bench.lender.job(number, b"%d" % number))
    bench.puts.drain(WAIT_S)
    assert len(bench.puts.finished()) == 5
    assert all(bench.holds(*(b"%d" % number for number in range(5))))


def test_draining_a_store_that_hangs_sheds_what_has_not_begun(make: Make) -> None:
    """What has begun is waited for: its memory is being read."""
    bench = make()
    bench.store.gate.clear()
    bench.puts.offer(bench.lender.job(1, b"a"))
    while "put" not in bench.store.calls:
        time.sleep(0.001)
    bench.puts.offer(bench.lender.job(2, b"b"))
    drained = threading.Thread(target=bench.puts.drain, args=(0.01,))
    drained.start()
    assert bench.wait_for(1) == [PutResult(2, done=False)]
    assert drained.is_alive()
    bench.store.gate.set()
    drained.join(WAIT_S)
    assert not drained.is_alive()
    assert [(result.number, result.done) for result in bench.wait_for(1)] == [(1, True)]
    bench.puts.offer(bench.lender.job(3, b"c"))
    assert [result.done for result in bench.wait_for(1)] == [True]


def test_a_fault_of_ours_leaves_no_job_waiting(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Should the thread end, its jobs are told as failed, and later ones are shed."""
    monkeypatch.setattr(threading, "excepthook", lambda args: None)
    bench = make()
    monkeypatch.setattr(bench.store.inner, "lookup", lambda *args, **kwargs: 1 / 0)
    bench.puts.offer(bench.lender.job(1, b"a"))
    assert [result.done for result in bench.wait_for(1)] == [False]
    bench.puts.offer(bench.lender.job(2, b"b"))
    assert [result.done for result in bench.wait_for(1)] == [False]


def test_touches_are_counted_in_the_background(make: Make) -> None:
    """A use by another class lengthens what that class promises."""
    bench = make()
    bench.puts.offer(bench.lender.job(1, b"a"))
    bench.wait_for(1)
    bench.puts.touch(bench.spaces.of(None), AGENT, [b"a"])
    ends_s = time.monotonic() + WAIT_S
    while AGENT not in bench.store.inner.scan()[0][0].touches:
        assert time.monotonic() < ends_s
        time.sleep(0.001)
