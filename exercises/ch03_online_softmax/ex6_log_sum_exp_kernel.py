"""Exercise 3.6: the log-sum-exp of long rows, in parts that are merged."""

from __future__ import annotations

import torch

from course_lib.checker import TRITON, Case, Exercise, Forbids, LaunchesTriton, Limits, Mistake, Moves, ReadByKernels
from course_lib.checker.specification.contract import Contract, Level
from course_lib.checker.specification.edits import edits, model_of, without
from course_lib.checker.specification.layouts import CONTIGUOUS, expanded, gaps
from exercises.ch03_online_softmax.plain import (
    INF,
    LOG2_E,
    SHORTCUTS,
    at_least_float32,
    levels,
    lower_than_floors,
    masked_prefix,
    rounded_to_half,
    running_log_sum_exp,
    running_statistics,
    statistics_of,
)
from exercises.topics.evidence import first_access
from exercises.topics.pointers import load
from exercises.topics.rising import MAXIMUM_OF_THE_FIRST_TILE, rising_rows, stays_behind
from exercises.topics.running import FINITE, MASKED, MAXIMUM, NARROW, WITH_THE_MAXIMUM, start, step, tail
from exercises.topics.softmax_inputs import EMPTY_ROWS, MASKS, SCORES, far_below_finite
from exercises.topics.softmax_slips import HALF_PRECISION, LOAD_NOT_MASKED, NO_MAXIMUM, ROW_STRIDE


def lse_oracle(x, parts, block):
    maximum, total = statistics_of(x)
    return maximum + torch.log(total)


def lse_cases(draw):
    masked = masked_prefix(draw, 3, 400, 0)
    masked[0, :], masked[1, :200], masked[2, 100:] = -INF, -INF, -INF
    odd = draw.choice((257, 389, 509))
    cases = [
        Case("2 rows of 512, four parts", (draw.normal(2, 512), 4, 64), metered=True),
        Case(
            f"2 rows of {odd}, a prime, three parts", (draw.normal(2, odd, scale=2.0, shift=-5.0), 3, 64), metered=True
        ),
        Case("one part", (draw.normal(3, 200, shift=3.0), 1, 64), metered=True),
        Case("more parts than elements: 3 in 5 parts", (draw.normal(2, 3), 5, 16)),
        Case("more parts than a tile holds: 6, tiles of 4", (draw.normal(1, 48), 6, 4)),
        Case("ascending rows", (draw.normal(2, 300, scale=3.0).sort(dim=1)[0], 2, 32)),
        Case("2 rows of 40, 160 higher from the second tile on", (rising_rows(draw, 2, 40, 16), 1, 16)),
        Case("a first tile of -inf, then scores near -200", (masked_prefix(draw, 2, 40, 16) - 200.0, 1, 16)),
        Case("descending rows", (draw.normal(2, 300, scale=3.0).sort(dim=1, descending=True)[0], 2, 32)),
        Case("three rows at -1000, 0 and +1000", (levels(draw, 150), 2, 64)),
        Case("4 rows with a gap behind each row", (draw.spread_out(draw.normal(4, 129), 3), 2, 64)),
        Case("masked scores: a whole row, its first half, most of it -inf", (masked, 4, 64)),
        Case("one score near -1e20 in each row, the others -inf", (far_below_finite(3, 37), 2, 16)),
        Case("scores near -20,000", (lower_than_floors(300), 2, 64)),
        # A sum of ones in float16 ends at 2048; weights that are rounded to it add up as they should.
        Case("float16, 2 rows of 3,000 equal scores", (draw.normal(2, 1).half().repeat(1, 3000), 1, 1024)),
        Case("float16, 3 rows of 600", (draw.normal(3, 600, scale=2.0, dtype=torch.float16), 3, 128), metered=True),
    ]
    if draw.on_gpu:
        dtype = torch.bfloat16 if draw.bfloat16 else torch.float16
        cases += [
            Case("32 rows of 128,256, a vocabulary", (draw.normal(32, 128_256, dtype=dtype, scale=4.0), 4, 4096)),
            Case("2 rows of two million and three", (draw.normal(2, 2_000_003), 256, 4096)),
        ]
    return cases


