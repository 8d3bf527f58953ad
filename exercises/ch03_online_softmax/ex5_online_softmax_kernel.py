"""Exercise 3.5: the online softmax as a kernel, for rows longer than a tile."""

from __future__ import annotations

import math

import torch

from course_lib.checker import TRITON, Case, Contiguous, Exercise, Forbids, LaunchesTriton, Mistake, Moves
from course_lib.checker.specification.contract import Contract, Level
from course_lib.checker.specification.layouts import CONTIGUOUS, expanded, gaps
from course_lib.checker.specification.model import Model, Slip
from exercises.ch03_online_softmax.plain import (
    SHORTCUTS,
    SOFTMAXES,
    at_least_float32,
    levels,
    masked_prefix,
    running_statistics,
    softmax_of,
)
from exercises.topics.evidence import first_access
from exercises.topics.memory import in_place_of_the_first
from exercises.topics.rising import MAXIMUM_OF_THE_FIRST_TILE, rising_rows, stays_behind
from exercises.topics.softmax_inputs import MASKS, SCORES, far_below_finite
from exercises.topics.softmax_model import Running, loaded_rows, padding
from exercises.topics.softmax_slips import (
    FINITE_TAIL,
    LOAD_NOT_MASKED,
    MASKED,
    ROW_STRIDE,
    STORE_NOT_MASKED,
    SUM_CAST,
    TAIL_SCORED,
    WEIGHTS_CAST,
    WITH_THE_MAXIMUM,
)


def online_oracle(x, block):
    return softmax_of(at_least_float32(x)).to(x.dtype)


def _online(x, block):
    """The chapter's own loop, in plain PyTorch."""
    maximum, total = running_statistics(x, block)
    return torch.exp(at_least_float32(x) - maximum[:, None]) / total[:, None]


def _rounded(form):
    return lambda x, block: form(x, block).to(x.dtype)


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


def compute(s, x, block):
    rows, columns = x.shape
    tiles = loaded_rows(s, x, block, padding(s))  # [rows, tiles, block]
    tiles = tiles if s("sum_in_float16__everything") else tiles.float()
    inputs = loaded_rows(s, x, block).float()
    if s("softmax_per_tile"):
        return _stored(s, x, softmax_of(inputs))
    if s("mask_by_the_block"):  # the first loop's
        tiles = loaded_rows(s, x, block, padding(s), limit=block).float()
    running, outputs, count = Running(s, (rows,), x.dtype), [], tiles.shape[1]
    for step in range(count):
        if (
            s("only_first_tile", "first_tile_statistics")
            and step > 0
            or s("last_tile_skipped", "last_tile_skipped__in_the_statistics")
            and step == count - 1
            or s("partial_tile_skipped", "partial_tile_skipped__in_the_statistics")
            and (step + 1) * block > columns
        ):
            break
        if s("every_second_tile", "every_second_tile__in_the_statistics") and step % 2:
            continue
        weights, _ = running.step(tiles[:, step])
        if s("written_in_the_first_pass"):
            outputs.append(weights / running.total[:, None])
    if outputs:
        return _stored(s, x, torch.stack(outputs, 1))
    maximum, total = running.measured_from.float()[:, None, None], running.total.float()[:, None, None]
    weights = torch.exp2(inputs - maximum) if s("base_2__exp2_for_exp") else torch.exp(inputs - maximum)
    if s("own_maximum_in_the_outputs"):
        weights = torch.exp(inputs - inputs.amax(-1, keepdim=True))
    if s("maximum_missing_in_the_outputs"):
        weights = torch.exp(inputs)
    return _stored(s, x, weights if s("not_normalised") else weights / total)


