"""What a traffic class means: how long its blocks are kept, what it is guaranteed, and what gives way first.

Owns the policy document (TOML), its validation as a whole, and its translation into the finished numbers that the
daemon applies (``kvstore.traffic.ClassRules``). Pure, apart from ``load_class_rules``, which reads one file. Does not
know about stores or blocks. Invariants: a document is accepted whole or not at all, with every problem named; the text
that ``policy_text`` writes parses to the same rules; a class byte never changes its name.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any

from kvstore.traffic import (
    ADMISSIONS,
    ALWAYS,
    BUILT_IN_NAMES,
    CLASS_MAX,
    CODECS,
    KEEP_FOR_S_MAX,
    KEEPS,
    OPERATOR_CLASS_MIN,
    PRIORITY_MAX,
    SHARE_MAX,
    SLIDING,
    ClassRule,
    ClassRules,
    TrafficClass,
)
from kvstore.units import format_bytes, format_duration, parse_bytes, parse_duration_s
from retention.errors import PolicyInvalid

_SHARE = re.compile(r"([0-9]{1,3})(?:\.([0-9]{1,2}))?\s*%", re.ASCII)
POLICY_TEXT_BYTES_MAX = 65_536
"""A longer policy document is refused: 240 classes fit well."""


@dataclass(frozen=True, slots=True)
class ClassChange:
    """How one class differs between two policies; ``before`` or ``after`` is None where the class does not exist."""

    name: str
    before: ClassRule | None
    after: ClassRule | None

    @property
    def shrinks(self) -> bool:
        """Whether some block of the class may lose its promise."""
        if self.before is None or self.after is None:
            return False
        ages = (self.before.max_age_s or KEEP_FOR_S_MAX, self.after.max_age_s or KEEP_FOR_S_MAX)
        return self.after.keep_for_s < self.before.keep_for_s or ages[1] < ages[0]


def parse_policy(text: str, *, capacity_bytes: int | None = None) -> ClassRules:
    """The rules that a policy document states.

    ``capacity_bytes``: physical bytes of the store, where known; floors must fit in it. Raises PolicyInvalid with every
    problem found.
    """
    if len(text.encode()) > POLICY_TEXT_BYTES_MAX:
        raise PolicyInvalid([f"the policy has more than {POLICY_TEXT_BYTES_MAX} bytes"])
    try:
        document = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise PolicyInvalid([f"the policy is not valid TOML: {error}"]) from error
    problems = [f"unknown key {key!r}; a policy has [class.NAME] tables only" for key in document if key != "class"]
    tables = document.get("class", {})
    if not isinstance(tables, dict) or not tables:
        problems.append("the policy names no class; without one nothing says what to keep and what gives way when full")
        raise PolicyInvalid(problems)
    rules = [rule for name, table in tables.items() if (rule := _parse_class(name, table, problems)) is not None]
    if problems:
        raise PolicyInvalid(problems)
    return check_policy(rules, capacity_bytes=capacity_bytes)


def check_policy(rules: list[ClassRule], *, capacity_bytes: int | None = None) -> ClassRules:
    """Rules that hold together, in order of their bytes. Raises PolicyInvalid with every problem found."""
    problems: list[str] = []
    names_of: dict[int, list[str]] = {}
    for rule in rules:
        names_of.setdefault(rule.class_byte, []).append(rule.name)
    for byte, names in names_of.items():
        if len(names) > 1:
            problems.append(f"classes {' and '.join(sorted(names))} share byte {byte}; give each its own")
    for name in BUILT_IN_NAMES:
        if not any(rule.name == name for rule in rules):
            problems.append(f"class {name} is built in and in use by gateways: add a table [class.{name}]")
    if sum(rule.floor_share for rule in rules) > SHARE_MAX:
        problems.append("the floors given as shares add up to more than 100 %; lower them")
    floors_bytes = sum(rule.floor_of(capacity_bytes or 0) for rule in rules)
    if capacity_bytes is not None and floors_bytes > capacity_bytes:
        problems.append(
            f"the floors add up to {format_bytes(floors_bytes)}, more than the capacity of "
            f"{format_bytes(capacity_bytes)}; lower them, or add capacity"
        )
    if capacity_bytes is not None:
        problems += [
            f"class {rule.name}: its ceiling is below its floor on {format_bytes(capacity_bytes)}"
            for rule in rules
            if (ceiling_bytes := rule.ceiling_of(capacity_bytes)) is not None
            and ceiling_bytes < rule.floor_of(capacity_bytes)
        ]
    if problems:
        raise PolicyInvalid(problems)
    return ClassRules(tuple(sorted(rules, key=lambda rule: rule.class_byte)))


def check_change(before: ClassRules, after: ClassRules) -> None:
    """Raises PolicyInvalid when a byte would change its name: blocks on disk would pass to another class."""
    problems = []
    for old in before.rules:
        new = after.by_byte(old.class_byte)
        if new is not None and new.name != old.name:
            problems.append(
                f"byte {old.class_byte} is class {old.name!r} now and cannot become {new.name!r}: stored blocks carry "
                f"the byte; give {new.name!r} another one"
            )
    if problems:
        raise PolicyInvalid(problems)


def diff_policies(before: ClassRules, after: ClassRules) -> tuple[ClassChange, ...]:
    """The classes that differ, in order of their bytes."""
    byte_of = {rule.name: rule.class_byte for rule in (*before.rules, *after.rules)}
    changes = (
        ClassChange(name, before.by_name(name), after.by_name(name))
        for name in sorted(byte_of, key=byte_of.__getitem__)
    )
    return tuple(change for change in changes if change.before != change.after)


def replace_keep_for(rules: ClassRules, keep_for_s: Mapping[str, int]) -> ClassRules:
    """The same policy with other durations for some classes. Raises PolicyInvalid for a class that it lacks."""
    known = [rule.name for rule in rules.rules]
    problems = [
        f"there is no class {name!r}; the policy has {', '.join(known)}. A new class needs a policy file: it has a byte"
        for name in keep_for_s
        if name not in known
    ]
    if problems:
        raise PolicyInvalid(problems)
    return ClassRules(
        tuple(replace(rule, keep_for_s=keep_for_s.get(rule.name, rule.keep_for_s)) for rule in rules.rules)
    )


def parse_keep_for(text: str) -> int:
    """Seconds of a promise written like ``3d`` or ``1d12h``. Raises ValueError that says what to write instead."""
    keep_for_s = parse_duration_s(text)
    if not 1 <= keep_for_s <= KEEP_FOR_S_MAX:
        raise ValueError(f"{text!r} is outside 1s..{format_duration(KEEP_FOR_S_MAX)}")
    return keep_for_s


def policy_text(rules: ClassRules) -> str:
    """The canonical document of some rules: every key that says something of every class, in order of their bytes."""
    tables = []
    for rule in sorted(rules.rules, key=lambda item: item.class_byte):
        lines = [f"[class.{rule.name}]"]
        if rule.name not in BUILT_IN_NAMES:
            lines.append(f"byte = {rule.class_byte}")
        lines += [
            f'keep_for = "{format_duration(rule.keep_for_s)}"',
            f"priority = {rule.priority}",
            f'floor = "{size_text(rule.floor_bytes, rule.floor_share)}"',
            f'codec = "{rule.codec}"',
        ]
        if rule.ceiling_bytes or rule.ceiling_share:
            lines.append(f'ceiling = "{size_text(rule.ceiling_bytes, rule.ceiling_share)}"')
        if rule.keep != SLIDING:
            lines.append(f'keep = "{rule.keep}"')
        if rule.max_age_s:
            lines.append(f'max_age = "{format_duration(rule.max_age_s)}"')
        if rule.compress_after_s:
            lines.append(f'compress_after = "{format_duration(rule.compress_after_s)}"')
        if rule.admission != ALWAYS:
            lines.append(f'admission = "{rule.admission}"')
        if rule.write_budget_bytes:
            lines.append(f'write_budget = "{format_bytes(rule.write_budget_bytes)}"')
        tables.append("\n".join(lines) + "\n")
    return "\n".join(tables)


def size_text(size_bytes: int, share: int) -> str:
    """A floor or ceiling as a document says it: bytes, or a share of the capacity."""
    return f"{share / (SHARE_MAX / 100):g}%" if share else format_bytes(size_bytes)


def default_policy_text() -> str:
    """The document that comes with the package: agent 3 days, chat 7 days."""
    return resources.files("retention").joinpath("default_policy.toml").read_text(encoding="utf-8")


def load_class_rules(path: Path | None, *, capacity_bytes: int | None = None) -> tuple[ClassRules, str]:
    """Rules and text of a policy file, or of the default policy. Raises PolicyInvalid, also for an unreadable file."""
    if path is None:
        text = default_policy_text()
    else:
        try:
            with path.open("rb") as file:
                text = file.read(POLICY_TEXT_BYTES_MAX + 1).decode()
        except (OSError, UnicodeDecodeError) as error:
            raise PolicyInvalid([f"the policy file {path} cannot be read: {error}"]) from error
    return parse_policy(text, capacity_bytes=capacity_bytes), text


# --- one class table ------------------------------------------------------------------------------------------------


def _parse_class(name: str, table: object, problems: list[str]) -> ClassRule | None:
    """The rule of one table, or None after adding what is wrong with it to ``problems``."""
    if not isinstance(table, dict):
        problems.append(f"class {name}: write a table, [class.{name}]")
        return None
    known = ", ".join(_READERS)
    found = [f"unknown key {key!r}; known: {known}" for key in table if key not in _READERS]
    values: dict[str, Any] = {}
    for key, read in _READERS.items():
        try:
            values[key] = read(name, table.get(key))
        except ValueError as error:
            found.append(str(error))
    if not found:
        try:
            return ClassRule(
                class_byte=TrafficClass(values["byte"]),
                name=name,
                keep_for_s=values["keep_for"],
                priority=values["priority"],
                floor_bytes=values["floor"][0],
                floor_share=values["floor"][1],
                ceiling_bytes=values["ceiling"][0],
                ceiling_share=values["ceiling"][1],
                codec=values["codec"],
                admission=values["admission"],
                write_budget_bytes=values["write_budget"],
                keep=values["keep"],
                max_age_s=values["max_age"],
                compress_after_s=values["compress_after"],
            )
        except ValueError as error:
            found.append(str(error).removeprefix(f"class {name!r}: "))
    problems.extend(f"class {name}: {problem}" for problem in found)
    return None


def _read_byte(name: str, value: object) -> int:
    built_in = BUILT_IN_NAMES.get(name)
    if built_in is not None:
        if value is not None and value != built_in:
            raise ValueError(f"byte {value!r}: the built-in class has byte {built_in}; leave the key out")
        return built_in
    if value is None:
        free = f"{OPERATOR_CLASS_MIN}..{CLASS_MAX}"
        raise ValueError(
            f"unknown class without a byte; built in are {', '.join(BUILT_IN_NAMES)}; for a class of your own add "
            f"byte = {free}, never used before"
        )
    return _whole(value, "byte", OPERATOR_CLASS_MIN, CLASS_MAX)


def _read_keep_for(_name: str, value: object) -> int:
    if not isinstance(value, str):
        raise ValueError(f'keep_for {_shown(value)}: write a duration with units, like keep_for = "3d" or "1d12h"')
    try:
        return parse_keep_for(value)
    except ValueError as error:
        raise ValueError(f"keep_for: {error}") from error


def _duration(key: str) -> Callable[[str, object], int]:
    """Reads seconds; 0 where the key is absent."""

    def read(_name: str, value: object) -> int:
        if value is None:
            return 0
        if not isinstance(value, str):
            raise ValueError(f'{key} {_shown(value)}: write a duration with units, like {key} = "30d" or "12h"')
        try:
            return parse_keep_for(value)
        except ValueError as error:
            raise ValueError(f"{key}: {error}") from error

    return read


def _read_priority(_name: str, value: object) -> int:
    if value is None:
        raise ValueError("priority is missing: when the store is full, classes with a lower number give way first")
    return _whole(value, "priority", 0, PRIORITY_MAX)


def _size_or_share(key: str) -> Callable[[str, object], tuple[int, int]]:
    """Reads bytes, or ten-thousandths of the capacity; of the pair one is 0."""

    def read(_name: str, value: object) -> tuple[int, int]:
        if not isinstance(value, str) or not value.strip().endswith("%"):
            return _size(value, key), 0
        found = _SHARE.fullmatch(value.strip())
        share = int(found[1]) * 100 + int((found[2] or "0").ljust(2, "0")) if found else -1
        if not 0 <= share <= SHARE_MAX:
            raise ValueError(f'{key} {value!r}: write a share from 0% to 100%, with two decimals at most, like "12.5%"')
        return 0, share

    return read


def _read_ceiling(name: str, value: object) -> tuple[int, int]:
    found = _size_or_share("ceiling")(name, value)
    if value is not None and not any(found):
        raise ValueError(
            "ceiling 0: the class would keep nothing when room is needed; leave the key out for no ceiling"
        )
    return found


def _read_write_budget(_name: str, value: object) -> int:
    return _size(value, "write_budget")


def _size(value: object, key: str) -> int:
    if value is None:
        return 0
    if not isinstance(value, str):
        raise ValueError(f'{key} {_shown(value)}: write a size with units, like {key} = "50GiB" or "0B"')
    try:
        return parse_bytes(value)
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from error


def _one_of(key: str, known: tuple[str, ...]) -> Callable[[str, object], str]:
    """Reads a key that is one of some words; the first of them where it is absent."""

    def read(_name: str, value: object) -> str:
        if value is None:
            return known[0]
        if not isinstance(value, str) or value not in known:
            raise ValueError(f"{key} {_shown(value)} is not one of {', '.join(known)}")
        return value

    return read


_READERS: Mapping[str, Callable[[str, object], Any]] = {
    "byte": _read_byte,
    "keep_for": _read_keep_for,
    "priority": _read_priority,
    "floor": _size_or_share("floor"),
    "ceiling": _read_ceiling,
    "keep": _one_of("keep", KEEPS),
    "max_age": _duration("max_age"),
    "compress_after": _duration("compress_after"),
    "codec": _one_of("codec", CODECS),
    "admission": _one_of("admission", ADMISSIONS),
    "write_budget": _read_write_budget,
}
"""Keys of a class table, with the function that checks and translates each (class name, value or None if absent)."""


def _whole(value: object, key: str, least: int, most: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise ValueError(f"{key} {_shown(value)} is not a whole number in {least}..{most}")
    return value


def _shown(value: object) -> str:
    return "is missing" if value is None else repr(value)[:80]
