"""The control verbs as JSON: arguments and results, both ways, and the call on a store.

Owns the shape of every CONTROL message (scan, spaces, delete, pins, policy, sweep, sight, stats). Does not know frames
or sockets. Invariants: bytes travel as hex; a decoder given any JSON returns values or raises ``ProtocolError``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from kvstore import limits
from kvstore.errors import ProtocolError
from kvstore.keys import BlockKey, BlockName, Space, SpaceId, TokenDigest, decode_space, encode_space
from kvstore.purges import leftovers_to_json, order_from_json, order_to_json, report_to_json
from kvstore.sightings import named_by_key
from kvstore.store import BlockInfo, ClassEffect, Effect, Pin, Policy, Presence, Sighting, Store
from kvstore.traffic import ClassRules
from kvstore.values import string, truth, whole

Json = dict[str, Any]
T = TypeVar("T")

PINS_PER_CALL_MAX = 1024
"""Pins in one frame; the client splits."""

REPEATABLE = frozenset(
    (
        "register_space",
        "scan",
        "spaces",
        "pin",
        "unpin",
        "pins",
        "policy",
        "policy_history",
        "purge",
        "purges",
        "leftovers",
        "sight",
        "stats",
        "report_corrupt",
    )
)
"""Verbs that a client may send again after a broken connection: a second time changes nothing more."""


class ControlledStore(Store, Protocol):
    """A store that also verifies blocks which a reader found corrupt."""

    def report_corrupt(self, space_id: SpaceId, name: BlockName) -> bool: ...


# --- frames' bodies -------------------------------------------------------------------------------------------------


def encode_request(verb: str, args: Mapping[str, Any]) -> bytes:
    return json.dumps({"verb": verb, "args": args}, separators=(",", ":")).encode()


def decode_request(body: bytes) -> tuple[str, Json]:
    message = _load(body)
    verb, args = message.get("verb"), message.get("args")
    if not isinstance(verb, str) or not isinstance(args, dict) or len(message) != 2:
        raise ProtocolError("a control message is a JSON object with 'verb' and 'args'")
    return verb, args


def encode_result(result: object) -> bytes:
    return json.dumps({"result": result}, separators=(",", ":")).encode()


def decode_result(data: bytes) -> Any:
    message = _load(data)
    if "result" not in message:
        raise ProtocolError("a control answer lacks 'result'")
    return message["result"]


def _load(data: bytes) -> Json:
    try:
        message = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ProtocolError("a control message is not JSON") from error
    if not isinstance(message, dict):
        raise ProtocolError("a control message is not a JSON object")
    return message


def reading(what: str, read: Callable[[], T]) -> T:
    """Run a decoder over a peer's JSON; whatever is missing or of another type is a ProtocolError."""
    try:
        return read()
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError) as error:
        raise ProtocolError(f"{what} is malformed: {type(error).__name__}: {error}"[:300]) from error


# --- the daemon's side ----------------------------------------------------------------------------------------------


_SIGHTING_SHORT = 4
"""Elements of a sighting that is not asked for its block, or comes from a node that knows no more."""


def call(store: ControlledStore, verb: str, args: Json, deadline_s: float) -> object:
    """Run one control verb and give its result as JSON values.

    Raises ProtocolError for an unknown verb or bad arguments, and whatever the store raises.
    """
    handler = _HANDLERS.get(verb)
    if handler is None:
        raise ProtocolError(f"unknown control verb {verb[:40]!r}: the client is newer than the daemon")
    return handler(store, args, deadline_s)


def _register_space(store: ControlledStore, args: Json, deadline_s: float) -> object:
    space = reading("a space", lambda: decode_space(bytes.fromhex(args["space"])))
    return store.register_space(space, deadline_s=deadline_s).hex()


