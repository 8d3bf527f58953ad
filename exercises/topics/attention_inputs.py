"""Queries, keys and values for the contracts of attention exercises: magnitudes that each break something."""

from __future__ import annotations

import math

import torch

from course_lib.checker.specification.contract import Level


def drawn(
    draw, *, heads, query_length, key_length, head_dim, dtype, scores, query_layout, key_layout, value_layout, **options
):
    """query, key, value [heads, length, head_dim] and the options, in order: what a contract's `make` wants."""
    query, key, value = scores(draw, heads, query_length, key_length, head_dim)
    query, key, value = (tensor.to(dtype) for tensor in (query, key, value))
    return query_layout(draw, query), key_layout(draw, key), value_layout(draw, value), *options.values()


def ordinary(draw, heads, query_length, key_length, head_dim):
    return (draw.normal(heads, length, head_dim) for length in (query_length, key_length, key_length))


def large(draw, heads, query_length, key_length, head_dim):
    query, key, value = ordinary(draw, heads, query_length, key_length, head_dim)
    return query * 7.0, key * 7.0, value


def far_below(near):
    """Scores that all lie near a number far below zero, where exp(score - 0) is 0."""

    def make(draw, heads, query_length, key_length, head_dim):
        size = math.sqrt(-near / math.sqrt(head_dim))
        query = draw.normal(heads, query_length, head_dim, scale=0.05, shift=1.0) * size
        key = draw.normal(heads, key_length, head_dim, scale=0.05, shift=-1.0) * size
        return query, key, draw.normal(heads, key_length, head_dim)

    return make


def equal_and_far_below(draw, heads, query_length, key_length, head_dim):
    """All scores are -2^32, below the numbers that are put for minus infinity, such as -1e9; head_dim is 16.

    Of powers of two all products, their sums and L are exact, and S - L is 0 in whatever order an answer computes it.
    """
    query, key, value = ordinary(draw, heads, query_length, key_length, head_dim)
    return torch.full_like(query, 2.0**15), torch.full_like(key, -(2.0**15)), value


def ordered(slope):
    """Scores that rise (or fall) by `slope` from each key to the next."""

    def make(draw, heads, query_length, key_length, head_dim):
        ramp = slope * (torch.arange(key_length) - key_length / 2)
        direction = torch.ones(head_dim) / math.sqrt(head_dim)
        query = math.sqrt(head_dim) * direction + 0.02 * draw.normal(heads, query_length, head_dim)
        key = ramp[:, None] * direction + 0.02 * draw.normal(heads, key_length, head_dim)
        return query, key, draw.normal(heads, key_length, head_dim)

    return make


def beyond_16_bits(draw, heads, query_length, key_length, head_dim):
    """Scores near -6,000: their products pass what float16 holds, and the scores' differences what it keeps of them."""
    size = math.sqrt(6000.0 / math.sqrt(head_dim))
    query = draw.normal(heads, query_length, head_dim, scale=0.002, shift=1.0) * size
    key = draw.normal(heads, key_length, head_dim, scale=0.002, shift=-1.0) * size
    return query, key, draw.normal(heads, key_length, head_dim)


def products_beyond_16_bits(draw, heads, query_length, key_length, head_dim):
    """Products of 81,920 with all keys for all queries but the last, which is ordinary; float16 ends at 65,504.

    All keys weigh alike for those, so that a form which rounds its scores errs no more than others, and the case has a
    narrow tolerance. Products are whole numbers, exact in float32.
    """
    query, key = (draw.integers(heads, n, head_dim, low=-1, high=2).float() for n in (query_length, key_length))
    query[:, :-1], query[..., 0], key[..., 0] = 0.0, 0.0, 512.0
    query[:, :-1, 0] = 160.0
    return query, key, draw.normal(heads, key_length, head_dim)


def one_above_many(draw, heads, query_length, key_length, head_dim):
    """Weights of 1 for the first key and 2⁻¹⁷ for each of the others; 1,500 of them are a hundredth of the sum.

    A sum in float16 is 1 and stays there: 64 keys add less than half its last digit. Other queries have equal scores.
    All keys have one value, so that a sum that is wrong scales the result.
    """
    query, key = torch.zeros(heads, query_length, head_dim), torch.zeros(heads, key_length, head_dim)
    query[:, 0, 0] = math.sqrt(head_dim)
    key[:, 1:, 0] = -(17 * math.log(2) + 2.0**-8)  # in float16 by a last digit below 2⁻¹⁷, and not above
    return query, key, (4 * draw.normal(heads, 1, head_dim)).round().repeat(1, key_length, 1)


def fits(dtype, scores) -> bool:
    """Whether these magnitudes are for this dtype: scores near -6,000 leave float32's own rounding in plain sight."""
    return dtype == torch.float16 or scores is not beyond_16_bits


def heads_apart(draw, heads, query_length, key_length, head_dim):
    """Heads whose scores lie 160 apart."""
    query, key, value = far_below(-20.0)(draw, heads, query_length, key_length, head_dim)
    sign = torch.tensor([1.0 if head % 2 else -1.0 for head in range(heads)])[:, None, None]
    return query * 2, key * 2 * sign, value


def equal(draw, heads, query_length, key_length, head_dim):
    """All scores are 0, and the values lie near 80: a sum of a thousand of them passes what 16 bits hold."""
    query, key, value = ordinary(draw, heads, query_length, key_length, head_dim)
    return query * 0, key, value * 0.25 + 80.0


MAGNITUDES = (
    Level(ordinary, ""),
    Level(large, "scores of ±150"),
    Level(far_below(-160.0), "scores near -160"),
    Level(far_below(-24.0), "scores near -24"),
    Level(ordered(0.15), "scores that rise along every row"),
    Level(ordered(-0.15), "scores that fall along every row"),
    Level(heads_apart, "heads whose scores lie 160 apart"),
    Level(equal, "equal scores, values near 80"),
)
# Where float16 is among the dtypes: see `fits`.
WITH_16_BITS = (*MAGNITUDES, Level(beyond_16_bits, "scores near -6,000"))
