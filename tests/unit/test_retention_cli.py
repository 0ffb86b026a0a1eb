"""The command: what it prints, what it changes, and how it ends."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from kvstore.access import TOKEN_BYTES_MAX
from kvstore.errors import Unauthorized, Unavailable
from kvstore.keys import tenant_salt
from kvstore.store import Effect, Store
from kvstore.testing import DAY_S, T0_S, TEST_RULES, ManualClock, MemoryStore
from kvstore.traffic import AGENT, CHAT, ClassRules
from retention.cli import build_app
from retention.session import (
    EXIT_CONFLICT,
    EXIT_FAILED,
    EXIT_NOTHING,
    EXIT_OK,
    EXIT_USAGE,
)
from tests.support.spaces import PAYLOAD_BYTES, a_chain, a_space, hit_blocks, put_chain

HOUR_S = 3600


class Shop:
    """The command over stores in memory, one an address; counts what was opened and closed."""

    def __init__(self, stores: Mapping[str, Store], clock: ManualClock) -> None:
        self.stores = stores
        self.clock = clock
        self.opened: list[tuple[tuple[str, ...], str | None]] = []

    def open_store(self, addresses: Sequence[str], token: str | None) -> Store:
        self.opened.append((tuple(addresses), token))
        return self.stores[addresses[0]]

    def run(self, *arguments: str, store: str = "node", environment: Mapping[str, str] | None = None) -> Result:
        app = build_app(self.open_store, self.clock)
        given = [*arguments, *(["--store", store] if store else [])]
        result = CliRunner().invoke(
            app, given, env={"REPRISE_STORE": None, "REPRISE_TOKEN_FILE": None} | dict(environment or {})
        )
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
        return result

    def ok(self, *arguments: str) -> str:
        result = self.run(*arguments)
        assert result.exit_code == EXIT_OK, result.output
        return str(result.stdout)

    def json(self, *arguments: str) -> Any:
        return json.loads(self.ok(*arguments, "--json"))


class Filled(Shop):
    """Two spaces: the shared one with 4 agent blocks, the tenant's with 3 chat blocks an hour younger."""

    def __init__(self) -> None:
        clock = ManualClock()
        self.store = MemoryStore(clock)
        super().__init__({"node": self.store}, clock)
        self.shared = a_chain(self.store.register_space(a_space()), 4)
        self.own = a_chain(self.store.register_space(a_space(tenant_salt=tenant_salt("acme"))), 3)
        put_chain(self.store, self.shared, AGENT)
        clock.advance(HOUR_S)
        put_chain(self.store, self.own, CHAT)

    def hits(self) -> tuple[int, int]:
        return hit_blocks(self.store, self.shared), hit_blocks(self.store, self.own)


@pytest.fixture
def shop() -> Filled:
    return Filled()


# --- show -----------------------------------------------------------------------------------------------------------


def test_show_lists_every_class_and_space(shop: Filled) -> None:
    """Bytes, blocks, the oldest and the next to expire, per class and space."""
    shown = shop.json("show")
    rows = shown["rows"]
    assert shown["nodes_failed"] == {}
    assert [(row["class"], row["space"], row["blocks"], row["payload_bytes"]) for row in rows] == [
        ("agent", shop.shared.space_id.hex(), 4, 4 * PAYLOAD_BYTES),
        ("chat", shop.own.space_id.hex(), 3, 3 * PAYLOAD_BYTES),
    ]
    assert [row["oldest_written_s"] for row in rows] == [T0_S, T0_S + HOUR_S]
    assert [row["next_expiry_s"] for row in rows] == [T0_S + 3 * DAY_S, T0_S + HOUR_S + 7 * DAY_S]
    assert [row["model"] for row in rows] == ["tiny-llama"] * 2
    text = shop.ok("show")
    for part in (shop.shared.space_id.hex()[:12], "tiny-llama (tenant)", "1h ago", "in 2d23h", "in 7d", "3.9 KiB"):
        assert part in text, text


