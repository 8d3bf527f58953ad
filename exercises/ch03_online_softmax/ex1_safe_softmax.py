"""Exercise 3.1: safe softmax, its statistics in two passes.

The checker plays the memory: the answer gets a function `read`, and each call of it starts one pass, which hands out
one tile after another from a single buffer. What a learner keeps of an earlier tile is overwritten, and a pass too many
is refused; so "one pass" is tested by behaviour and not by reading the answer.
"""

from __future__ import annotations

import math

import torch

from course_lib.checker import Case, Exercise, Forbids, Mistake
from exercises.ch03_online_softmax.slips import (
    KEPT_THE_TILES,
    LOG2_E,
    NO_MAXIMUM,
    SHORTCUTS,
    TILE_NOT_RESCALED,
    by_lanes,
    by_log_sum_exp,
    left_in_buffer,
    levels,
    masked_prefix,
    naive_softmax,
    pass_refused,
    reference_of,
    running_statistics,
    softmax_of,
    softmax_per_tile,
)


def read_at_most_three_times(functions, x, tile):
    rows, columns = x.shape
    buffer = torch.full((rows, min(tile, columns)), math.nan, dtype=x.dtype, device=x.device)
    passes = [0]

    def read():
        passes[0] += 1
        if passes[0] > 3:
            raise RuntimeError("pass 4 was started, one pass more than the three allowed: maximum, sum, output")
        for start in range(0, columns, tile):
            width = min(tile, columns - start)
            buffer[:, :width] = x[:, start : start + width]
            yield buffer[:, :width]

    return functions["safe_softmax"](read)


def safe_softmax_oracle(x, tile):
    return softmax_of(x)


def safe_softmax_cases(draw):
    return [
        Case("4 rows of 12 in tiles of 4", (draw.normal(4, 12), 4), driver=read_at_most_three_times),
        Case(
            "3 rows of 37 in tiles of 8, the last one narrower",
            (draw.normal(3, 37), 8),
            driver=read_at_most_three_times,
        ),
        Case("16 rows of 48 in square tiles", (draw.normal(16, 48), 16), driver=read_at_most_three_times),
        Case("rows of one element", (draw.normal(2, 1, scale=50.0), 8), driver=read_at_most_three_times),
        Case("logits to ±200", (draw.normal(5, 129, scale=80.0), 32), driver=read_at_most_three_times),
        Case("three rows at -1000, 0 and +1000", (levels(draw, 63), 16), driver=read_at_most_three_times),
        Case("all elements equal", (draw.normal(1, 1, scale=100.0).repeat(4, 65), 32), driver=read_at_most_three_times),
        Case("ascending rows", (draw.normal(2, 127, scale=20.0).sort(dim=1)[0], 32), driver=read_at_most_three_times),
        Case(
            "descending rows",
            (draw.normal(2, 128, scale=20.0).sort(dim=1, descending=True)[0], 32),
            driver=read_at_most_three_times,
        ),
        Case("a first tile of -inf", (masked_prefix(draw, 3, 40, 16), 16), driver=read_at_most_three_times),
    ]


def _one_maximum(x, tile):
    weights = torch.exp(x.float() - x.float().max())
    return weights / weights.sum(dim=-1, keepdim=True)


def _from_zero(x, tile):
    weights = torch.exp(x.float() - x.float().amax(dim=-1, keepdim=True).clamp(min=0.0))
    return weights / weights.sum(dim=-1, keepdim=True)


def _all_rows_summed(x, tile):
    weights = torch.exp(x - x.amax(dim=-1, keepdim=True))
    return weights / weights.sum()


def _softmax_of_all(x, tile):
    return torch.softmax(x.flatten(), dim=0).view(x.shape)


def _down_the_columns(x, tile):
    """Maximum and sum over dim 0, kept per position in the tile: what `dim=0` does where tiles are of one width."""
    if x.shape[1] % tile:
        return None
    tiles = x.view(x.shape[0], -1, tile)
    weights = torch.exp(tiles - tiles.amax(dim=(0, 1)))
    return (weights / weights.sum(dim=(0, 1))).reshape(x.shape)


def _only_last_sum(x, tile):
    weights = torch.exp((x - x.amax(dim=1, keepdim=True)).float())
    return weights / weights.split(tile, dim=1)[-1].sum(dim=1, keepdim=True)


def _last_tile_statistics(x, tile):
    last = x.split(tile, dim=1)[-1]
    weights = torch.exp(x.float() - last.float().amax(dim=1, keepdim=True))
    return weights / weights.split(tile, dim=1)[-1].sum(dim=1, keepdim=True)


