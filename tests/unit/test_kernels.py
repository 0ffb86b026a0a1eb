"""Kernels against their references in Triton's interpreter, references against arithmetic, and the choice of one."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kernels.attention import attend
from kernels.dispatch import REFERENCE, moves_for
from kernels.reference import GROUP_CHANNELS, dequantize_reference, quantize_reference

ROOT = Path(__file__).parents[2]
MOVES = [
    f"{op}-{shape}-{dtype}"
    for op in ("gather", "scatter")
    for shape in ("narrow", "odd", "block", "wide")
    for dtype in ("float32", "float16", "bfloat16", "uint8")
]
PACKING = [f"{op}-{w}-{d}" for op in ("quantize", "dequantize") for w in (16, 48, 2048) for d in ("float32", "float16")]


@functools.cache
def interpreted() -> dict[str, str]:
    """All cases in one process: triton takes seconds to import."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.interpret_kernels"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("case", [*MOVES, *PACKING, "e4m3-every-value"])
def test_kernel_equals_reference_in_the_interpreter(case: str) -> None:
    """Moves are byte-exact for every dtype; packing and unpacking give the same bits, ties and subnormals included."""
    assert interpreted()[case] == ""


def test_the_interpreter_ran_every_case() -> None:
    """No case is listed here and missing there, or the other way round."""
    assert set(interpreted()) == {*MOVES, *PACKING, "e4m3-every-value"}


COMPILE = """
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
import triton
from kernels import gather, quantize, scatter
move = {"slots": "*i64", **dict.fromkeys(["tokens", "planes", "width", "plane_stride"], "i32"), "BLOCK_W": "constexpr"}
pack = {"packed": "*u8", "scales": "*fp32", "rows": "*bf16", "groups": "i32", "BLOCK_G": "constexpr", "C": "constexpr"}
kernels = [
    (gather._gather_kernel, {**move, "memory": "*i64", "out": "*i64"}, {"BLOCK_W": 256}),
    (scatter._scatter_kernel, {**move, "memory": "*i64", "source": "*i64"}, {"BLOCK_W": 256}),
    (quantize._quantize_kernel, {**pack, "PEAK": "constexpr"}, {"PEAK": 448.0, "BLOCK_G": 16, "C": 16}),
    (quantize._dequantize_kernel, pack, {"BLOCK_G": 16, "C": 16}),
]
for kernel, types, constants in kernels:
    signature = {name: types[name] for name in kernel.arg_names}
    for arch in (80, 90):
        made = triton.compile(ASTSource(kernel, signature, constexprs=constants), target=GPUTarget("cuda", arch, 32))
        print(kernel.__name__, arch, len(made.asm["cubin"]))
"""


def test_kernels_compile_for_the_gpus_that_they_are_for(tmp_path: Path) -> None:
    """Each kernel compiles to machine code for sm_80 and sm_90: no GPU needed, and stricter than the interpreter."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE],
        cwd=ROOT,
        env={**environment, "PYTHONPATH": str(ROOT), "TRITON_CACHE_DIR": str(tmp_path), "PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert len(done.stdout.splitlines()) == 8


def test_packing_is_within_its_stated_error() -> None:
    """Worst relative error of a normal value is 2^-4, whatever the channel's size; zeros stay zeros."""
    values = torch.randn(64, 128, generator=torch.Generator().manual_seed(3)) * 10.0 ** torch.arange(-4, 4).repeat(16)
    values[0] = 0
    packed, scales = quantize_reference(values)
    assert packed.dtype == torch.uint8
    assert scales.shape == (64, 128 // GROUP_CHANNELS)
    back = dequantize_reference(packed, scales, torch.float32)
    assert not back[0].any()
    peaks = values.view(64, -1, GROUP_CHANNELS).abs().amax(-1, keepdim=True)
    normal = values.view(64, -1, GROUP_CHANNELS).abs() >= peaks / 448 * 2.0**-6
    error = ((back - values).abs() / values.abs().clamp_min(1e-30)).view(64, -1, GROUP_CHANNELS)
    assert 0.03 < error[normal].max() <= 2.0**-4


def test_the_reference_serves_a_cpu_and_triton_is_not_imported() -> None:
    """The choice is made by the device alone; a CPU worker pays nothing for kernels that it cannot run."""
    assert moves_for(torch.device("cpu")) is REFERENCE
    code = "import sys, workers.layout; assert 'triton' not in sys.modules, 'triton was imported'"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (4, 1)])
def test_the_explicit_attention_path_equals_the_fused_one(heads: tuple[int, int]) -> None:
    """Without softcap and sinks both paths are the same function; a sink of minus infinity changes nothing."""
    generator = torch.Generator().manual_seed(4)
    query = torch.randn(heads[0], 5, 8, generator=generator, dtype=torch.float64)
    keys, values = (torch.randn(9, heads[1], 8, generator=generator, dtype=torch.float64) for _ in range(2))
    mask = torch.arange(9)[None] <= torch.arange(4, 9)[:, None]
    no_sink = torch.full((heads[0],), float("-inf"), dtype=torch.float64)
    fused = attend(query, keys, values, scaling=0.3, mask_NT=mask)
    explicit = attend(query, keys, values, scaling=0.3, mask_NT=mask, sinks_H=no_sink)
    assert torch.allclose(fused, explicit, atol=1e-12, rtol=0)
    with_sink = attend(query, keys, values, scaling=0.3, mask_NT=mask, sinks_H=no_sink.fill_(1.0))
    assert (with_sink - fused).abs().max() > 1e-2
