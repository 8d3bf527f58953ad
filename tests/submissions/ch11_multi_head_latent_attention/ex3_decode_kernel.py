"""Wrong answers to exercise 11.3, and unusual right ones."""

from tests.submissions.edits import changed

SCORES = 'tl.where(present[None, :], scores * scale_log2, float("-inf"))'
ROPE = '        scores += tl.dot(query_rope, tl.trans(rope_keys), input_precision="ieee")\n'
PRODUCT = 'tl.dot(weights.to(latents.dtype), latents, input_precision="ieee")'
TILE = "rows = min(most_rows, max(16, triton.next_power_of_2(heads)))"
GRID = "grid = (triton.cdiv(heads, rows), batch)"
LENGTH = "    length = tl.load(lengths_pointer + sequence)\n"
LATENTS = "latents = tl.load(rows + latent_columns[None, :], mask=present[:, None], other=0.0)"
BATCH = "batch, heads, width = query.shape"
AGAIN = "values = tl.load(rows + latent_columns[None, :], mask=present[:, None], other=0.0)\n        "

ROPE_OF_ALL = "query_rows + rope_columns[None, :]"
IN_FLOAT32 = [
    (f"{name} = tl.load({rows}, mask={mask}, other=0.0)", f"{name} = tl.load({rows}, {mask}, 0.0).to(tl.float32)")
    for name, rows, mask in (
        ("query", "query_rows + latent_columns[None, :]", "exist"),
        ("query_rope", ROPE_OF_ALL, "exist"),
        ("latents", "rows + latent_columns[None, :]", "present[:, None]"),
        ("rope_keys", "rows + rope_columns[None, :]", "present[:, None]"),
    )
]

HEAD_BY_HEAD = """# Exercise 11.3 · A decode kernel that reads the latent once
@triton.jit
def one_head(q, cache, o, lengths, q_batch, q_head, c_batch, c_token, o_batch, o_head, scale,
             L: tl.constexpr, R: tl.constexpr, B: tl.constexpr):
    head, sequence = tl.program_id(0), tl.program_id(1).to(tl.int64)
    d, r = tl.arange(0, L), L + tl.arange(0, R)
    query = tl.load(q + sequence * q_batch + head * q_head + d).to(tl.float32)
    rope = tl.load(q + sequence * q_batch + head * q_head + r).to(tl.float32)
    cache += sequence * c_batch
    top = tl.full([], float("-inf"), tl.float32)
    total = tl.full([], 0.0, tl.float32)
    out = tl.zeros([L], tl.float32)
    length = tl.load(lengths + sequence)
    for first in range(0, length, B):
        n = first + tl.arange(0, B).to(tl.int64)
        inside = (n < length)[:, None]
        latent = tl.load(cache + n[:, None] * c_token + d[None, :], mask=inside, other=0.0)
        key = tl.load(cache + n[:, None] * c_token + r[None, :], mask=inside, other=0.0)
        s = tl.sum(latent * query[None, :], axis=1) + tl.sum(key * rope[None, :], axis=1)
        s = tl.where(n < length, s * scale, float("-inf"))
        new = tl.maximum(top, tl.max(s, axis=0))
        w = tl.exp2(s - new)
        out = out * tl.exp2(top - new) + tl.sum(w[:, None] * latent, axis=0)
        total = total * tl.exp2(top - new) + tl.sum(w, axis=0)
        top = new
    out = out / tl.where(total == 0.0, 1.0, total)
    tl.store(o + sequence * o_batch + head * o_head + d, out.to(o.dtype.element_ty))

def latent_decode(query, cache, lengths, scale, value_dim):
    batch, heads, width = query.shape
    output = torch.empty(batch, heads, value_dim, dtype=query.dtype, device=query.device)
    one_head[(heads, batch)](query, cache, output, lengths, *query.stride()[:2], *cache.stride()[:2],
                             *output.stride()[:2], scale * 1.4426950408889634, L=value_dim, R=width - value_dim, B=32)
    return output
"""

