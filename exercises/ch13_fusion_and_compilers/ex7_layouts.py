"""Exercise 13.7: layouts as shapes and strides: an index's place, one layout after another, and what a thread owns."""

from __future__ import annotations

import math

from course_lib.checker import Case, Exercise, edits, model_of
from course_lib.checker.specification.contract import Contract


def place(layout, index):
    total = 0
    for size, stride in zip(*layout):
        total += index % size * stride
        index = index // size
    return total


def one_after_another(outer, inner):
    return [place(outer, place(inner, index)) for index in range(math.prod(inner[0]))]


def of_a_thread(tile, threads, values, thread):
    first = place(threads, thread)
    return [place(tile, first + place(values, value)) for value in range(math.prod(values[0]))]


def tiles_of(layout, size, step):
    starts = [block + start for block in range(0, math.prod(layout[0]), size * step) for start in range(step)]
    return [[place(layout, start + step * number) for number in range(size)] for start in starts]


def other_way_round(layout):
    return tuple(part[::-1] for part in layout)


ROWS_OF_8 = ((4, 8), (8, 1))  # 4 rows of 8, row after row
COLUMNS_OF_4 = ((4, 8), (1, 4))


def layout_cases(draw):
    odd = ((3, 5, 2), (draw.integer(20, 40), draw.integer(2, 6), draw.integer(70, 99)))
    return [
        Case("one dimension", (((6,), (2,)), 4), "offset"),
        Case("4 rows of 8, row after row: index 6", (ROWS_OF_8, 6), "offset"),
        Case("4 × 8, column after column: index 6", (COLUMNS_OF_4, 6), "offset"),
        Case("three dimensions", (odd, draw.integer(16, 29)), "offset"),
        Case("a stride of 0", (((3, 4), (0, 5)), 7), "offset"),
        Case("every second row of 4 × 8", (ROWS_OF_8, ((2, 8), (2, 4))), "composed"),
        Case("a transpose", (((3, 5), (5, 1)), ((5, 3), (3, 1))), "composed"),
        Case("each of 3, four times: more inner indices than outer", (((3,), (5,)), ((4, 3), (0, 1))), "composed"),
        Case(
            "4 threads that share their values, and values that repeat",
            (ROWS_OF_8, ((4, 16), (8, 0)), ((2, 30), (1, 0)), 9),
            "owned",
        ),
        Case("every third element", (odd, ((10,), (3,))), "composed"),
        Case("2 neighbours for each of 16 threads, columns", (COLUMNS_OF_4, ((16,), (2,)), ((2,), (1,)), 5), "owned"),
        Case("the same of rows", (ROWS_OF_8, ((16,), (2,)), ((2,), (1,)), 5), "owned"),
        Case("8 threads, 4 values 8 apart", (COLUMNS_OF_4, ((8,), (1,)), ((4,), (8,)), 3), "owned"),
        Case("values that run into the next column", (ROWS_OF_8, ((8,), (3,)), ((4,), (1,)), 5), "owned"),
        Case("neighbours: 8 of 32", (COLUMNS_OF_4, 8, 1), "divided"),
        Case("2 of 12, 3 apart", (((12,), (1,)), 2, 3), "divided"),
        Case("rows of 8, in tiles of 2 that are 4 apart", (ROWS_OF_8, 2, 4), "divided"),
        Case("one tile of all", (COLUMNS_OF_4, 32, 1), "divided"),
        Case("tiles of one index", (ROWS_OF_8, 1, draw.choice((1, 8))), "divided"),
        Case("three dimensions, tiles across two", (odd, 3, 5), "divided"),
        Case("2 × 4 threads of 2 × 2 values", (ROWS_OF_8, ((2, 4), (2, 8)), ((2, 2), (1, 4)), 6), "owned"),
    ]


PLACE = (
    *edits("The last dimension was counted fastest. Index 1 is one step along the first dimension.",
        last_first=("zip(*layout)", "reversed(list(zip(*layout)))")),
    *edits("A size was paired with another dimension's stride. The first size belongs to the first stride.",
        paired_backwards=("zip(*layout)", "zip(layout[0], layout[1][::-1])"),
        paired_backwards__sizes=("zip(*layout)", "zip(layout[0][::-1], layout[1])")),
    *edits("Only two dimensions were counted. A layout may have any number of them.",
        two_dimensions_only=("zip(*layout)", "list(zip(*layout))[:2]"),
        two_dimensions_only__the_rest_in_one=("zip(*layout)",
        "zip((layout[0][0], math.prod(layout[0][1:])), layout[1])")),
    *edits("A stride of 0 was taken for 1, or its dimension was skipped. It adds nothing to the offset, and the index "
        "is divided by its size as by any other.",
        stride_of_0=("* stride", "* (stride or 1)"),
        stride_of_0__skipped=("index // size", "(index // size if stride else index)")),
    *edits("Quotient and remainder are exchanged. The coordinate is index % size, and index // size is left for the "
        "others.", divmod_exchanged=("index % size * stride", "index // size * stride", "= index // size",
        "= index % size")),
    *edits("The index was multiplied by a stride as a whole. Take it apart first: index % size along the first "
        "dimension, and index // size is left for the others.",
        not_taken_apart=("index % size * stride", "index * stride"),
        not_taken_apart__first_stride=("index % size * stride", "(index * stride if stride == layout[1][0] else 0)")),
    *edits("The strides were ignored: an index's offset is Σ coordinate · stride.",
        strides_ignored=("index % size * stride", "index % size")),
    *edits("The quotient was taken by the stride. Divide by the size: what is left counts the other dimensions.",
        divided_by_the_stride=("index // size", "index // max(stride, 1)")),
)  # fmt: skip
IN_ORDER = "[place(outer, place(inner, index)) for index in range(math.prod(inner[0]))]"
OF_THREAD = "[place(tile, first + place(values, value)) for value in range(math.prod(values[0]))]"
REPEATED = "Offsets that occur twice were left out. A stride of 0 repeats them, and each index has one in the list."
MODES = "The dimensions of a layout were counted from the last. The first one counts fastest in each of them."


