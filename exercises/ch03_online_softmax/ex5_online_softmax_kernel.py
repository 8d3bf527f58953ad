"""Exercise 3.5: the online softmax as a kernel, for rows longer than a tile."""

from __future__ import annotations

import math

import torch

from course_lib.checker import TRITON, Case, Exercise, Forbids, LaunchesTriton, Mistake, Moves
from exercises.ch03_online_softmax.slips import (
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
from exercises.topics.evidence import NAN_FROM_THE_START, all_nan, first_access


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


EXERCISE = Exercise(
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
    needs=TRITON,
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
            when=lambda case, seen, got: bool(seen.error) and "maximum tensor numel" in seen.error.text,
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
