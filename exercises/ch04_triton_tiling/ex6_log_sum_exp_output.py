"""Exercise 4.6: the log-sum-exp as a second output."""

from __future__ import annotations

import math

import torch

from course_lib.checker import TRITON, Allocates, Case, Exercise, LaunchesTriton, Mistake, Moves, model_of
from course_lib.checker.specification.layouts import beyond_32_bits
from exercises.ch04_triton_tiling.ex5_ragged_kernel import perhaps_causal, ragged_contract
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
    outputs_only,
    tiled_bytes,
)
from exercises.ch04_triton_tiling.programs import PARTS, USES, WITH_LOG_SUM_EXP, attended
from exercises.topics.attention import (
    in_a_kernel,
    log_sum_exp,
    ordered_rows,
    prescaled_in_a_kernel,
    rounded_in_a_kernel,
    rounded_log_sum_exp,
    scores_of,
)
from exercises.topics.attention_sentences import READS_PAST_THE_END, WRITES_PAST_THE_END
from exercises.topics.evidence import first_access
from exercises.topics.rising import MAXIMUM_OF_THE_FIRST_TILE, attention_scores, rising, stays_behind


def lse_oracle(query, key, value, causal):
    visible = causal_mask(query, key, causal)
    return in_a_kernel(query, key, value, visible), log_sum_exp(query, key, visible)


def lse_from_maximum(query, key, value, causal):
    """As a kernel makes it, with the scale folded into the queries: maximum plus logarithm of the sum."""
    accurate = torch.promote_types(query.dtype, torch.float32)
    folded = query.to(accurate) / math.sqrt(query.shape[-1])
    scores = scores_of(folded, key.to(accurate), causal_mask(query, key, causal), scale=1.0)
    row_max = scores.amax(dim=-1)
    row_sum = torch.exp(scores - row_max.masked_fill(row_max == -math.inf, 0.0)[..., None]).sum(dim=-1)
    lse = row_max + row_sum.masked_fill(row_max == -math.inf, 1.0).log()
    return perhaps_causal(prescaled_in_a_kernel)(query, key, value, causal), lse


def lse_rounded(query, key, value, causal):
    accurate = torch.promote_types(query.dtype, torch.float32)
    lse = rounded_log_sum_exp(query.to(accurate), key.to(accurate), causal_mask(query, key, causal))
    return perhaps_causal(rounded_in_a_kernel)(query, key, value, causal), lse


def lse_cases(draw):
    cases = [
        Case("two heads, 130 × 129", (*matrices(draw, 2, 130, 129, 32), False)),
        Case("65 × 63, head dimension 24, causal", (*matrices(draw, 1, 65, 63, 24), True)),
        *cases_in_16_bits(False),
        Case("scores near -1e20, 70 × 70, causal", (*far_below_finite(1, 70, 70), True)),
        Case("scores near -1e20, and 0 where they are hidden, 70 × 70, causal", (*hidden_above(1, 70, 70), True)),
        Case("20 queries, 300 keys, the last scores 160 above the first", (*rising(draw, 1, 20, 300, 16), False)),
        layout_case(draw, "q, k and v each stored in another way, 30 × 100, causal", 2, 30, 100, 48, rest=(True,)),
        Case("one query, one key", (*matrices(draw, 1, 1, 1, 16), True)),
        Case("150 queries, 70 keys, causal: 80 queries see nothing", (*matrices(draw, 1, 150, 70, 32), True)),
        Case("float16, 96 × 200", (*matrices(draw, 1, 96, 200, 64, dtype=torch.float16), False)),
        Case("192 × 192, causal, bytes counted", (*matrices(draw, 1, 192, 192, 32), True), metered=True),
    ]
    cases += beyond_32_bits(draw, "heads", matrices(draw, 3, 5, 7, 16), True)
    return cases + on_a_gpu(draw) if draw.on_gpu else cases


def on_a_gpu(draw):
    """What the contract draws where kernels are interpreted."""
    return [
        Case("scores of ±150, 64 × 130", (*matrices(draw, 1, 64, 130, 32, score=BIG), False)),
        Case("all scores near -200, 64 × 70", (*far_below(draw, 1, 64, 70), False)),
        Case("scores grow along every row", (*ordered_rows(draw, 1, 50, 150, 16), False)),
    ]


