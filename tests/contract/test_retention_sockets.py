"""The retention command against real nodes, through sockets, as an operator runs it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvstore.client import StoreClient
from kvstore.daemon.metrics import ServerMetrics
from kvstore.daemon.node import Node, NodeConfig
from kvstore.daemon.server import Server, ServerConfig
from kvstore.daemon.tokens import Tokens
from kvstore.keys import TokenChain, tenant_salt
from kvstore.limits import CAPACITY_BYTES_MIN, MIB, STRIPE_BLOCKS
from kvstore.testing import DAY_S, ManualClock
from kvstore.traffic import AGENT, CHAT
from retention.cli import build_app
from retention.policy import load_class_rules
from retention.session import EXIT_CONFLICT, EXIT_FAILED, EXIT_NOTHING, EXIT_OK, EXIT_USAGE
from tests.support.spaces import a_chain, a_space, hit_blocks, put_chain

WORKER = "correct horse battery"
OPERATOR = "staple of an operator"
BLOCKS = 6 * STRIPE_BLOCKS


class Fleet:
    """Two nodes behind Unix sockets that ask for a token, a worker's client of both, and an operator's command."""

    def __init__(self, directory: Path) -> None:
        self.clock = ManualClock()
        self.token_file = directory / "token"
        self.token_file.write_text(f"{OPERATOR}\n")
        listed = directory / "tokens.toml"
        listed.write_text(
            f'[[tokens]]\ntoken = "{WORKER}"\nroles = ["worker"]\n'
            f'[[tokens]]\ntoken = "{OPERATOR}"\nroles = ["operator"]\n'
        )
        listed.chmod(0o600)
        rules, text = load_class_rules(None)
        self.nodes: list[Node] = []
        self.servers: list[Server] = []
        for name in ("a", "b"):
            config = NodeConfig((directory / name,), 4 * CAPACITY_BYTES_MIN, segment_bytes=MIB)
            node = Node.open(config, self.clock, rules, text)
            listen = ServerConfig(name, unix_path=directory / f"{name}.sock", tokens=Tokens.open(None, listed))
            self.nodes.append(node)
            self.servers.append(Server.start(listen, node, ServerMetrics()))
        # By these names blocks are spread; the folders have others in every run.
        self.addresses = [f"{name}={server.addresses[0]}" for name, server in zip("ab", self.servers, strict=True)]
        self.client = StoreClient.connect(self.addresses, token=WORKER)

    def stop(self, at: int) -> None:
        self.servers[at].stop(1.0)

    def close(self) -> None:
        self.client.close()
        for server in self.servers:
            server.stop(1.0)
        for node in self.nodes:
            node.close()

    def run(self, *arguments: str, token_file: Path | None = None) -> Any:
        """Exit code, parsed stdout (None if empty) and stderr of one command with --json."""
        stores = [item for address in self.addresses for item in ("--store", address)]
        given = [*arguments, "--json", "--deadline", "5s", *stores, "--token-file", str(token_file or self.token_file)]
        result = CliRunner().invoke(build_app(clock=self.clock), given)
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
        return result.exit_code, json.loads(result.stdout) if result.stdout else None, result.stderr

    def done(self, *arguments: str) -> Any:
        code, document, error = self.run(*arguments)
        assert (code, error) == (EXIT_OK, ""), error
        return document


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    made = Fleet(tmp_path)
    yield made
    made.close()


def filled(fleet: Fleet) -> tuple[TokenChain, TokenChain]:
    """A shared agent chain and a tenant's chat chain, each spread over both nodes."""
    shared = a_chain(fleet.client.register_space(a_space()), BLOCKS)
    mine = a_chain(fleet.client.register_space(a_space(tenant_salt=tenant_salt("acme"))), BLOCKS)
    put_chain(fleet.client, shared, AGENT)
    put_chain(fleet.client, mine, CHAT)
    assert all(0 < node.stats()["blocks"] < 2 * BLOCKS for node in fleet.nodes)
    return shared, mine


def test_show_adds_up_over_nodes(fleet: Fleet) -> None:
    """Each block is counted once, wherever it lies."""
    filled(fleet)
    assert {row["class"]: row["blocks"] for row in fleet.done("show")["rows"]} == {"agent": BLOCKS, "chat": BLOCKS}


