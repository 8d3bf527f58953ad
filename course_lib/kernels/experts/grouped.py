"""A matrix product in which each tile of rows has the weight of its own expert, in one launch for all experts.

    out[place] = x[slots[place] // k] · weight[expert of the place's tile]ᵀ
    gated: out = silu(x · gateᵀ) · (x · upᵀ), where a weight has the rows of the gate first and as many of up behind

FLOPs: 2 · outer · inner a slot, and as many for each place of padding. Bytes, if the caches serve the rest: the weight
of each expert with a token once, x once, out once. 8192 tokens with 8 of 128 experts each, 2048 numbers in and
1536 out: 412 GFLOP and 0.8 GB of weights in 16 bits, so the matrix units decide. One token: 50 MB of weights for 50
MFLOP, so nothing but the bytes counts.

A loop over experts would launch 128 products, each too small for 132 multiprocessors. Here a program looks up the
expert of its tile, and from there on it is `products.tiled`. Rows of x are read from where the tokens lie, so nobody
copies each token k times. Programs walk down a strip of row tiles before its next column. What is at work at a time is
a few experts' tiles then, with few columns of their weights, and these stay in the L2 cache.

With a gate, rows of gate and up stand in turns within a tile, and the hidden tensor is all that is stored: a third of
what the product, and an operation behind it, would write.

Source: Gale et al., MegaBlocks, arXiv 2211.15841; Shazeer, GLU variants improve transformer, arXiv 2002.05202.
"""

import functools

import torch
import triton
import triton.language as tl

from course_lib.hardware.compiler.cases import CompileCase
from course_lib.kernels.common.machine import architecture_of
from course_lib.kernels.common.numbers import FLOAT32_PRECISION
from course_lib.kernels.experts.arrange import Arrangement
from course_lib.kernels.experts.checks import check_grouped
from course_lib.kernels.experts.grouped_tma import copy_engine_takes, grouped_product_tma
from course_lib.kernels.experts.tiles import expert_tiles, tiles_of_block
from course_lib.kernels.products.candidates import ProductTiles, candidates, product_cases
from course_lib.kernels.products.epilogue import finish, product_reference
from course_lib.kernels.products.parts import multiply, numbers_of_tile, tile_of, weight_rows_of_tile
from course_lib.kernels.products.tma import FIRST_WITH_COPY_ENGINE


@triton.jit
def multiply_by_columns(x_rows, weights, weight_stride, column, columns, inner, BLOCK_K: tl.constexpr):
    """x · weight [BLOCK_M, BLOCK_N] in float32 for rows of x [BLOCK_M, 1] and columns [BLOCK_N] of weight.

    Neighbours in memory are columns here, not numbers of inner. So columns beyond the end have a mask: `multiply` reads
    the last one again for them, and the compiler could not tell that the others are neighbours.
    """
    sums = tl.zeros([x_rows.shape[0], column.shape[0]], tl.float32)  # [BLOCK_M, BLOCK_N]
    for start in tl.range(0, inner, BLOCK_K):
        element = start + tl.arange(0, BLOCK_K)
        inside = element < inner
        x = tl.load(x_rows + element[None, :], mask=inside[None, :], other=0.0)  # [BLOCK_M, BLOCK_K]
        weight_tile = weights + element.to(tl.int64)[:, None] * weight_stride + column[None, :]
        weight = tl.load(weight_tile, mask=inside[:, None] & (column < columns)[None, :], other=0.0)
        sums = tl.dot(x, weight, sums, input_precision=FLOAT32_PRECISION)  # weight: [BLOCK_K, BLOCK_N]
    return sums


