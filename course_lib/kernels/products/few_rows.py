"""Products for few rows: 1 to 64 tokens with a weight, and what stands around them in a decoder's step.

    out = x · weightᵀ                                       x [rows, inner], weight [outer, inner], out [rows, outer]

    option          what it makes of it
    epsilon         an RMSNorm before:       out = (x ∘ gain) · weightᵀ · 1 / √(mean of x² + ε), of `Unscaled` rows
    gated           a SwiGLU behind:         out = silu(gate) · up, where weight holds gate's rows, then up's
    residual        an addition behind:      out = residual + …
    gain            the next norm's weight:  out ∘ gain and the sums of out², as `Unscaled` rows

FLOPs: 2 · rows for each weight; bytes: 2 for each weight in 16 bits, and little else. So at 64 rows it is 64 FLOP/byte,
where an H100 has 295: the time is that of reading the weights, and all of the GPU has to read them all the time. A
weight of [2048, 2048] has too few tiles of rows for that. Therefore the inner dimension is cut into parts as well
(split K): each program leaves its part of the sums in memory, and the last one of a tile to arrive adds them up. It
adds in the order of the parts, so that the result has the same bits whoever was last.

A norm between two products needs no kernel of its own. Its factor belongs to a row, so it can be applied behind the
next product, and there is time until then to add up a row's squares: the product before leaves one sum for each of its
tiles. It also multiplies by the norm's weight. What is multiplied next is x ∘ gain, rounded to the dtype of x as behind
a norm of its own; in float16 it must stay below 65,504. Everything else is in float32, rounded once at the end.

Between two kernels memory has nothing to do for 2 to 4 µs, as long as a weight of 2048 · 2048 takes. A product that is
`dependent` is started early (see `kernels.common.dependent`), and has the L2 cache fetch its first weights before it
waits for what the kernel before has written.

Source: Triton's matrix product with split K, as in Hoque et al., Accelerating a Triton fused kernel for W4A16 quantized
inference with SplitK work decomposition, arXiv 2402.00025.
"""

import itertools
from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from course_lib.hardware.compiler.architectures import ARCHITECTURES
from course_lib.hardware.compiler.cases import CompileCase
from course_lib.kernels.common.dependent import FIRST_WITH_DEPENDENT_LAUNCHES, launch_options
from course_lib.kernels.common.machine import architecture_of, multiprocessor_count
from course_lib.kernels.common.numbers import FLOAT32_PRECISION
from course_lib.kernels.common.signatures import KINDS, signature_of
from course_lib.kernels.common.splits import whole_tiles
from course_lib.kernels.products.checks import (
    check_arguments,
    check_out,
    check_tiles,
)
from course_lib.kernels.products.parts import weight_rows_of_tile
from course_lib.kernels.products.tiles import FewRowsTiles, few_rows_tiles, padded_rows
from course_lib.kernels.products.workspace import ProductWorkspace, take_workspace

SPLIT_POINTERS = ("partial_sums_pointer", "arrivals")  # None where nothing is split
NORM_BEHIND = ("gain_pointer", "unscaled_pointer", "squares_pointer")  # None where no norm follows
ASKED_FOR = tl.constexpr(2)  # blocks of weights that a dependent product has brought into the L2 while it waits
EVEN = ("columns", "inner", "x_stride", "weight_stride", "out_stride", "residual_stride")  # multiples of 16 in a model


class Unscaled(NamedTuple):
    """Rows of an RMSNorm that miss their factor 1 / √(mean of x² + ε)."""

    rows: torch.Tensor  # [rows, width], x ∘ gain
    squares: torch.Tensor  # float32 [rows, parts], contiguous; of each row they add up to the sum of x²


