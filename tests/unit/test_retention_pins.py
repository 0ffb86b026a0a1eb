"""Pins: who, why, until when."""

from __future__ import annotations

import pytest

from kvstore.keys import BlockKey, space_id
from kvstore.limits import LOOKUP_KEYS_MAX, NAME_BYTES_MAX
from kvstore.testing import DAY_S, T0_S, ManualClock, MemoryStore
from kvstore.traffic import AGENT
from retention.errors import SelectionInvalid
from retention.pins import make_pins, pin_blocks, unpin_blocks
from retention.sweeper import sweep_once
from tests.support.spaces import a_chain, a_space, hit_blocks, put_chain

HOME = space_id(a_space())
KEY = BlockKey(b"k" * 32)


def test_a_pin_carries_its_owner_reason_and_end() -> None:
    """One pin a key, however often the key is named."""
    pins = make_pins(HOME, [KEY, KEY], owner="ops", reason="system prompt", until_s=0, now_s=T0_S)
    assert [(pin.space_id, pin.key, pin.owner, pin.reason, pin.until_s) for pin in pins] == [
        (HOME, KEY, "ops", "system prompt", 0)
    ]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"owner": ""}, "--owner"),
        ({"owner": "  "}, "--owner"),
        ({"reason": ""}, "--reason"),
        ({"owner": "é" * NAME_BYTES_MAX}, str(NAME_BYTES_MAX)),
        ({"reason": "x" * (NAME_BYTES_MAX + 1)}, str(NAME_BYTES_MAX)),
        ({"until_s": int(T0_S)}, "past"),
        ({"keys": []}, "keys"),
        ({"keys": [KEY] * (LOOKUP_KEYS_MAX + 1)}, "keys"),
    ],
)
def test_a_wrong_pin_is_refused(change: dict[str, object], reason: str) -> None:
    """Nobody pins anonymously, without a reason, into the past, or without bound."""
    wanted: dict[str, object] = {"keys": [KEY], "owner": "ops", "reason": "why", "until_s": 0, "now_s": T0_S}
    wanted |= change
    keys = wanted.pop("keys")
    with pytest.raises(SelectionInvalid, match=reason):
        make_pins(HOME, keys, **wanted)  # type: ignore[arg-type]


def test_a_pin_holds_past_expiry_until_it_ends() -> None:
    """Pinned blocks outlive their promise and a sweep; at the pin's end they are gone."""
    clock = ManualClock()
    store = MemoryStore(clock)
    chain = a_chain(store.register_space(a_space()), 3)
    put_chain(store, chain, AGENT)
    keys = [name.key for name in chain.names[:2]]
    until_s = int(T0_S) + 10 * DAY_S
    pins = make_pins(HOME, [*keys, KEY], owner="ops", reason="why", until_s=until_s, now_s=clock.now_s())
    count = pin_blocks(store, pins, deadline_s=5)
    assert (count.asked, count.found) == (3, 2)
    clock.advance(9 * DAY_S)
    assert sweep_once(store, apply=True).blocks == 1
    assert hit_blocks(store, chain) == 2
    clock.advance(DAY_S)
    assert hit_blocks(store, chain) == 0
    assert sweep_once(store, apply=True).blocks == 2


def test_unpinning_gives_blocks_back_to_their_promise() -> None:
    """A block unpinned before its deadline stays until then; after it, it is gone at once."""
    clock = ManualClock()
    store = MemoryStore(clock)
    chain = a_chain(store.register_space(a_space()), 2)
    put_chain(store, chain, AGENT)
    keys = [name.key for name in chain.names]
    pin_blocks(store, make_pins(HOME, keys, owner="o", reason="r", until_s=0, now_s=T0_S), deadline_s=5)
    clock.advance(DAY_S)
    assert unpin_blocks(store, HOME, keys[1:], deadline_s=5).found == 1
    assert hit_blocks(store, chain) == 2
    clock.advance(3 * DAY_S)
    assert hit_blocks(store, chain) == 1
    assert unpin_blocks(store, HOME, [*keys, KEY], deadline_s=5).found == 1
    assert hit_blocks(store, chain) == 0
