"""Softmax over rows, three ways that differ in how often they read the row.

    out[r, c] = exp(x[r, c] - m) / Σ exp(x[r, :] - m),    m = max x[r, :]

    method        reads  writes   elements moved
    three_pass      3      1            4          the maximum; the sum; the result
    online          2      1            3          maximum and sum together, rescaling the sum when the maximum grows
    one_pass        1      1            2          the row stays in registers: up to ONE_PASS_COLUMNS columns

FLOPs: about 4 per element. In 16 bits one_pass does 1 FLOP per byte: memory is all that counts, and softmax can at best
be as fast as a copy. The subtraction of the maximum keeps exp from overflowing, and cancels in the quotient.

Source of the online form: Milakov and Gimelshein, Online normalizer calculation for softmax, arXiv 1805.02867.
"""

import math

import torch
import triton
import triton.language as tl

from course_lib.hardware.compiler.cases import CompileCase
from course_lib.hardware.device import interpreting
from course_lib.kernels.common.checks import FLOAT_DTYPES, as_rows, check_tensor
from course_lib.kernels.common.numbers import LARGEST_GROUP, LOG2_E

METHODS = ("auto", "three_pass", "online", "one_pass")
ONE_PASS_COLUMNS = 65536  # 64 elements for each of 1024 threads: still in registers
# Of wider float32 rows only one fits a multiprocessor at a time, which then waits for memory, computes, and waits
# again. On an H200 that costs more than reading the row a second time, most of it from the L2 cache.
AUTO_ONE_PASS_FLOAT32_COLUMNS = 32768
PACKED_COLUMNS = 32768  # 16-bit rows from here on stay in registers as 16 bits
PACKED_WARPS, PACKED_REGISTERS = {32768: 8, 65536: 16}, 128  # two programs on a multiprocessor, then one
TILE_COLUMNS, TILE_WARPS = 8192, 32  # of the methods that go over a row more than once
TILE_ELEMENTS = 2048  # one_pass takes several short rows into one tile of this size


def softmax_reference(x: torch.Tensor) -> torch.Tensor:
    """The plain PyTorch meaning, in float32 at least: [rows, columns] -> [rows, columns]."""
    wide = x.float() if x.dtype.itemsize < 4 else x
    weights = torch.exp(wide - wide.amax(dim=-1, keepdim=True))
    return (weights / weights.sum(dim=-1, keepdim=True)).to(x.dtype)


@triton.jit
def exponential(x, maximum):
    """exp(x - maximum), and 0 for x = -inf even where the maximum is -inf as well."""
    return tl.exp2((x - tl.where(maximum == float("-inf"), 0.0, maximum)) * LOG2_E)


@triton.jit
def normalise(weights, total, ZERO_EMPTY_ROWS: tl.constexpr):
    """weights / total, with one division a row. A row of -inf has the total 0: NaN as in PyTorch, or zeros if asked."""
    if ZERO_EMPTY_ROWS:
        total = tl.where(total == 0.0, 1.0, total)
    return weights * (1.0 / total)


@triton.jit
def softmax_one_pass_kernel(
    x_pointer,
    out_pointer,
    rows,
    column_groups,
    x_stride_groups,
    out_stride_groups,
    GROUP: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    ZERO_EMPTY_ROWS: tl.constexpr,
):
    """One program: BLOCK_ROWS whole rows, read once and written once.

    Columns and strides come as numbers of groups of GROUP elements, so that the compiler knows what divides them: it
    then loads a group at once, also where the number of columns is not a multiple of 16.
    """
    row = (tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS))[:, None]  # [BLOCK_ROWS, 1]
    column = tl.arange(0, BLOCK_COLUMNS)[None, :]  # [1, BLOCK_COLUMNS]
    inside = (row < rows) & (column < column_groups * GROUP)
    x_tile = x_pointer + row * (x_stride_groups * GROUP) + column
    x = tl.load(x_tile, mask=inside, other=float("-inf")).to(tl.float32)  # [BLOCK_ROWS, BLOCK_COLUMNS]
    weights = exponential(x, tl.max(x, axis=1, keep_dims=True))
    out = normalise(weights, tl.sum(weights, axis=1, keep_dims=True), ZERO_EMPTY_ROWS)
    out_tile = out_pointer + row * (out_stride_groups * GROUP) + column
    tl.store(out_tile, out.to(out_pointer.dtype.element_ty), mask=inside)


