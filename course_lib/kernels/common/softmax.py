"""The online softmax: how a row's weights come to be while its scores arrive tile by tile.

A softmax needs the row's maximum before its first exponential, and the sum of all of them before its first result. The
online form needs neither. It keeps, for each row, the largest score so far and the sum of the weights so far, both of
which grow with every tile:

    m  running_max     the largest score so far
    ℓ  running_sum     Σ 2^(score - m) over the scores so far
    O  accumulator     Σ 2^(score - m) · value, not yet divided by ℓ

When a tile brings a larger score, everything that was summed is too large by 2^(m_new - m_old), and is multiplied by
`rescale` = 2^(m_old - m_new), once. `weigh` is that step in every Triton kernel that attends to tiles of keys. It
returns the tile's weights and the factor; the kernel says what it sums. `finish_rows` divides at the end.

A learned sink is one more score in every row, and has no value: a number for each query head, which the scale does not
multiply. It joins the sum, once, so the weights of the keys add up to less than 1. `finish_rows` is where.

Scores are in units of log 2, since the hardware has exp2 and not exp: softmax(s) = 2^(s·log2 e) / Σ 2^(s·log2 e). The
factor log2 e costs nothing once it is folded into the scale, which is what `scale_in_log2` does.
Source: Milakov and Gimelshein, Online normalizer calculation for softmax, arXiv 1805.02867.
"""

import math

import triton
import triton.language as tl

from course_lib.kernels.common.numbers import LN_2, LOG2_E

PAPERS_THRESHOLD, LARGEST_THRESHOLD = 8.0, 15.0  # of lazy rescaling, powers of 2; float16 has 2^15, and not 2^16


def scale_in_log2(scale: float | None, head_dim: int) -> float:
    """What brings a product of query and key to a score in units of log 2; scale is 1/√head_dim when None."""
    return LOG2_E.value * (1 / math.sqrt(head_dim) if scale is None else scale)


def check_threshold(threshold) -> None:
    """Raise a ValueError unless it is a threshold of lazy rescaling, see `weigh`."""
    if not 0 <= threshold <= LARGEST_THRESHOLD:
        raise ValueError(f"threshold is {threshold!r}; it must be from 0 to {LARGEST_THRESHOLD:g}.")


@triton.jit
def weigh(scores, running_max, scale_log2, MASKED: tl.constexpr, EXPONENT: tl.constexpr = 0.0,
          THRESHOLD: tl.constexpr = 0.0):  # fmt: skip
    """One step of the online softmax: (new_max [BLOCK_M], weights [BLOCK_M, BLOCK_N], rescale [BLOCK_M]).

    scores [BLOCK_M, BLOCK_N] times scale_log2 are in units of log 2; the scale rides along in the multiply-add of the
    exponent. What was summed so far has to be multiplied by `rescale`, which is 1 where the maximum did not grow.
    MASKED: scores may be -inf, where there is no key. EXPONENT: the largest weight is 2^EXPONENT, for weights that are
    rounded to few bits; running_max then lies that much below the largest score. THRESHOLD: a row keeps its maximum
    until a score exceeds it by more than that, and weights reach 2^THRESHOLD; any number in its place gives the same
    quotient (lazy rescaling, FlashAttention-4).
    """
    new_max = tl.maximum(running_max, tl.max(scores, axis=1) * scale_log2 - EXPONENT)  # [BLOCK_M]
    if THRESHOLD > 0:
        new_max = tl.where(new_max > running_max + THRESHOLD, new_max, running_max)
    reference_max = new_max
    if MASKED:
        # A row that has seen no key yet has the maximum -inf, and -inf - -inf is NaN: measure such a row from 0.
        reference_max = tl.where(new_max == float("-inf"), 0.0, new_max)
    weights = tl.exp2(scores * scale_log2 - reference_max[:, None])  # [BLOCK_M, BLOCK_N]
    rescale = tl.exp2(running_max - reference_max)  # [BLOCK_M]
    return new_max, weights, rescale


@triton.jit
def finish_rows(accumulator, running_max, running_sum, sink=None):
    """The output and the log-sum-exp (natural logarithm) of finished rows; zeros and -inf for a row that saw no key.

    sink: the score (natural logarithm) that joins the sum and has no value, one number or [BLOCK_M], or None. A row
    that saw no key then has it for its log-sum-exp.
    """
    if sink is not None:
        sink_log2 = sink * LOG2_E
        new_max = tl.maximum(running_max, sink_log2)  # [BLOCK_M]
        reference_max = tl.where(new_max == float("-inf"), 0.0, new_max)  # a sink of -inf is none
        rescale = tl.exp2(running_max - reference_max)  # [BLOCK_M]
        running_sum = running_sum * rescale + tl.exp2(sink_log2 - reference_max)
        running_max = new_max
        accumulator = accumulator * rescale[:, None]
    total = tl.where(running_sum == 0.0, 1.0, running_sum)  # [BLOCK_M]
    output = accumulator / total[:, None]  # [BLOCK_M, HEAD_DIM]
    log_sum_exp = (running_max + tl.log2(total)) * LN_2  # [BLOCK_M], the maximum of an empty row being -inf
    return output, log_sum_exp
