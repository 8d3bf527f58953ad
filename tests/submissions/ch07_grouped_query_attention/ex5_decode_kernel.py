"""Wrong answers to exercise 7.5, and unusual right ones."""

from tests.submissions.edits import changed, in_tf32

ROWS = "(key_head * GROUP + rows)[:, None]"


LOOP = "for first_key in range(0, length, BLOCK_N):"


LENGTH = "length = tl.load(lengths_pointer + sequence)"


BATCH = "batch, query_heads, head_dim = query.shape"


TWO_PASSES = f"""for first_key in range(0, length, BLOCK_N):  # the maximum first
        keys = first_key + tl.arange(0, BLOCK_N).to(tl.int64)
        in_use = (keys < length)[:, None]
        key_tile = tl.load(key_pointer + keys[:, None] * key_stride + columns[None, :], mask=in_use, other=0.0)
        scores = tl.dot(query, tl.trans(key_tile), input_precision="ieee") * scale_log2
        scores = tl.where((keys < length)[None, :], scores, float("-inf"))
        running_max = tl.maximum(running_max, tl.max(scores, axis=1))
    {LOOP}"""


KEYS_MASK = "in_use = (keys < length)[:, None]"


SCORES = 'scores = tl.dot(query, tl.trans(key_tile), input_precision="ieee") * scale_log2'


NOWHERE = 'scores = tl.where((keys < length)[None, :], scores, float("-inf"))'


OF_KEY_HEAD = "key_pointer += sequence * key_batch_stride + key_head * key_head_stride"


OF_VALUE_HEAD = "value_pointer += sequence * value_batch_stride + key_head * value_head_stride"


OUTPUT_AS_QUERY = (
    ("rows)[:, None] * output_head_stride", "rows)[:, None] * query_head_stride"),
    ("output_pointer + sequence * output_batch_stride", "output_pointer + sequence * query_batch_stride"),
)


NO_NAN = (
    "weights = tl.exp2(scores - new_max[:, None])",
    'new_max = tl.where(new_max == float("-inf"), -1e38, new_max)\n'
    "        weights = tl.exp2(scores - new_max[:, None])",
)


def with_capacity(*replacements):
    """The course's answer with the cache's capacity handed to the kernel, and changed on top of that."""
    return changed(
        "7.5",
        ("output_head_stride, scale_log2,\n", "output_head_stride, scale_log2, capacity,\n"),
        (
            "math.log2(math.e) / math.sqrt(head_dim),\n",
            "math.log2(math.e) / math.sqrt(head_dim), key_cache.shape[2],\n",
        ),
        *replacements,
    )


HEAD_BY_HEAD = """# Exercise 7.5 · A decode kernel that reads each key once
@triton.jit
def one_head(q, k, v, o, lengths, q_batch, q_head, k_batch, k_head, k_row, v_batch, v_head, v_row, o_batch, o_head,
             scale, GROUP: tl.constexpr, D: tl.constexpr, B: tl.constexpr):
    sequence, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    d = tl.arange(0, D)
    query = tl.load(q + sequence * q_batch + head * q_head + d).to(tl.float32)
    k += sequence * k_batch + head // GROUP * k_head
    v += sequence * v_batch + head // GROUP * v_head
    top = tl.full([], float("-inf"), tl.float32)
    total = tl.full([], 0.0, tl.float32)
    out = tl.zeros([D], tl.float32)
    length = tl.load(lengths + sequence)
    for first in range(0, length, B):
        n = first + tl.arange(0, B).to(tl.int64)
        key = tl.load(k + n[:, None] * k_row + d[None, :], mask=(n < length)[:, None], other=0.0).to(tl.float32)
        s = tl.where(n < length, tl.sum(key * query[None, :], axis=1) * scale, float("-inf"))
        new = tl.maximum(top, tl.max(s, axis=0))
        w = tl.exp2(s - new)
        value = tl.load(v + n[:, None] * v_row + d[None, :], mask=(n < length)[:, None], other=0.0).to(tl.float32)
        out = out * tl.exp2(top - new) + tl.sum(w[:, None] * value, axis=0)
        total = total * tl.exp2(top - new) + tl.sum(w, axis=0)
        top = new
    out = out / tl.where(total == 0.0, 1.0, total)
    tl.store(o + sequence * o_batch + head * o_head + d, out.to(o.dtype.element_ty))

def grouped_decode(query, key_cache, value_cache, lengths):
    batch, heads, head_dim = query.shape
    output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    one_head[(batch, heads)](query, key_cache, value_cache, output, lengths, *query.stride()[:2],
                             *key_cache.stride()[:3], *value_cache.stride()[:3], *output.stride()[:2],
                             1.4426950408889634 * head_dim ** -0.5, GROUP=heads // key_cache.shape[1], D=head_dim, B=64)
    return output
"""


