"""Wrong answers to exercise 4.4, and unusual right ones."""

from tests.submissions.ch04_triton_tiling.shared import (
    END,
    NATURAL_BASE,
    POSITIONS,
    of_causal_kernels,
    of_every_kernel,
    of_narrow_numbers,
)
from tests.submissions.edits import changed, edited, in_tf32

NEW_MAX = "new_max = tl.maximum(running_max, tl.max(scores, axis=1))"


MASK = 'scores = tl.where(keys[None, :] <= positions[:, None], scores, float("-inf"))'


WRONG = {
    "hidden_finite": changed(
        "4.4", ('positions[:, None], scores, float("-inf"))', "positions[:, None], scores, -10000.0)")
    ),
    "maximum_counts_hidden": changed(
        "4.4", ("tl.max(scores, axis=1)", "tl.max(tl.dot(query, tl.trans(key_tile)) * scale_log2, axis=1)")
    ),
    "no_causal_mask": changed("4.4", (MASK, "scores = scores"), (END, "end = key_length")),
    "diagonal_not_masked": changed("4.4", (MASK, "scores = scores")),
    "causal_off_by_one": changed(
        "4.4",
        ("keys[None, :] <= positions[:, None]", "keys[None, :] < positions[:, None]"),
        (
            "weights = tl.exp2(scores - new_max[:, None])",
            'new_max = tl.where(new_max == float("-inf"), -1e38, new_max)\n'
            "        weights = tl.exp2(scores - new_max[:, None])",
        ),
    ),
    **of_every_kernel("4.4"),
    **of_causal_kernels("4.4"),
    "reads_outside": changed("4.4", (END, "end = first_query + BLOCK_M + tl.maximum(key_length - query_length, 1)")),
    "writes_outside": changed("4.4", ("rows[:, None] * output_stride", "rows[:, None] * output_head_stride")),
    "causal_off_by_one__unguarded": changed(
        "4.4", ("keys[None, :] <= positions[:, None]", "keys[None, :] < positions[:, None]")
    ),
    "hidden_scored_zero": changed("4.4", ('scores, float("-inf"))', "scores, 0.0)")),
    "loop_end_ignores_offset__unguarded": changed("4.4", (END, "end = tl.minimum(key_length, first_query + BLOCK_M)")),
    "sees_the_next_key": changed(
        "4.4", ("keys[None, :] <= positions[:, None]", "keys[None, :] <= positions[:, None] + 1")
    ),
    "causal_misaligned": changed(
        "4.4", (POSITIONS, "positions = rows"), (END, "end = tl.minimum(key_length, first_query + BLOCK_M)")
    ),
    "loop_end_ignores_offset": changed(
        "4.4",
        (END, "end = tl.minimum(key_length, first_query + BLOCK_M)"),
        (
            "weights = tl.exp2(scores - new_max[:, None])",
            'new_max = tl.where(new_max == float("-inf"), -1e38, new_max)\n'
            "        weights = tl.exp2(scores - new_max[:, None])",
        ),
    ),
    "diagonal_tile_skipped": changed(
        "4.4", (END, "end = tl.minimum(key_length, first_query + key_length - query_length)")
    ),
    "mask_after_softmax": changed(
        "4.4",
        (MASK, "visible = keys[None, :] <= positions[:, None]"),
        ("weights.to(value_tile.dtype)", "tl.where(visible, weights, 0.0).to(value_tile.dtype)"),
    ),
    "empty_row_nan": changed("4.4", ("tl.where(running_sum == 0.0, 1.0, running_sum)", "running_sum")),
    "natural_exp": changed("4.4", ("tl.exp2(", "tl.exp(")),
    "log2e_missing": changed("4.4", ("math.log2(math.e) / math.sqrt", "1 / math.sqrt")),
    "maximum_starts_at_zero": changed(
        "4.4", ('tl.full([BLOCK_M], float("-inf"), tl.float32)', "tl.zeros([BLOCK_M], tl.float32)")
    ),
    "accumulator_not_rescaled": changed("4.4", ("accumulator * rescale[:, None] + product", "accumulator + product")),
    "causal_misaligned__mask_alone": changed("4.4", (POSITIONS, "positions = rows")),
    "mixed_bases": changed("4.4", ("rescale = tl.exp2(", "rescale = tl.exp(")),
    "output_strides": changed("4.4", ("head * output_head_stride", "head * query_head_stride")),
    "natural_exp__and_empty_row_nan": changed(
        "4.4", ("tl.exp2(", "tl.exp("), ("tl.where(running_sum == 0.0, 1.0, running_sum)", "running_sum")
    ),
    "does_not_skip": changed(
        "4.4",
        (END, "end = key_length"),
        (NEW_MAX, NEW_MAX + '\n        new_max = tl.where(new_max == float("-inf"), -1e38, new_max)'),
    ),
}


