"""Wrong answers to exercise 8.2, and unusual right ones."""

from tests.submissions.ch08_flash_decoding.shared import LAST, SCALE, SPLIT_LENGTH
from tests.submissions.edits import changed, in_tf32

PRESENT = "present = keys < last  # what follows belongs to the next split"


TOTAL = "total = tl.where(running_sum == 0.0, 1.0, running_sum)  # without a key: 0 / 1 = 0, and -inf + log 1 = -inf"


LSE = "log_sum_exp = (running_max + tl.log2(total)) * 0.6931471805599453  # natural, for whoever merges"


HIDDEN = 'scores = tl.where(present[None, :], scores, float("-inf"))'


ROWS = "rows = (split * batch + sequence) * key_heads * GROUP + heads"


HEAD_BY_HEAD = """# Exercise 8.2 · One split of the keys
@triton.jit
def kernel(q, k, v, lengths, o, l, qb, qh, kb, kh, kn, vb, vh, vn, batch, key_heads, splits, scale,
           G: tl.constexpr, D: tl.constexpr, N: tl.constexpr):
    program = tl.program_id(0).to(tl.int64)
    split = program % splits
    head = (program // splits) % (key_heads * G)
    sequence = program // (splits * key_heads * G)
    kv = head // G
    d = tl.arange(0, D)
    query = tl.load(q + sequence * qb + head * qh + d).to(tl.float32)
    length = tl.load(lengths + sequence)
    size = (length + splits - 1) // splits
    end = min(split * size + size, length)
    top = -float("inf")
    total = 0.0
    acc = tl.zeros([D], tl.float32)
    start = split * size
    while start < end:
        n = start + tl.arange(0, N).to(tl.int64)
        here = n < end
        keys = tl.load(k + sequence * kb + kv * kh + n[:, None] * kn + d[None, :], mask=here[:, None], other=0.0)
        scores = tl.where(here, tl.sum(keys.to(tl.float32) * query[None, :], 1) * scale, -float("inf"))
        new = tl.maximum(top, tl.max(scores, 0))
        p = tl.exp(scores - new)
        values = tl.load(v + sequence * vb + kv * vh + n[:, None] * vn + d[None, :], mask=here[:, None], other=0.0)
        acc = acc * tl.exp(top - new) + tl.sum(p[:, None] * values.to(tl.float32), 0)
        total = total * tl.exp(top - new) + tl.sum(p, 0)
        top = new
        start += N
    row = (split * batch + sequence) * key_heads * G + head
    if total > 0:
        tl.store(o + row * D + d, acc / total)
        tl.store(l + row, top + tl.log(total))
    else:
        tl.store(o + row * D + d, tl.zeros([D], tl.float32))
        tl.store(l + row, -float("inf"))

def split_attention(query, key_cache, value_cache, lengths, splits):
    batch, heads, dim = query.shape
    key_heads = key_cache.shape[1]
    outputs = query.new_empty((splits, batch, heads, dim), dtype=torch.float32)
    lses = query.new_empty((splits, batch, heads), dtype=torch.float32)
    kernel[(splits * batch * heads,)](query, key_cache, value_cache, lengths, outputs, lses, *query.stride()[:2],
        *key_cache.stride()[:3], *value_cache.stride()[:3], batch, key_heads, splits, dim ** -0.5,
        G=heads // key_heads, D=dim, N=64)
    return outputs, lses
"""


SHAPE = "batch, query_heads, head_dim = query.shape"