def drawn(draw, *, rows, columns, parts, block, dtype, scores, mask, layout):
    return layout(draw, mask(draw, scores(draw, rows, columns)).to(dtype)), parts, block


CONTRACT = Contract(
    drawn,
    choices={
        "rows": (1, 2, 5),
        "columns": (1, 15, 16, 17, 101),
        "parts": (1, 2, 3, 7),
        "block": (1, 8, 16, 128),
        "dtype": (torch.float32, torch.float16, torch.bfloat16),
        "scores": SCORES,
        "mask": (*MASKS, EMPTY_ROWS),
        "layout": (CONTIGUOUS, Level(gaps, "a gap after each row"), Level(expanded, "one row expanded")),
    },
    says={
        "rows": "x: [rows, columns]",
        "parts": "programs for each row in the first launch, from 1",
        "columns": "the last ones\n            fewer or none",
        "block": "a power of two",
        "dtype": "float32, float16 or bfloat16",
        "mask": "May hold -inf",
        "layout": "rows any stride apart",
    },
    valid=lambda columns, parts, block, **_: parts * -(-columns // parts // block) <= 17,
    most=10,
)


def _in_parts(form):
    """A log-sum-exp [rows, n] -> [rows], of each part and then of the results."""

    def whole(x, parts, block):
        cut = at_least_float32(x).split(-(-x.shape[1] // parts), dim=1)
        return form(torch.stack([form(part, block) for part in cut], dim=1), block)

    return whole


def _by_statistics(base_2):
    def form(x, block):
        maximum, total = running_statistics(x, block, base_2=base_2)
        if base_2:
            return (maximum * LOG2_E + torch.log2(total)) * (1 / LOG2_E)
        return maximum + torch.log(total)

    return form


def _by_one_number(base_2):
    def form(x, block):
        log_sum, unit = running_log_sum_exp(x, block, base_2=base_2)
        return log_sum / unit

    return form


def log_sum_exp(x, parts, block):
    part_length = -(-x.shape[1] // parts)
    partial = launch(x, x.shape[1], x.stride(0), parts, part_length, block)  # [rows, parts]
    return launch(partial, parts, parts, 1, parts, block)[:, 0]


def launch(x, columns, row_stride, parts, part_length, block):
    """[rows, parts]: what the programs of one launch store, over the addresses that they read."""
    first = torch.arange(parts)[:, None] * part_length  # [parts, 1]
    last = torch.clamp(first + part_length, max=columns)
    rows = torch.arange(x.shape[0])[:, None, None]
    running_max, running_sum = start((x.shape[0], parts))
    for begin in range(0, part_length, block):
        offsets = first + begin + torch.arange(block)  # [parts, block]
        tile = load(x, rows * row_stride + offsets, offsets < last, -INF)  # [rows, parts, block]
        new_max, new_sum, _, _ = step(tile, running_max, running_sum, x.dtype)
        walks = (first + begin < last)[:, 0]  # [parts]: those whose loop comes here
        running_max, running_sum = torch.where(walks, new_max, running_max), torch.where(walks, new_sum, running_sum)
    log_sum = torch.log(torch.where(running_sum == 0, 1.0, running_sum))
    return (running_max + log_sum).float()


def _steepest_part(x, parts, block):
    """[rows, part_length]: of each row's parts the one that rises most above its first tile."""
    cut = x.double().split(-(-x.shape[1] // parts), dim=1)
    cut = torch.stack(
        [torch.nn.functional.pad(part, (0, cut[0].shape[1] - part.shape[1]), value=-INF) for part in cut], 1
    )
    rise = (cut.amax(-1) - cut[..., :block].amax(-1)).nan_to_num(0.0)
    return cut[torch.arange(len(x)), rise.argmax(dim=1)]


def _nan_where_a_part_is_empty(case, seen, got) -> bool:
    """NaN in rows with a part of nothing but -inf, and nowhere else. A model takes NaN for -inf."""
    x, parts, _ = case.args
    cut = x.float().split(-(-x.shape[1] // parts), dim=1)
    empty = torch.stack([torch.isneginf(part).all(dim=1) for part in cut]).any(dim=0) | (len(cut) < parts)
    return _nan_in(empty, seen, got)


def _nan_where_a_row_is_empty(case, seen, got) -> bool:
    """NaN in all rows of nothing but -inf, of several parts each, and in no other, though some have such a part."""
    x, parts, _ = case.args
    empty = torch.isneginf(x).all(dim=1)
    return parts > 1 and _nan_in(empty, seen, got) and bool(got[empty].isnan().all())


def _nan_in(empty, seen, got) -> bool:
    """Whether NaN is in some of these rows, and in no other."""
    return (
        isinstance(got, torch.Tensor)
        and got.shape == empty.shape
        and not seen.unwritten
        and bool(empty.any())
        and not bool(got[~empty].isnan().any())
        and bool(got[empty].isnan().any())
    )


BASE_2 = (
    "The result mixes base 2 and base e. Either use exp and log throughout, or exp2 of x · log2(e) and, at the end, "
    "log2 divided by log2(e)."
)
NOT_ADDED = "The maximum was not added to the logarithm of the sum: log Σ exp(x) = maximum + log Σ exp(x - maximum)."
PARTS_ADDED = (
    "The parts' log-sum-exps were added up (or averaged). They are logarithms: exponentials add, their logarithms do "
    "not. Merge them with the kernel itself."
)
EMPTY_PART = (
    "A part of nothing but -inf gave NaN: -inf - (-inf) is NaN. Where the new maximum is -inf, subtract 0 instead."
)
EMPTY_MERGE = (
    "The parts of a row of nothing but -inf are merged to NaN: their maximum is -inf, and -inf - (-inf) is NaN. Where "
    "it is -inf, subtract 0 instead."
)
ROUNDED_DOWN = (
    "`part_length` is rounded down, so that the last columns belong to no part. Use `triton.cdiv(columns, parts)`."
)
PAST_LAST = LOAD_NOT_MASKED.replace("columns`", "last`, where `last` is never past `columns`,")
LENGTH, MERGED, RESULT = (
    "-(-x.shape[1] // parts)",
    "launch(partial, parts, parts, 1, parts, block)",
    "running_max + log_sum",
)
EXP, LOG = ("torch.exp(", "torch.exp2("), ("torch.log(", "torch.log2(")
CHANGES = (
    *edits(ROW_STRIDE, row_stride_ignored=("x.stride(0)", "x.shape[1]")),
    *edits(
        ROUNDED_DOWN,
        part_length_rounded_down=(LENGTH, "max(x.shape[1] // parts, 1)"),
        part_length_rounded_down__to_zero=(LENGTH, "x.shape[1] // parts"),
    ),
    *edits(
        "The second launch gets the first one's `part_length`. Its rows are `parts` numbers long, and one program "
        "takes them all: pass it `parts`.",
        second_launch_by_the_first_length=("1, parts, block)", "1, part_length, block)"),
    ),
    *edits(
        PARTS_ADDED,
        parts_added=(f"{MERGED}[:, 0]", "partial.sum(1)"),
        parts_added__averaged=(f"{MERGED}[:, 0]", "partial.mean(1)"),
    ),
    *edits(
        "The merged result is the largest of the parts' log-sum-exps. The others count too: take the log-sum-exp "
        "of them.",
        only_the_maximum_merged=(f"{MERGED}[:, 0]", "partial.amax(1)"),
    ),
    *edits(
        "Only the first part of each row counted. The second launch must read all `parts` results of a row.",
        first_part_only=(MERGED, "launch(partial, 1, parts, 1, 1, block)"),
    ),
    *edits(
        "A part begins at its number times BLOCK. It begins at part * part_length.",
        parts_by_the_block=("[:, None] * part_length", "[:, None] * block"),
    ),
    *edits(
        "Every part begins at the row's first column, so that elements are counted several times. A part begins at "
        "part * part_length.",
        every_part_from_the_start=(
            *("offsets = first + begin", "offsets = begin", "walks = (first + begin <", "walks = (begin <"),
            *("range(0, part_length, block)", "range(0, part_length * parts, block)"),
        ),
    ),
    *edits(
        "The parts' results are stored [parts, rows], and read as [rows, parts]: part p of row r belongs at "
        "row * tl.num_programs(1) + part.",
        parts_before_rows=(f"({RESULT}).float()", f"({RESULT}).float().T.contiguous().view(-1, parts)"),
    ),
    *edits(
        "Only the first tile of each part counted: the kernel needs a loop over the part's tiles.",
        only_first_tile=("range(0, part_length, block)", "range(0, min(part_length, block), block)"),
    ),
    *edits(
        "The last tile of each part is never read. A loop over `range(first, last, BLOCK)` covers them all.",
        last_tile_skipped=("first + begin < last", "first + begin < last - block"),
    ),
    *edits(
        "The last, partly filled tile of a part is never read. Loop over `range(first, last, BLOCK)` and mask.",
        partial_tile_skipped=("first + begin < last", "first + begin + block - 1 < last"),
    ),
    *edits(
        "The parts read past their own end, to the end of a tile, so elements of the next part were counted twice. "
        "Mask with the end of the part, `offsets < last`, and not only with the end of the row.",
        parts_overlap=("offsets < last", "offsets < columns"),
    ),
    *edits(
        NO_MAXIMUM,
        no_running_max=(MAXIMUM, "torch.zeros_like(running_max)", RESULT, "torch.log(running_sum)"),
    ),
    *without(WITH_THE_MAXIMUM, "no_running_max", "base_2__exp2_for_exp", "magnitudes_for_maximum"),
    *edits(
        NOT_ADDED,
        maximum_not_added_back=(RESULT, "torch.log(running_sum)"),
        maximum_not_added_back__guarded=(RESULT, "log_sum"),
    ),
    *edits(
        "The maximum is subtracted from the logarithm of the sum. Add it.",
        maximum_subtracted=(RESULT, "log_sum - running_max"),
    ),
    *edits(
        "The running sum itself is added. Add its logarithm to the maximum.",
        logarithm_missing=(RESULT, "running_max + running_sum"),
    ),
    *edits(
        "The running maximum alone is stored. Add the logarithm of the sum to it.",
        only_the_maximum_stored=(RESULT, "running_max"),
    ),
    *edits(
        BASE_2,
        base_2=LOG,
        base_2__exp2_for_exp=EXP,
        base_2__of_everything=(*EXP, *LOG),
        base_2__returned_in_its_units=(MERGED, f"{MERGED} * LOG2_E"),
        base_2__folded_and_not_unfolded=(RESULT, f"({RESULT}) * LOG2_E"),
    ),
    *tail("offsets < last"),
    *edits(
        "A part without columns stores nothing, and the second launch reads memory that no one wrote. Store -inf "
        "for such a part.",
        empty_part_not_stored=(f"({RESULT}).float()", f"torch.where((first < columns)[:, 0], {RESULT}, torch.nan)"),
    ),
    *edits(PAST_LAST, load_not_masked=("offsets < last, -INF", "None")),
    *MASKED,
    *edits(
        EMPTY_MERGE,
        empty_merge_nan=(
            f"{MERGED}[:, 0]",
            "partial.amax(1) + torch.log(torch.exp(partial - partial.amax(1, keepdim=True)).sum(1))",
        ),
    ),
    *NARROW,
    *FINITE,
    *edits(
        "The parts' results are kept in x's dtype between the launches, which rounds them to 16 bits. Keep them in "
        "float32.",
        cast_before_the_sum__partial_results=("launch(partial,", "launch(partial.to(x.dtype).float(),"),
    ),
    *edits("", loop_to_the_end_of_the_part=("first + begin < last", "first + begin < first + part_length")),
)
MODEL = model_of(log_sum_exp, CHANGES, (start, step, launch)).with_only(empty_state_nan=EMPTY_PART)


EXERCISE = Exercise(
    id="3.6",
    title="Log-sum-exp of long rows, in parts",
    entries=("log_sum_exp",),
    cases=lse_cases,
    oracle=lse_oracle,
    contracts=(CONTRACT,),
    models=(MODEL,),
    plain=(
        *(_in_parts(form(base_2)) for form in (_by_statistics, _by_one_number) for base_2 in (False, True)),
        lambda x, parts, block: torch.logsumexp(at_least_float32(x), dim=1),
    ),
    needs=TRITON,
    limits=Limits(seconds=8.0),
    requirements=(
        LaunchesTriton(),
        Forbids(SHORTCUTS),
        ReadByKernels((0,)),
        # Every element once, the result once; a few numbers for each part on top.
        Moves(lambda x, parts, block: x.numel() * x.element_size() + 4 * x.shape[0] * (1 + 6 * parts), slack=1.02),
    ),
    hints=(
        "The kernel is the first loop of 3.5, over a part of a row. At the end it stores one number.",
        "The number is `running_max + tl.log(running_sum)`. For a part of nothing but -inf both terms are -inf, and so "
        "is their sum, which is the result you want.",
        "The second launch is the same kernel with the parts' results as its input: one program a row, `columns = "
        "parts`, one part. The log-sum-exp of log-sum-exps is the log-sum-exp of the whole.",
        "Program (row, part) covers the columns from `part * part_length` to `min((part + 1) * part_length, columns)`. "
        "Loop `for start in range(first, last, BLOCK)` and mask with `offsets < last`, not with `columns`.",
        "Launcher: `part_length = triton.cdiv(columns, parts)`; `partial = torch.empty(rows, parts, "
        "dtype=torch.float32, device=x.device)`; `result` likewise, of `rows` elements; "
        "`log_sum_exp_kernel[(rows, parts)](x, partial, columns, x.stride(0), part_length, BLOCK=block)`; then "
        "`log_sum_exp_kernel[(rows, 1)](partial, result, parts, parts, parts, BLOCK=block)`. "
        "The kernel stores at `result_pointer + row * tl.num_programs(1) + part`.",
    ),
    mistakes=(
        Mistake(
            "maximum_of_the_first_tile",
            MAXIMUM_OF_THE_FIRST_TILE,
            when=stays_behind(_steepest_part, lambda x, parts, block: block),
            every=True,
        ),
        Mistake(
            "store_not_masked",
            "A store reaches past the end of the results. A program stores one number, at `row * parts + part`, and "
            "the result has room for rows × parts. Are two strides or the grid's axes exchanged?",
            when=first_access("writes"),
        ),
        Mistake(
            "load_not_masked",
            LOAD_NOT_MASKED.replace("columns`", "last`, where `last` is never past `columns`,"),
            when=first_access("reads"),
        ),
        Mistake("empty_merge_nan", EMPTY_MERGE, when=_nan_where_a_row_is_empty, every=True),
        Mistake("empty_state_nan", EMPTY_PART, when=_nan_where_a_part_is_empty, every=True),
        Mistake("cast_before_the_sum", HALF_PRECISION, when=rounded_to_half(lse_oracle), every=True),
    ),
)
