"""Purges: what they cover, in what order, and that they remove nothing unasked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import DeadlineExceeded, InternalError, Unavailable
from kvstore.keys import BlockKey, SpaceId, TokenChain, space_id, tenant_salt
from kvstore.store import BlockPut
from kvstore.testing import ManualClock, MemoryStore
from kvstore.traffic import AGENT
from retention import purge as purge_module
from retention.errors import NothingMatched, SelectionInvalid
from retention.purge import match_space, parse_key, plan_prefix, purge_prefix, purge_spaces, spaces_of_tenant
from retention.scan import scan_blocks
from tests.support.spaces import BLOCK_TOKENS, PAYLOAD_BYTES, a_chain, a_space, hit_blocks, present_blocks, put_chain

SHARED = a_space()
ACME = a_space(tenant_salt=tenant_salt("acme"))
ACME_BIG = a_space(tenant_salt=tenant_salt("acme"), model="big")
OTHER = a_space(tenant_salt=tenant_salt("other"))


def filled(*spaces: Any, blocks: int = 5) -> tuple[MemoryStore, list[TokenChain]]:
    """A store with one chain in each space."""
    store = MemoryStore(ManualClock())
    chains = [a_chain(store.register_space(space), blocks) for space in spaces]
    for chain in chains:
        put_chain(store, chain, AGENT)
    return store, chains


def branch(root: TokenChain, shared_blocks: int, blocks: int, seed: int) -> TokenChain:
    """Another chain that shares the first blocks of ``root``."""
    head = list(root.tokens[: shared_blocks * BLOCK_TOKENS])
    tail = range(50_000 * seed, 50_000 * seed + (blocks - shared_blocks) * BLOCK_TOKENS)
    return TokenChain(root.space_id, BLOCK_TOKENS, [*head, *tail])


def test_purging_a_space_leaves_no_hit_there_and_every_hit_elsewhere() -> None:
    """The space's lookups become 0, the count is what was there, other spaces are untouched."""
    store, (one, two) = filled(SHARED, OTHER)
    dry = purge_spaces(store, [one.space_id], apply=False)
    assert (dry.applied, dry.blocks_total, dry.payload_bytes) == (False, 5, 5 * PAYLOAD_BYTES)
    assert present_blocks(store, [one, two]) == 10
    done = purge_spaces(store, [one.space_id], apply=True)
    assert (done.applied, dict(done.blocks), done.payload_bytes) == (True, {one.space_id: 5}, dry.payload_bytes)
    assert (present_blocks(store, [one]), hit_blocks(store, two)) == (0, 5)
    assert purge_spaces(store, [one.space_id], apply=True).blocks_total == 0


def test_purging_a_tenant_covers_all_its_spaces_and_no_other() -> None:
    """Every model of the tenant goes; the shared space and other tenants stay."""
    store, chains = filled(SHARED, ACME, ACME_BIG, OTHER)
    chosen = spaces_of_tenant("acme", store.spaces())
    assert set(chosen) == {space_id(ACME), space_id(ACME_BIG)}
    assert purge_spaces(store, chosen, apply=True).blocks_total == 10
    assert [hit_blocks(store, chain) for chain in chains] == [5, 0, 0, 5]


def test_an_unknown_tenant_matches_nothing() -> None:
    """Neither an unknown name nor the empty one stands for the shared space."""
    store, _ = filled(SHARED, ACME)
    for tenant in ("nobody", "", "Acme"):
        with pytest.raises(NothingMatched):
            spaces_of_tenant(tenant, store.spaces())


def test_purging_a_prefix_takes_its_extensions_and_nothing_before_it() -> None:
    """Blocks before the prefix and other branches stay; the prefix and all that extends it go."""
    store, (trunk,) = filled(SHARED, blocks=6)
    inside, outside = branch(trunk, 4, 7, seed=1), branch(trunk, 2, 5, seed=2)
    for chain in (inside, outside):
        put_chain(store, chain, AGENT)
    root = trunk.names[3].key
    dry = purge_prefix(store, root, apply=False)
    done = purge_prefix(store, root, apply=True)
    assert dry.blocks_total == done.blocks_total == 3 + 3
    assert dry.payload_bytes == done.payload_bytes == 6 * PAYLOAD_BYTES
    assert done.loose_blocks == 0
    assert [hit_blocks(store, chain) for chain in (trunk, inside, outside)] == [3, 3, 5]
    assert present_blocks(store, [trunk, inside, outside]) == 3 + 3 + 5
    with pytest.raises(NothingMatched):
        purge_prefix(store, root, apply=True)


