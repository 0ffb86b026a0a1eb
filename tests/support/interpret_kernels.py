"""Runs every kernel in Triton's interpreter against its reference; prints one JSON object: case -> "" or what differed.

A process of its own, since TRITON_INTERPRET must be set before triton is imported. The interpreter's bf16 and fp8
arithmetic is wrong, so arithmetic is tested on float32 and float16 rows; moves are tested on every dtype.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable

os.environ["TRITON_INTERPRET"] = "1"

import torch

from kernels.gather import gather
from kernels.quantize import dequantize, quantize
from kernels.reference import dequantize_reference, gather_reference, quantize_reference, scatter_reference
from kernels.scatter import scatter

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16, "uint8": torch.uint8}
SHAPES = {
    "narrow": (2, 20, 1, 3, 3),
    "odd": (3, 40, 2, 5, 33),
    "block": (6, 64, 3, 8, 96),
    "wide": (2, 8, 1, 4, 4100),
}
"""planes, slots, blocks, tokens, width"""


def memory_and_choice(name: str, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    planes, slots, blocks, tokens, width = SHAPES[name]
    generator = torch.Generator().manual_seed(1)
    memory = torch.randint(0, 256, (planes, slots, width * dtype.itemsize), dtype=torch.uint8, generator=generator)
    choice = torch.randperm(slots, generator=generator)[: blocks * tokens].contiguous()
    return memory.view(dtype), choice, torch.zeros((blocks, planes, tokens, width), dtype=dtype)


def check_gather(name: str, dtype: torch.dtype) -> None:
    memory, choice, out = memory_and_choice(name, dtype)
    wanted = out.clone()
    gather(memory, choice, out)
    gather_reference(memory, choice, wanted)
    assert wanted.view(torch.uint8).any()
    assert torch.equal(out.view(torch.uint8), wanted.view(torch.uint8)), "gathered bytes differ"


def check_scatter(name: str, dtype: torch.dtype) -> None:
    memory, choice, source = memory_and_choice(name, dtype)
    gather_reference(memory.flip(1).contiguous(), choice, source)
    wanted = memory.clone()
    before = memory.clone()
    scatter(source, choice, memory)
    scatter_reference(source, choice, wanted)
    assert not torch.equal(memory.view(torch.uint8), before.view(torch.uint8))
    assert torch.equal(memory.view(torch.uint8), wanted.view(torch.uint8)), "scattered bytes differ"


def rows(dtype: torch.dtype, width: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(2)
    values = torch.randn(7, width, generator=generator) * torch.logspace(-3, 2, width)
    values[0, :16] = 0
    values[1, 3] = 3e4
    return values.to(dtype)


def check_quantize(width: int, dtype: torch.dtype) -> None:
    values = rows(dtype, width)
    packed, scales = quantize(values)
    wanted, wanted_scales = quantize_reference(values)
    assert torch.equal(scales, wanted_scales), "scales differ"
    assert torch.equal(packed, wanted), f"{int((packed != wanted).sum())} packed bytes differ"


def check_dequantize(width: int, dtype: torch.dtype) -> None:
    packed, scales = quantize_reference(rows(dtype, width))
    got, wanted = dequantize(packed, scales, dtype), dequantize_reference(packed, scales, dtype)
    assert torch.equal(got, wanted), f"{int((got != wanted).sum())} values differ"


def check_every_e4m3_value(_width: int, _dtype: torch.dtype) -> None:
    codes = torch.tensor([code for code in range(256) if code & 0x7F != 0x7F] + [0, 0], dtype=torch.uint8).view(16, 16)
    ones = torch.ones(16, 1)
    wanted = codes.view(torch.float8_e4m3fn).float()
    assert torch.equal(dequantize(codes, ones, torch.float32), wanted), "a code decodes to another value"
    between = wanted.flatten().sort().values
    middles = ((between[1:] + between[:-1]) / 2)[:248].reshape(31, 8)
    probe = torch.cat([middles, torch.full((31, 8), 448.0)], dim=1)
    assert torch.equal(quantize(probe)[0], quantize_reference(probe)[0]), "a tie rounds another way"


def cases() -> dict[str, Callable[[], None]]:
    found: dict[str, Callable[[], None]] = {}
    for shape in SHAPES:
        for name, dtype in DTYPES.items():
            found[f"gather-{shape}-{name}"] = lambda shape=shape, dtype=dtype: check_gather(shape, dtype)
            found[f"scatter-{shape}-{name}"] = lambda shape=shape, dtype=dtype: check_scatter(shape, dtype)
    for width in (16, 48, 2048):
        for name in ("float32", "float16"):
            dtype = DTYPES[name]
            found[f"quantize-{width}-{name}"] = lambda width=width, dtype=dtype: check_quantize(width, dtype)
            found[f"dequantize-{width}-{name}"] = lambda width=width, dtype=dtype: check_dequantize(width, dtype)
    found["e4m3-every-value"] = lambda: check_every_e4m3_value(16, torch.float32)
    return found


def run(check: Callable[[], None]) -> str:
    try:
        check()
    except AssertionError as error:
        return str(error) or "assertion failed"
    return ""


if __name__ == "__main__":
    print(json.dumps({name: run(check) for name, check in cases().items()}))
