"""Putting blocks one by one, and many at once."""

from __future__ import annotations

import errno
import itertools
import random
from dataclasses import replace
from pathlib import Path

import pytest

from kvstore.daemon.node import Node, NodeConfig
from kvstore.keys import TokenChain
from kvstore.limits import MIB
from kvstore.store import FLAG_APPROXIMATE, BlockPut, GetStatus, PutOutcome
from kvstore.testing import TEST_RULES, ManualClock
from kvstore.traffic import AGENT, CHAT, ClassRules, TrafficClass
from tests.support.faults import FaultyFiles
from tests.support.nodes import open_node, puts_of, read
from tests.support.spaces import BLOCK_TOKENS, a_chain, a_space

RULES = ClassRules((*TEST_RULES.rules[:1], replace(TEST_RULES.rules[1], codec="zstd")))


def open_counting(path: Path, clock: ManualClock) -> Node:
    """A node whose generations are the same in every run."""
    config = NodeConfig((path,), capacity_bytes=16 * MIB, state_pool_bytes=MIB)
    return Node.open(config, clock, RULES, new_generation=itertools.count(7).__next__)


def mixed(chain: TokenChain) -> list[BlockPut]:
    """Blocks of odd lengths, some approximate, some that compress."""
    chance = random.Random(5)
    puts = []
    for at, name in enumerate(chain.names):
        size = chance.choice([1, 3839, 3840, 3841, 70_000])
        payload = bytes(size) if at % 3 == 0 else chance.randbytes(size)
        puts.append(BlockPut(name, 1 + at % BLOCK_TOKENS, payload, FLAG_APPROXIMATE * (at % 2)))
    return puts


def segments_of(path: Path) -> dict[str, bytes]:
    return {each.name: each.read_bytes() for each in path.rglob("*.seg")}


@pytest.mark.parametrize("traffic_class", [AGENT, CHAT])
def test_one_by_one_is_what_many_at_once_are(tmp_path: Path, traffic_class: TrafficClass) -> None:
    """The same records, the same index entries and the same answers, whatever the batch; also after a restart."""
    found = []
    for name, step in (("one", 1), ("many", 24)):
        clock = ManualClock()
        node = open_counting(tmp_path / name, clock)
        space = node.register_space(a_space())
        puts = mixed(a_chain(space, 24))
        for at in range(0, len(puts), step):
            outcomes = node.put(space, puts[at : at + step], traffic_class=traffic_class)
            assert set(outcomes) == {PutOutcome.STORED}
        content = node._shards[0]._ledger.index.load()
        assert content is not None
        entries = content.rows.tobytes(), content.extents, content.tombstones
        names = [put.name for put in puts]
        looked = node.lookup(space, names)
        answers = looked.presence.tolist(), looked.flags.tolist(), looked.payload_bytes.tolist()
        for put in puts:
            assert read(node, space, put.name, len(put.payload)) == (GetStatus.OK, put.payload)
        node.close()
        again = open_counting(tmp_path / name, clock)
        assert again.lookup(space, names).presence.tolist() == answers[0]
        again.close()
        found.append((segments_of(tmp_path / name), entries, answers))
    assert found[0] == found[1]


def test_one_altered_block_leaves_nothing_to_find(tmp_path: Path) -> None:
    """A block whose bytes are not those submitted is dead on disk: neither served now nor adopted by a restart."""
    clock = ManualClock()
    node = open_node(tmp_path, clock)
    space = node.register_space(a_space())
    (put,) = puts_of(list(a_chain(space, 1).names), 5000)
    assert node.put(space, [put], traffic_class=AGENT, checksums=[1]) == [PutOutcome.ALTERED]
    assert read(node, space, put.name, 5000)[0] is GetStatus.MISS
    node.close()
    node = open_node(tmp_path, clock)
    assert read(node, space, put.name, 5000)[0] is GetStatus.MISS
    assert node.put(space, [put], traffic_class=AGENT) == [PutOutcome.STORED]
    assert read(node, space, put.name, 5000) == (GetStatus.OK, put.payload)
    node.close()


def test_one_block_tries_another_segment_after_a_bad_file(tmp_path: Path) -> None:
    """One file that takes no write costs no block; a disk that takes none refuses it, and a later put succeeds."""
    files = FaultyFiles()
    node = open_node(tmp_path, ManualClock(), files=files)
    space = node.register_space(a_space())
    puts = puts_of(list(a_chain(space, 3).names), 5000)
    assert node.put(space, puts[:1], traffic_class=AGENT) == [PutOutcome.STORED]
    files.errors["pwritev"] = errno.EIO
    files.only = "00000001.seg"
    assert node.put(space, puts[1:2], traffic_class=AGENT) == [PutOutcome.STORED]
    files.only = None
    assert node.put(space, puts[2:], traffic_class=AGENT) == [PutOutcome.REFUSED]
    files.errors.clear()
    node.sweep(apply=True)
    assert node.put(space, puts[2:], traffic_class=AGENT) == [PutOutcome.STORED]
    for put in puts:
        assert read(node, space, put.name, 5000) == (GetStatus.OK, put.payload)
    node.close()
