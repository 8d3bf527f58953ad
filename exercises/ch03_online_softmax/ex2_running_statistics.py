"""Exercise 3.2: maximum and sum of a row in one pass.

The checker plays the memory: the answer gets a function `read`, and each call of it starts one pass, which hands out
one tile after another from a single buffer. What a learner keeps of an earlier tile is overwritten, and a pass too many
is refused; so "one pass" is tested by behaviour and not by reading the answer.
"""

from __future__ import annotations

import math

import torch

from course_lib.checker import Case, Exercise, Forbids, Mistake
from exercises.ch03_online_softmax.slips import (
    CAST_BEFORE_THE_SUM,
    INF,
    KEPT_THE_TILES,
    LAST_TILE_ONLY,
    NO_MAXIMUM,
    SHORTCUTS,
    SUM_NOT_RESCALED,
    TILE_NOT_RESCALED,
    at_least_float32,
    left_in_buffer,
    levels,
    masked_prefix,
    pass_refused,
    reference_of,
    rounded_to_half,
    running_statistics,
    statistics_of,
)
from exercises.topics.evidence import NAN_FROM_THE_START


def read_once(functions, x, tile):
    rows, columns = x.shape
    buffer = torch.full((rows, min(tile, columns)), math.nan, dtype=x.dtype, device=x.device)
    passes = [0]

    def read():
        passes[0] += 1
        if passes[0] > 1:
            raise RuntimeError("pass 2 was started, one pass more than the single one allowed")
        for start in range(0, columns, tile):
            width = min(tile, columns - start)
            buffer[:, :width] = x[:, start : start + width]
            yield buffer[:, :width]

    return functions["row_statistics"](read)


def statistics_oracle(x, tile):
    return statistics_of(x)


def statistics_cases(draw):
    masked = masked_prefix(draw, 4, 40, 0)
    masked[0, :16], masked[1, :], masked[2, 10:30], masked[3, 32:] = -INF, -INF, -INF, -INF
    prime = draw.choice((101, 131, 257))
    return [
        Case("4 rows of 12 in tiles of 4", (draw.normal(4, 12), 4), driver=read_once),
        Case(f"3 rows of {prime}, a prime, in tiles of 32", (draw.normal(3, prime, scale=3.0), 32), driver=read_once),
        Case("rows of one element", (draw.normal(2, 1, scale=50.0), 8), driver=read_once),
        Case("one more than a tile: 129 in tiles of 128", (draw.normal(2, 129), 128), driver=read_once),
        Case(
            "ascending rows: the maximum grows at every tile",
            (draw.normal(3, 127, scale=3.0).sort(dim=1)[0], 16),
            driver=read_once,
        ),
        Case(
            "descending rows: the maximum comes first",
            (draw.normal(3, 128, scale=3.0).sort(dim=1, descending=True)[0], 16),
            driver=read_once,
        ),
        Case("logits to ±200", (draw.normal(5, 129, scale=80.0), 32), driver=read_once),
        Case("three rows at -1000, 0 and +1000", (levels(draw, 63), 16), driver=read_once),
        Case("all elements equal", (draw.normal(1, 1, scale=100.0).repeat(4, 65), 32), driver=read_once),
        Case("float16, 4 rows of 300", (draw.normal(4, 300, scale=2.0, dtype=torch.float16), 64), driver=read_once),
        Case("masked scores: a tile, a whole row, a stretch and a tail of -inf", (masked, 8), driver=read_once),
    ]


def _summed_without_maximum(x, tile):
    x = x.float()
    return x.amax(dim=1), torch.exp(x).sum(dim=1)


def _last_tile_alone(x, tile):
    return statistics_of(x.split(tile, dim=1)[-1])


def _maximum_not_updated(x, tile):
    maximum, total = _last_tile_alone(x, tile)
    return torch.full_like(maximum, -INF), total


def _right_maximum_last_sum(x, tile):
    maximum, _ = statistics_of(x)
    return maximum, torch.exp(x.split(tile, dim=1)[-1] - reference_of(maximum)[:, None]).sum(dim=1)


EXERCISE = Exercise(
    id="3.2",
    title="One pass, running maximum and sum",
    entries=("row_statistics",),
    cases=statistics_cases,
    oracle=statistics_oracle,
    plain=(
        lambda x, tile: running_statistics(x, tile),
        lambda x, tile: running_statistics(x, tile, base_2=True),
        lambda x, tile: running_statistics(x, 1),
    ),
    requirements=(Forbids(SHORTCUTS),),
    hints=(
        "Suppose you know maximum and sum of everything before this tile. Write the sum of the whole, relative to the "
        "new maximum, in terms of the old sum. Which factor do the old terms need?",
        "For every old element, exp(x - new) = exp(x - old) · exp(old - new). The second factor is the same for all of "
        "them, so it can be taken out of the sum: you never need the old elements again.",
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
        Mistake("no_running_max", NO_MAXIMUM, result=_summed_without_maximum),
        Mistake(
            "sum_not_rescaled",
            SUM_NOT_RESCALED,
            result=(
                lambda x, tile: running_statistics(x, tile, rescale=False),
                lambda x, tile: running_statistics(x, tile, rescale=False, guard=False),
            ),
        ),
        Mistake(
            "nan_from_the_start",
            NAN_FROM_THE_START,
            result=lambda x, tile: (statistics_of(x)[0], torch.full_like(statistics_of(x)[0], math.nan)),
        ),
        Mistake(
            "tile_not_rescaled",
            TILE_NOT_RESCALED,
            result=lambda x, tile: running_statistics(x, tile, rescale_tile=False),
        ),
        Mistake(
            "max_starts_at_zero",
            "The running maximum starts at 0, so a row of negative scores is measured from 0 and not from its maximum; "
            "far below, all its terms underflow. Start at -inf.",
            result=lambda x, tile: running_statistics(x.float(), tile, start=0.0),
        ),
        Mistake(
            "empty_state_nan",
            "A tile of nothing but -inf gave NaN: there the maximum is -inf, and -inf - (-inf) is NaN. Where the new "
            "maximum is -inf, subtract 0 instead.",
            result=lambda x, tile: running_statistics(x, tile, guard=False),
        ),
        Mistake(
            "last_tile_only",
            LAST_TILE_ONLY,
            result=(_last_tile_alone, _right_maximum_last_sum, _maximum_not_updated),
        ),
        Mistake(
            "kept_the_tiles",
            KEPT_THE_TILES,
            result=(
                lambda x, tile: statistics_of(left_in_buffer(x, tile)),
                lambda x, tile: (
                    statistics_of(x)[0],
                    torch.exp(
                        left_in_buffer(at_least_float32(x), tile) - reference_of(statistics_of(x)[0])[:, None]
                    ).sum(dim=1),
                ),
            ),
        ),
        Mistake(
            "second_pass",
            "`read()` was called a second time. The maximum is not needed before the sum starts: correct the sum "
            "whenever the maximum grows.",
            when=pass_refused,
        ),
        Mistake(
            "swapped",
            "Maximum and sum are returned in the wrong order: the maximum comes first.",
            result=lambda x, tile: statistics_of(x)[::-1],
        ),
        Mistake("cast_before_the_sum", CAST_BEFORE_THE_SUM, when=rounded_to_half(statistics_oracle), every=True),
    ),
)
