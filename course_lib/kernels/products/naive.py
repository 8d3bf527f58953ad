"""A matrix product without tiles of both operands: the lowest step of the ladder.

    out = x · weightᵀ                                       x [rows, inner], weight [outer, inner], out [rows, outer]

A program has one row of x and BLOCK_N rows of the weight, and computes BLOCK_N numbers of out. Each number of the
weight that it loads is multiplied once and thrown away. All programs together load rows · outer · inner numbers of the
weight: 1.1 TB at 8192³ in 16 bits, for a matrix of 134 MB. The caches serve most of it, but even they need 0.2 s for
so much. And a row alone is too few for the matrix units, which multiply tiles. So products and sums run on the ordinary
ones.

FLOPs: 2 · rows · outer · inner.
"""

import torch
import triton
import triton.language as tl

from course_lib.hardware.compiler.cases import CompileCase
from course_lib.kernels.common.signatures import KINDS, signature_of
from course_lib.kernels.products.candidates import EVEN
from course_lib.kernels.products.checks import check_operands
from course_lib.kernels.products.parts import numbers_of_tile, operands, starts_of_rows

BLOCKS = {"BLOCK_N": 32, "BLOCK_K": 128}


@triton.jit
def naive_product_kernel(
    x_pointer, weight_pointer, out_pointer, rows, columns, inner, x_stride, weight_stride, out_stride,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_N numbers of one row of out."""
    row, column = tl.program_id(0).to(tl.int64), numbers_of_tile(tl.program_id(1), BLOCK_N)
    weight_rows = starts_of_rows(weight_pointer, column, columns, weight_stride)  # [BLOCK_N, 1]
    sums = tl.zeros([BLOCK_N], tl.float32)
    for start in range(0, inner, BLOCK_K):
        element = start + tl.arange(0, BLOCK_K)
        x = tl.load(x_pointer + row * x_stride + element, mask=element < inner, other=0.0)  # [BLOCK_K]
        weights = tl.load(weight_rows + element[None, :], mask=(element < inner)[None, :], other=0.0)
        sums += tl.sum(x[None, :].to(tl.float32) * weights.to(tl.float32), axis=1)  # of [BLOCK_N, BLOCK_K]
    tl.store(out_pointer + row * out_stride + column, sums.to(out_pointer.dtype.element_ty), mask=column < columns)


def naive_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x · weightᵀ, summed in float32 and rounded once.

    Args:
        x: [rows, inner], float32, float16 or bfloat16, with contiguous rows that may lie apart; rows may be 0.
        weight: [outer, inner], as nn.Linear keeps it, the same.

    Raises:
        ValueError: an argument is not as above; the message names it.
    """
    check_operands(x, weight)
    out = torch.empty(x.shape[0], weight.shape[0], dtype=x.dtype, device=x.device)
    if x.shape[0]:
        grid = x.shape[0], triton.cdiv(weight.shape[0], BLOCKS["BLOCK_N"])
        naive_product_kernel[grid](*operands(x, weight, out), **BLOCKS)
    return out


def compile_cases() -> list[CompileCase]:
    """What ships, for the compile gate."""
    signature = signature_of(naive_product_kernel, KINDS[torch.float16])
    divisible = [name for name, kind in signature.items() if kind[0] == "*" or name in EVEN]
    return [CompileCase(naive_product_kernel, signature, BLOCKS, archs=(75, 80, 90, 100), divisible=divisible)]
