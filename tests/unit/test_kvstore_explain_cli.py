"""`reprise store explain` of keys and requests, over nodes that are up or down, and how an account reads."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from kvstore.account import Account, Memories, account_of
from kvstore.cli import build_app
from kvstore.explain_cli import account_rows
from kvstore.keys import BlockKey, TokenChain, encode_space, space_id
from kvstore.purges import PurgeOrder, PurgeReport
from kvstore.store import BlockInfo, Pin, Policy, Presence, Sighting
from kvstore.testing import DAY_S, T0_S, TEST_RULES, MemoryStore
from kvstore.traffic import AGENT, CHAT
from retention.policy import load_class_rules
from tests.support.spaces import BLOCK_TOKENS, a_chain, a_space, put_chain
from tests.support.stores import ManualClock, open_memory, served, short_dir

RETIRED = 42
"""A class that no rule names."""


@dataclass
class Served:
    """A chain of three blocks in two nodes, and the addresses of those; the second can be stopped."""

    chain: TokenChain
    addresses: list[str]
    stores: list[MemoryStore]
    stop_second: Any


@pytest.fixture
def nodes() -> Iterator[Served]:
    with ExitStack() as stack, ExitStack() as second:
        clock = ManualClock()
        stores, addresses = [], []
        for owner in (stack, second):
            store = open_memory(clock)
            folder = stack.enter_context(short_dir())
            server = owner.enter_context(served(store, folder))
            stores.append(store)
            addresses.append(server.addresses[1])
        chain = a_chain(stores[0].register_space(a_space()), 3)
        put_chain(stores[0], chain, AGENT)
        yield Served(chain, addresses, stores, second.close)


def run(*arguments: str, stores: list[str] | None = None) -> Result:
    given = [*arguments, *(part for address in stores or () for part in ("--store", address))]
    return CliRunner().invoke(build_app(load_class_rules), ["explain", *given], env={"REPRISE_STORE": None})


def test_a_key_is_told_of_by_whichever_node_has_it(nodes: Served) -> None:
    """In JSON and for people, without naming the space."""
    key = nodes.chain.names[1].key
    told = run(key.hex(), "--json", stores=nodes.addresses)
    assert told.exit_code == 0, told.output
    account = json.loads(told.stdout)
    assert (account["presence"], account["space"], account["index"]) == ("present", nodes.chain.space_id.hex(), 1)
    assert (account["written_s"], account["promised_until_s"]) == (T0_S, T0_S + 3 * DAY_S)
    assert account["touches"] == [{"class": "agent", "touched_s": T0_S, "until_s": T0_S + 3 * DAY_S, "ruled": True}]
    assert (account["removed"], account["policy_version"], account["nodes_failed"]) == (None, 1, {})
    text = run(key.hex(), stores=nodes.addresses).stdout
    for part in (key.hex(), "tiny-llama", "4 to 7 of its prompt", "touched by agent", "promised until", "version 1"):
        assert part in text, text


def test_a_node_that_is_down_is_named_and_hides_no_other(nodes: Served) -> None:
    """The other's answer is shown, and the exit code is 1; what only the lost one could know is unknown."""
    nodes.stop_second()
    told = run(nodes.chain.names[0].key.hex(), "--json", "--deadline", "5s", stores=nodes.addresses)
    assert told.exit_code == 1
    assert json.loads(told.stdout)["presence"] == "present"
    assert f"node {nodes.addresses[1]} did not answer" in told.stderr
    unknown = run(BlockKey(bytes(32)).hex(), "--json", "--deadline", "5s", stores=nodes.addresses)
    assert json.loads(unknown.stdout)["presence"] == "unreachable"


