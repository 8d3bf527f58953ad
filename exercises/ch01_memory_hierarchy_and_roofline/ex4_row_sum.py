"""Exercise 1.4: row sum, any shape and strides, one pass."""

from __future__ import annotations

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
    Slip,
)
from exercises.ch01_memory_hierarchy_and_roofline.blocks import (
    NOTHING_STORED,
    POWERS_OF_TWO,
    nothing_stored,
    past_the_end,
    same,
    written,
)


def row_sum_oracle(x):
    return x.sum(dim=-1, dtype=torch.promote_types(x.dtype, torch.float32))


def row_sum_in_another_order(x):
    """The row sum, off by as much as float32 additions in another order may be: ε Σ|x|."""
    accurate = torch.promote_types(x.dtype, torch.float32)
    return row_sum_oracle(x) + torch.finfo(accurate).eps * x.abs().sum(dim=-1, dtype=accurate)


def row_sum_cases(draw):
    rows, columns = draw.choice((3, 5, 7)), draw.choice((131, 257, 521))
    # In every row the first 1024 numbers add up to far more than float16 can hold, the rest take it away again.
    large = draw.uniform(2, 2048, low=100.0, high=200.0)
    large[:, 1024:] *= -1
    cases = [
        Case("4 rows of 1024", (draw.normal(4, 1024),), metered=True),
        Case("3 rows of 5000, longer than a block", (draw.normal(3, 5000, shift=0.5),), metered=True),
        Case("one row of one element", (draw.normal(1, 1),)),
        Case(f"{rows} rows of {columns}, primes", (draw.normal(rows, columns, scale=10.0),), metered=True),
        Case("6 rows of 1025, stored column by column", (draw.transposed(draw.normal(6, 1025)),), metered=True),
        Case("5 rows of 129, with a gap behind each row", (draw.spread_out(draw.normal(5, 129), 3),), metered=True),
        Case("4 rows of 100, every second column of a wider matrix", (draw.strided(draw.normal(4, 100), 2),)),
        Case("33 rows of 3", (draw.normal(33, 3),)),
        Case("float16: 8 rows of 1500", (draw.normal(8, 1500, dtype=torch.float16, shift=1.0),), metered=True),
        Case("float16: partial sums beyond what float16 can hold", (large.half(),)),
    ]
    if draw.on_gpu:
        cases.append(Case("200 rows of 100,003", (draw.normal(200, 100_003),)))
    return cases


def _row_sum_bytes(x) -> int:
    return x.numel() * x.element_size() + x.shape[0] * 4


def _only_columns(stretches):
    """A `when`: only a part of each row was added. `stretches(rows, columns)` are the slices that it may have been."""

    def when(case, seen, got):
        (x,) = case.args
        if not isinstance(got, torch.Tensor) or got.shape != x.shape[:1]:
            return False
        right = row_sum_oracle(x)

        def close(expected):
            return torch.allclose(got.double(), expected.double(), rtol=1e-4, atol=1e-3)

        return not close(right) and any(close(row_sum_oracle(x[:, part])) for part in stretches(*x.shape))

    return when


