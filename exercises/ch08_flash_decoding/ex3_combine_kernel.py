"""Exercise 8.3: the kernel that merges the splits."""

from __future__ import annotations

import math

import torch

from course_lib.checker import TRITON, Allocates, Case, Exercise, LaunchesTriton, Mistake, Moves
from course_lib.checker.specification.contract import Contract, Level
from course_lib.checker.specification.draw import Draw
from exercises.ch08_flash_decoding.parts import COMBINE_PLAIN, FINITE_FOR_EMPTY, SKIPS_THE_WORK, combine
from exercises.topics.decode_merge import MERGED
from exercises.topics.evidence import (
    COMPUTED_IN_16_BITS,
    ROUNDED_TO_16_BITS,
    right_to_three_digits,
    stored_in_16_bits,
)


def combine_cases(draw):
    def case(name, lengths, query_heads=4, head_dim=16, score=1.0, metered=False, level=0.0):
        """Partial results of splits with `lengths` keys, one sequence for each list of them."""
        counts = torch.tensor(lengths).T  # [splits, batch]
        lses = draw.normal(*counts.shape, query_heads, scale=score, shift=level)
        return Case(name, _with_counts(draw, counts, lses, head_dim), metered=metered)

    low = _with_counts(Draw(106), torch.full((3, 1), 64), Draw(83).normal(3, 1, 4, shift=-20_000.0), 16)
    cases = [
        case("2 splits of 100 keys", [[100, 100]]),
        case("1 split: nothing to merge", [[100]]),
        case("splits of 1000 keys and of 1", [[1000, 1]], score=0.1),
        case("the last 2 of 5 splits have no keys", [[3, 3, 3, 0, 0]]),
        case("the first split has no keys", [[0, 10, 10]]),
        case("a sequence without any key", [[0, 0, 0], [9, 9, 9]]),
        case("the same shape, and a key for everyone", [[7, 7, 7], [9, 9, 9]]),
        case("log-sum-exps near -300", [[64] * 3], level=-300.0),
        Case("log-sum-exps near -20,000", low),
        case("8 splits, 2 sequences, head dimension 64, bytes counted", [[64] * 8] * 2, head_dim=64, metered=True),
    ]
    counts, many = torch.full((300, 1), 4), Draw(300)
    cases.append(Case("300 splits", _with_counts(many, counts, many.normal(300, 1, 2), 16)))
    if draw.on_gpu:
        cases.append(case("100 splits, 16 sequences, 32 heads", [[64] * 100] * 16, query_heads=32, head_dim=128))
    return cases


def _with_counts(draw, counts, lses, head_dim):
    """(outputs, log-sum-exps) of splits with so many keys, int64 [splits, batch]; nothing where there is none."""
    outputs = draw.normal(*lses.shape, head_dim)
    lses = lses + counts.clamp(min=1).log()[..., None]
    nothing = counts == 0
    outputs[nothing], lses[nothing] = 0.0, -math.inf
    return outputs, lses


def _near(level, spread):
    return lambda draw, *shape: draw.normal(*shape, scale=spread, shift=level)


def _slope(step):
    """Log-sum-exps that rise or fall from split to split."""
    return lambda draw, splits, *shape: (
        draw.normal(splits, *shape) + (step * torch.arange(splits)).view(-1, *(1 for _ in shape))
    )


def _made(draw, *, splits, batch, query_heads, head_dim, log_sum_exps, empty):
    counts = draw.integers(splits, batch, low=1, high=100)
    if empty == "first":
        counts[0] = 0
    if empty == "last":
        counts[splits // 2 :, 0] = 0
    if empty == "sequence":
        counts[:, -1] = 0
    return _with_counts(draw, counts, log_sum_exps(draw, splits, batch, query_heads), head_dim)


CONTRACT = Contract(
    _made,
    choices={
        "splits": (1, 2, 3, 7, 16, 33, 65, 129),
        "batch": (1, 2, 3),
        "query_heads": (1, 3, 8),
        "head_dim": (16, 32, 64, 128),
        "log_sum_exps": (
            Level(_near(0.0, 1.0), ""),
            Level(_near(0.0, 150.0), "log-sum-exps to ±300"),
            Level(_near(-300.0, 1.0), "log-sum-exps near -300"),
            Level(_near(300.0, 1.0), "log-sum-exps near 300"),
            Level(_slope(20.0), "log-sum-exps that rise by 20 from split to split"),
            Level(_slope(-20.0), "log-sum-exps that fall by 20 from split to split"),
        ),
        "empty": (
            Level("", ""),
            Level("first", "no keys in the first split"),
            Level("last", "no keys in the last splits of a sequence"),
            Level("sequence", "a sequence without any key"),
        ),
    },
    says={
        "splits": "splits from 1 on",
        "head_dim": "head_dim 16, 32, 64 or 128",
        "log_sum_exps": "each split's log-sum-exp, natural",
        "empty": "-inf without keys",
    },
    # Many splits meet few rows: an answer may go over them one by one.
    valid=lambda splits, batch, query_heads, **others: splits * batch * query_heads <= 150,
    most=12,
)


def combine_bytes(outputs, lses):
    return 4 * (outputs.numel() + lses.numel()) + 4 * (outputs[0].numel() + lses[0].numel())


EXERCISE = Exercise(
    id="8.3",
    title="Combine the splits",
    entries=("combine_splits",),
    cases=combine_cases,
    oracle=combine,
    contracts=(CONTRACT,),
    plain=COMBINE_PLAIN,
    models=(MERGED,),
    needs=TRITON,
    requirements=(
        LaunchesTriton(at_most=1),
        Allocates(lambda outputs, lses: outputs.numel() + 2 * lses[0].numel() * (outputs.shape[-1] + 1)),
        SKIPS_THE_WORK,
        Moves(combine_bytes, slack=1.15),
    ),
    hints=(
        "Each program merges one output row, which is a query head of a sequence. With rows = batch · query_heads, "
        "split s of row r is row s · rows + r of the partial outputs.",
        "The weight of a split is exp(its log-sum-exp - the largest one). The output is the sum of weight · partial "
        "output, divided by the sum of the weights.",
        "Load all splits at once: lses [BLOCK_S] with other=-inf for those that don't exist, and parts [BLOCK_S, "
        "HEAD_DIM]. Then weights = tl.exp(lses - reference) and output = tl.sum(weights[:, None] * parts, axis=0) / "
        "total.",
        'When no split has a key, the largest is -inf: reference = tl.where(largest == float("-inf"), 0.0, largest), '
        "and divide by 1 where the total is 0. The merged log-sum-exp is reference + log(total), and there -inf.",
    ),
    mistakes=(
        FINITE_FOR_EMPTY,
        Mistake("rounded_to_16_bits", ROUNDED_TO_16_BITS, when=stored_in_16_bits(combine), every=True),
        Mistake("computed_in_16_bits", COMPUTED_IN_16_BITS, when=right_to_three_digits(combine), every=True),
        Mistake(
            "written_out_of_bounds",
            "A result was written past its end, by a program for rows that do not exist: there are batch · query_heads "
            "of them. Launch one program for each, or mask the rows that are left over, in the loads and the stores.",
            when=lambda case, seen, got: any(": writes " in access for access in seen.out_of_bounds),
        ),
        Mistake(
            "read_out_of_bounds",
            "Partial results that do not exist were read. The tile has BLOCK_S rows and only `splits` of them exist: "
            "mask both loads.",
            when=lambda case, seen, got: any("reads" in access for access in seen.out_of_bounds),
        ),
    ),
)