def _sum_of_rounded_weights(case, seen, got):
    """float16: each log-sum-exp is what weights give that are rounded before they are added, and one is not right.

    float32 does not say which of two float16 numbers a weight between them becomes. So a log-sum-exp may lie anywhere
    between those of the scores a rounding lower and a rounding higher.
    """
    query, key, value, causal = case.args
    if query.dtype != torch.float16 or not isinstance(got, tuple) or len(got) != 2:
        return False
    scores = scores_of(query.double(), key.double(), causal_mask(query, key, causal))
    right, lse = torch.logsumexp(scores, dim=-1), got[1].double()
    if lse.shape != right.shape:
        return False
    epsilon = torch.finfo(torch.float32).eps
    # Scores err by a rounding of the terms that they are sums of; so does the largest, which is taken from them.
    off = 2 * epsilon * scores_of(query.double().abs(), key.double().abs(), causal_mask(query, key, False))
    low, high = (_from_rounded_weights(scores, moved) for moved in (-off, off))
    # The maximum, the logarithm, their sum, and the product with log 2 where they are in base 2: a rounding of each.
    rounding = 4 * epsilon * right.abs().nan_to_num(posinf=0.0, neginf=0.0).clamp(min=1.0) + off.amax(-1)
    explained = (lse == right) | ((lse >= low - rounding) & (lse <= high + rounding))
    shown = (right < low - rounding) | (right > high + rounding)
    return bool(explained.all() and shown.any())


def _from_rounded_weights(scores, moved):
    """The log-sum-exp tile by tile, with scores that are moved from those that the running maximum is taken of."""
    running_max = torch.full(scores.shape[:-1], -math.inf, dtype=scores.dtype)
    running_sum = torch.zeros_like(running_max)
    for tile, move in zip(scores.split(TILE, -1), moved.split(TILE, -1)):
        new_max = torch.maximum(running_max, tile.amax(dim=-1))
        reference = new_max.masked_fill(new_max == -math.inf, 0.0)
        weights = torch.exp(tile + move - reference[..., None]).clamp(max=1.0).half().double()
        running_sum = running_sum * torch.exp(running_max - reference) + weights.sum(dim=-1)
        running_max = new_max
    return running_max + running_sum.log()


def lse_bytes(query, key, value, causal):
    return tiled_bytes(query, key, value, causal, lse=True)


def flash_attention_lse(query, key, value, causal):
    """What the kernel stores."""
    return attended(query, key, value, causal)


def lse_in_tiles_of_32(query, key, value, causal):
    """The same where a program takes 32 keys a step."""
    return attended(query, key, value, causal, 32)


EXERCISE = Exercise(
    id="4.6",
    title="The log-sum-exp as a second output",
    entries=("flash_attention_lse",),
    cases=lse_cases,
    oracle=lse_oracle,
    contracts=(ragged_contract(causal="query, key, value, causal: as in 4.5"),),
    plain=(lse_from_maximum, lse_rounded),
    models=(
        model_of(flash_attention_lse, WITH_LOG_SUM_EXP, PARTS, USES, styles=((),)),
        model_of(lse_in_tiles_of_32, WITH_LOG_SUM_EXP, PARTS, USES, styles=((),), pairs=False),
    ),
    needs=TRITON,
    uses_dot=True,
    requirements=(
        LaunchesTriton(at_most=1),
        Allocates(outputs_only),
        SKIPS_THE_WORK,
        Moves(lse_bytes, slack=1.3),
    ),
    hints=(
        "When the loop ends, everything that you need is there. Which two of the three running values does log "
        "Σ exp(s) take?",
        "Σ exp(s) = exp(m) · Σ exp(s - m) = exp(m) · running_sum. So the logarithm is running_max + log(running_sum).",
        "With exp2, the scores and running_max are in base 2. (running_max + tl.log2(running_sum)) * ln 2 "
        "turns the result into a natural logarithm, with ln 2 = 0.6931471805599453.",
        "Store one float32 for each query: at lse_pointer + head * query_length + rows, with mask=rows < "
        "query_length. A row that saw no key has running_max = -inf. Take the logarithm of `total`, which is 1 "
        "there, and the result is -inf + 0 = -inf.",
    ),
    mistakes=(
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
            "probabilities_cast_before_sum",
            "The weights were rounded to float16 before they were added up. Add them up in float32. Only the matrix "
            "product with the values takes the rounded ones.",
            when=_sum_of_rounded_weights,
            every=True,
        ),
        Mistake(
            "lse_written_out_of_bounds",
            "A log-sum-exp was written past the end of the tensor, or into another head's place. Store one number for "
            "each query, at head · query_length + row, with mask=rows < query_length.",
            when=lambda case, seen, got: any(": writes " in o and " lse" in o for o in seen.out_of_bounds[:1]),
        ),
        Mistake("output_written_out_of_bounds", WRITES_PAST_THE_END, when=first_access("writes")),
        Mistake("tail_rows_read_out_of_bounds", READS_PAST_THE_END, when=first_access("reads")),
    ),
)
