"""What retention promises, on every kind of store: kept to the end of the promise, never served after it.

The node's rows also restart it, with everything on disk and nothing in memory, at the worst moments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

import pytest

from kvstore.daemon.node import Node, NodeConfig
from kvstore.errors import CapacityProtected, PolicyConflict
from kvstore.keys import Space, TokenChain, tenant_salt
from kvstore.limits import CAPACITY_BYTES_MIN, MIB
from kvstore.store import BlockPut, GetStatus, Presence, PutOutcome, Store
from kvstore.testing import DAY_S, T0_S, ManualClock, MemoryStore
from kvstore.traffic import AGENT, CHAT, TrafficClass
from retention.pins import make_pins, pin_blocks, unpin_blocks
from retention.planner import Usage, summarise
from retention.policy import load_class_rules, parse_policy, policy_text, replace_keep_for
from retention.purge import purge_prefix, purge_spaces, spaces_of_tenant
from retention.scan import scan_blocks
from retention.sweeper import sweep_once
from tests.support.expiry import plan_expiry
from tests.support.spaces import a_chain, a_space, hit_blocks, present_blocks, put_chain

HOUR_S = 3600
RULES, TEXT = load_class_rules(None)
CAPACITY_BYTES = 4 * CAPACITY_BYTES_MIN


class Keeper(Protocol):
    """A store on a manual clock that can be restarted."""

    store: Store
    clock: ManualClock

    def restart(self) -> None: ...


class MemoryKeeper:
    """Memory has nothing to restart from: a restart is nothing."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.store: Store = MemoryStore(self.clock, RULES, policy_text=TEXT, capacity_bytes=CAPACITY_BYTES)

    def restart(self) -> None:
        pass


class NodeKeeper:
    """A real node in a directory of its own."""

    def __init__(self, directory: Path) -> None:
        self.clock = ManualClock()
        self.directory = directory
        self.store: Store = self._open()

    def _open(self) -> Store:
        config = NodeConfig(directories=(self.directory,), capacity_bytes=CAPACITY_BYTES, segment_bytes=MIB)
        return Node.open(config, self.clock, RULES, TEXT)

    def restart(self) -> None:
        self.store.close()
        self.store = self._open()


@pytest.fixture(params=["memory", "node"])
def keeper(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Keeper]:
    made: Keeper = MemoryKeeper() if request.param == "memory" else NodeKeeper(tmp_path / "data")
    yield made
    made.store.close()


def fill(
    keeper: Keeper, traffic_class: TrafficClass, *, blocks: int = 4, seed: int = 0, space: Space | None = None
) -> TokenChain:
    """Store a chain of blocks under a class."""
    chain = a_chain(keeper.store.register_space(space or a_space()), blocks, seed=seed)
    put_chain(keeper.store, chain, traffic_class)
    return chain


def advance_to(keeper: Keeper, days: float) -> None:
    """Move the clock to so many days after its start."""
    keeper.clock.advance(T0_S + days * DAY_S - keeper.clock.now_s())


def statuses(store: Store, chain: TokenChain, payload_bytes: int = 1000) -> set[GetStatus]:
    buffers = [bytearray(payload_bytes) for _ in chain.names]
    return set(store.get_into(chain.space_id, chain.names, buffers))


@pytest.mark.parametrize("restarted", [False, True])
@pytest.mark.parametrize(("traffic_class", "kept_days"), [(AGENT, 3), (CHAT, 7)])
def test_each_class_is_kept_for_its_days(
    keeper: Keeper, traffic_class: TrafficClass, kept_days: int, restarted: bool
) -> None:
    """Agent blocks hit at 2.9 days and miss at 3.1, chat blocks at 6.9 and 7.1; unswept, restarted or not."""
    chain = fill(keeper, traffic_class)
    advance_to(keeper, kept_days - 0.1)
    if restarted:
        keeper.restart()
    assert hit_blocks(keeper.store, chain) == 4
    assert statuses(keeper.store, chain) == {GetStatus.OK}
    advance_to(keeper, kept_days + 0.1)
    assert hit_blocks(keeper.store, chain) == 0
    if restarted:
        keeper.restart()
    assert set(keeper.store.lookup(chain.space_id, chain.names).presence) == {Presence.EXPIRED}
    assert statuses(keeper.store, chain) == {GetStatus.MISS}
    assert keeper.store.touch(chain.space_id, chain.names, traffic_class=traffic_class) == 0


