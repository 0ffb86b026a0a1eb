"""The parts of the connector by themselves: pages as bytes, what every rank must have, what is refused, and whether
vLLM's interface is still what they were written for.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    SupportsHMA,
)
from vllm.lora.request import LoRARequest
from vllm.v1.core.sched.output import KVConnectorBlockState, SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig, MambaSpec
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from kvstore.keys import ShardCoordinate, Space, TokenChain, encode_space, tenant_salt
from kvstore.testing import MemoryStore
from kvstore.traffic import AGENT
from tests.support.spaces import a_space
from tests.support.vllm_halves import PAGES, SETTINGS, TOKENS, Ranks, a_request, config_of, full, sliding, tensors_of
from workers.adapters.attachment import OptionError, Terms
from workers.adapters.vllm_connector import RepriseConnector
from workers.adapters.vllm_pages import Pages
from workers.adapters.vllm_space import AdapterDigests, check_supported, make_space
from workers.adapters.vllm_step import Move, Prefix, window_name
from workers.spaces import Spaces

MOVED = (
    "vLLM's interface has moved: read workers/adapters/vllm_connector.py against this release, then change this test"
)

# --- vLLM's interface -------------------------------------------------------------------------------------------------

METHODS = {
    "__init__": "self vllm_config role kv_cache_config",
    "requires_piecewise_for_cudagraph": "extra_config",
    "set_xfer_handshake_metadata_pp_aware": "self metadata",
    "on_new_request": "self request",
    "get_num_new_matched_tokens": "self request num_computed_tokens",
    "update_state_after_alloc": "self request blocks num_external_tokens",
    "build_connector_meta": "self scheduler_output",
    "update_connector_output": "self connector_output",
    "request_finished": "self request block_ids",
    "reset_cache": "self",
    "register_kv_caches": "self kv_caches",
    "get_handshake_metadata": "self",
    "start_load_kv": "self forward_context kwargs",
    "wait_for_layer_load": "self layer_name",
    "save_kv_layer": "self layer_name kv_layer attn_metadata kwargs",
    "wait_for_save": "self",
    "get_transfer_results": "self finished_req_ids",
    "get_block_ids_with_load_errors": "self",
    "shutdown": "self",
}
ABSTRACT = {
    "start_load_kv",
    "wait_for_layer_load",
    "save_kv_layer",
    "wait_for_save",
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "build_connector_meta",
}
USED: list[tuple[type[Any], str]] = [
    (KVConnectorOutput, "finished_recving failed_recving invalid_block_ids"),
    (SchedulerOutput, "num_scheduled_tokens kv_connector_block_state"),
    (KVConnectorBlockState, "get_block_ids"),
    (KVCacheConfig, "num_blocks kv_cache_groups"),
]
OF_REQUEST = (
    "request_id prompt_token_ids all_token_ids num_computed_tokens num_prompt_tokens num_tokens lora_request "
    "mm_features cache_salt kv_transfer_params kv_hints prompt_embeds resumable skip_reading_prefix_cache"
)


def test_the_interface_of_a_connector_is_the_one_that_was_written_for() -> None:
    """Names, parameters and abstract methods of vLLM's base class, and what is read of its messages."""
    for name, expected in METHODS.items():
        found = " ".join(inspect.signature(getattr(KVConnectorBase_V1, name)).parameters)
        assert found == expected, f"{vllm.__version__}: {name}({found}). {MOVED}"
        assert hasattr(RepriseConnector, name)
    assert set(KVConnectorBase_V1.__abstractmethods__) == ABSTRACT, MOVED
    assert set(SupportsHMA.__abstractmethods__) == {"request_finished_all_groups"}, MOVED
    for kind, names in USED:
        missing = [name for name in names.split() if name not in {*dir(kind), *getattr(kind, "__annotations__", ())}]
        assert not missing, f"{vllm.__version__}: {kind.__name__} lacks {missing}. {MOVED}"
    source = inspect.getsource(Request)
    missing = [name for name in OF_REQUEST.split() if not re.search(rf"self\.{name}\b|def {name}\(", source)]
    assert not missing, f"{vllm.__version__}: a request lacks {missing}. {MOVED}"


