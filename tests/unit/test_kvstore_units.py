"""Sizes and durations: units required, exact, bounded, and what is printed is read back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.units import (
    BYTES_MAX,
    DURATION_S_MAX,
    format_bytes,
    format_bytes_short,
    format_duration,
    parse_bytes,
    parse_duration_s,
    parse_seconds,
)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("20GiB", 20 * 2**30),
        ("1.5TiB", 3 * 2**39),
        ("512 MB", 512_000_000),
        ("0B", 0),
        ("1kb", 1000),
        (" 7EiB ", 7 * 2**60),
    ],
)
def test_sizes(text: str, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("20", "no unit"),
        ("20 XB", "unknown unit"),
        ("", "not a size"),
        ("-1GiB", "not a size"),
        ("1.5B", "whole number"),
        ("8EiB", "beyond"),
        ("9" * 70, "not a size"),
        ("nanGiB", "not a size"),
        ("1e3GiB", "not a size"),
        ("٣GiB", "not a size"),
    ],
)
def test_bad_sizes_say_what_is_wrong(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("text", "seconds"), [("3d", 259_200), ("3d12h", 302_400), ("90m", 5400), ("2w", 1_209_600), ("0s", 0)]
)
def test_durations(text: str, seconds: int) -> None:
    assert parse_duration_s(text) == seconds


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("7", "no unit"),
        ("7x", "unknown unit"),
        ("12h3d", "largest first"),
        ("1d1d", "once"),
        ("1.5h", "whole numbers"),
        ("-3d", "not a duration"),
        ("", "not a duration"),
        ("101w900000d", "100 years"),
        ("3 d", "not a duration"),
    ],
)
def test_bad_durations_say_what_is_wrong(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        parse_duration_s(text)


def test_waiting_times() -> None:
    assert [parse_seconds(text) for text in ("250ms", "1.5s", "2m", "1h")] == [0.25, 1.5, 120.0, 3600.0]
    assert [parse_seconds(text) for text in ("1d", "1m30s", "3d12h")] == [86_400.0, 90.0, 302_400.0]
    for bad in ("250", "-1s", "ms", "1.5.1s", "30s1m", "1s500ms", "1m30"):
        with pytest.raises(ValueError, match="waiting time"):
            parse_seconds(bad)


@given(count=st.integers(0, BYTES_MAX))
def test_printed_sizes_are_read_back(count: int) -> None:
    assert parse_bytes(format_bytes(count)) == count


@given(seconds=st.integers(0, DURATION_S_MAX))
def test_printed_durations_are_read_back(seconds: int) -> None:
    assert parse_duration_s(format_duration(seconds)) == seconds


def test_sizes_for_reading_are_short() -> None:
    assert [format_bytes_short(count) for count in (17, 1536, 20 * 2**30)] == ["17 B", "1.5 KiB", "20.0 GiB"]
