"""Exercise 18.1: the order in which programs take the tiles of a product, and what they load together."""

from course_lib.checker import Case, Exercise, Mistake, edits, model_of
from course_lib.checker.specification.contract import Contract
from course_lib.checker.specification.edits import without
from exercises.ch18_products_and_experts.product_steps import told, ways


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


def answered(functions, asked, row_tiles, column_tiles, strip):
    """The tiles of a list's programs, or what as many programs as a number says load. Its source alone is sent."""
    import inspect
    import sys

    name, most = ("tiles_loaded", 400_000) if isinstance(asked, int) else ("tile_at", 400)
    lines, cell = 0, inspect.unwrap(functions[name]).__code__.co_filename

    def count(frame, event, argument):
        nonlocal lines
        if frame.f_code.co_filename != cell:
            return None
        lines += event == "line"
        if lines > most:
            raise TimeoutError(f"after {most:,} lines: it goes through tiles, rows, columns or strips one by one")
        return count

    traced, tiles = sys.gettrace(), {}
    for number in [asked] if isinstance(asked, int) else asked:
        lines = 0
        sys.settrace(count)
        try:
            pair = functions[name](number, row_tiles, column_tiles, strip)
        except ZeroDivisionError:
            tiles[f"program {number}"] = "a division by 0"
            continue
        finally:
            sys.settrace(traced)
        if not isinstance(pair, (tuple, list)) or len(pair) != 2 or any(type(n) is not int for n in pair):
            raise TypeError(f"{name} returned {pair!r}; it must return two whole numbers")
        if isinstance(asked, int):
            return {"of x": pair[0], "of weight": pair[1]}
        tiles[f"program {number}"] = f"row tile {pair[0]}, column tile {pair[1]}"
    return tiles


def right(*arguments):
    return answered({"tile_at": tile_of, "tiles_loaded": loaded_by}, *arguments)


