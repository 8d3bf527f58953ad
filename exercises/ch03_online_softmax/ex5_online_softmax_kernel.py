"""Exercise 3.5: the online softmax as a kernel, for rows longer than a tile."""

from __future__ import annotations

import torch

from course_lib.checker import TRITON, Case, Contiguous, Exercise, Forbids, LaunchesTriton, Mistake, Moves
from course_lib.checker.specification.contract import Contract, Level
from course_lib.checker.specification.draw import Draw
from course_lib.checker.specification.edits import edits, model_of, without
from course_lib.checker.specification.layouts import CONTIGUOUS, expanded, gaps
from exercises.ch03_online_softmax.plain import (
    INF,
    SHORTCUTS,
    SOFTMAXES,
    at_least_float32,
    fused_in_base_2,
    levels,
    masked_prefix,
    running_statistics,
    softmax_of,
)
from exercises.topics.evidence import first_access
from exercises.topics.pointers import load, put
from exercises.topics.rising import MAXIMUM_OF_THE_FIRST_TILE, rising_rows, stays_behind
from exercises.topics.running import (
    ADDED,
    BASIC,
    IN_16_BITS,
    MASKED,
    NARROW,
    RESCALE,
    WITH_THE_MAXIMUM,
    start,
    step,
    tail,
)
from exercises.topics.softmax_inputs import MASKS, SCORES, far_below_finite
from exercises.topics.softmax_slips import (
    LOAD_NOT_MASKED,
    ROW_STRIDE,
    STORE_NOT_MASKED,
    SUM_CAST,
)


def online_oracle(x, block):
    return softmax_of(at_least_float32(x)).to(x.dtype)


def _online(x, block):
    """The chapter's own loop, in plain PyTorch."""
    maximum, total = running_statistics(x, block)
    return torch.exp(at_least_float32(x) - maximum[:, None]) / total[:, None]


def _rounded(form):
    return lambda x, block: form(x, block).to(x.dtype)


def _one_above_many(alike, columns):
    """A row whose first score lies so far above the others that each weighs nothing, and all of them 1e-4 of it."""
    row = alike.uniform(1, columns, low=-1.0, high=1.0)
    row[0, 0] = 22.0
    return row


def online_cases(draw):
    odd = draw.choice((257, 389, 509))
    masked = masked_prefix(draw, 2, 200, 128)
    cases = [
        Case("2 rows of 512, four tiles of 128", (draw.normal(2, 512), 128), metered=True),
        Case(
            f"3 rows of {odd}, a prime, in tiles of 128",
            (draw.normal(3, odd, scale=2.0, shift=-4.0), 128),
            metered=True,
        ),
        Case("one more than a tile: 129 in tiles of 128", (draw.normal(2, 129), 128), metered=True),
        Case("ascending rows: the maximum grows at every tile", (draw.normal(2, 300, scale=3.0).sort(dim=1)[0], 64)),
        Case("2 rows of 40, 160 higher from the second tile on", (rising_rows(draw, 2, 40, 16), 16)),
        Case("a first tile of -inf, then scores near -200", (masked_prefix(draw, 2, 40, 16) - 200.0, 16)),
        Case("descending rows", (draw.normal(2, 300, scale=3.0).sort(dim=1, descending=True)[0], 64)),
        Case("three rows at -1000, 0 and +1000", (levels(draw, 150), 64)),
        Case("3 rows with a gap behind each row", (draw.spread_out(draw.normal(3, 129), 3), 64)),
        Case("a first tile of -inf", (masked, 64)),
        Case("one score near -1e20 in each row, the others -inf", (far_below_finite(3, 37), 16)),
        Case("float16, 2 rows of 1000", (draw.normal(2, 1000, scale=2.0, dtype=torch.float16), 256), metered=True),
        Case(
            "float16, 69,629 equal scores: their sum is more than float16 holds",
            (torch.full((1, 69_629), float(draw.integer(-3, 4)), dtype=torch.float16), 8192),
        ),
        Case("a row of 1,048,583, more than a tile may hold", (draw.normal(1, 1_048_583), 8192)),
        Case("a score of 22, and 300,006 within ±1 behind it", (_one_above_many(Draw(35), 300_007), 8192)),
    ]
    if draw.on_gpu:
        dtype = torch.bfloat16 if draw.bfloat16 else torch.float16
        cases.append(Case("64 rows of 50,257, a vocabulary", (draw.normal(64, 50_257, dtype=dtype, scale=4.0), 4096)))
    return cases