KEYS_NAMED = (
    HEAD_BY_HEAD.replace("(q, k, v, o, lengths,", "(q, key_cache, value_cache, o, lengths,")
    .replace("    k += sequence", "    k = key_cache + sequence")
    .replace("    v += sequence", "    v = value_cache + sequence")
)


WRONG = {
    "group_offset_missing__and_accumulator_not_rescaled": changed(
        "7.5",
        ("query_rows = (key_head * GROUP + rows)", "query_rows = rows"),
        ("accumulator * rescale[:, None]", "accumulator"),
    ),
    "newest_loaded_as_zeros": changed(
        "7.5",
        ("in_use = (keys < length)[:, None]", "in_use = (keys < length - 1)[:, None]"),
    ),
    "nan_from_the_start": changed("7.5", ("tl.exp2(running_max - new_max)", "tl.exp2(new_max - running_max)")),
    "offset_in_32_bits": changed("7.5", (".to(tl.int64)", "")),
    "offset_in_32_bits__heads": changed(
        "7.5", ("key_head = tl.program_id(1).to(tl.int64)", "key_head = tl.program_id(1)")
    ),
    "offset_in_32_bits__tokens": changed("7.5", ("tl.arange(0, BLOCK_N).to(tl.int64)", "tl.arange(0, BLOCK_N)")),
    "copied_by_pytorch": changed(
        "7.5", (BATCH, f"key_cache, value_cache = key_cache.contiguous(), value_cache.contiguous()\n    {BATCH}")
    ),
    "copied_by_pytorch__to_clean_it": changed(
        "7.5", (BATCH, f"key_cache, value_cache = key_cache.nan_to_num(), value_cache.nan_to_num()\n    {BATCH}")
    ),
    "copied_by_pytorch__by_sequence": changed(
        "7.5", (BATCH, f"value_cache = torch.stack([value_cache[b] for b in range(len(lengths))])\n    {BATCH}")
    ),
    "group_of_all_heads": changed(
        "7.5",
        ("GROUP=group", "GROUP=query_heads"),
        ("triton.next_power_of_2(group)", "triton.next_power_of_2(query_heads)"),
    ),
    "keys_loaded_again": changed("7.5", (LOOP, TWO_PASSES)),
    "computed_in_16_bits": changed(
        "7.5",
        (
            "tl.dot(weights.to(value_tile.dtype), value_tile, ",
            "tl.dot(weights.to(tl.float16).to(value_tile.dtype), value_tile, ",
        ),
    ),
    "rounded_to_16_bits": changed("7.5", (".to(output_pointer.dtype.element_ty)", ".to(tl.float16)")),
    "output_by_other_strides__sequence": changed(
        "7.5", ("sequence * output_batch_stride", "sequence * query_batch_stride")
    ),
    "by_modulo": changed("7.5", (ROWS, "(key_head + rows * tl.num_programs(1))[:, None]")),
    "by_count": changed(
        "7.5",
        ("GROUP=group, ROWS=rows,", "GROUP=1, ROWS=16,"),
        ("grid = (batch, key_heads)", "grid = (batch, query_heads)"),
        ("    GROUP: tl.constexpr,", "    key_heads, GROUP: tl.constexpr,"),
        ("math.log2(math.e) / math.sqrt(head_dim),\n", "math.log2(math.e) / math.sqrt(head_dim), key_heads,\n"),
        (
            OF_KEY_HEAD,
            "own = tl.minimum(key_head // key_heads, key_heads - 1)\n"
            "    key_pointer += sequence * key_batch_stride + own * key_head_stride",
        ),
        (OF_VALUE_HEAD, "value_pointer += sequence * value_batch_stride + own * value_head_stride"),
    ),
    "first_head_for_all": changed(
        "7.5",
        (OF_KEY_HEAD, "key_pointer += sequence * key_batch_stride"),
        (OF_VALUE_HEAD, "value_pointer += sequence * value_batch_stride"),
    ),
    "group_offset_missing": changed("7.5", (ROWS, "rows[:, None]")),
    "group_larger_than_the_tile": changed("7.5", ("rows = max(16, triton.next_power_of_2(group))", "rows = 16")),
    "scale_missing": changed("7.5", (SCORES, SCORES.removesuffix(" * scale_log2"))),
    "scale_missing__in_base_e": changed("7.5", (SCORES, SCORES.removesuffix(" * scale_log2")), ("tl.exp2(", "tl.exp(")),
    "scale_twice": changed("7.5", (SCORES, SCORES + " * scale_log2")),
    "natural_exp": changed("7.5", ("tl.exp2(", "tl.exp(")),
    "log2e_missing": changed("7.5", ("math.log2(math.e) / math.sqrt(head_dim),", "1 / math.sqrt(head_dim),")),
    "length_ignored": with_capacity((LENGTH, "length = capacity")),
    "first_length_for_all": changed("7.5", (LENGTH, "length = tl.load(lengths_pointer)")),
    "longest_length_for_all": changed(
        "7.5",
        ("query, key_cache, value_cache, output, lengths,", "query, key_cache, value_cache, output, longest,"),
        ("    grid = (batch", "    longest = torch.full_like(lengths, int(lengths.max()))\n    grid = (batch"),
    ),
    "one_token_too_few": changed("7.5", (LENGTH, "length = tl.maximum(tl.load(lengths_pointer + sequence) - 1, 0)")),
    "one_token_too_few__in_the_mask": changed(
        "7.5", ("(keys < length)[None, :]", "(keys < length - 1)[None, :]"), NO_NAN
    ),
    "one_token_too_many": with_capacity(
        (LENGTH, "length = tl.minimum(tl.load(lengths_pointer + sequence) + 1, capacity)")
    ),
    "one_token_too_many__in_the_masks": changed("7.5", ("keys < length)", "keys <= length)")),
    "last_tile_dropped": changed("7.5", (LOOP, "for first_key in range(0, length // BLOCK_N * BLOCK_N, BLOCK_N):")),
    "tail_keys_scored": changed("7.5", (NOWHERE, "scores = scores")),
    "unused_slots_count": with_capacity((KEYS_MASK, "in_use = (keys < capacity)[:, None]")),
    "no_running_max": changed(
        "7.5",
        ("weights = tl.exp2(scores - new_max[:, None])", "weights = tl.exp2(scores)"),
        ("rescale = tl.exp2(running_max - new_max)", "rescale = tl.full([ROWS], 1.0, tl.float32)"),
    ),
    "no_running_max__unguarded": changed(
        "7.5",
        ("weights = tl.exp2(scores - new_max[:, None])", "weights = tl.exp2(scores)"),
        ("rescale = tl.exp2(running_max - new_max)", "rescale = tl.full([ROWS], 1.0, tl.float32)"),
        ("accumulator / total[:, None]", "accumulator / running_sum[:, None]"),
    ),
    "maximum_starts_at_zero": changed(
        "7.5", ('tl.full([ROWS], float("-inf"), tl.float32)', "tl.zeros([ROWS], tl.float32)")
    ),
    "maximum_starts_at_zero__unguarded": changed(
        "7.5",
        ('tl.full([ROWS], float("-inf"), tl.float32)', "tl.zeros([ROWS], tl.float32)"),
        ("accumulator / total[:, None]", "accumulator / running_sum[:, None]"),
    ),
    "scale_missing__and_empty_sequence_nan": changed(
        "7.5",
        (SCORES, SCORES.removesuffix(" * scale_log2")),
        ("accumulator / total[:, None]", "accumulator / running_sum[:, None]"),
    ),
    "accumulator_not_rescaled": changed("7.5", ("accumulator * rescale[:, None] + product", "accumulator + product")),
    "sum_not_rescaled": changed("7.5", ("running_sum * rescale + tl.sum", "running_sum + tl.sum")),
    "not_divided": changed("7.5", ("accumulator / total[:, None]", "accumulator")),
    "keys_used_as_values": changed(
        "7.5",
        ("tl.load(value_pointer + keys[:, None] * value_stride", "tl.load(key_pointer + keys[:, None] * key_stride"),
    ),
    "empty_sequence_nan": changed("7.5", ("accumulator / total[:, None]", "accumulator / running_sum[:, None]")),
    "strides_ignored": with_capacity(
        (
            OF_KEY_HEAD,
            "key_stride = HEAD_DIM\n"
            "    key_pointer += (sequence * tl.num_programs(1) + key_head) * capacity * HEAD_DIM",
        )
    ),
    "strides_ignored__values_by_the_keys": changed(
        "7.5",
        (OF_VALUE_HEAD, "value_pointer += sequence * key_batch_stride + key_head * key_head_stride"),
        ("keys[:, None] * value_stride", "keys[:, None] * key_stride"),
    ),
    "strides_ignored__rows_of_values": changed("7.5", ("keys[:, None] * value_stride", "keys[:, None] * HEAD_DIM")),
    "strides_ignored__queries": changed(
        "7.5",
        (
            "sequence * query_batch_stride + query_rows",
            "sequence * tl.num_programs(1) * GROUP * HEAD_DIM + query_rows",
        ),
        ("[:, None] * query_head_stride", "[:, None] * HEAD_DIM"),
    ),
    "strides_ignored__heads_of_values": changed("7.5", ("key_head * value_head_stride", "key_head * key_head_stride")),
    "strides_ignored__sequences_of_values": changed(
        "7.5", ("sequence * value_batch_stride", "sequence * key_batch_stride")
    ),
    "strides_ignored__heads_of_queries": changed("7.5", ("[:, None] * query_head_stride", "[:, None] * HEAD_DIM")),
    "strides_ignored__sequences_of_queries": changed(
        "7.5", ("sequence * query_batch_stride", "sequence * tl.num_programs(1) * GROUP * HEAD_DIM")
    ),
    "maximum_not_updated": changed("7.5", ("        running_max = new_max\n", "")),
    "tail_keys_scored__and_strides_ignored": changed(
        "7.5", (NOWHERE, "scores = scores"), ("keys[:, None] * value_stride", "keys[:, None] * key_stride")
    ),
    "grid_axes_exchanged": changed("7.5", ("grid = (batch, key_heads)", "grid = (key_heads, batch)")),
    "program_for_each_query_head": changed("7.5", ("grid = (batch, key_heads)", "grid = (batch, query_heads)")),
    "output_by_other_strides": changed("7.5", *OUTPUT_AS_QUERY),
    "group_rows_not_masked": changed("7.5", ("in_group = (rows < GROUP)[:, None]", "in_group = (rows >= 0)[:, None]")),
    "group_rows_not_masked__in_the_store": changed(
        "7.5", ("+ output_rows, output, mask=in_group)", "+ output_rows, output)")
    ),
    "rows_of_no_head_read__groups_of_rows": changed("7.5", (ROWS, "(key_head * ROWS + rows)[:, None]")),
    "tail_read_out_of_bounds": changed("7.5", (KEYS_MASK, "in_use = (keys >= 0)[:, None]")),
    "keys_repeated": changed(
        "7.5",
        (
            "    grid = (batch, key_heads)",
            "    key_cache, value_cache = (x.repeat_interleave(group, dim=1) for x in (key_cache, value_cache))\n"
            "    key_heads, group = query_heads, 1\n    grid = (batch, key_heads)",
        ),
    ),
    "keys_reread": KEYS_NAMED,
    "too_many_bytes__names_that_say_nothing": HEAD_BY_HEAD,
    "forbidden_operation": """# Exercise 7.5 · A decode kernel that reads each key once
@triton.jit
def copy(x, y, n, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(y + i, tl.load(x + i, mask=i < n), mask=i < n)

def grouped_decode(query, key_cache, value_cache, lengths):
    rows = []
    for q, k, v, n in zip(query, key_cache, value_cache, lengths.tolist()):
        q = q.unflatten(0, (k.shape[0], -1)).float()
        w = torch.softmax(q @ k[:, :n].float().mT / q.shape[-1] ** 0.5, -1)
        rows.append((w @ v[:, :n].float()).flatten(0, 1))
    result = torch.stack(rows).to(query.dtype)
    output = torch.empty_like(result)
    copy[(triton.cdiv(result.numel(), 1024),)](result, output, result.numel(), B=1024)
    return output
""",
    "rows_of_no_head_stored": changed(
        "7.5", ("(key_head * GROUP + rows)[:, None] * output_head", "(key_head * ROWS + rows)[:, None] * output_head")
    ),
    "only_first_tile__of_all_keys": changed(
        "7.5",
        (LOOP, "for first_key in range(0, tl.minimum(length, BLOCK_N), BLOCK_N):"),
        ("BLOCK_N=64", "BLOCK_N=128"),
    ),
    "empty_sequence_nan__to_the_longest": changed(
        "7.5",
        ("output_head_stride, scale_log2,\n", "output_head_stride, scale_log2, longest,\n"),
        ("math.sqrt(head_dim),\n", "math.sqrt(head_dim), int(lengths.max()),\n"),
        (LOOP, LOOP.replace("length", "longest")),
    ),
    "maximum_starts_finite": changed("7.5", ('tl.full([ROWS], float("-inf")', "tl.full([ROWS], -10000.0")),
    "scale_of_one_size": changed("7.5", ("math.sqrt(head_dim)", "8")),
    "scores_in_float16": changed("7.5", (NOWHERE, f"scores = scores.to(tl.float16).to(tl.float32)\n        {NOWHERE}")),
    "modified_input": changed(
        "7.5",
        (BATCH, f"{BATCH}\n    for b, length in enumerate(lengths.tolist()):\n        key_cache[b, :, length:] = 0.0"),
    ),
    "keys_loaded_again__and_offsets_in_32_bits": changed(
        "7.5", (LOOP, TWO_PASSES), ("tl.arange(0, BLOCK_N).to(tl.int64)", "tl.arange(0, BLOCK_N)")
    ),
}