def asked_of(draw, *, row_tiles, column_tiles, strip):
    """All numbers; if they are too many, those where something begins or ends."""
    tiles, of_a_strip = row_tiles * column_tiles, min(strip, row_tiles) * column_tiles
    last = (row_tiles - 1) // strip * strip * column_tiles  # where the last strip begins
    begins = (0, strip, of_a_strip, last, last + tiles % strip, tiles)
    some = {begin + more for begin in begins for more in (-2, -1, 0, 1)}
    some |= {tiles // 3, tiles // 2, last + (tiles - last) // 2}
    numbers = range(tiles) if tiles <= 100 else sorted(number for number in some if 0 <= number < tiles)
    return list(numbers), row_tiles, column_tiles, strip


def order_cases(draw):
    large, odd, tall = 2**20, 2**20 - draw.choice((1, 3, 5)), draw.integer(3, 2000)
    tiles = {
        "3 × 4 tiles in strips of 1: row by row": (3, 4, 1), "4 × 3 tiles in strips of 2": (4, 3, 2),
        "5 × 3 tiles in strips of 2: the last strip is thinner": (5, 3, 2), "3 × 2 tiles, a strip of 8": (3, 2, 8),
        "7 × 4 tiles in strips of 3": (7, 4, 3), "1 × 6 tiles in strips of 4": (1, 6, 4),
        "6 × 1 tiles in strips of 4": (6, 1, 4), "2²⁰ × 2²⁰ tiles in strips of 8": (large, large, 8),
        f"2²⁰ × {odd:,} tiles in strips of 1": (large, odd, 1), f"{odd:,} × 2²⁰ tiles in strips of 8": (odd, large, 8),
        f"{odd:,} × 2²⁰ tiles in strips of {tall:,}": (odd, large, tall), "2⁴⁰ × 1 tiles in strips of 7": (2**40, 1, 7),
        "1 × 2⁴⁰ tiles in strips of 2": (1, 2**40, 2), f"{odd:,} × 2²⁰ tiles, a strip of 2⁴⁴": (odd, large, 2**44),
    }  # fmt: skip
    programs = {
        "9 programs, 9 × 9 tiles in strips of 3": (9, 9, 9, 3), "9 programs, 9 × 9 tiles row by row": (9, 9, 9, 1),
        "132 programs, 64 × 32 tiles in strips of 8": (132, 64, 32, 8),
        "14 programs, 5 × 3 tiles in strips of 2: into the thinner strip": (14, 5, 3, 2),
        "20 programs, 3 × 4 tiles: fewer tiles than programs": (20, 3, 4, 2), "1 program": (1, 5, 7, 2),
        "1,000 programs, 2²⁰ × 2²⁰ tiles in strips of 30": (1000, large, large, 30),
        f"1,000 programs, {odd:,} × 2 tiles in strips of 7": (1000, odd, 2, 7),
        "1,000 programs, 2²⁰ × 5 tiles, a strip of 2⁴⁰": (1000, large, 5, 2**40),
    }  # fmt: skip
    return [
        *(Case(name, asked_of(draw, row_tiles=rows, column_tiles=columns, strip=strip), "tile_at", answered)
          for name, (rows, columns, strip) in tiles.items()),
        *(Case(name, sizes, "tiles_loaded", answered) for name, sizes in programs.items()),
    ]  # fmt: skip


SIZES = {"row_tiles": (1, 2, 5, 6, 9, 11), "column_tiles": (1, 2, 3, 7), "strip": (1, 2, 3, 4, 8, 100)}
PROMISED = {"row_tiles": "at least 1", "column_tiles": "at least 1", "strip": "The strip may be larger than row_tiles"}
CONTRACTS = (
    Contract(asked_of, SIZES, PROMISED, entry="tile_at", driver=answered, most=24),
    Contract(lambda draw, **numbers: tuple(numbers.values()), {"programs": (1, 2, 3, 7, 16, 30, 132, 1000), **SIZES},
             {"programs": "1 … 1,000", **PROMISED}, entry="tiles_loaded", driver=answered, most=36),
)  # fmt: skip

BEGIN, OF_A_STRIP, WHICH = "of_a_strip = ", "strip * column_tiles", "number // of_a_strip"
PLACE, FIRST, HEIGHT = "number % of_a_strip", "which * strip", "min(strip, row_tiles - first)"
ROW, COLUMN, RESULT = "first + place % height", "place // height", "return row, column"
TILE = f"{ROW}, {COLUMN}"
COUNT, LOADED = "range(min(programs, row_tiles * column_tiles))", "return of_x, of_weight"
DISTINCT_ROWS, DISTINCT_COLUMNS = "len({row for row, column in tiles})", "len({column for row, column in tiles})"
ORDER = (
    *edits("The last strip was taken to be as high as the others. Its height is the smaller one of strip and the row "
        "tiles left.", last_strip_too_high=(HEIGHT, "strip")),
    *edits("A strip higher than the result is cut to row_tiles, but the last of several strips is not. Its height is "
        "the smaller one of strip and row_tiles - first.", only_one_strip_cut=(HEIGHT, "min(strip, row_tiles)")),
    *edits("The thinner strip's height is used for the row tile or for the column tile alone. Both need it.",
        height_on_one_side=("place % height", "place % strip"), height_on_one_side__column=(COLUMN, "place // strip")),
    *edits("The result is (column tile, row tile). Return rows first.", exchanged=(RESULT, "return column, row")),
    *edits("Strips consist of columns. They should have `strip` row tiles.", strips_of_columns=(OF_A_STRIP,
        "strip * row_tiles", HEIGHT, "min(strip, column_tiles - first)", TILE,
        "place // height, first + place % height")),
    *edits("The strip is ignored: the tiles are taken row by row or column by column. Inside a strip the programs go "
        "down.", **ways("strip_ignored", TILE, "number // column_tiles, number % column_tiles",
        "number % row_tiles, number // row_tiles")),
    *edits("The quotient is by one number and the remainder by another, so some tiles come twice and others never.",
        divisor_and_remainder_differ=(TILE, "number % column_tiles, number // row_tiles"),
        divisor_and_remainder_differ__strip=(PLACE, "number % (strip * row_tiles)")),
    *edits("A strip has strip · column_tiles tiles.", wrong_tiles_of_a_strip=(OF_A_STRIP, "strip * row_tiles")),
    *edits("A strip begins at the wrong row tile. Strip n begins at row tile n · strip.",
        strip_number_as_row=(FIRST, "which"), all_strips_at_row_0=(ROW, "place % height")),
    *edits("The place was not counted from the strip's beginning: take the number modulo strip · column_tiles.",
        wrong_place=(PLACE, "number - which * strip"), place_not_reduced=(PLACE, "number"),
        place_not_reduced__row=("place % height", "number % height")),
    *edits("Where the strip does not divide row_tiles, some tiles come twice: the last strip was moved up, or its row "
        "tiles forced into the result. It should be thinner.",
        last_strip_moved_up=(HEIGHT, "min(strip, row_tiles)", ROW, "min(first, row_tiles - height) + place % height"),
        rows_clamped=(HEIGHT, "strip", ROW, "min(first + place % height, row_tiles - 1)"),
        rows_wrapped=(HEIGHT, "strip", ROW, "(first + place % height) % row_tiles")),
    *edits("The last strip's height is row_tiles % strip even where that is 0, or in all strips. Take the smaller one "
        "of strip and the row tiles that are left.", **ways("remainder_as_height", HEIGHT,
        "(row_tiles % strip or strip)", "(strip if first + strip < row_tiles else row_tiles % strip)")),
    *edits("Every second strip, or every second column, is walked backwards. All go down, and to the right.",
        there_and_back=(COLUMN, "abs(place // height - which % 2 * (column_tiles - 1))"),
        there_and_back__columns=(ROW, "first + abs(place % height - place // height % 2 * (height - 1))")),
    *edits("The row tiles were cut into other strips: about equal ones, or the rest is first or in another strip. The "
        "rest is a strip of its own, the last one.",
        strips_made_equal=(BEGIN, f"strip = -(-row_tiles // -(-row_tiles // strip))\n{BEGIN}"),
        strips_rounded_down=(WHICH, f"min({WHICH}, max(1, row_tiles // strip) - 1)", FIRST,
        f"{FIRST}\nplace = number - which * of_a_strip", HEIGHT,
        "strip if which < row_tiles // strip - 1 else row_tiles - first"), thin_strip_first=(BEGIN,
        f"number = row_tiles * column_tiles - 1 - number\n{BEGIN}", RESULT,
        "return row_tiles - 1 - row, column_tiles - 1 - column")),
    *edits("The programs were counted from 1. The first program has number 0.",
        **ways("counted_from_1", BEGIN, f"number = max(0, number - 1)\n{BEGIN}", f"number = number + 1\n{BEGIN}")),
    *edits("A quotient was rounded up or to the nearest number. Columns and strips before a tile are counted by //.",
        rounded_up=(COLUMN, "-(-place // height)"), rounded_up__nearest=(COLUMN, "round(place / height)")),
    *edits("A strip's height is off by one, or of other numbers. It is the smaller one of strip and row_tiles - first.",
        wrong_height=(HEIGHT, "max(strip, row_tiles - first)"),
        height_off_by_one=(HEIGHT, "min(strip, row_tiles - first + 1)")),
)  # fmt: skip
FORMULA = "-(-len(tiles) // min(strip, row_tiles))"
STARTED = "-(-len(tiles) // (strip * column_tiles)) * strip"
TOGETHER = (
    *edits("The two numbers are exchanged. Tiles of x come first: one for each row of tiles that is at work.",
        exchanged__numbers=(LOADED, "return of_weight, of_x")),
    *edits("Each program's tiles were counted, also those of others. Count each tile once.",
        counted_twice=(DISTINCT_ROWS, "len(tiles)", DISTINCT_COLUMNS, "len(tiles)"),
        counted_twice__x=(DISTINCT_ROWS, "len(tiles)")),
    *edits("All programs were counted, but there are fewer tiles.", more_programs_than_tiles=(COUNT, "range(programs)"),
        more_programs_than_tiles__cut=( COUNT, "range(programs)", HEIGHT, "min(strip, max(1, row_tiles - first))")),
    *edits("One program too many or too few was counted. They are the programs 0 … programs - 1.",
        one_program_off__more=(COUNT, "range(min(programs + 1, row_tiles * column_tiles))"),
        one_program_off__first=(COUNT, "range(1, min(programs, row_tiles * column_tiles))")),
    *edits("The largest number or the last program's was taken. Tiles are counted from 0, so there is one more, and "
        "the last program may be back in a first row.",
        last_program_alone=(LOADED, "return tiles[-1][0] + 1, tiles[-1][1] + 1"), largest_number=( DISTINCT_ROWS,
        "max(row for row, column in tiles)", DISTINCT_COLUMNS, "max(column for row, column in tiles)")),
    *edits("The formula fails where the programs do not fill a column, a strip or the result, or reach the next strip. "
        "Collect tile_at's tiles instead.", whole_strips=(LOADED, f"return min(row_tiles, {STARTED}), of_weight"),
        **ways("first_strip_alone", LOADED, f"return min(strip, row_tiles, len(tiles)), min(column_tiles, {FORMULA})",
        f"columns = min(column_tiles, {FORMULA})\nreturn min(row_tiles, -(-len(tiles) // columns)), columns")),
    *edits("All row tiles or all column tiles were counted. Only those of programs that run together are loaded.",
        all_tiles=(LOADED, "return row_tiles, column_tiles")),
    *without(ORDER, "exchanged", "all_strips_at_row_0"),
)  # fmt: skip

EXERCISE = Exercise(
    id="18.1", title="The order of tiles", entries=("tile_at", "tiles_loaded"), cases=order_cases,
    oracle=right, contracts=CONTRACTS,
    models=(model_of(right, ORDER, (tile_of, loaded_by), entry="tile_at"),
            model_of(right, TOGETHER, (tile_of, loaded_by), entry="tiles_loaded")),
    mistakes=(
        Mistake("one_by_one", "A loop goes through tiles, rows, columns or strips one by one, and there may be 2⁴⁰ of "
            "them. Divide the number by the tiles of a whole strip: the quotient is the strip, and the remainder the "
            "place in it. In tiles_loaded go through the programs alone.", first=True, when=told("one by one")),
        Mistake("not_whole_numbers", "The result is not two whole numbers. `/` gives a float even where nothing is "
            "left over: use `//`. Return two numbers, no list of tiles or sum.", first=True, when=told("two whole")),
        Mistake("large_numbers", "Only results with very many tiles are wrong. 32 bits end at 2³¹, and a float32 has "
            "24 bits, a float 53: divide whole numbers of Python by //.", every=True,
            when=lambda case, seen, got: isinstance(case.args[0], list) and case.args[1] * case.args[2] > 2**24),
        Mistake("height_0", "A division by 0: some strip has the height 0. Either row_tiles % strip was taken where "
            "strip divides row_tiles, or the strip begins at row_tiles, one row tile behind the last.",
            when=lambda case, seen, got: isinstance(got, dict) and "a division by 0" in got.values()),
    ),
    hints=(
        "Draw 5 × 3 tiles with strips of 2, and number the programs. Where does the third strip begin and go on?",
        "A whole strip has strip · column_tiles tiles. So number // (strip · column_tiles) is the strip, and number % "
        "(strip · column_tiles) is the place in it, counted from the strip's first tile.",
        "The strip's first row tile is its number times strip. Its height is min(strip, row_tiles - first row tile).",
        "Down a column of that height: the row tile is first + place % height, and the column tile is place // height.",
        "For tiles_loaded call tile_at for each of the min(programs, row_tiles · column_tiles) programs, and collect "
        "the row tiles in one set and the column tiles in another.",
    ),
)  # fmt: skip
