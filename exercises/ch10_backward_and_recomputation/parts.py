"""What 10.3 and 10.4 share: one head's tensors as the forward pass left them."""

from __future__ import annotations

import torch

from course_lib.checker.specification.contract import Level
from exercises.topics.attention_backward import delta_of, left_by_the_forward, positions_seen
from exercises.topics.attention_inputs import MAGNITUDES, far_below

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
