"""The slips of exercises 2.4 and 2.6, the most basic first: of two in an answer, the earlier is told first."""

from __future__ import annotations

from collections.abc import Iterator

from course_lib.checker.specification.edits import Edit, edits

RESULT_STRIDES = ("* result_head_stride", "* result_row_stride")
TILES = (16, 32, 128, 256)  # rows or columns that a tile may have, beside 64
HEADS_MISSING = (
    "Only the first head was written. The grid needs a dimension for the heads, and the result's pointer its offset."
)
FIRST_ROWS = (
    "Every tile of rows is stored in the first one's place, where the last one stays: the rows of the store lack "
    "`tl.program_id(0) * BLOCK_M`."
)
ONLY_FIRST_HEAD = edits(HEADS_MISSING, only_first_head=("torch.where(written", "torch.where(written & (head == 0)"))
STORED_IN_FIRST_ROWS = edits(
    FIRST_ROWS, stored_in_first_rows=("queries * result_row_stride", "queries % rows * result_row_stride")
)
IN_ONE_HEAD = ("* result_head_stride", "* 0")


def of_any_tile(*sides: str) -> tuple[Edit, ...]:
    """Styles: a tile may have any of the usual lengths along each side."""
    return edits("", **{f"{side}_{count}": (f"{side} = 64", f"{side} = {count}") for side in sides for count in TILES})


def of_strides(one: str, other: str, result: str) -> Iterator[Edit]:
    """A kernel's two operands read, or its result stored, by strides that are not their own."""
    names = (one, other)
    heads = {name: (f"{name}.stride(0)", f"{name}.shape[1] * {name}.shape[2]") for name in names}  # without gaps
    rows = {name: (f"{name}.stride(1)", f"{name}.shape[2]") for name in names}
    yield from edits(
        f"Both `{one}` and `{other}` are read as if they were contiguous. Rows lie `stride(1)` elements apart and "
        "heads `stride(0)`; neither follows from the shape.",
        strides_ignored=(*heads[one], *rows[one], *heads[other], *rows[other]),
    )
    yield from edits(
        f"The rows of `{one}` and of `{other}` are read as if there were no gap between them. They lie `stride(1)` "
        "elements apart.",
        strides_ignored__rows=(*rows[one], *rows[other]),
    )
    for name in names:
        yield from edits(
            f"`{name}` is read as if it were contiguous. Its rows lie {name}_row_stride elements apart and its heads "
            f"{name}_head_stride.",
            **{f"strides_ignored__{name}": (*heads[name], *rows[name])},
        )
    for name in names:
        yield from edits(
            f"The rows of `{name}` are read as if there were no gap between them. They lie {name}_row_stride elements "
            "apart.",
            **{f"strides_ignored__{name}_rows": rows[name]},
        )
    for name, its in (names, names[::-1]):
        of_heads, of_rows = ((f"{name}.stride({axis})", f"{its}.stride({axis})") for axis in (0, 1))
        for which, said, pieces in (
            ("", "strides", of_heads + of_rows),
            ("_rows", "row stride", of_rows),
            ("_heads", "head stride", of_heads),
        ):
            yield from edits(
                f"`{name}` is read with the {said} of `{its}`. Use its own {said}.",
                alone=said == "strides",
                **{f"strides_ignored__{name}{which}_by_{its}": pieces},
            )
    for which, said, axes in (
        ("", "strides", (0, 1)),
        ("heads_of_", "head stride", (0,)),
        ("rows_of_", "row stride", (1,)),
    ):
        for name in names:
            stored = [(RESULT_STRIDES[axis], f"* {name}.stride({axis})") for axis in axes]
            yield from edits(
                f"The result is stored with the {said} of `{name}`. Use its own strides: {result}_head_stride and "
                f"{result}_row_stride.",
                alone=said == "strides",
                **{f"result_strides__{which}{name}": sum(stored, ())},
            )


