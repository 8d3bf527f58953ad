"""Wrong answers to exercise 4.5, and unusual right ones."""

from tests.submissions.ch04_triton_tiling.shared import (
    END,
    LAST_PROGRAMS_FIRST,
    NATURAL_BASE,
    POSITIONS,
    of_causal_kernels,
    of_every_kernel,
    of_narrow_numbers,
)
from tests.submissions.edits import changed, in_tf32

COLUMNS_MASKED = " & (columns < head_dim)[None, :]"


WRONG = {
    "hidden_finite": changed("4.5", ('tl.where(visible, scores, float("-inf"))', "tl.where(visible, scores, -1.0e9)")),
    **of_every_kernel("4.5"),
    **of_causal_kernels("4.5"),
    "hidden_scored_zero": changed("4.5", ('scores, float("-inf"))', "scores, 0.0)")),
    "empty_row_uniform": changed("4.5", ('scores, float("-inf"))', "scores, -1e30)")),
    "no_causal_mask": changed("4.5", ("CAUSAL=causal", "CAUSAL=False")),
    "causal_off_by_one": changed("4.5", ("<= positions[:, None]", "< positions[:, None]")),
    "causal_off_by_one__unguarded": changed(
        "4.5",
        ("<= positions[:, None]", "< positions[:, None]"),
        ('tl.where(new_max == float("-inf"), 0.0, new_max)', "new_max"),
    ),
    "sees_the_next_key": changed("4.5", ("<= positions[:, None]", "<= positions[:, None] + 1")),
    "accumulator_not_rescaled": changed("4.5", ("accumulator * rescale[:, None] + product", "accumulator + product")),
    "natural_exp": changed("4.5", ("tl.exp2(", "tl.exp(")),
    "log2e_missing": changed("4.5", ("math.log2(math.e) / math.sqrt", "1 / math.sqrt")),
    "maximum_starts_at_zero": changed(
        "4.5", ('tl.full([BLOCK_M], float("-inf"), tl.float32)', "tl.zeros([BLOCK_M], tl.float32)")
    ),
    "tail_keys_scored": changed("4.5", ("visible = (keys < key_length)[None, :]", "visible = (keys >= 0)[None, :]")),
    "query_tail_unwritten": changed("4.5", ("triton.cdiv(query_length, 64)", "query_length // 64")),
    "scale_of_the_padding": changed(
        "4.5", ("math.log2(math.e) / math.sqrt(head_dim)", "math.log2(math.e) / math.sqrt(block_d)")
    ),
    "causal_misaligned": changed(
        "4.5", (POSITIONS, "positions = rows"), (END, "end = tl.minimum(key_length, first_query + BLOCK_M)")
    ),
    "loop_end_ignores_offset": changed("4.5", (END, "end = tl.minimum(key_length, first_query + BLOCK_M)")),
    "empty_row_nan": changed("4.5", ("tl.where(running_sum == 0.0, 1.0, running_sum)", "running_sum")),
    "strides_ignored": changed(
        "4.5",
        (
            "head = tl.program_id(1).to(tl.int64)",
            "head = tl.program_id(1).to(tl.int64)\n"
            "    query_stride = head_dim\n    key_stride = head_dim\n    value_stride = head_dim\n"
            "    query_head_stride = query_length * head_dim\n"
            "    key_head_stride = key_length * head_dim\n    value_head_stride = key_head_stride",
        ),
    ),
    "diagonal_not_masked": changed("4.5", ("visible & (keys[None, :] <= positions[:, None])", "visible")),
    "tail_keys_scored__without_causal": changed(
        "4.5",
        ("visible = (keys < key_length)[None, :]", "visible = keys[None, :] >= 0"),
        ("visible & (keys[None, :] <= positions[:, None])", "keys[None, :] <= positions[:, None]"),
    ),
    # Every mask is right: what is read outside a tensor is two tensors' strides, and a missing rescale hides which.
    "out_of_bounds__by_strides_of_query_and_no_rescale": changed(
        "4.5",
        ("*key.stride()[:2], *value.stride()[:2]", "*query.stride()[:2], *query.stride()[:2]"),
        ("accumulator * rescale[:, None] + product", "accumulator + product"),
    ),
    "empty_row_nan__step": changed("4.5", ('tl.where(new_max == float("-inf"), 0.0, new_max)', "new_max")),
    "mixed_bases": changed("4.5", ("rescale = tl.exp2(", "rescale = tl.exp(")),
    "partial_tile_skipped": changed(
        "4.5", ("range(0, end, BLOCK_N)", "range(0, tl.minimum(end, key_length // BLOCK_N * BLOCK_N), BLOCK_N)")
    ),
    "accumulator_not_rescaled__and_query_tail_unwritten": changed(
        "4.5",
        ("accumulator * rescale[:, None] + product", "accumulator + product"),
        ("triton.cdiv(query_length, 64)", "query_length // 64"),
    ),
    "head_dim_not_masked__values_alone": changed(
        "4.5",
        ("value_offsets, mask=present, other=0.0)", "value_offsets, mask=(keys < key_length)[:, None], other=0.0)"),
    ),
    "head_dim_not_masked": changed("4.5", (COLUMNS_MASKED, "")),
    "output_written_out_of_bounds": changed(
        "4.5", (", output, mask=inside)", ", output, mask=(columns < head_dim)[None, :])")
    ),
    "tail_rows_read_out_of_bounds": changed(
        "4.5", ("key_offsets, mask=present, other=0.0)", "key_offsets, mask=(columns < head_dim)[None, :], other=0.0)")
    ),
    "value_tail_not_masked": changed(
        "4.5",
        (
            "present = (keys < key_length)[:, None] & (columns < head_dim)[None, :]",
            "present = (columns < head_dim)[None, :]",
        ),
    ),
}


