"""Wrong answers to exercise 6.5, and unusual right ones."""

from tests.submissions.edits import changed

PAGE_LOAD = "page = tl.load(tables_pointer + sequence * table_stride + block).to(tl.int64)"


KEYS = "page * key_page_stride + head * key_head_stride + offsets * key_slot_stride"


VALUES = "page * value_page_stride + head * value_head_stride + offsets * value_slot_stride"


INSIDE = "inside = block * PAGE_SIZE + offsets < length"


MASKED = '        scores = tl.where(inside, scores, float("-inf"))\n'


LOOP = "for block in range(0, tl.cdiv(length, PAGE_SIZE)):"


def tiles(pattern):
    """Keys and values read from other rows."""
    return changed("6.5", (KEYS, pattern.format("key")), (VALUES, pattern.format("value")))


WRONG = {
    "strides_ignored__both_heads": changed(
        "6.5",
        ("head * key_head_stride", "head * PAGE_SIZE * HEAD_DIM"),
        ("head * value_head_stride", "head * PAGE_SIZE * HEAD_DIM"),
    ),
    "heads_of_a_page_forgotten__by_sizes": tiles(
        "page * PAGE_SIZE * HEAD_DIM + head * {0}_head_stride + offsets * {0}_slot_stride"
    ),
    "first_tile_skipped": changed("6.5", (LOOP, LOOP.replace("range(0,", "range(1,"))),
    "maximum_starts_finite": changed("6.5", ('tl.full([1], float("-inf")', "tl.full([1], -10000.0")),
    "hidden_scored_minus_1e9__1e3": changed("6.5", (MASKED, MASKED.replace('float("-inf")', "-1000.0"))),
    "page_in_16_bits": changed("6.5", (PAGE_LOAD, PAGE_LOAD.replace(".to(tl.int64)", ".to(tl.int16).to(tl.int64)"))),
    "table_read_past_its_end__a_step_ahead": changed(
        "6.5",
        (PAGE_LOAD, PAGE_LOAD + "\n        tl.load(tables_pointer + sequence * table_stride + block + 1)"),
    ),
    "first_head_for_all__and_accumulator_not_rescaled": changed(
        "6.5",
        ('head * key_head_stride', '0'),
        ('accumulator * rescale', 'accumulator'),
    ),
    "empty_sequence_nan__by_one_step_at_least": changed(
        "6.5",
        (
            "for block in range(0, tl.cdiv(length, PAGE_SIZE)):",
            "for block in range(0, tl.maximum(1, tl.cdiv(length, PAGE_SIZE))):",
        ),
    ),
    "last_page_left_out__always": changed(
        "6.5",
        (
            "for block in range(0, tl.cdiv(length, PAGE_SIZE)):",
            "for block in range(0, tl.cdiv(length, PAGE_SIZE) - 1):",
        ),
    ),
    "nan_from_the_start": changed(
        "6.5", ("rescale = tl.exp(running_max - new_max)", "rescale = tl.exp(new_max - running_max)")
    ),
    "offset_in_32_bits": changed("6.5", (".to(tl.int64)", "")),
    "last_page_read_whole": changed("6.5", (INSIDE, "inside = offsets < PAGE_SIZE")),
    "last_page_read_whole__offset_compared": changed("6.5", (INSIDE, "inside = offsets < length")),
    "read_outside_the_pool__strides_ignored": tiles(
        "((page * tl.num_programs(1) + head) * PAGE_SIZE + offsets) * HEAD_DIM"
    ),
    "strides_ignored__values_by_the_keys": changed("6.5", ("value_pointer + value_rows", "value_pointer + key_rows")),
    "tail_keys_scored": changed("6.5", (MASKED, "")),
    "last_page_left_out": changed("6.5", (LOOP, "for block in range(0, length // PAGE_SIZE):")),
    "page_not_multiplied": tiles("page * {0}_slot_stride + head * {0}_head_stride + offsets * {0}_slot_stride"),
    "heads_of_a_page_forgotten": tiles("(page + head) * {0}_head_stride + offsets * {0}_slot_stride"),
    "pages_consecutive": changed("6.5", (PAGE_LOAD, PAGE_LOAD.replace(" + block", "") + " + block")),
    "table_ignored": changed("6.5", (PAGE_LOAD, "page = tl.zeros([], tl.int64) + block")),
    "first_table_for_all": changed("6.5", (PAGE_LOAD, PAGE_LOAD.replace("sequence * table_stride + ", ""))),
    "one_token_too_few": changed("6.5", ("length = tl.load(lengths_pointer + sequence)",
                                    "length = tl.load(lengths_pointer + sequence) - 1")),
    "one_token_too_few__mask_alone": changed("6.5", (INSIDE, INSIDE + " - 1")),
    "one_token_too_many": changed("6.5", (INSIDE, INSIDE.replace("<", "<="))),
    "one_token_too_many__length": changed("6.5", ("length = tl.load(lengths_pointer + sequence)",
                                                  "length = tl.load(lengths_pointer + sequence) + 1")),
    "read_outside_the_pool__whole_table": changed("6.5", (LOOP, "for block in range(0, table_stride):"),
                                (INSIDE, "inside = offsets < PAGE_SIZE")),
    "offset_left_out": tiles("page * {0}_page_stride + head * {0}_head_stride + offsets * 0"),
    "first_head_for_all": tiles("page * {0}_page_stride + offsets * {0}_slot_stride"),
    "only_first_tile": changed("6.5", (PAGE_LOAD, PAGE_LOAD.replace(" + block", "")),
                               (LOOP, "for block in range(0, tl.minimum(1, tl.cdiv(length, PAGE_SIZE))):")),
    "keys_used_as_values": changed("6.5", ("tl.load(value_pointer + value_rows", "tl.load(key_pointer + key_rows")),
    "empty_sequence_nan": changed("6.5", ("tl.where(running_sum == 0.0, 1.0, running_sum)", "running_sum")),
    "scale_missing": changed("6.5", ("query.to(tl.float32) * scale", "query.to(tl.float32)")),
    "scale_twice": changed("6.5", ("query[None, :] * key, axis=1)", "query[None, :] * key, axis=1) * scale")),
    "last_page_left_out__nothing_read": changed(
        "6.5", (LOOP, "for block in range(0, length // PAGE_SIZE):"),
        ("accumulator / tl.where(running_sum == 0.0, 1.0, running_sum)",
         "tl.where(length > 0, accumulator / running_sum, 0.0)"),
    ),
    "maximum_forgets_the_old": changed(
        "6.5", ("new_max = tl.maximum(running_max, tl.max(scores, axis=0))",
                "new_max = tl.max(scores, axis=0) + tl.zeros([1], tl.float32)")
    ),
    "unused_slots_count": changed("6.5", (", mask=inside[:, None], other=0.0", "")),
    "table_read_past_its_end": changed("6.5", (LOOP, "for block in range(0, length // PAGE_SIZE + 1):")),
    "table_read_past_its_end__empty_guarded": changed(
        "6.5", (LOOP, "for block in range(0, length // PAGE_SIZE + 1):"),
        ("accumulator / tl.where(running_sum == 0.0, 1.0, running_sum)",
         "tl.where(length > 0, accumulator / running_sum, 0.0)"),
    ),
    "log2e_missing": changed("6.5", ("tl.exp(", "tl.exp2(")),
    "no_running_max": changed("6.5", ("weights = tl.exp(scores - new_max)", "weights = tl.exp(scores)"),
                              ("rescale = tl.exp(running_max - new_max)", "rescale = 1.0")),
    "maximum_starts_at_zero": changed("6.5", ('running_max = tl.full([1], float("-inf"), tl.float32)',
                                              "running_max = tl.zeros([1], tl.float32)")),
    "maximum_not_updated": changed("6.5", ("        running_max = new_max\n", "")),
    "not_divided": changed("6.5", ("accumulator / tl.where(running_sum == 0.0, 1.0, running_sum)", "accumulator")),
    "accumulator_not_rescaled": changed("6.5", ("accumulator * rescale + tl.sum", "accumulator + tl.sum")),
    "sum_not_rescaled": changed("6.5", ("running_sum * rescale + tl.sum", "running_sum + tl.sum")),
    "nothing_rescaled": changed("6.5", ("rescale = tl.exp(running_max - new_max)", "rescale = 1.0")),
    "read_outside_the_pool": changed("6.5", (LOOP, "for block in range(0, tl.cdiv(length, PAGE_SIZE) + 1):"),
                                     (INSIDE, "inside = offsets < PAGE_SIZE"),
                                     (MASKED, MASKED.replace("inside", "block * PAGE_SIZE + offsets < length"))),
    "sum_not_rescaled__and_empty_sequence_nan": changed(
        "6.5", ("running_sum * rescale + tl.sum", "running_sum + tl.sum"),
        ("tl.where(running_sum == 0.0, 1.0, running_sum)", "running_sum"),
    ),
    "empty_sequence_nan__never_written": changed(
        "6.5", ("    running_max = tl.full", "    if length == 0:\n        return\n    running_max = tl.full")
    ),
    "strides_ignored__heads_of_values": changed("6.5", ("head * value_head_stride", "head * key_head_stride")),
    "too_many_bytes": changed("6.5", ("mask=inside[:, None], other=0.0)\n        scores",
                                      "mask=inside[:, None], other=0.0)\n"
                                      "        key += 0 * tl.load(key_pointer + key_rows[:, None] + columns[None, :], "
                                      "mask=inside[:, None], other=0.0)\n        scores")),
    "no_kernel_launched": """# Exercise 6.5 · Paged decode
def paged_decode(query, key_pages, value_pages, block_tables, lengths):
    output = torch.zeros_like(query)
    for b, length in enumerate(lengths.tolist()):
        if length:
            pages = block_tables[b, : -(-length // key_pages.shape[2])].long()
            keys, values = (
                cache[pages].transpose(0, 1).flatten(1, 2)[:, :length].float() for cache in (key_pages, value_pages)
            )
            scores = (query[b, :, None].float() * keys).sum(-1) / query.shape[2] ** 0.5
            weights = (scores - scores.amax(-1, keepdim=True)).exp()
            output[b] = (weights[..., None] * values).sum(1) / weights.sum(-1, keepdim=True)
    return output
""",
    "output_laid_out_like_query": changed(
        "6.5",
        ("torch.empty(query.shape, dtype=query.dtype, device=query.device)", "torch.empty_like(query)"),
        ("*output.stride()[:2]", "heads * head_dim, head_dim"),
    ),
    "table_stride_from_lengths": changed(
        "6.5", ("block_tables.stride(0), *output", "triton.cdiv(int(lengths.max()), key_pages.shape[2]), *output")
    ),
}


