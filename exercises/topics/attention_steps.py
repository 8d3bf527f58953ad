"""What attention kernels do with a tile of keys and values, step by step, and the slips in it.

A meaning calls `scored`, `accumulated` and `divided`, names them among its `parts`, and takes of the rows here those
that an answer of its exercise can make. Scores are natural, whatever base a kernel works in; leading dimensions are
anything: tiles of queries, heads, splits. The lines that keep maximum and sum are worded as in `running.py`, so that
its pieces name them (Dao, arXiv 2307.08691, algorithm 1).
"""

from __future__ import annotations

import math

import torch

from course_lib.checker.specification.edits import Edit, edits
from exercises.topics import attention_sentences as told
from exercises.topics import softmax_slips
from exercises.topics.running import (
    ADDED,
    FROM,
    GUARD,
    GUARDED_OWN,
    MAXIMUM,
    RESCALE,
    START_MAX,
    SUM,
    only_from_the_second,
)

INF = math.inf
LN_2 = math.log(2)
ALL = torch.tensor(True)  # of keys: visible; of programs: in the loop still
STAND_INS = {"1e4": -1e4, "65504": -65504.0, "1e5": -1e5, "1e6": -1e6, "1e9": -1e9}  # for minus infinity
FINITE_STARTS = {
    **{name: f"-{name}" for name in ("1e4", "1e6", "1e9", "1e30", "1e38")},
    "least": "torch.finfo(torch.float32).min",
}


def scored(query, keys, scale):
    """Scores [..., rows, keys] of queries [..., rows, head_dim] and keys [..., keys, head_dim], in float32."""
    return query.float() @ keys.float().mT * scale


def accumulated(scores, visible, values, running_max, running_sum, accumulator, walks=ALL):
    """Maximum, sum [..., rows] and accumulator [..., rows, head_dim] after a tile.

    visible: bool, as the scores, or `ALL`. walks: bool, as the maximum: of whom the loop comes to this tile.
    """
    tile = torch.where(visible, scores, -INF)
    new_max = torch.maximum(running_max, tile.amax(-1))
    reference = torch.where(new_max == -INF, 0.0, new_max)
    weights = torch.exp(tile - reference[..., None])
    rescale = torch.exp(running_max - reference)
    new_sum = running_sum * rescale + weights.sum(-1)
    product = weights.to(values.dtype).float() @ values.float()
    new_accumulator = accumulator * rescale[..., None] + product
    kept = torch.where(walks[..., None], new_accumulator, accumulator)
    return torch.where(walks, new_max, running_max), torch.where(walks, new_sum, running_sum), kept


def divided(accumulator, running_sum):
    """The output: zeros for a row that has seen no key."""
    total = torch.where(running_sum == 0, 1.0, running_sum)
    return accumulator / total[..., None]


def padded(head_dim: int) -> int:
    """The width of a tile of a matrix product that holds so many columns."""
    return max(16, 1 << (head_dim - 1).bit_length())


DOT = "query.float() @ keys.float().mT"
MASK = "torch.where(visible, scores, -INF)"
PRODUCT = "weights.to(values.dtype)"
ACCUMULATOR = "accumulator * rescale[..., None] + product"
NEW_MAX, DIVISOR = "torch.where(walks, new_max, running_max)", "torch.where(running_sum == 0, 1.0, running_sum)"
ONES = "torch.ones_like(running_max)"

POSTPONED_BY = {"12": "12.0", "16": "16.0", "20": "20.0", "17_in_base_2": "17.0 * LN_2", "20_in_base_2": "20.0 * LN_2"}

