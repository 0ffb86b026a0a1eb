"""The scheduler's half of vLLM's connector over a store in memory, for two ranks, and what vLLM would hand to it.

Needs vLLM. Owns as much of a request and of a cache configuration as the connector reads.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec

from kvstore.keys import ShardCoordinate, TokenChain, encode_space, tenant_salt
from kvstore.store import BlockPut
from kvstore.testing import MemoryStore
from kvstore.traffic import CHAT
from tests.support.faulty_store import FaultyStore
from tests.support.spaces import a_space
from workers.adapters.attachment import Attachment, Settings
from workers.adapters.vllm_scheduling import Scheduling
from workers.adapters.vllm_step import Rank

TOKENS = 4
PAGES = 12
SETTINGS = Settings(stores=("127.0.0.1:1",), weights_digest=bytes(range(32)))


def full(**changes: Any) -> FullAttentionSpec:
    return FullAttentionSpec(
        **{"block_size": TOKENS, "num_kv_heads": 2, "head_size": 8, "dtype": torch.float32} | changes
    )


def sliding(window: int) -> SlidingWindowSpec:
    return SlidingWindowSpec(block_size=TOKENS, num_kv_heads=2, head_size=8, dtype=torch.float32, sliding_window=window)


def config_of(**groups: Any) -> KVCacheConfig:
    """``a_0_2=spec``: layers 0 and 2 are one group."""
    made = [
        KVCacheGroupSpec([f"model.layers.{number}.attn" for number in name.split("_")[1:]], spec)
        for name, spec in groups.items()
    ]
    return KVCacheConfig(num_blocks=PAGES, kv_cache_tensors=[], kv_cache_groups=made)


def tensors_of(config: KVCacheConfig, split: int = 1) -> dict[str, torch.Tensor]:
    """Random KV [pages, heads, tokens, 2 x dim] whose pages do not lie dense, as when layers share a tensor."""
    names = [name for group in config.kv_cache_groups for name in group.layer_names]
    shape = (PAGES * split, 2, 2, TOKENS // split, 16)
    return {name: torch.rand(shape)[:, 0] for name in names}


class Ranks:
    """The scheduler's half over a store in memory, for two ranks."""

    def __init__(self, caches: KVCacheConfig, *, loads: bool = True, saves: bool = True, **options: Any) -> None:
        self.store = FaultyStore(MemoryStore())
        self.bases = [
            a_space(block_tokens=TOKENS, shard=ShardCoordinate(tensor_rank=rank, tensor_size=2)) for rank in range(2)
        ]
        settings = replace(SETTINGS, lookup_deadline_s=5.0, **options)
        self.half = Scheduling(settings, caches, TOKENS, loads=loads, saves=saves)
        self.half.meet([Rank(encode_space(base)) for base in self.bases])
        assert self.half._attached is not None
        self.half._attached.close(1.0)
        self.half._attached = Attachment(settings, self.store, self.bases[0])

    def put(self, rank: int, tokens: list[int], blocks: list[int], tenant: str | None = None) -> None:
        base = self.bases[rank] if tenant is None else replace(self.bases[rank], tenant_salt=tenant_salt(tenant))
        space = self.store.register_space(base)
        names = TokenChain(space, TOKENS, tokens).names
        self.store.put(space, [BlockPut(names[at], TOKENS, b"x") for at in blocks], traffic_class=CHAT)

    def matched(self, request: Any, computed: int = 0) -> tuple[int | None, bool]:
        tracked = self.half._requests.get(request.request_id)
        if tracked is not None and tracked.asked is not None and tracked.asked._future is not None:
            tracked.asked._future.result(5.0)
        return self.half.match(request, computed)


def a_request(tokens: list[int], name: str = "r", **changes: Any) -> Any:
    values: dict[str, Any] = {
        "request_id": name, "prompt_token_ids": tokens, "all_token_ids": tokens, "num_prompt_tokens": len(tokens),
        "num_tokens": len(tokens), "num_computed_tokens": 0, "lora_request": None, "mm_features": [],
        "cache_salt": None, "kv_transfer_params": None, "kv_hints": None, "prompt_embeds": None, "resumable": False,
        "skip_reading_prefix_cache": False,
    }  # fmt: skip
    return SimpleNamespace(**{**values, **changes})
