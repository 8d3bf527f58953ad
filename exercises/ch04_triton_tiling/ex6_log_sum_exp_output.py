"""Exercise 4.6: the log-sum-exp as a second output."""

from __future__ import annotations

import math

import torch

from course_lib.checker import TRITON, Allocates, Case, Exercise, LaunchesTriton, Mistake, Moves
from exercises.ch04_triton_tiling.ex5_ragged_kernel import ragged_oracle, ragged_prescaled, ragged_rounded
from exercises.ch04_triton_tiling.parts import (
    BIG,
    SKIPS_THE_WORK,
    TILE,
    causal_mask,
    far_below,
    layout_case,
    matrices,
    outputs_only,
    tiled_bytes,
)
from exercises.topics.attention import (
    UNDERFLOW,
    attention,
    close_to,
    log_sum_exp,
    ordered_rows,
    rounded_log_sum_exp,
    scores_of,
    stored_in_one_head,
)
from exercises.topics.attention_sentences import READS_PAST_THE_END, STARTS_AT_ZERO, WRITES_PAST_THE_END
from exercises.topics.evidence import first_access


def lse_oracle(query, key, value, causal):
    visible = causal_mask(query, key, causal)
    return attention(query, key, value, visible), log_sum_exp(query, key, visible)


def lse_from_maximum(query, key, value, causal):
    """As a kernel makes it: maximum plus logarithm of the sum, in float32 at least."""
    accurate = torch.promote_types(query.dtype, torch.float32)
    _, row_max, row_sum = _statistics(query.to(accurate), key.to(accurate), causal)
    lse = row_max + row_sum.masked_fill(row_max == -math.inf, 1.0).log()
    return ragged_prescaled(query, key, value, causal), lse


def lse_rounded(query, key, value, causal):
    return ragged_rounded(query, key, value, causal), rounded_log_sum_exp(query, key, causal_mask(query, key, causal))


def lse_cases(draw):
    return [
        Case("two heads, 65 × 129", (*matrices(draw, 2, 65, 129, 32), False)),
        Case("65 × 63, head dimension 24, causal", (*matrices(draw, 1, 65, 63, 24), True)),
        layout_case(draw, "q, k and v each stored in another way, 30 × 100, causal", 2, 30, 100, 48, rest=(True,)),
        Case("one query, one key", (*matrices(draw, 1, 1, 1, 16), True)),
        Case("scores of ±150, 64 × 130", (*matrices(draw, 1, 64, 130, 32, score=BIG), False)),
        Case("all scores near -200, 64 × 70", (*far_below(draw, 1, 64, 70), False)),
        Case("150 queries, 70 keys, causal: 80 queries see nothing", (*matrices(draw, 1, 150, 70, 32), True)),
        Case("float16, 96 × 200", (*matrices(draw, 1, 96, 200, 64, dtype=torch.float16), False)),
        Case("scores grow along every row", (*ordered_rows(draw, 1, 50, 150, 16), False)),
        Case("192 × 192, causal, bytes counted", (*matrices(draw, 1, 192, 192, 32), True), metered=True),
    ]


def _statistics(query, key, causal):
    """Scaled scores, row maximum and row sum of weights, [heads, query_length, ...]."""
    scores = scores_of(query, key, causal_mask(query, key, causal))
    row_max = scores.amax(dim=-1)
    reference = row_max.masked_fill(row_max == -math.inf, 0.0)
    return scores, row_max, torch.exp(scores - reference[..., None]).sum(dim=-1)


def _wrong_lse(change):
    """A fingerprint with a right output and another second result: `change(row_max, row_sum)`."""

    def result(query, key, value, causal):
        scores, row_max, row_sum = _statistics(query, key, causal)
        nothing = row_max == -math.inf
        return ragged_oracle(query, key, value, causal), change(row_max, row_sum.masked_fill(nothing, 1.0))

    return result


def _empty_row_lse(value_for_empty):
    def result(query, key, value, causal):
        output, lse = lse_oracle(query, key, value, causal)
        return output, lse.masked_fill(lse == -math.inf, value_for_empty)

    return result


def _lse_from_zero(query, key, value, causal):
    """The maximum starts at 0: a row without a key, or with scores that underflow, ends with it and a sum of 0."""
    output, lse = lse_oracle(query, key, value, causal)
    lost = lse < UNDERFLOW
    return output.masked_fill(lost[..., None], 0.0), lse.masked_fill(lost, 0.0)


def _sum_of_rounded_weights(case, seen, got):
    """float16: the log-sum-exp errs as it does when the weights are rounded before they are added."""
    query, key, value, causal = case.args
    if (
        query.dtype != torch.float16
        or not isinstance(got, tuple)
        or len(got) != 2
        or not isinstance(got[1], torch.Tensor)
    ):
        return False
    scores = scores_of(query.double(), key.double(), causal_mask(query, key, causal))
    right = torch.logsumexp(scores, dim=-1)
    running_max = torch.full_like(right, -math.inf)
    running_sum = torch.zeros_like(right)
    for start in range(0, scores.shape[-1], TILE):
        tile = scores[..., start : start + TILE]
        new_max = torch.maximum(running_max, tile.amax(dim=-1))
        weights = torch.exp(tile - new_max[..., None]).half().double()
        running_sum = running_sum * torch.exp(running_max - new_max) + weights.sum(dim=-1)
        running_max = new_max
    rounded = running_max + running_sum.log()
    if got[1].shape != right.shape:
        return False
    unexplained = (got[1].double() - rounded).abs().mean()
    return bool(unexplained < 0.3 * (rounded - right).abs().mean())