# --- pages ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("split", [1, 2], ids=["whole pages", "pages in two parts"])
def test_pages_come_back_as_they_were_and_no_other_is_written(split: int) -> None:
    """Blocks and windows that are copied out of one request's pages and into another's are the same bits there."""
    config = config_of(a_1_3=full(), b_0_2=sliding(6))
    mine, other = tensors_of(config, split), tensors_of(config, split)
    source, target = Pages.of(mine, config, TOKENS), Pages.of(other, config, TOKENS)
    before = {name: tensor.clone() for name, tensor in other.items()}
    from_tables, to_tables = ((1, 2, 3, 4), (0, 0, 5, 6)), ((7, 8, 9, 10), (0, 0, 11, 1))
    blocks, state = bytearray(2 * source.block_bytes), bytearray(source.state_bytes(4))
    source.read_blocks(from_tables, [1, 3], memoryview(blocks))
    source.read_state(from_tables, 4, memoryview(state))
    for tensor in mine.values():
        tensor.zero_()  # what was read out is a copy
    target.write_blocks(to_tables, [1, 3], memoryview(blocks))
    assert target.write_state(to_tables, 3, 4, memoryview(state))
    again, written = bytearray(len(blocks)), bytearray(len(state))
    target.read_blocks(to_tables, [1, 3], memoryview(again))
    target.read_state(to_tables, 4, memoryview(written))
    assert again == blocks
    half = len(state) // 4
    assert written[half : 2 * half] == state[half : 2 * half]
    changed = {
        (name, page)
        for name, tensor in other.items()
        for page in range(PAGES)
        if not torch.equal(tensor.unflatten(0, (PAGES, -1))[page], before[name].unflatten(0, (PAGES, -1))[page])
    }
    globals_, windows = ("model.layers.1.attn", "model.layers.3.attn"), ("model.layers.0.attn", "model.layers.2.attn")
    assert changed == {(name, page) for name in globals_ for page in (8, 10)} | {(name, 1) for name in windows}


def test_a_window_that_is_not_whole_is_not_saved() -> None:
    """A page that vLLM let go, since no later token looks at it, makes the state impossible; so does a wrong size."""
    config = config_of(a_1=full(), b_0=sliding(6))
    pages = Pages.of(tensors_of(config), config, TOKENS)
    assert pages.has_state(((1, 2, 3), (0, 4, 5)), 3)
    assert not pages.has_state(((1, 2, 3), (0, 0, 5)), 3)
    assert not pages.write_state(((1, 2, 3), (0, 4, 5)), 0, 3, memoryview(bytearray(5)))


def test_layers_that_share_a_tensor_are_all_kept() -> None:
    """vLLM packs layers of several groups into one tensor: each group has its own pages there."""
    config = config_of(a_1=full(), b_0=sliding(6))
    shared = tensors_of(config)["model.layers.0.attn"]
    pages = Pages.of({"model.layers.0.attn": shared, "model.layers.1.attn": shared}, config, TOKENS)
    assert [layer.name for layer in pages.blocks + pages.windows] == ["model.layers.1.attn", "model.layers.0.attn"]


# --- the space, and what is refused -----------------------------------------------------------------------------------


def vllm_config(**changes: Any) -> Any:
    """As much of vLLM's configuration as is read."""
    values: dict[str, Any] = {
        "policy": "recompute", "method": None, "contexts": 1, "rank": 0, "tensor": 1, "pipeline": 1,
        "dtype": "torch.float32", "quantization": None, "overrides": {}, "cache_dtype": "auto",
    } | changes  # fmt: skip
    method = values["method"]
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(kv_load_failure_policy=values["policy"]),
        parallel_config=SimpleNamespace(
            decode_context_parallel_size=values["contexts"],
            prefill_context_parallel_size=1,
            tensor_parallel_size=values["tensor"],
            pipeline_parallel_size=values["pipeline"],
            rank=values["rank"],
        ),
        speculative_config=None if method is None else SimpleNamespace(method=method),
        cache_config=SimpleNamespace(block_size=TOKENS, cache_dtype=values["cache_dtype"]),
        model_config=SimpleNamespace(
            model="tiny",
            dtype=values["dtype"],
            quantization=values["quantization"],
            revision=None,
            hf_overrides=values["overrides"],
        ),
        load_config=SimpleNamespace(load_format="auto"),
    )


def space_of(layout: str = "A/1x2", **changes: Any) -> Space:
    config = config_of(a_1_3=full(), b_0_2=sliding(6))
    return make_space(vllm_config(**changes), config, {"model.layers.1.attn": layout}, SETTINGS)


