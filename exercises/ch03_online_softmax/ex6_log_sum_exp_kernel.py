"""Exercise 3.6: the log-sum-exp of long rows, in parts that are merged."""

from __future__ import annotations

import math

import torch

from course_lib.checker import TRITON, Case, Exercise, Forbids, LaunchesTriton, Limits, Mistake, Moves, ReadByKernels
from course_lib.checker.specification.contract import Contract, Level
from course_lib.checker.specification.layouts import CONTIGUOUS, expanded, gaps
from course_lib.checker.specification.model import Model, Slip
from exercises.ch03_online_softmax.plain import (
    INF,
    LOG2_E,
    SHORTCUTS,
    at_least_float32,
    levels,
    masked_prefix,
    rounded_to_half,
    running_log_sum_exp,
    running_statistics,
    statistics_of,
)
from exercises.topics.evidence import first_access
from exercises.topics.memory import load
from exercises.topics.rising import MAXIMUM_OF_THE_FIRST_TILE, rising_rows, stays_behind
from exercises.topics.softmax_inputs import EMPTY_ROWS, MASKS, SCORES, far_below_finite
from exercises.topics.softmax_model import Running, padding
from exercises.topics.softmax_slips import (
    FINITE,
    FINITE_TAIL,
    HALF_PRECISION,
    LOAD_NOT_MASKED,
    MASKED,
    NARROW,
    ROW_STRIDE,
    STYLES,
    SUM_CAST,
    TAIL_SCORED,
    WITH_THE_MAXIMUM,
)


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
        "mask": "May\n            hold -inf",
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


