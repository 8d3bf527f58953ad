"""Strided copy: the same useful bytes, and a different price, because memory is fetched in sectors.

    out[i] = x[i * stride]

FLOPs: 0. Useful bytes: 2·n·itemsize. A GPU fetches 32-byte sectors (a CPU 64-byte lines): with float32 and a stride
of 8 or more, each 4-byte element costs a whole sector, so reading moves 8 times the useful bytes and the copy takes at
least (8 + 1) / 2 = 4.5 times as long as with stride 1. It takes longer still where sectors lie apart, since the memory
chips themselves work in larger pieces: on an H200, time per useful byte against a copy was measured at 1.5 with
stride 2, 5.4 with stride 8 and 12.5 with stride 32.
"""

import torch
import triton
import triton.language as tl

from course_lib.hardware.compiler.cases import CompileCase
from course_lib.kernels.common.checks import check_tensor, integer_view, output_like

BLOCK = 1024
NUM_WARPS = 4


def strided_copy_reference(x):
    """The plain PyTorch meaning; x is a view such as storage[::8]."""
    return x.contiguous()


@triton.jit
def strided_copy_kernel(x_pointer, out_pointer, length, stride, BLOCK: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * BLOCK
    offsets = start + tl.arange(0, BLOCK)  # [BLOCK]
    inside = offsets < length  # [BLOCK]
    x = tl.load(x_pointer + offsets * stride, mask=inside)  # [BLOCK]
    tl.store(out_pointer + offsets, x, mask=inside)


def strided_copy(x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """A contiguous copy of a one-dimensional view.

    Args:
        x: [n] with any stride (0 as well), any dtype of 1, 2, 4 or 8 bytes.
        out: [n], contiguous, of x's dtype and device. None allocates.

    Raises:
        ValueError: an argument is not as above; the message names it.
    """
    check_tensor("x", x)
    if x.dim() != 1:
        raise ValueError(f"x has shape {tuple(x.shape)}; it must have one dimension, e.g. storage[::8].")
    bits = integer_view(x, "x")
    out = output_like(out, "x", x)
    length = x.numel()
    if length > 0:
        strided_copy_kernel[(triton.cdiv(length, BLOCK),)](
            bits, integer_view(out, "out"), length, x.stride(0), BLOCK=BLOCK, num_warps=NUM_WARPS
        )
    return out


def compile_cases() -> list[CompileCase]:
    """What ships, for the compile gate: stride 8, which the compiler does not know, and stride 1, which it does."""
    signature = {"x_pointer": "*i32", "out_pointer": "*i32", "length": "i32", "stride": "i32"}
    divisible = ("x_pointer", "out_pointer", "length")
    return [
        CompileCase(
            strided_copy_kernel, signature, {"BLOCK": BLOCK, **fixed},
            num_warps=NUM_WARPS, divisible=divisible, label=label,
        )
        for label, fixed in (("strided", {}), ("contiguous", {"stride": 1}))
    ]  # fmt: skip
