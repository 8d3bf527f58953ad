"""Exercise 4.3: the forward kernel, without a mask."""

from __future__ import annotations

import math

import torch

from course_lib.checker import TRITON, Allocates, Case, Exercise, LaunchesTriton, Mistake, Moves
from exercises.ch04_triton_tiling.parts import (
    BIG,
    OUTSIDE,
    SKIPS_THE_WORK,
    TILE,
    far_below,
    layout_case,
    makes_whole_matrix,
    matrices,
    of_every_kernel,
    outputs_only,
    overflowing,
    read_as_contiguous,
    rereads_queries,
    tiled_bytes,
)
from exercises.ch04_triton_tiling.sentences import (
    ACCUMULATOR_NOT_RESCALED,
    DIVIDED_AT_EVERY_TILE,
    FIRST_TILE_ONLY,
    KEYS_AS_VALUES,
    LAST_TILE_SKIPPED,
    LOG2E_MISSING,
    MAXIMUM_NOT_UPDATED,
    NATURAL_EXP,
    NO_RUNNING_MAX,
    NOT_DIVIDED,
    NOTHING_RESCALED,
    SCALE_MISSING,
    SCALE_TWICE,
    STARTS_AT_ZERO,
    STRIDES,
    SUM_NOT_RESCALED,
    TRANSPOSED_KEY,
    WHOLE_MATRIX,
)
from exercises.topics.attention import (
    attention,
    first_keys,
    from_zero,
    last_keys,
    not_divided,
    ordered_rows,
    prescaled,
    reduced_over_queries,
    rounded,
    streamed,
    transposed_by_shape,
    without_running_max,
)


def kernel_oracle(query, key, value):
    return attention(query, key, value)


def kernel_prescaled(query, key, value):
    return prescaled(query, key, value)


def kernel_cases(draw):
    equal = matrices(draw, 1, 64, 128, 16)
    cases = [
        Case("one tile of queries, one of keys", matrices(draw, 1, 64, 64, 32)),
        Case("two heads, 192 × 192", matrices(draw, 2, 192, 192, 32)),
        Case("128 queries, 320 keys", matrices(draw, 1, 128, 320, 16)),
        Case("scores of ±150: exp overflows", matrices(draw, 1, 64, 192, 32, score=BIG)),
        Case("all scores near -200", far_below(draw, 1, 64, 128)),
        Case("scores grow along every row", ordered_rows(draw, 1, 64, 192, 32)),
        Case("scores fall along every row", ordered_rows(draw, 1, 64, 192, 32, descending=True)),
        Case("all scores equal", (torch.zeros_like(equal[0]), *equal[1:])),
        Case("float16, head dimension 64", matrices(draw, 2, 64, 128, 64, dtype=torch.float16)),
        Case("float16, 1024 equal scores, values near 100", overflowing(draw)),
        layout_case(draw, "two heads; q, k and v each stored in another way", 2, 128, 128, 32),
        Case("256 × 256, bytes counted", matrices(draw, 1, 256, 256, 64), metered=True),
    ]
    if draw.on_gpu:
        cases.append(Case("2 heads, 1024 × 2048, float16", matrices(draw, 2, 1024, 2048, 64, dtype=torch.float16)))
    return cases


def _scale(power):
    return lambda q, k, v: attention(q, k, v, scale=q.shape[-1] ** (-0.5 * power))


