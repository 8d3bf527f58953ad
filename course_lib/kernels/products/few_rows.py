"""Products for few rows: 1 to 64 tokens with a weight, and what stands around them in a decoder's step.

    out = x · weightᵀ                                       x [rows, inner], weight [outer, inner], out [rows, outer]

    option          what it makes of it
    epsilon, gain   an RMSNorm before:       out = (x ∘ gain) · weightᵀ · 1 / √(mean of x² + ε), for each row
    gated           a SwiGLU behind:         out = silu(gate) · up, where weight holds gate's rows, then up's
    residual        an addition behind:      out = residual + …

FLOPs: 2 · rows for each weight; bytes: 2 for each weight in 16 bits, and little else. So at 64 rows it is 64 FLOP/byte,
where an H100 has 295: the time is that of reading the weights, and all of the GPU has to read them all the time. A
weight of [2048, 2048] has too few tiles of rows for that. Therefore the inner dimension is cut into parts as well
(split K): each program leaves its part of the sums in memory, and the last one of a tile to arrive adds them up. It
adds in the order of the parts, so that the result has the same bits whoever was last.

The factor of the norm belongs to a row, so it can be applied behind the product: a program sums up the squares of the
x that it reads anyway. What is multiplied is x ∘ gain, rounded to the dtype of x, as it would be behind a norm of its
own; in float16 it must stay below 65,504. Everything else is in float32, rounded once at the end.

Between two kernels memory has nothing to do for 2 to 4 µs, as long as a weight of 2048 · 2048 takes. A product that is
`dependent` is started early (see `kernels.common.dependent`), and has the L2 cache fetch its first weights before it
waits for what the kernel before has written.

Source: Triton's matrix product with split K, as in Hoque et al., Accelerating a Triton fused kernel for W4A16 quantized
inference with SplitK work decomposition, arXiv 2402.00025.
"""

import itertools

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
from course_lib.kernels.products.tiles import FewRowsTiles, few_rows_tiles, padded_rows
from course_lib.kernels.products.workspace import ProductWorkspace, take_workspace

SPLIT_POINTERS = ("partial_sums_pointer", "partial_squares_pointer", "arrivals")  # None where nothing is split
ASKED_FOR = tl.constexpr(2)  # blocks of weights that a dependent product has brought into the L2 while it waits
EVEN = ("columns", "inner", "x_stride", "weight_stride", "out_stride", "residual_stride")  # multiples of 16 in a model


def few_rows_product_reference(x, weight, *, epsilon=None, gain=None, gated=False, residual=None):
    """The plain PyTorch meaning of `few_rows_product`, in float32 at least."""
    wide = torch.promote_types(x.dtype, torch.float32)
    rows = x.to(wide)
    if epsilon is not None:
        rows = rows * torch.rsqrt(rows.square().mean(dim=-1, keepdim=True) + epsilon)
    if gain is not None:
        rows = rows * gain.to(wide)
    result = rows @ weight.to(wide).t()
    if gated:
        gate, up = result.chunk(2, dim=-1)
        result = F.silu(gate) * up
    if residual is not None:
        result = result + residual.to(wide)
    return result.to(x.dtype)


