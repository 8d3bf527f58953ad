"""The slips of tiled attention in words, the most basic first: of two in one answer, the earlier is told first."""

from __future__ import annotations

from course_lib.checker.specification.model import Slip
from exercises.topics.attention_model import FINITE_STARTS, STAND_INS
from exercises.topics.attention_sentences import (
    ACCUMULATOR_NOT_RESCALED,
    DIVIDED_AT_EVERY_TILE,
    EMPTY_ROW,
    FIRST_TILE_ONLY,
    HALF_ACCUMULATOR,
    HEAD_FORGOTTEN,
    HIDDEN_SCORED_ZERO,
    KEY_NOT_TRANSPOSED,
    KEYS_AS_VALUES,
    LAST_TILE_SKIPPED,
    LOG2E_MISSING,
    MAXIMUM_NOT_UPDATED,
    MISALIGNED,
    NATURAL_EXP,
    NEXT_KEY,
    NO_CAUSAL_MASK,
    NO_RUNNING_MAX,
    NOT_DIVIDED,
    NOTHING_RESCALED,
    OFF_BY_ONE,
    OFFSET_REVERSED,
    ONLY_FIRST_HEAD,
    ONLY_FIRST_ROWS,
    PER_TILE,
    SCALE_MISSING,
    SCALE_TWICE,
    SKIPS_TOO_MUCH,
    STARTS_AT_ZERO,
    STORED_IN_FIRST_ROWS,
    STORED_IN_ONE_HEAD,
    SUM_NOT_RESCALED,
    TRANSPOSED_KEY,
)

TENSORS = ("query", "key", "value")

RESCALED_WRONGLY = (
    Slip(
        "rescale_turned_round",
        "The factor is exp(new maximum - old maximum). What was added before has to shrink when the maximum grows: it "
        "is exp(old maximum - new maximum).",
    ),
    Slip(
        "accumulator_rescaled_after_adding",
        "The accumulator is rescaled after the tile's product was added. The product is measured from the new maximum "
        "already: rescale first, then add.",
    ),
    Slip(
        "sum_rescaled_after_adding",
        "The running sum is rescaled after the tile's weights were added. They are measured from the new maximum "
        "already: rescale first, then add.",
    ),
    Slip(
        "accumulator_overwritten",
        "The accumulator holds the last tile's product alone: it is overwritten where it should be added to.",
    ),
    Slip("sum_not_kept", "The running sum holds the last tile's weights alone. Add them to what it held, rescaled."),
)

