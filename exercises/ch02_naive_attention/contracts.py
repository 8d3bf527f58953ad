"""What the docstrings of exercises 2.3 to 2.6 leave open: sizes of numbers, and how a softmax may be computed."""

from __future__ import annotations

import math

import torch

from course_lib.checker.specification.contract import Level


def scores_like(shift: float = 0.0, spread: float = 1.0, slope: float = 0.0):
    """Scores [heads, query_length, key_length] near `shift`, which rise by `slope` from each key to the next."""

    def make(draw, heads, query_length, key_length):
        ramp = slope * (torch.arange(key_length) - key_length / 2)
        return draw.normal(heads, query_length, key_length, shift=shift, scale=spread) + ramp

    return make


SCORES = (
    Level(scores_like(), ""),
    Level(scores_like(spread=70.0), "scores of ±200"),
    Level(scores_like(shift=1000.0, spread=5.0), "scores near 1,000"),
    Level(scores_like(shift=-200.0, spread=3.0), "scores near -200"),
    Level(scores_like(shift=-20_000.0, spread=40.0), "scores near -20,000"),
    Level(scores_like(slope=1.5), "scores that rise along every row"),
    Level(scores_like(slope=-1.5), "scores that fall along every row"),
    Level(scores_like(slope=150.0), "every score 150 above the one before it"),
)


def by_log_sum_exp(scores, visible=None):
    """Probabilities as exp(score - log-sum-exp), in float32 at least."""
    wide = scores.to(torch.promote_types(scores.dtype, torch.float32))
    wide = wide if visible is None else wide.masked_fill(~visible, -math.inf)
    total = torch.logsumexp(wide, dim=-1, keepdim=True)
    return torch.exp(wide - total.masked_fill(total == -math.inf, 0.0)).to(scores.dtype)
