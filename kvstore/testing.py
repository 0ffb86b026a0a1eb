"""An in-memory store for tests of everything that talks to a store.

Owns ``MemoryStore`` (passes the store's contract suite) and the rules that tests use. Does not know of disks or
sockets. Invariants: every payload is copied on the way in and on the way out, so no caller's buffer is kept; time
passes only when the clock says so; payload bytes never exceed the capacity.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import xxhash

from kvstore import limits, wire
from kvstore.errors import Held, Overloaded, PolicyConflict, SpaceUnknown
from kvstore.keys import BlockKey, BlockName, Space, SpaceId, StateKey, StateName, space_id
from kvstore.manual_clock import T0_S as T0_S
from kvstore.manual_clock import ManualClock as ManualClock
from kvstore.memory_parts import MemoryBlock, MemoryLease, MemoryState, class_effects, is_ordered, is_shared
from kvstore.purges import ByNode, Leftovers, PurgeOrder, PurgeReport, digest_of_keys
from kvstore.store import (
    FLAG_APPROXIMATE,
    BlockInfo,
    BlockPut,
    Buffer,
    Clock,
    Effect,
    GetStatus,
    Lookup,
    Pin,
    Policy,
    Presence,
    PutOutcome,
    Sighting,
    StateEntry,
)
from kvstore.traffic import AGENT, CHAT, SECOND_TOUCH, SLIDING, ClassRule, ClassRules, TrafficClass

DAY_S = 86_400
NEVER_S = 2**62
TEST_RULES = ClassRules(
    (
        ClassRule(AGENT, "agent", keep_for_s=3 * DAY_S, priority=100),
        ClassRule(CHAT, "chat", keep_for_s=7 * DAY_S, priority=200),
    )
)
"""Agent 3 days, chat 7 days: the numbers of the default policy."""


class MemoryStore:
    """A store in a dict: same promises as a node, nothing survives the object.

    When full it evicts what is expired, then what classes hold beyond their ceilings, then classes by priority down to
    their floors, oldest keep-until first; what is pinned stays, and a put that finds no room is REFUSED.
    """

    def __init__(
        self,
        clock: Clock | None = None,
        rules: ClassRules = TEST_RULES,
        *,
        policy_text: str = "",
        capacity_bytes: int = 256 * limits.MIB,
        state_pool_bytes: int = 64 * limits.MIB,
        state_ttl_s: float = limits.STATE_TTL_S_DEFAULT,
    ) -> None:
        self._clock = clock if clock is not None else ManualClock()
        self._policies = [Policy(1, rules, policy_text)]
        self._capacity_bytes = capacity_bytes
        self._state_pool_bytes = state_pool_bytes
        self._state_ttl_s = state_ttl_s
        self._lock = threading.RLock()
        self._spaces: dict[SpaceId, Space] = {}
        self._blocks: dict[BlockKey, MemoryBlock] = {}
        self._payload_bytes = 0
        self._states: OrderedDict[StateKey, MemoryState] = OrderedDict()
        self._pins: dict[tuple[BlockKey, str], Pin] = {}
        self._purges: dict[str, tuple[PurgeOrder, PurgeReport]] = {}
        self._tombstones: OrderedDict[BlockKey, tuple[Presence, int]] = OrderedDict()
        self._counts: dict[str, int] = dict.fromkeys(
            ("hits", "misses", "puts", "touches", "corrupt", "quarantined", "evicted", "expired", "refused", "purged"),
            0,
        )
        self._counts["declined"] = 0
        self._offered: set[BlockKey] = set()
        self._written_bytes: Counter[tuple[int, int]] = Counter()
        """Of new blocks, by class and day."""

    # --- data plane -------------------------------------------------------------------------------------------------

    def register_space(self, space: Space, *, deadline_s: float = limits.DEADLINE_S_DEFAULT) -> SpaceId:
        name = space_id(space)
        with self._lock:
            if name not in self._spaces and len(self._spaces) >= limits.SPACES_MAX:
                raise Overloaded(f"the store has {limits.SPACES_MAX} spaces; purge one before adding another")
            self._spaces[name] = space
        return name

    def lookup(
        self,
        space_id: SpaceId,
        names: Sequence[BlockName],
        *,
        states: bool = False,
        deadline_s: float = limits.DEADLINE_S_DEFAULT,
    ) -> Lookup:
        if len(names) > limits.LOOKUP_KEYS_MAX:
            raise ValueError(f"a lookup has at most {limits.LOOKUP_KEYS_MAX} keys, not {len(names)}")
        presence = np.zeros(len(names), np.uint8)
        flags = np.zeros(len(names), np.uint8)
        payload_bytes = np.zeros(len(names), np.uint32)
        with self._lock:
            for at, name in enumerate(names):
                found = self._presence(space_id, name)
                presence[at] = found
                if found == Presence.PRESENT:
                    block = self._blocks[name.key]
                    flags[at], payload_bytes[at] = block.flags, len(block.payload)
            entries = self._states_under(space_id, names) if states else ()
        return Lookup(presence, flags, payload_bytes, entries)

    def get_into(
        self,
        space_id: SpaceId,
        names: Sequence[BlockName],
        buffers: Sequence[bytearray | memoryview],
        *,
        deadline_s: float = limits.DEADLINE_S_DEFAULT,
    ) -> list[GetStatus]:
        if len(names) != len(buffers):
            raise ValueError(f"{len(names)} names but {len(buffers)} buffers")
        views = [memoryview(buffer).cast("B") for buffer in buffers]
        return [self._get_one(space_id, name, view) for name, view in zip(names, views, strict=True)]

    def _get_one(self, space_id: SpaceId, name: BlockName, view: memoryview) -> GetStatus:
        with self._lock:
            block = self._live(space_id, name)
            self._counts["hits" if block else "misses"] += 1
        if block is None:
            return GetStatus.MISS
        if len(block.payload) != len(view):
            return GetStatus.WRONG_SIZE
        if xxhash.xxh3_64_intdigest(block.payload) != block.checksum:
            view[:] = bytes(len(view))
            self.report_corrupt(space_id, name)
            return GetStatus.CORRUPT
        view[:] = block.payload
        return GetStatus.OK

    def put(
        self,
        space_id: SpaceId,
        blocks: Sequence[BlockPut],
        *,
        traffic_class: TrafficClass,
        ack: wire.PutAck = "os",
        deadline_s: float = limits.DEADLINE_S_DEFAULT,
        checksums: Sequence[int] | None = None,
    ) -> list[PutOutcome]:
        if not 1 <= traffic_class <= 255:
            raise ValueError(f"traffic class {traffic_class} is outside 1..255")
        payloads = [bytes(memoryview(block.payload).cast("B")) for block in blocks]
        for payload in payloads:
            if not 1 <= len(payload) <= limits.PAYLOAD_BYTES_MAX:
                raise ValueError(f"a payload has 1..{limits.PAYLOAD_BYTES_MAX} bytes, not {len(payload)}")
        sums = [xxhash.xxh3_64_intdigest(payload) for payload in payloads]
        with self._lock:
            if space_id not in self._spaces:
                raise SpaceUnknown(f"space {space_id.hex()} was never registered here: call register_space first")
            return [
                PutOutcome.ALTERED
                if checksums is not None and checksums[at] != sums[at]
                else self._put_one(space_id, block, payloads[at], sums[at], traffic_class)
                for at, block in enumerate(blocks)
            ]

    def confirm(
        self, space_id: SpaceId, keys: Sequence[BlockKey], *, deadline_s: float = limits.DEADLINE_S_DEFAULT
    ) -> list[bool]:
        """Nothing here outlives the process, and nothing is lost by a flush."""
        return [True] * len(keys)

    def _put_one(
        self, space_id: SpaceId, block: BlockPut, payload: bytes, checksum: int, traffic_class: TrafficClass
    ) -> PutOutcome:
        now_s = int(self._clock.now_s())
        old = self._live(space_id, block.name)
        if old is None and self._is_live(self._blocks.get(block.name.key)):
            return PutOutcome.REFUSED  # the key lies under another token digest: a collision; the first one keeps it
        replaces = old is not None and bool(old.flags & FLAG_APPROXIMATE) and not block.flags & FLAG_APPROXIMATE
        if old is not None and not replaces:
            self._touch(old, traffic_class, now_s)
            self._counts["touches"] += 1
            return PutOutcome.TOUCHED
        if block.name.key not in self._blocks and not self._wants(block.name.key, len(payload), traffic_class, now_s):
            self._counts["declined"] += 1
            return PutOutcome.DECLINED
        freed = len(self._blocks[block.name.key].payload) if block.name.key in self._blocks else 0
        if not self._make_room(len(payload) - freed, keep=block.name.key):
            self._counts["refused"] += 1
            return PutOutcome.REFUSED
        if old is not None:
            self._touch(old, traffic_class, now_s)
        touches: dict[int, int] = dict(old.touches) if old else {traffic_class: now_s}
        self._payload_bytes += len(payload) - freed
        self._blocks[block.name.key] = MemoryBlock(
            space_id, block.name, block.tokens, block.flags, payload, checksum, now_s, traffic_class, touches
        )
        self._tombstones.pop(block.name.key, None)
        self._counts["puts"] += 1
        return PutOutcome.REPLACED if replaces else PutOutcome.STORED

    def _wants(self, key: BlockKey, payload_bytes: int, traffic_class: TrafficClass, now_s: int) -> bool:
        """Whether the rule of its class wants a new block. Keys offered once are never forgotten here."""
        rule = self._policy.rules.by_byte(traffic_class)
        if rule is None:
            return True
        if rule.admission == SECOND_TOUCH and key not in self._offered:
            self._offered.add(key)
            return False
        day = (traffic_class, now_s // DAY_S)
        if rule.write_budget_bytes and self._written_bytes[day] + payload_bytes > rule.write_budget_bytes:
            return False
        self._written_bytes[day] += payload_bytes
        return True

    def touch(
        self,
        space_id: SpaceId,
        names: Sequence[BlockName],
        *,
        traffic_class: TrafficClass,
        deadline_s: float = limits.DEADLINE_S_DEFAULT,
    ) -> int:
        now_s = int(self._clock.now_s())
        with self._lock:
            live = [block for name in names if (block := self._live(space_id, name))]
            for block in live:
                self._touch(block, traffic_class, now_s)
            self._counts["touches"] += len(live)
        return len(live)

    def put_state(
        self,
        space_id: SpaceId,
        name: StateName,
        payload: Buffer,
        *,
        flags: int = 0,
        deadline_s: float = limits.DEADLINE_S_DEFAULT,
    ) -> bool:
        data = bytes(memoryview(payload).cast("B"))
        if not 1 <= len(data) <= limits.STATE_BYTES_MAX:
            raise ValueError(f"a state has 1..{limits.STATE_BYTES_MAX} bytes, not {len(data)}")
        with self._lock:
            if space_id not in self._spaces:
                raise SpaceUnknown(f"space {space_id.hex()} was never registered here: call register_space first")
            if len(data) > self._state_pool_bytes:
                return False
            self._states.pop(name.key, None)
            expires_s = self._clock.now_s() + self._state_ttl_s
            self._states[name.key] = MemoryState(space_id, name, data, xxhash.xxh3_64_intdigest(data), flags, expires_s)
            while sum(len(state.payload) for state in self._states.values()) > self._state_pool_bytes:
                self._states.popitem(last=False)
            siblings = [key for key, state in self._states.items() if state.name.parent == name.parent]
            for key in siblings[: -limits.STATES_PER_PARENT_MAX]:
                del self._states[key]
        return True

    def get_state(
        self, space_id: SpaceId, name: StateName, *, deadline_s: float = limits.DEADLINE_S_DEFAULT
    ) -> tuple[bytes, int] | None:
        with self._lock:
            state = self._states.get(name.key)
            if state is None or state.space_id != space_id or self._clock.now_s() >= state.expires_s:
                return None
            self._states.move_to_end(name.key)
            return state.payload, state.flags

    # --- what a server asks besides ---------------------------------------------------------------------------------

    def open_payload(self, space_id: SpaceId, name: BlockName) -> MemoryLease | None:
        """Hold one payload for reading; None is a miss."""
        with self._lock:
            block = self._live(space_id, name)
            self._counts["hits" if block else "misses"] += 1
            return MemoryLease(block) if block else None

    def report_corrupt(self, space_id: SpaceId, name: BlockName) -> bool:
        """Verify a block that a reader found corrupt; True if it was and is now quarantined."""
        with self._lock:
            block = self._live(space_id, name)
            if block is None or xxhash.xxh3_64_intdigest(block.payload) == block.checksum:
                return False
            self._counts["corrupt"] += 1
            self._counts["quarantined"] += 1
            self._remove(name.key, Presence.QUARANTINED)
            return True

    def flip_bit(self, key: BlockKey, bit: int = 0) -> None:
        """Spoil a stored payload, for tests."""
        with self._lock:
            spoiled = bytearray(self._blocks[key].payload)
            spoiled[bit // 8] ^= 1 << (bit % 8)
            self._blocks[key].payload = bytes(spoiled)

    # --- control plane ----------------------------------------------------------------------------------------------

    def scan(
        self,
        space_id: SpaceId | None = None,
        *,
        cursor: bytes = b"",
        limit: int = limits.SCAN_PAGE_MAX,
        deadline_s: float = limits.DEADLINE_S_DEFAULT,
    ) -> tuple[list[BlockInfo], bytes]:
        if not 1 <= limit <= limits.SCAN_PAGE_MAX:
            raise ValueError(f"a page of a scan has 1..{limits.SCAN_PAGE_MAX} blocks, not {limit}")
        with self._lock:
            keys = sorted(
                key
                for key, block in self._blocks.items()
                if key > cursor and (space_id is None or block.space_id == space_id)
            )
            page = [self._info(self._blocks[key]) for key in keys[:limit]]
        return page, bytes(page[-1].key) if len(keys) > limit else b""

    def spaces(self, *, deadline_s: float = limits.DEADLINE_S_DEFAULT) -> dict[SpaceId, Space]:
        with self._lock:
            return dict(self._spaces)

    def space_of(self, space_id: SpaceId) -> Space | None:
        """A registered space, or None."""
        return self._spaces.get(space_id)

    def delete(
        self, space_id: SpaceId, keys: Sequence[BlockKey], *, deadline_s: float = limits.DEADLINE_S_DEFAULT
    ) -> int:
        with self._lock:
            found = [
                key for key in dict.fromkeys(keys) if key in self._blocks and self._blocks[key].space_id == space_id
            ]
            self._check_free(found)
            gone = frozenset(keys)
            under = [
                key for key, state in self._states.items() if state.space_id == space_id and state.name.parent in gone
            ]
            for state_key in under:
                del self._states[state_key]
            for key in found:
                self._remove(key, Presence.PURGED)
            for state_key in [key for key, state in self._states.items() if state.name.parent in set(keys)]:
                del self._states[state_key]
            self._counts["purged"] += len(found)
            return len(found)

    def delete_space(self, space_id: SpaceId, *, deadline_s: float = limits.DEADLINE_S_DEFAULT) -> int:
        with self._lock:
            count = self.delete(space_id, [key for key, block in self._blocks.items() if block.space_id == space_id])
            for state_key in [key for key, state in self._states.items() if state.space_id == space_id]:
                del self._states[state_key]
            return count

    def purge(self, order: PurgeOrder, *, deadline_s: float = limits.DEADLINE_S_DEFAULT) -> ByNode[PurgeReport]:
        with self._lock:
            if order.purge_id not in self._purges:
                now_s = int(self._clock.now_s())
                keys = [key for key, block in self._blocks.items() if is_ordered(order, block)]
                for space in order.spaces or tuple(self._spaces):
                    if order.keys is None and not order.is_part:
                        self.delete_space(space)
                        self._spaces.pop(space, None)
                    else:
                        self.delete(space, order.keys or keys)
                shared = [block for block in self._blocks.values() if is_shared(order, block)]
                for block in shared:
                    block.touches.pop(order.class_byte or 0)
                report = PurgeReport(
                    order.purge_id,
                    len(keys),
                    len(keys),
                    0,
                    0,
                    digest_of_keys(keys),
                    self._policy.version,
                    order.overwrite,
                    now_s,
                    max(1, now_s),
                    len(shared),
                )
                self._purges[order.purge_id] = (order, report)
            return ByNode({"": self._purges[order.purge_id][1]})

    def purges(self, *, deadline_s: float = limits.DEADLINE_S_DEFAULT) -> list[tuple[PurgeOrder, PurgeReport]]:
        with self._lock:
            return list(self._purges.values())

    def leftovers(
        self, order: PurgeOrder, until_s: Mapping[str, int], *, deadline_s: float = limits.DEADLINE_S_DEFAULT
    ) -> ByNode[Leftovers]:
        with self._lock:
            end_s = until_s.get("", order.until_s)
            living = sum(is_ordered(order, block) and block.written_s <= end_s for key, block in self._blocks.items())
            return ByNode({"": Leftovers(living=living)})

    def pin(self, pins: Sequence[Pin], *, deadline_s: float = limits.DEADLINE_S_DEFAULT) -> int:
        if any(not 0 <= item.until_s <= limits.PIN_UNTIL_S_MAX for item in pins):
            raise ValueError("a pin ends at a time in seconds since the epoch, or never (0)")
        with self._lock:
            found = [item for item in pins if self._is_live(self._blocks.get(item.key))]
            found = [item for item in found if self._blocks[item.key].space_id == item.space_id]
            for item in found:
                before = self._pins.get((item.key, item.owner))
                if before is not None and before.hold and not item.hold:
                    raise Held("release the hold before pinning otherwise")
            self._pins |= {(item.key, item.owner): item for item in found}
            return len(found)

    def unpin(
        self,
        space_id: SpaceId,
        keys: Sequence[BlockKey],
        *,
        owner: str | None = None,
        holds: bool = False,
        deadline_s: float = limits.DEADLINE_S_DEFAULT,
    ) -> int:
        with self._lock:
            going = [
                place
                for place, pin in self._pins.items()
                if place[0] in set(keys) and pin.space_id == space_id and owner in (None, pin.owner)
            ]
            if not holds:
                self._check_free({place[0] for place in going}, owner)
            for place in going:
                del self._pins[place]
            return len({place[0] for place in going})

    def pins(self, *, deadline_s: float = limits.DEADLINE_S_DEFAULT) -> list[Pin]:
        with self._lock:
            return [pin for pin in self._pins.values() if self._counts_now(pin)]

    def _counts_now(self, pin: Pin) -> bool:
        return pin.until_s == 0 or self._clock.now_s() < pin.until_s

    def _check_free(self, keys: Collection[BlockKey], owner: str | None = None) -> None:
        """Raise Held if one of the blocks is under a legal hold."""
        for (key, _), pin in self._pins.items():
            if key in keys and pin.hold and owner in (None, pin.owner) and self._counts_now(pin):
                raise Held(f"{pin.owner} holds a block by law: nothing was removed")

    def policy(self, *, deadline_s: float = limits.DEADLINE_S_DEFAULT) -> Policy:
        with self._lock:
            return self._policy

    @property
    def _policy(self) -> Policy:
        return self._policies[-1]

    def policy_history(self, *, deadline_s: float = limits.DEADLINE_S_DEFAULT) -> list[Policy]:
        with self._lock:
            return list(self._policies)

    def set_policy(
        self,
        rules: ClassRules,
        text: str,
        *,
        expected_version: int,
        apply: bool,
        author: str = "",
        deadline_s: float = limits.DEADLINE_S_DEFAULT,
    ) -> Effect:
        with self._lock:
            if expected_version != self._policy.version:
                raise PolicyConflict(
                    f"the policy is at version {self._policy.version}, not {expected_version}: read it again"
                )
            changed = Policy(self._policy.version + 1, rules, text, int(self._clock.now_s()), author)
            lost = [
                block
                for block in self._blocks.values()
                if self._is_live(block) and not self._is_live(block, changed.rules)
            ]
            if apply:
                self._policies.append(changed)
            return Effect(apply, class_effects(lost))

    def sweep(self, *, apply: bool, deadline_s: float = limits.DEADLINE_S_DEFAULT) -> Effect:
        with self._lock:
            expired = [block for block in self._blocks.values() if not self._is_live(block)]
            if apply:
                for block in expired:
                    self._remove(block.name.key, Presence.EXPIRED)
                self._counts["expired"] += len(expired)
            return Effect(apply, class_effects(expired))

    def sight(
        self, space_id: SpaceId | None, names: Sequence[BlockName], *, deadline_s: float = limits.DEADLINE_S_DEFAULT
    ) -> list[Sighting]:
        with self._lock:
            return [self._sighting(space_id, name) for name in names]

    def stats(self, *, deadline_s: float = limits.DEADLINE_S_DEFAULT) -> dict[str, Any]:
        with self._lock:
            return {
                "blocks": len(self._blocks),
                "payload_bytes": self._payload_bytes,
                "capacity_bytes": self._capacity_bytes,
                "states": len(self._states),
                "state_bytes": sum(len(state.payload) for state in self._states.values()),
                "spaces": len(self._spaces),
                "pins": len(self._pins),
                "policy_version": self._policy.version,
                **self._counts,
            }

    def close(self) -> None:
        return None

    # --- inside (callers hold the lock) -----------------------------------------------------------------------------

    def _touch(self, block: MemoryBlock, traffic_class: TrafficClass, now_s: int) -> None:
        before_s, rule = block.touches.get(traffic_class), self._policy.rules.by_byte(traffic_class)
        if before_s is None or rule is None or rule.keep == SLIDING:
            block.touches[traffic_class] = max(now_s, before_s or 0)

    def _keep_until_s(self, block: MemoryBlock, rules: ClassRules | None = None) -> int:
        in_force = rules or self._policy.rules
        until_s = max(touch_s + in_force.keep_for_s(class_byte) for class_byte, touch_s in block.touches.items())
        return min(until_s, self._ends_s(block, in_force))

    def _ends_s(self, block: MemoryBlock, rules: ClassRules) -> int:
        """When a block is as old as it may become; no pin matters for that, but a legal hold does."""
        rule = rules.by_byte(block.class_byte)
        held = any(
            place[0] == block.name.key and pin.hold and self._counts_now(pin) for place, pin in self._pins.items()
        )
        return block.written_s + rule.max_age_s if rule and rule.max_age_s and not held else NEVER_S

    def _is_pinned(self, key: BlockKey) -> bool:
        return any(place[0] == key and self._counts_now(pin) for place, pin in self._pins.items())

    def _is_live(self, block: MemoryBlock | None, rules: ClassRules | None = None) -> bool:
        if block is None:
            return False
        now_s = self._clock.now_s()
        if now_s >= self._ends_s(block, rules or self._policy.rules):
            return False
        return self._is_pinned(block.name.key) or now_s < self._keep_until_s(block, rules)

    def _live(self, space_id: SpaceId, name: BlockName) -> MemoryBlock | None:
        block = self._blocks.get(name.key)
        if block is None or block.space_id != space_id or block.name.token_digest != name.token_digest:
            return None
        return block if self._is_live(block) else None

    def _presence(self, space_id: SpaceId, name: BlockName) -> Presence:
        if self._live(space_id, name):
            return Presence.PRESENT
        block = self._blocks.get(name.key)
        if block and block.space_id == space_id and block.name.token_digest == name.token_digest:
            return Presence.EXPIRED
        return self._tombstones.get(name.key, (Presence.NEVER, 0))[0] if block is None else Presence.NEVER

    def _remove(self, key: BlockKey, reason: Presence) -> None:
        self._payload_bytes -= len(self._blocks.pop(key).payload)
        self._pins = {place: pin for place, pin in self._pins.items() if place[0] != key}
        self._tombstones[key] = (reason, int(self._clock.now_s()))
        while len(self._tombstones) > limits.TOMBSTONES_MAX:
            self._tombstones.popitem(last=False)

    def _make_room(self, wanted_bytes: int, keep: BlockKey) -> bool:
        excess = self._payload_bytes + wanted_bytes - self._capacity_bytes
        if excess <= 0:
            return True
        rules = self._policy.rules.for_volume(self._capacity_bytes)
        class_of = {key: self._deciding_class(block) for key, block in self._blocks.items()}
        held: dict[int, int] = {}
        for key, block in self._blocks.items():
            held[class_of[key]] = held.get(class_of[key], 0) + len(block.payload)

        def order(block: MemoryBlock) -> tuple[bool, int, int]:
            rule = rules.by_byte(class_of[block.name.key])
            return self._is_live(block), rule.priority if rule else 2**31, self._keep_until_s(block)

        victims: dict[BlockKey, MemoryBlock] = {}
        ordered = sorted(self._blocks.values(), key=order)
        for block, beyond in [*((block, True) for block in ordered), *((block, False) for block in ordered)]:
            if excess <= 0:
                break
            key, class_byte, live = block.name.key, class_of[block.name.key], self._is_live(block)
            rule = rules.by_byte(class_byte)
            left = held[class_byte] - len(block.payload)
            if beyond and live and not (rule and 0 < rule.ceiling_bytes < held[class_byte]):
                continue
            if (
                key in victims
                or key == keep
                or self._is_pinned(key)
                or left < (rule.floor_bytes if rule and live else 0)
            ):
                continue
            held[class_byte] = left
            excess -= len(block.payload)
            victims[key] = block
        if excess > 0:
            return False
        for block in victims.values():
            live = self._is_live(block)
            self._counts["evicted" if live else "expired"] += 1
            self._remove(block.name.key, Presence.EVICTED if live else Presence.EXPIRED)
        return True

    def _deciding_class(self, block: MemoryBlock) -> int:
        rules = self._policy.rules
        return max(block.touches, key=lambda class_byte: block.touches[class_byte] + rules.keep_for_s(class_byte))

    def _states_under(self, space_id: SpaceId, names: Sequence[BlockName]) -> tuple[StateEntry, ...]:
        at = {name.key: index for index, name in enumerate(names)}
        at[BlockKey(bytes(space_id))] = -1
        found = [
            StateEntry(key, at[state.name.parent], state.name.tail_tokens, len(state.payload), state.flags)
            for key, state in reversed(self._states.items())
            if state.space_id == space_id and state.name.parent in at and self._clock.now_s() < state.expires_s
        ]
        found.sort(key=lambda entry: (entry.block_index, entry.tail_tokens), reverse=True)
        return tuple(found[: limits.STATES_PER_LOOKUP_MAX])

    def _sighting(self, space_id: SpaceId | None, name: BlockName) -> Sighting:
        held = self._blocks.get(name.key)
        if space_id is None and held is not None:
            space_id, name = held.space_id, held.name
        presence = self._tombstones.get(name.key, (Presence.NEVER, 0))[0]
        if space_id is not None:
            presence = self._presence(space_id, name)
        if held is None or presence not in (Presence.PRESENT, Presence.EXPIRED):
            others = self._others(name, space_id) if space_id is not None else ()
            return Sighting(presence, self._tombstones.get(name.key, (presence, 0))[1], 0, others)
        until_s = self._keep_until_s(held)
        since_s = held.written_s if presence == Presence.PRESENT else until_s
        return Sighting(
            presence, since_s, until_s, self._others(name, held.space_id), self._info(held), name.token_digest
        )

    def _others(self, name: BlockName, space_id: SpaceId) -> tuple[SpaceId, ...]:
        others = {
            other.space_id
            for other in self._blocks.values()
            if other.name.token_digest == name.token_digest and other.space_id != space_id and self._is_live(other)
        }
        return tuple(sorted(others))

    def _info(self, block: MemoryBlock) -> BlockInfo:
        return BlockInfo(
            key=block.name.key,
            space_id=block.space_id,
            parent=block.name.parent,
            index=block.name.index,
            tokens=block.tokens,
            flags=block.flags,
            stored_bytes=len(block.payload),
            payload_bytes=len(block.payload),
            written_s=block.written_s,
            keep_until_s=self._keep_until_s(block),
            touches=dict(block.touches),
            pinned=self._is_pinned(block.name.key),
            segment=0,
        )
