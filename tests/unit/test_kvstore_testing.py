"""The in-memory store when it is full, and the clock of the tests."""

from __future__ import annotations

import pytest

from kvstore.store import BlockPut, Pin, Presence, PutOutcome
from kvstore.testing import DAY_S, ManualClock, MemoryStore
from kvstore.traffic import AGENT, CHAT, ClassRule, ClassRules
from tests.support.spaces import a_chain, a_space, put_chain

RULES = ClassRules(
    (
        ClassRule(AGENT, "agent", 3 * DAY_S, priority=100),
        ClassRule(CHAT, "chat", 7 * DAY_S, priority=200, floor_bytes=3000),
    )
)


def a_store() -> MemoryStore:
    return MemoryStore(ManualClock(), RULES, capacity_bytes=10_000)


def test_capacity_is_never_exceeded_and_the_lower_priority_goes_first() -> None:
    """Blocks of 1000 bytes in 10,000: agent blocks make room for chat, then the oldest chat blocks do."""
    store = a_store()
    space = store.register_space(a_space())
    agent, chat, more = (a_chain(space, 6, seed=seed) for seed in (1, 2, 3))
    put_chain(store, agent, AGENT)
    put_chain(store, chat, CHAT)
    assert store.stats()["payload_bytes"] == 10_000
    assert (store.lookup(space, agent.names).presence == Presence.EVICTED).sum() == 2
    put_chain(store, more, CHAT)
    assert store.stats()["payload_bytes"] == 10_000
    assert set(store.lookup(space, agent.names).presence.tolist()) == {Presence.EVICTED}


def test_what_is_pinned_or_guaranteed_stays_and_the_put_is_refused() -> None:
    store = a_store()
    space = store.register_space(a_space())
    agent, chat, more = a_chain(space, 7, seed=1), a_chain(space, 3, seed=2), a_chain(space, 1, seed=3)
    put_chain(store, agent, AGENT)
    put_chain(store, chat, CHAT)
    store.pin([Pin(space, name.key, "test", "") for name in agent.names])
    block = BlockPut(more.names[0], 4, b"x" * 1000)
    assert store.put(space, [block], traffic_class=AGENT) == [PutOutcome.REFUSED]
    assert store.lookup(space, [*agent.names, *chat.names]).prefix_blocks() == 10
    store.unpin(space, [agent.names[0].key])
    assert store.put(space, [block], traffic_class=AGENT) == [PutOutcome.STORED]
    assert store.lookup(space, agent.names).presence[0] == Presence.EVICTED


def test_expired_blocks_go_before_living_ones() -> None:
    clock = ManualClock()
    store = MemoryStore(clock, RULES, capacity_bytes=10_000)
    space = store.register_space(a_space())
    chat, agent = a_chain(space, 5, seed=1), a_chain(space, 5, seed=2)
    put_chain(store, chat, CHAT)
    clock.advance(6.5 * DAY_S)
    put_chain(store, agent, AGENT)
    clock.advance(1 * DAY_S)
    put_chain(store, a_chain(space, 5, seed=3), AGENT)
    assert store.lookup(space, agent.names).prefix_blocks() == 5
    assert set(store.lookup(space, chat.names).presence.tolist()) == {Presence.EXPIRED}


def test_the_manual_clock_only_goes_forward() -> None:
    clock = ManualClock(100.0)
    clock.advance(2.5)
    assert clock.now_s() == 102.5
    with pytest.raises(ValueError, match="backwards"):
        clock.advance(-1)
