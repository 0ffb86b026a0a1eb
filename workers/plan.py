"""The restore plan: what to reuse of a token sequence, and what to compute. Pure.

Owns the choice between resuming from a state, loading blocks and replaying the sliding window, and computing. Knows
neither tensors nor the store's connection: it sees what a lookup said. Positions are tokens from the prompt's start:

      0            load_blocks * block_tokens        boundary        prompt_tokens
      |  stored global KV, loaded into slots  |          |                 |
      |.....................|<----- replay -->|          |                 |
                       compute_start                 write_floor: global KV below it is served, not recomputed

Invariants (asserted on every plan): hit + miss == prompt; replayed <= hit; at least one token is left to compute;
everything below ``write_floor`` is loaded; nothing between ``compute_start`` and the prompt's end is skipped.

Source of the replay bounds: exact needs ``sliding_layers * (window - 1)`` tokens, one fewer is already wrong; fewer
(``replay_windows * window``) is bounded: approximate by design, and flagged so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvstore.keys import StateName, TokenChain
from kvstore.store import FLAG_APPROXIMATE, Lookup, Presence
from workers.protocol import Fidelity, Reuse, Way

REASON_END = "end"
REASON_DECLINED = "declined"
REASON_DEADLINE = "deadline"
REASON_OFF = "off"


@dataclass(frozen=True, slots=True)
class Reach:
    """What a plan must know of a model. ``window`` and ``sliding_layers`` are 0 for a model with global layers only.

    ``replay_windows``: windows of a bounded replay; None asks for exact replay always.
    """

    block_tokens: int
    window: int = 0
    sliding_layers: int = 0
    replay_windows: int | None = 1

    def __post_init__(self) -> None:
        if self.block_tokens < 1:
            raise ValueError(f"block_tokens must be at least 1, not {self.block_tokens}")
        if (self.window == 0) != (self.sliding_layers == 0) or self.window < 0 or self.sliding_layers < 0:
            raise ValueError(f"window {self.window} and sliding_layers {self.sliding_layers}: both are 0, or neither")
        if self.replay_windows is not None and self.replay_windows < 1:
            raise ValueError(f"replay_windows must be at least 1 or exact, not {self.replay_windows}")

    @property
    def exact_replay_tokens(self) -> int:
        """Tokens whose replay rebuilds every window exactly; 0 without sliding layers."""
        return self.sliding_layers * max(self.window - 1, 0)

    def replay_tokens(self, fidelity: Fidelity) -> tuple[int, bool]:
        """Length of the replay that this fidelity asks for, and whether it is exact."""
        exact = self.exact_replay_tokens
        if fidelity == "exact" or self.replay_windows is None:
            return exact, True
        bounded = self.replay_windows * self.window
        return (exact, True) if bounded >= exact else (bounded, False)


@dataclass(frozen=True, slots=True)
class StoredState:
    """A state on the sequence's own chain. It serves the boundaries ``position`` and ``position - 1``."""

    name: StateName
    flags: int
    payload_bytes: int

    @property
    def position(self) -> int:
        return self.name.position

    @property
    def exact(self) -> bool:
        return not self.flags & FLAG_APPROXIMATE


@dataclass(frozen=True, slots=True)
class Plan:
    """What to load, replay and compute. All counts in tokens unless named otherwise.

    ``boundary``: tokens of the prompt that are reused (the hit). ``load_blocks``: leading blocks to load.
    ``compute_start``: first position that goes through the model. ``write_floor``: global KV below it is served from
    the store. ``window_floor``: sliding KV below it is absent. ``publish_from``: first block to offer to the store,
    with ``publish_flags``, if ``publish``.
    """

    way: Way
    prompt_tokens: int
    boundary: int
    load_blocks: int
    state: StoredState | None
    compute_start: int
    write_floor: int
    window_floor: int
    exact: bool
    publish_from: int
    publish: bool = True
    reason: str = REASON_END

    @property
    def hit_tokens(self) -> int:
        return self.boundary

    @property
    def miss_tokens(self) -> int:
        return self.prompt_tokens - self.boundary

    @property
    def replayed_tokens(self) -> int:
        """Reused tokens that go through (a part of) the model again; see ``exact_replay_tokens`` for the triangle."""
        return self.boundary - self.compute_start

    @property
    def publish_flags(self) -> int:
        return 0 if self.exact else FLAG_APPROXIMATE

    @property
    def triangular(self) -> bool:
        """The replay runs ahead, layer by layer, and the forward starts at the boundary."""
        return self.way == "exact_replay"

    def reuse(self) -> Reuse:
        """The report of this plan, for the client's usage."""
        return Reuse(
            prompt_tokens=self.prompt_tokens,
            hit_tokens=self.hit_tokens,
            miss_tokens=self.miss_tokens,
            replayed_tokens=self.replayed_tokens,
            way=self.way,
            exact=self.exact,
            reason=self.reason,
        )


def cold_plan(prompt_tokens: int, *, reason: str, publish: bool = True) -> Plan:
    """Compute everything."""
    return _checked(
        Plan(
            way="cold",
            prompt_tokens=prompt_tokens,
            boundary=0,
            load_blocks=0,
            state=None,
            compute_start=0,
            write_floor=0,
            window_floor=0,
            exact=True,
            publish_from=0,
            publish=publish,
            reason=reason,
        )
    )


