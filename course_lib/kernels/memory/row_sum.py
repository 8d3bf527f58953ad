"""Row sum: a reduction that reads its input once, whatever its shape and strides.

    out[r] = sum over c of x[r, c]

FLOPs: rows·columns. Bytes: rows·columns·itemsize read, rows·4 written: in float32 an intensity of 1/4 FLOP/byte.

A program sums a band of rows over a share of the columns. It adds whole tiles into a tile of partial sums, thread by
thread, and combines the threads once, at the end. What has to be decided is who reads what:

- short rows: a tile holds several, so that it still is a few KiB, enough to keep the memory busy;
- few, long rows: their columns are shared among many programs, whose partial sums a second, tiny launch adds up.
  The order of additions is fixed, so results repeat bit for bit; atomic adds would not;
- rows that are contiguous down a column (a transposed tensor): the tile is tall instead of wide, because consecutive
  threads must read consecutive addresses.
"""

import torch
import triton
import triton.language as tl

from course_lib.hardware.compiler.cases import CompileCase
from course_lib.hardware.device import machine
from course_lib.kernels.common.checks import FLOAT_DTYPES, check_tensor

TILE_ELEMENTS = 2048
TALL_TILE_ROWS = 128
WIDE_WARPS, TALL_WARPS = 4, 8
LEAST_TILES_PER_SPLIT = 4  # below this a second launch costs more than the idle multiprocessors
PROGRAMS_PER_SM = 8


def row_sum_reference(x):
    """The plain PyTorch meaning: sums over the last dimension, accumulated in float32 at least."""
    return x.sum(dim=-1, dtype=torch.float32)


@triton.jit
def row_sum_kernel(
    x_pointer, out_pointer, rows, columns, row_stride, column_stride, columns_per_split,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    split = tl.program_id(1).to(tl.int64)
    row_offsets = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)  # [BLOCK_ROWS]
    row_inside = row_offsets < rows  # [BLOCK_ROWS]
    row_pointers = x_pointer + row_offsets * row_stride  # [BLOCK_ROWS]
    first = split * columns_per_split
    # Shares are whole tiles, so the mask needs `columns` alone. A mask that ends at `last` would compare with a number
    # the compiler knows nothing about, and it would give up on 16-byte loads.
    last = tl.minimum(first + columns_per_split, columns)
    partial = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], dtype=tl.float32)
    for start in range(first, last, BLOCK_COLUMNS):
        column_offsets = start + tl.arange(0, BLOCK_COLUMNS).to(tl.int64)  # [BLOCK_COLUMNS]
        inside = row_inside[:, None] & (column_offsets < columns)[None, :]  # [BLOCK_ROWS, BLOCK_COLUMNS]
        tile = tl.load(row_pointers[:, None] + (column_offsets * column_stride)[None, :], mask=inside, other=0.0)
        partial += tile.to(tl.float32)  # [BLOCK_ROWS, BLOCK_COLUMNS]
    # Partial sums lie [split, row], so that each program writes one contiguous run.
    tl.store(out_pointer + split * rows + row_offsets, tl.sum(partial, axis=1), mask=row_inside)


def row_sum(x: torch.Tensor) -> torch.Tensor:
    """Sums over the last dimension, in float32.

    Args:
        x: [..., columns], float32, float16 or bfloat16, any strides of rows and columns, any lengths (0 as well).
            Leading dimensions must be one stride apart as a whole, i.e. x.flatten(0, -2) must be a view.

    Returns:
        float32 [...].

    Raises:
        ValueError: x is not as above; the message says what to do.
    """
    check_tensor("x", x, FLOAT_DTYPES)
    if x.dim() == 0:
        raise ValueError("x has no dimensions; it must have at least one, whose elements are summed.")
    matrix = as_matrix(x)
    rows, columns = matrix.shape
    out = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
    if columns == 0:
        return out.zero_()
    if rows == 0:
        return out
    columns_per_split = split_columns(matrix)
    splits = triton.cdiv(columns, columns_per_split)
    if splits == 1:
        launch(matrix, out, columns_per_split)
    else:
        partial_sums = torch.empty(splits, rows, dtype=torch.float32, device=x.device)
        launch(matrix, partial_sums, columns_per_split)
        launch(partial_sums.t(), out, splits)
    return out


