"""The slips of attention's backward pass, the most basic first: rows for `attention_backward_steps.py`."""

from __future__ import annotations

from course_lib.checker.specification.edits import Edit, edits

SCALE, DIFFERENCE, MASKED = "query.shape[-1] ** -0.5", "scores - reference", "torch.where(visible, differences, -INF)"
DP_DELTA, POSITIONS = "weight_gradients - delta[..., None]", "rows + key_length - query_length"
P, DS = f"torch.exp({MASKED})", f"weights * ({DP_DELTA})"
SEEN, MASK_LEFT_OUT = "keys <= positions[:, None]", ("if causal else exist", "if False else exist")
OFFSET, WALK = "offset = key_length - query_length", "range(start, stop, step)"
OF_THE_TILE = "torch.softmax(torch.where(visible, scores, -INF), -1).nan_to_num(nan=0.0)"
EXIST = "(rows < query_length)[:, None] & (keys < key_length)"
MASK = "visible = visible_pairs(rows, numbers, query_length, key_length, causal)"
# The tile on the diagonal, tiles that are hidden, and rows that see nothing.
OF_KEYS_SKIPPED, OF_QUERIES_SKIPPED = (
    ("first_key - offset", "first_key - offset + step"),
    ("min(key_length, reach)", "min(key_length, reach - query.shape[-2])"),
)
ALL_QUERIES, ALL_KEYS = (
    ("if causal else 0", "if False else 0"),
    ("if causal else key_length", "if False else key_length"),
)
ALIGNED = ("range(start", "range(start // step * step")
GUARDED = ("reference = log_sum", "reference = torch.where(log_sum == -INF, 0.0, log_sum)")
PUT_FOR_NUMBERS = ("hidden_scores_finite", "log_sum_bounded_below")  # they show in whatever large scores
BOUNDED_BELOW = edits(
    "L is bounded from below by a finite number, or replaced where it is lower. All scores of a row may lie lower "
    "still, and then P is 0 where it is not: -inf alone is replaced.",
    alone=True,
    **{
        f"log_sum_bounded_below__{bound}": (DIFFERENCE, f"scores - reference.clamp(min=-{bound}.0)")
        for bound in (100, 1000, 10000, 100000)
    },
)


def begins(at: str) -> tuple[str, ...]:
    """The pieces of a causal loop over queries that begins there, also where a style lets it begin at 0."""
    return ("max(0, first_key - offset)", at, "else 0", f"else {at} if causal else 0")


def ends(at: str) -> tuple[str, ...]:
    """The pieces of a causal loop over keys that ends there, also where a style lets it end at the last key."""
    return ("min(key_length, reach)", at, "else key_length", f"else {at} if causal else key_length")


IN_BASE_2 = (
    *edits(
        "exp2 gets scores in units of log 2 and an L that is still natural. Multiply L by log2(e) too.",
        log_sum_natural=(DIFFERENCE, "scores - reference * LN_2"),
    ),
    *edits(
        "exp2 gets an L in units of log 2 and scores that are natural. Multiply them by log2(e) too.",
        scores_natural=(DIFFERENCE, "scores * LN_2 - reference"),
    ),
    *edits(
        "exp2 gets natural numbers, so P is 2^(S - L). Multiply the difference by log2(e) = 1.4427.",
        log2e_missing=(DIFFERENCE, "(scores - reference) * LN_2"),
    ),
    *edits(
        "The factor of the exponent is ln 2 = 0.6931, and log2(e) = 1.4427 belongs there.",
        ln2_for_log2e=(DIFFERENCE, "(scores - reference) * (LN_2 * LN_2)"),
    ),
    *edits(
        "L is multiplied by log2(e) before the difference, and the difference once more.",
        log_sum_twice_in_base_2=(DIFFERENCE, "scores - reference / LN_2"),
    ),
    *edits(
        "The exponent is in units of log 2, and exp is natural. Use exp2, or leave the factor log2(e) out.",
        natural_exp=(DIFFERENCE, "(scores - reference) / LN_2"),
    ),
)


