"""Exercise 9.7: a ring of buffers in Gluon; Hopper only."""

from __future__ import annotations

import torch

from course_lib.checker import HOPPER, Case, Exercise, Forbids, LaunchesTriton, Limits, Mistake, Slip
from exercises.ch09_attention_on_hopper.descriptors import tile_type
from exercises.ch09_attention_on_hopper.sentences import A_DEADLOCK

ROWS, PROGRAMS = 64, 8  # of 9.7, as its launcher sets them


def scaled_oracle(source, factor):
    return source * factor


def scaled_cases(draw):
    def case(name, tiles, dtype=torch.float16):
        return Case(name, (draw.normal(tiles * ROWS, 64, dtype=dtype), float(draw.integer(2, 9)) / 4))

    return [
        case("1 tile", 1),
        case("8 tiles: one for each program", 8),
        case("40 tiles: every buffer is used twice", 40),
        case(f"{8 * 23 - 3} tiles: the last program has fewer", 8 * 23 - 3),
        case("2000 tiles, bfloat16", 2000, torch.bfloat16),
    ]


def _reads(first_row):
    """What comes out when the tile of a program's n-th iteration is loaded from `first_row(first tile, n)`."""

    def result(source, factor):
        tiles = len(source) // ROWS
        each = -(-tiles // PROGRAMS)
        starts = [first_row(tile // each * each, tile % each) for tile in range(tiles)]
        rows = torch.cat([torch.arange(start, start + ROWS) for start in starts])
        inside = rows < len(source)
        return torch.where(inside[:, None], source[rows.clamp(max=len(source) - 1)], 0.0) * factor

    return result


def ring_as_launched():
    types = {"source": tile_type(ROWS, 64), "target": tile_type(ROWS, 64), "factor": "fp32", "all_tiles": "i32"}
    options = {"num_warps": 4, "maxnreg": 128}
    return [{"kernel": "ring_kernel", "signature": types, "constants": {}, "options": options}]


EXERCISE = Exercise(
    id="9.7",
    title="A producer and a consumer",
    entries=("scaled",),
    cases=scaled_cases,
    oracle=scaled_oracle,
    needs=HOPPER,
    interpretable=False,  # Gluon has no interpreter
    compiled=ring_as_launched,
    limits=Limits(gpu_seconds=30.0),
    requirements=(LaunchesTriton(at_most=1), Forbids(("mul", "mul_", "copy_", "clone"))),
    hints=(
        "The steps are those of exercise 9.1, in the same order. " + A_DEADLOCK,
        "The producer: mbarrier.wait(free.index(buffer), phase ^ 1), then mbarrier.expect(ready.index(buffer), "
        "source.block_type.nbytes), then load_tile(source, [row, 0], ready.index(buffer), buffers.index(buffer)). "
        "Without the expect the barrier does not know how many bytes complete its phase.",
        "The consumer: mbarrier.wait(ready.index(buffer), phase), then buffers.index(buffer).load(LAYOUT), then "
        "mbarrier.arrive(free.index(buffer), count=1).",
        "To store: tma.store_wait(0), so that `outgoing` is free again; outgoing.store(...); fence_async_shared(); "
        "store_tile(target, [row, 0], outgoing). The row is (first_tile + block) * ROWS in both tasks.",
    ),
    slips=(
        Slip(
            "factor_forgotten",
            "The tiles are copied as they are. Multiply them.",
            formula=lambda source, factor: source,
        ),
        Slip(
            "one_tile_only",
            "Each program loads its first tile again and again. The row is (first_tile + block) * ROWS.",
            formula=_reads(lambda first, turn: first * ROWS),
        ),
        Slip(
            "first_tile_forgotten",
            "All programs load the same tiles, starting at the first row. The row is (first_tile + block) * ROWS.",
            formula=_reads(lambda first, turn: turn * ROWS),
        ),
        Slip(
            "tiles_for_rows",
            "The TMA counts in rows, and you passed the number of a tile. The row is (first_tile + block) * ROWS.",
            formula=_reads(lambda first, turn: first + turn),
        ),
    ),
    mistakes=(
        Mistake(
            "not_stored",
            "Some rows of the result were never written. Does every iteration of the consumer's loop end in "
            "store_tile, at the row (first_tile + block) * ROWS?",
            when=lambda case, seen, got: seen.unwritten > 0,
        ),
    ),
)
