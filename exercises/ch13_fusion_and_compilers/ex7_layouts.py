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
        Case("a row of 3, four times: more inner indices than outer", (((3,), (5,)), ((3, 4), (1, 0))), "composed"),
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
    *edits("The index was multiplied by a stride as a whole. Take it apart first: index % size along the first "
        "dimension, and index // size is left for the others.",
        not_taken_apart=("index % size * stride", "index * stride"),
        not_taken_apart__first_stride=("index % size * stride", "(index * stride if stride == layout[1][0] else 0)")),
    *edits("The strides were ignored: an index's offset is Σ coordinate · stride.",
        strides_ignored=("index % size * stride", "index % size")),
    *edits("The quotient was taken by the stride. Divide by the size: what is left counts the other dimensions.",
        divided_by_the_stride=("index // size", "index // max(stride, 1)")),
)  # fmt: skip
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
)  # fmt: skip
STARTS = "[block + start for block in range(0, math.prod(layout[0]), size * step) for start in range(step)]"
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
        across_the_tiles=("[[place(layout, start + step * number) for number in range(size)] for start in starts]",
        "[[place(layout, start + step * number) for start in starts] for number in range(size)]")),
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
        model_of(one_after_another, COMPOSED, uses=(place,), entry="composed"),
        model_of(of_a_thread, OWNED, uses=(place,), entry="owned"),
        model_of(tiles_of, DIVIDED, uses=(place,), entry="divided"),
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