def compute(s, x, parts, block):
    """The kernel over the parts of each row, and once more over their results."""
    rows, columns = x.shape
    length = -(-columns // parts)
    if s("part_length_rounded_down", "part_length_rounded_down__to_zero"):
        length = max(columns // parts, 1 - s("part_length_rounded_down__to_zero"))
    stride = columns if s("row_stride_ignored") else x.stride(0)
    partial = _kernel(s, x, columns, stride, parts, length, block)
    if s("cast_before_the_sum__partial_results"):
        partial = partial.to(x.dtype).float()
    if s("parts_added"):
        result = partial.sum(1)
    elif s("parts_added__averaged"):
        result = partial.mean(1)
    elif s("only_the_maximum_merged"):
        result = partial.amax(1)
    elif s("empty_state_nan__in_the_merge"):
        largest = partial.amax(1, keepdim=True)
        result = (largest + torch.log(torch.exp(partial - largest).sum(1, keepdim=True)))[:, 0]
    else:
        count = 1 if s("first_part_only") else parts
        second = length if s("second_launch_by_the_first_length") else count
        result = _kernel(s, partial, count, parts, 1, second, block)[:, 0]
    if s("base_2__returned_in_its_units"):
        result = result * LOG2_E
    return result


def _kernel(s, x, columns, stride, parts, length, block):
    """[rows, parts]: what the programs of one launch store.

    Style: "loop_to_the_end_of_the_part" walks on where the row has ended, with nothing but masked lanes.
    """
    first = torch.arange(parts) * (block if s("parts_by_the_block") else length)
    last = torch.clamp(first + length, max=columns)
    if s("every_part_from_the_start"):
        first, length = torch.zeros_like(first), length * parts
    stop = first + length if s("loop_to_the_end_of_the_part") else last
    steps = max(-(-length // block), 1)
    lanes = first[:, None] + torch.arange(steps * block)  # [parts, lanes]
    offsets = torch.arange(x.shape[0])[:, None, None] * stride + lanes
    mask = (lanes < (columns if s("parts_overlap") else last[:, None]))[None]
    tiles = load(s, x, offsets, None if s("load_not_masked") else mask, padding(s)).unflatten(2, (steps, block))
    tiles = tiles if s("cast_before_the_sum__everything") else tiles.float()
    running = Running(s, tiles.shape[:2], x.dtype)
    for step in range(1 if s("only_first_tile") else steps):
        begin, end = first + step * block, stop
        if s("partial_tile_skipped"):
            begin = begin + block - 1
        if s("last_tile_skipped"):
            end = stop - block
        running.step(tiles[:, :, step], (begin < end).expand(tiles.shape[:2]))
    result = _log_sum_exp(s, running).float()
    if s("parts_before_rows"):  # in memory
        result = result.T.contiguous().view(result.shape)
    if s("empty_part_not_stored"):
        result[:, first >= columns] = math.nan
    return result


def _log_sum_exp(s, running):
    maximum, total = running.measured_from, running.total
    kept = torch.where(total == 0, 1.0, total)
    if s("maximum_not_added_back"):
        return torch.log(total)
    if s("maximum_not_added_back__guarded"):
        return torch.log(kept)
    if s("maximum_subtracted"):
        return torch.log(kept) - maximum
    if s("logarithm_missing"):
        return maximum + total
    if s("only_the_maximum_stored"):
        return maximum
    if s("base_2", "base_2__of_everything"):
        return maximum + torch.log2(kept)
    if s("base_2__folded_and_not_unfolded"):
        return (maximum + torch.log(kept)) * LOG2_E
    if s("no_running_max"):
        return torch.log(total)
    return maximum + torch.log(kept)


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
MODEL = Model(
    compute,
    (
        Slip("row_stride_ignored", ROW_STRIDE),
        *(
            Slip(
                f"part_length_rounded_down{way}",
                "`part_length` is rounded down, so that the last columns belong to no part. Use `triton.cdiv(columns, "
                "parts)`.",
            )
            for way in ("", "__to_zero")
        ),
        Slip(
            "second_launch_by_the_first_length",
            "The second launch gets the first one's `part_length`. Its rows are `parts` numbers long, and one program "
            "takes them all: pass it `parts`.",
        ),
        Slip("parts_added", PARTS_ADDED),
        Slip("parts_added__averaged", PARTS_ADDED),
        Slip(
            "only_the_maximum_merged",
            "The merged result is the largest of the parts' log-sum-exps. The others count too: take the log-sum-exp "
            "of them.",
        ),
        Slip(
            "first_part_only",
            "Only the first part of each row counted. The second launch must read all `parts` results of a row.",
        ),
        Slip(
            "parts_by_the_block",
            "A part begins at its number times BLOCK. It begins at part * part_length.",
        ),
        Slip(
            "every_part_from_the_start",
            "Every part begins at the row's first column, so that elements are counted several times. A part begins at "
            "part * part_length.",
        ),
        Slip(
            "parts_before_rows",
            "The parts' results are stored [parts, rows], and read as [rows, parts]: part p of row r belongs at "
            "row * tl.num_programs(1) + part.",
        ),
        Slip(
            "only_first_tile",
            "Only the first tile of each part counted: the kernel needs a loop over the part's tiles.",
        ),
        Slip(
            "last_tile_skipped",
            "The last tile of each part is never read. A loop over `range(first, last, BLOCK)` covers them all.",
        ),
        Slip(
            "partial_tile_skipped",
            "The last, partly filled tile of a part is never read. Loop over `range(first, last, BLOCK)` and mask.",
        ),
        Slip(
            "parts_overlap",
            "The parts read past their own end, to the end of a tile, so elements of the next part were counted twice. "
            "Mask with the end of the part, `offsets < last`, and not only with the end of the row.",
        ),
        *(slip for slip in WITH_THE_MAXIMUM if slip.id not in ("base_2__exp2_for_exp", "magnitudes_for_maximum")),
        Slip("maximum_not_added_back", NOT_ADDED),
        Slip("maximum_not_added_back__guarded", NOT_ADDED),
        Slip("maximum_subtracted", "The maximum is subtracted from the logarithm of the sum. Add it."),
        Slip("logarithm_missing", "The running sum itself is added. Add its logarithm to the maximum."),
        Slip("only_the_maximum_stored", "The running maximum alone is stored. Add the logarithm of the sum to it."),
        Slip("base_2", BASE_2),
        Slip("base_2__exp2_for_exp", BASE_2),
        Slip("base_2__of_everything", BASE_2),
        Slip("base_2__returned_in_its_units", BASE_2),
        Slip("base_2__folded_and_not_unfolded", BASE_2),
        Slip("tail_not_masked", TAIL_SCORED),
        *FINITE_TAIL,
        Slip(
            "empty_part_not_stored",
            "A part without columns stores nothing, and the second launch reads memory that no one wrote. Store -inf "
            "for such a part.",
        ),
        Slip("load_not_masked", LOAD_NOT_MASKED.replace("columns`", "last`, where `last` is never past `columns`,")),
        *(slip for slip in MASKED if slip.id != "nan_repaired_at_the_end"),
        Slip("empty_state_nan__in_the_merge", EMPTY_PART),
        *NARROW,
        Slip("sum_in_float16__cut", SUM_CAST),
        *FINITE,
        Slip(
            "cast_before_the_sum__partial_results",
            "The parts' results are kept in x's dtype between the launches, which rounds them to 16 bits. Keep them in "
            "float32.",
        ),
    ),
    styles=(*STYLES, ("loop_to_the_end_of_the_part",)),
).with_only(empty_state_nan=EMPTY_PART)


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
        Mistake("empty_state_nan", EMPTY_PART, when=_nan_where_a_part_is_empty, every=True),
        Mistake("cast_before_the_sum", HALF_PRECISION, when=rounded_to_half(lse_oracle), every=True),
    ),
)
