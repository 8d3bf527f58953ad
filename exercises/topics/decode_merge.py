"""The merge of splits as a kernel computes it, and the slips in it.

A program takes one row, a query head of a sequence: it weighs each split's output by exp(its log-sum-exp - the
largest), adds, and divides by the sum of the weights. All rows are computed at once, in float32.
"""

from __future__ import annotations

import math

import torch

from course_lib.checker.specification.edits import edits, model_of
from exercises.topics.decode_slips import AVERAGED, EMPTY_MERGE, LARGEST_MISSING
from exercises.topics.running import FLOORS
from exercises.topics.softmax_slips import BOUNDED_BELOW

INF, LN_2 = math.inf, math.log(2)


def merge(outputs, lses):
    """outputs [splits, batch, heads, head_dim] and log-sum-exps [splits, batch, heads] -> those of all splits."""
    splits = len(lses)
    outputs, lses = outputs[:splits], lses[:splits]
    largest = lses.amax(0)
    reference = torch.where(largest == -INF, 0.0, largest)
    weights = torch.exp(lses - reference)
    total = weights.sum(0)
    divisor = torch.where(total == 0, 1.0, total)
    output = (weights[..., None] * outputs).sum(0) / divisor[..., None]
    return output, largest + torch.log(divisor)


def taken_for_neighbours(outputs, lses):
    """What is read where the parts of a row are taken to lie one behind the other."""
    rows = outputs.reshape(-1, len(lses), outputs.shape[-1])
    return rows.transpose(0, 1).reshape(outputs.shape), lses.reshape(-1, len(lses)).T.reshape(lses.shape)


def a_sequence_apart(outputs, lses):
    """What is read where a split is taken to lie one sequence behind the split before."""
    at = torch.arange(len(lses))[:, None] * lses.shape[-1] + torch.arange(lses[0].numel())
    return outputs.reshape(-1, outputs.shape[-1])[at].view(outputs.shape), lses.reshape(-1)[at].view(lses.shape)


def first_of(outputs, lses, kept):
    """So many splits; of none, what lanes hold that a mask leaves out: zeros and minus infinity."""
    if kept > 0:
        return outputs[:kept], lses[:kept]
    return torch.zeros_like(outputs[:1]), torch.full_like(lses[:1], -INF)


def with_missing(outputs, lses, rows):
    """A tile of so many rows, those of no split with zeros."""
    missing = max(rows - len(lses), 0)
    return (
        torch.cat([outputs, outputs.new_zeros(missing, *outputs.shape[1:])]),
        torch.cat([lses, lses.new_zeros(missing, *lses.shape[1:])]),
    )


HANDED_OUT = "handed out as the whole's. They must be merged: largest + log Σ exp(lse - largest)."
GUARD, WEIGHTS = "torch.where(largest == -INF, 0.0, largest)", "torch.exp(lses - reference)"
DIVISOR = "torch.where(total == 0, 1.0, total)"
WEIGHED, DIVISION = "(weights[..., None] * outputs).sum(0)", " / divisor[..., None]"
OUTPUT, LSE = WEIGHED + DIVISION, "largest + torch.log(divisor)"
READ, PARTS, THEN = "splits = len(lses)", "outputs[:splits], lses[:splits]", "largest = lses.amax(0)"
EMPTY_AS_0 = "lses = lses.masked_fill(lses == -INF, 0.0)"
TILE = "1 << (splits - 1).bit_length()"
MISSING_AS_0 = f"outputs, lses = with_missing(outputs, lses, {TILE})"
FROM_0, FROM_THE_FIRST = "largest.clamp(min=0.0)", "lses[0].masked_fill(lses[0] == -INF, 0.0)"
BY_LOGARITHM = "torch.where(weights > 0, lses, 0.0)"

