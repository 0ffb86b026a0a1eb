"""What every adapter is told, and the store that it makes of it.

Owns the options and their checks, what a request says of itself, and one open store with everything that keeps an
engine from waiting for it: a bounded queue of puts, few threads for look-ups and loads. Does not know any engine, nor
tensors (torch-free). Invariants: no call here waits but those that say so, and these at most their deadline; an error
of the store is a miss and a count, never an exception; a request whose wishes cannot be read is neither looked up nor
stored (taken for another tenant's it would leak).
"""

from __future__ import annotations

import logging
import mmap
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from kvstore.access import read_token
from kvstore.client import StoreClient
from kvstore.errors import DeadlineExceeded, SpaceUnknown, StoreError
from kvstore.framing import parse_address
from kvstore.keys import BlockName, Space, StateName, tenant_salt
from kvstore.limits import ARENA_BYTES_MAX, GIB, MIB, PAYLOAD_BYTES_MAX
from kvstore.store import BlockPut, GetStatus, Lookup, Presence, PutOutcome, Store
from kvstore.traffic import BUILT_IN_NAMES, CHAT, CLASS_MAX, OPERATOR_CLASS_MIN, TrafficClass
from kvstore.units import parse_bytes
from workers.publish import ACKNOWLEDGED, PUT_DEADLINE_S_DEFAULT, Publisher, Ticket
from workers.spaces import Spaces, TenantSpace
from workers.weights import ModelUnavailable, weights_digest

log = logging.getLogger(__name__)

T = TypeVar("T")

LOOKUP_THREADS = 2
LOAD_THREADS = 4
LOOKUPS_MAX = 256
"""Look-ups that wait or run; the next one is a miss at once."""
WARM_BYTES = 32 * MIB
TELL_EVERY_S = 60.0
"""How often at most a failing store is logged; every failure is counted."""

OPTIONS_OF_CONNECTORS = ("access_log", "keep_windows")
"""Options of adapters that see tokens and windows; to others, blocks are an engine's hashes."""

HINT_TYPE = "reprise"
"""Actions of this type among a request's KV hints are read like its parameters."""
_UNREACHABLE = int(Presence.UNREACHABLE)

TENANT_WISH, CLASS_WISH, CACHE_WISH = "reprise_tenant", "reprise_class", "reprise_cache"
"""What a request may say of itself, among the parameters that its engine hands on."""


class OptionError(ValueError):
    """An option cannot be used; the message names it and says what to write."""


@dataclass(frozen=True, slots=True)
class Terms:
    """Whose request it is, and of which class: never guessed from tokens or keys."""

    tenant: str | None
    traffic_class: TrafficClass