def test_show_groups_by_class_or_space(shop: Filled) -> None:
    """Grouped rows add up to the same blocks; the other column says all."""
    put_chain(shop.store, shop.own, AGENT)
    put_chain(shop.store, a_chain(shop.own.space_id, 2, seed=5), AGENT)
    by_class = shop.json("show", "--by", "class")["rows"]
    assert {row["class"]: row["blocks"] for row in by_class} == {"agent": 6, "chat": 3}
    assert {row["space"] for row in by_class} == {None}
    by_space = shop.json("show", "--by", "space")["rows"]
    assert {row["space"]: row["blocks"] for row in by_space} == {
        shop.shared.space_id.hex(): 4,
        shop.own.space_id.hex(): 5,
    }
    assert "all" in shop.ok("show", "--by", "space")


def test_show_of_one_space(shop: Filled) -> None:
    """A space is named by its first digits."""
    rows = shop.json("show", "--space", shop.own.space_id.hex()[:8])["rows"]
    assert [row["space"] for row in rows] == [shop.own.space_id.hex()]
    assert shop.run("show", "--space", "00000000").exit_code == EXIT_NOTHING
    assert shop.run("show", "--space", "tiny").exit_code == EXIT_USAGE


def test_show_counts_expired_and_pinned_blocks_apart(shop: Filled) -> None:
    """Past the promise but not swept is said, since such blocks are not served any more."""
    key, space = shop.shared.names[0].key.hex(), shop.shared.space_id.hex()
    shop.ok("pin", key, "--space", space, "--owner", "o", "--reason", "r")
    shop.clock.advance(3 * DAY_S)
    (agent, chat) = shop.json("show", "--by", "class")["rows"]
    assert (agent["expired_blocks"], agent["pinned_blocks"], agent["next_expiry_s"]) == (3, 1, None)
    assert (chat["expired_blocks"], chat["pinned_blocks"]) == (0, 0)


