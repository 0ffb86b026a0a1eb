"""Torch reference of every kernel: the oracle of their tests, and what serves where there is no GPU.

Owns the meaning of each op. Does not know about models, slots or blocks. Legend of the shape suffixes:

    P planes (layer and key/value)   S slots   N tokens chosen   W width of one token in a plane (heads x head dim)
    B blocks   T tokens of a block   G groups of GROUP_CHANNELS channels in a row

``gather_reference`` and ``scatter_reference`` move bytes only and are exact for every dtype.
"""

from __future__ import annotations

import torch

GROUP_CHANNELS = 16
"""Channels that share one scale of the packed format."""

FP8_MAX = 448.0
"""Largest finite e4m3fn value."""


def gather_reference(memory_PSW: torch.Tensor, slots_N: torch.Tensor, out_BPTW: torch.Tensor) -> None:
    """Copy the chosen slots of every plane into ``out``, where token b*T + t of the choice stands at [b, :, t]."""
    blocks, planes, tokens, width = out_BPTW.shape
    chosen_PNW = memory_PSW.index_select(1, slots_N)
    out_BPTW.copy_(chosen_PNW.view(planes, blocks, tokens, width).transpose(0, 1))


def scatter_reference(source_BPTW: torch.Tensor, slots_N: torch.Tensor, memory_PSW: torch.Tensor) -> None:
    """Inverse of ``gather_reference``: write the tokens of ``source`` into the chosen slots; other slots stay."""
    blocks, planes, tokens, width = source_BPTW.shape
    memory_PSW.index_copy_(1, slots_N, source_BPTW.transpose(0, 1).reshape(planes, blocks * tokens, width))


def quantize_reference(rows_NW: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Pack rows to fp8 e4m3 with one float32 scale for each GROUP_CHANNELS channels.

    Returns (packed uint8 [N, W], scales float32 [N, W / GROUP_CHANNELS]); scale = max |x| / FP8_MAX, 1 for a group of
    zeros. The worst relative error of a normal value is 2^-4 (3 mantissa bits, round to nearest).
    """
    rows, width = rows_NW.shape
    groups_NGC = rows_NW.float().view(rows, width // GROUP_CHANNELS, GROUP_CHANNELS)
    peak_NG = groups_NGC.abs().amax(dim=-1)
    scales_NG = torch.where(peak_NG > 0, peak_NG / FP8_MAX, torch.ones_like(peak_NG))
    scaled = (groups_NGC / scales_NG[..., None]).clamp(-FP8_MAX, FP8_MAX)
    packed = scaled.to(torch.float8_e4m3fn).view(torch.uint8)
    return packed.view(rows, width), scales_NG


def dequantize_reference(packed_NW: torch.Tensor, scales_NG: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Inverse of ``quantize_reference`` up to its rounding: rows [N, W] in ``dtype``."""
    rows, width = packed_NW.shape
    values = packed_NW.view(torch.float8_e4m3fn).float().view(rows, width // GROUP_CHANNELS, GROUP_CHANNELS)
    return (values * scales_NG[..., None]).view(rows, width).to(dtype)
