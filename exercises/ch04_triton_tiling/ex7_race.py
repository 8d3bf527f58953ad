"""Exercise 4.7: beat FlashAttention-2."""

from __future__ import annotations

import torch

from course_lib.checker import TRITON, Allocates, Case, Exercise, FasterThan, LaunchesTriton, Mistake
from course_lib.hardware.device import machine
from exercises.ch04_triton_tiling.parts import BIG, SKIPS_THE_WORK, far_below, makes_whole_matrix, matrices, overflowing
from exercises.topics.attention import attention, visible_pairs
from exercises.topics.attention_model import attention_in_two_loops
from exercises.topics.attention_sentences import WHOLE_MATRIX
from exercises.topics.attention_slips import CAUSAL, MIXED_BASES, RAGGED, SCALED_LATE, TILED, TWO_LOOPS


def _head_by_head(function, query, key, value, causal):
    """`function` on one [length, head_dim] at a time: the score matrix of 16 heads would not fit."""
    visible = visible_pairs(query.shape[2], key.shape[2]) if causal else None
    rows = [
        torch.stack([function(query[b, h], key[b, h], value[b, h], visible) for h in range(query.shape[1])])
        for b in range(query.shape[0])
    ]
    return torch.stack(rows)


def fast_oracle(query, key, value, causal):
    return _head_by_head(attention, query, key, value, causal)


def _wide(tensors):
    """The same with rows of 64, the shortest that 4.7 takes, three quarters of them zeros."""
    return tuple(torch.nn.functional.pad(tensor, (0, 64 - tensor.shape[-1])) for tensor in tensors)


def _as_projected(draw, batch, heads, query_length, key_length, head_dim):
    """Query, key and value [batch, heads, length, head_dim], as projections leave them, each with another gap."""
    stored = []
    for length, gap in ((query_length, 16), (key_length, 32), (key_length, 48)):
        flat = draw.normal(batch, length, heads, head_dim + gap, dtype=torch.float16)
        stored.append(flat[..., :head_dim].transpose(1, 2))
    return stored


def fast_cases(draw):
    def case(name, batch, heads, query_length, key_length, head_dim, dtype, causal, timed=False):
        flat = matrices(draw, batch * heads, query_length, key_length, head_dim, dtype=dtype)
        return Case(name, (*(m.view(batch, heads, *m.shape[1:]) for m in flat), causal), timed=timed)

    cases = [
        case("1 × 2 heads, 128 × 128, float16", 1, 2, 128, 128, 64, torch.float16, False),
        case("2 heads, 200 × 333, causal, head dimension 128, float16", 1, 2, 200, 333, 128, torch.float16, True),
        case("300 queries, 1 key, float16", 1, 1, 300, 1, 64, torch.float16, False),
        case(
            "300 queries, 100 keys, causal, float16: 200 queries see nothing", 1, 1, 300, 100, 64, torch.float16, True
        ),
        Case(
            "scores of ±150, float16",
            (*(m[None] for m in matrices(draw, 2, 130, 260, 64, torch.float16, score=BIG)), False),
        ),
        Case("all scores near -200, float16", (*(m[None].half() for m in far_below(draw, 2, 70, 200, 64)), False)),
        Case("1024 equal scores, values near 100, float16", (*(m[None] for m in _wide(overflowing(draw))), False)),
        Case(
            # The first query sees all keys but one of four tiles of 64, the last query some of the sixth.
            "2 × 3 heads, 100 × 354, stored [batch, length, heads, head_dim] with a gap for each, causal, float16",
            (*_as_projected(draw, 2, 3, 100, 354, 64), True),
        ),
    ]
    if draw.on_gpu and draw.bfloat16:  # before that Triton has no tensor-core instruction to race with
        cases += [
            case("bfloat16, 1000 × 1000, causal", 1, 4, 1000, 1000, 128, torch.bfloat16, True),
            case(
                "16 heads, 4096 × 4096, head dimension 128, bfloat16",
                1,
                16,
                4096,
                4096,
                128,
                torch.bfloat16,
                False,
                timed=True,
            ),
        ]
    return cases


