"""Add a residual and normalise by the root mean square, in one pass, with both results.

    summed[r, c]     = x[r, c] + residual[r, c]                             rounded to the dtype of x
    normalised[r, c] = summed[r, c] · weight[c] / √(mean over c of summed[r, :]² + ε)

    as                        reads  writes   elements moved for each element
    two operations              3      2            5          the addition; the norm, which reads the sum again
    one pass                    2      2            4          the sum stays in registers: rows up to ONE_PASS_BYTES
    two passes                  3      2            5          longer rows; the third read is likely to be from the L2
    the norm alone              1      1            2          where there is no residual

FLOPs: about 5 per element, in 16 bits less than 1 per byte. Written out step by step in 16 bits the norm alone moves
more than ten elements (a cast, a square, a mean, two products, another cast); that is what fusion saves.

The norm is that of the sum as it is stored, after rounding, so that the backward pass, which only has the stored sum,
computes the gradient of exactly this function. Arithmetic is in float32, rounded once at the end.
ε = 0 is allowed: a row of zeros is then 0/0, NaN, as in torch.nn.functional.rms_norm. A float32 row whose squares
overflow (numbers beyond about 1.8e19) gives zeros, as there.

Source: Zhang and Sennrich, Root mean square layer normalization, arXiv 1910.07467.
"""

import math

import torch
import triton
import triton.language as tl

from course_lib.hardware.compiler.architectures import ARCHITECTURES
from course_lib.hardware.compiler.cases import CompileCase
from course_lib.hardware.device import interpreting
from course_lib.kernels.common.checks import FLOAT_DTYPES, as_rows, check_alike, check_tensor
from course_lib.kernels.common.dependent import launch_options, wait_for_kernel_before
from course_lib.kernels.common.numbers import LARGEST_GROUP
from course_lib.kernels.common.signatures import signature_of
from course_lib.kernels.fused.checks import check_epsilon, check_weight
from course_lib.kernels.softmax.rows import reread

ONE_PASS_BYTES = 65536  # a quarter of a multiprocessor's registers: two such rows are on their way at a time
ONE_PASS_BYTES_ALONE = 131072  # without a residual
TILE_ELEMENTS = 2048  # several short rows make one tile of this size
TILE_COLUMNS = 8192  # of two passes
# Warps by the elements of a tile: 16 to 64 elements a thread, 128 in the longest 16-bit rows.
WARPS = {2048: 4, 4096: 4, 8192: 8, 16384: 16, 32768: 16, 65536: 16}
PACKED_COLUMNS = 65536  # 16-bit rows of this width stay in registers as 16 bits
LARGE = (80, 90, 100)  # architectures for which rows that fill the registers are compiled by the gate


def add_rms_norm_reference(x, residual, weight, epsilon=1e-6):
    """The plain PyTorch meaning of `add_rms_norm`, in float32 at least; residual None stands for zeros."""
    summed = x if residual is None else x + residual
    wide = summed.float() if summed.dtype.itemsize < 4 else summed
    normalised = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + epsilon) * weight.to(wide.dtype)
    return normalised.to(x.dtype), summed


@triton.jit
def inverse_of_rms(squares, columns, epsilon):
    """1 / √(squares / columns + ε) from a row's sum of squares."""
    return tl.rsqrt(squares / columns + epsilon)