def test_show_says_how_many_blocks_no_cipher_key_reads(shop: Filled, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only where there are any."""
    assert shop.json("show")["blocks_without_key"] == 0
    assert "cipher key" not in shop.ok("show")
    told = shop.store.stats() | {"blocks_without_key": 1234}
    monkeypatch.setattr(shop.store, "stats", lambda **_: told)
    assert shop.json("show")["blocks_without_key"] == 1234
    assert "1,234 blocks" in shop.ok("show")


def test_show_of_an_empty_store() -> None:
    """Nothing stored is a result, not an error."""
    clock = ManualClock()
    shop = Shop({"node": MemoryStore(clock)}, clock)
    assert shop.json("show") == {"rows": [], "nodes_failed": {}, "blocks_without_key": 0}
    assert shop.ok("show") == "no blocks are stored\n"


class Down(MemoryStore):
    """A node that does not answer."""

    def spaces(self, **options: Any) -> Any:
        raise Unavailable("connection refused")

    scan = policy = policy_history = pins = sweep = stats = set_policy = spaces  # type: ignore[assignment]


def test_show_names_a_node_that_is_down_and_shows_the_others(shop: Filled) -> None:
    """What the others hold is shown once each, and the exit code says that it is not all."""
    second = MemoryStore(shop.clock)
    put_chain(second, a_chain(second.register_space(a_space()), 2, seed=9), AGENT)
    shop.stores = {"one": shop.store, "two": second, "three": Down(shop.clock)}
    result = shop.run("show", "--by", "class", "--json", "--store", "one", "--store", "two", store="three")
    assert result.exit_code == EXIT_FAILED
    shown = json.loads(result.stdout)
    assert {row["class"]: row["blocks"] for row in shown["rows"]} == {"agent": 6, "chat": 3}
    assert shown["nodes_failed"] == {"three": "Unavailable: connection refused"}
    assert result.stderr == "node three did not answer: Unavailable: connection refused\n"


def test_show_says_nothing_of_a_node_that_did_not_answer() -> None:
    """An empty node beside one that is down does not mean that nothing is stored."""
    clock = ManualClock()
    shop = Shop({"node": MemoryStore(clock), "other": Down(clock)}, clock)
    result = shop.run("show", "--store", "other")
    assert (result.exit_code, result.stdout) == (EXIT_FAILED, "no blocks are stored on the nodes that answered\n")


def test_all_nodes_down_is_a_failure() -> None:
    """Each command ends with 1 and one line, not a traceback."""
    clock = ManualClock()
    shop = Shop({"node": Down(clock)}, clock)
    for command in (["show"], ["policy", "get"], ["policy", "set", "--keep", "agent=2d"], ["sweep"], ["pins"]):
        result = shop.run(*command)
        assert (result.exit_code, result.stdout) == (EXIT_FAILED, ""), command
        assert "Unavailable: connection refused" in result.stderr


# --- policy ---------------------------------------------------------------------------------------------------------


def test_policy_get_shows_the_policy_in_force(shop: Filled) -> None:
    """As a table, as JSON, and as a document that `policy set` takes."""
    document = shop.json("policy", "get")
    assert document["version"] == 1
    assert ClassRules.from_json(document["classes"]) == TEST_RULES
    table = shop.ok("policy", "get")
    assert "agent" in table
    assert "3d" in table
    assert '[class.chat]\nkeep_for = "7d"' in shop.ok("policy", "get", "--toml")


def test_a_policy_change_is_shown_and_not_made_without_apply(shop: Filled) -> None:
    """Dry, the change says what it would drop and nothing is dropped."""
    shop.clock.advance(DAY_S)
    text = shop.ok("policy", "set", "--keep", "agent=12h")
    for part in ("keep_for", "3d", "12h", "would drop", "4 blocks would expire at once", "--apply"):
        assert part in text, text
    document = shop.json("policy", "set", "--keep", "agent=12h")
    assert (document["effect"]["applied"], document["effect"]["blocks"], document["version"]) == (False, 4, 1)
    assert shop.json("policy", "get")["version"] == 1
    assert shop.hits() == (4, 3)


def test_a_shrunk_policy_drops_what_it_said_and_nothing_else(shop: Filled) -> None:
    """The applied effect equals the previewed one; other classes keep every block."""
    shop.clock.advance(DAY_S)
    previewed = shop.json("policy", "set", "--keep", "agent=12h")["effect"]
    applied = shop.json("policy", "set", "--keep", "agent=12h", "--apply")["effect"]
    assert applied == previewed | {"applied": True}
    assert shop.hits() == (0, 3)
    policy = shop.store.policy()
    assert (policy.version, policy.rules.keep_for_s(AGENT), policy.rules.keep_for_s(CHAT)) == (2, DAY_S // 2, 7 * DAY_S)
    assert shop.json("sweep", "--apply")["blocks"] == 4


def test_an_applied_change_shows_first_what_it_drops(shop: Filled) -> None:
    """Also with --apply, what goes is listed."""
    shop.clock.advance(DAY_S)
    text = shop.ok("policy", "set", "--keep", "agent=12h", "--apply")
    assert "the change drops" in text
    assert "4 blocks expired at once" in text


def test_a_longer_promise_drops_nothing(shop: Filled) -> None:
    """Blocks already stored profit from it at once."""
    text = shop.ok("policy", "set", "--keep", "agent=9d", "--keep", "chat=9d", "--apply")
    assert "no stored block loses its promise" in text
    assert "the policy is at version 2 now" in text
    shop.clock.advance(8 * DAY_S)
    assert shop.hits() == (4, 3)


def test_a_policy_file_is_taken_as_written(shop: Filled, tmp_path: Path) -> None:
    """Its text, comments and all, becomes the text in force; the same file again changes nothing."""
    file = tmp_path / "policy.toml"
    file.write_text(
        shop.ok("policy", "get", "--toml") + '# ours\n[class.batch]\nbyte = 16\nkeep_for = "1h"\npriority = 1\n'
    )
    changes = shop.json("policy", "set", str(file), "--apply")["changes"]
    assert [(change["class"], change["before"]) for change in changes] == [("batch", None)]
    assert shop.store.policy().text == file.read_text()
    assert "no class changes" in shop.ok("policy", "set", str(file))


def test_a_change_for_an_older_version_is_a_conflict(shop: Filled) -> None:
    """--expect ties the change to the policy that was looked at."""
    shop.ok("policy", "set", "--keep", "agent=2d", "--apply", "--expect", "1")
    result = shop.run("policy", "set", "--keep", "agent=1d", "--apply", "--expect", "1")
    assert result.exit_code == EXIT_CONFLICT
    assert "version 2, not 1" in result.stderr
    assert shop.store.policy().rules.keep_for_s(AGENT) == 2 * DAY_S


def test_history_says_who_changed_what_and_when(shop: Filled) -> None:
    """Every change with its author; without --author it is the user of the command."""
    shop.ok("policy", "set", "--keep", "agent=2d", "--apply", "--author", "\u00c5sa")
    shop.clock.advance(HOUR_S)
    shop.ok("policy", "set", "--keep", "chat=8d", "--apply")
    first, second, third = shop.json("policy", "history")
    assert (first["version"], first["changes"]) == (1, None)
    assert (second["version"], second["author"]) == (2, "\u00c5sa")
    assert [change["class"] for change in second["changes"]] == ["agent"]
    assert third["changed_s"] - second["changed_s"] == HOUR_S
    assert "@" in third["author"]
    text = shop.ok("policy", "history")
    assert "\u00c5sa" in text
    assert "8d" in text


def test_rollback_is_a_new_version_that_says_first_what_it_drops(shop: Filled) -> None:
    """The rules of then are in force again, by the same steps as any change."""
    shop.ok("policy", "set", "--keep", "agent=9d", "--apply")
    shop.clock.advance(4 * DAY_S)
    dry = shop.ok("policy", "rollback", "1")
    assert "4 blocks would expire at once" in dry
    assert "nothing was changed" in dry
    assert shop.store.policy().version == 2
    done = shop.json("policy", "rollback", "1", "--apply", "--expect", "2")
    assert (done["version"], done["effect"]["blocks"]) == (3, 4)
    assert shop.store.policy().rules == shop.store.policy_history()[0].rules
    assert shop.run("policy", "rollback", "1", "--apply", "--expect", "2").exit_code == EXIT_CONFLICT


def test_what_is_not_remembered_cannot_come_back(shop: Filled) -> None:
    result = shop.run("policy", "rollback", "7", "--apply")
    assert result.exit_code == EXIT_NOTHING
    assert "known are 1..1" in result.stderr


def test_diff_compares_versions_and_documents(shop: Filled, tmp_path: Path) -> None:
    """In the order given; one argument is compared with what is in force."""
    file = tmp_path / "policy.toml"
    file.write_text(shop.ok("policy", "get", "--toml"))
    shop.ok("policy", "set", "--keep", "agent=2d", "--apply")
    keeps = [
        [(change["before"]["keep_for_s"], change["after"]["keep_for_s"]) for change in changes]
        for arguments in (["1"], ["2", "1"], [str(file), "2"], ["2"])
        for changes in [shop.json("policy", "diff", *arguments)["changes"]]
    ]
    assert keeps == [[(3 * DAY_S, 2 * DAY_S)], [(2 * DAY_S, 3 * DAY_S)], [(3 * DAY_S, 2 * DAY_S)], []]
    assert shop.run("policy", "diff", "9").exit_code == EXIT_NOTHING
    assert shop.run("policy", "diff", str(tmp_path / "none.toml")).exit_code == EXIT_USAGE


class Raced(MemoryStore):
    """A store whose policy another operator changes right after it was read."""

    def policy(self, **options: Any) -> Any:
        policy = super().policy(**options)
        rules = ClassRules((replace(policy.rules.rules[0], keep_for_s=60), policy.rules.rules[1]))
        super().set_policy(rules, "theirs", expected_version=policy.version, apply=True)
        return policy


def test_losing_against_another_operator_changes_nothing() -> None:
    """Whoever comes second is told, and the first one's policy stays."""
    clock = ManualClock()
    store = Raced(clock)
    result = Shop({"node": store}, clock).run("policy", "set", "--keep", "agent=2d", "--apply")
    assert result.exit_code == EXIT_CONFLICT
    assert "conflict" in result.stderr
    assert MemoryStore.policy(store).text == "theirs"


@pytest.mark.parametrize(
    ("capacity_bytes", "floor", "code"), [(100 * 1024**2, "90MiB", EXIT_OK), (100 * 1024**2, "101MiB", EXIT_USAGE)]
)
def test_floors_beyond_the_capacity_are_refused(tmp_path: Path, capacity_bytes: int, floor: str, code: int) -> None:
    """The store's own capacity is what the guarantees must fit into."""
    clock = ManualClock()
    shop = Shop({"node": MemoryStore(clock, capacity_bytes=capacity_bytes)}, clock)
    file = tmp_path / "policy.toml"
    file.write_text(shop.ok("policy", "get", "--toml").replace('"0B"', f'"{floor}"', 1))
    assert shop.run("policy", "set", str(file), "--apply").exit_code == code


# --- sweep ----------------------------------------------------------------------------------------------------------


def test_sweep_is_dry_by_default(shop: Filled) -> None:
    """Without --apply it only says; with it, it does exactly that."""
    shop.clock.advance(3 * DAY_S)
    assert "would remove 4 blocks (3.9 KiB)" in shop.ok("sweep")
    assert len(shop.store.scan()[0]) == 7
    applied = shop.json("sweep", "--apply")
    assert applied["removed"] == [
        {"class": "agent", "space": shop.shared.space_id.hex(), "blocks": 4, "payload_bytes": 4 * PAYLOAD_BYTES}
    ]
    assert len(shop.store.scan()[0]) == 3
    assert "removed 0 blocks" in shop.ok("sweep", "--apply")


class Partial(MemoryStore):
    """Nodes of which one does not answer."""

    def sweep(self, **options: Any) -> Effect:
        return replace(super().sweep(**options), nodes_failed={"10.0.0.2:7071": "timed out"})

    def spaces(self, **options: Any) -> Any:
        raise Unavailable("10.0.0.2:7071 timed out")


def test_sweep_names_nodes_that_did_not_answer() -> None:
    """The rest is swept and shown, the node named, the exit code 1."""
    clock = ManualClock()
    store = Partial(clock)
    put_chain(store, a_chain(store.register_space(a_space()), 2), AGENT)
    clock.advance(3 * DAY_S)
    result = Shop({"node": store}, clock).run("sweep", "--apply")
    assert result.exit_code == EXIT_FAILED
    assert "removed 2 blocks" in result.stdout
    assert result.stderr == "node 10.0.0.2:7071 did not answer: timed out\n"


class StopsItself(MemoryStore):
    """A store that sends this process a signal with its second sweep, as an operator would."""

    def __init__(self, clock: ManualClock, number: signal.Signals) -> None:
        super().__init__(clock)
        self.number = number
        self.sweeps = 0

    def sweep(self, **options: Any) -> Effect:
        self.sweeps += 1
        if self.sweeps == 2:
            os.kill(os.getpid(), self.number)
        return super().sweep(**options)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_sweep_loop_ends_cleanly_on_a_signal(number: signal.Signals) -> None:
    """The sweep under way is finished and reported, then the command ends with 0 and old handlers are back."""
    handlers = [signal.getsignal(item) for item in (signal.SIGTERM, signal.SIGINT)]
    store = StopsItself(ManualClock(), number)
    result = Shop({"node": store}, ManualClock()).run("sweep", "--loop", "--every", "1s", "--apply", "--json")
    assert result.exit_code == EXIT_OK
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert [line["event"] for line in lines] == ["sweep", "sweep"]
    assert [signal.getsignal(item) for item in (signal.SIGTERM, signal.SIGINT)] == handlers


class DownAtFirst(StopsItself):
    """A store that is down for the first sweep, and is asked to stop with the third."""

    def sweep(self, **options: Any) -> Effect:
        if self.sweeps == 0:
            self.sweeps += 1
            raise Unavailable("connection refused")
        return super().sweep(**options)


def test_the_sweep_loop_outlives_a_node_that_is_down() -> None:
    """A failed sweep is reported; the next one works, and the command ends with what was last."""
    store = DownAtFirst(ManualClock(), signal.SIGTERM)
    result = Shop({"node": store}, ManualClock()).run("sweep", "--loop", "--every", "1s", "--apply")
    assert result.exit_code == EXIT_OK
    assert result.stdout.splitlines() == [
        "sweep failed: Unavailable: connection refused",
        "sweep: removed 0 blocks (0 B)",
    ]


# --- pins -----------------------------------------------------------------------------------------------------------


def test_pin_list_and_unpin(shop: Filled) -> None:
    """A pin shows who, why and until when; it holds past expiry until it is taken away."""
    key, space = shop.shared.names[0].key.hex(), shop.shared.space_id.hex()[:10]
    assert shop.json("pin", key, "--space", space, "--owner", "ops", "--reason", "prompt", "--for", "7d") == {
        "asked": 1,
        "pinned": 1,
    }
    assert shop.json("pins") == [
        {
            "space": shop.shared.space_id.hex(),
            "key": key,
            "owner": "ops",
            "reason": "prompt",
            "until_s": int(T0_S) + HOUR_S + 7 * DAY_S,
            "hold": False,
        }
    ]
    text = shop.ok("pins")
    assert key in text
    assert "in 7d" in text
    shop.clock.advance(4 * DAY_S)
    assert shop.hits() == (1, 3)
    assert shop.ok("unpin", key, "--space", space) == "unpinned 1 of 1 blocks\n"
    assert shop.hits() == (0, 3)


def test_a_legal_hold_refuses_a_purge_by_name_until_it_is_released(shop: Filled) -> None:
    """The command says who holds what and why; nothing is removed; released, the purge goes through."""
    key, space = shop.shared.names[0].key.hex(), shop.shared.space_id.hex()[:10]
    shop.ok("pin", key, "--space", space, "--owner", "court", "--reason", "case 17", "--hold")
    assert "hold" in shop.ok("pins")
    refused = shop.run("purge", "--space", space, "--apply")
    assert refused.exit_code == EXIT_FAILED
    assert "court" in refused.stderr
    assert shop.run("unpin", key, "--space", space).exit_code == EXIT_FAILED
    assert shop.hits() == (4, 3)
    shop.ok("unpin", key, "--space", space, "--owner", "court", "--release-holds")
    assert "purged 4 blocks" in shop.ok("purge", "--space", space, "--apply")
    assert "no block is pinned" in shop.ok("pins")


def test_pins_of_absent_blocks_are_counted(shop: Filled) -> None:
    """Some absent is a failure, all absent is nothing matched, and what was there is pinned."""
    key, absent, space = shop.shared.names[0].key.hex(), "ab" * 32, shop.shared.space_id.hex()
    who = ["--space", space, "--owner", "o", "--reason", "r"]
    result = shop.run("pin", key, absent, *who)
    assert (result.exit_code, result.stdout) == (EXIT_FAILED, "pinned 1 of 2 blocks; 1 not stored\n")
    assert shop.run("pin", absent, *who).exit_code == EXIT_NOTHING
    assert shop.run("unpin", absent, "--space", space).exit_code == EXIT_NOTHING
    assert len(shop.json("pins")) == 1


def test_names_cannot_steer_the_terminal(shop: Filled) -> None:
    """Markup and escape sequences in an owner's name are shown, not obeyed."""
    key, space = shop.shared.names[0].key.hex(), shop.shared.space_id.hex()
    shop.ok("pin", key, "--space", space, "--owner", "[/bold] \x1b[2J", "--reason", "[red]")
    text = shop.ok("pins")
    assert "\x1b" not in text
    assert "[/bold]" in text
    assert "[red]" in text


# --- purge ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("choose", "left"),
    [
        (lambda shop: ["--space", shop.shared.space_id.hex()[:8]], (0, 3)),
        (lambda shop: ["--tenant", "acme"], (4, 0)),
        (lambda shop: ["--prefix", shop.shared.names[1].key.hex()], (1, 3)),
    ],
    ids=["space", "tenant", "prefix"],
)
def test_purge_counts_first_and_removes_with_apply(
    shop: Filled, choose: Callable[[Filled], list[str]], left: tuple[int, int]
) -> None:
    """The dry count equals the applied one; lookups of what was purged give 0, all else still hits."""
    choice = choose(shop)
    dry = shop.json("purge", *choice)
    assert shop.hits() == (4, 3)
    assert "would purge" in shop.ok("purge", *choice)
    applied = shop.json("purge", *choice, "--apply")
    assert applied == dry | {"applied": True}
    assert applied["blocks"] == 7 - sum(left)
    assert shop.hits() == left
    assert shop.store.stats()["purged"] == 7 - sum(left)


