"""One running worker: the model, the engine on its thread, and everything that they were composed from.

Owns the composition, the engine's thread and the order of starting and stopping. Does not know HTTP. Invariants: all
tensor work happens on the engine's thread; a fault of the model fails the requests in flight (retryable: another worker
may continue them) and, when it repeats, the worker is broken for good: it takes nothing more, and its server ends, so
that whoever supervises the process starts another.
"""

from __future__ import annotations

import functools
import logging
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from kvstore.client import StoreClient
from kvstore.keys import encode_space
from kvstore.limits import PAYLOAD_BYTES_MAX
from kvstore.store import Store
from workers.access_log import AccessLog, AccessRecord, MissRecord
from workers.config import ConfigError, WorkerConfig
from workers.decode import decode_sequence
from workers.engine import Engine, EngineSettings, Parts
from workers.errors import Rejected
from workers.fetch import Fetcher, FetchSettings
from workers.geometry import make_space
from workers.layout import KvMemory
from workers.metrics import WorkerMetrics
from workers.model import Model
from workers.plan import Reach
from workers.prefill import prefill_sequence
from workers.protocol import DecodeRequest, Load, ModelInfo, PrefillRequest, Role
from workers.publish import Publisher
from workers.sampling import choose
from workers.scheduler import Attention, Limits
from workers.sequence import Event, LiveSequence
from workers.slots import Slots
from workers.spaces import Spaces
from workers.weights import ResolvedModel

log = logging.getLogger(__name__)

FETCHES_MAX = 4
"""Requests that load at the same time; each holds at most its prompt's KV in staging buffers."""
FAULTS_MAX = 3
"""Steps that may break one after another; then the worker is broken."""


class Worker:
    """A worker that serves requests. Make with ``open`` or ``compose``; then ``start``; end with ``close``."""

    def __init__(
        self,
        engine: Engine,
        publisher: Publisher,
        spaces: Spaces,
        store: Store,
        info: ModelInfo,
        access_log: AccessLog,
        pools: tuple[ThreadPoolExecutor, ...],
        now_s: Callable[[], float] = time.time,
    ) -> None:
        self._engine = engine
        self._publisher = publisher
        self._spaces = spaces
        self._store = store
        self._pools = pools
        self._now_s = now_s
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self.info = info
        self.access_log = access_log
        self.metrics = WorkerMetrics(engine, publisher)
        self.draining = False
        self.broken = False
        self.streams_until_s = math.inf
        """Of the monotonic clock: streams that still run then are ended, since the drain is nearly over."""

    # --- life ---------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to serve."""
        self._publisher.start()
        self._thread.start()

    def close(self, deadline_s: float = 10.0) -> None:
        """Stop the engine, put what is queued, and let go of the store."""
        self.draining = True
        self._stopping.set()
        self._engine.wake()
        if self._thread.ident is not None:
            self._thread.join(deadline_s)
        self._publisher.close(deadline_s)
        for pool in self._pools:
            pool.shutdown(wait=False)
        self.access_log.close()
        self._store.close()

    @property
    def healthy(self) -> bool:
        return not self.broken and not self.draining and self._thread.is_alive()

    # --- requests (any thread) ----------------------------------------------------------------------------------------

    def begin(self, request: PrefillRequest | DecodeRequest, emit: Callable[[Event], None]) -> LiveSequence:
        """Take a request; its events come on the engine's thread. Raises Rejected."""
        if self.draining or self.broken:
            why = "shutting down" if self.draining else "broken"
            raise Rejected(503, f"the worker is {why}: use another one", code="unavailable", retry_after_s=1.0)
        wanted: Role = "prefill" if isinstance(request, PrefillRequest) else "decode"
        if self.info.role not in (wanted, "both"):
            raise Rejected(400, f"this worker's role is {self.info.role}, not {wanted}", code="wrong_role")
        if isinstance(request, PrefillRequest):
            sequence = prefill_sequence(request, self._spaces, emit)
        else:
            sequence = decode_sequence(request, self._spaces, emit)
        self._engine.submit(sequence)
        return sequence

    def cancel(self, sequence: LiveSequence) -> None:
        """The client went away."""
        self._engine.cancel(sequence)

    def load(self) -> Load:
        return self._engine.load(draining=self.draining)

    @property
    def in_flight(self) -> int:
        return self._engine.in_flight

    # --- the engine's thread ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._steps()
        finally:
            self.broken |= not self._stopping.is_set()  # not even the failures could be told: nobody is served now

    def _steps(self) -> None:
        faults = 0
        while not self._stopping.is_set():
            try:
                ran = self._engine.step()
                faults = 0 if ran else faults
            except Exception:  # the seam: whatever breaks a step must not leave its clients waiting
                faults += 1
                log.exception("step_failed", extra={"faults": faults})
                self._engine.fail_all("the worker's step failed; see its log")
                self.broken = faults >= FAULTS_MAX
                ran = False
            if not ran:
                self._engine.wait(self._engine.idle_s())
        self._engine.fail_all("the worker was stopped")

    def observe(self, sequence: LiveSequence, outcome: str) -> None:
        """Count and log a sequence that ended."""
        self.metrics.observe(sequence, outcome)
        record = access_record(sequence, outcome, self.info.block_tokens, self._now_s())
        if record is not None:
            self.access_log.append(record)


