"""Exercise 4.1: tiled attention in PyTorch."""

from __future__ import annotations

import math

import torch

from course_lib.checker import Allocates, Case, Exercise, Forbids, Mistake
from exercises.ch04_triton_tiling.parts import BIG, far_below, matrices
from exercises.topics.attention import (
    attention,
    first_keys,
    from_zero,
    last_keys,
    merged,
    normalised_per_tile,
    not_divided,
    ordered_rows,
    prescaled,
    rounded,
    streamed,
    without_running_max,
)
from exercises.topics.attention_sentences import (
    ACCUMULATOR_NOT_RESCALED,
    DIVIDED_AT_EVERY_TILE,
    LAST_TILE_SKIPPED,
    MAXIMUM_NOT_UPDATED,
    NO_RUNNING_MAX,
    NOT_DIVIDED,
    NOTHING_RESCALED,
    PER_TILE,
    SCALE_MISSING,
    SCALE_TWICE,
    STARTS_AT_ZERO,
    SUM_NOT_RESCALED,
    TRANSPOSED_KEY,
    WHOLE_MATRIX,
)
from exercises.topics.evidence import NAN_FROM_THE_START, all_nan


def tiled_oracle(query, key, value, query_rows, key_rows):
    return attention(query, key, value)


def tiled_prescaled(query, key, value, query_rows, key_rows):
    return prescaled(query, key, value)


def tiled_merged(query, key, value, query_rows, key_rows):
    return merged(query, key, value, key_rows)


def tiled_rounded(query, key, value, query_rows, key_rows):
    return rounded(query, key, value)


def tiled_cases(draw):
    def case(name, query_length, key_length, head_dim, query_rows, key_rows, score=1.0):
        query, key, value = (matrix[0] for matrix in matrices(draw, 1, query_length, key_length, head_dim, score=score))
        return Case(name, (query, key, value, query_rows, key_rows))

    prime = draw.choice((131, 197, 211))
    ascending, descending = (tuple(m[0] for m in ordered_rows(draw, 1, 60, 230, 16, flag)) for flag in (False, True))
    return [
        case("256 × 256 in tiles of 64 × 32: nothing left over", 256, 256, 16, 64, 32),
        case("one query, one key", 1, 1, 8, 16, 16),
        case(f"{prime} queries, 301 keys, tiles of 32 × 64", prime, 301, 16, 32, 64),
        case("90 queries, 33 keys: one more than a tile of 32", 90, 33, 8, 16, 32),
        case("scores of ±150: exp overflows", 100, 200, 32, 32, 32, score=BIG),
        Case("all scores near -200", (*(m[0] for m in far_below(draw, 1, 40, 70)), 32, 32)),
        Case("scores grow along every row", (*ascending, 32, 32)),
        Case("scores fall along every row", (*descending, 32, 32)),
        case("the whole of K and V in one tile", 64, 100, 16, 16, 128),
    ]