RAGGED_COUNTED = changed(
    "4.5",
    (
        "    for first_key in range(0, end, BLOCK_N):",
        "    for index in range(0, tl.cdiv(end, BLOCK_N)):\n        first_key = index * BLOCK_N",
    ),
)


RAGGED_LARGE_NUMBER = changed(
    "4.5",
    ('scores = tl.where(visible, scores, float("-inf"))', "scores = tl.where(visible, scores, -1e30)"),
    ('reference_max = tl.where(new_max == float("-inf"), 0.0, new_max)', "reference_max = new_max"),
    (
        "accumulator / total[:, None]",
        "tl.where((positions >= 0)[:, None] | (CAUSAL == 0), accumulator / total[:, None], 0.0)",
    ),
)


RAGGED_WIDE_TILES = changed("4.5", ("BLOCK_M=64, BLOCK_N=64", "BLOCK_M=64, BLOCK_N=32"))


UNUSUAL = {
        "tl.dot in tf32": in_tf32("4.5"),
        "tiles counted": RAGGED_COUNTED,
        "a large negative number": RAGGED_LARGE_NUMBER,
        "natural base": changed("4.5", *NATURAL_BASE),
        "last programs first": changed("4.5", LAST_PROGRAMS_FIRST),
        "tiles of 32 keys": RAGGED_WIDE_TILES,
    }


WRONG |= {
    "query_tail_unwritten__but_one_tile": changed(
        "4.5", ("triton.cdiv(query_length, 64)", "max(1, query_length // 64)")
    ),
    "head_dim_cut": changed(
        "4.5", ("max(16, triton.next_power_of_2(head_dim))", "min(64, max(16, triton.next_power_of_2(head_dim)))")
    ),
    "causal_always": changed(
        "4.5",
        ("        if CAUSAL:\n            visible = visible &", "        visible = visible &"),
    ),
}


WRONG |= {
    "maximum_of_the_first_tile": changed(
        "4.5",
        (
            "tl.maximum(running_max, tl.max(scores, axis=1))",
            "tl.where(first_key == 0, tl.max(scores, axis=1), running_max)",
        ),
    ),
}


WRONG |= {
    "finite_for_minus_infinity": changed(
        "4.5",
        ('float("-inf")', '-1e4'),
    ),
}


WRONG |= of_narrow_numbers("4.5")


WRONG |= {
    "guarded_by_the_old_maximum": changed(
        "4.5",
        ('tl.where(new_max == float("-inf"), 0.0, new_max)', 'tl.where(running_max == float("-inf"), 0.0, new_max)'),
    ),
}


# "A finite number stands for minus infinity", said the card: it asked only whether some row's scores were low.
MASKED_IN = (
    "        if CAUSAL:\n"
    "            visible = visible & (keys[None, :] <= positions[:, None])\n"
    '        scores = tl.where(visible, scores, float("-inf"))'
)


def masked_in(tiles):
    """The causal mask of the tiles of keys of which this is true; the others are masked at the end of the keys."""
    return changed(
        "4.5",
        (
            MASKED_IN,
            '        scores = tl.where(visible, scores, float("-inf"))\n'
            "        if CAUSAL:\n"
            f"            if {tiles}:\n"
            '                scores = tl.where(keys[None, :] <= positions[:, None], scores, float("-inf"))',
        ),
    )


WRONG |= {
    "masked_from_the_top_aligned_diagonal": masked_in("first_key >= first_query"),
    "masked_on_the_top_aligned_diagonal": masked_in("first_key == first_query"),
    "masked_from_the_top_aligned_diagonal__reversed": masked_in("first_key >= first_query + query_length - key_length"),
    "masked_behind_the_diagonal": masked_in("first_key >= first_query + key_length - query_length"),
    "masked_at_the_last_step": masked_in("first_key + BLOCK_N >= end"),
}
UNUSUAL["a mask for the tiles that the diagonal crosses"] = masked_in(
    "first_key + BLOCK_N > first_query + key_length - query_length"
)
