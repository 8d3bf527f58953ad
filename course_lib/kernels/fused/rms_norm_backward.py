"""The backward pass of RMSNorm, with or without an addition before it: one reduction along rows, one across them.

    n = summed / √(mean(summed²) + ε)       the row, normalised            g = normalised_gradient · weight
    input_gradient[r, c] = (g - n · mean over c of (g · n)) / √(mean(summed²) + ε) + summed_gradient
    weight_gradient[c]   = Σ over r of normalised_gradient · n

The gradient of x and that of the residual are the same tensor, as both were added. `summed_gradient` is what comes back
along the residual path; None where nothing does.

    one pass      3 reads and 1 write of an element: summed and two gradients; rows of up to ONE_PASS_BYTES, and on
                  Hopper of up to twice as many in 16 bits (`gluon_rms_norm_backward`)
    two passes    5 reads and 1 write; longer rows

FLOPs: about 12 per element. Nothing but `summed` is kept for this pass: the root mean square costs no bytes to take
again, because the row is read anyway.

The weight's gradient sums over all rows. A program takes a band of rows, one after another, and keeps its sum in
registers; it writes one row of partial sums, which a second, small launch adds up. There are as many programs as the
registers hold at a time: one on each of 132 multiprocessors, of 16 warps, writes 132 rows of float32. Written and read
again they are 0.8 % more bytes at 16k rows of 16 bits. Four programs on each took turns, and moved four times as much.
The order of additions is fixed, so results repeat bit for bit; atomic adds would not.

Source: Zhang and Sennrich, arXiv 1910.07467, section 3 (the gradients).
"""

import contextlib
import math

import torch
import triton
import triton.language as tl

from course_lib.hardware.compiler.architectures import ARCHITECTURES
from course_lib.hardware.compiler.cases import CompileCase
from course_lib.hardware.device import machine
from course_lib.kernels.common.checks import FLOAT_DTYPES, as_rows, check_alike, check_tensor
from course_lib.kernels.common.numbers import LARGEST_GROUP
from course_lib.kernels.common.signatures import signature_of
from course_lib.kernels.fused.add_rms_norm import LARGE, TILE_ELEMENTS, inverse_of_rms
from course_lib.kernels.fused.checks import check_epsilon, check_weight
from course_lib.kernels.fused.gradients import rows_of_gradient

ONE_PASS_BYTES = 16384  # the band's sums and all that is made of a row are float32, and fill the registers
WARPS = {2048: 4, 4096: 8, 8192: 16}  # 16 elements a thread, in about 120 registers
WARPS_PER_MULTIPROCESSOR = 16  # that its registers hold then; programs beyond would only add rows of partial sums
# Of the loop over rows: with 3 the next two tiles are on their way through shared memory, 96 KB. Rows of 4096 and of
# 8192 columns of 16 bits then reach 0.88 and 0.93 of a copy's bandwidth on an H200.
STAGES, SHARED_FOR_STAGES, PIPELINED_ELEMENTS = 3, 128 * 1024, 8192
TILE_COLUMNS, TILE_WARPS = 1024, 4  # of two passes: many programs side by side
PROGRAMS_PER_MULTIPROCESSOR = 4  # of two passes
SUMMED_BANDS, SUMMED_COLUMNS = 64, 16  # of the last sum: many programs, each with few columns
INTERPRETED_COLUMNS = 1024  # of it
INTERPRETED_PROGRAMS = 3
ALL = tuple(ARCHITECTURES)
SMALL = tuple(arch for arch in ALL if arch not in LARGE)


def stages_of(dtype: torch.dtype) -> int:
    """STAGES where the rows of 16 bits on their way fit into a program's shared memory, 1 elsewhere."""
    shared = machine().shared_memory_per_block_bytes or 0
    return STAGES if dtype.itemsize == 2 and shared >= SHARED_FOR_STAGES else 1


