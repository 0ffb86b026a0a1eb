"""Scatter: a contiguous payload into chosen slots of every plane, on a GPU; the inverse of ``kernels.gather``.

Owns the Triton kernel and its launcher; ``kernels.reference.scatter_reference`` says what it does. Legend as there.

    program (n, p, w):   memory[p, slots[n], w ...]  <-  source[n // T, p, n % T, w ...]
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.gather import ROW_ELEMENTS_MAX, widen


@triton.jit
def _scatter_kernel(source, slots, memory, tokens, planes, width, plane_stride, BLOCK_W: tl.constexpr):  # type: ignore[no-untyped-def]
    token, plane = tl.program_id(0), tl.program_id(1)
    columns = tl.program_id(2) * BLOCK_W + tl.arange(0, BLOCK_W)
    inside = columns < width
    slot = tl.load(slots + token)
    block, offset = token // tokens, token % tokens
    origin = source + ((block.to(tl.int64) * planes + plane) * tokens + offset) * width
    target = memory + plane.to(tl.int64) * plane_stride + slot * width
    tl.store(target + columns, tl.load(origin + columns, mask=inside), mask=inside)


def scatter(source_BPTW: torch.Tensor, slots_N: torch.Tensor, memory_PSW: torch.Tensor) -> None:
    """Launch: strides are asserted; slots must be distinct and inside memory (the caller's tables are)."""
    memory, source = widen(memory_PSW, source_BPTW)
    blocks, planes, tokens, width = source.shape
    assert memory.shape[0] == planes and memory.shape[2] == width, "memory and payload differ in planes or width"
    assert memory.stride(2) == 1 and memory.stride(1) == width, "a token of a plane must be contiguous, tokens dense"
    assert source.is_contiguous() and slots_N.is_contiguous() and slots_N.dtype == torch.long
    assert slots_N.numel() == blocks * tokens, "one slot for each token of the payload"
    block_w = min(triton.next_power_of_2(width), ROW_ELEMENTS_MAX)
    grid = (blocks * tokens, planes, triton.cdiv(width, block_w))
    _scatter_kernel[grid](source, slots_N, memory, tokens, planes, width, memory.stride(0), BLOCK_W=block_w)
