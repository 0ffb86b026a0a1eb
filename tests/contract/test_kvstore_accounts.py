"""The account of a block, over every kind of store: what operators are told of a key is what happened to it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from kvstore.account import Account, account_of
from kvstore.inquiry import inquire
from kvstore.keys import BlockKey, SpaceId, TokenChain, tenant_salt
from kvstore.purges import PurgeOrder
from kvstore.sightings import named_by_key
from kvstore.store import Pin, Presence
from kvstore.testing import DAY_S, TEST_RULES
from kvstore.traffic import AGENT, CHAT, ClassRules
from tests.support.spaces import a_chain, a_space, put_chain
from tests.support.stores import SUBJECTS, TENANT, Subject, subject


@pytest.fixture(params=list(SUBJECTS))
def under_test(request: pytest.FixtureRequest) -> Iterator[Subject]:
    with subject(request.param) as made:
        yield made


def stored(under_test: Subject) -> TokenChain:
    """Three blocks of the tenant, written by agent now."""
    space = under_test.store.register_space(a_space(tenant_salt=tenant_salt(TENANT)))
    chain = a_chain(space, 3)
    put_chain(under_test.store, chain, AGENT)
    return chain


def account(under_test: Subject, key: BlockKey, space_id: SpaceId | None = None) -> Account:
    """By the key alone; ``space_id``: where the asker knows it, as the access log of a request does."""
    memories = inquire(under_test.store, {"all": under_test.store}, None, named_by_key(key), deadline_s=60.0)
    return account_of(key, space_id, memories)


def now_s(under_test: Subject) -> int:
    return int(under_test.clock.now_s())


def shorter(class_byte: int, keep_for_s: int) -> ClassRules:
    changed = {class_byte: keep_for_s}
    rules = (replace(rule, keep_for_s=changed.get(rule.class_byte, rule.keep_for_s)) for rule in TEST_RULES.rules)
    return ClassRules(tuple(rules))


def test_a_stored_block_has_its_touches_promise_and_pins(under_test: Subject) -> None:
    """When it was written, who touched it last, until when and under which policy it is promised, who holds it."""
    chain, began_s = stored(under_test), now_s(under_test)
    key = chain.names[0].key
    under_test.clock.advance(DAY_S)
    under_test.store.touch(chain.space_id, chain.names[:1], traffic_class=CHAT)
    pin = Pin(chain.space_id, key, "legal", "case 7", 0, hold=True)
    assert under_test.store.pin([pin]) == 1
    told = account(under_test, key)
    assert (told.presence, told.space_id, told.removal) == (Presence.PRESENT, chain.space_id, None)
    assert told.block is not None
    assert (told.block.written_s, told.block.index) == (began_s, 0)
    assert [(use.name, use.touched_s, use.until_s, use.ruled) for use in told.uses] == [
        ("chat", began_s + DAY_S, began_s + 8 * DAY_S, True),
        ("agent", began_s, began_s + 3 * DAY_S, True),
    ]
    assert told.pins == (pin,)
    assert told.policy is not None
    assert told.policy.version == 1


def test_an_expired_block_names_the_time_and_the_policy(under_test: Subject) -> None:
    """Before it is swept away, and (as far as its record went) after."""
    chain, began_s = stored(under_test), now_s(under_test)
    under_test.clock.advance(3 * DAY_S + 60)
    told = account(under_test, chain.names[1].key).removal
    assert told is not None
    assert (told.reason, told.at_s) == (Presence.EXPIRED, began_s + 3 * DAY_S)
    under_test.store.sweep(apply=True)
    swept = account(under_test, chain.names[1].key).removal
    assert swept is not None
    assert swept.reason == Presence.EXPIRED
    assert [removal.policy.version for removal in (told, swept) if removal.policy] == [1, 1]


def test_a_shrunk_policy_is_what_expired_the_block(under_test: Subject) -> None:
    """A block that lost its promise by a change went then, and under the version that took it, by its author."""
    chain, began_s = stored(under_test), now_s(under_test)
    under_test.clock.advance(2 * DAY_S)
    rules = shorter(AGENT, DAY_S)
    under_test.store.set_policy(rules, "shorter", expected_version=1, apply=True, author="alice@desk")
    under_test.clock.advance(DAY_S)
    under_test.store.set_policy(TEST_RULES, "as before", expected_version=2, apply=True)
    under_test.store.set_policy(rules, "shorter", expected_version=3, apply=True, author="bob@desk")
    removal = account(under_test, chain.names[0].key).removal
    assert removal is not None
    assert removal.policy is not None
    assert (removal.reason, removal.at_s) == (Presence.EXPIRED, began_s + 2 * DAY_S)
    assert (removal.policy.version, removal.policy.author) == (2, "alice@desk")


def test_a_purged_block_names_the_order(under_test: Subject) -> None:
    """For certain where the order's space or key is known to be its own; a plain deletion has no order."""
    chain = stored(under_test)
    under_test.store.delete(chain.space_id, [chain.names[2].key])
    under_test.clock.advance(60)
    order = PurgeOrder("0f" * 16, (chain.space_id,), None, now_s(under_test), "carol", "asked to", TENANT)
    under_test.store.purge(order)
    key = chain.names[0].key
    for space_id, certain in ((chain.space_id, True), (None, False)):
        removal = account(under_test, key, space_id).removal
        assert removal is not None
        assert (removal.reason, removal.order, removal.order_certain) == (Presence.PURGED, order, certain)
    deleted = account(under_test, chain.names[2].key, chain.space_id).removal
    assert deleted is not None
    assert (deleted.reason, deleted.order) == (Presence.PURGED, None)


def test_an_account_compares_other_spaces(under_test: Subject) -> None:
    """The same tokens in a space of another layout: the field is named."""
    chain = stored(under_test)
    other = under_test.store.register_space(a_space(tenant_salt=tenant_salt(TENANT), layout="fused"))
    put_chain(under_test.store, a_chain(other, 3), AGENT)
    told = account(under_test, chain.names[0].key)
    assert [(space.space_id, space.fields) for space in told.other_spaces] == [(other, ("layout",))]
    assert account(under_test, BlockKey(bytes(32))).presence == Presence.NEVER