GRID_TURNED = changed(
    "7.5",
    ("grid = (batch, key_heads)", "grid = (key_heads, batch)"),
    ("sequence = tl.program_id(0)", "sequence = tl.program_id(1)"),
    ("key_head = tl.program_id(1)", "key_head = tl.program_id(0)"),
)


FLAT_GRID = changed(
    "7.5",
    ("grid = (batch, key_heads)", "grid = (batch * key_heads,)"),
    ("    GROUP: tl.constexpr,", "    key_heads, GROUP: tl.constexpr,"),
    ("math.log2(math.e) / math.sqrt(head_dim),\n", "math.log2(math.e) / math.sqrt(head_dim), key_heads,\n"),
    ("sequence = tl.program_id(0).to(tl.int64)", "sequence = (tl.program_id(0) // key_heads).to(tl.int64)"),
    ("key_head = tl.program_id(1).to(tl.int64)", "key_head = (tl.program_id(0) % key_heads).to(tl.int64)"),
)


BASE_E = changed(
    "7.5", ("tl.exp2(", "tl.exp("), ("math.log2(math.e) / math.sqrt(head_dim),", "1 / math.sqrt(head_dim),")
)


SCALED_QUERY = changed(
    "7.5",
    (
        SCORES,
        SCORES.removesuffix(" * scale_log2").replace(
            "tl.dot(query, tl.trans(key_tile)", "tl.dot(scaled, tl.trans(key_tile).to(tl.float32)"
        ),
    ),
    ("    running_max = tl.full", "    scaled = query.to(tl.float32) * scale_log2\n    running_max = tl.full"),
)