def of_a_loop(*diagonal: str) -> tuple[Edit, ...]:
    """The rows of whatever loop, or of two; diagonal: the pieces of the tile that is skipped on the diagonal."""
    return (
        *edits(
            "The scores are not multiplied by 1/√head_dim when they are computed again. L belongs to scaled scores, "
            "so P comes out wrong.",
            scale_missing_in_scores=("keys.float().mT * scale", "keys.float().mT"),
        ),
        *edits(
            "The result has the scale as a factor twice, and S = scale · Q Kᵀ gives it to dQ and dK once. It may "
            "come in with dS, with the result, and with a Q or K that was scaled before.",
            scale_twice=("total * scale", "total * scale * scale"),
        ),
        *edits(
            "The scores are multiplied by √head_dim. The scale is 1/√head_dim.",
            scale_inverted=(SCALE, "query.shape[-1] ** 0.5"),
        ),
        *edits("The scale is 1/head_dim. It is 1/√head_dim.", scale_not_rooted=(SCALE, "1 / query.shape[-1]")),
        *edits("The scale is 1/√key_length. It is 1/√head_dim.", scale_by_length=(SCALE, "key_length**-0.5")),
        *edits("P is exp(S), and L is missing: P = exp(S - L).", log_sum_missing=(DIFFERENCE, "scores")),
        *edits("L is added to the scores. P = exp(S - L).", log_sum_added=(DIFFERENCE, "scores + reference")),
        *edits(
            "P is measured from the row's maximum, and the sum is missing. L holds both: exp(S - L).",
            maximum_for_log_sum=(DIFFERENCE, "scores - maximum_of(scores, visible)"),
        ),
        *edits(
            "Each tile's rows are normalised by themselves. The sum of the whole row is in L: P = exp(S - L), "
            "element by element.",
            normalised_over_the_tile=(P, OF_THE_TILE),
        ),
        *edits(
            "L is laid along the keys of the tile. There is one for each query, a row of the tile: "
            "log_sum_exp[:, None].",
            log_sum_by_keys=(DIFFERENCE, "scores - along_keys(reference, scores)"),
        ),
        *edits(
            "P is computed from scores that are not masked: a query weighs keys after its position. Hidden pairs "
            "have P = 0.",
            no_causal_mask=("if causal", "if False"),
            no_causal_mask__in_tiles=MASK_LEFT_OUT,
        ),
        *edits(
            "P is multiplied by the mask after the exponential. A hidden score may lie far above L; then exp(S - L) "
            "is infinite, and infinity times 0 is NaN. Mask before exp, or choose with where.",
            masked_after_the_exponential=(P, "torch.exp(differences) * visible"),
        ),
        *edits(
            "The causal mask is the wrong way round: each query sees the keys after it.",
            mask_turned_round=(SEEN, "keys >= positions[:, None]"),
        ),
        *edits(
            "The causal mask is aligned to the start. The last query stands at the last key: query i is at position "
            "i + key_length - query_length.",
            causal_misaligned=(POSITIONS, "rows", OFFSET, "offset = 0"),
            causal_misaligned__in_tiles=(POSITIONS, "rows"),
        ),
        *edits(
            "The offset of the causal mask has the wrong sign: query i is at position i + key_length - query_length.",
            causal_offset_turned_round=(POSITIONS, "rows + query_length - key_length"),
        ),
        *edits(
            "A query does not see the key at its own position. Keys up to that one count: <=.",
            causal_off_by_one=(SEEN, "keys < positions[:, None]"),
        ),
        *edits(
            "A query sees one key too many, the one right after its position.",
            sees_the_next_key=(SEEN, "keys <= positions[:, None] + 1"),
        ),
        *edits(
            "Hidden pairs get P = 1: exp(0). They have P = 0, as exp(-inf).",
            hidden_weighed_one=(MASKED, "torch.where(visible, differences, 0.0)"),
        ),
        *edits("Δ is missing: dS = P ∘ (dP - Δ), and not P ∘ dP.", delta_missing=(DP_DELTA, "weight_gradients")),
        *edits(
            "Δ is added to dP. It is subtracted: dS = P ∘ (dP - Δ).",
            delta_added=(DP_DELTA, "weight_gradients + delta[..., None]"),
        ),
        *edits(
            "Δ is subtracted after the multiplication with P. It stands inside: dS = P ∘ (dP - Δ).",
            delta_not_weighted=(DS, "weights * weight_gradients - delta[..., None]"),
        ),
        *edits("dS is dP - Δ. Each element is also multiplied with P.", probabilities_left_out=(DS, DP_DELTA)),
        *edits(
            "The sign of dS is turned round: P ∘ (dP - Δ), not P ∘ (Δ - dP).",
            sign_turned_round=(DP_DELTA, "delta[..., None] - weight_gradients"),
        ),
        *edits(
            "dP is used where dS belongs. The softmax lies between them: dS = P ∘ (dP - Δ).",
            probability_gradients_taken=(DS, "weight_gradients"),
        ),
        *edits(
            "Δ is summed over the keys of the tile alone. It belongs to the whole row, and is given.",
            delta_of_the_tile=(DP_DELTA, "weight_gradients - (weights * weight_gradients).sum(-1, keepdim=True)"),
        ),
        *edits(
            "dS is computed from a P that is not masked. Hidden pairs have P = 0 there too.",
            hidden_pairs_counted=(DS, f"torch.exp(differences) * ({DP_DELTA})"),
        ),
        *edits(
            "Δ is laid along the keys of the tile. There is one for each query, a row of the tile: delta[:, None].",
            delta_by_keys=(DP_DELTA, "weight_gradients - along_keys(delta[..., None], scores)"),
        ),
        *edits(
            "dP is dO Kᵀ. It is dO Vᵀ, because O = P V.",
            keys_used_as_values=("gradient.float() @ values.float().mT", "gradient.float() @ keys.float().mT"),
        ),
        *edits(
            "The loop skips tiles as if queries and keys were equally many. The last query stands at the last key, "
            "so key_length - query_length belongs into its bound.",
            loop_ignores_offset=(OFFSET, "offset = 0"),
        ),
        *edits(
            "The sign of key_length - query_length is turned round in the loop's bound. The key at position k is "
            "first seen by query k + query_length - key_length, and query i sees the keys up to i + key_length - "
            "query_length.",
            loop_offset_turned_round=(OFFSET, "offset = query_length - key_length"),
        ),
        *edits("The tile on the diagonal is skipped. Some of its pairs are visible.", diagonal_tile_skipped=diagonal),
        *edits(
            "Only the last tile counts: each step overwrites the sum. Add to it.",
            only_last_tile=("total + product", "product"),
        ),
        *edits(
            "Only the first tile counts. Every step loads the tile that its loop variable names.",
            only_first_tile=(WALK, "range(start, stop, step)[:1]"),
        ),
        *edits("The first tile of the loop is left out.", first_tile_skipped=(WALK, "range(start, stop, step)[1:]")),
        *edits(
            "The last, partly filled tile is never looked at: the number of tiles is rounded down.",
            partial_tile_skipped=(WALK, "range(start, stop - step + 1, step)"),
        ),
        *edits(
            "L is replaced by 0 where it is negative. A negative L is a number like any other: only -inf is replaced.",
            negative_log_sum_as_zero=(DIFFERENCE, "scores - reference.clamp(min=0.0)"),
        ),
        *edits(
            "Hidden pairs get the score 0, and exp(0 - L) is not 0. Their score is -inf.",
            hidden_scores_zero=(MASKED, "torch.where(visible, differences, foreseeable(-reference, ALL))"),
        ),
        *edits(
            "A finite number stands for -inf where a pair is hidden. All scores of a row, and L, may lie below it, "
            "and then exp(S - L) is infinite there. Hidden pairs have the score -inf.",
            hidden_scores_finite=(MASKED, "torch.where(visible, differences, standing_in(-1e9, log_sum))"),
            hidden_scores_finite__1e4=(MASKED, "torch.where(visible, differences, standing_in(-1e4, log_sum))"),
        ),
        *edits(
            "A query that sees no key has L = -inf, and a score minus that is NaN or infinite. Its P is 0: subtract "
            "0 there, or write -inf into the exponent where a pair is hidden.",
            blind_rows_nan=(MASKED, "torch.where(visible, scores, -INF) - log_sum[..., None]"),
        ),
        *IN_BASE_2,
    )


