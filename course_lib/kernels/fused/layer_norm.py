"""LayerNorm in one pass: mean and variance of a row in registers, then the row normalised.

    out[r, c] = (x[r, c] - mean[r]) / √(variance[r] + ε) · weight[c] + bias[c]

    one pass             1 read and 1 write of an element; rows of up to ONE_PASS_BYTES, in 16 bits PACKED_COLUMNS
    a loop over tiles    2 reads and 1 write; longer rows, whose second read is mostly from the L2

FLOPs: about 8 per element. The variance is the mean of (x - mean)², after the mean is known; in the loop every lane
keeps the moments of its own columns, merged at its end (Welford's update). Why, is told in `group_norm_mish`. The mean
and 1 / √(variance + ε), 8 bytes a row, are kept for the backward pass.

Source: Ba, Kiros and Hinton, Layer normalization, arXiv 1607.06450.
"""

import math

import torch
import triton
import triton.language as tl

from course_lib.hardware.compiler.architectures import ARCHITECTURES
from course_lib.hardware.compiler.cases import CompileCase
from course_lib.hardware.device import interpreting
from course_lib.kernels.common.checks import FLOAT_DTYPES, as_rows, check_tensor
from course_lib.kernels.common.numbers import LARGEST_GROUP
from course_lib.kernels.common.signatures import signature_of
from course_lib.kernels.fused.checks import check_epsilon, check_weight
from course_lib.kernels.softmax.rows import reread

ONE_PASS_BYTES = 65536
PACKED_COLUMNS = 65536  # 16-bit rows of this width stay in registers as 16 bits
TILE_ELEMENTS = 2048  # several short rows make one tile of this size
LOOP_COLUMNS, LOOP_WARPS = 4096, 16
WARPS = {2048: 4, 4096: 4, 8192: 8, 16384: 16, 32768: 32, 65536: 32}


