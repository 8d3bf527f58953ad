"""Exercise 4.4: a causal kernel that skips tiles."""

from __future__ import annotations

import math

import torch

from course_lib.checker import TRITON, Allocates, Case, Exercise, LaunchesTriton, Mistake, Moves
from exercises.ch04_triton_tiling.parts import (
    BIG,
    OUTSIDE,
    SKIPS_THE_WORK,
    TILE,
    causal_bytes,
    causal_mask,
    causal_pairs,
    far_below,
    layout_case,
    matrices,
    of_every_kernel,
    outputs_only,
    overflowing,
    tiled_bytes,
)
from exercises.topics.attention import (
    attention,
    close_to,
    from_zero,
    hidden_scored,
    not_divided,
    ordered_rows,
    prescaled,
    rounded,
    scores_of,
    streamed,
    visible_pairs,
    without_running_max,
)
from exercises.topics.attention_sentences import (
    ACCUMULATOR_NOT_RESCALED,
    DIVIDED_AT_EVERY_TILE,
    EMPTY_ROW,
    HIDDEN_SCORED_ZERO,
    KEYS_AS_VALUES,
    LOG2E_MISSING,
    MAXIMUM_NOT_UPDATED,
    MISALIGNED,
    NATURAL_EXP,
    NEXT_KEY,
    NO_CAUSAL_MASK,
    NO_RUNNING_MAX,
    NOT_DIVIDED,
    NOTHING_RESCALED,
    OFF_BY_ONE,
    SCALE_MISSING,
    SCALE_TWICE,
    SKIPS_TOO_MUCH,
    STARTS_AT_ZERO,
    SUM_NOT_RESCALED,
)


def causal_oracle(query, key, value):
    return attention(query, key, value, visible_pairs(query.shape[1], key.shape[1]))


def causal_prescaled(query, key, value):
    return prescaled(query, key, value, visible_pairs(query.shape[1], key.shape[1]))


def causal_rounded(query, key, value):
    return rounded(query, key, value, visible_pairs(query.shape[1], key.shape[1]))


def causal_cases(draw):
    cases = [
        Case("one tile, on the diagonal", matrices(draw, 1, 64, 64, 32)),
        Case("two heads, 192 × 192", matrices(draw, 2, 192, 192, 32)),
        Case("64 queries at the end of 256 keys", matrices(draw, 1, 64, 256, 32)),
        Case("128 queries, 64 keys: the first 64 queries see nothing", matrices(draw, 1, 128, 64, 32)),
        Case("scores of ±150: exp overflows", matrices(draw, 1, 128, 128, 32, score=BIG)),
        Case("all scores near -200", far_below(draw, 1, 64, 128)),
        Case("scores grow along every row", ordered_rows(draw, 1, 128, 128, 16)),
        Case("float16, head dimension 64", matrices(draw, 1, 128, 128, 64, dtype=torch.float16)),
        Case("float16, 64 queries at the end of 1024 equal scores, values near 100", overflowing(draw)),
        layout_case(draw, "two heads; q, k and v each stored in another way", 2, 64, 128, 32),
        Case("320 × 320, bytes counted", matrices(draw, 1, 320, 320, 32), metered=True),
    ]
    if draw.on_gpu:
        cases.append(Case("2 heads, 1024 × 2048, float16", matrices(draw, 2, 1024, 2048, 64, dtype=torch.float16)))
    return cases


