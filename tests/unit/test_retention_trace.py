"""Traces are read as written, in order of time, and the first line that cannot be used is named."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from retention.errors import TraceInvalid
from retention.trace import Prompt, read_trace, runs_of

GOOD = '{"timestamp": 1, "hash_ids": [1]}'


def write(path: Path, *rows: object) -> Path:
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    text = "".join(line + "\n" for line in lines).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path


def test_runs_join_consecutive_numbers() -> None:
    assert runs_of([1, 2, 3, 7, 8, 8, 5]) == ((1, 3), (7, 2), (8, 1), (5, 1))
    assert runs_of([]) == ()


def test_requests_with_global_numbers(tmp_path: Path) -> None:
    """Milliseconds become seconds, requests come in order of time, blank lines are nothing."""
    rows = [
        {"timestamp": 2000, "input_length": 1000, "output_length": 3, "hash_ids": [4, 5]},
        "",
        {"timestamp": 500, "input_length": 1024, "hash_ids": [4, 9]},
    ]
    trace = read_trace(write(tmp_path / "t.jsonl", *rows), seed=1)
    assert trace.block_tokens == 512
    assert trace.prompts == (Prompt(0.5, 0, 1024, ((4, 1), (9, 1))), Prompt(2.0, 0, 1000, ((4, 2),)))
    assert trace.conversations == 0


def test_conversations_begin_by_the_seed_and_keep_their_own_numbers(tmp_path: Path) -> None:
    """A sub-agent's time counts from its last begin; the same seed gives the same times, gzipped or not."""
    turns = [
        {"k": "n", "t": 1.5, "in": 130, "runs": [[0, 2]]},
        {"k": "sub_begin", "t": 5.0},
        {"k": "sub", "t": 1.0, "in": 64, "runs": [[7, 1], [9, 0]]},
    ]
    rows = [{"block_size": 64, "requests": turns}, {"block_size": 64, "requests": turns}]
    trace = read_trace(write(tmp_path / "t.jsonl.gz", *rows), seed=3)
    assert {prompt.scope for prompt in trace.prompts} == {1, 2}
    assert trace.conversations == 2
    first, sub = [prompt for prompt in trace.prompts if prompt.scope == 1]
    assert sub.at_s - first.at_s == pytest.approx(4.5)
    assert (first.runs, sub.runs, first.tokens) == (((0, 2),), ((7, 1),), 130)
    again = write(tmp_path / "t.jsonl", *rows)
    assert read_trace(again, seed=3).prompts == trace.prompts
    assert read_trace(again, seed=4).prompts != trace.prompts


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("{", "line 2"),
        ("[]", "a JSON object, not list"),
        ("{}", "none of the known formats"),
        ('{"timestamp": 1, "hash_ids": [-1]}', "a block's number is '-1'"),
        ('{"timestamp": 1, "hash_ids": [1.5]}', "a block's number"),
        ('{"timestamp": NaN, "hash_ids": [1]}', "time 'nan'"),
        ('{"timestamp": 1e400, "hash_ids": [1]}', "time 'inf'"),
        ('{"timestamp": -1, "hash_ids": [1]}', "time '-1'"),
        ('{"hash_ids": [1]}', "no field 'timestamp'"),
        ('{"timestamp": 1, "input_length": 512, "hash_ids": [1, 2]}', "512 tokens do not fill 2 blocks"),
        ('{"timestamp": 1, "input_length": -4, "hash_ids": []}', "the prompt's length"),
        ('{"block_size": 512, "requests": [{"t": "x", "runs": []}]}', "time 'x'"),
        ('{"block_size": 512, "requests": [{"t": 1, "runs": [7]}]}', "another form"),
        ('{"block_size": 512, "requests": [7]}', "not a list of objects"),
        ('{"block_size": 0, "requests": []}', "the length of a block"),
        ('{"block_size": 64, "requests": []}', "blocks of 64 tokens here, of 512 before"),
        ('{"block_size": 512, "requests": [{"t": 0, "runs": [[1, 99999999]]}]}', "the count of a run"),
        ('{"block_size": 512, "requests": [{"t": 0, "runs": [[1, 1048576], [1, 1]]}]}', "more than 1,048,576 blocks"),
        ("[" * 100_000, "line 2"),
    ],
)
def test_line_that_is_no_request_is_named(tmp_path: Path, row: str, said: str) -> None:
    """Whatever is wrong with a line, the message has its number and what is wrong."""
    with pytest.raises(TraceInvalid, match=r"t\.jsonl, line 2: ") as caught:
        read_trace(write(tmp_path / "t.jsonl", GOOD, row), seed=1)
    assert said in str(caught.value)


def test_files_that_are_no_traces(tmp_path: Path) -> None:
    """An empty file, a torn gzip file, and a missing one."""
    with pytest.raises(TraceInvalid, match="no requests"):
        read_trace(write(tmp_path / "empty.jsonl"), seed=1)
    whole = write(tmp_path / "whole.gz", *[GOOD] * 1000)
    torn = tmp_path / "torn.gz"
    torn.write_bytes(whole.read_bytes()[:-12])
    with pytest.raises(TraceInvalid, match="not a whole gzip file"):
        read_trace(torn, seed=1)
    with pytest.raises(FileNotFoundError):
        read_trace(tmp_path / "none", seed=1)
    with pytest.raises(ValueError, match="arrivals"):
        read_trace(whole, seed=1, arrivals_per_s=0.0)


def log_line(blocks: str, after: str = "", **fields: object) -> dict[str, object]:
    tokens = 64 * (len(blocks) // 16 + 4 * bool(after))
    given = {"v": 1, "time_s": 7.5, "class": "chat", "block_tokens": 64, "prompt_tokens": tokens}
    return {**given, "after": after, "blocks": blocks, **fields}


A, B, C = "a" * 16, "b" * 16, "c" * 16


def test_access_log_lines_continue_earlier_ones(tmp_path: Path) -> None:
    """``after`` stands for the whole prefix that an earlier line told of."""
    path = write(tmp_path / "t.jsonl", log_line(A + B), log_line(C, after=A, time_s=8, prompt_tokens=130))
    one, two = read_trace(path, seed=1).prompts
    assert (one.class_name, one.at_s, one.runs) == ("chat", 7.5, ((0, 2),))
    assert (two.runs, two.tokens) == (((0, 1), (2, 1)), 130)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (log_line(C, after=B), "continues a prefix " + B),
        (log_line(A[:-1]), "16 hex digits"),
        (log_line(C + A), "two different prefixes"),
        (log_line(C, v=2), "version 2"),
        (log_line(C, time_s="now"), "time 'now'"),
        ({**log_line(C), "blocks": 5}, "blocks is not a string"),
    ],
)
def test_access_log_lines_that_cannot_be_used(tmp_path: Path, row: dict[str, object], said: str) -> None:
    """What the log has not told of is not made up."""
    with pytest.raises(TraceInvalid, match="line 2: ") as caught:
        read_trace(write(tmp_path / "t.jsonl", log_line(A), row), seed=1)
    assert said in str(caught.value)
