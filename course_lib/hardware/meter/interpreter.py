"""Where Triton's interpreter needs to be repaired.

A loop over a run-time bound calls `int()` on a loaded scalar, which the interpreter holds as an array of shape [1].
NumPy 2.4 refuses that ("only 0-dimensional arrays can be converted"); Triton 3.7 squeezes the array first. On Triton
3.6 the traffic meter's module gives the interpreter the same behaviour.

It also refuses what compiled kernels do (seen with Triton 3.6 to 3.9): a scalar condition in a mask, methods of a float
argument, names imported from triton.language, autotuned kernels without a GPU. The worker, in which checks run, is
always repaired, and so is a notebook, where answers are called outside of checks.
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
    if needs_repair() or "IPython" in sys.modules and version_pair("triton") is not None:
        from course_lib.hardware.meter.traffic import repair_interpreter  # the one module that touches Triton's inside

        repair_interpreter()