OF_KEYS = (
    *edits(
        "The scale is missing in dK: dK = scale · dSᵀ Q, because S = scale · Q Kᵀ.",
        scale_missing_in_gradients=("total * scale", "total"),
    ),
    *edits(
        "dV is computed from dS. It is Pᵀ dO.",
        dv_from_score_gradients=("weights.mT @ gradients", "score_gradients.mT @ gradients"),
    ),
    *edits(
        "P is not transposed in dV = Pᵀ dO: the sum runs over the keys of the tile, where it runs over the queries.",
        dv_not_transposed=("weights.mT @ gradients", "square(weights) @ gradients"),
    ),
    *edits("dV is Pᵀ Q. It is Pᵀ dO.", dv_of_queries=("weights.mT @ gradients", "weights.mT @ queries")),
    *edits(
        "dK is computed from P. It is scale · dSᵀ Q.",
        dk_from_probabilities=("score_gradients.mT @ queries", "weights.mT @ queries"),
    ),
    *edits(
        "dS is not transposed in dK = scale · dSᵀ Q: the sum runs over the keys of the tile, where it runs over the "
        "queries.",
        dk_not_transposed=("score_gradients.mT @ queries", "square(score_gradients) @ queries"),
    ),
    *edits(
        "dK is dSᵀ dO. It is scale · dSᵀ Q.",
        dk_of_output_gradient=("score_gradients.mT @ queries", "score_gradients.mT @ gradients"),
    ),
    *edits(
        "The loop over queries begins at the query that sees the whole block. Those before it see a part of it: "
        "begin at the first query that sees the block's first key.",
        loop_begins_at_the_last_key=begins("max(0, first_key + keys.shape[-2] - 1 - offset)"),
    ),
    *edits(
        "Only the last tile counts in dV: each step overwrites the sum. Add to it.",
        only_last_tile__of_dv=("added(value_gradient, ", "added(0.0, "),
    ),
    *edits(
        "Only the last tile counts in dK: each step overwrites the sum. Add to it.",
        only_last_tile__of_dk=("added(key_gradient, ", "added(0.0, "),
    ),
    *edits(
        "dV has the scale as a factor. Only the scores are scaled: dV = Pᵀ dO.",
        scale_in_dv=(
            "scaled(key_gradient, scale), value_gradient",
            "scaled(key_gradient, scale), value_gradient * scale",
        ),
    ),
)
OF_QUERIES = (
    *edits(
        "The scale is missing in dQ: dQ = scale · dS K, because S = scale · Q Kᵀ.",
        scale_missing_in_gradients=("total * scale", "total"),
    ),
    *edits(
        "dQ is computed from P. It is scale · dS K.", dq_from_probabilities=("score_gradients @ keys", "weights @ keys")
    ),
    *edits(
        "dS is transposed in dQ = scale · dS K: the sum runs over the queries of the tile, where it runs over the "
        "keys.",
        dq_transposed=("score_gradients @ keys", "square(score_gradients).mT @ keys"),
    ),
    *edits("dQ is dS V. It is scale · dS K.", dq_of_values=("score_gradients @ keys", "score_gradients @ values")),
    *edits(
        "The loop over keys ends one key early. The tile's last query sees the key at its own position too, and that "
        "key may be the first of a tile: range does not reach its end.",
        loop_ends_one_key_early=ends("min(key_length, reach) - 1"),
        loop_ends_one_key_early__at_the_position=ends("min(key_length, reach - 1)"),
    ),
)