def test_wrong_options_are_refused_before_a_model_is_loaded() -> None:
    """vLLM shows the options when it asks what CUDA graphs are possible with this connector."""
    for options in ({}, {"access_log": "vllm-access.jsonl"}, {"keep_windows": True}):
        assert not RepriseConnector.requires_piecewise_for_cudagraph({"store": "unix:/s", **options})
    with pytest.raises(OptionError, match="unknown option stroe"):
        RepriseConnector.requires_piecewise_for_cudagraph({"stroe": "unix:/s"})


def test_whatever_changes_the_meaning_of_bytes_changes_the_space() -> None:
    """Rank, data types, quantisation, overrides and page layout each make another space; nothing else is in doubt."""
    spaces = [
        space_of(),
        space_of(layout="B/1x2"),
        space_of(dtype="torch.bfloat16"),
        space_of(quantization="fp8"),
        space_of(cache_dtype="fp8"),
        space_of(overrides={"rope_theta": 1.0}),
        space_of(rank=1, tensor=2),
        space_of(rank=0, tensor=2),
        space_of(rank=1, pipeline=2),
    ]
    assert len({encode_space(space) for space in spaces}) == len(spaces)
    assert space_of() == space_of()
    assert spaces[6].shard == ShardCoordinate(1, 2, 0, 1)
    assert spaces[8].shard == ShardCoordinate(0, 1, 1, 2)
    assert space_of(rank=3, tensor=2, pipeline=2).shard == ShardCoordinate(1, 2, 1, 2)
    assert [(group.window, group.layers) for group in space_of().groups] == [(0, (1, 3)), (6, (0, 2))]


@pytest.mark.parametrize(
    ("config", "caches", "told"),
    [
        (vllm_config(policy="fail"), config_of(a_0=full()), "kv_load_failure_policy"),
        (vllm_config(contexts=2), config_of(a_0=full()), "context parallelism"),
        (vllm_config(method="eagle"), config_of(a_0=full()), "'eagle'"),
        (vllm_config(), config_of(a_0=sliding(6)), "all layers slide"),
        (vllm_config(), config_of(a_0=full(block_size=8)), "blocks of 8 tokens"),
        (
            vllm_config(),
            config_of(a_0=MambaSpec(block_size=TOKENS, shapes=((1,),), dtypes=(torch.float32,))),
            "KV of kind MambaSpec",
        ),
    ],
)
def test_what_would_be_stored_wrongly_is_refused(config: Any, caches: KVCacheConfig, told: str) -> None:
    """At start, and by name."""
    with pytest.raises(OptionError, match=told):
        check_supported(config, caches)


def test_an_adapter_is_known_by_its_files(tmp_path: Path) -> None:
    """Asking never waits; the digest follows the content, and a path without files has none."""
    digests, path = AdapterDigests(), tmp_path / "lora"
    path.mkdir()
    assert digests.of(adapter(path, 1)) is None
    (path / "adapter_model.safetensors").write_bytes(b"one")
    first = wait_for(lambda: digests.of(adapter(path, 1)))
    assert len(first) == 32
    (path / "adapter_model.safetensors").write_bytes(b"other")
    assert wait_for(lambda: digests.of(adapter(path, 2))) != first


def test_an_adapter_whose_files_change_under_one_number_has_no_digest(tmp_path: Path) -> None:
    """vLLM may compute with what it read before, or with what it reads again: neither may be stored as the other."""
    digests, path = AdapterDigests(), tmp_path / "lora"
    path.mkdir()
    (path / "adapter_model.safetensors").write_bytes(b"one")
    wait_for(lambda: digests.of(adapter(path, 1)))
    (path / "adapter_model.safetensors").write_bytes(b"other")
    wait_for(lambda: digests.of(adapter(path, 2)))
    assert digests.of(adapter(path, 1)) is None


def adapter(path: Path, number: int) -> LoRARequest:
    return LoRARequest(f"adapter-{number}", number, str(path))


def wait_for(call: Any) -> Any:
    while (found := call()) is None:
        pass
    return found


# --- the scheduler's half ---------------------------------------------------------------------------------------------


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    both = Ranks(config_of(a_0_1=full()))
    yield both
    both.half.close()


TOKEN_IDS = list(range(100, 122))


def test_another_connector_cannot_speak_for_ours(ranks: Ranks) -> None:
    """Beside others in a MultiConnector, ours is refused unless it is the one whose introduction vLLM hands on."""
    with pytest.raises(OptionError, match="name RepriseConnector first"):
        ranks.half.meet([KVConnectorHandshakeMetadata()])


