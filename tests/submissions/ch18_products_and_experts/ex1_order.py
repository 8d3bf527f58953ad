"""Wrong answers to exercise 18.1, and unusual right ones."""

from tests.submissions.edits import changed

FIRST, HEIGHT = "number // (strip * column_tiles) * strip", "min(strip, row_tiles - first_row)"
PLACE, RESULT = "number % (strip * column_tiles)", "return first_row + place % height, place // height"
PROGRAMS = "programs = min(programs, row_tiles * column_tiles)"
LOADED = "return len({row for row, _ in tiles}), len({column for _, column in tiles})"
HEAD = """# Exercise 18.1 · The order of tiles
"""
COUNTING = """

def tiles_loaded(programs, row_tiles, column_tiles, strip):
    rows, columns = set(), set()
    for n in range(min(programs, row_tiles * column_tiles)):
        row, column = tile_at(n, row_tiles, column_tiles, strip)
        rows.add(row)
        columns.add(column)
    return len(rows), len(columns)
"""


def wrong(*replacements):
    return changed("18.1", *replacements)


def of_tiles(body):
    """An answer with another tile_at."""
    lines = "\n    ".join(body)
    return f"{HEAD}def tile_at(number, row_tiles, column_tiles, strip):\n    {lines}\n{COUNTING}"


WRONG = {
    # ROCm/FlyDSL#979: the last strip as high as the others.
    "last_strip_too_high": wrong((HEIGHT, "strip")),
    "only_one_strip_cut": wrong((HEIGHT, "min(strip, row_tiles)")),
    "only_one_strip_cut__before": wrong((FIRST, f"0\n    strip = min(strip, row_tiles)\n    first_row = {FIRST}"),
                                              (HEIGHT, "strip")),
    "height_on_one_side": wrong(("place % height", "place % strip")),
    "height_on_one_side__column": wrong(("place // height", "place // strip")),
    "exchanged": wrong((RESULT, "return place // height, first_row + place % height")),
    "strip_ignored__in_a_strip": wrong((RESULT, "return first_row + place // column_tiles, place % column_tiles")),
    "strips_of_columns": of_tiles(("first = number // (strip * row_tiles) * strip",
        "width = min(strip, column_tiles - first)", "place = number % (strip * row_tiles)",
        "return place // width, first + place % width")),
    "strip_ignored__down_all_columns": of_tiles(("first = number // (strip * row_tiles) * strip",
        "place = number % (strip * row_tiles)", "return place % row_tiles, first + place // row_tiles")),
    "strip_ignored": of_tiles(("return number // column_tiles, number % column_tiles",)),
    "strip_ignored__columns": of_tiles(("return number % row_tiles, number // row_tiles",)),
    # meta-pytorch/applied-ai#25
    "divisor_and_remainder_differ": of_tiles(("return number % column_tiles, number // row_tiles",)),
    "divisor_and_remainder_differ__strip": wrong((PLACE, "number % (strip * row_tiles)")),
    "wrong_tiles_of_a_strip": wrong(("strip * column_tiles", "strip * row_tiles")),
    "strip_number_as_row": wrong((FIRST, "number // (strip * column_tiles)")),
    "all_strips_at_row_0": wrong(("first_row + place % height", "place % height")),
    "place_not_reduced": wrong((PLACE, "number")),
    "place_not_reduced__row": wrong(("place % height", "number % height")),
    "last_strip_moved_up": of_tiles(("strip = min(strip, row_tiles)",
        "first = min(number // (strip * column_tiles) * strip, row_tiles - strip)",
        "place = number % (strip * column_tiles)", "return first + place % strip, place // strip")),
    "rows_clamped": wrong((HEIGHT, "strip"), ("first_row + place % height", "min(first_row + place % height, "
                          "row_tiles - 1)")),
    "remainder_as_height__of_the_last": wrong((
        HEIGHT, "strip if first_row + strip < row_tiles else row_tiles % strip")),
    "remainder_as_height__or_strip": wrong((HEIGHT, "row_tiles % strip or strip")),
    "height_0": wrong((HEIGHT, "row_tiles % min(strip, row_tiles)")),
    "there_and_back": wrong((RESULT, "column = place // height\n    if first_row // strip % 2:\n        column = "
                             "column_tiles - 1 - column\n    return first_row + place % height, column")),
    "there_and_back__columns": wrong((RESULT, "row, column = place % height, place // height\n    if column % 2:\n"
                             "        row = height - 1 - row\n    return first_row + row, column")),
    "strips_made_equal": wrong((
        FIRST, f"0\n    strip = -(-row_tiles // -(-row_tiles // strip))\n    first_row = {FIRST}")),
    "strips_rounded_down": of_tiles(("strips = max(1, row_tiles // strip)",
        "which = min(number // (strip * column_tiles), strips - 1)",
        "height = strip if which < strips - 1 else row_tiles - which * strip",
        "place = number - which * strip * column_tiles",
        "return which * strip + place % height, place // height")),
    "not_whole_numbers": wrong(("place // height", "place / height")),
    "wrong_height": wrong((HEIGHT, "max(strip, row_tiles - first_row)")),
    "rows_wrapped": wrong(
        (HEIGHT, "strip"), ("first_row + place % height", "(first_row + place % height) % row_tiles")),
    "wrong_place": wrong((PLACE, "number - first_row")),
    "whole_strips": wrong((LOADED, "of_x, of_weight = (len(set(numbers)) for numbers in zip(*tiles))\n    return "
                           "min(row_tiles, -(-programs // (strip * column_tiles)) * strip), of_weight")),
    "counted_from_1": wrong((FIRST, f"0\n    number = max(0, number - 1)\n    first_row = {FIRST}")),
    "rounded_up": wrong(("place // height", "-(-place // height)")),
    "rounded_up__nearest": wrong(("place // height", "round(place / height)")),
    "height_off_by_one": wrong((HEIGHT, "min(strip, row_tiles - first_row + 1)")),
    "thin_strip_first": of_tiles(("number = row_tiles * column_tiles - 1 - number",
        "first = number // (strip * column_tiles) * strip", "height = min(strip, row_tiles - first)",
        "place = number % (strip * column_tiles)",
        "return row_tiles - 1 - first - place % height, column_tiles - 1 - place // height")),
    "exchanged__numbers": wrong((
        LOADED, "return len({column for _, column in tiles}), len({row for row, _ in tiles})")),
    "counted_twice": wrong((LOADED, "return len(tiles), len(tiles)")),
    "more_programs_than_tiles": wrong((PROGRAMS, "programs = programs")),
    "one_program_off": wrong((PROGRAMS, f"{PROGRAMS} - 1")),
    "counted_from_1__in_the_loop": wrong(("in range(programs)", "in range(1, programs + 1)")),
    "last_program_alone": wrong((LOADED, "return tiles[-1][0] + 1, tiles[-1][1] + 1")),
    "largest_number": wrong((LOADED, "return max(row for row, _ in tiles), max(column for _, column in tiles)")),
    "large_numbers": wrong((FIRST, "int(torch.tensor(float(number)) / (strip * column_tiles)) * strip"),
                           (PLACE, "number - first_row * column_tiles")),
    "first_strip_alone__by_columns": wrong((LOADED, "columns = min(column_tiles, -(-programs // min(strip, row_tiles)))"
                                            "\n    return min(row_tiles, -(-programs // columns)), columns")),
    "first_strip_alone": wrong((LOADED, "height = min(strip, row_tiles, programs)\n    return height, "
                                        "min(column_tiles, -(-programs // min(strip, row_tiles)))")),
    "all_tiles": wrong((LOADED, "return row_tiles, column_tiles")),
    "one_by_one": of_tiles(("n = 0", "for first in range(0, row_tiles, strip):",
        "    for column in range(column_tiles):", "        for row in range(first, min(first + strip, row_tiles)):",
        "            if n == number:", "                return row, column", "            n += 1")),
    "one_by_one__all_tiles": wrong((PROGRAMS, ""), ("in range(programs)]", "in range(row_tiles * column_tiles)]"
                                    "[:programs]")),
    "one_by_one__strips": of_tiles(("first = 0", "while number >= strip * column_tiles:",
        "    number -= strip * column_tiles", "    first += strip", "height = min(strip, row_tiles - first)",
        "return first + number % height, number // height")),
    "last_strip_too_high__and_exchanged": wrong((HEIGHT, "strip"),
        (RESULT, "return place // height, first_row + place % height")),
}  # fmt: skip

