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


def lowest(draw, heads, query_length, key_length):
    """Scores at the lower end of float16, none of them below it."""
    return draw.normal(heads, query_length, key_length, shift=-65_480.0, scale=20.0).clamp(-65_504.0, -65_440.0)


SCORES = (
    Level(scores_like(), ""),
    Level(scores_like(spread=70.0), "scores of ±200"),
    Level(scores_like(shift=1000.0, spread=5.0), "scores near 1,000"),
    Level(scores_like(shift=-200.0, spread=3.0), "scores near -200"),
    Level(scores_like(shift=-20_000.0, spread=40.0), "scores near -20,000"),
    Level(lowest, "scores near -65,480"),
    Level(scores_like(slope=1.5), "scores that rise along every row"),
    Level(scores_like(slope=-1.5), "scores that fall along every row"),
    Level(scores_like(slope=150.0), "every score 150 above the one before it"),
)


def by_log_sum_exp(scores, visible=None):
    """Probabilities as exp(score - log-sum-exp), with all that a float32 of the log-sum-exp's size may be off by.

    The exponent is rounded, so the error grows with the scores: at 200 it is 1e-5 of a probability. Exponentials in
    base 2 of scores times log2(e) are off by as much. It is computed and not rounded, so that no luck is in it. Where
    one score has all the weight, the log-sum-exp is that score, and its difference from it is 0, whatever its size.
    """
    wide = scores.to(torch.promote_types(scores.dtype, torch.float32))
    wide = wide if visible is None else wide.masked_fill(~visible, -math.inf)
    exact = wide.double()
    total = torch.logsumexp(exact, dim=-1, keepdim=True)
    largest = exact.amax(dim=-1, keepdim=True)
    off = torch.finfo(wide.dtype).eps * torch.maximum(total.abs(), largest.abs()).clamp(min=1.0)
    off = off.masked_fill(total == largest, 0.0)
    return torch.exp(exact - torch.where(total == -math.inf, 0.0, total + off))
