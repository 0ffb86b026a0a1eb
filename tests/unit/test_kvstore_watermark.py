"""The watermark: a file system that others fill refuses new segments, evicts nothing, and is used again by itself."""

from __future__ import annotations

import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from kvstore.daemon.metrics import StatsCollector
from kvstore.daemon.node import Node, NodeConfig
from kvstore.daemon.watermark import free_min_of
from kvstore.errors import VolumeError
from kvstore.keys import TokenChain
from kvstore.limits import FREE_MIN_BYTES_MAX, GIB, MIB
from kvstore.store import GetStatus, PutOutcome
from kvstore.testing import TEST_RULES, ManualClock
from kvstore.traffic import AGENT, CHAT, TrafficClass
from tests.support.faults import FaultyFiles
from tests.support.nodes import puts_of, read
from tests.support.spaces import a_chain, a_space
from tests.support.waiting import WAIT_S

SIZE = 60_000
DAY_S = 86_400


class SharedDisk(FaultyFiles):
    """A file system of which ``free_bytes`` are free."""

    free_bytes = GIB

    def space(self, path: Path) -> tuple[int, int]:
        return self.free_bytes, 4 * GIB


class Bench:
    def __init__(self, path: Path) -> None:
        self.files = SharedDisk()
        self.clock = ManualClock()
        self.path = path / "volume"
        config = NodeConfig(
            directories=(self.path,), capacity_bytes=16 * MIB, segment_bytes=MIB, free_min_bytes=100 * MIB
        )
        self.node = Node.open(config, self.clock, TEST_RULES, files=self.files)
        self.space = self.node.register_space(a_space())

    def put(self, blocks: int, seed: int, traffic_class: TrafficClass = AGENT) -> tuple[TokenChain, list[PutOutcome]]:
        chain = a_chain(self.space, blocks, seed=seed)
        return chain, self.node.put(self.space, puts_of(chain.names, SIZE), traffic_class=traffic_class)

    def reads(self, chain: TokenChain) -> bool:
        return all(read(self.node, self.space, name, SIZE)[0] is GetStatus.OK for name in chain.names)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    yield made
    made.node.close()


def test_below_the_mark_no_segment_is_made_nothing_is_evicted_and_reads_go_on(bench: Bench) -> None:
    """Somebody else fills the disk: puts fill what is preallocated, then they are refused and counted apart."""
    chain, _ = bench.put(10, seed=1)
    bench.files.free_bytes = 100 * MIB + MIB - 1
    _, outcomes = bench.put(20, seed=2)
    stored = outcomes.count(PutOutcome.STORED)
    assert outcomes == [PutOutcome.STORED] * stored + [PutOutcome.REFUSED] * (20 - stored)
    assert 0 < stored < 10
    assert bench.put(3, seed=3, traffic_class=CHAT)[1] == [PutOutcome.REFUSED] * 3
    stats = bench.node.stats()
    assert (stats["shed_low_space"], stats["evicted"]) == (20 - stored + 3, 0)
    assert stats["volumes"][str(bench.path)]["state"] == "low_space"
    assert bench.reads(chain)
    assert bench.node.put(bench.space, puts_of(chain.names, SIZE), traffic_class=AGENT) == [PutOutcome.TOUCHED] * 10


def test_puts_are_taken_again_as_soon_as_there_is_space(bench: Bench) -> None:
    """No restart, no sweep: the next put looks again."""
    bench.files.free_bytes = 0
    assert bench.put(2, seed=1)[1] == [PutOutcome.REFUSED] * 2
    bench.files.free_bytes = 100 * MIB + MIB
    assert bench.put(2, seed=1)[1] == [PutOutcome.STORED] * 2
    assert bench.node.stats()["volumes"][str(bench.path)]["state"] == "ok"


def test_segments_whose_promises_are_past_are_recycled_below_the_mark(bench: Bench) -> None:
    """Recycling needs no space and loses nothing."""
    bench.put(30, seed=1)
    bench.clock.advance(400 * DAY_S)
    bench.files.free_bytes = 0
    assert bench.put(30, seed=2)[1] == [PutOutcome.STORED] * 30
    assert bench.node.stats()["shed_low_space"] == 0


