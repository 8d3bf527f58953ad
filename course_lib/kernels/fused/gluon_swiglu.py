"""SwiGLU in Gluon, to be read beside its form in CuTe's DSL (`cute_swiglu`): who owns which number is said in both.

Source: Shazeer, arXiv 2002.05202; Triton, "Gluon".
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from course_lib.hardware.compiler.cases import CompileCase

TILE = 1024  # 128 threads, 8 numbers each


@gluon.jit
def swiglu_gluon_kernel(gate_pointer, up_pointer, out_pointer, TILE: gl.constexpr):
    """One tile of TILE numbers: four warps of 32 threads, and 8 neighbours for each thread."""
    owner: gl.constexpr = gl.BlockedLayout([8], [32], [4], [0])
    places = gl.program_id(0) * TILE + gl.arange(0, TILE, layout=owner)
    g, u = gl.load(gate_pointer + places).to(gl.float32), gl.load(up_pointer + places).to(gl.float32)
    gl.store(out_pointer + places, (g / (1.0 + gl.exp(-g)) * u).to(out_pointer.dtype.element_ty))


def swiglu_gluon(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) · up, on a GPU.

    Args:
        gate, up: of one shape and dtype, contiguous, a multiple of TILE numbers. Computed in float32.

    Raises a ValueError for others: this kernel has no masks.
    """
    if gate.shape != up.shape or gate.dtype != up.dtype or gate.numel() % TILE:
        raise ValueError(
            f"gate has shape {tuple(gate.shape)} and dtype {gate.dtype}, up {tuple(up.shape)} and {up.dtype}; they "
            f"must be alike, and have a multiple of {TILE} numbers."
        )
    gate, up = gate.contiguous(), up.contiguous()
    out = torch.empty_like(gate)
    swiglu_gluon_kernel[(gate.numel() // TILE,)](gate, up, out, TILE=TILE, num_warps=4)
    return out


def compile_cases() -> list[CompileCase]:
    """What ships, for the compile gate."""
    names = ("gate_pointer", "up_pointer", "out_pointer")
    return [CompileCase(swiglu_gluon_kernel, dict.fromkeys(names, "*fp16"), {"TILE": TILE}, label="fp16")]
