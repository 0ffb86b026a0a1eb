"""Deadlines and the map in memory."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.daemon.fingerprints import ROWS_MAX, FingerprintTable, Words
from kvstore.daemon.index import Rows, entries_of
from kvstore.daemon.presence import (
    PresenceMap,
    digest_words,
    fingerprint_of,
    fingerprints_in,
    key_words,
    merge_touch,
)
from kvstore.daemon.record import RecordHeader
from kvstore.daemon.terms import Terms
from kvstore.keys import BlockKey, SpaceId, TokenDigest
from kvstore.store import Presence
from kvstore.testing import DAY_S, TEST_RULES
from kvstore.traffic import AGENT, CHAT, ClassRule, ClassRules, TrafficClass

SPACE = SpaceId(b"\x05" * 32)
NOW_S = 1_800_000_000
ZERO = np.array([0])


def a_header(key: BlockKey, touches: tuple[tuple[int, int], ...] = ((AGENT, NOW_S),), place: int = 1) -> RecordHeader:
    return RecordHeader(
        segment=1 + place // 100,
        generation=2,
        offset=4096 * (1 + place % 100),
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


def rows_for(*keys: BlockKey, touches: tuple[tuple[int, int], ...] = ((AGENT, NOW_S),)) -> Rows:
    return entries_of(a_header(key, touches) for key in keys)


def a_map(count: int = 3, tombstones_max: int = 4) -> tuple[PresenceMap, list[BlockKey]]:
    presence = PresenceMap(Terms.of(TEST_RULES), tombstones_max)
    keys = [BlockKey(bytes([number + 1]) * 32) for number in range(count)]
    presence.insert(rows_for(*keys))
    return presence, keys


def ask(
    presence: PresenceMap, keys: list[BlockKey], now_s: float, space: SpaceId = SPACE, digests: bytes = b""
) -> list[int]:
    words = key_words(b"".join(keys))
    asked = digest_words(digests or b"".join(key[:16] for key in keys))
    return presence.answer(words, space, asked, now_s)[0].tolist()


def until_s(presence: PresenceMap) -> int:
    return int(presence.until_s(ZERO)[0])


def stored_touches(presence: PresenceMap, key: BlockKey) -> bytes:
    rows = rows_for(key)
    presence.write_touches(rows, ZERO)
    return rows.tobytes()


def test_a_block_is_present_until_its_deadline_and_not_a_second_longer() -> None:
    presence, keys = a_map()
    assert ask(presence, keys, NOW_S + 3 * DAY_S - 0.001) == [Presence.PRESENT] * 3
    assert ask(presence, keys, NOW_S + 3 * DAY_S) == [Presence.EXPIRED] * 3


def test_another_space_token_digest_or_rest_of_the_key_is_a_miss() -> None:
    """A fingerprint alone is not believed: where it collides, the check tells the prefixes apart."""
    presence, keys = a_map()
    assert ask(presence, keys, NOW_S, SpaceId(b"\x06" * 32)) == [Presence.NEVER] * 3
    assert ask(presence, keys, NOW_S, digests=b"\xff" * 48) == [Presence.NEVER] * 3
    for at in range(8, 32):
        twin = bytearray(keys[0])
        twin[at] ^= 1
        assert ask(presence, [BlockKey(bytes(twin))], NOW_S, digests=keys[0][:16]) == [Presence.NEVER]


def test_the_deadline_is_the_maximum_over_classes() -> None:
    """A chat touch outlasts a later agent touch; shrinking chat's rule leaves what agent promised."""
    presence, keys = a_map(1)
    presence.touch(0, CHAT, NOW_S + 10)
    presence.touch(0, AGENT, NOW_S + DAY_S)
    assert until_s(presence) == NOW_S + 10 + 7 * DAY_S
    assert ask(presence, keys, NOW_S + 10 + 7 * DAY_S - 1) == [Presence.PRESENT]
    shorter = ClassRules((ClassRule(AGENT, "agent", 3 * DAY_S), ClassRule(CHAT, "chat", 60)))
    assert presence.until_s_under(ZERO, Terms.of(shorter))[0] == NOW_S + 4 * DAY_S
    presence.set_rules(Terms.of(shorter))
    assert until_s(presence) == NOW_S + DAY_S + 3 * DAY_S
    assert ask(presence, keys, NOW_S + 4 * DAY_S) == [Presence.EXPIRED]


