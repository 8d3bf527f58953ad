"""Wrong answers to exercise 10.6, and unusual right ones."""

from course_lib.checker.specification.catalog import solution_source
from tests.submissions.edits import changed, edited, in_tf32

WEIGHTS = "weights = tl.trans(probabilities.to(output_gradient.dtype))"
DELTA = "delta = (output.float() * output_gradient.float()).sum(dim=-1)"
DS = "score_gradients = probabilities * (probability_gradients - delta[:, None])"
EXPONENT = 'differences = tl.where(visible, scores - log_sum_exp[:, None], float("-inf"))'
DV = 'value_gradient += tl.dot(weights, output_gradient, input_precision="ieee")'
DK = 'key_gradient += tl.dot(tl.trans(score_gradients.to(query.dtype)), query, input_precision="ieee")'
DQ = 'query_gradient += tl.dot(score_gradients.to(key_tile.dtype), key_tile, input_precision="ieee")'
SEEN = "(keys[None, :] <= (rows + key_length - query_length)[:, None])"
START = "first_query = tl.maximum(0, first_key + query_length - key_length)"
END = "end = tl.minimum(key_length, first_row + BLOCK_M + key_length - query_length)"
COLUMNS = "rows[:, None] * output_gradient_stride + columns[None, :] * output_gradient_column_stride"
BASE_2 = "tl.exp2(differences * 1.4426950408889634)"
KEY_GRID = "key_gradient_kernel[(triton.cdiv(key_length, 64), heads)]"
QUERY_GRID = "query_gradient_kernel[(triton.cdiv(query_length, 64), heads)]"

GUARDED = 'tl.where(log_sum_exp == float("-inf"), 0.0, log_sum_exp)'


def in_the_second(old, new):
    """The course's answer, changed in the kernel of dQ alone."""
    first, second = solution_source("10.6").split("def query_gradient_kernel")
    return first + "def query_gradient_kernel" + edited(second, (old, new))


def in_the_first(old, new):
    """The course's answer, changed in the kernel of dK and dV alone."""
    first, second = solution_source("10.6").split("def query_gradient_kernel")
    return edited(first, (old, new)) + "def query_gradient_kernel" + second


