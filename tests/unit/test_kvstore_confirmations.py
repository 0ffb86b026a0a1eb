"""Blocks that were put with the device at work, and what one flush for all of them says."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.daemon.node import Node
from kvstore.keys import BlockKey, SpaceId
from kvstore.limits import MIB
from kvstore.store import BlockPut, GetStatus, Presence, PutOutcome
from kvstore.testing import ManualClock
from kvstore.traffic import AGENT
from tests.support.faults import FaultyFiles
from tests.support.nodes import open_node, puts_of, read
from tests.support.spaces import a_chain, a_space

SIZE = 5000


class Bench:
    """A node of one or two directories whose disk fails on demand."""

    def __init__(self, path: Path, directories: int) -> None:
        self.files = FaultyFiles()
        self.node: Node = open_node(
            path, ManualClock(), files=self.files, directories=directories, capacity_bytes=directories * 16 * MIB
        )
        self.space: SpaceId = self.node.register_space(a_space())

    def puts(self, blocks: int, seed: int) -> list[BlockPut]:
        return puts_of(list(a_chain(self.space, blocks, seed=seed).names), SIZE)

    def begin(self, puts: list[BlockPut], step: int = 5) -> None:
        """Put in several parts."""
        for at in range(0, len(puts), step):
            outcomes = self.node.put(self.space, puts[at : at + step], traffic_class=AGENT, ack="begun")
            assert set(outcomes) <= {PutOutcome.STORED, PutOutcome.TOUCHED}

    def flushes(self) -> int:
        return self.files.calls.get("fdatasync", 0)


@pytest.fixture(params=[1, 2])
def bench(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Bench]:
    made = Bench(tmp_path, request.param)
    yield made
    made.node.close()


def keys_of(puts: list[BlockPut]) -> list[BlockKey]:
    return [put.name.key for put in puts]


def test_many_parts_wait_for_one_flush(bench: Bench) -> None:
    """Parts that begin are answered without a flush; one flush a segment confirms all; then there is nothing to do."""
    puts = bench.puts(40, seed=1)
    before = bench.flushes()
    bench.begin(puts)
    assert bench.flushes() == before
    assert bench.node.confirm(bench.space, keys_of(puts)) == [True] * 40
    done = bench.flushes()
    assert before < done <= before + 2
    assert bench.node.confirm(bench.space, keys_of(puts)[::-1]) == [True] * 40
    assert bench.node.put(bench.space, puts, traffic_class=AGENT, ack="disk") == [PutOutcome.TOUCHED] * 40
    assert bench.flushes() == done


def test_what_the_disk_did_not_take_is_not_confirmed_and_not_served(bench: Bench) -> None:
    """Blocks that were on disk before keep their promise; the others are gone, also for who asks later."""
    safe, lost = bench.puts(6, seed=1), bench.puts(6, seed=2)
    bench.begin(safe)
    assert bench.node.confirm(bench.space, keys_of(safe)) == [True] * 6
    bench.begin(lost)
    bench.files.errors["fdatasync"] = errno.EIO
    assert bench.node.confirm(bench.space, keys_of([*safe, *lost])) == [True] * 6 + [False] * 6
    bench.files.errors.clear()
    found = bench.node.lookup(bench.space, [put.name for put in [*safe, *lost]]).presence.tolist()
    assert found[:6] == [Presence.PRESENT] * 6
    assert Presence.PRESENT not in found[6:]
    bench.begin(lost)
    assert bench.node.confirm(bench.space, keys_of(lost)) == [True] * 6
    for put in [*safe, *lost]:
        assert read(bench.node, bench.space, put.name, SIZE) == (GetStatus.OK, put.payload)


def test_only_stored_blocks_of_the_space_are_waited_for(bench: Bench) -> None:
    """A block that was deleted meanwhile, one that never was, one of another space: no flush, and nothing is lost."""
    other = bench.node.register_space(a_space(tenant_salt=b"other"))
    puts = bench.puts(3, seed=1)
    bench.begin(puts)
    keys = [*keys_of(puts[:1]), BlockKey(b"\x07" * 32)]
    bench.node.delete(bench.space, keys[:1])
    bench.begin(bench.puts(1, seed=3))
    bench.files.errors["fdatasync"] = errno.EIO
    assert bench.node.confirm(bench.space, keys) == [True, True]
    assert bench.node.confirm(other, keys_of(bench.puts(1, seed=3))) == [True]
    assert bench.node.confirm(bench.space, []) == []
    bench.files.errors.clear()
    assert read(bench.node, bench.space, puts[1].name, SIZE)[0] is GetStatus.OK
