"""What exercises on paper share: slips in formulas."""

from __future__ import annotations

import math
from collections.abc import Callable

from course_lib.checker.specification.model import Slip, Slips


def for_arguments(count: int, function: Callable) -> Callable:
    """A slip's formula for one of an exercise's functions, told apart by how many arguments it takes."""
    return lambda *args: function(*args) if len(args) == count else None


def product(s: Slips, **factors: float) -> float:
    """The product of these, less the factors that a slip leaves out: `factor_missing__layers`."""
    return math.prod(value for name, value in factors.items() if not s(f"factor_missing__{name}"))


def factors_missing(*names: str) -> tuple[Slip, ...]:
    """A slip of `product` for each of these factors."""
    return tuple(Slip(f"factor_missing__{name}", f"`{name}` is missing as a factor.") for name in names)
