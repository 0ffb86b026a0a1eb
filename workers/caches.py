"""Cache layers for transformers that write into a worker's slots.

Owns the write of freshly computed keys and values. Does not know about attention's masks or about bytes. Invariants: a
global layer serves stored KV below the write floor and drops what was recomputed there (appending it instead is never
exact); keys are written once, at their true positions, since RoPE is already in them.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from workers.attention import LayerPlan
from workers.layout import KvMemory


class SlotLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """One layer of one forward: writes the planned rows, hands the layer's whole slots to attention."""

    is_sliding = False

    def __init__(self, keys_SHD: torch.Tensor, values_SHD: torch.Tensor, plan: LayerPlan) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.is_initialized = True
        self._keys_SHD = keys_SHD
        self._values_SHD = values_SHD
        self._plan = plan

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing: the slots exist already."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_args: Any, **_kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write new keys and values [1, heads, rows, dim] to their slots; returns all slots [slots, heads, dim]."""
        plan = self._plan
        if plan.write_slots.numel():
            for memory_SHD, new in ((self._keys_SHD, key_states), (self._values_SHD, value_states)):
                rows_RHD = new[0].transpose(0, 1)
                if plan.write_rows is not None:
                    rows_RHD = rows_RHD.index_select(0, plan.write_rows)
                memory_SHD.index_copy_(0, plan.write_slots, rows_RHD)
        return self._keys_SHD, self._values_SHD

    def get_seq_length(self) -> int:
        """0: positions are always passed to the model explicitly, several sequences have no one length."""
        return 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def get_max_length(self) -> int:
        return -1


class StoredGlobalLayer(SlotLayer):  # type: ignore[no-untyped-call]
    """A global layer: rows below the write floor are not in its plan, so the stored KV stays as it is."""


class ReplaySlidingLayer(SlotLayer):  # type: ignore[no-untyped-call]
    """A sliding layer: every row is written, replayed ones too, since windows are not kept on SSD."""

    is_sliding = True


def slot_cache(memory: KvMemory, plans: list[LayerPlan]) -> Cache:
    """The cache of one forward: one layer object a layer, over the memory's tensors."""
    sliding = set(memory.geometry.sliding_group.layers) if memory.geometry.sliding_group else set()
    layers: list[Any] = []
    for index, plan in enumerate(plans):
        kind = ReplaySlidingLayer if index in sliding else StoredGlobalLayer
        layers.append(kind(memory.keys(index), memory.values(index), plan))
    return Cache(layers=layers)
