"""Sizes and durations as people write them: ``20GiB``, ``3d12h``, ``250ms``.

Owns parsing and printing of both. Invariants: a number without a unit is an error (nobody has to guess whether 7 is
days or seconds), results are exact and bounded, and ``parse(format(x)) == x``.
"""

from __future__ import annotations

import re
from fractions import Fraction

BYTES_MAX = 2**63 - 1
DURATION_S_MAX = 100 * 365 * 86_400
"""A hundred years; a longer promise is a slip of the pen."""

_TEXT_MAX = 64
_BYTE_UNITS: dict[str, int] = {"B": 1}
_BYTE_UNITS |= {f"{letter}B": 1000**power for power, letter in enumerate("kMGTPE", start=1)}
_BYTE_UNITS |= {f"{letter}iB": 1024**power for power, letter in enumerate("KMGTPE", start=1)}
_DURATION_UNITS: dict[str, int] = {"w": 604_800, "d": 86_400, "h": 3600, "m": 60, "s": 1}

_WAIT_UNITS = {"ms": Fraction(1, 1000), "s": Fraction(1), "m": Fraction(60), "h": Fraction(3600)}

_BYTES = re.compile(r"(\d{1,20}(?:\.\d{1,12})?)\s*([A-Za-z]*)\Z", re.ASCII)
_DURATION_PART = re.compile(r"(\d{1,12})([a-z]+)", re.ASCII)
_SECONDS = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)(ms|s|m|h)\Z", re.ASCII)


def parse_bytes(text: str) -> int:
    """Bytes from ``20GiB``, ``1.5TiB`` or ``512 MB``. Raises ValueError without a unit, or beyond 2^63-1 bytes."""
    match = _BYTES.match(text.strip()) if len(text) <= _TEXT_MAX else None
    if match is None:
        raise ValueError(f"{text[:_TEXT_MAX]!r} is not a size: write a number and a unit, such as 20GiB")
    number, unit = match.groups()
    if not unit:
        raise ValueError(f"size {text!r} has no unit: write {number}GiB, {number}MiB or {number}B")
    factor = next((factor for name, factor in _BYTE_UNITS.items() if name.lower() == unit.lower()), None)
    if factor is None:
        raise ValueError(f"size {text!r} has an unknown unit {unit!r}: use B, KiB, MiB, GiB, TiB (or kB, MB, GB, TB)")
    value = Fraction(number) * factor
    if value.denominator != 1:
        raise ValueError(f"size {text!r} is not a whole number of bytes")
    if value > BYTES_MAX:
        raise ValueError(f"size {text!r} is beyond 2^63-1 bytes")
    return int(value)


def parse_duration_s(text: str) -> int:
    """Whole seconds from ``3d12h``, ``90m`` or ``2w``.

    Raises ValueError without units, with units out of order, or beyond 100 years.
    """
    stripped = text.strip()
    parts = _DURATION_PART.findall(stripped) if len(text) <= _TEXT_MAX else []
    if stripped.isascii() and stripped.isdigit():
        raise ValueError(f"duration {text!r} has no unit: write {stripped}s, {stripped}m, {stripped}h or {stripped}d")
    if not parts or "".join(number + unit for number, unit in parts) != stripped:
        raise ValueError(f"{text[:_TEXT_MAX]!r} is not a duration: write whole numbers and units, such as 3d12h or 90m")
    total_s, factor_before = 0, None
    for number, unit in parts:
        factor = _DURATION_UNITS.get(unit)
        if factor is None:
            raise ValueError(f"duration {text!r} has an unknown unit {unit!r}: use w, d, h, m, s")
        if factor_before is not None and factor >= factor_before:
            raise ValueError(f"duration {text!r} must name each unit once, largest first, such as 3d12h")
        factor_before = factor
        total_s += int(number) * factor
    if total_s > DURATION_S_MAX:
        raise ValueError(f"duration {text!r} is longer than 100 years")
    return total_s


def parse_seconds(text: str) -> float:
    """A waiting time, possibly of a fraction: ``250ms``, ``1.5s``, ``2m``, or ``1m30s``; ValueError without a unit."""
    match = _SECONDS.match(text.strip()) if len(text) <= _TEXT_MAX else None
    if match is None:
        try:
            return float(parse_duration_s(text))
        except ValueError as error:
            shown = repr(text[:_TEXT_MAX])
            raise ValueError(f"{shown} is not a waiting time: write it like 250ms, 30s or 1m30s") from error
    number, unit = match.groups()
    seconds = Fraction(number) * _WAIT_UNITS[unit]
    if seconds > DURATION_S_MAX:
        raise ValueError(f"waiting time {text!r} is longer than 100 years")
    return float(seconds)


def format_bytes(count: int) -> str:
    """The largest binary unit that keeps the value exact (for configuration): 20GiB, 1536MiB, 3B."""
    if not 0 <= count <= BYTES_MAX:
        raise ValueError(f"{count} bytes is outside 0..2^63-1")
    for unit in ("EiB", "PiB", "TiB", "GiB", "MiB", "KiB"):
        factor = _BYTE_UNITS[unit]
        if count and count % factor == 0:
            return f"{count // factor}{unit}"
    return f"{count}B"


def format_bytes_short(count: int) -> str:
    """Rounded for reading: 1.4 GiB, 12.0 MiB, 17 B."""
    for unit in ("EiB", "PiB", "TiB", "GiB", "MiB", "KiB"):
        factor = _BYTE_UNITS[unit]
        if abs(count) >= factor:
            return f"{count / factor:.1f} {unit}"
    return f"{count} B"


def format_duration(seconds: int) -> str:
    """Exact: 3d12h, 90s becomes 1m30s, 0 becomes 0s. Days are the largest unit."""
    if not 0 <= seconds <= DURATION_S_MAX:
        raise ValueError(f"{seconds} s is outside 0 s..100 years")
    parts: list[str] = []
    rest_s = seconds
    for unit in ("d", "h", "m", "s"):
        count, rest_s = divmod(rest_s, _DURATION_UNITS[unit])
        if count:
            parts.append(f"{count}{unit}")
    return "".join(parts) or "0s"
