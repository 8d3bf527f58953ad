"""Exercise 1.4: row sum, any shape and strides, one pass."""

from __future__ import annotations

import numpy as np
import torch

from course_lib.checker import TRITON, Allocates, Case, Exercise, Forbids, LaunchesTriton, Mistake, Moves
from course_lib.checker.specification.contract import Contract, Level
from course_lib.checker.specification.draw import Draw
from course_lib.checker.specification.layouts import CONTIGUOUS, every_other, expanded, gaps, last_exchanged
from exercises.ch01_memory_hierarchy_and_roofline.blocks import NOTHING_STORED, nothing_stored, past_the_end
from exercises.topics.row_sum_model import HALF, MODELS
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
        Mistake(
            "half_accumulator",
            HALF,
            when=_half_accumulator,
            every=True,
        ),
        Mistake(
            "contiguous_copy",
            "The matrix was copied, as `contiguous()` does. That is a second pass over all its bytes before your "
            "kernel begins. Leave the matrix where it is and give the kernel both strides.",
            when=_copied,
            cost=True,
        ),
    ),
)
