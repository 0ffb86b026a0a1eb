"""What is remembered of one block: asked for by its key alone, and what several remember as one.

Pure. Does not know who is asked, nor what people are told.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kvstore.keys import BlockKey, BlockName, TokenDigest
from kvstore.limits import KEY_BYTES, TOKEN_DIGEST_BYTES
from kvstore.store import Presence, Sighting

_TELLING = (
    Presence.NEVER,
    Presence.UNREACHABLE,
    Presence.EVICTED,
    Presence.EXPIRED,
    Presence.QUARANTINED,
    Presence.PURGED,
    Presence.PRESENT,
)
"""Of what several remember of one block, the last of these tells most."""
_NO_DIGEST = TokenDigest(bytes(TOKEN_DIGEST_BYTES))


def named_by_key(key: BlockKey, token_digest: TokenDigest = _NO_DIGEST) -> BlockName:
    """A name of which only the key (and the digest) is known: for questions about it."""
    return BlockName(key, BlockKey(bytes(KEY_BYTES)), token_digest, key, 0)


def best_sighting(sightings: Sequence[Sighting]) -> Sighting:
    """What several shards or nodes remember of one block, as one. At least one is given."""
    best = max(sightings, key=lambda sighting: (_TELLING.index(sighting.presence), sighting.since_s))
    others = sorted({space for sighting in sightings for space in sighting.other_spaces})
    return replace(best, other_spaces=tuple(others))