def test_a_volume_that_has_its_capacity_goes_on_as_ever_below_the_mark(bench: Bench) -> None:
    """A full volume needs no new file: it evicts by its own rules, and takes puts."""
    for seed in range(30):
        bench.put(16, seed=seed)
    evicted = bench.node.stats()["evicted"]
    assert evicted > 0
    bench.files.free_bytes = 0
    assert bench.put(32, seed=99)[1] == [PutOutcome.STORED] * 32
    stats = bench.node.stats()
    assert stats["evicted"] > evicted
    assert stats["shed_low_space"] == 0


def test_metrics_name_the_volume(bench: Bench) -> None:
    bench.files.free_bytes = 0
    bench.put(2, seed=1)
    registry = CollectorRegistry()
    registry.register(StatsCollector(bench.node.stats))
    text = generate_latest(registry).decode()
    assert f'reprise_store_volume_low_space{{volume="{bench.path}"}} 1.0' in text
    assert f'reprise_store_volume_free_bytes{{volume="{bench.path}"}} 0.0' in text
    assert "reprise_store_shed_low_space_total 2.0" in text


def test_the_default_is_a_hundredth_and_yields_to_the_capacity() -> None:
    """A volume that may have nearly the whole disk is not stopped by its own files."""
    path = Path("/srv")
    assert free_min_of(path, (0, 100 * GIB), 50 * GIB, None) == GIB
    assert free_min_of(path, (0, 10**6 * GIB), GIB, None) == FREE_MIN_BYTES_MAX
    assert free_min_of(path, (0, 100 * GIB), 100 * GIB - MIB, None) == MIB
    assert free_min_of(path, (0, 100 * GIB), 101 * GIB, None) == 0
    assert free_min_of(path, (0, 100 * GIB), 50 * GIB, 2 * GIB) == 2 * GIB
    with pytest.raises(VolumeError, match="lower one of them"):
        free_min_of(path, (0, 100 * GIB), 99 * GIB, 2 * GIB)


def test_a_mark_that_cannot_be_had_leaves_no_trace(tmp_path: Path) -> None:
    config = NodeConfig(directories=(tmp_path / "data",), capacity_bytes=64 * MIB, free_min_bytes=2**60)
    with pytest.raises(VolumeError, match="lower one of them"):
        Node.open(config, ManualClock(), TEST_RULES)
    assert not list(tmp_path.iterdir())
    Node.open(replace(config, free_min_bytes=0), ManualClock(), TEST_RULES).close()


ON_A_SMALL_DISK = """
    import subprocess, sys
    from pathlib import Path
    from kvstore.daemon.node import Node, NodeConfig
    from kvstore.limits import MIB
    from kvstore.store import PutOutcome
    from kvstore.testing import TEST_RULES, ManualClock
    from kvstore.traffic import AGENT
    from tests.support.nodes import puts_of, read
    from tests.support.spaces import a_chain, a_space

    disk = Path(sys.argv[1])
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "none", str(disk)], check=True)
    config = NodeConfig((disk / "data",), 32 * MIB, segment_bytes=MIB, free_min_bytes=8 * MIB)
    node = Node.open(config, ManualClock(), TEST_RULES)
    space = node.register_space(a_space())

    def put(seed):
        return node.put(space, puts_of(a_chain(space, 32, seed=seed).names, 60_000), traffic_class=AGENT)

    assert put(1) == [PutOutcome.STORED] * 32
    other = disk / "other"
    other.write_bytes(bytes(node.stats()["volumes"][str(disk / "data")]["free_bytes"] - 8 * MIB))
    assert PutOutcome.REFUSED in put(2)
    stats = node.stats()
    assert stats["evicted"] == 0 and stats["shed_low_space"] > 0, stats
    assert all(read(node, space, name, 60_000)[0] == 0 for name in a_chain(space, 32, seed=1).names)
    other.unlink()
    assert put(3) == [PutOutcome.STORED] * 32
    node.close()
    print("done")
"""


def test_on_a_real_small_file_system(tmp_path: Path) -> None:
    """The same on a file system of 64 MiB of its own, mounted where nobody else sees it."""
    if shutil.which("unshare") is None:
        pytest.skip("there is no unshare")
    command = ["unshare", "--map-root-user", "--mount"]
    if subprocess.run([*command, "true"], capture_output=True, timeout=WAIT_S, check=False).returncode:
        pytest.skip("this user may not make a mount namespace")
    script = textwrap.dedent(ON_A_SMALL_DISK)
    done = subprocess.run(
        [*command, sys.executable, "-c", script, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    if "permission denied" in done.stderr:
        pytest.skip("this user may not mount")
    assert done.stdout == "done\n", done.stderr