def test_a_prefix_whose_own_block_is_gone_still_finds_its_extensions() -> None:
    """An evicted block does not hide what hangs on it."""
    store, (chain,) = filled(SHARED)
    store.delete(chain.space_id, [chain.names[1].key])
    assert purge_prefix(store, chain.names[1].key, apply=True).blocks_total == 3
    assert present_blocks(store, [chain]) == 1


def test_blocks_behind_a_gap_are_counted_as_loose() -> None:
    """What cannot be told to descend from the prefix is kept, and said."""
    store, (chain, _) = filled(SHARED, OTHER, blocks=8)
    store.delete(chain.space_id, [chain.names[4].key])
    done = purge_prefix(store, chain.names[2].key, apply=True)
    assert (done.blocks_total, done.loose_blocks) == (2, 3)
    assert hit_blocks(store, chain) == 2


def test_blocks_no_deeper_than_the_prefix_are_not_loose() -> None:
    """A gap elsewhere matters only below the prefix's own depth: nothing at or above it can extend it."""
    store, (chain,) = filled(SHARED, blocks=3)
    other = a_chain(chain.space_id, 4, seed=7)
    put_chain(store, other, AGENT)
    store.delete(other.space_id, [other.names[0].key])
    assert purge_prefix(store, chain.names[2].key, apply=False).loose_blocks == 1
    assert purge_prefix(store, chain.names[0].key, apply=False).loose_blocks == 3


@given(st.data())
def test_a_purged_prefix_is_exactly_its_descendants(data: st.DataObject) -> None:
    """On any forest of branches, the plan is the blocks whose prefix starts with the chosen one, deepest first."""
    store, (trunk,) = filled(SHARED, blocks=data.draw(st.integers(1, 5)))
    chains = [trunk]
    for seed in range(1, data.draw(st.integers(1, 5))):
        parent = data.draw(st.sampled_from(chains))
        shared_blocks = data.draw(st.integers(0, len(parent.names)))
        chain = branch(parent, shared_blocks, shared_blocks + data.draw(st.integers(0, 3)), seed)
        put_chain(store, chain, AGENT)
        chains.append(chain)
    chosen = data.draw(st.sampled_from([name for chain in chains for name in chain.names]))
    expected = {
        name.key
        for chain in chains
        if chosen.key in [other.key for other in chain.names]
        for name in chain.names[chosen.index :]
    }
    plan = plan_prefix(chosen.key, scan_blocks(store))
    assert set(plan.keys) == expected
    assert len(plan.keys) == len(expected)
    index_of = {name.key: name.index for chain in chains for name in chain.names}
    depths = [index_of[key] for key in plan.keys]
    assert depths == sorted(depths, reverse=True)
    assert plan.loose_blocks == 0


class BreaksAfter(MemoryStore):
    """A store whose node goes away after so many deletions."""

    def __init__(self, calls: int) -> None:
        super().__init__(ManualClock())
        self.calls_left = calls

    def delete(self, space_id: SpaceId, keys: Sequence[BlockKey], *, deadline_s: float = 5.0) -> int:
        if self.calls_left == 0:
            raise Unavailable("node down")
        self.calls_left -= 1
        return super().delete(space_id, keys, deadline_s=deadline_s)


