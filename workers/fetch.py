"""Store -> staging buffers: the one place where a store's failure becomes "recompute instead".

Owns the lookup of a token sequence, the loading of what its plan wants, and the shortening of the plan when a load
fails. Does not touch slots: the engine imports what is returned here, so a failed block never reached one. Invariants:
a fetch never raises a ``StoreError``; every wait has a deadline; what a plan counts as a hit is loaded and verified;
once a block was missed, it counts as missing for the rest of the request.

Round trips of a request: one lookup, then blocks and state at the same time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace

import numpy as np

from kvstore.errors import DeadlineExceeded, SpaceUnknown, StoreError
from kvstore.keys import BlockName, TokenChain
from kvstore.limits import LOOKUP_KEYS_MAX
from kvstore.store import GetStatus, Lookup, Presence, Store
from workers.plan import (
    REASON_DEADLINE,
    REASON_DECLINED,
    Plan,
    Reach,
    StoredState,
    cold_plan,
    decline_slow,
    make_plan,
    states_on_chain,
)
from workers.protocol import Fidelity
from workers.spaces import Spaces, TenantSpace

REASON_UNREACHABLE = Presence.UNREACHABLE.name.lower()
ROUNDS_MAX = 4
"""Times that one request is planned anew because a load failed; then it is computed."""

_PRESENCE_OF = {
    GetStatus.MISS: Presence.NEVER,
    GetStatus.WRONG_SIZE: Presence.NEVER,
    GetStatus.CORRUPT: Presence.QUARANTINED,
    GetStatus.DEADLINE: Presence.UNREACHABLE,
    GetStatus.UNREACHABLE: Presence.UNREACHABLE,
}


@dataclass(frozen=True, slots=True)
class FirstMiss:
    """The first block that was not reused, for explain."""

    name: BlockName
    presence: Presence


@dataclass(frozen=True, slots=True)
class Fetched:
    """A plan and what it needs: one payload for each of ``plan.load_blocks``, and the state's.

    Owns its buffers; the receiver may keep or change them.
    """

    plan: Plan
    blocks: tuple[bytearray, ...] = ()
    state: bytes | None = None
    first_miss: FirstMiss | None = None
    store_failed: bool = False
    failed_loads: int = 0
    load_s: float = 0.0
    declined_slow: bool = False
    """A hit was not loaded, since computing it was estimated to be faster."""


@dataclass(frozen=True, slots=True)
class FetchSettings:
    """Deadlines in seconds, and the sizes that a payload must have."""

    reach: Reach
    block_payload_bytes: int
    state_payload_bytes: Callable[[int], int]
    lookup_deadline_s: float = 0.25
    load_deadline_s: float = 5.0


class Fetcher:
    """Looks up and loads on the caller's thread (a pool's); ``state_pool`` runs the state's load beside the blocks'.

    ``compute_s``: seconds to compute the first n tokens, 0 if unknown; a load that takes longer is declined.
    """

    def __init__(
        self,
        store: Store,
        spaces: Spaces,
        settings: FetchSettings,
        state_pool: Executor,
        compute_s: Callable[[int], float],
        monotonic_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._spaces = spaces
        self._settings = settings
        self._state_pool = state_pool
        self._compute_s = compute_s
        self._monotonic_s = monotonic_s

    def fetch(self, space: TenantSpace, chain: TokenChain, fidelity: Fidelity) -> Fetched:
        """Restore as much of the chain's tokens as the store gives before the deadlines."""
        began_s = self._monotonic_s()
        try:
            lookup = self._look_up(space, chain)
        except SpaceUnknown:
            self._spaces.forget_registration(space)  # its data was wiped; a put will register it again
            return self._nothing(chain, Presence.NEVER, Presence.NEVER.name.lower(), began_s)
        except StoreError as error:
            reason = REASON_DEADLINE if isinstance(error, DeadlineExceeded) else REASON_UNREACHABLE
            return self._nothing(chain, Presence.UNREACHABLE, reason, began_s)
        attempt = _Attempt(self._store, space, chain, self._settings, self._state_pool, fidelity)
        attempt.begin(lookup)
        fetched = attempt.finish(self._decline, self._monotonic_s)
        return replace(fetched, load_s=self._monotonic_s() - began_s)

    def _nothing(self, chain: TokenChain, presence: Presence, reason: str, began_s: float) -> Fetched:
        miss = FirstMiss(chain.names[0], presence) if chain.names else None
        return Fetched(
            plan=cold_plan(len(chain), reason=reason),
            first_miss=miss,
            store_failed=presence is Presence.UNREACHABLE,
            load_s=self._monotonic_s() - began_s,
        )

    def _look_up(self, space: TenantSpace, chain: TokenChain) -> Lookup:
        names = chain.names[:LOOKUP_KEYS_MAX]
        deadline_s, began_s = self._settings.lookup_deadline_s, self._monotonic_s()
        lookup = self._store.lookup(space.id, names, states=True, deadline_s=deadline_s)
        if not lookup.complete and self._monotonic_s() - began_s < deadline_s / 2:
            return replace(lookup, complete=True)  # a node refused the connection: nothing was too late
        return lookup

    def _decline(self, plan: Plan, lookup: Lookup) -> Plan:
        """A load slower than the computing that it saves is not worth waiting for."""
        if not plan.load_blocks or not lookup.load_s_estimate:
            return plan
        present = max(lookup.prefix_blocks(), 1)
        load_s = lookup.load_s_estimate * plan.load_blocks / present
        saved_s = self._compute_s(plan.boundary) - self._compute_s(plan.replayed_tokens)
        return decline_slow(plan, load_s=load_s, saved_s=saved_s)