DOT, SCALED = "left @ right.mT", "left @ right.mT * scale"
ROW_TILES, COLUMN_TILES = "-(-query_length // rows)", "-(-key_length // columns)"
SCALED_QUERY = "(left * scale).to(query.dtype).float() @ right.mT"
SCORES = (
    *ONLY_FIRST_HEAD,
    *edits(
        "Only the first tile of each matrix was written. Either the grid has too few programs, or every program works "
        "on tile 0 because `tl.program_id` times the block is missing from the positions.",
        only_first_tile=(ROW_TILES, "1", COLUMN_TILES, "1"),
    ),
    *edits(
        "Only the first tile of queries was written. Does the grid count tiles of queries, and is `tl.program_id(0) * "
        "BLOCK_M` in their positions?",
        only_first_tile__rows=(ROW_TILES, "1"),
    ),
    *edits(
        "Only the first tile of keys was written. Does the grid count tiles of keys, and is `tl.program_id(1) * "
        "BLOCK_N` in their positions?",
        only_first_tile__columns=(COLUMN_TILES, "1"),
    ),
    *edits(
        "The last, partly filled tiles were never written: the number of tiles was rounded down. Use `triton.cdiv` for "
        "the rows and for the columns.",
        last_tile_unwritten=(ROW_TILES, "query_length // rows", COLUMN_TILES, "key_length // columns"),
        last_tile_unwritten__rows=(ROW_TILES, "query_length // rows"),
        last_tile_unwritten__columns=(COLUMN_TILES, "key_length // columns"),
    ),
    *edits(
        "The grid's first two axes are exchanged: it counts tiles of keys where the kernel takes tiles of queries. "
        "Unless the two agree, tiles are missing.",
        grid_axes_exchanged=(ROW_TILES, COLUMN_TILES, COLUMN_TILES, ROW_TILES),
    ),
    *edits(
        "Every head's scores were stored in head 0's place, where the last ones stay. Add `head * scores_head_stride` "
        "to the result's pointer.",
        stored_in_one_head=IN_ONE_HEAD,
    ),
    *edits(
        "The queries were multiplied with themselves. The second operand comes from `key_pointer`.",
        queries_used_as_keys=("load(key,", "load(query,"),
    ),
    *edits(
        "The keys were multiplied with themselves. The first operand comes from `query_pointer`.",
        keys_used_as_queries=("load(query,", "load(key,"),
    ),
    *STORED_IN_FIRST_ROWS,
    *edits("The scores are not scaled. Multiply the product by `scale`.", scale_missing=(SCALED, DOT)),
    *edits(
        "Q was multiplied with K as it was loaded, [BLOCK_N, HEAD_DIM]. That only works where HEAD_DIM happens to be "
        "BLOCK_N, and it gives wrong scores there too. Load K as [HEAD_DIM, BLOCK_N], or turn the tile over with "
        "`tl.trans`.",
        key_not_transposed=(DOT, "not_transposed(left, right)"),
    ),
    *edits(
        "The scale was added to the product. It is a factor: 1/√head_dim, as a rule.",
        scale_added=(SCALED, f"{DOT} + scale"),
    ),
    *edits(
        "The scale was applied twice: once to Q or K and once to the product, say. Apply it once.",
        scale_twice=(SCALED, f"{DOT} * (scale * scale)"),
        scale_twice__in_float16_first=(DOT, SCALED_QUERY),
    ),
    *edits(
        "The argument `scale` is ignored: the product is multiplied by 1/√head_dim. Multiply it by `scale`, whatever "
        "that is.",
        scale_ignored=(SCALED, f"{DOT} * head_dim**-0.5"),
    ),
    *edits(
        "The scores are multiplied by `scale` and divided by the root of head_dim as well. The scale is an argument "
        "here, and it is all that is asked for.",
        divided_by_root_as_well=(SCALED, f"{SCALED} * head_dim**-0.5"),
    ),
    *edits(
        "The product was divided by `scale`. It is a factor: 1/√head_dim, as a rule.",
        divided_by_scale=(SCALED, f"{DOT} / scale"),
    ),
    *edits(
        "Every head was computed from the Q of head 0. Add `head * query_head_stride` to its pointer.",
        head_ignored_in_query=("query.stride(0)", "0"),
    ),
    *edits(
        "Every head was computed from the K of head 0. Add `head * key_head_stride` to its pointer.",
        head_ignored_in_key=("key.stride(0)", "0"),
    ),
    *edits(
        "Every head was computed from the Q and K of head 0. Move both pointers to the program's head.",
        head_ignored=("query.stride(0)", "0", "key.stride(0)", "0"),
    ),
    *edits(
        "K was read with its dimensions exchanged: `keys` was multiplied by 1 and `dims` by the row stride. To "
        "transpose, exchange the directions in which the two indices run. Each keeps its own stride.",
        transposed_key=("keys[:, None] * key.stride(1) + dims", "keys[:, None] + dims * key.stride(1)"),
    ),
    *of_strides("query", "key", "scores"),
    *edits(
        "Q is multiplied by the scale and rounded to float16 before the product. float16 ends at 65,504, and a scaled "
        "operand may pass that where the score does not. Scale what tl.dot gives, in float32.",
        scaled_in_float16=(SCALED, SCALED_QUERY),
    ),
    *edits(
        "K is multiplied by the scale and rounded to float16 before the product. float16 ends at 65,504, and a scaled "
        "operand may pass that where the score does not. Scale what tl.dot gives, in float32.",
        scaled_in_float16__key=(SCALED, "left @ (right * scale).to(query.dtype).float().mT"),
    ),
    *edits(
        "The product was rounded to float16 before it was scaled. float16 ends at 65,504, and the product of large "
        "numbers may pass that where the score does not. Scale what tl.dot gives, in float32.",
        product_in_float16=(DOT, f"({DOT}).to(query.dtype).float()"),
    ),
    *of_any_tile("rows", "columns"),
)

