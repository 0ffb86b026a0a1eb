"""What the access log keeps of a request to vLLM: what came from which cache, and why not more; ``explain`` reads it.

Pure. Owns the record. Invariants: a record holds keys and digests of one rank (the first), never token ids; what vLLM
had itself is never told as given by the store; what is not measured is None.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvstore.keys import BlockName, encode_space
from kvstore.store import Presence
from workers.access_log import AccessRecord, MissRecord
from workers.adapters.vllm_wishes import Unclear
from workers.spaces import TenantSpace

if TYPE_CHECKING:
    from vllm.v1.request import Request

ROLE = "vllm"
REASON_END, REASON_DEADLINE, REASON_DECLINED = "end", "deadline", "declined"  # as a worker's own log has them
REASON_OFF = "off"
REASON_PARAMETERS = "parameters"
REASON_WINDOW = "its window is not stored"
REASON_FAILED = "loading it failed"
REASON_RANK = "another rank's part of it is not stored"
UNCLEAR_KEPT_MAX = 4
_OURS = re.compile(r"-[0-9a-f]{8}$")
"""What vLLM adds to the id that its client knows."""


@dataclass(frozen=True, slots=True)
class Reuse:
    """What became of one prompt. ``reused`` and ``stored``: blocks from the first on that were reused, and that the
    store had; ``engine``: those of ``reused`` that vLLM had itself, the first ones; ``missed``: the block behind those
    reused, and what the look-up said of it (None: the prompt ends, or the look-up was not answered); ``last``: the last
    block that the store gave.
    """

    space: TenantSpace
    answered: bool
    declined: bool
    failed: bool
    engine: int
    reused: int
    stored: int
    missed: tuple[BlockName, Presence] | None
    last: BlockName | None

    @property
    def reason(self) -> str:
        if not self.answered:
            return REASON_DEADLINE
        if self.declined:
            return REASON_DECLINED
        if self.failed:
            return REASON_FAILED
        if self.reused < self.stored:
            return REASON_WINDOW
        if self.missed is None:
            return REASON_END
        presence = self.missed[1]
        return REASON_RANK if presence is Presence.PRESENT else presence.name.lower()


def access_record(request: Request, reuse: Reuse, now_s: float, load_s: float | None = None) -> AccessRecord:
    """The record of a request that ended. ``load_s``: how long it waited for its load, if it had one."""
    block_tokens = reuse.space.space.block_tokens
    prompt = request.num_prompt_tokens
    engine = min(reuse.engine * block_tokens, prompt)
    hit = min(reuse.reused * block_tokens, prompt) - engine
    return replace(
        _cold_record(request, reuse.space, now_s),
        hit_tokens=hit,
        miss_tokens=prompt - engine - hit,
        way="blocks" if hit else "engine" if engine else "cold",
        reason=reuse.reason,
        first_miss=None if reuse.missed is None else _miss(*reuse.missed),
        load_s=load_s,
        last_hit=None if reuse.last is None else reuse.last.key.hex(),
        engine_tokens=engine,
    )


def uncached_record(request: Request, shared: TenantSpace, unclear: tuple[Unclear, ...], now_s: float) -> AccessRecord:
    """The record of a request that was neither looked up nor stored, since it said so or was not understood. A record
    names a space: it is the one that all share, though such a request is in none.
    """
    return replace(
        _cold_record(request, shared, now_s),
        cache=False,
        reason=REASON_PARAMETERS if unclear else REASON_OFF,
        parameters="; ".join(map(str, unclear[:UNCLEAR_KEPT_MAX])),
    )


def _cold_record(request: Request, space: TenantSpace, now_s: float) -> AccessRecord:
    """What any record says, of a request that reused nothing. Its times within vLLM are vLLM's own metrics', and puts
    are acknowledged after its end.
    """
    return AccessRecord(
        request_id=_OURS.sub("", request.request_id),
        time_s=now_s,
        role=ROLE,
        outcome="finished" if request.is_finished() else "cancelled",
        space=encode_space(space.space).hex(),
        space_id=space.id.hex(),
        cache=True,
        prompt_tokens=request.num_prompt_tokens,
        generated_tokens=request.num_output_tokens,
        block_tokens=space.space.block_tokens,
        hit_tokens=0,
        miss_tokens=request.num_prompt_tokens,
        replayed_tokens=0,
        way="cold",
        exact=True,
        reason=REASON_END,
        first_miss=None,
        queued_s=None,
        load_s=None,
        compute_s=None,
        published_blocks=None,
    )


def _miss(name: BlockName, presence: Presence) -> MissRecord:
    return MissRecord(
        index=name.index,
        key=name.key.hex(),
        parent=name.parent.hex(),
        route=name.route.hex(),
        token_digest=name.token_digest.hex(),
        presence=presence.name.lower(),
    )
