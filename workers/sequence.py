"""One request on its way through the engine.

Owns ``LiveSequence``, the places it can be in, and the seam between the engine and a role. Knows neither tensors nor
the store. A sequence is changed on the engine's thread only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from enum import Enum
from typing import Protocol

from kvstore.keys import TokenChain
from workers.fetch import Fetched
from workers.plan import Plan
from workers.protocol import Finished, FirstToken, HandedOff, Reuse, Tokens, WorkerFailure, WorkRequest
from workers.publish import Ticket
from workers.slots import SlotTable
from workers.spaces import TenantSpace

Event = FirstToken | HandedOff | Tokens | Finished | WorkerFailure


class Role(Protocol):
    """What distinguishes a prefill from a decode. Called on the engine's thread."""

    @property
    def name(self) -> str: ...

    def token_chosen(self, sequence: LiveSequence, token: int) -> None:
        """A token was chosen: tell the client."""

    def ended(self, sequence: LiveSequence, published: bool) -> None:
        """All is computed, and published or not: send the last event."""


class Place(Enum):
    """Where a sequence is; the engine draws the way between them."""

    WAITING = "waiting"
    LOADING = "loading"
    RUNNING = "running"
    FINISHING = "finishing"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class Durations:
    """Seconds that one request spent. When its first token is chosen they add up to the time since it was submitted.

    ``queued_s``: waiting for slots, for a thread to load it, and for the steps of others, until the first token.
    ``compute_s``: its share of the steps that it ran in, by tokens.
    """

    queued_s: float = 0.0
    load_s: float = 0.0
    compute_s: float = 0.0


class LiveSequence:
    """A request's tokens, its slots, and how far it is.

    ``computed``: tokens whose KV is in the slots. ``next_publish``: first block not yet offered to the store.
    ``replay``: an exact replay that has not ended. ``reuse``: what the client is told, and ``fetched`` the fetch that
    it is about; both set by ``account``.
    """

    __slots__ = (
        "arrival",
        "chain",
        "compute_s",
        "computed",
        "emit",
        "end_reason",
        "fetched",
        "generate_max",
        "generated",
        "load_s",
        "next_publish",
        "place",
        "plan",
        "queued_s",
        "replay",
        "request",
        "reuse",
        "role",
        "settle_by_s",
        "space",
        "stop_token_ids",
        "submitted_s",
        "table",
        "ticket",
        "tokens",
        "window_floor",
    )

    def __init__(
        self,
        request: WorkRequest,
        role: Role,
        space: TenantSpace,
        emit: Callable[[Event], None],
        *,
        generate_max: int,
        stop_token_ids: frozenset[int] = frozenset(),
    ) -> None:
        self.request = request
        self.role = role
        self.space = space
        self.emit = emit
        self.generate_max = generate_max
        self.stop_token_ids = stop_token_ids
        self.tokens: list[int] = list(request.tokens)
        self.generated = 0
        self.place = Place.WAITING
        self.arrival = -1
        self.chain: TokenChain | None = None
        self.table: SlotTable | None = None
        self.plan: Plan | None = None
        self.fetched: Fetched | None = None
        self.replay: Iterator[int] | None = None
        self.computed = 0
        self.window_floor = 0
        self.next_publish = 0
        self.ticket: Ticket | None = None
        self.reuse: Reuse | None = None
        self.end_reason = ""
        self.submitted_s = self.settle_by_s = 0.0
        self.queued_s = self.load_s = self.compute_s = 0.0

    def account(self, fetched: Fetched) -> None:
        """Take a fetch, without its payloads, into what the client is told: once a request, also if it gave way.

        Coming back it finds what it had computed itself: no hit. A restore that gets less than the first one counts.
        """
        now = fetched.plan.reuse()
        before = self.reuse
        if before is None or self.fetched is None:
            self.fetched, self.reuse = fetched, now
            return
        failed_loads = self.fetched.failed_loads + fetched.failed_loads
        exact = now.exact and (before.exact or not self.generated)  # tokens chosen before stay what they were
        kept = before
        if not self.generated and now.hit_tokens < before.hit_tokens:
            self.fetched, kept = fetched, now
        self.fetched = replace(self.fetched, failed_loads=failed_loads)
        self.reuse = kept.model_copy(update={"exact": exact})

    def account_queued(self, now_s: float) -> None:
        """All the time that was neither loading nor its share of a step was waiting."""
        self.queued_s = max(0.0, now_s - self.submitted_s - self.load_s - self.compute_s)

    @property
    def remaining(self) -> int:
        """Tokens whose KV is still to be computed."""
        return len(self.tokens) - self.computed

    @property
    def decoding(self) -> bool:
        """It goes on token by token: a decode that has caught up."""
        return self.role.name == "decode" and self.remaining == 1

    @property
    def durations(self) -> Durations:
        return Durations(self.queued_s, self.load_s, self.compute_s)
