"""Which implementation of the moves serves a device; decided once, here.

Owns the choice. Does not know about models or blocks. On a CUDA device the Triton kernels serve, everywhere else the
torch reference; triton is imported only when it serves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from kernels.reference import dequantize_reference, gather_reference, quantize_reference, scatter_reference


@dataclass(frozen=True, slots=True)
class Moves:
    """The ops between slots and payloads; shapes as in ``kernels.reference``."""

    name: str
    gather: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]
    scatter: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]
    quantize: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
    dequantize: Callable[[torch.Tensor, torch.Tensor, torch.dtype], torch.Tensor]


REFERENCE = Moves("reference", gather_reference, scatter_reference, quantize_reference, dequantize_reference)


def moves_for(device: torch.device) -> Moves:
    """The moves that serve ``device``."""
    if device.type != "cuda":
        return REFERENCE
    from kernels.gather import gather
    from kernels.quantize import dequantize, quantize
    from kernels.scatter import scatter

    return Moves("triton", gather, scatter, quantize, dequantize)