EXERCISE = Exercise(
    id="4.3",
    title="The forward kernel, without a mask",
    entries=("flash_attention_full",),
    cases=kernel_cases,
    oracle=kernel_oracle,
    plain=(kernel_prescaled, rounded),
    needs=TRITON,
    uses_dot=True,
    requirements=(
        LaunchesTriton(at_most=1),
        Allocates(outputs_only),
        SKIPS_THE_WORK,
        Moves(tiled_bytes),
    ),
    hints=(
        "The loop is that of exercise 4.1: `for first_key in range(0, key_length, BLOCK_N)`. Inside it, load a tile "
        "of keys [BLOCK_N, HEAD_DIM] as the queries were loaded, with the keys' pointer and strides.",
        'scores = tl.dot(query, tl.trans(key_tile), input_precision="ieee") * scale is [BLOCK_M, BLOCK_N]. A row\'s '
        "maximum is tl.max(scores, axis=1), a [BLOCK_M] vector; write new_max[:, None] to subtract it from every "
        "column.",
        "weights = tl.exp(scores - new_max[:, None]); rescale = tl.exp(running_max - new_max). Bring running_sum and "
        "accumulator (as rescale[:, None]) to the new maximum, then add the tile's part, and set running_max = "
        "new_max.",
        "accumulator = accumulator * rescale[:, None] + tl.dot(weights.to(value_tile.dtype), value_tile, "
        'input_precision="ieee"). After the loop: store (accumulator / running_sum[:, '
        "None]).to(output_pointer.dtype.element_ty) at the output's pointers, rows[:, None] * output_stride + "
        "columns[None, :] from output_pointer + head * output_head_stride.",
    ),
    mistakes=(
        Mistake("no_running_max", NO_RUNNING_MAX, result=without_running_max),
        Mistake("maximum_starts_at_zero", STARTS_AT_ZERO, result=lambda q, k, v: from_zero(q, k, v, lost=math.nan)),
        Mistake(
            "accumulator_not_rescaled",
            ACCUMULATOR_NOT_RESCALED,
            result=lambda q, k, v: streamed(q, k, v, TILE, rescale_accumulator=False),
        ),
        Mistake(
            "sum_not_rescaled", SUM_NOT_RESCALED, result=lambda q, k, v: streamed(q, k, v, TILE, rescale_sum=False)
        ),
        Mistake(
            "nothing_rescaled",
            NOTHING_RESCALED,
            result=lambda q, k, v: streamed(q, k, v, TILE, rescale_sum=False, rescale_accumulator=False),
        ),
        Mistake("maximum_not_updated", MAXIMUM_NOT_UPDATED, result=lambda q, k, v: last_keys(q, k, v, TILE)),
        Mistake("not_divided", NOT_DIVIDED, result=not_divided),
        Mistake(
            "divided_at_every_tile",
            DIVIDED_AT_EVERY_TILE,
            result=lambda q, k, v: streamed(q, k, v, TILE, divided_before=k.shape[1]),
        ),
        Mistake(
            "natural_exp",
            NATURAL_EXP,
            result=lambda q, k, v: attention(q, k, v, scale=math.log2(math.e) / math.sqrt(q.shape[-1])),
        ),
        Mistake(
            "log2e_missing",
            LOG2E_MISSING,
            result=lambda q, k, v: attention(q, k, v, scale=math.log(2) / math.sqrt(q.shape[-1])),
        ),
        Mistake("scale_missing", SCALE_MISSING, result=_scale(0)),
        Mistake("scale_twice", SCALE_TWICE, result=_scale(2)),
        Mistake(
            "softmax_over_queries",
            "Maximum and sum are taken over axis 0, the queries of the tile. The softmax of a query runs over its "
            "keys: "
            "axis=1 of a [BLOCK_M, BLOCK_N] tile.",
            result=lambda q, k, v: reduced_over_queries(q, k, v, TILE, TILE),
        ),
        Mistake("only_first_tile", FIRST_TILE_ONLY, result=lambda q, k, v: normalised_repeats(q, k, v)),
        Mistake("last_tile_skipped", LAST_TILE_SKIPPED, result=lambda q, k, v: first_keys(q, k, v, k.shape[1] - TILE)),
        Mistake(
            "as_many_keys_as_queries",
            "Only as many keys were used as there are queries. The loop runs to `key_length`: is that `key.shape[1]` "
            "in the launcher?",
            result=lambda q, k, v: first_keys(q, k, v, q.shape[1]),
        ),
        Mistake("keys_used_as_values", KEYS_AS_VALUES, result=lambda q, k, v: attention(q, k, k)),
        Mistake("transposed_key", TRANSPOSED_KEY, result=transposed_by_shape),
        Mistake("strides_ignored", STRIDES, result=read_as_contiguous),
        Mistake("writes_the_score_matrix", WHOLE_MATRIX, when=makes_whole_matrix),
        Mistake(
            "queries_reread",
            "The tile of queries is loaded again for every tile of keys. It does not change: load it once, before "
            "the loop.",
            when=rereads_queries,
        ),
        *of_every_kernel(kernel_oracle),
        *OUTSIDE,
    ),
)


def normalised_repeats(query, key, value):
    """The first tile of keys taken again at every step: the softmax over it alone."""
    return first_keys(query, key, value, TILE)
