"""The estimate of load times: real bytes over real time, behind what is under way, and forgotten when it is old."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from kvstore.daemon.load import LOAD_KNOWN_S, LOAD_SAMPLE_BYTES_MIN, LoadRate
from kvstore.keys import TokenChain
from kvstore.limits import MIB
from kvstore.store import GetStatus, PutOutcome, Store
from kvstore.testing import ManualClock
from kvstore.traffic import AGENT
from tests.support.nodes import open_node, puts_of
from tests.support.spaces import a_chain, a_space
from tests.support.stores import client_of, served, short_dir

SIZE = 100_000


class Watch:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def watch() -> Watch:
    return Watch()


@pytest.fixture
def rate(watch: Watch) -> LoadRate:
    return LoadRate(watch)


def _get(rate: LoadRate, watch: Watch, count: int, seconds: float) -> None:
    with rate.begin(count) as answering:
        watch.now_s += seconds
        answering.done()


def test_it_follows_recent_speed(rate: LoadRate, watch: Watch) -> None:
    """Nothing known is 0; then proportional to the bytes; a change of speed shows after a few gets."""
    assert rate.estimate_s(MIB) == 0.0
    _get(rate, watch, LOAD_SAMPLE_BYTES_MIN - 1, 5.0)
    assert rate.estimate_s(MIB) == 0.0
    _get(rate, watch, MIB, 0.001)
    assert rate.estimate_s(1024 * MIB) == pytest.approx(1.024)
    for _ in range(40):
        _get(rate, watch, MIB, 0.1)
    assert rate.estimate_s(MIB) == pytest.approx(0.1, rel=0.05)


def test_what_is_under_way_comes_first(rate: LoadRate, watch: Watch) -> None:
    """Three MiB that others wait for make the fourth take four times as long; ended, they are gone."""
    _get(rate, watch, MIB, 0.5)
    others = [rate.begin(MIB) for _ in range(3)]
    assert rate.estimate_s(MIB) == pytest.approx(2.0)
    for other in others:
        other.drop()
        other.drop()
    assert rate.estimate_s(MIB) == pytest.approx(0.5)


def test_gets_side_by_side_are_not_taken_for_slow_ones(rate: LoadRate, watch: Watch) -> None:
    """Four that took a second together, each of them a second, are four MiB a second."""
    together = [rate.begin(MIB) for _ in range(4)]
    watch.now_s += 1.0
    for each in together:
        each.done()
    assert rate.estimate_s(4 * MIB) == pytest.approx(1.0, rel=0.25)


def test_a_speed_that_nobody_measures_any_more_is_unknown(rate: LoadRate, watch: Watch) -> None:
    """Else workers that decline would decline for ever; while the next load is under way, the old speed counts."""
    _get(rate, watch, MIB, 0.5)
    watch.now_s += LOAD_KNOWN_S
    assert rate.estimate_s(MIB) == 0.0
    with rate.begin(MIB):
        assert rate.estimate_s(MIB) == pytest.approx(1.0)
    assert rate.estimate_s(MIB) == 0.0


def _ask(store: Store, chain: TokenChain) -> float:
    return store.lookup(chain.space_id, chain.names).load_s_estimate


@pytest.mark.parametrize("how", ["unix", "tcp"])
def test_a_look_up_tells_it_after_gets_by_socket_and_by_shared_memory(tmp_path: Path, how: str) -> None:
    """Proportional to the bytes of the present prefix, and nothing stays under way."""
    node = open_node(tmp_path, ManualClock())
    with short_dir() as path, served(node, path) as server:
        address = next(each for each in server.addresses if each.startswith("unix:") == (how == "unix"))
        with client_of(address) as client:
            space = client.register_space(a_space())
            chain = a_chain(space, 16, seed=1)
            put = client.put(space, puts_of(list(chain.names), SIZE), traffic_class=AGENT)
            assert put == [PutOutcome.STORED] * 16
            assert _ask(client, chain) == 0.0
            buffers = [bytearray(SIZE) for _ in chain.names]
            assert client.get_into(space, chain.names, buffers) == [GetStatus.OK] * 16
            whole_s = 0.0
            ends_s = time.monotonic() + 20.0
            while not whole_s and time.monotonic() < ends_s:  # the client has its bytes before the node knows
                whole_s = _ask(client, chain)
            assert 0.0 < whole_s < 60.0
            half_s = client.lookup(space, chain.names[:8]).load_s_estimate
            assert half_s == pytest.approx(whole_s / 2)
