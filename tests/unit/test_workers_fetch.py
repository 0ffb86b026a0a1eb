"""Fetching: a store's failure is a shorter hit, with its reason, within the deadline, and never an exception."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvstore.errors import DeadlineExceeded, InternalError, Overloaded, SpaceUnknown, StoreError, Unavailable
from kvstore.keys import TokenChain
from kvstore.store import FLAG_APPROXIMATE, BlockPut, GetStatus, Lookup, Presence
from kvstore.testing import MemoryStore
from kvstore.traffic import CHAT
from tests.support.faulty_store import FaultyStore
from tests.support.spaces import BLOCK_TOKENS, PAYLOAD_BYTES, a_space
from workers.fetch import Fetched, Fetcher, FetchSettings
from workers.plan import Reach
from workers.spaces import Spaces

TOKENS = 80
STATE_BYTES = 500
SLIDING = Reach(BLOCK_TOKENS, 4, 3)


class Rig:
    """A store that holds a chain of 20 blocks and a state at its end, behind faults."""

    def __init__(self, reach: Reach = SLIDING) -> None:
        self.memory = MemoryStore()
        self.store = FaultyStore(self.memory)
        self.spaces = Spaces(a_space(), self.store)
        self.tenant = self.spaces.of(None)
        self.chain = TokenChain(self.tenant.id, BLOCK_TOKENS, range(TOKENS))
        self.memory.register_space(self.tenant.space)
        self.payloads = [bytes([index]) * PAYLOAD_BYTES for index in range(len(self.chain.names))]
        puts = [BlockPut(name, BLOCK_TOKENS, data) for name, data in zip(self.chain.names, self.payloads, strict=True)]
        self.memory.put(self.tenant.id, puts, traffic_class=CHAT)
        self.pool = ThreadPoolExecutor(2)
        self.now_s = 0.0
        self.reach = reach

    def put_state(self, position: int, size: int = STATE_BYTES, flags: int = 0) -> None:
        self.memory.put_state(self.tenant.id, self.chain.state_name(position), b"s" * size, flags=flags)

    def fetch(self, fidelity: str = "bounded", **options: Any) -> Fetched:
        settings = FetchSettings(self.reach, PAYLOAD_BYTES, lambda position: STATE_BYTES, **options)
        fetcher = Fetcher(
            self.store, self.spaces, settings, self.pool, compute_s=lambda tokens: 0.0, monotonic_s=lambda: self.now_s
        )
        fetched = fetcher.fetch(self.tenant, self.chain, fidelity)  # type: ignore[arg-type]
        plan = fetched.plan
        assert plan.hit_tokens + plan.miss_tokens == TOKENS
        assert [bytes(block) for block in fetched.blocks] == self.payloads[: plan.load_blocks]
        assert (fetched.state is None) == (plan.state is None)
        return fetched


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    made.pool.shutdown()


def test_everything_stored_is_fetched_in_one_lookup_and_one_get(rig: Rig) -> None:
    """All blocks and the state, in two round trips; nothing is missed."""
    rig.put_state(TOKENS)
    fetched = rig.fetch()
    assert (fetched.plan.way, fetched.plan.hit_tokens, fetched.first_miss) == ("state", TOKENS - 1, None)
    assert sorted(rig.store.calls) == ["get_into", "get_state", "lookup"]


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        (GetStatus.MISS, "never"),
        (GetStatus.CORRUPT, "quarantined"),
        (GetStatus.WRONG_SIZE, "never"),
        (GetStatus.UNREACHABLE, "unreachable"),
        (GetStatus.DEADLINE, "deadline"),
    ],
)
def test_failed_block_ends_the_hit_and_gives_the_reason(rig: Rig, status: GetStatus, reason: str) -> None:
    """Block 11 fails: the hit is the ten before it, found without asking the store again."""
    rig.store.fail_get, rig.store.get_status = (lambda number: number == 11), status
    fetched = rig.fetch()
    assert (fetched.plan.load_blocks, fetched.plan.reason, fetched.failed_loads) == (10, reason, 1)
    assert fetched.first_miss is not None
    assert fetched.first_miss.name.index == 10
    assert fetched.first_miss.presence is not Presence.PRESENT
    assert rig.store.calls == ["lookup", "get_into"]


def test_lost_state_falls_back_to_blocks_and_replay(rig: Rig) -> None:
    """The lookup promised a state that is gone when asked for: the blocks that were loaded beside it are kept."""
    rig.put_state(TOKENS - 2)
    rig.store.fail_state = lambda number: True
    fetched = rig.fetch()
    assert (fetched.plan.way, fetched.plan.hit_tokens) == ("replay", TOKENS - 1)
    assert rig.store.calls.count("lookup") == 1


def test_second_state_is_taken_when_the_first_is_gone(rig: Rig) -> None:
    """The next deepest one, with what lies between computed."""
    rig.put_state(TOKENS - 3)
    rig.put_state(TOKENS - 1)
    rig.store.fail_state = lambda number: number == 1
    fetched = rig.fetch()
    assert fetched.plan.state is not None
    assert fetched.plan.state.position == TOKENS - 3


def test_state_replaced_by_an_approximate_one_is_planned_as_such(rig: Rig) -> None:
    """What counts is the flag that came with the bytes, not the one that the lookup saw."""
    rig.put_state(TOKENS)
    original = rig.store.lookup

    def stale(*args: Any, **options: Any) -> Lookup:
        found: Lookup = original(*args, **options)
        rig.put_state(TOKENS, flags=FLAG_APPROXIMATE)
        return found

    rig.store.lookup = stale  # type: ignore[method-assign]
    assert not rig.fetch().plan.exact
    rig.put_state(TOKENS)
    exact = rig.fetch("exact")
    assert exact.plan.exact
    assert exact.plan.state is None


def test_state_of_impossible_size_is_not_taken(rig: Rig) -> None:
    """More bytes than this model's state can have."""
    rig.put_state(TOKENS, size=STATE_BYTES + 1)
    assert rig.fetch().plan.state is None


