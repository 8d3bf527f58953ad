"""What 10.2, 10.3, 10.4 and 10.6 share: tensors as the forward pass left them, and an L that was bounded from below."""

from __future__ import annotations

import torch

from course_lib.checker.specification.contract import Level
from course_lib.checker.specification.model import Slip, Slips
from exercises.topics.attention_backward import delta_of, left_by_the_forward, positions_seen
from exercises.topics.attention_backward_model import STYLES
from exercises.topics.attention_inputs import MAGNITUDES, far_below, ordinary

# Without equal scores and values near 80, whose dP - Δ is rounding for the most part; 10.6 has them.
SCORES = (*MAGNITUDES[:-1], Level(far_below(-3000.0), "scores near -3,000"))


def one_head(draw, query_length, key_length, head_dim, scores, causal):
    """query, key, value, dO [length, head_dim], L and Δ [query_length]."""
    query, key, value = (tensor.float() for tensor in scores(draw, 1, query_length, key_length, head_dim))
    visible = positions_seen(query_length, key_length, causal)
    output, log_sum = left_by_the_forward(query, key, value, visible)
    gradient = draw.normal(1, query_length, head_dim)
    delta = delta_of(output, gradient)
    return tuple(tensor[0] for tensor in (query, key, value, gradient, log_sum, delta))


def rows_visible(query_length, key_length, causal, rows=slice(None), keys=slice(None)) -> torch.Tensor | None:
    """The causal mask of some queries against some keys, or None."""
    visible = positions_seen(query_length, key_length, causal)
    return None if visible is None else visible[rows, keys]


def lower_than_bounds(query_is=4.0, key_is=-(2.0**18)):
    """Scores that spread by 1 around -2¹⁸ where head_dim is 16, by the first column: a power of two in Q, one in K.

    Low enough for the numbers that L is bounded by, and high enough for float32: its rounding moves P by some 10 %.
    The smaller of the two stands in the tensor that dS is multiplied with, since that scales dS's rounding.
    """

    def make(draw, heads, query_length, key_length, head_dim):
        query, key, value = ordinary(draw, heads, query_length, key_length, head_dim)
        query[..., 0], key[..., 0] = query_is, key_is
        return query, key, value

    return make


BOUNDS = (1e2, 1e3, 1e4, 1e5)
BOUNDED = tuple(f"log_sum_bounded_below__{bound:.0f}" for bound in BOUNDS)
BOUNDED_BELOW = tuple(
    Slip(
        name,
        "L is bounded from below by a finite number, or replaced where it is lower. All scores of a row may lie lower "
        "still, and then P is 0 where it is not: -inf alone is replaced.",
        alone=True,
    )
    for name in BOUNDED
)


def as_it_is_read(slips: Slips, log_sum: torch.Tensor, loop: str = "") -> torch.Tensor:
    """L, or where it is bounded from below what it is bounded to; loop: "keys" or "queries", where there are two."""
    for name, bound in zip(BOUNDED, BOUNDS):
        if slips(name, f"{name}_{loop}"):
            return log_sum.clamp(min=-bound)
    return log_sum


def without_bounds(slips: Slips) -> Slips:
    """The styles alone where L is bounded: P is 0 in such rows, and no rounding of large scores decides anything."""
    bounded = [f"{name}{loop}" for name in BOUNDED for loop in ("", "_keys", "_queries")]
    return Slips(filter(slips, STYLES)) if slips(*bounded) else slips
