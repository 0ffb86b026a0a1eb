"""The store's contract: what every backend (memory, node, client over a socket) promises, and the values it returns.

In one sentence: an acknowledged block is later returned byte-identical or as a miss; never altered, never under another
key, never after its deletion was acknowledged. One contract suite (``tests/contract``) runs on every backend.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from kvstore.keys import BlockKey, BlockName, Space, SpaceId, StateKey, StateName, TokenDigest
from kvstore.purges import ByNode, Leftovers, PurgeOrder, PurgeReport
from kvstore.traffic import ClassRules, TrafficClass

Buffer = bytes | bytearray | memoryview
AckLevel = Literal["os", "disk"]
"""``os``: survives the process. ``disk``: survives power loss (group-committed fdatasync)."""

FLAG_APPROXIMATE = 0x01
"""Provenance: computed downstream of a bounded replay. A later exact block replaces an approximate one."""
FLAGS_KNOWN = FLAG_APPROXIMATE


class Clock(Protocol):
    """Wall time in seconds since the epoch; injected everywhere a deadline is computed."""

    def now_s(self) -> float: ...


class SystemClock:
    """The machine's clock."""

    def now_s(self) -> float:
        return time.time()


class Presence(IntEnum):
    """What a lookup says of one key; everything but PRESENT is a miss, with its reason."""

    NEVER = 0
    """No record, and no memory of one (never stored, or removed so long ago that the reason is forgotten)."""
    PRESENT = 1
    EXPIRED = 2
    EVICTED = 3
    QUARANTINED = 4
    PURGED = 5
    UNREACHABLE = 6
    """The node that would hold it did not answer before the deadline."""


_PRESENT = int(Presence.PRESENT)
"""As a plain number: comparing a column with a member takes four times as long."""


class GetStatus(IntEnum):
    """Outcome for one block of a get. Only with OK may the buffer be read."""

    OK = 0
    MISS = 1
    CORRUPT = 2
    """Checksum, key or token digest differed; the block was reported for quarantine and the buffer zeroed."""
    DEADLINE = 3
    WRONG_SIZE = 4
    """The stored payload has another length than the buffer."""
    UNREACHABLE = 5


class PutOutcome(IntEnum):
    """Outcome for one block of a put. STORED, TOUCHED and REPLACED are acknowledgements."""

    STORED = 0
    TOUCHED = 1
    """The key was there already: its keep-until was extended, nothing was written."""
    REPLACED = 2
    """An exact block took the place of an approximate one."""
    REFUSED = 3
    """Capacity or admission: retryable; nothing was written."""
    ALTERED = 4
    """The bytes changed between submission and arrival (checksum mismatch); nothing is kept of them."""
    UNREACHABLE = 5
    DECLINED = 6
    """Not stored by the class's policy (its admission, or its write budget of the day): there is nothing to repeat."""
    TOO_LARGE = 7
    """No segment of the node can take it, now or later: make the store with a larger ``segment_bytes``."""


@dataclass(frozen=True, slots=True)
class StateEntry:
    """A state that a lookup found under one of the asked parents.

    ``block_index``: index of the parent block in the asked keys, -1 for the space's root. Position in tokens =
    ``(block_index + 1) * block_tokens + tail_tokens``; the asker checks ``key`` against its own chain.
    """

    key: StateKey
    block_index: int
    tail_tokens: int
    payload_bytes: int
    flags: int


@dataclass(frozen=True, slots=True)
class Lookup:
    """Answer of one lookup. Arrays have one element a key, in the order asked.

    ``complete`` is False when the deadline passed before every node had answered (their keys are UNREACHABLE).
    ``load_s_estimate``: time until a get of the present prefix would be answered, behind the gets that are under way
    and at the speed of recent ones; 0 if that is unknown.
    """

    presence: npt.NDArray[np.uint8]
    flags: npt.NDArray[np.uint8]
    payload_bytes: npt.NDArray[np.uint32]
    states: tuple[StateEntry, ...] = ()
    complete: bool = True
    load_s_estimate: float = 0.0

    def prefix_blocks(self, *, exact_only: bool = False) -> int:
        """Blocks present without a gap from the first on; with ``exact_only`` an approximate block ends the prefix."""
        usable = self.presence == _PRESENT
        if exact_only:
            usable &= (self.flags & FLAG_APPROXIMATE) == 0
        return usable.size if usable.all() else int(usable.argmin())

    def prefix_bytes(self) -> int:
        """Payload bytes of ``prefix_blocks``."""
        return int(self.payload_bytes[: self.prefix_blocks()].sum(dtype=np.int64))