def _scan(store: ControlledStore, args: Json, deadline_s: float) -> object:
    space_id = reading("scan", lambda: None if args["space_id"] is None else space_id_of(args["space_id"]))
    cursor, limit = reading("scan", lambda: (bytes.fromhex(args["cursor"]), whole(args["limit"])))
    page, after = store.scan(space_id, cursor=cursor, limit=limit, deadline_s=deadline_s)
    return {"blocks": [info_to_json(info) for info in page], "cursor": after.hex()}


def _spaces(store: ControlledStore, args: Json, deadline_s: float) -> object:
    return [encode_space(space).hex() for space in store.spaces(deadline_s=deadline_s).values()]


def _delete(store: ControlledStore, args: Json, deadline_s: float) -> object:
    space_id, keys = reading("delete", lambda: (space_id_of(args["space_id"]), keys_of(args["keys"])))
    return store.delete(space_id, keys, deadline_s=deadline_s)


def _delete_space(store: ControlledStore, args: Json, deadline_s: float) -> object:
    return store.delete_space(reading("delete_space", lambda: space_id_of(args["space_id"])), deadline_s=deadline_s)


def _pin(store: ControlledStore, args: Json, deadline_s: float) -> object:
    return store.pin(reading("pin", lambda: [pin_from_json(row) for row in args["pins"]]), deadline_s=deadline_s)


def _unpin(store: ControlledStore, args: Json, deadline_s: float) -> object:
    space_id, keys = reading("unpin", lambda: (space_id_of(args["space_id"]), keys_of(args["keys"])))
    owner, holds = reading("unpin", lambda: (_owner(args.get("owner")), truth(args.get("holds", False))))
    return store.unpin(space_id, keys, owner=owner, holds=holds, deadline_s=deadline_s)


def _owner(value: object) -> str | None:
    return None if value is None else string(value)


def _pins(store: ControlledStore, args: Json, deadline_s: float) -> object:
    return [pin_to_json(pin) for pin in store.pins(deadline_s=deadline_s)]


def _policy(store: ControlledStore, args: Json, deadline_s: float) -> object:
    return policy_to_json(store.policy(deadline_s=deadline_s))


def _policy_history(store: ControlledStore, args: Json, deadline_s: float) -> object:
    return [policy_to_json(policy) for policy in store.policy_history(deadline_s=deadline_s)]


def _set_policy(store: ControlledStore, args: Json, deadline_s: float) -> object:
    rules = reading("the policy's rules", lambda: ClassRules.from_json(args["rules"]))
    text, version, apply = reading(
        "set_policy", lambda: (string(args["text"]), whole(args["expected_version"]), truth(args["apply"]))
    )
    author = reading("set_policy", lambda: author_of(args.get("author", "")))
    effect = store.set_policy(rules, text, expected_version=version, apply=apply, author=author, deadline_s=deadline_s)
    return effect_to_json(effect)


def _sweep(store: ControlledStore, args: Json, deadline_s: float) -> object:
    apply = reading("sweep", lambda: truth(args["apply"]))
    return effect_to_json(store.sweep(apply=apply, deadline_s=deadline_s))


def _purge(store: ControlledStore, args: Json, deadline_s: float) -> object:
    order = reading("a purge order", lambda: order_from_json(args["order"]))
    return report_to_json(store.purge(order, deadline_s=deadline_s).answers[""])


def _purges(store: ControlledStore, args: Json, deadline_s: float) -> object:
    return [[order_to_json(order), report_to_json(report)] for order, report in store.purges(deadline_s=deadline_s)]


def _leftovers(store: ControlledStore, args: Json, deadline_s: float) -> object:
    order, until_s = reading("leftovers", lambda: (order_from_json(args["order"]), whole(args["until_s"])))
    return leftovers_to_json(store.leftovers(order, {"": until_s}, deadline_s=deadline_s).answers[""])


def _sight(store: ControlledStore, args: Json, deadline_s: float) -> object:
    space_id = reading("sight", lambda: None if args["space_id"] is None else space_id_of(args["space_id"]))
    names, blocks = reading(
        "sight", lambda: ([name_from_json(row) for row in args["names"]], truth(args.get("blocks", False)))
    )
    if len(names) > limits.BATCH_BLOCKS_MAX:
        raise ProtocolError(f"sight takes at most {limits.BATCH_BLOCKS_MAX} blocks")
    seen = store.sight(space_id, names, deadline_s=deadline_s)
    return [sighting_to_json(item) if blocks else sighting_to_json(item)[:_SIGHTING_SHORT] for item in seen]


