"""The bench measures what it says: exact ways have no error, shorter replays have more, and bad options are told."""

from __future__ import annotations

import functools
import json
from itertools import pairwise

import pytest
import torch
from typer.testing import CliRunner

from ops.bench.cli import app
from ops.bench.replay import Report, _kl, run
from tests.support.checkpoints import checkpoint

TEXT = "Every tenth traveller carries a lamp; the others walk behind it and count their steps. " * 30


@functools.cache
def report(kind: str) -> Report:
    return run(str(checkpoint(kind)), text=TEXT, prompts=2, tokens=260, windows=(0, 1, 2), dtype="float64")


@pytest.mark.parametrize("kind", ["gemma3", "gptoss"])
def test_exact_ways_have_no_error_and_replays_come_nearer_with_windows(kind: str) -> None:
    """State: no difference at all; exact replay: rounding only; 0, 1, 2 windows: falling error, none at the bound."""
    rows = {row.way: row for row in report(kind).rows}
    assert rows["state"].first_logit_diff == rows["state"].kl_max == 0.0
    assert rows["state"].agree == rows["state"].text_agree == 1.0
    for way in ("exact replay (triangular)", "other chunking (noise floor)"):
        assert rows[way].kl_max < 1e-20
        assert rows[way].first_logit_diff < 1e-12
    bounded = [rows[way] for way in ("replay 0 (no windows)", "replay 1 W", "replay 2 W")]
    assert all(fewer.kl_mean > more.kl_mean for fewer, more in pairwise(bounded))
    for row in bounded:
        assert (row.kl_mean < 1e-20) is (row.replayed_tokens >= report(kind).exact_replay_tokens)
    assert bounded[0].text_agree < 1.0


def test_a_model_of_full_attention_needs_blocks_only() -> None:
    """No replay is listed, and the blocks alone are exact."""
    rows = {row.way: row for row in report("llama").rows}
    assert set(rows) == {"other chunking (noise floor)", "blocks (full attention)"}
    assert rows["blocks (full attention)"].kl_max == 0.0


def test_the_report_says_what_was_measured() -> None:
    """The prefix is rounded down to whole blocks; the sizes are the model's."""
    made = report("gptoss")
    assert (made.prefix_tokens, made.window, made.sliding_layers, made.exact_replay_tokens) == (256, 16, 2, 30)
    assert {row.way: row.replayed_tokens for row in made.rows}["replay 2 W"] == 32


def test_kl_is_the_textbook_one() -> None:
    """KL((1/2, 1/2) || (1/4, 3/4)) = ln(2/sqrt 3); equal rows give zero."""
    one, other = torch.log(torch.tensor([[0.5, 0.5]])), torch.log(torch.tensor([[0.25, 0.75]]))
    assert float(_kl(one, other)) == pytest.approx(0.1438410362)
    assert float(_kl(one, one)) == 0.0


def test_json_is_one_object_with_every_way() -> None:
    """``--json`` prints nothing else on stdout; without it there is a table."""
    options = ["replay", "--model", str(checkpoint("gptoss")), "--prompts", "1", "--tokens", "128", "--windows", "1"]
    done = CliRunner().invoke(app, [*options, "--json"])
    assert done.exit_code == 0
    data = json.loads(done.stdout)
    assert data["prefix_tokens"] == 128
    assert len(data["rows"]) == 4
    assert "exact replay (triangular)" in CliRunner().invoke(app, options).stdout


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model", "nowhere"], "neither a demo model"),
        (["--windows", "x"], "invalid literal"),
        (["--windows", "65"], "0..64"),
        (["--tokens", "100000"], "for this model"),
        (["--dtype", "int4"], "int4"),
        (["--text", "/nonexistent/file"], "No such file"),
    ],
)
def test_bad_options_end_with_an_error_line(options: list[str], message: str) -> None:
    """Exit status 1 and one line that says what is wrong."""
    done = CliRunner().invoke(app, ["replay", "--model", str(checkpoint("gptoss")), *options])
    assert done.exit_code == 1
    assert message in done.stderr


def test_the_kernel_bench_says_that_there_is_no_gpu() -> None:
    """On a CPU nothing is measured, and that is not an error."""
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    assert "no GPU here" in CliRunner().invoke(app, ["kernels"]).stdout
    assert json.loads(CliRunner().invoke(app, ["kernels", "--json"]).stdout) == {"gpu": False, "rows": []}
