"""Attention over slots: one packed forward of several sequences, each seeing only its own KV.

Owns the plan of a layer (which rows belong to which sequence, which slots they may see, which they write) and the
attention function that transformers calls. Does not know about models, weights or what a block is.
Invariants: a query at position i of a sequence sees keys [max(window_floor, i-W+1), i] in a sliding layer and [0, i] in
a global one; what is absent is masked, never zero-filled; rows of one sequence never see another's slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.modeling_utils import AttentionInterface

from kernels.attention import attend
from workers.batch import Slice
from workers.geometry import UnsupportedModel

NAME = "reprise_slots"
"""Name of the attention function in transformers' registry. No mask is registered under it, so models build none."""


@dataclass(frozen=True, slots=True)
class Span:
    """One sequence's rows [row_begin, row_end) of the packed forward and the keys that they may see.

    Keys lie in ``key_count`` consecutive slots from ``first_slot`` on, or, where that is None, in ``key_slots``.
    ``mask`` is None where every key is visible, or where plain causality (``causal``) says it all.
    """

    row_begin: int
    row_end: int
    key_count: int
    first_slot: int | None
    key_slots: torch.Tensor | None
    mask: torch.Tensor | None
    causal: bool

    def read(self, memory_SHD: torch.Tensor) -> torch.Tensor:
        """The span's keys or values [T, H, D]: a view where the slots are consecutive, else a copy."""
        if self.first_slot is not None:
            return memory_SHD[self.first_slot : self.first_slot + self.key_count]
        assert self.key_slots is not None, "a span has a first slot or a list of slots"
        return memory_SHD.index_select(0, self.key_slots)


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """What one layer does in one forward: ``write_rows`` None means that all rows are written, in order."""

    spans: tuple[Span, ...]
    write_rows: torch.Tensor | None
    write_slots: torch.Tensor


def plan_global(slices: Sequence[Slice], device: torch.device) -> LayerPlan:
    """Plan of the global layers: all earlier keys, and no write below the slice's ``write_floor``."""
    return _plan(slices, device, window=0)


def plan_sliding(slices: Sequence[Slice], window: int, device: torch.device) -> LayerPlan:
    """Plan of the sliding layers: keys of the window that are present, and every row written."""
    return _plan(slices, device, window=window)


def _plan(slices: Sequence[Slice], device: torch.device, window: int) -> LayerPlan:
    spans: list[Span] = []
    rows: list[int] = []
    slots: list[int] = []
    row = 0
    for item in slices:
        end_row = row + len(item.tokens)
        spans.append(_span(item, row, end_row, window, device))
        written = item.start if window else min(max(item.start, item.write_floor), item.end)
        rows.extend(range(row + written - item.start, end_row))
        slots.extend(item.table.slots(written, item.end))
        row = end_row
    write_rows = None if len(rows) == row else torch.tensor(rows, dtype=torch.long, device=device)
    return LayerPlan(tuple(spans), write_rows, torch.tensor(slots, dtype=torch.long, device=device))


def _span(item: Slice, row: int, end_row: int, window: int, device: torch.device) -> Span:
    begin = max(item.window_floor, item.start - window + 1, 0) if window else 0
    count = item.end - begin
    first_slot = item.table.first_slot(begin, item.end)
    key_slots = None
    if first_slot is None:
        key_slots = torch.tensor(item.table.slots(begin, item.end), dtype=torch.long, device=device)
    narrow = bool(window) and count > window
    causal = begin == item.start and not narrow
    mask = None
    if len(item.tokens) > 1 and not causal:
        queries = torch.arange(item.start, item.end, device=device)[:, None]
        keys = torch.arange(begin, item.end, device=device)[None]
        mask = keys <= queries
        if narrow:
            mask &= keys > queries - window
    return Span(row, end_row, count, first_slot, key_slots, mask, causal and len(item.tokens) > 1)


def slot_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    plans: Sequence[LayerPlan] | None = None,
    **_ignored: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function behind ``NAME``.

    Shapes: query [1, heads, rows, dim]; key and value are the layer's whole slots [slots, heads, dim], as the cache
    layers hand them out; the result is [1, rows, heads, dim].
    """
    if plans is None or attention_mask is not None:
        raise UnsupportedModel(
            f"{type(module).__name__} brings a mask of its own, or does not hand keyword arguments to its attention"
        )
    spans = plans[int(module.layer_idx)].spans  # type: ignore[arg-type]
    heads, rows, dim = query.shape[1:]
    out_RHD = query.new_empty(rows, heads, dim)
    for span in spans:
        out_RHD[span.row_begin : span.row_end] = attend(
            query[0, :, span.row_begin : span.row_end],
            span.read(key),
            span.read(value),
            scaling=scaling,
            mask_NT=span.mask,
            causal=span.causal,
            softcap=softcap,
            sinks_H=s_aux,
        )
    return out_RHD[None], None


def register() -> None:
    """Make the attention function known to transformers; doing it again changes nothing."""
    AttentionInterface.register(NAME, slot_attention)
