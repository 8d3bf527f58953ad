"""Wrong answers to the exercises of chapter 08, and unusual right ones; the form is that of ch00.py.

Most are the course's own answer with one step changed, as a learner would get it wrong.
"""

from tests.mistakes.edits import changed, in_tf32

# ------------------------------------------------------------------------------------------------------------------ 8.1

WAVES = "waves = -(-programs // slots)"
BUSY = "programs / (waves * slots)"
ONE_WAVE = "max(1, slots // (batch * key_heads))"

OCCUPANCY_WRONG = {
    "waves_rounded_down": changed("8.1", (WAVES, "waves = max(1, programs // slots)")),
    "waves_rounded_down__and_divided_by_none": changed(
        "8.1", (WAVES, "waves = programs // slots"), (BUSY, "programs / max(1, waves * slots)")
    ),
    "busy_above_one": changed("8.1", (BUSY, "programs / slots")),
    "busy_capped": changed("8.1", (BUSY, "min(1.0, programs / slots)")),
    "busy_of_the_last_wave": changed("8.1", (BUSY, "(programs - (waves - 1) * slots) / slots")),
    "busy_of_the_last_wave__by_remainder": changed("8.1", (BUSY, "((programs % slots) or slots) / slots")),
    "busy_in_percent": changed("8.1", (BUSY, "100 * programs / (waves * slots)")),
    "splits_forgotten": changed("8.1", ("batch * key_heads * splits", "batch * key_heads")),
    "batch_forgotten": changed("8.1", ("batch * key_heads * splits", "key_heads * splits")),
    "one_split_too_many": changed("8.1", (ONE_WAVE, "-(-slots // (batch * key_heads))")),
    "split_to_the_nearest": changed("8.1", (ONE_WAVE, "max(1, round(slots / (batch * key_heads)))")),
    "no_split_at_all": changed("8.1", (ONE_WAVE, "slots // (batch * key_heads)")),
    "batch_forgotten_in_splits": changed("8.1", (ONE_WAVE, "max(1, slots // key_heads)")),
}

SEARCHED = """# Exercise 8.1 · How much of the chip works
def occupancy(batch, key_heads, splits, slots):
    programs = left = batch * key_heads * splits
    waves = 0
    while left > 0:
        left -= slots
        waves += 1
    return [programs, waves, programs / slots / waves]

def splits_for_one_wave(batch, key_heads, slots):
    splits = 1
    while occupancy(batch, key_heads, splits + 1, slots)[1] == 1:
        splits += 1
    return splits
"""

# ------------------------------------------------------------------------------------------------------------------ 8.2

SPLIT_LENGTH = "split_length = tl.cdiv(length, splits)"
LAST = "last = tl.minimum(first + split_length, length)"
PRESENT = "present = keys < last  # what follows belongs to the next split"
TOTAL = "total = tl.where(running_sum == 0.0, 1.0, running_sum)  # without a key: 0 / 1 = 0, and -inf + log 1 = -inf"
LSE = "log_sum_exp = (running_max + tl.log2(total)) * 0.6931471805599453  # natural, for whoever merges"
SCALE = "math.log2(math.e) / math.sqrt(head_dim)"
HIDDEN = 'scores = tl.where(present[None, :], scores, float("-inf"))'
ROWS = "rows = (split * batch + sequence) * key_heads * GROUP + heads"

