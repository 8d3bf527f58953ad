"""Exercise 13.2: add a residual and normalise by the root mean square, in one kernel with both results."""

from __future__ import annotations

import math

import torch

from course_lib.checker import TRITON, Case, Exercise, Mistake, edits, model_of
from course_lib.checker.specification.contract import Contract, Level
from course_lib.checker.specification.layouts import beyond_32_bits, contiguous, unit_last
from exercises.ch13_fusion_and_compilers import rms_norms as norms
from exercises.ch13_fusion_and_compilers.rms_norms import large, tiny
from exercises.ch13_fusion_and_compilers.rounded_steps import rounded_on_the_way
from exercises.topics.evidence import FAR_END, FIXED_SIZE, ROUNDED_TO_16_BITS, first_access, stored_in_16_bits
from exercises.topics.kernel_requirements import in_one_kernel
from exercises.topics.pointers import load
from exercises.topics.vector_inputs import ordinary


def zeros(draw, *shape):
    """Zeros, but for the last row."""
    rows = torch.zeros(shape)
    rows[-1] = draw.normal(shape[-1])
    return rows


def drawn(draw, *, rows, hidden, dtype=torch.float32, values=ordinary, epsilon=1e-6, x_layout=contiguous,
          residual_layout=contiguous):  # fmt: skip
    x, residual = (values(draw, rows, hidden).to(dtype) for _ in "12")
    return x_layout(draw, x), residual_layout(draw, residual), draw.normal(hidden, shift=1.0).to(dtype), epsilon


def norm_cases(draw):
    def case(name, rows, hidden, metered=False, **more):
        return Case(name, drawn(draw, rows=rows, hidden=hidden, **more), metered=metered)

    x, residual, *rest = drawn(draw, rows=3, hidden=20)
    return [
        case("4 rows of 1,024", 4, 1024, metered=True),
        case("3 rows of 1,000: no power of two", 3, 1000, metered=True),
        case("2 rows of 4,099: beyond a block of 4,096", 2, 4099, metered=True),
        case("a row of 16,384", 1, 16_384),
        case("numbers near 0.003 and an epsilon of 1e-5", 3, 96, values=tiny, epsilon=1e-5),
        case("float16, 5 rows of 777", 5, 777, dtype=torch.float16, metered=True),
        case("float16, numbers near 300: squares overflow", 3, 500, values=large, dtype=torch.float16),
        case("numbers near 0.003 and an epsilon of 1e-8", 3, 96, values=tiny, epsilon=1e-8),
        case("float16, rows of zeros and an epsilon of 1e-8", 3, 64, values=zeros, dtype=torch.float16, epsilon=1e-8),
        # 1 / √epsilon is 100,000: too large for float16.
        case("float16, rows of zeros and an epsilon of 1e-10", 3, 64, values=zeros, dtype=torch.float16, epsilon=1e-10),
        case(f"1,100 rows, {FAR_END}", 1100, 3),
        *beyond_32_bits(draw, "rows", [x, residual], *rest),
    ]