@triton.jit
def softmax_one_pass_two_tiles_kernel(
    x_pointer,
    out_pointer,
    rows,
    column_groups,
    x_stride_groups,
    out_stride_groups,
    GROUP: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    TAIL_COLUMNS: tl.constexpr,
    ZERO_EMPTY_ROWS: tl.constexpr,
):
    """One program: one row of more than BLOCK_COLUMNS columns, the rest of it in a tile of its own.

    A tile's width is a power of two. A row of 5000 columns would leave 3192 of 8192 lanes idle; as 4096 and 1024 it
    leaves 120.
    """
    row = tl.program_id(0).to(tl.int64)
    x_row = x_pointer + row * (x_stride_groups * GROUP)
    out_row = out_pointer + row * (out_stride_groups * GROUP)
    column = tl.arange(0, BLOCK_COLUMNS)  # [BLOCK_COLUMNS], all of them inside
    tail_column = BLOCK_COLUMNS + tl.arange(0, TAIL_COLUMNS)  # [TAIL_COLUMNS]
    inside = tail_column < column_groups * GROUP
    x = tl.load(x_row + column).to(tl.float32)  # [BLOCK_COLUMNS]
    tail = tl.load(x_row + tail_column, mask=inside, other=float("-inf")).to(tl.float32)  # [TAIL_COLUMNS]
    maximum = tl.maximum(tl.max(x, axis=0), tl.max(tail, axis=0))
    weights = exponential(x, maximum)  # [BLOCK_COLUMNS]
    tail_weights = exponential(tail, maximum)  # [TAIL_COLUMNS]
    total = tl.sum(weights, axis=0) + tl.sum(tail_weights, axis=0)
    element = out_pointer.dtype.element_ty
    tl.store(out_row + column, normalise(weights, total, ZERO_EMPTY_ROWS).to(element))
    tl.store(out_row + tail_column, normalise(tail_weights, total, ZERO_EMPTY_ROWS).to(element), mask=inside)


@triton.jit
def reread(packed):
    """The same 16-bit tile, of which the compiler knows nothing any more.

    It would keep what it converted to float32 for the next use, in twice the registers; so it converts again.
    """
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [packed], dtype=packed.dtype, is_pure=False, pack=2)


@triton.jit
def softmax_one_pass_packed_kernel(
    x_pointer,
    out_pointer,
    rows,
    column_groups,
    x_stride_groups,
    out_stride_groups,
    GROUP: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    ZERO_EMPTY_ROWS: tl.constexpr,
):
    """One program: one long row of 16-bit elements, which lie in registers as they came, two to a register.

    Each exponential is taken twice, for the sum and for the result: arithmetic is cheaper here than room.
    """
    columns = column_groups * GROUP
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK_COLUMNS)  # [BLOCK_COLUMNS]
    inside = column < columns
    packed = tl.load(x_pointer + row * (x_stride_groups * GROUP) + column, mask=inside, other=float("-inf"))
    maximum = tl.max(packed, axis=0).to(tl.float32)
    packed = reread(packed)
    total = tl.sum(exponential(packed.to(tl.float32), maximum), axis=0)
    packed = reread(packed)
    out = normalise(exponential(packed.to(tl.float32), maximum), total, ZERO_EMPTY_ROWS)  # [BLOCK_COLUMNS]
    out_row = out_pointer + row * (out_stride_groups * GROUP)
    tl.store(out_row + column, out.to(out_pointer.dtype.element_ty), mask=inside)


@triton.jit
def softmax_three_pass_kernel(
    x_pointer, out_pointer, columns, x_stride, out_stride, BLOCK_COLUMNS: tl.constexpr, ZERO_EMPTY_ROWS: tl.constexpr
):
    """One program: one row, read three times. 4 elements moved for each element."""
    row = tl.program_id(0).to(tl.int64)
    x_row = x_pointer + row * x_stride
    maxima = tl.full([BLOCK_COLUMNS], float("-inf"), tl.float32)
    for start in tl.range(0, columns, BLOCK_COLUMNS):
        maxima = tl.maximum(maxima, load_tile(x_row, start, columns, BLOCK_COLUMNS))  # [BLOCK_COLUMNS]
    maximum = tl.max(maxima, axis=0)
    sums = tl.zeros([BLOCK_COLUMNS], tl.float32)
    for start in tl.range(0, columns, BLOCK_COLUMNS):
        sums += exponential(load_tile(x_row, start, columns, BLOCK_COLUMNS), maximum)  # [BLOCK_COLUMNS]
    write_row(
        x_row, out_pointer + row * out_stride, columns, maximum, tl.sum(sums, axis=0), BLOCK_COLUMNS, ZERO_EMPTY_ROWS
    )


