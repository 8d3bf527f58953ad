"""Exercise 19.6: when the last of unequal programs ends, how many heads fit in the L2 cache, and whose turn it is."""

from __future__ import annotations

from course_lib.checker import Case, Exercise, Mistake, model_of
from course_lib.checker.specification.contract import Contract, Level
from exercises.ch19_what_blackwell_changes.order_slips import HEADS, ORDER, TIME, ends_at, heads_in, in_float32, tile_of


def placed(functions, numbers, heads, tiles, section):
    """The tiles of these numbers. It is sent to the worker by its source alone."""
    import inspect
    import sys

    lines, cell = 0, inspect.unwrap(functions["tile_at"]).__code__.co_filename

    def count(frame, event, argument):
        nonlocal lines
        if frame.f_code.co_filename != cell:
            return None
        lines += event == "line"
        if lines > 400:
            raise TimeoutError("after 400 lines: it goes through tiles, rows, heads or sections one by one")
        return count

    traced, found = sys.gettrace(), {}
    for number in numbers:
        lines = 0
        sys.settrace(count)
        try:
            head, row = functions["tile_at"](number, heads, tiles, section)
        finally:
            sys.settrace(traced)
        found[f"number {number}"] = {"head": head, "row": row}
    return found


def ordered(*arguments):
    return placed({"tile_at": tile_of}, *arguments)


def to_run(draw, *, programs, slots, longest):
    return [draw.integer(1, longest + 1) for _ in range(programs)], slots


def to_fit(draw, *, l2, tokens, head_dim, group):
    return l2 if l2 > 1 else int(l2 * 4 * tokens * head_dim), tokens, head_dim, group


def to_place(draw, *, heads, tiles, section):
    """All numbers; if they are too many, those where a row, a section or everything begins or ends."""
    last, count = (heads - 1) // section * section, heads * tiles  # the last section's first head
    near = [begin + more for begin in (0, section, last * tiles, count) for more in (-1, 0, 1)]
    some = {number for number in (*near, count // 3, (last + heads) * tiles // 2) if 0 <= number < count}
    return sorted(some if count > 100 else range(count)), heads, tiles, section


def level_cases(draw):
    odd = 2**20 - draw.choice((1, 3, 5))
    times = {
        "works 1, 2, 3, 4 on 2 slots": ([1, 2, 3, 4], 2),
        "the same, the longest first": ([4, 3, 2, 1], 2),
        "a long program that starts first": ([9, 2, 2, 2, 2, 1], 3),
        "no programs": ([], 3),
        "5,000 programs on 1,000 slots": to_run(draw, programs=5000, slots=1000, longest=2000),
    }
    fits = {
        "50 MiB, 8,192 tokens of 128, 8 query heads for a key head": (50 << 20, 8192, 128, 8),
        "8 key heads fill the cache": (8 * 4 * 1000 * 64, 1000, 64, 1),
        "a byte less than 8 key heads": (8 * 4 * 1000 * 64 - 1, 1000, 64, 1),
        "3 key heads fill the cache, groups of 3": (3 * 4 * 500 * 32, 500, 32, 3),
        "a byte less than 2³⁰ key heads": (2**32 - 1, 1, 1, 1),
        "not one key head, groups of 8": (4 * 500 * 32 - 1, 500, 32, 8),
    }
    places = {
        "4 heads of 3 tiles, sections of 2": (4, 3, 2),
        "5 heads of 3 tiles, sections of 2: the last has fewer heads": (5, 3, 2),
        "3 heads of 2 tiles, a section of 8": (3, 2, 8),
        "2²⁰ heads of 2²⁰ tiles, sections of 16": (2**20, 2**20, 16),
        f"{odd:,} heads of 2²⁰ tiles, sections of 8": (odd, 2**20, 8),
        "2⁴⁰ heads of 1 tile, sections of 7": (2**40, 1, 7),
        f"1 head of 2⁴⁰ tiles, a section of {odd:,}": (1, 2**40, odd),
    }
    return [
        *(Case(name, arguments, "makespan") for name, arguments in times.items()),
        *(Case(name, arguments, "heads_at_once") for name, arguments in fits.items()),
        *(Case(name, to_place(draw, heads=heads, tiles=tiles, section=section), "tile_at", placed)
          for name, (heads, tiles, section) in places.items()),
    ]  # fmt: skip


CONTRACTS = (
    Contract(
        to_run, {"programs": (0, 1, 2, 7, 60, 500), "slots": (1, 2, 3, 132, 1000), "longest": (1, 4, 100, 10**9)},
        {"programs": "may be empty", "slots": "1 … 1,000", "longest": "at least 1 and at most 10⁹"},
        entry="makespan", most=20,
    ),
    Contract(
        to_fit, {"l2": (50 << 20, 2**32, 24_000_003, Level(0.6, "no room for a key head")), "group": (1, 2, 3, 8, 128),
                 "tokens": (1, 1000, 4096, 131072), "head_dim": (1, 64, 96, 128)},
        {"l2": "1 … 2³²", "tokens": "at least 1", "head_dim": "at least 1", "group": "1 … 128"},
        entry="heads_at_once", most=24,
    ),
    Contract(
        to_place, {"heads": (1, 2, 5, 6, 9, 11), "tiles": (1, 2, 3, 7), "section": (1, 2, 3, 4, 8, 100)},
        {"heads": "at least 1", "tiles": "at least 1", "section": "may be larger than heads"},
        entry="tile_at", driver=placed, most=24,
    ),
)  # fmt: skip

EXERCISE = Exercise(
    id="19.6", title="The longest first", entries=("makespan", "heads_at_once", "tile_at"), cases=level_cases,
    oracle={"makespan": ends_at, "heads_at_once": heads_in, "tile_at": ordered}, contracts=CONTRACTS,
    models=(
        model_of(ends_at, TIME, uses=(in_float32,), entry="makespan"), model_of(heads_in, HEADS, entry="heads_at_once"),
        model_of(ordered, ORDER, (tile_of,), entry="tile_at"),
    ),
    mistakes=(
        Mistake("one_by_one", "A loop goes through tiles, rows, heads or sections one by one, and there may be 2⁴⁰ "
            "tiles. Divide the number by the tiles of a whole section.", first=True,
            when=lambda case, seen, got: seen.error is not None and "after 400 lines" in seen.error.text),
        Mistake("fails_without_programs", "It fails where there are no programs. Then the time is 0.",
            when=lambda case, seen, got: seen.error is not None and case.args[0] == []),
        Mistake("fails_where_nothing_fits", "It fails where not even one key head fits in the cache. The number of "
            "heads is then 1.", when=lambda case, seen, got: seen.error is not None and case.driver is None
            and len(case.args) == 4 and case.args[0] < 4 * case.args[1] * case.args[2]),
    ),
    hints=(
        "makespan: keep a list of when each slot is free. The next program goes to the smallest of these "
        "times, which grows by its work. heapq.heapreplace(free, free[0] + work) does so; a list of zeros is a heap.",
        "heads_at_once: keys and values of a key head have 2 · tokens · head_dim numbers of 2 bytes. Each key head "
        "that fits whole serves `group` query heads. 1 << (n.bit_length() - 1) is the largest power of two up to n.",
        "tile_at: a whole section has section · tiles tiles. number // (section · tiles) says which section it is, so "
        "its first head is that times section, and it has min(section, heads - first) heads.",
        "Count the place from the section's first tile. Its remainder by the section's heads is the head. Its quotient "
        "by them counts rows from the last one, tiles - 1, downwards.",
    ),
)  # fmt: skip