def access_record(sequence: LiveSequence, outcome: str, block_tokens: int, now_s: float) -> AccessRecord | None:
    """What the access log keeps of a sequence; None for one that ended before it was planned."""
    reuse = sequence.reuse
    if reuse is None:
        return None
    miss = sequence.fetched.first_miss if sequence.fetched else None
    return AccessRecord(
        request_id=sequence.request.request_id,
        time_s=now_s,
        role=sequence.role.name,
        outcome=outcome,
        space=encode_space(sequence.space.space).hex(),
        space_id=sequence.space.id.hex(),
        cache=sequence.request.cache,
        prompt_tokens=reuse.prompt_tokens,
        generated_tokens=sequence.generated,
        block_tokens=block_tokens,
        hit_tokens=reuse.hit_tokens,
        miss_tokens=reuse.miss_tokens,
        replayed_tokens=reuse.replayed_tokens,
        way=reuse.way,
        exact=reuse.exact,
        reason=reuse.reason,
        first_miss=None
        if miss is None
        else MissRecord(
            index=miss.name.index,
            key=miss.name.key.hex(),
            parent=miss.name.parent.hex(),
            route=miss.name.route.hex(),
            token_digest=miss.name.token_digest.hex(),
            presence=miss.presence.name.lower(),
        ),
        queued_s=sequence.queued_s,
        load_s=sequence.load_s,
        compute_s=sequence.compute_s,
        published_blocks=sequence.ticket.blocks_acknowledged if sequence.ticket else 0,
        last_hit=_last_hit(sequence, reuse.hit_tokens // block_tokens),
    )


def _last_hit(sequence: LiveSequence, blocks: int) -> str | None:
    """The key of the last of so many blocks."""
    names = sequence.chain.names if sequence.chain is not None else ()
    return names[blocks - 1].key.hex() if 0 < blocks <= len(names) else None


def open_worker(
    config: WorkerConfig, resolved: ResolvedModel, *, store_token: str | None, store: Store | None = None
) -> Worker:
    """Load the model and compose a worker. A store that is down does not matter here: it is asked when needed.

    Raises ConfigError, UnsupportedModel, and whatever loading a broken checkpoint raises.
    """
    model = Model.load(resolved.directory, config.dtype, config.device, config.threads)
    if store is None:
        store = StoreClient.connect(config.stores, token=store_token, connections_per_node=FETCHES_MAX)
    return compose(config, resolved, model, store)


def compose(config: WorkerConfig, resolved: ResolvedModel, model: Model, store: Store) -> Worker:
    """A worker from a loaded model and a store."""
    geometry, block_tokens = model.geometry, config.block_tokens
    block_bytes = geometry.block_payload_bytes(block_tokens)
    if block_bytes > PAYLOAD_BYTES_MAX:
        raise ConfigError(
            f"block_tokens: a block of {block_tokens} tokens has {block_bytes} bytes, but a store takes at most "
            f"{PAYLOAD_BYTES_MAX}: give fewer"
        )
    slots = Slots(_pages(config, geometry.bytes_per_token), block_tokens)
    base = make_space(
        geometry,
        model=resolved.name,
        weights_digest=model.weights_digest,
        block_tokens=block_tokens,
        revision=resolved.revision,
        epoch=config.epoch,
    )
    spaces = Spaces(base, store)
    windows = resolved.replay_windows if config.replay_windows is None else config.replay_windows
    reach = Reach(block_tokens, geometry.window, geometry.sliding_layers, windows or None)
    publisher = Publisher(store, spaces, queue_bytes_max=config.publish_memory_bytes)
    pools = (ThreadPoolExecutor(FETCHES_MAX, "fetch"), ThreadPoolExecutor(FETCHES_MAX, "state"))
    fetch_settings = FetchSettings(
        reach=reach,
        block_payload_bytes=geometry.block_payload_bytes(block_tokens),
        state_payload_bytes=lambda position: geometry.state_payload_bytes(position, block_tokens),
        lookup_deadline_s=config.lookup_deadline_s,
        load_deadline_s=config.load_deadline_s,
    )
    fetcher = Fetcher(store, spaces, fetch_settings, pools[1], compute_s=lambda tokens: engine.compute_s(tokens))
    parts = Parts(
        model=model,
        memory=KvMemory(geometry, slots, config.dtype, config.device),
        slots=slots,
        choose=functools.partial(choose, generator=np.random.default_rng()),
        fetcher=fetcher,
        publisher=publisher,
        fetch_pool=pools[0],
    )
    engine = Engine(
        parts,
        _engine_settings(config, model),
        observe=lambda sequence, outcome: worker.observe(sequence, outcome),
    )
    info = ModelInfo(
        name=resolved.name,
        role=config.role,
        directory=str(resolved.directory.resolve()),
        context_tokens=min(model.context_tokens, slots.total_tokens),
        vocabulary=model.vocabulary,
        stop_token_ids=list(model.stop_token_ids),
        block_tokens=block_tokens,
        space_id=spaces.of(None).id.hex(),
        fidelity=config.fidelity,
    )
    worker = Worker(engine, publisher, spaces, store, info, _open_log(config.access_log_path, config), pools)
    return worker


def _engine_settings(config: WorkerConfig, model: Model) -> EngineSettings:
    geometry, block_tokens = model.geometry, config.block_tokens
    chunk_tokens = max(config.chunk_tokens, geometry.window + block_tokens)
    if chunk_tokens != config.chunk_tokens:
        log.info("chunk_tokens_raised", extra={"chunk_tokens": chunk_tokens, "window": geometry.window})
    return EngineSettings(
        limits=Limits(chunk_tokens, block_tokens, geometry.window),
        attention=Attention(geometry.layers - geometry.sliding_layers, geometry.sliding_layers, geometry.window),
        block_tokens=block_tokens,
        block_payload_bytes=geometry.block_payload_bytes(block_tokens),
        context_tokens=model.context_tokens,
        vocabulary=model.vocabulary,
        fidelity=config.fidelity,
        requests_max=config.requests_max,
        fetches_max=FETCHES_MAX,
        settle_deadline_s=config.settle_deadline_s,
    )


def _pages(config: WorkerConfig, token_bytes: int) -> int:
    pages = config.kv_memory_bytes // (token_bytes * config.block_tokens)
    if pages < 2:
        raise ConfigError(
            f"kv_memory: {config.kv_memory_bytes} bytes hold {pages} blocks of {config.block_tokens} tokens "
            f"({token_bytes} bytes a token); give at least {2 * token_bytes * config.block_tokens} bytes"
        )
    return pages


def _open_log(path: Path, config: WorkerConfig) -> AccessLog:
    try:
        return AccessLog.open(path, config.access_log_bytes)
    except OSError as error:
        raise ConfigError(f"data: cannot write {path}: {error}") from error