def test_ranks_agree_on_one_length(ranks: Ranks) -> None:
    """What one rank lacks is a hit of none: a length is promised that every rank can load."""
    ranks.put(0, TOKEN_IDS, [0, 1, 2, 3, 4])
    ranks.put(1, TOKEN_IDS, [0, 1, 2, 4])
    request = a_request(TOKEN_IDS)
    ranks.half.arrive(request)
    assert ranks.matched(request) == (3 * TOKENS, True)
    assert ranks.matched(request) == (3 * TOKENS, True)  # asking changes nothing
    assert ranks.matched(request, computed=3 * TOKENS) == (0, False)  # vLLM has as much itself
    assert ranks.matched(request, computed=TOKENS) == (2 * TOKENS, True)


@pytest.mark.parametrize(
    "changes",
    [
        {"cache_salt": "salt"},
        {"kv_transfer_params": {"reprise_tenant": "alice"}},
        {
            "mm_features": [
                SimpleNamespace(identifier="ab" * 32, modality="image", mm_position=SimpleNamespace(offset=2))
            ]
        },
        {"mm_features": [SimpleNamespace(identifier="mine", modality="image", mm_position=SimpleNamespace(offset=2))]},
        {"prompt_embeds": object()},
        {"lora_request": SimpleNamespace(lora_path="", lora_int_id=1)},
        {"resumable": True},
        {"skip_reading_prefix_cache": True},
    ],
    ids=["salt", "tenant", "image", "image of unknown content", "embeddings", "adapter", "session", "logprobs"],
)
def test_tokens_alone_do_not_make_a_hit(ranks: Ranks, changes: dict[str, Any]) -> None:
    """Blocks of plain tokens are not found by a request whose KV depends on more, or that must not read any."""
    for rank in range(2):
        ranks.put(rank, TOKEN_IDS, [0, 1, 2])
    request = a_request(TOKEN_IDS, **changes)
    ranks.half.arrive(request)
    assert ranks.matched(request) == (0, False)


def test_what_takes_longer_to_load_than_to_compute_is_declined() -> None:
    """By the store's estimate of the load and the engine's speed; the access log says so."""
    both = Ranks(config_of(a_0=full()), compute_tokens_per_s=1000.0)
    both.store.load_s_estimate = 1.0
    for rank in range(2):
        both.put(rank, TOKEN_IDS, [0, 1, 2])
    request = a_request(TOKEN_IDS)
    both.half.arrive(request)
    assert both.matched(request) == (0, False)
    both.half.admit(request, SimpleNamespace(get_block_ids=lambda: ([1, 2, 3, 4, 5, 6],)), 0)
    reuse = both.half._requests["r"].reuse
    assert reuse is not None
    assert (reuse.reason, reuse.stored, reuse.reused) == ("declined", 3, 0)
    both.half.close()


@pytest.mark.parametrize(("loads", "saves"), [(True, False), (False, True)], ids=["consumer", "producer"])
def test_a_role_only_loads_or_only_saves(loads: bool, saves: bool) -> None:
    """As vLLM's ``kv_role`` says."""
    both = Ranks(config_of(a_0=full()), loads=loads, saves=saves)
    for rank in range(2):
        both.put(rank, TOKEN_IDS, [0, 1])
    request = a_request(list(TOKEN_IDS))
    both.half.arrive(request)
    assert both.matched(request) == ((2 * TOKENS, True) if loads else (0, False))
    state = KVConnectorBlockState({"r"}, lambda name: ([1, 2, 3, 4, 5, 6],), {})
    step = both.half.step(SimpleNamespace(num_scheduled_tokens={"r": 20}, kv_connector_block_state=state))
    assert bool(step.saves) is saves
    both.half.close()


def test_a_kept_window_goes_with_its_prefix() -> None:
    """It is the child of the block that it ends with, so a purge by prefix takes it, and it lies on the same node."""
    space = Spaces(a_space(block_tokens=TOKENS), MemoryStore()).of(None)
    chain = TokenChain(space.id, TOKENS, range(20 * TOKENS))
    for boundary in (1, 16, 17, 20):
        name, last = window_name(chain, boundary), chain.names[boundary - 1]
        assert (name.parent, name.route, name.index) == (last.key, last.route, last.index + 1)
        assert name.key not in {block.key for block in chain.names}
    assert len({window_name(chain, boundary).key for boundary in range(1, 21)}) == 20