@dataclass(frozen=True, slots=True)
class BlockPut:
    """One block to store. ``tokens`` is its token count (the space's block_tokens)."""

    name: BlockName
    tokens: int
    payload: Buffer
    flags: int = 0


@dataclass(frozen=True, slots=True)
class BlockInfo:
    """What a scan tells of one stored block. Times are seconds since the epoch, sizes bytes.

    ``touches``: last touch per class byte (stored as u32); keep-until is the maximum over them of touch + keep_for of
    the class (an i64, never stored).
    """

    key: BlockKey
    space_id: SpaceId
    parent: BlockKey
    index: int
    tokens: int
    flags: int
    stored_bytes: int
    payload_bytes: int
    written_s: int
    keep_until_s: int
    touches: Mapping[int, int]
    pinned: bool
    segment: int


@dataclass(frozen=True, slots=True)
class Pin:
    """A pin holds one block against expiry and eviction until unpinned or ``until_s`` (0: no end).

    Each owner has a pin of its own. ``hold``: a legal hold, against purges too, until it is released in so many words.
    """

    space_id: SpaceId
    key: BlockKey
    owner: str
    reason: str
    until_s: int = 0
    hold: bool = False


@dataclass(frozen=True, slots=True)
class Policy:
    """The class rules in force, with the text they came from. ``version`` counts up by one with every change.

    ``changed_s``: when it came into force (0: unknown); ``author``: who changed it, as they called themselves.
    """

    version: int
    rules: ClassRules
    text: str
    changed_s: int = 0
    author: str = ""


@dataclass(frozen=True, slots=True)
class ClassEffect:
    """What an action would remove, or removed, of one class in one space."""

    class_byte: int
    space_id: SpaceId
    blocks: int
    payload_bytes: int


@dataclass(frozen=True, slots=True)
class Effect:
    """What a sweep, a policy change or a purge would do (``applied`` False) or did.

    ``segments_freed`` went back to the free list, ``blocks_rewritten`` were moved because they still had a promise.
    ``nodes_failed`` names nodes that did not answer, with the error.
    """

    applied: bool
    removed: tuple[ClassEffect, ...]
    segments_freed: int = 0
    blocks_rewritten: int = 0
    nodes_failed: Mapping[str, str] | None = None

    @property
    def blocks(self) -> int:
        return sum(item.blocks for item in self.removed)

    @property
    def payload_bytes(self) -> int:
        return sum(item.payload_bytes for item in self.removed)


@dataclass(frozen=True, slots=True)
class Sighting:
    """What a store remembers of one block for explain.

    ``since_s``: when it was written (PRESENT) or removed (else 0 if unknown). ``other_spaces``: ids of spaces in which
    a block with the same token digest is stored now. ``block`` and ``token_digest``: all that is known, while its
    record is there.
    """

    presence: Presence
    since_s: int
    keep_until_s: int
    other_spaces: tuple[SpaceId, ...]
    block: BlockInfo | None = None
    token_digest: TokenDigest | None = None