CONTRACT = Contract(
    drawn,
    choices={
        "rows": (1, 2, 9),
        "hidden": (1, 2, 31, 128, 257, 1025, 5001),
        "dtype": (torch.float32, torch.float16),
        "values": (*norms.VALUES, Level(zeros, "rows of zeros")),
        "epsilon": norms.EPSILONS,
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
    rows, columns = x.shape
    block = 2 ** math.ceil(math.log2(columns))
    column, row = torch.arange(block), torch.arange(rows)[:, None]
    inside = column < columns
    first = load(x, row * x.stride(0) + column, inside, 0.0)
    second = load(residual, row * residual.stride(0) + column, inside, 0.0)
    exact = first.float() + second.float()
    summed = exact.to(x.dtype)
    wide = summed.float()
    squared = wide * wide
    squares = squared.sum(1, keepdim=True)
    inverse = 1 / torch.sqrt(squares / columns + epsilon)
    scale = load(weight, column, inside, 0.0).float()
    normalised = (wide * inverse * scale).to(x.dtype)
    stored = summed
    missed = torch.full((rows, max(columns - block, 0)), math.nan, dtype=x.dtype)
    return tuple(torch.cat((result[:, :columns], missed), 1) for result in (normalised, stored))


STEPS = {
    "x": ("x was", "first.float()"),
    "residual": ("The residual was", "second.float()"),
    "sum": ("The sum was", "first.float() + second.float()"),
    "sum_of_the_norm": ("The sum that is normalised was", "summed.float()"),
    "squares": ("The squares were", "wide * wide"),
    "mean_square": ("The mean square was", norms.MEAN),
    "radicand": ("What stands under the root was", f"{norms.MEAN} + epsilon"),
    "inverse": ("The inverse root was", norms.INVERSE),
    "normalised": ("The normalised numbers were", "wide * inverse"),
    "weight": ("The weight was", "load(weight, column, inside, 0.0).float()"),
}
BLOCK = "2 ** math.ceil(math.log2(columns))"
CHANGES = (
    *edits("Only the first columns of a row were computed, as many as a tile of fixed size has. Make the tile as long "
        "as the row: triton.next_power_of_2(hidden), with a mask.",
        **{f"tile_too_short__{tile}": (BLOCK, f"min({tile}, {BLOCK})") for tile in (1024, 2048, 4096, 8192, 512, 256)}),
    *edits("The mean was taken over the whole tile, with its empty lanes. Divide by the number of columns.",
        mean_over_the_tile=("squares / columns", "squares / block")),
    *edits(norms.MEAN_SUBTRACTED,
        mean_subtracted__before=(norms.WIDE, "wide = (exact - exact.sum(1, keepdim=True) / columns) * inside")),
    *norms.CHANGES,
    *rounded_on_the_way("half()", **STEPS),
    *rounded_on_the_way("to(x.dtype)", radicand=STEPS["radicand"], inverse=STEPS["inverse"]),
    *edits("The root was taken in 16 bits: what stands under it was rounded, and the inverse root too. Compute in "
        "float32, and round only what you store, to the results' own dtype.", alone=True,
        rounded_on_the_way__root=(norms.INVERSE,
        f"(1 / torch.sqrt(({norms.MEAN} + epsilon).half().float())).half().float()")),
)  # fmt: skip


def four_tensors(x, residual, weight, epsilon) -> int:
    """x and the residual in, both results out, and the weight for each row, which it gets from the L2 cache."""
    return 4 * x.numel() * x.element_size() + x.shape[0] * weight.numel() * weight.element_size()


def _loaded_again(case, seen, got) -> bool:
    rows = [counts for counts in seen.traffic.values() if counts["distinct_loaded"] > case.args[2].nbytes]
    return any(counts["loaded"] > 1.5 * counts["distinct_loaded"] or counts["stored"] for counts in rows)


EXERCISE = Exercise(
    id="13.2",
    title="Add and norm in one kernel",
    entries=("add_rms_norm",),
    cases=norm_cases,
    oracle=norms.add_rms_norm,
    plain=(norms.norm_of_the_exact_sum,),
    contracts=(CONTRACT,),
    models=(model_of(add_and_normalise, CHANGES),),
    needs=TRITON,
    requirements=in_one_kernel(
        *("rms_norm", "_fused_rms_norm", "rsqrt", "sqrt", "square"),
        elements=lambda x, *rest: 2 * x.numel(),  # both results may be parts of one tensor
        least_bytes=four_tensors,
        reads=(0, 1, 2),
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
        "A tile of 16,384 is too much for the registers of four warps, the default: on a GPU it spills. Launch it with "
        "more, for example num_warps=4 if hidden <= 4096 else 16.",
    ),
    mistakes=(
        Mistake(
            "modified_input",
            "An argument was written over, or its shape changed. x, the residual and the weight are there to be read: "
            "rows of x may share memory, or have none behind them. Store the results into tensors that you make.",
            when=lambda case, seen, got: (
                bool(seen.modified_inputs)
                or (seen.error is not None and "written-to tensor refers to a single" in seen.error.text)
            ),
            first=True,
        ),
        Mistake(
            "store_unmasked",
            "A store writes behind the row's last column, into the next row or outside the tensor. Every store needs "
            "the mask of the columns that exist.",
            when=first_access("writes", whole=True),
        ),
        Mistake(
            "results_by_the_inputs_stride",
            "Rows of a result were stored with a row stride of x or the residual. The results are contiguous: their "
            "rows are `hidden` apart.",
            when=first_access("writes"),
        ),
        FIXED_SIZE,
        Mistake("rounded_to_16_bits", ROUNDED_TO_16_BITS, when=stored_in_16_bits(norms.add_rms_norm), every=True),
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
