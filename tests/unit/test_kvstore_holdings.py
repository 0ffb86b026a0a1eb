"""Running totals of what each segment holds."""

from __future__ import annotations

import random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.daemon.index import entries_of
from kvstore.daemon.presence import PresenceMap
from kvstore.daemon.record import RecordHeader
from kvstore.daemon.terms import Terms
from kvstore.keys import BlockKey, SpaceId, TokenDigest
from kvstore.testing import DAY_S, TEST_RULES
from kvstore.traffic import AGENT, CHAT, ClassRule, ClassRules

T0_S = 1_800_000_000
SHORTER = ClassRules((ClassRule(AGENT, "agent", keep_for_s=DAY_S), ClassRule(CHAT, "chat", keep_for_s=2 * DAY_S)))


def a_header(draw: random.Random, key: BlockKey, now_s: int) -> RecordHeader:
    """A record somewhere in five segments, touched by one class, lately or long ago."""
    size = draw.choice((1, 5000, 20_000))
    return RecordHeader(
        segment=draw.randint(1, 5),
        generation=2,
        offset=4096 * draw.randrange(1, 10**6),
        key=key,
        parent=key,
        space_id=SpaceId(bytes(32)),
        token_digest=TokenDigest(key[:16]),
        index=0,
        tokens=4,
        class_byte=AGENT,
        flags=0,
        codec=0,
        stored_bytes=size,
        payload_bytes=size,
        written_s=now_s,
        checksum=1,
        touches=((draw.choice((AGENT, CHAT)), now_s - draw.choice((0, DAY_S, 5 * DAY_S))),),
    )


def recount(presence: PresenceMap, now_s: int) -> dict[int, tuple[int, int, int]]:
    """Bytes, living bytes and promise of each segment, row by row."""
    found: dict[int, tuple[int, int, int]] = {}
    for slot in presence.used().tolist():
        row, at = presence.row(slot), np.array([slot])
        held, alive, promise_s = found.get(row.segment, (0, 0, 0))
        held += row.record_bytes
        alive += row.record_bytes if presence.is_alive(slot, now_s) else 0
        found[row.segment] = held, alive, max(promise_s, int(presence.keep_until_s(at)[0]))
    return found


@settings(max_examples=120, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 40))
def test_running_totals_are_a_recount(seed: int, steps: int) -> None:
    """Rows come one by one and together, replace others, are touched, pinned and dropped; rules change, and time passes
    or goes back: whenever somebody asks, the totals are those of a count of every row.
    """
    draw = random.Random(seed)
    presence, now_s = PresenceMap(Terms.of(TEST_RULES), 0), T0_S
    keys = [BlockKey(draw.randbytes(32)) for _ in range(60)]
    for _ in range(steps):
        slots = presence.used()
        some = draw.sample(slots.tolist(), draw.randint(0, len(slots)))[: draw.choice((1, 60))]
        match draw.randrange(8):
            case 0:
                chosen = draw.sample(keys, draw.randint(1, 20))
                headers = [a_header(draw, key, now_s) for key in chosen]
                pins = {0: now_s + 9 * DAY_S} if draw.random() < 0.3 else {}
                presence.insert(entries_of(headers), pins)
            case 1:
                key = BlockKey(draw.randbytes(32))
                presence.insert_one(a_header(draw, key, now_s), draw.choice((0, now_s + DAY_S)))
                keys.append(key)
            case 2:
                presence.remove(np.array(some, dtype=np.int64))
            case 3:
                for slot in some:
                    presence.touch(slot, draw.choice((AGENT, CHAT)), now_s)
            case 4:
                for slot in some:
                    presence.pin(slot, now_s + draw.choice((1, 10)) * DAY_S)
            case 5:
                presence.unpin_all()
            case 6:
                presence.set_rules(Terms.of(draw.choice((TEST_RULES, SHORTER))))
            case 7:
                now_s += draw.choice((1, DAY_S, 4 * DAY_S, -DAY_S))
        if draw.random() < 0.5:
            totals = presence.holdings(now_s)
            counted = {n: (h.record_bytes, h.alive_bytes, h.promise_until_s) for n, h in totals.items()}
            assert counted == recount(presence, now_s)
    assert not presence.holdings(now_s).in_doubt(now_s)


def test_what_is_written_recycled_and_touched_costs_no_count() -> None:
    """Totals are counted for nobody's sake: new rows, touches and whole segments that go leave no doubt."""
    draw = random.Random(1)
    presence = PresenceMap(Terms.of(TEST_RULES), 0)
    for segment in range(1, 30):
        headers = [a_header(draw, BlockKey(draw.randbytes(32)), T0_S + DAY_S) for _ in range(20)]
        rows = entries_of(headers)
        rows["segment"], rows["touch_s"][:, 0] = segment, T0_S + segment
        presence.insert(rows, new=True)
        for slot in presence.in_segment(segment)[:5].tolist():
            presence.touch(slot, AGENT, T0_S + DAY_S)
        if segment > 5:
            presence.remove(presence.in_segment(segment - 5))
        assert not presence._holdings.in_doubt(T0_S + 60)
        assert {number for number, _ in presence._holdings.items()} == set(range(max(1, segment - 4), segment + 1))
