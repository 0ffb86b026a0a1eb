"""The model of promises: who lasts how long on a capacity, when room runs out; and the counts that it rests on."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from kvstore.daemon.files import Files
from kvstore.daemon.ingest import HOURS_MAX, Ingest
from kvstore.limits import MIB
from kvstore.promises import (
    DAY_S,
    HOUR_S,
    RATIO_MAX,
    ClassIngest,
    Forecast,
    Outlook,
    Room,
    forecast,
    ingest_from_json,
    ingest_json,
    merge_ingest,
    merge_rooms,
)
from kvstore.store import Pin
from kvstore.testing import T0_S, ManualClock
from kvstore.traffic import AGENT, CHAT, ClassRule, ClassRules
from tests.support.nodes import open_node, puts_of
from tests.support.spaces import a_chain, a_space

NOW_S = int(T0_S) // HOUR_S * HOUR_S
AGENT_RULE = ClassRule(AGENT, "agent", 3 * DAY_S, priority=100)
CHAT_RULE = ClassRule(CHAT, "chat", 7 * DAY_S, priority=200)
RULES = ClassRules((AGENT_RULE, CHAT_RULE))
SEGMENT = MIB


def steady(mib_per_day: float, days: float = 10, longer_s: float = 0.0) -> ClassIngest:
    """A class of which so much came every hour for so many days."""
    hours = int(days * 24)
    each = round(mib_per_day * MIB / 24)
    longer = round(each * longer_s)
    held = (0, *[longer] * hours)
    return ClassIngest((0, *[each] * hours), held, held, (0,) * (hours + 1), NOW_S, NOW_S - hours * HOUR_S)


def room(mib: int, used: int = 0) -> Room:
    return Room(SEGMENT, mib + 1, used)


def looked(agent: float, chat: float, mib: int, rules: ClassRules = RULES, used: int = 0) -> Forecast:
    return forecast({AGENT: steady(agent), CHAT: steady(chat)}, rules, room(mib, used), DAY_S)


def of(found: Forecast, name: str) -> Outlook:
    return next(item for item in found.classes if item.name == name)


def test_what_fits_holds_and_has_room_to_grow() -> None:
    """10 days of 100 MiB: that, the segments' first pages, and a half-full segment a day; the rest is room to grow."""
    found = looked(100, 100, 2000)
    assert found.demand_bytes / MIB == pytest.approx(1000 * 256 / 255 + 0.5 * 10 + 1, abs=1)
    assert all(item.holds and item.lasts_s == item.keep_for_s for item in found.classes)
    assert of(found, "agent").ratio == pytest.approx(1 + 990 / 303, rel=0.01)
    assert (found.missing_bytes, found.breaks_in_s) == (0, None)


def test_the_cheaper_class_gives_way() -> None:
    """By priority: chat keeps its promise, agent has what is left."""
    found = looked(100, 100, 850)
    assert of(found, "chat").holds
    assert of(found, "agent").lasts_s / DAY_S == pytest.approx((850 - 707) / 101, rel=0.01)
    assert of(found, "agent").ratio == pytest.approx(of(found, "agent").lasts_s / (3 * DAY_S))
    assert found.missing_bytes / MIB == pytest.approx(160, abs=1)


def test_a_floor_holds_against_a_dearer_class() -> None:
    """What the cheaper class is guaranteed, the dearer one cannot have."""
    floor = ClassRules((replace(AGENT_RULE, floor_bytes=200 * MIB), CHAT_RULE))
    found = looked(100, 100, 600, floor)
    assert of(found, "agent").lasts_s / DAY_S == pytest.approx(2.0, rel=0.02)
    assert of(found, "chat").lasts_s / DAY_S == pytest.approx(4.0, rel=0.02)