def _lse_unwritten(case, seen, got):
    """The output is right, and of the second result a part was never written."""
    if not seen.unwritten or not isinstance(got, tuple) or len(got) != 2 or not isinstance(got[1], torch.Tensor):
        return False
    return int(got[1].isnan().sum()) == seen.unwritten and close_to(got[0], ragged_oracle(*case.args))


def lse_bytes(query, key, value, causal):
    return tiled_bytes(query, key, value, causal, lse=True)


EXERCISE = Exercise(
    id="4.6",
    title="The log-sum-exp as a second output",
    entries=("flash_attention_lse",),
    cases=lse_cases,
    oracle=lse_oracle,
    plain=(lse_from_maximum, lse_rounded),
    needs=TRITON,
    uses_dot=True,
    requirements=(
        LaunchesTriton(at_most=1),
        Allocates(outputs_only),
        SKIPS_THE_WORK,
        Moves(lse_bytes, slack=1.3),
    ),
    hints=(
        "Start from your kernel of 4.5: everything you need is there when its loop ends. Which two of the three "
        "running values does log Σ exp(s) take?",
        "Σ exp(s) = exp(m) · Σ exp(s - m) = exp(m) · running_sum, so its logarithm is running_max + log(running_sum).",
        "If your scores are in units of log 2 (exp2), so is running_max: (running_max + tl.log2(running_sum)) * ln 2 "
        "brings both back, with ln 2 = 0.6931471805599453.",
        "Store one float32 for each query: lse_pointer + head * query_length + rows, with mask=rows < query_length. A "
        "row that saw no key has running_max = -inf; take the log of the sum that you divide by (1 there), and -inf + "
        "0 is -inf.",
    ),
    mistakes=(
        Mistake(
            "log_of_sum_only",
            "The running maximum is missing from the log-sum-exp. The sum is of exp(score - maximum): add the "
            "maximum back.",
            result=_wrong_lse(lambda row_max, row_sum: row_sum.log()),
        ),
        Mistake(
            "lse_in_base_2",
            "The log-sum-exp is in base 2. The kernel works in units of log 2; multiply by ln 2 = 0.6931 before "
            "it is stored.",
            result=_wrong_lse(lambda row_max, row_sum: (row_max + row_sum.log()) / math.log(2)),
        ),
        Mistake(
            "mixed_bases",
            "The maximum is in units of log 2 and the logarithm of the sum is natural. Bring both to one base: "
            "(maximum + log2(sum)) · ln 2.",
            result=(
                _wrong_lse(lambda row_max, row_sum: row_max / math.log(2) + row_sum.log()),
                _wrong_lse(lambda row_max, row_sum: row_max + row_sum.log() * math.log(2)),
                _wrong_lse(lambda row_max, row_sum: row_max / math.log(2) + row_sum.log() / math.log(2) ** 2),
            ),
        ),
        Mistake(
            "sum_without_log",
            "The maximum and the sum are added without a logarithm: log(exp(m) · sum) is m + log(sum).",
            result=_wrong_lse(lambda row_max, row_sum: row_max + row_sum),
        ),
        Mistake(
            "unscaled_maximum",
            "The maximum is that of the raw scores. It must be scaled like them: maximum · scale + log(sum).",
            result=lambda q, k, v, causal: (
                ragged_oracle(q, k, v, causal),
                _statistics(q, k, causal)[1] * math.sqrt(q.shape[-1])
                + _statistics(q, k, causal)[2].masked_fill(_statistics(q, k, causal)[1] == -math.inf, 1.0).log(),
            ),
        ),
        Mistake(
            "empty_row_lse_nan",
            "A query that sees no key has a log-sum-exp of NaN. The logarithm of an empty sum is minus infinity.",
            result=_empty_row_lse(math.nan),
        ),
        Mistake(
            "empty_row_lse_zero",
            "A query that sees no key has a log-sum-exp of 0, as if its weights added up to 1. The logarithm of an "
            "empty sum is "
            "minus infinity.",
            result=_empty_row_lse(0.0),
        ),
        Mistake("maximum_starts_at_zero", STARTS_AT_ZERO, result=_lse_from_zero),
        Mistake(
            "probabilities_cast_before_sum",
            "The weights were rounded to float16 before they were added up. Sum them in float32 first; the cast is "
            "only for "
            "the matrix product with the values.",
            when=_sum_of_rounded_weights,
            every=True,
        ),
        Mistake(
            "lse_stored_in_one_head",
            "Every head's log-sum-exp was stored in head 0's place. Add head · query_length to its pointer.",
            result=lambda q, k, v, causal: (
                ragged_oracle(q, k, v, causal),
                stored_in_one_head(lambda *args: lse_oracle(*args)[1])(q, k, v, causal),
            ),
        ),
        Mistake(
            "lse_written_out_of_bounds",
            "The log-sum-exps were written past their end, or into another head's place. One number for each query, at "
            "head · query_length + row, with mask=rows < query_length.",
            when=lambda case, seen, got: any(": writes " in o and " lse" in o for o in seen.out_of_bounds[:1]),
        ),
        Mistake(
            "lse_tail_unwritten",
            "Log-sum-exps were never written. Every row < query_length needs one, those of the last, partly filled "
            "tile too.",
            when=_lse_unwritten,
        ),
        Mistake("output_written_out_of_bounds", WRITES_PAST_THE_END, when=first_access("writes")),
        Mistake("tail_rows_read_out_of_bounds", READS_PAST_THE_END, when=first_access("reads")),
    ),
)
