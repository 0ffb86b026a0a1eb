"""LMCache's second level in the store: its objects are blocks, under the hashes that LMCache gives them.

    --l2-adapter '{"type": "plugin", "module_path": "workers.adapters.lmcache_l2", "class_name": "RepriseL2",
                   "adapter_params": {"store": "unix:/run/reprise/store.sock", "weights_digest": "..."}}'

Owns the tasks that LMCache's two controller threads submit, their answers, and which space each of its keys belongs to.
A prefetch asks for the chunks of all ranks at once: ranks are told apart by names, not by spaces, so it is one call.
Does not know tensors: an object is bytes of a shape. Invariants: submitting never waits; every task ends with exactly
one answer, by its deadline, whatever the store does; memory of LMCache is not touched after the answer; failure is a
miss. Lengths and checksums are checked below: an object of another length is a miss too.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.api import KeyEntry, KeyListPage, ObjectKey
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
from lmcache.v1.platform import create_event_notifier

from kvstore.errors import StoreError
from kvstore.keys import OPAQUE_ALGORITHM, AttentionGroup, BlockName, Space, SpaceId, opaque_name, tenant_salt
from kvstore.limits import BLOCK_TOKENS_MAX, LOOKUP_KEYS_MAX, PAYLOAD_BYTES_MAX
from kvstore.store import BlockPut, GetStatus, Presence, PutOutcome
from kvstore.units import parse_bytes
from workers.adapters.attachment import Attachment, OptionError, Settings
from workers.adapters.desk import Desk
from workers.publish import ACKNOWLEDGED, PUT_DEADLINE_S_DEFAULT
from workers.spaces import TenantSpace

log = logging.getLogger(__name__)

CHUNK_TOKENS_DEFAULT = 256
"""Of LMCache's ``--chunk-size``."""
LOOKUP_THREADS = 2
LOAD_THREADS = 4
STORE_THREADS = 2
TASKS_MAX = 128
"""Tasks of a kind that wait or run; the next one is a miss, or a failed store, at once."""
HASH_BYTES_MIN = 16
"""Shorter hashes of chunks collide, and differ from process to process: their keys are never stored or found."""
KNOWN_MAX = 2**20
"""Objects whose sizes are remembered for usage, quotas and lists; the oldest is forgotten, and no longer counted."""
DELETE_KEYS_MAX = 4096
"""Keys of one call to the store."""

_INSIDE = (AttentionGroup(window=0, layers=(0,), kv_heads=1, head_dim=1),)
"""The layers of an object are LMCache's business: its shape, in the space's layout, says what there is to say."""


@dataclass(frozen=True, slots=True)
class Options:
    """``chunk_tokens``: LMCache's chunk size. ``layout``: names how objects are made where LMCache serializes them (its
    ``serde``): their shapes say nothing then, and are not asked for. ``capacity_bytes``: what its eviction may fill; 0:
    no bound.
    """

    settings: Settings
    chunk_tokens: int = CHUNK_TOKENS_DEFAULT
    layout: str | None = None
    capacity_bytes: int = 0

    @classmethod
    def from_params(cls, params: Mapping[str, Any]) -> Options:
        """From ``adapter_params``. Raises OptionError."""
        shared = dict(params)
        chunk_tokens, layout = shared.pop("chunk_tokens", CHUNK_TOKENS_DEFAULT), shared.pop("layout", None)
        capacity = shared.pop("capacity", 0)
        settings = Settings.from_options(shared)
        if settings.weights_digest is None:
            raise OptionError(
                "weights_digest: give 64 hex digits that name the weights, such as the SHA-256 of their revision: "
                "LMCache names models only, and other weights under the same digest would be served wrong KV"
            )
        if type(chunk_tokens) is not int or not 1 <= chunk_tokens <= BLOCK_TOKENS_MAX:
            raise OptionError(f"chunk_tokens: expected 1..{BLOCK_TOKENS_MAX} tokens, not {chunk_tokens!r}")
        if layout is not None and (not isinstance(layout, str) or not 1 <= len(layout) <= 100):
            raise OptionError(f"layout: expected a short text, not {layout!r}")
        try:
            capacity_bytes = parse_bytes(capacity) if isinstance(capacity, str) else capacity
        except ValueError as error:
            raise OptionError(f'capacity: expected a size such as "500GiB": {error}') from error
        if type(capacity_bytes) is not int or capacity_bytes < 0:
            raise OptionError(f'capacity: expected a size such as "500GiB", not {capacity!r}')
        return cls(settings, chunk_tokens, layout, capacity_bytes)


