"""Wrong answers to exercise 8.5, and unusual right ones."""

from tests.submissions.ch08_flash_decoding.shared import LAST, LOADED, MERGED_LSE, SCALE, SPLIT_LENGTH
from tests.submissions.edits import changed, in_tf32

PAGES = "pages = next_pages.to(tl.int64)  # [BLOCK_N]"


SAME_STEP = "pages = tl.load(table_pointer + keys // PAGE_SIZE, mask=present, other=0).to(tl.int64)"


PAGED_LSE = "log_sum_exp = (running_max + tl.log2(total)) * 0.6931471805599453"


PAGED_TOTAL = "total = tl.where(running_sum == 0.0, 1.0, running_sum)"


PAGED_WEIGHTS = "weights = tl.exp(lses - reference)  # [BLOCK_S]"


PAGED_LOADED = LOADED.removesuffix("  # [BLOCK_S]")


PAGED_HEADS = "heads = key_head * GROUP + members"


PAST_THE_SPLIT = (("keys < last", "keys < length"), ("ahead < last", "ahead < length"))


PAGED_LENGTH = "length = tl.load(lengths_pointer + sequence)"


WHOLE = "output = tl.sum(weights[:, None] * parts, axis=0) / divisor  # [HEAD_DIM]"


BY_PAGES = (SPLIT_LENGTH, "split_length = tl.cdiv(tl.cdiv(length, PAGE_SIZE), splits) * PAGE_SIZE")


def paged_lse(expression):
    return changed("8.5", (MERGED_LSE, expression))


SHAPE = "batch, query_heads, head_dim = query.shape"