# A row in one tile that is filled up to a power of two, as vllm#40705 has it, and the tile as value.
WHOLE_ROW = (
    ("ROPE: tl.constexpr, BLOCK_N", "ROPE: tl.constexpr, WIDE: tl.constexpr, BLOCK_N"),
    ("ROPE=width - value_dim,", "ROPE=width - value_dim, WIDE=triton.next_power_of_2(width),"),
    ("rope_columns = LATENT + tl.arange(0, ROPE)", "wide = tl.arange(0, WIDE)"),
    (
        "query = tl.load(query_rows + latent_columns[None, :], mask=exist, other=0.0)",
        "query = tl.load(query_rows + wide[None, :], mask=exist & (wide < LATENT + ROPE)[None, :], other=0.0)",
    ),
    ("    query_rope = tl.load(query_rows + rope_columns[None, :], mask=exist, other=0.0)  # [ROWS, ROPE]\n", ""),
    (
        LATENTS,
        "latents = tl.load(rows + wide[None, :], mask=present[:, None] & (wide < LATENT + ROPE)[None, :], other=0.0)",
    ),
    (
        "        rope_keys = tl.load(rows + rope_columns[None, :], mask=present[:, None], other=0.0)  "
        "# [BLOCK_N, ROPE]\n",
        "",
    ),
    (ROPE, ""),
)

