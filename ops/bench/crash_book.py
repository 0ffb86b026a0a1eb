"""What the crash harness expects of a store: kept outside of it, from what the store acknowledged.

Owns payloads that tell of which life of which block they are, and the judgement of every answer. Does not know daemons
or files. Invariants: a payload is made from key, life and exactness alone, every eight bytes of it differently, so
that a sector of another block, place or life is noticed; a life ends when a deletion was acknowledged, and no payload
of it may be seen again; whoever puts or deletes a block is its only writer, so that the order of its lives is known.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

from kvstore.daemon.record import HEADER_BYTES, RECORD_ALIGN
from kvstore.keys import AttentionGroup, BlockName, Space, TokenChain, space_id
from kvstore.limits import KEY_BYTES, KIB, MIB
from kvstore.store import FLAG_APPROXIMATE, BlockPut, GetStatus, PutOutcome
from kvstore.traffic import AGENT, CHAT, ClassRules, TrafficClass
from ops.bench.crash_policy import BRIEF, PolicyBook, first_rules

CAPACITY_BYTES = 24 * MIB
SEGMENT_BYTES = MIB
"""Small, so that segments are recycled all the time."""
RULES = first_rules(CAPACITY_BYTES)
"""Those that a store begins with; clients change them."""
SHARES = {AGENT: 120, CHAT: 420, BRIEF: 60}
"""Blocks of each class."""
SIZES: dict[TrafficClass, tuple[int, ...]] = {
    AGENT: (512, 9_000, 40_008),
    CHAT: (3_800, 60_000, 110_000),
    BRIEF: (504, 30_000),
}
SECOND_SPACE_BLOCKS = 24
STRANGERS = 40
"""Names that nobody ever puts."""
BLOCK_TOKENS = 2
ACKNOWLEDGED = (PutOutcome.STORED, PutOutcome.TOUCHED, PutOutcome.REPLACED)
VIOLATIONS = ("corrupt", "phantom", "lost", "returned", "left", "unclean", "unbalanced")
"""Altered bytes; what nobody put; a broken promise; what was deleted; bytes of what was erased; fsck's findings; books
unlike the files.
"""

_COUNTING = np.arange(128 * KIB // 8, dtype=np.uint64) * np.uint64(0x9E37_79B9_7F4A_7C15)
_TOKEN = struct.Struct("<Q")
_PAGE_WORDS = RECORD_ALIGN // 8
_WORD_OF_PAYLOAD = 1
"""The word of each page that tells whose it is: the first of all is the token."""
_WORD_OF_PAGE = HEADER_BYTES // 8 + _WORD_OF_PAYLOAD


def spaces() -> tuple[Space, Space]:
    """The space of most blocks, and one that is purged as a whole now and then."""
    first, second = (
        Space(
            model=f"crash-{number}",
            weights_digest=bytes(KEY_BYTES),
            kv_dtype="bfloat16",
            layout="KV2LTD",
            block_tokens=BLOCK_TOKENS,
            groups=(AttentionGroup(window=0, layers=(0,), kv_heads=1, head_dim=1),),
        )
        for number in range(2)
    )
    return first, second


def payload_of(name: BlockName, token: int, size: int) -> bytes:
    """The bytes of one life of a block; the first eight are the token that says which."""
    body = (_COUNTING[: -(-size // 8)] ^ np.uint64(_seed_of(name, token))).tobytes()
    return (_TOKEN.pack(token) + body[8:])[:size]


def _seed_of(name: BlockName, token: int) -> int:
    return xxhash.xxh3_64_intdigest(name.key + _TOKEN.pack(token))


def payloads_in(segment: npt.NDArray[np.uint64], seeds: npt.NDArray[np.uint64]) -> int:
    """How many pages of a segment file hold a page of the payloads with these seeds."""
    pages = segment[: len(segment) // _PAGE_WORDS * _PAGE_WORDS].reshape(-1, _PAGE_WORDS)[:, _WORD_OF_PAGE]
    words = _COUNTING[_WORD_OF_PAYLOAD::_PAGE_WORDS]
    return int(np.count_nonzero(np.isin(pages[:, None] ^ words[None, :], seeds).any(axis=1)))


@dataclass(slots=True)
class Expected:
    """One block. ``possible``: tokens of the payloads that a read may give; ``promised``: a miss would be a loss."""

    name: BlockName
    space: Space
    traffic_class: TrafficClass
    size: int
    life: int = 1
    possible: set[int] = field(default_factory=set)
    promised: bool = False
    pinned: bool = False
    unanswered: int = 0
    """Puts of this life that got no answer, or not yet."""
    is_going: bool = False
    """A deletion was asked for, and has no answer: a start may find it half done."""
    is_fresh: bool = False
    """Whether the last put offered a payload that was never offered before."""

    @property
    def is_kept(self) -> bool:
        """Whether the store may not evict it once it is stored."""
        return self.traffic_class == AGENT or self.pinned

    def put(self, *, exact: bool) -> BlockPut:
        """The next put of this block; its payload is possible from now on."""
        token = 2 * self.life + exact
        self.is_fresh = token not in self.possible
        self.possible.add(token)
        self.unanswered += 1
        return BlockPut(
            self.name, BLOCK_TOKENS, payload_of(self.name, token, self.size), 0 if exact else FLAG_APPROXIMATE
        )

    def settle(self, outcome: PutOutcome, *, exact: bool, durable: bool, lasting: bool) -> None:
        """What the put was answered. ``durable``: whether the level promised survives what will happen; ``lasting``:
        whether the policy promises anything.
        """
        token = 2 * self.life + exact
        self.unanswered -= outcome is not PutOutcome.UNREACHABLE
        if outcome in ACKNOWLEDGED:
            if exact and durable:
                self.possible = {token}
            self.promised = self.is_kept and (self.promised or (durable and lasting))
        elif outcome is not PutOutcome.UNREACHABLE and self.is_fresh and not self.unanswered:
            self.possible.discard(token)

    def begin_delete(self) -> None:
        self.promised = self.pinned = False
        self.is_going = True

    def end_delete(self) -> None:
        """A deletion was acknowledged: what was possible is forbidden from now on."""
        self.life += 1
        self.is_going = False
        self.possible = set()
        self.unanswered = 0


class Book:
    """All expectations, and every violation found. Judging is thread-safe: it appends only."""

    def __init__(self, seed: int) -> None:
        first, second = spaces()
        chain = TokenChain(
            space_id(first), BLOCK_TOKENS, [seed & 0xFFFF_FFFF, 0, *range(2 * sum(SHARES.values()) + 2 * STRANGERS)]
        )
        names = list(chain.names)
        classes = [traffic_class for traffic_class, count in SHARES.items() for _ in range(count)]
        self.blocks = [
            Expected(name, first, traffic_class, SIZES[traffic_class][at % len(SIZES[traffic_class])])
            for at, (name, traffic_class) in enumerate(zip(names, classes, strict=False))
        ]
        other = TokenChain(space_id(second), BLOCK_TOKENS, range(2 * SECOND_SPACE_BLOCKS))
        self.blocks += [Expected(name, second, AGENT, 4_000) for name in other.names]
        self.strangers = names[len(classes) :]
        self.erased: set[int] = set()
        """Seeds of the payloads of which no byte may be on disk any more."""
        self.policy = PolicyBook()
        self.counts: Counter[str] = Counter()
        self.violations: list[tuple[str, str]] = []

    def of_space(self, number: int) -> list[Expected]:
        """Blocks of the first or the second space."""
        space = spaces()[number]
        return [block for block in self.blocks if block.space == space]

    def expect_policy(self, rules: ClassRules) -> None:
        """A change begins: what it may let expire is promised no longer."""
        with self.policy.lock:
            self.policy.expect(rules)
            for block in self.blocks:
                if block.traffic_class in self.policy.brief and not block.pinned:
                    block.promised = False

    def lasts(self, block: Expected) -> bool:
        """Whether the store may neither evict nor expire a block, as far as the policy is known."""
        return block.pinned or (block.is_kept and block.traffic_class not in self.policy.brief)

    def end_erasure(self, blocks: Sequence[Expected]) -> None:
        """A purge order was acknowledged: nothing of any life so far is left."""
        for block in blocks:
            self.erased |= {_seed_of(block.name, token) for token in range(2, 2 * block.life + 2)}
            block.end_delete()

    def judge_files(self, segments: Path) -> None:
        """Judge the segment files of a store that is dead."""
        seeds = np.array(sorted(self.erased), dtype=np.uint64)
        for path in sorted(segments.glob("*.seg")) if len(seeds) else ():
            data = path.read_bytes()
            left = payloads_in(np.frombuffer(data[: len(data) // 8 * 8], "<u8"), seeds)
            if left:
                self.accuse("left", f"{left} pages of erased blocks in {path.name}")

    def accuse(self, kind: str, what: str) -> None:
        """Write down a violation."""
        assert kind in VIOLATIONS
        self.violations.append((kind, what))

    def judge_read(self, block: Expected, data: bytes | bytearray, life_before: int) -> int:
        """Judge the bytes of a successful get that began in ``life_before``; the token that they carry."""
        token = int(_TOKEN.unpack_from(data)[0])
        where = f"block {block.name.index} of {block.space.model}"
        if data != payload_of(block.name, token, block.size):
            self.accuse("corrupt", f"{where}: bytes of no put")
        elif token >> 1 < life_before:
            self.accuse("returned", f"{where}: life {token >> 1} ended before life {life_before}")
        elif token >> 1 > block.life:
            self.accuse("phantom", f"{where}: life {token >> 1} has not begun")
        return token

    def judge_still(self, block: Expected, status: GetStatus, data: bytes | bytearray) -> None:
        """Judge a get while nobody writes: after a restart."""
        where = f"block {block.name.index} of {block.space.model} (life {block.life})"
        if status is GetStatus.OK:
            token = self.judge_read(block, data, block.life)
            if token not in block.possible and token >> 1 == block.life:
                self.accuse("phantom", f"{where}: token {token} is none of {sorted(block.possible)}")
        elif status in (GetStatus.CORRUPT, GetStatus.MISS):
            self.counts["detected"] += status is GetStatus.CORRUPT
            if block.promised:
                self.accuse("lost", f"{where}: {status.name}")
                block.promised = False
        else:
            self.accuse("unbalanced", f"{where}: {status.name}")

    def judge_strangers(self, presence: Sequence[int], statuses: Sequence[GetStatus]) -> None:
        """Names that nobody put are not there."""
        if any(found == 1 for found in presence) or any(status is GetStatus.OK for status in statuses):
            self.accuse("phantom", "a block that was never put")