HEAD_BY_HEAD = """# Exercise 8.2 · One split of the keys
@triton.jit
def kernel(q, k, v, lengths, o, l, qb, qh, kb, kh, kn, vb, vh, vn, batch, key_heads, splits, scale,
           G: tl.constexpr, D: tl.constexpr, N: tl.constexpr):
    program = tl.program_id(0)
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
        n = start + tl.arange(0, N)
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

PARTIAL_WRONG = {
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
    "length_of_the_first": changed("8.2", ("tl.load(lengths_pointer + sequence)", "tl.load(lengths_pointer)")),
    "keys_used_as_values": changed(
        "8.2", ("tl.load(value_pointer + value_offsets", "tl.load(key_pointer + key_offsets")
    ),
    "scale_missing": changed("8.2", ('input_precision="ieee") * scale_log2', 'input_precision="ieee")')),
    "sum_not_rescaled": changed("8.2", ("running_sum * rescale + tl.sum", "running_sum + tl.sum")),
    "not_normalised": changed("8.2", ("accumulator / total[:, None]", "accumulator")),
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
    "heads_by_modulo": changed("8.2", ("heads = key_head * GROUP + members", "heads = key_head + members * key_heads")),
    "splits_and_sequences_exchanged": changed(
        "8.2", (ROWS, "rows = (sequence * splits + split) * key_heads * GROUP + heads")
    ),
    "unused_slots_reach_the_result": changed(
        "8.2",
        (
            "tl.load(value_pointer + value_offsets, mask=present[:, None], other=0.0)",
            "tl.load(value_pointer + value_offsets, mask=(keys < capacity)[:, None], other=0.0)",
        ),
        ("value_stride, scale_log2,", "value_stride, capacity, scale_log2,"),
        (f"*value_cache.stride()[:3], {SCALE}", f"*value_cache.stride()[:3], key_cache.shape[2], {SCALE}"),
    ),
    "keys_read_for_every_head": HEAD_BY_HEAD,
    "read_out_of_bounds": changed(
        "8.2",
        (
            "tl.load(key_pointer + key_offsets, mask=present[:, None], other=0.0)",
            "tl.load(key_pointer + key_offsets)",
        ),
    ),
    "written_out_of_bounds": changed("8.2", (", mask=members < GROUP)", ")")),
}


# ------------------------------------------------------------------------------------------------------------------ 8.3

COMBINED = "tl.sum(weights[:, None] * parts, axis=0) / divisor"
MERGED_LSE = "largest + tl.log(divisor)"
WEIGHTS = "weights = tl.exp(lses - reference)  # [BLOCK_S], 0 for a split without keys"
REFERENCE = 'reference = tl.where(largest == float("-inf"), 0.0, largest)  # never -inf - -inf'
DIVISOR = "divisor = tl.where(total == 0.0, 1.0, total)  # never 0 / 0"
LOADED = 'lses = tl.load(lses_pointer + partial_rows, mask=present, other=float("-inf"))  # [BLOCK_S]'
NEXT_POWER = "triton.next_power_of_2(splits)"


def instead_of_lse(expression):
    return changed("8.3", (MERGED_LSE, expression))


COMBINE_WRONG = {
    "averaged_without_weights": changed("8.3", (COMBINED, "tl.sum(parts, axis=0) / splits")),
    "averaged_without_weights_where_present": changed(
        "8.3",
        (COMBINED, 'tl.sum(parts, axis=0) / tl.maximum(tl.sum((lses > float("-inf")).to(tl.float32), axis=0), 1.0)'),
    ),
    "averaged_without_weights__in_a_loop": changed(
        "8.3",
        (
            f"tl.store(output_pointer + row * HEAD_DIM + columns, {COMBINED})",
            "average = tl.zeros([HEAD_DIM], tl.float32)\n"
            "    for split in range(splits):\n"
            "        average += tl.load(outputs_pointer + (split * rows + row) * HEAD_DIM + columns)\n"
            "    tl.store(output_pointer + row * HEAD_DIM + columns, average / splits)",
        ),
    ),
    "averaged_without_weights__and_their_number_as_the_sum": changed(
        "8.3", (WEIGHTS, "weights = tl.where(present, 1.0, 0.0)"), (MERGED_LSE, "reference + tl.log(divisor)")
    ),
    "averaged_without_weights__and_the_log_sum_exp_guarded": changed(
        "8.3", (WEIGHTS, "weights = tl.where(present, 1.0, 0.0)")
    ),
    "averaged_without_weights_where_present__and_their_number_as_the_sum": changed(
        "8.3", (WEIGHTS, 'weights = tl.where(lses > float("-inf"), 1.0, 0.0)')
    ),
    "added_without_weights": changed("8.3", (COMBINED, "tl.sum(parts, axis=0)")),
    "not_divided": changed("8.3", (COMBINED, "tl.sum(weights[:, None] * parts, axis=0)")),
    "weighed_in_base_2": changed("8.3", (WEIGHTS, "weights = tl.exp2(lses - reference)")),
    "weighed_in_base_2__and_merged": changed(
        "8.3", (WEIGHTS, "weights = tl.exp2(lses - reference)"), (MERGED_LSE, "largest + tl.log2(divisor)")
    ),
    "base_changed_twice": changed("8.3", (WEIGHTS, "weights = tl.exp((lses - reference) * 1.4426950408889634)")),
    "no_maximum": changed(
        "8.3", (REFERENCE, "reference = 0.0"), (MERGED_LSE, 'tl.where(total == 0.0, float("-inf"), tl.log(divisor))')
    ),
    "no_maximum__unguarded": changed(
        "8.3", (REFERENCE, "reference = 0.0"), (DIVISOR, "divisor = total"), (MERGED_LSE, "tl.log(total)")
    ),
    "weighed_by_the_logarithm": changed(
        "8.3",
        (
            COMBINED,
            "tl.sum(tl.where(weights > 0.0, lses, 0.0)[:, None] * parts, axis=0) / "
            "tl.sum(tl.where(weights > 0.0, lses, 0.0), axis=0)",
        ),
    ),
    "missing_splits_counted": changed("8.3", (LOADED, LOADED.replace('float("-inf")', "0.0"))),
    "missing_splits_counted__in_a_tile_of_16": changed(
        "8.3", (LOADED, LOADED.replace('float("-inf")', "0.0")), (NEXT_POWER, f"max(16, {NEXT_POWER})")
    ),
    "lse_without_the_largest": instead_of_lse("tl.log(divisor)"),
    "lse_without_the_largest__guarded": instead_of_lse('tl.where(total == 0.0, float("-inf"), tl.log(divisor))'),
    "lse_largest": instead_of_lse("largest"),
    "lse_last": instead_of_lse("tl.load(lses_pointer + (splits - 1) * rows + row)"),
    "lse_first": instead_of_lse("tl.load(lses_pointer + row)"),
    "lse_added": instead_of_lse("tl.sum(tl.where(present, lses, 0.0), axis=0)"),
    "lse_in_base_2": instead_of_lse("(largest + tl.log(divisor)) * 1.4426950408889634"),
    "empty_sequence_nan": changed("8.3", (REFERENCE, "reference = largest")),
    "empty_sequence_nan__divided_by_nothing": changed("8.3", (DIVISOR, "divisor = total")),
    "empty_sequence_counts": instead_of_lse("reference + tl.log(divisor)"),
    "splits_taken_for_neighbours": changed(
        "8.3", ("partial_rows = members * rows + row", "partial_rows = row * splits + members")
    ),
    "last_split_left_out": changed("8.3", ("present = members < splits", "present = members < splits - 1")),
    "splits_beyond_a_power_of_two": changed("8.3", (NEXT_POWER, "1 << (splits.bit_length() - 1)")),
    "tile_of_fixed_size": changed("8.3", (NEXT_POWER, "16")),
    "tile_of_fixed_size__of_32": changed("8.3", (NEXT_POWER, "32")),
    "read_out_of_bounds": changed("8.3", (LOADED, "lses = tl.load(lses_pointer + partial_rows)")),
}

ONE_BY_ONE = """# Exercise 8.3 · Combine the splits
@triton.jit
def kernel(o, l, out, lse, splits, rows, D: tl.constexpr):
    row = tl.program_id(0)
    d = tl.arange(0, D)
    top = float("-inf")
    total = 0.0
    acc = tl.zeros([D], tl.float32)
    for split in range(0, splits):
        here = tl.load(l + split * rows + row)
        part = tl.load(o + (split * rows + row) * D + d)
        new = tl.maximum(top, here)
        if new > float("-inf"):
            keep = tl.exp(top - new)
            weight = tl.exp(here - new)
            acc = acc * keep + part * weight
            total = total * keep + weight
            top = new
    tl.store(out + row * D + d, acc / tl.maximum(total, 1e-30))
    tl.store(lse + row, top + tl.log(tl.maximum(total, 1e-30)))

