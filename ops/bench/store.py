"""The store's speed beside what this machine can do and beside other stores, in one run.

Owns which groups of cases run, in which order, and what becomes of one that fails. Does not measure. Invariants: a
group that fails or for which no time is left is named with the reason, and the others go on; nothing that was started
or written is left behind.
"""

from __future__ import annotations

import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from kvstore.errors import StoreError
from kvstore.limits import KIB, MIB
from kvstore.units import parse_bytes, parse_duration_s
from ops.bench import payload_cases, request_cases, soak, sweep_cases, trace_cases
from ops.bench.bars import SOAK, Standing, small_blocks, standings
from ops.bench.child import ChildFailed
from ops.bench.command import without_folders
from ops.bench.ground import BenchFailed, Ground, Progress, Settings, ground, quick
from ops.bench.measure import Case, Measured, run
from ops.bench.peers import PEERS
from ops.bench.served import memory_bytes
from retention.errors import TraceInvalid

GROUPS = ("get", "put", "disk", "cold", "lookup", "beside", "mixed", "restart", "sweep", "trace")
SIZE_MIN, SIZE_MAX, PAGE_BYTES = 4 * KIB, 16 * MIB, 4 * KIB
BUSY_LOAD = 0.5
"""Load average at the start above which a run says that its figures are low."""
FORMAT = "reprise-bench-store-1"
PACKAGES = ("reprise-kv", "numpy", "xxhash", "blake3", "rocksdb-py")
Cases = Generator[Case]
FAILURES = (BenchFailed, ChildFailed, StoreError, OSError, EOFError)


@dataclass(slots=True)
class Report:
    """One run: everything that was measured, and everything that was not, with the reason."""

    command: str
    settings: Settings
    quick: bool
    machine: dict[str, Any]
    versions: dict[str, str]
    measured: list[Measured] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    memory: dict[str, dict[str, float]] = field(default_factory=dict)
    sweeps: dict[str, float] = field(default_factory=dict)
    traces: dict[str, dict[str, float]] = field(default_factory=dict)
    seconds: float = 0.0

    def standings(self) -> list[Standing]:
        """Every bar with what was reached."""
        return standings(self.measured, self.memory, {at: case.label for at, case in enumerate(self.measured)})

    def to_json(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "command": self.command,
            "quick": self.quick,
            "settings": {
                **asdict(self.settings),
                "peers_python": Path(self.settings.peers_python).name,
                "trace": self.settings.trace.name if self.settings.trace else "",
            },
            "machine": self.machine,
            "versions": self.versions,
            "cases": [measured.to_json() for measured in self.measured],
            "small_blocks": small_blocks(self.measured),
            "bars": [standing.to_json() for standing in self.standings()],
            "skipped": {name: without_folders(reason) for name, reason in self.skipped.items()},
            "warnings": self.warnings,
            "memory": self.memory,
            "sweeps": self.sweeps,
            "traces": self.traces,
            "seconds": self.seconds,
        }


def settings_of(
    *,
    sizes: Sequence[str],
    groups: Sequence[str] = (),
    peers: Sequence[str] = (),
    peers_python: str = sys.executable,
    seconds_max: float = 1200.0,
    blocks: int | None = None,
    is_quick: bool = False,
    trace: Path | None = None,
    trace_requests: int | None = None,
    trace_block: str = "",
    trace_capacity: str = "",
    soak_for: str = "",
) -> Settings:
    """Settings from words. Raises ValueError that names what is wrong and what there is."""
    for kind, given, known in (("groups", groups, GROUPS), ("peers", peers, PEERS)):
        if unknown := sorted(set(given) - set(known)):
            raise ValueError(f"there are no {kind} {', '.join(unknown)}; there are {', '.join(known)}")
    counts = tuple(parse_bytes(text) for text in sizes)
    if not counts or not all(SIZE_MIN <= count <= SIZE_MAX and count % PAGE_BYTES == 0 for count in counts):
        raise ValueError(f"--sizes takes multiples of 4 KiB from {SIZE_MIN // KIB} KiB to {SIZE_MAX // MIB} MiB")
    settings = Settings(counts, tuple(groups), tuple(peers), peers_python, seconds_max=seconds_max)
    if is_quick:
        settings = quick(settings)
    if trace is not None and not trace.is_file():
        raise ValueError(f"--trace: there is no file {trace}")
    settings = replace(
        settings,
        blocks=settings.blocks if blocks is None else blocks,
        soak_s=parse_duration_s(soak_for) if soak_for else 0.0,
        trace=trace,
        trace_requests=trace_requests or settings.trace_requests,
        trace_block_bytes=parse_bytes(trace_block) if trace_block else settings.trace_block_bytes,
        trace_capacity_bytes=parse_bytes(trace_capacity) if trace_capacity else settings.trace_capacity_bytes,
    )
    if not SIZE_MIN <= settings.trace_block_bytes <= SIZE_MAX:
        raise ValueError(f"--trace-block takes {SIZE_MIN // KIB} KiB to {SIZE_MAX // MIB} MiB")
    return settings


