"""A matrix product for results with few tiles: the inner dimension is cut into parts as well (split K).

    out = Σ over parts of x[:, part] · weight[:, part]ᵀ

FLOPs are those of `tiled`. A result of 512 × 512 has 8 tiles of 128 × 256, for the 132 multiprocessors of an H200; with
16 parts of each there are 128 programs. What it costs: each program leaves its sums in memory, and they are read once
more, 8 bytes for each number of a padded tile and part. So it pays where inner is long and the result is small.

A program that has left its part counts itself in. The last one of a tile to arrive adds all of them in the order of
the parts, so that the result has the same bits whoever was last. `few_rows` does the same.
Extra memory: 4 bytes for each number of a part. Tiles reach beyond the edge, so the room is that of whole tiles.

Source: CUTLASS, Efficient GEMM in CUDA, Parallelized Reductions; Triton's tutorial 03 for the rest.
"""

import torch
import triton
import triton.language as tl

from course_lib.hardware.compiler.cases import CompileCase
from course_lib.kernels.common.arrivals import arrival_counters
from course_lib.kernels.common.machine import multiprocessor_count
from course_lib.kernels.common.splits import whole_tiles
from course_lib.kernels.products.candidates import ProductTiles, product_cases, tiles_for
from course_lib.kernels.products.checks import check_operands, check_parts
from course_lib.kernels.products.parts import (
    add_part,
    leave_part,
    multiply,
    numbers_of_tile,
    operands,
    starts_of_rows,
    store_tile,
    tile_of,
)

MOST_SPLITS = 16


@triton.jit
def split_k_product_kernel(
    x_pointer, weight_pointer, out_pointer, rows, columns, inner, x_stride, weight_stride, out_stride,
    partial_sums_pointer, arrivals, SPLITS: tl.constexpr,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One program: one of SPLITS parts of one tile."""
    tile, split = tl.program_id(0), tl.program_id(1)
    row_tile, column_tile = tile_of(tile, tl.cdiv(rows, BLOCK_M), tl.cdiv(columns, BLOCK_N), GROUP)
    row, column = numbers_of_tile(row_tile, BLOCK_M), numbers_of_tile(column_tile, BLOCK_N)
    x_rows = starts_of_rows(x_pointer, row, rows, x_stride)  # [BLOCK_M, 1]
    weight_rows = starts_of_rows(weight_pointer, column, columns, weight_stride)  # [BLOCK_N, 1]
    begin, end = whole_tiles(inner, split, SPLITS, BLOCK_K)
    sums = multiply(x_rows, weight_rows, begin, end, inner, BLOCK_K)  # [BLOCK_M, BLOCK_N]
    place = tl.arange(0, BLOCK_M)
    leave_part(sums, partial_sums_pointer, tile * SPLITS + split, place, BLOCK_M)
    if tl.atomic_add(arrivals + tile, 1, sem="acq_rel", scope="gpu") == SPLITS - 1:
        sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for other in range(SPLITS):
            sums = add_part(sums, partial_sums_pointer, tile * SPLITS + other, place, BLOCK_M)
        store_tile(out_pointer, sums, row, column, rows, columns, out_stride)
        tl.store(arrivals + tile, 0)


def split_k_product(
    x: torch.Tensor, weight: torch.Tensor, tiles: ProductTiles | None = None, splits: int | None = None
) -> torch.Tensor:
    """x · weightᵀ as `tiled_product` has it, in `splits` parts of inner; as many as fill the GPU when None."""
    check_operands(x, weight)
    check_parts("splits", splits)
    out = torch.empty(x.shape[0], weight.shape[0], dtype=x.dtype, device=x.device)
    if x.shape[0]:
        tiles = tiles or tiles_for(x, parts=True)
        count = tiles.tiles_of(*out.shape)
        steps = triton.cdiv(x.shape[1], tiles.inner)
        splits = splits or splits_for(count, steps, multiprocessor_count(x.device))
        sums = torch.empty(count * splits * tiles.rows * tiles.columns, dtype=torch.float32, device=x.device)
        split_k_product_kernel[(count, splits)](
            *operands(x, weight, out), sums, arrival_counters(count, x.device), splits, **tiles.settings()
        )
    return out


def splits_for(tiles: int, steps: int, multiprocessors: int) -> int:
    """As many parts as there are multiprocessors for a tile; each has at least one of a tile's steps."""
    return max(1, min(multiprocessors // tiles, steps, MOST_SPLITS))


def compile_cases() -> list[CompileCase]:
    """What ships, for the compile gate."""
    return product_cases(split_k_product_kernel, {"SPLITS": 4}, parts=True)