def test_a_request_is_told_with_the_account_of_its_first_miss(nodes: Served, tmp_path: Path) -> None:
    """What the log says of the moment goes first; what the store knows of the block follows."""
    log = tmp_path / "access.jsonl"
    log.write_text(json.dumps(a_record(nodes.chain)) + "\n")
    nodes.stores[0].delete(nodes.chain.space_id, [nodes.chain.names[1].key])
    told = run("req-1", "--log", str(log), "--json", stores=nodes.addresses)
    assert told.exit_code == 0, told.output
    (explanation,) = json.loads(told.stdout)
    assert (explanation["cause"], explanation["block"]) == ("purged", 1)
    removed = explanation["account"]["removed"]
    assert (removed["reason"], removed["at_s"], removed["policy_version"]) == ("purged", T0_S, 1)
    reused = explanation["reused"]
    assert (reused["presence"], reused["index"], reused["promised_until_s"]) == ("present", 0, T0_S + 3 * DAY_S)
    text = run("req-1", "--log", str(log), stores=nodes.addresses).stdout
    for part in ("purged: block 1", "first block missed", "not stored any more", "last block reused", "promised until"):
        assert part in text
    alone = run("req-1", "--log", str(log), "--json")
    assert (alone.exit_code, json.loads(alone.stdout)[0]["account"]) == (0, None)


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ("cmpl-a", ["cmpl-a-0", "cmpl-a-1"]),
        ("cmpl-a-1", ["cmpl-a-1"]),
        ("chat-b", ["chat-b"]),
        ("chat-b-0", ["chat-b"]),
        ("c-1", ["c-1"]),
        ("cmpl", []),
    ],
)
def test_a_request_is_found_with_the_number_of_its_prompt_and_without(
    nodes: Served, tmp_path: Path, asked: str, told: list[str]
) -> None:
    """vLLM numbers the prompts of a completion behind the id that its client knows; a record of the very id is the one
    that is meant.
    """
    log = tmp_path / "access.jsonl"
    names = ["cmpl-a-0", "chat-b", "cmpl-a-1", "cmpl-ab-0", "c", "c-1", "c-1-0"]
    log.write_text("".join(json.dumps(a_record(nodes.chain) | {"request_id": name}) + "\n" for name in names))
    done = run(asked, "--log", str(log), "--json")
    assert [row["request_id"] for row in json.loads(done.stdout or "[]")] == told
    assert done.exit_code == (0 if told else 1)


def a_record(chain: TokenChain) -> dict[str, Any]:
    name = chain.names[1]
    miss = {
        "index": name.index,
        "key": name.key.hex(),
        "parent": name.parent.hex(),
        "route": name.route.hex(),
        "token_digest": name.token_digest.hex(),
        "presence": "purged",
    }
    return {
        "request_id": "req-1",
        "time_s": float(T0_S),
        "role": "prefill",
        "space": encode_space(a_space()).hex(),
        "space_id": chain.space_id.hex(),
        "prompt_tokens": 3 * BLOCK_TOKENS,
        "block_tokens": BLOCK_TOKENS,
        "hit_tokens": BLOCK_TOKENS,
        "way": "blocks",
        "reason": "purged",
        "first_miss": miss,
        "last_hit": chain.names[0].key.hex(),
    }


@pytest.mark.parametrize("arguments", [("ab" * 32,), ("req-1",), ("ab" * 31, "--deadline", "0"), ("g" * 64,)])
def test_what_is_neither_key_nor_request_is_wrong_usage(arguments: tuple[str, ...]) -> None:
    """A key without a node, a request without a log, and what looks like a key and is none."""
    done = run(*arguments)
    assert done.exit_code == 2, done.output
    assert "--store" in done.stderr or "--log" in done.stderr or "waiting time" in done.stderr


# --- how it reads ---------------------------------------------------------------------------------------------------


CHAIN = a_chain(space_id(a_space()), 1)
KEY = CHAIN.names[0].key


def told_of(sighting: Sighting, **more: Any) -> Account:
    policies = more.pop("policies", (Policy(1, TEST_RULES, ""), Policy(2, TEST_RULES, "", T0_S + DAY_S, "ann@desk")))
    return account_of(KEY, more.pop("space_id", None), Memories(sighting, policies=policies, **more))


def rows(account: Account) -> dict[str, str]:
    return dict(account_rows(account, T0_S + 2 * DAY_S))


def a_block(touches: dict[int, int]) -> BlockInfo:
    return BlockInfo(
        KEY, CHAIN.space_id, CHAIN.names[0].parent, 0, BLOCK_TOKENS, 0, 700, 1000, T0_S, T0_S, touches, True, 3
    )


def test_a_stored_block_reads_in_order() -> None:
    """Touches by the longest promise; a class without a rule is said to have none; pins and holds with their end."""
    sighting = Sighting(
        Presence.PRESENT, T0_S, T0_S + 8 * DAY_S, (), a_block({AGENT: T0_S, CHAT: T0_S + DAY_S, RETIRED: T0_S})
    )
    hold = Pin(CHAIN.space_id, KEY, "legal\x1b[2J", "case", 0, hold=True)
    pins = (hold, Pin(CHAIN.space_id, KEY, "ops", "test", T0_S))
    found = rows(told_of(sighting, pins=pins))
    assert list(found) == [
        "key", "space", "tokens", "now", "written", "touched by chat", "touched by class-42", "touched by agent",
        "promised until", "on hold by", "pinned by",
    ]  # fmt: skip
    assert found["space"].endswith("(not registered here)")
    assert found["now"] == "stored (1000 B, 700 B on disk)"
    assert found["written"].endswith("(2d ago)")
    assert found["touched by class-42"].endswith("for which it is kept 7d (no rule names the class: the longest)")
    assert "(in 6d), under policy version 2 (since " in found["promised until"]
    assert "by ann@desk" in found["promised until"]
    assert found["on hold by"] == "legal\N{REPLACEMENT CHARACTER}[2J, without end: case"