def until_tile_end(query, key, shift=0, offset=True):
    """bool [query_length, key_length]: keys before the end of the query tile's last key tile, moved `shift` tiles."""
    query_length, key_length = query.shape[1], key.shape[1]
    end = (torch.arange(query_length) // TILE + 1) * TILE
    end = end.clamp(max=query_length) + (key_length - query_length if offset else 0) + shift * TILE
    end = -(-end // TILE) * TILE
    return torch.arange(key_length)[None, :] < end[:, None]


def read_by_program(query, key, causal=True):
    """int [query_length]: the keys that each query's program goes through, in whole tiles."""
    query_length, key_length = query.shape[1], key.shape[1]
    end = torch.full((query_length,), key_length)
    if causal:
        end = (torch.arange(query_length) // TILE + 1) * TILE + key_length - query_length
    return -(-end.clamp(0, key_length) // TILE) * TILE


def _nan_where_all_is_hidden(query, key, visible, read):
    """bool [query_length]: rows whose program goes through keys that they may not see, all of them."""
    return ~visible.any(dim=-1) & (read > 0)


def unguarded(shown):
    """A fingerprint without a guard for -inf - -inf: NaN for a row whose keys are all hidden and yet looked at.

    `shown(query, key)` gives the pairs that the mask keeps, and the keys that each query's program goes through.
    """

    def result(query, key, value, *rest):
        if rest and not rest[0]:
            return attention(query, key, value)
        visible, read = shown(query, key)
        visible = visible & (torch.arange(key.shape[1])[None, :] < read[:, None])
        nan = _nan_where_all_is_hidden(query, key, visible, read)
        return attention(query, key, value, visible).masked_fill(nan[:, None], math.nan)

    return result


def _read_without_offset(query, key):
    end = (torch.arange(query.shape[1]) // TILE + 1) * TILE
    return -(-end.clamp(max=key.shape[1]) // TILE) * TILE


def _last_tile_of_program(query, key, value, causal=True):
    visible, read = causal_mask(query, key, causal), read_by_program(query, key, causal)
    last = torch.arange(key.shape[1])[None, :] >= (read - TILE)[:, None]
    return attention(query, key, value, last if visible is None else last & visible)


def _masked_after_softmax(query, key, value):
    """Maximum and sum over whole tiles; the weights above the diagonal are set to 0 afterwards."""
    read = until_tile_end(query, key)
    scores = scores_of(query, key, read)
    nothing = ~read.any(dim=-1)[:, None]
    probabilities = torch.softmax(scores.masked_fill(nothing, 0.0), dim=-1) * (causal_pairs(query, key) & ~nothing)
    return probabilities @ value


def of_causal_kernels(mask):
    """The slips of the online softmax for kernels whose `mask(query, key, ...)` gives the visible pairs, or None."""

    def slip(function, **more):
        return lambda q, k, v, *causal: function(q, k, v, visible=mask(q, k, *causal), **more)

    return (
        Mistake("sum_not_rescaled", SUM_NOT_RESCALED, result=slip(streamed, key_rows=TILE, rescale_sum=False)),
        Mistake(
            "nothing_rescaled",
            NOTHING_RESCALED,
            result=slip(streamed, key_rows=TILE, rescale_sum=False, rescale_accumulator=False),
        ),
        Mistake(
            "divided_at_every_tile",
            DIVIDED_AT_EVERY_TILE,
            result=lambda q, k, v, *causal: streamed(
                q, k, v, TILE, visible=mask(q, k, *causal), divided_before=read_by_program(q, k, *causal)
            ),
        ),
        Mistake("maximum_not_updated", MAXIMUM_NOT_UPDATED, result=_last_tile_of_program),
        Mistake("not_divided", NOT_DIVIDED, result=slip(not_divided)),
        Mistake(
            "no_running_max",
            NO_RUNNING_MAX,
            result=(slip(without_running_max), slip(without_running_max, guarded=True)),
        ),
        Mistake("scale_missing", SCALE_MISSING, result=slip(attention, scale=1.0)),
        Mistake(
            "scale_twice",
            SCALE_TWICE,
            result=lambda q, k, v, *causal: attention(q, k, v, mask(q, k, *causal), scale=1 / q.shape[-1]),
        ),
        Mistake(
            "keys_used_as_values",
            KEYS_AS_VALUES,
            result=lambda q, k, v, *causal: attention(q, k, k, mask(q, k, *causal)),
        ),
    )


def _reads_everything(case, seen, got):
    """Right numbers, and all keys loaded by every program."""
    if not seen.traffic:
        return False
    query, key, value = case.args[:3]
    right = attention(query.double(), key.double(), value.double(), causal_pairs(query, key))
    return seen.bytes_moved >= 0.99 * tiled_bytes(query, key, value) and close_to(got, right)


EXERCISE = Exercise(
    id="4.4",
    title="A causal kernel that skips tiles",
    entries=("flash_attention_causal",),
    cases=causal_cases,
    oracle=causal_oracle,
    plain=(causal_prescaled, causal_rounded),
    needs=TRITON,
    uses_dot=True,
    requirements=(
        LaunchesTriton(at_most=1),
        Allocates(outputs_only),
        SKIPS_THE_WORK,
        Moves(causal_bytes),
    ),
    hints=(
        "The last query stands at the last key. So query row i is at position i + key_length - query_length, and it "
        "sees the keys up to and including its own position.",
        "Which is the last key that any query of this program sees? That of its last row. One past it is where the "
        "loop over keys ends: the tiles beyond are neither loaded nor computed.",
        "end = tl.minimum(key_length, first_query + BLOCK_M + key_length - query_length), where first_query is the "
        "program's first row. It can be negative; a loop up to it then makes no step.",
        "Inside the loop: visible = keys[None, :] <= positions[:, None], then scores = tl.where(visible, scores, "
        'float("-inf")), before the maximum is taken.',
        "A program whose queries see nothing ends with running_sum = 0. Divide by tl.where(running_sum == 0.0, 1.0, "
        "running_sum) and its rows are 0 / 1 = 0.",
    ),
    mistakes=(
        Mistake("no_causal_mask", NO_CAUSAL_MASK, result=lambda q, k, v: attention(q, k, v)),
        Mistake(
            "diagonal_not_masked",
            "Tiles are skipped, but inside the tile on the diagonal nothing is masked: a query sees the later "
            "keys of its own tile. Put minus infinity there before the maximum is taken.",
            result=lambda q, k, v: attention(q, k, v, until_tile_end(q, k)),
        ),
        Mistake(
            "causal_off_by_one",
            OFF_BY_ONE,
            result=(
                lambda q, k, v: attention(q, k, v, causal_pairs(q, k, -1)),
                unguarded(lambda q, k: (causal_pairs(q, k, -1), read_by_program(q, k))),
            ),
        ),
        Mistake(
            "sees_the_next_key",
            NEXT_KEY,
            result=lambda q, k, v: attention(q, k, v, causal_pairs(q, k, 1) & until_tile_end(q, k)),
        ),
        Mistake(
            "hidden_scored_zero",
            HIDDEN_SCORED_ZERO,
            result=lambda q, k, v: hidden_scored(q, k, v, causal_pairs(q, k), read_by_program(q, k), 0.0),
        ),
        Mistake(
            "causal_misaligned",
            MISALIGNED,
            result=lambda q, k, v: attention(q, k, v, torch.arange(k.shape[1]) <= torch.arange(q.shape[1])[:, None]),
        ),
        Mistake(
            "loop_end_ignores_offset",
            SKIPS_TOO_MUCH,
            result=(
                lambda q, k, v: attention(q, k, v, causal_pairs(q, k) & until_tile_end(q, k, offset=False)),
                unguarded(lambda q, k: (causal_pairs(q, k), _read_without_offset(q, k))),
            ),
        ),
        Mistake(
            "diagonal_tile_skipped",
            "The tile on the diagonal is skipped along with those above it. The loop must end after the key of "
            "the program's last query: first_query + BLOCK_M, not first_query (plus key_length - query_length).",
            result=lambda q, k, v: attention(q, k, v, causal_pairs(q, k) & until_tile_end(q, k, shift=-1)),
        ),
        Mistake(
            "mask_after_softmax",
            "The mask sets weights to 0 after maximum and sum were taken, so hidden keys still count in the sum "
            "and the weights of a row add up to less than 1. Mask the scores, with minus infinity.",
            result=_masked_after_softmax,
        ),
        Mistake(
            "empty_row_nan", EMPTY_ROW, result=lambda q, k, v: attention(q, k, v, causal_pairs(q, k), empty=math.nan)
        ),
        Mistake(
            "maximum_starts_at_zero", STARTS_AT_ZERO, result=lambda q, k, v: from_zero(q, k, v, causal_pairs(q, k))
        ),
        Mistake(
            "natural_exp",
            NATURAL_EXP,
            result=lambda q, k, v: attention(
                q, k, v, causal_pairs(q, k), scale=math.log2(math.e) / math.sqrt(q.shape[-1])
            ),
        ),
        Mistake(
            "log2e_missing",
            LOG2E_MISSING,
            result=lambda q, k, v: attention(q, k, v, causal_pairs(q, k), scale=math.log(2) / math.sqrt(q.shape[-1])),
        ),
        Mistake(
            "accumulator_not_rescaled",
            ACCUMULATOR_NOT_RESCALED,
            result=lambda q, k, v: streamed(q, k, v, TILE, visible=causal_pairs(q, k), rescale_accumulator=False),
        ),
        *of_causal_kernels(lambda q, k: causal_pairs(q, k)),
        *of_every_kernel(causal_oracle, lambda q, k: causal_pairs(q, k)),
        *OUTSIDE,
        Mistake(
            "does_not_skip",
            "Every program reads all the keys, also those after its last query, and masks them away. End its loop "
            "after the "
            "last key that its last query sees: half the bytes and half the time.",
            when=_reads_everything,
        ),
    ),
)
