"""Packing to fp8 e4m3 with one float32 scale for 16 channels, and back, on a GPU.

Owns the Triton kernels and their launchers; ``kernels.reference`` says what they do. Legend: N rows, W width,
G = W / 16 groups. A scale for 16 channels (and not one a head) keeps a single large channel from flattening the others;
it costs 4 bytes for 16, so packed KV has 1.25 bytes a channel: 0.63 of bf16.

    program (n, block of groups):   scale = max |x| / 448 (1 for zeros);  packed = e4m3(x / scale)
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.reference import FP8_MAX, GROUP_CHANNELS

GROUPS_MAX = 64
"""Groups that one program packs."""


@triton.jit
def _encode_e4m3(scaled):  # type: ignore[no-untyped-def]
    """Bits of the nearest e4m3 value (ties to even) of |scaled| <= 448, by integers on any GPU.

    Normal values (from 2^-6): round 23 mantissa bits to 3, then move the exponent's bias from 127 to 7. Below:
    multiples of 2^-9, rounded by adding and taking away 1.5 x 2^23.
    """
    bits = scaled.to(tl.int32, bitcast=True)
    sign = (bits >> 24) & 0x80
    magnitude = bits & 0x7FFFFFFF
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
    small = ((tl.abs(scaled) * 512.0 + 12582912.0) - 12582912.0).to(tl.int32)
    return (sign | tl.where(magnitude < (121 << 23), small, normal)).to(tl.uint8)


@triton.jit
def _decode_e4m3(packed):  # type: ignore[no-untyped-def]
    """float32 values of e4m3 bits: exact, and by integers for the same reason."""
    bits = packed.to(tl.int32)
    exponent, mantissa = (bits >> 3) & 15, bits & 7
    normal = (((exponent + 120) << 23) | (mantissa << 20)).to(tl.float32, bitcast=True)
    value = tl.where(exponent > 0, normal, mantissa.to(tl.float32) * 0.001953125)
    return tl.where((bits & 0x80) != 0, -value, value)


@triton.jit
def _quantize_kernel(rows, packed, scales, groups, PEAK: tl.constexpr, BLOCK_G: tl.constexpr, C: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * BLOCK_G + tl.arange(0, BLOCK_G)
    inside = group < groups
    places = row * groups * C + group[:, None] * C + tl.arange(0, C)[None, :]
    values = tl.load(rows + places, mask=inside[:, None], other=0.0).to(tl.float32)
    peak = tl.max(tl.abs(values), axis=1)
    scale = tl.where(peak > 0, tl.div_rn(peak, PEAK), 1.0)
    scaled = tl.minimum(tl.maximum(tl.div_rn(values, scale[:, None]), -PEAK), PEAK)
    tl.store(packed + places, _encode_e4m3(scaled), mask=inside[:, None])
    tl.store(scales + row * groups + group, scale, mask=inside)


@triton.jit
def _dequantize_kernel(packed, scales, rows, groups, BLOCK_G: tl.constexpr, C: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * BLOCK_G + tl.arange(0, BLOCK_G)
    inside = group < groups
    places = row * groups * C + group[:, None] * C + tl.arange(0, C)[None, :]
    values = _decode_e4m3(tl.load(packed + places, mask=inside[:, None], other=0))
    scale = tl.load(scales + row * groups + group, mask=inside, other=1.0)
    tl.store(rows + places, (values * scale[:, None]).to(rows.dtype.element_ty), mask=inside[:, None])


def quantize(rows_NW: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Packed uint8 [N, W] and scales float32 [N, G] of contiguous rows whose width is a multiple of 16."""
    count, width = rows_NW.shape
    assert rows_NW.is_contiguous() and width % GROUP_CHANNELS == 0, "rows are contiguous, their width a multiple of 16"
    groups = width // GROUP_CHANNELS
    packed = torch.empty((count, width), dtype=torch.uint8, device=rows_NW.device)
    scales = torch.empty((count, groups), dtype=torch.float32, device=rows_NW.device)
    block_g = min(triton.next_power_of_2(groups), GROUPS_MAX)
    grid = (count, triton.cdiv(groups, block_g))
    _quantize_kernel[grid](rows_NW, packed, scales, groups, PEAK=FP8_MAX, BLOCK_G=block_g, C=GROUP_CHANNELS)
    return packed, scales


def dequantize(packed_NW: torch.Tensor, scales_NG: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Rows [N, W] in ``dtype`` from what ``quantize`` made."""
    count, width = packed_NW.shape
    groups = width // GROUP_CHANNELS
    assert packed_NW.is_contiguous() and packed_NW.dtype == torch.uint8 and width % GROUP_CHANNELS == 0
    assert scales_NG.is_contiguous() and scales_NG.dtype == torch.float32 and scales_NG.shape == (count, groups)
    rows = torch.empty((count, width), dtype=dtype, device=packed_NW.device)
    block_g = min(triton.next_power_of_2(groups), GROUPS_MAX)
    _dequantize_kernel[count, triton.cdiv(groups, block_g)](
        packed_NW, scales_NG, rows, groups, BLOCK_G=block_g, C=GROUP_CHANNELS
    )
    return rows