def test_a_policy_change_reaches_every_node(fleet: Fleet) -> None:
    """Previewed over all nodes, made on all, and kept by compare-and-set."""
    shared, mine = filled(fleet)
    fleet.clock.advance(DAY_S)
    preview = fleet.done("policy", "set", "--keep", "agent=12h")
    assert (preview["effect"]["blocks"], hit_blocks(fleet.client, shared)) == (BLOCKS, BLOCKS)
    applied = fleet.done("policy", "set", "--keep", "agent=12h", "--apply", "--expect", "1")
    assert (applied["version"], applied["effect"]["blocks"]) == (2, BLOCKS)
    assert [node.policy().rules.keep_for_s(AGENT) for node in fleet.nodes] == [DAY_S // 2] * 2
    assert (hit_blocks(fleet.client, shared), hit_blocks(fleet.client, mine)) == (0, BLOCKS)
    assert fleet.run("policy", "set", "--keep", "agent=1h", "--apply", "--expect", "1")[0] == EXIT_CONFLICT
    assert fleet.done("sweep", "--apply")["blocks"] == BLOCKS
    assert {row["class"]: row["blocks"] for row in fleet.done("show")["rows"]} == {"chat": BLOCKS}


def test_floors_must_fit_the_smallest_node(fleet: Fleet, tmp_path: Path) -> None:
    """Every node keeps the same floors, so what all nodes have together does not count."""
    _, text = load_class_rules(None)
    file = tmp_path / "policy.toml"
    for floor_bytes, expected in ((2 * CAPACITY_BYTES_MIN, EXIT_OK), (6 * CAPACITY_BYTES_MIN, EXIT_USAGE)):
        file.write_text(text.replace('floor = "0B"', f'floor = "{floor_bytes}B"', 1))
        assert fleet.run("policy", "set", str(file))[0] == expected


def test_pins_hold_wherever_a_block_lies(fleet: Fleet) -> None:
    """Pinned on its node, listed once, served past its promise, unpinned again."""
    shared, _ = filled(fleet)
    keys = [name.key.hex() for name in shared.names[::STRIPE_BLOCKS]]
    where = ["--space", shared.space_id.hex()[:12]]
    assert fleet.done("pin", *keys, *where, "--owner", "ops", "--reason", "prompt")["pinned"] == len(keys)
    assert sorted(pin["key"] for pin in fleet.done("pins")) == sorted(keys)
    fleet.clock.advance(4 * DAY_S)
    fleet.done("sweep", "--apply")
    (agent,) = [row for row in fleet.done("show")["rows"] if row["class"] == "agent"]
    assert (agent["blocks"], agent["pinned_blocks"]) == (len(keys), len(keys))
    assert fleet.done("unpin", *keys, *where)["unpinned"] == len(keys)
    assert hit_blocks(fleet.client, shared) == 0


def test_a_hold_on_one_node_keeps_the_blocks_of_all(fleet: Fleet) -> None:
    """The dry run says so, too; the hold is released by the key alone, wherever it lies."""
    shared, _ = filled(fleet)
    held = shared.names[-1].key.hex()
    fleet.done("pin", held, "--space", shared.space_id.hex(), "--owner", "court", "--reason", "case 17", "--hold")
    for choice in (["--space", shared.space_id.hex()], ["--prefix", shared.names[0].key.hex()], ["--class", "agent"]):
        code, told, error = fleet.run("purge", *choice)
        assert (code, told["pinned_blocks"], [pin["key"] for pin in told["holds"]]) == (EXIT_FAILED, 1, [held])
        assert "court (case 17)" in error
        assert fleet.run("purge", *choice, "--apply")[0] == EXIT_FAILED
    assert hit_blocks(fleet.client, shared) == BLOCKS
    assert fleet.done("unpin", held, "--owner", "court", "--release-holds")["unpinned"] == 1
    assert fleet.done("purge", "--class", "agent", "--apply")["blocks"] == BLOCKS


def test_purges_reach_every_node(fleet: Fleet) -> None:
    """A tenant's blocks and a prefix's are gone from all nodes, exactly as counted."""
    shared, mine = filled(fleet)
    assert fleet.done("purge", "--tenant", "acme")["blocks"] == BLOCKS
    assert hit_blocks(fleet.client, mine) == BLOCKS
    assert fleet.done("purge", "--tenant", "acme", "--apply")["blocks"] == BLOCKS
    root = shared.names[STRIPE_BLOCKS + 3]
    assert fleet.done("purge", "--prefix", root.key.hex(), "--apply")["blocks"] == BLOCKS - root.index
    assert (hit_blocks(fleet.client, mine), hit_blocks(fleet.client, shared)) == (0, root.index)
    assert fleet.run("purge", "--prefix", root.key.hex(), "--apply")[0] == EXIT_NOTHING


def test_a_node_that_is_down_is_named_and_hides_no_other(fleet: Fleet) -> None:
    """What can be shown and swept is; a purge, which must reach all, fails; each says so with 1."""
    _, mine = filled(fleet)
    fleet.stop(1)
    code, shown, error = fleet.run("show", "--by", "class")
    assert (code, error.count("did not answer")) == (EXIT_FAILED, 1)
    assert list(shown["nodes_failed"]) == [fleet.addresses[1]]
    assert sum(row["blocks"] for row in shown["rows"]) == fleet.nodes[0].stats()["blocks"]
    fleet.clock.advance(4 * DAY_S)
    code, effect, error = fleet.run("sweep", "--apply")
    assert (code, len(effect["nodes_failed"]), "did not answer" in error) == (EXIT_FAILED, 1, True)
    assert 0 < effect["blocks"] < BLOCKS
    held = fleet.nodes[0].stats()["purged"]
    code, document, error = fleet.run("purge", "--space", mine.space_id.hex(), "--apply", "--yes")
    assert (code, document) == (EXIT_FAILED, None)
    assert "Unavailable" in error
    assert fleet.nodes[0].stats()["purged"] == held, "nothing is removed while a node is down"


@pytest.mark.parametrize("token", ["the secret of another store", WORKER])
def test_a_wrong_token_is_refused(fleet: Fleet, tmp_path: Path, token: str) -> None:
    """An operator's token is needed for every command (but to read the policy, which workers may too)."""
    wrong = tmp_path / "wrong"
    wrong.write_text(token)
    read_policy = [] if token == WORKER else [["policy", "get"]]
    for command in (["show"], ["sweep"], ["pins"], ["purge", "--tenant", "acme"], *read_policy):
        code, document, error = fleet.run(*command, token_file=wrong)
        assert (code, document) == (EXIT_FAILED, None), command
        assert "Unauthorized" in error
