"""Times, spans and other people's names, as they are put into words for people.

Owns how each looks. Invariant: whatever is given is shown somehow: these are called where something else is explained.
"""

from __future__ import annotations

from datetime import UTC, datetime

from kvstore.units import DURATION_S_MAX, format_duration


def utc(time_s: int) -> str:
    """A time since the epoch, like 2026-11-30 08:15:02 UTC; one beyond the calendar as its number."""
    try:
        return f"{datetime.fromtimestamp(time_s, UTC):%Y-%m-%d %H:%M:%S} UTC"
    except (OverflowError, OSError, ValueError):
        return f"{time_s} s"


def span(seconds: float) -> str:
    """A duration in its two largest units: 2d23h, 5m1s; 0s for a negative one, at most 100 years."""
    whole = min(max(0, int(seconds)), DURATION_S_MAX)
    grain = 3600 if whole >= 86_400 else 60 if whole >= 3600 else 1
    return format_duration(whole - whole % grain)


def moment(time_s: int, now_s: float) -> str:
    """A time and how far it is from now, like 2026-11-30 08:15:02 UTC (in 2d23h)."""
    distance = f"in {span(time_s - now_s)}" if time_s > now_s else f"{span(now_s - time_s)} ago"
    return f"{utc(time_s)} ({distance})"


def printable(text: str) -> str:
    """Names come from other people: what could steer a terminal is shown as a mark."""
    return "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text)