def states_on_chain(chain: TokenChain, lookup: Lookup) -> tuple[StoredState, ...]:
    """The states of a lookup that are prefixes of this chain, deepest first, exact before approximate."""
    found = []
    for entry in lookup.states:
        position = (entry.block_index + 1) * chain.block_tokens + entry.tail_tokens
        if not 0 < position <= len(chain) or entry.tail_tokens >= chain.block_tokens:
            continue
        name = chain.state_name(position)
        if name.key == entry.key:
            found.append(StoredState(name, entry.flags, entry.payload_bytes))
    return tuple(sorted(found, key=lambda state: (-state.position, not state.exact)))


def make_plan(
    prompt_tokens: int, lookup: Lookup, states: Sequence[StoredState], reach: Reach, fidelity: Fidelity
) -> Plan:
    """Choose how to restore. ``lookup`` covers the complete blocks of the prompt, in order.

    Order: a state at or just before the boundary (no further than a replay is long); blocks and replay; cold.
    """
    exact_only = fidelity == "exact"
    blocks = lookup.prefix_blocks(exact_only=exact_only)
    reason = first_miss_reason(lookup, blocks)
    usable = [
        state
        for state in states
        if state.position // reach.block_tokens <= blocks and (state.exact or not exact_only) and prompt_tokens > 1
    ]
    replay_tokens, replay_exact = reach.replay_tokens(fidelity)
    sight = _Sight(prompt_tokens, lookup, blocks, reach, reason)
    chosen = _from_state(sight, usable[0], gap_tokens_max=replay_tokens) if usable else None
    chosen = chosen or _from_blocks(sight, replay_tokens, replay_exact)
    if chosen is not None:
        return _checked(chosen)
    return cold_plan(prompt_tokens, reason=REASON_DECLINED if blocks else reason)


def decline_slow(plan: Plan, *, load_s: float, saved_s: float) -> Plan:
    """The plan, or computing everything where loading would take longer than the computing that it saves."""
    if plan.boundary and load_s > saved_s > 0:
        return cold_plan(plan.prompt_tokens, reason=REASON_DECLINED, publish=plan.publish)
    return plan


def first_miss_reason(lookup: Lookup, blocks: int) -> str:
    """Why the prefix of ``blocks`` blocks was not longer, as ``Reuse.reason`` puts it."""
    if blocks >= lookup.presence.size:
        return REASON_END
    presence = Presence(int(lookup.presence[blocks]))
    if presence is Presence.PRESENT:
        return REASON_DECLINED  # an approximate block, and the request wants exact ones
    if presence is Presence.UNREACHABLE and not lookup.complete:
        return REASON_DEADLINE
    return presence.name.lower()


@dataclass(frozen=True, slots=True)
class _Sight:
    """What the ways below choose from."""

    prompt_tokens: int
    lookup: Lookup
    blocks: int
    reach: Reach
    reason: str

    def exact_blocks(self, count: int) -> bool:
        return not bool(np.any(self.lookup.flags[:count] & FLAG_APPROXIMATE))


def _from_state(sight: _Sight, state: StoredState, *, gap_tokens_max: int) -> Plan | None:
    """Resume from a state. Where blocks beyond it are stored they are served, while the gap goes through the model for
    its windows; None where that gap is longer than ``gap_tokens_max``: then a replay is shorter."""
    reach, last = sight.reach, sight.prompt_tokens - 1
    stored = sight.blocks * reach.block_tokens
    if not reach.sliding_layers and state.position <= stored:
        return None  # it adds nothing to the blocks
    compute_start = min(state.position, last)
    floor = max(state.position, stored)
    if min(floor, last) - compute_start > gap_tokens_max:
        return None
    load_blocks = floor // reach.block_tokens
    return Plan(
        way="state",
        prompt_tokens=sight.prompt_tokens,
        boundary=min(floor, last),
        load_blocks=load_blocks,
        state=state,
        compute_start=compute_start,
        write_floor=floor,
        window_floor=max(0, state.position - reach.window) if reach.sliding_layers else 0,
        exact=state.exact and sight.exact_blocks(load_blocks),
        publish_from=floor // reach.block_tokens,
        reason=sight.reason,
    )


def _from_blocks(sight: _Sight, replay_tokens: int, replay_exact: bool) -> Plan | None:
    """Load blocks and replay; None where the hit is not longer than the replay."""
    reach = sight.reach
    stored = sight.blocks * reach.block_tokens
    boundary = min(stored, sight.prompt_tokens - 1)
    if boundary <= replay_tokens:
        return None
    start = boundary - replay_tokens
    way: Way = "blocks" if not replay_tokens else "exact_replay" if replay_exact else "replay"
    window_floor = start if way == "replay" else max(0, boundary - max(reach.window - 1, 0)) if replay_tokens else 0
    return Plan(
        way=way,
        prompt_tokens=sight.prompt_tokens,
        boundary=boundary,
        load_blocks=sight.blocks,
        state=None,
        compute_start=start,
        write_floor=stored,
        window_floor=window_floor,
        exact=replay_exact and sight.exact_blocks(sight.blocks),
        publish_from=sight.blocks,
        reason=sight.reason,
    )


def _checked(plan: Plan) -> Plan:
    assert 0 <= plan.boundary < plan.prompt_tokens, plan
    assert plan.hit_tokens + plan.miss_tokens == plan.prompt_tokens, plan
    assert 0 <= plan.replayed_tokens <= plan.hit_tokens, plan
    assert plan.compute_start <= plan.boundary <= plan.write_floor or plan.way == "cold", plan
    return plan
