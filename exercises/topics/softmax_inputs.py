"""Rows of scores for the contracts of softmax exercises: magnitudes that each break something, and masks."""

from __future__ import annotations

import math

import torch

from course_lib.checker.specification.contract import Level
from exercises.topics.vector_inputs import ordinary, spread

wide = spread(80.0)


def near(level):
    """Scores that lie around a number, where exp of them is 0 or infinity."""
    return spread(around=level)


def ordered(slope):
    """Scores that rise (or fall) by `slope` from each column to the next."""

    def make(draw, rows, columns):
        return slope * torch.arange(columns) + draw.normal(rows, columns, scale=0.1) + draw.normal(rows, 1)

    return make


def rows_apart(draw, rows, columns):
    """Rows that lie 700 apart."""
    return draw.normal(rows, columns) + 700.0 * (torch.arange(rows) - rows // 2)[:, None]


def far_below_finite(rows, columns):
    """One score near -1e20 in each row and the rest -inf: below any number that might stand in for -inf.

    A row of several such scores would be all rounding; of one, the softmax is exactly 1. The scores are powers of two:
    times log2(e) none of them is rounded, so that a compiler may fuse `x * log2e - maximum * log2e` into one operation,
    which does not round the product. Of other scores that would make 10¹² out of the difference 0.
    """
    x = torch.full((rows, columns), -math.inf)
    for row in range(rows):
        x[row, (7 + 11 * row) % columns] = -(2.0 ** (66 + row))
    return x


def equal(draw, rows, columns):
    return draw.normal(rows, 1, scale=20.0).expand(rows, columns).clone()


SCORES = (
    Level(ordinary, ""),
    Level(wide, "scores of ±200"),
    Level(near(-1000.0), "scores near -1,000"),
    Level(near(-30.0), "scores near -30"),
    Level(near(-80.0), "scores near -80"),
    Level(near(1000.0), "scores near 1,000"),
    Level(ordered(0.05), "scores that rise along every row"),
    Level(ordered(-0.05), "scores that fall along every row"),
    Level(rows_apart, "rows 700 apart"),
    Level(equal, "equal scores"),
)


def first_masked(draw, x):
    """-inf from the start of every row: its first two thirds."""
    x[:, : 2 * x.shape[1] // 3] = -math.inf
    return x


def last_masked(draw, x):
    """-inf up to the end of every row: all but its first third, or but its first element."""
    x[:, max(1, x.shape[1] // 3) :] = -math.inf
    return x


def some_masked(draw, x):
    """-inf here and there, and never in the middle of a row."""
    hidden = draw.uniform(*x.shape) < 0.5
    hidden[:, x.shape[1] // 2] = False
    return x.masked_fill(hidden, -math.inf)


def rows_masked(draw, x):
    """The first of every two rows is nothing but -inf."""
    x[::2] = -math.inf
    return x


def unmasked(draw, x):
    return x


MASKS = (
    Level(unmasked, ""),
    Level(first_masked, "-inf first"),
    Level(last_masked, "-inf last"),
    Level(some_masked, "some -inf"),
)
EMPTY_ROWS = Level(rows_masked, "rows of nothing but -inf")