BACKWARDS = changed(
    "7.5",
    (
        "keys = first_key + tl.arange(0, BLOCK_N)",
        "keys = tl.cdiv(length, BLOCK_N) * BLOCK_N - BLOCK_N - first_key + tl.arange(0, BLOCK_N)",
    ),
)


WIDE_TILES = changed("7.5", ("BLOCK_N=64", "BLOCK_N=128"), ("rows = max(16,", "rows = max(32,"))


SUMS_WITHOUT_DOT = changed(
    "7.5",
    (
        SCORES,
        "scores = tl.sum(query[:, None, :].to(tl.float32) * key_tile[None, :, :].to(tl.float32), axis=2) * scale_log2",
    ),
    (
        'tl.dot(weights.to(value_tile.dtype), value_tile, input_precision="ieee")',
        "tl.sum(weights[:, :, None] * value_tile[None, :, :].to(tl.float32), axis=1)",
    ),
)


IN_A_LARGER_BUFFER = changed(
    "7.5",
    (
        "    output = torch.empty(query.shape, dtype=query.dtype, device=query.device)\n",
        "    buffer = torch.empty(batch, query_heads, head_dim + 8, dtype=query.dtype, device=query.device)\n"
        "    output = buffer[..., :head_dim]\n",
    ),
)