@triton.jit
def add_rms_norm_kernel(
    x_pointer,
    residual_pointer,
    weight_pointer,
    normalised_pointer,
    summed_pointer,
    rows,
    column_groups,
    x_stride_groups,
    residual_stride_groups,
    epsilon,
    GROUP: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    PACKED: tl.constexpr,
    DEPENDENT: tl.constexpr = False,
):
    """One program: BLOCK_ROWS whole rows, read once; both results, which are contiguous, written once.

    Columns and strides come as numbers of groups of GROUP elements, so that the compiler knows what divides them and
    loads a group at once. residual_pointer and summed_pointer are None together: the norm alone.
    """
    wait_for_kernel_before(DEPENDENT)
    columns = column_groups * GROUP
    row = (tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS))[:, None]  # [BLOCK_ROWS, 1]
    column = tl.arange(0, BLOCK_COLUMNS)[None, :]  # [1, BLOCK_COLUMNS]
    inside = (row < rows) & (column < columns)
    summed = tl.load(x_pointer + row * (x_stride_groups * GROUP) + column, mask=inside, other=0.0)
    if residual_pointer is not None:
        residual_tile = residual_pointer + row * (residual_stride_groups * GROUP) + column
        residual = tl.load(residual_tile, mask=inside, other=0.0)  # [BLOCK_ROWS, BLOCK_COLUMNS]
        summed = (summed.to(tl.float32) + residual.to(tl.float32)).to(summed.dtype)
        tl.store(summed_pointer + row * columns + column, summed, mask=inside)
    wide = summed.to(tl.float32)  # [BLOCK_ROWS, BLOCK_COLUMNS]
    inverse = inverse_of_rms(tl.sum(wide * wide, axis=1, keep_dims=True), columns, epsilon)  # [BLOCK_ROWS, 1]
    if PACKED:
        wide = reread(summed).to(tl.float32)
    weight = tl.load(weight_pointer + column, mask=column < columns, other=0.0).to(tl.float32)  # [1, BLOCK_COLUMNS]
    normalised = wide * inverse * weight
    normalised_tile = normalised_pointer + row * columns + column
    tl.store(normalised_tile, normalised.to(normalised_pointer.dtype.element_ty), mask=inside)


