"""Policies: what is accepted, what is refused and why, and what they compile to."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.traffic import (
    ADMISSIONS,
    FLOOR_BYTES_MAX,
    KEEP_FOR_S_MAX,
    KEEPS,
    MAX_AGE_S_MIN,
    PRIORITY_MAX,
    ClassRule,
    ClassRules,
    TrafficClass,
)
from retention.errors import PolicyInvalid
from retention.policy import (
    POLICY_TEXT_BYTES_MAX,
    check_change,
    default_policy_text,
    diff_policies,
    load_class_rules,
    parse_keep_for,
    parse_policy,
    policy_text,
    replace_keep_for,
)

DAY_S = 86_400
GIB = 1024**3
BUILT_IN = """
[class.agent]
keep_for = "3d"
priority = 100
[class.chat]
keep_for = "7d"
priority = 200
"""
OWN = """
[class.batch]
byte = 16
keep_for = "12h"
priority = 5
floor = "1.5GiB"
codec = "zstd"
"""
RULES = parse_policy(BUILT_IN + OWN)


def with_class(lines: str) -> str:
    return f"{BUILT_IN}\n[class.batch]\n{lines}\n"


def test_the_default_keeps_agents_3_days_and_chats_7() -> None:
    """Nothing given, the store promises what the product promises; agents give way first."""
    rules, text = load_class_rules(None)
    assert text == default_policy_text()
    assert {rule.name: rule.keep_for_s for rule in rules.rules} == {"agent": 3 * DAY_S, "chat": 7 * DAY_S}
    agent, chat = rules.rules
    assert agent.priority < chat.priority


def test_a_document_compiles_to_the_daemons_numbers() -> None:
    """Durations become seconds, sizes bytes; optional keys have their defaults; order is by byte."""
    assert [rule.class_byte for rule in RULES.rules] == [1, 2, 16]
    assert RULES.by_name("batch") == ClassRule(
        TrafficClass(16), "batch", DAY_S // 2, priority=5, floor_bytes=3 * GIB // 2, codec="zstd"
    )
    assert RULES.by_name("agent") == ClassRule(TrafficClass(1), "agent", 3 * DAY_S, priority=100)


names = st.from_regex(r"[a-z][a-z0-9_-]{0,30}", fullmatch=True).filter(lambda name: name not in ("agent", "chat"))
numbers: dict[str, st.SearchStrategy[Any]] = {
    "keep_for_s": st.integers(1, KEEP_FOR_S_MAX),
    "priority": st.integers(0, PRIORITY_MAX),
    "floor_bytes": st.integers(0, FLOOR_BYTES_MAX),
    "codec": st.sampled_from(["none", "zstd"]),
    "admission": st.sampled_from(ADMISSIONS),
    "write_budget_bytes": st.integers(0, FLOOR_BYTES_MAX),
    "keep": st.sampled_from(KEEPS),
}


def with_more(draw: st.DrawFn, values: dict[str, Any]) -> dict[str, Any]:
    """With a floor as a share or not, a ceiling above it or none, and a maximum age that allows the promise or none."""
    if draw(st.booleans()):
        values = {**values, "floor_bytes": 0, "floor_share": draw(st.integers(1, 3000))}
    if draw(st.booleans()):
        values = {**values, "ceiling_share": draw(st.integers(max(1, values.get("floor_share", 0)), 10_000))}
    elif draw(st.booleans()):
        values = {**values, "ceiling_bytes": draw(st.integers(max(1, values["floor_bytes"]), FLOOR_BYTES_MAX))}
    least_s = max(MAX_AGE_S_MIN, values["keep_for_s"] + min(3600, values["keep_for_s"]) + 1)
    if values["codec"] == "none" and draw(st.booleans()):
        return {**values, "compress_after_s": draw(st.integers(1, KEEP_FOR_S_MAX))}
    if least_s > KEEP_FOR_S_MAX or draw(st.booleans()):
        return values
    return {**values, "max_age_s": draw(st.integers(least_s, KEEP_FOR_S_MAX))}


@st.composite
def policies(draw: st.DrawFn) -> ClassRules:
    own = draw(st.dictionaries(st.integers(16, 255), names, max_size=5))
    bytes_of = {"agent": 1, "chat": 2} | {name: byte for byte, name in own.items()}
    rules = [
        ClassRule(TrafficClass(byte), name, **with_more(draw, {key: draw(value) for key, value in numbers.items()}))
        for name, byte in bytes_of.items()
    ]
    return ClassRules(tuple(sorted(rules, key=lambda rule: rule.class_byte)))


@given(policies())
def test_the_canonical_text_reads_back_as_the_same_policy(rules: ClassRules) -> None:
    """parse(text(rules)) is the rules, exactly, and the text is stable."""
    if sum(rule.floor_share for rule in rules.rules) > 10_000:
        rules = ClassRules(tuple(replace(rule, floor_share=rule.floor_share // 10) for rule in rules.rules))
    text = policy_text(rules)
    assert parse_policy(text) == rules
    assert policy_text(parse_policy(text)) == text
    assert len(text) < POLICY_TEXT_BYTES_MAX


def test_floors_and_ceilings_may_be_shares() -> None:
    """Of the capacity, to a hundredth of a percent; whether they fit is known once the capacity is."""
    rules = parse_policy(with_class('byte = 16\nkeep_for = "1d"\npriority = 1\nfloor = "12.5%"\nceiling = "1GiB"'))
    batch = rules.by_name("batch")
    assert batch is not None
    assert (batch.floor_share, batch.floor_bytes, batch.ceiling_bytes) == (1250, 0, GIB)
    assert 'floor = "12.5%"' in policy_text(rules)
    parse_policy(policy_text(rules), capacity_bytes=8 * GIB)
    with pytest.raises(PolicyInvalid, match="below its floor"):
        parse_policy(policy_text(rules), capacity_bytes=9 * GIB)


def test_a_document_without_the_later_keys_means_what_it_meant() -> None:
    """No admission and no budget: everything is stored. With them they are read, written and shown as changes."""
    plain = parse_policy(BUILT_IN)
    assert {(rule.admission, rule.write_budget_bytes) for rule in plain.rules} == {("always", 0)}
    choosy = parse_policy(
        BUILT_IN.replace("[class.chat]", '[class.chat]\nadmission = "second_touch"\nwrite_budget = "5GiB"')
    )
    rule = choosy.by_name("chat")
    assert rule is not None
    assert (rule.admission, rule.write_budget_bytes) == ("second_touch", 5 * GIB)
    assert [change.name for change in diff_policies(plain, choosy)] == ["chat"]


@given(policies(), policies())
def test_a_difference_names_exactly_the_classes_that_differ(before: ClassRules, after: ClassRules) -> None:
    """Every class of either side is equal in both, or named once with both sides."""
    changes = diff_policies(before, after)
    named = [change.name for change in changes]
    assert len(set(named)) == len(named)
    for name in {rule.name for rule in (*before.rules, *after.rules)}:
        assert (before.by_name(name) == after.by_name(name)) == (name not in named)
    assert all((item.before, item.after) == (before.by_name(item.name), after.by_name(item.name)) for item in changes)
    assert diff_policies(before, before) == ()


def test_a_difference_says_what_shrinks() -> None:
    """Only a shorter promise for the same class can take blocks away."""
    shorter = replace_keep_for(RULES, {"agent": 60, "chat": 8 * DAY_S})
    assert {change.name: change.shrinks for change in diff_policies(RULES, shorter)} == {"agent": True, "chat": False}
    assert [change.shrinks for change in diff_policies(parse_policy(BUILT_IN), RULES)] == [False]


BAD_DOCUMENTS: dict[str, tuple[str, str]] = {
    "no TOML": ("[class", "not valid TOML"),
    "a key twice": (BUILT_IN + BUILT_IN, "not valid TOML"),
    "nothing": ("", "names no class"),
    "a cap alone, without classes": ('capacity = "20GiB"', "names no class"),
    "unknown top key": ("ttl = 5\n" + BUILT_IN, "unknown key 'ttl'"),
    "class is no table": (f'class.chat = "7d"\n{BUILT_IN.split("[class.chat]")[0]}', r"\[class.chat\]"),
    "built-in class left out": (BUILT_IN.split("[class.chat]")[0], r"add a table \[class.chat\]"),
    "unknown class": (with_class('keep_for = "1d"\npriority = 1'), "unknown class without a byte"),
    "byte of a built-in class changed": (BUILT_IN.replace("priority = 100", "priority = 100\nbyte = 7"), "has byte 1"),
    "byte kept for built-in classes": (with_class('byte = 3\nkeep_for = "1d"\npriority = 1'), r"16\.\.255"),
    "byte beyond one byte": (with_class('byte = 256\nkeep_for = "1d"\npriority = 1'), r"16\.\.255"),
    "byte as text": (with_class('byte = "16"\nkeep_for = "1d"\npriority = 1'), r"16\.\.255"),
    "byte as truth": (with_class('byte = true\nkeep_for = "1d"\npriority = 1'), r"16\.\.255"),
    "two classes with one byte": (
        BUILT_IN + OWN + OWN.replace("class.batch", "class.other"),
        "batch and other share byte 16",
    ),
    "bad class name": (BUILT_IN + OWN.replace("class.batch", "class.Batch"), "class name"),
    "unknown class key": (with_class('byte = 16\nkeep_for = "1d"\npriority = 1\nttl = 3'), "unknown key 'ttl'"),
    "no promise": (with_class("byte = 16\npriority = 1"), "keep_for is missing"),
    "promise without a unit": (with_class('byte = 16\nkeep_for = "7"\npriority = 1'), "no unit"),
    "promise as number": (with_class("byte = 16\nkeep_for = 7\npriority = 1"), "with units"),
    "promise of nothing": (with_class('byte = 16\nkeep_for = "0s"\npriority = 1'), "outside 1s"),
    "negative promise": (with_class('byte = 16\nkeep_for = "-3d"\npriority = 1'), "not a duration"),
    "promise beyond 50 years": (with_class('byte = 16\nkeep_for = "51w2600d9999999h"\npriority = 1'), "longer|outside"),
    "promise beyond any number": (with_class(f'byte = 16\nkeep_for = "{"9" * 40}d"\npriority = 1'), "keep_for"),
    "promise with an unknown unit": (with_class('byte = 16\nkeep_for = "3y"\npriority = 1'), "unknown unit"),
    "no order when full": (with_class('byte = 16\nkeep_for = "1d"'), "priority is missing"),
    "negative priority": (with_class('byte = 16\nkeep_for = "1d"\npriority = -1'), r"0\.\.1000000"),
    "priority as text": (with_class('byte = 16\nkeep_for = "1d"\npriority = "high"'), r"0\.\.1000000"),
    "floor without a unit": (with_class('byte = 16\nkeep_for = "1d"\npriority = 1\nfloor = "50"'), "no unit"),
    "share beyond all": (with_class('byte = 16\nkeep_for = "1d"\npriority = 1\nfloor = "101%"'), "0% to 100%"),
    "share too fine": (with_class('byte = 16\nkeep_for = "1d"\npriority = 1\nfloor = "1.234%"'), "two decimals"),
    "negative share": (with_class('byte = 16\nkeep_for = "1d"\npriority = 1\nceiling = "-5%"'), "0% to 100%"),
    "no ceiling at all": (with_class('byte = 16\nkeep_for = "1d"\npriority = 1\nceiling = "0B"'), "ceiling 0"),
    "ceiling below the floor": (
        with_class('byte = 16\nkeep_for = "1d"\npriority = 1\nfloor = "20%"\nceiling = "10%"'),
        "below its floor",
    ),
    "shares beyond all": (
        (BUILT_IN + OWN).replace("priority", 'floor = "40%"\npriority').replace('floor = "1.5GiB"\n', ""),
        "more than 100 %",
    ),
    "floor as number": (with_class('byte = 16\nkeep_for = "1d"\npriority = 1\nfloor = 50'), "with units"),
    "negative floor": (with_class('byte = 16\nkeep_for = "1d"\npriority = 1\nfloor = "-1GiB"'), "not a size"),
    "overflowing floor": (with_class('byte = 16\nkeep_for = "1d"\npriority = 1\nfloor = "7EiB"'), "EiB"),
    "unknown codec": (with_class('byte = 16\nkeep_for = "1d"\npriority = 1\ncodec = "gzip"'), "none, zstd"),
    "unknown admission": (with_class('byte = 16\nkeep_for = "1d"\npriority = 1\nadmission = "never"'), "second_touch"),
    "unknown keep": (with_class('byte = 16\nkeep_for = "1d"\npriority = 1\nkeep = "ever"'), "sliding, fixed"),
    "maximum age as number": (with_class('byte = 16\nkeep_for = "1d"\npriority = 1\nmax_age = 5'), "max_age 5"),
    "promise beyond the maximum age": (
        with_class('byte = 16\nkeep_for = "3d"\npriority = 1\nmax_age = "3d"'),
        "no block would reach that",
    ),
    "compressed at once and later": (
        with_class('byte = 16\nkeep_for = "1d"\npriority = 1\ncodec = "zstd"\ncompress_after = "1h"'),
        "compressed at once",
    ),
    "wait for compression without a unit": (
        with_class('byte = 16\nkeep_for = "1d"\npriority = 1\ncompress_after = "12"'),
        "compress_after",
    ),
    "budget as number": (with_class('byte = 16\nkeep_for = "1d"\npriority = 1\nwrite_budget = 5'), "write_budget 5"),
    "codec as number": (with_class('byte = 16\nkeep_for = "1d"\npriority = 1\ncodec = 1'), "none, zstd"),
    "too long": ("#" * POLICY_TEXT_BYTES_MAX + BUILT_IN, str(POLICY_TEXT_BYTES_MAX)),
    "too deep": ("x = " + "[" * 30_000, "not valid TOML"),
}


@pytest.mark.parametrize("case", sorted(BAD_DOCUMENTS))
def test_a_wrong_policy_is_refused_with_the_reason(case: str) -> None:
    """Each fault has its own message, which says what to write instead."""
    text, reason = BAD_DOCUMENTS[case]
    with pytest.raises(PolicyInvalid, match=reason):
        parse_policy(text)


def test_every_problem_is_named_at_once() -> None:
    """Somebody who repairs a policy need not run it once per fault."""
    text = 'x = 1\n[class.agent]\nkeep_for = "3"\n[class.batch]\nkeep_for = "1d"\npriority = 1\nfloor = 2'
    with pytest.raises(PolicyInvalid) as caught:
        parse_policy(text)
    assert len(caught.value.problems) == 5
    assert str(caught.value).count("\n") == 4


def test_floors_must_fit_the_capacity() -> None:
    """Guarantees that add up to more than there is are refused, where the capacity is known."""
    text = BUILT_IN.replace("priority = 100", 'priority = 100\nfloor = "6GiB"') + OWN
    assert sum(rule.floor_bytes for rule in parse_policy(text).rules) == 15 * GIB // 2
    assert parse_policy(text, capacity_bytes=15 * GIB // 2) == parse_policy(text)
    with pytest.raises(PolicyInvalid, match="more than the capacity of 7GiB"):
        parse_policy(text, capacity_bytes=7 * GIB)


def test_a_byte_never_becomes_another_class() -> None:
    """Stored blocks carry the byte, so a renamed class would inherit them; leaving and adding classes is allowed."""
    renamed = parse_policy(BUILT_IN + OWN.replace("class.batch", "class.other"))
    with pytest.raises(PolicyInvalid, match="byte 16 is class 'batch' now"):
        check_change(RULES, renamed)
    check_change(RULES, parse_policy(BUILT_IN))
    check_change(parse_policy(BUILT_IN), RULES)
    check_change(RULES, parse_policy(BUILT_IN + OWN.replace("16", "17")))


def test_other_durations_change_nothing_else() -> None:
    """--keep replaces durations only, and only of classes that exist."""
    changed = replace_keep_for(RULES, {"batch": 60})
    assert [rule.keep_for_s for rule in changed.rules] == [3 * DAY_S, 7 * DAY_S, 60]
    assert replace_keep_for(changed, {"batch": DAY_S // 2}) == RULES
    with pytest.raises(PolicyInvalid, match=r"no class 'bulk'.*agent, chat, batch"):
        replace_keep_for(RULES, {"bulk": 60})


@pytest.mark.parametrize(("text", "seconds"), [("3d", 3 * DAY_S), ("1d12h", 129_600), ("1s", 1), ("2w", 14 * DAY_S)])
def test_promises_are_read_with_their_units(text: str, seconds: int) -> None:
    """What people write is what is kept."""
    assert parse_keep_for(text) == seconds


def test_a_policy_file_is_read_whole_or_refused(tmp_path: Path) -> None:
    """The text comes back as written; a missing, binary or endless file is refused by name."""
    path = tmp_path / "policy.toml"
    path.write_text(BUILT_IN + "# mine\n")
    assert load_class_rules(path) == (parse_policy(BUILT_IN), BUILT_IN + "# mine\n")
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(PolicyInvalid, match="cannot be read"):
        load_class_rules(path)
    with pytest.raises(PolicyInvalid, match="cannot be read"):
        load_class_rules(tmp_path / "absent.toml")
    with pytest.raises(PolicyInvalid, match="cannot be read"):
        load_class_rules(tmp_path)
    with pytest.raises(PolicyInvalid, match=str(POLICY_TEXT_BYTES_MAX)):
        load_class_rules(Path("/dev/zero"))