def _stats(store: ControlledStore, args: Json, deadline_s: float) -> object:
    return store.stats(deadline_s=deadline_s)


def _report_corrupt(store: ControlledStore, args: Json, deadline_s: float) -> object:
    space_id, name = reading("report_corrupt", lambda: (space_id_of(args["space_id"]), name_from_json(args["name"])))
    return store.report_corrupt(space_id, name)


_HANDLERS: Mapping[str, Callable[[ControlledStore, Json, float], object]] = {
    "register_space": _register_space,
    "purge": _purge,
    "purges": _purges,
    "leftovers": _leftovers,
    "scan": _scan,
    "spaces": _spaces,
    "delete": _delete,
    "delete_space": _delete_space,
    "pin": _pin,
    "unpin": _unpin,
    "pins": _pins,
    "policy": _policy,
    "policy_history": _policy_history,
    "set_policy": _set_policy,
    "sweep": _sweep,
    "sight": _sight,
    "stats": _stats,
    "report_corrupt": _report_corrupt,
}

VERBS = frozenset(_HANDLERS)
"""Every control verb."""


# --- values ---------------------------------------------------------------------------------------------------------


def key_of(text: str) -> BlockKey:
    key = bytes.fromhex(text)
    if len(key) != limits.KEY_BYTES:
        raise ValueError(f"a key has {limits.KEY_BYTES} bytes, not {len(key)}")
    return BlockKey(key)


def space_id_of(text: str) -> SpaceId:
    return SpaceId(bytes(key_of(text)))


def keys_of(rows: Sequence[str]) -> list[BlockKey]:
    if len(rows) > limits.LOOKUP_KEYS_MAX:
        raise ValueError(f"at most {limits.LOOKUP_KEYS_MAX} keys are taken at once")
    return [key_of(row) for row in rows]


def name_to_json(name: BlockName) -> list[str]:
    return [name.key.hex(), name.token_digest.hex()]


def name_from_json(row: Sequence[str]) -> BlockName:
    return named_by_key(key_of(row[0]), digest_of(row[1]))


def space_from_json(text: str) -> Space:
    return decode_space(bytes.fromhex(text))


def info_to_json(info: BlockInfo) -> list[Any]:
    return [
        info.key.hex(),
        info.space_id.hex(),
        info.parent.hex(),
        info.index,
        info.tokens,
        info.flags,
        info.stored_bytes,
        info.payload_bytes,
        info.written_s,
        info.keep_until_s,
        [[byte, touch_s] for byte, touch_s in info.touches.items()],
        info.pinned,
        info.segment,
    ]


def info_from_json(row: Sequence[Any]) -> BlockInfo:
    key, space_id, parent, *numbers, touches, pinned, segment = row
    index, tokens, flags, stored_bytes, payload_bytes, written_s, keep_until_s = (whole(number) for number in numbers)
    return BlockInfo(
        key=key_of(key),
        space_id=space_id_of(space_id),
        parent=key_of(parent),
        index=index,
        tokens=tokens,
        flags=flags,
        stored_bytes=stored_bytes,
        payload_bytes=payload_bytes,
        written_s=written_s,
        keep_until_s=keep_until_s,
        touches={whole(byte): whole(touch_s) for byte, touch_s in touches},
        pinned=truth(pinned),
        segment=whole(segment),
    )


def pin_to_json(pin: Pin) -> Json:
    return {
        "space_id": pin.space_id.hex(),
        "key": pin.key.hex(),
        "owner": pin.owner,
        "reason": pin.reason,
        "until_s": pin.until_s,
        "hold": pin.hold,
    }