def test_a_promise_that_a_maximum_age_cuts_short_says_so() -> None:
    """The end that the node tells is before what the touches alone would give."""
    for until_s, cut in ((T0_S + 3 * DAY_S, False), (T0_S + 2 * DAY_S + 60, True)):
        found = rows(told_of(Sighting(Presence.PRESENT, T0_S, until_s, (), a_block({AGENT: T0_S}))))
        assert ("maximum age" in found["promised until"]) == cut


@pytest.mark.parametrize(
    ("sighting", "wanted"),
    [
        (Sighting(Presence.NEVER, 0, 0, ()), {"now": "not stored: it never was, or so long ago that the store forgot"}),
        (Sighting(Presence.UNREACHABLE, 0, 0, ()), {"now": "unknown: a node that may hold it did not answer"}),
        (Sighting(Presence.EVICTED, T0_S, 0, ()), {"under policy": "version 1"}),
        (Sighting(Presence.QUARANTINED, 0, 0, ()), {"quarantined": "at a time that is not remembered"}),
        (Sighting(Presence.PURGED, T0_S, 0, ()), {"now": "not stored any more"}),
    ],
)
def test_a_block_that_is_not_there_says_why(sighting: Sighting, wanted: dict[str, str]) -> None:
    found = rows(told_of(sighting))
    assert wanted.items() <= found.items(), found


def test_a_policy_before_those_remembered_is_not_guessed() -> None:
    """The history is bounded: of a removal before it, the version is unknown."""
    account = told_of(Sighting(Presence.EVICTED, T0_S, 0, ()), policies=(Policy(9, TEST_RULES, "", T0_S + 1),))
    assert account.removal is not None
    assert account.removal.policy is None
    assert rows(account)["under policy"] == "one that is not remembered any more"


def test_a_purge_is_named_only_where_it_fits() -> None:
    """Of several orders, the one that was under way then and names the block; none of another time or space."""

    def order(number: int, at_s: int, keys: tuple[BlockKey, ...] | None) -> tuple[PurgeOrder, PurgeReport]:
        named = PurgeOrder(f"{number:032x}", (CHAIN.space_id,), keys, at_s, "carol", "asked to")
        return named, PurgeReport(named.purge_id, 1, 1, 1, 0, "", 1, False, at_s, at_s + 5)

    purges = (order(1, T0_S, (KEY,)), order(2, T0_S, (BlockKey(bytes(32)),)), order(3, T0_S + 60, None))
    sighting = Sighting(Presence.PURGED, T0_S + 2, 0, ())
    found = rows(told_of(sighting, purges=purges))
    assert found["by purge"] == f"{1:032x}, ordered by carol: asked to"
    later = Sighting(Presence.PURGED, T0_S + 61, 0, ())
    doubted, certain = (rows(told_of(later, purges=purges, space_id=known)) for known in (None, CHAIN.space_id))
    assert doubted["by purge"].startswith(f"{3:032x}, ordered by carol: asked to (perhaps")
    assert certain["by purge"] == f"{3:032x}, ordered by carol: asked to"
    assert rows(told_of(Sighting(Presence.PURGED, T0_S + 900, 0, ()), purges=purges))["by purge"].startswith("no order")


@pytest.mark.parametrize(
    ("spaces", "known", "others", "certain"),
    [
        ((), None, 0, True),
        ((), CHAIN.space_id, 0, True),
        ((CHAIN.space_id,), CHAIN.space_id, 0, True),
        ((CHAIN.space_id,), None, 0, False),
        ((), CHAIN.space_id, 1, False),
    ],
    ids=["all spaces, key", "all spaces", "its space", "some space, key", "two purges"],
)
def test_a_purge_by_class_is_certain_where_it_alone_reached_the_space(
    spaces: tuple[Any, ...], known: Any, others: int, certain: bool
) -> None:
    """It names no block; each node reports it, which makes no second purge of it."""

    def order(number: int, node: int) -> tuple[PurgeOrder, PurgeReport]:
        named = PurgeOrder(f"{number:032x}", spaces, None, T0_S, "carol", class_byte=CHAT)
        return named, PurgeReport(named.purge_id, 1, 1, 1, 0, "", 1, False, T0_S - node, T0_S + 5)

    purges = tuple(order(number, node) for number in range(1 + others) for node in range(2))
    found = rows(told_of(Sighting(Presence.PURGED, T0_S + 2, 0, ()), purges=purges, space_id=known))
    assert found["by purge"].startswith(f"{others:032x}, ordered by carol")
    assert ("perhaps" not in found["by purge"]) == certain