def test_a_pin_holds_a_block_until_its_end_and_goes_with_the_row() -> None:
    presence, keys = a_map(2)
    presence.pin(0, NOW_S + 9 * DAY_S)
    assert ask(presence, keys, NOW_S + 8 * DAY_S) == [Presence.PRESENT, Presence.EXPIRED]
    assert presence.pinned_slots(NOW_S).tolist() == [0]
    presence.remove(ZERO)
    presence.insert(rows_for(keys[0]))
    assert ask(presence, keys, NOW_S + 8 * DAY_S) == [Presence.EXPIRED, Presence.EXPIRED]


def test_an_unknown_class_is_kept_at_the_longest_promise() -> None:
    presence, keys = a_map(1)
    presence.insert(rows_for(keys[0], touches=((200, NOW_S),)))
    assert until_s(presence) == NOW_S + 7 * DAY_S


def test_a_touch_that_gains_nothing_changes_neither_memory_nor_disk() -> None:
    """Below 1/1024 of keep_for the row stays as it is, so memory and index agree after a restart."""
    presence, keys = a_map(1)
    before = stored_touches(presence, keys[0])
    soon_s, later_s = NOW_S + 3 * DAY_S // 1024 - 1, NOW_S + 3 * DAY_S // 1024 + 1
    assert not len(presence.worth_touching(ZERO, AGENT, soon_s))
    assert not presence.touch(0, AGENT, soon_s)
    assert stored_touches(presence, keys[0]) == before
    assert len(presence.worth_touching(ZERO, AGENT, later_s))
    assert presence.touch(0, AGENT, later_s)
    assert stored_touches(presence, keys[0]) != before


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 40 * DAY_S)), min_size=1, max_size=40))
def test_a_touch_never_shrinks_a_deadline(touches: list[tuple[int, int]]) -> None:
    """Whatever classes touch in whatever order, also more of them than a row holds; at most 1/1024 is forgone. What
    would be written to the index gives the same deadline when it is loaded.
    """
    rules = ClassRules(
        (
            ClassRule(AGENT, "agent", 3 * DAY_S),
            ClassRule(CHAT, "chat", 7 * DAY_S),
            *(ClassRule(TrafficClass(16 + n), f"c{n}", (n + 1) * DAY_S) for n in range(8)),
        )
    )
    table = Terms.of(rules)
    key = BlockKey(b"\x01" * 32)
    presence = PresenceMap(table, 0)
    presence.insert(rows_for(key))
    promised = NOW_S + 3 * DAY_S
    now_s = NOW_S
    for class_byte, step_s in touches:
        now_s += step_s // 40
        wanted = TrafficClass(class_byte if class_byte < 3 else 13 + class_byte)
        before = until_s(presence)
        presence.touch(0, wanted, now_s)
        promised = max(promised, now_s + rules.keep_for_s(wanted))
        assert until_s(presence) >= before
        assert promised - rules.keep_for_s(wanted) // 1024 - 8 * DAY_S // 1024 <= until_s(presence) <= promised
        rows = rows_for(key)
        presence.write_touches(rows, ZERO)
        again = PresenceMap(table, 0)
        again.insert(rows)
        assert until_s(again) == until_s(presence)


def test_a_fixed_promise_is_that_of_the_first_touch_and_costs_hot_touches_nothing() -> None:
    """Later touches by the class change no row and are found not worth one; other classes' still count; after a change
    of the rule to sliding its touches do.
    """
    fixed = ClassRules((ClassRule(AGENT, "agent", 3 * DAY_S, keep="fixed"), ClassRule(CHAT, "chat", 7 * DAY_S)))
    presence = PresenceMap(Terms.of(fixed), 0)
    presence.insert(rows_for(BlockKey(b"\x01" * 32)))
    assert not len(presence.worth_touching(ZERO, AGENT, NOW_S + 2 * DAY_S))
    assert not presence.touch(0, AGENT, NOW_S + 2 * DAY_S)
    assert until_s(presence) == NOW_S + 3 * DAY_S
    assert presence.touch(0, CHAT, NOW_S + 2 * DAY_S)
    assert not presence.touch(0, AGENT, NOW_S + 8 * DAY_S)
    assert until_s(presence) == NOW_S + 9 * DAY_S
    presence.set_rules(Terms.of(TEST_RULES))
    assert presence.touch(0, AGENT, NOW_S + 8 * DAY_S)
    assert until_s(presence) == NOW_S + 11 * DAY_S


def test_merge_touch_goes_forward_only() -> None:
    presence, _ = a_map(1)
    assert merge_touch(presence.touches(0), AGENT, NOW_S - 1000, presence.terms) is None


