"""Wrong answers to exercise 10.3, and unusual right ones."""

from tests.submissions.edits import changed

GUARD = "reference = torch.where(log_sum_exp == -math.inf, 0.0, log_sum_exp)"
MASK = "scores = scores.masked_fill(key_positions[None, :] > positions[:, None], -math.inf)"
LOOP = "for first_query in range(0, query_length, query_rows):"
DV = "value_gradient += probabilities.T @ output_gradient[tile]"
DK = "key_gradient += scale * (score_gradients.T @ query[tile])"
DS = "score_gradients = probabilities * (probability_gradients - delta[tile, None])"

WHOLE = """# Exercise 10.3 · dK and dV of one block of keys
def key_block_gradients(
    query, keys, values, output_gradient, log_sum_exp, delta, first_key, key_length, causal, query_rows
):
    scale = query.shape[1] ** -0.5
    scores = scale * query @ keys.T
    if causal:
        positions = torch.arange(query.shape[0]) + key_length - query.shape[0]
        scores = scores.masked_fill((first_key + torch.arange(keys.shape[0]))[None] > positions[:, None], -math.inf)
    p = torch.exp(scores - log_sum_exp[:, None]).nan_to_num(nan=0.0)
    ds = p * (output_gradient @ values.T - delta[:, None])
    return scale * ds.T @ query, p.T @ output_gradient
"""

WRONG = {
    "first_key_forgotten": changed("10.3", ("key_positions = first_key + torch", "key_positions = torch")),
    "masked_after_the_exponential": changed(
        "10.3",
        ("scores = scores.masked_fill(", "hidden = torch.zeros_like(scores).masked_fill("),
        (", -math.inf)\n        prob", ", 1)\n        prob"),
        (
            "reference[tile, None])  # [rows, block]\n        value",
            "reference[tile, None])\n"
            "        probabilities = probabilities * (1 - hidden) if causal else probabilities\n        value",
        ),
    ),
    "delta_missing": changed("10.3", (DS, "score_gradients = probabilities * probability_gradients")),
    "delta_not_weighted": changed(
        "10.3", (DS, "score_gradients = probabilities * probability_gradients - delta[tile, None]")
    ),
    "delta_of_the_tile": changed(
        "10.3", (DS, DS.replace("delta[tile, None]", "(probabilities * probability_gradients).sum(1, keepdim=True)"))
    ),
    "first_key_forgotten": changed("10.3", ("first_key + torch.arange(keys.shape[0])", "torch.arange(keys.shape[0])")),
    "scale_inverted": changed("10.3", ("1 / math.sqrt(head_dim)", "math.sqrt(head_dim)")),
    "delta_added": changed("10.3", (DS, DS.replace(" - delta", " + delta"))),
    "scale_missing_in_gradients": changed("10.3", (DK, "key_gradient += score_gradients.T @ query[tile]")),
    "log_sum_natural": changed(
        "10.3",
        (
            "torch.exp(scores - reference[tile, None])",
            "torch.exp2(scores * 1.4426950408889634 - reference[tile, None])",
        ),
    ),
    "scale_missing_in_scores": changed(
        "10.3", ("scores = scale * (query[tile] @ keys.T)", "scores = query[tile] @ keys.T")
    ),
    "scale_twice": changed(
        "10.3", (DS, "score_gradients = scale * probabilities * (probability_gradients - delta[tile, None])")
    ),
    "scale_in_dv": changed("10.3", (DV, "value_gradient += scale * (probabilities.T @ output_gradient[tile])")),
    "log_sum_missing": changed("10.3", ("torch.exp(scores - reference[tile, None])", "torch.exp(scores)")),
    "normalised_over_the_tile": changed(
        "10.3", ("torch.exp(scores - reference[tile, None])", "torch.softmax(scores, dim=1).nan_to_num(nan=0.0)")
    ),
    "dv_from_score_gradients": changed(
        "10.3", (DV, ""), (DK, DK + "\n        value_gradient += score_gradients.T @ output_gradient[tile]")
    ),
    "dk_from_probabilities": changed("10.3", (DK, "key_gradient += scale * (probabilities.T @ query[tile])")),
    "no_causal_mask": changed("10.3", (MASK, "pass")),
    "causal_misaligned": changed("10.3", (" + key_length - query_length", "")),
    "causal_off_by_one": changed("10.3", (MASK, MASK.replace(" > ", " >= "))),
    "sees_the_next_key": changed("10.3", (MASK, MASK.replace("positions[:, None]", "positions[:, None] + 1"))),
    "only_last_tile": changed("10.3", (DK, DK.replace("+=", "=")), (DV, DV.replace("+=", "="))),
    "partial_tile_skipped": changed(
        "10.3", (LOOP, "for first_query in range(0, query_length - query_rows + 1, query_rows):")
    ),
    "blind_rows_nan": changed("10.3", (GUARD, "reference = log_sum_exp")),
    "keys_used_as_values": changed("10.3", ("output_gradient[tile] @ values.T", "output_gradient[tile] @ keys.T")),
    "results_exchanged": changed(
        "10.3", ("return key_gradient, value_gradient", "return value_gradient, key_gradient")
    ),
    "all_queries_at_once": WHOLE,
    "causal_misaligned__and_scale_missing": changed(
        "10.3", (DK, "key_gradient += score_gradients.T @ query[tile]"), (" + key_length - query_length", "")
    ),
    "delta_missing__and_scale_missing": changed(
        "10.3",
        (DS, "score_gradients = probabilities * probability_gradients"),
        (DK, "key_gradient += score_gradients.T @ query[tile]"),
    ),
    "hidden_scores_finite": changed("10.3", (MASK, MASK.replace("-math.inf", "-1e9"))),
    "hidden_scores_finite__10000": changed("10.3", (MASK, MASK.replace("-math.inf", "-1e4"))),
    "hidden_scores_zero": changed("10.3", (MASK, MASK.replace("-math.inf", "0.0"))),
    "negative_log_sum_as_zero": changed("10.3", (GUARD, "reference = log_sum_exp.clamp(min=0.0)")),
    "rows_of_the_first_tile": changed(
        "10.3",
        ("reference[tile, None]", "reference[: len(scores), None]"),
        (DS, DS.replace("tile, ", ": len(scores), ")),
    ),
    "rows_of_the_first_tile__in_delta": changed("10.3", (DS, DS.replace("tile, ", ": len(scores), "))),
    "scale_by_length__of_the_block": changed("10.3", ("math.sqrt(head_dim)", "math.sqrt(len(keys))")),
    "only_last_tile__of_dv": changed("10.3", (DV, DV.replace("+=", "="))),
    "mask_of_all_queries": changed(
        "10.3",
        (
            LOOP,
            "all_positions = torch.arange(query_length) + key_length - query_length\n"
            "    hidden = key_positions[None, :] > all_positions[:, None]\n    " + LOOP,
        ),
        (MASK, "scores = scores.masked_fill(hidden[tile], -math.inf)"),
    ),
}

