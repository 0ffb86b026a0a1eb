"""vLLM's own ``TieringOffloadingManager`` with one secondary tier, driven as a scheduler and a copy worker drive it.

Runs inside an environment with vLLM. Owns the drive: requests, steps, what the copy worker would put into the primary
tier's memory and take from it, and the time that each step took. Does not know engines, models or GPUs, nor what the
tier is. Invariant: every loop has a bound.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from vllm.v1.kv_offload.base import LookupResult, OffloadKey, ReqContext, ScheduleEndContext
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.tiering.manager import TieringOffloadingManager
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

TIER_MODULE = "workers.adapters.vllm_tier"
STEP_S = 0.001
"""Between two steps of the scheduler: what a step of a model would take, at the least."""
STEPS_MAX = 60_000
WEIGHTS_DIGEST = "ab" * 32
"""Of a model that there is not."""
NO_CHANGE = ScheduleEndContext(new_req_ids=(), preempted_req_ids=())


class DriveError(Exception):
    """A tier did not do what it must."""


ASK, POLL, PROMOTE, RESOLVE = "ask", "poll", "promote", "resolve"
"""Steps by what happens in them: first look-ups; nothing new; hits, so loads begin; whatever else was settled."""


@dataclass(slots=True)
class Steps:
    """What the scheduler's thread spent in the manager, in seconds: by kind of step, and when stores were begun."""

    wall_s: dict[str, list[float]] = field(default_factory=dict)
    cpu_s: dict[str, list[float]] = field(default_factory=dict)
    storing_s: list[float] = field(default_factory=list)


@dataclass(slots=True)
class Drive:
    """One manager with one secondary tier. ``rows``: its memory, a row a chunk."""

    manager: TieringOffloadingManager
    rows: npt.NDArray[np.uint8]
    steps: Steps = field(default_factory=Steps)
    requests: int = 0
    before: dict[str, list[LookupResult]] = field(default_factory=dict)
    """What the last step that asked was told."""

    @property
    def tier(self) -> Any:
        return self.manager.secondary_tiers[0]

    def request(self, params: Mapping[str, Any] | None = None) -> ReqContext:
        """A new request, as the scheduler would begin it."""
        self.requests += 1
        request = ReqContext(req_id=f"request-{self.requests}", kv_transfer_params=dict(params) if params else None)
        self.manager.on_new_request(request)
        return request

    def step(self, asked: Sequence[tuple[ReqContext, Sequence[OffloadKey]]] = ()) -> list[list[LookupResult]]:
        """One step of the scheduler: look-ups of every request up to its first miss, then the end of the step."""
        wall_s, cpu_s = time.perf_counter(), time.thread_time()
        results = []
        for request, keys in asked:
            row = []
            for key in keys:
                row.append(self.manager.lookup(key, request))
                if row[-1] is LookupResult.MISS:
                    break
            results.append(row)
        self.manager.on_schedule_end(NO_CHANGE)
        cpu_s, wall_s = time.thread_time() - cpu_s, time.perf_counter() - wall_s
        if asked:
            kind = self._kind([request.req_id for request, _ in asked], results)
            self.steps.cpu_s.setdefault(kind, []).append(cpu_s)
            self.steps.wall_s.setdefault(kind, []).append(wall_s)
        return results

    def _kind(self, names: Sequence[str], results: Sequence[list[LookupResult]]) -> str:
        before, self.before = self.before, dict(zip(names, results, strict=True))
        if not before.keys() >= self.before.keys():
            return ASK
        changed = [row for name, row in self.before.items() if row != before[name]]
        if not changed:
            return POLL
        return PROMOTE if any(LookupResult.HIT_PENDING in row for row in changed) else RESOLVE

    def store(self, request: ReqContext, keys: Sequence[OffloadKey], payloads: Sequence[npt.NDArray[np.uint8]]) -> int:
        """What the scheduler and a copy worker do to store chunks; returns how many the primary tier took."""
        taken = self.fill(request, keys, payloads)
        self.complete(request, taken)
        return len(taken)

    def fill(
        self, request: ReqContext, keys: Sequence[OffloadKey], payloads: Sequence[npt.NDArray[np.uint8]]
    ) -> list[OffloadKey]:
        """Put chunks into the primary tier; returns those that it lacked and had room for."""
        prepared = self.manager.prepare_store(keys, request)
        if prepared is None:
            return []
        at = {key: number for number, key in enumerate(keys)}
        taken: list[OffloadKey] = prepared.keys_to_store
        for key, chunk in zip(taken, prepared.store_spec.chunk_ids, strict=True):
            payload = payloads[at[key]]
            self.rows[chunk, : payload.size] = payload
        return taken

    def complete(self, request: ReqContext, keys: Sequence[OffloadKey]) -> None:
        """The copies are done: the secondary tier's store begins."""
        if keys:
            began_s = time.perf_counter()
            self.manager.complete_store(keys, request)
            self.steps.storing_s.append(time.perf_counter() - began_s)

    def settle(self) -> None:
        """Step until no job is left."""
        for _ in range(STEPS_MAX):
            self.step()
            if not self.manager._jobs:
                return
            time.sleep(STEP_S)
        raise DriveError("jobs do not end")

    def look_up(self, asked: Sequence[tuple[ReqContext, Sequence[OffloadKey]]]) -> list[int]:
        """Step until every request knows how many of its chunks, from the first on, are in the primary tier."""
        hits = [0] * len(asked)
        open_ = list(range(len(asked)))
        for _ in range(STEPS_MAX):
            for at, row in zip(list(open_), self.step([asked[at] for at in open_]), strict=True):
                if all(result in (LookupResult.HIT, LookupResult.MISS) for result in row):
                    hits[at] = row.count(LookupResult.HIT)
                    open_.remove(at)
            if not open_:
                return hits
            time.sleep(STEP_S)
        raise DriveError("look-ups do not end")

    def read(self, request: ReqContext, keys: Sequence[OffloadKey]) -> list[npt.NDArray[np.uint8]]:
        """Chunks' rows as a copy worker finds them in the primary tier, valid until something else is stored."""
        chunks = self.manager.prepare_load(keys, request).chunk_ids
        self.manager.complete_load(keys, request)
        return [self.rows[chunk] for chunk in chunks]

    def finish(self, *requests: ReqContext) -> None:
        for request in requests:
            self.manager.on_request_finished(request)

    def forget(self) -> None:
        """Empty the primary tier; what is in the secondary stays."""
        self.manager.reset_cache()

    def close(self) -> None:
        self.rows = np.empty((0, 0), np.uint8)
        self.manager.shutdown()