def test_a_touch_starts_the_promise_again(keeper: Keeper) -> None:
    """Touched blocks live on from the touch; untouched ones of the same chain do not."""
    chain = fill(keeper, AGENT)
    advance_to(keeper, 2)
    assert keeper.store.touch(chain.space_id, chain.names[:2], traffic_class=AGENT) == 2
    keeper.restart()
    advance_to(keeper, 4.9)
    assert hit_blocks(keeper.store, chain) == 2
    assert present_blocks(keeper.store, [chain]) == 2
    advance_to(keeper, 5.1)
    assert present_blocks(keeper.store, [chain]) == 0


def test_a_fixed_promise_is_remembered_across_restarts(keeper: Keeper) -> None:
    """Blocks that are used every day are gone three days after they came, whenever the store was restarted."""
    text = TEXT.replace("[class.agent]", '[class.agent]\nkeep = "fixed"')
    keeper.store.set_policy(parse_policy(text), text, expected_version=1, apply=True)
    chain = fill(keeper, AGENT)
    for day in (1, 2):
        advance_to(keeper, day)
        keeper.restart()
        assert keeper.store.touch(chain.space_id, chain.names, traffic_class=AGENT) == 4
    advance_to(keeper, 2.9)
    assert hit_blocks(keeper.store, chain) == 4
    advance_to(keeper, 3.1)
    keeper.restart()
    assert hit_blocks(keeper.store, chain) == 0


def test_a_class_beyond_its_ceiling_gives_way_before_a_cheaper_one(keeper: Keeper) -> None:
    """Agents, who would go first, keep everything; of the chats the oldest go, a quarter of the store stays theirs."""
    text = TEXT.replace("[class.chat]", '[class.chat]\nceiling = "25%"')
    keeper.store.set_policy(parse_policy(text), text, expected_version=1, apply=True)
    space = keeper.store.register_space(a_space())
    chats = [a_chain(space, 16, seed=seed) for seed in range(1, 6)]
    agents = [a_chain(space, 16, seed=seed) for seed in range(6, 10)]
    for traffic_class, chains in ((CHAT, chats), (AGENT, agents)):
        for chain in chains:
            keeper.clock.advance(60)
            put_chain(keeper.store, chain, traffic_class, payload_bytes=250_000)
    stats = keeper.store.stats()
    assert stats["evicted"] > 0
    if "class_evicted" in stats:
        assert stats["class_evicted"] == {"chat": stats["evicted"]}, "it is counted which class gave way"
    keeper.restart()
    assert present_blocks(keeper.store, agents) == 4 * 16
    assert present_blocks(keeper.store, chats[-1:]) == 16
    assert hit_blocks(keeper.store, chats[0]) == 0
    assert present_blocks(keeper.store, chats) * 250_000 > CAPACITY_BYTES // 5


def test_a_put_of_a_stored_block_is_a_touch(keeper: Keeper) -> None:
    """Storing the same prefix again keeps it longer, and writes nothing."""
    chain = fill(keeper, AGENT)
    advance_to(keeper, 2)
    puts = [BlockPut(name, chain.block_tokens, name.key[:1] * 1000) for name in chain.names]
    assert set(keeper.store.put(chain.space_id, puts, traffic_class=AGENT)) == {PutOutcome.TOUCHED}
    advance_to(keeper, 4.9)
    assert hit_blocks(keeper.store, chain) == 4


def test_a_shared_prefix_lives_to_the_longest_promise(keeper: Keeper) -> None:
    """A system prompt used by both classes is kept by whichever promise ends last, in either order."""
    by_agent, by_chat = fill(keeper, AGENT, seed=1), fill(keeper, CHAT, seed=2)
    keeper.store.touch(by_agent.space_id, by_agent.names, traffic_class=CHAT)
    keeper.store.touch(by_chat.space_id, by_chat.names, traffic_class=AGENT)
    advance_to(keeper, 5)
    sweep_once(keeper.store, apply=True)
    keeper.restart()
    keeper.store.touch(by_agent.space_id, by_agent.names, traffic_class=AGENT)
    advance_to(keeper, 7.1)
    assert (hit_blocks(keeper.store, by_agent), hit_blocks(keeper.store, by_chat)) == (4, 0)
    advance_to(keeper, 8.1)
    assert hit_blocks(keeper.store, by_agent) == 0