UNUSUAL = {
    "a view of a larger buffer": IN_A_LARGER_BUFFER,
    "tl.dot in tf32": in_tf32("7.5"),
    "grid turned": GRID_TURNED,
    "flat grid": FLAT_GRID,
    "base e": BASE_E,
    "scaled query": SCALED_QUERY,
    "backwards": BACKWARDS,
    "wide tiles": WIDE_TILES,
    "without dot": SUMS_WITHOUT_DOT,
}


WRONG |= {
    "maximum_of_the_first_tile": changed(
        "7.5",
        (
            "tl.maximum(running_max, tl.max(scores, axis=1))",
            "tl.where(running_max == float('-inf'), tl.max(scores, axis=1), running_max)",
        ),
    ),
}


def lagging(by):
    """The running maximum stays where it is until a tile's own lies further above it, in units of log 2."""
    own = "tl.max(scores, axis=1)"
    lazy = f"tl.where({own} > running_max + {by}, {own}, running_max)"
    return changed("7.5", (f"tl.maximum(running_max, {own})", lazy))


def rows_of(number):
    """Tiles of so many query heads, whatever the group."""
    return changed("7.5", ("rows = max(16, triton.next_power_of_2(group))", f"rows = {number}"))


WRONG |= {
    "maximum_lags": lagging("12 * 1.4427"),
    "maximum_lags__by_20_bits": lagging(20),
    "group_larger_than_the_tile__of_32": rows_of(32),
    "group_larger_than_the_tile__of_64": rows_of(64),
}


UNUSUAL |= {
    "a maximum that lags by 8 bits": lagging(8),
}


PRODUCTS = 'tl.dot(query, tl.trans(key_tile), input_precision="ieee")'
NEW_SUM = "running_sum * rescale + tl.sum(weights, axis=1)"


WRONG |= {
    # In float32 the first and the last do no harm. Products pass 65,504 where scores do not, and what a tile of small
    # weights adds is lost in a sum of 1.
    "products_in_float16__if_the_keys_are": changed(
        "7.5", (PRODUCTS, f"{PRODUCTS}.to(key_tile.dtype).to(tl.float32)")
    ),
    "products_in_float16": changed("7.5", (PRODUCTS, f"{PRODUCTS}.to(tl.float16).to(tl.float32)")),
    "sum_in_float16": changed("7.5", (NEW_SUM, f"({NEW_SUM}).to(query.dtype).to(tl.float32)")),
    "sum_in_float16__always": changed("7.5", (NEW_SUM, f"({NEW_SUM}).to(tl.float16).to(tl.float32)")),
}