_rows_for_columns = _only_columns(lambda rows, columns: [slice(rows)] if rows < columns else [])
_first_tile_only = _only_columns(
    lambda rows, columns: [slice(block) for block in POWERS_OF_TWO if 2 * block <= columns]
)
_last_tile_only = _only_columns(
    lambda rows, columns: [slice((columns - 1) // block * block, None) for block in POWERS_OF_TWO if block < columns]
)
_tail_columns_dropped = _only_columns(
    lambda rows, columns: [slice(columns // block * block) for block in POWERS_OF_TWO if columns % block]
)


def _store_past_the_end(case, seen, got) -> bool:
    return any(" writes " in access for access in seen.out_of_bounds)


def _only_row_zero(case, seen, got) -> bool:
    (x,) = case.args
    return bool(seen.unwritten) and x.shape[0] > 1 and written(got, row_sum_oracle(x)) == 1


def _copied(case, seen, got) -> bool:
    """Whether a right result cost a copy of the matrix."""
    (x,) = case.args
    return seen.largest_allocation >= x.numel() > 64 and "clone" in seen.operations and same(got, row_sum_oracle(x))


def _read_with(row_stride, column_stride):
    """A `when`: the matrix was read with these strides, given as functions of x."""

    def when(case, seen, got):
        (x,) = case.args
        strides = (row_stride(x), column_stride(x))
        if strides == x.stride() or not isinstance(got, torch.Tensor) or got.shape != x.shape[:1]:
            return False
        reach = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride()))
        last = sum((size - 1) * stride for size, stride in zip(x.shape, strides))
        values = torch.full((max(reach, last + 1),), float("nan"))
        values[:reach] = x.as_strided((reach,), (1,)).float()
        expected = values.as_strided(x.shape, strides).sum(dim=1)
        known = ~expected.isnan()  # rows that meet neither a gap nor the end of the memory
        right = row_sum_oracle(x)
        return bool(known.any()) and same(got[known], expected[known]) and not same(got[known], right[known])

    return when


def _half_accumulator(case, seen, got) -> bool:
    """Every result is a float16 number (and not 0), or what float16 makes of too large a sum."""
    (x,) = case.args
    if not isinstance(got, torch.Tensor) or got.dtype != torch.float32 or seen.unwritten or seen.undefined_loads:
        return False
    return bool((got.isinf() | got.isnan() | ((got == got.half().float()) & (got != 0))).all())


EXERCISE = Exercise(
    id="1.4",
    title="Row sum, any shape and strides, one pass",
    entries=("row_sum",),
    cases=row_sum_cases,
    oracle=row_sum_oracle,
    plain=(row_sum_in_another_order,),
    needs=TRITON,
    requirements=(
        LaunchesTriton(),
        Forbids(("sum", "mean", "mm", "mv", "matmul", "addmm", "addmv", "cumsum", "einsum", "dot", "bmm")),
        Allocates(lambda x: max(64, x.numel() // 2)),
        Moves(_row_sum_bytes),
    ),
    hints=(
        "Let one program own one row. It walks along the row a block at a time and keeps what it has added so far.",
        "Element [r, c] lies `r * x.stride(0) + c * x.stride(1)` elements from the pointer. Hand both strides to the "
        "kernel; `x.contiguous()` would be a second pass over the whole matrix.",
        "Keep a tile of partial sums, `tl.zeros([BLOCK], dtype=tl.float32)`, add each block to it, and reduce it once "
        "after the loop with `tl.sum(partial, axis=0)`.",
        "What a load gives where the mask is off, Triton leaves undefined. In practice it is mostly 0; a sum should "
        "not depend on that: `tl.load(pointers, mask=inside, other=0.0)`.",
        "`for start in range(0, columns, BLOCK):` with `offsets = start + tl.arange(0, BLOCK)`, `inside = offsets < "
        "columns`, `partial += tl.load(x_pointer + row * row_stride + offsets * column_stride, mask=inside, "
        "other=0.0)`. Launch `(rows,)` programs and store one number each.",
    ),
    slips=(
        Slip(
            "mean_instead_of_sum",
            "That is the mean of each row: the sum was divided by the number of columns.",
            formula=lambda x: x.mean(dim=-1),
        ),
    ),
    mistakes=(
        Mistake("nothing_stored", NOTHING_STORED, when=nothing_stored(row_sum_oracle)),
        Mistake(
            "rows_for_columns",
            "Of each row only as many elements were added as there are rows. The length of a row is the number of "
            "columns, `x.shape[1]`; `x.shape[0]` is the number of rows.",
            when=_rows_for_columns,
        ),
        Mistake(
            "row_stride_ignored",
            "Rows were taken to lie `columns` elements apart. They lie `x.stride(0)` apart: a slice of a wider matrix "
            "has gaps, a transposed one has its rows side by side.",
            when=_read_with(lambda x: x.shape[1], lambda x: x.stride(1)),
        ),
        Mistake(
            "column_stride_ignored",
            "Neighbours in a row were taken to lie side by side. They lie `x.stride(1)` elements apart, which is not "
            "1 for a transposed matrix.",
            when=_read_with(lambda x: x.stride(0), lambda x: 1),
        ),
        Mistake(
            "strides_ignored",
            "The matrix was read as if it were contiguous. Use `x.stride(0)` for the rows and `x.stride(1)` for the "
            "columns.",
            when=_read_with(lambda x: x.shape[1], lambda x: 1),
        ),
        Mistake(
            "store_past_the_end",
            "A store reaches past the end of the result. A program owns one row and writes one number: reduce the "
            "block with `tl.sum(..., axis=0)` and store it at `result_pointer + row`. (A program that owns several "
            "rows needs a mask on its store: `rows_of_mine < rows`.)",
            when=_store_past_the_end,
        ),
        Mistake(
            "past_the_end",
            "A load reaches past the end of a row or of the matrix. The mask must hold for each block of the row, "
            "`offsets < columns`, and `columns` must be `x.shape[1]`.",
            when=past_the_end,
        ),
        Mistake(
            "only_first_tile",
            "Only the first block of each row was added. A row longer than BLOCK needs a loop over its blocks.",
            when=_first_tile_only,
        ),
        Mistake(
            "only_last_tile",
            "Only the last block of each row is in the result: the sum is overwritten at every step. Add to it: "
            "`partial += ...`.",
            when=_last_tile_only,
            every=True,
        ),
        Mistake(
            "half_accumulator",
            "The sum was kept in float16, which holds 11 significant bits and nothing above 65504. Accumulate in "
            "float32: `tl.zeros([BLOCK], dtype=tl.float32)`, or `.to(tl.float32)` on each block.",
            when=_half_accumulator,
            every=True,
        ),
        Mistake(
            "tail_columns_dropped",
            "The last, partly filled block of each row is missing: the loop ends too early. Let it run to `columns` "
            "and mask the last block instead.",
            when=_tail_columns_dropped,
            every=True,
        ),
        Mistake(
            "only_row_zero",
            "Only row 0 was written. Either one program was launched in all (each row needs its own: the grid is "
            "`(rows,)`), or every program takes itself for number 0: a grid of one axis is numbered by "
            "`tl.program_id(0)`.",
            when=_only_row_zero,
            every=True,
        ),
        Mistake(
            "contiguous_copy",
            "`contiguous()` copies a matrix whose elements are not in a row: a second pass over all its bytes, before "
            "your kernel begins. Leave the matrix where it is and give the kernel both strides.",
            when=_copied,
        ),
        Mistake(
            "last_row_missing",
            "The last row was never written: one program is missing from the grid.",
            when=lambda case, seen, got: (
                case.args[0].shape[0] > 1 and written(got, row_sum_oracle(case.args[0])) == case.args[0].shape[0] - 1
            ),
            every=True,
        ),
        Mistake(
            "columns_summed",
            "The sum runs down the columns. A row's sum adds along the last dimension and there are as many results "
            "as rows.",
            when=lambda case, seen, got: (
                isinstance(got, torch.Tensor)
                and len(set(case.args[0].shape)) > 1
                and same(got, case.args[0].float().sum(dim=0))
            ),
        ),
    ),
)