def rms_norm_backward_reference(summed, weight, normalised_gradient, summed_gradient, epsilon):
    """The plain PyTorch meaning of `rms_norm_backward`: (input gradient, weight gradient), in float32 at least."""
    wide_dtype = torch.promote_types(summed.dtype, torch.float32)
    rows, gradient = (tensor.to(wide_dtype).flatten(0, -2) for tensor in (summed, normalised_gradient))
    inverse = torch.rsqrt(rows.square().mean(dim=-1, keepdim=True) + epsilon)
    normal = rows * inverse
    scaled = gradient * weight.to(wide_dtype)
    input_gradient = inverse * (scaled - normal * (scaled * normal).mean(dim=-1, keepdim=True))
    if summed_gradient is not None:
        input_gradient = input_gradient + summed_gradient.to(wide_dtype).flatten(0, -2)
    weight_gradient = (gradient * normal).sum(dim=0)
    return input_gradient.view(summed.shape).to(summed.dtype), weight_gradient.to(weight.dtype)


@triton.jit
def add_pairs(first, second, other_first, other_second):
    """Two sums at once: the threads meet at one barrier for both."""
    return first + other_first, second + other_second


@triton.jit
def rms_norm_backward_kernel(
    summed_pointer,
    weight_pointer,
    gradient_pointer,
    summed_gradient_pointer,
    input_gradient_pointer,
    partial_sums_pointer,
    rows,
    rows_of_band,
    column_groups,
    summed_stride_groups,
    gradient_stride_groups,
    summed_gradient_stride_groups,
    epsilon,
    GROUP: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One program: a band of rows_of_band rows, BLOCK_ROWS whole rows at a time.

    partial_sums_pointer: float32 [programs, columns], this program's share of the weight's gradient.
    """
    columns = column_groups * GROUP
    column = tl.arange(0, BLOCK_COLUMNS)[None, :]  # [1, BLOCK_COLUMNS]
    weight = tl.load(weight_pointer + column, mask=column < columns, other=0.0)  # [1, BLOCK_COLUMNS]
    sums = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], tl.float32)
    first = tl.program_id(0).to(tl.int64) * rows_of_band
    for start in tl.range(first, tl.minimum(first + rows_of_band, rows), BLOCK_ROWS, num_stages=STAGES):
        row = (start + tl.arange(0, BLOCK_ROWS))[:, None]  # [BLOCK_ROWS, 1]
        inside = (row < rows) & (column < columns)
        summed_tile = summed_pointer + row * (summed_stride_groups * GROUP) + column
        gradient_tile = gradient_pointer + row * (gradient_stride_groups * GROUP) + column
        summed = tl.load(summed_tile, mask=inside, other=0.0).to(tl.float32)  # [BLOCK_ROWS, BLOCK_COLUMNS]
        gradient = tl.load(gradient_tile, mask=inside, other=0.0).to(tl.float32)  # [BLOCK_ROWS, BLOCK_COLUMNS]
        scaled = gradient * weight.to(tl.float32)
        squares, products = tl.reduce((summed * summed, summed * scaled), 1, add_pairs, keep_dims=True)
        # Rows beyond the last are all zeros; with ε = 0 they would be NaN and spoil the sums.
        inverse = tl.where(row < rows, inverse_of_rms(squares, columns, epsilon), 0.0)  # [BLOCK_ROWS, 1]
        projection = products * inverse / columns
        normal = summed * inverse  # [BLOCK_ROWS, BLOCK_COLUMNS]
        sums += gradient * normal
        found = inverse * (scaled - normal * projection)
        if summed_gradient_pointer is not None:
            other_tile = summed_gradient_pointer + row * (summed_gradient_stride_groups * GROUP) + column
            found += tl.load(other_tile, mask=inside, other=0.0).to(tl.float32)
        found_tile = input_gradient_pointer + row * columns + column
        tl.store(found_tile, found.to(input_gradient_pointer.dtype.element_ty), mask=inside)
    partial_sums = partial_sums_pointer + tl.program_id(0).to(tl.int64) * columns + tl.arange(0, BLOCK_COLUMNS)
    tl.store(partial_sums, tl.sum(sums, axis=0), mask=tl.arange(0, BLOCK_COLUMNS) < columns)


@triton.jit
def rms_norm_row_numbers_kernel(
    summed_pointer,
    weight_pointer,
    gradient_pointer,
    numbers_pointer,
    columns,
    summed_stride,
    gradient_stride,
    epsilon,
    BLOCK_COLUMNS: tl.constexpr,
):
    """One program: the two numbers of a long row that its gradient needs, into numbers_pointer, float32 [rows, 2].

    They are 1 / √(mean(summed²) + ε) and mean(g · n).
    """
    row = tl.program_id(0).to(tl.int64)
    squares = tl.zeros([BLOCK_COLUMNS], tl.float32)
    products = tl.zeros([BLOCK_COLUMNS], tl.float32)
    for start in tl.range(0, columns, BLOCK_COLUMNS):
        column = start + tl.arange(0, BLOCK_COLUMNS)
        inside = column < columns
        summed = tl.load(summed_pointer + row * summed_stride + column, mask=inside, other=0.0).to(tl.float32)
        gradient = tl.load(gradient_pointer + row * gradient_stride + column, mask=inside, other=0.0).to(tl.float32)
        weight = tl.load(weight_pointer + column, mask=inside, other=0.0).to(tl.float32)  # [BLOCK_COLUMNS]
        squares += summed * summed
        products += summed * (gradient * weight)
    inverse = inverse_of_rms(tl.sum(squares, axis=0), columns, epsilon)
    tl.store(numbers_pointer + 2 * row, inverse)
    tl.store(numbers_pointer + 2 * row + 1, tl.sum(products, axis=0) * inverse / columns)


@triton.jit
def rms_norm_backward_columns_kernel(
    summed_pointer,
    weight_pointer,
    gradient_pointer,
    summed_gradient_pointer,
    numbers_pointer,
    input_gradient_pointer,
    partial_sums_pointer,
    rows,
    rows_of_band,
    columns,
    summed_stride,
    gradient_stride,
    summed_gradient_stride,
    BLOCK_COLUMNS: tl.constexpr,
):
    """One program: BLOCK_COLUMNS columns of a band of long rows, whose two numbers are known."""
    column = tl.program_id(0) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)  # [BLOCK_COLUMNS]
    inside = column < columns
    weight = tl.load(weight_pointer + column, mask=inside, other=0.0).to(tl.float32)  # [BLOCK_COLUMNS]
    sums = tl.zeros([BLOCK_COLUMNS], tl.float32)
    first = tl.program_id(1).to(tl.int64) * rows_of_band
    for row in tl.range(first, tl.minimum(first + rows_of_band, rows)):
        summed = tl.load(summed_pointer + row * summed_stride + column, mask=inside, other=0.0).to(tl.float32)
        gradient = tl.load(gradient_pointer + row * gradient_stride + column, mask=inside, other=0.0).to(tl.float32)
        inverse = tl.load(numbers_pointer + 2 * row)
        normal = summed * inverse  # [BLOCK_COLUMNS]
        sums += gradient * normal
        found = inverse * (gradient * weight - normal * tl.load(numbers_pointer + 2 * row + 1))
        if summed_gradient_pointer is not None:
            other_row = summed_gradient_pointer + row * summed_gradient_stride
            found += tl.load(other_row + column, mask=inside, other=0.0).to(tl.float32)
        found_row = input_gradient_pointer + row * columns
        tl.store(found_row + column, found.to(input_gradient_pointer.dtype.element_ty), mask=inside)
    tl.store(partial_sums_pointer + tl.program_id(1).to(tl.int64) * columns + column, sums, mask=inside)


@triton.jit
def sum_of_bands_kernel(
    partial_sums_pointer, weight_gradient_pointer, bands, columns, BLOCK_BANDS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_COLUMNS columns of the weight's gradient, from the partial sums of all bands."""
    column = tl.program_id(0) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)  # [BLOCK_COLUMNS]
    sums = tl.zeros([BLOCK_BANDS, BLOCK_COLUMNS], tl.float32)
    for start in tl.range(0, bands, BLOCK_BANDS):
        band = (start + tl.arange(0, BLOCK_BANDS))[:, None]  # [BLOCK_BANDS, 1]
        inside = (band < bands) & (column < columns)[None, :]
        sums += tl.load(partial_sums_pointer + band.to(tl.int64) * columns + column[None, :], mask=inside, other=0.0)
    weight_gradient = tl.sum(sums, axis=0).to(weight_gradient_pointer.dtype.element_ty)  # [BLOCK_COLUMNS]
    tl.store(weight_gradient_pointer + column, weight_gradient, mask=column < columns)