MERGE = (
    *edits(
        AVERAGED,
        averaged_without_weights=(OUTPUT, "outputs.sum(0) / splits"),
        averaged_without_weights__present=(
            OUTPUT,
            "outputs.sum(0) / (lses > -INF).sum(0).clamp(min=1)[..., None]",
        ),
        averaged_without_weights__in_the_sum=(
            *(WEIGHTS, "torch.ones_like(lses)", LSE, "reference + torch.log(divisor)"),
        ),
        averaged_without_weights__in_the_sum_guarded=(WEIGHTS, "torch.ones_like(lses)"),
        averaged_without_weights__present_in_the_sum=(WEIGHTS, "(lses > -INF).float()"),
    ),
    *edits(
        "The splits' outputs were added. Each is an average of its own: weigh it by exp(its log-sum-exp - the "
        "whole's).",
        added_without_weights=(OUTPUT, "outputs.sum(0)"),
    ),
    *edits(
        "The weighted sum of the splits is not divided by the sum of their weights. Relative to the largest "
        "log-sum-exp these do not add up to 1.",
        not_divided__merge=(DIVISION, ""),
    ),
    *edits(
        "The weighted sum of the splits is divided by the number of splits. Divide it by the sum of their weights.",
        divided_by_the_splits=(DIVISION, " / splits"),
    ),
    *edits(
        "The log-sum-exps are measured from the first split's. Where another lies far above it the exponential "
        "overflows, and where all lie far below it every weight is 0: measure from the largest.",
        measured_from_the_first=(
            *(GUARD, FROM_THE_FIRST, LSE, "torch.where(total == 0, -INF, reference + torch.log(divisor))"),
        ),
        measured_from_the_first__lse_from_the_largest=(GUARD, FROM_THE_FIRST),
    ),
    *edits(
        "The weights are powers of 2 of natural log-sum-exps. Take tl.exp, or multiply the log-sum-exps by log2(e) "
        "first.",
        weighed_in_base_2=("torch.exp(lses", "torch.exp2(lses"),
        weighed_in_base_2__and_merged=("torch.exp(lses", "torch.exp2(lses", "torch.log(divisor", "torch.log2(divisor"),
    ),
    *edits(
        "The log-sum-exps were multiplied by log2(e), and tl.exp was taken of them. That factor belongs to tl.exp2.",
        base_changed_twice=(WEIGHTS, "torch.exp((lses - reference) / LN_2)"),
    ),
    *edits(
        "The exponential is taken of the log-sum-exps as they are: above 88 it overflows float32, far below 0 all "
        "weights vanish. Subtract the largest first.",
        no_maximum=(GUARD, "torch.zeros_like(largest)", LSE, "torch.log(total)"),
        no_maximum__unguarded=(GUARD, "torch.zeros_like(largest)", LSE, "torch.log(total)", DIVISOR, "total"),
        no_maximum__guarded_twice=(GUARD, "torch.zeros_like(largest)", LSE, "torch.log(divisor)"),
    ),
    *edits(
        "The log-sum-exps are measured from 0 or the largest, whichever is more. Where all lie far below 0 every "
        "weight is 0: begin with the largest itself, or with minus infinity.",
        maximum_starts_at_zero__merge=(GUARD, FROM_0, LSE, "reference + torch.log(total)"),
        maximum_starts_at_zero__merge__guarded=(GUARD, FROM_0, LSE, "reference + torch.log(divisor)"),
        maximum_starts_at_zero__merge__lse_from_the_largest=(GUARD, FROM_0),
    ),
    *edits(
        "The log-sum-exps themselves served as weights. They are logarithms: a split weighs exp(its log-sum-exp - the "
        "largest).",
        weighed_by_the_logarithm=(
            OUTPUT,
            f"({BY_LOGARITHM}[..., None] * outputs).sum(0) / {BY_LOGARITHM}.sum(0)[..., None]",
        ),
    ),
    *edits(
        "Splits that don't exist were merged: BLOCK_S is a power of two, and rows from `splits` on were loaded "
        'with a log-sum-exp of 0, a weight of exp(0). Load them with other=float("-inf").',
        missing_splits_counted=(THEN, f"{MISSING_AS_0}\n{THEN}"),
        missing_splits_counted__in_a_tile_of_16=(
            THEN,
            f"outputs, lses = with_missing(outputs, lses, max({TILE}, 16))\n{THEN}",
        ),
    ),
    *edits(
        "The parts of a row were taken to lie one behind the other. Split s of row r is row s · rows + r: from split "
        "to split the distance is all rows.",
        splits_taken_for_neighbours=(READ, f"outputs, lses = taken_for_neighbours(outputs, lses)\n{READ}"),
    ),
    *edits(
        "From split to split the parts of a row were taken to lie query_heads apart. Split s of row r is row s · rows "
        "+ r, and there are batch · query_heads rows.",
        splits_a_sequence_apart=(READ, f"outputs, lses = a_sequence_apart(outputs, lses)\n{READ}"),
    ),
    *edits(
        "Splits without keys count: their log-sum-exp of -inf was replaced by 0, which is a weight of exp(0). "
        "Leave it at -inf: exp(-inf) is the weight 0.",
        empty_splits_weigh=(READ, f"{READ}\n{EMPTY_AS_0}"),
        empty_splits_weigh__missing_ones_too=(READ, f"{READ}\n{EMPTY_AS_0}", THEN, f"{MISSING_AS_0}\n{THEN}"),
    ),
    *edits(
        "The last split is never merged. There are splits 0 to splits - 1.",
        last_split_left_out=(PARTS, "first_of(outputs, lses, splits - 1)"),
    ),
    *edits(
        "Only the first split reaches the result. Does the merge go over all of them?",
        first_split_alone=(PARTS, "first_of(outputs, lses, 1)"),
    ),
    *edits(
        "Only the first 2, 4, 8, ... splits are merged. BLOCK_S must be the next power of two *above*: "
        "triton.next_power_of_2(splits), with a mask.",
        splits_beyond_a_power_of_two=(PARTS, "first_of(outputs, lses, 1 << (splits.bit_length() - 1))"),
    ),
    *edits(
        "Only the first splits are merged: BLOCK_S is one number for all calls. It must have room for all of them: "
        "triton.next_power_of_2(splits), with a mask.",
        **{
            f"tile_of_fixed_size__{rows}": (PARTS, f"first_of(outputs, lses, min(splits, {rows}))")
            for rows in (4, 8, 16, 32, 64, 128, 256)
        },
    ),
    *edits(
        LARGEST_MISSING,
        lse_without_the_largest=(LSE, "torch.log(divisor)"),
        lse_without_the_largest__guarded=(LSE, "torch.log(total)"),
    ),
    *edits(f"The largest of the log-sum-exps was {HANDED_OUT}", lse_largest=(LSE, "largest")),
    *edits(f"The last split's log-sum-exp was {HANDED_OUT}", lse_last=(LSE, "lses[-1]")),
    *edits(f"The first split's log-sum-exp was {HANDED_OUT}", lse_first=(LSE, "lses[0]")),
    *edits(
        f"The sum of the log-sum-exps was {HANDED_OUT}",
        lse_added=(LSE, "lses.sum(0)"),
        lse_added__finite=(LSE, "lses.masked_fill(lses == -INF, 0.0).sum(0).masked_fill(total == 0, -INF)"),
    ),
    *edits(f"The average of the log-sum-exps was {HANDED_OUT}", lse_averaged=(LSE, "lses.mean(0)")),
    *edits(
        "The logarithm of the weights' sum is in base 2, and the largest log-sum-exp is natural. Take tl.log.",
        mixed_bases__merge=("torch.log(divisor", "torch.log2(divisor"),
    ),
    *edits(
        "The merged log-sum-exp is in base 2. It should be natural, as the partial ones are.",
        lse_in_base_2__merge=(LSE, f"({LSE}) / LN_2"),
    ),
    *edits(
        EMPTY_MERGE,
        empty_sequence_nan=(GUARD, "largest"),
        empty_sequence_nan__divided_by_nothing=(DIVISOR, "total"),
    ),
    *edits(
        BOUNDED_BELOW,
        alone=True,
        **{f"reference_bounded_below__merge__{name}": (GUARD, f"largest.clamp(min=-{name})") for name in FLOORS},
    ),
    *edits(
        "A row whose first split has no keys gives NaN: both maxima are -inf there, and -inf - -inf is no number. "
        "Measure from 0 as long as the maximum is -inf.",
        empty_sequence_nan__first_split=(
            *("output = (", "lost = lses[0] == -INF\noutput = ("),
            *("return output, largest", "return output.masked_fill(lost[..., None], torch.nan), largest"),
            *(LSE, f"({LSE}).masked_fill(lost, torch.nan)"),
        ),
    ),
    *edits(
        "A sequence without any key has a log-sum-exp of 0. The logarithm of an empty sum is minus infinity.",
        empty_sequence_counts=(LSE, "reference + torch.log(divisor)"),
    ),
)
MERGED = model_of(merge, MERGE, uses=(taken_for_neighbours, a_sequence_apart, first_of, with_missing))
