"""The store's contract, on every backend: memory, node, and clients over Unix sockets, TCP, shared memory and
two nodes, with the token of a worker and of a tenant."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import xxhash

from kvstore import limits
from kvstore.errors import PolicyConflict, SpaceUnknown
from kvstore.keys import BlockName, Space, SpaceId, TokenChain, TokenDigest, space_id, tenant_salt
from kvstore.purges import PurgeOrder, digest_of_keys
from kvstore.sightings import named_by_key
from kvstore.store import FLAG_APPROXIMATE, BlockPut, GetStatus, Pin, Presence, PutOutcome
from kvstore.testing import DAY_S
from kvstore.traffic import AGENT, CHAT, ClassRule, ClassRules
from tests.support import spaces as shared_spaces
from tests.support.spaces import BLOCK_TOKENS, a_chain
from tests.support.stores import STATE_POOL_BYTES, SUBJECTS, TENANT, Subject, subject

SIZE = 5000


def a_space(**changes: Any) -> Space:
    """A space of the tenant whose token reaches no other."""
    return shared_spaces.a_space(**{"tenant_salt": tenant_salt(TENANT), **changes})


@pytest.fixture(params=list(SUBJECTS))
def under_test(request: pytest.FixtureRequest) -> Iterator[Subject]:
    with subject(request.param) as made:
        yield made


@pytest.fixture
def store(under_test: Subject) -> Any:
    return under_test.store


@pytest.fixture
def space(store: Any) -> SpaceId:
    return store.register_space(a_space())


def payload_of(name: BlockName, size: int = SIZE) -> bytes:
    return (name.key * (size // 32 + 1))[:size]


def put(store: Any, chain: TokenChain, traffic_class: int = AGENT, *, flags: int = 0) -> list[PutOutcome]:
    blocks = [BlockPut(name, BLOCK_TOKENS, payload_of(name), flags) for name in chain.names]
    return store.put(chain.space_id, blocks, traffic_class=traffic_class)


def blocks_of(names: Sequence[BlockName]) -> list[BlockPut]:
    return [BlockPut(name, BLOCK_TOKENS, payload_of(name)) for name in names]


def get(store: Any, space: SpaceId, names: Any, size: int = SIZE) -> tuple[list[GetStatus], list[bytearray]]:
    buffers = [bytearray(b"\xa5" * size) for _ in names]
    return store.get_into(space, names, buffers), buffers


def presences(store: Any, chain: TokenChain) -> set[int]:
    return set(store.lookup(chain.space_id, chain.names).presence.tolist())


# --- bytes ----------------------------------------------------------------------------------------------------------


def test_what_was_put_comes_back(store: Any, space: SpaceId) -> None:
    """Every acknowledged block is found and returned byte for byte, across several stripes."""
    chain = a_chain(space, 40)
    assert put(store, chain) == [PutOutcome.STORED] * 40
    answer = store.lookup(space, chain.names)
    assert answer.prefix_blocks() == 40
    assert answer.complete
    assert set(answer.payload_bytes.tolist()) == {SIZE}
    statuses, buffers = get(store, space, chain.names)
    assert statuses == [GetStatus.OK] * 40
    assert [bytes(buffer) for buffer in buffers] == [payload_of(name) for name in chain.names]


def test_miss_leaves_the_buffer_alone(store: Any, space: SpaceId) -> None:
    """A block that was never stored is a miss and its buffer is untouched; its neighbours still arrive."""
    chain = a_chain(space, 5)
    stored = [name for name in chain.names if name.index != 2]
    store.put(space, [BlockPut(name, BLOCK_TOKENS, payload_of(name)) for name in stored], traffic_class=AGENT)
    statuses, buffers = get(store, space, chain.names)
    assert statuses == [GetStatus.OK, GetStatus.OK, GetStatus.MISS, GetStatus.OK, GetStatus.OK]
    assert buffers[2] == b"\xa5" * SIZE
    assert store.lookup(space, chain.names).prefix_blocks() == 2


def test_wrong_size_is_said_and_nothing_written(store: Any, space: SpaceId) -> None:
    chain = a_chain(space, 1)
    put(store, chain)
    statuses, buffers = get(store, space, chain.names, SIZE - 1)
    assert statuses == [GetStatus.WRONG_SIZE]
    assert buffers[0] == b"\xa5" * (SIZE - 1)


def test_second_put_is_a_touch(store: Any, space: SpaceId) -> None:
    """The first bytes under a key stay; a second put changes nothing but keep-until."""
    chain = a_chain(space, 3)
    put(store, chain)
    blocks = [BlockPut(name, BLOCK_TOKENS, b"x" * SIZE) for name in chain.names]
    assert store.put(space, blocks, traffic_class=AGENT) == [PutOutcome.TOUCHED] * 3
    assert get(store, space, chain.names)[1][0] == payload_of(chain.names[0])


def test_exact_replaces_approximate_and_not_the_other_way(store: Any, space: SpaceId) -> None:
    chain = a_chain(space, 2)
    assert put(store, chain, flags=FLAG_APPROXIMATE) == [PutOutcome.STORED] * 2
    answer = store.lookup(space, chain.names)
    assert answer.prefix_blocks() == 2
    assert answer.prefix_blocks(exact_only=True) == 0
    exact = [BlockPut(name, BLOCK_TOKENS, b"e" * SIZE) for name in chain.names]
    assert store.put(space, exact, traffic_class=AGENT) == [PutOutcome.REPLACED] * 2
    assert store.lookup(space, chain.names).prefix_blocks(exact_only=True) == 2
    assert put(store, chain, flags=FLAG_APPROXIMATE) == [PutOutcome.TOUCHED] * 2
    assert get(store, space, chain.names)[1] == [b"e" * SIZE] * 2


def test_another_token_digest_is_a_miss(store: Any, space: SpaceId) -> None:
    """A key that collides (same key, other tokens) is never answered with the other's bytes."""
    chain = a_chain(space, 1)
    put(store, chain)
    other = replace(chain.names[0], token_digest=TokenDigest(bytes(16)))
    assert store.lookup(space, [other]).presence.tolist() == [Presence.NEVER]
    statuses, buffers = get(store, space, [other])
    assert statuses == [GetStatus.MISS]
    assert buffers[0] == b"\xa5" * SIZE


