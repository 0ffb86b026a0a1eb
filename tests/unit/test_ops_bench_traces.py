"""Traces are read as written, in order of time; a replay finds what was stored before, and nothing else."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path

import pytest

from kvstore.limits import KIB
from ops.bench import trace_cases
from ops.bench.ground import Settings, ground, quick
from ops.bench.trace_cases import replay
from ops.bench.traces import Access, multi_turn, read
from retention.errors import TraceInvalid


def lines(path: Path, rows: list[object]) -> Path:
    text = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path


def test_global_block_numbers_share_a_scope(tmp_path: Path) -> None:
    """Requests with global numbers come in order of time and may share blocks."""
    rows: list[object] = [
        {"timestamp": 2000, "input_length": 1024, "hash_ids": [1, 3]},
        {"timestamp": 1000, "input_length": 1024, "hash_ids": [1, 2]},
    ]
    found = read(lines(tmp_path / "t.jsonl", rows), requests=10, seed=1)
    assert found == [Access(1.0, 0, (1, 2)), Access(2.0, 0, (1, 3))]


def test_conversations_have_scopes_of_their_own_and_interleave(tmp_path: Path) -> None:
    """Runs are expanded, markers are no requests, and a sub-agent's time counts from its beginning."""
    turns = [
        {"k": "n", "t": 0.0, "in": 130, "out": 1, "runs": [[0, 2]]},
        {"k": "sub_begin", "t": 5.0},
        {"k": "sub", "t": 1.0, "in": 64, "out": 1, "runs": [[7, 1]]},
        {"k": "n", "t": 500.0, "in": 200, "out": 1, "runs": [[0, 2], [9, 1]]},
    ]
    path = lines(tmp_path / "t.jsonl.gz", [{"id": "a", "requests": turns}, {"id": "b", "requests": turns}])
    found = read(path, requests=10, seed=1)
    one = [access for access in found if access.scope == 1]
    assert [access.blocks for access in one] == [(0, 1), (7,), (0, 1, 9)]
    assert one[1].at_s - one[0].at_s == pytest.approx(6.0)
    assert [access.at_s for access in found] == sorted(access.at_s for access in found)
    assert {access.scope for access in found[:4]} == {1, 2}
    assert read(path, requests=10, seed=1) == found
    assert read(path, requests=2, seed=1) == found[:2]


@pytest.mark.parametrize(
    "row",
    ["{", "[]", '{"timestamp": 1}', '{"timestamp": 1, "hash_ids": [-1]}', '{"requests": [{"t": "x", "runs": []}]}'],
)
def test_line_that_is_no_request_is_named(tmp_path: Path, row: str) -> None:
    """A damaged trace is refused with the line's number."""
    path = tmp_path / "t.jsonl"
    path.write_text('{"timestamp": 1, "hash_ids": [1]}\n' + row + "\n")
    with pytest.raises(TraceInvalid, match="line 2"):
        read(path, requests=10, seed=1)


def test_made_up_conversations_repeat_what_was_said() -> None:
    """Each request begins with the conversation's previous one."""
    said: dict[int, tuple[int, ...]] = {}
    for access in multi_turn(3, 4, 5, 2, seed=1):
        before = said.get(access.scope, tuple(range(5)))
        assert access.blocks[: len(before)] == before
        assert len(access.blocks) == len(before) + 2
        said[access.scope] = access.blocks
    assert [len(blocks) for blocks in said.values()] == [13, 13, 13]


def test_replay_hits_exactly_what_was_asked_before(tmp_path: Path) -> None:
    """In a store with room for everything, the hit rate is that of an unbounded cache, and nothing is stored twice."""
    accesses = multi_turn(*trace_cases.MULTI_TURN, trace_cases.SEED)
    seen: set[tuple[int, int]] = set()
    hits = asked = 0
    for access in accesses:
        places = [(access.scope, block) for block in access.blocks]
        hits += sum(place in seen for place in places)
        asked += len(places)
        seen.update(places)
    settings = replace(quick(Settings(sizes=(64 * KIB,), groups=("trace",))), trace_block_bytes=4 * KIB)
    with ground(settings, tmp_path, lambda line: None) as here:
        (figures,) = replay(here).values()
    assert figures["blocks_asked"] == asked
    assert figures["hit_rate"] == pytest.approx(hits / asked)
    assert figures["written_bytes"] == len(seen) * 4 * KIB
    assert figures["refused_blocks"] == 0
    assert figures["blocks_per_extent"] > 2
