"""The parts of the attach bench, in their order, and the time that each may take.

Owns the division of a run's time. Does not know what a part does. Invariants: a part that took less leaves its time to
those that follow; what the bars ask for comes first; what each part took is kept, in the order in which they were run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

TIER, PROMPTS, REPLAY, LONG = "tier", "prompts", "replay", "long"
SHARES = {TIER: 0.10, PROMPTS: 0.46, REPLAY: 0.18, LONG: 0.26}
"""Of a run's time, by part: our tier of vLLM beside its own; prompts cold, saved, and after a restart; a replay of
conversations with a restart in between; prompts that take half a minute to compute.
"""
PARTS = tuple(SHARES)


@dataclass(slots=True)
class Timetable:
    """``parts``: those that are run; the others' time is theirs."""

    seconds_max: float
    parts: Sequence[str] = PARTS
    monotonic_s: Callable[[], float] = time.monotonic
    spent_s: dict[str, float] = field(default_factory=dict)
    _began_s: float | None = None

    @contextmanager
    def part(self, name: str) -> Iterator[float]:
        """Run one part; gives the time of the clock at which it should be over."""
        begun_s = self.monotonic_s()
        if self._began_s is None:
            self._began_s = begun_s
        left_s = max(self._began_s + self.seconds_max - begun_s, 0.0)
        follow = PARTS[PARTS.index(name) :]
        share = SHARES[name] / sum(SHARES[part] for part in follow if part in self.parts or part == name)
        try:
            yield begun_s + left_s * share
        finally:
            self.spent_s[name] = self.monotonic_s() - begun_s
