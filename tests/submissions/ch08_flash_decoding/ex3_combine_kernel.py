"""Wrong answers to exercise 8.3, and unusual right ones."""

from tests.submissions.ch08_flash_decoding.shared import LOADED, MERGED_LSE
from tests.submissions.edits import changed

COMBINED = "tl.sum(weights[:, None] * parts, axis=0) / divisor"


WEIGHTS = "weights = tl.exp(lses - reference)  # [BLOCK_S], 0 for a split without keys"


REFERENCE = 'reference = tl.where(largest == float("-inf"), 0.0, largest)  # never -inf - -inf'


DIVISOR = "divisor = tl.where(total == 0.0, 1.0, total)  # never 0 / 0"


NEXT_POWER = "triton.next_power_of_2(splits)"


def instead_of_lse(expression):
    return changed("8.3", (MERGED_LSE, expression))


WRONG = {
    "averaged_without_weights": changed("8.3", (COMBINED, "tl.sum(parts, axis=0) / splits")),
    "averaged_without_weights__where_present": changed(
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
    "averaged_without_weights__where_present_and_their_number_as_the_sum": changed(
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
    "finite_for_empty": changed("8.3", ("largest + tl.log(divisor)", "tl.maximum(largest, -1e4) + tl.log(divisor)")),
    "tile_of_fixed_size": changed("8.3", (NEXT_POWER, "16")),
    "tile_of_fixed_size__of_256": changed("8.3", (NEXT_POWER, "256")),
    "tile_of_fixed_size__of_64": changed("8.3", (NEXT_POWER, "64")),
    "maximum_starts_at_zero": changed("8.3", (REFERENCE, "reference = tl.maximum(largest, 0.0)")),
    "no_maximum__and_splits_taken_for_neighbours": changed(
        "8.3",
        (REFERENCE, "reference = 0.0"),
        (MERGED_LSE, "tl.log(total)"),
        ("partial_rows = members * rows + row", "partial_rows = row * splits + members"),
    ),
    "tile_of_fixed_size__of_32": changed("8.3", (NEXT_POWER, "32")),
    "read_out_of_bounds": changed("8.3", (LOADED, "lses = tl.load(lses_pointer + partial_rows)")),
    "divided_by_the_splits": changed("8.3", (COMBINED, "tl.sum(weights[:, None] * parts, axis=0) / splits")),
    "measured_from_the_first": changed(
        "8.3",
        (
            REFERENCE,
            'first = tl.load(lses_pointer + row)\n    reference = tl.where(first == float("-inf"), 0.0, first)',
        ),
        ("largest + tl.log(divisor)", 'tl.where(total == 0.0, float("-inf"), reference + tl.log(divisor))'),
    ),
    "mixed_bases": instead_of_lse("largest + tl.log2(divisor)"),
    "lse_added__finite": instead_of_lse(
        'tl.where(total == 0.0, float("-inf"), tl.sum(tl.where(lses > float("-inf"), lses, 0.0), axis=0))'
    ),
    "empty_splits_weigh": changed(
        "8.3", ("largest = tl.max", 'lses = tl.where(lses == float("-inf"), 0.0, lses)\n    largest = tl.max')
    ),
    "splits_a_sequence_apart": changed(
        "8.3",
        ("lse_pointer, splits, HEAD", "lse_pointer, splits, query_heads, HEAD"),
        ("members * rows + row", "members * query_heads + row"),
        ("output, lse, splits, HEAD", "output, lse, splits, query_heads, HEAD"),
    ),
    "rounded_to_16_bits": changed("8.3", (COMBINED, f"({COMBINED}).to(tl.float16)")),
    "computed_in_16_bits": changed(
        "8.3", (WEIGHTS, "weights = tl.exp(lses - reference).to(tl.float16).to(tl.float32)")
    ),
    "written_out_of_bounds": changed(
        "8.3",
        ("combine_kernel[(batch * query_heads,)]", "combine_kernel[(batch * query_heads + 1,)]"),
        ("row, rows = tl.program_id(0), tl.num_programs(0)", "row, rows = tl.program_id(0), tl.num_programs(0) - 1"),
    ),
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


ONE_BUFFER = changed(
    "8.3",
    (
        "output = torch.empty(batch, query_heads, head_dim, dtype=torch.float32, device=outputs.device)",
        "both = torch.empty(batch * query_heads * (head_dim + 1), dtype=torch.float32, device=outputs.device)\n"
        "    output = both[: batch * query_heads * head_dim].view(batch, query_heads, head_dim)",
    ),
    (
        "lse = torch.empty(batch, query_heads, dtype=torch.float32, device=outputs.device)",
        "lse = both[batch * query_heads * head_dim :].view(batch, query_heads)",
    ),
)


UNUSUAL = {
    "both results in one buffer": ONE_BUFFER,
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
}


WRONG |= {
    "reference_bounded_below": changed(
        "8.3", ('tl.where(largest == float("-inf"), 0.0, largest)', "tl.maximum(largest, -1e4)")
    ),
}
