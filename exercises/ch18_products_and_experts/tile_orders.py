"""What exercise 18.1 asks for: the tile of a program and the tiles that programs load together, with the slips."""

from __future__ import annotations

from course_lib.checker.specification.edits import edits, without


def tile_of(number, row_tiles, column_tiles, strip):
    of_a_strip = strip * column_tiles
    which = number // of_a_strip
    place = number % of_a_strip
    first = which * strip
    height = min(strip, row_tiles - first)
    row, column = first + place % height, place // height
    return row, column


def loaded_by(programs, row_tiles, column_tiles, strip):
    numbers = range(min(programs, row_tiles * column_tiles))
    tiles = [tile_of(number, row_tiles, column_tiles, strip) for number in numbers]
    of_x, of_weight = len({row for row, column in tiles}), len({column for row, column in tiles})
    return of_x, of_weight


OF_A_STRIP, WHICH, PLACE = "strip * column_tiles", "number // of_a_strip", "number % of_a_strip"
FIRST, HEIGHT = "which * strip", "min(strip, row_tiles - first)"
TILE, RESULT = "first + place % height, place // height", "return row, column"
COUNT, LOADED = "range(min(programs, row_tiles * column_tiles))", "return of_x, of_weight"
DISTINCT_ROWS, DISTINCT_COLUMNS = "len({row for row, column in tiles})", "len({column for row, column in tiles})"
ORDER = (
    *edits("The last strip was taken to be as high as the others, so row tiles come out that do not exist. Its height "
        "is the smaller one of strip and the row tiles that are left.",
        last_strip_too_high=(HEIGHT, "strip")),
    *edits("A strip higher than the result is cut to row_tiles, but the last of several strips is not. Its height is "
        "the smaller one of strip and the row tiles that are left, row_tiles - first.",
        only_one_strip_cut=(HEIGHT, "min(strip, row_tiles)")),
    *edits("The thinner strip's height is used for the row tile or for the column tile alone. Both need it.",
        height_on_one_side=("place % height", "place % strip"),
        height_on_one_side__column=("place // height", "place // strip")),
    *edits("Rows and columns are exchanged: the result is (column tile, row tile). Return the row tile first.",
        exchanged=(RESULT, "return column, row")),
    *edits("The strips were laid along the columns: each is some column tiles wide. They have `strip` row tiles and "
        "all columns.",
        strips_of_columns=(OF_A_STRIP, "strip * row_tiles",
        HEIGHT, "min(strip, column_tiles - first)", TILE, "place // height, first + place % height")),
    *edits("The strip is ignored: the tiles are taken row by row or column by column. Inside a strip the programs go "
        "down: the row tile is place % height, and the column tile is place // height.",
        strip_ignored=(TILE, "number // column_tiles, number % column_tiles"),
        strip_ignored__columns=(TILE, "number % row_tiles, number // row_tiles")),
    *edits("The number is taken modulo one side and divided by the other, so some tiles come twice and others never. "
        "Divide by one number, and take the remainder by the same one.",
        divisor_and_remainder_differ=(TILE, "number % column_tiles, number // row_tiles"),
        divisor_and_remainder_differ__strip=(PLACE, "number % (strip * row_tiles)")),
    *edits("A strip has strip · column_tiles tiles, but another number was used.",
        wrong_tiles_of_a_strip=(OF_A_STRIP, "strip * row_tiles"),
        wrong_tiles_of_a_strip__which=(WHICH, "number // (strip * row_tiles)", HEIGHT,
        "min(strip, max(1, row_tiles - first))")),
    *edits("A strip begins at the wrong row tile. Strip n begins at row tile n · strip.",
        strip_number_as_row=(FIRST, "which"), all_strips_at_row_0=("first + place % height", "place % height")),
    *edits("The place was not counted from the strip's beginning. The strips before it have first · column_tiles "
        "tiles: take the number modulo strip · column_tiles first.",
        place_not_reduced=(PLACE, "number"), place_not_reduced__row=("place % height", "number % height"),
        wrong_place=(PLACE, "number - which * strip")),
    *edits("Where the strip does not divide row_tiles, some tiles are computed twice: the last strip was moved up, or "
        "its row tiles were forced into the result. It should be thinner.",
        last_strip_moved_up=(HEIGHT, "min(strip, row_tiles)",
        TILE, "min(first, row_tiles - height) + place % height, place // height"),
        rows_clamped=(HEIGHT, "strip", "first + place % height", "min(first + place % height, row_tiles - 1)"),
        rows_wrapped=(HEIGHT, "strip", "first + place % height", "(first + place % height) % row_tiles")),
    *edits("The height of the last strip is the remainder row_tiles % strip even where that is 0, or in all strips. "
        "Take the smaller one of strip and the row tiles that are left.",
        remainder_as_height__or_strip=(HEIGHT, "(row_tiles % strip or strip)"),
        remainder_as_height__of_the_last=(HEIGHT, "(strip if first + strip < row_tiles else row_tiles % strip)")),
    *edits("Every second strip, or every second column, is walked backwards. All of them go down, and to the right.",
        there_and_back=("place // height", "abs(place // height - which % 2 * (column_tiles - 1))"),
        there_and_back__columns=("first + place % height",
        "first + abs(place % height - place // height % 2 * (height - 1))")),
    *edits("The row tiles were cut into other strips: all about equal, the rest added to the last, or put first. Each "
        "strip has `strip` row tiles, and what is left is a strip of its own, the last one.",
        strips_made_equal=("of_a_strip = ", "strip = -(-row_tiles // -(-row_tiles // strip))\nof_a_strip = "),
        strips_rounded_down=(WHICH, f"min({WHICH}, max(1, row_tiles // strip) - 1)",
        FIRST, f"{FIRST}\nplace = number - which * of_a_strip",
        HEIGHT, "strip if which < row_tiles // strip - 1 else row_tiles - first"),
        thin_strip_first=("of_a_strip = ", "number = row_tiles * column_tiles - 1 - number\nof_a_strip = ",
        RESULT, "return row_tiles - 1 - row, column_tiles - 1 - column")),
    *edits("The programs were counted from 1. The first program has number 0.",
        counted_from_1=("of_a_strip = ", "number = max(0, number - 1)\nof_a_strip = "),
        counted_from_1__forward=("of_a_strip = ", "number = number + 1\nof_a_strip = ")),
    *edits("A quotient was rounded up or to the nearest number. Whole columns and strips that lie before a tile are "
        "counted by //.", rounded_up=("place // height", "-(-place // height)"),
        rounded_up__nearest=("place // height", "round(place / height)")),
    *edits("The height of a strip was computed from the wrong numbers, by max in the place of min, or off by one. It "
        "is the smaller one of strip and the row tiles that are left, row_tiles - first.",
        wrong_height=(HEIGHT, "max(strip, row_tiles - first)"),
        height_off_by_one=(HEIGHT, "min(strip, row_tiles - first + 1)")),
)  # fmt: skip
FORMULA = "-(-len(tiles) // min(strip, row_tiles))"
STARTED = "-(-len(tiles) // (strip * column_tiles)) * strip"
TOGETHER = (
    *edits("The two numbers are exchanged. Tiles of x come first: one for each row of tiles that is at work.",
        exchanged__numbers=(LOADED, "return of_weight, of_x")),
    *edits("Each program's tiles were counted, also those that another program loads too. Count each tile once.",
        counted_twice=(DISTINCT_ROWS, "len(tiles)", DISTINCT_COLUMNS, "len(tiles)"),
        counted_twice__x=(DISTINCT_ROWS, "len(tiles)")),
    *edits("All programs were counted, although there are fewer tiles. There are row_tiles · column_tiles tiles, and "
        "further programs have nothing to do.",
        more_programs_than_tiles=(COUNT, "range(programs)"),
        more_programs_than_tiles__cut=(COUNT, "range(programs)", "min(strip, row_tiles - first)",
        "min(strip, max(1, row_tiles - first))")),
    *edits("One program too many or too few was counted. They are the programs 0 … programs - 1.",
        one_program_off__more=(COUNT, "range(min(programs + 1, row_tiles * column_tiles))"),
        one_program_off__first=(COUNT, "range(1, min(programs, row_tiles * column_tiles))")),
    *edits("The largest number was taken, or the last program's. Tiles are counted from 0, so there is one more; and "
        "where the programs have come to a new column or strip, the last one does not have the largest numbers.",
        last_program_alone=(LOADED, "return tiles[-1][0] + 1, tiles[-1][1] + 1"),
        largest_number=(DISTINCT_ROWS, "max(row for row, column in tiles)",
        DISTINCT_COLUMNS, "max(column for row, column in tiles)")),
    *edits("The formula does not hold everywhere. It must count fewer where the programs do not fill a column, a strip "
        "or the result, and more where they go on to the next strip. Collect the tiles of tile_at instead.",
        first_strip_alone=(LOADED, f"return min(strip, row_tiles, len(tiles)), min(column_tiles, {FORMULA})"),
        first_strip_alone__uncut=(LOADED, f"return min(strip, row_tiles, len(tiles)), {FORMULA}"),
        first_strip_alone__simple=(LOADED, "return strip, -(-programs // strip)"),
        first_strip_alone__by_columns=(LOADED, f"columns = min(column_tiles, {FORMULA})\n"
        "return min(row_tiles, -(-len(tiles) // columns)), columns"),
        whole_strips=(LOADED, f"return min(row_tiles, {STARTED}), of_weight"),
        whole_strips__formula=(LOADED, f"return min(row_tiles, len(tiles), {STARTED}), min(column_tiles, {FORMULA})")),
    *edits("All row tiles or all column tiles were counted. Only those of programs that run together are loaded.",
        all_tiles=(LOADED, "return row_tiles, column_tiles")),
    *without(ORDER, "exchanged", "all_strips_at_row_0"),
)  # fmt: skip
