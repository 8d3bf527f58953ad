"""A kernel that sums rows block by block, one row a program, with what can go wrong at each step.

All rows are summed at once. A sum in float16 is taken in the order of Triton's interpreter, lane by lane and then over
the lanes, because float16 remembers the order.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from course_lib.checker.specification.model import Model, Slip, Slips
from exercises.topics.elementwise_model import block_of, of_any_block
from exercises.topics.memory import load

STRIDES = {  # slip to the strides (of a row, of a column) that are taken, from the matrix's own and its columns
    "row_stride_ignored": lambda row, column, columns: (columns, column),
    "column_stride_ignored": lambda row, column, columns: (row, 1),
    "strides_ignored": lambda row, column, columns: (columns, 1),
    "strides_exchanged": lambda row, column, columns: (column, row),
    "row_stride_for_both": lambda row, column, columns: (row, row),
    "column_stride_for_both": lambda row, column, columns: (column, column),
    "row_forgotten": lambda row, column, columns: (0, column),
    "row_not_multiplied": lambda row, column, columns: (1, column),
}


COLUMNS_SUMMED = {  # slip to when it happens
    "columns_summed": lambda x: True,
    "columns_summed__of_a_transposed_matrix": lambda x: 0 < x.stride(0) < x.stride(1),
    "columns_summed__of_a_transposed_square": lambda x: x.shape[0] == x.shape[1] and x.stride(0) < x.stride(1),
    "columns_summed__where_strides_rise": lambda x: x.stride(0) < x.stride(1),
}


def compute(s: Slips, x: torch.Tensor) -> torch.Tensor:
    (rows, columns), block = x.shape, block_of(s)
    if any(s(name) and happens(x) for name, happens in COLUMNS_SUMMED.items()):
        return x.float().sum(dim=0)
    row_stride, column_stride = x.stride()
    for name, taken in STRIDES.items():
        if s(name):
            row_stride, column_stride = taken(*x.stride(), columns)
    end = rows if s("rows_for_columns") else columns - s("last_column_missing")
    tiles = end // block if s("tail_columns_dropped") else -(-end // block)
    if s("last_tile_skipped"):
        tiles -= 1
    if s("only_first_tile"):
        tiles = min(tiles, 1)
    lanes = torch.arange(max(tiles, 0) * block)
    inside = lanes * (column_stride if s("mask_of_addresses") else 1) < end
    if s("start_forgotten"):
        lanes = lanes % block
        inside = lanes < end
    if s("first_column_missing"):
        inside &= lanes > 0
    along = lanes * column_stride
    if s("column_stride_ignored__block_start"):
        along = lanes // block * block + lanes % block * column_stride
    offsets = torch.arange(rows)[:, None] * row_stride + along
    other = 1.0 if s("other_is_one") else 0.0
    values = load(s, x, offsets, None if s("load_not_masked") else inside[None], other)
    values = values.view(rows, len(lanes) // block, block)  # [rows, tiles, lanes]
    if s("largest_instead_of_sum"):
        values = torch.where(inside.view(-1, block), values, -math.inf)
    if s("every_second_tile"):
        values = values[:, ::2]
    if s("only_last_tile"):
        values = values[:, -1:]
    if s("squares_summed"):
        values = values.float() ** 2
    if s("magnitudes_summed"):
        values = values.abs()
    total = _summed(s, values)
    if s("mean_instead_of_sum"):
        total = total / columns
    if s("largest_instead_of_sum"):
        total = torch.cat([values.flatten(1), values.new_full((rows, 1), -math.inf)], dim=1).amax(dim=1)
    total = total.float()
    if s("only_row_zero"):
        total[1:] = math.nan
    if s("stored_in_one_place"):
        total[:1], total[1:] = total[-1:].clone(), math.nan
    if s("last_row_missing"):
        total[-1:] = math.nan
    if s("last_row_missing__of_several"):
        total[max(rows - 1, 1) :] = math.nan
    return total


def _summed(s: Slips, values: torch.Tensor) -> torch.Tensor:
    """[rows] sums of [rows, tiles, lanes], in float32 or in the dtype of the values."""
    if s("half_accumulator__of_each_block"):
        return _over_lanes(values).float().sum(dim=1)
    if s("half_accumulator", "half_accumulator__always"):
        values = values.half() if s("half_accumulator__always") else values
        partial = torch.zeros_like(values[:, 0]) if values.shape[1] else values.new_zeros(len(values), 1)
        for tile in values.unbind(1):
            partial = partial + tile
        return _over_lanes(partial)
    if not values.shape[1]:
        return torch.zeros(len(values))
    # Tile after tile, as the kernel adds: a million equal additions round all the same way.
    return _over_lanes(torch.from_numpy(np.add.accumulate(values.float().numpy(), axis=1)[:, -1].copy()))


def _over_lanes(values: torch.Tensor) -> torch.Tensor:
    """The sum over the last axis, in the values' own precision and in NumPy's order, which is the interpreter's."""
    with np.errstate(over="ignore", invalid="ignore"):
        return torch.from_numpy(values.contiguous().numpy().sum(axis=-1))


