"""Exercise 4.4: a causal kernel that skips tiles."""

from __future__ import annotations

import torch

from course_lib.checker import TRITON, Allocates, Case, Exercise, LaunchesTriton, Mistake, Moves, model_of
from course_lib.checker.specification.contract import Contract
from course_lib.checker.specification.draw import Draw
from course_lib.checker.specification.layouts import beyond_32_bits, unit_last
from exercises.ch04_triton_tiling.parts import (
    BIG,
    OF_EVERY_KERNEL,
    OUTSIDE,
    SKIPS_THE_WORK,
    cases_in_16_bits,
    causal_bytes,
    causal_pairs,
    far_below,
    far_below_finite,
    hidden_above,
    layout_case,
    matrices,
    of_few_tiles,
    outputs_only,
    overflowing,
    tiled_bytes,
)
from exercises.ch04_triton_tiling.programs import CAUSAL, PARTS, PAST_THE_KEYS, TILED, USES, attended
from exercises.topics.attention import (
    attention,
    close_to,
    in_a_kernel,
    normalised_in_a_kernel,
    ordered_rows,
    prescaled_in_a_kernel,
    rounded_in_a_kernel,
)
from exercises.topics.attention_inputs import WITH_16_BITS, drawn
from exercises.topics.attention_steps import MIXED_BASES
from exercises.topics.rising import (
    FINITE_FOR_MINUS_INFINITY,
    MAXIMUM_OF_THE_FIRST_TILE,
    attention_scores,
    below_a_stand_in,
    rising,
    stays_behind,
)


def causal(computed):
    """This computation of attention, with a causal mask."""
    return lambda query, key, value: computed(query, key, value, causal_pairs(query, key))


def causal_cases(draw):
    cases = [
        Case("one tile, on the diagonal", matrices(draw, 1, 64, 64, 32)),
        Case("two heads, 128 × 128", matrices(draw, 2, 128, 128, 32)),
        Case("64 queries at the end of 256 keys", matrices(draw, 1, 64, 256, 32)),
        Case("128 queries, 64 keys: the first 64 queries see nothing", matrices(draw, 1, 128, 64, 32)),
        Case("64 × 64, head dimension 64: as many keys as numbers", matrices(Draw(64), 1, 64, 64, 64)),
        Case("scores of ±150: exp overflows", matrices(draw, 1, 128, 128, 32, score=BIG)),
        Case("64 queries at the end of 320 keys, the last scores 160 above the first", rising(draw, 1, 64, 320, 16)),
        Case("float16, 64 queries at the end of 1024 equal scores, values near 100", overflowing(draw)),
        *cases_in_16_bits(),
        Case("scores near -1e20", far_below_finite(1, 64, 64)),
        Case("scores near -1e20, and 0 where they are hidden", hidden_above(1, 64, 64)),
        layout_case(draw, "two heads; q, k and v each stored in another way", 2, 64, 128, 32),
        Case("256 × 256, bytes counted", matrices(draw, 1, 256, 256, 32), metered=True),
    ]
    cases += beyond_32_bits(draw, "heads", matrices(draw, 3, 64, 64, 16))
    return cases + on_a_gpu(draw) if draw.on_gpu else cases


def on_a_gpu(draw):
    """What the contract draws where kernels are interpreted."""
    return [
        Case("all scores near -200", far_below(draw, 1, 64, 128)),
        Case("scores grow along every row", ordered_rows(draw, 1, 128, 128, 16)),
        Case("float16, head dimension 64", matrices(draw, 1, 128, 128, 64, dtype=torch.float16)),
        Case("2 heads, 1024 × 2048, float16", matrices(draw, 2, 1024, 2048, 64, dtype=torch.float16)),
    ]