UNUSUAL = {
    "token by token": """# Exercise 6.5 · Paged decode
@triton.jit
def one(q, k, v, tables, lengths, o, q0, q1, k0, k1, k2, v0, v1, v2, t0, o0, o1, scale,
        D: tl.constexpr, S: tl.constexpr):
    b, h = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    d = tl.arange(0, D)
    query = tl.load(q + b * q0 + h * q1 + d).to(tl.float32)
    n = tl.load(lengths + b)
    top, total, acc = tl.full([], float("-inf"), tl.float32), tl.full([], 0.0, tl.float32), tl.zeros([D], tl.float32)
    for p in range(n):
        page = tl.load(tables + b * t0 + p // S).to(tl.int64)
        s = tl.sum(query * tl.load(k + page * k0 + h * k1 + p % S * k2 + d), axis=0) * scale
        new = tl.maximum(top, s)
        acc = acc * tl.exp(top - new) + tl.exp(s - new) * tl.load(v + page * v0 + h * v1 + p % S * v2 + d)
        total = total * tl.exp(top - new) + tl.exp(s - new)
        top = new
    if n > 0:
        acc = acc / total
    tl.store(o + b * o0 + h * o1 + d, acc.to(o.dtype.element_ty))

def paged_decode(query, key_pages, value_pages, block_tables, lengths):
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    one[query.shape[:2]](query, key_pages, value_pages, block_tables, lengths, out, *query.stride()[:2],
                         *key_pages.stride()[:3], *value_pages.stride()[:3], block_tables.stride(0),
                         *out.stride()[:2], query.shape[2] ** -0.5, D=query.shape[2], S=key_pages.shape[2])
    return out
""",
    "base 2": changed(
        "6.5", ("1 / math.sqrt(head_dim)", "math.log2(math.e) / math.sqrt(head_dim)"), ("tl.exp(", "tl.exp2(")
    ),
    "a tile of 32 tokens over several pages": changed(
        "6.5",
        (LOOP, "lanes = tl.arange(0, 32)\n    for first in range(0, length, 32):"),
        (PAGE_LOAD, "positions = first + lanes"),
        (INSIDE, "inside = positions < length\n        page = tl.load(tables_pointer + sequence * table_stride + "
                 "positions // PAGE_SIZE, mask=inside, other=0).to(tl.int64)\n        offsets = positions % PAGE_SIZE"),
        ("    offsets = tl.arange(0, PAGE_SIZE)  # [PAGE_SIZE]\n", ""),
    ),
    "the next page loaded ahead": changed(
        "6.5",
        (LOOP, "table = tables_pointer + sequence * table_stride\n"
               "    page = tl.load(table, mask=length > 0, other=0).to(tl.int64)\n    " + LOOP),
        (PAGE_LOAD, "following = tl.load(table + block + 1, mask=(block + 1) * PAGE_SIZE < length, other=0)"),
        ("        running_max = new_max\n", "        running_max = new_max\n        page = following.to(tl.int64)\n"),
    ),
    "with tl.dot": changed(
        "6.5",
        ("scores = tl.sum(query[None, :] * key, axis=1)",
         "several = tl.broadcast_to(query[None, :], (16, HEAD_DIM))\n"
         "        scores = tl.max(tl.dot(several, tl.trans(key.to(tl.float32)), input_precision='ieee'), axis=0)"),
    ),
    "divided as it goes": changed(
        "6.5",
        ("accumulator = accumulator * rescale + tl.sum(weights[:, None] * value, axis=0)",
         "before = (running_sum - tl.sum(weights, axis=0)) / running_sum\n"
         "        accumulator = accumulator * before + tl.sum(weights[:, None] / running_sum * value, axis=0)"),
        ("accumulator / tl.where(running_sum == 0.0, 1.0, running_sum)", "accumulator"),
    ),
}