def few_rows_product_reference(x, weight, *, epsilon=None, gated=False, residual=None, gain=None):
    """The plain PyTorch meaning of `few_rows_product`, in float32 at least."""
    rows, squares = x if isinstance(x, Unscaled) else (x, None)
    wide = torch.promote_types(rows.dtype, torch.float32)
    result = rows.to(wide) @ weight.to(wide).t()
    if squares is not None:
        result = result * torch.rsqrt(squares.to(wide).sum(dim=1, keepdim=True) / rows.shape[1] + epsilon)
    if gated:
        gate, up = result.chunk(2, dim=-1)
        result = F.silu(gate) * up
    if residual is not None:
        result = result + residual.to(wide)
    out = result.to(rows.dtype)
    if gain is None:
        return out
    stored = out.to(wide)
    return out, Unscaled((stored * gain.to(wide)).to(rows.dtype), stored.square().sum(dim=1, keepdim=True))


@triton.jit
def ask_for_weights(weight_tile, inner, begin, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """Have the first ASKED_FOR blocks of a part, from column `begin` on, brought into the L2 cache; nothing is read.

    weight_tile: [BLOCK_N, 1], where the rows begin.
    """
    LINE: tl.constexpr = 1024 // weight_tile.dtype.element_ty.primitive_bitwidth  # numbers of 128 bytes
    element = begin + tl.arange(0, ASKED_FOR * BLOCK_K // LINE) * LINE  # [lines]
    address = (weight_tile + tl.minimum(element, inner - 1)[None, :]).to(tl.int64)  # [BLOCK_N, lines]
    tl.inline_asm_elementwise("prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [address], dtype=tl.int32,
                              is_pure=False, pack=1)  # fmt: skip


@triton.jit
def finish_product(
    sums, squares_before, tile, row, out_pointer, residual_pointer, gain_pointer, unscaled_pointer, squares_pointer,
    rows, columns, inner, out_stride, residual_stride, epsilon, NORMED: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """What stands behind a tile's product: sums [BLOCK_M, BLOCK_N] of row [BLOCK_M].

    squares_before: [BLOCK_M, PARTS], which add up to the squares of these rows before their norm.
    """
    if NORMED:
        sums *= tl.rsqrt(tl.sum(squares_before, axis=1) / inner + epsilon)[:, None]
    if GATED:
        gate, up = tl.split(tl.reshape(sums, [sums.shape[0], sums.shape[1] // 2, 2]))  # [BLOCK_M, BLOCK_N / 2] each
        sums = gate * tl.sigmoid(gate) * up
    column = tile * sums.shape[1] + tl.arange(0, sums.shape[1])
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    if residual_pointer is not None:
        residual_tile = residual_pointer + row[:, None] * residual_stride + column[None, :]
        sums += tl.load(residual_tile, mask=inside, other=0.0).to(tl.float32)
    out_tile = out_pointer + row[:, None] * out_stride + column[None, :]
    out = sums.to(out_pointer.dtype.element_ty)
    tl.store(out_tile, out, mask=inside)
    if gain_pointer is not None:
        stored = tl.where(inside, out.to(tl.float32), 0.0)
        gain = tl.load(gain_pointer + column, mask=column < columns, other=0.0).to(tl.float32)
        unscaled_tile = unscaled_pointer + row[:, None] * columns + column[None, :]
        tl.store(unscaled_tile, (stored * gain[None, :]).to(unscaled_pointer.dtype.element_ty), mask=inside)
        tiles = tl.cdiv(columns, sums.shape[1])
        tl.store(squares_pointer + row * tiles + tile, tl.sum(stored * stored, axis=1), mask=row < rows)


@triton.jit(do_not_specialize=("rows",))
def few_rows_kernel(
    x_pointer,
    weight_pointer,
    out_pointer,
    squares_before_pointer,
    residual_pointer,
    gain_pointer,
    unscaled_pointer,
    squares_pointer,
    partial_sums_pointer,
    arrivals,
    rows,
    columns,
    inner,
    parts_before,
    x_stride,
    weight_stride,
    out_stride,
    residual_stride,
    epsilon,
    PARTS: tl.constexpr,
    GATED: tl.constexpr,
    DEPENDENT: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One program: BLOCK_N rows of the weight, one of SPLITS parts of them. columns: of out.

    squares_before: [rows, parts_before], at most PARTS; 0 where x is whole.
    """
    tile, split = tl.program_id(0), tl.program_id(1)
    row = tl.arange(0, BLOCK_M).to(tl.int64)  # [BLOCK_M]
    x_rows = x_pointer + row[:, None] * x_stride
    weight_row = weight_rows_of_tile(tile, columns, GATED, BLOCK_N).to(tl.int64)  # [BLOCK_N]
    weight_tile = weight_pointer + weight_row[:, None] * weight_stride  # [BLOCK_N, 1]
    sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    NORMED: tl.constexpr = PARTS > 0
    begin, end = whole_tiles(inner, split, SPLITS, BLOCK_K)
    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()
        ask_for_weights(weight_tile, inner, begin, BLOCK_N, BLOCK_K)
        tl.extra.cuda.gdc_wait()
    squares_before = None
    if NORMED:  # asked for here, added up behind the loop
        part = tl.arange(0, PARTS)[None, :]
        squares_before = tl.load(squares_before_pointer + row[:, None] * parts_before + part,
                                 mask=(row < rows)[:, None] & (part < parts_before), other=0.0)  # fmt: skip
    for start in tl.range(begin, end, BLOCK_K):
        element = start + tl.arange(0, BLOCK_K)
        weights = tl.load(weight_tile + element[None, :], mask=element[None, :] < inner, other=0.0,
                          eviction_policy="evict_first")  # fmt: skip
        inside = (row < rows)[:, None] & (element < inner)[None, :]
        x = tl.load(x_rows + element[None, :], mask=inside, other=0.0)  # [BLOCK_M, BLOCK_K]
        sums = tl.dot(x, tl.trans(weights), sums, input_precision=FLOAT32_PRECISION)
    if SPLITS == 1:
        finish_product(sums, squares_before, tile, row, out_pointer, residual_pointer, gain_pointer, unscaled_pointer,
                       squares_pointer, rows, columns, inner, out_stride, residual_stride, epsilon, NORMED,
                       GATED)  # fmt: skip
    else:
        first = tile.to(tl.int64) * SPLITS * rows + row  # [BLOCK_M]: of the tile, [SPLITS, rows, BLOCK_N]
        of_part = (first + split * rows)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]  # [BLOCK_M, BLOCK_N]
        tl.store(partial_sums_pointer + of_part, sums, mask=(row < rows)[:, None])
        tl.debug_barrier()  # all threads' stores come before the count, which releases them to the other programs
        if tl.atomic_add(arrivals + tile, 1, sem="acq_rel", scope="gpu") == SPLITS - 1:
            sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            for other in tl.static_range(SPLITS):
                of_part = (first + other * rows)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
                sums += tl.load(partial_sums_pointer + of_part, mask=(row < rows)[:, None], other=0.0)
            finish_product(sums, squares_before, tile, row, out_pointer, residual_pointer, gain_pointer,
                           unscaled_pointer, squares_pointer, rows, columns, inner, out_stride, residual_stride,
                           epsilon, NORMED, GATED)  # fmt: skip
            tl.store(arrivals + tile, 0)


def few_rows_product(
    x, weight, out=None, *, epsilon=None, gated=False, residual=None, gain=None, dependent=False,
    workspace: ProductWorkspace | None = None, tiles: FewRowsTiles | None = None,
):  # fmt: skip
    """x · weightᵀ for 1 to 64 rows, at the speed at which the weight is read; the same bits at every run.

    Args:
        x: [rows, inner], float32, float16 or bfloat16; or `Unscaled` rows of an RMSNorm, whose factor is applied here.
        weight: [outer, inner], as nn.Linear keeps it, of x's dtype.
        out: [rows, columns], of x's dtype or float32; a new tensor of x's dtype when None. It may be `residual`.
        epsilon: ε of the norm that x is of; None for a tensor.
        gated: weight holds the rows of a gate, then as many of up; the result is silu(gate) · up.
        residual: [rows, columns], of x's dtype, added at the end.
        gain: [columns], the weight of an RMSNorm that follows, of x's dtype or float32; None where none does.
        dependent: start while the kernel before still runs, ask for the first weights, and wait for it only then. Any
            kernel may stand before and behind.
        workspace: what `few_rows_workspace` made; where parts are added up, one is allocated when None.
        tiles: how it is cut; chosen when None.

    columns are outer, or outer / 2 with a gate. Rows of each tensor are contiguous, and may lie apart.

    Returns out; with a gain (out, the next norm's `Unscaled` rows, of x's dtype).

    Raises:
        ValueError: an argument is not as above, or out overlaps one that is read; the message names it.
    """
    x, squares_before = x if isinstance(x, Unscaled) else (x, None)
    columns = check_arguments(x, weight, squares_before, epsilon, gated, residual, gain)
    (rows, inner), outer = x.shape, weight.shape[0]
    if out is None:
        out = torch.empty(rows, columns, dtype=x.dtype, device=x.device)
    else:
        check_out(out, (rows, columns), x, weight, residual)
    options = launch_options(dependent, x.device)
    if tiles is None:
        tiles = few_rows_tiles(rows, outer, inner, x.dtype, architecture_of(x.device), multiprocessor_count(x.device))
    else:
        check_tiles(tiles)
    sums, arrivals = take_workspace(workspace, rows, outer, tiles, x.device)
    programs, parts = triton.cdiv(outer, tiles.outer), 0 if squares_before is None else squares_before.shape[1]
    behind = None
    if gain is not None:
        behind = Unscaled(torch.empty(rows, columns, dtype=x.dtype, device=x.device),
                          torch.empty(rows, programs, dtype=torch.float32, device=x.device))  # fmt: skip
    few_rows_kernel[(programs, tiles.splits)](
        x, weight, out, squares_before, residual, gain, *(behind or (None, None)), sums, arrivals, rows, columns, inner,
        parts, x.stride(0), weight.stride(0), out.stride(0), 0 if residual is None else residual.stride(0),
        epsilon or 0.0, PARTS=triton.next_power_of_2(parts) if parts else 0, GATED=gated, **settings(rows, tiles),
        **options,
    )  # fmt: skip
    return out if behind is None else (out, behind)


def settings(rows: int, tiles: FewRowsTiles) -> dict:
    """What tiles are for a launch with this many rows."""
    return {"SPLITS": tiles.splits, "BLOCK_M": padded_rows(rows), "BLOCK_N": tiles.outer, "BLOCK_K": tiles.inner,
            "num_warps": tiles.warps, "num_stages": tiles.stages}  # fmt: skip


def compile_cases() -> list[CompileCase]:
    """What ships, for the compile gate: behind a norm and before one, split, and with a gate; even sizes."""
    cases = []
    for arch, rows, outer in itertools.product(ARCHITECTURES, (1, 32, 64), (2048, 128_256)):
        sixteen_bits = torch.float16 if arch < 80 else torch.bfloat16
        for dtype in (sixteen_bits, torch.float32) if outer == 2048 else (sixteen_bits,):
            tiles = few_rows_tiles(rows, outer, 2048, dtype, arch, 132)
            constants = settings(rows, tiles)
            options = {"num_warps": constants.pop("num_warps"), "num_stages": constants.pop("num_stages")}
            missing = dict.fromkeys((*(SPLIT_POINTERS if tiles.splits == 1 else ()),
                                     *(NORM_BEHIND if outer > 2048 else ())))  # fmt: skip
            given = {name: "*fp32" for name in ("squares_before_pointer", "squares_pointer") if name not in missing}
            signature = signature_of(few_rows_kernel, KINDS[dtype], **missing, **given)
            matrix = {80: "mma.sync", 86: "mma.sync", 89: "mma.sync", 90: "wgmma" if rows == 64 else "mma.sync",
                      100: "tcgen05" if rows == 64 else "mma.sync", 120: "mma.sync"}  # fmt: skip
            cases.append(CompileCase(
                few_rows_kernel, signature, {"PARTS": 32, "GATED": outer > 2048,
                 "DEPENDENT": arch >= FIRST_WITH_DEPENDENT_LAUNCHES, **constants, **missing},
                archs=(arch,), instruction=None if dtype == torch.float32 else matrix,
                divisible=[name for name, kind in signature.items() if kind[0] == "*" or name in EVEN], **options,
                label=f"{KINDS[dtype]} {rows} rows {tuple(tiles)}",
            ))  # fmt: skip
    return cases
