"""Policies that change under a store that will be killed, and which blocks may be gone because of it.

Owns the rules that are tried and what is known of those in force. Does not know blocks. Invariants: one change is under
way at a time; from the moment when a change that makes a class brief may be in force until one that does not is known
to be, nothing of that class is promised, unless it is pinned; who stored a block while that changed promises nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from kvstore.traffic import AGENT, CHAT, ClassRule, ClassRules, TrafficClass

BRIEF = TrafficClass(40)
BRIEF_S = 1
DAY_S = 86_400


def first_rules(capacity_bytes: int) -> ClassRules:
    """What is of class agent always fits its floor, so nothing may evict it; chat is more than fits; brief expires."""
    return ClassRules(
        (
            ClassRule(AGENT, "agent", keep_for_s=3 * DAY_S, priority=200, floor_bytes=capacity_bytes),
            ClassRule(CHAT, "chat", keep_for_s=7 * DAY_S, priority=100),
            ClassRule(BRIEF, "brief", keep_for_s=BRIEF_S, priority=50),
        )
    )


LASTING = ((3 * DAY_S, 7 * DAY_S), (30 * DAY_S, 2 * DAY_S))
"""How long agents' and chats' blocks are kept, longer than a test lasts."""
SHORT = ((BRIEF_S, 7 * DAY_S), (9 * DAY_S, BRIEF_S), (BRIEF_S, BRIEF_S))


def changed(rules: ClassRules, agent_s: int, chat_s: int) -> ClassRules:
    """The same rules, with other times to keep."""
    kept_s = {AGENT: agent_s, CHAT: chat_s}
    return ClassRules(
        tuple(replace(rule, keep_for_s=kept_s.get(TrafficClass(rule.class_byte), BRIEF_S)) for rule in rules.rules)
    )


class PolicyBook:
    """What is known of the rules in force. Thread-safe."""

    def __init__(self) -> None:
        self.changing = threading.Lock()
        """Held by who changes the policy."""
        self.lock = threading.RLock()
        """Held while promises are made or taken back."""
        self.brief: frozenset[int] = frozenset()
        """Classes that may be brief now, besides the one that always is."""
        self._changes = 0

    @contextmanager
    def steady(self, changes: int) -> Iterator[bool]:
        """Hold the lock; whether nothing has changed since ``changes``."""
        with self.lock:
            yield changes == self._changes

    @property
    def changes(self) -> int:
        return self._changes

    def expect(self, rules: ClassRules) -> None:
        """These rules may be in force from now on, besides what may be already. The lock is held."""
        self._changes += 1
        self.brief |= _brief_of(rules)

    def learn(self, rules: ClassRules) -> None:
        """These rules are in force, and no others."""
        with self.lock:
            self._changes += 1
            self.brief = _brief_of(rules)


def _brief_of(rules: ClassRules) -> frozenset[int]:
    return frozenset(rule.class_byte for rule in rules.rules if rule.keep_for_s <= BRIEF_S)
