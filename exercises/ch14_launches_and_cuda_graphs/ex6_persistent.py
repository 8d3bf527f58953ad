"""Exercise 14.6: programs that stay and take one tile after another, by a stride or from a counter."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from course_lib.checker import TRITON, Case, Exercise, LaunchesTriton, Mistake, Moves, Requirement
from course_lib.checker.specification.contract import Contract, Level
from course_lib.checker.specification.edits import edits, model_of
from exercises.ch14_launches_and_cuda_graphs.who_computes import (
    ComputesNothing,
    EachFromTheCounter,
    EveryNth,
    HostGoesOn,
    TilesOfThisSize,
    draws_in_two_steps,
    goes_on_alone,
    ignores_the_counter,
    watched_tiles,
)
from exercises.topics.evidence import FAR_END, FIXED_SIZE
from exercises.topics.pytorch_operations import ARITHMETIC

COUNTER = "tiles_from_a_counter"


def silu(x, programs, left=0):
    return x * torch.sigmoid(x)


# The driver is sent to the worker by its source alone, so it stands by itself.


def with_a_used_counter(functions, x, programs, left):
    """The result with a counter in which an earlier call has left a number."""
    import torch

    function = functions["tiles_from_a_counter"]
    function = getattr(function, "__wrapped__", function)  # what watches it would take the counter for an input
    return function(x, programs, torch.full((1,), left, dtype=torch.int32, device=x.device))


def tile_cases(draw):
    def both(name, rows, columns, programs, left, metered=False):
        x = draw.normal(rows, columns)
        return [
            Case(name, (x, programs), "every_nth_tile", metered=metered),
            Case(f"{name}, counter at {left}", (x, programs, left), COUNTER, with_a_used_counter, metered),
        ]

    def watching(rows, columns, programs):
        x, left = draw.normal(rows, columns), draw.integer(0, 9)
        name = f"{rows} × {columns} numbers, {programs} programs"
        return [
            Case(f"{name}: who computes which tile", (x, programs), "every_nth_tile", watched_tiles),
            Case(f"{name}: who draws which tile", (x, programs, left), COUNTER, watched_tiles),
        ]

    # Of a GPU's programs nobody can say who has computed what, and a second call would be for nothing.
    watched = [] if draw.on_gpu else [watching(*case) for case in ((80, 128, 7), (40, 70, 4), (48, 96, 3))]
    return [
        *both("4 tiles, 4 programs", 32, 64, 4, 0),
        *both("6 tiles, 2 programs", 48, 64, 2, 0, metered=True),
        *both("7 tiles, 3 programs: the last round is not full", 112, 32, 3, 7, metered=True),
        *both("2 tiles, 9 programs", 16, 64, 9, draw.integer(1, 2), metered=True),
        *both("6 tiles, one program", 32, 96, 1, 6, metered=True),
        *both("40 × 70 numbers in 9 tiles, 4 programs", 40, 70, 4, draw.integer(3, 9), metered=True),
        *both(f"300 tiles, {FAR_END}, one program", 4800, 1, 1, 0),
        *both("20 tiles, 7 programs", 80, 128, 7, 1000, metered=True),
        *(case for cases in watched for case in cases),
    ]


def _contract(entry):
    counted = entry == COUNTER
    left = {"left": (Level(0, ""), Level(3, "counter at 3"), Level(100, "counter at 100"))} if counted else {}
    return Contract(
        lambda draw, *, rows, columns, programs, **used: (draw.normal(rows, columns), programs, *used.values()),
        choices={"rows": (1, 16, 17, 50), "columns": (1, 31, 32, 70), "programs": (1, 2, 5, 33), **left},
        says={"programs": "Any number from 1"},
        entry=entry,
        driver=with_a_used_counter if counted else None,
        most=6,
    )


def computed(x, tiles, across):
    """What these tiles make of x; NaN where none is."""
    output, across = torch.full(x.shape, math.nan), max(1, across)
    for tile in tiles:
        row = tile // across * 16
        column = tile % across * 32
        part = x[row : row + 16, column : column + 32]
        output[row : row + 16, column : column + 32] = part * torch.sigmoid(part)
    return output


def every_nth(x, programs):
    rows, columns = x.shape
    down, across = -(-rows // 16), -(-columns // 32)
    tiles, done = down * across, []
    for program in range(programs):
        for tile in range(program, tiles, programs):
            done.append(tile)
    return computed(x, done, across)


def from_counter(x, programs, left):
    rows, columns = x.shape
    down, across = -(-rows // 16), -(-columns // 32)
    tiles, done, counter = down * across, [], 0
    for _ in range(programs):
        tile, counter = counter, counter + 1
        while tile < tiles:
            done.append(tile)
            tile, counter = counter, counter + 1
    return computed(x, done, across)


SHARE = "range(program, tiles, programs)"
ROW, COLUMN = "row = tile // across * 16", "column = tile % across * 32"
TILES = (
    *edits("The number of tiles was rounded down, so what is behind the last whole tile was left out. Round up: "
        "tl.cdiv(rows, 16) and tl.cdiv(columns, 32).",
        rounded_down=("-(-rows // 16), -(-columns // 32)", "rows // 16, columns // 32"),
        rounded_down__columns=("-(-columns // 32)", "columns // 32"),
        rounded_down__rows=("-(-rows // 16)", "rows // 16"),
        rounded_down__numbers=("down * across", "rows * columns // 512")),
    *edits("The tiles of only one dimension were counted. Multiply the tiles down by the tiles across.",
        one_dimension=("down * across", "down"), one_dimension__across=("down * across", "across")),
    *edits("The last tile was left out: tile numbers go from 0 to tiles - 1, and all of them count.",
        last_tile_missing=("down * across", "down * across - 1")),
    *edits("A tile's row and column were taken from its number in the wrong way: exchanged, or with the wrong divisor. "
        "With `across` tiles in a row of tiles, the row is tile // across and the column tile % across.",
        wrong_place=("done, across", "done, down"),
        wrong_place__only_row=("tile // across", "tile // (-(-x.shape[0] // 16))"),
        wrong_place__only_column=("tile % across", "tile % (-(-x.shape[0] // 16))")),
    *edits("The tiles were counted with the wrong block. There are tl.cdiv(rows, BLOCK_ROWS) tiles down and "
        "tl.cdiv(columns, BLOCK_COLUMNS) across.",
        blocks_exchanged=("-(-rows // 16), -(-columns // 32)", "-(-rows // 32), -(-columns // 16)"),
        blocks_exchanged__down=("-(-rows // 16)", "-(-rows // 32)")),
    *edits("silu_tile takes the number of a tile in each direction and multiplies it by the block itself. Yours gives "
        "it the first row or column of the tile: tile // across and tile % across are enough.",
        place_in_elements=(ROW, f"{ROW} * 16", COLUMN, f"{COLUMN} * 32"),
        place_in_elements__row=(ROW, f"{ROW} * 16"), place_in_elements__column=(COLUMN, f"{COLUMN} * 32")),
    *edits("silu_tile got `rows` and `columns` in the wrong order. `columns` is also the distance from a row to the "
        "next, so the numbers of other places were computed.",
        sizes_exchanged=("output, across =", "x = x.reshape(x.shape[::-1]); output, across =",
        "return output", "return output.reshape(output.shape[::-1])")),
)  # fmt: skip
EVERY_NTH = (
    *edits("Each program computed one tile and no other: it ended, or its step leads beyond the last tile. With fewer "
        "programs than tiles it must go on, from its own number in steps of the number of programs, as long as there "
        "are tiles.",
        one_tile_each=(SHARE, "range(program, min(program + 1, tiles))")),
    *edits("Each program got tiles // programs tiles, so no program computed the remainder. Round up and stop at "
        "`tiles`, or go from the program's number in steps of the number of programs.",
        remainder_dropped=(SHARE, "range(program * (tiles // programs), (program + 1) * (tiles // programs))")),
    *edits("The first tile was left out. Tile numbers begin at 0, as program numbers do.",
        first_tile_missing=(SHARE, "range(program + 1, tiles, programs)")),
    *edits("A program did not go on in steps of the number of programs. Begin at its own number, and add the number of "
        "programs until there is no tile left.",
        wrong_step=(SHARE, "range(program, tiles, programs + 1)"),
        wrong_step__of_a_block=(SHARE, "range(program, tiles, 16)"),
        wrong_step__two_rounds=(SHARE, "[tile for tile in (program, program + programs) if tile < tiles]")),
    *TILES,
)  # fmt: skip
LEFT = "tiles, done, counter = down * across, [], 0"
FROM_COUNTER = (
    *edits("The counter was not 0 when the programs began. It still held what an earlier call left there. Set it to 0 "
        "in every call, before the launch.",
        counter_not_reset=(LEFT, LEFT.replace("[], 0", "[], left"))),
    *edits("Each program took one number from the counter, computed that tile, and ended. It must take the next one "
        "until there is none left.", one_tile_each=("while tile < tiles", "if tile < tiles",
        "done.append(tile)\n            tile, counter = counter, counter + 1", "done.append(tile)"),
        one_tile_each__two_draws=("while tile < tiles", "if tile < tiles")),
    *edits("Nobody computed the first tile. Was its number taken from the counter and not used? Every atomic_add takes "
        "a number, even the one before the loop. Or did the counter begin at 1, or was 1 added to the number? "
        "tl.atomic_add returns what the counter held before.",
        draw_lost=("tile, counter = counter, counter + 1\n        while tile < tiles:\n",
        "tile, counter = counter + 1, counter + 2\n        while tile < tiles:\n")),
    *edits("After each tile a number was taken from the counter, but its tile was not computed: every second tile is "
        "missing. Every atomic_add takes a number.",
        draw_lost__every_second=("done.append(tile)\n            tile, counter = counter, counter + 1",
        "done.append(tile)\n            tile, counter = counter + 1, counter + 2")),
    *edits("The counter grew by the number of programs with each tile. It counts tiles, so add 1.",
        grows_by_programs=("counter, counter + 1", "counter, counter + programs")),
    *TILES,
)  # fmt: skip


class OneLaunch(LaunchesTriton):
    """One launch in a call, of at most as many programs as were asked for."""

    def complaint(self, case, seen):
        of_a_call = seen.launches[: len(seen.launches) // seen.noted.get("calls", 1)]
        found = super().complaint(case, replace(seen, launches=of_a_call))
        if found or seen.largest_grid <= case.args[1]:
            return found
        return f"The launch has {seen.largest_grid} programs, where at most {case.args[1]} are allowed."


class DrawsAtomically(Requirement):
    """Where a counter is asked for, some memory is updated by atomic operations."""

    id: str = "not_atomic"

    def complaint(self, case, seen):
        if case.entry != COUNTER or not seen.traffic or any(row["atomic"] for row in seen.traffic.values()):
            return None
        return "No atomic operation was made, so no program can take a number from the counter for itself."


def least_bytes(x, programs, left=None) -> int:
    """x in and the result out; with a counter, a number for each tile, and one with which each program ends."""
    draws = programs + math.ceil(x.shape[0] / 16) * math.ceil(x.shape[1] / 32)
    return 8 * x.numel() + (0 if left is None else 8 * draws)


EXERCISE = Exercise(
    id="14.6",
    title="Programs that stay",
    entries=("every_nth_tile", COUNTER),
    cases=tile_cases,
    oracle=silu,
    contracts=(_contract("every_nth_tile"), _contract(COUNTER)),
    models=(
        model_of(every_nth, EVERY_NTH, (computed,), entry="every_nth_tile"),
        model_of(from_counter, FROM_COUNTER, (computed,), entry=COUNTER),
    ),
    needs=TRITON,
    requirements=(
        OneLaunch(at_most=1),
        DrawsAtomically(),
        HostGoesOn(),
        ComputesNothing((*ARITHMETIC, "silu", "sigmoid", "exp")),
        TilesOfThisSize(),
        EachFromTheCounter(),
        EveryNth(),
        Moves(least_bytes),
    ),
    hints=(
        "Number the tiles row by row: across = tl.cdiv(columns, BLOCK_COLUMNS), tiles = tl.cdiv(rows, BLOCK_ROWS) · "
        "across. Tile t is in row t // across and column t % across.",
        "every_nth_tile: for tile in range(tl.program_id(0), tiles, tl.num_programs(0)). If there are more programs "
        "than tiles, some programs have an empty loop.",
        "tl.atomic_add(counter_pointer, 1) returns the counter's value and adds 1 to it, and no other program can come "
        "in between. So each value is given out only once.",
        "tiles_from_a_counter: tile = tl.atomic_add(counter_pointer, 1) before the loop, while tile < tiles:, and the "
        "same line again at the loop's end. Before the launch: counter.zero_().",
    ),
    mistakes=(
        FIXED_SIZE,
        Mistake(
            "launch_for_each_tile",
            "Several kernels were launched. Launch one kernel for all of the work, and let its programs go from tile "
            "to tile.",
            when=lambda case, seen, got: len(seen.launches) > seen.noted.get("calls", 1),
            cost=True,
        ),
        Mistake(
            "more_programs_than_allowed",
            "The grid is larger than `programs`. Launch at most that many, and let each compute several tiles.",
            when=lambda case, seen, got: seen.largest_grid > case.args[1],
            cost=True,
        ),
        Mistake(
            "tile_before_the_first",
            "A tile with a negative number was computed. tl.atomic_add returns what the counter held *before* it was "
            "added to. If the counter begins at 0, the first number is 0 and that is the first tile. Subtract nothing.",
            when=lambda case, seen, got: (
                case.entry == COUNTER and any("before its start" in access for access in seen.out_of_bounds)
            ),
        ),
        Mistake(
            "counter_without_atomic",
            "The number was read from the counter by one operation, and the counter moved on by another. Here programs "
            "run one after another, so it went well. On a GPU two programs can read the same number before one has "
            "written, and compute the same tile. tl.atomic_add does both in one step: the number that it returns is "
            "the tile.",
            when=lambda case, seen, got: (
                draws_in_two_steps(case, seen)
                or (
                    case.entry == COUNTER
                    and not any(row["atomic"] for row in seen.traffic.values())
                    and any(row["loaded"] and row["stored"] for row in seen.traffic.values())
                )
            ),
            cost=True,
        ),
        Mistake(
            "draw_ignored",
            "The numbers that tl.atomic_add returns must be the numbers of the tiles. No program has its own share: "
            "write tile = tl.atomic_add(counter_pointer, 1) before each tile.",
            when=lambda case, seen, got: ignores_the_counter(case, seen),
            cost=True,
        ),
        Mistake(
            "goes_on_without_the_counter",
            "After a tile from the counter a program went on by itself, in steps or to a neighbour, or it ended though "
            "tiles were left. Then a slow program keeps tiles that others had time for. Take the next number from the "
            "counter after each tile, until there is no tile left.",
            when=lambda case, seen, got: goes_on_alone(case, seen),
            cost=True,
        ),
        Mistake(
            "counter_set_in_the_kernel",
            "The kernel itself sets the counter. But programs start in any order, so others may already have taken "
            "numbers, and these are given out again. Set the counter before the launch: counter.zero_().",
            when=lambda case, seen, got: any(row["atomic"] and row["stored"] for row in seen.traffic.values()),
            cost=True,
        ),
        Mistake(
            "tiles_computed_again",
            "Some tiles were computed more than once. The result is right, because each time gives the same numbers, "
            "but the work is wasted. Let each tile be computed by one program only.",
            when=lambda case, seen, got: (
                case.metered and sum(row["stored"] for row in seen.traffic.values()) >= 4 * case.args[0].numel() + 64
            ),
            cost=True,
        ),
    ),
)