WRONG = {
    "values_read_by_the_keys_strides": changed("10.6", ("keys[:, None] * value_stride", "keys[:, None] * key_stride")),
    "no_causal_mask__in_tiles_of_dq": in_the_second(SEEN, "(keys > -1)[None, :]"),
    "delta_missing": changed("10.6", (DS, "score_gradients = probabilities * probability_gradients")),
    "delta_missing__in_dq": in_the_second(DS, "score_gradients = probabilities * probability_gradients"),
    "delta_by_keys": changed("10.6", (DS, DS.replace("[:, None]", "[None, :]"))),
    "delta_added": changed("10.6", (DS, DS.replace(" - ", " + "))),
    "delta_not_weighted": changed(
        "10.6", (DS, "score_gradients = probabilities * probability_gradients - delta[:, None]")
    ),
    "delta_averaged": changed("10.6", (DELTA, DELTA.replace(".sum(", ".mean("))),
    "delta_of_the_query": changed("10.6", (DELTA, DELTA.replace("output.float() *", "query.float() *"))),
    "scale_missing_in_scores": changed(
        "10.6", ('tl.dot(query, tl.trans(key_tile), input_precision="ieee") * scale',
            "tl.dot(query, tl.trans(key_tile))",
        )
    ),
    "scale_missing_in_gradients": changed(
        "10.6", ("(key_gradient * scale)", "(key_gradient)"), ("(query_gradient * scale)", "(query_gradient)")
    ),
    "scale_missing_in_gradients__of_keys": changed("10.6", ("(key_gradient * scale)", "(key_gradient)")),
    "scale_missing_in_gradients__of_queries": changed("10.6", ("(query_gradient * scale)", "(query_gradient)")),
    "scale_twice": changed("10.6", (DS, DS.replace("= prob", "= scale * prob"))),
    "scale_in_dv": changed("10.6", ("value_gradient.to(value", "(value_gradient * scale).to(value")),
    "log_sum_missing": changed("10.6", (EXPONENT, EXPONENT.replace("scores - log_sum_exp[:, None]", "scores"))),
    "log_sum_natural": changed(
        "10.6",
        (BASE_2, "tl.exp2(differences)"),
        (
            "scores - log_sum_exp[:, None]",
            "scores * 1.4426950408889634 - log_sum_exp[:, None]",
        ),
    ),
    "log2e_missing": changed("10.6", (BASE_2, "tl.exp2(differences)")),
    "natural_exp": changed("10.6", (BASE_2, BASE_2.replace("exp2", "exp"))),
    "ln2_for_log2e": changed("10.6", ("1.4426950408889634", "0.6931471805599453")),
    "no_causal_mask": changed("10.6", ("if CAUSAL:", "if False:")),
    "hidden_weighed_one": changed("10.6", (EXPONENT, EXPONENT.replace('float("-inf")', "0.0"))),
    "causal_misaligned": changed(
        "10.6",
        (SEEN, SEEN.replace(" + key_length - query_length", "")),
        (START, "first_query = first_key"),
        (END, "end = tl.minimum(key_length, first_row + BLOCK_M)"),
    ),
    "loop_ignores_offset": changed(
        "10.6", (START, "first_query = first_key"), (END, "end = tl.minimum(key_length, first_row + BLOCK_M)")
    ),
    "loop_ignores_offset__in_dk": changed("10.6", (START, "first_query = first_key")),
    "causal_off_by_one": changed("10.6", (SEEN, SEEN.replace("<=", "<"))),
    "only_last_tile": changed(
        "10.6", (DV, DV.replace("+=", "=")), (DK, DK.replace("+=", "=")), (DQ, DQ.replace("+=", "="))
    ),
    "only_last_tile__in_dq": changed("10.6", (DQ, DQ.replace("+=", "="))),
    "dv_from_score_gradients": changed(
        "10.6", (DV, ""), (DK, DK + "\n        value_gradient += tl.dot(tl.trans(score_gradients.to(query.dtype)), "
                            'output_gradient, input_precision="ieee")')
    ),
    "dv_not_transposed": changed(
        "10.6", (WEIGHTS, "weights = probabilities.to(query.dtype)")
    ),
    "dk_not_transposed": changed(
        "10.6", (DK, DK.replace("tl.trans(score_gradients.to(query.dtype))", "score_gradients.to(query.dtype)"))
    ),
    "dk_from_probabilities": changed("10.6", (DK, DK.replace("score_gradients", "probabilities"))),
    "dq_of_values": changed("10.6", (DQ, DQ.replace(", key_tile,", ", value_tile,"))),
    "keys_used_as_values": changed("10.6", ("tl.trans(value_tile)", "tl.trans(key_tile)")),
    "tail_not_masked": in_the_second(
        "visible = exists[:, None] & (keys < key_length)[None, :]", "visible = exists[:, None] & (keys >= 0)[None, :]"
    ),
    "blind_rows_nan": changed(
        "10.6",
        (EXPONENT, 'differences = tl.where(visible, scores, float("-inf")) - log_sum_exp[:, None]'),
    ),
    "column_stride_ignored__of_a_sum": changed(
        "10.6", (COLUMNS, COLUMNS.replace(" * output_gradient_column_stride", ""))
    ),
    "gradient_read_by_the_querys_strides__of_a_sum": changed(
        "10.6",
        ("head * output_gradient_head_stride", "head * query_head_stride"),
        ("* output_gradient_stride", "* query_stride"),
        ("* output_gradient_column_stride", ""),
    ),
    "head_forgotten": changed("10.6", ("lse_pointer + head * query_length + rows", "lse_pointer + rows")),
    "head_forgotten__of_delta": changed("10.6", ("delta_pointer + head * query_length + rows", "delta_pointer + rows")),
    "grid_rounded_down": changed(
        "10.6", (KEY_GRID, KEY_GRID.replace("triton.cdiv(key_length, 64)", "key_length // 64"))
    ),
    "grid_by_the_other_length": changed("10.6", (KEY_GRID, KEY_GRID.replace("key_length", "query_length"))),
    "results_exchanged": changed(
        "10.6",
        ("return query_gradient, key_gradient, value_gradient", "return query_gradient, value_gradient, key_gradient"),
    ),
    "skips_nothing": changed("10.6", (START, "first_query = 0"), (END, "end = key_length")),
    "reads_outside": changed(
        "10.6", ("log_sum_exp = tl.load(lse_pointer + head * query_length + rows, mask=exists, other=0.0)",
                 "log_sum_exp = tl.load(lse_pointer + head * query_length + rows)")
    ),
    "writes_outside": changed(
        "10.6", ("tl.store(query_gradient_pointer + offsets, query_gradient, mask=inside)",
                 "tl.store(query_gradient_pointer + offsets, query_gradient, mask=columns[None, :] < head_dim)")
    ),
    "delta_missing__and_scale_missing": changed(
        "10.6",
        (DS, "score_gradients = probabilities * probability_gradients"),
        ("(key_gradient * scale)", "(key_gradient)"),
    ),
    "hidden_scores_finite": changed(
        "10.6",
        (EXPONENT, f"differences = tl.where(visible, scores, -1e9) - {GUARDED}[:, None]"),
    ),
    "hidden_scores_finite__1e4": changed(
        "10.6",
        (EXPONENT, f"differences = tl.where(visible, scores, -1e4) - {GUARDED}[:, None]"),
    ),
    "accumulated_in_16_bits": changed(
        "10.6",
        ("key_gradient = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)",
         "key_gradient = tl.zeros([BLOCK_N, BLOCK_D], query_pointer.dtype.element_ty)"),
        (DK, f"key_gradient = (key_gradient + {DK.split(' += ')[1]}).to(key_gradient.dtype)"),
    ),
    "accumulated_in_16_bits__of_values": changed(
        "10.6", (DV, f"value_gradient = ({DV.replace('+=', '+')}).to(query.dtype).to(tl.float32)")
    ),
    "accumulated_in_16_bits__of_queries": changed(
        "10.6", (DQ, f"query_gradient = ({DQ.replace('+=', '+')}).to(query.dtype).to(tl.float32)")
    ),
    "rounded_early__delta": changed("10.6", (DELTA, DELTA + ".to(query.dtype)")),
    "rounded_early__products": changed(
        "10.6", (DELTA, "delta = (output * output_gradient).sum(dim=-1, dtype=torch.float32)")
    ),
    "rounded_early__dp": in_the_first(
        DS, DS.replace("(probability_gradients ", "(probability_gradients.to(query.dtype) ")
    ),
    "rounded_early__scores": in_the_first(
        "* scale  # [BLOCK_M", "* scale).to(query.dtype).to(tl.float32)  # [BLOCK_M"
    ).replace("scores = tl.dot", "scores = (tl.dot", 1),
    "strides_of_an_input": changed(
        "10.6",
        ("torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)", "torch.empty_like(tensor)"),
    ),
    "tiles_too_small": changed(
        "10.6", ('"BLOCK_M": 64, "BLOCK_N": 64', '"BLOCK_M": 32, "BLOCK_N": 32'),
        ("triton.cdiv(key_length, 64)", "triton.cdiv(key_length, 32)"),
        ("triton.cdiv(query_length, 64)", "triton.cdiv(query_length, 32)"),
    ),
    "skips_no_queries": changed("10.6", (START, "first_query = 0")),
    "skips_no_keys": changed("10.6", (END, "end = key_length")),
    "loop_begins_at_the_last_key": changed("10.6", (START, START.replace("first_key +", "first_key + BLOCK_N - 1 +"))),
    "loop_ends_one_key_early": changed("10.6", (END, END + " - 1")),
    "log_sum_past_the_end": in_the_first("mask=exists, other=0.0)  # [BLOCK_M]\n        delta",
        'mask=exists, other=float("-inf"))\n        delta',
    ).replace("visible = exists[:, None] &", "visible = (rows >= 0)[:, None] &", 1),
}

