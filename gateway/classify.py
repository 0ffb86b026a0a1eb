"""Which traffic class a request belongs to. Pure.

Owns the order of precedence and nothing else: a header, then the API key's default, then the presence of tools (agent),
else chat. Does not know what a class means: how long its blocks are kept is the store's policy.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvstore.traffic import AGENT, CHAT, TrafficClass

CLASS_HEADER = "x-reprise-class"


def classify(
    header: str | None, key_default: TrafficClass | None, *, has_tools: bool, names: Mapping[str, TrafficClass]
) -> TrafficClass:
    """The request's class. Raises ValueError for a header that names no class, listing those that exist."""
    if header is not None:
        named = names.get(header.strip().lower())
        if named is None:
            raise ValueError(
                f"{CLASS_HEADER} {header[:64]!r} is not a traffic class here: use {', '.join(sorted(names))}"
            )
        return named
    if key_default is not None:
        return key_default
    return AGENT if has_tools else CHAT