@triton.jit
def weight_rows(tile, columns, GATED: tl.constexpr, BLOCK_N: tl.constexpr):
    """Which rows of the weight [BLOCK_N] a tile has; the last one again in the place of those beyond the end.

    With a gate they are rows of gate and up in turns, so that the two numbers of an output lie in one thread.
    """
    number = tl.arange(0, BLOCK_N)
    if GATED:
        column = tl.minimum(tile * (BLOCK_N // 2) + number // 2, columns - 1)
        return column + number % 2 * columns
    return tl.minimum(tile * BLOCK_N + number, columns - 1)


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
    sums, squares, tile, row, out_pointer, residual_pointer, rows, columns, inner, out_stride, residual_stride,
    epsilon, NORMED: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """What stands behind a tile's product: sums [BLOCK_M, BLOCK_N] of row [BLOCK_M], whose squares add up to these."""
    if NORMED:
        sums *= tl.rsqrt(squares / inner + epsilon)[:, None]
    if GATED:
        gate, up = tl.split(tl.reshape(sums, [sums.shape[0], sums.shape[1] // 2, 2]))  # [BLOCK_M, BLOCK_N / 2] each
        sums = gate * tl.sigmoid(gate) * up
    column = tile * sums.shape[1] + tl.arange(0, sums.shape[1])
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    if residual_pointer is not None:
        residual_tile = residual_pointer + row[:, None] * residual_stride + column[None, :]
        sums += tl.load(residual_tile, mask=inside, other=0.0).to(tl.float32)
    out_tile = out_pointer + row[:, None] * out_stride + column[None, :]
    tl.store(out_tile, sums.to(out_pointer.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=("rows",))
def few_rows_kernel(
    x_pointer,
    weight_pointer,
    out_pointer,
    gain_pointer,
    residual_pointer,
    partial_sums_pointer,
    partial_squares_pointer,
    arrivals,
    rows,
    columns,
    inner,
    x_stride,
    weight_stride,
    out_stride,
    residual_stride,
    epsilon,
    NORMED: tl.constexpr,
    GATED: tl.constexpr,
    DEPENDENT: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One program: BLOCK_N rows of the weight, one of SPLITS parts of them. columns: of out."""
    tile, split = tl.program_id(0), tl.program_id(1)
    row = tl.arange(0, BLOCK_M).to(tl.int64)  # [BLOCK_M]
    x_rows = x_pointer + row[:, None] * x_stride
    weight_row = weight_rows(tile, columns, GATED, BLOCK_N).to(tl.int64)  # [BLOCK_N]
    weight_tile = weight_pointer + weight_row[:, None] * weight_stride  # [BLOCK_N, 1]
    sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    squares = tl.zeros([BLOCK_M, BLOCK_K], tl.float32)
    begin, end = whole_tiles(inner, split, SPLITS, BLOCK_K)
    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()
        ask_for_weights(weight_tile, inner, begin, BLOCK_N, BLOCK_K)
        tl.extra.cuda.gdc_wait()
    for start in tl.range(begin, end, BLOCK_K):
        element = start + tl.arange(0, BLOCK_K)
        weights = tl.load(weight_tile + element[None, :], mask=element[None, :] < inner, other=0.0,
                          eviction_policy="evict_first")  # fmt: skip
        inside = (row < rows)[:, None] & (element < inner)[None, :]
        x = tl.load(x_rows + element[None, :], mask=inside, other=0.0)  # [BLOCK_M, BLOCK_K]
        if NORMED:
            wide = x.to(tl.float32)
            squares += wide * wide
            if gain_pointer is not None:
                gain = tl.load(gain_pointer + element, mask=element < inner, other=0.0).to(tl.float32)  # [BLOCK_K]
                x = (wide * gain[None, :]).to(x.dtype)
        sums = tl.dot(x, tl.trans(weights), sums, input_precision=FLOAT32_PRECISION)
    squares = tl.sum(squares, axis=1)  # [BLOCK_M]
    if SPLITS == 1:
        finish_product(sums, squares, tile, row, out_pointer, residual_pointer, rows, columns, inner, out_stride,
                       residual_stride, epsilon, NORMED, GATED)  # fmt: skip
    else:
        # Of the tile, [SPLITS, rows, BLOCK_N] and [SPLITS, rows].
        first = tile.to(tl.int64) * SPLITS * rows + row  # [BLOCK_M]
        part = first + split * rows
        of_part = part[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]  # [BLOCK_M, BLOCK_N]
        tl.store(partial_sums_pointer + of_part, sums, mask=(row < rows)[:, None])
        if NORMED:
            tl.store(partial_squares_pointer + part, squares, mask=row < rows)
        tl.debug_barrier()  # all threads' stores come before the count, which releases them to the other programs
        if tl.atomic_add(arrivals + tile, 1, sem="acq_rel", scope="gpu") == SPLITS - 1:
            sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            squares = tl.zeros([BLOCK_M], tl.float32)
            for other in tl.static_range(SPLITS):
                part = first + other * rows
                of_part = part[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
                sums += tl.load(partial_sums_pointer + of_part, mask=(row < rows)[:, None], other=0.0)
                if NORMED:
                    squares += tl.load(partial_squares_pointer + part, mask=row < rows, other=0.0)
            finish_product(sums, squares, tile, row, out_pointer, residual_pointer, rows, columns, inner, out_stride,
                           residual_stride, epsilon, NORMED, GATED)  # fmt: skip
            tl.store(arrivals + tile, 0)


def few_rows_product(
    x, weight, out=None, *, epsilon=None, gain=None, gated=False, residual=None, dependent=False,
    workspace: ProductWorkspace | None = None, tiles: FewRowsTiles | None = None,
) -> torch.Tensor:  # fmt: skip
    """x · weightᵀ for 1 to 64 rows, at the speed at which the weight is read; the same bits at every run.

    Args:
        x: [rows, inner], float32, float16 or bfloat16.
        weight: [outer, inner], as nn.Linear keeps it, of x's dtype.
        out: [rows, columns], of x's dtype or float32; a new tensor of x's dtype when None. It may be `residual`.
        epsilon: ε of an RMSNorm of x's rows before the product; None for no norm.
        gain: [inner], that norm's weight, of x's dtype or float32; None for 1, or where it is folded into `weight`.
        gated: weight holds the rows of a gate, then as many of up; the result is silu(gate) · up.
        residual: [rows, columns], of x's dtype, added at the end.
        dependent: start while the kernel before still runs, ask for the first weights, and wait for it only then. Any
            kernel may stand before and behind.
        workspace: what `few_rows_workspace` made; where parts are added up, one is allocated when None.
        tiles: how it is cut; chosen when None.

    columns are outer, or outer / 2 with a gate. Rows of each tensor are contiguous, and may lie apart.

    Returns out.

    Raises:
        ValueError: an argument is not as above, or out overlaps one that is read; the message names it.
    """
    columns = check_arguments(x, weight, epsilon, gain, gated, residual)
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
    parts, squares, arrivals = take_workspace(workspace, rows, outer, tiles, x.device)
    few_rows_kernel[(triton.cdiv(outer, tiles.outer), tiles.splits)](
        x, weight, out, gain, residual, parts, squares, arrivals, rows, columns, inner, x.stride(0), weight.stride(0),
        out.stride(0), 0 if residual is None else residual.stride(0), epsilon or 0.0, NORMED=epsilon is not None,
        GATED=gated, **settings(rows, tiles), **options,
    )  # fmt: skip
    return out


def settings(rows: int, tiles: FewRowsTiles) -> dict:
    """What tiles are for a launch with this many rows."""
    return {"SPLITS": tiles.splits, "BLOCK_M": padded_rows(rows), "BLOCK_N": tiles.outer, "BLOCK_K": tiles.inner,
            "num_warps": tiles.warps, "num_stages": tiles.stages}  # fmt: skip


def compile_cases() -> list[CompileCase]:
    """What ships, for the compile gate: with a norm, split and with a gate, at an even inner dimension."""
    cases = []
    for arch, rows, outer in itertools.product(ARCHITECTURES, (1, 32, 64), (2048, 128_256)):
        sixteen_bits = torch.float16 if arch < 80 else torch.bfloat16
        for dtype in (sixteen_bits, torch.float32) if outer == 2048 else (sixteen_bits,):
            tiles = few_rows_tiles(rows, outer, 2048, dtype, arch, 132)
            constants = settings(rows, tiles)
            options = {"num_warps": constants.pop("num_warps"), "num_stages": constants.pop("num_stages")}
            whole = dict.fromkeys(SPLIT_POINTERS) if tiles.splits == 1 else {}
            signature = signature_of(few_rows_kernel, KINDS[dtype], **whole)
            matrix = {80: "mma.sync", 86: "mma.sync", 89: "mma.sync", 90: "wgmma" if rows == 64 else "mma.sync",
                      100: "tcgen05" if rows == 64 else "mma.sync", 120: "mma.sync"}  # fmt: skip
            cases.append(CompileCase(
                few_rows_kernel, signature, {"NORMED": True, "GATED": outer > 2048,
                 "DEPENDENT": arch >= FIRST_WITH_DEPENDENT_LAUNCHES, **constants, **whole},
                archs=(arch,), instruction=None if dtype == torch.float32 else matrix,
                divisible=[name for name, kind in signature.items() if kind[0] == "*" or name in EVEN], **options,
                label=f"{KINDS[dtype]} {rows} rows {tuple(tiles)}",
            ))  # fmt: skip
    return cases