class _Attempt:
    """One request's loads: what the lookup said, corrected by every failure, and the payloads got so far."""

    def __init__(
        self,
        store: Store,
        space: TenantSpace,
        chain: TokenChain,
        settings: FetchSettings,
        state_pool: Executor,
        fidelity: Fidelity,
    ) -> None:
        self._store = store
        self._space = space
        self._chain = chain
        self._settings = settings
        self._state_pool = state_pool
        self._fidelity = fidelity
        self._blocks: list[bytearray] = []
        self._state_payload: tuple[StoredState, bytes] | None = None
        self._failed_loads = 0
        self._store_failed = False
        self._deadline_passed = False
        self._declined_slow = False

    def begin(self, lookup: Lookup) -> None:
        """Take the lookup's word, but for payloads of another size than this worker's layout has."""
        wrong = (lookup.presence == Presence.PRESENT) & (lookup.payload_bytes != self._settings.block_payload_bytes)
        presence = np.where(wrong, np.uint8(Presence.NEVER), lookup.presence)
        self._lookup = replace(lookup, presence=presence)
        self._states = list(states_on_chain(self._chain, lookup))

    def finish(self, decline: Callable[[Plan, Lookup], Plan], monotonic_s: Callable[[], float]) -> Fetched:
        """Plan and load until a plan is loaded whole; every round without success leaves less to plan with."""
        until_s = monotonic_s() + self._settings.load_deadline_s
        for _ in range(ROUNDS_MAX):
            plan = make_plan(len(self._chain), self._lookup, self._states, self._settings.reach, self._fidelity)
            chosen = decline(plan, self._lookup)
            self._declined_slow = chosen is not plan
            plan = self._named(chosen)
            left_s = until_s - monotonic_s()
            if self._have(plan) or (left_s > 0 and self._load(plan, left_s)):
                return self._result(plan)
            if left_s <= 0:
                self._deadline_passed = True
                break
        reason = REASON_DEADLINE if self._deadline_passed else REASON_UNREACHABLE
        return self._result(cold_plan(len(self._chain), reason=reason))

    def _named(self, plan: Plan) -> Plan:
        """A block that came too late is a deadline's fault, not the network's."""
        if self._deadline_passed and plan.reason == REASON_UNREACHABLE:
            return replace(plan, reason=REASON_DEADLINE)
        return plan

    def _have(self, plan: Plan) -> bool:
        state_got = self._state_payload is not None and self._state_payload[0] == plan.state
        return len(self._blocks) >= plan.load_blocks and (plan.state is None or state_got)

    def _load(self, plan: Plan, deadline_s: float) -> bool:
        """Load what the plan lacks. False if something failed; what failed is then struck from the lookup."""
        pending = None
        if plan.state is not None and (self._state_payload is None or self._state_payload[0] != plan.state):
            pending = self._state_pool.submit(self._get_state, plan.state, deadline_s)
        blocks_got = self._load_blocks(self._chain.names[len(self._blocks) : plan.load_blocks], deadline_s)
        state_got = pending is None or pending.result()
        return blocks_got and state_got and self._have(plan)

    def _load_blocks(self, names: Sequence[BlockName], deadline_s: float) -> bool:
        if not names:
            return True
        buffers = [bytearray(self._settings.block_payload_bytes) for _ in names]
        try:
            statuses = self._store.get_into(self._space.id, names, buffers, deadline_s=deadline_s)
        except StoreError as error:
            self._store_failed = True
            late = isinstance(error, DeadlineExceeded)
            statuses = [GetStatus.DEADLINE if late else GetStatus.UNREACHABLE] * len(names)
        for name, buffer, status in zip(names, buffers, statuses, strict=True):
            if status != GetStatus.OK:
                self._strike_block(name.index, status)
                return False
            self._blocks.append(buffer)
        return True

    def _get_state(self, state: StoredState, deadline_s: float) -> bool:
        """Runs on the state pool; touches only the state's own fields."""
        try:
            got = self._store.get_state(self._space.id, state.name, deadline_s=deadline_s)
        except StoreError as error:
            self._store_failed = True
            self._deadline_passed |= isinstance(error, DeadlineExceeded)
            got = None
        if got is None or len(got[0]) > self._settings.state_payload_bytes(state.position):
            self._failed_loads += 1
            self._states.remove(state)
            return False
        payload, flags = got
        if flags != state.flags:  # another one took its place since the lookup: plan with what it is
            self._states[self._states.index(state)] = state = replace(state, flags=flags)
            self._state_payload = (state, payload)
            return False
        self._state_payload = (state, payload)
        return True

    def _strike_block(self, index: int, status: GetStatus) -> None:
        self._failed_loads += 1
        self._deadline_passed |= status == GetStatus.DEADLINE
        presence = self._lookup.presence.copy()
        presence[index] = _PRESENCE_OF[status]
        self._lookup = replace(self._lookup, presence=presence)

    def _result(self, plan: Plan) -> Fetched:
        payload = self._state_payload[1] if plan.state is not None and self._state_payload else None
        return Fetched(
            plan=plan,
            blocks=tuple(self._blocks[: plan.load_blocks]),
            state=payload,
            first_miss=self._first_miss(plan),
            store_failed=self._store_failed,
            failed_loads=self._failed_loads,
            declined_slow=self._declined_slow,
        )

    def _first_miss(self, plan: Plan) -> FirstMiss | None:
        """The first block that the plan does not reuse; None where every complete block is reused."""
        names = self._chain.names
        at = plan.boundary // self._chain.block_tokens if plan.reason == REASON_DECLINED else plan.load_blocks
        if at >= min(len(names), self._lookup.presence.size):
            return None
        return FirstMiss(names[at], Presence(int(self._lookup.presence[at])))
