"""Reprise as a secondary tier of vLLM: vLLM copies between GPU and host memory, this tier between host and store.

    --kv-transfer-config '{"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": {
        "spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 17179869184, "offload_prompt_only": false,
        "secondary_tiers": [{"type": "RepriseTier", "module_path": "workers.adapters.vllm_tier",
                             "store": "unix:/run/reprise/store.sock"}]}}'

All other options are those of ``attachment.Settings``. Runs in the scheduler's process. Owns the translation between
vLLM's interface and ours; look-ups are ``verdicts``', puts ``pinned_puts``'. Does not know tensors, tokens or GPUs: a
chunk is a row of the primary tier's memory, which the store reads and fills in place.

Invariants: no method waits but ``drain_jobs`` and ``shutdown``; every look-up has a verdict within its deadline, and
nobody above has one; a block whose load failed is a miss for its request from then on; every job is reported once, and
then its rows are not touched any more; under pressure stores are shed, loads never, and what was not stored is offered
again while vLLM has it. Limits: vLLM's keys name a LoRA by its name, and reloading weights in place changes no key:
raise ``epoch`` after either changed.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections import Counter, deque
from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.platforms import current_platform
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingCounterMetadata,
    OffloadingMetricMetadata,
    OffloadingSpec,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
    TierFilter,
    get_offload_group_idx,
)
from vllm.v1.kv_offload.file_mapper import FileMapper
from vllm.v1.kv_offload.tiering.base import JobResult, ParentManager, SecondaryTierManager, TransferJob

from kvstore.keys import OPAQUE_ALGORITHM, AttentionGroup, Space, opaque_name
from kvstore.limits import BLOCK_TOKENS_MAX, NAME_BYTES_MAX, PAYLOAD_BYTES_MAX
from kvstore.store import GetStatus
from workers.adapters.attachment import Attachment, OptionError, Settings
from workers.adapters.pinned_puts import PinnedPuts, PutJob
from workers.adapters.verdicts import RequestVerdicts, Verdicts
from workers.adapters.vllm_wishes import Complaints, read_wishes
from workers.spaces import TenantSpace

HELD_SHARE = 0.5
"""Of the primary tier's memory, what stores that wait may hold: the rest stays free for vLLM to evict from."""
DRAIN_S = 10.0
"""Stores that have not begun by then are shed when vLLM waits for this tier."""
MISSED_MAX = 1024
"""Store jobs that failed or were shed and may come again; the oldest is forgotten."""
AGAIN_KEYS = 64
"""Chunks that are offered again in one step: each is looked for in the primary tier by the scheduler's thread."""
TRIES_MAX = 3
"""Times that the store is asked to keep a chunk; a job that was shed was not one."""
GREET_S = 5.0
BLOCKS_METRIC = "vllm:kv_offload_reprise_blocks"

_RESULT = {True: LookupResult.HIT, False: LookupResult.MISS, None: LookupResult.RETRY}
_LAYER_NUMBER = re.compile(r"\.(\d+)\.")


class _ByTier(dict[int, RequestVerdicts]):
    """What a request was told, by the tier that told it: there may be several, of stores or tenants of their own."""


@dataclass(frozen=True, slots=True)
class _Store:
    """What a store job was to keep. ``tries``: how often the store was asked for it in vain."""

    request: RequestVerdicts
    keys: list[OffloadKey]
    tries: int = 0


@dataclass(frozen=True, slots=True)
class _Load:
    """A load: what it reads, and into which chunks of the primary tier."""

    number: int
    request: RequestVerdicts
    keys: list[OffloadKey]
    chunks: Sequence[int]