@dataclass(frozen=True, slots=True)
class Kind:
    """What the objects of one space have in common, as LMCache's keys and shapes say it: all but chunk and rank."""

    model: str
    group: int
    salt: str
    shapes: tuple[Any, ...]
    dtypes: tuple[Any, ...]

    @property
    def place(self) -> str:
        """The part of a space's layout that a key names by itself."""
        return f"lmcache group {self.group}"

    @property
    def is_serialized(self) -> bool:
        """One row of bytes: LMCache's ``serde`` has been at work."""
        return [len(shape) for shape in self.shapes] == [1] and str(self.dtypes[0]) == "torch.uint8"


def space_of(kind: Kind, options: Options) -> Space:
    """The space of such objects, without the tenant. Raises ValueError for what no space can say."""
    shapes = options.layout or "+".join("x".join(str(size) for size in shape) for shape in kind.shapes)
    dtypes = "+".join(str(dtype).removeprefix("torch.") for dtype in kind.dtypes)
    return Space(
        model=kind.model,
        weights_digest=options.settings.weights_digest or b"",
        kv_dtype="serialized" if options.layout else dtypes,
        layout=f"{kind.place} {shapes}",
        block_tokens=options.chunk_tokens,
        groups=_INSIDE,
        epoch=options.settings.epoch,
        key_algorithm=OPAQUE_ALGORITHM,
    )


def name_of(space_id: SpaceId, key: ObjectKey) -> BlockName:
    """What an object is called in its space: by the rank that made it and the hash of its chunk."""
    return opaque_name(space_id, b"rank %d " % key.kv_rank + key.chunk_hash)


