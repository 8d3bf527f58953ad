"""Exercise 13.2: add a residual and normalise by the root mean square, in one kernel with both results."""

from __future__ import annotations

import math

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
    ReadByKernels,
    edits,
    model_of,
)
from course_lib.checker.specification.contract import Contract, Level
from course_lib.checker.specification.layouts import unit_last
from exercises.ch13_fusion_and_compilers import rms_norms as norms
from exercises.ch13_fusion_and_compilers.rms_norms import large, ordinary, tiny
from exercises.topics.evidence import ROUNDED_TO_16_BITS, stored_in_16_bits
from exercises.topics.pointers import load
from exercises.topics.pytorch_operations import ARITHMETIC


def add_rms_norm_oracle(x, residual, weight, epsilon):
    summed = x + residual
    wide = summed.to(torch.promote_types(x.dtype, torch.float32))
    inverse = torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
    return (wide * inverse * weight.to(wide.dtype)).to(x.dtype), summed


def norm_of_the_exact_sum(x, residual, weight, epsilon):
    """The norm taken before the sum is rounded; and two roundings of the product, as in Llama's own code."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32)) + residual
    inverse = torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
    return (wide * inverse).to(x.dtype) * weight, wide.to(x.dtype)


def zeros(draw, *shape):
    """Zeros, but for the last row."""
    rows = torch.zeros(shape)
    rows[-1] = draw.normal(shape[-1])
    return rows


def drawn(draw, *, rows, hidden, dtype, values, epsilon, x_layout, residual_layout):
    x, residual = (values(draw, rows, hidden).to(dtype) for _ in "12")
    return x_layout(draw, x), residual_layout(draw, residual), draw.normal(hidden, shift=1.0).to(dtype), epsilon


def _plainly(draw, tensor):
    return tensor


def norm_cases(draw):
    def case(name, rows, hidden, values=ordinary, dtype=torch.float32, metered=False, epsilon=1e-6):
        sizes = {"rows": rows, "hidden": hidden, "dtype": dtype, "values": values, "epsilon": epsilon}
        args = drawn(draw, **sizes, x_layout=_plainly, residual_layout=_plainly)
        return Case(name, args, metered=metered)

    return [
        case("4 rows of 1,024", 4, 1024, metered=True),
        case("3 rows of 1,000: no power of two", 3, 1000, metered=True),
        case("2 rows of 4,099: beyond a block of 4,096", 2, 4099, metered=True),
        case("a row of 16,384", 1, 16_384),
        case("numbers near 0.003 and an epsilon of 1e-5", 3, 96, tiny, epsilon=1e-5),
        case("rows of zeros", 3, 64, zeros),
        case("float16, 5 rows of 777", 5, 777, dtype=torch.float16, metered=True),
        case("float16, numbers near 300: squares overflow", 3, 500, large, torch.float16),
        case("numbers near 0.003 and an epsilon of 1e-8", 3, 96, tiny, epsilon=1e-8),
        case("float16, rows of zeros and an epsilon of 1e-8", 3, 64, zeros, torch.float16, epsilon=1e-8),
    ]


CONTRACT = Contract(
    drawn,
    choices={
        "rows": (1, 2, 9),
        "hidden": (1, 2, 31, 128, 257, 1025, 5001),
        "dtype": (torch.float32, torch.float16),
        "values": (
            Level(ordinary, ""),
            Level(large, "numbers near 300"),
            Level(tiny, "numbers near 0.003"),
            Level(zeros, "rows of zeros"),
        ),
        "epsilon": tuple(Level(value, f"epsilon {value:g}") for value in (1e-6, 1e-5, 0.25)),
        "x_layout": unit_last("x"),
        "residual_layout": unit_last("residual"),
    },
    says={
        "rows": "at least one row",
        "hidden": "any number of columns from 1 to 16,384",
        "dtype": "float32 or float16",
        "epsilon": "above 0",
        "x_layout": "x and residual each have a stride of their own",
    },
    most=12,
)


def add_and_normalise(x, residual, weight, epsilon):
    rows, hidden = x.shape
    block = 2 ** math.ceil(math.log2(hidden))
    lanes = torch.arange(block)
    inside, row = lanes < hidden, torch.arange(rows)[:, None]
    first = load(x, row * x.stride(0) + lanes, inside, 0.0)
    second = load(residual, row * residual.stride(0) + lanes, inside, 0.0)
    summed = (first.float() + second.float()).to(x.dtype)
    wide = summed.float()
    squares = (wide * wide).sum(1, keepdim=True)
    inverse = 1 / torch.sqrt(squares / hidden + epsilon)
    scale = load(weight, lanes, inside, 0.0).float()
    normalised = (wide * inverse * scale).to(x.dtype)
    written = torch.full((2, rows, hidden), math.nan, dtype=x.dtype)
    written[0, :, :block] = normalised[:, :hidden]
    written[1, :, :block] = summed[:, :hidden]
    return written[0], written[1]


BLOCK = "block = 2 ** math.ceil(math.log2(hidden))"
WIDE = "wide = summed.float()"
X_ROW, RESIDUAL_ROW = "row * x.stride(0)", "row * residual.stride(0)"
INVERSE = "1 / torch.sqrt(squares / hidden + epsilon)"
NORMALISED = "(wide * inverse * scale).to(x.dtype)"
ROWS_TOUCH = (
    "Rows are read as if they followed each other without a gap. Row r begins at r times its tensor's row stride."
)
CHANGES = (
    *edits("", exact_sum=(WIDE, "wide = first.float() + second.float()")),
    *edits("Only the first columns of a row were computed, as many as a tile of fixed size has. Make the tile as long "
        "as the row: triton.next_power_of_2(hidden), with a mask.",
        tile_too_short=(BLOCK, "block = min(1024, 2 ** math.ceil(math.log2(hidden)))"),
        tile_too_short__2048=(BLOCK, "block = min(2048, 2 ** math.ceil(math.log2(hidden)))"),
        tile_too_short__4096=(BLOCK, "block = min(4096, 2 ** math.ceil(math.log2(hidden)))")),
    *edits("The mean was taken over the whole tile, with its empty lanes. Divide by the number of columns.",
        mean_over_the_tile=("squares / hidden", "squares / block")),
    *edits(norms.SUM_FOR_MEAN,
        sum_for_mean=("squares / hidden", "squares")),
    *edits(norms.NORM_OF_X,
        norm_of_x=(WIDE, "wide = first.float()")),
    *edits("The residual was normalised without x. Normalise the sum.",
        norm_of_the_residual=(WIDE, "wide = second.float()")),
    *edits("The residual was subtracted. Add it.", subtracted=("first.float() + second", "first.float() - second")),
    *edits(norms.SUM_NOT_STORED,
        sum_not_stored=("written[1, :, :block] = summed", "written[1, :, :block] = first")),
    *edits("The second result is normalised too. It is the plain sum.",
        both_normalised=("written[1, :, :block] = summed", "written[1, :, :block] = normalised")),
    *edits("The two results are exchanged: the normalised rows come first, the sum second.",
        results_exchanged=("return written[0], written[1]", "return written[1], written[0]")),
    *edits(norms.EPSILON_MISSING,
        epsilon_missing=("squares / hidden + epsilon", "squares / hidden")),
    *edits("epsilon was rounded to float16, where 1e-8 is 0 and 1e-6 has one digit. Add it in float32.",
        epsilon_rounded=("squares / hidden + epsilon", "squares / hidden + torch.tensor(epsilon).to(x.dtype).float()")),
    *edits(norms.EPSILON_OUTSIDE,
        epsilon_outside=(INVERSE, "1 / (torch.sqrt(squares / hidden) + epsilon)")),
    *edits(norms.EPSILON_DIVIDED,
        epsilon_divided=("squares / hidden + epsilon", "(squares + epsilon) / hidden")),
    *edits(norms.ROOT_MISSING,
        root_missing=(INVERSE, "1 / (squares / hidden + epsilon)")),
    *edits(norms.MULTIPLIED,
        multiplied=(INVERSE, "torch.sqrt(squares / hidden + epsilon)")),
    *edits(norms.WEIGHT_MISSING, weight_missing=(NORMALISED, "(wide * inverse).to(x.dtype)")),
    *edits(norms.ONE_ADDED,
        one_added=("inverse * scale", "inverse * (1 + scale)")),
    *edits("All columns have the weight of the first. Load the weight with the columns' offsets.",
        first_weight=("load(weight, lanes, inside, 0.0)", "load(weight, 0 * lanes, inside, 0.0)")),
    *edits(norms.MEAN_SUBTRACTED,
        mean_subtracted=(WIDE, "wide = summed.float() - summed.float().sum(1, keepdim=True) / hidden"),
        mean_subtracted__before=(WIDE, "wide = (summed.float() - summed.float().sum(1, keepdim=True) / hidden) * "
        "inside")),
    *edits("The rows are divided by the mean of their sizes. It is the root of the mean of the squares.",
        mean_of_sizes=(INVERSE, "1 / (wide.abs().sum(1, keepdim=True) / hidden + epsilon)")),
    *edits("The squares were taken in float16, which ends at 65,504: the square of 256 overflows. Cast to float32 "
        "first.", squared_in_16_bits=("(wide * wide)", "(summed * summed).float()")),
    *edits(ROWS_TOUCH, row_stride_ignored=(X_ROW, "row * hidden", RESIDUAL_ROW, "row * hidden"),
        row_stride_ignored__of_x=(X_ROW, "row * hidden"),
        row_stride_ignored__of_the_residual=(RESIDUAL_ROW, "row * hidden")),
    *edits(norms.STRIDES_OF_X,
        strides_of_x=(RESIDUAL_ROW, X_ROW)),
    *edits("x was read with the residual's row stride. It has one of its own.", strides_of_the_residual=(X_ROW,
        RESIDUAL_ROW)),
)  # fmt: skip


def four_tensors(x, residual, weight, epsilon) -> int:
    """x and the residual in, both results out, and the weight for each row, which it gets from the L2 cache."""
    return 4 * x.numel() * x.element_size() + x.shape[0] * weight.numel() * weight.element_size()


def _loaded_again(case, seen, got) -> bool:
    return any(counts["loaded"] > 1.5 * counts["distinct_loaded"] for counts in seen.traffic.values()) or any(
        counts["loaded"] and counts["stored"] for counts in seen.traffic.values()
    )


EXERCISE = Exercise(
    id="13.2",
    title="Add and norm in one kernel",
    entries=("add_rms_norm",),
    cases=norm_cases,
    oracle=add_rms_norm_oracle,
    plain=(norm_of_the_exact_sum,),
    contracts=(CONTRACT,),
    models=(model_of(add_and_normalise, CHANGES),),
    needs=TRITON,
    requirements=(
        LaunchesTriton(at_most=1),
        Forbids((*ARITHMETIC, "rms_norm", "_fused_rms_norm", "mean", "sum", "rsqrt", "sqrt", "square", "pow")),
        Allocates(lambda x, *rest: 2 * x.numel()),  # both results may be parts of one tensor
        Moves(four_tensors),
        ReadByKernels((0, 1, 2)),
    ),
    hints=(
        "One program owns one row, and holds all of it in one tile: BLOCK = triton.next_power_of_2(hidden), as a "
        "tl.constexpr. Then nothing has to be read a second time.",
        "Load x and residual of the row with mask=columns < hidden and other=0.0, and add them in float32. The empty "
        "lanes are 0, so they add nothing to the sum of squares.",
        "Round the sum to the results' dtype and store it. Square it in float32, divide tl.sum(...) by hidden (not by "
        "BLOCK), add epsilon, and take tl.rsqrt.",
        "x and residual have row strides of their own: pass x.stride(0) and residual.stride(0). The results are "
        "contiguous, so their rows are `hidden` apart.",
    ),
    mistakes=(
        Mistake("rounded_to_16_bits", ROUNDED_TO_16_BITS, when=stored_in_16_bits(add_rms_norm_oracle), every=True),
        Mistake(
            "row_read_again",
            "The numbers are right, but a row was loaded more than once: first to add up its squares, then to scale "
            "it. That is a fifth tensor's worth of bytes. Keep the row in registers, as one tile.",
            when=lambda case, seen, got: case.metered and len(seen.launches) == 1 and _loaded_again(case, seen, got),
            cost=True,
        ),
        Mistake(
            "two_kernels",
            "The addition and the norm are two launches, so the sum goes to memory and comes back. Do both in one.",
            when=lambda case, seen, got: len(seen.launches) > 1,
            cost=True,
        ),
    ),
)
