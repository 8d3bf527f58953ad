"""Exercise 1.4: row sum, any shape and strides, one pass."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import torch

from course_lib.checker import (
    TRITON,
    Allocates,
    Case,
    Exercise,
    Forbids,
    LaunchesTriton,
    Mistake,
    Moves,
    edits,
    model_of,
)
from course_lib.checker.specification.contract import Contract, Level
from course_lib.checker.specification.draw import Draw
from course_lib.checker.specification.layouts import CONTIGUOUS, every_other, expanded, gaps, last_exchanged
from exercises.ch01_memory_hierarchy_and_roofline.blocks import NOTHING_STORED, nothing_stored, past_the_end
from exercises.topics.elementwise import of_any_block
from exercises.topics.pointers import load, put
from exercises.topics.vector_inputs import negative, ordinary, with_zeros


def row_sum_oracle(x):
    return x.sum(dim=-1, dtype=torch.promote_types(x.dtype, torch.float32))


def row_sum_in_another_order(x):
    """The row sum, off by as much as float32 additions in another order may be: ε Σ|x|."""
    accurate = torch.promote_types(x.dtype, torch.float32)
    return row_sum_oracle(x) + torch.finfo(accurate).eps * x.abs().sum(dim=-1, dtype=accurate)


def row_sum_one_by_one(x):
    """The row sum in float32, element after element: equal ones are all rounded the same way."""
    return torch.from_numpy(np.cumsum(x.float().cpu().numpy(), axis=-1)[:, -1].copy())


def cancelling(draw, rows, columns):
    """The first half of a row adds up to far more than float16 can hold, and the second takes it away again."""
    large = draw.uniform(rows, columns, low=100.0, high=200.0)
    large[:, columns // 2 :] *= -1
    return large


def row_sum_cases(draw):
    alike = Draw(9)  # the same at every check
    cases = [
        Case("4 rows of 1024", (draw.normal(4, 1024),), metered=True),
        Case("3 rows of 20,011, longer than any block", (draw.normal(3, 20_011, shift=0.5),), metered=True),
        Case("2 rows of 20,011, stored column by column", (draw.transposed(draw.normal(2, 20_011)),), metered=True),
        Case("5 rows of 129, with a gap behind each row", (draw.spread_out(draw.normal(5, 129), 3),), metered=True),
        Case("float16: 3 rows of 1500", (draw.normal(3, 1500, dtype=torch.float16, shift=1.0),), metered=True),
        Case("float16: partial sums beyond what float16 can hold", (cancelling(draw, 2, 2048).half(),)),
        Case("9 rows of 9, stored column by column", (alike.transposed(alike.normal(9, 9)),)),
        Case("one row of 1,048,583, more than a tile may hold", (draw.normal(1, 1_048_583),)),
    ]
    if draw.on_gpu:
        cases.append(Case("one row of one element", (draw.normal(1, 1),)))
        cases.append(Case("200 rows of 100,003", (draw.normal(200, 100_003),)))
    return cases


def drawn(draw, *, rows, columns, dtype, values, layout):
    return (layout(draw, values(draw, rows, columns).to(dtype)),)


def one_column(draw, tensor):
    """One and the same column for all: the last stride is 0."""
    return tensor[:, :1].contiguous().expand(tensor.shape)


CONTRACT = Contract(
    drawn,
    choices={
        "rows": (1, 2, 7, 17),
        "columns": (1, 2, 31, 257, 1023, 2049),
        "dtype": (torch.float32, torch.float16),
        "values": (
            Level(ordinary, ""),
            Level(negative, "negative numbers"),
            Level(with_zeros, "zeros among them"),
            Level(cancelling, "halves that cancel"),
        ),
        "layout": (
            CONTIGUOUS,
            Level(gaps, "a gap after each row"),
            Level(last_exchanged, "stored column by column, with gaps"),
            Level(every_other, "elements apart"),
            Level(expanded, "one row expanded"),
            Level(one_column, "one column expanded"),
        ),
    },
    says={
        "rows": "at least one row and one column",
        "columns": "at least one row and one column, rows of any length",
        "dtype": "float32 or float16",
        "layout": "any strides",
    },
    valid=lambda rows, columns, **_: rows * columns <= 7 * 1023,
    most=8,
)


def row_sums(x):
    rows, columns = x.shape
    block = 1024
    row = torch.arange(rows)
    offsets = torch.arange(0, columns, block)[:, None] + torch.arange(block)  # [tiles, block]
    inside = offsets < columns
    addresses = row[:, None, None] * x.stride(0) + offsets * x.stride(1)
    tiles = load(x, addresses, inside, 0.0)  # [rows, tiles, block]: all steps of the loop at once
    result = torch.full((rows,), math.nan)
    put(result, row, added(tiles.float()))
    return result


def added(tiles: torch.Tensor) -> torch.Tensor:
    """[rows], in the dtype of the tiles: one added to the other, a million equal ones all rounded the same way."""
    with np.errstate(over="ignore", invalid="ignore"):
        partial = np.add.accumulate(torch.nn.functional.pad(tiles, (0, 0, 1, 0)).numpy(), axis=1)[:, -1]
    return over_lanes(torch.from_numpy(partial))


def over_lanes(values: torch.Tensor) -> torch.Tensor:
    """The sum over the last axis, in the values' own precision and in NumPy's order, which is the interpreter's."""
    with np.errstate(over="ignore", invalid="ignore"):
        return torch.from_numpy(values.contiguous().numpy().sum(axis=-1))


