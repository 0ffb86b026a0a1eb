"""Blocks of a class that the policy does not name: kept at the longest promise, and reported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

from typer.testing import CliRunner

from kvstore.daemon.node import Node
from kvstore.store import Store
from kvstore.testing import DAY_S, TEST_RULES, ManualClock
from kvstore.traffic import OPERATOR_CLASS_MIN, ClassRule, ClassRules
from retention.cli import build_app
from tests.support.nodes import open_node
from tests.support.spaces import a_chain, a_space, hit_blocks, put_chain

BATCH = OPERATOR_CLASS_MIN
WITH_BATCH = ClassRules((*TEST_RULES.rules, ClassRule(BATCH, "batch", DAY_S)))


class StaysOpen:
    """A node that outlives the command that asks it."""

    def __init__(self, node: Node) -> None:
        self._node = node

    def __getattr__(self, name: str) -> Any:
        return getattr(self._node, name)

    def close(self) -> None:
        pass


def shown(node: Node, clock: ManualClock, *arguments: str) -> str:
    app = build_app(lambda *_: cast(Store, StaysOpen(node)), clock)
    result = CliRunner().invoke(app, ["show", "--store", "node", *arguments])
    assert result.exit_code == 0, result.output
    return str(result.stdout)


def test_a_class_that_the_policy_lacks_outlives_its_rule(tmp_path: Path) -> None:
    """Through restarts: a day was promised; after the class is gone, its blocks are kept the longest promise, 7 days.

    The node's gauge and `show` say that no rule names it. No later start forgets the blocks, or the byte.
    """
    clock = ManualClock()
    node = open_node(tmp_path, clock, rules=WITH_BATCH)
    chain = a_chain(node.register_space(a_space()), 3)
    put_chain(node, chain, BATCH)
    assert node.stats()["unknown_classes"] == 0
    node.set_policy(TEST_RULES, "without batch", expected_version=node.policy().version, apply=True)
    for day in (0.0, 0.9, 6.0):
        node.close()
        clock.advance(day * DAY_S)
        node = open_node(tmp_path, clock, rules=None)
        assert hit_blocks(node, chain) == 3
        assert node.stats()["unknown_classes"] == 1
        (row,) = json.loads(shown(node, clock, "--json"))["rows"]
        assert (row["class"], row["ruled"], row["blocks"]) == (f"class-{BATCH}", False, 3)
        text = shown(node, clock)
        assert "7d" in text
        assert f"no rule of the policy names class-{BATCH}" in text
    clock.advance(0.2 * DAY_S)
    assert hit_blocks(node, chain) == 0
    node.close()
