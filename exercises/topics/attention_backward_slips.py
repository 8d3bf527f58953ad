"""The slips of attention's backward pass in words, the most basic first."""

from __future__ import annotations

from course_lib.checker.specification.model import Slip, Slips

_STAND_IN = (
    "A finite number stands for -inf where a pair is hidden. All scores of a row, and L, may lie below it, and then "
    "exp(S - L) is infinite there. Hidden pairs have the score -inf."
)
# In both loops.
_OF_A_TILE = {
    "scale_missing_in_scores": "The scores are not multiplied by 1/√head_dim when they are computed again. L belongs "
    "to scaled scores, so P comes out wrong.",
    "scale_twice": "The result has the scale as a factor twice, and S = scale · Q Kᵀ gives it to dQ and dK once. It "
    "may come in with dS, with the result, and with a Q or K that was scaled before.",
    "scale_inverted": "The scores are multiplied by √head_dim. The scale is 1/√head_dim.",
    "scale_not_rooted": "The scale is 1/head_dim. It is 1/√head_dim.",
    "scale_by_length": "The scale is 1/√key_length. It is 1/√head_dim.",
    "log_sum_missing": "P is exp(S), and L is missing: P = exp(S - L).",
    "log_sum_added": "L is added to the scores. P = exp(S - L).",
    "maximum_for_log_sum": "P is measured from the row's maximum, and the sum is missing. L holds both: exp(S - L).",
    "normalised_over_the_tile": "Each tile's rows are normalised by themselves. The sum of the whole row is in L: "
    "P = exp(S - L), element by element.",
    "log_sum_by_keys": "L is laid along the keys of the tile. There is one for each query, a row of the tile: "
    "log_sum_exp[:, None].",
    "no_causal_mask": "P is computed from scores that are not masked: a query weighs keys after its position. Hidden "
    "pairs have P = 0.",
    "no_causal_mask__in_tiles": "P is computed from scores that are not masked: a query weighs keys after its "
    "position. Hidden pairs have P = 0.",
    "masked_after_the_exponential": "P is multiplied by the mask after the exponential. A hidden score may lie far "
    "above L; then exp(S - L) is infinite, and infinity times 0 is NaN. Mask before exp, or choose with where.",
    "mask_turned_round": "The causal mask is the wrong way round: each query sees the keys after it.",
    "causal_misaligned": "The causal mask is aligned to the start. The last query stands at the last key: query i is "
    "at position i + key_length - query_length.",
    "causal_misaligned__in_tiles": "The causal mask is aligned to the start. The last query stands at the last key: "
    "query i is at position i + key_length - query_length.",
    "causal_offset_turned_round": "The offset of the causal mask has the wrong sign: query i is at position "
    "i + key_length - query_length.",
    "causal_off_by_one": "A query does not see the key at its own position. Keys up to that one count: <=.",
    "sees_the_next_key": "A query sees one key too many, the one right after its position.",
    "hidden_weighed_one": "Hidden pairs get P = 1: exp(0). They have P = 0, as exp(-inf).",
    "delta_missing": "Δ is missing: dS = P ∘ (dP - Δ), and not P ∘ dP.",
    "delta_added": "Δ is added to dP. It is subtracted: dS = P ∘ (dP - Δ).",
    "delta_not_weighted": "Δ is subtracted after the multiplication with P. It stands inside: dS = P ∘ (dP - Δ).",
    "probabilities_left_out": "dS is dP - Δ. Each element is also multiplied with P.",
    "sign_turned_round": "The sign of dS is turned round: P ∘ (dP - Δ), not P ∘ (Δ - dP).",
    "probability_gradients_taken": "dP is used where dS belongs. The softmax lies between them: dS = P ∘ (dP - Δ).",
    "delta_of_the_tile": "Δ is summed over the keys of the tile alone. It belongs to the whole row, and is given.",
    "hidden_pairs_counted": "dS is computed from a P that is not masked. Hidden pairs have P = 0 there too.",
    "delta_by_keys": "Δ is laid along the keys of the tile. There is one for each query, a row of the tile: "
    "delta[:, None].",
    "keys_used_as_values": "dP is dO Kᵀ. It is dO Vᵀ, because O = P V.",
    "loop_ignores_offset": "The loop skips tiles as if queries and keys were equally many. The last query stands at "
    "the last key, so key_length - query_length belongs into its bound.",
    "loop_offset_turned_round": "The sign of key_length - query_length is turned round in the loop's bound. The key at "
    "position k is first seen by query k + query_length - key_length, and query i sees the keys up to "
    "i + key_length - query_length.",
    "diagonal_tile_skipped": "The tile on the diagonal is skipped. Some of its pairs are visible.",
    "only_last_tile": "Only the last tile counts: each step overwrites the sum. Add to it.",
    "only_first_tile": "Only the first tile counts. Every step loads the tile that its loop variable names.",
    "first_tile_skipped": "The first tile of the loop is left out.",
    "partial_tile_skipped": "The last, partly filled tile is never looked at: the number of tiles is rounded down.",
    "negative_log_sum_as_zero": "L is replaced by 0 where it is negative. A negative L is a number like any other: "
    "only -inf is replaced.",
    "hidden_scores_zero": "Hidden pairs get the score 0, and exp(0 - L) is not 0. Their score is -inf.",
    "hidden_scores_finite": _STAND_IN,
    "hidden_scores_finite__1e4": _STAND_IN,
    "blind_rows_nan": "A query that sees no key has L = -inf, and a score minus that is NaN or infinite. Its P is 0: "
    "subtract 0 there, or write -inf into the exponent where a pair is hidden.",
}
_IN_BASE_2 = {
    "log_sum_natural": "exp2 gets scores in units of log 2 and an L that is still natural. Multiply L by log2(e) too.",
    "scores_natural": "exp2 gets an L in units of log 2 and scores that are natural. Multiply them by log2(e) too.",
    "log2e_missing": "exp2 gets natural numbers, so P is 2^(S - L). Multiply the difference by log2(e) = 1.4427.",
    "ln2_for_log2e": "The factor of the exponent is ln 2 = 0.6931, and log2(e) = 1.4427 belongs there.",
    "log_sum_twice_in_base_2": "L is multiplied by log2(e) before the difference, and the difference once more.",
    "natural_exp": "The exponent is in units of log 2, and exp is natural. Use exp2, or leave the factor log2(e) out.",
}
_OF_KEYS = {
    "scale_missing_in_gradients": "The scale is missing in dK: dK = scale · dSᵀ Q, because S = scale · Q Kᵀ.",
    "dv_from_score_gradients": "dV is computed from dS. It is Pᵀ dO.",
    "dv_not_transposed": "P is not transposed in dV = Pᵀ dO: the sum runs over the keys of the tile, where it runs "
    "over the queries.",
    "dv_of_queries": "dV is Pᵀ Q. It is Pᵀ dO.",
    "dk_from_probabilities": "dK is computed from P. It is scale · dSᵀ Q.",
    "dk_not_transposed": "dS is not transposed in dK = scale · dSᵀ Q: the sum runs over the keys of the tile, where it "
    "runs over the queries.",
    "dk_of_output_gradient": "dK is dSᵀ dO. It is scale · dSᵀ Q.",
    "loop_begins_at_the_last_key": "The loop over queries begins at the query that sees the whole block. Those before "
    "it see a part of it: begin at the first query that sees the block's first key.",
    "only_last_tile__of_dv": "Only the last tile counts in dV: each step overwrites the sum. Add to it.",
    "only_last_tile__of_dk": "Only the last tile counts in dK: each step overwrites the sum. Add to it.",
    "scale_in_dv": "dV has the scale as a factor. Only the scores are scaled: dV = Pᵀ dO.",
}
_ONE_KEY_EARLY = (
    "The loop over keys ends one key early. The tile's last query sees the key at its own position too, and that key "
    "may be the first of a tile: range does not reach its end."
)
_OF_QUERIES = {
    "scale_missing_in_gradients": "The scale is missing in dQ: dQ = scale · dS K, because S = scale · Q Kᵀ.",
    "dq_from_probabilities": "dQ is computed from P. It is scale · dS K.",
    "dq_transposed": "dS is transposed in dQ = scale · dS K: the sum runs over the queries of the tile, where it runs "
    "over the keys.",
    "dq_of_values": "dQ is dS V. It is scale · dS K.",
    "loop_ends_one_key_early": _ONE_KEY_EARLY,
    "loop_ends_one_key_early__at_the_position": _ONE_KEY_EARLY,
}

