"""What exercises on paper share: slips in formulas."""

from __future__ import annotations

from collections.abc import Callable

from course_lib.checker.specification.edits import Edit, edits
from course_lib.checker.specification.model import Slip

PLACES = 7  # that results are rounded to, from 0 on


def for_arguments(count: int, function: Callable) -> Callable:
    """A slip's formula for one of an exercise's functions, told apart by how many arguments it takes."""
    return lambda *args: function(*args) if len(args) == count else None


def rounded_result(*oracles: Callable) -> Slip:
    """A slip of functions that give floats, or tuples with floats: rounded to a few places behind the point."""

    def rounding(oracle: Callable, places: int) -> Callable:
        def formula(*args):
            try:
                right = oracle(*args)
            except Exception:  # the arguments are another function's
                return None
            numbers = right if isinstance(right, tuple) else (right,)
            told = tuple(round(one, places) if isinstance(one, float) else one for one in numbers)
            if any(one and not rounded for one, rounded in zip(numbers, told)):
                return None  # 0 may come from anything
            return told if isinstance(right, tuple) else told[0]

        return formula

    return Slip(
        "result_rounded",
        "The result is rounded. Return the number with all its digits: whoever prints it rounds it.",
        formula=tuple(rounding(oracle, places) for oracle in oracles for places in range(PLACES)),
    )


def factors_missing(*names: str) -> tuple[Edit, ...]:
    """For each of these factors, which stand behind a `*`, an edit that leaves it out."""
    return tuple(
        edit
        for name in names
        for edit in edits(f"`{name}` is missing as a factor.", **{f"factor_missing__{name}": (f"* {name}", "* 1")})
    )
