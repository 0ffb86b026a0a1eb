"""Explain: from access records and sightings to the cause, and to the field in which another space differs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvstore.explain import CAUSES, Explanation, explain, read_access
from kvstore.explain_cli import records_of, reused_tokens
from kvstore.keys import encode_space, space_id
from kvstore.store import Presence, Sighting
from tests.support.spaces import BLOCK_TOKENS, a_chain, a_space

SPACE = a_space()
SPACE_ID = space_id(SPACE)
NAME = a_chain(SPACE_ID, 6).names[5]


def a_record(presence: str | None = "never", reason: str | None = None, **changes: Any) -> dict[str, Any]:
    miss = {
        "index": NAME.index,
        "key": NAME.key.hex(),
        "parent": NAME.parent.hex(),
        "route": NAME.route.hex(),
        "token_digest": NAME.token_digest.hex(),
        "presence": presence,
    }
    return {
        "request_id": "req-1",
        "time_s": 1_800_000_000.0,
        "role": "prefill",
        "space": encode_space(SPACE).hex(),
        "space_id": SPACE_ID.hex(),
        "prompt_tokens": 40,
        "block_tokens": BLOCK_TOKENS,
        "hit_tokens": 20,
        "way": "blocks",
        "reason": reason or presence or "end",
        "first_miss": miss if presence else None,
        **changes,
    }


def told(record: dict[str, Any], sighting: Sighting | None = None, spaces: Any = None) -> Explanation:
    return explain(read_access(record), sighting, spaces or {})


@pytest.mark.parametrize("reason", ["never", "expired", "evicted", "quarantined", "purged", "unreachable"])
def test_each_presence_is_its_own_cause(reason: str) -> None:
    told_cause = told(a_record(reason)).cause
    assert told_cause == {"never": "never_stored"}.get(reason, reason)
    assert told_cause in CAUSES


def test_a_block_whose_cipher_key_is_gone_is_told_from_one_that_was_deleted() -> None:
    """It is here, so nobody knows since when it cannot be read."""
    texts = [told(a_record("purged"), Sighting(Presence.PURGED, since_s, 0, ())).sentence for since_s in (0, 5)]
    assert ["cipher key" in text for text in texts] == [True, False]


@pytest.mark.parametrize(
    ("record", "cause"),
    [
        (a_record("never", "off"), "off"),
        (a_record(None, "parameters"), "parameters"),
        (a_record("present", "declined"), "declined"),
        (a_record("present", "deadline"), "deadline"),
        (a_record("present", "corrupt"), "not_loaded"),
        (a_record(None, "end"), "none"),
    ],
)
def test_what_the_worker_decided_goes_first(record: dict[str, Any], cause: str) -> None:
    assert told(record).cause == cause


@pytest.mark.parametrize(
    ("way", "prompt", "hit", "sentence"),
    [
        ("cold", 3, 0, "a prompt of 4 tokens or fewer is reused from a state only, and none was found"),
        ("blocks", 11, 8, "every block was reused; the last 3 tokens come from a state only, and none was found"),
        ("blocks", 9, 8, "everything that can be reused was reused"),
        ("state", 11, 9, "everything that can be reused was reused"),
    ],
)
def test_a_tail_without_a_state_is_no_missed_block(way: str, prompt: int, hit: int, sentence: str) -> None:
    """Where every block was there, a lower count than the prompt's is explained all the same."""
    record = a_record(None, "end") | {"way": way, "prompt_tokens": prompt, "hit_tokens": hit}
    assert (told(record).cause, told(record).sentence) == ("none", sentence)


@pytest.mark.parametrize(
    ("engine", "hit", "sentence"),
    [
        (0, 36, "every whole block was reused; the last 3 tokens are less than a block of 4"),
        (20, 16, "every whole block was reused; the last 3 tokens are less than a block of 4"),
        (0, 35, "the last token is always computed, and with it the last block, of 4 tokens"),
        (38, 0, "everything that can be reused was reused"),
        (0, 30, "every block that was looked up was reused; the last 9 tokens are more than one look-up asks for"),
    ],
)
def test_vllm_reuses_whole_blocks_and_has_no_states(engine: int, hit: int, sentence: str) -> None:
    """What it left to compute is told so, whichever cache gave the rest."""
    changes = {"role": "vllm", "prompt_tokens": 39, "hit_tokens": hit, "engine_tokens": engine}
    explanation = told(a_record(None, "end") | changes)
    assert (explanation.cause, explanation.sentence) == ("none", sentence)
    assert (explanation.to_json()["hit_tokens"], explanation.to_json()["engine_tokens"]) == (hit, engine)


