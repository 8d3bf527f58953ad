"""The running maximum and sum of rows, tile after tile: the steps that many kernels share, and the slips in them.

A meaning calls `start` and `step` and names them among its `parts`; its edits are rows from here and its own. All rows
are computed at once (Milakov and Gimelshein, arXiv 1805.02867, algorithm 3).
"""

from __future__ import annotations

import math

import torch

from course_lib.checker.specification.edits import Edit, edits
from exercises.topics import softmax_slips as told

INF = math.inf
FINITE_PADDING = {"65504": "-65504.0", "1e4": "-1e4", "1e5": "-1e5", "1e6": "-1e6", "1e9": "-1e9", "1e10": "-1e10"}
FLOORS = ("1e3", "1e4")  # what a maximum is bounded by from below
FINITE_STARTS = {"least_number": "torch.finfo(torch.float32).min", "1e38": "-1e38", "1e30": "-1e30", "1e9": "-1e9"}


def start(shape):
    """The maximum and the sum of rows of which nothing was seen."""
    return torch.full(shape, -INF), torch.zeros(shape)


def step(scores, running_max, running_sum, narrow=None):
    """The maximum and the sum after a tile [..., width], its weights, and the factor by which what was kept changes.

    narrow: the dtype in which things were loaded; slips alone round to it.
    """
    tile = scores.float()
    new_max = torch.maximum(running_max, tile.amax(-1))
    reference = torch.where(new_max == -INF, 0.0, new_max)
    weights = torch.exp(tile - reference[..., None])
    rescale = torch.exp(running_max - reference)
    new_sum = running_sum * rescale + weights.sum(-1)
    return new_max, new_sum, weights, rescale


def cut(total: torch.Tensor, narrow: torch.dtype) -> torch.Tensor:
    """A sum in 16 bits; bfloat16 is cut to its bits, as Triton's interpreter does it, and not rounded."""
    if narrow != torch.bfloat16:
        return total.to(narrow).to(total.dtype)
    return (total.float().contiguous().view(torch.int32) & -(1 << 16)).view(torch.float32).to(total.dtype)


def only_from_the_second(change: str, first: str) -> str:
    """`change` for rows of which something finite was seen, and `first` before that: there is no state yet."""
    return f"torch.where(running_max == -INF, {first}, {change})"


MAXIMUM = "torch.maximum(running_max, tile.amax(-1))"
GUARD = "torch.where(new_max == -INF, 0.0, new_max)"
GUARDED_OWN = "torch.where(tile.amax(-1) == -INF, 0.0, tile.amax(-1))"
FROM, ADDED = "tile - reference[..., None]", "weights.sum(-1)"
RESCALE = "torch.exp(running_max - reference)"
SUM = "running_sum * rescale + weights.sum(-1)"
IN_16_BITS = (
    "tile = scores.float()",
    "tile, running_max, running_sum = scores.to(narrow), running_max.to(narrow), running_sum.to(narrow)",
)
START_MAX, START_SUM = "torch.full(shape, -INF", "torch.zeros(shape"

