"""A matrix product in tiles on the matrix units, and two settings that make of it the next two steps of the ladder.

    out = x · weightᵀ                                       x [rows, inner], weight [outer, inner], out [rows, outer]

FLOPs: 2 · rows · outer · inner. Bytes to and from memory: each matrix once, if the caches serve all the rest. A program
has one tile of out [BLOCK_M, BLOCK_N]; for each block of inner it loads one tile of x and one of weight. All programs
together load inner · (rows · outer / BLOCK_N + rows · outer / BLOCK_M) numbers. At 8192³ in 16 bits with tiles of
128 × 256 these are 12.9 GB, for three matrices of 134 MB each.

`tiled`      One product of tiles after another, and between two of them the matrix units wait for the next loads.
             Tiles are taken row by row (GROUP = 1).
`ordered`    The L2 cache serves what programs load that another one at work has loaded. Row by row, the 132 programs
             of an H200 at 8192³ are four rows of 32 tiles and the beginning of a fifth. For each block of inner they
             load 5 tiles of x and 32 of weight. So programs walk down a strip of GROUP row tiles before they take its
             next column: 8 rows and 17 columns then, 25 tiles.
`pipelined`  The loads for the next blocks are on their way while this one is multiplied: num_stages of them.
             Shared memory for each: (BLOCK_M + BLOCK_N) · BLOCK_K numbers, 48 KB for 128 × 256 × 64 in 16 bits.

All three are one kernel: what they differ in is a `ProductTiles`. What is left of the time: a program computes
addresses before its first product and stores after its last, and meanwhile the matrix units have nothing to do.

Source: Triton's tutorial 03, Matrix Multiplication.
"""

import torch
import triton
import triton.language as tl

from course_lib.hardware.compiler.cases import CompileCase
from course_lib.kernels.products.candidates import ProductTiles, product_cases, tiles_for
from course_lib.kernels.products.checks import check_operands
from course_lib.kernels.products.parts import multiply, numbers_of_tile, operands, starts_of_rows, store_tile, tile_of


@triton.jit
def tiled_product_kernel(
    x_pointer, weight_pointer, out_pointer, rows, columns, inner, x_stride, weight_stride, out_stride,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One program: one tile of out."""
    row_tile, column_tile = tile_of(tl.program_id(0), tl.cdiv(rows, BLOCK_M), tl.cdiv(columns, BLOCK_N), GROUP)
    row, column = numbers_of_tile(row_tile, BLOCK_M), numbers_of_tile(column_tile, BLOCK_N)
    x_rows = starts_of_rows(x_pointer, row, rows, x_stride)  # [BLOCK_M, 1]
    weight_rows = starts_of_rows(weight_pointer, column, columns, weight_stride)  # [BLOCK_N, 1]
    sums = multiply(x_rows, weight_rows, 0, inner, inner, BLOCK_K)  # [BLOCK_M, BLOCK_N]
    store_tile(out_pointer, sums, row, column, rows, columns, out_stride)


def tiled_product(x: torch.Tensor, weight: torch.Tensor, tiles: ProductTiles | None = None) -> torch.Tensor:
    """x · weightᵀ, summed in float32 and rounded once.

    Args:
        x: [rows, inner], float32, float16 or bfloat16, with contiguous rows that may lie apart; rows may be 0.
        weight: [outer, inner], as nn.Linear keeps it, the same.
        tiles: how it is cut; those of `pipelined` when None.

    Raises:
        ValueError: an argument is not as above; the message names it.
    """
    check_operands(x, weight)
    out = torch.empty(x.shape[0], weight.shape[0], dtype=x.dtype, device=x.device)
    if x.shape[0]:
        tiles = tiles or pipelined(x)
        tiled_product_kernel[(tiles.tiles_of(*out.shape),)](*operands(x, weight, out), **tiles.settings())
    return out


def tiled(x: torch.Tensor) -> ProductTiles:
    """The tiles of the first step, for a dtype and a device."""
    return tiles_for(x)._replace(stages=1, group=1)


def ordered(x: torch.Tensor) -> ProductTiles:
    """Those of the second."""
    return tiles_for(x)._replace(stages=1)


def pipelined(x: torch.Tensor) -> ProductTiles:
    """Those of the third."""
    return tiles_for(x)


def compile_cases() -> list[CompileCase]:
    """What ships, for the compile gate."""
    return product_cases(tiled_product_kernel)
