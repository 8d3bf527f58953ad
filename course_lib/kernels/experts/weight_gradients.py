"""The gradient of every expert's weight: a product over the rows of that expert, in one launch for all.

    out[expert] = Σ over the expert's places of rows[place]ᵀ · x[slots[place] // k]

FLOPs: 2 · slots · outer · inner. Bytes, if the caches serve the rest: rows and x once, out once; out is as large as all
weights together, whatever the number of tokens. It is the forward's product turned round: there a tile had one expert
and went along inner, here a tile of one expert's weight goes along its places, and experts with many tokens have longer
loops. They begin and end with tiles of the arrangement, so a mask is needed only for places without a slot, which may
hold NaN. An expert without a token has no steps, and its gradient is 0.

Each tile has one program that adds in the order of the places, so every run gives the same bits.
The slots of a step are loaded a step ahead: an address that has to wait for a load in the same step would keep the
compiler from having several steps' loads on their way.

Source: Gale et al., MegaBlocks, arXiv 2211.15841.
"""

import torch
import triton
import triton.language as tl

from course_lib.hardware.compiler.cases import CompileCase
from course_lib.kernels.common.machine import architecture_of
from course_lib.kernels.common.numbers import FLOAT32_PRECISION
from course_lib.kernels.experts.arrange import Arrangement
from course_lib.kernels.products.candidates import ProductTiles, candidates, product_cases
from course_lib.kernels.products.parts import numbers_of_tile, tile_of


@triton.jit
def weight_gradient_kernel(
    rows_pointer, x_pointer, out_pointer, slots_pointer, first_tiles_pointer, outer, inner, sentinel, k, block,
    rows_stride, x_stride, expert_stride, outer_stride, inner_stride,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One program: one tile of one expert's gradient. block: places in a tile of the arrangement."""
    expert = tl.program_id(1)
    row_tile, column_tile = tile_of(tl.program_id(0), tl.cdiv(outer, BLOCK_M), tl.cdiv(inner, BLOCK_N), GROUP)
    row, column = numbers_of_tile(row_tile, BLOCK_M), numbers_of_tile(column_tile, BLOCK_N)
    begin = tl.load(first_tiles_pointer + expert) * block
    end = tl.load(first_tiles_pointer + expert + 1) * block
    step = tl.arange(0, BLOCK_K)
    slot = tl.load(slots_pointer + begin + step, mask=begin + step < end, other=sentinel)  # [BLOCK_K]
    sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in tl.range(begin, end, BLOCK_K):
        place, served = start + step, (slot < sentinel)[:, None]
        left_tile = rows_pointer + place.to(tl.int64)[:, None] * rows_stride + row[None, :]
        left = tl.load(left_tile, mask=served & (row < outer)[None, :], other=0.0)  # [BLOCK_K, BLOCK_M]
        right_tile = x_pointer + (slot // k).to(tl.int64)[:, None] * x_stride + column[None, :]
        right = tl.load(right_tile, mask=served & (column < inner)[None, :], other=0.0)  # [BLOCK_K, BLOCK_N]
        slot = tl.load(slots_pointer + place + BLOCK_K, mask=place + BLOCK_K < end, other=sentinel)
        sums = tl.dot(tl.trans(left), right, sums, input_precision=FLOAT32_PRECISION)
    out = out_pointer + expert.to(tl.int64) * expert_stride
    out_tile = out + row.to(tl.int64)[:, None] * outer_stride + column.to(tl.int64)[None, :] * inner_stride
    tl.store(out_tile, sums.to(out_pointer.dtype.element_ty), mask=(row < outer)[:, None] & (column < inner)[None, :])


def weight_gradient(
    rows: torch.Tensor, x: torch.Tensor, arrangement: Arrangement, *, transposed: bool = False,
    tiles: ProductTiles | None = None,
) -> torch.Tensor:  # fmt: skip
    """[experts, outer, inner], contiguous, of what `expert_mlp` has checked; [experts, inner, outer] when transposed.

    Args:
        rows: [places, outer], contiguous rows; where there is no slot they may hold anything.
        x: [tokens, inner], contiguous rows.
        arrangement: of `arrange`.
        transposed: store each matrix transposed.
        tiles: how a matrix is cut; chosen when None.
    """
    experts, outer, inner = len(arrangement.first_tiles) - 1, rows.shape[1], x.shape[1]
    shape = (experts, inner, outer) if transposed else (experts, outer, inner)
    out = torch.empty(shape, dtype=x.dtype, device=x.device)
    expert_stride, *strides = (out.transpose(1, 2) if transposed else out).stride()
    tiles = tiles or gradient_tiles(architecture_of(x.device), x.dtype)
    weight_gradient_kernel[(tiles.tiles_of(outer, inner), experts)](
        rows, x, out, arrangement.slots, arrangement.first_tiles, outer, inner, arrangement.sentinel,
        arrangement.places.shape[1], arrangement.block, rows.stride(0), x.stride(0), expert_stride, *strides,
        **tiles.settings(),
    )  # fmt: skip
    return out


def gradient_tiles(arch: int | None, dtype: torch.dtype) -> ProductTiles:
    """Those of a product whose sums leave registers for the masks of two operands."""
    return candidates(arch, dtype, parts=True)[0]


def weight_gradient_reference(rows, x, arrangement, *, transposed=False):
    """The plain PyTorch meaning, expert by expert, in float32 at least."""
    wide = torch.promote_types(x.dtype, torch.float32)
    served = arrangement.slots < arrangement.sentinel
    experts = arrangement.tile_experts.repeat_interleave(arrangement.block)
    found = []
    for expert in range(len(arrangement.first_tiles) - 1):
        mine = served & (experts == expert)
        tokens = arrangement.slots[mine].long() // arrangement.places.shape[1]
        found.append(rows[mine].to(wide).T @ x[tokens].to(wide))
    out = torch.stack(found).to(x.dtype)
    return out.transpose(1, 2) if transposed else out


def compile_cases() -> list[CompileCase]:
    """What ships, for the compile gate: both ways of storing."""
    types = {"slots_pointer": "*i32", "first_tiles_pointer": "*i32"}
    cases = []
    for stride in ("inner_stride", "outer_stride"):
        cases += product_cases(weight_gradient_kernel, {stride: 1}, types, tiles_of=gradient_tiles)
    return cases
