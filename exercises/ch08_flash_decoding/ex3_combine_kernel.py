"""Exercise 8.3: the kernel that merges the splits."""

from __future__ import annotations

import math
from functools import partial

import torch

from course_lib.checker import TRITON, Allocates, Case, Exercise, LaunchesTriton, Mistake, Moves
from exercises.ch08_flash_decoding.slips import (
    SKIPS_THE_WORK,
    close,
    combine,
    combine_equally,
    combine_in_turn,
    combine_padded,
    combine_wrongly,
    is_pair,
    looks_like,
    wrong_lses,
)

MISSING_SPLITS_COUNTED = (
    "Splits that don't exist were merged: BLOCK_S is a power of two, and the rows from `splits` on were loaded with a "
    'log-sum-exp of 0, which is a weight of exp(0). Load them with other=float("-inf").'
)


def combine_cases(draw):
    def case(name, lengths, query_heads=4, head_dim=16, score=1.0, metered=False, empty=(), level=0.0):
        """Partial results of splits with `lengths` keys, one sequence for each list of them."""
        outputs = draw.normal(len(lengths[0]), len(lengths), query_heads, head_dim)
        lses = draw.normal(len(lengths[0]), len(lengths), query_heads, scale=score, shift=level)
        counts = torch.tensor(lengths).T  # [splits, batch]
        lses = lses + counts.clamp(min=1).log()[..., None]
        nothing = counts == 0
        outputs[nothing], lses[nothing] = 0.0, -math.inf
        return Case(name, (outputs, lses), metered=metered)

    many = draw.choice((13, 17, 19))
    cases = [
        case("2 splits of 100 keys", [[100, 100]]),
        case("1 split: nothing to merge", [[100]]),
        case("splits of 1000 keys and of 1", [[1000, 1]], score=0.1),
        case(f"{many} splits, 2 sequences", [[50] * many, [7] * many], query_heads=3),
        case("the last 2 of 5 splits have no keys", [[3, 3, 3, 0, 0]]),
        case("the first split has no keys", [[0, 10, 10]]),
        case("a sequence without any key", [[0, 0, 0], [9, 9, 9]]),
        case("log-sum-exps to ±300", [[64] * 6], score=150.0),
        case("log-sum-exps near -300", [[64] * 3], level=-300.0),
        case("log-sum-exps near +300", [[64] * 3], level=300.0),
        case("33 splits, head dimension 128", [[64] * 33], query_heads=2, head_dim=128),
        case("8 splits, 2 sequences, head dimension 64, bytes counted", [[64] * 8] * 2, head_dim=64, metered=True),
    ]
    if draw.on_gpu:
        cases.append(case("100 splits, 16 sequences, 32 heads", [[64] * 100] * 16, query_heads=32, head_dim=128))
    return cases


def combine_bytes(outputs, lses):
    return 4 * (outputs.numel() + lses.numel()) + 4 * (outputs[0].numel() + lses[0].numel())


def _combined(how):
    return lambda outputs, lses: combine_wrongly(outputs, lses, how)


def _no_maximum(outputs, lses):
    weights = torch.exp(lses.float()).double()
    total = weights.sum(dim=0)
    divisor = total.masked_fill(total == 0, 1.0)
    return (weights[..., None] * outputs).sum(dim=0) / divisor[..., None], total.log()


def _no_maximum_unguarded(case, seen, got):
    """The same without a guard: 0 / 0 where every weight underflows."""
    if not is_pair(got) or seen.out_of_bounds:
        return False
    outputs, lses = case.args
    weights = torch.exp(lses)
    told = (weights[..., None] * outputs).sum(dim=0) / weights.sum(dim=0)[..., None]
    return close(got[0], told) and not bool(torch.isfinite(told).all()) and bool((lses > -math.inf).any(dim=0).all())


def _lse_instead(name):
    """The right output with another log-sum-exp."""
    return lambda outputs, lses: (combine(outputs, lses)[0], wrong_lses(lses)[name])


def _weighed_by_the_logarithm(case, seen, got):
    """Where all log-sum-exps are near 300 that is nearly a plain average, which says nothing."""
    hows = ("by the log-sum-exp itself", "mean")
    by_logarithm, plain = (looks_like(combine, _combined(how), parts=1)(case, seen, got) for how in hows)
    return by_logarithm and not plain