UNUSUAL = {
    "the strip and the column by halving": of_tiles(("low, high = 0, -(-row_tiles // strip)",
        "while high - low > 1:", "    middle = (low + high) // 2",
        "    low, high = (middle, high) if middle * strip * column_tiles <= number else (low, middle)",
        "first = low * strip", "height, place = min(strip, row_tiles - first), number - first * column_tiles",
        "low, high = 0, column_tiles", "while high - low > 1:", "    middle = (low + high) // 2",
        "    low, high = (middle, high) if middle * height <= place else (low, middle)",
        "return first + place - low * height, low")),
    "divmod twice, as lists": of_tiles(("which, place = divmod(number, strip * column_tiles)",
        "height = min(strip, row_tiles - which * strip)", "column, row = divmod(place, height)",
        "return [which * strip + row, column]")),
    "whole strips and the rest apart": of_tiles(("whole = row_tiles // strip * strip * column_tiles",
        "if number < whole:", "    inside = number % (strip * column_tiles)",
        "    return number // (strip * column_tiles) * strip + inside % strip, inside // strip",
        "left = row_tiles % strip", "number -= whole",
        "return row_tiles - left + number % left, number // left")),
    "by closed formulas": HEAD + '''def tile_at(number, row_tiles, column_tiles, strip):
    strip = min(strip, row_tiles)
    per = strip * column_tiles
    start = (number // per) * strip
    height = strip if start + strip <= row_tiles else row_tiles - start
    return (start + (number - start * column_tiles) % height, (number - start * column_tiles) // height)


def tiles_loaded(programs, row_tiles, column_tiles, strip):
    last = min(programs, row_tiles * column_tiles) - 1
    per = min(strip, row_tiles) * column_tiles
    if last >= per:
        started = last // per * min(strip, row_tiles)
        height = min(strip, row_tiles - started)
        return started + min(height, last % per + 1), column_tiles
    return min(strip, row_tiles, last + 1), last // min(strip, row_tiles) + 1
''',
    "a list indexed by a range": of_tiles(("of_a_strip = column_tiles * strip",
        "rows = range(row_tiles)[number // of_a_strip * strip:][:strip]",
        "place = number % of_a_strip", "return rows[place % len(rows)], place // len(rows)")),
}  # fmt: skip
