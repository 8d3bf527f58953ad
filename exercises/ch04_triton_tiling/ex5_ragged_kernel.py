"""Exercise 4.5: any length, any head dimension."""

from __future__ import annotations

import torch

from course_lib.checker import TRITON, Allocates, Case, Exercise, LaunchesTriton, Mistake, Moves, model_of
from course_lib.checker.specification.contract import Contract
from course_lib.checker.specification.layouts import beyond_32_bits, unit_last
from exercises.ch04_triton_tiling.parts import (
    BIG,
    OF_EVERY_KERNEL,
    SKIPS_THE_WORK,
    TILE,
    cases_in_16_bits,
    causal_mask,
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
from exercises.ch04_triton_tiling.programs import PARTS, RAGGED_TILED, USES, attended
from exercises.topics.attention import (
    in_a_kernel,
    normalised_in_a_kernel,
    prescaled_in_a_kernel,
    rounded_in_a_kernel,
)
from exercises.topics.attention_inputs import WITH_16_BITS, drawn
from exercises.topics.attention_sentences import READS_PAST_THE_END, WRITES_PAST_THE_END
from exercises.topics.attention_steps import padded
from exercises.topics.evidence import first_access, has_gaps
from exercises.topics.rising import (
    FINITE_FOR_MINUS_INFINITY,
    MAXIMUM_OF_THE_FIRST_TILE,
    attention_scores,
    below_a_stand_in,
    rising,
    stays_behind,
)


def perhaps_causal(computed):
    """This computation of attention, with a causal mask where the fourth argument says so."""
    return lambda query, key, value, causal: computed(query, key, value, causal_mask(query, key, causal))


def ragged_cases(draw):
    prime = draw.choice((67, 71, 73, 79, 83))
    cases = [
        Case("whole tiles, head dimension 40", (*matrices(draw, 1, 64, 64, 40), False)),
        Case("one query, one key", (*matrices(draw, 1, 1, 1, 16), False)),
        Case("two heads, 65 × 129, head dimension 32", (*matrices(draw, 2, 65, 129, 32), False)),
        Case(f"{prime} × {prime}, head dimension 24, causal", (*matrices(draw, 1, prime, prime, 24), True)),
        Case("150 queries, 70 keys, causal: 80 queries see nothing", (*matrices(draw, 1, 150, 70, 32), True)),
        Case("scores of ±150, 63 × 127", (*matrices(draw, 1, 63, 127, 32, score=BIG), False)),
        Case("float16, 1024 equal scores, values near 100", (*overflowing(draw), False)),
        *cases_in_16_bits(False),
        Case("scores near -1e20, 70 × 70, causal", (*far_below_finite(1, 70, 70), True)),
        Case("scores near -1e20, and 0 where they are hidden, 70 × 70, causal", (*hidden_above(1, 70, 70), True)),
        Case("20 queries, 300 keys, the last scores 160 above the first", (*rising(draw, 1, 20, 300, 16), False)),
        layout_case(draw, "q, k and v each stored in another way, 30 × 90", 2, 30, 90, 48, rest=(False,)),
        Case("257 × 257, causal, bytes counted", (*matrices(draw, 1, 257, 257, 32), True), metered=True),
    ]
    cases += beyond_32_bits(draw, "heads", matrices(draw, 3, 5, 7, 16), True)
    return cases + on_a_gpu(draw) if draw.on_gpu else cases


def on_a_gpu(draw):
    """What the contract draws where kernels are interpreted."""
    half = torch.float16
    spread = (draw.spread_out(matrix, 24) for matrix in matrices(draw, 1, 50, 64, 40))
    return [
        Case("one query at the end of 200 keys, causal, float16", (*matrices(draw, 2, 1, 200, 80, dtype=half), True)),
        Case("70 queries, 100 keys, causal", (*matrices(draw, 1, 70, 100, 32), True)),
        Case("all scores near -200, 65 × 70", (*far_below(draw, 1, 65, 70), False)),
        Case("NaN between the rows of each matrix", (*spread, True)),
        Case(
            "one head, 1000 × 3001, head dimension 72, float16, causal",
            (*matrices(draw, 1, 1000, 3001, 72, dtype=half), True),
        ),
    ]


def ragged_contract(**says) -> Contract:
    """Any lengths, any head dimension, causal or not; for 4.6 as well, which says so in its own words."""
    return Contract(
        drawn,
        most=12,
        choices={
            "heads": (1, 2, 3),
            "query_length": (1, 2, 37, 63, 64, 65, 131),
            "key_length": (1, 3, 63, 64, 65, 101, 129, 200),
            "head_dim": (16, 17, 32, 40, 64, 71, 128),
            "dtype": (torch.float32, torch.float16),
            "scores": WITH_16_BITS,
            "query_layout": unit_last("query"),
            "key_layout": unit_last("key"),
            "value_layout": unit_last("value"),
            "causal": (False, True),
        },
        says=says,
        valid=lambda causal, **choices: of_few_tiles(**choices),
    )


def _head_dim_access(case, seen, got):
    """Wild accesses although all lengths are whole tiles and no stride can be wrong: head_dim is to blame."""
    query, key = case.args[:2]
    whole = query.shape[1] % TILE == 0 and key.shape[1] % TILE == 0 and not has_gaps(case)
    return bool(seen.out_of_bounds) and whole and query.shape[2] < padded(query.shape[2])


def flash_attention_ragged(query, key, value, causal):
    """What the kernel stores."""
    return attended(query, key, value, causal)[0]


def ragged_in_tiles_of_32(query, key, value, causal):
    """The same where a program takes 32 keys a step."""
    return attended(query, key, value, causal, 32)[0]


EXERCISE = Exercise(
    id="4.5",
    title="Any length, any head dimension",
    entries=("flash_attention_ragged",),
    cases=ragged_cases,
    oracle=perhaps_causal(in_a_kernel),
    contracts=(
        ragged_contract(
            query_length="Attention for any lengths",
            key_length="Attention for any lengths",
            head_dim="any head dimension from 16 to 128",
            dtype="float32 or float16",
            scores="Numbers of any size",
            query_layout="any strides but the last, which is 1",
            key_layout="strides and dtype as query's, each its own",
            value_layout="strides and dtype as query's, each its own",
            causal="True or False",
        ),
    ),
    plain=tuple(map(perhaps_causal, (prescaled_in_a_kernel, rounded_in_a_kernel, normalised_in_a_kernel))),
    models=(
        model_of(flash_attention_ragged, RAGGED_TILED, PARTS, USES, styles=((),)),
        model_of(ragged_in_tiles_of_32, RAGGED_TILED, PARTS, USES, styles=((),), pairs=False),
    ),
    needs=TRITON,
    uses_dot=True,
    requirements=(
        LaunchesTriton(at_most=1),
        Allocates(outputs_only),
        SKIPS_THE_WORK,
        Moves(tiled_bytes, slack=1.3),
    ),
    hints=(
        "A mask for a load or a store has the shape of the tile. For the queries it is (rows < "
        "query_length)[:, None] & (columns < head_dim)[None, :]. In the launcher, the tile's width is block_d "
        "= triton.next_power_of_2(head_dim).",
        "Load with mask=... and other=0.0, the keys and values with keys < key_length instead of rows < "
        "query_length. The pointers are those of 4.4. Zeros in the columns past head_dim add nothing to a "
        "score.",
        "A key of zeros has the score 0, and exp(0) is 1. So its score must become minus infinity: visible = "
        "(keys < key_length)[None, :], and if CAUSAL also & (keys[None, :] <= positions[:, None]). Then scores "
        '= tl.where(visible, scores, float("-inf")).',
        "In a row that has seen no key, running_max and new_max are -inf, and -inf - -inf is NaN. Subtract 0 "
        'there: reference = tl.where(new_max == float("-inf"), 0.0, new_max). Then weights = tl.exp2(scores - '
        "reference[:, None]) are 0, and rescale = tl.exp2(running_max - reference).",
        "The grid rounds up: (triton.cdiv(query_length, 64), heads). Store with the mask of the queries: only "
        "rows < query_length and columns < head_dim.",
    ),
    mistakes=(
        Mistake(
            "finite_for_minus_infinity",
            FINITE_FOR_MINUS_INFINITY,
            when=below_a_stand_in(
                lambda query, key, value, causal: attention_scores(query, key, causal_mask(query, key, causal)),
                lambda query, key, value, causal: value,
            ),
            every=True,
        ),
        Mistake(
            "maximum_of_the_first_tile",
            MAXIMUM_OF_THE_FIRST_TILE,
            when=stays_behind(
                lambda query, key, value, causal: attention_scores(query, key, causal_mask(query, key, causal))
            ),
            every=True,
        ),
        *OF_EVERY_KERNEL,
        Mistake(
            "head_dim_not_masked",
            "Columns past head_dim were read or written. BLOCK_D is the next power of two, so a tile's extra columns "
            "reach into the next row. Mask the columns in every load and in the store.",
            when=_head_dim_access,
        ),
        Mistake("output_written_out_of_bounds", WRITES_PAST_THE_END, when=first_access("writes", whole=True)),
        Mistake("tail_rows_read_out_of_bounds", READS_PAST_THE_END, when=first_access("reads", whole=True)),
    ),
)