def _lse_from_the_largest(outputs, lses, empty=-math.inf):
    """The right output with a log-sum-exp that is measured from the largest."""
    output, lse = combine(outputs, lses)
    nothing = lse == -math.inf
    return output, (lse - lses.amax(dim=0).masked_fill(nothing, 0.0)).masked_fill(nothing, empty)


def _empty_whole(value, lse):
    """What a sequence without any key becomes."""

    def result(outputs, lses):
        output, total = combine(outputs, lses)
        nothing = total == -math.inf
        return output.masked_fill(nothing[..., None], value), total.masked_fill(nothing, lse)

    return result


def _first_empty_nan(case, seen, got):
    """NaN where the first split has no keys, or where no split has: -inf - -inf on the way."""
    if not is_pair(got) or seen.out_of_bounds:
        return False
    _, lses = case.args
    first, all_empty = lses[0] == -math.inf, (lses == -math.inf).all(dim=0)
    nan = got[0].isnan().any(dim=-1) if got[0].dim() == 3 else torch.zeros(0)
    return (
        nan.shape == first.shape and bool(nan.any()) and any(bool((nan == told).all()) for told in (first, all_empty))
    )


def _as_neighbours(outputs, lses):
    """[splits, rows] read as if it were [rows, splits]."""
    splits = len(outputs)
    parts = outputs.reshape(-1, splits, outputs.shape[-1]).transpose(0, 1).reshape(outputs.shape)
    return combine(parts, lses.reshape(-1, splits).T.reshape(lses.shape))


def _only_some(chosen):
    """Only some of the splits are merged; None where that leaves none."""

    def result(outputs, lses):
        kept = chosen(len(outputs))
        return combine(outputs[kept], lses[kept]) if len(outputs[kept]) else None

    return result


def _largest_power_of_two(splits):
    return slice(0, 1 << (splits.bit_length() - 1))