def test_payload_of_another_size_is_a_miss(rig: Rig) -> None:
    """A block whose stored length is not this layout's is never asked for."""
    original = rig.store.lookup

    def odd(*args: Any, **options: Any) -> Lookup:
        found: Lookup = original(*args, **options)
        sizes = found.payload_bytes.copy()
        sizes[7] = PAYLOAD_BYTES - 1
        return replace(found, payload_bytes=sizes)

    rig.store.lookup = odd  # type: ignore[method-assign]
    fetched = rig.fetch()
    assert (fetched.plan.load_blocks, fetched.plan.reason) == (7, "never")


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (Unavailable("gone"), "unreachable"),
        (DeadlineExceeded("late"), "deadline"),
        (Overloaded("busy"), "unreachable"),
        (InternalError("broke"), "unreachable"),
        (SpaceUnknown("who"), "never"),
    ],
)
@pytest.mark.parametrize("call", ["lookup", "get_into", "get_state"])
def test_no_error_of_the_store_gets_through(rig: Rig, error: StoreError, reason: str, call: str) -> None:
    """Whatever a call raises, the request is planned with what is left, and the reason is said."""
    rig.put_state(TOKENS)

    def fail(*args: Any, **options: Any) -> Any:
        raise error

    setattr(rig.store, call, fail)
    fetched = rig.fetch()
    if call == "get_state":
        assert fetched.plan.way == "replay"
    else:
        assert fetched.plan.hit_tokens == 0
        assert fetched.first_miss is not None
        assert fetched.first_miss.name.index == 0
    if call == "lookup":
        assert fetched.plan.reason == reason


def test_incomplete_lookup_is_a_deadline_only_if_time_passed(rig: Rig) -> None:
    """A node that refuses the connection is unreachable; one that does not answer in time is too late."""
    original: Callable[..., Lookup] = rig.store.lookup

    def partly(took_s: float) -> Callable[..., Lookup]:
        def lookup(*args: Any, **options: Any) -> Lookup:
            found = original(*args, **options)
            presence = found.presence.copy()
            presence[5:] = Presence.UNREACHABLE
            rig.now_s += took_s
            return replace(found, presence=np.asarray(presence), complete=False)

        return lookup

    rig.store.lookup = partly(0.001)  # type: ignore[method-assign]
    assert rig.fetch().plan.reason == "unreachable"
    rig.store.lookup = partly(0.25)  # type: ignore[method-assign]
    assert rig.fetch().plan.reason == "deadline"


def test_loading_stops_at_its_deadline(rig: Rig) -> None:
    """The first get used up all the time: no second one is begun, and nothing counts that is not there."""
    original = rig.store.get_into

    def slow(*args: Any, **options: Any) -> list[GetStatus]:
        rig.now_s += 10.0
        statuses = original(*args, **options)
        return [GetStatus.OK, GetStatus.OK, *[GetStatus.DEADLINE] * (len(statuses) - 2)]

    rig.store.get_into = slow  # type: ignore[method-assign]
    fetched = rig.fetch(load_deadline_s=5.0)
    assert fetched.plan.reason == "deadline"
    assert fetched.plan.load_blocks == 2
    assert rig.store.calls == ["lookup", "get_into"]