def test_tombstones_say_why_are_bounded_and_end_with_a_new_record() -> None:
    presence, keys = a_map(6, tombstones_max=4)
    forgotten = []
    for key in keys:
        presence.remove(np.array([presence.slot(key)]))
        fingerprints = np.array([fingerprint_of(key)], dtype=np.uint64)
        forgotten += presence.tombstones.bury(
            fingerprints, np.array([Presence.EVICTED], dtype=np.uint8), NOW_S
        ).tolist()
    assert ask(presence, keys, NOW_S) == [Presence.NEVER] * 2 + [Presence.EVICTED] * 4
    assert forgotten == [fingerprint_of(key) for key in keys[:2]]
    presence.insert(rows_for(keys[5]))
    assert ask(presence, keys[5:], NOW_S) == [Presence.PRESENT]
    assert presence.tombstones.forget(fingerprints).tolist() == fingerprints.tolist()
    presence.remove(np.array([presence.slot(keys[5])]))
    assert ask(presence, keys[5:], NOW_S) == [Presence.NEVER]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 12))
def test_the_map_is_a_dictionary(seed: int, steps: int) -> None:
    """Rows come, are replaced and go in batches, through every growth of the table, some with fingerprints that differ
    in one bit only: each key has the place of its last row, or none.
    """
    drawn = random.Random(seed)
    presence = PresenceMap(Terms.of(TEST_RULES), 16)
    model: dict[BlockKey, int] = {}
    pool = [BlockKey((number << drawn.choice((0, 40))).to_bytes(8, "big") + bytes(24)) for number in range(6000)]
    pool = list(dict.fromkeys(pool))
    place = 0
    for _ in range(steps):
        some = drawn.sample(pool, drawn.choice((1, 40, 2500)))
        places = {key: place + at for at, key in enumerate(some)}
        place += len(some)
        presence.insert(entries_of(a_header(key, place=places[key]) for key in some))
        model |= places
        gone = drawn.sample(sorted(model), drawn.randrange(len(model)))
        presence.remove(presence.slots(key_words(b"".join(gone))))
        for key in gone:
            del model[key]
        slots = presence.slots(key_words(b"".join(pool)))
        assert {key for key, slot in zip(pool, slots, strict=True) if slot >= 0} == model.keys()
        assert len(presence) == len(presence.used()) == len(model)
        for key, slot in zip(pool, slots.tolist(), strict=True):
            if slot >= 0:
                wanted = a_header(key, place=model[key])
                at = np.array([slot])
                assert (presence.segments_of(at)[0], presence.offsets_of(at)[0]) == (wanted.segment, wanted.offset)
    in_order = presence.from_fingerprint(0, len(model) + 1, None)
    assert presence.fingerprints_of(in_order).tolist() == sorted(fingerprint_of(key) for key in model)
    in_first = {key for key, at in model.items() if at < 100}
    assert {int(value) for value in presence.fingerprints_of(presence.in_segment(1))} == set(
        map(fingerprint_of, in_first)
    )