def test_another_space_is_a_miss(store: Any, space: SpaceId) -> None:
    """The same key asked in another registered space is not there."""
    chain = a_chain(space, 1)
    put(store, chain)
    other = store.register_space(a_space(layout="fused"))
    assert store.lookup(other, chain.names).prefix_blocks() == 0
    assert get(store, other, chain.names)[0] == [GetStatus.MISS]


def test_put_needs_a_registered_space(store: Any) -> None:
    chain = a_chain(space_id(a_space(epoch=9)), 1)
    with pytest.raises(SpaceUnknown):
        put(store, chain)


def test_a_buffer_belongs_to_the_caller_again(store: Any, space: SpaceId) -> None:
    """Overwriting a payload after put, or a buffer after get, changes nothing in the store."""
    chain = a_chain(space, 2)
    memory = [bytearray(payload_of(name)) for name in chain.names]
    blocks = [BlockPut(name, BLOCK_TOKENS, memoryview(data)) for name, data in zip(chain.names, memory, strict=True)]
    store.put(space, blocks, traffic_class=AGENT)
    for data in memory:
        data[:] = bytes(len(data))
    _, buffers = get(store, space, chain.names)
    assert buffers[0] == payload_of(chain.names[0])
    buffers[0][:] = b"z" * SIZE
    assert get(store, space, chain.names)[1][0] == payload_of(chain.names[0])


