"""Purges by class and by age, from the command line to the disks of two nodes, and as every store does them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from kvstore.purges import PurgeOrder
from kvstore.store import Presence
from kvstore.traffic import AGENT, CHAT
from retention.receipt import read_receipt
from retention.session import EXIT_FAILED, EXIT_LEFT, EXIT_NOTHING, EXIT_OK, EXIT_USAGE
from tests.support.shop import BLOCKS, Shop
from tests.support.spaces import a_chain, a_space, hit_blocks, present_blocks, put_chain
from tests.support.stores import Subject, client_of, short_dir, subject

HOUR_S = 3600
SHARED = 64
"""Blocks of the agents' chain that chat uses, too."""


class Parts(Shop):
    """Two chains of agents; chat uses the beginning of one, and has one of its own, an hour younger."""

    def fill(self) -> None:
        self.clock.advance(HOUR_S)
        with client_of(*self.addresses) as client:
            self.chats = a_chain(client.register_space(a_space(revision="chat")), BLOCKS)
            put_chain(client, self.chats, CHAT)
            client.touch(self.other.space_id, self.other.names[:SHARED], traffic_class=CHAT)

    def present(self) -> tuple[int, int, int]:
        """Blocks of acme's agents, of the other agents, of chat."""
        with client_of(*self.addresses) as client:
            one, two, three = (present_blocks(client, [chain]) for chain in (self.acme, self.other, self.chats))
            return one, two, three

    def proof(self) -> tuple[str, ...]:
        return ("--apply", "--yes", "--proof", str(self.receipt), "--sign-key", str(self.key))


@pytest.fixture
def shop() -> Iterator[Parts]:
    with short_dir() as folder, ExitStack() as stack:
        shop = Parts(folder, stack)
        shop.fill()
        yield shop


PARTS: dict[str, tuple[tuple[str, ...], tuple[int, int, int], int]] = {
    "class": (("--class", "agent"), (0, SHARED, BLOCKS), SHARED),
    "class without a rule": (("--class", "class-2"), (BLOCKS, BLOCKS, 0), SHARED),
    "class by byte": (("--class", "2"), (BLOCKS, BLOCKS, 0), SHARED),
    "class of a tenant": (("--class", "agent", "--tenant", "acme"), (0, BLOCKS, BLOCKS), 0),
    "age": (("--older-than", "30m"), (0, 0, BLOCKS), 0),
    "age of a tenant": (("--older-than", "30m", "--tenant", "acme"), (0, BLOCKS, BLOCKS), 0),
}


@pytest.mark.parametrize("name", PARTS)
def test_a_part_is_counted_then_removed(shop: Parts, name: str) -> None:
    """The dry count is what then goes; what other classes use stays."""
    choice, left, shared = PARTS[name]
    dry = shop.json("purge", *choice)
    assert shop.present() == (BLOCKS, BLOCKS, BLOCKS)
    assert (dry["applied"], dry["blocks"], dry["shared_blocks"]) == (False, 3 * BLOCKS - sum(left), shared)
    assert ("other classes use too" in shop.run("purge", *choice).stdout) is (shared > 0)
    assert shop.json("purge", *choice, "--apply") == dry | {"applied": True}
    assert shop.present() == left
    assert shop.run("purge", *choice, "--apply").exit_code == EXIT_NOTHING


@pytest.mark.parametrize("name", ["class", "age of a tenant"])
def test_a_part_is_erased_with_a_receipt_that_verifies(shop: Parts, name: str) -> None:
    """Every node says what it did; a raw scan of the disks finds nothing, and finds what comes again."""
    choice, left, shared = PARTS[name]
    result = shop.run("purge", *choice, *shop.proof())
    assert result.exit_code == EXIT_OK, result.output
    assert shop.present() == left
    receipt = read_receipt(shop.receipt)
    assert receipt.complete
    assert sum(report.blocks for report in receipt.reports.values()) == 3 * BLOCKS - sum(left)
    assert sum(report.shared for report in receipt.reports.values()) == shared
    assert shop.run("verify", str(shop.receipt)).exit_code == EXIT_OK
    if name == "class":
        with client_of(*shop.addresses) as client:
            put_chain(client, shop.acme, AGENT)
        assert shop.run("verify", str(shop.receipt)).exit_code == EXIT_LEFT