WRONG = {
    "copied_by_pytorch": changed(
        "8.2", (SHAPE, f"key_cache, value_cache = key_cache.contiguous(), value_cache.contiguous()\n    {SHAPE}")
    ),
    "offset_in_32_bits__tokens": changed("8.2", ("tl.arange(0, BLOCK_N).to(tl.int64)", "tl.arange(0, BLOCK_N)")),
    "offset_in_32_bits": changed("8.2", (".to(tl.int64)", "")),
    "one_token_too_many__mask": changed("8.2", (PRESENT, "present = keys <= last")),
    "nan_from_the_start": changed("8.2", ("tl.exp2(running_max - new_max)", "tl.exp2(new_max - running_max)")),
    "finite_for_empty": changed(
        "8.2", ('tl.full([BLOCK_G], float("-inf"), tl.float32)', "tl.full([BLOCK_G], -1e4, tl.float32)")
    ),
    "empty_split_nan__tiles_aligned": changed(
        "8.2",
        ("for start in range(first, last, BLOCK_N)", "for start in range(first // BLOCK_N * BLOCK_N, last, BLOCK_N)"),
        ("present = keys < last ", "present = (keys >= first) & (keys < last) "),
    ),
    "last_keys_lost": changed("8.2", (SPLIT_LENGTH, "split_length = length // splits")),
    "reaches_into_the_next_split": changed("8.2", (PRESENT, "present = keys < length")),
    "past_the_sequences_end": changed("8.2", (LAST, "last = first + split_length")),
    "split_of_the_longest": changed(
        "8.2",
        (SPLIT_LENGTH, "split_length = tl.cdiv(longest, splits)"),
        ("value_stride, scale_log2,", "value_stride, longest, scale_log2,"),
        (f"*value_cache.stride()[:3], {SCALE}", f"*value_cache.stride()[:3], int(lengths.max()), {SCALE}"),
    ),
    "split_of_the_capacity": changed(
        "8.2",
        (SPLIT_LENGTH, "split_length = tl.cdiv(capacity, splits)"),
        ("value_stride, scale_log2,", "value_stride, capacity, scale_log2,"),
        (f"*value_cache.stride()[:3], {SCALE}", f"*value_cache.stride()[:3], key_cache.shape[2], {SCALE}"),
    ),
    "first_length_for_all": changed("8.2", ("tl.load(lengths_pointer + sequence)", "tl.load(lengths_pointer)")),
    "keys_used_as_values": changed(
        "8.2", ("tl.load(value_pointer + value_offsets", "tl.load(key_pointer + key_offsets")
    ),
    "scale_missing": changed("8.2", ('input_precision="ieee") * scale_log2', 'input_precision="ieee")')),
    "sum_not_rescaled": changed("8.2", ("running_sum * rescale + tl.sum", "running_sum + tl.sum")),
    "not_divided": changed("8.2", ("accumulator / total[:, None]", "accumulator")),
    "lse_in_base_2": changed("8.2", (LSE, "log_sum_exp = running_max + tl.log2(total)")),
    "log_of_sum_only": changed("8.2", (LSE, "log_sum_exp = tl.log(total)")),
    "log_of_sum_only__empty_ones_right": changed("8.2", (LSE, "log_sum_exp = tl.log(running_sum)")),
    "mixed_bases": changed("8.2", (LSE, "log_sum_exp = running_max + tl.log(total)")),
    "empty_split_nan": changed("8.2", (TOTAL, "total = running_sum")),
    "empty_split_counts": changed(
        "8.2", (LSE, LSE + "\n    log_sum_exp = tl.where(running_sum == 0.0, 0.0, log_sum_exp)")
    ),
    "natural_exp": changed("8.2", ("tl.exp2(", "tl.exp(")),
    "natural_exp__and_log": changed("8.2", ("tl.exp2(", "tl.exp("), (LSE, "log_sum_exp = running_max + tl.log(total)")),
    "no_running_max": changed(
        "8.2",
        ("tl.exp2(scores - new_max[:, None])", "tl.exp2(scores)"),
        ("tl.exp2(running_max - new_max)", "tl.full([BLOCK_G], 1.0, tl.float32)"),
        (LSE, "log_sum_exp = tl.log(total)"),
    ),
    "maximum_starts_at_zero": changed(
        "8.2", ('tl.full([BLOCK_G], float("-inf"), tl.float32)', "tl.zeros([BLOCK_G], tl.float32)")
    ),
    "accumulator_not_rescaled": changed("8.2", ("accumulator * rescale[:, None] + product", "accumulator + product")),
    "tail_keys_scored": changed("8.2", (HIDDEN, "")),
    "by_modulo": changed("8.2", ("heads = key_head * GROUP + members", "heads = key_head + members * key_heads")),
    "splits_and_sequences_exchanged": changed(
        "8.2", (ROWS, "rows = (sequence * splits + split) * key_heads * GROUP + heads")
    ),
    "unused_slots_count": changed(
        "8.2",
        (
            "tl.load(value_pointer + value_offsets, mask=present[:, None], other=0.0)",
            "tl.load(value_pointer + value_offsets, mask=(keys < capacity)[:, None], other=0.0)",
        ),
        ("value_stride, scale_log2,", "value_stride, capacity, scale_log2,"),
        (f"*value_cache.stride()[:3], {SCALE}", f"*value_cache.stride()[:3], key_cache.shape[2], {SCALE}"),
    ),
    "keys_read_for_every_head": HEAD_BY_HEAD,
    "strides_ignored__rows_of_values": changed("8.2", ("keys[:, None] * value_stride", "keys[:, None] * key_stride")),
    "split_of_whole_tiles": changed(
        "8.2", (SPLIT_LENGTH, "split_length = tl.cdiv(tl.cdiv(length, splits), BLOCK_N) * BLOCK_N")
    ),
    "empty_split_nan__never_written": changed(
        "8.2", ("    running_max = tl.full", "    if first >= last:\n        return\n    running_max = tl.full")
    ),
    "last_keys_lost__and_lse_in_base_2": changed(
        "8.2",
        (SPLIT_LENGTH, "split_length = length // splits"),
        (LSE, "log_sum_exp = running_max + tl.log2(total)"),
    ),
    "read_out_of_bounds": changed(
        "8.2",
        (
            "tl.load(key_pointer + key_offsets, mask=present[:, None], other=0.0)",
            "tl.load(key_pointer + key_offsets)",
        ),
    ),
    "written_out_of_bounds": changed("8.2", (", mask=members < GROUP)", ")")),
    "splits_of_equal_shares": changed(
        "8.2",
        ("first = split * split_length", "first = split * length // splits"),
        (LAST, "last = (split + 1) * length // splits"),
    ),
    "split_ends_at_its_length": changed("8.2", (LAST, "last = tl.minimum(split_length, length)")),
    "empty_split_reads_the_last_key": changed(
        "8.2", ("first = split * split_length", "first = tl.minimum(split * split_length, tl.maximum(length - 1, 0))")
    ),
    "split_begins_at_a_tile": changed(
        "8.2",
        ("first = split * split_length", "first = split * split_length // BLOCK_N * BLOCK_N"),
        (LAST, "last = tl.minimum((split + 1) * split_length, length)"),
    ),
    "lse_base_changed_the_wrong_way": changed("8.2", ("0.6931471805599453", "1.4426950408889634")),
    "ln_2_of_few_digits": changed("8.2", ("0.6931471805599453", "0.69")),
    "lse_rounded_to_16_bits": changed(
        "8.2",
        ("tl.store(lse_pointer + rows, log_sum_exp,", "tl.store(lse_pointer + rows, log_sum_exp.to(query.dtype),"),
    ),
    "rows_of_no_head_stored": changed("8.2", (ROWS, ROWS.replace("+ heads", "+ key_head * BLOCK_G + members"))),
    "rows_a_group_apart": changed("8.2", (ROWS, "rows = (split * batch + sequence) * GROUP + heads")),
    "weighed_already": changed("8.2", ("accumulator / total[:, None]", "accumulator * tl.exp2(running_max)[:, None]")),
    "group_of_all_heads": changed(
        "8.2", ("GROUP=group", "GROUP=query_heads"), ("power_of_2(group)", "power_of_2(query_heads)")
    ),
    "scale_of_one_size": changed("8.2", ("math.sqrt(head_dim)", "8")),
    "grid_axes_exchanged": changed(
        "8.2", ("split_kernel[(splits, key_heads, batch)]", "split_kernel[(batch, key_heads, splits)]")
    ),
    "rounded_to_16_bits": changed(
        "8.2", ("accumulator / total[:, None],", "(accumulator / total[:, None]).to(tl.float16),")
    ),
    "computed_in_16_bits": changed(
        "8.2", ("tl.dot(weights.to(value_tile.dtype)", "tl.dot(weights.to(tl.float16).to(value_tile.dtype)")
    ),
    "keys_read_for_every_head__and_offsets_in_32_bits": HEAD_BY_HEAD.replace(".to(tl.int64)", ""),
}