EXCHANGED = Slip("results_exchanged", "dK and dV are returned in each other's place.")
_OF_ROWS = "are taken from the first rows in every tile. Each tile has rows of its own: slice them like the queries."
_PLACES_OF_KEYS = {
    "rows_of_the_first_tile": f"L and Δ {_OF_ROWS}",
    "rows_of_the_first_tile__in_log_sum": f"The numbers of L {_OF_ROWS}",
    "rows_of_the_first_tile__in_delta": f"The numbers of Δ {_OF_ROWS}",
    "scale_by_length__of_the_block": "The scale is 1/√(keys of the block). It is 1/√head_dim.",
    "first_key_forgotten": "The block's keys are numbered from 0. They stand at first_key, first_key + 1, ...",
    "block_for_key_length": "The block's length stands where key_length belongs: query i is at position i + key_length "
    "- query_length, whatever block it meets.",
}
_PLACES_OF_QUERIES = {
    "first_query_forgotten": "The tile's queries are numbered from 0. They have the numbers first_query, "
    "first_query + 1, ...",
    "rows_for_query_length": "The tile's rows stand where query_length belongs: query i is at position i + key_length "
    "- query_length, whatever tile it is in.",
    "tiles_numbered_alike": "The keys are numbered from 0 in every tile. A tile's first key has the number at which "
    "the tile begins.",
}
KEYS_IN_PYTORCH = (
    *(Slip(name, sentence) for name, sentence in {**_OF_A_TILE, **_IN_BASE_2, **_OF_KEYS, **_PLACES_OF_KEYS}.items()),
    EXCHANGED,
)
QUERIES_IN_PYTORCH = tuple(
    Slip(name, sentence) for name, sentence in {**_OF_A_TILE, **_IN_BASE_2, **_OF_QUERIES, **_PLACES_OF_QUERIES}.items()
)

