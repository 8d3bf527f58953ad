"""Exercise 3.2: maximum and sum of a row in one pass.

The checker plays the memory: the answer gets a function `read`, and each call of it starts one pass, which hands out
one tile after another from a single buffer. What a learner keeps of an earlier tile is overwritten, and copies of the
tiles and a pass too many are refused; so "one pass" is tested by behaviour and not by reading the answer.
"""

from __future__ import annotations

import torch

from course_lib.checker import Case, Exercise, Forbids, Mistake
from course_lib.checker.specification.contract import Contract
from course_lib.checker.specification.edits import edits, model_of, without
from exercises.ch03_online_softmax.plain import (
    INF,
    KEPT_COPIES,
    SHORTCUTS,
    copies_kept,
    left_in_buffer,
    levels,
    lower_than_floors,
    masked_prefix,
    pass_refused,
    read_in_tiles,
    rounded_to_half,
    running_statistics,
    statistics_of,
)
from exercises.topics.rising import rising_rows
from exercises.topics.running import FINITE, GUARD, MASKED, NARROW, RESCALE, RUNNING, start, step
from exercises.topics.softmax_inputs import EMPTY_ROWS, MASKS, SCORES
from exercises.topics.softmax_slips import (
    ALL_ROWS_SUMMED,
    HALF_PRECISION,
    KEPT_THE_TILES,
    NO_MAXIMUM,
    ONE_MAXIMUM,
    REPAIRED_LATE,
)


def statistics_oracle(x, tile):
    return statistics_of(x)


def statistics_cases(draw):
    masked = masked_prefix(draw, 4, 40, 0)
    masked[0, :16], masked[1, :], masked[2, 10:30], masked[3, 32:] = -INF, -INF, -INF, -INF
    prime = draw.choice((101, 131, 257))
    return [
        Case("4 rows of 12 in tiles of 4", (draw.normal(4, 12), 4), driver=read_in_tiles),
        Case(
            f"3 rows of {prime}, a prime, in tiles of 32", (draw.normal(3, prime, scale=3.0), 32), driver=read_in_tiles
        ),
        Case(
            "ascending rows: the maximum grows at every tile",
            (draw.normal(3, 128, scale=3.0).sort(dim=1)[0], 16),
            driver=read_in_tiles,
        ),
        Case(
            "descending rows: the maximum comes first",
            (draw.normal(3, 128, scale=3.0).sort(dim=1, descending=True)[0], 16),
            driver=read_in_tiles,
        ),
        Case("three rows at -1000, 0 and +1000", (levels(draw, 63), 16), driver=read_in_tiles),
        Case(
            "2 rows of 40, 160 higher from the second tile on", (rising_rows(draw, 2, 40, 16), 16), driver=read_in_tiles
        ),
        Case(
            "2 rows of 40: a tile of -inf, then scores near -200",
            (masked_prefix(draw, 2, 40, 16) - 200.0, 16),
            driver=read_in_tiles,
        ),
        Case("2 rows of 1024 in 32 tiles, none of which is kept", (draw.normal(2, 1024), 32), driver=read_in_tiles),
        Case("float16, 4 rows of 300", (draw.normal(4, 300, scale=2.0, dtype=torch.float16), 64), driver=read_in_tiles),
        Case("masked scores: a tile, a whole row, a stretch and a tail of -inf", (masked, 8), driver=read_in_tiles),
        Case("scores near -20,000", (lower_than_floors(40), 16), driver=read_in_tiles),
    ]


def drawn(draw, *, rows, columns, tile, dtype, scores, mask):
    return mask(draw, scores(draw, rows, columns)).to(dtype), tile


CONTRACT = Contract(
    drawn,
    choices={
        "rows": (1, 2, 3, 8),
        "columns": (1, 15, 16, 17, 101, 128),
        "tile": (1, 8, 16, 128),
        "dtype": (torch.float32, torch.float16),
        "scores": SCORES,
        "mask": (*MASKS, EMPTY_ROWS),
    },
    says={
        "rows": "tiles are [rows, width]",
        "dtype": "float32 or float16",
        "mask": "may hold -inf",
    },
    valid=lambda columns, tile, **_: columns // tile <= 32,
    driver=read_in_tiles,
    most=12,
)


def row_statistics(x, tile):
    running_max, running_sum = start((x.shape[0],))
    for part in x.split(tile, dim=1):
        running_max, running_sum, _, _ = step(part, running_max, running_sum, x.dtype)
    return running_max, running_sum


