"""Pins under a purge: what is told of them beforehand and afterwards, and how a hold is released."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest
from click.testing import Result
from typer.testing import CliRunner

from kvstore.keys import TokenChain, tenant_salt
from kvstore.store import Pin
from kvstore.testing import ManualClock, MemoryStore
from kvstore.traffic import AGENT, CHAT
from retention.cli import build_app
from retention.errors import NothingMatched, SelectionInvalid
from retention.pins import home_of_pins
from retention.session import EXIT_FAILED, EXIT_NOTHING, EXIT_OK
from tests.support.spaces import a_chain, a_space, hit_blocks, put_chain


class Node:
    """One node with a chain of 4 agent blocks, and another of 3 chat blocks in a space of tenant acme."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.store = MemoryStore(self.clock)
        self.shared = a_chain(self.store.register_space(a_space()), 4)
        self.own = a_chain(self.store.register_space(a_space(tenant_salt=tenant_salt("acme"))), 3, seed=1)
        put_chain(self.store, self.shared, AGENT)
        put_chain(self.store, self.own, CHAT)

    def run(self, *arguments: str) -> Result:
        app = build_app(lambda _addresses, _token: self.store, self.clock)
        return CliRunner().invoke(app, [*arguments, "--store", "node"])

    def pin(self, chain: TokenChain, index: int, owner: str = "ops", *, hold: bool = False) -> str:
        """Pin a block; its key in hex."""
        key = chain.names[index].key
        assert self.store.pin([Pin(chain.space_id, key, owner, "case 17", hold=hold)]) == 1
        return key.hex()

    def choices(self) -> list[tuple[Sequence[str], int]]:
        """Every way to name the shared chain, with the index of the first block that goes."""
        shared = self.shared
        tokens = ",".join(map(str, shared.tokens))
        return [
            (("--space", shared.space_id.hex()), 0),
            (("--prefix", shared.names[2].key.hex()), 2),
            (("--tokens", tokens, "--from-start"), 0),
            (("--class", "agent"), 0),
        ]


@pytest.fixture
def node() -> Node:
    return Node()


def test_a_dry_run_ends_as_the_purge_would_where_a_hold_forbids_it(node: Node) -> None:
    """By whatever the blocks are named: what is in scope is shown, then refused, with the command that releases it."""
    key = node.pin(node.shared, 3, "the court", hold=True)
    for choice, _ in node.choices():
        dry, done = node.run("purge", *choice), node.run("purge", *choice, "--apply", "--yes")
        assert (dry.exit_code, done.exit_code) == (EXIT_FAILED, EXIT_FAILED), (choice, dry.output, done.output)
        assert "would purge" in dry.stdout
        assert "--apply" not in dry.stdout
        assert f"`retention unpin {key} --owner 'the court' --release-holds`" in dry.stderr
        assert "case 17" in dry.stderr
        told = json.loads(node.run("purge", *choice, "--json").stdout)
        assert [(pin["key"], pin["owner"], pin["hold"]) for pin in told["holds"]] == [(key, "the court", True)]
    assert hit_blocks(node.store, node.shared) == 4


def test_a_hold_outside_of_a_purge_forbids_nothing(node: Node) -> None:
    """Neither one in another space, nor one before the prefix that goes, though something that goes is pinned."""
    node.pin(node.shared, 2)
    node.pin(node.own, 0, "court", hold=True)
    node.pin(node.shared, 0, "court", hold=True)
    prefix = ("purge", "--prefix", node.shared.names[1].key.hex())
    assert node.run(*prefix).exit_code == EXIT_OK
    assert node.run(*prefix, "--apply").exit_code == EXIT_OK
    assert (hit_blocks(node.store, node.shared), hit_blocks(node.store, node.own)) == (1, 3)


@pytest.mark.parametrize("at", range(4))
def test_a_purge_tells_how_many_pinned_blocks_it_takes(at: int) -> None:
    """Before and after, by whatever they are named: pins are no surprise, and go with their blocks."""
    node = Node()
    node.pin(node.shared, 3)
    node.pin(node.shared, 3, "somebody else")
    node.pin(node.shared, 1)
    node.pin(node.own, 0)
    choice, first = node.choices()[at]
    blocks, pinned = 4 - first, 2 if first == 0 else 1
    dry = node.run("purge", *choice)
    assert f"would purge {blocks} blocks" in dry.stdout
    assert f"; {pinned} of them pinned: their pins go too" in dry.stdout
    told = json.loads(node.run("purge", *choice, "--apply", "--json").stdout)
    assert (told["applied"], told["blocks"], told["pinned_blocks"], told["holds"]) == (True, blocks, pinned, [])


def test_unpin_finds_the_space_by_the_key(node: Node) -> None:
    """As the runbook releases a hold; what nobody has pinned is nothing matched."""
    key = node.pin(node.own, 0, "court", hold=True)
    node.pin(node.shared, 0)
    released = node.run("unpin", key, "--owner", "court", "--release-holds")
    assert (released.exit_code, released.stdout) == (EXIT_OK, "unpinned 1 of 1 blocks\n")
    assert [pin.space_id for pin in node.store.pins()] == [node.shared.space_id]
    assert node.run("unpin", key).exit_code == EXIT_NOTHING


def test_keys_that_are_pinned_in_two_spaces_need_one_named(node: Node) -> None:
    """Nobody's pin goes by a guess."""
    one, other = node.shared.names[0].key, node.own.names[0].key
    pins = [Pin(node.shared.space_id, one, "o", "r"), Pin(node.own.space_id, other, "o", "r")]
    assert home_of_pins(pins, [one]) == node.shared.space_id
    with pytest.raises(SelectionInvalid, match="--space"):
        home_of_pins(pins, [one, other])
    with pytest.raises(NothingMatched):
        home_of_pins([], [one])


def test_a_hold_in_the_last_space_keeps_the_first(node: Node) -> None:
    """A purge of several spaces removes nothing where one of them is under a hold."""
    other = a_chain(node.store.register_space(a_space(tenant_salt=tenant_salt("acme"), model="big")), 3)
    put_chain(node.store, other, CHAT)
    last = max(node.own, other, key=lambda chain: chain.space_id)
    node.pin(last, 2, "court", hold=True)
    assert node.run("purge", "--tenant", "acme", "--apply").exit_code == EXIT_FAILED
    assert [hit_blocks(node.store, chain) for chain in (node.own, other)] == [3, 3]