def rms_norm_backward(summed, weight, normalised_gradient, summed_gradient=None, epsilon=1e-6):
    """(input gradient, weight gradient) of `add_rms_norm`, and of the norm alone with x for `summed`.

    Args:
        summed: [..., hidden], the second result of the forward pass, float32, float16 or bfloat16, laid out as
            `add_rms_norm_forward` asks it of x.
        weight: as given to the forward pass.
        normalised_gradient: of summed's shape and dtype, of any strides; one that the kernel can't follow is copied.
        summed_gradient: likewise, or None for zeros.
        epsilon: as given to the forward pass.

    Returns a contiguous tensor of summed's shape and dtype, and one like weight, accumulated in float32. A row of zeros
    with ε = 0 has NaN for a gradient and makes all of the weight's gradient NaN, as in PyTorch.

    Raises:
        ValueError: an argument is not as above; the message names it.
    """
    check_tensor("summed", summed, FLOAT_DTYPES)
    rows = as_rows("summed", summed)
    check_weight(weight, summed)
    check_epsilon(epsilon)
    gradients = []
    for name, tensor in (("normalised_gradient", normalised_gradient), ("summed_gradient", summed_gradient)):
        if tensor is None and name == "summed_gradient":
            gradients.append(None)
            continue
        check_tensor(name, tensor, FLOAT_DTYPES)
        check_alike(name, tensor, "summed", summed)
        gradients.append(rows_of_gradient(tensor))
    input_gradient = torch.empty(summed.shape, dtype=summed.dtype, device=summed.device)
    if rows.shape[0] == 0:
        return input_gradient, torch.zeros_like(weight)
    launch = launcher_of(weight, [tensor for tensor in (rows, *gradients) if tensor is not None])
    partial_sums = launch(rows, weight, *gradients, input_gradient, float(epsilon))
    weight_gradient = torch.empty_like(weight)
    block_columns = SUMMED_COLUMNS if machine().sm_count else INTERPRETED_COLUMNS
    sum_of_bands_kernel[(triton.cdiv(weight.shape[0], block_columns),)](
        partial_sums, weight_gradient, *partial_sums.shape, BLOCK_BANDS=SUMMED_BANDS, BLOCK_COLUMNS=block_columns
    )
    return input_gradient, weight_gradient


