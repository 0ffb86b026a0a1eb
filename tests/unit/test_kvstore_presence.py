"""Deadlines and the map in memory."""

from __future__ import annotations

import random
import time

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvstore.daemon.index import ENTRY_DTYPE, Tombstone, entry_of
from kvstore.daemon.presence import PresenceMap, digest_words, keep_for_table, keep_until, merge_touch
from kvstore.daemon.record import RecordHeader
from kvstore.keys import BlockKey, SpaceId, TokenDigest
from kvstore.store import Presence
from kvstore.testing import DAY_S, TEST_RULES
from kvstore.traffic import AGENT, CHAT, ClassRule, ClassRules, TrafficClass

SPACE = SpaceId(b"\x05" * 32)
NOW_S = 1_800_000_000


def an_entry(key: BlockKey, touches: tuple[tuple[int, int], ...] = ((AGENT, NOW_S),)) -> bytes:
    return entry_of(
        RecordHeader(
            segment=1,
            generation=2,
            offset=4096,
            key=key,
            parent=key,
            space_id=SPACE,
            token_digest=TokenDigest(key[:16]),
            index=0,
            tokens=64,
            class_byte=1,
            flags=0,
            codec=0,
            stored_bytes=100,
            payload_bytes=100,
            written_s=NOW_S,
            checksum=1,
            touches=touches,
        )
    )


def a_map(count: int = 3, tombstones_max: int = 4) -> tuple[PresenceMap, list[BlockKey]]:
    presence = PresenceMap(keep_for_table(TEST_RULES), tombstones_max)
    keys = [BlockKey(bytes([number + 1]) * 32) for number in range(count)]
    for key in keys:
        presence.add(key, an_entry(key))
    return presence, keys


def ask(presence: PresenceMap, keys: list[BlockKey], now_s: float, space: SpaceId = SPACE) -> list[int]:
    digests = digest_words([TokenDigest(key[:16]) for key in keys])
    return presence.presence(presence.slots(keys, len(keys)), keys, space, digests, now_s).tolist()


def test_a_block_is_present_until_its_deadline_and_not_a_second_longer() -> None:
    presence, keys = a_map()
    assert ask(presence, keys, NOW_S + 3 * DAY_S - 0.001) == [Presence.PRESENT] * 3
    assert ask(presence, keys, NOW_S + 3 * DAY_S) == [Presence.EXPIRED] * 3


def test_another_space_or_token_digest_is_a_miss() -> None:
    """A key alone is not believed: with a hash that collides, both checks still tell the prefixes apart."""
    presence, keys = a_map()
    assert ask(presence, keys, NOW_S, SpaceId(b"\x06" * 32)) == [Presence.NEVER] * 3
    other = digest_words([TokenDigest(b"\xff" * 16)] * 3)
    assert presence.presence(presence.slots(keys, 3), keys, SPACE, other, NOW_S).tolist() == [Presence.NEVER] * 3


def test_the_deadline_is_the_maximum_over_classes() -> None:
    """A chat touch outlasts a later agent touch; shrinking chat's rule leaves what agent promised."""
    presence, keys = a_map(1)
    presence.touch(0, CHAT, NOW_S + 10)
    presence.touch(0, AGENT, NOW_S + DAY_S)
    assert presence.keep_until_s[0] == NOW_S + 10 + 7 * DAY_S
    shorter = ClassRules((ClassRule(AGENT, "agent", 3 * DAY_S), ClassRule(CHAT, "chat", 60)))
    assert presence.alive_under(keep_for_table(shorter), NOW_S + 4 * DAY_S - 1)[0]
    presence.set_rules(keep_for_table(shorter))
    assert presence.keep_until_s[0] == NOW_S + DAY_S + 3 * DAY_S
    assert ask(presence, keys, NOW_S + 4 * DAY_S) == [Presence.EXPIRED]


def test_an_unknown_class_is_kept_at_the_longest_promise() -> None:
    presence, keys = a_map(1)
    presence.add(keys[0], an_entry(keys[0], ((200, NOW_S),)))
    assert presence.keep_until_s[0] == NOW_S + 7 * DAY_S


