"""Limits that hold at every instant and for ever: the capacity at each step of the disk, the number of files, and all
that a daemon keeps in memory.
"""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from kvstore.daemon.admission import Admission
from kvstore.daemon.files import Files
from kvstore.daemon.node import Node, NodeConfig
from kvstore.limits import MIB
from kvstore.store import BlockPut, Presence, PutOutcome
from kvstore.testing import TEST_RULES, ManualClock
from kvstore.traffic import AGENT, CHAT
from tests.support.disk import disk_bytes
from tests.support.nodes import open_node, puts_of
from tests.support.spaces import BLOCK_TOKENS, a_chain, a_space
from tests.support.stores import client_of, served, short_dir

SIZE = 60_000
DAY_S = 86_400


class Watched(Files):
    """Measures the directory, as ``du`` does, before and after everything that could make it larger."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.highest_bytes = 0
        self.measured = 0

    def allocate(self, fd: int, count: int) -> bool:
        self._measure()
        try:
            return super().allocate(fd, count)
        finally:
            self._measure()

    def rename(self, source: Path, target: Path) -> None:
        super().rename(source, target)
        self._measure()

    def fdatasync(self, fd: int) -> None:
        super().fdatasync(fd)
        self._measure()

    def pwritev(self, fd: int, views: Sequence[memoryview], offset: int) -> int:
        done = super().pwritev(fd, views, offset)
        self._measure()
        return done

    def _measure(self) -> None:
        self.measured += 1
        self.highest_bytes = max(self.highest_bytes, disk_bytes(self._directory))


def test_the_capacity_is_not_exceeded_at_any_step_of_the_disk(tmp_path: Path) -> None:
    """Three times the capacity is put, by both classes and acknowledgements, with deletions and sweeps between: at each
    write, segments, index, catalog and whatever is in the making are counted.
    """
    clock, files = ManualClock(), Watched(tmp_path)
    node = open_node(tmp_path, clock, files=files, capacity_bytes=24 * MIB)
    space = node.register_space(a_space())
    for seed in range(80):
        names = a_chain(space, 16, seed=seed).names
        node.put(
            space,
            puts_of(names, SIZE),
            traffic_class=(AGENT, CHAT)[seed % 2],
            ack="disk" if seed % 4 == 0 else "os",
        )
        if seed % 7 == 0:
            node.delete(space, [name.key for name in names[:3]])
        if seed % 16 == 0:
            clock.advance(DAY_S)
            node.sweep(apply=True)
    node.close()
    files._measure()
    assert files.measured > 500
    assert 12 * MIB < files.highest_bytes <= 24 * MIB


def test_old_files_are_used_again_and_never_more_of_them(tmp_path: Path) -> None:
    """Ten lives of the store: each file is written in each of them, none is added, and old blocks are gone."""
    clock = ManualClock()
    node = open_node(tmp_path, clock)
    space = node.register_space(a_space())
    segments = tmp_path / "volume-0" / "segments"
    first = list(a_chain(space, 16, seed=0).names)
    numbers: set[str] = set()
    for life in range(10):
        for seed in range(20):
            names = a_chain(space, 16, seed=20 * life + seed).names
            assert set(node.put(space, puts_of(names, SIZE), traffic_class=AGENT)) == {PutOutcome.STORED}
        numbers = numbers or {path.name for path in segments.iterdir()}
        assert {path.name for path in segments.iterdir()} == numbers
        clock.advance(DAY_S)
    stats = node.stats()
    assert len(numbers) == stats["segments"] <= stats["segments_max"]
    assert stats["segments_recycled"] >= 8 * len(numbers)
    assert Presence.PRESENT not in node.lookup(space, first).presence.tolist()
    clock.advance(4 * DAY_S)
    node.sweep(apply=True)
    assert node.stats()["segments_free"] == stats["segments_max"], "what expired gives its files back"
    node.close()


def open_files() -> int:
    """Of this process, without the index's, whose database opens and closes files as it likes."""
    count = 0
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            count += "/index/" not in os.readlink(f"/proc/self/fd/{name}")
    return count


def figures_of(node: Node, admission: Admission) -> dict[str, int]:
    """Everything that a daemon holds for its clients, as numbers."""
    stats: dict[str, Any] = node.stats()
    return {
        "open files": open_files(),
        "threads": threading.active_count(),
        "memory lent": admission.lent_bytes,
        "leases": stats["leases"],
        "segments": stats["segments"],
        "spaces": stats["spaces"],
        "pins": stats["pins"],
    }


def test_a_soak_of_mixed_sizes_leaves_every_figure_where_it_was() -> None:
    """Blocks of 100 bytes to 250 KB and states, put, read, deleted and evicted by clients that come and go: after each
    round the daemon holds what it held after the first, and what may grow stays below its bound.
    """
    drawn = random.Random(7)
    with short_dir() as folder:
        config = NodeConfig(
            directories=(folder / "data",), capacity_bytes=24 * MIB, segment_bytes=MIB, state_pool_bytes=MIB
        )
        node = Node.open(config, ManualClock(), TEST_RULES)
        admission = Admission(budget_bytes=16 * MIB, buffer_bytes=MIB)
        rounds: list[dict[str, int]] = []
        with served(node, folder, admission=admission) as server:
            for turn in range(90):
                with client_of(server.addresses[turn % 2]) as client:
                    space = client.register_space(a_space())
                    chain, size = a_chain(space, 16, seed=turn), drawn.choice([100, 5_000, 60_000, 250_000])
                    puts = [BlockPut(name, BLOCK_TOKENS, bytes(size)) for name in chain.names]
                    client.put(space, puts, traffic_class=AGENT)
                    client.put_state(space, chain.state_name(5), bytes(size))
                    client.get_into(space, chain.names, [bytearray(size) for _ in puts])
                    if turn % 3 == 0:
                        client.delete(space, [name.key for name in chain.names[:8]])
                if turn % 15 == 14:
                    ended = threading.Event()
                    for _ in range(500):
                        if not server.connections:
                            break
                        ended.wait(0.01)
                    rounds.append(figures_of(node, admission))
        stats = node.stats()
        node.close()
    assert rounds[-1] == rounds[2], rounds
    assert stats["evicted"] > 100
    assert stats["state_bytes"] <= MIB
    assert stats["blocks"] <= stats["blocks_max"]
    assert stats["index_bytes"] <= stats["index_budget_bytes"]