def test_a_node_that_is_down_completes_a_purge_by_class_when_it_is_back(shop: Parts) -> None:
    """Without proof nothing is removed while it is down; with proof the receipt names it."""
    shop.stack.close()
    with shop.up(0):
        refused = shop.run("purge", "--class", "agent", "--apply", "--deadline", "5s")
        assert refused.exit_code == EXIT_FAILED
    with shop.up(0), shop.up(1):
        assert shop.present() == (BLOCKS, BLOCKS, BLOCKS)
    with shop.up(0):
        assert shop.run("purge", "--class", "agent", *shop.proof(), "--deadline", "5s").exit_code == EXIT_FAILED
        assert set(read_receipt(shop.receipt).failed) == {"two"}
    with shop.up(0), shop.up(1):
        assert shop.present()[0] > 0
        resumed = shop.run("resume", str(shop.receipt), "--sign-key", str(shop.key))
        assert resumed.exit_code == EXIT_OK, resumed.output
        assert shop.present() == (0, SHARED, BLOCKS)
        assert shop.run("verify", str(shop.receipt)).exit_code == EXIT_OK


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["--class", "bulk"], "agent, chat"),
        (["--class", "0"], "no class '0'"),
        (["--class", "agent", "--older-than", "3d"], "exactly one"),
        (["--class", "agent", "--prefix", "ab" * 32], "exactly one"),
        (["--older-than", "3"], "no unit"),
        (["--older-than", "-3d"], "not a duration"),
        (["--older-than", "36000d"], "as old as"),
    ],
)
def test_wrong_parts_are_refused(shop: Parts, given: list[str], says: str) -> None:
    result = shop.run("purge", *given, "--apply")
    assert result.exit_code == EXIT_USAGE, result.output
    assert says in result.stderr
    assert shop.present() == (BLOCKS, BLOCKS, BLOCKS)


@pytest.mark.parametrize("kind", ["memory", "node", "two-nodes", "encrypted"])
@pytest.mark.parametrize("erase", [False, True])
def test_every_store_carries_out_orders_by_part(kind: str, erase: bool) -> None:
    """In the same words: how many blocks went, how many stay for others, and what is left of either."""
    with subject(kind) as under_test:
        store: Any = under_test.store
        space = store.register_space(a_space())
        agents, chats = a_chain(space, 20, seed=1), a_chain(space, 20, seed=2)
        put_chain(store, agents, AGENT)
        put_chain(store, chats, CHAT)
        store.touch(space, agents.names[:8], traffic_class=CHAT)
        assert carry_out(under_test, PurgeOrder("0a" * 16, (), None, 0, class_byte=int(AGENT), erase=erase)) == (12, 8)
        assert (hit_blocks(store, agents), hit_blocks(store, chats)) == (8, 20)
        assert Presence.PURGED in store.lookup(space, agents.names[8:]).presence
        now_s = int(under_test.clock.now_s())
        under_test.clock.advance(HOUR_S)
        younger = a_chain(space, 5, seed=3)
        put_chain(store, younger, CHAT)
        assert carry_out(under_test, PurgeOrder("0b" * 16, (), None, 0, written_until_s=now_s, erase=erase)) == (28, 0)
        assert (hit_blocks(store, chats), hit_blocks(store, younger)) == (0, 5)


def carry_out(under_test: Subject, order: PurgeOrder) -> tuple[int, int]:
    """Blocks that went, and that stay for others, everywhere together; nothing is left where it was to be erased."""
    done = under_test.store.purge(order)
    assert not done.failed
    if order.erase:
        until_s = {name: report.began_s for name, report in done.answers.items()}
        assert all(found.records == 0 for found in under_test.store.leftovers(order, until_s).answers.values())
    reports = list(done.answers.values())
    return sum(report.blocks for report in reports), sum(report.shared for report in reports)
