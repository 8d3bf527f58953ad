"""Where Triton's interpreter needs to be repaired.

A loop over a run-time bound calls `int()` on a loaded scalar, which the interpreter holds as an array of shape [1].
NumPy 2.4 refuses that ("only 0-dimensional arrays can be converted"); Triton 3.7 squeezes the array first. On Triton
3.6 the traffic meter's module gives the interpreter the same behaviour.

A mask that a scalar condition is part of is refused by the interpreter (seen with Triton 3.9), though not by the meter
under which checks run. In a notebook, where answers are called outside of checks, that is repaired too.
"""

import importlib.metadata
import sys

FIXED_IN = (3, 7)
BREAKS_FROM_NUMPY = (2, 4)


def version_pair(distribution: str) -> tuple[int, int] | None:
    """(major, minor) of an installed package, or None."""
    try:
        major, minor = importlib.metadata.version(distribution).split(".")[:2]
    except importlib.metadata.PackageNotFoundError:
        return None
    return int(major), int(minor)


def needs_repair() -> bool:
    """True for the pairs of Triton and NumPy on which a loop with a run-time bound fails."""
    triton, numpy = version_pair("triton"), version_pair("numpy")
    return triton is not None and numpy is not None and triton < FIXED_IN and numpy >= BREAKS_FROM_NUMPY


def repair_where_needed() -> None:
    """Repair the interpreter on the affected pairs, and in notebooks; Triton is imported only there: others start fast.

    A notebook imports Triton itself in its first cell.
    """
    if needs_repair():
        from course_lib.hardware.meter.traffic import repair_interpreter  # the one module that touches Triton's inside

        repair_interpreter()
    if "IPython" in sys.modules and version_pair("triton") is not None:
        from course_lib.hardware.meter.traffic import repair_masks

        repair_masks()
