"""The crash bench in short: kill -9 of real daemons at random and named points, and power cuts of a node."""

from __future__ import annotations

import random
from pathlib import Path

from kvstore.daemon.files import Files
from ops.bench.crash import CrashReport, run
from ops.bench.crash_files import PAGE_BYTES, PowerCut, PowerFiles

ROUNDS = 20
CUTS = 10


def run_and_report(rounds: int, cuts: int, seed: int) -> CrashReport:
    """A run, and how to repeat it if it fails."""
    print(f"repeat with: reprise bench crash --rounds {rounds} --cuts {cuts} --seed {seed}")
    return run(rounds=rounds, cuts=cuts, seed=seed, data=None, progress=print)


def test_kills_lose_nothing_and_invent_nothing() -> None:
    """What was acknowledged is there and identical, what was deleted is not, after a kill at any point; the directory
    is clean and every byte of it accounted for.
    """
    report = run_and_report(ROUNDS, 0, random.randrange(2**32))
    assert report.violations == []
    assert sum(report.kills.values()) == ROUNDS
    assert len(report.kills) > 2, "points are reached"
    assert report.counts["acknowledged"] > 20 * ROUNDS


def test_power_cuts_lose_nothing_that_was_acknowledged_on_disk() -> None:
    """Writes that were not synced are lost, torn or reordered, and the index is another: level ``disk`` holds, and no
    byte is wrong.
    """
    report = run_and_report(0, CUTS, random.randrange(2**32))
    assert report.violations == []
    assert report.counts["cut"] == CUTS
    assert report.counts["acknowledged disk"] > 10 * CUTS


def test_power_files_lose_what_was_not_synced_and_nothing_else(tmp_path: Path) -> None:
    """Of pages that were written after the flush any subset is kept, each as it was at some moment; over many cuts all
    of these are seen.
    """
    seen: set[bytes] = set()
    for seed in range(60):
        path = tmp_path / str(seed)
        files = PowerFiles(random.Random(seed), cut_after=9)
        fd = files.open(path, create=True)
        files.sync_directory(tmp_path)
        for page, byte in enumerate(b"ab"):
            files.write(fd, [bytes([byte]) * PAGE_BYTES], page * PAGE_BYTES)
        files.fdatasync(fd)
        files.write(fd, [b"x" * PAGE_BYTES], 0)
        files.write(fd, [b"y" * PAGE_BYTES], 0)
        files.write(fd, [b"z" * 16], PAGE_BYTES)
        files.close(fd)
        files.cut()
        data = path.read_bytes()
        assert set(data[:PAGE_BYTES]) <= set(b"axy")
        assert data[PAGE_BYTES:] in (b"b" * PAGE_BYTES, b"z" * 16 + b"b" * (PAGE_BYTES - 16))
        seen |= {data[at : at + 1] for at in (0, PAGE_BYTES)}
    assert seen == {b"a", b"x", b"y", b"b", b"z"}


def test_power_files_stop_at_the_cut(tmp_path: Path) -> None:
    """After the last operation every other one fails; reading goes on."""
    files = PowerFiles(random.Random(1), cut_after=2)
    fd = files.open(tmp_path / "file", create=True)
    files.write(fd, [b"abc"], 0)
    for _ in range(2):
        try:
            files.write(fd, [b"xyz"], 0)
        except PowerCut:
            continue
        raise AssertionError("a write after the cut")
    assert Files().read(fd, 3, 0) == b"abc"
    files.close(fd)
