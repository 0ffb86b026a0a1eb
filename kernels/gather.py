"""Gather: chosen slots of every plane into one contiguous payload, on a GPU.

Owns the Triton kernel and its launcher; ``kernels.reference.gather_reference`` says what it does. Legend as there: P
planes, S slots, N = B x T tokens chosen, W width in elements of one token in one plane.

    program (n, p, w):   out[n // T, p, n % T, w ...]  <-  memory[p, slots[n], w ...]
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

ROW_ELEMENTS_MAX = 1024
"""Elements of a token that one program copies."""


@triton.jit
def _gather_kernel(memory, slots, out, tokens, planes, width, plane_stride, BLOCK_W: tl.constexpr):  # type: ignore[no-untyped-def]
    token, plane = tl.program_id(0), tl.program_id(1)
    columns = tl.program_id(2) * BLOCK_W + tl.arange(0, BLOCK_W)
    inside = columns < width
    slot = tl.load(slots + token)
    source = memory + plane.to(tl.int64) * plane_stride + slot * width
    block, offset = token // tokens, token % tokens
    target = out + ((block.to(tl.int64) * planes + plane) * tokens + offset) * width
    tl.store(target + columns, tl.load(source + columns, mask=inside), mask=inside)


def gather(memory_PSW: torch.Tensor, slots_N: torch.Tensor, out_BPTW: torch.Tensor) -> None:
    """Launch: strides that the kernel assumes are asserted; slots must be inside memory (the caller's tables are)."""
    memory, out = widen(memory_PSW, out_BPTW)
    blocks, planes, tokens, width = out.shape
    assert memory.shape[0] == planes and memory.shape[2] == width, "memory and payload differ in planes or width"
    assert memory.stride(2) == 1 and memory.stride(1) == width, "a token of a plane must be contiguous, tokens dense"
    assert out.is_contiguous() and slots_N.is_contiguous() and slots_N.dtype == torch.long
    assert slots_N.numel() == blocks * tokens, "one slot for each token of the payload"
    block_w = min(triton.next_power_of_2(width), ROW_ELEMENTS_MAX)
    grid = (blocks * tokens, planes, triton.cdiv(width, block_w))
    _gather_kernel[grid](memory, slots_N, out, tokens, planes, width, memory.stride(0), BLOCK_W=block_w)


def widen(memory_PSW: torch.Tensor, payload_BPTW: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """View both as the widest integers that divide a token's bytes: a copy of bytes, four or eight at a time."""
    token_bytes = memory_PSW.shape[2] * memory_PSW.element_size()
    assert memory_PSW.dtype == payload_BPTW.dtype, "memory and payload differ in dtype"
    for dtype in (torch.int64, torch.int32, torch.int16, torch.uint8):
        size = dtype.itemsize
        aligned = all(tensor.data_ptr() % size == 0 for tensor in (memory_PSW, payload_BPTW))
        strides = all(
            stride * memory_PSW.element_size() % size == 0
            for tensor in (memory_PSW, payload_BPTW)
            for stride in tensor.stride()[:-1]
        )
        if token_bytes % size == 0 and aligned and strides:
            return memory_PSW.view(dtype), payload_BPTW.view(dtype)
    raise AssertionError("bytes can always be viewed as bytes")
