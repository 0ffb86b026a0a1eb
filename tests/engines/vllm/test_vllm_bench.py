"""`reprise bench attach` from end to end: every way, a restart, a replay, the tiers; and not one differing token."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.support.checkpoints import make_checkpoint
from tests.support.stack import environment, reprise_command
from tests.support.vllm_server import ROOT

BENCH_S_MAX = 480.0
WAYS = {"no connector", "ExampleConnector", "reprise"}
TIERS = {"reprise", "fs"}


def test_a_quick_run_measures_every_part(tmp_path: Path) -> None:
    """Nothing is left out, a restart hits all whole blocks, and no answer differs from vLLM's own."""
    model = make_checkpoint("llama", tmp_path / "model", head_dim=32)
    command = [*reprise_command(), "bench", "attach", "--quick", "--json"]
    command += ["--model", str(model), "--vllm-python", sys.executable]
    done = subprocess.run(
        command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=BENCH_S_MAX, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(done.stdout)
    assert report["skipped"] == {}
    assert {row["way"] for row in report["lengths"]} == {row["way"] for row in report["replay"]} == WAYS
    ours = [row for row in report["lengths"] if row["way"] == "reprise"]
    assert [(row["nominal"], row["hit"]) for row in ours] == [(256, 256), (512, 512)]
    assert {row["way"]: row["tokens"] for row in report["differing"]} == {"ExampleConnector": 0, "reprise": 0}
    assert set(report["tier"]) >= TIERS