HALF = (
    "The sum went through float16, which holds 11 significant bits and nothing above 65504. Accumulate in float32, "
    "`tl.zeros([BLOCK], dtype=tl.float32)` or `.to(tl.float32)` on each block, and store that."
)
LAST_ROW = "The last row was never written: one program is missing from the grid."
TRANSPOSED = (
    "Where the matrix lies column by column in memory, its columns were summed. Strides say where an element lies, not "
    "what a row is: x[r, 0], x[r, 1] and so on, x.shape[1] of them."
)
OF_COLUMNS = "x.float().sum(dim=0)"
LIES_BY_COLUMNS = {
    "of_a_transposed_matrix": "0 < x.stride(0) < x.stride(1)",
    "of_a_transposed_square": "x.shape[0] == x.shape[1] and x.stride(0) < x.stride(1)",
    "where_strides_rise": "x.stride(0) < x.stride(1)",
}
ROW_STRIDE, COLUMN_STRIDE, INSIDE = "x.stride(0)", "x.stride(1)", "offsets < columns"
SHAPE, PROGRAMS, STARTS, SUM = (
    "rows, columns =",
    "row = torch.arange(rows)",
    "torch.arange(0, columns, block)",
    "added(tiles.float())",
)
CHANGES = (
    *edits(
        "The sum runs down the columns. A row's sum adds along the last dimension and there are as many results as "
        "rows.",
        columns_summed=(SHAPE, f"return {OF_COLUMNS}\n{SHAPE}"),
    ),
    *edits(
        TRANSPOSED,
        alone=True,
        **{
            f"columns_summed__{name}": (SHAPE, f"if {happens}:\n    return {OF_COLUMNS}\n{SHAPE}")
            for name, happens in LIES_BY_COLUMNS.items()
        },
    ),
    *edits(
        "That is the mean of each row: the sum was divided by the number of columns.",
        mean_instead_of_sum=(SUM, f"{SUM} / columns"),
    ),
    *edits(
        "That is the largest element of each row: `tl.max` where `tl.sum` belongs.",
        largest_instead_of_sum=(SUM, "torch.where(inside, tiles, -math.inf).amax((1, 2))"),
    ),
    *edits(
        "The squares of the elements were summed. Add the elements themselves.",
        squares_summed=("tiles.float()", "tiles.float() ** 2"),
    ),
    *edits(
        "The absolute values of the elements were summed. Add the elements themselves.",
        magnitudes_summed=("inside, 0.0)", "inside, 0.0).abs()"),
    ),
    *edits(
        "Only row 0 was written. Either one program was launched in all (each row needs its own: the grid is "
        "`(rows,)`), or every program takes itself for number 0: a grid of one axis is numbered by `tl.program_id(0)`.",
        only_row_zero=(PROGRAMS, f"{PROGRAMS}[:1]"),
    ),
    *edits(
        "Every program stores its sum in the result's first element, where the last one stays. Row r's sum belongs at "
        "`result_pointer + row`.",
        stored_in_one_place=("put(result, row", "put(result, row * 0"),
    ),
    *edits(LAST_ROW, last_row_missing=(PROGRAMS, f"{PROGRAMS}[:-1]")),
    *edits(LAST_ROW, alone=True, last_row_missing__of_several=(PROGRAMS, f"{PROGRAMS}[: max(rows - 1, 1)]")),
    *edits(
        "Of each row only as many elements were added as there are rows. The length of a row is the number of columns, "
        "`x.shape[1]`; `x.shape[0]` is the number of rows.",
        rows_for_columns=("torch.arange(0, columns", "torch.arange(0, rows", INSIDE, "offsets < rows"),
    ),
    *edits(
        "Only the positions within a block are multiplied by `x.stride(1)`. The block's start must be, too: "
        "`(start + tl.arange(0, BLOCK)) * column_stride`.",
        column_stride_ignored__block_start=(
            f"offsets * {COLUMN_STRIDE}",
            f"offsets // block * block + offsets % block * {COLUMN_STRIDE}",
        ),
    ),
    *edits(
        "The matrix was read as if it were contiguous. Use `x.stride(0)` for the rows and `x.stride(1)` for the "
        "columns.",
        strides_ignored=(ROW_STRIDE, "columns", COLUMN_STRIDE, "1"),
    ),
    *edits(
        "Rows were taken to lie `columns` elements apart. They lie `x.stride(0)` apart: a slice of a wider matrix has "
        "gaps, a transposed one has its rows side by side.",
        row_stride_ignored=(ROW_STRIDE, "columns"),
    ),
    *edits(
        "Neighbours in a row were taken to lie side by side. They lie `x.stride(1)` elements apart, which is not 1 for "
        "a transposed matrix.",
        column_stride_ignored=(COLUMN_STRIDE, "1"),
    ),
    *edits(
        "The two strides are exchanged: rows lie `x.stride(0)` apart, columns `x.stride(1)`. Look at the order in "
        "which the launcher passes them, and at the pointers.",
        strides_exchanged=(ROW_STRIDE, COLUMN_STRIDE, COLUMN_STRIDE, ROW_STRIDE),
    ),
    *edits(
        "Neighbours in a row are taken to lie as far apart as rows. They lie `x.stride(1)` elements apart.",
        row_stride_for_both=(COLUMN_STRIDE, ROW_STRIDE),
    ),
    *edits(
        "Rows are taken to lie as far apart as columns. They lie `x.stride(0)` elements apart.",
        column_stride_for_both=(ROW_STRIDE, COLUMN_STRIDE),
    ),
    *edits(
        "Every row's result is the sum of row 0: row · row_stride is missing from the load's addresses.",
        row_forgotten=(ROW_STRIDE, "0"),
    ),
    *edits(
        "Row r is read from element r on. It begins at element r · row_stride.", row_not_multiplied=(ROW_STRIDE, "1")
    ),
    *edits(
        "Only the start of each row was added, as much of a long row as of a short one. A row longer than BLOCK needs "
        "a loop over its blocks, up to `columns`.",
        only_first_tile=(f"{STARTS}[", f"{STARTS}[:1]["),
    ),
    *edits(
        "Only the last block of each row is in the result: the sum is overwritten at every step. Add to it: "
        "`partial += ...`.",
        only_last_tile=("tiles.float()", "tiles[:, -1:].float()"),
    ),
    *edits(
        "Every second block of a row is left out: the loop's step is twice as long as the block that it loads.",
        every_second_tile=("tiles.float()", "tiles[:, ::2].float()"),
    ),
    *edits(
        "The first block of each row was added once for every step of the loop: `start` is missing from the offsets, "
        "`start + tl.arange(0, BLOCK)`.",
        start_forgotten=("[:, None] + torch.arange(block)", "[:, None] * 0 + torch.arange(block)"),
    ),
    *edits(
        "The last, partly filled block of each row is missing: the loop ends too early. Let it run to `columns` and "
        "mask the last block instead.",
        tail_columns_dropped=(STARTS, "torch.arange(0, columns // block * block, block)"),
    ),
    *edits(
        "The last block of each row was not added, whether it is full or not: the loop ends one step early. Let it run "
        "to `columns`.",
        last_tile_skipped=(f"{STARTS}[", f"{STARTS}[:-1]["),
    ),
    *edits(
        "The last element of each row was not added. Columns run from 0 to columns - 1: mask with `offsets < columns`.",
        last_column_missing=(INSIDE, "offsets < columns - 1"),
    ),
    *edits(
        "The mask compares columns times their stride with the number of columns: of a row whose elements lie apart "
        "only the first are added. The mask is `offsets < columns`; the stride belongs to the pointers alone.",
        mask_of_addresses=(INSIDE, f"offsets * {COLUMN_STRIDE} < columns"),
    ),
    *edits(
        "The first element of each row was not added. Columns are numbered from 0.",
        first_column_missing=(INSIDE, f"({INSIDE}) & (offsets > 0)"),
    ),
    *edits(
        "Lanes past the end of a row were added as ones. What is masked off must add nothing: `other=0.0`.",
        other_is_one=("inside, 0.0", "inside, 1.0"),
    ),
    *edits(
        "The last block of a row is read past the row's end, and what lies there is added. Mask the load with "
        "`offsets < columns`, and `other=0.0`.",
        load_not_masked=("inside, 0.0", "None"),
    ),
    *edits(
        HALF,
        half_accumulator=("tiles.float()", "tiles"),
        half_accumulator__always=("tiles.float()", "tiles.half()"),
        half_accumulator__of_each_block=(SUM, "over_lanes(tiles).float().sum(1)"),
    ),
    *of_any_block(1024),
)
ONE = model_of(row_sums, CHANGES, (added,))
# A sum in float16 is an error of its own, but mostly one of a rounding: it must not hide another that is plain to see.
IN_FLOAT16 = tuple((*style, "half_accumulator") for style in ONE.styles[:2])
MODELS = (
    replace(ONE, styles=ONE.styles + IN_FLOAT16, pairs=False),
    *(replace(ONE, styles=(style,)) for style in ONE.styles[:2]),
)


