"""What is asked beside the right numbers of a kernel that does all of a function's work."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from course_lib.checker import Allocates, Forbids, LaunchesTriton, Moves, ReadByKernels, Requirement
from exercises.topics.pytorch_operations import ARITHMETIC


@dataclass(frozen=True)
class OneKernel(LaunchesTriton):
    """One launch in each call of a function; calls of the exercise's other functions need none.

    Attributes:
        of: its name, where the exercise has several functions.
    """

    at_most: int | None = 1
    of: str | None = None

    def complaint(self, case, seen):
        return super().complaint(case, seen) if case.entry == self.of else None


def in_one_kernel(
    *forbidden: str,
    elements: Callable,
    least_bytes: Callable,
    reads: Sequence[int] = (),
    of: str | None = None,
    moves: type[Moves] = Moves,
) -> tuple[Requirement, ...]:
    """One kernel does all of the work, and moves no more bytes than it must.

    Args:
        forbidden: operations of PyTorch that would do a part of it, beside those for arithmetic.
        elements: as `Allocates` takes it.
        least_bytes: as `Moves` takes it.
        reads: the places of the arguments that the kernel reads, as `ReadByKernels` takes them.
        of: the function's name, where the exercise has several.
        moves: how the bytes are counted.
    """
    asked = (OneKernel(of=of), Forbids((*ARITHMETIC, *forbidden)), Allocates(elements), moves(least_bytes))
    return (*asked, ReadByKernels(tuple(reads))) if reads else asked
