"""The backward pass of LayerNorm: two reductions along a row, and two across all rows.

    normal[r, c]       = (x[r, c] - mean[r]) · inverse[r]              inverse = 1 / √(variance + ε)
    n[r, c]            = out_gradient[r, c] · weight[c]
    x_gradient[r, c]   = inverse[r] · (n - mean over c of n - normal · mean over c of (n · normal))
    weight_gradient[c] = Σ over r of out_gradient · normal,    bias_gradient[c] = Σ over r of out_gradient

    one pass      2 reads and 1 write of an element: x and out_gradient; rows of up to ONE_PASS_BYTES
    two passes    4 reads and 1 write; longer rows

FLOPs: about 12 per element. The sums across rows are partial sums of bands of rows, added up in a fixed order by a
second, small launch, as in `rms_norm_backward`: results repeat bit for bit, as those of atomic adds would not.

Source: Ba, Kiros and Hinton, arXiv 1607.06450.
"""

import math

import torch
import triton
import triton.language as tl

from course_lib.hardware.compiler.architectures import ARCHITECTURES
from course_lib.hardware.compiler.cases import CompileCase
from course_lib.kernels.common.checks import FLOAT_DTYPES, check_alike, check_tensor
from course_lib.kernels.common.numbers import LARGEST_GROUP
from course_lib.kernels.common.signatures import signature_of
from course_lib.kernels.fused.gradients import rows_of_gradient
from course_lib.kernels.fused.layer_norm import TILE_ELEMENTS, check
from course_lib.kernels.fused.rms_norm_backward import STAGES, bands, stages_of
from course_lib.kernels.memory.row_sum import row_sum

ONE_PASS_BYTES = 16384  # two bands' sums and all that is made of a row are float32, and fill the registers
WARPS = {2048: 4, 4096: 8, 8192: 16}
TILE_COLUMNS, TILE_WARPS = 1024, 4  # of two passes


def layer_norm_backward_reference(x, weight, out_gradient, epsilon=1e-5):
    """The plain PyTorch meaning of `layer_norm_backward`: gradients of x, weight and bias, in float32 at least.

    That of the bias has weight's dtype.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    rows, gradient = (tensor.to(wide).flatten(0, -2) for tensor in (x, out_gradient))
    centred = rows - rows.mean(dim=-1, keepdim=True)
    inverse = torch.rsqrt(centred.square().mean(dim=-1, keepdim=True) + epsilon)
    normal = centred * inverse
    scaled = gradient * weight.to(wide)
    projected = scaled - scaled.mean(-1, keepdim=True) - normal * (scaled * normal).mean(-1, keepdim=True)
    x_gradient = (inverse * projected).view(x.shape).to(x.dtype)
    return x_gradient, (gradient * normal).sum(dim=0).to(weight.dtype), gradient.sum(dim=0).to(weight.dtype)


@triton.jit
def layer_norm_backward_kernel(
    x_pointer,
    weight_pointer,
    statistics_pointer,
    gradient_pointer,
    x_gradient_pointer,
    partial_sums_pointer,
    rows,
    rows_of_band,
    column_groups,
    x_stride_groups,
    gradient_stride_groups,
    GROUP: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One program: a band of rows_of_band rows, BLOCK_ROWS whole rows at a time.

    partial_sums_pointer: float32 [bands, 2, columns], its share of the gradients of weight and bias.
    """
    columns = column_groups * GROUP
    column = tl.arange(0, BLOCK_COLUMNS)[None, :]  # [1, BLOCK_COLUMNS]
    weight = tl.load(weight_pointer + column, mask=column < columns, other=0.0).to(tl.float32)  # [1, BLOCK_COLUMNS]
    weight_sums = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], tl.float32)
    bias_sums = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], tl.float32)
    first = tl.program_id(0).to(tl.int64) * rows_of_band
    for start in tl.range(first, tl.minimum(first + rows_of_band, rows), BLOCK_ROWS, num_stages=STAGES):
        row = (start + tl.arange(0, BLOCK_ROWS))[:, None]  # [BLOCK_ROWS, 1]
        inside = (row < rows) & (column < columns)
        x = tl.load(x_pointer + row * (x_stride_groups * GROUP) + column, mask=inside, other=0.0).to(tl.float32)
        gradient_tile = gradient_pointer + row * (gradient_stride_groups * GROUP) + column
        gradient = tl.load(gradient_tile, mask=inside, other=0.0).to(tl.float32)  # [BLOCK_ROWS, BLOCK_COLUMNS]
        mean = tl.load(statistics_pointer + 2 * row, mask=row < rows, other=0.0)  # [BLOCK_ROWS, 1]
        inverse = tl.load(statistics_pointer + 2 * row + 1, mask=row < rows, other=0.0)  # [BLOCK_ROWS, 1]
        normal = tl.where(inside, (x - mean) * inverse, 0.0)  # [BLOCK_ROWS, BLOCK_COLUMNS]
        weight_sums += gradient * normal
        bias_sums += gradient
        scaled = gradient * weight
        mean_scaled = tl.sum(scaled, axis=1, keep_dims=True) / columns  # [BLOCK_ROWS, 1]
        projection = tl.sum(scaled * normal, axis=1, keep_dims=True) / columns  # [BLOCK_ROWS, 1]
        found = (inverse * (scaled - mean_scaled - normal * projection)).to(x_gradient_pointer.dtype.element_ty)
        tl.store(x_gradient_pointer + row * columns + column, found, mask=inside)
    column_of_sums = tl.arange(0, BLOCK_COLUMNS)  # [BLOCK_COLUMNS]
    partial_sums = partial_sums_pointer + tl.program_id(0).to(tl.int64) * 2 * columns + column_of_sums
    tl.store(partial_sums, tl.sum(weight_sums, axis=0), mask=column_of_sums < columns)
    tl.store(partial_sums + columns, tl.sum(bias_sums, axis=0), mask=column_of_sums < columns)


