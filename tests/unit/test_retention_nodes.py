"""Commands against several nodes, some of which are down or behind: the others are shown, those are named."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from kvstore.errors import Unavailable
from kvstore.store import Pin
from kvstore.testing import DAY_S, TEST_RULES, ManualClock, MemoryStore
from kvstore.traffic import AGENT, ClassRules
from retention import session
from retention.cli import EXIT_CODES, build_app
from retention.session import EXIT_FAILED, EXIT_OK
from tests.support.spaces import a_chain, a_space, put_chain

ROOT = Path(__file__).resolve().parents[2]


class Down(MemoryStore):
    """A node that does not answer."""

    def _refuse(self, **_options: Any) -> Any:
        raise Unavailable("connection refused")

    policy = policy_history = pins = spaces = stats = _refuse


def run(stores: Mapping[str, Any], *arguments: str) -> Result:
    app = build_app(lambda addresses, _token: stores[addresses[0]], ManualClock())
    given = [*arguments, *(part for name in stores for part in ("--store", name))]
    return CliRunner().invoke(app, given, env={"REPRISE_STORE": None})


def changed(store: MemoryStore, keep_for_s: int) -> None:
    """One more version of the policy."""
    changes = {AGENT: keep_for_s}
    rules = tuple(replace(rule, keep_for_s=changes.get(rule.class_byte, rule.keep_for_s)) for rule in TEST_RULES.rules)
    version = store.policy().version
    store.set_policy(ClassRules(rules), "changed", expected_version=version, apply=True, author="ann@desk")


@pytest.mark.parametrize("command", ["policy get", "policy history", "policy diff 1", "pins", "show"])
@pytest.mark.parametrize("form", ["--json", ""])
def test_a_node_that_is_down_is_named_and_hides_no_other(command: str, form: str) -> None:
    """What the others know is on stdout, whole; the name is on stderr, and the exit code is 1."""
    clock = ManualClock()
    up = MemoryStore(clock)
    chain = a_chain(up.register_space(a_space()), 1)
    put_chain(up, chain, AGENT)
    up.pin([Pin(chain.space_id, chain.names[0].key, "ops", "test")])
    alone = run({"a": up}, *command.split(), *form.split())
    both = run({"a": up, "b": Down(clock)}, *command.split(), *form.split())
    assert (alone.exit_code, both.exit_code) == (EXIT_OK, EXIT_FAILED), both.output
    assert "node b did not answer: Unavailable: connection refused" in both.stderr
    if command != "show":  # its document says it too
        assert both.stdout == alone.stdout
    none = run({"b": Down(clock), "c": Down(clock)}, *command.split())
    assert (none.exit_code, none.stdout) == (EXIT_FAILED, "")


def test_a_node_with_an_older_policy_is_named() -> None:
    """It missed a change; the newest is shown, from whichever node has it."""
    clock = ManualClock()
    behind, ahead = MemoryStore(clock), MemoryStore(clock)
    changed(ahead, 2 * DAY_S)
    text = run({"a": behind, "b": ahead}, "policy", "get")
    assert text.exit_code == EXIT_OK, text.output
    assert "version 2" in text.stdout
    assert "node a is at version 1: it catches up with the next change" in text.stdout
    assert json.loads(run({"a": behind, "b": ahead}, "policy", "get", "--json").stdout)["nodes_behind"] == {"a": 1}
    history = json.loads(run({"a": behind, "b": ahead}, "policy", "history", "--json").stdout)
    assert [row["version"] for row in history] == [1, 2]


def test_pins_of_all_nodes_are_listed_once() -> None:
    """A block that lies on two nodes has its pin on both."""
    clock = ManualClock()
    stores = {name: MemoryStore(clock) for name in "ab"}
    for store in stores.values():
        chain = a_chain(store.register_space(a_space()), 1)
        put_chain(store, chain, AGENT)
        store.pin([Pin(chain.space_id, chain.names[0].key, "ops", "test")])
    assert len(json.loads(run(stores, "pins", "--json").stdout)) == 1


def test_the_exit_codes_are_documented_in_one_place() -> None:
    """The README's table has each code that the command can end with, and no other; --help says the same."""
    codes = {value for name, value in vars(session).items() if name.startswith("EXIT_")}
    rows = re.findall(r"^\| (\d) \| ([^|]+) \|", (ROOT / "README.md").read_text(), re.MULTILINE)
    of_retention = {int(code) for code, of in rows if "every command" in of or "retention" in of}
    assert of_retention == codes
    assert {int(code) for code in re.findall(r"\b(\d) ", EXIT_CODES)} == codes
