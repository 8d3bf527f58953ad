"""Wrong answers to exercise 16.5, and unusual right ones."""

from tests.submissions.edits import changed

ENDS, PAIRS = "ends = length - QUERIES + 1 + number", "number, member = rows // GROUP, rows % GROUP"
IS_ROW, GRID = "is_row = rows < QUERIES * GROUP", "verify_kernel[(batch, key_heads)]"
PAGE, INSIDE = "tl.load(table_pointer + sequence * table_stride + block)", "inside = (positions < length)[:, None]"
SCORED = "tl.where(positions[None, :] < ends[:, None], scores, "
OFFSETS = "((page * key_heads + key_head) * PAGE_SIZE + slots)"
LOOP = "range(0, tl.cdiv(length, PAGE_SIZE))"
PLACES = "((sequence * QUERIES + number) * key_heads + key_head) * GROUP + member"
QUERY = "query = tl.load(query_pointer + places, mask=is_row[:, None], other=0.0)"
ROWS = "max(16, triton.next_power_of_2(queries * group))"
STORED = "output_pointer + places, output.to(output_pointer.dtype.element_ty), mask=is_row[:, None]"


def seeing(ends):
    return changed("16.5", (ENDS, f"ends = {ends}"))


def apart(pairs, is_row, third):
    """A program for each query, each head, or each of both."""
    return changed("16.5", (PAIRS, f"number, member = {pairs}"), (IS_ROW, f"is_row = {is_row}"),
                   (GRID, f"verify_kernel[(batch, key_heads, {third})]"))  # fmt: skip


WRONG = {
    # The triangle.
    "guesses_see_later_ones": seeing("length + 0 * number"),
    "guesses_see_later_ones__no_mask_but_the_length": changed(
        "16.5", (SCORED, "tl.where(positions[None, :] < length, scores, ")
    ),
    "guesses_unseen": seeing("length - QUERIES + 1 + 0 * number"),
    "triangle_shifted": seeing("length - QUERIES + number"),
    "triangle_shifted__first_sees_one": seeing("tl.maximum(length - QUERIES + number, 1)"),
    "triangle_shifted__if_there_are_guesses": seeing("length - QUERIES + 1 + number - (QUERIES > 1)"),
    "last_misses_itself": seeing("tl.minimum(length - QUERIES + 1 + number, length - (QUERIES > 1))"),
    "last_misses_itself__of_8": seeing("length - QUERIES + 1 + number - (number == 7)"),
    "loop_ends_early": changed("16.5", (LOOP, "range(0, tl.cdiv(length - QUERIES, PAGE_SIZE))")),
    "loop_ends_early__one_later": changed("16.5", (LOOP, "range(0, tl.cdiv(length - QUERIES + 1, PAGE_SIZE))")),
    "triangle_too_wide": seeing("length - QUERIES + 2 + number"),
    "triangle_too_wide__compared": changed("16.5", (SCORED, SCORED.replace("<", "<="))),
    "triangle_too_wide__not_the_last": seeing("tl.minimum(length - QUERIES + 2 + number, length)"),
    "one_page_masked": changed("16.5", (SCORED, "tl.where((positions[None, :] < ends[:, None]) | "
        "(block < tl.cdiv(length, PAGE_SIZE) - 1), scores, ")),
    "mask_from_the_start": seeing("1 + number"),
    "triangle_turned_round": seeing("length - number"),
    "guesses_counted_twice": seeing("length + 1 + number"),
    "guesses_counted_twice__not_read": seeing("length + number"),
    "guesses_left_out": changed("16.5", ("length = tl.load(lengths_pointer + sequence)",
        "length = tl.load(lengths_pointer + sequence) - QUERIES + 1"),
        (ENDS, "ends = tl.maximum(length - QUERIES + 1 + number, 1)")),
    "row_taken_for_query": seeing("length - QUERIES + 1 + rows"),
    "row_taken_for_query__its_head": seeing("length - QUERIES + 1 + member"),
    # Rows of the tile.
    "first_query_for_all": changed("16.5", (QUERY, QUERY.replace("places", "places - number[:, None] * key_heads * "
        "GROUP * HEAD_DIM"))),
    "tile_too_short": changed("16.5", (ROWS, "16")),
    "tile_too_short__of_32": changed("16.5", (ROWS, f"min(32, {ROWS})")),
    "by_modulo": changed("16.5", (PLACES, "((sequence * QUERIES + number) * GROUP + member) * key_heads + key_head")),
    "first_head_for_all": changed("16.5", (OFFSETS, "(page * key_heads * PAGE_SIZE + slots)")),
    "group_offset_missing": changed("16.5", (PLACES, "(sequence * QUERIES + number) * key_heads * GROUP + member")),
    # Pages.
    "strides_ignored__table": changed("16.5", ("block_table.stride(0),", "block_table.shape[1],")),
    "first_table_for_all": changed("16.5", (PAGE, PAGE.replace("sequence * table_stride + ", ""))),
    "page_0_left_out": changed("16.5", (SCORED, "tl.where(positions[None, :] < tl.where(page > 0, ends, 0)[:, None], "
        "scores, ")),
    "page_0_left_out__as_zeros": changed("16.5", (INSIDE, INSIDE.replace("length", "tl.where(page > 0, length, 0)"))),
    "table_ignored": changed("16.5", (f"page = {PAGE}.to(tl.int64)", "page = block")),
    "next_page_of_the_pool": changed("16.5", (PAGE, f"({PAGE} + 1)")),
    "last_page_left_out": changed("16.5", (LOOP, "range(0, length // PAGE_SIZE)")),
    "unused_slots_count": changed("16.5", (INSIDE, "inside = (positions >= 0)[:, None]")),
    "unused_slots_count__value": changed(
        "16.5", ("value_pointer + offsets, mask=inside, other=0.0", "value_pointer + offsets")
    ),
    "read_outside": changed(
        "16.5", (LOOP, "range(0, length // PAGE_SIZE + 1)"), (INSIDE, "inside = (positions >= 0)[:, None]")
    ),
    "heads_of_a_page_forgotten": changed("16.5", (OFFSETS, "((page + key_head) * PAGE_SIZE + slots)")),
    "first_length_for_all": changed("16.5", ("tl.load(lengths_pointer + sequence)", "tl.load(lengths_pointer)")),
    # Softmax.
    "scale_missing": changed("16.5", ("math.log2(math.e) / math.sqrt(head_dim)", "math.log2(math.e)")),
    "log2e_missing": changed("16.5", ("math.log2(math.e) / math.sqrt(head_dim)", "1 / math.sqrt(head_dim)")),
    "scale_of_one_size": changed("16.5", ("math.sqrt(head_dim)", "8"), ("rescale = tl.exp2(", "rescale = tl.exp(")),
    "accumulator_not_rescaled": changed("16.5", ("accumulator * rescale[:, None]", "accumulator")),
    "not_divided": changed("16.5", ("accumulator / running_sum[:, None]", "accumulator")),
    "keys_used_as_values": changed("16.5", ("tl.load(value_pointer", "tl.load(key_pointer")),
    "nan_from_the_start": changed("16.5", ("tl.exp2(running_max - new_max)", "tl.exp2(new_max - running_max)")),
    # Bytes.
    "pages_read_for_every_query": apart("rows * 0 + tl.program_id(2), rows", "rows < GROUP", "queries"),
    "pages_read_for_every_head": apart("rows, rows * 0 + tl.program_id(2)", "rows < QUERIES", "group"),
    "pages_read_for_every_row": apart(
        "rows * 0 + tl.program_id(2) // GROUP, rows * 0 + tl.program_id(2) % GROUP", "rows < 1", "queries * group"
    ),
    "too_many_bytes": changed("16.5", (INSIDE, f"{INSIDE}\n        tl.load(key_pointer + offsets, mask=inside)")),
}