@dataclass(frozen=True, slots=True)
class Settings:
    """Options of one adapter. Times in seconds, sizes in bytes.

    ``tenant`` and ``traffic_class`` are those of requests that name none. ``compute_tokens_per_s``: what the engine
    computes; a hit that would take longer to load than to compute is declined (None: never). ``weights_digest``: None
    takes that of the checkpoint's files. ``keep_windows``: sliding windows are stored as long as blocks are; else they
    stay in the nodes' memory, for minutes. ``access_log``: a file for what each request reused, and why not more, which
    ``explain`` reads. ``epoch``: raise it to leave all that is stored for this model behind.
    """

    stores: tuple[str, ...]
    token_file: Path | None = None
    tenant: str | None = None
    traffic_class: TrafficClass = CHAT
    classes: Mapping[str, TrafficClass] = field(default_factory=lambda: dict(BUILT_IN_NAMES))
    lookup_deadline_s: float = 0.25
    load_deadline_s: float = 5.0
    queue_bytes: int = 256 * MIB
    epoch: int = 0
    same_host: bool = True
    compute_tokens_per_s: float | None = None
    weights_digest: bytes | None = None
    keep_windows: bool = True
    access_log: Path | None = None

    @classmethod
    def from_options(cls, options: Mapping[str, Any], *, also: Sequence[str] = ()) -> Settings:
        """From the JSON object in the engine's configuration. Raises OptionError.

        ``also``: those of OPTIONS_OF_CONNECTORS that this adapter reads; one that nobody reads would promise something.
        """
        known = sorted(set(_OPTIONS) - set(OPTIONS_OF_CONNECTORS) | set(also))
        unknown = sorted(set(options) - set(known))
        if unknown:
            raise OptionError(f"unknown option {', '.join(unknown)}; known are {', '.join(known)}")
        if "store" not in options:
            raise OptionError('store: name at least one node, such as "unix:/run/reprise/store.sock"')
        classes = _checked("classes", _classes, options.get("classes", {}))
        values: dict[str, Any] = {"classes": classes}
        for name, value in options.items():
            target, parse = _OPTIONS[name]
            if name == "traffic_class":
                values[target] = _checked(name, lambda given: class_of(given, classes), value)
            elif name != "classes":
                values[target] = _checked(name, parse, value)
        return cls(**values)

    def terms(self, wishes: Mapping[str, Any] | None) -> Terms | None:
        """What a request's parameters say; None: it is not to be cached, or what it says cannot be read."""
        wishes = wishes or {}
        tenant, cache = wishes.get(TENANT_WISH, self.tenant), wishes.get(CACHE_WISH, "on")
        try:
            if cache != "on" or not isinstance(tenant, str | None):
                return None
            if tenant is not None:
                tenant_salt(tenant)
            wanted = wishes.get(CLASS_WISH)
            return Terms(tenant, self.traffic_class if wanted is None else class_of(wanted, self.classes))
        except ValueError:
            return None

    def digest_of(self, model: str) -> bytes:
        """The weights digest given, else that of the checkpoint in directory ``model``. Raises OptionError."""
        if self.weights_digest is not None:
            return self.weights_digest
        try:
            return weights_digest(Path(model))
        except (ModelUnavailable, OSError) as error:
            raise OptionError(
                f"weights_digest: {error}. Serve a local directory, or give 64 hex digits that name these weights, "
                "such as the SHA-256 of their revision; other weights under the same digest would be served wrong KV"
            ) from error


class Asked(Generic[T]):
    """An answer that is on its way. Nothing here waits: after the deadline there is none, which is a miss."""

    def __init__(self, future: Future[T] | None, until_s: float, monotonic_s: Callable[[], float]) -> None:
        self._future = future
        self._until_s = until_s
        self._monotonic_s = monotonic_s

    @property
    def settled(self) -> bool:
        """Whether ``answer`` says the last word."""
        return self._future is None or self._future.done() or self._monotonic_s() >= self._until_s

    def answer(self) -> T | None:
        """What was answered; None: nothing in time, or a fault of ours, which costs a hit and not the engine."""
        future = self._future
        if future is None or not future.done() or future.cancelled() or future.exception() is not None:
            return None
        return future.result()


@dataclass(slots=True)
class Counts:
    """What an attachment did. Blocks but where the name says otherwise."""

    lookups: int = 0
    lookups_shed: int = 0
    lookups_failed: int = 0
    looked_up: int = 0
    found: int = 0
    declined: int = 0
    loaded: int = 0
    loads_failed: int = 0
    loaded_bytes: int = 0
    states_loaded: int = 0
    states_missed: int = 0
    stored: int = 0
    stores_failed: int = 0
    stored_bytes: int = 0


