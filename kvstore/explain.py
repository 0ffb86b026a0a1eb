"""Why a request did not reuse more: from the worker's access record and what the store remembers, to one sentence.

Pure. Owns the causes and their order. Does not read logs or ask stores (``cli`` does). Invariant: what the record says
of the moment of the request goes before what the store says now.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvstore import limits
from kvstore.account import Account, OtherSpace, others_json, spaces_compared
from kvstore.keys import BlockKey, BlockName, Space, SpaceId, TokenDigest, decode_space
from kvstore.store import Presence, Sighting
from kvstore.wording import printable, utc

CAUSES = (
    "none",
    "off",
    "parameters",
    "never_stored",
    "another_space",
    "expired",
    "evicted",
    "quarantined",
    "purged",
    "unreachable",
    "deadline",
    "declined",
    "not_loaded",
)
WHOLE_BLOCKS_ONLY = frozenset({"vllm"})
"""Roles of engines that reuse whole blocks only, whatever the store has of the tokens after the last one."""


@dataclass(frozen=True, slots=True)
class FirstMiss:
    """The first block of a prompt that was not reused, and what the lookup said of it."""

    name: BlockName
    presence: Presence


@dataclass(frozen=True, slots=True)
class Access:
    """The fields of an access record that explaining needs."""

    request_id: str
    time_s: float
    role: str
    space: Space
    space_id: SpaceId
    prompt_tokens: int
    block_tokens: int
    hit_tokens: int
    way: str
    reason: str
    first_miss: FirstMiss | None
    last_hit: BlockKey | None = None
    """The last block that the store gave; records of earlier versions do not have it."""
    engine_tokens: int = 0
    """What an engine of others had in a cache of its own; records of earlier versions count it as hit."""
    parameters: str = ""
    """What of the request was not understood."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """Which block was the first miss, and why. ``block`` and ``first_token`` are None where nothing was missed.

    ``account``: all that is known of that block now, where nodes were asked; ``reused``: of the last block reused.
    """

    request_id: str
    role: str
    prompt_tokens: int
    hit_tokens: int
    cause: str
    sentence: str
    block: int | None = None
    first_token: int | None = None
    engine_tokens: int = 0
    other_spaces: tuple[OtherSpace, ...] = ()
    account: Account | None = None
    reused: Account | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            "request_id": self.request_id,
            "role": self.role,
            "prompt_tokens": self.prompt_tokens,
            "hit_tokens": self.hit_tokens,
            "engine_tokens": self.engine_tokens,
            "cause": self.cause,
            "sentence": self.sentence,
            "block": self.block,
            "first_token": self.first_token,
            "other_spaces": others_json(self.other_spaces),
            "account": self.account.to_json() if self.account else None,
            "reused": self.reused.to_json() if self.reused else None,
        }


def read_access(row: Mapping[str, Any]) -> Access:
    """Take a record apart. Raises ValueError that names what is missing or malformed."""
    try:
        miss = row["first_miss"]
        return Access(
            request_id=str(row["request_id"]),
            time_s=float(row["time_s"]),
            role=str(row.get("role", "")),
            space=decode_space(bytes.fromhex(row["space"])),
            space_id=SpaceId(_hex(row["space_id"], limits.KEY_BYTES)),
            prompt_tokens=int(row["prompt_tokens"]),
            block_tokens=int(row["block_tokens"]),
            hit_tokens=int(row["hit_tokens"]),
            way=str(row["way"]),
            reason=str(row["reason"]),
            first_miss=None if miss is None else _read_miss(miss),
            last_hit=None if row.get("last_hit") is None else BlockKey(_hex(row["last_hit"], limits.KEY_BYTES)),
            engine_tokens=int(row.get("engine_tokens", 0)),
            parameters=str(row.get("parameters", "")),
        )
    except (KeyError, TypeError, AttributeError, OverflowError) as error:
        raise ValueError(f"the access record lacks or mistypes a field: {error}") from error


def _read_miss(row: Mapping[str, Any]) -> FirstMiss:
    name = BlockName(
        key=BlockKey(_hex(row["key"], limits.KEY_BYTES)),
        parent=BlockKey(_hex(row["parent"], limits.KEY_BYTES)),
        token_digest=TokenDigest(_hex(row["token_digest"], limits.TOKEN_DIGEST_BYTES)),
        route=BlockKey(_hex(row["route"], limits.KEY_BYTES)),
        index=int(row["index"]),
    )
    presence = str(row["presence"]).upper()
    if presence not in Presence.__members__:
        raise ValueError(f"the access record names an unknown presence {presence[:40]!r}")
    return FirstMiss(name, Presence[presence])


def _hex(text: str, count: int) -> bytes:
    data = bytes.fromhex(text)
    if len(data) != count:
        raise ValueError(f"the access record has a key of {len(data)} bytes instead of {count}")
    return data


def explain(access: Access, sighting: Sighting | None, spaces: Mapping[SpaceId, Space]) -> Explanation:
    """``sighting``: what the store says now of the first miss (None: nothing was missed, or no store was asked)."""
    cause, why, others = _cause(access, sighting, spaces)
    block = access.first_miss.name.index if access.first_miss else None
    where = "" if block is None else f"block {block} (from token {block * access.block_tokens}): "
    return Explanation(
        request_id=access.request_id,
        role=access.role,
        prompt_tokens=access.prompt_tokens,
        hit_tokens=access.hit_tokens,
        engine_tokens=access.engine_tokens,
        cause=cause,
        sentence=where + why,
        block=block,
        first_token=None if block is None else block * access.block_tokens,
        other_spaces=others,
    )


def _cause(
    access: Access, sighting: Sighting | None, spaces: Mapping[SpaceId, Space]
) -> tuple[str, str, tuple[OtherSpace, ...]]:
    if access.reason == "off":
        return "off", "the request was made with the cache off", ()
    if access.reason == "parameters":
        why = "what it says of itself is not understood, so it was neither looked up nor stored"
        return "parameters", f"{why}: {printable(access.parameters)}", ()
    if access.reason == "declined":
        return "declined", "stored, but loading it was estimated to take longer than computing it", ()
    if access.reason == "deadline":
        return "deadline", "the store did not deliver it before the worker's deadline", ()
    if access.first_miss is None:
        return "none", _nothing_missed(access), ()
    presence = access.first_miss.presence
    if presence == Presence.NEVER:
        return _never(access, sighting, spaces)
    if presence == Presence.UNREACHABLE:
        return "unreachable", "the node that would hold it did not answer", ()
    if presence == Presence.PRESENT:
        return "not_loaded", f"it was stored, but not used ({access.reason})", ()
    return _removed(presence, sighting)


def _nothing_missed(access: Access) -> str:
    """No block was missed: the tokens after the last block come from a state only, and one is always computed."""
    rest = access.prompt_tokens - access.hit_tokens - access.engine_tokens
    if access.role in WHOLE_BLOCKS_ONLY:
        return _no_whole_block(rest, access.block_tokens)
    if access.way == "state" or rest <= 1:
        return "everything that can be reused was reused"
    if access.hit_tokens == 0:
        return f"a prompt of {access.block_tokens} tokens or fewer is reused from a state only, and none was found"
    return f"every block was reused; the last {rest} tokens come from a state only, and none was found"


def _no_whole_block(rest: int, block_tokens: int) -> str:
    """What an engine that reuses whole blocks only left to compute."""
    if rest <= 1:
        return "everything that can be reused was reused"
    if rest < block_tokens:
        return f"every whole block was reused; the last {rest} tokens are less than a block of {block_tokens}"
    if rest == block_tokens:
        return f"the last token is always computed, and with it the last block, of {rest} tokens"
    return f"every block that was looked up was reused; the last {rest} tokens are more than one look-up asks for"


def _removed(presence: Presence, sighting: Sighting | None) -> tuple[str, str, tuple[OtherSpace, ...]]:
    when = ""
    if sighting is not None and sighting.presence == presence:
        if presence == Presence.PURGED and not sighting.since_s:
            return "purged", "the cipher key that it is encrypted under is not there", ()
        when = f" at {utc(sighting.since_s)}" if sighting.since_s else ""
    why = {
        Presence.EXPIRED: f"its keep-until passed{when}",
        Presence.EVICTED: f"it was evicted to make room{when}",
        Presence.QUARANTINED: f"its record failed verification and was quarantined{when}",
        Presence.PURGED: f"it was deleted by an operator{when}",
    }[presence]
    return presence.name.lower(), why, ()


def _never(
    access: Access, sighting: Sighting | None, spaces: Mapping[SpaceId, Space]
) -> tuple[str, str, tuple[OtherSpace, ...]]:
    """Never stored under this key; perhaps the same tokens lie in another space."""
    others = spaces_compared(access.space_id, access.space, sighting.other_spaces if sighting else (), spaces)
    if others:
        nearest = others[0]
        fields = ", ".join(nearest.fields) if nearest.fields else "a field that this store does not know"
        return "another_space", f"the same tokens are stored in another space, which differs in {fields}", others
    if sighting is None:
        return "never_stored", "the lookup found no record of it (no store was asked for more)", ()
    if sighting.presence == Presence.PRESENT:
        return "never_stored", f"not stored yet at the time of the request; stored at {utc(sighting.since_s)}", ()
    if sighting.presence not in (Presence.NEVER, Presence.UNREACHABLE):
        return "never_stored", f"not stored at the time of the request; now {sighting.presence.name.lower()}", ()
    return "never_stored", "these tokens were never stored, or so long ago that the store forgot", ()