def combine_splits(outputs, lses):
    splits, batch, heads, dim = outputs.shape
    output = torch.empty_like(outputs[0])
    lse = torch.empty_like(lses[0])
    kernel[(batch * heads,)](outputs, lses, output, lse, splits, batch * heads, D=dim)
    return output, lse
"""

# ------------------------------------------------------------------------------------------------------------------ 8.4

PROGRAM = "program_bytes = 2 * -(-context // splits) * head_dim * item_bytes"
PARTIAL = "partial_bytes = splits * batch * query_heads * (head_dim + 1) * 4"
ON_TOP = 'chip["launch_seconds"] + 2 * partial_bytes / chip["bandwidth"]'
CHOICE = "min(range(1, most + 1), key=lambda splits: decode_microseconds(splits, *shape))"
WAVE = 'chip["slots"] // (batch * key_heads)'

SPLITS_WRONG = {
    "values_forgotten": changed("8.4", (PROGRAM, "program_bytes = -(-context // splits) * head_dim * item_bytes")),
    "keys_rounded_down": changed("8.4", (PROGRAM, "program_bytes = 2 * (context // splits) * head_dim * item_bytes")),
    "keys_in_fractions": changed("8.4", (PROGRAM, "program_bytes = 2 * context / splits * head_dim * item_bytes")),
    "in_seconds": changed("8.4", ("return 1e6 * seconds", "return seconds")),
    "partials_cross_once": changed("8.4", ("+ 2 * partial_bytes", "+ partial_bytes")),
    "partials_by_key_heads": changed("8.4", ("batch * query_heads * (head_dim", "batch * key_heads * (head_dim")),
    "log_sum_exp_forgotten": changed("8.4", ("(head_dim + 1) * 4", "head_dim * 4")),
    "partials_in_half_precision": changed("8.4", ("(head_dim + 1) * 4", "(head_dim + 1) * item_bytes")),
    "launch_forgotten": changed("8.4", ('chip["launch_seconds"] + 2', "2")),
    "combine_without_a_split": changed("8.4", ("if splits > 1:", "if splits > 0:")),
    "combine_forgotten": changed(
        "8.4",
        (
            CHOICE,
            "min(range(1, most + 1), key=lambda n: kernel_seconds(\n"
            "        batch * key_heads * n, 2 * -(-context // n) * head_dim * item_bytes, chip))",
        ),
    ),
    "always_one_wave": changed("8.4", (CHOICE, f"max(1, min(most, {WAVE}))")),
    "one_wave_rounded_up": changed("8.4", (CHOICE, 'max(1, min(most, -(-chip["slots"] // (batch * key_heads))))')),
    "as_many_as_allowed": changed("8.4", (CHOICE, "most")),
    "slowest_chosen": changed("8.4", (CHOICE, CHOICE.replace("min(", "max("))),
}

LISTED = changed(
    "8.4",
    (
        f"return {CHOICE}",
        "best, least = None, math.inf\n"
        "    for splits in range(most, 0, -1):\n"
        "        seconds = decode_microseconds(splits, *shape)\n"
        "        if seconds < 1.004 * least:\n"
        "            best, least = splits, min(least, seconds)\n"
        "    return best",
    ),
)

# ------------------------------------------------------------------------------------------------------------------ 8.5

PAGES = "pages = next_pages.to(tl.int64)  # [BLOCK_N]"
SAME_STEP = "pages = tl.load(table_pointer + keys // PAGE_SIZE, mask=present, other=0).to(tl.int64)"
PAGED_LSE = "log_sum_exp = (running_max + tl.log2(total)) * 0.6931471805599453"
PAGED_TOTAL = "total = tl.where(running_sum == 0.0, 1.0, running_sum)"
PAGED_WEIGHTS = "weights = tl.exp(lses - reference)  # [BLOCK_S]"
PAGED_REFERENCE = 'reference = tl.where(largest == float("-inf"), 0.0, largest)'
PAGED_LOADED = LOADED.removesuffix("  # [BLOCK_S]")
PAGED_HEADS = "heads = key_head * GROUP + members"
PAST_THE_SPLIT = (("keys < last", "keys < length"), ("ahead < last", "ahead < length"))
PAGED_LENGTH = "length = tl.load(lengths_pointer + sequence)"
WHOLE = "output = tl.sum(weights[:, None] * parts, axis=0) / divisor  # [HEAD_DIM]"
BY_PAGES = (SPLIT_LENGTH, "split_length = tl.cdiv(tl.cdiv(length, PAGE_SIZE), splits) * PAGE_SIZE")


def paged_lse(expression):
    return changed("8.5", (MERGED_LSE, expression))


PAGED_WRONG = {
    "averaged_without_weights": changed("8.5", (WHOLE, "output = tl.sum(parts, axis=0) / splits")),
    "averaged_without_weights__in_splits_of_pages": changed(
        "8.5", BY_PAGES, (WHOLE, "output = tl.sum(parts, axis=0) / splits")
    ),
    "averaged_without_weights__where_present": changed(
        "8.5",
        (
            WHOLE,
            'output = tl.sum(parts, axis=0) / tl.maximum(tl.sum((lses > float("-inf")).to(tl.float32), axis=0), 1.0)',
        ),
    ),
    "averaged_without_weights__and_their_number_as_the_sum": changed(
        "8.5", (PAGED_WEIGHTS, "weights = tl.where(present, 1.0, 0.0)"), (MERGED_LSE, "reference + tl.log(divisor)")
    ),
    "missing_splits_counted": changed("8.5", (PAGED_LOADED, PAGED_LOADED.replace('float("-inf")', "0.0"))),
    "added_without_weights": changed("8.5", (WHOLE, "output = tl.sum(parts, axis=0)")),
    "not_divided": changed("8.5", (WHOLE, "output = tl.sum(weights[:, None] * parts, axis=0)")),
    "merged_in_the_wrong_base": changed("8.5", (PAGED_WEIGHTS, "weights = tl.exp2(lses - reference)")),
    "merged_in_the_wrong_base__stored_in_base_2": changed(
        "8.5", (PAGED_LSE, "log_sum_exp = running_max + tl.log2(total)")
    ),
    "merged_in_the_wrong_base__and_the_lse_too": changed(
        "8.5", (PAGED_WEIGHTS, "weights = tl.exp2(lses - reference)"), (MERGED_LSE, "largest + tl.log2(divisor)")
    ),
    "lse_not_merged": paged_lse("largest"),
    "lse_not_merged__the_last": paged_lse("tl.load(lses_pointer + (splits - 1) * rows + row)"),
    "lse_not_merged__the_first": paged_lse("tl.load(lses_pointer + row)"),
    "lse_not_merged__the_sum": paged_lse("tl.sum(tl.where(present, lses, 0.0), axis=0)"),
    "empty_split_nan": changed("8.5", (PAGED_TOTAL, "total = running_sum")),
    "empty_split_nan__in_splits_of_pages": changed("8.5", BY_PAGES, (PAGED_TOTAL, "total = running_sum")),
    "last_keys_lost": changed("8.5", (SPLIT_LENGTH, "split_length = length // splits")),
    "reaches_into_the_next_split": changed("8.5", *PAST_THE_SPLIT),
    "reaches_into_the_next_split__in_tiles_of_16": changed("8.5", *PAST_THE_SPLIT, ("BLOCK_N=64", "BLOCK_N=16")),
    "past_the_sequences_end": changed("8.5", (LAST, "last = first + split_length")),
    "last_keys_lost__in_splits_of_pages": changed(
        "8.5", (SPLIT_LENGTH, "split_length = tl.cdiv(length, PAGE_SIZE) // splits * PAGE_SIZE")
    ),
    "last_page_read_whole": changed(
        "8.5", (PAGED_LENGTH, f"{PAGED_LENGTH}\n    length = tl.cdiv(length, PAGE_SIZE) * PAGE_SIZE")
    ),
    "last_page_left_out": changed(
        "8.5", (PAGED_LENGTH, f"{PAGED_LENGTH}\n    length = length // PAGE_SIZE * PAGE_SIZE")
    ),
    "one_token_too_few": changed("8.5", (PAGED_LENGTH, f"{PAGED_LENGTH}\n    length = tl.maximum(length - 1, 0)")),
    "length_of_the_first": changed("8.5", (PAGED_LENGTH, "length = tl.load(lengths_pointer)")),
    "keys_used_as_values": changed(
        "8.5", ("tl.load(value_pointer + value_offsets", "tl.load(key_pointer + key_offsets")
    ),
    "page_not_multiplied": changed(
        "8.5",
        ("pages * key_page_stride", "pages * key_stride"),
        ("pages * value_page_stride", "pages * value_stride"),
    ),
    "offset_left_out": changed(
        "8.5", (" + keys % PAGE_SIZE * key_stride", ""), (" + keys % PAGE_SIZE * value_stride", "")
    ),
    "pages_taken_in_order": changed(
        "8.5", (PAGES, "pages = (tl.load(table_pointer) + keys // PAGE_SIZE).to(tl.int64)")
    ),
    "pages_taken_in_order__without_the_table": changed("8.5", (PAGES, "pages = (keys // PAGE_SIZE).to(tl.int64)")),
    "table_of_the_first_sequence": changed(
        "8.5",
        ("    table_pointer += sequence * table_stride\n", ""),
        (PAGES, "pages = tl.maximum(next_pages, 0).to(tl.int64)"),
    ),
    "heads_by_modulo": changed("8.5", ("heads = key_head * GROUP + members", "heads = key_head + members * key_heads")),
    "scale_missing": changed("8.5", (SCALE, "math.log2(math.e)")),
    "empty_sequence_not_written": changed(
        "8.5",
        (
            "    tl.store(output_pointer + row * HEAD_DIM",
            '    if largest == float("-inf"):\n        return\n    tl.store(output_pointer + row * HEAD_DIM',
        ),
    ),
    "empty_sequence_counts": changed("8.5", (MERGED_LSE, "reference + tl.log(divisor)")),
    "unused_slots_reach_the_result": changed(
        "8.5",
        (
            "tl.load(value_pointer + value_offsets, mask=present[:, None], other=0.0)",
            "tl.load(value_pointer + value_offsets)",
        ),
    ),
    "rows_of_no_head_read": changed("8.5", (PAGED_HEADS, "heads = key_head * BLOCK_G + members")),
    "read_out_of_bounds": changed(
        "8.5",
        (PAGES, "pages = tl.load(table_pointer + keys // PAGE_SIZE).to(tl.int64)"),
        ("mask=present[:, None], other", "mask=(keys >= 0)[:, None], other"),
    ),
    "written_out_of_bounds": changed("8.5", (", mask=members < GROUP)", ")")),
    "keys_not_split": changed(
        "8.5",
        (
            "paged_split_kernel[(splits, key_heads, batch)]",
            "splits = 1\n    paged_split_kernel[(splits, key_heads, batch)]",
        ),
    ),
}

ARRIVALS = """# Exercise 8.5 · Flash-Decoding on a paged cache
@triton.jit
def kernel(q, k, v, table, lengths, parts, lses, arrived, out, lse_out, q_seq, q_head, k_page, k_head, k_row,
           v_page, v_head, v_row, t_row, scale,
           G: tl.constexpr, M: tl.constexpr, D: tl.constexpr, P: tl.constexpr, N: tl.constexpr):
    b, h, s = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    batch, kv, splits = tl.num_programs(0), tl.num_programs(1), tl.num_programs(2)
    g = tl.arange(0, M)
    d = tl.arange(0, D)
    heads = h * G + g
    real = g < G
    query = tl.load(q + b * q_seq + heads[:, None] * q_head + d[None, :], mask=real[:, None], other=0.0)
    length = tl.load(lengths + b)
    blocks = tl.cdiv(tl.cdiv(length, P), splits)
    begin = s * blocks * P
    end = tl.minimum(length, begin + blocks * P)
    top = tl.full([M], -1e30, tl.float32)
    total = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, D], tl.float32)
    start = begin
    while start < end:
        n = start + tl.arange(0, N)
        ok = n < end
        page = tl.load(table + b * t_row + n // P, mask=ok, other=0).to(tl.int64)
        key = tl.load(k + h * k_head + page[:, None] * k_page + (n % P)[:, None] * k_row + d[None, :],
                      mask=ok[:, None], other=0.0)
        scores = tl.where(ok[None, :], tl.dot(query, tl.trans(key), input_precision="ieee") * scale, -1e30)
        new = tl.maximum(top, tl.max(scores, 1))
        p = tl.where(ok[None, :], tl.exp(scores - new[:, None]), 0.0)
        value = tl.load(v + h * v_head + page[:, None] * v_page + (n % P)[:, None] * v_row + d[None, :],
                        mask=ok[:, None], other=0.0)
        acc = acc * tl.exp(top - new)[:, None] + tl.dot(p.to(value.dtype), value, input_precision="ieee")
        total = total * tl.exp(top - new) + tl.sum(p, 1)
        top = new
        start += N
    rows = b * kv * G + heads
    each = batch * kv * G
    lse = tl.where(total > 0, top + tl.log(tl.maximum(total, 1e-37)), float("-inf"))
    acc = acc / tl.maximum(total, 1e-37)[:, None]
    tl.store(parts + (s * each + rows)[:, None] * D + d[None, :], acc, mask=real[:, None])
    tl.store(lses + s * each + rows, lse, mask=real)
    tl.debug_barrier()
    if tl.atomic_add(arrived + b * kv + h, 1) == splits - 1:
        top = tl.full([M], -1e30, tl.float32)
        total = tl.zeros([M], tl.float32)
        acc = tl.zeros([M, D], tl.float32)
        for i in range(0, splits):
            here = tl.load(lses + i * each + rows, mask=real, other=float("-inf"))
            part = tl.load(parts + (i * each + rows)[:, None] * D + d[None, :], mask=real[:, None], other=0.0)
            new = tl.maximum(top, here)
            weight = tl.exp(here - new)
            acc = acc * tl.exp(top - new)[:, None] + part * weight[:, None]
            total = total * tl.exp(top - new) + weight
            top = new
        some = total > 0
        acc = acc / tl.where(some, total, 1.0)[:, None]
        tl.store(out + rows[:, None] * D + d[None, :], acc.to(out.dtype.element_ty), mask=real[:, None])
        tl.store(lse_out + rows, tl.where(some, top + tl.log(tl.where(some, total, 1.0)), float("-inf")), mask=real)

def flash_decode(query, key_pages, value_pages, block_tables, lengths, splits):
    batch, heads, dim = query.shape
    kv, page = key_pages.shape[1:3]
    new = lambda *shape: torch.empty(shape, dtype=torch.float32, device=query.device)
    parts, lses, lse = new(splits, batch, heads, dim), new(splits, batch, heads), new(batch, heads)
    output = torch.empty((batch, heads, dim), dtype=query.dtype, device=query.device)
    arrived = torch.zeros(batch, kv, dtype=torch.int32, device=query.device)
    kernel[(batch, kv, splits)](query, key_pages, value_pages, block_tables, lengths, parts, lses, arrived, output, lse,
        *query.stride()[:2], *key_pages.stride()[:3], *value_pages.stride()[:3], block_tables.stride(0), dim ** -0.5,
        G=heads // kv, M=max(16, triton.next_power_of_2(heads // kv)), D=dim, P=page, N=32)
    return output, lse
"""

# ------------------------------------------------------------------------------------------------------------------ 8.6

FAST_LOOP = "for start in range(first, whole, BLOCK_N):"
FAST_WEIGHTS = "weights = tl.exp2(lses - tl.max(lses, axis=0))  # [BLOCK_S]; the first split always has keys"

FAST_WRONG = {
    "scale_missing": changed("8.6", ("math.log2(math.e) / math.sqrt(head_dim)", "math.log2(math.e)")),
    "log2e_missing": changed("8.6", ("math.log2(math.e) / math.sqrt(head_dim)", "1 / math.sqrt(head_dim)")),
    "last_tile_left_out": changed("8.6", ("if whole < last:", "if whole < 0:"), ("slots // (batch * key_heads)", "1")),
    "forbidden_operation": """# Exercise 8.6 · Beat FlashAttention-2 at 128k
@triton.jit
def copy_kernel(x, y, N: tl.constexpr):
    i = tl.program_id(0) * N + tl.arange(0, N)
    tl.store(y + i, tl.load(x + i))

def fast_decode(query, key, value):
    output = F.scaled_dot_product_attention(query[:, :, None], key, value, enable_gqa=True)[:, :, 0].contiguous()
    result = torch.empty_like(output)
    copy_kernel[(output.numel() // 64,)](output, result, N=64)
    return result
""",
    "too_slow": changed("8.6", ("splits = max(1, min(slots", "splits = max(1, min(1, slots")),
}

WRONG = {
    "8.1": OCCUPANCY_WRONG,
    "8.2": PARTIAL_WRONG,
    "8.3": COMBINE_WRONG,
    "8.4": SPLITS_WRONG,
    "8.5": PAGED_WRONG,
    "8.6": FAST_WRONG,
}

UNUSUAL = {
    "8.1": {
        "counted and searched": SEARCHED,
        "ceil of a fraction": changed("8.1", (WAVES, "waves = math.ceil(programs / slots)")),
        "numpy": changed(
            "8.1",
            (WAVES, "waves = int(np.ceil(programs / slots))"),
            (BUSY, "float(np.float64(programs) / (waves * slots))"),
        ),
        "a bound in place of a maximum": changed("8.1", (ONE_WAVE, "slots // (batch * key_heads) or 1")),
    },
    "8.2": {
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
        "lengths rounded up another way": changed(
            "8.2", (SPLIT_LENGTH, "split_length = (length + splits - 1) // splits")
        ),
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
    },
    "8.3": {
        "one split after the other": ONE_BY_ONE,
        "base two": changed(
            "8.3",
            (WEIGHTS, "weights = tl.exp2((lses - reference) * 1.4426950408889634)"),
            (MERGED_LSE, "largest + tl.log2(divisor) * 0.6931471805599453"),
        ),
        "shares of the whole": changed(
            "8.3", (COMBINED, "tl.sum(tl.exp(lses - reference - tl.log(divisor))[:, None] * parts, axis=0)")
        ),
        "a large negative number": changed(
            "8.3",
            (REFERENCE, "reference = tl.maximum(largest, -1e30)"),
        ),
        "a tile larger than needed": changed("8.3", (NEXT_POWER, "4 * triton.next_power_of_2(splits)")),
    },
    "8.4": {
        "any of those as good": LISTED,
        "sorted by time": changed(
            "8.4", (CHOICE, "sorted((decode_microseconds(n, *shape), n) for n in range(1, most + 1))[0][1]")
        ),
        "ceil of a fraction": changed("8.4", ("-(-context // splits)", "math.ceil(context / splits)")),
        "candidates that differ in their longest split": changed(
            "8.4",
            (
                CHOICE,
                "min([n for n in range(1, most + 1) if n == 1 or -(-context // n) != -(-context // (n - 1))],\n"
                "               key=lambda splits: decode_microseconds(splits, *shape))",
            ),
        ),
    },
    "8.5": {
        "tl.dot in tf32": in_tf32("8.5"),
        "one launch: the last program to arrive merges": ARRIVALS,
        "splits of whole pages": changed("8.5", BY_PAGES),
        "tiles of 16 keys": changed("8.5", ("BLOCK_N=64", "BLOCK_N=16")),
        "log-sum-exps in base 2 between the kernels": changed(
            "8.5",
            (PAGED_LSE, "log_sum_exp = running_max + tl.log2(total)"),
            (PAGED_WEIGHTS, "weights = tl.exp2(lses - reference)"),
            (MERGED_LSE, "(largest + tl.log2(divisor)) * 0.6931471805599453"),
        ),
        "page numbers in the step that needs them": changed("8.5", (PAGES, SAME_STEP)),
        "partial results in the query's dtype where that is float32": changed(
            "8.5",
            ("dtype=torch.float32, device=query.device)\n    lses", "dtype=torch.float32).to(query.device)\n    lses"),
        ),
    },
    "8.6": {
        "natural base": changed(
            "8.6",
            ("tl.exp2", "tl.exp"),
            ("tl.log2", "tl.log"),
            ("math.log2(math.e) / math.sqrt(head_dim)", "1 / math.sqrt(head_dim)"),
        ),
        "two programs on each multiprocessor": changed("8.6", ("slots = ", "slots = 2 * ")),
        "masked throughout": changed(
            "8.6",
            (FAST_LOOP, "for start in range(first, last, BLOCK_N):"),
            ("if whole < last:", "if last < 0:"),
            ("MASKED=False", "MASKED=True"),
        ),
    },
}