EXERCISE = Exercise(
    id="4.1",
    title="Tiled attention in PyTorch",
    entries=("tiled_attention",),
    cases=tiled_cases,
    oracle=tiled_oracle,
    plain=(tiled_prescaled, tiled_merged, tiled_rounded),
    requirements=(
        Allocates(lambda q, k, v, rows, keys: max(q.numel(), k.numel(), rows * max(keys, q.shape[-1]))),
        Forbids(("scaled_dot_product", "scaled_dot_product_attention")),
    ),
    hints=(
        "Two loops: the outer one takes `query_rows` queries, the inner one walks over all keys, `key_rows` at a "
        "time. Python slices end at the tensor's end by themselves, so a smaller last tile needs no special care.",
        "For each tile of queries start with running_max = -inf and running_sum = 0, both [rows, 1], and an "
        "accumulator of zeros [rows, head_dim]. The inner step is the update of exercise 3.4, with a row for every "
        "query.",
        "new_max = torch.maximum(running_max, scores.amax(dim=1, keepdim=True)); weights = torch.exp(scores - "
        "new_max); rescale = torch.exp(running_max - new_max).",
        "running_sum = running_sum * rescale + weights.sum(dim=1, keepdim=True) and accumulator = accumulator * "
        "rescale + weights @ value_tile. After the inner loop: output[first : first + query_rows] = accumulator / "
        "running_sum.",
    ),
    mistakes=(
        Mistake("no_running_max", NO_RUNNING_MAX, result=lambda q, k, v, rows, keys: without_running_max(q, k, v)),
        Mistake(
            "maximum_starts_at_zero",
            STARTS_AT_ZERO,
            result=lambda q, k, v, rows, keys: from_zero(q, k, v, lost=math.nan),
        ),
        Mistake(
            "maximum_not_updated",
            MAXIMUM_NOT_UPDATED,
            result=lambda q, k, v, rows, keys: last_keys(q, k, v, keys),
        ),
        Mistake("not_divided", NOT_DIVIDED, result=lambda q, k, v, rows, keys: not_divided(q, k, v)),
        Mistake(
            "divided_at_every_tile",
            DIVIDED_AT_EVERY_TILE,
            result=lambda q, k, v, rows, keys: streamed(q, k, v, keys, divided_before=k.shape[0]),
        ),
        Mistake("nan_from_the_start", NAN_FROM_THE_START, when=all_nan, every=True),
        Mistake(
            "accumulator_not_rescaled",
            ACCUMULATOR_NOT_RESCALED,
            result=lambda q, k, v, rows, keys: streamed(q, k, v, keys, rescale_accumulator=False),
        ),
        Mistake(
            "sum_not_rescaled",
            SUM_NOT_RESCALED,
            result=lambda q, k, v, rows, keys: streamed(q, k, v, keys, rescale_sum=False),
        ),
        Mistake(
            "nothing_rescaled",
            NOTHING_RESCALED,
            result=lambda q, k, v, rows, keys: streamed(q, k, v, keys, rescale_sum=False, rescale_accumulator=False),
        ),
        Mistake("scale_missing", SCALE_MISSING, result=lambda q, k, v, rows, keys: attention(q, k, v, scale=1.0)),
        Mistake(
            "scale_twice", SCALE_TWICE, result=lambda q, k, v, rows, keys: attention(q, k, v, scale=1 / q.shape[-1])
        ),
        Mistake("normalised_per_tile", PER_TILE, result=lambda q, k, v, rows, keys: normalised_per_tile(q, k, v, keys)),
        Mistake(
            "last_tile_skipped",
            LAST_TILE_SKIPPED,
            result=lambda q, k, v, rows, keys: first_keys(q, k, v, (-(-k.shape[-2] // keys) - 1) * keys),
        ),
        Mistake(
            "tail_keys_dropped",
            "The keys of the last, smaller tile are missing: the number of tiles was rounded down. Use "
            "`range(0, key_length, key_rows)`, or round up with `-(-key_length // key_rows)`.",
            result=lambda q, k, v, rows, keys: first_keys(q, k, v, k.shape[-2] // keys * keys),
        ),
        Mistake("transposed_key", TRANSPOSED_KEY, result=lambda q, k, v, rows, keys: _reshaped_tiles(q, k, v, keys)),
        Mistake(
            "writes_the_score_matrix",
            WHOLE_MATRIX,
            when=lambda case, seen, got: (
                seen.largest_allocation
                >= case.args[0].shape[0] * case.args[1].shape[0]
                > max(case.args[3] * case.args[4], case.args[0].numel(), case.args[1].numel())
            ),
        ),
        Mistake(
            "a_row_of_scores",
            "A tile of queries meets all keys at once, so the scores grow with key_length. Cut the keys into "
            "tiles too.",
            when=lambda case, seen, got: (
                seen.largest_allocation
                == case.args[3] * case.args[1].shape[0]
                > max(case.args[3] * case.args[4], case.args[0].numel(), case.args[1].numel())
            ),
        ),
    ),
)


def _reshaped_tiles(query, key, value, key_rows):
    tiles = [key[start : start + key_rows] for start in range(0, key.shape[0], key_rows)]
    return attention(query, torch.cat([tile.reshape(tile.shape[1], tile.shape[0]).T for tile in tiles]), value)
