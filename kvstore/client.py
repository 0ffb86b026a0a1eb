"""The store over sockets: ``StoreClient`` keeps the store's contract over a static list of nodes.

Owns the data plane: what is asked of which node and how the answers become one. What operators ask is
``control_plane``'s. Does not know classes' meaning or tensors.
Invariants: a payload is handed out only if its key, token digest, length and checksum are right; a node that is down or
late costs misses, never an error and never more than the deadline; no buffer of the caller is touched after the call
returned; only a put waits for a node that is overloaded.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any, TypeVar

import numpy as np
import xxhash

from kvstore import control, limits, receive, submission, transfer, wire
from kvstore.arena import ArenaOfClient, Reservation, ordinary
from kvstore.control_plane import ControlPlane
from kvstore.errors import (
    DeadlineExceeded,
    Overloaded,
    ProtocolError,
    SpaceUnknown,
    StoreError,
    VersionMismatch,
)
from kvstore.fleet import GET_CALL_BYTES, LOUD, Fleet, first, job, raise_loud
from kvstore.framing import parse_address
from kvstore.keys import BlockName, Space, SpaceId, StateName, encode_space, space_id
from kvstore.link import Call, NodeLink, Talk, new_hello
from kvstore.patience import Patience
from kvstore.placement import Placement
from kvstore.store import (
    AckLevel,
    BlockPut,
    Buffer,
    GetStatus,
    Lookup,
    Presence,
    PutOutcome,
    StateEntry,
)
from kvstore.traffic import TrafficClass
from kvstore.urgency import Soon

T = TypeVar("T")

THREADS_MAX = 64
GET_ATTEMPTS = 3
"""A block that moves under its reader is asked for again: by chance twice, hardly thrice."""
LOOKUP_S_SLOW = 0.0005
"""After a look-up that took longer the thread that asks for the next is hurried: others keep the processors busy."""
REPORT_S = 1.0
"""How long reporting a corrupt block may take, beyond its get."""


class StoreClient(ControlPlane):
    """A ``Store`` over one or several nodes. Thread-safe. Connects when first used, so a node may come up later."""

    def __init__(self, fleet: Fleet, arena: ArenaOfClient) -> None:
        super().__init__(fleet)
        self._arena = arena
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._hurries = False
        self._spaces: dict[SpaceId, Space] = {}
        self._counts = dict.fromkeys(
            (
                "blocks_got",
                "blocks_got_local",
                "corrupt",
                "overtaken",
                "late",
                "unreachable",
                "refused",
                "too_large",
                "altered",
                "waited",
            ),
            0,
        )

    @classmethod
    def connect(
        cls,
        addresses: Sequence[str],
        *,
        token: str | None = None,
        tenant: str | None = None,
        connections_per_node: int = 2,
        same_host: bool = True,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> StoreClient:
        """A client of the nodes at ``addresses``: ``unix:/path``, ``host:port``, ``[::1]:7071``, maybe after ``name=``.

        ``same_host``: share memory with a node behind a Unix socket, where it does too. Contacts nobody yet. Raises
        ValueError for an address that cannot be read.
        """
        if not 1 <= connections_per_node <= 64:
            raise ValueError(f"connections_per_node {connections_per_node} is outside 1..64")
        parsed = [parse_address(text) for text in addresses]
        placement = Placement([address.name for address in parsed])
        hello = new_hello(token, tenant)
        arena = ArenaOfClient()
        links = [
            NodeLink(address, hello, connections_per_node, monotonic, same_host=same_host, arena=arena)
            for address in parsed
        ]
        threads = min(len(links) * (connections_per_node + 1), THREADS_MAX)
        return cls(Fleet(links, placement, ThreadPoolExecutor(threads, "store-client"), monotonic), arena)

    # --- data plane -------------------------------------------------------------------------------------------------

    def register_space(self, space: Space, *, deadline_s: float = limits.DEADLINE_S_DEFAULT) -> SpaceId:
        """Make a space known on every node that answers; one that comes back later learns of it with the next put."""
        name = space_id(space)
        with self._lock:
            if len(self._spaces) >= limits.SPACES_MAX:
                self._spaces.clear()
            self._spaces[name] = space
        args = {"space": encode_space(space).hex()}
        answers, failures = self._fleet.control_all("register_space", args, deadline_s)
        for answer in answers.values():
            if answer != name.hex():
                raise VersionMismatch("a node gives this space another id: it runs another version")
        if not answers:
            raise first(failures)
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
        ends_s = self._fleet.ends_s(deadline_s)
        groups = self._fleet.group(names)
        if states:
            groups.setdefault(self._fleet.placement.owner(space_id), [])
        packed = wire.PackedNames.pack(names)
        answers: dict[int, Lookup] = {}

        def ask(node: int, positions: Sequence[int]) -> None:
            call = Call(wire.Opcode.LOOKUP, wire.encode_lookup(space_id, packed.take(positions), states=states))
            size = wire.lookup_reply_bytes(len(positions))
            began_s = self._fleet.monotonic()
            with Soon() if self._hurries else nullcontext():
                answer = self._fleet.converse(
                    node, call, ends_s, lambda hold: hold.ask_sized(call, size, receive.take_lookup)
                )
            self._hurries = self._fleet.monotonic() - began_s > LOOKUP_S_SLOW
            if len(answer.presence) != len(positions):
                raise ProtocolError(f"node {self._fleet.name(node)} answered another number of keys than asked")
            answers[node] = answer

        failures = self._fleet.run([job(ask, node, positions) for node, positions in groups.items()], ends_s)
        raise_loud(failures)
        if len(answers) == len(groups) == 1 and next(iter(groups.values())) == range(len(names)):
            return next(iter(answers.values()))
        return _joined(answers, groups, len(names))

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
        views = [_writable(buffer) for buffer in buffers]
        ends_s = self._fleet.ends_s(deadline_s)
        statuses = [GetStatus.DEADLINE] * len(names)

        def get(node: int, positions: Sequence[int]) -> None:
            all_of_them = len(positions) == len(names)
            scatter = (
                receive.Scatter(names, views)
                if all_of_them
                else receive.Scatter([names[at] for at in positions], [views[at] for at in positions])
            )
            try:
                self._get_from(node, space_id, scatter, ends_s)
            finally:
                if all_of_them:
                    statuses[:] = scatter.statuses
                else:
                    for at, status in zip(positions, scatter.statuses, strict=True):
                        statuses[at] = status

        failures = self._fleet.run(
            self._fleet.spread(get, names, list(map(len, views)), call_bytes=GET_CALL_BYTES), ends_s
        )
        self._count("blocks_got", statuses.count(GetStatus.OK))
        self._count("late", statuses.count(GetStatus.DEADLINE))
        self._count("unreachable", statuses.count(GetStatus.UNREACHABLE))
        raise_loud(failures)
        return statuses

    def _get_from(self, node: int, space_id: SpaceId, scatter: receive.Scatter, ends_s: float) -> None:
        """One get from one node; corrupt blocks are reported to it afterwards.

        Bytes in a socket are still pages of the file: a segment that is recycled before they are read changes them on
        their way. So a block that its node finds gone, or good where it is now, is asked for again; then it is a miss.
        """
        call = Call(wire.Opcode.GET, b"", bulk=True)
        for _ in range(GET_ATTEMPTS):
            try:
                count = self._fleet.converse(node, call, ends_s, lambda hold: transfer.get(hold, space_id, scatter))
                self._count("blocks_got_local", count)
            except DeadlineExceeded:
                scatter.settle(GetStatus.DEADLINE)
                raise
            except (StoreError, ValueError):
                scatter.settle(GetStatus.UNREACHABLE)
                raise
            if GetStatus.CORRUPT not in scatter.statuses:
                break
            corrupt = [at for at in scatter.asked if scatter.statuses[at] == GetStatus.CORRUPT]
            overtaken = [at for at in corrupt if not self._report_corrupt(node, space_id, scatter.names[at])]
            if not overtaken:
                break
            for at in overtaken:
                scatter.statuses[at] = GetStatus.MISS
            scatter.ask(overtaken)
        scatter.settle()

    def _report_corrupt(self, node: int, space_id: SpaceId, name: BlockName) -> bool:
        """Tell the node, which looks for itself; False if it found no bad block. It is no fault of the reader if that
        fails.
        """
        args = {"space_id": space_id.hex(), "name": control.name_to_json(name)}
        bad = True
        try:
            ends_s = self._fleet.monotonic() + REPORT_S
            bad = self._fleet.control(node, "report_corrupt", args, ends_s, insist=False) is not False
        except (StoreError, ValueError):
            self._count("unreachable", 1)
        self._count("corrupt" if bad else "overtaken", 1)
        return bad

    def reserve(self, sizes: Sequence[int]) -> Reservation:
        """Memory to make payloads of these lengths in: put from there, a store on this host takes them without a copy.

        Ordinary memory where no node is on this host, or when all that is shared is in use. Raises ValueError for
        lengths that a block cannot have, or more than a call may move.
        """
        if not all(1 <= size <= limits.PAYLOAD_BYTES_MAX for size in sizes) or sum(sizes) > limits.BATCH_BYTES_MAX:
            raise ValueError(f"payloads have 1..{limits.PAYLOAD_BYTES_MAX} bytes, and {limits.BATCH_BYTES_MAX} in all")
        arena = self._arena.get() if any(link.shares for link in self._fleet.links) else None
        return (arena.reserve(sizes) if arena is not None else None) or ordinary(sizes)

    def put(
        self,
        space_id: SpaceId,
        blocks: Sequence[BlockPut],
        *,
        traffic_class: TrafficClass,
        ack: AckLevel = "os",
        deadline_s: float = limits.DEADLINE_S_DEFAULT,
    ) -> list[PutOutcome]:
        if not 1 <= traffic_class <= 255:
            raise ValueError(f"traffic class {traffic_class} is outside 1..255")
        views = [_readable(block.payload, limits.PAYLOAD_BYTES_MAX) for block in blocks]
        ends_s = self._fleet.ends_s(deadline_s)
        names = [block.name for block in blocks]
        sizes = [len(view) for view in views]
        outcomes = [PutOutcome.UNREACHABLE] * len(blocks)
        call = Call(wire.Opcode.PUT, b"", bulk=True)

        def send(node: int, positions: Sequence[int]) -> None:
            chosen = [blocks[at] for at in positions], [views[at] for at in positions]
            part = submission.Submission(space_id, traffic_class, ack, *chosen)
            try:
                self._patiently(
                    ends_s,
                    lambda: self._with_space(node, space_id, call, ends_s, lambda hold: submission.put(hold, part)),
                )
            except Overloaded:
                part.refuse_the_rest()
            finally:
                for at, outcome in zip(positions, part.outcomes, strict=True):
                    outcomes[at] = outcome

        failures = self._fleet.run(self._fleet.spread(send, names, sizes, cut_where_shared=False), ends_s)
        self._count("refused", outcomes.count(PutOutcome.REFUSED))
        self._count("too_large", outcomes.count(PutOutcome.TOO_LARGE))
        self._count("altered", outcomes.count(PutOutcome.ALTERED))
        self._count("unreachable", outcomes.count(PutOutcome.UNREACHABLE))
        raise_loud(failures)
        return outcomes

    def touch(
        self,
        space_id: SpaceId,
        names: Sequence[BlockName],
        *,
        traffic_class: TrafficClass,
        deadline_s: float = limits.DEADLINE_S_DEFAULT,
    ) -> int:
        if len(names) > limits.LOOKUP_KEYS_MAX:
            raise ValueError(f"a touch has at most {limits.LOOKUP_KEYS_MAX} keys, not {len(names)}")
        if not 1 <= traffic_class <= 255:
            raise ValueError(f"traffic class {traffic_class} is outside 1..255")
        ends_s = self._fleet.ends_s(deadline_s)
        packed = wire.PackedNames.pack(names)
        counts: list[int] = []

        def send(node: int, positions: Sequence[int]) -> None:
            body = wire.encode_touch(space_id, traffic_class, packed.take(positions))
            counts.append(self._fleet.exchange(node, Call(wire.Opcode.TOUCH, body), ends_s, receive.take_count))

        jobs = [job(send, node, positions) for node, positions in self._fleet.group(names).items()]
        raise_loud(self._fleet.run(jobs, ends_s))
        return sum(counts)

    def put_state(
        self,
        space_id: SpaceId,
        name: StateName,
        payload: Buffer,
        *,
        flags: int = 0,
        deadline_s: float = limits.DEADLINE_S_DEFAULT,
    ) -> bool:
        """Keep a state; False if the node refused it, is down, or the bytes changed on the way."""
        view = _readable(payload, limits.STATE_BYTES_MAX)
        ends_s = self._fleet.ends_s(deadline_s)
        body = wire.encode_state(space_id, name, flags=flags, checksum=xxhash.xxh3_64_intdigest(view))
        call = Call(wire.Opcode.PUT_STATE, body, (view,), len(view), bulk=True)
        try:
            owner = self._fleet.placement.owner(name.route)
            return self._patiently(
                ends_s,
                lambda: self._with_space(owner, space_id, call, ends_s, lambda hold: hold.ask(call, receive.take_kept)),
            )
        except LOUD:
            raise
        except StoreError:
            self._count("unreachable", 1)
            return False

    def get_state(
        self, space_id: SpaceId, name: StateName, *, deadline_s: float = limits.DEADLINE_S_DEFAULT
    ) -> tuple[bytes, int] | None:
        ends_s = self._fleet.ends_s(deadline_s)
        call = Call(wire.Opcode.GET_STATE, wire.encode_state(space_id, name), bulk=True)
        try:
            answer = self._fleet.exchange(self._fleet.placement.owner(name.route), call, ends_s, receive.take_state)
        except LOUD:
            raise
        except StoreError:
            self._count("unreachable", 1)
            return None
        if answer is None:
            return None
        data, flags, checksum = answer
        if xxhash.xxh3_64_intdigest(data) != checksum:
            self._count("corrupt", 1)
            return None
        return data, flags

    # --- both -------------------------------------------------------------------------------------------------------

    def stats(self, *, deadline_s: float = limits.DEADLINE_S_DEFAULT) -> dict[str, Any]:
        """As of every node (see ``ControlPlane``), and this client's own counts under ``client``."""
        with self._lock:
            client = dict(self._counts)
        client["nodes_skipped"] = sum(link.circuit.is_open for link in self._fleet.links)
        return {**super().stats(deadline_s=deadline_s), "client": client}

    def close(self) -> None:
        self._closing.set()
        self._fleet.close()
        self._arena.close()

    # --- inside -----------------------------------------------------------------------------------------------------

    def _patiently(self, ends_s: float, attempt: Callable[[], T]) -> T:
        """A put, made again while its node is overloaded: when that node says, a few times, within the deadline.

        Raises Overloaded when that did not help. Nothing that is read is worth waiting for so: it is a miss.
        """
        patience = Patience(ends_s, self._fleet.monotonic, self._closing.wait)
        while True:
            try:
                return attempt()
            except Overloaded as error:
                if not patience.wait(error.retry_after_s):
                    raise
            self._count("waited", 1)

    def _with_space(
        self,
        node: int,
        space_id: SpaceId,
        call: Call,
        ends_s: float,
        talk: Talk[T],
    ) -> T:
        """A talk that needs the space on the node: a node that lacks it is told, once."""
        try:
            return self._fleet.converse(node, call, ends_s, talk)
        except SpaceUnknown:
            with self._lock:
                space = self._spaces.get(space_id)
            if space is None:
                raise
        self._fleet.control(node, "register_space", {"space": encode_space(space).hex()}, ends_s, insist=False)
        return self._fleet.converse(node, call, ends_s, talk)

    def _count(self, name: str, amount: int) -> None:
        if amount:
            with self._lock:
                self._counts[name] += amount


