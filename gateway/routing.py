"""Which worker takes a request. Pure.

Owns the two orders: prefill by the least attention pairs waiting, decode by running requests and KV length. Does not
know connections or time. Invariants: an unhealthy, draining or excluded worker is never chosen; a decode worker is
chosen only from the space that prefill wrote into, since another one could not read its blocks.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

RUNNING_TOKENS = 512
"""One running request weighs as much as this many tokens of KV."""


@dataclass(frozen=True, slots=True)
class WorkerView:
    """What routing sees of one worker. Loads include what was sent since its last report."""

    url: str
    model: str
    space_id: str
    prefills: bool
    decodes: bool
    usable: bool
    queued_pairs: float
    running: int
    kv_tokens: int
    kv_tokens_max: int


def prefill_pairs(tokens: int) -> float:
    """Attention pairs (query x key) of a cold prompt: what a gateway can know before the look-up."""
    return tokens * (tokens + 1) / 2


def choose_prefill(
    views: Sequence[WorkerView], model: str, *, decode_follows: bool, excluded: Collection[str] = ()
) -> WorkerView | None:
    """The prefill worker with the least work waiting; ``decode_follows``: only where a decode worker can go on."""
    spaces = {view.space_id for view in views if view.usable and view.decodes and view.model == model}
    candidates = [
        view
        for view in views
        if view.usable
        and view.prefills
        and view.model == model
        and view.url not in excluded
        and (not decode_follows or view.space_id in spaces)
    ]
    return min(candidates, key=lambda view: (view.queued_pairs, view.running, view.kv_tokens), default=None)


def choose_decode(
    views: Sequence[WorkerView], model: str, space_id: str, tokens: int, *, excluded: Collection[str] = ()
) -> WorkerView | None:
    """The decode worker with the least running requests and KV; one without room only as a last resort."""
    candidates = [
        view
        for view in views
        if view.usable
        and view.decodes
        and view.model == model
        and view.space_id == space_id
        and view.url not in excluded
    ]

    def burden(view: WorkerView) -> tuple[bool, int]:
        full = view.kv_tokens + tokens > view.kv_tokens_max
        return full, view.running * RUNNING_TOKENS + view.kv_tokens

    return min(candidates, key=burden, default=None)
