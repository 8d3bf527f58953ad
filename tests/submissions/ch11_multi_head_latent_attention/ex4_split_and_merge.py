"""Wrong answers to exercise 11.4, and unusual right ones."""

from tests.submissions.edits import changed

PROGRAMS = "programs = batch * -(-heads // 64)"
SPLITS = "return max(1, min(slots // programs, -(-length // 64)))"
PRODUCT = 'tl.dot(weights.to(latents.dtype), latents, input_precision="ieee")'
AGAIN = "values = tl.load(rows + latent_columns[None, :], mask=present[:, None], other=0.0)\n        "
ROPE = '        scores += tl.dot(query_rope, tl.trans(rope_keys), input_precision="ieee")\n'
TOTAL = "total = tl.where(running_sum == 0.0, 1.0, running_sum)"
LAST = "last = tl.minimum(start + split_length, length)"
TILE = "rows = min(64 if roomy else 16, max(16, triton.next_power_of_2(heads)))"
SHAPE = "batch, heads, width = query.shape"
ROPE_KEYS = "tl.load(rows + rope_columns[None, :], mask=(tokens < last + BLOCK_N)[:, None],"
MERGE = "weight = tl.exp2(tl.load(lses_pointer + row * splits + split) - reference)"
DIVIDED = "output = output / tl.where(total == 0.0, 1.0, total)"

MERGED = "output += weight * tl.load(outputs_pointer + (row * splits + split) * LATENT + columns)"

LOOP = f"""    output = tl.zeros([LATENT], tl.float32)
    for split in range(0, splits):
        {MERGE}
        {MERGED}
"""

