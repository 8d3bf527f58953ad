"""Wrong answers to the exercises of chapter 04, and unusual right ones; the form is that of ch00.py.

Most are the course's own answer with one step changed, as a learner would get it wrong.
"""

from tests.mistakes.edits import changed, in_tf32

# ------------------------------------------------------------------------------------------------------------------ 4.1

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

TILED_WRONG = {
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

# ------------------------------------------------------------------------------------------------------------------ 4.2

BUDGET_WRONG = {
    "value_tile_forgotten": changed("4.2", ("query_rows + 2 * stages * key_rows", "query_rows + stages * key_rows")),
    "stages_forgotten": changed("4.2", ("query_rows + 2 * stages * key_rows", "query_rows + 2 * key_rows")),
    "stages_on_queries": changed(
        "4.2", ("(query_rows + 2 * stages * key_rows)", "stages * (query_rows + 2 * key_rows)")
    ),
    "keys_read_once": changed("4.2", ("query_tiles * 2 * key_length", "2 * key_length")),
    "output_forgotten": changed("4.2", ("2 * query_length + query_tiles", "query_length + query_tiles")),
    "tiles_rounded_down": changed("4.2", ("-(-query_length // query_rows)", "query_length // query_rows")),
    "heads_forgotten": changed("4.2", ("return heads * rows", "return rows")),
    "registers_ignored": changed("4.2", ("and query_rows * (head_dim + key_rows) <= 128 * threads", "")),
    "key_rows_first": changed(
        "4.2", ("max(fitting, default=None)", "max(fitting, key=lambda pair: (pair[1], pair[0]), default=None)")
    ),
    "fits_strictly": changed("4.2", ("stages=2) <= shared_memory_bytes", "stages=2) < shared_memory_bytes")),
}
# The wrong budgets of the first two would make choose_tiles wrong too, which calls shared_memory: only one is at fault.
OWN_BUDGET = (
    "shared_memory(query_rows, key_rows, head_dim, item_bytes, stages=2)",
    "(query_rows + 4 * key_rows) * head_dim * item_bytes",
)
for _name in ("value_tile_forgotten", "stages_forgotten", "stages_on_queries"):
    BUDGET_WRONG[_name] = BUDGET_WRONG[_name].replace(*OWN_BUDGET)

LOOPED_CHOICE = """# Exercise 4.2 · Tiles within a budget
def shared_memory(query_rows, key_rows, head_dim, item_bytes, stages):
    row = head_dim * item_bytes
    return query_rows * row + sum(2 * key_rows * row for stage in range(stages))

def traffic(heads, query_length, key_length, head_dim, item_bytes, query_rows):
    total = 0
    for first in range(0, query_length, query_rows):
        rows = min(query_rows, query_length - first)
        total += 2 * rows + 2 * key_length
    return total * heads * head_dim * item_bytes

def choose_tiles(head_dim, item_bytes, shared_memory_bytes, threads):
    for m in (256, 128, 64, 32, 16):
        for n in (256, 128, 64, 32, 16):
            if m * (head_dim + n) / threads > 128:
                continue
            if shared_memory(m, n, head_dim, item_bytes, 2) <= shared_memory_bytes:
                return m, n
"""

# ------------------------------------------------------------------------------------------------------------------ 4.3

UPDATE_RESCALE = {"4.3": "tl.exp(running_max - new_max)", "4.4": "tl.exp2(running_max - new_max)"}
RAGGED_RESCALE = "tl.exp2(running_max - reference_max)"
SUM = "running_sum = running_sum * rescale + tl.sum(weights, axis=1)"
ACCUMULATOR = "accumulator = accumulator * rescale[:, None] + product"
NEGATIVE_START = 'tl.full([BLOCK_M], float("-inf"), tl.float32)'


def of_every_kernel(identity):
    """The slips of grids and heads, in the course's answer to 4.3, 4.4, 4.5 or 4.6."""
    rescale = UPDATE_RESCALE.get(identity, RAGGED_RESCALE)
    tiles = "query.shape[1] // 64" if identity in UPDATE_RESCALE else "triton.cdiv(query_length, 64)"
    heads = "query.shape[0]" if identity in UPDATE_RESCALE else "heads"
    return {
        "head_forgotten": changed(identity, ("query_pointer + head * query_head_stride", "query_pointer")),
        "head_forgotten__of_keys": changed(identity, ("key_pointer + head * key_head_stride", "key_pointer")),
        "head_forgotten__of_values": changed(identity, ("value_pointer + head * value_head_stride", "value_pointer")),
        "head_forgotten__of_all": changed(
            identity,
            ("query_pointer + head * query_head_stride", "query_pointer"),
            ("key_pointer + head * key_head_stride", "key_pointer"),
            ("value_pointer + head * value_head_stride", "value_pointer"),
        ),
        "stored_in_one_head": changed(identity, ("output_pointer + head * output_head_stride", "output_pointer")),
        "only_first_head": changed(identity, (f"({tiles}, {heads})", f"({tiles}, 1)")),
        "only_first_head__one_axis": changed(identity, (f"({tiles}, {heads})", f"({tiles},)")),
        "only_first_rows": changed(identity, (f"({tiles}, {heads})", f"(1, {heads})")),
        "only_first_rows__every_program": changed(identity, ("tl.program_id(0) * BLOCK_M", "0 * BLOCK_M")),
        "nan_from_the_start": changed(identity, (rescale, rescale.replace("running_max - ", "-running_max + "))),
        "accumulator_in_float16": changed(
            identity, (ACCUMULATOR, f"accumulator = ({ACCUMULATOR[14:]}).to(query.dtype).to(tl.float32)")
        ),
        "key_not_transposed": changed(identity, ("tl.trans(key_tile)", "key_tile")),
        "grid_axes_exchanged": changed(identity, (f"({tiles}, {heads})", f"({heads}, {tiles})")),
    }


def of_causal_kernels(identity):
    """The slips of the online softmax in the course's answer to 4.4 or 4.5, which guard it differently."""
    rescale = UPDATE_RESCALE.get(identity, RAGGED_RESCALE)
    one = "tl.full([BLOCK_M], 1.0, tl.float32)"
    return {
        "sum_not_rescaled": changed(identity, (SUM, SUM.replace("running_sum * rescale", "running_sum"))),
        "nothing_rescaled": changed(identity, (rescale, one)),
        "divided_at_every_tile": changed(
            identity,
            (
                "        running_max = new_max",
                "        accumulator = accumulator / tl.where(running_sum == 0.0, 1.0, running_sum)[:, None]\n"
                "        running_max = new_max",
            ),
        ),
        "maximum_not_updated": changed(
            identity, ("        running_max = new_max", "        running_max = running_max")
        ),
        "not_divided": changed(identity, ("accumulator / total[:, None]", "accumulator")),
        "no_running_max": changed(
            identity,
            ("scores - new_max[:, None]" if identity == "4.4" else "scores - reference_max[:, None]", "scores"),
            (rescale, one),
        ),
        "scale_missing": changed(identity, ("math.log2(math.e) / math.sqrt(", "math.log2(math.e) + 0 * math.sqrt(")),
        "scale_twice": changed(identity, ("math.log2(math.e) / math.sqrt(", "math.log2(math.e) / (")),
        "keys_used_as_values": changed(
            identity,
            (
                "value_pointer + head * value_head_stride + value_offsets",
                "key_pointer + head * key_head_stride + key_offsets",
            ),
        ),
    }


LOOP = "for first_key in range(0, key_length, BLOCK_N):"
NEW_MAX = "new_max = tl.maximum(running_max, tl.max(scores, axis=1))"

KERNEL_WRONG = {
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

# ------------------------------------------------------------------------------------------------------------------ 4.4

POSITIONS = "positions = rows + key_length - query_length"
END = "end = tl.minimum(key_length, first_query + BLOCK_M + key_length - query_length)"
MASK = 'scores = tl.where(keys[None, :] <= positions[:, None], scores, float("-inf"))'

CAUSAL_WRONG = {
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
    head = tl.program_id(0)
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
LAST_PROGRAMS_FIRST = ("tl.program_id(0) * BLOCK_M", "(tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M")
NATURAL_BASE = (("tl.exp2(", "tl.exp("), ("math.log2(math.e) / math.sqrt", "1 / math.sqrt"))
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

# ------------------------------------------------------------------------------------------------------------------ 4.5

COLUMNS_MASKED = " & (columns < head_dim)[None, :]"

RAGGED_WRONG = {
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
    "head_dim_not_masked": changed("4.5", (COLUMNS_MASKED, "")),
    "output_written_out_of_bounds": changed(
        "4.5", (", output, mask=inside)", ", output, mask=(columns < head_dim)[None, :])")
    ),
    "tail_rows_read_out_of_bounds": changed(
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
# ------------------------------------------------------------------------------------------------------------------ 4.6

LSE_LINE = "log_sum_exp = (running_max + tl.log2(total)) * 0.6931471805599453"

LSE_WRONG = {
    "maximum_starts_at_zero": changed(
        "4.6", ('tl.full([BLOCK_M], float("-inf"), tl.float32)', "tl.zeros([BLOCK_M], tl.float32)")
    ),
    "log_of_sum_only": changed("4.6", (LSE_LINE, "log_sum_exp = tl.log(total)")),
    "lse_in_base_2": changed("4.6", (LSE_LINE, "log_sum_exp = running_max + tl.log2(total)")),
    "mixed_bases": changed("4.6", (LSE_LINE, "log_sum_exp = running_max + tl.log(total)")),
    "mixed_bases__log_for_log2": changed("4.6", ("tl.log2(total)", "tl.log(total)")),
    "lse_stored_in_one_head": changed("4.6", ("lse_pointer + head * query_length", "lse_pointer")),
    "lse_written_out_of_bounds": changed("4.6", ("log_sum_exp, mask=rows < query_length)", "log_sum_exp)")),
    "lse_tail_unwritten": changed("4.6", ("mask=rows < query_length)", "mask=rows < query_length // 64 * 64)")),
    "output_written_out_of_bounds": changed(
        "4.6", (", output, mask=inside)", ", output, mask=(columns < head_dim)[None, :])")
    ),
    "tail_rows_read_out_of_bounds": changed(
        "4.6",
        (
            "present = (keys < key_length)[:, None] & (columns < head_dim)[None, :]",
            "present = (columns < head_dim)[None, :]",
        ),
    ),
    "sum_without_log": changed("4.6", (LSE_LINE, "log_sum_exp = running_max * 0.6931471805599453 + total")),
    "unscaled_maximum": changed("4.6", (LSE_LINE, "log_sum_exp = running_max / scale_log2 + tl.log(total)")),
    "empty_row_lse_nan": changed(
        "4.6",
        (LSE_LINE, "log_sum_exp = (running_max - running_max + running_max + tl.log2(total)) * 0.6931471805599453"),
    ),
    "empty_row_lse_zero": changed(
        "4.6", (LSE_LINE, LSE_LINE + "\n    log_sum_exp = tl.where(running_sum == 0.0, 0.0, log_sum_exp)")
    ),
    "probabilities_cast_before_sum": changed(
        "4.6",
        (
            "rescale = tl.exp2(running_max - reference_max)",
            "weights = weights.to(query.dtype).to(tl.float32)\n        rescale = tl.exp2(running_max - reference_max)",
        ),
    ),
}

LSE_NATURAL = changed(
    "4.6",
    ("math.log2(math.e) / math.sqrt(head_dim)", "1 / math.sqrt(head_dim)"),
    ("tl.exp2", "tl.exp"),
    (LSE_LINE, "log_sum_exp = running_max + tl.log(total)"),
)
LSE_FROM_SUM = changed("4.6", (LSE_LINE, "log_sum_exp = running_max * 0.6931471805599453 + tl.log(total)"))
LSE_KEYS_OF_32 = changed("4.6", ("BLOCK_M=64, BLOCK_N=64", "BLOCK_M=64, BLOCK_N=32"))

# ------------------------------------------------------------------------------------------------------------------ 4.7

FAST_WRONG = {
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

WRONG = {
    "4.1": TILED_WRONG,
    "4.2": BUDGET_WRONG,
    "4.3": KERNEL_WRONG,
    "4.4": CAUSAL_WRONG,
    "4.5": RAGGED_WRONG,
    "4.6": LSE_WRONG,
    "4.7": FAST_WRONG,
}

UNUSUAL = {
    "4.1": {
        "keys in the outer loop": KEYS_OUTSIDE,
        "a softmax per tile, merged by log-sum-exp": MERGED_PARTS,
        "base two": changed(
            "4.1", ("torch.exp(", "torch.exp2("), ("scale = 1 / math", "scale = math.log2(math.e) / math")
        ),
    },
    "4.2": {
        "loops and early return": LOOPED_CHOICE,
        "ceil of a fraction": changed(
            "4.2", ("-(-query_length // query_rows)", "math.ceil(query_length / query_rows)")
        ),
        "a list for a tuple's maximum": changed(
            "4.2", ("return max(fitting, default=None)", "return sorted(fitting)[-1] if fitting else None")
        ),
    },
    "4.3": {
        "tl.dot in tf32": in_tf32("4.3"),
        "a flat grid": FLAT_GRID,
        "last keys first": BACKWARDS,
        "base two": BASE_TWO,
        "keys turned by their pointers": KEYS_TURNED_BY_POINTERS,
        "tiles of 32 keys": SMALL_KEY_TILES,
        "tiles of 128 queries": LARGE_QUERY_TILES,
    },
    "4.4": {
        "tl.dot in tf32": in_tf32("4.4"),
        "a while loop and the diagonal by itself": TWO_LOOPS,
        "a large negative number": LARGE_NUMBER,
        "natural base": changed("4.4", *NATURAL_BASE),
        "tiles of 32 keys": changed("4.4", ("BLOCK_M=64, BLOCK_N=64", "BLOCK_M=64, BLOCK_N=32")),
        "the diagonal first": ONE_KEY_TILE_AT_A_TIME_BACKWARDS,
    },
    "4.5": {
        "tl.dot in tf32": in_tf32("4.5"),
        "tiles counted": RAGGED_COUNTED,
        "a large negative number": RAGGED_LARGE_NUMBER,
        "natural base": changed("4.5", *NATURAL_BASE),
        "last programs first": changed("4.5", LAST_PROGRAMS_FIRST),
        "tiles of 32 keys": RAGGED_WIDE_TILES,
    },
    "4.6": {
        "tl.dot in tf32": in_tf32("4.6"),
        "natural base": LSE_NATURAL,
        "each part in natural units": LSE_FROM_SUM,
        "last programs first": changed("4.6", LAST_PROGRAMS_FIRST),
        "a flat grid": changed(
            "4.6",
            ("[(triton.cdiv(query_length, 64), heads)]", "[(triton.cdiv(query_length, 64) * heads,)]"),
            ("tl.program_id(1).to(tl.int64)", "(tl.program_id(0) // tl.cdiv(query_length, BLOCK_M)).to(tl.int64)"),
            ("tl.program_id(0) * BLOCK_M", "tl.program_id(0) % tl.cdiv(query_length, BLOCK_M) * BLOCK_M"),
        ),
        "tiles of 32 keys": LSE_KEYS_OF_32,
    },
    "4.7": {
        "keys turned by their pointers": FAST_KEYS_TURNED,
        "times the reciprocal of the sum": changed(
            "4.7", ("accumulator / total[:, None]", "accumulator * (1.0 / total[:, None])")
        ),
        "programs in order": changed("4.7", ("tile = tl.num_programs(0) - 1 - tile", "tile = tile + 0")),
    },
}