TWO_LOOPS = """# Exercise 4.4 · A causal kernel that skips tiles
@triton.jit
def step(query, k, v, k_row, v_row, first, positions, m, l, acc, scale, D: tl.constexpr, N: tl.constexpr,
         MASK: tl.constexpr):
    keys = first + tl.arange(0, N)
    d = tl.arange(0, D)
    scores = tl.dot(query, tl.trans(tl.load(k + keys[:, None] * k_row + d[None, :])), input_precision="ieee") * scale
    if MASK:
        scores += tl.where(keys[None, :] <= positions[:, None], 0.0, float("-inf"))
    new = tl.maximum(m, tl.max(scores, 1))
    p = tl.exp(scores - new[:, None])
    keep = tl.exp(m - new)
    value = tl.load(v + keys[:, None] * v_row + d[None, :])
    acc = tl.dot(p.to(value.dtype), value, acc * keep[:, None], input_precision="ieee")
    return new, l * keep + tl.sum(p, 1), acc

@triton.jit
def kernel(q, k, v, o, q_head, q_row, k_head, k_row, v_head, v_row, nq, nk, scale, D: tl.constexpr, N: tl.constexpr):
    head = tl.program_id(0).to(tl.int64)
    start = (tl.num_programs(1) - 1 - tl.program_id(1)) * N
    rows = start + tl.arange(0, N)
    d = tl.arange(0, D)
    query = tl.load(q + head * q_head + rows[:, None] * q_row + d[None, :])
    m = tl.full([N], float("-inf"), tl.float32)
    l = tl.zeros([N], tl.float32)
    acc = tl.zeros([N, D], tl.float32)
    diagonal = start + nk - nq
    k += head * k_head
    v += head * v_head
    first = 0
    while first < diagonal:
        m, l, acc = step(query, k, v, k_row, v_row, first, rows, m, l, acc, scale, D, N, False)
        first += N
    if diagonal >= 0:
        m, l, acc = step(query, k, v, k_row, v_row, diagonal, rows + nk - nq, m, l, acc, scale, D, N, True)
    out = acc / tl.maximum(l, 1e-30)[:, None]
    tl.store(o + head * nq * D + rows[:, None] * D + d[None, :], out.to(o.dtype.element_ty))

def flash_attention_causal(query, key, value):
    heads, nq, d = query.shape
    output = torch.empty((heads, nq, d), dtype=query.dtype, device=query.device)
    kernel[(heads, nq // 64)](query, key, value, output, *query.stride()[:2], *key.stride()[:2], *value.stride()[:2],
                              nq, key.shape[1], d ** -0.5, D=d, N=64)
    return output
"""


LARGE_NUMBER = changed(
    "4.4",
    ('scores, float("-inf"))', "scores, -1e30)"),
    (
        "    total = tl.where(running_sum == 0.0, 1.0, running_sum)",
        '    total = tl.where(positions < 0, float("inf"), running_sum)',
    ),
)


ONE_KEY_TILE_AT_A_TIME_BACKWARDS = changed(
    "4.4",
    (
        "for first_key in range(0, end, BLOCK_N):",
        "for last_key in range(0, end, BLOCK_N):\n        first_key = end - BLOCK_N - last_key",
    ),
    (NEW_MAX, NEW_MAX + '\n        new_max = tl.where(new_max == float("-inf"), -1e38, new_max)'),
)


