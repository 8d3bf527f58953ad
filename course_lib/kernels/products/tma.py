"""A persistent matrix product on Hopper and later: the tensor memory accelerator (TMA) moves the tiles.

    out = activation(x · weightᵀ + bias) + residual         gated: out = silu(gate) · up + residual

The algorithm, FLOPs and bytes are those of `persistent`. There, each thread computes the addresses of its own 16-byte
pieces: of a tile of 256 × 64 in 16 bits these are 8 for each of 256 threads, two registers each. Here one thread hands
a tile's coordinates to a copy engine, which knows the tensor from a descriptor (pointer, shape, strides, tile shape),
fills in zeros where the tensor ends, and leaves registers and instructions to the products. The result goes out the
same way, while the next tile is multiplied.

A descriptor sees the weight as [1, outer, inner]; with a gate as [2, columns, inner], gate and up, of which one tile
takes the same columns. So there is one product for each block of inner, with a gate and without.

The engine asks for a pointer and strides that are multiples of 16 bytes.
"""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from course_lib.hardware.compiler.cases import CompileCase
from course_lib.kernels.common.machine import multiprocessor_count
from course_lib.kernels.common.numbers import FLOAT32_PRECISION
from course_lib.kernels.gluon.limits import COPY_ENGINE_BYTES
from course_lib.kernels.products.candidates import ProductTiles, candidates, product_cases, tiles_for
from course_lib.kernels.products.checks import check_product
from course_lib.kernels.products.epilogue import finish
from course_lib.kernels.products.parts import numbers_of_tile, tile_of
from course_lib.kernels.products.persistent import residual_stride

FIRST_WITH_COPY_ENGINE = 90


@triton.jit
def tma_product_kernel(
    x, weights, out, bias_pointer, residual_pointer, rows, columns, inner, residual_stride,
    ACTIVATION: tl.constexpr, GATED: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One program: every num_programs-th tile of out. columns: of out; a gated tile has half of BLOCK_N."""
    BLOCK_COLUMNS: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    row_tiles, column_tiles = tl.cdiv(rows, BLOCK_M), tl.cdiv(columns, BLOCK_COLUMNS)
    for number in tl.range(tl.program_id(0), row_tiles * column_tiles, tl.num_programs(0), flatten=True):
        row_tile, column_tile = tile_of(number, row_tiles, column_tiles, GROUP)
        first_row, first_column = row_tile * BLOCK_M, column_tile * BLOCK_COLUMNS
        sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for start in tl.range(0, inner, BLOCK_K):
            x_tile = x.load([first_row, start])  # [BLOCK_M, BLOCK_K]
            weight_tile = weights.load([0, first_column, start]).reshape(BLOCK_N, BLOCK_K)
            sums = tl.dot(x_tile, weight_tile.T, sums, input_precision=FLOAT32_PRECISION)
        up = None
        if GATED:
            halves = tl.reshape(sums, [BLOCK_M, 2, BLOCK_COLUMNS])
            sums, up = tl.split(tl.permute(halves, 0, 2, 1))  # [BLOCK_M, BLOCK_COLUMNS] each
        row, column = numbers_of_tile(row_tile, BLOCK_M), numbers_of_tile(column_tile, BLOCK_COLUMNS)
        beside = bias_pointer, residual_pointer, residual_stride
        result = finish(sums, up, row, column, rows, columns, beside, ACTIVATION)
        out.store([first_row, first_column], result.to(out.dtype))


def tma_product(
    x, weight, *, bias=None, activation=None, residual=None, gated=False, tiles: ProductTiles | None = None
):
    """`persistent_product`, its arguments and result, on Hopper and later.

    Raises:
        ValueError: an argument is not as there, or the copy engine can't move it; the message names it.
    """
    columns = check_product(x, weight, bias, activation, residual, gated)
    refusal = refusal_of_copy_engine(x, weight, columns)
    if refusal:
        raise ValueError(f"{refusal} Use persistent_product, which takes any.")
    out = torch.empty(x.shape[0], columns, dtype=x.dtype, device=x.device)
    if x.shape[0]:
        tiles = tiles or tiles_for(x)
        programs = min(multiprocessor_count(x.device), tiles.tiles_of(x.shape[0], weight.shape[0]))
        tma_product_kernel[(programs,)](
            *descriptors(x, weight, out, gated, tiles), bias, residual, *out.shape, x.shape[1],
            residual_stride(residual), activation, gated, **tiles.settings(),
        )  # fmt: skip
    return out


def refusal_of_copy_engine(x, weight, columns: int) -> str:
    """Why it cannot move these, or a contiguous result with so many columns, in a sentence; "" where it can."""
    for name, tensor in (("x", x), ("weight", weight)):
        if tensor.data_ptr() % COPY_ENGINE_BYTES:
            return f"{name} begins at an address that is no multiple of {COPY_ENGINE_BYTES} bytes, which TMA asks for."
        if tensor.stride(0) <= 0 or tensor.stride(0) * tensor.element_size() % COPY_ENGINE_BYTES:
            return (
                f"{name} has strides {tensor.stride()}; TMA asks for rows that lie a multiple of {COPY_ENGINE_BYTES} "
                "bytes apart."
            )
    if columns * x.element_size() % COPY_ENGINE_BYTES:
        return f"The result has {columns} columns; TMA asks for rows of a multiple of {COPY_ENGINE_BYTES} bytes."
    return ""


def descriptors(x, weight, out, gated: bool, tiles: ProductTiles) -> list[TensorDescriptor]:
    """What the copy engine needs to know of x, weight and out, which it moves in tiles."""
    parts, columns = 2 if gated else 1, out.shape[1]
    block_columns = tiles.columns // parts
    return [
        TensorDescriptor(x, list(x.shape), list(x.stride()), [tiles.rows, tiles.inner]),
        TensorDescriptor(weight, [parts, columns, x.shape[1]], [columns * weight.stride(0), *weight.stride()],
                         [parts, block_columns, tiles.inner]),
        TensorDescriptor(out, list(out.shape), list(out.stride()), [tiles.rows, block_columns]),
    ]  # fmt: skip


def compile_cases() -> list[CompileCase]:
    """What ships, for the compile gate: nothing behind the product, and all that may be."""
    cases = []
    for arch, gated in ((90, False), (90, True), (100, False)):
        tiles, parts = candidates(arch, torch.bfloat16)[0], 2 if gated else 1
        boxes = {"x": (tiles.rows, tiles.inner), "weights": (parts, tiles.columns // parts, tiles.inner),
                 "out": (tiles.rows, tiles.columns // parts)}  # fmt: skip
        types = {name: f"tensordesc<bf16[{','.join(map(str, box))}]>" for name, box in boxes.items()}
        behind = {} if gated else {"bias_pointer": None, "residual_pointer": None}
        cases += product_cases(tma_product_kernel, {"ACTIVATION": None, "GATED": gated, **behind}, types, (arch,))
    return cases
