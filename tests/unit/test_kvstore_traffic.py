"""Traffic classes: stable bytes, and rules that cannot be wrong."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from kvstore.traffic import (
    AGENT,
    BUILT_IN_NAMES,
    CHAT,
    FLOOR_BYTES_MAX,
    KEEP_FOR_S_MAX,
    LATER,
    PRIORITY_MAX,
    ClassRule,
    ClassRules,
    TrafficClass,
)

DAY_S = 86_400
BATCH = TrafficClass(16)
AGENT_RULE = ClassRule(AGENT, "agent", 3 * DAY_S)
CHAT_RULE = ClassRule(CHAT, "chat", 7 * DAY_S)
BATCH_RULE = ClassRule(BATCH, "batch", DAY_S, priority=5, floor_bytes=10, codec="zstd")
RULES = ClassRules((AGENT_RULE, CHAT_RULE, BATCH_RULE))


def test_bytes_of_built_in_classes_never_change() -> None:
    """The bytes are in every record on disk."""
    assert dict(BUILT_IN_NAMES) == {"agent": 1, "chat": 2}


def test_a_deadline_fits_32_bits_for_decades() -> None:
    """The longest promise, made at the end of 2055, still ends within a u32 of seconds."""
    end_of_2055_s = 2_713_910_400
    assert end_of_2055_s + KEEP_FOR_S_MAX < 2**32


BAD_RULES: dict[str, dict[str, Any]] = {
    "byte 0": {"class_byte": 0},
    "byte beyond one byte": {"class_byte": 256},
    "byte kept for built-in classes": {"class_byte": 3},
    "byte of another built-in class": {"class_byte": 2, "name": "agent"},
    "foreign name on a built-in byte": {"class_byte": 1},
    "byte as text": {"class_byte": "16"},
    "empty name": {"name": ""},
    "capital": {"name": "Batch"},
    "long name": {"name": "b" * 32},
    "line end in the name": {"name": "batch\n"},
    "name is no text": {"name": 5},
    "no time": {"keep_for_s": 0},
    "negative time": {"keep_for_s": -1},
    "too long": {"keep_for_s": KEEP_FOR_S_MAX + 1},
    "fraction of a second": {"keep_for_s": 1.5},
    "truth for a number": {"keep_for_s": True},
    "unknown keep": {"keep": "forever"},
    "maximum age below a minute": {"keep_for_s": 1, "max_age_s": 59},
    "maximum age beyond fifty years": {"max_age_s": KEEP_FOR_S_MAX + 1},
    "negative ceiling": {"ceiling_bytes": -1},
    "ceiling beyond any disk": {"ceiling_bytes": FLOOR_BYTES_MAX + 1},
    "ceiling below the floor": {"floor_bytes": 2, "ceiling_bytes": 1},
    "share below the floor's": {"floor_share": 2, "ceiling_share": 1},
    "share beyond all": {"floor_share": 10_001},
    "floor in bytes and as a share": {"floor_bytes": 1, "floor_share": 1},
    "ceiling in bytes and as a share": {"ceiling_bytes": 1, "ceiling_share": 1},
    "negative wait for compression": {"compress_after_s": -1},
    "compressed at once and later": {"codec": "zstd", "compress_after_s": 60},
    "compressed though nothing is written again": {"keep_for_s": 60, "max_age_s": 3600, "compress_after_s": 60},
    "negative maximum age": {"max_age_s": -1},
    "kept longer than it may age": {"keep_for_s": 3600, "max_age_s": 3600 + 200},
    "negative priority": {"priority": -1},
    "huge priority": {"priority": PRIORITY_MAX + 1},
    "negative floor": {"floor_bytes": -1},
    "huge floor": {"floor_bytes": FLOOR_BYTES_MAX + 1},
    "unknown codec": {"codec": "gzip"},
}


@pytest.mark.parametrize("case", sorted(BAD_RULES))
def test_a_wrong_rule_is_refused(case: str) -> None:
    """Each field is checked, and the message names the class or its byte."""
    row = {"class_byte": 16, "name": "batch", "keep_for_s": DAY_S} | BAD_RULES[case]
    with pytest.raises(ValueError, match=r"class"):
        ClassRule(**row)
    with pytest.raises(ValueError, match=r"class"):
        ClassRules.from_json([row])


@pytest.mark.parametrize(
    "rows",
    [
        (),
        (AGENT_RULE, AGENT_RULE),
        (BATCH_RULE, ClassRule(BATCH, "other", DAY_S)),
        (BATCH_RULE, ClassRule(TrafficClass(17), "batch", DAY_S)),
    ],
    ids=["none", "twice the same", "one byte twice", "one name twice"],
)
def test_rules_that_contradict_each_other_are_refused(rows: tuple[ClassRule, ...]) -> None:
    """A store has at least one class; bytes and names are unique."""
    with pytest.raises(ValueError, match="class"):
        ClassRules(rows)


def test_an_unknown_class_is_kept_at_the_longest_promise() -> None:
    """A byte that no rule names is never dropped early, and is reported by its number."""
    assert RULES.keep_for_s(200) == 7 * DAY_S
    assert RULES.name_of(200) == "class-200"
    assert RULES.by_byte(200) is None
    assert (RULES.keep_for_s(AGENT), RULES.name_of(BATCH)) == (3 * DAY_S, "batch")
    assert (RULES.by_name("batch"), RULES.by_name("nobody")) == (BATCH_RULE, None)


def test_each_volume_has_its_part_of_floors_and_ceilings() -> None:
    """Bytes and shares of a node are divided evenly; no bound stays none, however small a ceiling is."""
    shares = ClassRule(BATCH, "batch", DAY_S, floor_share=1000, ceiling_share=2500)
    sizes = ClassRule(AGENT, "agent", DAY_S, floor_bytes=50, ceiling_bytes=90)
    here = ClassRules((CHAT_RULE, shares, sizes)).for_volume(1000, 2)
    assert [(rule.floor_bytes, rule.ceiling_bytes) for rule in here.rules] == [(0, 0), (50, 125), (25, 45)]
    assert all(not rule.floor_share and not rule.ceiling_share for rule in here.rules)
    tiny = replace(CHAT_RULE, ceiling_share=1)
    assert ClassRules((tiny,)).for_volume(1000, 2).rules[0].ceiling_bytes == 1
    assert (tiny.ceiling_of(10_000), CHAT_RULE.ceiling_of(10_000), shares.floor_of(10_000)) == (1, None, 1000)
    ClassRules((shares,)).for_volume(2**62)


def test_rules_survive_json() -> None:
    """What is written to JSON reads back equal; other fields are refused."""
    assert ClassRules.from_json(json.loads(json.dumps(RULES.to_json()))) == RULES
    assert not LATER.keys() & {name for row in RULES.to_json() for name in row}
    choosy = replace(RULES.rules[0], admission="second_touch", write_budget_bytes=1, keep="fixed", max_age_s=4 * DAY_S)
    choosy = replace(choosy, floor_share=1, ceiling_share=2)
    later = replace(CHAT_RULE, compress_after_s=60)
    again = ClassRules.from_json(ClassRules((choosy, later)).to_json())
    assert again.rules == (choosy, later)
    for row in ({"name": "batch"}, {**RULES.to_json()[2], "ttl": 5}):
        with pytest.raises(ValueError, match="fields"):
            ClassRules.from_json([row])
