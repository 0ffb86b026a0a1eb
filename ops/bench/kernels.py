"""How fast the kernels move blocks between slots and payloads on this machine's GPU, beside the torch reference.

Owns the measurement. Without a GPU it says so and measures nothing: the interpreter's speed means nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from kernels.dispatch import REFERENCE, Moves, moves_for

PLANES, KV_WIDTH, BLOCK_TOKENS, SLOTS = 64, 1024, 64, 65_536
"""32 layers of 8 heads x 128, keys and values; blocks of 64 tokens."""
ROUNDS = 20
PLANES_MEASURED = 16
"""Planes of the memory that is allocated (2 GiB in bf16); the figure a byte does not depend on their number."""


@dataclass(frozen=True, slots=True)
class Row:
    """Median time of one call and bytes moved a second (payload bytes, counted once)."""

    op: str
    moves: str
    blocks: int
    call_us: float
    payload_gb_s: float

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def run() -> list[Row] | None:
    """Rows for gather, scatter, packing and unpacking, by the kernels and by the reference; None without a GPU."""
    if not torch.cuda.is_available():
        return None
    device = torch.device("cuda")
    generator = torch.Generator(device).manual_seed(1)
    shape = (PLANES_MEASURED, SLOTS, KV_WIDTH)
    memory = torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)
    pages = torch.randperm(SLOTS // BLOCK_TOKENS, generator=generator, device=device)
    rows: list[Row] = []
    for blocks in (1, 16, 256):
        slots = (pages[:blocks, None] * BLOCK_TOKENS + torch.arange(BLOCK_TOKENS, device=device)).flatten()
        payload = torch.empty((blocks, PLANES_MEASURED, BLOCK_TOKENS, KV_WIDTH), dtype=memory.dtype, device=device)
        for moves in (moves_for(device), REFERENCE):
            rows += _measure(moves, memory, slots, payload)
    return rows


def _measure(moves: Moves, memory: torch.Tensor, slots: torch.Tensor, payload: torch.Tensor) -> list[Row]:
    flat = payload.view(-1, KV_WIDTH)
    packed, scales = moves.quantize(flat)
    calls: dict[str, Callable[[], object]] = {
        "gather": lambda: moves.gather(memory, slots, payload),
        "scatter": lambda: moves.scatter(payload, slots, memory),
        "quantize": lambda: moves.quantize(flat),
        "dequantize": lambda: moves.dequantize(packed, scales, memory.dtype),
    }
    payload_bytes = payload.numel() * payload.element_size()
    rows = []
    for op, call in calls.items():
        seconds = _median_s(call)
        rows.append(Row(op, moves.name, payload.shape[0], seconds * 1e6, payload_bytes / seconds / 1e9))
    return rows


def _median_s(call: Callable[[], object]) -> float:
    call()
    times: list[float] = []
    for _ in range(ROUNDS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return sorted(times)[ROUNDS // 2]
