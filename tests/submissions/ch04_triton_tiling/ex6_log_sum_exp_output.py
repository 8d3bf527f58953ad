"""Wrong answers to exercise 4.6, and unusual right ones."""

from tests.submissions.ch04_triton_tiling.shared import LAST_PROGRAMS_FIRST, of_narrow_numbers
from tests.submissions.edits import changed, in_tf32

LSE_LINE = "log_sum_exp = (running_max + tl.log2(total)) * 0.6931471805599453"


WRONG = {
    "maximum_starts_finite": changed("4.6", ('tl.full([BLOCK_M], float("-inf")', "tl.full([BLOCK_M], -1.0e30")),
    "maximum_starts_at_zero": changed(
        "4.6", ('tl.full([BLOCK_M], float("-inf"), tl.float32)', "tl.zeros([BLOCK_M], tl.float32)")
    ),
    "nan_from_the_start": changed(
        "4.6", ("rescale = tl.exp2(running_max - reference_max)", "rescale = tl.exp2(-running_max + reference_max)")
    ),
    "grid_axes_exchanged": changed(
        "4.6", ("(triton.cdiv(query_length, 64), heads)", "(heads, triton.cdiv(query_length, 64))")
    ),
    "log_of_sum_only": changed("4.6", (LSE_LINE, "log_sum_exp = tl.log(total)")),
    "lse_in_base_2": changed("4.6", (LSE_LINE, "log_sum_exp = running_max + tl.log2(total)")),
    "mixed_bases": changed("4.6", (LSE_LINE, "log_sum_exp = running_max + tl.log(total)")),
    "mixed_bases__log_for_log2": changed("4.6", ("tl.log2(total)", "tl.log(total)")),
    "lse_stored_in_one_head": changed("4.6", ("lse_pointer + head * query_length", "lse_pointer")),
    "lse_stored_by_key_length": changed(
        "4.6", ("lse_pointer + head * query_length + rows", "lse_pointer + head * key_length + rows")
    ),
    "lse_in_base_2__and_empty_row_nan": changed(
        "4.6", (" * 0.6931471805599453", ""), ('tl.where(new_max == float("-inf"), 0.0, new_max)', "new_max")
    ),
    "natural_exp": changed("4.6", ("tl.exp2(", "tl.exp(")),
    "log2e_missing": changed("4.6", ("math.log2(math.e) / math.sqrt", "1 / math.sqrt")),
    "lse_written_out_of_bounds": changed("4.6", ("log_sum_exp, mask=rows < query_length)", "log_sum_exp)")),
    "lse_tail_unwritten": changed("4.6", ("mask=rows < query_length)", "mask=rows < query_length // 64 * 64)")),
    "output_written_out_of_bounds": changed(
        "4.6", (", output, mask=inside)", ", output, mask=(columns < head_dim)[None, :])")
    ),
    "tail_rows_read_out_of_bounds": changed(
        "4.6", ("key_offsets, mask=present, other=0.0)", "key_offsets, mask=(columns < head_dim)[None, :], other=0.0)")
    ),
    "value_tail_not_masked": changed(
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


UNUSUAL = {
        "tl.dot in tf32": in_tf32("4.6"),
        "natural base": LSE_NATURAL,
        "each part in natural units": LSE_FROM_SUM,
        "last programs first": changed("4.6", LAST_PROGRAMS_FIRST),
        "a flat grid": changed(
            "4.6",
            ("(triton.cdiv(query_length, 64), heads)", "(triton.cdiv(query_length, 64) * heads,)"),
            ("tl.program_id(1).to(tl.int64)", "(tl.program_id(0) // tl.cdiv(query_length, BLOCK_M)).to(tl.int64)"),
            ("tl.program_id(0) * BLOCK_M", "tl.program_id(0) % tl.cdiv(query_length, BLOCK_M) * BLOCK_M"),
        ),
        "tiles of 32 keys": LSE_KEYS_OF_32,
    }


WRONG |= {
    "lse_stored_in_first_rows": changed(
        "4.6", ("head * query_length + rows, log", "head * query_length + tl.arange(0, BLOCK_M), log")
    ),
    "lse_divided_by_ln_2": changed("4.6", ("* 0.6931471805599453", "/ 0.6931471805599453")),
    # Two in the log-sum-exps, which are a small part of all that is computed.
    "lse_in_base_2__in_one_head": changed(
        "4.6", (" * 0.6931471805599453", ""), ("lse_pointer + head * query_length + rows", "lse_pointer + rows")
    ),
}


WRONG |= {
    "maximum_of_the_first_tile": changed(
        "4.6",
        (
            "tl.maximum(running_max, tl.max(scores, axis=1))",
            "tl.where(first_key == 0, tl.max(scores, axis=1), running_max)",
        ),
    ),
}


WRONG |= of_narrow_numbers("4.6")

WRONG |= {
    "sum_in_float16__of_the_tile": changed(
        "4.6", ("tl.sum(weights, axis=1)", "tl.sum(weights.to(query.dtype), axis=1)")
    ),
}

WRONG |= {
    "natural_exp__in_the_log_sum_exp_too": changed(
        "4.6", ("tl.exp2(", "tl.exp("), (LSE_LINE, "log_sum_exp = running_max + tl.log(total)")
    ),
}