CONTRACT = Contract(
    drawn,
    most=12,
    choices={
        "heads": (1, 2, 3),
        "query_length": (64, 128, 192),
        "key_length": (64, 128, 192, 448),
        "head_dim": (16, 32, 64, 128),
        "dtype": (torch.float32, torch.float16),
        "scores": WITH_16_BITS,
        "query_layout": unit_last("query"),
        "key_layout": unit_last("key"),
        "value_layout": unit_last("value"),
    },
    says={
        "query_length": "query_length a multiple of 64",
        "key_length": "key_length a multiple of 64, smaller or larger than query_length",
        "head_dim": "head_dim 16, 32, 64 or 128",
        "dtype": "float32 or float16",
        "scores": "Numbers of any size",
        "query_layout": "Any strides but the last, which is 1",
        "key_layout": "strides and dtype as query's, each its own",
        "value_layout": "strides and dtype as query's, each its own",
    },
    valid=of_few_tiles,
)


def _reads_everything(case, seen, got):
    """Right numbers, and all keys loaded by every program, which are more than it needs."""
    if not (case.metered and seen.traffic) or tiled_bytes(*case.args) < 1.1 * causal_bytes(*case.args):
        return False
    query, key, value = (matrix.double() for matrix in case.args)
    right = attention(query, key, value, causal_pairs(query, key))
    return seen.bytes_moved >= 0.99 * tiled_bytes(*case.args) and close_to(got, right)


def flash_attention_causal(query, key, value):
    """What the kernel stores."""
    return attended(query, key, value, causal=True)[0]


EXERCISE = Exercise(
    id="4.4",
    title="A causal kernel that skips tiles",
    entries=("flash_attention_causal",),
    cases=causal_cases,
    oracle=causal(in_a_kernel),
    contracts=(CONTRACT,),
    plain=(causal(prescaled_in_a_kernel), causal(rounded_in_a_kernel), causal(normalised_in_a_kernel)),
    models=(
        model_of(
            flash_attention_causal,
            TILED + MIXED_BASES + CAUSAL + PAST_THE_KEYS,
            PARTS,
            USES,
            styles=(("unguarded_step",), ()),
        ),
    ),
    needs=TRITON,
    uses_dot=True,
    requirements=(
        LaunchesTriton(at_most=1),
        Allocates(outputs_only),
        SKIPS_THE_WORK,
        Moves(causal_bytes),
    ),
    hints=(
        "The last query stands at the last key. So query row i has the position i + key_length - query_length. "
        "It sees the keys up to that position, its own included.",
        "Which is the last key that any query of this program sees? It is the one at the position of the last "
        "row. The loop over the keys ends one past it, so the tiles beyond are neither loaded nor computed.",
        "end = tl.minimum(key_length, first_query + BLOCK_M + key_length - query_length), where first_query is "
        "the program's first row. The end can be negative, and then the loop makes no step.",
        "Inside the loop, before the maximum is taken: scores = tl.where(keys[None, :] <= positions[:, None], "
        'scores, float("-inf")), with positions = rows + key_length - query_length.',
        "A program whose queries see no key ends with running_sum = 0. Divide by tl.where(running_sum == 0.0, "
        "1.0, running_sum). Then its rows are 0 / 1 = 0.",
    ),
    mistakes=(
        Mistake(
            "finite_for_minus_infinity",
            FINITE_FOR_MINUS_INFINITY,
            when=below_a_stand_in(
                lambda query, key, value: attention_scores(query, key, causal_pairs(query, key)),
                lambda query, key, value: value,
            ),
            every=True,
        ),
        Mistake(
            "maximum_of_the_first_tile",
            MAXIMUM_OF_THE_FIRST_TILE,
            when=stays_behind(lambda query, key, value: attention_scores(query, key, causal_pairs(query, key))),
            every=True,
        ),
        *OF_EVERY_KERNEL,
        *OUTSIDE,
        Mistake(
            "does_not_skip",
            "Every program reads all keys, and masks those after its last query. End its loop after the last key that "
            "its last query sees. That saves half of the bytes and half of the time.",
            when=_reads_everything,
            cost=True,
        ),
    ),
)
