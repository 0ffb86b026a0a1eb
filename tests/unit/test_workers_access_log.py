"""The access log: bounded on disk and in memory, readable after a crash, silent about tokens."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from workers import access_log as module
from workers.access_log import AccessLog, AccessRecord, MissRecord

RECORD = AccessRecord(
    request_id="r0",
    time_s=1.0,
    role="prefill",
    outcome="finished",
    space="00",
    space_id="11",
    cache=True,
    prompt_tokens=100,
    generated_tokens=1,
    block_tokens=16,
    hit_tokens=64,
    miss_tokens=36,
    replayed_tokens=0,
    way="blocks",
    exact=True,
    reason="evicted",
    first_miss=MissRecord(4, "aa", "bb", "cc", "dd", "evicted"),
    queued_s=0.0,
    load_s=0.1,
    compute_s=0.2,
    published_blocks=2,
)


def test_records_are_found_at_once_and_after_a_restart(tmp_path: Path) -> None:
    """Memory answers before the line is written; the next process reads the file, and skips a line torn by a crash."""
    path = tmp_path / "log" / "access.jsonl"
    log = AccessLog.open(path)
    log.append(RECORD)
    found = log.find("r0")
    assert found is not None
    assert found["first_miss"]["presence"] == "evicted"
    assert log.find("r1") is None
    log.close()
    with path.open("ab") as file:
        file.write(b'{"request_id": "torn\n[]\n7\n')
    again = AccessLog.open(path)
    assert again.find("r0") == found
    again.close()


def test_prefill_is_preferred_to_decode_of_the_same_request(tmp_path: Path) -> None:
    """Explain is about the prompt."""
    log = AccessLog.open(tmp_path / "a")
    log.append(replace(RECORD, role="decode"))
    assert log.find("r0")["role"] == "decode"  # type: ignore[index]
    log.append(RECORD)
    log.append(replace(RECORD, role="decode"))
    assert log.find("r0")["role"] == "prefill"  # type: ignore[index]
    log.close()


def test_files_and_memory_never_exceed_their_bounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file rotates to one predecessor; memory forgets the oldest record."""
    monkeypatch.setattr(module, "RECORDS_MAX", 50)
    path = tmp_path / "access.jsonl"
    log = AccessLog.open(path, file_bytes_max=4096)
    for number in range(200):
        log.append(replace(RECORD, request_id=f"r{number}"))
    log.close()
    files = sorted(item.name for item in tmp_path.iterdir())
    assert files == ["access.jsonl", "access.jsonl.1"]
    assert all(item.stat().st_size <= 4096 for item in tmp_path.iterdir())
    assert log.find("r199") is not None
    assert log.find("r149") is None
    assert log.dropped == 0
    again = AccessLog.open(path, file_bytes_max=4096)
    assert again.find("r199") is not None
    again.close()


def test_failing_disk_costs_lines_not_requests(tmp_path: Path) -> None:
    """The path turns into a directory: appends go on, the loss is counted."""
    path = tmp_path / "access.jsonl"
    log = AccessLog.open(path)
    path.mkdir()
    log.append(RECORD)
    log.close()
    assert log.dropped == 1
    assert log.find("r0") is not None