class RepriseL2(L2AdapterInterface):
    """What LMCache makes of the plugin's configuration. Thread-safe."""

    def __init__(self, params: Mapping[str, Any], l1_memory_desc: object = None) -> None:
        self._options = Options.from_params(params)
        super().__init__(self._options.capacity_bytes)
        self._attachment = Attachment.open(self._options.settings, space_of(Kind("", 0, "", (), ()), self._options))
        self._stores: Desk[L2StoreResult] = Desk(create_event_notifier(), STORE_THREADS, TASKS_MAX)
        self._lookups: Desk[Bitmap] = Desk(create_event_notifier(), LOOKUP_THREADS, TASKS_MAX)
        self._loads: Desk[Bitmap] = Desk(create_event_notifier(), LOAD_THREADS, TASKS_MAX)
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._known: dict[ObjectKey, tuple[int, int]] = {}  # key -> when it came (ascending), bytes
        self._told: set[str] = set()
        self._closed = False

    # --- on LMCache's threads: nothing waits --------------------------------------------------------------------------

    def get_store_event_fd(self) -> int:
        return self._stores.descriptor

    def get_lookup_and_lock_event_fd(self) -> int:
        return self._lookups.descriptor

    def get_load_event_fd(self) -> int:
        return self._loads.descriptor

    def submit_store_task(self, keys: list[ObjectKey], objects: list[Any]) -> int:
        until_s = time.monotonic() + PUT_DEADLINE_S_DEFAULT
        return self._stores.submit(lambda: self._store(keys, objects, until_s), L2StoreResult(False, 0))

    def pop_completed_store_tasks(self) -> dict[int, L2StoreResult]:
        return self._stores.take_all()

    def submit_lookup_and_lock_task(self, keys: list[ObjectKey], group_layout_descs: Mapping[int, Any]) -> int:
        until_s = time.monotonic() + self._options.settings.lookup_deadline_s
        return self._lookups.submit(lambda: self._look_up(keys, group_layout_descs, until_s), Bitmap(len(keys)))

    def query_lookup_and_lock_result(self, task_id: int) -> Bitmap | None:
        return self._lookups.take(task_id)

    def submit_unlock(self, keys: list[ObjectKey]) -> None:
        """Nothing: a look-up locks nothing, so nothing stays locked that is never loaded. What is removed in between
        is a miss of the load.
        """

    def submit_load_task(self, keys: list[ObjectKey], objects: list[Any]) -> int:
        until_s = time.monotonic() + self._options.settings.load_deadline_s
        return self._loads.submit(lambda: self._load(keys, objects, until_s), Bitmap(len(keys)))

    def query_load_result(self, task_id: int) -> Bitmap | None:
        return self._loads.take(task_id)

    def list_l2_keys(
        self, model_name: str | None = None, page_size: int = 500, cursor: str | None = None
    ) -> KeyListPage:
        """What this process stored or found. The store holds the rest by hashes that do not tell LMCache's keys."""
        if page_size < 1:
            raise ValueError(f"page_size is at least 1, not {page_size}")
        after = int(cursor or "0")
        with self._lock:
            known = [
                (number, key, size)
                for key, (number, size) in self._known.items()
                if number > after and model_name in (None, key.model_name)
            ]
        page = known[:page_size]
        entries = tuple(KeyEntry(key.to_encoded_object_key(), size) for _, key, size in page)
        return KeyListPage(entries, str(page[-1][0]) if len(known) > page_size else None)

    def report_status(self) -> dict[str, Any]:
        """Healthy also without a store: that is misses, and restarting LMCache would not mend it."""
        stores = list(self._options.settings.stores)
        return {"is_healthy": not self._closed, "type": "RepriseL2", "stores": stores, **self._attachment.stats()}

    # --- that wait, at most a deadline --------------------------------------------------------------------------------

    def delete(self, keys: list[ObjectKey]) -> None:
        """Remove objects, from every space that they may be in. Needs a token that may purge, where tokens are used."""
        for place, positions in _grouped(range(len(keys)), lambda at: _place(keys[at])):
            mine = [keys[at] for at in positions]
            try:
                for space in self._registered(place):
                    names = [name_of(space.id, key).key for key in mine]
                    for at in range(0, len(names), DELETE_KEYS_MAX):
                        self._attachment.store.delete(space.id, names[at : at + DELETE_KEYS_MAX])
            except StoreError as error:
                log.error("l2_delete_fails", extra={"kind": type(error).__name__, "reason": str(error)})
                continue
            self._forget(mine)

    def close(self) -> None:
        """Let what runs end; LMCache no longer waits for the rest."""
        if self._closed:
            return
        self._closed = True
        for desk in (self._lookups, self._loads, self._stores):
            desk.close()
        self._attachment.close(deadline_s=2.0)

    # --- on threads here ----------------------------------------------------------------------------------------------

    def _look_up(self, keys: Sequence[ObjectKey], layouts: Mapping[int, Any], until_s: float) -> Bitmap:
        bitmap = Bitmap(len(keys))

        def kind_of(at: int) -> Kind:
            if self._options.layout:
                return _place(keys[at])
            layout = layouts[keys[at].object_group_id]
            return _kind(keys[at], layout.shapes, layout.dtypes)

        for space, positions, names in self._spread(keys, kind_of, _by_chunk(keys)):
            found = self._attachment.look_up(space, names, deadline_s=_left_s(until_s))
            if found is None:
                continue
            seen = list(zip(positions, found.presence.tolist(), strict=True))
            there = [at for at, presence in seen if presence == Presence.PRESENT]
            chunks = {keys[at].chunk_hash for at in there}  # not only the first ones: a sliding window has but the last
            if self._attachment.declines(found, len(chunks) * self._options.chunk_tokens):
                continue
            for at in there:
                bitmap.set(at)
            self._forget(keys[at] for at, presence in seen if presence not in (Presence.PRESENT, Presence.UNREACHABLE))
        return bitmap

    def _load(self, keys: Sequence[ObjectKey], objects: Sequence[Any], until_s: float) -> Bitmap:
        bitmap = Bitmap(len(keys))
        for space, positions, names in self._spread(keys, lambda at: self._kind_of_object(keys[at], objects[at])):
            buffers = [objects[at].byte_array for at in positions]
            statuses = self._attachment.load(space, names, buffers, deadline_s=_left_s(until_s))
            good = [number for number, status in enumerate(statuses) if status == GetStatus.OK]
            if not good:
                continue
            for number in good:
                bitmap.set(positions[number])
            ticket = self._attachment.ticket(space, self._options.settings.traffic_class)
            self._attachment.publisher.offer_touch(ticket, [names[number] for number in good])
            self._remember([keys[positions[number]] for number in good], [buffers[number].nbytes for number in good])
        return bitmap

    def _store(self, keys: Sequence[ObjectKey], objects: Sequence[Any], until_s: float) -> L2StoreResult:
        written = kept = 0
        for space, positions, names in self._spread(keys, lambda at: self._kind_of_object(keys[at], objects[at])):
            payloads = [objects[at].byte_array for at in positions]
            if max(payload.nbytes for payload in payloads) > PAYLOAD_BYTES_MAX:
                self._tell("l2_object_too_large", f"more than {PAYLOAD_BYTES_MAX} bytes: give a smaller --chunk-size")
                continue
            tokens, terms = self._options.chunk_tokens, self._options.settings.traffic_class
            puts = [BlockPut(name, tokens, payload) for name, payload in zip(names, payloads, strict=True)]
            outcomes = self._attachment.store_now(space, puts, terms, deadline_s=_left_s(until_s))
            rows = list(zip(positions, payloads, outcomes, strict=True))
            done = [(keys[at], payload.nbytes) for at, payload, outcome in rows if outcome in ACKNOWLEDGED]
            kept += len(done)
            written += sum(payload.nbytes for _, payload, outcome in rows if outcome in _WRITTEN)
            self._remember([key for key, _ in done], [size for _, size in done])
        return L2StoreResult(kept == len(keys), written)

    # --- spaces and what is in them -----------------------------------------------------------------------------------

    def _spread(
        self, keys: Sequence[ObjectKey], kind_of: Callable[[int], Kind], order: Iterable[int] | None = None
    ) -> Iterator[tuple[TenantSpace, Sequence[int], list[BlockName]]]:
        """The keys by space, at most as many as a call may have: which of them, in this order, and their names."""
        usable = [at for at in order or range(len(keys)) if len(keys[at].chunk_hash) >= HASH_BYTES_MIN]
        for kind, positions in _grouped(usable, kind_of):
            if self._options.layout is None and kind.is_serialized:
                self._tell("l2_serialized", 'looked up by other shapes, so never found: name the serde in "layout"')
            tenant = kind.salt or self._options.settings.tenant
            space = self._attachment.spaces.of(tenant, space_of(kind, self._options))
            for begin in range(0, len(positions), LOOKUP_KEYS_MAX):
                page = positions[begin : begin + LOOKUP_KEYS_MAX]
                yield space, page, [name_of(space.id, keys[at]) for at in page]

    def _kind_of_object(self, key: ObjectKey, held: Any) -> Kind:
        return _place(key) if self._options.layout else _kind(key, held.get_shapes(), held.get_dtypes())

    def _registered(self, place: Kind) -> list[TenantSpace]:
        """Spaces of the store that keys of this place may be in: of every shape, also from before a restart."""
        tenant = place.salt or self._options.settings.tenant
        salt = None if tenant is None else tenant_salt(tenant)
        return [
            TenantSpace(space, name)
            for name, space in self._attachment.store.spaces().items()
            if (space.model, space.tenant_salt) == (place.model, salt) and space.layout.startswith(f"{place.place} ")
        ]

    def _remember(self, keys: Sequence[ObjectKey], sizes: Sequence[int]) -> None:
        """Count what is new to this process, also if it was stored before; the rest was used again."""
        new, again = [], []
        with self._lock:
            for key, size in zip(keys, sizes, strict=True):
                if key in self._known:
                    again.append(key)
                else:
                    self._known[key] = (next(self._numbers), size)
                    new.append((key, size))
            oldest = list(itertools.islice(self._known, max(len(self._known) - KNOWN_MAX, 0)))
        if new:
            self._notify_keys_stored([key for key, _ in new], [size for _, size in new])
        if again:
            self._notify_keys_accessed(again)
        self._forget(oldest)

    def _tell(self, event: str, reason: str) -> None:
        """Say once what an operator has to mend."""
        if event not in self._told:
            self._told.add(event)
            log.error(event, extra={"reason": reason})

    def _forget(self, keys: Iterable[ObjectKey]) -> None:
        with self._lock:
            gone = [(key, self._known.pop(key)[1]) for key in dict.fromkeys(keys) if key in self._known]
        if gone:
            self._notify_keys_deleted([key for key, _ in gone], [size for _, size in gone])


_WRITTEN = (PutOutcome.STORED, PutOutcome.REPLACED)


def _kind(key: ObjectKey, shapes: Iterable[Any], dtypes: Iterable[Any]) -> Kind:
    return Kind(key.model_name, key.object_group_id, key.cache_salt, tuple(shapes), tuple(dtypes))


def _place(key: ObjectKey) -> Kind:
    return _kind(key, (), ())


def _grouped(positions: Iterable[int], kind_of: Callable[[int], Kind]) -> list[tuple[Kind, list[int]]]:
    groups: dict[Kind, list[int]] = {}
    for at in positions:
        groups.setdefault(kind_of(at), []).append(at)
    return list(groups.items())


def _by_chunk(keys: Sequence[ObjectKey]) -> list[int]:
    """Positions chunk by chunk: LMCache asks rank by rank, and what only some of the ranks have is of no use."""
    order: dict[bytes, int] = {}
    places = [order.setdefault(key.chunk_hash, len(order)) for key in keys]
    return sorted(range(len(keys)), key=places.__getitem__)


def _left_s(until_s: float) -> float:
    return max(until_s - time.monotonic(), 1e-3)