class Attachment:
    """One open store for one engine process. Make with ``open``; end with ``close``. Thread-safe."""

    def __init__(
        self, settings: Settings, store: Store, base: Space, monotonic_s: Callable[[], float] = time.monotonic
    ) -> None:
        self.settings = settings
        self.store = store
        self.spaces = Spaces(base, store)
        self.publisher = Publisher(store, self.spaces, queue_bytes_max=settings.queue_bytes)
        self.counts = Counts()
        self._monotonic_s = monotonic_s
        self._lookup_pool = ThreadPoolExecutor(LOOKUP_THREADS, "reprise-lookup")
        self._load_pool = ThreadPoolExecutor(LOAD_THREADS, "reprise-load")
        self._lock = threading.Lock()
        self._asking = 0
        self._quiet_until_s = 0.0

    @classmethod
    def open(cls, settings: Settings, base: Space) -> Attachment:
        """Begin to serve. Contacts nobody yet: a store that is down is misses. Raises OptionError."""
        try:
            token = read_token(settings.token_file)
        except ValueError as error:
            raise OptionError(f"token_file: {error}") from error
        store = StoreClient.connect(
            settings.stores, token=token, connections_per_node=LOAD_THREADS, same_host=settings.same_host
        )
        attachment = cls(settings, store, base)
        attachment.publisher.start()
        return attachment

    def close(self, deadline_s: float = 10.0) -> None:
        """Take nothing more, put what is queued (waits for that at most ``deadline_s``), let go of the store."""
        self._lookup_pool.shutdown(wait=False, cancel_futures=True)
        self._load_pool.shutdown(wait=False, cancel_futures=True)
        self.publisher.close(deadline_s)
        self.store.close()

    # --- on the engine's threads: nothing waits -----------------------------------------------------------------------

    def ask(self, call: Callable[[float], T]) -> Asked[T]:
        """Have ``call`` look something up on a thread here; it is told how many seconds are left of the deadline."""
        until_s = self._monotonic_s() + self.settings.lookup_deadline_s
        with self._lock:
            if self._asking >= LOOKUPS_MAX:
                self.counts.lookups_shed += 1
                return Asked(None, until_s, self._monotonic_s)
            self._asking += 1
        try:
            future = self._lookup_pool.submit(lambda: call(max(until_s - self._monotonic_s(), 1e-3)))
        except RuntimeError:  # closed meanwhile
            self._asked()
            return Asked(None, until_s, self._monotonic_s)
        future.add_done_callback(lambda _: self._asked())
        future.add_done_callback(_tell_fault)
        return Asked(future, until_s, self._monotonic_s)

    def load_soon(self, call: Callable[[float], T]) -> Future[T]:
        """Have ``call`` load on a thread here; it is told the seconds left, waiting for a thread counted.

        It ends within them: wait for the future before what it writes into is used for anything else.
        """
        until_s = self._monotonic_s() + self.settings.load_deadline_s
        future = self._load_pool.submit(lambda: call(max(until_s - self._monotonic_s(), 1e-3)))
        future.add_done_callback(_tell_fault)
        return future

    def ticket(self, space: TenantSpace, traffic_class: TrafficClass) -> Ticket:
        """The account of what one request offers to ``publisher``, whose queue sheds what does not fit."""
        return self.publisher.ticket(space, traffic_class)

    def memory(self, size: int) -> memoryview:
        """Memory to make payloads in: what is put from there, a node on this host takes without a copy."""
        if isinstance(self.store, StoreClient) and size <= PAYLOAD_BYTES_MAX:
            return self.store.reserve([size]).views[0]
        return memoryview(bytearray(size))

    def warm(self) -> None:
        """Have a thread here touch the memory of copies that wait to be put, before the first copy needs it: the first
        touch of memory takes ten times what a copy into it takes. Without a node on this host there is none to keep.
        """
        size = min(self.settings.queue_bytes, ARENA_BYTES_MAX)

        def touch() -> None:
            parts = [self.memory(WARM_BYTES) for _ in range(size // WARM_BYTES)]
            for part in parts:
                part[:: mmap.PAGESIZE] = bytes(len(part[:: mmap.PAGESIZE]))

        if self.settings.same_host and any(parse_address(store).path for store in self.settings.stores):
            self._load_pool.submit(touch)

    def declines(self, found: Lookup, tokens: int) -> bool:
        """Whether loading what was found would take longer than computing its ``tokens``."""
        rate = self.settings.compute_tokens_per_s
        if rate is None or found.load_s_estimate <= tokens / rate:
            return False
        with self._lock:
            self.counts.declined += found.prefix_blocks()
        return True

    # --- on threads that may wait: at most the deadline ---------------------------------------------------------------

    def look_up(
        self, space: TenantSpace, names: Sequence[BlockName], *, states: bool = False, deadline_s: float | None = None
    ) -> Lookup | None:
        """What is stored of the named blocks; None if the store failed."""
        try:
            found = self.store.lookup(
                space.id, names, states=states, deadline_s=deadline_s or self.settings.lookup_deadline_s
            )
        except StoreError as error:
            self._tell("lookup", error)
            with self._lock:
                self.counts.lookups_failed += 1
            return None
        silent = bool((found.presence == _UNREACHABLE).any())
        if silent:
            self._tell("lookup", DeadlineExceeded("a node is down, or did not answer in time"))
        with self._lock:
            self.counts.lookups += 1
            self.counts.lookups_failed += silent
            self.counts.looked_up += len(names)
            self.counts.found += found.prefix_blocks()
        return found

    def load(
        self,
        space: TenantSpace,
        names: Sequence[BlockName],
        buffers: Sequence[bytearray | memoryview],
        *,
        deadline_s: float | None = None,
    ) -> list[GetStatus]:
        """Fill the buffers, verified. Only one whose status is OK may be read."""
        try:
            statuses = self.store.get_into(
                space.id, names, buffers, deadline_s=deadline_s or self.settings.load_deadline_s
            )
        except StoreError as error:
            self._tell("load", error)
            late = isinstance(error, DeadlineExceeded)
            statuses = [GetStatus.DEADLINE if late else GetStatus.UNREACHABLE] * len(names)
        good = [
            memoryview(buffer).nbytes
            for buffer, status in zip(buffers, statuses, strict=True)
            if status == GetStatus.OK
        ]
        with self._lock:
            self.counts.loaded += len(good)
            self.counts.loaded_bytes += sum(good)
            self.counts.loads_failed += len(names) - len(good)
        return statuses

    def load_state(self, space: TenantSpace, name: StateName, *, deadline_s: float | None = None) -> memoryview | None:
        """A state's verified bytes; None if it is gone."""
        try:
            got = self.store.get_state(space.id, name, deadline_s=deadline_s or self.settings.load_deadline_s)
        except StoreError as error:
            self._tell("load", error)
            got = None
        with self._lock:
            self.counts.states_loaded += got is not None
            self.counts.states_missed += got is None
        return None if got is None else memoryview(bytearray(got[0]))

    def store_now(
        self,
        space: TenantSpace,
        blocks: Sequence[BlockPut],
        traffic_class: TrafficClass,
        *,
        deadline_s: float = PUT_DEADLINE_S_DEFAULT,
    ) -> list[PutOutcome]:
        """Store blocks from where they lie, past the queue: their memory is the caller's again on return."""
        until_s = self._monotonic_s() + deadline_s
        outcomes = [PutOutcome.UNREACHABLE] * len(blocks)
        for _ in range(2):  # a store whose data was wiped is told of the space again
            left_s = max(until_s - self._monotonic_s(), 1e-3)
            try:
                self.spaces.ensure_registered(space, deadline_s=left_s)
                outcomes = self.store.put(space.id, blocks, traffic_class=traffic_class, deadline_s=left_s)
                break
            except SpaceUnknown:
                self.spaces.forget_registration(space)
            except StoreError as error:
                self._tell("put", error)
                break
        good = [
            memoryview(block.payload).nbytes
            for block, outcome in zip(blocks, outcomes, strict=True)
            if outcome in ACKNOWLEDGED
        ]
        with self._lock:
            self.counts.stored += len(good)
            self.counts.stored_bytes += sum(good)
            self.counts.stores_failed += len(blocks) - len(good)
        return outcomes

    def stats(self) -> dict[str, int]:
        """Counters of this attachment and of its queue of puts."""
        with self._lock:
            counts = asdict(self.counts)
        return {**asdict(self.publisher.counts), **counts, "queue_bytes": self.publisher.queue_bytes}

    # --- inside -------------------------------------------------------------------------------------------------------

    def _asked(self) -> None:
        with self._lock:
            self._asking -= 1

    def _tell(self, what: str, error: StoreError) -> None:
        """Said in the message itself: engines print nothing else of a record."""
        if self._monotonic_s() >= self._quiet_until_s:
            self._quiet_until_s = self._monotonic_s() + TELL_EVERY_S
            stores = ", ".join(self.settings.stores)
            log.warning("reprise: store_fails call=%s store=%s problem=%r", what, stores, error)


def _tell_fault(future: Future[Any]) -> None:
    """A fault of ours on a thread here: nobody may ask for its result, so it is told at once."""
    if not future.cancelled() and (fault := future.exception()) is not None:
        log.error("adapter_fault", exc_info=fault)


# --- what a request says of itself ------------------------------------------------------------------------------------


def wishes_of(parameters: Mapping[str, Any] | None, hints: Any) -> dict[str, Any]:
    """What vLLM hands on of a request: its hints (an envelope of actions, or None), and before all its parameters."""
    wishes: dict[str, Any] = {}
    for action in hints.actions if hints is not None else ():
        if action.action_type == HINT_TYPE:
            wishes.update(action.payload)
    return {**wishes, **(parameters or {})}


# --- parsing of single options ----------------------------------------------------------------------------------------


def class_of(value: Any, classes: Mapping[str, TrafficClass]) -> TrafficClass:
    """The byte of a traffic class by its name, or itself. Raises ValueError."""
    if isinstance(value, str) and value in classes:
        return classes[value]
    known = isinstance(value, int) and (value in classes.values() or OPERATOR_CLASS_MIN <= value <= CLASS_MAX)
    if known and not isinstance(value, bool):
        return TrafficClass(value)
    raise ValueError(f"{value!r} is not one of {', '.join(sorted(classes))}, nor {OPERATOR_CLASS_MIN}..{CLASS_MAX}")


def _classes(value: Any) -> dict[str, TrafficClass]:
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        raise ValueError('write names and bytes, such as {"batch": 17}')
    added = {}
    for name, byte in value.items():
        if name in BUILT_IN_NAMES:
            raise ValueError(f"{name} is built in")
        added[name] = class_of(byte, {})
    return {**BUILT_IN_NAMES, **added}


def _stores(value: Any) -> tuple[str, ...]:
    rows = [value] if isinstance(value, str) else value
    if not isinstance(rows, list | tuple) or not rows or not all(isinstance(row, str) for row in rows):
        raise ValueError('write one address or a list of them, such as "unix:/run/reprise/store.sock"')
    for row in rows:
        parse_address(row)
    return tuple(rows)


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(f"expected text, not {value!r}")
    return value


def _tenant(value: Any) -> str:
    tenant_salt(_text(value))
    return str(value)


def _between(low: float, high: float) -> Callable[[Any], float]:
    def parse(value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            raise ValueError(f"expected a number from {low:g} to {high:g}, not {value!r}")
        return float(value)

    return parse


def _size(value: Any) -> int:
    size = parse_bytes(value) if isinstance(value, str) else value
    if isinstance(size, bool) or not isinstance(size, int) or not MIB <= size <= 1024 * GIB:
        raise ValueError(f'expected a size from 1MiB to 1TiB, such as "256MiB", not {value!r}')
    return size


def _epoch(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**32:
        raise ValueError(f"expected a whole number 0..2^32-1, not {value!r}")
    return value


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"expected true or false, not {value!r}")
    return value


def _digest(value: Any) -> bytes:
    try:
        digest = bytes.fromhex(_text(value))
    except ValueError as error:
        raise ValueError(f"expected 64 hex digits, not {value!r}") from error
    if len(digest) != 32:
        raise ValueError(f"expected 64 hex digits, not {len(value)} characters")
    return digest


def _checked(name: str, parse: Callable[[Any], T], value: Any) -> T:
    try:
        return parse(value)
    except ValueError as error:
        raise OptionError(f"{name}: {error}") from error


_OPTIONS: Mapping[str, tuple[str, Callable[[Any], Any]]] = {
    "store": ("stores", _stores),
    "token_file": ("token_file", lambda value: Path(_text(value))),
    "tenant": ("tenant", _tenant),
    "traffic_class": ("traffic_class", _text),
    "classes": ("classes", _classes),
    "lookup_deadline_s": ("lookup_deadline_s", _between(0.001, 5.0)),
    "load_deadline_s": ("load_deadline_s", _between(0.01, 60.0)),
    "queue_bytes": ("queue_bytes", _size),
    "epoch": ("epoch", _epoch),
    "same_host": ("same_host", _flag),
    "compute_tokens_per_s": ("compute_tokens_per_s", _between(1.0, 1e9)),
    "weights_digest": ("weights_digest", _digest),
    "keep_windows": ("keep_windows", _flag),
    "access_log": ("access_log", lambda value: Path(_text(value))),
}
"""Option -> field, parser."""