SCALE = (
    *edits(told.SCALE_MISSING, scale_missing=(f"{DOT} * scale", DOT)),
    *edits(told.SCALE_TWICE, scale_twice=(f"{DOT} * scale", f"{DOT} * scale * scale")),
    *edits(told.SCALE_TWICE, alone=True, scale_twice__with_log2e=(f"{DOT} * scale", f"{DOT} * scale * scale / LN_2")),
    *edits(
        "The scores are multiplied by √head_dim. They are divided by it: the scale is 1/√head_dim.",
        scale_inverted=(f"{DOT} * scale", f"{DOT} / scale"),
    ),
)
BASE_2 = (
    *edits(told.LOG2E_MISSING, log2e_missing=("* scale", "* scale * LN_2")),
    *edits(told.NATURAL_EXP, natural_exp=("* scale", "* scale / LN_2")),
)
# Where the scale is applied to differences: the maximum is that of the raw products, in units of log 2 or not.
SCALED_LATE = (
    *edits(
        "The maximum is that of the raw products. The weights scale its difference from the scores, and the rescale "
        "does not: scale old maximum - new maximum as well.",
        rescale_not_scaled=(RESCALE, "torch.exp((running_max - reference) * math.sqrt(values.shape[-1]))"),
        rescale_not_scaled__in_base_2=(
            RESCALE,
            "torch.exp((running_max - reference) * (math.sqrt(values.shape[-1]) * LN_2))",
        ),
    ),
    *edits(
        "The maximum is that of the raw products, and the scores that it is taken from are scaled. All weights are "
        "then far below 1, and underflow. Multiply it by the scale too.",
        maximum_not_scaled=("tile.amax(-1)", "tile.amax(-1) * (math.sqrt(values.shape[-1]) * LN_2)"),
    ),
)
MIXED_BASES = (
    *edits(
        "The rescale is tl.exp of a difference of maxima that are in units of log 2. Rescale and weights must have one "
        "base: tl.exp2 in both, with log2(e) in the scale.",
        mixed_bases__rescale=(RESCALE, "torch.exp((running_max - reference) / LN_2)"),
    ),
    *edits(
        "The weights are tl.exp2, and scores and rescale are natural. Rescale and weights must have one base: tl.exp2 "
        "in both, with log2(e) in the scale.",
        mixed_bases__weights=(f"torch.exp({FROM})", f"torch.exp(({FROM}) / LN_2)"),
    ),
)
NARROW = (  # of 16-bit inputs alone
    *edits(told.HALF_ACCUMULATOR, accumulator_in_float16=(ACCUMULATOR, f"({ACCUMULATOR}).to(values.dtype).float()")),
    *edits(
        softmax_slips.SUM_CAST,
        sum_in_float16=(SUM, f"({SUM}).to(values.dtype).float()"),
        sum_in_float16__of_the_tile=(ADDED, f"{PRODUCT}.sum(-1).float()"),
    ),
    *edits(softmax_slips.WEIGHTS_CAST, probabilities_cast_before_sum=(ADDED, f"{PRODUCT}.float().sum(-1)")),
    *edits(
        "The scores are rounded to float16 before scale and exponential. It ends at 65,504 and keeps 11 bits, so that "
        "large scores lose their differences. Keep what tl.dot gives: float32.",
        scores_in_float16=(DOT, f"({DOT}).to(query.dtype).float()"),
    ),
    *edits(
        "The query is multiplied by the scale and rounded to float16 again. That costs each score up to a 2000th of "
        "its size: too much for large ones. Scale what tl.dot gives, in float32.",
        scaled_query_in_16_bits=(
            f"{DOT} * scale",
            "(query.float() * (scale / LN_2)).to(query.dtype).float() @ keys.float().mT * LN_2",
        ),
        scaled_query_in_16_bits__without_log2e=(
            f"{DOT} * scale",
            "(query.float() * scale).to(query.dtype).float() @ keys.float().mT",
        ),
    ),
    *edits(
        "The maximum is updated only where it grows by more than some threshold. Until then weights are up to "
        "exp(threshold), and what is above 65,504 is infinite once it is cast to float16 for the product: the "
        "threshold must be below 11. Or update the maximum at every tile.",
        alone=True,
        **{
            f"rescale_postponed__{name}": (
                MAXIMUM,
                f"torch.where(tile.amax(-1) > running_max + {by}, tile.amax(-1), running_max)",
            )
            for name, by in POSTPONED_BY.items()
        },
    ),
)
HIDDEN = (
    *edits(told.HIDDEN_SCORED_ZERO, hidden_scored_zero=(MASK, "torch.where(visible, scores, 0.0)")),
    *edits(
        "The maximum is taken before the mask, so it counts hidden scores too. Where one of them is far larger, the "
        "weights of all visible keys underflow to 0. Mask first.",
        maximum_counts_hidden=(MAXIMUM, "torch.maximum(running_max, scores.amax(-1))"),
    ),
    *edits(
        "Hidden scores hold a large negative number where minus infinity belongs. Where the visible scores lie further "
        "below, the hidden ones win.",
        alone=True,
        **{
            f"hidden_finite__{name}{way}": (MASK, f"torch.where(visible, scores, {before}{number}{factor})")
            for name, number in STAND_INS.items()
            for way, before, factor in (("", "", ""), ("_in_base_2", "", " * LN_2"), ("_added", "scores ", ""))
        },
    ),
    *edits(
        "The mask is applied after the exponentials were summed, so hidden keys take weight away from the visible. "
        "Give hidden scores minus infinity before the maximum is taken.",
        mask_after_softmax=(MASK, "scores", PRODUCT, "torch.where(visible, weights, 0.0).to(values.dtype)"),
    ),
)
# Rows that see no key: the guard of the step, and that of the division.
EMPTY_ROWS = (
    *edits(
        told.EMPTY_ROW,
        empty_row_nan=(DIVISOR, "running_sum"),
        empty_row_nan__step=(GUARD, "new_max"),
        empty_row_nan__step_and_sum=(GUARD, "new_max", DIVISOR, "running_sum"),
    ),
    *edits(
        "The guard asks whether the old maximum is -inf, as it is at every row's first tile, and that tile is then "
        "measured from 0: exp overflows, or all its weights vanish. Ask it of the new maximum.",
        guarded_by_the_old_maximum=(GUARD, "torch.where(running_max == -INF, 0.0, new_max)"),
    ),
    *edits(
        "A query that sees no key shares its weight evenly among hidden ones: a large negative number stands where "
        "minus infinity belongs, and such a row cannot tell it from a score. Its output is zeros.",
        empty_row_uniform=(MASK, "torch.where(visible, scores, -1e30)"),
    ),
)
STYLES = edits("", unguarded_step=(GUARD, "new_max"), unguarded=(GUARD, "new_max", DIVISOR, "running_sum"))
FINISHED = (
    *edits(told.NOT_DIVIDED, not_divided=("accumulator / total[..., None]", "accumulator")),
    *edits(
        told.DIVIDED_AT_EVERY_TILE,
        divided_at_every_tile=(ACCUMULATOR, f"({ACCUMULATOR}) / torch.where(new_sum == 0, 1.0, new_sum)[..., None]"),
    ),
)
MAXIMA = (
    *edits(told.NO_RUNNING_MAX, no_running_max=(MAXIMUM, "torch.zeros_like(running_max)")),
    *edits(told.MAXIMUM_NOT_UPDATED, maximum_not_updated=(NEW_MAX, "running_max")),
    *edits(
        "The new maximum is the tile's own, even where an earlier tile held a larger score. Then exp(old maximum - new "
        "maximum) grows without bound. Take tl.maximum of the running one and the tile's.",
        maximum_forgets_the_old=(MAXIMUM, "tile.amax(-1)"),
    ),
    *edits(softmax_slips.MINIMUM, minimum_for_maximum=("tile.amax(-1)", "tile.amin(-1)")),
    *edits(
        "The weights are measured from the maximum before this tile, and everything else from the one after it. Use "
        "the new maximum in the weights too.",
        old_maximum_in_weights=(FROM, f"tile - {only_from_the_second('running_max', 'tile.amax(-1)')}[..., None]"),
    ),
    *edits(
        "The weights are measured from the tile's own maximum, and sum and accumulator from the running one. Use the "
        "new running maximum in the weights too.",
        alone=True,
        own_maximum_in_weights=(FROM, f"tile - {GUARDED_OWN}[..., None]"),
    ),
    *edits(
        "There is one maximum for the whole tile of scores. A query whose scores lie far below the tile's largest then "
        "gets weights of 0: take a maximum for each row.",
        maximum_of_the_tile=(MAXIMUM, "torch.maximum(running_max, tile.amax((-2, -1), keepdim=True)[..., 0])"),
    ),
    *edits(told.STARTS_AT_ZERO, maximum_starts_at_zero=(START_MAX, "torch.full(shape, 0.0")),
)
CARRIED = (
    *edits(told.NOTHING_RESCALED, nothing_rescaled=(RESCALE, ONES)),
    *edits(told.ACCUMULATOR_NOT_RESCALED, accumulator_not_rescaled=(ACCUMULATOR, "accumulator + product")),
    *edits(told.SUM_NOT_RESCALED, sum_not_rescaled=(SUM, f"running_sum + {ADDED}")),
    *edits(
        softmax_slips.TURNED_ROUND,
        rescale_turned_round=(RESCALE, only_from_the_second("torch.exp(reference - running_max)", "0.0")),
    ),
    *edits(
        "The accumulator is rescaled after the tile's product was added. The product is measured from the new maximum "
        "already: rescale first, then add.",
        accumulator_rescaled_after_adding=(ACCUMULATOR, "(accumulator + product) * rescale[..., None]"),
    ),
    *edits(
        softmax_slips.RESCALED_AFTER_ADDING,
        sum_rescaled_after_adding=(SUM, f"(running_sum + {ADDED}) * rescale"),
    ),
    *edits(
        "The accumulator holds the last tile's product alone: it is overwritten where it should be added to.",
        accumulator_overwritten=(ACCUMULATOR, "product"),
    ),
    *edits(
        "The running sum holds the last tile's weights alone. Add them to what it held, rescaled.",
        sum_not_kept=(SUM, ADDED),
    ),
)
STEP: tuple[Edit, ...] = (*MAXIMA, *CARRIED)
