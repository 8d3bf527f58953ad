"""SwiGLU in CuTe's Python DSL, to be read beside the Gluon form of the same kernel (`gluon_swiglu`).

Needs NVIDIA's package nvidia-cutlass-dsl, and to run, a GPU from sm_80 on. The kernel is compiled for any of them
without one: `course_lib.hardware.compiler.cute.compile_cute`.

Source: NVIDIA, CUTLASS 4, "CuTe DSL"; Shazeer, arXiv 2002.05202.
"""

import cutlass  # type: ignore[import-not-found]
import torch
from cutlass import cute
from cutlass.cute.runtime import from_dlpack  # type: ignore[import-not-found]

THREADS, VALUES = 128, 8  # 8 numbers of 16 bits are one load of 16 bytes
TILE = THREADS * VALUES


@cute.kernel
def swiglu_kernel(gate, up, out, owner):
    """gate, up, out: tiles of TILE numbers. owner: the layout (thread, value) -> place in the tile."""
    thread, _, _ = cute.arch.thread_idx()
    tile, _, _ = cute.arch.block_idx()
    mine = [cute.composition(tensor[(None, tile)], owner)[(thread, None)] for tensor in (gate, up, out)]
    g, u = mine[0].load().to(cutlass.Float32), mine[1].load().to(cutlass.Float32)
    mine[2].store((g / (1.0 + cute.exp(-g)) * u).to(mine[2].element_type))


@cute.jit
def swiglu(gate: cute.Tensor, up: cute.Tensor, out: cute.Tensor):
    owner = cute.make_layout((THREADS, VALUES), stride=(VALUES, 1))
    tiles = [cute.zipped_divide(tensor, (TILE,)) for tensor in (gate, up, out)]
    swiglu_kernel(*tiles, owner).launch(grid=(cute.size(tiles[0], mode=[1]), 1, 1), block=(THREADS, 1, 1))


def arguments(gate: torch.Tensor, up: torch.Tensor, out: torch.Tensor) -> list:
    """The tensors as CuTe takes them: flat, and at multiples of 16 bytes.

    Raises:
        ValueError: they differ, are not contiguous or not aligned, or have no multiple of TILE numbers.
    """
    shapes = {(tensor.shape, tensor.dtype) for tensor in (gate, up, out)}
    aligned = all(tensor.is_contiguous() and tensor.data_ptr() % 16 == 0 for tensor in (gate, up, out))
    if len(shapes) != 1 or not aligned or gate.numel() % TILE or gate.element_size() != 2:
        raise ValueError(
            f"gate, up and out have shapes {tuple(gate.shape)}, {tuple(up.shape)} and {tuple(out.shape)} and dtypes "
            f"{gate.dtype}, {up.dtype} and {out.dtype}; they must be alike, of 16 bits, contiguous from a multiple of "
            f"16 bytes on, and have a multiple of {TILE} numbers."
        )
    return [from_dlpack(tensor.view(-1), assumed_align=16) for tensor in (gate, up, out)]


def swiglu_cute(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) · up, on a GPU from sm_80 on, for tensors as `arguments` takes them; compiled at each call."""
    out = torch.empty_like(gate)
    swiglu(*arguments(gate, up, out))
    return out