def test_a_touch_never_shortens_a_promise(keeper: Keeper) -> None:
    """An agent's touch of a chat's block leaves the chat's promise."""
    chain = fill(keeper, CHAT)
    keeper.store.touch(chain.space_id, chain.names, traffic_class=AGENT)
    advance_to(keeper, 6.9)
    keeper.restart()
    assert hit_blocks(keeper.store, chain) == 4


def test_a_sweep_removes_what_is_past_and_nothing_else(keeper: Keeper) -> None:
    """The dry sweep says what the applied one does; both agree with a plan over a scan."""
    old, young = fill(keeper, AGENT, seed=1), fill(keeper, CHAT, seed=2)
    advance_to(keeper, 3.1)
    planned = sum(effect.blocks for effect in plan_expiry(scan_blocks(keeper.store), RULES, keeper.clock.now_s()))
    dry = sweep_once(keeper.store, apply=False)
    assert len(list(scan_blocks(keeper.store))) == 8
    applied = sweep_once(keeper.store, apply=True)
    assert planned == dry.blocks == applied.blocks == 4
    assert (dry.applied, applied.applied) == (False, True)
    assert (hit_blocks(keeper.store, old), hit_blocks(keeper.store, young)) == (0, 4)
    keeper.restart()
    assert {block.key for block in scan_blocks(keeper.store)} == {name.key for name in young.names}
    assert set(keeper.store.lookup(old.space_id, old.names).presence) == {Presence.EXPIRED}


def test_a_swept_block_can_be_stored_again(keeper: Keeper) -> None:
    """After its removal the same key is an ordinary new block."""
    chain = fill(keeper, AGENT)
    advance_to(keeper, 3.1)
    sweep_once(keeper.store, apply=True)
    put_chain(keeper.store, chain, AGENT)
    advance_to(keeper, 6)
    assert hit_blocks(keeper.store, chain) == 4
    assert statuses(keeper.store, chain) == {GetStatus.OK}


def test_an_expired_block_can_be_stored_again_unswept(keeper: Keeper) -> None:
    """A late sweep does not keep a key from being written anew."""
    chain = fill(keeper, AGENT)
    advance_to(keeper, 3.1)
    put_chain(keeper.store, chain, CHAT)
    keeper.restart()
    advance_to(keeper, 10)
    assert hit_blocks(keeper.store, chain) == 4


# --- policy ---------------------------------------------------------------------------------------------------------


def test_a_shrunk_policy_drops_what_it_said_and_nothing_else(keeper: Keeper) -> None:
    """The preview changes nothing; the change expires exactly the previewed blocks, at once and for good."""
    old, chat = fill(keeper, AGENT, seed=1), fill(keeper, CHAT, seed=2)
    advance_to(keeper, 1)
    young = fill(keeper, AGENT, seed=3)
    shorter = replace_keep_for(RULES, {"agent": 12 * HOUR_S})
    planned = sum(effect.blocks for effect in plan_expiry(scan_blocks(keeper.store), shorter, keeper.clock.now_s()))
    version = keeper.store.policy().version
    preview = keeper.store.set_policy(shorter, "shorter", expected_version=version, apply=False)
    assert (preview.applied, preview.blocks, planned) == (False, 4, 4)
    assert (hit_blocks(keeper.store, old), keeper.store.policy().version) == (4, version)
    applied = keeper.store.set_policy(shorter, "shorter", expected_version=version, apply=True)
    assert (applied.applied, applied.blocks, applied.payload_bytes) == (True, 4, preview.payload_bytes)
    for _ in range(2):
        assert [hit_blocks(keeper.store, chain) for chain in (old, young, chat)] == [0, 4, 4]
        keeper.restart()
    policy = keeper.store.policy()
    assert (policy.version, policy.rules, policy.text) == (version + 1, shorter, "shorter")


