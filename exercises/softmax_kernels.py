"""Exercises 3.5 and 3.6: the online softmax as a kernel, and the log-sum-exp of long rows in parts."""

from __future__ import annotations

import math

import torch

from course_lib.checker import Case, Exercise, Forbids, LaunchesTriton, Limits, Mistake, Moves
from exercises.seen_slips import NAN_FROM_THE_START, all_nan, first_access
from exercises.softmax_slips import (
    CAST_BEFORE_THE_SUM,
    INF,
    LOAD_NOT_MASKED,
    LOG2_E,
    NO_MAXIMUM,
    SHORTCUTS,
    STORE_NOT_MASKED,
    SUM_NOT_RESCALED,
    TILE_NOT_RESCALED,
    at_least_float32,
    by_lanes,
    by_log_sum_exp,
    levels,
    masked_prefix,
    naive_softmax,
    near,
    padded,
    reference_of,
    running_statistics,
    softmax_of,
    softmax_per_tile,
    statistics_of,
)


def online_oracle(x, block):
    return softmax_of(at_least_float32(x)).to(x.dtype)


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
        Case("rows of one element", (draw.normal(2, 1, scale=50.0), 16)),
        Case("one more than a tile: 129 in tiles of 128", (draw.normal(2, 129), 128), metered=True),
        Case("one less than a tile: 63 in tiles of 64", (draw.normal(2, 63), 64)),
        Case("ascending rows: the maximum grows at every tile", (draw.normal(2, 400, scale=3.0).sort(dim=1)[0], 64)),
        Case("descending rows", (draw.normal(2, 300, scale=3.0).sort(dim=1, descending=True)[0], 64)),
        Case("logits to ±200", (draw.normal(2, 300, scale=80.0), 128)),
        Case("three rows at -1000, 0 and +1000", (levels(draw, 150), 64)),
        Case("3 rows with a gap behind each row", (draw.spread_out(draw.normal(3, 129), 3), 64)),
        Case("a first tile of -inf", (masked, 64)),
        Case("float16, 2 rows of 1000", (draw.normal(2, 1000, scale=2.0, dtype=torch.float16), 256), metered=True),
        Case(
            "float16, 70,001 equal scores: their sum is more than float16 holds",
            (torch.full((1, 70_001), float(draw.integer(-3, 4)), dtype=torch.float16), 8192),
        ),
        Case("a row of 1,048,583, more than a tile may hold", (draw.normal(1, 1_048_583), 8192)),
    ]
    if draw.on_gpu:
        dtype = torch.bfloat16 if draw.bfloat16 else torch.float16
        cases.append(Case("64 rows of 50,257, a vocabulary", (draw.normal(64, 50_257, dtype=dtype, scale=4.0), 4096)))
    return cases


def _unwritten_after(x, count):
    x = x.clone()
    x[:, count:] = math.nan
    return x


def _from_statistics(x, block, **mistakes):
    maximum, total = running_statistics(x, block, **mistakes)
    return torch.exp(at_least_float32(x) - reference_of(maximum)[:, None]) / total[:, None]


def _first_tile_statistics(x, block):
    maximum, total = statistics_of(x[:, :block])
    return torch.exp(x.float() - reference_of(maximum)[:, None].float()) / total[:, None].float()


def _last_tile_statistics_of(x, block):
    maximum, total = statistics_of(x.split(block, dim=1)[-1])
    return torch.exp(x.float() - maximum[:, None].float()) / total[:, None].float()


def _written_in_the_first_pass(x, block):
    """Each tile divided by the sum as it stood when the tile was there."""
    parts, seen = [], 0
    for part in x.split(block, dim=1):
        seen += part.shape[1]
        maximum, total = running_statistics(x[:, :seen], block)
        parts.append(torch.exp(part - reference_of(maximum)[:, None]) / total[:, None])
    return torch.cat(parts, dim=1)


def _zero_start(x, block):
    maximum, total = running_statistics(x.float(), block, start=0.0)
    return torch.exp(x.float() - maximum[:, None]) / total[:, None]


def _stride_ignored(case, seen, got) -> bool:
    x = case.args[0]
    if x.is_contiguous() or not isinstance(got, torch.Tensor) or got.shape != x.shape:
        return False
    flat = x.as_strided(((x.shape[0] - 1) * x.stride(0) + x.shape[1],), (1,))[: x.numel()]
    return near(got, softmax_of(flat.reshape(x.shape)), 2e-3)


def _half_total_overflowed(case, seen, got) -> bool:
    """The long float16 row came out as zeros (a sum of inf), or as if its sum had stopped growing."""
    x = case.args[0]
    if x.dtype != torch.float16 or x.shape[1] < 60_000 or not isinstance(got, torch.Tensor) or got.shape != x.shape:
        return False
    return not bool(got.isnan().any()) and not near(got, online_oracle(*case.args), 2e-2)


def _third_read(case, seen, got) -> bool:
    return case.metered and any(
        counts["loaded"] >= 2.9 * max(counts["distinct_loaded"], 1)
        for counts in seen.traffic.values()
        if counts["distinct_loaded"] >= case.args[0].numel() * case.args[0].element_size()
    )


