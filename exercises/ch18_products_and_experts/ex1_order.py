"""Exercise 18.1: the order in which programs take the tiles of a product, and what they load together."""

from __future__ import annotations

from course_lib.checker import Case, Exercise, Mistake, model_of
from course_lib.checker.specification.contract import Contract
from exercises.ch18_products_and_experts.tile_orders import ORDER, TOGETHER, loaded_by, tile_of

TOO_LONG = "it goes through tiles, rows, columns or strips one by one"


def answered(functions, asked, row_tiles, column_tiles, strip):
    """The tiles of the programs of a list; or, if a number is asked, how many tiles so many programs load.

    It is sent to the worker by its source alone.
    """
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


def ordered(*arguments):
    return answered({"tile_at": tile_of}, *arguments)


def counted(*arguments):
    return answered({"tiles_loaded": loaded_by}, *arguments)


def landmarks(row_tiles, column_tiles, strip):
    """Numbers where something begins or ends, if there are too many for all."""
    tiles, of_a_strip = row_tiles * column_tiles, min(strip, row_tiles) * column_tiles
    last = (row_tiles - 1) // strip * strip * column_tiles  # where the last strip begins
    begins = (0, strip, of_a_strip, last, last + tiles % strip, tiles)
    near = [begin + more for begin in begins for more in (-2, -1, 0, 1)]
    middle = [tiles // 3, tiles // 2, last + (tiles - last) // 2]
    return sorted({number for number in near + middle if 0 <= number < tiles})


def order_cases(draw):
    large, odd, tall = 2**20, 2**20 - draw.choice((1, 3, 5)), draw.integer(3, 2000)
    small = {
        "3 × 4 tiles in strips of 1: row by row": (3, 4, 1),
        "4 × 3 tiles in strips of 2": (4, 3, 2),
        "5 × 3 tiles in strips of 2: the last strip is thinner": (5, 3, 2),
        "7 × 4 tiles in strips of 3": (7, 4, 3),
        "3 × 2 tiles, a strip of 8": (3, 2, 8),
        "1 × 6 tiles in strips of 4": (1, 6, 4),
        "6 × 1 tiles in strips of 4": (6, 1, 4),
    }
    far = {
        "2²⁰ × 2²⁰ tiles in strips of 8": (large, large, 8),
        f"2²⁰ × {odd:,} tiles in strips of 1": (large, odd, 1),
        f"{odd:,} × 2²⁰ tiles in strips of 8": (odd, large, 8),
        f"{odd:,} × 2²⁰ tiles in strips of {tall:,}": (odd, large, tall),
        "2⁴⁰ × 1 tiles in strips of 7": (2**40, 1, 7),
        "1 × 2⁴⁰ tiles in strips of 2": (1, 2**40, 2),
        f"{odd:,} × 2²⁰ tiles, a strip of 2⁴⁴": (odd, large, 2**44),
    }
    programs = {
        "9 programs, 9 × 9 tiles in strips of 3": (9, 9, 9, 3),
        "9 programs, 9 × 9 tiles row by row": (9, 9, 9, 1),
        "132 programs, 64 × 32 tiles in strips of 8": (132, 64, 32, 8),
        "132 programs, 64 × 32 tiles row by row": (132, 64, 32, 1),
        "12 programs, 5 × 3 tiles in strips of 2: into the thinner strip": (14, 5, 3, 2),
        "20 programs, 3 × 4 tiles: fewer tiles than programs": (20, 3, 4, 2),
        "1 program": (1, 5, 7, 2),
        "1,000 programs, 2²⁰ × 2²⁰ tiles in strips of 30": (1000, large, large, 30),
        f"1,000 programs, {odd:,} × 2 tiles in strips of 7": (1000, odd, 2, 7),
        "1,000 programs, 2²⁰ × 5 tiles, a strip of 2⁴⁰": (1000, large, 5, 2**40),
    }
    return [
        *(Case(name, (list(range(s[0] * s[1])), *s), "tile_at", answered) for name, s in small.items()),
        *(Case(name, (landmarks(*s), *s), "tile_at", answered) for name, s in far.items()),
        *(Case(name, s, "tiles_loaded", answered) for name, s in programs.items()),
    ]


def asked(draw, *, row_tiles, column_tiles, strip, programs=None):
    return programs or list(range(row_tiles * column_tiles)), row_tiles, column_tiles, strip


SIZES = {"row_tiles": (1, 2, 5, 6, 9, 11), "column_tiles": (1, 2, 3, 7), "strip": (1, 2, 3, 4, 8, 100)}
PROMISED = {"row_tiles": "at least 1", "column_tiles": "at least 1", "strip": "The strip may be larger than row_tiles"}
CONTRACTS = (
    Contract(asked, SIZES, PROMISED, entry="tile_at", driver=answered, most=24),
    Contract(
        asked,
        choices={"programs": (1, 2, 3, 7, 16, 30, 132, 1000), **SIZES},
        says={"programs": "1 … 1,000", **PROMISED}, entry="tiles_loaded", driver=answered, most=36,
    ),
)  # fmt: skip

EXERCISE = Exercise(
    id="18.1", title="The order of tiles", entries=("tile_at", "tiles_loaded"), cases=order_cases,
    oracle={"tile_at": ordered, "tiles_loaded": counted}, contracts=CONTRACTS,
    models=(
        model_of(ordered, ORDER, (tile_of,), entry="tile_at"),
        model_of(counted, TOGETHER, (tile_of, loaded_by), entry="tiles_loaded"),
    ),
    mistakes=(
        Mistake("one_by_one", "A loop goes through tiles, rows, columns or strips one by one, and there may be 2⁴⁰ of "
            "them. Divide the number by the tiles of a whole strip: the quotient says which strip, and the remainder "
            "the place in it. In tiles_loaded go through the programs alone.", first=True,
            when=lambda case, seen, got: seen.error is not None and TOO_LONG in seen.error.text),
        Mistake("not_whole_numbers", "The result is not two whole numbers. `/` gives a float even where nothing is "
            "left over: use `//`. Return two numbers, and neither a list of tiles nor their sum.", first=True,
            when=lambda case, seen, got: seen.error is not None and "two whole numbers" in seen.error.text),
        Mistake("large_numbers", "Only results with very many tiles are wrong. 32 bits end at 2³¹, and a float32 has "
            "24 bits, a float 53: divide whole numbers of Python by //.", every=True,
            when=lambda case, seen, got: isinstance(case.args[0], list) and case.args[1] * case.args[2] > 2**24),
        Mistake("height_0", "A division by 0: for some program the height of the strip came out as 0. Either the "
            "height is wrong (row_tiles % strip is 0 if strip divides row_tiles), or the strip begins at row_tiles, "
            "one row tile behind the last.",
            when=lambda case, seen, got: isinstance(got, dict) and "a division by 0" in got.values()),
    ),
    hints=(
        "Draw 5 × 3 tiles with strips of 2, and write the program's number into each. Where does the third strip "
        "begin, and how do its numbers go on?",
        "A whole strip has strip · column_tiles tiles. So number // (strip · column_tiles) is the strip, and number % "
        "(strip · column_tiles) is the place in it, counted from the strip's first tile.",
        "The strip's first row tile is its number times strip. Its height is min(strip, row_tiles - first row tile).",
        "Down a column of that height: the row tile is first + place % height, and the column tile is place // height.",
        "For tiles_loaded call tile_at for each of the min(programs, row_tiles · column_tiles) programs, and collect "
        "the row tiles in one set and the column tiles in another.",
    ),
)  # fmt: skip
