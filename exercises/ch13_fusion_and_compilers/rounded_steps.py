"""Slips of 13.2 and 13.6: one step of a kernel that computes in float32 is rounded to 16 bits."""

from __future__ import annotations

from course_lib.checker import edits
from course_lib.checker.specification.edits import Edit


def rounded_on_the_way(to: str, **steps: tuple[str, str]) -> tuple[Edit, ...]:
    """A slip for each step of a meaning.

    to: "half()", whatever comes in, or "to(x.dtype)". steps: (what it is called, its piece of the text), by name.
    """
    way = "16" if to == "half()" else "own"
    return tuple(
        edit
        for name, (what, piece) in steps.items()
        for edit in edits(
            f"{what} rounded to 16 bits on the way. Compute in float32, and round only what you store, to the results' "
            "own dtype.",
            alone=True,
            **{f"rounded_on_the_way__{name}_{way}": (piece, f"({piece}).{to}.float()")},
        )
    )