@triton.jit
def softmax_online_kernel(
    x_pointer, out_pointer, columns, x_stride, out_stride, BLOCK_COLUMNS: tl.constexpr, ZERO_EMPTY_ROWS: tl.constexpr
):
    """One program: one row, read twice. 3 elements moved for each element.

    Each lane of the tile keeps the maximum and the sum of the columns it has met. The lanes are merged once, at the
    end, by the same rule: a sum is brought to a larger maximum by the factor exp(old maximum - new maximum).
    """
    row = tl.program_id(0).to(tl.int64)
    x_row = x_pointer + row * x_stride
    running_max = tl.full([BLOCK_COLUMNS], float("-inf"), tl.float32)
    running_sum = tl.zeros([BLOCK_COLUMNS], tl.float32)
    for start in tl.range(0, columns, BLOCK_COLUMNS):
        x = load_tile(x_row, start, columns, BLOCK_COLUMNS)  # [BLOCK_COLUMNS]
        new_max = tl.maximum(running_max, x)
        running_sum = running_sum * exponential(running_max, new_max) + exponential(x, new_max)
        running_max = new_max
    maximum = tl.max(running_max, axis=0)
    total = tl.sum(running_sum * exponential(running_max, maximum), axis=0)
    write_row(x_row, out_pointer + row * out_stride, columns, maximum, total, BLOCK_COLUMNS, ZERO_EMPTY_ROWS)


@triton.jit
def load_tile(row_pointer, start, columns, BLOCK_COLUMNS: tl.constexpr):
    """Columns start .. start + BLOCK_COLUMNS of a row in float32, -inf beyond its end."""
    column = start + tl.arange(0, BLOCK_COLUMNS)
    # The L2 cache is asked to keep the row: it is read again.
    tile = tl.load(row_pointer + column, mask=column < columns, other=float("-inf"), eviction_policy="evict_last")
    return tile.to(tl.float32)  # [BLOCK_COLUMNS]


@triton.jit
def write_row(x_row, out_row, columns, maximum, total, BLOCK_COLUMNS: tl.constexpr, ZERO_EMPTY_ROWS: tl.constexpr):
    """The last pass over a row: read it once more, and write its softmax. The cache may forget both."""
    for start in tl.range(0, columns, BLOCK_COLUMNS):
        column = start + tl.arange(0, BLOCK_COLUMNS)
        inside = column < columns
        x = tl.load(x_row + column, mask=inside, other=float("-inf"), eviction_policy="evict_first").to(tl.float32)
        out = normalise(exponential(x, maximum), total, ZERO_EMPTY_ROWS)  # [BLOCK_COLUMNS]
        tl.store(out_row + column, out.to(out_row.dtype.element_ty), mask=inside, eviction_policy="evict_first")


def softmax(x: torch.Tensor, method: str = "auto") -> torch.Tensor:
    """Softmax over the last dimension; arithmetic in float32.

    Args:
        x: [..., columns], float32, float16 or bfloat16, with a contiguous last dimension and leading dimensions that
            flatten without a copy. Any number of columns.
        method: "three_pass", "online", "one_pass" (at most ONE_PASS_COLUMNS columns), or "auto": one_pass as far as it
            goes, in float32 up to AUTO_ONE_PASS_FLOAT32_COLUMNS, and online beyond.

    Returns:
        A contiguous tensor of x's shape and dtype. A row that holds NaN or +inf, or nothing but -inf, gives NaN, as in
        torch.softmax; other rows are not touched by it.

    Raises:
        ValueError: x or method is not as above; the message says what to do.
    """
    check_tensor("x", x, FLOAT_DTYPES)
    if method not in METHODS:
        raise ValueError(f"method is {method!r}; allowed are {', '.join(map(repr, METHODS))}.")
    if x.numel() == 0:
        raise ValueError(f"x has shape {tuple(x.shape)}; it must have at least one row and one column.")
    matrix = as_rows("x", x)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    softmax_rows(matrix, out.view(matrix.shape), method)
    return out