class RepriseTier(SecondaryTierManager):
    """See the module. Raises OptionError (a ValueError) for options that cannot be used; waits for nobody."""

    medium: ClassVar[Medium] = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: OffloadingSpec,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        **options: Any,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        locality = options.pop("locality", None)
        self.locality = None if locality is None else Locality(locality)
        settings = Settings.from_options(options)
        self._stride = self.block_size_bytes
        self._row_bytes = _row_bytes(offloading_spec, self._stride)
        self._memory: memoryview | None = primary_kv_view.cast("B")
        self._tokens = _tokens_per_chunk(offloading_spec)
        self._attachment = Attachment.open(settings, space_of(offloading_spec, settings, self._row_bytes))
        self._counts: Counter[str] = Counter()
        self._complaints = Complaints()
        self._verdicts = Verdicts(self._attachment, self._tokens_of, self._counts)
        self._puts = PinnedPuts(self._attachment, held_bytes_max=int(HELD_SHARE * primary_kv_view.nbytes))
        self._puts.start()
        self._greet()
        self._nobody = RequestVerdicts(None, settings.traffic_class)
        self._turn: ReqContext | None = None
        self._asking = self._nobody
        """Whose look-ups come now, and what it was told."""
        self._unwanted: list[JobResult] = []
        self._storing: dict[int, _Store] = {}
        self._missed: deque[_Store] = deque(maxlen=MISSED_MAX)
        self._again = 0
        self._loading: dict[int, Future[None]] = {}
        self._loaded: deque[tuple[_Load, list[bool], float]] = deque()
        """Loads that are over: whether each row was filled, and in how many seconds."""

    # --- look-ups -----------------------------------------------------------------------------------------------------

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        self._begin(req_context)
        return RequestOffloadingContext()

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """Called for every chunk of every waiting request in every step, one request after another: kept short."""
        if req_context is not self._turn:
            self._turn, self._asking = req_context, self._request(req_context)
        known = self._asking.known
        return _RESULT[known[key] if key in known else self._verdicts.of(self._asking, key)]

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        self._verdicts.send()

    def on_request_finished(self, req_context: ReqContext) -> None:
        self._verdicts.forget(self._request(req_context))
        if req_context is self._turn:
            self._turn, self._asking = None, self._nobody

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        request = self._request(req_context)
        if request.space is not None and keys:
            self._puts.touch(request.space, request.traffic_class, list(keys))

    # --- transfers ----------------------------------------------------------------------------------------------------

    def submit_store(self, job_metadata: TransferJob) -> None:
        request = self._request(job_metadata.req_context)
        if request.space is None:
            self._unwanted.append(JobResult(job_metadata.job_id, success=True, transfer_bytes=0))
        else:
            self._offer(request.space, job_metadata, _Store(request, list(job_metadata.keys)))

    def serve_external_requests(self, parent: ParentManager) -> None:
        """Once a step: what was not stored is offered again while the primary tier has it, since vLLM never would."""
        if not self._missed or not self._puts.has_room:
            return
        store = self._missed.popleft()
        if len(store.keys) > AGAIN_KEYS:
            self._missed.appendleft(replace(store, keys=store.keys[AGAIN_KEYS:]))
        self._again += 1
        context = ReqContext(req_id=f"reprise-again-{self._again}", load_tier_filter=TierFilter(matchers=()))
        context.set_state(_ByTier({id(self): store.request}))
        parent.on_new_request(context)
        keys = [key for key in store.keys[:AGAIN_KEYS] if parent.lookup(key, context) is LookupResult.HIT]
        if keys and store.request.space is not None:
            job = parent.create_store_job(keys, context)
            self._offer(store.request.space, job, replace(store, keys=keys))
        parent.on_request_finished(context)

    def submit_load(self, job_metadata: TransferJob) -> None:
        request, number = self._request(job_metadata.req_context), job_metadata.job_id
        load = _Load(number, request, list(job_metadata.keys), job_metadata.chunk_ids)
        self._loading[number] = self._attachment.load_soon(lambda left_s: self._run_load(load, left_s))

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """vLLM asks once a step, before its first look-up: verdicts that came are taken over here too."""
        self._verdicts.settle()
        results, self._unwanted = self._unwanted, []
        for put in self._puts.finished():
            store = self._storing.pop(put.number)
            if not put.done and store.tries + put.tried < TRIES_MAX:
                self._missed.append(replace(store, tries=store.tries + put.tried))
            results.append(JobResult(put.number, put.done, transfer_time=put.seconds, transfer_bytes=put.sent_bytes))
        while self._loaded:
            results.append(self._end_load(*self._loaded.popleft()))
        return results

    def drain_jobs(self) -> None:
        """Loads end by their deadline; of the stores those end that have begun, and what else does within DRAIN_S."""
        wait(self._loading.values())
        self._puts.drain(DRAIN_S)

    def shutdown(self) -> None:
        """Raises RuntimeError while memory is in use: vLLM then leaves the primary tier's where it is."""
        loads = list(self._loading.values())
        for load in loads:
            load.cancel()
        _, running = wait(loads, self._attachment.settings.load_deadline_s + 1.0)
        idle = self._puts.close(DRAIN_S) and not running
        self._attachment.close(0.0)
        if not idle:
            raise RuntimeError("the Reprise tier still moves blocks: the memory of its rows must stay")
        self._memory = None

    # --- metrics ------------------------------------------------------------------------------------------------------

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, OffloadingMetricMetadata]:
        text = "Blocks by what became of them in the Reprise tier (looked_up, loaded, load_failed, store_stored ...)."
        return {BLOCKS_METRIC: OffloadingCounterMetadata(documentation=text, labelnames=("outcome",))}

    def get_stats(self) -> OffloadingConnectorStats | None:
        """Counts since the last call; None if nothing happened."""
        counts = self._puts.take_counts()
        counts.update(self._counts)
        self._counts.clear()
        if not counts:
            return None
        stats = OffloadingConnectorStats()
        for outcome, count in counts.items():
            stats.increase_counter(BLOCKS_METRIC, count, (outcome,))
        return stats

    # --- inside -------------------------------------------------------------------------------------------------------

    def _greet(self) -> None:
        """Connect while vLLM starts, so that the first request's look-ups need not: a restart is when hits matter."""
        space = self._attachment.spaces.of(self._attachment.settings.tenant)
        name = opaque_name(space.id, b"nothing has this key")
        self._attachment.ask(lambda left_s: self._attachment.look_up(space, [name], deadline_s=GREET_S))

    def _begin(self, req_context: ReqContext) -> RequestVerdicts:
        """Read once whose request it is; vLLM keeps the result with the request."""
        settings = self._attachment.settings
        wishes = read_wishes(settings, req_context.kv_transfer_params, req_context.kv_hints)
        if wishes.unclear:
            self._complaints.add(wishes.unclear)
        terms = wishes.terms
        if terms is None:
            request = RequestVerdicts(None, settings.traffic_class)
        else:
            request = RequestVerdicts(self._attachment.spaces.of(terms.tenant), terms.traffic_class)
        told = req_context.get_state(_ByTier)
        if told is None:
            req_context.set_state(told := _ByTier())
        told[id(self)] = request
        return request

    def _request(self, req_context: ReqContext) -> RequestVerdicts:
        told = req_context.get_state(_ByTier)
        return (told.get(id(self)) if told else None) or self._begin(req_context)

    def _offer(self, space: TenantSpace, job: TransferJob, store: _Store) -> None:
        chunks = job.chunk_ids
        self._storing[job.job_id] = store
        self._puts.offer(
            PutJob(
                number=job.job_id,
                space=space,
                traffic_class=store.request.traffic_class,
                keys=store.keys,
                row=lambda at: self._row(chunks[at]),
                block_tokens=min(max(self._tokens.values()), BLOCK_TOKENS_MAX),
                block_bytes=self._row_bytes,
            )
        )

    def _row(self, chunk: int) -> memoryview:
        """A chunk's payload where it lies, without the padding behind it."""
        assert self._memory is not None, "a job runs after shutdown"
        begin = int(chunk) * self._stride
        return self._memory[begin : begin + self._row_bytes]

    def _run_load(self, load: _Load, left_s: float) -> None:
        """On a thread of the attachment: read blocks into their rows, and leave the result for the scheduler."""
        filled, begun_s = [False] * len(load.keys), time.monotonic()
        try:
            space = load.request.space
            if space is not None:
                names = [opaque_name(space.id, key) for key in load.keys]
                rows = [self._row(chunk) for chunk in load.chunks]
                statuses = self._attachment.load(space, names, rows, deadline_s=left_s)
                filled = [status == GetStatus.OK for status in statuses]
        finally:  # a fault of ours costs a hit, and must not leave the request waiting
            self._loaded.append((load, filled, time.monotonic() - begun_s))

    def _end_load(self, load: _Load, filled: Sequence[bool], seconds: float) -> JobResult:
        """Report one load: what was filled stays, the rest is a miss, so that its request computes it."""
        del self._loading[load.number]
        whole = all(filled)
        good = load.keys if whole else [key for key, is_filled in zip(load.keys, filled, strict=True) if is_filled]
        self._counts["loaded"] += len(good)
        if not whole:
            load.request.strike(set(load.keys).difference(good))
            self._counts["load_failed"] += len(load.keys) - len(good)
        if good and load.request.space is not None:
            self._puts.touch(load.request.space, load.request.traffic_class, good)
        kept = None if whole or not good else tuple(good)
        return JobResult(load.number, whole, kept, seconds, len(good) * self._row_bytes)

    def _tokens_of(self, keys: Sequence[bytes]) -> int:
        """Tokens that these blocks of one request save: those of the group of which most are there."""
        counts = Counter(get_offload_group_idx(OffloadKey(key)) for key in keys)
        return max(count * self._tokens.get(group, 0) for group, count in counts.items())