def launcher_of(weight: torch.Tensor, tensors: list[torch.Tensor]):
    """The launcher for these rows, by their length, and where they are long by the machine."""
    if weight.shape[0] * tensors[0].element_size() <= ONE_PASS_BYTES:
        return launch_one_pass
    with contextlib.suppress(ImportError):  # of a Triton without this part of Gluon
        from course_lib.kernels.fused.gluon_rms_norm_backward import launch_long_rows, takes

        if takes(weight, tensors):
            return launch_long_rows
    return launch_two_passes


def launch_one_pass(summed, weight, gradient, summed_gradient, input_gradient, epsilon: float) -> torch.Tensor:
    """Returns the partial sums of the weight's gradient, float32 [programs, columns]."""
    rows, columns = summed.shape
    stages = stages_of(summed.dtype)
    block_columns = triton.next_power_of_2(columns)
    block_rows = max(1, (TILE_ELEMENTS if stages == 1 else PIPELINED_ELEMENTS) // block_columns)
    warps = WARPS[block_rows * block_columns]
    rows_of_band, programs = bands(rows, block_rows, WARPS_PER_MULTIPROCESSOR // warps)
    strides = [0 if tensor is None else tensor.stride(0) for tensor in (summed, gradient, summed_gradient)]
    group = math.gcd(columns, *strides, LARGEST_GROUP)
    partial_sums = torch.empty(programs, columns, dtype=torch.float32, device=summed.device)
    rms_norm_backward_kernel[(programs,)](
        summed, weight, gradient, summed_gradient, input_gradient, partial_sums, rows, rows_of_band, columns // group,
        *(stride // group for stride in strides), epsilon, GROUP=group, BLOCK_ROWS=block_rows,
        BLOCK_COLUMNS=block_columns, STAGES=stages, num_warps=warps,
    )  # fmt: skip
    return partial_sums


def launch_two_passes(summed, weight, gradient, summed_gradient, input_gradient, epsilon: float) -> torch.Tensor:
    """Returns the partial sums of the weight's gradient, float32 [bands, columns]."""
    rows, columns = summed.shape
    numbers = torch.empty(rows, 2, dtype=torch.float32, device=summed.device)
    strides = summed.stride(0), gradient.stride(0)
    rms_norm_row_numbers_kernel[(rows,)](
        summed, weight, gradient, numbers, columns, *strides, epsilon, BLOCK_COLUMNS=2 * TILE_COLUMNS,
        num_warps=2 * TILE_WARPS,
    )  # fmt: skip
    column_tiles = triton.cdiv(columns, TILE_COLUMNS)
    rows_of_band, count = bands(rows, 1, PROGRAMS_PER_MULTIPROCESSOR, column_tiles)
    partial_sums = torch.empty(count, columns, dtype=torch.float32, device=summed.device)
    rms_norm_backward_columns_kernel[(column_tiles, count)](
        summed, weight, gradient, summed_gradient, numbers, input_gradient, partial_sums, rows, rows_of_band, columns,
        *strides, 0 if summed_gradient is None else summed_gradient.stride(0), BLOCK_COLUMNS=TILE_COLUMNS,
        num_warps=TILE_WARPS,
    )  # fmt: skip
    return partial_sums


def bands(rows: int, block_rows: int, programs_per_multiprocessor: int, programs_of_band: int = 1) -> tuple[int, int]:
    """(rows of a band, a multiple of block_rows; number of bands), so that the whole GPU is busy."""
    multiprocessors = machine().sm_count
    programs = programs_per_multiprocessor * multiprocessors if multiprocessors else INTERPRETED_PROGRAMS
    wanted = max(1, programs // programs_of_band)
    rows_of_band = triton.cdiv(triton.cdiv(rows, block_rows), wanted) * block_rows
    return rows_of_band, triton.cdiv(rows, rows_of_band)


def compile_cases() -> list[CompileCase]:
    """What ships, for the compile gate: rows of 4096, the longest rows of one pass, two passes, and the last sum."""
    kernels = [
        (rms_norm_backward_kernel, kind,
         {"GROUP": 8, "BLOCK_ROWS": rows, "BLOCK_COLUMNS": columns, "STAGES": stages}, WARPS[rows * columns], archs)
        for kind, rows, columns, stages, archs in (("fp16", 1, 4096, 1, SMALL), ("fp16", 2, 4096, STAGES, LARGE),
                                                   ("bf16", 1, 8192, STAGES, LARGE), ("fp32", 1, 4096, 1, LARGE))
    ]  # fmt: skip
    kernels += [
        (rms_norm_row_numbers_kernel, "fp16", {"BLOCK_COLUMNS": 2 * TILE_COLUMNS}, 2 * TILE_WARPS, ALL),
        (rms_norm_backward_columns_kernel, "fp16", {"BLOCK_COLUMNS": TILE_COLUMNS}, TILE_WARPS, ALL),
        (sum_of_bands_kernel, "fp16", {"BLOCK_BANDS": SUMMED_BANDS, "BLOCK_COLUMNS": SUMMED_COLUMNS}, 4, ALL),
    ]
    cases = []
    for kernel, kind, constants, warps, archs in kernels:
        signature = signature_of(kernel, kind)
        divisible = [name for name in signature if name.endswith(("_pointer", "_stride")) or name == "columns"]
        cases.append(CompileCase(kernel, signature, constants, num_warps=warps, archs=archs, divisible=divisible,
                                 label=f"{kind} {constants['BLOCK_COLUMNS']}"))  # fmt: skip
    return cases