PRODUCT, STARTS = "left @ right", "torch.arange(0, key_length, tile)"
MASK_OF_P, MASK_OF_V = "keys < key_length", "keys[:, None] < key_length"
OUTPUT = (
    *ONLY_FIRST_HEAD,
    *edits(
        "Only the first tile of rows was written. Either the grid has one program for each head, or `tl.program_id` "
        "times the block is missing from the rows.",
        only_first_rows=(ROW_TILES, "1"),
    ),
    *edits(
        "The last, partly filled tile of rows was never written: the grid was rounded down. Use "
        "`triton.cdiv(query_length, BLOCK_M)`.",
        query_tail_unwritten=(ROW_TILES, "query_length // rows"),
    ),
    *STORED_IN_FIRST_ROWS,
    *edits(
        "The grid counts tiles of keys where it should count tiles of queries. With more queries than keys the last "
        "rows are never written: `triton.cdiv(query_length, BLOCK_M)`.",
        rows_counted_by_keys=(ROW_TILES, "-(-key_length // rows)"),
    ),
    *edits(
        "Every head's output was stored in head 0's place, where the last one stays. Add `head * output_head_stride` "
        "to the output's pointer.",
        stored_in_one_head=IN_ONE_HEAD,
    ),
    *edits(
        "Only the first tile of keys counts. The sum over keys needs a loop, in steps of BLOCK_N up to key_length.",
        only_first_tile=(STARTS, "torch.arange(0, tile, tile)"),
    ),
    *edits(
        "Every second tile of keys is left out: the loop's step is twice as long as the tile that it loads.",
        every_second_tile=(STARTS, f"{STARTS}[::2]"),
    ),
    *edits(
        "The mask of P compares the keys with BLOCK_N. Only the first tile passes that, even what lies past its end. "
        "Compare with key_length.",
        alone=True,
        mask_by_the_block__probabilities=(MASK_OF_P, "keys < tile"),
    ),
    *edits(
        "The mask of V compares the keys with BLOCK_N. Only the first tile passes that, even what lies past its end. "
        "Compare with key_length.",
        alone=True,
        mask_by_the_block__value=(MASK_OF_V, "keys[:, None] < tile"),
    ),
    *edits(
        "The first tile of keys was added once for every step of the loop: `start` is missing from the positions, "
        "`keys = start + tl.arange(0, BLOCK_N)`.",
        start_forgotten=("starts[:, None] +", "starts[:, None] * 0 +"),
    ),
    *edits(
        "Every step of the loop loads the first tile of P: `start` is missing from its addresses.",
        start_forgotten__probabilities=("probabilities.stride(1) + keys", "probabilities.stride(1) + keys % tile"),
    ),
    *edits(
        "Every step of the loop loads the first tile of V: `start` is missing from its addresses.",
        start_forgotten__value=("keys[:, None] * value", "keys[:, None] % tile * value"),
    ),
    *edits(
        "The last, partly filled tile of keys is missing: the loop ends too early. Let it run to key_length and mask.",
        last_tile_skipped=(STARTS, "torch.arange(0, key_length // tile * tile, tile)"),
    ),
    *edits(
        "The last tile of keys is never looked at. `range(0, key_length, BLOCK_N)` covers them all; a loop that ends "
        "at key_length - BLOCK_N does not.",
        last_tile_skipped__always=(STARTS, f"{STARTS}[:-1]"),
    ),
    *edits(
        "The first tile of keys is never looked at. The loop begins at key 0.",
        first_tile_skipped=(STARTS, f"{STARTS}[1:]"),
    ),
    *edits(
        "The loop over keys ends at query_length. There are as many terms as keys: let it run to key_length, which is "
        "`value.shape[1]`.",
        keys_counted_by_queries=(STARTS, "torch.arange(0, query_length, tile)"),
    ),
    *edits(
        "The result is that of the last tile of keys alone: the accumulator is overwritten in each step. Add to it "
        "(`+=`).",
        accumulator_overwritten=(STARTS, f"{STARTS}[-1:]"),
    ),
    *edits(
        "The result was divided by the number of keys. The probabilities are weights that add up to 1 already.",
        mean_over_keys=(PRODUCT, f"{PRODUCT} / key_length"),
    ),
    *edits(
        "Every head was given the V of head 0. Add `head * value_head_stride` to its pointer.",
        head_ignored_in_value=("value.stride(0)", "0"),
    ),
    *edits(
        "Every head was given the P of head 0. Add `head * probabilities_head_stride` to its pointer.",
        head_ignored_in_probabilities=("probabilities.stride(0)", "0"),
    ),
    *edits(
        "Every head was given the P and V of head 0. Move both pointers to the program's head.",
        head_ignored=("probabilities.stride(0)", "0", "value.stride(0)", "0"),
    ),
    *edits(
        "P was read with its dimensions exchanged. Rows (queries) lie `stride(1)` apart and the keys of a row lie side "
        "by side.",
        transposed_probabilities=(
            "queries * probabilities.stride(1) + keys",
            "queries + keys * probabilities.stride(1)",
        ),
    ),
    *of_strides("probabilities", "value", "output"),
    *edits(
        "Keys past key_length were loaded and counted. They belong to the next row or head in memory. Mask P in both "
        "directions and V along the keys, with `other=0.0`.",
        keys_not_masked=(MASK_OF_P, "None", MASK_OF_V, "None"),
    ),
    *edits(
        "P is loaded past key_length, where the next row or other memory lies. Times V's zeros that is NaN if the "
        "memory holds NaN or infinity. Mask P along the keys too.",
        keys_not_masked__probabilities=(MASK_OF_P, "None"),
    ),
    *edits(
        "V is loaded past key_length, where the next head or other memory lies. Times P's zeros that is NaN if the "
        "memory holds NaN or infinity. Mask V along the keys too.",
        keys_not_masked__value=(MASK_OF_V, "None"),
    ),
    *edits(
        "The accumulator has the operands' dtype, so that in float16 each of many tiles rounds the sum again. "
        "Accumulate in float32 and cast once, in the store.",
        accumulator_in_float16=(PRODUCT, "summed_in(value.dtype, left, right, tile)"),
    ),
    *of_any_tile("rows", "tile"),
)
