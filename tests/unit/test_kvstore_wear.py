"""Wear: bytes written by day and volume, over restarts, jumps of the clock and damaged books."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstore.daemon.wear import DAY_S, DAYS_KEPT, Wear
from kvstore.limits import MIB
from kvstore.store import PutOutcome
from kvstore.testing import T0_S, ManualClock
from kvstore.traffic import AGENT
from tests.support.nodes import open_node, puts_of
from tests.support.spaces import a_chain, a_space

DAY = 20_000
NOON_S = DAY * DAY_S + DAY_S // 2


def test_the_last_day_is_todays_bytes_and_the_rest_of_yesterdays(tmp_path: Path) -> None:
    """Drive writes a day are those over the capacity; every byte is in the total once."""
    wear = Wear(tmp_path / "wear.json", 1000, NOON_S)
    wear.observe(4000, NOON_S)
    wear.observe(4500, NOON_S + DAY_S)
    assert wear.report(NOON_S + DAY_S) == {
        "written_day_bytes": 500 + 4000 // 2,
        "drive_writes_per_day": 2.5,
        "written_total_bytes": 4500,
        "written_since_s": NOON_S,
    }
    assert wear.report(NOON_S + 3 * DAY_S)["written_day_bytes"] == 0


def test_books_survive_a_restart_and_forget_old_days(tmp_path: Path) -> None:
    wear = Wear(tmp_path / "wear.json", 1000, NOON_S)
    for day in range(2 * DAYS_KEPT):
        wear.observe(100 * (day + 1), NOON_S + day * DAY_S)
    wear.count_class(AGENT, 70, NOON_S)
    wear.save()
    assert (tmp_path / "wear.json").stat().st_size < 4096
    again = Wear(tmp_path / "wear.json", 1000, NOON_S + 2 * DAYS_KEPT * DAY_S)
    assert again.classes_today(NOON_S) == {AGENT: 70}
    assert again.classes_today(NOON_S + DAY_S) == {}
    again.observe(5, NOON_S + 2 * DAYS_KEPT * DAY_S)
    report = again.report(NOON_S + 2 * DAYS_KEPT * DAY_S)
    assert (report["written_total_bytes"], report["written_since_s"]) == (6400 + 5, NOON_S)
    assert report["written_day_bytes"] == 5 + 50


def test_a_clock_that_was_ahead_loses_no_bytes(tmp_path: Path) -> None:
    wear = Wear(tmp_path / "wear.json", 1000, NOON_S)
    wear.observe(300, NOON_S + 900 * DAY_S)
    wear.observe(400, NOON_S)
    assert wear.report(NOON_S)["written_day_bytes"] == 400


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[]",
        b'{"days": 3}',
        b'{"days": {"x": 1}, "classes": {}, "total_bytes": 1, "since_s": 1, "class_day": 1}',
        b'{"days": {"1": -5}, "classes": {}, "total_bytes": 1, "since_s": 1, "class_day": 1}',
        b'{"days": {"1": true}, "classes": {}, "total_bytes": 1, "since_s": 1, "class_day": 1}',
    ],
)
def test_books_that_cannot_be_read_are_begun_anew(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "wear.json").write_bytes(text)
    wear = Wear(tmp_path / "wear.json", 1000, NOON_S)
    wear.observe(7, NOON_S)
    assert wear.report(NOON_S)["written_total_bytes"] == 7


def test_a_node_tells_the_wear_of_each_volume(tmp_path: Path) -> None:
    """What stats say is what lies on disk, and a sweep keeps it for a process that is killed."""
    clock = ManualClock(T0_S)
    node = open_node(tmp_path, clock)
    space = node.register_space(a_space())
    puts = puts_of(list(a_chain(space, 16, seed=1).names), 60_000)
    assert node.put(space, puts, traffic_class=AGENT) == [PutOutcome.STORED] * 16
    (volume,) = node.stats()["volumes"].values()
    written_bytes = node.stats()["bytes_written"]
    assert volume["written_day_bytes"] == written_bytes >= 16 * 60_000
    assert volume["drive_writes_per_day"] == written_bytes / (16 * MIB)
    node.sweep(apply=True)
    node.abandon()
    node = open_node(tmp_path, clock)
    (again,) = node.stats()["volumes"].values()
    assert again["written_total_bytes"] == written_bytes
    node.close()