# --- what vLLM says of itself -----------------------------------------------------------------------------------------


def space_of(spec: OffloadingSpec, settings: Settings, row_bytes: int) -> Space:
    """The space of all chunks of one vLLM configuration.

    vLLM's own fields for what makes files interchangeable, and what they leave out: the weights, the release (it may
    change its layout), the platform (its attention does), the order of the KV dimensions, the bytes of a chunk.
    """
    config = spec.config
    fields = FileMapper.from_offloading_spec("", spec, spec.blocks_per_chunk, parallel_agnostic=True).fields
    digest = hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:16]
    release = ".".join(vllm.__version__.split(".")[:2])
    ranks = " ".join(f"{name}{fields[f'{name}_size']}" for name in ("tp", "pp", "pcp", "dcp"))
    layout = (
        f"vllm-tier-1 vllm-{release} {current_platform.device_type} {config.kv_cache_layout} {ranks} "
        f"{spec.blocks_per_chunk}-blocks {row_bytes}-bytes {digest}"
    )
    return Space(
        model=_short(config.model.name),
        weights_digest=settings.digest_of(config.model.name),
        kv_dtype=config.model.dtype,
        layout=layout,
        block_tokens=min(max(_tokens_per_chunk(spec).values()), BLOCK_TOKENS_MAX),
        groups=tuple(_group(group.layer_names) for group in config.groups),
        epoch=settings.epoch,
        key_algorithm=OPAQUE_ALGORITHM,
    )