ONLINE_KERNEL = Exercise(
    id="3.5",
    title="Online softmax kernel for rows longer than a tile",
    entries=("online_softmax",),
    cases=online_cases,
    oracle=online_oracle,
    plain=(
        lambda x, block: _from_statistics(x, block).to(x.dtype),
        lambda x, block: by_lanes(x, block).to(x.dtype),
        lambda x, block: by_log_sum_exp(x, block).to(x.dtype),
        lambda x, block: (
            torch.exp2(at_least_float32(x) * LOG2_E - statistics_of(x)[0][:, None] * LOG2_E)
            / running_statistics(x, block, base_2=True)[1][:, None]
        ).to(x.dtype),
    ),
    needs="triton",
    requirements=(
        LaunchesTriton(),
        Forbids((*SHORTCUTS, "exp", "exp2", "max", "amax", "sum", "div")),
        Moves(lambda x, block: 3 * x.numel() * x.element_size(), slack=1.02),
    ),
    hints=(
        "The kernel has the shape of the naive one: two loops over the row's tiles. The first finds what the second "
        "needs, and it may not run twice. You wrote its body in 3.2.",
        "Here a program owns one row, so running_max and running_sum are two scalars, and `tl.max(tile, axis=0)` and "
        "`tl.sum(weights, axis=0)` turn a tile of [BLOCK] into one.",
        'Lanes past the end of the row must not count: load them as `other=float("-inf")`. Their weight is '
        "exp(-inf) = 0 and they never win a maximum.",
        'Start with `running_max = float("-inf")` and `running_sum = 0.0`. A first tile of -inf makes -inf - '
        '(-inf): use `reference = tl.where(new_max == float("-inf"), 0.0, new_max)` in both exponentials.',
        'First loop: `tile = tl.load(x_row + offsets, mask=offsets < columns, other=float("-inf")).to(tl.float32)`; '
        "`new_max = tl.maximum(running_max, tl.max(tile, axis=0))`; `running_sum = running_sum * "
        "tl.exp(running_max - reference) + tl.sum(tl.exp(tile - reference), axis=0)`; `running_max = new_max`.",
    ),
    mistakes=(
        Mistake(
            "only_first_tile",
            "Only the first tile of each row was written: the kernel has no loop over the tiles, or the loop ends "
            "after one. Walk `for start in range(0, columns, BLOCK)`.",
            result=(
                lambda x, block: torch.cat([softmax_of(x[:, :block]), torch.full_like(x[:, block:], math.nan)], dim=1),
                lambda x, block: _unwritten_after(online_oracle(x, block), block),
            ),
        ),
        Mistake(
            "whole_row_in_one_tile",
            "The tile grows with the row. A tile lies in registers, a few thousand elements at its best: take `block` "
            "elements at a time, and walk along the row.",
            when=lambda case, seen, got: bool(seen.error) and "maximum tensor numel" in seen.error["text"],
        ),
        Mistake(
            "first_tile_statistics",
            "Maximum and sum come from the first tile of the row alone. The first loop must run over all tiles.",
            result=_first_tile_statistics,
        ),
        Mistake(
            "last_tile_only",
            "Maximum and sum are those of the row's last tile: they are overwritten in the loop instead of carried on.",
            result=_last_tile_statistics_of,
        ),
        Mistake("nan_from_the_start", NAN_FROM_THE_START, when=all_nan, every=True),
        Mistake(
            "softmax_per_tile",
            "Each tile was made a softmax of its own. Outputs can be written only when the whole row's "
            "sum is known: in a second loop.",
            result=softmax_per_tile,
        ),
        Mistake(
            "written_in_the_first_pass",
            "Each tile was divided by the sum as it stood at that moment. Later tiles still add to it: write the "
            "outputs in a second loop, after the first has ended.",
            result=_written_in_the_first_pass,
        ),
        Mistake("no_running_max", NO_MAXIMUM, result=lambda x, block: naive_softmax(x)),
        Mistake(
            "sum_not_rescaled",
            SUM_NOT_RESCALED,
            result=(
                lambda x, block: _from_statistics(x, block, rescale=False),
                lambda x, block: _from_statistics(x, block, rescale=False, guard=False),
            ),
        ),
        Mistake(
            "tile_not_rescaled",
            TILE_NOT_RESCALED,
            result=lambda x, block: _from_statistics(x, block, rescale_tile=False),
        ),
        Mistake(
            "max_starts_at_zero",
            "The running maximum starts at 0, so rows far below 0 underflow to 0/0. Start at -inf.",
            result=_zero_start,
        ),
        Mistake(
            "tail_not_masked",
            "The lanes past the end of the row were scored as zeros, and each added exp(0 - maximum) to the sum. Load "
            'them as `other=float("-inf")`, or set their weights to 0.',
            result=lambda x, block: softmax_of(padded(x, block, 0.0))[:, : x.shape[1]],
        ),
        Mistake("store_not_masked", STORE_NOT_MASKED, when=first_access("writes")),
        Mistake("load_not_masked", LOAD_NOT_MASKED, when=first_access("reads")),
        Mistake(
            "empty_state_nan",
            "A tile of nothing but -inf turned the row into NaN: -inf - (-inf) is NaN. Where the new maximum is -inf, "
            "subtract 0 instead.",
            result=lambda x, block: _from_statistics(x, block, guard=False),
        ),
        Mistake(
            "row_stride_ignored",
            "Rows were read as if they followed each other without a gap. Row r begins at `r * x_row_stride`.",
            when=_stride_ignored,
        ),
        Mistake(
            "sum_in_float16",
            "The running sum was kept in float16: it ends at 65,504 and stops growing by ones at 2048. Convert the "
            "tile to float32 when it is loaded, and keep the statistics there.",
            when=_half_total_overflowed,
            every=True,
        ),
        Mistake(
            "three_passes",
            "The kernel reads every element three times: that is the safe softmax. Find maximum and sum in one loop.",
            when=_third_read,
        ),
    ),
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


LOG_SUM_EXP = Exercise(
    id="3.6",
    title="Log-sum-exp of long rows, in parts",
    entries=("log_sum_exp",),
    cases=lse_cases,
    oracle=lse_oracle,
    plain=(_lse_with(), _lse_with(base_2=True), lambda x, parts, block: torch.logsumexp(at_least_float32(x), dim=1)),
    needs="triton",
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
