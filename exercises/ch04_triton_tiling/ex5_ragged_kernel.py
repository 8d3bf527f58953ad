"""Exercise 4.5: any length, any head dimension."""

from __future__ import annotations

import math

import torch

from course_lib.checker import TRITON, Allocates, Case, Exercise, LaunchesTriton, Mistake, Moves
from exercises.ch04_triton_tiling.ex4_causal_kernel import of_causal_kernels, read_by_program, unguarded, until_tile_end
from exercises.ch04_triton_tiling.parts import (
    BIG,
    SKIPS_THE_WORK,
    TILE,
    causal_mask,
    causal_pairs,
    far_below,
    layout_case,
    matrices,
    of_every_kernel,
    outputs_only,
    overflowing,
    read_as_contiguous,
    tiled_bytes,
)
from exercises.topics.attention import attention, from_zero, hidden_scored, prescaled, rounded, streamed, zeros_scored
from exercises.topics.attention_sentences import (
    ACCUMULATOR_NOT_RESCALED,
    EMPTY_ROW,
    HIDDEN_SCORED_ZERO,
    LOG2E_MISSING,
    MISALIGNED,
    NATURAL_EXP,
    NEXT_KEY,
    NO_CAUSAL_MASK,
    OFF_BY_ONE,
    READS_PAST_THE_END,
    SKIPS_TOO_MUCH,
    STARTS_AT_ZERO,
    STRIDES,
    WRITES_PAST_THE_END,
)
from exercises.topics.evidence import first_access


def ragged_oracle(query, key, value, causal):
    return attention(query, key, value, causal_mask(query, key, causal))


def ragged_prescaled(query, key, value, causal):
    return prescaled(query, key, value, causal_mask(query, key, causal))


def ragged_rounded(query, key, value, causal):
    return rounded(query, key, value, causal_mask(query, key, causal))


def ragged_cases(draw):
    prime = draw.choice((67, 71, 73, 79, 83))
    cases = [
        Case("whole tiles, head dimension 40", (*matrices(draw, 1, 64, 64, 40), False)),
        Case("one query, one key", (*matrices(draw, 1, 1, 1, 16), False)),
        Case("two heads, 130 × 129, head dimension 32", (*matrices(draw, 2, 130, 129, 32), False)),
        Case(f"{prime} × {prime}, head dimension 24, causal", (*matrices(draw, 1, prime, prime, 24), True)),
        Case(
            "one query at the end of 200 keys, causal, float16",
            (*matrices(draw, 2, 1, 200, 80, dtype=torch.float16), True),
        ),
        Case("150 queries, 70 keys, causal: 80 queries see nothing", (*matrices(draw, 1, 150, 70, 32), True)),
        Case("70 queries, 100 keys, causal", (*matrices(draw, 1, 70, 100, 32), True)),
        Case("scores of ±150, 63 × 127", (*matrices(draw, 1, 63, 127, 32, score=BIG), False)),
        Case("all scores near -200, 65 × 70", (*far_below(draw, 1, 65, 70), False)),
        Case("float16, 1024 equal scores, values near 100", (*overflowing(draw), False)),
        layout_case(draw, "q, k and v each stored in another way, 30 × 90", 2, 30, 90, 48, rest=(False,)),
        Case(
            "NaN between the rows of each matrix",
            (*(draw.spread_out(matrix, 24) for matrix in matrices(draw, 1, 50, 64, 40)), True),
        ),
        Case("257 × 257, causal, bytes counted", (*matrices(draw, 1, 257, 257, 32), True), metered=True),
    ]
    if draw.on_gpu:
        cases.append(
            Case(
                "one head, 1000 × 3001, head dimension 72, float16, causal",
                (*matrices(draw, 1, 1000, 3001, 72, dtype=torch.float16), True),
            )
        )
    return cases


def _head_dim_access(case, seen, got):
    """Wild accesses although all lengths are whole tiles: they can only come from the head dimension."""
    query, key = case.args[:2]
    return bool(seen.out_of_bounds) and query.shape[1] % TILE == 0 and key.shape[1] % TILE == 0


def _ragged(mask):
    """A fingerprint that changes the mask of causal cases."""
    return lambda q, k, v, causal: attention(q, k, v, mask(q, k) if causal else None)