WRONG = {
    "merged_in_one_tile": changed(
        "11.4",
        (
            LOOP,
            "    rows = outputs_pointer + (row * splits + members[:, None]) * LATENT\n"
            "    outputs = tl.load(rows + columns[None, :], mask=members[:, None] < splits, other=0.0)\n"
            "    output = tl.sum(tl.exp2(lses - reference)[:, None] * outputs, axis=0)\n",
        ),
    ),
    "product_in_float32": changed("11.4", (PRODUCT, 'tl.dot(weights, latents.to(tl.float32), input_precision="ieee")')),
    "rounded_wrong": changed("11.4", ("-(-length // 64)", "(length // 64 + 1)")),
    "heads_counted_singly__sixteen": changed("11.4", ("-(-heads // 64)", "-(-heads // 16)")),
    "rounded_over_the_batch": changed("11.4", (PROGRAMS, "programs = -(-batch * heads // 64)")),
    "measured_apart": changed("11.4", ("tl.sum(tl.exp2(lses - reference)", "tl.sum(tl.exp2(lses)")),
    "measured_apart__weights": changed("11.4", (MERGE, MERGE.replace(" - reference", ""))),
    "last_split_left_out": changed("11.4", ("for split in range(0, splits)", "for split in range(0, splits - 1)")),
    "last_split_left_out__in_the_sum_too": changed(
        "11.4", ("range(0, splits)", "range(0, splits - 1)"), ("mask=members < splits", "mask=members < splits - 1")
    ),
    "last_split_left_out__it_alone": changed("11.4", ("range(0, splits)", "range(splits - 1, splits)")),
    "missing_splits_counted": changed(
        "11.4", ('mask=members < splits, other=float("-inf")', "mask=members < splits, other=0.0")
    ),
    "results_exchanged__log_sum_exps": changed(
        "11.4", ("lses_pointer + results,", "lses_pointer + (sequence * splits + split) * heads + members,")
    ),
    "merged_in_half": changed(
        "11.4",
        ("output = tl.zeros([LATENT], tl.float32)", "output = tl.zeros([LATENT], output_pointer.dtype.element_ty)"),
        (MERGED, "output += (weight * tl.load(outputs_pointer + (row * splits + split) * LATENT + columns))"
                 ".to(output_pointer.dtype.element_ty)"),
    ),
    "fixed_size": changed("11.4", ("splits, batch)](", "splits, min(batch, 132))](")),
    "fixed_size__of_the_merge": changed("11.4", ("kernel[(batch * heads,)]", "kernel[(min(batch * heads, 264),)]")),
    "fixed_size__splits": changed("11.4", ("rows), splits, batch)]", "rows), min(splits, 128), batch)]")),
    "fixed_size__tile_of_splits": changed("11.4", ("BLOCK_S=triton.next_power_of_2(splits)", "BLOCK_S=128")),
    # vllm#50629: the number of splits is made of the length alone.
    "splits_from_length_alone": changed("11.4", (SPLITS, "return max(1, -(-length // 64))")),
    "splits_from_length_alone__and_slots": changed("11.4", ("slots // programs", "slots")),
    "batch_forgotten": changed("11.4", (PROGRAMS, "programs = -(-heads // 64)")),
    "heads_counted_singly": changed("11.4", (PROGRAMS, "programs = batch * heads")),
    "splits_too_short": changed("11.4", (SPLITS, "return max(1, slots // programs)")),
    # pegainfer#21: a split without rows makes NaN.
    "empty_split_nan": changed("11.4", (TOTAL, "total = running_sum")),
    "empty_split_unwritten": changed("11.4", (LAST, f"{LAST}\n    if start >= last:\n        return")),
    "empty_split_unwritten__of_whole_tiles": changed(
        "11.4",
        (LAST, f"{LAST}\n    if start >= last:\n        return"),
        (
            "split_length = tl.cdiv(length, splits)",
            "split_length = tl.cdiv(tl.cdiv(length, splits), BLOCK_N) * BLOCK_N",
        ),
    ),
    "splits_ignored": changed("11.4", (SHAPE, f"splits = 1\n    {SHAPE}")),
    "tile_too_short": changed("11.4", (TILE, "rows = 16")),
    "tile_too_tall": changed("11.4", (TILE, "rows = max(16, triton.next_power_of_2(heads))")),
    "split_axes_exchanged": changed(
        "11.4", ("(triton.cdiv(heads, rows), splits, batch)", "(triton.cdiv(heads, rows), batch, splits)")
    ),
    "results_exchanged": changed(
        "11.4",
        (
            "results = (sequence * heads + members) * splits + split",
            "results = (sequence * splits + split) * heads + members",
        ),
    ),
    "outside_the_results": changed("11.4", ("tl.log2(total), mask=members < heads)", "tl.log2(total))")),
    "outside_the_queries": changed(
        "11.4",
        ("tl.load(query_rows + rope_columns[None, :], mask=exist, other=0.0)", "tl.load(query_rows + rope_columns)"),
    ),
    "outside_the_cache": changed("11.4", ("tl.load(rows + rope_columns[None, :], mask=present[:, None],", ROPE_KEYS)),
    "block_of_64_splits": changed("11.4", ("BLOCK_S=triton.next_power_of_2(splits)", "BLOCK_S=64")),
    "finite_mask": changed("11.4", ('scores * scale_log2, float("-inf")', "scores * scale_log2, -1e4")),
    "empty_split_counts": changed(
        "11.4",
        ("running_max + tl.log2(total), mask", "tl.where(running_sum == 0.0, 0.0, running_max + tl.log2(total)), mask"),
    ),
    "empty_sequence_nan": changed("11.4", ('tl.where(largest == float("-inf"), 0.0, largest)', "largest")),
    "last_rows_lost": changed("11.4", ("tl.cdiv(length, splits)", "length // splits")),
    "reaches_into_the_next_split": changed("11.4", ("present = tokens < last", "present = tokens < length")),
    "reaches_into_the_next_split__in_tiles_of_64": changed(
        "11.4", ("present = tokens < last", "present = tokens < length"), ("BLOCK_N=32", "BLOCK_N=64")
    ),
    "reaches_into_the_next_split__and_mixed_bases": changed(
        "11.4", ("present = tokens < last", "present = tokens < length"), (MERGE, MERGE.replace("exp2", "exp")),
        ("tl.exp2(lses - reference)", "tl.exp(lses - reference)"),
    ),
    "reaches_into_the_next_split__and_natural_logarithm": changed(
        "11.4", ("present = tokens < last", "present = tokens < length"), ("tl.log2(total)", "tl.log(total)")
    ),
    "begins_with_the_next_split": changed(
        "11.4", ("start = split * split_length", "start = (split + 1) * split_length")
    ),
    "weight_of_another_split": changed(
        "11.4", ("(row * splits + split) * LATENT", "(row * splits + (split + 1) % splits) * LATENT")
    ),
    "mixed_bases__and_weight_of_another_split": changed(
        "11.4", ("(row * splits + split) * LATENT", "(row * splits + (split + 1) % splits) * LATENT"),
        (MERGE, MERGE.replace("exp2", "exp")), ("tl.exp2(lses - reference)", "tl.exp(lses - reference)"),
    ),
    "past_the_end": changed("11.4", (LAST, "last = start + split_length")),
    "averaged_without_weights": changed("11.4", (MERGE, "weight = 1.0 / splits"), (DIVIDED, "")),
    "added_without_weights": changed("11.4", (MERGE, "weight = 1.0"), (DIVIDED, "")),
    "not_divided": changed("11.4", (DIVIDED, "")),
    "split_not_divided": changed("11.4", ("outputs = accumulator / total[:, None]", "outputs = accumulator")),
    "weighed_by_the_maximum": changed("11.4", ("running_max + tl.log2(total), mask", "running_max, mask")),
    "mixed_bases": changed(
        "11.4", (MERGE, MERGE.replace("exp2", "exp")), ("tl.exp2(lses - reference)", "tl.exp(lses - reference)")
    ),
    "latent_loaded_twice": changed(
        "11.4", (PRODUCT, PRODUCT.replace(" latents,", " values,")), ("product = tl", AGAIN + "product = tl")
    ),
    "rope_forgotten": changed("11.4", (ROPE, "")),
    "rows_read_for_every_head": changed(
        "11.4",
        ("tl.program_id(0) * ROWS + tl.arange(0, ROWS)", "tl.program_id(0) + tl.arange(0, ROWS) * 4096"),
        (
            "latent_split_kernel[(triton.cdiv(heads, rows), splits, batch)]",
            "latent_split_kernel[(heads, splits, batch)]",
        ),
    ),
    "value_tile_is_the_whole_row": changed(
        "11.4", (PRODUCT, PRODUCT.replace(" latents,", " tl.join(latents, latents).reshape(BLOCK_N, 2 * LATENT),"))
    ),
    "accumulator_not_rescaled": changed("11.4", ("accumulator * rescale[:, None]", "accumulator")),
    "offset_in_32_bits": changed("11.4", ("tl.program_id(2).to(tl.int64)", "tl.program_id(2)")),
    "copied_by_pytorch": changed(
        "11.4",
        ("batch, heads, width = query.shape", "cache = cache.contiguous()\n    batch, heads, width = query.shape"),
    ),
    "nan_from_the_start": changed("11.4", ("tl.exp2(running_max - new_max)", "tl.exp2(new_max - running_max)")),
    "rounded_to_16_bits": changed("11.4", ("output.to(output_pointer.dtype.element_ty)", "output.to(tl.float16)")),
    "computed_in_16_bits": changed(
        "11.4", ("splits, value_dim, dtype=torch.float32", "splits, value_dim, dtype=torch.float16")
    ),
}

