"""Purges of blocks that an engine names by hashes of its own: what reaches them, and that tokens say they do not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from kvstore.keys import OPAQUE_ALGORITHM, BlockName, SpaceId, opaque_name, tenant_salt
from kvstore.store import BlockPut
from kvstore.traffic import AGENT, CHAT, TrafficClass
from retention.session import EXIT_NOTHING, EXIT_OK, EXIT_USAGE
from tests.support.shop import BLOCKS, Shop
from tests.support.spaces import BLOCK_TOKENS, a_space
from tests.support.stores import client_of, short_dir

WHOLE = ",".join(map(str, range(BLOCKS * BLOCK_TOKENS)))
"""The prompt of the tenant's chain, and of the other one."""
UNKNOWN = ",".join(map(str, range(7, 7 + BLOCK_TOKENS)))
NOT_REACHED = "2 spaces not looked through: an engine names the blocks there by hashes of its own"


class Engine:
    """Blocks that an engine stored beside those of the shop: eight of a tenant, eight of nobody."""

    def __init__(self, shop: Shop) -> None:
        self.shop = shop
        self.tenants = self._put("acme", AGENT)
        self.nobodys = self._put(None, CHAT)

    def _put(self, tenant: str | None, traffic_class: TrafficClass) -> tuple[SpaceId, list[BlockName]]:
        salt = None if tenant is None else tenant_salt(tenant)
        with client_of(*self.shop.addresses) as client:
            space = client.register_space(a_space(tenant_salt=salt, key_algorithm=OPAQUE_ALGORITHM))
            names = [opaque_name(space, b"hash %d" % number) for number in range(8)]
            puts = [BlockPut(name, BLOCK_TOKENS, bytes(name.key) * 9) for name in names]
            client.put(space, puts, traffic_class=traffic_class)
        return space, names

    def left(self) -> tuple[int, int]:
        """Blocks of the tenant and of nobody that are still there."""
        with client_of(*self.shop.addresses) as client:
            of_tenant, of_nobody = (
                int((client.lookup(space, names).presence == 1).sum()) for space, names in (self.tenants, self.nobodys)
            )
        return of_tenant, of_nobody


@pytest.fixture
def shop() -> Iterator[Shop]:
    with ExitStack() as stack:
        yield Shop(stack.enter_context(short_dir()), stack)


@pytest.fixture
def engine(shop: Shop) -> Engine:
    return Engine(shop)


def test_a_purge_by_tokens_counts_the_spaces_that_it_does_not_reach(shop: Shop, engine: Engine) -> None:
    """In a dry run and when it removes, for people and for programs; the engine's blocks stay, the others go."""
    for more in ((), ("--apply", "--yes")):
        told = shop.json("purge", "--tokens", WHOLE, "--from-start", *more)
        assert (told["blocks"], told["opaque_spaces"], len(told["spaces"])) == (2 * BLOCKS, 2, 2)
        assert engine.left() == (8, 8)
    nothing = shop.run("purge", "--tokens", WHOLE, "--apply", "--yes")
    assert nothing.exit_code == EXIT_NOTHING
    assert NOT_REACHED in nothing.stderr
    assert shop.json("purge", "--tokens", WHOLE)["opaque_spaces"] == 2
    assert shop.json("purge", "--class", "agent")["opaque_spaces"] == 0


def test_people_read_what_was_not_reached(shop: Shop, engine: Engine) -> None:
    """On the line of the purge; and beside a receipt, which speaks of what it names only."""
    assert NOT_REACHED in shop.run("purge", "--tokens", WHOLE).stdout.replace("\n", " ")
    proof = ("--apply", "--yes", "--proof", str(shop.receipt), "--sign-key", str(shop.key))
    done = shop.run("purge", "--tokens", WHOLE, "--from-start", *proof)
    assert done.exit_code == EXIT_OK, done.output
    assert NOT_REACHED in done.stderr
    assert engine.left() == (8, 8)
    assert shop.run("verify", str(shop.receipt)).exit_code == EXIT_OK


def test_tokens_are_refused_where_they_lead_to_no_block(shop: Shop, engine: Engine) -> None:
    """Told what does reach the space, whatever the tokens are."""
    space, _ = engine.nobodys
    refused = shop.run("purge", "--tokens", UNKNOWN, "--space", space.hex(), "--apply", "--yes")
    assert refused.exit_code == EXIT_USAGE
    assert "1 space not looked through" in refused.stderr
    assert "--space, --tenant, --class and --older-than" in refused.stderr
    assert engine.left() == (8, 8)


def test_another_model_of_an_engine_asks_for_no_choice(shop: Shop) -> None:
    """Tokens are of one model, since an engine's spaces have no part in it, whatever they call theirs."""
    with client_of(*shop.addresses) as client:
        client.register_space(a_space(model="as the engine calls it", key_algorithm=OPAQUE_ALGORITHM))
    told = shop.json("purge", "--tokens", WHOLE, "--tenant", "acme")
    assert (told["blocks"], told["opaque_spaces"]) == (1, 0)
    assert shop.json("purge", "--tokens", WHOLE)["opaque_spaces"] == 1


CHOSEN: tuple[tuple[tuple[str, ...], tuple[int, int], bool], ...] = (
    (("--space", "the engine's"), (0, 8), True),
    (("--tenant", "acme"), (0, 8), False),
    (("--class", "agent", "--space", "the engine's"), (0, 8), False),
    (("--class", "chat"), (8, 0), True),
    (("--older-than", "30m"), (0, 0), False),
    (("--prefix", "a block"), (7, 8), True),
)


@pytest.mark.parametrize(("chosen", "left", "proof"), CHOSEN, ids=[chosen[0] for chosen, *_ in CHOSEN])
def test_space_tenant_class_age_and_key_reach_them(
    shop: Shop, engine: Engine, chosen: tuple[str, ...], left: tuple[int, int], proof: bool
) -> None:
    """Like any block: what was chosen is a miss from then on, what was not is a hit, and a proof finds no byte."""
    space, names = engine.tenants
    words = {"the engine's": space.hex(), "a block": names[0].key.hex()}
    shop.clock.advance(3600.0)
    more = ("--proof", str(shop.receipt), "--sign-key", str(shop.key)) if proof else ()
    done = shop.run("purge", *(words.get(word, word) for word in chosen), "--apply", "--yes", *more)
    assert done.exit_code == EXIT_OK, done.output
    assert engine.left() == left
    if proof:
        assert shop.run("verify", str(shop.receipt)).exit_code == EXIT_OK
