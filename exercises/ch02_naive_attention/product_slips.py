"""The slips of exercises 2.4 and 2.6 in words, the most basic first: of two in an answer, the earlier is told first."""

from __future__ import annotations

from course_lib.checker.specification.model import Slip

HEADS_MISSING = (
    "Only the first head was written. The grid needs a dimension for the heads, and the result's pointer its offset."
)
_ONE_TILE = (
    "Only the first tile of each matrix was written. Either the grid has too few programs, or every program works "
    "on tile 0 because `tl.program_id` times the block is missing from the positions."
)
_TILE_UNWRITTEN = (
    "The last, partly filled tiles were never written: the number of tiles was rounded down. Use `triton.cdiv` for the "
    "rows and for the columns."
)
_NOT_MASKED = (
    "Keys past key_length were loaded and counted. They belong to the next row or head in memory. Mask P in "
    "both directions and V along the keys, with `other=0.0`."
)
_SKIPPED = (
    "The last, partly filled tile of keys is missing: the loop ends too early. Let it run to key_length and mask."
)


def _of_strides(one: str, other: str, result: str) -> tuple[Slip, ...]:
    """A kernel's two operands read, or its result stored, by strides that are not their own."""
    names, called = (one, other), {one: other, other: one}
    return (
        Slip(
            "strides_ignored",
            f"Both `{one}` and `{other}` are read as if they were contiguous. Rows lie `stride(1)` elements apart and "
            "heads `stride(0)`; neither follows from the shape.",
        ),
        Slip(
            "strides_ignored__rows",
            f"The rows of `{one}` and of `{other}` are read as if there were no gap between them. They lie "
            f"`stride(1)` elements apart.",
        ),
        *(
            Slip(
                f"strides_ignored__{name}",
                f"`{name}` is read as if it were contiguous. Its rows lie {name}_row_stride elements apart and its "
                f"heads {name}_head_stride.",
            )
            for name in names
        ),
        *(
            Slip(
                f"strides_ignored__{name}_rows",
                f"The rows of `{name}` are read as if there were no gap between them. They lie {name}_row_stride "
                f"elements apart.",
            )
            for name in names
        ),
        *(
            Slip(
                f"strides_ignored__{name}{which}_by_{called[name]}",
                f"`{name}` is read with {said} of `{called[name]}`. Use its own {own}.",
                alone=which == "",
            )
            for name in names
            for which, said, own in (
                ("", "the strides", "strides"),
                ("_rows", "the row stride", "row stride"),
                ("_heads", "the head stride", "head stride"),
            )
        ),
        *(
            Slip(
                f"result_strides__{which}{name}",
                f"The result is stored with {said} of `{name}`. Use its own strides: {result}_head_stride and "
                f"{result}_row_stride.",
                alone=which == "",
            )
            for which, said in (("", "the strides"), ("heads_of_", "the head stride"), ("rows_of_", "the row stride"))
            for name in names
        ),
    )


FIRST_ROWS = (
    "Every tile of rows is stored in the first one's place, where the last one stays: the rows of the store lack "
    "`tl.program_id(0) * BLOCK_M`."
)

SCORES = (
    Slip("only_first_head", HEADS_MISSING),
    Slip("only_first_tile", _ONE_TILE),
    Slip(
        "only_first_tile__rows",
        "Only the first tile of queries was written. Does the grid count tiles of queries, and is "
        "`tl.program_id(0) * BLOCK_M` in their positions?",
    ),
    Slip(
        "only_first_tile__columns",
        "Only the first tile of keys was written. Does the grid count tiles of keys, and is "
        "`tl.program_id(1) * BLOCK_N` in their positions?",
    ),
    Slip("last_tile_unwritten", _TILE_UNWRITTEN),
    Slip("last_tile_unwritten__rows", _TILE_UNWRITTEN),
    Slip("last_tile_unwritten__columns", _TILE_UNWRITTEN),
    Slip(
        "grid_axes_exchanged",
        "The grid's first two axes are exchanged: it counts tiles of keys where the kernel takes tiles of queries. "
        "Unless the two agree, tiles are missing.",
    ),
    Slip(
        "stored_in_one_head",
        "Every head's scores were stored in head 0's place, where the last ones stay. Add `head * scores_head_stride` "
        "to the result's pointer.",
    ),
    Slip(
        "queries_used_as_keys",
        "The queries were multiplied with themselves. The second operand comes from `key_pointer`.",
    ),
    Slip(
        "keys_used_as_queries",
        "The keys were multiplied with themselves. The first operand comes from `query_pointer`.",
    ),
    Slip("stored_in_first_rows", FIRST_ROWS),
    Slip("scale_missing", "The scores are not scaled. Multiply the product by `scale`."),
    Slip(
        "key_not_transposed",
        "Q was multiplied with K as it was loaded, [BLOCK_N, HEAD_DIM]. That only works where HEAD_DIM happens to be "
        "BLOCK_N, and it gives wrong scores there too. Load K as [HEAD_DIM, BLOCK_N], or turn the tile over with "
        "`tl.trans`.",
    ),
    Slip("scale_added", "The scale was added to the product. It is a factor: 1/√head_dim, as a rule."),
    *(
        Slip(name, "The scale was applied twice: once to Q or K and once to the product, say. Apply it once.")
        for name in ("scale_twice", "scale_twice__in_float16_first")
    ),
    Slip(
        "scale_ignored",
        "The argument `scale` is ignored: the product is multiplied by 1/√head_dim. Multiply it by `scale`, whatever "
        "that is.",
    ),
    Slip(
        "divided_by_root_as_well",
        "The scores are multiplied by `scale` and divided by the root of head_dim as well. The scale is an argument "
        "here, and it is all that is asked for.",
    ),
    Slip("divided_by_scale", "The product was divided by `scale`. It is a factor: 1/√head_dim, as a rule."),
    Slip(
        "head_ignored_in_query",
        "Every head was computed from the Q of head 0. Add `head * query_head_stride` to its pointer.",
    ),
    Slip(
        "head_ignored_in_key",
        "Every head was computed from the K of head 0. Add `head * key_head_stride` to its pointer.",
    ),
    Slip(
        "head_ignored",
        "Every head was computed from the Q and K of head 0. Move both pointers to the program's head.",
    ),
    Slip(
        "transposed_key",
        "K was read with its dimensions exchanged: `keys` was multiplied by 1 and `dims` by the row stride. To "
        "transpose, exchange the directions in which the two indices run. Each keeps its own stride.",
    ),
    *_of_strides("query", "key", "scores"),
    *(
        Slip(
            f"scaled_in_float16{way}",
            f"{letter} is multiplied by the scale and rounded to float16 before the product. float16 ends at 65,504, "
            "and a scaled operand may pass that where the score does not. Scale what tl.dot gives, in float32.",
        )
        for way, letter in (("", "Q"), ("__key", "K"))
    ),
    Slip(
        "product_in_float16",
        "The product was rounded to float16 before it was scaled. float16 ends at 65,504, and the product of large "
        "numbers may pass that where the score does not. Scale what tl.dot gives, in float32.",
    ),
)

