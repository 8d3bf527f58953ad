"""What 13.2 and 13.8 share: the right norms, the numbers that they are tried with, and what goes wrong in them."""

from __future__ import annotations

import torch

from course_lib.checker import edits
from course_lib.checker.specification.contract import Level
from exercises.topics.vector_inputs import ordinary, spread


def add_rms_norm(x, residual, weight, epsilon, *rest):
    """(normalised, summed)"""
    summed = x + residual
    wide = summed.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * _inverse(wide, epsilon) * weight.to(wide.dtype)).to(x.dtype), summed


def norm_of_the_exact_sum(x, residual, weight, epsilon, *rest):
    """The norm taken before the sum is rounded; and two roundings of the product, as in Llama's own code."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32)) + residual
    return (wide * _inverse(wide, epsilon)).to(x.dtype) * weight, wide.to(x.dtype)


def _inverse(wide, epsilon):
    return torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)


large = spread(60.0, 300.0)  # their squares overflow float16
tiny = spread(2e-3)  # the mean of their squares is about 1e-5, so that it matters where epsilon stands
VALUES = (Level(ordinary, ""), Level(large, "numbers near 300"), Level(tiny, "numbers near 0.003"))
EPSILONS = (1e-6, 1e-5, 0.25)

# Pieces of both meanings, which these rows change.
MEAN = "squares / columns"
INVERSE, NORMALISED = f"1 / torch.sqrt({MEAN} + epsilon)", "wide * inverse * scale"
EXACT, WIDE, SQUARED, STORED = "first.float() + second", "wide = summed.float()", "= wide * wide", "stored = summed"
X_ROW, RESIDUAL_ROW = "row * x.stride(0)", "row * residual.stride(0)"
MEAN_OF_A_ROW = "wide.sum(1, keepdim=True) / columns"
MEAN_SUBTRACTED = "The mean was subtracted, as LayerNorm does. RMSNorm subtracts nothing."
CHANGES = (
    *edits("", exact_sum=(WIDE, "wide = exact")),
    *edits("The squares were summed and not averaged. Divide by the number of columns.",
        sum_for_mean=(MEAN, "squares")),
    *edits("x was normalised without the residual. Normalise the sum.",
        norm_of_x=(WIDE, "wide = first.float()"),
        norm_of_x__squares_of_the_sum=(NORMALISED, "first.float() * inverse * scale")),
    *edits("The residual was normalised without x. Normalise the sum.",
        norm_of_the_residual=(WIDE, "wide = second.float()")),
    *edits("The residual was subtracted. Add it.", subtracted=(EXACT, "first.float() - second")),
    *edits("x was normalised, and the residual was added to that. Add it first, and normalise the sum.",
        added_after_the_norm=(WIDE, "wide = first.float()", NORMALISED, f"{NORMALISED} + second.float()")),
    *edits("The second result is x, or the residual, as it came. It is the sum, which the next addition needs.",
        sum_not_stored=(STORED, "stored = first"), sum_not_stored__the_residual=(STORED, "stored = second"),
        sum_not_stored__nor_normalised=(STORED, "stored = first", NORMALISED, "first.float() * inverse * scale")),
    *edits("The second result is normalised too. It is the plain sum.",
        both_normalised=(STORED, "stored = normalised")),
    *edits("The two results are exchanged: the normalised rows come first, the sum second.",
        results_exchanged=("in (normalised, stored)", "in (stored, normalised)")),
    *edits("epsilon is missing. Add it to the mean square, under the root.",
        epsilon_missing=(f"{MEAN} + epsilon", MEAN)),
    *edits("epsilon was rounded to float16, where 1e-8 is 0 and 1e-6 has one digit. Add it in float32.",
        epsilon_rounded=(f"{MEAN} + epsilon", f"{MEAN} + torch.tensor(epsilon).to(x.dtype).float()")),
    *edits("epsilon was added to the root. It belongs under the root, to the mean square.",
        epsilon_outside=(INVERSE, f"1 / (torch.sqrt({MEAN}) + epsilon)")),
    *edits("epsilon was added to the sum of squares, before it was divided by the number of columns.",
        epsilon_divided=(f"{MEAN} + epsilon", "(squares + epsilon) / columns")),
    *edits("The root is missing: the rows are divided by the mean square.",
        root_missing=(INVERSE, f"1 / ({MEAN} + epsilon)")),
    *edits("The rows are multiplied by the root of the mean square. Divide by it.",
        multiplied=(INVERSE, f"torch.sqrt({MEAN} + epsilon)")),
    *edits("The weight is missing.", weight_missing=(NORMALISED, "wide * inverse")),
    *edits("The weight was taken as 1 + weight. That is another model's norm (Gemma's); here it multiplies as it is.",
        one_added=("inverse * scale", "inverse * (1 + scale)")),
    *edits("All columns got the weight of the first. It is read column by column, like the row.",
        first_weight=("(weight, column", "(weight, 0 * column")),
    *edits(MEAN_SUBTRACTED,
        mean_subtracted=(WIDE, f"{WIDE} - summed.float().sum(1, keepdim=True) / columns"),
        mean_subtracted__variance=(MEAN, f"{MEAN} - ({MEAN_OF_A_ROW}) ** 2",
        NORMALISED, f"(wide - {MEAN_OF_A_ROW}) * inverse * scale")),
    *edits("The rows are divided by the mean of their sizes. It is the root of the mean of the squares.",
        mean_of_sizes=(INVERSE, "1 / (wide.abs().sum(1, keepdim=True) / columns + epsilon)")),
    *edits("The squares were taken, added or averaged in float16, which ends at 65,504: the square of 256 overflows. "
        "Cast to float32 first.", squared_in_16_bits=(SQUARED, "= (summed * summed).float()"),
        squared_in_16_bits__sum=(MEAN, "squares.to(x.dtype).float() / columns"),
        squared_in_16_bits__mean=(MEAN, f"({MEAN}).to(x.dtype).float()")),
    *edits("Rows are read as if they followed each other without a gap. Row r begins at r times its tensor's row "
        "stride.", row_stride_ignored=(X_ROW, "row * columns", RESIDUAL_ROW, "row * columns"),
        row_stride_ignored__of_x=(X_ROW, "row * columns"),
        row_stride_ignored__of_the_residual=(RESIDUAL_ROW, "row * columns")),
    *edits("The residual was read with x's row stride. It has one of its own.", strides_of_x=(RESIDUAL_ROW, X_ROW)),
    *edits("x was read with the residual's row stride. It has one of its own.",
        strides_of_the_residual=(X_ROW, RESIDUAL_ROW)),
)  # fmt: skip