def sdpa_flash(query, key, value, causal):
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=causal)


def _required_speed() -> float:
    """FlashAttention-2 was written for Ampere and leaves Hopper's wgmma unused, which Triton does not."""
    return 1.0 if machine().tier == "hopper" else 0.8


# For head dimension 64 and for 128: those of the course's answer on an H100, and others that people take.
TILES = (
    (128, 64, 128, 128),
    (128, 64, 128, 64),
    (128, 128, 128, 128),
    (64, 64, 64, 64),
    (32, 32, 32, 32),
)
# Made in what is given, or not told apart by float16 numbers.
OTHERS = ("head_", "strides_", "output_", "only_first", "stored_in", "as_many", "scaled_query", "hidden_finite")
SLIPS = tuple(
    slip
    for slip in (*TILED, *SCALED_LATE, *MIXED_BASES, *CAUSAL, *TWO_LOOPS, *RAGGED)
    if not slip.id.startswith(OTHERS) and (slip not in RAGGED or slip.id == "tail_keys_scored")
)
IN_PAIRS = (
    "scale_missing",
    "log2e_missing",
    "natural_exp",
    "maximum_not_updated",
    "nothing_rescaled",
    "accumulator_not_rescaled",
    "sum_not_rescaled",
    "rescale_turned_round",
    "rescale_not_scaled",
    "maximum_not_scaled",
    "no_causal_mask",
    "diagonal_not_masked",
    "causal_misaligned",
    "causal_off_by_one",
    "sees_the_next_key",
    "hidden_scored_zero",
    "empty_row_nan__step",
    "diagonal_in_the_first_loop",
    "second_loop_missing",
    "tail_keys_scored",
)


EXERCISE = Exercise(
    id="4.7",
    title="Beat FlashAttention-2",
    entries=("fast_attention",),
    cases=fast_cases,
    oracle=fast_oracle,
    needs=TRITON,
    uses_dot=True,
    requirements=(
        LaunchesTriton(at_most=1),
        Allocates(lambda q, k, v, causal: max(q.numel(), k.numel())),
        SKIPS_THE_WORK,
        FasterThan(
            sdpa_flash,
            _required_speed(),
            lambda q, k, v, causal: 4 * q.numel() * q.element_size(),
            lambda q, k, v, causal: 4 * q.numel() * k.shape[2],
        ),
    ),
    hints=(
        "Look at the compiled kernel before the clock. compile_views tells you whether registers spill and "
        "which matrix instruction is used. On sm_90 you want wgmma, which takes 64 rows of queries for every "
        "four warps.",
        "Tiles for head dimension 128: on Hopper BLOCK_M=128, BLOCK_N=128, num_warps=8, num_stages=2; on "
        "Ampere 128, 64, 8, 2. For head dimension 64: 128, 64, 4, 3. On a T4: 32, 32, head_dim // 16, 1.",
        "The first loop takes the tiles that are whole and that all queries see: up to key_length // BLOCK_N * "
        "BLOCK_N, and if CAUSAL only up to the position of the program's first query. It needs no tl.where and "
        "no masked load. The second loop takes the rest, with masks, up to the `end` of 4.4.",
        "Use tl.exp2(scores * scale_log2 - maximum[:, None]), where maximum is that of the scores times "
        "scale_log2. That is one multiply-add and one exp2 for each score. Cast the weights to the inputs' "
        "dtype for the second tl.dot, and pass it the accumulator: tl.dot(weights, value_tile, accumulator * "
        "rescale[:, None]).",
        "Leave the order of the programs as it is: under a causal mask the longest start first, so short ones "
        "fill the end. Do not multiply `columns` by a stride. Then the compiler sees that they are neighbours, "
        'and loads 16 bytes at a time. Still too slow? `solution("4.7")` is the course\'s own answer.',
    ),
    models=attention_in_two_loops(SLIPS, TILES, IN_PAIRS),
    mistakes=(Mistake("writes_the_score_matrix", WHOLE_MATRIX, when=makes_whole_matrix, cost=True),),
)
