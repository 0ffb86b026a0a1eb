"""What the access log keeps of a request to vLLM: how much came from a cache, and why not more; ``explain`` reads it.

Pure. Owns the record. Invariant: a record holds keys and digests of one rank (the first), never token ids.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvstore.keys import BlockName, encode_space
from kvstore.store import Presence
from workers.access_log import AccessRecord, MissRecord
from workers.spaces import TenantSpace

if TYPE_CHECKING:
    from vllm.v1.request import Request

ROLE = "vllm"
REASON_END, REASON_DEADLINE, REASON_DECLINED = "end", "deadline", "declined"  # as a worker's own log has them
REASON_WINDOW = "its window is not stored"
REASON_FAILED = "loading it failed"
_OURS = re.compile(r"-[0-9a-f]{8}$")
"""What vLLM adds to the id that its client knows."""


@dataclass(frozen=True, slots=True)
class Reuse:
    """What became of one prompt. ``reused`` and ``stored``: blocks from the first on that were reused, and that the
    store had; ``missed``: the block behind those reused, and what the look-up said of it (None: the prompt ends, or the
    look-up was not answered).
    """

    space: TenantSpace
    answered: bool
    declined: bool
    failed: bool
    reused: int
    stored: int
    loaded: bool
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
        return REASON_WINDOW if self.reused < self.stored else REASON_END


def access_record(request: Request, reuse: Reuse, now_s: float) -> AccessRecord:
    """The record of a request that ended. Times within vLLM are its own metrics', so they are zero here."""
    block_tokens = reuse.space.space.block_tokens
    prompt = request.num_prompt_tokens
    hit = min(reuse.reused * block_tokens, prompt)
    return AccessRecord(
        request_id=_OURS.sub("", request.request_id),
        time_s=now_s,
        role=ROLE,
        outcome="finished" if request.is_finished() else "cancelled",
        space=encode_space(reuse.space.space).hex(),
        space_id=reuse.space.id.hex(),
        cache=True,
        prompt_tokens=prompt,
        generated_tokens=request.num_output_tokens,
        block_tokens=block_tokens,
        hit_tokens=hit,
        miss_tokens=prompt - hit,
        replayed_tokens=0,
        way="blocks" if reuse.loaded and hit else "cold",
        exact=True,
        reason=reuse.reason,
        first_miss=None if reuse.missed is None else _miss(*reuse.missed),
        queued_s=0.0,
        load_s=0.0,
        compute_s=0.0,
        published_blocks=0,
        last_hit=None if reuse.last is None else reuse.last.key.hex(),
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