# --- small pure helpers ---------------------------------------------------------------------------------------------


def _joined(answers: Mapping[int, Lookup], groups: Mapping[int, Sequence[int]], count: int) -> Lookup:
    """The answer about all keys, of those that nodes gave about theirs. ``groups``: which these are."""
    presence = np.full(count, Presence.UNREACHABLE, np.uint8)
    flags = np.zeros(count, np.uint8)
    payload_bytes = np.zeros(count, np.uint32)
    entries: list[StateEntry] = []
    for node, answer in answers.items():
        at = np.asarray(groups[node], np.intp)
        presence[at], flags[at], payload_bytes[at] = answer.presence, answer.flags, answer.payload_bytes
        entries += [_renumbered(entry, groups[node]) for entry in answer.states]
    entries.sort(key=lambda entry: (entry.block_index, entry.tail_tokens), reverse=True)
    return Lookup(
        presence,
        flags,
        payload_bytes,
        tuple(entries[: limits.STATES_PER_LOOKUP_MAX]),
        complete=len(answers) == len(groups) and all(answer.complete for answer in answers.values()),
        load_s_estimate=max((answer.load_s_estimate for answer in answers.values()), default=0.0),
    )


def _renumbered(entry: StateEntry, positions: Sequence[int]) -> StateEntry:
    """A node numbers the keys that it was asked; the caller numbers all."""
    if entry.block_index < 0 or positions[entry.block_index] == entry.block_index:
        return entry
    at = positions[entry.block_index]
    return StateEntry(entry.key, at, entry.tail_tokens, entry.payload_bytes, entry.flags)


def _readable(payload: Buffer, bytes_max: int) -> memoryview:
    view = memoryview(payload)
    if not view.c_contiguous:
        raise ValueError("a payload must be one contiguous buffer")
    view = view.cast("B")
    if not 1 <= len(view) <= bytes_max:
        raise ValueError(f"a payload has 1..{bytes_max} bytes, not {len(view)}")
    return view


def _writable(buffer: bytearray | memoryview) -> memoryview:
    view = memoryview(buffer)
    if view.readonly or not view.c_contiguous:
        raise ValueError("a buffer to fill must be writable and contiguous")
    if view.ndim != 1 or view.format != "B":
        view = view.cast("B")
    if len(view) > limits.PAYLOAD_BYTES_MAX:
        raise ValueError(f"a buffer to fill has at most {limits.PAYLOAD_BYTES_MAX} bytes, not {len(view)}")
    return view