def pin_from_json(row: Json) -> Pin:
    owner, reason = string(row["owner"]), string(row["reason"])
    hold = truth(row.get("hold", False))
    if max(len(owner.encode()), len(reason.encode())) > limits.NAME_BYTES_MAX:
        raise ValueError(f"owner and reason of a pin have at most {limits.NAME_BYTES_MAX} bytes")
    return Pin(space_id_of(row["space_id"]), key_of(row["key"]), owner, reason, whole(row["until_s"]), hold)


def policy_to_json(policy: Policy) -> Json:
    return {
        "version": policy.version,
        "rules": policy.rules.to_json(),
        "text": policy.text,
        "changed_s": policy.changed_s,
        "author": policy.author,
    }


def policy_from_json(row: Json) -> Policy:
    return Policy(
        whole(row["version"]),
        ClassRules.from_json(row["rules"]),
        string(row["text"]),
        whole(row.get("changed_s", 0)),
        author_of(row.get("author", "")),
    )


def author_of(value: object) -> str:
    """Who changed a policy. Raises TypeError or ValueError."""
    author = string(value)
    if len(author.encode()) > limits.NAME_BYTES_MAX:
        raise ValueError(f"the author of a policy has at most {limits.NAME_BYTES_MAX} bytes")
    return author


def effect_to_json(effect: Effect) -> Json:
    return {
        "applied": effect.applied,
        "removed": [[item.class_byte, item.space_id.hex(), item.blocks, item.payload_bytes] for item in effect.removed],
        "segments_freed": effect.segments_freed,
        "blocks_rewritten": effect.blocks_rewritten,
    }


def effect_from_json(row: Json) -> Effect:
    removed = tuple(
        ClassEffect(whole(byte), space_id_of(space_id), whole(blocks), whole(payload_bytes))
        for byte, space_id, blocks, payload_bytes in row["removed"]
    )
    return Effect(truth(row["applied"]), removed, whole(row["segments_freed"]), whole(row["blocks_rewritten"]))


def merge_effects(effects: Sequence[Effect], nodes_failed: Mapping[str, str]) -> Effect:
    """What several nodes did, as one effect; the nodes that did not answer are named."""
    sums: dict[tuple[int, SpaceId], tuple[int, int]] = {}
    for item in (item for effect in effects for item in effect.removed):
        blocks, size = sums.get((item.class_byte, item.space_id), (0, 0))
        sums[item.class_byte, item.space_id] = (blocks + item.blocks, size + item.payload_bytes)
    return Effect(
        applied=any(effect.applied for effect in effects),
        removed=tuple(ClassEffect(byte, space_id, *sums[byte, space_id]) for byte, space_id in sorted(sums)),
        segments_freed=sum(effect.segments_freed for effect in effects),
        blocks_rewritten=sum(effect.blocks_rewritten for effect in effects),
        nodes_failed=dict(nodes_failed) or None,
    )


def sighting_to_json(sighting: Sighting) -> list[Any]:
    """The last two elements, the block and its token digest, are for those who ask for them."""
    others = [space_id.hex() for space_id in sighting.other_spaces]
    block = None if sighting.block is None else info_to_json(sighting.block)
    digest = None if sighting.token_digest is None else sighting.token_digest.hex()
    return [int(sighting.presence), sighting.since_s, sighting.keep_until_s, others, block, digest]


def sighting_from_json(row: Sequence[Any]) -> Sighting:
    presence, since_s, keep_until_s, others, block, digest = row if len(row) != _SIGHTING_SHORT else [*row, None, None]
    return Sighting(
        Presence(whole(presence)),
        whole(since_s),
        whole(keep_until_s),
        tuple(space_id_of(text) for text in others),
        None if block is None else info_from_json(block),
        None if digest is None else digest_of(digest),
    )


def digest_of(text: str) -> TokenDigest:
    digest = bytes.fromhex(text)
    if len(digest) != limits.TOKEN_DIGEST_BYTES:
        raise ValueError(f"a token digest has {limits.TOKEN_DIGEST_BYTES} bytes")
    return TokenDigest(digest)
