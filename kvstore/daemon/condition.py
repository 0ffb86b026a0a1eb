"""The condition of one volume, as an operator wants to see it: whether it takes puts, and whether its disk is failing.

Owns the words for it and what they mean. Does not know other volumes, nor does anything about what it sees.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from kvstore.daemon.ledger import Ledger
from kvstore.daemon.volume import VolumeLayout
from kvstore.daemon.wear import Wear

OK, LOW_SPACE, FAILING = "ok", "low_space", "failing"
"""``low_space``: others filled the file system, so puts that need a new file are refused. ``failing``: reads or writes
failed lately."""
TROUBLE_S = 600.0
"""A volume counts as failing for so long after the last error that was seen."""


class Condition:
    """Remembers when it last saw errors; asked from any thread."""

    def __init__(
        self, ledger: Ledger, layout: VolumeLayout, wear: Wear, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._wear = wear
        self._ledger = ledger
        self._layout = layout
        self._monotonic = monotonic
        self._errors = 0
        self._trouble_s = -TROUBLE_S

    def keep_books(self, now_s: float) -> None:
        """Count what was written, and write that down."""
        self._wear.observe(self._ledger.counters.bytes_written, now_s)
        self._wear.save()

    def report(self, now_s: float) -> dict[str, Any]:
        """``state``, the same as two flags, and the numbers behind it."""
        counters, segments = self._ledger.counters, self._ledger.segments
        watermark = segments.watermark
        self._wear.observe(counters.bytes_written, now_s)
        low, failing = watermark.is_low() or segments.held_back, self._is_failing()
        return {
            "state": FAILING if failing else LOW_SPACE if low else OK,
            "failing": int(failing),
            "low_space": int(low),
            "capacity_bytes": self._layout.capacity_bytes,
            "free_bytes": watermark.free_bytes(),
            "free_min_bytes": watermark.free_min_bytes,
            "segments": len(segments.segments),
            "segments_failed": sum(item.failed for item in segments.segments.values()),
            "blocks": len(self._ledger.presence),
            "read_errors": counters.read_errors,
            "write_errors": counters.write_errors,
            "shed_low_space": counters.shed_low_space,
            "page_cache": segments.page_cache.value,
            **self._wear.report(now_s),
        }

    def _is_failing(self) -> bool:
        now_s = self._monotonic()
        errors = self._ledger.counters.read_errors + self._ledger.counters.write_errors
        if errors != self._errors:
            self._errors, self._trouble_s = errors, now_s
        return now_s - self._trouble_s < TROUBLE_S