def _row_sum_bytes(x) -> int:
    return x.numel() * x.element_size() + x.shape[0] * 4


def _store_past_the_end(case, seen, got) -> bool:
    return any(" writes " in access for access in seen.out_of_bounds)


def _copied(case, seen, got) -> bool:
    """Whether a right result cost a copy of the matrix."""
    (x,) = case.args
    return seen.largest_allocation >= x.numel() > 64 and "clone" in seen.operations


def _half_accumulator(case, seen, got) -> bool:
    """Every result is a float16 number (and not all are 0), or what float16 makes of too large a sum."""
    (x,) = case.args
    if not isinstance(got, torch.Tensor) or got.dtype != torch.float32 or seen.unwritten or seen.undefined_loads:
        return False
    return bool((got.isinf() | got.isnan() | (got == got.half().float())).all()) and bool(got.any())


EXERCISE = Exercise(
    id="1.4",
    title="Row sum, any shape and strides, one pass",
    entries=("row_sum",),
    cases=row_sum_cases,
    oracle=row_sum_oracle,
    contracts=(CONTRACT,),
    models=MODELS,
    plain=(row_sum_in_another_order, row_sum_one_by_one),
    needs=TRITON,
    requirements=(
        LaunchesTriton(),
        Forbids(("sum", "mean", "mm", "mv", "matmul", "addmm", "addmv", "cumsum", "einsum", "dot", "bmm")),
        Allocates(lambda x: max(64, x.numel() // 2)),
        Moves(_row_sum_bytes),
    ),
    hints=(
        "Let one program own one row. It walks along the row a block at a time and keeps what it has added so far.",
        "Element [r, c] lies `r * x.stride(0) + c * x.stride(1)` elements from the pointer. Pass both strides to the "
        "kernel. `x.contiguous()` would be a second pass over the whole matrix.",
        "Keep a block of partial sums, `tl.zeros([BLOCK], dtype=tl.float32)`, add each block to it, and reduce it once "
        "after the loop with `tl.sum(partial, axis=0)`.",
        "Where the mask is false, a loaded value is undefined, and it must not count in the sum. So give it a value: "
        "`tl.load(pointers, mask=inside, other=0.0)`.",
        "`for start in range(0, columns, BLOCK):` with `offsets = start + tl.arange(0, BLOCK)`, `inside = offsets < "
        "columns`, `partial += tl.load(x_pointer + row * row_stride + offsets * column_stride, mask=inside, "
        "other=0.0)`. Launch `(rows,)` programs and store one number each.",
    ),
    mistakes=(
        Mistake(
            "whole_row_in_one_tile",
            "The tile grows with the row. A tile lies in registers, which have room for a few thousand elements, and "
            "the interpreter takes a million. Rows may be of any length: take a block at a time, and loop along the "
            "row.",
            when=lambda case, seen, got: bool(seen.error) and "maximum tensor numel" in seen.error.text,
            cost=True,
        ),
        Mistake("nothing_stored", NOTHING_STORED, when=nothing_stored(row_sum_oracle)),
        Mistake(
            "store_past_the_end",
            "A store reaches past the end of the result. A program owns one row and writes one number: reduce the "
            "block with `tl.sum(..., axis=0)` and store it at `result_pointer + row`. (A program that owns several "
            "rows needs a mask on its store: `rows_of_mine < rows`.)",
            when=_store_past_the_end,
        ),
        Mistake(
            "past_the_end",
            "A load reaches outside the matrix. Is every load masked by `offsets < columns`, with `x.shape[1]` for "
            "`columns`, and is each stride the right one, not exchanged with the other or multiplied twice?",
            when=past_the_end,
        ),
        Mistake("half_accumulator", HALF, when=_half_accumulator, every=True),
        Mistake(
            "contiguous_copy",
            "The matrix was copied, as `contiguous()` does. That is a second pass over all its bytes before your "
            "kernel begins. Leave the matrix where it is and give the kernel both strides.",
            when=_copied,
            cost=True,
        ),
    ),
)