class Store(Protocol):
    """The verbs. Every call has a deadline in seconds; raises errors of ``kvstore.errors`` (ValueError: misuse).

    Thread-safe. Buffers passed in belong to the caller again when the call returns; a backend keeps no reference.
    """

    # data plane
    def register_space(self, space: Space, *, deadline_s: float = ...) -> SpaceId:
        """Make a space known (idempotent); needed once before a put into it."""

    def lookup(
        self, space_id: SpaceId, names: Sequence[BlockName], *, states: bool = False, deadline_s: float = ...
    ) -> Lookup:
        """Which of the named blocks are stored, and (``states``) which states lie under them or under the root.

        One call a node. Never touches. A node that is down or late gives UNREACHABLE keys, not an error.
        """

    def get_into(
        self,
        space_id: SpaceId,
        names: Sequence[BlockName],
        buffers: Sequence[bytearray | memoryview],
        *,
        deadline_s: float = ...,
    ) -> list[GetStatus]:
        """Fill each buffer with its block's payload, verified. Failure of one block is a status, never an error."""

    def put(
        self,
        space_id: SpaceId,
        blocks: Sequence[BlockPut],
        *,
        traffic_class: TrafficClass,
        ack: AckLevel = "os",
        deadline_s: float = ...,
    ) -> list[PutOutcome]:
        """Store blocks under a class; returns when they are acknowledged at ``ack``. An existing key is a touch."""

    def touch(
        self, space_id: SpaceId, names: Sequence[BlockName], *, traffic_class: TrafficClass, deadline_s: float = ...
    ) -> int:
        """Count a use by a class: keep-until becomes the maximum. Returns how many of the keys were present."""

    def put_state(
        self, space_id: SpaceId, name: StateName, payload: Buffer, *, flags: int = 0, deadline_s: float = ...
    ) -> bool:
        """Keep a state in the node's memory for minutes; False if it was refused (larger than the pool)."""

    def get_state(self, space_id: SpaceId, name: StateName, *, deadline_s: float = ...) -> tuple[bytes, int] | None:
        """A state's verified payload and flags, or None."""

    # control plane
    def scan(
        self, space_id: SpaceId | None = None, *, cursor: bytes = b"", limit: int = ..., deadline_s: float = ...
    ) -> tuple[list[BlockInfo], bytes]:
        """One page of stored blocks in key order, and the cursor of the next page (empty at the end)."""

    def spaces(self, *, deadline_s: float = ...) -> dict[SpaceId, Space]:
        """Every registered space."""

    def delete(self, space_id: SpaceId, keys: Sequence[BlockKey], *, deadline_s: float = ...) -> int:
        """Purge blocks by key, and states under them; gone for good when acknowledged. Returns how many were there.

        Raises Held if one is under a legal hold: none is removed then.
        """

    def delete_space(self, space_id: SpaceId, *, deadline_s: float = ...) -> int:
        """Purge every block and state of a space. Returns the number of blocks. Raises Held."""

    def purge(self, order: PurgeOrder, *, deadline_s: float = ...) -> ByNode[PurgeReport]:
        """Purge what an order names so that no byte of it is left on disk, once. A node that was told carries it out,
        also when its answer did not come in time, or after a restart.
        """

    def purges(self, *, deadline_s: float = ...) -> list[tuple[PurgeOrder, PurgeReport]]:
        """The orders that are remembered, and what was done about each, the latest last."""

    def leftovers(self, order: PurgeOrder, until_s: Mapping[str, int], *, deadline_s: float = ...) -> ByNode[Leftovers]:
        """What a raw scan of the segments finds of an order now. ``until_s``: by node, what was written then or before
        (a node that it does not name: at the order's time).
        """

    def pin(self, pins: Sequence[Pin], *, deadline_s: float = ...) -> int:
        """Pin stored blocks; returns how many were present and are now pinned. Raises QuotaExceeded, Held."""

    def unpin(
        self,
        space_id: SpaceId,
        keys: Sequence[BlockKey],
        *,
        owner: str | None = ...,
        holds: bool = ...,
        deadline_s: float = ...,
    ) -> int:
        """Take away the pins of ``owner``, or everybody's (None); returns how many blocks had one.

        Legal holds are released only with ``holds``; else Held is raised, and nothing changes.
        """

    def pins(self, *, deadline_s: float = ...) -> list[Pin]: ...

    def policy(self, *, deadline_s: float = ...) -> Policy: ...

    def policy_history(self, *, deadline_s: float = ...) -> list[Policy]:
        """The policies so far, the oldest that is remembered first, the one in force last."""

    def set_policy(
        self,
        rules: ClassRules,
        text: str,
        *,
        expected_version: int,
        apply: bool,
        author: str = ...,
        deadline_s: float = ...,
    ) -> Effect:
        """Change the rules (``apply``), or say what the change would expire at once. PolicyConflict if another won.

        ``author`` (256 bytes at most) is remembered with the change.
        """

    def sweep(self, *, apply: bool, deadline_s: float = ...) -> Effect:
        """Give segments whose promises are all past back to the free list, or say which."""

    def sight(self, space_id: SpaceId | None, names: Sequence[BlockName], *, deadline_s: float = ...) -> list[Sighting]:
        """What is remembered of blocks, for explain (only key, token_digest and route of the names are used).

        Without a space, by their keys alone: of whatever space and tokens they are.
        """

    def stats(self, *, deadline_s: float = ...) -> dict[str, Any]:
        """Counters and gauges as JSON values; see ``kvstore/FORMAT.md`` for the names."""

    def close(self) -> None: ...