def drawn(draw, *, rows, columns, block, dtype, scores, mask, layout):
    return layout(draw, mask(draw, scores(draw, rows, columns)).to(dtype)), block


CONTRACT = Contract(
    drawn,
    choices={
        "rows": (1, 2, 5),
        "columns": (1, 2, 15, 16, 17, 101),
        "block": (1, 8, 16, 128),
        "dtype": (torch.float32, torch.float16, torch.bfloat16),
        "scores": SCORES,
        "mask": MASKS,
        "layout": (CONTIGUOUS, Level(gaps, "a gap after each row"), Level(expanded, "one row expanded")),
    },
    says={
        "rows": "x: [rows, columns]",
        "columns": "Rows may be longer or shorter than that",
        "block": "a power of two",
        "dtype": "float32, float16 or bfloat16",
        "mask": "Every row has at least one finite element",
        "layout": "rows any stride apart",
    },
    valid=lambda columns, block, **_: columns // block <= 17,
    most=10,
)


def online_softmax(x, block):
    rows, columns = x.shape
    y = torch.full((rows, columns), torch.nan, dtype=x.dtype)
    row = torch.arange(rows)[:, None]
    x_rows, y_rows = row * x.stride(0), row * columns
    offsets = torch.arange(-(-columns // block) * block)  # of all tiles
    tiles = load(x, x_rows + offsets, offsets < columns, -INF).unflatten(1, (-1, block))  # [rows, tiles, block]
    running_max, running_sum = start((rows,))
    for tile in tiles.unbind(1):
        running_max, running_sum, _, _ = step(tile, running_max, running_sum, x.dtype)
    inside = offsets < columns
    again = load(x, x_rows + offsets, inside, -INF).float()
    put(y, y_rows + offsets, torch.exp(again - running_max[:, None]) / running_sum[:, None], inside)
    return y


LAST_SKIPPED = "The last tile of each row is never read. A loop over `range(0, columns, BLOCK)` covers them all."
PARTIAL_SKIPPED = (
    "The last, partly filled tile of a row is never read: the number of tiles is rounded down. Loop over "
    "`range(0, columns, BLOCK)` and mask."
)
FIRST_ONLY = (
    "Only the first tile of each row was written: the kernel has no loop over the tiles, or the loop ends after one. "
    "Walk `for start in range(0, columns, BLOCK)`."
)
OVERWRITTEN = (
    "Maximum and sum are those of the row's last tile: they are overwritten in the loop instead of carried on."
)
OUTPUT = "torch.exp(again - running_max[:, None]) / running_sum[:, None]"
STEP = "running_max, running_sum, _, _ = step(tile, running_max, running_sum, x.dtype)"
STORED = "inside = offsets < columns"


def _of_some_tiles(name, tiles, until):
    """A loop that ends early: both loops, the first, the second."""
    of_the_sum, of_the_outputs = ("tiles.unbind(1)", f"tiles.unbind(1)[{tiles}]"), (STORED, f"inside = {until}")
    return {
        name: (*of_the_sum, *of_the_outputs),
        f"{name}__in_the_statistics": of_the_sum,
        f"{name}__in_the_outputs": of_the_outputs,
    }


def _skipping(distance):
    """Nothing added for a tile that lies so far below what was seen before."""
    return f"torch.where(tile.amax(-1) < running_max - {distance}, 0.0, {ADDED})"


def _lazily(least):
    """No rescaling where the maximum grows by less than this."""
    return f"torch.where(new_max - running_max < {least}, 1.0, {RESCALE})"


CHANGES = (
    *edits(
        "Only row 0 was written. A program works on row `tl.program_id(0)`, and there are as many programs as rows.",
        only_first_row=(f"{OUTPUT}, inside", f"{OUTPUT}, inside & (row == 0)"),
    ),
    *edits(
        FIRST_ONLY,
        only_first_tile=("tiles.unbind(1)", "tiles.unbind(1)[:1]", STORED, "inside = offsets < min(columns, block)"),
        only_first_tile__of_the_outputs=(STORED, "inside = offsets < min(columns, block)"),
    ),
    *edits(ROW_STRIDE, row_stride_ignored=("row * x.stride(0)", "row * columns")),
    *edits(
        "The result's rows are stored as far apart as those of `x`. They have their own row stride: row r begins at "
        "`r * y_row_stride`.",
        result_by_the_stride_of_x=("row * columns", "row * x.stride(0)"),
    ),
    *BASIC,
    *edits(
        "The maximum is subtracted in the sum, but not in the outputs. Subtract `running_max` in both loops.",
        maximum_missing_in_the_outputs=("again - running_max[:, None]", "again"),
    ),
    *edits(
        "The outputs are measured from each tile's own maximum, and the sum from the row's. Subtract `running_max` "
        "in both loops.",
        own_maximum_in_the_outputs=(
            "again - running_max[:, None]",
            "again - again.unflatten(1, (-1, block)).amax(-1).repeat_interleave(block, 1)",
        ),
    ),
    *edits(
        "The mask compares the offsets with BLOCK. Only the first tile passes that, and in a row shorter than "
        "BLOCK even what lies past its end. Compare with `columns`.",
        mask_by_the_block=("offsets < columns, -INF", "offsets < block, -INF"),
    ),
    *edits(
        "Every tile of the outputs is stored in the first one's place, where the last one stays: `start` is "
        "missing from the store's offsets.",
        stored_in_the_first_tile=("y_rows + offsets", "y_rows + offsets % block"),
    ),
    *edits(
        "Every second tile of a row is left out: the loop's step is twice as long as the tile that it loads.",
        every_second_tile=(
            *("tiles.unbind(1)", "tiles.unbind(1)[::2]"),
            *(STORED, f"{STORED} - offsets // block % 2 * columns"),
        ),
        every_second_tile__in_the_statistics=("tiles.unbind(1)", "tiles.unbind(1)[::2]"),
    ),
    *edits(
        "The outputs were never divided by the running sum.",
        not_normalised=(OUTPUT, "torch.exp(again - running_max[:, None])"),
    ),
    *edits(
        "Maximum and sum come from the first tile of the row alone. The first loop must run over all tiles.",
        first_tile_statistics=("tiles.unbind(1)", "tiles.unbind(1)[:1]"),
    ),
    *edits(
        "Each tile got a softmax of its own. Write the outputs in a second loop, when the sum of the whole row is "
        "known.",
        softmax_per_tile=(OUTPUT, "softmax_of(again.unflatten(1, (-1, block))).flatten(1)"),
    ),
    *edits(
        "Each tile was divided by the sum of the tiles so far. Later tiles still add to it: write the outputs in a "
        "second loop, after the first has ended.",
        written_in_the_first_pass=(
            *("= start((rows,))", "= start((rows,))\noutputs = []"),
            *(STEP, f"{STEP.replace('_, _', 'weights, _')}\noutputs.append(weights / running_sum[:, None])"),
            *(OUTPUT, "torch.cat(outputs, 1)"),
        ),
    ),
    *without(WITH_THE_MAXIMUM, *(edit.id for edit in BASIC)),
    *edits(
        "The sum is not rescaled where the maximum grows by little, and yet the weights are measured from the new "
        "maximum. Each growth changes what is kept by exp(old - new): rescale at every tile, or keep the old maximum.",
        sum_not_rescaled__where_it_grows_little=(RESCALE, _lazily("8.0")),
        sum_not_rescaled__where_it_grows_by_less_than_1=(RESCALE, _lazily("1.0")),
        sum_not_rescaled__where_it_grows_by_less_than_8_in_base_2=(RESCALE, _lazily("8 * math.log(2)")),
    ),
    *edits(
        "A tile whose scores lie far below the running maximum is left out of the sum. Its weights are small, but none "
        "is 0, and many of them add up: add every tile.",
        alone=True,
        **{f"low_tiles_skipped__{distance}": (ADDED, _skipping(distance)) for distance in (1, 4, 5, 8, 10, 16, 20)},
    ),
    *edits(LAST_SKIPPED, **_of_some_tiles("last_tile_skipped", ":-1", "offsets < (columns - 1) // block * block")),
    *edits(
        PARTIAL_SKIPPED,
        **_of_some_tiles("partial_tile_skipped", ": columns // block", "offsets < columns // block * block"),
    ),
    *tail("offsets < columns"),
    *edits(LOAD_NOT_MASKED, load_not_masked=("offsets < columns, -INF", "None", "inside, -INF", "None")),
    *MASKED,
    *without(NARROW, "cast_before_the_sum__everything"),
    *edits(SUM_CAST, sum_in_float16__everything=IN_16_BITS),
)
MODEL = model_of(online_softmax, CHANGES, (start, step), (softmax_of,)).with_only(
    last_tile_only=OVERWRITTEN, last_tile_only__sum=OVERWRITTEN
)


def _third_read(case, seen, got) -> bool:
    return case.metered and any(
        counts["loaded"] >= 2.9 * max(counts["distinct_loaded"], 1)
        for counts in seen.traffic.values()
        if counts["distinct_loaded"] >= case.args[0].numel() * case.args[0].element_size()
    )


EXERCISE = Exercise(
    id="3.5",
    title="Online softmax kernel for rows longer than a tile",
    entries=("online_softmax",),
    cases=online_cases,
    oracle=online_oracle,
    contracts=(CONTRACT,),
    models=(MODEL,),
    plain=tuple(_rounded(form) for form in (_online, fused_in_base_2, *SOFTMAXES)),
    needs=TRITON,
    requirements=(
        LaunchesTriton(),
        Forbids((*SHORTCUTS, "exp", "exp2", "max", "amax", "sum", "div")),
        Moves(lambda x, block: 3 * x.numel() * x.element_size(), slack=1.02),
        Contiguous(),
    ),
    hints=(
        "The kernel is built like the naive one: two loops over the row's tiles. The first finds the maximum and "
        "the sum in a single walk along the row. You wrote its body in 3.2.",
        "Here a program works on one row, so running_max and running_sum are two single numbers, and `tl.max(tile, "
        "axis=0)` and `tl.sum(weights, axis=0)` turn a tile of [BLOCK] into one.",
        'Positions past the end of the row must not count: load them as `other=float("-inf")`. Their '
        "weight is exp(-inf) = 0, and they never become the maximum.",
        'Start with `running_max = float("-inf")` and `running_sum = 0.0`. A first tile of -inf makes -inf - '
        '(-inf): use `reference = tl.where(new_max == float("-inf"), 0.0, new_max)` in both exponentials.',
        'First loop: `tile = tl.load(x_row + offsets, mask=offsets < columns, other=float("-inf")).to(tl.float32)`; '
        "`new_max = tl.maximum(running_max, tl.max(tile, axis=0))`; `running_sum = running_sum * "
        "tl.exp(running_max - reference) + tl.sum(tl.exp(tile - reference), axis=0)`; `running_max = new_max`.",
    ),
    mistakes=(
        Mistake(
            "whole_row_in_one_tile",
            "The tile grows with the row. A tile lies in registers, which have room for a few thousand elements. Take "
            "`block` elements at a time and loop along the row.",
            when=lambda case, seen, got: bool(seen.error) and "maximum tensor numel" in seen.error.text,
            cost=True,
        ),
        Mistake(
            "maximum_of_the_first_tile",
            MAXIMUM_OF_THE_FIRST_TILE,
            when=stays_behind(lambda x, block: x.double(), lambda x, block: block),
            every=True,
        ),
        Mistake("store_not_masked", STORE_NOT_MASKED, when=first_access("writes")),
        Mistake("load_not_masked", LOAD_NOT_MASKED, when=first_access("reads")),
        Mistake(
            "three_passes",
            "The kernel reads every element three times: that is the safe softmax. Find maximum and sum in one loop.",
            when=_third_read,
            cost=True,
        ),
    ),
)