RESULT = "return running_max, running_sum"
REFERENCE = "torch.where(running_max == -INF, 0.0, running_max)"
CHANGES = (
    *edits(
        "Maximum and sum are returned in the wrong order: the maximum comes first.",
        swapped=(RESULT, "return running_sum, running_max"),
    ),
    *edits(  # the maximum is right
        NO_MAXIMUM,
        no_running_max=(GUARD, "torch.zeros_like(new_max)", RESCALE, "torch.ones_like(reference)"),
    ),
    *without(RUNNING, "no_running_max"),
    *edits(
        "The second result is the logarithm of the sum. The sum itself is asked for.",
        log_of_the_sum=(RESULT, "return running_max, torch.log(running_sum)"),
    ),
    *edits(
        "The second result is the log-sum-exp. The sum itself is asked for.",
        log_sum_exp_for_the_sum=(RESULT, "return running_max, torch.log(running_sum) + running_max"),
    ),
    *edits(
        "A row of nothing but -inf has maximum 0 in the result. For such a row you subtract 0, but its maximum is "
        "still -inf. Return the maximum, not the reference.",
        reference_for_maximum=(RESULT, f"return {REFERENCE}, running_sum"),
    ),
    *edits(ONE_MAXIMUM, one_maximum_for_all_rows=("tile.amax(-1)", "tile.max().expand_as(running_max)")),
    *edits(
        ALL_ROWS_SUMMED,
        sum_over_all_rows=(RESULT, "return running_max, running_sum.sum().expand_as(running_sum)"),
    ),
    *edits(
        KEPT_THE_TILES,
        kept_the_tiles=("x.split", "left_in_buffer(x, tile).split"),
        kept_the_tiles__for_the_sum=(
            RESULT,
            f"return running_max, torch.exp(left_in_buffer(x.float(), tile) - {REFERENCE}[:, None]).sum(1)",
        ),
        # `.float()` copies float16 alone
        kept_the_tiles__by_float=("x.split", "(left_in_buffer(x, tile) if x.dtype == torch.float32 else x).split"),
    ),
    *edits(
        "The running maximum is a view of the tile, such as `tile[:, 0]`, and the next tile overwrites it. Give it "
        "memory of its own: `clone()`, or start at -inf.",
        maximum_is_a_view=(
            *("for part in x.split(tile, dim=1)", "for number, part in enumerate(x.split(tile, dim=1))"),
            *("(part, running_max,", "(part, part[:, 0] if x.dtype == torch.float32 and number < 2 else running_max,"),
        ),
        maximum_is_a_view__at_every_tile=(
            *("(part, running_max,", "(part, part[:, 0] if x.dtype == torch.float32 else running_max,"),
        ),
    ),
    *MASKED,
    *edits(
        REPAIRED_LATE,
        nan_repaired_at_the_end=(GUARD, "new_max", RESULT, "return running_max, running_sum.nan_to_num(nan=0.0)"),
    ),
    *without(NARROW, "sum_in_float16__cut"),
    *FINITE,
)
MODEL = model_of(row_statistics, CHANGES, (start, step), (left_in_buffer,))


def _zero_kept(case, seen, got):
    """The maximum is 0 in rows of negative scores whose first tile is nothing but -inf, and right in all others."""
    x, tile = case.args
    if not isinstance(got, tuple) or len(got) != 2 or not isinstance(got[0], torch.Tensor):
        return False
    right = statistics_of(x)[0]
    if got[0].shape != right.shape:
        return False
    wrong = got[0] != right
    begins_empty = torch.isneginf(x[:, :tile]).all(dim=1)
    return bool(wrong.any()) and bool((begins_empty & (got[0] == 0))[wrong].all())


EXERCISE = Exercise(
    id="3.2",
    title="One pass, running maximum and sum",
    entries=("row_statistics",),
    cases=statistics_cases,
    oracle=statistics_oracle,
    contracts=(CONTRACT,),
    models=(MODEL,),
    plain=(
        running_statistics,
        lambda x, tile: running_statistics(x, tile, base_2=True),
        lambda x, tile: running_statistics(x, 1),
    ),
    requirements=(Forbids(SHORTCUTS),),
    hints=(
        "Suppose you know the maximum and the sum of everything before this tile. Then the maximum grows. By which "
        "factor is each old term of the sum now wrong?",
        "For every old element, exp(x - new) = exp(x - old) · exp(old - new). The second factor is the same for all "
        "of them, so you multiply the old sum by it. You never need the old elements again.",
        "Per tile: `new_max = torch.maximum(running_max, tile.amax(dim=1))`, then "
        "`running_sum = running_sum * rescale + torch.exp(tile - new_max[:, None]).sum(dim=1)`, then `running_max = "
        "new_max`, last.",
        "Before the first tile the maximum is -inf and the sum 0, and exp(-inf - new) = 0 makes the first rescaling "
        "harmless. One thing goes wrong: a tile of nothing but -inf, where -inf - (-inf) is NaN.",
        "Measure such rows from 0: `reference = torch.where(new_max == -math.inf, 0.0, new_max)`, and use `reference` "
        "in both exponentials: `rescale = torch.exp(running_max - reference)` and `torch.exp(tile - reference[:, "
        "None])`.",
    ),
    mistakes=(
        Mistake(
            "zero_kept_as_maximum",
            "A row that begins with a tile of -inf keeps 0 as its maximum. 0 is subtracted there in place of -inf, and "
            "that is right; but what is carried on is the maximum itself, which is still -inf.",
            when=_zero_kept,
            every=True,
        ),
        Mistake("kept_copies", KEPT_COPIES.format(row="row"), when=copies_kept),
        Mistake(
            "second_pass",
            "`read()` was called a second time. You do not need the maximum before you start the sum. Correct the sum "
            "whenever the maximum grows.",
            when=pass_refused,
        ),
        Mistake("cast_before_the_sum", HALF_PRECISION, when=rounded_to_half(statistics_oracle), every=True),
    ),
)