def modes_exchanged(*layouts):
    """Of each of these layouts, and of all."""
    each = {name: (f"place({name}, ", f"place(other_way_round({name}), ") for name in layouts}
    if len(layouts) > 1:
        each["all"] = tuple(piece for pieces in each.values() for piece in pieces)
    return edits(MODES, **{f"modes_exchanged__{name}": pieces for name, pieces in each.items()})


COMPOSED = (
    *edits("The two are exchanged: the inner layout comes first, and its offset is the outer one's index.",
        exchanged=("place(outer, place(inner, index))", "place(inner, place(outer, index))")),
    *edits("The outer layout was left out.",
        outer_left_out=("place(outer, place(inner, index))", "place(inner, index)")),
    *edits("The offsets were added. The inner layout's offset is the outer one's index.",
        added=("place(outer, place(inner, index))", "place(outer, index) + place(inner, index)")),
    *edits("The result has an offset for each index of the inner layout.",
        outer_size=("math.prod(inner[0])", "math.prod(outer[0])")),
    *edits("The result ends with the outer layout's last index. A stride of 0 repeats indices, so the inner layout may "
        "have more of them.",
        cut_to_the_outer=("math.prod(inner[0])", "min(math.prod(inner[0]), math.prod(outer[0]))")),
    *edits("Only the first dimension of the inner layout was gone through. It has as many indices as the product of "
        "all its sizes.", first_dimension_only=("math.prod(inner[0])", "inner[0][0]")),
    *edits("The inner layout's offsets were counted, up to its largest. Go through its indices: as many as the product "
        "of its sizes.", offsets_for_indices=("range(math.prod(inner[0]))",
        "range(place(inner, math.prod(inner[0]) - 1) + 1)")),
    *edits(REPEATED, repeated_left_out=(IN_ORDER, f"list(dict.fromkeys({IN_ORDER}))")),
    *edits("The offsets were sorted. They stand in the order of the inner layout's indices.",
        sorted=(IN_ORDER, f"sorted({IN_ORDER})")),
    *modes_exchanged("outer", "inner"),
)  # fmt: skip
OWNED = (
    *edits("These are places in the tile, not in memory. Ask the tile's layout for the offset of each.",
        tile_left_out=("place(tile, first + place(values, value))", "first + place(values, value)")),
    *edits("Offsets of the thread and of the value were added after the tile's layout. Add the two indices first: the "
        "tile's layout need not be a single stride.",
        added_late=("place(tile, first + place(values, value))",
        "place(tile, first) + place(tile, place(values, value))")),
    *edits("The value's offset was added to an offset in memory. It belongs to the thread's place, an index of the "
        "tile: add the two, and ask the tile's layout for the sum.",
        values_in_memory=("place(tile, first + place(values, value))", "place(tile, first) + place(values, value)")),
    *edits("Threads and values are exchanged.",
        exchanged=("place(threads, thread)", "place(values, thread)", "place(values, value)", "place(threads, value)",
        "math.prod(values[0])", "math.prod(threads[0])")),
    *edits("The thread's own place is missing, so every thread owns the same.",
        thread_missing=("place(threads, thread)", "0")),
    *edits("The thread's number was taken for its place. Ask the layout of the threads.",
        number_for_place=("place(threads, thread)", "thread")),
    *edits("A value's number was taken for its step. Ask the layout of the values.",
        number_for_step=("place(values, value)", "value")),
    *edits("The threads were laid side by side, each with its values. Where a thread begins, the layout of the "
        "threads says.", threads_side_by_side=("place(threads, thread)", "thread * math.prod(values[0])")),
    *edits("The list ends with as many values as the tile has. A stride of 0 repeats places, so a thread may have "
        "more.",
        cut_to_the_tile=("math.prod(values[0])", "min(math.prod(values[0]), math.prod(tile[0]))")),
    *edits("Only the first dimension of the values was gone through. There are as many as the product of all its "
        "sizes.", first_dimension_only=("math.prod(values[0])", "values[0][0]")),
    *edits(REPEATED, repeated_left_out=(OF_THREAD, f"list(dict.fromkeys({OF_THREAD}))")),
    *modes_exchanged("tile", "threads", "values"),
)  # fmt: skip
STARTS = "[block + start for block in range(0, math.prod(layout[0]), size * step) for start in range(step)]"
TILES = "[[place(layout, start + step * number) for number in range(size)] for start in starts]"
DIVIDED = (
    *edits("These are indices of the layout, not offsets. Ask the layout where each of them lies.",
        layout_left_out=("place(layout, start + step * number)", "start + step * number")),
    *edits("The step was added to offsets. It is between indices: ask the layout where start + step · number lies.",
        step_between_offsets=("place(layout, start + step * number)", "place(layout, start) + step * number")),
    *edits("A tile's indices lie as far apart as there are tiles. They are `step` apart.",
        spread_over_all=(STARTS, "range(math.prod(layout[0]) // size)",
        "start + step * number", "start + math.prod(layout[0]) // size * number")),
    *edits("The layout's memory was divided, up to its largest offset. Divide its indices: there are as many as the "
        "product of its sizes.",
        memory_divided=("math.prod(layout[0])", "place(layout, math.prod(layout[0]) - 1) + 1")),
    *edits("Only the indices of the first dimension were divided. There are as many as the product of all sizes.",
        first_dimension_only=("math.prod(layout[0])", "layout[0][0]")),
    *edits("A tile took neighbours. Its indices are `step` apart.",
        step_ignored=("start + step * number", "start + number", "size * step", "size", "range(step)", "range(1)")),
    *edits("Each tile begins where the last one ended. Where the step is above 1, the indices between those of a tile "
        "are not taken yet: the next tile begins there.",
        gaps_left=("block + start for", "block + size * start for"), gaps_left__blocks_alone=("range(step)",
        "range(1)")),
    *edits("Only the first `step` tiles are there. After size · step indices the same begins again.",
        first_tiles_only=("range(0, math.prod(layout[0]), size * step)", "range(0, 1)")),
    *edits("The tiles stand in another order: first all that begin a group of size · step indices. The smallest index "
        "that is left comes first.",
        order_of_blocks=("for block in range(0, math.prod(layout[0]), size * step) for start in range(step)",
        "for start in range(step) for block in range(0, math.prod(layout[0]), size * step)")),
    *edits("Size and step are exchanged.", size_and_step_exchanged=("step * number", "size * number", "range(size)",
        "range(step)", "range(step)", "range(size)")),
    *edits("The lists hold one element of each tile. A list for each tile is asked for.",
        across_the_tiles=(TILES,
        "[[place(layout, start + step * number) for start in starts] for number in range(size)]")),
    *edits("The list holds offsets, all in a row. A list for each tile is asked for.",
        one_list=(TILES, f"sum({TILES}, [])")),
    *edits("Only the first tile is there. There are as many as it takes for every index.",
        one_tile_only=(STARTS, "[0]")),
    *edits("The tiles, or the offsets in them, were sorted by offset. Both stand in the order of the layout's indices.",
        sorted=(TILES, f"sorted({TILES})"), sorted__each=(TILES, f"[sorted(tile) for tile in {TILES}]")),
    *edits("`size` was taken for the number of tiles. It is how many indices a tile has.",
        size_for_number=(STARTS, "range(size)", "range(size)]", "range(math.prod(layout[0]) // size)]")),
    *modes_exchanged("layout"),
)  # fmt: skip

