"""Wrong answers to exercise 4.3, and unusual right ones."""

from tests.submissions.ch04_triton_tiling.shared import of_every_kernel, of_narrow_numbers
from tests.submissions.edits import changed, in_tf32

LOOP = "for first_key in range(0, key_length, BLOCK_N):"


WRONG = {
    "scaled_query_in_16_bits": changed(
        "4.3",
        (
            "running_max = tl.full(",
            "query = (query * scale).to(query_pointer.dtype.element_ty)\n    running_max = tl.full(",
        ),
        ('input_precision="ieee") * scale  #', 'input_precision="ieee")  #'),
    ),
    "no_running_max": changed(
        "4.3",
        ("weights = tl.exp(scores - new_max[:, None])", "weights = tl.exp(scores)"),
        ("rescale = tl.exp(running_max - new_max)", "rescale = tl.full([BLOCK_M], 1.0, tl.float32)"),
    ),
    "maximum_not_updated": changed("4.3", ("running_max = new_max", "running_max = running_max")),
    "not_divided": changed("4.3", ("accumulator / running_sum[:, None]", "accumulator")),
    "maximum_starts_at_zero": changed(
        "4.3", ('tl.full([BLOCK_M], float("-inf"), tl.float32)', "tl.zeros([BLOCK_M], tl.float32)")
    ),
    "accumulator_not_rescaled": changed("4.3", ("accumulator * rescale[:, None] + product", "accumulator + product")),
    "sum_not_rescaled": changed("4.3", ("running_sum * rescale + tl.sum", "running_sum + tl.sum")),
    "nothing_rescaled": changed(
        "4.3", ("rescale = tl.exp(running_max - new_max)", "rescale = tl.full([BLOCK_M], 1.0, tl.float32)")
    ),
    **of_every_kernel("4.3"),
    "divided_at_every_tile": changed(
        "4.3",
        (
            "        running_max = new_max",
            "        accumulator = accumulator / running_sum[:, None]\n        running_max = new_max",
        ),
    ),
    "natural_exp": changed("4.3", ("1 / math.sqrt", "math.log2(math.e) / math.sqrt")),
    "log2e_missing": changed("4.3", ("tl.exp(", "tl.exp2(")),
    "reads_outside": changed("4.3", ("range(0, key_length, BLOCK_N)", "range(0, key_length + 1, BLOCK_N)")),
    "as_many_keys_as_queries": changed("4.3", ("key.shape[1], 1 / math", "query.shape[1], 1 / math")),
    "writes_outside": changed("4.3", ("rows[:, None] * output_stride", "rows[:, None] * output_head_stride")),
    "scale_missing": changed("4.3", ('input_precision="ieee") * scale', 'input_precision="ieee")')),
    "scale_twice": changed("4.3", ('input_precision="ieee") * scale', 'input_precision="ieee") * scale * scale')),
    "softmax_over_queries": changed(
        "4.3",
        ("tl.max(scores, axis=1)", "tl.max(scores, axis=0)"),
        ("tl.sum(weights, axis=1)", "tl.sum(weights, axis=0)"),
    ),
    "only_first_tile": changed("4.3", ("keys = first_key + tl.arange(0, BLOCK_N)", "keys = tl.arange(0, BLOCK_N)")),
    "only_first_tile__no_loop": changed("4.3", (LOOP, "for first_key in range(0, BLOCK_N, BLOCK_N):")),
    "last_tile_skipped": changed("4.3", (LOOP, "for first_key in range(0, key_length - BLOCK_N, BLOCK_N):")),
    "keys_used_as_values": changed(
        "4.3",
        (
            "value_pointer + head * value_head_stride + value_offsets",
            "key_pointer + head * key_head_stride + key_offsets",
        ),
    ),
    "transposed_key": changed(
        "4.3",
        (
            "key_offsets = keys[:, None] * key_stride + columns[None, :]",
            "key_offsets = columns[:, None] * key_stride + keys[None, :]",
        ),
        ("tl.trans(key_tile)", "key_tile"),
    ),
    "strides_ignored": changed(
        "4.3",
        (
            "head = tl.program_id(1).to(tl.int64)",
            "head = tl.program_id(1).to(tl.int64)\n"
            "    query_stride = HEAD_DIM\n    key_stride = HEAD_DIM\n    value_stride = HEAD_DIM\n"
            "    query_head_stride = tl.num_programs(0) * BLOCK_M * HEAD_DIM\n"
            "    key_head_stride = key_length * HEAD_DIM\n"
            "    value_head_stride = key_head_stride",
        ),
    ),
    "strides_ignored__keys_by_the_queries": changed(
        "4.3", ("keys[:, None] * key_stride", "keys[:, None] * query_stride")
    ),
    "strides_ignored__values_by_the_queries": changed(
        "4.3", ("keys[:, None] * value_stride", "keys[:, None] * query_stride")
    ),
    "strides_ignored__values_by_the_keys": changed(
        "4.3", ("keys[:, None] * value_stride", "keys[:, None] * key_stride")
    ),
    "output_strides": changed("4.3", ("rows[:, None] * output_stride", "rows[:, None] * query_stride")),
    "scores_in_float16": changed(
        "4.3",
        (
            'input_precision="ieee") * scale',
            'input_precision="ieee").to(query_pointer.dtype.element_ty).to(tl.float32) * scale',
        ),
    ),
    "sum_not_rescaled__and_values_by_the_keys_heads": changed(
        "4.3",
        ("running_sum * rescale + tl.sum", "running_sum + tl.sum"),
        ("head * value_head_stride", "head * key_head_stride"),
    ),
    "queries_reread": changed(
        "4.3",
        (
            "        keys = first_key + tl.arange(0, BLOCK_N)",
            "        query = tl.load(query_pointer + head * query_head_stride + query_offsets)\n"
            "        keys = first_key + tl.arange(0, BLOCK_N)",
        ),
    ),
    "writes_the_score_matrix": """# Exercise 4.3 · The forward kernel, without a mask
@triton.jit
def scores_kernel(q, k, s, q_head, q_row, k_head, k_row, length, scale, D: tl.constexpr, B: tl.constexpr):
    head = tl.program_id(1)
    rows = tl.program_id(0) * B + tl.arange(0, B)
    d = tl.arange(0, D)
    query = tl.load(q + head * q_head + rows[:, None] * q_row + d[None, :])
    for first in range(0, length, B):
        keys = first + tl.arange(0, B)
        key = tl.load(k + head * k_head + keys[:, None] * k_row + d[None, :])
        tile = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
        tl.store(s + head * tl.num_programs(0) * B * length + rows[:, None] * length + keys[None, :], tile)

def flash_attention_full(query, key, value):
    heads, length, head_dim = query.shape
    scores = torch.empty(heads, length, key.shape[1], device=query.device)
    scores_kernel[(length // 64, heads)](query, key, scores, *query.stride()[:2], *key.stride()[:2], key.shape[1],
                                         head_dim ** -0.5, D=head_dim, B=64)
    weights = torch.exp(scores - scores.amax(-1, keepdim=True))
    total = weights.sum(-1, keepdim=True)
    return torch.stack([(w / t) @ v for w, t, v in zip(weights, total, value.float())]).to(query.dtype)
""",
}