def test_purge_of_nothing_says_so(shop: Filled) -> None:
    """No match is its own exit code, and nothing is removed."""
    for choice in (["--space", "0" * 8], ["--tenant", "nobody"], ["--prefix", "0" * 64]):
        result = shop.run("purge", *choice, "--apply", "--yes")
        assert result.exit_code == EXIT_NOTHING
        assert (result.stdout, "nothing matched" in result.stderr) == ("", True)
        result = shop.run("purge", *choice, "--json")
        assert result.exit_code == EXIT_NOTHING
        assert json.loads(result.stdout) | {"whole_spaces": True} == {
            "applied": False, "blocks": 0, "payload_bytes": 0, "loose_blocks": 0, "shared_blocks": 0,
            "whole_spaces": True, "spaces": {}, "opaque_spaces": 0, "pinned_blocks": 0, "holds": [],
        }  # fmt: skip
    assert shop.hits() == (4, 3)


def test_purge_says_that_states_go_too(shop: Filled) -> None:
    """A space may hold states and no blocks: what is taken away is not called nothing."""
    empty = a_chain(shop.store.register_space(a_space(tenant_salt=tenant_salt("states"))), 2)
    assert shop.store.put_state(empty.space_id, empty.state_name(1), b"state")
    text = shop.ok("purge", "--tenant", "states", "--apply")
    assert text == "purged 0 blocks (0 B) and all states in 1 space\n"
    assert shop.store.get_state(empty.space_id, empty.state_name(1)) is None
    text = shop.ok("purge", "--prefix", shop.shared.names[3].key.hex())
    assert text.startswith("would purge 1 block (1000 B) and the states under them in 1 space\n")
    assert shop.json("purge", "--prefix", shop.shared.names[3].key.hex())["whole_spaces"] is False
    assert shop.json("purge", "--tenant", "states")["whole_spaces"] is True