TILED = (
    Slip("only_first_head", ONLY_FIRST_HEAD),
    Slip("only_first_rows", ONLY_FIRST_ROWS),
    Slip("stored_in_one_head", STORED_IN_ONE_HEAD),
    Slip("stored_in_first_rows", STORED_IN_FIRST_ROWS),
    Slip("keys_used_as_values", KEYS_AS_VALUES),
    Slip(
        "values_used_as_keys",
        "The queries are multiplied with the values. The first product takes the keys: look at the pointer it loads "
        "from.",
    ),
    Slip("transposed_key", TRANSPOSED_KEY),
    Slip("key_not_transposed", KEY_NOT_TRANSPOSED),
    Slip("scale_missing", SCALE_MISSING),
    Slip("scale_twice", SCALE_TWICE),
    Slip("scale_twice__with_log2e", SCALE_TWICE, alone=True),
    Slip("scale_inverted", "The scores are multiplied by √head_dim. They are divided by it: the scale is 1/√head_dim."),
    Slip("scale_by_length", "The scale is taken from the number of keys. It is 1/√head_dim, whatever the length."),
    Slip("log2e_missing", LOG2E_MISSING),
    Slip("natural_exp", NATURAL_EXP),
    Slip("not_divided", NOT_DIVIDED),
    Slip(
        "divided_by_the_maximum", "The accumulator is divided by the running maximum. It is divided by the running sum."
    ),
    Slip("divided_at_every_tile", DIVIDED_AT_EVERY_TILE),
    Slip(
        "softmax_over_queries",
        "Maximum and sum are taken over axis 0, the queries of the tile. The softmax of a query runs over its keys: "
        "axis=1 of a [BLOCK_M, BLOCK_N] tile.",
    ),
    Slip(
        "maximum_over_queries",
        "The maximum is taken over axis 0, the queries of the tile. Each query has a maximum over its keys: "
        "axis=1 of a "
        "[BLOCK_M, BLOCK_N] tile.",
    ),
    Slip(
        "sum_over_queries",
        "The sum is taken over axis 0, the queries of the tile. Each query has a sum over its keys: axis=1 of a "
        "[BLOCK_M, BLOCK_N] tile.",
    ),
    Slip("no_running_max", NO_RUNNING_MAX),
    Slip("maximum_not_updated", MAXIMUM_NOT_UPDATED),
    Slip(
        "maximum_forgets_the_old",
        "The new maximum is the tile's own, even where an earlier tile held a larger score. Then "
        "exp(old maximum - new maximum) grows without bound. Take tl.maximum of the running one and the tile's.",
    ),
    Slip(
        "minimum_for_maximum",
        "The smallest score of the tile is taken where the largest belongs, so that exp of the others can overflow.",
    ),
    Slip(
        "old_maximum_in_weights",
        "The weights are measured from the maximum before this tile, and everything else from the one after it. "
        "Use the "
        "new maximum in the weights too.",
    ),
    Slip(
        "maximum_of_the_tile",
        "There is one maximum for the whole tile of scores. A query whose scores lie far below the tile's largest then "
        "gets weights of 0: take a maximum for each row.",
    ),
    Slip("maximum_starts_at_zero", STARTS_AT_ZERO),
    Slip("nothing_rescaled", NOTHING_RESCALED),
    Slip("accumulator_not_rescaled", ACCUMULATOR_NOT_RESCALED),
    Slip("sum_not_rescaled", SUM_NOT_RESCALED),
    *RESCALED_WRONGLY,
    Slip("only_first_tile", FIRST_TILE_ONLY),
    Slip("last_tile_skipped", LAST_TILE_SKIPPED),
    Slip(
        "every_second_tile",
        "Every second tile of keys is left out: the loop's step is twice as long as the tile that it loads.",
    ),
    Slip(
        "first_tile_of_keys_skipped",
        "The first tile of keys is never looked at. The loop begins at key 0.",
    ),
    Slip(
        "as_many_keys_as_queries",
        "Only as many keys were used as there are queries. The loop runs to `key_length`: is that `key.shape[1]` "
        "in the "
        "launcher?",
    ),
    Slip("head_forgotten", HEAD_FORGOTTEN),
    *(
        Slip(
            f"head_forgotten__{name}",
            f"Head 0 of `{name}` is used for every head: head · {name}_head_stride is missing.",
        )
        for name in TENSORS
    ),
    *(
        Slip(
            f"head_forgotten__{one}_and_{other}",
            f"Head 0 of `{one}` and `{other}` is used for every head: add head · {one}_head_stride and "
            f"head · {other}_head_stride to the pointers.",
            alone=True,
        )
        for one, other in (("query", "key"), ("query", "value"), ("key", "value"))
    ),
    Slip(
        "strides_ignored",
        "The tensors are read as if they were contiguous. Rows lie `stride(-2)` elements apart and heads "
        "`stride(-3)`; the launcher passes both.",
    ),
    *(
        Slip(
            f"strides_ignored__{name}",
            f"`{name}` is read as if it were contiguous. Its rows lie {name}_stride elements apart and its heads "
            f"{name}_head_stride.",
        )
        for name in TENSORS
    ),
    *(
        Slip(
            f"strides_ignored__{name}_rows",
            f"The rows of `{name}` are taken to touch. They lie {name}_stride elements apart.",
        )
        for name in TENSORS
    ),
    *(
        Slip(
            f"strides_ignored__{name}{which}_by_{other}",
            f"`{name}` is read by {said} of `{other}`. It has {own} of its own.",
            alone=which == "",
        )
        for name in TENSORS
        for other in TENSORS
        if name != other
        for which, said, own in (
            ("", "the strides", "strides"),
            ("_rows", "the row stride", "one"),
            ("_heads", "the head stride", "one"),
        )
    ),
    *(
        Slip(
            f"output_strides__{which}{name}",
            f"The output is stored by {said} of `{name}`. It is contiguous, and has strides of its own: "
            "output_head_stride and output_stride.",
        )
        for which, said in (("", "the strides"), ("heads_of_", "the head stride"), ("rows_of_", "the row stride"))
        for name in TENSORS
    ),
    Slip("accumulator_in_float16", HALF_ACCUMULATOR),
    Slip(
        "scores_in_float16",
        "The scores are rounded to float16 before scale and exponential. It ends at 65,504 and keeps 11 bits, so that "
        "large scores lose their differences. Keep what tl.dot gives: float32.",
    ),
    *(
        Slip(
            f"scaled_query_in_16_bits{way}",
            "The query is multiplied by the scale and rounded to float16 again. That costs each score up to a 2000th "
            "of its size: too much for large ones. Scale what tl.dot gives, in float32.",
        )
        for way in ("", "__without_log2e")
    ),
)