def test_a_longer_policy_keeps_what_is_stored_longer(keeper: Keeper) -> None:
    """Deadlines follow from touches and the policy in force, so a longer promise counts for old blocks too."""
    chain = fill(keeper, AGENT)
    version = keeper.store.policy().version
    longer = replace_keep_for(RULES, {"agent": 9 * DAY_S})
    assert keeper.store.set_policy(longer, policy_text(longer), expected_version=version, apply=True).blocks == 0
    advance_to(keeper, 8.9)
    sweep_once(keeper.store, apply=True)
    keeper.restart()
    assert hit_blocks(keeper.store, chain) == 4
    advance_to(keeper, 9.1)
    assert hit_blocks(keeper.store, chain) == 0


def test_two_operators_cannot_overwrite_each_other(keeper: Keeper) -> None:
    """The second change for one version is refused and changes nothing."""
    version = keeper.store.policy().version
    first = replace_keep_for(RULES, {"agent": HOUR_S})
    keeper.store.set_policy(first, "first", expected_version=version, apply=True)
    with pytest.raises(PolicyConflict):
        keeper.store.set_policy(RULES, "second", expected_version=version, apply=True)
    with pytest.raises(PolicyConflict):
        keeper.store.set_policy(RULES, "second", expected_version=version, apply=False)
    assert keeper.store.policy().text == "first"


def test_an_operators_class_is_kept_by_its_own_promise(keeper: Keeper) -> None:
    """A class of byte 16 lives by its rule, and when the rule is taken away, as long as the longest."""
    batch = TrafficClass(16)
    text = TEXT + '\n[class.batch]\nbyte = 16\nkeep_for = "1h"\npriority = 1\n'
    keeper.store.set_policy(parse_policy(text), text, expected_version=keeper.store.policy().version, apply=True)
    chain = fill(keeper, batch, seed=1)
    keeper.restart()
    advance_to(keeper, 0.9 / 24)
    assert hit_blocks(keeper.store, chain) == 4
    advance_to(keeper, 1.1 / 24)
    assert hit_blocks(keeper.store, chain) == 0
    other = fill(keeper, batch, seed=2)
    keeper.store.set_policy(RULES, TEXT, expected_version=keeper.store.policy().version, apply=True)
    advance_to(keeper, 6.9)
    keeper.restart()
    assert hit_blocks(keeper.store, other) == 4


# --- pins -----------------------------------------------------------------------------------------------------------


def test_a_pin_holds_past_expiry_sweeps_and_restarts(keeper: Keeper) -> None:
    """Pinned blocks are served and kept until the pin ends; then they are gone as their promise says."""
    chain = fill(keeper, AGENT)
    keys = [name.key for name in chain.names[:2]]
    until_s = int(T0_S) + 30 * DAY_S
    pins = make_pins(chain.space_id, keys, owner="ops", reason="prompt", until_s=until_s, now_s=T0_S)
    assert pin_blocks(keeper.store, pins, deadline_s=5).found == 2
    advance_to(keeper, 20)
    sweep_once(keeper.store, apply=True)
    keeper.restart()
    assert hit_blocks(keeper.store, chain) == 2
    assert sorted(pin.key for pin in keeper.store.pins()) == sorted(keys)
    assert sum(summarise(scan_blocks(keeper.store), RULES, keeper.clock.now_s()).values(), Usage()).pinned_blocks == 2
    advance_to(keeper, 30.1)
    assert hit_blocks(keeper.store, chain) == 0
    sweep_once(keeper.store, apply=True)
    assert list(scan_blocks(keeper.store)) == []


def test_an_unpinned_block_falls_back_to_its_promise(keeper: Keeper) -> None:
    """Past its promise it is gone at once."""
    chain = fill(keeper, AGENT)
    keys = [name.key for name in chain.names]
    pins = make_pins(chain.space_id, keys, owner="ops", reason="prompt", until_s=0, now_s=T0_S)
    pin_blocks(keeper.store, pins, deadline_s=5)
    advance_to(keeper, 100)
    assert hit_blocks(keeper.store, chain) == 4
    assert unpin_blocks(keeper.store, chain.space_id, keys, deadline_s=5).found == 4
    assert hit_blocks(keeper.store, chain) == 0


