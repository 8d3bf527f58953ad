"""What the matrix products share: the order of their tiles, a tile's rows, the loop that multiplies, and the store."""

import torch
import triton
import triton.language as tl

from course_lib.kernels.common.numbers import FLOAT32_PRECISION


@triton.jit
def tile_of(number, row_tiles, column_tiles, strip):
    """(row tile, column tile) of a number: column by column down a strip of so many row tiles, then the next strip.

    Programs that run at once then work on a block of tiles that is about square, and share what they read in the L2
    cache. The last strip may be thinner. strip = 1 is row by row. `tile_of.fn` is the same for Python's integers.
    """
    first_row = number // (strip * column_tiles) * strip
    place = number % (strip * column_tiles)
    height = min(strip, row_tiles - first_row)
    return first_row + place % height, place // height


@triton.jit
def numbers_of_tile(tile, BLOCK: tl.constexpr):
    """Which rows or columns [BLOCK] a tile has; in 32 bits, of which a large tile of 64 would take the registers."""
    return tile * BLOCK + tl.arange(0, BLOCK)


@triton.jit
def starts_of_rows(pointer, row, rows, stride):
    """Where rows [BLOCK] begin in memory, [BLOCK, 1]; the last one again in the place of those beyond the end.

    So no load needs a mask for rows: what is multiplied beyond the end is not stored.
    """
    return pointer + tl.minimum(row, rows - 1).to(tl.int64)[:, None] * stride


@triton.jit
def weight_rows_of_tile(tile, columns, GATED: tl.constexpr, BLOCK_N: tl.constexpr):
    """Which rows of the weight [BLOCK_N] a tile has; the last one again in the place of those beyond the end.

    With a gate they are rows of gate and up in turns, so that the two numbers of an output lie in one thread.
    """
    number = tl.arange(0, BLOCK_N)
    if GATED:
        column = tl.minimum(tile * (BLOCK_N // 2) + number // 2, columns - 1)
        return column + number % 2 * columns
    return tl.minimum(tile * BLOCK_N + number, columns - 1)


@triton.jit
def multiply(x_rows, weight_rows, begin, end, inner, BLOCK_K: tl.constexpr):
    """x · weightᵀ [BLOCK_M, BLOCK_N] in float32 over the elements [begin, end) of rows [BLOCK_M, 1], [BLOCK_N, 1]."""
    sums = tl.zeros([x_rows.shape[0], weight_rows.shape[0]], tl.float32)  # [BLOCK_M, BLOCK_N]
    for start in tl.range(begin, end, BLOCK_K):
        element = start + tl.arange(0, BLOCK_K)[None, :]
        x = tl.load(x_rows + element, mask=element < inner, other=0.0)  # [BLOCK_M, BLOCK_K]
        weights = tl.load(weight_rows + element, mask=element < inner, other=0.0)  # [BLOCK_N, BLOCK_K]
        sums = tl.dot(x, tl.trans(weights), sums, input_precision=FLOAT32_PRECISION)
    return sums


@triton.jit
def store_tile(out_pointer, result, row, column, rows, columns, out_stride):
    """Round a result [BLOCK_M, BLOCK_N] of rows [BLOCK_M] and columns [BLOCK_N], and store what exists of it."""
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    out_tile = out_pointer + row.to(tl.int64)[:, None] * out_stride + column[None, :]
    tl.store(out_tile, result.to(out_pointer.dtype.element_ty), mask=inside)


@triton.jit
def part_of_sums(partial_sums_pointer, number, row, rows, BLOCK_N: tl.constexpr):
    """Where the rows [BLOCK_M] of a part lie, [BLOCK_M, BLOCK_N]: partial sums are part after part, [rows, BLOCK_N]."""
    first = number.to(tl.int64) * rows + row
    return partial_sums_pointer + first[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]


@triton.jit
def leave_part(sums, partial_sums_pointer, number, row, rows):
    """Store a part's sums [BLOCK_M, BLOCK_N], so that an atomic operation behind it shows them to other programs."""
    tl.store(part_of_sums(partial_sums_pointer, number, row, rows, sums.shape[1]), sums, mask=(row < rows)[:, None])
    tl.debug_barrier()  # all threads' stores come before the atomic operation, which releases them


@triton.jit
def add_part(sums, partial_sums_pointer, number, row, rows):
    """sums [BLOCK_M, BLOCK_N] and those of a part that another program has left."""
    part = part_of_sums(partial_sums_pointer, number, row, rows, sums.shape[1])
    return sums + tl.load(part, mask=(row < rows)[:, None], other=0.0)


def operands(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> tuple:
    """What each of these kernels begins its arguments with: x, weight, out; rows, columns, inner; a stride of each."""
    return x, weight, out, *out.shape, x.shape[1], x.stride(0), weight.stride(0), out.stride(0)