EXERCISE = Exercise(
    id="13.7",
    title="A layout by hand",
    entries=("offset", "composed", "owned", "divided"),
    cases=layout_cases,
    oracle={"offset": place, "composed": one_after_another, "owned": of_a_thread, "divided": tiles_of},
    contracts=(
        Contract(
            lambda draw, *, first, second, third: (
                ((first, second, third), tuple(draw.integer(0, 50) for _ in range(3))),
                draw.integer(0, first * second * third),
            ),
            choices={"first": (1, 4, 7), "second": (1, 3), "third": (1, 5)},
            says={"first": "each size at least 1"},
            entry="offset",
            most=8,
        ),
    ),
    models=(
        model_of(place, PLACE, entry="offset"),
        model_of(one_after_another, COMPOSED, uses=(place, other_way_round), entry="composed"),
        model_of(of_a_thread, OWNED, uses=(place, other_way_round), entry="owned"),
        model_of(tiles_of, DIVIDED, uses=(place, other_way_round), entry="divided"),
    ),
    hints=(
        "For sizes (4, 8) the indices 0, 1, 2, 3 run along the first dimension, and 4 is the second column's first. So "
        "the coordinates are index % 4 and index // 4.",
        "With more dimensions: coordinate = index % size, index = index // size, from the first dimension on. Add "
        "coordinate * stride.",
        "composed: offset(outer, offset(inner, index)) for every index of the inner layout.",
        "owned: the place in the tile is offset(threads, thread) + offset(values, value). The tile's layout turns that "
        "into an offset in memory.",
        "divided: tiles begin at 0, 1, ..., step - 1, then size * step later again. Two loops give all beginnings in "
        "order, and a tile is offset(layout, beginning + step * number) for its size numbers.",
    ),
)