WRONG |= {
    "maximum_of_the_first_tile": changed(
        "6.5",
        (
            "tl.maximum(running_max, tl.max(scores, axis=0))",
            "tl.where(running_max == float('-inf'), tl.max(scores, axis=0), running_max)",
        ),
    ),
}


ADDED = "accumulator * rescale + tl.sum(weights[:, None] * value, axis=0)"


WRONG |= {
    "accumulator_in_float16": changed("6.5", (ADDED, f"({ADDED}).to(tl.float16)")),
    "accumulator_in_float16__as_the_values_are": changed("6.5", (ADDED, f"({ADDED}).to(value.dtype)")),
    "only_first_pages": changed("6.5", (LOOP, LOOP.replace("tl.cdiv", "tl.minimum(16, tl.cdiv").replace("):", ")):"))),
}


SCORES = "scores = tl.sum(query[None, :] * key, axis=1)"
WRONG |= {
    "page_summed_in_float16": changed(
        "6.5", (ADDED, ADDED.replace("weights[:, None]", "weights[:, None].to(value.dtype)"))
    ),
    "page_summed_in_float16__of_each_page": changed(
        "6.5", (ADDED, ADDED.replace("axis=0)", "axis=0).to(value.dtype)"))
    ),
    "large_scores_in_float16": changed("6.5", (SCORES, f"{SCORES}.to(key.dtype).to(tl.float32)")),
    "large_scores_in_float16__the_products": changed(
        "6.5", (SCORES, "scores = tl.sum((query[None, :].to(key.dtype) * key).to(tl.float32), axis=1)")
    ),
    "large_scores_in_float16__products_and_sums": changed(
        "6.5",
        ("query = query.to(tl.float32) * scale", "pass"),
        (SCORES, "scores = tl.sum(query[None, :] * key, axis=1).to(tl.float32) * scale"),
    ),
}
UNUSUAL |= {
    "weights of the values' dtype, products in float32": changed(
        "6.5", (ADDED, ADDED.replace("[:, None] * value", "[:, None].to(value.dtype).to(tl.float32) * value"))
    ),
}


BASE_2 = ("tl.exp(", "tl.exp2(")
TABLE = "tl.load(tables_pointer + sequence * table_stride + block).to(tl.int64)"
WRONG |= {
    "scale_twice__and_log2e_missing": changed(
        "6.5", BASE_2, ("tl.sum(query[None, :] * key, axis=1)", "tl.sum(query[None, :] * key, axis=1) * scale")
    ),
    "log2e_missing__in_the_weights": changed("6.5", ("weights = tl.exp(", "weights = tl.exp2(")),
    "mixed_exponentials": changed("6.5", ("rescale = tl.exp(", "rescale = tl.exp2(")),
    "next_entry_of_the_table": changed("6.5", (TABLE, TABLE.replace("+ block", "+ block + 1"))),
    "next_page_of_the_pool": changed("6.5", (TABLE, f"{TABLE} + 1")),
}
