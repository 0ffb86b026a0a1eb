"""Coverage-guided fuzzing of one target, or of ``all`` by turns, with atheris.

    python -m tests.fuzz.explore TARGET [--runs N] [--seconds S] [--keep]

Prints libFuzzer's progress; a finding ends it with exit code 77 and the input in hex. ``--keep`` rewrites the target's
corpus in the tree with the fewest inputs that reach every line that any input reached.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).parents[2]
CORPUS_BYTES_MAX = 6 * 1024
"""Of one target, so that the tree stays small."""
RSS_MIB_MAX = 1024
FOUND = 77


def fuzz(name: str, folder: Path, runs: int, seconds: int) -> None:
    """Never returns: libFuzzer ends the process."""
    import atheris

    with atheris.instrument_imports(include=["kvstore"]):
        from tests.fuzz.targets import ALL, TARGETS, inputs_of
    target = ALL if name == "all" else TARGETS[name]
    for at, data in enumerate(target.seeds() if name == "all" else inputs_of(name)):
        (folder / f"seed-{at}").write_bytes(data)

    def once(data: bytes) -> None:
        try:
            target.run(data)
        except BaseException:
            print(f"finding in {name}: {data.hex()}", file=sys.stderr, flush=True)
            raise

    options = [
        f"-runs={runs}",
        f"-max_total_time={seconds}",
        f"-max_len={target.input_bytes_max}",
        f"-rss_limit_mb={RSS_MIB_MAX}",
        f"-error_exitcode={FOUND}",
        f"-artifact_prefix={folder}/finding-",
        "-timeout=10",
        "-seed=1",
        "-print_final_stats=1",
    ]
    atheris.Setup([sys.argv[0], *options, str(folder)], once)
    atheris.Fuzz()


def lines_of(name: str, data: bytes) -> frozenset[tuple[str, int]]:
    """Lines of the store that an input reaches."""
    from tests.fuzz.targets import TARGETS

    reached: set[tuple[str, int]] = set()
    inside = str(ROOT / "kvstore")

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.startswith(inside):
            return None
        reached.add((frame.f_code.co_filename, frame.f_lineno))
        return trace

    sys.settrace(trace)
    try:
        TARGETS[name].run(data)
    finally:
        sys.settrace(None)
    return frozenset(reached)


def smallest_cover(name: str, seeds: Iterable[bytes], found: Iterable[bytes]) -> list[bytes]:
    """Short inputs, each of which reaches a line that neither a seed nor one before it reaches."""
    covered: set[tuple[str, int]] = set()
    for data in seeds:
        covered |= lines_of(name, data)
    kept: list[bytes] = []
    for data in sorted(found, key=lambda data: (len(data), data)):
        fresh = lines_of(name, data) - covered
        if fresh and sum(map(len, kept)) + len(data) <= CORPUS_BYTES_MAX // 2:
            covered |= fresh
            kept.append(data)
    return kept


def keep(name: str, folder: Path) -> None:
    from tests.fuzz.targets import CORPUS, TARGETS, inputs_of

    seeds = TARGETS[name].seeds()
    found = {path.read_bytes() for path in folder.iterdir() if not path.name.startswith("finding-")}
    kept = smallest_cover(name, seeds, found | set(inputs_of(name)[len(seeds) :]))
    CORPUS.mkdir(exist_ok=True)
    (CORPUS / f"{name}.txt").write_text("".join(f"{data.hex()}\n" for data in kept))
    print(f"kept {len(kept)} of {len(found)} inputs, {sum(map(len, kept))} bytes")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.explore", description="Fuzz one target.")
    parser.add_argument("target")
    parser.add_argument("--runs", type=int, default=-1, help="Inputs to try; -1: until the time is up.")
    parser.add_argument("--seconds", type=int, default=300)
    parser.add_argument("--keep", action="store_true", help="Keep what reaches new lines.")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.folder is not None:
        fuzz(given.target, given.folder, given.runs, given.seconds)
    with tempfile.TemporaryDirectory() as folder:
        arguments = [given.target, "--runs", str(given.runs), "--seconds", str(given.seconds), "--folder", folder]
        done = subprocess.run(
            [sys.executable, "-m", "tests.fuzz.explore", *arguments],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            timeout=given.seconds + 60,
        )
        if given.keep and given.target != "all" and done.returncode == 0:
            keep(given.target, Path(folder))
        return done.returncode


if __name__ == "__main__":
    sys.exit(main())