WRONG = {
    "fixed_size": changed("11.3", ("heads, rows), batch)", "heads, rows), min(batch, 132))")),
    "fixed_size__two_blocks": changed("11.3", ("triton.cdiv(heads, rows), b", "min(2, triton.cdiv(heads, rows)), b")),
    # vllm#33529: V is loaded although it is a slice of K.
    "latent_loaded_twice": changed(
        "11.3", (PRODUCT, PRODUCT.replace(" latents,", " values,")), ("product = tl", AGAIN + "product = tl")
    ),
    "rows_read_for_every_head": HEAD_BY_HEAD,
    # vllm#40705: the tile of whole rows taken for values, where the widths differ.
    "value_tile_is_the_whole_row": changed("11.3", *WHOLE_ROW),
    "rope_forgotten": changed("11.3", (ROPE, "")),
    "product_in_float32": changed("11.3", *IN_FLOAT32),
    "product_in_float32__of_the_values": changed(
        "11.3", (PRODUCT, 'tl.dot(weights, latents.to(tl.float32), input_precision="ieee")')
    ),
    "product_in_float32__by_the_scale": changed(
        "11.3",
        ("scores * scale_log2, float", "scores, float"),
        (
            "    cache_pointer += sequence",
            "    query = query.to(tl.float32) * scale_log2\n"
            "    query_rope = query_rope.to(tl.float32) * scale_log2\n    cache_pointer += sequence",
        ),
        ("tl.trans(latents)", "tl.trans(latents.to(tl.float32))"),
        ("tl.trans(rope_keys)", "tl.trans(rope_keys.to(tl.float32))"),
    ),
    "fewer_than_16_rows": changed("11.3", (TILE, "rows = min(most_rows, triton.next_power_of_2(heads))")),
    "fewer_than_16_rows__8_at_least": changed("11.3", (TILE, TILE.replace("16,", "8,"))),
    "latent_part_forgotten": changed("11.3", ("scores = tl.dot(query,", "scores = 0.0 * tl.dot(query,")),
    "first_head_for_all__rope": changed(
        "11.3", (f"tl.load({ROPE_OF_ALL}", f"tl.load(query_pointer + sequence * query_batch_stride{ROPE_OF_ALL[10:]}")
    ),
    "first_block_for_all": changed(
        "11.3", ("members[:, None] * query_head", "tl.arange(0, ROWS)[:, None] * query_head")
    ),
    "first_block_for_all__rope": changed(
        "11.3",
        (ROPE_OF_ALL, ROPE_OF_ALL.replace(" + rope", " - tl.program_id(0) * ROWS * query_head_stride + rope")),
    ),
    "first_cache_for_all__rotary_keys": changed(
        "11.3", ("tl.load(rows + rope_columns", "tl.load(rows - sequence * cache_batch_stride + rope_columns")
    ),
    "first_queries_for_all__rope": changed(
        "11.3", (ROPE_OF_ALL, ROPE_OF_ALL.replace(" + rope", " - sequence * query_batch_stride + rope"))
    ),
    "newest_left_out__by_the_mask": changed("11.3", ("present = tokens < length", "present = tokens < length - 1")),
    "rope_scaled_apart": changed(
        "11.3",
        (
            'scores = tl.dot(query, tl.trans(latents), input_precision="ieee")',
            'scores = tl.dot(query, tl.trans(latents), input_precision="ieee") * scale_log2',
        ),
        ("scores * scale_log2, float", "scores, float"),
    ),
    "rope_from_the_first_columns": changed("11.3", ("LATENT + tl.arange(0, ROPE)", "tl.arange(0, ROPE)")),
    "rope_from_the_first_columns__keys": changed(
        "11.3", ("tl.load(rows + rope_columns[None, :]", "tl.load(rows + rope_columns[None, :] - LATENT")
    ),
    "value_from_the_last_columns": changed(
        "11.3",
        (PRODUCT, PRODUCT.replace(" latents,", " values,")),
        ("product = tl", AGAIN.replace("rows + latent", "rows + ROPE + latent") + "product = tl"),
    ),
    "scale_missing": changed("11.3", ("scale * math.log2(math.e)", "math.log2(math.e)")),
    "scale_by_the_width": changed("11.3", ("scale * math.log2(math.e)", "width**-0.5 * math.log2(math.e)")),
    "scale_by_the_width__latent": changed("11.3", ("scale * math.log2(math.e)", "value_dim**-0.5 * math.log2(math.e)")),
    "natural_exp": changed("11.3", ("tl.exp2(", "tl.exp(")),
    "accumulator_not_rescaled": changed("11.3", ("accumulator * rescale[:, None]", "accumulator")),
    "sum_not_rescaled": changed("11.3", ("running_sum * rescale", "running_sum")),
    "nan_from_the_start": changed("11.3", ("tl.exp2(running_max - new_max)", "tl.exp2(new_max - running_max)")),
    "tail_not_masked": changed("11.3", (SCORES, "scores * scale_log2")),
    "slots_count": changed(
        "11.3",
        (LATENTS, LATENTS.replace("present[:, None]", "(tokens < capacity)[:, None]")),
        ("rope_columns[None, :], mask=present[:, None]", "rope_columns[None, :], mask=(tokens < capacity)[:, None]"),
        ("lengths_pointer, heads,\n", "lengths_pointer, heads, capacity,\n"),
        ("output, lengths, heads,", "output, lengths, heads, cache.shape[1],"),
    ),
    "first_cache_for_all": changed("11.3", ("    cache_pointer += sequence * cache_batch_stride\n", "")),
    "row_stride_ignored": changed(
        "11.3", ("tokens[:, None] * cache_token_stride", "tokens[:, None] * (LATENT + ROPE)")
    ),
    "empty_sequence_nan": changed("11.3", ("tl.where(running_sum == 0.0, 1.0, running_sum)", "running_sum")),
    "not_divided": changed("11.3", ("(accumulator / total[:, None])", "accumulator")),
    "offset_in_32_bits": changed("11.3", (".to(tl.int64)", "")),
    "heads_without_a_program": changed("11.3", (GRID, "grid = (1, batch)")),
    "heads_without_a_program__rounded_down": changed("11.3", (GRID, "grid = (heads // rows, batch)")),
    "empty_sequence_unwritten": changed("11.3", (LENGTH, f"{LENGTH}    if length == 0:\n        return\n")),
    "one_sequence_alone": changed(
        "11.3",
        ("sequence = tl.program_id(1)", "sequence = tl.program_id(0)"),
        ("members = tl.program_id(0)", "members = tl.program_id(1)"),
    ),
    "tile_too_short": changed("11.3", (TILE, "rows = 16")),
    "tile_too_short__32": changed("11.3", (TILE, "rows = 32")),
    "tile_too_tall": changed("11.3", (TILE, "rows = max(16, triton.next_power_of_2(heads))")),
    "tile_too_tall__given": changed("11.3", ("most_rows = 64 if roomy else 16", "most_rows = 128 if roomy else 16")),
    "log2e_missing": changed("11.3", ("scale * math.log2(math.e)", "scale")),
    "finite_mask": changed("11.3", (SCORES, SCORES.replace('float("-inf")', "-1e4"))),
    "outside_the_queries": changed(
        "11.3", ("exist = (members < heads)[:, None]", "exist = (members < ROWS + heads)[:, None]")
    ),
    "outside_the_cache": changed("11.3", ("present = tokens < length", "present = tokens < length + BLOCK_N")),
    "rounded_to_16_bits": changed("11.3", (".to(output_pointer.dtype.element_ty)", ".to(tl.float16)")),
    "computed_in_16_bits": changed("11.3", ("weights.to(latents.dtype)", "weights.to(tl.float16).to(latents.dtype)")),
    "copied_by_pytorch": changed("11.3", (BATCH, f"cache = cache.contiguous()\n    {BATCH}")),
    "no_kernel_launched": """# Exercise 11.3 · A decode kernel that reads the latent once
def latent_decode(query, cache, lengths, scale, value_dim):
    scores = torch.einsum("bhw,bnw->bhn", query.float(), cache.nan_to_num().float()) * scale
    n = torch.arange(cache.shape[1], device=cache.device)
    scores = scores.masked_fill(n >= lengths[:, None, None], -1e30)
    weights = (scores - scores.amax(-1, keepdim=True)).exp() * (n < lengths[:, None, None])
    weights = weights / weights.sum(-1, keepdim=True).clamp(min=1e-30)
    return torch.einsum("bhn,bnw->bhw", weights, cache.nan_to_num().float())[..., :value_dim].to(query.dtype)
""",
    "rope_forgotten__and_sum_not_rescaled": changed("11.3", (ROPE, ""), ("running_sum * rescale", "running_sum")),
}