def test_a_view_overwritten_during_put_is_never_stored_altered(store: Any, space: SpaceId) -> None:
    """While the caller scribbles over a view, what is acknowledged is what was submitted; else it is ALTERED.

    The scribbler never brings back what was there before: a view that did so while it was written would pass for
    unchanged, and its block be found corrupt by the first get.
    """
    chain = a_chain(space, 30)
    stop = threading.Event()
    memory = [bytearray(os.urandom(100_000)) for _ in chain.names]
    scribbled = slice(50_000, 50_008)

    def scribble() -> None:
        counts = itertools.count(1)
        while not stop.is_set():
            count = next(counts).to_bytes(8, "little")
            for data in memory:
                data[scribbled] = count

    thread = threading.Thread(target=scribble)
    thread.start()
    try:
        blocks = [BlockPut(name, BLOCK_TOKENS, data) for name, data in zip(chain.names, memory, strict=True)]
        outcomes = store.put(space, blocks, traffic_class=AGENT)
    finally:
        stop.set()
        thread.join()
    assert set(outcomes) <= {PutOutcome.STORED, PutOutcome.ALTERED}
    statuses, buffers = get(store, space, chain.names, 100_000)
    for outcome, status, data, buffer in zip(outcomes, statuses, memory, buffers, strict=True):
        assert status == (GetStatus.OK if outcome == PutOutcome.STORED else GetStatus.MISS)
        if status == GetStatus.OK:
            buffer[scribbled] = data[scribbled] = bytes(8)
            assert buffer == data


def test_misuse_is_a_value_error(store: Any, space: SpaceId) -> None:
    chain = a_chain(space, 1)
    name = chain.names[0]
    with pytest.raises(ValueError, match="payload"):
        store.put(space, [BlockPut(name, BLOCK_TOKENS, b"")], traffic_class=AGENT)
    with pytest.raises(ValueError, match="class"):
        store.put(space, [BlockPut(name, BLOCK_TOKENS, b"x")], traffic_class=0)
    with pytest.raises(ValueError, match="buffers"):
        store.get_into(space, [name], [])
    with pytest.raises(ValueError, match="at most"):
        store.lookup(space, [name] * (limits.LOOKUP_KEYS_MAX + 1))
    with pytest.raises(ValueError, match="page"):
        store.scan(limit=0)


def test_nothing_asked_is_nothing_answered(store: Any, space: SpaceId) -> None:
    assert store.put(space, [], traffic_class=AGENT) == []
    assert store.get_into(space, [], []) == []
    assert store.lookup(space, []).prefix_blocks() == 0
    assert store.touch(space, [], traffic_class=AGENT) == 0
    assert store.delete(space, []) == 0


def test_many_threads_put_and_get_their_own_bytes(store: Any, space: SpaceId) -> None:
    """64 threads put and get random blocks at once; every digest is right."""
    wrong: list[str] = []

    def work(seed: int) -> None:
        chain = a_chain(space, 4, seed=seed)
        payloads = [os.urandom(20_000 + seed) for _ in chain.names]
        digests = [xxhash.xxh3_64_intdigest(payload) for payload in payloads]
        blocks = [BlockPut(name, BLOCK_TOKENS, data) for name, data in zip(chain.names, payloads, strict=True)]
        for _ in range(3):
            outcomes = store.put(space, blocks, traffic_class=AGENT, deadline_s=60.0)
            buffers = [bytearray(len(payload)) for payload in payloads]
            statuses = store.get_into(space, chain.names, buffers, deadline_s=60.0)
            if set(outcomes) - {PutOutcome.STORED, PutOutcome.TOUCHED} or set(statuses) != {GetStatus.OK}:
                wrong.append(f"{seed}: {outcomes} {statuses}")
            if [xxhash.xxh3_64_intdigest(buffer) for buffer in buffers] != digests:
                wrong.append(f"{seed}: digests differ")

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(64)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert wrong == []


# --- time -----------------------------------------------------------------------------------------------------------


def test_blocks_expire_by_their_class(under_test: Subject, store: Any, space: SpaceId) -> None:
    """Agent blocks live 3 days from their last touch, chat blocks 7; expired ones are never served, swept or not."""
    agent, chat = a_chain(space, 3, seed=1), a_chain(space, 3, seed=2)
    put(store, agent, AGENT)
    put(store, chat, CHAT)
    under_test.clock.advance(2.9 * DAY_S)
    assert presences(store, agent) == presences(store, chat) == {Presence.PRESENT}
    under_test.clock.advance(0.2 * DAY_S)
    assert presences(store, agent) == {Presence.EXPIRED}
    assert presences(store, chat) == {Presence.PRESENT}
    assert get(store, space, agent.names)[0] == [GetStatus.MISS] * 3
    under_test.clock.advance(4 * DAY_S)
    assert presences(store, chat) == {Presence.EXPIRED}
    assert put(store, agent) == [PutOutcome.STORED] * 3
    assert presences(store, agent) == {Presence.PRESENT}


