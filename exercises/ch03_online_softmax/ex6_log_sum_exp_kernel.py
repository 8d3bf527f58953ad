"""Exercise 3.6: the log-sum-exp of long rows, in parts that are merged."""

from __future__ import annotations

import torch

from course_lib.checker import TRITON, Case, Exercise, Forbids, LaunchesTriton, Limits, Mistake, Moves
from exercises.ch03_online_softmax.slips import (
    CAST_BEFORE_THE_SUM,
    INF,
    LOAD_NOT_MASKED,
    LOG2_E,
    NO_MAXIMUM,
    SHORTCUTS,
    SUM_NOT_RESCALED,
    TILE_NOT_RESCALED,
    at_least_float32,
    levels,
    masked_prefix,
    near,
    padded,
    reference_of,
    running_statistics,
    statistics_of,
)
from exercises.topics.evidence import NAN_FROM_THE_START, all_nan, first_access


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
        Case("one element, one part", (draw.normal(1, 1, scale=50.0), 1, 16)),
        Case("more parts than elements: 3 in 5 parts", (draw.normal(2, 3), 5, 16)),
        Case("ascending rows", (draw.normal(2, 300, scale=3.0).sort(dim=1)[0], 2, 32)),
        Case("descending rows", (draw.normal(2, 300, scale=3.0).sort(dim=1, descending=True)[0], 2, 32)),
        Case("logits to ±200", (draw.normal(3, 200, scale=80.0), 3, 32)),
        Case("three rows at -1000, 0 and +1000", (levels(draw, 150), 2, 64)),
        Case("all elements equal", (draw.normal(1, 1, scale=20.0).repeat(2, 130), 2, 64)),
        Case("4 rows with a gap behind each row", (draw.spread_out(draw.normal(4, 129), 3), 2, 64)),
        Case("masked scores: a whole row, its first half, most of it -inf", (masked, 4, 64)),
        Case("float16, 3 rows of 600", (draw.normal(3, 600, scale=2.0, dtype=torch.float16), 3, 128), metered=True),
    ]
    if draw.on_gpu:
        dtype = torch.bfloat16 if draw.bfloat16 else torch.float16
        cases += [
            Case("32 rows of 128,256, a vocabulary", (draw.normal(32, 128_256, dtype=dtype, scale=4.0), 4, 4096)),
            Case("2 rows of two million and three", (draw.normal(2, 2_000_003), 256, 4096)),
        ]
    return cases


