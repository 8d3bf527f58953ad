"""Exercise 4.7: beat FlashAttention-2."""

from __future__ import annotations

import torch

from course_lib.checker import TRITON, Allocates, Case, Exercise, FasterThan, LaunchesTriton, Mistake, edits, model_of
from course_lib.checker.specification.edits import only
from course_lib.hardware.device import machine
from exercises.ch04_triton_tiling.parts import BIG, SKIPS_THE_WORK, far_below, makes_whole_matrix, matrices, overflowing
from exercises.ch04_triton_tiling.programs import CAUSAL, OFFSET, RAGGED, TILED, USES
from exercises.topics.attention import attention, visible_pairs
from exercises.topics.attention_sentences import WHOLE_MATRIX
from exercises.topics.attention_steps import ALL, MIXED_BASES, SCALED_LATE, accumulated, divided, scored
from exercises.topics.pointers import load
from exercises.topics.running import start


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


def fast_attention(query, key, value, causal):
    """Two loops: over the tiles of keys that need no mask, and over the rest; all programs at once."""
    batch, heads, query_length, head_dim = query.shape
    key_length = key.shape[2]
    BLOCK_M, block_n = (128, 128) if head_dim == 128 else (128, 64)
    query, key, value = query.flatten(0, 1), key.flatten(0, 1), value.flatten(0, 1)
    first_query = torch.arange(-(-query_length // BLOCK_M))[:, None, None] * BLOCK_M  # [tiles, 1, 1]
    rows = first_query + torch.arange(BLOCK_M)  # [tiles, 1, BLOCK_M]
    positions = rows[..., None] + key_length - query_length
    query_tile = query[:, rows.clamp(max=query_length - 1)[:, 0]].transpose(0, 1)  # [tiles, batch · heads, BLOCK_M, …]
    running_max, running_sum = start(query_tile.shape[:-1])
    state = running_max, running_sum, torch.zeros(query_tile.shape)
    end = torch.full_like(first_query, key_length)
    whole = torch.full_like(first_query, key.shape[1])
    if causal:
        end = torch.minimum(end, first_query + BLOCK_M + key_length - query_length)
        whole = torch.minimum(whole, first_query + key_length - query_length + 1).clamp(min=0)
    whole = whole // block_n * block_n
    for first_key in range(0, max(whole.flatten().tolist(), default=0), block_n):
        keys = first_key + torch.arange(block_n)
        state = after_a_tile(keys, query_tile, key, value, ALL, *state, first_key < whole)
    for first_key in range(int(whole.min()), max(end.flatten().tolist(), default=0), block_n):
        keys = first_key + torch.arange(block_n)
        visible = keys < key_length
        if causal:
            visible = visible & (keys <= positions)
        walks = (whole <= first_key) & (first_key < end)
        state = after_a_tile(keys, query_tile, key, value, visible, *state, walks)
    running_max, running_sum, accumulator = state
    written = divided(accumulator, running_sum)
    output = written.transpose(0, 1).flatten(1, 2)[:, :query_length]
    return output.to(query.dtype).unflatten(0, (batch, heads))


def after_a_tile(keys, query_tile, key, value, visible, running_max, running_sum, accumulator, walks):
    """Maximum, sum and accumulator after these keys: the step of both loops."""
    key_length, head_dim = key.shape[1:]
    head, columns, present = torch.arange(len(key))[:, None, None], torch.arange(head_dim), keys[:, None] < key_length
    key_tile = load(key, head * key.stride(0) + keys[:, None] * key.stride(1) + columns, present)
    value_tile = load(value, head * value.stride(0) + keys[:, None] * value.stride(1) + columns, present)
    scores = scored(query_tile, key_tile, head_dim**-0.5)
    return accumulated(scores, visible, value_tile, running_max, running_sum, accumulator, walks)


# BLOCK_M and BLOCK_N that people take, beside those of the course's answer on an H100.
SIDES = "(128, 128) if head_dim == 128 else (128, 64)"
OTHER_TILES = edits(
    "",
    tiles_128_64=(SIDES, "(128, 64)"),
    tiles_128_128=(SIDES, "(128, 128)"),
    tiles_64_64=(SIDES, "(64, 64)"),
    tiles_32_32=(SIDES, "(32, 32)"),
)
LAST_WHOLE, REST = f"first_query {OFFSET} + 1", "(whole <= first_key) & (first_key < end)"
TWO_LOOPS = (
    *edits(
        "The first loop, which masks nothing, goes too far: it takes tiles that the diagonal crosses, and queries see "
        "keys after their own. It ends at the first query's position, rounded down to whole tiles.",
        diagonal_in_the_first_loop=(LAST_WHOLE, f"first_query {OFFSET} + BLOCK_M"),
        diagonal_in_the_first_loop__rounded_up=(LAST_WHOLE, f"first_query {OFFSET} + block_n"),
        diagonal_in_the_first_loop__not_causal=(f"torch.minimum(whole, {LAST_WHOLE})", "whole"),
        diagonal_in_the_first_loop__without_the_offset=(LAST_WHOLE, "first_query + 1"),
    ),
    *edits(
        "The keys past the whole tiles are never looked at. The second loop begins where the first ends, and runs to "
        "`end`, with MASKED=True.",
        second_loop_missing=(REST, "whole < 0"),
    ),
    *edits(
        "The whole tiles are looked at twice: the second loop begins at key 0. It begins where the first has ended.",
        whole_tiles_counted_twice=(REST, "first_key < end", "int(whole.min())", "0"),
    ),
    *edits(
        "The whole tiles are never looked at: the second loop goes on where a first one, from key 0 on, has ended.",
        first_loop_missing=("*state, first_key < whole", "*state, whole < 0"),
    ),
)
# Made in what is given, or not told apart by float16 numbers.
OTHERS = (
    *("head_", "strides_", "output_", "only_first", "stored_in", "as_many", "scaled_query", "hidden_finite"),
    *("unguarded", "rescale_postponed", "sum_in_float16", "probabilities_cast", "loop_begun"),
)
SLIPS = (
    *(TILED + SCALED_LATE + MIXED_BASES + CAUSAL + TWO_LOOPS),
    *only(RAGGED, "tail_keys_scored", "causal_always"),
)
CHANGES = (*(row for row in SLIPS if not row.id.startswith(OTHERS)), *OTHER_TILES)
PARTS = (start, scored, accumulated, divided, after_a_tile)
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
    models=(
        model_of(fast_attention, CHANGES, PARTS, USES, styles=((),), pairs=False, draws=3),
        model_of(
            fast_attention, CHANGES, PARTS, USES, styles=tuple((row.id,) for row in OTHER_TILES), pairs=False, draws=3
        ),
        model_of(fast_attention, only(CHANGES, *IN_PAIRS), PARTS, USES, draws=3),
    ),
    mistakes=(Mistake("writes_the_score_matrix", WHOLE_MATRIX, when=makes_whole_matrix, cost=True),),
)