MIXED_BASES = tuple(
    Slip(
        f"mixed_bases__{which}",
        f"{said} Rescale and weights must have one base: tl.exp2 in both, with log2(e) in the scale.",
    )
    for which, said in (
        ("rescale", "The rescale is tl.exp of a difference of maxima that are in units of log 2."),
        ("weights", "The weights are tl.exp2, and scores and rescale are natural."),
    )
)

SCALED_LATE = (
    *(
        Slip(
            f"rescale_not_scaled{way}",
            "The maximum is that of the raw products. The weights scale its difference from the scores, and the "
            "rescale does not: scale old maximum - new maximum as well.",
        )
        for way in ("", "__in_base_2")
    ),
    Slip(
        "maximum_not_scaled",
        "The maximum is that of the raw products, and the scores that it is taken from are scaled. All weights are "
        "then far below 1, and underflow. Multiply it by the scale too.",
    ),
)

TWO_LOOPS = (
    *(
        Slip(
            f"diagonal_in_the_first_loop{way}",
            "The first loop, which masks nothing, goes too far: it takes tiles that the diagonal crosses, and queries "
            "see keys after their own. It ends at the first query's position, rounded down to whole tiles.",
        )
        for way in ("", "__rounded_up", "__not_causal", "__without_the_offset")
    ),
    Slip(
        "second_loop_missing",
        "The keys past the whole tiles are never looked at. The second loop begins where the first ends, and runs to "
        "`end`, with MASKED=True.",
    ),
    Slip(
        "first_loop_missing",
        "The whole tiles are never looked at: the second loop goes on where a first one, from key 0 on, has ended.",
    ),
)

