"""The state pool: short-lived states in the node's memory, bounded in bytes and in time.

Owns the states' bytes. Does not know blocks, disk or policy. Invariants: the pool never exceeds its bytes (the least
recently used go first); a state past its TTL is never returned; at most ``STATES_PER_PARENT_MAX`` hang under one
parent; the payload is a private copy, verified when it is read. A restart forgets all states: reuse of windows is
minute-scale.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass

import numpy as np

from kvstore.daemon.record import checksum_of
from kvstore.keys import SpaceId, StateKey, StateName
from kvstore.limits import KEY_BYTES, STATES_PER_LOOKUP_MAX, STATES_PER_PARENT_MAX
from kvstore.store import FLAG_APPROXIMATE, Buffer, Clock, StateEntry

_OVERHEAD_BYTES = 512
"""Counted for each state beside its payload."""


@dataclass(frozen=True, slots=True)
class _State:
    space_id: SpaceId
    parent: bytes
    tail_tokens: int
    flags: int
    payload: bytes
    checksum: int
    until_s: float
    sequence: int

    @property
    def pool_bytes(self) -> int:
        return len(self.payload) + _OVERHEAD_BYTES

    def is_at(self, space_id: SpaceId, name: StateName) -> bool:
        """Whether this is the state of that place: a key alone is not believed."""
        return (self.space_id, self.parent, self.tail_tokens) == (space_id, name.parent, name.tail_tokens)


class StatePool:
    """Thread-safe. ``ttl_s`` counts from the last put; reading keeps a state from eviction, not from its end."""

    def __init__(self, pool_bytes: int, ttl_s: float, clock: Clock) -> None:
        self._pool_bytes = pool_bytes
        self._ttl_s = ttl_s
        self._clock = clock
        self._lock = threading.Lock()
        self._states: OrderedDict[StateKey, _State] = OrderedDict()
        self._children: dict[bytes, OrderedDict[StateKey, None]] = {}
        self._marks = np.zeros(2**16, np.uint32)
        """How many parents begin with these two bytes."""
        self._used_bytes = 0
        self._sequence = 0
        self.hits = self.misses = self.evicted = self.refused = self.corrupt = 0

    def put(self, space_id: SpaceId, name: StateName, payload: Buffer, flags: int) -> bool:
        """Keep a copy; False if it is larger than the pool. An exact state is not replaced by an approximate one."""
        if len(payload) + _OVERHEAD_BYTES > self._pool_bytes:
            with self._lock:
                self.refused += 1
            return False
        copy = bytes(payload)
        checksum = checksum_of(copy)
        now_s = self._clock.now_s()
        with self._lock:
            known = self._live(name.key, now_s)
            same = known is not None and known.is_at(space_id, name)
            if known and same and known.flags & FLAG_APPROXIMATE < flags & FLAG_APPROXIMATE:
                copy, checksum, flags = known.payload, known.checksum, known.flags
            self._drop(name.key)
            self._sequence += 1
            state = _State(
                space_id, name.parent, name.tail_tokens, flags, copy, checksum, now_s + self._ttl_s, self._sequence
            )
            self._insert(name.key, state)
            self._make_room(now_s)
        return True

    def get(self, space_id: SpaceId, name: StateName) -> tuple[bytes, int] | None:
        """Payload and flags, verified; None if it is not here, is past its TTL, or belongs to another place."""
        with self._lock:
            state = self._live(name.key, self._clock.now_s())
            if state is None or not state.is_at(space_id, name):
                self.misses += 1
                return None
            self._states.move_to_end(name.key)
            if checksum_of(state.payload) != state.checksum:
                self._drop(name.key)
                self.corrupt += 1
                return None
            self.hits += 1
            return state.payload, state.flags

    def under(self, space_id: SpaceId, keys: bytes) -> tuple[StateEntry, ...]:
        """States under the space's root and under the blocks of these keys, which stand one behind another.

        Deepest first, then youngest, bounded.
        """
        found: list[tuple[int, int, int, StateEntry]] = []
        with self._lock:
            if not self._states:
                return ()
            now_s = self._clock.now_s()
            for parent, index in (self._parents_among(keys) | {bytes(space_id): -1}).items():
                for key in list(self._children.get(parent, ())):
                    state = self._live(key, now_s)
                    if state and state.space_id == space_id:
                        entry = StateEntry(key, index, state.tail_tokens, len(state.payload), state.flags)
                        found.append((index, state.tail_tokens, state.sequence, entry))
        found.sort(key=lambda item: item[:3], reverse=True)
        return tuple(item[3] for item in found[:STATES_PER_LOOKUP_MAX])

    def drop_space(self, space_id: SpaceId) -> int:
        with self._lock:
            keys = [key for key, state in self._states.items() if state.space_id == space_id]
            for key in keys:
                self._drop(key)
        return len(keys)

    def drop_children(self, space_id: SpaceId, parents: frozenset[bytes]) -> int:
        """Forget the states of a space under purged blocks."""
        with self._lock:
            children = [key for parent in parents for key in self._children.get(parent, ())]
            keys = [key for key in children if self._states[key].space_id == space_id]
            for key in keys:
                self._drop(key)
        return len(keys)

    def expire(self) -> int:
        """Free what is past its TTL."""
        with self._lock:
            now_s = self._clock.now_s()
            keys = [key for key, state in self._states.items() if self._is_past(state, now_s)]
            for key in keys:
                self._drop(key)
        return len(keys)

    def stats(self) -> dict[str, int]:
        with self._lock:
            return {
                "states": len(self._states),
                "state_bytes": self._used_bytes,
                "state_pool_bytes": self._pool_bytes,
                "state_hits": self.hits,
                "state_misses": self.misses,
                "states_evicted": self.evicted,
                "states_refused": self.refused,
                "states_corrupt": self.corrupt,
            }

    def _is_past(self, state: _State, now_s: float) -> bool:
        """An end further off than two lives was set by a clock that has been put back since."""
        return not now_s < state.until_s <= now_s + 2 * self._ttl_s

    def _live(self, key: StateKey, now_s: float) -> _State | None:
        state = self._states.get(key)
        if state is not None and self._is_past(state, now_s):
            self._drop(key)
            return None
        return state

    def _parents_among(self, keys: bytes) -> dict[bytes, int]:
        """Positions of the keys that have children. (A step for each of 16,384 keys would take 4 ms: only those whose
        mark a parent has are looked for.)
        """
        marked = self._marks.take(np.frombuffer(keys, "<u2")[:: KEY_BYTES // 2]).nonzero()[0].tolist()
        candidates = ((keys[KEY_BYTES * at : KEY_BYTES * (at + 1)], at) for at in marked)
        return {key: at for key, at in candidates if key in self._children}

    def _insert(self, key: StateKey, state: _State) -> None:
        self._states[key] = state
        self._used_bytes += state.pool_bytes
        if state.parent not in self._children:
            self._marks[_mark(state.parent)] += 1
        siblings = self._children.setdefault(state.parent, OrderedDict())
        siblings[key] = None
        while len(siblings) > STATES_PER_PARENT_MAX:
            self._drop(next(iter(siblings)))
            self.evicted += 1

    def _make_room(self, now_s: float) -> None:
        while self._used_bytes > self._pool_bytes:
            oldest = next(iter(self._states))
            self.evicted += not self._is_past(self._states[oldest], now_s)
            self._drop(oldest)

    def _drop(self, key: StateKey) -> None:
        state = self._states.pop(key, None)
        if state is None:
            return
        self._used_bytes -= state.pool_bytes
        siblings = self._children[state.parent]
        del siblings[key]
        if not siblings:
            del self._children[state.parent]
            self._marks[_mark(state.parent)] -= 1


def _mark(parent: bytes) -> int:
    return int.from_bytes(parent[:2], "little")