def test_a_ceiling_holds_where_room_is_short_and_only_there() -> None:
    """What the dearer class holds beyond it goes first, as far as needed; with room for all nothing does."""
    capped = ClassRules((AGENT_RULE, replace(CHAT_RULE, ceiling_bytes=300 * MIB)))
    found = looked(100, 100, 850, capped)
    assert of(found, "agent").holds
    assert of(found, "chat").lasts_s / DAY_S == pytest.approx((850 - 305) / 101, rel=0.02)
    found = looked(100, 100, 500, capped)
    assert of(found, "chat").lasts_s / DAY_S == pytest.approx(3.0, rel=0.02)
    assert of(found, "agent").lasts_s / DAY_S == pytest.approx((500 - 303) / 101, rel=0.05)
    assert all(item.holds for item in looked(100, 100, 2000, capped).classes)


def test_equal_priorities_give_up_the_same_time() -> None:
    """The earliest promise goes first, whosever it is: both end as much too early."""
    equal = ClassRules((AGENT_RULE, replace(CHAT_RULE, priority=100)))
    found = looked(100, 100, 800, equal)
    early_s = [item.keep_for_s - item.lasts_s for item in found.classes]
    assert early_s[0] == pytest.approx(early_s[1], abs=1)
    assert early_s[0] / DAY_S == pytest.approx(1.0, rel=0.05)


def test_touches_are_bytes_held_longer() -> None:
    """Touches that keep each block two more days on average need as much as a longer promise would."""
    touched = forecast({AGENT: steady(100, longer_s=2 * DAY_S)}, ClassRules((AGENT_RULE,)), room(10_000), DAY_S)
    longer = replace(AGENT_RULE, keep_for_s=5 * DAY_S)
    promised = forecast({AGENT: steady(100)}, ClassRules((longer,)), room(10_000), DAY_S)
    assert touched.demand_bytes == pytest.approx(promised.demand_bytes, rel=1e-3)


def test_room_runs_out_when_the_segments_do() -> None:
    """A new store fills at its ingest, where it must; a full one that lacks room breaks now."""
    fresh = {AGENT: steady(100, days=1)}
    rules = ClassRules((AGENT_RULE,))
    assert forecast(fresh, rules, room(250, used=100), DAY_S).breaks_in_s == pytest.approx(1.5 * DAY_S, rel=0.02)
    assert forecast(fresh, rules, room(400, used=100), DAY_S).breaks_in_s is None
    assert looked(100, 100, 850, used=850).breaks_in_s == 0.0


def test_records_that_do_not_fill_a_segment_need_more_of_them() -> None:
    """Of records a little over a third of a segment, two fit each."""
    ragged = replace(steady(100), blocks=(0, *[round(100 / 24 / 0.35)] * 240))
    rules = ClassRules((AGENT_RULE,))
    assert forecast({AGENT: ragged}, rules, room(999), DAY_S).demand_bytes / MIB == pytest.approx(300 / 0.7, rel=0.02)