# --- wrong use ------------------------------------------------------------------------------------------------------

KEY = "ab" * 32
PIN = ["--owner", "o", "--reason", "r"]
BAD_INPUT: dict[str, tuple[list[str], str]] = {
    "no such command": (["keep"], "No such command"),
    "group by nothing known": (["show", "--by", "model"], "class"),
    "policy from nowhere": (["policy", "set"], "either a policy FILE or"),
    "policy from both": (["policy", "set", "x.toml", "--keep", "agent=2d"], "either a policy FILE or"),
    "absent policy file": (["policy", "set", "/absent/policy.toml"], "cannot be read"),
    "keep without duration": (["policy", "set", "--keep", "agent"], "CLASS=DURATION"),
    "keep without class": (["policy", "set", "--keep", "=2d"], "CLASS=DURATION"),
    "keep without unit": (["policy", "set", "--keep", "agent=2"], "no unit"),
    "keep for nothing": (["policy", "set", "--keep", "agent=0s"], "outside 1s"),
    "keep for less than nothing": (["policy", "set", "--keep", "agent=-2d"], "not a duration"),
    "keep for ever": (["policy", "set", "--keep", "agent=36499d"], "outside 1s"),
    "keep twice": (["policy", "set", "--keep", "agent=2d", "--keep", "agent=3d"], "twice"),
    "keep for an unknown class": (["policy", "set", "--keep", "bulk=2d"], "no class 'bulk'"),
    "sweep without pause": (["sweep", "--loop", "--every", "0s"], "apart"),
    "sweep every number": (["sweep", "--loop", "--every", "5"], "no unit"),
    "pin without owner": (["pin", KEY, "--space", "0" * 8, "--reason", "r"], "--owner"),
    "pin without key": (["pin", "--space", "0" * 8, *PIN], "KEY"),
    "pin of half a key": (["pin", "abcd", "--space", "SHARED", *PIN], "64 hex digits"),
    "pin for no time": (["pin", KEY, "--space", "SHARED", *PIN, "--for", "0s"], "outside 1s"),
    "pin for a number": (["pin", KEY, "--space", "SHARED", *PIN, "--for", "7"], "no unit"),
    "pin in a space too short": (["pin", KEY, "--space", "0", *PIN], "8..64"),
    "purge of everything": (["purge", "--apply"], "exactly one of"),
    "purge of two things": (["purge", "--tenant", "a", "--prefix", KEY], "exactly one of"),
    "purge of half a prefix": (["purge", "--prefix", "abcd"], "64 hex digits"),
    "purge of a tenant too long": (["purge", "--tenant", "x" * 600], "512 bytes"),
    "deadline of nothing": (["show", "--deadline", "0s"], "longer than 0 s"),
    "deadline without unit": (["show", "--deadline", "5"], "ms"),
    "absent token file": (["show", "--token-file", "/absent/token"], "cannot be read"),
}