CAUSAL = (
    Slip("no_causal_mask", NO_CAUSAL_MASK),
    Slip(
        "diagonal_not_masked",
        "Tiles are skipped, but inside the tile on the diagonal nothing is masked: a query sees the later keys of its "
        "own tile. Put minus infinity there before the maximum is taken.",
    ),
    Slip(
        "mask_turned_round", "The mask is the wrong way round: each query sees the keys after it and not those before."
    ),
    Slip("causal_misaligned", MISALIGNED),
    Slip("causal_misaligned__mask", MISALIGNED),
    Slip("causal_misaligned__past_the_keys", MISALIGNED, alone=True),
    Slip("causal_offset_reversed", OFFSET_REVERSED, alone=True),
    Slip("causal_offset_reversed__mask", OFFSET_REVERSED, alone=True),
    Slip("loop_end_ignores_offset", SKIPS_TOO_MUCH),
    Slip("loop_end_ignores_offset__past_the_keys", SKIPS_TOO_MUCH, alone=True),
    Slip("causal_off_by_one", OFF_BY_ONE),
    Slip("sees_the_next_key", NEXT_KEY),
    Slip(
        "diagonal_tile_skipped", "The tile on the diagonal is skipped. Its keys before each query's position are seen."
    ),
    Slip("hidden_scored_zero", HIDDEN_SCORED_ZERO),
    Slip(
        "maximum_counts_hidden",
        "The maximum is taken before the mask, so it counts hidden scores too. Where one of them is far larger, the "
        "weights of all visible keys underflow to 0. Mask first.",
    ),
    *(
        Slip(
            f"hidden_finite__{name}{base}",
            "Hidden scores hold a large negative number where minus infinity belongs. Where the visible scores lie "
            "further below, the hidden ones win.",
            alone=True,
        )
        for name in STAND_INS
        for base in ("", "_in_base_2")
    ),
    Slip(
        "mask_after_softmax",
        "The mask is applied after the exponentials were summed, so hidden keys take weight away from the visible. "
        "Give hidden scores minus infinity before the maximum is taken.",
    ),
    Slip("empty_row_nan", EMPTY_ROW),
    Slip("empty_row_nan__step", EMPTY_ROW),
    Slip("empty_row_nan__step_and_sum", EMPTY_ROW),
    Slip(
        "empty_row_uniform",
        "A query that sees no key shares its weight evenly among hidden ones: a large negative number stands where "
        "minus infinity belongs, and such a row cannot tell it from a score. Its output is zeros.",
    ),
)

RAGGED = (
    Slip(
        "tail_keys_scored",
        "The keys past the end were loaded as zeros and counted: a key of zeros scores 0, and exp(0 - maximum) is not "
        "0. Give their scores minus infinity.",
    ),
    Slip(
        "partial_tile_skipped",
        "The last, partly filled tile of keys is never looked at: the number of tiles is rounded down. The loop runs "
        "over `range(0, key_length, BLOCK_N)`.",
    ),
    Slip(
        "query_tail_unwritten",
        "The last, partly filled tile of queries was never computed: the grid was rounded down. Use "
        "triton.cdiv(query_length, BLOCK_M).",
    ),
    Slip(
        "scale_of_the_padding",
        "The scale is that of the padded head dimension. It is 1/√head_dim of the tensor, not of BLOCK_D.",
    ),
    *(
        Slip(
            f"{name}_tail_not_masked",
            f"The rows of `{name}` past its length are loaded as they lie in memory, from the next head or from no "
            "tensor at all. Mask that load.",
        )
        for name in TENSORS
    ),
)