SPLIT = """# Exercise 10.3 · dK and dV of one block of keys
def key_block_gradients(
    query, keys, values, output_gradient, log_sum_exp, delta, first_key, key_length, causal, query_rows
):
    length, head_dim = query.shape
    dk, dv = torch.zeros(keys.shape), torch.zeros(values.shape)
    here = torch.arange(first_key, first_key + len(keys))[:, None]
    there = torch.arange(length) + (key_length - length)
    for q, g, l, d, p in zip(*(x.split(query_rows) for x in (query, output_gradient, log_sum_exp, delta, there))):
        weights = torch.exp(keys @ q.T / math.sqrt(head_dim) - l)  # [block, rows]: transposed from the start
        weights = torch.where((here <= p) | (not causal), weights, torch.zeros(()))
        dv = torch.addmm(dv, weights, g)
        dk = torch.addmm(dk, weights * (values @ g.T - d), q)
    return dk / math.sqrt(head_dim), dv
"""

UNUSUAL = {
    "transposed from the start": SPLIT,
    "base two, and tiles that nobody sees are skipped": changed(
        "10.3",
        (
            LOOP,
            LOOP + "\n        if causal and first_query + query_rows + key_length - query_length <= first_key:\n"
            "            continue",
        ),
        ("torch.exp(scores - reference[tile, None])", "torch.exp2((scores - reference[tile, None]) / math.log(2))"),
    ),
    "the last tile first": changed("10.3", (LOOP, "for first_query in reversed(range(0, query_length, query_rows)):")),
    "begins at the first query that sees the block": changed(
        "10.3",
        (
            LOOP,
            "start = max(0, first_key + query_length - key_length) if causal else 0\n"
            "    for first_query in range(start, query_length, query_rows):",
        ),
        (GUARD, "reference = log_sum_exp"),
    ),
    "the least float32 for hidden scores": changed(
        "10.3", (MASK, MASK.replace("-math.inf", "torch.finfo(scores.dtype).min"))
    ),
}