def _cut(x, parts):
    """The parts of a row as the exercise defines them; those that begin past its end are empty."""
    return x.split(-(-x.shape[1] // parts), dim=1)


def _part_results(x, parts, block, **mistakes):
    results = [running_statistics(part, block, **mistakes) for part in _cut(x, parts)]
    return torch.stack([maximum + torch.log(total) for maximum, total in results], dim=1)


def _lse_with(**mistakes):
    """The kernel run twice with a step left out: over the row's parts, then over their results."""

    def result(x, parts, block):
        partial = _part_results(at_least_float32(x), parts, block, **mistakes)
        return _part_results(partial, 1, block, **mistakes)[:, 0]

    return result


def _twice(one):
    """What a wrong log-sum-exp of [rows, n] gives when it is applied to the parts and to their results."""

    def result(x, parts, block):
        # Parts that begin past the end of the row are empty: their log-sum-exp is -inf whatever the mistake.
        partial = torch.stack([one(part, block) for part in _cut(at_least_float32(x), parts)], dim=1)
        empty = torch.full((x.shape[0], parts - partial.shape[1]), -INF, dtype=partial.dtype)
        return one(torch.cat([partial, empty], dim=1), block)

    return result


def _no_maximum_lse(x, block):
    return torch.log(torch.exp(x.float()).sum(dim=1))


def _maximum_dropped(x, block):
    return torch.log(statistics_of(x)[1])


def _log2_of_sum(x, block):
    maximum, total = statistics_of(x)
    return maximum + torch.log2(total)


def _in_base_2(x, block):
    maximum = x.amax(dim=1)
    return maximum + torch.log2(torch.exp2(x - reference_of(maximum)[:, None]).sum(dim=1))


def _powers_of_2(x, block):
    maximum = x.amax(dim=1)
    return maximum + torch.log(torch.exp2(x - reference_of(maximum)[:, None]).sum(dim=1))


def _units_of_log_2(x, parts, block):
    return lse_oracle(x, parts, block) * LOG2_E


def _units_of_log_2_twice(x, block):
    maximum, total = statistics_of(x)
    return (maximum + torch.log(total)) * LOG2_E


def _parts_added(x, parts, block):
    return _part_results(x, parts, block).sum(dim=1) if parts > 1 and len(_cut(x, parts)) == parts else None


def _parts_averaged(x, parts, block):
    return _part_results(x, parts, block).mean(dim=1) if len(_cut(x, parts)) == parts else None


def _tail_scored(x, parts, block):
    """Lanes past the end of a part loaded as 0, in both runs."""
    length = -(-x.shape[1] // parts)
    tiles = torch.nn.functional.pad(at_least_float32(x), (0, parts * length - x.shape[1]), value=0.0)
    partial = lse_oracle(padded(tiles.view(x.shape[0], parts, length), block, 0.0), parts, block)
    return lse_oracle(padded(partial, block, 0.0), parts, block)


def _first_tiles(x, parts, block):
    partial = torch.stack([lse_oracle(part[:, :block], 1, block) for part in _cut(x, parts)], dim=1)
    return lse_oracle(partial[:, :block], 1, block)


def _overlapping(x, parts, block):
    """Each part counted up to the end of its last tile, as far as the row goes."""
    length = -(-x.shape[1] // parts)
    reach = -(-length // block) * block
    results = [
        lse_oracle(x[:, p * length : p * length + reach], 1, block) for p in range(parts) if p * length < x.shape[1]
    ]
    return lse_oracle(torch.stack(results, dim=1), 1, block)


def _nan_where_a_part_is_empty(case, seen, got) -> bool:
    x, parts, _ = case.args
    cut = _cut(x.float(), parts)
    empty = torch.stack([torch.isneginf(part).all(dim=1) for part in cut]).any(dim=0) | (len(cut) < parts)
    return (
        isinstance(got, torch.Tensor)
        and got.shape == empty.shape
        and not seen.unwritten
        and bool(empty.any())
        and not bool(got[~empty].isnan().any())
        and bool(got[empty].isnan().any())
    )


def _lse_stride_ignored(case, got) -> bool:
    x = case.args[0]
    if x.is_contiguous() or not isinstance(got, torch.Tensor) or got.shape != x.shape[:1]:
        return False
    flat = x.as_strided(((x.shape[0] - 1) * x.stride(0) + x.shape[1],), (1,))[: x.numel()]
    return near(got, lse_oracle(flat.reshape(x.shape), 1, 1), 2e-3)


EXERCISE = Exercise(
    id="3.6",
    title="Log-sum-exp of long rows, in parts",
    entries=("log_sum_exp",),
    cases=lse_cases,
    oracle=lse_oracle,
    plain=(_lse_with(), _lse_with(base_2=True), lambda x, parts, block: torch.logsumexp(at_least_float32(x), dim=1)),
    needs=TRITON,
    limits=Limits(seconds=8.0),
    requirements=(
        LaunchesTriton(),
        Forbids((*SHORTCUTS, "exp", "exp2", "log", "max", "amax", "sum")),
        # Every element once, the result once; a few numbers for each part on top.
        Moves(lambda x, parts, block: x.numel() * x.element_size() + 4 * x.shape[0] * (1 + 6 * parts), slack=1.02),
    ),
    hints=(
        "The kernel is the first loop of 3.5 over a part of a row, and at its end one number is stored instead of a "
        "row being written.",
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
        Mistake("no_running_max", NO_MAXIMUM, result=_twice(_no_maximum_lse)),
        Mistake(
            "maximum_not_added_back",
            "The logarithm of the sum is there and the maximum is not: log Σ exp(x) = maximum + log Σ exp(x - "
            "maximum).",
            result=_twice(_maximum_dropped),
        ),
        Mistake(
            "base_2",
            "The result mixes base 2 and base e. Either use exp and log throughout, or exp2 of x · log2(e) and, at "
            "the end, log2 divided by log2(e).",
            result=(
                _twice(_in_base_2),
                _twice(_log2_of_sum),
                _twice(_powers_of_2),
                _units_of_log_2,
                _twice(_units_of_log_2_twice),
            ),
        ),
        Mistake(
            "sum_not_rescaled",
            SUM_NOT_RESCALED,
            result=(_lse_with(rescale=False), _lse_with(rescale=False, guard=False)),
        ),
        Mistake("nan_from_the_start", NAN_FROM_THE_START, when=all_nan, every=True),
        Mistake("tile_not_rescaled", TILE_NOT_RESCALED, result=_lse_with(rescale_tile=False)),
        Mistake(
            "parts_added",
            "The parts' log-sum-exps were added up (or averaged). They are logarithms: exponentials add, their "
            "logarithms do not. Merge them with the kernel itself.",
            result=(_parts_added, _parts_averaged),
        ),
        Mistake(
            "only_the_maximum_merged",
            "The merged result is the largest of the parts' log-sum-exps. The others count too: take the log-sum-exp "
            "of them.",
            result=lambda x, parts, block: _part_results(x, parts, block).amax(dim=1),
        ),
        Mistake(
            "first_part_only",
            "Only the first part of each row counted. The second launch must read all `parts` results of a row.",
            result=lambda x, parts, block: lse_oracle(_cut(x, parts)[0], 1, block),
        ),
        Mistake(
            "only_first_tile",
            "Only the first tile of each part counted: the kernel needs a loop over the part's tiles.",
            result=_first_tiles,
        ),
        Mistake(
            "parts_overlap",
            "Parts ran past their own end, up to the end of a tile, and counted their neighbours' elements again. "
            "Mask with the end of the part, `offsets < last`, and not only with the end of the row.",
            result=lambda x, parts, block: _overlapping(x, parts, block),
        ),
        Mistake(
            "tail_not_masked",
            "Lanes past the end of a part were scored as zeros, and each added exp(0 - maximum) to the sum. Load them "
            'as `other=float("-inf")`.',
            result=_tail_scored,
        ),
        Mistake(
            "store_not_masked",
            "A store reaches past the end of the results. A program stores one number, at `row * parts + part`, and "
            "the result has room for rows × parts. Are two strides or the grid's axes exchanged?",
            when=first_access("writes"),
        ),
        Mistake("load_not_masked", LOAD_NOT_MASKED.replace("columns`", "last`"), when=first_access("reads")),
        Mistake(
            "empty_state_nan",
            "A part of nothing but -inf gave NaN: -inf - (-inf) is NaN. Where the new maximum is -inf, subtract 0 "
            "instead.",
            result=_lse_with(guard=False),
            when=_nan_where_a_part_is_empty,
            every=True,
        ),
        Mistake(
            "row_stride_ignored",
            "Rows were read as if they followed each other without a gap. Row r begins at `r * row_stride`.",
            when=lambda case, seen, got: _lse_stride_ignored(case, got),
        ),
        Mistake(
            "cast_before_the_sum",
            CAST_BEFORE_THE_SUM,
            when=lambda case, seen, got: (
                case.args[0].dtype == torch.float16
                and isinstance(got, torch.Tensor)
                and near(got, lse_oracle(*case.args), 5e-3)
            ),
            every=True,
        ),
    ),
)
