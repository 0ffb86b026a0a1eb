"""What a node says of the policy that it is started with, where another one is in force."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstore.testing import DAY_S, TEST_RULES, ManualClock
from kvstore.traffic import OPERATOR_CLASS_MIN, ClassRule, ClassRules
from tests.support.nodes import open_node

BATCH = ClassRule(OPERATOR_CLASS_MIN, "batch", DAY_S)
CHANGED = ClassRules((*TEST_RULES.rules, BATCH))


def test_a_policy_that_was_set_is_kept_without_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Who changed the policy at run time is not told so at every restart; whoever edits the file is told once more."""
    clock = ManualClock()
    node = open_node(tmp_path, clock)
    node.set_policy(CHANGED, "with batch", expected_version=node.policy().version, apply=True)
    node.close()
    open_node(tmp_path, clock).close()
    open_node(tmp_path, clock, rules=CHANGED).close()
    assert "policy_kept" not in caplog.text
    edited = ClassRules((*TEST_RULES.rules, ClassRule(OPERATOR_CLASS_MIN, "batch", 2 * DAY_S)))
    node = open_node(tmp_path, clock, rules=edited)
    assert node.policy().rules == CHANGED
    node.close()
    assert "policy_kept version=2" in caplog.text
