"""What exercises on paper share: slips in formulas."""

from __future__ import annotations

from collections.abc import Callable


def for_arguments(count: int, function: Callable) -> Callable:
    """A slip's formula for one of an exercise's functions, told apart by how many arguments it takes."""
    return lambda *args: function(*args) if len(args) == count else None