def test_an_interrupted_purge_leaves_a_prefix_that_the_next_one_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Deletion goes from the deepest block up, so what is left hangs together."""
    monkeypatch.setattr(purge_module, "BATCH_BLOCKS_MAX", 2)
    store = BreaksAfter(calls=2)
    chain = a_chain(store.register_space(SHARED), 9)
    put_chain(store, chain, AGENT)
    with pytest.raises(Unavailable):
        purge_prefix(store, chain.names[1].key, apply=True)
    assert hit_blocks(store, chain) == present_blocks(store, [chain]) == 5
    store.calls_left = 10
    assert purge_prefix(store, chain.names[1].key, apply=True).blocks_total == 4
    assert present_blocks(store, [chain]) == 1


class WritesOn(MemoryStore):
    """A store into which a worker goes on writing the same conversation while it is purged."""

    def __init__(self) -> None:
        super().__init__(ManualClock())
        self.late: list[TokenChain] = []

    def delete(self, space_id: SpaceId, keys: Sequence[BlockKey], *, deadline_s: float = 5.0) -> int:
        count = super().delete(space_id, keys, deadline_s=deadline_s)
        if self.late:
            put_chain(self, self.late.pop(), AGENT)
        return count


def test_what_a_worker_writes_meanwhile_is_purged_too() -> None:
    """A second pass finds what came during the first; passes are bounded."""
    store = WritesOn()
    chain = a_chain(store.register_space(SHARED), 4)
    put_chain(store, chain, AGENT)
    store.late = [chain]
    assert purge_prefix(store, chain.names[0].key, apply=True).blocks_total == 8
    assert present_blocks(store, [chain]) == 0
    put_chain(store, chain, AGENT)
    store.late = [chain] * 100
    assert purge_prefix(store, chain.names[0].key, apply=True).blocks_total == 4 * purge_module.PASSES_MAX


def test_a_space_too_large_for_memory_is_refused_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the bound the answer is to purge the space."""
    monkeypatch.setattr(purge_module, "PREFIX_BLOCKS_MAX", 4)
    store, (chain,) = filled(SHARED)
    with pytest.raises(SelectionInvalid, match="--space"):
        purge_prefix(store, chain.names[0].key, apply=True)
    assert present_blocks(store, [chain]) == 5


def test_spaces_are_named_by_unique_digits() -> None:
    """Eight digits or more, of one space only."""
    ids = [SpaceId(bytes.fromhex(digits.ljust(64, "0"))) for digits in ("aaaaaaaa1", "aaaaaaaa2", "bbbbbbbb")]
    assert match_space("aaaaaaaa1", ids) == ids[0]
    assert match_space(" BBBBBBBB ", ids) == ids[2]
    assert match_space(ids[1].hex(), ids) == ids[1]
    with pytest.raises(NothingMatched):
        match_space("cccccccc", ids)
    for text, reason in (
        ("aaaaaaaa", "2 spaces"),
        ("bbbbbbb", "8..64"),
        ("b" * 65, "8..64"),
        ("", "hex"),
        ("tiny-llama", "hex"),
        ("٣" * 8, "hex"),
    ):
        with pytest.raises(SelectionInvalid, match=reason):
            match_space(text, ids)


@pytest.mark.parametrize("text", ["", "zz", "ab", "a" * 63, "a" * 66, "0x" + "a" * 62])
def test_keys_are_64_hex_digits(text: str) -> None:
    """Part of a key never stands for a key."""
    with pytest.raises(SelectionInvalid):
        parse_key(text)


# --- scanning -------------------------------------------------------------------------------------------------------


def test_a_scan_of_small_pages_sees_every_block_once() -> None:
    """However the pages fall, each block comes once, in key order, of the asked space only."""
    store, (one, two) = filled(SHARED, OTHER, blocks=7)
    for page_blocks in (1, 2, 7, 14, 100):
        keys = [block.key for block in scan_blocks(store, page_blocks=page_blocks)]
        assert keys == sorted({name.key for chain in (one, two) for name in chain.names})
        assert {block.space_id for block in scan_blocks(store, two.space_id, page_blocks=page_blocks)} == {two.space_id}


def test_a_scan_has_one_deadline_for_all_pages() -> None:
    """Time runs across pages, and what is left goes to the next one."""
    store, _ = filled(SHARED)
    ticks = iter(range(100))
    with pytest.raises(DeadlineExceeded, match="longer than 3 s"):
        list(scan_blocks(store, page_blocks=1, deadline_s=3, monotonic_s=lambda: float(next(ticks))))


class StandsStill(MemoryStore):
    """A store whose cursor never moves."""

    def scan(self, space_id: SpaceId | None = None, **options: Any) -> Any:
        return [], b"here"


def test_a_scan_that_does_not_advance_ends() -> None:
    """A broken peer cannot hold the command for ever."""
    with pytest.raises(InternalError):
        list(scan_blocks(StandsStill(ManualClock())))


def test_a_purged_prefix_can_be_stored_again() -> None:
    """A block that was purged can be stored again, and hits again."""
    store, (chain,) = filled(SHARED)
    purge_prefix(store, chain.names[0].key, apply=True)
    store.put(chain.space_id, [BlockPut(name, BLOCK_TOKENS, b"x") for name in chain.names], traffic_class=AGENT)
    assert hit_blocks(store, chain) == 5
