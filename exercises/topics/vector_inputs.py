"""Numbers for the contracts of exercises: magnitudes that each break something."""

from __future__ import annotations

from course_lib.checker.specification.contract import Level


def spread(scale=1.0, around=0.0):
    """Normal numbers of both signs as large as `scale`, around a number."""

    def make(draw, *shape):
        return draw.normal(*shape, scale=scale, shift=around)

    return make


ordinary, huge, tiny = spread(), spread(1e30), spread(1e-24)  # the judge takes two numbers below 1e-30 for one


def negative(draw, *shape):
    """Nothing above -1."""
    return draw.uniform(*shape, low=-3.0, high=-1.0)


def with_zeros(draw, *shape):
    """About every third number is 0."""
    return draw.normal(*shape) * draw.integers(*shape, low=0, high=3).bool()


VALUES = (
    Level(ordinary, ""),
    Level(negative, "negative numbers"),
    Level(with_zeros, "zeros among them"),
)
OF_FLOAT32 = (*VALUES, Level(huge, "values near 1e30"), Level(tiny, "values near 1e-24"))