@triton.jit
def add_rms_norm_two_passes_kernel(
    x_pointer,
    residual_pointer,
    weight_pointer,
    normalised_pointer,
    summed_pointer,
    column_groups,
    x_stride_groups,
    residual_stride_groups,
    epsilon,
    GROUP: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    DEPENDENT: tl.constexpr = False,
):
    """One program: one long row, tile by tile. The second pass reads the sum that the first has written."""
    wait_for_kernel_before(DEPENDENT)
    columns = column_groups * GROUP
    row = tl.program_id(0).to(tl.int64)
    x_row = x_pointer + row * (x_stride_groups * GROUP)
    squares = tl.zeros([BLOCK_COLUMNS], tl.float32)
    for start in tl.range(0, columns, BLOCK_COLUMNS):
        column = start + tl.arange(0, BLOCK_COLUMNS)
        inside = column < columns
        summed = tl.load(x_row + column, mask=inside, other=0.0, eviction_policy="evict_last")  # [BLOCK_COLUMNS]
        if residual_pointer is not None:
            residual_row = residual_pointer + row * (residual_stride_groups * GROUP)
            residual = tl.load(residual_row + column, mask=inside, other=0.0, eviction_policy="evict_first")
            summed = (summed.to(tl.float32) + residual.to(tl.float32)).to(summed.dtype)
            tl.store(summed_pointer + row * columns + column, summed, mask=inside, eviction_policy="evict_last")
        squares += summed.to(tl.float32) * summed.to(tl.float32)
    inverse = inverse_of_rms(tl.sum(squares, axis=0), columns, epsilon)
    tl.debug_barrier()  # what other threads of this program have written is seen from here on
    summed_row = x_row
    if residual_pointer is not None:
        summed_row = summed_pointer + row * columns
    for start in tl.range(0, columns, BLOCK_COLUMNS):
        column = start + tl.arange(0, BLOCK_COLUMNS)
        inside = column < columns
        summed = tl.load(summed_row + column, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
        weight = tl.load(weight_pointer + column, mask=inside, other=0.0).to(tl.float32)  # [BLOCK_COLUMNS]
        normalised = (summed * inverse * weight).to(normalised_pointer.dtype.element_ty)
        tl.store(normalised_pointer + row * columns + column, normalised, mask=inside, eviction_policy="evict_first")


def add_rms_norm_forward(x, residual, weight, epsilon=1e-6, *, dependent=False):
    """(normalised, summed) by a kernel, without a gradient; `norm_operators.add_rms_norm` has one.

    Args:
        x: [..., hidden], float32, float16 or bfloat16, with a contiguous last dimension and leading dimensions that
            flatten without a copy. Any hidden size from 1 on; any number of rows, also none.
        residual: like x, with strides of its own; or None for the norm of x alone.
        weight: [hidden], contiguous, of x's dtype or float32.
        epsilon: at least 0, added to the mean square.
        dependent: start while the kernel before still runs; from sm_90 on.

    Returns:
        Two contiguous tensors of x's shape and dtype; the second is None where residual is.

    Raises:
        ValueError: an argument is not as above; the message names it.
    """
    check_tensor("x", x, FLOAT_DTYPES)
    x_rows = as_rows("x", x)
    if residual is not None:
        check_tensor("residual", residual, FLOAT_DTYPES)
        check_alike("residual", residual, "x", x)
    residual_rows = None if residual is None else as_rows("residual", residual)
    check_weight(weight, x)
    check_epsilon(epsilon)
    options = launch_options(dependent, x.device)
    normalised = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    summed = None if residual is None else torch.empty_like(normalised)
    if x_rows.shape[0] > 0:
        launch(x_rows, residual_rows, weight, normalised, summed, epsilon, options)
    return normalised, summed


def launch(x, residual, weight, normalised, summed, epsilon, options: dict) -> None:
    rows, columns = x.shape
    residual_stride = 0 if residual is None else residual.stride(0)
    group = math.gcd(columns, x.stride(0), residual_stride, LARGEST_GROUP)
    tensors = (x, residual, weight, normalised, summed)
    sizes = (columns // group, x.stride(0) // group, residual_stride // group, float(epsilon))
    if columns * x.element_size() > (ONE_PASS_BYTES_ALONE if residual is None else ONE_PASS_BYTES):
        add_rms_norm_two_passes_kernel[(rows,)](
            *tensors, *sizes, GROUP=group, BLOCK_COLUMNS=TILE_COLUMNS, num_warps=WARPS[TILE_COLUMNS], **options
        )
        return
    block_columns = triton.next_power_of_2(columns)
    block_rows = max(1, TILE_ELEMENTS // block_columns)
    packed = block_columns >= PACKED_COLUMNS and not interpreting()
    add_rms_norm_kernel[(triton.cdiv(rows, block_rows),)](
        *tensors, rows, *sizes, GROUP=group, BLOCK_ROWS=block_rows, BLOCK_COLUMNS=block_columns, PACKED=packed,
        num_warps=WARPS[block_rows * block_columns], **options,
    )  # fmt: skip


def compile_cases() -> list[CompileCase]:
    """What ships, for the compile gate: a row of 4096, the longest rows of one pass, and two passes."""
    cases = []
    for kind, columns, archs in (("fp16", 4096, tuple(ARCHITECTURES)), ("bf16", 32768, LARGE), ("fp32", 16384, LARGE)):
        constants: dict[str, object] = {"GROUP": 8, "BLOCK_ROWS": 1, "BLOCK_COLUMNS": columns, "PACKED": False}
        cases.append(CompileCase(add_rms_norm_kernel, signature_of(add_rms_norm_kernel, kind), constants,
                                 num_warps=WARPS[columns], archs=archs, label=f"{kind} {columns}"))  # fmt: skip
    # Without a residual rows fill the registers. Of a thread's 512 bytes 40 spill on sm_90, 232 on sm_80.
    alone: dict[str, object] = {"residual_pointer": None, "summed_pointer": None, "GROUP": 8, "BLOCK_ROWS": 1}
    for kind, columns in (("bf16", 65536), ("fp32", 32768)):
        signature = signature_of(add_rms_norm_kernel, kind, residual_pointer=None, summed_pointer=None)
        constants = alone | {"BLOCK_COLUMNS": columns, "PACKED": columns == PACKED_COLUMNS}
        cases.append(CompileCase(add_rms_norm_kernel, signature, constants, num_warps=WARPS[columns], archs=LARGE,
                                 max_spill_bytes=256, label=f"{kind} {columns} alone"))  # fmt: skip
    for kind in ("fp16", "fp32"):
        constants = {"GROUP": 8, "BLOCK_COLUMNS": TILE_COLUMNS}
        signature = signature_of(add_rms_norm_two_passes_kernel, kind)
        cases.append(CompileCase(add_rms_norm_two_passes_kernel, signature, constants, num_warps=WARPS[TILE_COLUMNS],
                                 label=kind))  # fmt: skip
    return cases
