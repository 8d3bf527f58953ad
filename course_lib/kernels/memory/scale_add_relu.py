"""Fused scale, add, ReLU: one pass over memory where PyTorch makes three.

    out[i] = max(scale * x[i] + y[i], 0)

FLOPs: 3·n. Bytes, fused: 3·n·itemsize (read x, read y, write out). Unfused: 7·n·itemsize (multiply reads and writes,
add reads two and writes, ReLU reads and writes), since every intermediate goes to memory and back. Both are
memory-bound, so fusion is worth 7/3 = 2.33 times.
"""

import torch
import triton
import triton.language as tl

from course_lib.hardware.compiler.cases import CompileCase
from course_lib.kernels.common.checks import FLOAT_DTYPES, check_alike, check_contiguous, check_tensor, output_like

BLOCK_BYTES = 4096  # one 16-byte load a thread and a tensor
NUM_WARPS = 8


def scale_add_relu_reference(x, y, scale):
    """The plain PyTorch meaning: three kernels."""
    return torch.relu(x * scale + y)


@triton.jit
def scale_add_relu_kernel(x_pointer, y_pointer, out_pointer, scale, length, BLOCK: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * BLOCK
    offsets = start + tl.arange(0, BLOCK)  # [BLOCK]
    inside = offsets < length  # [BLOCK]
    x = tl.load(x_pointer + offsets, mask=inside).to(tl.float32)  # [BLOCK]
    y = tl.load(y_pointer + offsets, mask=inside).to(tl.float32)  # [BLOCK]
    total = scale * x + y  # [BLOCK]
    # A comparison with NaN is false, so NaN passes through as it does in torch.relu; a maximum would hide it.
    total = tl.where(total < 0, 0.0, total)
    tl.store(out_pointer + offsets, total, mask=inside)


def scale_add_relu(x: torch.Tensor, y: torch.Tensor, scale: float, out: torch.Tensor | None = None) -> torch.Tensor:
    """relu(scale * x + y), computed in float32 whatever the dtype.

    Args:
        x, y: contiguous, of one shape (any, also empty), dtype (float32, float16, bfloat16) and device.
        scale: a number.
        out: where to write; like x. None allocates.

    Raises:
        ValueError: an argument is not as above; the message names it.
    """
    check_tensor("x", x, FLOAT_DTYPES)
    check_tensor("y", y, FLOAT_DTYPES)
    check_alike("y", y, "x", x)
    check_contiguous("x", x)
    check_contiguous("y", y)
    if isinstance(scale, bool) or not isinstance(scale, (int, float)):
        raise ValueError(f"scale is {scale!r}; it must be a number.")
    out = output_like(out, "x", x)
    length = x.numel()
    if length > 0:
        block = BLOCK_BYTES // x.element_size()
        scale_add_relu_kernel[(triton.cdiv(length, block),)](
            x, y, out, float(scale), length, BLOCK=block, num_warps=NUM_WARPS
        )
    return out


def compile_cases() -> list[CompileCase]:
    """What ships, for the compile gate: both item sizes, at lengths that are multiples of 16."""
    pointers = ("x_pointer", "y_pointer", "out_pointer")
    return [
        CompileCase(
            scale_add_relu_kernel, {**dict.fromkeys(pointers, kind), "scale": "fp32", "length": "i32"},
            {"BLOCK": BLOCK_BYTES // itemsize}, num_warps=NUM_WARPS, divisible=(*pointers, "length"), label=kind,
        )
        for kind, itemsize in (("*fp32", 4), ("*fp16", 2))
    ]  # fmt: skip