WRONG = {
    "copied_by_pytorch": changed(
        "8.5", (SHAPE, f"key_pages, value_pages = key_pages.contiguous(), value_pages.contiguous()\n    {SHAPE}")
    ),
    "offset_in_32_bits__heads": changed("8.5", ("key_head.to(tl.int64)", "key_head")),
    "output_laid_out_like_query": changed(
        "8.5",
        ("torch.empty(query.shape, dtype=query.dtype, device=query.device)", "torch.empty_like(query)"),
    ),
    "tile_of_fixed_size": changed("8.5", ("BLOCK_S=triton.next_power_of_2(splits)", "BLOCK_S=64")),
    "pages_of_the_tile_before": changed(
        "8.5",
        ("ahead = keys + BLOCK_N", "ahead = keys"),
    ),
    "nan_from_the_start": changed("8.5", ("tl.exp2(running_max - new_max)", "tl.exp2(new_max - running_max)")),
    "offset_in_32_bits": changed("8.5", (".to(tl.int64)", "")),
    "finite_for_empty": changed(
        "8.5",
        ("largest + tl.log(divisor)", "tl.maximum(largest, -1e4) + tl.log(divisor)"),
    ),
    "page_size_rounded_up": changed("8.5", ("PAGE_SIZE=page_size", "PAGE_SIZE=triton.next_power_of_2(page_size)")),
    "strides_ignored__width_of_the_table": changed("8.5", ("block_tables.stride(0)", "block_tables.shape[1]")),
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
    "weighed_in_base_2": changed("8.5", (PAGED_WEIGHTS, "weights = tl.exp2(lses - reference)")),
    "lse_in_base_2": changed("8.5", (PAGED_LSE, "log_sum_exp = running_max + tl.log2(total)")),
    "weighed_in_base_2__and_the_lse_too": changed(
        "8.5", (PAGED_WEIGHTS, "weights = tl.exp2(lses - reference)"), (MERGED_LSE, "largest + tl.log2(divisor)")
    ),
    "lse_largest": paged_lse("largest"),
    "lse_last": paged_lse("tl.load(lses_pointer + (splits - 1) * rows + row)"),
    "lse_first": paged_lse("tl.load(lses_pointer + row)"),
    "lse_added": paged_lse("tl.sum(tl.where(present, lses, 0.0), axis=0)"),
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
    "first_length_for_all": changed("8.5", (PAGED_LENGTH, "length = tl.load(lengths_pointer)")),
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
    "pages_consecutive": changed("8.5", (PAGES, "pages = (tl.load(table_pointer) + keys // PAGE_SIZE).to(tl.int64)")),
    "table_ignored": changed("8.5", (PAGES, "pages = (keys // PAGE_SIZE).to(tl.int64)")),
    "first_table_for_all": changed(
        "8.5",
        ("    table_pointer += sequence * table_stride\n", ""),
        (PAGES, "pages = tl.maximum(next_pages, 0).to(tl.int64)"),
    ),
    "by_modulo": changed("8.5", ("heads = key_head * GROUP + members", "heads = key_head + members * key_heads")),
    "scale_missing": changed("8.5", (SCALE, "math.log2(math.e)")),
    "empty_sequence_nan": changed(
        "8.5",
        (
            "    tl.store(output_pointer + row * HEAD_DIM",
            '    if largest == float("-inf"):\n        return\n    tl.store(output_pointer + row * HEAD_DIM',
        ),
    ),
    "empty_sequence_counts": changed("8.5", (MERGED_LSE, "reference + tl.log(divisor)")),
    "unused_slots_count": changed(
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
    "strides_ignored__pages_of_values": changed("8.5", ("pages * value_page_stride", "pages * key_page_stride")),
    "strides_ignored__sequences_of_queries": changed(
        "8.5", ("sequence * query_batch_stride", "sequence * key_heads * GROUP * HEAD_DIM")
    ),
    "strides_ignored__table": changed("8.5", ("block_tables.stride(0),", "block_tables.shape[1],")),
    "page_of_the_first_key": changed(
        "8.5", (PAGES, "pages = (tl.load(table_pointer + start // PAGE_SIZE) + keys * 0).to(tl.int64)")
    ),
    "slot_by_bit_mask": changed("8.5", ("keys % PAGE_SIZE", "(keys & (PAGE_SIZE - 1))")),
    "empty_sequence_nan__in_the_merge": changed(
        "8.5", ('reference = tl.where(largest == float("-inf"), 0.0, largest)', "reference = largest")
    ),
    "keys_not_split": changed(
        "8.5",
        (
            "paged_split_kernel[(splits, key_heads, batch)]",
            "splits = 1\n    paged_split_kernel[(splits, key_heads, batch)]",
        ),
    ),
    "blocks_counted_from_the_split": changed("8.5", (PAGES, SAME_STEP.replace("keys //", "(keys - first) //"))),
    "first_pages_of_the_sequence": changed(
        "8.5", ("keys = first + tl.arange(0, BLOCK_N)", "keys = tl.arange(0, BLOCK_N)")
    ),
    "pages_of_the_first_tile": changed(
        "8.5", ("next_pages = tl.load(table_pointer + ahead // PAGE_SIZE, mask=ahead < last, other=0)", "")
    ),
    "table_from_the_end": changed(
        "8.5", (PAGES, SAME_STEP.replace("keys // PAGE_SIZE", "tl.cdiv(length, PAGE_SIZE) - 1 - keys // PAGE_SIZE"))
    ),
    "group_of_all_heads": changed(
        "8.5", ("GROUP=group", "GROUP=query_heads"), ("power_of_2(group)", "power_of_2(query_heads)")
    ),
    "grid_axes_exchanged": changed(
        "8.5", ("split_kernel[(splits, key_heads, batch)]", "split_kernel[(batch, key_heads, splits)]")
    ),
    "rounded_to_16_bits": changed("8.5", ("output.to(output_pointer.dtype.element_ty)", "output.to(tl.float16)")),
    "computed_in_16_bits": changed(
        "8.5", ("tl.dot(weights.to(value_tile.dtype)", "tl.dot(weights.to(tl.float16).to(value_tile.dtype)")
    ),
}


ARRIVALS = """# Exercise 8.5 · Flash-Decoding on a paged cache
@triton.jit
def kernel(q, k, v, table, lengths, parts, lses, arrived, out, lse_out, q_seq, q_head, k_page, k_head, k_row,
           v_page, v_head, v_row, t_row, scale,
           G: tl.constexpr, M: tl.constexpr, D: tl.constexpr, P: tl.constexpr, N: tl.constexpr):
    b, h, s = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
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


UNUSUAL = {
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
}


WRONG |= {
    "maximum_of_the_first_tile": changed(
        "8.5",
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
    return changed("8.5", (f"tl.maximum(running_max, {own})", lazy))


def rows_of(number):
    """Tiles of so many query heads, whatever the group."""
    return changed("8.5", ("BLOCK_G=max(16, triton.next_power_of_2(group))", f"BLOCK_G={number}"))


WRONG |= {
    "maximum_lags": lagging("12 * 1.4427"),
    "maximum_lags__by_20_bits": lagging(20),
    "group_larger_than_the_tile__of_32": rows_of(32),
    "group_larger_than_the_tile__of_64": rows_of(64),
    "blocks_counted_from_the_split__loaded_ahead": changed(
        "8.5",
        ("table_pointer + keys // PAGE_SIZE", "table_pointer + (keys - first) // PAGE_SIZE"),
        ("table_pointer + ahead // PAGE_SIZE", "table_pointer + (ahead - first) // PAGE_SIZE"),
    ),
    "slot_by_bit_mask__and_the_page_by_shift": changed(
        "8.5",
        ("keys % PAGE_SIZE", "(keys & (PAGE_SIZE - 1))"),
        (f"{SCALE}, GROUP", f"{SCALE}, page_size.bit_length() - 1, GROUP"),
        ("table_stride, scale_log2,", "table_stride, scale_log2, shift,"),
        ("keys // PAGE_SIZE", "(keys >> shift)"),
        ("ahead // PAGE_SIZE", "(ahead >> shift)"),
    ),
}


UNUSUAL |= {
    "room for 256 splits in every merge": changed("8.5", ("BLOCK_S=triton.next_power_of_2(splits)", "BLOCK_S=256")),
    "a maximum that lags by 8 bits": lagging(8),
}


ADDS = "accumulator * rescale[:, None] + product"
WRONG |= {
    "accumulator_in_float16": changed(
        "8.5",
        (ADDS, f"({ADDS}).to(query.dtype).to(tl.float32)"),
    ),
}


PRODUCTS = 'tl.dot(query, tl.trans(key_tile), input_precision="ieee")'
NEW_SUM = "running_sum * rescale + tl.sum(weights, axis=1)"


WRONG |= {
    # In float32 the first and the last do no harm. Products pass 65,504 where scores do not, and what a tile of small
    # weights adds is lost in a sum of 1.
    "products_in_float16__if_the_keys_are": changed(
        "8.5", (PRODUCTS, f"{PRODUCTS}.to(key_tile.dtype).to(tl.float32)")
    ),
    "products_in_float16": changed("8.5", (PRODUCTS, f"{PRODUCTS}.to(tl.float16).to(tl.float32)")),
    "sum_in_float16": changed("8.5", (NEW_SUM, f"({NEW_SUM}).to(query.dtype).to(tl.float32)")),
    "sum_in_float16__always": changed("8.5", (NEW_SUM, f"({NEW_SUM}).to(tl.float16).to(tl.float32)")),
}


BEFORE_THE_LOOP = "tl.load(table_pointer + keys // PAGE_SIZE, mask=keys < last, other=0)"
IN_THE_LOOP = "tl.load(table_pointer + ahead // PAGE_SIZE, mask=ahead < last, other=0)"


def one_entry_further(load):
    return load, load.replace("// PAGE_SIZE", "// PAGE_SIZE + 1")


WRONG |= {
    "next_entry_of_the_table": changed("8.5", one_entry_further(BEFORE_THE_LOOP), one_entry_further(IN_THE_LOOP)),
    "next_entry_of_the_table__in_the_same_step": changed(
        "8.5", (PAGES, SAME_STEP.replace("PAGE_SIZE,", "PAGE_SIZE + 1,"))
    ),
    "next_entry_of_the_table__before_the_loop": changed("8.5", one_entry_further(BEFORE_THE_LOOP)),
    "next_entry_of_the_table__in_the_loop": changed("8.5", one_entry_further(IN_THE_LOOP)),
    "next_page_of_the_pool": changed("8.5", (PAGES, "pages = next_pages.to(tl.int64) + 1")),
    "one_entry_for_one_step": changed(
        "8.5", (IN_THE_LOOP, IN_THE_LOOP.replace("ahead // PAGE_SIZE", "keys // PAGE_SIZE + 1"))
    ),
    "pages_of_the_tile_after": changed("8.5", ("ahead = keys + BLOCK_N", "ahead = keys + 2 * BLOCK_N")),
    "pages_of_the_tile_after__at_first": changed(
        "8.5", (BEFORE_THE_LOOP, BEFORE_THE_LOOP.replace("keys", "(keys + BLOCK_N)"))
    ),
    "first_pages_of_the_next_split": changed(
        "8.5", (BEFORE_THE_LOOP, BEFORE_THE_LOOP.replace("keys", "(keys + split_length)"))
    ),
    "mixed_exponentials": changed("8.5", ("rescale = tl.exp2(", "rescale = tl.exp(")),
    "natural_exp__in_the_weights": changed("8.5", ("weights = tl.exp2(", "weights = tl.exp(")),
}