def _unwritten_tail(query, key, value, causal):
    output = ragged_oracle(query, key, value, causal)
    output[:, query.shape[1] // TILE * TILE :] = math.nan
    return output


def _scale_of_padding(query, key, value, causal):
    padded = max(16, 1 << (query.shape[-1] - 1).bit_length())
    return attention(query, key, value, causal_mask(query, key, causal), scale=1 / math.sqrt(padded))


EXERCISE = Exercise(
    id="4.5",
    title="Any length, any head dimension",
    entries=("flash_attention_ragged",),
    cases=ragged_cases,
    oracle=ragged_oracle,
    plain=(ragged_prescaled, ragged_rounded),
    needs=TRITON,
    uses_dot=True,
    requirements=(
        LaunchesTriton(at_most=1),
        Allocates(outputs_only),
        SKIPS_THE_WORK,
        Moves(tiled_bytes, slack=1.3),
    ),
    hints=(
        "Three edges need a mask: query rows >= query_length, keys >= key_length, and columns >= head_dim. The first "
        "two are run-time numbers; for the columns take BLOCK_D = max(16, triton.next_power_of_2(head_dim)) as a "
        "constexpr.",
        "Load with mask=(rows < query_length)[:, None] & (columns < head_dim)[None, :] and other=0.0. Zero columns "
        "add nothing to a dot product, so head_dim is done with that, in loads and in the store.",
        "Zero keys are another matter: a key of zeros scores 0, and exp(0) is not 0. Their scores must become minus "
        "infinity: visible = (keys < key_length)[None, :], and the causal condition on top of it.",
        "A row that sees no key has running_max = new_max = -inf, and -inf - -inf is NaN. Measure such a row from 0: "
        'reference = tl.where(new_max == float("-inf"), 0.0, new_max), then exp(scores - reference) is exp(-inf) = '
        "0.",
        "The scale is 1/√head_dim, of the true one. The grid rounds up: (triton.cdiv(query_length, BLOCK_M), heads).",
    ),
    mistakes=(
        Mistake(
            "tail_keys_scored",
            "The keys past the end were loaded as zeros and counted: a key of zeros scores 0, and exp(0 - "
            "maximum) is not 0. Give their scores minus infinity.",
            result=lambda q, k, v, causal: zeros_scored(q, k, v, TILE, causal_mask(q, k, causal)),
        ),
        Mistake(
            "hidden_scored_zero",
            HIDDEN_SCORED_ZERO,
            result=lambda q, k, v, causal: hidden_scored(
                q, k, v, causal_pairs(q, k, 0 if causal else 1 << 30), read_by_program(q, k, causal), 0.0
            ),
        ),
        Mistake(
            "empty_row_uniform",
            "A query that sees no key shares its weight evenly among hidden ones: a large negative number stands where "
            "minus infinity belongs, and such a row cannot tell it from a score. Its output is zeros.",
            result=lambda q, k, v, causal: hidden_scored(
                q, k, v, causal_pairs(q, k, 0 if causal else 1 << 30), read_by_program(q, k, causal), -1e30
            ),
        ),
        Mistake("no_causal_mask", NO_CAUSAL_MASK, result=lambda q, k, v, causal: attention(q, k, v)),
        Mistake(
            "causal_off_by_one",
            OFF_BY_ONE,
            result=(
                _ragged(lambda q, k: causal_pairs(q, k, -1)),
                unguarded(lambda q, k: (causal_pairs(q, k, -1), read_by_program(q, k))),
            ),
        ),
        Mistake(
            "sees_the_next_key",
            NEXT_KEY,
            result=_ragged(lambda q, k: causal_pairs(q, k, 1) & until_tile_end(q, k)),
        ),
        Mistake(
            "accumulator_not_rescaled",
            ACCUMULATOR_NOT_RESCALED,
            result=lambda q, k, v, causal: streamed(
                q, k, v, TILE, visible=causal_mask(q, k, causal), rescale_accumulator=False
            ),
        ),
        *of_causal_kernels(lambda q, k, causal: causal_mask(q, k, causal)),
        *of_every_kernel(ragged_oracle, lambda q, k, causal: causal_mask(q, k, causal)),
        Mistake(
            "query_tail_unwritten",
            "The last, partly filled tile of queries was never computed: the grid was rounded down. Use "
            "triton.cdiv(query_length, BLOCK_M).",
            result=_unwritten_tail,
        ),
        Mistake(
            "scale_of_the_padding",
            "The scale is that of the padded head dimension. It is 1/√head_dim of the tensor, not of BLOCK_D.",
            result=_scale_of_padding,
        ),
        Mistake(
            "causal_misaligned",
            MISALIGNED,
            result=_ragged(lambda q, k: torch.arange(k.shape[1]) <= torch.arange(q.shape[1])[:, None]),
        ),
        Mistake(
            "loop_end_ignores_offset",
            SKIPS_TOO_MUCH,
            result=_ragged(lambda q, k: causal_pairs(q, k) & until_tile_end(q, k, offset=False)),
        ),
        Mistake(
            "empty_row_nan",
            EMPTY_ROW,
            result=lambda q, k, v, causal: attention(q, k, v, causal_mask(q, k, causal), empty=math.nan),
        ),
        Mistake(
            "maximum_starts_at_zero",
            STARTS_AT_ZERO,
            result=lambda q, k, v, causal: from_zero(q, k, v, causal_mask(q, k, causal)),
        ),
        Mistake(
            "natural_exp",
            NATURAL_EXP,
            result=lambda q, k, v, causal: attention(
                q, k, v, causal_mask(q, k, causal), scale=math.log2(math.e) / math.sqrt(q.shape[-1])
            ),
        ),
        Mistake(
            "log2e_missing",
            LOG2E_MISSING,
            result=lambda q, k, v, causal: attention(
                q, k, v, causal_mask(q, k, causal), scale=math.log(2) / math.sqrt(q.shape[-1])
            ),
        ),
        Mistake(
            "strides_ignored",
            STRIDES,
            result=lambda q, k, v, causal: (
                None if _has_gaps(q, k) else read_as_contiguous(q, k, v, causal_mask(q, k, causal))
            ),
        ),
        Mistake(
            "head_dim_not_masked",
            "Columns past head_dim were read or written: BLOCK_D is the next power of two, and its extra columns "
            "belong to the "
            "next row. Mask the columns in every load and in the store.",
            when=_head_dim_access,
        ),
        Mistake(
            "output_written_out_of_bounds",
            WRITES_PAST_THE_END,
            when=first_access("writes"),
        ),
        Mistake("tail_rows_read_out_of_bounds", READS_PAST_THE_END, when=first_access("reads")),
    ),
)


def _has_gaps(query, key) -> bool:
    """The case with NaN between its rows: a float64 copy has lost the gaps, so nothing can be said of it."""
    return query.shape[-1] == 40 and query.shape[-2] == 50 and key.shape[-2] == 64