ONE_TILE_AT_A_TIME = changed(
    "10.6",
    (START, "first_query = tl.maximum(0, first_key + query_length - key_length) // BLOCK_M * BLOCK_M"),
    ("for first_row in range(first_query, query_length, BLOCK_M):",
     "for last_row in range(first_query, query_length, BLOCK_M):\n"
     "        steps = tl.cdiv(query_length - first_query, BLOCK_M)\n"
        "        first_row = 2 * first_query + (steps - 1) * BLOCK_M - last_row"),
)

NATURAL = changed(
    "10.6",
    (BASE_2, "tl.exp(differences)"),
    (EXPONENT, 'differences = tl.where(visible, scores - log_sum_exp[:, None], -float("inf"))'),
)

TRANSPOSED = changed(
    "10.6",
    (
        DV,
        'value_gradient = tl.dot(weights, output_gradient, value_gradient, input_precision="ieee")',
    ),
    (DK, DK.replace("+= ", "= ").replace("query, input", "query, key_gradient, input")),
    (DQ, DQ.replace("+= ", "= ").replace("key_tile, input", "key_tile, query_gradient, input")),
)

ZEROED_AFTER = changed(
    "10.6",
    (EXPONENT, "differences = scores - tl.where(log_sum_exp == float(\"-inf\"), 0.0, log_sum_exp)[:, None]"),
    (f"probabilities = {BASE_2}", f"probabilities = tl.where(visible, {BASE_2}, 0.0)"),
)

