"""Vector add: the smallest kernel with a point, since all its time is memory.

    out[i] = x[i] + y[i]

FLOPs: n. Bytes: 3·n·itemsize (read x, read y, write out). Intensity in float32: 1/12 FLOP/byte, far below the balance
point of any GPU, so the least time is bytes / bandwidth.

Each program adds one block of consecutive elements. Consecutive threads hold consecutive elements, so that a warp's
32 loads fall into the same few cache lines (coalescing), and each thread holds enough of them to load 16 bytes at once.
"""

import torch
import triton
import triton.language as tl

from course_lib.hardware.compiler.cases import CompileCase
from course_lib.kernels.common.checks import FLOAT_DTYPES, check_alike, check_contiguous, check_tensor, output_like

BLOCK_BYTES = 4096  # of each tensor a program: with 8 warps, one 16-byte load a thread and a tensor
NUM_WARPS = 8


def vector_add_reference(x, y):
    """The plain PyTorch meaning."""
    return x + y


@triton.jit
def vector_add_kernel(x_pointer, y_pointer, out_pointer, length, BLOCK: tl.constexpr):
    # 64-bit, because a tensor may hold more than 2^31 elements.
    start = tl.program_id(0).to(tl.int64) * BLOCK
    offsets = start + tl.arange(0, BLOCK)  # [BLOCK]
    inside = offsets < length  # [BLOCK]
    x = tl.load(x_pointer + offsets, mask=inside)  # [BLOCK]
    y = tl.load(y_pointer + offsets, mask=inside)  # [BLOCK]
    tl.store(out_pointer + offsets, x + y, mask=inside)


def vector_add(x: torch.Tensor, y: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """x + y.

    Args:
        x, y: contiguous, of one shape (any, also empty), dtype (float32, float16, bfloat16) and device.
        out: where to write; like x. None allocates.

    Raises:
        ValueError: an argument is not as above; the message names it.
    """
    check_tensor("x", x, FLOAT_DTYPES)
    check_tensor("y", y, FLOAT_DTYPES)
    check_alike("y", y, "x", x)
    check_contiguous("x", x)
    check_contiguous("y", y)
    out = output_like(out, "x", x)
    length = x.numel()
    if length > 0:
        block = BLOCK_BYTES // x.element_size()
        vector_add_kernel[(triton.cdiv(length, block),)](x, y, out, length, BLOCK=block, num_warps=NUM_WARPS)
    return out


def compile_cases() -> list[CompileCase]:
    """What ships, for the compile gate: both item sizes, at lengths that are multiples of 16."""
    pointers = ("x_pointer", "y_pointer", "out_pointer")
    return [
        CompileCase(
            vector_add_kernel, {**dict.fromkeys(pointers, kind), "length": "i32"}, {"BLOCK": BLOCK_BYTES // itemsize},
            num_warps=NUM_WARPS, divisible=(*pointers, "length"), label=kind,
        )
        for kind, itemsize in (("*fp32", 4), ("*fp16", 2))
    ]  # fmt: skip