_WHERE = {"keys": "In the kernel of dK and dV: ", "queries": "In the kernel of dQ: "}
_PLURAL = {
    "query": "Q",
    "key": "K",
    "value": "V",
    "output_gradient": "dO",
    "log_sum_exp": "L",
    "delta": "Δ",
}
_GRADIENT_STRIDES = {
    "column_stride_ignored": "dO is read as if its last stride were 1. A gradient may be expanded or transposed: "
    "multiply the columns by output_gradient_column_stride.",
    "gradient_read_as_contiguous": "dO is read as if it were contiguous. It has three strides of its own.",
    "gradient_read_by_the_querys_strides": "dO is read by the strides of the query. It has three of its own.",
}


_ANOTHERS_STRIDES = {
    "values_read_by_the_keys_strides": "V is read by a stride of K. Each tensor has strides of its own.",
    "keys_read_by_the_querys_strides": "K is read by a stride of Q. Each tensor has strides of its own.",
}

# What is easily right in one kernel and wrong in the other; whatever else goes wrong is copied from one to the other.
_IN_ONE_KERNEL = (
    "scale_missing_in_scores",
    "scale_twice",
    "log_sum_missing",
    "log_sum_natural",
    "log2e_missing",
    "natural_exp",
    "log_sum_by_keys",
    "no_causal_mask",
    "no_causal_mask__in_tiles",
    "masked_after_the_exponential",
    "causal_misaligned",
    "causal_misaligned__in_tiles",
    "causal_off_by_one",
    "sees_the_next_key",
    "delta_missing",
    "delta_added",
    "delta_by_keys",
    "hidden_pairs_counted",
    "keys_used_as_values",
    "loop_ignores_offset",
    "diagonal_tile_skipped",
    "only_last_tile",
    "partial_tile_skipped",
)


