"""The class of a request: header, then the key's default, then tools, else chat."""

from __future__ import annotations

import itertools

import pytest

from gateway.classes import ClassNames
from gateway.classify import classify
from kvstore.store import Policy
from kvstore.traffic import AGENT, BUILT_IN_NAMES, CHAT, ClassRule, ClassRules, TrafficClass

BATCH = TrafficClass(16)
NAMES = {**BUILT_IN_NAMES, "batch": BATCH}


def test_order_of_precedence() -> None:
    """Every combination: the first that is there decides."""
    for header, key, tools in itertools.product((None, "batch"), (None, CHAT, AGENT), (False, True)):
        expected = BATCH if header else key if key is not None else AGENT if tools else CHAT
        assert classify(header, key, has_tools=tools, names=NAMES) == expected


def test_header_is_case_insensitive_and_checked() -> None:
    """An unknown name is refused with the names that exist, never taken for another class."""
    assert classify(" Agent ", None, has_tools=False, names=NAMES) == AGENT
    for wrong in ("", "gold", "1", "agent,chat"):
        with pytest.raises(ValueError, match="agent, batch, chat"):
            classify(wrong, AGENT, has_tools=True, names=NAMES)


def test_names_follow_the_stores_policy() -> None:
    """Operator classes of the policy can be named; those of the configuration win and stay."""
    names = ClassNames({**BUILT_IN_NAMES, "batch": BATCH})
    rules = [ClassRule(AGENT, "agent", 60), ClassRule(TrafficClass(17), "scratch", 60)]
    names.adopt(Policy(1, ClassRules(tuple(rules)), ""))
    assert names.names == {"agent": AGENT, "chat": CHAT, "batch": BATCH, "scratch": 17}
    assert names.name_of(17) == "scratch"
    assert names.name_of(99) == "class-99"