UNUSUAL = {
    "partial results in the query's dtype": changed(
        "11.4",
        ("outputs = torch.empty(batch, heads, splits, value_dim, dtype=torch.float32",
         "outputs = torch.empty(batch, heads, splits, value_dim, dtype=query.dtype"),
        ("latent_columns[None, :], outputs, mask=exist)",
         "latent_columns[None, :], outputs.to(outputs_pointer.dtype.element_ty), mask=exist)"),
    ),
    "natural logarithms": changed(
        "11.4", ("tl.exp2(", "tl.exp("), ("tl.log2(", "tl.log("), ("scale * math.log2(math.e)", "scale")
    ),
    "whole tiles in a split": changed(
        "11.4",
        (
            "split_length = tl.cdiv(length, splits)",
            "split_length = tl.cdiv(tl.cdiv(length, splits), BLOCK_N) * BLOCK_N",
        ),
    ),
    "merged online": changed(
        "11.4",
        (MERGE, "lse = tl.load(lses_pointer + row * splits + split)\n        weight = tl.exp2(lse - reference)"),
    ),
    "the reciprocal of the sum": changed(
        "11.4", ("outputs = accumulator / total[:, None]", "outputs = accumulator * (1.0 / total)[:, None]")
    ),
    "equal shares": changed(
        "11.4",
        ("start = split * split_length", "start = split * length // splits"),
        (LAST, "last = (split + 1) * length // splits"),
    ),
    "splits counted in turn": changed(
        "11.4",
        (
            SPLITS,
            "splits = 1\n    while (splits + 1) * programs <= slots and splits * 64 < length:\n"
            "        splits += 1\n    return splits",
        ),
    ),
}
