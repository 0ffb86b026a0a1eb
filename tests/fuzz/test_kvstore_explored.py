"""Decoders and scanners under coverage-guided fuzzing: a bounded run of every target, and what longer runs found."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fuzz.targets import ALL, CORPUS, TARGETS, inputs_of

ROOT = Path(__file__).parents[2]
RUNS = 20_000
SECONDS_MAX = 8
CORPUS_BYTES_MAX = 64 * 1024


@pytest.mark.parametrize("name", TARGETS)
def test_what_exploring_found_is_understood(name: str) -> None:
    """Every kept input, each of its prefixes' ends, and the empty input: a value or a declared error."""
    for data in [b"", *inputs_of(name)]:
        for cut in {len(data), len(data) // 2, max(0, len(data) - 1)}:
            TARGETS[name].run(data[:cut])


def test_the_corpus_is_small_and_of_known_targets() -> None:
    files = list(CORPUS.iterdir())
    assert {path.stem for path in files} <= TARGETS.keys()
    assert sum(path.stat().st_size for path in files) < CORPUS_BYTES_MAX


@pytest.mark.skipif(
    importlib.util.find_spec("atheris") is None, reason="atheris has no wheel for this Python: the kept inputs ran"
)
def test_exploring_a_little_finds_nothing() -> None:
    """A bounded run of atheris over all targets, from the kept inputs; ``make fuzz`` is a longer one."""
    command = [sys.executable, "-m", "tests.fuzz.explore", "all", "--runs", str(RUNS), "--seconds", str(SECONDS_MAX)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-4000:]
    executed = re.search(r"number_of_executed_units: (\d+)", done.stderr)
    assert executed is not None
    assert int(executed.group(1)) > len(ALL.seeds()), "nothing was tried beyond the kept inputs"