UNUSUAL = {
    "one tile for the row, stored in part": changed(
        "11.3",
        *WHOLE_ROW,
        ("tl.zeros([ROWS, LATENT], tl.float32)", "tl.zeros([ROWS, WIDE], tl.float32)"),
        (
            "tl.store(output_rows + latent_columns[None, :], output, mask=exist)",
            "tl.store(output_rows + wide[None, :], output, mask=exist & (wide < LATENT)[None, :])",
        ),
    ),
    "tokens as the rows of the scores": changed(
        "11.3",
        (
            'tl.dot(query, tl.trans(latents), input_precision="ieee")',
            'tl.trans(tl.dot(latents, tl.trans(query), input_precision="ieee"))',
        ),
    ),
    "from the last tile to the first": changed(
        "11.3",
        (
            "for first in range(0, length, BLOCK_N):",
            "for step in range(0, tl.cdiv(length, BLOCK_N)):\n"
            "        first = (tl.cdiv(length, BLOCK_N) - 1 - step) * BLOCK_N",
        ),
    ),
    "a tile of 64 for any number of heads": changed("11.3", (TILE, "rows = most_rows")),
    "natural exponentials": changed("11.3", ("tl.exp2(", "tl.exp("), ("scale * math.log2(math.e)", "scale")),
    "tiles of 16 tokens, the output laid out otherwise": changed(
        "11.3",
        ("BLOCK_N=32", "BLOCK_N=16"),
        (
            "torch.empty(batch, heads, value_dim, dtype=query.dtype, device=query.device)",
            "torch.empty(heads, batch, value_dim, dtype=query.dtype, device=query.device).transpose(0, 1)",
        ),
    ),
}