TILE = "        tile = slice(first_query, min(first_query + query_rows, query_length))\n"
WRONG |= {
    "last_tile_counted_twice": changed(
        "10.3", (TILE, f"        first_query = max(0, min(first_query, query_length - query_rows))\n{TILE}")
    ),
    "left_at_the_first_hidden_tile": changed(
        "10.3",
        (
            TILE,
            f"{TILE}        if causal and tile.stop - 1 + key_length - query_length < first_key:\n            break\n",
        ),
    ),
    "last_query_missing": changed("10.3", (TILE, TILE.replace("query_length)", "query_length - 1)"))),
    "last_query_missing__of_the_range": changed(
        "10.3", ("range(0, query_length, query_rows)", "range(0, query_length - 1, query_rows)")
    ),
    "last_query_missing__of_each_tile": changed(
        "10.3", (TILE, TILE.replace("+ query_rows,", "+ query_rows - 1,"))
    ),
    "delta_missing__and_last_query_missing": changed(
        "10.3",
        (DS, "score_gradients = probabilities * probability_gradients"),
        (TILE, TILE.replace("+ query_rows,", "+ query_rows - 1,")),
    ),
}


def _beginning_at(start):
    """The course's answer whose loop over queries begins there where the mask is causal."""
    begin = f"begin = max(0, {start}) if causal else 0\n    "
    return changed("10.3", (LOOP, begin + LOOP.replace("range(0,", "range(begin,")))


WRONG |= {
    "loop_offset_turned_round": _beginning_at("first_key + key_length - query_length"),
    "loop_offset_turned_round__aligned": _beginning_at(
        "(first_key + key_length - query_length) // query_rows * query_rows"
    ),
    "scale_twice__by_a_scaled_query": changed(
        "10.3",
        ("    scale = 1 / math.sqrt(head_dim)\n", "    scale = 1 / math.sqrt(head_dim)\n    query = query * scale\n"),
        ("scale * (query[tile] @ keys.T)", "query[tile] @ keys.T"),
    ),
}
UNUSUAL |= {"begins where the block is first seen": _beginning_at("first_key + query_length - key_length")}
WRONG |= {
    f"log_sum_bounded_below__{bound}": changed("10.3", (GUARD, f"reference = log_sum_exp.clamp(min=-{bound})"))
    for bound in ("1e3", "1e4", "1e5")
}


def _left_out_where(condition, leave="continue"):
    """The course's answer without the tiles of queries of which this is true where the mask is causal."""
    return changed("10.3", (TILE, f"{TILE}        if causal and {condition}:\n            {leave}\n"))


FIRST_POSITION = "first_query + key_length - query_length"
WRONG |= {
    "partial_tile_skipped__but_the_first": changed(
        "10.3", (LOOP, LOOP.replace("query_length,", "max(1, query_length // query_rows) * query_rows,"))
    ),
    "last_tile_left_out": changed("10.3", (LOOP, LOOP.replace("query_length,", "query_length - query_rows,"))),
    "only_first_tile": changed("10.3", (TILE, "        tile = slice(0, min(query_rows, query_length))\n")),
    "steps_of_one_size": changed("10.3", (LOOP, LOOP.replace("query_rows)", "16)"))),
    "tiles_of_one_size": changed("10.3", (TILE, TILE.replace("+ query_rows", "+ 16"))),
    "partly_hidden_tile_left_out": _left_out_where(f"{FIRST_POSITION} < first_key"),
    "partly_hidden_tile_left_out__with_all_behind_it": _left_out_where(f"{FIRST_POSITION} < first_key", "break"),
    "partly_hidden_tile_left_out__of_one_query": _left_out_where(
        "tile.stop - 1 + key_length - query_length <= first_key"
    ),
    "partly_hidden_tile_left_out__rounded_up": _beginning_at(
        "-(-(first_key + query_length - key_length) // query_rows) * query_rows"
    ),
    "loop_begins_late": _beginning_at("first_key + query_length - key_length + 1"),
    "loop_begins_late__by_a_tile": _beginning_at(
        "(max(0, first_key + query_length - key_length) // query_rows + 1) * query_rows"
    ),
}
UNUSUAL |= {"without hidden tiles": _left_out_where("tile.stop - 1 + key_length - query_length < first_key")}