@pytest.mark.parametrize("case", sorted(BAD_INPUT))
def test_wrong_use_ends_with_2_and_says_what_to_do(shop: Filled, case: str) -> None:
    """Nothing is changed, stdout stays empty, and the message names the fault."""
    arguments, reason = BAD_INPUT[case]
    result = shop.run(*[shop.shared.space_id.hex() if item == "SHARED" else item for item in arguments])
    assert (result.exit_code, result.stdout) == (EXIT_USAGE, ""), result.output
    assert reason in re.sub(r"[\s│]+", " ", result.stderr), result.stderr
    assert shop.hits() == (4, 3)
    assert (shop.store.policy().version, shop.store.pins()) == (1, [])


def test_a_store_must_be_named(shop: Filled) -> None:
    """By option or by environment; without either the message says how."""
    result = shop.run("show", store="")
    assert result.exit_code == EXIT_USAGE
    assert "REPRISE_STORE" in result.stderr
    result = shop.run("show", "--json", store="", environment={"REPRISE_STORE": "node"})
    assert result.exit_code == EXIT_OK
    assert shop.opened[-1] == (("node",), None)


def test_the_token_comes_from_a_file(shop: Filled, tmp_path: Path) -> None:
    """Line ends are not part of it; empty, binary and endless files are refused."""
    file = tmp_path / "token"
    file.write_text("a-secret-long-enough\n")
    shop.ok("show", "--token-file", str(file))
    assert shop.opened[-1] == (("node",), "a-secret-long-enough")
    for content in (b"", b" \n", b"\xff\xfe", b"x" * (TOKEN_BYTES_MAX + 1)):
        file.write_bytes(content)
        assert shop.run("show", "--token-file", str(file)).exit_code == EXIT_USAGE


