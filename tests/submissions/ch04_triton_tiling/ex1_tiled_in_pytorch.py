"""Wrong answers to exercise 4.1, and unusual right ones."""

from tests.submissions.edits import changed

KEY_LOOP = "for first_key in range(0, key.shape[0], key_rows):"


NAIVE = """# Exercise 4.1 · Tiled attention in PyTorch
def tiled_attention(query, key, value, query_rows, key_rows):
    scores = query @ key.T / math.sqrt(query.shape[1])
    return torch.softmax(scores, dim=1) @ value
"""


ROWS_AT_ONCE = """# Exercise 4.1 · Tiled attention in PyTorch
def tiled_attention(query, key, value, query_rows, key_rows):
    output = torch.empty_like(query)
    for first in range(0, query.shape[0], query_rows):
        scores = query[first:first + query_rows] @ key.T / math.sqrt(query.shape[1])
        output[first:first + query_rows] = torch.softmax(scores, dim=1) @ value
    return output
"""


WRONG = {
    "maximum_of_the_tile": changed(
        "4.1",
        ("torch.full((query_tile.shape[0], 1), -math.inf)", "torch.tensor(-math.inf)"),
        ("scores.amax(dim=1, keepdim=True)", "scores.max()"),
    ),
    "scale_missing__and_all_whole_tiles": changed(
        "4.1",
        ("scores = scale * (query_tile @ key_tile.T)", "scores = query_tile @ key_tile.T"),
        ("range(0, key.shape[0], key_rows)", "range(0, max(key.shape[0] - key_rows + 1, 1), key_rows)"),
    ),
    "tail_keys_dropped__all_but_one_tile": changed(
        "4.1", ("range(0, key.shape[0], key_rows)", "range(0, max(key.shape[0] - key_rows + 1, 1), key_rows)")
    ),
    "no_running_max": changed(
        "4.1",
        ("weights = torch.exp(scores - new_max)", "weights = torch.exp(scores)"),
        ("rescale = torch.exp(running_max - new_max)", "rescale = torch.ones_like(new_max)"),
    ),
    "maximum_not_updated": changed("4.1", ("running_max = new_max", "running_max = running_max")),
    "maximum_starts_at_zero": changed(
        "4.1", ("torch.full((query_tile.shape[0], 1), -math.inf)", "torch.zeros(query_tile.shape[0], 1)")
    ),
    "divided_at_every_tile": changed(
        "4.1",
        (
            "            running_max = new_max",
            "            accumulator = accumulator / running_sum\n            running_max = new_max",
        ),
    ),
    "nan_from_the_start": changed("4.1", ("torch.exp(running_max - new_max)", "torch.exp(new_max - running_max)")),
    "not_divided": changed("4.1", ("accumulator / running_sum", "accumulator")),
    "accumulator_not_rescaled": changed("4.1", ("accumulator * rescale + weights", "accumulator + weights")),
    "sum_not_rescaled": changed("4.1", ("running_sum * rescale + weights", "running_sum + weights")),
    "nothing_rescaled": changed("4.1", ("rescale = torch.exp(running_max - new_max)", "rescale = 1.0")),
    "scale_missing": changed("4.1", ("scores = scale * (query_tile @ key_tile.T)", "scores = query_tile @ key_tile.T")),
    "scale_twice": changed(
        "4.1",
        (
            "query_tile = query[first_query : first_query + query_rows]",
            "query_tile = scale * query[first_query : first_query + query_rows]",
        ),
    ),
    "normalised_per_tile": changed(
        "4.1",
        (
            "accumulator = accumulator * rescale + weights @ value_tile",
            "accumulator = accumulator + torch.softmax(scores, dim=1) @ value_tile",
        ),
        ("accumulator / running_sum", "accumulator"),
    ),
    "last_tile_skipped": changed("4.1", (KEY_LOOP, "for first_key in range(0, key.shape[0] - key_rows, key_rows):")),
    "last_tile_skipped__counted": changed(
        "4.1", (KEY_LOOP, "for first_key in [key_rows * step for step in range(-(-key.shape[0] // key_rows) - 1)]:")
    ),
    "tail_keys_dropped": changed(
        "4.1", (KEY_LOOP, "for first_key in range(0, key.shape[0] - key_rows + 1, key_rows):")
    ),
    "tail_keys_dropped__where_a_sum_of_0_is_taken_for_more": changed(
        "4.1",
        (KEY_LOOP, "for first_key in range(0, key.shape[0] - key_rows + 1, key_rows):"),
        ("/ running_sum", "/ running_sum.clamp(min=1e-30)"),
    ),
    "scale_twice__root_missing": changed("4.1", ("1 / math.sqrt(", "1 / (")),
    "maximum_forgets_the_old": changed(
        "4.1", ("torch.maximum(running_max, scores.amax(dim=1, keepdim=True))", "scores.amax(dim=1, keepdim=True)")
    ),
    "rows_counted_by_keys": changed(
        "4.1", ("range(0, query.shape[0], query_rows)", "range(0, key.shape[0], query_rows)")
    ),
    "scale_missing__and_tail_keys_dropped": changed(
        "4.1",
        ("scores = scale * (query_tile @ key_tile.T)", "scores = query_tile @ key_tile.T"),
        (KEY_LOOP, "for first_key in range(0, key.shape[0] // key_rows * key_rows, key_rows):"),
    ),
    "query_tail_unwritten__of_zeros": changed(
        "4.1",
        ("torch.empty_like(query)", "torch.zeros_like(query)"),
        ("range(0, query.shape[0], query_rows)", "range(0, query.shape[0] - query_rows + 1, query_rows)"),
    ),
    "state_not_started_anew": changed(
        "4.1",
        (
            "    for first_query in range",
            "    running_max = torch.full((query_rows, 1), -math.inf)\n"
            "    running_sum = torch.zeros(query_rows, 1)\n"
            "    accumulator = query.new_zeros(query_rows, query.shape[1])\n"
            "    for first_query in range",
        ),
        (
            "        running_max = torch.full((query_tile.shape[0], 1), -math.inf)\n"
            "        running_sum = torch.zeros(query_tile.shape[0], 1)\n"
            "        accumulator = torch.zeros_like(query_tile)  # [rows, head_dim], not yet divided by the sum\n",
            "        running_max, running_sum = (kept[: len(query_tile)] for kept in (running_max, running_sum))\n"
            "        accumulator = accumulator[: len(query_tile)]\n",
        ),
    ),
    "accumulator_not_rescaled__and_a_finite_start": changed(
        "4.1", ("-math.inf)", "-1e5)"), ("accumulator * rescale + ", "accumulator + ")
    ),
    "transposed_key": changed("4.1", ("key_tile.T", "key_tile.reshape(key_tile.shape[1], key_tile.shape[0])")),
    "writes_the_score_matrix": NAIVE,
    "a_row_of_scores": ROWS_AT_ONCE,
}


