"""vLLM attaches to the store: a KV connector that loads prefixes instead of computing them, and keeps the computed.

    --kv-transfer-config '{"kv_connector": "RepriseConnector", "kv_role": "kv_both",
        "kv_connector_module_path": "workers.adapters.vllm_connector", "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"store": "unix:/srv/reprise/store.sock"}}'

vLLM makes this class twice: in the scheduler it looks up (``Scheduling``), in each worker it moves bytes
(``Moving``); what the one wants of the others goes with a step (``Step``). A request's life:

1. It arrives: its prefix is looked up on a thread, in the space of every rank, so that all ranks agree on one length.
2. The scheduler asks what was found: "not yet" until the answer or the deadline, then a number of tokens, or none.
3. It gives pages; workers load into them while other requests run. A block that failed is computed, never read.
4. After each step, blocks that it completed are copied out of their pages, and put by a thread of their own.

``kv_role`` says whether it only loads (``kv_consumer``), only saves (``kv_producer``), or both (``kv_both``).
``kv_transfer_params`` of a request may name ``reprise_tenant``, ``reprise_class`` and ``"reprise_cache": "off"``; where
clients reach vLLM directly, whoever can send them chooses, so put a gateway before that sets them.

Invariants: neither scheduler nor forward waits for the store; blocks and states are named by tokens, under the tenant
and class that the request names; of a model with sliding windows only a prefix whose window is stored too is a hit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from workers.adapters.attachment import OPTIONS_OF_CONNECTORS, Settings
from workers.adapters.vllm_moving import Moving
from workers.adapters.vllm_scheduling import Scheduling
from workers.adapters.vllm_space import check_supported
from workers.adapters.vllm_stats import RepriseMetrics, RepriseStats
from workers.adapters.vllm_step import Step

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


def _settings_of(extra_config: dict[str, Any]) -> Settings:
    return Settings.from_options(extra_config, also=OPTIONS_OF_CONNECTORS)


class RepriseConnector(KVConnectorBase_V1, SupportsHMA):
    """vLLM's interface; each half is done by one object."""

    _cache_hit_source = CacheHitSource.DISK

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        settings = _settings_of(self._kv_transfer_config.kv_connector_extra_config)
        check_supported(vllm_config, kv_cache_config)
        self._scheduling: Scheduling | None = None
        self._moving: Moving | None = None
        if role == KVConnectorRole.SCHEDULER:
            transfer, block_tokens = self._kv_transfer_config, vllm_config.cache_config.block_size
            loads, saves = transfer.is_kv_consumer, transfer.is_kv_producer
            self._scheduling = Scheduling(settings, kv_cache_config, block_tokens, loads=loads, saves=saves)
        else:
            self._moving = Moving(settings, vllm_config, kv_cache_config)

    @property
    def requires_kv_delivery(self) -> bool:
        """What is saved is a cache: a save that is lost is a later miss."""
        return False

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """No, since a layer by itself is not waited for. vLLM asks for CUDA graphs, before it loads a model: the first
        that it shows of the options, so that wrong ones are refused then. Raises OptionError.
        """
        _settings_of(extra_config)
        return False

    # in the scheduler

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        self.scheduling.meet([metadata[rank] for rank in sorted(metadata)])

    def on_new_request(self, request: Request) -> None:
        self.scheduling.arrive(request)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self.scheduling.match(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        self.scheduling.admit(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        return self.scheduling.step(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        self.scheduling.hear(connector_output)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        self.scheduling.leave(request)
        return False, None

    def reset_cache(self) -> bool:
        self.scheduling.reset()
        return True

    # in a worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self.moving.open(kv_caches)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata:
        return self.moving.introduce()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self.moving.load(self._step().loads)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for: a request runs once all of its load is done."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Blocks hold all layers, so they are copied out after the last one."""

    def wait_for_save(self) -> None:
        self.moving.save(self._step().saves)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        return self.moving.results()

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self.moving.take_bad_pages()

    # in both, and in whoever shows metrics

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        return self.scheduling.stats() if self._scheduling is not None else self.moving.stats()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats:
        return RepriseStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> RepriseMetrics:
        return RepriseMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        for half in (self._scheduling, self._moving):
            if half is not None:
                half.close()

    @property
    def scheduling(self) -> Scheduling:
        assert self._scheduling is not None, "this is a worker's connector"
        return self._scheduling

    @property
    def moving(self) -> Moving:
        assert self._moving is not None, "this is the scheduler's connector"
        return self._moving

    def _step(self) -> Step:
        step = self._get_connector_metadata()
        assert isinstance(step, Step)
        return step
