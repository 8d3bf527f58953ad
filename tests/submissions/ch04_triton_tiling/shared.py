"""What wrong answers to several exercises of chapter 04 are made of."""

from tests.submissions.edits import changed

UPDATE_RESCALE = {"4.3": "tl.exp(running_max - new_max)", "4.4": "tl.exp2(running_max - new_max)"}


RAGGED_RESCALE = "tl.exp2(running_max - reference_max)"


SUM = "running_sum = running_sum * rescale + tl.sum(weights, axis=1)"


ACCUMULATOR = "accumulator = accumulator * rescale[:, None] + product"


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


def of_narrow_numbers(identity):
    """What float16 does not hold, in the course's answer to 4.3, 4.4, 4.5 or 4.6."""
    threshold = 12 if identity == "4.3" else 17  # e^12 and 2^17 are more than 65,504
    return {
        # A threshold of 12, as faster kernels have it, passed: no score lay between 11 and 12 above those before it.
        "rescale_postponed": changed(
            identity,
            (
                "new_max = tl.maximum(running_max, tl.max(scores, axis=1))",
                "tile_max = tl.max(scores, axis=1)\n"
                f"        new_max = tl.where(tile_max > running_max + {threshold}, tile_max, running_max)",
            ),
        ),
        "sum_in_float16": changed(identity, (SUM, f"running_sum = ({SUM[14:]}).to(query.dtype).to(tl.float32)")),
        "sum_in_float16__as_it_is_kept": changed(
            identity,
            ("running_sum = tl.zeros([BLOCK_M], tl.float32)", "running_sum = tl.zeros([BLOCK_M], query.dtype)"),
            (SUM, f"running_sum = ({SUM[14:]}).to(query.dtype)"),
            *((("tl.log2(total)", "tl.log2(total.to(tl.float32))"),) if identity == "4.6" else ()),  # takes no float16
        ),
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


POSITIONS = "positions = rows + key_length - query_length"


END = "end = tl.minimum(key_length, first_query + BLOCK_M + key_length - query_length)"


LAST_PROGRAMS_FIRST = ("tl.program_id(0) * BLOCK_M", "(tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M")


NATURAL_BASE = (("tl.exp2(", "tl.exp("), ("math.log2(math.e) / math.sqrt", "1 / math.sqrt"))