def test_a_reset_leaves_everything_behind(ranks: Ranks) -> None:
    """When vLLM says that caches are stale, what is stored is not found any more by this engine."""
    for rank in range(2):
        ranks.put(rank, TOKEN_IDS, [0, 1])
    ranks.half.reset()
    request = a_request(TOKEN_IDS)
    ranks.half.arrive(request)
    assert ranks.matched(request) == (0, False)


def test_blocks_are_saved_once_and_only_when_known(ranks: Ranks) -> None:
    """A step saves what it completes of tokens that are known; blocks that the store has are not sent again."""
    for rank in range(2):
        ranks.put(rank, TOKEN_IDS, [0])
    request = a_request(list(TOKEN_IDS))
    ranks.half.arrive(request)
    assert ranks.matched(request)[0] == TOKENS
    ranks.half.admit(request, SimpleNamespace(get_block_ids=lambda: ([1, 2, 3, 4, 5, 6],)), TOKENS)
    saves = []
    for before, scheduled in ((TOKENS, 10), (14, 8), (22, 1), (23, 1), (24, 1)):
        request.num_computed_tokens = before
        state = KVConnectorBlockState({"r"}, lambda name: ([1, 2, 3, 4, 5, 6, 7],), {})
        step = ranks.half.step(SimpleNamespace(num_scheduled_tokens={"r": scheduled}, kv_connector_block_state=state))
        saves.append([list(move.blocks) for move in step.saves])
        if before == 23:
            request.all_token_ids.append(5)
            request.all_token_ids.append(6)
    assert saves == [[[1, 2]], [[3, 4]], [], [], [[5]]]


def test_a_request_whose_load_failed_is_not_looked_up_again(ranks: Ranks) -> None:
    """The verdict is a miss from then on, and its blocks are offered anew."""
    for rank in range(2):
        ranks.put(rank, TOKEN_IDS, [0, 1, 2])
    request = a_request(TOKEN_IDS)
    ranks.half.arrive(request)
    assert ranks.matched(request) == (3 * TOKENS, True)
    ranks.half.admit(request, SimpleNamespace(get_block_ids=lambda: ([7, 8, 9, 10],)), 3 * TOKENS)
    ranks.half.hear(KVConnectorOutput(invalid_block_ids={9}))
    ranks.half.hear(KVConnectorOutput(finished_recving={"r"}))
    assert ranks.matched(request) == (0, False)
    reuse = ranks.half._requests["r"].reuse
    assert reuse is not None
    assert (reuse.reused, reuse.reason) == (2, "loading it failed")
    assert reuse.missed is not None
    assert reuse.missed[0].index == 2
    blocks, _ = ranks.half._due(ranks.half._requests["r"], 0, len(TOKEN_IDS))
    assert blocks == [0, 1, 2, 3, 4]


def test_windows_are_saved_by_the_step_that_comes_to_them() -> None:
    """At a prompt's end (and a block before, where it ends with one), whatever the steps, then once a window of the
    answer.
    """
    half = Ranks(config_of(a_0=full(), b_1=sliding(9))).half
    request = a_request(list(range(200, 214)))
    half.arrive(request)
    tracked = half._requests["r"]
    assert half._due(tracked, 0, 7) == ([0], ())
    assert half._due(tracked, 7, 13) == ([1, 2], (3,))
    assert half._due(tracked, 13, 14) == ([], ())
    request.all_token_ids += range(40)
    due = [half._due(tracked, computed - 1, computed)[1] for computed in range(15, 32)]
    assert [states for states in due if states] == [(5,), (7,)]
    whole = a_request(list(range(300, 312)), "whole")
    half.arrive(whole)
    assert half._due(half._requests["whole"], 0, 12) == ([0, 1, 2], (2, 3))
    half.close()


def test_a_move_names_blocks_by_tokens_and_terms() -> None:
    """The same message gives each rank keys of its own, under the tenant of the request."""
    prefix = Prefix(TOKEN_IDS, (), Terms("alice", AGENT), b"adapter")
    move = Move("r", prefix, ((1, 2),), [0, 1], 2)
    both = Ranks(config_of(a_0=full()))
    assert both.half._attached is not None
    spaces = [move.prefix.space_in(both.half._attached.spaces, base) for base in both.bases]
    assert all(space.space.tenant_salt == tenant_salt("alice") for space in spaces)
    assert all(space.space.adapter_digest == b"adapter" for space in spaces)
    keys = [move.prefix.chain_in(space).names[0].key for space in spaces]
    assert keys[0] != keys[1]
    assert np.array_equal(move.prefix.chain_in(spaces[0]).tokens, TOKEN_IDS)
    both.half.close()