def test_a_touch_that_gains_nothing_changes_neither_memory_nor_disk() -> None:
    """Below 1/1024 of keep_for the row stays as it is, so memory and index agree after a restart."""
    presence, _ = a_map(1)
    before = presence.entry(0)
    assert not presence.touch(0, AGENT, NOW_S + 3 * DAY_S // 1024 - 1)
    assert presence.entry(0) == before
    assert presence.touch(0, AGENT, NOW_S + 3 * DAY_S // 1024 + 1)
    assert presence.entry(0) != before


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 40 * DAY_S)), min_size=1, max_size=40))
def test_a_touch_never_shrinks_a_deadline(touches: list[tuple[int, int]]) -> None:
    """Whatever classes touch in whatever order, also more of them than a row holds; at most 1/1024 is forgone."""
    rules = ClassRules(
        (
            ClassRule(AGENT, "agent", 3 * DAY_S),
            ClassRule(CHAT, "chat", 7 * DAY_S),
            *(ClassRule(TrafficClass(16 + n), f"c{n}", (n + 1) * DAY_S) for n in range(8)),
        )
    )
    table = keep_for_table(rules)
    key = BlockKey(b"\x01" * 32)
    presence = PresenceMap(table, 0)
    presence.add(key, an_entry(key))
    promised = NOW_S + 3 * DAY_S
    now_s = NOW_S
    for class_byte, step_s in touches:
        now_s += step_s // 40
        wanted = TrafficClass(class_byte if class_byte < 3 else 13 + class_byte)
        before = int(presence.keep_until_s[0])
        presence.touch(0, wanted, now_s)
        promised = max(promised, now_s + rules.keep_for_s(wanted))
        assert presence.keep_until_s[0] >= before
        assert promised - rules.keep_for_s(wanted) // 1024 - 8 * DAY_S // 1024 <= presence.keep_until_s[0] <= promised
        assert presence.keep_until_s[0] == keep_until(presence.rows[0], table)


def test_merge_touch_goes_forward_only() -> None:
    presence, _ = a_map(1)
    assert not merge_touch(presence.rows[0], AGENT, NOW_S - 1000, presence.keep_for_s)


def test_slots_are_reused_and_columns_cleared() -> None:
    presence, keys = a_map(3)
    presence.pin_until_s[1] = 99
    presence.remove(keys[1], None)
    fresh = BlockKey(b"\xee" * 32)
    assert presence.add(fresh, an_entry(fresh)) == 1
    assert presence.pin_until_s[1] == 0
    assert len(presence) == 3
    assert ask(presence, [keys[1], fresh], NOW_S) == [Presence.NEVER, Presence.PRESENT]


def test_tombstones_say_why_are_bounded_and_end_with_a_new_record() -> None:
    presence, keys = a_map(6, tombstones_max=4)
    changed = {}
    for key in keys:
        changed |= presence.remove(key, Tombstone(Presence.EVICTED, NOW_S))
    assert ask(presence, keys, NOW_S) == [Presence.NEVER] * 2 + [Presence.EVICTED] * 4
    assert [changed[key] for key in keys[:2]] == [None, None]
    presence.add(keys[5], an_entry(keys[5]))
    presence.remove(keys[5], None)
    assert ask(presence, keys[5:], NOW_S) == [Presence.NEVER]


def test_the_map_grows_and_finds_everything() -> None:
    presence, keys = a_map(0)
    keys = [BlockKey(number.to_bytes(32, "big")) for number in range(5000)]
    for key in keys:
        presence.add(key, an_entry(key))
    assert set(ask(presence, keys, NOW_S)) == {Presence.PRESENT}
    assert np.array_equal(np.sort(presence.in_segment(1)), np.arange(5000))


def test_crafted_keys_are_found_as_fast_as_any() -> None:
    """50,000 keys that share their ends or all but a few bits cost a look-up no more than random ones."""
    drawn = random.Random(1)
    count = 50_000
    families = {
        "random": [drawn.randbytes(32) for _ in range(count)],
        "equal ends": [bytes(12) + number.to_bytes(8, "little") + bytes(12) for number in range(count)],
        "equal low bits": [(number << 200).to_bytes(32, "little") for number in range(count)],
        "steps of a power of two": [(number << 16).to_bytes(32, "little") for number in range(count)],
    }
    took_s = {}
    for name, crafted in families.items():
        presence, _ = a_map(0, tombstones_max=count)
        keys = [BlockKey(key) for key in crafted]
        presence.load(keys, np.zeros(count, dtype=ENTRY_DTYPE), {})
        asked = [drawn.sample(keys, 64) for _ in range(200)]
        times = []
        for some in asked:
            began_s = time.perf_counter()
            assert (presence.slots(some, 64) >= 0).all()
            times.append(time.perf_counter() - began_s)
        took_s[name] = sorted(times)[len(times) // 2]
    assert max(took_s.values()) < 2 * took_s["random"] + 20e-6, took_s