def _group(layer_names: Sequence[str]) -> AttentionGroup:
    """A group's layers. A tier is not told windows, heads and dimensions; the bytes of a chunk are in the layout."""
    numbers = {int(found[1]) for name in layer_names if (found := _LAYER_NUMBER.search(name))}
    return AttentionGroup(0, tuple(sorted(numbers)) or tuple(range(len(layer_names))), 1, 1)


def _short(model: str) -> str:
    """The model's name, or its end where it is a long path: the weights digest tells models apart."""
    return model.encode()[-NAME_BYTES_MAX:].decode(errors="ignore")


def _tokens_per_chunk(spec: OffloadingSpec) -> dict[int, int]:
    """By vLLM's number of the group."""
    return {group.group_id: group.tokens_per_block * spec.blocks_per_chunk for group in spec.config.groups}


def _row_bytes(spec: Any, stride: int) -> int:
    """What of a row is in use: the pages of all workers, or the one that they share. Raises OptionError."""
    copies = 1 if spec.replicated_layout else spec.config.parallel.world_size
    used = spec.cpu_page_size_per_worker * copies
    row_bytes = int(used) if 0 < used <= stride else stride
    if row_bytes > PAYLOAD_BYTES_MAX:
        raise OptionError(
            f"a chunk of {row_bytes} bytes is larger than a block may be ({PAYLOAD_BYTES_MAX}): use a smaller "
            f"block_size (or blocks_per_chunk) in kv_connector_extra_config"
        )
    return row_bytes
