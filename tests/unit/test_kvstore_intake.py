"""Intake: what a class does not want is not written, is told apart from a refusal, and costs little memory."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import blake3
import numpy as np
import pytest

from kvstore.daemon.intake import Intake
from kvstore.daemon.node import Node
from kvstore.daemon.offers import OFFERS_MAX, Offers
from kvstore.keys import BlockKey, BlockName
from kvstore.limits import MIB
from kvstore.store import FLAG_APPROXIMATE, BlockPut, GetStatus, PutOutcome
from kvstore.testing import TEST_RULES, ManualClock
from kvstore.traffic import AGENT, CHAT, SECOND_TOUCH, ClassRules
from retention.trace import read_trace
from tests.support.nodes import open_node, payload_of, puts_of
from tests.support.spaces import BLOCK_TOKENS, a_chain, a_space

SIZE = 3_000
RECORD_BYTES = 4_096
DAY_S = 86_400
AGENT_RULE, CHAT_RULE = TEST_RULES.rules
CHOOSY = ClassRules((replace(AGENT_RULE, admission=SECOND_TOUCH), CHAT_RULE))


def _key(number: int) -> BlockKey:
    return BlockKey(blake3.blake3(number.to_bytes(8, "little")).digest())


def _put(node: Node, names: Sequence[BlockName], flags: int = 0) -> list[PutOutcome]:
    space = node.register_space(a_space())
    return node.put(space, puts_of(list(names), SIZE, flags), traffic_class=AGENT)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def choosy(tmp_path: Path, clock: ManualClock) -> Iterator[Node]:
    node = open_node(tmp_path, clock, rules=CHOOSY, directories=2, capacity_bytes=32 * MIB)
    yield node
    node.close()


def test_a_block_is_stored_when_it_is_offered_again(choosy: Node, clock: ManualClock) -> None:
    """The first offer is DECLINED and writes nothing; the second is stored; the third is a touch."""
    names = a_chain(choosy.register_space(a_space()), 10, seed=1).names
    assert _put(choosy, names) == [PutOutcome.DECLINED] * 10
    assert (choosy.stats()["declined"], choosy.stats()["refused"], choosy.stats()["bytes_written"]) == (10, 0, 0)
    assert _put(choosy, names) == [PutOutcome.STORED] * 10
    assert _put(choosy, names) == [PutOutcome.TOUCHED] * 10
    clock.advance(400 * DAY_S)
    assert _put(choosy, names) == [PutOutcome.STORED] * 10


def test_other_classes_and_exact_blocks_are_not_asked(choosy: Node) -> None:
    """A class without the rule stores at once; an exact block takes the place of an approximate one at once."""
    space = choosy.register_space(a_space())
    names = list(a_chain(space, 4, seed=2).names)
    stored = choosy.put(space, puts_of(names, SIZE, FLAG_APPROXIMATE), traffic_class=CHAT)
    assert stored == [PutOutcome.STORED] * 4
    assert _put(choosy, names) == [PutOutcome.REPLACED] * 4


def test_one_shot_traffic_is_hardly_written_and_what_comes_again_is(tmp_path: Path, clock: ManualClock) -> None:
    """A trace of which four prompts in five come once: at most half of the writes, and every repeated block is there
    from its second offer on.
    """
    rng = random.Random(7)
    repeated = [a_seed for a_seed in range(6) for _ in range(5)]
    prompts = [*repeated, *range(1000, 1120)]
    rng.shuffle(prompts)
    written = {}
    for name, rules in (("always", TEST_RULES), ("second", CHOOSY)):
        node = open_node(tmp_path / name, clock, rules=rules, capacity_bytes=64 * MIB)
        space = node.register_space(a_space())
        chains = {seed: a_chain(space, 8, seed=seed).names for seed in set(prompts)}
        for seed in prompts:
            _put(node, chains[seed])
        written[name] = node.stats()["bytes_written"]
        for seed in range(6):
            buffers = [bytearray(SIZE) for _ in chains[seed]]
            assert node.get_into(space, chains[seed], buffers) == [GetStatus.OK] * 8
            assert bytes(buffers[0]) == payload_of(chains[seed][0], SIZE)
        node.close()
    assert written["always"] == 126 * 8 * RECORD_BYTES
    assert 6 * 8 * RECORD_BYTES <= written["second"] <= written["always"] // 2


def test_a_days_budget_is_spent_by_what_is_stored_and_is_new_the_next_day(tmp_path: Path, clock: ManualClock) -> None:
    """The first blocks of a batch are taken first, the rest is DECLINED; a restart does not renew it."""
    rules = ClassRules((replace(AGENT_RULE, write_budget_bytes=10 * RECORD_BYTES), CHAT_RULE))
    node = open_node(tmp_path, clock, rules=rules)
    space = node.register_space(a_space())
    first, second = (list(a_chain(space, 6, seed=seed).names) for seed in (1, 2))
    assert _put(node, first) == [PutOutcome.STORED] * 6
    assert _put(node, first) == [PutOutcome.TOUCHED] * 6
    assert _put(node, second) == [PutOutcome.STORED] * 4 + [PutOutcome.DECLINED] * 2
    assert node.put(space, puts_of(second, SIZE), traffic_class=CHAT)[4:] == [PutOutcome.STORED] * 2
    node.close()
    node = open_node(tmp_path, clock, rules=rules)
    third = a_chain(space, 6, seed=3).names
    assert _put(node, third) == [PutOutcome.DECLINED] * 6
    clock.advance(DAY_S)
    assert _put(node, third) == [PutOutcome.STORED] * 6
    node.close()


def test_what_was_altered_spends_nothing(tmp_path: Path, clock: ManualClock) -> None:
    rules = ClassRules((replace(AGENT_RULE, write_budget_bytes=2 * RECORD_BYTES), CHAT_RULE))
    node = open_node(tmp_path, clock, rules=rules)
    space = node.register_space(a_space())
    names = a_chain(space, 2, seed=1).names
    blocks = [BlockPut(name, BLOCK_TOKENS, payload_of(name, SIZE)) for name in names]
    assert node.put(space, blocks, traffic_class=AGENT, checksums=[1, 2]) == [PutOutcome.ALTERED] * 2
    assert node.put(space, blocks, traffic_class=AGENT) == [PutOutcome.STORED] * 2
    node.close()


def test_offers_are_remembered_within_stated_memory() -> None:
    """What is among the last keys is known, what is older than two filters is not, and strangers hardly ever are."""
    offers = Offers(keys_max=1024)
    keys = [_key(number) for number in range(4096)]
    assert offers.memory_bytes == 2 * 2 * 1024
    assert Offers().memory_bytes == 4 * MIB == 4 * OFFERS_MAX
    known = np.concatenate([offers.remember(keys[at : at + 64]) for at in range(0, 4096, 64)])
    assert known.mean() < 0.005
    assert offers.remember(keys[-1000:]).all()
    assert offers.remember(keys[:1000]).mean() < 0.005


def test_a_key_twice_in_one_offer_is_one_offer() -> None:
    assert Offers(keys_max=64).remember([_key(1), _key(1)]).tolist() == [False, False]


def test_a_policy_change_is_in_force_with_the_next_put(tmp_path: Path, clock: ManualClock) -> None:
    node = open_node(tmp_path, clock)
    space = node.register_space(a_space())
    version = node.policy().version
    node.set_policy(CHOOSY, "choosy", expected_version=version, apply=True)
    assert _put(node, a_chain(space, 2, seed=1).names) == [PutOutcome.DECLINED] * 2
    node.close()
    node = open_node(tmp_path, clock, rules=None)
    assert node.policy().rules == CHOOSY
    node.close()


@pytest.mark.skipif("REPRISE_TRACE" not in os.environ, reason="REPRISE_TRACE names no trace")
def test_on_a_public_trace() -> None:
    """What the trace offers once is stored by chance only, once in 100 times at most."""
    trace = read_trace(Path(os.environ["REPRISE_TRACE"]), seed=1)
    intake, rule, now_s = Intake({}, 0.0), CHOOSY.rules[0], 0.0
    stored: set[tuple[int, int]] = set()
    offered: dict[tuple[int, int], int] = {}
    for prompt in trace.prompts:
        blocks = [(prompt.scope, number) for first, count in prompt.runs for number in range(first, first + count)]
        fresh = [block for block in blocks if block not in stored]
        for block in blocks:
            offered[block] = offered.get(block, 0) + 1
        keys = [_key(scope << 32 | number) for scope, number in fresh]
        wanted = intake.admit(rule, keys, np.full(len(keys), 4096), now_s)
        stored.update(block for block, ok in zip(fresh, wanted.tolist(), strict=True) if ok)
    once = [block for block, count in offered.items() if count == 1]
    print(f"{len(offered):,} blocks offered, {len(once):,} once, {len(stored):,} stored")
    assert sum(block in stored for block in once) <= len(once) / 100