@triton.jit
def layer_norm_row_means_kernel(
    x_pointer,
    weight_pointer,
    statistics_pointer,
    gradient_pointer,
    means_pointer,
    columns,
    x_stride,
    gradient_stride,
    BLOCK_COLUMNS: tl.constexpr,
):
    """One program: the means of n and of n · normal over a long row, into means_pointer, float32 [rows, 2]."""
    row = tl.program_id(0).to(tl.int64)
    mean = tl.load(statistics_pointer + 2 * row)
    inverse = tl.load(statistics_pointer + 2 * row + 1)
    sums = tl.zeros([BLOCK_COLUMNS], tl.float32)
    products = tl.zeros([BLOCK_COLUMNS], tl.float32)
    for start in tl.range(0, columns, BLOCK_COLUMNS):
        column = start + tl.arange(0, BLOCK_COLUMNS)  # [BLOCK_COLUMNS]
        inside = column < columns
        x = tl.load(x_pointer + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
        gradient = tl.load(gradient_pointer + row * gradient_stride + column, mask=inside, other=0.0).to(tl.float32)
        scaled = gradient * tl.load(weight_pointer + column, mask=inside, other=0.0).to(tl.float32)
        sums += scaled
        products += scaled * ((x - mean) * inverse)  # scaled is 0 outside
    tl.store(means_pointer + 2 * row, tl.sum(sums, axis=0) / columns)
    tl.store(means_pointer + 2 * row + 1, tl.sum(products, axis=0) / columns)


@triton.jit
def layer_norm_backward_columns_kernel(
    x_pointer,
    weight_pointer,
    statistics_pointer,
    gradient_pointer,
    means_pointer,
    x_gradient_pointer,
    partial_sums_pointer,
    rows,
    rows_of_band,
    columns,
    x_stride,
    gradient_stride,
    BLOCK_COLUMNS: tl.constexpr,
):
    """One program: BLOCK_COLUMNS columns of a band of long rows, whose two means are known."""
    column = tl.program_id(0) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)  # [BLOCK_COLUMNS]
    inside = column < columns
    weight = tl.load(weight_pointer + column, mask=inside, other=0.0).to(tl.float32)  # [BLOCK_COLUMNS]
    weight_sums = tl.zeros([BLOCK_COLUMNS], tl.float32)
    bias_sums = tl.zeros([BLOCK_COLUMNS], tl.float32)
    first = tl.program_id(1).to(tl.int64) * rows_of_band
    for row in tl.range(first, tl.minimum(first + rows_of_band, rows)):
        x = tl.load(x_pointer + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
        gradient = tl.load(gradient_pointer + row * gradient_stride + column, mask=inside, other=0.0).to(tl.float32)
        inverse = tl.load(statistics_pointer + 2 * row + 1)
        normal = (x - tl.load(statistics_pointer + 2 * row)) * inverse  # [BLOCK_COLUMNS]
        weight_sums += gradient * normal
        bias_sums += gradient
        means = means_pointer + 2 * row
        found = inverse * (gradient * weight - tl.load(means) - normal * tl.load(means + 1))
        found_row = x_gradient_pointer + row * columns
        tl.store(found_row + column, found.to(x_gradient_pointer.dtype.element_ty), mask=inside)
    partial_sums = partial_sums_pointer + tl.program_id(1).to(tl.int64) * 2 * columns + column
    tl.store(partial_sums, weight_sums, mask=inside)
    tl.store(partial_sums + columns, bias_sums, mask=inside)


def layer_norm_backward(x, statistics, weight, out_gradient):
    """The gradients of x, weight and bias of `layer_norm_forward`.

    Args:
        x, weight: as given to the forward pass.
        statistics: float32 [..., 2], contiguous, as the forward pass returned it.
        out_gradient: of x's shape and dtype, of any strides; one that the kernel can't follow is copied.

    Returns a contiguous tensor of x's shape and dtype, and two like weight, accumulated in float32.

    Raises:
        ValueError: an argument is not as above; the message names it.
    """
    rows = check(x, weight, weight)
    check_tensor("statistics", statistics, (torch.float32,))
    if statistics.shape != (*x.shape[:-1], 2) or not statistics.is_contiguous():
        raise ValueError(
            f"statistics has shape {tuple(statistics.shape)} and strides {statistics.stride()}; it must be what the "
            f"forward pass returned, contiguous {(*x.shape[:-1], 2)}."
        )
    check_tensor("out_gradient", out_gradient, FLOAT_DTYPES)
    check_alike("out_gradient", out_gradient, "x", x)
    x_gradient = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if rows.shape[0] == 0:
        return x_gradient, torch.zeros_like(weight), torch.zeros_like(weight)
    launch = launch_one_pass if rows.shape[1] * rows.element_size() <= ONE_PASS_BYTES else launch_two_passes
    partial_sums = launch(rows, weight, statistics, rows_of_gradient(out_gradient), x_gradient)
    sums = row_sum(partial_sums.flatten(1).t()).view(2, -1)
    # Copies: what an operator returns may not be parts of one tensor.
    return x_gradient, sums[0].to(weight.dtype, copy=True), sums[1].to(weight.dtype, copy=True)


def launch_one_pass(x, weight, statistics, gradient, x_gradient) -> torch.Tensor:
    """Returns the partial sums of the gradients of weight and bias, float32 [bands, 2, columns]."""
    rows, columns = x.shape
    block_columns = triton.next_power_of_2(columns)
    block_rows = max(1, TILE_ELEMENTS // block_columns)
    rows_of_band, count = bands(rows, block_rows)
    group = math.gcd(columns, x.stride(0), gradient.stride(0), LARGEST_GROUP)
    partial_sums = torch.empty(count, 2, columns, dtype=torch.float32, device=x.device)
    layer_norm_backward_kernel[(count,)](
        x, weight, statistics, gradient, x_gradient, partial_sums, rows, rows_of_band, columns // group,
        x.stride(0) // group, gradient.stride(0) // group, GROUP=group, BLOCK_ROWS=block_rows,
        BLOCK_COLUMNS=block_columns, STAGES=stages_of(x.dtype), num_warps=WARPS[block_rows * block_columns],
    )  # fmt: skip
    return partial_sums


def launch_two_passes(x, weight, statistics, gradient, x_gradient) -> torch.Tensor:
    """Returns the partial sums of the gradients of weight and bias, float32 [bands, 2, columns]."""
    rows, columns = x.shape
    inputs = x, weight, statistics, gradient
    means = torch.empty(rows, 2, dtype=torch.float32, device=x.device)
    layer_norm_row_means_kernel[(rows,)](
        *inputs, means, columns, x.stride(0), gradient.stride(0), BLOCK_COLUMNS=2 * TILE_COLUMNS,
        num_warps=2 * TILE_WARPS,
    )  # fmt: skip
    column_tiles = triton.cdiv(columns, TILE_COLUMNS)
    rows_of_band, count = bands(rows, 1, column_tiles)
    partial_sums = torch.empty(count, 2, columns, dtype=torch.float32, device=x.device)
    layer_norm_backward_columns_kernel[(column_tiles, count)](
        *inputs, means, x_gradient, partial_sums, rows, rows_of_band, columns, x.stride(0), gradient.stride(0),
        BLOCK_COLUMNS=TILE_COLUMNS, num_warps=TILE_WARPS,
    )  # fmt: skip
    return partial_sums


def compile_cases() -> list[CompileCase]:
    """What ships, for the compile gate: rows of 4096, the longest rows of one pass, and two passes."""
    every, large = tuple(ARCHITECTURES), (80, 90, 100)
    small = tuple(arch for arch in every if arch not in large)
    row = {"GROUP": 8, "BLOCK_ROWS": 1, "STAGES": 1}
    deep = row | {"STAGES": STAGES}
    cases = []
    for kernel, kind, constants, warps, archs in (
        (layer_norm_backward_kernel, "fp16", row | {"BLOCK_COLUMNS": 4096}, WARPS[4096], small),
        (layer_norm_backward_kernel, "fp16", deep | {"BLOCK_COLUMNS": 4096}, WARPS[4096], large),
        (layer_norm_backward_kernel, "fp16", deep | {"BLOCK_COLUMNS": 8192}, WARPS[8192], large),
        (layer_norm_backward_kernel, "fp32", row | {"BLOCK_COLUMNS": 4096}, WARPS[4096], large),
        (layer_norm_row_means_kernel, "fp16", {"BLOCK_COLUMNS": 2 * TILE_COLUMNS}, 2 * TILE_WARPS, every),
        (layer_norm_backward_columns_kernel, "fp16", {"BLOCK_COLUMNS": TILE_COLUMNS}, TILE_WARPS, every),
    ):
        cases.append(CompileCase(kernel, signature_of(kernel, kind), constants, num_warps=warps, archs=archs,
                                 label=f"{kind} {constants['BLOCK_COLUMNS']}"))  # fmt: skip
    return cases
