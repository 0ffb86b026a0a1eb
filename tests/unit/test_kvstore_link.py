"""The circuit of a node link, on a clock that moves when told to."""

from __future__ import annotations

import pytest

from kvstore.link import BACKOFF_S_MAX, Circuit, deadline_after, new_hello


class Monotonic:
    def __init__(self) -> None:
        self.at_s = 100.0

    def __call__(self) -> float:
        return self.at_s


def test_a_failing_node_is_skipped_for_longer_and_longer() -> None:
    """1 s, 2 s, 4 s ... at most 30 s; after each, one exchange may try, and only one."""
    clock = Monotonic()
    circuit = Circuit(clock)
    assert circuit.admit()
    waits = []
    for _ in range(8):
        circuit.failed("refused")
        began_s = clock.at_s
        while not circuit.admit():
            clock.at_s += 0.25
        waits.append(clock.at_s - began_s)
        assert not circuit.admit()
        assert circuit.is_open
    assert waits == [1, 2, 4, 8, 16, 30, 30, 30]
    assert waits[-1] == BACKOFF_S_MAX


def test_failures_of_one_moment_count_once() -> None:
    """Sixteen exchanges under way when a node dies cost one second of skipping, not thirty."""
    clock = Monotonic()
    circuit = Circuit(clock)
    assert all(circuit.admit() for _ in range(16))
    for _ in range(16):
        circuit.failed("reset")
    clock.at_s += 1
    assert circuit.admit()


def test_one_success_closes_the_circuit() -> None:
    clock = Monotonic()
    circuit = Circuit(clock)
    circuit.failed("refused")
    clock.at_s += 5
    assert circuit.admit()
    circuit.succeeded()
    assert not circuit.is_open
    assert all(circuit.admit() for _ in range(5))
    circuit.failed("again")
    clock.at_s += 1
    assert circuit.admit()


def test_deadlines_are_bounded() -> None:
    assert deadline_after(2.5, lambda: 10.0) == 12.5
    for bad in (0.0, -1.0, 601.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="deadline"):
            deadline_after(bad, lambda: 0.0)


def test_tokens_and_tenants_are_bounded() -> None:
    assert new_hello(None, None).token == b""
    with pytest.raises(ValueError, match="token"):
        new_hello("x" * 5000, None)
    with pytest.raises(ValueError, match="tenant"):
        new_hello(None, "x" * 600)
