"""The sweep: giving back what is past its promise, once or again and again.

Owns the loop and what a failure means for it. Does not know which segments go: the store decides that by the policy in
force. Invariants: an expired block is never served whether or not a sweep has run, so a late sweep costs room, never
correctness; the loop ends when ``wait`` says so, and at once on an error that time does not cure.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvstore.errors import StoreError
from kvstore.store import Clock, Effect, Store

SWEEP_S_DEFAULT = 120.0
"""Deadline of one sweep: rewriting survivors reads and writes segments."""
EVERY_S_MIN = 1.0


@dataclass(frozen=True, slots=True)
class SweepReport:
    """One sweep. ``effect`` is None when it failed as a whole; ``error`` then says how."""

    at_s: float
    effect: Effect | None
    error: str | None = None

    @property
    def complete(self) -> bool:
        """Whether every node answered."""
        return self.effect is not None and not self.effect.nodes_failed


def sweep_once(store: Store, *, apply: bool, deadline_s: float = SWEEP_S_DEFAULT) -> Effect:
    """One sweep over all nodes (dry without ``apply``). Nodes that did not answer are named in the effect."""
    return store.sweep(apply=apply, deadline_s=deadline_s)


def sweep_loop(
    store: Store,
    *,
    apply: bool,
    every_s: float,
    clock: Clock,
    wait: Callable[[float], bool],
    report: Callable[[SweepReport], None],
    deadline_s: float = SWEEP_S_DEFAULT,
) -> SweepReport:
    """Sweep, report, wait, again, until ``wait(seconds)`` returns True (asked to stop). Returns the last report.

    Sweeps begin ``every_s`` apart; after one that took longer the next begins at once. A retryable failure is reported
    and tried again in the next round; another one raises.
    """
    if every_s < EVERY_S_MIN:
        raise ValueError(f"sweeps are at least {EVERY_S_MIN:g} s apart, not {every_s:g}")
    while True:
        began_s = clock.now_s()
        latest = _attempt(store, began_s, apply=apply, deadline_s=deadline_s)
        report(latest)
        took_s = max(0.0, clock.now_s() - began_s)
        if wait(max(0.0, every_s - took_s)):
            return latest


def _attempt(store: Store, at_s: float, *, apply: bool, deadline_s: float) -> SweepReport:
    try:
        return SweepReport(at_s, sweep_once(store, apply=apply, deadline_s=deadline_s))
    except StoreError as error:
        if not error.retryable:
            raise
        return SweepReport(at_s, None, f"{type(error).__name__}: {error}")