def test_both_caches_are_told_apart() -> None:
    """A hit of vLLM's own cache is not the store's; of a worker, there is one cache only."""
    assert reused_tokens(told(a_record())) == "20 of 40 prompt tokens reused"
    both = told(a_record() | {"engine_tokens": 8, "hit_tokens": 0})
    assert reused_tokens(both) == "8 of 40 prompt tokens reused: 0 from the store, 8 from the engine's own cache"


def test_parameters_that_are_not_understood_are_shown_safely() -> None:
    """They are a client's: what could steer a terminal is not printed."""
    sentence = told(a_record(None, "parameters") | {"parameters": "'reprise_class' was \x1b[2J"}).sentence
    assert "'reprise_class' was" in sentence
    assert "\x1b" not in sentence


def test_the_block_and_its_first_token_are_named() -> None:
    explanation = told(a_record("evicted"))
    assert (explanation.block, explanation.first_token) == (5, 20)
    assert explanation.sentence.startswith("block 5 (from token 20): ")
    assert json.loads(json.dumps(explanation.to_json()))["cause"] == "evicted"


def test_the_time_of_removal_is_told_where_it_is_known() -> None:
    sighting = Sighting(Presence.EXPIRED, 1_800_000_000, 0, ())
    assert "2027-01-15 08:00:00 UTC" in told(a_record("expired"), sighting).sentence
    assert "UTC" not in told(a_record("expired"), Sighting(Presence.PRESENT, 5, 0, ())).sentence


def test_another_space_is_named_with_the_fields_that_differ() -> None:
    """Of several spaces with the same tokens the nearest comes first; one that no node knows comes last."""
    near, far = a_space(weights_digest=b"new weights"), a_space(weights_digest=b"x", kv_dtype="fp8", layout="fused")
    unknown = space_id(a_space(epoch=5))
    spaces = {space_id(near): near, space_id(far): far, SPACE_ID: SPACE}
    sighting = Sighting(Presence.NEVER, 0, 0, (space_id(far), unknown, space_id(near), SPACE_ID))
    explanation = told(a_record(), sighting, spaces)
    assert explanation.cause == "another_space"
    assert "weights_digest" in explanation.sentence
    assert [other.fields for other in explanation.other_spaces] == [
        ("weights_digest",),
        ("weights_digest", "kv_dtype", "layout"),
        (),
    ]


def test_what_was_stored_later_was_not_stored_then() -> None:
    later = Sighting(Presence.PRESENT, 1_800_000_100, 0, ())
    assert "not stored yet" in told(a_record(), later).sentence
    assert "now evicted" in told(a_record(), replace(later, presence=Presence.EVICTED)).sentence
    assert "never stored" in told(a_record(), replace(later, presence=Presence.NEVER)).sentence


@pytest.mark.parametrize(
    "changes",
    [
        {"space": "zz"},
        {"space": None},
        {"space_id": "00"},
        {"first_miss": {}},
        {"first_miss": 3},
        {"prompt_tokens": "many"},
        {"time_s": None},
        {"first_miss": a_record()["first_miss"] | {"presence": "gone"}},
        {"first_miss": a_record()["first_miss"] | {"key": "00"}},
    ],
)
def test_malformed_records_are_value_errors(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r".+"):
        read_access(a_record() | changes)


def test_records_are_found_in_both_log_files_past_damage(tmp_path: Path) -> None:
    """The rotated file comes first; broken, foreign and overlong lines are passed over; ids match whole."""
    log = tmp_path / "access.jsonl"
    old, new, longer = a_record(role="old"), a_record(role="new"), a_record(request_id="req-11")
    (tmp_path / "access.jsonl.1").write_text(json.dumps(old) + "\n")
    lines = ['{"request_id": "req-1", tru', json.dumps(longer), '"req-1"', "x" * 400_000, json.dumps(new), "\xff\xfe"]
    log.write_bytes("\n".join(lines).encode("latin-1"))
    assert [row["role"] for row in records_of(log, "req-1")] == ["old", "new"]
    assert list(records_of(log, "re")) == []
    with pytest.raises(ValueError, match="cannot read"):
        records_of(tmp_path / "absent", "req-1")