class Refuses(MemoryStore):
    """A node that refuses the token."""

    def spaces(self, **options: Any) -> Any:
        raise Unauthorized("wrong token")

    sweep = spaces  # type: ignore[assignment]


def test_a_wrong_token_is_a_failure_that_says_so() -> None:
    """Unauthorized is named, not shown as an empty store."""
    clock = ManualClock()
    shop = Shop({"node": Refuses(clock)}, clock)
    for command in (["show"], ["sweep", "--apply"], ["sweep", "--loop", "--apply"]):
        result = shop.run(*command)
        assert result.exit_code == EXIT_FAILED
        assert "Unauthorized: wrong token" in result.stderr


class Counted(MemoryStore):
    """Counts how often it was closed."""

    closed = 0

    def close(self) -> None:
        self.closed += 1


def test_whatever_was_opened_is_closed() -> None:
    """After success and after failure."""
    clock = ManualClock()
    store = Counted(clock)
    shop = Shop({"node": store}, clock)
    shop.ok("show")
    shop.run("purge", "--tenant", "nobody")
    shop.run("policy", "set", "--keep", "x=1d")
    assert store.closed == len(shop.opened) == 4


def test_every_command_has_help() -> None:
    """Help exits with 0, and the first page names the exit codes."""
    clock = ManualClock()
    shop = Shop({}, clock)
    for command in ([], ["show"], ["policy"], ["policy", "get"], ["policy", "set"], ["sweep"], ["pin"], ["unpin"]):
        assert shop.run(*command, "--help", store="").exit_code == EXIT_OK
    assert "4 nothing matched" in re.sub(r"\s+", " ", shop.run("--help", store="").stdout)


@pytest.mark.parametrize("group", [[], ["policy"]])
def test_the_summaries_of_commands_fit_their_line(group: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """On a terminal of 80 columns no summary is cut short."""
    monkeypatch.setenv("COLUMNS", "80")
    text = Shop({}, ManualClock()).run(*group, "--help", store="").stdout
    assert "Commands:" in text or "Commands" in text
    assert "..." not in text.split("Commands", 1)[1]


def test_the_module_runs_without_a_store() -> None:
    """`python -m retention --help` works, and a node that is not there is a failure within the deadline."""
    root = Path(__file__).resolve().parents[2]

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "retention", *arguments]
        return subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=120, check=False)

    assert run("--help").returncode == EXIT_OK
    absent = run("show", "--store", "unix:/absent/reprise.sock", "--deadline", "2s")
    assert absent.returncode == EXIT_FAILED, absent.stderr
    assert "Unavailable" in absent.stderr
    assert "Traceback" not in absent.stderr