def test_small_blocks_run_out_of_index_before_disk() -> None:
    """Where the index takes fewer blocks than fit the segments, it decides: 3 days of 1,000 blocks need 3,000."""
    small = replace(steady(100), blocks=(0, *[1000 // 24 + 1] * 240))
    rules = ClassRules((AGENT_RULE,))
    tight = replace(room(10_000), blocks_max=1500, blocks_used=600)
    found = forecast({AGENT: small}, rules, tight, DAY_S)
    assert of(found, "agent").lasts_s / DAY_S == pytest.approx(1500 / 1008, rel=0.01)
    assert forecast({AGENT: small}, rules, replace(tight, blocks_max=4000), DAY_S).missing_bytes == 0
    fresh = {
        AGENT: replace(small, stored_bytes=small.stored_bytes[:2], blocks=small.blocks[:2], since_s=NOW_S - HOUR_S)
    }
    assert forecast(fresh, rules, tight, DAY_S).breaks_in_s == pytest.approx(900 / 1008 * DAY_S, rel=0.05)


def test_a_class_that_no_rule_names_counts_as_the_dearest() -> None:
    """It is kept for the longest promise, and known classes give way to it."""
    found = forecast({AGENT: steady(100), 99: steady(100)}, RULES, room(850), DAY_S)
    assert (of(found, "class-99").keep_for_s, of(found, "class-99").holds) == (7 * DAY_S, True)
    assert not of(found, "agent").holds


def test_a_class_of_which_nothing_comes_holds() -> None:
    """It needs nothing, and could grow without end."""
    found = forecast({}, RULES, room(8), DAY_S)
    assert [item.ratio for item in found.classes] == [RATIO_MAX] * 2
    assert found.demand_bytes == 0


def test_the_window_is_the_last_hour_or_day() -> None:
    """A burst of the last hour counts 24 times as much in it as in the day; a young count is not watered down."""
    burst = ClassIngest((0, 24 * MIB, *[0] * 47), (0,) * 49, (0,) * 49, (0,) * 49, NOW_S, NOW_S - 2 * DAY_S)
    assert burst.rate_bytes_per_s(HOUR_S) == pytest.approx(24 * MIB / HOUR_S)
    assert burst.rate_bytes_per_s(DAY_S) == pytest.approx(24 * MIB / DAY_S)
    half = replace(burst, now_s=NOW_S + HOUR_S // 2)
    assert replace(half, stored_bytes=(MIB, 2 * MIB)).rate_bytes_per_s(HOUR_S) == pytest.approx(2 * MIB / HOUR_S)
    young = ClassIngest((MIB, 4 * MIB, 4 * MIB), (0,) * 3, (0,) * 3, (1,) * 3, NOW_S + 900, NOW_S - 2 * HOUR_S)
    assert young.rate_bytes_per_s(DAY_S) == pytest.approx(9 * MIB / 8100)
    assert replace(young, since_s=NOW_S + 890).rate_bytes_per_s(DAY_S) == young.rate_bytes_per_s(HOUR_S)


def test_what_a_node_tells_is_read_back() -> None:
    """Through JSON and back; anything else is refused."""
    ingest = {AGENT: steady(10), CHAT: steady(5, longer_s=100)}
    text = json.dumps(ingest_json(ingest, room(8)))
    assert ingest_from_json(json.loads(text)) == (ingest, room(8))
    for wrong in (
        {},
        {"classes": [{}], "room": {}},
        {"classes": 1, "room": asdict(room(8))},
        {"classes": [], "room": {}},
    ):
        with pytest.raises(ValueError, match="not what a node tells"):
            ingest_from_json(wrong)


def test_volumes_of_a_node_count_together() -> None:
    """Two volumes have twice the room and the sum of what came."""
    both = merge_ingest([{AGENT: steady(10)}, {AGENT: steady(20, days=5)}])
    assert both[AGENT].rate_bytes_per_s(DAY_S) == pytest.approx(30 * MIB / DAY_S, rel=1e-3)
    assert both[AGENT].since_s == steady(10).since_s
    assert merge_rooms([room(8, 2), replace(room(8, 1), segment_bytes=2 * SEGMENT)]) == Room(SEGMENT, 27, 4, 3)


# --- counting -------------------------------------------------------------------------------------------------------


def test_counts_survive_a_restart(tmp_path: Path) -> None:
    """What was saved is there again, by hour and class."""
    counted = Ingest()
    for hour in range(5):
        counted.stored(AGENT, 1, 100 + hour, NOW_S + hour * HOUR_S)
        counted.lengthened(CHAT, 7, 9, NOW_S + hour * HOUR_S)
    counted.save(tmp_path / "ingest.json")
    found = Ingest.load(tmp_path / "ingest.json")
    now_s = NOW_S + 4 * HOUR_S
    assert found.of_classes(now_s) == counted.of_classes(now_s)
    assert found.of_classes(now_s)[AGENT].stored_bytes == (104, 103, 102, 101, 100)
    assert found.of_classes(now_s)[CHAT].segments_byte_s == (9,) * 5
    found.stored(AGENT, 1, 1, now_s)
    assert found.of_classes(now_s)[AGENT].stored_bytes[0] == 105


@pytest.mark.parametrize(
    "text",
    ["", "{}", "[]", '{"since_s": -1, "hours": {}}', '{"since_s": 1, "hours": {"1": {"1": [1, 2, 3]}}}',
     '{"since_s": 1, "hours": {"1": {"256": [1, 2, 3, 4]}}}', '{"since_s": 1, "hours": {"x": {}}}',
     '{"since_s": 1, "hours": {"1": {"1": [1, NaN, 3, 4]}}}', '{"since_s": 1, "hours": 5}'],
)  # fmt: skip
def test_a_damaged_file_is_counted_anew(tmp_path: Path, text: str) -> None:
    """Nothing but a forecast depends on it."""
    (tmp_path / "ingest.json").write_text(text)
    assert Ingest.load(tmp_path / "ingest.json").of_classes(NOW_S) == {}


@pytest.mark.parametrize("jump_s", [10 * 365 * DAY_S, -10 * 365 * DAY_S])
def test_a_clock_that_jumps_costs_only_counts(jump_s: int) -> None:
    """Ten years on or back and home again: bounded, and what comes afterwards is counted."""
    counted = Ingest()
    for at_s in (NOW_S, NOW_S + jump_s, NOW_S + HOUR_S):
        counted.stored(AGENT, 1, 100, at_s)
    found = counted.of_classes(NOW_S + HOUR_S + 60)[AGENT]
    assert found.stored_bytes[0] == 100
    assert len(found.stored_bytes) <= HOURS_MAX
    assert math.isfinite(found.rate_bytes_per_s(DAY_S))
    assert found.rate_bytes_per_s(DAY_S) > 0


def test_hours_are_bounded() -> None:
    """Two months of hours leave the last ones."""
    counted = Ingest()
    for hour in range(60 * 24):
        counted.stored(AGENT, 1, 1, NOW_S + hour * HOUR_S)
    assert len(counted.of_classes(NOW_S + 60 * DAY_S - 1)[AGENT].stored_bytes) == HOURS_MAX


def test_what_pins_hold_and_what_others_have_filled_is_no_room() -> None:
    """Either breaks a promise as a smaller store would, and later if the disk is not full yet."""
    whole, smaller = room(2000), room(1600)
    pinned, withheld = replace(whole, pinned_bytes=400 * MIB), replace(whole, segments_withheld=400)
    counts = {AGENT: steady(300), CHAT: steady(100)}
    expected = forecast(counts, RULES, smaller, DAY_S)
    for found in (forecast(counts, RULES, item, DAY_S) for item in (pinned, withheld)):
        assert found.usable_bytes == expected.usable_bytes
        assert [item.ratio for item in found.classes] == pytest.approx([item.ratio for item in expected.classes])
    assert merge_rooms([pinned, withheld]).usable_bytes == 2 * smaller.usable_bytes
    told = ingest_json(counts, withheld) | {"room": {**asdict(withheld), "news": 1}}
    assert ingest_from_json(told)[1] == withheld


def test_a_node_tells_of_pins_and_of_a_full_file_system(tmp_path: Path) -> None:
    """Blocks whose pin ends before their promise hold nothing longer; a file that is there already needs no room."""
    files = Filled()
    node = open_node(tmp_path, ManualClock(), files=files)
    space = node.register_space(a_space())
    names = list(a_chain(space, 3).names)
    node.put(space, puts_of(names, 100_000), traffic_class=AGENT)
    until_s = int(node._clock.now_s()) + HOUR_S
    node.pin([Pin(space, names[0].key, "a", "b"), Pin(space, names[1].key, "a", "b", until_s)])
    seen = node._shards[0].room()
    assert 100_000 < seen.pinned_bytes < 110_000
    assert seen.segments_withheld == 0
    files.free_bytes = node._shards[0]._ledger.segments.watermark.free_min_bytes + 3 * seen.segment_bytes + 1
    there = node.stats()["segments"]
    assert node._shards[0].room().segments_withheld == seen.segments_max - there - 3
    node.close()


class Filled(Files):
    """A file system of which others leave so much."""

    free_bytes = 2**40

    def space(self, path: Path) -> tuple[int, int]:
        return self.free_bytes, 2**40