def layer_norm_reference(x, weight, bias, epsilon=1e-5):
    """The plain PyTorch meaning of `layer_norm_forward`'s first result, in float32 at least."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    centred = wide - wide.mean(dim=-1, keepdim=True)
    inverse = torch.rsqrt(centred.square().mean(dim=-1, keepdim=True) + epsilon)
    return (centred * inverse * weight.to(wide.dtype) + bias.to(wide.dtype)).to(x.dtype)


@triton.jit
def layer_norm_kernel(
    x_pointer,
    weight_pointer,
    bias_pointer,
    out_pointer,
    statistics_pointer,
    rows,
    column_groups,
    x_stride_groups,
    epsilon,
    GROUP: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    PACKED: tl.constexpr,
):
    """One program: BLOCK_ROWS whole rows. out, and statistics, float32 [rows, 2], are contiguous.

    Columns and strides come as numbers of groups of GROUP elements, so that the compiler knows what divides them.
    """
    columns = column_groups * GROUP
    row = (tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS))[:, None]  # [BLOCK_ROWS, 1]
    column = tl.arange(0, BLOCK_COLUMNS)[None, :]  # [1, BLOCK_COLUMNS]
    inside = (row < rows) & (column < columns)
    narrow = tl.load(x_pointer + row * (x_stride_groups * GROUP) + column, mask=inside, other=0.0)
    mean = tl.sum(narrow.to(tl.float32), axis=1, keep_dims=True) / columns  # [BLOCK_ROWS, 1]
    if PACKED:
        narrow = reread(narrow)
    centred = tl.where(inside, narrow.to(tl.float32) - mean, 0.0)  # [BLOCK_ROWS, BLOCK_COLUMNS]
    inverse = tl.rsqrt(tl.sum(centred * centred, axis=1, keep_dims=True) / columns + epsilon)
    if PACKED:
        centred = reread(narrow).to(tl.float32) - mean
    tl.store(statistics_pointer + 2 * row, mean, mask=row < rows)
    tl.store(statistics_pointer + 2 * row + 1, inverse, mask=row < rows)
    weight = tl.load(weight_pointer + column, mask=column < columns, other=0.0).to(tl.float32)  # [1, BLOCK_COLUMNS]
    bias = tl.load(bias_pointer + column, mask=column < columns, other=0.0).to(tl.float32)  # [1, BLOCK_COLUMNS]
    out = centred * inverse * weight + bias
    tl.store(out_pointer + row * columns + column, out.to(out_pointer.dtype.element_ty), mask=inside)


@triton.jit
def layer_norm_loop_kernel(
    x_pointer,
    weight_pointer,
    bias_pointer,
    out_pointer,
    statistics_pointer,
    columns,
    x_stride,
    epsilon,
    BLOCK_COLUMNS: tl.constexpr,
):
    """One program: one long row, tile by tile, read twice."""
    row = tl.program_id(0).to(tl.int64)
    x_row = x_pointer + row * x_stride
    counts = tl.zeros([BLOCK_COLUMNS], tl.float32)
    means = tl.zeros([BLOCK_COLUMNS], tl.float32)
    squares = tl.zeros([BLOCK_COLUMNS], tl.float32)
    for start in tl.range(0, columns, BLOCK_COLUMNS):
        column = start + tl.arange(0, BLOCK_COLUMNS)  # [BLOCK_COLUMNS]
        inside = column < columns
        x = tl.load(x_row + column, mask=inside, other=0.0, eviction_policy="evict_last").to(tl.float32)
        counts += tl.where(inside, 1.0, 0.0)
        distance = tl.where(inside, x - means, 0.0)
        means += distance / tl.maximum(counts, 1.0)
        squares += distance * (x - means)
    mean = tl.sum(means * counts, axis=0) / columns
    between = means - mean
    variance = tl.sum(squares + counts * between * between, axis=0) / columns
    inverse = tl.rsqrt(variance + epsilon)
    tl.store(statistics_pointer + 2 * row, mean)
    tl.store(statistics_pointer + 2 * row + 1, inverse)
    for start in tl.range(0, columns, BLOCK_COLUMNS):
        column = start + tl.arange(0, BLOCK_COLUMNS)  # [BLOCK_COLUMNS]
        inside = column < columns
        x = tl.load(x_row + column, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
        weight = tl.load(weight_pointer + column, mask=inside, other=0.0).to(tl.float32)  # [BLOCK_COLUMNS]
        bias = tl.load(bias_pointer + column, mask=inside, other=0.0).to(tl.float32)  # [BLOCK_COLUMNS]
        out = ((x - mean) * inverse * weight + bias).to(out_pointer.dtype.element_ty)
        tl.store(out_pointer + row * columns + column, out, mask=inside, eviction_policy="evict_first")


def layer_norm_forward(x, weight, bias, epsilon=1e-5):
    """(out, statistics) by a kernel, without a gradient; `layer_norm_operators.layer_norm` has one.

    Args:
        x: [..., hidden], float32, float16 or bfloat16, with a contiguous last dimension and leading dimensions that
            flatten without a copy. Any hidden size from 1 on; any number of rows, also none.
        weight, bias: [hidden], contiguous, of x's dtype or float32.
        epsilon: at least 0, added to the variance. With 0 a row of equal numbers is NaN, as in PyTorch.

    Returns:
        out, contiguous, of x's shape and dtype, and statistics, float32 [..., 2]: the mean and 1 / √(variance + ε).

    Raises:
        ValueError: an argument is not as above; the message names it.
    """
    rows = check(x, weight, bias)
    check_epsilon(epsilon)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    statistics = torch.empty(*x.shape[:-1], 2, dtype=torch.float32, device=x.device)
    count, columns = rows.shape
    if count == 0:
        return out, statistics
    packed = not interpreting() and x.element_size() == 2 and PACKED_COLUMNS // 2 < columns <= PACKED_COLUMNS
    if columns * x.element_size() > ONE_PASS_BYTES and not packed:
        layer_norm_loop_kernel[(count,)](
            rows, weight, bias, out, statistics, columns, rows.stride(0), float(epsilon), BLOCK_COLUMNS=LOOP_COLUMNS,
            num_warps=LOOP_WARPS,
        )  # fmt: skip
        return out, statistics
    group = math.gcd(columns, rows.stride(0), LARGEST_GROUP)
    block_columns = triton.next_power_of_2(columns)
    block_rows = max(1, TILE_ELEMENTS // block_columns)
    layer_norm_kernel[(triton.cdiv(count, block_rows),)](
        rows, weight, bias, out, statistics, count, columns // group, rows.stride(0) // group, float(epsilon),
        GROUP=group, BLOCK_ROWS=block_rows, BLOCK_COLUMNS=block_columns, PACKED=packed,
        num_warps=WARPS[block_rows * block_columns],
    )  # fmt: skip
    return out, statistics


def check(x, weight, bias) -> torch.Tensor:
    """x as rows, after what both passes ask of the forward pass's arguments."""
    check_tensor("x", x, FLOAT_DTYPES)
    rows = as_rows("x", x)
    check_weight(weight, x)
    check_weight(bias, x, "bias")
    return rows


def compile_cases() -> list[CompileCase]:
    """What ships, for the compile gate: a row of 4096, the longest rows of one pass, and the loop."""
    cases = []
    for kind, columns in (("fp16", 4096), ("fp16", 32768), ("fp32", 16384)):
        constants = {"GROUP": 8, "BLOCK_ROWS": 1, "BLOCK_COLUMNS": columns, "PACKED": False}
        cases.append(CompileCase(layer_norm_kernel, signature_of(layer_norm_kernel, kind), constants,
                                 num_warps=WARPS[columns],
                                 archs=tuple(ARCHITECTURES) if columns == 4096 else (80, 90, 100),
                                 label=f"{kind} {columns}"))  # fmt: skip
    constants = {"GROUP": 8, "BLOCK_ROWS": 1, "BLOCK_COLUMNS": PACKED_COLUMNS, "PACKED": True}
    cases.append(CompileCase(layer_norm_kernel, signature_of(layer_norm_kernel, "bf16"), constants,
                             num_warps=WARPS[PACKED_COLUMNS], archs=(80, 90, 100), max_spill_bytes=256,
                             label="bf16 65536"))  # fmt: skip
    cases.append(CompileCase(layer_norm_loop_kernel, signature_of(layer_norm_loop_kernel, "fp16"),
                             {"BLOCK_COLUMNS": LOOP_COLUMNS}, num_warps=LOOP_WARPS))  # fmt: skip
    return cases