def _stored(s, x, tiles):
    """The result [rows, columns] that a kernel leaves which stores these tiles; NaN where it stores nothing."""
    (rows, columns), block = x.shape, tiles.shape[-1]
    values = tiles.flatten(1)[:, :columns].to(x.dtype)
    end = columns
    if s("only_first_tile", "only_first_tile__of_the_outputs"):
        end = block
    if s("last_tile_skipped", "last_tile_skipped__in_the_outputs"):
        end = (columns - 1) // block * block
    if s("partial_tile_skipped", "partial_tile_skipped__in_the_outputs"):
        end = columns // block * block
    values[:, end:] = math.nan
    if s("every_second_tile"):
        values[:, torch.arange(values.shape[1]) // block % 2 == 1] = math.nan
    if s("stored_in_the_first_tile"):
        values = in_place_of_the_first(values.T, block).T
    if s("only_first_row"):
        values[1:] = math.nan
    if not s("result_by_the_stride_of_x"):
        return values
    memory = torch.full((rows * columns,), math.nan, dtype=x.dtype)
    for row in range(rows):
        first = row * x.stride(0)
        room = memory[first : first + columns]
        s.outside = s.outside or room.numel() < columns
        room.copy_(values[row, : room.numel()])
    return memory.view(rows, columns)


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
MODEL = Model(
    compute,
    (
        Slip(
            "only_first_row",
            "Only row 0 was written. A program works on row `tl.program_id(0)`, and there are as many programs as "
            "rows.",
        ),
        Slip("only_first_tile", FIRST_ONLY),
        Slip("only_first_tile__of_the_outputs", FIRST_ONLY),
        Slip("row_stride_ignored", ROW_STRIDE),
        Slip(
            "result_by_the_stride_of_x",
            "The result's rows are stored as far apart as those of `x`. They have their own row stride: row r begins "
            "at `r * y_row_stride`.",
        ),
        *WITH_THE_MAXIMUM[:4],
        Slip(
            "maximum_missing_in_the_outputs",
            "The maximum is subtracted in the sum, but not in the outputs. Subtract `running_max` in both loops.",
        ),
        Slip(
            "own_maximum_in_the_outputs",
            "The outputs are measured from each tile's own maximum, and the sum from the row's. Subtract `running_max` "
            "in both loops.",
        ),
        Slip(
            "mask_by_the_block",
            "The mask compares the offsets with BLOCK. Only the first tile passes that, and in a row shorter than "
            "BLOCK even what lies past its end. Compare with `columns`.",
        ),
        Slip(
            "stored_in_the_first_tile",
            "Every tile of the outputs is stored in the first one's place, where the last one stays: `start` is "
            "missing from the store's offsets.",
        ),
        *(
            Slip(
                f"every_second_tile{way}",
                "Every second tile of a row is left out: the loop's step is twice as long as the tile that it loads.",
            )
            for way in ("", "__in_the_statistics")
        ),
        Slip("not_normalised", "The outputs were never divided by the running sum."),
        Slip(
            "first_tile_statistics",
            "Maximum and sum come from the first tile of the row alone. The first loop must run over all tiles.",
        ),
        Slip(
            "softmax_per_tile",
            "Each tile got a softmax of its own. Write the outputs in a second loop, when the sum of the whole row is "
            "known.",
        ),
        Slip(
            "written_in_the_first_pass",
            "Each tile was divided by the sum of the tiles so far. Later tiles still add to it: write the "
            "outputs in a second loop, after the first has ended.",
        ),
        *WITH_THE_MAXIMUM[4:],
        Slip("last_tile_skipped", LAST_SKIPPED),
        Slip("last_tile_skipped__in_the_statistics", LAST_SKIPPED),
        Slip("last_tile_skipped__in_the_outputs", LAST_SKIPPED),
        Slip("partial_tile_skipped", PARTIAL_SKIPPED),
        Slip("partial_tile_skipped__in_the_statistics", PARTIAL_SKIPPED),
        Slip("partial_tile_skipped__in_the_outputs", PARTIAL_SKIPPED),
        Slip("tail_not_masked", TAIL_SCORED),
        *FINITE_TAIL,
        Slip("load_not_masked", LOAD_NOT_MASKED),
        *(slip for slip in MASKED if slip.id != "nan_repaired_at_the_end"),
        Slip("cast_before_the_sum__weights", WEIGHTS_CAST),
        *(Slip(f"sum_in_float16{way}", SUM_CAST) for way in ("", "__cut", "__always", "__everything")),
    ),
    styles=((), ("starts_with_the_first_tile",)),
).with_only(last_tile_only=OVERWRITTEN, last_tile_only__sum=OVERWRITTEN)


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
    plain=tuple(_rounded(form) for form in (_online, *SOFTMAXES)),
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