def softmax_rows(matrix: torch.Tensor, out: torch.Tensor, method: str = "auto", zero_empty_rows: bool = False) -> None:
    """Softmax of [rows, columns] into out, which may be the same tensor. Rows of -inf give zeros if asked to."""
    columns = matrix.shape[1]
    if method == "auto":
        widest = ONE_PASS_COLUMNS if matrix.element_size() < 4 else AUTO_ONE_PASS_FLOAT32_COLUMNS
        method = "one_pass" if columns <= widest else "online"
    if method == "one_pass" and columns > ONE_PASS_COLUMNS:
        raise ValueError(
            f"method is 'one_pass' for {columns} columns; it takes {ONE_PASS_COLUMNS} at most; use 'online'."
        )
    if method == "one_pass":
        launch_one_pass(matrix, out, zero_empty_rows)
    else:
        kernel = softmax_three_pass_kernel if method == "three_pass" else softmax_online_kernel
        block_columns = min(triton.next_power_of_2(columns), TILE_COLUMNS)
        kernel[(matrix.shape[0],)](
            matrix, out, columns, matrix.stride(0), out.stride(0), BLOCK_COLUMNS=block_columns,
            ZERO_EMPTY_ROWS=zero_empty_rows, num_warps=max(1, min(TILE_WARPS, block_columns // 256)),
        )  # fmt: skip


def launch_one_pass(matrix: torch.Tensor, out: torch.Tensor, zero_empty_rows: bool) -> None:
    rows, columns = matrix.shape
    block_columns, tail_columns = cut(columns)
    group = math.gcd(columns, matrix.stride(0), out.stride(0), LARGEST_GROUP)
    arguments = (matrix, out, rows, columns // group, matrix.stride(0) // group, out.stride(0) // group)
    constants = {"GROUP": group, "ZERO_EMPTY_ROWS": zero_empty_rows}
    if matrix.element_size() < 4 and columns > PACKED_COLUMNS // 2 and not interpreting():
        block_columns = max(PACKED_COLUMNS, triton.next_power_of_2(columns))
        softmax_one_pass_packed_kernel[(rows,)](
            *arguments, **constants, BLOCK_COLUMNS=block_columns, num_warps=PACKED_WARPS[block_columns],
            maxnreg=PACKED_REGISTERS,
        )  # fmt: skip
        return
    warps = warps_for(max(TILE_ELEMENTS, block_columns + tail_columns))
    if tail_columns:
        softmax_one_pass_two_tiles_kernel[(rows,)](
            *arguments, **constants, BLOCK_COLUMNS=block_columns, TAIL_COLUMNS=tail_columns, num_warps=warps
        )
    else:
        block_rows = max(1, TILE_ELEMENTS // block_columns)
        softmax_one_pass_kernel[(triton.cdiv(rows, block_rows),)](
            *arguments, **constants, BLOCK_ROWS=block_rows, BLOCK_COLUMNS=block_columns, num_warps=warps
        )


def cut(columns: int) -> tuple[int, int]:
    """Widths of the one or two tiles, powers of two, that cover a row with the fewest lanes idle."""
    whole = triton.next_power_of_2(columns)
    if columns <= TILE_ELEMENTS or columns > whole // 4 * 3:
        return whole, 0
    return whole // 2, triton.next_power_of_2(columns - whole // 2)


def warps_for(tile_elements: int) -> int:
    """Warps so that a thread holds from 16 elements, in the smallest tile, to 64, in the largest."""
    return {2048: 4, 4096: 4, 8192: 8, 16384: 8, 32768: 16, 65536: 32}[triton.next_power_of_2(tile_elements)]


def compile_cases() -> list[CompileCase]:
    """What ships, for the compile gate: the widest tile of each method."""
    pointers = {"x_pointer": "*bf16", "out_pointer": "*bf16"}
    groups = dict.fromkeys(("rows", "column_groups", "x_stride_groups", "out_stride_groups"), "i32")
    looped = pointers | dict.fromkeys(("columns", "x_stride", "out_stride"), "i32")
    constants = {"GROUP": 8, "ZERO_EMPTY_ROWS": False}
    cases = [
        CompileCase(softmax_one_pass_kernel, pointers | groups,
                    constants | {"BLOCK_ROWS": 1, "BLOCK_COLUMNS": PACKED_COLUMNS},
                    num_warps=warps_for(PACKED_COLUMNS), archs=(80, 90)),
        CompileCase(softmax_one_pass_two_tiles_kernel, pointers | groups,
                    constants | {"BLOCK_COLUMNS": PACKED_COLUMNS // 2, "TAIL_COLUMNS": PACKED_COLUMNS // 4},
                    num_warps=warps_for(PACKED_COLUMNS), archs=(80, 90)),
    ]  # fmt: skip
    # Squeezed into the registers on purpose; what spills is little, and two rows at a time are worth it.
    for block_columns, warps in PACKED_WARPS.items():
        cases.append(CompileCase(softmax_one_pass_packed_kernel, pointers | groups,
                                 constants | {"BLOCK_COLUMNS": block_columns}, num_warps=warps, archs=(80, 90),
                                 max_spill_bytes=128, options={"maxnreg": PACKED_REGISTERS}))  # fmt: skip
    for kernel in (softmax_three_pass_kernel, softmax_online_kernel):
        constants = {"BLOCK_COLUMNS": TILE_COLUMNS, "ZERO_EMPTY_ROWS": False}
        cases.append(CompileCase(kernel, looped, constants, num_warps=TILE_WARPS, archs=(80, 90)))
    return cases