def launch(matrix: torch.Tensor, out: torch.Tensor, columns_per_split: int) -> None:
    """One launch: sums of `columns_per_split` columns at a time; out holds [splits, rows] values."""
    rows, columns = matrix.shape
    block_rows, block_columns = choose_tile(matrix)
    grid = (triton.cdiv(rows, block_rows), triton.cdiv(columns, columns_per_split))
    row_sum_kernel[grid](
        matrix, out, rows, columns, matrix.stride(0), matrix.stride(1), columns_per_split,
        BLOCK_ROWS=block_rows, BLOCK_COLUMNS=block_columns, num_warps=TALL_WARPS if is_tall(matrix) else WIDE_WARPS,
    )  # fmt: skip


def is_tall(matrix: torch.Tensor) -> bool:
    """True when memory is contiguous down a column, as in a transposed tensor."""
    return matrix.stride(0) == 1 and matrix.stride(1) != 1


def choose_tile(matrix: torch.Tensor) -> tuple[int, int]:
    """(BLOCK_ROWS, BLOCK_COLUMNS): powers of two, about TILE_ELEMENTS in all, long along the contiguous dimension."""
    rows, columns = (triton.next_power_of_2(length) for length in matrix.shape)
    if is_tall(matrix):
        block_rows = min(rows, TALL_TILE_ROWS)
        return block_rows, min(columns, TILE_ELEMENTS // block_rows)
    block_columns = min(columns, TILE_ELEMENTS)
    return min(rows, TILE_ELEMENTS // block_columns), block_columns


def split_columns(matrix: torch.Tensor) -> int:
    """How many columns a program sums: all, or fewer when there are too few rows to occupy the whole GPU."""
    rows, columns = matrix.shape
    block_rows, block_columns = choose_tile(matrix)
    tiles = triton.cdiv(columns, block_columns)
    missing = triton.cdiv(PROGRAMS_PER_SM * (machine().sm_count or 1), triton.cdiv(rows, block_rows))
    splits = max(1, min(missing, tiles // LEAST_TILES_PER_SPLIT))
    return triton.cdiv(tiles, splits) * block_columns


def as_matrix(x: torch.Tensor) -> torch.Tensor:
    """x as [rows, columns] without copying."""
    if x.dim() == 1:
        return x.unsqueeze(0)
    try:
        return x.view(-1, x.shape[-1]) if x.numel() else x.reshape(x.shape[:-1].numel(), x.shape[-1])
    except RuntimeError as error:
        raise ValueError(
            f"x has shape {tuple(x.shape)} and strides {x.stride()}; its leading dimensions cannot be seen as one "
            "without a copy. Call x.contiguous() first, or sum it in slices."
        ) from error


def compile_cases() -> list[CompileCase]:
    """What ships, for the compile gate: a wide tile for rows that are contiguous, a tall one for columns that are."""
    signature = {"x_pointer": "*fp16", "out_pointer": "*fp32"}
    signature |= dict.fromkeys(("rows", "columns", "row_stride", "column_stride", "columns_per_split"), "i32")
    tall = {"BLOCK_ROWS": TALL_TILE_ROWS, "BLOCK_COLUMNS": TILE_ELEMENTS // TALL_TILE_ROWS}
    divisible = ("x_pointer", "out_pointer", "columns", "columns_per_split")
    return [
        CompileCase(
            row_sum_kernel, signature, {"BLOCK_ROWS": 1, "BLOCK_COLUMNS": TILE_ELEMENTS, "column_stride": 1},
            num_warps=WIDE_WARPS, divisible=(*divisible, "row_stride"), label="wide",
        ),
        CompileCase(
            row_sum_kernel, signature, {**tall, "row_stride": 1},
            num_warps=TALL_WARPS, divisible=(*divisible, "rows", "column_stride"), label="tall",
        ),
    ]  # fmt: skip
