"""What the gateway writes of its traffic can be replayed, and tells nothing else."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from gateway.access_log import QUEUE_MAX, AccessLog, Asked
from retention.trace import Prompt, read_trace
from retention.workload import make_workload

BLOCK_TOKENS = 4


def asked(tokens: Sequence[int], *, tenant: str | None = "acme", space: str = "aa", at_s: float = 5.0) -> Asked:
    return Asked(at_s, "chat", tenant, space, BLOCK_TOKENS, tokens, hit_tokens=0)


def write(path: Path, requests: Sequence[Asked], **settings: int) -> None:
    log = AccessLog.open(path, **settings)
    for request in requests:
        log.append(request)
    log.close()
    assert log.dropped == 0


def made_up(seed: int, count: int) -> list[Asked]:
    """Conversations that grow and branch, of several tenants and spaces."""
    chance = random.Random(seed)
    said: dict[int, list[int]] = {number: [] for number in range(6)}
    requests = []
    for at in range(count):
        number = chance.randrange(6)
        kept = said[number][: chance.randrange(len(said[number]) + 1)] if chance.random() < 0.3 else said[number]
        said[number] = [*kept, *(chance.randrange(1000) for _ in range(chance.randrange(20)))]
        tenant, space = (None, "aa") if number < 2 else (f"t{number % 2}", "ab"[number % 2])
        requests.append(asked(said[number], tenant=tenant, space=space, at_s=float(at)))
    return requests


def shares(requests: Sequence[Asked]) -> list[int]:
    """Blocks of each request whose prefix an earlier one of the same tenant and space had."""
    seen: set[tuple[object, ...]] = set()
    found = []
    for request in requests:
        blocks = len(request.tokens) // BLOCK_TOKENS
        names = [
            (request.tenant, request.space_id, *request.tokens[: BLOCK_TOKENS * at]) for at in range(1, blocks + 1)
        ]
        found.append(sum(name in seen for name in names))
        seen.update(names)
    return found


def shares_in(prompts: Sequence[Prompt]) -> list[int]:
    seen: set[int] = set()
    found = []
    for request in make_workload([(prompt, 1) for prompt in prompts], BLOCK_TOKENS).requests:
        blocks = request.blocks().tolist()
        found.append(sum(block in seen for block in blocks))
        seen.update(blocks)
    return found


@pytest.mark.parametrize("seed", [1, 2])
def test_a_replay_shares_what_the_requests_shared(tmp_path: Path, seed: int) -> None:
    """Read back, the log has each request's time, length and class, and the same shared prefixes."""
    requests = made_up(seed, 80)
    write(tmp_path / "access.jsonl", requests)
    prompts = read_trace(tmp_path / "access.jsonl", seed=1).prompts
    assert [(p.at_s, p.tokens, p.class_name) for p in prompts] == [(r.time_s, len(r.tokens), "chat") for r in requests]
    assert shares_in(prompts) == shares(requests)
    assert sum(shares(requests)) > 100


def test_a_conversation_costs_what_is_new(tmp_path: Path) -> None:
    """A line tells only of blocks that no line before it told of."""
    path = tmp_path / "access.jsonl"
    write(path, [asked(range(4 * turn)) for turn in range(1, 200)])
    assert path.stat().st_size < 199 * 250
    assert [len(prompt.runs) for prompt in read_trace(path, seed=1).prompts] == [1] * 199


def test_it_holds_no_tokens_and_no_names(tmp_path: Path) -> None:
    """Digests differ from process to process, so that nobody who reads them can try prompts; tenants are digests."""
    for name in ("one", "two"):
        write(tmp_path / name, [asked([7, 7, 7, 7], tenant="acme-corp", space="feed")])
    one, two = ((tmp_path / name).read_text() for name in ("one", "two"))
    for row in (json.loads(one), json.loads(two)):
        assert set(row) == {
            "v", "time_s", "class", "tenant", "space", "block_tokens", "prompt_tokens", "hit_tokens", "after", "blocks",
        }  # fmt: skip
        assert "acme" not in str(row)
        assert "feed" not in row["space"] + row["tenant"] or len(row["space"]) == 16
    assert json.loads(one)["blocks"] != json.loads(two)["blocks"]
    assert json.loads(one)["tenant"] != json.loads(two)["tenant"]


def test_two_files_of_bounded_size_each_readable_by_itself(tmp_path: Path) -> None:
    """When a file is full the next begins, and tells of everything anew."""
    path = tmp_path / "access.jsonl"
    write(path, made_up(3, 250), file_bytes_max=20_000)
    older = path.with_name("access.jsonl.1")
    for file in (path, older):
        assert file.stat().st_size <= 20_000 + 10_000
        assert read_trace(file, seed=1).prompts


def test_a_restart_goes_on_behind_the_last_whole_line(tmp_path: Path) -> None:
    """What a kill left of a line is cut off; a new process continues nothing that it did not write."""
    path = tmp_path / "access.jsonl"
    write(path, [asked(range(40))])
    with path.open("ab") as file:
        file.write(b'{"v":1,"time_s":5')
    write(path, [asked(range(44))])
    assert [prompt.tokens for prompt in read_trace(path, seed=1).prompts] == [40, 44]


def test_a_full_queue_drops_lines_and_counts_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request waits neither for the disk nor for the hashing."""
    gate = threading.Event()
    write_one = AccessLog._write
    monkeypatch.setattr(AccessLog, "_write", lambda log, item: (gate.wait(30), write_one(log, item))[1])
    log = AccessLog.open(tmp_path / "access.jsonl")
    for _ in range(QUEUE_MAX + 40):
        log.append(asked(range(8)))
    gate.set()
    log.close()
    lines = (tmp_path / "access.jsonl").read_text().splitlines()
    assert len(lines) + log.dropped == QUEUE_MAX + 40
    assert log.dropped >= 39