def measure(settings: Settings, *, data: Path | None, command: str, is_quick: bool, progress: Progress) -> Report:
    """Run every chosen group. Raises ValueError for a folder that is too small."""
    chosen = settings.groups or GROUPS
    began_s = time.monotonic()
    ends_s = began_s + settings.seconds_max
    report = Report(command, settings, is_quick, machine(data), versions())
    if (load := report.machine["load_average_before"][0]) > BUSY_LOAD and not is_quick:
        report.warnings.append(f"this machine was busy when the run began (load average {load:.1f}): figures are low")
        progress(f"warning: {report.warnings[-1]}")
    with ground(settings, data, progress) as here:
        report.versions |= here.versions
        report.skipped |= {f"peer {skipped.name}": skipped.reason for skipped in here.skipped}
        for name, cases in _groups(here, chosen, ends_s):
            _run_group(report, name, cases, ends_s, progress, here.forget)
        if "trace" in chosen:
            _run_trace(report, here, ends_s)
        if settings.soak_s:
            _run_soak(report, here)
        report.sweeps = dict(here.sweeps)
        report.memory = {**here.memory, "client": dict(memory_bytes(os.getpid()))}
    report.machine["load_average_after"] = os.getloadavg()
    report.seconds = time.monotonic() - began_s
    return report


def _groups(here: Ground, chosen: tuple[str, ...], ends_s: float) -> Iterator[tuple[str, Callable[[], Cases]]]:
    plain: dict[str, Callable[[Ground], Cases]] = {
        "get": payload_cases.get_cases,
        "put": payload_cases.put_cases,
        "disk": payload_cases.disk_cases,
        "cold": payload_cases.cold_cases,
        "beside": request_cases.beside_cases,
        "mixed": request_cases.mixed_cases,
    }
    for name in GROUPS:
        if name in chosen and name in plain:
            yield name, lambda name=name: plain[name](here)  # type: ignore[misc]
    among: list[str] = [name for name in ("lookup", "restart") if name in chosen]
    if among:
        yield " and ".join(among), lambda: _many(here, among, ends_s)
    if "sweep" in chosen:
        yield "sweep", lambda: sweep_cases.sweep_cases(here, ends_s)


def _many(here: Ground, among: list[str], ends_s: float) -> Cases:
    """Look-ups and restarts share the store of many small blocks, since filling it takes longest."""
    with request_cases.many_blocks(here, ends_s) as (store, chains, stored):
        if "lookup" in among:
            yield from request_cases.lookup_cases(here, store, chains, stored)
        if "restart" in among:
            yield from request_cases.restart_cases(here, store, chains[0][0], stored)


def _run_group(
    report: Report,
    name: str,
    cases: Callable[[], Cases],
    ends_s: float,
    progress: Progress,
    forget: Callable[[str], None] = lambda _: None,
) -> None:
    """Measure a group's cases. ``forget`` is told of each contender that failed, and that the next do without."""
    if time.monotonic() > ends_s:
        report.skipped[name] = "no time was left: raise --minutes, or choose fewer --groups or --sizes"
        return
    done = 0
    try:
        with closing(cases()) as waiting:
            for case in waiting:
                if time.monotonic() > ends_s:
                    report.skipped[f"{name} after {done} cases"] = "no time was left: raise --minutes"
                    return
                measured = run(case, rounds=report.settings.rounds, ends_s=ends_s, sample_s=report.settings.sample_s)
                report.measured.append(measured)
                for peer, reason in measured.dropped.items():
                    report.skipped[f"{peer} from {measured.label}"] = reason
                    progress(f"{peer} is left out from here: {reason}")
                    forget(peer)
                progress(line_of(measured))
                done += 1
    except FAILURES as error:
        report.skipped[f"{name} after {done} cases"] = f"failed: {error}"
        progress(f"{name} failed: {error}")


def _run_trace(report: Report, here: Ground, ends_s: float) -> None:
    if time.monotonic() > ends_s:
        report.skipped["trace"] = "no time was left: raise --minutes"
        return
    try:
        report.traces |= trace_cases.replay(here)
    except (*FAILURES, TraceInvalid) as error:
        report.skipped["trace"] = f"failed: {error}"
        here.progress(f"trace failed: {error}")


def _run_soak(report: Report, here: Ground) -> None:
    """It takes the time that it was given, besides ``--minutes``."""
    try:
        here.memory[SOAK] = soak.soak(here)
    except FAILURES as error:
        report.skipped[SOAK] = f"failed: {error}"
        here.progress(f"soak failed: {error}")


def line_of(measured: Measured) -> str:
    """What was just measured, for progress."""
    size = f" {measured.size_bytes // 1024} KiB" if measured.size_bytes else ""
    against = measured.to_json()["ratios"][measured.limit.name]
    return f"{measured.name}{size} x {measured.batch}: {against:.2f} of {measured.limit.name}"


def machine(data: Path | None) -> dict[str, Any]:
    """What the figures depend on."""
    models = [line.split(":", 1)[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
    memory = next((int(line.split()[1]) * 1024 for line in _lines("/proc/meminfo") if line.startswith("MemTotal")), 0)
    congestion = next(iter(_lines("/proc/sys/net/ipv4/tcp_congestion_control")), "")
    return {
        "cpus": len(os.sched_getaffinity(0)),
        "cpu": models[0] if models else platform.machine(),
        "memory_bytes": memory,
        "kernel": platform.release(),
        "tcp_default": congestion,
        "file_system": _file_system(data or Path(tempfile.gettempdir())),
        "load_average_before": os.getloadavg(),
    }


def _file_system(path: Path) -> str:
    """Type of the file system that a path lies on."""
    best, kind = "", "unknown"
    for line in _lines("/proc/mounts"):
        _, mount, found = line.split()[:3]
        if path.absolute().is_relative_to(mount) and len(mount) >= len(best):
            best, kind = mount, found
    return kind


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


def versions() -> dict[str, str]:
    found = {"python": sys.version.split()[0]}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "source"
    return found