def test_a_touch_prolongs_and_never_shortens(under_test: Subject, store: Any, space: SpaceId) -> None:
    """Keep-until is the maximum over touches: a block used by both classes lives as long as chat's."""
    chain = a_chain(space, 3)
    put(store, chain, CHAT)
    under_test.clock.advance(1 * DAY_S)
    assert store.touch(space, chain.names, traffic_class=AGENT) == 3
    under_test.clock.advance(5.9 * DAY_S)
    assert presences(store, chain) == {Presence.PRESENT}
    assert store.touch(space, chain.names, traffic_class=AGENT) == 3
    under_test.clock.advance(2.9 * DAY_S)
    assert presences(store, chain) == {Presence.PRESENT}
    under_test.clock.advance(0.2 * DAY_S)
    assert presences(store, chain) == {Presence.EXPIRED}
    assert store.touch(space, chain.names, traffic_class=AGENT) == 0


def test_a_lookup_or_get_is_no_touch(under_test: Subject, store: Any, space: SpaceId) -> None:
    chain = a_chain(space, 1)
    put(store, chain)
    under_test.clock.advance(2 * DAY_S)
    store.lookup(space, chain.names)
    get(store, space, chain.names)
    under_test.clock.advance(1.1 * DAY_S)
    assert presences(store, chain) == {Presence.EXPIRED}


def test_sweep_says_what_it_would_do_and_does_it(under_test: Subject, store: Any, space: SpaceId) -> None:
    chain = a_chain(space, 20)
    put(store, chain)
    assert store.sweep(apply=False).blocks == 0
    under_test.clock.advance(5 * DAY_S)
    preview = store.sweep(apply=False)
    assert not preview.applied
    assert preview.blocks == 20
    assert preview.payload_bytes == 20 * SIZE
    assert {(item.class_byte, item.space_id) for item in preview.removed} == {(AGENT, space)}
    effect = store.sweep(apply=True)
    assert effect.applied
    assert effect.blocks == 20
    assert not effect.nodes_failed
    assert store.scan()[0] == []
    assert store.sweep(apply=True).blocks == 0


def test_a_pin_holds_against_expiry(under_test: Subject, store: Any, space: SpaceId) -> None:
    chain = a_chain(space, 2)
    put(store, chain)
    kept, absent = chain.names[0].key, a_chain(space, 1, seed=7).names[0].key
    pins = [Pin(space, kept, "operator", "shared prompt"), Pin(space, absent, "operator", "")]
    assert store.pin(pins) == 1
    assert store.pins() == [pins[0]]
    under_test.clock.advance(10 * DAY_S)
    assert store.lookup(space, chain.names).presence.tolist() == [Presence.PRESENT, Presence.EXPIRED]
    assert store.unpin(space, [kept, absent]) == 1
    assert store.pins() == []
    assert presences(store, chain) == {Presence.EXPIRED}


def test_a_pin_until_an_impossible_time_is_refused_and_changes_nothing(store: Any, space: SpaceId) -> None:
    """Neither a negative end nor one that no clock will reach is taken, and later pins work as before."""
    chain = a_chain(space, 1)
    put(store, chain)
    for until_s in (-1, limits.PIN_UNTIL_S_MAX + 1, 10**30):
        with pytest.raises(ValueError, match="pin"):
            store.pin([Pin(space, chain.names[0].key, "operator", "", until_s)])
    assert store.pins() == []
    assert store.pin([Pin(space, chain.names[0].key, "operator", "", limits.PIN_UNTIL_S_MAX)]) == 1


def test_a_pin_with_an_end_ends(under_test: Subject, store: Any, space: SpaceId) -> None:
    chain = a_chain(space, 1)
    put(store, chain)
    until_s = int(under_test.clock.now_s()) + 5 * DAY_S
    assert store.pin([Pin(space, chain.names[0].key, "operator", "", until_s)]) == 1
    under_test.clock.advance(4.9 * DAY_S)
    assert presences(store, chain) == {Presence.PRESENT}
    under_test.clock.advance(0.2 * DAY_S)
    assert presences(store, chain) == {Presence.EXPIRED}


# --- removal --------------------------------------------------------------------------------------------------------