@triton.jit
def grouped_product_kernel(
    x_pointer, weight_pointer, out_pointer, slots_pointer, tile_experts_pointer, row_tiles, columns, inner, sentinel, k,
    x_stride, expert_stride, weight_stride, out_stride,
    GATHERED: tl.constexpr, GATED: tl.constexpr, TRANSPOSED: tl.constexpr,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One program: one tile of out, for one expert. columns: of out; a gated tile has half of BLOCK_N."""
    BLOCK_COLUMNS: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    row_tile, column_tile = tile_of(tl.program_id(0), row_tiles, tl.cdiv(columns, BLOCK_COLUMNS), GROUP)
    expert = tl.load(tile_experts_pointer + row_tile).to(tl.int64)
    if expert >= 0:
        place, column = numbers_of_tile(row_tile, BLOCK_M), numbers_of_tile(column_tile, BLOCK_COLUMNS)
        served = tl.load(slots_pointer + place) < sentinel  # [BLOCK_M]; the first place of a tile always is
        # For a place without a slot the tile's first row is read again, and its product is not stored.
        source = tl.where(served, place, row_tile * BLOCK_M)
        row = tl.load(slots_pointer + source) // k if GATHERED else source
        x_rows = x_pointer + row.to(tl.int64)[:, None] * x_stride  # [BLOCK_M, 1]
        weights = weight_pointer + expert * expert_stride
        if TRANSPOSED:
            sums = multiply_by_columns(x_rows, weights, weight_stride, column, columns, inner, BLOCK_K)
        else:
            weight_row = weight_rows_of_tile(column_tile, columns, GATED, BLOCK_N)
            weight_rows = weights + weight_row.to(tl.int64)[:, None] * weight_stride  # [BLOCK_N, 1]
            sums = multiply(x_rows, weight_rows, 0, inner, inner, BLOCK_K)  # [BLOCK_M, BLOCK_N]
        up = None
        if GATED:
            sums, up = tl.split(tl.reshape(sums, [BLOCK_M, BLOCK_COLUMNS, 2]))  # [BLOCK_M, BLOCK_COLUMNS] each
        result = finish(sums, up, place, column, 0, columns, (None, None, 0), None)
        out_tile = out_pointer + place.to(tl.int64)[:, None] * out_stride + column[None, :]
        inside = served[:, None] & (column < columns)[None, :]
        tl.store(out_tile, result.to(out_pointer.dtype.element_ty), mask=inside)


def grouped_product(
    x: torch.Tensor, weight: torch.Tensor, arrangement: Arrangement, *, gathered: bool = True, gated: bool = False,
    transposed: bool = False, tiles: ProductTiles | None = None,
) -> torch.Tensor:  # fmt: skip
    """The product of each place's row with the weight of its expert, summed in float32 and rounded once.

    Args:
        x: [tokens, inner], or with gathered=False [places, inner], rows that lie in their places; float32, float16 or
            bfloat16, with contiguous rows that may lie apart. Tokens may be 0.
        weight: [experts, outer, inner], the same, each matrix as nn.Linear keeps it. Experts may lie apart, and further
            than 2³¹ numbers.
        arrangement: of `arrange`, for so many experts, in tiles of tiles.rows.
        gathered: whether x is as the tokens are.
        gated: outer is 2 · hidden, and the result silu(gate) · up.
        transposed: weight is [experts, inner, outer] instead, as the backward pass has it; without a gate.
        tiles: how it is cut; chosen by the arrangement when None.

    Returns [places, outer], or [places, hidden] with a gate. Places without a slot hold anything, NaN too.

    Raises:
        ValueError: an argument is not as above; the message names it.
    """
    columns = check_grouped(x, weight, arrangement, gathered, gated, transposed, tiles)
    out = torch.empty(len(arrangement.slots), columns, dtype=x.dtype, device=x.device)
    row_tiles = len(arrangement.tile_experts)
    if row_tiles:
        arch = architecture_of(x.device)
        tiles = tiles or tiles_of_block(arch, x.dtype, arrangement.block)
        if by_copy_engine(arch, tiles, x, weight, columns):
            grouped_product_tma(x, weight, out, arrangement, gathered, gated, transposed, tiles)
            return out
        grouped_product_kernel[(tiles.tiles_of(len(out), columns * (2 if gated else 1)),)](
            x, weight, out, arrangement.slots, arrangement.tile_experts, row_tiles, columns, x.shape[1],
            arrangement.sentinel, arrangement.places.shape[1], x.stride(0), *weight.stride()[:2], out.stride(0),
            gathered, gated, transposed, **tiles.settings(),
        )  # fmt: skip
    return out


def by_copy_engine(arch: int | None, tiles: ProductTiles, x, weight, columns: int) -> bool:
    """Whether the form for Hopper and later is taken: for tall tiles of what the engine can move."""
    tall = tiles.rows >= candidates(arch, x.dtype)[0].rows
    return (
        arch is not None and arch >= FIRST_WITH_COPY_ENGINE and x.dtype != torch.float32 and tall
        and copy_engine_takes(x, weight, columns)
    )  # fmt: skip


def grouped_product_reference(x, weight, arrangement, *, gathered=True, gated=False, transposed=False):
    """The plain PyTorch meaning: place by place, zeros where there is no slot."""
    weight = weight.transpose(1, 2) if transposed else weight
    out = x.new_zeros(len(arrangement.slots), weight.shape[1] // (2 if gated else 1))
    for place, slot in enumerate(arrangement.slots.tolist()):
        if slot < arrangement.sentinel:
            row = slot // arrangement.places.shape[1] if gathered else place
            expert = arrangement.tile_experts[place // arrangement.block]
            out[place] = product_reference(x[row : row + 1], weight[expert], gated=gated)[0]
    return out


def compile_cases() -> list[CompileCase]:
    """What ships, for the compile gate: few rows, some and many; with a gate, without, and by a transposed weight."""
    types = {"slots_pointer": "*i32", "tile_experts_pointer": "*i32"}
    forms = [
        {"GATHERED": True, "GATED": True, "TRANSPOSED": False},
        {"GATHERED": False, "GATED": False, "TRANSPOSED": False},
        {"GATHERED": True, "GATED": False, "TRANSPOSED": True},
    ]
    cases = [product_cases(grouped_product_kernel, form, types) for form in forms]
    for rows in (1, 32):
        cases += [product_cases(grouped_product_kernel, form, types, archs=(80, 90),
                                tiles_of=functools.partial(expert_tiles, rows=rows)) for form in forms]  # fmt: skip
    return [case for group in cases for case in group]