KEYS_OUTSIDE = """# Exercise 4.1 · Tiled attention in PyTorch
def tiled_attention(query, key, value, query_rows, key_rows):
    length, head_dim = query.shape
    output = torch.zeros_like(query)
    top, total = torch.full((length, 1), -math.inf), torch.zeros(length, 1)
    for keys, values in zip(key.split(key_rows), value.split(key_rows)):
        for first in range(0, length, query_rows):
            part = slice(first, first + query_rows)
            scores = query[part] @ keys.T * head_dim ** -0.5
            new_top = torch.maximum(top[part], scores.amax(1, keepdim=True))
            weights = torch.exp(scores - new_top)
            old = total[part] * torch.exp(top[part] - new_top)
            total[part] = old + weights.sum(1, keepdim=True)
            output[part] = (output[part] * old + weights @ values) / total[part]
            top[part] = new_top
    return output
"""


MERGED_PARTS = """# Exercise 4.1 · Tiled attention in PyTorch
def one_tile(query, key, value):
    scores = query @ key.T / query.shape[1] ** 0.5
    return torch.softmax(scores, 1) @ value, torch.logsumexp(scores, 1, keepdim=True)

def tiled_attention(query, key, value, query_rows, key_rows):
    rows = []
    for tile in query.split(query_rows):
        output, log_sum = one_tile(tile, key[:key_rows], value[:key_rows])
        for first in range(key_rows, len(key), key_rows):
            other, other_log = one_tile(tile, key[first:first + key_rows], value[first:first + key_rows])
            together = torch.logaddexp(log_sum, other_log)
            output = output * torch.exp(log_sum - together) + other * torch.exp(other_log - together)
            log_sum = together
        rows.append(output)
    return torch.cat(rows)
"""


UNUSUAL = {
        "keys in the outer loop": KEYS_OUTSIDE,
        "a softmax per tile, merged by log-sum-exp": MERGED_PARTS,
        "base two": changed(
            "4.1", ("torch.exp(", "torch.exp2("), ("scale = 1 / math", "scale = math.log2(math.e) / math")
        ),
    }


WRONG |= {
    "maximum_of_the_first_tile": changed(
        "4.1",
        (
            "torch.maximum(running_max, scores.amax(dim=1, keepdim=True))",
            "scores.amax(dim=1, keepdim=True) if first_key == 0 else running_max",
        ),
    ),
}


WRONG |= {
    "finite_for_minus_infinity": changed(
        "4.1",
        ('-math.inf', '-1e6'),
    ),
}


SCALED = "scores = scale * (query_tile @ key_tile.T)"
OUTPUT = "output = torch.empty_like(query)"
WRONG |= {
    # The numbers are right where each tile of an input is read once; else later tiles read what was written.
    "modified_input": changed("4.1", (OUTPUT, "output = query")),
    "modified_input__key_scaled_in_place": changed(
        "4.1", (SCALED, "key_tile *= scale\n            scores = query_tile @ key_tile.T")
    ),
    "modified_input__output_over_the_values": changed(
        "4.1", (OUTPUT, "output = value if value.shape == query.shape else torch.empty_like(query)")
    ),
}
