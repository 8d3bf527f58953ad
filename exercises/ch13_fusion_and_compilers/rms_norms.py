"""What 13.2 and 13.8 share: the numbers they are tried with, and what is said of a norm that went wrong."""

from __future__ import annotations

SUM_FOR_MEAN = "The squares were summed and not averaged. Divide by the number of columns."
NORM_OF_X = "x was normalised without the residual. Normalise the sum."
SUM_NOT_STORED = "The second result is x as it came. It is the sum, which the next addition needs."
EPSILON_MISSING = "epsilon is missing. Add it to the mean square, under the root."
EPSILON_OUTSIDE = "epsilon was added to the root. It belongs under the root, to the mean square."
EPSILON_DIVIDED = "epsilon was added to the sum of squares, before it was divided by the number of columns."
ROOT_MISSING = "The root is missing: the rows are divided by the mean square."
MULTIPLIED = "The rows are multiplied by the root of the mean square. Divide by it."
WEIGHT_MISSING = "The weight is missing."
MEAN_SUBTRACTED = "The mean was subtracted, as LayerNorm does. RMSNorm subtracts nothing."
STRIDES_OF_X = "The residual was read with x's row stride. It has one of its own."
ONE_ADDED = "The weight was taken as 1 + weight. That is another model's norm (Gemma's); here it multiplies as it is."


def ordinary(draw, *shape):
    return draw.normal(*shape)


def large(draw, *shape):
    """Their squares overflow float16."""
    return draw.normal(*shape, scale=60.0, shift=300.0)


def tiny(draw, *shape):
    """The mean of their squares is about 1e-5, so that it matters where epsilon stands."""
    return draw.normal(*shape, scale=2e-3)