def test_a_deleted_block_is_gone_at_once(store: Any, space: SpaceId) -> None:
    """A lookup says hit, the block is deleted: the get is a miss, and so is the next lookup."""
    chain = a_chain(space, 6)
    put(store, chain)
    assert store.lookup(space, chain.names).prefix_blocks() == 6
    assert store.delete(space, [chain.names[3].key, chain.names[3].key]) == 1
    assert get(store, space, chain.names)[0][3] == GetStatus.MISS
    answer = store.lookup(space, chain.names)
    assert answer.prefix_blocks() == 3
    assert answer.presence[3] == Presence.PURGED
    assert store.delete(space, [chain.names[3].key]) == 0


def test_delete_looks_at_the_space(store: Any, space: SpaceId) -> None:
    chain = a_chain(space, 1)
    put(store, chain)
    other = store.register_space(a_space(layout="fused"))
    assert store.delete(other, [chain.names[0].key]) == 0
    assert presences(store, chain) == {Presence.PRESENT}


def test_delete_space_takes_its_blocks_and_states_only(store: Any, space: SpaceId) -> None:
    other_space = store.register_space(a_space(epoch=1))
    mine, other = a_chain(space, 20), a_chain(other_space, 5)
    put(store, mine)
    put(store, other)
    assert store.put_state(space, mine.state_name(6), b"mine")
    assert store.put_state(other_space, other.state_name(6), b"other")
    assert store.delete_space(space) == 20
    assert presences(store, mine) == {Presence.PURGED}
    assert presences(store, other) == {Presence.PRESENT}
    assert store.get_state(space, mine.state_name(6)) is None
    assert store.get_state(other_space, other.state_name(6)) == (b"other", 0)


# --- states ---------------------------------------------------------------------------------------------------------


def test_states_are_found_under_their_blocks(store: Any, space: SpaceId) -> None:
    """A lookup lists states under the asked blocks and under the root, the deepest first."""
    chain = TokenChain(space, BLOCK_TOKENS, range(20 * BLOCK_TOKENS + 3))
    put(store, chain)
    for position in (2, 6, 7, 70, 82):
        assert store.put_state(space, chain.state_name(position), bytes([position]) * 10, flags=position % 2)
    answer = store.lookup(space, chain.names, states=True)
    found = [(entry.block_index + 1) * BLOCK_TOKENS + entry.tail_tokens for entry in answer.states]
    assert found == [82, 70, 7, 6, 2]
    assert [entry.key for entry in answer.states] == [chain.state_name(position).key for position in found]
    assert [entry.payload_bytes for entry in answer.states] == [10] * 5
    assert [entry.flags for entry in answer.states] == [position % 2 for position in found]
    assert store.get_state(space, chain.state_name(7)) == (b"\x07" * 10, 1)
    assert store.lookup(space, chain.names).states == ()
    short = store.lookup(space, chain.names[:2], states=True)
    assert [(entry.block_index, entry.tail_tokens) for entry in short.states] == [(0, 3), (0, 2), (-1, 2)]


def test_states_live_for_minutes(under_test: Subject, store: Any, space: SpaceId) -> None:
    chain = a_chain(space, 2)
    store.put_state(space, chain.state_name(8), b"state")
    under_test.clock.advance(limits.STATE_TTL_S_DEFAULT - 1)
    assert store.get_state(space, chain.state_name(8)) == (b"state", 0)
    under_test.clock.advance(2 * limits.STATE_TTL_S_DEFAULT)
    assert store.get_state(space, chain.state_name(8)) is None
    assert store.lookup(space, chain.names, states=True).states == ()


def test_a_state_larger_than_the_pool_is_refused(store: Any, space: SpaceId) -> None:
    chain = a_chain(space, 1)
    assert store.put_state(space, chain.state_name(4), bytes(STATE_POOL_BYTES + 1)) is False
    assert store.get_state(space, chain.state_name(4)) is None
    assert store.get_state(space, chain.state_name(1)) is None


# --- control --------------------------------------------------------------------------------------------------------