def open_drive(
    tier: Mapping[str, Any],
    *,
    chunks: int,
    chunk_bytes: int,
    model: str = "none",
    groups: int = 1,
    tensor_size: int = 1,
    layout: str = "NHD",
    backpressure: bool = False,
) -> Drive:
    """A manager whose primary tier holds ``chunks`` chunks, with one secondary tier of this configuration."""
    aligned = -(-chunk_bytes // TieringOffloadingSpec.BLOCK_SIZE_ALIGNMENT) * TieringOffloadingSpec.BLOCK_SIZE_ALIGNMENT
    config: dict[str, Any] = dict(tier)
    if backpressure:
        config["backpressure"] = {"backpressure_cls": "EMABackpressureDetector"}
    spec = TieringOffloadingSpec(
        OffloadingConfig(
            groups=tuple(
                OffloadingGroupConfig(16, tuple(f"model.layers.{at * groups + group}.attn" for at in range(2)), group)
                for group in range(groups)
            ),
            worker_kv_bytes_per_block=chunk_bytes // tensor_size,
            enable_kv_cache_events=False,
            extra_config={"cpu_bytes_to_use": aligned * chunks, "secondary_tiers": [config]},
            engine_id=f"bench-{os.getpid()}-{secrets.token_hex(4)}",
            model=OffloadingModelConfig(model, "bfloat16"),
            cache=OffloadingCacheConfig(16, 1),
            parallel=OffloadingParallelConfig(0, tensor_size, tensor_size, 1, 1, 1, 0, 1, None, False),
            kv_cache_layout=layout,
        )
    )
    manager = spec.get_manager()
    view = manager.primary_tier.get_kv_memoryview()
    return Drive(manager, np.frombuffer(view.cast("B"), np.uint8).reshape(chunks, view.strides[0]))