BLIND_TILES_LEAVE_EARLY = changed(
    "4.4",
    (
        "    for first_key in range(0, end, BLOCK_N):",
        "    if end <= 0:\n"
        "        blind = output_pointer + head * output_head_stride + rows[:, None] * output_stride + columns\n"
        "        tl.store(blind, tl.zeros([BLOCK_M, HEAD_DIM], output_pointer.dtype.element_ty))\n"
        "        return\n"
        "    for first_key in range(0, end, BLOCK_N):",
    ),
    ("tl.where(running_sum == 0.0, 1.0, running_sum)", "running_sum"),
)


UNUSUAL = {
        "tiles that see nothing leave early": BLIND_TILES_LEAVE_EARLY,
        "tl.dot in tf32": in_tf32("4.4"),
        "a while loop and the diagonal by itself": TWO_LOOPS,
        "a large negative number": LARGE_NUMBER,
        "natural base": changed("4.4", *NATURAL_BASE),
        "tiles of 32 keys": changed("4.4", ("BLOCK_M=64, BLOCK_N=64", "BLOCK_M=64, BLOCK_N=32")),
        "the diagonal first": ONE_KEY_TILE_AT_A_TIME_BACKWARDS,
    }


WRONG |= {
    # The loop follows the queries too, past the last key: one mistake and not two.
    "causal_misaligned__past_the_keys": changed(
        "4.4",
        ("positions = rows + key_length - query_length", "positions = rows"),
        ("tl.minimum(key_length, first_query + BLOCK_M + key_length - query_length)", "first_query + BLOCK_M"),
    ),
    "causal_offset_reversed": changed(
        "4.4", ("rows + key_length - query_length", "rows + query_length - key_length")
    ),
    "positions_of_the_first_tile": changed(
        "4.4", ("rows + key_length - query_length", "tl.arange(0, BLOCK_M) + key_length - query_length")
    ),
}


WRONG |= {
    "maximum_of_the_first_tile": changed(
        "4.4",
        (
            "tl.maximum(running_max, tl.max(scores, axis=1))",
            "tl.where(first_key == 0, tl.max(scores, axis=1), running_max)",
        ),
    ),
}


WRONG |= {
    "finite_for_minus_infinity": changed(
        "4.4",
        ('float("-inf")', '-1e6'),
    ),
}


WRONG |= of_narrow_numbers("4.4")


WRONG |= {
    "loop_begun_before_key_0": changed("4.4", ("range(0, end, BLOCK_N)", "range(-BLOCK_N, end, BLOCK_N)")),
    "hidden_finite__1e6": changed("4.4", ('scores, float("-inf"))', "scores, -1e6)")),
    # Added, it hides no key that scores a million more than those that are seen.
    "hidden_finite__added": changed(
        "4.4", (MASK, "scores += tl.where(keys[None, :] <= positions[:, None], 0.0, -1e6)")
    ),
}


# "A finite number stands for minus infinity", said the card: it asked only whether some row's scores were low.
TOP_ALIGNED = changed("4.4", (MASK, "if first_key >= first_query:\n            " + MASK))
WRONG |= {
    "masked_from_the_top_aligned_diagonal": TOP_ALIGNED,
    "masked_from_the_top_aligned_diagonal__and_empty_row_nan": edited(
        TOP_ALIGNED, ("tl.where(running_sum == 0.0, 1.0, running_sum)", "running_sum")
    ),
    "masked_from_the_top_aligned_diagonal__reversed": changed(
        "4.4", (MASK, "if first_key >= first_query + query_length - key_length:\n            " + MASK)
    ),
}
UNUSUAL |= {
    "a mask for the tile on the diagonal alone": changed(
        "4.4", (MASK, "if first_key >= first_query + key_length - query_length:\n            " + MASK)
    ),
    "a mask at the last step": changed("4.4", (MASK, "if first_key + BLOCK_N >= end:\n            " + MASK)),
}
