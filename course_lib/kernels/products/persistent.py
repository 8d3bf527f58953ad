"""A matrix product by one program for each multiprocessor, which takes one tile of the result after another.

    out = activation(x · weightᵀ + bias) + residual         gated: out = silu(gate) · up + residual

FLOPs and bytes are those of `tiled`. What differs is the time between two tiles. There, a program ends and another one
begins: it computes its addresses and waits for its first loads, and meanwhile the matrix units have nothing to do. Here
the loop over tiles and that over blocks of inner are made one (`flatten`), so the loads of the next tile are under way
while this one is finished and stored. 8192³ in tiles of 128 × 256 has 2048 tiles, 15.5 for each of 132 programs.

The last round is not full: 16 rounds of work are done in the time of 16, where 15.5 would do. At 4096³ there are 512
tiles, 3.9 for each, and at 2048 · 2048 only 128. What helps there is `split_k` and `stream_k`.

Source: Triton's tutorial 09, Persistent Matmul.
"""

import torch
import triton
import triton.language as tl

from course_lib.hardware.compiler.cases import CompileCase
from course_lib.kernels.common.machine import multiprocessor_count
from course_lib.kernels.products.candidates import ProductTiles, product_cases, tiles_for
from course_lib.kernels.products.checks import check_product
from course_lib.kernels.products.epilogue import finish
from course_lib.kernels.products.parts import (
    multiply,
    numbers_of_tile,
    operands,
    starts_of_rows,
    store_tile,
    tile_of,
    weight_rows_of_tile,
)


@triton.jit
def persistent_product_kernel(
    x_pointer, weight_pointer, out_pointer, rows, columns, inner, x_stride, weight_stride, out_stride,
    bias_pointer, residual_pointer, residual_stride, ACTIVATION: tl.constexpr, GATED: tl.constexpr,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One program: every num_programs-th tile of out. columns: of out; a gated tile has half of BLOCK_N."""
    BLOCK_COLUMNS: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    row_tiles, column_tiles = tl.cdiv(rows, BLOCK_M), tl.cdiv(columns, BLOCK_COLUMNS)
    for number in tl.range(tl.program_id(0), row_tiles * column_tiles, tl.num_programs(0), flatten=True):
        row_tile, column_tile = tile_of(number, row_tiles, column_tiles, GROUP)
        row, column = numbers_of_tile(row_tile, BLOCK_M), numbers_of_tile(column_tile, BLOCK_COLUMNS)
        x_rows = starts_of_rows(x_pointer, row, rows, x_stride)  # [BLOCK_M, 1]
        weight_row = weight_rows_of_tile(column_tile, columns, GATED, BLOCK_N)
        weight_rows = weight_pointer + weight_row.to(tl.int64)[:, None] * weight_stride  # [BLOCK_N, 1]
        sums = multiply(x_rows, weight_rows, 0, inner, inner, BLOCK_K)  # [BLOCK_M, BLOCK_N]
        up = None
        if GATED:
            sums, up = tl.split(tl.reshape(sums, [BLOCK_M, BLOCK_COLUMNS, 2]))  # [BLOCK_M, BLOCK_COLUMNS] each
        beside = bias_pointer, residual_pointer, residual_stride
        result = finish(sums, up, row, column, rows, columns, beside, ACTIVATION)
        store_tile(out_pointer, result, row, column, rows, columns, out_stride)


def persistent_product(
    x, weight, *, bias=None, activation=None, residual=None, gated=False, tiles: ProductTiles | None = None
):
    """x · weightᵀ and what stands behind it, rounded once: residual + activation(x · weightᵀ + bias).

    Args:
        x: [rows, inner], float32, float16 or bfloat16, with contiguous rows that may lie apart; rows may be 0.
        weight: [outer, inner], as nn.Linear keeps it, the same.
        bias: [outer], of x's dtype, contiguous.
        activation: None, "gelu", "gelu_tanh" or "silu".
        residual: [rows, columns], of x's dtype, with contiguous rows.
        gated: weight holds the rows of a gate, then as many of up; instead of an activation the result is
            silu(gate) · up. columns are outer, or outer / 2 with a gate.
        tiles: how it is cut; chosen when None.

    Returns [rows, columns], the same bits at every run.

    Raises:
        ValueError: an argument is not as above; the message names it.
    """
    columns = check_product(x, weight, bias, activation, residual, gated)
    out = torch.empty(x.shape[0], columns, dtype=x.dtype, device=x.device)
    if x.shape[0]:
        tiles = tiles or tiles_for(x)
        programs = min(multiprocessor_count(x.device), tiles.tiles_of(x.shape[0], weight.shape[0]))
        persistent_product_kernel[(programs,)](
            *operands(x, weight, out), bias, residual, residual_stride(residual), activation, gated, **tiles.settings()
        )
    return out


def residual_stride(residual) -> int:
    """Of its rows; 0 where there is none."""
    return 0 if residual is None else residual.stride(0)


def compile_cases() -> list[CompileCase]:
    """What ships, for the compile gate: nothing behind the product, and all that may be."""
    plain = {"bias_pointer": None, "residual_pointer": None, "ACTIVATION": None, "GATED": False}
    return product_cases(persistent_product_kernel, plain) + product_cases(
        persistent_product_kernel, {"ACTIVATION": None, "GATED": True}, archs=(90,)
    )