def test_scan_pages_cover_every_block_once(store: Any, space: SpaceId) -> None:
    other_space = store.register_space(a_space(epoch=1))
    mine, other = a_chain(space, 25), a_chain(other_space, 5)
    put(store, mine, CHAT)
    put(store, other)
    for wanted, names in ((space, mine.names), (None, [*mine.names, *other.names])):
        seen, cursor = [], b""
        while True:
            page, cursor = store.scan(wanted, cursor=cursor, limit=7)
            assert len(page) <= 7
            seen += page
            if not cursor:
                break
        assert sorted(info.key for info in seen) == sorted(name.key for name in names)
    info = next(info for info in seen if info.key == mine.names[3].key)
    assert (info.space_id, info.parent, info.index) == (space, mine.names[2].key, 3)
    assert (info.tokens, info.payload_bytes, info.flags, info.pinned) == (BLOCK_TOKENS, SIZE, 0, False)
    assert info.keep_until_s == info.written_s + 7 * DAY_S
    assert set(info.touches) == {CHAT}


def test_spaces_are_told_as_registered(store: Any, space: SpaceId) -> None:
    spaces = [a_space(), a_space(tenant_salt=bytes(32)), a_space(revision="")]
    for item in spaces:
        store.register_space(item)
    assert store.spaces() == {space_id(item): item for item in spaces}


def test_policy_changes_by_compare_and_set(under_test: Subject, store: Any, space: SpaceId) -> None:
    """A preview changes nothing, a stale version is a conflict, and a shrunk rule expires exactly what it said."""
    agent, chat = a_chain(space, 20, seed=1), a_chain(space, 3, seed=2)
    put(store, agent, AGENT)
    put(store, chat, CHAT)
    under_test.clock.advance(2 * DAY_S)
    before = store.policy()
    shrunk = ClassRules((ClassRule(AGENT, "agent", DAY_S), ClassRule(CHAT, "chat", 7 * DAY_S)))
    preview = store.set_policy(shrunk, "text", expected_version=before.version, apply=False)
    assert not preview.applied
    assert preview.blocks == 20
    assert store.policy() == before
    assert presences(store, agent) == {Presence.PRESENT}
    effect = store.set_policy(shrunk, "text", expected_version=before.version, apply=True)
    assert effect.applied
    assert effect.blocks == 20
    assert presences(store, agent) == {Presence.EXPIRED}
    assert presences(store, chat) == {Presence.PRESENT}
    after = store.policy()
    assert (after.version, after.rules, after.text) == (before.version + 1, shrunk, "text")
    with pytest.raises(PolicyConflict):
        store.set_policy(before.rules, "", expected_version=before.version, apply=True)
    assert store.policy() == after


def test_a_class_may_decline_what_is_offered_once_and_what_is_beyond_its_budget(store: Any, space: SpaceId) -> None:
    """DECLINED is not stored, and no refusal; offered again it is stored; another class is not asked."""
    once, again, other = (a_chain(space, 3, seed=seed) for seed in (1, 2, 3))
    agent = ClassRule(AGENT, "agent", DAY_S, admission="second_touch")
    chat = ClassRule(CHAT, "chat", DAY_S, write_budget_bytes=1)
    version = store.policy().version
    store.set_policy(ClassRules((agent, chat)), "", expected_version=version, apply=True)
    assert store.policy().rules.rules == (agent, chat)
    assert put(store, once) == put(store, again) == [PutOutcome.DECLINED] * 3
    assert presences(store, again) == {Presence.NEVER}
    assert put(store, again) == [PutOutcome.STORED] * 3
    assert put(store, again) == [PutOutcome.TOUCHED] * 3
    assert put(store, again, CHAT) == [PutOutcome.TOUCHED] * 3
    assert put(store, other, CHAT) == [PutOutcome.DECLINED] * 3
    assert (store.stats()["declined"], store.stats()["refused"]) == (9, 0)