LOG_SUM_EXP = (
    *(
        Slip(
            f"maximum_starts_finite__{name}{base}",
            "The running maximum starts at a finite number, and a query that sees no key keeps it as its log-sum-exp. "
            "Start at minus infinity.",
            alone=True,
        )
        for name in FINITE_STARTS
        for base in ("", "_in_base_2")
    ),
    *(
        Slip(
            f"log_of_sum_only{which}",
            "The running maximum is missing from the log-sum-exp. The sum is of exp(score - maximum): add the maximum "
            "back.",
        )
        for which in ("", "__unguarded", "__in_base_2")
    ),
    Slip("lse_is_the_maximum", "The running maximum was stored as the log-sum-exp. Add the logarithm of the sum."),
    Slip("lse_is_the_sum", "The running sum was stored as the log-sum-exp. Take its logarithm and add the maximum."),
    *(
        Slip(
            f"sum_without_log{which}",
            "The maximum and the sum are added without a logarithm: log(exp(m) · sum) is m + log(sum).",
        )
        for which in ("", "__in_base_2")
    ),
    Slip("lse_maximum_subtracted", "The maximum is subtracted from the logarithm of the sum. It is added."),
    Slip(
        "lse_in_base_2",
        "The log-sum-exp is in base 2. The kernel works in units of log 2; multiply by ln 2 = 0.6931 before it is "
        "stored.",
    ),
    Slip(
        "lse_scaled_twice",
        "The log-sum-exp is multiplied by ln 2 though it is natural already. That factor belongs to a maximum and a "
        "logarithm in units of log 2.",
    ),
    *(
        Slip(
            f"mixed_bases{which}",
            "The log-sum-exp adds a maximum and a logarithm of different bases: one is in units of log 2, the other "
            "natural. Bring both to one base: (maximum + log2(sum)) · ln 2.",
        )
        for which in ("", "__log_for_log2", "__log2_for_log")
    ),
    Slip(
        "unscaled_maximum",
        "The maximum is that of the raw scores. It must be scaled like them: maximum · scale + log(sum).",
    ),
    Slip(
        "empty_row_lse_nan",
        "A query that sees no key has a log-sum-exp of NaN. The logarithm of an empty sum is minus infinity.",
    ),
    Slip(
        "empty_row_lse_zero",
        "A query that sees no key has a log-sum-exp of 0, as if its weights added up to 1. The logarithm of an empty "
        "sum is minus infinity.",
    ),
    Slip(
        "lse_stored_in_one_head",
        "Every head's log-sum-exp was stored in head 0's place. Add head · query_length to its pointer.",
    ),
    Slip(
        "lse_stored_by_key_length",
        "The log-sum-exps of a head begin at head · key_length. There is one for each query: head · query_length.",
    ),
    Slip(
        "lse_tail_unwritten",
        "Log-sum-exps were never written. Every row < query_length needs one, those of the last, partly filled tile "
        "too.",
    ),
)

_SHARED = (
    "only_first_rows",
    "keys_used_as_values",
    "values_used_as_keys",
    "transposed_key",
    "scale_missing",
    "scale_twice",
    "scale_inverted",
    "scale_by_length",
    "not_divided",
    "divided_by_the_maximum",
    "divided_at_every_tile",
    "no_running_max",
    "maximum_not_updated",
    "maximum_forgets_the_old",
    "minimum_for_maximum",
    "old_maximum_in_weights",
    "maximum_of_the_tile",
    "maximum_starts_at_zero",
    "nothing_rescaled",
    "accumulator_not_rescaled",
    "sum_not_rescaled",
    "rescale_turned_round",
    "accumulator_rescaled_after_adding",
    "sum_rescaled_after_adding",
    "accumulator_overwritten",
    "sum_not_kept",
    "only_first_tile",
    "last_tile_skipped",
    "every_second_tile",
    "first_tile_of_keys_skipped",
    "as_many_keys_as_queries",
)

# Of tiles in PyTorch, where nothing has pointers, and the last tile is a smaller one.
IN_PYTORCH = (
    *(slip for slip in TILED if slip.id in _SHARED),
    Slip("normalised_per_tile", PER_TILE),
    Slip(
        "tail_keys_dropped",
        "The keys of the last, smaller tile are missing: the number of tiles was rounded down. Use "
        "`range(0, key_length, key_rows)`, or round up with `-(-key_length // key_rows)`.",
    ),
    Slip(
        "tail_keys_dropped__all_but_one_tile",
        "The keys of the last, smaller tile are missing: the loop ends at the last whole tile. Use "
        "`range(0, key_length, key_rows)`.",
    ),
    Slip(
        "rows_counted_by_keys",
        "The tiles of queries are counted by the keys' length, so that with fewer keys than queries the last rows are "
        "never written. The outer loop runs over `query.shape[0]`.",
    ),
    Slip(
        "query_tail_unwritten",
        "The queries of the last, smaller tile are never computed: the number of tiles was rounded down. Use "
        "`range(0, query_length, query_rows)`.",
    ),
)
