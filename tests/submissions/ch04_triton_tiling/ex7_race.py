"""Wrong answers to exercise 4.7, and unusual right ones."""

from tests.submissions.edits import changed

WRONG = {
    # On an H200 452 µs, where base 2 takes 333 and the baseline 393.
    "too_slow": changed("4.7", ("tl.exp2", "tl.exp"), ("math.log2(math.e) / math.sqrt", "1 / math.sqrt")),
    "accumulator_not_rescaled": changed(
        "4.7",
        ("accumulator * rescale[:, None])", "accumulator)"),
        ('BLOCK_N": 64', 'BLOCK_N": 128'),
    ),
    "scale_missing": changed("4.7", ("math.log2(math.e) / math.sqrt(head_dim)", "math.log2(math.e)")),
    "causal_misaligned": changed("4.7", ("offset = key_length - query_length", "offset = 0")),
    "tail_keys_scored": changed(
        "4.7",
        ("visible = (keys < key_length)[None, :]", "visible = (keys >= 0)[None, :]"),
        ('BLOCK_N": 64', 'BLOCK_N": 128'),
    ),
    "writes_the_score_matrix": changed(
        "4.7",
        (
            "    output = torch.empty(query.shape, dtype=query.dtype, device=query.device)\n",
            "    output = torch.empty(query.shape, dtype=query.dtype, device=query.device)\n"
            "    scores = torch.empty(batch, heads, query_length, key_length, device=query.device)\n",
        ),
    ),
}


FAST_KEYS_TURNED = changed(
    "4.7",
    (
        "key_pointers = key_pointer + keys[:, None] * key_stride + columns[None, :]",
        "key_pointers = key_pointer + keys[None, :] * key_stride + columns[:, None]",
    ),
    (
        "key_tile = tl.load(key_pointers, mask=present, other=0.0)",
        "key_tile = tl.load(key_pointers, mask=(keys < key_length)[None, :], other=0.0)",
    ),
    ("tl.dot(query, tl.trans(key_tile))", "tl.dot(query, key_tile)"),
)


UNUSUAL = {
        "keys turned by their pointers": FAST_KEYS_TURNED,
        "times the reciprocal of the sum": changed(
            "4.7", ("accumulator / total[:, None]", "accumulator * (1.0 / total[:, None])")
        ),
        "masked throughout": changed(
            "4.7",
            (
                "    for first_key in range(0, whole_end, BLOCK_N):",
                "    whole_end = end * 0\n    for first_key in range(0, whole_end, BLOCK_N):",
            ),
        ),
        "natural base": changed(
            "4.7",
            ("tl.exp2(", "tl.exp("),
            ("math.log2(math.e) / math.sqrt(head_dim)", "1.0 / math.sqrt(head_dim)"),
        ),
        "programs in order": changed("4.7", ("tile = tl.num_programs(0) - 1 - tile", "tile = tile + 0")),
    }


WRONG |= {
    "accumulator_not_rescaled__in_its_own_tiles": changed("4.7", ("accumulator * rescale[:, None])", "accumulator)")),
    "tail_keys_scored__in_its_own_tiles": changed(
        "4.7", ("visible = (keys < key_length)[None, :]", "visible = (keys >= 0)[None, :]")
    ),
    "natural_exp": changed("4.7", ("tl.exp2", "tl.exp")),
    "log2e_missing": changed("4.7", ("math.log2(math.e) / math.sqrt(head_dim)", "1.0 / math.sqrt(head_dim)")),
    "diagonal_in_the_first_loop": changed("4.7", ("first_query + offset + 1", "first_query + offset + BLOCK_M")),
    "second_loop_missing": changed("4.7", ("range(whole_end, end, BLOCK_N)", "range(whole_end, whole_end, BLOCK_N)")),
    "whole_tiles_counted_twice": changed("4.7", ("range(whole_end, end, BLOCK_N)", "range(0, end, BLOCK_N)")),
    "maximum_not_scaled": changed("4.7", ("tl.max(scores, axis=1) * scale_log2", "tl.max(scores, axis=1)")),
    "rescale_not_scaled": changed(
        "4.7",
        ("tl.max(scores, axis=1) * scale_log2", "tl.max(scores, axis=1)"),
        ("scores * scale_log2 - reference_max[:, None]", "(scores - reference_max[:, None]) * scale_log2"),
    ),
    "empty_row_nan": changed(
        "4.7", ('tl.where(new_max == float("-inf"), 0.0, new_max)', "new_max")
    ),
    "scale_missing__and_the_diagonal": changed(
        "4.7",
        ("math.log2(math.e) / math.sqrt(head_dim)", "math.log2(math.e)"),
        ("keys[None, :] <= positions[:, None]", "keys[None, :] < positions[:, None]"),
    ),
}
