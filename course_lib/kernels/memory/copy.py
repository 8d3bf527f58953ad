"""Copy: the measure of every memory-bound kernel.

    out[i] = x[i]

FLOPs: 0. Bytes: 2·n·itemsize. No kernel that reads and writes as much can be faster, so a copy's bytes/s is the
bandwidth that others are compared with.
"""

import torch
import triton
import triton.language as tl

from course_lib.hardware.compiler.cases import CompileCase
from course_lib.kernels.common.checks import check_contiguous, check_tensor, integer_view, output_like

BLOCK_BYTES = 4096  # one 16-byte load a thread and a tensor
NUM_WARPS = 8


def copy_reference(x):
    """The plain PyTorch meaning."""
    return x.clone()


@triton.jit
def copy_kernel(x_pointer, out_pointer, length, BLOCK: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * BLOCK
    offsets = start + tl.arange(0, BLOCK)  # [BLOCK]
    inside = offsets < length  # [BLOCK]
    tl.store(out_pointer + offsets, tl.load(x_pointer + offsets, mask=inside), mask=inside)


def copy(x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """A copy of x.

    Args:
        x: contiguous, any shape and any dtype of 1, 2, 4 or 8 bytes (a copy computes nothing).
        out: where to write; like x. None allocates.

    Raises:
        ValueError: an argument is not as above; the message names it.
    """
    check_tensor("x", x)
    check_contiguous("x", x)
    bits = integer_view(x, "x")
    out = output_like(out, "x", x)
    length = x.numel()
    if length > 0:
        block = BLOCK_BYTES // x.element_size()
        copy_kernel[(triton.cdiv(length, block),)](
            bits, integer_view(out, "out"), length, BLOCK=block, num_warps=NUM_WARPS
        )
    return out


def compile_cases() -> list[CompileCase]:
    """What ships, for the compile gate: the narrowest and the widest item."""
    pointers = ("x_pointer", "out_pointer")
    return [
        CompileCase(
            copy_kernel, {**dict.fromkeys(pointers, kind), "length": "i32"}, {"BLOCK": BLOCK_BYTES // itemsize},
            num_warps=NUM_WARPS, divisible=(*pointers, "length"), label=kind,
        )
        for kind, itemsize in (("*i8", 1), ("*i64", 8))
    ]  # fmt: skip