EXERCISE = Exercise(
    id="8.3",
    title="Combine the splits",
    entries=("combine_splits",),
    cases=combine_cases,
    oracle=combine,
    plain=(combine_in_turn,),
    needs=TRITON,
    requirements=(
        LaunchesTriton(at_most=1),
        Allocates(lambda outputs, lses: outputs.numel()),
        SKIPS_THE_WORK,
        Moves(combine_bytes, slack=1.15),
    ),
    hints=(
        "One program for each output row: a query head of a sequence. Split s of row r lies at row s · rows + r of the "
        "partial outputs, with rows = batch · query_heads.",
        "The weight of a split is exp(its log-sum-exp - the largest one). The output is the sum of weight · partial "
        "output, divided by the sum of the weights.",
        "All splits at once: lses [BLOCK_S] with other=-inf for those that don't exist, parts [BLOCK_S, HEAD_DIM], "
        "weights = tl.exp(lses - reference), output = tl.sum(weights[:, None] * parts, axis=0) / total.",
        'When no split has a key, the largest is -inf: reference = tl.where(largest == float("-inf"), 0.0, largest), '
        "and divide by 1 where the total is 0. The merged log-sum-exp is reference + log(total), and there -inf.",
    ),
    mistakes=(
        Mistake(
            "averaged_without_weights",
            "The partial outputs were averaged as equals. A split whose scores are higher has a larger share of the "
            "softmax: weigh it by exp(its log-sum-exp - the whole's).",
            result=(_combined("mean"), combine_equally, partial(combine_equally, guarded=True)),
        ),
        Mistake(
            "averaged_without_weights_where_present",
            "The partial outputs of the splits that have keys were averaged as equals. A split whose scores are higher "
            "has a larger share of the softmax: weigh it by exp(its log-sum-exp - the whole's).",
            result=(_combined("mean of those with keys"), partial(combine_equally, present=True)),
        ),
        Mistake(
            "added_without_weights",
            "The partial outputs were added. Each is an average of its own: weigh it by exp(its log-sum-exp - the "
            "whole's); these weights add up to 1.",
            result=_combined("sum"),
        ),
        Mistake(
            "not_divided",
            "The weighted sum is not divided by the sum of the weights. Relative to the largest log-sum-exp these do "
            "not add up to 1.",
            result=_combined("undivided"),
        ),
        Mistake(
            "weighed_in_base_2",
            "The log-sum-exps are natural, and 2 was raised to them. Take tl.exp, or multiply by log2(e) before "
            "tl.exp2.",
            result=lambda outputs, lses: (
                combine_wrongly(outputs, lses, "base 2")[0],
                combine(outputs, lses * math.log(2))[1] / math.log(2),
            ),
            when=looks_like(combine, _combined("base 2"), parts=1),
        ),
        Mistake(
            "base_changed_twice",
            "The log-sum-exps were multiplied by log2(e) and then taken by the natural tl.exp. Use tl.exp of the plain "
            "ones, or tl.exp2 of the multiplied ones.",
            result=_combined("base 2 in units of log 2"),
            when=looks_like(combine, _combined("base 2 in units of log 2"), parts=1),
        ),
        Mistake(
            "weighed_by_the_logarithm",
            "The log-sum-exps themselves were taken as weights. They are the weights' logarithms: take tl.exp of them.",
            when=_weighed_by_the_logarithm,
        ),
        Mistake(
            "missing_splits_counted",
            MISSING_SPLITS_COUNTED,
            result=(combine_padded, partial(combine_padded, least=16)),
        ),
        Mistake(
            "no_maximum",
            "exp was taken of the log-sum-exps as they are: above 88 it overflows and below -104 all weights are 0. "
            "Subtract the largest one first.",
            result=_no_maximum,
            when=_no_maximum_unguarded,
        ),
        Mistake(
            "lse_largest",
            "The largest of the log-sum-exps was handed out as the whole's. The others add to it: largest + log Σ "
            "exp(lse - largest).",
            result=_lse_instead("the largest"),
        ),
        Mistake(
            "lse_without_the_largest",
            "The largest log-sum-exp is missing from the merged one. The sum is of exp(lse - largest): add the largest "
            "to its logarithm.",
            result=(_lse_from_the_largest, partial(_lse_from_the_largest, empty=0.0)),
        ),
        Mistake(
            "lse_last",
            "The last split's log-sum-exp was handed out as the whole's. They must be merged: largest + log Σ exp(lse "
            "- largest).",
            result=_lse_instead("the last"),
        ),
        Mistake(
            "lse_first",
            "The first split's log-sum-exp was handed out as the whole's. They must be merged: largest + log Σ exp(lse "
            "- largest).",
            result=_lse_instead("the first"),
        ),
        Mistake(
            "lse_added",
            "The log-sum-exps were added. Their exponentials add up: largest + log Σ exp(lse - largest).",
            result=_lse_instead("the sum"),
        ),
        Mistake(
            "lse_in_base_2",
            "The merged log-sum-exp is in base 2. It should be natural, as the partial ones are.",
            result=lambda outputs, lses: (combine(outputs, lses)[0], combine(outputs, lses)[1] / math.log(2)),
        ),
        Mistake(
            "empty_sequence_nan",
            "A sequence without any key gives NaN: 0 / 0, or -inf - -inf. Measure from 0 where the largest is -inf, "
            "and divide by 1 where the total is 0.",
            result=_empty_whole(math.nan, math.nan),
            when=_first_empty_nan,
        ),
        Mistake(
            "empty_sequence_counts",
            "A sequence without any key has a log-sum-exp of 0. The logarithm of an empty sum is minus infinity.",
            result=_empty_whole(0.0, 0.0),
        ),
        Mistake(
            "splits_taken_for_neighbours",
            "The parts of a row were taken to lie one behind the other. Split s of row r is row s · rows + r: from "
            "split to split the distance is all rows.",
            result=_as_neighbours,
        ),
        Mistake(
            "last_split_left_out",
            "The last split is never merged. There are splits 0 to splits - 1.",
            result=_only_some(lambda splits: slice(0, splits - 1)),
        ),
        Mistake(
            "splits_beyond_a_power_of_two",
            "Only the first 2, 4, 8, ... splits are merged. BLOCK_S must be the next power of two *above*: "
            "triton.next_power_of_2(splits), with a mask.",
            result=_only_some(_largest_power_of_two),
        ),
        Mistake(
            "tile_of_fixed_size",
            "Only the first splits are merged: BLOCK_S is one number for all calls. It must have room for all of them: "
            "triton.next_power_of_2(splits), with a mask.",
            result=tuple(_only_some(lambda splits, rows=rows: slice(0, rows)) for rows in (8, 16, 32)),
        ),
        Mistake(
            "read_out_of_bounds",
            "Partial results beyond the last split were read. The tile has BLOCK_S rows and only `splits` of them "
            "exist: mask both loads.",
            when=lambda case, seen, got: any("reads" in access for access in seen.out_of_bounds),
        ),
    ),
)