def test_a_fixed_promise_runs_from_the_first_touch_of_its_class(
    under_test: Subject, store: Any, space: SpaceId
) -> None:
    """Neither a put, a touch nor an exact copy by the class lengthens it; another class's touch does."""
    fixed = ClassRules((ClassRule(AGENT, "agent", 3 * DAY_S, keep="fixed"), ClassRule(CHAT, "chat", 7 * DAY_S)))
    store.set_policy(fixed, "", expected_version=store.policy().version, apply=True)
    alone, shared, rough = (a_chain(space, 2, seed=seed) for seed in (1, 2, 3))
    put(store, alone), put(store, shared)
    store.put(space, [BlockPut(name, 64, b"rough", FLAG_APPROXIMATE) for name in rough.names], traffic_class=AGENT)
    under_test.clock.advance(2 * DAY_S)
    assert put(store, alone) == [PutOutcome.TOUCHED] * 2
    assert put(store, rough) == [PutOutcome.REPLACED] * 2
    assert store.touch(space, shared.names, traffic_class=AGENT) == 2
    assert store.touch(space, shared.names, traffic_class=CHAT) == 2
    under_test.clock.advance(DAY_S - 1)
    assert presences(store, alone) == presences(store, rough) == {Presence.PRESENT}
    under_test.clock.advance(2)
    assert presences(store, alone) == presences(store, rough) == {Presence.EXPIRED}
    assert put(store, alone) == [PutOutcome.STORED] * 2
    under_test.clock.advance(6 * DAY_S - 3)
    assert presences(store, shared) == {Presence.PRESENT}
    under_test.clock.advance(3)
    assert presences(store, shared) == {Presence.EXPIRED}


def test_nothing_is_served_beyond_the_maximum_age_of_the_class_that_wrote_it(
    under_test: Subject, store: Any, space: SpaceId
) -> None:
    """However often it is used and whoever pins it; only a legal hold extends it. What another class wrote stays."""
    aged = ClassRule(AGENT, "agent", DAY_S, max_age_s=4 * DAY_S)
    store.set_policy(
        ClassRules((aged, ClassRule(CHAT, "chat", 7 * DAY_S))),
        "",
        expected_version=store.policy().version,
        apply=True,
    )
    assert store.policy().rules.rules[0] == aged
    secret, held, other = (a_chain(space, 2, seed=seed) for seed in (1, 2, 3))
    put(store, secret), put(store, held), put(store, other, CHAT)
    store.pin([Pin(space, name.key, "me", "") for name in secret.names])
    store.pin([Pin(space, name.key, "law", "", hold=True) for name in held.names])
    for chain in (secret, held, other):
        assert store.touch(space, chain.names, traffic_class=CHAT) == 2
        assert store.touch(space, chain.names, traffic_class=AGENT) == 2
    under_test.clock.advance(4 * DAY_S - 1)
    assert put(store, secret, CHAT) == [PutOutcome.TOUCHED] * 2
    assert presences(store, secret) == {Presence.PRESENT}
    under_test.clock.advance(1)
    assert presences(store, secret) == {Presence.EXPIRED}
    assert presences(store, held) == presences(store, other) == {Presence.PRESENT}
    assert store.touch(space, secret.names, traffic_class=CHAT) == 0
    assert store.sweep(apply=True).blocks == 2
    assert put(store, secret) == [PutOutcome.STORED] * 2
    assert presences(store, secret) == presences(store, held) == {Presence.PRESENT}


def test_every_policy_so_far_is_remembered(under_test: Subject, store: Any) -> None:
    """Each with its version, its time and who changed it, the one in force last; a preview leaves no trace."""
    first = store.policy()
    longer = ClassRules((ClassRule(AGENT, "agent", 9 * DAY_S), ClassRule(CHAT, "chat", 9 * DAY_S)))
    under_test.clock.advance(60)
    store.set_policy(longer, "longer", expected_version=first.version, apply=False, author="nobody")
    assert store.policy_history() == [first]
    store.set_policy(longer, "longer", expected_version=first.version, apply=True, author="\u00c5sa@desk")
    under_test.clock.advance(60)
    store.set_policy(first.rules, first.text, expected_version=first.version + 1, apply=True)
    before, middle, after = store.policy_history()
    assert (before, after) == (first, store.policy())
    assert (middle.version, middle.rules, middle.text, middle.author) == (2, longer, "longer", "\u00c5sa@desk")
    assert after.changed_s - middle.changed_s == 60
    assert (after.version, after.rules, after.author) == (3, first.rules, "")