def _in_kernels():
    both = {**_OF_A_TILE, **_IN_BASE_2}
    for name, sentence in both.items():
        yield Slip(name, sentence)
    yield Slip(
        "scale_missing_in_gradients",
        "The scale is missing in dQ and dK: S = scale · Q Kᵀ, so both have it as a factor.",
    )
    yield Slip(
        "scale_of_the_padded_dimension",
        "The scale is computed from the tile's columns, a power of two. It is 1/√head_dim, whatever the tile has.",
    )
    yield Slip(
        "delta_scaled", "Δ has a factor 1/√head_dim. The scale belongs to the scores alone, and O has none of it."
    )
    for one in ("", "__dk", "__dv", "__dq"):
        yield Slip(
            f"accumulated_in_16_bits{one}",
            "Sums are kept in 16 bits. Before the scale those of dQ and dK are larger than the results, those of dV "
            "may be so on the way, and beyond 65,504 a float16 is infinite: keep sums in float32, and round once, when "
            "you store.",
            alone=bool(one),
        )
    yield Slip("delta_averaged", "Δ is a mean over head_dim. It is the sum of O ∘ dO.")
    yield Slip("delta_of_the_query", "Δ is computed from Q and dO. It is the sum of O ∘ dO.")
    for loop, where in _WHERE.items():
        for name in _IN_ONE_KERNEL:
            yield Slip(f"{name}__{loop}", where + both[name], alone=True)
    for name, sentence in _OF_KEYS.items():
        yield Slip(f"{name}__keys", sentence)
    for name, sentence in _OF_QUERIES.items():
        yield Slip(f"{name}__queries", sentence)
    yield Slip(
        "tail_not_masked__queries",
        "The keys past the end of the last tile have P = exp(0 - L), which overflows where L is far below zero, and "
        "infinity times a key of zeros is NaN. Give these pairs P = 0.",
    )
    yield Slip(
        "log_sum_past_the_end__keys",
        "Queries past the end of the last tile have L = -inf, and S - L is infinite there: infinity times a dO of 0 is "
        "NaN. Give these pairs P = 0, or their L another number.",
    )
    yield EXCHANGED
    for name, said in _PLURAL.items():
        yield Slip(f"head_forgotten__{name}", f"Head 0 of {said} is used for every head: its offset is missing.")
        for loop, where in _WHERE.items():
            yield Slip(f"head_forgotten__{name}_{loop}", f"{where}Head 0 of {said} is used for every head.", alone=True)
    for name, sentence in _GRADIENT_STRIDES.items():
        yield Slip(name, sentence)
        if name == "gradient_read_by_the_querys_strides":
            yield from (Slip(f"{name}__{which}", sentence) for which in ("all", "rows", "heads"))
        for loop, where in _WHERE.items():
            yield Slip(f"{name}__{loop}", where + sentence, alone=True)
            if name == "gradient_read_by_the_querys_strides":
                for which in ("all", "rows", "heads"):
                    yield Slip(f"{name}__{which}_{loop}", where + sentence, alone=True)
    for name, sentence in _ANOTHERS_STRIDES.items():
        for part in ("", "__rows", "__heads"):
            yield Slip(f"{name}{part}", sentence)
            for loop, where in _WHERE.items():
                yield Slip(f"{name}{part}{'_' if part else '__'}{loop}", where + sentence, alone=True)
    yield Slip(
        "grid_by_the_other_length__keys",
        "The grid of the kernel of dK and dV is counted by the queries. Its programs are blocks of keys: "
        "triton.cdiv(key_length, 64).",
    )
    yield Slip(
        "grid_by_the_other_length__queries",
        "The grid of the kernel of dQ is counted by the keys. Its programs are tiles of queries: "
        "triton.cdiv(query_length, 64).",
    )
    for loop, where in _WHERE.items():
        yield Slip(
            f"grid_rounded_down__{loop}",
            f"{where}the grid is rounded down, and no program computes the last rows. Use triton.cdiv.",
        )


IN_KERNELS = tuple(_in_kernels())


def foreseen(slips: Slips, key_length: int, known: tuple[Slip, ...], results: tuple | None) -> tuple | None:
    """The results, or None where a slip meets one key alone and leaves no NaN.

    P is 1 there and dS is 0 but for rounding, which no model foresees; a NaN it does foresee.
    """
    if results is None or key_length > 1 or not slips(*(slip.id for slip in known)):
        return results
    return results if any(bool(gradient.isnan().any()) for gradient in results) else None
