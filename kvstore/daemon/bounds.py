"""What an operator bounds of one volume: the space that it leaves free, what its disk has written, what is taken in,
and whether it goes around the page cache.

Owns how these four are made for the volumes of a node. Does not apply any of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from kvstore.daemon.files import Files
from kvstore.daemon.intake import Intake
from kvstore.daemon.page_cache import PageCache, page_cache_of
from kvstore.daemon.volume import WEAR_NAME, Volume, VolumeLayout
from kvstore.daemon.watermark import Watermark
from kvstore.daemon.wear import Wear


@dataclass(frozen=True, slots=True)
class Bounds:
    """Of one of the node's ``volumes``; the intake is the node's. ``overwrite_aged``: as in ``NodeConfig``."""

    watermark: Watermark
    wear: Wear
    intake: Intake
    overwrite_aged: bool = False
    volumes: int = 1
    page_cache: PageCache = PageCache.KEEP


def bounds_of(
    volumes: Sequence[Volume],
    layouts: Sequence[VolumeLayout],
    free_min_bytes: Sequence[int],
    files: Files,
    now_s: float,
    *,
    overwrite_aged: bool = False,
    bypass_page_cache: bool = False,
) -> list[Bounds]:
    """Of each volume, with the books that an earlier process left there."""
    wears = [
        Wear(volume.path / WEAR_NAME, layout.capacity_bytes, now_s)
        for volume, layout in zip(volumes, layouts, strict=True)
    ]
    spent: Counter[int] = Counter()
    for wear in wears:
        spent.update(wear.classes_today(now_s))
    intake = Intake(spent, now_s)
    return [
        Bounds(
            Watermark(files, volume.path, free_min),
            wear,
            intake,
            overwrite_aged,
            len(volumes),
            page_cache_of(volume.path, files, bypass=bypass_page_cache),
        )
        for volume, free_min, wear in zip(volumes, free_min_bytes, wears, strict=True)
    ]