UNUSUAL = {
    "rows in the order of heads": changed("16.5", (PAIRS, "member, number = rows // QUERIES, rows % QUERIES")),
    "groups padded to 8": changed("16.5", (PAIRS, "number, member = rows // 8, rows % 8"),
        (IS_ROW, "is_row = (number < QUERIES) & (member < GROUP)"),
        (ROWS, "8 * triton.next_power_of_2(max(2, queries))")),
    "a grid of one dimension": changed("16.5", (GRID, "verify_kernel[(batch * key_heads,)]"),
        ("tl.program_id(0), tl.program_id(1)", "tl.program_id(0) // key_heads, tl.program_id(0) % key_heads")),
    "natural exponentials": changed("16.5", ("math.log2(math.e) / math.sqrt(head_dim)", "head_dim**-0.5"),
        ("tl.exp2", "tl.exp")),
    "a page number for each key": changed("16.5",
        (f"page = {PAGE}.to(tl.int64)\n        positions = block * PAGE_SIZE + slots  # [PAGE_SIZE]",
         "positions = block * 64 + tl.arange(0, 64)\n        page = tl.load(table_pointer + sequence * table_stride + "
         "positions // PAGE_SIZE, mask=positions < length, other=0).to(tl.int64)\n        "
         "slots = positions % PAGE_SIZE"), (LOOP, "range(0, tl.cdiv(length, 64))"),
        ("columns, slots = tl.arange(0, HEAD_DIM), tl.arange(0, PAGE_SIZE)", "columns = tl.arange(0, HEAD_DIM)")),
    "the pages from the last to the first": changed("16.5", (f"for block in {LOOP}:",
        f"for step in {LOOP}:\n        block = tl.cdiv(length, PAGE_SIZE) - 1 - step"),
        ("weights = tl.exp2(scores - new_max[:, None])", "shift = tl.where(new_max == float('-inf'), 0.0, new_max)\n"
         "        weights = tl.exp2(scores - shift[:, None])"),
        ("tl.exp2(running_max - new_max)", "tl.exp2(running_max - shift)")),
    "a transposed tile of keys": changed("16.5",
        ("keys = tl.load(key_pointer + offsets, mask=inside, other=0.0)", "keys = tl.load(key_pointer + "
         "tl.trans(offsets), mask=(positions < length)[None, :], other=0.0)"), ("tl.trans(keys)", "keys")),
}