def test_one_key_is_found_where_many_are() -> None:
    """The short ways for one key and one slot agree with those for many, while buckets are split and rows reused."""
    draw = random.Random(7)
    presence, _ = a_map(0)
    keys: list[BlockKey] = []
    for _ in range(12):
        fresh = [BlockKey(draw.randbytes(32)) for _ in range(400)]
        presence.insert(rows_for(*fresh))
        gone = draw.sample(keys, len(keys) // 3)
        presence.remove(presence.slots(key_words(b"".join(gone)))) if gone else None
        keys = [key for key in (*keys, *fresh) if key not in set(gone)]
        asked = [*draw.sample(keys, 100), *gone[:20], *(BlockKey(key[:8] + bytes(24)) for key in fresh[:20])]
        words, digests = key_words(b"".join(asked)), digest_words(b"".join(key[:16] for key in asked))
        slots = presence.slots(words)
        same = presence.matches(slots, words, SPACE, digests)
        alive = presence.alive(slots, NOW_S + 60)
        assert [presence.slot(key) for key in asked] == slots.tolist()
        assert [presence.find(SPACE, key, TokenDigest(key[:16])) for key in asked] == np.where(same, slots, -1).tolist()
        for at in np.flatnonzero(slots >= 0).tolist():
            one, row = slots[at : at + 1], presence.row(int(slots[at]))
            assert presence.is_alive(int(one[0]), NOW_S + 60) == alive[at]
            assert (row.segment, row.offset) == (presence.segments_of(one)[0], presence.offsets_of(one)[0])
            assert row.record_bytes == presence.record_bytes_of(one)[0]
            assert row.fingerprint == fingerprint_of(asked[at])


def test_what_was_stored_together_is_found_as_anything_is() -> None:
    """Keys asked in the order in which they were stored, or nearly: each is found where it is by itself, and none that
    was removed, nor one that looks like a row that is not in use.
    """
    draw = random.Random(3)
    table = FingerprintTable(4096)
    stored: list[int] = []
    for _ in range(8):
        fresh = [draw.getrandbits(64) for _ in range(500)]
        table.insert(np.array(fresh, np.uint64))
        stored += fresh
        begin = draw.randrange(len(stored) - 100)
        gone = set(stored[begin : begin + draw.choice((1, 40, 90))])
        kept = set(stored)
        asks = [stored, fresh, stored[begin + 60 :], stored[:-40] + fresh[:30] + [0] * 64, stored[::-1]]
        absent = draw.getrandbits(64)
        asks += [[*stored[:at], absent, 0, *stored[at:]] for at in (0, 1, 40, 300)]
        for removed in (False, True):
            if removed:
                table.remove(table.find(np.array(sorted(gone), np.uint64)))
                kept -= gone
            for ask in asks:
                slots = table.find(np.array(ask, np.uint64)).tolist()
                assert slots == [table.find_one(each) for each in ask]
                assert [slot >= 0 for slot in slots] == [each in kept for each in ask]
        lies = table.find_one(stored[begin - 1]) if begin else -1
        behind = [stored[begin - 1], *[0] * 64] if lies >= 0 else [0] * 64
        assert table.find(np.array(behind, np.uint64)).tolist()[1:] == [-1] * 64
        stored = [each for each in stored if each not in gone]


def test_a_block_takes_at_most_forty_bytes() -> None:
    """All tables included, while the map grows; rows that only one class touched."""
    presence = PresenceMap(Terms.of(TEST_RULES), 0)
    rows = np.repeat(rows_for(BlockKey(bytes(32))), 50_000)
    for turn in range(1, 5):
        rows["key"][:, 0] = np.random.default_rng(turn).integers(0, 2**63, len(rows), dtype=np.uint64)
        presence.insert(rows[np.unique(fingerprints_in(rows), return_index=True)[1]])
        assert presence.memory_bytes <= 40 * len(presence)


def test_crafted_keys_take_as_few_steps_as_any() -> None:
    """Keys that are alike in all but a few bits share a bucket no more than random ones do: a look-up, of those that
    are stored or of others of their kind, follows at most a few links for one key, and about one on average.
    """
    drawn = random.Random(1)
    count = 50_000
    families: dict[str, Callable[[int], bytes]] = {
        "random": lambda number: drawn.randbytes(8),
        "equal begins": lambda number: bytes(4) + number.to_bytes(4, "little"),
        "equal ends": lambda number: number.to_bytes(4, "little") + bytes(4),
        "equal halves": lambda number: 2 * number.to_bytes(4, "little"),
        "bits in reverse": lambda number: int(f"{number:064b}"[::-1], 2).to_bytes(8, "big"),
        "steps of a power of two": lambda number: (number << 16).to_bytes(8, "big"),
        "steps of a large power of two": lambda number: (number << 40).to_bytes(8, "big"),
        "few bits set": lambda number: (1 << number % 63 | 1 << number // 63 % 61 | number // 3843 << 20).to_bytes(
            8, "big"
        ),
    }
    for name, crafted in families.items():
        made = list(dict.fromkeys(crafted(number) for number in range(2 * count)))
        stored, others = made[: len(made) // 2], made[len(made) // 2 :]
        table = FingerprintTable(count)
        for begin in range(0, len(stored), 999):
            table.insert(key_words(b"".join(key + bytes(24) for key in stored[begin : begin + 999]))[:, 0])
        for keys, present in ((stored, True), (others, False)):
            fingerprints = np.ascontiguousarray(key_words(b"".join(key + bytes(24) for key in keys))[:, 0])
            assert ((table.find(fingerprints) >= 0) == present).all()
            links = links_followed(table, fingerprints)
            assert links.max() <= 20, (name, present, links.max())
            assert links.mean() <= (2.0 if present else 1.0), (name, present, links.mean())


def links_followed(table: FingerprintTable, fingerprints: Words) -> npt.NDArray[np.int64]:
    """How many rows of its chain the search for each fingerprint looks at."""
    counts = np.zeros(len(fingerprints), np.int64)
    buckets, marks = table._places(fingerprints)
    heads = table._heads[buckets]
    at = np.where(heads & marks, heads & ROWS_MAX, 0).astype(np.int64)
    while (going := at > 0).any():
        counts += going
        found = table.fingerprints[at - 1] == fingerprints
        at = np.where(going & ~found, table._next[at - 1], 0).astype(np.int64)
    return counts
