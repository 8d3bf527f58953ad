"""Exercise 3.1: safe softmax, its statistics in two passes.

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
    KEPT_COPIES,
    SHORTCUTS,
    SOFTMAXES,
    copies_kept,
    left_in_buffer,
    levels,
    lower_than_floors,
    pass_refused,
    read_in_tiles,
    softmax_of,
)
from exercises.topics.rising import rising_rows
from exercises.topics.running import MAXIMUM, RESCALE, WITH_THE_MAXIMUM, start, step
from exercises.topics.softmax_inputs import SCORES
from exercises.topics.softmax_slips import ALL_ROWS_SUMMED, EXP2, KEPT_THE_TILES, NO_MAXIMUM, ONE_MAXIMUM


def safe_softmax_oracle(x, tile):
    return softmax_of(x)


def safe_softmax_cases(draw):
    return [
        Case("4 rows of 12 in tiles of 4", (draw.normal(4, 12), 4), driver=read_in_tiles),
        Case(
            "3 rows of 37 in tiles of 8, the last one narrower",
            (draw.normal(3, 37), 8),
            driver=read_in_tiles,
        ),
        Case("16 rows of 48 in square tiles", (draw.normal(16, 48), 16), driver=read_in_tiles),
        Case("4 rows of 12 once more, logits to ±200", (80 * draw.normal(4, 12), 4), driver=read_in_tiles),
        Case("three rows at -1000, 0 and +1000", (levels(draw, 63), 16), driver=read_in_tiles),
        Case("scores near -20,000", (lower_than_floors(40), 16), driver=read_in_tiles),
        Case(
            "2 rows of 40, 160 higher from the second tile on", (rising_rows(draw, 2, 40, 16), 16), driver=read_in_tiles
        ),
        Case("2 rows of 1024 in 32 tiles, none of which is kept", (draw.normal(2, 1024), 32), driver=read_in_tiles),
    ]


def drawn(draw, *, rows, columns, tile, scores):
    return scores(draw, rows, columns), tile


CONTRACT = Contract(
    drawn,
    choices={
        "rows": (1, 2, 3, 16),
        "columns": (1, 15, 16, 17, 101, 128),
        "tile": (1, 4, 16, 128),
        "scores": SCORES,
    },
    says={
        "rows": "tiles are [rows, width] float32",
        "columns": "the widths add up to `columns`",
        "scores": "safe for scores of any size",
    },
    valid=lambda columns, tile, **_: columns // tile <= 32,
    driver=read_in_tiles,
    most=10,
)


def safe_softmax(x, tile):
    """Maximum and sum in one pass, as many write them: a slip of a running sum is one here too."""
    running_max, running_sum = start((x.shape[0],))
    for part in x.split(tile, dim=1):
        running_max, running_sum, _, _ = step(part, running_max, running_sum)
    maximum = running_max[:, None]
    total = running_sum[:, None]
    return torch.cat([torch.exp(part - maximum) / total for part in x.split(tile, dim=1)], dim=1)


def by_their_own_width(tiles, empty):
    """Tile number i stored from column i times its own width on, in memory that is `empty`."""
    left = torch.full_like(torch.cat(tiles, dim=1), empty)
    for index, tile in enumerate(tiles):
        width = tile.shape[1]
        left[:, index * width : (index + 1) * width] = tile
    return left


def down_the_columns(tiles, as_rows):
    """Maximum and sum over dim 0, one for each position in a tile: possible where shapes happen to fit."""

    def spread(statistic):
        return statistic[:, None] if as_rows else statistic[None, :]

    try:
        maximum = total = None
        for tile in tiles:
            largest = tile.amax(0)
            maximum = largest if maximum is None else torch.maximum(maximum, largest)
        for tile in tiles:
            part = torch.exp(tile - spread(maximum)).sum(0)
            total = part if total is None else total + part
        return torch.cat([torch.exp(tile - spread(maximum)) / spread(total) for tile in tiles], dim=1)
    except RuntimeError:
        return None


WRONG_AXIS = (
    "The statistics run down the columns instead of along the rows. A tile is [rows, width] and a softmax is "
    "over a row, so maximum and sum are over `dim=1`."
)
OWN_MAXIMUM = (
    "Each tile's sum is relative to that tile's own maximum, so the sums cannot be added. Subtract the row's "
    "maximum instead, which pass 1 found."
)
OWN_WIDTH = (
    "Each tile was stored at its number times its own width. The last tile may be narrower, and then it lands "
    "too far to the left. Add up the widths of the tiles before it."
)
ONLY_THE_LAST = (
    "Only the last tile counted: a statistic is overwritten at every tile where it should be carried on. Look for `=` "
    "where `+=` or `torch.maximum` belongs."
)
OUTPUT = "torch.exp(part - maximum) / total"
RESULT = f"torch.cat([{OUTPUT} for part in x.split(tile, dim=1)], dim=1)"
CHANGES = (
    *edits(NO_MAXIMUM, no_maximum=(MAXIMUM, "torch.zeros_like(running_max)")),
    *without(WITH_THE_MAXIMUM, "no_running_max", "base_2__exp2_for_exp"),
    *edits(
        EXP2,
        base_2__exp2_for_exp=("torch.exp(tile", "torch.exp2(tile", RESCALE, RESCALE.replace("exp", "exp2")),
        base_2__everywhere=("torch.exp(", "torch.exp2("),
    ),
    *edits(ONE_MAXIMUM, one_maximum_for_all_rows=("tile.amax(-1)", "tile.max().expand_as(running_max)")),
    *edits(
        WRONG_AXIS,
        wrong_axis=(RESULT, "down_the_columns(x.split(tile, dim=1), as_rows=False)"),
        wrong_axis__as_rows=(RESULT, "down_the_columns(x.split(tile, dim=1), as_rows=True)"),
    ),
    *edits(
        ALL_ROWS_SUMMED,
        sum_over_all_rows=("running_sum[:, None]", "running_sum.sum()"),
        sum_over_all_rows__and_the_maximum=(RESULT, "torch.softmax(x.flatten(), dim=0).view(x.shape)"),
    ),
    *edits(
        ONLY_THE_LAST,
        last_tile_only__maximum=(
            *("running_max[:, None]", "x.split(tile, dim=1)[-1].amax(1, keepdim=True)"),
            *("running_sum[:, None]", "torch.exp(x - maximum).sum(1, keepdim=True)"),
        ),
    ),
    *edits(
        "Each tile got a softmax of its own. Divide by the sum over the whole row, which you know only after a pass "
        "over all tiles.",
        softmax_per_tile=(OUTPUT, "softmax_of(part)"),
    ),
    *edits(
        "The maximum is subtracted in the outputs, but not in the sum. Subtract the maximum before both.",
        maximum_missing_in_the_sum=("running_sum[:, None]", "torch.exp(x).sum(1, keepdim=True)"),
    ),
    *edits(
        "The maximum is subtracted in the sum, but not in the outputs. Subtract the maximum before both.",
        maximum_missing_in_the_outputs=("part - maximum", "part"),
    ),
    *edits("The outputs were never divided by the sum.", not_normalised=(OUTPUT, "torch.exp(part - maximum)")),
    *edits(
        "The outputs are multiplied by the row's sum. Divide by it.",
        multiplied_by_the_sum=(OUTPUT, "torch.exp(part - maximum) * total"),
    ),
    *edits(
        "The outputs are divided by the number of columns. Divide by the row's sum.",
        divided_by_the_width=(OUTPUT, "torch.exp(part - maximum) / x.shape[1]"),
    ),
    *edits(
        OWN_WIDTH,
        place_by_its_own_width=(RESULT, f"by_their_own_width({RESULT}.split(tile, dim=1), torch.nan)"),
        place_by_its_own_width__in_zeros=(RESULT, f"by_their_own_width({RESULT}.split(tile, dim=1), 0.0)"),
    ),
    *edits(
        KEPT_THE_TILES,
        kept_the_tiles=(RESULT, "softmax_of(left_in_buffer(x, tile))"),
        kept_the_tiles__weights=(RESULT, "left_in_buffer(torch.exp(x - maximum), tile) / total"),
        kept_the_tiles__outputs=(RESULT, "torch.exp(left_in_buffer(x, tile) - maximum) / total"),
    ),
)
MODEL = model_of(
    safe_softmax, CHANGES, (start, step), (by_their_own_width, down_the_columns, left_in_buffer)
).with_only(last_tile_only=ONLY_THE_LAST, tile_not_rescaled=OWN_MAXIMUM, tile_not_rescaled__nor_the_sum=OWN_MAXIMUM)

EXERCISE = Exercise(
    id="3.1",
    title="Safe softmax, its statistics in two passes",
    entries=("safe_softmax",),
    cases=safe_softmax_cases,
    oracle=safe_softmax_oracle,
    contracts=(CONTRACT,),
    models=(MODEL,),
    plain=SOFTMAXES,
    requirements=(Forbids(SHORTCUTS),),
    hints=(
        "Write down what each pass must know before it starts. Look at `exp(x - maximum) / total`: which of its "
        "numbers can you find first?",
        "Pass 1 finds the maximum of each row: a tensor of [rows] that starts at -inf and takes the larger of itself "
        "and every tile's `amax(dim=1)`.",
        "Pass 2 adds up `torch.exp(tile - maximum[:, None]).sum(dim=1)`. Pass 3 is that of `naive_softmax`, with the "
        "maximum subtracted.",
        "Each `for tile in read():` is one pass. For pass 1: `maximum = None`, then `largest = tile.amax(dim=1)` and "
        "`maximum = largest if maximum is None else torch.maximum(maximum, largest)`.",
        "Output: `torch.cat([torch.exp(tile - maximum[:, None]) / total[:, None] for tile in read()], dim=1)`.",
    ),
    mistakes=(
        Mistake("kept_copies", KEPT_COPIES.format(row="row"), when=copies_kept),
        Mistake(
            "too_many_passes",
            "A fourth pass was started. Three are enough: the maximum, the sum, the output. Is `read()` called once "
            "for every row, or inside another loop?",
            when=pass_refused,
        ),
    ),
)
