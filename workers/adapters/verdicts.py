"""What requests were told of their blocks: asked in one batch a scheduler step, answered in a later one.

Owns the verdicts of every request, the questions that are open, and the decision to decline a slow load. Does not know
any engine, nor payloads. Used by one thread, the scheduler's; only the store is asked on others. Invariants: nothing
here waits; every key that was asked has a verdict by the deadline of its question, and an answer that comes later
changes nothing; a key whose load failed stays a miss for its request. Bound: what a request has asked goes with it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from kvstore.keys import SpaceId, opaque_name
from kvstore.limits import LOOKUP_KEYS_MAX
from kvstore.store import Lookup, Presence
from kvstore.traffic import TrafficClass
from workers.adapters.attachment import Asked, Attachment
from workers.spaces import TenantSpace

EngineKey = bytes
"""What the engine calls a block; it covers the whole prefix."""
Verdict = bool | None
"""Stored, not stored, or not known yet."""
Answer = tuple[dict[EngineKey, Verdict], bool]
"""The verdicts of one request, and whether its hit was declined as slower than computing it."""


@dataclass(slots=True, eq=False)
class RequestVerdicts:
    """One request: where it looks, and what it was told. ``space`` None: it is not to be cached, so all is a miss."""

    space: TenantSpace | None
    traffic_class: TrafficClass
    known: dict[EngineKey, Verdict] = field(default_factory=dict)
    unsent: list[EngineKey] = field(default_factory=list)

    def strike(self, keys: Iterable[EngineKey]) -> None:
        """Their load failed: from now on they are misses, else the request would ask for them for ever."""
        self.known.update(dict.fromkeys(keys, False))


@dataclass(frozen=True, slots=True)
class _Part:
    request: RequestVerdicts
    keys: list[EngineKey]


@dataclass(frozen=True, slots=True)
class _Question:
    parts: list[_Part]
    asked: Asked[list[Answer] | None]


class Verdicts:
    """``tokens_of``: how many tokens a request saves if these blocks of it are loaded. ``counts`` is the owner's."""

    def __init__(
        self, attachment: Attachment, tokens_of: Callable[[Sequence[EngineKey]], int], counts: Counter[str]
    ) -> None:
        self._attachment = attachment
        self._tokens_of = tokens_of
        self._counts = counts
        self._unsent: dict[RequestVerdicts, None] = {}
        self._open: list[_Question] = []

    def of(self, request: RequestVerdicts, key: EngineKey) -> Verdict:
        """Whether a block is stored, as of the last ``settle``; what nobody asked yet is asked by the next ``send``."""
        known = request.known
        if key in known:
            return known[key]
        if request.space is None:
            return False
        known[key] = None
        if not request.unsent:
            self._unsent[request] = None
        request.unsent.append(key)
        return None

    def send(self) -> None:
        """The scheduler's step is over: ask what came up in it, one question a space."""
        self.settle()
        if self._unsent:
            by_space: dict[SpaceId, tuple[TenantSpace, list[_Part]]] = {}
            for request in self._unsent:
                if request.unsent and request.space is not None:
                    _, parts = by_space.setdefault(request.space.id, (request.space, []))
                    parts.append(_Part(request, request.unsent))
                request.unsent = []
            self._unsent.clear()
            for space, parts in by_space.values():
                for batch in _batches(parts):
                    self._open.append(_Question(batch, self._ask(space, batch)))

    def settle(self) -> None:
        """Take over what was answered since the last time; what came to its deadline without an answer is a miss."""
        if not self._open:
            return
        still_open = []
        for question in self._open:
            if question.asked.settled:
                self._close(question)
            else:
                still_open.append(question)
        self._open = still_open

    def forget(self, request: RequestVerdicts) -> None:
        """The request is over: what it has not asked yet is not asked."""
        self._unsent.pop(request, None)
        request.unsent = []

    @property
    def open_questions(self) -> int:
        return len(self._open)

    # --- inside -------------------------------------------------------------------------------------------------------

    def _close(self, question: _Question) -> None:
        answers = question.asked.answer()
        for at, part in enumerate(question.parts):
            if answers is None:
                part.request.strike(part.keys)
                self._counts["lookup_unanswered"] += len(part.keys)
                continue
            verdicts, declined = answers[at]
            part.request.known.update(verdicts)
            self._counts["looked_up"] += len(part.keys)
            if declined:
                self._counts["declined_slow"] += len(part.keys)

    def _ask(self, space: TenantSpace, parts: list[_Part]) -> Asked[list[Answer] | None]:
        keys = [part.keys for part in parts]
        return self._attachment.ask(lambda left_s: self._look_up(space, keys, left_s))

    def _look_up(self, space: TenantSpace, keys: list[list[EngineKey]], left_s: float) -> list[Answer] | None:
        """On a thread of the attachment: one call for the keys of several requests; None if the store failed."""
        names = [opaque_name(space.id, key) for row in keys for key in row]
        found = self._attachment.look_up(space, names, deadline_s=left_s)
        if found is None:
            return None
        present = (found.presence == int(Presence.PRESENT)).tolist()
        answers: list[Answer] = []
        at = 0
        for row in keys:
            verdicts: dict[EngineKey, Verdict] = dict(zip(row, present[at : at + len(row)], strict=True))
            declined = self._declines(found, slice(at, at + len(row)), verdicts)
            answers.append((dict.fromkeys(row, False) if declined else verdicts, declined))
            at += len(row)
        return answers

    def _declines(self, found: Lookup, rows: slice, verdicts: Mapping[EngineKey, Verdict]) -> bool:
        """Whether one request of a batch does better without its hits; its share of the estimate is by bytes."""
        if not found.load_s_estimate or self._attachment.settings.compute_tokens_per_s is None:
            return False
        hits = [key for key, present in verdicts.items() if present]
        if not hits:
            return False
        present = found.presence[rows] == int(Presence.PRESENT)
        mine_bytes = int(found.payload_bytes[rows][present].sum(dtype=np.int64))
        share = mine_bytes / max(found.prefix_bytes(), 1)
        mine = replace(found, load_s_estimate=found.load_s_estimate * share)
        return self._attachment.declines(mine, self._tokens_of(hits))


def _batches(parts: Iterable[_Part]) -> list[list[_Part]]:
    """Parts of one space in questions of at most LOOKUP_KEYS_MAX keys."""
    batches: list[list[_Part]] = []
    room = 0
    for part in parts:
        for begin in range(0, len(part.keys), LOOKUP_KEYS_MAX):
            piece = _Part(part.request, part.keys[begin : begin + LOOKUP_KEYS_MAX])
            if not batches or len(piece.keys) > room:
                batches.append([])
                room = LOOKUP_KEYS_MAX
            batches[-1].append(piece)
            room -= len(piece.keys)
    return batches