def test_a_purge_by_order_is_done_once_and_reported(store: Any, space: SpaceId) -> None:
    """By every backend in the same words: how many blocks, which keys, and what is left of them."""
    chain, other = a_chain(space, 6, seed=1), store.register_space(a_space(revision="other"))
    theirs = a_chain(other, 2, seed=1)
    put(store, chain, AGENT)
    put(store, theirs, AGENT)
    order = PurgeOrder("0f" * 16, (space,), None, 0, "operator", "asked to")
    done = store.purge(order)
    assert not done.failed
    reports = list(done.answers.values())
    assert all(report.done for report in reports)
    assert sum(report.blocks for report in reports) == 6
    if len(reports) == 1:
        assert reports[0].keys_digest == digest_of_keys(name.key for name in chain.names)
    assert presences(store, theirs) == {Presence.PRESENT}
    assert Presence.PRESENT not in presences(store, chain)
    assert [pair for pair in store.purges() if pair[0] == order] == [(order, report) for report in reports]
    until_s = {name: report.began_s for name, report in done.answers.items()}
    assert all(found.records == 0 for found in store.leftovers(order, until_s).answers.values())
    assert store.purge(order) == done


def test_sight_tells_what_is_remembered(under_test: Subject, store: Any, space: SpaceId) -> None:
    """Present, purged, expired and never; and which other spaces hold the same tokens."""
    other_space = store.register_space(a_space(layout="fused"))
    chain, other = a_chain(space, 4), a_chain(other_space, 4)
    store.put(space, blocks_of(chain.names[:1]), traffic_class=CHAT)
    store.put(space, blocks_of(chain.names[1:3]), traffic_class=AGENT)
    put(store, other, CHAT)
    store.delete(space, [chain.names[1].key])
    written_s = int(under_test.clock.now_s())
    under_test.clock.advance(4 * DAY_S)
    sightings = store.sight(space, chain.names)
    wanted = [Presence.PRESENT, Presence.PURGED, Presence.EXPIRED, Presence.NEVER]
    assert [sighting.presence for sighting in sightings] == wanted
    assert {sighting.other_spaces for sighting in sightings} == {(other_space,)}
    assert (sightings[0].since_s, sightings[0].keep_until_s) == (written_s, written_s + 7 * DAY_S)
    present, purged, expired, never = (sighting.block for sighting in sightings)
    assert (purged, never) == (None, None)
    assert (present.space_id, present.written_s, present.touches) == (space, written_s, {CHAT: written_s})
    assert (expired.key, expired.keep_until_s) == (chain.names[2].key, written_s + 3 * DAY_S)


def test_sight_by_keys_alone(under_test: Subject, store: Any, space: SpaceId) -> None:
    """A key is enough to tell what became of its block: of which space it is, who touched it, and where it also is."""
    other_space = store.register_space(a_space(layout="fused"))
    chain, other = a_chain(space, 3), a_chain(other_space, 3)
    store.put(space, blocks_of(chain.names[:2]), traffic_class=AGENT)
    put(store, other, CHAT)
    began_s = int(under_test.clock.now_s())
    under_test.clock.advance(DAY_S)
    store.touch(space, chain.names[:1], traffic_class=CHAT)
    store.delete(space, [chain.names[1].key])
    strangers = [named_by_key(name.key) for name in chain.names]
    present, purged, never = store.sight(None, strangers)
    assert [present.presence, purged.presence, never.presence] == [Presence.PRESENT, Presence.PURGED, Presence.NEVER]
    assert present.block.touches == {AGENT: began_s, CHAT: began_s + DAY_S}
    assert (present.block.space_id, present.other_spaces) == (space, (other_space,))
    assert (purged.since_s, purged.other_spaces) == (began_s + DAY_S, ())


def test_stats_are_numbers_under_known_names(store: Any, space: SpaceId) -> None:
    chain = a_chain(space, 10)
    put(store, chain)
    get(store, space, chain.names)
    get(store, space, a_chain(space, 2, seed=5).names)
    stats = store.stats()
    assert (stats["blocks"], stats["payload_bytes"]) == (10, 10 * SIZE)
    assert (stats["hits"], stats["misses"], stats["spaces"] >= 1) == (10, 2, True)
    assert stats["capacity_bytes"] > 0
    for name in ("corrupt", "quarantined", "evicted", "expired", "refused", "states", "state_bytes", "pins"):
        assert stats[name] == 0