UNUSUAL = {
    "tl.dot in tf32": in_tf32("8.2"),
    "products by hand, no tl.dot": changed(
        "8.2",
        (
            'tl.dot(query, tl.trans(key_tile), input_precision="ieee")',
            "tl.sum(query.to(tl.float32)[:, None, :] * key_tile.to(tl.float32)[None, :, :], axis=2)",
        ),
        (
            'tl.dot(weights.to(value_tile.dtype), value_tile, input_precision="ieee")',
            "tl.sum(weights[:, :, None] * value_tile.to(tl.float32)[None, :, :], axis=1)",
        ),
    ),
    "natural base": changed(
        "8.2",
        ("tl.exp2(", "tl.exp("),
        (SCALE, "1 / math.sqrt(head_dim)"),
        (LSE, "log_sum_exp = running_max + tl.log(total)"),
    ),
    "tiles of 16 keys": changed("8.2", ("BLOCK_N=64", "BLOCK_N=16")),
    "tiles of 128 keys": changed("8.2", ("BLOCK_N=64", "BLOCK_N=128")),
    "lengths rounded up another way": changed("8.2", (SPLIT_LENGTH, "split_length = (length + splits - 1) // splits")),
    "last keys first": changed(
        "8.2",
        (
            "for start in range(first, last, BLOCK_N):",
            "for step in range(tl.cdiv(last - first, BLOCK_N)):\n"
            "        start = first + (tl.cdiv(last - first, BLOCK_N) - 1 - step) * BLOCK_N",
        ),
    ),
    "scaled queries": changed(
        "8.2",
        (
            "    key_pointer += seq",
            "    query = (query.to(tl.float32) * scale_log2).to(query.dtype)\n    key_pointer += seq",
        ),
        (', input_precision="ieee") * scale_log2', ', input_precision="ieee")'),
    ),
}


WRONG |= {
    "maximum_of_the_first_tile": changed(
        "8.2",
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
    return changed("8.2", (f"tl.maximum(running_max, {own})", lazy))


def rows_of(number):
    """Tiles of so many query heads, whatever the group."""
    return changed("8.2", ("BLOCK_G=max(16, triton.next_power_of_2(group))", f"BLOCK_G={number}"))


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
        "8.2", (PRODUCTS, f"{PRODUCTS}.to(key_tile.dtype).to(tl.float32)")
    ),
    "products_in_float16": changed("8.2", (PRODUCTS, f"{PRODUCTS}.to(tl.float16).to(tl.float32)")),
    "sum_in_float16": changed("8.2", (NEW_SUM, f"({NEW_SUM}).to(query.dtype).to(tl.float32)")),
    "sum_in_float16__always": changed("8.2", (NEW_SUM, f"({NEW_SUM}).to(tl.float16).to(tl.float32)")),
    "scores_in_float16__if_the_keys_are": changed(
        "8.2", (f"{PRODUCTS} * scale_log2", f"({PRODUCTS} * scale_log2).to(key_tile.dtype).to(tl.float32)")
    ),
}