OUTPUT = (
    Slip("only_first_head", HEADS_MISSING),
    Slip(
        "only_first_rows",
        "Only the first tile of rows was written. Either the grid has one program for each head, or `tl.program_id` "
        "times the block is missing from the rows.",
    ),
    Slip(
        "query_tail_unwritten",
        "The last, partly filled tile of rows was never written: the grid was rounded down. Use "
        "`triton.cdiv(query_length, BLOCK_M)`.",
    ),
    Slip("stored_in_first_rows", FIRST_ROWS),
    Slip(
        "rows_counted_by_keys",
        "The grid counts tiles of keys where it should count tiles of queries. With more queries than keys the last "
        "rows are never written: `triton.cdiv(query_length, BLOCK_M)`.",
    ),
    Slip(
        "stored_in_one_head",
        "Every head's output was stored in head 0's place, where the last one stays. Add `head * output_head_stride` "
        "to the output's pointer.",
    ),
    Slip(
        "only_first_tile",
        "Only the first tile of keys counts. The sum over keys needs a loop, in steps of BLOCK_N up to key_length.",
    ),
    Slip(
        "every_second_tile",
        "Every second tile of keys is left out: the loop's step is twice as long as the tile that it loads.",
    ),
    *(
        Slip(
            f"mask_by_the_block__{name}",
            f"The mask of {letter} compares the keys with BLOCK_N. Only the first tile passes that, even what lies "
            "past its end. Compare with key_length.",
            alone=True,
        )
        for name, letter in (("probabilities", "P"), ("value", "V"))
    ),
    Slip(
        "start_forgotten",
        "The first tile of keys was added once for every step of the loop: `start` is missing from the positions, "
        "`keys = start + tl.arange(0, BLOCK_N)`.",
    ),
    *(
        Slip(
            f"start_forgotten__{name}",
            f"Every step of the loop loads the first tile of {letter}: `start` is missing from its addresses.",
        )
        for name, letter in (("probabilities", "P"), ("value", "V"))
    ),
    Slip("last_tile_skipped", _SKIPPED),
    Slip(
        "last_tile_skipped__always",
        "The last tile of keys is never looked at. `range(0, key_length, BLOCK_N)` covers them all; a loop that ends "
        "at key_length - BLOCK_N does not.",
    ),
    Slip("first_tile_skipped", "The first tile of keys is never looked at. The loop begins at key 0."),
    Slip(
        "keys_counted_by_queries",
        "The loop over keys ends at query_length. There are as many terms as keys: let it run to key_length, which is "
        "`value.shape[1]`.",
    ),
    Slip(
        "accumulator_overwritten",
        "The result is that of the last tile of keys alone: the accumulator is overwritten in each step. Add to it "
        "(`+=`).",
    ),
    Slip(
        "mean_over_keys",
        "The result was divided by the number of keys. The probabilities are weights that add up to 1 already.",
    ),
    Slip(
        "head_ignored_in_value",
        "Every head was given the V of head 0. Add `head * value_head_stride` to its pointer.",
    ),
    Slip(
        "head_ignored_in_probabilities",
        "Every head was given the P of head 0. Add `head * probabilities_head_stride` to its pointer.",
    ),
    Slip("head_ignored", "Every head was given the P and V of head 0. Move both pointers to the program's head."),
    Slip(
        "transposed_probabilities",
        "P was read with its dimensions exchanged. Rows (queries) lie `stride(1)` apart and the keys of a row lie "
        "side by side.",
    ),
    *_of_strides("probabilities", "value", "output"),
    Slip("keys_not_masked", _NOT_MASKED),
    Slip(
        "keys_not_masked__probabilities",
        "P is loaded past key_length, where the next row or other memory lies. Times V's zeros that is NaN if the "
        "memory holds NaN or infinity. Mask P along the keys too.",
    ),
    Slip(
        "keys_not_masked__value",
        "V is loaded past key_length, where the next head or other memory lies. Times P's zeros that is NaN if the "
        "memory holds NaN or infinity. Mask V along the keys too.",
    ),
    Slip(
        "accumulator_in_float16",
        "The accumulator has the operands' dtype, so that in float16 each of many tiles rounds the sum again. "
        "Accumulate in float32 and cast once, in the store.",
    ),
)