HALF = (
    "The sum went through float16, which holds 11 significant bits and nothing above 65504. Accumulate in float32, "
    "`tl.zeros([BLOCK], dtype=tl.float32)` or `.to(tl.float32)` on each block, and store that."
)
LAST_ROW = "The last row was never written: one program is missing from the grid."
SLIPS = (
    Slip(
        "columns_summed",
        "The sum runs down the columns. A row's sum adds along the last dimension and there are as many results as "
        "rows.",
    ),
    *(
        Slip(
            name,
            "Where the matrix lies column by column in memory, its columns were summed. Strides say where an element "
            "lies, not what a row is: x[r, 0], x[r, 1] and so on, x.shape[1] of them.",
            alone=True,
        )
        for name in COLUMNS_SUMMED
        if name != "columns_summed"
    ),
    Slip("mean_instead_of_sum", "That is the mean of each row: the sum was divided by the number of columns."),
    Slip("largest_instead_of_sum", "That is the largest element of each row: `tl.max` where `tl.sum` belongs."),
    Slip("squares_summed", "The squares of the elements were summed. Add the elements themselves."),
    Slip("magnitudes_summed", "The absolute values of the elements were summed. Add the elements themselves."),
    Slip(
        "only_row_zero",
        "Only row 0 was written. Either one program was launched in all (each row needs its own: the grid is "
        "`(rows,)`), or every program takes itself for number 0: a grid of one axis is numbered by `tl.program_id(0)`.",
    ),
    Slip(
        "stored_in_one_place",
        "Every program stores its sum in the result's first element, where the last one stays. Row r's sum belongs at "
        "`result_pointer + row`.",
    ),
    Slip("last_row_missing", LAST_ROW),
    Slip("last_row_missing__of_several", LAST_ROW, alone=True),
    Slip(
        "rows_for_columns",
        "Of each row only as many elements were added as there are rows. The length of a row is the number of columns, "
        "`x.shape[1]`; `x.shape[0]` is the number of rows.",
    ),
    Slip(
        "column_stride_ignored__block_start",
        "Only the positions within a block are multiplied by `x.stride(1)`. The block's start must be, too: "
        "`(start + tl.arange(0, BLOCK)) * column_stride`.",
    ),
    Slip(
        "strides_ignored",
        "The matrix was read as if it were contiguous. Use `x.stride(0)` for the rows and `x.stride(1)` for the "
        "columns.",
    ),
    Slip(
        "row_stride_ignored",
        "Rows were taken to lie `columns` elements apart. They lie `x.stride(0)` apart: a slice of a wider matrix has "
        "gaps, a transposed one has its rows side by side.",
    ),
    Slip(
        "column_stride_ignored",
        "Neighbours in a row were taken to lie side by side. They lie `x.stride(1)` elements apart, which is not 1 for "
        "a transposed matrix.",
    ),
    Slip(
        "strides_exchanged",
        "The two strides are exchanged: rows lie `x.stride(0)` apart, columns `x.stride(1)`. Look at the order in "
        "which the launcher passes them, and at the pointers.",
    ),
    Slip(
        "row_stride_for_both",
        "Neighbours in a row are taken to lie as far apart as rows. They lie `x.stride(1)` elements apart.",
    ),
    Slip(
        "column_stride_for_both",
        "Rows are taken to lie as far apart as columns. They lie `x.stride(0)` elements apart.",
    ),
    Slip(
        "row_forgotten",
        "Every row's result is the sum of row 0: row · row_stride is missing from the load's addresses.",
    ),
    Slip(
        "row_not_multiplied",
        "Row r is read from element r on. It begins at element r · row_stride.",
    ),
    Slip(
        "only_first_tile",
        "Only the start of each row was added, as much of a long row as of a short one. A row longer than BLOCK needs "
        "a loop over its blocks, up to `columns`.",
    ),
    Slip(
        "only_last_tile",
        "Only the last block of each row is in the result: the sum is overwritten at every step. Add to it: "
        "`partial += ...`.",
    ),
    Slip(
        "every_second_tile",
        "Every second block of a row is left out: the loop's step is twice as long as the block that it loads.",
    ),
    Slip(
        "start_forgotten",
        "The first block of each row was added once for every step of the loop: `start` is missing from the offsets, "
        "`start + tl.arange(0, BLOCK)`.",
    ),
    Slip(
        "tail_columns_dropped",
        "The last, partly filled block of each row is missing: the loop ends too early. Let it run to `columns` and "
        "mask the last block instead.",
    ),
    Slip(
        "last_tile_skipped",
        "The last block of each row was not added, whether it is full or not: the loop ends one step early. Let it run "
        "to `columns`.",
    ),
    Slip(
        "last_column_missing",
        "The last element of each row was not added. Columns run from 0 to columns - 1: mask with `offsets < columns`.",
    ),
    Slip(
        "mask_of_addresses",
        "The mask compares columns times their stride with the number of columns: of a row whose elements lie apart "
        "only the first are added. The mask is `offsets < columns`; the stride belongs to the pointers alone.",
    ),
    Slip("first_column_missing", "The first element of each row was not added. Columns are numbered from 0."),
    Slip(
        "other_is_one",
        "Lanes past the end of a row were added as ones. What is masked off must add nothing: `other=0.0`.",
    ),
    Slip(
        "load_not_masked",
        "The last block of a row is read past the row's end, and what lies there is added. Mask the load with "
        "`offsets < columns`, and `other=0.0`.",
    ),
    Slip("half_accumulator", HALF),
    Slip("half_accumulator__always", HALF),
    Slip("half_accumulator__of_each_block", HALF),
)
STYLES = of_any_block(first=1024)
# A sum in float16 is an error of its own, but mostly one of a rounding: it must not hide another that is plain to see.
IN_FLOAT16 = tuple((*style, "half_accumulator") for style in STYLES[:2])
MODELS = (
    Model(compute, SLIPS, STYLES + IN_FLOAT16, pairs=False),
    *(Model(compute, SLIPS, (style,)) for style in STYLES[:2]),
)
