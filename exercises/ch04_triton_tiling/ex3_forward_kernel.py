"""Exercise 4.3: the forward kernel, without a mask."""

from __future__ import annotations

import torch

from course_lib.checker import TRITON, Allocates, Case, Exercise, LaunchesTriton, Mistake, Moves, model_of
from course_lib.checker.specification.contract import Contract
from course_lib.checker.specification.layouts import beyond_32_bits, unit_last
from exercises.ch04_triton_tiling.parts import (
    BIG,
    OF_EVERY_KERNEL,
    OUTSIDE,
    SKIPS_THE_WORK,
    cases_in_16_bits,
    far_below,
    layout_case,
    makes_whole_matrix,
    matrices,
    of_few_tiles,
    outputs_only,
    overflowing,
    rereads_queries,
    rising_by_tiles,
    tiled_bytes,
)
from exercises.ch04_triton_tiling.programs import PARTS, USES, WHOLE_TILES, attended
from exercises.topics.attention import (
    in_a_kernel,
    normalised_in_a_kernel,
    ordered_rows,
    prescaled_in_a_kernel,
    rounded_in_a_kernel,
)
from exercises.topics.attention_inputs import WITH_16_BITS, drawn
from exercises.topics.attention_sentences import WHOLE_MATRIX
from exercises.topics.rising import MAXIMUM_OF_THE_FIRST_TILE, attention_scores, rising, stays_behind


def kernel_cases(draw):
    cases = [
        Case("one tile of queries, one of keys", matrices(draw, 1, 64, 64, 32)),
        Case("two heads, 128 × 192", matrices(draw, 2, 128, 192, 32)),
        Case("scores of ±150: exp overflows", matrices(draw, 1, 64, 192, 32, score=BIG)),
        Case("each tile's scores 160 above the last one's", rising_by_tiles(draw)),
        Case("64 queries, 320 keys, the last scores 160 above the first", rising(draw, 1, 64, 320, 16)),
        Case("float16, 1024 equal scores, values near 100", overflowing(draw)),
        *cases_in_16_bits(),
        layout_case(draw, "two heads; q, k and v each stored in another way", 2, 64, 128, 32),
        Case("256 × 256, bytes counted", matrices(draw, 1, 256, 256, 64), metered=True),
    ]
    cases += beyond_32_bits(draw, "heads", matrices(draw, 3, 64, 64, 16))
    return cases + on_a_gpu(draw) if draw.on_gpu else cases


def on_a_gpu(draw):
    """What the contract draws where kernels are interpreted."""
    return [
        Case("all scores near -200", far_below(draw, 1, 64, 128)),
        Case("scores grow along every row", ordered_rows(draw, 1, 64, 192, 32)),
        Case("float16, head dimension 64", matrices(draw, 2, 64, 128, 64, dtype=torch.float16)),
        Case("2 heads, 1024 × 2048, float16", matrices(draw, 2, 1024, 2048, 64, dtype=torch.float16)),
    ]


CONTRACT = Contract(
    drawn,
    most=12,
    choices={
        "heads": (1, 2, 3),
        "query_length": (64, 128, 192),
        "key_length": (64, 128, 192, 576),
        "head_dim": (16, 32, 64, 128),
        "dtype": (torch.float32, torch.float16),
        "scores": WITH_16_BITS,
        "query_layout": unit_last("query"),
        "key_layout": unit_last("key"),
        "value_layout": unit_last("value"),
    },
    says={
        "query_length": "query_length a multiple of 64",
        "key_length": "key_length a multiple of 64",
        "head_dim": "head_dim 16, 32, 64 or 128",
        "dtype": "float32 or float16",
        "query_layout": "Any strides but the last, which is 1",
        "key_layout": "strides and dtype as query's, each its own",
        "value_layout": "strides and dtype as query's, each its own",
    },
    valid=of_few_tiles,
)


def flash_attention_full(query, key, value):
    """What the kernel stores."""
    return attended(query, key, value, causal=False)[0]


EXERCISE = Exercise(
    id="4.3",
    title="The forward kernel, without a mask",
    entries=("flash_attention_full",),
    cases=kernel_cases,
    oracle=in_a_kernel,
    contracts=(CONTRACT,),
    plain=(prescaled_in_a_kernel, rounded_in_a_kernel, normalised_in_a_kernel),
    models=(model_of(flash_attention_full, WHOLE_TILES, PARTS, USES, styles=(("unguarded",), ())),),
    needs=TRITON,
    uses_dot=True,
    requirements=(
        LaunchesTriton(at_most=1),
        Allocates(outputs_only),
        SKIPS_THE_WORK,
        Moves(tiled_bytes),
    ),
    hints=(
        "The loop is that of exercise 4.1: `for first_key in range(0, key_length, BLOCK_N)`. Inside it, load a "
        "tile of keys, [BLOCK_N, HEAD_DIM]. It works as for the queries, but with the pointer and the strides "
        "of the keys.",
        'scores = tl.dot(query, tl.trans(key_tile), input_precision="ieee") * scale is [BLOCK_M, BLOCK_N]. The '
        "maximum of each row is tl.max(scores, axis=1), a [BLOCK_M] block. Write new_max[:, None] to subtract "
        "it from every column.",
        "weights = tl.exp(scores - new_max[:, None]) and rescale = tl.exp(running_max - new_max). Multiply "
        "running_sum by rescale and accumulator by rescale[:, None]. Then add the tile's part to each, and set "
        "running_max = new_max.",
        "accumulator = accumulator * rescale[:, None] + tl.dot(weights.to(value_tile.dtype), value_tile, "
        'input_precision="ieee"). After the loop, store (accumulator / running_sum[:, '
        "None]).to(output_pointer.dtype.element_ty) at output_pointer + head * output_head_stride + rows[:, "
        "None] * output_stride + columns[None, :].",
    ),
    mistakes=(
        Mistake(
            "maximum_of_the_first_tile",
            MAXIMUM_OF_THE_FIRST_TILE,
            when=stays_behind(lambda query, key, value: attention_scores(query, key)),
            every=True,
        ),
        Mistake("writes_the_score_matrix", WHOLE_MATRIX, when=makes_whole_matrix, cost=True),
        Mistake(
            "queries_reread",
            "The tile of queries is loaded again for every tile of keys, although it does not change. Load it once, "
            "before the loop.",
            when=rereads_queries,
            cost=True,
        ),
        *OF_EVERY_KERNEL,
        *OUTSIDE,
    ),
)