BASIC = (
    *edits(told.NO_MAXIMUM, no_running_max=(MAXIMUM, "torch.zeros_like(running_max)")),
    *edits(told.STARTS_AT_ZERO, maximum_starts_at_zero=(START_MAX, "torch.full(shape, 0.0")),
    *edits(told.MINIMUM, minimum_for_maximum=("tile.amax(-1)", "tile.amin(-1)")),
    *edits(told.MAGNITUDES, alone=True, magnitudes_for_maximum=("tile.amax(-1)", "tile.abs().amax(-1)")),
)
EXP2 = (
    *edits(told.EXP2, base_2__exp2_for_exp=("torch.exp(", "torch.exp2(")),
    *edits(told.EXP2_IN_ONE, base_2__in_the_rescaling=("rescale = torch.exp(", "rescale = torch.exp2(")),
    # Beside a slip that takes no factor it would be a second way to say that all are powers of 2.
    *edits(told.EXP2_IN_ONE, alone=True, base_2__in_the_weights=("weights = torch.exp(", "weights = torch.exp2(")),
)
CARRIED = (
    *edits(
        told.LAST_TILE_ONLY,
        last_tile_only=(MAXIMUM, "tile.amax(-1)", SUM, ADDED),
        last_tile_only__sum=(SUM, ADDED),
    ),
    *edits(told.MAXIMUM_FORGETS, maximum_forgets_the_old=(MAXIMUM, "tile.amax(-1)")),
    *edits(told.SUM_NOT_RESCALED, sum_not_rescaled=(SUM, "running_sum + weights.sum(-1)")),
    *edits(
        told.RESCALED_AFTER_ADDING,
        sum_rescaled_after_adding=(SUM, "(running_sum + weights.sum(-1)) * rescale"),
        sum_rescaled_after_adding__but_the_first=(
            *(SUM, "(running_sum + weights.sum(-1)) * rescale"),
            *(RESCALE, only_from_the_second(RESCALE, "1.0")),
        ),
    ),
    *edits(
        told.TURNED_ROUND,
        rescale_turned_round=(RESCALE, only_from_the_second("torch.exp(reference - running_max)", "1.0")),
    ),
    *edits(
        told.TILE_NOT_RESCALED,
        tile_not_rescaled=(FROM, f"tile - {GUARDED_OWN}[..., None]"),
        tile_not_rescaled__nor_the_sum=(FROM, f"tile - {GUARDED_OWN}[..., None]", SUM, "running_sum + weights.sum(-1)"),
    ),
    *edits(
        told.OLD_MAXIMUM,
        old_maximum_in_weights=(FROM, f"tile - {only_from_the_second('running_max', 'tile.amax(-1)')}[..., None]"),
    ),
)
FIRST_NAN = {
    "nan_from_the_start__turned_round": (RESCALE, "torch.exp(reference - running_max)"),
    "nan_from_the_start__no_exp": (RESCALE, "running_max - reference"),
    "nan_from_the_start__plus_infinity": (START_MAX, "torch.full(shape, INF"),
    "nan_from_the_start__old_maximum": (FROM, "tile - running_max[..., None]"),
}
NEVER_UPDATED = ("return new_max, new_sum", "return running_max, new_sum")
# Where the maximum is part of what is stored, one that stays at -inf shows as NaN does: everywhere.
WITH_THE_MAXIMUM = (
    *(BASIC + EXP2 + CARRIED),
    *edits(told.NOTHING_FINITE, nan_from_the_start__never_updated=NEVER_UPDATED, **FIRST_NAN),
)
RUNNING = (
    *(BASIC + EXP2),
    *edits(told.LAST_TILE_ONLY, last_tile_only__maximum_not_updated=NEVER_UPDATED),
    *CARRIED,
    *edits(told.NAN_FROM_THE_START, **FIRST_NAN),
)
MASKED = (
    *edits(told.EMPTY_STATE, empty_state_nan=(GUARD, "new_max")),
    *edits(
        told.BOUNDED_BELOW,
        alone=True,
        **{f"reference_bounded_below__{name}": (GUARD, f"new_max.clamp(min=-{name})") for name in FLOORS},
    ),
    *edits(  # the sum is -0 before the first tile, and only then
        told.PARTLY_GUARDED,
        alone=True,
        empty_state_nan__guarded_at_the_first_tile=(
            *(START_SUM, "-torch.zeros(shape"),
            *(GUARD, "torch.where((new_max == -INF) & torch.signbit(running_sum), 0.0, new_max)"),
        ),
    ),
    *edits(
        told.SUM_NOT_RESCALED,
        sum_not_rescaled__maximum_first=(GUARD, "new_max", RESCALE, "torch.exp(new_max - reference)"),
    ),
    *edits(told.TILE_NOT_RESCALED, alone=True, tile_not_rescaled__unguarded=(FROM, "tile - tile.amax(-1)[..., None]")),
)
NARROW = (
    *edits(told.TILE_NOT_CONVERTED, cast_before_the_sum__everything=IN_16_BITS),
    *edits(told.WEIGHTS_CAST, cast_before_the_sum__weights=(ADDED, "weights.to(narrow).float().sum(-1)")),
    *edits(
        told.SUM_CAST,
        sum_in_float16=(SUM, f"({SUM}).to(narrow).float()"),
        sum_in_float16__always=(SUM, f"({SUM}).half().float()"),
        sum_in_float16__cut=(SUM, f"cut({SUM}, narrow)"),
    ),
)
FINITE = edits(
    told.FINITE_START,
    alone=True,
    **{
        f"minus_infinity_is_a_number__{name}": (START_MAX, f"torch.full(shape, {number}")
        for name, number in FINITE_STARTS.items()
    },
)


def tail(mask: str) -> tuple[Edit, ...]:
    """The rows of what lanes past the end are loaded as, where the meaning loads with `mask, -INF`."""
    return (
        *edits(told.TAIL_SCORED, tail_not_masked=(f"{mask}, -INF", f"{mask}, 0.0")),
        *edits(
            told.TAIL_FINITE,
            alone=True,
            **{
                f"tail_is_a_number__{name}": (f"{mask}, -INF", f"{mask}, {number}")
                for name, number in FINITE_PADDING.items()
            },
        ),
    )
