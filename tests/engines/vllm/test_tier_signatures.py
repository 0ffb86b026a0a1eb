"""What the tier relies on in vLLM, where all of it is experimental: fails by name when a release has moved it."""

from __future__ import annotations

import inspect
from dataclasses import fields
from enum import Enum
from typing import Any

import pytest
import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope
from vllm.v1.kv_offload.base import Locality, LookupResult, Medium, OffloadingSpec, ReqContext
from vllm.v1.kv_offload.config import OffloadingConfig, OffloadingGroupConfig, OffloadingParallelConfig
from vllm.v1.kv_offload.file_mapper import FileMapper
from vllm.v1.kv_offload.tiering.base import JobResult, ParentManager, SecondaryTierManager, TransferJob
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from workers.adapters.vllm_tier import RepriseTier

MOVED = "vLLM's interface has moved: read workers/adapters/vllm_tier.py against this release, then change this test"

METHODS = {
    "__init__": "self offloading_spec primary_kv_view tier_type backpressure_detector",
    "lookup": "self key req_context",
    "submit_store": "self job_metadata",
    "submit_load": "self job_metadata",
    "get_finished_jobs": "self",
    "has_pending_work": "self",
    "take_events": "self",
    "touch": "self keys req_context",
    "on_new_request": "self req_context",
    "on_request_finished": "self req_context",
    "serve_external_requests": "self parent",
    "on_schedule_end": "self context",
    "drain_jobs": "self",
    "shutdown": "self",
    "build_metric_definitions": "extra_config",
    "get_stats": "self",
}
PARENT = {
    "on_new_request": "self req_context",
    "lookup": "self key req_context",
    "create_store_job": "self keys req_context",
    "on_request_finished": "self req_context",
}
ABSTRACT = {"lookup", "submit_store", "submit_load", "get_finished_jobs", "on_new_request", "drain_jobs"}
FIELDS: list[tuple[type[Any], str]] = [
    (TransferJob, "job_id keys chunk_ids is_promotion req_context submit_time"),
    (JobResult, "job_id success successful_keys transfer_time transfer_bytes"),
    (OffloadingGroupConfig, "tokens_per_block layer_names group_id"),
]
USED: list[tuple[type[Any], str]] = [
    (ReqContext, "req_id kv_transfer_params kv_hints load_tier_filter"),
    (OffloadingConfig, "groups model cache parallel replicated_layout canonical_layout kv_cache_layout"),
    (OffloadingParallelConfig, "world_size tp_size pp_size pcp_size dcp_size is_parallelism_agnostic"),
]
MEMBERS: list[tuple[type[Enum], str]] = [
    (LookupResult, "MISS HIT HIT_PENDING RETRY"),
    (Medium, "CPU STORAGE"),
    (Locality, "LOCAL REMOTE"),
]


def test_the_release_is_one_that_was_tested() -> None:
    """Another one may work: the tests here say so."""
    release = tuple(int(part) for part in vllm.__version__.split("+")[0].split(".")[:2])
    assert (0, 32) <= release < (0, 34), f"vLLM {vllm.__version__} was never tested. {MOVED}"


def test_a_tier_is_what_it_was() -> None:
    """Methods, their parameters, and which of them a tier must have."""
    found = {
        name: " ".join(inspect.signature(member).parameters)
        for name, member in inspect.getmembers(SecondaryTierManager, callable)
        if name in METHODS or not name.startswith("_")
    }
    assert found == METHODS, MOVED
    assert SecondaryTierManager.__abstractmethods__ == ABSTRACT, MOVED
    assert not RepriseTier.__abstractmethods__
    found = {name: " ".join(inspect.signature(getattr(ParentManager, name)).parameters) for name in PARENT}
    assert found == PARENT, MOVED


@pytest.mark.parametrize(("kind", "names"), FIELDS, ids=lambda value: getattr(value, "__name__", ""))
def test_what_is_handed_over_is_what_it_was(kind: type[Any], names: str) -> None:
    """All fields: a new one may ask for something."""
    assert " ".join(item.name for item in fields(kind)) == names, MOVED


@pytest.mark.parametrize(("kind", "names"), USED, ids=lambda value: getattr(value, "__name__", ""))
def test_what_is_read_is_there(kind: type[Any], names: str) -> None:
    """Fields that the tier reads; others may come."""
    assert set(names.split()) <= {item.name for item in fields(kind)}, MOVED


@pytest.mark.parametrize(("kind", "names"), MEMBERS, ids=lambda value: getattr(value, "__name__", ""))
def test_the_words_are_what_they_were(kind: type[Enum], names: str) -> None:
    """A new verdict would need an answer."""
    assert {member.name for member in kind} == set(names.split()), MOVED


def test_helpers_are_there() -> None:
    """What names bytes that are interchangeable, per-request state, metrics, hints, and how a tier is found."""
    assert " ".join(inspect.signature(FileMapper.from_offloading_spec).parameters) == (
        "root_dir offloading_spec blocks_per_file parallel_agnostic"
    ), MOVED
    assert " ".join(inspect.signature(ReqContext.get_state).parameters) == "self cls", MOVED
    assert " ".join(inspect.signature(ReqContext.set_state).parameters) == "self val", MOVED
    assert " ".join(inspect.signature(OffloadingConnectorStats.increase_counter).parameters) == (
        "self counter_name counter_increase_value labelvalues"
    ), MOVED
    assert KvHintsEnvelope.__struct_fields__ == ("protocol_version", "message_id", "actions"), MOVED
    assert KvHintAction.__struct_fields__ == ("action_id", "action_type", "action_version", "payload"), MOVED
    tier = SecondaryTierFactory.get_tier_class({"type": "RepriseTier", "module_path": RepriseTier.__module__})
    assert tier is RepriseTier, MOVED
    assert issubclass(TieringOffloadingSpec, OffloadingSpec), MOVED


def test_hits_are_reported_as_those_of_a_disk() -> None:
    """By vLLM's usage of the cache: the source of a hit that this tier served."""
    assert RepriseTier.cache_hit_source.name == "DISK"