def _sum_of_own_maxima(x, tile):
    """The sum's terms are relative to each tile's maximum, the outputs' to the row's."""
    total = sum(
        torch.exp(part - reference_of(part.amax(dim=1, keepdim=True))).sum(dim=1, keepdim=True)
        for part in x.split(tile, dim=1)
    )
    return torch.exp(x - x.amax(dim=1, keepdim=True)) / total


EXERCISE = Exercise(
    id="3.1",
    title="Safe softmax, its statistics in two passes",
    entries=("safe_softmax",),
    cases=safe_softmax_cases,
    oracle=safe_softmax_oracle,
    plain=(
        by_lanes,
        by_log_sum_exp,
        lambda x, tile: torch.exp(x - x.amax(dim=1, keepdim=True)) / running_statistics(x, tile)[1][:, None],
        lambda x, tile: (
            torch.exp2(x * LOG2_E - x.amax(dim=1, keepdim=True) * LOG2_E)
            / running_statistics(x, tile, base_2=True)[1][:, None]
        ),
    ),
    requirements=(Forbids(SHORTCUTS),),
    hints=(
        "Write down what each pass must know before it starts. Which of the three numbers of `exp(x - maximum) / "
        "total` can be had without another?",
        "Pass 1 finds the maximum of each row: a tensor of [rows] that starts at -inf and takes the larger of itself "
        "and every tile's `amax(dim=1)`.",
        "Pass 2 adds up `torch.exp(tile - maximum[:, None]).sum(dim=1)`. Pass 3 is that of `naive_softmax`, with the "
        "maximum subtracted.",
        "Each `for tile in read():` is one pass. For pass 1: `maximum = None`, then `largest = tile.amax(dim=1)` and "
        "`maximum = largest if maximum is None else torch.maximum(maximum, largest)`.",
        "Output: `torch.cat([torch.exp(tile - maximum[:, None]) / total[:, None] for tile in read()], dim=1)`.",
    ),
    mistakes=(
        Mistake("no_maximum", NO_MAXIMUM, result=naive_softmax),
        Mistake(
            "maximum_starts_at_zero",
            "The maximum starts at 0, so a row of negative scores is measured from 0 and not from its own maximum; far "
            "below, all its terms underflow and 0/0 is NaN. Start at -inf, or with the first tile's maximum.",
            result=_from_zero,
        ),
        Mistake(
            "one_maximum_for_all_rows",
            "One maximum was taken over all rows of a tile. It does not overflow, but a row that lies far below the "
            "largest one underflows to zeros, and 0/0 is NaN. Every row needs its own: `amax(dim=1)`.",
            result=_one_maximum,
        ),
        Mistake(
            "wrong_axis",
            "The statistics run down the columns instead of along the rows. A tile is [rows, width] and a softmax is "
            "over a row, so maximum and sum are over `dim=1`.",
            result=_down_the_columns,
        ),
        Mistake(
            "sum_over_all_rows",
            "The sum was taken over all rows together. A row's outputs must add up to 1 by themselves: "
            "`sum(dim=1)`, which keeps one number a row.",
            result=(_all_rows_summed, _softmax_of_all),
        ),
        Mistake(
            "last_tile_only",
            "Only the last tile counted: a statistic is overwritten at every tile where it should be carried on. Look "
            "for `=` where `+=` or `torch.maximum` belongs.",
            result=(_only_last_sum, _last_tile_statistics),
        ),
        Mistake(
            "softmax_per_tile",
            "Each tile was made a softmax of its own. Its elements must be divided by the sum over the whole row, "
            "which is known only when a pass over all tiles is over.",
            result=softmax_per_tile,
        ),
        Mistake(
            "tile_not_rescaled",
            TILE_NOT_RESCALED.replace(
                "the new running maximum instead, which the tile before may have set",
                "the row's maximum instead, which pass 1 found",
            ),
            result=_sum_of_own_maxima,
        ),
        Mistake(
            "not_normalised",
            "The outputs were never divided by the sum.",
            result=lambda x, tile: torch.exp(x - x.amax(dim=1, keepdim=True)),
        ),
        Mistake(
            "kept_the_tiles",
            KEPT_THE_TILES,
            result=(
                lambda x, tile: softmax_of(left_in_buffer(x, tile)),
                lambda x, tile: (
                    left_in_buffer(torch.exp(x - x.amax(dim=1, keepdim=True)), tile)
                    / running_statistics(x, tile)[1][:, None]
                ),
            ),
        ),
        Mistake(
            "too_many_passes",
            "A fourth pass was started. Three are enough: the maximum, the sum, the output. Is `read()` called once "
            "for every row, or inside another loop?",
            when=pass_refused,
        ),
    ),
)
