"""Exercise 4.7: beat FlashAttention-2."""

from __future__ import annotations

import torch

from course_lib.checker import TRITON, Allocates, Case, Exercise, FasterThan, LaunchesTriton, Mistake, Slip
from course_lib.hardware.device import machine
from exercises.ch04_triton_tiling.parts import BIG, SKIPS_THE_WORK, far_below, makes_whole_matrix, matrices, overflowing
from exercises.topics.attention import attention, streamed, visible_pairs, zeros_scored
from exercises.topics.attention_sentences import ACCUMULATOR_NOT_RESCALED, MISALIGNED, SCALE_MISSING, WHOLE_MATRIX


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
        case("2 × 3 heads, 200 × 333, causal, float16", 2, 3, 200, 333, 128, torch.float16, True),
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
    slips=(
        Slip(
            "accumulator_not_rescaled",
            ACCUMULATOR_NOT_RESCALED,
            formula=lambda q, k, v, causal: (
                None
                if max(q.shape[2], k.shape[2]) > 1000
                else _head_by_head(
                    lambda a, b, c, m: streamed(a, b, c, 128, visible=m, rescale_accumulator=False), q, k, v, causal
                )
            ),
        ),
        Slip(
            "scale_missing",
            SCALE_MISSING,
            formula=lambda q, k, v, causal: (
                None
                if k.shape[2] > 1000
                else _head_by_head(lambda a, b, c, m: attention(a, b, c, m, scale=1.0), q, k, v, causal)
            ),
        ),
        Slip(
            "causal_misaligned",
            MISALIGNED,
            formula=lambda q, k, v, causal: (
                None
                if k.shape[2] > 1000
                else _head_by_head(lambda a, b, c, m: attention(a, b, c, m), q, k, v, False)
                if not causal
                else _head_by_head(
                    lambda a, b, c, m: attention(
                        a, b, c, torch.arange(k.shape[2]) <= torch.arange(q.shape[2])[:, None]
                    ),
                    q,
                    k,
                    v,
                    True,
                )
            ),
        ),
        Slip(
            "tail_keys_scored",
            "The keys past the end were loaded as zeros, and their scores count. Set these scores to minus infinity.",
            formula=lambda q, k, v, causal: (
                None
                if k.shape[2] > 1000
                else _head_by_head(lambda a, b, c, m: zeros_scored(a, b, c, 128, m), q, k, v, causal)
            ),
        ),
    ),
    mistakes=(Mistake("writes_the_score_matrix", WHOLE_MATRIX, when=makes_whole_matrix, cost=True),),
)