FLAT_GRID = changed(
    "4.3",
    ("grid = (query.shape[1] // 64, query.shape[0])", "grid = (query.shape[1] // 64 * query.shape[0],)"),
    ("key.shape[1], 1 / math.sqrt", "query.shape[1] // 64, key.shape[1], 1 / math.sqrt"),
    ("    key_length, scale,\n", "    tiles, key_length, scale,\n"),
    ("tl.program_id(1).to(tl.int64)", "(tl.program_id(0) // tiles).to(tl.int64)"),
    ("rows = tl.program_id(0) * BLOCK_M", "rows = tl.program_id(0) % tiles * BLOCK_M"),
)


BACKWARDS = changed(
    "4.3",
    ("keys = first_key + tl.arange(0, BLOCK_N)", "keys = key_length - BLOCK_N - first_key + tl.arange(0, BLOCK_N)"),
)


BASE_TWO = changed(
    "4.3",
    ("tl.exp(", "tl.exp2("),
    ('input_precision="ieee") * scale', 'input_precision="ieee") * (scale * 1.4426950408889634)'),
)


KEYS_TURNED_BY_POINTERS = changed(
    "4.3",
    (
        "key_offsets = keys[:, None] * key_stride + columns[None, :]",
        "key_offsets = columns[:, None] + keys[None, :] * key_stride",
    ),
    ("tl.trans(key_tile)", "key_tile"),
)