def test_pinned_blocks_are_not_evicted(keeper: Keeper) -> None:
    """Writing three times the capacity leaves every pinned block as it was."""
    payload_bytes = MIB // 4
    chain = a_chain(keeper.store.register_space(a_space()), 8)
    put_chain(keeper.store, chain, AGENT, payload_bytes=payload_bytes)
    keys = [name.key for name in chain.names]
    pins = make_pins(chain.space_id, keys, owner="ops", reason="prompt", until_s=0, now_s=T0_S)
    pin_blocks(keeper.store, pins, deadline_s=5)
    for seed in range(1, 1 + 3 * CAPACITY_BYTES // (8 * payload_bytes)):
        other = a_chain(chain.space_id, 8, seed=seed)
        puts = [BlockPut(name, other.block_tokens, bytes(payload_bytes)) for name in other.names]
        try:
            keeper.store.put(chain.space_id, puts, traffic_class=CHAT)
        except CapacityProtected:
            pytest.fail("eight pinned blocks do not protect the whole capacity")
    assert hit_blocks(keeper.store, chain) == 8
    assert statuses(keeper.store, chain, payload_bytes) == {GetStatus.OK}
    assert hit_blocks(keeper.store, a_chain(chain.space_id, 8, seed=1)) < 8


# --- purge ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["space", "tenant", "prefix"])
def test_a_purge_leaves_no_hit_and_is_counted(keeper: Keeper, what: str) -> None:
    """What was purged misses at once and after a restart, as PURGED; everything else hits; the count is exact."""
    shared = fill(keeper, CHAT)
    mine = fill(keeper, AGENT, space=a_space(tenant_salt=tenant_salt("acme")))
    purges: dict[str, Callable[[bool], int]] = {
        "space": lambda apply: purge_spaces(keeper.store, [mine.space_id], apply=apply).blocks_total,
        "tenant": lambda apply: (
            purge_spaces(keeper.store, spaces_of_tenant("acme", keeper.store.spaces()), apply=apply).blocks_total
        ),
        "prefix": lambda apply: purge_prefix(keeper.store, mine.names[0].key, apply=apply).blocks_total,
    }
    assert purges[what](False) == 4
    assert hit_blocks(keeper.store, mine) == 4
    assert purges[what](True) == 4
    for _ in range(2):
        assert set(keeper.store.lookup(mine.space_id, mine.names).presence) == {Presence.PURGED}
        assert statuses(keeper.store, mine) == {GetStatus.MISS}
        assert hit_blocks(keeper.store, shared) == 4
        keeper.restart()


def test_a_purge_takes_pinned_blocks_too(keeper: Keeper) -> None:
    """Who asks for a purge means it; no pin is left behind."""
    chain = fill(keeper, AGENT)
    pins = make_pins(chain.space_id, [name.key for name in chain.names], owner="o", reason="r", until_s=0, now_s=T0_S)
    pin_blocks(keeper.store, pins, deadline_s=5)
    assert purge_prefix(keeper.store, chain.names[1].key, apply=True).blocks_total == 3
    assert hit_blocks(keeper.store, chain) == 1
    keeper.restart()
    assert [pin.key for pin in keeper.store.pins()] == [chain.names[0].key]


@pytest.mark.parametrize("whole_space", [True, False])
def test_a_purge_takes_states_too(keeper: Keeper, whole_space: bool) -> None:
    """The state at the end of a purged prefix holds its tokens' KV: it goes with it."""
    chain = fill(keeper, AGENT)
    chain.append([1, 2])
    name = chain.state_name(len(chain))
    assert keeper.store.put_state(chain.space_id, name, b"state")
    assert keeper.store.get_state(chain.space_id, name) == (b"state", 0)
    if whole_space:
        purge_spaces(keeper.store, [chain.space_id], apply=True)
    else:
        purge_prefix(keeper.store, chain.names[2].key, apply=True)
    assert keeper.store.get_state(chain.space_id, name) is None
    assert keeper.store.lookup(chain.space_id, chain.names, states=True).states == ()