DELTA_KERNEL = changed(
    "10.6",
    (
        "def flash_attention_backward(",
        "@triton.jit\n"
        "def delta_kernel(o, g, delta, o0, o1, o2, g0, g1, g2, length, head_dim, D: tl.constexpr):\n"
        "    row = tl.program_id(0)\n"
        "    head = tl.program_id(1)\n"
        "    columns = tl.arange(0, D)\n"
        "    there = columns < head_dim\n"
        "    output = tl.load(o + head * o0 + row * o1 + columns * o2, mask=there, other=0.0).to(tl.float32)\n"
        "    gradient = tl.load(g + head * g0 + row * g1 + columns * g2, mask=there, other=0.0).to(tl.float32)\n"
        "    tl.store(delta + head * length + row, tl.sum(output * gradient, axis=0))\n\n\n"
        "def flash_attention_backward(",
    ),
    (
        DELTA,
        "delta = torch.empty((heads, query_length), dtype=torch.float32, device=query.device)\n"
        "    delta_kernel[(query_length, heads)](output, output_gradient, delta, *output.stride(), "
        "*output_gradient.stride(), query_length, head_dim, D=triton.next_power_of_2(head_dim))",
    ),
)

UNUSUAL = {
    "exponents of at most 0": changed("10.6", (BASE_2, BASE_2.replace("differences", "tl.minimum(differences, 0.0)"))),
    "the last tile of queries first": ONE_TILE_AT_A_TIME,
    "tl.dot in tf32": in_tf32("10.6"),
    "natural base": NATURAL,
    "sums inside tl.dot": TRANSPOSED,
    "zeros after the exponential": ZEROED_AFTER,
    "Δ by a kernel": DELTA_KERNEL,
    "the kernel of dQ first": changed(
        "10.6",
        (
            f"    {KEY_GRID}(\n        *inputs, key_gradient, value_gradient, *strides, *sizes, **tiles\n    )\n",
            "",
        ),
        (
            f"    {QUERY_GRID}(*inputs, query_gradient, *strides, *sizes, **tiles)\n",
            f"    {QUERY_GRID}(*inputs, query_gradient, *strides, *sizes, **tiles)\n"
            f"    {KEY_GRID}(*inputs, key_gradient, value_gradient, *strides, *sizes, **tiles)\n",
        ),
    ),
    "Δ by einsum": changed(
        "10.6", (DELTA, 'delta = torch.einsum("hmd,hmd->hm", output.float(), output_gradient.float()).contiguous()')
    ),
    "Δ as rows times columns": changed(
        "10.6",
        (DELTA, "delta = (output.float()[:, :, None] @ output_gradient.float()[:, :, :, None]).reshape(heads, -1)"),
    ),
    "the least float32 for hidden scores": changed(
        "10.6",
        (EXPONENT, f"differences = tl.where(visible, scores, -3.0e38) - {GUARDED}[:, None]"),
    ),
}


BOUNDED = EXPONENT.replace("log_sum_exp", "tl.maximum(log_sum_exp, -1e5)")
WRONG |= {
    "log_sum_bounded_below": changed("10.6", (EXPONENT, BOUNDED)),
    "log_sum_bounded_below__in_dq": in_the_second(EXPONENT, BOUNDED),
    "log_sum_bounded_below__in_dk": in_the_first(EXPONENT, BOUNDED),
}