SMALL_KEY_TILES = changed("4.3", ("BLOCK_M=64, BLOCK_N=64", "BLOCK_M=64, BLOCK_N=32"))


LARGE_QUERY_TILES = changed(
    "4.3",
    (
        "grid = (query.shape[1] // 64, query.shape[0])",
        "rows = 128 if query.shape[1] % 128 == 0 else 64\n    grid = (query.shape[1] // rows, query.shape[0])",
    ),
    ("BLOCK_M=64, BLOCK_N=64", "BLOCK_M=rows, BLOCK_N=64"),
)


ALL_IN_FLOAT32 = changed(
    "4.3",
    ("tl.dot(query, tl.trans(key_tile), ", "tl.dot(query.to(tl.float32) * scale, key_tile.to(tl.float32).T, "),
    ('input_precision="ieee") * scale', 'input_precision="ieee")'),
    ("weights.to(value_tile.dtype), value_tile", "weights, value_tile.to(tl.float32)"),
)


AVERAGES = changed(
    "4.3",
    (
        "        running_sum = running_sum * rescale + tl.sum(weights, axis=1)\n",
        "        old_sum = running_sum * rescale\n        running_sum = old_sum + tl.sum(weights, axis=1)\n",
    ),
    ("accumulator * rescale[:, None] + product", "(accumulator * old_sum[:, None] + product) / running_sum[:, None]"),
    ("accumulator / running_sum[:, None]", "accumulator"),
)


UNUSUAL = {
        "everything in float32": ALL_IN_FLOAT32,
        "a running average": AVERAGES,
        "tl.dot in tf32": in_tf32("4.3"),
        "a flat grid": FLAT_GRID,
        "last keys first": BACKWARDS,
        "base two": BASE_TWO,
        "keys turned by their pointers": KEYS_TURNED_BY_POINTERS,
        "tiles of 32 keys": SMALL_KEY_TILES,
        "tiles of 128 queries": LARGE_QUERY_TILES,
    }


WRONG |= {
    "stored_in_first_rows": changed(
        "4.3", ("rows[:, None] * output_stride", "tl.arange(0, BLOCK_M)[:, None] * output_stride")
    ),
    "value_not_moved": changed(
        "4.3", ("keys[:, None] * value_stride", "tl.arange(0, BLOCK_N)[:, None] * value_stride")
    ),
    "own_maximum_in_weights": changed(
        "4.3", ("scores - new_max[:, None]", "scores - tl.max(scores, axis=1)[:, None]")
    ),
}


WRONG |= {
    "maximum_of_the_first_tile": changed(
        "4.3",
        (
            "tl.maximum(running_max, tl.max(scores, axis=1))",
            "tl.where(first_key == 0, tl.max(scores, axis=1), running_max)",
        ),
    ),
}


WRONG |= of_narrow_numbers("4.3")
WRONG |= {
    "loop_begun_before_key_0": changed(
        "4.3", ("range(0, key_length, BLOCK_N)", "range(-BLOCK_N, key_length, BLOCK_N)")
    ),
}
